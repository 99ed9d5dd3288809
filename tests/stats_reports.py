"""Run nsan's reports for `nsys stats` as nsys does: several in one process, or by their own programs.

Everything runs on the real interface of an installed nsys (``nsysstats``); without one, tests skip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import vendor

import nsan

FOLDER = Path(nsan.__file__).parent / "stats_reports"
REPORTS = tuple(sorted(path.stem for path in FOLDER.glob("nsan_um_*.py")))
TIMEOUT_S = 120

_DRIVER = """
import importlib.util, json, sys

def report_class(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return next(v for v in vars(module).values() if isinstance(v, type) and hasattr(v, "usage"))

def result_of(name, file, export, arguments):
    report, status, message = report_class(name, file).Report(export, arguments)
    if report is None:
        return [status, message, [], []]
    rows = []
    while True:
        row = report.get_query_row()
        if row is None:
            return [0, report.MessageNoResult(), report.headers, rows]
        rows.append(row)

print(json.dumps([result_of(*each) for each in json.load(sys.stdin)]))
"""


@dataclass(frozen=True)
class Result:
    """What a report gave: status and message of the interface, headers as given, rows by bare header."""

    status: int
    message: str
    headers: tuple[str, ...]
    rows: list[dict]

    @property
    def only(self):
        (row,) = self.rows
        return row

    def by(self, *keys):
        """Rows by the values of some columns; they must tell them apart."""
        found = {tuple(row[key] for key in keys): row for row in self.rows}
        assert len(found) == len(self.rows)
        return found

    def total(self, column):
        return sum(row[column] for row in self.rows)


def run(asked, version="2023.4.4", python=sys.executable):
    """Run reports.

    Parameters
    ----------
    asked : list of (str, Path, ...)
        Name after ``nsan_um_``, export, and arguments as nsys passes them.
    version : str
        Version of nsys whose interface they run on.
    python : str
        The interpreter.
    """
    given = [
        (f"nsan_um_{name}", str(FOLDER / f"nsan_um_{name}.py"), str(path), list(arguments))
        for name, path, *arguments in asked
    ]
    done = subprocess.run(
        [python, "-B", "-c", _DRIVER],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        cwd=FOLDER.root,
        env=_environment(version),
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [
        Result(
            status,
            message,
            tuple(headers),
            [dict(zip((h.partition(":")[0] for h in headers), row, strict=True)) for row in rows],
        )
        for status, message, headers, rows in json.loads(done.stdout)
    ]


def one(name, path, *arguments, version="2023.4.4"):
    (result,) = run([(name, path, *arguments)], version)
    return result


def main(name, path, *arguments, version="2023.4.4"):
    """Run one report by its own program; return the finished process."""
    script = str(FOLDER / f"nsan_um_{name}.py")
    return subprocess.run(
        [sys.executable, "-B", script, str(path), *arguments],
        capture_output=True,
        text=True,
        env=_environment(version),
        timeout=TIMEOUT_S,
        check=False,
    )


def stats(version, path, *arguments, folder=FOLDER):
    """Run `nsys stats`, told by the environment where the reports are; return the finished process."""
    program = str(vendor.need(version) / "nsys")
    return subprocess.run(
        [program, "stats", *arguments, str(path)],
        capture_output=True,
        text=True,
        # The bytecode that its Python would leave in our folder.
        env=os.environ | {"NSYS_STATS_REPORT_PATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=TIMEOUT_S,
        check=False,
    )


def _environment(version):
    library = vendor.need(version) / "python" / "lib"
    return {**os.environ, "PYTHONPATH": str(library), "PYTHONDONTWRITEBYTECODE": "1"}
