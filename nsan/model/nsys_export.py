"""Write a modelled capture as an nsys SQLite export, which nsan and the vendor's scripts can read.

The export says in its metadata that a model wrote it, and which of its tables are assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Final

import polars as pl

import nsan
from nsan.errors import SchemaMismatchError, UnknownNameError
from nsan.io.nsys_info import MODEL_PRODUCT
from nsan.io.sqlite_writer import SqliteWriter, writing_database
from nsan.model.nsys_ddl import SCHEMAS, Layout, layouts, schema_version
from nsan.model.nsys_rows import (
    VM_ID,
    Part,
    Texts,
    event_parts,
    gpu_rows,
    memory_rows,
    nvtx_rows,
    process_rows,
    thread_rows,
)
from nsan.schema import TABLES
from nsan.uvm import constants as uvm

__all__ = ["SCHEMAS", "ExportOptions", "Machine", "write_export"]

_ROWS_PER_PIECE: Final = 250_000
_MOST_ID: Final = (1 << 24) - 1
"""The largest process or thread that a global id holds."""

_DRIVER_VERSION: Final = 205
"""What nsys numbers the driver's version among the properties of a system."""


@dataclass(frozen=True)
class ExportOptions:
    """How a capture is recorded and exported.

    Attributes
    ----------
    schema : str
        One of :data:`SCHEMAS`, or the beginning of one.
    lazy : bool
        Only tables with rows, as nsys does; all known tables where false.
    gpu_faults, cpu_faults, memory_usage : bool
        The recording switches: without one there are no such rows, and the capture options say so
        where the schema has them.
    shuffle_seed : int or None
        Put the rows of each event table in a random order.
    """

    schema: str = "3.7.2"
    lazy: bool = True
    gpu_faults: bool = True
    cpu_faults: bool = True
    memory_usage: bool = True
    shuffle_seed: int | None = None


DEFAULT_OPTIONS: Final = ExportOptions()


@dataclass(frozen=True)
class Machine:
    """What the metadata of an export says about its making.

    Attributes
    ----------
    command : str
        Command line of the profiled program, such as ``nsan-model stream``.
    driver_note : str
        Which model, with its version and profile; it stands where the driver's version would.
    session_start_utc_ns : int
        Session start, ns since 1970.
    duration_ns : int
        Length of the session.
    """

    command: str
    driver_note: str
    session_start_utc_ns: int = 0
    duration_ns: int = 0


def write_export(
    path: Path,
    tables: Mapping[str, pl.DataFrame],
    machine: Machine,
    options: ExportOptions = DEFAULT_OPTIONS,
    *,
    overwrite: bool = False,
) -> Path:
    """Write an nsys SQLite export.

    Opening it gives the same tables again, as far as its schema and the recording switches allow:
    before 3.17 an export has no source lines, copies per row or GPUs per process; driver events,
    diagnostics and sequence numbers have no place in any.

    Parameters
    ----------
    path : Path
        The file; it gets its name when it is whole.
    tables : mapping of str to DataFrame
        By name in :mod:`nsan.schema`, with its columns; a table that is missing is empty.
    machine : Machine
        What the metadata says.
    options : ExportOptions
        Schema, switches and order.
    overwrite : bool, default False
        Replace a file that is there.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    UnknownNameError
        If there is no such schema, or a name in ``tables`` is none of a table.
    SchemaMismatchError
        If a table has other columns, or lacks a value that nsys always has.
    OutputExistsError, OutputWriteError
        If the file is there already, or cannot be written. Nothing half-written is left.
    """
    version = schema_version(options.schema)
    frames = _recorded(tables, options)
    texts = Texts(frames)
    with writing_database(path, overwrite=overwrite) as database:
        export = _Export(database, layouts(version), lazy=options.lazy)
        for _, parts in groupby(event_parts(frames, texts), key=lambda part: part.table):
            _add_events(export, list(parts), options.shuffle_seed)
        _add_context(export, frames, texts)
        _add_metadata(export, version, machine, options)
        export.finish()
    return path


def _recorded(
    tables: Mapping[str, pl.DataFrame], options: ExportOptions
) -> dict[str, pl.DataFrame]:
    """Check tables, and leave out what the switches leave out."""
    unknown = [name for name in tables if name not in TABLES]
    if unknown:
        raise UnknownNameError("table of a trace", unknown[0], TABLES)
    off = {
        "gpu_faults": not options.gpu_faults,
        "cpu_faults": not options.cpu_faults,
        "allocations": not options.memory_usage,
    }
    frames = {}
    for name, table in TABLES.items():
        if name in tables and not off.get(name, False):
            table.validate(tables[name].lazy())
            _check_ids(name, tables[name])
            frames[name] = tables[name].select(table.schema.names())
        else:
            frames[name] = table.empty().collect()
    return frames


def _check_ids(name: str, frame: pl.DataFrame) -> None:
    ids = [column for column in ("pid", "tid") if column in frame.columns]
    too_large = [f"{column!r} above {_MOST_ID}" for column in ids if _above(frame[column])]
    if too_large:
        raise SchemaMismatchError(name, [f"nsys cannot store {what}" for what in too_large])


def _above(ids: pl.Series) -> bool:
    return bool((ids > _MOST_ID).any())


class _Export:
    """An export under construction: tables appear with their first row, unless all are wanted."""

    def __init__(self, database: SqliteWriter, tables: Mapping[str, Layout], *, lazy: bool) -> None:
        self._database = database
        self._tables = tables
        self._lazy = lazy
        self._made: set[str] = set()

    def add(self, table: str, rows: pl.DataFrame, source: str | None = None) -> None:
        """Append rows to a table, without the columns that this version lacks.

        A table that it lacks keeps none. ``source`` is the table of ours that they come from.
        """
        layout = self._tables.get(table)
        if layout is None or rows.is_empty():
            return
        _check_filled(layout, rows, source or table)
        self._make(layout)
        self._database.insert(table, rows.select(c for c in rows.columns if c in layout.columns))

    def _make(self, layout: Layout) -> None:
        if layout.table not in self._made:
            self._database.create(layout.create_statement())
            self._made.add(layout.table)

    def assumed(self) -> list[str]:
        """Name the tables that this export has or will have, whose columns are assumed."""
        return sorted(
            layout.table
            for layout in self._tables.values()
            if layout.assumed and (layout.table in self._made or not self._lazy)
        )

    def finish(self) -> None:
        """Make the tables without rows, if they are wanted."""
        if not self._lazy:
            for layout in self._tables.values():
                self._make(layout)


def _check_filled(layout: Layout, rows: pl.DataFrame, source: str) -> None:
    empty = {
        column: rows[column].null_count() if column in rows.columns else rows.height
        for column in layout.required
    }
    problems = [
        f"{n} rows have nothing for {layout.table}.{column}, which nsys always fills"
        for column, n in empty.items()
        if n
    ]
    if problems:
        raise SchemaMismatchError(source, problems)


def _add_events(export: _Export, parts: list[Part], seed: int | None) -> None:
    """Fill one event table of the export, piece by piece; a random order needs the whole."""
    parts = [part for part in parts if part.frame.height]
    if seed is None:
        for part in parts:
            for piece in part.frame.iter_slices(_ROWS_PER_PIECE):
                export.add(part.table, part.rows(piece), part.source)
    elif parts:
        whole = pl.concat([part.rows(part.frame) for part in parts], how="diagonal")
        mixed = whole.sample(fraction=1, shuffle=True, seed=seed)
        export.add(parts[0].table, mixed, " and ".join(part.source for part in parts))


def _add_context(export: _Export, frames: Mapping[str, pl.DataFrame], texts: Texts) -> None:
    ranges, marks = frames["nvtx_ranges"], frames["nvtx_marks"]
    export.add("NVTX_EVENTS", nvtx_rows(ranges, marks), "nvtx_ranges and nvtx_marks")
    export.add("CUDA_GPU_MEMORY_USAGE_EVENTS", memory_rows(frames["allocations"]), "allocations")
    export.add("PROCESSES", process_rows(frames["processes"]), "processes")
    export.add("ThreadNames", thread_rows(frames, texts))
    export.add("StringIds", texts.rows())
    gpus, ordinals = gpu_rows(frames["devices"])
    export.add("TARGET_INFO_GPU", gpus, "devices")
    export.add("TARGET_INFO_CUDA_DEVICE", ordinals, "devices")


def _add_metadata(export: _Export, version: str, machine: Machine, options: ExportOptions) -> None:
    export.add("META_DATA_CAPTURE", _pairs(_capture_facts(machine, options)))
    environment = {
        "globalVid": VM_ID,
        "devStateName": MODEL_PRODUCT,
        "name": "NvDriverVersion",
        "nameEnum": _DRIVER_VERSION,
        "value": machine.driver_note,
    }
    export.add("TARGET_INFO_SYSTEM_ENV", pl.DataFrame([environment]))
    start = _utc(machine.session_start_utc_ns)
    export.add(
        "TARGET_INFO_SESSION_START_TIME",
        pl.DataFrame(
            {"utcEpochNs": machine.session_start_utc_ns, "utcTime": start, "localTime": start}
        ),
    )
    span = {"duration": machine.duration_ns, "startTime": 0, "stopTime": machine.duration_ns}
    export.add("ANALYSIS_DETAILS", pl.DataFrame([{"globalVid": VM_ID, **span}]))
    for table, labels in _enumerations().items():
        export.add(table, pl.DataFrame(labels, schema=["id", "name", "label"], orient="row"))
    # Last: it names the tables that are there.
    for table, lazy in (
        ("META_DATA_EXPORT", "EXPORT_PARAM_LAZY"),
        ("EXPORT_META_DATA", "EXPORT_LAZY"),
    ):
        facts = _export_facts(version, machine, export.assumed())
        export.add(table, _pairs({**facts, lazy: str(options.lazy).lower()}))


def _pairs(facts: Mapping[str, str]) -> pl.DataFrame:
    return pl.DataFrame({"name": list(facts), "value": list(facts.values())})


def _capture_facts(machine: Machine, options: ExportOptions) -> dict[str, str]:
    switches = {
        "COLLECT_CUDA_TRACE": True,
        "COLLECT_NVTX_TRACE": True,
        "COLLECT_UVM_GPU_PAGE_FAULTS": options.gpu_faults,
        "COLLECT_UVM_CPU_PAGE_FAULTS": options.cpu_faults,
        "COLLECT_GPU_MEMORY_USAGE": options.memory_usage,
    }
    facts = {"COMMAND": machine.command} | {name: str(on).lower() for name, on in switches.items()}
    return {f"PROCESS_0:{name}": value for name, value in facts.items()}


def _export_facts(version: str, machine: Machine, assumed: Iterable[str]) -> dict[str, str]:
    numbers = zip(("MAJOR", "MINOR", "MICRO"), version.split("."), strict=True)
    facts = {
        "EXPORT_PRODUCT_NAME": MODEL_PRODUCT,
        "EXPORT_PRODUCT_VERSION": nsan.__version__,
        "EXPORT_SCHEMA_VERSION": version,
        **{f"EXPORT_SCHEMA_VERSION_{part}": number for part, number in numbers},
        "EXPORT_CONFIG_TIME_SHIFT": "0",
        "NSAN_DRIVER_MODEL": machine.driver_note,
    }
    named = ", ".join(assumed)
    return {**facts, "NSAN_ASSUMED_TABLES": named} if named else facts


def _utc(ns: int) -> str:
    start = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=ns // 1000)
    return start.strftime("%Y-%m-%dT%H:%M:%S")


def _enumerations() -> dict[str, list[tuple[int, str, str]]]:
    """Labels of numbers, which the vendor's scripts show; in words of ours."""
    migrations = {number: f"um_{text}" for number, text in uvm.DIRECTIONS.items()}
    by_table = {
        "ENUM_CUDA_MEMCPY_OPER": {**uvm.COPY_KINDS, **migrations},
        "ENUM_CUDA_MEM_KIND": uvm.MEMORY_KINDS,
        "ENUM_CUDA_DEV_MEM_EVENT_OPER": {0: "allocation", 1: "deallocation"},
        "ENUM_CUDA_UNIF_MEM_MIGRATION": uvm.CAUSES,
        "ENUM_CUDA_UNIF_MEM_ACCESS_TYPE": uvm.ACCESSES,
    }
    return {
        table: [(number, text, text.replace("_", " ")) for number, text in labels.items()]
        for table, labels in by_table.items()
    }
