"""What an explorer shows: the events of a trace, the part that filters keep, and the lanes above the map.

A scene knows no browser. It turns a window of time and a stretch of the map into a message, and
answers which rows lie where.
"""

from __future__ import annotations

import threading
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import polars as pl

from nsan.analysis.views.events import Events, view_events
from nsan.analysis.views.grids import UNITS
from nsan.analysis.views.pyramid import Pyramid
from nsan.analysis.views.tables import EVENT_TABLES
from nsan.charts.palette import ACCESSES, CAUSES
from nsan.memory_budget import check_tables
from nsan.schema import TABLES
from nsan.text import cause_word, direction_word
from nsan.units import counted, format_time
from nsan.widgets import messages
from nsan.widgets.choice import Choice, running_of
from nsan.widgets.facts import FAULT_WORDS, Fact, kind_of, size_words, unanswered
from nsan.widgets.filters import (
    Filters,
    Options,
    checked,
    layers_of,
    options_of,
    owners_of,
    windows_of,
)
from nsan.widgets.lanes import Intervals, LaneOf
from nsan.widgets.refaulted import kept_refaults
from nsan.widgets.strips import Bars, Unsized

if TYPE_CHECKING:
    from nsan.trace import Trace

Span = tuple[int, int]

BYS: Final = UNITS
"""What the colour of the map can say, with the unit of its value."""

CATEGORIES: Final = {"cause": [*CAUSES], "access": [*ACCESSES], "density": [], "latency": []}
"""Categories by number, for each way to colour."""

_UNKNOWN: Final = {"cause": "size", "access": "count", "density": "number", "latency": "time"}
"""What may not be known of a row, for each way to colour."""

OVERVIEW_COLUMNS: Final = 480
OVERVIEW_SHAPE: Final = (480, 220)
_MANY_ROWS: Final = 500_000
_HELD: Final = (*EVENT_TABLES, "kernels", "nvtx_ranges")
_BYTES_PER_ROW: Final = 200
"""Of memory, measured: rows by place and time with the pyramid above them, of all and of what filters keep."""


class Scene:
    """The events of a trace and what of them is shown.

    Parameters
    ----------
    trace : Trace
        The trace.

    Raises
    ------
    OverBudgetError
        If its events need more memory than may be used.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        tables = {name: getattr(trace, name) for name in TABLES}
        check_tables("The explorer", [tables[name] for name in _HELD], _BYTES_PER_ROW)
        self.all_events: Events = view_events(tables)
        self.intervals = Intervals(trace, self.all_events)
        self.events = self.all_events
        self.pyramid = Pyramid(self.events)
        self._unsized = Unsized(self.events)
        self.layers: list[int] | None = None
        self._refaults: pl.DataFrame | None = None
        self._spoken: dict[str, list[int]] = {}
        # What is added up for one view is kept for the next: not twice at a time.
        self._lock = threading.Lock()
        self.filters: Filters = checked({}, self.options)
        self.lanes = self.intervals.lanes(self.filters, self.options)

    @cached_property
    def options(self) -> Options:
        """What the filters can choose from."""
        events = self.all_events
        return options_of(self.trace, events.layers, events.owners, self.intervals.named)

    @property
    def short_trace(self) -> Trace:
        """The trace for analyses that run in the background: very long names of kernels are labels."""
        return self.intervals.short_trace(self.options.labels["kernel"])

    @cached_property
    def extent(self) -> Span:
        """Time that the views cover, ns: events, kernels and ranges; of a part, its windows."""
        trace, tables = self.trace, ["kernels", "nvtx_ranges"]
        known = [self.all_events.extent] if self.all_events.n_rows else []
        windows = trace.windows
        if windows and trace.unwindowed is not None:
            # A window may begin before the capture does, or be open.
            trace, tables = trace.unwindowed, [*tables, *EVENT_TABLES]
        for name in tables:
            columns = [c for c in ("start_ns", "end_ns") if c in TABLES[name].schema]
            # What begins at the very end, and takes no time, is in it too.
            sides = (
                pl.min_horizontal(pl.col(columns).min()),
                pl.max_horizontal(pl.col(columns).max(), pl.col("start_ns").max() + 1),
            )
            span = getattr(trace, name).select(start=sides[0], end=sides[1]).collect().row(0)
            known += [span] if None not in span else []
        if not known:
            return 0, 1
        start, end = min(a for a, _ in known), max(b for _, b in known)
        if windows:
            start = min(max(start, windows[0][0]), end)
            end = max(min(end, windows[-1][1]), start)
        return int(start), int(max(end, start + 1))

    @property
    def origin_ns(self) -> int:
        """Times are sent to the browser from here, ns from the session start."""
        return self.extent[0]

    @property
    def places(self) -> Span:
        """The whole map, in bytes of folded addresses."""
        return 0, max(self.all_events.addresses.total_bytes, 1)

    def place_of(self, pid: int | None, va: int, size: int) -> Span | None:
        """Find the stretch of the map that a range of addresses has.

        Parameters
        ----------
        pid : int or None
            Its process.
        va, size : int
            First byte and bytes.

        Returns
        -------
        (int, int) or None
            First byte and first behind, folded; None where no event uses either end.
        """
        import numpy as np

        ends = np.array([va, va + max(size, 1) - 1], dtype=np.uint64)
        found = self.all_events.addresses.places(pid, ends)
        return (int(found[0]), int(found[1]) + 1) if (found >= 0).all() else None

    def set_filters(self, filters: Filters) -> None:
        """Show what some filters keep.

        Parameters
        ----------
        filters : dict
            As :func:`nsan.widgets.filters.checked` gives them.
        """
        events, choice = self.all_events, self._choice(filters)
        same = ("pid", "device", "kernel", "nvtx", "allocation")
        if any(filters[key] != self.filters[key] for key in same):
            self.events = choice.kept(events)
            self.pyramid = Pyramid(self.events)
            self._unsized = Unsized(self.events)
        self.layers = layers_of(events.layers, filters)
        self.filters = filters
        self.lanes = self.intervals.lanes(self.filters, self.options, choice, self.layers)

    def _choice(self, filters: Filters) -> Choice:
        """Say which rows some filters keep."""
        owners, running, windows, pids = self.all_events.owners, None, None, None
        if filters["kernel"] is not None:
            running = running_of(self.intervals.chosen("kernel", filters["kernel"]), owners)
        if filters["nvtx"] is not None:
            ranges = self.intervals.chosen("nvtx", filters["nvtx"])
            windows, pids = windows_of(ranges), ranges["pid"].unique()
        return Choice(owners_of(owners, filters, pids), running, windows, self._held(filters))

    @property
    def refaults(self) -> pl.DataFrame | None:
        """What was evicted and came back, of what the filters keep; None where nobody can tell (yet)."""
        return kept_refaults(self._refaults, self.filters)

    @refaults.setter
    def refaults(self, found: pl.DataFrame | None) -> None:
        self._refaults = found

    def _held(self, filters: Filters) -> pl.DataFrame | None:
        """Find the stretches of the map and the lives of the chosen allocations."""
        if filters["allocation"] is None:
            return None
        rows = []
        for row in self.options.chosen("allocation", filters["allocation"]):
            place = self.place_of(row["pid"], row["va"], row["bytes"])
            if place is not None:
                rows.append((*place, row["alloc_ns"], row["free_ns"]))
        names = ("place_start", "place_end", "alloc_ns", "free_ns")
        return pl.DataFrame(rows, schema=dict.fromkeys(names, pl.Int64), orient="row")

    @cached_property
    def bars(self) -> Bars:
        """The lanes of bars."""
        return Bars(self.all_events.layers)

    def lane_config(self) -> list[dict[str, Any]]:
        """Describe the lanes for the browser, from top to bottom."""
        found: list[dict[str, Any]] = [
            {"id": each.id, "label": each.label, "kind": "intervals", "pick": each.pick}
            for each in self.lanes
        ]
        for bar in self.bars.lanes:
            scope = "causes" if bar["category"] else bar["id"]
            found.append({**bar, "kind": "bars", "pick": None, "scope": scope})
        return found

    def strip(self, window: Span, n_columns: int) -> pl.DataFrame:
        """Add up rows and bytes in columns of time, with what the filters keep.

        Parameters
        ----------
        window : (int, int)
            Time, ns.
        n_columns : int
            Columns of equal width.

        Returns
        -------
        DataFrame
            ``column``, ``layer``, ``n``, ``bytes``, ``n_page_faults``. Parts add up to the rows that
            start in the window.
        """
        with self._lock:
            return self.pyramid.strip(window, n_columns=n_columns, layers=self.layers)

    def overview(self, strip: pl.DataFrame) -> dict[str, Any]:
        """Write the strip above the lanes.

        Parameters
        ----------
        strip : DataFrame
            The whole extent in ``OVERVIEW_COLUMNS`` columns.

        Returns
        -------
        dict
            Plain containers for the browser.
        """
        heights = self.bars.heights(strip, OVERVIEW_COLUMNS)
        lanes = self.bars.lanes
        moved = np.array([lane["category"] is not None for lane in lanes], dtype=bool)
        faults = {name: self._fault_columns(name, heights) for name in FAULT_WORDS}
        # The strip has room for one of them; they are never added up.
        shown = "gpu_faults" if faults["gpu_faults"] or not faults["cpu_faults"] else "cpu_faults"
        return {
            "columns": OVERVIEW_COLUMNS,
            "stacks": [
                {"category": lane["category"], "values": values}
                for lane, values in zip(lanes, heights.tolist(), strict=True)
                if lane["category"] is not None
            ],
            "faults": faults[shown],
            "fault_label": FAULT_WORDS[shown],
            "cpu_faults": faults["cpu_faults"],
            "max": int(heights[moved].sum(axis=0).max(initial=0)),
            "max_faults": max(faults[shown] or [0]),
            "max_cpu_faults": max(faults["cpu_faults"] or [0]),
        }

    def _fault_columns(self, table: str, heights: Any) -> list[int] | None:
        """Give the rows of a fault table by column; None where it was not recorded."""
        for lane, values in zip(self.bars.lanes, heights.tolist(), strict=True):
            if lane["id"] == table:
                return list(values)
        return None if unanswered(self.trace, table) else [0] * OVERVIEW_COLUMNS

    def view(
        self,
        window: Span,
        place: Span,
        by: str,
        shape: tuple[int, int],
        *,
        high: float | None = None,
    ) -> tuple[messages.Message, messages.Buffers]:
        """Build the message that shows a part of the trace.

        Parameters
        ----------
        window : (int, int)
            Time, ns from the session start.
        place : (int, int)
            Stretch of the map, folded bytes.
        by : str
            What the colour says; a key of ``BYS``.
        shape : (int, int)
            Columns and rows of the map.
        high : float, optional
            Top of the colour scale, where another view shares it.

        Returns
        -------
        dict, list of bytes
            The message without ``view`` and ``id``, and its buffers.
        """
        began = time.perf_counter()
        head, buffers = self._map(window, place, by, shape, high)
        strip = self.strip(window, shape[0])
        facts = self.facts(window, strip)
        bars = self._bars(strip, shape[0])

        def build(most: int) -> tuple[messages.Message, messages.Buffers]:
            names = messages.Names()
            lanes = [
                {"id": each.id, "items": self._items(each, window, shape[0], most, names)}
                for each in self.lanes
            ]
            return {
                "kind": "view",
                "window": [side - self.origin_ns for side in window],
                "place": list(place),
                "by": by,
                "unit": BYS[by],
                "map": head,
                "lanes": [*lanes, *bars],
                "names": names.texts,
                "facts": facts,
                "took_ms": round((time.perf_counter() - began) * 1e3, 1),
            }, buffers

        return messages.fitted(build)

    def _items(
        self, each: LaneOf, window: Span, n_columns: int, most: int, names: messages.Names
    ) -> list[list[int]]:
        found = each.within(window, n_columns=n_columns, most=most)
        return messages.intervals(found, names, self.origin_ns)

    def _map(
        self, window: Span, place: Span, by: str, shape: tuple[int, int], high: float | None
    ) -> tuple[messages.Message, messages.Buffers]:
        # Rows one by one, or cells: either way of what the colour speaks of, and nothing else.
        if by not in self._spoken:
            self._spoken[by] = self.pyramid.layers_of(by)  # type: ignore[arg-type]
        spoken = self._spoken[by]
        if self.layers is not None:
            spoken = [layer for layer in spoken if layer in self.layers]
        with self._lock:
            rows = self.pyramid.marks(window, place, layers=spoken, most=messages.MOST_MARKS)
        if rows is not None:
            head = messages.marks(
                messages.coloured(rows, by), by, CATEGORIES[by], self.origin_ns, high=high
            )
            return {**head, **self._why_empty(by, head["n"])}, []
        asked = (window, place)
        with self._lock:
            window, place, shape = self.pyramid.fitted(
                window,
                place,
                shape=shape,
                by=by,  # type: ignore[arg-type]
                layers=spoken,
            )
            cells = self.pyramid.cells(window, place, shape=shape, by=by, layers=spoken)  # type: ignore[arg-type]
        other = f"{_UNKNOWN[by]} unknown"
        head, buffers = messages.raster(cells, shape, CATEGORIES[by], high=high, other=other)
        if (window, place) != asked:
            head["window"] = [side - self.origin_ns for side in window]
            head["place"] = list(place)
        return head, buffers

    def warm(self) -> None:
        """Add up what zooms will need, so that nobody waits for it; costs nothing for a small trace."""
        if self.all_events.n_rows < _MANY_ROWS:
            return
        self.pyramid.warm()

    def _why_empty(self, by: str, n: int) -> dict[str, str]:
        """Say why a map is empty, where the capture is the reason."""
        if n or by not in {"cause", "access"}:
            return {}
        table, label = {
            "cause": ("migrations", "migrations"),
            "access": ("gpu_faults", "GPU fault rows"),
        }[by]
        word = unanswered(self.trace, table)
        return {"empty": f"{label}: {word}"} if word else {}

    def top(self, window: Span, place: Span, by: str, shape: tuple[int, int]) -> float:
        """Find the largest value that a view of this part would show, for a scale in common."""
        head, _ = self._map(window, place, by, shape, None)
        return float(head["max"])

    def _bars(self, strip: pl.DataFrame, n_columns: int) -> list[dict[str, Any]]:
        heights = self.bars.heights(strip, n_columns)
        return [
            {"id": bar["id"], "values": values, "max": max(values), "unit": bar["unit"]}
            for bar, values in zip(self.bars.lanes, heights.tolist(), strict=True)
        ]

    def facts(self, window: Span, strip: pl.DataFrame) -> list[Fact]:
        """Say in a few facts what starts in a window.

        Parameters
        ----------
        window : (int, int)
            Time, ns.
        strip : DataFrame
            The window in any number of columns.

        Returns
        -------
        list of [label, text, kind]
            What moved by direction and cause, and faults, with what the filters keep; what was not
            recorded says so.
        """
        kind = kind_of(self.trace)
        made = kind_of(self.trace, "derived")
        found = [["window", format_time(window[1] - window[0]), made]]
        unsized = self._unsized.within(window)
        for table, direction, cause, n, size, n_unknown in self.bars.sums(strip, unsized):
            if table == "migrations":
                label = f"{direction_word(direction or '-')}, {cause_word(cause or 'unknown')}"
                found.append([label, size_words(size, n, n_unknown), kind])
            else:
                found.append([FAULT_WORDS[table], counted(n, "row"), kind])
        for table, label in (*FAULT_WORDS.items(), ("migrations", "migrations")):
            word = unanswered(self.trace, table)
            if word:
                found.append([label, word, ""])
        return found
