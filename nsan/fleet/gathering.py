"""What is known about each report of a fleet, without a corpus: each has its store in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsan.errors import InputMissingError, UsageError, listed
from nsan.fleet.corpus import members_of
from nsan.fleet.finding import in_order, search
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
        Those that could not, in the same order; and folders that may not be read.
    twice : tuple of str
        Reports that are one file twice: one line each.
    """

    members: tuple[Member, ...]
    failures: tuple[Failure, ...]
    twice: tuple[str, ...] = ()


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
        If there is no report at all, a path does not exist, an option means nothing for a corpus, or the
        workers cannot be used.
    """
    how = how or How()
    if len(paths) == 1 and is_corpus(paths[0]):
        _refuse(how)
        return Gathered(*members_of(paths[0]))
    there = search(paths, how.pattern)
    if not there.found and not there.unreadable:
        raise no_reports(paths)
    members, same = [], []
    failures = [each.failure for each in there.unreadable]
    with closing(performed([gather_task(each) for each in there.found], how)) as results:
        for result in results:
            del result["report"]
            same.append((result.pop("same", None), result["source"]))
            if "reason" in result:
                failures.append(Failure(**result))
            else:
                members.append(Member(**result))
            if tell is not None:
                tell(result["source"])
    in_order_of_names = tuple(sorted(members, key=_order)), tuple(sorted(failures, key=_order))
    return Gathered(*in_order_of_names, tuple(one_file_twice(same)))


def _refuse(how: How) -> None:
    """Refuse what would do nothing: a corpus has been read, and its reports been named."""
    given = {"--workers": how.workers, "--dask": how.dask, "--rank-pattern": how.pattern}
    for option, value in given.items():
        if value is not None:
            msg = f"{option} does nothing for a corpus, which was read before: give it to `nsan import`."
            raise UsageError(msg)


def one_file_twice(files: Iterable[tuple[str | None, str]]) -> list[str]:
    """Name reports that are the same file.

    Parameters
    ----------
    files : iterable of (str or None, str)
        What tells files apart, and the name of each report; None is not known.

    Returns
    -------
    list of str
        One line for each file that is there more than once.
    """
    sources: dict[str, list[str]] = {}
    for same, source in files:
        if same is not None:
            sources.setdefault(same, []).append(source)
    alike = (sorted(of) for of in sources.values() if len(of) > 1)
    return sorted(listed(of, limit=3) for of in alike)


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
