"""What each kernel used of each allocation, as far as page faults show it: kernels and memory joined by what moved.

A total of the run does not tell which kernel an allocation matters to. A copy belongs to the kernel that ran while it
was made, a batch to the kernel that ran while its fault waited, both on one clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import polars as pl

from nsan.analysis.advisor.waits import BY_FAULT, KEYS
from nsan.analysis.attribution.places import NOWHERE, places
from nsan.analysis.attribution.work import (
    gpu_work,
    group_numbers,
    ran_during,
    running,
    shifted,
    with_group,
)
from nsan.analysis.intervals import union

if TYPE_CHECKING:
    from nsan.analysis.advisor.facts import Facts

IS_KERNEL: Final = pl.col("work").is_in(["kernel", "graph"])
_OF: Final = (*KEYS, "name", "key")
_ACCESSES: Final = ("read", "write", "atomic")

_KEPT: Final[WeakKeyDictionary[Facts, pl.DataFrame]] = WeakKeyDictionary()
"""A small result that several rules ask for; it goes with the trace."""


def kernel_memory(facts: Facts) -> pl.DataFrame:
    """Add up what page faults of each kernel brought of each allocation.

    Parameters
    ----------
    facts : Facts
        A trace.

    Returns
    -------
    DataFrame
        One row per process, GPU, name of a kernel and allocation: ``pid``, ``device_id``, ``name``,
        ``allocation_id`` (of ``faults_by_allocation``; null: in none); ``in_bytes`` that faults brought while it ran,
        ``unique_bytes`` of them, ``low_va`` and ``end_va`` of these; of batches with their lowest page in
        it ``n_batches``, ``n_first_touch`` (nothing to copy), and ``n_read``, ``n_write``, ``n_atomic`` by access.
        Without kernels or addresses there is no row.
    """
    found = _KEPT.get(facts)
    if found is None:
        found = _KEPT[facts] = _kernel_memory(facts)
    return found


def _kernel_memory(facts: Facts) -> pl.DataFrame:
    kernels = facts.rows_of("faults_by_kernel")
    allocations = facts.rows_of("faults_by_allocation")
    if kernels is None or allocations is None:
        return _sums(pl.DataFrame(schema=_PIECES), pl.DataFrame(schema=_POINTS))
    held = allocations.select(
        *("pid", "va", "bytes", "alloc_ns", "free_ns"),
        key=pl.col("allocation_id").fill_null(NOWHERE),
    )
    copies = facts.events("migrations").filter(BY_FAULT, pl.col("direction") != "dtoh")
    copies = copies.filter(pl.col("bytes") > 0).select(*KEYS, *_TIMES, "va", "bytes")
    batches = facts.lazy("batches").select(
        *KEYS,
        "end_ns",
        "va",
        start_ns=pl.coalesce("start_ns", "first_copy_ns"),
        is_first=(pl.col("outcome").cast(pl.String) == "first_touch").fill_null(value=False),
        access=pl.col("access").cast(pl.String),
    )
    asked = _Asking(facts, kernels)
    return _sums(places(asked.laid(copies), held), places(asked.laid(batches), held))


class _Asking:
    """Finds the kernel that events belong to."""

    def __init__(self, facts: Facts, kernels: pl.DataFrame) -> None:
        work = gpu_work(*(facts.events(name) for name in ("kernels", "copies", "memsets")))
        self._groups = group_numbers(kernels, work)
        offsets = kernels.select(*KEYS, offset_ns="clock_offset_ns").unique()
        by_group = with_group(offsets.cast({"pid": pl.UInt32}), self._groups)
        placed = shifted(with_group(work, self._groups), by_group)
        self._steps = running(placed)
        self._names = work.filter(IS_KERNEL).select("name", running_id="work_id")

    def laid(self, events: pl.LazyFrame) -> pl.DataFrame:
        """Give the events of kernels, with the name of theirs."""
        known = events.filter(pl.all_horizontal(pl.col("start_ns", "va").is_not_null())).collect()
        during = ran_during(with_group(known, self._groups), self._steps)
        return during.join(self._names, on="running_id").drop("running_id", "group")


def _sums(pieces: pl.DataFrame, points: pl.DataFrame) -> pl.DataFrame:
    """Add up pieces of copies, and batches by their lowest page."""
    end = pl.col("va") + pl.col("bytes").cast(pl.UInt64)
    moved = pieces.group_by(_OF).agg(
        in_bytes=pl.col("bytes").sum(), low_va=pl.col("va").min(), end_va=end.max()
    )
    # Interval algebra works on Int64: addresses count from the lowest.
    low = (pl.col("va") - pl.col("va").min().over(_OF)).cast(pl.Int64, wrap_numerical=True)
    ranges = pieces.lazy().select(*_OF, start_ns=low, end_ns=low + pl.col("bytes"))
    length = (pl.col("end_ns") - pl.col("start_ns")).sum()
    unique = union(ranges, by=_OF).group_by(_OF).agg(unique_bytes=length).collect()
    served = points.group_by(_OF).agg(
        n_batches=pl.len().cast(pl.Int64),
        n_first_touch=pl.col("is_first").sum().cast(pl.Int64),
        **{f"n_{name}": (pl.col("access") == name).sum().cast(pl.Int64) for name in _ACCESSES},
    )
    counts = pl.col("in_bytes", "unique_bytes", "^n_.*$")
    return (
        pl.concat([moved, unique, served], how="diagonal")
        .group_by(_OF)
        .agg(counts.sum(), pl.col("low_va").min(), pl.col("end_va").max())
        .with_columns(allocation_id=pl.when(pl.col("key") != NOWHERE).then("key"))
        .drop("key")
        .sort(*KEYS, "name", "allocation_id")
    )


_TIMES: Final = ("start_ns", "end_ns")
_NAMED: Final = {
    "pid": pl.UInt32,
    "device_id": pl.Int64,
    "name": pl.String,
    "key": pl.Int64,
    "va": pl.UInt64,
}
_PIECES: Final = {**_NAMED, "bytes": pl.Int64}
_POINTS: Final = {**_NAMED, "is_first": pl.Boolean, "access": pl.String}
