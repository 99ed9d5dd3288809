"""A GPU that runs a kernel: resident thread blocks, what they touch, the faults that they raise.

A thread block goes through steps and, within a step, phases (loads, then the stores that wait for
them). All items of a phase are issued at once, up to ``MAX_PENDING`` outstanding faults. After a
replay every waiting access is tried again and what is still missing faults anew; whatever the driver
did not fetch is flushed, so faults recorded are a sample of those raised.
"""

from __future__ import annotations

import numpy as np

from nsan.model.engine.jit import compiled
from nsan.model.engine.link import cross_link, sector_bytes
from nsan.model.engine.patterns import n_items, span
from nsan.model.engine.queue import put, random_below
from nsan.model.engine.residency import accessible
from nsan.model.engine.service import begin_work, serve_batch
from nsan.model.engine.state import (
    ARRIVES,
    BATCHES,
    BUFFERED,
    COPIED,
    CPU_DONE,
    CURSOR,
    DATA,
    DONE,
    ENDED,
    FETCH,
    FETCH_DUE,
    FIRST_TOUCHED,
    FROM_HOST,
    GRID,
    IN_PHASE,
    IN_SERVICE,
    KERNEL,
    LAST_RAISED,
    LIVE,
    MAX_PENDING,
    N_BATCHES,
    N_CHANGES,
    N_COPIES,
    N_EVICTIONS,
    N_FAULTED,
    N_REFAULTS,
    NEXT_BATCH,
    NEXT_TB,
    PENDING,
    PHASE,
    PHASES,
    RAISE_MORE,
    RAISED,
    READ,
    REMOTE,
    REPLAY,
    SEEN,
    SERVICE_END,
    STALE,
    STALLED,
    STEP,
    STEP_NS,
    STEPS,
    STREAMS,
    SWEEP_STEPS,
    TB,
    TB_READY,
    THROTTLED,
    UPGRADED,
    WRITE,
    WRITES,
    Ints,
    Log,
    Rules,
    State,
)

_SLOT_SHIFT = 8
"""Argument of a thread block's event: ``slot << 8 | gpu``."""


@compiled
def start_blocks(state: State, gpu: int, n_slots: int, time: int) -> None:
    """Fill the slots of a GPU with the first thread blocks of its kernel."""
    now = state.gpu.now[gpu]
    for slot in range(min(n_slots, now[GRID])):
        state.gpu.slots[gpu, slot, :] = 0
        state.gpu.slots[gpu, slot, TB] = slot
        put(state.queue, time + slot // 16, TB_READY, slot << _SLOT_SHIFT | gpu)
    now[LIVE] = min(n_slots, now[GRID])
    now[NEXT_TB] = now[LIVE]
    now[STALLED] = 0
    now[DONE] = 0


@compiled
def block_ready(state: State, rules: Rules, gpu: int, slot: int, time: int) -> None:
    """Let a thread block go on: to its next faults, or to the end of its step."""
    now = state.gpu.now[gpu]
    numbers = state.gpu.slots[gpu, slot]
    while True:
        n_missing = _collect(state, rules, gpu, slot)
        cross_link(state, rules, gpu, slot, time)
        if n_missing:
            state.gpu.stalled[gpu, now[STALLED]] = slot
            now[STALLED] += 1
            _raise_faults(state, rules, gpu, slot, time)
            return
        waits = numbers[ARRIVES] > time
        time = max(time, numbers[ARRIVES])
        numbers[CURSOR] = numbers[SEEN] = 0
        numbers[PHASE] += 1
        if numbers[PHASE] == now[PHASES]:
            numbers[PHASE] = 0
            numbers[STEP] += 1
            time += now[STEP_NS]
            if numbers[STEP] >= now[STEPS]:
                if _next_block(state, gpu, slot, time):
                    delay = random_below(state.scratch, rules.jitter_ns)
                    put(state.queue, time + delay, TB_READY, slot << _SLOT_SHIFT | gpu)
                return
        elif not waits:
            continue
        if state.queue.n[0] and state.queue.time[0] <= time:
            put(state.queue, time, TB_READY, slot << _SLOT_SHIFT | gpu)
            return


@compiled
def _next_block(state: State, gpu: int, slot: int, time: int) -> bool:
    """Give the slot to the next thread block of the grid; the last one ends the kernel."""
    now = state.gpu.now[gpu]
    now[ENDED] = max(now[ENDED], time)
    if now[NEXT_TB] < now[GRID]:
        state.gpu.slots[gpu, slot, :] = 0
        state.gpu.slots[gpu, slot, TB] = now[NEXT_TB]
        now[NEXT_TB] += 1
        return True
    now[LIVE] -= 1
    if now[LIVE] == 0:
        now[DONE] = 1
    return False


@compiled
def _collect(state: State, rules: Rules, gpu: int, slot: int) -> int:
    """List the pages of the current phase that are missing, item by item over its streams.

    What is there but not here goes over the link: its bytes are counted.
    """
    now, numbers = state.gpu.now[gpu], state.gpu.slots[gpu, slot]
    place = (numbers[TB], now[GRID], numbers[STEP] % now[SWEEP_STEPS], numbers[STEP])
    bit = 1 << (gpu + 1)
    item = numbers[CURSOR]
    n = 0
    more = True
    while more and n < MAX_PENDING:
        more = False
        seen = 0
        for k in range(now[STREAMS]):
            stream = state.gpu.streams[gpu, k]
            if stream[IN_PHASE] != numbers[PHASE] or item >= n_items(stream, place[2]):
                continue
            more = True
            first, length = span(stream, state.gpu.shapes[gpu, k], place, item)
            if length == 0:
                continue
            last = (first + length - 1) // rules.page_bytes
            for page in range(first // rules.page_bytes, last + 1):
                seen += 1
                if seen <= numbers[SEEN] or n == MAX_PENDING:
                    continue
                numbers[SEEN] = seen
                if not accessible(state, page, gpu + 1, stream[WRITES]):
                    state.gpu.pending[gpu, slot, n] = page << 1 | stream[WRITES]
                    end = first + length - 1
                    state.gpu.pending_bytes[gpu, slot, n] = sector_bytes(rules, page, first, end)
                    n += 1
                elif not state.memory.where[page] & bit:
                    end = first + length - 1
                    numbers[FROM_HOST + stream[WRITES]] += sector_bytes(rules, page, first, end)
        if seen > numbers[SEEN]:
            break  # the rest of this item comes when these pages are there
        numbers[SEEN] = 0
        item += more
    numbers[CURSOR] = item
    numbers[PENDING] = n
    numbers[RAISED] = 0
    return n


@compiled
def _raise_faults(state: State, rules: Rules, gpu: int, slot: int, time: int) -> None:
    """Write a burst of a thread block's missing accesses into the buffer; the rest has its turn."""
    numbers = state.gpu.slots[gpu, slot]
    last = min(numbers[RAISED] + rules.burst, numbers[PENDING])
    for i in range(numbers[RAISED], last):
        if not _enter(state, rules, gpu, state.gpu.pending[gpu, slot, i], time):
            break
    numbers[RAISED] = last
    if last < numbers[PENDING] and state.gpu.now[gpu, BUFFERED] < rules.batch_size:
        put(state.queue, time + rules.turn_ns, RAISE_MORE, slot << _SLOT_SHIFT | gpu)
    call_driver(state, rules, gpu)


@compiled
def raise_more(state: State, rules: Rules, gpu: int, slot: int, time: int) -> None:
    """Go on with a thread block's faults, unless a replay has come between."""
    if state.gpu.slots[gpu, slot, RAISED] < state.gpu.slots[gpu, slot, PENDING]:
        _raise_faults(state, rules, gpu, slot, time)


@compiled
def _enter(state: State, rules: Rules, gpu: int, access: int, time: int) -> bool:
    """Write one entry of the fault buffer; entries are written one after the other."""
    now = state.gpu.now[gpu]
    n = now[BUFFERED]
    if n >= state.gpu.entry_ns.shape[1]:
        return False
    at = max(time, now[LAST_RAISED] + rules.entry_gap_ns)
    state.gpu.entry_page[gpu, n] = access
    state.gpu.entry_ns[gpu, n] = at
    now[LAST_RAISED] = at
    now[BUFFERED] = n + 1
    return True


@compiled
def call_driver(state: State, rules: Rules, gpu: int) -> None:
    """Interrupt the driver if there is something to fetch and it is not on its way or at work."""
    now = state.gpu.now[gpu]
    if now[BUFFERED] and not now[IN_SERVICE] and not now[FETCH_DUE]:
        now[FETCH_DUE] = 1
        raised = max(state.gpu.entry_ns[gpu, 0], now[SERVICE_END])
        cold = rules.cold_ns if now[BATCHES] == 0 else 0
        put(state.queue, raised + rules.interrupt_ns + cold, FETCH, gpu)


@compiled
def fetch(state: State, rules: Rules, gpu: int, time: int) -> None:
    """Take a batch off the buffer, flush what else had arrived, and serve it."""
    now = state.gpu.now[gpu]
    n_arrived = 0
    while n_arrived < now[BUFFERED] and state.gpu.entry_ns[gpu, n_arrived] <= time:
        n_arrived += 1
    now[FETCH_DUE] = 0
    n = min(n_arrived, rules.batch_size)
    if n == 0:
        call_driver(state, rules, gpu)
        return
    free_ns = _when_free(state, rules, gpu, n, time)
    if free_ns > time:
        now[FETCH_DUE] = 1
        put(state.queue, free_ns, FETCH, gpu)
        return
    entries = _sorted(state.gpu.entry_page[gpu], n)
    raised = state.gpu.entry_ns[gpu, 0]
    left = now[BUFFERED] - n_arrived
    for i in range(left):
        state.gpu.entry_page[gpu, i] = state.gpu.entry_page[gpu, n_arrived + i]
        state.gpu.entry_ns[gpu, i] = state.gpu.entry_ns[gpu, n_arrived + i]
    now[BUFFERED] = left
    now[IN_SERVICE] = 1
    _serve(state, rules, gpu, entries, (raised, time))


@compiled
def _when_free(state: State, rules: Rules, gpu: int, n: int, time: int) -> int:
    """Say when nobody else works on a block of this batch: until then its lock is held.

    What was brought to another processor is used there first: another GPU's replay, or the CPU's next
    access, comes before this batch. So everyone goes on.
    """
    memory = state.memory
    free_ns = time
    for i in range(n):
        block = (state.gpu.entry_page[gpu, i] >> 1) // rules.block_pages
        free_ns = max(free_ns, memory.busy_ns[block], memory.replayed_ns[block])
    return free_ns


@compiled
def _sorted(values: Ints, n: int) -> Ints:
    """Sort the first values into a new array (Shell's way: short, and quick to compile)."""
    out = values[:n].copy()
    gap = 1
    while gap < n // 3:
        gap = 3 * gap + 1
    while gap:
        for i in range(gap, n):
            value = out[i]
            j = i
            while j >= gap and out[j - gap] > value:
                out[j] = out[j - gap]
                j -= gap
            out[j] = value
        gap //= 3
    return out


@compiled
def _serve(
    state: State, rules: Rules, gpu: int, entries: np.ndarray, times: tuple[int, int]
) -> None:
    now, log = state.gpu.now[gpu], state.log
    begin_work(state, times[1])
    outcomes = np.zeros(6, np.int64)
    number = log.n[NEXT_BATCH]
    log.n[NEXT_BATCH] = number + 1
    written = (log.n[N_COPIES], log.n[N_CHANGES], log.n[N_EVICTIONS], log.n[N_REFAULTS])
    n_blocks = serve_batch(state, rules, gpu, entries, outcomes)
    time = state.scratch.time
    end = max(time[COPIED], time[CPU_DONE]) + rules.replay_ns
    for i in range(entries.shape[0]):
        state.memory.replayed_ns[(entries[i] >> 1) // rules.block_pages] = end
    _stamp(log, written, number)
    row = log.batches[log.n[N_BATCHES]]
    n_first = _log_entries(state, entries, number)
    row[0], row[1], row[2] = number, gpu, now[KERNEL]
    row[3], row[4], row[5] = times[0], times[1], end
    row[6], row[7] = entries[0] >> 1, n_first
    row[8] = WRITE if entries[n_first - 1] & 1 else READ
    row[9], row[10], row[11] = entries.shape[0], outcomes.sum(), n_blocks
    row[12] = _outcome(outcomes)
    log.n[N_BATCHES] += 1
    now[BATCHES] += 1
    now[SERVICE_END] = end
    put(state.queue, end, REPLAY, gpu)


@compiled
def _stamp(log: Log, written: tuple[int, int, int, int], batch: int) -> None:
    """Write the number of the batch into the rows that its service made."""
    log.copies[written[0] : log.n[N_COPIES], 7] = batch
    log.changes[written[1] : log.n[N_CHANGES], 5] = batch
    log.evictions[written[2] : log.n[N_EVICTIONS], 6] = batch
    log.refaults[written[3] : log.n[N_REFAULTS], 5] = batch


@compiled
def _log_entries(state: State, entries: np.ndarray, batch: int) -> int:
    """Write the distinct pages of a batch; give the number of entries on the lowest."""
    log = state.log
    n_first = 0
    at = 0
    while at < entries.shape[0]:
        page = entries[at] >> 1
        n = 0
        while at + n < entries.shape[0] and entries[at + n] >> 1 == page:
            n += 1
        if at == 0:
            n_first = n
        row = log.faulted[log.n[N_FAULTED]]
        row[0], row[1], row[2] = batch, page, n
        row[3] = WRITE if entries[at + n - 1] & 1 else READ
        log.n[N_FAULTED] += 1
        at += n
    return n_first


@compiled
def _outcome(outcomes: np.ndarray) -> int:
    """Name a batch by the most telling of its pages' outcomes."""
    for outcome in (DATA, FIRST_TOUCHED, UPGRADED, REMOTE, THROTTLED):
        if outcomes[outcome]:
            return outcome
    return STALE


@compiled
def replay(state: State, rules: Rules, gpu: int, time: int) -> None:
    """Try every waiting access again, thread block by thread block in shuffled order."""
    now = state.gpu.now[gpu]
    now[IN_SERVICE] = 0
    n = now[STALLED]
    waiting = state.gpu.stalled[gpu]
    again = time + rules.retry_ns
    n_left = 0
    for i in range(n):
        window = min(rules.shuffle_window, n - i)
        j = i + random_below(state.scratch, window) if window > 1 else i
        slot = waiting[j]
        waiting[j] = waiting[i]
        if _still_missing(state, gpu, slot):
            waiting[n_left] = slot
            n_left += 1
        else:
            delay = random_below(state.scratch, rules.jitter_ns)
            put(state.queue, again + delay, TB_READY, slot << _SLOT_SHIFT | gpu)
    now[STALLED] = n_left
    _raise_in_turns(state, rules, gpu, again)


@compiled
def _still_missing(state: State, gpu: int, slot: int) -> int:
    """Keep the accesses of a thread block that still miss; the others are satisfied for good.

    Those to pages that were mapped from afar have yet to use the link.
    """
    pending, numbers = state.gpu.pending[gpu, slot], state.gpu.slots[gpu, slot]
    n_bytes = state.gpu.pending_bytes[gpu, slot]
    bit = 1 << (gpu + 1)
    n = 0
    for i in range(numbers[PENDING]):
        page, write = pending[i] >> 1, pending[i] & 1
        if not accessible(state, page, gpu + 1, write):
            pending[n], n_bytes[n] = pending[i], n_bytes[i]
            n += 1
        elif not state.memory.where[page] & bit:
            numbers[FROM_HOST + write] += n_bytes[i]
    numbers[PENDING] = n
    numbers[RAISED] = n  # a replay raises what it can itself
    return n


@compiled
def _raise_in_turns(state: State, rules: Rules, gpu: int, time: int) -> None:
    """Write entries of the waiting thread blocks, a burst of each in turn, until a batch is full.

    What comes after a full batch would be flushed unread, so it need not be written.
    """
    now = state.gpu.now[gpu]
    first = 0
    more = True
    while more and now[BUFFERED] < rules.batch_size:
        more = False
        for i in range(now[STALLED]):
            slot = state.gpu.stalled[gpu, i]
            last = min(first + rules.burst, state.gpu.slots[gpu, slot, PENDING])
            for k in range(first, last):
                _enter(state, rules, gpu, state.gpu.pending[gpu, slot, k], time)
            more |= last > first
            if now[BUFFERED] >= rules.batch_size:
                break
        first += rules.burst
    call_driver(state, rules, gpu)
