"""The first answer: what moved between CPU and GPU, why, and what was recorded.

Figures are sums of recorded rows unless marked: busy times are unions of intervals, rates are bytes
over busy time (how fast copies ran while they ran, not what the link could carry). What was not
recorded says so, and how to record it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from nsan.cli.arguments import (
    add_filters,
    add_input,
    add_output,
    documented,
    um_status,
)
from nsan.cli.output import write_document
from nsan.cli.render import Field, coloured, indented, name, safe, table
from nsan.cli.tables import MIGRATION_FIELDS, migration_rows, unanswered
from nsan.units import counted, format_bytes, format_count, format_time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    add_input(parser)
    add_filters(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    document, totals = documented(args)
    write_document(args, document, lambda: _text(document, args))
    return um_status(args, totals)


def _text(document: Mapping[str, Any], args: argparse.Namespace) -> str:
    from nsan.reading import reading

    markdown = args.format == "markdown"
    sections = [
        _head(document, markdown=markdown),
        _bullets(reading(document), markdown=markdown),
        _migrations(document, args.rows, markdown=markdown),
        _faults(document, markdown=markdown),
        health_text(document["health"], verbose=args.verbose, markdown=markdown),
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
    if document["driver_version"]:
        versions.append(f"driver {name(document['driver_version'], markdown=markdown)}")
    lines = [
        ", ".join(versions),
        *gpu_lines(document["devices"], markdown=markdown),
        *_process_lines(document["processes"], markdown=markdown),
    ]
    kernels = document["kernels"]
    ran = f"{format_time(document['duration_ns'])} from first start to last end"
    if kernels["n"] is not None:
        ran += f"; {counted(kernels['n'], 'kernel')}"
        if kernels["n_graph_launches"]:
            ran += f" and {counted(kernels['n_graph_launches'], 'graph launch', 'graph launches')}"
        ran += f", busy {format_time(kernels['busy_ns'])}"
    lines.append(ran)
    if document["windows_ns"] is not None:
        lines.append("filtered: rows that start in the window; busy time is clipped to it")
    return f"{title}\n" + ("\n" if markdown else "") + _bullets(lines, markdown=markdown)


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
    head = (
        f"{title}: {format_count(migrations['n'])}, {format_bytes(migrations['bytes'])}, "
        f"busy {format_time(migrations['busy_ns'])} (derived)"
    )
    if not migrations["n"]:
        return f"{title}: none"
    shown = migration_rows(migrations["groups"])[:rows]
    body = table(shown, _telling_fields(document), markdown=markdown)
    return f"{head}\n\n{body if markdown else indented(body)}"


def _telling_fields(document: Mapping[str, Any]) -> list[Field]:
    # One GPU and one process stand in the head: do not repeat them in each row.
    single = {
        "device_id": len(document["devices"]) == 1,
        "pid": len(document["processes"]) == 1,
    }
    return [field for field in MIGRATION_FIELDS if not single.get(field.key)]


def _faults(document: Mapping[str, Any], *, markdown: bool) -> str:
    bold = "**" if markdown else ""
    gpu, cpu = document["gpu_faults"], document["cpu_faults"]
    if gpu["n_rows"] is None:
        gpu_text = unanswered(document, "gpu_faults")
    elif not gpu["n_rows"]:
        gpu_text = "none"
    else:
        by_access = ", ".join(
            f"{k} {format_count(v['n_rows'])}" for k, v in gpu["by_access"].items()
        )
        gpu_text = (
            f"{format_count(gpu['n_rows'])} rows, one per driver batch ({by_access}), on "
            f"{format_count(gpu['n_addresses'])} addresses in {format_count(gpu['n_va_blocks'])} VA "
            f"blocks; recorded counts add up to {format_count(gpu['n_page_faults'])}; "
            f"raised or in service for {format_time(gpu['busy_ns'])} (derived)"
        )
    if cpu["n"] is None:
        cpu_text = unanswered(document, "cpu_faults")
    elif not cpu["n"]:
        cpu_text = "none"
    else:
        cpu_text = f"{format_count(cpu['n'])}, on {format_count(cpu['n_addresses'])} addresses"
    gap = "\n\n" if markdown else "\n"
    return f"{bold}GPU page faults:{bold} {gpu_text}{gap}{bold}CPU page faults:{bold} {cpu_text}"


def _said(check: Mapping[str, Any]) -> bool:
    # What was not recorded stands where its figures would.
    return str(check["id"]).endswith("_recorded")


def health_text(health: list[Mapping[str, Any]], *, verbose: bool, markdown: bool) -> str:
    """Write what a reader should know before trusting the figures."""
    shown = [check for check in health if verbose or (check["status"] != "ok" and not _said(check))]
    shown += [check for check in health if check["id"] == "platform" and check not in shown]
    judged = [check for check in health if verbose or not _said(check)]
    n_ok = sum(check["status"] == "ok" for check in judged)
    head = f"Health: {n_ok} of {len(judged)} checks in order"
    lines = [
        f"- **{check['status']}** {name(check['text'], markdown=True)}"
        if markdown
        else f"  {coloured(check['status'])}{' ' * (8 - len(check['status']))}{safe(check['text'])}"
        for check in shown
    ]
    return "\n".join([f"## {head}\n" if markdown else head, *lines])
