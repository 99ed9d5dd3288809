"""Table 1: time, faults and traffic of a step against the factor, without and with the caching allocator."""

from __future__ import annotations

from benchmarks.papers.claims import claims_table
from benchmarks.papers.given import given_rows
from benchmarks.papers.markdown import Column, mib, ms, number, ratio, table
from benchmarks.papers.runs import WARMUP, ledger_of
from benchmarks.papers.verdicts import MODERATE, fits_sentence, found, verdict
from nsan.analysis.pca.ratios import ratios
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


def row_of(name, factor, off, on):
    """Compare the warm steps of two runs: means, and ratios on/off with their intervals."""
    row = {"name": name, "factor": factor, "n_steps": min(off.height, on.height)}
    for each in ratios(off, on).iter_rows(named=True):
        keys = ("off", "on", "ratio", "ratio_low", "ratio_high")
        row |= {f"{each['figure']}_{key}": each[key] for key in keys}
    for direction in ("in", "out"):
        dead = on[f"dead_{direction}_bytes"]
        known = on.height and not dead.null_count()
        row[f"dead_{direction}_bytes"] = dead.mean() if known else None
    return row


def modelled_rows(job, names, factors, moderate):
    """Run networks on the model; give the rows, and the parts of each mechanism at moderate factors."""
    rows, parts = [], []
    for name in names:
        cases = [Case(f, each, "none") for f in factors for each in ("raw", "caching")]
        extra = [each for each in map(allocator_name, SETS) if each != "caching"]
        cases += [Case(f, each, "none") for f in moderate for each in extra]
        steps = {}
        for case, folder in job.modelled(name, cases):
            job.tell(f"{name} {case.folder}: joined")
            steps[case.factor, case.allocator] = ledger_of(folder)
        rows += [row_of(name, f, steps[f, "raw"], steps[f, "caching"]) for f in factors]
        for factor in moderate:
            runs = {at_work(each): steps[factor, allocator_name(each)] for each in SETS}
            split = causal_parts(runs, steps[factor, "raw"])
            parts += [{"name": name, "factor": factor, **row} for row in split.to_dicts()]
        job.drop()
    return rows, parts


def text(rows, *, modelled, parts=()):
    """Write table 1, the parts of each mechanism, and what follows from them."""
    how = "modelled" if modelled else "measured"
    title = f"## Table 1. A step without and with the caching allocator (PCA): {how}"
    note = (
        f"Means of warm steps (all but the first {WARMUP}). One fault row is one batch of the driver. "
        "Ratios: with PCA over without, in brackets the 95 % interval over the warm steps where it is wider than "
        "the last digit (of two or three steps it is too narrow). Dead: bytes "
        "that no tensor needed, with PCA. Factor: peak of the live tensors over GPU memory."
    )
    kind = "modelled" if modelled else "derived"
    lines = [title, table(rows, _columns(kind)), note]
    lines += [verdict(name, rows, parts) for name in _names(rows)]
    if modelled and (more := fits_sentence(rows)):
        lines.append(more)
    if parts:
        lines += ["### Which mechanism: modelled, by switching each off", _parts_table(parts)]
        lines.append(
            "Mean effect over the orders in which the three mechanisms can be switched on, in brackets "
            "the least and the most. Rest: the caching allocator with all three off, less no cache. "
            "The parts and the rest add up. Without reuse nothing stays cached, so dead traffic exists "
            "only beside it: what the two do together is shared between them."
        )
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
            if value is not None and None not in (low, high) and ratio(low) != ratio(high):
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
        given, modelled = given_rows(job.runs)
        return text(with_texts([row_of(*each) for each in given]), modelled=modelled)
    names = ["alexnet"] if job.quick else [each.name for each in NETWORKS]
    factors, moderate = ((0.8, 1.5), ()) if job.quick else (FACTORS, MODERATE)
    rows, parts = modelled_rows(job, names, factors, moderate)
    return text(with_texts(rows), modelled=True, parts=parts)
