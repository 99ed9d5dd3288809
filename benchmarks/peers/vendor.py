"""The vendor's report scripts and recipes, of the installations that are found: run, and their columns read.

A script is run as the vendor's own runner runs it, by Python on the file. Columns are taken by position.
Nothing of the vendor's is kept here; what a script prints is kept as figures only.
"""

from __future__ import annotations

import csv
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.agreement import Answer
from benchmarks.peers.measuring import Taken, run
from benchmarks.peers.tables import BLOCK, DIRECTIONS, connect

PREFIX = Path("/opt/nvidia/nsight-systems")
SCRIPTS = {
    "totals": ("um_total_sum", "unifiedmemorytotals"),
    "places": ("um_sum", "unifiedmemory"),
    "functions": ("um_cpu_page_faults_sum", "umcpupagefaults"),
}
"""Script that answers a question, by its new and its old name."""

RECIPE = "cuda_gpu_mem_time_sum"
_TRIES_S = 120
_CLOCK_STEP_S = 0.1
_SESSION = "TARGET_INFO_SESSION_START_TIME"


@dataclass(frozen=True)
class Installation:
    """An nsys that is installed: its version and where its programs lie."""

    version: str
    folder: Path

    def script(self, question: str) -> Path | None:
        """Find the script of a question."""
        places = (self.folder / "reports" / f"{name}.py" for name in SCRIPTS[question])
        return next((place for place in places if place.is_file()), None)

    @property
    def library(self) -> Path:
        return self.folder / "python" / "lib"

    @property
    def recipes(self) -> Path:
        return self.folder / "python" / "packages" / "nsys_recipe" / "recipes"


def installations() -> list[Installation]:
    """Find what is installed, the newest first."""
    prefix = Path(os.environ.get("NSAN_NSYS_PREFIX") or PREFIX)
    found = (path for path in prefix.glob("*/target-linux-x64") if (path / "nsys").is_file())
    kept = [Installation(path.parent.name, path) for path in found]
    return sorted(kept, key=lambda one: _numbers(one.version), reverse=True)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def script_command(script: Path, file: str, *arguments: str) -> list[str]:
    """Give the command of a script."""
    return [sys.executable, "-B", str(script), file, *arguments]


def table(text: str) -> list[list[str]] | None:
    """Read what a script printed, without its header; None if it printed no table."""
    lines = list(csv.reader(text.splitlines()))
    return lines[1:] if lines and len(lines[0]) > 1 else None


def _number(cell: str) -> int | None:
    return int(float(cell)) if cell else None


def totals(text: str) -> Answer | None:
    """Read the one row of totals; an empty cell of sizes and counts is read as 0."""
    lines = table(text)
    if lines is None:
        return None
    cells = [_number(cell) for cell in lines[0]]
    names = ("htod_bytes", "dtoh_bytes", "n_cpu_faults", "n_page_faults")
    figures: dict[str, int | None] = {
        name: cell or 0 for name, cell in zip(names, cells, strict=False)
    }
    figures |= dict(zip(("min_va", "max_va"), cells[4:], strict=True))
    return {"totals": {"all": figures}}


def by_address(text: str) -> dict[int, dict[str, int | None]] | None:
    """Read rows by address as they are."""
    lines = table(text)
    if lines is None:
        return None
    names = ("htod_bytes", "dtoh_bytes", "n_cpu_faults", "n_page_faults", "bytes_per_s")
    rows = ((int(va), [_number(cell) for cell in cells]) for va, *cells in lines)
    return {va: dict(zip(names, cells, strict=True)) for va, cells in rows}


def places(text: str) -> Answer | None:
    """Add the rows by address up to VA blocks; an empty cell is read as 0."""
    rows = by_address(text)
    if rows is None:
        return None
    blocks: dict[str, dict[str, int]] = {}
    for va, cells in rows.items():
        sums = blocks.setdefault(str(va // BLOCK), {})
        for name, cell in cells.items():
            if name != "bytes_per_s":
                sums[name] = sums.get(name, 0) + (cell or 0)
    return {"by VA block": blocks}


def functions(text: str) -> Answer | None:
    """Read counts of CPU faults by function."""
    lines = table(text)
    if lines is None:
        return None
    return {"by function": {name or "None": {"n_cpu_faults": int(n)} for n, name in lines}}


READ = {"totals": totals, "places": places, "functions": functions}


def read(question: str, taken: Taken) -> Answer | None:
    """Read what a script printed."""
    return READ[question](taken.output)


# --- Recipes --------------------------------------------------------------------------------------


def make_reports(one: Installation, exports: Iterable[Path], folder: Path) -> list[Path]:
    """Make a real report per export, with the export beside it, newer and said to be of that recording.

    Returns
    -------
    list of Path
        Empty where this nsys cannot profile here.
    """
    first, probe = folder / "first.nsys-rep", folder / "first.sqlite"
    nsys = str(one.folder / "nsys")
    recorded = ("profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none", "-o", str(first))
    for words in ((*recorded, "true"), ("export", "--type=sqlite", "-o", str(probe), str(first))):
        if run([nsys, *words], os.environ, limit_s=_TRIES_S).status:
            return []
    if not (first.is_file() and probe.is_file()):
        return []
    with closing(connect(probe)) as connection:
        began = connection.execute(f"SELECT utcEpochNs FROM {_SESSION}").fetchone()
    reports = []
    for export in exports:
        with closing(sqlite3.connect(export)) as connection:
            connection.execute(f"DELETE FROM {_SESSION}")
            connection.execute(f"INSERT INTO {_SESSION} (utcEpochNs) VALUES (?)", began)
            connection.commit()
        report = folder / f"{export.stem}.nsys-rep"
        shutil.copy(first, report)
        os.utime(report, (1_000_000_000, 1_000_000_000))
        report.with_suffix(".sqlite").hardlink_to(export)
        reports.append(report)
    first.unlink()
    probe.unlink()
    # A recipe exports again, over what is there, unless the export changed after its report.
    time.sleep(_CLOCK_STEP_S)
    for report in reports:
        os.utime(report.with_suffix(".sqlite"))
    return reports


def recipe_command(one: Installation, name: str, mode: str, folder: Path) -> list[str]:
    """Give the command of a recipe over all reports of a folder."""
    return [
        str(one.folder / "nsys"), "recipe", name, "--mode", mode, "--csv", "--force-overwrite",
        "--input", str(folder), "--output", str(folder.with_name(f"{folder.name}-{name}-{mode}")),
    ]  # fmt: skip


def recipe_environment(env: dict[str, str]) -> dict[str, str]:
    """Give recipes this Python: nsys takes the `python3` of the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    # Without the folder of tests: the vendor's package imports a `reports` of its own.
    return env | {"PATH": path, "PYTHONPATH": str(Path(__file__).parents[2])}


def recipe_needs() -> str | None:
    """Name what the vendor's recipes need and this Python lacks."""
    code = "import asyncore, numpy, pandas, psutil, pyarrow"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=False, capture_output=True, text=True
    )
    last = done.stderr.strip().splitlines()[-1:]
    return last[0].rpartition(": ")[2] if done.returncode and last else None


def transfers(folder: Path, example: Path) -> Answer | None:
    """Read the table by report of the recipe: sums by direction, whatever the file calls it."""
    (found,) = folder.glob("rank_stats.csv") if folder.is_dir() else (None,)
    if found is None:
        return None
    with closing(connect(example)) as connection:
        labels = dict(connection.execute("SELECT label, id FROM ENUM_CUDA_MEMCPY_OPER"))
    rows: dict[str, dict[str, int]] = {}
    with found.open(newline="") as file:
        for cells in csv.DictReader(file):
            label = cells["Operation"].removeprefix("[CUDA memcpy ").removesuffix("]")
            direction = DIRECTIONS.get(labels.get(label, 0))
            if direction:
                rows[f"{cells['File']} {direction}"] = {
                    "n": int(cells["Count"]),
                    "total_ns": int(float(cells["Total Time"])),
                    "min_ns": int(float(cells["Min"])),
                    "max_ns": int(float(cells["Max"])),
                }
    return {"by direction": rows}
