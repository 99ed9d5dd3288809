"""What a path is, before anything heavy is imported to read it. Standard library only."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from nsan.errors import DamagedExportError, InputMissingError, NoPermissionError, NotAnExportError

_MAGIC: Final = b"SQLite format 3\0"
_HEADER_BYTES: Final = 100
_OTHER_MAGIC: Final = {
    b"\x1f\x8b": ("gzip data", "Unpack it first: `gunzip FILE`."),
    b"PK\x03\x04": ("a zip archive", "Unpack it first."),
    b"PAR1": ("a Parquet file", ""),
    b"\x80\x02": ("a pickle", ""),
    b"\x80\x04": ("a pickle", ""),
}
_REPORT_SUFFIXES: Final = {".nsys-rep", ".qdrep", ".qdstrm"}


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


def check_database(path: Path) -> None:
    """Say what a file is if it is not a whole SQLite database.

    Raises
    ------
    InputMissingError, NoPermissionError, NotAnExportError, DamagedExportError
        One for each way in which a path is not a database.
    """
    status = _status(path)
    if stat.S_ISDIR(status.st_mode):
        raise NotAnExportError(path, "a folder, not an export")
    if not stat.S_ISREG(status.st_mode):
        # Opening a pipe would wait for a writer.
        raise NotAnExportError(path, "not a regular file")
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
    except PermissionError as error:
        raise NoPermissionError(path) from error
    except OSError as error:
        raise DamagedExportError(path, f"it cannot be read ({error.strerror})") from error
    if not head:
        raise NotAnExportError(
            path, "an empty file", "The export was probably interrupted: export it again."
        )
    if not head.startswith(_MAGIC):
        raise _not_a_database(path, head)
    _check_length(path, head, status.st_size)


def _not_a_database(path: Path, head: bytes) -> NotAnExportError:
    if path.suffix in _REPORT_SUFFIXES:
        return NotAnExportError(
            path,
            "an nsys report, not an export",
            f"Export it first: `nsys export --type sqlite {path.name}`, then give nsan the .sqlite.",
        )
    for magic, (what, advice) in _OTHER_MAGIC.items():
        if head.startswith(magic):
            return NotAnExportError(path, what, advice)
    return NotAnExportError(path, "not a SQLite database")


def _check_length(path: Path, head: bytes, size: int) -> None:
    page_bytes = int.from_bytes(head[16:18], "big")
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    pages = int.from_bytes(head[28:32], "big")
    # The page count is valid only if the last writer kept it up to date.
    counted = head[24:28] == head[92:96] and pages > 0
    if len(head) < _HEADER_BYTES or (counted and size < pages * page_bytes):
        whole = f"{pages * page_bytes:,}" if counted else f"at least {_HEADER_BYTES}"
        raise DamagedExportError(path, f"cut short, {size:,} of {whole} bytes")
