"""Section "verdict" of a report: what moved, what it cost, why, where, and how far to trust that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsan.report.blocks import Text
from nsan.report.evidence import gather
from nsan.report.judging import grounds, verdict
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
    evidence = gather(report)
    report.rests_on(grounds(evidence))
    return Blocks([verdict(evidence)])
