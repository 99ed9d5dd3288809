"""NVTX ranges as stretches of time: which one is innermost at an instant, and which hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from nsan.analysis.intervals import union

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]


def innermost(ranges: pl.DataFrame) -> pl.DataFrame:
    """Say for each thread and stretch of time which range is innermost: the one that began last.

    Parameters
    ----------
    ranges : DataFrame
        Reads ``pid``, ``tid``, ``start_ns``, ``end_ns``, ``item``: which range, or which group of
        ranges. They may nest or overlap in any way.

    Returns
    -------
    DataFrame
        ``pid``, ``tid``, ``start_ns``, ``end_ns``, ``item``, ordered by the first three; stretches of a
        thread are disjoint, and cover what its ranges cover.
    """
    schema = {"pid": pl.UInt32, "tid": pl.UInt32, "start_ns": pl.Int64, "end_ns": pl.Int64}
    parts = [pl.DataFrame(schema=schema | {"item": pl.Int64})]
    known = ranges.filter(pl.col("start_ns") < pl.col("end_ns"))
    # Of ranges that begin together, the longer is around the shorter.
    order = pl.col("start_ns"), pl.col("end_ns"), pl.col("item")
    ordered = known.sort("pid", "tid", *order, descending=[False, False, False, True, False])
    for (pid, tid), mine in ordered.partition_by("pid", "tid", as_dict=True).items():
        found = _stretches(mine)
        parts.append(
            found.select(
                pl.lit(pid, pl.UInt32).alias("pid"),
                pl.lit(tid, pl.UInt32).alias("tid"),
                *("start_ns", "end_ns", "item"),
            )
        )
    return pl.concat(parts).sort("pid", "tid", "start_ns")


def _stretches(ranges: pl.DataFrame) -> pl.DataFrame:
    """Cut the time of one thread at every start and end, and find the innermost range of each piece."""
    import numpy as np

    starts, ends = ranges["start_ns"].to_numpy(), ranges["end_ns"].to_numpy()
    edges = np.unique(np.concatenate([starts, ends]))
    begins = edges[:-1]
    found = open_last(starts, ends, begins)
    held = found >= 0
    items = ranges["item"].to_numpy()
    return pl.DataFrame(
        {
            "start_ns": begins[held],
            "end_ns": edges[1:][held],
            "item": items[found[held]],
        },
        schema={"start_ns": pl.Int64, "end_ns": pl.Int64, "item": pl.Int64},
    )


def open_last(starts: Numbers, ends: Numbers, times: Numbers) -> Numbers:
    """Find for each time the last of the intervals begun that is still open, or -1.

    Parameters
    ----------
    starts, ends : ndarray of int64
        Half-open intervals, ordered by start.
    times : ndarray of int64
        When to look, in any order.

    Returns
    -------
    ndarray of int64
        Places of the intervals. As many rounds as intervals nest, each vectorised.
    """
    import numpy as np

    outer = _ends_later(ends)
    found = np.searchsorted(starts, times, side="right").astype(np.int64) - 1
    waiting = np.flatnonzero(found >= 0)
    while waiting.size:
        over = ends[found[waiting]] <= times[waiting]
        waiting = waiting[over]
        # All between an interval and the last one before it that ends later are over, too.
        found[waiting] = outer[found[waiting]]
        waiting = waiting[found[waiting] >= 0]
    return found


def _ends_later(ends: Numbers) -> Numbers:
    """Find for each interval the last one before it that ends later, or -1, by jumping."""
    import numpy as np

    outer = np.arange(-1, len(ends) - 1, dtype=np.int64)
    waiting = np.flatnonzero(outer >= 0)
    while waiting.size:
        short = ends[outer[waiting]] <= ends[waiting]
        waiting = waiting[short]
        outer[waiting] = outer[outer[waiting]]
        waiting = waiting[outer[waiting] >= 0]
    return outer


def within(
    events: pl.DataFrame, ranges: pl.DataFrame, sums: tuple[str, ...], *, by: tuple[str, ...]
) -> pl.DataFrame:
    """Add up what happens within the ranges of each item, each event once however deep it lies.

    Parameters
    ----------
    events : DataFrame
        Reads ``at`` (ns), ``by`` and ``sums`` (Int64).
    ranges : DataFrame
        Reads ``item``, ``start_ns``, ``end_ns`` and ``by``.
    sums : tuple of str
        Columns to add up.
    by : tuple of str
        An event is within a range only if these agree; nulls agree.

    Returns
    -------
    DataFrame
        One row per item: ``item`` and the sums.
    """
    spans = union(ranges.lazy(), by=["item", *by]).collect()
    groups = pl.concat([events.select(by), spans.select(by)]).unique()
    groups = groups.sort(by).with_columns(_by=pl.int_range(pl.len(), dtype=pl.Int64))
    keyed = [
        frame.join(groups, on=by, how="left", nulls_equal=True, maintain_order="left")
        for frame in (events, spans)
    ]
    totals = keyed[0].group_by("_by", "at").agg(pl.col(sums).sum()).sort("_by", "at")
    totals = totals.with_columns(pl.col(sums).cum_sum().over("_by")).sort("at")
    low, high = (_before(keyed[1], totals, sums, edge) for edge in ("start_ns", "end_ns"))
    parts = [low.select("item", *(-pl.col(name) for name in sums)), high.select("item", *sums)]
    return pl.concat(parts).group_by("item").agg(pl.col(sums).sum())


def _before(
    spans: pl.DataFrame, totals: pl.DataFrame, sums: tuple[str, ...], edge: str
) -> pl.DataFrame:
    """Look up the sums of all events before an edge of each span."""
    return (
        spans.select("item", "_by", at=edge)
        .sort("at")
        .join_asof(totals, on="at", by="_by", allow_exact_matches=False, check_sortedness=False)
        .with_columns(pl.col(sums).fill_null(0))
    )
