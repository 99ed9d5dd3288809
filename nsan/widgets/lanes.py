"""The lanes above the map: kernels of each GPU, NVTX ranges by depth, driver batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import polars as pl

from nsan.analysis.views.keeping import int64, with_numbers
from nsan.analysis.views.lanes import Lane
from nsan.units import counted
from nsan.widgets.names import numbered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nsan.analysis.views.events import Events, Part
    from nsan.trace import Trace
    from nsan.widgets.choice import Choice
    from nsan.widgets.filters import Filters, Options

MOST_NVTX_LANES: Final = 4
MOST_GPU_LANES: Final = 8

LONG_NAME: Final = 500
"""Bytes of a name beyond which analyses get its label instead."""

MOST_NAMED: Final = 20_000
"""Intervals in a window up to which the busiest name of each column is looked for."""


@dataclass(frozen=True, eq=False)
class Spans:
    """Very many intervals of one lane, by start, as plain columns.

    A lane of millions of intervals is put together by where columns of time begin in it, which costs
    next to nothing, instead of by grouping its rows.

    Attributes
    ----------
    start, end : array of Int64
        Times, ns; ordered by start.
    id : array of Int64, or None
        What a pick names; None: the place of each.
    """

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    id: NDArray[np.int64] | None = None

    @cached_property
    def longest(self) -> int:
        """Length of the longest one, ns."""
        return int((self.end - self.start).max()) if len(self.start) else 0

    def within(self, window: tuple[int, int], *, n_columns: int, most: int) -> pl.DataFrame:
        """Give what the lane shows of a window.

        Parameters
        ----------
        window : (int, int)
            Half-open, ns.
        n_columns : int
            Columns that the lane is drawn in.
        most : int
            Rows at most; columns become wider until it holds.

        Returns
        -------
        DataFrame
            ``start_ns``, ``end_ns``, ``name`` (null), ``id`` (null where a row stands for several), ``n``:
            intervals that touch the window, those that begin in one column put together. ``n`` adds up
            to their number.
        """
        sides = [int64(side) for side in (window[0] - self.longest, *window)]
        reach, low, high = np.searchsorted(self.start, np.array(sides, np.int64))
        before = np.flatnonzero(self.end[reach:low] > window[0]) + reach
        n_inside = max(0, int(high - low))
        if len(before) + n_inside <= most:
            return self._single(np.append(before, np.arange(low, low + n_inside)))
        columns = max(1, min(n_columns, most - 1))
        length = window[1] - window[0]
        # Steps times length may be too much for 64 bits.
        edges = np.array([window[0] + step * length // columns for step in range(columns)])
        inside = slice(low, low + n_inside)
        first = np.unique(np.searchsorted(self.start[inside], edges))
        first = first[first < n_inside]
        start, n = self.start[inside][first], np.diff(np.append(first, n_inside))
        end = np.maximum.reduceat(self.end[inside], first) if len(first) else start
        found = _frame(start, end, self._ids(first + low), n)
        if not len(before):
            return found
        # What began before the window is one row more.
        ends = self.end[before]
        earlier = (self.start[before[:1]], ends.max(keepdims=True), self._ids(before[:1]))
        return pl.concat([_frame(*earlier, np.array([len(before)])), found])

    def _ids(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return rows if self.id is None else self.id[rows]

    def _single(self, rows: NDArray[np.int64]) -> pl.DataFrame:
        return _frame(
            self.start[rows], self.end[rows], self._ids(rows), np.ones(len(rows), dtype=np.int64)
        )


def _frame(start: Any, end: Any, number: Any, n: Any) -> pl.DataFrame:
    found = pl.DataFrame({"start_ns": start, "end_ns": end, "id": number, "n": n})
    alone = pl.when(pl.col("n") == 1).then("id")
    return found.select(
        *("start_ns", "end_ns"), name=pl.lit(None, pl.String), id=alone, n=pl.col("n")
    )


@dataclass(frozen=True, eq=False)
class LaneOf:
    """A lane of intervals: how the browser knows it, and what it holds.

    Attributes
    ----------
    id, label : str
        For the browser and for people.
    pick : str
        What a click on one of its intervals picks.
    lane : Lane or None
        Its intervals with their names.
    spans : Spans or None
        The same as plain columns: for windows with very many of them, or where they have no names.
    """

    id: str
    label: str
    pick: str
    lane: Lane | None
    spans: Spans | None = None

    def within(self, window: tuple[int, int], *, n_columns: int, most: int) -> pl.DataFrame:
        """Give what the lane shows of a window; see :meth:`Spans.within`.

        Parameters
        ----------
        window : (int, int)
            Half-open, ns.
        n_columns : int
            Columns that the lane is drawn in.
        most : int
            Rows at most.

        Returns
        -------
        DataFrame
            ``start_ns``, ``end_ns``, ``name``, ``id``, ``n``.
        """
        if self.spans is not None and (self.lane is None or self._is_full(window)):
            return self.spans.within(window, n_columns=n_columns, most=most)
        assert self.lane is not None  # noqa: S101  one of the two is there
        return self.lane.within(window, n_columns=n_columns, most=most)

    def _is_full(self, window: tuple[int, int]) -> bool:
        if self.spans is None:
            return False
        low, high = np.searchsorted(self.spans.start, window)
        return int(high - low) > MOST_NAMED


class Intervals:
    """What runs on a GPU or is open in a program, with the numbers that picks name.

    Parameters
    ----------
    trace : Trace
        The trace.
    events : Events
        Its events.
    """

    def __init__(self, trace: Trace, events: Events) -> None:
        self.trace, self.events = trace, events

    @cached_property
    def _kernels(self) -> tuple[pl.DataFrame, pl.Series]:
        columns = ("start_ns", "end_ns", "pid", "device_id", "name")
        return numbered(self.trace.kernels.select(columns).with_row_index("id").collect())

    @cached_property
    def _ranges(self) -> tuple[pl.DataFrame, pl.Series]:
        columns = ("start_ns", "end_ns", "pid", "depth", "name")
        return numbered(self.trace.nvtx_ranges.select(columns).with_row_index("id").collect())

    @property
    def kernels(self) -> pl.DataFrame:
        """Every kernel with its ``id`` and the ``number`` of its name."""
        return self._kernels[0]

    @property
    def ranges(self) -> pl.DataFrame:
        """Every NVTX range with its ``id`` and the ``number`` of its name."""
        return self._ranges[0]

    @property
    def named(self) -> dict[str, pl.Series]:
        """Distinct names of kernels and ranges, by number."""
        return {"kernel": self._kernels[1], "nvtx": self._ranges[1]}

    def chosen(self, key: str, ids: list[int]) -> pl.DataFrame:
        """Give the kernels or ranges that have one of some names, by the numbers of these."""
        rows = self.kernels if key == "kernel" else self.ranges
        return rows.filter(pl.col("number").is_in(ids))

    def short_trace(self, labels: list[str]) -> Trace:
        """Give the trace with labels for names of kernels where a name is very long.

        An analysis that groups or sorts by name reads each name once per row or more often: 20 kB in a
        million rows take minutes.

        Parameters
        ----------
        labels : list of str
            A label for each name, by number; no two alike.

        Returns
        -------
        Trace
            The trace itself where no name is longer than ``LONG_NAME``.
        """
        if not (self.named["kernel"].str.len_bytes() > LONG_NAME).any():
            return self.trace
        called = pl.Series(labels, dtype=pl.String).gather(self.kernels["number"])
        kernels = self.trace.kernels.collect().with_columns(called.alias("name"))
        return replace(self.trace, kernels=kernels.lazy())

    @cached_property
    def batches(self) -> Part | None:
        """The fault rows that have an end, by start; each is known by its number among them."""
        part = self.events.parts.get("gpu_faults")
        if part is None:
            return None
        known = part.duration.values >= 0
        return part if known.all() else part.taken(known)

    def batch(self, number: int) -> dict[str, Any]:
        """Return a fault row by its number, with the columns of ``SELECTED``."""
        if self.batches is None:
            raise IndexError(number)
        parts = {"gpu_faults": self.batches}
        found = replace(self.events, parts=parts).recorded({"gpu_faults": np.array([number])})
        return found.row(0, named=True)

    def lanes(
        self,
        filters: Filters,
        options: Options,
        choice: Choice | None = None,
        layers: list[int] | None = None,
    ) -> list[LaneOf]:
        """Build the lanes: kernels and ranges by process, GPU and name, batches by what is kept of them.

        Parameters
        ----------
        filters : dict
            As :func:`nsan.widgets.filters.checked` gives them.
        options : Options
            What they choose from.
        choice : Choice, optional
            Which rows they keep.
        layers : list of int, optional
            Which kinds of rows they keep.

        Returns
        -------
        list of LaneOf
            From top to bottom. A lane stays where the filters leave nothing in it.
        """
        labels = {
            key: pl.Series(options.labels[key], dtype=pl.String) for key in ("kernel", "nvtx")
        }
        kernels = _kept(self.kernels, "kernel", filters)
        found = []
        for pid, device in self.gpus[:MOST_GPU_LANES]:
            rows = kernels.filter(
                pl.col("pid").eq_missing(pl.lit(pid)),
                pl.col("device_id").eq_missing(pl.lit(device)),
            )
            label = f"{self._gpu_word(pid, device)} kernels"
            found.append(_lane_of(f"kernel-{pid}-{device}", label, rows, labels["kernel"]))
        ranges = _kept(self.ranges, "nvtx", filters)
        for depth in self.depths[:MOST_NVTX_LANES]:
            rows = ranges.filter(pl.col("depth").fill_null(0) == depth)
            label = "NVTX" if len(self.depths) == 1 else f"NVTX {depth}"
            found.append(_lane_of(f"nvtx-{depth}", label, rows, labels["nvtx"]))
        if self.batches is not None:
            spans = _batch_spans(self.batches, choice, layers)
            found.append(LaneOf("batches", "fault batches", "batch", None, spans))
        return found

    @cached_property
    def gpus(self) -> list[tuple[int | None, int | None]]:
        """Process and GPU of kernels, by number; what is not known is last."""
        pairs = self.kernels.select("pid", "device_id").unique()
        return pairs.sort("pid", "device_id", nulls_last=True).rows()

    @cached_property
    def depths(self) -> list[int]:
        """Depths of NVTX ranges, ascending."""
        return sorted(self.ranges["depth"].fill_null(0).unique().to_list())

    def _gpu_word(self, pid: int | None, device: int | None) -> str:
        many = len({each for each, _ in self.gpus}) > 1
        return f"GPU {device}{f' of {pid}' if many else ''}"

    def left_out(self) -> list[str]:
        """Say what has no lane, one sentence each."""
        notes = []
        gpus, depths = self.gpus[MOST_GPU_LANES:], self.depths[MOST_NVTX_LANES:]
        if gpus:
            words = ", ".join(self._gpu_word(*each) for each in gpus[:MOST_GPU_LANES])
            more = ", ..." if len(gpus) > MOST_GPU_LANES else ""
            notes.append(
                f"Kernels of {counted(len(gpus), 'more GPU')} have no lane: {words}{more}."
            )
        if depths:
            rows = int((self.ranges["depth"].fill_null(0) >= depths[0]).sum())
            notes.append(
                f"{counted(rows, 'NVTX range')} at depth {depths[0]} and deeper have no lane."
            )
        return notes


def _batch_spans(part: Part, choice: Choice | None, layers: list[int] | None) -> Spans:
    """Give the batches whose fault rows are kept, each with its number among all."""
    mask = None if choice is None else choice.mask(part)
    if layers is not None:
        known = with_numbers(part.layer, layers)
        mask = known if mask is None else mask & known
    if mask is None:
        return Spans(part.start, part.start + part.duration.values)
    rows = np.flatnonzero(mask)
    start = part.start[rows]
    return Spans(start, start + part.duration.values[rows], rows)


def _kept(frame: pl.DataFrame, key: str, filters: Filters) -> pl.DataFrame:
    """Keep what the filters for process, GPU and name keep."""
    for name, column in (("pid", "pid"), ("device", "device_id")):
        wanted = filters[name]
        if wanted is not None and column in frame.columns:
            frame = frame.filter(pl.col(column).is_in(wanted))
    ids = filters[key]
    return frame if ids is None else frame.filter(pl.col("number").is_in(ids))


def _lane_of(name: str, label: str, rows: pl.DataFrame, labels: pl.Series) -> LaneOf:
    """Build a lane; its intervals have the short labels of their names."""
    pick = name.partition("-")[0]
    called = labels.gather(rows["number"]).alias("name")
    lane = Lane.build(rows.select("start_ns", "end_ns", "id").with_columns(called))
    if lane.frame.height <= MOST_NAMED:
        return LaneOf(name, label, pick, lane)
    columns = (lane.frame[each].to_numpy() for each in ("start_ns", "end_ns", "id"))
    return LaneOf(name, label, pick, lane, Spans(*columns))
