"""Random small programs for the driver model, a bounded run, and an independent replay of its log."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import polars as pl
from hypothesis import strategies as st

from nsan.model import machine
from nsan.model.access import (
    Broadcast,
    Chase,
    Matrix,
    Random,
    Stencil,
    Stream,
    Strided,
    Zipf,
)
from nsan.model.happened import Happened
from nsan.model.profiles import GPUS, HOSTS
from nsan.model.program import (
    CPU,
    Advise,
    Allocate,
    Copy,
    DeviceAllocate,
    Discard,
    Fill,
    Free,
    HostTouch,
    HostWait,
    Kernel,
    Launch,
    Mark,
    MarkDead,
    PopRange,
    Prefetch,
    Program,
    PushRange,
    Synchronize,
)
from nsan.model.recording import BASE_VA
from nsan.model.settings import Settings
from nsan.model.truth import TRUTH_TABLES
from nsan.units import KIB, MIB
from nsan.uvm.constants import VA_BLOCK_BYTES

MAX_BATCHES = 100_000
"""No program here needs a tenth of it: more is a run without end."""

MAX_TURNS = 1_000
"""How often a run may report; the engine handles up to two million events between two reports."""


class EndlessError(AssertionError):
    """A program does not come to an end."""


@dataclass(frozen=True)
class Ran:
    """A run: its program and settings, what it left, and where the engine has each page at the end."""

    program: Program
    settings: Settings
    happened: Happened
    where: np.ndarray

    @property
    def page_bytes(self) -> int:
        return self.settings.host_profile.page_bytes

    @property
    def block_pages(self) -> int:
        return VA_BLOCK_BYTES // self.page_bytes

    def rows(self, table):
        """Rows of a table of the log, as dictionaries."""
        return self.happened.log[table].to_dicts()

    def batches(self, gpu):
        return [row for row in self.rows("batches") if row["gpu"] == gpu]

    def place(self, name):
        """Half-open range of pages of an allocation; the last life of that name."""
        life = [life for life in self.happened.lives if life.name == name][-1]
        last = -(-(life.start + life.n_bytes) // self.page_bytes)
        return life.start // self.page_bytes, last

    def resident(self, processor):
        """Pages that the engine has at a processor at the end; -1 is the CPU."""
        return set(np.flatnonzero(self.where >> (processor + 1) & 1).tolist())


def run_to_end(program, settings):
    """Run a program; a run that never ends is an error, not a hanging test."""

    turns = itertools.count()

    def watch(_, batches):
        if batches > MAX_BATCHES or next(turns) > MAX_TURNS:
            raise EndlessError(f"{batches} batches and no end: {program} {settings}")

    host = machine._Host(program, settings, watch)
    happened = host.run()
    return Ran(program, settings, happened, host._streams.state.memory.where.copy())


def modelled(*operations, **settings):
    """Run operations on a machine of these settings."""
    return run_to_end(Program("test", operations), Settings(**settings))


def residency_changes(ran):
    """The truth's residency changes; at equal times departures go before arrivals."""
    changes = TRUTH_TABLES["residency_changes"].build(ran.happened, ran.settings, {})
    pages = ((pl.col("va") - BASE_VA) // ran.page_bytes).cast(pl.Int64)
    return (
        changes.with_columns(
            page=pages, n_pages=pl.col("bytes") // ran.page_bytes, place=pl.col("processor") + 1
        )
        .sort("time_ns", "arrives", maintain_order=True)
        .to_dicts()
    )


# Strategies -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mood:
    """What a random program is after."""

    sizes: st.SearchStrategy
    chunks: st.SearchStrategy
    paces: tuple[float, ...] = (100_000.0, 0.0, 5e6)
    computing: tuple[float, ...] = (0.0, 10_000.0, 200_000.0)
    repeats: tuple[int, ...] = (1, 2)


ANY = Mood(
    sizes=st.one_of(
        st.sampled_from([4 * KIB, 64 * KIB, 512 * KIB, 2 * MIB, 2 * MIB + 4 * KIB, 4 * MIB]),
        st.integers(1, 5 * MIB),
    ),
    chunks=st.integers(1, 6),
)
CROWD = Mood(sizes=st.integers(4, 12).map(lambda n: n * 512 * KIB), chunks=st.integers(1, 2))
"""More blocks than the GPU has room for."""

FIGHT = Mood(
    sizes=st.sampled_from([4 * KIB, 8 * KIB, 64 * KIB]),
    chunks=st.integers(1, 3),
    paces=(1e7, 1e8, 1e9),
    computing=(10_000.0, 1e7, 1e8),
    repeats=(1, 4, 16),
)
"""Few pages, used for long: processors meet there."""


@st.composite
def settings(draw, *, mood=ANY, **fixed):
    """A machine with little memory."""
    chosen = {
        "gpu": draw(st.sampled_from(sorted(GPUS))),
        "host": draw(st.sampled_from(sorted(HOSTS))),
        "n_gpus": draw(st.sampled_from([1, 1, 2, 3])),
        "capacity_bytes": draw(mood.chunks) * VA_BLOCK_BYTES,
        "prefetch": draw(st.booleans()),
        "prefetch_threshold": draw(st.sampled_from([51, 51, 1, 49, 75, 100])),
        "batch_size": draw(st.one_of(st.just(256), st.integers(1, 256))),
        "thrashing": draw(st.booleans()),
        "pin_after": draw(st.sampled_from([10, 1, 3])),
        "peer": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }
    return Settings(**chosen | fixed)


@st.composite
def parts(draw, n_bytes):
    """Offset and size of a part of an allocation; mostly all of it."""
    if draw(st.integers(0, 3)):
        return 0, None
    offset = draw(st.integers(0, n_bytes - 1))
    return offset, draw(st.integers(1, n_bytes - offset))


@st.composite
def accesses(draw, sizes_by_name, most_bytes):
    """An access stream over one of the allocations, or over no more than ``most_bytes`` of it."""
    name = draw(st.sampled_from(sorted(sizes_by_name)))
    offset, n_bytes = draw(parts(sizes_by_name[name]))
    size = min(sizes_by_name[name] - offset if n_bytes is None else n_bytes, most_bytes)
    common = {
        "allocation": name,
        "write": draw(st.booleans()),
        "phase": draw(st.integers(0, 1)),
        "offset_bytes": offset,
        "n_bytes": size,
    }
    side = max(int((size // 4) ** 0.5), 1)
    few = st.integers(1, 16)
    makers = [
        lambda: Stream(**common, backward=draw(st.booleans())),
        lambda: Strided(**common, stride_bytes=draw(st.sampled_from([4 * KIB, 64 * KIB, 5000]))),
        lambda: Random(**common, element_bytes=1, draws=draw(few), seed=draw(few)),
        lambda: Zipf(**common, element_bytes=min(256, size), draws=draw(few)),
        lambda: Stencil(**common, width=side, height=side, tile=4 * draw(few), halo=1),
        lambda: Matrix(**common, role=draw(st.sampled_from("ABC")), n=min(side, 256), tile=64),
        lambda: Chase(**common, hops=4 * draw(few), element_bytes=min(64, size)),
        lambda: Broadcast(**common, chunk_bytes=draw(st.sampled_from([4 * KIB, 64 * KIB]))),
    ]
    return draw(st.sampled_from(makers))()


@st.composite
def kernels(draw, sizes_by_name, mood):
    """A kernel over some of the allocations, of no more than about 64 steps."""
    grid, threads = draw(st.integers(1, 12)), draw(st.sampled_from([1, 32, 256, 1024]))
    most_bytes = 64 * max(grid * threads * 4, 4 * KIB if grid == 1 else 0)
    streams = draw(st.lists(accesses(sizes_by_name, most_bytes), min_size=1, max_size=3))
    return Kernel(
        draw(st.sampled_from("pqr")),
        grid,
        threads,
        tuple(streams),
        compute_ns_per_mib=draw(st.sampled_from(mood.computing)),
        repeat=draw(st.sampled_from(mood.repeats)),
    )


ADVICES = [
    prefix + advice
    for advice in ("read_mostly", "preferred_location", "accessed_by")
    for prefix in ("", "unset_")
]


class _Building:
    """A program under way: what is allocated, and the next operation drawn."""

    def __init__(self, draw, mood, machine_settings):
        self.draw, self.mood, self.settings = draw, mood, machine_settings
        self.operations, self.live, self.on_device = [], {}, {}
        self.n_ranges = self.n_names = 0
        self.is_marked = False

    def add(self, operation):
        self.operations.append(operation)

    def gpu(self):
        return self.draw(st.integers(0, self.settings.n_gpus - 1))

    def processor(self):
        return self.draw(st.integers(CPU, self.settings.n_gpus - 1))

    def name(self):
        return self.draw(st.sampled_from(sorted(self.live)))

    def new_name(self):
        self.n_names += 1
        return f"a{self.n_names}"

    def allocate(self):
        name = self.new_name()
        self.live[name] = self.draw(self.mood.sizes)
        self.add(Allocate(name, self.live[name]))

    def free(self):
        name = self.draw(st.sampled_from(sorted(self.live | self.on_device)))
        if len(self.live) == 1 and name in self.live:
            return
        self.live.pop(name, None)
        self.on_device.pop(name, None)
        self.add(Free(name))

    def device_allocate(self):
        gpu = self.gpu()
        chunks = self.settings.capacity_chunks
        taken = sum(n for g, n in self.on_device.values() if g == gpu)
        if chunks - taken > 1:
            name, n = self.new_name(), self.draw(st.integers(1, chunks - taken - 1))
            self.on_device[name] = (gpu, n)
            self.add(DeviceAllocate(name, n * VA_BLOCK_BYTES, gpu))

    def touch(self):
        name, write = self.name(), self.draw(st.booleans())
        pace = self.draw(st.sampled_from(self.mood.paces))
        offset, n_bytes = self.draw(parts(self.live[name]))
        if self.is_marked:  # the host must not touch what is dead, or about to be
            for gpu in range(self.settings.n_gpus):
                self.add(MarkDead(name, dead=False, device=gpu))
            self.add(Synchronize())
        self.add(HostTouch(name, write, offset, n_bytes, pace))

    def wait(self):
        self.add(HostWait(self.draw(st.sampled_from([1, 100_000, 5_000_000]))))

    def prefetch(self):
        name, processor = self.name(), self.processor()
        self.add(Prefetch(name, processor, *self.draw(parts(self.live[name]))))

    def advise(self):
        self.add(Advise(self.name(), self.draw(st.sampled_from(ADVICES)), self.processor()))

    def launch(self):
        self.add(Launch(self.draw(kernels(self.live, self.mood)), self.gpu()))

    def copy(self):
        self.add(Copy(self.name(), self.draw(st.booleans()), self.gpu()))

    def discard(self):
        name = self.name()
        self.add(Discard(name, *self.draw(parts(self.live[name]))))

    def mark_dead(self):
        name, dead = self.name(), self.draw(st.integers(0, 3)) > 0
        self.add(MarkDead(name, *self.draw(parts(self.live[name])), dead=dead, device=self.gpu()))
        self.is_marked = True

    def fill(self):
        self.add(Fill(self.name(), self.gpu()))

    def synchronize(self):
        self.add(Synchronize())

    def nvtx(self):
        if self.n_ranges and self.draw(st.booleans()):
            self.n_ranges -= 1
            self.add(PopRange())
        else:
            self.n_ranges += 1
            self.add(PushRange("range"))
            self.add(Mark("mark"))


_KINDS = ["launch"] * 6 + ["touch"] * 4 + ["prefetch"] * 2 + ["advise"] * 2 + ["allocate", "free"]
_KINDS += ["device_allocate", "wait", "copy", "fill", "synchronize", "nvtx"]


@st.composite
def programs(draw, *, marked=False):
    """A random program and the machine that it runs on; with marks of dead pages and discards if asked."""
    mood = draw(st.sampled_from([ANY, CROWD, FIGHT]))
    chosen = draw(settings(mood=mood))
    building = _Building(draw, mood, chosen)
    for _ in range(draw(st.integers(1, 3))):
        building.allocate()
    kinds = _KINDS + ["discard", "discard", *["mark_dead"] * 4] * marked
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=12)):
        getattr(building, kind)()
    program = Program("random", tuple(building.operations), descending=draw(st.booleans()))
    return program, chosen
