"""The driver's measures against ping-pong: count quick moves, throttle one side, at last pin.

Constants and order as in ``uvm_perf_thrashing.c``; a pin after exactly ten throttles and the lapse of
500 us are confirmed on hardware. Evictions do not count, and a user's migration resets.
"""

from __future__ import annotations

from typing import Final

from nsan.model.engine.jit import compiled
from nsan.model.engine.queue import put
from nsan.model.engine.state import (
    CPU,
    MAX_PINS,
    N_MEASURES,
    REMOTE_MAP,
    THRASHING,
    THROTTLING,
    UNPIN,
    Rules,
    State,
    number,
)

MIGRATE: Final = number(0)
WAIT: Final = number(1)
MAP_REMOTELY: Final = number(2)


@compiled
def is_thrashing(state: State, rules: Rules, page: int, time: int) -> bool:
    """Say whether a page counts as thrashing; a quiet epoch ends it."""
    if not rules.thrashing or state.memory.moves[page] < rules.thrash_events:
        return False
    if time - state.memory.moved_ns[page] > rules.epoch_ns:
        forget(state, rules, page)
        return False
    return True


@compiled
def forget(state: State, rules: Rules, page: int) -> None:
    """Reset what is known of a page's moves."""
    if rules.thrashing:
        state.memory.moves[page] = 0
        state.memory.throttles[page] = 0
        state.memory.owner[page] = -1
        state.memory.throttled_ns[page] = 0
        state.memory.pinned_ns[page] = 0


@compiled
def advise(state: State, rules: Rules, page: int, processor: int, time: int) -> int:
    """Decide what a fault on a page gets: its page, a wait, or a remote mapping."""
    if not is_thrashing(state, rules, page, time):
        return MIGRATE
    memory = state.memory
    if memory.pinned_ns[page] > time:
        # Pinned where everyone can reach it: a GPU reaches the CPU's memory, not the reverse.
        return MIGRATE if processor == CPU else MAP_REMOTELY
    if memory.owner[page] == processor:
        return MIGRATE
    if memory.throttled_ns[page] > time:
        return WAIT
    if memory.throttles[page] >= rules.pin_after:
        memory.pinned_ns[page] = time + rules.pin_ns
        if state.queue.n[0] < MAX_PINS:
            put(state.queue, time + rules.pin_ns, UNPIN, page)
        memory.throttles[page] = 0
        memory.owner[page] = -1
        log_measure(state, time, time, processor, page, REMOTE_MAP)
        return MIGRATE if processor == CPU else MAP_REMOTELY
    memory.owner[page] = processor
    memory.throttled_ns[page] = time + rules.nap_ns
    memory.throttles[page] += 1
    return MIGRATE


@compiled
def watch(state: State, rules: Rules, block: int, processor: int, time: int) -> bool:
    """Note that a fault moves pages of a block; say whether its pages are counted.

    The driver begins to count once two processors have touched the block within a lapse, and not
    with that touch itself. That is why a page is found thrashing at its fifth move where the block
    was quiet before (three traces of ../nvprof), and at its third where it was not (F2).
    """
    if not rules.thrashing:
        return False
    memory = state.memory
    counted = memory.watched[block] != 0
    other = memory.toucher[block] >= 0 and memory.toucher[block] != processor
    if other and time - memory.touched_ns[block] <= rules.lapse_ns:
        memory.watched[block] = 1
    memory.toucher[block] = processor
    memory.touched_ns[block] = time
    return counted


@compiled
def unpin(state: State, page: int, time: int) -> None:
    """End a pin: the mapping goes, and the next access faults."""
    if state.memory.pinned_ns[page] <= time:
        state.memory.pinned_ns[page] = 0
        state.memory.remote[page] = 0


@compiled
def count_move(state: State, rules: Rules, page: int, time: int) -> None:
    """Count a move of a page that a fault caused; the third quick one marks it."""
    memory = state.memory
    quick = time - memory.moved_ns[page] <= rules.lapse_ns
    if memory.moves[page] >= rules.thrash_events:
        memory.moved_ns[page] = time
        return
    memory.moves[page] = memory.moves[page] + 1 if quick else 1
    memory.moved_ns[page] = time
    if memory.moves[page] == rules.thrash_events:
        log_measure(state, time, time, CPU, page, THRASHING)


@compiled
def log_measure(state: State, start: int, end: int, processor: int, page: int, kind: int) -> None:
    """Write one measure; pages of one detection become one row each, as the driver writes them."""
    log = state.log
    row = log.measures[log.n[N_MEASURES]]
    row[0], row[1], row[2], row[3], row[4], row[5] = start, end, processor, page, 1, kind
    row[6] = processor == CPU
    log.n[N_MEASURES] += 1


@compiled
def log_throttle(state: State, page: int, processor: int, time: int) -> None:
    """Write a throttle once per nap: the side that waits, from its first fault to the nap's end."""
    log = state.log
    until = state.memory.throttled_ns[page]
    for at in range(log.n[N_MEASURES] - 1, max(log.n[N_MEASURES] - 64, -1), -1):
        row = log.measures[at]
        if row[5] == THROTTLING and row[3] == page and row[2] == processor and row[1] == until:
            return
    log_measure(state, time, until, processor, page, THROTTLING)
