"""Copies of dead bytes: of cached memory that no tensor holds, or of what the next tensor overwrites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.intervals import overlap, subtraction, union

if TYPE_CHECKING:
    from nsan.analysis.advisor.facts import Facts

_GPU: Final = ("pid", "device_id")
_LENGTH: Final = pl.col("end_ns") - pl.col("start_ns")
_IS_OUT: Final = pl.col("direction") == "dtoh"
_SAME_WORK: Final = (*_GPU, "name", "demangled", "grid", "block")
"""Launches that are alike in this are taken to need the same time by themselves."""


@dataclass(frozen=True)
class Dead:
    """Dead bytes that moved.

    Attributes
    ----------
    in_bytes, out_bytes : int
        Into GPUs, and out of them.
    busy_ns : int
        At most so long the driver copied them, and did what evicting them takes. Each instant counts once.
    waited_ns : int
        At most so much of that held anything up: of a kernel no more than it took longer than the same kernel
        without a page fault.
    segments : DataFrame
        ``segment_va``, ``bytes`` (dead) and ``all_bytes`` (moved): where they were, most first.
    is_private : bool
        Most of them were in a pool of the program's own (MemPool).
    """

    in_bytes: int
    out_bytes: int
    busy_ns: int
    waited_ns: int
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
    busy_ns = _length_ns(union(found.lazy().select("start_ns", "end_ns")))
    is_in = found["direction"] != "dtoh"
    return Dead(
        in_bytes=int(found.filter(is_in)["bytes"].sum()),
        out_bytes=int(found.filter(~is_in)["bytes"].sum()),
        busy_ns=busy_ns,
        waited_ns=min(busy_ns, _waited_ns(facts, union(found.lazy(), by=_GPU))),
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
        .select(*_GPU, "direction", "start_ns", "end_ns", "bytes")
        .collect()
    )


def _length_ns(spans: pl.LazyFrame) -> int:
    return int(spans.select(_LENGTH.sum()).collect().item())


def _waited_ns(facts: Facts, spans: pl.LazyFrame) -> int:
    """Say how much of some time of GPUs can have held anything up, summed over GPUs.

    A kernel that computes beside the copies does not wait all of their time. How long it takes by itself shows
    in a launch of the same work that no batch and no copy fell into; where there is none, all of it counts.
    """
    service = facts.lazy("batches").select(
        *_GPU, "end_ns", start_ns=pl.col("end_ns") - pl.col("service_ns")
    )
    copies = facts.lazy("migrated_parts").select(*_GPU, "end_ns", "start_ns")
    busy = union(pl.concat([service, copies]), by=_GPU)
    kernels = facts.events("kernels").select(*_SAME_WORK, "start_ns", "end_ns")
    kernels = kernels.drop_nulls(("start_ns", "end_ns"))
    quiet = pl.col("overlap_ns") == 0
    alone = overlap(kernels, busy, by=_GPU).filter(quiet).group_by(_SAME_WORK)
    longer = _LENGTH - pl.col("alone_ns")
    most = pl.when(longer > 0).then(pl.min_horizontal("overlap_ns", longer)).otherwise("overlap_ns")
    within = (
        overlap(kernels, spans, by=_GPU)
        .filter(pl.col("overlap_ns") > 0)
        .join(alone.agg(alone_ns=_LENGTH.min()), on=_SAME_WORK, how="left", nulls_equal=True)
        .select(most.sum())
    )
    beside = subtraction(spans, union(kernels, by=_GPU), by=_GPU)
    return _length_ns(beside) + int(within.collect().item())


def _is_private(facts: Facts, segments: pl.DataFrame) -> bool:
    """Say whether most dead bytes were in segments of a MemPool that are still there."""
    held = facts.rows_of("allocator_segments")
    if held is None:
        return False
    pools = held.select("pool", segment_va="va")
    known = segments.join(pools, on="segment_va")
    private = known.filter(pl.col("pool") != "0,0")
    return bool(2 * private["bytes"].sum() > known["bytes"].sum())
