"""Table 2: hints for tensors that a profile chooses, and what prefetch and advice gain against the factor."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

import nsan
from benchmarks.papers.gains import SHARE, THREE, TOP, text
from benchmarks.papers.markdown import listed
from benchmarks.papers.runs import WARMUP, bytes_in, step_times, trend_of, warm_from
from nsan.model.hints import LEAST_BYTES, Hint, without_step
from nsan.model.networks.tensors import Create
from nsan.model.settings import Settings
from nsan.model.sweep import Case
from nsan.model.workloads import network

NETWORKS = ("resnet-50", "bert-base", "gpt2-small")
FACTORS = (0.8, 1.25, 1.5, 2.0, 3.0)
FITS = 0.8

ADVICE = {
    "preferred-gpu": None,
    "read-mostly": ("parameter", "input"),
    "accessed-by": ("optimizer",),
    "preferred-cpu": ("optimizer",),
}
"""Advice, and the roles for which it makes sense: what is read by many kernels and written once a step may
be duplicated; what is used once a step may stay with the CPU; None: any."""

PREFETCHES = {
    "prefetch all": Hint("prefetch"),
    "prefetch objects, all": Hint("prefetch-object"),
}


def profile(folder, warm_from_ns):
    """Profile a run without hints by tensor: bytes in that its tensors needed, in warm steps.

    Returns one row per name of a tensor: name, in_bytes (without dead ones), n_fault_rows, bytes (its
    largest). Most bytes in first.
    """
    (trace,) = folder.glob("*.sqlite")
    joined = nsan.join(trace, folder / "snapshot.pickle").filter(time=(warm_from_ns, None))
    found = nsan.analyse(joined, "tensor_traffic").collect()
    return (
        found.filter(pl.col("tensor_id").is_not_null())
        .group_by(name="function")
        .agg(
            in_bytes=(pl.col("in_bytes") - pl.col("dead_in_bytes")).sum(),
            n_fault_rows=pl.col("n_fault_rows").sum(),
            bytes=pl.col("requested_bytes").max(),
        )
        .sort("in_bytes", "name", descending=[True, False])
    )


def choose(found, *, share=SHARE, least_bytes=LEAST_BYTES):
    """Choose tensors from a profile.

    Those of 1 MiB and more, most bytes in per byte of the tensor first, until they cover a share of all
    bytes that came in for tensors.
    """
    wanted = share * found["in_bytes"].sum()
    ranked = found.filter((pl.col("bytes") >= least_bytes) & (pl.col("in_bytes") > 0)).sort(
        pl.col("in_bytes") / pl.col("bytes"), "name", descending=[True, False]
    )
    before = pl.col("in_bytes").cum_sum() - pl.col("in_bytes")
    return ranked.filter(before < wanted)


def hints_for(chosen, roles, advice=ADVICE):
    """Say what to try: by what it is called in the table, the hint."""
    names = tuple(chosen["name"])
    hints = {"prefetch chosen": Hint("prefetch", names=names), **PREFETCHES}
    for kind, wanted in advice.items():
        own = tuple(name for name in names if wanted is None or roles[name] in wanted)
        hints[f"{kind} chosen"] = Hint(kind, names=own)
    # Without a name a hint would be for every tensor.
    return {
        label: hint for label, hint in hints.items() if hint.names or not label.endswith(" chosen")
    }


def roles_of(name, training):
    """Give the role of each tensor of a network by its name."""
    tensors = network(name).build(
        steps=1, batch=training.batch, sequence=training.sequence, image=training.image
    )
    made = (each.tensor for each in tensors.operations if isinstance(each, Create))
    return {without_step(tensor.name): tensor.role for tensor in made}


def _timed(folder):
    steps = step_times(folder)
    warm = steps[WARMUP:]
    mean = sum(warm) / len(warm)
    cold = sum(steps) - len(warm) * mean
    moved = {"in_bytes": bytes_in(folder), "trend": trend_of(warm)}
    return {"warm_ns": mean, "cold_ns": cold, "all_ns": sum(steps), **moved}


def rows_at(job, name, factor, settings, hints=None):
    """Run a network at one factor without hints, then with each hint; a row each.

    ``hints`` are those to try; None: those that the profile of the run without hints suggests, which is
    given too.
    """
    where = f"{name}{'' if settings.prefetch else '-no-prefetcher'}"
    base = Case(factor, "caching", "none")
    ((_, folder),) = job.modelled(name, [base], where, settings)
    plain = _timed(folder)
    row = {"name": name, "factor": factor, "prefetcher": settings.prefetch}
    rows = [row | {"hint": "none", **plain}]
    chosen = found = None
    if hints is None:
        found = profile(folder, warm_from(folder))
        chosen = choose(found)
        advice = {"preferred-cpu": ADVICE["preferred-cpu"]} if job.quick else ADVICE
        hints = hints_for(chosen, roles_of(name, job.training(name)), advice)
    cases = {label: replace(base, hint=str(hint)) for label, hint in hints.items()}
    done = job.modelled(name, list(cases.values()), where, settings)
    for label, (_, own) in zip(cases, done, strict=True):
        n_tensors = len(hints[label].names) or None
        rows.append(row | {"hint": label, "n_tensors": n_tensors, **_timed(own)})
    for each in rows:
        each["warm_gain"] = plain["warm_ns"] / each["warm_ns"] - 1
        each["all_gain"] = plain["all_ns"] / each["all_ns"] - 1
    return rows, _profiled(row, found, chosen)


def _profiled(row, found, chosen):
    """Sum up a profile and what was chosen from it."""
    if found is None:
        return None
    total = found["in_bytes"].sum()
    return row | {
        "n_tensors": found.filter(pl.col("in_bytes") > 0).height,
        "in_bytes": total,
        "n_chosen": chosen.height,
        "chosen_bytes": chosen["bytes"].sum(),
        "covered_fraction": chosen["in_bytes"].sum() / total if total else None,
        "top": listed(
            f"{each['name']} ({each['in_bytes'] / each['bytes']:.1f})"
            for each in chosen.head(TOP).iter_rows(named=True)
        ),
    }


def make(job):
    """Make table 2."""
    names = ("alexnet",) if job.quick else NETWORKS
    factors = (1.25,) if job.quick else FACTORS
    rows, profiles = [], []
    for name in names:
        for factor in factors:
            own, profiled = rows_at(job, name, factor, Settings())
            rows += own
            profiles.append(profiled)
        for factor in () if job.quick else (FITS, THREE):
            rows += rows_at(job, name, factor, Settings(prefetch=False), PREFETCHES)[0]
        job.drop()
    rows.sort(key=lambda row: (names.index(row["name"]), not row["prefetcher"], row["factor"]))
    return text(rows, profiles)
