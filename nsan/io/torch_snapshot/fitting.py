"""What does not fit together in the state of a snapshot, in sentences."""

from __future__ import annotations

from typing import Final

import polars as pl

_SIZE: Final = pl.col("bytes").cast(pl.Int128)
_VA: Final = pl.col("va").cast(pl.Int128)
_WIDE: Final = {"_va": _VA, "_end": _VA + _SIZE}
"""Sums of addresses and sizes in 128 bits, where none wraps."""


def warnings_of_state(segments: pl.DataFrame, blocks: pl.DataFrame) -> list[str]:
    """Say what does not fit together.

    Parameters
    ----------
    segments, blocks : DataFrame
        As in :mod:`nsan.torch_alloc.tables`; the segments by device and address.

    Returns
    -------
    list of str
        A sentence for each kind, with the number of segments or blocks.
    """
    counts = {**_of_segments(segments, blocks), **_of_blocks(segments, blocks)}
    return [f"{n} {text}" for text, n in counts.items() if n]


def _of_segments(segments: pl.DataFrame, blocks: pl.DataFrame) -> dict[str, int]:
    held = pl.col("state").cast(pl.String)
    sums = blocks.group_by("segment_id").agg(
        _blocks=_SIZE.sum(), _allocated=_SIZE.filter(held == "active_allocated").sum()
    )
    joined = segments.join(sums, on="segment_id", how="left").with_columns(
        pl.col("_blocks", "_allocated").fill_null(0)
    )
    distinct = segments.unique(["device_id", "va", "bytes"])
    return {
        "segments are not filled by their blocks: requested + waste + inactive bytes do not add up "
        "to reserved bytes.": joined.filter(pl.col("_blocks") != _SIZE).height,
        "segments name another number of allocated bytes than their blocks have.": joined.filter(
            pl.col("allocated_bytes").cast(pl.Int128) != pl.col("_allocated")
        ).height,
        "segments are given more than once.": segments.height - distinct.height,
        "segments overlap one before them.": _n_overlaps(distinct, "device_id"),
    }


def _of_blocks(segments: pl.DataFrame, blocks: pl.DataFrame) -> dict[str, int]:
    spans = segments.select("segment_id", _first=_VA, _last=_VA + _SIZE)
    outside = (
        blocks.select("segment_id", **_WIDE)
        .join(spans, on="segment_id", how="left")
        .filter((pl.col("_va") < pl.col("_first")) | (pl.col("_end") > pl.col("_last")))
    )
    return {
        "blocks overlap one before them in their segment.": _n_overlaps(blocks, "segment_id"),
        "blocks reach outside their segment.": outside.height,
    }


def _n_overlaps(spans: pl.DataFrame, within: str) -> int:
    """Count spans that begin before all of those before them have ended."""
    before = pl.col("_end").cum_max().shift(1).over(within)
    return (
        spans.select(within, **_WIDE)
        .filter(pl.col("_end") > pl.col("_va"))
        .sort(within, "_va", maintain_order=True)
        .filter(pl.col("_va") < before)
        .height
    )
