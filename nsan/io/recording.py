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
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import nsan
from nsan.errors import (
    NsysProfileError,
    OutputExistsError,
    ProgramNotFoundError,
    RecorderNotFoundError,
    StoreWriteError,
)
from nsan.io import nsys_cli
from nsan.io.probe import REPORT_SUFFIXES, display_name
from nsan.io.tidy import undisturbed

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
_STDERR: Final = 2
_GRACE_SECONDS: Final = 10
_LAST_LINES: Final = 8
_CHUNK_BYTES: Final = 1 << 16
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
    seconds_alone, seconds_recorded : float or None
        Wall time of the program without nsys (None: not measured) and with it.
    status_alone, status_recorded : int or None
        Exit status without nsys, and of nsys, which passes on that of the program.
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
    seconds_recorded: float
    status_alone: int | None
    status_recorded: int
    nsys_version: str
    driver_version: str | None
    uvm_parameters: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers without folders, ready for JSON."""
        return asdict(self) | {"report": self.report.name, "facts": self.facts.name}


def record(
    command: Sequence[str],
    report: Path,
    *,
    baseline: bool = True,
    overwrite: bool = False,
    options: Sequence[str] = (),
) -> Recording:
    """Run a program under nsys with everything switched on that nsan can use.

    The program's output, and that of nsys, go to stderr.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments.
    report : Path
        Where the report is to be; `.nsys-rep` is added if it has no such suffix.
    baseline : bool, default True
        Run the program once without nsys before, for its unperturbed time.
    overwrite : bool, default False
        Replace an existing report.
    options : sequence of str
        Further options of `nsys profile`.

    Returns
    -------
    Recording
        Where the report is, and what is known about the run.

    Raises
    ------
    ProgramNotFoundError, RecorderNotFoundError, OutputExistsError, NsysProfileError, StoreWriteError
        One for each way in which it goes wrong; then nothing is left.
    """
    if report.suffix not in REPORT_SUFFIXES:
        report = report.with_name(report.name + REPORT_SUFFIXES[0])
    facts = report.with_name(report.name.removesuffix(report.suffix) + FACTS_SUFFIX)
    program = nsys_cli.find_nsys()
    _check(command, report, facts, program, overwrite=overwrite)
    assert program is not None  # noqa: S101 - checked just now
    alone: tuple[int, float] | None = _run(command)[:2] if baseline else None
    with _scratch(report) as folder:
        made = folder / report.name
        # nsys takes no `--` before the program.
        nsys = [str(program), "profile", *SWITCHES, *options, "--output", str(made)]
        status, seconds, lines = _run([*nsys, *command])
        if not made.is_file() or not made.stat().st_size:
            raise NsysProfileError(display_name(report), status, lines)
        recording = Recording(
            report=report,
            facts=facts,
            seconds_alone=None if alone is None else alone[1],
            seconds_recorded=seconds,
            status_alone=None if alone is None else alone[0],
            status_recorded=status,
            nsys_version=nsys_cli.version_of(program),
            driver_version=_text(_DRIVER_VERSION),
            uvm_parameters=uvm_parameters(),
        )
        _put(recording, made, folder)
    return recording


def _check(
    command: Sequence[str], report: Path, facts: Path, program: Path | None, *, overwrite: bool
) -> None:
    if not command or shutil.which(command[0]) is None:
        raise ProgramNotFoundError(command[0] if command else "")
    if program is None:
        raise RecorderNotFoundError
    for place in (report, facts):
        if place.exists() and not overwrite:
            raise OutputExistsError(place)


def _put(recording: Recording, made: Path, folder: Path) -> None:
    """Move the report and its facts into place; the report comes last, for it is what counts."""
    document = {"schema": 1, "nsan_version": nsan.__version__, **recording.to_dict()}
    written = folder / recording.facts.name
    written.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    written.replace(recording.facts)
    made.replace(recording.report)


@contextlib.contextmanager
def _scratch(report: Path) -> Iterator[Path]:
    folder: Path | None = None
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{report.stem}.recording-{os.getpid()}-"
        with undisturbed():
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=report.parent))
        yield folder
    except OSError as error:
        raise StoreWriteError(report.parent, error.strerror or str(error)) from error
    finally:
        if folder is not None:
            with undisturbed():
                shutil.rmtree(folder, ignore_errors=True)


def _run(command: Sequence[str]) -> tuple[int, float, tuple[str, ...]]:
    """Run a program, showing what it says; return its status, wall time and last lines."""
    started = time.monotonic()
    last: deque[str] = deque(maxlen=_LAST_LINES)
    try:
        process = subprocess.Popen(  # noqa: S603 - the user's own command, without a shell
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise ProgramNotFoundError(command[0], error.strerror) from error
    with process:
        try:
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            sys.stderr.flush()
            for raw in _chunks(process.stdout.fileno()):
                os.write(_STDERR, raw)
                said = re.split(r"[\r\n]+", raw.decode(errors="replace"))
                last.extend(part.strip()[:300] for part in said if part.strip())
            status = process.wait()
        except BaseException:
            _stop(process)
            raise
    return status, time.monotonic() - started, tuple(last)


def _chunks(descriptor: int) -> Iterator[bytes]:
    # Where polars is loaded, its handler of Ctrl-C makes a blocked read go on as if nothing had
    # happened; waiting in select does notice it.
    while True:
        select.select([descriptor], [], [])
        raw = os.read(descriptor, _CHUNK_BYTES)
        if not raw:
            return
        yield raw


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a program that is not wanted any more: nsys ends the program it runs when asked kindly."""
    for number in (signal.SIGINT, signal.SIGKILL):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_SECONDS)
            return


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
