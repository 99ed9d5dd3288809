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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import nsan
from nsan.errors import NsanError, OutputWriteError, ProgramNotFoundError, StoreWriteError
from nsan.io import nsys_cli
from nsan.io.bench_truth import (
    BENCH,
    BENCH_FORMAT,
    EXPECTED,
    TRUTH_SUFFIX,
    TruthError,
    read_about,
)
from nsan.io.manifest import STORE_BESIDE, read_manifest
from nsan.io.recording import Ran, record, run_alone
from nsan.microbench.conditions import condition_of
from nsan.microbench.errors import BenchEndedError
from nsan.microbench.places import (
    ALONE_SUFFIX,
    OK,
    TAPE_SUFFIX,
    check_place,
    making,
    resolved,
)
from nsan.microbench.reasons import reason_of, without_folders
from nsan.microbench.work import Work
from nsan.nsys_errors import RecorderNotFoundError

FAILED: Final = "failed"
NOT_RECORDED: Final = "not_recorded"
STATUSES: Final = {0: OK, 1: FAILED, 2: "usage", 5: "no_driver", 6: "skipped", 7: "refused"}
"""How a program ends, by its exit status; any other is a failure."""

_USAGE: Final = "usage"
_NO_DRIVER: Final = "no_driver"
_NO_FLAG: Final = ("unknown flag", "unrecognized arguments")
"""What programs say of a flag that they do not have, whatever its value and the other flags are."""

_HISTORY: Final = "history.csv"

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
        If there is no driver, or the program does not understand its flags: then nothing is left. In a sweep,
        where other runs have other values, it is only a flag that it does not know.
    RunKeptError
        If something came to the place meanwhile: the run is kept beside it.
    NsanError
        If there is no program or no nsys, or the place cannot be written; then nothing is left.
    """
    place = resolved(place)
    check_place(place, overwrite=overwrite)
    if profiled and nsys_cli.find_nsys() is None:
        raise RecorderNotFoundError
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with making(place, overwrite=overwrite) as folder:
            document = _Making(work, folder, place.name, shown, tell).make(profiled=profiled)
    except OSError as error:
        raise OutputWriteError(place, error.strerror or str(error)) from error
    return finished(place, document)


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
        if self._stops(document):
            raise BenchEndedError(self.work.program, document["exit_status"], document["reason"])
        if profiled and document["status"] == OK:
            document |= self._recorded_or_not(alone, tape)
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        (self.folder / BENCH).write_text(text, encoding="utf-8")
        return document

    def _stops(self, document: Mapping[str, Any]) -> bool:
        """Say whether no other run would go otherwise: of the same flags, or of any in a sweep."""
        if document["status"] != _USAGE or not self.work.asked:
            return document["status"] in {_USAGE, _NO_DRIVER}
        return str(document["reason"]).startswith(_NO_FLAG)

    def _clean(self, text: str) -> str:
        return without_folders(text, (self.folder, self.folder.parent, self.work.path.parent))

    def _say(self, what: str) -> None:
        if self.tell is not None:
            self.tell(f"{self.name}: {self.work.program} {what}")

    def _document(
        self, alone: Ran, out: Path, started: dt.datetime, *, profiled: bool
    ) -> dict[str, Any]:
        about = _about(out)
        status, reason = STATUSES.get(alone.status, FAILED), None
        if status != OK:
            reason = self._clean(reason_of(self.work.program, alone, about, STATUSES))
        elif not about:
            status, reason = FAILED, f"it wrote no tables: it is no {self.work.program}"
        return {
            "nsan_bench": BENCH_FORMAT,
            "nsan_version": nsan.__version__,
            "program": self.work.program,
            "digest": self.work.digest(profiled=profiled),
            "status": status,
            "reason": reason,
            "exit_status": alone.status,
            "condition": condition_of(self.work, about),
            "arguments": list(self.work.shown_arguments),
            "profiled": profiled,
            "started_utc": started.isoformat(timespec="seconds"),
            "seconds_alone": alone.seconds,
            "seconds_nsys": None,
            "versions": {"nsys": None, **_versions(about)},
            "footprint": about.get("footprint"),
            "expected": None,
        }

    def _recorded_or_not(self, alone: Ran, tape: Path | None) -> dict[str, Any]:
        try:
            return self._recorded(alone, tape)
        except (OutputWriteError, StoreWriteError, ProgramNotFoundError):
            raise  # so it would be with any other run
        except NsanError as error:
            return {"status": FAILED, "reason": self._clean(str(error))}

    def _recorded(self, alone: Ran, tape: Path | None) -> dict[str, Any]:
        """Run it again under nsys, and make of its trace what is made of it; say what that changes."""
        self._say("runs under nsys")
        out = self.folder / f"{self.name}{TRUTH_SUFFIX}"
        report = self.folder / f"{self.name}.nsys-rep"
        snapshot = self.folder / f"{self.name}.pickle"
        command = self.work.command(out, tape, snapshot if self.work.has_snapshot else None)
        recording = record(command, report, baseline=alone, shown=self.shown)
        changes: dict[str, Any] = {"seconds_nsys": recording.seconds_nsys}
        about = _about(out)
        changes["versions"] = {"nsys": recording.nsys_version, **_versions(about)}
        changes["footprint"] = about.get("footprint")
        if recording.status_recorded:
            # nsys passes on the status; what the program said of it stands in its tables.
            ran = Ran(recording.status_recorded, recording.seconds_nsys, ())
            reason = self._clean(reason_of(self.work.program, ran, about, STATUSES))
            return changes | {
                "status": FAILED,
                "reason": f"it ended well alone, and not under nsys: {reason}",
                "exit_status": recording.status_recorded,
            }
        if (out / _HISTORY).is_file():
            from nsan.microbench.histories import snapshot_of

            snapshot_of(out, snapshot)
        return changes | self._imported(report, out)

    def _imported(self, report: Path, out: Path) -> dict[str, Any]:
        from nsan.opening import import_trace

        store = import_trace(report, self.folder / STORE_BESIDE)
        manifest = read_manifest(store)
        expected = self._expected(store, manifest, out)
        missing = _missing(manifest, expected)
        if missing is None:
            return {"expected": expected}
        reason = (
            f"it ended well, and its trace has {missing}. `nsys status --environment` says what this machine "
            "allows, `-v` what nsys said"
        )
        return {"status": NOT_RECORDED, "reason": reason, "expected": expected}

    def _expected(self, store: Path, manifest: dict[str, Any], out: Path) -> dict[str, Any] | None:
        """Compare the trace with the bytes that the program is certain of; None: it is of none."""
        from nsan.io.store import open_store
        from nsan.microbench.expecting import Expectations, compared

        if not _is_certain_of_any(out):
            return None
        try:
            found = compared(open_store(store, manifest), out)
        except NsanError as error:
            found = Expectations(0, 0, (), demands_bytes=False, reason=self._clean(str(error)))
        return {**asdict(found), "wrong": list(found.wrong)}


def _is_certain_of_any(out: Path) -> bool:
    try:
        return (out / EXPECTED).read_bytes().count(b"\n") > 1  # below the names of its columns
    except OSError:
        return False


_LACKS: Final = {
    "data": "no Unified Memory data: no managed allocation, migration or fault",
    "traffic": "managed allocations, and no migration or fault of what the program moves",
    "migration": "no migration, although by what the program knows bytes migrate",
}


def _missing(manifest: Mapping[str, Any], expected: Mapping[str, Any] | None) -> str | None:
    """Say what a trace of a run that ended well lacks; None: nothing."""
    from nsan.microbench.evidence import lack_of

    demands_bytes = expected is not None and bool(expected["demands_bytes"])
    return _LACKS.get(lack_of(manifest["info"], manifest["totals"], demands_bytes=demands_bytes))


def _about(out: Path) -> dict[str, Any]:
    """Read what a program said of its run; nothing where it came to no tables."""
    try:
        return read_about(out)
    except TruthError:
        return {}


def _versions(about: Mapping[str, Any]) -> dict[str, Any]:
    driver, device = (
        found if isinstance(found, Mapping) else {}
        for found in (about.get("driver"), about.get("device"))
    )
    versions = {
        "driver": driver.get("version"),
        "cuda_driver": driver.get("cuda_driver_api"),
        "gpu": device.get("name"),
    }
    return versions | ({"torch": about["torch"]} if about.get("torch") else {})


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
