"""What is installed here, and what each part is for. Nothing is sent anywhere."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from nsan.cli.terminal import coloured
from nsan.errors import NsanError
from nsan.nsys_errors import NsysError
from nsan.tabular.text import Field, json_text, table, word

_PROBE_SECONDS: Final = 10
_HAS_RECIPES: Final = """\
import importlib.util, sys
if all(map(importlib.util.find_spec, ("nsan", "polars", "pandas", "psutil", "pyarrow"))):
    print(sys.executable)
"""


@dataclass(frozen=True)
class Finding:
    """One part: whether it is there, what was found, what it is for, how to get it."""

    part: str
    status: Literal["ok", "missing"]
    found: str
    purpose: str
    get: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("--json", action="store_true", help="write JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    findings = list(_findings())
    if args.json:
        sys.stdout.write(
            json_text({"schema": 1, "parts": [asdict(finding) for finding in findings]})
        )
        return 0
    rows = [
        asdict(f) | {"status": coloured(f.status) if f.status == "ok" else f.status}
        for f in findings
    ]
    fields = (
        Field("part", "Part", word, right=False),
        Field("status", "Status", str, right=False),
        Field("found", "Found", word, right=False),
        Field("purpose", "For", word, right=False),
    )
    sys.stdout.write(table(rows, fields) + "\n")
    missing = [finding for finding in findings if finding.status == "missing"]
    if missing:
        sys.stdout.write("\nTo get what is missing, where you need it:\n")
        sys.stdout.writelines(f"  {finding.part}: {finding.get}\n" for finding in missing)
    return 0


def _findings() -> Iterator[Finding]:
    yield Finding("Python", "ok", platform.python_version(), "runs nsan", "")
    for package, purpose, extra in (
        ("polars", "reads and analyses traces", ""),
        ("scipy", "clusters and fits", ""),
        ("jupyterlab", "explore a trace in a notebook", "lab"),
        ("papermill", "reports", "report"),
        ("anywidget", "the explorer in a notebook", "lab"),
        ("altair", "charts", "report"),
        ("vl-convert-python", "charts as PNG, SVG, PDF", "report"),
        ("numba", "the driver model", "model"),
        ("dask", "many traces at once", "scale"),
    ):
        yield _package(package, purpose, extra)
    yield _nsys()
    yield _program(
        "Chromium", _chromium(), "PDF reports", "install chromium from your distribution"
    )
    yield _program(
        "nvcc", shutil.which("nvcc"), "build the microbenchmark", "install the CUDA toolkit"
    )
    yield _gpu()
    yield from _within_nsys()
    yield _cache()


def _package(name: str, purpose: str, extra: str) -> Finding:
    get = f"pip install 'nsan[{extra}]'" if extra else "pip install nsan"
    try:
        return Finding(name, "ok", metadata.version(name), purpose, get)
    except metadata.PackageNotFoundError:
        return Finding(name, "missing", "-", purpose, get)


def _chromium() -> str | None:
    from nsan.report.pdf import find_chromium

    try:
        return str(find_chromium())
    except NsanError:
        return None


def _nsys() -> Finding:
    from nsan.io.nsys_cli import find_nsys

    purpose, get = "record a program, export a report", "install NVIDIA Nsight Systems"
    try:
        program = find_nsys()
    except NsysError as error:
        return Finding("nsys", "missing", "NSYS cannot be run", purpose, str(error))
    return _program("nsys", None if program is None else str(program), purpose, get)


def _program(name: str, path: str | None, purpose: str, get: str) -> Finding:
    if path is None:
        return Finding(name, "missing", "-", purpose, get)
    text = _output([path, "--version"])
    lines = [line for line in text.splitlines() if line.strip()]
    found = next((line for line in reversed(lines) if any(c.isdigit() for c in line)), path)
    return Finding(name, "ok", found.strip()[:60], purpose, get)


def _gpu() -> Finding:
    purpose, get = "record Unified Memory traces", "a machine with an NVIDIA GPU and its driver"
    program = shutil.which("nvidia-smi")
    query = ["--query-gpu=name,driver_version", "--format=csv,noheader"]
    lines = _output([program, *query]).strip().splitlines() if program else []
    names = [line.strip() for line in lines if "," in line]
    return Finding("GPU", "ok" if names else "missing", "; ".join(names)[:60] or "-", purpose, get)


def _within_nsys() -> Iterator[Finding]:
    """Say whether nsys finds nsan's reports and recipes, and whether what runs the recipes finds nsan."""
    from nsan.cli.recipe_shells import RECIPES, REPORTS, findings

    for name, (found, trouble) in findings(os.environ).items():
        purpose = {REPORTS: "`nsys stats -r nsan_um_sum`", RECIPES: "`nsys recipe uvm_sum`"}[name]
        get = trouble or 'eval "$(nsan recipe path)", or `nsan recipe install`'
        yield Finding(name, "missing" if trouble else "ok", found, purpose, get)
    program = shutil.which("python3")
    found = _output([program, "-c", _HAS_RECIPES]).strip() if program else ""
    yield Finding(
        "python3 for recipes",
        "ok" if found else "missing",
        found or program or "-",
        "nsys runs recipes with it",
        "put the Python that has nsan first on PATH, with pip install 'nsan[recipe]'",
    )


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - the programs are found by name, without a shell
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _cache() -> Finding:
    from nsan.io.manifest import cache_folder

    folder = cache_folder()
    nearest: Path = next(place for place in (folder, *folder.parents) if place.exists())
    writable = os.access(nearest, os.W_OK)
    return Finding(
        "cache folder",
        "ok" if writable else "missing",
        str(folder) if writable else f"{folder} cannot be written",
        "stores of imported traces; remove it at any time",
        "set NSAN_CACHE_DIR to a folder that can be written",
    )
