"""Turn the crank: take events in order of time until something needs the program."""

from __future__ import annotations

from typing import Final

from nsan.model.engine.gpu import block_ready, fetch, raise_more, replay, start_blocks
from nsan.model.engine.host import host_ready
from nsan.model.engine.jit import compiled, entry
from nsan.model.engine.queue import drop_first, put
from nsan.model.engine.residency import drop_from_cpu, evict_one, log_change, release
from nsan.model.engine.service import begin_work, migrate_block
from nsan.model.engine.state import (
    CAPACITY,
    COPIED,
    CPU,
    CPU_DONE,
    DEAD,
    DISCARDED,
    DONE,
    FETCH,
    FREED,
    FROM_CPU,
    HOST_READY,
    HOST_TIME,
    ONE,
    RAISE_MORE,
    REPLAY,
    RUNNING,
    TB_READY,
    UNPIN,
    USED,
    Log,
    Rules,
    State,
)
from nsan.model.engine.thrashing import forget, unpin

IDLE: Final = 0
"""No event is left."""
KERNEL_DONE: Final = 1
"""Kernels have ended: those with DONE set."""
HOST_DONE: Final = 2
"""The host thread has touched its range."""
LOG_FULL: Final = 3
"""Some table of the log has little room: take the rows out and come back."""
PAUSED: Final = 4
"""Enough for one turn: a chance to show progress, and to be interrupted."""
CAUGHT_UP: Final = 5
"""All that happens until then has happened."""

FOREVER: Final = 1 << 62

_EVENTS_PER_TURN: Final = 2_000_000

FREE_AT_ONCE: Final = 1 << 14
"""Pages that one call frees at most: each may be in eight places."""


def log_margin(batch_size: int, block_pages: int) -> int:
    """Give the rows of a table that one event can write at most.

    Each entry of a batch may be in a block of its own, whose every other page comes and whose
    victim's every other page goes; both twice over where GPUs copy through the CPU.
    """
    return max(2 * batch_size * block_pages, 1 << 17)


_margin = compiled(log_margin)


@compiled
def _log_is_full(log: Log, rules: Rules) -> bool:
    margin = _margin(rules.batch_size, rules.block_pages)
    n = log.n
    return bool(
        n[0] > log.copies.shape[0] - margin
        or n[1] > log.batches.shape[0] - margin
        or n[2] > log.cpu_faults.shape[0] - margin
        or n[3] > log.changes.shape[0] - margin
        or n[4] > log.evictions.shape[0] - margin
        or n[5] > log.refaults.shape[0] - margin
        or n[6] > log.measures.shape[0] - margin
        or n[7] > log.faulted.shape[0] - margin
    )


@entry
def advance(state: State, rules: Rules, until: int) -> int:
    """Handle events up to a time, or until the program must act; say why it must."""
    queue = state.queue
    for _ in range(_EVENTS_PER_TURN):
        if queue.n[0] == 0:
            return IDLE
        if _log_is_full(state.log, rules):
            return LOG_FULL
        time = queue.time[0]
        if time > until:
            return CAUGHT_UP
        code = queue.code[0]
        drop_first(queue)
        kind, argument = code >> 32, code & 0xFFFFFFFF
        if kind == TB_READY:
            gpu = argument & 255
            block_ready(state, rules, gpu, argument >> 8, time)
            if state.gpu.now[gpu, DONE]:
                return KERNEL_DONE
        elif kind == RAISE_MORE:
            raise_more(state, rules, argument & 255, argument >> 8, time)
        elif kind == HOST_READY:
            host_ready(state, rules, time)
            if not state.host[RUNNING]:
                return HOST_DONE
        elif kind == FETCH:
            fetch(state, rules, argument, time)
        elif kind == REPLAY:
            replay(state, rules, argument, time)
        elif kind == UNPIN:
            unpin(state, argument, time)
    return PAUSED


@entry
def start_kernel(state: State, gpu: int, n_slots: int, time: int) -> None:
    """Start the kernel whose numbers and streams were written into the state."""
    start_blocks(state, gpu, n_slots, time)


@entry
def start_host(state: State, time: int) -> None:
    """Start the host thread on the range that was written into the state."""
    state.host[RUNNING] = 1
    state.host[HOST_TIME] = time
    put(state.queue, time, HOST_READY, CPU)


@entry
def migrate(state: State, rules: Rules, dst: int, pages: tuple[int, int], time: int) -> int:
    """Move as many blocks as the log has room for, as a user's prefetch; give the first page left.

    The pipeline starts at ``time``, or goes on where it was if that is negative.
    """
    if time >= 0:
        begin_work(state, time)
    page = pages[0]
    while page < pages[1] and not _log_is_full(state.log, rules):
        block = page // rules.block_pages
        end = min((block + 1) * rules.block_pages, pages[1])
        migrate_block(state, rules, block, dst, (page, end))
        page = end
    return page


@entry
def pipeline_end(state: State) -> int:
    """Say when the last work of the driver is done."""
    return max(state.scratch.time[CPU_DONE], state.scratch.time[COPIED])


@compiled
def _vacate(state: State, rules: Rules, pages: tuple[int, int], time: int, reason: int) -> None:
    """Make pages resident nowhere, without a copy; forget their past."""
    memory = state.memory
    for processor in range(state.gpu.now.shape[0] + 1):
        for page in range(pages[0], pages[1]):
            if memory.where[page] >> processor & 1:
                log_change(state.log, time, processor, page, reason)
                if processor:
                    release(state, processor - 1, page // rules.block_pages, ONE)
    for page in range(pages[0], pages[1]):
        memory.where[page] = 0
        memory.remote[page] = 0
        memory.evicted_ns[page] = -1
        forget(state, rules, page)


@entry
def free(state: State, rules: Rules, pages: tuple[int, int], time: int) -> None:
    """Forget pages: what was resident is gone without a record."""
    memory = state.memory
    _vacate(state, rules, pages, time, FREED)
    for page in range(pages[0], pages[1]):
        memory.advice[page] = 0
        memory.preferred[page] = -1
        memory.accessed_by[page] = 0
    for block in range(pages[0] // rules.block_pages, -(-pages[1] // rules.block_pages)):
        state.chunks.serviced[:, block] = 0


@entry
def discard(state: State, rules: Rules, pages: tuple[int, int], time: int) -> None:
    """Give up pages; what was advised for them stays, and whether they are dead."""
    _vacate(state, rules, pages, time, DISCARDED)
    for page in range(pages[0], pages[1]):
        state.memory.advice[page] &= ~FROM_CPU


@entry
def mark_dead(state: State, pages: tuple[int, int], dead: bool, time: int) -> None:  # noqa: FBT001 (numba takes no keywords)
    """Say that nobody needs what pages hold, or that somebody does again."""
    for page in range(pages[0], pages[1]):
        state.memory.advice[page] &= ~DEAD
        if dead:
            state.memory.advice[page] |= DEAD
            drop_from_cpu(state, page, time)


@entry
def shrink(state: State, rules: Rules, gpu: int, time: int) -> int:
    """Evict until what is resident fits the capacity; give when that is done."""
    begin_work(state, time)
    while state.gpu.now[gpu, USED] > max(state.gpu.now[gpu, CAPACITY], 0):
        if _log_is_full(state.log, rules):
            break
        evict_one(state, rules, gpu)
    return max(state.scratch.time[CPU_DONE], state.scratch.time[COPIED])
