"""Section "ping_pong" of a report: pages that faults move to and fro between processors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.catalog import find
from nsan.report.blocks import Text
from nsan.report.sections.saying import (
    Said,
    has_causes,
    has_rows,
    paragraph,
    round_time,
    shown,
    unsized,
    without_moves,
    worst,
)
from nsan.report.shown import Blocks
from nsan.tabular.totals import share
from nsan.units import counted, format_bytes, format_count

if TYPE_CHECKING:
    from nsan.report.report import Report

_RUNS: Final = (
    "va",
    "bytes",
    "processors",
    "n_moves",
    "n_moves_total",
    "moved_bytes",
    "first_ns",
    "last_ns",
)
_BLOCKS: Final = (
    "va_block",
    "bytes",
    "thrashing_bytes",
    "n_moves",
    "moved_bytes",
    "first_ns",
    "last_ns",
)
_FEW: Final = 5


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    if (nothing := without_moves(report, "pages that bounce")) is not None:
        return Blocks([nothing])
    found = report.frame("ping_pong")
    if found.is_empty():
        return Blocks([Text(_none(report), "note"), *_measures(report)])
    runs = found.sort("moved_bytes", "n_moves", "pid", "va", descending=[True, True, False, False])
    blocks = report.frame("ping_pong_by_va_block").sort(
        "moved_bytes", "pid", "va_block", descending=[True, False, False]
    )
    said = Blocks([paragraph(_bounced(report, found, blocks)), *_measures(report)]) + report.table(
        "ping_pong",
        frame=runs,
        columns=shown("ping_pong", found, _RUNS),
        rows=_FEW,
        title="Pages that bounce, those that moved most first (moves: longest chain, and in all)",
    )
    if blocks.height == 1:
        return said
    return said + report.table(
        "ping_pong_by_va_block",
        frame=blocks,
        columns=shown("ping_pong_by_va_block", blocks, _BLOCKS),
        rows=_FEW,
        title="VA blocks (2 MiB) that hold them",
    )


def _window() -> str:
    return round_time(find("ping_pong").options["window_ns"])


def _none(report: Report) -> str:
    """Say that there is none, and on what that rests."""
    what = "copy that a page fault caused" if has_causes(report) else "copy, whatever caused it,"
    return (
        f"No page bounced: no {what} moved a page on to another processor within {_window()} of the move "
        "before, the time in which the driver looks for it. To look for slower bouncing: `nsan analyse "
        "ping_pong TRACE --set window_ns=5000000`."
    )


def _bounced(report: Report, found: pl.DataFrame, blocks: pl.DataFrame) -> Iterator[Said]:
    """Say how much memory bounced between which processors, and what that moved."""
    kinds = report.kinds("ping_pong", found)
    size, moved = int(found["bytes"].sum()), int(found["moved_bytes"].sum())
    whole = report.summary["migrations"]["bytes"]
    of_all = f", {share(moved / whole)} of all bytes that moved" if whole else ""
    places = found.group_by("processors").agg(pl.col("moved_bytes").sum())
    most = places.sort("moved_bytes", "processors", descending=[True, False])["processors"][0]
    between = " and ".join(str(most).rsplit(", ", 1))
    yield (
        f"{format_bytes(size)} in {counted(blocks.height, 'VA block')} bounced between {between}, each move "
        f"within {_window()} of the one before: {format_bytes(moved)} were copied for that{of_all}.",
        worst(kinds, ["bytes", "moved_bytes"]),
    )
    thrashing = int(found.filter("is_thrashing")["bytes"].sum())
    rule = f"{format_count(find('ping_pong').options['threshold'])} such moves in a row"
    said = f"{format_bytes(thrashing)} of it" if thrashing < size else "All of it"
    none = f"None of it made {rule}, at which the driver acts."
    yield (
        f"{said} made {rule}, at which the driver acts against it." if thrashing else none,
        worst(kinds, ["is_thrashing"]),
    )


def _measures(report: Report) -> Iterator[Text]:
    """Say what the driver did against it, as far as a recording tells."""
    said: list[Said] = []
    if events := report.summary["driver_events"]:
        kinds = ", ".join(
            f"{kind.replace('_', ' ')} {counted(n, 'time')}" for kind, n in sorted(events.items())
        )
        said.append((f"The driver reported (rows of the log) {kinds}.", "recorded"))
    if has_rows(report, "gpu_faults"):
        latency = report.frame("batch_latency")
        held = int(latency.filter(pl.col("outcome") == "throttled")["n_batches"].sum())
        if held:
            said.append(
                (
                    f"In {counted(held, 'batch', 'batches')} it held a fault back (throttled: the same page "
                    "faulted again at once, and nothing was copied).",
                    worst(report.kinds("batch_latency", latency), ["outcome", "n_batches"]),
                )
            )
    if said := [*said, *unsized(report)]:
        yield paragraph(said)
