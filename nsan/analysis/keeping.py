"""What several analyses build on, kept while somebody asks for several: computed once instead of ten times.

An analysis stays a function of its tables: what is kept is found by what the tables are read from, never
by who asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import finalize

if TYPE_CHECKING:
    import polars as pl

T = TypeVar("T")

_MOST: Final = 6
"""Results that are kept at most: of a capture of millions of rows some take hundreds of MB."""

_NO_NAME: Final = ("DF [", "PYTHON SCAN", "…")
"""What the plan of a table says that holds rows itself, or is told shortened: it names no result."""


class Keeping:
    """As long as one is alive, what analyses share is kept.

    Examples
    --------
    >>> keeping = Keeping()
    >>> [once("answer", lambda: each) for each in (1, 2)]
    [1, 1]
    """

    def __init__(self) -> None:
        _ALIVE.add(id(self))
        finalize(self, _ended, id(self))


def _ended(number: int) -> None:
    _ALIVE.discard(number)
    if not _ALIVE:
        _KEPT.clear()


_ALIVE: Final[set[int]] = set()
_KEPT: Final[OrderedDict[tuple[str, ...], Any]] = OrderedDict()


def once(name: str, build: Callable[[], T], *frames: pl.LazyFrame) -> T:
    """Compute a result, or give the one of before where it is kept.

    Parameters
    ----------
    name : str
        What is computed.
    build : callable
        Computes it: from the frames, and from nothing else.
    *frames : LazyFrame
        From what it is computed: the columns that are read, and no others.

    Returns
    -------
    object
        What ``build`` gave, now or before; nobody changes it.
    """
    key = _key(name, frames) if _ALIVE else None
    if key is None:
        return build()
    # No lock: a thread of polars that waits may be the one that the other needs.
    if key not in _KEPT:
        _KEPT[key] = build()
    result: T = _KEPT[key]
    _KEPT.move_to_end(key)
    while len(_KEPT) > _MOST:
        _KEPT.popitem(last=False)
    return result


def _key(name: str, frames: tuple[pl.LazyFrame, ...]) -> tuple[str, ...] | None:
    """Name a result by the plans of its tables: files, rows and columns that are read."""
    plans = [frame.explain() for frame in frames]
    if any(word in plan for plan in plans for word in _NO_NAME):
        return None
    return (name, *plans)
