"""The tables of a memory snapshot: every column with its type, unit and meaning, in one place.

Addresses are UInt64 as in :mod:`nsan.schema`; wall times are Int64 microseconds since 1970 (UTC), as
PyTorch writes them. A null is a value that the file does not have.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.schema import Column, Table

POOL_SIZE: Final = pl.Enum(["small", "large"])
BLOCK_STATE: Final = pl.Enum(["active_allocated", "active_pending_free", "inactive", "other"])
ACTION: Final = pl.Enum(
    [
        "alloc",
        "free_requested",
        "free_completed",
        "segment_alloc",
        "segment_free",
        "segment_map",
        "segment_unmap",
        "oom",
        "snapshot",
        "annotate",
        "other",
    ]
)
STAGE: Final = pl.Enum(["START", "END", "other"])

_DEVICE = Column("device_id", pl.Int64, "id", "CUDA ordinal of the GPU.")
_VA = Column("va", pl.UInt64, "byte address", "First byte.")
_STREAM = Column("stream", pl.UInt64, "id", "Handle of the CUDA stream; 0 is the default stream.")
_POOL = Column(
    "pool", pl.String, "label", "Pool, as `0,0` (default), `n,0` (graph), `0,n` (MemPool)."
)
_STACK = Column("stack_id", pl.Int64, "id", "Call stack in `stacks`; null: none recorded.")
_TIME = Column("time_us", pl.Int64, "us", "Wall time, microseconds since 1970; null before 2.2.")

SEGMENTS: Final = Table(
    "segments",
    "one segment of the allocator when the snapshot was taken; if expandable, one mapped range",
    (
        Column("segment_id", pl.Int64, "id", "Number of the segment, by device and address."),
        _DEVICE,
        _VA,
        Column("bytes", pl.Int64, "byte", "Size (total_size)."),
        Column("allocated_bytes", pl.Int64, "byte", "In blocks that tensors hold."),
        Column("active_bytes", pl.Int64, "byte", "The same and blocks whose free is pending."),
        Column("requested_bytes", pl.Int64, "byte", "Asked for in these; null before 2.1."),
        _STREAM,
        Column("size_class", POOL_SIZE, "label", "Of the small or of the large pool."),
        _POOL,
        Column("is_expandable", pl.Boolean, "flag", "A mapped range of an expandable segment."),
        _STACK,
    ),
)

BLOCKS: Final = Table(
    "blocks",
    "one block of a segment when the snapshot was taken; the blocks of a segment fill it",
    (
        Column("segment_id", pl.Int64, "id", "Segment of the block."),
        _DEVICE,
        _VA,
        Column("bytes", pl.Int64, "byte", "Size."),
        Column(
            "requested_bytes", pl.Int64, "byte", "Asked for; stale where the block is inactive."
        ),
        Column("state", BLOCK_STATE, "label", "Allocated, free pending, or inactive (cached)."),
        _STREAM,
        _POOL,
        _STACK,
    ),
)

ALLOCATOR_EVENTS: Final = Table(
    "allocator_events",
    "one entry of the allocator's history, in its order",
    (
        _DEVICE,
        Column("sequence", pl.Int64, "rank", "Place in the history of its device, from 0."),
        _TIME,
        Column("action", ACTION, "label", "What happened."),
        Column("va", pl.UInt64, "byte address", "Address; null for oom."),
        Column(
            "bytes",
            pl.Int64,
            "byte",
            "Requested size of alloc and free entries, real size of segment entries, rounded "
            "request of oom, active bytes of snapshot.",
        ),
        _STREAM,
        Column("pool", pl.String, "label", "Pool; null before 2.12."),
        Column("device_free_bytes", pl.Int64, "byte", "Free GPU memory at an oom."),
        Column("compile_context", pl.String, "text", "Compiled region; null where there is none."),
        _STACK,
    ),
)

STACKS: Final = Table(
    "stacks",
    "one frame of a call stack, innermost first",
    (
        Column("stack_id", pl.Int64, "id", "The stack."),
        Column("depth", pl.Int64, "frames", "0 is the innermost."),
        Column("function", pl.String, "text", "Function."),
        Column(
            "source_file",
            pl.String,
            "text",
            "Source file; of a path the part from its package on, else the last.",
        ),
        Column("source_line", pl.Int64, "line", "Source line."),
    ),
)

ALLOCATOR_SETTINGS: Final = Table(
    "allocator_settings",
    "one setting of the allocator as the snapshot names it",
    (
        Column("name", pl.String, "text", "Name, nested keys joined by dots."),
        Column("value", pl.String, "text", "Value as text."),
        Column(
            "is_recorded", pl.Boolean, "flag", "Stands in the file; else inferred from its keys."
        ),
    ),
)

ANNOTATIONS: Final = Table(
    "annotations",
    "one start or end of a range that the profiler or the user annotated",
    (
        _DEVICE,
        _TIME,
        Column("name", pl.String, "text", "Name of the range."),
        Column("stage", STAGE, "label", "Start or end."),
    ),
)

SNAPSHOT_TABLES: Final = {
    table.name: table
    for table in (SEGMENTS, BLOCKS, ALLOCATOR_EVENTS, STACKS, ALLOCATOR_SETTINGS, ANNOTATIONS)
}
"""Every table of a snapshot by name."""
