"""Random programs for the caching allocator, and a snapshot of the machine as the tables have it."""

from __future__ import annotations

import random

import polars as pl

from nsan.errors import AllocatorFullError
from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.settings import TIE_BREAKS, AllocatorSettings
from nsan.torch_alloc.tables import ALLOCATOR_EVENTS, BLOCKS, SEGMENTS
from nsan.units import GIB, KIB, MIB

STATES = {
    "allocated": "active_allocated",
    "pending": "active_pending_free",
    "free": "inactive",
}
START_US = 1_700_000_000_000_000


class Recorded:
    """A machine whose history is kept."""

    def __init__(self, settings, **how):
        self.entries = []
        self.machine = CachingAllocator(
            settings, listen=lambda *entry: self.entries.append(entry), **how
        )

    def frames(self, *, with_pools=True):
        """The tables of a snapshot of it: segments, blocks, events."""
        return (
            *state_frames(self.machine),
            events_frame(self.entries, with_pools=with_pools),
        )


def state_frames(machine):
    segments, blocks = [], []
    for number, segment in enumerate(machine.segments()):
        inside = machine.blocks(segment)
        common = (segment.stream, segment.pool)
        active = [b for b in inside if b.state != "free"]
        segments.append(
            (
                number,
                0,
                segment.va,
                segment.n_bytes,
                sum(b.n_bytes for b in active if b.state == "allocated"),
                sum(b.n_bytes for b in active),
                sum(b.requested_bytes for b in active),
                segment.stream,
                "small" if segment.is_small else "large",
                segment.pool,
                segment.is_expandable,
                None,
            )
        )
        blocks += [
            (number, 0, b.va, b.n_bytes, b.requested_bytes, STATES[b.state], *common, None)
            for b in inside
        ]
    return (
        pl.DataFrame(segments, schema=SEGMENTS.schema, orient="row"),
        pl.DataFrame(blocks, schema=BLOCKS.schema, orient="row"),
    )


def events_frame(entries, *, with_pools=True):
    """Entries (action, va, bytes, stream, pool) as a table; entries of four have no pool."""
    rows = [
        {
            "device_id": 0,
            "sequence": place,
            "time_us": START_US + 10 * place,
            "action": entry[0],
            "va": None if entry[0] == "oom" else entry[1],
            "bytes": entry[2],
            "stream": entry[3],
            "pool": entry[4] if with_pools and len(entry) > 4 else None,
        }
        for place, entry in enumerate(entries)
    ]
    return pl.DataFrame(rows, schema=ALLOCATOR_EVENTS.schema)


def random_settings(rng):
    device = rng.choice([None, 96 * MIB, 300 * MIB, 1 * GIB])
    fraction = None if device is None else rng.choice([None, 0.5, 0.8, 1.0])
    divisions = [rng.choice([0, 1, 2, 4, 8]) for _ in range(16)]
    return AllocatorSettings(
        max_split_bytes=rng.choice([None, None, 20 * MIB, 33 * MIB, 64 * MIB]),
        max_non_split_rounding_bytes=rng.choice([20 * MIB, 4 * MIB]),
        roundup_power2_divisions=tuple(divisions) if rng.random() < 0.3 else (0,) * 16,
        garbage_collection_threshold=rng.choice([0.0, 0.3, 0.7]),
        expandable_segments=rng.random() < 0.35,
        memory_fraction=fraction,
        device_bytes=device,
        large_segment_bytes=rng.choice([20 * MIB, 20 * MIB, 32 * MIB]),
        tie_break=rng.choice(TIE_BREAKS),
    )


class RandomProgram:
    """Allocates and frees at random, like a small network in training with a few side streams."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.settings = random_settings(self.rng)
        self.recorded = Recorded(self.settings)
        self.held = []
        self.sizes = [self._size() for _ in range(12)]

    @property
    def machine(self):
        return self.recorded.machine

    def _size(self):
        kind = self.rng.random()
        if kind < 0.5:
            return self.rng.randint(1, 40 * KIB)
        if kind < 0.7:
            return self.rng.choice([512, 513, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB])
        return self.rng.randint(1, self.rng.choice([MIB, 12 * MIB, 80 * MIB]))

    def step(self):
        kind = self.rng.random()
        if kind < 0.5:
            self._allocate()
        elif kind < 0.94 and self.held:
            block = self.held.pop(self.rng.randrange(len(self.held)))
            self.machine.free(block, pending=self.rng.random() < 0.2)
        elif kind < 0.96:
            self.machine.empty_cache()
        elif kind < 0.97:
            self.machine.close_pool("0,1")
        elif self.machine.pending_blocks():
            self.machine.complete(self.rng.choice(self.machine.pending_blocks()))

    def _allocate(self):
        size = self.rng.choice(self.sizes) if self.rng.random() < 0.7 else self._size()
        stream = self.rng.choice([0, 0, 0, 71])
        pool = self.rng.choice(["0,0", "0,0", "0,0", "0,1"])
        try:
            self.held.append(self.machine.allocate(size, stream=stream, pool=pool))
        except AllocatorFullError:
            for block in self.held[::2]:
                self.machine.free(block)
            self.held = self.held[1::2]
