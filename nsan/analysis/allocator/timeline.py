"""What the allocator held over time, from its history."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.allocator.blocks import GPU
from nsan.analysis.allocator.replayed import LEVELS, REPLAY_KIND, REPLAY_READS, replays_of
from nsan.analysis.catalog import analysis
from nsan.analysis.result import Result, derived, recorded
from nsan.torch_alloc.tables import ACTION

ALLOCATOR_TIMELINE: Final = Result(
    "allocator_timeline",
    "the level after one entry of the history that changed it, or (sequence -1) before the first",
    (
        GPU,
        recorded("sequence", pl.Int64, "id", "Place of the entry in the GPU's history, or -1."),
        derived("time_ns", pl.Int64, "ns", "Since the GPU's first entry; null: no times recorded."),
        recorded("action", ACTION, "label", "What changed it; null before the first."),
        derived("reserved_bytes", pl.Int64, "byte", "Held from the driver."),
        derived("allocated_bytes", pl.Int64, "byte", "In blocks that tensors hold."),
        derived("active_bytes", pl.Int64, "byte", "The same and blocks whose free is pending."),
        derived("requested_bytes", pl.Int64, "byte", "Asked for in active blocks."),
        derived("cached_bytes", pl.Int64, "byte", "Reserved less active."),
        REPLAY_KIND,
    ),
    nothing="The snapshot has no history: record one with torch.cuda.memory._record_memory_history.",
)


@analysis(
    question="How did reserved, allocated, active and cached memory change over time?",
    result=ALLOCATOR_TIMELINE,
    reads=REPLAY_READS,
    complexity="O(n log n) for n entries; the replay is a loop",
    source="allocator.md 4.1, 8",
)
def allocator_timeline(
    segments: pl.LazyFrame,
    blocks: pl.LazyFrame,
    allocator_events: pl.LazyFrame,
    allocator_settings: pl.LazyFrame,
) -> pl.LazyFrame:
    """List the levels after each entry that changed one of them.

    A partial history starts at the level that it began with, which the state at its end fixes.

    Parameters
    ----------
    segments, blocks : LazyFrame
        Tables of a snapshot: the state at the end.
    allocator_events : LazyFrame, ``ALLOCATOR_EVENTS``
        The history, in any order.
    allocator_settings : LazyFrame, ``ALLOCATOR_SETTINGS``
        Settings, among them the version.

    Returns
    -------
    LazyFrame, ``ALLOCATOR_TIMELINE``
        By GPU and sequence. ``allocated_bytes`` falls when a free is requested, ``active_bytes`` and
        ``requested_bytes`` when it is completed.

    Examples
    --------
    >>> from nsan.torch_alloc.tables import SNAPSHOT_TABLES as tables
    >>> allocator_timeline(*(tables[name].empty() for name in REPLAY_READS)).collect().height
    0
    """

    def build() -> pl.DataFrame:
        found = replays_of(segments, blocks, allocator_events, allocator_settings)
        before = (pl.col(name).shift(1).over("device_id") for name in LEVELS)
        changed = [
            (pl.col(name) != old).fill_null(value=True)
            for name, old in zip(LEVELS, before, strict=True)
        ]
        return (
            found.series.filter(pl.any_horizontal(changed))
            .with_columns(cached_bytes=pl.col("reserved_bytes") - pl.col("active_bytes"))
            .join(
                found.checks.select("device_id", "replay_kind"),
                on="device_id",
                how="left",
                maintain_order="left",
            )
        )

    return ALLOCATOR_TIMELINE.from_rows(build)
