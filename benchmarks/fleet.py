"""Import many generated exports into a corpus: one process, processes, a dask cluster of which one worker is killed.

    PYTHONPATH=tests python -m benchmarks.fleet                      200 reports, one of them cut short
    PYTHONPATH=tests python -m benchmarks.fleet --reports 20

All three have to make the same files, with the same report named as failed; every table and all totals are
compared with those of the reports themselves. Two noisy cores: trust the ratios, not the seconds.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl

import nsan
from benchmarks import generate
from nsan.fleet.gathering import How, gather
from nsan.fleet.importing import Imported, import_fleet
from nsan.schema import TABLES

_RANKS = 8
_KEPT_BYTES = 50_000


def make(folder: Path, n_reports: int, n_faults: int) -> Path:
    """Write reports of several runs; the second one is cut short. Return that one."""
    paths = []
    for number in range(n_reports):
        path = folder / f"night{number // _RANKS:02}" / f"rank{number % _RANKS}.sqlite"
        path.parent.mkdir(parents=True, exist_ok=True)
        generate.write(
            path, faults=n_faults, migrations=n_faults // 2, kernels=n_faults // 20, seed=number
        )
        paths.append(path)
    poisoned = paths[1]
    poisoned.write_bytes(poisoned.read_bytes()[:_KEPT_BYTES])
    return poisoned


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files of a corpus."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def on_cluster(inputs: Path, place: Path, n_workers: int) -> tuple[Imported, float, float]:
    """Import on a LocalCluster; kill a worker when a quarter is done. Return also both times."""
    from distributed import LocalCluster

    began = time.perf_counter()
    with LocalCluster(
        n_workers=n_workers,
        threads_per_worker=1,
        dashboard_address="127.0.0.1:0",
        host="127.0.0.1",
        silence_logs="ERROR",
    ) as cluster:
        ready = time.perf_counter()
        victim = next(iter(cluster.workers.values())).pid
        n_inputs = len([*inputs.rglob("*.sqlite")])
        _when(
            lambda: len([*place.glob("reports/*.json")]) >= n_inputs // 4,
            lambda: os.kill(victim, signal.SIGKILL),
        )
        done = import_fleet([inputs], place, how=How(dask=cluster.scheduler_address))
        ended = time.perf_counter()
    return done, ready - began, ended - ready


def _when(condition: Callable[[], bool], act: Callable[[], None]) -> None:
    def wait() -> None:
        while not condition():
            time.sleep(0.05)
        act()

    threading.Thread(target=wait, daemon=True).start()


def agrees(inputs: Path, place: Path) -> bool:
    """Compare every table and all totals of a corpus with those of its reports."""
    corpus = nsan.open_corpus(place)
    gathered = gather([inputs])
    same = corpus.members == gathered.members
    whole = {name: getattr(corpus, name).collect() for name in TABLES}
    for run, rank, source in corpus.reports.select("run", "rank", "source").rows():
        trace = nsan.open_trace(inputs.parent / source)
        mine = (pl.col("run") == run) & (pl.col("rank") == rank)
        for name in TABLES:
            rows = whole[name].filter(mine).drop("run", "rank", "source")
            same &= rows.equals(getattr(trace, name).collect())
    return same


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reports", type=int, default=200)
    parser.add_argument("--faults", type=int, default=2_000, help="rows of GPU faults per report")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="nsan-fleet-"))
    os.environ["NSAN_CACHE_DIR"] = str(folder / "cache")
    try:
        _measure(args, folder)
    finally:
        shutil.rmtree(folder)


def _measure(args: argparse.Namespace, folder: Path) -> None:
    inputs = folder / "nights"
    began = time.perf_counter()
    poisoned = make(inputs, args.reports, args.faults)
    size = sum(path.stat().st_size for path in inputs.rglob("*.sqlite"))
    print(
        f"{args.reports} reports, {size / 1e6:.0f} MB, made in {time.perf_counter() - began:.0f} s"
    )
    made = {}
    for name, how in (("one process", How()), ("processes", How(workers=args.workers))):
        began = time.perf_counter()
        done = import_fleet([inputs], folder / name, how=how)
        made[name] = done, time.perf_counter() - began
    done, start_s, seconds = on_cluster(inputs, folder / "cluster", args.workers)
    made["cluster"] = done, seconds
    first, one = contents(folder / "one process"), made["one process"][1]
    print(f"{'':12} {'seconds':>8} {'ratio':>6} {'imported':>9}  failed  the same files")
    for name, (done, seconds) in made.items():
        failed = ", ".join(failure.source for failure in done.failures)
        assert failed == str(poisoned.relative_to(folder)), failed
        same = contents(folder / name) == first
        print(f"{name:12} {seconds:8.1f} {seconds / one:6.2f} {done.n_made:9}  {failed}  {same}")
    print(
        f"starting the cluster of {args.workers} workers took {start_s:.1f} s more; one of them was killed"
    )
    began = time.perf_counter()
    done = import_fleet([inputs], folder / "one process")
    print(f"once more, with {done.n_kept} reports current: {time.perf_counter() - began:.1f} s")
    print(f"all tables and totals are those of the reports: {agrees(inputs, folder / 'cluster')}")
    peaks = [
        resource.getrusage(who).ru_maxrss / 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    print(f"peak memory: {peaks[0]:.0f} MiB here, {peaks[1]:.0f} MiB the largest worker")


if __name__ == "__main__":
    main()
