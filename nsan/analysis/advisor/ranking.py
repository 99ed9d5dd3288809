"""What comes first: levels from gains, and advice that another advice makes moot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from nsan.analysis.advisor.advice import LEVELS, Advice, Level
from nsan.analysis.advisor.rules import Rule

LEAST: Final[dict[Level, float]] = {"high": 0.1, "medium": 0.03, "low": 0.01}
"""Share of the time of a run from which on a gain is of a level: choices of ours."""

_Place = tuple[int | None, int | None, str]

BEFORE_ALL: Final = frozenset({"lost_rows"})
"""Rules whose advice comes first: while it stands no other figure can be trusted."""


def level_of(advice: Advice, span_ns: int) -> Level:
    """Say how much an advice is worth.

    Parameters
    ----------
    advice : Advice
        With a gain or a level.
    span_ns : int
        Time of the run.

    Returns
    -------
    str
        Its own level, or by its gain's share of the run; under a condition "medium" at most.
    """
    if advice.level is not None:
        return advice.level
    share = advice.gain.ns / span_ns if advice.gain is not None and span_ns > 0 else 0.0
    level: Level = next((level for level, least in LEAST.items() if share >= least), "info")
    return "medium" if advice.is_conditional and level == "high" else level


def ranked(found: Iterable[Advice], rules: Sequence[Rule], span_ns: int) -> list[Advice]:
    """Put advice in order, the most valuable first, without what other advice makes moot.

    Parameters
    ----------
    found : iterable of Advice
        What rules advise.
    rules : sequence of Rule
        The rules.
    span_ns : int
        Time of the run.

    Returns
    -------
    list of Advice
        Each with its level: by level, those without a condition first, then by gain, then in the order of the rules.
    """
    order = {rule.name: i for i, rule in enumerate(rules)}
    yields = {rule.name: rule.yields_to for rule in rules}
    kept = [replace(each, level=level_of(each, span_ns)) for each in found]
    sure = [each for each in kept if each.level != "info" and not each.is_conditional]
    stand = {(each.rule, place) for each in sure for place in _places(each)}
    kept = [each for each in kept if not _is_moot(each, stand, yields.get(each.rule, ()))]
    return sorted(
        kept,
        key=lambda each: (
            each.rule not in BEFORE_ALL,
            LEVELS.index(each.level or "info"),
            each.is_conditional,
            -(each.gain.ns if each.gain else 0),
            order.get(each.rule, len(order)),
        ),
    )


def _is_moot(advice: Advice, stand: set[tuple[str, _Place]], yields_to: Sequence[str]) -> bool:
    """Say whether other advice stands for everything that this one is about."""
    return all(any((rule, place) in stand for rule in yields_to) for place in _places(advice))


def _places(advice: Advice) -> set[_Place]:
    """Tell targets apart: by process and address, or by name."""
    return {(each.pid, each.va, each.allocation) for each in advice.targets or (advice.target,)}


def named(advice: Advice, n_processes: int) -> Advice:
    """Say in the title which process an advice is about, where a trace has several.

    Parameters
    ----------
    advice : Advice
        Of a rule.
    n_processes : int
        Processes of the trace.

    Returns
    -------
    Advice
        The same, or with another title.
    """
    pid = advice.target.pid
    if n_processes < 2 or pid is None:
        return advice
    return replace(advice, title=f"{advice.title} (process {pid})")
