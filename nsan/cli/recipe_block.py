"""A block of lines in a file of the user's: put in, replaced, taken out; not a byte of the rest is changed."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from nsan.errors import NoPermissionError, NsanError

_BEGIN: Final = b"# >>> nsan recipe >>>"
_END: Final = b"# <<< nsan recipe <<<"
_JOINED: Final = b" (the line before had no end)"
_ABOUT: Final = b"# Written by `nsan recipe install`; `nsan recipe install --remove` takes it out."
_WRITE: Final = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_BLOCK: Final = re.compile(
    # Where the file had no end of line, the one before the block is the block's own.
    rb"(?:(?P<joined>\n|\A)" + re.escape(_BEGIN + _JOINED) + rb"|^" + re.escape(_BEGIN) + rb")"
    rb"\r?\n.*?^" + re.escape(_END) + rb"\r?(?:\n|\Z)",
    re.MULTILINE | re.DOTALL,
)


class BrokenBlockError(NsanError):
    """A block was edited, and where it ends cannot be told."""

    def __init__(self, path: Path, line: int) -> None:
        self.path, self.line = path, line
        super().__init__(
            f"{path}, line {line}: a block of nsan begins or ends here, and its other end is missing. Nothing was "
            "changed. Remove what is left of the block by hand, and try again."
        )


class NotAFileError(NsanError):
    """What should be a start file is something else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"{path} is not a file. Name the start file of your shell: --file FILE.")


class StartFileError(NsanError):
    """A start file cannot be written."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(
            f"{path} cannot be written: {reason}. It is as it was. Name another file with --file FILE, or set the "
            "variables yourself: `nsan recipe path` prints what does."
        )


def with_block(content: bytes, lines: str) -> bytes:
    r"""Put a block into the content of a file, in place of the one that is there, else at its end.

    Parameters
    ----------
    content : bytes
        Of the file.
    lines : str
        What stands in the block.

    Returns
    -------
    bytes
        The content with one block.

    Examples
    --------
    >>> before = b"alias l=ls"
    >>> after = with_block(before, "export A=1\n")
    >>> after.count(b"export A=1"), without_block(after) == before
    (1, True)
    """
    found = list(_BLOCK.finditer(content))
    if len(found) == 1:
        old = found[0]
        new = _block(lines, joined=old["joined"] is not None)
        return content[: old.start()] + new + content[old.end() :]
    content = without_block(content)
    joined = bool(content) and not content.endswith(b"\n")
    return content + _block(lines, joined=joined)


def without_block(content: bytes) -> bytes:
    """Take every block out of the content of a file.

    Parameters
    ----------
    content : bytes
        Of the file.

    Returns
    -------
    bytes
        The content as it was before; what was added below the block stays on lines of its own.
    """
    for found in reversed(list(_BLOCK.finditer(content))):
        after = content[found.end() :]
        # Where lines were added below the block, its first line end parts them from those above by now.
        joint = (found["joined"] or b"") if after else b""
        content = content[: found.start()] + joint + after
    return content


def _block(lines: str, *, joined: bool) -> bytes:
    begin = b"\n" + _BEGIN + _JOINED if joined else _BEGIN
    return b"\n".join([begin, _ABOUT, lines.encode().rstrip(b"\n"), _END]) + b"\n"


def read(path: Path) -> bytes:
    """Read a start file; one that does not exist is empty.

    Parameters
    ----------
    path : Path
        The file, or a link to it.

    Returns
    -------
    bytes
        What stands in it.

    Raises
    ------
    NsanError
        If it is no file, may not be read, or has half a block.
    """
    if path.exists() and not path.is_file():
        raise NotAFileError(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b""
    except PermissionError as error:
        raise NoPermissionError(path) from error
    except OSError as error:
        raise NotAFileError(path) from error
    left = without_block(content)
    for mark in (_BEGIN, _END):
        found = re.search(rb"^" + re.escape(mark), left, re.MULTILINE)
        if found:
            line = content[: content.find(left[found.start() : found.start() + 200])].count(b"\n")
            raise BrokenBlockError(path, line + 1)
    return content


def check_writable(path: Path) -> None:
    """Refuse a file that somebody made read-only: to replace it would go behind their back.

    Parameters
    ----------
    path : Path
        The file, or a link to it; it may not exist.

    Raises
    ------
    StartFileError
        If it is read-only.
    """
    if path.exists() and not (path.stat().st_mode & _WRITE and os.access(path, os.W_OK)):
        raise StartFileError(path, "it is read-only")


def write(path: Path, content: bytes) -> None:
    """Replace the content of a start file at one stroke; links to it, its mode and owner stay.

    Parameters
    ----------
    path : Path
        The file, or a link to it; made with its folders if it does not exist.
    content : bytes
        What shall stand in it.

    Raises
    ------
    StartFileError
        If it cannot be written; it is as it was then.
    """
    real = path.resolve()
    beside: str | None = None
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        number, beside = tempfile.mkstemp(prefix=f".{real.name}.", dir=real.parent)
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _take_after(real, Path(beside))
        Path(beside).replace(real)
    except OSError as error:
        if beside is not None:
            Path(beside).unlink(missing_ok=True)
        raise StartFileError(path, error.strerror or str(error)) from error


def _take_after(old: Path, new: Path) -> None:
    """Give a new file the mode and owner of the one it replaces, or those of any new file."""
    if not old.exists():
        mask = os.umask(0)
        os.umask(mask)
        new.chmod(0o666 & ~mask)
        return
    shutil.copymode(old, new)
    about = old.stat()
    with suppress(PermissionError):
        os.chown(new, about.st_uid, about.st_gid)
    if stat.S_IMODE(new.stat().st_mode) != stat.S_IMODE(about.st_mode):
        shutil.copymode(old, new)
