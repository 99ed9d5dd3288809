"""A program of the benchmark under many conditions: factor x allocator x hint, with resume.

Each run has a folder of its own, as :mod:`nsan.microbench.running` makes it; ``sweep.json`` says what became of each,
``sweep.csv`` what it cost. (A ``manifest.json`` would make the sweep look like a store.) Both are written after every
run, so that whatever ends a sweep leaves them right.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import polars as pl

import nsan
from nsan.errors import OutputWriteError, PlaceTakenError, UsageError
from nsan.io.manifest import is_store
from nsan.microbench.conditions import hint_of
from nsan.microbench.costs import costs
from nsan.microbench.places import OK, check_place, read_document, resolved
from nsan.microbench.running import Outcome, finished, run
from nsan.microbench.work import Work

MANIFEST: Final = "sweep.json"
TABLE: Final = "sweep.csv"
FORMAT: Final = 1

VARIED: Final = {
    "--pattern": "--patterns",
    "--oversubscription-factor": "--factors",
    "--allocator": "--allocators",
    "--prefetch": "--prefetches",
    "--advice": "--advices",
}
"""Flags of a program that a sweep gives itself, and the option that says which values."""

_CONDITIONS: Final = ("allocator", "factor", "hint")

Tell = Callable[[str, str], None]
"""Takes the name of a run and what is done with it: "run", "kept"."""


@dataclass(frozen=True)
class Case:
    """One run of a sweep.

    Attributes
    ----------
    allocator : str
        "raw" or "caching".
    factor : float or None
        Footprint over GPU memory; None: as much as is free.
    prefetch, advice : str
        As the programs name them.
    pattern : str or None
        Of ``uvm_bench``; None: what its flags say.
    repeat : int or None
        From 1, where each condition runs several times.
    """

    allocator: str
    factor: float | None
    prefetch: str
    advice: str
    pattern: str | None = None
    repeat: int | None = None

    @property
    def hint(self) -> str:
        """What the driver is told, in one word."""
        return hint_of(self.prefetch, self.advice) or "none"

    @property
    def asked(self) -> dict[str, Any]:
        """What is asked for, by name."""
        names = ("pattern", "allocator", "factor", "prefetch", "advice", "repeat")
        return {name: getattr(self, name) for name in names}

    @property
    def folder(self) -> str:
        """Name of the folder of this run."""
        factor = "free" if self.factor is None else f"{self.factor:g}"
        parts = [
            self.pattern,
            self.allocator,
            factor,
            self.hint.replace(":", "-").replace("+", "-"),
        ]
        parts += [f"r{self.repeat}"] if self.repeat else []
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class How:
    """How the runs of a sweep are made.

    Attributes
    ----------
    profiled : bool
        Under nsys, too.
    keep_failed : bool
        Leave runs that did not end well as they are; without it they are tried again.
    """

    profiled: bool = True
    keep_failed: bool = False


def cases(
    *,
    factors: Sequence[float | None],
    allocators: Sequence[str],
    hints: Sequence[tuple[str, str]],
    patterns: Sequence[str | None] = (None,),
    repeats: int = 1,
) -> list[Case]:
    """List the runs of a sweep.

    Parameters
    ----------
    factors : sequence of float or None
        Oversubscription factors; None: as much as is free.
    allocators : sequence of str
        "raw", "caching".
    hints : sequence of (str, str)
        Prefetch and advice.
    patterns : sequence of str or None
        Of ``uvm_bench``.
    repeats : int, default 1
        How often each is run. All conditions run once, then all of them again, so that a slow drift of the machine
        is not taken for a difference between them.

    Returns
    -------
    list of Case
        Every combination, each once.

    Raises
    ------
    UsageError
        If there is none, or two of them would have the same folder.
    """
    numbers = [None] if repeats == 1 else list(range(1, repeats + 1))
    found = [
        Case(allocator, factor, *hint, pattern, number)
        for number, pattern, factor, allocator, hint in product(
            numbers, patterns, factors, allocators, hints
        )
    ]
    found = list(dict.fromkeys(found))
    if not found:
        msg = "A sweep without a factor, allocator or hint has no run: name at least one of each."
        raise UsageError(msg)
    names = [case.folder for case in found]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        msg = f"Two conditions would be called {double}: give factors that differ in six digits."
        raise UsageError(msg)
    return found


def sweep(
    work: Work,
    wanted: Sequence[Case],
    folder: Path,
    *,
    how: How | None = None,
    tell: Tell | None = None,
) -> list[dict[str, Any]]:
    """Run every case that is not there yet.

    Parameters
    ----------
    work : Work
        The program, and flags that all runs have in common.
    wanted : sequence of Case
        The runs.
    folder : Path
        Gets a folder per run, ``sweep.json`` and ``sweep.csv``. A run that ended well and was made in the same way is
        kept: an interrupted sweep goes on where it was.
    how : How, optional
        How they are made.
    tell : callable, optional
        Called before each run.

    Returns
    -------
    list of dict
        One row per case, in their order, as in ``sweep.csv``.

    Raises
    ------
    BenchEndedError
        If no run could go otherwise: no driver, or a flag that the program does not know.
    OutputWriteError, PlaceTakenError
        If a run of that name is there, but was made in another way or by something else; or another sweep is at work
        in the folder.
    """
    how = how or How()
    folder = resolved(folder)
    is_new = not folder.exists()
    _check_place(folder)
    try:
        with _alone_in(folder):
            works = [work_of(work, case) for case in wanted]
            earlier = [
                _earlier(folder / each.folder, own, how)
                for each, own in zip(wanted, works, strict=True)
            ]
            _Sweep(folder, work, wanted, how, tell).make(works, earlier)
            return _rows(folder, wanted)
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()  # of a sweep that could not even begin


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other sweeps out of a folder: two that measure side by side measure each other."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OutputWriteError(folder, error.strerror or str(error)) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PlaceTakenError(folder, "is where another sweep is at work now") from error
        except OSError:
            pass  # some file systems of a network cannot lock
        yield
    finally:
        os.close(descriptor)


@dataclass
class _Sweep:
    """A sweep under way."""

    folder: Path
    work: Work
    wanted: Sequence[Case]
    how: How
    tell: Tell | None

    def make(self, works: Sequence[Work], earlier: Sequence[Outcome | None]) -> None:
        for case, own, there in zip(self.wanted, works, earlier, strict=True):
            place = self.folder / case.folder
            if self.tell:
                self.tell(case.folder, "run" if there is None else "kept")
            if there is None:
                run(own, place, profiled=self.how.profiled)
            # Written each time: what ends a sweep gives no notice.
            self._write()

    def _write(self) -> None:
        _write(self.folder / MANIFEST, json.dumps(self._manifest(), indent=1) + "\n")
        rows = _rows(self.folder, self.wanted)
        _write(self.folder / TABLE, pl.DataFrame(rows, infer_schema_length=None).write_csv())

    def _manifest(self) -> dict[str, Any]:
        return {
            "nsan_bench_sweep": FORMAT,
            "nsan_version": nsan.__version__,
            "program": self.work.program,
            "arguments": self.work.shown_arguments,
            "profiled": self.how.profiled,
            "runs": [_entry(self.folder, case) for case in self.wanted],
        }


def _entry(folder: Path, case: Case) -> dict[str, Any]:
    """Say what became of a run."""
    document = read_document(folder / case.folder) or {}
    seconds = [document.get("seconds_alone"), document.get("seconds_nsys")]
    return {
        "folder": case.folder,
        "condition": document.get("condition", case.asked),
        "status": document.get("status", "not_run"),
        "reason": document.get("reason"),
        "digest": document.get("digest"),
        "seconds": sum(filter(None, seconds)) if document else None,
    }


def work_of(work: Work, case: Case) -> Work:
    """Say what one run does.

    Parameters
    ----------
    work : Work
        What all runs have in common.
    case : Case
        The conditions.

    Returns
    -------
    Work
        With the flags of the case.
    """
    flags = ["--allocator", case.allocator, "--prefetch", case.prefetch, "--advice", case.advice]
    if case.pattern is not None:
        flags += ["--pattern", case.pattern]
    if case.factor is not None:
        flags += ["--oversubscription-factor", f"{case.factor!r}"]
    return replace(work, arguments=(*flags, *work.arguments), asked=case.asked)


def check_flags(arguments: Sequence[str], *, patterns: bool) -> None:
    """Refuse flags that a sweep gives a program itself.

    Parameters
    ----------
    arguments : sequence of str
        Flags for the program.
    patterns : bool
        Whether the sweep varies the pattern.

    Raises
    ------
    UsageError
        If there is one.
    """
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag in VARIED and (patterns or flag != "--pattern"):
            raise UsageError(f"{flag} is what the sweep varies: use {VARIED[flag]} instead.")


def _earlier(place: Path, work: Work, how: How) -> Outcome | None:
    """Find what an earlier sweep left of a run; None: it has to be made.

    Raises
    ------
    PlaceTakenError
        If making it would destroy something.
    """
    if not place.exists():
        return None
    document = read_document(place)
    if document is None or document["status"] != OK:
        check_place(place, overwrite=False)
    if document is None:
        return None  # an empty folder
    same = document["digest"] == work.digest(profiled=how.profiled)
    if document["status"] != OK:
        return finished(place, document) if same and how.keep_failed else None
    if not same:
        raise PlaceTakenError(place, "is there, and was made in another way")
    return finished(place, document)


def _check_place(folder: Path) -> None:
    """Make the folder; refuse one where a file of something else would be lost."""
    if folder.exists() and not folder.is_dir():
        raise PlaceTakenError(folder, "is a file")
    if is_store(folder):
        raise PlaceTakenError(folder, "is a store")
    for name, mark in ((MANIFEST, '"nsan_bench_sweep"'), (TABLE, ",".join(_CONDITIONS))):
        place = folder / name
        if place.exists() and mark not in _head(place):
            raise PlaceTakenError(place, "is there, and is not of a sweep of `nsan bench`")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputWriteError(folder, error.strerror or str(error)) from error


def _head(place: Path) -> str:
    try:
        with place.open(encoding="utf-8") as file:
            return file.read(1000)
    except (OSError, UnicodeDecodeError):
        return ""


def _rows(folder: Path, wanted: Sequence[Case]) -> list[dict[str, Any]]:
    """Write a row for each case, whether it has run or not."""
    rows = []
    for case in wanted:
        place = folder / case.folder
        document = read_document(place)
        conditions = {"allocator": case.allocator, "factor": case.factor, "hint": case.hint}
        conditions |= {"pattern": case.pattern, "repeat": case.repeat}
        state = {"status": "not_run", "reason": None, "folder": case.folder}
        if document is not None:
            state |= {"status": document["status"], "reason": document["reason"]}
        found = {} if document is None else costs(finished(place, document))
        rows.append({**conditions, **state, **found})
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in keys} for row in rows]


def _write(place: Path, text: str) -> None:
    """Write a file beside its place and then into it."""
    beside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(place)
    except OSError as error:
        raise OutputWriteError(place, error.strerror or str(error)) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def all_well(rows: Sequence[dict[str, Any]]) -> bool:
    """Say whether every run of a sweep ended well."""
    return all(row["status"] == OK for row in rows)
