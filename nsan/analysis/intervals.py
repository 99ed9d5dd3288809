"""Algebra of half-open intervals ``[start_ns, end_ns)``, vectorised, O(n log n)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl

from nsan.analysis.nearest import nearest
from nsan.analysis.slices import inside, stretches
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


def union_in_parts(intervals: pl.LazyFrame, *, by: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
    """Merge intervals stretch by stretch of their starts, in memory that does not grow with their number.

    Parameters
    ----------
    intervals : LazyFrame
        As for :func:`union`.
    by : sequence of str
        As for :func:`union`.

    Returns
    -------
    iterator of DataFrame
        As of :func:`union`; all parts together cover the same time, none of it twice. Where a part goes
        on what an earlier one began, the two touch.
    """
    keys = list(by)
    rows = intervals.select(*keys, "start_ns", "end_ns").filter(
        pl.col("start_ns") < pl.col("end_ns")
    )
    reached: pl.DataFrame | None = None
    for part in stretches((rows, "start_ns")):
        merged = union(rows.filter(inside("start_ns", part)), by=keys).collect()
        if reached is not None:
            merged = _behind(merged, reached, keys)
        yield merged
        parts = [merged.select(*keys, _reached="end_ns"), *([] if reached is None else [reached])]
        furthest = pl.col("_reached").max()
        reached = pl.concat(parts)
        reached = reached.group_by(keys).agg(furthest) if keys else reached.select(furthest)


def _behind(merged: pl.DataFrame, reached: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """Cut off what lies before the ends that were reached."""
    if keys:
        found = merged.join(reached, on=keys, how="left", nulls_equal=True, maintain_order="left")
    else:
        found = merged.join(reached, how="cross")
    start = pl.max_horizontal("start_ns", "_reached")
    return found.with_columns(start_ns=start).filter(start < pl.col("end_ns")).drop("_reached")


def intersection(
    left: pl.LazyFrame, right: pl.LazyFrame, *, by: Sequence[str] = ()
) -> pl.LazyFrame:
    """Find the time that is in both of two sets of intervals.

    Parameters
    ----------
    left, right : LazyFrame
        Read ``start_ns``, ``end_ns`` (Int64, ns) and the columns of ``by``; rows in any order, they
        may overlap.
    by : sequence of str
        Groups that are kept apart; a null is a value of its own.

    Returns
    -------
    LazyFrame
        As of :func:`union`, with the time covered by rows of both.

    Examples
    --------
    >>> a = pl.LazyFrame({"start_ns": [0, 200], "end_ns": [100, 300]})
    >>> b = pl.LazyFrame({"start_ns": [50], "end_ns": [250]})
    >>> intersection(a, b).collect().rows()
    [(50, 100), (200, 250)]
    """
    return _both(left, right, by, (pl.col("_left") > 0) & (pl.col("_right") > 0))


def subtraction(left: pl.LazyFrame, right: pl.LazyFrame, *, by: Sequence[str] = ()) -> pl.LazyFrame:
    """Find the time that is in one set of intervals and not in the other.

    Parameters
    ----------
    left, right : LazyFrame
        As for :func:`intersection`.
    by : sequence of str
        Groups that are kept apart; a null is a value of its own.

    Returns
    -------
    LazyFrame
        As of :func:`union`, with the time covered by ``left`` and not by ``right``.

    Examples
    --------
    >>> a = pl.LazyFrame({"start_ns": [0], "end_ns": [100]})
    >>> b = pl.LazyFrame({"start_ns": [20, 90], "end_ns": [30, 120]})
    >>> subtraction(a, b).collect().rows()
    [(0, 20), (30, 90)]
    """
    return _both(left, right, by, (pl.col("_left") > 0) & (pl.col("_right") == 0))


def _both(
    left: pl.LazyFrame, right: pl.LazyFrame, by: Sequence[str], wanted: pl.Expr
) -> pl.LazyFrame:
    """Walk along two merged sets at once and keep the stretches that are wanted."""
    keys = list(by)
    sides = {"_left": left, "_right": right}
    events = [
        union(side, by=keys).select(
            *keys,
            pl.concat_list("start_ns", "end_ns").alias("start_ns"),
            *(
                pl.lit([1, -1] if other == name else [0, 0], pl.List(pl.Int64)).alias(other)
                for other in sides
            ),
        )
        for name, side in sides.items()
    ]
    moments = (
        pl.concat(events)
        .explode("start_ns", *sides)
        .group_by(*keys, "start_ns")
        .agg(pl.col(name).sum() for name in sides)
        .sort(*keys, "start_ns")
    )
    after = pl.col("start_ns").shift(-1)
    steps = moments.with_columns(
        *(_over(pl.col(name).cum_sum(), keys).alias(name) for name in sides),
        end_ns=_over(after, keys),
    )
    return union(steps.filter(wanted), by=keys)


def _over(value: pl.Expr, keys: list[str]) -> pl.Expr:
    return value.over(keys) if keys else value


def depth(intervals: pl.LazyFrame, *, by: Sequence[str] = ()) -> pl.LazyFrame:
    """Count how many intervals are open at each time.

    Parameters
    ----------
    intervals : LazyFrame
        Reads ``start_ns``, ``end_ns`` (Int64, ns) and the columns of ``by``; rows in any order. Rows
        with a null time, and rows of no length, add nothing.
    by : sequence of str
        Groups that are kept apart; a null is a value of its own.

    Returns
    -------
    LazyFrame
        One row per stretch with at least one open interval: the columns of ``by``, ``start_ns``,
        ``end_ns``, ``n`` (Int64, open intervals); disjoint, ordered by group and start. The sum of
        ``n`` x length equals the sum of the lengths of the rows.

    Examples
    --------
    >>> rows = pl.LazyFrame({"start_ns": [0, 50], "end_ns": [100, 150]})
    >>> depth(rows).collect().rows()
    [(0, 50, 1), (50, 100, 2), (100, 150, 1)]
    """
    keys = list(by)
    rows = intervals.filter(pl.col("start_ns") < pl.col("end_ns"))
    opens = rows.select(*keys, "start_ns", n=pl.lit(1, pl.Int64))
    closes = rows.select(*keys, start_ns="end_ns", n=pl.lit(-1, pl.Int64))
    return (
        pl.concat([opens, closes])
        .group_by(*keys, "start_ns")
        .agg(pl.col("n").sum())
        .sort(*keys, "start_ns")
        .with_columns(
            n=_over(pl.col("n").cum_sum(), keys),
            end_ns=_over(pl.col("start_ns").shift(-1), keys),
        )
        .filter(pl.col("n") > 0)
        .select(*keys, "start_ns", "end_ns", "n")
    )


def overlap(rows: pl.LazyFrame, steps: pl.LazyFrame, *, by: Sequence[str] = ()) -> pl.LazyFrame:
    """Measure how much of each row's time is covered, weighted by what covers it.

    Parameters
    ----------
    rows : LazyFrame
        Reads ``start_ns``, ``end_ns`` (Int64, ns) and the columns of ``by``; other columns stay.
        Rows may overlap and come in any order.
    steps : LazyFrame
        Disjoint intervals within a group, as of :func:`union` or :func:`depth`: ``start_ns``,
        ``end_ns``, the columns of ``by`` and, if there is one, ``n`` (Int64), the weight.
    by : sequence of str
        Groups that are kept apart; a null is a value of its own.

    Returns
    -------
    LazyFrame
        The rows with ``overlap_ns`` (Int64, ns): the integral of the weight over the row, without
        weights the covered time; 0 where nothing covers it, null where a time is missing. The
        order of the rows is not kept.

    Examples
    --------
    >>> rows = pl.LazyFrame({"start_ns": [0, 60], "end_ns": [100, 70]})
    >>> steps = pl.LazyFrame({"start_ns": [10, 50], "end_ns": [20, 90]})
    >>> overlap(rows, steps).sort("start_ns").collect().rows()
    [(0, 100, 50), (60, 70, 10)]
    """
    keys = list(by)
    weight = pl.col("n") if "n" in steps.collect_schema() else pl.lit(1, pl.Int64)
    length = pl.col("end_ns") - pl.col("start_ns")
    sums = (
        steps.filter(length > 0)
        .sort(*keys, "start_ns")
        .select(
            *keys,
            _from="start_ns",
            _until="end_ns",
            _weight=weight,
            _before=_over((length * weight).cum_sum(), keys) - length * weight,
        )
    )
    reached = pl.min_horizontal(pl.col("_at"), pl.col("_until")) - pl.col("_from")
    found = rows
    for name, edge in (("_low", "start_ns"), ("_high", "end_ns")):
        found = (
            nearest(found.with_columns(_at=pl.col(edge)), sums, on=("_at", "_from"), by=keys)
            .with_columns((pl.col("_before") + reached * pl.col("_weight")).alias(name))
            .drop("_at", "_from", "_until", "_weight", "_before")
        )
    known = pl.all_horizontal(pl.col("start_ns", "end_ns").is_not_null())
    area = pl.col("_high").fill_null(0) - pl.col("_low").fill_null(0)
    return found.with_columns(
        overlap_ns=pl.when(known).then(pl.max_horizontal(area, 0)).cast(pl.Int64)
    ).drop("_low", "_high")


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
