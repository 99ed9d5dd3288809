"""Lanes of intervals: kernels of a GPU, NVTX ranges of a depth, batches; few enough to draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import polars as pl

from nsan.analysis.views.keeping import int64
from nsan.schema import Column, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

LANE: Final = Table(
    "lane",
    "one interval, or several that lie too close to draw apart",
    (
        Column("start_ns", pl.Int64, "ns", "Start."),
        Column("end_ns", pl.Int64, "ns", "End, exclusive."),
        Column("name", pl.String, "text", "Name; of several the one that is busy longest."),
        Column("id", pl.Int64, "id", "Number of the interval; null where there are several."),
        Column("n", pl.Int64, "intervals", "Intervals that this row stands for."),
    ),
)

_WIDEST: Final = 1 << 61
"""Intervals wider than this, ns, are damaged: columns grow no further."""

_MOST_PAIRS: Final = 1 << 22
"""Columns times names up to which every pair has a place in one array."""


@dataclass(frozen=True, eq=False)
class Lane:
    """Intervals of one lane, by start.

    Attributes
    ----------
    frame : DataFrame
        ``start_ns``, ``end_ns`` (Int64), ``name`` (String), ``id`` (Int64), ordered by start; rows
        without a start or an end are left out.
    start, end : array of Int64
        The times of the frame.
    furthest : array of Int64
        Latest end up to and with each row: what reaches into a window from before is found by it.
    names : Series of String
        Distinct names, sorted; null is last.
    name : array of UInt32
        Number of each row's name.
    """

    frame: pl.DataFrame
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    furthest: NDArray[np.int64]
    names: pl.Series
    name: NDArray[np.uint32]

    @classmethod
    def build(cls, frame: pl.DataFrame) -> Lane:
        """Put intervals in order.

        Parameters
        ----------
        frame : DataFrame
            ``start_ns``, ``end_ns``, ``name``, ``id``, in any order.

        Returns
        -------
        Lane
            The intervals that have a start and an end.
        """
        ordered = (
            frame.select(
                pl.col("start_ns", "end_ns").cast(pl.Int64),
                pl.col("name").cast(pl.String),
                pl.col("id").cast(pl.Int64),
            )
            .drop_nulls(["start_ns", "end_ns"])
            .sort("start_ns", "end_ns", "id")
        )
        names = ordered["name"].unique().sort(nulls_last=True)
        numbers = pl.DataFrame({"name": names}).with_row_index("number")
        named = ordered.select("name").join(
            numbers, on="name", how="left", nulls_equal=True, maintain_order="left"
        )
        start, end = ordered["start_ns"].to_numpy(), ordered["end_ns"].to_numpy()
        furthest = np.maximum.accumulate(end)
        return cls(ordered, start, end, furthest, names, named["number"].to_numpy())

    def within(self, window: tuple[int, int], *, n_columns: int, most: int = 300) -> pl.DataFrame:
        """Give what a lane shows of a window.

        Parameters
        ----------
        window : (int, int)
            Half-open, ns.
        n_columns : int
            Columns that the lane is drawn in: intervals narrower than one are put together.
        most : int, default 300
            Rows at most.

        Returns
        -------
        DataFrame, ``LANE``
            Intervals that touch the window, whole (not clipped), by start; where they are more than
            ``most``, those that begin in the same column and are narrower than it are one row, and
            where these are still too many, neighbours are put together. ``n`` adds up to the number of
            intervals that touch the window.
        """
        low, high = int64(window[0]), int64(window[1])
        rows = self._touching(low, high)
        if len(rows) <= most:
            return self._single(rows)
        width = max(1, -(-(high - low) // max(1, n_columns)))
        while True:
            wide = self.end[rows] - self.start[rows] >= width
            narrow = rows[~wide]
            # What began before the window belongs to its first column.
            begins = np.maximum(self.start[narrow], low) - np.int64(low)
            column = begins.view(np.uint64) // np.uint64(width)
            first = np.flatnonzero(np.r_[len(column) > 0, column[1:] != column[:-1]])
            if len(first) + np.count_nonzero(wide) <= max(1, most) or width > _WIDEST:
                break
            width *= 2
        merged = self._merged(narrow, first)
        return pl.concat([self._single(rows[wide]), merged]).sort("start_ns", "end_ns", "id")

    def _touching(self, start: int, end: int) -> NDArray[np.int64]:
        """Find the rows that touch a window; an instant at its start is in it."""
        reaching = np.searchsorted(self.furthest, start, side="right")
        low = int(min(reaching, np.searchsorted(self.start, start)))
        high = max(low, int(np.searchsorted(self.start, end)))
        rows = slice(low, high)
        return np.flatnonzero((self.end[rows] > start) | (self.start[rows] >= start)) + low

    def _single(self, rows: NDArray[np.int64]) -> pl.DataFrame:
        found = self.frame[rows].with_columns(n=pl.lit(1, pl.Int64))
        return found.select(pl.col(name).cast(dtype) for name, dtype in LANE.schema.items())

    def _merged(self, rows: NDArray[np.int64], first: NDArray[np.int64]) -> pl.DataFrame:
        """Put the rows of each column together; ``first`` is where the columns begin among them."""
        if not len(rows):
            return self._single(rows)
        n = np.diff(np.append(first, len(rows)))
        name, ids = self._busiest(rows, n), self.frame["id"].gather(rows[first])
        return pl.DataFrame(
            {
                "start_ns": self.start[rows[first]],
                "end_ns": np.maximum.reduceat(self.end[rows], first),
                "name": self.names.gather(name),
                "id": ids.set(pl.Series(n > 1), None),
                "n": n,
            },
            schema=LANE.schema,
        )

    def _busiest(self, rows: NDArray[np.int64], n: NDArray[np.int64]) -> NDArray[Any]:
        """Give for each column the number of the name that is busy longest in it; of equal ones the first."""
        busy = np.maximum(self.end[rows] - self.start[rows], 0).astype(float)
        key = np.repeat(np.arange(len(n)), n) * len(self.names) + self.name[rows]
        if len(n) * len(self.names) <= _MOST_PAIRS:
            sums = np.bincount(key, busy, len(n) * len(self.names)).reshape(len(n), -1)
            # A name that is there for no time at all still comes before one that is not there.
            there = np.bincount(key, minlength=sums.size).reshape(sums.shape) > 0
            return np.asarray(np.where(there, sums, -1.0).argmax(axis=1))
        pairs, inverse = np.unique(key, return_inverse=True)
        sums = np.bincount(inverse, busy, len(pairs))
        order = np.lexsort((pairs, -sums, pairs // len(self.names)))
        column = pairs[order] // len(self.names)
        return np.asarray(pairs[order][np.r_[True, column[1:] != column[:-1]]] % len(self.names))
