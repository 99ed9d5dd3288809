"""What a run cost, in a few numbers: times of its phases without profiling, faults and bytes of its trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, Final

from nsan.io.bench_truth import TRUTH_SUFFIX, TruthError, read_about
from nsan.microbench.places import ALONE_SUFFIX, OK
from nsan.microbench.running import NOT_RECORDED, Outcome


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
        user, bytes out and those evicted, batches, CPU faults, time in kernels and migrations, and how many of the
        bytes that the program is certain of are as it says. None: what was not recorded; of a run that did not end
        well all, for what it did then is no cost.
    """
    ended_well = outcome.status in {OK, NOT_RECORDED}
    alone = _about(outcome, ALONE_SUFFIX) if ended_well else {}
    recorded = (_about(outcome, TRUTH_SUFFIX) or alone) if ended_well else {}
    footprint = recorded.get("footprint")
    footprint = footprint if isinstance(footprint, Mapping) else {}
    is_recorded = outcome.status == OK
    expected = (outcome.document.get("expected") or {}) if is_recorded else {}
    verified = recorded.get("verified")
    return {
        "seconds_alone": outcome.document["seconds_alone"] if ended_well else None,
        **{f"{phase}_ns": ns for phase, ns in phase_medians(alone).items()},
        **traffic(outcome.manifest if is_recorded else None),
        "n_expected": expected.get("n_checked"),
        "n_expected_right": expected.get("n_right"),
        "peak_tensor_bytes": _number(recorded.get("peak_tensor_bytes")),
        "managed_bytes": _number(footprint.get("managed_bytes")),
        "available_bytes": _number(footprint.get("available_bytes")),
        "verified": verified if isinstance(verified, bool) else None,
    }


def _about(outcome: Outcome, suffix: str) -> dict[str, Any]:
    """Read what a run says of itself; its folder may have another name by now."""
    for folder in sorted(outcome.folder.glob(f"*{suffix}")):
        with contextlib.suppress(TruthError):
            return read_about(folder)
    return {}


def _number(value: object) -> int | float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None  # type: ignore[return-value]


def phase_medians(about: Mapping[str, Any]) -> dict[str, float]:
    """Return the median time of each phase of a run over its iterations, ns.

    Parameters
    ----------
    about : mapping
        The content of ``run.json``.

    Returns
    -------
    dict of str to float
        By name, in the order of the first of each; a phase that did not end, or is damaged, is left out.
    """
    times: dict[str, list[int]] = {}
    phases = about.get("phases")
    for phase in phases if isinstance(phases, list) else ():
        name, ns = (phase.get("name"), phase.get("ns")) if isinstance(phase, Mapping) else (0, 0)
        if isinstance(name, str) and type(ns) is int:
            times.setdefault(name, []).append(ns)
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
