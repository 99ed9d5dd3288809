"""Who holds which address now: ranges of addresses that are given to holders, one after the other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final

import polars as pl

_MOST_BYTES: Final = 1 << 47
_END_VA: Final = 1 << 57
"""What a process can address: 57 bits at most, of which no memory fills 47."""

OUTSIDE: Final = -1
"""Holder of what was never given to anybody."""


def is_range() -> pl.Expr:
    """Say whether a row names a range of addresses that a process can have.

    Returns
    -------
    Expr
        Boolean, never null; reads ``va`` and ``bytes``.
    """
    va, size = pl.col("va"), pl.col("bytes")
    return ((va < _END_VA) & (size > 0) & (size <= _MOST_BYTES)).fill_null(value=False)


class Ranges:
    """The holder of every address: stretches that follow each other without a gap.

    A change adds at most two stretches and takes away those that it covers, so n changes and m questions
    cost O((n + m) log n), and what the answers hold.
    """

    def __init__(self) -> None:
        self._starts = [0]
        self._values = [OUTSIDE]

    def give(self, first: int, last: int, value: int) -> None:
        """Give a range to a holder.

        Parameters
        ----------
        first, last : int
            First byte, and the byte after the last one.
        value : int
            Number of the holder.
        """
        if last <= first:
            return
        starts, values = self._starts, self._values
        low = bisect_left(starts, first)
        high = bisect_left(starts, last, low)
        if high < len(starts) and starts[high] == last:
            starts[low:high], values[low:high] = [first], [value]
        else:
            # What comes after the range stays with whom it was.
            rest = values[high - 1]
            starts[low:high], values[low:high] = [first, last], [value, rest]

    def within(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """List the stretches of a range.

        Parameters
        ----------
        first, last : int
            First byte, and the byte after the last one.

        Yields
        ------
        (int, int, int)
            First byte, byte after the last one, holder; neighbours have different holders.
        """
        starts, values = self._starts, self._values
        at, n = bisect_right(starts, first) - 1, len(starts)
        while first < last:
            value = values[at]
            at += 1
            while at < n and values[at] == value and starts[at] < last:
                at += 1
            end = starts[at] if at < n and starts[at] < last else last
            yield first, end, value
            first = end
