"""Which run and which rank a report is of, as its name says it.

A name is the report's path below the folder that was given, that folder's own name first. In order:
what `--rank-pattern` finds; a word for a rank, as in `rank12`, anywhere in the name; the rank that the
export itself holds; a number at the end of the file's name, which may be but a count. Each answer
says where it is from, and `nsan import --list` shows it before anything is done.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from nsan.errors import UsageError

BY_PATTERN: Final = "--rank-pattern"
BY_WORD: Final = "word in the name"
BY_RECORD: Final = "recorded"
BY_NUMBER: Final = "number at the end of the name"
BY_NOTHING: Final = "not named"

_RANK_WORD: Final = re.compile(
    r"(?i)(?<![a-z])(local[-_.]?)?(?:mpi[-_.]?)?(?:rank|procid|proc|task|pe)[-_.=]?(\d{1,7})(?!\d)(?:[-_.]?of[-_.]?\d+)?"
)
_HOST_WORD: Final = re.compile(
    r"(?i)(?<![a-z0-9])(?:node|host|nid|cn|gn|compute|server|machine)[-_]?\d+(?![a-z0-9])"
)
_DATE: Final = re.compile(
    r"(?<!\d)\d{4}[-_.]?\d{2}[-_.]?\d{2}(?:[T_-]?\d{2}[-_.:h]?\d{2}(?:[-_.:m]?\d{2})?)?(?!\d)"
)
_LAST_NUMBER: Final = re.compile(
    r"(?i)(?:^|[-_.]|(?<![a-z])(?:report|run|trace|profile))(\d{1,7})$"
)
_LONGEST_RANK: Final = 5
"""Longer numbers at the end of a name are process or job numbers."""

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
    """

    run: str
    rank: int | None
    by: str
    bare_run: str

    def settled(self, recorded: int | None) -> Named:
        """Decide between the name and the rank that the export holds.

        Parameters
        ----------
        recorded : int or None
            As :attr:`nsan.TraceInfo.rank` has it.

        Returns
        -------
        Named
            The same, or that of the recorded rank where the name has no word for a rank.
        """
        if recorded is None or self.by in {BY_PATTERN, BY_WORD}:
            return self
        return Named(self.bare_run, recorded, BY_RECORD, self.bare_run)


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


def named(
    folder: str, below: str, pattern: re.Pattern[str] | None = None, *, several: bool = False
) -> Named:
    """Say what a name means.

    Parameters
    ----------
    folder : str
        Name of the folder that was given.
    below : str
        Path of the report below it, with ``/``, without its suffix.
    pattern : re.Pattern, optional
        Of :func:`checked_pattern`; searched in folder and path together.
    several : bool, default False
        Several folders were given, so that their names tell runs apart.

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
    ('monday/train', 3)
    >>> named("monday", "node7/report_2").run, named("monday", "node7/report_2").rank
    ('monday', 2)
    """
    plain = _by_words(folder, below, several=several)
    found = pattern.search(f"{folder}/{below}") if pattern else None
    if found is None:
        return plain
    groups = found.groupdict()
    run = _fitting(groups["run"]) if groups.get("run") else plain.run
    if groups.get("rank") is None:
        bare = run if groups.get("run") else plain.bare_run
        return Named(run, plain.rank, plain.by, bare)
    return Named(run, _whole(groups["rank"]), BY_PATTERN, run)


def is_place(name: str) -> bool:
    """Say whether a folder's name is but a rank or a machine, which tells no run.

    Examples
    --------
    >>> is_place("rank0"), is_place("node-17"), is_place("monday")
    (True, True, False)
    """
    return bool(_RANK_WORD.fullmatch(name) or _HOST_WORD.fullmatch(name))


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 63:
        msg = f"--rank-pattern found the rank {text!r}, which is not a whole number."
        raise UsageError(msg)
    return int(text)


def _by_words(folder: str, below: str, *, several: bool) -> Named:
    *folders, stem = below.split("/")
    folders, stem, rank, local = _take_rank(folders, stem)
    if not local:  # else the rank is but one of a machine, which then has to stay
        folders = [each for each in folders if not _HOST_WORD.fullmatch(each)]
        stem = _tidy(_HOST_WORD.sub("", stem))
    if several or not folders:
        folders = [folder, *folders]
    number = _last_number(stem)
    bare = _without(number, stem) if number else stem
    if rank is not None:
        # A count that nsys added says nothing beside a rank.
        run = _run(folders, "" if bare.lower() in _GENERIC else stem)
        return Named(run, rank, BY_WORD, run)
    bare_run = _run(folders, bare)
    if number and len(number[1]) <= _LONGEST_RANK:
        return Named(bare_run, int(number[1]), BY_NUMBER, bare_run)
    return Named(_run(folders, stem), None, BY_NOTHING, bare_run)


def _without(number: re.Match[str], stem: str) -> str:
    return _tidy(stem[: number.start(1)])


def _take_rank(folders: list[str], stem: str) -> tuple[list[str], str, int | None, bool]:
    """Take the last word for a rank out of a name; say whether it counts within one machine."""
    parts = [*folders, stem]
    for at in reversed(range(len(parts))):
        found = [*_RANK_WORD.finditer(parts[at])]
        if found:
            last = found[-1]
            parts[at] = _tidy(parts[at][: last.start()] + parts[at][last.end() :])
            kept = [each for each in parts[:-1] if each]
            return kept, parts[-1], int(last[2]), last[1] is not None
    return folders, stem, None, False


def _last_number(stem: str) -> re.Match[str] | None:
    """Find a number at the end that is not of a date."""
    found = _LAST_NUMBER.search(stem)
    if found is None:
        return None
    dates = (date.span() for date in _DATE.finditer(stem))
    return None if any(start < found.end(1) <= end for start, end in dates) else found


def _tidy(text: str) -> str:
    """Close the gap that a word left."""
    return re.sub(r"[-_.]{2,}", lambda gap: gap[0][0], text).strip("-_. =")


def _run(folders: list[str], stem: str) -> str:
    # The folder that a tool makes for a run is called as the report in it: once is enough.
    told = stem.lower() in _GENERIC or folders[-1:] == [stem]
    return _fitting("/".join(folders if told else [*folders, stem]))


def _fitting(run: str) -> str:
    """Cut a run that is too long for a part of a path; a digest keeps it apart from others."""
    if len(quote(run, safe="")) <= _LONGEST_RUN:
        return run
    cut = run
    while len(quote(cut, safe="")) > _LONGEST_RUN - 9:
        cut = cut[:-1]
    return f"{cut}~{hashlib.sha256(run.encode()).hexdigest()[:8]}"
