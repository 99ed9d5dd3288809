"""A level of the pyramid: rows added up in bins of time and place, for windows that hold many."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from nsan.analysis.views.events import Events, Part
from nsan.analysis.views.grids import Grid
from nsan.analysis.views.sums import ROWS_AT_ONCE, Sums, add_rows
from nsan.uvm.constants import VA_BLOCK_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Bins:
    """Equal bins from an origin: bin ``i`` begins at ``origin + i * width``; nothing lies behind ``end``."""

    origin: int
    width: int
    n: int
    end: int

    @classmethod
    def of(cls, span: tuple[int, int], most: int, step: int = 1) -> Bins:
        """Part a span into at most so many bins, each some steps wide."""
        width = max(1, -(-(span[1] - span[0]) // (most * step))) * step
        return cls(span[0], width, max(1, -(-(span[1] - span[0]) // width)), span[1])

    @property
    def edges(self) -> NDArray[np.int64]:
        """Where the bins begin, and the last one ends."""
        return self.origin + self.width * np.arange(self.n + 1)

    def inner(self, span: tuple[int, int]) -> tuple[int, int]:
        """Give the bins that lie in a span whole: first and end."""
        first = min(max(0, -(-(span[0] - self.origin) // self.width)), self.n)
        end = min(max(0, (span[1] - self.origin) // self.width), self.n)
        return first, self.n if span[1] >= self.end else max(first, end)

    def holds(self, span: tuple[int, int], n: int) -> bool:
        """Say whether a span parted into ``n`` is parted at edges of bins."""
        length = span[1] - span[0]
        return (span[0] - self.origin) % self.width == 0 and length % (n * self.width) == 0

    def outer(self, span: tuple[int, int]) -> tuple[int, int]:
        """Give the bins that a span touches: first and end."""
        first = min(max(0, (span[0] - self.origin) // self.width), self.n - 1)
        end = min(max(0, -(-(span[1] - self.origin) // self.width)), self.n)
        return first, max(first + 1, end)


@dataclass(frozen=True, eq=False)
class Level:
    """The rows of a table in bins; only bins that hold something are kept.

    Attributes
    ----------
    times, places : Bins
        Bins of time, and of whole blocks of 2 MiB in the folded space.
    first : array of int
        Entry at which each bin of time begins, and the end.
    place : array of UInt16
        Bin of place of each entry.
    layer : array of UInt8
        Layer of each entry.
    n : array of UInt32
        Rows of each entry.
    amount, duration : array of Float64
        Their bytes or recorded faults, and their time in ns; exact below 2^53.
    """

    times: Bins
    places: Bins
    first: NDArray[np.int64]
    place: NDArray[np.uint16]
    layer: NDArray[np.uint8]
    n: NDArray[np.uint32]
    amount: NDArray[np.float64]
    duration: NDArray[np.float64]

    @property
    def n_bytes(self) -> int:
        """Memory, byte."""
        columns = (self.first, self.place, self.layer, self.n, self.amount, self.duration)
        return sum(column.nbytes for column in columns)

    @property
    def n_entries(self) -> int:
        """Bins of time, place and layer that hold something."""
        return len(self.place)

    @classmethod
    def build(cls, part: Part, events: Events, shape: tuple[int, int]) -> Level:
        """Add up the rows of a part that have a place.

        Parameters
        ----------
        part : Part
            Rows of a table.
        events : Events
            Where they are from: gives the axes.
        shape : (int, int)
            Bins of time and of place, at most.

        Returns
        -------
        Level
            Its sums are those of the rows.
        """
        times = Bins.of(events.extent, shape[0])
        places = Bins.of((0, max(1, events.addresses.total_bytes)), shape[1], VA_BLOCK_BYTES)
        layers = np.flatnonzero(np.bincount(part.layer, minlength=1))
        edges = np.searchsorted(part.start, times.edges)
        made = [_Entries.of(part, span, places, layers) for span in _stretches(edges)]
        first = np.concatenate([[0], np.cumsum(np.concatenate([each.counts for each in made]))])
        columns = zip(*(each.columns for each in made), strict=True)
        return cls(times, places, first, *(np.concatenate(column) for column in columns))

    def add(self, sums: Sums, part: Part) -> None:
        """Add its rows to the cells of a grid.

        Parameters
        ----------
        sums : Sums
            What they are added to; its grid is not fine.
        part : Part
            The rows of the level.

        Notes
        -----
        A bin that lies whole in the grid goes to the cell in which it begins; rows at the border of the
        grid, in bins that lie in it in part, are added one by one. So the cells add up exactly, and
        each is exact where its edges are edges of bins (:meth:`fitted`).
        """
        grid = sums.grid
        time, place = self.times.inner(grid.window), self.places.inner(grid.place)
        if time[0] == time[1] or place[0] == place[1]:
            add_rows(sums, part, part.between(*grid.window))
            return
        begins = [self.times.origin + self.times.width * at for at in time]
        low, high = (part.between(grid.window[0], at)[1] for at in begins)
        start, end = part.between(*grid.window)
        add_rows(sums, part, (start, low))
        add_rows(sums, part, (high, end))
        bottom, top = (self.places.width * at for at in place)
        for box in ((grid.place[0], bottom), (top, grid.place[1])):
            if box[0] < min(box[1], self.places.width * self.places.n):
                add_rows(sums, part, (low, high), box)
        self._add_bins(sums, part, time, place)

    def _add_bins(
        self, sums: Sums, part: Part, time: tuple[int, int], place: tuple[int, int]
    ) -> None:
        """Add bins, a range of columns of the grid at once."""
        grid = sums.grid
        begins = self.times.edges[time[0] : time[1]]
        column = np.searchsorted(grid.column_edges, begins, side="right") - 1
        rows = np.zeros(self.places.n, np.int64)
        rows[place[0] : place[1]] = grid.row_of(self.places.edges[place[0] : place[1]], 0)
        wanted = sums.colouring.wanted(part.table)
        counts = np.diff(self.first[time[0] : time[1] + 1])
        for low, high in _together(counts):
            number = np.repeat((column[low:high] - column[low]) * grid.rows, counts[low:high])
            entries = slice(self.first[time[0] + low], self.first[time[0] + high])
            kept = _kept(self.place[entries], place, self.places.n)
            if wanted is not None:
                flags = wanted.take(self.layer[entries])
                kept = flags if kept is None else kept & flags
            chosen: Any = slice(None) if kept is None else np.flatnonzero(kept)
            cell = number[chosen] + rows.take(self.place[entries][chosen])
            columns = (int(column[low]), int(column[high - 1]) + 1)
            self._add_entries(sums, part, columns, cell, (entries, chosen))

    def _add_entries(
        self,
        sums: Sums,
        part: Part,
        columns: tuple[int, int],
        cell: NDArray[np.int64],
        at: tuple[slice, Any],
    ) -> None:
        by, cells = sums.colouring.by, sums.cells(columns)
        length = cells.stop - cells.start
        n, amount = self.n[at[0]][at[1]], self.amount[at[0]][at[1]]
        found = np.bincount(cell, n, length).astype(np.int64)
        sums.n[cells] += found
        if by in {"cause", "access"}:
            layer = self.layer[at[0]][at[1]]
            sums.value[:, cells] += sums.by_category(columns, cell, layer, amount)
        elif part.table == "migrations":
            sums.size[cells] += np.bincount(cell, amount, length)
        if by == "latency":
            sums.timed[cells] += found
            sums.value[0, cells] += np.bincount(cell, self.duration[at[0]][at[1]], length)

    def is_enough(self, grid: Grid) -> bool:
        """Say whether its bins are fine enough for a grid: half as many as it has cells, each way."""
        columns = (grid.window[1] - grid.window[0]) / self.times.width
        rows = grid.height / self.places.width
        # A bin of one block is as fine as bins get.
        return 2 * columns >= grid.columns and (
            2 * rows >= grid.rows or self.places.width == VA_BLOCK_BYTES
        )

    def fits(self, grid: Grid) -> bool:
        """Say whether every cell of a grid is whole bins of this level."""
        return self.times.holds(grid.window, grid.columns) and self.places.holds(
            grid.place, grid.rows
        )

    def fitted(self, grid: Grid) -> Grid:
        """Widen a grid so that each of its cells is whole bins of this level, all alike.

        Parameters
        ----------
        grid : Grid
            What is asked for.

        Returns
        -------
        Grid
            A grid around it with at most as many columns and rows.
        """
        window, columns = _whole(self.times, grid.window, grid.columns)
        place, rows = _whole(self.places, grid.place, grid.rows)
        return Grid(window, place, columns, rows)


def _whole(bins: Bins, span: tuple[int, int], most: int) -> tuple[tuple[int, int], int]:
    low, high = bins.outer(span)
    each = -(-(high - low) // most)
    n = -(-(high - low) // each)
    begin = bins.origin + low * bins.width
    return (begin, begin + n * each * bins.width), n


def _kept(place: NDArray[np.uint16], bins: tuple[int, int], n: int) -> NDArray[np.bool_] | None:
    if bins == (0, n):
        return None
    return np.asarray(place - np.uint16(bins[0]) < np.uint16(bins[1] - bins[0]))


def _stretches(edges: NDArray[Any]) -> list[NDArray[Any]]:
    """Part bins of time, given by the row at which each begins, into stretches of some rows."""
    return [edges[low : high + 1] for low, high in _together(np.diff(edges))]


def _together(counts: NDArray[Any]) -> list[tuple[int, int]]:
    """Part a list of counts into ranges of about ``ROWS_AT_ONCE``; a large one stands alone."""
    ends = np.cumsum(counts)
    cuts, low = [0], 0
    while low < len(counts):
        passed = ends[low - 1] if low else 0
        low = max(low + 1, int(np.searchsorted(ends, passed + ROWS_AT_ONCE, side="right")))
        cuts.append(min(low, len(counts)))
    return list(pairwise(cuts))


@dataclass(frozen=True)
class _Entries:
    """Entries of a stretch of time: how many by bin of time, and their columns."""

    counts: NDArray[np.int64]
    columns: tuple[NDArray[Any], ...]

    @classmethod
    def of(
        cls, part: Part, edges: NDArray[Any], places: Bins, layers: NDArray[np.int64]
    ) -> _Entries:
        """Add up the rows between the first and the last edge."""
        n_bins, n_layers = len(edges) - 1, max(1, len(layers))
        rows = slice(int(edges[0]), int(edges[-1]))
        number = np.repeat(np.arange(n_bins), np.diff(edges))
        place, layer = part.place[rows], part.layer[rows]
        amount, duration = part.amount.counted(rows), part.duration.counted(rows)
        held = place != part.no_place
        if not held.all():
            number, place, layer, amount, duration = (
                each[held] for each in (number, place, layer, amount, duration)
            )
        ranks = np.zeros(256, np.int64)
        ranks[layers] = np.arange(n_layers)
        at = place.astype(np.int64) // (places.width >> part.shift)
        key = (number * places.n + at) * n_layers + ranks.take(layer)
        length = n_bins * places.n * n_layers
        n = np.bincount(key, minlength=length)
        found = np.flatnonzero(n)
        sums = (np.bincount(key, each, length)[found] for each in (amount, duration))
        counts = np.bincount(found // (places.n * n_layers), minlength=n_bins)
        bins = (found // n_layers % places.n).astype(np.uint16)
        kinds = layers.astype(np.uint8)[found % n_layers]
        return cls(counts, (bins, kinds, n[found].astype(np.uint32), *sums))
