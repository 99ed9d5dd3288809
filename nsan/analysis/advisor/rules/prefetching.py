"""Prefetch before use: kernels that wait for page faults on memory whose use is known before the launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.advisor.advice import Advice, Change, Gain, Rows, Said, Silent, Target
from nsan.analysis.advisor.calls import PREFETCH_NOTE, prefetch_calls
from nsan.analysis.advisor.facts import Facts, gate_of, number, target_of
from nsan.analysis.advisor.kernel_memory import IS_KERNEL, kernel_memory
from nsan.analysis.advisor.links import bytes_per_s
from nsan.analysis.advisor.shuttles import shuttles
from nsan.analysis.advisor.waits import KEYS, services
from nsan.analysis.intervals import overlap, union
from nsan.text import shortened
from nsan.units import counted, format_bytes, format_time

if TYPE_CHECKING:
    from nsan.analysis.result import Kind

BEFORE_USE: Final = "prefetch_before_use"

_MOST: Final = 5
"""Kernels that are advised on, those that wait longest first."""

_NEGLIGIBLE: Final = 0.01
"""Share of what a kernel's faults brought below which an allocation is left out."""

_EVICTED: Final = 0.02
"""Evicted of what came from which on memory did not hold what the kernel uses."""

_WHOLE: Final = 0.9
_NAMED: Final = 2
_SHOWN: Final = ("name", "n_instances", "time_ns", "exposed_ns", "in_bytes", "n_batches")


@dataclass(frozen=True)
class _Use:
    """An allocation as a kernel uses it; ``offset_bytes`` and ``n_bytes``: the part that faults touched."""

    target: Target
    in_bytes: int
    n_first_touch: int
    offset_bytes: int
    n_bytes: int
    rounds: float

    @property
    def is_whole(self) -> bool:
        """Whether faults touched nearly all of it, from end to end."""
        return self.n_bytes >= _WHOLE * (self.target.bytes or 0)


@dataclass(frozen=True)
class _Waiting:
    """A kernel that waits, with what it waits for."""

    row: dict[str, Any]
    waits_ns: int
    uses: tuple[_Use, ...]
    copy_ns: int | None
    """Least time of one copy; None where nothing shows what the link can do."""

    @property
    def gain_ns(self) -> int:
        """At most this much of its waiting goes away."""
        return self.waits_ns - (self.copy_ns or 0)

    @property
    def name(self) -> str:
        """Its name for people."""
        return f"`{shortened(self.row['name'] or 'a graph', 60)}`"


def before_use(facts: Facts) -> Iterator[Said]:
    """Advise a prefetch of allocations whose page faults a kernel waits for.

    Parameters
    ----------
    facts : Facts
        A trace.

    Yields
    ------
    Advice or Silent
        One advice per kernel, about all that it waits for, for those that wait longest.
    """
    kernels = _kernels(facts)
    if kernels is None or not facts.is_recorded("kernels"):
        yield _nothing_waited(facts)
        return
    reasons, n_said = [], 0
    for row in kernels.head(_MOST).to_dicts():
        found = _waiting(facts, row)
        if isinstance(found, str):
            reasons.append(found)
        else:
            n_said += 1
            yield _advice(facts, found)
    if not n_said:
        yield Silent(BEFORE_USE, reasons[0])


def _nothing_waited(facts: Facts) -> Silent:
    moved = facts.summary["migrations"]["n"]
    if not facts.is_recorded("kernels") or (moved and not facts.summary["kernels"]["n"]):
        reason = "No kernel was recorded: which of them waits is not known."
        return Silent(BEFORE_USE, reason, is_known=False)
    if not facts.is_recorded("migrations"):
        return Silent(BEFORE_USE, "Migrations were not recorded.", is_known=False)
    return Silent(BEFORE_USE, "No kernel waited for a page fault, as far as is recorded.")


def _kernels(facts: Facts) -> pl.DataFrame | None:
    """List kernels that wait, the longest waits first, with ``waits_ns``."""
    found = facts.rows_of("faults_by_kernel")
    if found is None:
        return None
    found = found.filter(IS_KERNEL, pl.col("exposed_ns") > 0)
    same = [*KEYS, "name"]
    found = found.join(
        _served(facts, found), on=same, how="left", nulls_equal=True, maintain_order="left"
    ).with_columns(waits_ns=pl.max_horizontal("served_ns", "exposed_ns"))
    order = ["waits_ns", "in_bytes", *KEYS, "name"]
    ordered = found.sort(order, descending=[True, True, False, False, False], nulls_last=True)
    return ordered if ordered.height else None


def _served(facts: Facts, kernels: pl.DataFrame) -> pl.DataFrame:
    """Measure how long batches of page faults were serviced while kernels ran, with the short pauses between them.

    Where only copies tell, a batch began up to 0.2 ms before its first copy.
    """
    offset = kernels.select(*KEYS, "clock_offset_ns").unique().lazy()
    batches = services(facts).join(offset, on=KEYS, nulls_equal=True)
    times = pl.col("start_ns", "end_ns") - pl.col("clock_offset_ns")
    served = union(batches.select(*KEYS, times), by=KEYS)
    spans = union(
        facts.events("kernels").select(*KEYS, "name", "start_ns", "end_ns"), by=[*KEYS, "name"]
    )
    covered = overlap(spans, served, by=KEYS)
    return covered.group_by(*KEYS, "name").agg(served_ns=pl.col("overlap_ns").sum()).collect()


def _waiting(facts: Facts, row: dict[str, Any]) -> _Waiting | str:
    """Look at what a kernel waits for; a sentence where a prefetch is no remedy."""
    name = f"`{shortened(row['name'] or 'a graph', 60)}`"
    if (row["evicted_bytes"] or 0) > _EVICTED * row["in_bytes"]:
        return (
            f"While {name} ran, memory was evicted to make room: a prefetch of all that it uses would evict "
            "what it still needs."
        )
    uses = _uses(facts, row)
    if not uses:
        return f"Which allocations {name} waits for is not known: other kernels ran beside it, or no address was recorded."
    uses = _without_bouncing(facts, uses)
    if not uses:
        return f"{name} waits for memory that bounces between processors: see ping_pong."
    rate = bytes_per_s(facts, row["pid"], row["device_id"], "htod")
    total = sum(use.in_bytes for use in uses)
    kept = tuple(use for use in uses if _is_worth(use, row["waits_ns"], total, rate))
    copied = sum(use.in_bytes for use in kept)
    found = _Waiting(row, row["waits_ns"], kept, int(copied / rate * 1e9) if rate else None)
    if not kept or found.gain_ns <= 0:
        return (
            f"{name} waits for few pages of its memory: to copy all of it first would take as long."
        )
    return found


def _uses(facts: Facts, kernel: dict[str, Any]) -> list[_Use]:
    """List the allocations that a kernel waits for, those that bring most first."""
    same = pl.all_horizontal(
        pl.col(key).eq_missing(pl.lit(kernel[key], dtype))
        for key, dtype in (("pid", pl.UInt32), ("device_id", pl.Int64), ("name", pl.String))
    )
    used = kernel_memory(facts).filter(same & pl.col("allocation_id").is_not_null())
    allocations = facts.rows_of("faults_by_allocation")
    if allocations is None or used.is_empty():
        return []
    known = allocations.select("part", "allocation_id", "name", "bytes", "va")
    counts = pl.col("in_bytes", "unique_bytes", "n_first_touch", "n_batches")
    # Memory that is allocated anew in each step at one address is one thing to prefetch.
    rows = (
        used.drop("name")
        .join(known, on="allocation_id")
        .sort("allocation_id")
        .group_by("va", "bytes", maintain_order=True)
        .agg(
            pl.col("part", "pid", "allocation_id", "name").first(),
            counts.sum(),
            pl.col("low_va").min(),
            pl.col("end_va").max(),
        )
        .filter(
            (pl.col("in_bytes") > _NEGLIGIBLE * pl.col("in_bytes").sum())
            | (pl.col("n_first_touch") > _NEGLIGIBLE * pl.col("n_batches").sum())
        )
        .sort("in_bytes", "n_first_touch", "allocation_id", descending=[True, True, False])
    )
    return [_use(row, kernel["name"] or "") for row in rows.to_dicts()]


def _without_bouncing(facts: Facts, uses: list[_Use]) -> list[_Use]:
    """Leave out allocations of which processors take from each other what the kernel waits for: it would not stay."""
    bounces = {each.row["allocation_id"]: each for each in shuttles(facts) if each.is_for_a_split}

    def stays(use: _Use) -> bool:
        found = bounces.get(use.target.allocation_id)
        return found is None or 2 * int(found.runs["bytes"].sum()) < use.n_bytes

    return [use for use in uses if stays(use)]


def _use(row: dict[str, Any], kernel: str) -> _Use:
    target = target_of(row, kernel)
    end = row["va"] + row["bytes"]
    if row["in_bytes"] and not row["n_first_touch"]:
        low, high = max(row["low_va"], row["va"]), min(row["end_va"], end)
    else:
        low, high = row["va"], end
    use = _Use(
        target,
        row["in_bytes"],
        row["n_first_touch"],
        low - row["va"],
        high - low,
        row["in_bytes"] / row["unique_bytes"] if row["unique_bytes"] else 1.0,
    )
    if use.is_whole:
        return _Use(target, use.in_bytes, use.n_first_touch, 0, row["bytes"], use.rounds)
    return use


def _is_worth(use: _Use, waits_ns: int, total: int, rate: float | None) -> bool:
    """Say whether one copy of the part that is used takes less time than its share of the waits."""
    if not use.in_bytes or rate is None:
        return True
    return use.n_bytes * use.rounds / rate * 1e9 < waits_ns * use.in_bytes / total


def _named(uses: tuple[_Use, ...]) -> str:
    labels = [use.target.label for use in uses[:_NAMED]]
    more = len(uses) - len(labels)
    if more:
        labels.append(counted(more, "more allocation"))
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _finding(found: _Waiting) -> str:
    row = found.row
    guess = row["exposed_kind"] == "reconstructed"
    often = (
        f" in {counted(row['n_instances'], 'launch', 'launches')}" if row["n_instances"] > 1 else ""
    )
    text = (
        f"{found.name} ran {format_time(row['time_ns'])}{often}, and page faults waited in "
        f"{'at most ' * guess}{format_time(found.waits_ns)} of it."
    )
    came = sum(use.in_bytes for use in found.uses)
    every = row["in_bytes"]
    if came and came < every:
        text += f" They brought {format_bytes(every)} that lay elsewhere, {format_bytes(came)} of it of this memory."
    elif came:
        text += f" They brought {format_bytes(came)} that lay elsewhere."
    new = [use for use in found.uses if use.n_first_touch]
    if new:
        batches = counted(sum(use.n_first_touch for use in new), "batch", "batches")
        text += f" In {batches} no byte came: nobody had touched that memory before the GPU."
    return text


def _remedy(found: _Waiting) -> str:
    text = (
        "What the kernel uses is known before its launch: let one call copy it, in the stream of the kernel, after the "
        "last write of the CPU."
    )
    if any(not use.in_bytes for use in found.uses):
        text += (
            " Of memory that nobody has touched yet the call only makes the pages, without a copy."
        )
    if found.copy_ns:
        text += (
            f" The copies take {format_time(found.copy_ns)} or more, less of it where they run in another "
            "stream beside other work."
        )
    return text


def _advice(facts: Facts, found: _Waiting) -> Advice:
    row, uses = found.row, found.uses
    kind: Kind = "reconstructed" if row["exposed_kind"] == "reconstructed" else "derived"
    came = sum(use.in_bytes for use in uses)
    lines = prefetch_calls(
        [(use.target, use.offset_bytes, use.n_bytes) for use in uses], row["device_id"]
    )
    shown = [name for name in _SHOWN if name in row]
    numbers = [
        number(facts, "kernel ran", row["time_ns"], "ns"),
        number(facts, "of it page faults waited, at most", found.waits_ns, "ns", kind),
        number(facts, "brought by page faults of this memory", came, "byte"),
    ]
    less = ""
    if found.copy_ns is not None:
        label = "least time of one copy of it"
        numbers.append(number(facts, label, found.copy_ns, "ns", "reconstructed"))
        less = ", less that of one copy of the same bytes at the link's rate" if came else ""
    return Advice(
        rule=BEFORE_USE,
        title=f"Prefetch {_named(uses)} before {found.name}",
        finding=_finding(found),
        numbers=tuple(numbers),
        rows=(
            Rows("faults_by_kernel", pl.DataFrame([row]).select(shown)),
            _allocations(facts, uses),
        ),
        remedy=_remedy(found),
        calls=(
            f"// Before the launch of {found.name.strip('`')}.",
            *lines,
            f"// {PREFETCH_NOTE}",
        ),
        targets=tuple(use.target for use in uses),
        check=f"Page faults no longer wait in {found.name}, and its memory comes as user prefetch.",
        gate=gate_of("kernels.waiting_ns", row["exposed_ns"], _exposed_ns(facts)),
        gain=Gain(
            found.gain_ns,
            kind,
            f"time in which page faults waited in the kernel{less}",
        ),
        changes=tuple(
            Change(
                "prefetch",
                use.target,
                device=row["device_id"] or 0,
                offset_bytes=use.offset_bytes,
                n_bytes=None if use.is_whole else use.n_bytes,
            )
            for use in uses
        ),
    )


def _exposed_ns(facts: Facts) -> int:
    """Add up how long page faults waited in all kernels."""
    found = facts.rows_of("faults_by_kernel")
    return 0 if found is None else int(found["exposed_ns"].sum() or 0)


def _allocations(facts: Facts, uses: tuple[_Use, ...]) -> Rows:
    """Show the allocations that an advice is about."""
    found = facts.rows_of("faults_by_allocation")
    ids = [use.target.allocation_id for use in uses[:_MOST]]
    columns = ("name", "bytes", "in_bytes", "n_data_batches", "n_first_touch_batches", "va")
    frame = pl.DataFrame() if found is None else found.filter(pl.col("allocation_id").is_in(ids))
    return Rows(
        "faults_by_allocation", frame.select(name for name in columns if name in frame.columns)
    )
