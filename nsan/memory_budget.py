"""How much memory may be used, so that what needs more is not begun.

``NSAN_MEMORY`` (or ``--memory``) says how much a process may hold; without it that is a share of what is free
on the machine, and in the control group of the process, where one is set (containers, batch systems).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nsan.errors import OverBudgetError, UsageError
from nsan.units import MIB, format_bytes, format_count, parse_size

if TYPE_CHECKING:
    import polars as pl

VARIABLE: Final = "NSAN_MEMORY"

_SHARE: Final = 0.5
"""Of free memory: other processes want some, and a guess of what is needed may be wrong."""

_BASE_BYTES: Final = 400 * MIB
"""What a process holds for itself: libraries, threads, pages of files.

It is a part of what the user allows, but not of what is free: there the process holds it already. Not measured,
or an analysis would be refused for what polars kept of the one before and would have used again.
"""

_LEAST_BYTES: Final = 64 * MIB
"""Rows that take no more are always read: a process varies by as much from one run to another."""

_UNKNOWN: Final = 1 << 62
_MEMINFO: Final = Path("/proc/meminfo")
_GROUP: Final = Path("/proc/self/cgroup")
_GROUPS: Final = Path("/sys/fs/cgroup")


def budget() -> int:
    """Say how many bytes the process may hold.

    Returns
    -------
    int
        Bytes; more than any machine has where nothing is known.

    Raises
    ------
    UsageError
        If ``NSAN_MEMORY`` is set and no size.
    """
    said = os.environ.get(VARIABLE, "").strip()
    if not is_said():
        return int(available() * _SHARE)
    try:
        return parse_size(said)
    except UsageError as error:
        raise UsageError(f"{VARIABLE}: {error}") from error


def is_said() -> bool:
    """Say whether the user set how much may be used, by ``NSAN_MEMORY`` or ``--memory``."""
    return bool(os.environ.get(VARIABLE, "").strip())


@contextmanager
def memory_allowed(size: str | None) -> Iterator[None]:
    """Allow a size while a block runs, of this process and of those that it starts.

    Parameters
    ----------
    size : str, optional
        As :func:`nsan.units.parse_size` reads it; None changes nothing.
    """
    before = os.environ.get(VARIABLE)
    if size is not None:
        os.environ[VARIABLE] = size
    try:
        yield
    finally:
        if size is not None:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before


def available() -> int:
    """Say how many bytes are free on the machine and in the control group of the process."""
    return min(_free_here(), _free_in_group())


def _free_here() -> int:
    for line in _lines(_MEMINFO):
        name, _, size = line.partition(":")
        if name == "MemAvailable":
            return int(size.split()[0]) * 1024
    return _UNKNOWN


def _free_in_group() -> int:
    """Find the tightest limit of the group and of those that it is in (version 2, else version 1)."""
    free = _UNKNOWN
    for line in _lines(_GROUP):
        _, kinds, name = (*line.split(":", 2), "", "")[:3]
        if kinds == "":
            names, root = ("memory.max", "memory.current"), _GROUPS
        elif "memory" in kinds.split(","):
            names, root = ("memory.limit_in_bytes", "memory.usage_in_bytes"), _GROUPS / "memory"
        else:
            continue
        place = root / name.lstrip("/")
        for folder in (place, *place.parents):
            free = min(free, _left(folder, *names))
            if folder == root:
                break
    return free


def _left(folder: Path, limit: str, used: str) -> int:
    most, now = (_number(folder / name) for name in (limit, used))
    if most is None or most >= _UNKNOWN:
        return _UNKNOWN
    # Pages of files that nobody waits for are given back when memory is wanted.
    cached = next(
        (int(line.split()[1]) for line in _lines(folder / "memory.stat") if _is_cache(line)), 0
    )
    return max(0, most - max(0, (now or 0) - cached))


def _is_cache(line: str) -> bool:
    return line.split(" ", maxsplit=1)[0] in {"inactive_file", "total_inactive_file"}


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)[:1]).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def check(
    what: str, rows: int, bytes_per_row: int, *, of_many: bool = False, has_parts: bool = True
) -> None:
    """Refuse what needs more memory than may be used, before it is begun.

    Parameters
    ----------
    what : str
        What is to be done, as the message names it.
    rows : int
        Rows that it holds at a time.
    bytes_per_row : int
        Bytes that each takes, as measured.
    of_many : bool, default False
        One thing of many that are asked in turn: what was kept of others, and what they did not give
        back yet, is there too. So it may have half.
    has_parts : bool, default True
        A part of the capture may be asked instead.

    Raises
    ------
    OverBudgetError
        If it would not fit.
    """
    need, share = rows * bytes_per_row, 2 if of_many else 1
    if need <= _LEAST_BYTES:
        return
    most = max(_LEAST_BYTES, _for_rows() // share)
    if need > most:
        enough = -(-(_BASE_BYTES + share * need) // MIB)
        ways = (f"{VARIABLE}={enough}MiB", has_parts)
        sizes = format_bytes(need), format_bytes(most)
        raise OverBudgetError(what, f"{format_count(rows)} rows", sizes, ways)


def check_tables(
    what: str, tables: Iterable[pl.LazyFrame], bytes_per_row: int, *, has_parts: bool = True
) -> None:
    """Refuse what would hold all rows of some tables and needs more memory than may be used for them.

    Parameters
    ----------
    what : str
        As for :func:`check`.
    tables : iterable of LazyFrame
        Of which all rows are held at a time.
    bytes_per_row : int
        As for :func:`check`.
    has_parts : bool, default True
        As for :func:`check`.

    Raises
    ------
    OverBudgetError
        If it would not fit.
    """
    import polars as pl

    counts = pl.collect_all([table.select(pl.len()) for table in tables])
    n_rows = sum(count.item() for count in counts)
    check(what, n_rows, bytes_per_row, has_parts=has_parts)


def _for_rows() -> int:
    """Say how much there is beside what the process holds for itself."""
    return max(0, budget() - _BASE_BYTES) if is_said() else budget()
