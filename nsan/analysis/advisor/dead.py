"""Copies of dead bytes: of cached memory that no tensor holds, or of what the next tensor overwrites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.intervals import union

if TYPE_CHECKING:
    from nsan.analysis.advisor.facts import Facts

_GPU: Final = ("pid", "device_id")
_LENGTH: Final = pl.col("end_ns") - pl.col("start_ns")
_IS_OUT: Final = pl.col("direction") == "dtoh"


@dataclass(frozen=True)
class Dead:
    """Dead bytes that moved.

    Attributes
    ----------
    in_bytes, out_bytes : int
        Into GPUs, and out of them.
    busy_ns : int
        At most so long the driver copied them, and did what evicting them takes. Each instant counts once.
    segments : DataFrame
        ``segment_va``, ``bytes`` (dead) and ``all_bytes`` (moved): where they were, most first.
    is_private : bool
        Most of them were in a pool of the program's own (MemPool).
    """

    in_bytes: int
    out_bytes: int
    busy_ns: int
    segments: pl.DataFrame
    is_private: bool


def dead_copies(facts: Facts) -> Dead:
    """Measure the copies of dead bytes.

    Parameters
    ----------
    facts : Facts
        Of a trace with a memory snapshot that fits it.

    Returns
    -------
    Dead
        Sizes, time and places.
    """
    dead = pl.col("bytes").filter("is_dead")
    segments = (
        facts.lazy("migrated_parts")
        .drop_nulls("segment_va")
        .group_by("segment_va")
        .agg(all_bytes=pl.col("bytes").sum(), bytes=dead.sum())
        .filter(pl.col("bytes") > 0)
        .sort("bytes", "segment_va", descending=[True, False])
        .collect()
    )
    found = _copies(facts)
    times = union(found.lazy().select("start_ns", "end_ns")).select(_LENGTH.sum())
    is_in = found["direction"] != "dtoh"
    return Dead(
        in_bytes=int(found.filter(is_in)["bytes"].sum()),
        out_bytes=int(found.filter(~is_in)["bytes"].sum()),
        busy_ns=int(times.collect().item()),
        segments=segments,
        is_private=_is_private(facts, segments),
    )


def _copies(facts: Facts) -> pl.DataFrame:
    """List the copies with dead bytes, each as long as its share of them.

    An eviction begins where the copy before it ended, or service of its batch began: until it starts, the
    driver unmaps its pages.
    """
    share = pl.col("bytes") / pl.col("all_bytes")
    service = facts.lazy("batches").select(
        "batch_id", served_ns=pl.col("end_ns") - pl.col("service_ns")
    )
    before = pl.col("end_ns").shift(1).over(_GPU)
    earliest = pl.max_horizontal("before_ns", "served_ns").fill_null(pl.col("start_ns"))
    start = pl.when(_IS_OUT).then(pl.min_horizontal("start_ns", earliest)).otherwise("start_ns")
    return (
        facts.lazy("migrated_parts")
        .group_by("migration")
        .agg(
            pl.col(*_GPU, "start_ns", "end_ns", "direction", "batch_id").first(),
            all_bytes=pl.col("bytes").sum(),
            bytes=pl.col("bytes").filter("is_dead").sum(),
        )
        .sort(*_GPU, "start_ns", "migration")
        .with_columns(before_ns=before)
        .filter(pl.col("bytes") > 0)
        .join(service, on="batch_id", how="left", maintain_order="left")
        .with_columns(start_ns=start)
        .with_columns(end_ns=pl.col("start_ns") + (_LENGTH * share).cast(pl.Int64))
        .select("direction", "start_ns", "end_ns", "bytes")
        .collect()
    )


def _is_private(facts: Facts, segments: pl.DataFrame) -> bool:
    """Say whether most dead bytes were in segments of a MemPool that are still there."""
    held = facts.rows_of("allocator_segments")
    if held is None:
        return False
    pools = held.select("pool", segment_va="va")
    known = segments.join(pools, on="segment_va")
    private = known.filter(pl.col("pool") != "0,0")
    return bool(2 * private["bytes"].sum() > known["bytes"].sum())
