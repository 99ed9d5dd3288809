"""A snapshot file: told from other files, and read by a child process under limits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import nsan
from nsan.errors import (
    InputMissingError,
    NoPermissionError,
    NotASnapshotError,
    SnapshotError,
    UnsafeSnapshotError,
)
from nsan.io.torch_snapshot.limits import allowed_unpacked_bytes, patience_seconds
from nsan.io.torch_snapshot.paths import KEEP_PATHS
from nsan.io.torch_snapshot.sniff import GZIP_MAGIC, PROBE_BYTES, what_is

_PROGRAM: Final = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from nsan.io.torch_snapshot.child import main; main()"
)
_HEAD_BYTES: Final = 8
_LAST_WORDS: Final = 300
_SMALLER: Final = (
    "Record again with a smaller max_entries, or read it on a machine with more memory."
)


class RawSnapshot:
    """What the child read: columns by ``place.name``, where they have no value, and facts."""

    def __init__(self, answer: bytes) -> None:
        length = int.from_bytes(answer[:_HEAD_BYTES], "little")
        at = _HEAD_BYTES + length
        self.facts: dict[str, Any] = json.loads(answer[_HEAD_BYTES:at])
        self.texts: list[str] = self.facts.pop("texts", [])
        for name in ("settings", "model"):
            pairs = self.facts.get(name, ())
            self.facts[name] = {key: self.text(index) for key, index in pairs}
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._nulls: dict[str, list[int] | None] = {}
        for name, code, n, nulls in self.facts.pop("columns", []):
            dtype = np.dtype(code)
            self._columns[name] = np.frombuffer(answer, dtype, n, at)
            self._nulls[name] = nulls
            at += n * dtype.itemsize

    def values(self, name: str) -> npt.NDArray[Any]:
        """Return a column as numbers; where it has no value they mean nothing."""
        return self._columns[name]

    def text(self, index: int) -> str | None:
        """Return a text by its number; below 0 there is none."""
        return self.texts[index] if index >= 0 else None

    def empty_at(self, name: str) -> npt.NDArray[np.bool_]:
        """Say where a column has no value."""
        nulls, n = self._nulls[name], len(self._columns[name])
        mask = np.full(n, nulls is None)
        mask[nulls or []] = True
        return mask


def read_raw(path: Path, *, keep_paths: bool = False) -> RawSnapshot:
    """Read a snapshot file as columns.

    Parameters
    ----------
    path : Path
        The pickle, plain or gzipped; opened for reading only.
    keep_paths : bool, default False
        Keep the paths of source files whole.

    Returns
    -------
    RawSnapshot
        Its content, not yet as frames.

    Raises
    ------
    NsanError
        If it cannot be read, is something else, is damaged, or is more than plain data.
    """
    with _opened(path) as (file, head, n_bytes):
        what = what_is(head)
        if what is not None:
            raise NotASnapshotError(path, *what)
        packed = head.startswith(GZIP_MAGIC)
        most = allowed_unpacked_bytes(n_bytes) if packed else n_bytes
        answer = _ask(path, file, most, keep_paths=keep_paths)
    raw = RawSnapshot(answer)
    _check_answer(path, raw.facts)
    return raw


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """Open a regular file; yield its descriptor, its first bytes and its size."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        # Opening a pipe would wait for a writer.
        file = os.open(path, flags)
    except PermissionError as error:
        raise NoPermissionError(path) from error
    except (OSError, ValueError) as error:
        if path.is_dir():
            raise NotASnapshotError(
                path, "a folder", "Give nsan the snapshot file itself."
            ) from error
        raise InputMissingError(path) from error
    try:
        status = os.fstat(file)
        if stat.S_ISDIR(status.st_mode):
            raise NotASnapshotError(path, "a folder", "Give nsan the snapshot file itself.")
        if not stat.S_ISREG(status.st_mode):
            raise NotASnapshotError(path, "not a regular file")
        head = os.read(file, PROBE_BYTES)
        os.lseek(file, 0, os.SEEK_SET)
        yield file, head, status.st_size
    except OSError as error:
        raise SnapshotError(path, f"it cannot be read ({error.strerror})") from error
    finally:
        os.close(file)


def _command(*, keep_paths: bool = False) -> list[str]:
    """Return the command of the child: nothing of the user's environment reaches it."""
    home = str(Path(nsan.__file__).parents[1])
    command = [sys.executable, "-I", "-S"]
    if sys.flags.dont_write_bytecode:
        command.append("-B")
    if sys.pycache_prefix:
        command += ["-X", f"pycache_prefix={sys.pycache_prefix}"]
    return [*command, "-c", _PROGRAM, home, *[KEEP_PATHS] * keep_paths]


def _ask(path: Path, file: int, n_bytes: int, *, keep_paths: bool) -> bytes:
    """Run the child on an open file; return what it wrote."""
    try:
        child = subprocess.Popen(  # noqa: S603 - our own program, by a list
            _command(keep_paths=keep_paths),
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except (OSError, ValueError) as error:
        raise SnapshotError(path, f"Python cannot be started ({error})") from error
    seconds = patience_seconds(n_bytes)
    with child:
        try:
            answer, said = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            text = f"it was not read within {seconds:.0f} s, and reading was stopped"
            raise SnapshotError(path, text, _SMALLER) from error
        finally:
            child.kill()
    if child.returncode != 0 or len(answer) < _HEAD_BYTES:
        raise _ended(path, child.returncode, said)
    return answer


def _ended(path: Path, status: int, said: bytes) -> Exception:
    """Say how the child ended without an answer."""
    if status in {-getattr(signal, "SIGPROF", 0), -getattr(signal, "SIGXCPU", 0)} - {0}:
        return UnsafeSnapshotError(
            path, "it takes far longer to read than a file of its size should"
        )
    if status < 0:
        how = f"reading it ended with signal {-status}"
        text = f"{how} (out of memory, or made to break its reader)"
        return SnapshotError(path, text, _SMALLER)
    words = said.decode("utf-8", errors="replace").strip()[-_LAST_WORDS:]
    last = "".join(c if c.isprintable() else " " for c in words)
    return SnapshotError(path, f"reading it ended with status {status}: {last or 'no words'}")


def _check_answer(path: Path, facts: dict[str, Any]) -> None:
    kind, text = facts.get("refused"), facts.get("text", "")
    if kind == "unsafe":
        raise UnsafeSnapshotError(path, text)
    if kind == "damaged":
        raise SnapshotError(path, text)
    if kind == "other":
        raise NotASnapshotError(path, f"a pickle, but no memory snapshot: {text}")
    if kind == "memory":
        raise UnsafeSnapshotError(path, "it takes far more memory than a file of its size should")
