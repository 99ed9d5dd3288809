"""Small memory snapshots for tests: what nsan's allocator leaves after a random program."""

from __future__ import annotations

import random

import polars as pl

from nsan.errors import AllocatorFullError
from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.settings import AllocatorSettings
from nsan.torch_alloc.tables import SNAPSHOT_TABLES

STATES = {"allocated": "active_allocated", "pending": "active_pending_free", "free": "inactive"}
SIZES = (512, 700, 40_000, 900_000, 1_500_000, 3 << 20, 8 << 20, 11 << 20, 30 << 20)
FILES = ("site-packages/torch/nn/modules/linear.py", "train.py", "model.py")


SMALL_GPU = AllocatorSettings(device_bytes=320 << 20)


def random_snapshot(seed=1, n_devices=2, n_operations=300, settings=SMALL_GPU):
    """Run a random program on each GPU; give the six tables of the snapshot taken at its end."""
    rows = {name: [] for name in SNAPSHOT_TABLES}
    for device in range(n_devices):
        _run(random.Random(f"{seed} {device}"), device, n_operations, settings, rows)
    rows["stacks"] = [
        {
            "stack_id": stack,
            "depth": depth,
            "function": f"f{stack}",
            "source_file": FILES[(stack + depth) % len(FILES)],
            "source_line": 10 * stack + depth,
        }
        for stack in range(6)
        for depth in range(2)
    ]
    rows["allocator_settings"] = [
        {"name": "torch_version", "value": "2.9", "is_recorded": False},
        {"name": "max_split_size", "value": "-1", "is_recorded": True},
    ]
    return {
        name: pl.DataFrame(rows[name], schema=table.schema, orient="row")
        for name, table in SNAPSHOT_TABLES.items()
    }


def _run(draw, device, n_operations, settings, rows):
    entries = rows["allocator_events"]
    first = len(entries)
    stack = 0

    def listen(action, va, n_bytes, stream, pool):
        entries.append(
            {
                "device_id": device,
                "sequence": len(entries) - first,
                "time_us": 1_700_000_000_000_000 + 10 * (len(entries) - first),
                "action": action,
                "va": va,
                "bytes": n_bytes,
                "stream": stream,
                "pool": pool,
                "stack_id": stack,
            }
        )

    allocator = CachingAllocator(settings, listen=listen)
    live, stacks = [], {}
    for _ in range(n_operations):
        stack = draw.randrange(6)
        choice = draw.random()
        if choice < 0.55 or not live:
            stream, pool = draw.choice((0, 0, 7)), draw.choice(("0,0", "0,1"))
            try:
                block = allocator.allocate(draw.choice(SIZES), stream=stream, pool=pool)
            except AllocatorFullError:
                continue  # the history has an entry of it
            live.append(block)
            stacks[block.va] = stack
        elif choice < 0.97:
            block = live.pop(draw.randrange(len(live)))
            allocator.free(block, pending=draw.random() < 0.1)
        else:
            allocator.empty_cache()
    _end(allocator, device, stacks, rows)


def _end(allocator, device, stacks, rows):
    for segment in allocator.segments():
        number = len(rows["segments"])
        blocks = allocator.blocks(segment)
        used = [block for block in blocks if block.state != "free"]
        common = {"device_id": device, "stream": segment.stream, "pool": segment.pool}
        rows["segments"].append(
            {
                "segment_id": number,
                **common,
                "va": segment.va,
                "bytes": segment.n_bytes,
                "allocated_bytes": sum(b.n_bytes for b in used if b.state == "allocated"),
                "active_bytes": sum(b.n_bytes for b in used),
                "requested_bytes": sum(b.requested_bytes for b in used),
                "size_class": "small" if segment.is_small else "large",
                "is_expandable": segment.is_expandable,
            }
        )
        rows["blocks"] += [
            {
                "segment_id": number,
                **common,
                "va": block.va,
                "bytes": block.n_bytes,
                "requested_bytes": block.requested_bytes,
                "state": STATES[block.state],
                "stack_id": stacks.get(block.va),
            }
            for block in blocks
        ]
