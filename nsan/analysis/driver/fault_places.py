"""Where page faults fall: by VA block, by page, by access type.

A GPU fault row names only the lowest page of its batch, so places come from the copies that
faults caused as well; both stand beside each other under their own names.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.driver.batches import BATCH_READS, batches
from nsan.analysis.driver.rows_and_copies import ROW_READS
from nsan.analysis.result import PID, Result, derived, recorded
from nsan.schema import ACCESS
from nsan.uvm.constants import (
    CAUSE_COHERENCE,
    CAUSE_EVICTION,
    CAUSE_PREFETCH,
    PAGE_BYTES,
    VA_BLOCK_BYTES,
)

_SPAN: Final = (
    derived("first_ns", pl.Int64, "ns", "Start of the first fault or copy."),
    derived("last_ns", pl.Int64, "ns", "Start of the last one."),
)

BY_VA_BLOCK: Final = Result(
    "faults_by_va_block",
    "one 2 MiB VA block of one process that faulted",
    (
        PID,
        derived("va", pl.UInt64, "byte address", "First byte of the block."),
        derived(
            "n_faulted_pages", pl.Int64, "pages", "4 KiB pages copied to GPUs since they faulted."
        ),
        derived("n_distinct_pages", pl.Int64, "pages", "Distinct pages among them."),
        recorded(
            "n_fault_rows", pl.Int64, "rows", "GPU fault rows: batches whose lowest page is here."
        ),
        recorded("n_page_faults", pl.Int64, "faults", "Recorded counts of these rows added up."),
        recorded("n_cpu_faults", pl.Int64, "faults", "CPU page faults."),
        recorded("coherence_bytes", pl.Int64, "byte", "Copied to GPUs since pages faulted."),
        recorded("prefetch_bytes", pl.Int64, "byte", "Copied to GPUs by the driver's prefetcher."),
        recorded("out_bytes", pl.Int64, "byte", "Copied to the CPU by page faults."),
        recorded("evicted_bytes", pl.Int64, "byte", "Copied to the CPU to make room."),
        *_SPAN,
        derived("va_block", pl.UInt64, "id", "Number of the block: address // 2 MiB."),
    ),
)

BY_PAGE: Final = Result(
    "faults_by_page",
    "one 4 KiB page of one process that faulted",
    (
        PID,
        derived("va", pl.UInt64, "byte address", "The page."),
        derived("n_gpu_copies", pl.Int64, "copies", "Copies to GPUs that its own fault caused."),
        derived("n_cpu_copies", pl.Int64, "copies", "Copies to the CPU that its own fault caused."),
        recorded("n_fault_rows", pl.Int64, "rows", "GPU fault rows that name it."),
        recorded("n_page_faults", pl.Int64, "faults", "Recorded counts of these rows added up."),
        recorded("n_cpu_faults", pl.Int64, "faults", "CPU page faults."),
        *_SPAN,
        derived("va_block", pl.UInt64, "id", "Its VA block."),
    ),
)

BY_ACCESS: Final = Result(
    "faults_by_access",
    "the GPU fault rows of one process, access type and outcome",
    (
        PID,
        recorded("access", ACCESS, "label", "Access type of the batch's lowest page."),
        derived("outcome", pl.String, "label", "Data copied, first touch, stale or throttled."),
        recorded("n_fault_rows", pl.Int64, "rows", "GPU fault rows: batches."),
        recorded("n_page_faults", pl.Int64, "faults", "Recorded counts added up."),
        derived(
            "n_faulted_pages", pl.Int64, "pages", "Pages copied since they faulted; lower bound."
        ),
        derived("bytes", pl.Int64, "byte", "Copied to the GPU in these batches."),
        derived("latency_ns", pl.Int64, "ns", "Raised to replayed, added up; batches overlap."),
        derived("service_ns", pl.Int64, "ns", "Service time added up."),
    ),
)

_FAULT_READS: Final = ("start_ns", "pid", "va", "n_page_faults")
_CPU_READS: Final = ("start_ns", "pid", "va")
_MOVE_READS: Final = ("start_ns", "pid", "va", "bytes", "direction", "cause_id")


@analysis(
    question="Which VA blocks fault most?",
    result=BY_VA_BLOCK,
    reads={"gpu_faults": _FAULT_READS, "cpu_faults": _CPU_READS, "migrations": _MOVE_READS},
    source="domain.md E-3, E-7",
)
def faults_by_va_block(
    gpu_faults: pl.LazyFrame, cpu_faults: pl.LazyFrame, migrations: pl.LazyFrame
) -> pl.LazyFrame:
    """Count faults and what they moved in each VA block.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        One row per driver batch.
    cpu_faults : LazyFrame, ``CPU_FAULTS``
        One row per CPU page fault.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration.

    Returns
    -------
    LazyFrame, ``BY_VA_BLOCK``
        One row per process and block, most faulted pages first. Rows, counts and bytes add up to
        those of the trace that have an address; a copy lies in one block.
    """
    key = [(pl.col("va") // VA_BLOCK_BYTES).alias("va_block")]
    size, to_gpu = pl.col("bytes"), pl.col("direction") != "dtoh"
    faulted = to_gpu & (pl.col("cause_id") == CAUSE_COHERENCE)
    by_fault = pl.col("cause_id").is_in([CAUSE_COHERENCE, CAUSE_PREFETCH])
    moved = (
        _placed(migrations)
        .filter(by_fault | (pl.col("cause_id") == CAUSE_EVICTION))
        .group_by("pid", *key)
        .agg(
            n_faulted_pages=size.filter(faulted).sum() // PAGE_BYTES,
            coherence_bytes=size.filter(faulted).sum(),
            prefetch_bytes=size.filter(to_gpu, pl.col("cause_id") == CAUSE_PREFETCH).sum(),
            out_bytes=size.filter(~to_gpu & by_fault).sum(),
            evicted_bytes=size.filter(~to_gpu, pl.col("cause_id") == CAUSE_EVICTION).sum(),
            first_ns=pl.col("start_ns").min(),
            last_ns=pl.col("start_ns").max(),
        )
    )
    distinct = (
        _pages(migrations.filter(to_gpu))
        .unique(["pid", "va"])
        .group_by("pid", *key)
        .agg(n_distinct_pages=pl.len())
    )
    found = _joined([moved, _rows(gpu_faults, key), _cpu(cpu_faults, key), distinct], "va_block")
    return (
        _filled(found, BY_VA_BLOCK)
        .with_columns(va=pl.col("va_block") * VA_BLOCK_BYTES)
        .sort(
            ["n_faulted_pages", "n_fault_rows", "n_cpu_faults", "pid", "va_block"],
            descending=[True, True, True, False, False],
        )
        .select(BY_VA_BLOCK.cast())
    )


@analysis(
    question="Which pages fault most?",
    result=BY_PAGE,
    reads={"gpu_faults": _FAULT_READS, "cpu_faults": _CPU_READS, "migrations": _MOVE_READS},
    source="domain.md E-3",
)
def faults_by_page(
    gpu_faults: pl.LazyFrame, cpu_faults: pl.LazyFrame, migrations: pl.LazyFrame
) -> pl.LazyFrame:
    """Count the faults of each page, as rows name it and as copies show it.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        One row per driver batch.
    cpu_faults : LazyFrame, ``CPU_FAULTS``
        One row per CPU page fault.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration.

    Returns
    -------
    LazyFrame, ``BY_PAGE``
        One row per process and 4 KiB page, most copies first. On hosts with 64 KiB pages 16
        neighbours stand for one.
    """
    key = [(pl.col("va") // PAGE_BYTES * PAGE_BYTES).alias("va")]
    to_gpu = pl.col("direction") != "dtoh"
    moved = (
        _pages(migrations)
        .group_by("pid", "va")
        .agg(
            n_gpu_copies=to_gpu.sum(),
            n_cpu_copies=(~to_gpu).sum(),
            first_ns=pl.col("start_ns").min(),
            last_ns=pl.col("start_ns").max(),
        )
    )
    found = _joined([moved, _rows(gpu_faults, key), _cpu(cpu_faults, key)], "va")
    copies = pl.col("n_gpu_copies") + pl.col("n_cpu_copies")
    order = [copies, pl.col("n_page_faults"), pl.col("n_cpu_faults"), pl.col("pid"), pl.col("va")]
    return (
        _filled(found, BY_PAGE)
        .with_columns(va_block=pl.col("va") // VA_BLOCK_BYTES)
        .sort(order, descending=[True, True, True, False, False])
        .select(BY_PAGE.cast())
    )


@analysis(
    question="Do GPU faults read or write, and what became of them?",
    result=BY_ACCESS,
    reads=BATCH_READS,
    source="domain.md E-3, E-20",
)
def faults_by_access(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Split GPU fault rows by access type and outcome.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        One row per driver batch.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration.

    Returns
    -------
    LazyFrame, ``BY_ACCESS``
        One row per process, access type and outcome that has rows, most rows first. All rows
        are counted; rows that tell no batch have the outcome `unknown`. Batches that stand on copies
        alone have no row and are left out.
    """
    keys = ["pid", "access", "outcome"]
    figures = ["n_faulted_pages", "bytes", "latency_ns", "service_ns"]
    batch = ["pid", "device_id", "end_ns"]
    known = batches(gpu_faults, migrations).filter(pl.col("start_ns").is_not_null())
    # Where several rows make one batch, its figures stand with the lowest page.
    order = [*batch, "va", "start_ns"]
    first = (pl.int_range(pl.len()).over(batch) == 0) & pl.col("end_ns").is_not_null()
    own = pl.when("_first").then(pl.col(figures))
    return (
        gpu_faults.select(ROW_READS)
        .sort(order)
        .with_columns(_first=first)
        .join(
            known.select(*batch, pl.col("outcome").cast(pl.String), *figures),
            on=batch,
            how="left",
            nulls_equal=True,
        )
        .with_columns(own, outcome=pl.col("outcome").fill_null("unknown"))
        .group_by(keys)
        .agg(
            n_fault_rows=pl.len(),
            n_page_faults=pl.col("n_page_faults").sum(),
            **{name: pl.col(name).sum() for name in figures},
        )
        .sort(["n_fault_rows", *keys], descending=[True, False, False, False], nulls_last=True)
        .select(BY_ACCESS.cast())
    )


def _placed(rows: pl.LazyFrame) -> pl.LazyFrame:
    return rows.filter(pl.col("va").is_not_null())


def _pages(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """List every page of every copy that its own fault caused; no copy is larger than a block."""
    page = pl.col("va") // PAGE_BYTES
    last = (pl.col("va") + pl.col("bytes").cast(pl.UInt64) - 1) // PAGE_BYTES
    return (
        _placed(migrations)
        .filter(
            pl.col("cause_id") == CAUSE_COHERENCE, pl.col("bytes").is_between(1, VA_BLOCK_BYTES)
        )
        .select(
            "pid",
            "direction",
            "start_ns",
            va=pl.int_ranges(page.cast(pl.Int64), last.cast(pl.Int64) + 1),
        )
        .explode("va")
        .with_columns(va=pl.col("va").cast(pl.UInt64) * PAGE_BYTES)
    )


def _rows(gpu_faults: pl.LazyFrame, key: list[pl.Expr]) -> pl.LazyFrame:
    return (
        _placed(gpu_faults)
        .group_by("pid", *key)
        .agg(
            n_fault_rows=pl.len(),
            n_page_faults=pl.col("n_page_faults").sum(),
            first_ns=pl.col("start_ns").min(),
            last_ns=pl.col("start_ns").max(),
        )
    )


def _cpu(cpu_faults: pl.LazyFrame, key: list[pl.Expr]) -> pl.LazyFrame:
    return (
        _placed(cpu_faults)
        .group_by("pid", *key)
        .agg(
            n_cpu_faults=pl.len(),
            first_ns=pl.col("start_ns").min(),
            last_ns=pl.col("start_ns").max(),
        )
    )


def _joined(parts: list[pl.LazyFrame], key: str) -> pl.LazyFrame:
    """Put the figures of each place side by side, and its first and last time together."""
    found = pl.concat(parts, how="diagonal")
    names = found.collect_schema().names()
    sums = [name for name in names if name not in {"pid", key, "first_ns", "last_ns"}]
    return found.group_by("pid", key).agg(
        pl.col(sums).cast(pl.Int64).sum(), pl.col("first_ns").min(), pl.col("last_ns").max()
    )


def _filled(found: pl.LazyFrame, result: Result) -> pl.LazyFrame:
    counts = [c.name for c in result.columns if c.name.startswith("n_") or c.unit == "byte"]
    return found.with_columns(pl.col(counts).fill_null(0))
