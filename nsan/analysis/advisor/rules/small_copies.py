"""Many tiny migrations: memory that page faults move 64 KiB at a time, or calls less than a VA block; the link idles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.advisor.advice import Advice, Change, Gain, Rows, Said, Silent, Target
from nsan.analysis.advisor.calls import PREFETCH_NOTE, guess_note, prefetch_calls
from nsan.analysis.advisor.facts import Facts, gate_of, number, target_of
from nsan.analysis.advisor.links import bytes_per_s
from nsan.analysis.advisor.waits import KEYS, Part, cpu_waits, gpu_waits, services, waited
from nsan.analysis.attribution.places import NOWHERE, places
from nsan.analysis.intervals import subtraction, union
from nsan.text import shortened
from nsan.units import counted, format_bytes, format_rate, format_time
from nsan.uvm.constants import BIG_PAGE_BYTES, PAGE_BYTES, VA_BLOCK_BYTES

if TYPE_CHECKING:
    from nsan.analysis.result import Kind

TINY: Final = "tiny_migrations"

_LEAST_PUSHES: Final = 32
"""Small steps from which on they are many."""

_LEAST_SHARE: Final = 0.5
"""Share of the bytes of an allocation that went in small steps."""

_SLOW: Final = 0.5
"""Of the link's rate: copies that reach more are not slow."""

_ROUNDS: Final = 2.0
"""What comes more often than this goes to and fro, and its size is not what is wrong with it."""

_MOST: Final = 4
_GAP_NS: Final = 1_000_000
"""Prefetches with a longer pause between them are not one row of calls."""

_WAYS: Final = ("to_gpu", "to_cpu", "by_call")


@dataclass(frozen=True)
class _Small:
    """An allocation that moves in small steps: to a GPU by its faults, to the CPU by its, or by prefetch calls."""

    row: dict[str, Any]
    allocation: dict[str, Any]
    target: Target
    wait_ns: int
    kind: Kind
    rate: float | None
    busy_ns: int

    @property
    def is_slow(self) -> bool:
        """Whether the link could have moved it in less than half the time, or idled half of it where its rate is unknown."""
        least = self.row["bytes"] / self.rate * 1e9 if self.rate else self.busy_ns
        return least < _SLOW * self.wait_ns

    @property
    def way(self) -> str:
        """How it moved."""
        return str(self.row["way"])

    @property
    def gain_ns(self) -> int:
        """The time less that of one copy of it."""
        return self.wait_ns - (int(self._least_bytes / self.rate * 1e9) if self.rate else 0)

    @property
    def _least_bytes(self) -> int:
        """What has to move in any case: packed, only the pages that faulted."""
        moved, pages = int(self.row["bytes"]), self.allocation["n_faulted_pages"]
        if self.way != "to_gpu" or not pages:
            return moved
        return min(moved, int(pages) * PAGE_BYTES)


def tiny_migrations(facts: Facts) -> Iterator[Said]:
    """Advise on memory that moves in many tiny pieces.

    Parameters
    ----------
    facts : Facts
        A trace.

    Yields
    ------
    Advice or Silent
        One advice per allocation and way that it moves, for those that cost most time.
    """
    if not facts.is_recorded("migrations"):
        yield Silent(TINY, "Migrations were not recorded.", is_known=False)
        return
    rows = _candidates(facts)
    found = [each for each in (_small(facts, row) for row in rows) if each is not None]
    found.sort(key=lambda each: (-each.gain_ns, each.target.va or 0))
    for each in found:
        yield _advice(facts, each)
    if not found:
        yield Silent(TINY, _reason(facts))


def _reason(facts: Facts) -> str:
    steps = facts.rows_of("transfer_efficiency")
    if steps is None:
        return "Nothing moved."
    small = int(steps.filter(pl.col("min_bytes") <= BIG_PAGE_BYTES)["bytes"].sum())
    whole = int(steps["bytes"].sum())
    share = small / whole if whole else 0.0
    held = f"pieces below 128 KiB hold {share:.1%} of all bytes moved"
    if share > _LEAST_SHARE:
        return f"{held[0].upper()}{held[1:]}, but few of them, or of memory that moves to and fro."
    return (
        f"No allocation moves mostly in pieces of 64 KiB or less, often enough to matter: {held}."
    )


def _candidates(facts: Facts) -> list[dict[str, Any]]:
    """List allocations and ways in which most bytes went in small steps."""
    steps = facts.rows_of("transfer_efficiency")
    allocations = facts.rows_of("faults_by_allocation")
    if steps is None or allocations is None:
        return []
    if steps.filter(pl.col("min_bytes") < VA_BLOCK_BYTES)["n_pushes"].sum() < _LEAST_PUSHES:
        return []
    held = allocations.select(
        "pid", "va", "bytes", "alloc_ns", "free_ns", key=pl.col("allocation_id").fill_null(NOWHERE)
    )
    size, user = pl.col("bytes"), pl.col("user_bytes") > 0
    way = (
        pl.when(user & (pl.col("direction").cast(pl.String) != "dtoh"))
        .then(pl.lit("by_call"))
        .when(~user & (pl.col("direction").cast(pl.String) == "htod"))
        .then(pl.lit("to_gpu"))
        .when(~user & (pl.col("direction").cast(pl.String) == "dtoh"))
        .then(pl.lit("to_cpu"))
    )
    pushes = (
        facts.lazy("pushes")
        .filter(pl.col("eviction_bytes") == 0, pl.col("va").is_not_null(), size > 0)
        .select(*KEYS, "start_ns", "end_ns", "va", size=size, way=way)
        .drop_nulls(["way", "start_ns"])
        .collect()
    )
    small = _is_small(pl.col("size"), pl.col("way") == "by_call")
    found = (
        places(pushes, held)
        .filter(pl.col("key") != NOWHERE)
        .group_by(*KEYS, "key", "way")
        .agg(
            bytes=pl.col("size").sum(),
            small_bytes=pl.col("size").filter(small).sum(),
            n_small=small.sum().cast(pl.Int64),
            most_bytes=pl.col("size").filter(small).max(),
            busy_ns=(pl.col("end_ns") - pl.col("start_ns")).sum(),
        )
        .filter(
            pl.col("n_small") >= _LEAST_PUSHES,
            pl.col("small_bytes") >= _LEAST_SHARE * pl.col("bytes"),
        )
        .sort("n_small", *KEYS, "key", "way", descending=[True, False, False, False, False])
    )
    return found.head(_MOST).to_dicts()


def _is_small(size: pl.Expr, is_by_call: pl.Expr) -> pl.Expr:
    """Say which steps are small: a fault brings at least 64 KiB, a call could bring whole VA blocks."""
    return pl.when(is_by_call).then(size < VA_BLOCK_BYTES).otherwise(size <= BIG_PAGE_BYTES)


def _small(facts: Facts, row: dict[str, Any]) -> _Small | None:
    """Measure what small steps cost; None where they are no matter."""
    allocations = facts.rows_of("faults_by_allocation")
    if allocations is None:
        return None
    allocation = allocations.filter(pl.col("allocation_id") == row["key"]).row(0, named=True)
    to_cpu = row["way"] == "to_cpu"
    rate = bytes_per_s(facts, row["pid"], row["device_id"], "dtoh" if to_cpu else "htod")
    if (allocation["amplification"] or 0) > _ROUNDS:
        return None
    wait_ns, kind, kernel = _waited(facts, Part.of(allocation), row["way"])
    target = target_of(allocation, kernel if row["way"] == "to_gpu" else "")
    found = _Small(row, allocation, target, wait_ns, kind, rate, int(row["busy_ns"] or 0))
    return found if found.is_slow and found.gain_ns > 0 else None


def _waited(facts: Facts, part: Part, way: str) -> tuple[int, Kind, str]:
    """Measure how long a part took to move one way, and name the kernel that waited most."""
    if way == "by_call":
        spans = _call_spans(facts, part)
        length = (pl.col("end_ns") - pl.col("start_ns")).sum()
        return int(spans.select(length).collect().item()), "derived", ""
    if way == "to_gpu":
        found = waited(facts, gpu_waits(facts, part))
    else:
        found = waited(facts, services(facts).clear(), cpu_waits(facts, part))
    return found.ns, found.kind, found.kernel


def _call_spans(facts: Facts, part: Part) -> pl.LazyFrame:
    """List when prefetch calls for a part were under way, from the first call of a row to its last copy.

    A pause in which the GPU worked is none of theirs.
    """
    calls = facts.lazy("user_prefetches").filter(
        part.holds(pl.col("span_bytes")), pl.col("device_id").is_not_null()
    )
    spans = union(calls.select("end_ns", start_ns=pl.coalesce("call_start_ns", "start_ns")))
    before = pl.col("end_ns").shift(1)
    pauses = spans.select(start_ns=before, end_ns="start_ns").filter(
        pl.col("end_ns") - pl.col("start_ns") <= _GAP_NS
    )
    work = facts.events("kernels").select("start_ns", "end_ns").drop_nulls()
    return union(pl.concat([spans, subtraction(pauses, work)]))


def _words(found: _Small) -> tuple[str, str, str]:
    """Give the title, what brought the memory, and the remedy."""
    label, kernel = found.target.label, shortened(found.target.kernel, 60)
    if found.way == "by_call":
        return (
            f"Prefetch {label} in one call",
            "Prefetch calls",
            "One call for all of it: each call, and each 2 MiB block, has its price, whatever its size.",
        )
    if found.way == "to_cpu":
        return (
            f"Bring {label} to the CPU in one piece",
            "Page faults of the CPU",
            "Let one prefetch bring to the CPU what it reads, when the GPU is done with it; or let a kernel pack the few values "
            "that the CPU needs into one small piece. The price: all of what is prefetched is copied.",
        )
    where = f" that `{kernel}` reads" if kernel else ""
    return (
        f"Pack what {f'`{kernel}` uses' if kernel else 'the GPU uses'} of {label} into one piece",
        "Page faults of the GPU",
        f"Put the values{where} side by side, in an array of their own, and prefetch that: each fault brings at least 64 KiB, "
        "whatever is used of it. The price: the CPU copies them together first, or keeps them so.",
    )


def _calls(found: _Small) -> tuple[str, ...]:
    size, target = found.allocation["bytes"], found.target
    if found.way == "to_gpu":
        n = found.row["n_small"]
        return (
            f"// Instead of {counted(n, 'step')} of 64 KiB or less: gather the n values first, then one copy.",
            f"for (size_t i = 0; i < n; ++i) packed[i] = {target.pointer}[index[i]];{guess_note(target)}",
            f"cudaMemPrefetchAsync(packed, n * sizeof *packed, {found.row['device_id'] or 0}, stream);",
            f"// {PREFETCH_NOTE}",
        )
    device = -1 if found.way == "to_cpu" else found.row["device_id"]
    return (*prefetch_calls([(target, 0, size)], device), f"// {PREFETCH_NOTE}")


def _small_steps(facts: Facts, found: _Small) -> pl.DataFrame:
    """Show the size classes of the direction in which it moved, the small ones."""
    steps = facts.rows_of("transfer_efficiency")
    if steps is None:
        return pl.DataFrame()
    direction = "dtoh" if found.way == "to_cpu" else "htod"
    mine = pl.col("device_id").eq_missing(pl.lit(found.row["device_id"], pl.Int64))
    mine &= pl.col("direction").cast(pl.String) == direction
    columns = ("direction", "min_bytes", "n_pushes", "n_migrations", "bytes", "bytes_per_s")
    return steps.filter(mine, pl.col("min_bytes") <= found.row["most_bytes"]).select(columns)


def _advice(facts: Facts, found: _Small) -> Advice:
    row, rate = found.row, found.rate
    title, who, remedy = _words(found)
    took = "took" if found.way == "by_call" else "waited"
    reached = format_rate(row["bytes"] / found.wait_ns * 1e9)
    best = f" where copies of this link reach {format_rate(rate)}" if rate else ""
    allocation = pl.DataFrame([found.allocation])
    kept = ("name", "bytes", "density_fraction", "n_faulted_pages", "n_migrations", "va")
    size, most = found.allocation["bytes"], format_bytes(row["most_bytes"])
    less = ", less that of one copy of what is needed" if rate else ""
    return Advice(
        rule=TINY,
        title=title,
        finding=(
            f"{who} moved {format_bytes(row['bytes'])} of {found.target.label} in {counted(row['n_small'], 'step')} of {most} or "
            f"less, and {took} {format_time(found.wait_ns)} in all: {reached}{best}."
        ),
        numbers=(
            number(facts, f"steps of {most} or less", row["n_small"], "number"),
            number(facts, "moved", row["bytes"], "byte"),
            number(facts, "of it in small steps", row["small_bytes"] / row["bytes"], "fraction"),
            number(facts, f"{took} in all", found.wait_ns, "ns", found.kind),
        ),
        rows=(
            Rows("transfer_efficiency", _small_steps(facts, found)),
            Rows("faults_by_allocation", allocation.select(kept)),
        ),
        remedy=remedy,
        calls=_calls(found),
        targets=(found.target,),
        check="The same bytes, or fewer, come in fewer and larger copies.",
        gate=gate_of("migrations.n", row["n_small"], facts.summary["migrations"]["n"]),
        gain=Gain(
            found.gain_ns,
            found.kind,
            f"time that these steps {took}{less}",
        ),
        changes=(
            ()
            if found.way == "to_gpu"
            else (
                Change(
                    "prefetch",
                    found.target,
                    device=-1 if found.way == "to_cpu" else 0,
                    n_bytes=size,
                ),
            )
        ),
    )
