"""nsan's own reports for `nsys stats`, run as the vendor's are, and their columns read by name."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from benchmarks.peers.agreement import Answer, Figure
from benchmarks.peers.measuring import Taken
from benchmarks.peers.tables import BLOCK

FOLDER = Path(__file__).parents[2] / "nsan" / "stats_reports"
SCRIPTS = {
    "totals": ("nsan_um_total_sum",),
    "places": ("nsan_um_sum", "by=block", "rows=-1"),
    "kernels": ("nsan_um_kern_sum",),
}
"""Script that answers a question, and its arguments."""

_FIGURES = {
    "n_migrations": "Migrations",
    "htod_bytes": "HtoD Migration Size",
    "dtoh_bytes": "DtoH Migration Size",
    "dtod_bytes": "DtoD Migration Size",
    "evicted_bytes": "Evicted Size",
    "n_fault_rows": "GPU Fault Batches",
    "n_page_faults": "Lowest-Page Faults",
    "n_cpu_faults": "CPU Page Faults",
}
_PLACE = (
    "htod_bytes",
    "dtoh_bytes",
    "evicted_bytes",
    "n_fault_rows",
    "n_page_faults",
    "n_cpu_faults",
)


def _rows(text: str) -> list[dict[str, str]]:
    """Read a table; what stands after a colon is a unit."""
    found = csv.DictReader(text.splitlines())
    return [{name.split(":")[0]: cell for name, cell in row.items()} for row in found]


def _sum(rows: Iterable[dict[str, str]], column: str) -> int | None:
    """Add a column up; an empty cell was not recorded."""
    cells = [int(row[column]) for row in rows if row[column]]
    return sum(cells) if cells else None


def _totals(rows: list[dict[str, str]]) -> Answer:
    names = [name for name in _FIGURES if name != "evicted_bytes"]
    figures: dict[str, Figure] = {name: _sum(rows, _FIGURES[name]) for name in names}
    # Its lowest and highest address are of faults, too: another figure than that of migrations.
    return {"totals": {"all": figures}}


def _places(rows: list[dict[str, str]]) -> Answer:
    blocks: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        blocks.setdefault(str(int(row["Virtual Address"]) // BLOCK), []).append(row)
    sums = {
        block: {name: _sum(some, _FIGURES[name]) for name in _PLACE}
        for block, some in blocks.items()
    }
    # What no block has was not recorded: it is not said.
    known = {name for cells in sums.values() for name, value in cells.items() if value is not None}
    return {
        "by VA block": {
            block: {name: value or 0 for name, value in cells.items() if name in known}
            for block, cells in sums.items()
        }
    }


def _kernels(rows: list[dict[str, str]]) -> Answer:
    names: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        if row["GPU Fault Batches"] not in ("", "0"):
            names.setdefault(row["Name"], []).append(row)
    return {
        "by kernel": {
            name: {
                figure: _sum(some, _FIGURES[figure]) for figure in ("n_fault_rows", "n_page_faults")
            }
            for name, some in names.items()
        }
    }


_READ = {"totals": _totals, "places": _places, "kernels": _kernels}


def read(question: str, taken: Taken) -> Answer | None:
    """Read what a report of ours printed."""
    rows = _rows(taken.output)
    return _READ[question](rows) if rows else None
