"""What stands against a comparison: a finding, and the sides that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from nsan.comparing.profile import Profile

Level = Literal["refuse", "warn"]
Bars = Literal["none", "times", "rows", "machine", "all"]
"""What gets no verdict: nothing; times; what counts rows of Unified Memory; all but what the program alone
decides; everything."""


@dataclass(frozen=True)
class Finding:
    """A reason for which conditions cannot be compared, or only with care.

    Attributes
    ----------
    id : str
        What it is about, in a word that stays.
    level : str
        "refuse" or "warn".
    about : tuple of str
        Labels of the conditions.
    text : str
        What is found, and what to do.
    bars : str
        What gets no verdict: "none", "times", "rows", "machine" or "all".
    """

    id: str
    level: Level
    about: tuple[str, ...]
    text: str
    bars: Bars = "none"


class Side(NamedTuple):
    """A condition: its label, the profiles of its runs, and its name for people."""

    label: str
    runs: Sequence[Profile]
    name: str = ""
