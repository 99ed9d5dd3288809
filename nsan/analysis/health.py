"""Figures that say whether rows can be what they should be: sizes, order, pairing, clocks.

The driver moves whole pages, never across a VA block; a GPU fault row is a driver batch whose
copies all end before it does. Where a figure is not zero, rows were lost or mean something else,
and analyses that build on the rule must not be trusted.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.uvm.constants import (
    CAUSE_COHERENCE,
    CAUSE_PREFETCH,
    FAULT_BATCH_SIZE,
    PAGE_BYTES,
    PUSH_GAPS_NS,
    VA_BLOCK_BYTES,
)

MAX_CLOCK_SKEW_NS: Final = 100_000
"""A fault this much before a kernel may still belong to it (65 us were measured)."""


def _n(condition: pl.Expr) -> pl.Expr:
    return condition.sum().cast(pl.Int64)


def migration_figures(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Count migration rows that break a rule of the driver.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration.

    Returns
    -------
    LazyFrame
        One row of Int64 counts: ``n``, ``n_part_pages`` (not whole pages), ``n_over_va_block``
        (more than a VA block, or across a line of one), ``n_no_length`` (start equals end),
        ``n_other_cause`` (a number without a label), ``n_no_cause``, ``n_no_address``,
        ``n_no_process``.
    """
    size, va = pl.col("bytes"), pl.col("va")
    last = va + size.cast(pl.UInt64, strict=False) - 1
    crosses = (va // VA_BLOCK_BYTES) != (last // VA_BLOCK_BYTES)
    return migrations.select(
        n=pl.len().cast(pl.Int64),
        n_part_pages=_n((size <= 0) | (size % PAGE_BYTES != 0)),
        n_over_va_block=_n((size > VA_BLOCK_BYTES) | ((size > 0) & crosses)),
        n_no_length=_n(pl.col("start_ns") == pl.col("end_ns")),
        n_other_cause=_n(pl.col("cause") == "other"),
        n_no_cause=_n(pl.col("cause_id").is_null()),
        n_no_address=_n(va.is_null()),
        n_no_process=_n(pl.col("pid").is_null()),
    )


def push_figures(migrations: pl.LazyFrame, *, mixed: bool = True) -> pl.LazyFrame:
    """Count pushes, and those to a GPU that the prefetcher began without a fault.

    A push is one block service: copies chained end to start in one VA block and direction. The
    prefetcher only extends faults, so a push of its copies alone has lost its head. On 46 real
    captures this was seen only where rows are known to be missing.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, sorted by start.
    mixed : bool, default True
        Rows of several GPUs or processes may stand between each other; without it they are compared
        as they come, which is faster.

    Returns
    -------
    LazyFrame
        One row of Int64 counts: ``n_pushes``, ``n_headless_pushes``.
    """
    place = [
        pl.col("device_id"),
        pl.col("pid"),
        pl.col("direction"),
        pl.col("va") // VA_BLOCK_BYTES,
    ]
    same = pl.all_horizontal(key.eq_missing(key.shift(1)) for key in place)
    chained = (pl.col("start_ns") - pl.col("end_ns").shift(1)).is_in(PUSH_GAPS_NS)
    pushes = (
        migrations.filter(pl.col("start_ns").is_not_null() & pl.col("va").is_not_null())
        .sort(["device_id", "pid", "start_ns"] if mixed else ["start_ns"], maintain_order=mixed)
        .with_columns(_push=(same & chained).fill_null(value=False).not_().cum_sum())
        .group_by("_push")
        .agg(
            to_gpu=(pl.col("direction") == "htod").first(),
            faulted=(pl.col("cause_id") == CAUSE_COHERENCE).any(),
            prefetched=(pl.col("cause_id") == CAUSE_PREFETCH).any(),
        )
    )
    headless = pl.col("to_gpu") & pl.col("prefetched") & pl.col("faulted").not_()
    return pushes.select(n_pushes=pl.len().cast(pl.Int64), n_headless_pushes=_n(headless))


def fault_figures(gpu_faults: pl.LazyFrame, *, mixed: bool = True) -> pl.LazyFrame:
    """Count GPU fault rows that are not what a row of one driver batch must be.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, sorted by start.
    mixed : bool, default True
        Rows of several GPUs or processes may stand between each other; without it they are compared
        as they come, which is faster.

    Returns
    -------
    LazyFrame
        One row of Int64 counts: ``n``; ``n_shared_ends`` (rows that end with the row before or
        after them on their GPU; rows further apart that do so are out of order); ``n_out_of_order`` (rows that end before the row that started before them);
        ``n_counts_outside`` (counts not in 1..256); ``n_full_batches`` (counts of at least 0.9 x
        256, the only visible saturation); ``n_other_access``.
    """
    count, end = pl.col("n_page_faults"), pl.col("end_ns")
    before, after = end.shift(1), end.shift(-1)
    if mixed:
        before, after = before.over("device_id"), after.over("device_id")
    return gpu_faults.select(
        n=pl.len().cast(pl.Int64),
        n_shared_ends=_n(((end == before) | (end == after)).fill_null(value=False)),
        n_out_of_order=_n(end < before),
        n_counts_outside=_n(count.is_between(1, FAULT_BATCH_SIZE).not_()),
        n_full_batches=_n(count >= 0.9 * FAULT_BATCH_SIZE),
        n_other_access=_n(pl.col("access") == "other"),
    )


def batch_figures(
    gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame, *, mixed: bool = True
) -> pl.LazyFrame:
    """Check fault rows against the copies that answered them.

    A fault-caused copy to the GPU belongs to the first row whose `end` is not before its start;
    it must end by then, lie at or above the row's page, and follow the copies below it.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        One row per driver batch.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration.
    mixed : bool, default True
        Rows of several GPUs or processes may stand between each other; without it they are compared
        as they come, which is faster.

    Returns
    -------
    LazyFrame
        One row of Int64 counts: ``n_copies`` (fault-caused, to a GPU), ``n_copies_outside`` (in no
        row's window), ``n_pages_above`` (rows whose page is above their lowest faulted page),
        ``n_descending`` (copies below the one before them in their batch).
    """
    rows = (
        gpu_faults.select("device_id", row_end="end_ns", row_va="va").drop_nulls().sort("row_end")
    )
    copies = (
        migrations.filter((pl.col("direction") == "htod") & (pl.col("cause_id") == CAUSE_COHERENCE))
        .select("device_id", "start_ns", "end_ns", "va")
        .drop_nulls()
        .sort("start_ns")
        .join_asof(
            rows,
            left_on="start_ns",
            right_on="row_end",
            by="device_id" if mixed else None,
            strategy="forward",
            coalesce=False,
            check_sortedness=False,
        )
        .with_columns(inside=(pl.col("end_ns") <= pl.col("row_end")).fill_null(value=False))
    )
    inside, batch = pl.col("inside"), ["device_id", "row_end"] if mixed else ["row_end"]
    same_batch = pl.all_horizontal(pl.col(key).eq_missing(pl.col(key).shift(1)) for key in batch)
    ordered = (
        copies.sort("device_id", "start_ns", maintain_order=True) if mixed else copies
    ).select(
        n_copies=pl.len().cast(pl.Int64),
        n_copies_outside=_n(inside.not_()),
        n_descending=_n(inside & same_batch & (pl.col("va") < pl.col("va").shift(1))),
    )
    lowest = copies.filter(inside).group_by(batch).agg(pl.col("row_va").first(), pl.col("va").min())
    above = lowest.select(n_pages_above=_n(pl.col("row_va") > pl.col("va")))
    return pl.concat([ordered, above], how="horizontal")


def clock_figures(
    gpu_faults: pl.LazyFrame, kernels: pl.LazyFrame, *, mixed: bool = True
) -> pl.LazyFrame:
    """Measure how far kernels' times run behind the GPU clock of faults.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        One row per driver batch.
    kernels : LazyFrame, ``KERNELS``
        One row per kernel.
    mixed : bool, default True
        Rows of several GPUs or processes may stand between each other; without it they are compared
        as they come, which is faster.

    Returns
    -------
    LazyFrame
        One row: ``n_outside_kernels`` (Int64, fault rows raised while no kernel of their GPU ran),
        ``kernel_lag_ns`` (Int64, ns; the largest time by which such a row precedes the next kernel
        of its GPU, up to 100 us; null where none does).
    """
    apart = ["device_id"] if mixed else []
    reach = pl.col("end_ns").cum_max()
    reach = reach.over(apart) if mixed else reach
    spans = (
        kernels.select(*apart, "start_ns", "end_ns")
        .drop_nulls()
        .sort("start_ns")
        .with_columns(reach=reach, kernel_ns=pl.col("start_ns"))
    )
    faults = gpu_faults.select(*apart, "start_ns").drop_nulls().sort("start_ns")
    outside = (
        faults.join_asof(
            spans.select(*apart, "start_ns", "reach"),
            on="start_ns",
            by=apart or None,
            check_sortedness=False,
        )
        .filter((pl.col("reach") > pl.col("start_ns")).fill_null(value=False).not_())
        .drop("reach")
        .sort("start_ns")
        .join_asof(
            spans.select(*apart, "start_ns", "kernel_ns"),
            on="start_ns",
            by=apart or None,
            strategy="forward",
            check_sortedness=False,
        )
    )
    lead = pl.col("kernel_ns") - pl.col("start_ns")
    return outside.select(
        n_outside_kernels=pl.len().cast(pl.Int64),
        kernel_lag_ns=lead.filter(lead <= MAX_CLOCK_SKEW_NS).max(),
    )
