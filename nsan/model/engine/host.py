"""The host thread: it touches pages one after the other, beside what the GPUs do."""

from __future__ import annotations

from typing import Final

from nsan.model.engine.jit import compiled
from nsan.model.engine.queue import put, random_below
from nsan.model.engine.residency import accessible
from nsan.model.engine.service import log_cpu_fault, serve_cpu_fault
from nsan.model.engine.state import (
    CPU,
    END_PAGE,
    FAULT_LOGGED,
    FROM_CPU,
    HOST_READY,
    HOST_TIME,
    HOST_WRITES,
    NS_PER_PAGE,
    PAGE,
    RUNNING,
    THROTTLED,
    TOUCHED,
    Rules,
    State,
    number,
)

TOUCHES: Final = number(64)
"""Accesses to one page that the host thread makes, evenly spaced, while a GPU is at work."""


@compiled
def host_ready(state: State, rules: Rules, time: int) -> None:
    """Touch pages until one faults, something else is due, or the range is done."""
    host = state.host
    while host[PAGE] < host[END_PAGE]:
        page = host[PAGE]
        if accessible(state, page, CPU, host[HOST_WRITES]) or _still_here(state, rules, page, time):
            host[FAULT_LOGGED] = 0
            # Alone, a page is one step; beside a GPU that may take it away, it is several.
            n = 1 if state.queue.n[0] else TOUCHES - host[TOUCHED]
            host[TOUCHED] += n
            time += host[NS_PER_PAGE] * n // TOUCHES
            if host[TOUCHED] >= TOUCHES:
                host[TOUCHED] = 0
                host[PAGE] += 1
        else:
            # Back to the loop after each fault: it sees to the room that the log has.
            put(state.queue, _fault(state, rules, page, time), HOST_READY, CPU)
            return
        if state.queue.n[0] and state.queue.time[0] <= time:
            put(state.queue, time, HOST_READY, CPU)
            return
    host[RUNNING] = 0
    host[HOST_TIME] = time


@compiled
def _still_here(state: State, rules: Rules, page: int, time: int) -> bool:
    """Say whether the CPU can use a page that a batch is about to take from it."""
    memory = state.memory
    soon = time < memory.leaves_ns[page // rules.block_pages]
    return bool(soon and memory.advice[page] & FROM_CPU)


@compiled
def _fault(state: State, rules: Rules, page: int, time: int) -> int:
    """Fault on a page; give when the thread tries again."""
    host = state.host
    if not host[FAULT_LOGGED]:
        log_cpu_fault(state, time, page, host[HOST_WRITES])
        host[FAULT_LOGGED] = 1
    busy = state.memory.busy_ns[page // rules.block_pages]
    if busy > time:
        # Who waits for a lock wakes up some time after it is free; a GPU's replay may come first.
        return busy + random_below(state.scratch, rules.wake_ns)
    outcome, again = serve_cpu_fault(state, rules, page, host[HOST_WRITES], time)
    if outcome == THROTTLED:
        host[FAULT_LOGGED] = 0
    return again
