"""Time the explorer as a session meets it: each window is asked for once, and the first answer counts.

    python -m benchmarks.explorer                      10^5, 10^6 and 10^7 events
    python -m benchmarks.explorer --events 1000000
    python -m benchmarks.explorer --places sweep       copies that walk through memory

Half of the events are GPU fault rows, half are copies, shaped as in `benchmarks.generate`: made up, and
only timed. They are written straight into a store, in the form that an import leaves: no export is read
and nothing is imported here. Scattered places are the worst case, for hardly two rows share a bin.

"re-bin" is `Pyramid.fitted` and `Pyramid.cells` alone, without and after `Pyramid.warm`; "look" is the
whole answer of `nsan.explore(...)` to a message of a browser, once while clusters are computed in the
background and once, for other windows, when nothing else runs. The reference is a plain polars group_by
over all rows. Two noisy cores: read the load that is told, and trust the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
N_NAMES = 400
"""Names of kernels; as many again of NVTX ranges at most."""

N_ALLOCATIONS = 256
PARTS = ("cold", "warm", "session")
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
    """Kernels one behind the other, with long names as templates make them."""
    from nsan.schema import KERNELS

    width = end_ns // max(1, n)
    start = np.arange(n) * width
    names = pl.Series([f"void gemm_kernel<float, {i * 7 % N_NAMES}>(float*)" for i in range(n)])
    frame = pl.DataFrame({"start_ns": start, "end_ns": start + width * 9 // 10, "name": names})
    return frame.select(_filled(KERNELS.schema, "start_ns end_ns name"))


def _ranges(n: int, end_ns: int) -> pl.DataFrame:
    """Steps, and in each ten layers of a model."""
    from nsan.schema import NVTX_RANGES

    at = np.arange(n)
    depth = np.minimum(at % 11, 1)
    width = end_ns // max(1, -(-n // 11))
    start = at // 11 * width + np.maximum(at % 11 - 1, 0) * (width // 10)
    name = pl.Series(
        [f"layer {i % 11 + i // 11 % 30 * 10}" if i % 11 else "step" for i in range(n)]
    )
    known = {"start_ns": start, "end_ns": start + np.where(depth, width // 10, width) - 1}
    frame = pl.DataFrame({**known, "depth": depth, "name": name, "range_id": at})
    return frame.with_columns(tid=1, kind=pl.lit("push_pop"), closed=True).select(
        _filled(NVTX_RANGES.schema, "start_ns end_ns depth name range_id tid kind closed")
    )


def _allocations(end_ns: int) -> pl.DataFrame:
    """Managed allocations side by side over all pages."""
    from nsan.schema import ALLOCATIONS

    size = 4096 * _PAGES // N_ALLOCATIONS
    va = (_VA + size * np.arange(N_ALLOCATIONS)).astype(np.uint64)
    frame = pl.DataFrame({"va": va, "name": [f"weight_{i}" for i in range(N_ALLOCATIONS)]})
    return frame.with_columns(
        alloc_ns=0, free_ns=end_ns, bytes=size, kind=pl.lit("managed")
    ).select(_filled(ALLOCATIONS.schema, "alloc_ns free_ns va bytes kind name"))


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
        "kernels": _kernels(min(50_000, n // 100), n_faults * _BATCH_NS),
        "nvtx_ranges": _ranges(min(11_000, n // 500), n_faults * _BATCH_NS),
        "allocations": _allocations(n_faults * _BATCH_NS),
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


def _memory_mb(what: str = "VmRSS") -> float:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split(f"{what}:")[1].split()[0]) / 1000


def measure_views(place: Path, n_windows: int, *, warm: bool) -> dict[str, Any]:
    """Fill a grid for each of some windows, with levels made when needed or before."""
    import nsan
    from nsan.analysis.views.events import view_events
    from nsan.analysis.views.grids import BYS
    from nsan.analysis.views.pyramid import Pyramid
    from nsan.schema import TABLES

    trace = nsan.open_trace(place)
    pyramid = Pyramid(view_events({name: getattr(trace, name) for name in TABLES}))
    opened = _memory_mb("VmHWM")

    def fill(by: str, window: tuple[int, int], box: tuple[int, int]) -> None:
        fit, fit_place, shape = pyramid.fitted(window, box, shape=SHAPE, by=by)
        pyramid.cells(fit, fit_place, shape=shape, by=by)

    fill("cause", pyramid.extent, pyramid.all_places)
    warming = _timed(pyramid.warm) if warm else 0.0
    looks = windows(n_windows, pyramid.extent, pyramid.all_places)
    taken = [_timed(partial(fill, BYS[at % len(BYS)], *look)) for at, look in enumerate(looks)]
    peak = _memory_mb("VmHWM")
    found = {
        "rebin": taken,
        "warming": warming,
        "n_bytes": pyramid.n_bytes,
        "memory": [opened, peak],
    }
    if not warm:
        frame = pyramid.events.frame.select("start_ns", "place", "bytes", "cause")
        found["plain"] = [
            _timed(partial(_reference, frame, *look)) for look in looks[:_N_REFERENCE]
        ]
    return found


class _Wire:
    """The wire to a browser: measures what is sent."""

    comm_id = "benchmark"

    def __init__(self) -> None:
        self.largest, self.answered = 0, False

    def send(self, data: Any = None, metadata: Any = None, buffers: Any = None) -> None:  # noqa: ARG002
        self.largest = max(self.largest, _size(data, list(buffers or [])))
        self.answered |= data.get("content", {}).get("kind") == "view"

    def on_msg(self, act: Callable[[Any], None]) -> None:
        self.act = act

    def close(self, *_: Any, **__: Any) -> None:
        pass

    def look(self, by: str, window: Any, box: Any) -> None:
        """Ask for a view, as the browser does."""
        asked = {"kind": "look", "view": "v", "id": 1, "window": window, "place": box, "by": by}
        content = {**asked, "columns": SHAPE[0], "rows": SHAPE[1]}
        self.answered = False
        self.act({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
        if not self.answered:
            raise RuntimeError("The explorer sent no view.")


def measure_session(place: Path, n_windows: int) -> dict[str, Any]:
    """Show a store as `nsan.explore` does and look around in it, from the first moment on."""
    import nsan
    import nsan.widgets.explorer
    from nsan.analysis.views.grids import BYS

    memory = [_memory_mb()]
    began, wire = time.perf_counter(), _Wire()
    explorer = nsan.explore(place)
    explorer.comm = wire
    wire.look("cause", None, None)
    found: dict[str, Any] = {"first": time.perf_counter() - began}
    memory.append(_memory_mb())
    ready: list[float] = []
    explorer.observe(lambda _: ready.append(time.perf_counter() - began), "clusters")
    looks = windows(2 * n_windows, explorer.window, explorer.place)
    origin = explorer.scene.origin_ns

    def look(at: int) -> float:
        window, box = looks[at]
        shown = [side - origin for side in window]
        return _timed(partial(wire.look, BYS[at % len(BYS)], shown, list(box)))

    found["busy"] = []
    while explorer.clusters.get("state") == "computing" and len(found["busy"]) < n_windows:
        found["busy"].append(look(len(found["busy"])))
    explorer.ready()
    found["background"] = time.perf_counter() - began
    if explorer.error:
        raise RuntimeError(explorer.error)
    found["quiet"] = [look(n_windows + at) for at in range(n_windows)]
    memory.append(_memory_mb("VmHWM"))
    return {**found, "clusters": ready[:1], "largest": wire.largest, "memory": memory}


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _size(head: Any, buffers: list[bytes]) -> int:
    return len(json.dumps(head, separators=(",", ":"))) + sum(map(len, buffers))


def _ms(taken: list[float]) -> str:
    """Median, 95th percentile and highest of some times."""
    if not taken:
        return "none asked: it was ready before"
    low, high = (float(np.percentile(taken, share)) * 1e3 for share in (50, 95))
    return f"{low:.0f} / {high:.0f} / {max(taken) * 1e3:.0f} ({len(taken)})"


def _rows(found: dict[str, dict[str, Any]]) -> list[tuple[str, str, str]]:
    cold, warm, session = (found[name] for name in PARTS)
    clusters = (
        "".join(f"{each:.1f}" for each in session["clusters"]) or "before the first look ended"
    )
    bare, first, peak = session["memory"]
    return [
        ("explore() and the first look, s", f"{session['first']:.2f}", f"{FIRST_AIM_S:g}"),
        ("re-bin, levels made when needed, ms", _ms(cold["rebin"]), "-"),
        ("re-bin after warm(), ms", _ms(warm["rebin"]), f"{REBIN_AIM_MS} at p95"),
        ("warm(), s", f"{warm['warming']:.2f}", "-"),
        ("look while clusters are computed, ms", _ms(session["busy"]), "-"),
        ("look when nothing else runs, ms", _ms(session["quiet"]), "-"),
        ("plain group_by, ms", _ms(cold["plain"]), "-"),
        ("clusters ready, s", clusters, "-"),
        ("all in the background done, s", f"{session['background']:.1f}", "-"),
        ("largest message, kB", f"{session['largest'] / 1e3:.0f}", f"{MESSAGE_AIM_KB}"),
        ("rows and bins held, MB", f"{warm['n_bytes'] / 1e6:.0f}", "-"),
        ("views alone, peak, MB", f"{warm['memory'][1]:.0f}", "-"),
        ("session: before / first view / peak, MB", f"{bare:.0f} / {first:.0f} / {peak:.0f}", "-"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, nargs="+", default=SIZES)
    parser.add_argument("--windows", type=int, default=N_WINDOWS)
    parser.add_argument("--places", choices=("scattered", "sweep"), default="scattered")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make(args.make, args.events[0], args.places)
    elif args.measure == "session":
        print(json.dumps(measure_session(args.store, args.windows)))
    elif args.measure:
        print(json.dumps(measure_views(args.store, args.windows, warm=args.measure == "warm")))
    else:
        _run_all(args)


def _run_all(args: argparse.Namespace) -> None:
    print(f"Places: {args.places}. Of times: p50 / p95 / max (how many). Each part is a process.\n")
    print("| events | what | measured | aim |\n|---|---|---|---|")
    again = [sys.executable, "-m", "benchmarks.explorer", "--places", args.places]
    for n in args.events:
        with tempfile.TemporaryDirectory(prefix="nsan-bench-") as folder:
            subprocess.run([*again, "--events", str(n), "--make", folder], check=True)
            found = {}
            for part in PARTS:
                look = ["--windows", str(args.windows), "--measure", part]
                run = [*again, *look, "--store", f"{folder}/store"]
                done = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True)
                found[part] = json.loads(done.stdout.splitlines()[-1])
        load = f"{os.getloadavg()[0]:.1f}"
        for row in [*_rows(found), ("load of the last minute", load, "-")]:
            print("|", " | ".join((f"{n:,}", *row)), "|", flush=True)


if __name__ == "__main__":
    main()
