"""What the analyses of a snapshot share: which blocks are in use, and which VA blocks they touch."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.result import recorded
from nsan.uvm.constants import VA_BLOCK_BYTES

GPU: Final = recorded("device_id", pl.Int64, "id", "CUDA ordinal of the GPU.")
POOL: Final = recorded(
    "pool", pl.String, "label", "`0,0` (default), `n,0` (graph), `0,n` (MemPool)."
)

FREE: Final = pl.col("state") == "inactive"
"""A cached block: no tensor holds it, and no free is pending."""

LIVE: Final = ~FREE
"""A block in use: allocated, or its free is pending; a state that is not known counts as in use."""


def ratio(part: pl.Expr, whole: pl.Expr) -> pl.Expr:
    """Divide where there is something to divide by.

    Parameters
    ----------
    part, whole : Expr
        Numbers.

    Returns
    -------
    Expr
        Float64; null where ``whole`` is 0, below 0 or null.
    """
    return pl.when(whole > 0).then(part / whole)


def va_block_edges(blocks: pl.LazyFrame) -> pl.LazyFrame:
    """List the VA blocks in which blocks begin and end.

    A VA block that two blocks touch is the first or the last one of both, because blocks do not overlap:
    so these rows say all that can be said of shared VA blocks, and a block of any size makes two at most.

    Parameters
    ----------
    blocks : LazyFrame
        Reads ``va`` (UInt64) and ``bytes`` (Int64); blocks without an address or a size are left out.

    Returns
    -------
    LazyFrame
        The rows of ``blocks``, each once or twice, with ``va_block`` (UInt64, address // 2 MiB),
        ``part_bytes`` (Int64, bytes of the block in it) and ``n_spanned`` (Int64: on the row of the
        first VA block, how many the block touches; 0 on the row of the last).
    """
    size = pl.lit(VA_BLOCK_BYTES, pl.UInt64)
    offset = (pl.col("va") % size).cast(pl.Int64)
    # Offsets are small, so nothing overflows, wherever a block ends.
    end = offset + pl.col("bytes")
    more = (end - 1) // VA_BLOCK_BYTES
    known = blocks.filter(pl.col("va").is_not_null() & (pl.col("bytes") > 0)).with_columns(
        _end=end, _more=more, _first=pl.col("va") // size
    )
    first = known.with_columns(
        va_block=pl.col("_first"),
        part_bytes=pl.min_horizontal("_end", pl.lit(VA_BLOCK_BYTES)) - offset,
        n_spanned=pl.col("_more") + 1,
    )
    last = known.filter(pl.col("_more") > 0).with_columns(
        va_block=pl.col("_first") + pl.col("_more").cast(pl.UInt64),
        part_bytes=pl.col("_end") - pl.col("_more") * VA_BLOCK_BYTES,
        n_spanned=pl.lit(0, pl.Int64),
    )
    return pl.concat([first, last]).drop("_end", "_more", "_first")
