"""Rows whose page came before their turn: between when they were raised and the end before theirs.

Copies are larger than pages and there are many: only pages that such a row asks for are looked at, and of
these few at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import polars as pl

from nsan.analysis import slices
from nsan.analysis.driver.rows_and_copies import KEYS
from nsan.analysis.nearest import nearest
from nsan.uvm.constants import CAUSE_COHERENCE, PAGE_BYTES, VA_BLOCK_BYTES

_PAGE: Final = [*KEYS, "_page"]
_PAGES_PER_BLOCK: Final = VA_BLOCK_BYTES // PAGE_BYTES
_BLOCK: Final = pl.col("_page") // _PAGES_PER_BLOCK


def open_rows(rows: pl.LazyFrame, until: int | None) -> pl.DataFrame:
    """List the batches that end behind a stretch and were raised before its end.

    Parameters
    ----------
    rows : LazyFrame
        Fault rows with an end and an address.
    until : int or None
        Where the stretch of ends is over; nothing is behind the last one.

    Returns
    -------
    DataFrame
        ``pid``, ``device_id``, ``end_ns`` and ``start_ns``, the earliest of the batch.
    """
    is_open = pl.lit(value=False)
    if until is not None:
        is_open = (pl.col("end_ns") >= until) & (pl.col("start_ns") < until)
    return rows.filter(is_open).group_by(*KEYS, "end_ns").agg(pl.col("start_ns").min()).collect()


def asked_later(rows: pl.LazyFrame, opened: pl.DataFrame) -> pl.DataFrame:
    """List the pages of open batches.

    Parameters
    ----------
    rows : LazyFrame
        Fault rows with an end and an address.
    opened : DataFrame
        As of :func:`open_rows`.

    Returns
    -------
    DataFrame
        ``pid``, ``device_id``, ``_page`` and ``_from``, when the first of its batches was raised.
    """
    at = pl.col("end_ns")
    mine = rows.select(*KEYS, "end_ns", _page_of("va").alias("_page"))
    if not opened.is_empty():
        mine = mine.filter(at.is_between(opened["end_ns"].min(), opened["end_ns"].max()))
    else:
        mine = mine.head(0)
    since = opened.lazy().rename({"start_ns": "_from"})
    found = mine.join(since, on=[*KEYS, "end_ns"], nulls_equal=True)
    return found.group_by(_PAGE).agg(pl.col("_from").min()).collect()


def asked_now(groups: pl.DataFrame) -> pl.DataFrame:
    """Keep the batches that were raised before the one before them ended: what else may be pending.

    Parameters
    ----------
    groups : DataFrame
        As of ``row_groups``.

    Returns
    -------
    DataFrame
        ``pid``, ``device_id``, ``_page``, ``start_ns``, ``before_ns`` and ``end_ns``.
    """
    return groups.filter(pl.col("start_ns") <= pl.col("before_ns")).select(
        *KEYS, _page_of("va").alias("_page"), "start_ns", "before_ns", "end_ns"
    )


def arrivals(
    asked: pl.DataFrame, later: pl.DataFrame, placed: pl.DataFrame
) -> Iterator[pl.DataFrame]:
    """Go through the pages that copies brought and that somebody asks for, in order of time.

    Parameters
    ----------
    asked : DataFrame
        As of :func:`asked_now`.
    later : DataFrame
        As of :func:`asked_later`.
    placed : DataFrame
        Copies, each with its row.

    Yields
    ------
    DataFrame
        ``pid``, ``device_id``, ``_page`` and ``came_ns``; at most as many as a stretch has rows, or
        what one copy brings.
    """
    pages = pl.concat([asked.select(_PAGE), later.select(_PAGE)]).unique()
    pages = pages.with_columns(_block=_BLOCK)
    block = [*KEYS, "_block"]
    per_block = pages.group_by(block).agg(_n=pl.len().cast(pl.Int64))
    copies = _copies(placed).join(per_block, on=block, nulls_equal=True).sort("came_ns")
    until = copies["_n"].cum_sum()
    first = 0
    while first < copies.height:
        before = until[first - 1] if first else 0
        last = int(until.search_sorted(before + slices.ROWS_AT_ONCE, side="right"))
        mine = copies[first : max(last, first + 1)]
        first += mine.height
        yield (
            mine.join(pages, on=block, nulls_equal=True)
            .filter(pl.col("_page").is_between("_first", "_last"))
            .select(*_PAGE, "came_ns")
        )


def pending_ends(asked: pl.DataFrame, pages: pl.DataFrame) -> pl.DataFrame:
    """Find batches whose page came between their start and the end before theirs.

    Parameters
    ----------
    asked : DataFrame
        As of :func:`asked_now`.
    pages : DataFrame
        Some of :func:`arrivals`.

    Returns
    -------
    DataFrame
        ``pid``, ``device_id`` and ``end_ns`` of each.
    """
    if pages.is_empty():
        return asked.select(*KEYS, "end_ns").clear()
    begin, end = pages["came_ns"].min(), pages["came_ns"].max()
    near = asked.lazy().filter(pl.col("start_ns") <= end, pl.col("before_ns") >= begin)
    # The last arrival that is early enough is in time, or none is.
    return (
        nearest(near, pages.lazy(), on=("before_ns", "came_ns"), by=_PAGE)
        .filter(pl.col("came_ns") >= pl.col("start_ns"))
        .select(*KEYS, "end_ns")
        .collect()
    )


def kept_for(later: pl.DataFrame, pages: pl.DataFrame) -> pl.DataFrame:
    """Keep what open batches may ask for: of each page the last arrival.

    Every arrival is over before the ends that open batches look back to.

    Parameters
    ----------
    later : DataFrame
        As of :func:`asked_later`.
    pages : DataFrame
        Some of :func:`arrivals`.

    Returns
    -------
    DataFrame
        As ``pages``, at most one row per page that is asked for.
    """
    return (
        pages.join(later, on=_PAGE, nulls_equal=True)
        .filter(pl.col("came_ns") >= pl.col("_from"))
        .group_by(_PAGE)
        .agg(pl.col("came_ns").max())
    )


def _page_of(name: str) -> pl.Expr:
    return (pl.col(name) // PAGE_BYTES).cast(pl.Int64)


def _copies(placed: pl.DataFrame) -> pl.DataFrame:
    """List the copies that faults caused, in each VA block that they touch: one, or two."""
    small = pl.col("bytes").is_between(1, VA_BLOCK_BYTES)
    last = pl.col("va") + pl.col("bytes").cast(pl.UInt64) - 1
    blocks = pl.int_ranges(
        pl.col("_first") // _PAGES_PER_BLOCK, pl.col("_last") // _PAGES_PER_BLOCK + 1
    )
    return (
        placed.lazy()
        .filter((pl.col("cause_id") == CAUSE_COHERENCE) & small)
        .select(
            *KEYS,
            came_ns="start_ns",
            _first=_page_of("va"),
            _last=(last // PAGE_BYTES).cast(pl.Int64),
        )
        .with_columns(_block=blocks)
        .explode("_block")
        .collect()
    )
