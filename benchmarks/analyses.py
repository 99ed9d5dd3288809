"""Time each analysis at growing sizes, each in a process of its own, beside pandas where it has a twin.

    python -m benchmarks.analyses                    10^5, 10^6 and 10^7 migrations
    python -m benchmarks.analyses --sizes 5,6 --only batches

Seconds are of the analysis alone; the peak is that of the whole process, less what it had before.
Two noisy cores: trust ratios and growth, not seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

_CHILD_LIMIT_S = 900


class _Peak(threading.Thread):
    """Watches this process's memory: the highest mark of a child counts its start, too."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.done = 0, False

    def run(self):
        while not self.done:
            self.most = max(self.most, _resident_mb())
            time.sleep(0.005)


def _resident_mb():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def _timed(function):
    before, watch = _resident_mb(), _Peak()
    watch.start()
    start = time.perf_counter()
    rows = function()
    seconds = time.perf_counter() - start
    watch.done = True
    watch.join()
    return {"seconds": seconds, "mb": max(watch.most, _resident_mb()) - before, "rows": rows}


def _make(folder, power):
    """Write the tables of one size once; each child reads them."""
    from benchmarks.tables import tables

    place = folder / str(power)
    if not place.exists():
        place.mkdir()
        for name, frame in tables(10**power).items():
            frame.write_ipc(place / f"{name}.arrow")


def _child(name, place, how):
    """Run one analysis on tables of one size, and print what it took."""
    import polars as pl

    frames = {path.stem: pl.read_ipc(path) for path in Path(place).glob("*.arrow")}
    if how == "pandas":
        from benchmarks.with_pandas import QUESTIONS

        small = {
            table: frames[table].drop("sequence", "grid", "block", strict=False).to_pandas()
            for table in ("migrations", "gpu_faults", "cpu_faults", "kernels")
        }
        QUESTIONS[name](_slice(small, 1_000))  # imports, before the clock runs
        taken = _timed(lambda: len(QUESTIONS[name](small)))
    else:
        from nsan.analysis.catalog import catalog

        analysis = catalog()[name]
        lazy = {table: frame.lazy() for table, frame in frames.items()}
        few = {table: frame.head(1_000).lazy() for table, frame in frames.items()}
        analysis.run(few).collect()
        taken = _timed(lambda: analysis.run(lazy).collect().height)
    print(json.dumps(taken))


def _slice(frames, n):
    return {name: frame.head(n) for name, frame in frames.items()}


def _measure(folder, name, power, how="nsan"):
    _make(folder, power)
    place = str(folder / str(power))
    command = [sys.executable, "-m", "benchmarks.analyses", "--child", name, place, how]
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_CHILD_LIMIT_S
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = (error.stderr or b"" if isinstance(error.stderr, bytes) else error.stderr) or ""
        print(f"{name} at 10^{power} failed: {str(said)[-400:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def _cell(taken):
    return "-" if taken is None else f"{taken['seconds']:.2f} s, {taken['mb']:.0f} MB"


def _growth(taken):
    known = [each["seconds"] for each in taken if each]
    return " / ".join(f"{b / a:.1f}" for a, b in itertools.pairwise(known) if a)


def _analyses_table(folder, names, powers):
    print(f"| analysis | {' | '.join(f'10^{p} migrations' for p in powers)} | growth |")
    print("|" + " --- |" * (len(powers) + 2))
    for name in names:
        taken = [_measure(folder, name, power) for power in powers]
        print(f"| {name} | {' | '.join(map(_cell, taken))} | {_growth(taken)} |", flush=True)


def _pandas_table(folder, power):
    from benchmarks.with_pandas import QUESTIONS

    print(f"\n| question, 10^{power} migrations | nsan | pandas | times faster |")
    print("| --- | --- | --- | --- |")
    for name in QUESTIONS:
        ours, theirs = _measure(folder, name, power), _measure(folder, name, power, "pandas")
        ratio = f"{theirs['seconds'] / ours['seconds']:.1f}" if ours and theirs else "-"
        print(f"| {name} | {_cell(ours)} | {_cell(theirs)} | {ratio} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="5,6,7", help="powers of ten; none: only the comparison")
    parser.add_argument("--only", action="append", help="only this analysis; repeatable")
    parser.add_argument("--pandas", type=int, default=6, help="power of ten for the comparison")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _child(*args.child)
        return
    from nsan.analysis.catalog import catalog

    names = args.only or list(catalog())
    with tempfile.TemporaryDirectory(prefix="nsan-bench-") as made:
        folder = Path(made)
        if args.sizes:
            _analyses_table(folder, names, [int(power) for power in args.sizes.split(",")])
        if not args.only:
            _pandas_table(folder, args.pandas)


if __name__ == "__main__":
    main()
