"""The tables of a fleet: migrations of all reports, runs, ranks of a run; rows from the JSON document alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from nsan.tabular.text import Field, Row, dash
from nsan.tabular.totals import share
from nsan.text import cause_word, direction_word, safe, shortened
from nsan.units import NS_PER_S, counted, format_bytes, format_count, format_time

_LONGEST: Final = 40

TRAFFIC_FIELDS: Final = (
    Field("direction", "Direction", lambda value: direction_word(dash(value)), right=False),
    Field("cause", "Cause", lambda value: cause_word(dash(value)), right=False),
    Field("n_reports", "Reports", format_count),
    Field("n", "Count", format_count),
    Field("bytes", "Total", format_bytes),
    Field("share", "Share", share),
    Field("busy_ns", "Busy, added up", format_time),
)

RUN_FIELDS: Final = (
    Field("run", "Run", lambda value: shortened(value, _LONGEST) or "(no name)", right=False),
    Field("started", "Started (UTC)", dash, right=False),
    Field("n_reports", "Reports", format_count),
    Field("n_failed", "Failed", format_count),
    Field("n_outliers", "Stand out", format_count),
    Field("duration_ns", "Duration, median", format_time),
    Field("um_median_ns", "UM time (at least), median", format_time),
    Field("um_max_ns", "largest", format_time),
    Field("um_sum_ns", "added up", format_time),
    Field("bytes", "Moved", format_bytes),
    Field("eviction_bytes", "Evicted", format_bytes),
)

RANK_FIELDS: Final = (
    Field("rank", "Rank", dash),
    Field("source", "Report", lambda value: shortened(value, 48), right=False),
    Field("duration_ns", "Duration", format_time),
    Field("migrations_busy_ns", "Migrating", format_time),
    Field("gpu_faults_busy_ns", "Faults in service", format_time),
    Field("htod_bytes", "To GPU", format_bytes),
    Field("dtoh_bytes", "To CPU", format_bytes),
    Field("eviction_bytes", "Evicted", format_bytes),
    Field("n_fault_rows", "Fault rows", format_count),
    Field("mark", "", safe, right=False),
)


def traffic_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Give migrations by direction and cause, with the share of all bytes."""
    rows = [dict(row) for row in document["migrations"]]
    sizes = [row["bytes"] for row in rows]
    whole = None if None in sizes else sum(sizes)
    return [row | {"share": row["bytes"] / whole if whole else None} for row in rows]


def run_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Give the runs, in the order of their start where all have one; medians are of what is known."""
    found = []
    for run in in_time(document["runs"]):
        of = {figure: run["figures"].get(figure) or {} for figure in _OF_RUN}
        found.append(
            {
                **{key: run[key] for key in ("run", "n_reports", "n_failed", "n_outliers")},
                "started": None if run["started_utc_ns"] is None else utc(run["started_utc_ns"]),
                "duration_ns": of["duration_ns"].get("median"),
                "um_median_ns": of["um_at_least_ns"].get("median"),
                "um_max_ns": of["um_at_least_ns"].get("max"),
                "um_sum_ns": of["um_at_least_ns"].get("sum"),
                "bytes": of["bytes"].get("sum"),
                "eviction_bytes": of["eviction_bytes"].get("sum"),
            }
        )
    return found


_OF_RUN: Final = ("duration_ns", "um_at_least_ns", "bytes", "eviction_bytes")


def in_time(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Order runs by when they began, if that is known of each; else as they come."""
    if any(run["started_utc_ns"] is None for run in runs):
        return list(runs)
    return sorted(runs, key=lambda run: run["started_utc_ns"])


def utc(ns: int) -> str:
    """Write a time of day, to the second.

    Examples
    --------
    >>> utc(1_755_488_485_007_621_229)
    '2025-08-18 03:41:25'
    """
    try:
        return f"{datetime.fromtimestamp(ns // NS_PER_S, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return "unknown"


def rank_rows(document: Mapping[str, Any], run: str) -> list[dict[str, Any]]:
    """Give the reports of a run, worst first: those that stand out, then by UM time.

    Parameters
    ----------
    document : mapping
        The fleet.
    run : str
        Name of the run.

    Returns
    -------
    list of dict
        Rows of reports, with ``mark`` beside those that stand out.
    """
    out = {
        (each["rank"], each["source"]): (place, each)
        for place, each in enumerate(document["outliers"])
        if each["scope"] == "rank" and each["run"] == run
    }
    rows = [dict(row) for row in document["reports"] if row["run"] == run]
    for row in rows:
        found = out.get((row["rank"], row["source"]))
        row["mark"] = "" if found is None else f"stands out: {found[1]['side']}"
        row["_place"] = len(document["outliers"]) if found is None else found[0]

    def worst(row: Row) -> tuple[Any, ...]:
        um = row["um_at_least_ns"]
        return (row["_place"], um is None, -(um or 0), row["rank"] is None, row["rank"] or 0)

    return sorted(rows, key=worst)


def worst_runs(document: Mapping[str, Any]) -> list[str]:
    """Name the runs that have reports: those with ranks that stand out first, then by their largest UM time."""

    def worst(run: Mapping[str, Any]) -> tuple[int, int]:
        um = (run["figures"].get("um_at_least_ns") or {}).get("max")
        return (-run["n_outliers"], -(um or 0))

    return [run["run"] for run in sorted(document["runs"], key=worst) if run["n_reports"]]


def rank_tables(document: Mapping[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Give the reports in tables, worst first: one for each run; runs of one report have one together.

    Parameters
    ----------
    document : mapping
        The fleet.

    Returns
    -------
    list of (str, list of dict)
        Heading and rows, the worst runs first.
    """
    runs = worst_runs(document)
    sizes = {run["run"]: run["n_reports"] for run in document["runs"]}
    single = [run for run in runs if sizes[run] == 1]
    found = []
    for run in runs:
        if sizes[run] > 1 or len(runs) == 1:
            rows = rank_rows(document, run)
            called = f"Run {shortened(run, _LONGEST)}" if run else "Reports"
            head = f"{called}: {counted(len(rows), 'report')}" + ", worst first" * (len(rows) > 1)
            found.append((head, rows))
    if single and len(runs) > 1:
        rows = [row for run in single for row in rank_rows(document, run)]
        found.append((f"{counted(len(rows), 'run')} of one report each, worst first", rows))
    return found


def has_large_runs(document: Mapping[str, Any]) -> bool:
    """Say whether a table of runs says more than one of reports: one of several runs has several reports."""
    return document["n_runs"] > 1 and any(run["n_reports"] > 1 for run in document["runs"])


def telling_fields(fields: Iterable[Field], rows: Sequence[Row]) -> list[Field]:
    """Leave out columns that say nothing of any row: what nobody recorded, ranks that nobody named, empty marks."""
    found = [field for field in fields if any(row[field.key] not in (None, "") for row in rows)]
    # The rank says which report it is.
    ranks = [row["rank"] for row in rows if "rank" in row]
    if ranks and None not in ranks and len(set(ranks)) == len(ranks):
        found = [field for field in found if field.key != "source"]
    return found
