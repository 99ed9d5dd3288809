"""The tables that a program of the microbenchmark writes of itself, found beside its capture and read.

``NAME.truth`` beside ``NAME.nsys-rep`` (or ``.qdstrm``, ``.sqlite``, a folder of tables) says what the
program allocated, under which names. Standard library only: the fingerprint of a capture takes them in.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nsan.errors import NsanError
from nsan.io.probe import CAPTURE_SUFFIXES, display_name

TRUTH_SUFFIX: Final = ".truth"
ABOUT: Final = "run.json"
ALLOCATIONS: Final = "allocations.csv"
FORMAT: Final = 1
"""Version of the tables; the programs write it as ``nsan_microbench``."""

BENCH: Final = "bench.json"
"""How a run was made: `nsan bench run` leaves it in the run's folder."""

BENCH_FORMAT: Final = 1
"""Version of it, as ``nsan_bench``."""

_FOLDER_ENDS: Final = ("_pqtdir", "_arwdir")
_COLUMNS: Final = ("allocation", "name", "role", "kind", "va", "bytes", "alloc_ns", "free_ns")
_KINDS: Final = frozenset({"managed", "device"})
_MOST_BYTES: Final = 1 << 29
_LARGEST: Final = (1 << 63) - 1
_LATEST_NS: Final = (1 << 62) - 1
"""In the year 2116; half of what 64 bits hold, so that sums of two hold, too."""

_HIGHEST_VA: Final = (1 << 64) - 1


class TruthError(NsanError):
    """The tables beside a capture cannot be used; ``problem`` says why."""

    def __init__(self, folder: Path, problem: str) -> None:
        self.folder, self.problem = folder, problem
        super().__init__(
            f"{display_name(folder)}, which should name the allocations of this capture, is not used: {problem}. "
            "Copy it again from where the benchmark ran, or run that again; without it the capture is read as it is."
        )


@dataclass(frozen=True)
class TruthRow:
    """One allocation as the program knows it.

    Attributes
    ----------
    name : str
        Any text.
    kind : str
        "managed" or "device".
    va, n_bytes : int
        Where, and how much was asked for.
    alloc_ns : int
        When, from :attr:`Truth.start_utc_ns`.
    """

    name: str
    kind: str
    va: int
    n_bytes: int
    alloc_ns: int


@dataclass(frozen=True)
class Truth:
    """What a run says of itself.

    Attributes
    ----------
    source : str
        Name of its folder, for people.
    about : dict
        The content of ``run.json``.
    rows : tuple of TruthRow
        Allocations in the order in which they were made.
    """

    source: str
    about: dict[str, Any]
    rows: tuple[TruthRow, ...]

    @property
    def pid(self) -> int:
        """Process that ran."""
        return int(self.about["pid"])

    @property
    def start_utc_ns(self) -> int | None:
        """When its times begin, ns since 1970; None: it does not say."""
        found = self.about.get("start_utc_ns")
        return found if type(found) is int else None


def truth_beside(capture: Path) -> Path | None:
    """Find the tables that a program wrote of the run that a capture is of.

    Parameters
    ----------
    capture : Path
        A file or a folder of tables.

    Returns
    -------
    Path or None
        The folder; None if there is none, or one of something else.
    """
    # A link may lie beside tables of its own name; what it leads to has its own beside it.
    named = [] if capture.name in {"", ".."} else [capture]
    with contextlib.suppress(OSError, RuntimeError):
        named.append(capture.resolve())
    for path in named:
        folder = path.with_name(stem_of(path) + TRUTH_SUFFIX) if path.name else None
        if folder is not None and any(
            os.path.lexists(folder / name) for name in (ABOUT, ALLOCATIONS)
        ):
            return folder
    return None


def stem_of(capture: Path) -> str:
    """Return the name that a capture shares with what lies beside it."""
    if capture.suffix in CAPTURE_SUFFIXES:
        return capture.stem
    for end in _FOLDER_ENDS:
        if capture.name.endswith(end):
            return capture.name.removesuffix(end)
    return capture.name


def truth_files(capture: Path) -> list[Path]:
    """List the files beside a capture that decide the names of its allocations."""
    folder = truth_beside(capture)
    if folder is None:
        return []
    return [folder / name for name in (ABOUT, ALLOCATIONS) if (folder / name).is_file()]


def read_about(folder: Path) -> dict[str, Any]:
    """Read what a run says of itself.

    Parameters
    ----------
    folder : Path
        Its folder of tables.

    Returns
    -------
    dict
        The content of ``run.json``.

    Raises
    ------
    TruthError
        If it is missing, damaged, or of another version.
    """
    try:
        about = json.loads(_text(folder, ABOUT), parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise TruthError(folder, f"{ABOUT} is no JSON, or was cut short") from error
    if not isinstance(about, dict) or "nsan_microbench" not in about:
        raise TruthError(folder, f"{ABOUT} was not written by the benchmark")
    if about["nsan_microbench"] != FORMAT:
        raise TruthError(
            folder,
            f"{ABOUT} is of another version of the benchmark than this nsan reads ({FORMAT})",
        )
    pid = about.get("pid")
    if isinstance(pid, bool) or not isinstance(pid, int) or not 0 < pid < 1 << 32:
        raise TruthError(folder, f"{ABOUT} does not say which process ran")
    start = about.get("start_utc_ns")
    if type(start) is int and not 0 <= start <= _LATEST_NS:
        raise TruthError(folder, f"{ABOUT} says a time at which nothing ran")
    return about


def _refused(constant: str) -> None:
    """Refuse NaN and Infinity, which are no JSON."""
    raise ValueError(constant)


def read_truth(folder: Path) -> Truth:
    """Read the tables of a run, as far as names of allocations need them.

    Parameters
    ----------
    folder : Path
        As :func:`truth_beside` finds it.

    Returns
    -------
    Truth
        What the run says of itself.

    Raises
    ------
    TruthError
        If a table is missing, damaged, or of another version.
    """
    about = read_about(folder)
    return Truth(display_name(folder), about, tuple(_rows(folder)))


def _text(folder: Path, name: str) -> str:
    """Read a file; bytes that are no text are replaced, for names are only shown."""
    path = folder / name
    try:
        if not path.is_file():
            raise TruthError(folder, f"{name} is missing")
        if path.stat().st_size > _MOST_BYTES:
            raise TruthError(folder, f"{name} is larger than {_MOST_BYTES >> 20} MiB")
        return path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise TruthError(folder, f"{name} cannot be read ({error.strerror})") from error


def _lines(
    folder: Path, name: str, columns: tuple[str, ...]
) -> Iterator[tuple[int, dict[str, str | None]]]:
    """Give the rows of a table, each with the number of its (last) line."""
    text = _text(folder, name)
    if not text.endswith("\n"):
        raise TruthError(folder, f"{name} was cut short")
    # Line ends inside of quotes belong to a name, and what only Unicode takes for one does anywhere.
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        if tuple(reader.fieldnames or ())[: len(columns)] != columns:
            raise TruthError(folder, f"{name} has other columns than {', '.join(columns)}")
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        # Its own count stays at the last good row.
        line = f"line {reader.reader.line_num} of {name}"
        raise TruthError(folder, f"{line} is damaged ({error})") from error


def _rows(folder: Path) -> Iterator[TruthRow]:
    for line, row in _lines(folder, ALLOCATIONS, _COLUMNS):
        yield _row(row, line, folder)


def _row(row: dict[str, str | None], line: int, folder: Path) -> TruthRow:
    name, kind = row["name"], row["kind"]
    va, n_bytes, alloc_ns = (
        _number(row[column], most)
        for column, most in (("va", _HIGHEST_VA), ("bytes", _LARGEST), ("alloc_ns", _LATEST_NS))
    )
    if name is None or kind not in _KINDS or va is None or n_bytes is None or alloc_ns is None:
        raise TruthError(folder, f"line {line} of {ALLOCATIONS} is damaged")
    return TruthRow(name, kind, va, n_bytes, alloc_ns)


def _number(text: str | None, most: int) -> int | None:
    """Read a whole number from 0 to some other; None if it is none."""
    if text is None or not (text.isascii() and text.isdecimal() and len(text) <= len(str(most))):
        return None
    number = int(text)
    return number if number <= most else None


PHASES: Final = "phases.csv"
EXPECTED: Final = "expected.csv"

_PHASE_COLUMNS: Final = ("phase", "name", "iteration", "start_ns", "end_ns")
_EXPECTED_COLUMNS: Final = ("phase", "allocation", "direction", "least_bytes", "most_bytes")
_DIRECTIONS: Final = ("htod", "dtoh")


@dataclass(frozen=True)
class PhaseRow:
    """One phase of a run: an NVTX range of its trace, too.

    Attributes
    ----------
    name : str
        Name of the range.
    iteration : int or None
        From 0; None: not part of one.
    """

    name: str
    iteration: int | None


@dataclass(frozen=True)
class ExpectedRow:
    """Bytes of one allocation that certainly migrate in one phase and direction.

    Attributes
    ----------
    phase, allocation : int
        Places in the tables of phases and of allocations.
    direction : str
        "htod" or "dtoh".
    least_bytes, most_bytes : int
        At least and at most so many.
    """

    phase: int
    allocation: int
    direction: str
    least_bytes: int
    most_bytes: int


def read_phases(folder: Path) -> tuple[PhaseRow, ...]:
    """Read the phases of a run.

    Parameters
    ----------
    folder : Path
        Its folder of tables.

    Returns
    -------
    tuple of PhaseRow
        In the order in which they began.

    Raises
    ------
    TruthError
        If the table is missing or damaged.
    """
    phases: list[PhaseRow] = []
    for line, row in _lines(folder, PHASES, _PHASE_COLUMNS):
        number, name = _number(row["phase"], _LARGEST), row["name"]
        iteration = _number(row["iteration"], _LARGEST) if row["iteration"] else None
        if number != len(phases) or name is None or (row["iteration"] and iteration is None):
            raise TruthError(folder, f"line {line} of {PHASES} is damaged")
        phases.append(PhaseRow(name, iteration))
    return tuple(phases)


def read_expected(folder: Path, n_phases: int, n_allocations: int) -> tuple[ExpectedRow, ...]:
    """Read how many bytes must migrate in a run, as far as that is certain.

    Parameters
    ----------
    folder : Path
        Its folder of tables.
    n_phases, n_allocations : int
        How many there are to speak of.

    Returns
    -------
    tuple of ExpectedRow
        In the order of the table.

    Raises
    ------
    TruthError
        If the table is missing or damaged, or speaks of a phase or an allocation that is not there.
    """
    expected = []
    for line, row in _lines(folder, EXPECTED, _EXPECTED_COLUMNS):
        found = _expected_row(row)
        if found is None or found.phase >= n_phases or found.allocation >= n_allocations:
            raise TruthError(folder, f"line {line} of {EXPECTED} is damaged")
        expected.append(found)
    return tuple(expected)


def _expected_row(row: dict[str, str | None]) -> ExpectedRow | None:
    phase, allocation, least, most = (
        _number(row[column], _LARGEST) for column in _EXPECTED_COLUMNS if column != "direction"
    )
    direction = row["direction"]
    if phase is None or allocation is None or least is None or most is None or least > most:
        return None
    if direction not in _DIRECTIONS:
        return None
    return ExpectedRow(phase, allocation, direction, least, most)
