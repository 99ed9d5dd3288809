"""Fragmentation: memory that the caching allocator reserves, and that no tensor fits into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import polars as pl

from nsan.analysis.advisor.advice import Advice, Level, Number, Rows, Said, Silent
from nsan.analysis.advisor.facts import Facts, hints_at_torch, moved_bytes, number
from nsan.analysis.advisor.rules.allocator import best_setting
from nsan.tabular.totals import share
from nsan.torch_alloc.constants import LARGE_SEGMENT_BYTES
from nsan.units import format_bytes, format_count

FRAGMENTATION: Final = "fragmentation"

_MUCH: Final = 0.1
"""Share of the reserved memory from which on it is much: GMLake gains 15 % on average (domain.md B.2)."""

_SOME: Final = 0.03
"""And from which on it is worth a word: a choice of ours."""

_LEVELS: Final[dict[bool, tuple[Level, Level]]] = {True: ("medium", "low"), False: ("low", "info")}
"""By whether GPU memory was full: of much, and of some. It costs memory only, unless that is short."""

_COLUMNS: Final = (
    "device_id",
    "peak_reserved_bytes",
    "peak_active_bytes",
    "utilization_fraction",
    "baseline_reserved_bytes",
    "stitched_reserved_bytes",
    "saved_bytes",
    "most_saved_bytes",
)


def fragmentation(facts: Facts) -> Iterator[Said]:
    """Advise against reserved memory that stitching of free blocks would save."""
    if not facts.has_snapshot:
        yield _unseen(facts)
        return
    found = facts.rows_of("stitching")
    known = None if found is None else found.drop_nulls(("saved_bytes", "baseline_reserved_bytes"))
    if known is None or known.is_empty():
        reason = "The memory snapshot has no history of allocations to run again."
        yield Silent(FRAGMENTATION, reason, is_known=False)
        return
    row = known.sort("saved_bytes", "device_id", descending=[True, False]).row(0, named=True)
    part = row["saved_bytes"] / max(row["baseline_reserved_bytes"], 1)
    if part < _SOME or row["saved_bytes"] < LARGE_SEGMENT_BYTES:
        yield Silent(FRAGMENTATION, _little(row, part))
        return
    yield _advice(facts, row, part)


def _unseen(facts: Facts) -> Silent:
    if not hints_at_torch(facts):
        reason = (
            "Nothing hints at PyTorch, of whose caching allocator nsan would know the fragments."
        )
        return Silent(FRAGMENTATION, reason)
    reason = "How an allocator uses its memory shows only with a memory snapshot of PyTorch beside the trace."
    return Silent(FRAGMENTATION, reason, is_known=False)


def _little(row: Mapping[str, Any], part: float) -> str:
    used = row["utilization_fraction"]
    said = (
        "" if used is None else f"Tensors used {share(used)} of the reserved memory at the peaks; "
    )
    if row["saved_bytes"] <= 0:
        return f"{said}stitching of free blocks would save nothing (modelled)."
    return (
        f"{said}stitching of free blocks would save {format_bytes(row['saved_bytes'])}, {share(part)} "
        "of it (modelled)."
    )


def _advice(facts: Facts, row: Mapping[str, Any], part: float) -> Advice:
    evicted = moved_bytes(facts, "dtoh", "eviction")
    much, some = _LEVELS[evicted > 0]
    settings = list(_settings(facts))
    saved, reserved = format_bytes(row["saved_bytes"]), format_bytes(row["baseline_reserved_bytes"])
    return Advice(
        rule=FRAGMENTATION,
        title=f"Make the sizes of tensors fit: {saved} of {reserved} reserved are fragments",
        finding=_finding(row, part, evicted),
        numbers=tuple(_numbers(facts, row)),
        rows=(Rows("stitching", pl.DataFrame([{name: row[name] for name in _COLUMNS}])),),
        remedy=(
            "Ask for fewer different sizes: pad batches and texts to a few lengths, and allocate the largest first. "
            + ("A setting helps, too. " if settings else "")
            + "Stitching itself (GMLake) and expandable segments are no remedy for managed memory: what they map is "
            "never managed. Where all fits without managed memory, expandable segments are."
        ),
        calls=tuple(settings) or ("nsan analyse allocator_what_if TRACE  # what other settings would reserve",),
        targets=(),
        check="`nsan analyse allocator_utilization` shows a higher utilization.",
        gate="managed.bytes>-1%",
        level=much if part >= _MUCH else some,
    )  # fmt: skip


def _finding(row: Mapping[str, Any], part: float, evicted: int) -> str:
    used = row["utilization_fraction"]
    said = [
        f"The allocator held {format_bytes(row['peak_reserved_bytes'])} at its peak, and tensors used "
        f"{format_bytes(row['peak_active_bytes'])} of it at theirs"
        + ("." if used is None else f" ({share(used)}).")
    ]
    said.append(
        f"Had free blocks been stitched together, the same requests would have reserved "
        f"{format_bytes(row['stitched_reserved_bytes'])}: {format_bytes(row['saved_bytes'])} ({share(part)}) less "
        f"(modelled), with {format_count(row['n_stitches'])} stitched blocks."
    )
    if evicted:
        said.append(
            f"GPU memory was full, and {format_bytes(evicted)} were evicted: under Unified Memory fragments do not end "
            "in an error, they take part of the room, and other memory is evicted for them."
        )
    else:
        said.append("Nothing was evicted, so this costs memory and no time.")
    return " ".join(said)


def _numbers(facts: Facts, row: Mapping[str, Any]) -> Iterator[Number]:
    yield number(facts, "peak reserved", row["peak_reserved_bytes"], "byte")
    yield number(facts, "peak in use", row["peak_active_bytes"], "byte")
    yield Number("reserved with stitching", row["stitched_reserved_bytes"], "byte", "modelled")
    yield Number("stitching would save", row["saved_bytes"], "byte", "modelled")
    yield number(facts, "at most", row["most_saved_bytes"], "byte")


def _settings(facts: Facts) -> Iterator[str]:
    """Name the settings that would have reserved less."""
    best = best_setting(facts)
    if best is not None:
        saved = format_bytes(-best["difference_bytes"])
        yield f"PYTORCH_CUDA_ALLOC_CONF={best['setting']}  # reserves {saved} less (modelled)"
    rows = facts.rows_of("allocator_what_if")
    if rows is None:
        return
    grow = rows.filter(
        pl.col("setting") == "expandable_segments:True", pl.col("difference_bytes") < 0
    )
    if not grow.is_empty():
        saved = format_bytes(-grow["difference_bytes"][0])
        yield (
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # only without managed memory: {saved} less "
            "(modelled)"
        )
