"""What a fleet is made of: reports that could be read, and those that could not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Member:
    """One report of a fleet.

    Attributes
    ----------
    run : str
        Which run it belongs to: reports of one run stand side by side.
    rank : int or None
        Its place in the run; None where the report names none.
    source : str
        Name of the report, relative to the folder that was given.
    info : mapping
        As :meth:`nsan.TraceInfo.to_dict` writes it.
    totals : mapping
        As :func:`nsan.totals.totals` gives them.
    """

    run: str
    rank: int | None
    source: str
    info: Mapping[str, Any]
    totals: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """One report that could not be read.

    Attributes
    ----------
    run : str
        As of a member.
    rank : int or None
        As of a member.
    source : str
        Name of the report, relative to the folder that was given.
    reason : str
        One line: why, and what helps.
    """

    run: str
    rank: int | None
    source: str
    reason: str
