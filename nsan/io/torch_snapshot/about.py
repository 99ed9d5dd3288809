"""What is known about a snapshot besides its rows: completeness, and what does not fit together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import polars as pl

from nsan.info import MODEL_KIND
from nsan.io.probe import display_name
from nsan.io.torch_snapshot.fitting import warnings_of_state
from nsan.io.torch_snapshot.reader import RawSnapshot
from nsan.io.torch_snapshot.versions import RAW, Versions
from nsan.snapshot import SNAPSHOT_KIND, DeviceHistory, History, SnapshotInfo

_GROWS: Final = ("segment_alloc", "segment_map")
_SHRINKS: Final = ("segment_free", "segment_unmap")
_OUTSIDE: Final = ("oom", "snapshot", "annotate", "other")
"""Entries that say nothing about where the history begins."""

_ROUND: Final = 1000

_CANNOT_BE: Final = {
    "segments.device": "{} segments are left out: their GPU has a number that PyTorch does not give.",
    "segments.total_size": "{} segments are left out: they are larger than any memory.",
    "segments.address": "{} segments are left out: they reach past the last address.",
    "blocks.size": "{} blocks are left out: they are larger than any memory.",
    "blocks.address": "{} blocks are left out: they reach past the last address.",
    "blocks.requested_size": "{} blocks name an amount asked for that cannot be, as one above their "
    "size: it is left out.",
    "trace.size": "{} entries name a size that cannot be: it is left out.",
    "trace.device": "{} entries are left out: their GPU has a number that PyTorch does not give.",
}
"""By the name of odd cells that leave a gap in the sums."""


def describe(
    raw: RawSnapshot,
    path: Path,
    versions: Versions,
    segments: pl.DataFrame,
    blocks: pl.DataFrame,
    events: pl.DataFrame,
) -> SnapshotInfo:
    """Describe a snapshot.

    Parameters
    ----------
    raw : RawSnapshot
        What the child read.
    path : Path
        The file; only its name is kept.
    versions : Versions
        Of PyTorch.
    segments, blocks, events : DataFrame
        As in :mod:`nsan.torch_alloc.tables`.
    """
    facts = raw.facts
    is_plain = facts["model"].get("allocator") == RAW
    devices = _devices(segments, blocks, events)
    return SnapshotInfo(
        source=display_name(path),
        kind=MODEL_KIND
        if "nsan_model" in facts["keys_seen"].get("snapshot", ())
        else SNAPSHOT_KIND,
        n_bytes=facts["n_bytes"],
        shape=facts["shape"],
        protocol=facts["protocol"],
        # A plain allocator is of no version of PyTorch.
        torch_version="" if is_plain else versions.lowest,
        torch_versions="" if is_plain else versions.text,
        devices=devices,
        n_host_segments=facts["host_segments"],
        n_host_entries=facts["host_traces"],
        unknown_keys=facts["unknown_keys"],
        unknown_actions=facts["unknown_actions"],
        odd_cells=facts["odd_cells"],
        model=facts["model"],
        warnings=[
            *_warnings_of_file(raw, versions),
            *_warnings_of_cells(facts["odd_cells"]),
            *warnings_of_state(segments, blocks),
            *_warnings_of_history(devices),
        ],
    )


def is_round(n: int) -> bool:
    """Say whether a number of entries looks like the size of a ring buffer.

    Examples
    --------
    >>> [n for n in (1, 2, 999, 1000, 1001, 1024, 100_000) if is_round(n)]
    [1, 1000, 1024, 100000]
    """
    return n == 1 or (n >= _ROUND and (n % _ROUND == 0 or n & (n - 1) == 0))


def _devices(
    segments: pl.DataFrame, blocks: pl.DataFrame, events: pl.DataFrame
) -> list[DeviceHistory]:
    ids = sorted({*segments["device_id"].unique(), *events["device_id"].unique()})
    return [
        _device(
            device,
            segments.filter(pl.col("device_id") == device),
            blocks.filter(pl.col("device_id") == device),
            events.filter(pl.col("device_id") == device).select("action", "bytes"),
        )
        for device in ids
    ]


def _device(
    device: int, segments: pl.DataFrame, blocks: pl.DataFrame, events: pl.DataFrame
) -> DeviceHistory:
    n = events.height
    if n == 0:
        return DeviceHistory(device, 0, "none", suspect_overflow=False)
    action = pl.col("action").cast(pl.String)
    counts = dict(events.group_by(action).len().rows())
    steps = events.select(
        pl.when(action.is_in(_GROWS))
        .then(pl.col("bytes"))
        .when(action.is_in(_SHRINKS))
        .then(-pl.col("bytes"))
        .otherwise(0)
        .cast(pl.Int128)
    ).to_series()
    active, allocated = _held(blocks)
    # What there was before the first entry, if no entry is missing.
    before = {
        "segment_free": int(segments["bytes"].cast(pl.Int128).sum()) - int(steps.sum()),
        "free_completed": active - counts.get("alloc", 0) + counts.get("free_completed", 0),
        "free_requested": allocated - counts.get("alloc", 0) + counts.get("free_requested", 0),
    }
    fits = _begins_empty(events) and bool((steps.cum_sum() >= 0).all())
    missing = [kind for kind, amount in before.items() if amount < 0]
    if before["segment_free"] == 0 and fits and before["free_completed"] > 0:
        missing.append("alloc")
    history: History = "complete" if fits and not any(before.values()) else "partial"
    overflow = history == "partial" and is_round(n)
    return DeviceHistory(device, n, history, overflow, missing if n > 1 else [])


def _held(blocks: pl.DataFrame) -> tuple[int, int]:
    """Count the blocks that are active, and those of them that are allocated."""
    state = blocks["state"].cast(pl.String)
    allocated = int((state == "active_allocated").sum())
    return allocated + int((state == "active_pending_free").sum()), allocated


def _begins_empty(events: pl.DataFrame) -> bool:
    first = events.filter(~pl.col("action").cast(pl.String).is_in(_OUTSIDE)).head(1)
    return first["action"].cast(pl.String).to_list()[:1] in ([_GROWS[0]], [_GROWS[1]])


def _warnings_of_file(raw: RawSnapshot, versions: Versions) -> list[str]:
    found = []
    if raw.facts["has_segments"] and "segment_pool_id" not in raw.facts["keys_seen"]["segments"]:
        found.append(
            "The file names no pools (torch 2.0): every segment is taken as one of the default pool."
        )
    if not versions.is_consistent:
        found.append("The file has keys of different versions of torch; the newest ones decide.")
    return found


def _warnings_of_cells(odd_cells: Mapping[str, int]) -> list[str]:
    return [text.format(odd_cells[name]) for name, text in _CANNOT_BE.items() if name in odd_cells]


def _warnings_of_history(devices: list[DeviceHistory]) -> list[str]:
    found = []
    for device in devices:
        if device.missing_actions:
            kinds = ", ".join(device.missing_actions)
            found.append(
                f"The history of GPU {device.device_id} lacks entries of these kinds: {kinds} "
                "(skip_actions?)."
            )
        if device.suspect_overflow:
            found.append(
                f"The history of GPU {device.device_id} has {_entries(device.n_entries)}, the size "
                "of a ring buffer: older ones are probably lost (max_entries)."
            )
    return found


def _entries(n: int) -> str:
    return "one entry" if n == 1 else f"{n} entries"
