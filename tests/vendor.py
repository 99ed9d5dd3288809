"""Run the Unified Memory reports of an installed nsys: an oracle that owes nothing to nsan.

The reports are scripts of the installation; nothing of them is kept here. Their columns are taken
by position and named as nsan names them. A script opens its input read-only.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PREFIX = Path("/opt/nvidia/nsight-systems")
TIMEOUT_S = 60

TOTALS = ("htod_bytes", "dtoh_bytes", "n_cpu_faults", "n_page_faults", "min_va", "max_va")
BY_ADDRESS = ("va", "htod_bytes", "dtoh_bytes", "n_cpu_faults", "n_page_faults", "bytes_per_s")

_SCRIPTS = {
    "2023.4.4": {"totals": "um_total_sum", "by_address": "um_sum"},
    "2022.4.2": {"totals": "unifiedmemorytotals", "by_address": "unifiedmemory"},
}
VERSIONS = tuple(_SCRIPTS)
"""Versions whose reports these tests know."""


@dataclass(frozen=True)
class Printed:
    """What a report printed: exit status, header as printed, rows under our names, messages."""

    status: int
    header: tuple[str, ...]
    rows: list[dict[str, int | None]]
    messages: str

    @property
    def only(self):
        """The one row of a report that prints one."""
        assert len(self.rows) == 1, f"{len(self.rows)} rows; {self.messages}"
        return self.rows[0]

    def total(self, column):
        """Sum of a column over all rows; an empty cell adds nothing."""
        return sum(row[column] or 0 for row in self.rows)


def prefix():
    return Path(os.environ.get("NSAN_NSYS_PREFIX") or PREFIX)


def installed_versions():
    """Find installed versions of nsys: version to its ``target-linux-x64``; empty if none."""
    found = (path for path in prefix().glob("*/target-linux-x64") if (path / "nsys").is_file())
    return {path.parent.name: path for path in sorted(found)}


def need(version):
    """Return the folder of a version; without it, skip, or fail where a real nsys is promised."""
    folder = installed_versions().get(version)
    if folder is not None:
        return folder
    reason = f"nsys {version} is not installed in {prefix()}: the vendor's side was not checked"
    if os.environ.get("NSAN_REQUIRE_NSYS") == "1":
        pytest.fail(f"NSAN_REQUIRE_NSYS=1, but {reason}")
    pytest.skip(reason)


def report(version, kind, export, *arguments):
    """Run a report script.

    Parameters
    ----------
    version : str
        One of :data:`VERSIONS`.
    kind : str
        ``totals`` or ``by_address``.
    export : Path
        SQLite export.
    *arguments : str
        Such as ``rows=-1``; 2023.4.4 also takes ``start=``, ``end=`` and ``nvtx=``.
    """
    folder = need(version)
    script = folder / "reports" / f"{_SCRIPTS[version][kind]}.py"
    done = _run(
        [sys.executable, "-B", str(script), str(export), *arguments],
        PYTHONPATH=str(folder / "python" / "lib"),
    )
    lines = list(csv.reader(done.stdout.splitlines()))
    names = TOTALS if kind == "totals" else BY_ADDRESS
    assert all(len(line) == len(names) for line in lines), done.stdout
    rows = [
        {name: int(cell) if cell else None for name, cell in zip(names, line, strict=True)}
        for line in lines[1:]
    ]
    return Printed(done.returncode, tuple(lines[0]) if lines else (), rows, done.stderr)


def totals(version, export, *arguments):
    return report(version, "totals", export, *arguments)


def by_address(version, export, *arguments):
    """All addresses, unless ``rows=`` says otherwise."""
    limited = any(argument.startswith("rows=") for argument in arguments)
    return report(version, "by_address", export, *arguments, *(() if limited else ("rows=-1",)))


def stats(version, export, *, output="csv"):
    """Run both reports as a user would, by ``nsys stats``; return the finished process."""
    names = ",".join(_SCRIPTS[version].values())
    program = str(need(version) / "nsys")
    return _run([program, "stats", "-q", "-f", output, "-r", names, str(export)])


def _run(command, **environment):
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | environment,
        timeout=TIMEOUT_S,
        check=False,
    )
