"""From which distance on a value of a few stands out: a bound that knows how few they are.

The median absolute deviation (MAD) of three or five values is itself a matter of chance: the usual bound of 3.5
robust standard deviations would name a rank in every third run of three that are alike. So the bound grows for few
values (and a little for many, for of a thousand one is always the farthest).
"""

from __future__ import annotations

from typing import Final

LEAST_PEERS: Final = 3
"""Of two values nobody can say which one is off."""

FEW_PEERS: Final = 5
"""Up to so many the MAD says so little that the distance that is needed is worth a word."""

BOUNDS: Final = (
    *((3, 112.6, 225.0), (4, 15.9, 22.8), (5, 18.6, 26.4), (6, 10.1, 12.8), (7, 10.8, 13.8)),
    *((8, 8.0, 9.8), (9, 8.3, 10.1), (10, 7.0, 8.4), (11, 7.1, 8.4), (12, 6.3, 7.3)),
    *((13, 6.4, 7.5), (15, 6.0, 6.9), (20, 5.3, 5.9), (25, 5.1, 5.6), (32, 4.8, 5.2)),
    *((50, 4.5, 4.8), (64, 4.4, 4.7), (256, 4.4, 4.6), (512, 4.4, 4.6), (1024, 4.5, 4.7)),
    *((2048, 4.7, 4.8), (4096, 4.8, 5.0)),
)
"""Number of values; robust standard deviations beyond which one in 100, and one in 200, groups has a value.

Simulated with normal values, 400 000 groups (fewer above 64); between two numbers the larger bound holds.
"""


def bound(n: int, n_figures: int = 1) -> float | None:
    """Give the bound for a group of values.

    Parameters
    ----------
    n : int
        How many values.
    n_figures : int, default 1
        By how many figures the same group is judged: one group in a hundred may name somebody by chance, over all
        of them. Two at most are told apart.

    Returns
    -------
    float or None
        In robust standard deviations. None for fewer than three values.

    Examples
    --------
    >>> bound(2), bound(4), bound(100), bound(100, 2)
    (None, 15.9, 4.4, 4.7)
    """
    if n < LEAST_PEERS:
        return None
    column = 1 if n_figures < 2 else 2
    below = [row[column] for row in BOUNDS if row[0] <= n][-1]
    above = next((row[column] for row in BOUNDS if row[0] >= n), below)
    return max(below, above)
