"""Time the reading of a large memory snapshot, against Python's own unpickler in the same run.

    python -m benchmarks.snapshots                 100 MB, of the history in the sample data
    python -m benchmarks.snapshots --megabytes 20

The history of the decomfl sample is repeated with other addresses and times: each entry is a dict of
its own with a list of frames of its own, the frames themselves are shared, as PyTorch writes them.
Two noisy cores: trust the ratio, not the seconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

SAMPLE = Path(__file__).parents[1] / "sample_data/snapshots/decomfl_opt125m_full_history.pickle.gz"
_BYTES_PER_ENTRY = 96
_MB = 1_000_000
_AGAIN = [sys.executable, "-m", "benchmarks.snapshots"]
_LIMIT_S = 20
_LIMIT_MB = 1500

_PLAIN = """
import json, pickle, resource, sys, time
start = time.perf_counter()
with open(sys.argv[1], "rb") as file:
    content = pickle.load(file)
seconds = time.perf_counter() - start
n = sum(map(len, content["device_traces"]))
print(json.dumps([n, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0]))
"""
_OURS = """
import json, resource, sys, time
import nsan, polars, numpy
import nsan.io.torch_snapshot.frames
start = time.perf_counter()
snapshot = nsan.open_snapshot(sys.argv[1])
seconds = time.perf_counter() - start
n = snapshot.allocator_events.select(polars.len()).collect().item()
peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps([n, seconds, *peaks]))
"""


def make(path: Path, n_bytes: int) -> None:
    """Write a snapshot of about so many bytes: the sample's history again and again."""
    content = pickle.loads(gzip.decompress(SAMPLE.read_bytes()))
    (history,) = content["device_traces"]
    repeated = []
    for again in range(-(-n_bytes // (_BYTES_PER_ENTRY * len(history)))):
        for entry in history:
            moved = {
                "addr": entry["addr"] + (again << 40),
                "time_us": entry["time_us"] + 2_000_000 * again,
                "frames": list(entry["frames"]),
            }
            repeated.append(entry | moved)
    content["device_traces"] = [repeated]
    with path.open("wb") as file:
        pickle.dump(content, file, protocol=4)


def measure(code: str, path: Path) -> list[float]:
    """Run a program on the file; return its entries, seconds and the peaks of it and its child, KiB."""
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make(args.make, args.megabytes * _MB)
        return
    with tempfile.TemporaryDirectory(prefix="nsan-bench-") as folder:
        path = Path(folder) / "large.pickle"
        # In a process of its own: a child's peak is never below what its parent had.
        subprocess.run([*_AGAIN, "--megabytes", str(args.megabytes), "--make", path], check=True)
        megabytes = path.stat().st_size / _MB
        plain, ours = measure(_PLAIN, path), measure(_OURS, path)
    assert plain[0] == ours[0]
    print(f"{megabytes:.0f} MB, {plain[0]:,} entries\n")
    print("| what | seconds | against pickle.load | peak MB, itself + its child | aim |")
    print("|---|---|---|---|---|")
    for what, row, aim in (
        ("pickle.load", plain, "-"),
        ("nsan.open_snapshot", ours, f"{_LIMIT_S} s, {_LIMIT_MB} MB at 100 MB"),
    ):
        own, child = (kib * 1024 / _MB for kib in row[2:])
        print(
            f"| {what} | {row[1]:.1f} | {row[1] / plain[1]:.2f} "
            f"| {own:.0f} + {child:.0f} = {own + child:.0f} | {aim} |"
        )


if __name__ == "__main__":
    main()
