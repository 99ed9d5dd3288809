"""What can go wrong, in words that carry the way out.

Each class builds its own message and keeps the facts as attributes. ``exit_code`` is what the
command line returns (design 7): 1 error, 2 usage, 3 no Unified Memory data.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def _listed(names: Iterable[object], *, limit: int = 10) -> str:
    shown = [str(name) for name in names]
    rest = f", and {len(shown) - limit} more" if len(shown) > limit else ""
    return ", ".join(shown[:limit]) + rest if shown else "none"


class NsanError(Exception):
    """Any error that nsan foresees; its text is meant for the user."""

    exit_code = 1


class UsageError(NsanError):
    """The call cannot be understood."""

    exit_code = 2


class BadTimeError(UsageError):
    """A text is not a time or a window."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(
            f"{text!r} is not a time. Write 250ms, 1s250ms or 1200 (nanoseconds), and a window as "
            "START/END, for example 1s/1s500ms or 2s/ ."
        )


class BadSizeError(UsageError):
    """A text is not a size."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(f"{text!r} is not a size. Write 64MiB, 1.5GiB or 4096 (byte).")


class InputMissingError(NsanError):
    """There is nothing at a path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"{path}: no such file or folder. Check the path.")


class NoPermissionError(NsanError):
    """A path may not be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"{path}: you may not read this file. Ask its owner, or copy it.")


class NotAnExportError(NsanError):
    """A file is not an nsys SQLite export; ``what`` says what it is."""

    def __init__(self, path: Path, what: str, advice: str = "") -> None:
        self.path, self.what = path, what
        advice = advice or (
            "nsan reads SQLite exports of Nsight Systems: "
            "`nsys export --type sqlite REPORT.nsys-rep`."
        )
        super().__init__(f"{path.name} is {what}.\n{advice}")


class DamagedExportError(NsanError):
    """A database is cut short or corrupt."""

    def __init__(self, path: Path, detail: str, advice: str = "") -> None:
        self.path, self.detail = path, detail
        advice = advice or (
            "Copy it again, or export it again from the report: "
            "`nsys export --type sqlite --force-overwrite true REPORT.nsys-rep`."
        )
        super().__init__(f"{path.name} is damaged: {detail}.\n{advice}")


class NsysError(NsanError):
    """nsys, or its importer, could not be run or did not do its part."""


class NsysNotFoundError(NsysError):
    """A report can only be read by nsys, and none is installed.

    ``unused`` says why a `.sqlite` beside the report does not do, if there is one.
    """

    def __init__(self, report: Path, unused: str = "") -> None:
        self.report, self.unused = report, unused
        beside = (
            f" {report.with_suffix('.sqlite').name} beside it is not used: {unused}; "
            "name it to open it all the same."
            if unused
            else ""
        )
        super().__init__(
            f"{report.name} is an nsys report, which only nsys can read, and no nsys was found: "
            f"not by NSYS, not on PATH, not in the usual folders.{beside}\n"
            "Install NVIDIA Nsight Systems or set NSYS to its nsys, or export the report where it "
            f"is installed: `nsys export --type sqlite {report.name}`, and give nsan the result."
        )


class NsysNotExecutableError(NsysError):
    """A program that was named, or found, cannot be run."""

    def __init__(self, program: str, reason: str = "it is not a program that may be run") -> None:
        self.program, self.reason = program, reason
        super().__init__(
            f"{program} cannot be run: {reason}. "
            "Set NSYS to the nsys program itself, or unset it to search the usual places."
        )


class ReportTooNewError(NsysError):
    """A report was made by a newer nsys than the one that is installed."""

    def __init__(self, report: Path, report_version: str, nsys_version: str) -> None:
        self.report = report
        self.report_version, self.nsys_version = report_version, nsys_version
        super().__init__(
            f"{report.name} was made by nsys {report_version}; the nsys found here is "
            f"{nsys_version}, and an older nsys cannot read a newer report.\n"
            f"Install at least {report_version} (or set NSYS to it), or export it elsewhere: "
            f"`nsys export --type sqlite {report.name}`, and give nsan the result."
        )


class ReportCutShortError(NsysError):
    """A report lacks its end."""

    def __init__(self, report: Path, said: str) -> None:
        self.report, self.said = report, said
        super().__init__(
            f"{report.name} is cut short: its end is missing (nsys says: {said}).\n"
            "Copy it again from where it was recorded, or record it again."
        )


class NotAReportError(NsysError):
    """A file has the name of a report or of a stream, and is none."""

    def __init__(self, report: Path, said: str, what: str = "an nsys report") -> None:
        self.report, self.said = report, said
        super().__init__(
            f"{report.name} is not {what}, whatever its name says (nsys says: {said}).\n"
            "Give nsan a file that `nsys profile` wrote, or an export of one."
        )


class NsysNoOutputError(NsysError):
    """nsys said that all went well, and left nothing, or an empty file."""

    def __init__(self, report: Path, program: str, what: str) -> None:
        self.report, self.program, self.what = report, program, what
        super().__init__(
            f"{program} reported success on {report.name}, and left {what}.\n"
            "Try another version of nsys (set NSYS to it), or export it by hand: "
            f"`nsys export --type sqlite {report.name}`."
        )


class NsysTimeoutError(NsysError):
    """nsys did not end in time."""

    def __init__(self, report: Path, program: str, seconds: float) -> None:
        self.report, self.program, self.seconds = report, program, seconds
        super().__init__(
            f"{program} did not finish with {report.name} within {seconds:g} s and was stopped.\n"
            "Give it longer with NSAN_NSYS_TIMEOUT=SECONDS, or export it by hand: "
            f"`nsys export --type sqlite {report.name}`."
        )


class NsysFailedError(NsysError):
    """nsys failed in a way that is not known; ``lines`` are its last words."""

    def __init__(self, report: Path, program: str, status: int, lines: Iterable[str]) -> None:
        self.report, self.program, self.status = report, program, status
        self.lines = list(lines)
        how = f"was killed by signal {-status}" if status < 0 else f"failed with status {status}"
        said = "".join(f"\n  {line}" for line in self.lines) or " nothing."
        super().__init__(
            f"{program} {how} on {report.name}. Its last words:{said}\n"
            f"Run `nsys export --type sqlite {report.name}` by hand to see more."
        )


class ImporterNotFoundError(NsysError):
    """A raw stream needs nsys's importer, and none is installed."""

    def __init__(self, stream: Path, version: str | None = None) -> None:
        self.stream, self.version = stream, version
        wanted = f"Nsight Systems {version}" if version else "the version that recorded it"
        super().__init__(
            f"{stream.name} is the raw stream of a recording, which only the QdstrmImporter of "
            "Nsight Systems can read, and none was found beside nsys or on PATH.\n"
            f"Install the whole of {wanted}, not only its command line, or make the report where "
            f"it is installed: `QdstrmImporter -i {stream.name}`."
        )


class StreamVersionError(NsysError):
    """A raw stream needs the importer of its own version."""

    def __init__(self, stream: Path, stream_version: str, importers: Iterable[str]) -> None:
        self.stream, self.stream_version = stream, stream_version
        self.importers = list(importers)
        super().__init__(
            f"{stream.name} was recorded by nsys {stream_version}, and only the importer of that "
            f"very version can read it; found: {_listed(self.importers)}.\n"
            f"Install Nsight Systems {stream_version}, or make the report where it is installed: "
            f"`QdstrmImporter -i {stream.name}`."
        )


class ProgramNotFoundError(UsageError):
    """The program to record cannot be run."""

    def __init__(self, program: str, reason: str | None = None) -> None:
        self.program = program
        super().__init__(
            f"{program!r} cannot be run: {reason or 'no such program, or not executable'}. "
            "Give a path, as ./program, or a program on PATH."
        )


class RecorderNotFoundError(NsysError):
    """There is no nsys to record with."""

    def __init__(self) -> None:
        super().__init__(
            "nsys, which records programs, is not found: not in NSYS, not on PATH, not in the usual "
            "folders. Install NVIDIA Nsight Systems, or name its nsys: NSYS=/path/to/nsys nsan ..."
        )


class NsysProfileError(NsysError):
    """`nsys profile` made no report."""

    def __init__(self, name: str, status: int, lines: Iterable[str]) -> None:
        self.status, self.lines = status, tuple(lines)
        said = "\n".join(f"  {line}" for line in self.lines) or "  (nothing)"
        super().__init__(
            f"nsys made no report {name}, and ended with status {status}. Its last words:\n{said}\n"
            "Try `nsys profile` by hand; `nsys status --environment` says what this machine allows."
        )


class UnknownFilterValueError(NsanError):
    """A filter names something that the trace does not have."""

    exit_code = 2

    def __init__(self, what: str, asked: object, present: Iterable[object]) -> None:
        self.what, self.asked, self.present = what, asked, list(present)
        super().__init__(f"The trace has no {what} {asked}. It has: {_listed(self.present)}.")


class NoFilterTableError(NsanError):
    """A filter needs events that were not recorded."""

    exit_code = 2

    def __init__(self, what: str, switch: str) -> None:
        self.what, self.switch = what, switch
        super().__init__(
            f"The trace has no {what} to filter by. Profile again with `nsys profile {switch} ...`."
        )


class NotAStoreError(NsanError):
    """A folder is not an nsan store, nor anything else that nsan reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(
            f"{path} is a folder without a manifest.json: not an nsan store, and not the folder of "
            "an nsys export or of reports either.\n"
            "Give an nsys report or export, or a store made by `nsan import FILE -o FOLDER`."
        )


class BrokenStoreError(NsanError):
    """A store is not whole, or was written by another nsan."""

    def __init__(self, path: Path, detail: str) -> None:
        self.path, self.detail = path, detail
        super().__init__(
            f"{path} is not a usable nsan store: {detail}.\n"
            f"Import its source again: `nsan import FILE -o {path} --force-overwrite`."
        )


class StoreWriteError(NsanError):
    """A store could not be written; nothing half-written is left."""

    def __init__(self, folder: Path, reason: str) -> None:
        self.folder, self.reason = folder, reason
        super().__init__(
            f"Cannot write to {folder}: {reason}. Nothing half-written is left there.\n"
            "Free some space, choose a folder with `nsan import FILE -o FOLDER`, or set "
            "NSAN_CACHE_DIR to one that has room."
        )


class OutputExistsError(NsanError):
    """An output is already there and may not be replaced."""

    def __init__(self, path: Path, what: str = "exists already") -> None:
        self.path = path
        super().__init__(f"{path} {what}. Choose another name, or add --force-overwrite.")


class PlaceTakenError(NsanError):
    """A store cannot be put where something else is, whatever flag is given."""

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        super().__init__(f"{path} {what}. Choose another place.")


class OutputIsInputError(NsanError):
    """An output would overwrite what is being read."""

    exit_code = 2

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(
            f"{path} is what is being read, and is never written to. Choose another name."
        )


class OutputWriteError(NsanError):
    """A result could not be written; what was at its place is still there."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(
            f"Cannot write the result to {path}: {reason}. Nothing there was changed. "
            "Choose another place with -o FILE."
        )


class SchemaMismatchError(NsanError):
    """A frame does not have the columns of its table."""

    def __init__(self, table: str, problems: Iterable[str]) -> None:
        self.table, self.problems = table, list(problems)
        super().__init__(f"{table}: " + "; ".join(self.problems))


class UnknownNameError(UsageError):
    """A name is not among those that exist."""

    def __init__(self, what: str, name: str, names: Iterable[str]) -> None:
        self.what, self.name, self.names = what, name, list(names)
        super().__init__(
            f"There is no {what} {name!r}. There are: {_listed(self.names, limit=40)}."
        )


class AnalysisError(NsanError):
    """An analysis is not what it declares to be."""

    def __init__(self, name: str, problem: str) -> None:
        self.name, self.problem = name, problem
        super().__init__(
            f"The analysis {name!r} cannot be used: {problem}. "
            "See the docstring of nsan.analysis.catalog for what an analysis is."
        )


class PluginError(NsanError):
    """A user's own analyses cannot be loaded."""

    def __init__(self, origin: str, problem: str) -> None:
        self.origin, self.problem = origin, problem
        super().__init__(
            f"The plug-in {origin} cannot be used: {problem}. "
            "The README shows what an analysis of your own looks like."
        )


class ProgramError(UsageError):
    """A program for the driver model cannot be run."""

    def __init__(self, problem: str, advice: str) -> None:
        self.problem = problem
        super().__init__(f"{problem}. {advice}")


class ExtraMissingError(NsanError):
    """A command needs a package that the base install does not bring."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(
            f"{what} needs the package {package}, which is not installed. "
            f"Run: pip install 'nsan[{extra}]'"
        )


class AllocatorFullError(NsanError):
    """The caching allocator cannot serve a request, even after it has released what it can."""

    def __init__(self, requested: int, reserved: int, limit: int | None) -> None:
        self.requested, self.reserved, self.limit = requested, reserved, limit
        of = "" if limit is None else f" of {limit} byte that it may reserve"
        super().__init__(
            f"The caching allocator is out of memory: {requested} byte were asked for, and "
            f"{reserved} byte{of} are reserved. "
            "Give the model a larger GPU or memory fraction, or a smaller workload."
        )


class SnapshotError(NsanError):
    """A memory snapshot of PyTorch cannot be read, or is damaged; ``detail`` says why."""

    says = "could not be read:", "Copy it again from where it was written, or record it again."

    def __init__(self, path: Path, detail: str, advice: str = "") -> None:
        self.path, self.detail = path, detail
        super().__init__(f"{path.name} {self.says[0]} {detail}.\n{advice or self.says[1]}")


class NotASnapshotError(SnapshotError):
    """A file is no memory snapshot; ``detail`` says what it is."""

    says = "is", "A snapshot is what `torch.cuda.memory._dump_snapshot(FILE)` writes, also gzipped."


class UnsafeSnapshotError(SnapshotError):
    """A pickle is more than plain data, or would grow beyond its size: nothing of it was run."""

    says = "is refused:", "Nothing in this file was run. Open it nowhere if you do not trust it."
