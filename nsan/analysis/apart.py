"""Processes and GPUs apart: what each answers for itself is computed one after another, in the memory of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import polars as pl

from nsan.analysis import slices

KEYS: Final = ("pid", "device_id")


def lots(*tables: pl.LazyFrame) -> Iterator[tuple[pl.LazyFrame, ...]]:
    """Part tables by process and GPU, if their rows are many.

    Parameters
    ----------
    *tables : LazyFrame
        Each with ``pid`` and ``device_id``; the rows of the first two decide.

    Yields
    ------
    tuple of LazyFrame
        The rows of one process and GPU of each table, in order of both, a null before all; all rows at
        once where they are few, or of one process and GPU.
    """
    counts = pl.collect_all(
        [table.group_by(KEYS).agg(n=pl.len().cast(pl.Int64)) for table in tables[:2]]
    )
    found = pl.concat(counts)
    places = found.select(KEYS).unique().sort(KEYS)
    if places.height <= 1 or found["n"].sum() <= slices.ROWS_AT_ONCE:
        yield tables
        return
    for place in places.iter_rows(named=True):
        mine = pl.all_horizontal(
            pl.col(key).eq_missing(pl.lit(value, places.schema[key]))
            for key, value in place.items()
        )
        yield tuple(table.filter(mine) for table in tables)
