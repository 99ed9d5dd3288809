"""The tables of a trace: every column with its type, unit and meaning, in one place.

Times are Int64 nanoseconds from the session start, intervals are half-open
``[start_ns, end_ns)``, addresses are UInt64. An id means something only together with its process.
A null is a value that the export does not have or that could not be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import polars as pl

from nsan.errors import SchemaMismatchError
from nsan.uvm import constants as uvm

DIRECTION: Final = pl.Enum([*uvm.DIRECTIONS.values()])
CAUSE: Final = pl.Enum([*uvm.CAUSES.values(), "other"])
ACCESS: Final = pl.Enum([*uvm.ACCESSES.values(), "other"])
COPY_KIND: Final = pl.Enum([*uvm.COPY_KINDS.values(), "other"])
MEMORY_KIND: Final = pl.Enum([*uvm.MEMORY_KINDS.values(), "other"])
RANGE_KIND: Final = pl.Enum(["push_pop", "start_end"])
DRIVER_EVENT: Final = pl.Enum(["thrashing", "throttling", "remote_map"])
SEVERITY: Final = pl.Enum(["unknown", "information", "warning", "error", "other"])


@dataclass(frozen=True)
class Column:
    """One column: ``unit`` is what one step of a number means, ``doc`` what the value says."""

    name: str
    dtype: pl.DataType | type[pl.DataType]
    unit: str
    doc: str


@dataclass(frozen=True)
class Table:
    """A table of a trace; ``row`` says what one row is."""

    name: str
    row: str
    columns: tuple[Column, ...]

    @cached_property
    def schema(self) -> pl.Schema:
        """The polars schema, in column order."""
        return pl.Schema({column.name: column.dtype for column in self.columns})

    @cached_property
    def _nothing(self) -> pl.DataFrame:
        return pl.DataFrame(schema=self.schema)

    def empty(self) -> pl.LazyFrame:
        """Return a frame with these columns and no row."""
        return self._nothing.lazy()

    def validate(self, frame: pl.LazyFrame) -> pl.LazyFrame:
        """Return the frame itself if its columns are this table's; name each wrong one if not.

        Raises
        ------
        SchemaMismatchError
            If a column is missing, unexpected or of another type.
        """
        got = frame.collect_schema()
        problems = [
            f"column {name!r} is {got[name]} instead of {dtype}"
            if name in got
            else f"no column {name!r}"
            for name, dtype in self.schema.items()
            if got.get(name) != dtype
        ]
        problems += [f"unexpected column {name!r}" for name in got if name not in self.schema]
        if problems:
            raise SchemaMismatchError(self.name, problems)
        return frame


_START = Column("start_ns", pl.Int64, "ns", "Start, from the session start.")
_END = Column("end_ns", pl.Int64, "ns", "End, exclusive.")
_PID = Column("pid", pl.UInt32, "id", "Process.")
_TID = Column("tid", pl.UInt32, "id", "Thread.")
_DEVICE = Column("device_id", pl.Int64, "id", "CUDA ordinal of the GPU in its process.")
_VA = Column("va", pl.UInt64, "byte address", "Virtual address.")
_BYTES = Column("bytes", pl.Int64, "byte", "Size.")
_CONTEXT = Column("context_id", pl.Int64, "id", "CUDA context.")
_STREAM = Column("stream_id", pl.Int64, "id", "CUDA stream.")
_CORRELATION = Column(
    "correlation_id", pl.Int64, "id", "Pairs GPU work with its API call; 0 and null mean none."
)
_SEQUENCE = Column(
    "sequence",
    pl.Int64,
    "rank",
    "Exact order among all events, where start times are coarser than it (nvprof text); else null.",
)
_EVENT = (_START, _END, _PID, _DEVICE)
_GPU_WORK = (*_EVENT, _CONTEXT, _STREAM, _CORRELATION)

GPU_FAULTS: Final = Table(
    "gpu_faults",
    "one driver batch of GPU page faults, named by its lowest faulted page",
    (
        Column("start_ns", pl.Int64, "ns", "GPU time at which the fault was raised."),
        Column("end_ns", pl.Int64, "ns", "GPU time of the finished replay: identifies the batch."),
        _PID,
        _DEVICE,
        Column("va", pl.UInt64, "byte address", "Lowest faulted page of the batch."),
        Column("n_page_faults", pl.Int64, "faults", "Recorded count: entries on that page only."),
        Column("access", ACCESS, "label", "Access type of that page."),
        Column("access_id", pl.Int64, "number", "Access type as recorded."),
        _SEQUENCE,
    ),
)

CPU_FAULTS: Final = Table(
    "cpu_faults",
    "one CPU page fault on managed memory",
    (
        Column("start_ns", pl.Int64, "ns", "CPU time at which the driver starts handling it."),
        _PID,
        _VA,
        Column("pc", pl.UInt64, "byte address", "Program counter of the faulting instruction."),
        Column("function", pl.String, "text", "Function of the instruction."),
        Column("module", pl.String, "text", "Binary that holds it; last part of its path."),
        Column("source_file", pl.String, "text", "Source file; last part of its path."),
        Column("source_line", pl.Int64, "line", "Source line."),
        _SEQUENCE,
    ),
)

MIGRATIONS: Final = Table(
    "migrations",
    "one contiguous run of managed memory moved between processors",
    (
        *_EVENT,
        Column("va", pl.UInt64, "byte address", "First byte moved."),
        _BYTES,
        Column(
            "direction", DIRECTION, "label", "Host to device, device to host, device to device."
        ),
        Column("cause", CAUSE, "label", "Why; `coherence` is a page fault."),
        Column("cause_id", pl.Int64, "number", "Cause as recorded."),
        Column("src_device_id", pl.Int64, "id", "Source device as recorded."),
        Column("dst_device_id", pl.Int64, "id", "Destination device as recorded."),
        _SEQUENCE,
    ),
)

COPIES: Final = Table(
    "copies",
    "one explicit copy (cudaMemcpy and the like)",
    (
        *_GPU_WORK,
        _BYTES,
        Column("kind", COPY_KIND, "label", "Direction of the copy."),
        Column("kind_id", pl.Int64, "number", "Kind as recorded."),
        Column("n_operations", pl.Int64, "copies", "Copies that this row stands for (copyCount)."),
        _SEQUENCE,
    ),
)

MEMSETS: Final = Table(
    "memsets",
    "one memset on a GPU",
    (
        *_GPU_WORK,
        _BYTES,
        Column("kind", MEMORY_KIND, "label", "Kind of memory that is set."),
        Column("kind_id", pl.Int64, "number", "Memory kind as recorded."),
        _SEQUENCE,
    ),
)

KERNELS: Final = Table(
    "kernels",
    "one kernel, or one launch of a whole CUDA graph",
    (
        *_GPU_WORK,
        Column("name", pl.String, "text", "Short name."),
        Column("demangled", pl.String, "text", "Full demangled name."),
        Column("grid", pl.Array(pl.Int64, 3), "thread blocks", "Grid, x y z."),
        Column("block", pl.Array(pl.Int64, 3), "threads", "Thread block, x y z."),
        Column("graph_node_id", pl.Int64, "id", "Node of a CUDA graph, where it is one."),
        Column("is_graph_launch", pl.Boolean, "flag", "The row is a whole graph, not one kernel."),
        _SEQUENCE,
    ),
)

DRIVER_EVENTS: Final = Table(
    "driver_events",
    "one measure of the driver against ping-pong; nvprof recorded these, nsys has no table for them",
    (
        *_EVENT,
        _VA,
        _BYTES,
        Column("kind", DRIVER_EVENT, "label", "Thrashing detected, access throttled, remote map."),
        Column("by_cpu", pl.Boolean, "flag", "It concerns the CPU: involved, or throttled."),
        _SEQUENCE,
    ),
)

API_CALLS: Final = Table(
    "api_calls",
    "one CUDA API call",
    (
        _START,
        _END,
        _PID,
        _TID,
        _CORRELATION,
        Column("name", pl.String, "text", "API function, with its version suffix."),
        Column("return_value", pl.Int64, "number", "Status; 0 is success."),
    ),
)

NVTX_RANGES: Final = Table(
    "nvtx_ranges",
    "one NVTX range",
    (
        _START,
        Column("end_ns", pl.Int64, "ns", "End; the end of the trace where `closed` is false."),
        _PID,
        _TID,
        Column("domain", pl.String, "text", "Domain name; null is the default domain."),
        Column("name", pl.String, "text", "Text of the range."),
        Column("kind", RANGE_KIND, "label", "Pushed and popped, or started and ended."),
        Column("depth", pl.Int64, "ranges", "Pushed ranges of the thread and domain around it."),
        Column("parent", pl.Int64, "id", "`range_id` of the pushed range around it."),
        Column("closed", pl.Boolean, "flag", "The program closed it."),
        Column("range_id", pl.Int64, "id", "Number of the range in this trace."),
    ),
)

NVTX_MARKS: Final = Table(
    "nvtx_marks",
    "one NVTX mark, an instant",
    (
        _START,
        _PID,
        _TID,
        Column("domain", pl.String, "text", "Domain name; null is the default domain."),
        Column("name", pl.String, "text", "Text of the mark."),
    ),
)

ALLOCATIONS: Final = Table(
    "allocations",
    "one GPU or managed allocation, from its allocation to its release",
    (
        Column("alloc_ns", pl.Int64, "ns", "Allocated; null: before the capture."),
        Column("free_ns", pl.Int64, "ns", "Released; null: not in the capture."),
        _PID,
        _DEVICE,
        _VA,
        _BYTES,
        Column("kind", MEMORY_KIND, "label", "Kind of memory."),
        Column("name", pl.String, "text", "Variable name, where nsys has one."),
        _CORRELATION,
    ),
)

DEVICES: Final = Table(
    "devices",
    "one GPU as a process numbers it",
    (
        _DEVICE,
        Column("pid", pl.UInt32, "id", "Process; null: any."),
        Column("gpu_id", pl.Int64, "id", "The GPU in this machine, where the export maps it."),
        Column("name", pl.String, "text", "Product name."),
        Column("chip", pl.String, "text", "Chip name."),
        Column("total_memory_bytes", pl.Int64, "byte", "GPU memory."),
        Column("memory_bytes_per_s", pl.Int64, "byte/s", "GPU memory bandwidth."),
        Column("n_sms", pl.Int64, "SMs", "Streaming multiprocessors."),
        Column("compute_capability", pl.String, "text", "Compute capability."),
    ),
)

PROCESSES: Final = Table(
    "processes",
    "one process that has events",
    (_PID, Column("name", pl.String, "text", "Program; last part of its path.")),
)

DIAGNOSTICS: Final = Table(
    "diagnostics",
    "one message of the profiler about this capture",
    (
        Column("time_ns", pl.Int64, "ns", "When."),
        _PID,
        Column("severity", SEVERITY, "label", "How bad."),
        Column("text", pl.String, "text", "Message, if it is about the recording; else null."),
    ),
)

TABLES: Final = {
    table.name: table
    for table in (
        GPU_FAULTS,
        CPU_FAULTS,
        MIGRATIONS,
        COPIES,
        MEMSETS,
        KERNELS,
        DRIVER_EVENTS,
        API_CALLS,
        NVTX_RANGES,
        NVTX_MARKS,
        ALLOCATIONS,
        DEVICES,
        PROCESSES,
        DIAGNOSTICS,
    )
}
"""Every table of a trace by name."""
