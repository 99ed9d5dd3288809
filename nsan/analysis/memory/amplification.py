"""Memory that moved more often than once, and memory that was prefetched for nothing.

Amplification says how often a byte moved; what the driver's prefetcher brought and the driver then
evicted is an upper bound of waste, because the use of resident memory leaves no trace.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.intervals import subtraction, union
from nsan.analysis.result import DEVICE, PID, Result, derived, recorded
from nsan.analysis.segments import cut, edges_of
from nsan.analysis.slices import inside, stretches
from nsan.uvm.constants import (
    CAUSE_COHERENCE,
    CAUSE_EVICTION,
    CAUSE_PREFETCH,
    MANAGED_KINDS,
    PAGE_BYTES,
    VA_BLOCK_BYTES,
)

_KEYS: Final = ["pid", "device_id"]
_ORDER: Final = ["start_ns", "end_ns", "comes", "cause_id"]
"""Of events in a place: total, but for rows that are the same."""

AMPLIFICATION: Final = Result(
    "amplification",
    "migrations and fault rows of one GPU of one process",
    (
        PID,
        DEVICE,
        recorded("htod_bytes", pl.Int64, "byte", "Moved from the host to the GPU."),
        derived("unique_htod_bytes", pl.Int64, "byte", "Distinct bytes of these."),
        derived("htod_amplification", pl.Float64, "number", "How often each of them came."),
        recorded("dtoh_bytes", pl.Int64, "byte", "Moved from the GPU to the host."),
        derived("unique_dtoh_bytes", pl.Int64, "byte", "Distinct bytes of these."),
        derived("dtoh_amplification", pl.Float64, "number", "How often each of them left."),
        recorded("dtod_bytes", pl.Int64, "byte", "Moved from another GPU to this one."),
        derived("unique_dtod_bytes", pl.Int64, "byte", "Distinct bytes of these."),
        derived("dtod_amplification", pl.Float64, "number", "How often each of them came."),
        derived("moved_bytes", pl.Int64, "byte", "Moved in any direction."),
        derived(
            "peak_managed_bytes", pl.Int64, "byte", "Most managed memory of the process at once."
        ),
        derived("moved_per_managed", pl.Float64, "number", "Moved over most managed memory."),
        derived("n_fault_rows", pl.Int64, "rows", "GPU fault rows."),
        derived(
            "fault_row_bytes", pl.Float64, "byte", "Into the GPU by faults, per GPU fault row."
        ),
    ),
)

PREFETCH_SHARE: Final = Result(
    "prefetch_share",
    "what page faults brought to one GPU of one process",
    (
        PID,
        DEVICE,
        derived("fault_bytes", pl.Int64, "byte", "Into the GPU by faults and driver prefetch."),
        recorded("coherence_bytes", pl.Int64, "byte", "Of these, the faulted pages."),
        recorded("prefetch_bytes", pl.Int64, "byte", "Of these, added by the driver's prefetcher."),
        derived("prefetch_fraction", pl.Float64, "fraction", "Prefetched of fault_bytes."),
        derived("n_pages_prefetched", pl.Int64, "pages", "4 KiB pages: most faults avoided."),
        derived(
            "no_evidence_of_use_bytes",
            pl.Int64,
            "byte",
            "Prefetched, and evicted next: an upper bound of waste, as use leaves no trace.",
        ),
        derived("no_evidence_of_use_fraction", pl.Float64, "fraction", "Of prefetch_bytes."),
    ),
)


def _ratio(part: str, whole: str) -> pl.Expr:
    return pl.when(pl.col(whole) > 0).then(pl.col(part) / pl.col(whole))


@analysis(
    question="How many times did the same memory move?",
    result=AMPLIFICATION,
    reads={
        "migrations": ("start_ns", "pid", "device_id", "va", "bytes", "direction", "cause_id"),
        "gpu_faults": ("pid", "device_id"),
        "allocations": ("alloc_ns", "free_ns", "pid", "bytes", "kind"),
    },
    source="domain.md E-13",
)
def amplification(
    migrations: pl.LazyFrame, gpu_faults: pl.LazyFrame, allocations: pl.LazyFrame
) -> pl.LazyFrame:
    """Compare what moved with the distinct memory that moved, and with what was there.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        One row per fault row.
    allocations : LazyFrame, ``ALLOCATIONS``
        One row per allocation; one from before the capture is there from the start on.

    Returns
    -------
    LazyFrame, ``AMPLIFICATION``
        One row per process and GPU with migrations or fault rows, in that order. A ratio is null
        where it has no denominator. Managed memory belongs to a process and not to a GPU: all rows
        of a process have the same peak. Migrations without a start, address or size are left out.

    Examples
    --------
    >>> from nsan.schema import ALLOCATIONS, GPU_FAULTS, MIGRATIONS
    >>> tables = (MIGRATIONS, GPU_FAULTS, ALLOCATIONS)
    >>> amplification(*(table.empty() for table in tables)).collect().height
    0
    """
    known = pl.all_horizontal(pl.col("start_ns", "va", "bytes").is_not_null())
    moves = migrations.select("start_ns", *_KEYS, "va", "bytes", "direction", "cause_id").filter(
        known
    )
    size, way = pl.col("bytes"), pl.col("direction")
    unsaid = pl.col("cause_id").is_null() | (pl.col("cause_id") == 0)
    by_fault = pl.col("cause_id").is_in([CAUSE_COHERENCE, CAUSE_PREFETCH]) | unsaid
    ways = ("htod", "dtoh", "dtod")
    moved = moves.group_by(_KEYS).agg(
        *(size.filter(way == name).sum().alias(f"{name}_bytes") for name in ways),
        moved_bytes=size.sum(),
        _by_fault=size.filter(by_fault & (way != "dtoh")).sum(),
    )
    unique = _unique_bytes(moves)
    rows = gpu_faults.group_by(_KEYS).agg(n_fault_rows=pl.len())
    found = moved.join(rows, on=_KEYS, how="full", coalesce=True, nulls_equal=True).join(
        unique, on=_KEYS, how="left", nulls_equal=True
    )
    counts = [f"{u}{name}_bytes" for name in ways for u in ("", "unique_")]
    counts += ["moved_bytes", "_by_fault", "n_fault_rows"]
    return (
        found.with_columns(pl.col(counts).fill_null(0))
        .join(_peaks(allocations), on="pid", how="left", nulls_equal=True)
        .with_columns(
            *(
                _ratio(f"{name}_bytes", f"unique_{name}_bytes").alias(f"{name}_amplification")
                for name in ways
            ),
            moved_per_managed=_ratio("moved_bytes", "peak_managed_bytes"),
            fault_row_bytes=_ratio("_by_fault", "n_fault_rows"),
        )
        .sort(_KEYS)
        .select(AMPLIFICATION.cast())
    )


def _unique_bytes(moves: pl.LazyFrame) -> pl.LazyFrame:
    """Measure the addresses that moved each way: the same algebra as that of intervals of time."""
    by = [*_KEYS, "direction"]
    ranges = moves.filter(pl.col("bytes") > 0).select(
        *by, start_ns="va", end_ns=pl.col("va") + pl.col("bytes").cast(pl.UInt64)
    )
    length = (pl.col("end_ns") - pl.col("start_ns")).cast(pl.Int64)
    return (
        union(ranges, by=by)
        .group_by(_KEYS)
        .agg(
            length.filter(pl.col("direction") == name).sum().alias(f"unique_{name}_bytes")
            for name in ("htod", "dtoh", "dtod")
        )
    )


def _peaks(allocations: pl.LazyFrame) -> pl.LazyFrame:
    """Find the most managed bytes of each process that were allocated at once."""
    managed = allocations.filter(pl.col("kind").is_in(MANAGED_KINDS) & (pl.col("bytes") > 0))
    # What was there before the capture comes first.
    first = pl.col("alloc_ns").fill_null(-(1 << 62))
    arrives = managed.select("pid", at=first, change="bytes")
    leaves = managed.filter(pl.col("free_ns").is_not_null()).select(
        "pid", at=pl.max_horizontal("free_ns", first), change=-pl.col("bytes")
    )
    # At one instant what is released goes first: lives are half-open. One that is over at once
    # never counts.
    return (
        pl.concat([arrives, leaves])
        .group_by("pid", "at")
        .agg(pl.col("change").sum())
        .sort("pid", "at")
        .group_by("pid")
        .agg(peak_managed_bytes=pl.col("change").cum_sum().max())
    )


@analysis(
    question="How much did the driver's prefetcher bring, and how much of that was perhaps for nothing?",
    result=PREFETCH_SHARE,
    reads={
        "migrations": (
            *("start_ns", "end_ns", "pid", "device_id", "va", "bytes", "direction", "cause_id"),
            "src_device_id",
        )
    },
    source="domain.md E-16",
    whole=True,
)
def prefetch_share(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Measure the share of the driver's prefetcher, and an upper bound of its waste.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``PREFETCH_SHARE``
        One row per process and GPU to which faults brought memory, in that order. Memory has "no
        evidence of use" if the next that happened to it on that GPU, after the prefetcher brought
        it, is its eviction; page-exact, once per arrival. Most of it may well have been used. In a
        trace without causes there is no row.
    """
    return PREFETCH_SHARE.from_rows(lambda: _shares(migrations))


def _shares(migrations: pl.LazyFrame) -> pl.DataFrame:
    columns = (
        "start_ns",
        "end_ns",
        *_KEYS,
        "va",
        "bytes",
        "direction",
        "cause_id",
        "src_device_id",
    )
    known = pl.all_horizontal(pl.col("start_ns", "va", "bytes").is_not_null())
    moves = migrations.select(columns).filter(known).collect()
    size, cause = pl.col("bytes"), pl.col("cause_id")
    found = (
        moves.filter(
            (pl.col("direction") != "dtoh") & cause.is_in([CAUSE_COHERENCE, CAUSE_PREFETCH])
        )
        .group_by(_KEYS)
        .agg(
            fault_bytes=size.sum(),
            coherence_bytes=size.filter(cause == CAUSE_COHERENCE).sum(),
            prefetch_bytes=size.filter(cause == CAUSE_PREFETCH).sum(),
        )
    )
    return (
        found.join(_evicted_next(moves), on=_KEYS, how="left", nulls_equal=True)
        .with_columns(
            pl.col("no_evidence_of_use_bytes").fill_null(0),
            n_pages_prefetched=-(-pl.col("prefetch_bytes") // PAGE_BYTES),
            prefetch_fraction=_ratio("prefetch_bytes", "fault_bytes"),
        )
        .with_columns(
            no_evidence_of_use_fraction=_ratio("no_evidence_of_use_bytes", "prefetch_bytes")
        )
        .sort(_KEYS)
    )


def _evicted_next(moves: pl.DataFrame) -> pl.DataFrame:
    """Add up what the prefetcher brought and the next event of its GPU and pages evicts."""
    own = at_own_addresses(with_block_life(_events(_within_blocks(moves))))
    pieces = cut(own, edges_of(own)).sort("segment", *_ORDER)
    after = pl.all().shift(-1).name.prefix("_")
    found = pieces.with_columns(after).filter(
        (pl.col("segment") == pl.col("_segment"))
        & (pl.col("comes") & (pl.col("cause_id") == CAUSE_PREFETCH))
        & (~pl.col("_comes") & (pl.col("_cause_id") == CAUSE_EVICTION))
    )
    return found.group_by(pl.col("owner").alias("pid"), "device_id").agg(
        no_evidence_of_use_bytes=pl.col("bytes").sum()
    )


_MOST_BYTES: Final = 1 << 30
"""No copy is larger than a VA block; a size beyond this is a broken cell, and left as it is."""

_ROWS_AT_ONCE: Final = 1 << 17
"""Ranges whose lives are looked at together."""


def _within_blocks(moves: pl.DataFrame) -> pl.DataFrame:
    """Cut at the edges of VA blocks what crosses one, as no copy of the driver does."""
    first, last = pl.col("va") // VA_BLOCK_BYTES, pl.col("va") + pl.col("bytes").cast(pl.UInt64) - 1
    sane = pl.col("bytes").is_between(1, _MOST_BYTES)
    crossing = moves.filter(sane & (first != last // VA_BLOCK_BYTES))
    if crossing.is_empty():
        return moves.filter(pl.col("bytes") > 0)
    inner = pl.int_ranges(first + 1, last // VA_BLOCK_BYTES + 1).alias("va")
    blocks = crossing.select("pid", inner).explode("va").unique().sort("pid", "va")
    edges = blocks.with_columns(pl.col("va").cast(pl.UInt64) * VA_BLOCK_BYTES)
    return cut(moves, edges).drop("segment")


def _events(moves: pl.DataFrame) -> pl.DataFrame:
    """List arrivals at GPUs and departures from them, in blocks that lost something."""
    block = ["pid", "_block"]
    moves = moves.with_columns(_block=pl.col("va") // VA_BLOCK_BYTES)
    evicted = moves.filter(pl.col("cause_id") == CAUSE_EVICTION).select(block).unique()
    # Only blocks that lost something can have lost it unused.
    moves = moves.join(evicted, on=block, how="semi", nulls_equal=True).drop("_block")
    leaves = pl.when(pl.col("direction") == "dtod").then("src_device_id").otherwise("device_id")
    goes = moves.filter(pl.col("direction") != "htod").with_columns(device_id=leaves)
    comes = moves.filter(pl.col("direction") != "dtoh")
    return pl.concat(
        [
            comes.with_columns(comes=pl.lit(value=True)),
            goes.with_columns(comes=pl.lit(value=False)),
        ]
    )


def at_own_addresses(events: pl.DataFrame) -> pl.DataFrame:
    """Give each life addresses of its own, so that the edges of one do not cut the others.

    Parameters
    ----------
    events : DataFrame
        As of :func:`with_block_life`, none of them across an edge of VA blocks.

    Returns
    -------
    DataFrame
        The events with ``va`` (UInt64) of the life, ``pid`` 0, and the process as ``owner``.
    """
    return events.with_columns(
        owner="pid",
        pid=pl.lit(0, pl.UInt32),
        va=pl.col("life").cast(pl.UInt64) * VA_BLOCK_BYTES + pl.col("va") % VA_BLOCK_BYTES,
    )


def with_block_life(events: pl.DataFrame) -> pl.DataFrame:
    """Find the lives of each block on each GPU, from nothing there to the eviction of all that came.

    What comes after an eviction of the whole block has nothing to do with what was there before.

    Parameters
    ----------
    events : DataFrame
        Arrivals at GPUs and departures from them: ``pid``, ``device_id``, ``start_ns``, ``end_ns``,
        ``va``, ``bytes``, ``cause_id``, ``comes`` (Boolean); other columns stay.

    Returns
    -------
    DataFrame
        The events with ``life`` (Int64). A block of which something was left has one life.
    """
    place = [*_KEYS, "_block"]
    events = events.with_columns(_block=pl.col("va") // VA_BLOCK_BYTES)
    ordered = events.sort(*place, *_ORDER)
    same = pl.all_horizontal(pl.col(key).eq_missing(pl.col(key).shift(1)) for key in place)
    evicts = (~pl.col("comes") & (pl.col("cause_id") == CAUSE_EVICTION)).fill_null(value=False)
    ended = evicts.shift(1) & ~evicts
    ordered = ordered.with_columns(
        _evicts=evicts,
        _place=same.not_().fill_null(value=True).cum_sum().cast(pl.Int64),
        life=(same.not_() | ended).fill_null(value=True).cum_sum().cast(pl.Int64),
    )
    ranges = ordered.lazy().select(
        "life",
        "comes",
        "_evicts",
        start_ns="va",
        end_ns=pl.col("va") + pl.col("bytes").cast(pl.UInt64),
    )
    # Lives have nothing to do with each other: a few at a time, as this takes kilobytes of memory for a row.
    parts = [
        subtraction(
            ranges.filter(mine & pl.col("comes")),
            ranges.filter(mine & pl.col("_evicts")),
            by=["life"],
        )
        .select("life")
        .unique()
        .collect()
        for part in stretches((ranges, "life"), rows=_ROWS_AT_ONCE)
        for mine in [inside("life", part)]
    ]
    incomplete = pl.concat(parts)["life"]
    last = pl.col("life") == pl.col("life").max().over("_place")
    kept = pl.col("life").is_in(incomplete.implode()) & ~last
    # Where something stayed, the lives of the block are one.
    whole = kept.any().over("_place")
    return ordered.with_columns(
        life=pl.when(whole).then(pl.col("life").min().over("_place")).otherwise("life")
    ).drop("_place", "_evicts", "_block")
