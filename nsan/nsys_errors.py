"""What can go wrong with the installed nsys, in words that carry the way out; see :mod:`nsan.errors`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from nsan.errors import NsanError, listed


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
            f"very version can read it; found: {listed(self.importers)}.\n"
            f"Install Nsight Systems {stream_version}, or make the report where it is installed: "
            f"`QdstrmImporter -i {stream.name}`."
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
