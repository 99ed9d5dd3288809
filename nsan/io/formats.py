"""From what a path holds to the reader of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from nsan.io.bench_truth import truth_beside
from nsan.io.probe import Kind, identify
from nsan.io.source import CaptureSource


def open_source(path: Path, *, keep_paths: bool) -> AbstractContextManager[CaptureSource]:
    """Open a capture with the reader that fits it.

    Parameters
    ----------
    path : Path
        A file or folder that :func:`nsan.io.probe.identify` knows.
    keep_paths : bool
        Keep whole paths of programs, binaries and source files instead of their last part.

    Returns
    -------
    context manager of CaptureSource
        Releases what was opened, and removes what was unpacked or exported for it. If the recorded program
        left its own tables beside the capture, allocations have their names from them.

    Raises
    ------
    NsanError
        If the capture cannot be read.
    """
    opened = _open(path, keep_paths=keep_paths)
    truth = truth_beside(path)
    if truth is None:
        return opened
    from nsan.io.bench_names import with_names

    return with_names(opened, truth)


def _open(path: Path, *, keep_paths: bool) -> AbstractContextManager[CaptureSource]:
    kind = identify(path)
    if kind == "sqlite":
        return _open_database(path, keep_paths=keep_paths)
    if kind == "session":
        from nsan.io.visual_profiler import open_session

        return open_session(path)
    if kind == "nvprof-text":
        from nsan.io.nvprof_text import NvprofText

        return NvprofText(path)
    return _open_nsys(path, kind, keep_paths=keep_paths)


@contextmanager
def _open_nsys(path: Path, kind: Kind, *, keep_paths: bool) -> Iterator[CaptureSource]:
    """Open what nsys wrote other than a SQLite export, as a database."""
    from nsan.io.nsys_report import report_database, stream_database
    from nsan.io.nsys_sqlite import NsysExport
    from nsan.io.table_folder import TableFolder

    if kind == "tables":
        folder = TableFolder(path)
        with NsysExport(path, database=folder, kind=folder.kind, keep_paths=keep_paths) as export:
            yield export
        return
    opened = stream_database(path) if kind == "qdstrm" else report_database(path)
    # The export closes its database, so that one is closed twice: that does no harm.
    with (
        opened as database,
        NsysExport(path, database=database, kind="nsys-report", keep_paths=keep_paths) as export,
    ):
        yield export


def _open_database(path: Path, *, keep_paths: bool) -> AbstractContextManager[CaptureSource]:
    from nsan.io.nsys_sqlite import NsysExport
    from nsan.io.nvprof_sqlite import NvprofDatabase, is_nvprof
    from nsan.io.sqlite_file import SqliteFile

    with SqliteFile(path) as database:
        by_nvprof = is_nvprof(database)
    if by_nvprof:
        return NvprofDatabase(path)
    return NsysExport(path, keep_paths=keep_paths)
