"""Section "traffic" of a report: what moved, when and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.report.blocks import Block, Text
from nsan.report.sections.saying import (
    Said,
    gpu_word,
    has_rows,
    nothing_moved,
    of_gpus,
    paragraph,
    worst,
)
from nsan.report.shown import Blocks
from nsan.tabular.totals import share
from nsan.units import counted, format_bytes

if TYPE_CHECKING:
    from nsan.report.report import Report

_COLUMNS: Final = (
    "direction",
    "cause",
    "n_migrations",
    "bytes",
    "bytes_fraction",
    "busy_ns",
    "bytes_per_s",
)
_TIMED: Final = ("busy_ns", "bytes_per_s")
_MOST_GPUS: Final = 4


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    if not has_rows(report, "migrations"):
        return Blocks([nothing_moved(report, "migrations", of_faults=False)])
    blocks: list[Block] = [*report.chart("migrations_over_time"), *_matrix(report)]
    blocks += [*report.part(lambda: _prefetcher(report)), *_driver_events(report)]
    return Blocks(blocks)


def _matrix(report: Report) -> Blocks:
    """Show bytes by direction and cause, without times where it is not known which copies overlapped."""
    found = report.frame("traffic_matrix")
    found = found.sort("bytes", descending=True, nulls_last=True, maintain_order=True)
    columns = of_gpus(found, _COLUMNS)
    if report.summary["migrations"]["busy_ns"] is None:
        columns = [name for name in columns if name not in _TIMED]
    blocks = report.table(
        "traffic_matrix", columns=columns, frame=found, title="By direction and cause"
    )
    if report.summary["migrations"]["busy_ns"] is None:
        said = (
            "When copies overlapped, and so how long the GPU was busy with them, is not known: the start times "
            "are too coarse."
        )
        return Blocks([*blocks, Text(said, "note")])
    return blocks


def _prefetcher(report: Report) -> list[Text]:
    """Say what the driver's prefetcher did, for each GPU."""
    found = report.rows_of("prefetch_share")
    if found is None:
        return []
    kinds = report.kinds("prefetch_share", found)
    brought = found.filter(pl.col("fault_bytes") > 0).head(_MOST_GPUS)
    return [paragraph(_prefetched(row, found, kinds)) for row in brought.to_dicts()]


def _prefetched(row: dict[str, Any], found: pl.DataFrame, kinds: dict[str, str]) -> list[Said]:
    where, n = gpu_word(row, found), row["n_pages_prefetched"]
    came = (
        f"Page faults{' of ' + where if where else ''} brought {format_bytes(row['fault_bytes'])}"
    )
    if not n:
        text, used = f"{came}; the driver's prefetcher added nothing.", ("fault_bytes",)
        return [(text, worst(kinds, used))]
    said = [
        (
            f"{came}; {share(row['prefetch_fraction'])} of that the driver's prefetcher added, which spared at "
            f"most {counted(n, 'fault')}.",
            worst(kinds, ("fault_bytes", "prefetch_fraction", "n_pages_prefetched")),
        )
    ]
    unused = row["no_evidence_of_use_bytes"]
    if unused:
        said.append(
            (
                f"At most {format_bytes(unused)} of it ({share(row['no_evidence_of_use_fraction'])}) came for "
                "nothing: it was evicted next, and use leaves no trace.",
                worst(kinds, ("no_evidence_of_use_bytes", "no_evidence_of_use_fraction")),
            )
        )
    return said


def _driver_events(report: Report) -> list[Text]:
    """Say what the driver did against ping-pong, where a profiler recorded it."""
    events = report.summary["driver_events"]
    if not events:
        return []
    listed = ", ".join(
        f"{kind.replace('_', ' ')} {counted(n, 'time')}" for kind, n in events.items()
    )
    return [Text(f"Against ping-pong the driver reported: {listed}.")]
