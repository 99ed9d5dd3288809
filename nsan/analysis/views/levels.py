"""A level of the pyramid: rows added up in bins of time and place, for windows that hold many."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from nsan.analysis.views.compact import Compact
from nsan.analysis.views.events import Events, Part
from nsan.analysis.views.grids import Grid
from nsan.analysis.views.sums import ROWS_AT_ONCE, Sums, add_rows
from nsan.uvm.constants import VA_BLOCK_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHAPES: Final = ((480, 220), (960, 440), (3840, 1760))
"""Bins of time and place of each level, at most: the finest grid that a view draws, and finer."""

_MOST_SHARE: Final = 0.4
"""A level with more entries than this share of its rows is no help."""

_LONGEST_WAIT_S: Final = 1.0
"""Levels are made even while somebody never stops asking: one stretch of rows in this time."""


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
    sized, timed : array of UInt32, or None
        Rows of each entry of which amount and duration are known; None where all are.
    """

    times: Bins
    places: Bins
    first: NDArray[np.int64]
    place: NDArray[np.uint16]
    layer: NDArray[np.uint8]
    n: NDArray[np.uint32]
    amount: NDArray[np.float64]
    duration: NDArray[np.float64]
    sized: NDArray[np.uint32] | None
    timed: NDArray[np.uint32] | None

    @property
    def n_bytes(self) -> int:
        """Memory, byte."""
        columns = (self.first, self.place, self.layer, self.n, self.amount, self.duration)
        known = sum(each.nbytes for each in (self.sized, self.timed) if each is not None)
        return known + sum(column.nbytes for column in columns)

    @property
    def n_entries(self) -> int:
        """Bins of time, place and layer that hold something."""
        return len(self.place)

    @classmethod
    def build(
        cls,
        part: Part,
        events: Events,
        shape: tuple[int, int],
        *,
        most: float = float("inf"),
        pause: Callable[[], None] | None = None,
    ) -> Level | None:
        """Add up the rows of a part that have a place.

        Parameters
        ----------
        part : Part
            Rows of a table.
        events : Events
            Where they are from: gives the axes.
        shape : (int, int)
            Bins of time and of place, at most.
        most : float, optional
            Entries at most; no more rows are read once there are more.
        pause : callable, optional
            Called before each stretch of rows.

        Returns
        -------
        Level, or None
            Its sums are those of the rows; None where it has too many entries.
        """
        times = Bins.of(events.extent, shape[0])
        places = Bins.of((0, max(1, events.addresses.total_bytes)), shape[1], VA_BLOCK_BYTES)
        layers = np.flatnonzero(np.bincount(part.layer, minlength=1))
        edges = np.searchsorted(part.start, times.edges)
        made = []
        for span in _stretches(edges):
            if pause is not None:
                pause()
            made.append(_Entries.of(part, span, places, layers))
            most -= int(made[-1].counts.sum())
            if most < 0:
                return None
        first = np.concatenate([[0], np.cumsum(np.concatenate([each.counts for each in made]))])
        columns = zip(*(each.columns for each in made), strict=True)
        joined: list[Any] = [
            None if column[0] is None else np.concatenate(column) for column in columns
        ]
        return cls(times, places, first, *joined)

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
            if not part.amount.is_positive:
                sums.count_categories(columns, cell, layer, n)
        elif part.table == "migrations":
            sums.size[cells] += np.bincount(cell, amount, length)
        if by == "latency":
            sums.value[0, cells] += np.bincount(cell, self.duration[at[0]][at[1]], length)
        known = self.timed if by == "latency" else self.sized
        if known is not None:
            found = np.bincount(cell, known[at[0]][at[1]], length).astype(np.int64)
        sums.known[cells] += found

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


class Levels:
    """The levels of all tables, coarse ones first; each is made once.

    Parameters
    ----------
    events : Events
        Their rows.
    least : int
        Rows that a table has at least to be given levels.
    """

    def __init__(self, events: Events, least: int) -> None:
        self.events, self.least = events, least
        self._made: dict[tuple[str, int], Level | None] = {}
        self._asked = 0
        self._turn = threading.Condition()
        self.is_warming = False
        """Another thread makes them just now: who asks takes what is there."""

    @property
    def n_bytes(self) -> int:
        """Memory, byte."""
        return sum(level.n_bytes for level in self.made().values())

    def made(self) -> dict[tuple[str, int], Level]:
        """List the levels that are there, by table and number."""
        # Copied in one step: another thread may add one.
        return {key: level for key, level in self._made.copy().items() if level}

    def is_known(self, part: Part, at: int) -> bool:
        """Say whether a level is made, or was found to be no help."""
        if part.n_rows < self.least or (part.table, at) in self._made:
            return True
        # A finer level than one that is no help has no fewer entries.
        coarser = (part.table, at - 1)
        return coarser in self._made and self._made[coarser] is None

    def get(self, part: Part, at: int) -> Level | None:
        """Give a level of a table, made now if it has to be; None where it is no help."""
        if not self.is_known(part, at):
            self._make(part, at, None)
        return self._made.get((part.table, at))

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Let the thread that makes levels wait for as long as this lasts."""
        with self._turn:
            self._asked += 1
        try:
            yield
        finally:
            with self._turn:
                self._asked -= 1
                self._turn.notify_all()

    def warm(self) -> None:
        """Make every level that helps, in the order in which zooms need them."""
        self.is_warming = True
        try:
            for at in range(len(SHAPES)):
                for part in self.events.parts.values():
                    if not self.is_known(part, at):
                        self._make(part, at, self._wait)
        finally:
            self.is_warming = False

    def _make(self, part: Part, at: int, pause: Callable[[], None] | None) -> None:
        most = _MOST_SHARE * part.n_rows if at else float("inf")
        made = Level.build(part, self.events, SHAPES[at], most=most, pause=pause)
        self._made[part.table, at] = made

    def _wait(self) -> None:
        with self._turn:
            self._turn.wait_for(lambda: not self._asked, _LONGEST_WAIT_S)


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
    columns: tuple[NDArray[Any] | None, ...]

    @classmethod
    def of(
        cls, part: Part, edges: NDArray[Any], places: Bins, layers: NDArray[np.int64]
    ) -> _Entries:
        """Add up the rows between the first and the last edge."""
        n_bins, n_layers = len(edges) - 1, max(1, len(layers))
        rows = slice(int(edges[0]), int(edges[-1]))
        number = np.repeat(np.arange(n_bins), np.diff(edges))
        place, layer = part.place[rows], part.layer[rows]
        figures = [figure.counted(rows) for figure in (part.amount, part.duration)]
        figures += [figure.known(rows) for figure in _in_part(part)]
        held = place != part.no_place
        if not held.all():
            number, place, layer, *figures = (
                each[held] for each in (number, place, layer, *figures)
            )
        ranks = np.zeros(256, np.int64)
        ranks[layers] = np.arange(n_layers)
        at = place.astype(np.int64) // (places.width >> part.shift)
        key = (number * places.n + at) * n_layers + ranks.take(layer)
        length = n_bins * places.n * n_layers
        n = np.bincount(key, minlength=length)
        found = np.flatnonzero(n)
        sums = [np.bincount(key, each, length)[found] for each in figures]
        known = iter([each.astype(np.uint32) for each in sums[2:]])
        flags = (next(known) if each.has_unknown else None for each in (part.amount, part.duration))
        counts = np.bincount(found // (places.n * n_layers), minlength=n_bins)
        bins = (found // n_layers % places.n).astype(np.uint16)
        kinds = layers.astype(np.uint8)[found % n_layers]
        return cls(counts, (bins, kinds, n[found].astype(np.uint32), *sums[:2], *flags))


def _in_part(part: Part) -> list[Compact]:
    """List the figures of a part of which some are known and some are not."""
    return [figure for figure in (part.amount, part.duration) if figure.has_unknown]
