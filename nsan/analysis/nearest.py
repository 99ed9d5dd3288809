"""The nearest row of another table in time, group by group, a null being a value like any other."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

_NULL: int = -(1 << 63)


def nearest(
    left: pl.LazyFrame,
    right: pl.LazyFrame,
    *,
    on: tuple[str, str],
    by: Sequence[str] = (),
    forward: bool = False,
    tolerance_ns: int | None = None,
) -> pl.LazyFrame:
    """Join each row with the last row of another table that is not later, or the first not earlier.

    An as-of join of polars never matches a null key; a trace has rows whose process or GPU is
    unknown, and these belong together.

    Parameters
    ----------
    left : LazyFrame
        Rows, in any order; all of them stay.
    right : LazyFrame
        Rows to look among, in any order. Of equal times the last one in its order counts.
    on : (str, str)
        Time column of each side (Int64, ns); both stay.
    by : sequence of str
        Group columns of both sides (integers, enumerations or text).
    forward : bool, default False
        The first row that is not earlier instead of the last that is not later.
    tolerance_ns : int, optional
        Farthest distance in time.

    Returns
    -------
    LazyFrame
        The left rows, ordered by their time, with the other columns of the right side, null where
        no row is there.

    Examples
    --------
    >>> a = pl.LazyFrame({"pid": [None, 1], "at": [5, 5]}, schema={"pid": pl.UInt32, "at": pl.Int64})
    >>> b = pl.LazyFrame(
    ...     {"pid": [None, 1], "t": [4, 6]}, schema={"pid": pl.UInt32, "t": pl.Int64}
    ... )
    >>> nearest(a, b, on=("at", "t"), by=["pid"]).collect().rows()
    [(None, 5, 4), (1, 5, None)]
    """
    marks = [f"_by_{key}" for key in by]
    schema = left.collect_schema()
    known = [_known(key, schema[key]).alias(mark) for key, mark in zip(by, marks, strict=True)]
    return (
        left.with_columns(known)
        .sort(on[0], nulls_last=True, maintain_order=True)
        .join_asof(
            right.with_columns(known).drop(*by).sort(on[1], maintain_order=True),
            left_on=on[0],
            right_on=on[1],
            by=marks or None,
            strategy="forward" if forward else "backward",
            tolerance=tolerance_ns,
            coalesce=False,
            check_sortedness=False,
        )
        .drop(marks)
    )


def _known(key: str, dtype: pl.DataType) -> pl.Expr:
    """Put a value that no id has where there is none."""
    if dtype.is_integer():
        return pl.col(key).cast(pl.Int64, wrap_numerical=True).fill_null(_NULL)
    return pl.col(key).cast(pl.String).fill_null("\0")
