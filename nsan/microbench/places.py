"""Where a run of the benchmark goes, and what is there already: nothing that is no failed run is ever replaced.

A run takes minutes. What comes to its place meanwhile, another run of that name or a file of the user's, is seen
when the run is put there: then the new run is kept beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

from nsan.errors import NsanError, OutputExistsError, OutputWriteError, PlaceTakenError
from nsan.io.bench_truth import BENCH, BENCH_FORMAT, TRUTH_SUFFIX
from nsan.io.manifest import STORE_BESIDE
from nsan.io.tidy import exchange, put_in_place
from nsan.text import shortened

OK: Final = "ok"
ALONE_SUFFIX: Final = ".alone"
TAPE_SUFFIX: Final = ".tape"
_MAKING: Final = "benchmarking"
_OF_A_RUN: Final = frozenset({BENCH, STORE_BESIDE})
_SUFFIXES: Final = (
    *(ALONE_SUFFIX, TRUTH_SUFFIX, TAPE_SUFFIX, ".nsys-rep", ".nsan.json", ".pickle"),
    *(".sqlite", "_pqtdir", "_arwdir"),  # what nsys exports beside a report
)
_LONGEST_NAME: Final = 60


class RunKeptError(NsanError):
    """A run has ended, and its place was taken meanwhile; ``kept`` says where it is now."""

    def __init__(self, taken: NsanError, kept: Path) -> None:
        self.kept = kept
        super().__init__(f"{taken} That came there during this run, which is kept in {kept}.")


def resolved(place: Path) -> Path:
    """Follow links to where a run goes, so that they stay what they are; its name becomes that of the report.

    Raises
    ------
    OutputWriteError
        If they lead nowhere.
    """
    try:
        return place.resolve()
    except (OSError, RuntimeError) as error:
        raise OutputWriteError(place, "its links lead in a circle") from error


def check_place(place: Path, *, overwrite: bool) -> None:
    """Refuse a place where a run that ended well, or anything else, would be lost.

    Raises
    ------
    OutputExistsError, PlaceTakenError
        If so.
    """
    _check(resolved(place), place, overwrite=overwrite)


def _check(found: Path, place: Path, *, overwrite: bool) -> None:
    """Look at what was found at a place; it may have been moved away from there."""
    if not found.exists() or (found.is_dir() and not any(found.iterdir())):
        return
    document = read_document(found, place)
    if document is None:
        raise PlaceTakenError(place, "is there, and is no run of `nsan bench`")
    foreign = sorted(each.name for each in found.iterdir() if not _is_of_a_run(each.name))
    if foreign:
        name = shortened(foreign[0], _LONGEST_NAME)
        raise PlaceTakenError(place, f"holds {name!r}, which is of no run of `nsan bench`")
    if document["status"] == OK and not overwrite:
        raise OutputExistsError(place, "holds a run that ended well")


def _is_of_a_run(name: str) -> bool:
    return name in _OF_A_RUN or name.endswith(_SUFFIXES)


def read_document(folder: Path, place: Path | None = None) -> dict[str, Any] | None:
    """Read ``bench.json`` of a run.

    Parameters
    ----------
    folder : Path
        Of the run.
    place : Path, optional
        What the user knows the folder as; by default as the folder.

    Returns
    -------
    dict or None
        None: it is no run, or one of another version of nsan.

    Raises
    ------
    PlaceTakenError
        If it is damaged: what belongs to it may be worth keeping.
    """
    try:
        text = (folder / BENCH).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    try:
        found = json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("nsan_bench") != BENCH_FORMAT:
        return None
    wrong = [key for key, fits in _FITS.items() if not fits(found.get(key))]
    if wrong:
        what = f"holds a run whose {BENCH} is damaged ({wrong[0]}); remove it to make it again"
        raise PlaceTakenError(place or folder, what)
    return found


def _refused(constant: str) -> None:
    raise ValueError(constant)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_nothing(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_time_or_nothing(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _counts(value: object) -> bool:
    keys = ("n_checked", "n_right")
    return isinstance(value, dict) and all(type(value.get(key)) is int for key in keys)


_FITS: Final[Mapping[str, Callable[[object], bool]]] = {
    "status": _is_text,
    "digest": _is_text_or_nothing,  # of a run that came from another machine
    "reason": _is_text_or_nothing,
    "condition": lambda value: isinstance(value, dict),
    "profiled": lambda value: isinstance(value, bool),
    "seconds_alone": _is_time_or_nothing,
    "seconds_nsys": _is_time_or_nothing,
    "expected": lambda value: value is None or _counts(value),
}
"""What each part of the document is that others rely on."""


@contextlib.contextmanager
def making(place: Path, *, overwrite: bool) -> Iterator[Path]:
    """Make a run beside its place, and put it there when the block ends without an error.

    Parameters
    ----------
    place : Path
        As :func:`resolved` gives it. The folder of the place exists.
    overwrite : bool
        Replace a run that ended well.

    Yields
    ------
    Path
        The folder to fill.

    Raises
    ------
    RunKeptError
        If something else came there meanwhile. The run is then beside it.
    OSError
        If it cannot be written. Nothing is left behind.
    """

    def put(folder: Path, place: Path) -> None:
        _put(folder, place, overwrite=overwrite)

    with put_in_place(place, _MAKING, put) as folder:
        yield folder


def _put(folder: Path, place: Path, *, overwrite: bool) -> None:
    """Move a run to its place; what is there is looked at first, and again when it is not there any more."""
    with contextlib.suppress(OSError):
        folder.rename(place)  # succeeds where nothing is, or an empty folder
        return
    try:
        check_place(place, overwrite=overwrite)
    except NsanError as taken:
        raise RunKeptError(taken, _kept(folder, place)) from taken
    old = folder
    if not exchange(folder, place):
        old = _aside(folder)
        place.rename(old)
    try:
        if old != folder:
            folder.rename(place)
        _check(old, place, overwrite=overwrite)
    except BaseException as error:
        # First of all: what is at a scratch name is removed in the end.
        _put_back(folder, old, place)
        if isinstance(error, NsanError):
            raise RunKeptError(error, _kept(folder, place)) from error
        raise
    shutil.rmtree(old, ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-old")


def _put_back(folder: Path, old: Path, place: Path) -> None:
    """Give what was at a place its name again; the run has that of its folder then."""
    if old == folder and exchange(folder, place):
        return
    try:
        if old == folder:
            old = folder.rename(_aside(folder))
        if not folder.exists():
            place.rename(folder)
        old.rename(place)
    except OSError:
        _kept(old, place)  # something else is there now
        raise


def _kept(folder: Path, place: Path) -> Path:
    """Move a folder to the first free name beside a place."""
    for number in count(1):
        kept = place.with_name(f"{place.name}.kept" + (f"-{number}" if number > 1 else ""))
        if os.path.lexists(kept):
            continue
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            folder.rename(kept)
            return kept
    raise AssertionError
