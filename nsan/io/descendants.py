"""Processes that a program leaves running, found by a mark in their environment and ended.

nsys starts the program that it records in a session of its own, and may end before it. Whatever session
or parent a process has, it has the environment of the one that started it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

VARIABLE: Final = "NSAN_STARTED"
_POLL_SECONDS: Final = 0.05
_PROCESSES: Final = Path("/proc")
_READ_SECONDS: Final = 2.0
"""How long the environment of a process may take to be read: that of one which is stuck in a driver may never come."""


def marked_environment() -> dict[str, str]:
    """Return this process's environment with a mark that no other one has, beside those of who started it.

    Returns
    -------
    dict of str to str
        For the process to start.
    """
    marks = f"{os.environ.get(VARIABLE, '')} {secrets.token_hex(16)}"
    return {**os.environ, VARIABLE: marks.strip()}


def end_descendants(environment: Mapping[str, str], grace_seconds: float) -> None:
    """End what still runs of the processes that were started with an environment.

    Parameters
    ----------
    environment : mapping of str to str
        Of :func:`marked_environment`.
    grace_seconds : float
        How long they may take to end when asked; then they are killed.
    """
    mark = environment[VARIABLE].split()[-1].encode()
    with contextlib.closing(_Reader()) as reader:
        _signal(reader, mark, signal.SIGTERM)
        until = time.monotonic() + grace_seconds
        while any(True for _ in _running(reader, mark)):
            if time.monotonic() >= until:
                _signal(reader, mark, signal.SIGKILL)
                return
            time.sleep(_POLL_SECONDS)


def _signal(reader: _Reader, mark: bytes, number: signal.Signals) -> None:
    for pid in _running(reader, mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _running(reader: _Reader, mark: bytes) -> Iterator[int]:
    """Yield the processes with a mark; one that has ended and is not waited for has no environment."""
    for folder in _PROCESSES.glob("[0-9]*"):
        if mark in reader.environment(folder):
            yield int(folder.name)


class _Reader:
    """Reads environments in a thread of its own, so that one which never comes holds up nobody."""

    def __init__(self) -> None:
        self._stuck: set[str] = set()
        self._start()

    def _start(self) -> None:
        self._asked: SimpleQueue[Path | None] = SimpleQueue()
        self._found: SimpleQueue[bytes] = SimpleQueue()
        queues = (self._asked, self._found)
        threading.Thread(target=_answer, args=queues, daemon=True).start()

    def environment(self, folder: Path) -> bytes:
        """Return the environment of a process; empty if it has none, may not be read, or does not come in time."""
        if folder.name in self._stuck:
            return b""
        self._asked.put(folder)
        try:
            return self._found.get(timeout=_READ_SECONDS)
        except Empty:
            self._stuck.add(folder.name)
            self.close()
            self._start()
            return b""

    def close(self) -> None:
        """Let the thread end, as soon as it can."""
        self._asked.put(None)


def _answer(asked: SimpleQueue[Path | None], found: SimpleQueue[bytes]) -> None:
    while (folder := asked.get()) is not None:
        try:
            found.put((folder / "environ").read_bytes())
        except OSError:
            found.put(b"")
