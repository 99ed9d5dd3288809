"""Tables of a trace of any size, made with numpy: an oversubscribed sweep over many arrays.

Shaped like the driver's work, so that no analysis is short-cut: batches of two pushes in ascending
order, six services per 2 MiB block (64, 64, 128, 256, 512, 1024 KiB, a faulted page and what the
prefetcher adds), an eviction before a block comes again, one fault row per batch. Made up, and only
timed.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from nsan.schema import TABLES
from nsan.uvm.constants import PAGE_BYTES, VA_BLOCK_BYTES

VA = 0x7F00_0000_0000
PID = 4242
_SERVICES = np.array([64, 64, 128, 256, 512, 1024]) * 1024
_OFFSETS = np.concatenate([[0], np.cumsum(_SERVICES)[:-1]])
_BATCH_NS = 200_000
_BATCHES_PER_KERNEL = 300


def tables(n: int) -> dict[str, pl.DataFrame]:
    """Make about n migrations, a fault row per batch, and what goes with them."""
    n_pushes = max(n * 12 // 25, 12)
    n_blocks = min(max(n_pushes // 6 // 8, 2), 20_000) // 2 * 2
    push = np.arange(n_pushes)
    batch = push // 2
    # Two blocks are filled side by side: batch k serves both for the (k mod 6)th time.
    visit, service = batch // 6, batch % 6
    block = (visit * 2 + push % 2) % n_blocks
    start = batch * _BATCH_NS + 30_000 + (push % 2) * 60_000
    copies = pl.concat(
        [*_copies(block, service, start), _evictions(visit, block, service, start, n_blocks)]
    )
    n_batches = int(batch[-1]) + 1
    end_ns = n_batches * _BATCH_NS
    made = {
        "migrations": copies.sort("start_ns"),
        "gpu_faults": _faults(n_batches, block[::2], service[::2]),
        "cpu_faults": _cpu_faults(n_blocks, end_ns),
        "kernels": _kernels(n_batches),
        "nvtx_ranges": _ranges(n_batches),
        "allocations": _allocations(n_blocks),
        "devices": pl.DataFrame({"device_id": [0], "total_memory_bytes": [40 << 30]}),
        "processes": pl.DataFrame({"pid": [PID], "name": ["bench"]}),
    }
    return {name: _typed(made.get(name), name) for name in TABLES}


def _typed(frame: pl.DataFrame | None, name: str) -> pl.DataFrame:
    schema = TABLES[name].schema
    if frame is None:
        return pl.DataFrame(schema=schema)
    events = {"pid": PID, "device_id": 0}
    missing = [
        pl.lit(events.get(column)).cast(dtype).alias(column)
        for column, dtype in schema.items()
        if column not in frame.columns
    ]
    return frame.with_columns(missing).select(pl.col(c).cast(t) for c, t in schema.items())


def _copies(block, service, start):
    """A faulted page and the rest of its service, chained."""
    at = VA + block * VA_BLOCK_BYTES + _OFFSETS[service]
    rest = _SERVICES[service] - PAGE_BYTES
    for offset, size, after, cause in (
        (0, np.full(len(at), PAGE_BYTES), 0, 2),
        (PAGE_BYTES, rest, 2_000, 3),
    ):
        yield pl.DataFrame(
            {
                "start_ns": start + after,
                "end_ns": start + (1_999 if cause == 2 else 2_000 + rest // 26),
                "va": (at + offset).astype(np.uint64),
                "bytes": size,
                "direction": "htod",
                "cause": "coherence" if cause == 2 else "prefetch",
                "cause_id": cause,
            },
            schema_overrides={"direction": pl.Enum(["htod", "dtoh", "dtod"])},
        )


def _evictions(visit, block, service, start, n_blocks):
    again = (service == 0) & (visit * 2 >= n_blocks)
    return pl.DataFrame(
        {
            "start_ns": start[again] - 25_000,
            "end_ns": start[again] - 3_000,
            "va": (VA + block[again] * VA_BLOCK_BYTES).astype(np.uint64),
            "bytes": np.full(int(again.sum()), VA_BLOCK_BYTES),
            "direction": "dtoh",
            "cause": "eviction",
            "cause_id": 4,
        },
        schema_overrides={"direction": pl.Enum(["htod", "dtoh", "dtod"])},
    )


def _faults(n_batches, block, service):
    at = np.arange(n_batches) * _BATCH_NS
    return pl.DataFrame(
        {
            "start_ns": at + 1_000,
            "end_ns": at + 190_000,
            "va": (VA + block * VA_BLOCK_BYTES + _OFFSETS[service]).astype(np.uint64),
            "n_page_faults": 1 + np.arange(n_batches) % 32,
            "access": "read",
            "access_id": 1,
        }
    )


def _cpu_faults(n_blocks, end_ns):
    at = np.arange(n_blocks * 6)
    return pl.DataFrame(
        {
            "start_ns": at * max(end_ns // len(at), 1),
            "va": (VA + at // 6 * VA_BLOCK_BYTES + _OFFSETS[at % 6]).astype(np.uint64),
            "pc": (0x400000 + at % 7).astype(np.uint64),
            "function": "fill",
            "module": "bench",
        }
    )


def _kernels(n_batches):
    first = np.arange(0, n_batches, _BATCHES_PER_KERNEL)
    last = np.minimum(first + _BATCHES_PER_KERNEL, n_batches)
    names = [f"kernel_{i % 5}" for i in range(len(first))]
    return pl.DataFrame(
        {
            "start_ns": first * _BATCH_NS,
            "end_ns": last * _BATCH_NS - 100,
            "name": names,
            "demangled": names,
            "correlation_id": np.arange(len(first)) + 1,
            "is_graph_launch": False,
        }
    )


def _ranges(n_batches):
    step = _BATCHES_PER_KERNEL * 5
    first = np.arange(0, n_batches, step)
    return pl.DataFrame(
        {
            "start_ns": first * _BATCH_NS,
            "end_ns": np.minimum(first + step, n_batches) * _BATCH_NS,
            "tid": PID,
            "name": "step",
            "kind": "push_pop",
            "depth": 0,
            "closed": True,
            "range_id": np.arange(len(first)),
        }
    )


def _allocations(n_blocks):
    n = min(n_blocks, 1_000)
    size = n_blocks * VA_BLOCK_BYTES // n
    at = np.arange(n)
    return pl.DataFrame(
        {
            "alloc_ns": np.zeros(n, np.int64),
            "va": (VA + at * size).astype(np.uint64),
            "bytes": np.full(n, size),
            "kind": "managed",
        }
    )
