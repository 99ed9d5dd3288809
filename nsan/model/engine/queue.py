"""Events in order of time; equal times keep the order in which they were put."""

from __future__ import annotations

import numpy as np

from nsan.model.engine.jit import compiled
from nsan.model.engine.state import Queue, Scratch


@compiled
def put(queue: Queue, time: int, kind: int, argument: int) -> None:
    """Add an event."""
    n = queue.n[0]
    order = queue.n[1]
    queue.n[0] = n + 1
    queue.n[1] = order + 1
    while n > 0:
        up = (n - 1) >> 1
        if queue.time[up] <= time:
            break
        queue.time[n] = queue.time[up]
        queue.code[n] = queue.code[up]
        queue.order[n] = queue.order[up]
        n = up
    queue.time[n] = time
    queue.code[n] = kind << 32 | argument
    queue.order[n] = order


@compiled
def drop_first(queue: Queue) -> None:
    """Take the earliest event off; read it from the front before."""
    n = queue.n[0] - 1
    queue.n[0] = n
    time, code, order = queue.time[n], queue.code[n], queue.order[n]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= n:
            break
        other = child + 1
        if other < n and _earlier(queue, other, queue.time[child], queue.order[child]):
            child = other
        if not _earlier(queue, child, time, order):
            break
        queue.time[at] = queue.time[child]
        queue.code[at] = queue.code[child]
        queue.order[at] = queue.order[child]
        at = child
    queue.time[at] = time
    queue.code[at] = code
    queue.order[at] = order


@compiled
def _earlier(queue: Queue, at: int, time: int, order: int) -> bool:
    return queue.time[at] < time or (queue.time[at] == time and queue.order[at] < order)


@compiled
def random_below(scratch: Scratch, limit: int) -> int:
    """Draw a number from 0 to ``limit - 1``: xorshift, the same on every machine."""
    x = scratch.random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    scratch.random[0] = x
    return np.int64((x >> np.uint64(33)) % np.uint64(limit))


@compiled
def mixed(seed: int, a: int, b: int) -> int:
    """Hash three numbers to one from 0 to 2**62 - 1 (splitmix64): a draw that needs no state."""
    x = (
        np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
        + np.uint64(a) * np.uint64(0xBF58476D1CE4E5B9)
        + np.uint64(b) * np.uint64(0x94D049BB133111EB)
    )
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((x ^ (x >> np.uint64(31))) >> np.uint64(2))
