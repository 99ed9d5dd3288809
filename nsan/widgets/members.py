"""Which fault rows belong to which cluster: those of its batches, wherever and whenever they start.

A batch belongs to the cluster of its first faulted copy, as `fault_clusters` counts it. The driver
notes the start of a batch before it copies, so that time and addresses alone would miss the first row
of a cluster, and take in rows of another one that was served meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysing import run_analysis
from nsan.analysis.catalog import find
from nsan.analysis.driver.fault_rows import usable_rows
from nsan.analysis.nearest import nearest
from nsan.uvm.constants import CAUSE_COHERENCE, VA_BLOCK_BYTES

if TYPE_CHECKING:
    from nsan.trace import Trace

KEYS: Final = ("pid", "device_id")


def members(trace: Trace) -> pl.DataFrame:
    """Find the cluster of each driver batch that has fault rows.

    Parameters
    ----------
    trace : Trace
        The trace; its migrations have addresses.

    Returns
    -------
    DataFrame
        ``pid``, ``device_id``, ``end_ns`` (end of the batch's rows), ``cluster_id``, and ``first_ns``
        and ``last_ns``: when the first and the last of its rows start. Batches in no cluster are left
        out.
    """
    rows = usable_rows(trace.gpu_faults, trace.migrations).drop_nulls(["start_ns", "end_ns"])
    batches = (
        rows.group_by(*KEYS, "end_ns")
        .agg(first_ns=pl.col("start_ns").min(), last_ns=pl.col("start_ns").max())
        .sort(*KEYS, "end_ns")
        # A copy belongs to the first batch that does not end before it starts.
        .with_columns(_from=(pl.col("end_ns").shift(1).over(KEYS) + 1).fill_null(-(1 << 62)))
    )
    cells = run_analysis(trace, find("cluster_cells"))
    by_cell = cells.filter(pl.col("cluster_id") >= 0).select(
        *KEYS, "va_block", "cluster_id", _bin=pl.col("start_ns") // pl.col("time_bin_ns")
    )
    bins = cells.select(*KEYS, "time_bin_ns").unique()
    return (
        nearest(
            batches, _first_copies(trace.migrations), on=("_from", "_start"), by=KEYS, forward=True
        )
        .filter(pl.col("_start") <= pl.col("end_ns"))
        .join(bins, on=KEYS, how="inner", nulls_equal=True)
        .with_columns(_bin=pl.col("_start") // pl.col("time_bin_ns"))
        .join(by_cell, on=[*KEYS, "_bin", "va_block"], how="inner", nulls_equal=True)
        .select(*KEYS, "end_ns", "cluster_id", "first_ns", "last_ns")
        .sort(*KEYS, "end_ns")
        .collect()
    )


def _first_copies(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Take the lowest of the faulted copies to a GPU that start at one time."""
    cause = pl.col("cause_id")
    return (
        migrations.filter(
            pl.col("start_ns").is_not_null() & pl.col("va").is_not_null() & (pl.col("bytes") > 0),
            pl.col("direction") != "dtoh",
            cause.is_null() | cause.is_in([0, CAUSE_COHERENCE]),
        )
        .group_by(*KEYS, _start="start_ns")
        .agg(va_block=pl.col("va").min() // VA_BLOCK_BYTES)
    )
