"""A fleet for people: what it is, what its reports add up to, which ranks and runs stand out and why, what failed.

Made from the JSON document alone, so that terminal, Markdown and report say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from nsan.fleet.outliers import ALIKE, is_alike
from nsan.fleet.standing import standing_lines
from nsan.fleet.tables import (
    RANK_FIELDS,
    RUN_FIELDS,
    TRAFFIC_FIELDS,
    has_large_runs,
    rank_tables,
    run_rows,
    telling_fields,
    traffic_rows,
)
from nsan.tabular.text import Field, Row, indented, name, table
from nsan.text import safe, shortened
from nsan.units import counted, format_bytes, format_count, format_time

MOST_RANKS: Final = 8
"""Rows of a run's table unless more are asked for."""

MOST_RUNS: Final = 20
MOST_TABLES: Final = 6
"""Runs whose ranks are listed."""

_MOST_WORDS: Final = 12
_MOST_NAMES: Final = 3
_LONGEST: Final = 40

_SWITCHED: Final = {"gpu_faults": "GPU page faults", "cpu_faults": "CPU page faults"}


def fleet_text(
    document: Mapping[str, Any], *, markdown: bool = False, rows: int | None = None
) -> str:
    """Write a fleet for people.

    Parameters
    ----------
    document : mapping
        Of :func:`nsan.fleet.document.fleet_document`.
    markdown : bool, default False
        Markdown instead of plain text.
    rows : int, optional
        At most so many rows of a table, and lines of a list.

    Returns
    -------
    str
        Sections, the head first.
    """
    parts = [
        _lines(title(document), head_lines(document), markdown=markdown, level=1),
        _table(
            "Migrations",
            traffic_rows(document),
            TRAFFIC_FIELDS,
            _limits(rows, None, markdown=markdown),
        ),
        _section("What stands out", outlier_lines(document), rows, markdown=markdown),
        _section("Who takes longest", straggler_lines(document), rows, markdown=markdown),
    ]
    if has_large_runs(document):
        runs = run_rows(document)
        limits = _limits(rows, MOST_RUNS, markdown=markdown)
        parts.append(_table("Runs", runs, telling_fields(RUN_FIELDS, runs), limits))
    parts += [*_tables_of_runs(document, rows, markdown=markdown)]
    parts.append(_section("Failed", failure_lines(document), rows, markdown=markdown))
    parts.append(_way_on(document))
    return "\n\n".join(part for part in parts if part) + "\n"


# What the fleet is ----------------------------------------------------------------------------------


def title(document: Mapping[str, Any]) -> str:
    """Say in a line what is summarised.

    Parameters
    ----------
    document : mapping
        The fleet.

    Returns
    -------
    str
        Name, reports, runs, and how many failed.
    """
    reports = f"{counted(document['n_reports'], 'report')} of {counted(document['n_runs'], 'run')}"
    failed = f", {counted(document['n_failed'], 'more report')} failed" * bool(document["n_failed"])
    called = shortened(document["name"], 60)
    return f"{called}: {reports}{failed}" if called else f"{reports}{failed}"


def head_lines(document: Mapping[str, Any]) -> list[str]:
    """Say what the fleet ran on, what it recorded, and what its reports add up to.

    Parameters
    ----------
    document : mapping
        The fleet.

    Returns
    -------
    list of str
        Sentences.
    """
    if not document["n_reports"]:
        return ["No report could be read."]
    lines = [
        f"{label}: {few}"
        for label, few in (
            ("programs", _names(document["programs"])),
            ("GPUs", _names(document["gpus"])),
        )
        if few
    ]
    if document["n_modelled"]:
        lines.append(
            f"{counted(document['n_modelled'], 'report')} modelled: written by nsan's UVM driver model, not recorded"
        )
    return [*lines, *_times_said(document), *_moved_said(document), *_recorded_said(document)]


def _names(tally: Iterable[Mapping[str, Any]]) -> str:
    found = [row for row in tally if row["name"] is not None]
    if not found:
        return ""
    single = len(found) == 1
    shown = [
        shortened(row["name"], _LONGEST) + f" ({format_count(row['n_reports'])})" * (not single)
        for row in found[:_MOST_NAMES]
    ]
    rest = len(found) - len(shown)
    return ", ".join(shown) + f" and {format_count(rest)} more" * bool(rest)


def totals_of(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Give the totals of a fleet by figure."""
    return {row["figure"]: row for row in document["totals"]}


def _times_said(document: Mapping[str, Any]) -> Iterator[str]:
    totals = totals_of(document)
    took = totals["duration_ns"]
    if took["n_known"]:
        yield (
            f"a report spans {_range(took, format_time)} from first start to last end (derived)"
            f"{_of_known(took)}"
        )
    for figure, what in (
        ("migrations_busy_ns", "migrations in flight"),
        ("gpu_faults_busy_ns", "GPU faults in service"),
    ):
        row = totals[figure]
        if row["known_sum"]:
            yield (
                f"{what}: {format_time(row['known_sum'])} added up over reports, {_range(row, format_time)} each "
                f"(derived){_of_known(row)}"
            )


def _range(row: Mapping[str, Any], write: Callable[[Any], str]) -> str:
    if row["min"] == row["max"]:
        return write(row["min"])
    return f"{write(row['min'])} to {write(row['max'])}, median {write(row['median'])}"


def _of_known(row: Mapping[str, Any]) -> str:
    lacking = row["n_reports"] - row["n_known"]
    return f"; not known of {counted(lacking, 'report')}" if lacking else ""


def _moved_said(document: Mapping[str, Any]) -> Iterator[str]:
    totals = totals_of(document)
    n, moved = totals["n_migrations"], totals["bytes"]
    if moved["n_known"]:
        yield (
            f"migrations: {format_count(n['known_sum'])}, {format_bytes(moved['known_sum'])}{_of_known(moved)}"
        )
    for figure, one in (("n_fault_rows", "GPU fault rows"), ("n_cpu_faults", "CPU page faults")):
        row = totals[figure]
        if row["n_known"]:
            yield f"{one}: {format_count(row['known_sum'])}{_of_known(row)}"


def _recorded_said(document: Mapping[str, Any]) -> Iterator[str]:
    """Say what was not recorded, and how to record it."""
    for kind, what in _SWITCHED.items():
        answers = document["capture"][kind]
        lacking = answers["not_recorded"] + answers["unknown"]
        if not lacking:
            continue
        everywhere = lacking == document["n_reports"]
        of = "in any report" if everywhere else f"in {counted(lacking, 'report')}"
        known = "not recorded" if not answers["unknown"] else "not known to be recorded"
        switch = document["switches"][kind]
        again = f": `nsys profile {switch} ...`" if switch else ""
        yield f"{what}: {known} {of}{again}"


# Sentences ------------------------------------------------------------------------------------------


def outlier_lines(document: Mapping[str, Any]) -> list[str]:
    """Say what stands out, and what was not judged.

    Parameters
    ----------
    document : mapping
        The fleet.

    Returns
    -------
    list of str
        Sentences.
    """
    return [*standing_lines(document), *document["notes"]]


def straggler_lines(document: Mapping[str, Any]) -> list[str]:
    """Say who takes longest in each run: the runs where that is most first."""
    found = sorted(
        document["stragglers"],
        key=lambda row: (not row["is_outlier"], -(row["excess_ns"] or 0)),
    )
    if len(document["runs"]) == 1:
        return [row["text"] for row in found]
    apart = [row for row in found if not is_alike(row)]
    lines = [
        f"run {shortened(row['run'], _LONGEST) or '(no name)'}: {row['text']}" for row in apart
    ]
    if alike := [row for row in found if is_alike(row)]:
        why = f", {ALIKE}" if any(row["um_max_ns"] for row in alike) else ""
        runs = counted(len(alike), "run")
        lines.append(f"{runs} in which all took about as long as each other{why}.")
    return lines


def failure_lines(document: Mapping[str, Any]) -> list[str]:
    """Name the reports that could not be read, each with its reason."""
    return [f"{safe(row['source'])}: {safe(row['reason'])}" for row in document["failures"]]


def _way_on(document: Mapping[str, Any]) -> str:
    if not document["n_reports"]:
        return ""
    return "One report alone, also the newest of a folder: `nsan summary FILE`. All of them as a page: `nsan report`."


def _tables_of_runs(
    document: Mapping[str, Any], rows: int | None, *, markdown: bool
) -> Iterator[str]:
    tables = rank_tables(document)
    for head, ranks in tables[:MOST_TABLES]:
        fields = telling_fields(RANK_FIELDS, ranks)
        yield _table(head, ranks, fields, _limits(rows, MOST_RANKS, markdown=markdown))
    rest = len(tables) - MOST_TABLES
    if rest > 0:
        yield f"and {counted(rest, 'more run')}: `--format csv` has a row for each report."


# Layout ---------------------------------------------------------------------------------------------


def _limits(rows: int | None, usual: int | None, *, markdown: bool) -> tuple[int | None, bool]:
    return (usual if rows is None else rows), markdown


def _heading(text: str, *, markdown: bool, level: int = 2) -> str:
    return f"{'#' * level} {name(text, markdown=True)}" if markdown else text


def _lines(head: str, lines: Sequence[str], *, markdown: bool, level: int = 2) -> str:
    body = "\n".join(f"- {_marked(line)}" if markdown else f"  {safe(line)}" for line in lines)
    return f"{_heading(head, markdown=markdown, level=level)}\n{chr(10) * markdown}{body}".rstrip()


def _marked(line: str) -> str:
    """Write a line in Markdown; what stands between backticks stays code."""
    parts = line.split("`")
    if len(parts) % 2 == 0:
        return name(line, markdown=True)
    parts[::2] = [name(part, markdown=True) for part in parts[::2]]
    return "`".join(parts)


def _section(head: str, lines: Sequence[str], rows: int | None, *, markdown: bool) -> str:
    if not lines:
        return ""
    most = _MOST_WORDS if rows is None else rows
    shown = list(lines[:most])
    if len(lines) > most:
        shown.append(f"and {format_count(len(lines) - most)} more: `--rows {len(lines)}`")
    return _lines(head, shown, markdown=markdown)


def _table(
    head: str, rows: Sequence[Row], fields: Sequence[Field], limits: tuple[int | None, bool]
) -> str:
    if not rows:
        return ""
    most, markdown = limits
    shown = rows[:most]
    body = table(shown, fields, markdown=markdown)
    if len(shown) < len(rows):
        body += f"\n\n({counted(len(rows) - len(shown), 'more row')}: `--rows {len(rows)}`)"
    return f"{_heading(head, markdown=markdown)}\n\n{body if markdown else indented(body)}"
