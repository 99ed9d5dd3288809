"""The driver's density prefetcher: which leaves of a VA block come along with those that faulted.

The rule is one function of plain sequences, which the driver model compiles. Analyses replay it over
many blocks at once by its twin over arrays; a test holds both to the same answers.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def choose_leaves(
    occupied: MutableSequence[int],
    faulted: Sequence[int],
    chosen: MutableSequence[int],
    leaf_pages: int,
    threshold: int,
) -> None:
    """Choose the leaves of one VA block that a batch of faults brings in.

    A faulted page is widened to its leaf of 64 KiB, unless the page is thrashing. From every leaf
    that faulted the driver climbs the binary tree of the block and keeps the largest node of
    which more than ``threshold`` percent is, or is about to be, resident [1]_. All faults of a
    block in one batch count together (measured on 1502 pushes); with 51 % exactly half is not
    enough.

    Parameters
    ----------
    occupied : mutable sequence of int
        Pages of each leaf that are resident at the destination or move there by a fault or its
        widening, by leaf; a power of two of leaves. It is used up: the sums are made in place.
    faulted : sequence of int
        Non-zero where a page of the leaf faulted.
    chosen : mutable sequence of int
        Written: 1 for each leaf to bring in, 0 for the others. A leaf that faulted is not chosen
        for that alone.
    leaf_pages : int
        Pages in a leaf: 16 of 4 KiB, or 1 of 64 KiB.
    threshold : int
        Percent; the driver's default is 51, and 100 or more chooses nothing.

    References
    ----------
    .. [1] NVIDIA open GPU kernel modules 595.45.04, ``uvm_perf_prefetch.c``.

    Examples
    --------
    Nine of 16 pages of leaf 0 are resident and leaf 1 faults: 25 of 32 pages are enough for both.

    >>> chosen = [0, 0, 0, 0]
    >>> choose_leaves([9, 16, 0, 0], [0, 1, 0, 0], chosen, 16, 51)
    >>> chosen
    [1, 1, 0, 0]

    Exactly half of the block is not.

    >>> choose_leaves([16, 16, 0, 0], [0, 1, 0, 0], chosen, 16, 51)
    >>> chosen
    [1, 1, 0, 0]
    """
    n = len(occupied)
    for leaf in range(n):
        chosen[leaf] = 0
    size = 1
    while size <= n:
        for first in range(0, n, size):
            if occupied[first] * 100 > size * leaf_pages * threshold:
                any_faulted = 0
                for leaf in range(first, first + size):
                    any_faulted |= faulted[leaf]
                if any_faulted:
                    for leaf in range(first, first + size):
                        chosen[leaf] = 1
        if size < n:
            for first in range(0, n, 2 * size):
                occupied[first] += occupied[first + size]
        size *= 2


def choose_leaves_of_many(
    occupied: np.ndarray, faulted: np.ndarray, leaf_pages: int, threshold: int
) -> np.ndarray:
    """Choose the leaves that faults bring in, for many services of VA blocks at once.

    The same rule as :func:`choose_leaves`, row by row.

    Parameters
    ----------
    occupied : ndarray of int, (n, leaves)
        One row per service: pages of each leaf that are resident at the destination or move there
        by a fault or its widening; a power of two of leaves. It stays as it is.
    faulted : ndarray of bool, (n, leaves)
        Where a page of the leaf faulted.
    leaf_pages : int
        Pages in a leaf: 16 of 4 KiB, or 1 of 64 KiB.
    threshold : int
        Percent; the driver's default is 51, and 100 or more chooses nothing.

    Returns
    -------
    ndarray of bool, (n, leaves)
        True for each leaf to bring in. A leaf that faulted is not chosen for that alone.

    Examples
    --------
    >>> import numpy as np
    >>> occupied = np.array([[9, 16, 0, 0], [16, 16, 0, 0]])
    >>> faulted = np.array([[False, True, False, False], [True, False, True, False]])
    >>> choose_leaves_of_many(occupied, faulted, 16, 51).astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0]]
    """
    import numpy as np

    n, leaves = occupied.shape
    sums, hit = occupied.astype(np.int16), faulted.astype(bool)
    chosen = np.zeros((n, leaves), dtype=bool)
    size = 1
    while size <= leaves:
        dense = hit & (sums > size * leaf_pages * threshold // 100)
        chosen |= np.repeat(dense, size, axis=1)
        if size < leaves:
            sums = sums[:, ::2] + sums[:, 1::2]
            hit = hit[:, ::2] | hit[:, 1::2]
        size *= 2
    return chosen
