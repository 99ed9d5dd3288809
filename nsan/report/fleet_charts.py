"""The charts of a fleet's report: frames from its document, drawn and put into blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.fleet.views import bars, causes_of
from nsan.fleet.outliers import named
from nsan.fleet.tables import in_time, utc
from nsan.report.blocks import Picture, Text
from nsan.report.shown import Blocks
from nsan.units import counted, format_count

if TYPE_CHECKING:
    from nsan.charts.palette import Theme
    from nsan.charts.theme import Drawing

_CAUSES: Final = {
    "coherence": "coherence_bytes",
    "prefetch": "prefetch_bytes",
    "user": "user_bytes",
    "eviction": "eviction_bytes",
    "access_counters": "access_counters_bytes",
    "other": "other_bytes",
}
_RANKS: Final = {"rank": pl.Int64, "value_ns": pl.Int64, "side": pl.String}
_NOTHING: Final = "No report has UM time: neither migrations nor GPU faults were recorded."


def um_time(document: Mapping[str, Any], runs: Sequence[str], theme: Theme) -> Blocks:
    """Draw UM time by rank.

    Parameters
    ----------
    document : mapping
        The fleet.
    runs : sequence of str
        Names of runs, those to be shown first.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    Blocks
        The chart; a text where no report has UM time.
    """
    from nsan.charts.fleet import MOST_BARS, MOST_PANELS, um_by_rank

    # Few ranks of many runs say more side by side: a run with one report is a bar of a chart of runs.
    several = {run["run"] for run in document["runs"] if run["n_reports"] > 1}
    shown = [run for run in runs if run in several] or list(runs[:1])
    if not several and document["n_runs"] > 1:
        return Blocks([Text("Each run has one report: see the runs.", "empty")])
    frames = {run: bars(_ranks_of(document, run), most=MOST_BARS) for run in shown[:MOST_PANELS]}
    panels = [
        (run if document["n_runs"] > 1 else "", rows) for run, rows in frames.items() if rows.height
    ]
    if not panels:
        return Blocks([Text(_NOTHING, "note")])
    notes = [
        "UM was at work at least so long: the larger of the two times that are known (derived)."
    ]
    if any((rows["n"] > 1).any() for _, rows in panels):
        notes.append("Neighbouring ranks share a bar: that of the largest value.")
    if len(shown) > MOST_PANELS:
        notes.append(
            f"{MOST_PANELS} of {counted(len(shown), 'run')}: those where ranks stand out, then by UM time."
        )
    drawn = um_by_rank(panels, notes=notes, theme=theme)
    return _picture("um_by_rank", "UM time by rank", drawn)


def _ranks_of(document: Mapping[str, Any], run: str) -> pl.DataFrame:
    sides = {
        (each["rank"], each["source"]): each["side"]
        for each in document["outliers"]
        if each["scope"] == "rank" and each["run"] == run
    }
    rows = [
        {
            "rank": row["rank"],
            "value_ns": row["um_at_least_ns"],
            "side": sides.get((row["rank"], row["source"])),
        }
        for row in document["reports"]
        if row["run"] == run
    ]
    return pl.DataFrame(rows, schema=_RANKS)


def over_time(document: Mapping[str, Any], theme: Theme) -> Blocks:
    """Draw the runs one after the other.

    Parameters
    ----------
    document : mapping
        The fleet.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    Blocks
        The chart; a text where no run has UM time.
    """
    from nsan.charts.fleet import MOST_RUNS, runs_over_time

    sides = {each["run"]: each["side"] for each in document["outliers"] if each["scope"] == "run"}
    rows = []
    for run in in_time(document["runs"]):
        figures = run["figures"].get("um_at_least_ns")
        if figures and figures["n_known"]:
            began = run["started_utc_ns"]
            rows.append(
                {
                    "run": run["run"],
                    "started": "" if began is None else utc(began),
                    **{f"{key}_ns": float(figures[key]) for key in ("min", "median", "max")},
                    "side": sides.get(run["run"]),
                }
            )
    if not rows:
        return Blocks([Text(_NOTHING, "note")])
    dated = all(row["started"] for row in rows)
    notes = [
        f"In the order {'in which they began' if dated else 'of their names'}; UM time at least (derived)."
    ]
    if len(rows) > MOST_RUNS:
        notes.append(f"The last {format_count(MOST_RUNS)} of {counted(len(rows), 'run')}.")
    frame = pl.DataFrame(rows[-MOST_RUNS:], schema_overrides={"side": pl.String})
    drawn = runs_over_time(frame, notes=notes, theme=theme)
    return _picture("runs_over_time", "UM time of a rank in each run", drawn)


def causes(document: Mapping[str, Any], theme: Theme) -> Blocks:
    """Draw by cause what the reports moved that moved most.

    Parameters
    ----------
    document : mapping
        The fleet.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    Blocks
        The chart; nothing where no report has known bytes.
    """
    from nsan.charts.fleet import MOST_CAUSED, causes_by_rank

    rows = [
        {
            "label": named(row),
            "bytes": row["bytes"],
            **{c: row[name] for c, name in _CAUSES.items()},
        }
        for row in document["reports"]
    ]
    schema = {"label": pl.String, "bytes": pl.Int64, **dict.fromkeys(_CAUSES, pl.Int64)}
    found = causes_of(pl.DataFrame(rows, schema=schema), list(_CAUSES), most=MOST_CAUSED)
    if found.is_empty():
        return Blocks()
    notes = []
    if len(rows) > MOST_CAUSED:
        notes.append(f"The {MOST_CAUSED} of {counted(len(rows), 'report')} that moved most.")
    drawn = causes_by_rank(found, notes=notes, theme=theme)
    return _picture("causes_by_rank", "Why memory moved, by rank", drawn)


def _picture(name: str, title: str, drawn: Drawing) -> Blocks:
    from nsan.charts.saving import rendered, specification

    return Blocks([Picture(name, title, specification(drawn), rendered(drawn, ".svg").decode())])
