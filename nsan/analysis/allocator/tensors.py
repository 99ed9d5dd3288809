"""The tensors of a history: how long each held its memory, and which part of the program asked for it.

Time is that in which the memory could not be given to others: from the allocation to the end of the free.
What was held before the history began counts from its first entry, what was not freed to its last.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.allocator.blocks import GPU, POOL
from nsan.analysis.allocator.call_sites import SITE_COLUMNS, SITE_READS, with_call_sites
from nsan.analysis.allocator.replayed import BEFORE, REPLAY_KIND, REPLAY_READS, Replays, replays_of
from nsan.analysis.catalog import analysis
from nsan.analysis.result import Result, derived, recorded
from nsan.units import NS_PER_S

_READS: Final = {**REPLAY_READS, "stacks": SITE_READS}
_SITE: Final = [column.name for column in SITE_COLUMNS]
_KEYS: Final = ["device_id", *_SITE]

ALLOCATOR_TENSORS: Final = Result(
    "allocator_tensors",
    "one allocation of the history, or block in use that was allocated before it",
    (
        GPU,
        recorded("va", pl.UInt64, "byte address", "First byte."),
        derived("block_bytes", pl.Int64, "byte", "Size of its block."),
        recorded("requested_bytes", pl.Int64, "byte", "Asked for."),
        derived("life_ns", pl.Int64, "ns", "From its allocation to the end of its free."),
        derived("byte_seconds", pl.Float64, "byte seconds", "Block size x life; null: no times."),
        *SITE_COLUMNS,
        derived("is_held_at_start", pl.Boolean, "flag", "Allocated before the history began."),
        derived("is_held_at_end", pl.Boolean, "flag", "Not freed in the history."),
        recorded("alloc_ns", pl.Int64, "ns", "Allocated; null: before the history, or no times."),
        recorded("free_ns", pl.Int64, "ns", "Its free was completed; null: held, or no times."),
        derived("life_entries", pl.Int64, "entries", "Its life, counted in entries; null: none."),
        derived("byte_entries", pl.Float64, "byte entries", "Block size x life in entries."),
        recorded("alloc_sequence", pl.Int64, "id", "Entry that allocated it."),
        recorded("free_sequence", pl.Int64, "id", "Entry that completed its free."),
        POOL,
        recorded("stream", pl.UInt64, "id", "Its stream; 0: default."),
        derived("segment_va", pl.UInt64, "byte address", "Where its segment begins."),
        recorded("stack_id", pl.Int64, "id", "Its call stack, in `stacks`."),
        REPLAY_KIND,
    ),
    nothing="The snapshot has neither a block in use nor a history.",
)

ALLOCATOR_FRAMES: Final = Result(
    "allocator_frames",
    "the allocations of one Python frame on one GPU, or those without one",
    (
        GPU,
        *SITE_COLUMNS,
        derived("n_tensors", pl.Int64, "tensors", "Allocations, with those before the history."),
        derived("block_bytes", pl.Int64, "byte", "Their block sizes, all together."),
        derived("peak_bytes", pl.Int64, "byte", "Its part of the GPU's peak of active memory."),
        derived("own_peak_bytes", pl.Int64, "byte", "Most that it held at one time."),
        derived("byte_seconds", pl.Float64, "byte seconds", "Sum of block size x life."),
        derived("byte_entries", pl.Float64, "byte entries", "The same, life counted in entries."),
        derived("start_bytes", pl.Int64, "byte", "Held when the history began."),
        derived("end_bytes", pl.Int64, "byte", "Held when it ended."),
        derived("n_held", pl.Int64, "tensors", "Held when it ended."),
        REPLAY_KIND,
    ),
    nothing="The snapshot has neither a block in use nor a history.",
)


@analysis(
    question="Which tensors hold most memory for the longest time?",
    result=ALLOCATOR_TENSORS,
    reads=_READS,
    complexity="O(n log n) for n entries; the replay is a loop",
    source="allocator.md 4, 8, 10",
)
def allocator_tensors(
    segments: pl.LazyFrame,
    blocks: pl.LazyFrame,
    allocator_events: pl.LazyFrame,
    allocator_settings: pl.LazyFrame,
    stacks: pl.LazyFrame,
) -> pl.LazyFrame:
    """List allocations by bytes x life.

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
    LazyFrame, ``ALLOCATOR_TENSORS``
        By GPU, then byte-seconds (without times byte-entries, without a history bytes), most first.

    Examples
    --------
    >>> from nsan.torch_alloc.tables import SNAPSHOT_TABLES as tables
    >>> allocator_tensors(*(tables[name].empty() for name in _READS)).collect().height
    0
    """

    def build() -> pl.DataFrame:
        found = replays_of(segments, blocks, allocator_events, allocator_settings)
        order = ["byte_seconds", "byte_entries", "block_bytes"]
        return (
            with_call_sites(_tensors(found).lazy(), stacks)
            .sort(
                "device_id",
                *order,
                "alloc_sequence",
                "va",
                descending=[False, *[True] * len(order), False, False],
                nulls_last=[False, *[True] * len(order), False, False],
            )
            .collect()
        )

    return ALLOCATOR_TENSORS.from_rows(build)


@analysis(
    question="Which lines of the program hold the memory, at the peak and over time?",
    result=ALLOCATOR_FRAMES,
    reads=_READS,
    complexity="O(n log n) for n entries; the replay is a loop",
    source="allocator.md 4, 8",
)
def allocator_frames(
    segments: pl.LazyFrame,
    blocks: pl.LazyFrame,
    allocator_events: pl.LazyFrame,
    allocator_settings: pl.LazyFrame,
    stacks: pl.LazyFrame,
) -> pl.LazyFrame:
    """Add up allocations by the Python frame that asked for them.

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
    LazyFrame, ``ALLOCATOR_FRAMES``
        By GPU, most at the peak first. ``peak_bytes`` of a GPU add up to its peak of active memory; peaks,
        lives and ``start_bytes`` are null without a history.

    Examples
    --------
    >>> from nsan.torch_alloc.tables import SNAPSHOT_TABLES as tables
    >>> allocator_frames(*(tables[name].empty() for name in _READS)).collect().height
    0
    """

    def build() -> pl.DataFrame:
        found = replays_of(segments, blocks, allocator_events, allocator_settings)
        tensors = with_call_sites(_tensors(found).lazy(), stacks).collect()
        sums = _by_frame(tensors, peaks_of(found.series))
        order = ["peak_bytes", "end_bytes", "block_bytes"]
        return (
            sums.join(_own_peaks(tensors), on=_KEYS, how="left", nulls_equal=True)
            .with_columns(_if_replayed("own_peak_bytes"))
            .sort(
                "device_id",
                *order,
                *_SITE,
                descending=[False, *[True] * len(order), *[False] * len(_SITE)],
            )
        )

    return ALLOCATOR_FRAMES.from_rows(build)


def peaks_of(series: pl.DataFrame) -> pl.DataFrame:
    """Find the entry at which the active memory of each GPU was largest.

    Parameters
    ----------
    series : DataFrame
        As of :class:`nsan.analysis.allocator.replayed.Replays`.

    Returns
    -------
    DataFrame
        ``device_id``, ``peak_sequence`` (Int64): the first such entry; -1 if it was before the history.
    """
    highest = pl.col("active_bytes").arg_max()
    return series.group_by("device_id").agg(peak_sequence=pl.col("sequence").get(highest))


def _tensors(found: Replays) -> pl.DataFrame:
    """Add to the tensors of a replay their lives."""
    size = pl.col("block_bytes")
    last = found.series.group_by("device_id").agg(
        _first=pl.col("sequence").filter(pl.col("sequence") > BEFORE).first(),
        _last=pl.col("sequence").last(),
        _last_ns=pl.col("time_ns").drop_nulls().last(),
    )
    ends = (
        pl.when(pl.col("free_completed_sequence").is_null()).then("_last_ns").otherwise("free_ns")
    )
    begins = pl.when(pl.col("alloc_sequence").is_null()).then(0).otherwise("alloc_ns")
    entries = pl.coalesce("free_completed_sequence", pl.col("_last") + 1) - pl.coalesce(
        "alloc_sequence", "_first"
    )
    return (
        with_own_stacks(found)
        .join(last, on="device_id", how="left")
        .join(found.checks.select("device_id", "replay_kind"), on="device_id", how="left")
        .with_columns(life_ns=pl.max_horizontal(ends - begins, pl.when(ends.is_not_null()).then(0)))
        .with_columns(
            life_entries=entries,
            byte_seconds=size * (pl.col("life_ns") / NS_PER_S),
            byte_entries=size * entries.cast(pl.Float64),
            is_held_at_start=pl.col("alloc_sequence").is_null(),
            is_held_at_end=pl.col("free_completed_sequence").is_null(),
            free_sequence=pl.col("free_completed_sequence"),
        )
    )


def with_own_stacks(found: Replays) -> pl.DataFrame:
    """Take the stack of a block that is still held where the entry of its allocation has none.

    That is what recording with ``context="state"`` leaves.

    Parameters
    ----------
    found : Replays
        Of a snapshot.

    Returns
    -------
    DataFrame
        Its ``tensors``, in their order.
    """
    known = [
        frames[1].select("device_id", "va", _stack="stack_id") for frames in found.recorded.values()
    ]
    if not known:
        return found.tensors
    held = pl.col("free_completed_sequence").is_null()
    return (
        found.tensors.join(
            pl.concat(known).unique(["device_id", "va"], keep="first", maintain_order=True),
            on=["device_id", "va"],
            how="left",
            maintain_order="left",
        )
        .with_columns(stack_id=pl.coalesce("stack_id", pl.when(held).then("_stack")))
        .drop("_stack")
    )


def _if_replayed(name: str) -> pl.Expr:
    """Say nothing of a history that there is not."""
    return pl.when(pl.col("replay_kind").is_not_null()).then(name).alias(name)


def _by_frame(tensors: pl.DataFrame, peaks: pl.DataFrame) -> pl.DataFrame:
    size, peak = pl.col("block_bytes"), pl.col("peak_sequence")
    begun = pl.col("alloc_sequence").fill_null(BEFORE) <= peak
    there = begun & (pl.col("free_sequence") > peak).fill_null(value=True)
    lives = [
        pl.when(pl.col(name).null_count() == 0).then(pl.col(name).sum()).alias(name)
        for name in ("byte_seconds", "byte_entries")
    ]
    return (
        tensors.join(peaks, on="device_id", how="left")
        .group_by(_KEYS)
        .agg(
            pl.col("replay_kind").first(),
            *lives,
            n_tensors=pl.len(),
            block_bytes=size.sum(),
            peak_bytes=size.filter(there).sum(),
            start_bytes=size.filter("is_held_at_start").sum(),
            end_bytes=size.filter("is_held_at_end").sum(),
            n_held=pl.col("is_held_at_end").sum(),
        )
        .with_columns(_if_replayed(name) for name in ("peak_bytes", "start_bytes"))
    )


def _own_peaks(tensors: pl.DataFrame) -> pl.DataFrame:
    """Find the most that each frame held at one time: allocations add, completed frees take away."""
    came = tensors.select(
        *_KEYS, change="block_bytes", sequence=pl.col("alloc_sequence").fill_null(BEFORE)
    )
    left = tensors.filter(pl.col("free_sequence").is_not_null()).select(
        *_KEYS, change=-pl.col("block_bytes"), sequence="free_sequence"
    )
    # A repair may free what stands in the way of the allocation of the same entry: frees come first.
    level = pl.col("change").cum_sum().max()
    return (
        pl.concat([came, left]).sort("sequence", "change").group_by(_KEYS).agg(own_peak_bytes=level)
    )
