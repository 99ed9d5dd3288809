"""Kernels that wait for page faults on what could have been prefetched, and the like."""

from planting import Plant

from nsan.model.access import Stream
from nsan.model.making import Recipe
from nsan.model.program import (
    Allocate,
    HostTouch,
    Kernel,
    Launch,
    Operation,
    Prefetch,
    Program,
    Synchronize,
)
from nsan.model.size import Size
from nsan.model.workloads import workload
from nsan.units import MIB

_STREAM = workload("stream")


def _refilled(*, prefetched: bool, n_bytes: int = 8 * MIB, n_steps: int = 5) -> Program:
    """Let the host fill an input anew in each step, and a kernel read it: no copies of it can be kept."""
    streams = (Stream(allocation="inp"), Stream(allocation="out", write=True, phase=1))
    infer = Kernel("infer", n_bytes // 1024, 256, streams, 200_000.0)
    steps: list[Operation] = []
    for _ in range(n_steps):
        ahead = [Prefetch("inp")] * prefetched
        steps += [HostTouch("inp", write=True), *ahead, Launch(infer), Synchronize()]
    return Program("refilled", (Allocate("inp", n_bytes), Allocate("out", n_bytes), *steps))


PLANTS = (
    Plant(
        "no-prefetch",
        "prefetch_before_use",
        Recipe(_STREAM.build(Size(32 * MIB))),
        "x",
        Recipe(_STREAM.build(Size(32 * MIB, prefetch="ahead"))),
    ),
    Plant(
        "refilled-input",
        "prefetch_before_use",
        Recipe(_refilled(prefetched=False)),
        "inp",
        Recipe(_refilled(prefetched=True)),
    ),
)
CLEAN = ()
