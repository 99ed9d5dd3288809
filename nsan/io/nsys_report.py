"""An nsys report as a database: the export beside it where that is its own, else a fresh one.

Reports are in a format of their own that only nsys reads. What is made on the way stands in a
scratch folder in the cache folder, and goes with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nsan.errors import NsanError, StoreWriteError
from nsan.io import nsys_cli, nsys_info
from nsan.io.manifest import cache_folder, export_beside
from nsan.io.probe import display_name, identify
from nsan.io.sqlite_file import CellType, SqliteFile
from nsan.nsys_errors import NsysError, NsysNotFoundError
from nsan.text import safe

_SESSION_TABLE: Final = "TARGET_INFO_SESSION_START_TIME"
_INPUT_KEYS: Final = ("EXPORT_PARAM_INPUT_FILE", "EXPORT_INPUT_FILE")
_PART_KEYS: Final = ("EXPORT_PARAM_TABLES_TO_EXPORT", "EXPORT_PARAM_TIMES_TO_EXPORT")


@contextlib.contextmanager
def report_database(report: Path) -> Iterator[SqliteFile]:
    """Open a report as a database.

    Parameters
    ----------
    report : Path
        A `.nsys-rep` or `.qdrep`; it is only read, and nothing is written beside it.

    Yields
    ------
    SqliteFile
        The `.sqlite` beside the report, if it is whole, not older, and of the same recording; an
        export made for this without it. It warns of one that lies there and was not read.

    Raises
    ------
    NsanError
        If it cannot be exported; the message says what helps.
    """
    beside = export_beside(report)
    warnings: list[str] = []
    unused = _unfit(beside, report, warnings) if beside.is_file() else "there is none"
    if not unused:
        with SqliteFile(beside) as database:
            database.warning = " ".join(warnings)
            yield database
        return
    if not nsys_cli.programs():
        raise NsysNotFoundError(report, unused if beside.is_file() else "")
    with _scratch() as folder, _exported(report, folder / beside.name) as database:
        if beside.is_file():
            database.warning = _not_read(beside, unused)
        yield database


def _not_read(export: Path, why: str) -> str:
    name = safe(display_name(export))
    return f"{name} beside the report was not read: {why}. The report itself was."


@contextlib.contextmanager
def stream_database(stream: Path) -> Iterator[SqliteFile]:
    """Open a raw stream as a database: the importer makes a report of it, nsys exports that.

    Parameters
    ----------
    stream : Path
        A `.qdstrm`; a copy of it is worked on.

    Yields
    ------
    SqliteFile
        An export made for this.

    Raises
    ------
    NsanError
        If it cannot be imported or exported; the message says what helps.
    """
    with _scratch() as folder:
        copy, report = folder / stream.name, folder / stream.with_suffix(".nsys-rep").name
        try:
            # The importer appends to the stream that it reads.
            shutil.copyfile(stream, copy)
        except OSError as error:
            raise StoreWriteError(folder, error.strerror or str(error)) from error
        nsys_cli.import_stream(copy, report)
        copy.unlink()
        with _exported(report, report.with_suffix(".sqlite")) as database:
            yield database


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Make a folder on the file system of the stores, and remove it; also those of killed runs."""
    place = cache_folder() / "scratch"
    try:
        place.mkdir(parents=True, exist_ok=True)
        _sweep(place)
        folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=place))
    except OSError as error:
        raise StoreWriteError(place, error.strerror or str(error)) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(place: Path) -> None:
    for left in place.iterdir():
        pid = left.name.partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _exported(report: Path, output: Path, *, tables: str | None = None) -> Iterator[SqliteFile]:
    nsys_cli.export_report(report, output, tables=tables)
    identify(output)
    with SqliteFile(output) as database:
        yield database


def _unfit(export: Path, report: Path, warnings: list[str]) -> str:
    """Say why an export does not stand for a report; empty if it does, with what to warn of."""
    try:
        if identify(export) != "sqlite":
            return "it is no database"
        if export.stat().st_mtime_ns < report.stat().st_mtime_ns:
            return "it is older than the report"
        with SqliteFile(export) as database:
            unfit = _foreign(database, report)
            warnings.extend([database.warning] * bool(database.warning))
            return unfit
    except NsanError as error:
        # The first line says what it is; the advice that follows is for another case.
        return str(error).splitlines()[0].rstrip(".").replace(f"{export.name} is", "it is", 1)


def _foreign(database: SqliteFile, report: Path) -> str:
    facts = _metadata(database)
    if any(facts.get(key) for key in _PART_KEYS):
        return "it holds only a part of the recording"
    if not database.has_table("StringIds"):
        return "it is no whole nsys export"
    named = next((facts[key] for key in _INPUT_KEYS if facts.get(key)), None)
    if named is not None and named != display_name(report):
        return f"it was made from {named}"
    started = _session_start_of(report)
    if started is not None:
        return "" if started == _session_start(database) else "it is of another recording"
    if nsys_cli.programs():
        # An nsys of 2022 cannot tell when a report began; it can export it whole.
        return "it cannot be told to be of this recording"
    database.warning = (
        f"{database.path.name} beside the report was read: without nsys it could not be checked "
        "that it is of this recording."
    )
    return ""


def _metadata(database: SqliteFile) -> dict[str, str]:
    facts: dict[str, str] = {}
    columns: dict[str, CellType] = {"name": "text", "value": "text"}
    for table in filter(database.has_table, nsys_info.EXPORT_TABLES):
        for between in database.row_ranges(table, rows=1 << 16):
            rows, _ = database.read(table, columns, between)
            facts |= dict(rows.drop_nulls().iter_rows())
    return {key: facts[key] for key in (*_INPUT_KEYS, *_PART_KEYS) if key in facts}


def _session_start_of(report: Path) -> int | None:
    """Ask nsys when a recording began; None where no nsys can tell."""
    try:
        with (
            _scratch() as folder,
            _exported(report, folder / "start.sqlite", tables=_SESSION_TABLE) as database,
        ):
            return _session_start(database)
    except NsysError:
        return None


def _session_start(database: SqliteFile) -> int | None:
    if not database.has_table(_SESSION_TABLE):
        return None
    for between in database.row_ranges(_SESSION_TABLE, rows=1):
        rows, _ = database.read(_SESSION_TABLE, {"utcEpochNs": "integer"}, between)
        found: int | None = rows["utcEpochNs"].item()
        return found
    return None
