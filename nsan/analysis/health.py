"""Figures that say whether rows can be what they should be: sizes, order, pairing, clocks.

The driver moves whole pages, never across a VA block; a GPU fault row is a driver batch whose
copies all end before it does. Where a figure is not zero, rows were lost or mean something else,
and analyses that build on the rule must not be trusted.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.uvm.constants import (
    PAGE_BYTES,
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
