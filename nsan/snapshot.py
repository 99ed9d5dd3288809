"""A memory snapshot of PyTorch's caching allocator: typed lazy frames, and what is known about it.

Nothing here reads a file; :func:`nsan.open_snapshot` does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from nsan.text import safe

if TYPE_CHECKING:
    import polars as pl

History = Literal["complete", "partial", "none"]
"""From an empty allocator on; from some moment on; no history."""

SNAPSHOT_KIND: Final = "torch-snapshot"


@dataclass(frozen=True)
class DeviceHistory:
    """What the history of one GPU holds."""

    device_id: int
    n_entries: int
    history: History
    suspect_overflow: bool
    """The number of entries is round: a full ring buffer may have lost older ones."""
    missing_actions: list[str] = field(default_factory=list)
    """Kinds of entries that must have happened and are not there (``skip_actions``)."""


@dataclass(frozen=True)
class SnapshotInfo:
    """What is known about a snapshot besides its rows. Holds no path and no text of a stack."""

    source: str
    """Name of the file, without its folder."""
    kind: str
    """``torch-snapshot``, or ``nsan-model`` where nsan wrote it."""
    n_bytes: int
    """Size of the pickle, unpacked."""
    shape: str
    """``dict``, or ``list`` (segments only)."""
    protocol: int
    torch_version: str
    """Lowest version whose keys these are; empty where no caching allocator made it (``model``)."""
    torch_versions: str
    """All versions that it can be, as ``2.9 to 2.11``; empty as well."""
    devices: list[DeviceHistory] = field(default_factory=list)
    n_host_segments: int = 0
    """Of pinned host memory; left out."""
    n_host_entries: int = 0
    unknown_keys: dict[str, int] = field(default_factory=dict)
    """By place and key: items that have it."""
    unknown_actions: dict[str, int] = field(default_factory=dict)
    odd_cells: dict[str, int] = field(default_factory=dict)
    """By place and key: values of a wrong type or out of range, null where no reading makes sense.

    Segments and blocks that no machine can have (larger than 2^47 byte, past the last address), and
    segments and entries of a GPU beyond number 127, are left out and counted by what cannot be.
    """
    model: dict[str, str | None] = field(default_factory=dict)
    """How nsan's model made it."""
    warnings: list[str] = field(default_factory=list)
    """Sentences about what does not fit together."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, repr=False)
class Snapshot:
    """One memory snapshot as typed lazy frames.

    Attributes
    ----------
    segments, blocks : LazyFrame
        The state when it was taken, by device and address; columns as in
        :mod:`nsan.torch_alloc.tables`.
    allocator_events : LazyFrame
        The history, by device and place in it.
    stacks : LazyFrame
        Frames of the call stacks that the others name.
    allocator_settings, annotations : LazyFrame
        Settings by name; ranges that the profiler or the user annotated.
    info : SnapshotInfo
        Version, completeness, what could not be read.
    """

    segments: pl.LazyFrame
    blocks: pl.LazyFrame
    allocator_events: pl.LazyFrame
    stacks: pl.LazyFrame
    allocator_settings: pl.LazyFrame
    annotations: pl.LazyFrame
    info: SnapshotInfo

    def __repr__(self) -> str:
        made = (
            f"torch {self.info.torch_versions}" if self.info.torch_versions else "plain allocator"
        )
        return f"<Snapshot {safe(self.info.source)}, {safe(made)}>"
