"""The few kernels and allocations that move and fault most, and one row for all others.

The tables hold no more rows than a chart can show. What is not in the list stands in a row of its own,
and what belongs to none in another, so that parts add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from nsan.analysis.attribution.allocations import faults_by_allocation
from nsan.analysis.attribution.causes import FAULT_READS, MIGRATION_READS, READS, Causes, causes
from nsan.analysis.attribution.kernels import faults_by_kernel
from nsan.analysis.attribution.work import REMAINDERS, WORK
from nsan.analysis.catalog import analysis
from nsan.analysis.result import DEVICE, PID, Figure, Result, derived, reconstructed
from nsan.uvm.constants import CAUSE_COHERENCE, CAUSE_PREFETCH, CAUSE_USER

_KEYS: Final = ("pid", "device_id")

PART: Final = pl.Enum(
    ["named", "guessed", "others", "cpu", "user_prefetch", "ambiguous", "unattributed"]
)
"""A row of a list of the largest: one of them, all others together, or a remainder."""

_RANK: Final = derived("rank", pl.Int64, "number", "Place in the list from 1; null: not one alone.")
_NAME: Final = derived("name", pl.String, "text", "Its name; null where it is not one alone.")
_PART: Final = derived("part", PART, "label", "One alone, all others, or a remainder.")
_LEFT: Final[tuple[Figure, ...]] = (
    derived("evicted_bytes", pl.Int64, "byte", "Of these to make room."),
    derived("out_coherence_bytes", pl.Int64, "byte", "Of these because a page faulted."),
    derived("out_prefetch_bytes", pl.Int64, "byte", "Of these by the driver's prefetcher."),
    derived("out_user_bytes", pl.Int64, "byte", "Of these by prefetch calls."),
)
_KERNEL_SUMS: Final[tuple[Figure, ...]] = (
    derived("in_bytes", pl.Int64, "byte", "Moved to the GPU."),
    derived("coherence_bytes", pl.Int64, "byte", "Of these because their page faulted."),
    derived("prefetch_bytes", pl.Int64, "byte", "Of these by the driver's prefetcher."),
    derived("in_user_bytes", pl.Int64, "byte", "Of these by prefetch calls."),
    derived("out_bytes", pl.Int64, "byte", "Moved to the CPU."),
    *_LEFT,
    derived("n_fault_rows", pl.Int64, "rows", "Fault rows raised meanwhile."),
    reconstructed("n_batches", pl.Int64, "batches", "Driver batches raised meanwhile."),
    derived("n_migrations", pl.Int64, "copies", "Copies, both ways."),
)
_ALLOCATION_SUMS: Final[tuple[Figure, ...]] = (
    derived("in_bytes", pl.Int64, "byte", "From the CPU to a GPU."),
    derived("in_coherence_bytes", pl.Int64, "byte", "Of these because their page faulted."),
    derived("in_prefetch_bytes", pl.Int64, "byte", "Of these by the driver's prefetcher."),
    derived("in_user_bytes", pl.Int64, "byte", "Of these by prefetch calls."),
    derived("between_bytes", pl.Int64, "byte", "From one GPU to another."),
    derived("out_bytes", pl.Int64, "byte", "From a GPU to the CPU."),
    *_LEFT,
    derived("n_lowest_page_rows", pl.Int64, "rows", "Fault rows whose lowest page is in it."),
    reconstructed(
        "n_batches", pl.Int64, "batches", "Driver batches of known outcome, lowest page in it."
    ),
    derived("n_cpu_faults", pl.Int64, "faults", "CPU page faults in it."),
)

TOP_KERNELS: Final = Result(
    "top_kernels",
    "the GPU work of one name that moves or faults most, all other names, or a remainder",
    (
        PID,
        DEVICE,
        _RANK,
        _PART,
        _NAME,
        derived("n_names", pl.Int64, "names", "Names put together; 0 for remainders."),
        derived("n_instances", pl.Int64, "instances", "Kernels, copies or memsets."),
        *_KERNEL_SUMS,
        derived("exposed_ns", pl.Int64, "ns", "A fault waited while it ran; null: others."),
    ),
)

TOP_ALLOCATIONS: Final = Result(
    "top_allocations",
    "one managed allocation that moves or faults most, all others, or what lies in none",
    (
        PID,
        _RANK,
        _PART,
        _NAME,
        derived("allocation_id", pl.Int64, "id", "As of `faults_by_allocation`."),
        derived("n_allocations", pl.Int64, "allocations", "Put together; 0 for the remainder."),
        derived("bytes", pl.Int64, "byte", "Their size; null for the remainder."),
        *_ALLOCATION_SUMS,
        derived(
            "amplification", pl.Float64, "number", "Bytes to GPUs over unique ones; one alone."
        ),
    ),
)


@analysis(
    question="Which few kernels fault and move most, and what is left for all others?",
    result=TOP_KERNELS,
    reads=READS,
    source="domain.md E-9",
)
def top_kernels(
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    kernels: pl.LazyFrame,
    copies: pl.LazyFrame,
    memsets: pl.LazyFrame,
    *,
    top: int = 12,
) -> pl.LazyFrame:
    """Keep the names of GPU work that move or fault most, and add up all others.

    Parameters
    ----------
    gpu_faults, migrations, kernels, copies, memsets : LazyFrame
        As in :func:`nsan.analysis.attribution.kernels.faults_by_kernel`.
    top : int, default 12
        Names to keep for each GPU of a process: those with the largest share of its bytes or batches.

    Returns
    -------
    LazyFrame, ``TOP_KERNELS``
        Per process and GPU: names by rank, `others` where there are more, then the remainders in which
        anything is. Counts and bytes add up to those of ``faults_by_kernel``.
    """

    def build() -> pl.DataFrame:
        tables = (gpu_faults, migrations, kernels, copies, memsets)
        split = _by_cause(*tables)
        rows = (
            faults_by_kernel(*tables)
            .collect()
            .join(split, on=_ITEM, how="left", nulls_equal=True, maintain_order="left")
            .with_columns(pl.col([*_SPLIT]).fill_null(0))
        )
        is_rest = pl.col("work").cast(pl.String).is_in([*REMAINDERS])
        part = pl.when(is_rest).then(pl.col("work").cast(pl.String)).otherwise(pl.lit("named"))
        counted = [figure.name for figure in _KERNEL_SUMS]
        placed = rows.with_columns(
            part=part.cast(PART),
            n_names=(~is_rest).cast(pl.Int64),
            order=pl.col("work").to_physical(),
        )
        return _kept(placed, _KEYS, [*counted, "n_names", "n_instances"], ["exposed_ns"], top)

    return TOP_KERNELS.from_rows(build)


@analysis(
    question="Which few allocations fault and move most, and what is left for all others?",
    result=TOP_ALLOCATIONS,
    reads={
        "gpu_faults": FAULT_READS,
        "cpu_faults": ("start_ns", "pid", "va"),
        "migrations": MIGRATION_READS,
        "allocations": ("alloc_ns", "free_ns", "pid", "va", "bytes", "kind", "name"),
    },
    source="domain.md E-17",
)
def top_allocations(
    gpu_faults: pl.LazyFrame,
    cpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    allocations: pl.LazyFrame,
    *,
    top: int = 12,
) -> pl.LazyFrame:
    """Keep the managed allocations that move or fault most, and add up all others.

    Parameters
    ----------
    gpu_faults, cpu_faults, migrations, allocations : LazyFrame
        As in :func:`nsan.analysis.attribution.allocations.faults_by_allocation`.
    top : int, default 12
        Allocations to keep for each process: those with the largest share of its bytes or batches.

    Returns
    -------
    LazyFrame, ``TOP_ALLOCATIONS``
        Per process: allocations by rank, `others` where there are more, then `unattributed` if anything
        is in it. Counts and bytes add up to those of ``faults_by_allocation``.
    """

    def build() -> pl.DataFrame:
        rows = faults_by_allocation(gpu_faults, cpu_faults, migrations, allocations).collect()
        outcomes = [f"n_{name}_batches" for name in ("data", "first_touch", "stale", "throttled")]
        one = pl.col("part").cast(pl.String)
        placed = rows.with_columns(
            part=one.replace("allocation", "named").cast(PART),
            n_allocations=(one != "unattributed").cast(pl.Int64),
            n_batches=pl.sum_horizontal(outcomes),
            order=pl.col("allocation_id"),
        )
        counted = [figure.name for figure in _ALLOCATION_SUMS]
        sums = [*counted, "n_allocations", "bytes"]
        return _kept(placed, ["pid"], sums, ["amplification", "allocation_id"], top)

    return TOP_ALLOCATIONS.from_rows(build)


_ITEM: Final = ("pid", "device_id", "work", "name")
_SPLIT: Final = {
    "in_user_bytes": (False, CAUSE_USER),
    "out_coherence_bytes": (True, CAUSE_COHERENCE),
    "out_prefetch_bytes": (True, CAUSE_PREFETCH),
    "out_user_bytes": (True, CAUSE_USER),
}
"""Bytes that ``faults_by_kernel`` does not tell apart: whether they leave the GPU, and why."""


_LAID_TO: Final = {"user": "user_prefetch", "coherence": "cpu", "prefetch": "cpu"}


def _by_cause(
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    kernels: pl.LazyFrame,
    copies: pl.LazyFrame,
    memsets: pl.LazyFrame,
) -> pl.DataFrame:
    """Add up bytes of the causes of ``_SPLIT`` for each name of GPU work and each remainder."""
    known = pl.col("start_ns").is_not_null()
    moved = migrations.select(MIGRATION_READS).filter(known).collect()
    if moved.n_unique(["pid", "device_id"]) > moved["pid"].n_unique():
        # A copy to the CPU may be on its way to another GPU, and is laid to what ran there.
        return _by_work(causes(gpu_faults, migrations, kernels, copies, memsets))
    # Otherwise these causes are laid to prefetch calls and CPU page faults, whatever ran.
    sums = moved.group_by("pid", "device_id").agg(**_sums())
    parts = []
    for work in dict.fromkeys(_LAID_TO.values()):
        own = [name for name in _SPLIT if _LAID_TO[name.split("_")[1]] == work]
        row = sums.select("pid", "device_id", *own, work=pl.lit(work, WORK))
        parts.append(row.with_columns(name=pl.lit(None, pl.String)))
    return pl.concat(parts, how="diagonal")


def _by_work(found: Causes) -> pl.DataFrame:
    """Do so with what each copy is laid to."""
    rest = pl.DataFrame(
        {"work": REMAINDERS.keys(), "running_id": REMAINDERS.values()},
        schema={"work": WORK, "running_id": pl.Int64},
    )
    names = found.work.select("work", "name", running_id="work_id")
    # The GPU that a copy is laid to may be another than that of its row.
    own = found.moved.select("group", "running_id", "direction", "cause_id", "bytes")
    return (
        own.join(pl.concat([names, rest], how="diagonal"), on="running_id", how="left")
        .join(found.groups.select("pid", "device_id", "group"), on="group", how="left")
        .group_by(_ITEM)
        .agg(**_sums())
    )


def _sums() -> dict[str, pl.Expr]:
    leaves, size = pl.col("direction") == "dtoh", pl.col("bytes")
    return {
        figure: size.filter((leaves if out else ~leaves) & (pl.col("cause_id") == cause)).sum()
        for figure, (out, cause) in _SPLIT.items()
    }


def _kept(
    rows: pl.DataFrame, by: Sequence[str], sums: list[str], single: list[str], top: int
) -> pl.DataFrame:
    """Rank rows by their share of bytes or batches, keep the first, and add up the others.

    ``rows`` has ``part`` (remainders are neither ranked nor added up), ``name``, ``order`` (decides
    between equal ones) and ``in_bytes``, ``out_bytes``, ``n_batches``.
    """
    is_item = pl.col("part").cast(pl.String).is_in(["named", "guessed"])
    moved = pl.col("in_bytes") + pl.col("out_bytes")
    shares = [
        pl.when(each.sum().over(by) > 0).then(each / each.sum().over(by))
        for each in (moved, pl.col("n_batches"))
    ]
    ranked = (
        rows.filter(is_item)
        .with_columns(_share=pl.max_horizontal(*shares).fill_null(0.0))
        .sort(*by, "_share", "name", "order", descending=[False] * len(by) + [True, False, False])
        .with_columns(rank=pl.int_range(1, pl.len() + 1, dtype=pl.Int64).over(by))
    )
    columns = [*by, "rank", "part", "name", *sums, *single]
    first = ranked.filter(pl.col("rank") <= top).select(columns)
    others = (
        ranked.filter(pl.col("rank") > top)
        .group_by(by)
        .agg(pl.col(sums).sum())
        .with_columns(part=pl.lit("others", PART))
    )
    something = pl.any_horizontal(pl.col(n) > 0 for n in sums if n != "bytes")
    rest = rows.filter(~is_item & something).select(*by, "part", *sums)
    if "bytes" in sums:
        rest = rest.with_columns(bytes=pl.lit(None, pl.Int64))
    return pl.concat([first, others, rest], how="diagonal_relaxed").sort(
        *by, "part", "rank", nulls_last=True
    )
