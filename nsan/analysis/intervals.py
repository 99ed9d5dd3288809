"""Algebra of half-open intervals ``[start_ns, end_ns)``, vectorised, O(n log n)."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from nsan.info import Window


def union(intervals: pl.LazyFrame, *, by: Sequence[str] = ()) -> pl.LazyFrame:
    """Merge intervals that overlap or touch.

    Parameters
    ----------
    intervals : LazyFrame
        Reads ``start_ns``, ``end_ns`` (Int64, ns) and the columns of ``by``; rows in any order.
        Rows with a null time, and rows of no length, add nothing.
    by : sequence of str
        Merge within groups of equal values; a null is a value of its own.

    Returns
    -------
    LazyFrame
        One row per merged interval: the columns of ``by``, ``start_ns``, ``end_ns``; disjoint and
        not touching within a group, ordered by group and start.

    Examples
    --------
    >>> rows = pl.LazyFrame({"start_ns": [0, 50, 200], "end_ns": [100, 150, 200]})
    >>> union(rows).collect().rows()
    [(0, 150)]
    """
    keys = list(by)
    start, end = pl.col("start_ns"), pl.col("end_ns")
    ordered = (
        intervals.select(*keys, "start_ns", "end_ns").filter(start < end).sort([*keys, "start_ns"])
    )
    reach = end.cum_max()
    before = reach.shift(1)
    marked = ordered.with_columns(
        _reach=reach.over(keys) if keys else reach,
        _opens=(start > (before.over(keys) if keys else before)).fill_null(value=True),
    )
    # An island opens where its first row does, and ends where the row before the next one reached.
    opens, closes = pl.col("_opens"), pl.col("_opens").shift(-1, fill_value=True)
    return marked.select(
        *(pl.col(key).filter(opens) for key in keys),
        start.filter(opens),
        pl.col("_reach").filter(closes).alias("end_ns"),
    )


def covered(
    merged: pl.DataFrame, windows: Sequence[Window] | None, *, by: Sequence[str] = ()
) -> pl.DataFrame:
    """Measure merged intervals, clipped to windows.

    Parameters
    ----------
    merged : DataFrame
        Disjoint intervals from :func:`union`, ordered by group and start.
    windows : sequence of (int, int), or None
        Disjoint windows, ns; None is all time.
    by : sequence of str
        The groups of :func:`union`.

    Returns
    -------
    DataFrame
        One row per group: the columns of ``by`` and ``covered_ns`` (Int64, ns). Splitting a window
        and adding gives the same number.
    """
    keys = list(by)
    length = pl.col("end_ns") - pl.col("start_ns")
    if windows is None:
        measured = merged.select(*keys, covered_ns=length)
    else:
        measured = _clipped(merged.with_row_index("_row"), windows).select(*keys, covered_ns=length)
    if not keys:
        return measured.select(pl.col("covered_ns").sum())
    return measured.group_by(keys, maintain_order=True).agg(pl.col("covered_ns").sum())


def _clipped(merged: pl.DataFrame, windows: Sequence[Window]) -> pl.DataFrame:
    """Cut intervals at the edges of windows; an interval may leave several pieces."""
    starts = pl.Series("_from", [a for a, _ in windows], dtype=pl.Int64)
    ends = pl.Series("_until", [b for _, b in windows], dtype=pl.Int64)
    # Windows are disjoint and ascending, so those that meet an interval are neighbours.
    first = ends.search_sorted(merged["start_ns"], side="right")
    last = starts.search_sorted(merged["end_ns"], side="left")
    pieces = (
        merged.with_columns(pl.Series("_first", first), pl.Series("_last", last))
        .filter(pl.col("_first") < pl.col("_last"))
        .with_columns(_window=pl.int_ranges("_first", "_last"))
        .explode("_window")
    )
    places = pieces["_window"].cast(pl.UInt32)
    return pieces.with_columns(
        start_ns=pl.max_horizontal("start_ns", starts.gather(places)),
        end_ns=pl.min_horizontal("end_ns", ends.gather(places)),
    )


def complete_sum(column: str, dtype: type[pl.DataType] = pl.Int128) -> pl.Expr:
    """Sum a column, or null if a value of it is null: a partial sum is not the total.

    Parameters
    ----------
    column : str
        Column to add up.
    dtype : DataType, default Int128
        Type to add in; wide enough for the sum.

    Returns
    -------
    Expr
        One value per group.
    """
    return pl.when(pl.col(column).null_count() == 0).then(pl.col(column).cast(dtype).sum())
