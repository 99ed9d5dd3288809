"""The rules of the verdict: from a few figures to five lines, never more than the figures can say.

Pure functions of :class:`nsan.report.evidence.Evidence`: each gives sentences with the kind of their
figures. "May" is meant: what would help is a hint of a rule, and nothing was tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from nsan.report.blocks import Point, Points, quoted
from nsan.report.evidence import FAULTS
from nsan.report.sections.saying import paragraph, part_of
from nsan.tabular.totals import share
from nsan.units import counted, format_bytes, format_count, format_time

if TYPE_CHECKING:
    from nsan.report.evidence import Evidence, Held, Place

MUCH: Final = 0.3
"""From this part on evicted memory that comes back is much: a hint of others' tools (domain.md E-12)."""

TELLING: Final = 0.1
"""From this part on a wait or a share is worth a word: a choice of ours."""

AGAIN: Final = 1.1
"""From so many times on memory is said to have come again: a choice of ours."""

_MOST_REASONS: Final = 3


class Said(NamedTuple):
    """A sentence without its full stop, and the kind of its figures; "" has no figure."""

    text: str
    kind: str = "recorded"


def verdict(evidence: Evidence) -> Points:
    """Judge a capture.

    Parameters
    ----------
    evidence : Evidence
        What is known.

    Returns
    -------
    Points
        Five lines: what moved, what it cost, why, where, and how far to trust all that.
    """
    lines = {
        "What moved:": what_moved(evidence),
        "What it cost:": what_it_cost(evidence),
        "Why:": [*why(evidence), *what_may_help(evidence)],
        "Where:": where(evidence),
        "How far to trust it:": trust(evidence),
    }
    return Points(
        tuple(
            _point(label, said, is_modelled=evidence.is_modelled) for label, said in lines.items()
        )
    )


def _point(label: str, said: Iterable[Said], *, is_modelled: bool) -> Point:
    """Join sentences; a kind that all figures have is that of the line, else each says its own."""
    sentences = [Said(f"{each.text}.", each.kind) for each in said if each.text]
    kinds = {each.kind for each in sentences}
    if is_modelled and kinds != {""}:
        return Point(label, " ".join(each.text for each in sentences), "modelled")
    if len(kinds) == 1 and "" not in kinds:
        return Point(label, " ".join(each.text for each in sentences), kinds.pop())
    return Point(label, paragraph(sentences).text)


def what_moved(evidence: Evidence) -> list[Said]:
    """Say how much memory moved which way."""
    if evidence.moved is None:
        return [Said(_NOT_KNOWN[evidence.answers.get("migrations", "unknown")], "")]
    ways = (
        (evidence.bytes_of("htod"), "went to the GPU" + "s" * (evidence.n_gpus > 1)),
        (evidence.bytes_of("dtoh"), "went to the CPU"),
        (evidence.bytes_of("dtod"), "moved between GPUs"),
    )
    parts = [f"{format_bytes(size)} {way}" for size, way in ways if size]
    if not parts:
        return [Said("No managed memory moved" + " in this part" * evidence.is_part)]
    said = [Said(f"{_listed(parts)}, in {counted(evidence.n_copies, 'copy', 'copies')}")]
    if evidence.times_in is not None and evidence.times_in >= AGAIN:
        again = f"What the CPU sent went there {evidence.times_in:.2f} times on average"
        said.append(Said(again, "derived"))
    return said


_NOT_KNOWN: Final = {
    "recorded": "Not known, for sizes of migrations could not be read",
    "not_recorded": "Not known, for migrations were not recorded",
    "unknown": "Not known, and the capture does not say whether migrations were recorded",
}


def what_it_cost(evidence: Evidence) -> list[Said]:
    """Say how long kernels may have waited, and how long copies were under way."""
    return [_waits(evidence), Said(evidence.in_flight, "derived")]


def _waits(evidence: Evidence) -> Said:
    if evidence.held is None:
        if evidence.answers.get("kernels") == "recorded":
            return Said("No kernel ran" + " in this part" * evidence.is_part, "")
        return Said("How long kernels waited is not known, for kernels were not recorded", "")
    if evidence.held.exposed_ns:
        several = (evidence.n_kernel_names or 0) > 1 and evidence.kernels_ns
        return (
            _all_exposed(evidence, evidence.held) if several else _exposed(evidence.held, evidence)
        )
    if evidence.answers.get("gpu_faults") == "recorded":
        return Said("No kernel waited for a page fault", "")
    if evidence.bytes_of("htod", *FAULTS):
        return Said("Page faults were served while no kernel is known to have run", "")
    return Said("Nothing shows that a kernel waited for a page fault", "")


def _all_exposed(evidence: Evidence, held: Held) -> Said:
    """Say how long kernels waited, of several names: sums over names may overlap, so at most."""
    whole = evidence.kernels_ns or 0
    waited = min(evidence.waiting_ns or 0, whole)
    over = f" ({evidence.n_gpus} GPUs added up)" * (evidence.n_gpus > 1)
    return Said(
        f"Kernels ran for {format_time(whole)}{over}, and {_SEEN[held.kind].format(_much(waited, whole))}"
        f", longest in {quoted(held.name)} ({format_time(held.exposed_ns)}){_bound(held, evidence)}",
        held.kind,
    )


def _exposed(held: Held, evidence: Evidence) -> Said:
    return Said(
        f"{quoted(held.name)} ran for {format_time(held.time_ns)}, and "
        f"{_SEEN[held.kind].format(_much(held.exposed_ns, held.time_ns))}{_bound(held, evidence)}",
        held.kind,
    )


_SEEN: Final = {
    "derived": "a page fault was waiting for {} of that",
    "reconstructed": "the driver is seen at work on page faults for {} of that",
}


def _much(part: int, whole: int) -> str:
    return f"{format_time(part)} ({share(part / whole)})"


def _bound(held: Held, evidence: Evidence) -> str:
    """Say of what the time that faults waited is a bound."""
    if evidence.is_coarse:
        return "; that is rough, since start times are coarse"
    if held.kind == "reconstructed":
        return "; what came before the first copy of a batch does not show"
    return ": the most that page faults can have held up"


def why(evidence: Evidence) -> list[Said]:
    """Say why memory moved: what weighs most, and no more than that."""
    said = [
        *_evictions(evidence),
        *_faults(evidence),
        *_asked_for(evidence),
        *_bounced(evidence),
        *_batches(evidence),
        *_went_back(evidence),
    ]
    if said:
        return said[:_MOST_REASONS]
    told = "The recording does not tell why memory moved"
    return [Said(told if evidence.moved else "Nothing that was recorded asks for a reason", "")]


def _evictions(evidence: Evidence) -> list[Said]:
    memory = evidence.memory
    if memory is None:
        return []
    said = f"GPU memory was full: {format_bytes(memory.evicted_bytes)} were evicted"
    kind = "recorded"
    if memory.refaulted_bytes is not None:
        part, kind = memory.refaulted_bytes / memory.evicted_bytes, "derived"
        said += f", and {format_bytes(memory.refaulted_bytes)} of that ({share(part)}) were fetched again"
    if memory.factor is not None:
        said += f"; managed memory was {memory.factor:.2f} times what the GPU has room for"
        kind = "derived"
    elif memory.seen_factor is not None:
        said += f"; managed memory was at most {memory.seen_factor:.2f} times the room that it had"
        kind = "reconstructed"
    return [Said(said, kind)]


def _faults(evidence: Evidence) -> list[Said]:
    from_cpu, from_gpus = evidence.bytes_of("htod", *FAULTS), evidence.bytes_of("dtod", *FAULTS)
    both = from_cpu + from_gpus
    if not both:
        return []
    ahead = evidence.bytes_of("htod", "prefetch") + evidence.bytes_of("dtod", "prefetch")
    whose = "another GPU" if not from_cpu else "the CPU" + " or another GPU" * bool(from_gpus)
    gpu = "GPUs" if evidence.n_gpus > 1 else "GPU"
    came = f"{format_bytes(both)} came because the {gpu} touched pages that were with {whose}"
    return [
        Said(f"{came}; the driver's prefetcher brought {share(ahead / both)} of that", "derived")
    ]


def _asked_for(evidence: Evidence) -> list[Said]:
    asked = {way: evidence.bytes_of(way, "user") for way in ("htod", "dtoh", "dtod")}
    counters = sum(evidence.bytes_of(way, "access_counters") for way in ("htod", "dtoh", "dtod"))
    said = []
    to_gpus, back = asked["htod"] + asked["dtod"], asked["dtoh"]
    if to_gpus or back:
        ways = [f"{format_bytes(to_gpus)} to the GPU"] * bool(to_gpus)
        ways += [f"{format_bytes(back)} to the CPU"] * bool(back)
        said += [Said(f"The program itself asked for {_listed(ways)}"), *_in_time(evidence)]
    if counters:
        said.append(Said(f"Access counters called for {format_bytes(counters)}"))
    return said


def _in_time(evidence: Evidence) -> list[Said]:
    """Say whether the program's prefetches came in time."""
    n, outcomes = sum(evidence.prefetches.values()), evidence.prefetches
    if not n:
        return []
    named = counted(n, "prefetch", "prefetches")
    if outcomes.get("in_time") == n:
        return [Said(f"None of its {named} looks late or early", "reconstructed")]
    words = {"late": "late", "early": "early", "moved_nothing": "without anything to move"}
    found = [f"{outcomes[key]} {word}" for key, word in words.items() if outcomes.get(key)]
    return [Said(f"Of its {named} {_listed(found)}", "reconstructed")]


def _bounced(evidence: Evidence) -> list[Said]:
    said = []
    if evidence.bounce is not None:
        found = evidence.bounce
        blocks = counted(found.n_va_blocks, "VA block")
        said.append(
            Said(
                f"{format_bytes(found.bytes)} in {blocks} went to and fro between "
                f"{found.processors.replace(', ', ' and ')} in quick succession (ping-pong), "
                f"{format_bytes(found.moved_bytes)} in all",
                "reconstructed",
            )
        )
    if evidence.driver_events:
        events = [
            f"{kind.replace('_', ' ')} {counted(n, 'time')}"
            for kind, n in evidence.driver_events.items()
        ]
        said.append(Said(f"The driver itself reported {_listed(events)}"))
    return said


def _batches(evidence: Evidence) -> list[Said]:
    """Say what batches did: where no cause is known that is all there is, else what no copy shows."""
    n, data = sum(evidence.outcomes.values()), evidence.outcomes.get("data", 0)
    first = evidence.outcomes.get("first_touch", 0)
    untold = evidence.bytes_of("htod", "unknown")
    parts = [f"{format_count(data)} brought data"] * bool(untold and data)
    if first and first >= TELLING * n:
        parts.append(
            f"{format_count(first)} had nothing to copy, since the GPU touched pages first"
        )
    if not parts:
        return []
    batches = "batches" if n > 1 else "batch"
    return [
        Said(f"Of {format_count(n)} {batches} of GPU page faults {_listed(parts)}", "reconstructed")
    ]


def _went_back(evidence: Evidence) -> list[Said]:
    back = evidence.bytes_of("dtoh", *FAULTS)
    return [Said(f"{format_bytes(back)} went back because the CPU touched them")] if back else []


def what_may_help(evidence: Evidence) -> list[Said]:
    """Say what may help, where the evidence speaks for it; one hint, the most telling."""
    memory, held = evidence.memory, evidence.held
    waits = held is not None and held.exposed_ns >= TELLING * held.time_ns
    brought = evidence.bytes_of("htod", *FAULTS) or evidence.outcomes.get("data")
    hint = ""
    if memory is not None:
        if (memory.refaulted_bytes or 0) >= MUCH * memory.evicted_bytes:
            hint = "Less memory in use at a time may help most; prefetching alone makes no room"
    elif evidence.bounce is not None and not waits:
        hint = "A preferred location with accessed-by (`cudaMemAdvise`) may keep that memory in one place"
    elif evidence.prefetches.get("late"):
        hint = "Prefetches that start earlier may help"
    elif (
        held is not None and waits and brought and held.in_bytes >= TELLING * evidence.to_gpu_bytes
    ):
        hint = f"`cudaMemPrefetchAsync` before {quoted(held.name)} may take much of that wait away"
    elif _is_well_prefetched(evidence):
        hint = "Nothing here asks for a change"
    return [Said(hint, "")]


def _is_well_prefetched(evidence: Evidence) -> bool:
    """Say whether all that came was asked for in time, and no fault is there or hidden."""
    asked = evidence.bytes_of("htod", "user") + evidence.bytes_of("dtod", "user")
    in_time = set(evidence.prefetches) == {"in_time"}
    return 0 < asked == evidence.to_gpu_bytes and in_time and evidence.n_fault_rows == 0


def where(evidence: Evidence) -> list[Said]:
    """Name the kernel, the range and the allocation that matter most."""
    said = [*_kernel(evidence), *_range(evidence.range), *_allocation(evidence.allocation)]
    if said:
        return said
    if evidence.moved:
        return [Said("No kernel, range or allocation stands out", "")]
    return [Said("Nothing moved, so there is no place to name", "")]


def _kernel(evidence: Evidence) -> list[Said]:
    held, came = evidence.held, evidence.to_gpu_bytes
    if 2 * evidence.alone_bytes > came:
        part = part_of(evidence.alone_bytes, came)
        return [Said(f"{_capital(part)} of what came to GPUs came while no kernel ran", "derived")]
    if held is not None and held.in_bytes:
        part = part_of(held.in_bytes, came)
        return [Said(f"Kernel {quoted(held.name)}: {part} of what came to GPUs", "derived")]
    if held is not None and held.n_rows and evidence.n_fault_rows:
        part = part_of(held.n_rows, evidence.n_fault_rows)
        return [Said(f"Kernel {quoted(held.name)}: {part} of GPU fault rows", "derived")]
    return []


def _range(place: Place | None) -> list[Said]:
    if place is None or not place.bytes or place.bytes < TELLING * place.all_bytes:
        return []
    part = part_of(place.bytes, place.all_bytes)
    return [Said(f"NVTX range {quoted(place.name)}: {part} of what came to GPUs", "derived")]


def _allocation(place: Place | None) -> list[Said]:
    if place is None or not place.bytes:
        return []
    part, size = part_of(place.bytes, place.all_bytes), format_bytes(place.size_bytes)
    what, kind = ("Memory", "reconstructed") if place.is_guessed else ("Allocation", "derived")
    return [Said(f"{what} {quoted(place.name)} ({size}): {part} of what moved", kind)]


def trust(evidence: Evidence) -> list[Said]:
    """Say what the figures stand on, and what they cannot say."""
    n_failed = sum(status == "fail" for status in evidence.checks.values())
    said = {
        "nsan's model of the driver made this trace, and no GPU": evidence.is_modelled,
        _of_fault_rows(evidence): True,
        "Start times are coarse, so busy times and rates are not known": evidence.is_coarse,
        "nvprof does not print why memory moved": evidence.is_nvprof
        and evidence.bytes_of("htod", "unknown"),
        _LOST.get(evidence.checks.get("lost_rows", ""), ""): True,
        "On this platform little traffic does not mean that data is local": "platform"
        in evidence.checks,
        f"{counted(n_failed, 'check')} of the capture failed, see above": n_failed,
        "This is a part of the capture: what came before, or is elsewhere, is left out": evidence.is_part,
    }
    return [Said(text, "") for text, holds in said.items() if holds]


def _of_fault_rows(evidence: Evidence) -> str:
    if evidence.answers.get("gpu_faults") != "recorded":
        return (
            "Without rows of GPU page faults, batches and waits are put together from copies, and first "
            "touches do not show"
        )
    if not evidence.n_fault_rows:
        return "GPU page faults were recorded, and there was none"
    rows = "A GPU fault row is one batch of the driver, not one fault"
    slow = "; to record them slows a program, so compare times only with runs recorded alike"
    return rows + slow * (not evidence.is_modelled)


_LOST: Final = {
    "warn": "Rows are missing, so sums are lower bounds",
    "unknown": "Whether rows were lost cannot be told",
    "ok": "No sign of lost rows",
}


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
