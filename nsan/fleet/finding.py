"""The reports of a fleet: which files of the given folders are one, and what each is called.

Folders are looked through to their bottom. A report, its export and its stream, which differ in their
suffix only, are one report: the newest of them is read, as everywhere in nsan. Links to folders,
hidden files, corpora and stores of captures that are there too are passed over. A folder that may not be
read is named as a failure, and the others are read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from nsan.corpus_errors import GivenBesideError, NotACorpusError
from nsan.errors import NsanError, UsageError
from nsan.fleet import naming
from nsan.fleet.captures import captures_of, is_report_folder, stem_of
from nsan.fleet.member import Failure
from nsan.fleet.naming import Named, checked_pattern, named, plausible
from nsan.io.corpus_place import is_corpus, url_of
from nsan.io.manifest import is_store, place_of, read_manifest
from nsan.io.probe import is_folder, newest_capture

_HOMES: Final = ("/home", "/Users")
"""Folders whose folders are called as people are."""


@dataclass(frozen=True)
class Found:
    """One report of a fleet, before it is read.

    Attributes
    ----------
    path : Path
        Where it is.
    run : str
        Which run it is of, by its name.
    rank : int or None
        Its rank, by its name.
    source : str
        Its name below the folder that was given, that folder's name first.
    named : Named
        Where run and rank are from, and what they become if the report itself holds its rank.
    report : str
        Identifies it in a corpus: a digest of its source without the suffix.
    within : str
        Name of the folder that was given, as its source begins.
    name : str
        Its source without the suffix: what a pattern is searched in.
    base : str
        Digest of where the folder lies that was given: tells it from another one of that name.
    """

    path: Path
    run: str
    rank: int | None
    source: str
    named: Named
    report: str
    within: str
    name: str
    base: str

    @property
    def order(self) -> tuple[str, bool, int, str]:
        """Key by which reports are in order: run, rank, name; those without a rank come last."""
        return in_order(self.run, self.rank, self.source)


@dataclass(frozen=True)
class Unreadable:
    """A folder that may not be read, so that nobody knows which reports it has.

    Attributes
    ----------
    failure : Failure
        Its name, and why.
    report, within, base : str
        As of a report that is found.
    """

    failure: Failure
    report: str
    within: str
    base: str


@dataclass(frozen=True)
class Search:
    """What is in the folders that were given.

    Attributes
    ----------
    found : list of Found
        The reports, by run, rank and name.
    unreadable : list of Unreadable
        Folders that may not be read.
    folders : set of (str, str)
        Name and digest of each folder that was looked through as a whole.
    """

    found: list[Found]
    unreadable: list[Unreadable]
    folders: set[tuple[str, str]]


def in_order(run: str, rank: int | None, source: str) -> tuple[str, bool, int, str]:
    """Return the key by which reports of a fleet are in order."""
    return run, rank is None, rank or 0, source


def reports_in(paths: Sequence[Path], pattern: str | None = None) -> list[Found]:
    """Find the reports of folders; those of folders that may not be read are not there.

    Parameters
    ----------
    paths : sequence of Path
        As for :func:`search`.
    pattern : str, optional
        As for :func:`search`.

    Returns
    -------
    list of Found
        By run, rank and name.

    Raises
    ------
    NsanError
        As of :func:`search`.
    """
    return search(paths, pattern).found


def search(paths: Sequence[Path], pattern: str | None = None) -> Search:
    """Find the reports of folders, and say what each is called.

    Parameters
    ----------
    paths : sequence of Path
        Folders, and single captures or stores.
    pattern : str, optional
        A regular expression with groups named run and rank, searched in the name of each report.

    Returns
    -------
    Search
        A report that is found twice is there once.

    Raises
    ------
    NsanError
        If a path that was given does not exist or may not be read, or the pattern cannot be used.
    """
    checked = checked_pattern(pattern)
    paths = [_local(path) for path in paths]
    found: dict[Path, Found] = {}
    unreadable: dict[Path, Unreadable] = {}
    labels = _labels(paths)
    whole = set()
    for given in paths:
        base = _base(given)
        if base == given:
            whole.add((_text(labels[base]), place_of(base)))
        captures, closed = captures_of(given)
        for path in captures:
            found.setdefault(path.resolve(), _called(path, base, labels[base], checked))
        for path in closed:
            unreadable.setdefault(path, _closed(path, base, labels[base]))
    kept = _without_their_stores(list(found.values()))
    if checked and kept and not any(checked.search(each.name) for each in kept):
        example = min(each.name for each in kept)
        msg = f"--rank-pattern '{pattern}' is found in no name; a name is for example '{example}'."
        raise UsageError(msg)
    together = zip(kept, plausible(each.named for each in kept), strict=True)
    known = [replace(each, named=says, run=says.run, rank=says.rank) for each, says in together]
    known.sort(key=lambda each: each.order)
    return Search(known, sorted(unreadable.values(), key=lambda each: each.failure.source), whole)


def unmatched(found: Sequence[Found], pattern: str | None) -> list[str]:
    """List the reports whose names a pattern is not found in.

    Parameters
    ----------
    found : sequence of Found
        The reports.
    pattern : str or None
        As :func:`reports_in` took it.

    Returns
    -------
    list of str
        Their sources; none without a pattern.
    """
    checked = checked_pattern(pattern)
    return [each.source for each in found if checked and not checked.search(each.name)]


def is_fleet(paths: Sequence[Path]) -> bool:
    """Say whether paths mean many reports: several paths, a corpus, a folder with more than one capture.

    Parameters
    ----------
    paths : sequence of Path
        As a user gave them.

    Returns
    -------
    bool
        False for one capture, one store, and a folder with one capture.

    Raises
    ------
    NsanError
        If a path does not exist or may not be read.
    """
    if len(paths) != 1:
        return len(paths) > 1
    if is_corpus(paths[0]):
        return True
    path = _local(paths[0])
    if not is_folder(path) or is_report_folder(path):
        return False
    captures, closed = captures_of(path)
    return len(captures) > 1 or bool(closed) or (bool(captures) and newest_capture(path) is None)


def _local(path: Path) -> Path:
    """Return the path that a URL of this machine names; reports are read at no other URL."""
    url = url_of(path)
    if url is None:
        return path
    if url.startswith("file://"):
        return Path(unquote(urlsplit(url).path))
    if is_corpus(path):
        raise GivenBesideError(url)
    raise NotACorpusError(url)


def _called(path: Path, base: Path, label: Path, pattern: re.Pattern[str] | None) -> Found:
    below = Path(os.path.relpath(path, base))
    source = label / below
    stem = below.with_name(stem_of(path))
    name = _text(label / stem)
    folder, _, rest = name.partition("/")
    says = named(folder, rest, pattern)
    report, within = _digest(label / stem), _text(label)
    return Found(
        path, says.run, says.rank, _text(source), says, report, within, name, place_of(base)
    )


def _closed(path: Path, base: Path, label: Path) -> Unreadable:
    source = label / os.path.relpath(path, base)
    reason = "you may not read this folder, and whatever is in it. Ask its owner, or copy it."
    failure = Failure(naming.fitting(_text(source)), None, _text(source), reason)
    return Unreadable(failure, _digest(source / "*"), _text(label), place_of(base))


def _digest(name: Path) -> str:
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:12]


def _without_their_stores(found: list[Found]) -> list[Found]:
    """Leave out stores of captures that were found as well, whatever they are called."""
    stores = [each for each in found if is_store(each.path)]
    if not stores or len(stores) == len(found):
        return found
    captures = {place_of(each.path) for each in found if not is_store(each.path)}
    twice = {each.path for each in stores if _made_from(each.path) in captures}
    return [each for each in found if each.path not in twice]


def _made_from(store: Path) -> str | None:
    """Say where the source of a store lay, as a digest."""
    try:
        place: str = read_manifest(store)["source"]["place"]
    except (NsanError, KeyError):
        return None  # its import says what is wrong with it
    return place


def _text(part: str | Path) -> str:
    """Write a part of a path as text that can be stored: a file name may be any bytes."""
    return os.fsencode(part).decode("utf-8", errors="backslashreplace")


def _base(given: Path) -> Path:
    """Return the folder that a report is named after: the one that was given, or that of the file."""
    return given if is_folder(given) and not is_report_folder(given) else given.parent


def _labels(paths: Sequence[Path]) -> dict[Path, Path]:
    """Give each folder a short name: its last part. No folder above it is named, for that may be a person."""
    whole = {base: base.resolve() for base in map(_base, paths)}
    names = {real: _label(real) for real in whole.values()}
    taken = [*names.values()]
    for real, name in names.items():
        if taken.count(name) > 1:
            names[real] = name.with_name(f"{name.name}-{_short(real)}")
    return {base: names[real] for base, real in whole.items()}


def _label(real: Path) -> Path:
    """Name a folder; behind a digest of the folder above where its name is but a rank or a machine."""
    if not real.name:
        return Path("root")
    if real == Path("~").expanduser() or str(real.parent) in _HOMES:
        return Path("home")
    if naming.is_place(real.name):
        above = real.parent
        return (
            _label(above) if naming.is_place(above.name) else Path(f"folder-{_short(above)}")
        ) / real.name
    return Path(real.name)


def _short(real: Path) -> str:
    return place_of(real)[:8]
