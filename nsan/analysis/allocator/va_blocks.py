"""VA blocks that several tensors share: what moves one of them moves parts of the others.

The driver moves and evicts managed memory by VA blocks of 2 MiB, the allocator cuts blocks of 512 byte.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.allocator.blocks import FREE, GPU, LIVE, va_block_edges
from nsan.analysis.catalog import analysis
from nsan.analysis.result import Result, derived, recorded
from nsan.uvm.constants import VA_BLOCK_BYTES

_KEYS: Final = ["device_id", "va_block"]

SHARED_VA_BLOCKS: Final = Result(
    "shared_va_blocks",
    "one VA block (2 MiB of address) that two blocks in use or more touch",
    (
        GPU,
        derived("va_block", pl.UInt64, "id", "VA block: address // 2 MiB."),
        derived("va", pl.UInt64, "byte address", "Where it begins."),
        derived("n_tensors", pl.Int64, "blocks", "Blocks in use that touch it."),
        derived("live_bytes", pl.Int64, "byte", "Their bytes in it."),
        derived("cached_bytes", pl.Int64, "byte", "Bytes in it that are reserved and free."),
        recorded("largest_bytes", pl.Int64, "byte", "Size of the largest of these blocks."),
        recorded("smallest_bytes", pl.Int64, "byte", "Size of the smallest of them."),
        derived("n_segments", pl.Int64, "segments", "Segments that they are in."),
        derived("n_pools", pl.Int64, "pools", "Pools that they are in."),
    ),
    nothing="No VA block is shared by two tensors.",
)


@analysis(
    question="Which VA blocks do several tensors share?",
    result=SHARED_VA_BLOCKS,
    reads={
        "blocks": ("segment_id", "device_id", "va", "bytes", "state", "pool"),
    },
    source="allocator.md 6.4; domain.md A (VA block)",
)
def shared_va_blocks(blocks: pl.LazyFrame) -> pl.LazyFrame:
    """List the VA blocks that two blocks in use or more touch.

    Parameters
    ----------
    blocks : LazyFrame, ``BLOCKS``
        In any order.

    Returns
    -------
    LazyFrame, ``SHARED_VA_BLOCKS``
        By GPU, those of most tensors first, then by address.

    Examples
    --------
    >>> from nsan.torch_alloc.tables import SNAPSHOT_TABLES as tables
    >>> shared_va_blocks(tables["blocks"].empty()).collect().height
    0
    """
    size = pl.col("bytes")
    return (
        va_block_edges(blocks)
        .group_by(_KEYS)
        .agg(
            n_tensors=LIVE.sum(),
            live_bytes=pl.col("part_bytes").filter(LIVE).sum(),
            cached_bytes=pl.col("part_bytes").filter(FREE).sum(),
            largest_bytes=size.filter(LIVE).max(),
            smallest_bytes=size.filter(LIVE).min(),
            n_segments=pl.col("segment_id").filter(LIVE).n_unique(),
            n_pools=pl.col("pool").filter(LIVE).n_unique(),
        )
        .filter(pl.col("n_tensors") > 1)
        .with_columns(va=pl.col("va_block") * pl.lit(VA_BLOCK_BYTES, pl.UInt64))
        .sort("device_id", "n_tensors", "va_block", descending=[False, True, False])
        .select(SHARED_VA_BLOCKS.cast())
    )
