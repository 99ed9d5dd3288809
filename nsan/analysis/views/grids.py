"""A grid of time and place, and what its colours speak of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

import numpy as np
import polars as pl

from nsan.analysis.views.keeping import int64
from nsan.errors import UnknownNameError, UsageError
from nsan.uvm.constants import VA_BLOCK_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

By = Literal["cause", "access", "density", "latency"]
BYS: Final[tuple[str, ...]] = get_args(By)

UNITS: Final = {"cause": "byte", "access": "faults", "density": "rows", "latency": "ns"}
"""Unit of ``value`` by colouring."""

MOST_CELLS: Final = 1 << 16
"""Columns or rows of a grid at most: their numbers are UInt16."""

_DROPPED: Final = -1
_UNSAID: Final = "unknown"


@dataclass(frozen=True)
class Grid:
    """Columns of equal time and rows of equal length in the folded space.

    Attributes
    ----------
    window : (int, int)
        First and end, ns.
    place : (int, int)
        First and end, byte of the folded space.
    columns, rows : int
        How many there are.
    """

    window: tuple[int, int]
    place: tuple[int, int]
    columns: int
    rows: int

    @classmethod
    def checked(
        cls, window: tuple[int, int], place: tuple[int, int], shape: tuple[int, int]
    ) -> Grid:
        """Make a grid of what a caller asks for; refuse one that cannot be."""
        columns, rows = shape
        if not (0 < columns <= MOST_CELLS and 0 < rows <= MOST_CELLS):
            msg = f"shape={shape!r}: a grid has 1 to {MOST_CELLS} columns and rows."
            raise UsageError(msg)
        low, high = (int64(side) for side in window)
        bottom, top = (int64(side) for side in place)
        return cls((low, max(low, high)), (bottom, max(bottom, top)), int(columns), int(rows))

    @property
    def is_empty(self) -> bool:
        """It spans no time or no place."""
        return self.window[0] == self.window[1] or self.place[0] == self.place[1]

    @property
    def height(self) -> int:
        """Length of all rows together, byte."""
        return self.place[1] - self.place[0]

    @property
    def is_fine(self) -> bool:
        """A row is smaller than a VA block, so that one copy may reach over several rows."""
        return self.height < self.rows * VA_BLOCK_BYTES

    def on_blocks(self) -> Grid:
        """Give the grid around this one that has a row for each VA block."""
        low = self.place[0] // VA_BLOCK_BYTES
        high = max(low + 1, -(-self.place[1] // VA_BLOCK_BYTES))
        place = (low * VA_BLOCK_BYTES, high * VA_BLOCK_BYTES)
        return Grid(self.window, place, self.columns, min(self.rows, high - low))

    @cached_property
    def column_edges(self) -> NDArray[np.int64]:
        """Where columns begin, and the last one ends, ns; whole numbers, rounded up."""
        return _edges(self.window, self.columns)

    @cached_property
    def row_edges(self) -> NDArray[np.int64]:
        """Where rows begin, and the last one ends, byte; whole numbers, rounded up."""
        return _edges(self.place, self.rows)

    def row_of(self, place: NDArray[Any], shift: int) -> NDArray[np.int64]:
        """Say in which row places inside the grid lie.

        Parameters
        ----------
        place : array of UInt32 or Int64
            Places, in steps of ``1 << shift`` byte.
        shift : int
            As :attr:`nsan.analysis.views.events.Part.shift`.

        Returns
        -------
        array of Int64
            Rows, from 0.
        """
        low, height, step = self.place[0], self.height, 1 << shift
        on_steps = low >= 0 and low % step == 0 and height % step == 0
        if on_steps and place.dtype == np.uint32 and (height >> shift) * self.rows < 1 << 32:
            # Four bytes are divided four times as fast as eight.
            offset = place - np.uint32(low >> shift)
            return (offset * np.uint32(self.rows) // np.uint32(height >> shift)).astype(np.int64)
        offset64 = (place.astype(np.int64) << shift) - low
        if height <= (1 << 62) // self.rows:
            return (offset64.view(np.uint64) * np.uint64(self.rows) // np.uint64(height)).view(
                np.int64
            )
        return np.searchsorted(self.row_edges, offset64 + low, side="right") - 1


def _edges(span: tuple[int, int], n: int) -> NDArray[np.int64]:
    low, length = span[0], span[1] - span[0]
    return np.array([low - (-length * step // n) for step in range(n + 1)], np.int64)


@dataclass(frozen=True)
class Colouring:
    """What the colour of a cell says.

    Attributes
    ----------
    by : str
        ``cause``: bytes migrated; ``access``: recorded page faults of GPU fault rows; ``density``:
        rows; ``latency``: mean time from raised to replayed of GPU fault rows, or of a copy where the
        capture has no fault rows.
    categories : tuple of str
        Names of the categories; one nameless where the colour is a number.
    numbers : array of Int16
        Category by layer; -1 where the colouring does not speak of the layer.
    tables : tuple of str
        Tables of these layers.
    whole : tuple of str
        Tables of which it speaks of every layer.
    """

    by: By
    categories: tuple[str | None, ...]
    numbers: NDArray[np.int16]
    tables: tuple[str, ...]
    whole: tuple[str, ...]

    @classmethod
    def of(cls, by: str, layers: pl.DataFrame, chosen: Collection[int] | None) -> Colouring:
        """Make the colouring of a name for the layers of a capture, or some of them.

        Parameters
        ----------
        by : str
            One of :data:`BYS`.
        layers : DataFrame, ``LAYERS``
            Layers of the capture.
        chosen : collection of int, optional
            Layers to draw; all by default.

        Returns
        -------
        Colouring
            What to add up.

        Raises
        ------
        UsageError
            If there is no such colouring.
        """
        if by not in BYS:
            raise UnknownNameError("colouring", by, BYS)
        spoken = layers.filter(_speaks_of(by, layers))
        if chosen is not None:
            spoken = spoken.filter(pl.col("layer").is_in([int(layer) for layer in chosen]))
        names: list[str | None] = [None] * spoken.height
        if by in {"cause", "access"}:
            names = list(spoken[by].cast(pl.String).fill_null(_UNSAID))
        categories = tuple(dict.fromkeys(names))
        numbers = np.full(256, _DROPPED, np.int16)
        for layer, name in zip(spoken["layer"], names, strict=True):
            numbers[layer] = categories.index(name)
        tables = [str(table) for table in spoken["table"].unique(maintain_order=True)]
        left = layers.filter(~pl.col("layer").is_in(spoken["layer"].to_list()))["table"].to_list()
        whole = tuple(table for table in tables if table not in left)
        return cls(cast("By", by), categories or (None,), numbers, tuple(tables), whole)

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers it speaks of."""
        return np.flatnonzero(self.numbers != _DROPPED).tolist()

    def wanted(self, table: str) -> NDArray[np.bool_] | None:
        """Give a flag by layer, or None where it speaks of every row of a table."""
        return None if table in self.whole else self.numbers != _DROPPED


def _speaks_of(by: str, layers: pl.DataFrame) -> pl.Expr:
    table = pl.col("table")
    if by == "density":
        return pl.lit(value=True)
    if by == "cause":
        return table == "migrations"
    if by == "access":
        return table == "gpu_faults"
    return table == ("gpu_faults" if "gpu_faults" in layers["table"] else "migrations")
