"""Section "provenance" of a report: versions, how it was made, assumptions, and what each section stands on."""

from __future__ import annotations

import datetime as dt
import platform
import shlex
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from nsan.analysis.result import KINDS
from nsan.health import NVPROF_KINDS
from nsan.info import MODEL_KIND
from nsan.report.blocks import Block, Heading, Point, Points, Table, quoted
from nsan.report.sections.head import profiler_in_words, several
from nsan.report.sections.truth import compared
from nsan.report.shown import Blocks
from nsan.text import safe
from nsan.units import NS_PER_S, format_bytes
from nsan.uvm.constants import FAULT_BATCH_SIZE, PAGE_BYTES, VA_BLOCK_BYTES

if TYPE_CHECKING:
    from nsan.report.report import Report

_LONGEST_COMMAND: Final = 300
_ELSEWHERE: Final = "FOLDER"

_MEANINGS: Final = {
    "recorded": "rows of the trace as they are, and sums of them.",
    "derived": "exact arithmetic on rows: unions of intervals, joins, shares and rates.",
    "reconstructed": "an inference with self-checks, such as batches that are put together from copies.",
    "modelled": "written by nsan's model of the driver: no GPU did it.",
}

_OPTIONS: Final = {
    "time": "--filter-time",
    "nvtx": "--filter-nvtx",
    "device": "--gpu",
    "pid": "--pid",
}
"""Filters as options of the command line."""

_DEFAULT_ROWS: Final = 10


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    blocks: list[Block] = [Points(tuple(_origin(report)))]
    blocks += [Heading("What is assumed"), Points(tuple(_assumptions(report)))]
    blocks += [Heading("What kinds of number there are"), Points(tuple(_kinds()))]
    if standing := _standing(report):
        blocks.append(standing)
    return Blocks(blocks) + compared(report)


def _origin(report: Report) -> Iterator[Point]:
    document = report.summary
    yield Point("Made by:", f"nsan {document['nsan_version']}, {', '.join(_libraries())}")
    place = f", where `{_ELSEWHERE}` is that of the snapshot" * report.is_snapshot_elsewhere
    command = quoted(command_of(report), _LONGEST_COMMAND)
    yield Point("Command:", f"{command}, in the folder of the trace{place}")
    schema = document["export_schema"]
    exported = f", export schema {safe(schema)}" if schema else ""
    yield Point("Trace:", f"{quoted(document['source'])}, {profiler_in_words(document)}{exported}")
    if began := session_start(document):
        yield Point("Session:", f"began {began}")


def _libraries() -> Iterator[str]:
    yield f"Python {platform.python_version()}"
    for name in ("polars", "altair"):
        yield f"{name} {version(name)}"


def command_of(report: Report) -> str:
    """Write the command that makes this report, with names but without folders.

    Parameters
    ----------
    report : Report
        The report.

    Returns
    -------
    str
        As for a shell; ``FOLDER`` stands for that of a snapshot which does not lie beside the trace.
    """
    words = ["nsan", "report", report.path.name or report.trace.info.source]
    for key, option in _OPTIONS.items():
        for value in several(report.filters.get(key, ())):
            # An option's value that begins with a dash needs the equals sign.
            words += [f"{option}={value}"] if str(value).startswith("-") else [option, str(value)]
    if report.snapshot_name:
        folder = f"{_ELSEWHERE}/" * report.is_snapshot_elsewhere
        words += ["--snapshot", folder + report.snapshot_name]
    if report.rows != _DEFAULT_ROWS:
        words += ["--rows", str(report.rows)]
    if report.theme != "light":
        words += ["--theme", report.theme]
    return shlex.join(words)


def session_start(document: Mapping[str, Any]) -> str:
    """Write when the recording began.

    Parameters
    ----------
    document : mapping
        :func:`nsan.contract.summary`.

    Returns
    -------
    str
        Date and time in UTC; empty where that is not known, and for what no clock ever timed.
    """
    ns = document["session_start_utc_ns"]
    if not ns or document["source_kind"] == MODEL_KIND:
        return ""
    try:
        began = dt.datetime.fromtimestamp(ns // NS_PER_S, dt.UTC)
    except (OverflowError, ValueError, OSError):  # no date of any calendar
        return ""
    return f"{began:%Y-%m-%d %H:%M:%S} UTC"


def _assumptions(report: Report) -> Iterator[Point]:
    page, block = format_bytes(PAGE_BYTES), format_bytes(VA_BLOCK_BYTES)
    yield Point(
        "Sizes:",
        f"a page is {page}, a VA block is {block}: the driver's on x86-64. It serves and evicts by VA block.",
    )
    yield Point(
        "Batch:",
        "what the driver serves at once. A GPU fault row is one batch, named by its lowest page: the number of "
        f"rows is not the number of faults. A batch holds at most {FAULT_BATCH_SIZE} entries by default.",
    )
    yield Point(
        "Waits:",
        "a fault waits from being raised to being replayed; other warps may go on meanwhile, so a kernel's "
        "exposed time is the most that it can have stalled.",
    )
    yield Point(
        "Times:",
        "count from the start of the session, or from what the profiler printed; they have no time of day. Copies "
        "take time only while they run: a rate is bytes over busy time.",
    )
    if report.summary["source_kind"] in NVPROF_KINDS:
        return
    yield Point(
        "Not seen:",
        "hits, which warp faulted, reads of memory that stays remote, and what the driver did against ping-pong: "
        "nsys has no row for them.",
    )


def _kinds() -> Iterator[Point]:
    for kind in KINDS:
        yield Point(f"{kind.capitalize()}:", _MEANINGS[kind])


def _standing(report: Report) -> Table | None:
    """Show what ran for each section, from what the report itself noted."""
    from nsan.report.contents import SECTIONS

    rows = []
    for name, section in SECTIONS.items():
        by_kind: dict[str, list[str]] = {}
        for analysis, kind in report.used.get(name, {}).items():
            by_kind.setdefault(kind, []).append(analysis)
        rows += [
            (section.title, kind, ", ".join(sorted(by_kind[kind])))
            for kind in KINDS
            if kind in by_kind
        ]
    if not rows:
        return None
    return Table(
        ("Section", "Least certain kind", "Analyses"),
        tuple(_once(rows)),
        (False, False, False),
        "What each section stands on",
        (
            "`nsan analyse NAME TRACE` runs one of them; `nsan analyse --list` has the question of each.",
        ),
    )


def _once(rows: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Name each section once."""
    before = ""
    for title, kind, analyses in rows:
        yield ("" if title == before else title, kind, analyses)
        before = title
