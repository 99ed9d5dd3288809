"""The lanes of bars: bytes moved by cause, and faults, in columns of time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import polars as pl

from nsan.analysis.views.keeping import int64
from nsan.analysis.views.tables import EVENT_TABLES
from nsan.charts.palette import CAUSES
from nsan.text import cause_word
from nsan.widgets.facts import FAULT_WORDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nsan.analysis.views.events import Events

_MOST_LAYERS: Final = 256


class Bars:
    """The lanes of bars of a capture; what it has none of has no lane.

    Parameters
    ----------
    layers : DataFrame
        Kinds of rows: ``layer``, ``table``, ``direction``, ``cause``.

    Attributes
    ----------
    lanes : list of dict
        ``id``, ``label``, ``category`` (a cause or None), ``unit``, from top to bottom.
    """

    def __init__(self, layers: pl.DataFrame) -> None:
        text = pl.col("table", "direction", "cause").cast(pl.String)
        self._kinds = {
            layer: (table, direction, cause)
            for layer, table, direction, cause in layers.select("layer", text).iter_rows()
        }
        causes = {cause for _, _, cause in self._kinds.values()}
        tables = {table for table, _, _ in self._kinds.values()}
        self.lanes: list[dict[str, Any]] = [
            {"id": f"cause-{cause}", "label": cause_word(cause), "category": cause, "unit": "byte"}
            for cause in CAUSES
            if cause in causes
        ]
        self.lanes += [
            {"id": table, "label": label, "category": None, "unit": "rows"}
            for table, label in FAULT_WORDS.items()
            if table in tables
        ]
        place = {lane["id"]: number for number, lane in enumerate(self.lanes)}
        self._lane = np.full(_MOST_LAYERS, -1)
        self._in_bytes = np.zeros(_MOST_LAYERS, dtype=bool)
        for layer, (table, _, cause) in self._kinds.items():
            # A migration whose cause the export does not name is of the cause "unknown" already.
            name = f"cause-{cause}" if table == "migrations" else table
            self._lane[layer] = place.get(name, -1)
            self._in_bytes[layer] = table == "migrations"

    def heights(self, strip: pl.DataFrame, n_columns: int) -> NDArray[np.int64]:
        """Add up the values of each lane and column.

        Parameters
        ----------
        strip : DataFrame
            ``column``, ``layer``, ``n``, ``bytes``, as the pyramid gives it.
        n_columns : int
            Columns of it.

        Returns
        -------
        array of Int64
            One row per lane: bytes of migrations, rows of faults. They add up to those of the strip.
        """
        found = np.zeros((len(self.lanes), n_columns), dtype=np.int64)
        layer = strip["layer"].to_numpy()
        lane, column = self._lane[layer], strip["column"].to_numpy()
        size, n = strip["bytes"].fill_null(0).to_numpy(), strip["n"].to_numpy()
        known = lane >= 0
        np.add.at(
            found,
            (lane[known], column[known]),
            np.where(self._in_bytes[layer], size, n)[known],
        )
        return found

    def sums(
        self, strip: pl.DataFrame, unsized: NDArray[np.int64]
    ) -> list[tuple[str, str | None, str | None, int, int, int]]:
        """Add up rows and bytes of each table, direction and cause.

        Parameters
        ----------
        strip : DataFrame
            As for :meth:`heights`.
        unsized : array of Int64
            Migrations of unknown size by layer, as :meth:`Unsized.within` gives them.

        Returns
        -------
        list of (table, direction, cause, rows, byte, rows of unknown size)
            Migrations first, the most bytes first.
        """
        layer = strip["layer"].to_numpy()
        totals: dict[tuple[str, str | None, str | None], list[int]] = {}
        n = np.zeros((2, _MOST_LAYERS), dtype=np.int64)
        np.add.at(n[0], layer, strip["n"].to_numpy())
        np.add.at(n[1], layer, strip["bytes"].fill_null(0).to_numpy())
        for number in np.flatnonzero(n[0]).tolist():
            total = totals.setdefault(self._kinds[number], [0, 0, 0])
            for place, each in enumerate((n[0], n[1], unsized)):
                total[place] += int(each[number])
        rows = [(*kind, total[0], total[1], total[2]) for kind, total in totals.items()]
        order = {table: place for place, table in enumerate(EVENT_TABLES)}
        return sorted(rows, key=lambda row: (order[row[0]], -row[4], str(row[2]), str(row[1])))


class Unsized:
    """Migrations of which the size is not known: they count 0 byte in a strip.

    Parameters
    ----------
    events : Events
        What is shown.
    """

    def __init__(self, events: Events) -> None:
        part = events.parts.get("migrations")
        self._start, self._layer = np.empty(0, np.int64), np.empty(0, np.uint8)
        if part is not None:
            rows = np.flatnonzero(~part.amount.known(slice(None)))
            self._start, self._layer = part.start[rows], part.layer[rows]

    @property
    def total(self) -> int:
        """How many there are."""
        return len(self._start)

    def within(self, window: tuple[int, int]) -> NDArray[np.int64]:
        """Count those that start in a half-open window, by layer.

        Parameters
        ----------
        window : (int, int)
            Time, ns.

        Returns
        -------
        array of 256 Int64
            Rows by layer.
        """
        low, high = np.searchsorted(self._start, [int64(side) for side in window])
        return np.bincount(self._layer[low : max(low, high)], minlength=_MOST_LAYERS)
