"""The first answer: what moved between CPU and GPU, why, and what was recorded.

Of several reports (paths, a folder of ranks, nodes or nights, or a corpus of `nsan import`) one answer for all: what
they add up to, which ranks and runs stand out by UM time and why, which reports could not be read. A report that
fails does not stop the others; the exit status is 1 then. The newest report of a folder alone: name its file.

Figures are sums of recorded rows unless marked: busy times are unions of intervals, rates are bytes
over busy time (how fast copies ran while they ran, not what the link could carry). What was not
recorded says so, and how to record it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nsan.cli.arguments import (
    add_filters,
    add_memory,
    add_output,
    add_verbosity,
    documented,
    um_status,
)
from nsan.cli.fleet_arguments import add_fleet
from nsan.cli.output import write_document
from nsan.cli.terminal import painter
from nsan.health import NVPROF_KINDS
from nsan.info import MODEL_KIND, MODELLED
from nsan.reading import launched, reading
from nsan.tabular.text import Field, indented, name, table
from nsan.tabular.totals import MIGRATION_FIELDS, migration_rows, unanswered
from nsan.text import safe
from nsan.units import counted, format_bytes, format_count, format_time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "traces",
        metavar="TRACE",
        nargs="+",
        type=Path,
        help="nsys report or export, nsan store, folder of them, or corpus; several are one fleet",
    )
    add_verbosity(parser)
    add_memory(parser)
    add_fleet(parser)
    add_filters(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from nsan.cli.fleet_summary import refuse_fleet_options, run_fleet
    from nsan.fleet.finding import is_fleet

    if is_fleet(args.traces):
        return run_fleet(args, args.traces)
    refuse_fleet_options(args)
    args.trace = args.traces[0]
    document, manifest = documented(args)
    markdown = args.format == "markdown"
    write_document(
        args,
        document,
        lambda: summary_text(
            document,
            verbose=args.verbose,
            markdown=markdown,
            rows=args.rows,
            paint=painter(args.output),
        ),
    )
    return um_status(args, manifest)


def summary_text(
    document: Mapping[str, Any],
    *,
    verbose: bool = False,
    markdown: bool = False,
    rows: int | None = None,
    paint: Callable[[str], str] = str,
) -> str:
    """Write a summary document for people.

    Parameters
    ----------
    document : mapping
        :func:`nsan.contract.summary`.
    verbose : bool, default False
        Also the checks that are in order.
    markdown : bool, default False
        Markdown instead of plain text.
    rows : int, optional
        At most so many rows of a table.
    paint : callable
        Colours a status.

    Returns
    -------
    str
        Sections, the head first.
    """
    sections = [
        _head(document, markdown=markdown),
        _bullets(reading(document), markdown=markdown),
        _migrations(document, rows, markdown=markdown),
        _faults(document, markdown=markdown),
        _driver_events(document),
        health_text(document["health"], verbose=verbose, markdown=markdown, paint=paint),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _bullets(lines: list[str], *, markdown: bool) -> str:
    return "\n".join(f"- {line}" if markdown else f"  {line}" for line in lines)


def _head(document: Mapping[str, Any], *, markdown: bool) -> str:
    title = f"{'# ' * markdown}{name(document['source'], markdown=markdown)}"
    versions = [
        f"nsys {name(document['nsys_version'] or 'of unknown version', markdown=markdown)}",
        f"export schema {name(document['export_schema'] or 'unknown', markdown=markdown)}",
    ]
    if document["source_kind"] == MODEL_KIND:
        versions[0] = f"modelled: {MODELLED}"
    if document["source_kind"] in NVPROF_KINDS:
        versions = ["recorded by nvprof or the Visual Profiler"]
    if document["driver_version"]:
        versions.append(f"driver {name(document['driver_version'], markdown=markdown)}")
    lines = [
        ", ".join(versions),
        *gpu_lines(document["devices"], markdown=markdown),
        *_process_lines(document["processes"], markdown=markdown),
    ]
    lines += _ran(document)
    if document["windows_ns"] is not None:
        lines.append("filtered: rows that start in the window; busy time is clipped to it")
    return f"{title}\n" + ("\n" if markdown else "") + _bullets(lines, markdown=markdown)


def _ran(document: Mapping[str, Any]) -> list[str]:
    kernels, parts = document["kernels"], []
    if document["duration_ns"] is not None:
        parts.append(f"{format_time(document['duration_ns'])} from first start to last end")
    if any(check["id"] == "gpu_activity" for check in document["health"]):
        parts.append("no GPU activity recorded")
    elif kernels["n"] is not None:
        parts.append(launched(document) + _derived(", busy", kernels["busy_ns"]))
    return ["; ".join(parts)] if parts else []


def _derived(what: str, ns: int | None) -> str:
    return "" if ns is None else f"{what} {format_time(ns)} (derived)"


def gpu_lines(devices: list[Mapping[str, Any]], *, markdown: bool, limit: int = 8) -> list[str]:
    """Write one line per GPU."""
    lines = []
    for device in devices[:limit]:
        given = device["name"]
        called = name(given, markdown=markdown) if given else "not described in the export"
        memory = (
            f", {format_bytes(device['total_memory_bytes'])}"
            if device["total_memory_bytes"]
            else ""
        )
        process = (
            f" of process {device['pid']}" if device["pid"] is not None and len(devices) > 1 else ""
        )
        lines.append(f"GPU {device['device_id']}{process}: {called}{memory}")
    rest = len(devices) - limit
    return [*lines, f"and {rest} more GPUs"] if rest > 0 else lines


def _process_lines(
    processes: list[Mapping[str, Any]], *, markdown: bool, limit: int = 4
) -> list[str]:
    lines = [
        f"process {p['pid']}: {name(p['name'] or '(no name)', markdown=markdown)}"
        for p in processes[:limit]
    ]
    rest = len(processes) - limit
    return [*lines, f"and {rest} more processes"] if rest > 0 else lines


def _migrations(document: Mapping[str, Any], rows: int | None, *, markdown: bool) -> str:
    migrations = document["migrations"]
    title = "## Unified Memory migrations" if markdown else "Unified Memory migrations"
    if migrations["n"] is None:
        return f"{title}: {unanswered(document, 'migrations')}"
    timed = migrations["busy_ns"] is not None
    head = f"{title}: {format_count(migrations['n'])}, {format_bytes(migrations['bytes'])}"
    if timed:
        head += f", busy {format_time(migrations['busy_ns'])} (busy, share and rate: derived)"
    if not migrations["n"]:
        return f"{title}: none"
    groups = migration_rows(migrations["groups"])
    body = table(groups[:rows], _telling_fields(document), markdown=markdown)
    if rows is not None and rows < len(groups):
        body += f"\n\n({len(groups) - rows} more rows)"
    return f"{head}\n\n{body if markdown else indented(body)}"


def _telling_fields(document: Mapping[str, Any]) -> list[Field]:
    # One GPU and one process stand in the head: do not repeat them in each row.
    untimed = document["migrations"]["busy_ns"] is None
    dull = {
        "device_id": len(document["devices"]) == 1,
        "pid": len(document["processes"]) == 1,
        "busy_ns": untimed,
        "bytes_per_s": untimed,
    }
    return [field for field in MIGRATION_FIELDS if not dull.get(field.key)]


def _faults(document: Mapping[str, Any], *, markdown: bool) -> str:
    bold = "**" if markdown else ""
    gpu, cpu = document["gpu_faults"], document["cpu_faults"]
    if gpu["n_rows"] is None:
        gpu_text = unanswered(document, "gpu_faults")
    elif not gpu["n_rows"]:
        gpu_text = "none"
    else:
        gpu_text = (
            f"{counted(gpu['n_rows'], 'row')}, one per driver batch{_accesses(gpu['by_access'])}, on "
            f"{counted(gpu['n_addresses'], 'address', 'addresses')} in "
            f"{counted(gpu['n_va_blocks'], 'VA block')} (derived); recorded counts add up to "
            f"{format_count(gpu['n_page_faults'])}"
            + _derived("; raised or in service for", gpu["busy_ns"])
        )
    if cpu["n"] is None:
        cpu_text = unanswered(document, "cpu_faults")
    elif not cpu["n"]:
        cpu_text = "none"
    else:
        cpu_text = f"{format_count(cpu['n'])}, on {counted(cpu['n_addresses'], 'address', 'addresses')} (derived)"
    gap = "\n\n" if markdown else "\n"
    return f"{bold}GPU page faults:{bold} {gpu_text}{gap}{bold}CPU page faults:{bold} {cpu_text}"


def _accesses(by_access: Mapping[str, Mapping[str, Any]]) -> str:
    if set(by_access) == {"unknown"}:
        return ""
    counts = ", ".join(f"{access} {format_count(n['n_rows'])}" for access, n in by_access.items())
    return f" ({counts})"


def _driver_events(document: Mapping[str, Any]) -> str:
    """Write what the driver did against ping-pong, where a profiler recorded it."""
    events = document["driver_events"]
    if not events:
        return ""
    said = ", ".join(f"{format_count(n)} {kind.replace('_', ' ')}" for kind, n in events.items())
    return f"Driver against ping-pong: {said} rows"


def _said(check: Mapping[str, Any]) -> bool:
    # What was not recorded stands where its figures would.
    return str(check["id"]).endswith("_recorded")


def health_text(
    health: list[Mapping[str, Any]],
    *,
    verbose: bool,
    markdown: bool,
    paint: Callable[[str], str],
) -> str:
    """Write what a reader should know before trusting the figures."""
    shown = [check for check in health if verbose or (check["status"] != "ok" and not _said(check))]
    shown += [check for check in health if check["id"] == "platform" and check not in shown]
    judged = [check for check in health if verbose or not _said(check)]
    n_ok = sum(check["status"] == "ok" for check in judged)
    head = f"Health: {n_ok} of {len(judged)} checks in order"
    lines = [
        f"- **{check['status']}** {name(check['text'], markdown=True)}"
        if markdown
        else f"  {paint(check['status'])}{' ' * (8 - len(check['status']))}{safe(check['text'])}"
        for check in shown
    ]
    return "\n".join([f"## {head}\n" if markdown else head, *lines])
