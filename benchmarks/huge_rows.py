"""Rows of huge exports, each computed from its number: any range, in any order, in bounded memory.

An oversubscribed sweep on four GPUs of two processes, shaped like the driver's work: batches come one after
another (a fault row each, raised while the one before is serviced), every fifth brings a faulted page and
what the prefetcher adds (64, 64, 128, 256, 512, 1024 KiB of a block), the others find their page there; a
block is evicted before another one comes, and faults again later. Long pauses part the kernels. Made up, and only timed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from exports import COHERENCE, DTOH, EVICTION, HTOD, PREFETCH, VA, global_pid

from nsan.uvm.constants import PAGE_BYTES, VA_BLOCK_BYTES

LANES = ((4242, 0), (4242, 1), (4243, 0), (4243, 1))
"""Process and GPU of each lane; all work side by side."""

BATCH_NS = 200_000
BATCHES_PER_KERNEL = 2_000
PAUSE_NS = 5_000_000
_SERVED_EVERY = 5
_SERVICES = np.array([64, 64, 128, 256, 512, 1024]) * 1024
_OFFSETS = np.concatenate([[0], np.cumsum(_SERVICES)[:-1]])
_COPIES_PER_VISIT = 1 + 2 * len(_SERVICES)
"""Of a block: an eviction, and for each service a faulted page and the rest."""

_BATCHES_PER_VISIT = len(_SERVICES) * _SERVED_EVERY
N_BLOCKS = 6_000
RESIDENT_BLOCKS = 4_000
"""VA blocks of a lane, and how many its GPU holds."""

_LANE_BYTES = 1 << 36
_LANE_LAG_NS = 110
_PIDS = np.array([global_pid(pid) for pid, _ in LANES])
_DEVICES = np.array([device for _, device in LANES])
_ACCESSES = np.array([1, 1, 2, 1, 3, 1, 1])


@dataclass(frozen=True)
class Shape:
    """How much there is.

    Attributes
    ----------
    n_visits : int
        Times that each lane brings in a block.
    """

    n_visits: int

    @classmethod
    def of_rows(cls, n_rows: int) -> Shape:
        """Choose the shape that has about so many fault and migration rows."""
        per_visit = len(LANES) * (_BATCHES_PER_VISIT + _COPIES_PER_VISIT)
        return cls(max(1, round(n_rows / per_visit)))

    @property
    def n_batches(self) -> int:
        """Batches of a lane."""
        return self.n_visits * _BATCHES_PER_VISIT

    @property
    def n_faults(self) -> int:
        """Rows that :func:`faults` can give."""
        return self.n_batches * len(LANES)

    @property
    def n_copies(self) -> int:
        """Numbers that :func:`copies` knows; the evictions of a GPU that is not full yet are none."""
        return self.n_visits * _COPIES_PER_VISIT * len(LANES)

    @property
    def n_kernels(self) -> int:
        """Kernels of a lane."""
        return -(-self.n_batches // BATCHES_PER_KERNEL)

    @property
    def blocks(self) -> int:
        """VA blocks of a lane: a small export sweeps over few, so that it oversubscribes too."""
        return max(3, min(N_BLOCKS, self.n_visits // 3))

    @property
    def resident(self) -> int:
        """Blocks that a GPU holds."""
        return max(1, self.blocks * RESIDENT_BLOCKS // N_BLOCKS)


def batch_ns(batch: np.ndarray) -> np.ndarray:
    """Say when a batch begins to be serviced."""
    return 10_000_000 + batch * BATCH_NS + batch // BATCHES_PER_KERNEL * PAUSE_NS


def _va(shape: Shape, lane: np.ndarray, visit: np.ndarray) -> np.ndarray:
    """Say where a visit's block is: lane by lane in order, or scattered."""
    block = visit % shape.blocks
    # A step without a common divisor with the number of blocks visits each once.
    steps = range(shape.blocks // 3 + 1, 2 * shape.blocks)
    step = next(n for n in steps if np.gcd(n, shape.blocks) == 1)
    block = np.where(lane % 2 == 1, block * step % shape.blocks, block)
    return VA + lane * _LANE_BYTES + block * VA_BLOCK_BYTES


def faults(shape: Shape, number: np.ndarray) -> pl.DataFrame:
    """Give rows of the table of GPU page faults by their numbers, which go by time."""
    batch, lane = np.divmod(number, len(LANES))
    visit, inside = np.divmod(batch, _BATCHES_PER_VISIT)
    begin = batch_ns(batch) + lane * _LANE_LAG_NS
    return pl.DataFrame(
        {
            "start": begin - 3_000,
            "end": begin + 190_000,
            "globalPid": _PIDS[lane],
            "deviceId": _DEVICES[lane],
            "address": _va(shape, lane, visit) + _OFFSETS[inside // _SERVED_EVERY],
            "numberOfPageFaults": 1 + batch % 200,
            "faultAccessType": _ACCESSES[batch % len(_ACCESSES)],
        }
    )


def copies(shape: Shape, number: np.ndarray) -> pl.DataFrame:
    """Give rows of the table of copies by their numbers; numbers that have none are left out."""
    at, lane = np.divmod(number, len(LANES))
    visit, kind = np.divmod(at, _COPIES_PER_VISIT)
    service, part = np.divmod(np.maximum(kind - 1, 0), 2)
    begin = batch_ns(visit * _BATCHES_PER_VISIT + service * _SERVED_EVERY) + lane * _LANE_LAG_NS
    evicts = kind == 0
    start = begin + np.where(evicts, 300, np.where(part == 0, 140_000, 142_001))
    rest = part == 1
    size = np.where(rest, _SERVICES[service] - PAGE_BYTES, PAGE_BYTES)
    victim = np.maximum(visit - shape.resident, 0)
    place = _va(shape, lane, np.where(evicts, victim, visit))
    frame = pl.DataFrame(
        {
            "start": start,
            "end": begin + np.where(evicts, 85_300, np.where(rest, 186_000, 142_000)),
            "globalPid": _PIDS[lane],
            "deviceId": _DEVICES[lane],
            "bytes": np.where(evicts, VA_BLOCK_BYTES, size),
            "copyKind": np.where(evicts, DTOH, HTOD),
            "migrationCause": np.where(evicts, EVICTION, np.where(rest, PREFETCH, COHERENCE)),
            "virtualAddress": place + np.where(evicts, 0, _OFFSETS[service] + rest * PAGE_BYTES),
        }
    )
    return frame.filter(pl.Series(~evicts | (visit >= shape.resident)))
