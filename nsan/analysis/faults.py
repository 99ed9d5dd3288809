"""Page faults as recorded: rows, counts and places, each under its own name.

A GPU fault row is one driver batch, named by its lowest faulted page; its recorded count is the
entries on that page only. So neither the rows nor the sum of the counts is the number of faults.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.intervals import complete_sum
from nsan.uvm.constants import VA_BLOCK_BYTES

GPU_GROUPS: Final = ("access", "device_id", "pid")
CPU_GROUPS: Final = ("pid",)


def _n_distinct(values: pl.Expr) -> pl.Expr:
    """Count distinct values, or null where one is missing."""
    return pl.when(values.null_count() == 0).then(values.n_unique()).cast(pl.Int64)


def _places() -> dict[str, pl.Expr]:
    return {
        "n_addresses": _n_distinct(pl.col("va")),
        "n_va_blocks": _n_distinct(pl.col("va") // VA_BLOCK_BYTES),
    }


def gpu_faults_by_group(gpu_faults: pl.LazyFrame) -> pl.LazyFrame:
    """Count GPU fault rows by access type, GPU and process.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        One row per driver batch.

    Returns
    -------
    LazyFrame
        One row per group that has rows, most rows first: ``access``, ``device_id``, ``pid``,
        ``n_rows`` (UInt32, batches), ``n_page_faults`` (Int128, the recorded counts added up),
        ``n_addresses``, ``n_va_blocks`` (Int64, distinct places of the rows). Rows and counts add
        up over groups; distinct places do not.
    """
    return (
        gpu_faults.group_by(GPU_GROUPS)
        .agg(n_rows=pl.len(), n_page_faults=complete_sum("n_page_faults"), **_places())
        .sort(["n_rows", *GPU_GROUPS], descending=[True, False, False, False], nulls_last=True)
    )


def cpu_faults_by_group(cpu_faults: pl.LazyFrame) -> pl.LazyFrame:
    """Count CPU faults by process.

    Parameters
    ----------
    cpu_faults : LazyFrame, ``CPU_FAULTS``
        One row per CPU page fault.

    Returns
    -------
    LazyFrame
        One row per process, most rows first: ``pid``, ``n_rows`` (UInt32), ``n_addresses``,
        ``n_va_blocks`` (Int64).
    """
    return (
        cpu_faults.group_by(CPU_GROUPS)
        .agg(n_rows=pl.len(), **_places())
        .sort(["n_rows", "pid"], descending=[True, False], nulls_last=True)
    )


def places(faults: pl.LazyFrame) -> pl.LazyFrame:
    """Count the distinct places of all fault rows: one row, ``n_addresses``, ``n_va_blocks``.

    Parameters
    ----------
    faults : LazyFrame
        GPU or CPU fault rows; reads ``va`` (UInt64).

    Returns
    -------
    LazyFrame
        One row: ``n_addresses`` and ``n_va_blocks`` (Int64); null where an address is missing.

    Examples
    --------
    >>> rows = pl.LazyFrame({"va": [0, 4096, 4096, 2 << 20]}, schema={"va": pl.UInt64})
    >>> places(rows).collect().rows()
    [(3, 2)]
    """
    return faults.select(**_places())
