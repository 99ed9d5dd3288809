"""Section "memory" of a report: was there room for it all, and what was evicted and came back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.catalog import find
from nsan.analysis.memory.oversubscription import RESERVE_BYTES
from nsan.report.blocks import Text
from nsan.report.sections.saying import (
    Said,
    gpu_word,
    has_causes,
    inside,
    kind_of,
    not_recorded,
    paragraph,
    part_of,
    round_time,
    shown,
    unsized,
    without_moves,
    worst,
)
from nsan.report.shown import Blocks
from nsan.tabular.totals import share
from nsan.units import counted, format_bytes

if TYPE_CHECKING:
    from nsan.report.report import Report

_BLOCKS: Final = (
    "va_block",
    "n_evictions",
    "evicted_bytes",
    "refaulted_bytes",
    "premature_bytes",
    "elsewhere_bytes",
    "unreturned_bytes",
    "refaulted_fraction",
)
_TOTALS: Final = (
    "n_evictions",
    "n_va_blocks",
    "evicted_bytes",
    "refaulted_bytes",
    "premature_bytes",
    "elsewhere_bytes",
    "unreturned_bytes",
)
_FEW_BLOCKS: Final = 5
_LEAST: Final = 0.01
"""The least factor that is told as it is."""

_FULL: Final = 1.0
"""Oversubscription factor of a GPU whose memory is exactly full."""

_ENDLESS_NS: Final = 1 << 62
"""Length of a window that holds any capture."""


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    if (nothing := without_moves(report, "evictions and refaults")) is not None:
        return Blocks([nothing])
    if report.is_part:
        said = Text(
            "Evictions, refaults and oversubscription need the whole capture, as what came before decides: "
            "see the report without filters.",
            "note",
        )
        rest = [*_working_set(report)]
        return Blocks([said, *([paragraph(rest)] if rest else [])])
    room = report.frame("oversubscription_factor")
    if evictions := _groups(report, "eviction"):
        return _of_evictions(report, room, evictions)
    rest = [*_factor(report, room), *_working_set(report), *unsized(report)]
    return Blocks([paragraph([_not_evicted(report), *rest])])


def _groups(report: Report, cause: str) -> list[Mapping[str, Any]]:
    """Choose the groups of migrations of one cause."""
    return [
        group for group in report.summary["migrations"]["groups"] or () if group["cause"] == cause
    ]


def _not_evicted(report: Report) -> Said:
    if not has_causes(report):
        said = (
            "Whether memory was evicted is not known, as the recording names no causes of copies."
        )
        return said, ""
    if any(group["direction"] == "dtoh" for group in _groups(report, "unknown")):
        return (
            "No copy is known to be an eviction, but of some that left the GPU no cause is known.",
            "",
        )
    return "Nothing was evicted: there was room for all that the GPU used.", kind_of(
        report, "recorded"
    )


def _of_evictions(report: Report, room: pl.DataFrame, evictions: list[Mapping[str, Any]]) -> Blocks:
    """Write what was evicted, and what of it came back."""
    blocks = report.frame("refaults_by_va_block")
    rest = [*_factor(report, room), *_working_set(report), *_trust(report), *unsized(report)]
    refaulted = bool(blocks["refaulted_bytes"].sum())
    return (
        Blocks([paragraph(_came_back(report, blocks, evictions)), paragraph(rest)])
        + report.chart("memory_held")
        + (report.chart("refault_distance") if refaulted else ())
        + _by_gpu(report, blocks)
        + (_by_block(report, blocks) if refaulted else ())
    )


def _came_back(
    report: Report, blocks: pl.DataFrame, evictions: list[Mapping[str, Any]]
) -> Iterator[Said]:
    """Say what was evicted, and how much of it came back how soon."""
    sizes = [group["bytes"] for group in evictions]
    known = sum(size for size in sizes if size is not None)
    what = f"{format_bytes(known)} were evicted" if None not in sizes else "Memory was evicted"
    yield f"{what}: the GPU's memory was full.", kind_of(report, "recorded")
    if blocks.is_empty():
        return
    kind = worst(report.kinds("refaults_by_va_block", blocks), ["evicted_bytes", "refaulted_bytes"])
    left = int(blocks["evicted_bytes"].sum())
    back, soon = (int(blocks[name].sum()) for name in ("refaulted_bytes", "premature_bytes"))
    n = blocks.select("pid", "va_block").n_unique()
    from_blocks = (
        f"in {counted(int(blocks['n_evictions'].sum()), 'eviction')} of {counted(n, 'VA block')}"
    )
    if not back:
        yield f"None of it came back to the GPU that it left, {from_blocks}.", kind
        return
    within = "all of that" if soon == back else format_bytes(soon)
    yield (
        f"{part_of(back, left).capitalize()} of it, {format_bytes(back)}, came back to the GPU that it left "
        f"({within} within 1 s), {from_blocks}.",
        kind,
    )


def _factor(report: Report, room: pl.DataFrame) -> Iterator[Said]:
    """Say by how much managed memory exceeds the room for it, and by which definition."""
    found = room.filter(pl.col("device_id").is_not_null()).sort(
        "oversubscription_factor",
        "pid",
        "device_id",
        descending=[True, False, False],
        nulls_last=True,
    )
    if found.is_empty():
        return
    row = found.row(0, named=True)
    gpu = gpu_word(row, found) or "the GPU"
    kinds = report.kinds("oversubscription_factor", room)
    if row["managed_peak_bytes"] is None:
        yield _resident(report, row, gpu, worst(kinds, ["resident_peak_bytes"]))
        return
    peak = (
        f"The program held {format_bytes(row['managed_peak_bytes'])} of managed memory at its peak"
    )
    factor = row["oversubscription_factor"]
    if factor is None:
        what = (
            "the size of the GPU"
            if row["capacity_bytes"] is None
            else "whether there was room at all"
        )
        yield f"{peak}; {what} is not known.", worst(kinds, ["managed_peak_bytes"])
        return
    times = f"{factor:.2f}" if factor >= _LEAST else f"less than {_LEAST}"
    yield (
        f"{peak}, {times} times the {format_bytes(row['available_bytes'])} that {gpu} had for it: the "
        f"oversubscription factor (F1; GPU memory less other memory and {RESERVE_BYTES // 1_000_000} MB "
        f"of reserve){_otherwise(row)}.",
        worst(kinds, ["managed_peak_bytes", "oversubscription_factor"]),
    )
    if row["evicted_bytes"] and factor < _FULL and row["observed_factor"]:
        yield (
            "So it should all have fitted, yet there were evictions: less was free than the GPU's size says. "
            f"By what was known to be resident it is {row['observed_factor']:.2f} at most.",
            worst(kinds, ["observed_factor"]),
        )


def _resident(report: Report, row: Mapping[str, Any], gpu: str, kind: str) -> Said:
    """Say what is known of managed memory where its allocations are not."""
    why = inside(not_recorded(report, "allocations"))
    if not row["resident_peak_bytes"]:  # none came by a copy: first touches are not seen
        said = (
            f"How much managed memory there was, and how much of it on {gpu}, is not known: {why}."
        )
        return said, ""
    of_size = f" of the {format_bytes(row['capacity_bytes'])}" if row["capacity_bytes"] else ""
    return (
        f"At the peak {format_bytes(row['resident_peak_bytes'])}{of_size} of {gpu} were known to hold managed "
        f"data; how much there was in all is not known: {why}.",
        kind,
    )


def _otherwise(row: Mapping[str, Any]) -> str:
    """Write the factor as others define it, where memory does not fit."""
    if row["oversubscription_factor"] < _FULL:
        return ""
    return (
        f"; as others count, {row['f2']:.0%} of the GPU (F2), {row['f3']:.0%} without room (F3), room for "
        f"{row['f4']:.0%} (F4)"
    )


def _working_set(report: Report) -> Iterator[Said]:
    """Say how much different memory came in the busiest window, or in all of a shorter capture."""
    window = find("working_set").options["window_ns"]
    span, first = report.summary["duration_ns"], report.summary["first_ns"]
    is_short = span is not None and span <= window and first >= 0
    found = report.frame("working_set", {"window_ns": _ENDLESS_NS} if is_short else None)
    if found.is_empty():
        return
    row = found.sort("unique_bytes", "start_ns", descending=[True, False]).row(0, named=True)
    gpu = gpu_word(row, found) or "the GPU"
    whole = "the part that was asked for" if report.is_part else "the whole capture"
    when = (
        f"Over {whole}"
        if is_short
        else f"In the busiest of the windows of {round_time(window)} (a fixed grid)"
    )
    yield (
        f"{when} {format_bytes(row['unique_bytes'])} of different memory came to {gpu} or faulted there: a lower "
        "bound of what it worked on, as use of what is there leaves no trace.",
        worst(report.kinds("working_set", found), ["unique_bytes"]),
    )


def _trust(report: Report) -> Iterator[Said]:
    """Say how far what was resident can be told from the copies."""
    found = report.frame("residency_checks")
    whole, odd = (int(found[name].sum()) for name in ("total_bytes", "inconsistent_bytes"))
    if not whole:
        return
    kind = worst(report.kinds("residency_checks", found), ["total_bytes", "inconsistent_bytes"])
    if odd:
        yield (
            f"What was resident is followed by copies, and {share(odd / whole)} of it does not fit together "
            "(read duplication, lost rows, or memory released unseen).",
            kind,
        )
    else:
        yield "What was resident is followed by copies, and these fit together.", kind


def _by_gpu(report: Report, blocks: pl.DataFrame) -> Blocks:
    """Show the totals by GPU, where there are several."""
    if blocks.select("pid", "device_id").n_unique() < 2:
        return Blocks()
    found = report.frame("refault_totals")
    columns = shown("refault_totals", found, _TOTALS)
    return report.table("refault_totals", columns=columns, title="Evictions by GPU")


def _by_block(report: Report, blocks: pl.DataFrame) -> Blocks:
    return report.table(
        "refaults_by_va_block",
        columns=shown("refaults_by_va_block", blocks, _BLOCKS),
        rows=_FEW_BLOCKS,
        title="VA blocks (2 MiB) of which most came back; premature: within 1 s",
    )
