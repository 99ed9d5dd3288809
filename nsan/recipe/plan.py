"""What a recipe is made of, and what it makes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import polars as pl

from nsan.analysis.result import Result, recorded
from nsan.contract import has_um_data
from nsan.errors import listed
from nsan.fleet.member import Member
from nsan.info import MODEL_KIND
from nsan.recipe.jobs import Job, Mapper
from nsan.units import counted

ABOUT: Final = "about.json"
"""The file that says of a folder of results what it is."""

_MOST_WARNINGS: Final = 10

NAMED: Final = (
    recorded("run", pl.String, "label", "Which run the report belongs to."),
    recorded("rank", pl.Int64, "id", "Its place in the run."),
    recorded("source", pl.String, "text", "Name of the report."),
)
"""The columns that name the report of a row."""

Options = tuple[tuple[str, Mapping[str, Any]], ...]


@dataclass(frozen=True)
class Reduced:
    """What a recipe found in all its reports together.

    Attributes
    ----------
    tables : mapping of str to DataFrame
        By name, as in :attr:`Plan.tables`.
    n_reports : int
        Reports that could be read.
    notes : sequence of str
        What a reader should know.
    is_modelled : bool
        Whether any report was written by nsan's driver model.
    nothing : str
        Why there is nothing to write; empty if there is something.
    """

    tables: Mapping[str, pl.DataFrame]
    n_reports: int
    notes: Sequence[str] = ()
    is_modelled: bool = False
    nothing: str = ""


@dataclass(frozen=True)
class Plan:
    """A recipe, without the framework that runs it.

    Attributes
    ----------
    name : str
        As it is called.
    reduce : callable
        Takes what maps, the jobs and the arguments; gives a :class:`Reduced`.
    tables : mapping of str to Result
        The tables that it writes, by name of the file.
    options : tuple of str
        Options of the framework, besides those of every recipe.
    own : tuple of (flag, settings)
        Options of its own.
    """

    name: str
    reduce: Callable[[Mapper, Sequence[Job], argparse.Namespace], Reduced]
    tables: Mapping[str, Result]
    options: tuple[str, ...] = ()
    own: Options = field(default=())


def is_modelled(members: Sequence[Member]) -> bool:
    """Say whether nsan's driver model wrote any of the reports: then no figure of all is a recorded one."""
    return any(map(_is_modelled, members))


def _is_modelled(member: Member) -> bool:
    return bool(member.info["kind"] == MODEL_KIND)


def notes_on(members: Sequence[Member]) -> list[str]:
    """Say what to beware of in reports, of any recipe.

    Parameters
    ----------
    members : sequence of Member
        The reports that could be read.

    Returns
    -------
    list of str
        Which hold no Unified Memory data, how many are modelled, and what their reading warned of.
    """
    modelled = sum(_is_modelled(m) for m in members)
    notes = without_um_data(members)
    if modelled:
        n = len(members)
        some = f"{modelled} of {n} reports" if modelled < n else f"all {n} reports"
        which = "the report" if n == 1 else some
        notes.append(f"Modelled, not recorded: {which}, written by nsan's driver model.")
    return [*notes, *warnings_on(members)]


def warnings_on(members: Sequence[Member]) -> list[str]:
    """Say what the reading of reports warned of, as that an export beside one was not read.

    Parameters
    ----------
    members : sequence of Member
        The reports that could be read.

    Returns
    -------
    list of str
        A sentence for each, of the first ten.
    """
    told = [f"{m.source}: {warning}" for m in members for warning in m.info["warnings"]]
    more = [f"{counted(len(told) - _MOST_WARNINGS, 'more warning')}: `nsan info REPORT`."]
    return [*told[:_MOST_WARNINGS], *more * (len(told) > _MOST_WARNINGS)]


def without_um_data(members: Sequence[Member]) -> list[str]:
    """Name the reports that hold no Unified Memory data, where others do.

    Parameters
    ----------
    members : sequence of Member
        The reports that could be read.

    Returns
    -------
    list of str
        A sentence, or nothing.
    """
    names = [m.source for m in members if not has_um_data(m.info, m.totals)]
    return [f"No Unified Memory data is in {listed(names)}."] if names else []


_KINDS: Final = {
    "migrations": "Migrations",
    "gpu_faults": "GPU page faults",
    "cpu_faults": "CPU page faults",
}


def no_um_data(members: Sequence[Member]) -> str:
    """Say that no report holds Unified Memory data, and what would record it.

    Parameters
    ----------
    members : sequence of Member
        The reports that could be read.

    Returns
    -------
    str
        Why, and the switches that were off.
    """
    switches: dict[str, list[str]] = {}
    for member in members:
        for kind, words in _KINDS.items():
            about = member.info["capture"].get(kind) or {}
            if about.get("answer") != "recorded" and about.get("switch"):
                switches.setdefault(about["switch"], [])
                if words not in switches[about["switch"]]:
                    switches[about["switch"]].append(words)
    which = "The report holds" if len(members) == 1 else f"None of the {len(members)} reports holds"
    said = f"{which} {'no ' if len(members) == 1 else ''}Unified Memory data: no migration, no page fault, no managed allocation."
    if not switches:
        return f"{said} All of it was recorded: the programs used none."
    missing = ", ".join(" and ".join(words) for words in switches.values())
    return f"{said} {missing} were not recorded: profile again with `nsys profile {' '.join(switches)} ...`."
