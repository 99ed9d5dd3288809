"""Steps of a program: what each iteration moves, and whether the next one does the same again.

Steps are the instances of an NVTX range, or the repeats of the sequence of kernels
(:mod:`nsan.analysis.attribution.periods`). Where steps touch the same VA blocks in the same order, prefetch hints
could be learnt from one for the next.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.attribution.causes import FAULT_READS, MIGRATION_READS
from nsan.analysis.attribution.periods import repeats
from nsan.analysis.attribution.work import (
    KEYS,
    WORK_READS,
    gpu_work,
    group_numbers,
    offsets,
    shifted,
    with_group,
)
from nsan.analysis.catalog import analysis
from nsan.analysis.driver.batches import batches
from nsan.analysis.driver.pushes import pushes
from nsan.analysis.intervals import union
from nsan.analysis.result import DEVICE, PID, Result, derived, reconstructed
from nsan.errors import UnknownNameError
from nsan.schema import COPIES, MEMSETS
from nsan.uvm.constants import CAUSE_EVICTION, VA_BLOCK_BYTES

BASES: Final = ("auto", "nvtx", "kernels")
BASIS: Final = pl.Enum(["nvtx", "kernels"])
PART: Final = pl.Enum(["step", "unattributed"])
LEVELS: Final = ("push", "batch")

ITERATIONS: Final = Result(
    "iterations",
    "one step of a process (of one GPU of it, where kernels tell), or what is in none",
    (
        PID,
        derived("device_id", pl.Int64, "id", "GPU whose kernels repeat; null: all of the process."),
        derived("part", PART, "label", "A step, or the remainder."),
        derived("step_id", pl.Int64, "id", "Number of the step, from 0."),
        reconstructed("basis", BASIS, "label", "What the steps are taken from."),
        derived("name", pl.String, "text", "The NVTX range, or the first kernel of the step."),
        reconstructed("n_period_kernels", pl.Int64, "kernels", "Kernels in each step; by kernels."),
        reconstructed("coverage_fraction", pl.Float64, "fraction", "Kernels that are in a step."),
        derived("start_ns", pl.Int64, "ns", "Start."),
        derived("end_ns", pl.Int64, "ns", "End, exclusive; by kernels the start of the next step."),
        derived("time_ns", pl.Int64, "ns", "End less start."),
        derived("n_fault_rows", pl.Int64, "rows", "GPU fault rows."),
        derived("n_migrations", pl.Int64, "copies", "Copies, both ways."),
        derived("in_bytes", pl.Int64, "byte", "Moved to GPUs."),
        derived("out_bytes", pl.Int64, "byte", "Moved to the CPU."),
        derived("evicted_bytes", pl.Int64, "byte", "Of these to make room."),
        derived("n_va_blocks", pl.Int64, "VA blocks", "Different VA blocks that moved."),
        derived("unique_bytes", pl.Int64, "byte", "Bytes that moved at least once."),
        derived("n_shared_va_blocks", pl.Int64, "VA blocks", "Of the blocks, in the step before."),
        derived("similarity_fraction", pl.Float64, "fraction", "Jaccard, with the step before."),
    ),
)

BLOCK_SUCCESSORS: Final = Result(
    "block_successors",
    "one VA block and one that was served next after it on its GPU",
    (
        PID,
        DEVICE,
        derived("va_block", pl.UInt64, "id", "VA block: address // 2 MiB."),
        derived("next_va_block", pl.UInt64, "id", "VA block served next."),
        derived("rank", pl.Int64, "number", "Of the successors of this block, from 1."),
        derived("n_times", pl.Int64, "times", "It came next so often."),
        derived("n_any", pl.Int64, "times", "Any block came next so often."),
        derived("next_fraction", pl.Float64, "fraction", "First over second: P(next | block)."),
    ),
)

_KERNEL_READS: Final = WORK_READS["kernels"]
_RANGE_READS: Final = ("start_ns", "end_ns", "pid", "tid", "domain", "name", "depth")
_COUNTED: Final = (
    *("n_fault_rows", "n_migrations", "in_bytes", "out_bytes", "evicted_bytes"),
    *("n_va_blocks", "unique_bytes", "n_shared_va_blocks"),
)
_STEP: Final = ("group", "step_id")


@analysis(
    question="What does each iteration fault and move, and does the next one do the same?",
    result=ITERATIONS,
    reads={
        "gpu_faults": ("start_ns", "end_ns", "pid", "device_id"),
        "migrations": MIGRATION_READS,
        "kernels": _KERNEL_READS,
        "nvtx_ranges": _RANGE_READS,
    },
    source="domain.md E-21",
)
def iterations(  # noqa: PLR0913 - the tables that it reads count too
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    kernels: pl.LazyFrame,
    nvtx_ranges: pl.LazyFrame,
    *,
    basis: str = "auto",
    nvtx: str = "",
    coverage: float = 0.8,
) -> pl.LazyFrame:
    """Fold a trace into the steps of its main loop.

    Parameters
    ----------
    gpu_faults, migrations : LazyFrame
        What happened, in any order; each row belongs to the step that holds its start.
    kernels, nvtx_ranges : LazyFrame
        What steps are found from.
    basis : str, default "auto"
        "nvtx", "kernels", or "auto": NVTX where the process has a range that repeats, else kernels.
    nvtx : str, default ""
        Name of the range. By default the one with most instances of those that lie in no other, at
        least two; of equal ones the one that is open longest.
    coverage : float, default 0.8
        Share of the kernels of a GPU that must lie in repeats of a sequence.

    Returns
    -------
    LazyFrame, ``ITERATIONS``
        Per process (and GPU, by kernels): its steps by start, then an `unattributed` row. Counts and
        bytes add up to all rows with a start of a process or GPU that has steps; VA blocks and unique
        bytes do not. Processes and GPUs without steps have no row.

    Raises
    ------
    UsageError
        If there is no such basis.
    """
    if basis not in BASES:
        raise UnknownNameError("basis", basis, BASES)

    def build() -> pl.DataFrame:
        known = pl.col("start_ns").is_not_null()
        rows = gpu_faults.filter(known).select("start_ns", "end_ns", *KEYS).collect()
        moved = migrations.filter(known).select(MIGRATION_READS).collect()
        by_range = _steps_of_ranges(nvtx_ranges, nvtx)
        if basis == "kernels":
            by_range = by_range.clear()
        by_kernel = by_range.clear()
        if basis != "nvtx":
            by_kernel = _steps_of_kernels(rows, moved, kernels, coverage)
            by_kernel = by_kernel.join(by_range, on="pid", how="anti", nulls_equal=True)
        parts = [_folded(by_range, rows, moved, ["pid"])]
        parts.append(_folded(by_kernel, rows, moved, [*KEYS]))
        order = ("pid", "device_id", "part", "step_id")
        return pl.concat(parts, how="diagonal").sort(order)

    return ITERATIONS.from_rows(build)


_STEP_SCHEMA: Final[dict[str, pl.DataType | type[pl.DataType]]] = {
    "pid": pl.UInt32,
    "device_id": pl.Int64,
    "basis": BASIS,
    "name": pl.String,
    "n_period_kernels": pl.Int64,
    "coverage_fraction": pl.Float64,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "step_id": pl.Int64,
}


def _steps_of_ranges(nvtx_ranges: pl.LazyFrame, nvtx: str) -> pl.DataFrame:
    """Take the instances of one range, of the thread that has most, as the steps of each process."""
    known = pl.all_horizontal(pl.col("start_ns", "end_ns").is_not_null())
    outer = (pl.col("depth") == 0) | pl.col("depth").is_null()
    wanted = pl.col("name") == nvtx if nvtx else outer
    names = ("pid", "tid", "domain", "name")
    ranges = nvtx_ranges.select(_RANGE_READS).filter(known & wanted).collect()
    before = pl.col("end_ns").cum_max().shift(1).over(names)
    # An instance inside another one of the same name is a part of that step.
    ranges = ranges.sort(*names, "start_ns", "end_ns").filter(
        (pl.col("start_ns") >= before).fill_null(value=True)
    )
    length = (pl.col("end_ns") - pl.col("start_ns")).sum()
    chosen = (
        ranges.group_by(names)
        .agg(n=pl.len(), time_ns=length)
        .filter(pl.col("n") >= (1 if nvtx else 2))
        .sort(
            "pid",
            "n",
            "time_ns",
            "name",
            "domain",
            "tid",
            descending=[False, True, True] + [False] * 3,
        )
        .unique("pid", keep="first", maintain_order=True)
    )
    steps = ranges.join(chosen, on=names, how="semi", nulls_equal=True).sort("pid", "start_ns")
    return steps.select(
        "pid",
        pl.lit(None, pl.Int64).alias("device_id"),
        pl.lit("nvtx", BASIS).alias("basis"),
        "name",
        pl.lit(None, pl.Int64).alias("n_period_kernels"),
        pl.lit(None, pl.Float64).alias("coverage_fraction"),
        *("start_ns", "end_ns"),
        step_id=pl.int_range(pl.len(), dtype=pl.Int64).over("pid"),
    )


def _steps_of_kernels(
    rows: pl.DataFrame, moved: pl.DataFrame, kernels: pl.LazyFrame, coverage: float
) -> pl.DataFrame:
    """Take the repeats of the sequence of kernels on each GPU as steps, on the clock of faults."""
    work = gpu_work(kernels, COPIES.empty(), MEMSETS.empty())
    groups = group_numbers(rows, moved, work)
    work = with_group(work, groups)
    placed = [with_group(frame, groups) for frame in (rows, moved)]
    work = shifted(work, offsets(placed[0], placed[1], work, groups))
    parts = [pl.DataFrame(schema=_STEP_SCHEMA)]
    for mine in work.partition_by("group", maintain_order=True):
        found = repeats(mine, coverage=coverage)
        parts.append(
            found.with_columns(
                pl.lit(mine["pid"][0]).alias("pid"),
                pl.lit(mine["device_id"][0]).alias("device_id"),
                basis=pl.lit("kernels", BASIS),
            ).select(pl.col(name).cast(dtype) for name, dtype in _STEP_SCHEMA.items())
        )
    return pl.concat(parts)


def _folded(
    steps: pl.DataFrame, rows: pl.DataFrame, moved: pl.DataFrame, by: list[str]
) -> pl.DataFrame:
    """Add up what happens in each step, and what in none."""
    groups = steps.select(by).unique().sort(by)
    groups = groups.with_columns(group=pl.int_range(pl.len(), dtype=pl.Int64))
    steps = steps.join(groups, on=by, how="left", nulls_equal=True)
    placed_rows, placed = (
        _in_step(frame.join(groups, on=by, how="inner", nulls_equal=True), steps)
        for frame in (rows, moved)
    )
    size, out = pl.col("bytes"), pl.col("direction") == "dtoh"
    evicted = out & (pl.col("cause_id") == CAUSE_EVICTION)
    sums = [
        placed_rows.group_by(_STEP).agg(n_fault_rows=pl.len().cast(pl.Int64)),
        placed.group_by(_STEP).agg(
            n_migrations=pl.len().cast(pl.Int64),
            in_bytes=size.filter(out.not_()).sum(),
            out_bytes=size.filter(out).sum(),
            evicted_bytes=size.filter(evicted).sum(),
        ),
        *_blocks(placed.filter(pl.col("va").is_not_null())),
    ]
    rest = steps.unique("group", keep="first", maintain_order=True).with_columns(
        pl.lit(None, pl.Int64).alias("start_ns"),
        pl.lit(None, pl.Int64).alias("end_ns"),
        step_id=pl.lit(-1, pl.Int64),
        part=pl.lit("unattributed", PART),
    )
    table = pl.concat([steps.with_columns(part=pl.lit("step", PART)), rest])
    for part in sums:
        table = table.join(part, on=_STEP, how="left")
    shared, blocks = pl.col("n_shared_va_blocks"), pl.col("n_va_blocks")
    before = blocks.shift(1).over("group", order_by="step_id")
    either = blocks + before - shared
    no_step = pl.col("step_id") == -1
    similar = pl.when(no_step.not_() & (pl.col("step_id") > 0) & (either > 0)).then(shared / either)
    return table.with_columns(pl.col(_COUNTED).fill_null(0)).with_columns(
        time_ns=pl.col("end_ns") - pl.col("start_ns"),
        similarity_fraction=similar,
        step_id=pl.when(no_step.not_()).then("step_id"),
    )


def _in_step(events: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Add ``step_id`` to each event: the step that holds its start, or -1."""
    found = events.sort("start_ns").join_asof(
        steps.select("group", "step_id", _from="start_ns", _until="end_ns").sort("_from"),
        left_on="start_ns",
        right_on="_from",
        by="group",
        coalesce=False,
        check_sortedness=False,
    )
    inside = pl.col("start_ns") < pl.col("_until")
    step = pl.when(inside).then("step_id").otherwise(-1).cast(pl.Int64)
    return found.with_columns(step_id=step).drop("_from", "_until")


def _blocks(placed: pl.DataFrame) -> list[pl.DataFrame]:
    """Count the VA blocks of each step, those shared with the step before, and unique bytes."""
    blocks = placed.select(*_STEP, block=pl.col("va") // VA_BLOCK_BYTES).unique()
    before = blocks.filter(pl.col("step_id") >= 0).with_columns(pl.col("step_id") + 1)
    shared = blocks.join(before, on=[*_STEP, "block"], how="semi")
    # Interval algebra works on Int64: addresses count from the lowest of their step.
    low = (pl.col("va") - pl.col("va").min().over(_STEP)).cast(pl.Int64, wrap_numerical=True)
    spans = placed.lazy().select(*_STEP, start_ns=low, end_ns=low + pl.col("bytes"))
    length = (pl.col("end_ns") - pl.col("start_ns")).sum()
    return [
        blocks.group_by(_STEP).agg(n_va_blocks=pl.len().cast(pl.Int64)),
        shared.group_by(_STEP).agg(n_shared_va_blocks=pl.len().cast(pl.Int64)),
        union(spans, by=_STEP).group_by(_STEP).agg(unique_bytes=length).collect(),
    ]


@analysis(
    question="Which VA block is served next after each, and how surely?",
    result=BLOCK_SUCCESSORS,
    reads={"gpu_faults": FAULT_READS, "migrations": MIGRATION_READS},
    source="domain.md E-21; DeepUM, ASPLOS 2023",
)
def block_successors(
    gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame, *, level: str = "push", top: int = 3
) -> pl.LazyFrame:
    """Count which VA block follows which in the service of a GPU.

    Parameters
    ----------
    gpu_faults, migrations : LazyFrame
        Faults and copies, in any order.
    level : str, default "push"
        "push": services of blocks in order. "batch": driver batches in order, each named by the block
        of its lowest page.
    top : int, default 3
        Successors to give for each block.

    Returns
    -------
    LazyFrame, ``BLOCK_SUCCESSORS``
        Per process, GPU and block: its most frequent successors, most frequent and then lowest first.
        A block may follow itself. The last one served on a GPU has no successor there.

    Raises
    ------
    UsageError
        If there is no such level.
    """
    if level not in LEVELS:
        raise UnknownNameError("level", level, LEVELS)
    if level == "push":
        served = pushes(migrations).filter(pl.col("direction") != "dtoh").sort("push_id")
    else:
        block = pl.col("va") // VA_BLOCK_BYTES
        served = batches(gpu_faults, migrations).sort("batch_id").with_columns(va_block=block)
    pair = (*KEYS, "va_block")
    n = pl.col("n_times")
    return (
        served.filter(pl.col("va_block").is_not_null())
        .select(*pair)
        .with_columns(next_va_block=pl.col("va_block").shift(-1).over(KEYS))
        .filter(pl.col("next_va_block").is_not_null())
        .group_by(*pair, "next_va_block")
        .agg(n_times=pl.len().cast(pl.Int64))
        .sort(*pair, "n_times", "next_va_block", descending=[False] * 3 + [True, False])
        .with_columns(n_any=n.sum().over(pair), rank=pl.int_range(1, pl.len() + 1).over(pair))
        .filter(pl.col("rank") <= top)
        .with_columns(next_fraction=n / pl.col("n_any"))
        .select(BLOCK_SUCCESSORS.cast())
    )
