"""How far the replay of a history can be trusted: what of the file it predicted."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.allocator.blocks import GPU
from nsan.analysis.allocator.replayed import REPLAY_KIND, REPLAY_READS, replays_of
from nsan.analysis.catalog import analysis
from nsan.analysis.result import Result, derived, recorded

REPLAY_CHECK: Final = Result(
    "replay_check",
    "one GPU of the snapshot",
    (
        GPU,
        recorded("n_entries", pl.Int64, "entries", "Entries of its history."),
        derived("is_complete", pl.Boolean, "flag", "It begins with an empty allocator."),
        recorded("n_allocs", pl.Int64, "entries", "Allocations in it."),
        derived("n_addresses_exact", pl.Int64, "entries", "Of these, where the rules predicted."),
        recorded("n_segments_made", pl.Int64, "entries", "New segments in it."),
        derived("n_segments_exact", pl.Int64, "entries", "Predicted in size and moment."),
        recorded("n_final_blocks", pl.Int64, "blocks", "Blocks when the snapshot was taken."),
        derived("n_final_blocks_exact", pl.Int64, "blocks", "As the replay left them."),
        derived("first_difference", pl.Int64, "id", "First entry that differs; null: none."),
        derived("n_skipped", pl.Int64, "entries", "Of no sense where they stand: skipped."),
        derived(
            "n_forced_frees", pl.Int64, "blocks", "Whose free is missing: others took the place."
        ),
        derived("n_contradictions", pl.Int64, "entries", "That do not fit the state at the end."),
        derived("tie_break", pl.String, "label", "Which of equal free blocks is taken first."),
        REPLAY_KIND,
    ),
    nothing="The snapshot has neither a segment nor a history.",
)


@analysis(
    question="Does the replay of the history agree with what was recorded?",
    result=REPLAY_CHECK,
    reads=REPLAY_READS,
    complexity="O(n log n) for n entries; the replay is a loop",
    source="allocator.md 3.2, 8, 9",
)
def replay_check(
    segments: pl.LazyFrame,
    blocks: pl.LazyFrame,
    allocator_events: pl.LazyFrame,
    allocator_settings: pl.LazyFrame,
) -> pl.LazyFrame:
    """Count what the replay predicted as it was recorded.

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
    LazyFrame, ``REPLAY_CHECK``
        By GPU. Where the replay was wrong, it took what was recorded and went on.

    Examples
    --------
    >>> from nsan.torch_alloc.tables import SNAPSHOT_TABLES as tables
    >>> replay_check(*(tables[name].empty() for name in REPLAY_READS)).collect().height
    0
    """

    def build() -> pl.DataFrame:
        return replays_of(segments, blocks, allocator_events, allocator_settings).checks

    return REPLAY_CHECK.from_rows(build)
