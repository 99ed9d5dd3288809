"""Which kernel faults, moves memory, and waits: faults and migrations by the GPU work that ran.

A fault or copy belongs to the kernel, graph, copy or memset that ran on its GPU from its start to its
end. Every table has the remainders too, so that its counts and bytes add up to those of the trace.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.attribution.causes import READS, Causes, causes
from nsan.analysis.attribution.work import REMAINDERS, WORK
from nsan.analysis.catalog import analysis
from nsan.analysis.intervals import intersection, overlap, subtraction, union
from nsan.analysis.result import (
    DEVICE,
    KIND,
    PID,
    Figure,
    Result,
    derived,
    reconstructed,
    recorded,
)
from nsan.uvm.constants import CAUSE_COHERENCE, CAUSE_EVICTION, CAUSE_PREFETCH, PAGE_BYTES

_WORK_COLUMN: Final = derived("work", WORK, "label", "Kind of work, or one of the remainders.")
_NAME: Final = recorded("name", pl.String, "text", "Name of the kernel; null for remainders.")

FIGURES: Final[tuple[Figure, ...]] = (
    derived("in_bytes", pl.Int64, "byte", "Moved to the GPU, from the CPU or another GPU."),
    derived("evicted_bytes", pl.Int64, "byte", "Moved to the CPU to make room."),
    derived("n_fault_rows", pl.Int64, "rows", "Fault rows raised while it ran."),
    reconstructed("n_batches", pl.Int64, "batches", "Driver batches raised while it ran."),
    reconstructed("n_data_batches", pl.Int64, "batches", "Of these, with copies to the GPU."),
    reconstructed("n_first_touch_batches", pl.Int64, "batches", "First touch: nothing to copy."),
    derived("coherence_bytes", pl.Int64, "byte", "Of these because their page faulted."),
    derived("prefetch_bytes", pl.Int64, "byte", "Of these by the driver's prefetcher."),
    derived("n_faulted_pages", pl.Int64, "pages", "4 KiB pages of the coherence bytes."),
    reconstructed("n_stale_batches", pl.Int64, "batches", "The page was there already."),
    reconstructed("n_throttled_batches", pl.Int64, "batches", "Held back against ping-pong."),
    reconstructed("n_other_batches", pl.Int64, "batches", "Outcome not known."),
    derived("n_page_faults", pl.Int64, "faults", "Their recorded counts: on lowest pages only."),
    derived("n_migrations", pl.Int64, "copies", "Copies, both ways."),
    derived("out_bytes", pl.Int64, "byte", "Moved to the CPU, evicted bytes among them."),
)
"""Figures that add up: over the rows of a table they give those of the trace."""

TIMES: Final[tuple[Figure, ...]] = (
    derived("exposed_ns", pl.Int64, "ns", "A fault waited while it ran: at most this much stall."),
    derived("exposed_fraction", pl.Float64, "fraction", "Exposed time over its time."),
    derived("driver_ns", pl.Int64, "ns", "Of the exposed time, no copy under way."),
    derived("migration_ns", pl.Int64, "ns", "Of its time, copies of its GPU under way."),
    derived(
        "exposed_kind",
        KIND,
        "label",
        "Derived from fault rows, or reconstructed batches.",
        governs="exposed|driver",
    ),
    reconstructed("clock_offset_ns", pl.Int64, "ns", "Added to the times of work before joining."),
)

FAULTS_BY_KERNEL: Final = Result(
    "faults_by_kernel",
    "the GPU work of one name on one GPU of a process, or a remainder",
    (
        PID,
        DEVICE,
        _WORK_COLUMN,
        _NAME,
        derived("n_instances", pl.Int64, "instances", "Kernels, copies or memsets of that name."),
        derived("time_ns", pl.Int64, "ns", "Time in which at least one of them ran."),
        *TIMES[:3],
        *FIGURES,
        *TIMES[3:],
    ),
)

FAULTS_BY_KERNEL_INSTANCE: Final = Result(
    "faults_by_kernel_instance",
    "one kernel, graph launch, copy or memset, or a remainder",
    (
        PID,
        DEVICE,
        _WORK_COLUMN,
        _NAME,
        recorded("start_ns", pl.Int64, "ns", "Start as recorded; null for remainders."),
        recorded("end_ns", pl.Int64, "ns", "End as recorded, exclusive; null for remainders."),
        recorded("stream_id", pl.Int64, "id", "CUDA stream."),
        recorded("correlation_id", pl.Int64, "id", "Pairs it with its API call in its process."),
        derived("time_ns", pl.Int64, "ns", "End less start."),
        *TIMES[:3],
        *FIGURES,
        *TIMES[3:],
    ),
)

_COUNTED: Final = tuple(figure.name for figure in FIGURES)
_BATCH_COUNTS: Final = tuple(name for name in _COUNTED if name.endswith("_batches"))
_QUESTION: Final = "Which kernels fault, what do they move, and how long may they have waited?"


def sums_by(found: Causes, *keys: str) -> pl.DataFrame:
    """Add up the figures of faults and copies.

    Parameters
    ----------
    found : Causes
        Faults and copies, each with what it is laid to.
    *keys : str
        Columns that fault rows, batches and migrations all have.

    Returns
    -------
    DataFrame
        One row per key: the keys and the names of ``FIGURES`` (Int64), 0 where nothing is.
    """
    size, cause = pl.col("bytes"), pl.col("cause_id")
    comes, goes = pl.col("direction") != "dtoh", pl.col("direction") == "dtoh"
    of_rows = found.rows.group_by(keys).agg(
        n_fault_rows=pl.len().cast(pl.Int64), n_page_faults=pl.col("n_page_faults").sum()
    )
    of_batches = found.batches.group_by(keys).agg(
        pl.col(name).sum().cast(pl.Int64) for name in _BATCH_COUNTS
    )
    of_copies = found.moved.group_by(keys).agg(
        n_migrations=pl.len().cast(pl.Int64),
        in_bytes=size.filter(comes).sum(),
        coherence_bytes=size.filter(comes & (cause == CAUSE_COHERENCE)).sum(),
        prefetch_bytes=size.filter(comes & (cause == CAUSE_PREFETCH)).sum(),
        out_bytes=size.filter(goes).sum(),
        evicted_bytes=size.filter(goes & (cause == CAUSE_EVICTION)).sum(),
    )
    parts = (of_rows, of_batches, of_copies)
    sums = pl.concat(parts, how="diagonal").group_by(keys).agg(pl.exclude(keys).sum())
    return sums.with_columns(n_faulted_pages=pl.col("coherence_bytes") // PAGE_BYTES)


@analysis(
    question=_QUESTION,
    result=FAULTS_BY_KERNEL,
    reads=READS,
    source="domain.md E-9, E-10, E-20",
)
def faults_by_kernel(
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    kernels: pl.LazyFrame,
    copies: pl.LazyFrame,
    memsets: pl.LazyFrame,
) -> pl.LazyFrame:
    """Add up faults, migrations and exposed time for each name of GPU work.

    Parameters
    ----------
    gpu_faults, migrations : LazyFrame
        Faults and copies, in any order. Without fault rows, batches come from the copies.
    kernels, copies, memsets : LazyFrame
        The GPU work that may have caused them.

    Returns
    -------
    LazyFrame, ``FAULTS_BY_KERNEL``
        Per process and GPU, in that order: kernels, graphs, copies and memsets by name, those with the
        longest exposed time first; then `cpu` (copies that CPU page faults asked for),
        `user_prefetch` (copies of prefetch calls), `ambiguous` (several kernels ran) and
        `unattributed` (nothing ran). Counts and bytes add up to all rows that have a start. Exposed
        time adds up where no work overlaps; of the remainders only `unattributed` has any.

    Examples
    --------
    >>> from nsan.schema import TABLES
    >>> names = ("gpu_faults", "migrations", "kernels", "copies", "memsets")
    >>> faults_by_kernel(*(TABLES[name].empty() for name in names)).collect().height
    0
    """

    def build() -> pl.DataFrame:
        found = causes(gpu_faults, migrations, kernels, copies, memsets)
        names = found.work.select(
            "group", "work", "name", numbers=pl.struct("group", "work", "name").rank("dense")
        ).with_columns(item=pl.col("numbers").cast(pl.Int64))
        work = found.work.with_columns(item=names["item"])
        n_instances = pl.len().cast(pl.Int64)
        items = work.group_by("group", "work", "name", "item").agg(n_instances=n_instances)
        return _table(found, work, items)

    return FAULTS_BY_KERNEL.from_rows(build)


@analysis(
    question=_QUESTION.replace("kernels", "single kernels"),
    result=FAULTS_BY_KERNEL_INSTANCE,
    reads=READS,
    source="domain.md E-9, E-10, E-20",
)
def faults_by_kernel_instance(
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    kernels: pl.LazyFrame,
    copies: pl.LazyFrame,
    memsets: pl.LazyFrame,
) -> pl.LazyFrame:
    """Add up faults, migrations and exposed time for each kernel, copy or memset.

    Parameters
    ----------
    gpu_faults, migrations : LazyFrame
        Faults and copies, in any order. Without fault rows, batches come from the copies.
    kernels, copies, memsets : LazyFrame
        The GPU work that may have caused them.

    Returns
    -------
    LazyFrame, ``FAULTS_BY_KERNEL_INSTANCE``
        Per process and GPU, in that order: its work by start, then the remainders as of
        :func:`faults_by_kernel`.
    """

    def build() -> pl.DataFrame:
        found = causes(gpu_faults, migrations, kernels, copies, memsets)
        work = found.work.with_columns(item="work_id")
        back = pl.col("offset_ns")
        items = work.select(
            *("group", "work", "name", "item", "stream_id", "correlation_id"),
            start_ns=pl.col("start_ns") - back,
            end_ns=pl.col("end_ns") - back,
            n_instances=pl.lit(1, pl.Int64),
        )
        is_rest = pl.col("start_ns").is_null()
        order = ("start_ns", "end_ns", "work", "item")
        return _table(found, work, items).sort("pid", "device_id", is_rest, *order)

    return FAULTS_BY_KERNEL_INSTANCE.from_rows(build)


def _table(found: Causes, work: pl.DataFrame, items: pl.DataFrame) -> pl.DataFrame:
    """Put figures and times to each item of work, and add the remainders."""
    known = work.select("work_id", "item")
    remainders = pl.DataFrame(
        {"work": REMAINDERS.keys(), "item": REMAINDERS.values()},
        schema={"work": WORK, "item": pl.Int64},
    )
    rest = found.groups.select("group").join(remainders, how="cross")
    sums = _by_item(sums_by(found, "group", "running_id"), known)
    rows = pl.concat([items, rest], how="diagonal")
    time, exposed = pl.col("time_ns"), pl.col("exposed_ns")
    kind = pl.when("recorded").then(pl.lit("derived")).otherwise(pl.lit("reconstructed"))
    return (
        rows.join(sums, on=["group", "item"], how="left")
        .join(_times(found, work), on=["group", "item"], how="left")
        .join(found.groups, on="group", how="left")
        .with_columns(
            *(pl.col(name).fill_null(0) for name in (*_COUNTED, "n_instances")),
            exposed_fraction=pl.when(time > 0).then(exposed / time),
            exposed_kind=kind.cast(KIND),
            clock_offset_ns="offset_ns",
        )
        .sort(
            *("pid", "device_id", "work", "exposed_ns", "in_bytes", "name", "item"),
            descending=[False, False, False, True, True, False, False],
            nulls_last=[False, False, False, True, True, True, True],
        )
    )


def _by_item(sums: pl.DataFrame, known: pl.DataFrame) -> pl.DataFrame:
    """Add up what belongs to the same item of work; remainders are items of their own."""
    return (
        sums.join(known, left_on="running_id", right_on="work_id", how="left")
        .with_columns(item=pl.coalesce("item", "running_id"))
        .group_by("group", "item")
        .agg(pl.col(_COUNTED).sum())
    )


def _times(found: Causes, work: pl.DataFrame) -> pl.DataFrame:
    """Measure the time of each item of work, and what of it faults and copies cover."""
    by = ["group"]
    spans = union(work.lazy(), by=["group", "item"])
    waits, copying = found.waits.lazy(), union(found.moved.lazy(), by=by)
    both = intersection(waits, copying, by=by)
    outside = subtraction(waits, spans, by=by)
    alone = outside.with_columns(item=pl.lit(REMAINDERS["unattributed"], pl.Int64))
    length = pl.col("end_ns") - pl.col("start_ns")
    parts = [
        spans.with_columns(time_ns=length, is_work=pl.lit(value=True)),
        alone.with_columns(time_ns=pl.lit(None, pl.Int64), is_work=pl.lit(value=False)),
    ]
    measured = pl.concat([part.select("group", "item", *_SPAN) for part in parts])
    for name, steps in (("exposed_ns", waits), ("migration_ns", copying), ("copied_ns", both)):
        measured = overlap(measured, steps, by=by).rename({"overlap_ns": name})
    sums = measured.group_by("group", "item").agg(
        pl.col("time_ns", "exposed_ns", "copied_ns").sum(),
        pl.col("migration_ns").filter("is_work").sum(),
        pl.col("is_work").any(),
    )
    is_work = pl.col("is_work")
    return sums.select(
        "group",
        "item",
        "exposed_ns",
        time_ns=pl.when(is_work).then("time_ns"),
        migration_ns=pl.when(is_work).then("migration_ns"),
        driver_ns=pl.col("exposed_ns") - pl.col("copied_ns"),
    ).collect()


_SPAN: Final = ("start_ns", "end_ns", "time_ns", "is_work")
