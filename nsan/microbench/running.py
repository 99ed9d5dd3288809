"""Run a program of the benchmark: alone for its times, under nsys for its trace, and keep all of it in one folder.

A run's folder ``NAME`` holds what all else in nsan finds by name: ``NAME.nsys-rep`` with ``NAME.truth``, the tables
that the program wrote meanwhile; ``NAME.alone``, the same of the run without nsys; ``NAME.pickle``, what its caching
allocator did; ``store``, the imported trace; and ``bench.json``, which says how it was made. The folder is made
beside its place and put there whole.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import nsan
from nsan.errors import (
    NsanError,
    OutputExistsError,
    OutputWriteError,
    PlaceTakenError,
    ProgramNotFoundError,
    StoreWriteError,
)
from nsan.io import nsys_cli
from nsan.io.bench_truth import BENCH, BENCH_FORMAT, TRUTH_SUFFIX, TruthError, read_about
from nsan.io.manifest import STORE_BESIDE, read_manifest
from nsan.io.recording import Ran, record, run_alone
from nsan.io.tidy import put_in_place
from nsan.microbench.conditions import condition_of
from nsan.microbench.errors import BenchEndedError
from nsan.microbench.work import Work
from nsan.nsys_errors import RecorderNotFoundError

OK: Final = "ok"
ALONE_SUFFIX: Final = ".alone"
TAPE_SUFFIX: Final = ".tape"
FAILED: Final = "failed"
NOT_RECORDED: Final = "not_recorded"
STATUSES: Final = {0: OK, 1: FAILED, 2: "usage", 5: "no_driver", 6: "skipped", 7: "refused"}
"""How a program ends, by its exit status; any other is a failure."""

MACHINE_WIDE: Final = frozenset({"usage", "no_driver"})
"""Ends that any other run on this machine with these flags would have, too."""

_HISTORY: Final = "history.csv"
_MAKING: Final = "benchmarking"
_PATH: Final = re.compile(r"(?<![\w.~-])~?/[^\s'\"()]*/")

Tell = Callable[[str], None]
"""Takes a line about what is going on."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes
    ----------
    folder : Path
        Where it is.
    document : dict
        The content of ``bench.json``.
    manifest : dict or None
        Of the store; None: nothing was recorded.
    """

    folder: Path
    document: dict[str, Any]
    manifest: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def status(self) -> str:
        """A value of :data:`STATUSES`, or "not_recorded": it ended well, and its trace shows nothing."""
        return str(self.document["status"])


def run(
    work: Work,
    place: Path,
    *,
    profiled: bool = True,
    overwrite: bool = False,
    shown: bool = False,
    tell: Tell | None = None,
) -> Outcome:
    """Run a program and keep what it leaves.

    Parameters
    ----------
    work : Work
        What runs.
    place : Path
        The folder; its name becomes that of the report.
    profiled : bool, default True
        Run it under nsys, too.
    overwrite : bool, default False
        Replace a run that ended well; one that did not is replaced in any case.
    shown : bool, default False
        What the program and nsys say goes to stderr.
    tell : callable, optional
        Called with a line before each run of the program.

    Returns
    -------
    Outcome
        A failed run, too, has its folder, which says why.

    Raises
    ------
    BenchEndedError
        If there is no driver, or the program does not understand its flags: then nothing is left.
    NsanError
        If there is no program or no nsys, the place cannot be written, or nsys fails; then nothing is left.
    """
    place = place.absolute() if place.name not in {"", ".."} else place.resolve()
    check_place(place, overwrite=overwrite)
    if profiled and nsys_cli.find_nsys() is None:
        raise RecorderNotFoundError
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with put_in_place(place, _MAKING) as folder:
            making = _Making(work, folder, place.name, shown, tell)
            document = making.make(profiled=profiled)
    except OSError as error:
        raise OutputWriteError(place, error.strerror or str(error)) from error
    return finished(place, document)


def check_place(place: Path, *, overwrite: bool) -> None:
    """Refuse a place where a run that ended well, or anything else, would be lost.

    Raises
    ------
    OutputExistsError, PlaceTakenError
        If so.
    """
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    document = read_document(place)
    if document is None:
        raise PlaceTakenError(place, "is there, and is no run of `nsan bench`")
    if document["status"] == OK and not overwrite:
        raise OutputExistsError(place, "holds a run that ended well")


def read_document(place: Path) -> dict[str, Any] | None:
    """Read ``bench.json`` of a run; None if it is none, or of another version of nsan."""
    try:
        found = json.loads((place / BENCH).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    fits = isinstance(found, dict) and found.get("nsan_bench") == BENCH_FORMAT
    return found if fits and {"status", "digest", "condition"} <= found.keys() else None


def finished(place: Path, document: dict[str, Any]) -> Outcome:
    """Take a run that is in its place; one whose store is missing or damaged has none."""
    manifest = None
    if document["profiled"]:
        with contextlib.suppress(NsanError):
            manifest = read_manifest(place / STORE_BESIDE)
    return Outcome(place, document, manifest)


@dataclass
class _Making:
    """A run under way in its scratch folder."""

    work: Work
    folder: Path
    name: str
    shown: bool
    tell: Tell | None

    def make(self, *, profiled: bool) -> dict[str, Any]:
        tape = None
        if self.work.tape:
            tape = self.folder / f"{self.name}{TAPE_SUFFIX}"
            tape.write_text(self.work.tape, encoding="utf-8")
        out = self.folder / f"{self.name}{ALONE_SUFFIX}"
        self._say("runs alone")
        started = dt.datetime.now(dt.UTC)
        alone = run_alone(self.work.command(out, tape), shown=self.shown)
        document = self._document(alone, out, started, profiled=profiled)
        if document["status"] in MACHINE_WIDE:
            raise BenchEndedError(self.work.program, document["exit_status"], document["reason"])
        if profiled and document["status"] == OK:
            document |= self._recorded_or_not(alone, tape)
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        (self.folder / BENCH).write_text(text, encoding="utf-8")
        return document

    def _say(self, what: str) -> None:
        if self.tell is not None:
            self.tell(f"{self.name}: {self.work.program} {what}")

    def _document(
        self, alone: Ran, out: Path, started: dt.datetime, *, profiled: bool
    ) -> dict[str, Any]:
        about = _about(out)
        status = STATUSES.get(alone.status, FAILED)
        return {
            "nsan_bench": BENCH_FORMAT,
            "nsan_version": nsan.__version__,
            "program": self.work.program,
            "digest": self.work.digest(profiled=profiled),
            "status": status,
            "reason": None if status == OK else _reason(self.work.program, alone, about),
            "exit_status": alone.status,
            "condition": condition_of(self.work, about),
            "arguments": list(self.work.shown_arguments),
            "profiled": profiled,
            "started_utc": started.isoformat(timespec="seconds"),
            "seconds_alone": alone.seconds,
            "seconds_nsys": None,
            "versions": {"nsys": None, **_versions(about)},
            "footprint": about.get("footprint"),
        }

    def _recorded_or_not(self, alone: Ran, tape: Path | None) -> dict[str, Any]:
        try:
            return self._recorded(alone, tape)
        except (OutputWriteError, StoreWriteError, ProgramNotFoundError):
            raise  # so it would be with any other run
        except NsanError as error:
            return {"status": FAILED, "reason": _PATH.sub("", " ".join(str(error).split()))}

    def _recorded(self, alone: Ran, tape: Path | None) -> dict[str, Any]:
        """Run it again under nsys, and make of its trace what is made of it; say what that changes."""
        self._say("runs under nsys")
        out = self.folder / f"{self.name}{TRUTH_SUFFIX}"
        report = self.folder / f"{self.name}.nsys-rep"
        command = self.work.command(out, tape)
        recording = record(command, report, baseline=alone, shown=self.shown)
        changes: dict[str, Any] = {"seconds_nsys": recording.seconds_nsys}
        about = _about(out)
        changes["versions"] = {"nsys": recording.nsys_version, **_versions(about)}
        changes["footprint"] = about.get("footprint")
        if recording.status_recorded:
            # nsys passes on the status; what the program said of it stands in its tables.
            ran = Ran(recording.status_recorded, recording.seconds_nsys, ())
            reason = _reason(self.work.program, ran, about)
            return changes | {
                "status": FAILED,
                "reason": f"it ended well alone, and not under nsys: {reason}",
                "exit_status": recording.status_recorded,
            }
        if (out / _HISTORY).is_file():
            from nsan.microbench.histories import snapshot_of

            snapshot_of(out, self.folder / f"{self.name}.pickle")
        return changes | self._imported(report)

    def _imported(self, report: Path) -> dict[str, Any]:
        from nsan.contract import has_um_data
        from nsan.opening import import_trace

        store = import_trace(report, self.folder / STORE_BESIDE)
        manifest = read_manifest(store)
        if has_um_data(manifest["info"], manifest["totals"]):
            return {}
        reason = (
            "it ended well, and its trace has no Unified Memory data: no managed allocation, migration or "
            "fault. `nsys status --environment` says what this machine allows, `-v` what nsys said"
        )
        return {"status": NOT_RECORDED, "reason": reason}


def _about(out: Path) -> dict[str, Any]:
    """Read what a program said of its run; nothing where it came to no tables."""
    try:
        return read_about(out)
    except TruthError:
        return {}


def _versions(about: Mapping[str, Any]) -> dict[str, Any]:
    driver, device = about.get("driver") or {}, about.get("device") or {}
    return {
        "driver": driver.get("version"),
        "cuda_driver": driver.get("cuda_driver_api"),
        "gpu": device.get("name"),
    }


def _reason(program: str, ran: Ran, about: Mapping[str, Any]) -> str:
    """Say why a run did not end well: as its tables do, or its last words without folders."""
    if about.get("reason"):
        return str(about["reason"])
    said = [line.removeprefix(f"{program}: ") for line in ran.lines[-1:]]
    how = [f"killed by signal {-ran.status}" if ran.status < 0 else f"exit status {ran.status}"]
    if ran.status in STATUSES and said:
        how = []
    return ": ".join([*how, *(_PATH.sub("", line) for line in said)])


def exit_status(outcome: Outcome) -> int:
    """Say what a command ends with: the program's own status where it says why, 3 for an empty trace.

    Parameters
    ----------
    outcome : Outcome
        The run.

    Returns
    -------
    int
        0, 1, 3, 6 or 7.
    """
    if outcome.status == NOT_RECORDED:
        return 3
    known: Sequence[int] = [number for number, name in STATUSES.items() if name == outcome.status]
    return known[0] if known else 1
