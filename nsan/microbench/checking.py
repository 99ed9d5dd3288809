"""A device check that came home becomes captures that nsan opens, a folder for each case, with what they show.

Folders are as those of ``nsan bench run``: the report, the tables of the recorded run and of the one without nsys, what
is known about both, and the store.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from polars.exceptions import PolarsError

import nsan
from nsan.contract import document
from nsan.errors import NsanError, OutputExistsError, OutputWriteError
from nsan.io import nsys_cli
from nsan.io.bench_truth import BENCH, BENCH_FORMAT, TRUTH_SUFFIX, TruthError, read_about
from nsan.io.manifest import STORE_BESIDE, read_manifest
from nsan.io.probe import REPORT_SUFFIXES, STREAM_SUFFIX
from nsan.io.recording import FACTS_SUFFIX
from nsan.io.tidy import put_in_place
from nsan.microbench.conditions import condition_of
from nsan.microbench.evidence import Lack, lack_of
from nsan.microbench.expecting import Expectations, compared
from nsan.microbench.histories import HISTORY, snapshot_of
from nsan.microbench.results import ABOUT, CASES, MACHINE, STATUS, CaseResult, Results, unpack
from nsan.microbench.work import Work
from nsan.opening import import_trace
from nsan.trace import Trace

OK: Final = "ok"

_FAULTS_OF_ROWS: Final = {
    "n_out_of_order": "end out of order",
    "n_counts_outside": "have a count outside 1 to 256",
    "n_other_access": "have an access type that nsan does not know",
    "n_rows_above": "lie above their lowest faulted page",
    "n_copies_outside": "copies fall into no row",
    "n_descending": "copies descend within a row",
}
_UNSEEN: Final = (
    "it ended well, and its trace shows nothing of the GPU: the driver may be too new for this nsys, or the system "
    "does not let it look"
)
_NO_CAPTURE: Final = "it ended well, and its stream did not come home"
_NO_TRAFFIC: Final = "it ended well, and its trace shows kernels, but nothing of Unified Memory that moved or faulted"
_NO_MIGRATION: Final = (
    "it ended well, and by what its program knows bytes migrated, but its trace shows no migration"
)
_TELLING: Final = ("managed_without_traffic", "migrations_recorded", "diagnostics")
"""Checks of a capture that may say why nothing of Unified Memory is there."""

_STYLES: Final = {"page": "one per page", "va_block": "one per VA block"}

Tell = Callable[[str], None]
"""Takes the name of a case before it is imported."""


@dataclass(frozen=True)
class Checked:
    """A case that came home.

    Attributes
    ----------
    case : CaseResult
        How it ended there.
    capture : Path or None
        The report, or the stream where no report could be made of it; None: it made none.
    summary : dict or None
        :func:`nsan.contract.summary`; None where nothing could be imported.
    one_row_per_batch : str
        Whether a row of the GPU page faults is a driver batch: "holds", "no rows", "no copies", "one per page",
        "one per VA block", or "fails: ..." with what speaks against it.
    named : int or None
        Allocations that have a name.
    bytes : Expectations or None
        Whether as many bytes migrated as the program says must; None where nothing could be imported.
    problem : str
        Why it could not be imported, or shows nothing although it ended well; else empty.
    note : str
        What could not be made beside it; else empty.
    """

    case: CaseResult
    capture: Path | None
    summary: dict[str, Any] | None
    one_row_per_batch: str
    named: int | None
    bytes: Expectations | None = None
    problem: str = ""
    note: str = ""

    @property
    def is_well(self) -> bool:
        """Whether it ended well there, and shows here what a GPU did."""
        return self.status == OK

    @property
    def status(self) -> str:
        """How it ended there, or what became of it here: "not_imported", "not_recorded"."""
        if not self.problem or (self.capture is None and self.case.status != OK):
            return self.case.status
        return "not_imported" if self.summary is None else "not_recorded"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What nsan warns of in the capture, and what else could not be made."""
        found = self.summary["health"] if self.summary is not None else ()
        texts = [each["text"] for each in found if each["status"] in {"warn", "fail"}]
        return (*texts, self.note) if self.note else tuple(texts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers without folders, ready for JSON."""
        own = {
            "status": self.status,
            "capture": self.capture.name if self.capture else None,
            "one_row_per_batch": self.one_row_per_batch,
            "n_named_allocations": self.named,
            "bytes": None if self.bytes is None else asdict(self.bytes),
            "problem": self.problem or None,
            "note": self.note or None,
            "summary": self.summary,
        }
        return asdict(self.case) | own


@dataclass(frozen=True)
class Check:
    """All of a device check.

    Attributes
    ----------
    folder : Path
        Where its cases lie.
    machine : dict of str to str
        What its script found out about the machine.
    cases : tuple of Checked
        In the order in which they ran.
    """

    folder: Path
    machine: dict[str, str]
    cases: tuple[Checked, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers without folders, ready for JSON."""
        return {
            "schema": 1,
            "nsan_version": nsan.__version__,
            "machine": self.machine,
            "cases": [each.to_dict() for each in self.cases],
        }


def import_check(
    paths: Sequence[Path],
    output: Path,
    *,
    overwrite: bool = False,
    tell: Tell | None = None,
) -> Check:
    """Import what a device check brought home.

    Parameters
    ----------
    paths : sequence of Path
        See :func:`nsan.microbench.results.unpack`.
    output : Path
        The folder to make: one in it for each case, and ``check.json``. It appears whole, or not at all.
    overwrite : bool, default False
        Replace what is there.
    tell : callable, optional
        Called with the name of each case before it is imported.

    Returns
    -------
    Check
        Each case; one that could not be imported says why, and its stream is kept.

    Raises
    ------
    NsanError
        If the results cannot be used, or the folder not be written.
    """
    if output.exists() and not overwrite:
        raise OutputExistsError(output)
    if output.exists() and not (output / ABOUT).is_file():
        raise OutputExistsError(output, "is no earlier import of a device check")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with put_in_place(output, "importing") as folder:
            raw = folder / ".raw"
            raw.mkdir()
            results = unpack(paths, raw)
            found = [_case(each, results, folder, tell) for each in results.cases]
            for each in found:
                _write_how(folder / each.case.name, each, results)
            for name in (CASES, STATUS, MACHINE):
                _move(results.folder / name, folder / name)
            shutil.rmtree(raw)
            check = Check(output, results.machine, tuple(found))
            text = json.dumps(check.to_dict(), indent=1)
            (folder / ABOUT).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputWriteError(output, error.strerror or str(error)) from error
    placed = tuple(_placed(each, output) for each in found)
    return Check(output, check.machine, placed)


def _placed(each: Checked, output: Path) -> Checked:
    """Name a capture where it lies now."""
    if each.capture is None:
        return each
    return replace(each, capture=output / each.case.name / each.capture.name)


def _move(source: Path, target: Path) -> None:
    if source.exists():
        source.rename(target)


def _case(case: CaseResult, results: Results, folder: Path, tell: Tell | None) -> Checked:
    """Make the folder of a case; what goes wrong with one says so, and the others go on."""
    if tell is not None:
        tell(case.name)
    place = folder / case.name
    place.mkdir()
    for ending in (TRUTH_SUFFIX, ".alone", ".log", STREAM_SUFFIX):
        _move(results.folder / (case.name + ending), place / (case.name + ending))
    stream = place / (case.name + STREAM_SUFFIX)
    if not stream.is_file():
        missing = _NO_CAPTURE if case.status == OK else "it made no capture"
        return Checked(case, None, None, "no capture", None, problem=case.reason or missing)
    _write_facts(place, case, results)
    capture = stream
    note = _snapshot(place, case.name)
    try:
        capture = _report_of(stream)
        store = import_trace(capture, place / STORE_BESIDE)
        return replace(judged(case, capture, store), note=note)
    except _FORESEEN as error:
        why = _first_line(error)
        return Checked(case, capture, None, "not imported", None, problem=why, note=note)


_FORESEEN: Final = (NsanError, ValueError, LookupError, TypeError, ArithmeticError, PolarsError)
"""What may be wrong with one case, whose files are from elsewhere; a full disk ends all of them."""


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _report_of(stream: Path) -> Path:
    """Make the report of a stream, which goes then: it holds far more than the report."""
    report = stream.with_suffix(REPORT_SUFFIXES[0])
    # The importer appends to what it reads: a stream that it refuses must stay as it came.
    copy = stream.with_name(f"copy-{stream.name}")
    shutil.copyfile(stream, copy)
    try:
        nsys_cli.import_stream(copy, report)
    finally:
        copy.unlink()
    stream.unlink()
    return report


def _snapshot(place: Path, name: str) -> str:
    """Write what the caching allocator did as a memory snapshot, if there was one; say why that failed."""
    truth = place / (name + TRUTH_SUFFIX)
    if not (truth / HISTORY).is_file():
        return ""
    try:
        snapshot_of(truth, place / f"{name}.pickle")
    except _FORESEEN as error:
        return f"its memory snapshot could not be made: {_first_line(error)}"
    return ""


def _write_facts(place: Path, case: CaseResult, results: Results) -> None:
    """Write what `nsan record` writes of a recording."""
    machine = results.machine
    parameters = {
        key.removeprefix("uvm."): value for key, value in machine.items() if key.startswith("uvm.")
    }
    facts = {
        "schema": 1,
        "nsan_version": nsan.__version__,
        "report": case.name + REPORT_SUFFIXES[0],
        "facts": case.name + FACTS_SUFFIX,
        "seconds_alone": case.seconds_alone,
        "seconds_nsys": case.seconds_nsys,
        "status_alone": case.exit_alone,
        "status_recorded": case.exit_recorded,
        "options": list(results.switches),
        "nsys_version": _short(machine.get("nsys", "unknown")),
        "driver_version": machine.get("driver"),
        "uvm_parameters": parameters,
    }
    text = json.dumps(facts, indent=1) + "\n"
    (place / (case.name + FACTS_SUFFIX)).write_text(text, encoding="utf-8")


def _write_how(place: Path, checked: Checked, results: Results) -> None:
    """Write what `nsan bench run` writes of a run: `nsan pca` and `nsan compare` tell its condition by it."""
    case, machine = checked.case, results.machine
    try:
        about = read_about(place / (case.name + TRUTH_SUFFIX))
    except TruthError:
        about = {}
    work = Work(case.program, Path(case.program), tuple(case.flags.split()))
    gpu, driver = about.get("device") or {}, about.get("driver") or {}
    how = {
        "nsan_bench": BENCH_FORMAT,
        "nsan_version": results.packed.get("nsan_version"),
        "program": case.program,
        "digest": results.packed.get("sources_sha256"),
        "status": checked.status,
        "reason": checked.problem or case.reason or None,
        "exit_status": case.exit_alone,
        "condition": condition_of(work, about),
        "arguments": list(work.shown_arguments),
        "profiled": checked.capture is not None,
        "started_utc": machine.get("started_utc"),
        "seconds_alone": case.seconds_alone,
        "seconds_nsys": case.seconds_nsys,
        "versions": {
            "nsys": _short(machine.get("nsys", "unknown")),
            "driver": machine.get("driver"),
            "cuda_driver": driver.get("cuda_driver_api"),
            "gpu": gpu.get("name"),
        },
        "footprint": about.get("footprint"),
    }
    (place / BENCH).write_text(json.dumps(how, indent=1) + "\n", encoding="utf-8")


def _short(version: str) -> str:
    """Cut a version of nsys to the part that it is known by."""
    return ".".join(version.split(".")[:3])


def judged(case: CaseResult, capture: Path, store: Path) -> Checked:
    """Say what a capture shows, and whether that is what it was made for.

    Parameters
    ----------
    case : CaseResult
        How it ended on the GPU machine.
    capture : Path
        The report; what its program knows of itself lies beside it.
    store : Path
        What was imported of it.

    Returns
    -------
    Checked
        With a ``problem`` where a program ended well and its trace does not show what it must.
    """
    from nsan.io.store import open_store

    manifest = read_manifest(store)
    trace = open_store(store, manifest)
    named = trace.allocations.drop_nulls("name").collect().height
    summary = document(manifest["info"], manifest["totals"])
    moved = _compared(trace, capture.with_suffix(TRUTH_SUFFIX))
    lack = lack_of(manifest["info"], manifest["totals"], demands_bytes=moved.demands_bytes)
    problem = _unseen(summary, lack) if case.status == OK else ""
    return Checked(case, capture, summary, row_rule(manifest["totals"]), named, moved, problem)


def _compared(trace: Trace, truth: Path) -> Expectations:
    if not truth.is_dir():
        return Expectations(0, 0, (), demands_bytes=False, reason="its program left no tables")
    try:
        return compared(trace, truth)
    except _FORESEEN as error:
        return Expectations(0, 0, (), demands_bytes=False, reason=_first_line(error))


def _unseen(summary: Mapping[str, Any], lack: Lack) -> str:
    """Say what is missing in the trace of a program that ended well; empty if nothing is."""
    if not lack:
        return ""
    health = {check["id"]: check for check in summary["health"]}
    if "gpu_activity" in health:
        return _UNSEEN
    told = [health[each]["text"] for each in _TELLING if _warns(health.get(each))]
    return ". ".join([_NO_MIGRATION if lack == "migration" else _NO_TRAFFIC, *told])


def _warns(check: Mapping[str, Any] | None) -> bool:
    return check is not None and check["status"] != "ok"


def row_rule(totals: Mapping[str, Any]) -> str:
    """Say whether one row of the GPU page faults is one driver batch.

    Parameters
    ----------
    totals : mapping
        :func:`nsan.totals.totals` of a capture.

    Returns
    -------
    str
        See :class:`Checked`.
    """
    found = [each for each in totals["fault_rows"] if each["n_rows"]]
    if not found:
        return "no rows"
    counts = {key: sum(each[key] for each in found) for key in (*_FAULTS_OF_ROWS, "n_copies")}
    wrong = [f"{counts[key]} {words}" for key, words in _FAULTS_OF_ROWS.items() if counts[key]]
    styles = sorted({each["style"] for each in found})
    if other := [_STYLES[style] for style in styles if style in _STYLES]:
        return ", ".join(other)
    if wrong or any(style not in {"batch", "no_copies"} for style in styles):
        return f"fails: {', '.join(wrong) or ', '.join(styles)}"
    return "holds" if counts["n_copies"] else "no copies"
