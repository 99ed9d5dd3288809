"""Section "memory" of a report: was there room for it all, and what was evicted and came back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.memory.oversubscription import RESERVE_BYTES
from nsan.report.blocks import Text
from nsan.report.sections.saying import (
    Said,
    gpu_word,
    has_causes,
    has_rows,
    kind_of,
    not_recorded,
    nothing_moved,
    paragraph,
    part_of,
    round_time,
    shown,
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


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    if not has_rows(report, "migrations"):
        return Blocks([nothing_moved(report, "evictions and refaults")])
    if report.is_part:
        said = Text(
            "Evictions, refaults and oversubscription need the whole capture, as what came before decides: "
            "see the report without filters.",
            "note",
        )
        rest = [*_working_set(report)]
        return Blocks([said, *([paragraph(rest)] if rest else [])])
    room = report.frame("oversubscription_factor")
    evicted = _evicted(report)
    if evicted:
        return _of_evictions(report, room, evicted)
    return Blocks(
        [paragraph([_not_evicted(report), *_factor(report, room), *_working_set(report)])]
    )


def _evicted(report: Report) -> int:
    groups = report.summary["migrations"]["groups"] or ()
    return sum(group["bytes"] or 0 for group in groups if group["cause"] == "eviction")


def _not_evicted(report: Report) -> Said:
    if not has_causes(report):
        return "Whether memory was evicted is not known, as the log names no causes of copies.", ""
    return "Nothing was evicted: there was room for all that the GPU used.", kind_of(
        report, "recorded"
    )


def _of_evictions(report: Report, room: pl.DataFrame, evicted: int) -> Blocks:
    """Write what was evicted, and what of it came back."""
    blocks = report.frame("refaults_by_va_block")
    rest = [*_factor(report, room), *_working_set(report), *_trust(report)]
    refaulted = bool(blocks["refaulted_bytes"].sum())
    return (
        Blocks([paragraph(_came_back(report, blocks, evicted)), paragraph(rest)])
        + report.chart("memory_held")
        + (report.chart("refault_distance") if refaulted else ())
        + _by_gpu(report, blocks)
        + (_by_block(report, blocks) if refaulted else ())
    )


def _came_back(report: Report, blocks: pl.DataFrame, evicted: int) -> Iterator[Said]:
    """Say what was evicted, and how much of it came back how soon."""
    yield (
        f"{format_bytes(evicted)} were evicted: the GPU's memory was full.",
        kind_of(report, "recorded"),
    )
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
        size = row["capacity_bytes"]
        of_size = f" of {format_bytes(size)}" if size else ""
        yield (
            f"At most {format_bytes(row['resident_peak_bytes'])}{of_size} of {gpu} were known to hold managed "
            f"data; how much there was in all is not known: {not_recorded(report, 'allocations')}.",
            worst(kinds, ["resident_peak_bytes"]),
        )
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


def _otherwise(row: Mapping[str, Any]) -> str:
    """Write the factor as others define it, where memory does not fit."""
    if row["oversubscription_factor"] < _FULL:
        return ""
    return (
        f"; as others count, {row['f2']:.0%} of the GPU (F2), {row['f3']:.0%} without room (F3), room for "
        f"{row['f4']:.0%} (F4)"
    )


def _working_set(report: Report) -> Iterator[Said]:
    """Say how much memory was used in a short time."""
    found = report.frame("working_set")
    if found.is_empty():
        return
    row = found.sort("unique_bytes", "start_ns", descending=[True, False]).row(0, named=True)
    gpu = gpu_word(row, found)
    length = round_time(row["end_ns"] - row["start_ns"])
    yield (
        f"Within {length} at most {format_bytes(row['unique_bytes'])} of different memory moved or faulted"
        f"{f' on {gpu}' if gpu else ''}: a lower bound of the working set, as use of what is there leaves no "
        "trace.",
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
    return report.table(
        "refault_totals", columns=shown("refault_totals", blocks, _TOTALS), title="Evictions by GPU"
    )


def _by_block(report: Report, blocks: pl.DataFrame) -> Blocks:
    return report.table(
        "refaults_by_va_block",
        columns=shown("refaults_by_va_block", blocks, _BLOCKS),
        rows=_FEW_BLOCKS,
        title="VA blocks (2 MiB) of which most came back; premature: within 1 s",
    )
