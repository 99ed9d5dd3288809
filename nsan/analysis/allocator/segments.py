"""The segments when the snapshot was taken: what each holds, and what keeps it from being returned."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.allocator.blocks import FREE, GPU, LIVE, POOL, ratio
from nsan.analysis.allocator.call_sites import SITE_COLUMNS, SITE_READS, with_call_sites
from nsan.analysis.catalog import analysis
from nsan.analysis.result import Result, derived, recorded
from nsan.errors import UsageError
from nsan.torch_alloc.constants import DEFAULT_POOL
from nsan.torch_alloc.tables import POOL_SIZE

_KEYS: Final = ["device_id", "segment_id"]
_SEGMENT_READS: Final = (
    "segment_id",
    "device_id",
    "va",
    "bytes",
    "stream",
    "size_class",
    "pool",
    "is_expandable",
)
_BLOCK_READS: Final = ("segment_id", "device_id", "va", "bytes", "state")

_ID: Final = recorded("segment_id", pl.Int64, "id", "The segment, in `segments`.")
_VA: Final = recorded("va", pl.UInt64, "byte address", "First byte.")
_BYTES: Final = recorded("bytes", pl.Int64, "byte", "Size of the segment.")
_LIVE: Final = derived("live_bytes", pl.Int64, "byte", "In blocks in use.")
_CACHED: Final = derived("cached_bytes", pl.Int64, "byte", "Free.")
_TENSORS: Final = derived("n_tensors", pl.Int64, "blocks", "Blocks in use.")
_CLASS: Final = recorded("size_class", POOL_SIZE, "label", "For small or for large requests.")
_STREAM: Final = recorded("stream", pl.UInt64, "id", "Stream whose requests it serves; 0: default.")

ALLOCATOR_SEGMENTS: Final = Result(
    "allocator_segments",
    "one segment when the snapshot was taken; if expandable, one mapped range",
    (
        GPU,
        _ID,
        _VA,
        _BYTES,
        _LIVE,
        _CACHED,
        derived("largest_cached_bytes", pl.Int64, "byte", "Largest free block; null: none."),
        derived("utilization_fraction", pl.Float64, "fraction", "Live over its size."),
        _TENSORS,
        derived("n_blocks", pl.Int64, "blocks", "Blocks, free ones among them."),
        derived(
            "is_returnable",
            pl.Boolean,
            "flag",
            "empty_cache would return it; null: it is free, but its private pool may still be in use.",
        ),
        _CLASS,
        POOL,
        _STREAM,
        recorded("is_expandable", pl.Boolean, "flag", "A mapped range of an expandable segment."),
    ),
    nothing="The snapshot has no segment.",
)

HELD_SEGMENTS: Final = Result(
    "held_segments",
    "one segment that little memory in use keeps from being returned",
    (
        GPU,
        _ID,
        _VA,
        _BYTES,
        _LIVE,
        _CACHED,
        derived("live_fraction", pl.Float64, "fraction", "Live over its size."),
        _TENSORS,
        derived("holder_bytes", pl.Int64, "byte", "The largest block in use."),
        derived("holder_va", pl.UInt64, "byte address", "Where that block begins."),
        *SITE_COLUMNS,
        _CLASS,
        POOL,
        _STREAM,
    ),
    nothing="No segment is held by so little.",
)


@analysis(
    question="Which segments hold the most unused memory, and which could be returned?",
    result=ALLOCATOR_SEGMENTS,
    reads={"segments": _SEGMENT_READS, "blocks": _BLOCK_READS},
    source="allocator.md 4.3, 6.2",
)
def allocator_segments(segments: pl.LazyFrame, blocks: pl.LazyFrame) -> pl.LazyFrame:
    """Add up the blocks of each segment.

    Parameters
    ----------
    segments : LazyFrame, ``SEGMENTS``
        In any order.
    blocks : LazyFrame, ``BLOCKS``
        In any order.

    Returns
    -------
    LazyFrame, ``ALLOCATOR_SEGMENTS``
        By GPU, those with most free memory first, then by address.

    Examples
    --------
    >>> from nsan.torch_alloc.tables import SNAPSHOT_TABLES as tables
    >>> allocator_segments(tables["segments"].empty(), tables["blocks"].empty()).collect().height
    0
    """
    # A segment in part use cannot be returned; a free one of a private pool only when nothing uses it.
    returnable = (
        pl.when(pl.col("n_tensors") > 0)
        .then(pl.lit(value=False))
        .when(pl.col("pool") == DEFAULT_POOL)
        .then(pl.lit(value=True))
    )
    return (
        _with_blocks(segments, blocks)
        .with_columns(
            utilization_fraction=ratio(pl.col("live_bytes"), pl.col("bytes")),
            is_returnable=returnable,
        )
        .sort("device_id", "cached_bytes", "va", descending=[False, True, False])
        .select(ALLOCATOR_SEGMENTS.cast())
    )


@analysis(
    question="Which segments cannot be returned because of a few bytes, and whose are they?",
    result=HELD_SEGMENTS,
    reads={
        "segments": _SEGMENT_READS,
        "blocks": (*_BLOCK_READS, "stack_id"),
        "stacks": SITE_READS,
    },
    source="allocator.md 4.3 (a partly used segment is never released)",
)
def held_segments(
    segments: pl.LazyFrame,
    blocks: pl.LazyFrame,
    stacks: pl.LazyFrame,
    *,
    most_fraction: float = 0.05,
) -> pl.LazyFrame:
    """List the segments that blocks in use of a small share of their size keep.

    Parameters
    ----------
    segments : LazyFrame, ``SEGMENTS``
        In any order.
    blocks : LazyFrame, ``BLOCKS``
        In any order.
    stacks : LazyFrame, ``STACKS``
        In any order.
    most_fraction : float, default 0.05
        Most that may be in use, as a share of the segment, in (0, 1].

    Returns
    -------
    LazyFrame, ``HELD_SEGMENTS``
        By GPU, those with most free memory first, then by address.

    Raises
    ------
    UsageError
        If the share is not in (0, 1].

    Examples
    --------
    >>> from nsan.torch_alloc.tables import SNAPSHOT_TABLES as tables
    >>> names = ("segments", "blocks", "stacks")
    >>> held_segments(*(tables[name].empty() for name in names)).collect().height
    0
    """
    if not 0 < most_fraction <= 1:
        msg = f"most_fraction={most_fraction} of held_segments: take a share above 0, at most 1."
        raise UsageError(msg)
    # Of equal blocks the one at the lowest address, so that the order of rows decides nothing.
    largest = (
        blocks.filter(LIVE)
        .sort("bytes", "va", descending=[True, False])
        .group_by(_KEYS, maintain_order=True)
        .first()
        .select(*_KEYS, "stack_id", holder_bytes="bytes", holder_va="va")
    )
    share = ratio(pl.col("live_bytes"), pl.col("bytes"))
    held = (
        _with_blocks(segments, blocks)
        .with_columns(live_fraction=share)
        .filter((pl.col("n_tensors") > 0) & (pl.col("live_fraction") <= most_fraction))
        .join(largest, on=_KEYS, how="inner")
    )
    return (
        with_call_sites(held, stacks)
        .sort("device_id", "cached_bytes", "va", descending=[False, True, False])
        .select(HELD_SEGMENTS.cast())
    )


def _with_blocks(segments: pl.LazyFrame, blocks: pl.LazyFrame) -> pl.LazyFrame:
    size = pl.col("bytes")
    sums = blocks.group_by(_KEYS).agg(
        n_blocks=pl.len(),
        n_tensors=LIVE.sum(),
        live_bytes=size.filter(LIVE).sum(),
        cached_bytes=size.filter(FREE).sum(),
        largest_cached_bytes=size.filter(FREE).max(),
    )
    counts = ("n_blocks", "n_tensors", "live_bytes", "cached_bytes")
    return segments.join(sums, on=_KEYS, how="left").with_columns(pl.col(counts).fill_null(0))
