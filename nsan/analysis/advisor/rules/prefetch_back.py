"""Prefetch back: the CPU takes from a GPU by page faults what one call could bring before it looks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.advisor.advice import Advice, Change, Gain, Rows, Said, Silent, Target
from nsan.analysis.advisor.calls import PREFETCH_NOTE, prefetch_calls
from nsan.analysis.advisor.facts import Facts, gate_of, number, target_of
from nsan.analysis.advisor.links import bytes_per_s
from nsan.analysis.advisor.prefetched import prefetched
from nsan.analysis.advisor.shuttles import has_causes
from nsan.analysis.advisor.waits import BY_FAULT, Part, copies_of, cpu_waits, services, waited
from nsan.analysis.intervals import union
from nsan.units import format_bytes, format_rate, format_time
from nsan.uvm.constants import VA_BLOCK_BYTES

if TYPE_CHECKING:
    from nsan.analysis.result import Kind

BACK: Final = "prefetch_back"

_MOST: Final = 4
"""Allocations that are looked at, those of which most went to the CPU first."""

_LEAST_FAULTS: Final = 4
"""Page faults each time it comes back: a call has a price of about one of them."""

_LEAST_BYTES: Final = VA_BLOCK_BYTES
"""Of one VA block the driver's prefetcher brings most after a few faults: a call for it is no matter."""

_RETURN_NS: Final = 5_000
"""Beyond what any wait for a copy is given: of a slow host up to 10 us pass until its thread goes on."""

_AGAIN: Final = 1.5
"""Times that it comes back, on average, from which on it goes to and fro."""

_BY_CALL: Final = 0.9
"""Share of what the CPU took that prefetch calls had brought to GPUs: nothing else did."""

_WHOLE: Final = 0.9
_SHOWN: Final = ("name", "bytes", "out_bytes", "out_coherence_bytes", "out_prefetch_bytes", "va")


@dataclass(frozen=True)
class _Return:
    """An allocation that the CPU takes back by page faults; the part that they touched."""

    allocation: dict[str, Any]
    target: Target
    bytes: int
    rounds: float
    n_faults: int
    offset_bytes: int
    n_bytes: int
    wait_ns: int
    kind: Kind
    rate: float | None

    @property
    def gain_ns(self) -> int:
        """The time less that of one copy of the same bytes."""
        return self.wait_ns - (int(self.bytes / self.rate * 1e9) if self.rate else 0)

    @property
    def is_worth(self) -> bool:
        """Whether the CPU faults often each time, over more than a VA block, and a copy of the part takes less time."""
        whole_ns = self.rounds * self.n_bytes / self.rate * 1e9 if self.rate else 0.0
        return (
            self.n_bytes > _LEAST_BYTES
            and self.n_faults >= _LEAST_FAULTS * self.rounds
            and self.wait_ns > whole_ns
            and self.gain_ns > 0
        )


def prefetch_back(facts: Facts) -> Iterator[Said]:
    """Advise a prefetch to the CPU of memory that it takes from a GPU by page faults.

    Parameters
    ----------
    facts : Facts
        A trace.

    Yields
    ------
    Advice or Silent
        One advice per allocation.
    """
    if not facts.is_recorded("migrations"):
        yield Silent(BACK, "Migrations were not recorded.", is_known=False)
        return
    if not has_causes(facts):
        yield Silent(
            BACK,
            "The capture does not say why memory moved, and so not what the CPU took by page faults.",
            is_known=False,
        )
        return
    returns = [_return(facts, row) for row in _candidates(facts)]
    found = [each for each in returns if each is not None and each.is_worth]
    for each in sorted(found, key=lambda each: (-each.gain_ns, each.target.va or 0)):
        yield _advice(facts, each)
    if not found:
        yield Silent(BACK, _reason(returns))


def _reason(returns: list[_Return | None]) -> str:
    taken = sum(each.bytes for each in returns if each is not None)
    if not taken:
        return "Page faults of the CPU took nothing from a GPU."
    return f"Page faults of the CPU took {format_bytes(taken)} from GPUs: a copy of it all at once would save no time."


def _candidates(facts: Facts) -> list[dict[str, Any]]:
    """List the allocations of which page faults took most to the CPU."""
    found = facts.rows_of("faults_by_allocation")
    if found is None:
        return []
    # Without causes what left a GPU may have left for want of room.
    taken = pl.col("out_coherence_bytes")
    rows = found.filter(pl.col("va").is_not_null(), taken > 0)
    order = [pl.col("out_bytes"), pl.col("allocation_id")]
    return rows.sort(order, descending=[True, False]).head(_MOST).to_dicts()


def _return(facts: Facts, row: dict[str, Any]) -> _Return | None:
    """Measure what an allocation cost the CPU; None where nothing came by its faults."""
    part = Part.of(row)
    copies = copies_of(facts, part).filter(BY_FAULT, pl.col("direction") == "dtoh").collect()
    if copies.is_empty():
        return None
    # Interval algebra works on Int64: addresses count from the allocation, which a copy may begin before.
    va = pl.col("va").cast(pl.Int64) - part.va
    edges = pl.max_horizontal(va, pl.lit(0)), pl.min_horizontal(va + pl.col("bytes"), part.n_bytes)
    taken = copies.lazy().select(start_ns=edges[0], end_ns=edges[1])
    length = (pl.col("end_ns") - pl.col("start_ns")).sum()
    moved = int(taken.select(length).collect().item())
    seen = union(taken).select(pl.col("start_ns").min(), pl.col("end_ns").max(), length=length)
    first, last, unique = seen.collect().row(0)
    pulls = _with_return(cpu_waits(facts, part)).collect()
    wait = waited(facts, services(facts).clear(), pulls.lazy())
    device = copies["device_id"].drop_nulls().mode().sort().to_list()
    rate = bytes_per_s(facts, row["pid"], device[0] if device else None, "dtoh")
    return _Return(
        allocation=row,
        target=target_of(row),
        bytes=moved,
        rounds=moved / unique,
        n_faults=pulls["start_ns"].n_unique(),
        offset_bytes=first,
        n_bytes=last - first,
        wait_ns=wait.ns,
        kind=wait.kind,
        rate=rate,
    )


def _with_return(pulls: pl.LazyFrame) -> pl.LazyFrame:
    """Let each wait last a little longer, but not into the next: a CPU that is slow to go on is so each time."""
    following = pl.col("start_ns").shift(-1)
    later = pl.min_horizontal(pl.col("end_ns") + _RETURN_NS, following)
    ordered = pulls.unique().sort("start_ns", "end_ns")
    return ordered.with_columns(end_ns=pl.max_horizontal("end_ns", later))


def _unused_ns(facts: Facts, found: _Return) -> int | None:
    """Measure the prefetches to GPUs of memory that no page fault of a GPU wanted; None where that does not hold."""
    row = found.allocation
    is_wanted = (row["in_coherence_bytes"] or 0) + (row["n_lowest_page_rows"] or 0) > 0
    brought = row["in_user_bytes"] or 0
    if is_wanted or found.rounds < _AGAIN or brought < _BY_CALL * found.bytes:
        return None
    mine = row["allocation_id"]
    calls = [each for each in prefetched(facts) if each.allocation["allocation_id"] == mine]
    return sum(each.idle_ns for each in calls) if calls else None


def _finding(found: _Return) -> str:
    often = f", each page {found.rounds:.0f} times," if found.rounds >= _AGAIN else ""
    best = f" where copies of this link reach {format_rate(found.rate)}" if found.rate else ""
    reached = format_rate(found.bytes / found.wait_ns * 1e9)
    return (
        f"Page faults of the CPU took {format_bytes(found.bytes)} of {found.target.label}{often} from a GPU, one after the other, and "
        f"the CPU waited {format_time(found.wait_ns)} for them: {reached}{best}."
    )


def _remedy(found: _Return, unused_ns: int | None) -> str:
    text = (
        "Let one call bring it when the GPU is done with it, and let the CPU wait for that call before it looks. Where "
        "the CPU only writes it anew, a host buffer of its own and a cudaMemcpyAsync to the GPU save the copy back, too."
    )
    if unused_ns is None:
        return text
    most = format_time(found.wait_ns + unused_ns)
    return (
        f"{text} It came to the GPU by prefetch calls, and nothing shows that a kernel uses it there: if none does, leave those calls "
        f"out instead, for at most {most}."
    )


def _advice(facts: Facts, found: _Return) -> Advice:
    target, row = found.target, found.allocation
    unused_ns = _unused_ns(facts, found)
    part = (target, found.offset_bytes, found.n_bytes)
    is_whole = found.n_bytes >= _WHOLE * row["bytes"]
    lines = prefetch_calls([(target, 0, row["bytes"]) if is_whole else part], -1)
    numbers = [
        number(facts, "taken by page faults of the CPU", found.bytes, "byte"),
        number(facts, "page faults", found.n_faults, "faults", found.kind),
        number(facts, "the CPU waited", found.wait_ns, "ns", found.kind),
    ]
    if unused_ns is not None:
        label = "the GPU did nothing but its prefetches"
        numbers.append(number(facts, label, unused_ns, "ns", "reconstructed"))
    less = ", less that of one copy of the same bytes at the link's rate" if found.rate else ""
    change = Change("prefetch", target, device=-1)
    return Advice(
        rule=BACK,
        title=f"Prefetch {target.label} back to the CPU before the CPU uses it",
        finding=_finding(found),
        numbers=tuple(numbers),
        rows=(Rows("faults_by_allocation", pl.DataFrame([row]).select(_SHOWN)),),
        remedy=_remedy(found, unused_ns),
        calls=(
            "// After the last kernel that uses it:",
            *lines,
            "cudaStreamSynchronize(stream);  // then the CPU reads it",
            f"// {PREFETCH_NOTE}",
        ),
        targets=(target,),
        check="The CPU no longer faults on it, and it comes back as user prefetch.",
        gate=_gate(facts, found),
        gain=Gain(
            found.gain_ns, found.kind, f"time in which the CPU waited for its page faults{less}"
        ),
        changes=(
            change
            if is_whole
            else replace(change, offset_bytes=found.offset_bytes, n_bytes=found.n_bytes),
        ),
    )


def _gate(facts: Facts, found: _Return) -> str:
    """Hold the CPU's page faults to a limit, or where none was recorded what came by faults."""
    if facts.is_recorded("cpu_faults"):
        return gate_of("cpu_faults.n", found.n_faults, facts.summary["cpu_faults"]["n"])
    causes = facts.summary["migrations"]["by_cause"]
    out = found.allocation["out_coherence_bytes"]
    return gate_of("migrations.coherence_bytes", out, causes.get("coherence", {}).get("bytes"))
