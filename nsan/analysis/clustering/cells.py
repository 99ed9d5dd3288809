"""Cells of the address-time map: what moved in a time bin and VA block, and dense cells put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.clustering.stretches import KEYS
from nsan.uvm.constants import (
    CAUSE_COHERENCE,
    CAUSE_EVICTION,
    CAUSE_PREFETCH,
    CAUSE_USER,
    PAGE_BYTES,
    VA_BLOCK_BYTES,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NOISE: Final = -1
"""`cluster_id` of what is in no cluster."""

CELL: Final = (*KEYS, "time_bin", "va_block")
_BLOCKS_IN_BIN: Final = 8

PAGE_COUNTS: Final = (
    "n_fault_pages",
    "n_prefetch_pages",
    "n_user_pages",
    "n_evicted_pages",
    "n_cpu_fault_pages",
    "n_other_pages",
)


FAULT_KINDS: Final = 2
"""The first counts are of copies to a GPU by faults, the driver's prefetcher or an unknown cause."""


def _kind() -> pl.Expr:
    """Say in which of the counts a copy falls: each in exactly one."""
    cause, to_gpu = pl.col("cause_id"), pl.col("direction") != "dtoh"
    unsaid = cause.is_null() | (cause == 0)
    by_fault = cause.is_in([CAUSE_COHERENCE, CAUSE_PREFETCH])
    return (
        pl.when(to_gpu & ((cause == CAUSE_COHERENCE) | unsaid))
        .then(0)
        .when(to_gpu & (cause == CAUSE_PREFETCH))
        .then(1)
        .when(cause == CAUSE_USER)
        .then(2)
        .when(cause == CAUSE_EVICTION)
        .then(3)
        .when(by_fault & (pl.col("direction") == "dtoh"))
        .then(4)
        .otherwise(5)
        .cast(pl.Int8)
    )


_ORDER: Final = (*KEYS, "start_ns", "va", "bytes")


def _ordered(copies: pl.DataFrame) -> pl.DataFrame:
    """Sort, unless the rows are in order: a store has them so, and a sort of ten million takes long."""
    least = {"pid": -1, "device_id": -(2**63)}
    behind = pl.lit(value=False)
    for name in reversed(_ORDER):
        value = pl.col(name)
        if name in least:
            value = value.cast(pl.Int64).fill_null(least[name])
        before = value.shift(1)
        behind = (value < before) | ((value == before) & behind)
    return copies.sort(_ORDER) if copies.select(behind.any()).item() else copies


def _copies(migrations: pl.LazyFrame, last_kind: int) -> pl.DataFrame:
    """Take what the map needs of each copy that has a start, an address and a size.

    ``place`` numbers the pairs of process and GPU, from 0 in order.
    """
    copies = _ordered(
        migrations.filter(
            pl.col("start_ns").is_not_null() & pl.col("va").is_not_null() & (pl.col("bytes") > 0)
        )
        .with_columns(kind=_kind())
        .filter(pl.col("kind") <= last_kind)
        .select(
            *KEYS,
            "start_ns",
            end_ns=pl.max_horizontal("start_ns", "end_ns"),
            va="va",
            bytes="bytes",
            va_block=(pl.col("va") // VA_BLOCK_BYTES).cast(pl.Int64),
            kind="kind",
            has_causes=(pl.col("cause_id").is_not_null() & (pl.col("cause_id") != 0)),
        )
        .collect()
    )
    other = pl.any_horizontal(pl.col(k).ne_missing(pl.col(k).shift(1)) for k in KEYS)
    first = pl.int_range(pl.len()) == 0
    placed = copies.with_columns(place=(other & ~first).cum_sum().cast(pl.Int64))
    known = placed.group_by("place").agg(pl.col("has_causes").any()).sort("place")["has_causes"]
    return placed.with_columns(has_causes=known.gather(placed["place"]))


def _time_bins(copies: pl.DataFrame) -> pl.Series:
    """Choose the bin of each place: about the time in which faults go on by 8 blocks.

    That is 8 times the median time between two faults that open another VA block than the one
    before, rounded up to a power of two.
    """
    opens = pl.any_horizontal(
        pl.col(k).ne_missing(pl.col(k).shift(1)) for k in ("place", "va_block")
    )
    same = pl.col("place") == pl.col("place").shift(1)
    step = (
        copies.lazy()
        .filter(pl.col("kind") == 0)
        .select("place", "start_ns", "va_block")
        .filter(opens)
        .with_columns(_step=pl.when(same).then(pl.col("start_ns").diff()))
        .filter(pl.col("_step") > 0)
        .group_by("place")
        .agg(_step=pl.col("_step").median() * _BLOCKS_IN_BIN)
    )
    power = pl.lit(2.0).pow(pl.col("_step").fill_null(1.0).log(2).ceil()).cast(pl.Int64)
    places = copies.lazy().select("place").unique().join(step, on="place", how="left").sort("place")
    return places.select(pl.max_horizontal(power, 1)).collect().to_series()


def _cells(copies: pl.DataFrame) -> pl.DataFrame:
    """Add up the copies of each cell; cells by process, GPU, time and block."""
    pages = (pl.col("bytes") + PAGE_BYTES - 1) // PAGE_BYTES
    in_gpu, end = pl.col("kind") < FAULT_KINDS, pl.col("va") + pl.col("bytes").cast(pl.UInt64)
    inside = {c: pl.when(in_gpu).then(pl.col(c)) for c in ("start_ns", "va", "end_ns", "bytes")}
    kinds = copies["kind"].unique().to_list()
    counts = {name: kind for kind, name in enumerate(PAGE_COUNTS) if kind in kinds}
    absent = [pl.lit(0, pl.Int64).alias(name) for name in PAGE_COUNTS if name not in counts]
    return (
        copies.lazy()
        .with_columns(_pages=pages, _end=pl.when(in_gpu).then(end))
        .group_by("cell")
        .agg(
            pl.col(*CELL, "place", "time_bin_ns").first(),
            *((pl.col("_pages") * (pl.col("kind") == k)).sum().alias(n) for n, k in counts.items()),
            inside["start_ns"].min().alias("start_ns"),
            inside["va"].min().alias("va"),
            inside["end_ns"].max().alias("end_ns"),
            pl.col("_end").max().alias("va_end"),
            inside["bytes"].sum().alias("bytes"),
        )
        .with_columns(absent)
        .sort("cell")
        .collect()
    )


def _coordinates(cells: pl.DataFrame, reach: int) -> tuple[NDArray[np.int64], int]:
    """Give the cells numbers so that a neighbour's number differs by a constant; they stay in order.

    Gaps wider than the reach are cut to it, so that the numbers fit into 64 bits whatever the bins.
    """
    import numpy as np

    far = reach + 1
    other = cells.select(
        pl.any_horizontal(pl.col(k).ne_missing(pl.col(k).shift(1)) for k in KEYS)
    ).to_series()
    step = np.minimum(np.diff(cells["time_bin"].to_numpy(), prepend=0), far)
    step[other.fill_null(value=True).to_numpy()] = far
    block = cells["va_block"].to_numpy()
    known = np.unique(block)
    place = np.cumsum(np.minimum(np.diff(known, prepend=known[:1]), far))
    # Numbers behind the last block belong to no cell: a row never touches the next.
    width = int(place[-1]) + far
    return np.cumsum(step) * width + place[np.searchsorted(known, block)], width


def _found(
    among: NDArray[np.int64], wanted: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Look numbers up in an ordered list: the place, and whether it is there."""
    import numpy as np

    at = np.searchsorted(among, wanted)
    at[at == len(among)] = 0
    return at, among[at] == wanted


def labels_of(cells: pl.DataFrame, *, min_pages: int, reach: int) -> NDArray[np.int64]:
    """Put neighbouring dense cells together.

    Parameters
    ----------
    cells : DataFrame
        ``pid``, ``device_id``, ``time_bin``, ``va_block`` (Int64), ``n_fault_pages``; ordered by the
        first four, each cell once.
    min_pages : int
        Faulted pages of a dense cell.
    reach : int
        Neighbours are up to this many bins and blocks apart.

    Returns
    -------
    array of int64
        Cluster of each cell, numbered by their first dense cells; -1 is noise. A cell that is not
        dense belongs to the first cluster with a dense cell next to it.
    """
    import numpy as np
    from scipy.sparse import coo_array  # type: ignore[import-untyped]
    from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]

    labels = np.full(cells.height, NOISE, dtype=np.int64)
    dense = cells["n_fault_pages"].to_numpy() >= min_pages
    if not dense.any():
        return labels
    number, width = _coordinates(cells, reach)
    offsets = np.array(
        [dt * width + db for dt in range(-reach, reach + 1) for db in range(-reach, reach + 1)]
    )
    core = number[dense]
    rows, columns = [], []
    for offset in offsets[offsets > 0]:
        at, there = _found(core, core + offset)
        rows.append(np.flatnonzero(there).astype(np.int32))
        columns.append(at[there].astype(np.int32))
    ends = np.concatenate(rows), np.concatenate(columns)
    links = coo_array((np.ones(len(ends[0]), dtype=np.int8), ends), shape=(len(core), len(core)))
    _, component = connected_components(links, directed=False)
    first = np.unique(component, return_index=True)[1]
    # Components in order of their first cell, whatever order they were found in.
    own = np.argsort(np.argsort(first))[component]
    labels[dense] = own
    loose = number[~dense]
    best = np.full(len(loose), len(core), dtype=np.int64)
    for offset in offsets:
        at, there = _found(core, loose + offset)
        best = np.where(there, np.minimum(best, own[at]), best)
    labels[~dense] = np.where(best < len(core), best, NOISE)
    return labels


def labelled(copies: pl.DataFrame, min_pages: int, reach: int) -> pl.DataFrame:
    """Add up the copies of each cell and give it its cluster.

    Parameters
    ----------
    copies : DataFrame
        As of :func:`mapped`.
    min_pages, reach : int
        As for :func:`labels_of`.

    Returns
    -------
    DataFrame
        One row per cell, ordered; ``cluster_id`` is null where no fault moved anything.
    """
    cells = _cells(copies)
    faulted = cells["n_fault_pages"] > 0
    labels = labels_of(cells.filter(faulted), min_pages=min_pages, reach=reach)
    chosen = cells.select("cell").filter(faulted).with_columns(pl.Series("cluster_id", labels))
    # A push may go on in the next bin with what the prefetcher adds to a fault of this one.
    keys = ("place", "va_block")
    next_bin = (pl.col("time_bin") - pl.col("time_bin").shift(1) == 1) & pl.all_horizontal(
        pl.col(k) == pl.col(k).shift(1) for k in keys
    )
    before = pl.when(next_bin).then(pl.col("cluster_id").shift(1))
    brought = (pl.col("n_fault_pages") > 0) | (pl.col("n_prefetch_pages") > 0)
    return (
        cells.join(chosen, on="cell", how="left")
        .sort(*keys, "time_bin")
        .with_columns(
            cluster_id=pl.when(brought).then(pl.coalesce("cluster_id", before, pl.lit(NOISE)))
        )
        .sort("cell")
    )


def mapped(migrations: pl.LazyFrame, time_bin_ns: int, *, faults_only: bool) -> pl.DataFrame:
    """Put each copy into its time bin.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration.
    time_bin_ns : int
        Length of a bin; 0 takes it from the trace.
    faults_only : bool
        Keep only copies to a GPU by a fault, the driver's prefetcher, or an unknown cause.

    Returns
    -------
    DataFrame
        Copies that have a start, an address and a size, by process, GPU, start and address, with
        ``place`` (number of the process and GPU), ``time_bin``, ``va_block``, ``cell`` (number of the
        cell, ascending by place, time and block) and ``kind`` (which of :data:`PAGE_COUNTS`).
    """
    copies = _copies(migrations, FAULT_KINDS - 1 if faults_only else len(PAGE_COUNTS) - 1)
    bins = (
        pl.lit(time_bin_ns, pl.Int64) if time_bin_ns else _time_bins(copies).gather(copies["place"])
    )
    binned = copies.with_columns(time_bin_ns=bins).with_columns(
        time_bin=pl.col("start_ns") // pl.col("time_bin_ns")
    )
    block, keys = pl.col("va_block"), ("place", "time_bin")
    column = pl.any_horizontal(pl.col(k) != pl.col(k).shift(1) for k in keys).fill_null(value=False)
    # One number instead of four columns: rows come by place and time, so the columns of the map do.
    number = column.cum_sum().cast(pl.Int64) * (block.max() - block.min() + 1)
    return binned.with_columns(cell=number + block - block.min())
