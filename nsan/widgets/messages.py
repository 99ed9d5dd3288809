"""Messages to the browser: the cells, marks and lanes of a view as JSON and small buffers.

Whatever the size of a trace, a message is what a screen can show: at most ``MOST_COLUMNS`` by
``MOST_ROWS`` cells of two bytes, and lanes that are thinned until the whole stays below
``MAX_MESSAGE_BYTES``. Pure functions: frames in, plain containers out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import polars as pl

from nsan.charts.palette import CAUSES
from nsan.text import cause_word, direction_word, shortened

MAX_MESSAGE_BYTES: Final = 300_000
"""A message with its buffers is smaller than this, always."""

MOST_COLUMNS: Final = 480
MOST_ROWS: Final = 220
MOST_MARKS: Final = 1500
"""Single rows that are sent as marks instead of a raster."""

MOST_ITEMS: Final = 300
"""Intervals of one lane, before the message is measured."""

NAME_LENGTH: Final = 80

_LEVELS: Final = 255
_DECADES: Final = 1e3

Message = dict[str, Any]
Buffers = list[bytes]


@dataclass(frozen=True)
class Scale:
    """A logarithmic scale of colour: ``low`` is level 1 and ``high`` is level 255."""

    low: float
    high: float

    def levels(self, values: np.ndarray) -> np.ndarray:
        """Give each value its level.

        Parameters
        ----------
        values : ndarray of float
            Values; what is not above 0 has level 0.

        Returns
        -------
        ndarray of uint8
            From 1 to 255; values outside the scale take its ends.
        """
        shown = values > 0
        span = math.log(self.high / self.low) if self.high > self.low else 0.0
        if not span:
            return np.where(shown, _LEVELS, 0).astype(np.uint8)
        share = np.log(np.where(shown, values, self.high) / self.low) / span
        level = 1 + np.rint((_LEVELS - 1) * share.clip(0, 1))
        return np.where(shown, level, 0).astype(np.uint8)


def scale_of(values: pl.Series, high: float | None = None) -> Scale:
    """Choose the scale of some values.

    Parameters
    ----------
    values : Series of float
        Values of cells; null and 0 are not shown.
    high : float, optional
        Top of the scale, where another view shares it.

    Returns
    -------
    Scale
        At least three powers of ten, so that small differences do not look large.
    """
    shown = values.filter(values > 0)
    top = max(float(shown.max() or 0.0), high or 0.0)  # type: ignore[arg-type]
    low = min(float(shown.min() or top), top / _DECADES)  # type: ignore[arg-type]
    return Scale(low, top) if top > 0 else Scale(1.0, 1.0)


@dataclass
class Names:
    """The names of a message, each once, harmless and short."""

    texts: list[str] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)

    def place(self, name: str | None) -> int:
        """Return the index of a name, -1 for none; a new one is added."""
        if name is None:
            return -1
        text = shortened(name, NAME_LENGTH)
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]


def raster(
    cells: pl.DataFrame,
    shape: tuple[int, int],
    categories: Sequence[str],
    *,
    high: float | None = None,
    other: str = "not known",
) -> tuple[Message, Buffers]:
    """Pack the cells of a map.

    Parameters
    ----------
    cells : DataFrame
        ``column``, ``row``, ``category`` (text or null), ``value`` and ``n``; one row per cell with anything
        in it, as :meth:`nsan.analysis.views.pyramid.Pyramid.cells` gives them.
    shape : (int, int)
        Columns and rows of the map.
    categories : sequence of str
        Categories by number; a category that is not listed, or null, counts as the first of none.
    high : float, optional
        Top of the scale, where another view shares it.
    other : str
        What a cell is called whose value is not known.

    Returns
    -------
    dict, list of bytes
        A cell that holds rows has level 1 at least: one of unknown value has it, and category 0 where
        there are categories. The head (mode, columns, rows, min, max, encoding, n), and the buffers: dense
        ``[category u8, level u8]`` or sparse ``[index u32, category u8, level u8]`` (little endian),
        whichever is smaller. Index is row x columns + column; category is its number and 1.
    """
    columns, rows = shape
    value = cells["value"].cast(pl.Float64)
    scale = scale_of(value, high)
    order = {name: number + 1 for number, name in enumerate(categories)}
    category = (
        cells["category"]
        .cast(pl.String)
        .replace_strict(order, default=1, return_dtype=pl.UInt8)
        .fill_null(1)
        .to_numpy()
    )
    index = cells["row"].cast(pl.UInt32) * columns + cells["column"].cast(pl.UInt32)
    n = cells["n"].fill_null(0).to_numpy()
    # A cell with rows is never empty, whatever their value; one that a copy only reaches over may be.
    level = np.maximum(scale.levels(value.fill_null(0).to_numpy()), n > 0).astype(np.uint8)
    shown = level > 0
    unknown = value.is_null().to_numpy() & shown
    if categories:
        category = np.where(unknown, 0, category).astype(np.uint8)
    places, category, level = index.to_numpy()[shown], category[shown], level[shown]
    head = {
        "mode": "raster",
        "columns": columns,
        "rows": rows,
        "min": scale.low,
        "max": scale.high,
        "n": len(places),
        **({"other": other} if unknown.any() else {}),
    }
    if 6 * len(places) < 2 * columns * rows:
        ordered = np.argsort(places)
        buffers = [places[ordered].astype("<u4"), category[ordered], level[ordered]]
        return {**head, "encoding": "sparse"}, [each.tobytes() for each in buffers]
    planes = np.zeros((2, columns * rows), dtype=np.uint8)
    planes[0, places], planes[1, places] = category, level
    return {**head, "encoding": "dense"}, [plane.tobytes() for plane in planes]


def coloured(rows: pl.DataFrame, by: str) -> pl.DataFrame:
    """Give single rows what the colour of the map says of them.

    Parameters
    ----------
    rows : DataFrame
        Rows as :meth:`nsan.analysis.views.pyramid.Pyramid.marks` gives them.
    by : str
        What the colour says.

    Returns
    -------
    DataFrame
        The rows with ``category``, ``value`` and ``what``, for :func:`marks`; a null end is the start.
    """
    length = pl.col("end_ns") - pl.col("start_ns")
    values: Mapping[str, pl.Expr] = {
        "cause": pl.col("bytes"),
        "access": pl.col("n_page_faults"),
        "density": pl.lit(1),
        "latency": length,
    }
    category = pl.col(by).cast(pl.String) if by in {"cause", "access"} else pl.lit(None, pl.String)
    words = [cause_word(cause) for cause in CAUSES]
    directions = ["htod", "dtoh", "dtod"]
    moved = (
        pl.col("direction")
        .cast(pl.String)
        .replace_strict(directions, [direction_word(each) for each in directions], default="")
        + " "
        + pl.col("cause").cast(pl.String).replace_strict([*CAUSES], words, default="unknown")
    )
    what = (
        pl.when(pl.col("table") == "migrations")
        .then(moved)
        .when(pl.col("table") == "gpu_faults")
        .then(pl.lit("GPU fault row, ") + pl.col("access").cast(pl.String).fill_null("unknown"))
        .otherwise(pl.lit("CPU page fault"))
    )
    return rows.with_columns(
        pl.col("end_ns").fill_null(pl.col("start_ns")),
        category=category,
        value=values[by].cast(pl.Float64),
        what=what,
    )


def marks(
    rows: pl.DataFrame, by: str, categories: Sequence[str], origin_ns: int, *, high: float | None
) -> Message:
    """Pack single rows of a map.

    Parameters
    ----------
    rows : DataFrame
        ``start_ns``, ``end_ns``, ``place_start``, ``place_end``, ``category``, ``value`` and
        ``what`` (text: what one row is).
    by : str
        What the colour says.
    categories : sequence of str
        Categories by number.
    origin_ns : int
        Times are sent from here.
    high : float or None
        Top of the scale, where another view shares it.

    Returns
    -------
    dict
        ``marks``: [t0, t1, y0, y1, category or -1, value or null, kind] each, and ``kinds``.
    """
    order = {name: number for number, name in enumerate(categories)}
    scale = scale_of(rows["value"].cast(pl.Float64), high)
    kinds = rows["what"].unique(maintain_order=True).to_list()
    number = {what: place for place, what in enumerate(kinds)}
    packed = [
        [
            start - origin_ns,
            end - origin_ns,
            low,
            top,
            order.get(category, -1),
            None if value is None else round(value, 3),
            number[what],
        ]
        for start, end, low, top, category, value, what in rows.select(
            *("start_ns", "end_ns", "place_start", "place_end", "category", "value", "what")
        ).iter_rows()
    ]
    return {
        "mode": "marks",
        "by": by,
        "marks": packed,
        "kinds": [shortened(what) for what in kinds],
        "min": scale.low,
        "max": scale.high,
        "n": len(packed),
    }


def intervals(found: pl.DataFrame, names: Names, origin_ns: int) -> list[list[int]]:
    """Pack the intervals of a lane.

    Parameters
    ----------
    found : DataFrame
        ``start_ns``, ``end_ns``, ``name``, ``id`` and ``n``, as a lane's ``within`` gives them.
    names : Names
        Gets the names.
    origin_ns : int
        Times are sent from here.

    Returns
    -------
    list of [t0, t1, name, n, id]
        The id is -1 where a run stands for several intervals.
    """
    return [
        [start - origin_ns, end - origin_ns, names.place(name), n, -1 if number is None else number]
        for start, end, name, number, n in found.select(
            "start_ns", "end_ns", "name", "id", "n"
        ).iter_rows()
    ]


def size_of(message: Mapping[str, Any], buffers: Sequence[bytes] = ()) -> int:
    """Measure a message as the browser gets it, in bytes."""
    text = json.dumps(message, separators=(",", ":"), allow_nan=False)
    return len(text.encode()) + sum(map(len, buffers))


def fitted(build: Callable[[int], tuple[Message, Buffers]]) -> tuple[Message, Buffers]:
    """Build a message with as many intervals in each lane as fit.

    Parameters
    ----------
    build : callable
        Builds the message with at most so many intervals in each lane.

    Returns
    -------
    dict, list of bytes
        The message, below ``MAX_MESSAGE_BYTES``.
    """
    most = MOST_ITEMS
    while True:
        message, buffers = build(most)
        # The envelope of the Jupyter protocol takes some bytes too.
        if size_of(message, buffers) < MAX_MESSAGE_BYTES - 4096 or most <= 1:
            return message, buffers
        most //= 2
