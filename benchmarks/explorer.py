"""Time the explorer: first view from a store, re-binning of random windows, message sizes, memory.

    python -m benchmarks.explorer                      10^5, 10^6 and 10^7 events
    python -m benchmarks.explorer --events 1000000
    python -m benchmarks.explorer --places sweep       copies that walk through memory

Half of the events are GPU fault rows, half are copies, shaped as in `benchmarks.generate`: made up, and
only timed. Scattered places are the worst case, for hardly two rows share a bin. The reference, in the
same run, is a plain polars group_by over all rows, without the pyramid. Two noisy cores: trust the
ratios and the busy seconds of the processors, not the wall clock.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

SIZES = (100_000, 1_000_000, 10_000_000)
N_WINDOWS = 200
SHAPE = (480, 220)
FIRST_AIM_S = 2.0
REBIN_AIM_MS = 50
MESSAGE_AIM_KB = 300
_BATCH_NS = 20_000
_PAGES = 1 << 20
_VA = 0x7F00_0000_0000
_N_REFERENCE = 15
_TOTALLED = 10_000


def _pages(batch: np.ndarray, places: str) -> np.ndarray:
    """First page of each batch: scattered over 4 GiB, or one block after the other."""
    if places == "sweep":
        return batch * 32 % _PAGES
    return ((batch + 1) * 2_654_435_761 >> 7) % _PAGES & ~15


def _faults(n: int, places: str) -> pl.DataFrame:
    from nsan.schema import ACCESS, GPU_FAULTS

    batch = np.arange(n)
    page = _pages(batch, places)
    access = np.array(["read", "write", "atomic"])[batch % 3]
    return pl.DataFrame(
        {
            "start_ns": batch * _BATCH_NS,
            "end_ns": (batch + 1) * _BATCH_NS,
            "va": (_VA + 4096 * page).astype(np.uint64),
            "n_page_faults": 1 + page // 16 % 200,
            "access": pl.Series(access, dtype=ACCESS),
            "access_id": 1 + batch % 3,
        }
    ).select(_filled(GPU_FAULTS.schema, "start_ns end_ns va n_page_faults access access_id"))


def _copies(n: int, n_faults: int, places: str) -> pl.DataFrame:
    """Two chained copies in every batch, and an eviction for every eighth."""
    from nsan.schema import CAUSE, DIRECTION, MIGRATIONS

    number = np.arange(n)
    batch = np.minimum(number // 2 * max(1, n_faults // max(1, n // 2)), max(0, n_faults - 1))
    second, out = number % 2 == 1, number % 16 == 15
    kind = np.where(out, 2, second)
    va = _VA + 4096 * (_pages(batch, places) + (second & ~out))
    start = batch * _BATCH_NS + 10_000 + np.where(second, 1_501, 0)
    return pl.DataFrame(
        {
            "start_ns": start,
            "end_ns": start + np.where(second, 4_000, 1_500),
            "va": va.astype(np.uint64),
            "bytes": np.array([4096, 61_440, 65_536])[kind],
            "direction": pl.Series(np.array(["htod", "htod", "dtoh"])[kind], dtype=DIRECTION),
            "cause": pl.Series(np.array(["coherence", "prefetch", "eviction"])[kind], dtype=CAUSE),
            "cause_id": np.array([2, 3, 4])[kind],
        }
    ).select(_filled(MIGRATIONS.schema, "start_ns end_ns va bytes direction cause cause_id"))


def _kernels(n: int, end_ns: int) -> pl.DataFrame:
    from nsan.schema import KERNELS

    width = end_ns // max(1, n)
    start = np.arange(n) * width
    names = pl.Series([f"kernel_{i % 7}" for i in range(n)])
    frame = pl.DataFrame({"start_ns": start, "end_ns": start + width * 9 // 10, "name": names})
    return frame.select(_filled(KERNELS.schema, "start_ns end_ns name"))


def _filled(schema: pl.Schema, known: str) -> list[pl.Expr]:
    """All columns of a table: what is not known is null, and there is one process with one GPU."""
    one = {"pid": 4242, "device_id": 0}
    return [
        (pl.col(name) if name in known.split() else pl.lit(one.get(name)).alias(name)).cast(dtype)
        for name, dtype in schema.items()
    ]


def make(folder: Path, n: int, places: str) -> Path:
    """Write a store of so many events, as an import leaves it.

    An export of 10^7 rows takes minutes to write and to add up. The rows of the store are those that
    its import would give; the totals in its manifest, which no view reads, are those of the first ones.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from exports import Export

    from nsan.info import TraceInfo
    from nsan.io.manifest import fingerprint
    from nsan.io.store import building
    from nsan.totals import totals

    n_faults = n // 2
    frames = {
        "gpu_faults": _faults(n_faults, places),
        "migrations": _copies(n - n_faults, n_faults, places),
        "kernels": _kernels(min(20_000, n // 500), n_faults * _BATCH_NS),
    }
    source = folder / "made.sqlite"
    Export("2023.4.4", lazy=False).write(source)
    place, first = folder / "store", folder / "first"
    for where, most in ((first, _TOTALLED), (place, n)):
        with building(where) as writer:
            for name, frame in frames.items():
                rows = frame.head(most)
                for number, piece in enumerate(rows.iter_slices(writer.rows_per_part)):
                    writer.add(name, number, piece)
            tables, info = writer.finish_tables(), TraceInfo(source=source.name, kind="nsys_sqlite")
            if where == first:
                added = totals(writer.trace(info, tables))
            writer.write_manifest(fingerprint(source, keep_paths=False), info, tables, added)
    return place


def windows(n: int, extent: tuple[int, int], places: tuple[int, int]) -> list[tuple[Any, Any]]:
    """Draw windows of time and place of all sizes: a whole axis, or 1 to 1/4096 of it."""
    draw = random.Random(8)

    def part(low: int, high: int) -> tuple[int, int]:
        share = 1.0 if draw.random() < 0.15 else 2 ** -(12 * draw.random())
        length = max(1, int((high - low) * share))
        start = draw.randrange(low, high - length + 1)
        return start, start + length

    return [(part(*extent), part(*places)) for _ in range(n)]


def _reference(frame: pl.DataFrame, window: tuple[int, int], place: tuple[int, int]) -> None:
    """The same grid without a pyramid."""
    (t0, t1), (y0, y1) = window, place
    (
        frame.lazy()
        .filter(pl.col("start_ns").is_between(t0, t1, closed="left"))
        .filter(pl.col("place").is_between(y0, y1, closed="left"))
        .group_by(
            column=(pl.col("start_ns") - t0) * SHAPE[0] // (t1 - t0),
            row=(pl.col("place") - y0) * SHAPE[1] // (y1 - y0),
            cause="cause",
        )
        .agg(n=pl.len(), bytes=pl.col("bytes").sum())
        .collect()
    )


def _memory_mb() -> float:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split("VmRSS:")[1].split()[0]) / 1000


def measure(place: Path, n_windows: int) -> dict[str, Any]:
    """Open a store and look around in it; in a process of its own."""
    import nsan
    from nsan.widgets import messages
    from nsan.widgets.scene import CATEGORIES, Scene

    bare = _memory_mb()
    start, cpu = time.perf_counter(), time.process_time()
    scene = Scene(nsan.open_trace(place))
    head, buffers = scene.view(scene.extent, scene.places, "cause", SHAPE)
    first, first_cpu = time.perf_counter() - start, time.process_time() - cpu
    after_first = _memory_mb()
    pyramid = scene.pyramid
    sizes = [_size(head, buffers)]
    looks = windows(n_windows, pyramid.extent, pyramid.all_places)
    rebin, whole = [], []
    for number, (window, box) in enumerate(looks):
        by = (*CATEGORIES,)[number % len(CATEGORIES)]

        def cells(by: str = by, window: Any = window, box: Any = box) -> tuple[Any, Any]:
            fit, fit_place, shape = pyramid.fitted(window, box, shape=SHAPE, by=by)
            return shape, pyramid.cells(fit, fit_place, shape=shape, by=by)

        seconds, (shape, found) = _best(cells)
        rebin.append(seconds)
        sizes.append(_size(*messages.raster(found, shape, CATEGORIES[by])))
        if number % 4 == 0:
            seconds, message = _best(partial(scene.view, window, box, by, SHAPE))
            whole.append(seconds)
            sizes.append(_size(*message))
    after = _memory_mb()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    frame = pyramid.events.frame.select("start_ns", "place", "bytes", "cause")
    plain = [_best(partial(_reference, frame, *look))[0] for look in looks[:_N_REFERENCE]]
    return {
        "first": first,
        "first_cpu": first_cpu,
        "rebin": rebin,
        "look": whole,
        "plain": plain,
        "sizes": sizes,
        "n_bytes": pyramid.n_bytes,
        "memory": [bare, after_first, after, peak],
    }


def _best(run: Callable[[], Any], tries: int = 3) -> tuple[float, Any]:
    """Best wall time of some tries, and what the run gives: others use the machine too."""
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        found = run()
        best = min(best, time.perf_counter() - start)
    return best, found


def _size(head: Any, buffers: list[bytes]) -> int:
    return len(json.dumps(head, separators=(",", ":"))) + sum(map(len, buffers))


def _percent(values: list[float], share: float) -> float:
    return float(np.percentile(values, share))


def _rows(n: int, found: dict[str, Any]) -> list[tuple[str, ...]]:
    plain = _percent(found["plain"], 95)
    bare, after_first, after, peak = found["memory"]

    def against(seconds: float) -> str:
        return f"{seconds / plain:.3g}"

    def both(name: str) -> str:
        return " / ".join(f"{_percent(found[name], share) * 1e3:.1f}" for share in (50, 95))

    p95 = _percent(found["rebin"], 95)
    look = _percent(found["look"], 95)
    return [
        (
            f"{n:,}",
            "first view, s (busy)",
            f"{found['first']:.2f} ({found['first_cpu']:.2f})",
            against(found["first"]),
            f"{FIRST_AIM_S:g} s",
        ),
        ("", "re-bin p50 / p95, ms", both("rebin"), against(p95), f"{REBIN_AIM_MS} ms at p95"),
        ("", "whole answer p50 / p95, ms", both("look"), against(look), "-"),
        ("", "plain group_by p50 / p95, ms", both("plain"), "1", "-"),
        ("", "largest message, kB", f"{max(found['sizes']) / 1e3:.0f}", "-", f"{MESSAGE_AIM_KB} kB"),
        ("", "rows and bins held, MB", f"{found['n_bytes'] / 1e6:.0f}", "-", "-"),
        (
            "",
            "memory bare / first view / after / peak, MB",
            f"{bare:.0f} / {after_first:.0f} / {after:.0f} / {peak:.0f}",
            "-",
            "-",
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, nargs="+", default=SIZES)
    parser.add_argument("--windows", type=int, default=N_WINDOWS)
    parser.add_argument("--places", choices=("scattered", "sweep"), default="scattered")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make(args.make, args.events[0], args.places)
        return
    if args.measure:
        print(json.dumps(measure(args.measure, args.windows)))
        return
    print(f"| events, {args.places} | what | measured | against the group_by's p95 | aim |")
    print("|---|---|---|---|---|")
    again = [sys.executable, "-m", "benchmarks.explorer", "--places", args.places]
    for n in args.events:
        with tempfile.TemporaryDirectory(prefix="nsan-bench-") as folder:
            # Each in a process of its own: memory is that of the view alone.
            subprocess.run([*again, "--events", str(n), "--make", folder], check=True)
            look = [*again, "--windows", str(args.windows), "--measure", f"{folder}/store"]
            done = subprocess.run(look, check=True, capture_output=True, text=True)
        for row in _rows(n, json.loads(done.stdout)):
            print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
