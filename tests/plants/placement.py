"""Memory in the wrong place: read in turn, used sparsely, or bouncing."""

from planting import Plant

from nsan.model.access import Access, Random, Stream
from nsan.model.making import Recipe, oversubscribed
from nsan.model.program import (
    CPU,
    Advise,
    Allocate,
    HostTouch,
    Kernel,
    Launch,
    Operation,
    PopRange,
    Program,
    PushRange,
    Synchronize,
)
from nsan.model.settings import DEFAULT_SETTINGS, Settings
from nsan.units import KIB, MIB


def kernel(name: str, n_bytes: int, *streams: Access) -> Kernel:
    return Kernel(name, n_bytes // KIB, 256, streams)


def step(*body: Operation) -> list[Operation]:
    return [PushRange("step"), *body, Synchronize(), PopRange()]


def filled(**arrays: int) -> list[Operation]:
    """Allocate arrays, and let the host fill them."""
    every: list[Operation] = [Allocate(name, n_bytes) for name, n_bytes in arrays.items()]
    return [*every, *(HostTouch(name, write=True) for name in arrays)]


def read_in_turn(*hints: Operation, n_bytes: int = 8 * MIB, n_steps: int = 4) -> Program:
    """Let two GPUs read the same weights in each step, and write arrays of their own."""
    once: list[Operation] = []
    for gpu in (0, 1):
        own = Stream(allocation=f"out{gpu}", write=True)
        apply = kernel(f"apply{gpu}", n_bytes, Stream(allocation="weights"), own)
        once += step(Launch(apply, gpu))
    start = [Allocate("out0", n_bytes), Allocate("out1", n_bytes), *filled(weights=n_bytes)]
    return Program("read_in_turn", (*start, *hints, *once * n_steps))


def gathered(*hints: Operation, table: int = 64 * MIB, n_steps: int = 3) -> Program:
    """Gather a few rows of a large table, and sweep over a small array, in each step."""
    size = 8 * MIB
    sweep = kernel("sweep", size, Stream(allocation="dense", write=True))
    operations = [*filled(table=table, dense=size), *hints]
    for seed in range(n_steps):
        rows = Random(allocation="table", draws=1, element_bytes=64, seed=seed)
        operations += step(Launch(Kernel("gather", 64, 256, (rows,))), Launch(sweep))
    return Program("gathered", tuple(operations))


FLAG = 64 * KIB


def polled(*hints: Operation, n_bytes: int = 16 * MIB, n_polls: int = 60) -> Program:
    """Let the host poll counters in the middle of an array on which a kernel works."""
    at = n_bytes // 2
    counters = Stream(allocation="data", write=True, offset_bytes=at, n_bytes=FLAG)
    data = Stream(allocation="data", n_bytes=at)
    produce = Kernel("produce", 64, 256, (data, counters), 1_000_000.0, repeat=8)
    poll = HostTouch("data", offset_bytes=at, n_bytes=FLAG, ns_per_mib=1_600_000.0)
    steps = step(Launch(produce), *[poll] * n_polls) * 2
    return Program("polled", (*filled(data=n_bytes), *hints, *steps))


def at_cpu(name: str, offset: int = 0, n_bytes: int | None = None) -> tuple[Advise, Advise]:
    part = (offset, n_bytes)
    return (
        Advise(name, "preferred_location", CPU, *part),
        Advise(name, "accessed_by", 0, *part),
    )


_TIGHT = oversubscribed(DEFAULT_SETTINGS, 72 * MIB, 1.5)

PLANTS = (
    Plant(
        "read-in-turn",
        "read_mostly",
        Recipe(read_in_turn(), Settings(n_gpus=2)),
        "weights",
        Recipe(read_in_turn(Advise("weights", "read_mostly")), Settings(n_gpus=2)),
    ),
    Plant(
        "sparse-and-full",
        "place_and_map",
        Recipe(gathered(), _TIGHT),
        "table",
        Recipe(gathered(*at_cpu("table")), _TIGHT),
    ),
    Plant(
        "polled-counters",
        "ping_pong",
        Recipe(polled()),
        "data",
        Recipe(polled(*at_cpu("data", 8 * MIB, FLAG))),
    ),
)
CLEAN = ()
