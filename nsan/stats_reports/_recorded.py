"""Whether a kind of event was recorded: yes (maybe without a row), no, or unknown; as :mod:`nsan.io.nsys_info`."""

from __future__ import annotations

import re
from typing import NamedTuple

from nsan.stats_reports._export import Export


class Kind(NamedTuple):
    """A kind of event."""

    words: str
    switch: str
    option: str


KINDS = {
    "migrations": Kind("Unified Memory migrations", "--trace=cuda", "COLLECT_CUDA_TRACE"),
    "gpu_faults": Kind(
        "GPU page faults", "--cuda-um-gpu-page-faults=true", "COLLECT_UVM_GPU_PAGE_FAULTS"
    ),
    "cpu_faults": Kind(
        "CPU page faults", "--cuda-um-cpu-page-faults=true", "COLLECT_UVM_CPU_PAGE_FAULTS"
    ),
    "memory_events": Kind(
        "memory allocations", "--cuda-memory-usage=true", "COLLECT_GPU_MEMORY_USAGE"
    ),
}

_DECIDING = {"migrations": "copyKind", "memory_events": "memoryOperationType"}
"""Columns without which rows of a kind cannot be told from others."""

_CUDA = (
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "CUDA_UM_GPU_PAGE_FAULT_EVENTS",
    "CUDA_UM_CPU_PAGE_FAULT_EVENTS",
    "CUDA_GPU_MEMORY_USAGE_EVENTS",
)
_REFUSED = "unified memory cannot be traced"


class Recorded:
    """What the export says of each kind of event.

    Parameters
    ----------
    export : Export
        The export.
    """

    def __init__(self, export: Export) -> None:
        self._export = export
        self._options = self._pairs(["META_DATA_CAPTURE"])
        self._about = self._pairs(["META_DATA_EXPORT", "EXPORT_META_DATA"])
        self._answers: dict[str, bool | None] = {}

    def has(self, kind: str) -> bool:
        """Say whether a kind was recorded, be it without a row; unknown is no."""
        if kind not in self._answers:
            self._answers[kind] = self._answer(kind)
        return self._answers[kind] is True

    def lacking(self, *kinds: str) -> list[str]:
        """List what was not recorded, for people: each with the switch that records it."""
        return [
            f"{KINDS[kind].words} ({KINDS[kind].switch})" for kind in kinds if not self.has(kind)
        ]

    def _answer(self, kind: str) -> bool | None:
        if not self._readable(kind):
            return None
        if self._any(f"SELECT 1 FROM {self._export.rows(kind, whole=True)}"):
            return True
        if kind != "memory_events" and self._refused():
            return False
        traced = self._option(KINDS[kind].option)
        if kind == "migrations" and any(self._filled(table) for table in _CUDA):
            traced = True
        if not traced:
            return traced
        lazy = self._lazy()
        there = self._export.has_table(self._export.table_of(kind))
        is_there = there or lazy or (lazy is None and self._option(KINDS[kind].option))
        return True if is_there else None

    def _readable(self, kind: str) -> bool:
        table, column = self._export.table_of(kind), _DECIDING.get(kind)
        if column is None or not self._export.has_table(table):
            return True
        cell = self._export.cell(table, column)
        return not self._any(self._export.select(table, {"x": cell}), '"x" IS NULL')

    def _any(self, sql: str, where: str = "1") -> bool:
        return bool(self._export.one(f"SELECT EXISTS (SELECT 1 FROM ({sql}) WHERE {where})")[0])

    def _filled(self, table: str) -> bool:
        return self._any(self._export.select(table, {"x": "1"}))

    def _refused(self) -> bool:
        table = "DIAGNOSTIC_EVENT"
        text = {"text": self._export.cell(table, "text", "text")}
        return self._any(self._export.select(table, text), f"LOWER(text) LIKE '%{_REFUSED}%'")

    def _pairs(self, tables: list[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for table in tables:
            cells = {name: self._export.cell(table, name, "text") for name in ("name", "value")}
            for name, value in self._export.ask(self._export.select(table, cells)):
                if name is not None and value is not None:
                    # Options of one process carry its number before a colon.
                    bare = re.sub(r"^PROCESS_\d+:", "", name)
                    found.setdefault(bare, []).append(value.strip().lower())
        return found

    def _option(self, name: str) -> bool | None:
        values = set(self._options.get(name, ()))
        if values & {"true", "1"}:
            return True
        return False if values & {"false", "0"} else None

    def _lazy(self) -> bool | None:
        """Say whether the export leaves out tables without rows; None where it does not say."""
        if any(self._about.get("EXPORT_PARAM_TABLES_TO_EXPORT", ())):
            return False
        told = [
            v
            for name in ("EXPORT_PARAM_LAZY", "EXPORT_LAZY")
            for v in self._about.get(name, ())[:1]
        ]
        return told[0] in {"true", "1", "yes"} if told else None
