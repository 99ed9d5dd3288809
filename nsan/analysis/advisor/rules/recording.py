"""The recording itself: rows that were lost, and switches that were off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.advisor.advice import Advice, Level, Number, Rows, Said, Silent
from nsan.analysis.advisor.facts import (
    FAULTS,
    Facts,
    hints_at_torch,
    moved_bytes,
    number,
    span_ns,
)
from nsan.tabular.totals import share
from nsan.units import counted, format_bytes, format_time

if TYPE_CHECKING:
    from collections.abc import Sequence

LOST_ROWS: Final = "lost_rows"
SWITCHES_MISSING: Final = "switches_missing"

_SHARES: Final[dict[Level, float]] = {"high": 0.1, "medium": 0.01}
"""Share of what moved, or of the time, from which on a loss is of a level: choices of ours."""

_MOST_ROWS: Final = 5

_QUIET: Final = ("--sample=none", "--cpuctxsw=none")
_RANGE: Final = ("--capture-range=cudaProfilerApi", "--capture-range-end=stop")
_OLDER: Final = ("nvprof", "visual-profiler")
"""How the kinds of captures of the profilers before nsys begin."""

_FAULT_KINDS: Final = ("gpu_faults", "cpu_faults")

_OPEN: Final = {
    "migrations": ("migrations", "what moved, when and why"),
    "kernels": ("kernels", "what ran meanwhile, and how long it waited"),
    "gpu_faults": (
        "GPU page faults",
        "first touches, reads against writes, and waits before the first copy",
    ),
    "allocations": ("managed allocations", "which memory it was, and by how much it is too large"),
    "cpu_faults": ("CPU page faults", "which functions of the CPU touch managed memory"),
    "nvtx": ("NVTX ranges", "in which step or phase it happens"),
}
"""By kind of event, what matters most first: its name, and the questions that only it answers."""


def lost_rows(facts: Facts) -> Iterator[Said]:
    """Advise to record again where the recording lost rows."""
    told = {check["id"]: check for check in facts.summary["health"]}.get("lost_rows")
    # The summary has looked already: to look again takes as long as all of it.
    found = facts.rows_of("lost_rows") if told and told["status"] == "warn" else None
    if found is None:
        yield _none_lost(told)
        return
    certain = found.filter(pl.col("level") == "certain")
    held = certain if certain.height else found
    lost, least = int(held["lost_bytes"].sum()), int(held["least_bytes"].sum())
    time = int(held.filter("is_silent")["duration_ns"].sum())
    moved = facts.summary["migrations"]["bytes"] or 0
    part = max(lost / max(moved + lost, 1), time / max(span_ns(facts), 1))
    level: Level = next((level for level, most in _SHARES.items() if part >= most), "low")
    yield Advice(
        rule=LOST_ROWS,
        title="Record again, and record less: the recording lost rows of Unified Memory",
        finding=_lost_finding(held, lost, moved, is_certain=certain.height > 0),
        numbers=tuple(_lost_numbers(facts, held, lost, least, time)),
        rows=(Rows("lost_rows", held.sort("lost_bytes", descending=True, nulls_last=True).head(_MOST_ROWS)),),
        remedy=(
            "The driver keeps about 8 192 events for the profiler and drops the rest without a word; no option of "
            "nsys is known to make that more. So let fewer events come at a time: record no page faults that you do "
            "not need, only the steps that matter, a smaller problem, and leave the profiler a CPU core of its own. "
            "Until then every sum is a lower bound, and what the other advice says may be off."
        ),
        calls=_lost_calls(facts),
        targets=(),
        check="`nsan summary` says that there is no sign of lost rows.",
        level=level if certain.height else "low",
    )  # fmt: skip


def _none_lost(told: Mapping[str, Any] | None) -> Silent:
    """Say how far it is known that nothing was lost, in the words of the health of the capture."""
    if told is None:
        reason = (
            "No page fault brought memory to a GPU, so nothing would show whether rows were lost."
        )
        return Silent(LOST_ROWS, reason, is_known=False)
    return Silent(LOST_ROWS, told["text"], is_known=told["status"] == "ok")


def _lost_finding(held: pl.DataFrame, lost: int, moved: int, *, is_certain: bool) -> str:
    first = held.sort("start_ns", "device_id").row(0, named=True)
    sure = "are missing" if is_certain else "are probably missing"
    where = (
        f"from {format_time(first['start_ns'])} to {format_time(first['end_ns'])}"
        if first["is_silent"]
        else f"somewhere between {format_time(first['earliest_ns'])} and {format_time(first['latest_ns'])}"
    )
    more = held.height - 1
    also = f", and in {counted(more, 'more stretch', 'more stretches')}" if more else ""
    of_all = f", {share(lost / (moved + lost))} of what must have moved" if lost else ""
    return (
        f"Rows {sure} {where}{also}: copies of about {format_bytes(lost)}{of_all} (reconstructed). What came after does "
        "not fit what came before."
    )


def _lost_numbers(
    facts: Facts, held: pl.DataFrame, lost: int, least: int, time: int
) -> Iterator[Number]:
    yield number(facts, "stretches with lost rows", held.height, "stretches", "reconstructed")
    yield number(facts, "lost, about", lost, "byte", "reconstructed")
    yield number(facts, "lost, at least", least, "byte", "reconstructed")
    if time:
        yield number(facts, "time without rows", time, "ns", "reconstructed")


def _lost_calls(facts: Facts) -> tuple[str, ...]:
    """Give a line that records less, and how to mark what is recorded."""
    switches = facts.summary["switches"]
    off = [
        switches[kind].replace("=true", "=false")
        for kind in _FAULT_KINDS
        if facts.is_recorded(kind) and switches[kind]
    ]
    line = ("--trace=cuda,nvtx", *off, "--cuda-memory-usage=true", *_QUIET, *_RANGE)
    calls = (
        f"nsys profile {' '.join(line)} -o report ./program",
        "cudaProfilerStart(); step(); cudaProfilerStop();  // C++: around the steps that matter",
    )
    if not hints_at_torch(facts):
        return calls
    return (
        *calls,
        "torch.cuda.profiler.start(); step(); torch.cuda.profiler.stop()  # the same in PyTorch",
    )


def switches_missing(facts: Facts) -> Iterator[Said]:
    """Advise to record what other rules could not see."""
    if not _has_any(facts):
        yield Silent(SWITCHES_MISSING, _nothing(facts), is_known=False)
        return
    summary = facts.summary
    if str(summary["source_kind"]).startswith(_OLDER):
        yield from _older(facts)
        return
    missing = [
        kind
        for kind in _OPEN
        if summary["switches"].get(kind) and not facts.is_recorded(kind)
    ]  # fmt: skip
    if not missing:
        yield Silent(SWITCHES_MISSING, "Everything that nsan can use was recorded.")
        return
    yield _record(facts, missing)


def _has_any(facts: Facts) -> bool:
    found = facts.summary
    counts = (
        found["migrations"]["n"],
        found["gpu_faults"]["n_rows"],
        found["cpu_faults"]["n"],
        found["managed"]["n_allocations"],
        found["managed"]["n_calls"],
    )
    return any(counts)


def _nothing(facts: Facts) -> str:
    part = "this part of the capture" if facts.is_part else "this capture"
    nothing = f"Nothing of Unified Memory is in {part}: no migration, no page fault and no managed allocation"
    if facts.is_part:
        return f"{nothing}."
    return f"{nothing}. Either the program uses no managed memory, or it was not seen."


def _older(facts: Facts) -> Iterator[Said]:
    """Say what a capture of nvprof cannot tell."""
    groups = facts.summary["migrations"]["groups"] or ()
    unknown = sum(row["bytes"] or 0 for row in groups if row["cause"] == "unknown")
    if not unknown:
        yield Silent(SWITCHES_MISSING, "This capture of nvprof tells what its profiler can tell.")
        return
    yield Advice(
        rule=SWITCHES_MISSING,
        title="Record with nsys: nvprof does not print why memory moved",
        finding=f"Of {format_bytes(unknown)} that moved, the log does not say whether a page fault, the driver's "
        "prefetcher, an eviction or the program moved it.",
        numbers=(number(facts, "moved for an unknown cause", unknown, "byte", "recorded"),),
        rows=(),
        remedy=_PRICE,
        calls=(_line(facts, list(_OPEN)),),
        targets=(),
        check="`nsan migrations` shows causes.",
        level="info",
    )


_PRICE: Final = (
    "Record it all once. Page faults slow a program that is recorded (by up to 70 %, says NVIDIA), so compare times "
    "only with runs recorded alike."
)


def _record(facts: Facts, missing: Sequence[str]) -> Advice:
    """Say what to record, and what stays open without it."""
    summary = facts.summary
    said = [_left_open(summary, kind) for kind in missing]
    names = _listed([_OPEN[kind][0] for kind in missing])
    frame = pl.DataFrame(
        {
            "events": [_OPEN[kind][0] for kind in missing],
            "reason": [str(summary["reasons"][kind]) for kind in missing],
            "switch": [str(summary["switches"][kind]) for kind in missing],
        }
    )
    n = len(missing)
    is_blind = not summary["migrations"]["n"] and "gpu_faults" in missing
    blind = (
        "Nothing was seen to move, so first touches may be all that there is. " if is_blind else ""
    )
    return Advice(
        rule=SWITCHES_MISSING,
        title=f"Record {names} as well",
        finding=f"{blind}{' '.join(said)}",
        numbers=(number(facts, "kinds of events not recorded", n, "kinds", "recorded"),),
        rows=(Rows("", frame),),
        remedy=_PRICE,
        calls=(_line(facts, missing), "nsan record -o run -- ./program  # the same, with a run without nsys beside it"),
        targets=(),
        check="`nsan summary` says of each that it was recorded.",
        level=_level(facts, missing),
    )  # fmt: skip


def _left_open(summary: Mapping[str, Any], kind: str) -> str:
    name, question = _OPEN[kind]
    reason = summary["reasons"][kind]
    if summary["capture"][kind] == "unknown":
        return f"Whether {name} were recorded is unknown ({reason}): {question} may stay open."
    return f"{name[0].upper()}{name[1:]} were not recorded ({reason}): {question} stay open."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _line(facts: Facts, missing: Sequence[str]) -> str:
    """Write the line that records what is missing, and all that was recorded."""
    switches = facts.summary["switches"]
    kinds = [kind for kind in _OPEN if kind in missing or facts.is_recorded(kind)]
    further = dict.fromkeys(
        switches[kind]
        for kind in kinds
        if switches[kind] and not switches[kind].startswith("--trace")
    )
    return f"nsys profile {' '.join(('--trace=cuda,nvtx', *further))} -o report ./program"


def _level(facts: Facts, missing: Sequence[str]) -> Level:
    """Say how much stays unknown: all, what kernels wait for or which memory it is, or details."""
    moved = facts.summary["migrations"]["n"]
    if "migrations" in missing or ("gpu_faults" in missing and not moved):
        return "medium"
    by_faults = any(moved_bytes(facts, way, *FAULTS) for way in ("htod", "dtod"))
    telling = {"gpu_faults", "allocations", "kernels"} & set(missing)
    return "low" if by_faults and telling else "info"
