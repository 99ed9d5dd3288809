"""Import, summarise, cluster and report huge exports, each in a process of its own, within a budget of memory.

    PYTHONPATH=tests python -m benchmarks.huge --rows 10e6 30e6 100e6 --folder FOLDER

prints for each size and step: file, seconds, CPU seconds, peak of the memory of the process and its children, and
what was left out for want of memory. At every size totals and clusters are compared with plain SQL on the file.
A file that is in the folder already is not written again.

    PYTHONPATH=tests python -m benchmarks.huge --costs --rows 1e6 --folder FOLDER

measures what each analysis takes per row, beside what :mod:`nsan.analysis.costs` says.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from exports import COHERENCE, GPU_FAULTS, HTOD, MEMCPY, PREFETCH, ask

from benchmarks.generate import write_huge

_EVERY_S = 0.05
_LEFT_OUT = "was not run: for"


@dataclass(frozen=True)
class Taken:
    """What a command took."""

    seconds: float
    cpu_seconds: float
    peak_mb: float
    status: int
    said: str


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, nargs="+", default=[10e6], help="sizes, as 10e6")
    parser.add_argument("--folder", type=Path, required=True, help="where files are written")
    parser.add_argument("--memory", default="4GB", help="NSAN_MEMORY of each (default 4GB)")
    parser.add_argument("--any-order", action="store_true", help="rows in no order of time")
    parser.add_argument("--skip-report", action="store_true", help="no report: it takes longest")
    parser.add_argument("--costs", action="store_true", help="measure analyses one by one instead")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.costs:
        _costs(args.folder, int(args.rows[0]))
        return
    print("| rows | file | step | seconds | CPU seconds | peak | per row | left out |")
    print("|" + " --- |" * 8)
    right = True
    for rows in args.rows:
        right &= _measure(args, int(rows))
    sys.exit(not right)


def _export(folder: Path, rows: int, *, any_order: bool) -> Path:
    path = folder / f"huge-{rows}{'-any-order' * any_order}.sqlite"
    if not path.exists():
        part = path.with_suffix(".part")
        write_huge(part, rows, any_order=any_order)
        part.rename(path)
    return path


def _measure(args: argparse.Namespace, rows: int) -> bool:
    """Measure all steps of a size; say whether figures are those of SQL."""
    path = _export(args.folder, rows, any_order=args.any_order)
    cache = args.folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    env = os.environ | {"NSAN_MEMORY": args.memory, "NSAN_CACHE_DIR": str(cache)}
    n_rows = ask(
        path,
        f"SELECT (SELECT count(*) FROM {GPU_FAULTS}) + (SELECT count(*) FROM {MEMCPY})",
    )[0][0]
    page, found = path.with_suffix(".html"), {}
    steps = {
        "import": ("import", "-q", str(path)),
        "summary": ("summary", "-q", "--json", str(path)),
        "clusters": ("clusters", "-q", "--json", str(path)),
        "report": ("report", "-q", str(path), "-o", str(page), "--force-overwrite"),
    }
    for step, words in steps.items():
        if step == "report" and args.skip_report:
            continue
        taken = _run([sys.executable, "-m", "nsan", *words], env)
        found[step] = taken.said
        said = (
            page.read_text(encoding="utf-8") if step == "report" and page.exists() else taken.said
        )
        left_out = said.count(_LEFT_OUT) if not taken.status else f"exit status {taken.status}"
        cells = (
            f"{n_rows:,}",
            f"{path.stat().st_size / 1e9:.2f} GB",
            step,
            f"{taken.seconds:.1f}",
            f"{taken.cpu_seconds:.1f}",
            f"{taken.peak_mb:,.0f} MB",
            f"{taken.peak_mb * 1e6 / n_rows:.0f} B",
            str(left_out),
        )
        print("| " + " | ".join(cells) + " |", flush=True)
    differs = [*_differs(path, json.loads(found["summary"]), json.loads(found["clusters"]))]
    print(f"\n{'; '.join(differs) or 'Totals and clusters equal plain SQL.'}\n", flush=True)
    return not differs


# Measuring ------------------------------------------------------------------------------------------


def _run(command: list[str], env: dict[str, str]) -> Taken:
    """Run a command; watch the memory of it and its children."""
    begin = time.perf_counter()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        watch = _Watch(process.pid)
        watch.start()
        said = process.stdout.read() if process.stdout else ""
        _, status, usage = os.wait4(process.pid, 0)
        watch.done.set()
        watch.join()
        process.returncode = os.waitstatus_to_exitcode(status)
    return Taken(
        time.perf_counter() - begin,
        usage.ru_utime + usage.ru_stime,
        # The kernel knows the mark of the process itself exactly, also between two looks.
        max(watch.most_kb, usage.ru_maxrss) / 1e3,
        process.returncode,
        said,
    )


class _Watch(threading.Thread):
    """Adds up the memory of a process and its children, again and again."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.most_kb, self.done = pid, 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(_EVERY_S):
            self.most_kb = max(self.most_kb, sum(map(_resident_kb, _tree(self.pid))))


def _tree(pid: int) -> Iterator[int]:
    """List a process and those that it started, and they."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        threads = [each.name for each in Path(f"/proc/{pid}/task").iterdir()]
        for thread in threads:
            if thread != str(pid):
                children += Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _tree(int(child))


def _resident_kb(pid: int) -> int:
    """Say what a process holds, what it shares divided among those that share it."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


# Checking -------------------------------------------------------------------------------------------


def _differs(path: Path, summary: dict, clusters: dict) -> Iterator[str]:
    """Name what is not as plain SQL says."""
    total = "count(*), sum(bytes), min(start), max(end)"
    moved = ask(path, f"SELECT {total} FROM {MEMCPY}")[0]
    faults = ask(
        path, f"SELECT count(*), sum(numberOfPageFaults), count(DISTINCT address) FROM {GPU_FAULTS}"
    )[0]
    of_faults = ask(
        path,
        f"SELECT sum(bytes) FROM {MEMCPY} WHERE copyKind = {HTOD} AND migrationCause IN ({COHERENCE}, {PREFETCH})",
    )[0][0]
    by_group = ask(
        path,
        "SELECT copyKind, migrationCause, deviceId, globalPid, count(*), sum(bytes) "
        f"FROM {MEMCPY} GROUP BY 1, 2, 3, 4",
    )
    ours, rows = summary["migrations"], clusters["rows"]
    said = (
        ("migrations", ours["n"], moved[0]),
        ("bytes of migrations", sum(row["bytes"] for row in ours["groups"]), moved[1]),
        (
            "groups of migrations",
            sorted((row["n"], row["bytes"]) for row in ours["groups"]),
            sorted((row[4], row[5]) for row in by_group),
        ),
        ("fault rows", summary["gpu_faults"]["n_rows"], faults[0]),
        ("recorded faults", summary["gpu_faults"]["n_page_faults"], faults[1]),
        ("addresses of faults", summary["gpu_faults"]["n_addresses"], faults[2]),
        ("fault rows in clusters", sum(row["n_fault_rows"] for row in rows), faults[0]),
        ("bytes in clusters", sum(row["bytes"] for row in rows), of_faults),
    )
    for what, got, wanted in said:
        if got != wanted:
            yield f"{what}: {got}, and SQL says {wanted}"


# Costs ----------------------------------------------------------------------------------------------


def _costs(folder: Path, rows: int) -> None:
    """Measure every analysis of a trace in a process of its own."""
    from nsan.analysis.catalog import catalog
    from nsan.analysis.costs import COSTS

    path = _export(folder, rows, any_order=False)
    env = os.environ | {"NSAN_MEMORY": "1TiB", "NSAN_CACHE_DIR": str(folder / "cache")}
    subprocess.run(
        [sys.executable, "-m", "nsan", "import", "-q", str(path)],
        env=env,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    print("| analysis | rows read | CPU seconds | peak | bytes per row | said |\n|" + " --- |" * 6)
    for name, analysis in catalog().items():
        if analysis.subject != "trace":
            continue
        command = [sys.executable, "-m", "benchmarks.huge_costs", name, str(path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {name} | failed: {done.stderr.strip().splitlines()[-1]} |", flush=True)
            continue
        took = json.loads(done.stdout)
        said = COSTS.get(name)
        per_row = took["mb"] * 1e6 / max(took["rows"], 1)
        print(
            f"| {name} | {took['rows']:,} | {took['cpu']:.1f} | {took['mb']:.0f} MB | {per_row:.0f} | "
            f"{said.bytes_per_row if said else '-'}{' of a place' * bool(said and said.of == 'place')} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
