"""Managed memory that a program gives back and allocates again: how much of it, and what that costs.

An allocation is made again where it fits, for the most part, into what was given back before: an allocator that keeps
all that it ever had and wastes nothing would not have asked the driver for it. So this is about the most that any
cache can save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.attribution.places import places
from nsan.analysis.intervals import overlap, subtraction, union
from nsan.analysis.nearest import nearest
from nsan.analysis.pca.ledger import MEMORY_CALL

if TYPE_CHECKING:
    from nsan.analysis.advisor.facts import Facts

_MINE: Final = ("pid", "allocation_id", "name", "part", "bytes", "va", "alloc_ns", "free_ns")
_COUNTED: Final = ("n_cpu_faults",)
_GROUP: Final = ("pid", "bytes")
_SPAN: Final = ("start_ns", "end_ns")
_LENGTH: Final = pl.col("end_ns") - pl.col("start_ns")


@dataclass(frozen=True)
class Remade:
    """What a program gives back and allocates again.

    Attributes
    ----------
    allocations : DataFrame
        The managed allocations, with ``is_remade`` and ``first_touch_ns`` and ``n_first_touch`` (of it, where it is
        made again; null: first touches were not recorded).
    first_touch_ns : int or None
        Time in which the driver made memory usable that is made again, copies of evictions left out; each instant
        counts once. None: not recorded.
    idle_ns : int or None
        At most so long GPUs had nothing to do because of the calls. None: not recorded.
    """

    allocations: pl.DataFrame
    first_touch_ns: int | None
    idle_ns: int | None

    @property
    def again(self) -> pl.DataFrame:
        """Those that are made again."""
        return self.allocations.filter("is_remade")

    @property
    def by_size(self) -> pl.DataFrame:
        """Sum up by process and size those of which one is made again, the costliest first."""
        return (
            self.allocations.filter(pl.col("is_remade").any().over(_GROUP))
            .sort("alloc_ns", "va", nulls_last=False)
            .group_by(_GROUP, maintain_order=True)
            .agg(
                pl.col("allocation_id", "name", "part", "va").first(),
                n_allocations=pl.len(),
                n_remade=pl.col("is_remade").sum(),
                n_first_touch=pl.col("n_first_touch").sum(),
                first_touch_ns=pl.col("first_touch_ns").sum(),
            )
            .sort(
                "first_touch_ns", pl.col("n_remade") * pl.col("bytes"), "bytes", "pid",
                descending=True,
            )
        )  # fmt: skip


def remade(facts: Facts, allocations: pl.DataFrame) -> Remade:
    """Find what is made again, and what that costs.

    Parameters
    ----------
    facts : Facts
        Of which trace.
    allocations : DataFrame
        Of ``faults_by_allocation``, the recorded allocations.

    Returns
    -------
    Remade
        Nothing of it is measured where nothing is made again.
    """
    found = with_reuse(allocations.select(*_MINE, *_COUNTED))
    again = found.filter("is_remade")
    if again.is_empty():
        nothing = pl.lit(None, pl.Int64)
        return Remade(found.with_columns(first_touch_ns=nothing, n_first_touch=nothing), None, None)
    served = _served(facts, found)
    spent = served.group_by("allocation_id").agg(
        n_first_touch=pl.len().cast(pl.Int64), first_touch_ns=_LENGTH.sum()
    )
    is_known = facts.is_recorded("gpu_faults")
    counted = [
        pl.when(pl.lit(is_known)).then(pl.col(name).fill_null(0)).alias(name)
        for name in ("n_first_touch", "first_touch_ns")
    ]
    table = found.join(spent, on="allocation_id", how="left", maintain_order="left")
    evictions = facts.events("migrations").filter(pl.col("cause") == "eviction").select(_SPAN)
    alone = subtraction(served.lazy().select(_SPAN), evictions).collect()
    return Remade(
        table.with_columns(counted),
        int(alone.select(_LENGTH.sum()).item()) if is_known else None,
        _idle_ns(facts, found),
    )


def with_reuse(allocations: pl.DataFrame) -> pl.DataFrame:
    """Mark the allocations that fit into memory that was given back.

    Parameters
    ----------
    allocations : DataFrame
        Reads ``pid``, ``allocation_id``, ``bytes``, ``alloc_ns`` (null: before the capture) and ``free_ns`` (null:
        not in it).

    Returns
    -------
    DataFrame
        The rows with ``is_remade``: more than half of it fits, that is, makes the process hold no more than it
        ever held before.
    """
    made = allocations.select(
        "pid", "allocation_id", at_ns="alloc_ns", change="bytes", is_made=pl.lit(value=True)
    )
    back = allocations.filter(pl.col("free_ns").is_not_null()).select(
        "pid",
        "allocation_id",
        at_ns="free_ns",
        change=-pl.col("bytes"),
        is_made=pl.lit(value=False),
    )
    held, most = pl.col("change").cum_sum().over("pid"), pl.col("_held").cum_max().over("pid")
    steps = (
        pl.concat([made, back])
        # What is given back at the same time was there first.
        .sort("pid", "at_ns", "is_made", "allocation_id", nulls_last=False)
        .with_columns(_held=held)
        .with_columns(_most=most)
        .with_columns(_new=pl.col("_most") - pl.col("_most").shift(1).over("pid"))
        .with_columns(is_remade=2 * pl.col("_new") < pl.col("change"))
        .filter("is_made")
    )
    marks = steps.select("allocation_id", pl.col("is_remade").fill_null(value=False))
    return allocations.join(marks, on="allocation_id", how="left", maintain_order="left")


def _served(facts: Facts, found: pl.DataFrame) -> pl.DataFrame:
    """List the service of batches that only made memory usable that is made again."""
    end = pl.col("end_ns")
    touched = (
        facts.lazy("batches")
        .filter(pl.col("outcome") == "first_touch", pl.all_horizontal(pl.col("va", *_SPAN).is_not_null()))
        .select("pid", "va", "start_ns", "end_ns", _from=end - pl.col("service_ns"))
        .collect()
    )  # fmt: skip
    held = found.with_columns(key="allocation_id")
    again = found.filter("is_remade").select("allocation_id")
    return (
        places(touched, held)
        .join(again, left_on="key", right_on="allocation_id", how="semi")
        .select("end_ns", allocation_id="key", start_ns=pl.coalesce("_from", "start_ns"))
    )


def _idle_ns(facts: Facts, found: pl.DataFrame) -> int | None:
    """Measure for how long at most GPUs had nothing to do because of the calls.

    That is, in each pause that such a call reaches into: no more than the pause, and no more than the calls took
    since work began before it. For a call that waits for the GPU keeps the host from going ahead, and what
    the host does after it could have been done while it waited.
    """
    calls = _calls(facts, found)
    if calls.is_empty():
        return None
    tables = ("kernels", "copies", "memsets")
    busy = union(pl.concat([facts.events(name).select(_SPAN) for name in tables])).collect()
    first, last = calls["start_ns"].min(), calls["end_ns"].max()
    # A pause lies behind each stretch of work; one more before the first.
    pauses = pl.concat([pl.DataFrame({name: [first] for name in _SPAN}), busy]).select(
        since_ns="start_ns",
        start_ns="end_ns",
        end_ns=pl.col("start_ns").shift(-1).fill_null(last),
    )
    merged = union(calls.lazy())
    inside = overlap(pauses.lazy(), merged).filter(pl.col("overlap_ns") > 0)
    both = overlap(inside.select("end_ns", start_ns="since_ns", pause_ns=_LENGTH), merged)
    most = pl.min_horizontal("pause_ns", "overlap_ns").sum()
    return int(both.select(most).collect().item())


def _calls(facts: Facts, found: pl.DataFrame) -> pl.DataFrame:
    """Find the calls that made managed memory or gave it back; with a cache there are next to none."""
    moments = pl.concat([found.select("pid", at_ns=name) for name in ("alloc_ns", "free_ns")])
    # What a call did is noted before it returns, at the latest when it does: then the next one may begin.
    before = moments.drop_nulls("at_ns").with_columns(at_ns=pl.col("at_ns") - 1).lazy()
    calls = facts.events("api_calls").filter(pl.col("name").str.contains(MEMORY_CALL))
    begun = calls.select("pid", called_ns="start_ns", until_ns="end_ns").drop_nulls("called_ns")
    return (
        nearest(before, begun, on=("at_ns", "called_ns"), by=["pid"])
        .select(start_ns="called_ns", end_ns="until_ns")
        .drop_nulls()
        .unique()
        .collect()
    )
