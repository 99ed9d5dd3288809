"""Which versions of PyTorch a snapshot can be of, by the keys that it has and lacks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

Version = tuple[int, int]

NEWEST: Final = (2, 14)
"""The newest version whose snapshots were examined."""

RAW: Final = "raw"
"""What nsan's model calls an allocator that keeps nothing, in the facts that it writes."""

_OLDEST: Final = (2, 0)


@dataclass(frozen=True)
class Versions:
    """The lowest version that fits, and all that fit as text."""

    lowest: str
    text: str
    is_consistent: bool = True
    """No version has just these keys where this is false."""


_SINCE: Final[tuple[tuple[Version, str, str], ...]] = (
    ((2, 1), "segments", "segment_pool_id"),
    ((2, 2), "trace", "time_us"),
    ((2, 3), "snapshot", "allocator_settings"),
    ((2, 5), "snapshot", "external_annotations"),
    ((2, 8), "trace", "compile_context"),
    ((2, 9), "settings", "graph_capture_record_stream_reuse"),
    ((2, 10), "trace", "user_metadata"),
    ((2, 12), "trace", "pool_id"),
    ((2, 13), "settings", "max_round_threshold"),
    ((2, 13), "settings", "max_cached_size"),
    ((2, 14), "snapshot", "host_segments"),
    ((2, 14), "snapshot", "host_traces"),
)
"""First version, place and name of a key. Source: ``allocator.md`` 7, from wheels and real files."""


def versions_of(facts: dict[str, Any], *, n_segments: int, n_entries: int) -> Versions:
    """Tell the versions of PyTorch by what the file has.

    Parameters
    ----------
    facts : dict
        What the child found: keys by place, settings, the model's facts.
    n_segments, n_entries : int
        Where there are none, their keys cannot tell.

    Returns
    -------
    Versions
        A file of nsan's model says its version itself.
    """
    modelled = facts["model"].get("torch_version")
    if modelled is not None and re.fullmatch(r"\d{1,4}\.\d{1,4}", modelled):
        return Versions(modelled, modelled)
    keys = {place: set(names) for place, names in facts["keys_seen"].items()}
    keys["settings"] = set(facts["settings"])
    can_tell = {
        "segments": n_segments > 0,
        "trace": n_entries > 0,
        "snapshot": facts["shape"] == "dict",
        "settings": bool(keys["settings"]),
    }
    low, high = _OLDEST, None
    for since, place, key in _SINCE:
        if key in keys.get(place, ()):
            low = max(low, since)
        elif can_tell[place]:
            before = (since[0], since[1] - 1)
            high = before if high is None else min(high, before)
    return _told(low, high)


def _told(low: Version, high: Version | None) -> Versions:
    lowest = f"{low[0]}.{low[1]}"
    if high is None:
        return Versions(lowest, f"{lowest} or newer")
    if high < low:
        return Versions(lowest, f"{lowest} or newer", is_consistent=False)
    highest = f"{high[0]}.{high[1]}"
    return Versions(lowest, lowest if high == low else f"{lowest} to {highest}")
