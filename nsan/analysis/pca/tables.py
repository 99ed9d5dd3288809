"""The tables of a trace joined with a memory snapshot: every column with its unit, kind and meaning.

Two orders matter. The **host's** is that of the history: allocations and frees as the program asks for
them. The **stream's** is that of the GPU, which runs behind: a block that the host has freed, and given
to another tensor, still serves the kernels that were launched before. ``position`` is the place in the
history up to which the host had come when it launched the work during which something happened on
the GPU; the state of a block is taken there.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.allocator.call_sites import SITE_COLUMNS
from nsan.analysis.result import DEVICE, PID, Result, derived, reconstructed, recorded
from nsan.schema import ACCESS, CAUSE, DIRECTION

METHOD: Final = pl.Enum(["segments", "annotations", "mark", "session_start"])
"""How two clocks were compared, best first."""

STATE: Final = pl.Enum(["live", "pending", "cached", "unused", "outside", "unknown"])
"""What memory was to the allocator at that position: ``live``, held by a tensor; ``pending``, freed, but
another stream may still use it; ``cached``, held by no tensor any more; ``unused``, in a segment, but
no tensor has held it since the segment was made (or since the recording began); ``outside``, in no
segment then; ``unknown``, the row says no place or process, or the history does not reach that time."""

DEAD_STATES: Final = ("cached", "unused")
"""Memory whose bytes nobody needs, and which the driver keeps all the same."""

ORDER: Final = pl.Enum(["stream", "overlap", "host"])
"""How the position was found: from the work that ran on the GPU; from the one of several that began last,
though another of them was launched at another position; or, for lack of any, from the time."""

PROCESSOR: Final = pl.Enum(["gpu", "cpu"])

CLOCK_FITS: Final = Result(
    "clock_fits",
    "one way to compare the snapshot's clock with the trace's",
    (
        derived("method", METHOD, "label", "What was compared."),
        derived("is_used", pl.Boolean, "flag", "The one that the join stands on."),
        derived("n_pairs", pl.Int64, "pairs", "Moments that both know."),
        derived("n_unmatched", pl.Int64, "moments", "Of the snapshot's, those the trace lacks."),
        reconstructed(
            "residual_rms_ns", pl.Float64, "ns", "Root mean square of what is left over."
        ),
        reconstructed("residual_max_ns", pl.Float64, "ns", "Most that is left over."),
        reconstructed("drift", pl.Float64, "number", "Trace time per wall time, minus 1."),
        reconstructed("offset_ns", pl.Int64, "ns", "Trace time at `reference_us`."),
        recorded("reference_us", pl.Int64, "number", "Wall time (us since 1970) of the offset."),
        recorded("pid", pl.UInt32, "id", "Process of the trace that it fits; null: any."),
    ),
    nothing="The snapshot has no times, or nothing that the trace knows too.",
)
"""``trace_ns = offset_ns + (wall_us - reference_us) * 1000 * (1 + drift)``; best method first."""

TENSOR_LIVES: Final = Result(
    "tensor_lives",
    "one allocation of the history, or block in use that was allocated before it",
    (
        PID,
        DEVICE,
        derived("tensor_id", pl.Int64, "id", "Number in the join, by GPU and allocation."),
        recorded("va", pl.UInt64, "byte address", "First byte."),
        derived("block_bytes", pl.Int64, "byte", "Size of its block."),
        recorded("requested_bytes", pl.Int64, "byte", "Asked for."),
        derived("reused_bytes", pl.Int64, "byte", "Of its block, what a tensor held before it."),
        derived("segment_va", pl.UInt64, "byte address", "Where its segment begins."),
        derived("segment_bytes", pl.Int64, "byte", "Size of its segment."),
        recorded("alloc_sequence", pl.Int64, "id", "Entry that allocated it; null: before."),
        recorded("free_requested_sequence", pl.Int64, "id", "Entry that asked to free it."),
        recorded("free_sequence", pl.Int64, "id", "Entry that completed its free; null: held."),
        reconstructed("alloc_ns", pl.Int64, "ns", "Allocated, on the trace's clock."),
        reconstructed("free_ns", pl.Int64, "ns", "Its free was completed; null: held."),
        *SITE_COLUMNS,
        reconstructed(
            "annotation", pl.String, "text", "Innermost range of the program when allocated."
        ),
        recorded("pool", pl.String, "label", "Pool."),
        recorded("stream", pl.UInt64, "id", "Its stream; 0: default."),
        recorded("stack_id", pl.Int64, "id", "Its call stack, in `stacks`."),
    ),
    nothing="The snapshot has neither a block in use nor a history.",
)

_PLACE: Final = (
    derived(
        "position", pl.Int64, "entries", "Entries of the history done when its work was launched."
    ),
    derived("order", ORDER, "label", "How `position` was found."),
    derived("state", STATE, "label", "What the memory was to the allocator then."),
    derived(
        "tensor_id", pl.Int64, "id", "Tensor that held it, or (cached) held it last; else null."
    ),
    derived("segment_va", pl.UInt64, "byte address", "Its segment; null: outside."),
)

TENSOR_MOVES: Final = Result(
    "tensor_moves",
    "one part of a migration that lies in one block, or between blocks",
    (
        PID,
        DEVICE,
        derived("migration", pl.Int64, "id", "Number of the migration in the order of the trace."),
        recorded("start_ns", pl.Int64, "ns", "Copy began."),
        recorded("end_ns", pl.Int64, "ns", "Copy ended."),
        recorded("va", pl.UInt64, "byte address", "First byte of the part."),
        derived("bytes", pl.Int64, "byte", "Size of the part; parts add up to the migration."),
        recorded("direction", DIRECTION, "label", "Direction."),
        recorded("cause", CAUSE, "label", "Cause."),
        derived("batch_id", pl.Int64, "id", "Driver batch, as of `batches`; null: none."),
        *_PLACE,
        derived(
            "is_stale",
            pl.Boolean,
            "flag",
            "Came into the GPU for a tensor that is younger than the bytes: they left before it was "
            "allocated. Of bytes that never left in this trace, and of unknown state: null.",
        ),
        derived("is_dead", pl.Boolean, "flag", "Cached, unused or stale; null: not known."),
    ),
    nothing="Nothing was migrated.",
)

TENSOR_FAULTS: Final = Result(
    "tensor_faults",
    "one fault row (of a GPU: one driver batch, named by its lowest page)",
    (
        PID,
        DEVICE,
        recorded("start_ns", pl.Int64, "ns", "Raised."),
        recorded("end_ns", pl.Int64, "ns", "Replayed; null for the CPU."),
        recorded("processor", PROCESSOR, "label", "Who faulted."),
        recorded("va", pl.UInt64, "byte address", "Page."),
        recorded("access", ACCESS, "label", "Access; null for the CPU."),
        recorded("n_page_faults", pl.Int64, "faults", "Recorded count; null for the CPU."),
        derived("batch_id", pl.Int64, "id", "Driver batch, as of `batches`; null: none."),
        *_PLACE,
    ),
    nothing="No fault row.",
)

JOINED_TABLES: Final = {
    table.name: table for table in (CLOCK_FITS, TENSOR_LIVES, TENSOR_MOVES, TENSOR_FAULTS)
}
"""Every table of a join by name; an analysis names them as parameters, as it does tables of a trace."""

N_FAULT_ROWS: Final = derived(
    "n_fault_rows",
    pl.Int64,
    "fault rows",
    "GPU fault rows; one row is one driver batch, unless health says otherwise.",
)

OF_BATCHES: Final = (
    derived(
        "n_first_touch",
        pl.Int64,
        "batches",
        "First touches: batches, as of `batches`, that copied nothing into memory that had no bytes.",
    ),
    derived("first_touch_ns", pl.Int64, "ns", "Service time of these batches."),
    derived("n_shared_first_touch", pl.Int64, "batches", "First touches of shared VA blocks."),
    derived("n_dead_rows", pl.Int64, "batches", "Batches all of whose bytes in are dead."),
)
"""Figures that count batches; where a row is no batch of its own, `batches` puts rows together."""

STEP_LEDGER: Final = Result(
    "step_ledger",
    "one step of the program (NVTX range) on one GPU",
    (
        PID,
        DEVICE,
        derived("step", pl.Int64, "id", "Number of the step, from 0."),
        recorded("start_ns", pl.Int64, "ns", "Began."),
        recorded("end_ns", pl.Int64, "ns", "Ended."),
        derived("wall_ns", pl.Int64, "ns", "Its time."),
        N_FAULT_ROWS,
        *OF_BATCHES,
        derived("n_managed_allocs", pl.Int64, "allocations", "Managed allocations made."),
        derived("n_tensors", pl.Int64, "tensors", "Tensors allocated."),
        derived("tensor_bytes", pl.Int64, "byte", "Their blocks."),
        derived("reused_bytes", pl.Int64, "byte", "Of these on memory that a tensor held before."),
        derived("memory_api_ns", pl.Int64, "ns", "In managed allocations and frees of the API."),
        derived("in_bytes", pl.Int64, "byte", "Migrated into the GPU."),
        derived("out_bytes", pl.Int64, "byte", "Migrated out of it."),
        derived("dead_in_bytes", pl.Int64, "byte", "Of `in_bytes` dead."),
        derived("dead_out_bytes", pl.Int64, "byte", "Of `out_bytes` dead."),
        derived("dead_in_ns", pl.Int64, "ns", "Copy time of the dead bytes in."),
        derived("dead_out_ns", pl.Int64, "ns", "Copy time of the dead bytes out."),
        derived(
            "neighbour_in_bytes",
            pl.Int64,
            "byte",
            "Live bytes that the prefetcher brought beside another tensor of the same segment that "
            "faulted in their VA block.",
        ),
        derived(
            "neighbour_out_bytes",
            pl.Int64,
            "byte",
            "Live bytes evicted from VA blocks that two or more tensors of a segment shared, without "
            "those of the largest of them.",
        ),
        derived("neighbour_in_ns", pl.Int64, "ns", "Copy time of the neighbours' bytes in."),
        derived("neighbour_out_ns", pl.Int64, "ns", "Copy time of the neighbours' bytes out."),
    ),
    nothing="The trace has no NVTX range of that name.",
)
