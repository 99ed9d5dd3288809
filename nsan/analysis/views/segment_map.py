"""The allocator's memory as charts show it: its levels over time, and its blocks by address.

The blocks are those at the peak of active memory, as the replay of the history gives them, or without a
history those of the snapshot itself. The third table is about a trace joined with a snapshot: what the
memory that moved was to the allocator, by time and address.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.allocator.blocks import GPU
from nsan.analysis.allocator.replayed import (
    BEFORE,
    LEVELS,
    REPLAY_KIND,
    REPLAY_READS,
    Replays,
    replays_of,
)
from nsan.analysis.allocator.tensors import peaks_of
from nsan.analysis.catalog import analysis
from nsan.analysis.pca.tables import DEAD_STATES, STATE
from nsan.analysis.result import PID, Result, derived
from nsan.analysis.views.spread import columns_for, thinned_levels
from nsan.uvm.constants import VA_BLOCK_BYTES

BLOCK: Final = pl.Enum(["allocated", "pending", "cached"])
"""A block as a chart shows it: held by a tensor, its free not completed, or held by none."""

_SHOWN: Final = (*LEVELS, "cached_bytes")

ALLOCATOR_LEVELS: Final = Result(
    "allocator_levels",
    "one stretch of the history of one GPU, with the most that each level came to in it",
    (
        GPU,
        derived("start_ns", pl.Int64, "ns", "From the first entry; null: no times recorded."),
        derived("end_ns", pl.Int64, "ns", "End; null: the last stretch, or no times."),
        derived("start_sequence", pl.Int64, "id", "The same in entries, where there are no times."),
        derived("end_sequence", pl.Int64, "id", "End; null: the last stretch, or there are times."),
        derived("reserved_bytes", pl.Int64, "byte", "Held from the driver."),
        derived("allocated_bytes", pl.Int64, "byte", "In blocks that tensors hold."),
        derived("active_bytes", pl.Int64, "byte", "The same and blocks whose free is pending."),
        derived("requested_bytes", pl.Int64, "byte", "Asked for in active blocks."),
        derived("cached_bytes", pl.Int64, "byte", "Reserved less active."),
        derived("n_steps", pl.Int64, "steps", "Changes of a level that reach into it."),
        REPLAY_KIND,
    ),
    nothing="The snapshot has no history: record one with torch.cuda.memory._record_memory_history.",
)

SEGMENT_MAP: Final = Result(
    "segment_map",
    "a block of a segment, or the narrow blocks of one state in one part of a segment",
    (
        GPU,
        derived("segment_va", pl.UInt64, "byte address", "Where the segment begins; null: others."),
        derived("segment_bytes", pl.Int64, "byte", "Its blocks; of the others all together."),
        derived("n_segments", pl.Int64, "segments", "1, or the others put together."),
        derived("offset_bytes", pl.Int64, "byte", "Where the row begins in it; others: by state."),
        derived("bytes", pl.Int64, "byte", "Its size."),
        derived("state", BLOCK, "label", "Allocated, free pending, or cached."),
        derived("n_blocks", pl.Int64, "blocks", "Blocks put together."),
        derived("is_exact", pl.Boolean, "flag", "One block, at its own place."),
        derived("sequence", pl.Int64, "id", "Entry after which this holds; null: the snapshot."),
        REPLAY_KIND,
    ),
    nothing="The snapshot has no segment.",
)

MOVES_MAP: Final = Result(
    "moves_map",
    "what moved in one stretch of time and of addresses",
    (
        PID,
        derived("column", pl.Int64, "number", "Stretch of time, from 0."),
        derived(
            "row", pl.Int64, "number", "Stretch of addresses, from 0: unused ones are left out."
        ),
        derived("start_ns", pl.Int64, "ns", "Start of the stretch of time."),
        derived("end_ns", pl.Int64, "ns", "Its end."),
        derived("va", pl.UInt64, "byte address", "First VA block of the stretch of addresses."),
        derived("n_va_blocks", pl.Int64, "VA blocks", "VA blocks that moved in that stretch."),
        derived("state", STATE, "label", "State that most bytes of the cell were of."),
        derived("state_bytes", pl.Int64, "byte", "Bytes of that state."),
        derived("bytes", pl.Int64, "byte", "Bytes of all states, both ways."),
        derived("dead_bytes", pl.Int64, "byte", "Of these, of cached and unused memory."),
        derived("n_parts", pl.Int64, "parts", "Parts of migrations."),
    ),
    nothing="Nothing was migrated.",
)


@analysis(
    question="How did the allocator's memory change over time, in steps that a chart can show?",
    result=ALLOCATOR_LEVELS,
    reads=REPLAY_READS,
    complexity="O(n log n) for n entries; the replay is a loop",
    source="allocator.md 4.1, 8",
)
def allocator_levels(
    segments: pl.LazyFrame,
    blocks: pl.LazyFrame,
    allocator_events: pl.LazyFrame,
    allocator_settings: pl.LazyFrame,
    *,
    n_columns: int = 400,
) -> pl.LazyFrame:
    """Put the levels of the allocator's history into few stretches, keeping every peak.

    Parameters
    ----------
    segments, blocks, allocator_events, allocator_settings : LazyFrame
        As in :func:`nsan.analysis.allocator.timeline.allocator_timeline`.
    n_columns : int, default 400
        Most stretches for a GPU; a GPU whose levels change less often keeps each change.

    Returns
    -------
    LazyFrame, ``ALLOCATOR_LEVELS``
        By GPU and time, or by entry where no times were recorded. The most of a level over all stretches
        is its peak. Levels of a stretch need not be of the same instant.
    """

    def build() -> pl.DataFrame:
        found = replays_of(segments, blocks, allocator_events, allocator_settings)
        timed = pl.col("time_ns").null_count().over("device_id") == 0
        series = found.series.with_columns(
            timed=timed, cached_bytes=pl.col("reserved_bytes") - pl.col("active_bytes")
        )
        steps = series.with_columns(start_ns=pl.when("timed").then("time_ns").otherwise("sequence"))
        most = columns_for(steps["device_id"].n_unique(), n_columns)
        thin = thinned_levels(steps, ["device_id", "timed"], _SHOWN, most=most)
        kinds = found.checks.select("device_id", "replay_kind")
        by_entry = {
            f"{edge}_sequence": pl.when(~pl.col("timed")).then(f"{edge}_ns")
            for edge in ("start", "end")
        }
        return (
            thin.with_columns(**by_entry)
            .with_columns(
                pl.when("timed").then(f"{e}_ns").alias(f"{e}_ns") for e in ("start", "end")
            )
            .join(kinds, on="device_id", how="left", maintain_order="left")
        )

    return ALLOCATOR_LEVELS.from_rows(build)


@analysis(
    question="Where in its segments does the allocator hold memory at the peak, and where is it cached?",
    result=SEGMENT_MAP,
    reads=REPLAY_READS,
    complexity="O(n log n) for n entries; the replay is a loop",
    source="allocator.md 4.3, 8",
)
def segment_map(
    segments: pl.LazyFrame,
    blocks: pl.LazyFrame,
    allocator_events: pl.LazyFrame,
    allocator_settings: pl.LazyFrame,
    *,
    most_segments: int = 40,
    n_cells: int = 800,
) -> pl.LazyFrame:
    """Lay out the blocks of each GPU at its peak of active memory.

    Parameters
    ----------
    segments, blocks, allocator_events, allocator_settings : LazyFrame
        As in :func:`nsan.analysis.allocator.timeline.allocator_timeline`.
    most_segments : int, default 40
        Segments to show of a GPU, the largest; the others are one row for each state.
    n_cells : int, default 800
        Blocks narrower than this part of the memory that is shown are put together by state with those
        that begin in the same part of their segment.

    Returns
    -------
    LazyFrame, ``SEGMENT_MAP``
        By GPU, segments by address (others last), offset and state. Bytes add up to what is reserved at
        the peak, those of a state to that state's.
    """

    def build() -> pl.DataFrame:
        found = replays_of(segments, blocks, allocator_events, allocator_settings)
        kinds = found.checks.select("device_id", "replay_kind")
        laid = _few_segments(_at_peak(found), most_segments)
        return (
            _few_blocks(laid, columns_for(laid["device_id"].n_unique() * 4, n_cells))
            .join(kinds, on="device_id", how="left", maintain_order="left")
            .sort("device_id", "segment_va", "offset_bytes", "state", nulls_last=True)
        )

    return SEGMENT_MAP.from_rows(build)


_LAID: Final = {
    "device_id": pl.Int64(),
    "segment_va": pl.UInt64(),
    "offset_bytes": pl.Int64(),
    "bytes": pl.Int64(),
    "state": BLOCK,
    "sequence": pl.Int64(),
}


def _at_peak(found: Replays) -> pl.DataFrame:
    """List the blocks of every GPU: after the entry with most active memory, or as recorded."""
    peaks = dict(peaks_of(found.series).iter_rows())
    told = dict(found.checks.select("device_id", "replay_kind").iter_rows())
    parts = [pl.DataFrame(schema=_LAID)]
    for gpu in found.by_gpu:
        has_history = told.get(gpu) is not None and peaks.get(gpu) is not None
        laid = _replayed(found, gpu, peaks[gpu]) if has_history else _recorded(found, gpu)
        parts.append(laid.select(pl.col(name).cast(dtype) for name, dtype in _LAID.items()))
    return pl.concat(parts)


def _offset() -> pl.Expr:
    return (pl.col("va") - pl.col("segment_va")).cast(pl.Int64, wrap_numerical=True)


def _replayed(found: Replays, gpu: int, sequence: int) -> pl.DataFrame:
    tensors = found.tensors.filter(
        (pl.col("device_id") == gpu)
        & (pl.col("alloc_sequence").fill_null(BEFORE) <= sequence)
        & (pl.col("free_completed_sequence") > sequence).fill_null(value=True)
    )
    pending = (pl.col("free_requested_sequence") <= sequence).fill_null(value=False)
    held = tensors.select(
        "va",
        "segment_va",
        bytes="block_bytes",
        state=pl.when(pending).then(pl.lit("pending")).otherwise(pl.lit("allocated")),
    )
    free = found.free_at(gpu, sequence).select("va", "segment_va", "bytes", state=pl.lit("cached"))
    both = pl.concat([held, free], how="vertical_relaxed")
    return both.with_columns(
        device_id=pl.lit(gpu, pl.Int64), offset_bytes=_offset(), sequence=pl.lit(sequence, pl.Int64)
    )


_STATES: Final = {
    "active_allocated": "allocated",
    "other": "allocated",
    "active_pending_free": "pending",
    "inactive": "cached",
}


def _recorded(found: Replays, gpu: int) -> pl.DataFrame:
    segments, blocks, _ = found.recorded[gpu]
    bases = segments.select("segment_id", segment_va="va").unique("segment_id", keep="first")
    return (
        blocks.filter(pl.col("va").is_not_null() & (pl.col("bytes") > 0))
        .join(bases, on="segment_id", how="inner", maintain_order="left")
        .with_columns(
            device_id=pl.lit(gpu, pl.Int64),
            offset_bytes=_offset(),
            state=pl.col("state").cast(pl.String).replace_strict(_STATES, default="allocated"),
            sequence=pl.lit(None, pl.Int64),
        )
    )


def _few_segments(laid: pl.DataFrame, most: int) -> pl.DataFrame:
    """Keep the largest segments of each GPU; the blocks of the others have no segment."""
    sizes = (
        laid.group_by("device_id", "segment_va")
        .agg(segment_bytes=pl.col("bytes").sum())
        .sort("device_id", "segment_bytes", "segment_va", descending=[False, True, False])
        .with_columns(
            _place=pl.int_range(pl.len()).over("device_id"), _n=pl.len().over("device_id")
        )
        # "One other segment" takes as much room as the segment itself.
        .with_columns(_own=(pl.col("_place") < most) | (pl.col("_n") <= most + 1))
    )
    others = ~pl.col("_own")
    sizes = sizes.with_columns(
        segment_bytes=pl.when("_own")
        .then("segment_bytes")
        .otherwise(pl.col("segment_bytes").filter(others).sum().over("device_id")),
        n_segments=pl.when("_own").then(1).otherwise(others.sum().over("device_id")),
    )
    return laid.join(
        sizes.drop("_place", "_n"),
        on=["device_id", "segment_va"],
        how="left",
        maintain_order="left",
    ).with_columns(segment_va=pl.when("_own").then("segment_va"))


def _few_blocks(laid: pl.DataFrame, n_cells: int) -> pl.DataFrame:
    """Keep wide blocks; put narrow ones, and those of the other segments, together by state."""
    size, own = pl.col("bytes"), pl.col("_own")
    cell = size.filter(own).sum().over("device_id") // n_cells + 1
    few = own.sum().over("device_id") <= n_cells
    placed = laid.with_columns(_exact=own & (few | (size >= cell)), _cell=cell)
    keys = ["device_id", "segment_va", "segment_bytes", "n_segments", "sequence"]
    exact = placed.filter("_exact").select(
        *keys,
        "offset_bytes",
        "bytes",
        "state",
        n_blocks=pl.lit(1, pl.Int64),
        is_exact=pl.lit(value=True),
    )
    part = pl.when("_own").then(pl.col("offset_bytes") // pl.col("_cell")).otherwise(-1)
    merged = (
        placed.filter(~pl.col("_exact"))
        .group_by(*keys, "state", part=part)
        .agg(
            pl.col("bytes").sum(),
            n_blocks=pl.len().cast(pl.Int64),
            _first=pl.col("offset_bytes").min(),
        )
        .sort(*keys, "part", "state")
    )
    # Side by side by state, from the first of them on: sizes are right, places are of the part.
    before = pl.col("bytes").cum_sum().over(*keys, "part") - pl.col("bytes")
    begins = (
        pl.when(pl.col("part") >= 0).then(pl.col("_first").min().over(*keys, "part")).otherwise(0)
    )
    merged = merged.select(
        *keys,
        offset_bytes=begins + before,
        bytes="bytes",
        state="state",
        n_blocks="n_blocks",
        is_exact=pl.col("n_blocks") == 0,
    )
    return pl.concat([exact, merged], how="vertical_relaxed")


@analysis(
    question="What was the memory that moved to the allocator, by time and address?",
    result=MOVES_MAP,
    reads={"tensor_moves": ("start_ns", "end_ns", "pid", "va", "bytes", "state")},
    source="domain.md E-7, E-19",
)
def moves_map(tensor_moves: pl.LazyFrame, *, n_columns: int = 96, n_rows: int = 48) -> pl.LazyFrame:
    """Bin the parts of migrations by time and address, with the state that most bytes were of.

    Parameters
    ----------
    tensor_moves : LazyFrame, ``TENSOR_MOVES``
        In any order; parts without a start, an address or a size are left out.
    n_columns : int, default 96
        Stretches of time from first start to last.
    n_rows : int, default 48
        Stretches of addresses at most, each of as many VA blocks that moved; fewer where there are more
        cells than a chart can hold.

    Returns
    -------
    LazyFrame, ``MOVES_MAP``
        By process, row and column: cells in which anything moved. A part counts where it starts, in
        time and in address. VA blocks that never moved take no room.
    """

    def build() -> pl.DataFrame:
        known = pl.all_horizontal(pl.col("start_ns", "va", "bytes").is_not_null())
        parts = (
            tensor_moves.select("start_ns", "pid", "va", "bytes", "state").filter(known).collect()
        )
        block = (pl.col("va") // VA_BLOCK_BYTES).alias("block")
        rank = pl.col("block").rank("dense").over("pid").cast(pl.Int64) - 1
        most = columns_for(parts["pid"].n_unique() * n_columns, n_rows, rows=4800)
        per_row = (rank.max().over("pid") // most) + 1
        start, first = pl.col("start_ns"), pl.col("start_ns").min().over("pid")
        width = pl.max_horizontal((start.max().over("pid") - first) // n_columns + 1, pl.lit(1))
        placed = parts.with_columns(block).with_columns(
            row=rank // per_row, column=(start - first) // width, _first=first, _width=width
        )
        return _cells(placed)

    return MOVES_MAP.from_rows(build)


def _cells(placed: pl.DataFrame) -> pl.DataFrame:
    cell = ["pid", "row", "column"]
    size = pl.col("bytes")
    rows = placed.group_by("pid", "row").agg(
        va=pl.col("block").min() * VA_BLOCK_BYTES, n_va_blocks=pl.col("block").n_unique()
    )
    by_state = (
        placed.group_by(*cell, "state")
        .agg(
            state_bytes=size.sum(),
            n_parts=pl.len().cast(pl.Int64),
            _at=pl.col("_first").first() + pl.col("column").first() * pl.col("_width").first(),
            _width=pl.col("_width").first(),
        )
        .sort(*cell, "state_bytes", "state", descending=[False] * 3 + [True, False])
    )
    dead = pl.col("state").cast(pl.String).is_in(DEAD_STATES)
    return (
        by_state.group_by(cell, maintain_order=True)
        .agg(
            pl.col("state", "state_bytes").first(),
            bytes=pl.col("state_bytes").sum(),
            dead_bytes=pl.col("state_bytes").filter(dead).sum(),
            n_parts=pl.col("n_parts").sum(),
            start_ns=pl.col("_at").first(),
            end_ns=pl.col("_at").first() + pl.col("_width").first(),
        )
        .join(rows, on=["pid", "row"], how="left", nulls_equal=True, maintain_order="left")
    )
