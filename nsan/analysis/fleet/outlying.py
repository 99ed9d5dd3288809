"""Which values stand out from those beside them: by median and MAD, with a bound that knows how few they are.

The median absolute deviation (MAD) of three or five values is itself a matter of chance: the usual bound of 3.5
robust standard deviations would name a rank in every third run of three that are alike. So the bound grows for few
values (and a little for many, for of a thousand one is always the farthest): with values that vary by chance alone
(normally distributed), one group in a hundred has a value beyond it.

A value must also be worth a word: 20 % from the median, and by at least 1 % of the time that the whole took. And
values that are alike to the last digits, as a repeated model run gives them, do not make every ns an outlier: the
least spread is 1 % of the median.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

LEAST_PEERS: Final = 3
"""Of two values nobody can say which one is off."""

LEAST_CHANGE: Final = 0.2
"""From this on a distance from the median is worth a word, as a part of the median: a choice of ours."""

LEAST_SHARE: Final = 0.01
"""The same as a part of the median duration: a choice of ours."""

LEAST_NS: Final = 1_000_000
"""The same where durations are not known."""

TO_SIGMA: Final = 1.4826
"""MADs of a normal distribution in a standard deviation."""

BOUNDS: Final = (
    *((3, 112.6), (4, 15.9), (5, 18.6), (6, 10.1), (7, 10.8), (8, 8.0), (9, 8.3), (10, 7.0)),
    *((11, 7.1), (12, 6.3), (13, 6.4), (15, 6.0), (20, 5.3), (25, 5.1), (32, 4.8), (50, 4.5)),
    *((64, 4.4), (256, 4.4), (512, 4.4), (1024, 4.5), (2048, 4.7), (4096, 4.8)),
)
"""By number of values: how many robust standard deviations one in a hundred groups has a value beyond.

Simulated with normal values, 400 000 groups (fewer above 64); between two numbers the larger bound holds.
"""


def outlying(values: pl.DataFrame, *, by: Sequence[str]) -> pl.DataFrame:
    """Judge each value against those of its group.

    Parameters
    ----------
    values : DataFrame
        Reads ``value_ns`` and ``duration_ns`` (null: not known), and the columns of ``by``.
    by : sequence of str
        What makes a group.

    Returns
    -------
    DataFrame
        The rows in their order, with ``n_peers`` (values of the group that are known), ``median_ns``, ``mad_ns``,
        ``times_median`` (null: the median is 0), ``mads`` (null: the MAD is 0), ``excess_ns`` (beyond the median;
        negative: below it), ``score`` (in robust standard deviations), ``bound`` and ``is_outlier`` (null: not known).
    """
    group, value = list(by), pl.col("value_ns")
    excess = value - pl.col("median_ns")
    # A group of unknown processes is one, too.
    seen = values.with_columns(
        n_peers=value.count().over(group),
        median_ns=value.cast(pl.Float64).median().over(group),
        typical_ns=pl.col("duration_ns").cast(pl.Float64).median().over(group),
    ).with_columns(excess_ns=excess, mad_ns=excess.abs().median().over(group))
    least = (LEAST_SHARE * pl.col("typical_ns")).fill_null(LEAST_NS)
    spread = pl.max_horizontal(
        TO_SIGMA * pl.col("mad_ns"), LEAST_SHARE * pl.col("median_ns"), least / 10
    )
    seen = seen.with_columns(
        times_median=_over(value, pl.col("median_ns")),
        mads=_over(pl.col("excess_ns"), pl.col("mad_ns")),
        score=_over(pl.col("excess_ns"), spread),
        bound=pl.Series([bound(n) for n in seen["n_peers"]], dtype=pl.Float64),
    )
    far = pl.col("excess_ns").abs()
    is_outlier = (
        (pl.col("score").abs() > pl.col("bound"))
        & (far >= LEAST_CHANGE * pl.col("median_ns"))
        & (far >= least)
    )
    enough = value.is_not_null() & (pl.col("n_peers") >= LEAST_PEERS)
    return seen.with_columns(
        is_outlier=pl.when(enough).then(is_outlier.fill_null(value=False))
    ).drop("typical_ns")


def _over(part: pl.Expr, whole: pl.Expr) -> pl.Expr:
    return pl.when(whole > 0).then(part / whole)


def bound(n: int) -> float | None:
    """Give the bound for a group of so many values; None for fewer than three.

    Examples
    --------
    >>> bound(2), bound(4), bound(100)
    (None, 15.9, 4.4)
    """
    if n < LEAST_PEERS:
        return None
    below = [each for size, each in BOUNDS if size <= n][-1]
    above = next((each for size, each in BOUNDS if size >= n), below)
    return max(below, above)
