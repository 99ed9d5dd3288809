"""The rules, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from nsan.analysis.advisor.advice import Said
from nsan.analysis.advisor.facts import Facts
from nsan.analysis.advisor.rules import prefetching


@dataclass(frozen=True)
class Rule:
    """A rule: what it asks, and the function that answers.

    Attributes
    ----------
    name : str
        As an advice names it.
    question : str
        What it looks for, as a question.
    ask : callable
        Takes facts; gives advice, or why there is none.
    yields_to : tuple of str
        Rules whose advice for the same allocation makes this one moot: with ping-pong, a prefetch is no remedy.
    """

    name: str
    question: str
    ask: Callable[[Facts], Iterator[Said]]
    yields_to: tuple[str, ...] = ()


RULES: Final = (
    Rule(
        prefetching.BEFORE_USE,
        "Does a kernel wait for page faults on memory that could have been there before?",
        prefetching.before_use,
        yields_to=("ping_pong", "capacity_thrash", "first_touch_side", "read_mostly"),
    ),
)
"""Every rule."""
