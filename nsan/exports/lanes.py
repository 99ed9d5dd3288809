"""Where slices of one track are laid so that none cuts through another.

Perfetto nests the slices of a track like the calls of a thread. Slices that overlap in part have no place in that:
they are laid side by side on lanes, tracks of the same name that its page draws as one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_MOST_LEVELS: Final = 64
"""Slices inside slices that are looked through; what lies deeper goes on lanes."""

_Ints = NDArray[np.int64]


def lanes(group: _Ints, start: _Ints, end: _Ints) -> _Ints:
    """Lay intervals on as few lanes as there are at most at a time.

    Parameters
    ----------
    group : array of int
        What shares lanes.
    start, end : array of int
        Half-open intervals; one that is empty takes its first nanosecond.

    Returns
    -------
    array of int
        Lane of each, from 0 in each stretch of intervals that overlap one another.

    Examples
    --------
    >>> import numpy as np
    >>> lanes(np.zeros(3, int), np.array([0, 5, 10]), np.array([10, 20, 12])).tolist()
    [0, 1, 0]
    """
    end = np.maximum(end, start + 1)
    order = np.lexsort((end, start, group))
    found = np.empty(len(order), np.int64)
    found[order] = _sorted_lanes(group[order], start[order], end[order])
    return found


def _sorted_lanes(group: _Ints, start: _Ints, end: _Ints) -> _Ints:
    """Lay sorted intervals: the n-th that finds a free lane takes the one that was freed n-th."""
    n = len(start)
    if not n:
        return start
    place = np.arange(n)
    cluster, first = _clusters(group, start, end)
    by_end = np.lexsort((end, cluster))
    free = _ended(cluster, start, end[by_end], cluster[by_end]) - first
    depth = place - first + 1 - free
    if depth.max() == 1:
        return np.zeros(n, np.int64)
    deepest = np.maximum.accumulate(depth + cluster * (n + 1)) - cluster * (n + 1)
    opened = np.where(place == first, 0, np.concatenate(([0], deepest[:-1])))
    before = np.where(deepest > opened, place, by_end[place - opened])
    while not np.array_equal(further := before[before], before):
        before = further
    return deepest[before] - 1


def _clusters(group: _Ints, start: _Ints, end: _Ints) -> tuple[_Ints, _Ints]:
    """Give each stretch of intervals that overlap a number, and find its first."""
    n = len(start)
    number = np.unique(group, return_inverse=True)[1]
    rank = np.argsort(np.argsort(end, kind="stable"), kind="stable")
    latest = np.maximum.accumulate(rank + number * n) - number * n
    by_rank = np.sort(end, kind="stable")
    fresh = np.ones(n, np.bool_)
    fresh[1:] = (number[1:] != number[:-1]) | (start[1:] >= by_rank[latest[:-1]])
    cluster = np.cumsum(fresh) - 1
    return cluster, np.flatnonzero(fresh)[cluster]


def _ended(cluster: _Ints, start: _Ints, ends: _Ints, of_ends: _Ints) -> _Ints:
    """Count the intervals that have ended when each starts, with all of the clusters before."""
    n = len(start)
    is_start = np.repeat([0, 1], n)
    keys = (is_start, np.concatenate((ends, start)), np.concatenate((of_ends, cluster)))
    order = np.lexsort(keys)
    ended = np.cumsum(order < n)
    found = np.empty(n, np.int64)
    at = np.flatnonzero(order >= n)
    found[order[at] - n] = ended[at]
    return found


def nesting(group: _Ints, start: _Ints, end: _Ints) -> NDArray[np.bool_]:
    """Find the intervals that lie whole inside one another or apart, as calls of a thread do.

    Parameters
    ----------
    group : array of int
        What lies on one track.
    start, end : array of int
        Half-open intervals.

    Returns
    -------
    array of bool
        Whether each can be drawn nested; the others cut through one of these.

    Examples
    --------
    >>> import numpy as np
    >>> nesting(np.zeros(3, int), np.array([0, 2, 8]), np.array([10, 4, 12])).tolist()
    [True, True, False]
    """
    end = np.maximum(end, start)
    order = np.lexsort((-end, start, group))
    fits = np.zeros(len(order), np.bool_)
    rows, inside = order, np.unique(group[order], return_inverse=True)[1]
    for _ in range(_MOST_LEVELS):
        if not len(rows):
            break
        outer, holder = _outermost(inside, end[rows])
        # An outermost one that begins before the one before has ended cuts through it.
        tops = np.flatnonzero(outer)
        cuts = np.zeros(len(rows), np.bool_)
        same = inside[tops[1:]] == inside[tops[:-1]]
        cuts[tops[1:]] = same & (start[rows[tops[1:]]] < end[rows[tops[:-1]]])
        fits[rows[outer & ~cuts]] = True
        kept = ~outer & ~cuts[holder]
        rows, inside = rows[kept], holder[kept]
    return fits


def _outermost(inside: _Ints, end: _Ints) -> tuple[NDArray[np.bool_], _Ints]:
    """Find what no one before it in the same holder reaches beyond, and for each that holder."""
    n = len(end)
    rank = np.unique(end, return_inverse=True)[1]
    height = rank + inside * n
    latest = np.maximum.accumulate(height)
    outer = np.ones(n, np.bool_)
    outer[1:] = height[1:] > latest[:-1]
    return outer, np.maximum.accumulate(np.where(outer, np.arange(n), 0))
