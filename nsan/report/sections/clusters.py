"""Section "clusters" of a report: where in time and address space page faults crowd."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.catalog import find
from nsan.report.blocks import Text, quoted
from nsan.report.sections.saying import (
    Said,
    added_up,
    did_not_fault,
    gpu_word,
    has_causes,
    has_rows,
    inside,
    not_recorded,
    paragraph,
    part_of,
    shown,
    unsized,
    without_moves,
    worst,
)
from nsan.report.shown import Blocks
from nsan.units import counted, format_address, format_bytes, format_time

if TYPE_CHECKING:
    from nsan.report.report import Report

_CLUSTERS: Final = (
    "start_ns",
    "duration_ns",
    "va",
    "n_va_blocks",
    "bytes",
    "traffic_fraction",
    "n_fault_rows",
    "kernel",
    "pattern",
)
_PATTERNS: Final = (
    "kernel",
    "allocation",
    "va",
    "region_bytes",
    "faulted_bytes",
    "pattern",
    "r2",
    "n_passes",
    "stride_bytes",
    "density_fraction",
)
_MOST: Final = 3
"""Clusters whose share the first sentence tells."""

_ONLY_FAULTS: Final = (
    "There are no fault clusters: these are made of copies to the GPU, and no managed memory moved."
)
_NO_FAULTS: Final = (
    "There are no fault clusters: GPU faults were traced and none was recorded, and no copy names a cause that would "
    "tell of one."
)


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    moved = not report.is_recorded("migrations") or has_rows(report, "migrations")
    if has_rows(report, "gpu_faults") and not moved:
        return Blocks([Text(_ONLY_FAULTS, "note")])
    if (nothing := without_moves(report, "fault clusters", of_faults=True)) is not None:
        return Blocks([nothing])
    if did_not_fault(report):
        return Blocks([Text(_NO_FAULTS, "note")])
    found = report.frame("fault_clusters")
    largest = found.filter(pl.col("cluster_id") >= 0).sort(
        "bytes", "pid", "device_id", "cluster_id", descending=[True, False, False, False]
    )
    if largest.is_empty():
        came = int(found["bytes"].sum())
        why = (
            f"the {format_bytes(came)} that faults brought to a GPU lie apart"
            if came
            else "faults brought nothing to a GPU"
        )
        return Blocks([Text(f"There are no fault clusters: {why}.", "note")])
    none = find("access_patterns").result.empty().collect()
    patterns, no_patterns = report.attempt(lambda: _patterns(report), none)
    unsaid: list[Said] = []
    episodes, no_episodes = report.attempt(lambda: [*_episodes(report)], unsaid)
    said = [
        *_crowds(report, found, largest, patterns),
        *episodes,
        (_evidence(report), ""),
        *unsized(report),
    ]
    # Shares are of the GPU of a process: beside each other they look as if they were of all.
    several = largest.select("pid", "device_id").n_unique() > 1
    columns = [name for name in _CLUSTERS if not (several and name == "traffic_fraction")]
    return (
        Blocks([paragraph(said)])
        + report.chart("address_time_map")
        + report.table(
            "fault_clusters",
            frame=largest,
            columns=shown("fault_clusters", largest, columns),
            title="The largest clusters",
        )
        + _walks(report, patterns)
        + [*no_patterns, *no_episodes]
    )


def _patterns(report: Report) -> pl.DataFrame:
    """Ask for the walks through allocations, those that moved most first."""
    order = ("faulted_bytes", "pid", "device_id", "kernel", "va")
    return report.frame("access_patterns").sort(order, descending=[True, *[False] * 4])


def _crowds(
    report: Report, found: pl.DataFrame, largest: pl.DataFrame, patterns: pl.DataFrame
) -> Iterator[Said]:
    """Say how much of what faults brought is in how few clusters, and where the largest lies."""
    whole = int(found["bytes"].sum())
    kinds = report.kinds("fault_clusters", found)
    kind = worst(kinds, ["bytes", "traffic_fraction"])
    n, top = largest.height, largest.row(0, named=True)
    first = part_of(top["bytes"], whole)
    brought = f"of the {format_bytes(whole)} that faults brought to {_gpus(found)}"
    if n == 1:
        yield f"One cluster holds {first} {brought}: {_place(top, found, patterns)}.", kind
        return
    few = largest.head(_MOST)
    inside = part_of(int(few["bytes"].sum()), whole)
    yield (
        f"{counted(n, 'cluster')}; the {'two' if few.height == 2 else 'three'} largest hold {inside} "
        f"{brought}, the largest {first}: {_place(top, found, patterns)}.",
        kind,
    )


def _gpus(found: pl.DataFrame) -> str:
    return "the GPU" if found["device_id"].n_unique() == 1 else "the GPUs"


def _place(row: Mapping[str, Any], found: pl.DataFrame, patterns: pl.DataFrame) -> str:
    """Say when and where a cluster is, in whose memory, and which kernel ran."""
    gpu = gpu_word(row, found)
    parts = [
        *([f"on {gpu}"] if gpu else []),
        f"from {format_time(row['start_ns'])} to {format_time(row['end_ns'])}",
        f"in {counted(row['n_va_blocks'], 'VA block')} from `{format_address(row['va'])}` on",
    ]
    held = patterns.filter(
        pl.col("is_allocation"),
        pl.col("pid").eq_missing(row["pid"]),
        pl.col("va") <= row["va"],
        row["va"] + row["span_bytes"] <= pl.col("va") + pl.col("region_bytes").cast(pl.UInt64),
    )
    if not held.is_empty():
        about = held.row(0, named=True)
        name = about["allocation"]
        size = f"an allocation of {format_bytes(about['region_bytes'])}"
        parts.append(f"in {size}" + (f", {quoted(name)}" if name else ""))
    if row["kernel"] is not None:
        others = (row["n_kernels"] or 1) - 1
        more = f" and {counted(others, 'other kernel')}" if others else ""
        parts.append(f"while {quoted(row['kernel'])}{more} ran")
    return ", ".join(parts)


def _episodes(report: Report) -> Iterator[Said]:
    """Say in how many stretches of time the GPU faulted."""
    found = report.frame("fault_episodes")
    if found.is_empty():
        return
    kind = worst(report.kinds("fault_episodes", found), ["episode_id", "duration_ns"])
    lasted = format_time(int(found["duration_ns"].sum()))
    if found.height == 1:
        yield f"The GPU faulted in one stretch of {lasted}.", kind
        return
    # What parts two stretches is known where a GPU has two.
    parted = found.filter(pl.len().over("pid", "device_id") > 1)["gap_ns"].drop_nulls().to_list()
    apart = f" with pauses above {format_time(max(parted))} between them" if parted else ""
    yield (
        f"Faults came in {counted(found.height, 'stretch', 'stretches')} of time{apart}, {lasted} together"
        f"{added_up(found)}.",
        kind,
    )


def _evidence(report: Report) -> str:
    """Say on what the clusters rest."""
    if not report.is_recorded("gpu_faults"):
        return (
            f"This rests on copies alone, as {inside(not_recorded(report, 'gpu_faults'))}: what a GPU touches "
            "first is copied from nowhere, and not seen."
        )
    if not has_rows(report, "gpu_faults"):
        return "This rests on copies alone: GPU faults were traced, yet no row of one is there."
    why = "" if has_causes(report) else ", whatever caused them, as the recording names no causes"
    return (
        f"Clusters are made of copies to the GPU{why}; a fault row counts where its batch copied, and in "
        "none if it copied nothing."
    )


def _walks(report: Report, patterns: pl.DataFrame) -> Blocks:
    """Show how kernels walk through arrays, where enough batches tell."""
    told = patterns.filter(pl.col("pattern") != "too_few")
    if told.is_empty():
        return Blocks()
    return report.table(
        "access_patterns",
        frame=told,
        columns=shown("access_patterns", told, _PATTERNS),
        title="How kernels walk through arrays, as far as their faults show it",
    )
