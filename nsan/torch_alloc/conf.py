"""Reading of ``PYTORCH_CUDA_ALLOC_CONF``, as PyTorch reads it.

Source: ``CUDAAllocatorConfig.cpp`` (2.6.0) and ``c10/core/AllocatorConfig.h`` (from 2.10).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from nsan.errors import UsageError
from nsan.torch_alloc.constants import MIN_LARGE_BYTES, N_DIVISIONS
from nsan.torch_alloc.settings import DEFAULT_SETTINGS, AllocatorSettings
from nsan.units import GIB, MIB

WITHOUT_EFFECT: Final = frozenset(
    {
        "backend",
        "graph_capture_record_stream_reuse",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
        "throw_on_cudamalloc_oom",
    }
)
"""Keys that PyTorch knows and that do not change how much GPU memory the allocator takes."""

_MOST_SEGMENT_BYTES: Final = 1024 * GIB
"""Far more than a GPU has: sums of such segments still fit in 63 bits."""


def parse_conf(text: str, base: AllocatorSettings = DEFAULT_SETTINGS) -> AllocatorSettings:
    """Read settings as PyTorch takes them from ``PYTORCH_CUDA_ALLOC_CONF``.

    Parameters
    ----------
    text : str
        ``key:value`` pairs, separated by commas: ``max_split_size_mb:64,expandable_segments:True``.
        ``roundup_power2_divisions`` takes a power of two for all sizes, or a list as
        ``[256:1,512:2,>:4]`` (by size from so many MiB on).
    base : AllocatorSettings, optional
        What is not named stays as here.

    Returns
    -------
    AllocatorSettings
        In a list of divisions the first size also sets all smaller ones, ``>`` sets the size named last
        and all larger ones, and sizes in between that are not named have none: as in PyTorch.

    Raises
    ------
    UsageError
        If the text is not such a list, or PyTorch refuses a value.

    Examples
    --------
    >>> parse_conf("max_split_size_mb:64").max_split_bytes >> 20
    64
    >>> parse_conf("roundup_power2_divisions:[4:2,16:8,>:1]").roundup_power2_divisions[:6]
    (2, 2, 2, 0, 1, 1)
    """
    found: dict[str, Any] = {}
    for pair in pairs_of(text):
        key, colon, value = (part.strip() for part in pair.partition(":"))
        if key in _READERS and colon and value:
            name, read = _READERS[key]
            found[name] = read(key, value)
        elif key == "backend" and value not in {"", "native"}:
            msg = f"backend:{value} is another allocator, which has no model here; leave it out."
            raise UsageError(msg)
        elif key not in WITHOUT_EFFECT or not value:
            known = ", ".join([*_READERS, *sorted(WITHOUT_EFFECT)])
            msg = f"{pair.strip()!r} is no setting: write key:value with one of {known}."
            raise UsageError(msg)
    return replace(base, **found)


def pairs_of(text: str) -> list[str]:
    """Cut a text at the commas that do not stand in brackets.

    Raises
    ------
    UsageError
        If a bracket is not closed, or not opened.

    Examples
    --------
    >>> pairs_of("max_split_size_mb:64,roundup_power2_divisions:[256:1,>:4]")
    ['max_split_size_mb:64', 'roundup_power2_divisions:[256:1,>:4]']
    """
    if not re.fullmatch(r"[^\[\]]*(\[[^\[\]]*\][^\[\]]*)*", text):
        msg = f"{text!r}: a bracket is not closed, or not opened."
        raise UsageError(msg)
    pairs = re.split(r",(?![^\[]*\])", text)
    return [pair for pair in pairs if pair.strip()]


def field_of(key: str) -> str | None:
    """Give the field of the settings that a key sets; None if it sets none.

    Examples
    --------
    >>> field_of("large_segment_size_mb"), field_of("backend")
    ('large_segment_bytes', None)
    """
    return _READERS[key][0] if key in _READERS else None


def _number(key: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,12}", text):
        msg = f"{key}:{text}: it takes a whole number."
        raise UsageError(msg)
    return int(text)


def _mib(key: str, text: str) -> int:
    return _number(key, text) * MIB


def _large_segment(key: str, text: str) -> int:
    size = _mib(key, text)
    if not MIN_LARGE_BYTES <= size <= _MOST_SEGMENT_BYTES:
        msg = f"{key}:{text}: take 10 to 1048576, as the requests below 10 MiB must fit in it."
        raise UsageError(msg)
    return size


def _above_20_mib(key: str, text: str) -> int:
    size = _mib(key, text)
    if size < 20 * MIB:
        msg = f"{key}:{text}: PyTorch takes 20 or more (up to 2.9 more than 20)."
        raise UsageError(msg)
    return size


def _share(key: str, text: str) -> float:
    if not re.fullmatch(r"\d*\.?\d+", text) or not 0 < float(text) <= 1:
        msg = f"{key}:{text}: it takes a share above 0 and at most 1, as 0.8."
        raise UsageError(msg)
    return float(text)


def _flag(key: str, text: str) -> bool:
    if text not in {"True", "False"}:
        msg = f"{key}:{text}: it takes True or False."
        raise UsageError(msg)
    return text == "True"


def _divisions(key: str, text: str) -> tuple[int, ...]:
    if not text.startswith("["):
        return (_power(key, text, "a number of divisions"),) * N_DIVISIONS
    divisions = [0] * N_DIVISIONS
    last: int | None = None
    for pair in text.strip("[] ").split(","):
        size, colon, steps = (part.strip() for part in pair.partition(":"))
        if not colon:
            msg = f"{key}: {pair.strip()!r} is not SIZE:DIVISIONS, as 256:2 or >:4."
            raise UsageError(msg)
        value = 0 if steps == "0" else _power(key, steps, "a number of divisions")
        if size == ">":
            # From the size named last itself on: PyTorch overwrites that one too.
            at = last or 0
            divisions[at:] = [value] * (N_DIVISIONS - at)
            continue
        bucket = min(_power(key, size, "a size in MiB").bit_length() - 1, N_DIVISIONS - 1)
        if last is None:
            divisions[:bucket] = [value] * bucket
        divisions[bucket] = value
        last = bucket
    return tuple(divisions)


def _power(key: str, text: str, what: str) -> int:
    value = int(text) if re.fullmatch(r"\d{1,12}", text) else 0
    if value == 0 or value & (value - 1):
        msg = f"{key}: {text!r} is not {what}: take a power of two."
        raise UsageError(msg)
    return value


_READERS: Final[dict[str, tuple[str, Callable[[str, str], Any]]]] = {
    "max_split_size_mb": ("max_split_bytes", _above_20_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _above_20_mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    "expandable_segments": ("expandable_segments", _flag),
    "per_process_memory_fraction": ("memory_fraction", _share),
    "large_segment_size_mb": ("large_segment_bytes", _large_segment),
}
"""Field of the settings and reader of the value, by key."""
