"""Bytes and lines of a capture of the older profilers, plain or gzipped, and what can be wrong with them."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from nsan.errors import DamagedExportError, NoPermissionError

AGAIN: Final = "Copy it again; if that does not help, record again with `nvprof` or `nsys profile`."
"""The way out of a damaged file."""

_GZIP_MAGIC: Final = b"\x1f\x8b"
_CHUNK_BYTES: Final = 1 << 18
_LONGEST_LINE: Final = 1 << 20


@contextmanager
def _opened(path: Path) -> Iterator[gzip.GzipFile | io.BufferedReader]:
    """Open a file, unpacked if it is gzip data; what goes wrong while it is read becomes one error."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            yield gzip.GzipFile(fileobj=raw) if packed else raw
    except EOFError as error:
        raise DamagedExportError(path, "its gzip data is cut short", AGAIN) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DamagedExportError(path, "its gzip data is corrupt", AGAIN) from error
    except PermissionError as error:
        raise NoPermissionError(path) from error
    except OSError as error:
        raise DamagedExportError(path, f"it cannot be read ({error.strerror})", AGAIN) from error


def read_chunks(path: Path) -> Iterator[bytes]:
    """Read a file piece by piece.

    Raises
    ------
    DamagedExportError, NoPermissionError
        If it cannot be read or unpacked.
    """
    with _opened(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def read_lines(path: Path) -> Iterator[str]:
    """Read a text line by line, without the ends of the lines; bytes that are not UTF-8 are replaced.

    Raises
    ------
    DamagedExportError, NoPermissionError
        If it cannot be read or unpacked, or a line is longer than 1 MiB.
    """
    with _opened(path) as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            if len(line) == _LONGEST_LINE:
                raise DamagedExportError(path, f"line {number} is longer than 1 MiB", AGAIN)
            yield line.decode("utf-8", errors="replace").rstrip("\r\n")
