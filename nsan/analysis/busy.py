"""Time in which copies ran, group by group: unions in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from nsan.analysis.intervals import union_in_parts


def islands_in_parts(rows: pl.LazyFrame, by: list[str]) -> Iterator[pl.DataFrame]:
    """Merge the copies of each group; where starts are coarse only their lengths are exact.

    Parameters
    ----------
    rows : LazyFrame
        Migrations with ``start_ns``, ``end_ns``, ``sequence`` and the columns of ``by``.
    by : list of str
        Groups.

    Returns
    -------
    iterator of DataFrame
        ``by``, ``start_ns``, ``end_ns``. Copies of one GPU and direction never overlap (measured), so that
        lengths of coarse ones add up.
    """
    exact = pl.col("sequence").is_null()
    columns = (*by, "start_ns", "end_ns")
    coarse = rows.filter(~exact & (pl.col("start_ns") < pl.col("end_ns"))).select(columns)
    yield from union_in_parts(rows.filter(exact), by=by)
    yield coarse.collect()


def busy_of(rows: pl.LazyFrame, by: list[str]) -> pl.LazyFrame:
    """Measure the time in which a copy of each group ran.

    Parameters
    ----------
    rows : LazyFrame
        As for :func:`islands_in_parts`.
    by : list of str
        Groups.

    Returns
    -------
    LazyFrame
        ``by`` and ``busy_ns`` (Int64, ns).
    """
    length = (pl.col("end_ns") - pl.col("start_ns")).sum()
    schema = rows.select(by).collect_schema()

    def build() -> pl.DataFrame:
        parts = [part.group_by(by).agg(busy_ns=length) for part in islands_in_parts(rows, by)]
        return pl.concat(parts).group_by(by).agg(pl.col("busy_ns").sum())

    return pl.defer(build, schema={**schema, "busy_ns": pl.Int64})
