"""A trace: typed lazy frames, what is known about the capture, and the filter.

Nothing here reads a file; :func:`nsan.open_trace` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from nsan.errors import NoFilterTableError, UnknownFilterValueError, UsageError
from nsan.info import TraceInfo, Window
from nsan.schema import TABLES
from nsan.text import safe
from nsan.units import parse_time, parse_window

MIN_NS: Final = -(1 << 62)
MAX_NS: Final = 1 << 62


@dataclass(frozen=True, repr=False)
class Trace:
    """One capture as typed lazy frames.

    Attributes
    ----------
    gpu_faults, cpu_faults, migrations, copies, memsets, kernels, driver_events, api_calls : LazyFrame
        Events, sorted by start; columns as in :mod:`nsan.schema`.
    nvtx_ranges, nvtx_marks, allocations, devices, processes, diagnostics : LazyFrame
        Context of the events.
    info : TraceInfo
        Versions, what was recorded, what could not be read.
    windows : tuple of (int, int), or None
        The disjoint, ascending windows of time that :meth:`filter` kept; None is all time.
    """

    gpu_faults: pl.LazyFrame
    cpu_faults: pl.LazyFrame
    migrations: pl.LazyFrame
    copies: pl.LazyFrame
    memsets: pl.LazyFrame
    kernels: pl.LazyFrame
    driver_events: pl.LazyFrame
    api_calls: pl.LazyFrame
    nvtx_ranges: pl.LazyFrame
    nvtx_marks: pl.LazyFrame
    allocations: pl.LazyFrame
    devices: pl.LazyFrame
    processes: pl.LazyFrame
    diagnostics: pl.LazyFrame
    info: TraceInfo
    windows: tuple[Window, ...] | None = None
    unwindowed: Trace | None = None
    """The same trace without its windows: what busy time is clipped from."""
    is_filtered: bool = False
    """A part of the capture, by any filter."""
    capture_totals: Mapping[str, Any] | None = None
    """Totals of the whole capture, where its store holds them; :func:`nsan.totals.totals`."""

    def __repr__(self) -> str:
        part = "" if self.windows is None else f", {len(self.windows)} windows of time"
        version = safe(self.info.nsys_version or "unknown")
        return f"<Trace {safe(self.info.source)}, nsys {version}{part}>"

    def filter(
        self,
        *,
        time: tuple[int | None, int | None] | str | None = None,
        pid: int | Iterable[int] | None = None,
        device: int | Iterable[int] | None = None,
        nvtx: str | None = None,
    ) -> Trace:
        """Keep a part of the trace.

        Fault, migration, copy, memset, kernel and API rows belong to the window that holds their
        start, so that the parts of a split add up. NVTX ranges, allocations and context rows are
        kept when they intersect. Busy time is clipped at the edges.

        Parameters
        ----------
        time : (start_ns, end_ns) or str, optional
            Half-open window in nanoseconds from the session start; an end may be None. Text as in
            nsys: ``"1s/1s250ms"``.
        pid, device : int or iterable of int, optional
            Processes and GPUs to keep. CPU faults, API calls and NVTX have no GPU and are kept.
        nvtx : str, optional
            ``NAME``, ``NAME@DOMAIN`` or either with ``/INDEX``: the union of that range's
            instances in time (or only the one at INDEX, from 0, by start).

        Returns
        -------
        Trace
            A new trace; filters combine.

        Raises
        ------
        UnknownFilterValueError
            If the trace has no such process, GPU or range; the message lists those it has.
        """
        trace = self
        if pid is not None:
            trace = _keep(trace, "pid", "process", pid)
        if device is not None:
            trace = _keep(trace, "device_id", "GPU", device)
        if nvtx is not None:
            trace = _within(trace, _instances(trace, nvtx))
        if time is not None:
            start, end = _window(time)
            window = (
                MIN_NS if start is None else max(start, MIN_NS),
                MAX_NS if end is None else min(end, MAX_NS),
            )
            trace = _within(trace, (window,) if window[0] < window[1] else ())
        return trace

    def reaching_in(self, table: str) -> pl.LazyFrame:
        """Return the rows of a table that reach into the windows, wherever they start.

        Parameters
        ----------
        table : str
            Name of a table with ``start_ns`` and ``end_ns``.

        Returns
        -------
        LazyFrame
            All rows where no window was set.
        """
        whole = self if self.windows is None or self.unwindowed is None else self.unwindowed
        rows: pl.LazyFrame = getattr(whole, table)
        if self.windows is None:
            return rows
        return _touching(rows, self.windows, "start_ns", "end_ns")


_BY_START: Final = (
    "gpu_faults",
    "cpu_faults",
    "migrations",
    "copies",
    "memsets",
    "kernels",
    "driver_events",
    "api_calls",
    "nvtx_marks",
)
_BY_OVERLAP: Final = {"nvtx_ranges": ("start_ns", "end_ns"), "allocations": ("alloc_ns", "free_ns")}


def _window(time: object) -> tuple[int | None, int | None]:
    if isinstance(time, str):
        return parse_window(time)
    if isinstance(time, tuple | list) and len(time) == 2:
        start, end = (parse_time(side) if isinstance(side, str) else side for side in time)
        if all(side is None or isinstance(side, int) for side in (start, end)):
            return start, end
    msg = f"time={time!r}: give a pair of nanoseconds (or None, or texts as '1s'), or a text as '1s/2s'."
    raise UsageError(msg)


def _replaced(
    trace: Trace,
    frames: dict[str, pl.LazyFrame],
    windows: tuple[Window, ...] | None,
    whole: Trace | None,
) -> Trace:
    kept = {name: getattr(trace, name) for name in TABLES} | frames
    return Trace(
        **kept,
        info=trace.info,
        windows=windows,
        unwindowed=whole,
        is_filtered=True,
        capture_totals=trace.capture_totals,
    )


def _keep(trace: Trace, column: str, what: str, wanted: int | Iterable[int]) -> Trace:
    values = [wanted] if isinstance(wanted, int) else list(wanted)
    if not all(isinstance(value, int) for value in values):
        msg = f"{wanted!r}: a {what} is named by its number."
        raise UsageError(msg)
    present = _present(trace, column)
    for value in values:
        if value not in present:
            raise UnknownFilterValueError(what, value, present)
    # A device without a process is that of any process, and stays.
    keeps = pl.col(column).is_in(values)
    frames = {
        name: getattr(trace, name).filter(
            keeps | pl.col(column).is_null() if name == "devices" else keeps
        )
        for name, table in TABLES.items()
        if column in table.schema
    }
    whole = trace.unwindowed and _keep(trace.unwindowed, column, what, values)
    return _replaced(trace, frames, trace.windows, whole)


def _present(trace: Trace, column: str) -> list[int]:
    context = trace.processes if column == "pid" else trace.devices
    found = context.select(pl.col(column).cast(pl.Int64)).unique().collect()
    return sorted(value for value in found[column].to_list() if value is not None)


def _instances(trace: Trace, wanted: str) -> tuple[Window, ...]:
    ranges = trace.nvtx_ranges.select("start_ns", "end_ns", "name", "domain").collect()
    if ranges.is_empty() and not _has_nvtx(trace):
        raise NoFilterTableError("NVTX ranges", "--trace=cuda,nvtx")
    found = _named(ranges, wanted)
    if found.is_empty():
        names = ranges["name"].drop_nulls().value_counts(sort=True)["name"].to_list()
        raise UnknownFilterValueError("NVTX range", repr(wanted), map(repr, names))
    return _disjoint(found.select("start_ns", "end_ns").drop_nulls().rows())


def _within(trace: Trace, windows: tuple[Window, ...]) -> Trace:
    if trace.windows is not None:
        windows = _intersect(trace.windows, windows)
    frames = {name: _starting_in(getattr(trace, name), windows) for name in _BY_START}
    frames |= {
        name: _touching(getattr(trace, name), windows, start, end)
        for name, (start, end) in _BY_OVERLAP.items()
    }
    return _replaced(trace, frames, windows, trace.unwindowed or trace)


def _has_nvtx(trace: Trace) -> bool:
    """Say whether the whole capture has ranges, where a filter may have taken them away."""
    capture = trace.info.capture.get("nvtx")
    return capture.answer == "recorded" if capture else trace.is_filtered


def _named(ranges: pl.DataFrame, wanted: str) -> pl.DataFrame:
    """Find ranges by ``NAME[@DOMAIN][/INDEX]``; the whole text as a name comes first."""
    exact = ranges.filter(pl.col("name") == wanted)
    if not exact.is_empty():
        return exact
    text, slash, index = wanted.rpartition("/")
    if slash and index.isdecimal() and len(index) < 10:
        return _named(ranges, text).sort("start_ns").slice(int(index), 1)
    name, at, domain = wanted.rpartition("@")
    return ranges.filter((pl.col("name") == name) & (pl.col("domain") == domain)) if at else exact


def _disjoint(intervals: Iterable[Window]) -> tuple[Window, ...]:
    merged: list[Window] = []
    for start, end in sorted((a, b) for a, b in intervals if a < b):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def _intersect(left: tuple[Window, ...], right: tuple[Window, ...]) -> tuple[Window, ...]:
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def _window_frame(windows: tuple[Window, ...]) -> pl.LazyFrame:
    schema = {"_from": pl.Int64, "_until": pl.Int64}
    return pl.LazyFrame(windows, schema=schema, orient="row").set_sorted("_from")


def _starting_in(frame: pl.LazyFrame, windows: tuple[Window, ...]) -> pl.LazyFrame:
    if len(windows) <= 1:
        start, end = windows[0] if windows else (0, 0)
        return frame.filter((pl.col("start_ns") >= start) & (pl.col("start_ns") < end))
    return (
        frame.filter(pl.col("start_ns").is_not_null())
        .sort("start_ns", maintain_order=True)
        .join_asof(_window_frame(windows), left_on="start_ns", right_on="_from")
        .filter(pl.col("start_ns") < pl.col("_until"))
        .drop("_from", "_until", strict=False)
    )


def _touching(
    frame: pl.LazyFrame, windows: tuple[Window, ...], start: str, end: str
) -> pl.LazyFrame:
    # The last window that begins before the row ends is the one that reaches furthest.
    first, last = pl.col(start).fill_null(MIN_NS), pl.col(end).fill_null(MAX_NS)
    last = pl.max_horizontal(last, first + 1)
    return (
        frame.with_columns(_last=last - 1, _first=first)
        .sort("_last", maintain_order=True)
        .join_asof(_window_frame(windows), left_on="_last", right_on="_from")
        .filter(pl.col("_until") > pl.col("_first"))
        .sort("_first", maintain_order=True)
        .drop("_last", "_first", "_from", "_until", strict=False)
    )
