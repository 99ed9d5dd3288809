"""The pyramid: grids, marks, strips and rows of any window, from as few rows as it takes.

Rows lie in order of start, so a window of time is a range of them. Where that range is long, bins of
time and place that were added up once (:mod:`nsan.analysis.views.levels`) stand for its rows, and where
only time counts, running sums (:mod:`nsan.analysis.views.counts`) do. Each is made when it is first
needed and then kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

import numpy as np
import polars as pl

from nsan.analysis.views.counts import RunningCounts
from nsan.analysis.views.events import Events, Part
from nsan.analysis.views.grids import By, Colouring, Grid
from nsan.analysis.views.levels import SHAPES, Levels
from nsan.analysis.views.sums import Rows, Sums, add_rows, inside, length_of, spread_rows
from nsan.analysis.views.tables import MARKS, SELECTED, STRIP
from nsan.uvm.constants import PAGE_BYTES

Window = tuple[int, int]

_FEW: Final = 700_000
"""Rows in a window up to which they are added up one by one: about 10 ms."""

_SEEN: Final = 0.15
"""What it costs to look whether a row lies in the window, against adding it up."""

_SPREAD: Final = 3
"""What it costs to add up a copy and spread it over the cells of a fine grid, against adding it up."""

_PATIENCE: Final = 3
"""So many times ``_FEW`` rows are added up one by one rather than drawn in a grid that is too coarse."""

_BRIEF: Final = 10
"""So many times ``_FEW`` rows are added up one by one while levels are being made: about 100 ms."""

_SAMPLE: Final = 4096


class Pyramid:
    """Answers of the explorer over events of any number.

    Parameters
    ----------
    events : Events
        What to draw.
    """

    def __init__(self, events: Events) -> None:
        self.events = events
        self._levels = Levels(events, _FEW // 4 + 1)
        self._decided: tuple[Grid, Any, int | None] | None = None
        """The grid that was fitted last, and the level for it: as it was decided, so it is filled."""
        self._counts: dict[str, RunningCounts] = {}

    @property
    def extent(self) -> Window:
        """From the first start to the last end, ns."""
        return self.events.extent

    @property
    def all_places(self) -> Window:
        """The whole folded space, byte."""
        return 0, max(1, self.events.addresses.total_bytes)

    @property
    def n_bytes(self) -> int:
        """Memory of the rows and of what has been added up so far, byte."""
        counts = sum(count.n_bytes for count in self._counts.values())
        return self.events.n_bytes + self._levels.n_bytes + counts

    def warm(self) -> None:
        """Add up what zooms will need, so that nobody waits for it; for a thread in the background.

        Notes
        -----
        No lock is held: who asks meanwhile is answered from the rows and the levels that are there, and
        the work here waits until that is done.
        """
        self._levels.warm()

    def layers_of(self, by: By) -> list[int]:
        """List the layers of which a colouring speaks: what ``n`` of its cells counts."""
        return Colouring.of(by, self.events.layers, None).layers

    def cells(
        self,
        window: Window,
        place: Window | None = None,
        *,
        shape: tuple[int, int],
        by: By = "cause",
        layers: Collection[int] | None = None,
    ) -> pl.DataFrame:
        """Add up what happened in each cell of a grid of time and place.

        Parameters
        ----------
        window : (int, int)
            Half-open, ns.
        place : (int, int), optional
            Half-open, byte of the folded space; all of it by default.
        shape : (int, int)
            Columns and rows.
        by : {"cause", "access", "density", "latency"}
            What the colour speaks of; see :class:`nsan.analysis.views.grids.Colouring`.
        layers : collection of int, optional
            Layers to draw; all by default.

        Returns
        -------
        DataFrame, ``CELLS``
            One row per cell that holds something, by column and row. ``n`` counts a row once, in the
            cell of its start and of its first byte, so the cells of a tiling of the map add up to
            :meth:`count` over ``layers_of(by)``. ``bytes`` (and ``value`` by cause) go to that cell too,
            or, where a row of the grid is smaller than a block of 2 MiB, to each cell what lies there.

        Notes
        -----
        Where a window holds very many rows, what lies between two edges of the grid may be counted one
        bin (at most one part in 480 of the trace's time, or in 220 of its places) to the side. On a grid
        of :meth:`fitted` every cell is exact.
        """
        grid = Grid.checked(window, self.all_places if place is None else place, shape)
        sums = Sums(grid, Colouring.of(by, self.events.layers, layers))
        if grid.is_empty:
            return sums.frame()
        with self._levels.asking():
            self._fill(sums, (by, None if layers is None else frozenset(layers)))
        return sums.frame()

    def _fill(self, sums: Sums, asked: tuple[Any, ...]) -> None:
        grid, decided = sums.grid, self._decided
        if decided is not None and decided[:2] == (grid, asked):
            chosen = decided[2]
        else:
            chosen = None if grid.is_fine else self._chosen(grid, sums.colouring)
        for part in self._parts(sums.colouring):
            level = None if chosen is None else self._levels.get(part, chosen)
            if level is not None:
                level.add(sums, part)
            else:
                add_rows(sums, part, part.between(*grid.window))
            if sums.is_spread and part.table == "migrations":
                spread_rows(sums, part, part.between(*grid.window))

    def fitted(
        self,
        window: Window,
        place: Window | None = None,
        *,
        shape: tuple[int, int],
        by: By = "cause",
        layers: Collection[int] | None = None,
    ) -> tuple[Window, Window, tuple[int, int]]:
        """Say which grid around a window is quick to fill, with cells that are all alike.

        Parameters
        ----------
        window : (int, int)
            Half-open, ns.
        place : (int, int), optional
            Half-open, byte of the folded space; all of it by default.
        shape : (int, int)
            Columns and rows at most.
        by : {"cause", "access", "density", "latency"}
            What the colour is to speak of.
        layers : collection of int, optional
            Layers to draw; all by default.

        Returns
        -------
        (window, place, shape)
            What to ask :meth:`cells` for: as asked where few rows lie in the window; else a little
            wider, with at most as many columns and rows, on the edges of bins that are added up already.
        """
        grid = Grid.checked(window, self.all_places if place is None else place, shape)
        colouring = Colouring.of(by, self.events.layers, layers)
        if grid.is_empty:
            return grid.window, grid.place, (grid.columns, grid.rows)
        with self._levels.asking():
            if grid.is_fine:
                grid = self._coarser(grid, colouring)
            chosen = None if grid.is_fine else self._chosen(grid, colouring)
            if chosen is not None:
                made = (self._levels.get(part, chosen) for part in self._parts(colouring))
                grid = next(level for level in made if level).fitted(grid)
        self._decided = grid, (by, None if layers is None else frozenset(layers)), chosen
        return grid.window, grid.place, (grid.columns, grid.rows)

    def _parts(self, colouring: Colouring) -> Iterator[Part]:
        for name in colouring.tables:
            if name in self.events.parts:
                yield self.events.parts[name]

    def _coarser(self, grid: Grid, colouring: Colouring) -> Grid:
        """Give a fine grid a row for each block where copies are too many to be spread over cells."""
        blocks = grid.on_blocks()
        moved = (part for part in self._parts(colouring) if part.table == "migrations")
        cost = _SPREAD * sum(_inside(part, grid, colouring) for part in moved)
        limit = _FEW if 2 * blocks.rows >= grid.rows else _FEW * _PATIENCE
        return blocks if cost > limit else grid

    def _chosen(self, grid: Grid, colouring: Colouring) -> int | None:
        """Choose the level that is fine enough for a grid, or None for the rows themselves."""
        cost = sum(
            _inside(part, grid, colouring) + _seen(part, grid) for part in self._parts(colouring)
        )
        if cost <= _FEW:
            return None
        for (table, at), level in self._levels.made().items():
            if table in colouring.tables and level.fits(grid) and self._is_there(at, colouring):
                return at
        return self._first_enough(grid, colouring, cost)

    def _first_enough(self, grid: Grid, colouring: Colouring, cost: float) -> int | None:
        """Choose the coarsest level that is fine enough, of those that nobody makes just now."""
        is_long = cost > _FEW * _BRIEF
        for at in range(len(SHAPES)):
            if (
                self._levels.is_warming
                and not self._is_there(at, colouring)
                and (at or not is_long)
            ):
                return at - 1 if is_long else None
            levels = [self._levels.get(part, at) for part in self._parts(colouring)]
            # A small table has no levels: its rows are added up one by one.
            useful = [level for level in levels if level]
            if not useful:
                return at - 1 if at and cost > _FEW * _PATIENCE else None
            if useful[0].is_enough(grid):
                return at
        return at

    def _is_there(self, at: int, colouring: Colouring) -> bool:
        """Say whether nobody has to wait for a level of what a colouring speaks of."""
        return all(self._levels.is_known(part, at) for part in self._parts(colouring))

    def marks(
        self,
        window: Window,
        place: Window | None = None,
        *,
        layers: Collection[int] | None = None,
        most: int = 2000,
    ) -> pl.DataFrame | None:
        """Give the rows that touch a box, if they are few enough to draw one by one.

        Parameters
        ----------
        window : (int, int)
            Half-open, ns: rows that start in it.
        place : (int, int), optional
            Half-open, byte of the folded space: rows of which any byte lies in it.
        layers : collection of int, optional
            Layers to draw; all by default.
        most : int, default 2000
            Rows at most.

        Returns
        -------
        DataFrame, ``MARKS``, or None
            By start; None where there are more rows. Rows without a place are never among them. A fault
            reaches to the end of its page.
        """
        box = self.all_places if place is None else place
        found: dict[str, Rows] = {}
        for part in self.events.parts.values():
            pieces = []
            for piece in _touching(part, window, box, layers):
                pieces.append(piece)
                most -= len(piece)
                if most < 0:
                    return None
            found[part.table] = np.concatenate([np.empty(0, np.int64), *pieces])
        page_end = pl.col("place") // PAGE_BYTES * PAGE_BYTES + PAGE_BYTES
        moved_end = pl.col("place") + pl.col("bytes").fill_null(1).clip(1)
        end = pl.when(pl.col("table") == "migrations").then(moved_end).otherwise(page_end)
        frame = self.events.recorded(found).with_columns(place_start="place", place_end=end)
        return frame.select(MARKS.schema.names())

    def strip(
        self, window: Window, *, n_columns: int, layers: Collection[int] | None = None
    ) -> pl.DataFrame:
        """Add up what happened in each column of time, with or without a place.

        Parameters
        ----------
        window : (int, int)
            Half-open, ns.
        n_columns : int
            Columns.
        layers : collection of int, optional
            Layers to count; all by default.

        Returns
        -------
        DataFrame, ``STRIP``
            One row per column and layer that has rows, in that order.
        """
        grid = Grid.checked(window, (0, 1), (n_columns, 1))
        frames = [self._strip(part, grid) for part in self.events.parts.values()]
        found = pl.concat([pl.DataFrame(schema=STRIP.schema), *frames]).sort("column", "layer")
        return found if layers is None else found.filter(pl.col("layer").is_in(list(layers)))

    def _strip(self, part: Part, grid: Grid) -> pl.DataFrame:
        if part.table not in self._counts:
            self._counts[part.table] = RunningCounts.of(part)
        counts = self._counts[part.table]
        n, amount = counts.between(np.searchsorted(part.start, grid.column_edges))
        column, rank = np.nonzero(n)
        figure = {"migrations": "bytes", "gpu_faults": "n_page_faults"}.get(part.table)
        held = {name: amount[column, rank] if name == figure else None for name in _FIGURES}
        found = pl.DataFrame(
            {"column": column, "layer": counts.layers[rank], "n": n[column, rank], **held}
        )
        return found.select(pl.col(name).cast(dtype) for name, dtype in STRIP.schema.items())

    def rows(
        self,
        window: Window,
        place: Window | None = None,
        *,
        layers: Collection[int] | None = None,
        touching: bool = False,
    ) -> pl.DataFrame:
        """Give the rows of a box as they were recorded.

        Parameters
        ----------
        window : (int, int)
            Half-open, ns: rows that start in it.
        place : (int, int), optional
            Half-open, byte of the folded space: rows whose first byte lies in it. Without it rows that
            have no place are among them.
        layers : collection of int, optional
            Layers to take; all by default.
        touching : bool, default False
            Take rows of which any byte lies in ``place``, as a map draws them.

        Returns
        -------
        DataFrame, ``SELECTED``
            Exact rows, by start.
        """
        found = {}
        for name, part in self.events.parts.items():
            if touching and place is not None:
                pieces: Iterator[Rows] = _touching(part, window, place, layers)
            else:
                pieces = inside(part, part.between(*window), place, _flags(layers))
            found[name] = _joined(list(pieces))
        return self.events.recorded(found).select(SELECTED.schema.names())

    def count(
        self,
        window: Window,
        place: Window | None = None,
        *,
        layers: Collection[int] | None = None,
    ) -> int:
        """Count the rows of a box.

        Parameters
        ----------
        window : (int, int)
            Half-open, ns: rows that start in it.
        place : (int, int), optional
            Half-open, byte of the folded space: rows whose first byte lies in it. Without it rows that
            have no place are counted too.
        layers : collection of int, optional
            Layers to count; all by default.

        Returns
        -------
        int
            Rows.
        """
        if place is None:
            strip = self.strip(window, n_columns=1, layers=layers)
            return int(strip["n"].sum())
        parts = self.events.parts.values()
        found = (inside(part, part.between(*window), place, _flags(layers)) for part in parts)
        return sum(length_of(rows) for pieces in found for rows in pieces)


_FIGURES: Final = ("bytes", "n_page_faults")


def _flags(layers: Collection[int] | None) -> np.ndarray | None:
    if layers is None:
        return None
    flags = np.zeros(256, bool)
    flags[[int(layer) for layer in layers if 0 <= layer < 256]] = True
    return flags


def _touching(
    part: Part, window: Window, place: Window, layers: Collection[int] | None
) -> Iterator[np.ndarray]:
    """Find the rows of which any byte lies in a range of places, stretch by stretch."""
    reach = (place[0] - part.longest + 1, place[1])
    for rows in inside(part, part.between(*window), reach, _flags(layers)):
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        yield numbers[part.ends(rows) > place[0]]


def _joined(pieces: list[Rows]) -> Rows:
    """Put the numbers of several stretches together."""
    if all(isinstance(piece, slice) for piece in pieces):
        whole = [piece for piece in pieces if isinstance(piece, slice)]
        return slice(whole[0].start, whole[-1].stop) if whole else slice(0, 0)
    return np.concatenate([np.r_[piece] for piece in pieces])


def _inside(part: Part, grid: Grid, colouring: Colouring) -> float:
    """Estimate how many rows lie in a grid, from a few thousand of its window."""
    low, high = part.between(*grid.window)
    if high - low <= _FEW // 8:
        return high - low
    sample = slice(low, high, max(1, (high - low) // _SAMPLE))
    place = part.place[sample].astype(np.int64) << part.shift
    held = (place >= grid.place[0]) & (place < grid.place[1])
    wanted = colouring.wanted(part.table)
    if wanted is not None:
        held &= wanted.take(part.layer[sample])
    return float((high - low) * held.mean())


def _seen(part: Part, grid: Grid) -> float:
    """Give what looking through a window costs, in rows that are added up."""
    low, high = part.between(*grid.window)
    return _SEEN * (high - low)
