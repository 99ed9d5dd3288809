"""How long kernels and the CPU waited for a part of memory: what they no longer wait for if it does not move.

The driver services one batch of page faults of a GPU at a time. What stays away saves at most the time of
service of the batches that it was in; times are unions, so that no instant counts twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.intervals import overlap, union
from nsan.analysis.nearest import nearest
from nsan.uvm.constants import CAUSE_COHERENCE, CAUSE_PREFETCH, VA_BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nsan.analysis.advisor.facts import Facts
    from nsan.analysis.result import Kind

KEYS: Final = ("pid", "device_id")
BY_FAULT: Final = pl.col("cause_id").fill_null(0).is_in([0, CAUSE_COHERENCE, CAUSE_PREFETCH])
"""Copies that a page fault asked for, or that the driver's prefetcher added; or perhaps, where no cause is recorded."""

_LEAD_NS: Final = 200_000
"""Without fault rows: how long before its first copy the service of a batch began, at most (calibration.md 5)."""

_TURN_NS: Final = 20_000
"""A fault raised this soon after a replay is an access of the same warps: without the batch before, neither was the pause."""

_CPU_LEAD_NS: Final = 50_000
"""Without rows of CPU faults: from the fault to its copy, at most (fault_rows.md 2.3: mostly 14 to 29 us)."""

_CPU_RETURN_NS: Final = 5_000
"""From the end of a copy for a CPU fault until the page is mapped and the thread goes on, at most: no event tells it."""

_CPU_FAULT_NS: Final = 2_000_000
"""A CPU fault and a copy farther apart belong to different faults."""

_GPU_RETURN_NS: Final = 2_000
"""From an access to the time of its fault, and from the end of the replay until the access is done: no row tells it."""

_NAP_NS: Final = 600_000
"""How long the driver keeps a bouncing page from the CPU, at most: 500 us (domain.md C.5), and the way back."""


@dataclass(frozen=True)
class Part:
    """A part of memory while it is one allocation.

    Attributes
    ----------
    pid : int, optional
        Process.
    va, n_bytes : int
        First byte, and size.
    since_ns, until_ns : int, optional
        Allocated and released; None: not in the capture.
    """

    pid: int | None
    va: int
    n_bytes: int
    since_ns: int | None = None
    until_ns: int | None = None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Part:
        """Take all of an allocation, a row of ``faults_by_allocation``."""
        return cls(row["pid"], row["va"], row["bytes"], row["alloc_ns"], row["free_ns"])

    def holds(self, n_bytes: pl.Expr | int) -> pl.Expr:
        """Say which rows with ``pid``, ``va``, ``start_ns`` and this size reach into it."""
        size = n_bytes if isinstance(n_bytes, pl.Expr) else pl.lit(n_bytes, pl.Int64)
        first, end = (pl.lit(va, pl.UInt64) for va in (self.va, self.va + self.n_bytes))
        here = (pl.col("va") < end) & (pl.col("va") + size.cast(pl.UInt64) > first)
        here &= pl.col("pid").eq_missing(pl.lit(self.pid, pl.UInt32))
        if self.since_ns is not None:
            here &= pl.col("start_ns") >= self.since_ns
        return here if self.until_ns is None else here & (pl.col("start_ns") < self.until_ns)


def copies_of(facts: Facts, part: Part) -> pl.LazyFrame:
    """List the migrations that moved a page of a part.

    Parameters
    ----------
    facts : Facts
        A trace.
    part : Part
        Memory.

    Returns
    -------
    LazyFrame, ``MIGRATIONS``
        They, with ``va_block``.
    """
    copies = facts.events("migrations").filter(part.holds(pl.col("bytes")))
    return copies.with_columns(va_block=pl.col("va") // VA_BLOCK_BYTES)


def services(facts: Facts) -> pl.LazyFrame:
    """List when the driver serviced batches of page faults.

    Parameters
    ----------
    facts : Facts
        A trace.

    Returns
    -------
    LazyFrame
        One row per batch: ``pid``, ``device_id``, ``start_ns``, ``end_ns``, ``va`` of its lowest faulted page,
        ``is_row``. Of a batch without a fault row only the copies are known: it began at most 0.2 ms before,
        and not before the end of the batch before.
    """
    before = pl.col("end_ns").shift(1).over(KEYS, order_by="end_ns")
    begin = pl.coalesce("start_ns", pl.col("first_copy_ns") - _LEAD_NS)
    follows = pl.col("start_ns").is_null() | (begin > before + _TURN_NS)
    begin = pl.when(follows | before.is_null()).then(begin).otherwise(before)
    return facts.lazy("batches").select(
        *KEYS,
        "va",
        "end_ns",
        start_ns=pl.max_horizontal(begin, before),
        is_row=pl.col("start_ns").is_not_null(),
    )


def batches_of(batches: pl.LazyFrame, copies: pl.LazyFrame) -> pl.LazyFrame:
    """Find the batches that copies were made in.

    Parameters
    ----------
    batches : LazyFrame
        Of :func:`services`.
    copies : LazyFrame
        Copies to a GPU by page faults, or evictions: ``pid``, ``device_id``, ``end_ns``.

    Returns
    -------
    LazyFrame
        These batches, each once. A copy ends before its batch does, and after the one before (domain.md D.5).
    """
    asked = copies.select(*KEYS, _copied_ns="end_ns").unique()
    found = nearest(asked, batches, on=("_copied_ns", "end_ns"), by=KEYS, forward=True)
    return found.drop_nulls("end_ns").drop("_copied_ns").unique()


def gpu_waits(facts: Facts, part: Part) -> pl.LazyFrame:
    """List when the driver serviced page faults of a GPU that brought pages of a part, or would have.

    Parameters
    ----------
    facts : Facts
        A trace.
    part : Part
        Memory.

    Returns
    -------
    LazyFrame
        Batches, as of :func:`services`: with a copy of it, or with their lowest faulted page in it.
    """
    batches = services(facts)
    came = copies_of(facts, part).filter(BY_FAULT, pl.col("direction") != "dtoh")
    own = batches.filter(part.holds(1))
    brought = batches_of(batches, came)
    return pl.concat([brought, own.select(brought.collect_schema().names())])


def cpu_waits(facts: Facts, part: Part) -> pl.LazyFrame:
    """List when the CPU waited for pages of a part that a GPU had, or that the driver kept from it for a while.

    Parameters
    ----------
    facts : Facts
        A trace.
    part : Part
        Memory.

    Returns
    -------
    LazyFrame
        ``start_ns`` and ``end_ns``: from a CPU fault to 5 us after the end of its copy; where CPU faults were not recorded, from 50 us
        before the copy. A fault that no copy answers, and that
        the next one of its process repeats, waits until that one, 0.6 ms at most.
    """
    left = copies_of(facts, part).filter(BY_FAULT, pl.col("direction") == "dtoh")
    faults = (
        facts.events("cpu_faults")
        .select("pid", "va", "start_ns", va_block=pl.col("va") // VA_BLOCK_BYTES)
        .drop_nulls(["va", "start_ns"])
        .sort("pid", "start_ns", "va")
        .with_columns(pl.col("va", "start_ns").shift(-1).over("pid").name.prefix("next_"))
        .with_columns(fault_ns="start_ns")
    )
    found = nearest(
        left.select("pid", "va_block", "start_ns", "end_ns"),
        faults.select("pid", "va_block", "fault_ns"),
        on=("start_ns", "fault_ns"),
        by=("pid", "va_block"),
        tolerance_ns=_CPU_FAULT_NS,
    ).collect()
    begin = pl.coalesce("fault_ns", pl.col("start_ns") - _CPU_LEAD_NS)
    answered = found.lazy().select("pid", "fault_ns").drop_nulls("fault_ns").unique()
    # A page that the driver keeps from the CPU faults again when its nap is over; a first touch does not.
    naps = faults.filter(part.holds(1), pl.col("next_va") == pl.col("va")).join(
        answered, on=["pid", "fault_ns"], how="anti", nulls_equal=True
    )
    until = pl.min_horizontal("next_start_ns", pl.col("start_ns") + _NAP_NS)
    return pl.concat(
        [
            found.lazy().select(pl.col("end_ns") + _CPU_RETURN_NS, start_ns=begin),
            naps.select(end_ns=until, start_ns="start_ns"),
        ]
    )


def refault_waits(facts: Facts) -> pl.LazyFrame:
    """List when the driver serviced batches that evicted, or that brought back what had been evicted.

    Parameters
    ----------
    facts : Facts
        A trace, whole.

    Returns
    -------
    LazyFrame
        Batches, as of :func:`services`; and copies of prefetch calls that brought evicted pages back, or for which pages
        were evicted, each with what the driver did for it before: at most 0.2 ms, and since the copy before.
    """
    back = facts.lazy("refaults").filter("is_same_device")
    evicted = facts.lazy("evictions").select(*KEYS, "end_ns")
    moved = pl.concat([evicted, back.select(*KEYS, end_ns="time_ns")]).unique()
    batches = batches_of(services(facts), moved)
    before = pl.col("end_ns").shift(1).over(KEYS, order_by="end_ns")
    pushes = facts.lazy("pushes").select(
        *KEYS,
        "va",
        "end_ns",
        start_ns=pl.max_horizontal(before, pl.col("start_ns") - _LEAD_NS),
        is_row=pl.lit(value=False),
    )
    begun = pl.coalesce("call_start_ns", pl.col("start_ns") - _LEAD_NS)
    calls = facts.lazy("user_prefetches").select(*KEYS, _call_ns=begun, _until_ns="end_ns")
    asked = nearest(
        pushes.join(moved, on=[*KEYS, "end_ns"], how="semi", nulls_equal=True),
        calls.drop_nulls(["_call_ns", "_until_ns"]),
        on=("end_ns", "_call_ns"),
        by=KEYS,
    ).filter(pl.col("end_ns") <= pl.col("_until_ns"))
    own = asked.with_columns(start_ns=pl.max_horizontal("start_ns", "_call_ns"))
    return pl.concat([batches, own.select(batches.collect_schema().names())])


@dataclass(frozen=True)
class Waited:
    """Wall time in which somebody waited, ns.

    Attributes
    ----------
    ns : int
        A GPU or the CPU: each instant once.
    gpu_ns, cpu_ns : int
        The same for each alone.
    n_batches : int
        Batches of page faults of GPUs.
    kind : str
        "derived" from fault rows, or "reconstructed" where a batch or a CPU fault had none.
    kernel : str
        Name of the kernel that ran most of the GPU's time; "" where none did, or none was recorded.
    """

    ns: int
    gpu_ns: int
    cpu_ns: int
    n_batches: int
    kind: Kind
    kernel: str


def waited(facts: Facts, gpu: pl.LazyFrame, cpu: pl.LazyFrame | None = None) -> Waited:
    """Measure how long batches of page faults and CPU faults took.

    Parameters
    ----------
    facts : Facts
        A trace.
    gpu : LazyFrame
        Batches, as of :func:`services`.
    cpu : LazyFrame, optional
        Of :func:`cpu_waits`.

    Returns
    -------
    Waited
        The times, and the kernel that ran.
    """
    spans = (gpu, pl.LazyFrame(schema=gpu.collect_schema()) if cpu is None else cpu)
    served, pulled = (each.unique().collect() for each in spans)
    is_told = (served["is_row"].all() or served.is_empty()) and (
        pulled.is_empty() or facts.is_recorded("cpu_faults")
    )
    ends = pl.col("end_ns") + pl.when("is_row").then(_GPU_RETURN_NS).otherwise(0)
    served = served.with_columns(ends)
    parts = [each.select("start_ns", "end_ns").lazy() for each in (served, pulled)]
    return Waited(
        ns=_length_ns(pl.concat(parts)),
        gpu_ns=_length_ns(parts[0]),
        cpu_ns=_length_ns(parts[1]),
        n_batches=served.height,
        kind="derived" if is_told else "reconstructed",
        kernel=_running(facts, parts[0]),
    )


def _length_ns(spans: pl.LazyFrame) -> int:
    return int(union(spans).select((pl.col("end_ns") - pl.col("start_ns")).sum()).collect().item())


def _running(facts: Facts, spans: pl.LazyFrame) -> str:
    """Name the kernel that ran most of some time."""
    kernels = facts.events("kernels").select("start_ns", "end_ns", "name").drop_nulls()
    found = (
        overlap(kernels, union(spans))
        .group_by("name")
        .agg(pl.col("overlap_ns").sum())
        .filter(pl.col("overlap_ns") > 0)
        .sort("overlap_ns", "name", descending=[True, False])
        .head(1)
        .collect()
    )
    return str(found["name"][0]) if found.height else ""
