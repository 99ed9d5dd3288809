"""What `nsan advise` says to people: each advice with what speaks for it, or why there is nothing to do."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from nsan.advice_text import gain_words, kind_words, number_words
from nsan.advising import NOTHING
from nsan.analysis.advisor.facts import is_modelled
from nsan.analysis.catalog import find
from nsan.info import MODEL_KIND, MODELLED
from nsan.tabular.columns import fields_of, telling, zero_columns
from nsan.tabular.text import Field, dash, hidden_fields, indented, name, table
from nsan.text import safe, shortened
from nsan.units import counted, format_time

if TYPE_CHECKING:
    import polars as pl

    from nsan.advice_document import Answer
    from nsan.analysis.advisor.advice import Advice, Rows, Silent

_LABEL: Final = 9
"""Room for the word that a paragraph begins with."""

_MOST_ROWS: Final = 5
_LONGEST_CELL: Final = 60
"""Characters of a name in a table, or half a line where that is less: --json has all of it."""

_INDENT: Final = "   "


@dataclass(frozen=True)
class Look:
    """How a text is written.

    Attributes
    ----------
    width : int
        Characters of a line; lines of code and tables may be longer.
    markdown : bool
        As Markdown.
    verbose : bool
        Also numbers, rows, and each reason of rules that found nothing.
    rows : int, optional
        At most so many rows of a table.
    paint : callable
        Colours the word for a level.
    """

    width: int = 100
    markdown: bool = False
    verbose: bool = False
    rows: int | None = None
    paint: Callable[[str], str] = str

    def name(self, text: object) -> str:
        """Write text that may hold names from a trace."""
        return name(text, markdown=self.markdown)

    def wrapped(self, text: str, indent: str = "", first: str | None = None) -> str:
        """Break a sentence into lines; Markdown needs none."""
        first = indent if first is None else first
        if self.markdown:
            return first + self.name(text)
        return textwrap.fill(
            self.name(text),
            max(self.width, len(indent) + 20),
            initial_indent=first,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )


def text_of(answer: Answer, look: Look = Look()) -> str:
    """Write advice for people.

    Parameters
    ----------
    answer : Answer
        What is known.
    look : Look
        How it is written.

    Returns
    -------
    str
        The head, each advice, the most valuable first, and what rules without advice say.
    """
    found = answer.found
    worth = [(i, each) for i, each in enumerate(found.advice) if each.level != "info"]
    aside = [(i, each) for i, each in enumerate(found.advice) if each.level == "info"]
    parts = [
        _head(answer, len(worth), look),
        *(_told(answer, i, each, look) for i, each in worth),
        *_aside(answer, aside, look),
        *(() if found.is_nothing else _silent(found.silent, look, is_clean=found.is_clean)),
        *_notes(answer, look),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(answer: Answer, n: int, look: Look) -> str:
    source = look.name(answer.asked.summary["source"])
    is_known = all(each.is_known for each in answer.found.silent)
    nothing = "nothing to do" if is_known else "nothing to do, as far as is known"
    nothing = NOTHING if answer.found.is_nothing else nothing
    said = counted(n, "thing to change", "things to change") if n else nothing
    title = f"{'# ' * look.markdown}{source}: {said}"
    lines = []
    if answer.asked.summary["source_kind"] == MODEL_KIND:
        lines.append(f"The trace was {MODELLED}: every row is the model's, and so is every figure.")
    if answer.asked.summary["duration_ns"] is not None:
        part = "The part that was asked for" if answer.asked.is_part else "The run"
        lines.append(
            f"{part} takes {format_time(answer.span_ns)} from its first event to its last."
        )
    elif answer.span_ns:
        took = format_time(answer.span_ns)
        lines.append(
            f"Kernels take {took} in all: start times are too coarse for the time of the run."
        )
    gap = "\n\n" if look.markdown else "\n"
    return gap.join([title, *(look.wrapped(line, "  " * (not look.markdown)) for line in lines)])


# One advice ---------------------------------------------------------------------------------------


def _told(answer: Answer, place: int, advice: Advice, look: Look) -> str:
    """Write one advice: what to do, what it may gain, what was found, how, and what shows that it worked."""
    parts = [
        _title(place, advice, look),
        _paragraph("Gain", _gains(answer, place, advice), look),
        _paragraph("Found", [advice.finding], look),
        _paragraph("Do", [advice.remedy], look),
        _code(advice.calls, look),
        _paragraph("Check", [advice.check], look),
        _code(
            [f"nsan compare BEFORE AFTER --fail-on '{advice.gate}'"] if advice.gate else [], look
        ),
    ]
    if look.verbose:
        parts += [_numbers(advice, look), *(_rows(answer, each, look) for each in advice.rows)]
    return ("\n\n" if look.markdown else "\n").join(part for part in parts if part)


def _title(place: int, advice: Advice, look: Look) -> str:
    level = advice.level or "info"
    if look.markdown:
        return f"## {place + 1}. {look.name(advice.title)} ({level})"
    number = f"{place + 1}. "
    plain = look.wrapped(f"{level}: {advice.title}", " " * len(number), number)
    return plain.replace(f"{number}{level}", f"{number}{look.paint(level)}", 1)


def _paragraph(label: str, sentences: Iterable[str], look: Look) -> str:
    """Write what belongs under one word, each sentence on a line of its own."""
    said = [each for each in sentences if each]
    if look.markdown:
        return "\n".join(f"- **{label}**: {look.name(each)}" for each in said)
    indent = _INDENT + " " * _LABEL
    labels = [f"{_INDENT}{label:<{_LABEL}}", *[indent] * len(said)]
    return "\n".join(
        look.wrapped(each, indent, first) for each, first in zip(said, labels, strict=False)
    )


def _gains(answer: Answer, place: int, advice: Advice) -> Iterator[str]:
    tried = answer.tried(place)
    for gain in (advice.gain, tried.gain):
        if gain is not None:
            kind = kind_words(gain, is_modelled=is_modelled(answer.asked))
            yield f"{gain_words(gain, answer.span_ns)}, {kind}: {gain.how}."
    if tried.reason:
        yield f"not tried in the driver model. {tried.reason}"


def _code(lines: Iterable[str], look: Look) -> str:
    """Write lines that somebody copies: never broken, and harmless."""
    shown = [safe(line) for line in lines]
    if not shown:
        return ""
    if look.markdown:
        longest = max((len(run) for line in shown for run in re.findall("`+", line)), default=0)
        fence = "`" * max(3, longest + 1)
        return "\n".join([f"{fence}text", *shown, fence])
    return "\n".join(f"{_INDENT}{' ' * _LABEL}  {line}" for line in shown)


def _numbers(advice: Advice, look: Look) -> str:
    return _paragraph("Numbers", [f"{number_words(n)} ({n.kind})" for n in advice.numbers], look)


def _rows(answer: Answer, rows: Rows, look: Look) -> str:
    """Write the rows that a finding stands on."""
    found = rows.frame.head(look.rows or _MOST_ROWS)
    if not found.height:
        return ""
    most = _LONGEST_CELL if look.markdown else min(_LONGEST_CELL, look.width // 2)
    fields, plain = _fields(rows, found, most), found.to_dicts()
    room = look.width - len(_INDENT)
    # The first column says what a row is about: it stays.
    hidden = [] if look.markdown else hidden_fields(plain, fields, room)
    hidden = [field for field in hidden if field is not fields[0]]
    shown = [field for field in fields if field not in hidden]
    kinds = dict.fromkeys(answer.kinds(rows).get(field.key, "recorded") for field in shown)
    options = "".join(f" --set {key}={value}" for key, value in rows.options.items())
    of = f"Rows of {rows.analysis}{options}" if rows.analysis else "Rows of the trace"
    left = rows.frame.height - found.height
    more = [f"{counted(left, 'more row')} (--rows N)"] if left else []
    more += [f"{counted(len(hidden), 'more column')} (--json)"] if hidden else []
    parts = [
        f"{look.name(of)} ({', '.join(kinds)}):",
        table(plain, shown, markdown=look.markdown),
        f"({'; '.join(more)})" if more else "",
    ]
    if look.markdown:
        return "\n\n".join(part for part in parts if part)
    return indented("\n".join(part for part in parts if part), _INDENT)


def _fields(rows: Rows, found: pl.DataFrame, most: int) -> list[Field]:
    """Choose the columns that say something, with their headings; no value is longer than so much."""
    return [replace(field, write=_cut(field.write, most)) for field in _telling(rows, found)]


def _cut(write: Callable[[object], str], most: int) -> Callable[[object], str]:
    return lambda value: shortened(write(value), most)


def _telling(rows: Rows, found: pl.DataFrame) -> list[Field]:
    if not rows.analysis:
        return [Field(column, column, dash) for column in found.columns]
    columns = [c for c in find(rows.analysis).result.columns if c.name in found.columns]
    zero = zero_columns(columns, found)
    return fields_of([column for column in telling(columns, found) if column not in zero])


# What is no advice --------------------------------------------------------------------------------


def _aside(answer: Answer, aside: list[tuple[int, Advice]], look: Look) -> Iterator[str]:
    """Write what is worth knowing, and needs nothing to be done."""
    if not aside:
        return
    if look.verbose:
        yield from (_told(answer, i, each, look) for i, each in aside)
        return
    head = f"{'## ' * look.markdown}Good to know (-v says more)"
    lines = [_point(f"{each.title}. {each.finding}", look) for _, each in aside]
    yield "\n".join([head, *([""] if look.markdown else []), *lines])


def _point(text: str, look: Look) -> str:
    return look.wrapped(text, "    ", "  - ") if not look.markdown else look.wrapped(text, "", "- ")


def _silent(silent: Iterable[Silent], look: Look, *, is_clean: bool) -> Iterator[str]:
    """Say why rules found nothing; what was not recorded apart, and always."""
    known = _grouped(each for each in silent if each.is_known)
    unknown = _grouped(each for each in silent if not each.is_known)
    if known and (is_clean or look.verbose):
        title = "Why there is nothing to do" if is_clean else "What needs nothing to be done"
        yield _list(title, known, look)
    elif known:
        n = sum(map(len, known.values()))
        yield look.wrapped(f"{counted(n, 'other rule')} found nothing to advise: -v says why.")
    if unknown:
        yield _list("Not known", unknown, look)


def _grouped(silent: Iterable[Silent]) -> dict[str, list[str]]:
    """Collect the rules that give the same reason."""
    groups: dict[str, list[str]] = {}
    for each in silent:
        groups.setdefault(each.reason, []).append(each.rule)
    return groups


def _list(title: str, groups: dict[str, list[str]], look: Look) -> str:
    lines = [
        _point(f"{reason} ({', '.join(rules)})" if look.verbose else reason, look)
        for reason, rules in groups.items()
    ]
    head = f"## {title}\n" if look.markdown else f"{title}:"
    return "\n".join([head, *lines])


def _notes(answer: Answer, look: Look) -> Iterator[str]:
    """Say what gains are worth."""
    tried = answer.what_if
    bounds = [e.gain for e in answer.found.advice if e.level != "info" and e.gain is not None]
    if len(bounds) > 1:
        yield look.wrapped(
            "Each gain is of that advice alone; what two of them save may be the same time, so gains do not add up."
        )
    if tried is None:
        return
    if tried.reason:
        yield look.wrapped(f"Not tried in the driver model: {tried.reason}")
    elif any(each.gain is not None for each in tried.tried):
        yield look.wrapped(_model_note(tried.seeds, tried.errors))


def _model_note(seeds: tuple[int, ...], errors: tuple[str, ...]) -> str:
    named = ", ".join(map(str, seeds))
    return (
        f"Modelled: the driver model ran the program without and with each remedy under the seeds {named}. The "
        "error after +- holds one more run of the model in 19 of 20 cases; it says nothing of how far the model "
        f"is from a real machine. Of that its profiles state: {'; '.join(errors)}. More runs (--runs N) make the "
        "error smaller."
    )
