"""Memory that page faults move to and fro, and memory that leaves in small parts: what tells remedies apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.advisor.facts import moved_bytes
from nsan.analysis.advisor.waits import BY_FAULT, Part, copies_of
from nsan.analysis.nearest import nearest
from nsan.text import shortened
from nsan.uvm.constants import BIG_PAGE_BYTES, VA_BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nsan.analysis.advisor.facts import Facts

MOST: Final = 6
"""Allocations that are looked at, those that moved most first."""

_OFTEN: Final = 3
"""Moves one soon after the other from which on memory bounces: what the driver calls thrashing."""

_RELAXED_NS: Final = 10_000_000
_SMALL_BYTES: Final = 1 << 20
"""Of memory no larger than this, moves within 10 ms are soon, too (domain.md E-14)."""

NO_CAUSES: Final = "The capture does not say why memory moved, and so not what was evicted."

REFAULTED_FRACTION: Final = 0.3
"""Refaulted of evicted bytes from which on other tools speak of thrash (domain.md E.1): a hint."""

_LEAST_EVICTIONS: Final = 8
"""Fewer evictions are no evidence."""

_ROUNDS: Final = 3.0
"""What came back is at least this part of what was taken: to and fro, not once there and once back."""


@dataclass(frozen=True)
class Shuttle:
    """An allocation that page faults move to and fro.

    Attributes
    ----------
    row : mapping
        Of ``faults_by_allocation``.
    part : Part
        The same.
    taken_bytes, back_bytes : int
        Taken from a GPU by page faults of another processor; came to a GPU after its VA block had been taken before.
    gpus : tuple of int
        GPUs that it came to.
    accesses : mapping of str to int
        Fault rows whose lowest page is in it, by access; empty if none was recorded.
    runs : DataFrame
        Of ``ping_pong``: the pages of it that bounce.
    options : mapping of str to str
        Options of ``ping_pong`` that gave them.
    """

    row: Mapping[str, Any]
    part: Part
    taken_bytes: int
    back_bytes: int
    gpus: tuple[int, ...]
    accesses: Mapping[str, int]
    runs: pl.DataFrame
    options: dict[str, str]

    @property
    def has_causes(self) -> bool:
        """Whether it is recorded that page faults moved it, and that want of room did not."""
        return self.row["out_coherence_bytes"] is not None

    @property
    def by_cpu(self) -> bool:
        """Whether the CPU takes part."""
        return bool(self.row["out_bytes"])

    def processors(self, cpu: str = "the CPU") -> str:
        """Say who moves it to and fro, in words."""
        gpus = [f"GPU {gpu}" for gpu in self.gpus]
        return " and ".join([cpu, *gpus] if self.by_cpu else gpus)

    @property
    def spared_bytes(self) -> int:
        """What moves no more if each processor gets it once."""
        return self.back_bytes + int(self.row["out_coherence_bytes"] or 0)

    @property
    def most_moves(self) -> int:
        """Moves of the page of it that bounces most."""
        return max(self.runs["n_moves_total"].to_list(), default=0)

    @property
    def is_read_only(self) -> bool:
        """Whether GPUs only read where they faulted, as far as is known; False where it is not."""
        return set(self.accesses) == {"read"}

    @property
    def is_bouncing(self) -> bool:
        """Whether most of it is moved by one processor soon after another had moved it."""
        fast = int(self.runs["moved_bytes"].sum())
        return 2 * fast >= self.taken_bytes + self.back_bytes

    @property
    def cores(self) -> list[Part]:
        """The stretches that bounce most, what moved most first: pages with at least half as many moves as any."""
        often = self.runs.filter(2 * pl.col("n_moves_total") >= pl.col("n_moves_total").max())
        end = pl.col("va") + pl.col("bytes").cast(pl.UInt64)
        apart = pl.col("va") > end.shift(1) + BIG_PAGE_BYTES
        stretches = (
            often.sort("va")
            .group_by(apart.fill_null(value=True).cum_sum().alias("stretch"))
            .agg(pl.col("va").min(), end=end.max(), moved=pl.col("moved_bytes").sum())
            .sort("moved", "va", descending=[True, False])
        )
        life = (self.part.since_ns, self.part.until_ns)
        bounds = stretches.select("va", "end").iter_rows()
        return [Part(self.part.pid, va, last - va, *life) for va, last in bounds]

    @property
    def is_for_a_split(self) -> bool:
        """Whether what bounces is what matters of it, and no copies for readers would do instead."""
        small = int(self.runs["bytes"].sum()) <= _SMALL_BYTES
        return self.is_bouncing and not self.runs.is_empty() and (small or not self.is_read_only)

    @property
    def is_dense(self) -> bool:
        """Whether most of its bytes move."""
        return 2 * int(self.row["unique_in_bytes"]) >= int(self.row["bytes"])


def has_causes(facts: Facts) -> bool:
    """Say whether the capture tells why memory moved; also if nothing did.

    Parameters
    ----------
    facts : Facts
        A trace with migrations.

    Returns
    -------
    bool
        Without causes nobody knows what was evicted.
    """
    moved = facts.summary["migrations"]
    return not moved["n"] or not set(moved["by_cause"]) <= {"unknown", "other"}


def shuttles(facts: Facts) -> list[Shuttle]:
    """Find the allocations that page faults move to and fro.

    Parameters
    ----------
    facts : Facts
        A trace.

    Returns
    -------
    list of Shuttle
        At most six, what was taken most first. Evictions are no part of it.
    """
    found = facts.rows_of("faults_by_allocation")
    if found is None:
        return []
    # Without causes what left a GPU may have left for want of room.
    taken = pl.coalesce("out_coherence_bytes", "out_bytes") + pl.col("between_bytes")
    came = pl.col("in_bytes") + pl.col("between_bytes")
    rows = found.filter(
        pl.col("part") != "unattributed", taken > 0, came > pl.col("unique_in_bytes")
    )
    chosen = rows.sort(taken, "allocation_id", descending=[True, False]).head(MOST).to_dicts()
    every = [_shuttle(facts, row) for row in chosen]
    return [
        each for each in every if each.back_bytes and _ROUNDS * each.back_bytes >= each.taken_bytes
    ]


def _shuttle(facts: Facts, row: Mapping[str, Any]) -> Shuttle:
    part = Part.of(row)
    copies = copies_of(facts, part).filter(BY_FAULT)
    takes, comes = (pl.col("direction") != way for way in ("htod", "dtoh"))
    first = pl.col("start_ns").filter(takes).min().over("va_block")
    again = comes & (pl.col("start_ns") > first)
    sums = copies.select(
        taken=pl.col("bytes").filter(takes).sum(),
        back=pl.col("bytes").filter(again).sum(),
        gpus=pl.col("device_id").filter(comes).unique().sort().implode(),
    )
    rows = facts.events("gpu_faults").filter(part.holds(1))
    by_access = rows.group_by(pl.col("access").cast(pl.String)).len()
    told, access = pl.collect_all([sums, by_access])
    accesses = {name or "unknown": n for name, n in access.sort("access").iter_rows()}
    taken_bytes, back_bytes, gpus = told.row(0)
    known = tuple(gpu for gpu in gpus if gpu is not None)
    runs, options = _runs(facts, part, is_read_only=set(accesses) == {"read"})
    return Shuttle(row, part, taken_bytes, back_bytes, known, accesses, runs, options)


def _runs(facts: Facts, part: Part, *, is_read_only: bool) -> tuple[pl.DataFrame, dict[str, str]]:
    """Find the pages that bounce: those of a small part in a longer window than the driver's, else in that."""
    last = part.va + part.n_bytes
    here = pl.col("pid").eq_missing(pl.lit(part.pid, pl.UInt32)) & pl.col("va").is_between(
        part.va, last, closed="left"
    )
    many = here & (pl.col("n_moves") >= _OFTEN)
    found = facts.lazy("ping_pong").filter(many).collect()
    if found.is_empty() and is_read_only:
        return found, {}
    slow = facts.lazy("ping_pong", {"window_ns": _RELAXED_NS}).filter(many).collect()
    is_small = int(slow["bytes"].sum()) <= _SMALL_BYTES
    return (slow, {"window_ns": str(_RELAXED_NS)}) if is_small else (found, {})


def cpu_side(facts: Facts, part: Part) -> str:
    """Name the function of the CPU side that faults in a part most.

    Parameters
    ----------
    facts : Facts
        A trace.
    part : Part
        Memory.

    Returns
    -------
    str
        As " (mostly in `main`)"; "" where it is not known.
    """
    faults = facts.events("cpu_faults").filter(part.holds(1), pl.col("function").is_not_null())
    most = faults.group_by("function").len().sort("len", "function", descending=[True, False])
    names = most.head(1).collect()["function"]
    return f" (mostly in `{shortened(names[0], 60)}`)" if len(names) else ""


def thinly_evicted(facts: Facts) -> list[dict[str, Any]]:
    """Find allocations of whose VA blocks evictions take less than half on average, while what is evicted comes back.

    A kernel that uses more than half of a VA block gets all of it from the driver's prefetcher. So a block that is
    evicted with less was used here and there; and in GPU memory it held the place of a whole one.

    Parameters
    ----------
    facts : Facts
        A trace, whole.

    Returns
    -------
    list of dict
        Rows of ``faults_by_allocation``, most evictions first, with ``n_evictions``, ``evictions_fraction`` (of all
        evictions of its process), ``mean_bytes`` of one, ``refaulted_bytes``, and ``gpus`` that evicted it. Only evictions of VA blocks that lie wholly in the
        allocation count.
    """
    if not moved_bytes(facts, "dtoh", "eviction"):
        return []
    found, blocks = facts.rows_of("faults_by_allocation"), facts.rows_of("refaults_by_va_block")
    if found is None or blocks is None:
        return []
    back, gone = (int(blocks[name].sum()) for name in ("refaulted_bytes", "evicted_bytes"))
    if back < REFAULTED_FRACTION * gone:
        return []
    whole = found.filter(pl.col("part") != "unattributed", pl.col("evicted_bytes") > 0)
    often = whole.join(_evictions_of(whole, blocks), on="allocation_id").filter(
        pl.col("n_evictions") >= _LEAST_EVICTIONS, pl.col("mean_bytes") < VA_BLOCK_BYTES / 2
    )
    return often.sort("n_evictions", "allocation_id", descending=[True, False]).to_dicts()


def _evictions_of(allocations: pl.DataFrame, blocks: pl.DataFrame) -> pl.DataFrame:
    """Add up evictions of VA blocks that lie in one allocation."""
    va, end = (pl.col(name).cast(pl.Int64) for name in ("va", "bytes"))
    spans = allocations.select(
        "pid",
        "allocation_id",
        first=-(-va // VA_BLOCK_BYTES),
        end=(va + end) // VA_BLOCK_BYTES,
    ).filter(pl.col("end") > pl.col("first"))
    all_of_it = pl.col("n_evictions").sum().over("pid")
    evicted = blocks.select(
        "pid",
        "device_id",
        "n_evictions",
        "evicted_bytes",
        "refaulted_bytes",
        share=pl.col("n_evictions") / all_of_it,
        block=pl.col("va_block").cast(pl.Int64),
    )
    return (
        nearest(evicted.lazy(), spans.lazy(), on=("block", "first"), by=["pid"])
        .filter(pl.col("block") < pl.col("end"))
        .group_by("allocation_id")
        .agg(
            pl.col("n_evictions").sum(),
            evictions_fraction=pl.col("share").sum(),
            gpus=pl.col("device_id").drop_nulls().unique().sort(),
            refaulted_bytes=pl.col("refaulted_bytes").sum(),
            mean_bytes=pl.col("evicted_bytes").sum() / pl.col("n_evictions").sum(),
        )
        .collect()
    )
