"""What is known about each report of a fleet, without a corpus: each has its store in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsan.errors import InputMissingError, UsageError
from nsan.fleet.corpus import members_of
from nsan.fleet.finding import in_order, reports_in
from nsan.fleet.how import How
from nsan.fleet.member import Failure, Member
from nsan.fleet.running import performed
from nsan.fleet.task import gather_task
from nsan.io.corpus_place import is_corpus

__all__ = ["Gathered", "How", "gather"]


@dataclass(frozen=True)
class Gathered:
    """The reports of a fleet.

    Attributes
    ----------
    members : tuple of Member
        Those that could be read, by run, rank and name.
    failures : tuple of Failure
        Those that could not, in the same order.
    """

    members: tuple[Member, ...]
    failures: tuple[Failure, ...]


def gather(
    paths: Sequence[Path], *, how: How | None = None, tell: Callable[[str], None] | None = None
) -> Gathered:
    """Find out what is known about each report of folders, or of a corpus.

    Parameters
    ----------
    paths : sequence of Path
        Folders, single captures and stores; or one corpus.
    how : How, optional
        By which workers reports are read that have no store yet, and how names are understood.
    tell : callable, optional
        Called with the name of each report that is done.

    Returns
    -------
    Gathered
        Members and failures; one report that cannot be read does not stop the others.

    Raises
    ------
    NsanError
        If there is no report at all, a path does not exist, or the workers cannot be used.
    """
    how = how or How()
    if len(paths) == 1 and is_corpus(paths[0]):
        return Gathered(*members_of(paths[0]))
    found = reports_in(paths, how.pattern)
    if not found:
        raise no_reports(paths)
    members, failures = [], []
    with closing(performed([gather_task(each) for each in found], how)) as results:
        for result in results:
            del result["report"]
            if "reason" in result:
                failures.append(Failure(**result))
            else:
                members.append(Member(**result))
            if tell is not None:
                tell(result["source"])
    return Gathered(tuple(sorted(members, key=_order)), tuple(sorted(failures, key=_order)))


def no_reports(paths: Sequence[Path]) -> Exception:
    """Say that folders hold no report."""
    for path in paths:
        if not path.exists():
            return InputMissingError(path)
    named = ", ".join(str(path) for path in paths[:3])
    return UsageError(
        f"There is no report in {named}: no .nsys-rep, .qdrep, .qdstrm or .sqlite, no folder of an nsys "
        "export, no nsan store. Name files of other kinds one by one."
    )


def _order(each: Any) -> tuple[str, bool, int, str]:
    return in_order(each.run, each.rank, each.source)
