"""Fault rows and the copies of their batches: what a row stands for, and which row a copy lies in."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.nearest import nearest
from nsan.uvm.constants import CAUSE_COHERENCE, CAUSE_PREFETCH, VA_BLOCK_BYTES

KEYS: Final = ["pid", "device_id"]

ROW_READS: Final = (
    "start_ns",
    "end_ns",
    "pid",
    "device_id",
    "va",
    "n_page_faults",
    "access",
    "sequence",
)
COPY_READS: Final = (
    "start_ns",
    "end_ns",
    "pid",
    "device_id",
    "va",
    "bytes",
    "direction",
    "cause_id",
)


def row_groups(gpu_faults: pl.LazyFrame) -> pl.LazyFrame:
    """Put rows that share their end together: the end of the replay identifies the batch.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order.

    Returns
    -------
    LazyFrame
        One row per process, GPU and end, in that order: ``pid``, ``device_id``, ``start_ns`` (the
        earliest), ``end_ns``, ``before_ns`` (the end before, null for the first), ``va``,
        ``n_page_faults``, ``access`` (all of the lowest page), ``n_rows``, ``n_row_blocks``,
        ``is_coarse`` (times printed with few digits). Rows without an end or an address are left out.
    """
    lowest = pl.col("va").arg_min()
    return (
        gpu_faults.filter(pl.col("end_ns").is_not_null() & pl.col("va").is_not_null())
        .sort(*KEYS, "end_ns", "va", "start_ns", "n_page_faults", "access")
        .group_by(*KEYS, "end_ns", maintain_order=True)
        .agg(
            pl.col("start_ns").min(),
            pl.col("n_page_faults", "access").get(lowest),
            pl.col("va").min(),
            n_rows=pl.len().cast(pl.Int64),
            n_row_blocks=(pl.col("va") // VA_BLOCK_BYTES).n_unique().cast(pl.Int64),
            is_coarse=pl.col("sequence").is_not_null().any(),
        )
        .with_columns(before_ns=pl.col("end_ns").shift(1).over(KEYS))
    )


def fault_copies(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Keep the copies to a GPU that page faults caused, or may have where no cause is known.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration.

    Returns
    -------
    LazyFrame
        Copies to a GPU by a page fault or the driver's prefetcher that have a start and an address.
    """
    known = pl.col("start_ns").is_not_null() & pl.col("va").is_not_null()
    caused = pl.col("cause_id").is_in([CAUSE_COHERENCE, CAUSE_PREFETCH])
    unsaid = pl.col("cause_id").is_null() | (pl.col("cause_id") == 0)
    return migrations.filter(known & (pl.col("direction") != "dtoh") & (caused | unsaid))


def in_rows(copies: pl.LazyFrame, groups: pl.LazyFrame) -> pl.LazyFrame:
    """Find for each copy the row in whose (previous end, end] it starts.

    Parameters
    ----------
    copies : LazyFrame
        Migrations of any cause with a start; other columns stay.
    groups : LazyFrame
        As of :func:`row_groups`.

    Returns
    -------
    LazyFrame
        The copies, by start, with ``row_start``, ``row_end``, ``row_va`` and ``inside``: false where
        the copy began before its fault was raised or is not over at the replay. Then the row of its
        batch is missing. Coarse times cannot tell, and every copy counts as inside.
    """
    rows = groups.select(*KEYS, "is_coarse", row_start="start_ns", row_end="end_ns", row_va="va")
    late = pl.col("end_ns") > pl.col("row_end")
    early = pl.col("start_ns") < pl.col("row_start")
    return (
        nearest(copies, rows, on=("start_ns", "row_end"), by=KEYS, forward=True)
        .with_columns(inside=(pl.col("is_coarse") | ~(late | early)).fill_null(value=False))
        .drop("is_coarse")
    )
