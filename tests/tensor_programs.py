"""Random small tensor programs, and plain looks at what they did under an allocator."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass

from nsan.model import machine
from nsan.model.happened import Happened
from nsan.model.networks import tensors as t
from nsan.model.placing import Placed, placed
from nsan.model.recording import BASE_VA
from nsan.model.settings import Settings
from nsan.units import KIB, MIB

SIZES = (512, 3 * KIB, 10 * KIB, 100 * KIB, 700 * KIB, MIB, 1300 * KIB, 2 * MIB, 3 * MIB, 11 * MIB)
WHOLE_PAGES = (64 * KIB, 640 * KIB, MIB + 64 * KIB, 2 * MIB, 3 * MIB, 11 * MIB)


@dataclass(frozen=True)
class Trained:
    """A tensor program under an allocator, and what its run left."""

    placed: Placed
    settings: Settings
    happened: Happened

    @property
    def page_bytes(self):
        return self.settings.host_profile.page_bytes

    @property
    def entries(self):
        return self.placed.history.entries


def random_program(seed, *, n_operations=60, sizes=SIZES):
    """Tensors come and go, kernels use those that live: a few are parameters, most live for a moment."""
    rng = random.Random(seed)
    operations, live, n = [], [], 0
    for _ in range(n_operations):
        kind = rng.random()
        if not live or (kind < 0.35 and len(live) < 12):
            name, n = f"t{n}#1", n + 1
            operations.append(t.Create(t.Tensor(name, rng.choice(sizes), "activation")))
            live.append(name)
            written = (name,)
            operations.append(
                t.HostWrite(name)
                if rng.random() < 0.2
                else t.Compute(f"make {name}", (), written, 0.0)
            )
        elif kind < 0.55 and len(live) > 1:
            operations.append(t.Drop(live.pop(rng.randrange(len(live)))))
        else:
            reads = tuple(rng.sample(live, min(len(live), rng.randint(1, 3))))
            operations.append(t.Compute("use", reads, (rng.choice(live),), 0.0))
    return t.TensorProgram("random", tuple(operations))


def train(tensors, allocator, **chosen):
    """Run a tensor program under an allocator on a machine of these settings."""
    settings = Settings(**{"capacity_bytes": 12 * MIB, **chosen})
    made = placed(tensors, allocator, settings.gpu_profile)
    return Trained(made, settings, machine.run(made.program, settings))


@dataclass
class Lifetime:
    """A tensor: its block, and the entries that allocated it and asked for it back."""

    name: str
    first: int
    last: int
    born: int
    freed: float = float("inf")


def lifetimes(history):
    """List the tensors of a history in the order of their allocation; bytes from the model's first."""
    found, at = [], {}
    for sequence, entry in enumerate(history.entries):
        if entry.action == "alloc":
            first = entry.va - BASE_VA
            size = history.block_bytes[len(found)]
            at[entry.va] = Lifetime(entry.stack, first, first + size, sequence)
            found.append(at[entry.va])
        elif entry.action == "free_requested":
            at[entry.va].freed = sequence
    return found


def positions_of_batches(ran):
    """Entries of the history that the host had done when it launched what each batch is of."""
    works = [work for _, work in ran.happened.work]
    after = [entry.after for entry in ran.entries]
    return {
        row["batch"]: bisect_right(after, works[row["kernel"]].operation)
        for row in ran.happened.log["batches"].iter_rows(named=True)
    }
