"""Rows added up in the cells of a grid, a stretch of time at once so that it stays in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from nsan.analysis.views.compact import Compact
from nsan.analysis.views.events import Part
from nsan.analysis.views.grids import Colouring, Grid
from nsan.analysis.views.tables import CELLS

ROWS_AT_ONCE: Final = 1 << 17
"""Rows that are added up in one step."""

Rows = NDArray[np.int64] | slice
"""Numbers of rows, in order of start."""


@dataclass
class Sums:
    """Figures of every cell of a grid; a cell is ``column * rows + row``.

    Attributes
    ----------
    grid : Grid
        The cells.
    colouring : Colouring
        What is added up.
    n : array of Int64
        Rows by cell.
    size : array of Float64
        Migrated bytes by cell; exact, for no cell holds 2^53.
    value : array of Float64, categories by cells
        What the colour shows, by category.
    """

    grid: Grid
    colouring: Colouring
    n: NDArray[np.int64] = field(init=False)
    size: NDArray[np.float64] = field(init=False)
    value: NDArray[np.float64] = field(init=False)
    known: NDArray[np.int64] = field(init=False)
    """Rows of which the figure that is shown is known."""
    rows_of: NDArray[np.int64] | None = field(init=False, default=None)
    """Rows by category and cell, only of tables in which figures may be 0 or unknown: they say which
    category a cell without any amount has."""

    def __post_init__(self) -> None:
        cells = self.grid.columns * self.grid.rows
        self.n, self.known = np.zeros(cells, np.int64), np.zeros(cells, np.int64)
        self.size = np.zeros(cells)
        self.value = np.zeros((len(self.colouring.categories), cells))

    @property
    def is_spread(self) -> bool:
        """Bytes go to every cell that a copy reaches over, not to its first one."""
        return self.grid.is_fine

    def cells(self, columns: tuple[int, int]) -> slice:
        """Give the cells of a range of columns."""
        return slice(columns[0] * self.grid.rows, columns[1] * self.grid.rows)

    def by_category(
        self, columns: tuple[int, int], cell: NDArray[np.int64], layer: NDArray[Any], amount: Any
    ) -> NDArray[np.float64]:
        """Add up amounts by category and cell of some columns; cells count from the first of these."""
        cells = self.cells(columns)
        length, n = cells.stop - cells.start, len(self.value)
        if n > 1:
            cell = cell + (self.colouring.numbers * np.int64(length)).take(layer)
        return np.asarray(np.bincount(cell, amount, n * length).reshape(n, length))

    def count_categories(
        self, columns: tuple[int, int], cell: NDArray[np.int64], layer: NDArray[Any], n: Any = None
    ) -> None:
        """Count rows by category, as :meth:`by_category` adds amounts."""
        if self.rows_of is None:
            self.rows_of = np.zeros(self.value.shape, np.int64)
        found = self.by_category(columns, cell, layer, n)
        self.rows_of[:, self.cells(columns)] += found.astype(np.int64)

    def frame(self) -> pl.DataFrame:
        """Give the cells that hold something: ``CELLS``, by column and row."""
        by = self.colouring.by
        total = self.n.astype(float) if by == "density" else self.value.sum(axis=0)
        size = total if by == "cause" else self.size
        held = np.flatnonzero((self.n > 0) | (size > 0))
        shown, known = total[held], self.known[held]
        first = self._categories(held, shown)
        if by == "latency":
            shown = np.divide(shown, known, where=known > 0, out=np.full(len(held), np.nan))
        elif by != "density":
            shown = np.where((shown > 0) | (known > 0), shown, np.nan)
        names = pl.Series("category", self.colouring.categories, dtype=pl.String)
        found = pl.DataFrame(
            {
                "column": held // self.grid.rows,
                "row": held % self.grid.rows,
                "category": names.gather(first),
                "value": pl.Series(shown).fill_nan(None),
                "n": self.n[held],
                "bytes": size[held],
            }
        )
        return found.select(pl.col(name).cast(dtype) for name, dtype in CELLS.schema.items())

    def _categories(self, held: NDArray[np.int64], total: NDArray[np.float64]) -> NDArray[np.int64]:
        """Give the category that has most in each cell: of the amounts, else of the rows."""
        first = self.value[:, held].argmax(axis=0)
        if self.rows_of is not None:
            bare = np.flatnonzero(total == 0)
            first[bare] = self.rows_of[:, held[bare]].argmax(axis=0)
        return np.asarray(first)


def inside(
    part: Part,
    rows: tuple[int, int],
    place: tuple[int, int] | None,
    wanted: NDArray[np.bool_] | None,
) -> Iterator[Rows]:
    """Find rows that begin in a range of places and are of some layers, stretch by stretch.

    Parameters
    ----------
    part : Part
        Rows of a table.
    rows : (int, int)
        First number and end.
    place : (int, int), optional
        Half-open, byte of the folded space; without it rows that have no place are found too.
    wanted : array of 256 bool, optional
        Layers to find.

    Yields
    ------
    Rows
        At most ``ROWS_AT_ONCE`` numbers, ascending.
    """
    bounds = None if place is None else _steps(part, place)
    for low in range(rows[0], rows[1], ROWS_AT_ONCE):
        high = min(low + ROWS_AT_ONCE, rows[1])
        mask = None
        if bounds is not None:
            # One comparison: what lies below wraps round to a large number.
            column = part.place[low:high]
            unsigned = np.dtype(f"u{column.dtype.itemsize}").type
            offset = column.view(unsigned) - unsigned(bounds[0])
            mask = offset < unsigned(bounds[1] - bounds[0])
        if wanted is not None:
            kept = wanted.take(part.layer[low:high])
            mask = kept if mask is None else mask & kept
        if mask is None or mask.all():
            yield slice(low, high)
        else:
            yield np.flatnonzero(mask) + low


def length_of(rows: Rows) -> int:
    """Count rows."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _steps(part: Part, place: tuple[int, int]) -> tuple[int, int]:
    """Round a range of places up to whole steps of a part."""
    step, top = 1 << part.shift, part.no_place
    low, high = (min(max(0, -(-side // step)), top) for side in place)
    return low, max(low, high)


def add_rows(
    sums: Sums, part: Part, rows: tuple[int, int], place: tuple[int, int] | None = None
) -> None:
    """Add the rows that begin in a grid to its cells.

    Parameters
    ----------
    sums : Sums
        What they are added to.
    part : Part
        Rows of a table.
    rows : (int, int)
        First number and end, inside the window of the grid.
    place : (int, int), optional
        Only rows that begin here; by default those in the grid.
    """
    grid = sums.grid
    low, high = grid.place if place is None else place
    box = max(low, grid.place[0]), min(high, grid.place[1])
    edges = np.searchsorted(part.start, grid.column_edges)
    wanted = sums.colouring.wanted(part.table)
    for found in inside(part, rows, box, wanted):
        if length_of(found):
            _add(sums, part, found, _columns(found, edges))


@dataclass(frozen=True)
class Columns:
    """The columns that some rows lie in: ``first`` to ``end``, and of each row how many behind it."""

    first: int
    end: int
    number: NDArray[np.int64]


def _columns(rows: Rows, edges: NDArray[Any]) -> Columns:
    """Say in which column rows lie, from the row number at which each begins: no time is read."""
    one, last = (rows.start, rows.stop - 1) if isinstance(rows, slice) else (rows[0], rows[-1])
    first = int(np.searchsorted(edges, one, side="right")) - 1
    end = int(np.searchsorted(edges, last, side="right"))
    mine = edges[first : end + 1]
    if isinstance(rows, slice):
        counts = np.diff(np.clip(mine, rows.start, rows.stop))
    else:
        counts = np.diff(np.searchsorted(rows, mine))
    return Columns(first, end, np.repeat(np.arange(end - first), counts))


def _add(sums: Sums, part: Part, rows: Rows, at: Columns) -> None:
    by, columns = sums.colouring.by, (at.first, at.end)
    cells = sums.cells(columns)
    length = cells.stop - cells.start
    cell = at.number * sums.grid.rows
    cell += sums.grid.row_of(part.place[rows], part.shift)
    found = np.bincount(cell, minlength=length)
    sums.n[cells] += found
    holds = part.table == "migrations" and not sums.is_spread
    if by == "access" or (by == "cause" and holds):
        amount = part.amount.counted(rows)
        sums.value[:, cells] += sums.by_category(columns, cell, part.layer[rows], amount)
    elif holds:
        sums.size[cells] += np.bincount(cell, part.amount.counted(rows), length)
    if by == "latency":
        sums.known[cells] += _known(part.duration, rows, cell, found)
        sums.value[0, cells] += np.bincount(cell, part.duration.counted(rows), length)
    elif by != "density":
        sums.known[cells] += _known(part.amount, rows, cell, found)
        if not part.amount.is_positive:
            sums.count_categories(columns, cell, part.layer[rows])


def _known(
    figures: Compact, rows: Rows, cell: NDArray[np.int64], n: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Count by cell the rows of which a figure is known; ``n`` counts all."""
    if not figures.has_unknown:
        return n
    return np.bincount(cell[figures.known(rows)], minlength=len(n))


def spread_rows(sums: Sums, part: Part, rows: tuple[int, int]) -> None:
    """Add the bytes of copies to every cell that they reach over.

    Parameters
    ----------
    sums : Sums
        What they are added to.
    part : Part
        Migrations.
    rows : (int, int)
        First number and end, inside the window of the grid.

    Notes
    -----
    A copy gives its first and its last row what it has of them, and each row between its whole height:
    these are counted by where they begin and end, so that a copy over many rows costs no more.
    """
    grid = sums.grid
    reach = (grid.place[0] - part.longest + 1, grid.place[1])
    edges = np.searchsorted(part.start, grid.column_edges)
    for found in inside(part, rows, reach, sums.colouring.wanted(part.table)):
        if length_of(found):
            _spread(sums, part, found, _columns(found, edges))


def _spread(sums: Sums, part: Part, rows: Rows, at: Columns) -> None:
    grid, columns, edges = sums.grid, (at.first, at.end), sums.grid.row_edges
    first = part.place[rows].astype(np.int64) << part.shift
    start = np.maximum(first, grid.place[0])
    end = np.minimum(first + part.amount.counted(rows), grid.place[1])
    touch = np.flatnonzero(end > start)
    if not len(touch):
        return
    start, end, layer = start[touch], end[touch], part.layer[rows][touch]
    base = at.number[touch] * grid.rows
    low, high = grid.row_of(start, 0), grid.row_of(end - 1, 0)
    found = sums.by_category(columns, base + low, layer, np.minimum(end, edges[low + 1]) - start)
    long = np.flatnonzero(high > low)
    if len(long):
        base, low, high = base[long], low[long], high[long]
        end, layer = end[long], layer[long]
        found += sums.by_category(columns, base + high, layer, end - edges[high])
        covers = sums.by_category(columns, base + low + 1, layer, None)
        covers -= sums.by_category(columns, base + high, layer, None)
        each = covers.reshape(-1, grid.rows).cumsum(axis=1) * np.diff(edges)
        found += each.reshape(found.shape)
    if sums.colouring.by == "cause":
        sums.value[:, sums.cells(columns)] += found
    else:
        sums.size[sums.cells(columns)] += found.sum(axis=0)
