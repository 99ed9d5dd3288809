"""What became of memory that prefetch calls brought: by allocation, with the time that the calls took.

Calls and copies are joined by the analysis ``user_prefetches``; what they pushed out of the GPU, by ``refaults``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.advisor.waits import KEYS, Part, batches_of, services, waited
from nsan.analysis.attribution.places import NOWHERE, places
from nsan.analysis.intervals import overlap, subtraction, union
from nsan.analysis.nearest import nearest
from nsan.uvm.constants import CAUSE_USER, VA_BLOCK_BYTES

if TYPE_CHECKING:
    from nsan.analysis.advisor.facts import Facts
    from nsan.analysis.result import Kind

_SOON_NS: Final = 1_000_000
"""Work that begins this soon after a prefetch waited for it."""


@dataclass(frozen=True)
class Prefetched:
    """The prefetches of one allocation to one GPU.

    Attributes
    ----------
    allocation : dict
        Row of ``faults_by_allocation``.
    row : dict
        ``pid``, ``device_id``; ``n`` prefetches, ``bytes`` that they brought, ``early_bytes`` of these evicted before
        any work began (None: not known), ``late_bytes`` that faults moved meanwhile.
    calls : DataFrame
        The prefetches: rows of ``user_prefetches``.
    idle_ns : int
        Time in which they were under way or the next work waited for them, and no work ran on the GPU.
    """

    allocation: dict[str, Any]
    row: dict[str, Any]
    calls: pl.DataFrame
    idle_ns: int

    @property
    def part(self) -> Part:
        """The allocation."""
        return Part.of(self.allocation)


@dataclass(frozen=True)
class PushedOut:
    """What prefetches of an allocation evicted, and page faults brought back to the same GPU.

    Attributes
    ----------
    bytes : int
        All of it.
    own_bytes : int
        What the prefetches brought, and faults brought again after an eviction.
    others : dict of int to int
        Of other allocations, by number, most first: bytes.
    others_ns : int
        Time in which the driver serviced the faults that brought back evicted memory of others, or evicted, on
        whosever behalf: what comes back pushes out the next that is needed.
    kind : str
        Of that time.
    """

    bytes: int
    own_bytes: int
    others: dict[int, int]
    others_ns: int
    kind: Kind


NOTHING: Final = PushedOut(0, 0, {}, 0, "derived")
"""Nothing was evicted, as far as is known."""


def held_allocations(facts: Facts) -> pl.DataFrame:
    """List the allocations of a trace, as :func:`nsan.analysis.attribution.places.places` takes them.

    Parameters
    ----------
    facts : Facts
        A trace.

    Returns
    -------
    DataFrame
        ``key`` is the number of ``faults_by_allocation``.
    """
    return (
        facts.lazy("faults_by_allocation")
        .select(
            "pid",
            "va",
            "bytes",
            "alloc_ns",
            "free_ns",
            key=pl.col("allocation_id").fill_null(NOWHERE),
        )
        .collect()
    )


def prefetched(facts: Facts) -> list[Prefetched]:
    """List what prefetch calls brought to GPUs, by allocation, what took longest first.

    Parameters
    ----------
    facts : Facts
        A trace.

    Returns
    -------
    list of Prefetched
        Empty where nothing is known of any call.
    """
    calls, allocations = facts.rows_of("user_prefetches"), facts.rows_of("faults_by_allocation")
    if calls is None or allocations is None:
        return []
    calls = calls.filter(pl.col("device_id").is_not_null(), pl.col("bytes") > 0)
    placed = places(calls.select("pid", "va", "start_ns", "prefetch_id"), held_allocations(facts))
    own = placed.select("prefetch_id", "key").filter(pl.col("key") != NOWHERE)
    calls = calls.join(own, on="prefetch_id", maintain_order="left")
    found = []
    for mine in calls.partition_by([*KEYS, "key"], maintain_order=True):
        row = {
            "pid": mine["pid"][0],
            "device_id": mine["device_id"][0],
            "n": mine.height,
            "bytes": int(mine["bytes"].sum()),
            "early_bytes": None
            if mine["early_bytes"].has_nulls()
            else int(mine["early_bytes"].sum()),
            "late_bytes": int(mine["late_bytes"].fill_null(0).sum()),
        }
        allocation = allocations.filter(pl.col("allocation_id") == mine["key"][0]).row(
            0, named=True
        )
        found.append(Prefetched(allocation, row, mine, length_ns(idle_spans(facts, mine))))
    return sorted(found, key=lambda each: (-each.idle_ns, each.allocation["allocation_id"]))


def idle_spans(facts: Facts, calls: pl.DataFrame) -> pl.LazyFrame:
    """List when nothing but prefetches kept a GPU: from the call, or the end of work, to the next work.

    Parameters
    ----------
    facts : Facts
        A trace.
    calls : DataFrame
        Rows of ``user_prefetches``.

    Returns
    -------
    LazyFrame
        ``pid``, ``device_id``, ``start_ns``, ``end_ns``: they do not overlap.
    """
    work = pl.concat(
        facts.events(name).select(*KEYS, "start_ns", "end_ns")
        for name in ("kernels", "copies", "memsets")
    ).filter(pl.all_horizontal(pl.col("start_ns", "end_ns").is_not_null()))
    begun = calls.lazy().select(*KEYS, "end_ns", start_ns=pl.coalesce("call_start_ns", "start_ns"))
    after = work.select(*KEYS, _next_ns="start_ns")
    waiting = nearest(
        begun, after, on=("end_ns", "_next_ns"), by=KEYS, forward=True, tolerance_ns=_SOON_NS
    ).select(*KEYS, "start_ns", end_ns=pl.coalesce("_next_ns", "end_ns"))
    return union(subtraction(waiting, work, by=KEYS), by=KEYS)


def length_ns(spans: pl.LazyFrame) -> int:
    """Measure wall time: each instant once.

    Parameters
    ----------
    spans : LazyFrame
        ``start_ns`` and ``end_ns``.

    Returns
    -------
    int
        Nanoseconds.
    """
    whole = union(spans.select("start_ns", "end_ns"))
    return int(whole.select((pl.col("end_ns") - pl.col("start_ns")).sum()).collect().item())


def pushed_out(facts: Facts, found: Prefetched) -> PushedOut:
    """Find what prefetches evicted that page faults had to bring back.

    Parameters
    ----------
    facts : Facts
        A trace, whole.
    found : Prefetched
        The prefetches.

    Returns
    -------
    PushedOut
        The bytes, and the time that it took.
    """
    refaults = facts.rows_of("refaults")
    if refaults is None:
        return NOTHING
    back = refaults.filter("is_same_device", pl.col("is_by_fault").fill_null(value=False))
    placed = places(back.with_columns(start_ns="evicted_ns"), held_allocations(facts))
    begun = pl.coalesce("call_start_ns", "start_ns")
    spans = union(found.calls.lazy().select(*KEYS, "end_ns", start_ns=begun), by=KEYS)
    moments = placed.lazy().with_columns(start_ns=pl.col("evicted_ns") - 1, end_ns="evicted_ns")
    pushed = overlap(moments, spans, by=KEYS).filter(pl.col("overlap_ns") > 0).collect()
    own = pl.col("key") == found.allocation["allocation_id"]
    sums = (
        pushed.filter(~own)
        .group_by("key")
        .agg(pl.col("bytes").sum())
        .sort("bytes", "key", descending=[True, False])
    )
    others = {key: size for key, size in sums.iter_rows() if key != NOWHERE}
    returned = placed.filter(~own).lazy().select(*KEYS, end_ns="time_ns")
    if others:
        returned = pl.concat([returned, facts.lazy("evictions").select(*KEYS, "end_ns")])
    waits = waited(facts, batches_of(services(facts), returned))
    own_bytes = _brought_before(facts, found, placed.filter(own))
    return PushedOut(int(pushed["bytes"].sum()), own_bytes, others, waits.ns, waits.kind)


def _brought_before(facts: Facts, found: Prefetched, back: pl.DataFrame) -> int:
    """Add up what came back after an eviction, and what a prefetch call had brought before that."""
    by_block = [*KEYS, "block"]
    block = pl.col("va") // VA_BLOCK_BYTES
    came = facts.events("migrations").filter(
        found.part.holds(pl.col("bytes")), pl.col("direction") == "htod"
    )
    arrivals = came.select(
        *KEYS, block=block, came_ns="end_ns", by_call=pl.col("cause_id") == CAUSE_USER
    )
    moments = back.lazy().with_columns(block=block)
    last = nearest(moments, arrivals, on=("evicted_ns", "came_ns"), by=by_block)
    return int(last.filter("by_call").select(pl.col("bytes").sum()).collect().item())
