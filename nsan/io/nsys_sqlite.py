"""Read one nsys export, a database or a folder of tables.

Event tables come in ranges, context tables whole, metadata by whitelist.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import polars as pl

from nsan.errors import NotAnExportError
from nsan.info import MODEL_KIND, Capture, TraceInfo
from nsan.io import launched, nsys_context, nsys_info
from nsan.io.nsys_tables import STREAMED, Source, Strings
from nsan.io.probe import display_name
from nsan.io.source import Progress, Sink
from nsan.io.sqlite_file import CellType, SqliteFile
from nsan.io.table_folder import TableFolder

ROWS_PER_RANGE: Final = 1 << 18
_WORKERS: Final = 2
_NSYS_MARKS: Final = (
    *nsys_info.EXPORT_TABLES,
    nsys_info.CAPTURE_TABLE,
    "StringIds",
    "ANALYSIS_DETAILS",
    "TARGET_INFO_SYSTEM_ENV",
    "PROCESSES",
    "NVTX_EVENTS",
    *(source.table for source in STREAMED),
)


@dataclass
class Losses:
    """What could not be read, counted per table of the export."""

    cells: dict[str, dict[str, int]] = field(default_factory=dict)
    absent: dict[str, list[str]] = field(default_factory=dict)

    def add(self, table: str, counts: Mapping[str, int]) -> None:
        """Add counts of lost cells by column."""
        for column, count in counts.items():
            if count:
                per_column = self.cells.setdefault(table, {})
                per_column[column] = per_column.get(column, 0) + count


class NsysExport:
    """One export, open for reading; a context manager.

    Parameters
    ----------
    path : Path
        What the user named: the `.sqlite` file, or what ``database`` was made of.
    database : SqliteFile or TableFolder, optional
        The export, already open, which is closed with this; the file at ``path`` without it.
    kind : str
        Kind of the source: ``nsys-sqlite``, ``nsys-report``, ``nsys-parquet`` or ``nsys-arrow``.
    keep_paths : bool
        Keep whole paths of programs, binaries and source files instead of their last part.
    rows_per_range : int
        Rows read at a time.
    """

    def __init__(
        self,
        path: Path,
        *,
        database: SqliteFile | TableFolder | None = None,
        kind: str = "nsys-sqlite",
        keep_paths: bool = False,
        rows_per_range: int = ROWS_PER_RANGE,
    ) -> None:
        self.path = path
        self.kind = kind
        self.database = SqliteFile(path) if database is None else database
        self.losses = Losses()
        self._rows_per_range = rows_per_range
        self._n_rows: dict[str, int] = defaultdict(int)
        self._pids: set[int] = set()
        self._used: set[tuple[int | None, int | None]] = set()
        self._n_source_rows: dict[str, int] = defaultdict(int)
        self._last_ns: int | None = None
        self._shift_ns = 0
        self._gpus_unclear = False
        self._shared: list[int] = []
        self._untraced = False
        try:
            self._check_kind()
            self.metadata = self._pairs(nsys_info.EXPORT_TABLES, nsys_info.EXPORT_KEYS)
            self._shift_ns = self._time_shift()
            self.strings = Strings(self._string_ids(), keep_paths=keep_paths)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> NsysExport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the database."""
        self.database.close()

    def _check_kind(self) -> None:
        if not any(map(self.database.has_table, _NSYS_MARKS)):
            names = self.database.table_names
            listed = ", ".join(n if n.isprintable() else ascii(n) for n in names[:5]) + (
                " ..." if len(names) > 5 else ""
            )
            what = f"a database of something else (tables: {listed or 'none'})"
            raise NotAnExportError(self.path, what)

    def n_source_rows(self) -> int:
        """Estimate the rows to read, from row ids."""
        tables = [source.table for source in STREAMED] + [nsys_context.NVTX.table]
        total = 0
        for table in tables:
            for first, last in self._ranges(table):
                total += last - first + 1
        return total

    def copy_tables(self, sink: Sink, progress: Progress) -> None:
        """Read every table of ours and hand it to a sink.

        Event tables come in ranges, numbered in the order of the file; context tables come whole.
        """
        with ThreadPoolExecutor(_WORKERS) as pool:
            for source in STREAMED:
                self._note_absent(source)
                for read in self._stream(source, sink, pool):
                    self._note(read)
                    self._n_source_rows[source.table] += read.n_read
                    self.losses.add(source.table, read.lost)
                    progress(source.table, read.n_read)
        for name, frame in self._context().items():
            self._n_rows[name] += frame.height
            sink(name, 0, frame)

    def _stream(self, source: Source, sink: Sink, pool: ThreadPoolExecutor) -> Iterator[_Read]:
        waiting = list(enumerate(self._ranges(source.table)))
        running: list[Future[_Read]] = []
        try:
            # Only as many ranges as workers are under way: memory stays bounded.
            while waiting or running:
                while waiting and len(running) < _WORKERS:
                    running.append(pool.submit(self._pass_on, source, *waiting.pop(0), sink))
                yield running.pop(0).result()
        finally:
            for future in running:
                future.cancel()

    def _pass_on(self, source: Source, number: int, between: tuple[int, int], sink: Sink) -> _Read:
        rows, lost = self._read(source, between)
        read = _Read(n_read=rows.height, lost=lost)
        for name, build in source.targets.items():
            frame = build(rows, self.strings)
            read.note(name, frame)
            # Two sources may feed one table: keep their numbers apart.
            sink(name, number + _FIRST_NUMBER.get(source.table, 0), frame)
        return read

    def _ranges(self, table: str) -> list[tuple[int, int]]:
        if not self.database.has_table(table):
            return []
        return self.database.row_ranges(table, rows=self._rows_per_range)

    def _note_absent(self, source: Source) -> None:
        if not self.database.has_table(source.table):
            return
        spelt = self.database.columns(source.table)
        needed = dict.fromkeys((*source.required, *source.expected))
        absent = [column for column in needed if column.lower() not in spelt]
        if absent:
            self.losses.absent[source.table] = absent

    def _read(
        self, source: Source, between: tuple[int, int]
    ) -> tuple[pl.DataFrame, dict[str, int]]:
        rows, misfits = self.database.read(source.table, dict(source.columns), between)
        spelt = self.database.columns(source.table)
        counted = [column for column in source.required if column.lower() in spelt]
        before = _nulls(rows, source.limits)
        rows = rows.with_columns(
            pl.when(pl.col(column).is_between(low, high)).then(pl.col(column))
            for column, (low, high) in source.limits.items()
        )
        # A cell that may be empty is lost where it is not, and not believed.
        for column, n in _nulls(rows, source.limits).items():
            misfits[column] = misfits.get(column, 0) + n - before[column]
        if self._shift_ns:
            times = [c for c in ("start", "end", "timestamp") if c in source.columns]
            rows = rows.with_columns(pl.col(times) - self._shift_ns)
        # A required cell is lost where it is null now, whatever made it so.
        lost = rows.select(pl.col(counted).null_count()).row(0, named=True) if counted else {}
        lost = {**misfits, **lost}
        if {"start", "end"} <= set(source.columns):
            lost["end before start"] = rows.select((pl.col("end") < pl.col("start")).sum()).item()
        return rows, lost

    def _note(self, read: _Read) -> None:
        for name, n_rows in read.n_rows.items():
            self._n_rows[name] += n_rows
        self._pids |= read.pids
        self._used |= read.used
        ends = [ns for ns in (self._last_ns, read.last_ns) if ns is not None]
        self._last_ns = max(ends, default=None)

    def _whole(self, source: Source) -> pl.DataFrame:
        self._note_absent(source)
        parts = []
        for between in self._ranges(source.table):
            rows, lost = self._read(source, between)
            self.losses.add(source.table, lost)
            parts.append(rows)
        schema_of = {name: _POLARS[kind] for name, kind in source.columns.items()}
        return pl.concat(parts) if parts else pl.DataFrame(schema=schema_of)

    def _context(self) -> dict[str, pl.DataFrame]:
        nvtx = self._whole(nsys_context.NVTX)
        last = max(
            (ns for ns in (self._last_ns, nsys_context.latest(nvtx)) if ns is not None),
            default=None,
        )
        frames = {
            "nvtx_ranges": nsys_context.nvtx_ranges(nvtx, self.strings, last),
            "nvtx_marks": nsys_context.nvtx_marks(nvtx, self.strings),
            "allocations": nsys_context.allocations(self._whole(nsys_context.MEMORY_EVENTS)),
            "diagnostics": nsys_context.diagnostics(self._whole(nsys_context.DIAGNOSTIC_EVENTS)),
        }
        messages = frames["diagnostics"]["text"].drop_nulls()
        self._untraced = bool(messages.str.contains(nsys_info.NOT_TRACED).any())
        # The profiler's own messages come from processes that need not have events.
        for name in ("nvtx_ranges", "nvtx_marks", "allocations"):
            self._pids |= _pids(frames[name])
        self._used |= _used(frames["allocations"])
        used = pl.DataFrame(
            list(self._used), schema={"pid": pl.Int64, "device_id": pl.Int64}, orient="row"
        )
        named = self._rows("PROCESSES", {"globalPid": "integer", "name": "text"})
        frames["processes"] = nsys_context.processes(named, sorted(self._pids), self.strings)
        frames["devices"] = nsys_context.devices(self._gpus(), self._ordinals(), used)
        return frames

    def _gpus(self) -> pl.DataFrame:
        numbers = (
            "id",
            "cuDevice",
            "deviceId",
            "totalMemory",
            "memoryBandwidth",
            "smCount",
            "computeMajor",
            "computeMinor",
        )
        columns: dict[str, CellType] = dict.fromkeys(numbers, "integer")
        rows = self._rows("TARGET_INFO_GPU", {**columns, "name": "text", "chipName": "text"})
        # Before 2022 the table had the ordinal only, as deviceId.
        return rows.with_columns(cuDevice=pl.coalesce("cuDevice", "deviceId"))

    def _ordinals(self) -> pl.DataFrame:
        columns: dict[str, CellType] = {"gpuId": "integer", "cudaId": "integer", "pid": "integer"}
        rows = self._whole(Source("TARGET_INFO_CUDA_DEVICE", columns, (), {}, {"pid": _PIDS}))
        # Without this mapping two processes' device 0 cannot be told apart, or joined.
        unmapped = rows.select(pl.any_horizontal(pl.all().is_null()).any()).item()
        self._gpus_unclear = bool(unmapped) and len({pid for pid, _ in self._used}) > 1
        mapped = set(rows.select("pid", "cudaId").rows())
        users = Counter(device for pid, device in self._used if (pid, device) not in mapped)
        self._shared = sorted(device for device, n in users.items() if n > 1 and device is not None)
        return rows

    def _rows(self, table: str, columns: dict[str, CellType]) -> pl.DataFrame:
        return self._whole(Source(table, columns, (), {}))

    def _string_ids(self) -> pl.DataFrame:
        rows = self._whole(nsys_context.STRING_IDS)
        return rows.drop_nulls("id").unique("id", keep="first", maintain_order=True)

    def _pairs(self, tables: Sequence[str], keys: Sequence[str]) -> dict[str, list[str]]:
        """Read the values of whitelisted names out of name/value tables."""
        found: dict[str, list[str]] = {}
        for table in tables:
            rows = self._rows(table, {"name": "text", "value": "text"})
            # Options of one process carry its number before a colon.
            bare = pl.col("name").str.replace(r"^PROCESS_\d+:", "")
            rows = rows.with_columns(bare).filter(pl.col("name").is_in(list(keys)))
            for name, value in rows.drop_nulls().select("name", "value").iter_rows():
                found.setdefault(name, []).append(value)
        return found

    def _time_shift(self) -> int:
        """Nanoseconds that the export added to every time (``--ts-shift``, ``--ts-normalize``)."""
        text = self._one("EXPORT_CONFIG_TIME_SHIFT") or ""
        return int(text) if re.fullmatch(r"-?\d{1,18}|-?1\d{18}", text) else 0

    def _session_start(self) -> int | None:
        rows = self._rows("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": "integer"})
        return rows["utcEpochNs"].drop_nulls().first() if rows.height else None  # type: ignore[return-value]

    def _one(self, key: str) -> str | None:
        return self.metadata.get(key, [None])[0]

    def info(self) -> TraceInfo:
        """Describe the capture; call it after :meth:`copy_tables`, whose rows decide."""
        environment = self._pairs([nsys_info.ENVIRONMENT_TABLE], nsys_info.ENVIRONMENT_KEYS)
        options = self._pairs([nsys_info.CAPTURE_TABLE], nsys_info.CAPTURE_KEYS)
        first = {key: values[0] for key, values in environment.items()}
        architecture = first.get("CpuArchitecture")
        modelled = self._one("EXPORT_PRODUCT_NAME") == nsys_info.MODEL_PRODUCT
        return TraceInfo(
            source=display_name(self.path),
            kind=MODEL_KIND if modelled else self.kind,
            nsys_version=None if modelled else self._one("EXPORT_PRODUCT_VERSION"),
            export_schema=self._one("EXPORT_SCHEMA_VERSION"),
            session_start_utc_ns=self._session_start(),
            driver_version=nsys_info.driver_version(first.get("NvDriverVersion")),
            cuda_driver_version=first.get("CudaDriverVersion"),
            cpu=first.get("CpuDescription"),
            cpu_architecture=architecture,
            platform=nsys_info.platform_of(first.get("SoftwareReleaseVersion"), architecture),
            graph_mode=options.get("CUDA_GRAPH_TRACE_OPTIONS:MODE", [None])[0],
            capture={kind: self._answer(kind, options) for kind in nsys_info.SWITCHES},
            losses=self.losses.cells,
            absent_columns=self.losses.absent,
            shared_ordinals=self._shared,
            warnings=[text for text in [getattr(self.database, "warning", "")] if text],
            doubtful=self._doubtful(),
            rank=launched.recorded_rank(self.database),
        )

    def _doubtful(self) -> list[str]:
        """Name the figures whose rows may be incomplete or doubled, whatever their values say."""
        names = self._damaged("CUPTI_ACTIVITY_KIND_RUNTIME", "nameId") or (
            self._n_rows["api_calls"] > 0
            and (not self.strings.by_id.height or self._damaged("StringIds", "id", "value"))
        )
        found = {
            "span": self._damaged("CUPTI_ACTIVITY_KIND_MEMCPY", "copyKind")
            or self._damaged(nsys_context.NVTX.table, "start", "end", "eventType"),
            "managed_allocations": self._damaged(nsys_context.MEMORY_EVENTS.table, *_PAIRING),
            "managed_calls": names or self._withheld("CUPTI_ACTIVITY_KIND_RUNTIME"),
            "gpus": self._gpus_unclear,
        }
        return [name for name, doubt in found.items() if doubt]

    def _damaged(self, table: str, *columns: str) -> bool:
        lost, absent = self.losses.cells.get(table, {}), self.losses.absent.get(table, [])
        return any(lost.get(column) or column in absent for column in columns)

    def _withheld(self, table: str) -> bool:
        """Say whether a table is missing although this export makes tables without rows."""
        return not self.database.has_table(table) and self._lazy() is False

    def _answer(self, kind: str, options: dict[str, list[str]]) -> Capture:
        table, ours, deciding = _EVIDENCE[kind]
        n_rows = sum(self._n_rows[name] for name in ours)
        return nsys_info.answer(
            kind,
            nsys_info.Evidence(
                n_rows=self._n_source_rows[table] if kind == "kernels" else n_rows,
                has_table=self.database.has_table(table),
                readable=deciding is None or not self._damaged(table, deciding),
                lazy=self._lazy(),
                option=nsys_info.option_of(kind, options),
                cuda_seen=any(self._n_rows[name] for name in _CUDA_TABLES),
                refused=self._untraced,
            ),
        )

    def _lazy(self) -> bool | None:
        """Say whether the export leaves out tables without rows; None where it does not say."""
        if self._one("EXPORT_PARAM_TABLES_TO_EXPORT"):
            return False
        return nsys_info.is_true(self._one("EXPORT_PARAM_LAZY") or self._one("EXPORT_LAZY"))


@dataclass
class _Read:
    """What a range of rows was, once it has been passed on."""

    n_read: int
    lost: dict[str, int]
    n_rows: dict[str, int] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)
    used: set[tuple[int | None, int | None]] = field(default_factory=set)
    last_ns: int | None = None

    def note(self, name: str, frame: pl.DataFrame) -> None:
        self.n_rows[name] = frame.height
        self.pids |= _pids(frame)
        self.used |= _used(frame)
        last = frame["end_ns" if "end_ns" in frame.columns else "start_ns"].max()
        if isinstance(last, int):
            self.last_ns = last if self.last_ns is None else max(last, self.last_ns)


def _nulls(rows: pl.DataFrame, columns: Iterable[str]) -> dict[str, int]:
    return {column: rows[column].null_count() for column in columns}


def _pids(frame: pl.DataFrame) -> set[int]:
    return set(frame["pid"].drop_nulls().unique())


def _used(frame: pl.DataFrame) -> set[tuple[int | None, int | None]]:
    if "device_id" not in frame.columns:
        return set()
    return set(frame.select("pid", "device_id").unique().rows())


_PIDS: Final = (0, (1 << 32) - 1)
_PAIRING: Final = ("start", "globalPid", "address", "memKind", "memoryOperationType")
"""What pairs allocations with releases, and tells managed ones apart."""

_FIRST_NUMBER: Final = {"CUPTI_ACTIVITY_KIND_GRAPH_TRACE": 1 << 20}
_POLARS: Final[dict[CellType, type[pl.DataType]]] = {
    "integer": pl.Int64,
    "real": pl.Float64,
    "text": pl.String,
}
_CUDA_TABLES: Final = (
    "gpu_faults",
    "cpu_faults",
    "migrations",
    "copies",
    "memsets",
    "kernels",
    "api_calls",
    "allocations",
)
_EVIDENCE: Final[dict[str, tuple[str, tuple[str, ...], str | None]]] = {
    "gpu_faults": ("CUDA_UM_GPU_PAGE_FAULT_EVENTS", ("gpu_faults",), None),
    "cpu_faults": ("CUDA_UM_CPU_PAGE_FAULT_EVENTS", ("cpu_faults",), None),
    "migrations": ("CUPTI_ACTIVITY_KIND_MEMCPY", ("migrations",), "copyKind"),
    "allocations": ("CUDA_GPU_MEMORY_USAGE_EVENTS", ("allocations",), "memoryOperationType"),
    "nvtx": ("NVTX_EVENTS", ("nvtx_ranges", "nvtx_marks"), "eventType"),
    "kernels": ("CUPTI_ACTIVITY_KIND_KERNEL", ("kernels",), None),
}
