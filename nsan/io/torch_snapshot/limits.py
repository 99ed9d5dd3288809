"""What reading a pickle may cost, and how a process holds itself to it. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
from types import ModuleType
from typing import Final

resource: ModuleType | None
try:
    import resource
except ImportError:
    resource = None

MIB: Final = 1 << 20

_BASE_BYTES: Final = 256 * MIB
_TIMES_FILE: Final = 32
_BASE_SECONDS: Final = 1.0
_BYTES_PER_SECOND: Final = 2 * MIB
_BASE_LOADING_SECONDS: Final = 0.5
_LOADED_BYTES_PER_SECOND: Final = 8 * MIB
_WALL_SECONDS: Final = 30
_UNPACKED_BYTES: Final = 64 * MIB
_UNPACKED_TIMES: Final = 50


def allowed_bytes(n_bytes: int) -> int:
    """Return how much memory a pickle of some bytes may take, its own pages included.

    Real ones take eight times their size, those of many small blocks fourteen times, those whose
    frames are not shared thirty times. It is never more than three quarters of the machine's memory.
    """
    allowed = _BASE_BYTES + (_TIMES_FILE + 1) * n_bytes
    try:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return allowed
    return min(allowed, max(there // 4 * 3, _BASE_BYTES))


def allowed_seconds(n_bytes: int) -> float:
    """Return how long a pickle of some bytes may take of the processor; real ones take a fifth."""
    return _BASE_SECONDS + n_bytes / _BYTES_PER_SECOND


def loading_seconds(n_bytes: int) -> float:
    """Return how long unpickling some bytes alone may take; real ones take a fifth or less.

    Keys of one hash make a dict slow before any of it is seen.
    """
    return _BASE_LOADING_SECONDS + n_bytes / _LOADED_BYTES_PER_SECOND


def patience_seconds(n_bytes: int) -> float:
    """Return how long to wait for the answer about a file: machines can be busy."""
    return _WALL_SECONDS + 4 * allowed_seconds(n_bytes)


def allowed_unpacked_bytes(n_bytes: int) -> int:
    """Return how large gzip data of some bytes may become; real ones become ten times as large."""
    return max(_UNPACKED_BYTES, _UNPACKED_TIMES * n_bytes)


def limit(what: str, n: int) -> None:
    """Lower a limit of this process, where the system knows it.

    Parameters
    ----------
    what : str
        As ``RLIMIT_AS``.
    n : int
        The limit.
    """
    kind = getattr(resource, what, None)
    if resource is None or kind is None:
        return
    _, hard = resource.getrlimit(kind)
    n = n if hard == resource.RLIM_INFINITY else min(n, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (n, hard))


def limit_for(n_bytes: int) -> None:
    """Hold this process to the memory and the time of a pickle of some bytes."""
    limit("RLIMIT_AS", _virtual_bytes() + allowed_bytes(n_bytes))
    limit_seconds(allowed_seconds(n_bytes))


def limit_seconds(seconds: float) -> None:
    """End this process when it has taken so many more seconds of the processor."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _virtual_bytes() -> int:
    """Return what this process has mapped, which can be much before it does anything (locales)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - pathlib is slow to import
            pages = int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return _BASE_BYTES
    return pages * os.sysconf("SC_PAGE_SIZE")
