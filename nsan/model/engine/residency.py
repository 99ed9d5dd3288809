"""Where pages are, and what moves them: chunks, eviction, copies and changes without a copy."""

from __future__ import annotations

import numpy as np

from nsan.model.engine.jit import compiled
from nsan.model.engine.state import (
    CAPACITY,
    CAUSE_BITS,
    CHUNK_FREE,
    CLEAN_EVICTION,
    COPIED,
    COPY_AFTER,
    CPU,
    CPU_BIT,
    CPU_DONE,
    DEAD,
    DROPPED,
    EVICTION,
    FIRST_TOUCH,
    FROM,
    FROM_CPU,
    INVALIDATED,
    KEEP,
    LAST_END,
    N_CHANGES,
    N_COPIES,
    N_EVICTIONS,
    N_REFAULTS,
    ONE,
    TO,
    USED,
    Chunks,
    Log,
    Rules,
    Scratch,
    State,
)

GRID_NS = 32
"""Starts of copies lie on a grid of 32 ns (measured on all GPUs)."""


@compiled
def accessible(state: State, page: int, processor: int, write: int) -> bool:
    """Say whether an access needs no fault: a valid copy, or a mapping of one; the only one if written."""
    bit = 1 << processor
    where = state.memory.where[page]
    if where == bit or (where & bit and not write):
        return True
    if where == 0 or (write and where & (where - 1)):
        return False
    if state.memory.remote[page] & bit:
        return True
    # accessed_by: the driver maps such pages as soon as they are somewhere.
    return bool(state.memory.accessed_by[page] & bit and where & CPU_BIT and processor != CPU)


@compiled
def mark_page(scratch: Scratch, place: int, mark: int) -> None:
    """Mark a page of the block, by its place in it, to be brought: its cause, with ``KEEP`` or not."""
    scratch.bring[place] = mark
    scratch.marked[FROM] = min(scratch.marked[FROM], place)
    scratch.marked[TO] = max(scratch.marked[TO], place + 1)


@compiled
def clear_marks(scratch: Scratch) -> None:
    """Take all marks away."""
    scratch.bring[scratch.marked[FROM] : scratch.marked[TO]] = 0
    scratch.marked[FROM] = scratch.bring.shape[0]
    scratch.marked[TO] = 0


@compiled
def is_dead(state: State, page: int) -> bool:
    """Say whether nobody needs what a page holds."""
    return state.memory.advice[page] & DEAD != 0


@compiled
def link_last(chunks: Chunks, gpu: int, block: int) -> None:
    """Put a chunk at the end of the ring: most recently migrated in."""
    end = chunks.after.shape[1] - 1
    last = chunks.before[gpu, end]
    chunks.after[gpu, last] = block
    chunks.before[gpu, block] = last
    chunks.after[gpu, block] = end
    chunks.before[gpu, end] = block


@compiled
def unlink(chunks: Chunks, gpu: int, block: int) -> None:
    """Take a chunk out of the ring."""
    before, after = chunks.before[gpu, block], chunks.after[gpu, block]
    chunks.after[gpu, before] = after
    chunks.before[gpu, after] = before


@compiled
def hold(state: State, gpu: int, block: int, n_pages: int) -> None:
    """Count pages that became resident; a first one takes a chunk."""
    if state.chunks.resident[gpu, block] == 0:
        state.gpu.now[gpu, USED] += 1
    else:
        unlink(state.chunks, gpu, block)
    link_last(state.chunks, gpu, block)
    state.chunks.resident[gpu, block] += n_pages


@compiled
def release(state: State, gpu: int, block: int, n_pages: int) -> None:
    """Count pages that left; the last one gives the chunk back."""
    state.chunks.resident[gpu, block] -= n_pages
    if state.chunks.resident[gpu, block] == 0:
        unlink(state.chunks, gpu, block)
        state.gpu.now[gpu, USED] -= 1


@compiled
def log_change(log: Log, time: int, processor: int, page: int, reason: int) -> None:
    """Note that a page's residency changed without a copy; neighbours join into one row."""
    n = log.n[N_CHANGES]
    if n and _extends(log, n - 1, time, processor, page, reason):
        log.changes[n - 1, 3] += 1
        return
    row = log.changes[n]
    row[0], row[1], row[2], row[3], row[4], row[5] = time, processor, page, 1, reason, -1
    log.n[N_CHANGES] = n + 1


@compiled
def _extends(log: Log, at: int, time: int, processor: int, page: int, reason: int) -> bool:
    row = log.changes[at]
    return (
        row[0] == time
        and row[5] == -1
        and row[1] == processor
        and row[4] == reason
        and row[2] + row[3] == page
    )


@compiled
def drop_other_copies(state: State, page: int, keep: int, time: int) -> None:
    """Invalidate the copies of a page that other processors hold: no record of it in a trace."""
    others = state.memory.where[page] & ~(1 << keep)
    # A copy that is still on its way is dropped when it has arrived, not before.
    arrived = state.chunks.ready_ns[:, page // _block_pages(state)]
    if others & CPU_BIT:
        log_change(state.log, max(time, arrived[CPU]), CPU, page, INVALIDATED)
    for gpu in range(state.gpu.now.shape[0]):
        if others >> (gpu + 1) & 1:
            log_change(state.log, max(time, arrived[gpu + 1]), gpu + 1, page, INVALIDATED)
            release(state, gpu, page // _block_pages(state), ONE)
    state.memory.where[page] &= 1 << keep


@compiled
def drop(state: State, page: int, time: int) -> None:
    """Forget what a dead page holds, wherever it is."""
    arrived = state.chunks.ready_ns[:, page // _block_pages(state)]
    for processor in range(state.gpu.now.shape[0] + 1):
        if state.memory.where[page] >> processor & 1:
            log_change(state.log, max(time, arrived[processor]), processor, page, DROPPED)
            if processor:
                release(state, processor - 1, page // _block_pages(state), ONE)
    state.memory.where[page] = 0
    state.memory.remote[page] = 0
    state.memory.evicted_ns[page] = -1


@compiled
def drop_from_cpu(state: State, page: int, time: int) -> None:
    """Forget what the CPU holds of a dead page; GPUs keep theirs until they need the room."""
    memory = state.memory
    if memory.where[page] == CPU_BIT:
        drop(state, page, time)
    elif memory.where[page] & CPU_BIT:
        when = max(time, state.chunks.ready_ns[CPU, page // _block_pages(state)])
        log_change(state.log, when, CPU, page, DROPPED)
        memory.where[page] &= ~CPU_BIT
        memory.remote[page] = 0


@compiled
def _block_pages(state: State) -> int:
    return state.scratch.bring.shape[0]


@compiled
def copy_run(
    state: State, rules: Rules, page: int, n_pages: int, src: int, dst: int, mark: int
) -> None:
    """Write one copy; chained to the one before within a push, whose time scratch keeps.

    ``LAST_END`` is negative at the start of a push.
    """
    time = state.scratch.time
    log = state.log
    n_bytes = n_pages * rules.page_bytes
    engine = 0 if src == CPU else 1
    gpu = (dst if src == CPU else src) - 1
    if src == CPU:
        ns = rules.htod_latency_ns + n_bytes * rules.htod_ns_per_byte
    elif dst == CPU:
        ns = rules.dtoh_latency_ns + n_bytes * rules.dtoh_ns_per_byte
    else:
        ns = rules.dtod_latency_ns + n_bytes * rules.dtod_ns_per_byte
    if time[LAST_END] < 0:
        free = state.gpu.copies_free_ns[gpu, engine]
        if free:
            free += rules.turnaround_ns
        # Nothing is copied on before it has arrived.
        arrived = state.chunks.ready_ns[src, page // rules.block_pages]
        start = max(time[CPU_DONE], time[COPY_AFTER], free, arrived)
        start = (start + GRID_NS - 1) // GRID_NS * GRID_NS
    else:
        start = time[LAST_END] + 1
    end = start + max(int(ns + GRID_NS - 1) // GRID_NS, 1) * GRID_NS - 1
    time[LAST_END] = end
    time[COPIED] = max(time[COPIED], end)
    ready = state.chunks.ready_ns
    block = page // rules.block_pages
    ready[dst, block] = max(ready[dst, block], end + rules.turnaround_ns)
    state.gpu.copies_free_ns[gpu, engine] = end
    row = log.copies[log.n[N_COPIES]]
    row[0], row[1], row[2], row[3] = start, end, page, n_pages
    row[4], row[5], row[6], row[7] = src, dst, mark & CAUSE_BITS, -1
    row[8] = (mark & KEEP) != 0
    log.n[N_COPIES] += 1


@compiled
def evict_one(state: State, rules: Rules, gpu: int) -> None:
    """Give up the chunk least recently migrated in: what only it holds is copied to the CPU."""
    victim = np.int64(state.chunks.after[gpu, state.chunks.after.shape[1] - 1])
    memory, log, time = state.memory, state.log, state.scratch.time
    bit = 1 << (gpu + 1)
    first = victim * rules.block_pages
    n_copied = 0
    for page in range(first, first + rules.block_pages):
        n_copied += memory.where[page] == bit and not is_dead(state, page)
    time[CPU_DONE] += rules.evict_ns + int(rules.page_ns * n_copied)
    time[LAST_END] = -1
    start = time[CPU_DONE]
    n_dropped = _evict_pages(state, rules, gpu, first)
    end = max(time[LAST_END], start)
    if n_dropped:
        end = max(end, time[COPIED])
    for page in range(first, first + rules.block_pages):
        if memory.evicted_ns[page] == 0:
            memory.evicted_ns[page] = end
    release(state, gpu, victim, n_copied + n_dropped)
    time[COPY_AFTER] = max(time[COPY_AFTER], end + rules.turnaround_ns)
    time[LAST_END] = -1
    row = log.evictions[log.n[N_EVICTIONS]]
    row[0], row[1], row[2], row[3], row[4], row[5] = start, end, gpu, victim, n_copied, n_dropped
    row[6] = -1
    log.n[N_EVICTIONS] += 1


@compiled
def _evict_pages(state: State, rules: Rules, gpu: int, first: int) -> int:
    """Copy runs of pages back; drop the read-duplicated and the dead ones, and count these."""
    memory = state.memory
    bit = 1 << (gpu + 1)
    n_dropped = 0
    run = -1
    for page in range(first, first + rules.block_pages + 1):
        inside = page < first + rules.block_pages
        only = inside and memory.where[page] == bit and not is_dead(state, page)
        if only and run < 0:
            run = page
        if not only and run >= 0:
            copy_run(state, rules, run, page - run, gpu + 1, CPU, EVICTION)
            memory.where[run:page] = CPU_BIT
            memory.remote[run:page] = 0
            memory.evicted_ns[run:page] = 0  # set to the push's end by the caller
            run = -1
        if inside and not only and memory.where[page] & bit:
            memory.where[page] &= ~bit
            arrived = state.chunks.ready_ns[gpu + 1, page // rules.block_pages]
            when = max(state.scratch.time[CPU_DONE], arrived)
            reason = CLEAN_EVICTION
            if memory.where[page] == 0:
                reason = DROPPED
                memory.remote[page] = 0
                memory.evicted_ns[page] = -1
            log_change(state.log, when, gpu + 1, page, reason)
            state.scratch.time[COPIED] = max(state.scratch.time[COPIED], when)
            n_dropped += 1
    return n_dropped


@compiled
def make_room(state: State, rules: Rules, gpu: int, block: int) -> None:
    """Evict until a block without a chunk can have one."""
    if state.chunks.resident[gpu, block]:
        return
    numbers, time = state.gpu.now[gpu], state.scratch.time
    time[CPU_DONE] = max(time[CPU_DONE], numbers[CHUNK_FREE])
    while numbers[USED] >= numbers[CAPACITY] and numbers[USED] > 0:
        evict_one(state, rules, gpu)


@compiled
def source_of(state: State, page: int, dst: int) -> int:
    """Find the processor to copy a page from: the CPU first; -1 if it is nowhere."""
    where = state.memory.where[page] & ~(1 << dst)
    if where == 0:
        return -1
    source = 0
    while not where >> source & 1:
        source += 1
    return source


@compiled
def bring_pages(state: State, rules: Rules, block: int, dst: int) -> int:
    """Make the pages marked in ``scratch.bring`` resident at a processor; count those copied.

    A mark is the cause of the copy, with ``KEEP`` where the other copies stay valid (read
    duplication). Pages that are nowhere are populated and leave no record.
    """
    memory, bring = state.memory, state.scratch.bring
    first = block * rules.block_pages
    n_new = np.int64(0)
    n_copied = 0
    for i in range(state.scratch.marked[FROM], state.scratch.marked[TO]):
        if bring[i]:
            if is_dead(state, first + i):
                drop(state, first + i, state.scratch.time[CPU_DONE])
            n_new += 1
            n_copied += memory.where[first + i] != 0
    if dst != CPU and n_new:
        hold(state, dst - 1, block, n_new)
    for source in range(state.gpu.now.shape[0] + 1):
        if source != dst:
            _push_from(state, rules, block, source, dst)
    _settle(state, rules, block, dst)
    return n_copied


@compiled
def _push_from(state: State, rules: Rules, block: int, source: int, dst: int) -> None:
    """Copy the marked pages that come from one processor.

    Between GPUs without peer access they go by way of the CPU, in two pushes.
    """
    if source == CPU or dst == CPU or rules.peer:
        _copy_runs(state, rules, block, source, (source, dst), dst)
        return
    time = state.scratch.time
    after = time[COPY_AFTER]
    if _copy_runs(state, rules, block, source, (source, CPU), dst):
        time[COPY_AFTER] = time[LAST_END] + rules.turnaround_ns
        _copy_runs(state, rules, block, source, (CPU, dst), dst)
        time[COPY_AFTER] = after


@compiled
def _copy_runs(
    state: State, rules: Rules, block: int, holder: int, way: tuple[int, int], dst: int
) -> int:
    """Copy the marked pages of one holder in runs of equal cause, one push; count the runs."""
    bring = state.scratch.bring
    first = block * rules.block_pages
    state.scratch.time[LAST_END] = -1
    n_runs = 0
    run = -1
    last = state.scratch.marked[TO]
    for i in range(state.scratch.marked[FROM], last + 1):
        mark = np.int64(0)
        if i < last and bring[i] and source_of(state, first + i, dst) == holder:
            mark = np.int64(bring[i])
        if run >= 0 and mark != bring[run]:
            kept = np.int64(bring[run])
            if way[0] != holder:
                kept &= CAUSE_BITS  # nothing stays at the CPU on the way, whatever the source keeps
            copy_run(state, rules, first + run, i - run, way[0], way[1], kept)
            n_runs += 1
            run = -1
        if run < 0 and mark:
            run = i
    return n_runs


@compiled
def _settle(state: State, rules: Rules, block: int, dst: int) -> None:
    """Write the new residency of the marked pages, and what that says about their past."""
    memory, bring = state.memory, state.scratch.bring
    time = max(state.scratch.time[COPIED], state.scratch.time[CPU_DONE])
    bit = 1 << dst
    first = block * rules.block_pages
    for i in range(state.scratch.marked[FROM], state.scratch.marked[TO]):
        if not bring[i]:
            continue
        page = first + i
        if memory.where[page] == 0:
            log_change(state.log, time, dst, page, FIRST_TOUCH)
            state.chunks.ready_ns[dst, block] = max(state.chunks.ready_ns[dst, block], time)
        if dst != CPU and memory.evicted_ns[page] > 0:
            _log_refault(state, dst - 1, page, time)
        memory.evicted_ns[page] = -1
        memory.remote[page] = 0
        memory.advice[page] &= ~FROM_CPU
        if dst != CPU and memory.where[page] & CPU_BIT:
            memory.advice[page] |= FROM_CPU
        if bring[i] & KEEP:
            memory.where[page] |= bit
        else:
            _leave(state, rules, page, dst)
            memory.where[page] = bit


@compiled
def _leave(state: State, rules: Rules, page: int, dst: int) -> None:
    """Take a page from the GPUs that held it; a second copy of it is invalidated, not moved."""
    others = state.memory.where[page] & ~(1 << dst)
    source = source_of(state, page, dst)
    for gpu in range(state.gpu.now.shape[0]):
        if others >> (gpu + 1) & 1:
            release(state, gpu, page // rules.block_pages, ONE)
            if state.chunks.resident[gpu, page // rules.block_pages] == 0:
                now = state.gpu.now[gpu]
                now[CHUNK_FREE] = max(now[CHUNK_FREE], state.scratch.time[COPIED])
    if others and others != 1 << source:
        extra = others & ~(1 << source)
        for processor in range(state.gpu.now.shape[0] + 1):
            if extra >> processor & 1:
                time = state.scratch.time[CPU_DONE]
                log_change(state.log, time, processor, page, INVALIDATED)


@compiled
def _log_refault(state: State, gpu: int, page: int, time: int) -> None:
    log = state.log
    n = log.n[N_REFAULTS]
    evicted = state.memory.evicted_ns[page]
    if n:
        last = log.refaults[n - 1]
        same = last[0] == time and last[1] == gpu and last[4] == evicted and last[5] == -1
        if same and last[2] + last[3] == page:
            last[3] += 1
            return
    row = log.refaults[n]
    row[0], row[1], row[2], row[3], row[4], row[5] = time, gpu, page, 1, evicted, -1
    log.n[N_REFAULTS] = n + 1
