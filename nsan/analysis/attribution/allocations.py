"""Where in the program's memory faults and migrations are: by allocation, in address and in time.

Addresses are used again, so an allocation holds ``[va, va + bytes)`` from its call to its release. A
copy over several allocations is cut at their edges; what lies in none is a row of its own.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.attribution.causes import FAULT_READS, MIGRATION_READS
from nsan.analysis.attribution.places import NOWHERE, guessed_allocations, places
from nsan.analysis.catalog import analysis
from nsan.analysis.driver.batches import batches
from nsan.analysis.intervals import union
from nsan.analysis.result import KIND, PID, Result, derived, reconstructed, recorded
from nsan.uvm.constants import (
    CAUSE_COHERENCE,
    CAUSE_EVICTION,
    CAUSE_PREFETCH,
    CAUSE_USER,
    MANAGED_KINDS,
    PAGE_BYTES,
)

PART: Final = pl.Enum(["allocation", "guessed", "unattributed"])

_OUTCOMES: Final = ("data", "first_touch", "stale", "throttled")

FAULTS_BY_ALLOCATION: Final = Result(
    "faults_by_allocation",
    "one managed allocation from its call to its release, or what lies in none of a process",
    (
        PID,
        derived("part", PART, "label", "Recorded, guessed from addresses, or the remainder."),
        derived("allocation_id", pl.Int64, "id", "Number by process, time and address, from 0."),
        derived("name", pl.String, "text", "Variable name, or else address and size."),
        recorded("bytes", pl.Int64, "byte", "Size."),
        derived("in_bytes", pl.Int64, "byte", "From the CPU to a GPU."),
        derived("out_bytes", pl.Int64, "byte", "From a GPU to the CPU, evicted bytes among them."),
        derived("evicted_bytes", pl.Int64, "byte", "From a GPU to the CPU to make room."),
        derived("amplification", pl.Float64, "number", "Bytes to GPUs over unique ones."),
        derived("density_fraction", pl.Float64, "fraction", "Unique bytes moved over its size."),
        derived(
            "in_coherence_bytes", pl.Int64, "byte", "Came to a GPU because their page faulted."
        ),
        derived("in_prefetch_bytes", pl.Int64, "byte", "Came by the driver's prefetcher."),
        derived("n_faulted_pages", pl.Int64, "pages", "4 KiB pages that faults brought to GPUs."),
        derived("n_lowest_page_rows", pl.Int64, "rows", "Fault rows whose lowest page is in it."),
        reconstructed("n_data_batches", pl.Int64, "batches", "Lowest page in it, with copies."),
        reconstructed("n_first_touch_batches", pl.Int64, "batches", "Same, first touch."),
        derived("n_cpu_faults", pl.Int64, "faults", "CPU page faults in it."),
        recorded("va", pl.UInt64, "byte address", "First byte."),
        recorded("alloc_ns", pl.Int64, "ns", "Allocated; null: before the capture."),
        recorded("free_ns", pl.Int64, "ns", "Released; null: not in the capture."),
        derived("in_user_bytes", pl.Int64, "byte", "Came by prefetch calls."),
        derived("between_bytes", pl.Int64, "byte", "From one GPU to another."),
        derived("out_coherence_bytes", pl.Int64, "byte", "Left because the CPU faulted."),
        derived("out_prefetch_bytes", pl.Int64, "byte", "Left by the driver's prefetcher."),
        derived("out_user_bytes", pl.Int64, "byte", "Left by prefetch calls."),
        derived("n_page_faults", pl.Int64, "faults", "Their recorded counts: that page only."),
        reconstructed("n_stale_batches", pl.Int64, "batches", "Same, the page was there already."),
        reconstructed("n_throttled_batches", pl.Int64, "batches", "Same, held back."),
        derived("n_migrations", pl.Int64, "copies", "Copies of it; one over two counts in both."),
        derived("first_ns", pl.Int64, "ns", "Its first fault or copy."),
        derived("last_ns", pl.Int64, "ns", "Start of its last fault or copy."),
        derived("unique_bytes", pl.Int64, "byte", "Bytes moved at least once, any way."),
        derived("unique_in_bytes", pl.Int64, "byte", "Bytes that came to a GPU at least once."),
        derived("range_kind", KIND, "label", "Recorded, or reconstructed from addresses."),
    ),
)

_COUNTED: Final = tuple(
    name
    for name, dtype in FAULTS_BY_ALLOCATION.schema.items()
    if name.startswith(("n_", "in_", "out_")) or name in ("between_bytes", "evicted_bytes")
)


@analysis(
    question="Which allocations fault and move, how often, and how much of them?",
    result=FAULTS_BY_ALLOCATION,
    reads={
        "gpu_faults": FAULT_READS,
        "cpu_faults": ("start_ns", "pid", "va"),
        "migrations": MIGRATION_READS,
        "allocations": ("alloc_ns", "free_ns", "pid", "va", "bytes", "kind", "name"),
    },
    complexity="O(n log n) for n rows; memory grows with allocations that use the same addresses",
    source="domain.md E-13, E-17, E-20",
)
def faults_by_allocation(
    gpu_faults: pl.LazyFrame,
    cpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    allocations: pl.LazyFrame,
) -> pl.LazyFrame:
    """Add up faults and migrations for each managed allocation.

    Parameters
    ----------
    gpu_faults, cpu_faults, migrations : LazyFrame
        Faults and copies, in any order; rows without a start or an address are left out.
    allocations : LazyFrame, ``ALLOCATIONS``
        Those of managed memory count, and those whose kind is not known. For a process that has
        none, runs of touched VA blocks stand for them, marked as guessed.

    Returns
    -------
    LazyFrame, ``FAULTS_BY_ALLOCATION``
        One row per allocation, ordered by process, time and address, then one `unattributed` row per
        process. Bytes, fault rows and CPU faults add up to all rows; copies do not, for one that lies
        over two allocations counts in both.

    Examples
    --------
    >>> from nsan.schema import TABLES
    >>> names = ("gpu_faults", "cpu_faults", "migrations", "allocations")
    >>> faults_by_allocation(*(TABLES[name].empty() for name in names)).collect().height
    0
    """

    def build() -> pl.DataFrame:
        rows = gpu_faults.select("start_ns", "pid", "va", "n_page_faults").collect()
        touched = cpu_faults.select("start_ns", "pid", "va").collect()
        moved = migrations.select(MIGRATION_READS).collect()
        held = _held(allocations, rows, touched, moved)
        served = _served(gpu_faults, migrations)
        sums = [
            _of_points(_placed(rows, held), "n_lowest_page_rows"),
            _of_points(_placed(touched, held), "n_cpu_faults"),
            _of_batches(places(served, held)),
            *_of_copies(_placed(moved, held)),
        ]
        return _table(held, sums)

    return FAULTS_BY_ALLOCATION.from_rows(build)


def _placed(rows: pl.DataFrame, held: pl.DataFrame) -> pl.DataFrame:
    """Put rows into allocations; those without a time, an address or a size are nowhere."""
    needed = ("start_ns", "va", "bytes") if "bytes" in rows.columns else ("start_ns", "va")
    known = pl.all_horizontal(pl.col(needed).is_not_null())
    if "bytes" in rows.columns:
        known &= pl.col("bytes") > 0
    found = places(rows.filter(known), held)
    lost = rows.filter(~known).with_columns(
        row=-1 - pl.int_range(pl.len(), dtype=pl.Int64), key=pl.lit(NOWHERE, pl.Int64)
    )
    return pl.concat([found, lost], how="diagonal_relaxed")


def _held(
    allocations: pl.LazyFrame, rows: pl.DataFrame, touched: pl.DataFrame, moved: pl.DataFrame
) -> pl.DataFrame:
    """List the managed allocations by number, and guessed ones for processes that have none."""
    kind = pl.col("kind").cast(pl.String)
    managed = kind.is_in([*MANAGED_KINDS, "unknown", "other"]) | kind.is_null()
    columns = ("alloc_ns", "free_ns", "pid", "va", "bytes", "name")
    recorded_ones = (
        allocations.filter(managed & pl.col("va").is_not_null() & (pl.col("bytes") > 0))
        .select(*columns, part=pl.lit("allocation", PART))
        .collect()
    )
    guessed = guessed_allocations(rows, touched, moved).join(
        recorded_ones, on="pid", how="anti", nulls_equal=True
    )
    ranges = pl.concat(
        [
            recorded_ones,
            guessed.with_columns(
                alloc_ns=pl.lit(None, pl.Int64),
                free_ns=pl.lit(None, pl.Int64),
                name=pl.lit(None, pl.String),
                part=pl.lit("guessed", PART),
            ).select(recorded_ones.columns),
        ]
    )
    pids = [frame.select("pid") for frame in (ranges, rows, touched, moved)]
    rest = pl.concat(pids).unique().with_columns(part=pl.lit("unattributed", PART))
    order = ["pid", "alloc_ns", "va", "bytes", "free_ns", "name"]
    numbered = ranges.sort(order).with_columns(
        allocation_id=pl.int_range(pl.len(), dtype=pl.Int64), key=pl.int_range(pl.len())
    )
    numbered = numbered.with_columns(_named(numbered))
    return pl.concat([numbered, rest.with_columns(key=pl.lit(NOWHERE, pl.Int64))], how="diagonal")


def _served(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.DataFrame:
    outcome = pl.col("outcome").cast(pl.String)
    return (
        batches(gpu_faults, migrations)
        .select(
            "pid",
            "va",
            start_ns=pl.coalesce("start_ns", "first_copy_ns"),
            **{f"n_{name}_batches": (outcome == name).fill_null(value=False) for name in _OUTCOMES},
        )
        .filter(pl.all_horizontal(pl.col("start_ns", "va").is_not_null()))
        .collect()
    )


def _of_points(placed: pl.DataFrame, count: str) -> pl.DataFrame:
    return placed.group_by("pid", "key").agg(
        pl.len().cast(pl.Int64).alias(count),
        *(pl.col(name).sum() for name in ("n_page_faults",) if name in placed.columns),
        first_ns=pl.col("start_ns").min(),
        last_ns=pl.col("start_ns").max(),
    )


def _of_batches(placed: pl.DataFrame) -> pl.DataFrame:
    counts = (f"n_{name}_batches" for name in _OUTCOMES)
    return placed.group_by("pid", "key").agg(pl.col(name).sum().cast(pl.Int64) for name in counts)


def _of_copies(placed: pl.DataFrame) -> list[pl.DataFrame]:
    """Add up the pieces of copies; and measure the union of their addresses."""
    size, cause, way = pl.col("bytes"), pl.col("cause_id"), pl.col("direction")
    causes = {"coherence": CAUSE_COHERENCE, "prefetch": CAUSE_PREFETCH, "user": CAUSE_USER}
    by_cause = {
        f"{side}_{name}_bytes": size.filter((way == direction) & (cause == number)).sum()
        for side, direction in (("in", "htod"), ("out", "dtoh"))
        for name, number in causes.items()
    }
    faulted = size.filter((way != "dtoh") & (cause == CAUSE_COHERENCE)).sum()
    sums = placed.group_by("pid", "key").agg(
        n_migrations=pl.col("row").n_unique().cast(pl.Int64),
        in_bytes=size.filter(way == "htod").sum(),
        out_bytes=size.filter(way == "dtoh").sum(),
        between_bytes=size.filter(way == "dtod").sum(),
        evicted_bytes=size.filter(cause == CAUSE_EVICTION).sum(),
        n_faulted_pages=faulted // PAGE_BYTES,
        first_ns=pl.col("start_ns").min(),
        last_ns=pl.col("start_ns").max(),
        **by_cause,
    )
    to_gpu = placed.filter(way != "dtoh")
    return [sums, _unique(placed, "unique_bytes"), _unique(to_gpu, "unique_in_bytes")]


def _unique(placed: pl.DataFrame, name: str) -> pl.DataFrame:
    """Measure how many different bytes the pieces hold."""
    # Interval algebra works on Int64: addresses count from the lowest of their allocation.
    low = (pl.col("va") - pl.col("va").min().over("pid", "key")).cast(pl.Int64, wrap_numerical=True)
    ranges = placed.lazy().select("pid", "key", start_ns=low, end_ns=low + pl.col("bytes"))
    merged = union(ranges, by=["pid", "key"])
    length = (pl.col("end_ns") - pl.col("start_ns")).sum()
    return merged.group_by("pid", "key").agg(length.alias(name)).collect()


def _table(held: pl.DataFrame, sums: list[pl.DataFrame]) -> pl.DataFrame:
    columns = (*_COUNTED, "unique_bytes", "unique_in_bytes")
    whole = (
        pl.concat(sums, how="diagonal")
        .group_by("pid", "key")
        .agg(pl.col(columns).sum(), pl.col("first_ns").min(), pl.col("last_ns").max())
    )
    came = pl.col("in_bytes") + pl.col("between_bytes")
    unique = pl.col("unique_in_bytes")
    kind = pl.when(pl.col("part") == "guessed").then(pl.lit("reconstructed"))
    return (
        held.join(whole, on=["pid", "key"], how="left", nulls_equal=True)
        .with_columns(pl.col(columns).fill_null(0))
        .with_columns(
            amplification=pl.when(unique > 0).then(came / unique),
            density_fraction=pl.col("unique_bytes") / pl.col("bytes"),
            range_kind=kind.otherwise(pl.lit("recorded")).cast(KIND),
        )
        .sort("pid", "part", "allocation_id")
    )


def _named(held: pl.DataFrame) -> pl.Series:
    """Name what has no name by its address and size."""
    shown = [
        f"{va:#x}, {size} byte" if name is None else name
        for name, va, size in held.select("name", "va", "bytes").iter_rows()
    ]
    return pl.Series("name", shown, dtype=pl.String)
