"""Section "recorded" of a report: what was recorded, what was not, and how to record the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.contract import CAPTURE_KINDS
from nsan.health import NVPROF_KINDS
from nsan.report.blocks import Block, Point, Points, Table, Text
from nsan.report.shown import Blocks
from nsan.text import safe
from nsan.units import counted, format_count

if TYPE_CHECKING:
    from nsan.report.report import Report

RECORD_ALL: Final = (
    "`nsys profile --trace=cuda,nvtx --cuda-um-gpu-page-faults=true --cuda-um-cpu-page-faults=true "
    "--cuda-memory-usage=true -o report ./program`"
)
RECORD: Final = "`nsan record -o run -- ./program`"

_WORDS: Final = {
    "gpu_faults": ("GPU page faults", "batches, their latency and first touches"),
    "cpu_faults": ("CPU page faults", "what the CPU touches, and in which function"),
    "migrations": ("Migrations", "what moved, when and why"),
    "allocations": ("Managed allocations", "which memory it was, and oversubscription"),
    "nvtx": ("NVTX ranges", "in which phase or step"),
    "kernels": ("Kernels", "what ran meanwhile, and how long it waited"),
}
"""By kind of event: its name, and what only it tells."""

_ANSWERS: Final = {"recorded": "yes", "not_recorded": "no", "unknown": "unknown"}
_STATUS: Final = {"fail": "Wrong:", "warn": "Beware:", "unknown": "Not known:", "ok": "Note:"}


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    document = report.summary
    blocks: list[Block] = []
    if report.is_empty:
        blocks.append(Text(_nothing(report), "note"))
    blocks += [_table(report), *_how_to_record(document), *_health(document["health"])]
    return Blocks(blocks)


def _nothing(report: Report) -> str:
    if report.is_part:
        return "This part of the capture has no migration, no page fault and no managed allocation."
    return (
        "Nothing of Unified Memory is in this capture: no migration, no page fault and no managed "
        "allocation. Either the program uses no managed memory, or it was not seen."
    )


def _table(report: Report) -> Table:
    document = report.summary
    has_switches = document["source_kind"] not in NVPROF_KINDS
    heads: tuple[str, ...] = ("Events", "Recorded", "Rows", "What they tell")
    rows = [_row(report, kind) for kind in CAPTURE_KINDS]
    switches = [_switch(document, kind) for kind in CAPTURE_KINDS]
    right: tuple[bool, ...] = (False, False, True, False)
    if has_switches and any(switches):
        heads, right = (*heads, "To record them"), (*right, False)
        rows = [(*row, switch) for row, switch in zip(rows, switches, strict=True)]
    return Table(heads, tuple(rows), right)


def _row(report: Report, kind: str) -> tuple[str, ...]:
    answer, reason = report.summary["capture"][kind], report.summary["reasons"][kind]
    word, told = _WORDS[kind]
    n = n_rows(report, kind)
    # That rows are there is said of the capture, and this part of it may have none.
    if n == 0 and report.is_part:
        reason = "none in this part"
    known = _ANSWERS[answer] + (f": {safe(reason)}" if not n else "")
    return (word, known, format_count(n), told)


def _switch(document: Mapping[str, Any], kind: str) -> str:
    known = document["capture"][kind] == "recorded"
    return "" if known else safe(document["switches"][kind])


def n_rows(report: Report, kind: str) -> int | None:
    """Count the rows of a kind of events.

    Parameters
    ----------
    report : Report
        The report.
    kind : str
        Of :data:`nsan.contract.CAPTURE_KINDS`.

    Returns
    -------
    int or None
        Rows; of allocations those of managed memory. None: not recorded, or not known.
    """
    document = report.summary
    if not report.is_recorded(kind):
        return None
    if kind == "nvtx":
        return int(report.trace.nvtx_ranges.select(pl.len()).collect().item())
    if kind == "kernels":
        return sum(document["kernels"][each] or 0 for each in ("n", "n_graph_launches"))
    table, column = {
        "gpu_faults": ("gpu_faults", "n_rows"),
        "cpu_faults": ("cpu_faults", "n"),
        "migrations": ("migrations", "n"),
        "allocations": ("managed", "n_allocations"),
    }[kind]
    found: int | None = document[table][column]
    return found


def _how_to_record(document: Mapping[str, Any]) -> list[Text]:
    missing = [kind for kind in CAPTURE_KINDS if document["capture"][kind] != "recorded"]
    if not missing:
        return []
    how, where = f"{RECORD}, or {RECORD_ALL}", ""
    if document["source_kind"] in NVPROF_KINDS:
        where = ", on a GPU that Nsight Systems supports"
    elif not all(document["switches"][kind] for kind in missing):
        where = ", on a platform where nsys can"
    slow = "Tracing page faults can slow a program by up to 70 %: compare times only of runs recorded alike."
    said = f"To record everything{where}: {how}. {slow}"
    return [Text(said, "note")]


def _health(checks: Iterable[Mapping[str, Any]]) -> list[Block]:
    """Show the checks that a reader must know of, and count those in order.

    What was not recorded stands in the table; that a trace is modelled, in the first lines.
    """
    judged = [each for each in checks if not _is_said(each["id"])]
    shown = [each for each in judged if each["status"] != "ok" or each["id"] == "platform"]
    n_ok = sum(each["status"] == "ok" for each in judged)
    if not judged:
        return []
    points = [Point(_STATUS[each["status"]], _plain(each["text"])) for each in shown]
    points.append(Point("In order:", f"{n_ok} of {counted(len(judged), 'check')}"))
    return [Points(tuple(points))]


def _is_said(check: str) -> bool:
    return check.endswith("_recorded") or check == "modelled"


def _plain(text: str) -> str:
    # A message of the profiler may hold a backtick that opens no code.
    return safe(text) if text.count("`") % 2 == 0 else safe(text.replace("`", "'"))
