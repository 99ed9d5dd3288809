"""What `nsan summary DIR` says of many reports: one document that text, CSV, JSON and reports are made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import polars as pl

import nsan
from nsan.analysis.fleet.peers import judged_groups, rank_outliers, run_outliers, stragglers
from nsan.analysis.fleet.sums import sums, traffic, typical
from nsan.contract import CAPTURE_KINDS, SCHEMA, has_um_data
from nsan.fleet.figures import REPORT_FIGURES, migration_figures, report_figures
from nsan.fleet.member import Failure, Member
from nsan.fleet.notes import notes
from nsan.fleet.outliers import EXPLAINING, differs, far, named, straggler_words
from nsan.info import MODEL_KIND
from nsan.tabular.columns import plain
from nsan.text import shortened
from nsan.units import counted

ADDED: Final = (
    *("duration_ns", "um_ns", "um_at_least_ns", "migrations_busy_ns", "gpu_faults_busy_ns"),
    *("kernels_busy_ns", "n_migrations", "bytes", "htod_bytes", "dtoh_bytes", "dtod_bytes"),
    *("coherence_bytes", "prefetch_bytes", "user_bytes", "eviction_bytes"),
    *("access_counters_bytes", "other_bytes", "n_fault_rows", "n_page_faults", "n_cpu_faults"),
    *("n_kernels", "managed_bytes"),
)
"""Figures that are added up over reports."""

_OF_RUNS: Final = (
    *("duration_ns", "um_at_least_ns", "migrations_busy_ns", "gpu_faults_busy_ns", "bytes"),
    *("eviction_bytes", "n_fault_rows"),
)
"""Those that are given run by run, too."""

_WHO: Final = ("run", "rank", "source")
_KIND_OF: Final = {column.name: column.kind for column in REPORT_FIGURES.columns}
_UNIT_OF: Final = {column.name: column.unit for column in REPORT_FIGURES.columns}


def fleet_document(
    members: Sequence[Member], failures: Sequence[Failure] = (), *, name: str = ""
) -> dict[str, Any]:
    """Summarise many reports.

    Parameters
    ----------
    members : sequence of Member
        The reports that could be read, run by run.
    failures : sequence of Failure, optional
        Those that could not.
    name : str, default ""
        What the fleet is called.

    Returns
    -------
    dict
        The JSON contract of a fleet (docs/json.md): plain containers, times in ns, sizes in bytes. A sum is None
        as soon as one report lacks the figure; ``known_sum`` is that of the others.
    """
    reports = report_figures(members)
    failed = Counter(failure.run for failure in failures)
    found = _found(reports, failed)
    return {
        "schema": SCHEMA,
        "nsan_version": nsan.__version__,
        "document": "fleet",
        "name": name,
        "n_reports": len(members),
        "n_failed": len(failures),
        "n_runs": len({*reports["run"], *failed}),
        "n_modelled": sum(member.info["kind"] == MODEL_KIND for member in members),
        "n_without_um_data": sum(not has_um_data(each.info, each.totals) for each in members),
        "programs": _tally(reports["program"]),
        "gpus": _tally(reports["gpus"]),
        "capture": {kind: _answers(members, kind) for kind in CAPTURE_KINDS},
        "switches": {kind: _switch(members, kind) for kind in CAPTURE_KINDS},
        "totals": _totals(reports),
        "migrations": traffic(migration_figures(members)).to_dicts(),
        "runs": [*_runs(reports, failed, found["outliers"])],
        **found,
        "reports": plain(reports, ()),
        "failures": [
            {"run": each.run, "rank": each.rank, "source": each.source, "reason": each.reason}
            for each in failures
        ],
        "kinds": {figure: _KIND_OF[figure] for figure in ADDED},
    }


def fleet_name(paths: Sequence[Path], most: int = 3) -> str:
    """Call a fleet by what was named, without the folders above.

    Parameters
    ----------
    paths : sequence of Path
        What was named.
    most : int, default 3
        Names at most; of the others the number is said.

    Returns
    -------
    str
        As "night-1, night-2".
    """
    names = [path.resolve().name or str(path) for path in paths]
    more = f" and {counted(len(names) - most, 'more', 'more')}" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _answers(members: Iterable[Member], kind: str) -> dict[str, int]:
    """Count the three answers to whether a kind of event was recorded."""
    found = Counter(member.info["capture"][kind]["answer"] for member in members)
    return {answer: found[answer] for answer in ("recorded", "not_recorded", "unknown")}


def _switch(members: Iterable[Member], kind: str) -> str:
    """Name the switch that records what was not recorded, if one would."""
    captures = (member.info["capture"][kind] for member in members)
    return next((each["switch"] for each in captures if each["answer"] == "not_recorded"), "")


def _tally(names: pl.Series) -> list[dict[str, Any]]:
    """Count reports by name, the most frequent first."""
    found = Counter(names.to_list())
    ordered = sorted(found.items(), key=lambda each: (-each[1], each[0] is None, each[0] or ""))
    return [{"name": name, "n_reports": n} for name, n in ordered]


def _totals(reports: pl.DataFrame) -> list[dict[str, Any]]:
    return [
        {"figure": row["figure"], "unit": _UNIT_OF[row["figure"]], **_without(row, "run", "figure")}
        for row in sums(reports, ADDED).to_dicts()
    ]


def _runs(
    reports: pl.DataFrame, failed: Mapping[str, int], outliers: Iterable[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Give the figures of each run, in the order of the reports; runs that failed as a whole last."""
    standing_out = Counter(each["run"] for each in outliers if each["scope"] == "rank")
    figures: dict[str, dict[str, Any]] = {}
    for row in sums(reports, _OF_RUNS, by_run=True).to_dicts():
        figures.setdefault(row["run"], {})[row["figure"]] = _without(row, "run", "figure")
    begun = _first_starts(reports)
    sizes = Counter(reports["run"].to_list())
    for run in dict.fromkeys((*sizes, *failed)):
        yield {
            "run": run,
            "n_reports": sizes[run],
            "n_failed": failed.get(run, 0),
            "n_outliers": standing_out[run],
            "started_utc_ns": begun.get(run),
            "figures": figures.get(run, {}),
        }


def _first_starts(reports: pl.DataFrame) -> dict[str, int]:
    """Give the earliest start of a session of each run; a modelled one has none."""
    known = reports.filter(pl.col("session_start_utc_ns") > 0)
    return dict(known.group_by("run").agg(pl.col("session_start_utc_ns").min()).iter_rows())


def _without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in names}


# What stands out ------------------------------------------------------------------------------------


def _found(reports: pl.DataFrame, failed: Mapping[str, int]) -> dict[str, list[Any]]:
    """Find what stands out, who takes longest, and what was not judged."""
    sized = reports.with_columns(
        n_failed=pl.col("run").replace_strict(
            list(failed), list(failed.values()), default=0, return_dtype=pl.Int64
        )
        if failed
        else pl.lit(0, pl.Int64)
    )
    words = _words(reports)
    ranks = [*_rank_outliers(reports, words)]
    runs = [*_run_outliers(sized)]
    longest = stragglers(reports).to_dicts()
    groups = judged_groups(sized).to_dicts()
    return {
        "outliers": ranks + runs,
        "judged": groups,
        "stragglers": [{**row, "text": straggler_words(row, words[row["run"]])} for row in longest],
        "notes": [*notes(reports, groups)],
    }


def _words(reports: pl.DataFrame) -> dict[str, str]:
    """Say of each run what it is made of: ranks, or reports where a rank is not known or has several."""
    rank = pl.col("rank")
    is_whole = (rank.null_count() == 0) & (rank.n_unique() == pl.len())
    runs = reports.group_by("run").agg(
        pl.when(is_whole).then(pl.lit("rank")).otherwise(pl.lit("report"))
    )
    return dict(runs.iter_rows())


def _rank_outliers(reports: pl.DataFrame, words: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    found = rank_outliers(reports).to_dicts()
    if not found:
        return
    usual = {(row["run"], row["program"]): row for row in typical(reports, EXPLAINING).to_dicts()}
    rows = {tuple(row[key] for key in _WHO): row for row in reports.to_dicts()}
    for each in found:
        mine = rows[tuple(each[key] for key in _WHO)]
        peers = usual[mine["run"], mine["program"]] | {"gpus": _usual_gpus(reports, mine)}
        reasons = differs(mine, peers)
        why = f": {'; '.join(reasons)}" if reasons else ": no figure of its totals tells why"
        one = words[each["run"]]
        said = far(each, counted(each["n_peers"], one))
        who = named(each, with_source=one != "rank")
        yield _outlier(each, "rank", f"{who}: {said}{why}.", reasons)


def _usual_gpus(reports: pl.DataFrame, mine: Mapping[str, Any]) -> str | None:
    """Name the GPUs that most reports of a run have."""
    found = Counter(reports.filter(pl.col("run") == mine["run"])["gpus"].to_list())
    name: str | None = found.most_common(1)[0][0]
    return name


def _run_outliers(reports: pl.DataFrame) -> Iterator[dict[str, Any]]:
    sizes = Counter(reports["run"].to_list())
    for each in run_outliers(reports).to_dicts():
        said = far(each, counted(each["n_peers"], "run"))
        run = shortened(each["run"], 40) or "(no name)"
        which = ", median of its reports" if sizes[each["run"]] > 1 else ""
        text = f"run {run}{which}: {said}."
        yield _outlier({"rank": None, "source": None, **each}, "run", text, [])


def _outlier(row: Mapping[str, Any], scope: str, text: str, reasons: list[str]) -> dict[str, Any]:
    who = {key: row[key] for key in _WHO}
    side = "more" if row["excess_ns"] > 0 else "less"
    figures = {key: value for key, value in row.items() if key not in who}
    return {"scope": scope, **who, "side": side, **figures, "reasons": reasons, "text": text}
