"""Small memory snapshots for tests: what nsan's allocator leaves after a random program on each GPU."""

from __future__ import annotations

import random

import polars as pl
from allocator_programs import Recorded

from nsan.errors import AllocatorFullError
from nsan.torch_alloc.settings import AllocatorSettings
from nsan.torch_alloc.tables import SNAPSHOT_TABLES

SIZES = (512, 700, 40_000, 900_000, 1_500_000, 3 << 20, 8 << 20, 11 << 20, 30 << 20)
FILES = ("site-packages/torch/nn/modules/linear.py", "train.py", "model.py")
N_STACKS = 6
SMALL_GPU = AllocatorSettings(device_bytes=224 << 20)
"""So small that some requests fail."""


def random_snapshot(seed=1, n_devices=2, n_operations=300, settings=SMALL_GPU):
    """Run a random program on each GPU; give the six tables of the snapshot taken at its end."""
    tables = {name: [table.empty().collect()] for name, table in SNAPSHOT_TABLES.items()}
    for device in range(n_devices):
        recorded = Recorded(settings)
        _run(random.Random(f"{seed} {device}"), recorded.machine, n_operations)
        for name, frame in zip(
            ("segments", "blocks", "allocator_events"), recorded.frames(), strict=True
        ):
            tables[name].append(_of_device(frame, device, 1000 * device))
    stacks = [(stack, depth) for stack in range(N_STACKS) for depth in range(2)]
    tables["stacks"] = [
        pl.DataFrame(
            [(s, d, f"f{s}", FILES[(s + d) % len(FILES)], 10 * s + d) for s, d in stacks],
            schema=SNAPSHOT_TABLES["stacks"].schema,
            orient="row",
        )
    ]
    known = [("torch_version", "2.9", False), ("max_split_size", "-1", True)]
    schema = SNAPSHOT_TABLES["allocator_settings"].schema
    tables["allocator_settings"] = [pl.DataFrame(known, schema=schema, orient="row")]
    return {name: pl.concat(frames) for name, frames in tables.items()}


def _of_device(frame, device, first_segment):
    stack = (pl.col("va") // 512 % N_STACKS).cast(pl.Int64)
    changes = [pl.lit(device, pl.Int64).alias("device_id"), stack.alias("stack_id")]
    if "segment_id" in frame.columns:
        changes.append(pl.col("segment_id") + first_segment)
    return frame.with_columns(changes)


def _run(draw, machine, n_operations):
    live = []
    for _ in range(n_operations):
        choice = draw.random()
        if choice < 0.55 or not live:
            stream, pool = draw.choice((0, 0, 7)), draw.choice(("0,0", "0,1"))
            try:
                live.append(machine.allocate(draw.choice(SIZES), stream=stream, pool=pool))
            except AllocatorFullError:
                continue  # the history has an entry of it
        elif choice < 0.97:
            machine.free(live.pop(draw.randrange(len(live))), pending=draw.random() < 0.1)
        else:
            machine.empty_cache()
