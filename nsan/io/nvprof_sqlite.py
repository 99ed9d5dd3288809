"""Read one database of nvprof or the Visual Profiler: event tables in ranges, twice.

The times count from the Unix epoch, and rows come in the order in which the profiler got them. So
a first pass over the starts finds the earliest one, from which all times then count, and the
process and the GPU, which most tables do not name. The store sorts.

Of the names in these databases only those of kernels and GPUs are read: others are the command
line and paths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import polars as pl

from nsan.errors import NotAnExportError
from nsan.info import Capture, TraceInfo
from nsan.io import nvprof_tables
from nsan.io.nsys_info import SWITCHES
from nsan.io.nsys_sqlite import ROWS_PER_RANGE, Losses
from nsan.io.nvprof_tables import DEVICES, STREAMED, STRINGS, UNIFIED_MEMORY, Context, Source
from nsan.io.probe import display_name
from nsan.io.source import Progress, Sink
from nsan.io.sqlite_file import CellType, SqliteFile
from nsan.schema import PROCESSES

_WORKERS: Final = 2
_KERNEL_TABLE: Final = "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL"
_NEEDED: Final = ("counterKind", "value", "start", "end", "address")
_UM_KINDS: Final = ("gpu_faults", "cpu_faults", "migrations")
_ROWS_ARE_THERE: Final = "rows are there"
_UM_TABLES: Final = (*_UM_KINDS, "driver_events")


def is_nvprof(database: SqliteFile) -> bool:
    """Say whether a database is one of nvprof or the Visual Profiler, by its tables."""
    # nsys has neither; a database that has lost its names is one all the same.
    return any(database.has_table(mark) for mark in (UNIFIED_MEMORY, _KERNEL_TABLE))


class NvprofDatabase:
    """One database, open for reading; a context manager.

    Parameters
    ----------
    path : Path
        The file as the user named it.
    database : SqliteFile, optional
        The database, where it is not that file itself but was unpacked from it.
    um_profiled : bool, optional
        Whether the container says that Unified Memory was profiled; None where it does not say.
    rows_per_range : int
        Rows read at a time.
    """

    def __init__(
        self,
        path: Path,
        *,
        database: SqliteFile | None = None,
        um_profiled: bool | None = None,
        rows_per_range: int = ROWS_PER_RANGE,
    ) -> None:
        self.path = path
        self.kind = "nvprof-sqlite" if database is None else "visual-profiler"
        self.database = database or SqliteFile(path)
        self.losses = Losses()
        self._um_profiled = um_profiled
        self._rows_per_range = rows_per_range
        self._n_rows: dict[str, int] = defaultdict(int)
        self._pids: set[int] = set()
        try:
            self._check_columns()
        except BaseException:
            self.close()
            raise
        self._start_ns: int | None = None

    def __enter__(self) -> NvprofDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the database."""
        self.database.close()

    def _check_columns(self) -> None:
        spelt = self.database.columns(UNIFIED_MEMORY)
        if spelt and not all(column.lower() in spelt for column in _NEEDED):
            what = "a database of nvprof whose Unified Memory table has other columns"
            raise NotAnExportError(self.path, what)

    def n_source_rows(self) -> int:
        """Estimate the rows to read, from row ids."""
        ranges = [between for source in STREAMED for between in self._ranges(source.table)]
        return sum(last - first + 1 for first, last in ranges)

    def copy_tables(self, sink: Sink, progress: Progress) -> None:
        """Read every table of ours and hand it to a sink; event tables come in ranges."""
        context = self._context()
        with ThreadPoolExecutor(_WORKERS) as pool:
            for at, source in enumerate(STREAMED):
                self._note_absent(source)
                for n_read, lost, made in self._stream(source, at, context, sink, pool):
                    self.losses.add(source.table, lost)
                    for name, n_rows in made.items():
                        self._n_rows[name] += n_rows
                    progress(source.table, n_read)
        rows = self._whole(DEVICES, nvprof_tables.DEVICE_COLUMNS)
        for name, frame in {
            "devices": nvprof_tables.devices(rows, context.names),
            "processes": nvprof_tables.typed(
                pl.DataFrame({"pid": sorted(self._pids)}, schema={"pid": pl.Int64}), PROCESSES
            ),
        }.items():
            self._n_rows[name] += frame.height
            sink(name, 0, frame)

    def _stream(
        self, source: Source, at: int, context: Context, sink: Sink, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[int, dict[str, int], dict[str, int]]]:
        def pass_on(
            number: int, between: tuple[int, int]
        ) -> tuple[int, dict[str, int], dict[str, int]]:
            rows, lost = self._read(source, between)
            made = {}
            for name, build in source.targets.items():
                frame = build(rows, context)
                made[name] = frame.height
                # Several sources may feed one table: keep their numbers apart.
                sink(name, number + (at << 20), frame)
            return rows.height, lost, made

        waiting = list(enumerate(self._ranges(source.table)))
        running: list[Future[tuple[int, dict[str, int], dict[str, int]]]] = []
        # Only as many ranges as workers are under way: memory stays bounded.
        while waiting or running:
            while waiting and len(running) < _WORKERS:
                running.append(pool.submit(pass_on, *waiting.pop(0)))
            yield running.pop(0).result()

    def _ranges(self, table: str) -> list[tuple[int, int]]:
        if not self.database.has_table(table):
            return []
        return self.database.row_ranges(table, rows=self._rows_per_range)

    def _note_absent(self, source: Source) -> None:
        spelt = self.database.columns(source.table)
        absent = [column for column in source.required if column.lower() not in spelt]
        if spelt and absent:
            self.losses.absent[source.table] = absent

    def _read(
        self, source: Source, between: tuple[int, int]
    ) -> tuple[pl.DataFrame, dict[str, int]]:
        rows, misfits = self.database.read(source.table, dict(source.columns), between)
        rows = rows.with_columns(
            pl.when(pl.col(column).is_between(low, high)).then(pl.col(column))
            for column, (low, high) in source.limits.items()
        )
        if source.table == UNIFIED_MEMORY:
            rows = nvprof_tables.settled(rows)
        rows = rows.with_columns(pl.col("start", "end") - (self._start_ns or 0))
        spelt = self.database.columns(source.table)
        counted = [column for column in source.required if column.lower() in spelt]
        lost = misfits | rows.select(pl.col(counted).null_count()).row(0, named=True)
        lost["end before start"] = rows.select((pl.col("end") < pl.col("start")).sum()).item()
        return rows, lost

    def _context(self) -> Context:
        """Find the earliest start, the processes and the GPUs in use, in a pass of their own."""
        used: set[int] = set()
        starts: list[int] = []
        for source in STREAMED:
            is_um = source.table == UNIFIED_MEMORY
            gpu = "srcId" if is_um else "deviceId"
            columns: dict[str, CellType] = dict.fromkeys(
                ("start", "processId", gpu, *(["counterKind"] if is_um else [])), "integer"
            )
            low, high = source.limits["start"]
            for between in self._ranges(source.table):
                rows, _ = self.database.read(source.table, columns, between)
                start = rows.select(pl.col("start").filter(pl.col("start").is_between(low, high)))
                starts += start.min().to_series().drop_nulls().to_list()
                self._pids |= set((rows["processId"].drop_nulls() % (1 << 32)).unique())
                # Of Unified Memory rows only those of GPU faults name their GPU.
                if is_um:
                    rows = rows.filter(pl.col("counterKind") == nvprof_tables.GPU_FAULT)
                used |= set(rows[gpu].drop_nulls().unique())
        self._start_ns = min(starts, default=None)
        present = self._whole(DEVICES, {"id": "integer"})["id"].drop_nulls().unique().to_list()
        gpus = used or set(present)
        return Context(
            names=self._names(),
            pid=next(iter(self._pids)) if len(self._pids) == 1 else None,
            device_id=next(iter(gpus)) if len(gpus) == 1 else None,
        )

    def _names(self) -> pl.DataFrame:
        rows = self._whole(STRINGS, {"_id_": "integer", "value": "text"})
        named = rows.select(id="_id_", full="value").filter(pl.col("full") != "-- null --")
        named = named.drop_nulls("id").unique("id", keep="first", maintain_order=True)
        short = [nvprof_tables.short_name(name) for name in named["full"]]
        return named.with_columns(short=pl.Series(short, dtype=pl.String))

    def _whole(self, table: str, columns: dict[str, CellType]) -> pl.DataFrame:
        schema = {name: pl.String if kind == "text" else pl.Int64 for name, kind in columns.items()}
        empty = pl.DataFrame(schema=schema)
        parts = [self.database.read(table, columns, between)[0] for between in self._ranges(table)]
        return pl.concat([empty, *parts])

    def info(self) -> TraceInfo:
        """Describe the capture; call it after :meth:`copy_tables`, whose rows decide."""
        return TraceInfo(
            source=display_name(self.path),
            kind=self.kind,
            session_start_utc_ns=self._start_ns,
            capture={kind: self._answer(kind) for kind in SWITCHES},
            losses=self.losses.cells,
            absent_columns=self.losses.absent,
            doubtful=self._doubtful(),
        )

    @property
    def _kinds_are_lost(self) -> bool:
        """Say whether a row does not tell what it is: no total holds all of its rows then."""
        return bool(self.losses.cells.get(UNIFIED_MEMORY, {}).get("counterKind"))

    def _doubtful(self) -> list[str]:
        """Name the figures whose rows may be incomplete, whatever their values say."""
        has_calls = self.database.has_table("CUPTI_ACTIVITY_KIND_RUNTIME")
        found = {"span": self._kinds_are_lost, "managed_calls": not has_calls}
        return [name for name, doubt in found.items() if doubt]

    def _answer(self, kind: str) -> Capture:
        switch = SWITCHES[kind]
        if kind in _UM_KINDS:
            return self._um_answer(kind, switch)
        if self._n_rows[kind]:
            return Capture("recorded", switch, _ROWS_ARE_THERE)
        if kind == "kernels" and any(self._n_rows[name] for name in ("copies", "memsets")):
            return Capture("recorded", switch, "traced, and there was none")
        if kind == "allocations":
            return Capture("not_recorded", switch, "nvprof does not store allocations")
        if kind == "nvtx":
            return Capture("unknown", switch, "nsan does not read the markers of nvprof")
        return Capture("unknown", switch, "nvprof does not store its options")

    def _um_answer(self, kind: str, switch: str) -> Capture:
        unknown = ""
        if self._kinds_are_lost:
            unknown = "the column that tells its rows apart cannot be read"
        elif not self.database.has_table(UNIFIED_MEMORY):
            unknown = "the database has no Unified Memory table"
        if unknown:
            return Capture("unknown", switch, unknown)
        if self._n_rows[kind]:
            return Capture("recorded", switch, _ROWS_ARE_THERE)
        if any(self._n_rows[name] for name in _UM_TABLES):
            # One option turns all kinds on.
            return Capture("recorded", switch, "Unified Memory was profiled, and there was none")
        if self._um_profiled is None:
            reason = (
                "its Unified Memory table is empty, and nvprof does not store whether it was on"
            )
            return Capture("unknown", switch, reason)
        if not self._um_profiled:
            reason = "the session says that Unified Memory was not profiled"
            return Capture("not_recorded", switch, reason)
        reason = "the session had it on, and its Unified Memory table is empty"
        return Capture("recorded", switch, reason)
