"""Section "verdict" of a report: what moved, what it cost, why, where, and how far to trust that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsan.report.blocks import Text
from nsan.report.evidence import gather, gather_totals
from nsan.report.judging import grounds, verdict, verdict_of_totals
from nsan.report.shown import Blocks

if TYPE_CHECKING:
    from nsan.report.report import Report


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    if report.is_empty:
        part = "this part of the capture" if report.is_part else "this capture"
        said = f"No verdict: {part} holds nothing of Unified Memory, so there is nothing to judge."
        if not report.is_part:
            said += " The sections that such events fill are left out."
        return Blocks([Text(said, "note")])
    evidence, left_out = report.attempt(lambda: gather(report), None)
    if evidence is None:
        report.rests_on(())
        return Blocks([verdict_of_totals(gather_totals(report)), *left_out])
    report.rests_on(grounds(evidence))
    return Blocks([verdict(evidence)])
