"""The link between a GPU and the host, as thread blocks use it for pages that are mapped from afar.

Each GPU has one link in each direction, at the rate of its copy engines. The accesses of a thread block
queue up for it and move whole sectors; the block waits until they are through, and for the latency of one
access. So many thread blocks share the rate, and one alone is bound by the latency.

Assumed: kernels reach the rate of the copy engines; nothing of the host's memory stays in a cache of the
GPU, so each access pays again; stores wait as loads do; migrations and these accesses do not slow each
other down. No capture that the model was calibrated on tells these apart.
"""

from __future__ import annotations

import math
from typing import Final

from nsan.model.engine.jit import compiled
from nsan.model.engine.state import ARRIVES, FROM_HOST, TO_HOST, Rules, State, number

SECTOR_BYTES: Final = number(32)
"""What one access moves at least (CUDA programming guide: transactions of 32 byte)."""


@compiled
def sector_bytes(rules: Rules, page: int, first: int, last: int) -> int:
    """Count the bytes of the sectors of one page that a span of bytes, both ends included, touches."""
    first = max(first, page * rules.page_bytes)
    last = min(last, (page + 1) * rules.page_bytes - 1)
    return (last // SECTOR_BYTES - first // SECTOR_BYTES + 1) * SECTOR_BYTES


@compiled
def cross_link(state: State, rules: Rules, gpu: int, slot: int, time: int) -> None:
    """Send the remote accesses that a thread block has issued over the link; note when they are done."""
    numbers = state.gpu.slots[gpu, slot]
    for way in (FROM_HOST, TO_HOST):
        if numbers[way]:
            rate = rules.htod_ns_per_byte if way == FROM_HOST else rules.dtoh_ns_per_byte
            free = state.gpu.link_free_ns[gpu, way - FROM_HOST]
            end = max(free, float(time)) + numbers[way] * rate
            state.gpu.link_free_ns[gpu, way - FROM_HOST] = end
            numbers[ARRIVES] = max(numbers[ARRIVES], math.ceil(end) + rules.remote_ns)
            numbers[way] = 0
