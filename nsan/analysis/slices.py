"""Stretches of a column's values that hold few rows each: what sorts or joins them stays within memory.

A table of a hundred million rows is read once per stretch; a store is in order of start, so that of it only
what overlaps the stretch is read. Rows where the column is null belong to no stretch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, TypeAlias

import polars as pl

ROWS_AT_ONCE: Final = 1 << 21
"""Rows of a stretch, unless equal values make it longer."""

_BINS: Final = 1 << 10

Stretch: TypeAlias = tuple[int | None, int | None]
"""From, and up to but without; None is no bound."""


def stretches(*columns: tuple[pl.LazyFrame, str], rows: int = 0) -> list[Stretch]:
    """Cut the values of columns into stretches that hold few rows of all tables together.

    Parameters
    ----------
    *columns : (LazyFrame, str)
        A table and its column of integers.
    rows : int, default 0
        Rows of a stretch; 0 is :data:`ROWS_AT_ONCE`.

    Returns
    -------
    list of (int or None, int or None)
        Half-open, ascending, together all values. One where all rows are few.

    Examples
    --------
    >>> frame = pl.LazyFrame({"at": [1, 5, 5, 9]})
    >>> stretches((frame, "at"), rows=2)
    [(None, 5), (5, 9), (9, None)]
    """
    most = rows or ROWS_AT_ONCE
    ends = pl.concat(
        pl.collect_all(
            [
                frame.select(
                    low=pl.col(name).min().cast(pl.Int64),
                    high=pl.col(name).max().cast(pl.Int64),
                    n=pl.col(name).count().cast(pl.Int64),
                )
                for frame, name in columns
            ]
        )
    )
    if ends["n"].sum() <= most:
        return [(None, None)]
    low, high = ends["low"].min(), ends["high"].max()
    values = pl.concat([frame.select(_at=pl.col(name).cast(pl.Int64)) for frame, name in columns])
    cuts = list(_cuts(values, int(low), int(high), most))  # type: ignore[arg-type]
    return list(pairwise([None, *cuts, None]))


def _cuts(values: pl.LazyFrame, low: int, high: int, most: int) -> Iterator[int]:
    """Count values bin by bin; a bin with too many of them is cut in the same way.

    Both bounds are values that may be there.
    """
    width = max(1, -(-(high + 1 - low) // _BINS))
    # From multiples of the width, not from the lowest value: a difference may be over 2^63.
    at = pl.col("_at")
    counts = (
        values.filter(at.is_between(low, high))
        .group_by(_bin=at // width)
        .agg(n=pl.len().cast(pl.Int64))
        .sort("_bin")
        .collect()
    )
    held = 0
    for number, n in counts.iter_rows():
        begin = max(low, number * width)
        if held and held + n > most:
            yield begin
            held = 0
        if n > most and width > 1:
            yield from _cuts(values, begin, min((number + 1) * width - 1, high), most)
            # What follows the last cut is unknown: the next bin opens a stretch of its own.
            held = most
        else:
            held += n


def inside(column: str, stretch: Stretch) -> pl.Expr:
    """Say which rows lie in a stretch.

    Parameters
    ----------
    column : str
        The column.
    stretch : (int or None, int or None)
        As of :func:`stretches`.

    Returns
    -------
    Expr
        True for rows of the stretch; rows without a value are in none.
    """
    low, high = stretch
    at = pl.col(column)
    found = at.is_not_null()
    if low is not None:
        found &= at >= low
    if high is not None:
        found &= at < high
    return found
