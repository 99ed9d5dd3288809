"""Find nsys and its importer, run them, and say in plain words how they failed.

Standard library only. nsys reports failure by its exit status, and on a full disk not even by that;
what went wrong stands in its text. The texts are those of nsys 2022.4 and 2023.4.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nsan.errors import OutputExistsError, StoreWriteError, UsageError
from nsan.io.tidy import postponed
from nsan.nsys_errors import (
    ImporterNotFoundError,
    NotAReportError,
    NsysError,
    NsysFailedError,
    NsysNoOutputError,
    NsysNotExecutableError,
    NsysNotFoundError,
    NsysTimeoutError,
    ReportCutShortError,
    ReportTooNewError,
    StreamVersionError,
)

PROGRAM_VARIABLE: Final = "NSYS"
SECONDS_VARIABLE: Final = "NSAN_NSYS_TIMEOUT"

_DEFAULT_SECONDS: Final = 3600.0
_VERSION_SECONDS: Final = 10.0
_LAST_LINES: Final = 8
_FOLDERS: Final = (
    "/opt/nvidia/nsight-systems",
    "/opt/nvidia/nsight-systems-cli",
    "/usr/local/cuda/bin",
)
_PLACES: Final = ("nsys", "bin/nsys", "*/bin/nsys", "*/target-linux-*/nsys")
_STREAM_HEAD: Final = re.compile(rb"Nsight Systems Stream (\d+(?:\.\d+)+)")
_TOO_NEW: Final = re.compile(r"created in Nsight Systems version \(([^)]*)\).*version \(([^)]*)\)")
_BAD_VERSION: Final = re.compile(r"Version number is invalid: (\S+)")
_BAD_STREAM_VERSION: Final = re.compile(r"Qdstrm version (\S+) is not supported")
_CUT_SHORT: Final = ("Section Table Reference", "Cannot read from stream")
_NOT_A_REPORT: Final = ("Version tag", "Invalid version prefix")
_NOT_A_STREAM: Final = ("Qdstrm file is incomplete or invalid", "VersionTagReaderException")
_FULL: Final = ("disk is full", "No space left")
_PROGRESS: Final = re.compile(r"\[[=\s]*\d+%[=\s]*\]")


@dataclass(frozen=True)
class Finished:
    """How a run of a program ended.

    Attributes
    ----------
    status : int
        Exit status; negative for a signal.
    lines : tuple of str
        What it printed on both streams, without progress bars and empty lines.
    """

    status: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """All lines in one."""
        return "\n".join(self.lines)

    def saying(self, *marks: str) -> str | None:
        """Return the first line that holds one of some marks."""
        return next((line for line in self.lines if any(mark in line for mark in marks)), None)


def programs() -> list[Path]:
    """Find every nsys: the one that NSYS names, or that on PATH and those in the usual folders.

    Returns
    -------
    list of Path
        The preferred one first: PATH, then the newest version. A program that NSYS names stands
        alone.

    Raises
    ------
    NsysNotExecutableError
        If NSYS names something that cannot be run.
    """
    chosen = os.environ.get(PROGRAM_VARIABLE)
    if chosen:
        program = shutil.which(chosen)
        if program is None:
            raise NsysNotExecutableError(chosen)
        return [Path(program)]
    on_path = shutil.which("nsys")
    found = [Path(on_path)] if on_path else []
    installed = {program.resolve(): program for program in _installed()}
    known = {program.resolve() for program in found}
    rest = [program for real, program in installed.items() if real not in known]
    return found + sorted(rest, key=_version_in_path, reverse=True)


def find_nsys() -> Path | None:
    """Return the preferred nsys; None if there is none.

    Raises
    ------
    NsysNotExecutableError
        If NSYS names something that cannot be run.
    """
    return next(iter(programs()), None)


def _installed() -> Iterator[Path]:
    for folder in map(Path, _FOLDERS):
        for place in _PLACES:
            for program in folder.glob(place):
                if program.is_file() and os.access(program, os.X_OK):
                    yield program


def _version_in_path(program: Path) -> tuple[int, ...]:
    numbers = [part for part in program.resolve().parts if part[:1].isdigit()]
    return _numbers(numbers[0]) if numbers else ()


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _short(version: str) -> str:
    """Cut a version to the part that a download is known by: ``2026.1.1.54-2344v0`` to 2026.1.1."""
    return ".".join(map(str, _numbers(version)[:3])) or version


def version_of(program: Path) -> str:
    """Ask a program for its version; ``unknown`` if it does not tell."""
    try:
        done = run_tool([program, "--version"], about=program, seconds=_VERSION_SECONDS)
    except NsysError:
        return "unknown"
    found = re.search(r"version:? *(\d+(?:\.\d+)+)", done.text)
    return _short(found[1]) if found else "unknown"


def time_limit() -> float:
    """Return how many seconds nsys may take: NSAN_NSYS_TIMEOUT, or an hour."""
    text = os.environ.get(SECONDS_VARIABLE)
    if not text:
        return _DEFAULT_SECONDS
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if 0 < seconds < float("inf"):
            return seconds
    msg = f"{SECONDS_VARIABLE}={text!r} is not a number of seconds above 0."
    raise UsageError(msg)


def run_tool(
    command: Sequence[Path | str], *, about: Path, seconds: float | None = None
) -> Finished:
    """Run a program to its end, without a shell and without a terminal.

    Parameters
    ----------
    command : sequence of Path or str
        The program and its arguments.
    about : Path
        What it works on, for messages.
    seconds : float, optional
        Time limit; :func:`time_limit` by default.

    Returns
    -------
    Finished
        Its status, whatever that is, and what it said.

    Raises
    ------
    NsysNotExecutableError, NsysTimeoutError
        If it cannot be started, or does not end in time; it is stopped then, with its children.
    """
    limit = time_limit() if seconds is None else seconds
    process = None
    try:
        # Ctrl-C that comes while it starts is felt when it can be stopped.
        with postponed():
            process = _started(command)
        raw, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired as error:
        _stop(process)
        raise NsysTimeoutError(about, str(command[0]), limit) from error
    except BaseException:
        # Ctrl-C reaches this process only, for the other has its own group.
        _stop(process)
        raise
    return Finished(process.returncode, tuple(_lines(raw)))


def _started(command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
    """Start a program in a group of its own, so that it can be stopped with its children."""
    try:
        return subprocess.Popen(  # noqa: S603 - programs found by name, without a shell
            [os.fspath(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise NsysNotExecutableError(str(command[0]), error.strerror or str(error)) from error


def _stop(process: subprocess.Popen[bytes] | None) -> None:
    """Stop a program and its children, if it was started; wait until it is gone."""
    if process is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with process:
        pass


def _lines(raw: bytes) -> Iterator[str]:
    for line in re.split(r"[\r\n]+", raw.decode("utf-8", errors="replace")):
        if line.strip() and not _PROGRESS.search(line):
            yield line.strip()[:300]


def export_report(report: Path, output: Path, *, tables: str | None = None) -> None:
    """Export a report to SQLite, by the first nsys that is new enough for it.

    Parameters
    ----------
    report : Path
        A `.nsys-rep` or `.qdrep`; it is only read.
    output : Path
        The file to make.
    tables : str, optional
        Export only the tables of these names, comma-separated; nsys of 2022 cannot.

    Raises
    ------
    NsysError, OutputExistsError, StoreWriteError, UsageError
        One for each way in which it goes wrong; then no output is left.
    """
    found = programs()
    if not found:
        raise NsysNotFoundError(report)
    too_new: ReportTooNewError | None = None
    for program in found:
        try:
            _export_with(program, report, output, tables)
        except ReportTooNewError as error:
            too_new = too_new or error
        else:
            return
    if too_new is not None:
        raise too_new


def _export_with(program: Path, report: Path, output: Path, tables: str | None) -> None:
    chosen = [f"--tables={tables}"] if tables else []
    # Whole paths: a name that begins with a dash would be taken for an option.
    command: list[Path | str] = [
        program,
        "export",
        "--type",
        "sqlite",
        "--output",
        output.absolute(),
        *chosen,
    ]
    _make(
        [*command, report.absolute()], report, output, lambda done: _refusal(done, report, program)
    )


def _make(
    command: Sequence[Path | str],
    source: Path,
    output: Path,
    refusal: Callable[[Finished], NsysError | None],
) -> None:
    """Run a command that makes a file; leave the file whole, or none."""
    if output.exists():
        raise OutputExistsError(output)
    program = str(command[0])
    try:
        done = run_tool(command, about=source)
        if done.saying(*_FULL):
            raise StoreWriteError(output.parent, "No space left on device")
        if done.saying("already exists"):
            raise OutputExistsError(output)
        if done.status != 0:
            last = done.lines[-_LAST_LINES:]
            raise refusal(done) or NsysFailedError(source, program, done.status, last)
        if not output.is_file():
            raise NsysNoOutputError(source, program, "no output")
        if output.stat().st_size == 0:
            raise NsysNoOutputError(source, program, "an output of 0 bytes")
    except BaseException:
        output.unlink(missing_ok=True)
        raise


def _refusal(done: Finished, report: Path, program: Path) -> NsysError | None:
    """Tell why nsys refuses a report; None if it is for another reason."""
    newer = _TOO_NEW.search(done.text)
    if newer:
        return ReportTooNewError(report, _short(newer[1]), _short(newer[2]))
    bad = _BAD_VERSION.search(done.text)
    if bad:
        # Until 2022 nsys could not even read the version of a later report.
        made_by, own = _short(bad[1].replace("@", ".")), version_of(program)
        if _numbers(made_by) > _numbers(own):
            return ReportTooNewError(report, made_by, own)
        return NotAReportError(report, bad[0])
    if said := done.saying(*_CUT_SHORT):
        return ReportCutShortError(report, said)
    if said := done.saying(*_NOT_A_REPORT):
        return NotAReportError(report, said)
    return None


def import_stream(stream: Path, report: Path) -> None:
    """Make a report of the raw stream of a recording, by the importer of its version.

    Parameters
    ----------
    stream : Path
        A `.qdstrm`. The importer of 2023.4 appends to it: give it a copy.
    report : Path
        The report to make.

    Raises
    ------
    NsysError, OutputExistsError, StoreWriteError, UsageError
        One for each way in which it goes wrong; then no report is left.
    """
    version = _stream_version(stream)
    found = sorted(_importers(), key=lambda program: not _is_of(program, version))
    if not found:
        raise ImporterNotFoundError(stream, version)
    command: list[Path | str] = [
        found[0],
        "--input-file",
        stream.absolute(),
        "--output-file",
        report.absolute(),
    ]
    _make(command, stream, report, lambda done: _stream_refusal(done, stream, found))


def _stream_version(stream: Path) -> str | None:
    with stream.open("rb") as file:
        head = _STREAM_HEAD.search(file.read(256))
    return _short(head[1].decode()) if head else None


def _importers() -> Iterator[Path]:
    on_path = shutil.which("QdstrmImporter")
    if on_path:
        yield Path(on_path)
    for program in programs():
        # nsys stands in bin or target-linux-x64 of a version, the importer in host-linux-x64.
        for importer in program.resolve().parent.parent.glob("host-linux-*/QdstrmImporter"):
            if os.access(importer, os.X_OK):
                yield importer


def _is_of(importer: Path, version: str | None) -> bool:
    return version is not None and _version_in_path(importer)[:3] == _numbers(version)


def _stream_refusal(done: Finished, stream: Path, importers: Sequence[Path]) -> NsysError | None:
    """Tell why the importer refuses a stream; None if it is for another reason."""
    bad = _BAD_STREAM_VERSION.search(done.text)
    if bad:
        versions = [version_of(importer) for importer in importers]
        return StreamVersionError(stream, _short(bad[1]), versions)
    if said := done.saying(*_NOT_A_STREAM):
        return NotAReportError(stream, said, "a whole nsys stream")
    return None
