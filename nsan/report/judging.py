"""The rules of the verdict: from a few figures to six lines, never more than the figures can say.

Pure functions of :class:`nsan.report.evidence.Evidence`: each gives sentences with the kind of their
figures. "May" is meant: what would help is advice of a rule, and nothing was tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from nsan.advice_text import gain_words
from nsan.report.blocks import Point, Points, quoted
from nsan.report.evidence import FAULTS
from nsan.report.sections.saying import SILENT, paragraph
from nsan.report.sentences import KERNELS, TELLING, Said, capital, listed, not_known
from nsan.report.trusting import trust, where
from nsan.tabular.totals import share
from nsan.units import counted, format_bytes, format_count, format_time

if TYPE_CHECKING:
    from nsan.analysis.advisor.advice import Advice
    from nsan.report.evidence import Evidence, Held

AGAIN: Final = 1.1
"""From so many times on memory is said to have come again: a choice of ours."""

_MOST_REASONS: Final = 3
_MOST_HINTS: Final = 2


def verdict(evidence: Evidence) -> Points:
    """Judge a capture.

    Parameters
    ----------
    evidence : Evidence
        What is known.

    Returns
    -------
    Points
        Six lines: what moved, what it cost, why, where, what may help, and how far to trust all that.
    """
    return _points(_lines(evidence), evidence)


def verdict_of_totals(evidence: Evidence) -> Points:
    """Judge a capture that is too large for the analyses: what its totals say, and nothing beyond.

    Parameters
    ----------
    evidence : Evidence
        Of :func:`nsan.report.evidence.gather_totals`.

    Returns
    -------
    Points
        What moved, for how long copies were under way, why, and how far to trust that.
    """
    reasons = [
        *_evictions(evidence),
        *_faults(evidence),
        *_asked_for(evidence),
        *_bounced(evidence),
        *_went_back(evidence),
    ]
    lines = {
        "What moved:": what_moved(evidence),
        "What it cost:": [Said(evidence.in_flight, "derived")],
        "Why:": reasons[:_MOST_REASONS],
        "How far to trust it:": trust(evidence),
    }
    return _points(_told(lines), evidence)


def grounds(evidence: Evidence) -> set[str]:
    """Name the analyses that the sentences of the verdict stand on.

    Parameters
    ----------
    evidence : Evidence
        What is known.

    Returns
    -------
    set of str
        Of what was asked, that of which a figure is told, or that there is none.
    """
    return {name for said in _lines(evidence).values() for each in said for name in each.on}


def _lines(evidence: Evidence) -> dict[str, list[Said]]:
    return _told(
        {
            "What moved:": what_moved(evidence),
            "What it cost:": what_it_cost(evidence),
            "Why:": why(evidence),
            "Where:": where(evidence),
            "What may help:": what_may_help(evidence),
            "How far to trust it:": trust(evidence),
        }
    )


def _told(lines: Mapping[str, list[Said]]) -> dict[str, list[Said]]:
    """Leave out sentences, and then lines, that say nothing."""
    told = {label: [each for each in said if each.text] for label, said in lines.items()}
    return {label: said for label, said in told.items() if said}


def _points(lines: Mapping[str, list[Said]], evidence: Evidence) -> Points:
    return Points(
        tuple(
            _point(label, said, is_modelled=evidence.is_modelled) for label, said in lines.items()
        )
    )


def _point(label: str, said: Iterable[Said], *, is_modelled: bool) -> Point:
    """Join sentences; a kind that all figures have is that of the line, else each says its own."""
    sentences = [(f"{each.text}.", each.kind) for each in said]
    kinds, text = {kind for _, kind in sentences}, " ".join(text for text, _ in sentences)
    if is_modelled and kinds != {""}:
        return Point(label, text, "modelled")
    if len(kinds) == 1 and "" not in kinds:
        return Point(label, text, kinds.pop())
    return Point(label, paragraph(sentences).text)


def what_moved(evidence: Evidence) -> list[Said]:
    """Say how much memory moved which way."""
    if evidence.moved is None:
        return [Said(f"Not known, {not_known(evidence)}", "")]
    ways = (
        (evidence.bytes_of("htod"), "went to the GPU" + "s" * (evidence.n_gpus > 1)),
        (evidence.bytes_of("dtoh"), "went to the CPU"),
        (evidence.bytes_of("dtod"), "moved between GPUs"),
    )
    parts = [f"{format_bytes(size)} {way}" for size, way in ways if size]
    if not parts:
        return [Said("No managed memory moved" + " in this part" * evidence.is_part)]
    said = [Said(f"{listed(parts)}, in {counted(evidence.n_copies, 'copy', 'copies')}")]
    if evidence.times_in is not None and evidence.times_in >= AGAIN:
        again = f"What the CPU sent went there {evidence.times_in:.2f} times on average"
        said.append(Said(again, "derived", ("amplification",)))
    return said


def what_it_cost(evidence: Evidence) -> list[Said]:
    """Say how long kernels may have waited, and how long copies were under way."""
    return [_waits(evidence), Said(evidence.in_flight, "derived")]


def _waits(evidence: Evidence) -> Said:
    held, part = evidence.held, _in_part(evidence)
    if held is None:
        return Said(_no_kernel(evidence), "")
    if held.exposed_ns:
        several = (evidence.n_kernel_names or 0) > 1 and evidence.kernels_ns
        return _all_exposed(evidence, held) if several else _exposed(evidence, held)
    if evidence.answers.get("gpu_faults") == "recorded":
        return Said(f"No kernel waited for a page fault{part}", "", KERNELS)
    if evidence.bytes_of("htod", *FAULTS):
        return Said("Page faults were served while no kernel was seen to run", "", KERNELS)
    return Said(f"Nothing shows that a kernel waited for a page fault{part}", "", KERNELS)


def _in_part(evidence: Evidence) -> str:
    return " in this part" * evidence.is_part


def _no_kernel(evidence: Evidence) -> str:
    """Say what is known where no time of a kernel is: that there was none is seldom."""
    unknown = "how long kernels waited is not known"
    if evidence.answers.get("kernels") != "recorded":
        return f"{capital(unknown)}, for kernels were not recorded"
    if not evidence.n_kernels:
        return f"No kernel was recorded{_in_part(evidence)}, so {unknown}"
    kernels = f"{counted(evidence.n_kernels, 'kernel was', 'kernels were')} recorded"
    how = (
        "with times that could not be read"
        if evidence.kernels_ns is None
        else "none with a duration"
    )
    return f"{kernels}, {how}, so {unknown}"


def _all_exposed(evidence: Evidence, held: Held) -> Said:
    """Say how long kernels of several names waited."""
    ran, waited, kind = evidence.kernels_ns or 0, evidence.waiting_ns or 0, evidence.waiting_kind
    over = f" ({evidence.n_gpus} GPUs added up)" * (evidence.n_gpus > 1)
    longest = f", longest in {quoted(held.name)} ({format_time(held.exposed_ns)})"
    text = (
        f"Kernels ran for {format_time(ran)}{over}{_in_part(evidence)}, and "
        f"{_SEEN[kind].format(_much(waited, ran))}{longest}{_bound(kind, evidence)}"
    )
    return Said(text, kind, KERNELS)


def _exposed(evidence: Evidence, held: Held) -> Said:
    text = (
        f"{quoted(held.name)} ran for {format_time(held.time_ns)}{_in_part(evidence)}, and "
        f"{_SEEN[held.kind].format(_much(held.exposed_ns, held.time_ns))}{_bound(held.kind, evidence)}"
    )
    return Said(text, held.kind, KERNELS)


_SEEN: Final = {
    "derived": "a page fault was waiting for {} of that",
    "reconstructed": "the driver is seen at work on page faults for {} of that",
}


def _much(part: int, whole: int) -> str:
    return f"{format_time(part)} ({share(part / whole)})"


def _bound(kind: str, evidence: Evidence) -> str:
    """Say of what the time that faults waited is a bound."""
    if evidence.is_coarse:
        return "; that is rough, since start times are coarse"
    if kind == "reconstructed":
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
    if evidence.moved is None:
        return [Said(f"Why memory moved is not known, {not_known(evidence)}", "")]
    told = "The recording does not tell why memory moved"
    none = "Nothing that was recorded asks for a reason"
    asked = ("batch_latency", "ping_pong", "user_prefetches")
    return [Said(told if evidence.moved else none, "", asked)]


def _evictions(evidence: Evidence) -> list[Said]:
    memory = evidence.memory
    if memory is None:
        return []
    said = f"GPU memory was full: {format_bytes(memory.evicted_bytes)} were evicted"
    kind, on = "recorded", []
    if memory.refaulted_bytes is not None:
        on.append("refault_totals")
        part, kind = memory.refaulted_bytes / memory.evicted_bytes, "derived"
        said += f", and {format_bytes(memory.refaulted_bytes)} of that ({share(part)}) were fetched again"
    if memory.factor is not None:
        said += f"; managed memory was {memory.factor:.2f} times what the GPU has room for"
        kind = "derived"
    elif memory.seen_factor is not None:
        said += f"; managed memory was at most {memory.seen_factor:.2f} times the room that it had"
        kind = "reconstructed"
    if memory.factor is not None or memory.seen_factor is not None:
        on.append("oversubscription_factor")
    return [Said(said, kind, tuple(on))]


def _faults(evidence: Evidence) -> list[Said]:
    from_cpu, from_gpus = evidence.bytes_of("htod", *FAULTS), evidence.bytes_of("dtod", *FAULTS)
    both = from_cpu + from_gpus
    if not both:
        return []
    ahead = evidence.bytes_of("htod", "prefetch") + evidence.bytes_of("dtod", "prefetch")
    whose = "another GPU" if not from_cpu else "the CPU" + " or another GPU" * bool(from_gpus)
    gpu = "GPUs" if evidence.n_gpus > 1 else "GPU"
    came = f"{format_bytes(both)} came because the {gpu} touched pages that were with {whose}"
    part = share(ahead / both) if ahead else "none"
    return [Said(f"{came}; the driver's prefetcher brought {part} of that", "derived")]


def _asked_for(evidence: Evidence) -> list[Said]:
    asked = {way: evidence.bytes_of(way, "user") for way in ("htod", "dtoh", "dtod")}
    counters = sum(evidence.bytes_of(way, "access_counters") for way in ("htod", "dtoh", "dtod"))
    said = []
    to_gpus, back = asked["htod"] + asked["dtod"], asked["dtoh"]
    if to_gpus or back:
        ways = [f"{format_bytes(to_gpus)} to the GPU"] * bool(to_gpus)
        ways += [f"{format_bytes(back)} to the CPU"] * bool(back)
        said += [Said(f"The program itself asked for {listed(ways)}"), *_in_time(evidence)]
    if counters:
        said.append(Said(f"Access counters called for {format_bytes(counters)}"))
    return said


def _in_time(evidence: Evidence) -> list[Said]:
    """Say whether the program's prefetches came in time."""
    n, outcomes = sum(evidence.prefetches.values()), evidence.prefetches
    on = ("user_prefetches",)
    if not n:
        return []
    named = counted(n, "prefetch", "prefetches")
    if outcomes.get("in_time") == n:
        one = "Its prefetch looks neither late nor early"
        text = f"None of its {named} looks late or early" if n > 1 else one
        return [Said(text, "reconstructed", on)]
    words = {"late": "came late", "early": "came too early", "moved_nothing": "had nothing to move"}
    found = [word for key, word in words.items() if outcomes.get(key)]
    if n == 1 and found:
        return [Said(f"Its prefetch {found[0]}", "reconstructed", on)]
    found = [f"{outcomes[key]} {word}" for key, word in words.items() if outcomes.get(key)]
    return [Said(f"Of its {named} {listed(found)}", "reconstructed", on)]


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
                ("ping_pong",),
            )
        )
    if evidence.driver_events:
        events = [
            f"{kind.replace('_', ' ')} {counted(n, 'time')}"
            for kind, n in evidence.driver_events.items()
        ]
        said.append(Said(f"The driver itself reported {listed(events)}"))
    return said


def _batches(evidence: Evidence) -> list[Said]:
    """Say what batches did: where no cause is known that is all there is, else what no copy shows.

    A batch without a copy is called a first touch; it may as well have mapped memory that stayed remote.
    """
    n, data = sum(evidence.outcomes.values()), evidence.outcomes.get("data", 0)
    first = evidence.outcomes.get("first_touch", 0)
    untold = evidence.bytes_of("htod", "unknown")
    told = {
        "brought data": data if untold else 0,
        SILENT: first if first >= TELLING * n else 0,
    }
    parts = {words: part for words, part in told.items() if part}
    if not parts:
        return []
    if n in parts.values():
        all_of = {1: "The only batch", 2: "Both batches"}
        batches = all_of.get(n, f"All {format_count(n)} batches")
        text = f"{batches} of GPU page faults {next(iter(parts))}"
    else:
        each = [f"{format_count(part)} {words}" for words, part in parts.items()]
        text = f"Of {format_count(n)} batches of GPU page faults {listed(each)}"
    return [Said(text, evidence.outcomes_kind, ("batch_latency",))]


def _went_back(evidence: Evidence) -> list[Said]:
    back = evidence.bytes_of("dtoh", *FAULTS)
    return [Said(f"{format_bytes(back)} went back because the CPU touched them")] if back else []


def what_may_help(evidence: Evidence) -> list[Said]:
    """Say what the advisor puts first, and what that may save; the section after this one has the evidence."""
    found = evidence.advised
    if found is None:
        return []
    told = [each for each in found.advice if each.level != "info"][:_MOST_HINTS]
    if told:
        return [_hint(each, evidence.span_ns) for each in told]
    known = all(each.is_known for each in found.silent)
    nothing = "Nothing that was recorded asks for a change"
    return [Said(nothing if known else f"{nothing}, but not all that matters is known", "")]


def _hint(advice: Advice, span_ns: int) -> Said:
    """Write an advice in one sentence."""
    on = tuple(dict.fromkeys(each.analysis for each in advice.rows if each.analysis))
    if advice.gain is None:
        return Said(advice.title, "", on)
    return Said(f"{advice.title}: {gain_words(advice.gain, span_ns)}", advice.gain.kind, on)
