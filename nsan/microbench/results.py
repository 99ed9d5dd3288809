"""What a device check brought home: parts are joined, the archive is unpacked safely, and its tables are read.

The archive comes from another machine, so it is data: nothing in it decides where anything is written.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import math
import re
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, cast

from nsan.errors import InputMissingError
from nsan.microbench.device_errors import ResultsError

ROOT: Final = "results"
CASES: Final = "cases.tsv"
STATUS: Final = "status.tsv"
MACHINE: Final = "machine.txt"
ABOUT: Final = "check.json"
"""What an imported check says of itself, beside the folders of its cases."""

UNREADABLE: Final = "unreadable"
"""Status of a case whose line cannot be read; the others are not lost for it."""

_PART: Final = re.compile(r"(?P<whole>.+)\.part-(?P<number>[a-z]{2})")
_ARCHIVE: Final = re.compile(r".+\.tar(?:\.xz|\.gz)?(?:\.part-[a-z]{2})?")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MOST_BYTES: Final = 8 << 30
_MOST_MEMBERS: Final = 20_000
_LARGEST_TABLE: Final = 4 << 20
_DEEPEST: Final = 3
_CHUNK_BYTES: Final = 1 << 20
_MOST_AT_ONCE: Final = _CHUNK_BYTES + (64 << 10)
_TAKEN: Final = frozenset({ABOUT, CASES, STATUS, MACHINE})
_COLUMNS: Final = (
    "case",
    "status",
    "alone",
    "recorded",
    "seconds_alone",
    "seconds_nsys",
    "stream_bytes",
    "reason",
)


@dataclass(frozen=True)
class CaseResult:
    """How a case ended on the GPU machine.

    Attributes
    ----------
    name : str
        Of the case, and of its files.
    status : str
        "ok", or what kept it from that; :data:`UNREADABLE` if its line cannot be read.
    exit_alone, exit_recorded : int or None
        Exit statuses without nsys and under it; None: it was not run.
    seconds_alone, seconds_nsys : float or None
        Wall times of both.
    reason : str
        One line if it is not "ok".
    flags : str
        What the program was asked for.
    program : str
        Which.
    """

    name: str
    status: str
    exit_alone: int | None
    exit_recorded: int | None
    seconds_alone: float | None
    seconds_nsys: float | None
    reason: str
    flags: str
    program: str

    @property
    def command(self) -> str:
        """The program and its flags, as they were typed."""
        return f"{self.program} {self.flags}".strip()


@dataclass(frozen=True)
class Results:
    """What came home.

    Attributes
    ----------
    folder : Path
        Where it is unpacked.
    machine : dict of str to str
        What the script found out about the machine, by name.
    switches : tuple of str
        Options of nsys.
    packed : dict
        What the archive with the script said of itself.
    cases : tuple of CaseResult
        In the order in which they ran.
    """

    folder: Path
    machine: dict[str, str]
    switches: tuple[str, ...]
    packed: dict[str, Any]
    cases: tuple[CaseResult, ...]


def unpack(paths: Sequence[Path], folder: Path) -> Results:
    """Unpack what came home, and read its tables.

    Parameters
    ----------
    paths : sequence of Path
        The archive, or all its parts in any order, or one folder that holds them.
    folder : Path
        An empty folder.

    Returns
    -------
    Results
        What is in it.

    Raises
    ------
    NsanError
        If a part is missing, the archive is damaged, or holds what a check does not make.
    """
    parts = _in_order(_files(paths))
    try:
        with _joined(parts) as joined, _unpacked(joined, parts[0]) as archive:
            _extract(archive, folder, parts[0])
    except _DAMAGES as error:
        raise ResultsError(
            parts[0], f"it is damaged, or not all of it is here ({error})"
        ) from error
    return _read(folder / ROOT, parts[0])


_DAMAGES: Final = (
    *(tarfile.TarError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError),
    # Of headers that hold no numbers where some belong, or headers of headers without end.
    *(ValueError, OverflowError, RecursionError),
)


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(each for each in path.iterdir() if _ARCHIVE.fullmatch(each.name))
            if not inside:
                raise ResultsError(
                    path, "this folder holds no results.tar, .tar.xz or parts of one"
                )
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise InputMissingError(path)
    return found


def _in_order(files: list[Path]) -> list[Path]:
    """Put parts into their order; a whole archive is its only part."""
    numbered = [(_PART.fullmatch(file.name), file) for file in files]
    wholes = sorted({found["whole"] if found else file.name for found, file in numbered})
    if len(wholes) > 1:
        raise ResultsError(files[0], f"these are of several archives: {', '.join(wholes)}")
    if len(files) == 1 and numbered[0][0] is None:
        return files
    numbers = {found["number"]: file for found, file in numbered if found}
    if len(numbers) < len(files):
        raise ResultsError(files[0], "a part of it is given twice, or with the whole")
    wanted = [_number(at) for at in range(len(numbers))]
    missing = [number for number in wanted if number not in numbers]
    if missing:
        raise ResultsError(files[0], f"part-{missing[0]} is missing")
    return [numbers[number] for number in wanted]


def _number(at: int) -> str:
    """Give the number of a part as ``split`` does: aa, ab and so on."""
    first = ord("a")
    return chr(first + at // 26) + chr(first + at % 26)


class _Joined(io.RawIOBase):
    """Several files as one."""

    def __init__(self, parts: Sequence[Path]) -> None:
        super().__init__()
        self._rest = list(parts)
        self._file: IO[bytes] | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        while True:
            if self._file is None:
                if not self._rest:
                    return 0
                self._file = self._rest.pop(0).open("rb")
            data = self._file.read(len(view))
            if data:
                view[: len(data)] = data
                return len(data)
            self._file.close()
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


def _joined(parts: Sequence[Path]) -> io.BufferedReader:
    return io.BufferedReader(_Joined(parts), _CHUNK_BYTES)


class _Forward:
    """What tarfile reads: forwards only, and never much at once.

    A header says itself how large it is, and tarfile would read all of it into memory.
    """

    def __init__(self, stream: IO[bytes], first: Path) -> None:
        self._stream, self._first, self._at = stream, first, 0

    def tell(self) -> int:
        return self._at

    def read(self, n_bytes: int) -> bytes:
        if not 0 <= n_bytes <= _MOST_AT_ONCE:
            raise ResultsError(self._first, "it has a header larger than any that tar writes")
        data = self._stream.read(n_bytes)
        self._at += len(data)
        if self._at > _MOST_BYTES:
            raise ResultsError(self._first, _FAR_MORE)
        return data

    def seek(self, to: int) -> None:
        while self._at < to and self.read(min(to - self._at, _CHUNK_BYTES)):
            pass
        if self._at > to:
            raise ResultsError(self._first, "it cannot be read from its start to its end")


_FAR_MORE: Final = "it holds far more than a device check makes"


def _unpacked(joined: io.BufferedReader, first: Path) -> tarfile.TarFile:
    head = joined.peek(6)
    stream: IO[bytes] = joined
    if head.startswith(b"\xfd7zXZ\x00"):
        stream = lzma.open(joined)  # noqa: SIM115 - it owns nothing: what it reads is closed
    elif head.startswith(b"\x1f\x8b"):
        stream = cast("IO[bytes]", gzip.GzipFile(fileobj=joined))
    elif not head:
        raise ResultsError(first, "it is empty")
    return tarfile.open(fileobj=cast("IO[bytes]", _Forward(stream, first)), mode="r:")


def _extract(archive: tarfile.TarFile, folder: Path, first: Path) -> None:
    """Write files and folders below ``results``; anything else is refused, whatever it is."""
    n_bytes = 0
    files: set[Path] = set()
    folders: set[Path] = set()
    for n_members, member in enumerate(archive):
        place = _place(member, first)
        n_bytes += member.size
        if n_bytes > _MOST_BYTES or n_members > _MOST_MEMBERS:
            raise ResultsError(first, _FAR_MORE)
        folders |= {*place.parents, *([place] * member.isdir())}
        if place in files or (member.isfile() and place in folders) or files & folders:
            raise ResultsError(first, f"it holds {member.name!r} twice")
        if member.isdir():
            (folder / place).mkdir(parents=True, exist_ok=True)
            continue
        files.add(place)
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        source = archive.extractfile(member)
        assert source is not None  # noqa: S101 - it is a file
        with (folder / place).open("xb") as target:
            while chunk := source.read(_CHUNK_BYTES):
                target.write(chunk)


def _place(member: tarfile.TarInfo, first: Path) -> Path:
    parts = member.name.removeprefix("./").rstrip("/").split("/")
    if not (member.isfile() or member.isdir()):
        raise ResultsError(first, f"it holds {member.name!r}, which is neither file nor folder")
    right = parts[0] == ROOT and len(parts) <= _DEEPEST and all(map(_NAME.fullmatch, parts))
    if not right or (member.isfile() and len(parts) == 1):
        raise ResultsError(first, f"it holds {member.name!r}, which no device check writes")
    return Path(*parts)


def _read(folder: Path, first: Path) -> Results:
    if not (folder / STATUS).is_file():
        raise ResultsError(first, f"it holds no {ROOT}/{STATUS}")
    for name in (STATUS, CASES, MACHINE, "switches", "pack.json"):
        if (folder / name).is_file() and (folder / name).stat().st_size > _LARGEST_TABLE:
            raise ResultsError(first, f"its {name} is far larger than that of a device check")
    asked = {row[0]: (row[1], row[4]) for row in _table(folder / CASES) if len(row) == 5}
    machine = {row[0]: row[1] for row in _table(folder / MACHINE) if len(row) == 2}
    switches = tuple(row[0] for row in _table(folder / "switches") if row)
    rows = _table(folder / STATUS)
    if not rows or tuple(rows[0]) != _COLUMNS:
        raise ResultsError(first, f"the head of its {STATUS} is not that of this version of nsan")
    cases = tuple(_case(row, asked, first) for row in rows[1:])
    seen: set[str] = set()
    for case in cases:
        if case.name in _TAKEN:
            raise ResultsError(first, f"a case in its {STATUS} is called {case.name!r}")
        if case.name in seen:
            raise ResultsError(first, f"its {STATUS} has the case {case.name!r} twice")
        seen.add(case.name)
    return Results(folder, machine, switches, _about(folder / "pack.json"), cases)


def _about(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _table(path: Path) -> list[list[str]]:
    if not path.is_file():
        return []
    # Whatever else a program says, only these two part lines and cells.
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    return [line.removesuffix("\r").split("\t") for line in lines if line]


def _case(row: list[str], asked: dict[str, tuple[str, str]], first: Path) -> CaseResult:
    """Read a line; one that cannot be read is marked, as its trace may be all right."""
    if not _NAME.fullmatch(row[0]):
        raise ResultsError(first, f"a line of its {STATUS} cannot be read: {row}")
    program, flags = asked.get(row[0], ("", ""))
    if len(row) == len(_COLUMNS):
        cells = dict(zip(_COLUMNS, row, strict=True))
        try:
            return CaseResult(
                name=row[0],
                status=cells["status"],
                exit_alone=_status(cells["alone"]),
                exit_recorded=_status(cells["recorded"]),
                seconds_alone=_seconds(cells["seconds_alone"]),
                seconds_nsys=_seconds(cells["seconds_nsys"]),
                reason=cells["reason"],
                flags=flags,
                program=program,
            )
        except ValueError:
            pass
    reason = f"its line of {STATUS} cannot be read: {row}"
    return CaseResult(row[0], UNREADABLE, None, None, None, None, reason, flags, program)


def _status(text: str) -> int | None:
    return int(text) if text else None


def _seconds(text: str) -> float | None:
    seconds = float(text) if text else None
    if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(text)
    return seconds
