"""The arrays that the engine works on. Pages, blocks and processors are small numbers here.

A page is an index into the model's managed memory, a block is ``page // block_pages``; addresses
come back only when events are written. Processor 0 is the CPU, processor ``1 + g`` is GPU ``g``;
a set of processors is a bit mask.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray


def number(value: int) -> int:
    """Make a constant that numba takes as a plain number: it compiles a function anew per literal."""
    return np.int64(value)  # type: ignore[return-value]


CPU: Final = number(0)
CPU_BIT: Final = number(1)
ONE: Final = number(1)

# Why pages moved: nsys numbers of migrationCause.
USER: Final = number(1)
COHERENCE: Final = number(2)
PREFETCH: Final = number(3)
EVICTION: Final = number(4)

CAUSE_BITS: Final = number(15)
KEEP: Final = number(16)
"""Beside a cause: the other copies of the page stay valid."""

# Why residency changed without a copy.
FIRST_TOUCH: Final = number(0)
FREED: Final = number(1)
INVALIDATED: Final = number(2)
CLEAN_EVICTION: Final = number(3)
DROPPED: Final = number(4)
DISCARDED: Final = number(5)

READ: Final = number(1)
WRITE: Final = number(2)

# What became of a batch.
DATA: Final = number(0)
FIRST_TOUCHED: Final = number(1)
STALE: Final = number(2)
THROTTLED: Final = number(3)
REMOTE: Final = number(4)
UPGRADED: Final = number(5)
"""A write to a page that is read-duplicated: the other copies go, nothing is copied."""

# Driver's measures against ping-pong.
THRASHING: Final = number(0)
THROTTLING: Final = number(1)
REMOTE_MAP: Final = number(2)

READ_MOSTLY: Final = number(1)
DEAD: Final = number(64)
"""Beside an advice: nobody needs what the page holds, so it is DROPPED instead of copied."""
FROM_CPU: Final = number(128)
"""Beside an advice: the last move of the page was from the CPU."""

# Events: code = kind << 32 | argument.
TB_READY: Final = number(1)
HOST_READY: Final = number(2)
FETCH: Final = number(3)
REPLAY: Final = number(4)
RAISE_MORE: Final = number(5)
UNPIN: Final = number(6)

# Numbers of one GPU: columns of Gpu.now.
IN_SERVICE: Final = number(0)
FETCH_DUE: Final = number(1)
BUFFERED: Final = number(2)
LAST_RAISED: Final = number(3)
BATCHES: Final = number(4)
USED: Final = number(5)
CAPACITY: Final = number(6)
STALLED: Final = number(7)
# ... and of the kernel that runs there.
KERNEL: Final = number(8)
GRID: Final = number(9)
NEXT_TB: Final = number(10)
LIVE: Final = number(11)
STEPS: Final = number(12)
PHASES: Final = number(13)
STREAMS: Final = number(14)
STEP_NS: Final = number(15)
DONE: Final = number(16)
ENDED: Final = number(17)
SERVICE_END: Final = number(18)
SWEEP_STEPS: Final = number(19)
CHUNK_FREE: Final = number(20)
"""When the last chunk that was left by its pages is free: at the end of their copies."""
GPU_NUMBERS: Final = number(21)

# Numbers of one resident thread block: columns of Gpu.slots.
TB: Final = number(0)
STEP: Final = number(1)
PHASE: Final = number(2)
CURSOR: Final = number(3)
PENDING: Final = number(4)
RAISED: Final = number(5)
SEEN: Final = number(6)
"""Pages of the current item that have been looked at: items may have more than fit."""
FROM_HOST: Final = number(7)
TO_HOST: Final = number(8)
"""Bytes that it has read and written in the host's memory, in place, since it last used the link; a
store's is the column after a load's."""
ARRIVES: Final = number(9)
"""When the last of these accesses is done."""
SLOT_NUMBERS: Final = number(10)

# Numbers of one access stream: columns of Gpu.streams; the last eight are its pattern's own.
PATTERN: Final = number(0)
BASE: Final = number(1)
BYTES: Final = number(2)
WRITES: Final = number(3)
IN_PHASE: Final = number(4)
OWN: Final = number(5)
STREAM_NUMBERS: Final = number(13)
MAX_STREAMS: Final = number(12)

# Numbers of the host thread: columns of Host.now.
PAGE: Final = number(0)
END_PAGE: Final = number(1)
HOST_WRITES: Final = number(2)
NS_PER_PAGE: Final = number(3)
RUNNING: Final = number(4)
FAULT_LOGGED: Final = number(5)
HOST_TIME: Final = number(6)
TOUCHED: Final = number(7)
HOST_NUMBERS: Final = number(8)

# Entries of Scratch.marked: the marked pages of the block lie in [FROM, TO).
FROM: Final = number(0)
TO: Final = number(1)

# Numbers of a pipeline under way: entries of Scratch.time.
CPU_DONE: Final = number(0)
COPY_AFTER: Final = number(1)
LAST_END: Final = number(2)
COPIED: Final = number(3)

# Counters of Log.n.
N_COPIES: Final = number(0)
N_BATCHES: Final = number(1)
N_CPU_FAULTS: Final = number(2)
N_CHANGES: Final = number(3)
N_EVICTIONS: Final = number(4)
N_REFAULTS: Final = number(5)
N_MEASURES: Final = number(6)
N_FAULTED: Final = number(7)
NEXT_BATCH: Final = number(8)
N_LOGS: Final = number(9)

Ints = NDArray[np.int64]
Small = NDArray[np.int32]
Bits = NDArray[np.uint8]


class Rules(NamedTuple):
    """What the driver and the hardware do, as plain numbers; see :mod:`nsan.model.settings`."""

    page_bytes: int
    block_pages: int
    leaf_pages: int
    batch_size: int
    prefetch: int
    threshold: int
    thrashing: int
    thrash_events: int
    lapse_ns: int
    nap_ns: int
    pin_after: int
    pin_ns: int
    epoch_ns: int
    peer: int
    shuffle_window: int
    burst: int
    turn_ns: int
    jitter_ns: int
    entry_gap_ns: int
    retry_ns: int
    interrupt_ns: int
    cold_ns: int
    block_ns: int
    page_ns: float
    first_block_ns: int
    fault_ns: float
    skip_ns: int
    replay_ns: int
    turnaround_ns: int
    evict_ns: int
    cpu_fault_ns: int
    cpu_touch_ns: int
    wake_ns: int
    remote_ns: int
    prefetch_block_ns: int
    htod_latency_ns: float
    htod_ns_per_byte: float
    dtoh_latency_ns: float
    dtoh_ns_per_byte: float
    dtod_latency_ns: float
    dtod_ns_per_byte: float


class Memory(NamedTuple):
    """Per page: who holds it, who maps it remotely, its advice, and its history."""

    where: Bits
    remote: Bits
    advice: Bits
    preferred: NDArray[np.int8]
    accessed_by: Bits
    evicted_ns: Ints
    busy_ns: Ints
    """Per block: until when the driver works on it."""
    replayed_ns: Ints
    """Per block: when the replay of that work is done, if a GPU asked for it."""
    leaves_ns: Ints
    """Per block: when the pages of that work leave the CPU; until then it still reads them."""
    moved_ns: Ints
    moves: Bits
    owner: NDArray[np.int8]
    throttles: Bits
    throttled_ns: Ints
    pinned_ns: Ints
    watched: Bits
    """Per block: two processors have touched it within a lapse, so its pages are counted."""
    toucher: NDArray[np.int8]
    touched_ns: Ints


class Chunks(NamedTuple):
    """Per GPU and block: its 2 MiB root chunk, in a ring from least to most recently migrated in."""

    resident: Small
    serviced: Bits
    ready_ns: Ints
    """Per processor and block: when the last copy into it is done."""
    before: Small
    after: Small


class Gpu(NamedTuple):
    """Per GPU: its numbers, its kernel's streams, its resident thread blocks, its fault buffer."""

    now: Ints
    streams: Ints
    shapes: NDArray[np.float64]
    slots: Ints
    pending: Ints
    pending_bytes: Small
    """What each pending access would move over the link if its page were mapped from afar."""
    stalled: Small
    entry_page: Ints
    entry_ns: Ints
    copies_free_ns: Ints
    link_free_ns: NDArray[np.float64]
    """When the link is free for remote loads and for remote stores."""


class Queue(NamedTuple):
    """A binary heap of events, by time and then by order of arrival."""

    time: Ints
    code: Ints
    order: Ints
    n: Ints


class Scratch(NamedTuple):
    """Room for one block's work."""

    bring: Bits
    marked: Ints
    occupied: Ints
    faulted: Ints
    chosen: Ints
    time: Ints
    random: NDArray[np.uint64]


class Log(NamedTuple):
    """What happened, one row per event; each table is an array with fixed columns."""

    n: Ints
    copies: Ints
    batches: Ints
    cpu_faults: Ints
    changes: Ints
    evictions: Ints
    refaults: Ints
    measures: Ints
    faulted: Ints


class State(NamedTuple):
    """Everything."""

    memory: Memory
    chunks: Chunks
    gpu: Gpu
    host: Ints
    queue: Queue
    scratch: Scratch
    log: Log


LOG_COLUMNS: Final = {
    "copies": (
        "start_ns",
        "end_ns",
        "page",
        "n_pages",
        "src",
        "dst",
        "cause",
        "batch",
        "kept",
    ),
    "batches": (
        "batch",
        "gpu",
        "kernel",
        "raised_ns",
        "fetched_ns",
        "end_ns",
        "page",
        "n_page_faults",
        "access",
        "n_entries",
        "n_pages",
        "n_blocks",
        "outcome",
    ),
    "cpu_faults": ("start_ns", "page", "access"),
    "changes": ("time_ns", "processor", "page", "n_pages", "reason", "batch"),
    "evictions": ("start_ns", "end_ns", "gpu", "block", "n_copied", "n_dropped", "batch"),
    "refaults": ("time_ns", "gpu", "page", "n_pages", "evicted_ns", "batch"),
    "measures": ("start_ns", "end_ns", "processor", "page", "n_pages", "kind", "by_cpu"),
    "faulted": ("batch", "page", "n_entries", "access"),
}
"""Columns of each table of the log, in order."""

MAX_PINS: Final = 1 << 16
"""Pages that can be pinned at once; what comes beyond stays pinned."""

MAX_SLOTS: Final = 4096
"""Most resident thread blocks of a GPU."""

MAX_PENDING: Final = number(64)
"""Faults that one thread block can have outstanding at once."""


def new_state(
    n_pages: int, rules: Rules, capacity_chunks: list[int], seed: int, log_rows: int
) -> State:
    """Make the arrays of a machine with no page resident anywhere."""
    n_gpus = len(capacity_chunks)
    n_blocks = n_pages // rules.block_pages
    n_events = 2 * MAX_SLOTS * (n_gpus + 1) + (MAX_PINS if rules.thrashing else 0)
    n_leaves = rules.block_pages // rules.leaf_pages
    return State(
        _new_memory(n_pages, n_blocks, n_pages if rules.thrashing else 1),
        _new_chunks(n_gpus, n_blocks),
        _new_gpus(capacity_chunks, 2 * rules.batch_size),
        np.zeros(HOST_NUMBERS, np.int64),
        Queue(
            time=np.zeros(n_events, np.int64),
            code=np.zeros(n_events, np.int64),
            order=np.zeros(n_events, np.int64),
            n=np.zeros(2, np.int64),
        ),
        Scratch(
            bring=np.zeros(rules.block_pages, np.uint8),
            marked=np.array([rules.block_pages, 0], np.int64),
            occupied=np.zeros(n_leaves, np.int64),
            faulted=np.zeros(n_leaves, np.int64),
            chosen=np.zeros(n_leaves, np.int64),
            time=np.zeros(4, np.int64),
            random=np.array([seed % (1 << 62) * 2 + 1], np.uint64),
        ),
        Log(
            n=np.zeros(N_LOGS, np.int64),
            **{
                name: np.zeros((log_rows, len(columns)), np.int64)
                for name, columns in LOG_COLUMNS.items()
            },
        ),
    )


def _new_memory(n_pages: int, n_blocks: int, thrashing_pages: int) -> Memory:
    return Memory(
        where=np.zeros(n_pages, np.uint8),
        remote=np.zeros(n_pages, np.uint8),
        advice=np.zeros(n_pages, np.uint8),
        preferred=np.full(n_pages, -1, np.int8),
        accessed_by=np.zeros(n_pages, np.uint8),
        evicted_ns=np.full(n_pages, -1, np.int64),
        busy_ns=np.zeros(n_blocks, np.int64),
        replayed_ns=np.zeros(n_blocks, np.int64),
        leaves_ns=np.zeros(n_blocks, np.int64),
        moved_ns=np.full(thrashing_pages, -(1 << 60), np.int64),
        moves=np.zeros(thrashing_pages, np.uint8),
        owner=np.full(thrashing_pages, -1, np.int8),
        throttles=np.zeros(thrashing_pages, np.uint8),
        throttled_ns=np.zeros(thrashing_pages, np.int64),
        pinned_ns=np.zeros(thrashing_pages, np.int64),
        watched=np.zeros(n_blocks, np.uint8),
        toucher=np.full(n_blocks, -1, np.int8),
        touched_ns=np.zeros(n_blocks, np.int64),
    )


def _new_chunks(n_gpus: int, n_blocks: int) -> Chunks:
    ring = np.full((n_gpus, n_blocks + 1), n_blocks, np.int32)
    return Chunks(
        resident=np.zeros((n_gpus, n_blocks), np.int32),
        serviced=np.zeros((n_gpus, n_blocks), np.uint8),
        ready_ns=np.zeros((n_gpus + 1, n_blocks), np.int64),
        before=ring,
        after=ring.copy(),
    )


def _new_gpus(capacity_chunks: list[int], buffer_entries: int) -> Gpu:
    n_gpus = len(capacity_chunks)
    now = np.zeros((n_gpus, GPU_NUMBERS), np.int64)
    now[:, CAPACITY] = capacity_chunks
    now[:, KERNEL] = -1
    now[:, LAST_RAISED] = -1
    return Gpu(
        now=now,
        streams=np.zeros((n_gpus, MAX_STREAMS, STREAM_NUMBERS), np.int64),
        shapes=np.zeros((n_gpus, MAX_STREAMS), np.float64),
        slots=np.zeros((n_gpus, MAX_SLOTS, SLOT_NUMBERS), np.int64),
        pending=np.zeros((n_gpus, MAX_SLOTS, MAX_PENDING), np.int64),
        pending_bytes=np.zeros((n_gpus, MAX_SLOTS, MAX_PENDING), np.int32),
        stalled=np.zeros((n_gpus, MAX_SLOTS), np.int32),
        entry_page=np.zeros((n_gpus, buffer_entries), np.int64),
        entry_ns=np.zeros((n_gpus, buffer_entries), np.int64),
        copies_free_ns=np.zeros((n_gpus, 2), np.int64),
        link_free_ns=np.zeros((n_gpus, 2), np.float64),
    )
