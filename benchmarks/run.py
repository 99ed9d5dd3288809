"""Time what users wait for, each against a reference in the same run, and print a Markdown table.

Two noisy cores: trust the ratios, not the seconds. The references are the C command line of SQLite
scanning the same columns, the vendor's `um_sum.py` on the same file, and a bare Python start.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.generate import write

_SCANS = {
    "CUDA_UM_GPU_PAGE_FAULT_EVENTS": (
        "start", "end", "globalPid", "deviceId", "address", "numberOfPageFaults", "faultAccessType",
    ),
    "CUDA_UM_CPU_PAGE_FAULT_EVENTS": ("start", "globalPid", "address", "originalFaultPc"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "start", "end", "deviceId", "globalPid", "bytes", "copyKind", "migrationCause",
        "virtualAddress",
    ),
}  # fmt: skip


def _seconds(command: list[str], *, env: dict[str, str] | None = None, repeat: int = 1) -> float:
    """Best wall time of some runs."""
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        best = min(best, time.perf_counter() - start)
    return best


def _peak_mb(command: list[str], env: dict[str, str]) -> float:
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
        "stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command], check=True, env=env, capture_output=True, text=True
    )
    return int(done.stdout) / 1000


def _scan_sql() -> str:
    return "; ".join(
        f'SELECT {", ".join(f"max({chr(34)}{c}{chr(34)})" for c in columns)} FROM "{table}"'
        for table, columns in _SCANS.items()
    )


def _vendor() -> tuple[Path, Path] | None:
    prefix = Path(os.environ.get("NSAN_NSYS_PREFIX", "/opt/nvidia/nsight-systems"))
    target = prefix / "2023.4.4" / "target-linux-x64"
    script = target / "reports" / "um_sum.py"
    return (script, target / "python" / "lib") if script.is_file() else None


def _environment(folder: Path) -> dict[str, str]:
    env = os.environ | {"NSAN_CACHE_DIR": str(folder / "cache")}
    # As on a user's machine: modules are compiled once. Some machines switch that off.
    env["PYTHONPYCACHEPREFIX"] = str(folder / "pycache")
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def _measure(folder: Path, *, faults: int, migrations: int, kernels: int) -> list[tuple[str, ...]]:
    export = write(folder / "bench.sqlite", faults=faults, migrations=migrations, kernels=kernels)
    env = _environment(folder)
    nsan = [sys.executable, "-m", "nsan"]
    rows: list[tuple[str, ...]] = []

    def row(what: str, seconds: float, reference: str, base: float | None, aim: str) -> None:
        ratio = f"{seconds / base:.3g}" if base else "-"
        rows.append(
            (what, f"{seconds:.3f} s", reference, f"{base:.3f} s" if base else "-", ratio, aim)
        )

    write(folder / "warm.sqlite", faults=10, migrations=10, kernels=10)
    sqlite3 = shutil.which("sqlite3")
    scan = _seconds([sqlite3, str(export), _scan_sql()], repeat=3) if sqlite3 else None
    vendor = _vendor()
    um_sum = None
    if vendor:
        script, lib = vendor
        um_sum = _seconds(
            [sys.executable, str(script), str(export)], env=env | {"PYTHONPATH": str(lib)}
        )

    _seconds([*nsan, "info", "-q", str(folder / "warm.sqlite")], env=env)
    store = folder / "store"
    again = [*nsan, "import", "-q", "--force-overwrite", str(export), "-o", str(store)]
    row("import", _seconds(again, env=env, repeat=2), "sqlite3 scan", scan, "3.5")
    peak = _peak_mb(again, env)
    cold = _seconds([*nsan, "summary", "-q", str(export)], env=env)
    row("summary, cold", cold, "um_sum.py", um_sum, "0.7")
    warm = _seconds([*nsan, "summary", "-q", str(export)], env=env, repeat=5)
    row("summary, warm", warm, "um_sum.py", um_sum, "0.03")
    filtered = [*nsan, "migrations", "-q", str(export), "--filter-time", "1s/2s"]
    row("migrations --filter-time", _seconds(filtered, env=env, repeat=3), "um_sum.py", um_sum, "-")
    for form, out in (("perfetto", "bench.pftrace"), ("parquet", "tables"), ("csv", "tables")):
        words = [*nsan, "export", "-q", str(export), "--to", form, "--force-overwrite"]
        seconds = _seconds([*words, "-o", str(folder / out)], env=env)
        row(f"export --to {form}", seconds, "sqlite3 scan", scan, "-")
    bare = _seconds([sys.executable, "-c", "pass"], env=env, repeat=10)
    help_ = _seconds([*nsan, "--help"], env=env, repeat=10)
    rows.append(
        (
            "--help",
            f"{help_:.3f} s",
            "python -c pass",
            f"{bare:.3f} s",
            f"+{(help_ - bare) * 1e3:.0f} ms",
            "+150 ms",
        )
    )
    rows.append(("peak memory of import", f"{peak:.0f} MB", "-", "-", "-", "1500 MB"))
    return rows


def _scaling(folder: Path) -> list[tuple[str, ...]]:
    """Import ten times the rows: the cost must be linear in them."""
    env = _environment(folder)
    times = {}
    for millions in (1, 10):
        rows = millions * 1_000_000
        size = {"faults": rows * 5 // 7, "migrations": rows * 2 // 7, "kernels": rows // 70}
        export = write(folder / f"scaling-{millions}.sqlite", **size)
        command = [sys.executable, "-m", "nsan", "import", "-q", "--force-overwrite", str(export)]
        times[millions] = _seconds(command, env=env, repeat=3 if millions == 1 else 1)
        export.unlink()
    ratio = f"{times[10] / times[1]:.3g}"
    return [
        ("import, 10 M rows", f"{times[10]:.3f} s", "1 M rows", f"{times[1]:.3f} s", ratio, "10.5")
    ]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--large", action="store_true", help="5 M faults, 2 M migrations, 100 k kernels"
    )
    parser.add_argument(
        "--scaling", action="store_true", help="also 1 M against 10 M rows; takes some minutes"
    )
    args = parser.parse_args()
    size = (
        {"faults": 5_000_000, "migrations": 2_000_000, "kernels": 100_000}
        if args.large
        else {"faults": 500_000, "migrations": 200_000, "kernels": 10_000}
    )
    with tempfile.TemporaryDirectory(prefix="nsan-bench-") as folder:
        rows = _measure(Path(folder), **size)
        if args.scaling:
            rows += _scaling(Path(folder))
    print(", ".join(f"{n:,} {what}" for what, n in size.items()))
    print()
    head = ("what", "time", "reference", "its time", "ratio", "aim")
    for line in (head, ("---",) * len(head), *rows):
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
