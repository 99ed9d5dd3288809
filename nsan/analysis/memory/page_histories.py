"""Histories of pages: what residency, refaults and ping-pong share.

Migrations in a total order, cut so finely that all pages of a piece share their history, and the
lives of the memory that they concern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from nsan.analysis.segments import cut, edges_of
from nsan.uvm.constants import MANAGED_KINDS, VA_BLOCK_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


def in_time_order(migrations: pl.DataFrame) -> pl.DataFrame:
    """Put migrations into a total order of time.

    Parameters
    ----------
    migrations : DataFrame, ``MIGRATIONS``
        In any order.

    Returns
    -------
    DataFrame
        The rows that have a start, an address and a size. A row without an end ends when it starts.
    """
    keys = ["start_ns", "sequence", "end_ns", "pid", "device_id", "va", "bytes", "direction"]
    known = pl.col("start_ns").is_not_null() & pl.col("va").is_not_null() & (pl.col("bytes") > 0)
    return (
        migrations.filter(known)
        .with_columns(end_ns=pl.coalesce("end_ns", "start_ns"))
        .sort(*keys, "src_device_id", "cause_id")
    )


@dataclass(frozen=True)
class Pieces:
    """Rows cut so finely that all pages of a piece share their history.

    Attributes
    ----------
    row, segment : array of int
        By piece: its row, and the stretch of addresses that it fills. Neighbouring stretches of a
        process have following numbers.
    va, size : array of int
        By segment: first byte, and bytes.
    """

    row: Ints
    segment: Ints
    va: NDArray[np.uint64]
    size: Ints

    def stretches(self, key: Ints, segment: Ints) -> tuple[Ints, Ints, NDArray[np.uint64]]:
        """Join neighbouring segments that have the same key.

        Parameters
        ----------
        key, segment : array of int
            What makes equal, and where; for each key the segments ascend.

        Returns
        -------
        (array, array, array)
            By stretch, ordered by key and address: where it begins in the given arrays, its bytes and
            its address.
        """
        import numpy as np

        if not len(key):
            return key, key, self.va[:0]
        by_key = np.argsort(key, kind="stable")
        keys, places = key[by_key], segment[by_key]
        new = np.ones(len(keys), bool)
        new[1:] = (keys[1:] != keys[:-1]) | (places[1:] != places[:-1] + 1)
        first = np.flatnonzero(new)
        size = np.add.reduceat(self.size[places], first)
        return by_key[first], size, self.va[places[first]]


def pieces_of(rows: pl.DataFrame) -> Pieces:
    """Cut rows where any of them begins or ends.

    Parameters
    ----------
    rows : DataFrame
        Reads ``pid``, ``va``, ``bytes``.

    Returns
    -------
    Pieces
        Rows are numbered as they come.
    """
    import numpy as np

    # As segments.cut, but in plain arrays: there may be many more pieces than rows.
    ranges = rows.select("pid", "va", "bytes").with_columns(row=pl.int_range(pl.len()))
    none = np.zeros(0, np.int64)
    row, segment, edges, sizes = [none], [none], [none.astype(np.uint64)], [none]
    passed = 0
    for mine in ranges.partition_by("pid"):
        low = mine["va"].to_numpy()
        high = low + mine["bytes"].to_numpy().astype(np.uint64)
        high = np.where(high < low, np.uint64(2**64 - 1), high)  # a broken size wraps around
        places = np.unique(np.concatenate([low, high]))
        first = np.searchsorted(places, low)
        count = np.searchsorted(places, high) - first
        begin = np.cumsum(count) - count
        row.append(np.repeat(mine["row"].to_numpy(), count))
        segment.append(np.arange(count.sum()) + np.repeat(first - begin + passed, count))
        edges.append(places)
        sizes.append(np.append(np.diff(places), np.uint64(0)).astype(np.int64))
        passed += len(places)
    return Pieces(
        np.concatenate(row), np.concatenate(segment), np.concatenate(edges), np.concatenate(sizes)
    )


def gpus_of(rows: pl.DataFrame) -> tuple[pl.DataFrame, Ints, Ints]:
    """Give each GPU a number, and say for each row where it comes to and where it leaves.

    Parameters
    ----------
    rows : DataFrame, ``MIGRATIONS``
        Reads ``pid``, ``direction``, ``device_id``, ``src_device_id``.

    Returns
    -------
    (DataFrame, array of int, array of int)
        ``pid`` and ``device_id`` of each GPU, in that order; by row the number of the GPU that gets
        the pages and of the one that gives them, -1 where that is the CPU or is not known.
    """
    between = pl.col("direction") == "dtod"
    giver = rows.select(
        "pid", device_id=pl.when(between).then("src_device_id").otherwise("device_id")
    )
    here = rows.select("pid", "device_id")
    gpus = pl.concat([here, giver]).unique().sort("pid", "device_id")
    numbers = gpus.with_columns(gpu=pl.int_range(pl.len(), dtype=pl.Int64))

    def number(frame: pl.DataFrame, is_one: pl.Expr) -> Ints:
        found = frame.join(
            numbers, on=["pid", "device_id"], how="left", nulls_equal=True, maintain_order="left"
        )
        one = rows.select(is_one.fill_null(value=False)).to_series()
        return found["gpu"].zip_with(one, pl.Series([-1])).to_numpy()

    comes = pl.col("direction").is_in(["htod", "dtod"])
    # A copy between GPUs whose source is not recorded leaves nobody knows where.
    goes = (pl.col("direction") == "dtoh") | (between & pl.col("src_device_id").is_not_null())
    return gpus, number(here, comes), number(giver, goes)


def lives(allocations: pl.DataFrame) -> pl.DataFrame:
    """Say when managed memory was there: a VA block lives while any allocation in it does.

    Parameters
    ----------
    allocations : DataFrame, ``ALLOCATIONS``
        In any order; kinds that are not managed are left out.

    Returns
    -------
    DataFrame
        ``pid``, ``va``, ``bytes`` of whole VA blocks with ``begin_ns``, ``free_ns`` (null: outside the
        capture); the lives of an address follow each other.
    """
    lasts = pl.col("alloc_ns").is_null() | pl.col("free_ns").is_null()
    managed = allocations.filter(
        pl.col("kind").cast(pl.String).is_in(MANAGED_KINDS),
        lasts | (pl.col("alloc_ns") < pl.col("free_ns")),
    )
    low = pl.col("va") // VA_BLOCK_BYTES * VA_BLOCK_BYTES
    high = pl.col("va") + pl.col("bytes").cast(pl.UInt64)
    size = (high - low + VA_BLOCK_BYTES - 1) // VA_BLOCK_BYTES * VA_BLOCK_BYTES
    whole = closed(managed).with_columns(va=low, bytes=size.cast(pl.Int64))
    pieces = cut(whole, edges_of(whole))
    place = ["segment", "pid", "va", "bytes"]
    come = pieces.select(*place, time_ns="alloc_ns", change=pl.lit(1))
    go = pieces.select(*place, time_ns="free_ns", change=pl.lit(-1)).drop_nulls("time_ns")
    counted = (
        pl.concat([come, go])
        .sort("segment", "time_ns", "change")
        .with_columns(alive=pl.col("change").cum_sum().over("segment"))
    )
    # A life begins where the first allocation comes and ends where the last one goes.
    edges = counted.filter((pl.col("alive") == 0) | (pl.col("alive") == pl.col("change")))
    return (
        edges.with_columns(free_ns=pl.col("time_ns").shift(-1).over("segment"))
        .filter(pl.col("alive") == 1)
        .select("pid", "va", "bytes", begin_ns="time_ns", free_ns="free_ns")
    )


def closed(allocations: pl.DataFrame) -> pl.DataFrame:
    """End an allocation where another one takes its bytes: its release was not recorded.

    Parameters
    ----------
    allocations : DataFrame, ``ALLOCATIONS``
        In any order, all of one address space.

    Returns
    -------
    DataFrame
        The rows that have an address and a size, with the earlier ``free_ns``.
    """
    known = allocations.filter(pl.col("va").is_not_null() & (pl.col("bytes") > 0)).with_row_index(
        "_row"
    )
    taken = (
        cut(known, edges_of(known))
        .sort("segment", "alloc_ns", "free_ns", nulls_last=[False, False, True])
        .with_columns(_taken=pl.col("alloc_ns").shift(-1).over("segment"))
        .group_by("_row")
        .agg(pl.col("_taken").min())
    )
    return (
        known.join(taken, on="_row", how="left", maintain_order="left")
        .with_columns(free_ns=pl.min_horizontal("free_ns", "_taken"))
        .drop("_row", "_taken")
    )


def with_life(rows: pl.DataFrame, allocations: pl.DataFrame) -> pl.DataFrame:
    """Say which life of its memory each migration belongs to.

    Parameters
    ----------
    rows : DataFrame, ``MIGRATIONS``
        In order of time.
    allocations : DataFrame, ``ALLOCATIONS``
        In any order.

    Returns
    -------
    DataFrame
        The rows in their order, cut where a life of memory has its border, with ``life`` (Int64; -1:
        no allocation known), ``begin_ns`` and ``free_ns`` of the life that had begun last when the
        row ended.
    """
    spans = lives(allocations).with_row_index("life").with_columns(pl.col("life").cast(pl.Int64))
    placed = rows.with_row_index("_row")
    found = _life_of(placed.select("_row", "pid", "va", "bytes", _at="end_ns"), spans)
    parts = placed.drop("va", "bytes").join(
        found, on="_row", how="right", maintain_order="right_left"
    )
    return parts.join(
        spans.select("life", "begin_ns", "free_ns"), on="life", how="left", maintain_order="left"
    ).with_columns(pl.col("life").fill_null(-1))


def _life_of(placed: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Cut ranges at the borders of lives and find the last life that began before ``_at``."""
    # Before every time of a trace, where an allocation is older than the capture.
    begin = pl.col("begin_ns").fill_null(-(1 << 62))
    both = pl.concat(
        [placed, spans.select("pid", "va", "bytes", "life", _at=begin)], how="diagonal"
    )
    pieces = cut(both, edges_of(spans))
    known = pieces.filter(pl.col("_row").is_null()).select("segment", "life", "_at").sort("_at")
    return (
        pieces.filter(pl.col("_row").is_not_null())
        .drop("life")
        .sort("_at")
        .join_asof(known, on="_at", by="segment", check_sortedness=False)
        .select("_row", "va", "bytes", "life")
        .sort("_row", "va")
    )
