"""Record a program with nsys: its unperturbed time first, then the trace, and the machine's facts.

What is made on the way stands in a folder beside the report's place and is moved there whole, so
that an interrupted recording leaves nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import nsan
from nsan.errors import OutputExistsError, OutputWriteError, ProgramNotFoundError
from nsan.io import nsys_cli
from nsan.io.descendants import end_descendants, marked_environment
from nsan.io.probe import REPORT_SUFFIXES, display_name
from nsan.io.tidy import scratch_beside, undisturbed
from nsan.nsys_errors import NsysProfileError, RecorderNotFoundError

SWITCHES: Final = (
    "--trace=cuda,nvtx",
    "--cuda-um-gpu-page-faults=true",
    "--cuda-um-cpu-page-faults=true",
    "--cuda-memory-usage=true",
    # CPU samples are of no use here, and would perturb the program further.
    "--sample=none",
    "--cpuctxsw=none",
)
FACTS_SUFFIX: Final = ".nsan.json"
_NO_AGENT: Final = "Local Endpoint is not available"
_STDERR: Final = 2
_GRACE_SECONDS: Final = 10
_LAST_LINES: Final = 8
_CHUNK_BYTES: Final = 1 << 16
_POLL_SECONDS: Final = 0.1
_UVM_PARAMETERS: Final = Path("/sys/module/nvidia_uvm/parameters")
_DRIVER_VERSION: Final = Path("/sys/module/nvidia/version")


@dataclass(frozen=True)
class Recording:
    """What was recorded, and how.

    Attributes
    ----------
    report : Path
        The nsys report.
    facts : Path
        JSON beside it with all that follows.
    seconds_alone : float or None
        Wall time of the program without nsys; None: not measured.
    seconds_nsys : float
        Wall time of nsys as a whole: its own start, the program, and writing the report.
    status_alone, status_recorded : int or None
        Exit status without nsys, and of nsys, which passes on that of the program.
    options : tuple of str
        Options of `nsys profile`: only traces made with the same ones are comparable in time.
    nsys_version : str
        Version of the nsys that recorded.
    driver_version : str or None
        Of the NVIDIA kernel module; None where it is not loaded.
    uvm_parameters : dict of str to str
        Parameters of the nvidia_uvm module; empty where it is not loaded.
    """

    report: Path
    facts: Path
    seconds_alone: float | None
    seconds_nsys: float
    status_alone: int | None
    status_recorded: int
    options: tuple[str, ...]
    nsys_version: str
    driver_version: str | None
    uvm_parameters: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers without folders, ready for JSON."""
        return asdict(self) | {"report": self.report.name, "facts": self.facts.name}


@dataclass(frozen=True)
class Ran:
    """How a program ended that ran without nsys.

    Attributes
    ----------
    status : int
        Exit status; negative for a signal.
    seconds : float
        Wall time.
    lines : tuple of str
        Its last words.
    """

    status: int
    seconds: float
    lines: tuple[str, ...]


def run_alone(command: Sequence[str], *, shown: bool = True) -> Ran:
    """Run a program without nsys.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments.
    shown : bool, default True
        What it says goes to stderr.

    Returns
    -------
    Ran
        Status, wall time and last words.

    Raises
    ------
    ProgramNotFoundError
        If it cannot be run.
    """
    if not command or shutil.which(command[0]) is None:
        raise ProgramNotFoundError(command[0] if command else "")
    return Ran(*_run(command, shown=shown))


def record(
    command: Sequence[str],
    report: Path,
    *,
    baseline: bool | Ran = True,
    overwrite: bool = False,
    options: Sequence[str] = (),
    shown: bool = True,
) -> Recording:
    """Run a program under nsys with everything switched on that nsan can use.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments.
    report : Path
        Where the report is to be; `.nsys-rep` is added if it has no such suffix.
    baseline : bool or Ran, default True
        Run the program once without nsys before, for its unperturbed time; not done where standard
        input is a pipe, which can be read once only. Or the run without nsys that was made already.
    overwrite : bool, default False
        Replace an existing report.
    options : sequence of str
        Further options of `nsys profile`.
    shown : bool, default True
        The program's output, and that of nsys, go to stderr.

    Returns
    -------
    Recording
        Where the report is, and what is known about the run.

    Raises
    ------
    ProgramNotFoundError, RecorderNotFoundError, OutputExistsError, NsysProfileError, OutputWriteError
        One for each way in which it goes wrong; then nothing is left.
    """
    report = _named(report)
    facts = report.with_suffix(FACTS_SUFFIX)
    program = nsys_cli.find_nsys()
    _check(command, report, facts, program, overwrite=overwrite)
    assert program is not None  # noqa: S101 - checked just now
    # The folder is made first: a place that cannot be written is known before anything runs.
    with _scratch(report) as folder:
        alone = _baseline(command, baseline, shown=shown)
        made = folder / report.name
        # nsys takes no `--` before the program.
        # In a name it takes %p, %h and %q{NAME} for a process, a host and a variable, and %% for a %.
        output = str(made).replace("%", "%%")
        nsys = [str(program), "profile", *SWITCHES, *options, "--output", output]
        status, seconds, lines = _run([*nsys, *command], shown=shown)
        if not made.exists() and any(_NO_AGENT in line for line in lines):
            # Its agent was not up in time, now and then on a busy machine; nothing has run yet.
            status, seconds, lines = _run([*nsys, *command], shown=shown)
        if not made.is_file() or not made.stat().st_size:
            raise NsysProfileError(display_name(report), status, lines)
        recording = Recording(
            report=report,
            facts=facts,
            seconds_alone=None if alone is None else alone.seconds,
            seconds_nsys=seconds,
            status_alone=None if alone is None else alone.status,
            status_recorded=status,
            options=(*SWITCHES, *options),
            nsys_version=nsys_cli.version_of(program),
            driver_version=_text(_DRIVER_VERSION),
            uvm_parameters=uvm_parameters(),
        )
        _put(recording, made, folder)
    return recording


def _baseline(command: Sequence[str], wanted: bool | Ran, *, shown: bool) -> Ran | None:  # noqa: FBT001 (as `record` has it)
    if isinstance(wanted, Ran):
        return wanted
    return Ran(*_run(command, shown=shown)) if wanted and _can_run_twice() else None


def _named(report: Path) -> Path:
    """Give a report the only suffix that nsys writes."""
    stem = report.name
    for suffix in REPORT_SUFFIXES:
        stem = stem.removesuffix(suffix)
    return report.with_name(f"{stem}{REPORT_SUFFIXES[0]}")


def _can_run_twice() -> bool:
    """Say whether a second run would find the standard input that the first one found.

    A terminal and nothing at all do; a file is rewound; a pipe is read once.
    """
    try:
        kind = os.fstat(0).st_mode
    except OSError:
        return True
    if stat.S_ISREG(kind):
        os.lseek(0, 0, os.SEEK_SET)
        return True
    return stat.S_ISCHR(kind)


def _check(
    command: Sequence[str], report: Path, facts: Path, program: Path | None, *, overwrite: bool
) -> None:
    if not command or shutil.which(command[0]) is None:
        raise ProgramNotFoundError(command[0] if command else "")
    if program is None:
        raise RecorderNotFoundError
    for place in (report, facts):
        if place.is_dir():
            raise OutputWriteError(place, "it is a folder")
        if place.exists() and not overwrite:
            raise OutputExistsError(place)


def _put(recording: Recording, made: Path, folder: Path) -> None:
    """Move the report and its facts into place; the facts come last, so that none stand alone."""
    document = {"schema": 1, "nsan_version": nsan.__version__, **recording.to_dict()}
    written = folder / recording.facts.name
    written.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    with undisturbed():
        made.replace(recording.report)
        written.replace(recording.facts)


@contextlib.contextmanager
def _scratch(report: Path) -> Iterator[Path]:
    folder: Path | None = None
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        folder = scratch_beside(report, "recording")
        yield folder
    except OSError as error:
        raise OutputWriteError(report, error.strerror or str(error)) from error
    finally:
        if folder is not None:
            with undisturbed():
                shutil.rmtree(folder, ignore_errors=True)


def _run(command: Sequence[str], *, shown: bool) -> tuple[int, float, tuple[str, ...]]:
    """Run a program, showing what it says or not; return its status, wall time and last lines."""
    _can_run_twice()  # rewinds a file on standard input
    started = time.monotonic()
    last: deque[str] = deque(maxlen=_LAST_LINES)
    # With a terminal the program stays in its group: it may read from it, and gets Ctrl-C itself.
    own_group = not (sys.stdin is not None and sys.stdin.isatty())
    environment = marked_environment()
    try:
        process = subprocess.Popen(  # noqa: S603 - the user's own command, without a shell
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=own_group,
        )
    except OSError as error:
        raise ProgramNotFoundError(command[0], error.strerror) from error
    with process:
        try:
            for raw in _said(process):
                if shown:
                    os.write(_STDERR, raw)
                parts = re.split(r"[\r\n]+", raw.decode(errors="replace"))
                last.extend(part.strip()[:300] for part in parts if part.strip())
            status = process.wait()
        except BaseException:
            try:
                _stop(process, own_group=own_group)
            finally:
                _end_rest(environment)
            raise
    if status < 0:
        _end_rest(environment)  # of an nsys that was killed
    return status, time.monotonic() - started, tuple(last)


def _said(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Yield what a program says until it ends; what it leaves running may go on to hold the pipe."""
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    descriptor = process.stdout.fileno()
    os.set_blocking(descriptor, False)
    ended = False
    while not ended:
        ended = process.poll() is not None
        # Where polars is loaded, its handler of Ctrl-C makes a blocked read go on as if nothing had
        # happened; waiting in select does notice it.
        select.select([descriptor], [], [], 0 if ended else _POLL_SECONDS)
        while True:
            try:
                raw = os.read(descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                break
            if not raw:
                return
            yield raw


def _stop(process: subprocess.Popen[bytes], *, own_group: bool) -> None:
    """End a program that is not wanted any more: nsys ends most programs that it runs when asked kindly."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            if own_group:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_SECONDS)
            break
    if own_group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left behind


def _end_rest(environment: dict[str, str]) -> None:
    """End what outlives a program that was stopped: nsys's own is in another session, and may not hear."""
    with undisturbed():
        end_descendants(environment, _GRACE_SECONDS)


def uvm_parameters() -> dict[str, str]:
    """Read the parameters of the nvidia_uvm kernel module; empty where it is not loaded.

    Returns
    -------
    dict of str to str
        By name. They decide how the driver batches, prefetches and evicts, and no trace holds them.
    """
    if not _UVM_PARAMETERS.is_dir():
        return {}
    found = {file.name: _text(file) for file in sorted(_UVM_PARAMETERS.iterdir())}
    return {name: value for name, value in found.items() if value is not None}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
