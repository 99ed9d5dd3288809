"""What was measured with, and on what kind of machine: in words, nothing that names a machine or a person."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sqlite3
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.peers.vendor import Installation

ROOT = Path(__file__).parents[2]
_PACKAGES = ("polars", "numpy", "pandas", "pyarrow")


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.rstrip()


def version_of(package: str) -> str:
    """Give the version of a package, or say that it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit(written: Path) -> str:
    """Name the commit; say so if files other than the document that is written differ from it."""
    head = _said("git", "rev-parse", "--short=10", "HEAD")
    if head is None:
        return "not from a checkout"
    changed = [line[3:] for line in (_said("git", "status", "--porcelain") or "").splitlines()]
    others = [name for name in changed if (ROOT / name) != written.resolve()]
    return f"commit {head}{', with uncommitted changes' if others else ''}"


def processor() -> str:
    """Name the family of the processor, without marks, clock rates and serial words."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    if not found:
        return platform.machine()
    name = re.sub(r"\((R|TM|tm)\)|@.*|\bCPU\b|\bProcessor\b|\d+-Core", " ", found[1])
    return f"{' '.join(name.split())}, {platform.machine()}"


def memory_gib() -> float:
    """Give the memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def facts(written: Path, found: list[Installation], torch: str | None) -> list[tuple[str, str]]:
    """List what stands in the head of the document."""
    import nsan

    shell = _said("sqlite3", "--version") if shutil.which("sqlite3") else None
    sqlite = f"{sqlite3.sqlite_version} in Python"
    sqlite += f", {shell.split()[0]} on the command line" if shell else ", no command line"
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    return [
        ("Date", datetime.now(UTC).date().isoformat()),
        ("nsan", f"{nsan.__version__}, {commit(written)}"),
        ("Python", platform.python_version()),
        *((name, version_of(name)) for name in _PACKAGES),
        ("SQLite", sqlite),
        ("nsys", ", ".join(one.version for one in found) or "not installed"),
        ("PyTorch", torch or "not installed"),
        ("Machine", f"{cores} cores, {memory_gib():.0f} GiB, {processor()}, {platform.system()}"),
        ("Load before the start", f"{load:.1f} of {cores}"),
    ]
