"""Which allocation holds an address at a time, for many addresses at once."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.segments import cut, edges_of
from nsan.uvm.constants import VA_BLOCK_BYTES

NOWHERE: Final = -1
"""The `key` of what lies in no allocation."""

_ALWAYS: Final = -(1 << 62)
_NEVER: Final = 1 << 62

MOST_PIECES: Final = 4_000_000
"""Pieces of allocations, cut at each other's edges, that are looked at at once."""

_MOST_SLABS: Final = 512


def places(ranges: pl.DataFrame, held: pl.DataFrame) -> pl.DataFrame:
    """Find the allocation that each byte of some ranges lies in at their time.

    Parameters
    ----------
    ranges : DataFrame
        Reads ``pid``, ``va``, ``start_ns`` (no nulls in the last two) and, if there, ``bytes``: else a
        row is one byte. Other columns stay.
    held : DataFrame
        Allocations: ``pid``, ``va``, ``bytes``, ``alloc_ns``, ``free_ns`` (null: open), ``key``. Rows
        with the key ``NOWHERE`` are none. Of two that hold an address at one time, the later one has
        it.

    Returns
    -------
    DataFrame
        One row per piece that lies in one allocation, or in none: the columns of ``ranges`` with ``va``
        and ``bytes`` of the piece, ``row`` (place of its range in ``ranges``), ``key``. Pieces add up
        to their range.
    """
    if "bytes" not in ranges.columns:
        ranges = ranges.with_columns(bytes=pl.lit(1, pl.Int64))
    ranges = ranges.with_columns(row=pl.int_range(pl.len(), dtype=pl.Int64))
    lives = held.filter(pl.col("key") != NOWHERE).select(
        *("pid", "va", "bytes", "key"),
        alloc_ns=pl.col("alloc_ns").fill_null(_ALWAYS),
        free_ns=pl.col("free_ns").fill_null(_NEVER),
    )
    parts = [ranges.clear().with_columns(key=pl.lit(None, pl.Int64))]
    for (pid,), mine in ranges.partition_by("pid", as_dict=True, maintain_order=True).items():
        same = pl.col("pid").eq_missing(pl.lit(pid, lives.schema["pid"]))
        parts += [_place(*slab) for slab in _slabs(mine, lives.filter(same))]
    return pl.concat(part.select(parts[0].columns) for part in parts)


def _slabs(ranges: pl.DataFrame, lives: pl.DataFrame) -> list[tuple[pl.DataFrame, pl.DataFrame]]:
    """Split time so that allocations that follow each other at one place do not cut each other."""
    edges = edges_of(lives)["va"]
    last = lives["va"] + lives["bytes"].cast(pl.UInt64)
    first = edges.search_sorted(lives["va"])
    n_pieces = int((edges.search_sorted(last).cast(pl.Int64) - first.cast(pl.Int64)).sum() or 0)
    n_slabs = min(-(-4 * n_pieces // MOST_PIECES), _MOST_SLABS)
    if n_pieces <= MOST_PIECES:
        return [(ranges, lives)]
    ordered = ranges.sort("start_ns", maintain_order=True)
    size = -(-ordered.height // n_slabs)
    slabs = []
    for part in ordered.iter_slices(size):
        begin, end = part["start_ns"][0], part["start_ns"][-1]
        alive = (pl.col("alloc_ns") <= end) & (pl.col("free_ns") > begin)
        slabs.append((part, lives.filter(alive)))
    return slabs


def _place(ranges: pl.DataFrame, lives: pl.DataFrame) -> pl.DataFrame:
    """Cut ranges and allocations of one process at the same edges, and join what shares a stretch."""
    edges = edges_of(lives)
    pieces = cut(ranges, edges)
    held = cut(lives, edges).select("segment", "key", "free_ns", since="alloc_ns")
    return (
        pieces.sort("start_ns", maintain_order=True)
        .join_asof(
            held.sort("since", "key"),
            left_on="start_ns",
            right_on="since",
            by="segment",
            coalesce=False,
            check_sortedness=False,
        )
        .with_columns(
            key=pl.when(pl.col("start_ns") < pl.col("free_ns"))
            .then("key")
            .otherwise(NOWHERE)
            .cast(pl.Int64)
        )
    )


def guessed_allocations(*touched: pl.DataFrame) -> pl.DataFrame:
    """Guess allocations from addresses: runs of neighbouring VA blocks in which something happened.

    Parameters
    ----------
    *touched : DataFrame
        Each reads ``pid``, ``va`` and, if there, ``bytes``.

    Returns
    -------
    DataFrame
        One row per run: ``pid``, ``va``, ``bytes``. Allocations that share or touch a VA block are one
        run; one with untouched blocks inside is several.
    """
    first = pl.col("va") // VA_BLOCK_BYTES
    blocks = [
        frame.select("pid", block=edge)
        for frame in touched
        for edge in (
            [first, (pl.col("va") + pl.col("bytes").cast(pl.UInt64) - 1) // VA_BLOCK_BYTES]
            if "bytes" in frame.columns
            else [first]
        )
    ]
    step = pl.col("block") - pl.col("block").shift(1) == 1
    follows = step & pl.col("pid").eq_missing(pl.col("pid").shift(1))
    return (
        pl.concat(blocks)
        .drop_nulls("block")
        .unique()
        .sort("pid", "block")
        .with_columns(run=follows.fill_null(value=False).not_().cum_sum())
        .group_by("run", maintain_order=True)
        .agg(
            pl.col("pid").first(),
            va=pl.col("block").first() * VA_BLOCK_BYTES,
            bytes=(pl.len().cast(pl.Int64) * VA_BLOCK_BYTES),
        )
        .drop("run")
    )
