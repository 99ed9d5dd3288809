"""The lanes above the map: kernels of each GPU, NVTX ranges by depth, driver batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import polars as pl

from nsan.analysis.views.lanes import Lane
from nsan.widgets.filters import owners_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nsan.analysis.views.events import Events, Part
    from nsan.trace import Trace
    from nsan.widgets.filters import Filters, Options

MOST_NVTX_LANES: Final = 4
MOST_GPU_LANES: Final = 8

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
        reach, low, high = np.searchsorted(
            self.start, [window[0] - self.longest, window[0], window[1]]
        )
        before = np.flatnonzero(self.end[reach:low] > window[0]) + reach
        n_inside = max(0, int(high - low))
        if len(before) + n_inside <= most:
            return self._single(np.append(before, np.arange(low, low + n_inside)))
        columns = max(1, min(n_columns, most - 1))
        length = window[1] - window[0]
        edges = window[0] + np.arange(columns, dtype=np.int64) * length // columns
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
    def kernels(self) -> pl.DataFrame:
        """Every kernel with its number."""
        columns = ("start_ns", "end_ns", "pid", "device_id", "name")
        return self.trace.kernels.select(columns).with_row_index("id").collect()

    @cached_property
    def ranges(self) -> pl.DataFrame:
        """Every NVTX range with its number."""
        columns = ("start_ns", "end_ns", "pid", "depth", "name")
        return self.trace.nvtx_ranges.select(columns).with_row_index("id").collect()

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

    def lanes(self, filters: Filters, options: Options) -> list[LaneOf]:
        """Build the lanes from what the filters for process, GPU and name keep.

        Parameters
        ----------
        filters : dict
            As :func:`nsan.widgets.filters.checked` gives them.
        options : Options
            What they choose from.

        Returns
        -------
        list of LaneOf
            From top to bottom. A lane stays where the filters leave nothing in it.
        """
        found = [
            _lane_of(name, label, "kernel", _kept(rows, "kernel", filters, options))
            for name, label, rows in self._by_gpu()
        ]
        depths = sorted(self.ranges["depth"].fill_null(0).unique().to_list())[:MOST_NVTX_LANES]
        ranges = _kept(self.ranges, "nvtx", filters, options)
        for depth in depths:
            rows = ranges.filter(pl.col("depth").fill_null(0) == depth)
            label = "NVTX" if len(depths) == 1 else f"NVTX {depth}"
            found.append(_lane_of(f"nvtx-{depth}", label, "nvtx", rows))
        if self.batches is not None:
            found.append(
                LaneOf("batches", "fault batches", "batch", None, self._batch_spans(filters))
            )
        return found

    def _batch_spans(self, filters: Filters) -> Spans:
        part = self.batches
        assert part is not None  # noqa: S101  asked by the caller
        owners = owners_of(self.events.owners, filters)
        if owners is None:
            return Spans(part.start, part.start + part.duration.values)
        rows = np.flatnonzero(np.isin(part.owner, owners))
        start = part.start[rows]
        return Spans(start, start + part.duration.values[rows], rows)

    def _by_gpu(self) -> list[tuple[str, str, pl.DataFrame]]:
        many = self.kernels["pid"].n_unique() > 1
        parts = self.kernels.partition_by("pid", "device_id", as_dict=True)
        return [
            (
                f"kernel-{pid}-{device}",
                f"GPU {device}{f' of {pid}' if many else ''} kernels",
                parts[pid, device],
            )
            for pid, device in sorted(parts, key=str)[:MOST_GPU_LANES]
        ]


def _kept(frame: pl.DataFrame, key: str, filters: Filters, options: Options) -> pl.DataFrame:
    """Keep what the filters for process, GPU and name keep."""
    for name, column in (("pid", "pid"), ("device", "device_id")):
        wanted = filters[name]
        if wanted is not None and column in frame.columns:
            frame = frame.filter(pl.col(column).is_in(wanted))
    ids = filters[key]
    if ids is None:
        return frame
    return frame.filter(pl.col("name").is_in(options.chosen(key, ids)))


def _lane_of(name: str, label: str, pick: str, rows: pl.DataFrame) -> LaneOf:
    lane = Lane.build(rows.select("start_ns", "end_ns", "name", "id"))
    if lane.frame.height <= MOST_NAMED:
        return LaneOf(name, label, pick, lane)
    columns = (lane.frame[each].to_numpy() for each in ("start_ns", "end_ns", "id"))
    return LaneOf(name, label, pick, lane, Spans(*columns))
