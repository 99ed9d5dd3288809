"""VA blocks that the caching allocator fills with several tensors, and what moves because of that.

The driver brings, prefetches and evicts managed memory by VA block (2 MiB); the allocator cuts its segments
in blocks of 512 byte. So a fault on one tensor brings parts of its neighbours, and an eviction takes all
that lie there (domain.md A.2, packing). Only tensors of one segment count as packed: that two small
allocations share a VA block is not the allocator's doing.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.nearest import nearest
from nsan.analysis.result import DEVICE, PID, Result, derived
from nsan.analysis.segments import cut, edges_of
from nsan.uvm.constants import VA_BLOCK_BYTES

_NEVER: Final = (1 << 63) - 1
"""Position that no history reaches."""

_BEFORE: Final = -1
"""Position of what was there before the first entry of the history."""

_RUN_KEYS: Final = ["pid", "segment_va"]
_THERE: Final = ["run", "va_block"]

MOVE_READS: Final = (
    "pid",
    "device_id",
    "migration",
    "start_ns",
    "va",
    "bytes",
    "direction",
    "cause",
    "batch_id",
    "position",
    "state",
    "tensor_id",
    "segment_va",
    "is_stale",
)
"""What is read of ``tensor_moves`` to find neighbours."""

FAULT_READS: Final = (
    "pid",
    "device_id",
    "processor",
    "va",
    "batch_id",
    "position",
    "tensor_id",
    "segment_va",
)
"""What is read of ``tensor_faults`` to find neighbours."""

LIFE_READS: Final = (
    "pid",
    "device_id",
    "tensor_id",
    "va",
    "block_bytes",
    "reused_bytes",
    "segment_va",
    "alloc_sequence",
    "free_sequence",
)
"""What is read of ``tensor_lives`` to find who was where."""

VA_BLOCK_SHARING: Final = Result(
    "va_block_sharing",
    "the part of one VA block (2 MiB) that lies in one segment, or in none",
    (
        PID,
        DEVICE,
        derived("va_block", pl.UInt64, "id", "VA block: address // 2 MiB."),
        derived("va", pl.UInt64, "byte address", "Where the VA block begins."),
        derived("segment_va", pl.UInt64, "byte address", "The segment; null: none, or not known."),
        derived(
            "n_tensors", pl.Int64, "tensors", "Held or had held bytes there at a move or fault."
        ),
        derived("most_tensors", pl.Int64, "tensors", "Most that held bytes there at one of these."),
        derived("n_fault_rows", pl.Int64, "fault rows", "GPU fault rows whose page lies there."),
        derived("in_bytes", pl.Int64, "byte", "Migrated into the GPU."),
        derived("out_bytes", pl.Int64, "byte", "Migrated out of it."),
        derived(
            "neighbour_in_bytes", pl.Int64, "byte", "Of `in_bytes`: beside a tensor that faulted."
        ),
        derived(
            "neighbour_out_bytes", pl.Int64, "byte", "Of `out_bytes`: beside the largest tensor."
        ),
    ),
    nothing="Nothing was migrated, and no GPU fault row was recorded.",
)


@analysis(
    question="Which VA blocks do tensors of one segment share, and what moves because of that?",
    result=VA_BLOCK_SHARING,
    reads={"tensor_moves": MOVE_READS, "tensor_faults": FAULT_READS, "tensor_lives": LIFE_READS},
    source="domain.md A.2 (packing), E-19",
)
def va_block_sharing(
    tensor_moves: pl.LazyFrame, tensor_faults: pl.LazyFrame, tensor_lives: pl.LazyFrame
) -> pl.LazyFrame:
    """List the VA blocks that moved or faulted, with the tensors there and the neighbours' bytes.

    Parameters
    ----------
    tensor_moves, tensor_faults, tensor_lives : LazyFrame
        Tables of a join, in any order.

    Returns
    -------
    LazyFrame, ``VA_BLOCK_SHARING``
        One row per process, GPU, VA block and segment, most of the neighbours' bytes first, then by
        address. Bytes add up to those of ``tensor_moves``, fault rows to the GPU's in ``tensor_faults``.
        Neighbours as of :func:`with_neighbours`; who holds, or held last, the bytes there: the positions
        of the moves and faults of that VA block and segment (:func:`with_tensors_there`).

    Examples
    --------
    >>> from nsan.analysis.pca.tables import JOINED_TABLES as tables
    >>> names = ("tensor_moves", "tensor_faults", "tensor_lives")
    >>> va_block_sharing(*(tables[name].empty() for name in names)).collect().height
    0
    """

    def build() -> pl.DataFrame:
        moves, faults, lives = pl.collect_all([tensor_moves, tensor_faults, tensor_lives])
        marked = with_neighbours(moves, faults)
        faulted = faults.filter(pl.col("processor") == "gpu").with_columns(va_block=VA_BLOCK)
        keys = ["pid", "device_id", "va_block", "segment_va"]
        asked = pl.concat([frame.select(*keys, "position") for frame in (marked, faulted)]).unique()
        tables = [
            _moved(marked, keys),
            faulted.group_by(keys).agg(n_fault_rows=pl.len()),
            _tenants(asked, lives, keys),
        ]
        found = asked.select(keys).unique()
        for table in tables:
            found = found.join(table, on=keys, how="left", nulls_equal=True)
        inside = pl.col("segment_va").is_not_null()
        counts = ("n_tensors", "most_tensors")
        neighbours = pl.col("neighbour_in_bytes") + pl.col("neighbour_out_bytes")
        return (
            found.with_columns(pl.col("^.*_bytes$", "n_fault_rows").fill_null(0))
            .with_columns(pl.when(inside).then(pl.col(*counts).fill_null(0)))
            .with_columns(va=pl.col("va_block") * pl.lit(VA_BLOCK_BYTES, pl.UInt64))
            .sort(pl.col("pid", "device_id"), -neighbours, "va_block", "segment_va")
        )

    return VA_BLOCK_SHARING.from_rows(build)


VA_BLOCK: Final = pl.col("va") // VA_BLOCK_BYTES
"""The VA block of ``va``."""

IS_IN: Final = pl.col("direction") != "dtoh"
"""Moved into the GPU of the row."""


def with_neighbours(moves: pl.DataFrame, faults: pl.DataFrame) -> pl.DataFrame:
    """Mark the parts of migrations that moved because of a neighbour in their VA block.

    Parameters
    ----------
    moves : DataFrame, ``TENSOR_MOVES``
        In any order; reads :data:`MOVE_READS`, other columns stay.
    faults : DataFrame, ``TENSOR_FAULTS``
        In any order; reads :data:`FAULT_READS`.

    Returns
    -------
    DataFrame
        The rows in their order with ``va_block`` (UInt64) and two Boolean columns without a null:
        ``neighbour_in``, live (and not stale) bytes that the driver's prefetcher brought in a batch and
        VA block where another tensor of the segment faulted, and this one did not. Faulted there: the
        tensors of that batch's coherence copies there, and that of its fault row if the page lies there.
        ``neighbour_out``, live bytes of an eviction (:func:`with_service`) in which two or more tensors of
        one segment were live, of all these tensors but the one with most bytes there (of equal ones the
        first).
    """
    rows = with_service(moves).with_row_index("_row")
    brought, evicted = _brought(rows, faults), _evicted(rows)
    row = pl.col("_row")
    return rows.with_columns(
        neighbour_in=row.is_in(brought.implode()), neighbour_out=row.is_in(evicted.implode())
    ).drop("_row", "service")


def with_service(moves: pl.DataFrame) -> pl.DataFrame:
    """Tell the services of VA blocks apart: copies of one VA block, direction and batch that follow each other.

    Parameters
    ----------
    moves : DataFrame, ``TENSOR_MOVES``
        In any order; reads :data:`MOVE_READS`, other columns stay.

    Returns
    -------
    DataFrame
        The rows in their order with ``va_block`` (UInt64) and ``service`` (Int64): the copies of a process,
        GPU, direction and cause of eviction in order of start; a new one begins where the VA block or the
        batch is another.
    """
    evicts = pl.col("cause") == "eviction"
    lane = ["pid", "device_id", "direction", "_evicts"]
    here = [*lane, "va_block", "batch_id"]
    changes = pl.any_horizontal(pl.col(key).ne_missing(pl.col(key).shift(1)) for key in here)
    first = pl.int_range(pl.len()) == 0
    return (
        moves.with_columns(va_block=VA_BLOCK, _evicts=evicts)
        .with_row_index("_at")
        .sort(*lane, "start_ns", "migration", "va")
        .with_columns(service=(first | changes).cast(pl.Int64).cum_sum())
        .sort("_at")
        .drop("_at", "_evicts")
    )


def _brought(rows: pl.DataFrame, faults: pl.DataFrame) -> pl.Series:
    """Find the rows that the prefetcher brought beside a tensor of their segment that faulted."""
    place = ["pid", "device_id", "batch_id", "va_block"]
    asked = IS_IN & (pl.col("cause") == "coherence")
    columns = [*place, "tensor_id", "segment_va"]
    first_pages = faults.filter(pl.col("processor") == "gpu").with_columns(va_block=VA_BLOCK)
    faulted = (
        pl.concat([rows.filter(asked).select(columns), first_pages.select(columns)])
        .filter(pl.all_horizontal(pl.col("batch_id", "tensor_id", "segment_va").is_not_null()))
        .unique()
    )
    prefetched = (pl.col("direction") == "htod") & (pl.col("cause") == "prefetch")
    fresh = (pl.col("state") == "live") & ~pl.col("is_stale").fill_null(value=False)
    return (
        rows.filter(prefetched & fresh & pl.col("batch_id").is_not_null())
        .join(faulted, on=[*place, "tensor_id"], how="anti", nulls_equal=True)
        .join(faulted, on=[*place, "segment_va"], how="semi", nulls_equal=True)["_row"]
    )


def _evicted(rows: pl.DataFrame) -> pl.Series:
    """Find the live evicted rows of all tensors of a service and segment but the largest."""
    out = (pl.col("direction") == "dtoh") & (pl.col("cause") == "eviction")
    together = ["service", "segment_va"]
    live = rows.filter(out & (pl.col("state") == "live") & pl.col("tensor_id").is_not_null())
    largest = (
        live.group_by(*together, "tensor_id")
        .agg(pl.col("bytes").sum())
        .sort("bytes", "tensor_id", descending=[True, False])
        .unique(together, keep="first", maintain_order=True)
    )
    # A tensor that is alone in its segment there is its largest.
    return live.join(
        largest.drop("bytes"), on=[*together, "tensor_id"], how="anti", nulls_equal=True
    )["_row"]


def with_tensors_there(asked: pl.DataFrame, lives: pl.DataFrame) -> pl.DataFrame:
    """Count the tensors of a segment that lie in a VA block at a position of the history.

    A segment that was given back and made again at the same address is another one: it begins with the
    tensor that lies at its first byte on memory that no tensor held.

    Parameters
    ----------
    asked : DataFrame
        Reads ``pid``, ``segment_va``, ``va_block``, ``position``; other columns stay.
    lives : DataFrame, ``TENSOR_LIVES``
        In any order; reads :data:`LIFE_READS`.

    Returns
    -------
    DataFrame
        The rows in their order with ``n_held`` (Int64), tensors that held bytes there then (live or
        pending), and ``n_there`` (Int64), these and the ones that had held bytes there that no tensor has
        held since (cached). Null outside any segment or where the position is not known.
    """
    placed = _in_run(asked, _runs(lives))
    stays = _stays(lives, placed)
    begins = stays.select(*_THERE, at="begin", change=pl.lit(1, pl.Int64))
    found = placed
    for name, end in (("n_held", "held_until"), ("n_there", "there_until")):
        ends = stays.select(*_THERE, at=end, change=pl.lit(-1, pl.Int64))
        levels = (
            pl.concat([begins, ends])
            .group_by(*_THERE, "at")
            .agg(pl.col("change").sum())
            .sort(*_THERE, "at")
            .select(*_THERE, "at", pl.col("change").cum_sum().over(_THERE).alias(name))
        )
        counted = nearest(found.lazy(), levels.lazy(), on=("_before", "at"), by=_THERE)
        found = counted.drop("at").collect()
    known = pl.col("segment_va").is_not_null() & pl.col("position").is_not_null()
    counts = pl.col("n_held", "n_there").fill_null(0)
    return (
        found.with_columns(pl.when(known).then(counts))
        .sort("_asked")
        .drop("_asked", "_before", "run")
    )


def _tenants(asked: pl.DataFrame, lives: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """Count the different tensors at the positions asked for, and the most at one of them."""
    placed = _in_run(asked.filter(pl.col("position").is_not_null()), _runs(lives))
    stays = _stays(lives, placed)
    group = pl.col("device_id")
    asked_there = placed.select(*_THERE, asked_by=group, at="_before").unique()
    pairs = stays.join(asked_there.select(*_THERE, "asked_by").unique(), on=_THERE)
    # A tensor counts if one of the positions lies between its begin and the end of its stay.
    met = nearest(
        pairs.lazy(),
        asked_there.lazy().select(*_THERE, "asked_by", "at"),
        on=("begin", "at"),
        by=[*_THERE, "asked_by"],
        forward=True,
    ).filter(pl.col("at") < pl.col("there_until"))
    names = placed.select(*keys, "run").unique()
    tensors = (
        names.lazy()
        .join(
            met.select("run", "va_block", "tensor_id", device_id="asked_by"),
            on=["run", "va_block", "device_id"],
            nulls_equal=True,
        )
        .group_by(keys)
        .agg(n_tensors=pl.col("tensor_id").n_unique().cast(pl.Int64))
        .collect()
    )
    most = with_tensors_there(asked, lives).group_by(keys).agg(most_tensors=pl.col("n_held").max())
    return most.join(tensors, on=keys, how="left", nulls_equal=True)


def _moved(marked: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    size = pl.col("bytes")
    return marked.group_by(keys).agg(
        in_bytes=size.filter(IS_IN).sum(),
        out_bytes=size.filter(~IS_IN).sum(),
        neighbour_in_bytes=size.filter("neighbour_in").sum(),
        neighbour_out_bytes=size.filter("neighbour_out").sum(),
    )


def _runs(lives: pl.DataFrame) -> pl.DataFrame:
    """Add to lives the number of their segment's life (``run``), and when it and the next one begin."""
    place = ["pid", "device_id", "segment_va"]
    starts = (pl.col("va") == pl.col("segment_va")) & (pl.col("reused_bytes").fill_null(0) == 0)
    changes = pl.any_horizontal(pl.col(key).ne_missing(pl.col(key).shift(1)) for key in place)
    ordered = (
        lives.filter(pl.col("segment_va").is_not_null() & (pl.col("block_bytes") > 0))
        .with_columns(begin=pl.col("alloc_sequence").fill_null(_BEFORE))
        .sort(*place, "begin", "va", "tensor_id")
        .with_columns(run=(starts | changes).fill_null(value=True).cast(pl.Int64).cum_sum())
    )
    runs = (
        ordered.group_by("run", maintain_order=True)
        .agg(pl.col(*place).first(), run_begin=pl.col("begin").first())
        .with_columns(run_end=pl.col("run_begin").shift(-1).over(place).fill_null(_NEVER))
    )
    return ordered.join(runs.select("run", "run_begin", "run_end"), on="run", maintain_order="left")


def _in_run(asked: pl.DataFrame, lives: pl.DataFrame) -> pl.DataFrame:
    """Add to questions the life of their segment at that position, and ``_before``, the last entry done."""
    begins = lives.select(*_RUN_KEYS, "run", "run_begin").unique().sort("run_begin", "run")
    return (
        nearest(
            asked.with_row_index("_asked").with_columns(_before=pl.col("position") - 1).lazy(),
            begins.lazy(),
            on=("_before", "run_begin"),
            by=_RUN_KEYS,
        )
        .drop("run_begin")
        .collect()
    )


def _stays(lives: pl.DataFrame, placed: pl.DataFrame) -> pl.DataFrame:
    """List how long each tensor held bytes of the VA blocks asked for, and how long some of them stayed its.

    Entries ``begin`` to ``held_until``: held; to ``there_until``: until the last of the bytes was given to
    another tensor, or its segment ended.
    """
    runs = _runs(lives)
    end = pl.col("va") + pl.col("block_bytes").cast(pl.UInt64)
    block = pl.lit(VA_BLOCK_BYTES, pl.UInt64)
    blocks = pl.int_ranges(
        (pl.col("va") // block).cast(pl.Int64), ((end - 1) // block).cast(pl.Int64) + 1
    )
    low = pl.col("va_block") * block
    parts = (
        runs.with_columns(_end=end, va_block=blocks)
        .explode("va_block")
        .with_columns(pl.col("va_block").cast(pl.UInt64))
        .join(
            placed.select("pid", "va_block").unique(),
            on=["pid", "va_block"],
            how="semi",
            nulls_equal=True,
        )
        .with_columns(va=pl.max_horizontal("va", low), _end=pl.min_horizontal("_end", low + block))
        .with_columns(bytes=(pl.col("_end") - pl.col("va")).cast(pl.Int64))
        .drop("_end")
    )
    owned = (
        cut(parts, edges_of(parts))
        .sort("segment", "begin", "tensor_id")
        .with_columns(_until=pl.col("begin").shift(-1).over("segment").fill_null(_NEVER))
    )
    last = pl.min_horizontal(pl.col("_until").max(), pl.col("run_end").first())
    held = pl.col("free_sequence").fill_null(_NEVER).first()
    return owned.group_by(*_THERE, "tensor_id").agg(
        begin=pl.col("begin").first(), held_until=pl.min_horizontal(held, last), there_until=last
    )
