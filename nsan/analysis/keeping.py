"""What several analyses build on, kept while somebody asks for several: computed once instead of ten times.

An analysis stays a function of its tables. A result is kept for the very tables that it was computed from, the
objects, never for tables that look alike: a plan does not tell a function of Python or a rewritten file from another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakValueDictionary, finalize

from nsan.memory_budget import budget

if TYPE_CHECKING:
    import polars as pl

T = TypeVar("T")

_MOST: Final = 6
"""Results that are kept at most: of a capture of millions of rows some take hundreds of MB."""

_SHARE: Final = 8
"""All that is kept takes at most so many'th of the memory that may be used: an analysis wants the rest."""

_NOTHING: Final = object()


class _Kept:
    """What all that keep share; it goes with the last of them."""

    def __init__(self) -> None:
        self.results: dict[tuple[str | int, ...], tuple[Any, tuple[pl.LazyFrame, ...]]] = {}
        """By name and the ids of the tables; with the tables, so that none of these ids is given again."""
        self.tables: dict[int, pl.LazyFrame] = {}
        """By the id of what an analysis was handed, as long as that lives: the table it is of."""


_SHARED: Final[WeakValueDictionary[str, _Kept]] = WeakValueDictionary()


def _kept() -> _Kept | None:
    return _SHARED.get("")


class Keeping:
    """As long as one is alive, what analyses share is kept.

    Examples
    --------
    >>> import polars as pl
    >>> keeping, table = Keeping(), pl.LazyFrame({"a": [1]})
    >>> given = handed(table, ["a"])
    >>> [once("answer", lambda: each, given) for each in (1, 2)]
    [1, 1]
    """

    def __init__(self) -> None:
        self._kept = _SHARED.setdefault("", _Kept())


def keeps() -> bool:
    """Say whether somebody asks for several analyses, so that what they share is kept."""
    return _kept() is not None


def handed(table: pl.LazyFrame, columns: Sequence[str]) -> pl.LazyFrame:
    """Choose the columns of a table that an analysis gets, and remember of which table they are.

    Parameters
    ----------
    table : LazyFrame
        A table of a trace, of a snapshot or of both joined.
    columns : sequence of str
        Columns that the analysis reads; "*" is all.

    Returns
    -------
    LazyFrame
        These columns.
    """
    given, kept = table.select(columns), _kept()
    if kept is not None:
        kept.tables[id(given)] = table
        finalize(given, kept.tables.pop, id(given), None)
    return given


def once(name: str, build: Callable[[], T], *frames: pl.LazyFrame) -> T:
    """Compute a result, or give the one of before where it is kept.

    Parameters
    ----------
    name : str
        What is computed, with its options.
    build : callable
        Computes it: from the frames, of each the columns that this name always reads, and from nothing else.
    *frames : LazyFrame
        From what it is computed, as :func:`handed` gave it. With a frame of any other making nothing is kept.

    Returns
    -------
    object
        What ``build`` gave, now or before; nobody changes it.
    """
    kept = _kept()
    tables = () if kept is None else tuple(kept.tables.get(id(each)) for each in frames)
    known = tuple(each for each in tables if each is not None)
    if kept is None or len(known) < len(frames):
        return build()
    key: tuple[str | int, ...] = (name, *map(id, known))
    # No lock: a thread of polars that waits may be the one that the other needs.
    found, _ = kept.results.pop(key, (_NOTHING, ()))
    result: T = build() if found is _NOTHING else found
    kept.results[key] = result, known
    _let_go(kept)
    return result


def _let_go(kept: _Kept) -> None:
    """Let the oldest results go while there are too many, or they take too much."""
    for oldest in list(kept.results)[:-_MOST]:
        kept.results.pop(oldest, None)
    sizes = {key: _bytes_of(each) for key, (each, _) in list(kept.results.items())}
    most, taken = budget() // _SHARE, sum(sizes.values())
    for oldest, size in sizes.items():
        if taken <= most:
            return
        kept.results.pop(oldest, None)
        taken -= size


def _bytes_of(result: object) -> int:
    """Say what a table takes, or the tables in a result."""
    size = getattr(result, "estimated_size", None)
    if size is not None:
        return int(size())
    return sum(_bytes_of(each) for each in vars(result).values()) if is_dataclass(result) else 0
