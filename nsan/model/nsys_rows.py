"""Rows of ours as rows of an nsys export: the inverse of :mod:`nsan.io.nsys_tables`.

What nsys always fills and we do not record (contexts, registers, identifiers of grids) gets what the
default context and a plain kernel have; what it may leave empty stays null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import polars as pl

from nsan.io.nsys_context import DOMAIN_CREATE, MARKS, PUSH_POP, START_END
from nsan.uvm import constants as uvm

VM_ID: Final = 1 << 48
"""The virtual machine part of a global id: the first one, as in real exports."""

_TEXTS: Final = {
    "cpu_faults": ("function", "module", "source_file"),
    "kernels": ("name", "demangled"),
    "api_calls": ("name",),
    "processes": ("name",),
}
"""Columns of ours whose texts an export holds once, in StringIds."""

_NO_TEXT: Final = 0
_UM_MEMORY: Final = 7
"""``srcKind`` and ``dstKind`` of migrations: CUPTI calls either side's memory unknown."""

_DEFAULT_CONTEXT: Final = 1
_DEFAULT_STREAM: Final = 7
_DRIVER_API: Final = r"^cu[A-Z]"


@dataclass(frozen=True)
class Part:
    """Rows of ours that go into a table of an export.

    Attributes
    ----------
    table : str
        Table of the export.
    source : str
        Table of ours.
    frame : DataFrame
        Its rows.
    columns : dict
        How the columns of the export follow from ours; a version may lack some of them.
    """

    table: str
    source: str
    frame: pl.DataFrame
    columns: Mapping[str, pl.Expr]

    def rows(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Make rows of the export of some rows of :attr:`frame`."""
        return frame.select(expression.alias(name) for name, expression in self.columns.items())


class Texts:
    """The texts of an export; the first has number 1, and 0 means none.

    Parameters
    ----------
    frames : mapping of str to DataFrame
        Tables of ours, by name.
    """

    def __init__(self, frames: Mapping[str, pl.DataFrame]) -> None:
        columns = [frames[table][column] for table, names in _TEXTS.items() for column in names]
        found = pl.concat([column.unique(maintain_order=True).alias("text") for column in columns])
        self.values = found.drop_nulls().unique(maintain_order=True)
        self._numbers = pl.Enum(self.values)

    def rows(self) -> pl.DataFrame:
        """Rows of StringIds."""
        ids = pl.int_range(1, self.values.len() + 1, dtype=pl.Int64, eager=True)
        return pl.DataFrame({"id": ids, "value": self.values})

    def number(self, column: str) -> pl.Expr:
        """Give the number of a text."""
        position = pl.col(column).cast(self._numbers).to_physical().cast(pl.Int64)
        return (position + 1).fill_null(_NO_TEXT)


def event_parts(frames: Mapping[str, pl.DataFrame], texts: Texts) -> Iterator[Part]:
    """Say which tables of an export hold the events of ours, and how.

    Parameters
    ----------
    frames : mapping of str to DataFrame
        Tables of ours, by name.
    texts : Texts
        Texts of these frames.
    """
    kernels = frames["kernels"]
    is_graph = pl.col("is_graph_launch").fill_null(value=False)
    plan = (
        ("CUDA_UM_GPU_PAGE_FAULT_EVENTS", "gpu_faults", _gpu_faults(), None),
        ("CUDA_UM_CPU_PAGE_FAULT_EVENTS", "cpu_faults", _cpu_faults(texts), None),
        ("CUPTI_ACTIVITY_KIND_MEMCPY", "migrations", _migrations(), None),
        ("CUPTI_ACTIVITY_KIND_MEMCPY", "copies", _copies(), None),
        ("CUPTI_ACTIVITY_KIND_MEMSET", "memsets", _memsets(), None),
        ("CUPTI_ACTIVITY_KIND_KERNEL", "kernels", _kernels(texts), kernels.filter(~is_graph)),
        ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "kernels", _graphs(), kernels.filter(is_graph)),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "api_calls", _api_calls(texts), None),
    )
    for table, source, columns, rows in plan:
        yield Part(table, source, frames[source] if rows is None else rows, columns)


def _just(value: int | None) -> pl.Expr:
    return pl.lit(value, pl.Int64)


def _global_pid() -> pl.Expr:
    return pl.col("pid").cast(pl.Int64) * (1 << 24) + VM_ID


def _global_tid() -> pl.Expr:
    return _global_pid() + pl.col("tid").cast(pl.Int64).fill_null(0)


def _signed(column: str) -> pl.Expr:
    """Reinterpret an address: SQLite has no unsigned integers."""
    return pl.col(column).reinterpret(signed=True)


def _number(label: str, labels: Mapping[int, str], recorded: str | None = None) -> pl.Expr:
    """Give the number of a label: the recorded one if there is one, else what labels say."""
    numbers = {text: number for number, text in labels.items()}
    found = (
        pl.col(label).cast(pl.String).replace_strict(numbers, default=None, return_dtype=pl.Int64)
    )
    return found if recorded is None else pl.coalesce(recorded, found)


def _named(labels: Mapping[int, str]) -> dict[int, str]:
    """Leave out the label of null."""
    return {number: text for number, text in labels.items() if text != "unknown"}


def _event() -> dict[str, pl.Expr]:
    return {
        "start": pl.col("start_ns"),
        "end": pl.col("end_ns"),
        "globalPid": _global_pid(),
        "deviceId": pl.col("device_id"),
    }


def _gpu_work() -> dict[str, pl.Expr]:
    return {
        **_event(),
        "contextId": pl.col("context_id").fill_null(_DEFAULT_CONTEXT),
        "greenContextId": _just(0),
        "streamId": pl.col("stream_id").fill_null(_DEFAULT_STREAM),
        "correlationId": pl.col("correlation_id"),
    }


def _gpu_faults() -> dict[str, pl.Expr]:
    return {
        **_event(),
        "address": _signed("va"),
        "numberOfPageFaults": pl.col("n_page_faults"),
        "faultAccessType": _number("access", uvm.ACCESSES, "access_id"),
    }


def _cpu_faults(texts: Texts) -> dict[str, pl.Expr]:
    return {
        "start": pl.col("start_ns"),
        "globalPid": _global_pid(),
        "address": _signed("va"),
        "originalFaultPc": _signed("pc"),
        "CpuInstruction": texts.number("function"),
        "module": texts.number("module"),
        "sourceFile": texts.number("source_file").replace(_NO_TEXT, None),
        "sourceLine": pl.col("source_line"),
    }


def _migrations() -> dict[str, pl.Expr]:
    return {
        **_event(),
        "contextId": _just(0),
        "streamId": _just(0),
        "correlationId": _just(0),
        "bytes": pl.col("bytes"),
        "copyKind": _number("direction", uvm.DIRECTIONS),
        "srcKind": _just(_UM_MEMORY),
        "dstKind": _just(_UM_MEMORY),
        "srcDeviceId": pl.col("src_device_id"),
        "dstDeviceId": pl.col("dst_device_id"),
        "migrationCause": _number("cause", _named(uvm.CAUSES), "cause_id"),
        "virtualAddress": _signed("va"),
    }


def _copies() -> dict[str, pl.Expr]:
    return {
        **_gpu_work(),
        "bytes": pl.col("bytes"),
        "copyKind": _number("kind", uvm.COPY_KINDS, "kind_id"),
        "srcKind": _just(_UM_MEMORY),
        "dstKind": _just(_UM_MEMORY),
        "copyCount": pl.col("n_operations"),
    }


def _memsets() -> dict[str, pl.Expr]:
    return {
        **_gpu_work(),
        "value": _just(0),
        "bytes": pl.col("bytes"),
        "memKind": _number("kind", _named(uvm.MEMORY_KINDS), "kind_id"),
    }


def _kernels(texts: Texts) -> dict[str, pl.Expr]:
    sizes = {
        f"{name}{axis}": pl.col(name).arr.get(at)
        for name in ("grid", "block")
        for at, axis in enumerate("XYZ")
    }
    plain = {
        "launchType": 1,
        "cacheConfig": 1,
        "registersPerThread": 32,
        "staticSharedMemory": 0,
        "dynamicSharedMemory": 0,
        "localMemoryPerThread": 0,
        "localMemoryTotal": 0,
        "sharedMemoryLimitConfig": 0,
    }
    return {
        **_gpu_work(),
        "demangledName": texts.number("demangled"),
        "shortName": texts.number("name"),
        **sizes,
        **{name: _just(value) for name, value in plain.items()},
        "gridId": pl.col("correlation_id").fill_null(0),
        "graphNodeId": pl.col("graph_node_id"),
        "tensorSizeMinusOneElements": pl.lit("[]"),
    }


def _graphs() -> dict[str, pl.Expr]:
    graph = pl.col("name").str.extract(r"(\d+)$").cast(pl.Int64)
    return {**_gpu_work(), "graphId": graph, "graphExecId": _just(0)}


def _api_calls(texts: Texts) -> dict[str, pl.Expr]:
    return {
        "start": pl.col("start_ns"),
        "end": pl.col("end_ns"),
        "eventClass": pl.col("name")
        .str.contains(_DRIVER_API)
        .fill_null(value=False)
        .cast(pl.Int64),
        "globalTid": _global_tid(),
        "correlationId": pl.col("correlation_id"),
        "nameId": texts.number("name"),
        "returnValue": pl.col("return_value").fill_null(0),
    }


def nvtx_rows(ranges: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    """Make rows of NVTX_EVENTS: domains, then ranges, then marks.

    Parameters
    ----------
    ranges : DataFrame, ``NVTX_RANGES``
        One row per range; one that was not closed has no end.
    marks : DataFrame, ``NVTX_MARKS``
        One row per mark.

    Returns
    -------
    DataFrame
        Columns of NVTX_EVENTS that say something.
    """
    kinds = {"push_pop": PUSH_POP[0], "start_end": START_END[0]}
    shared = ("start_ns", "pid", "tid", "domain", "name")
    rows = pl.concat(
        [
            ranges.select(
                *shared,
                end=pl.when("closed").then("end_ns"),
                eventType=pl.col("kind")
                .cast(pl.String)
                .replace_strict(kinds, return_dtype=pl.Int64),
            ),
            marks.select(*shared, end=_just(None), eventType=_just(MARKS[0])),
        ]
    )
    names = pl.Enum(rows["domain"].drop_nulls().unique(maintain_order=True))
    rows = rows.with_columns(
        domainId=(pl.col("domain").cast(names).to_physical().cast(pl.Int64) + 1).fill_null(0)
    )
    domains = (
        rows.filter(pl.col("domainId") > 0)
        .group_by("pid", "domainId", maintain_order=True)
        .agg(pl.col("start_ns").min(), pl.col("tid", "domain").first())
        .with_columns(name="domain", end=_just(None), eventType=_just(DOMAIN_CREATE))
    )
    return pl.concat([domains.select(rows.columns), rows]).select(
        pl.col("start_ns").alias("start"),
        "end",
        "eventType",
        pl.col("name").alias("text"),
        _global_tid().alias("globalTid"),
        "domainId",
    )


def memory_rows(allocations: pl.DataFrame) -> pl.DataFrame:
    """Make rows of CUDA_GPU_MEMORY_USAGE_EVENTS, by time.

    Parameters
    ----------
    allocations : DataFrame, ``ALLOCATIONS``
        One row per allocation: it becomes one row where it is allocated and one where it is released.
    """
    # The call that made an allocation is not the one that releases it.
    calls = {
        "alloc_ns": pl.col("correlation_id"),
        "free_ns": pl.when(pl.col("alloc_ns").is_null()).then("correlation_id"),
    }
    parts = [
        allocations.filter(pl.col(time).is_not_null()).select(
            start=time,
            globalPid=_global_pid(),
            deviceId="device_id",
            contextId=_just(_DEFAULT_CONTEXT),
            address=_signed("va"),
            pc=_just(0),
            bytes="bytes",
            memKind=_number("kind", uvm.MEMORY_KINDS),
            memoryOperationType=_just(operation),
            name="name",
            correlationId=calls[time],
        )
        for operation, time in enumerate(calls)
    ]
    return pl.concat(parts).sort("start", maintain_order=True)


def gpu_rows(devices: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Make rows of TARGET_INFO_GPU, one per GPU, and of TARGET_INFO_CUDA_DEVICE, one per process.

    Parameters
    ----------
    devices : DataFrame, ``DEVICES``
        One row per GPU, or per GPU and process; one that only says an ordinal describes no GPU.
    """
    said = [name for name in devices.columns if name not in {"device_id", "pid"}]
    described = devices.filter(pl.any_horizontal(pl.col(said).is_not_null()))
    # A GPU without a number gets the next free one.
    unnumbered = pl.col("gpu_id").is_null()
    free = described.select((pl.col("gpu_id").max() + 1).fill_null(0)).item()
    described = described.with_columns(
        gpu_id=pl.when(unnumbered)
        .then(unnumbered.cast(pl.Int64).cum_sum() - 1 + free)
        .otherwise("gpu_id")
    )
    version = pl.col("compute_capability").str.split_exact(".", 1).struct
    major, minor = (version.field(f"field_{at}").cast(pl.Int64, strict=False) for at in (0, 1))
    gpus = described.sort("pid", nulls_last=False, maintain_order=True).unique(
        "gpu_id", keep="first", maintain_order=True
    )
    rows = gpus.sort("gpu_id").select(
        vmId=_just(VM_ID),
        id="gpu_id",
        name="name",
        totalMemory="total_memory_bytes",
        memoryBandwidth="memory_bytes_per_s",
        smCount="n_sms",
        chipName="chip",
        cuDevice="device_id",
        computeMajor=major,
        computeMinor=minor,
        smMajor=major,
        smMinor=minor,
    )
    numbered = pl.concat([described, devices.join(described, on=["device_id", "pid"], how="anti")])
    mapped = numbered.drop_nulls("pid").select(
        gpuId="gpu_id", cudaId="device_id", pid=pl.col("pid").cast(pl.Int64)
    )
    return rows, mapped


def process_rows(processes: pl.DataFrame) -> pl.DataFrame:
    """Make rows of PROCESSES.

    Parameters
    ----------
    processes : DataFrame, ``PROCESSES``
        One row per process.
    """
    return processes.select(
        _global_pid().alias("globalPid"), pl.col("pid").cast(pl.Int64), pl.col("name")
    )


def thread_rows(frames: Mapping[str, pl.DataFrame], texts: Texts) -> pl.DataFrame:
    """Make rows of ThreadNames: every thread has the name of its program, as on Linux.

    Parameters
    ----------
    frames : mapping of str to DataFrame
        Tables of ours, by name.
    texts : Texts
        Texts of these frames.
    """
    tables = ("api_calls", "nvtx_ranges", "nvtx_marks")
    threads = pl.concat([frames[table].select("pid", "tid") for table in tables])
    named = (
        threads.drop_nulls()
        .unique(maintain_order=True)
        .join(
            frames["processes"].unique("pid", keep="first"),
            on="pid",
            how="left",
            maintain_order="left",
        )
    )
    return named.select(nameId=texts.number("name"), globalTid=_global_tid())
