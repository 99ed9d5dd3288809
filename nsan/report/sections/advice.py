"""Section "advice" of a report: what would help, each with its evidence, and what nobody needs to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from nsan.advice_text import gain_words, kind_words, number_words
from nsan.advising import NOTHING
from nsan.analysis.advisor.facts import is_modelled, span_ns
from nsan.analysis.catalog import find
from nsan.report.blocks import Block, Code, Heading, Point, Points, Text
from nsan.report.shown import Blocks
from nsan.report.tables import as_table
from nsan.units import counted

if TYPE_CHECKING:
    from nsan.analysis.advisor.advice import Advice, Rows, Silent
    from nsan.report.report import Report

_MOST: Final = 6
"""Advice that is shown in full; `nsan advise` has all."""

_MOST_ALIKE: Final = 3
"""And of one rule: the fourth kernel says little that the first three do not."""

_MOST_ROWS: Final = 5


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    if report.is_empty and not report.is_part:
        return Blocks([Text("No advice: nothing of Unified Memory was recorded.", "note")])
    found = report.advised
    asked = {rows.analysis for advice in found.advice for rows in advice.rows}
    report.rests_on(asked)
    if found.is_nothing:
        return Blocks([Text(f"{NOTHING[0].upper()}{NOTHING[1:]}.", "note")])
    worth = [each for each in found.advice if each.level != "info"]
    shown = _chosen(worth)
    return Blocks(
        [
            *(() if worth else [Text(_clean(found.silent))]),
            *(block for each in shown for block in _told(report, each)),
            *_more(len(worth) - len(shown), report),
            *_not_needed(found.silent, is_clean=not worth),
        ]
    )


def _clean(silent: tuple[Silent, ...]) -> str:
    is_known = all(each.is_known for each in silent)
    return f"Nothing to do{'' if is_known else ', as far as is known'}. Why:"


def _chosen(worth: Sequence[Advice]) -> list[Advice]:
    """Choose what is told in full."""
    shown: list[Advice] = []
    alike: Counter[str] = Counter()
    for each in worth:
        alike[each.rule] += 1
        if alike[each.rule] <= _MOST_ALIKE:
            shown.append(each)
    return shown[:_MOST]


def _told(report: Report, advice: Advice) -> Iterator[Block]:
    yield Heading(f"{advice.title} ({advice.level})")
    yield Text(advice.finding)
    yield Text(advice.remedy)
    yield Code(advice.calls)
    yield Points(tuple(_points(report, advice)))
    if advice.gate:
        yield Code((f"nsan compare BEFORE AFTER --fail-on '{advice.gate}'",))
    for rows in advice.rows:
        yield from _rows(report, rows)


def _points(report: Report, advice: Advice) -> Iterator[Point]:
    gain = advice.gain
    if gain is not None:
        said = f"{gain_words(gain, span_ns(report))}: {gain.how}."
        yield Point("What it may save:", said, kind_words(gain, is_modelled=is_modelled(report)))
    for kind in dict.fromkeys(each.kind for each in advice.numbers):
        words = "; ".join(number_words(each) for each in advice.numbers if each.kind == kind)
        yield Point("What it stands on:", f"{words}.", kind)
    yield Point("What would show that it worked:", advice.check)


def _rows(report: Report, rows: Rows) -> Iterator[Block]:
    if not rows.analysis or not rows.frame.height:
        return
    analysis = find(rows.analysis)
    kinds = report.kinds(rows.analysis, rows.frame)
    yield as_table(analysis, rows.frame, kinds, columns=rows.frame.columns, rows=_MOST_ROWS)


def _more(n: int, report: Report) -> Iterator[Block]:
    if n > 0:
        more = counted(n, "more", "more")
        yield Text(f"{more}: `nsan advise {report.trace.info.source}`.", "note")


def _not_needed(silent: tuple[Silent, ...], *, is_clean: bool) -> Iterator[Block]:
    """Say why rules are silent: all of them where nothing is to be done, else those that lack rows."""
    told = [each for each in silent if each.is_known]
    unknown = [each for each in silent if not each.is_known]
    if is_clean and told:
        yield Points(tuple(Point("", each) for each in dict.fromkeys(s.reason for s in told)))
    if unknown:
        reasons = dict.fromkeys(each.reason for each in unknown)
        yield Text("Not known:")
        yield Points(tuple(Point("", each) for each in reasons))
