"""Section "advice" of a report: what would help, each with its evidence, and what nobody needs to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from nsan.advice_text import gain_words, number_words
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

_MOST_ROWS: Final = 5


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    found = report.advised
    asked = {rows.analysis for advice in found.advice for rows in advice.rows}
    report.rests_on(asked)
    worth = [each for each in found.advice if each.level != "info"]
    return Blocks(
        [
            *(() if worth else [Text("Nothing to do, as far as was recorded. Why:")]),
            *(block for each in worth[:_MOST] for block in _told(report, each)),
            *_more(len(worth) - _MOST, report),
            *_not_needed(found.silent, is_clean=not worth),
        ]
    )


def _told(report: Report, advice: Advice) -> Iterator[Block]:
    span_ns = report.summary["duration_ns"] or 0
    yield Heading(f"{advice.title} ({advice.level})")
    yield Text(f"{advice.finding} {advice.remedy}")
    yield Code(advice.calls)
    points = [
        Point("What it stands on:", f"{number_words(each)}.", each.kind) for each in advice.numbers
    ]
    if advice.gain is not None:
        said = f"{gain_words(advice.gain, span_ns)}: {advice.gain.how}."
        points.insert(0, Point("What it may save:", said, advice.gain.kind))
    points.append(Point("What would show that it worked:", advice.check))
    yield Points(tuple(points))
    for rows in advice.rows:
        yield from _rows(report, rows)


def _rows(report: Report, rows: Rows) -> Iterator[Block]:
    if not rows.analysis or not rows.frame.height:
        return
    analysis = find(rows.analysis)
    kinds = report.kinds(rows.analysis, rows.frame)
    yield as_table(analysis, rows.frame, kinds, columns=rows.frame.columns, rows=_MOST_ROWS)


def _more(n: int, report: Report) -> Iterator[Block]:
    if n > 0:
        yield Text(f"{counted(n, 'more')}: `nsan advise {report.trace.info.source}`.", "note")


def _not_needed(silent: tuple[Silent, ...], *, is_clean: bool) -> Iterator[Block]:
    """Say why rules are silent: all of them where nothing is to be done, else those that lack rows."""
    told = [each for each in silent if each.is_known]
    unknown = [each for each in silent if not each.is_known]
    if is_clean and told:
        yield Points(tuple(Point("", each.reason) for each in told))
    for each in unknown:
        yield Text(each.reason, "missing")
