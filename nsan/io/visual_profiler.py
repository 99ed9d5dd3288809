"""Open a session of the Visual Profiler: XML around the database that nvprof writes.

The database is cut into pieces, each packed with gzip and written as base64 in a ``split`` element
of ``timelinepdm``. It is unpacked piece by piece into a scratch file, which is removed afterwards.
Everything else in a session is settings, among them the program's path, arguments and environment:
only ``uvmprofiling`` is read. ``analysispdm`` holds serialised Java objects and is never opened.
"""

from __future__ import annotations

import binascii
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final
from xml.parsers import expat

from nsan.errors import DamagedExportError, NotAnExportError, StoreWriteError
from nsan.io.nvprof_input import AGAIN, read_chunks
from nsan.io.nvprof_sqlite import NvprofDatabase, is_nvprof
from nsan.io.probe import identify
from nsan.io.sqlite_file import SqliteFile

_SQLITE_MAGIC: Final = b"SQLite format 3\0"
_MOST_BYTES_OF_A_PIECE: Final = 16 << 20
"""The profiler cuts at 1 MiB; far more is not its work."""

_OPEN_AGAIN: Final = (
    "Open it once more in the Visual Profiler that made it and export a database, or record again "
    "with `nsys profile`."
)


@contextmanager
def open_session(path: Path) -> Iterator[NvprofDatabase]:
    """Open a session, plain or gzipped.

    Parameters
    ----------
    path : Path
        A file that :func:`nsan.io.probe.identify` calls a session.

    Yields
    ------
    NvprofDatabase
        The database inside it.

    Raises
    ------
    NotAnExportError, DamagedExportError
        If the session holds no data, data of another form, or is damaged.
    StoreWriteError
        If there is no room to unpack it.
    """
    with tempfile.TemporaryDirectory(prefix="nsan-") as folder:
        unpacked = Path(folder) / "session.sqlite"
        session = _unpack(path, unpacked)
        with _database(path, unpacked) as database:
            yield NvprofDatabase(path, database=database, um_profiled=session.um_profiled)


def _unpack(path: Path, target: Path) -> _Session:
    try:
        with target.open("wb") as file:
            session = _Session(path, file)
            for chunk in read_chunks(path):
                session.feed(chunk)
            session.close()
    except OSError as error:
        raise StoreWriteError(target.parent, error.strerror or str(error)) from error
    if not target.stat().st_size:
        raise NotAnExportError(
            path,
            "a session of the Visual Profiler without data",
            "Its program was probably never run. Run it in the profiler and save the session again, "
            "or record with `nsys profile`.",
        )
    return session


@contextmanager
def _database(path: Path, unpacked: Path) -> Iterator[SqliteFile]:
    """Open the unpacked database; messages name the session."""
    try:
        identify(unpacked)
        database = SqliteFile(unpacked)
    except (DamagedExportError, NotAnExportError) as error:
        detail = error.detail if isinstance(error, DamagedExportError) else error.what
        raise DamagedExportError(path, f"the database in it: {detail}", AGAIN) from error
    with database:
        database.path = path
        if not is_nvprof(database):
            raise NotAnExportError(path, "a session whose database has no table of nvprof", AGAIN)
        yield database


class _Session:
    """Takes a session's bytes as they come and writes the database in it to a file."""

    def __init__(self, path: Path, target: IO[bytes]) -> None:
        self.um_profiled: bool | None = None
        self._path = path
        self._target = target
        self._within: list[str] = []
        self._piece: _Piece | None = None
        self._n_captures = 0
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._text
        # A session declares nothing; entities could grow without end.
        self._parser.StartDoctypeDeclHandler = self._refuse

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes."""
        self._parse(chunk, final=False)

    def close(self) -> None:
        """Take the end of the session."""
        self._parse(b"", final=True)

    def _parse(self, chunk: bytes, *, final: bool) -> None:
        try:
            self._parser.Parse(chunk, final)
        except expat.ExpatError as error:
            what = expat.errors.messages.get(error.code, str(error))
            detail = f"its XML is broken at line {error.lineno} ({what})"
            raise DamagedExportError(self._path, detail, AGAIN) from error

    def _refuse(self, *_: object) -> None:
        raise NotAnExportError(
            self._path,
            "XML with declarations, which the Visual Profiler does not write",
            "nsan does not expand them.",
        )

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._within.append(name)
        if name == "executable" and "uvmprofiling" in attributes:
            self.um_profiled = {"true": True, "false": False}.get(attributes["uvmprofiling"])
        if name in {"pdm", "split"} and "analysispdm" not in self._within:
            self._finish_piece()
            self._piece = _Piece(self._path, self._target)
            if name == "pdm":
                self._n_captures += 1
        if self._n_captures > 1:
            raise NotAnExportError(
                self._path,
                f"a session of several captures ({self._n_captures} or more)",
                "Give nsan the files that nvprof wrote, one by one.",
            )

    def _end(self, name: str) -> None:
        self._within.pop()
        if name in {"pdm", "split"}:
            self._finish_piece()

    def _finish_piece(self) -> None:
        if self._piece is not None:
            self._piece.finish()
            self._piece = None

    def _text(self, text: str) -> None:
        if self._piece is not None:
            self._piece.add(text)


class _Piece:
    """One piece of the database: base64 of gzip data, unpacked as it comes."""

    def __init__(self, path: Path, target: IO[bytes]) -> None:
        self._path = path
        self._target = target
        self._rest = ""
        self._head = b""
        self._n_bytes = 0
        self._started = False
        self._unpacker = zlib.decompressobj(wbits=31)

    def add(self, text: str) -> None:
        """Take more base64 text, cut anywhere."""
        text = self._rest + "".join(text.split())
        whole = len(text) - len(text) % 4
        self._rest = text[whole:]
        self._started = self._started or bool(text)
        try:
            packed = binascii.a2b_base64(text[:whole], strict_mode=True)
            unpacked = self._unpacker.decompress(packed, _MOST_BYTES_OF_A_PIECE + 1)
        except (ValueError, zlib.error) as error:
            detail = f"a piece of its data cannot be unpacked ({error})"
            raise DamagedExportError(self._path, detail, AGAIN) from error
        if self._unpacker.unused_data:
            raise DamagedExportError(self._path, "something follows a piece of its data", AGAIN)
        self._check_form(unpacked)
        self._n_bytes += len(unpacked)
        if self._n_bytes > _MOST_BYTES_OF_A_PIECE:
            detail = "a piece of its data is far larger than the Visual Profiler makes them"
            raise DamagedExportError(self._path, detail, AGAIN)
        self._target.write(unpacked)

    def _check_form(self, unpacked: bytes) -> None:
        """Refuse what is no database as soon as its first bytes are there."""
        head = (self._head + unpacked)[: len(_SQLITE_MAGIC)]
        self._head = head
        at_begin = self._target.tell() == self._n_bytes
        if at_begin and not _SQLITE_MAGIC.startswith(head):
            raise NotAnExportError(
                self._path,
                "a session of the Visual Profiler whose data is not a SQLite database: an old "
                "binary format",
                _OPEN_AGAIN,
            )

    def finish(self) -> None:
        """Check that the piece is whole."""
        if self._started and (self._rest or not self._unpacker.eof):
            raise DamagedExportError(self._path, "a piece of its data is cut short", AGAIN)
