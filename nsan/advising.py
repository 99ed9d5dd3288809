"""Advice for a trace: every rule asked, what they say put in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.analysis.advisor.advice import Advice, Silent
from nsan.analysis.advisor.facts import span_ns
from nsan.analysis.advisor.ranking import named, ranked
from nsan.analysis.advisor.rules import RULES, Rule
from nsan.asking import Asked
from nsan.errors import OverBudgetError

if TYPE_CHECKING:
    from nsan.analysis.advisor.facts import Facts

NOTHING: Final = "no event is in the part that was asked for"
"""All that can be said of such a part."""

_NOTHING: Final = f"{NOTHING[0].upper()}{NOTHING[1:]}."


@dataclass(frozen=True)
class Advised:
    """What the rules say of a trace.

    Attributes
    ----------
    advice : tuple of Advice
        The most valuable first, each with its level.
    silent : tuple of Silent
        Rules without advice, and why.
    """

    advice: tuple[Advice, ...]
    silent: tuple[Silent, ...]

    @property
    def is_clean(self) -> bool:
        """Whether nothing has to be done."""
        return all(each.level == "info" for each in self.advice)

    @property
    def is_nothing(self) -> bool:
        """Whether no rule could look at anything, as no event is in the part that was asked for."""
        return bool(self.silent) and all(each.reason == _NOTHING for each in self.silent)


def advise(
    trace: str | Path,
    snapshot: str | Path | None = None,
    *,
    filters: Mapping[str, Any] | None = None,
) -> Advised:
    """Say what would help a program.

    Parameters
    ----------
    trace : str or Path
        Report or export of nsys, log of nvprof, or store of nsan.
    snapshot : str or Path, optional
        Memory snapshot of PyTorch that the same run wrote; one beside the trace is taken by itself.
    filters : mapping, optional
        Of :meth:`nsan.Trace.filter`.

    Returns
    -------
    Advised
        Advice with its evidence, and why other rules are silent.

    Examples
    --------
    >>> import nsan
    >>> found = nsan.advise("sample_data/model/ping_pong/ping_pong.sqlite")  # doctest: +SKIP
    >>> found.advice[0].title  # doctest: +SKIP
    """
    return advised(Asked(trace, snapshot, filters=filters))


def advised(facts: Facts) -> Advised:
    """Ask every rule.

    Parameters
    ----------
    facts : Facts
        A trace that can be asked, as :class:`nsan.asking.Asked`.

    Returns
    -------
    Advised
        What they say.
    """
    if facts.is_part and not _has_events(facts):
        return Advised((), tuple(Silent(each.name, _NOTHING, is_known=False) for each in RULES))
    said = [each for rule in RULES for each in _said(rule, facts)]
    n_processes = len(facts.summary["processes"])
    advice = [named(each, n_processes) for each in said if isinstance(each, Advice)]
    silent = [each for each in said if isinstance(each, Silent)]
    return Advised(tuple(ranked(advice, RULES, span_ns(facts))), tuple(silent))


def _said(rule: Rule, facts: Facts) -> list[Advice | Silent]:
    """Ask a rule; one that would need too much memory is silent, and says so."""
    try:
        return list(rule.ask(facts))
    except OverBudgetError as error:
        return [Silent(rule.name, str(error), is_known=False)]


def _has_events(facts: Facts) -> bool:
    """Say whether anything is in the part of a capture that was asked for."""
    summary = facts.summary
    return summary["first_ns"] is not None or bool(summary["kernels"]["n"])
