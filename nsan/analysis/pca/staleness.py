"""Bytes that are older than the tensor they come back for: nobody needs them.

A block is freed, its bytes are evicted, and another tensor gets the block: when the GPU touches it, the
driver brings the old bytes back.
"""

from __future__ import annotations

from array import array
from typing import Final

import polars as pl

from nsan.analysis.pca.history import BEFORE
from nsan.analysis.pca.ranges import OUTSIDE, Ranges, is_range
from nsan.analysis.pca.tables import DEAD_STATES
from nsan.uvm.constants import VA_BLOCK_BYTES


def with_use(moves: pl.DataFrame) -> pl.DataFrame:
    """Say which parts of migrations nobody needs.

    Parameters
    ----------
    moves : DataFrame
        Parts of migrations: reads ``pid``, ``va``, ``bytes``, ``start_ns``, ``end_ns``, ``direction``, and
        of :func:`nsan.analysis.pca.lookup.placed` ``state``, ``alloc_sequence``, ``life``, ``earliest``,
        ``latest``.

    Returns
    -------
    DataFrame
        The rows, in any order, cut where only some of their bytes are stale, with ``is_stale`` and
        ``is_dead`` (null: not known) as in ``TENSOR_MOVES``.

    Notes
    -----
    One walk through the parts in order of time. What a GPU gets from another one may have been written
    there, so how old it is is not known.
    """
    numbered = moves.with_columns(_piece=pl.int_range(pl.len(), dtype=pl.Int64))
    live_in = (pl.col("state") == "live") & (pl.col("direction") != "dtoh")
    asked = numbered.filter(live_in & (pl.col("direction") != "dtod"))
    # What left while the state was unknown was of an unknown segment: of no known one, at any rate.
    lost = (pl.col("state") == "unknown") & is_range()
    left = numbered.with_columns(life=pl.when(lost).then(_UNKNOWN_LIFE).otherwise("life")).filter(
        pl.col("direction") == "dtoh", pl.col("life").is_not_null()
    )
    split = asked.drop("va", "bytes").join(_compared(asked, left), on="_piece")
    is_known = pl.col("state") != "unknown"
    known = pl.when(is_known & ~live_in).then(pl.lit(value=False))
    others = numbered.join(asked, on="_piece", how="anti").with_columns(is_stale=known)
    parts = pl.concat([split.select(others.columns), others]).drop("_piece")
    is_dead = pl.col("state").cast(pl.String).is_in(DEAD_STATES) | pl.col("is_stale")
    return parts.with_columns(is_dead=is_dead)


_UNKNOWN_LIFE: Final = -1


def _compared(came: pl.DataFrame, left: pl.DataFrame) -> pl.DataFrame:
    """Cut what came in at the edges of what had left before: ``_piece``, ``va``, ``bytes``, ``is_stale``."""
    departures = _departures(left)
    columns = ("pid", "va", "bytes", "start_ns", "end_ns", "life")
    events = (
        pl.concat(
            [
                departures.select(
                    *columns,
                    piece=pl.lit(OUTSIDE, pl.Int64),
                    born=pl.lit(None, pl.Int64),
                ).with_row_index("number"),
                came.select(
                    *columns, piece="_piece", born=pl.col("alloc_sequence").fill_null(BEFORE)
                ).with_row_index("number"),
            ]
        )
        .sort("start_ns", "end_ns", maintain_order=True)
        .select("pid", "va", "bytes", "life", "number", "piece", "born")
    )
    walk = _Walk(*(departures[name].to_list() for name in ("earliest", "latest", "life")))
    for pid, va, size, life, number, piece, born in events.iter_rows():
        if life == _UNKNOWN_LIFE:
            walk.forget(pid, va, va + size)
        elif piece < 0:
            walk.leave(pid, va, va + size, number)
        else:
            walk.come(pid, (va, va + size), (piece, life, born))
    return walk.found()


def _departures(left: pl.DataFrame) -> pl.DataFrame:
    """Join neighbouring parts of one migration that lie in one segment."""
    ends = pl.col("va") + pl.col("bytes").cast(pl.UInt64)
    same = pl.all_horizontal(
        *(pl.col(name).eq_missing(pl.col(name).shift()) for name in ("migration", "life")),
        pl.col("va") == ends.shift(),
    )
    run = same.fill_null(value=False).not_().cum_sum()
    return (
        left.sort("migration", "va")
        .group_by(run.alias("_run"), maintain_order=True)
        .agg(
            pl.col("pid", "va", "start_ns", "end_ns", "life", "earliest", "latest").first(),
            pl.col("bytes").sum(),
        )
    )


class _Walk:
    """The last departure of every byte, by process and VA block, so that each list stays short."""

    def __init__(self, earliest: list[int], latest: list[int], lives: list[int]) -> None:
        self._earliest, self._latest, self._lives = earliest, latest, lives
        self._blocks: dict[tuple[int | None, int], Ranges] = {}
        self._pieces, self._places, self._sizes = array("q"), array("Q"), array("q")
        self._stale: list[bool | None] = []

    def _parts(self, pid: int | None, first: int, last: int) -> list[tuple[Ranges, int, int]]:
        parts = []
        while first < last:
            block = first // VA_BLOCK_BYTES
            end = min(last, (block + 1) * VA_BLOCK_BYTES)
            parts.append((self._blocks.setdefault((pid, block), Ranges()), first, end))
            first = end
        return parts

    def leave(self, pid: int | None, first: int, last: int, number: int) -> None:
        """Note a departure."""
        for ranges, start, end in self._parts(pid, first, last):
            ranges.give(start, end, number)

    def forget(self, pid: int | None, first: int, last: int) -> None:
        """Note a departure of which only the place is known; the range may be large."""
        low, high = first // VA_BLOCK_BYTES, -(-last // VA_BLOCK_BYTES)
        few = high - low <= len(self._blocks)
        known = range(low, high) if few else [block for _, block in self._blocks]
        for block in known:
            ranges = self._blocks.get((pid, block))
            if ranges is not None:
                start = block * VA_BLOCK_BYTES
                ranges.give(max(first, start), min(last, start + VA_BLOCK_BYTES), OUTSIDE)

    def come(self, pid: int | None, span: tuple[int, int], what: tuple[int, int, int]) -> None:
        """Compare an arrival with the departures before it."""
        piece, life, born = what
        for ranges, first, last in self._parts(pid, *span):
            for start, end, number in ranges.within(first, last):
                # Of one segment only: at the same address a later one holds other memory.
                known = number >= 0 and self._lives[number] == life
                self._note(piece, start, end, self._is_after(born, number) if known else None)

    def _is_after(self, born: int, number: int) -> bool | None:
        """Say whether a tensor is younger than a departure, of which only bounds may be known."""
        if born >= self._latest[number]:
            return True
        return False if born < self._earliest[number] else None

    def _note(self, piece: int, start: int, end: int, is_stale: bool | None) -> None:  # noqa: FBT001
        if self._pieces and self._pieces[-1] == piece and self._stale[-1] is is_stale:
            self._sizes[-1] += end - start
            return
        self._pieces.append(piece)
        self._places.append(start)
        self._sizes.append(end - start)
        self._stale.append(is_stale)

    def found(self) -> pl.DataFrame:
        """Give what was compared."""
        return pl.DataFrame(
            {
                "_piece": self._pieces,
                "va": self._places,
                "bytes": self._sizes,
                "is_stale": self._stale,
            },
            schema={"_piece": pl.Int64, "va": pl.UInt64, "bytes": pl.Int64, "is_stale": pl.Boolean},
        )
