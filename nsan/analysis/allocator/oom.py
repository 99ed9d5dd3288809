"""Out of memory: what was asked for, what was there, and why it did not do."""

from __future__ import annotations

from functools import cache
from typing import Final

import polars as pl

from nsan.analysis.allocator.blocks import GPU
from nsan.analysis.allocator.call_sites import SITE_COLUMNS, SITE_READS, with_call_sites
from nsan.analysis.allocator.replayed import (
    BEFORE,
    LEVELS,
    REPLAY_KIND,
    REPLAY_READS,
    Replays,
    replays_of,
)
from nsan.analysis.catalog import analysis
from nsan.analysis.result import Result, derived, recorded
from nsan.torch_alloc.constants import DEFAULT_POOL, SMALL_BYTES
from nsan.torch_alloc.tables import POOL_SIZE

_READS: Final = {**REPLAY_READS, "stacks": SITE_READS}

VERDICT: Final = pl.Enum(["fragmentation", "elsewhere", "capacity", "unexplained"])
"""Why a request failed. ``fragmentation``: the free blocks that may serve it (its pool, stream and size
class) are enough together, and none alone. ``elsewhere``: only with the free blocks of other pools, streams
or size classes. ``capacity``: all free blocks together are less than the request. ``unexplained``: one
block was large enough; then a setting forbade it (``max_split_size``), or the replay is wrong."""

ALLOCATOR_OOMS: Final = Result(
    "allocator_ooms",
    "one request that failed for want of memory",
    (
        GPU,
        recorded("sequence", pl.Int64, "id", "Place of the entry in the GPU's history."),
        derived("time_ns", pl.Int64, "ns", "Since the GPU's first entry; null: no times recorded."),
        recorded("request_bytes", pl.Int64, "byte", "Asked for, rounded."),
        derived(
            "verdict",
            VERDICT,
            "label",
            "fragmentation: enough free for it, in pieces; elsewhere: enough only with other pools, "
            "streams or the other size class; capacity: not enough; unexplained: one block would do.",
        ),
        derived("reserved_bytes", pl.Int64, "byte", "Held from the driver at that time."),
        derived("active_bytes", pl.Int64, "byte", "In blocks in use."),
        derived("cached_bytes", pl.Int64, "byte", "Reserved and free, of all pools."),
        derived("fitting_bytes", pl.Int64, "byte", "Of these, in its pool, stream and size class."),
        derived("largest_fitting_bytes", pl.Int64, "byte", "Largest block of these; null: none."),
        recorded(
            "device_free_bytes",
            pl.Int64,
            "byte",
            "Free on the GPU, as recorded; says nothing where the pool is of managed memory.",
        ),
        derived("pool", pl.String, "label", "Its pool; the default where none is recorded."),
        derived("size_class", POOL_SIZE, "label", "Small: up to 1 MiB."),
        recorded("stream", pl.UInt64, "id", "Its stream; 0: default."),
        *SITE_COLUMNS,
        REPLAY_KIND,
    ),
    nothing="No request failed in the recorded history.",
)


@analysis(
    question="Why did requests fail for want of memory?",
    result=ALLOCATOR_OOMS,
    reads=_READS,
    complexity="O(n log n) for n entries, and O(n) for each failure; the replay is a loop",
    source="allocator.md 2.3, 7",
)
def allocator_ooms(
    segments: pl.LazyFrame,
    blocks: pl.LazyFrame,
    allocator_events: pl.LazyFrame,
    allocator_settings: pl.LazyFrame,
    stacks: pl.LazyFrame,
) -> pl.LazyFrame:
    """Compare each request that failed with the free blocks of that moment.

    Before it fails PyTorch returns all segments without a block in use and tries again, so what is free
    here is free in segments that are in use, or in private pools.

    Parameters
    ----------
    segments, blocks : LazyFrame
        Tables of a snapshot: the state at the end.
    allocator_events : LazyFrame, ``ALLOCATOR_EVENTS``
        The history, in any order.
    allocator_settings : LazyFrame, ``ALLOCATOR_SETTINGS``
        Settings, among them the version.
    stacks : LazyFrame, ``STACKS``
        Call stacks, in any order.

    Returns
    -------
    LazyFrame, ``ALLOCATOR_OOMS``
        By GPU and sequence.

    Examples
    --------
    >>> from nsan.torch_alloc.tables import SNAPSHOT_TABLES as tables
    >>> allocator_ooms(*(tables[name].empty() for name in _READS)).collect().height
    0
    """

    def build() -> pl.DataFrame:
        found = replays_of(segments, blocks, allocator_events, allocator_settings)
        failed = _with_free(found, _failures(found))
        return (
            with_call_sites(failed.lazy(), stacks)
            .with_columns(verdict=_verdict())
            .sort("device_id", "sequence")
            .collect()
        )

    return ALLOCATOR_OOMS.from_rows(build)


def _failures(found: Replays) -> pl.DataFrame:
    size = pl.col("bytes").fill_null(0)
    small = pl.when(size <= SMALL_BYTES).then(pl.lit("small")).otherwise(pl.lit("large"))
    failed = found.events.filter(pl.col("action") == "oom").select(
        "device_id",
        "sequence",
        "stream",
        "stack_id",
        "device_free_bytes",
        pl.col("pool").fill_null(DEFAULT_POOL),
        request_bytes=size,
        size_class=small.cast(POOL_SIZE),
    )
    levels = found.series.select("device_id", "sequence", "time_ns", *LEVELS)
    return failed.join(levels, on=["device_id", "sequence"], how="left").join(
        found.checks.select("device_id", "replay_kind"), on="device_id", how="left"
    )


def _with_free(found: Replays, failed: pl.DataFrame) -> pl.DataFrame:
    """Add to each failure what was free at that moment."""
    columns = ("device_id", "_changed", "pool", "stream", "size_class")
    rows = []
    free_at = cache(found.free_at)  # a program that tries again finds what it found before
    for gpu, changed, *wanted in failed.pipe(_with_last_change, found).select(columns).iter_rows():
        free = free_at(gpu, changed)
        fits = pl.all_horizontal(
            pl.col(name) == value for name, value in zip(columns[2:], wanted, strict=True)
        )
        sizes = free.filter(fits)["bytes"]
        rows.append((free["bytes"].sum(), sizes.sum(), sizes.max()))
    names = ("cached_bytes", "fitting_bytes", "largest_fitting_bytes")
    added = pl.DataFrame(rows, schema=dict.fromkeys(names, pl.Int64), orient="row")
    return pl.concat([failed, added], how="horizontal")


def _with_last_change(failed: pl.DataFrame, found: Replays) -> pl.DataFrame:
    """Name the last entry before each failure that may have changed what is free."""
    changes = found.events.filter(~pl.col("action").is_in(["oom", "snapshot", "annotate", "other"]))
    last = changes.select("device_id", "sequence", _changed="sequence").sort("sequence")
    near = (
        failed.with_row_index("_row")
        .sort("sequence")
        .join_asof(last, on="sequence", by="device_id", check_sortedness=False)
        .sort("_row")
    )
    return near.with_columns(pl.col("_changed").fill_null(BEFORE)).drop("_row")


def _verdict() -> pl.Expr:
    request = pl.col("request_bytes")
    return (
        pl.when(pl.col("largest_fitting_bytes") >= request)
        .then(pl.lit("unexplained"))
        .when(pl.col("fitting_bytes") >= request)
        .then(pl.lit("fragmentation"))
        .when(pl.col("cached_bytes") >= request)
        .then(pl.lit("elsewhere"))
        .otherwise(pl.lit("capacity"))
        .cast(VERDICT)
    )
