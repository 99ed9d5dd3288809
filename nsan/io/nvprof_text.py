"""Read the text or CSV that ``nvprof --print-gpu-trace`` printed, among what the program printed.

A trace is a head of columns and a row per event, up to a blank line. The rows are in the exact
order of their starts, while the starts themselves are printed with five or six digits: so each row
keeps its place as ``sequence``, and what needs finer times is doubtful. CSV in milliseconds or less
is exact. Causes and access types are never printed.

From the program's own lines two things are taken: which ranges it allocated, where it says so, and
the warnings of nvprof among them. Command lines are not kept.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import polars as pl

from nsan import schema
from nsan.errors import DamagedExportError, NotAnExportError
from nsan.info import Capture, TraceInfo
from nsan.io.nsys_info import SWITCHES
from nsan.io.nsys_tables import SIZES
from nsan.io.nvprof_input import AGAIN, read_lines
from nsan.io.nvprof_rows import COLUMNS, UM_NAMES, UNITS, BadCellError, Devices, parse
from nsan.io.nvprof_tables import typed
from nsan.io.probe import display_name
from nsan.io.source import Progress, Sink
from nsan.units import format_count

ROWS_PER_CHUNK: Final = 1 << 16
_BYTES_PER_ROW: Final = 150
_MOST_MESSAGES: Final = 1000
_CUT_NAME: Final = 15
_MOST_CHARACTERS: Final = 1 << 24
_NEEDED: Final = ("Start", "Duration", "Device", "Name")

_PID: Final = re.compile(r"==(\d{1,9})== ")
_RESULT: Final = re.compile(r"==(?:(\d{1,9})|=+)={1,2} Profiling result:")
_MESSAGE: Final = re.compile(r"==(?:(\d{1,9})|=+)={1,2} (Warning|Error): (.*)")
_ALLOCATION: Final = re.compile(
    r"in api range: 0x([0-9a-f]{1,16}) 0x([0-9a-f]{1,16})\b", re.IGNORECASE
)
_TIME: Final = re.compile(r"\d+(?:\.\d*)?(?:s|ms|us|ns)?$")
_UM_ROW: Final = re.compile(r'\s*"?\d.*\[Unified Memory [^\[\]]+\]"?\s*$')
"""A row that only a GPU trace has."""

_LEGEND: Final = "Regs: Number of registers"
_GAP: Final = re.compile(r"\s{2,}")
_UM_KINDS: Final = ("gpu_faults", "cpu_faults", "migrations")


@dataclass
class _Table:
    """One printed trace: how its rows are to be read."""

    heads: list[str]
    is_csv: bool
    pid: int | None
    units: dict[str, str] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Starts are printed to the nanosecond: six decimals of a millisecond or less."""
        return self.is_csv and self.units.get("start") in {"ms", "us", "ns"}


@dataclass
class _Chunk:
    """Rows of one table that are read together, and the line of the file that each is from."""

    table: _Table
    rows: list[list[str]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    n_characters: int = 0


class NvprofText:
    """One printed trace, plain or gzipped; a context manager.

    Parameters
    ----------
    path : Path
        A file that :func:`nsan.io.probe.identify` calls nvprof text.
    rows_per_chunk : int
        Rows held in memory at a time.
    """

    def __init__(self, path: Path, *, rows_per_chunk: int = ROWS_PER_CHUNK) -> None:
        self.path = path
        self._rows_per_chunk = rows_per_chunk
        self._n_rows: dict[str, int] = defaultdict(int)
        self._devices = Devices()
        self._pids: set[int] = set()
        self._allocations: list[tuple[int, int]] = []
        self._messages: list[tuple[int | None, str, str]] = []
        self._table_pids: list[int | None] = []
        self._is_exact = True
        self._n_printed = 0  # traces in the text form, each of which ends with a legend
        self._n_legends = 0
        self._n_unknown = 0
        self._contexts: set[tuple[str, str]] = set()

    def __enter__(self) -> NvprofText:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def n_source_rows(self) -> int:
        """Estimate the rows to read, from the size of the file."""
        return self.path.stat().st_size // _BYTES_PER_ROW + 1

    def copy_tables(self, sink: Sink, progress: Progress) -> None:
        """Read every table of ours and hand it to a sink, chunk by chunk.

        Raises
        ------
        DamagedExportError
            If a row of the trace cannot be read; the message names its line.
        NotAnExportError
            If there is no GPU trace in the text.
        """
        for number, chunk in enumerate(self._chunks()):
            for name, frame in self._parsed(chunk).items():
                self._n_rows[name] += frame.height
                sink(name, number, frame)
            progress("GPU trace", len(chunk.rows))
        if not self._table_pids:
            raise NotAnExportError(
                self.path,
                "output of nvprof without a GPU trace",
                "Record one with `nvprof --print-gpu-trace PROGRAM`, or with `nsys profile`.",
            )
        for name, frame in self._context().items():
            self._n_rows[name] += frame.height
            sink(name, 0, frame)

    def _chunks(self) -> Iterator[_Chunk]:
        chunk: _Chunk | None = None
        pid: int | None = None
        within = False  # a blank line ends a trace, unless rows go on behind it
        for number, line in enumerate(read_lines(self.path), start=1):
            if result := _RESULT.search(line):
                pid = int(result[1]) if result[1] else None
            if table := _head(line, pid):
                if chunk and chunk.rows:
                    yield chunk
                chunk, within = _Chunk(table), True
                self._note_table(table)
            elif chunk and (within or _is_row(chunk.table, line)) and _is_content(line):
                within = True
                if _take(chunk, line, number, self.path) and self._is_full(chunk):
                    yield chunk
                    chunk = _Chunk(chunk.table)
            elif _UM_ROW.match(line):
                raise _broken(self.path, number, "it stands behind no head of columns that fits it")
            else:
                self._note(line)
                within = within and bool(line.strip())
        if chunk and chunk.rows:
            yield chunk

    def _is_full(self, chunk: _Chunk) -> bool:
        return len(chunk.rows) >= self._rows_per_chunk or chunk.n_characters >= _MOST_CHARACTERS

    def _note_table(self, table: _Table) -> None:
        self._table_pids.append(table.pid)
        self._n_printed += not table.is_csv
        if table.pid is not None:
            self._pids.add(table.pid)

    def _note(self, line: str) -> None:
        """Take what a line outside a trace says."""
        if line.startswith(_LEGEND):
            self._n_legends += 1
        if found := _PID.search(line):
            self._pids.add(int(found[1]))
        if found := _ALLOCATION.search(line):
            first, last = (int(text, 16) for text in found.groups())
            if 0 < last - first <= SIZES[1]:
                self._allocations.append((first, last - first))
        elif (found := _MESSAGE.search(line)) and len(self._messages) < _MOST_MESSAGES:
            pid = int(found[1]) if found[1] else None
            self._messages.append((pid, found[2].lower(), found[3]))

    def _parsed(self, chunk: _Chunk) -> dict[str, pl.DataFrame]:
        table = chunk.table
        self._is_exact = self._is_exact and table.is_exact
        named = [COLUMNS.get(head, f"_{at}") for at, head in enumerate(table.heads)]
        cells = pl.DataFrame(
            dict(zip(named, zip(*chunk.rows, strict=True), strict=True)),
            schema=dict.fromkeys(named, pl.String),
        )
        nothing = ["", "-"]
        exact_order = pl.Series(chunk.lines, dtype=pl.Int64)
        cells = cells.with_columns(
            pl.when(pl.col(named).is_in(nothing).not_()).then(pl.col(named)),
        ).with_columns(
            pid=pl.lit(table.pid, pl.UInt32),
            sequence=pl.lit(None, pl.Int64) if table.is_exact else exact_order,
        )
        self._watch(cells)
        try:
            return parse(cells, table.units, self._devices)
        except BadCellError as error:
            line = chunk.lines[error.row]
            raise _broken(
                self.path, line, f"its {error.column} is missing or unreadable"
            ) from error

    def _watch(self, cells: pl.DataFrame) -> None:
        """Count rows of kinds that are not known, and note which GPU each context is on."""
        um = pl.col("name").str.starts_with("[Unified Memory ")
        self._n_unknown += cells.filter(um & pl.col("name").is_in(UM_NAMES).not_()).height
        if {"device", "context"} <= set(cells.columns):
            pairs = cells.select("device", "context").drop_nulls().unique()
            self._contexts.update(pairs.rows())

    def _warnings(self) -> list[str]:
        said = []
        if self._n_legends < self._n_printed:
            said.append("The trace does not end as nvprof ends one: rows may be missing.")
        if self._n_unknown:
            said.append(
                f"{format_count(self._n_unknown)} Unified Memory rows are of a kind that nsan does "
                "not know, and were not read."
            )
        cut = {name for name, _ in self._contexts if len(name) == _CUT_NAME}
        if any(sum(name == one for name, _ in self._contexts) > 1 for one in cut):
            said.append(
                f"nvprof cuts GPU names to {_CUT_NAME} characters: several GPUs of one name would be "
                "taken for one here."
            )
        return said

    def _context(self) -> dict[str, pl.DataFrame]:
        pids = sorted(self._pids)
        pid = pids[0] if len(pids) == 1 else None
        allocations = pl.DataFrame(
            self._allocations, schema={"va": pl.UInt64, "bytes": pl.Int64}, orient="row"
        ).with_columns(pid=pl.lit(pid, pl.UInt32), kind=pl.lit("managed"))
        devices = pl.DataFrame(
            [(number, name) for name, number in self._devices.ids.items()],
            schema={"device_id": pl.Int64, "name": pl.String},
            orient="row",
        )
        messages = pl.DataFrame(
            self._messages,
            schema={"pid": pl.UInt32, "severity": pl.String, "text": pl.String},
            orient="row",
        )
        return {
            "allocations": typed(allocations, schema.ALLOCATIONS),
            "devices": typed(devices, schema.DEVICES),
            "processes": typed(
                pl.DataFrame({"pid": pids}, schema={"pid": pl.UInt32}), schema.PROCESSES
            ),
            "diagnostics": typed(
                # From a path, an address or an option on, a message may name people and machines.
                messages.with_columns(pl.col("text").str.replace(r"\s*\S*[/\\~@=].*$", " ...")),
                schema.DIAGNOSTICS,
            ),
        }

    def info(self) -> TraceInfo:
        """Describe the capture; call it after :meth:`copy_tables`, whose rows decide."""
        # Each process counts its times from its own start.
        comparable = self._is_exact and len(self._table_pids) == 1
        return TraceInfo(
            source=display_name(self.path),
            kind="nvprof-text",
            capture={kind: self._answer(kind) for kind in SWITCHES},
            warnings=self._warnings(),
            doubtful=["managed_calls", *([] if comparable else ["busy", "span"])],
        )

    def _answer(self, kind: str) -> Capture:
        switch = SWITCHES[kind]
        if self._n_rows[kind]:
            printed = (
                "the program printed its ranges" if kind == "allocations" else "rows are there"
            )
            return Capture("recorded", switch, printed)
        if kind == "allocations":
            return Capture("not_recorded", switch, "nvprof does not print allocations")
        if kind == "nvtx":
            return Capture("not_recorded", switch, "a GPU trace of nvprof has no NVTX")
        if kind == "kernels":
            return Capture("recorded", switch, "a GPU trace was printed, and there was none")
        if any(self._n_rows[name] for name in (*_UM_KINDS, "driver_events")):
            # One option turns all kinds on.
            return Capture("recorded", switch, "Unified Memory was profiled, and there was none")
        return Capture(
            "unknown",
            switch,
            "the trace has no Unified Memory rows, and nvprof does not print whether it was on",
        )


def _head(line: str, pid: int | None) -> _Table | None:
    """Recognise the head of a GPU trace."""
    text = line.strip()
    if not text.startswith(("Start", '"Start"')):
        return None
    is_csv = text.startswith('"')
    heads = _csv_cells(text) if is_csv else _GAP.split(text)
    known = all(head in heads for head in _NEEDED)
    return _Table(heads, is_csv, pid) if known and len(set(heads)) == len(heads) else None


def _take(chunk: _Chunk, line: str, number: int, path: Path) -> bool:
    """Put the cells of a line into a chunk; say whether it was a row.

    Raises
    ------
    DamagedExportError
        If the line is no row of the trace.
    """
    table = chunk.table
    n_cells = len(table.heads)
    if table.is_csv:
        cells = _csv_cells(line)
        if not table.units and cells[0] in {"s", "ms", "us", "ns"}:
            named = zip((COLUMNS.get(head) for head in table.heads), cells, strict=False)
            table.units = {name: unit for name, unit in named if name in UNITS and unit}
            return False
    else:
        cells = _GAP.split(line.strip(), maxsplit=n_cells - 1)
    if len(cells) != n_cells or not cells[0][:1].isdigit():
        raise _broken(path, number, f"it has {len(cells)} of {n_cells} columns")
    chunk.rows.append(cells)
    chunk.lines.append(number)
    chunk.n_characters += len(line)
    return True


def _is_content(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("==")


def _is_row(table: _Table, line: str) -> bool:
    """Say whether a line outside a trace is plainly a row of one."""
    cells = _csv_cells(line) if table.is_csv else _GAP.split(line.strip(), len(table.heads) - 1)
    return len(cells) == len(table.heads) and bool(_TIME.match(cells[0]))


def _csv_cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error:
        return [line]


def _broken(path: Path, number: int, why: str) -> DamagedExportError:
    return DamagedExportError(
        path, f"line {number} is no whole row of the GPU trace ({why})", AGAIN
    )
