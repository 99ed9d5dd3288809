"""Time the caching allocator, the replay of its history, what-ifs, and a sweep of a network.

    python -m benchmarks.allocator                   10^5 and 10^6 entries, and a sweep of AlexNet
    python -m benchmarks.allocator --sizes 5 --network ""

Each line stands beside a reference of the same run: a plain loop that keeps a dictionary of live
addresses, the least that any replay in Python must do. Two noisy cores: trust ratios, not seconds.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from pathlib import Path

import polars as pl

from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.plain import PlainAllocator
from nsan.torch_alloc.stitching import StitchingAllocator
from nsan.torch_alloc.tables import SNAPSHOT_TABLES

FACTORS = (0.9, 1.1, 1.25, 1.5, 2.0, 3.0)


def program(n_requests, seed=1):
    """Draw a training-like program: (bytes, number of the request that is freed, or -1)."""
    draw = random.Random(seed)
    sizes = [int(2 ** draw.uniform(9, 27)) for _ in range(60)]
    live, made = [], 0
    for _ in range(n_requests):
        if live and (len(live) > 400 or draw.random() < 0.5):
            # Mostly the youngest dies first, as activations do.
            at = len(live) - 1 - min(int(draw.expovariate(0.3)), len(live) - 1)
            yield 0, live.pop(at)
        else:
            live.append(made)
            made += 1
            yield draw.choice(sizes), -1


def timed(function):
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def least_work(requests):
    live, n = {}, 0
    for size, freed in requests:
        if size:
            live[n] = size
            n += 1
        else:
            live.pop(freed)


def drive(allocator, requests):
    blocks, n = {}, 0
    for size, freed in requests:
        if size:
            blocks[n] = allocator.allocate(size)
            n += 1
        else:
            allocator.free(blocks.pop(freed))
    return allocator


def history(requests):
    """Run the program with a listener; give the frames of a snapshot without its final blocks."""
    entries = []
    allocator = CachingAllocator(listen=lambda *entry: entries.append(entry))
    drive(allocator, requests)
    events = pl.DataFrame(
        entries, schema=["action", "va", "bytes", "stream", "pool"], orient="row"
    ).with_columns(
        device_id=pl.lit(0),
        sequence=pl.int_range(pl.len()),
        time_us=pl.int_range(pl.len()) * 10,
        device_free_bytes=pl.lit(None),
        compile_context=pl.lit(None),
        stack_id=pl.lit(None),
    )
    return allocator, events.select(_cast("allocator_events"))


def _cast(table):
    return [pl.col(name).cast(dtype) for name, dtype in SNAPSHOT_TABLES[table].schema.items()]


def final_state(allocator):
    """Give segments and blocks as a snapshot has them."""
    segments, blocks = [], []
    for i, segment in enumerate(allocator.segments()):
        own = allocator.blocks(segment)
        used = sum(block.n_bytes for block in own if block.state != "free")
        common = {"segment_id": i, "device_id": 0, "stream": segment.stream, "pool": segment.pool}
        segments.append(
            {
                **common,
                "va": segment.va,
                "bytes": segment.n_bytes,
                "allocated_bytes": used,
                "active_bytes": used,
                "requested_bytes": sum(b.requested_bytes for b in own if b.state != "free"),
                "size_class": "small" if segment.is_small else "large",
                "is_expandable": False,
            }
        )
        blocks += [
            {
                **common,
                "va": block.va,
                "bytes": block.n_bytes,
                "requested_bytes": block.requested_bytes,
                "state": "inactive" if block.state == "free" else "active_allocated",
            }
            for block in own
        ]
    return [
        pl.DataFrame(rows, schema=SNAPSHOT_TABLES[name].schema, orient="row")
        for name, rows in (("segments", segments), ("blocks", blocks))
    ]


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def bench_replay(power):
    """Print events per second of each part at one size."""
    from nsan.torch_alloc.replay import replay
    from nsan.torch_alloc.settings import DEFAULT_SETTINGS

    requests = list(program(10**power * 2 // 5))
    allocator, events = history(requests)
    n = events.height
    base, _ = timed(lambda: least_work(requests))
    segments, blocks = final_state(allocator)
    parts = {
        "caching allocator": lambda: drive(CachingAllocator(), requests),
        "plain allocator": lambda: drive(PlainAllocator(), requests),
        "stitching allocator": lambda: drive(StitchingAllocator(), requests),
        "replay of the history": lambda: replay(segments, blocks, events, DEFAULT_SETTINGS),
    }
    print(f"{n} entries of history, least work {base:.3f} s")
    for name, work in parts.items():
        before = peak_mb()
        seconds, found = timed(work)
        more = (
            f", {found.agreement.n_addresses_exact} addresses"
            if hasattr(found, "agreement")
            else ""
        )
        print(
            f"  {name:<24}{seconds:8.2f} s {n / seconds / 1e3:8.0f} k entries/s "
            f"{seconds / base:7.1f} x least work, peak +{peak_mb() - before:.0f} MB{more}"
        )


def bench_sweep(name):
    """Print what a sweep of one network over six factors and two allocators takes."""
    from nsan.model.settings import Settings
    from nsan.model.sweep import cases, sweep
    from nsan.model.workloads import network
    from nsan.model.workloads.training import TrainingRun

    wanted = cases(FACTORS, ("raw", "caching"), ("none",))
    with tempfile.TemporaryDirectory() as folder:
        work = (network(name), TrainingRun(), Settings())
        one, _ = timed(lambda: sweep(*work, wanted[:1], Path(folder)))
        rest, table = timed(lambda: sweep(*work, wanted, Path(folder)))
        again, _ = timed(lambda: sweep(*work, wanted, Path(folder)))
    print(
        f"{name}: {len(wanted)} runs {one + rest:.1f} s, {(one + rest) / one:.1f} x its first run; "
        f"resumed with nothing to do {again:.1f} s; {table['n_batches'].sum()} batches"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="5,6", help="powers of ten")
    parser.add_argument("--network", default="alexnet", help="network to sweep; empty: none")
    args = parser.parse_args()
    for power in map(int, args.sizes.split(",")):
        bench_replay(power)
    if args.network:
        bench_sweep(args.network)


if __name__ == "__main__":
    main()
