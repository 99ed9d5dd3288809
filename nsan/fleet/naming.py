"""Which run and which rank a report is of, as its name says it.

A name is the report's path below the folder that was given, that folder's own name first. In order:
what `--rank-pattern` finds; a word for a rank, as in `rank12`, anywhere in the name; the rank that the
export itself holds; a word for a rank within one machine, as in `local_rank2`; a number at the end of the
file's name, which may be but a count. Each answer says where it is from, and `nsan import --list` shows it
before anything is done.

Folder and path alone decide, so that a report has one name, whatever else is read beside it. Only
numbers at the end are looked at together: those of processes and jobs are no ranks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import quote

from nsan.errors import UsageError

BY_PATTERN: Final = "--rank-pattern"
BY_WORD: Final = "word in the name"
BY_RECORD: Final = "recorded"
BY_LOCAL: Final = "word for a rank of one machine"
BY_NUMBER: Final = "number at the end of the name"
BY_NOTHING: Final = "not named"
_GUESSED: Final = (BY_NUMBER, BY_NOTHING)

_RANK_WORD: Final = re.compile(
    r"(?i)(?<![a-z])(?P<local>local[-_.]?)?(?:mpi[-_.]?)?"
    r"(?:(?:rank|procid|proc|task|pe)[-_.=]?(?P<n>\d{1,7})|(?:worker|process)[-_.=]?(?P<few>\d{1,3}))"
    r"(?!\d)(?:[-_.]?of[-_.]?\d+)?"
)
"""A process has a number of the system as well, so few digits are a rank behind that word."""

_GPU_PART: Final = re.compile(r"(?i)gpu[-_]?(\d{1,2})")
"""A whole part of a path: `x_gpu8` may be a run on eight of them."""

_HOST_WORD: Final = re.compile(
    r"(?i)(?<![a-z0-9])(?:node|host|nid|cn|gn|compute|server|machine)[-_]?\d+(?![a-z0-9])"
)
_DATE: Final = re.compile(
    r"(?<!\d)\d{4}[-_.]?\d{2}[-_.]?\d{2}(?:[T_-]?\d{2}[-_.:h]?\d{2}(?:[-_.:m]?\d{2})?)?(?!\d)"
)
_LAST_NUMBER: Final = re.compile(
    r"(?i)(?:^|[-_.]|(?<![a-z])(?:report|run|trace|profile)|(?<![a-z0-9])(?P<r>r))(\d{1,7})$"
)
_LONGEST_RANK: Final = 5
"""Longer numbers at the end of a name are process or job numbers."""

_FEWEST: Final = 16
_SPREAD: Final = 4
"""Numbers at the end are ranks where all are below so many times as there are reports."""

_GENERIC: Final = frozenset(
    {"", "report", "run", "profile", "prof", "trace", "capture", "nsys", "rep", "out", "output"}
)
"""Names of files that say nothing of what ran."""

_LONGEST_RUN: Final = 180
"""Bytes of a run as a part of a path."""


@dataclass(frozen=True)
class Named:
    """What the name of a report says.

    Attributes
    ----------
    run : str
        Which run it belongs to.
    rank : int or None
        Its rank; None where the name has none.
    by : str
        Where the rank is from; one of the words above.
    bare_run : str
        The run where the export itself holds the rank: without any number at the end.
    machine_run : str
        The run where ranks count within one machine.
    whole_run : str
        The run where a number at the end is no rank: all that the name has.
    """

    run: str
    rank: int | None
    by: str
    bare_run: str
    machine_run: str
    whole_run: str

    def settled(self, recorded: int | None) -> Named:
        """Decide between the name and the rank that the export holds.

        Parameters
        ----------
        recorded : int or None
            As :attr:`nsan.TraceInfo.rank` has it.

        Returns
        -------
        Named
            The same, or that of the recorded rank where the name has no word for a rank of the whole program.
        """
        if recorded is None or self.by in {BY_PATTERN, BY_WORD}:
            return self
        return replace(self, run=self.bare_run, rank=recorded, by=BY_RECORD)


def checked_pattern(text: str | None) -> re.Pattern[str] | None:
    """Compile what `--rank-pattern` was given.

    Parameters
    ----------
    text : str or None
        A regular expression with a group named run, rank, or both.

    Returns
    -------
    re.Pattern or None
        The expression; None without one.

    Raises
    ------
    UsageError
        If it is no expression, or has neither group.
    """
    if text is None:
        return None
    try:
        pattern = re.compile(text)
    except re.error as error:
        msg = f"--rank-pattern '{text}' is not a regular expression: {error}."
        raise UsageError(msg) from error
    if not {"run", "rank"} & pattern.groupindex.keys():
        msg = (
            f"--rank-pattern '{text}' has no group named run or rank. "
            r"Write for example '(?P<run>[^/]+)/gpu(?P<rank>\d+)'."
        )
        raise UsageError(msg)
    return pattern


def named(folder: str, below: str, pattern: re.Pattern[str] | None = None) -> Named:
    """Say what a name means.

    Parameters
    ----------
    folder : str
        Name of the folder that was given.
    below : str
        Path of the report below it, with ``/``, without its suffix.
    pattern : re.Pattern, optional
        Of :func:`checked_pattern`; searched in folder and path together.

    Returns
    -------
    Named
        Run, rank, and where the rank is from.

    Raises
    ------
    UsageError
        If the pattern finds a rank that is not a whole number.

    Examples
    --------
    >>> named("nights", "monday/train_rank3").run, named("nights", "monday/train_rank3").rank
    ('nights/monday/train', 3)
    >>> named("monday", "node7/report_2").run, named("monday", "node7/report_2").rank
    ('monday', 2)
    """
    name = f"{folder}/{below}"
    found = pattern.search(name) if pattern else None
    if found is None:
        return _by_words(name)
    groups = found.groupdict()
    run = fitting(groups["run"]) if groups.get("run") else None
    if groups.get("rank") is None:
        plain = _by_words(name)
        return plain if run is None else _always(run, plain.rank, plain.by)
    if run is None:
        start, end = found.span("rank")
        parts = (name[:start] + name[end:]).split("/")
        run = _run([_tidy(part) for part in _without_machines(_without_ranks(parts))])
    return _always(run or fitting(folder), _whole(groups["rank"]), BY_PATTERN)


def plausible(names: Iterable[Named]) -> list[Named]:
    """Look at names together: which numbers at the end are ranks, and which reports a machine tells apart.

    Numbers of processes and jobs are far from 0, or far from each other. Where machines have reports of the
    same run and rank (or of none), they number them each for itself, so that the machine stays in the run.

    Parameters
    ----------
    names : iterable of Named
        Of all reports.

    Returns
    -------
    list of Named
        The same, in the same order, or without a rank, or with the machine in the run.
    """
    known = list(names)
    numbers: dict[str, list[int]] = {}
    for each in known:
        if each.by == BY_NUMBER and each.rank is not None:
            numbers.setdefault(each.run, []).append(each.rank)
    ranks = {run for run, of in numbers.items() if max(of) < max(_FEWEST, _SPREAD * len(of))}
    known = [
        replace(each, run=each.whole_run, rank=None, by=BY_NOTHING)
        if each.by == BY_NUMBER and each.run not in ranks
        else each
        for each in known
    ]
    machines: dict[tuple[str, int | None], set[str]] = {}
    for each in known:
        if each.by in _GUESSED:
            machines.setdefault((each.run, each.rank), set()).add(each.machine_run)
    apart = {run for (run, _), of in machines.items() if len(of) > 1}
    return [
        replace(each, run=each.machine_run) if each.by in _GUESSED and each.run in apart else each
        for each in known
    ]


def is_place(name: str) -> bool:
    """Say whether a folder's name is but a rank or a machine, which tells no run.

    Examples
    --------
    >>> is_place("rank0"), is_place("node-17"), is_place("monday")
    (True, True, False)
    """
    return any(word.fullmatch(name) for word in (_RANK_WORD, _GPU_PART, _HOST_WORD))


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 63:
        msg = f"--rank-pattern found the rank {text!r}, which is not a whole number."
        raise UsageError(msg)
    return int(text)


def _always(run: str, rank: int | None, by: str) -> Named:
    """Name a report whose run is the same whatever its rank is."""
    return Named(run, rank, by, run, run, run)


def _by_words(name: str) -> Named:
    given = name.split("/")
    rank, is_local = _rank(given)
    whole = _without_ranks(given) if rank is not None else given
    few = _without_machines(whole)
    fallback = fitting(given[0])
    if rank is not None:
        # A count that nsys added says nothing beside a rank.
        bare, run = (_run(_without_count(parts)) or fallback for parts in (few, whole))
        if is_local:  # the machine has to stay
            return Named(run, rank, BY_LOCAL, bare, run, run)
        return _always(bare, rank, BY_WORD)
    number = _last_number(few[-1])
    if number is None:
        run, machine_run = (_run(parts) or fallback for parts in (few, whole))
        return Named(run, None, BY_NOTHING, run, machine_run, machine_run)
    bare, machine_run = (_run(_without_number(parts)) or fallback for parts in (few, whole))
    if len(number[2]) <= _LONGEST_RANK:
        return Named(bare, int(number[2]), BY_NUMBER, bare, machine_run, _run(whole))
    return Named(_run(few), None, BY_NOTHING, bare, _run(whole), _run(whole))


def _words(part: str) -> list[tuple[tuple[int, int], int, bool]]:
    """Find words for a rank: where, which rank, whether it counts within one machine."""
    gpu = _GPU_PART.fullmatch(part)
    if gpu:
        return [(gpu.span(), int(gpu[1]), True)]
    return [
        (found.span(), int(found["n"] or found["few"]), found["local"] is not None)
        for found in _RANK_WORD.finditer(part)
    ]


def _rank(parts: list[str]) -> tuple[int | None, bool]:
    """Find the last word for a rank; one of the whole program comes before one of a machine."""
    words = [word for part in parts for word in _words(part)]
    for is_local in (False, True):
        found = [rank for _, rank, local in words if local is is_local]
        if found:
            return found[-1], is_local
    return None, False


def _without_ranks(parts: list[str]) -> list[str]:
    """Take the last word for a rank of the whole program out of a name, and all those within a machine."""
    last = max((at for at, part in enumerate(parts) if _has_global(part)), default=-1)
    kept = []
    for at, part in enumerate(parts):
        words = _words(part)
        spans = [span for span, _, local in words if local]
        spans += [span for span, _, local in words if not local][-1:] if at == last else []
        for start, end in sorted(spans, reverse=True):
            part = part[:start] + part[end:]  # noqa: PLW2901
        kept.append(_tidy(part) if spans else part)
    return kept


def _has_global(part: str) -> bool:
    return any(not local for _, _, local in _words(part))


def _without_machines(parts: list[str]) -> list[str]:
    *folders, stem = parts
    kept = [each for each in folders if not _HOST_WORD.fullmatch(each)]
    return [*kept, _tidy(_HOST_WORD.sub("", stem))]


def _without_number(parts: list[str]) -> list[str]:
    *folders, stem = parts
    number = _last_number(stem)
    if number is None:
        return parts
    return [*folders, _tidy(stem[: number.start("r" if number["r"] else 2)])]


def _without_count(parts: list[str]) -> list[str]:
    """Leave out a stem that is but a generic name and a number."""
    bare = _without_number(parts)
    return bare if bare[-1].lower() in _GENERIC else parts


def _last_number(stem: str) -> re.Match[str] | None:
    """Find a number at the end that is not of a date."""
    found = _LAST_NUMBER.search(stem)
    if found is None:
        return None
    dates = (date.span() for date in _DATE.finditer(stem))
    return None if any(start < found.end() <= end for start, end in dates) else found


def _tidy(text: str) -> str:
    """Close the gap that a word left."""
    return re.sub(r"[-_.]{2,}", lambda gap: gap[0][0], text).strip("-_. =")


def _run(parts: list[str]) -> str:
    *folders, stem = parts
    folders = [each for each in folders if each]
    # The folder that a tool makes for a run is called as the report in it: once is enough.
    told = stem.lower() in _GENERIC or folders[-1:] == [stem]
    return fitting("/".join(folders if told else [*folders, stem]))


def fitting(run: str) -> str:
    """Cut a run that is too long for a part of a path; a digest keeps it apart from others.

    Parameters
    ----------
    run : str
        Any text.

    Returns
    -------
    str
        The same where it fits.
    """
    if len(quote(run, safe="")) <= _LONGEST_RUN:
        return run
    cut = run
    while len(quote(cut, safe="")) > _LONGEST_RUN - 9:
        cut = cut[:-1]
    return f"{cut}~{hashlib.sha256(run.encode()).hexdigest()[:8]}"
