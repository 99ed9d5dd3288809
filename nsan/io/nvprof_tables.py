"""Which table and column of an nvprof database becomes which of ours.

The databases of nvprof and of the Visual Profiler hold CUPTI's activity records, one table per
kind, the same in schema versions 9 to 23 but for a few columns. Unified Memory has one table for
everything; the kind of a row says what its ``value``, ``end`` and ``flags`` mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import polars as pl

from nsan import schema
from nsan.io.nsys_tables import SIZES, TIMES, address, labelled
from nsan.io.sqlite_file import CellType
from nsan.uvm import constants as uvm

UNIFIED_MEMORY: Final = "CUPTI_ACTIVITY_KIND_UNIFIED_MEMORY_COUNTER"
STRINGS: Final = "StringTable"
DEVICES: Final = "CUPTI_ACTIVITY_KIND_DEVICE"

# CUpti_ActivityUnifiedMemoryCounterKind
_DIRECTIONS: Final = {1: "htod", 2: "dtoh", 8: "dtod"}
_CPU_FAULT, GPU_FAULT, _THRASHING, _THROTTLING, _REMOTE_MAP = 3, 4, 5, 6, 7
_DRIVER_EVENTS: Final = {
    _THRASHING: "thrashing",
    _THROTTLING: "throttling",
    _REMOTE_MAP: "remote_map",
}
_INSTANTS: Final = (_CPU_FAULT, _THRASHING, _REMOTE_MAP)
"""Kinds whose ``end`` is to be ignored (``cupti_activity.h``); it is 0 in files."""

_CPU: Final = -1
"""The CPU as ``srcId`` or ``dstId``, a signed 32-bit -1 that may also be stored unsigned."""

_MEMORY_KINDS: Final = {number + 1: label for number, label in uvm.MEMORY_KINDS.items()} | {
    0: "unknown"
}
"""CUpti_ActivityMemoryKind: one above the numbers of nsys."""

_RUNTIME_CALLS: Final = {
    13: "cudaLaunch_v3020",
    20: "cudaMalloc_v3020",
    22: "cudaFree_v3020",
    31: "cudaMemcpy_v3020",
    41: "cudaMemcpyAsync_v3020",
    49: "cudaMemset_v3020",
    51: "cudaMemsetAsync_v3020",
    131: "cudaStreamSynchronize_v3020",
    165: "cudaDeviceSynchronize_v3020",
    206: "cudaMallocManaged_v6000",
    211: "cudaLaunchKernel_v7000",
    252: "cudaMemPrefetchAsync_v8000",
    254: "cudaMemAdvise_v8000",
}
"""The calls that matter here, by callback number (``cupti_runtime_cbid.h``): numbers never change."""

_DRIVER_CALLS: Final = {
    17: "cuCtxSynchronize",
    126: "cuStreamSynchronize",
    243: "cuMemAlloc_v2",
    245: "cuMemFree_v2",
    276: "cuMemcpyHtoD_v2",
    278: "cuMemcpyDtoH_v2",
    307: "cuLaunchKernel",
    371: "cuMemAllocManaged",
    457: "cuMemAdvise",
    467: "cuMemPrefetchAsync",
}
"""The same of ``cupti_driver_cbid.h``."""


@dataclass(frozen=True)
class Context:
    """What the rows of one database have in common.

    Attributes
    ----------
    names : DataFrame
        ``id`` (Int64), ``full`` and ``short`` (String): StringTable.
    pid : int or None
        The one process; None if there are several, or none is named.
    device_id : int or None
        The one GPU in use; None if there are several.
    """

    names: pl.DataFrame
    pid: int | None
    device_id: int | None


Build = Callable[[pl.DataFrame, Context], pl.DataFrame]


@dataclass(frozen=True)
class Source:
    """A table of the database and what is made of it; as in :mod:`nsan.io.nsys_tables`."""

    table: str
    columns: Mapping[str, CellType]
    required: tuple[str, ...]
    targets: Mapping[str, Build]
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def typed(frame: pl.DataFrame, table: schema.Table) -> pl.DataFrame:
    """Give a frame the columns of a table: those that it lacks are null, others are dropped."""
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in table.schema.items()
    )


def short_name(mangled: str) -> str:
    """Take the function's own name out of a mangled one; a name of another form stays as it is.

    Examples
    --------
    >>> short_name("_Z7saxpy_kifPf"), short_name("_ZN2at6native3addIfEEvPT_"), short_name("main")
    ('saxpy_k', 'add', 'main')
    """
    head = re.match(r"_Z(?:N[VrK]*|L)?(?=\d)", mangled)
    if not head:
        return mangled
    name, at = mangled, head.end()
    nested = mangled.startswith("_ZN")
    while length := re.match(r"\d+", mangled[at:]):
        begin = at + length.end()
        at = begin + int(length[0])
        if at > len(mangled):
            return mangled
        name = mangled[begin:at]
        if not nested:
            break
    return name or mangled


def settled(rows: pl.DataFrame) -> pl.DataFrame:
    """Make the Unified Memory rows of all kinds alike.

    Parameters
    ----------
    rows : DataFrame
        ``counterKind``, ``value``, ``start`` and ``end``, among others.

    Returns
    -------
    DataFrame
        The same rows. Those that mark an instant end where they start; a value that can be no size
        or count is null. Program counters may be any number.
    """
    kind, value = pl.col("counterKind"), pl.col("value")
    instant = kind.is_in(_INSTANTS)
    believed = value.is_between(*SIZES) | (kind == _CPU_FAULT)
    return rows.with_columns(
        end=pl.when(instant).then(pl.col("start")).otherwise(pl.col("end")),
        value=pl.when(believed).then(value),
    )


def _times() -> dict[str, pl.Expr]:
    start, end = pl.col("start"), pl.col("end")
    # A row that ends before it starts is kept, with no length; the reader counts such rows.
    return {"start_ns": start, "end_ns": pl.when(end < start).then(start).otherwise(end)}


def _is_cpu(column: str) -> pl.Expr:
    return pl.col(column).is_in([_CPU, (1 << 32) + _CPU])


def _of_kinds(rows: pl.DataFrame, *kinds: int) -> pl.DataFrame:
    return rows.filter(pl.col("counterKind").is_in(kinds)).with_columns(
        **_times(), pid=pl.col("processId") % (1 << 32), va=address("address")
    )


def _migrations(rows: pl.DataFrame, context: Context) -> pl.DataFrame:
    # srcId and dstId are 0 in every file: direction and GPU must not be read from them.
    found = _of_kinds(rows, *_DIRECTIONS).with_columns(
        bytes=pl.col("value"),
        device_id=pl.lit(context.device_id, pl.Int64),
        direction=pl.col("counterKind").replace_strict(_DIRECTIONS, return_dtype=pl.String),
        cause=labelled("flags", uvm.CAUSES, schema.CAUSE),
        cause_id=pl.col("flags"),
    )
    return typed(found, schema.MIGRATIONS)


def _cpu_faults(rows: pl.DataFrame, _: Context) -> pl.DataFrame:
    found = _of_kinds(rows, _CPU_FAULT).with_columns(pc=address("value"))
    return typed(found, schema.CPU_FAULTS)


def _gpu_faults(rows: pl.DataFrame, _: Context) -> pl.DataFrame:
    found = _of_kinds(rows, GPU_FAULT).with_columns(
        device_id=pl.when(_is_cpu("srcId").not_()).then(pl.col("srcId")),
        n_page_faults=pl.col("value"),
        access=labelled("flags", uvm.ACCESSES, schema.ACCESS),
        access_id=pl.col("flags"),
    )
    return typed(found, schema.GPU_FAULTS)


def _driver_events(rows: pl.DataFrame, context: Context) -> pl.DataFrame:
    kind = pl.col("counterKind")
    involved = pl.col("flags").mod(2) == 1
    # The flags of a remote map are its cause; its ids name who maps and where the memory is.
    remote = _is_cpu("srcId") | _is_cpu("dstId")
    by_cpu = pl.when(kind == _REMOTE_MAP).then(remote).otherwise(involved)
    throttled = pl.when(_is_cpu("srcId").not_()).then(pl.col("srcId"))
    # Thrashing rows hold a bit mask of GPUs, remote maps may name the CPU: only one GPU is clear.
    only = pl.lit(context.device_id, pl.Int64)
    device = pl.when(kind == _THROTTLING).then(throttled).otherwise(only)
    found = _of_kinds(rows, *_DRIVER_EVENTS).with_columns(
        device_id=device,
        bytes=pl.when(kind != _THROTTLING).then(pl.col("value")),
        kind=kind.replace_strict(_DRIVER_EVENTS, return_dtype=pl.String),
        by_cpu=by_cpu,
    )
    return typed(found, schema.DRIVER_EVENTS)


def _gpu_work(rows: pl.DataFrame, context: Context) -> pl.DataFrame:
    return rows.with_columns(
        **_times(),
        pid=pl.lit(context.pid, pl.UInt32),
        device_id=pl.col("deviceId"),
        context_id=pl.col("contextId"),
        stream_id=pl.col("streamId"),
        correlation_id=pl.col("correlationId"),
    )


def _kernels(rows: pl.DataFrame, context: Context) -> pl.DataFrame:
    named = context.names.rename({"id": "name"})
    found = _gpu_work(rows, context).join(named, on="name", how="left", maintain_order="left")
    found = found.with_columns(
        name=pl.col("short"),
        demangled=pl.col("full"),
        grid=pl.concat_list("gridX", "gridY", "gridZ").list.to_array(3),
        block=pl.concat_list("blockX", "blockY", "blockZ").list.to_array(3),
        is_graph_launch=pl.lit(value=False),
    )
    return typed(found, schema.KERNELS)


def _copies(rows: pl.DataFrame, context: Context) -> pl.DataFrame:
    found = _gpu_work(rows, context).with_columns(
        kind=labelled("copyKind", uvm.COPY_KINDS, schema.COPY_KIND),
        kind_id=pl.col("copyKind"),
        n_operations=pl.lit(1),
    )
    return typed(found, schema.COPIES)


def _memsets(rows: pl.DataFrame, context: Context) -> pl.DataFrame:
    found = _gpu_work(rows, context).with_columns(
        kind=labelled("memoryKind", _MEMORY_KINDS, schema.MEMORY_KIND),
        kind_id=pl.col("memoryKind"),
    )
    return typed(found, schema.MEMSETS)


def _calls(names: Mapping[int, str]) -> Build:
    def build(rows: pl.DataFrame, _: Context) -> pl.DataFrame:
        number = pl.col("cbid")
        known = number.replace_strict(names, default=None, return_dtype=pl.String)
        found = rows.with_columns(
            **_times(),
            pid=pl.col("processId") % (1 << 32),
            # Stored as a signed 32-bit number.
            tid=pl.col("threadId") % (1 << 32),
            correlation_id=pl.col("correlationId"),
            name=pl.coalesce(known, pl.format("cbid {}", number)),
            return_value=pl.col("returnValue"),
        )
        return typed(found, schema.API_CALLS)

    return build


def _integers(*names: str) -> dict[str, CellType]:
    return dict.fromkeys(names, "integer")


_LIMITS: Final = {"start": (1, TIMES[1]), "end": (0, TIMES[1])}
"""CUPTI writes 0 for a time that it could not take."""

_WORK: Final = ("start", "end", "deviceId", "contextId", "streamId", "correlationId")
_KERNEL: Final = (*_WORK, "name", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
_CALL: Final = ("cbid", "start", "end", "processId", "threadId", "correlationId", "returnValue")
_SIZED: Final = ("start", "end", "deviceId", "bytes")

STREAMED: Final = (
    Source(
        UNIFIED_MEMORY,
        _integers(
            "counterKind",
            "value",
            "start",
            "end",
            "address",
            "srcId",
            "dstId",
            "processId",
            "flags",
        ),
        ("counterKind", "value", "start", "end", "address"),
        {
            "migrations": _migrations,
            "cpu_faults": _cpu_faults,
            "gpu_faults": _gpu_faults,
            "driver_events": _driver_events,
        },
        {**_LIMITS, "counterKind": (1, 8)},
    ),
    *(
        Source(
            f"CUPTI_ACTIVITY_KIND_{name}",
            _integers(*_KERNEL),
            ("start", "end", "deviceId"),
            {"kernels": _kernels},
            _LIMITS,
        )
        for name in ("CONCURRENT_KERNEL", "KERNEL", "CDP_KERNEL")
    ),
    *(
        Source(
            f"CUPTI_ACTIVITY_KIND_{name}",
            _integers(*_WORK, "bytes", "copyKind"),
            (*_SIZED, "copyKind"),
            {"copies": _copies},
            {**_LIMITS, "bytes": SIZES},
        )
        for name in ("MEMCPY", "MEMCPY2")
    ),
    Source(
        "CUPTI_ACTIVITY_KIND_MEMSET",
        _integers(*_WORK, "bytes", "memoryKind"),
        _SIZED,
        {"memsets": _memsets},
        {**_LIMITS, "bytes": SIZES},
    ),
    Source(
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        _integers(*_CALL),
        ("start", "end", "cbid"),
        {"api_calls": _calls(_RUNTIME_CALLS)},
        _LIMITS,
    ),
    Source(
        "CUPTI_ACTIVITY_KIND_DRIVER",
        _integers(*_CALL),
        ("start", "end", "cbid"),
        {"api_calls": _calls(_DRIVER_CALLS)},
        _LIMITS,
    ),
)
"""Event tables that are read range by range."""


def devices(rows: pl.DataFrame, names: pl.DataFrame) -> pl.DataFrame:
    """Describe the GPUs from the rows of the device table.

    Parameters
    ----------
    rows : DataFrame
        The columns of :data:`DEVICE_COLUMNS`.
    names : DataFrame
        As in :class:`Context`.

    Returns
    -------
    DataFrame, ``DEVICES``
        One row per GPU. Bandwidth is stored in kB/s.
    """
    named = names.select(name="id", full="full")
    found = rows.join(named, on="name", how="left", maintain_order="left").select(
        device_id="id",
        gpu_id="id",
        name="full",
        total_memory_bytes="globalMemorySize",
        memory_bytes_per_s=pl.col("globalMemoryBandwidth") * 1000,
        n_sms="numMultiprocessors",
        compute_capability=pl.format("{}.{}", "computeCapabilityMajor", "computeCapabilityMinor"),
    )
    return typed(found.unique("device_id", keep="first", maintain_order=True), schema.DEVICES)


DEVICE_COLUMNS: Final = _integers(
    "id",
    "name",
    "globalMemorySize",
    "globalMemoryBandwidth",
    "numMultiprocessors",
    "computeCapabilityMajor",
    "computeCapabilityMinor",
)
