"""Which tensor held a range of addresses at a position of the history.

One pass over the history in its order, with the holder of every stretch of addresses at hand. A segment
that begins, and one that ends, wipes what was there, so no tensor of an earlier segment is ever met at an
address that the driver gave out again.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

import polars as pl

from nsan.analysis.pca.history import BEFORE, History
from nsan.analysis.pca.ranges import OUTSIDE, Ranges
from nsan.analysis.pca.tables import STATE

NO_PIECES: Final = pl.DataFrame(
    schema={
        "_row": pl.Int64(),
        "va": pl.UInt64(),
        "bytes": pl.Int64(),
        "position": pl.Int64(),
        "tensor_id": pl.Int64(),
        "alloc_sequence": pl.Int64(),
        "segment_va": pl.UInt64(),
        "life": pl.Int64(),
        "state": STATE,
    }
)
"""The columns of pieces."""


@dataclass(frozen=True)
class Holders:
    """Who held what.

    Attributes
    ----------
    pieces : DataFrame
        Parts of the ranges, in order of ``_row`` and address: ``_row``, ``va`` (UInt64), ``bytes``,
        ``position``, ``state`` (``STATE``), ``tensor_id``, ``alloc_sequence`` (of the tensor),
        ``segment_va``, ``life`` (number of the segment, over all histories). Neighbours differ in what
        holds them; the parts add up to the ranges.
    reused : Series
        By tensor of the history: bytes of its block that an earlier tensor of the segment held.
    """

    pieces: pl.DataFrame
    reused: pl.Series


def holders(history: History, ranges: pl.DataFrame) -> Holders:
    """Find what held ranges of addresses.

    Parameters
    ----------
    history : History
        Of the process that the addresses are of.
    ranges : DataFrame
        ``_row`` (Int64), ``va`` (UInt64), ``bytes`` (Int64, above 0), ``position`` (Int64, no nulls), in
        any order.

    Returns
    -------
    Holders
        Every byte of every range is in one piece.
    """
    asked = ranges.select("_row", "va", "bytes", "position").sort("position", maintain_order=True)
    sweep = _Sweep(history)
    found = [array("q"), array("q"), array("q")]
    places, sizes, values = found
    counts = array("q")
    for first, size, position in asked.select("va", "bytes", "position").iter_rows():
        sweep.go_to(position)
        before = len(values)
        for start, end, value in sweep.ranges.within(first, first + size):
            places.append(start - first)
            sizes.append(end - start)
            values.append(value)
        counts.append(len(values) - before)
    sweep.go_to(None)
    repeated = pl.int_range(pl.len()).repeat_by(pl.Series(counts, dtype=pl.Int64)).explode()
    pieces = asked[asked.select(repeated).to_series().drop_nulls()].with_columns(
        va=pl.col("va") + pl.Series(places, dtype=pl.Int64).cast(pl.UInt64),
        bytes=pl.Series(sizes, dtype=pl.Int64),
        holder=pl.Series(values, dtype=pl.Int64),
    )
    reused = pl.Series("reused_bytes", sweep.reused, dtype=pl.Int64)
    return Holders(_named(pieces, _names(history, sweep)).sort("_row", "va"), reused)


class _Sweep:
    """A walk through a history."""

    def __init__(self, history: History) -> None:
        self.ranges = Ranges()
        self._n_segments = history.segments.height
        self.segment_of = [*range(self._n_segments), *([OUTSIDE] * history.tensors.height)]
        self.reused = [0] * history.tensors.height
        self._changes = _changes(history).rows()
        self._at = 0

    def go_to(self, position: int | None) -> None:
        """Make the changes of the entries before a position, or all."""
        changes = self._changes
        while self._at < len(changes):
            sequence, first, size, value = changes[self._at]
            if position is not None and sequence >= position:
                return
            self._at += 1
            if value >= self._n_segments:
                self._note(value, first, first + size)
            self.ranges.give(first, first + size, value)

    def _note(self, value: int, first: int, last: int) -> None:
        """Write down in which segment a tensor comes to lie, and what was held there before."""
        reused = 0
        for start, end, before in self.ranges.within(first, last):
            if start == first:
                self.segment_of[value] = OUTSIDE if before < 0 else self.segment_of[before]
            if before >= self._n_segments:
                reused += end - start
        self.reused[value - self._n_segments] = reused


def _changes(history: History) -> pl.DataFrame:
    """List who gets which range when, in order; where a repair does several at once, ends come first."""
    segments, tensors = history.segments, history.tensors
    number = pl.int_range(pl.len(), dtype=pl.Int64)
    began = pl.col("alloc_sequence").fill_null(BEFORE)
    made = [
        segments.drop_nulls("free_sequence").select(
            "va", "bytes", sequence="free_sequence", turn=0, holder=pl.lit(OUTSIDE, pl.Int64)
        ),
        segments.select("va", "bytes", sequence=began, turn=1, holder=number),
        tensors.select(
            "va", bytes="block_bytes", sequence=began, turn=2, holder=number + segments.height
        ),
    ]
    return (
        pl.concat(made)
        .sort("sequence", "turn", maintain_order=True)
        .select("sequence", "va", "bytes", "holder")
    )


def _names(history: History, sweep: _Sweep) -> pl.DataFrame:
    """Say of each holder which segment and tensor it is."""
    segments = history.segments.select(
        segment_va="va", life=pl.int_range(pl.len(), dtype=pl.Int64) + history.first_life
    )
    n = segments.height
    number = pl.int_range(pl.len(), dtype=pl.Int64)
    tensors = history.tensors.select(
        "tensor_id",
        "alloc_sequence",
        "free_requested_sequence",
        "free_sequence",
        "is_pending",
        holder=number + n,
        _segment_va="segment_va",
    )
    place = pl.DataFrame({"holder": range(len(sweep.segment_of)), "_segment": sweep.segment_of})
    return (
        place.join(tensors, on="holder", how="left", maintain_order="left")
        .join(
            segments.with_columns(_segment=number), on="_segment", how="left", maintain_order="left"
        )
        # A broken history has tensors in no segment: the replay says which it must have been.
        .with_columns(segment_va=pl.coalesce("segment_va", "_segment_va"))
        .drop("_segment", "_segment_va")
    )


def _named(pieces: pl.DataFrame, names: pl.DataFrame) -> pl.DataFrame:
    """Say of each piece what held it, and what that was to the allocator."""
    asked = pl.when("is_pending").then(BEFORE).otherwise("free_requested_sequence")
    position = pl.col("position")
    state = (
        pl.when(pl.col("holder") < 0)
        .then(pl.lit("outside"))
        .when(pl.col("tensor_id").is_null())
        .then(pl.lit("unused"))
        .when(asked.is_null() | (position <= asked))
        .then(pl.lit("live"))
        .when(pl.col("free_sequence").is_null() | (position <= pl.col("free_sequence")))
        .then(pl.lit("pending"))
        .otherwise(pl.lit("cached"))
    )
    return pieces.join(names, on="holder", how="left", maintain_order="left").select(
        "_row",
        "va",
        "bytes",
        "position",
        "tensor_id",
        "alloc_sequence",
        "segment_va",
        "life",
        state=state.cast(STATE),
    )
