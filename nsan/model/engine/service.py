"""What the driver does with faults: a batch of a GPU block by block, a fault of the CPU at once."""

from __future__ import annotations

import numpy as np

from nsan.model.engine.jit import compiled, prefetch_leaves
from nsan.model.engine.residency import (
    accessible,
    bring_pages,
    clear_marks,
    drop_other_copies,
    log_change,
    make_room,
    mark_page,
)
from nsan.model.engine.state import (
    COHERENCE,
    COPIED,
    COPY_AFTER,
    CPU,
    CPU_BIT,
    CPU_DONE,
    DATA,
    FIRST_TOUCH,
    FIRST_TOUCHED,
    FROM,
    KEEP,
    N_CPU_FAULTS,
    PREFETCH,
    READ,
    READ_MOSTLY,
    REMOTE,
    STALE,
    THROTTLED,
    TO,
    UPGRADED,
    USER,
    WRITE,
    Rules,
    State,
)
from nsan.model.engine.thrashing import (
    MAP_REMOTELY,
    WAIT,
    advise,
    count_move,
    forget,
    is_thrashing,
    log_throttle,
    watch,
)


@compiled
def begin_work(state: State, time: int) -> None:
    """Start the pipeline of one service at a time."""
    scratch = state.scratch.time
    scratch[CPU_DONE] = time
    scratch[COPY_AFTER] = 0
    scratch[COPIED] = 0


@compiled
def wants_remote(state: State, page: int, processor: int) -> bool:
    """Say whether advice keeps a page where it is, mapped from afar; only GPUs can."""
    memory = state.memory
    if processor == CPU or not memory.where[page] & CPU_BIT:
        return False
    return bool(memory.preferred[page] == CPU or memory.accessed_by[page] & (1 << processor))


@compiled
def fault_on(state: State, rules: Rules, page: int, processor: int, write: int) -> int:
    """Settle one faulted page: mark it to be brought, or say what else became of it."""
    memory, time = state.memory, state.scratch.time[CPU_DONE]
    if accessible(state, page, processor, write):
        return STALE
    bit = 1 << processor
    if memory.where[page] & bit:
        drop_other_copies(state, page, processor, time)
        return UPGRADED
    if memory.where[page] == 0 and processor != CPU and memory.preferred[page] == CPU:
        memory.where[page] = CPU_BIT
        log_change(state.log, time, CPU, page, FIRST_TOUCH)
    if wants_remote(state, page, processor):
        if write:
            drop_other_copies(state, page, CPU, time)
        memory.remote[page] |= bit
        return REMOTE
    decision = advise(state, rules, page, processor, time)
    if decision == WAIT:
        log_throttle(state, page, processor, time)
        return THROTTLED
    if decision == MAP_REMOTELY and memory.where[page] == CPU_BIT:
        memory.remote[page] |= bit
        return REMOTE
    outcome = DATA if memory.where[page] else FIRST_TOUCHED
    mark = COHERENCE
    if memory.advice[page] & READ_MOSTLY and not write:
        mark |= KEEP
    mark_page(state.scratch, page % rules.block_pages, mark)
    if outcome == FIRST_TOUCHED and memory.preferred[page] == processor:
        _take_whole_block(state, rules, page // rules.block_pages, processor)
    return outcome


@compiled
def _take_whole_block(state: State, rules: Rules, block: int, processor: int) -> None:
    """First touch at the preferred location: populate all of the block that is nowhere yet."""
    memory = state.memory
    for i in range(rules.block_pages):
        page = block * rules.block_pages + i
        preferred = memory.where[page] == 0 and memory.preferred[page] == processor
        if preferred and not state.scratch.bring[i]:
            mark_page(state.scratch, i, PREFETCH)


@compiled
def widen(state: State, rules: Rules, block: int, processor: int) -> None:
    """Add what comes along with the marked pages: the rest of their leaves, and denser nodes."""
    scratch, memory = state.scratch, state.memory
    first = block * rules.block_pages
    bit = 1 << processor
    time = scratch.time[CPU_DONE]
    for leaf in range(scratch.occupied.shape[0]):
        scratch.occupied[leaf] = 0
        scratch.faulted[leaf] = 0
        wide = 0
        for i in range(leaf * rules.leaf_pages, (leaf + 1) * rules.leaf_pages):
            if scratch.bring[i]:
                scratch.faulted[leaf] = 1
                wide |= not is_thrashing(state, rules, first + i, time)
        for i in range(leaf * rules.leaf_pages, (leaf + 1) * rules.leaf_pages):
            resident = memory.where[first + i] & bit
            if wide and not scratch.bring[i] and not resident:
                _mark_prefetch(state, rules, first + i, processor)
            scratch.occupied[leaf] += resident != 0 or scratch.bring[i] != 0
    prefetch_leaves(
        scratch.occupied, scratch.faulted, scratch.chosen, rules.leaf_pages, rules.threshold
    )
    for leaf in range(scratch.chosen.shape[0]):
        if scratch.chosen[leaf]:
            for i in range(leaf * rules.leaf_pages, (leaf + 1) * rules.leaf_pages):
                if not scratch.bring[i] and not memory.where[first + i] & bit:
                    _mark_prefetch(state, rules, first + i, processor)


@compiled
def _mark_prefetch(state: State, rules: Rules, page: int, processor: int) -> None:
    """Mark a page that nobody asked for, unless it thrashes or advice keeps it elsewhere."""
    if is_thrashing(state, rules, page, state.scratch.time[CPU_DONE]):
        return
    if wants_remote(state, page, processor):
        return
    mark = PREFETCH
    if state.memory.advice[page] & READ_MOSTLY:
        mark |= KEEP
    mark_page(state.scratch, page % rules.block_pages, mark)


@compiled
def serve_block(state: State, rules: Rules, block: int, gpu: int, n_faulted: int) -> int:
    """Bring the marked pages of one block to a GPU, with all they cost; count those copied."""
    scratch = state.scratch
    if rules.prefetch:
        widen(state, rules, block, gpu + 1)
    n_new = 0
    for i in range(scratch.marked[FROM], scratch.marked[TO]):
        n_new += scratch.bring[i] != 0
    cost = rules.block_ns + rules.page_ns * n_new + rules.fault_ns * n_faulted
    if not state.chunks.serviced[gpu, block]:
        state.chunks.serviced[gpu, block] = 1
        cost += rules.first_block_ns
    scratch.time[CPU_DONE] += int(cost)
    scratch.time[COPY_AFTER] = 0
    state.memory.leaves_ns[block] = scratch.time[CPU_DONE]
    make_room(state, rules, gpu, block)
    _count_moves(state, rules, block, gpu + 1)
    return bring_pages(state, rules, block, gpu + 1)


@compiled
def _count_moves(state: State, rules: Rules, block: int, processor: int) -> None:
    """Count the moves of the marked pages; a first touch is none."""
    first = block * rules.block_pages
    moves = False
    marked = range(state.scratch.marked[FROM], state.scratch.marked[TO])
    for i in marked:
        moves |= state.scratch.bring[i] != 0 and state.memory.where[first + i] != 0
    if not moves or not watch(state, rules, block, processor, state.scratch.time[CPU_DONE]):
        return
    for i in marked:
        if state.scratch.bring[i] and state.memory.where[first + i]:
            count_move(state, rules, first + i, state.scratch.time[CPU_DONE])


@compiled
def serve_batch(
    state: State, rules: Rules, gpu: int, entries: np.ndarray, outcomes: np.ndarray
) -> int:
    """Serve the sorted entries of a batch; fill how many pages had each outcome; count blocks.

    An entry is ``page << 1 | write``.
    """
    scratch = state.scratch
    outcomes[:] = 0
    n_blocks = 0
    at = np.int64(0)
    while at < entries.shape[0]:
        block = (entries[at] >> 1) // rules.block_pages
        clear_marks(scratch)
        n_faulted = 0
        last = -1
        while at < entries.shape[0] and (entries[at] >> 1) // rules.block_pages == block:
            page = entries[at] >> 1
            if page != last:
                write = _any_write(entries, at, page)
                outcome = fault_on(state, rules, page, gpu + 1, write)
                outcomes[outcome] += 1
                n_faulted += outcome in (DATA, FIRST_TOUCHED)
                last = page
            at += 1
        n_blocks += 1
        if n_faulted:
            serve_block(state, rules, block, gpu, n_faulted)
        else:
            scratch.time[CPU_DONE] += rules.skip_ns
        # The CPU can have the block as soon as its copies are done, before the GPU's replay.
        state.memory.busy_ns[block] = max(scratch.time[CPU_DONE], scratch.time[COPIED]) + 1
    return n_blocks


@compiled
def _any_write(entries: np.ndarray, at: int, page: int) -> int:
    """Say whether an entry of this page writes: equal pages are neighbours, reads before writes."""
    while at + 1 < entries.shape[0] and entries[at + 1] >> 1 == page:
        at += 1
    return entries[at] & 1


@compiled
def serve_cpu_fault(
    state: State, rules: Rules, page: int, write: int, time: int
) -> tuple[int, int]:
    """Serve a fault of the CPU; give its outcome and when the thread goes on."""
    begin_work(state, time)
    scratch = state.scratch
    clear_marks(scratch)
    block = page // rules.block_pages
    outcome = fault_on(state, rules, page, CPU, write)
    if outcome == THROTTLED:
        return outcome, state.memory.throttled_ns[page]
    if outcome in (STALE, UPGRADED):
        return outcome, time + rules.cpu_touch_ns
    scratch.time[CPU_DONE] = time + (rules.cpu_fault_ns if outcome == DATA else rules.cpu_touch_ns)
    if rules.prefetch:
        widen(state, rules, block, CPU)
    _count_moves(state, rules, block, CPU)
    bring_pages(state, rules, block, CPU)
    again = max(scratch.time[COPIED], scratch.time[CPU_DONE]) + rules.replay_ns
    state.memory.busy_ns[block] = max(state.memory.busy_ns[block], again)
    return outcome, again


@compiled
def log_cpu_fault(state: State, time: int, page: int, write: int) -> None:
    """Write a fault of the CPU."""
    log = state.log
    row = log.cpu_faults[log.n[N_CPU_FAULTS]]
    row[0], row[1], row[2] = time, page, WRITE if write else READ
    log.n[N_CPU_FAULTS] += 1


@compiled
def migrate_block(state: State, rules: Rules, block: int, dst: int, pages: tuple[int, int]) -> int:
    """Move pages of one block to a processor because the user asked; give the end of the last copy.

    ``pages`` is the half-open range of pages. The pipeline of the call goes on from block to block.
    """
    scratch, memory = state.scratch, state.memory
    bit = 1 << dst
    clear_marks(scratch)
    n_new = 0
    for page in range(pages[0], pages[1]):
        forget(state, rules, page)
        if not memory.where[page] & bit:
            mark = USER
            if memory.advice[page] & READ_MOSTLY:
                mark |= KEEP
            mark_page(scratch, page % rules.block_pages, mark)
            n_new += 1
    if n_new == 0:
        return scratch.time[CPU_DONE]
    scratch.time[CPU_DONE] = max(scratch.time[CPU_DONE], scratch.time[COPIED] + 1)
    scratch.time[CPU_DONE] = max(scratch.time[CPU_DONE], memory.busy_ns[block])
    scratch.time[CPU_DONE] += rules.prefetch_block_ns
    scratch.time[COPY_AFTER] = 0
    if dst != CPU:
        make_room(state, rules, dst - 1, block)
        state.chunks.serviced[dst - 1, block] = 1
    bring_pages(state, rules, block, dst)
    end = max(scratch.time[COPIED], scratch.time[CPU_DONE])
    memory.busy_ns[block] = max(memory.busy_ns[block], end)
    return end
