"""What says where pages are besides copies: releases, CPU faults, and GPU fault rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.loss.events import FAULT_ROW, POPULATED, RELEASED, SETTLED_NS
from nsan.analysis.loss.masks import LEAF_PAGES, LEAVES, PAGES
from nsan.uvm.constants import PAGE_BYTES, VA_BLOCK_BYTES
from nsan.uvm.prefetch import choose_leaves_of_many

if TYPE_CHECKING:
    import numpy as np

SERVED_NS: Final = 100_000
"""A thread that goes on to its next fault after so long had its fault served."""
CLOCK_SLACK_NS: Final = 100_000
"""Releases are on the CPU's clock: copies of before them may seem later by this much."""

OTHERS: Final = pl.Schema(
    {
        "pid": pl.UInt32,
        "va_block": pl.UInt64,
        "device_id": pl.Int64,
        "time_ns": pl.Int64,
        "until_ns": pl.Int64,
        "kind": pl.UInt8,
        "first_page": pl.Int64,
        "last_page": pl.Int64,
    }
)


def others_of(
    copies: pl.DataFrame,
    windows: pl.DataFrame,
    cpu_faults: pl.DataFrame,
    allocations: pl.DataFrame,
    widening: pl.DataFrame,
) -> pl.DataFrame:
    """List what else is known about the pages of the blocks that copies touch.

    Parameters
    ----------
    copies : DataFrame
        As of :func:`nsan.analysis.loss.events.copies_of`.
    windows : DataFrame
        Fault rows, as of :func:`windows_of`.
    cpu_faults : DataFrame, ``CPU_FAULTS``
        One row per fault.
    allocations : DataFrame, ``ALLOCATIONS``
        One row per allocation.
    widening : DataFrame
        ``pid``, ``threshold``: where the prefetcher is known to work, its setting in percent (100:
        it widens to leaves, more is not known). Elsewhere a CPU fault populates its page alone.

    Returns
    -------
    DataFrame
        Of the schema ``OTHERS``, in no order.
    """
    blocks = copies.group_by("pid", "va_block").agg(first_ns=pl.col("start_ns").min())
    released = _releases(allocations, blocks)
    faults = _first_cpu_faults(cpu_faults, blocks, released)
    populated = _populations(faults.join(widening, on="pid", how="left", nulls_equal=True))
    parts = [released, _undisturbed(populated, released), _fault_rows(windows)]
    return pl.concat([part.select(_typed()) for part in parts])


def _typed() -> list[pl.Expr]:
    return [pl.col(name).cast(dtype) for name, dtype in OTHERS.items()]


def _releases(allocations: pl.DataFrame, blocks: pl.DataFrame) -> pl.DataFrame:
    """Say when blocks begin anew: when memory in them is allocated, and twice when it is released."""
    end = pl.col("va") + pl.col("bytes").cast(pl.UInt64)
    known = allocations.filter(pl.col("va").is_not_null() & (pl.col("bytes") > 0)).with_columns(
        end=end
    )
    moments = pl.concat(
        [
            known.select("pid", "va", "end", time_ns="alloc_ns"),
            known.select("pid", "va", "end", time_ns="free_ns"),
            known.select("pid", "va", "end", time_ns=pl.col("free_ns") + CLOCK_SLACK_NS),
        ]
    ).drop_nulls("time_ns")
    return (
        _touched(moments, blocks)
        .unique()
        .with_columns(
            device_id=pl.lit(None, pl.Int64),
            until_ns="time_ns",
            kind=pl.lit(RELEASED),
            # The prefetcher also brings what lies beside the memory in its block.
            first_page=pl.lit(0),
            last_page=pl.lit(PAGES),
        )
    )


def _touched(moments: pl.DataFrame, blocks: pl.DataFrame) -> pl.DataFrame:
    """List the blocks of each allocation in which something moved: it may have many others."""
    schema = pl.Schema(
        {"pid": moments.schema["pid"], "va_block": pl.UInt64(), "time_ns": pl.Int64()}
    )
    found = [pl.DataFrame(schema=schema)]
    by_pid = blocks.select("pid", "va_block").partition_by("pid", as_dict=True)
    for pid, mine in moments.partition_by("pid", as_dict=True).items():
        if pid not in by_pid:
            continue
        places = by_pid[pid]["va_block"].sort()
        low = places.search_sorted(mine["va"] // VA_BLOCK_BYTES, side="left")
        high = places.search_sorted((mine["end"] - 1) // VA_BLOCK_BYTES, side="right")
        rows = (
            mine.select("pid", "time_ns")
            .with_columns(low.cast(pl.Int64).alias("_low"), high.cast(pl.Int64).alias("_high"))
            .filter(pl.col("_low") < pl.col("_high"))
            .with_columns(_place=pl.int_ranges("_low", "_high"))
            .explode("_place")
        )
        found.append(
            rows.with_columns(va_block=places.gather(rows["_place"]))
            .select(schema.names())
            .cast(schema)
        )
    return pl.concat(found)


def _fault_rows(windows: pl.DataFrame) -> pl.DataFrame:
    """Make each fault row an event that asks for its page when the batch is done."""
    page = (pl.col("va") % VA_BLOCK_BYTES // PAGE_BYTES).cast(pl.Int64)
    return windows.select(
        "pid",
        "device_id",
        va_block=pl.col("va") // VA_BLOCK_BYTES,
        time_ns="end_ns",
        until_ns=pl.max_horizontal("start_ns", "after_ns"),
        kind=pl.lit(FAULT_ROW),
        first_page=page,
        last_page=page + 1,
    )


def windows_of(gpu_faults: pl.DataFrame) -> pl.DataFrame:
    """Add to fault rows the end of the row before, where their window begins.

    Parameters
    ----------
    gpu_faults : DataFrame, ``GPU_FAULTS``
        One row per batch.

    Returns
    -------
    DataFrame
        The rows that have times and an address, by process, GPU and end, with ``after_ns``: the
        last end before theirs; null for the first.
    """
    rows = gpu_faults.drop_nulls(["start_ns", "end_ns", "va"]).sort(
        "pid", "device_id", "end_ns", "start_ns", "va"
    )
    ends = rows.select("pid", "device_id", "end_ns").unique(maintain_order=True)
    ends = ends.with_columns(after_ns=pl.col("end_ns").shift(1).over("pid", "device_id"))
    return rows.join(
        ends, on=["pid", "device_id", "end_ns"], nulls_equal=True, maintain_order="left"
    )


def _first_cpu_faults(
    cpu_faults: pl.DataFrame, blocks: pl.DataFrame, released: pl.DataFrame
) -> pl.DataFrame:
    """Choose the CPU faults in each block before its first copy, of the last life of its memory."""
    begin = (
        released.join(blocks, on=["pid", "va_block"], nulls_equal=True)
        .filter(pl.col("time_ns") < pl.col("first_ns"))
        .group_by("pid", "va_block")
        .agg(begin_ns=pl.col("time_ns").max())
    )
    return (
        cpu_faults.drop_nulls(["start_ns", "va"])
        .sort("pid", "start_ns", "va")
        .with_columns(
            va_block=pl.col("va") // VA_BLOCK_BYTES,
            page=(pl.col("va") % VA_BLOCK_BYTES // PAGE_BYTES).cast(pl.Int64),
            next_ns=pl.col("start_ns").shift(-1).over("pid"),
        )
        .join(blocks, on=["pid", "va_block"], nulls_equal=True, maintain_order="left")
        .join(begin, on=["pid", "va_block"], how="left", nulls_equal=True, maintain_order="left")
        .filter(pl.col("start_ns") < pl.col("first_ns"))
        .filter((pl.col("start_ns") >= pl.col("begin_ns")).fill_null(value=True))
        .sort("pid", "va_block", "start_ns", "va")
    )


def _populations(faults: pl.DataFrame) -> pl.DataFrame:
    """Say which pages the CPU populated, and from when on that is certain.

    A page that a CPU fault finds at a GPU leaves it. One that has not done so when the thread has gone
    on to its next fault was populated by the CPU.
    """
    parts = [
        faults.filter(pl.col("threshold").is_null()).with_columns(last_page=pl.col("page") + 1)
    ]
    parts = [part.rename({"page": "first_page"}) for part in parts]
    for (threshold,), mine in (
        faults.drop_nulls("threshold").partition_by("threshold", as_dict=True).items()
    ):
        block = mine.select(pl.struct("pid", "va_block").rle_id().cast(pl.Int64)).to_series()
        leaf = mine["page"] // LEAF_PAGES
        row, first, last = _grown(block.to_numpy(), leaf.to_numpy(), threshold)
        grown = mine[row].drop("page")
        parts.append(
            grown.with_columns(
                pl.Series("last_page", last * LEAF_PAGES, pl.Int64),
                pl.Series("first_page", first * LEAF_PAGES, pl.Int64),
            )
        )
    served = pl.max_horizontal("next_ns", pl.col("start_ns") + SERVED_NS)
    settled = pl.col("start_ns") + SETTLED_NS
    known = pl.when(pl.col("next_ns").is_null()).then(settled)
    return pl.concat(parts, how="diagonal").with_columns(
        device_id=pl.lit(None, pl.Int64),
        time_ns=known.otherwise(pl.min_horizontal(served, settled)),
        until_ns="start_ns",
        kind=pl.lit(POPULATED),
    )


def _undisturbed(grown: pl.DataFrame, released: pl.DataFrame) -> pl.DataFrame:
    """Leave out what is only certain after the memory was released."""
    resets = released.select("pid", "va_block", reset_ns="time_ns")
    spoilt = (
        grown.with_row_index("row")
        .join(resets, on=["pid", "va_block"], nulls_equal=True)
        .filter(pl.col("reset_ns").is_between("start_ns", "time_ns"))["row"]
    )
    return grown.with_row_index("row").filter(~pl.col("row").is_in(spoilt.unique().implode()))


def _grown(
    block: np.ndarray, leaf: np.ndarray, threshold: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Replay the prefetcher to the CPU: which faults populate, and which run of leaves each.

    Faults come by block and time. Each round serves the first one of every block whose leaf is not
    there: at most 32 rounds.
    """
    import numpy as np

    n_blocks = int(block[-1]) + 1 if len(block) else 0
    there = np.zeros((n_blocks, LEAVES), dtype=bool)
    left = np.arange(len(block))
    rows, firsts, lasts = [], [], []
    while len(left):
        left = left[~there[block[left], leaf[left]]]
        if not len(left):
            break
        now = left[np.concatenate([[True], block[left[1:]] != block[left[:-1]]])]
        hit = np.zeros((len(now), LEAVES), dtype=bool)
        hit[np.arange(len(now)), leaf[now]] = True
        pages = (there[block[now]] | hit) * np.int16(LEAF_PAGES)
        comes = choose_leaves_of_many(pages, hit, LEAF_PAGES, threshold) | hit
        there[block[now]] |= comes
        rows.append(now)
        firsts.append(comes.argmax(axis=1))
        lasts.append(LEAVES - comes[:, ::-1].argmax(axis=1))
    empty = [np.zeros(0, dtype=np.int64)]
    return tuple(np.concatenate(parts or empty).astype(np.int64) for parts in (rows, firsts, lasts))  # type: ignore[return-value]
