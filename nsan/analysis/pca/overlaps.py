"""Work that runs side by side on one GPU: of which launches a fault may be."""

from __future__ import annotations

from bisect import bisect_left, insort

import polars as pl

SIDE_BY_SIDE: dict[str, type[pl.DataType]] = {
    "group": pl.Int64,
    "start_ns": pl.Int64,
    "earliest_ns": pl.Int64,
    "latest_ns": pl.Int64,
}


def side_by_side(work: pl.DataFrame) -> pl.DataFrame:
    """Say for each stretch of time when the work that runs was launched, first and last.

    Parameters
    ----------
    work : DataFrame
        Reads ``group``, ``start_ns``, ``end_ns``, ``launch_ns`` (Int64; work without a launch is left out).

    Returns
    -------
    DataFrame
        One row per stretch of work that runs beside other work, from its ``start_ns`` to the next of its
        ``group``, ordered by both, with ``earliest_ns`` and ``latest_ns``; null where at most one piece
        runs.
    """
    edges = _edges(work)
    found: list[tuple[int, int, int | None, int | None]] = []
    running: list[int] = []
    for group, at, is_start, launch_ns in edges.iter_rows():
        if is_start:
            insort(running, launch_ns)
        else:
            del running[bisect_left(running, launch_ns)]
        ends = (running[0], running[-1]) if len(running) > 1 else (None, None)
        found.append((group, at, *ends))
    rows = pl.DataFrame(found, schema=SIDE_BY_SIDE, orient="row")
    return rows.unique(["group", "start_ns"], keep="last", maintain_order=True)


def _edges(work: pl.DataFrame) -> pl.DataFrame:
    """List starts and ends of work that overlaps other work: ends before starts, by group and time."""
    start, end = pl.col("start_ns"), pl.col("end_ns")
    before = end.cum_max().shift().over("group")
    is_new = (start >= before).fill_null(value=True)
    apart = (
        work.filter(start < end, pl.col("launch_ns").is_not_null())
        .sort("group", "start_ns")
        .with_columns(_cluster=is_new.cum_sum())
        .filter(pl.len().over("_cluster") > 1)
    )
    return pl.concat(
        apart.select("group", at=time, is_start=pl.lit(value), launch_ns="launch_ns")
        for time, value in (("start_ns", True), ("end_ns", False))
    ).sort("group", "at", "is_start")
