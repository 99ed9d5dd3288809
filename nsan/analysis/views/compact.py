"""Columns of small whole numbers in four bytes each, with one value kept for what is not known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Compact:
    """Int64 values in as few bytes as hold them.

    Attributes
    ----------
    values : array of Int32 or Int64
        The numbers; the least number of the type stands for "not known".
    """

    values: NDArray[Any]

    @classmethod
    def of(cls, series: pl.Series) -> Compact:
        """Pack an Int64 series: null stays null, and so does the least Int64."""
        low, high = series.min(), series.max()
        if low is None or high is None:
            return cls.unknown(series.len())
        small = np.iinfo(np.int32)
        fits = small.min < low and high <= small.max  # type: ignore[operator]
        dtype: Any = np.int32 if fits else np.int64
        return cls(filled(series, dtype, int(np.iinfo(dtype).min)))

    @classmethod
    def unknown(cls, n_rows: int) -> Compact:
        """So many values that are not known, in the memory of one."""
        return cls(np.broadcast_to(np.int32(np.iinfo(np.int32).min), n_rows))

    @property
    def null(self) -> int:
        """The number that stands for "not known"."""
        return int(np.iinfo(self.values.dtype).min)

    @property
    def n_bytes(self) -> int:
        """Memory, byte."""
        return self.values.nbytes if self.values.strides[0] else 0

    @cached_property
    def highest(self) -> int:
        """The highest value, 0 where there is none above it."""
        return max(0, int(self.values.max())) if len(self.values) and self.n_bytes else 0

    @cached_property
    def _lowest(self) -> int:
        """The lowest value, that of "not known" included; 1 without a row."""
        return int(self.values.min()) if len(self.values) else 1

    @property
    def has_unknown(self) -> bool:
        """Some values are not known, or below zero, which no size or time is."""
        return self._lowest < 0

    @property
    def is_positive(self) -> bool:
        """Every value is known and above 0."""
        return self._lowest > 0

    def known(self, rows: NDArray[Any] | slice) -> NDArray[np.bool_]:
        """Say which values are known: those that :meth:`counted` does not make up."""
        return np.asarray(self.values[rows] >= 0)

    def taken(self, rows: NDArray[Any] | slice) -> Compact:
        """Keep rows, by number or mask."""
        return Compact(self.values[rows])

    def counted(self, rows: NDArray[Any] | slice) -> NDArray[Any]:
        """Give values to add up: what is not known or below zero counts as 0."""
        found = self.values[rows]
        return np.maximum(found, 0) if self.has_unknown else found

    def series(self, name: str) -> pl.Series:
        """Unpack: Int64, null where it is not known."""
        column = pl.Series(name, np.ascontiguousarray(self.values)).cast(pl.Int64)
        return column.set(column == self.null, None)


def filled(series: pl.Series, dtype: Any, null: int) -> NDArray[Any]:
    """Make one array of a series, chunk by chunk, with a number for null.

    Parameters
    ----------
    series : Series
        Whole numbers that the type holds.
    dtype : numpy type
        Type of the array.
    null : int
        What stands for null; the series can hold it.

    Returns
    -------
    array
        The numbers, in memory of its own.
    """
    found = np.empty(series.len(), dtype)
    at = 0
    for chunk in series.get_chunks():
        known = chunk.fill_null(null) if chunk.null_count() else chunk
        found[at : at + chunk.len()] = known.to_numpy()
        at += chunk.len()
    return found
