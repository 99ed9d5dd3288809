"""What a replay writes down: one row per tensor, one per segment, the sums after every entry."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from nsan.torch_alloc.blocks import Block, Segment
from nsan.torch_alloc.history import ALLOC, Entries
from nsan.torch_alloc.tables import POOL_SIZE

Numbers = npt.NDArray[np.int64]

NEVER = -1
"""In place of an entry: before the history began, or not until it ended."""


@dataclass
class SegmentRow:
    """A segment that was there at some time; of an expandable one the bytes are the most mapped."""

    segment: Segment
    made: int
    n_bytes: int
    mapped: int
    freed: int = NEVER


class Books:
    """The notes of a replay; entries are given by their place in the history.

    Parameters
    ----------
    n_tensors : int
        Tensors that will be noted at most: those of the start, then one per alloc entry.

    Attributes
    ----------
    n_noted, n_at_start : int
        Tensors noted so far, and those that were there before the history.
    block_bytes, requested_bytes, segment_rows : array of int
        Per tensor: size of its block, its request, the place of its segment in ``segments``.
    va, allocated, requested, completed : array of int
        Per tensor: address, and the entries of its allocation and of its free.
    state_rows : dict of int to int
        Place in the snapshot's blocks of the tensors that were there from before the history to its end.
    segments : list of SegmentRow
        Every segment.
    reserved_changes : list of (int, int)
        Entry and bytes, wherever the reserved bytes change.
    """

    def __init__(self, n_tensors: int) -> None:
        self.n_noted = self.n_at_start = 0
        self.va = array("q", bytes(8 * n_tensors))
        self.block_bytes = array("q", bytes(8 * n_tensors))
        self.requested_bytes = array("q", bytes(8 * n_tensors))
        self.segment_rows = array("q", bytes(8 * n_tensors))
        self.allocated = array("q", [NEVER]) * n_tensors
        self.requested = array("q", [NEVER]) * n_tensors
        self.completed = array("q", [NEVER]) * n_tensors
        self.pending_at_start: list[int] = []
        self.state_rows: dict[int, int] = {}
        self.segments: list[SegmentRow] = []
        self.reserved_changes: list[tuple[int, int]] = []

    def start_tensor(self, block: Block) -> None:
        """Note a block in use before the history; its tag becomes its row."""
        row = self.n_noted
        self.va[row] = block.va
        self.requested_bytes[row] = block.requested_bytes
        self.tensor(block)
        self.n_at_start = self.n_noted

    def tensor(self, block: Block) -> None:
        """Note a block that the next alloc entry handed out; its tag becomes its row."""
        row = block.tag = self.n_noted
        self.n_noted = row + 1
        self.block_bytes[row] = block.n_bytes
        self.segment_rows[row] = block.segment.tag

    def finish(self, entries: Entries, stop: int) -> None:
        """Add what the alloc entries before a place say themselves: each has handed out one block."""
        places = [at for at, action in enumerate(entries.actions[:stop]) if action == ALLOC]
        rows = slice(self.n_at_start, self.n_noted)
        self.allocated[rows] = array("q", places)
        self.va[rows] = array("q", [entries.va[at] for at in places])
        self.requested_bytes[rows] = array("q", [entries.n_bytes[at] for at in places])

    def segment(self, segment: Segment, at: int, n_bytes: int) -> None:
        """Note a segment; its tag becomes its row."""
        segment.tag = len(self.segments)
        self.segments.append(SegmentRow(segment, at, n_bytes, n_bytes))

    def series_frame(self, events: pl.DataFrame) -> pl.DataFrame:
        """Add up what every entry changed, beside the entries that were replayed."""
        n, count = events.height, self.n_noted
        sizes = _numbers(self.block_bytes)[:count]
        asked = _numbers(self.requested_bytes)[:count]
        made = _numbers(self.allocated)[:count]
        requested = _numbers(self.requested)[:count]
        completed = _numbers(self.completed)[:count]
        held = sizes.copy()
        held[self.pending_at_start] = 0
        changes = np.array(self.reserved_changes, dtype=np.int64).reshape(-1, 2)
        moved = self._moved(events, sizes, (made, requested, completed))
        return events.select("sequence", "time_us", "action", "va").with_columns(
            moved,
            _running("reserved_bytes", n, (changes[:, 0], changes[:, 1]), None),
            _running("allocated_bytes", n, (made, held), (requested, held)),
            _running("active_bytes", n, (made, sizes), (completed, sizes)),
            _running("requested_bytes", n, (made, asked), (completed, asked)),
        )

    @staticmethod
    def _moved(
        events: pl.DataFrame, sizes: Numbers, places: tuple[Numbers, Numbers, Numbers]
    ) -> pl.Series:
        """Give the size of the block that each entry gave or freed; null for other entries."""
        made, *freed = places
        moved = np.full(events.height, NEVER, dtype=np.int64)
        moved[made[made >= 0]] = sizes[made >= 0]
        # A block that had to go for want of a free of its own was not moved by the entry it went at.
        is_free = events["action"].is_in(["free_requested", "free_completed"])
        of_free = is_free.fill_null(value=False).to_numpy()
        for at in freed:
            chosen = np.flatnonzero(at >= 0)
            chosen = chosen[of_free[at[chosen]]]
            moved[at[chosen]] = sizes[chosen]
        return (
            pl.select(
                pl.when(pl.lit(pl.Series("block_bytes", moved)) != NEVER).then(
                    pl.lit(pl.Series(moved))
                )
            )
            .to_series()
            .alias("block_bytes")
        )

    def tensors_frame(self, events: pl.DataFrame, blocks: pl.DataFrame) -> pl.DataFrame:
        """Give one row per tensor with the times and stacks of its entries."""
        count = self.n_noted
        segments = self.segments_frame(events).select(
            pl.col("va").alias("segment_va"),
            pl.col("bytes").alias("segment_bytes"),
            "stream",
            "pool",
        )
        rows = pl.DataFrame(
            {
                "va": pl.Series(_numbers(self.va)[:count]).cast(pl.UInt64),
                "block_bytes": pl.Series(_numbers(self.block_bytes)[:count]),
                "requested_bytes": pl.Series(_numbers(self.requested_bytes)[:count]),
            }
        )
        placed = pl.Series(_numbers(self.segment_rows)[:count]).cast(pl.UInt32)
        made = _numbers(self.allocated)[:count]
        requested = _numbers(self.requested)[:count]
        completed = _numbers(self.completed)[:count]
        return rows.hstack(segments[placed] if count else segments.clear()).with_columns(
            _at("alloc_sequence", made, events["sequence"]),
            _at("free_requested_sequence", requested, events["sequence"]),
            _at("free_completed_sequence", completed, events["sequence"]),
            _at("alloc_us", made, events["time_us"]),
            _at("free_us", requested, events["time_us"]),
            self._stacks(_at("stack_id", made, events["stack_id"]), blocks),
        )

    def _stacks(self, recorded: pl.Series, blocks: pl.DataFrame) -> pl.Series:
        """Add the stacks of those that were there before the history, which the snapshot has."""
        if not self.state_rows:
            return recorded
        rows = list(self.state_rows)
        return recorded.scatter(rows, blocks["stack_id"][list(self.state_rows.values())])

    def segments_frame(self, events: pl.DataFrame) -> pl.DataFrame:
        """Give one row per segment."""
        rows = self.segments
        made = np.array([row.made for row in rows], dtype=np.int64)
        freed = np.array([row.freed for row in rows], dtype=np.int64)
        return pl.DataFrame(
            {
                "va": [row.segment.va for row in rows],
                "bytes": [row.n_bytes for row in rows],
                "stream": [row.segment.stream for row in rows],
                "pool": [row.segment.pool for row in rows],
                "size_class": ["small" if row.segment.is_small else "large" for row in rows],
            },
            schema={
                "va": pl.UInt64,
                "bytes": pl.Int64,
                "stream": pl.UInt64,
                "pool": pl.String,
                "size_class": POOL_SIZE,
            },
        ).with_columns(
            _at("alloc_sequence", made, events["sequence"]),
            _at("free_sequence", freed, events["sequence"]),
        )


def _numbers(values: array[int]) -> Numbers:
    return np.frombuffer(values, dtype=np.int64)


def _at(name: str, places: Numbers, values: pl.Series) -> pl.Series:
    """Take values by place; null where there is none."""
    if len(values) == 0:
        return pl.Series(name, [None] * len(places), dtype=values.dtype)
    at = pl.DataFrame({"at": places}).select(pl.when(pl.col("at") != NEVER).then(pl.col("at")))
    return values.gather(at["at"].cast(pl.UInt32)).alias(name)


def _running(
    name: str, n: int, gains: tuple[Numbers, Numbers], losses: tuple[Numbers, Numbers] | None
) -> pl.Series:
    """Add up what was gained and lost until after each entry; what was gained never was there at first."""
    changes = np.zeros(n + 1, dtype=np.int64)
    at, amounts = gains
    np.add.at(changes, at + 1, amounts)
    if losses is not None:
        at, amounts = losses
        np.subtract.at(changes, at[at >= 0] + 1, amounts[at >= 0])
    return pl.Series(name, np.cumsum(changes)[1:], dtype=pl.Int64)
