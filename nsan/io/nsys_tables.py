"""Which table and column of an nsys export becomes which of ours.

An export has a table only when it has rows of it (unless it was made with ``--lazy=false``), and
columns come and go with the version: whatever is absent is null. Names are taken from the schemas
of nsys 2022.1 to 2026.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import polars as pl

from nsan import schema
from nsan.io.sqlite_file import CellType
from nsan.uvm import constants as uvm

TIMES: Final = (-(1 << 61), 1 << 61)
SIZES: Final = (0, 1 << 46)
"""Sizes that are believed (up to 70 TB): their sums stay far from overflow."""

COUNTS: Final = (0, 1 << 40)


@dataclass(frozen=True)
class Strings:
    """The texts of one export.

    Attributes
    ----------
    by_id : DataFrame
        ``id`` (Int64), ``value`` (String): StringIds.
    keep_paths : bool
        Keep whole paths of binaries and source files instead of their last part.
    """

    by_id: pl.DataFrame
    keep_paths: bool = False

    def resolve(self, frame: pl.DataFrame, columns: Mapping[str, str]) -> pl.DataFrame:
        """Add texts for id columns: ``{new column: id column}``; an unknown id gives null."""
        for name, source in columns.items():
            texts = self.by_id.select(pl.col("id").alias(source), pl.col("value").alias(name))
            frame = frame.join(texts, on=source, how="left", maintain_order="left")
        return frame

    def path(self, column: str) -> pl.Expr:
        """Cut a path to its last part, unless whole paths are kept."""
        return pl.col(column) if self.keep_paths else last_part(pl.col(column))


Build = Callable[[pl.DataFrame, Strings], pl.DataFrame]


@dataclass(frozen=True)
class Source:
    """A table of the export and what is made of it.

    Attributes
    ----------
    table : str
        Name in the export.
    columns : dict
        Columns to read with their cell type.
    required : tuple of str
        Columns that every row must fill: a null there is a loss.
    targets : dict
        By table of ours: how a range of rows becomes rows of it.
    limits : dict
        By column: the lowest and highest value that are believed; others are losses.
    expected : tuple of str
        Columns that every version has, although their cells may be null.
    """

    table: str
    columns: Mapping[str, CellType]
    required: tuple[str, ...]
    targets: Mapping[str, Build]
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    expected: tuple[str, ...] = ()


def last_part(path: pl.Expr) -> pl.Expr:
    """Cut paths to their last part, on either kind of slash."""
    return path.str.replace(r"(?s)^.*[/\\]([^/\\]+)[/\\]*$", "$1")


def pid_of(global_id: str) -> pl.Expr:
    """Decode the process of a globalPid or globalTid: ``(id / 2^24) mod 2^24``."""
    return (_bits(global_id) // (1 << 24) % (1 << 24)).cast(pl.UInt32).alias("pid")


def tid_of(global_id: str) -> pl.Expr:
    """Decode the thread of a globalTid: ``id mod 2^24``."""
    return (_bits(global_id) % (1 << 24)).cast(pl.UInt32).alias("tid")


def address(column: str) -> pl.Expr:
    """Reinterpret a signed address as unsigned: SQLite has no unsigned integers."""
    return _bits(column)


def _bits(column: str) -> pl.Expr:
    return pl.col(column).reinterpret(signed=False)


def labelled(column: str, labels: Mapping[int, str], dtype: pl.Enum) -> pl.Expr:
    """Turn numbers into labels: null is ``unknown``, a number without a label is ``other``."""
    text = pl.col(column).replace_strict(labels, default="other", return_dtype=pl.String)
    return pl.when(pl.col(column).is_null()).then(pl.lit("unknown")).otherwise(text).cast(dtype)


def _event() -> list[pl.Expr]:
    start = pl.col("start").alias("start_ns")
    return [
        start,
        _end().alias("end_ns"),
        pid_of("globalPid"),
        pl.col("deviceId").alias("device_id"),
    ]


def _end() -> pl.Expr:
    # A row that ends before it starts is kept, with no length; the loader counts such rows.
    start, end = pl.col("start"), pl.col("end")
    return pl.when(end < start).then(start).otherwise(end)


def _gpu_work() -> list[pl.Expr]:
    return [
        *_event(),
        pl.col("contextId").alias("context_id"),
        pl.col("streamId").alias("stream_id"),
        pl.col("correlationId").alias("correlation_id"),
    ]


def _typed(frame: pl.DataFrame, table: schema.Table, columns: list[pl.Expr]) -> pl.DataFrame:
    # Times of nsys are exact to the nanosecond: no other order is needed.
    ordered = pl.lit(None, pl.Int64).alias("sequence")
    chosen = [*columns, ordered] if "sequence" in table.schema else columns
    return frame.select(chosen).select(
        pl.col(name).cast(dtype) for name, dtype in table.schema.items()
    )


def _gpu_faults(rows: pl.DataFrame, _: Strings) -> pl.DataFrame:
    columns = [
        *_event(),
        address("address").alias("va"),
        pl.col("numberOfPageFaults").alias("n_page_faults"),
        labelled("faultAccessType", uvm.ACCESSES, schema.ACCESS).alias("access"),
        pl.col("faultAccessType").alias("access_id"),
    ]
    return _typed(rows, schema.GPU_FAULTS, columns)


def _cpu_faults(rows: pl.DataFrame, strings: Strings) -> pl.DataFrame:
    names = {"function": "CpuInstruction", "module_name": "module", "source_file": "sourceFile"}
    rows = strings.resolve(rows, names)
    columns = [
        pl.col("start").alias("start_ns"),
        pid_of("globalPid"),
        address("address").alias("va"),
        pl.coalesce(address("originalFaultPc"), address("unresolvedFaultPc")).alias("pc"),
        pl.col("function"),
        strings.path("module_name").alias("module"),
        strings.path("source_file").alias("source_file"),
        pl.col("sourceLine").alias("source_line"),
    ]
    return _typed(rows, schema.CPU_FAULTS, columns)


def _is_migration() -> pl.Expr:
    return pl.col("copyKind").is_in(list(uvm.DIRECTIONS))


def _migrations(rows: pl.DataFrame, _: Strings) -> pl.DataFrame:
    columns = [
        *_event(),
        address("virtualAddress").alias("va"),
        pl.col("bytes"),
        labelled("copyKind", uvm.DIRECTIONS, schema.DIRECTION).alias("direction"),
        labelled("migrationCause", uvm.CAUSES, schema.CAUSE).alias("cause"),
        pl.col("migrationCause").alias("cause_id"),
        pl.col("srcDeviceId").alias("src_device_id"),
        pl.col("dstDeviceId").alias("dst_device_id"),
    ]
    return _typed(rows.filter(_is_migration()), schema.MIGRATIONS, columns)


def _copies(rows: pl.DataFrame, _: Strings) -> pl.DataFrame:
    columns = [
        *_gpu_work(),
        pl.col("bytes"),
        labelled("copyKind", uvm.COPY_KINDS, schema.COPY_KIND).alias("kind"),
        pl.col("copyKind").alias("kind_id"),
        pl.col("copyCount").fill_null(1).alias("n_operations"),
    ]
    return _typed(rows.filter(_is_migration().not_()), schema.COPIES, columns)


def _memsets(rows: pl.DataFrame, _: Strings) -> pl.DataFrame:
    columns = [
        *_gpu_work(),
        pl.col("bytes"),
        labelled("memKind", uvm.MEMORY_KINDS, schema.MEMORY_KIND).alias("kind"),
        pl.col("memKind").alias("kind_id"),
    ]
    return _typed(rows, schema.MEMSETS, columns)


def _kernels(rows: pl.DataFrame, strings: Strings) -> pl.DataFrame:
    names = {"short": "shortName", "full": "demangledName", "mangled": "mangledName"}
    rows = strings.resolve(rows, names)
    columns = [
        *_gpu_work(),
        pl.coalesce("short", "full", "mangled").alias("name"),
        pl.coalesce("full", "short", "mangled").alias("demangled"),
        _triple("gridX", "gridY", "gridZ").alias("grid"),
        _triple("blockX", "blockY", "blockZ").alias("block"),
        pl.col("graphNodeId").alias("graph_node_id"),
        pl.lit(value=False).alias("is_graph_launch"),
    ]
    return _typed(rows, schema.KERNELS, columns)


def _triple(*columns: str) -> pl.Expr:
    return pl.concat_list(columns).list.to_array(3)


def _graph_launches(rows: pl.DataFrame, _: Strings) -> pl.DataFrame:
    name = pl.format("CUDA graph {}", pl.col("graphId").cast(pl.String).fill_null("?"))
    columns = [
        *_gpu_work(),
        name.alias("name"),
        name.alias("demangled"),
        pl.lit(None, pl.Array(pl.Int64, 3)).alias("grid"),
        pl.lit(None, pl.Array(pl.Int64, 3)).alias("block"),
        pl.lit(None, pl.Int64).alias("graph_node_id"),
        pl.lit(value=True).alias("is_graph_launch"),
    ]
    return _typed(rows, schema.KERNELS, columns)


def _api_calls(rows: pl.DataFrame, strings: Strings) -> pl.DataFrame:
    rows = strings.resolve(rows, {"api": "nameId"})
    columns = [
        pl.col("start").alias("start_ns"),
        _end().alias("end_ns"),
        pid_of("globalTid"),
        tid_of("globalTid"),
        pl.col("correlationId").alias("correlation_id"),
        pl.col("api").alias("name"),
        pl.col("returnValue").alias("return_value"),
    ]
    return _typed(rows, schema.API_CALLS, columns)


def _integers(*names: str) -> dict[str, CellType]:
    return dict.fromkeys(names, "integer")


_WORK: Final = ("start", "end", "globalPid", "deviceId", "contextId", "streamId", "correlationId")
_TIME_LIMITS: Final = {"start": TIMES, "end": TIMES}
_SIZE_LIMITS: Final = {**_TIME_LIMITS, "bytes": SIZES}

STREAMED: Final = (
    Source(
        "CUDA_UM_GPU_PAGE_FAULT_EVENTS",
        _integers(
            "start",
            "end",
            "globalPid",
            "deviceId",
            "address",
            "numberOfPageFaults",
            "faultAccessType",
        ),
        ("start", "end", "deviceId", "address", "numberOfPageFaults"),
        {"gpu_faults": _gpu_faults},
        {**_TIME_LIMITS, "numberOfPageFaults": COUNTS},
    ),
    Source(
        "CUDA_UM_CPU_PAGE_FAULT_EVENTS",
        _integers(
            "start",
            "globalPid",
            "address",
            "originalFaultPc",
            "CpuInstruction",
            "module",
            "unresolvedFaultPc",
            "sourceFile",
            "sourceLine",
        ),
        ("start", "address"),
        {"cpu_faults": _cpu_faults},
        {"start": TIMES},
    ),
    Source(
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        _integers(
            *_WORK,
            "bytes",
            "copyKind",
            "srcDeviceId",
            "dstDeviceId",
            "migrationCause",
            "virtualAddress",
            "copyCount",
        ),
        ("start", "end", "deviceId", "bytes", "copyKind"),
        {"migrations": _migrations, "copies": _copies},
        {**_SIZE_LIMITS, "copyCount": COUNTS},
    ),
    Source(
        "CUPTI_ACTIVITY_KIND_MEMSET",
        _integers(*_WORK, "bytes", "memKind"),
        ("start", "end", "deviceId", "bytes"),
        {"memsets": _memsets},
        _SIZE_LIMITS,
    ),
    Source(
        "CUPTI_ACTIVITY_KIND_KERNEL",
        _integers(
            *_WORK,
            "shortName",
            "demangledName",
            "mangledName",
            "gridX",
            "gridY",
            "gridZ",
            "blockX",
            "blockY",
            "blockZ",
            "graphNodeId",
        ),
        ("start", "end", "deviceId"),
        {"kernels": _kernels},
        _TIME_LIMITS,
    ),
    Source(
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        _integers(*_WORK, "graphId"),
        ("start", "end", "deviceId"),
        {"kernels": _graph_launches},
        _TIME_LIMITS,
    ),
    Source(
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        _integers("start", "end", "globalTid", "correlationId", "nameId", "returnValue"),
        ("start", "end", "nameId"),
        {"api_calls": _api_calls},
        _TIME_LIMITS,
    ),
)
"""Event tables that are read range by range."""
