"""Table 1: time, faults and traffic of a step against the factor, without and with the caching allocator."""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from benchmarks.papers.claims import claims_table
from benchmarks.papers.given import given_rows
from benchmarks.papers.markdown import Column, listed, mib, ms, number, ratio, table
from benchmarks.papers.notes import note_of, parts_note
from benchmarks.papers.runs import change_text, ledger_of, managed_peak, trend_of
from benchmarks.papers.verdicts import MODERATE, fits_sentence, found, verdict
from nsan.analysis.pca.ratios import FIGURES, ratios
from nsan.analysis.pca.switches import SWITCHES, at_work, causal_parts
from nsan.model.networks import NETWORKS
from nsan.model.sweep import Case

FACTORS = (0.8, 1.0, 1.25, 1.5, 2.0, 3.0)
SETS = tuple(
    frozenset(name for name, is_set in zip(SWITCHES, bits, strict=True) if is_set)
    for bits in ((i & 1, i & 2, i & 4) for i in range(8))
)
"""The eight ways to set the model's switches."""

_SIDES = (
    ("step_ns", "Step, ms", ms),
    ("fault_rows", "Fault rows", lambda value: number(round(value))),
    ("in_bytes", "In, MiB", mib),
    ("out_bytes", "Out, MiB", mib),
)


def allocator_name(switches):
    """Name the caching allocator with switches set, as the model does."""
    chosen = "+".join(name for name in SWITCHES if name in switches)
    return f"caching:{chosen}" if chosen else "caching"


def row_of(name, factor, off_runs, on_runs):
    """Compare the warm steps of runs without and with PCA: means, and ratios on/off with their intervals.

    What moves both ways together is compared too, as ``moved_bytes``.
    """
    off, on = pl.concat(off_runs), pl.concat(on_runs)
    row = {"name": name, "factor": factor, "n_steps": (off.height, on.height)}
    row["n_shortest"] = min(steps.height for steps in (*off_runs, *on_runs))
    row["trends"] = trends(off_runs, "without PCA") | trends(on_runs, "with PCA")
    found = ratios(off, on).rows(named=True)
    found += [
        each | {"figure": "moved_bytes"}
        for each in ratios(_both_ways(off), _both_ways(on)).rows(named=True)
        if each["figure"] == "in_bytes"
    ]
    for each in found:
        keys = ("off", "on", "ratio", "ratio_low", "ratio_high")
        row |= {f"{each['figure']}_{key}": each[key] for key in keys}
    for direction in ("in", "out"):
        dead = on[f"dead_{direction}_bytes"]
        known = on.height and not dead.null_count()
        row[f"dead_{direction}_bytes"] = dead.mean() if known else None
    return row


def _both_ways(steps):
    """Count what goes out as if it came in."""
    return steps.with_columns(in_bytes=pl.col("in_bytes") + pl.col("out_bytes"))


def trends(runs, label):
    """Find the figures in which warm steps of runs still trend: words by ``label``; empty: none."""
    said = {}
    for steps in runs:
        for figure, title, _ in _SIDES:
            values = steps[FIGURES[figure].column].to_list()
            change = trend_of(values) if values else None
            if change is not None:
                said.setdefault(label, []).append(
                    f"{title.split(',')[0].lower()} {change_text(change)}"
                )
    return {key: listed(words) for key, words in said.items()}


@dataclass(frozen=True)
class Switched:
    """What the runs with switches show beside the parts.

    Attributes
    ----------
    parts : list of dict
        Causal parts with program and factor.
    padding : dict
        By program: most managed bytes with PCA, and with packing switched off.
    n_steps : set of int
        Warm steps of each of these runs.
    trends : list of str
        Runs whose warm steps still trend, in words.
    """

    parts: list[dict] = field(default_factory=list)
    padding: dict[str, tuple[int, int]] = field(default_factory=dict)
    n_steps: set[int] = field(default_factory=set)
    trends: list[str] = field(default_factory=list)


def modelled_rows(job, names, factors, moderate):
    """Run networks on the model; give the rows, and what the runs with switches at moderate factors show."""
    rows, switched = [], Switched()
    for name in names:
        cases = [Case(f, each, "none") for f in factors for each in ("raw", "caching")]
        extra = [each for each in map(allocator_name, SETS) if each != "caching"]
        cases += [Case(f, each, "none") for f in moderate for each in extra]
        steps, peaks = {}, {}
        for case, folder in job.modelled(name, cases):
            job.tell(f"{name} {case.folder}: joined")
            steps[case.factor, case.allocator] = ledger_of(folder)
            peaks[case.factor, case.allocator] = managed_peak(folder)
        rows += [row_of(name, f, [steps[f, "raw"]], [steps[f, "caching"]]) for f in factors]
        for factor in moderate:
            runs = {at_work(each): steps[factor, allocator_name(each)] for each in SETS}
            split = causal_parts(runs, steps[factor, "raw"])
            switched.parts.extend(
                {"name": name, "factor": factor, **row} for row in split.to_dicts()
            )
            switched.n_steps.update(each.height for each in runs.values())
            for allocator in extra:
                found = trends([steps[factor, allocator]], f"{name} at {factor:g}, {allocator}")
                switched.trends.extend(f"{run} ({figures})" for run, figures in found.items())
            # It depends on the allocator alone, not on the memory of the GPU.
            switched.padding[name] = tuple(
                peaks[factor, each] for each in ("caching", "caching:apart")
            )
        job.drop()
    return rows, switched


def text(rows, *, modelled, switched=None, notes=()):
    """Write table 1, the parts of each mechanism, and what follows from them."""
    parts = switched.parts if switched else []
    how = "modelled" if modelled else "measured"
    title = f"## Table 1. A step without and with the caching allocator (PCA): {how}"
    kind = "modelled" if modelled else "derived"
    lines = [title, table(rows, _columns(kind)), " ".join([*note_of(rows), *notes])]
    lines += [verdict(name, rows, parts) for name in _names(rows)]
    if modelled and (more := fits_sentence(rows)):
        lines.append(more)
    if parts:
        lines += ["### Which mechanism: modelled, by switching each off", _parts_table(parts)]
        lines.append(" ".join(parts_note(switched)))
    lines += ["### Paper 1 and this table", claims_table(1, found(rows, parts))]
    return "\n\n".join(lines) + "\n"


def _names(rows):
    return list(dict.fromkeys(row["name"] for row in rows))


def _columns(kind):
    columns = [
        Column("name", "Program"),
        Column("factor", "Factor", number, None),
    ]
    for figure, title, show in _SIDES:
        columns += [
            Column(f"{figure}_off", f"{title}: off", show, kind),
            Column(f"{figure}_on", "on", show, kind),
            Column(f"{figure}_text", "ratio", str, kind),
        ]
    columns += [
        Column("dead_in_bytes", "Dead in, MiB", mib, kind),
        Column("dead_out_bytes", "Dead out, MiB", mib, kind),
    ]
    return columns


def with_texts(rows):
    """Add each ratio with its interval as text."""
    for row in rows:
        for figure, _, _ in _SIDES:
            value = row[f"{figure}_ratio"]
            low, high = row[f"{figure}_ratio_low"], row[f"{figure}_ratio_high"]
            shown = None if value is None else ratio(value)
            if value is not None and low is None:
                shown += " (no interval)"
            elif value is not None and high is None:
                shown += f" (from {ratio(low)})"
            elif value is not None and ratio(low) != ratio(high):
                shown += f" ({ratio(low)} to {ratio(high)})"
            row[f"{figure}_text"] = shown
    return rows


def _parts_table(parts):
    rows = {}
    shows = {
        "step_ns": lambda value: f"{value / 1e6:+.1f}",
        "fault_rows": lambda value: f"{value:+d}",
        "in_bytes": lambda value: f"{value / (1 << 20):+.0f}",
        "out_bytes": lambda value: f"{value / (1 << 20):+.0f}",
    }
    titles = {key: title for key, title, _ in _SIDES}
    for part in parts:
        figure = part["figure"]
        if figure not in shows:
            continue
        key = (part["name"], part["factor"], figure)
        row = rows.setdefault(
            key, {"name": part["name"], "factor": part["factor"], "figure": titles[figure]}
        )
        row[part["part"]] = _part_text(part, shows[figure])
    columns = (
        Column("name", "Program"),
        Column("factor", "Factor", number),
        Column("figure", "Of a step"),
        Column("difference", "With PCA less without", str, "modelled"),
        Column("reuse", "Reuse", str, "modelled"),
        Column("dead", "Dead traffic", str, "modelled"),
        Column("packing", "Packing", str, "modelled"),
        Column("remainder", "Rest", str, "modelled"),
    )
    return table(rows.values(), columns)


def _part_text(part, show):
    if part["value"] is None:
        return None
    shown = show(part["value"])
    if part["low"] is not None and part["low"] != part["high"]:
        shown += f" ({show(part['low'])} to {show(part['high'])})"
    return shown


def make(job):
    """Make table 1."""
    if job.runs:
        given, notes, modelled = given_rows(job.runs)
        rows = with_texts([row_of(*each) for each in given])
        return text(rows, modelled=modelled, notes=notes)
    names = ["alexnet"] if job.quick else [each.name for each in NETWORKS]
    factors, moderate = ((0.8, 1.25), ()) if job.quick else (FACTORS, MODERATE)
    rows, switched = modelled_rows(job, names, factors, moderate)
    return text(with_texts(rows), modelled=True, switched=switched)
