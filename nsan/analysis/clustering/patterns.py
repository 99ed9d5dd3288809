"""How kernels walk through memory, as far as page faults show it.

Evidence is where fault-caused copies lie, batch by batch: never fault rows, which name only the
lowest page of a batch, and never the order within a batch, which the driver sorts by address. The
prefetcher hides most pages of a VA block: one thread that streams faults six times in 2 MiB, at
growing distance. So a class rests on batch medians over time, and on how the faulted pages of a
batch lie as a set.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.clustering.stretches import (
    COPY_READS,
    FAULT_READS,
    KERNEL_READS,
    KEYS,
    with_running_kernel,
)
from nsan.analysis.clustering.walks import (
    CLASS_COLUMNS,
    LEAST_BATCHES,
    LEAST_R2,
    classes_of,
    lines_of,
)
from nsan.analysis.driver.batches import with_batch_id
from nsan.analysis.result import DEVICE, PID, Result, derived, recorded
from nsan.analysis.segments import cut, edges_of
from nsan.uvm.constants import (
    CAUSE_COHERENCE,
    MANAGED_KINDS,
    PAGE_BYTES,
    VA_BLOCK_BYTES,
)

_EVER: Final = 2**62

ACCESS_PATTERNS: Final = Result(
    "access_patterns",
    "the faults of one kernel in one allocation, or in one run of neighbouring VA blocks",
    (
        PID,
        DEVICE,
        derived("kernel", pl.String, "text", "Kernel; null: none ran, or several at once."),
        derived("va", pl.UInt64, "byte address", "First byte of the allocation or run."),
        derived("region_bytes", pl.Int64, "byte", "Its length."),
        recorded("allocation", pl.String, "text", "Variable name, where the trace has one."),
        derived("is_allocation", pl.Boolean, "flag", "An allocation, not a run of VA blocks."),
        *CLASS_COLUMNS,
        derived("span_fraction", pl.Float64, "fraction", "Span over allocation; null for a run."),
        derived("faulted_bytes", pl.Int64, "byte", "Bytes of the fault-caused copies."),
        derived("has_causes", pl.Boolean, "flag", "False: copies by prefetch are among them."),
    ),
)


def evidence_of(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Keep the copies that say which pages a GPU faulted on.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Fault rows, only to tell batches apart.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration.

    Returns
    -------
    LazyFrame
        Copies to a GPU because of a page fault, with ``batch_id`` and ``has_causes``. Where a process
        and GPU has no cause at all (nvprof), all copies to the GPU that a batch brought.
    """
    known = pl.col("cause_id").is_not_null() & (pl.col("cause_id") != 0)
    has_causes = known.any().over(KEYS)
    copies = with_batch_id(gpu_faults, migrations).filter(pl.col("direction") != "dtoh")
    caused = pl.col("cause_id") == CAUSE_COHERENCE
    return (
        copies.with_columns(has_causes=has_causes)
        .filter(pl.col("batch_id").is_not_null() & (pl.col("bytes") > 0))
        .filter(caused | ~pl.col("has_causes"))
        .select(*KEYS, "batch_id", "start_ns", "va", "bytes", "has_causes")
    )


def _in_allocations(copies: pl.DataFrame, allocations: pl.DataFrame) -> pl.DataFrame:
    """Find the managed allocation, alive at the time, that holds the first byte of each copy."""
    lives = (
        allocations.filter(pl.col("kind").cast(pl.String).is_in(MANAGED_KINDS))
        .select("pid", "va", "bytes", "alloc_ns", "free_ns", allocation="name")
        .filter(pl.col("va").is_not_null() & (pl.col("bytes") > 0))
        .sort("pid", "va", "alloc_ns", "bytes", "free_ns", "allocation")
        .with_columns(
            allocation_id=pl.int_range(pl.len(), dtype=pl.Int64),
            region_va="va",
            region_bytes="bytes",
            _lives_from=pl.col("alloc_ns").fill_null(-_EVER),
            _lives_until=pl.col("free_ns").fill_null(_EVER),
            _pid=pl.col("pid").cast(pl.Int64).fill_null(-1),
        )
    )
    # Pieces that begin at one address end at one address: only their times differ.
    pieces = cut(lives, edges_of(lives)).with_columns(
        piece=pl.col("va"), _end=pl.col("va") + pl.col("bytes").cast(pl.UInt64)
    )
    places = pieces.select("_pid", "piece", "_end").unique().sort("piece")
    found = (
        copies.with_columns(_pid=pl.col("pid").cast(pl.Int64).fill_null(-1))
        .sort("va")
        .join_asof(
            places,
            left_on="va",
            right_on="piece",
            by="_pid",
            coalesce=False,
            check_sortedness=False,
        )
        .with_columns(piece=pl.when(pl.col("va") < pl.col("_end")).then("piece"))
        .sort("start_ns")
        .join_asof(
            pieces.select("_pid", "piece", "_lives_from", "_lives_until", "allocation_id").sort(
                "_lives_from"
            ),
            left_on="start_ns",
            right_on="_lives_from",
            by=["_pid", "piece"],
            coalesce=False,
            check_sortedness=False,
        )
    )
    alive = pl.col("start_ns") < pl.col("_lives_until")
    named = lives.select("allocation_id", "region_va", "region_bytes", "allocation")
    return (
        found.with_columns(allocation_id=pl.when(alive).then("allocation_id"))
        .select(*copies.columns, "allocation_id")
        .join(named, on="allocation_id", how="left")
    )


def _in_runs(copies: pl.DataFrame, gap_blocks: int) -> pl.DataFrame:
    """Put copies outside allocations into runs of neighbouring VA blocks, per kernel."""
    who = [*KEYS, "kernel"]
    block = (pl.col("va") // VA_BLOCK_BYTES).cast(pl.Int64)
    apart = (pl.col("_block") - pl.col("_block").shift(1)) > gap_blocks
    other = pl.any_horizontal(pl.col(k).ne_missing(pl.col(k).shift(1)) for k in who)
    ordered = (
        copies.with_columns(_block=block)
        .sort(*who, "_block", "batch_id", "va")
        .with_columns(run=(apart | other).fill_null(value=False).cum_sum().cast(pl.Int64))
    )
    fronts = _fronts(ordered)
    by = ["run", "piece"]
    first, last = pl.col("_block").min().over(by), pl.col("_block").max().over(by)
    return (
        ordered.join(fronts, on=["run", "_block"], how="left")
        .with_columns(
            region_va=first.cast(pl.UInt64, strict=False) * VA_BLOCK_BYTES,
            region_bytes=(last - first + 1) * VA_BLOCK_BYTES,
        )
        .drop("_block", "run", "piece")
    )


def _fronts(ordered: pl.DataFrame) -> pl.DataFrame:
    """Split a run where several arrays lie side by side and each is walked at the same time.

    The last block of an array faults late and the first of the next one early; walked backward, it is
    the other way round. A split counts only if it makes all parts streams of that direction.
    """
    rank = pl.col("batch_id").rank("dense").over("run").cast(pl.Int64)
    ranked = ordered.with_columns(_rank=rank)
    first = ranked.group_by("run", "_block").agg(_first=pl.col("_rank").min()).sort("run", "_block")
    step = pl.col("_first").diff().over("run")
    half = (pl.col("_first").max() - pl.col("_first").min()).over("run") / 2
    pieces = first.with_columns(piece=pl.lit(0, pl.Int64))
    for opens, sign in ((step < -half, 1), (step > half, -1)):
        tried = first.with_columns(
            tried=opens.fill_null(value=False).cum_sum().over("run").cast(pl.Int64)
        ).drop("_first")
        medians = (
            ranked.join(tried, on=["run", "_block"])
            .group_by("tried", "_rank", group="run")
            .agg(median_page=(pl.col("va") // PAGE_BYTES).cast(pl.Int64).median())
            .sort("group", "tried", "_rank")
        )
        least = (
            medians.group_by("group", "tried")
            .agg(n=pl.len())
            .group_by("group")
            .agg(pl.col("n").min())
        )
        lines = lines_of(medians, "tried").join(least, on="group")
        split = lines.filter(
            (pl.col("r2") >= LEAST_R2)
            & (pl.col("slope") * sign > 0)
            & (pl.col("n") >= LEAST_BATCHES)
        )["group"]
        pieces = pieces.join(tried, on=["run", "_block"]).select(
            "run",
            "_block",
            "_first",
            piece=pl.when(pl.col("run").is_in(split.implode())).then("tried").otherwise("piece"),
        )
    return pieces.drop("_first")


@analysis(
    question="How does each kernel walk through each array, as its page faults show it?",
    result=ACCESS_PATTERNS,
    reads={
        "gpu_faults": FAULT_READS,
        "migrations": COPY_READS,
        "kernels": KERNEL_READS,
        "allocations": ("alloc_ns", "free_ns", "pid", "va", "bytes", "kind", "name"),
    },
    source="domain.md E-8; fault_rows.md 3.5",
)
def access_patterns(
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    kernels: pl.LazyFrame,
    allocations: pl.LazyFrame,
    *,
    least_batches: int = LEAST_BATCHES,
    gap_blocks: int = 4,
) -> pl.LazyFrame:
    """Class the walk of each kernel through each allocation.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Fault rows, only to tell batches apart.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration; the pages of fault-caused copies are the evidence.
    kernels : LazyFrame, ``KERNELS``
        One row per kernel; launches of one name on one GPU count together.
    allocations : LazyFrame, ``ALLOCATIONS``
        One row per allocation; may be empty.
    least_batches : int, default 6
        With fewer batches there is no line.
    gap_blocks : int, default 4
        Outside allocations, VA blocks at most this far apart are one run.

    Returns
    -------
    LazyFrame, ``ACCESS_PATTERNS``
        One row per process, GPU, kernel and region, in order of these and address. Faulted bytes add
        up to those of the fault-caused copies to a GPU.

    Notes
    -----
    Strided: half or more of the distances between faulted pages are the same, and not one page. A
    stream: a line through the batch medians explains 0.8 of their variance, where a jump back over
    half the span begins a new pass. Clustered: half as many VA blocks as by chance, or
    batches that stay near the one before. What one thread streams and what it does with a stride up
    to 64 KiB look the same, as the prefetcher brings 64 KiB and more.

    Examples
    --------
    >>> from nsan.schema import ALLOCATIONS, GPU_FAULTS, KERNELS, MIGRATIONS
    >>> tables = (GPU_FAULTS.empty(), MIGRATIONS.empty(), KERNELS.empty(), ALLOCATIONS.empty())
    >>> access_patterns(*tables).collect().height
    0
    """

    def build() -> pl.DataFrame:
        copies = with_running_kernel(evidence_of(gpu_faults, migrations), kernels, at="start_ns")
        placed = _in_allocations(copies.collect(), allocations.collect())
        loose = pl.col("allocation_id").is_null()
        runs = _in_runs(placed.filter(loose).drop("region_va", "region_bytes"), gap_blocks)
        return _classed(
            pl.concat([placed.filter(~loose), runs.select(placed.columns)]), least_batches
        )

    return ACCESS_PATTERNS.from_rows(build)


def _classed(placed: pl.DataFrame, least_batches: int) -> pl.DataFrame:
    """Class each region of each kernel."""
    who = [*KEYS, "kernel", "region_va", "region_bytes", "allocation_id"]
    other = pl.any_horizontal(pl.col(k).ne_missing(pl.col(k).shift(1)) for k in who)
    grouped = placed.sort(who).with_columns(
        group=other.fill_null(value=False).cum_sum().cast(pl.Int64)
    )
    regions = grouped.group_by("group").agg(
        pl.col(*who, "allocation", "has_causes").first(), faulted_bytes=pl.col("bytes").sum()
    )
    named = pl.col("allocation_id").is_not_null()
    return (
        regions.join(classes_of(grouped, least_batches=least_batches), on="group")
        .sort("group")
        .with_columns(
            is_allocation=named,
            va=pl.col("region_va"),
            span_fraction=pl.when(named).then(pl.col("span_bytes") / pl.col("region_bytes")),
        )
    )
