"""Tables and columns of an export that the questions read, and how it is opened: read-only."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

GPU_FAULTS = "CUDA_UM_GPU_PAGE_FAULT_EVENTS"
CPU_FAULTS = "CUDA_UM_CPU_PAGE_FAULT_EVENTS"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
DIRECTIONS = {11: "htod", 12: "dtoh", 13: "dtod"}
BLOCK = 2 << 20
GAP_NS = 500_000
"""Pause that parts two episodes in question 7; given to all, so that the same is asked of all."""

UNATTRIBUTED, AMBIGUOUS = "unattributed", "ambiguous"


def connect(path: Path | str) -> sqlite3.Connection:
    """Open an export without changing anything, not even by files beside it."""
    return sqlite3.connect(f"file:{quote(str(Path(path).resolve()))}?mode=ro", uri=True)


def present(connection: sqlite3.Connection) -> set[str]:
    """Name the tables that are there."""
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}


def capture(connection: sqlite3.Connection) -> dict[str, bool]:
    """Say which of the three tables of Unified Memory are there."""
    there = present(connection)
    return {name: name in there for name in (MEMCPY, GPU_FAULTS, CPU_FAULTS)}


def answer(
    ask: Callable[[sqlite3.Connection], Mapping[str, Mapping[str, Any]]], files: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Ask about each file; of several, rows carry the name of their file."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        with closing(connect(file)) as connection:
            said = ask(connection)
        for topic, rows in said.items():
            named = {f"{Path(file).stem} {row}": cells for row, cells in rows.items()}
            found.setdefault(topic, {}).update(named if len(files) > 1 else rows)
    return found
