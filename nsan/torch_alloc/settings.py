"""Settings of the caching allocator, and the one rule that differs by version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from nsan.errors import UsageError
from nsan.torch_alloc.constants import (
    LARGE_SEGMENT_BYTES,
    MIN_LARGE_BYTES,
    N_DIVISIONS,
)
from nsan.units import MIB

TieBreak = Literal["address", "block", "segment"]
TIE_BREAKS: Final[tuple[str, ...]] = get_args(TieBreak)
"""Order of free blocks of one size: lowest address (to 2.11), oldest block (2.12), oldest segment,
then address (from 2.13)."""

_TIE_BREAK_SINCE: Final[tuple[tuple[tuple[int, int], TieBreak], ...]] = (
    ((2, 13), "segment"),
    ((2, 12), "block"),
    ((0, 0), "address"),
)


def tie_break_of(version: tuple[int, int]) -> TieBreak:
    """Give the order among free blocks of one size in a version of PyTorch.

    Parameters
    ----------
    version : tuple of (int, int)
        As (2, 12).

    Returns
    -------
    str
        "address", "block" or "segment". Source: comparators of the wheels, ``allocator.md`` 3.2.
    """
    return next(rule for since, rule in _TIE_BREAK_SINCE if version >= since)


@dataclass(frozen=True)
class AllocatorSettings:
    """What decides how the allocator behaves (``PYTORCH_CUDA_ALLOC_CONF`` and the version).

    Attributes
    ----------
    max_split_bytes : int, optional
        Blocks of this size and more are never split (``max_split_size_mb``); None: no limit.
    max_non_split_rounding_bytes : int, default 20 MiB
        How much larger than asked an unsplit block may be, where there is such a limit.
    roundup_power2_divisions : tuple of 16 int
        Steps between powers of two to which a request is rounded, by size from 1 MiB up; 0 and 1: none.
    garbage_collection_threshold : float, default 0.0
        Share of the allowed memory from which old cached segments are released; 0: never.
    expandable_segments : bool, default False
        One growing mapping per pool and stream instead of many segments.
    memory_fraction : float, optional
        Share of the GPU's memory that may be reserved; no limit if None, or if ``device_bytes`` is
        not known.
    device_bytes : int, optional
        The GPU's memory; None: without end.
    large_segment_bytes : int, default 20 MiB
        Segment for large requests below 10 MiB.
    tie_break : str, default "address"
        Order among free blocks of one size; :func:`tie_break_of`.
    is_caching : bool, default True
        False: no cache (``PYTORCH_NO_CUDA_MEMORY_CACHING``, or a pluggable allocator): every request is
        a segment of just its size, which is released when its free completes. Of the other settings
        only the limits count then.
    """

    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * N_DIVISIONS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    memory_fraction: float | None = None
    device_bytes: int | None = None
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    tie_break: TieBreak = "address"
    is_caching: bool = True

    def __post_init__(self) -> None:
        """Refuse what PyTorch refuses."""
        if self.tie_break not in TIE_BREAKS:
            msg = f"There is no tie-break {self.tie_break!r}: choose {', '.join(TIE_BREAKS)}."
            raise UsageError(msg)
        if self.max_split_bytes is not None and self.max_split_bytes < LARGE_SEGMENT_BYTES:
            msg = f"max_split_size of {self.max_split_bytes} byte: PyTorch takes 20 MiB or more."
            raise UsageError(msg)
        if self.large_segment_bytes < MIN_LARGE_BYTES:
            msg = (
                f"large_segment_size of {self.large_segment_bytes} byte: take 10 MiB or more, for "
                "the requests below 10 MiB that it serves."
            )
            raise UsageError(msg)
        if not 0 <= self.garbage_collection_threshold < 1:
            msg = (
                f"garbage_collection_threshold of {self.garbage_collection_threshold}: take 0 (off) "
                "or a share below 1."
            )
            raise UsageError(msg)
        divisions = self.roundup_power2_divisions
        if len(divisions) != N_DIVISIONS or any(d < 0 or d & (d - 1) for d in divisions):
            msg = (
                f"roundup_power2_divisions of {divisions}: take {N_DIVISIONS} powers of two, or 0."
            )
            raise UsageError(msg)

    @property
    def limit_bytes(self) -> int | None:
        """What may be reserved: the GPU's memory, or the share of it that is allowed; None: no limit.

        Examples
        --------
        >>> AllocatorSettings(memory_fraction=0.5, device_bytes=64 << 20).limit_bytes >> 20
        32
        """
        if self.device_bytes is None or self.memory_fraction is None:
            return self.device_bytes
        return min(self.device_bytes, int(self.memory_fraction * self.device_bytes))

    @classmethod
    def from_rows(cls, values: Mapping[str, str]) -> AllocatorSettings:
        """Read the settings of a snapshot.

        Parameters
        ----------
        values : mapping of str to str
            The table ``allocator_settings``: value by name.

        Returns
        -------
        AllocatorSettings
            What is not named, or has a value that makes no sense, has PyTorch's default;
            :func:`nsan.torch_alloc.file_settings.odd_settings` names the latter.
        """
        from nsan.torch_alloc.file_settings import settings_of

        return settings_of(values)[0]


DEFAULT_SETTINGS: Final = AllocatorSettings()
"""PyTorch as it comes, up to 2.11."""
