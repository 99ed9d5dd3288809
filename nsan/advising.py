"""Advice for a trace: every rule asked, what they say put in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsan.analysis.advisor.advice import Advice, Silent
from nsan.analysis.advisor.facts import span_ns
from nsan.analysis.advisor.ranking import ranked
from nsan.analysis.advisor.rules import RULES
from nsan.asking import Asked

if TYPE_CHECKING:
    from nsan.analysis.advisor.facts import Facts


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
    said = [each for rule in RULES for each in rule.ask(facts)]
    advice = [each for each in said if isinstance(each, Advice)]
    silent = [each for each in said if isinstance(each, Silent)]
    return Advised(tuple(ranked(advice, RULES, span_ns(facts))), tuple(silent))
