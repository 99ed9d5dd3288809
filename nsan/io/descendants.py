"""Processes that a program leaves running, found by a mark in their environment and ended.

nsys starts the program that it records in a session of its own, and may end before it. Whatever session
or parent a process has, it has the environment of the one that started it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

VARIABLE: Final = "NSAN_STARTED"
_POLL_SECONDS: Final = 0.05


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
    _signal(mark, signal.SIGTERM)
    until = time.monotonic() + grace_seconds
    while any(True for _ in _running(mark)):
        if time.monotonic() >= until:
            _signal(mark, signal.SIGKILL)
            return
        time.sleep(_POLL_SECONDS)


def _signal(mark: bytes, number: signal.Signals) -> None:
    for pid in _running(mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _running(mark: bytes) -> Iterator[int]:
    """Yield the processes with a mark; one that has ended and is not waited for has no environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes():
                yield int(folder.name)
