"""The document: Markdown, from what was measured. Figures of one run on one machine; ratios travel, seconds do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.peers.agreement import Agreement, Difference
from benchmarks.peers.contests import QUESTIONS, Contest, Contestant
from benchmarks.peers.defects import Shown
from benchmarks.peers.measuring import Timed

_SHOWN = 3
_FAMILIES = {
    "nsan": "nsan",
    "vendor": "the vendor's reports and recipe",
    "sql": "SQL",
    "numpy": "sqlite3 + NumPy",
    "pandas": "pandas",
    "torch": "PyTorch's memory_viz",
}
_VERDICTS = ("differs", "nothing", "in part", "yes")
"""From worst to best."""


@dataclass(frozen=True)
class Standing:
    """What a contestant took, and how far its answer agrees; no agreement means that it gave no answer."""

    contestant: Contestant
    timed: Timed
    agreement: Agreement | None

    @property
    def verdict(self) -> str:
        if self.agreement is None:
            return "nothing"
        if self.agreement.differences:
            return "differs"
        return "in part" if self.agreement.silent else "yes"


@dataclass(frozen=True)
class Outcome:
    """A contest that took place."""

    contest: Contest
    standings: list[Standing]

    @property
    def unit_s(self) -> float:
        return self.standings[0].timed.best.wall_s


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Write a table; what could end a cell is escaped."""
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def seconds(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3f} s" if value < 1 else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def _spread(timed: Timed) -> str:
    return "one run" if timed.spread is None else f"+{timed.spread:.0%}"


def _cells(standing: Standing, unit_s: float) -> tuple[str, ...]:
    timed = standing.timed
    best = timed.best
    if best.status is None:
        return (standing.contestant.name, "not done in time", "", "", "", "", "no answer")
    return (
        standing.contestant.name,
        seconds(best.wall_s),
        _spread(timed),
        f"{best.wall_s / unit_s:.3g}" if unit_s else "-",
        seconds(best.cpu_s),
        f"{timed.peak_bytes / 1e6:.0f} MB",
        _agrees(standing),
    )


def _agrees(standing: Standing) -> str:
    if standing.contestant.read is None:
        return "-"
    if standing.agreement is None:
        return "no answer"
    agreement = standing.agreement
    if not agreement.n_compared:
        return "writes a page, not figures" if standing.contestant.kind == "torch" else "no figures"
    word = "differs" if agreement.differences else "agrees"
    return f"{word}: {agreement.n_equal:,} of {agreement.n_compared:,} figures"


def _difference(one: Difference) -> str:
    def shown(value: object) -> str:
        return (
            "nothing" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
        )

    return f"{one.topic}, {one.row}, `{one.figure}`: {shown(one.said)} where SQL says {shown(one.true)}"


def why_nothing(outcome: Outcome, standing: Standing) -> str:
    """Say why there is no answer, as far as it is known."""
    status = standing.timed.best.status
    if status is None:
        return "was ended when its time was up"
    absent = outcome.contest.absent
    if standing.contestant.kind == "vendor" and absent:
        return f"no table (exit status {status}), since tables are absent: {absent}"
    return f"gave no answer (exit status {status})"


def _why(standing: Standing, one: Difference) -> str:
    if standing.contestant.kind == "vendor" and one.figure in ("min_va", "max_va"):
        return "; empty as soon as one direction has no rows"
    return ""


def remarks(outcome: Outcome) -> list[str]:
    """Say what differs, what is not answered, and why; what holds for several is said once."""
    said: dict[str, list[str]] = {}
    for standing in outcome.standings:
        for text in _remarks(outcome, standing):
            said.setdefault(text, []).append(standing.contestant.name)
    lines = [f"- {'; '.join(names)}: {text}." for text, names in said.items()]
    return lines + [f"- {note}" for note in outcome.contest.notes]


def _remarks(outcome: Outcome, standing: Standing) -> list[str]:
    if standing.contestant.read is None:
        return []
    if standing.agreement is None:
        return [why_nothing(outcome, standing)]
    found = standing.agreement.differences
    lines = [f"{_difference(one)}{_why(standing, one)}" for one in found[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"{len(found) - _SHOWN:,} more figures differ")
    if standing.agreement.silent and standing.agreement.n_compared:
        words = ", ".join(f"`{name}`" for name in standing.agreement.silent)
        lines.append(f"does not say {words}")
    return lines


def _contest(outcome: Outcome) -> list[str]:
    head = ("who", "wall", "spread", "ratio", "CPU", "peak memory", "agreement")
    rows = [_cells(standing, outcome.unit_s) for standing in outcome.standings]
    return [f"**{outcome.contest.label}**", "", *table(head, rows), "", *remarks(outcome), ""]


def matrix(outcomes: Sequence[Outcome]) -> list[str]:
    """Say who answers what: the worst verdict over all files."""
    asked = {outcome.contest.question for outcome in outcomes}
    questions = [question for question in QUESTIONS if question in asked]
    seen: dict[tuple[str, str], set[str]] = {}
    for outcome in outcomes:
        for standing in outcome.standings:
            if standing.contestant.read is not None:
                key = (standing.contestant.kind, outcome.contest.question)
                seen.setdefault(key, set()).add(standing.verdict)
    kinds = [kind for kind in _FAMILIES if any(kind == k for k, _ in seen)]
    rows = [
        (
            f"{number(question)}. {QUESTIONS[question]}",
            *(_verdict(seen.get((kind, question), set())) for kind in kinds),
        )
        for question in questions
    ]
    return table(("question", *(_FAMILIES[kind] for kind in kinds)), rows)


def _verdict(found: set[str]) -> str:
    words = [word for word in _VERDICTS if word in found]
    if not words:
        return "-"
    return words[0] if len(words) == 1 else f"{words[-1]}; {words[0]} on some files"


def number(question: str) -> int:
    """Give the number of a question in the document."""
    return list(QUESTIONS).index(question) + 1


_COLUMNS = (
    "unit of ratios", "nsan, first time", "nsan, again", "nsan in nsys", "vendor", "sqlite3 + NumPy", "pandas"
)  # fmt: skip


def in_short(outcomes: Sequence[Outcome]) -> list[str]:
    """Put the largest file of each question on one line: wall and peak memory."""
    rows = []
    for question in QUESTIONS:
        here = [outcome for outcome in outcomes if outcome.contest.question == question]
        if not here:
            continue
        largest = max(here, key=lambda outcome: outcome.contest.n_bytes)
        fastest: dict[str, Timed] = {}
        for standing in largest.standings:
            column, timed = _column(standing.contestant), standing.timed
            if timed.best.status is not None and column in _COLUMNS:
                known = fastest.setdefault(column, timed)
                fastest[column] = min(known, timed, key=lambda one: one.best.wall_s)
        found = {
            column: f"{seconds(timed.best.wall_s)}, {timed.peak_bytes / 1e6:.0f} MB"
            for column, timed in fastest.items()
        }
        label = f"{number(question)}. {QUESTIONS[question]}: {largest.contest.label}"
        rows.append((label, *(found.get(column, "-") for column in _COLUMNS)))
    return table(("question and file", *_COLUMNS), rows)


def _column(one: Contestant) -> str:
    if one.kind == "nsan" and "nsys" in one.name:
        return "nsan in nsys"
    if one.kind == "nsan":
        return "nsan, again" if one.first else "nsan, first time"
    return {"numpy": "sqlite3 + NumPy", "scan": "unit of ratios"}.get(one.kind, one.kind)


def defects(shown: Sequence[Shown], versions: Sequence[str]) -> list[str]:
    """Write the table of known defects."""
    head = ("what", "the file holds", "SQL", *(f"nsys {v}" for v in versions), "nsan")
    rows = [
        (one.case.what, one.case.holds, one.truth, *(one.by_version[v] for v in versions), one.ours)
        for one in shown
    ]
    return table(head, rows)


_METHOD = """\
Each row is one command in a process of its own, started anew, on the same file, which is in the page cache. Wall is the best of
the runs ({rounds}, or one where a run takes more than {slow:.0f} s), spread how much longer the longest took; contestants take turns, so
that a busy moment of the machine hits all. CPU is user and system time of the best run with its children; peak memory is the highest
of all runs, of the whole process tree (sampled every 10 ms, and what the kernel keeps of the largest process). Ratio is wall over
that of the first row of the table. Starting Python is part of all rows in Python: `python -c pass` takes {bare} here.

What is true is what plain SQL says of the same file, run by Python's sqlite3; where SQL has no short way, a plain Python loop. Agreement
counts figures: each number of each row that the answer has. What an answer leaves out is listed, and is no error. "First time" is nsan
on an export it never saw: it imports it, which is question {parquet}; "again" is any later command on it, from its store.

The vendor's report scripts are run by this Python, as their runner does with its own; the runner's start comes on top. Their tables by
address are added up to VA blocks to be compared, and an empty cell of sizes and counts is read as 0. NumPy, pandas and the loops are
written for these files: one process on one GPU at a time, and kernels that do not overlap; nsan answers for all of them apart, and
reads every version of the export. Files that are made have {made} and are drawn from a seed."""


def document(
    facts: Sequence[tuple[str, str]],
    method: dict[str, str | float],
    outcomes: Sequence[Outcome],
    shown: Sequence[Shown],
    left_out: Sequence[str],
) -> str:
    """Write the whole document."""
    lines = [
        "# nsan beside its peers", "",
        "Written by `make results`; not by hand. Two noisy cores: trust ratios, not seconds.", "",
        *table(("", ""), facts), "",
        "## In short", "",
        "The largest file of each question: wall time of the fastest way of each kind, and its peak memory.",
        "", *in_short(outcomes), "",
        "## How it is measured", "", _METHOD.format(parquet=number("parquet"), **method), "",
        "## Who answers what", "",
        "Over all files below. In part: some figures are not there. Differs: a figure is not that of SQL. "
        "Nothing: no answer came. A dash: not asked, for want of a way.", "",
        *matrix(outcomes), "",
    ]  # fmt: skip
    for question in QUESTIONS:
        here = [outcome for outcome in outcomes if outcome.contest.question == question]
        if here:
            lines += [f"## {number(question)}. {QUESTIONS[question]}", ""]
            for outcome in here:
                lines += _contest(outcome)
    if shown:
        versions = list(shown[0].by_version)
        lines += ["## Where the vendor's reports are wrong or silent", "", _DEFECTS, ""]
        lines += [*defects(shown, versions), ""]
    lines += ["## Left out", "", *([f"- {one}." for one in left_out] or ["Nothing."]), ""]
    return "\n".join(lines)


_DEFECTS = """\
Small exports that show one thing each; on most files the vendor's figures are right, as above. An address that moved much for long is
the one whose throughput is lost, and the rows are ordered by it."""
