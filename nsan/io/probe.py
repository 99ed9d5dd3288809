"""What a path is, before anything heavy is imported to read it. Standard library only."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import zlib
from pathlib import Path
from typing import Final, Literal

from nsan.errors import (
    DamagedExportError,
    InputMissingError,
    NoPermissionError,
    NotAnExportError,
    NotAStoreError,
)

Kind = Literal["sqlite", "report", "qdstrm", "tables", "session", "nvprof-text"]
"""What a path holds: a database (of nsys or nvprof), an nsys report or its raw stream, a folder of an
nsys Parquet or Arrow export, a Visual Profiler session, or the text or CSV of nvprof."""

_SQLITE_MAGIC: Final = b"SQLite format 3\0"
_HEADER_BYTES: Final = 100
_PROBE_BYTES: Final = 1 << 16
_STEP_BYTES: Final = 256
_GZIP_MAGIC: Final = b"\x1f\x8b"
_SNAPSHOT: Final = (
    "A memory snapshot of PyTorch is read by `nsan allocator FILE`, and with the trace of its run by "
    "`nsan allocator TRACE --snapshot FILE`."
)
_ONE_OF_MANY: Final = (
    "`nsan summary` and `nsan report` read a corpus; any other command reads one report: name its file. In "
    "Python: nsan.open_corpus(FOLDER).trace(RUN, RANK)."
)
_PICKLE_MAGIC: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_OTHER_MAGIC: Final = {
    b"PK\x03\x04": ("a zip archive", "Unpack it first."),
    b"PAR1": ("one Parquet file", "Give nsan the folder of the whole nsys export."),
    **dict.fromkeys(_PICKLE_MAGIC, ("a pickle", _SNAPSHOT)),
}
REPORT_SUFFIXES: Final = (".nsys-rep", ".qdrep")
STREAM_SUFFIX: Final = ".qdstrm"
CAPTURE_SUFFIXES: Final = (*REPORT_SUFFIXES, STREAM_SUFFIX, ".sqlite")
"""Names of captures by which a folder of reports is known."""

CORPUS_FILE: Final = "corpus.json"
"""What makes a folder a corpus of many reports."""

_REPORT_MAGIC: Final = b"NVIDIA Tegra Profiler Report"
_STREAM_MAGIC: Final = b"Nsight Systems Stream"
_NVPROF_SUFFIXES: Final = (".nvprof", ".nvvp")
_TABLE_SUFFIXES: Final = (".parquet", ".arrow")
_TABLE_MARKS: Final = (
    "StringIds",
    "META_DATA_EXPORT",
    "EXPORT_META_DATA",
    "ANALYSIS_DETAILS",
    "NVTX_EVENTS",
    "CUPTI_ACTIVITY_KIND_",
    "CUDA_UM_",
)
_NVPROF_TEXT: Final = re.compile(
    rb"==\d+== |\[Unified Memory |\"?Start\"?,\"?Duration|Profiling result:"
)


def display_name(path: Path) -> str:
    """Return the last part of a path as text that can be stored: a file name may be any bytes."""
    return os.fsencode(path.name).decode("utf-8", errors="replace")


def is_folder(path: Path) -> bool:
    """Say whether a path is a folder.

    Raises
    ------
    InputMissingError, NoPermissionError
        If it cannot be looked at.
    """
    return stat.S_ISDIR(_status(path).st_mode)


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except PermissionError as error:
        raise NoPermissionError(path) from error
    except (OSError, ValueError) as error:
        raise InputMissingError(path) from error


def identify(path: Path) -> Kind:
    """Say what a path holds, by its first bytes; by its name only where those do not tell.

    Raises
    ------
    InputMissingError, NoPermissionError, NotAnExportError, DamagedExportError
        One for each way in which a path is no capture.
    """
    status = _status(path)
    if stat.S_ISDIR(status.st_mode):
        return _identify_folder(path)
    if not stat.S_ISREG(status.st_mode):
        # Opening a pipe would wait for a writer.
        raise NotAnExportError(path, "not a regular file")
    head = _head(path)
    if not head:
        raise NotAnExportError(
            path,
            "an empty file",
            "The recording or the export was probably interrupted: do it again.",
        )
    if head.startswith(_SQLITE_MAGIC):
        _check_length(path, head, status.st_size)
        return "sqlite"
    return _identify_file(path, head)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_PROBE_BYTES)
    except PermissionError as error:
        raise NoPermissionError(path) from error
    except OSError as error:
        raise DamagedExportError(path, f"it cannot be read ({error.strerror})") from error


def _identify_file(path: Path, head: bytes) -> Kind:
    if path.suffix == STREAM_SUFFIX or _STREAM_MAGIC in head[:_HEADER_BYTES]:
        return "qdstrm"
    if path.suffix in REPORT_SUFFIXES or head.startswith(_REPORT_MAGIC):
        return "report"
    for magic, (what, advice) in _OTHER_MAGIC.items():
        if head.startswith(magic):
            raise NotAnExportError(path, what, advice)
    text = _unpacked(head) if head.startswith(_GZIP_MAGIC) else head
    if text.lstrip().startswith((b"<?xml", b"<session")) and b"<session" in text:
        return "session"
    if _NVPROF_TEXT.search(text):
        return "nvprof-text"
    if head.startswith(_GZIP_MAGIC):
        if text.startswith(_PICKLE_MAGIC):
            raise NotAnExportError(path, "a gzipped pickle", _SNAPSHOT)
        raise NotAnExportError(path, "gzip data", "Unpack it first: `gunzip FILE`.")
    if path.suffix in _NVPROF_SUFFIXES:
        raise NotAnExportError(
            path,
            "a file of nvprof or the Visual Profiler in the binary format that they wrote before 2016",
            "nsan reads their SQLite databases and sessions. Record again with `nsys profile`.",
        )
    raise NotAnExportError(path, "not a SQLite database")


def _unpacked(head: bytes) -> bytes:
    """Unpack the beginning of gzip data, up to where it is damaged."""
    unpacker = zlib.decompressobj(wbits=31)
    text = b""
    with contextlib.suppress(zlib.error):
        for at in range(0, len(head), _STEP_BYTES):
            text += unpacker.decompress(head[at : at + _STEP_BYTES], _PROBE_BYTES)
            if len(text) >= _PROBE_BYTES:
                break
    return text


def _identify_folder(path: Path) -> Kind:
    try:
        tables = [file.stem for file in path.iterdir() if file.suffix in _TABLE_SUFFIXES]
    except PermissionError as error:
        raise NoPermissionError(path) from error
    if any(table.startswith(_TABLE_MARKS) for table in tables):
        return "tables"
    if (path / CORPUS_FILE).is_file() and (path / "reports").is_dir():
        raise NotAnExportError(path, "a corpus of many reports", _ONE_OF_MANY)
    raise NotAStoreError(path)


def newest_capture(folder: Path) -> Path | None:
    """Return the report, stream or SQLite file of a folder that was changed last; None without.

    Raises
    ------
    NoPermissionError
        If the folder may not be read.
    """
    try:
        found = [path for path in folder.iterdir() if path.suffix in CAPTURE_SUFFIXES]
    except PermissionError as error:
        raise NoPermissionError(folder) from error
    times = {path: path.stat().st_mtime_ns for path in found if path.is_file()}
    return max(times, key=lambda path: (times[path], path.name), default=None)


def _check_length(path: Path, head: bytes, size: int) -> None:
    page_bytes = int.from_bytes(head[16:18], "big")
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    pages = int.from_bytes(head[28:32], "big")
    # The page count is valid only if the last writer kept it up to date.
    counted = head[24:28] == head[92:96] and pages > 0
    if len(head) < _HEADER_BYTES or (counted and size < pages * page_bytes):
        whole = f"{pages * page_bytes:,}" if counted else f"at least {_HEADER_BYTES}"
        raise DamagedExportError(path, f"cut short, {size:,} of {whole} bytes")
