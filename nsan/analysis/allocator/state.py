"""What the allocator held when the snapshot was taken, by GPU and pool. No history is needed."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.allocator.blocks import FREE, GPU, LIVE, ratio, va_block_edges
from nsan.analysis.catalog import analysis
from nsan.analysis.result import Result, derived, recorded

ALL_POOLS: Final = "all"
"""Label of the rows over all pools of a GPU."""

_KEYS: Final = ["device_id", "pool"]

ALLOCATOR_STATE: Final = Result(
    "allocator_state",
    "one pool of one GPU, or all its pools together (`all`), when the snapshot was taken",
    (
        GPU,
        derived("pool", pl.String, "label", "`0,0` default, `n,0` graph, `0,n` MemPool, or `all`."),
        recorded("reserved_bytes", pl.Int64, "byte", "Held from the driver: all segments."),
        recorded("active_bytes", pl.Int64, "byte", "In blocks in use, pending frees among them."),
        recorded("allocated_bytes", pl.Int64, "byte", "In blocks that tensors hold."),
        recorded(
            "pending_bytes", pl.Int64, "byte", "Freed, but another stream may still use them."
        ),
        recorded("requested_bytes", pl.Int64, "byte", "Asked for in blocks in use; null: unknown."),
        derived(
            "waste_bytes", pl.Int64, "byte", "Active but not asked for: rounding, unsplit rest."
        ),
        derived("cached_bytes", pl.Int64, "byte", "Reserved and free: inactive blocks."),
        derived("largest_cached_bytes", pl.Int64, "byte", "The largest free block; null: none."),
        derived("utilization_fraction", pl.Float64, "fraction", "Active over reserved, now."),
        derived(
            "external_fraction",
            pl.Float64,
            "fraction",
            "1 - largest free block over all free bytes: how scattered they are; null: none free.",
        ),
        derived("n_segments", pl.Int64, "segments", "Segments."),
        derived("n_free_segments", pl.Int64, "segments", "Without a block in use."),
        derived(
            "free_segment_bytes",
            pl.Int64,
            "byte",
            "Their size: empty_cache returns them; a private pool keeps its own while in use.",
        ),
        derived("n_blocks", pl.Int64, "blocks", "Blocks of any state."),
        recorded("n_allocated_blocks", pl.Int64, "blocks", "Held by a tensor."),
        recorded("n_pending_blocks", pl.Int64, "blocks", "Whose free is pending."),
        recorded("n_cached_blocks", pl.Int64, "blocks", "Free."),
        recorded("n_other_blocks", pl.Int64, "blocks", "Of an unknown state; counted as in use."),
        derived("n_va_blocks", pl.Int64, "VA blocks", "2 MiB of address that blocks in use touch."),
        derived("n_shared_va_blocks", pl.Int64, "VA blocks", "Of these, by two blocks or more."),
    ),
    nothing="The snapshot has no segment: nothing was allocated, or another allocator was in use.",
)


@analysis(
    question="How much memory does the allocator hold, and how is it used?",
    result=ALLOCATOR_STATE,
    reads={
        "segments": ("segment_id", "device_id", "bytes", "pool"),
        "blocks": ("segment_id", "device_id", "va", "bytes", "requested_bytes", "state", "pool"),
    },
    source="allocator.md 4.1, 6.2, 7",
)
def allocator_state(segments: pl.LazyFrame, blocks: pl.LazyFrame) -> pl.LazyFrame:
    """Add up segments and blocks by GPU and pool.

    Parameters
    ----------
    segments : LazyFrame, ``SEGMENTS``
        In any order.
    blocks : LazyFrame, ``BLOCKS``
        In any order.

    Returns
    -------
    LazyFrame, ``ALLOCATOR_STATE``
        By GPU: a row `all`, then one per pool. Requested + waste + cached = reserved. Sums of the pools
        are the row `all`; not so its largest block, its fractions, and its VA blocks, for pools may
        touch the same.

    Examples
    --------
    >>> from nsan.torch_alloc.tables import SNAPSHOT_TABLES as tables
    >>> allocator_state(tables["segments"].empty(), tables["blocks"].empty()).collect().height
    0
    """

    def build() -> pl.DataFrame:
        held, parts = _with_all(segments), _with_all(blocks)
        frames = [_of_segments(held, parts), _of_blocks(parts), _of_va_blocks(parts)]
        first, *rest = pl.collect_all(frames)
        for each in rest:
            first = first.join(each, on=_KEYS, how="full", coalesce=True, nulls_equal=True)
        return _table(first)

    return ALLOCATOR_STATE.from_rows(build)


def _with_all(rows: pl.LazyFrame) -> pl.LazyFrame:
    """Add every row once more under the label of all pools."""
    return pl.concat([rows, rows.with_columns(pool=pl.lit(ALL_POOLS))])


def _of_segments(segments: pl.LazyFrame, blocks: pl.LazyFrame) -> pl.LazyFrame:
    keys = [*_KEYS, "segment_id"]
    used = blocks.filter(LIVE).select(keys).unique()
    marked = segments.join(
        used.with_columns(_is_used=pl.lit(value=True)), on=keys, how="left", nulls_equal=True
    )
    free = pl.col("_is_used").is_null()
    return marked.group_by(_KEYS).agg(
        n_segments=pl.len(),
        reserved_bytes=pl.col("bytes").sum(),
        n_free_segments=free.sum(),
        free_segment_bytes=pl.col("bytes").filter(free).sum(),
    )


def _of_blocks(blocks: pl.LazyFrame) -> pl.LazyFrame:
    size, state = pl.col("bytes"), pl.col("state")
    asked = pl.col("requested_bytes").filter(LIVE)
    return blocks.group_by(_KEYS).agg(
        n_blocks=pl.len(),
        n_allocated_blocks=(state == "active_allocated").sum(),
        n_pending_blocks=(state == "active_pending_free").sum(),
        n_cached_blocks=FREE.sum(),
        n_other_blocks=(state == "other").sum(),
        active_bytes=size.filter(LIVE).sum(),
        allocated_bytes=size.filter(state == "active_allocated").sum(),
        pending_bytes=size.filter(state == "active_pending_free").sum(),
        # A sum without its unknown parts would look like a small request.
        requested_bytes=pl.when(asked.null_count() == 0).then(asked.sum()),
        cached_bytes=size.filter(FREE).sum(),
        largest_cached_bytes=size.filter(FREE).max(),
    )


def _of_va_blocks(blocks: pl.LazyFrame) -> pl.LazyFrame:
    """Count VA blocks: what blocks touch one by one, less what is counted more than once."""
    touched = va_block_edges(blocks.filter(LIVE).select(*_KEYS, "va", "bytes"))
    by_va_block = touched.group_by(*_KEYS, "va_block").agg(
        pl.col("n_spanned").sum(), n_tensors=pl.len().cast(pl.Int64)
    )
    again = (pl.col("n_tensors") - 1).sum()
    return by_va_block.group_by(_KEYS).agg(
        n_va_blocks=pl.col("n_spanned").sum() - again,
        n_shared_va_blocks=(pl.col("n_tensors") > 1).sum(),
    )


def _table(found: pl.DataFrame) -> pl.DataFrame:
    may_be_null = ("requested_bytes", "largest_cached_bytes")
    amounts = [name for name in found.columns if name not in {*_KEYS, *may_be_null}]
    cached, largest = pl.col("cached_bytes"), pl.col("largest_cached_bytes")
    return (
        found.with_columns(pl.col(amounts).fill_null(0))
        .with_columns(
            waste_bytes=pl.col("active_bytes") - pl.col("requested_bytes"),
            utilization_fraction=ratio(pl.col("active_bytes"), pl.col("reserved_bytes")),
            external_fraction=1 - ratio(largest, cached),
        )
        .sort(pl.col("device_id"), pl.col("pool") != ALL_POOLS, pl.col("pool"))
    )
