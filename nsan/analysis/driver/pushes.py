"""Pushes: copies that the driver chained into one service of one VA block.

Certain, not inferred: on 46 real captures the copies of a push follow each other by exactly 1 ns in
nsys (0 in nvprof), in one VA block and direction, and the next larger gap was 1.2 us.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.result import DEVICE, PID, Result, derived, recorded
from nsan.schema import DIRECTION
from nsan.uvm.constants import (
    CAUSE_COHERENCE,
    CAUSE_EVICTION,
    CAUSE_PREFETCH,
    CAUSE_USER,
    PUSH_GAPS_NS,
    VA_BLOCK_BYTES,
)

_KEYS: Final = ("pid", "device_id")
_READS: Final = (
    "start_ns",
    "end_ns",
    "pid",
    "device_id",
    "va",
    "bytes",
    "direction",
    "cause_id",
    "sequence",
)

PUSHES: Final = Result(
    "pushes",
    "one push: copies chained in one VA block and direction",
    (
        PID,
        DEVICE,
        derived("push_id", pl.Int64, "id", "Number of the push in order of start, from 0."),
        recorded("direction", DIRECTION, "label", "Which way its copies go."),
        derived("va_block", pl.UInt64, "id", "VA block: address // 2 MiB."),
        derived("start_ns", pl.Int64, "ns", "Start of its first copy."),
        derived("end_ns", pl.Int64, "ns", "End of its last copy."),
        derived("n_migrations", pl.Int64, "rows", "Its copies."),
        derived("va", pl.UInt64, "byte address", "Lowest byte moved."),
        derived("bytes", pl.Int64, "byte", "Bytes moved, all causes."),
        derived("coherence_bytes", pl.Int64, "byte", "Moved because their page faulted."),
        derived("prefetch_bytes", pl.Int64, "byte", "Moved by the driver's prefetcher."),
        derived("eviction_bytes", pl.Int64, "byte", "Moved to make room."),
        derived("user_bytes", pl.Int64, "byte", "Moved by a call of the program."),
    ),
)


def with_push_id(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Say for each copy which push it belongs to.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order; reads ``start_ns``, ``end_ns``, ``pid``, ``device_id``,
        ``va``, ``bytes``, ``direction``, ``sequence``; other columns stay.

    Returns
    -------
    LazyFrame
        The rows that have a start and an address, ordered by process, GPU and start, with
        ``va_block`` (UInt64) and ``push_id`` (Int64, from 0, by the start of the push). Pushes of two
        directions may overlap in time: the copies of a push need not be neighbours.
    """
    lane = ["pid", "device_id", "direction"]
    block = pl.col("va") // VA_BLOCK_BYTES
    same = pl.all_horizontal(
        pl.col(key).eq_missing(pl.col(key).shift(1)) for key in (*lane, "va_block")
    )
    chained = (pl.col("start_ns") - pl.col("end_ns").shift(1)).is_in(PUSH_GAPS_NS)
    # Where an old profiler rounds starts, no copy seems to follow another: `sequence` is exact.
    adjacent = pl.col("va") == pl.col("va").shift(1) + pl.col("bytes").shift(1).cast(pl.UInt64)
    follows = pl.col("sequence") - pl.col("sequence").shift(1) == 1
    linked = pl.when(pl.col("sequence").is_null()).then(chained).otherwise(follows & adjacent)
    # Rows that agree in all these are the same in any order.
    ties = ("va", "bytes", "end_ns", "cause_id", "src_device_id")
    known = migrations.collect_schema().names()
    rest = [name for name in ties if name in known]
    # By direction: an eviction may be under way beside the copies to the GPU that it makes room for.
    rows = (
        migrations.filter(pl.col("start_ns").is_not_null() & pl.col("va").is_not_null())
        .with_columns(va_block=block)
        .sort(*lane, "start_ns", "sequence", *rest)
        .with_columns(_opens=(same & linked).fill_null(value=False).not_())
        .with_columns(_push=pl.col("_opens").cum_sum())
    )
    numbers = (
        rows.filter("_opens")
        .sort("pid", "device_id", "start_ns", "direction", "sequence", *rest)
        .select("_push", push_id=pl.int_range(pl.len(), dtype=pl.Int64))
    )
    return (
        rows.join(numbers, on="_push", how="left")
        .drop("_opens", "_push")
        .sort("pid", "device_id", "start_ns", "push_id", *rest)
    )


@analysis(
    question="In which steps did the driver move each 2 MiB block?",
    result=PUSHES,
    reads={"migrations": _READS},
    source="calibration.md 1",
)
def pushes(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Put copies together into pushes, the services of one VA block.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``PUSHES``
        One row per push, ordered by process, GPU and start. Bytes add up to those of the rows that
        have a start and an address.

    Examples
    --------
    >>> from nsan.schema import MIGRATIONS
    >>> pushes(MIGRATIONS.empty()).collect().height
    0
    """
    size = pl.col("bytes")
    by_cause = {
        "coherence_bytes": CAUSE_COHERENCE,
        "prefetch_bytes": CAUSE_PREFETCH,
        "eviction_bytes": CAUSE_EVICTION,
        "user_bytes": CAUSE_USER,
    }
    return (
        with_push_id(migrations)
        .group_by("push_id")
        .agg(
            *(pl.col(key).first() for key in (*_KEYS, "direction", "va_block", "start_ns")),
            pl.col("end_ns").max(),
            pl.len().alias("n_migrations"),
            pl.col("va").min(),
            size.sum(),
            *(size.filter(pl.col("cause_id") == n).sum().alias(c) for c, n in by_cause.items()),
        )
        .sort("push_id")
        .select(PUSHES.cast())
    )
