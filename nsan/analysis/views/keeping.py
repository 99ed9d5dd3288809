"""Which rows a filter keeps: masks over the rows of a part."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nsan.analysis.views.events import Part

_ROWS_BITS: Final = 32


def int64(value: int) -> int:
    """Clip a whole number to the range of Int64."""
    return max(-(1 << 63), min((1 << 63) - 1, int(value)))


def with_numbers(column: NDArray[Any], numbers: Collection[int]) -> NDArray[np.bool_]:
    """Say which values of a column of small numbers are among some."""
    chosen = np.zeros(int(np.iinfo(column.dtype).max) + 1, bool)
    chosen[[number for number in numbers if 0 <= number < len(chosen)]] = True
    return np.asarray(chosen[column])


def in_windows(part: Part, windows: pl.DataFrame) -> NDArray[np.bool_]:
    """Say which rows start in any of some half-open windows.

    Parameters
    ----------
    part : Part
        Rows by start.
    windows : DataFrame
        ``start_ns``, ``end_ns``, ns, in any order; they may overlap.

    Returns
    -------
    array of bool
        One per row.
    """
    times = windows.select(pl.col("start_ns", "end_ns").cast(pl.Int64)).drop_nulls()
    low, high = (np.searchsorted(part.start, times[name].to_numpy()) for name in times.columns)
    return _covered(part.n_rows, low, np.maximum(low, high))


def in_places(part: Part, places: pl.DataFrame) -> NDArray[np.bool_]:
    """Say which rows begin in any of some ranges of places, while these live.

    Parameters
    ----------
    part : Part
        Rows by start.
    places : DataFrame
        ``place_start``, ``place_end``, byte of the folded space; ``alloc_ns``, ``free_ns`` (ns; null,
        or no such column: open).

    Returns
    -------
    array of bool
        One per row.

    Notes
    -----
    Ranges are cut at each other's edges. Rows are ordered by start, so a life is a range of row
    numbers, and (segment, row number) is one number that is looked up among the edges of all lives.
    """
    lives = _lives(part, places)
    if lives.is_empty():
        return np.zeros(part.n_rows, bool)
    edges = np.unique(lives.select("place_start", "place_end").to_numpy())
    keys = _life_keys(lives, edges)
    placed = np.flatnonzero(part.place != part.no_place)
    byte = part.place[placed].astype(np.int64) << part.shift
    segment = np.searchsorted(edges, byte, side="right")
    at = (segment << _ROWS_BITS) + placed
    mask = np.zeros(part.n_rows, bool)
    mask[placed] = np.searchsorted(keys, at, side="right") % 2 == 1
    return mask


def _covered(n_rows: int, low: NDArray[Any], high: NDArray[Any]) -> NDArray[np.bool_]:
    steps = np.bincount(low, minlength=n_rows + 1) - np.bincount(high, minlength=n_rows + 1)
    return np.cumsum(steps[:n_rows]) > 0


def _lives(part: Part, places: pl.DataFrame) -> pl.DataFrame:
    """List ranges with the first row of their life and the one after the last."""
    known = places.filter(pl.col("place_end") > pl.col("place_start"))
    first = np.zeros(known.height, np.int64)
    last = np.full(known.height, part.n_rows, np.int64)
    for name, rows, otherwise in (("alloc_ns", first, 0), ("free_ns", last, part.n_rows)):
        if name in known.columns:
            when = known[name].cast(pl.Int64)
            at = np.searchsorted(part.start, when.fill_null(0).to_numpy())
            rows[:] = np.where(when.is_null().to_numpy(), otherwise, at)
    return known.select("place_start", "place_end").with_columns(
        first=pl.Series(first), last=pl.Series(last)
    )


def _life_keys(lives: pl.DataFrame, edges: NDArray[Any]) -> NDArray[np.int64]:
    """Cut lives at the edges, put those of a segment together: begin, end, begin, end in order."""
    low = np.searchsorted(edges, lives["place_start"].to_numpy(), side="right")
    high = np.searchsorted(edges, lives["place_end"].to_numpy(), side="right")
    reach = pl.col("last").cum_max().shift(1).over("segment")
    cut = (
        lives.with_columns(low=pl.Series(low), high=pl.Series(high))
        .filter(pl.col("last") > pl.col("first"))
        .select("first", "last", segment=pl.int_ranges("low", "high"))
        .explode("segment")
        .drop_nulls("segment")
        .sort("segment", "first")
        .with_columns(
            run=(pl.col("first") > reach).fill_null(value=False).cum_sum().over("segment")
        )
        .group_by("segment", "run", maintain_order=True)
        .agg(pl.col("first").min(), pl.col("last").max())
    )
    base = cut["segment"].to_numpy().astype(np.int64) << _ROWS_BITS
    both = np.column_stack([base + cut["first"].to_numpy(), base + cut["last"].to_numpy()])
    return both.ravel()
