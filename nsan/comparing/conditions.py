"""Conditions found: which runs a path stands for; no trace is opened."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Final

from nsan.errors import InputMissingError, NoPermissionError, NsanError, UsageError
from nsan.io.bench_truth import BENCH
from nsan.io.manifest import STORE_BESIDE, is_store
from nsan.io.probe import CAPTURE_SUFFIXES, display_name, identify, is_folder
from nsan.tabular.notes import few
from nsan.text import shortened

MOST_CONDITIONS: Final = len(ascii_uppercase)
_EXPORTED: Final = ("_pqtdir", "_arwdir")
"""What nsys puts behind the name of a report whose tables it exports into a folder."""


@dataclass(frozen=True)
class Run:
    """One run of a condition, not opened yet.

    Attributes
    ----------
    name : str
        For people: its file, or its folder and its file where files of several folders are alike.
    trace : Path
        Its capture.
    """

    name: str
    trace: Path


@dataclass(frozen=True)
class Condition:
    """Runs of the same program under the same settings: what differs between them is chance.

    Attributes
    ----------
    label : str
        "A" is the base, the others are "B", "C", ...
    name : str
        For people: of its file or folder.
    runs : tuple of Run
        At least one.
    """

    label: str
    name: str
    runs: tuple[Run, ...]


def find_conditions(sides: Sequence[Path | Sequence[Path]]) -> tuple[Condition, ...]:
    """Find the runs of each condition.

    Parameters
    ----------
    sides : sequence of Path, or of sequences of Path
        One entry for each condition, the base first. A path is a capture; a folder of captures; a folder of
        stores, of table exports or of folders with one capture each, as `nsan model run` makes them. Every
        capture is one repetition. Several paths of one condition are put together.

    Returns
    -------
    tuple of Condition
        In the same order.

    Raises
    ------
    NsanError
        If a path has no capture, a capture is named twice for one condition, or there are fewer than two
        conditions.
    """
    if not 2 <= len(sides) <= MOST_CONDITIONS:
        msg = f"{len(sides)} to compare: give 2 to {MOST_CONDITIONS}, the base first."
        raise UsageError(msg)
    return tuple(
        _condition(label, [side] if isinstance(side, Path) else [*side])
        for label, side in zip(ascii_uppercase, sides, strict=False)
    )


def _condition(label: str, paths: Sequence[Path]) -> Condition:
    captures = [capture for path in paths for capture in captures_in(path)]
    places = [capture.resolve() for capture in captures]
    for capture in captures:
        if places.count(capture.resolve()) > 1:
            msg = (
                f"{display_name(capture)} is named twice for {label}: the same capture again is no "
                "other run, and would make noise look smaller than it is."
            )
            raise UsageError(msg)
    if not captures:
        raise UsageError(f"{label} has no run: name a trace, or a folder of traces.")
    own = [_name(path) for path in paths]
    more = f" and {len(own) - 1} more" if len(own) > 1 else ""
    return Condition(label, own[0] + more, tuple(_runs(captures)))


def _runs(captures: Sequence[Path]) -> Iterable[Run]:
    """Name each run by its file, and by its folder too where files are alike."""
    names, told = [display_name(capture) for capture in captures], list[str]()
    for capture, name in zip(captures, names, strict=True):
        is_alone = names.count(name) == 1
        told.append(name if is_alone else f"{_name(capture.resolve().parent)}/{name}")
    for number, (capture, name) in enumerate(zip(captures, told, strict=True)):
        again = told[:number].count(name)
        yield Run(f"{name} ({again + 1})" if again else name, capture)


def _name(path: Path) -> str:
    return display_name(path if path.name not in {"", ".", ".."} else path.resolve())


def captures_in(path: Path) -> list[Path]:
    """List the captures that a path stands for, by name, numbers in them by size.

    Parameters
    ----------
    path : Path
        A capture, or a folder.

    Returns
    -------
    list of Path
        Of a report and its export the one that was changed last.

    Raises
    ------
    NsanError
        If there is nothing, it may not be read, or a folder has no capture, or both captures and folders of them.
    """
    if not is_folder(path) or _is_capture_folder(path):
        return [path]
    files = _files(path)
    folders = sorted((each for each in _inside(path) if each.is_dir()), key=_by_number)
    inside = {
        folder: [folder] if _is_capture_folder(folder) else _files(folder) for folder in folders
    }
    exported = {file.stem + end for file in files for end in _EXPORTED}
    if (path / BENCH).is_file():
        exported.add(STORE_BESIDE)  # made of the capture beside it
    deeper = [each for each, captures in inside.items() if captures and each.name not in exported]
    if files and deeper:
        msg = (
            f"{_name(path)} has captures, and folders of captures: {few((shortened(_name(each), 60) for each in deeper), 3)}. "
            "Which are its runs? Put them into a folder of their own, or name them one by one."
        )
        raise UsageError(msg)
    found = files or [capture for captures in inside.values() for capture in captures]
    if not found:
        msg = f"{_name(path)} is a folder without a capture. Give a trace, or a folder of traces."
        raise UsageError(msg)
    return found


def _inside(folder: Path) -> list[Path]:
    try:
        return [*folder.iterdir()]
    except PermissionError as error:
        raise NoPermissionError(folder) from error
    except OSError as error:
        raise InputMissingError(folder) from error


def _is_capture_folder(folder: Path) -> bool:
    """Say whether a folder is one capture: a store, or tables that nsys exported."""
    if is_store(folder):
        return True
    try:
        return identify(folder) == "tables"
    except NsanError:
        return False


def _files(folder: Path) -> list[Path]:
    """List the captures that lie in a folder itself."""
    newest: dict[tuple[str, bool], Path] = {}
    for file in sorted(_inside(folder), key=_by_number):
        if not _is_capture(file):
            continue
        of_nsys = file.suffix in CAPTURE_SUFFIXES
        key = (file.stem if of_nsys else file.name.removesuffix(".gz"), of_nsys)
        other = newest.get(key)
        if other is None or file.stat().st_mtime_ns > other.stat().st_mtime_ns:
            newest[key] = file
    return [*newest.values()]


def _is_capture(path: Path) -> bool:
    """Say whether a file is a capture; by its name already, so that a damaged one is not passed over."""
    if not path.is_file() or path.name.startswith("."):
        return False
    if path.suffix in CAPTURE_SUFFIXES:
        return True
    try:
        return identify(path) != "sqlite"
    except NsanError:
        return False


def _by_number(path: Path) -> tuple[list[tuple[str, int]], str]:
    """Sort key: run 2 before run 10."""
    parts = re.findall(r"(\D*)(\d*)", path.name)
    return [(text, int(digits or 0)) for text, digits in parts], path.name
