"""Which conditions can be compared: what forbids it, what only makes it doubtful, and of which figures.

A finding refuses a comparison, or warns. Either may bar figures: those are shown, but get no verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from nsan.analysis.compare.tables import BASE
from nsan.comparing.checks import of_one, of_two
from nsan.errors import NsanError
from nsan.text import shortened

if TYPE_CHECKING:
    from nsan.comparing.document import Comparison
    from nsan.comparing.figures import PlaceFigure, RunFigure
    from nsan.comparing.findings import Bars, Finding, Side

    Compared = RunFigure | PlaceFigure

_OF_PROGRAM: Final = ("kernels.n", "managed.allocations", "managed.bytes")
_OF_UM: Final = {"gpu_faults", "cpu_faults", "migrations"}

_WORDS: Final = {
    "empty": "an empty capture",
    "lost_rows": "lost rows",
    "coarse_times": "coarse times",
    "switches": "other switches",
    "program": "another program",
    "model": "model against machine",
    "gpu": "another GPU",
    "compute_capability": "another GPU",
    "platform": "another platform",
    "profiler": "another profiler",
}
"""What is said of a figure that gets no verdict, by finding."""


class NotComparableError(NsanError):
    """Conditions cannot be compared; ``findings`` holds each reason, ``comparison`` the document without figures."""

    def __init__(self, findings: Sequence[Finding], exit_code: int = 1) -> None:
        self.findings, self.exit_code = tuple(findings), exit_code
        self.comparison: Comparison | None = None
        reasons = "\n".join(f"  {shortened(each.text, 600)}" for each in findings)
        super().__init__(
            f"These are not comparable:\n{reasons}\nTo see the figures all the same, without a verdict where this "
            "forbids one: --anyway (in Python: anyway=True)."
        )


def comparability(sides: Sequence[Side]) -> list[Finding]:
    """Look for what stands against a comparison of conditions with the first.

    Parameters
    ----------
    sides : sequence of Side
        The conditions, the base first.

    Returns
    -------
    list of Finding
        Refusals first; nothing where all is well.
    """
    found = [finding for side in sides for finding in of_one(side)]
    base, *others = sides
    for other in others:
        found += of_two(base, other)
    return sorted(dict.fromkeys(found), key=lambda finding: finding.level != "refuse")


def refuse(findings: Iterable[Finding], sides: Sequence[Side]) -> None:
    """Refuse a comparison that a finding forbids.

    Parameters
    ----------
    findings : iterable of Finding
        Of :func:`comparability`.
    sides : sequence of Side
        What was compared.

    Raises
    ------
    NotComparableError
        With every reason; its exit code is 3 where no run at all has data of Unified Memory.
    """
    refusals = [each for each in findings if each.level == "refuse"]
    if refusals:
        any_data = any(run.has_um_data for side in sides for run in side.runs)
        raise NotComparableError(refusals, 1 if any_data else 3)


def barred(
    findings: Iterable[Finding], figures: Mapping[str, Compared], labels: Iterable[str]
) -> dict[tuple[str, str], str]:
    """Say which figures of which condition get no verdict, and why.

    Parameters
    ----------
    findings : iterable of Finding
        Of :func:`comparability`.
    figures : mapping
        All figures by name, as :data:`nsan.comparing.figures.FIGURES`.
    labels : iterable of str
        Labels of the conditions that are compared with the base.

    Returns
    -------
    dict
        By condition and figure: the reason.
    """
    others, found = list(labels), dict[tuple[str, str], list[str]]()
    for finding in findings:
        # What is wrong with the base alone is wrong with each comparison.
        about = [label for label in finding.about if label != BASE] or others
        names = [name for name, each in figures.items() if _is_barred(each, finding.bars)]
        for key in ((label, name) for label in about for name in names):
            found.setdefault(key, []).append(_WORDS[finding.id])
    return {
        key: f"not comparable: {', '.join(dict.fromkeys(words))}" for key, words in found.items()
    }


def _is_barred(figure: Compared, bars: Bars) -> bool:
    match bars:
        case "times":
            return figure.unit == "ns"
        case "rows":
            return not _OF_UM.isdisjoint(figure.needs)
        case "machine":
            return figure.name not in _OF_PROGRAM
        case _:
            return bars == "all"
