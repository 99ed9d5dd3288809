"""Can this capture be trusted, and for what? Figures and metadata, put into words.

Standard library only, like the rest of the warm path. The figures come from
:mod:`nsan.analysis.health`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from nsan.info import MODEL_KIND, MODELLED, NEWEST_SCHEMA, parse_version
from nsan.units import format_bytes, format_count, format_time

Status = Literal["ok", "warn", "fail", "unknown"]

_COHERENT: Final = re.compile(r"\b(GH200|GB200|GB300|GB10)\b")
_TELLING: Final = re.compile(
    r"(?i)unified|uvm|page.?fault|lost|drop|overflow|buffer|out of memory|CUPTI"
)
_MOST_MESSAGES: Final = 5
NVPROF_KINDS: Final = ("nvprof-sqlite", "visual-profiler", "nvprof-text")
"""Captures of the profilers before Nsight Systems, by kind."""

_NAMES: Final = {
    "gpu_faults": "GPU page faults",
    "cpu_faults": "CPU page faults",
    "migrations": "migrations",
    "kernels": "kernels",
}


@dataclass(frozen=True)
class Check:
    """One finding: a stable id, how bad it is, and a sentence."""

    id: str
    status: Status
    text: str


def checks(info: Mapping[str, Any], totals: Mapping[str, Any]) -> list[Check]:
    """Judge a capture.

    Parameters
    ----------
    info : mapping
        :meth:`nsan.info.TraceInfo.to_dict`.
    totals : mapping
        :func:`nsan.totals.totals`.

    Returns
    -------
    list of Check
        Worst first; each id at most once.
    """
    found = [
        *_schema(info),
        *_source(info),
        *_readable(info),
        *_recorded(info),
        *_gpus(info),
        *_activity(info, totals),
        *_platform(info, totals),
        *_migrations(info, totals),
        *_lost_rows(info, totals),
        *_times(info),
        *_fault_rows(info, totals),
        *_diagnostics(info, totals),
    ]
    order: dict[Status, int] = {"fail": 0, "warn": 1, "unknown": 2, "ok": 3}
    return sorted(found, key=lambda check: order[check.status])


def is_coherent(totals: Mapping[str, Any]) -> str | None:
    """Name the GPU if CPU and GPU share memory coherently on this platform."""
    names = [device["name"] or "" for device in totals["devices"]]
    return next((name for name in names if _COHERENT.search(name)), None)


def _schema(info: Mapping[str, Any]) -> Iterator[Check]:
    if info["kind"] in NVPROF_KINDS:
        return
    text, version = info["export_schema"], parse_version(info["export_schema"])
    if version is None:
        yield Check(
            "schema",
            "unknown",
            "The export does not name its schema version; tables were taken as found.",
        )
    elif version > NEWEST_SCHEMA:
        newest = ".".join(map(str, NEWEST_SCHEMA))
        yield Check(
            "schema",
            "warn",
            f"Export schema {text} is newer than {newest}, the newest that nsan was checked with: "
            "columns that it knows were read, new ones were not.",
        )
    else:
        yield Check("schema", "ok", f"Export schema {text} is known.")


def _readable(info: Mapping[str, Any]) -> Iterator[Check]:
    absent = [
        f"{table}.{column}"
        for table, columns in info["absent_columns"].items()
        for column in columns
    ]
    if absent:
        yield Check(
            "columns",
            "fail",
            f"Columns are missing in the export: {', '.join(absent)}. Figures that need them are unknown.",
        )
    losses = {table: dict(columns) for table, columns in info["losses"].items()}
    reversed_rows = sum(columns.pop("end before start", 0) for columns in losses.values())
    lost = [
        f"{table}.{column} ({format_count(n)})"
        for table, columns in losses.items()
        for column, n in columns.items()
    ]
    if lost:
        yield Check(
            "cells",
            "fail",
            f"Cells are empty, out of range or of the wrong type: {', '.join(lost)}. "
            "Totals that need them are unknown.",
        )
    if not absent and not lost:
        yield Check("cells", "ok", "Every value that nsan needs could be read.")
    if reversed_rows:
        yield Check(
            "durations",
            "warn",
            f"{format_count(reversed_rows)} rows end before they start; they count with no length.",
        )


def _source(info: Mapping[str, Any]) -> Iterator[Check]:
    if info["kind"] == MODEL_KIND:
        yield Check("modelled", "ok", f"The capture was {MODELLED}: every figure is the model's.")
    if info["warnings"]:
        yield Check("source", "warn", " ".join(info["warnings"]))


def _recorded(info: Mapping[str, Any]) -> Iterator[Check]:
    for kind, name in _NAMES.items():
        capture = info["capture"][kind]
        what, reason, switch = name[0].upper() + name[1:], capture["reason"], capture["switch"]
        again = f" Profile again with `nsys profile {switch} ...`." if switch else ""
        if capture["answer"] == "not_recorded":
            yield Check(f"{kind}_recorded", "warn", f"{what} were not recorded: {reason}.{again}")
        elif capture["answer"] == "unknown":
            text = f"Whether {name} were recorded is unknown: {reason}.{again}"
            yield Check(f"{kind}_recorded", "unknown", text)
        else:
            yield Check(f"{kind}_recorded", "ok", f"{what} were recorded: {reason}.")


def _gpus(info: Mapping[str, Any]) -> Iterator[Check]:
    shared = ", ".join(map(str, info["shared_ordinals"]))
    if shared:
        yield Check(
            "gpus",
            "warn",
            f"Several processes use GPU {shared}, and the export does not say whether that is one GPU "
            "or a different one in each: busy times take it for one.",
        )


def _activity(info: Mapping[str, Any], totals: Mapping[str, Any]) -> Iterator[Check]:
    counts = totals["counts"]
    if "span" in info["doubtful"]:
        return  # rows are there that could not be told apart
    if any(counts[name] for name in ("kernels", "copies", "memsets", "migrations", "gpu_faults")):
        return
    if counts["api_calls"]:
        why = "CUDA was called, but no kernel or copy ran before the profiler stopped"
    else:
        why = "the program, or the part of it that was profiled, did not use CUDA"
    yield Check(
        "gpu_activity",
        "warn",
        f"No GPU activity was recorded: {why}. If it should have, check that the process that uses "
        "the GPU is profiled (child processes, ranks) and ends normally.",
    )


def _platform(info: Mapping[str, Any], totals: Mapping[str, Any]) -> Iterator[Check]:
    managed = totals["managed"]["n_managed_allocations"] or totals["managed"]["n_managed_calls"]
    moved = (
        totals["counts"]["migrations"]
        + totals["counts"]["gpu_faults"]
        + totals["counts"]["cpu_faults"]
    )
    coherent = is_coherent(totals)
    if coherent:
        yield Check(
            "platform",
            "ok",
            f"{coherent} is a coherent platform: CPU and GPU read each other's memory without "
            "faults, and pages move on access counters. Few or no faults and migrations are "
            "normal here, and do not mean that data is local.",
        )
    elif info["platform"] == "wsl":
        yield Check(
            "platform",
            "ok",
            "The capture is from WSL, where managed memory moves whole at launches and never "
            "faults on demand.",
        )
    elif managed and not moved:
        yield Check(
            "managed_without_traffic",
            "warn",
            f"Managed memory was allocated ({format_count(managed)} times) but no migration or fault "
            "is there. Likely: only one side touched it, it was in place, the platform does not "
            "fault on demand (Windows, WSL), or the rows were not recorded.",
        )


def _migrations(info: Mapping[str, Any], totals: Mapping[str, Any]) -> Iterator[Check]:
    figures = totals["figures"]["migration figures"]
    if not figures["n"]:
        return
    odd = _counted(
        (figures["n_part_pages"], "are not whole pages"),
        (figures["n_over_va_block"], "cross a 2 MiB VA block"),
        (figures["n_no_length"], "take no time"),
    )
    yield (
        Check("migration_sizes", "warn", f"Of {format_count(figures['n'])} migrations {odd}.")
        if odd
        else Check("migration_sizes", "ok", "Every migration is whole pages inside one VA block.")
    )
    printed = info["kind"] == "nvprof-text"
    if printed:
        yield Check(
            "migration_causes",
            "ok",
            "nvprof does not print why memory moved, nor the access type of a fault: both are unknown.",
        )
    unnamed = _counted(
        (figures["n_other_cause"], "have a cause that nsan does not know"),
        (0 if printed else figures["n_no_cause"], "have no cause"),
        (figures["n_no_address"], "have no address"),
        (figures["n_no_process"], "have no process"),
    )
    if unnamed:
        yield Check(
            "migration_labels", "warn", f"Of {format_count(figures['n'])} migrations {unnamed}."
        )


_MOST_HOLES: Final = 3
_NOT_LOOKED: Final = "Whether rows were lost was not looked at: {} rows take more memory than was there at the import. To look, import again: `nsan import TRACE --force-overwrite --memory SIZE`."


def _lost_rows(info: Mapping[str, Any], totals: Mapping[str, Any]) -> Iterator[Check]:
    """Say where rows are missing, or how far that could be checked."""
    holes, replay = totals["lost_rows"]["holes"], totals["lost_rows"]["replay"]
    if not_run := totals["lost_rows"].get("not_run"):
        yield Check("lost_rows", "unknown", _NOT_LOOKED.format(format_count(not_run["n_rows"])))
        return
    for hole in holes[:1]:
        said = [_hole(each) for each in holes[:_MOST_HOLES]]
        if len(holes) > _MOST_HOLES:
            said.append(f"and {len(holes) - _MOST_HOLES} more (`nsan faults --by lost`)")
        how = "are missing" if hole["level"] == "certain" else "are probably missing"
        yield Check(
            "lost_rows",
            "warn",
            f"Rows of Unified Memory {how}: {'; '.join(said)}. The profiler dropped them without a word; "
            "totals are lower bounds.",
        )
    if holes or not totals["figures"]["migration figures"]["n"]:
        return
    checked = sum(row["n_pushes"] for row in replay)
    exact = sum(row["n_exact_pushes"] for row in replay)
    capture = info["capture"]
    seen = all(capture[kind]["answer"] == "recorded" for kind in ("gpu_faults", "cpu_faults"))
    if checked and all(row["rule_holds"] for row in replay):
        told = (
            f"{format_count(exact)} of {format_count(checked)} pushes by page faults are to the page what the "
            "driver's prefetcher had to bring after what came before"
        )
        if exact == checked or seen:
            yield Check("lost_rows", "ok", f"No sign of lost rows: {told}.")
        else:
            yield Check(
                "lost_rows",
                "unknown",
                f"Whether rows were lost cannot be told: only {told}. Memory that the GPU touched first, freed "
                "memory and advice do that too; with page faults recorded nsan could tell them apart.",
            )
    elif not checked and _moved_by_faults(totals):
        yield Check(
            "lost_rows",
            "unknown",
            "Whether rows were lost cannot be told: the copies have no causes, or several GPUs share what moves.",
        )
    elif checked and info["kind"] not in NVPROF_KINDS:
        yield Check(
            "lost_rows",
            "ok",
            "No sign of lost rows; the driver's prefetcher does not follow its usual setting here, so less "
            "could be checked.",
        )


def _moved_by_faults(totals: Mapping[str, Any]) -> bool:
    """Say whether anything came to a GPU that the prefetcher had a hand in, or may have had."""
    causes = {"coherence", "prefetch", "unknown"}
    groups = totals["migrations"]["groups"]
    return any(row["direction"] != "dtoh" and row["cause"] in causes for row in groups)


def _hole(hole: Mapping[str, Any]) -> str:
    """Write one hole: when, how long, how much."""
    least = format_bytes(hole["least_bytes"])
    if not hole["is_silent"]:
        return (
            f"somewhere between {format_time(hole['earliest_ns'])} and "
            f"{format_time(hole['latest_ns'])}, at least {least}"
        )
    about = format_bytes(hole["lost_bytes"])
    return (
        f"from {format_time(hole['start_ns'])} to {format_time(hole['end_ns'])} "
        f"({format_time(hole['duration_ns'])} without any row), about {about}, at least {least}"
    )


def _counted(*pairs: tuple[int | None, str]) -> str:
    return ", ".join(f"{format_count(n)} {words}" for n, words in pairs if n)


def _has_coarse_times(info: Mapping[str, Any]) -> bool:
    return info["kind"] == "nvprof-text" and "busy" in info["doubtful"]


def _times(info: Mapping[str, Any]) -> Iterator[Check]:
    if _has_coarse_times(info):
        yield Check(
            "times",
            "unknown",
            "nvprof printed start times with few digits, or those of several processes, each from its "
            "own start: durations and rates of the whole, and what lies inside what, are unknown. "
            "The order of the rows of a process is exact.",
        )


_STYLES: Final = {
    "page": "one per page here",
    "va_block": "one per VA block here",
}
_REFUSED: Final = {
    "jittered": "their ends scatter around the replays",
    "jittered_page": "the ends of one batch scatter",
    "other": "too many copies fit none of them",
}
"""Styles of rows that no batch can be built on (:mod:`nsan.analysis.driver.fault_rows`)."""


def _fault_rows(info: Mapping[str, Any], totals: Mapping[str, Any]) -> Iterator[Check]:
    found = totals["fault_rows"]
    if info["capture"]["gpu_faults"]["answer"] != "recorded" or not found:
        return
    rows = {key: sum(each[key] for each in found) for key in found[0] if key.startswith("n_")}
    styles = [each["style"] for each in found]
    coarse = _has_coarse_times(info)
    broken = _counted(
        (0 if coarse else rows["n_out_of_order"], "end out of order"),
        (rows["n_counts_outside"], "have a count outside 1 to 256"),
        (rows["n_other_access"], "have an access type that nsan does not know"),
        (rows["n_rows_above"], "lie above their lowest faulted page"),
    )
    copies = _counted(
        (rows["n_copies_outside"], "fall into no fault row"),
        (rows["n_descending"], "descend within one"),
    )
    refused = sorted({_REFUSED[style] for style in styles if style in _REFUSED})
    n_rows, n_copies = format_count(rows["n_rows"]), format_count(rows["n_copies"])
    if broken or copies or refused:
        parts = [f"of {n_rows} GPU fault rows {broken}"] * bool(broken)
        parts += [f"of {n_copies} fault-caused copies {copies}"] * bool(copies)
        use = (
            f"Batches are put together from copies alone: {', '.join(refused)}."
            if refused
            else "Rows were lost, or mean something else here; what fits no row is put together from copies."
        )
        text = "; ".join(parts) or f"{n_rows} rows"
        yield Check(
            "fault_rows", "warn", f"GPU fault rows are not all driver batches: {text}. {use}"
        )
    elif coarse:
        yield Check(
            "fault_rows",
            "ok",
            f"All {n_rows} GPU fault rows have a count that a driver batch can have; times and causes "
            "that would show more are not printed.",
        )
    elif shared := sorted({_STYLES[style] for style in styles if style in _STYLES}):
        yield Check(
            "fault_rows",
            "ok",
            f"GPU fault rows are {' or '.join(shared)}: {n_rows} rows, of which those that share their end make "
            f"{format_count(rows['n_ends'])} driver batches, with {n_copies} copies.",
        )
    else:
        yield Check(
            "fault_rows",
            "ok",
            f"All {n_rows} GPU fault rows fit one driver batch each, with {n_copies} copies."
            + _full(rows["n_full"]),
        )
    if not coarse:
        yield from _clocks(totals)


def _full(n: int) -> str:
    return f" Full for certain (256 entries, nearly or quite): {format_count(n)}." if n else ""


def _clocks(totals: Mapping[str, Any]) -> Iterator[Check]:
    clock = totals["figures"]["clock figures"]
    if clock["n_outside_kernels"] and clock["kernel_lag_ns"] is not None:
        yield Check(
            "clocks",
            "ok",
            f"{format_count(clock['n_outside_kernels'])} fault rows start outside kernels, up to "
            f"{format_time(clock['kernel_lag_ns'])} before the next one: kernel times lag behind the "
            "GPU clock of faults, or copies faulted.",
        )


def _diagnostics(info: Mapping[str, Any], totals: Mapping[str, Any]) -> Iterator[Check]:
    tool = "nvprof" if info["kind"] in NVPROF_KINDS else "nsys"
    by_severity = {row["severity"]: row["texts"] for row in totals["diagnostics"]}
    errors = by_severity.get("error", [])
    warnings = [text for text in by_severity.get("warning", []) if _TELLING.search(text or "")]
    texts = [text for text in errors + warnings if text is not None]
    said = [" ".join(text.split())[:200] for text in texts[:_MOST_MESSAGES]]
    if len(texts) > len(said):
        said.append(f"and {len(texts) - len(said)} more")
    if None in errors:
        said.append("an error that is not about the recording (see the report in Nsight Systems)")
    if said:
        yield Check("diagnostics", "warn", f"{tool} reported: " + " | ".join(said))
