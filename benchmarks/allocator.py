"""Time the caching allocator, the replay of its history, what-ifs, and a sweep of a network.

    PYTHONPATH=tests python -m benchmarks.allocator  10^5 and 10^6 entries, and a sweep of AlexNet
    PYTHONPATH=tests python -m benchmarks.allocator --sizes 5 --network ""

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

from allocator_programs import Recorded

from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.plain import PlainAllocator
from nsan.torch_alloc.replay import replay
from nsan.torch_alloc.settings import DEFAULT_SETTINGS
from nsan.torch_alloc.stitching import StitchingAllocator

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


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def bench_replay(power):
    """Print events per second of each part at one size."""
    requests = list(program(10**power * 2 // 3))
    recorded = Recorded(DEFAULT_SETTINGS)
    drive(recorded.machine, requests)
    segments, blocks, events = recorded.frames()
    n = events.height
    base, _ = timed(lambda: least_work(requests))
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
