"""Unified Memory migrations: how much moved, which way, why, on which GPU, in which process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from nsan.analysis.intervals import complete_sum, covered, union_in_parts
from nsan.info import Window

GROUPS: Final = ("direction", "cause", "device_id", "pid")
"""What :func:`migrations_by_group` splits by."""


def migrations_by_group(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Count and add up migrations by direction, cause, GPU and process.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration.

    Returns
    -------
    LazyFrame
        One row per group that has rows, most bytes first: ``direction``, ``cause``, ``device_id``,
        ``pid``, ``n`` (UInt32, rows), ``bytes`` (Int128, byte), ``min_bytes``, ``max_bytes``
        (Int64, byte), ``min_va``, ``max_va`` (UInt64, first bytes moved). A figure is null where a
        row of its group lacks the value. No row is lost: ``n`` adds up to the rows.

    Examples
    --------
    >>> from nsan.schema import MIGRATIONS
    >>> rows = MIGRATIONS.empty().collect().clear(2).with_columns(bytes=pl.lit(4096, pl.Int64))
    >>> migrations_by_group(rows.lazy()).select("n", "bytes").collect().rows()
    [(2, 8192)]
    """
    whole = pl.col("bytes").null_count() == 0
    placed = pl.col("va").null_count() == 0
    return (
        migrations.group_by(GROUPS)
        .agg(
            n=pl.len(),
            bytes=complete_sum("bytes"),
            min_bytes=pl.when(whole).then(pl.col("bytes").min()),
            max_bytes=pl.when(whole).then(pl.col("bytes").max()),
            min_va=pl.when(placed).then(pl.col("va").min()),
            max_va=pl.when(placed).then(pl.col("va").max()),
        )
        .sort(["bytes", *GROUPS], descending=[True, *(False for _ in GROUPS)], nulls_last=True)
    )


def cut_groups(migrations: pl.LazyFrame, windows: Sequence[Window] | None) -> pl.DataFrame:
    """Find the groups that have a migration across an edge of the windows.

    Its busy time is clipped there and its bytes cannot be, so that these make no rate.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        All rows, wherever they start.
    windows : sequence of (int, int), or None
        Disjoint, in order, ns; None is all time.

    Returns
    -------
    DataFrame
        One row per such group: the columns of ``GROUPS`` and ``is_cut``, which is true.
    """
    edges = pl.Series("edge", sorted({e for window in windows or () for e in window}), pl.Int64)
    if edges.is_empty():
        return migrations.select(*GROUPS, is_cut=pl.lit(value=True)).clear().collect()
    rows = migrations.filter(pl.all_horizontal(pl.col("start_ns", "end_ns").is_not_null()))
    n_before_end = pl.lit(edges).search_sorted(pl.col("end_ns"), side="left")
    n_until_start = pl.lit(edges).search_sorted(pl.col("start_ns"), side="right")
    rows = rows.filter(n_before_end > n_until_start)
    return rows.select(*GROUPS, is_cut=pl.lit(value=True)).unique().collect()


def busy_by_group(
    intervals: pl.LazyFrame, windows: Sequence[Window] | None, *, by: Sequence[str]
) -> pl.DataFrame:
    """Measure the time in which at least one row of each group was running.

    Parameters
    ----------
    intervals : LazyFrame
        Rows with ``start_ns``, ``end_ns`` (Int64, ns) and the columns of ``by``; all rows that
        reach into the windows, wherever they start.
    windows : sequence of (int, int), or None
        Where to clip, ns; None is all time.
    by : sequence of str
        Grouping columns.

    Returns
    -------
    DataFrame
        One row per group: ``by`` and ``covered_ns`` (Int64, ns), a union, never a sum of
        overlapping rows. Groups without any time are left out.
    """
    groups = intervals.select(by).unique().collect()
    apart = list(by) if groups.height != 1 else []
    if windows:
        reaches_in = (pl.col("end_ns") > windows[0][0]) & (pl.col("start_ns") < windows[-1][1])
        intervals = intervals.filter(reaches_in)
    parts = [covered(part, windows, by=apart) for part in union_in_parts(intervals, by=apart)]
    found, sums = pl.concat(parts), pl.col("covered_ns").sum()
    if apart:
        return found.group_by(apart).agg(sums).sort(apart)
    whole = found.select(sums)
    # One group, as on a machine with one GPU: nothing needs to be kept apart.
    return groups.join(whole.filter(pl.col("covered_ns") > 0), how="cross") if by else whole
