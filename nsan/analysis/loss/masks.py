"""Sets of pages of a VA block as 512 bits, and what many of them in a row amount to.

A block of 2 MiB holds 512 pages of 4 KiB: eight words of 64 bits. Copies become sets by a table look-up,
and the pages that are at a place before each of many events come from one scan, without a loop over
events or pages.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, TypeAlias

from nsan.uvm.constants import BIG_PAGE_BYTES, PAGE_BYTES, VA_BLOCK_BYTES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Words: TypeAlias = npt.NDArray[np.uint64]
    """Sets of pages, (n, 8)."""
    Ints: TypeAlias = npt.NDArray[np.int64]
    Bools: TypeAlias = npt.NDArray[np.bool_]

PAGES: Final = VA_BLOCK_BYTES // PAGE_BYTES
WORDS: Final = PAGES // 64
LEAVES: Final = VA_BLOCK_BYTES // BIG_PAGE_BYTES
LEAF_PAGES: Final = PAGES // LEAVES
_STRETCH: Final = 32
"""Events that the scan takes one after the other; it takes the stretches of them side by side."""


@cache
def _first_pages() -> Words:
    """Give the sets of the first 0, 1, ... 512 pages."""
    import numpy as np

    page, word = np.arange(PAGES + 1)[:, None], np.arange(WORDS) * 64
    full = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
    n = (page - word).clip(0, 64)
    # A shift by 64 is not defined.
    part = (np.uint64(1) << n.clip(0, 63).astype(np.uint64)) - np.uint64(1)
    return np.where(n == 64, full, part)


@cache
def _ones() -> npt.NDArray[np.uint8]:
    """Count the ones of each 16-bit number."""
    import numpy as np

    numbers = np.arange(1 << 16)
    bits = numbers[:, None] >> np.arange(16) & 1
    counts: npt.NDArray[np.uint8] = bits.sum(axis=1, dtype=np.uint8)
    return counts


def runs_of_pages(first: Ints, last: Ints) -> Words:
    """Give the sets of the pages ``first`` to ``last``, without ``last``.

    Parameters
    ----------
    first, last : ndarray of int64, (n,)
        Pages of the block, 0 to 512.

    Returns
    -------
    ndarray of uint64, (n, 8)
        Bit ``p % 64`` of word ``p // 64`` is page ``p``.
    """
    table = _first_pages()
    return table[last] & ~table[first]


def leaf_counts(sets: Words) -> npt.NDArray[np.uint8]:
    """Count the pages of each leaf.

    Parameters
    ----------
    sets : ndarray of uint64, (n, 8)
        Sets of pages.

    Returns
    -------
    ndarray of uint8, (n, 32)
        Pages of each 64 KiB leaf that are in the set, 0 to 16.
    """
    import numpy as np

    halves = np.ascontiguousarray(sets).astype("<u8", copy=False).view("<u2")
    counts: npt.NDArray[np.uint8] = _ones()[halves.reshape(len(sets), LEAVES)]
    return counts


def whole_leaves(leaves: Bools) -> Words:
    """Give the sets of all pages of some leaves.

    Parameters
    ----------
    leaves : ndarray of bool, (n, 32)
        Which leaves.

    Returns
    -------
    ndarray of uint64, (n, 8)
        Sets of pages.
    """
    import numpy as np

    halves = np.where(leaves, np.uint16(0xFFFF), np.uint16(0)).astype("<u2")
    return np.ascontiguousarray(halves).view("<u8").reshape(len(leaves), WORDS).astype(np.uint64)


def n_pages(sets: Words) -> Ints:
    """Count the pages of each set.

    Parameters
    ----------
    sets : ndarray of uint64, (n, 8)
        Sets of pages.

    Returns
    -------
    ndarray of int64, (n,)
        Pages, 0 to 512.
    """
    import numpy as np

    total: Ints = leaf_counts(sets).sum(axis=1, dtype=np.int64)
    return total


def positions(group: Ints) -> Ints:
    """Give each member its number in its group; members are neighbours.

    Parameters
    ----------
    group : ndarray of int64, (n,)
        Group of each, equal ones side by side.

    Returns
    -------
    ndarray of int64, (n,)
        0 for the first of its group.
    """
    import numpy as np

    at = np.arange(len(group), dtype=np.int64)
    first = np.ones(len(group), dtype=bool)
    first[1:] = group[1:] != group[:-1]
    return at - np.maximum.accumulate(np.where(first, at, 0))


def before_each(group: Ints, add: Words, keep: Words | None) -> Words:
    """Give the set that holds just before each event of its group, from the events before it.

    Parameters
    ----------
    group : ndarray of int64, (n,)
        Group of each event; those of one group are neighbours, in order of time.
    add : ndarray of uint64, (n, 8)
        What each event adds to the set.
    keep : ndarray of uint64, (n, 8), or None
        What each event leaves in the set, before it adds; None: everything.

    Returns
    -------
    ndarray of uint64, (n, 8)
        Empty before the first event of a group.
    """
    import numpy as np

    place = positions(group)
    start = np.flatnonzero(place % _STRETCH == 0)
    length = np.diff(np.append(start, len(group)))
    added, kept = add.copy(), None if keep is None else keep.copy()
    # Each event comes to stand for all of its stretch up to it, in all stretches at once.
    at, left = start, length
    for step in range(1, _STRETCH):
        more = left > step
        at, left = at[more] + 1, left[more]
        if kept is None:
            added[at] |= added[at - 1]
        else:
            mine = kept[at]
            added[at] |= added[at - 1] & mine
            kept[at] = kept[at - 1] & mine
    if (place[start] > 0).any():
        last = start + length - 1
        earlier = before_each(group[start], added[last], None if kept is None else kept[last])
        carried = np.repeat(earlier, length, axis=0)
        if kept is not None:
            carried &= kept
        added |= carried
    before = np.zeros_like(added)
    before[1:] = added[:-1]
    before[place == 0] = 0
    return before
