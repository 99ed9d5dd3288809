"""Scratch folders beside what is made in them, and tidying up that nothing interrupts."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM: an exception in the middle of tidying up would leave things."""
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Feel Ctrl-C, SIGTERM and SIGHUP only at the end.

    Unlike :func:`undisturbed` a program that is started meanwhile does not inherit it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for first in came[:1]:
            signal.raise_signal(first)


def scratch_beside(place: Path, what: str) -> Path:
    """Make a folder beside a place, and remove those that killed runs left there.

    Parameters
    ----------
    place : Path
        Where the result is to be; its folder exists.
    what : str
        What is being done, for the name.

    Returns
    -------
    Path
        ``.NAME.WHAT-HOST-PID-xxxx``, on the file system of the place.
    """
    prefix = f".{place.name}.{what}-{_here()}-"
    for left in place.parent.glob(f"{_literally(prefix)}*"):
        pid = left.name.removeprefix(prefix).split("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
    with undisturbed():
        return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=place.parent))


@contextlib.contextmanager
def put_in_place(
    place: Path, what: str, put: Callable[[Path, Path], None] | None = None
) -> Iterator[Path]:
    """Make a folder beside a place, and move it there when the block ends without an error.

    Parameters
    ----------
    place : Path
        Where the folder is to be; what is there now stays until the new one is whole, and goes then.
        The folder of the place exists.
    what : str
        What is being done, for the name of the folder while it is made.
    put : callable, optional
        Moves the folder to its place at the end, where what is there may not just go.

    Yields
    ------
    Path
        The folder to fill.

    Raises
    ------
    OSError
        If it cannot be written. Nothing is left behind.
    """
    folder: Path | None = None
    try:
        folder = scratch_beside(place, what)
        folder.chmod(0o777 & ~_umask())
        yield folder
        with undisturbed():
            (put or _put)(folder, place)
    finally:
        if folder is not None:
            with undisturbed():
                shutil.rmtree(folder, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _put(folder: Path, place: Path) -> None:
    """Move a finished folder to its place in one step, exchanging it with what is there."""
    with contextlib.suppress(OSError):
        folder.rename(place)
        return
    if not exchange(folder, place):
        old = folder.with_name(folder.name + "-old")
        place.rename(old)
        folder.rename(place)
        shutil.rmtree(old, ignore_errors=True)


def exchange(left: Path, right: Path) -> bool:
    """Swap two files or folders atomically with Linux's renameat2; False where it cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, exchange = -100, 2
    done = rename(here, os.fsencode(left), here, os.fsencode(right), exchange)
    return bool(done == 0)


def _here() -> str:
    """Name this machine and its process numbers: elsewhere the same number is another process."""
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        space = ""
    return hashlib.sha256(f"{socket.gethostname()} {space}".encode()).hexdigest()[:8]


def _literally(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
