"""What a run cost, in a few numbers: times of its phases without profiling, faults and bytes of its trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, Final

from nsan.io.bench_truth import TRUTH_SUFFIX, TruthError, read_about
from nsan.microbench.running import ALONE_SUFFIX, Outcome

_FOOTPRINT: Final = ("managed_bytes", "available_bytes", "factor")


def costs(outcome: Outcome) -> dict[str, Any]:
    """Sum up a run.

    Parameters
    ----------
    outcome : Outcome
        The run.

    Returns
    -------
    dict
        Seconds of the program alone; GPU memory and footprint of the run that was recorded; ``PHASE_ns``, the
        median over the iterations without nsys; and of the trace: bytes into GPUs by page faults, prefetcher and
        user, bytes out and those evicted, batches, CPU faults, time in kernels and migrations. What was not
        recorded is None.
    """
    name = outcome.folder.name
    alone = _about(outcome, f"{name}{ALONE_SUFFIX}")
    recorded = _about(outcome, f"{name}{TRUTH_SUFFIX}") or alone
    footprint = recorded.get("footprint")
    footprint = footprint if isinstance(footprint, Mapping) else {}
    return {
        "seconds_alone": outcome.document["seconds_alone"],
        **{f"{phase}_ns": ns for phase, ns in phase_medians(alone).items()},
        **traffic(outcome.manifest),
        "peak_tensor_bytes": recorded.get("peak_tensor_bytes"),
        "managed_bytes": footprint.get("managed_bytes"),
        "available_bytes": footprint.get("available_bytes"),
        "verified": recorded.get("verified"),
    }


def _about(outcome: Outcome, folder: str) -> dict[str, Any]:
    try:
        return read_about(outcome.folder / folder)
    except TruthError:
        return {}


def phase_medians(about: Mapping[str, Any]) -> dict[str, float]:
    """Return the median time of each phase of a run over its iterations, ns.

    Parameters
    ----------
    about : mapping
        The content of ``run.json``.

    Returns
    -------
    dict of str to float
        By name, in the order of the first of each; a phase that did not end is left out.
    """
    times: dict[str, list[int]] = {}
    for phase in about.get("phases", ()):
        if phase.get("ns") is not None:
            times.setdefault(str(phase["name"]), []).append(int(phase["ns"]))
    return {name: median(found) for name, found in times.items()}


def traffic(manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    """Sum up the traffic of a trace.

    Parameters
    ----------
    manifest : mapping or None
        Of its store; None: there is none.

    Returns
    -------
    dict
        Bytes, counts and times; None where they were not recorded.
    """
    if manifest is None:
        return dict.fromkeys(_TRAFFIC)
    totals, capture = manifest["totals"], manifest["info"]["capture"]
    moved = totals["migrations"]["groups"]
    into = [row for row in moved if row["direction"] != "dtoh"]
    out = [row for row in moved if row["direction"] == "dtoh"]
    figures = {
        "in_coherence_bytes": _bytes(into, "coherence"),
        "in_prefetch_bytes": _bytes(into, "prefetch"),
        "in_user_bytes": _bytes(into, "user"),
        "out_bytes": _bytes(out),
        "evicted_bytes": _bytes(out, "eviction"),
        "migration_ns": totals["migrations"]["busy_ns"],
        "n_batches": _total(row["n_rows"] for row in totals["gpu_faults"]["groups"]),
        "n_cpu_faults": totals["counts"]["cpu_faults"],
        "kernel_ns": totals["kernels"]["busy_ns"],
    }
    kind_of = {"n_batches": "gpu_faults", "n_cpu_faults": "cpu_faults", "kernel_ns": "kernels"}
    for name in figures:
        if capture[kind_of.get(name, "migrations")]["answer"] != "recorded":
            figures[name] = None
    return figures


_TRAFFIC: Final = (
    *("in_coherence_bytes", "in_prefetch_bytes", "in_user_bytes", "out_bytes", "evicted_bytes"),
    *("migration_ns", "n_batches", "n_cpu_faults", "kernel_ns"),
)


def _bytes(rows: Iterable[Mapping[str, Any]], cause: str | None = None) -> int | None:
    return _total(row["bytes"] for row in rows if cause in {None, row["cause"]})


def _total(values: Iterable[int | None]) -> int | None:
    """Add up, or None if a part is unknown."""
    found = list(values)
    return None if None in found else sum(filter(None, found))
