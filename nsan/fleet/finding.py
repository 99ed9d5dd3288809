"""The reports of a fleet: which files of the given folders are one, and what each is called.

Folders are looked through to their bottom. A report, its export and its stream, which differ in their
suffix only, are one report: the newest of them is read, as everywhere in nsan. Links to folders,
hidden files, corpora and stores beside their captures are passed over.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nsan.errors import NoPermissionError, NsanError, UsageError
from nsan.fleet import naming
from nsan.fleet.naming import Named, checked_pattern, named
from nsan.io.corpus_place import is_corpus
from nsan.io.manifest import STORE_BESIDE, is_store
from nsan.io.probe import CAPTURE_SUFFIXES, identify, is_folder, newest_capture

_EXPORTED: Final = ("_pqtdir", "_arwdir")
"""What nsys appends to a report's name for the folder of its Parquet or Arrow export."""


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
    """

    path: Path
    run: str
    rank: int | None
    source: str
    named: Named
    report: str
    within: str
    name: str

    @property
    def order(self) -> tuple[str, bool, int, str]:
        """Key by which reports are in order: run, rank, name; those without a rank come last."""
        return in_order(self.run, self.rank, self.source)


def in_order(run: str, rank: int | None, source: str) -> tuple[str, bool, int, str]:
    """Return the key by which reports of a fleet are in order."""
    return run, rank is None, rank or 0, source


def reports_in(paths: Sequence[Path], pattern: str | None = None) -> list[Found]:
    """Find the reports of folders, and say what each is called.

    Parameters
    ----------
    paths : sequence of Path
        Folders, and single captures or stores.
    pattern : str, optional
        A regular expression with groups named run and rank, searched in the name of each report.

    Returns
    -------
    list of Found
        By run, rank and name. A report that is found twice is there once.

    Raises
    ------
    NsanError
        If a path does not exist or may not be read, or the pattern cannot be used.
    """
    checked = checked_pattern(pattern)
    found: dict[Path, Found] = {}
    labels = _labels(paths)
    several = len({str(label) for label in labels.values()}) > 1
    for given in paths:
        base = _base(given)
        label = labels[base]
        for path in _captures(given):
            found.setdefault(path.resolve(), _called(path, base, label, checked, several=several))
    if checked and found and not any(checked.search(each.name) for each in found.values()):
        example = min(each.name for each in found.values())
        msg = f"--rank-pattern '{pattern}' is found in no name; a name is for example '{example}'."
        raise UsageError(msg)
    return sorted(found.values(), key=lambda each: each.order)


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
    path = paths[0]
    if is_corpus(path):
        return True
    if not is_folder(path) or _is_report_folder(path):
        return False
    n = len(_captures(path))
    return n > 1 or (n == 1 and newest_capture(path) is None)


def _called(
    path: Path, base: Path, label: Path, pattern: re.Pattern[str] | None, *, several: bool
) -> Found:
    below = Path(os.path.relpath(path, base))
    source = label / below
    stem = below.with_name(_stem(path))
    name = _text(label / stem)
    folder, _, rest = name.partition("/")
    says = named(folder, rest, pattern, several=several)
    report = hashlib.sha256(os.fsencode(label / stem)).hexdigest()[:12]
    return Found(path, says.run, says.rank, _text(source), says, report, _text(label), name)


def _text(part: str | Path) -> str:
    """Write a part of a path as text that can be stored: a file name may be any bytes."""
    return os.fsencode(part).decode("utf-8", errors="replace")


def _stem(path: Path) -> str:
    if path.suffix in CAPTURE_SUFFIXES:
        return path.stem
    for end in _EXPORTED:
        if path.name.endswith(end):
            return path.name.removesuffix(end)
    name = path.name.removesuffix(".gz")
    return Path(name).stem if path.is_file() else name


def _base(given: Path) -> Path:
    """Return the folder that a report is named after: the one that was given, or that of the file."""
    return given if is_folder(given) and not _is_report_folder(given) else given.parent


def _labels(paths: Sequence[Path]) -> dict[Path, Path]:
    """Give each folder a short name of its own: its last part, and more where that tells nothing."""
    whole = {base: base.resolve() for base in map(_base, paths)}
    lengths = dict.fromkeys(whole.values(), 1)
    for real in lengths:
        while naming.is_place(real.parts[-lengths[real]]) and lengths[real] < len(real.parts) - 1:
            lengths[real] += 1
    while True:
        names = {real: Path(*real.parts[-n:]) for real, n in lengths.items()}
        taken = [*names.values()]
        alike = [real for real, name in names.items() if taken.count(name) > 1]
        if not alike:
            break
        for real in alike:
            lengths[real] += 1
    return {base: _relative(names[real]) for base, real in whole.items()}


def _relative(label: Path) -> Path:
    return Path(*label.parts[1:] or ("root",)) if label.is_absolute() else label


def _captures(given: Path) -> list[Path]:
    """List the captures of a path; each report once."""
    if not is_folder(given) or _is_report_folder(given):
        return [given]
    if is_corpus(given):
        msg = f"{given} is a corpus already: open it with nsan.open_corpus, or `nsan summary {given}`."
        raise UsageError(msg)
    found: list[Path] = []
    for folder, names, files in os.walk(given, onerror=_refused):
        here = Path(folder)
        captures = _newest([here / name for name in files if _is_capture(here / name)])
        taken = {_stem(path) for path in captures}
        deeper = []
        for name in sorted(names):
            inner = here / name
            if name.startswith(".") or inner.is_symlink() or is_corpus(inner):
                continue
            if not _is_report_folder(inner):
                deeper.append(name)
            elif not (captures and name == STORE_BESIDE) and _stem(inner) not in taken:
                captures.append(inner)
        names[:] = deeper
        found += captures
    return found


def _refused(error: OSError) -> None:
    raise NoPermissionError(Path(error.filename)) from error


def _is_capture(path: Path) -> bool:
    return path.suffix in CAPTURE_SUFFIXES and not path.name.startswith(".") and path.is_file()


def _is_report_folder(folder: Path) -> bool:
    """Say whether a folder is one report: a store, or the tables that nsys exported."""
    if is_store(folder):
        return True
    try:
        return identify(folder) == "tables"
    except NsanError:
        return False


def _newest(paths: list[Path]) -> list[Path]:
    """Keep one file of those that differ in their suffix only."""
    newest: dict[str, Path] = {}
    for path in sorted(paths):
        other = newest.get(path.stem)
        if other is None or path.stat().st_mtime_ns > other.stat().st_mtime_ns:
            newest[path.stem] = path
    return [newest[stem] for stem in sorted(newest)]
