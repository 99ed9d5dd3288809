"""The figures of a fleet, one row per report: what summaries, reports and recipes of many reports stand on.

No row of a capture is read again: all stands in what is known about each report. A figure is that of
`nsan summary` of the report itself, so that nobody who looks at one report finds another number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import polars as pl

from nsan.analysis.result import Result, derived, recorded
from nsan.contract import document
from nsan.fleet.member import Member

_CAUSES: Final = ("coherence", "prefetch", "user", "eviction", "access_counters")
"""Causes that have a column of their own; the rest, unknown ones among it, is ``other_bytes``."""

_LARGEST: Final = 2**63 - 1

_WHO: Final = (
    recorded("run", pl.String, "label", "Which run the report belongs to."),
    recorded("rank", pl.Int64, "id", "Its place in the run; null where nothing names one."),
    recorded("source", pl.String, "text", "Its name, relative to the folder that was given."),
)

REPORT_FIGURES: Final = Result(
    "report_figures",
    "a report",
    (
        *_WHO,
        recorded("source_kind", pl.String, "label", "As in the summary of the report."),
        recorded("program", pl.String, "text", "Names of its processes, each once, in order."),
        recorded("gpus", pl.String, "text", "Names of its GPUs, each once, in order."),
        recorded("n_gpus", pl.Int64, "GPUs", "GPUs of the machine that its processes could use."),
        recorded("session_start_utc_ns", pl.Int64, "ns", "Start of the session, since 1970."),
        derived("last_ns", pl.Int64, "ns", "Last end of an event, from the session start."),
        derived("duration_ns", pl.Int64, "ns", "From the first start of an event to the last end."),
        derived(
            "um_ns",
            pl.Int64,
            "ns",
            "A migration was in flight or a batch of GPU faults in service. Null where one of both was "
            "not recorded, or where both took time and the totals do not say how much of it was common.",
        ),
        derived(
            "um_at_least_ns",
            pl.Int64,
            "ns",
            "The larger of the two times below that are known: the union of both is at least so long.",
        ),
        derived(
            "migrations_busy_ns",
            pl.Int64,
            "ns",
            "At least one migration was in flight, per GPU, summed over GPUs.",
        ),
        derived(
            "gpu_faults_busy_ns",
            pl.Int64,
            "ns",
            "At least one batch of GPU faults was in service, per GPU, summed over GPUs.",
        ),
        derived("kernels_busy_ns", pl.Int64, "ns", "At least one kernel ran; the same."),
        recorded("n_migrations", pl.Int64, "migrations", "Migrations."),
        recorded("bytes", pl.Int64, "byte", "All bytes that migrated."),
        recorded("htod_bytes", pl.Int64, "byte", "Host to device."),
        recorded("dtoh_bytes", pl.Int64, "byte", "Device to host."),
        recorded("dtod_bytes", pl.Int64, "byte", "Device to device."),
        recorded("coherence_bytes", pl.Int64, "byte", "Because of a page fault."),
        recorded("prefetch_bytes", pl.Int64, "byte", "By the driver's prefetcher."),
        recorded("user_bytes", pl.Int64, "byte", "Because the program asked for it."),
        recorded("eviction_bytes", pl.Int64, "byte", "Evicted for want of GPU memory."),
        recorded("access_counters_bytes", pl.Int64, "byte", "Because of access counters."),
        recorded("other_bytes", pl.Int64, "byte", "For another cause, or one that is not known."),
        recorded("n_fault_rows", pl.Int64, "fault rows", "GPU fault rows: driver batches."),
        recorded("n_page_faults", pl.Int64, "faults", "Their recorded counts added up."),
        recorded("n_cpu_faults", pl.Int64, "faults", "CPU page faults."),
        recorded(
            "n_kernels", pl.Int64, "kernels", "Kernels; whole CUDA graphs are not among them."
        ),
        recorded("managed_bytes", pl.Int64, "byte", "Size of managed allocations."),
        recorded("gpu_memory_bytes", pl.Int64, "byte", "Memory of its GPUs."),
        derived("health", pl.String, "label", "Worst status of its checks."),
    ),
    "There is no report.",
)
"""One row per report. Null is what was not recorded, or could not be read."""

MIGRATION_FIGURES: Final = Result(
    "migration_figures",
    "a direction and cause of a GPU and process of a report",
    (
        *_WHO,
        recorded("pid", pl.UInt32, "id", "Process."),
        recorded("device_id", pl.Int64, "id", "CUDA ordinal of the GPU in its process."),
        recorded("direction", pl.String, "label", "`htod`, `dtoh` or `dtod`."),
        recorded("cause", pl.String, "label", "Cause."),
        recorded("n", pl.Int64, "migrations", "Migrations."),
        recorded("bytes", pl.Int64, "byte", "Their bytes."),
        derived("busy_ns", pl.Int64, "ns", "At least one of them was in flight."),
    ),
    "No report has recorded migrations.",
)
"""One row per report, process, GPU, direction and cause that has migrations."""


def report_figures(members: Iterable[Member]) -> pl.DataFrame:
    """Give the figures of each report of a fleet.

    Parameters
    ----------
    members : iterable of Member
        The reports.

    Returns
    -------
    DataFrame, ``REPORT_FIGURES``
        One row per report, in the order of the members. Each figure is that of the summary of the report.
    """
    rows = [_of_report(member) for member in members]
    return pl.DataFrame(rows, schema=REPORT_FIGURES.schema, orient="row")


def migration_figures(members: Iterable[Member]) -> pl.DataFrame:
    """Give the migrations of each report of a fleet by process, GPU, direction and cause.

    Parameters
    ----------
    members : iterable of Member
        The reports.

    Returns
    -------
    DataFrame, ``MIGRATION_FIGURES``
        In the order of the members; within one by process, GPU, direction and cause. A report whose
        migrations were not recorded has no row, as has one without migrations: ``n_migrations`` of
        :func:`report_figures` tells them apart.
    """
    rows = [row for member in members for row in _groups_of(member)]
    return pl.DataFrame(rows, schema=MIGRATION_FIGURES.schema, orient="row")


def _of_report(member: Member) -> dict[str, Any]:
    found = document(member.info, member.totals)
    migrations, faults = found["migrations"], found["gpu_faults"]
    row = {
        "run": member.run,
        "rank": member.rank,
        "source": member.source,
        "source_kind": found["source_kind"],
        "program": _names(found["processes"]),
        "gpus": _names(found["devices"]),
        "n_gpus": len(_machine_gpus(found["devices"])),
        "session_start_utc_ns": found["session_start_utc_ns"],
        "last_ns": found["last_ns"],
        "duration_ns": found["duration_ns"],
        "um_ns": _um_ns(migrations["busy_ns"], faults["busy_ns"]),
        "um_at_least_ns": _larger(migrations["busy_ns"], faults["busy_ns"]),
        "migrations_busy_ns": migrations["busy_ns"],
        "gpu_faults_busy_ns": faults["busy_ns"],
        "kernels_busy_ns": found["kernels"]["busy_ns"],
        "n_migrations": migrations["n"],
        **{name: migrations[name] for name in ("bytes", "htod_bytes", "dtoh_bytes", "dtod_bytes")},
        **_by_cause(migrations["by_cause"]),
        "n_fault_rows": faults["n_rows"],
        "n_page_faults": faults["n_page_faults"],
        "n_cpu_faults": found["cpu_faults"]["n"],
        "n_kernels": found["kernels"]["n"],
        "managed_bytes": found["managed"]["bytes"],
        "gpu_memory_bytes": _memory(found["devices"]),
        "health": found["health"][0]["status"] if found["health"] else None,
    }
    return {key: _fitting(value) for key, value in row.items()}


def _groups_of(member: Member) -> Iterator[dict[str, Any]]:
    groups = document(member.info, member.totals)["migrations"]["groups"] or ()
    keys = ("pid", "device_id", "direction", "cause")
    figures = (*keys, "n", "bytes", "busy_ns")

    def place(group: Mapping[str, Any]) -> list[tuple[bool, Any]]:
        return [(group[key] is None, 0 if group[key] is None else group[key]) for key in keys]

    for group in sorted(groups, key=place):
        who = {"run": member.run, "rank": member.rank, "source": member.source}
        yield who | {key: _fitting(group[key]) for key in figures}


def _um_ns(migrations_ns: int | None, faults_ns: int | None) -> int | None:
    """Give the union of both times where it is certain: both are known, and one of them is nothing."""
    if migrations_ns is None or faults_ns is None or (migrations_ns and faults_ns):
        return None
    return migrations_ns + faults_ns


def _larger(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _by_cause(by_cause: Mapping[str | None, Mapping[str, Any]] | None) -> dict[str, int | None]:
    """Give bytes by cause: of a cause without migrations 0, of migrations that were not recorded null."""
    names = (*_CAUSES, "other")
    if by_cause is None:
        return {f"{name}_bytes": None for name in names}
    found: dict[str, int | None] = dict.fromkeys(names, 0)
    for cause, figures in by_cause.items():
        key = cause if cause in _CAUSES else "other"
        before, more = found[key], figures["bytes"]
        found[key] = None if before is None or more is None else before + more
    return {f"{name}_bytes": value for name, value in found.items()}


def _names(rows: Iterable[Mapping[str, Any]]) -> str | None:
    names = [row["name"] for row in rows]
    if not names or None in names:
        return None
    return ", ".join(sorted(set(names)))


def _machine_gpus(devices: Iterable[Mapping[str, Any]]) -> dict[Any, Mapping[str, Any]]:
    """Take each GPU of the machine once, however many processes name it."""
    return {
        (True, row["gpu_id"])
        if row["gpu_id"] is not None
        else (False, row["pid"], row["device_id"]): row
        for row in devices
    }


def _memory(devices: Iterable[Mapping[str, Any]]) -> int | None:
    sizes = [row["total_memory_bytes"] for row in _machine_gpus(devices).values()]
    return sum(sizes) if sizes and all(sizes) else None


def _fitting(value: Any) -> Any:
    """Leave out a number that no column holds: it is none that a machine could have recorded."""
    return None if isinstance(value, int) and abs(value) > _LARGEST else value
