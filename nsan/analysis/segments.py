"""Ranges of addresses cut into segments that share their history: page-exact without a row per page.

Copies of 2 MiB hold 512 pages, and most of these always move together. Cutting every copy only
where some copy begins or ends gives the same answers as a table of pages, with fewer rows.
"""

from __future__ import annotations

import polars as pl


def edges_of(*ranges: pl.DataFrame) -> pl.DataFrame:
    """List where any of the ranges begins or ends.

    Parameters
    ----------
    *ranges : DataFrame
        Each reads ``pid``, ``va`` (UInt64, byte address) and ``bytes`` (Int64, byte); rows that lack
        one, or hold no byte, are left out.

    Returns
    -------
    DataFrame
        ``pid``, ``va``, ordered by both, each pair once.
    """
    sides = [
        side
        for frame in ranges
        for known in [_placed(frame)]
        for side in (
            known.select("pid", "va"),
            known.select("pid", va=pl.col("va") + pl.col("bytes").cast(pl.UInt64)),
        )
    ]
    return pl.concat(sides).unique().sort("pid", "va")


def cut(ranges: pl.DataFrame, edges: pl.DataFrame) -> pl.DataFrame:
    """Cut ranges at the edges inside them.

    Parameters
    ----------
    ranges : DataFrame
        Reads ``pid``, ``va`` (UInt64, byte address), ``bytes`` (Int64, byte); other columns stay.
    edges : DataFrame
        ``pid``, ``va`` as of :func:`edges_of`.

    Returns
    -------
    DataFrame
        One row per piece, ordered by process and address: the columns of ``ranges`` with ``va`` and
        ``bytes`` of the piece, and ``segment`` (Int64): which stretch between two edges of its
        process it lies in (before the first and after the last edge are stretches too), the same
        for all ranges that are cut at the same edges, and another one in each process.
        The bytes add up to those of the ranges that have an address.
    """
    known = _placed(ranges).sort("pid", "va", maintain_order=True)
    parts = [known.clear().with_columns(segment=pl.lit(None, pl.Int64))]
    by_pid = edges.partition_by("pid", as_dict=True, maintain_order=True)
    # Segments of a process come after those of the processes before it: one more than edges each.
    passed, first = 0, {}
    for pid, places in by_pid.items():
        first[pid] = passed
        passed += places.height + 1
    for pid, mine in known.partition_by("pid", as_dict=True, maintain_order=True).items():
        if pid not in first:
            first[pid] = passed
            passed += 1
        places = by_pid.get(pid, edges.clear())
        parts.append(_cut_at(mine, places["va"], first[pid]).sort("va", maintain_order=True))
    return pl.concat(parts)


def _placed(ranges: pl.DataFrame) -> pl.DataFrame:
    return ranges.filter(pl.col("va").is_not_null() & (pl.col("bytes") > 0))


def _cut_at(ranges: pl.DataFrame, places: pl.Series, passed: int) -> pl.DataFrame:
    """Cut the ranges of one process; ``passed`` numbers its segments after those of others."""
    end = ranges["va"] + ranges["bytes"].cast(pl.UInt64)
    first = places.search_sorted(ranges["va"], side="right").cast(pl.Int64)
    last = places.search_sorted(end, side="left").cast(pl.Int64)
    pieces = ranges.with_columns(_cut_end=end, _cut_first=first, _cut_last=last)
    whole = (first == last).all()
    if whole:
        return pieces.with_columns(segment=first + passed).drop(
            "_cut_end", "_cut_first", "_cut_last"
        )
    pieces = pieces.with_columns(
        segment=pl.int_ranges("_cut_first", pl.col("_cut_last") + 1)
    ).explode("segment")
    # Segment i lies between the edges i - 1 and i.
    number = pieces["segment"]
    low = places.gather((number - 1).clip(0, None))
    high = places.gather(number.clip(None, places.len() - 1))
    starts_here, ends_here = number == pieces["_cut_first"], number == pieces["_cut_last"]
    return (
        pieces.with_columns(
            _cut_low=low, _cut_high=high, _cut_starts=starts_here, _cut_ends=ends_here
        )
        .with_columns(
            va=pl.when("_cut_starts").then("va").otherwise("_cut_low"),
            _cut_until=pl.when("_cut_ends").then("_cut_end").otherwise("_cut_high"),
        )
        .with_columns(
            bytes=(pl.col("_cut_until") - pl.col("va")).cast(pl.Int64),
            segment=pl.col("segment") + passed,
        )
        .drop(
            "_cut_end",
            "_cut_first",
            "_cut_last",
            "_cut_low",
            "_cut_high",
            "_cut_starts",
            "_cut_ends",
            "_cut_until",
        )
    )
