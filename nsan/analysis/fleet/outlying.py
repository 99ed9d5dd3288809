"""Which values stand out from those beside them: by median and MAD, on two scales, and apart from the rest.

The bound (:mod:`nsan.analysis.fleet.bounds`) is that of normal values, and times are not: they are skewed to the
right, and their tails are long. So a value stands out only where three things hold.

- It is beyond the bound on the linear scale and on a logarithmic one. The linear one takes the long right tail of
  times for outliers, the logarithmic one short times. Of three values, whose MAD says least, the linear scale alone
  is asked: on the other one no factor would be enough.
- It is apart: itself and all beyond it are at least twice as far from the median as all others. The
  farthest of a long tail is close to the next one.
- It is worth a word: 20 % from the median, and by at least 1 % of the time that the whole took.

Values that are alike to the last digits, as a repeated model run gives them, do not make every ns an outlier: the
least spread is 1 % of the median. A time of 0 has a place on the logarithmic scale, for what is not worth a word
is added to each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from nsan.analysis.fleet.bounds import LEAST_PEERS, bound

LEAST_CHANGE: Final = 0.2
"""From this on a distance from the median is worth a word, as a part of the median: a choice of ours."""

LEAST_SHARE: Final = 0.01
"""The same as a part of the median duration: a choice of ours."""

LEAST_NS: Final = 1_000_000
"""The same where durations are not known."""

APART: Final = 2.0
"""How many times as far as all others what stands out is: a choice of ours. docs/fleet.md says what it costs."""

GROUP_SHARE: Final = 5
"""Where one in so many, or more, stand out together, they are a group of their own."""

GROUP_SIZE: Final = 10
"""More than so many are one, too: nobody looks at dozens one by one."""

TO_SIGMA: Final = 1.4826
"""MADs of a normal distribution in a standard deviation."""

_NEVER: Final = float(2**63)
"""No time is so long: where times spread so widely none could stand out."""

_ROUNDING: Final = 1 - 1e-9
"""What is exactly twice as far stays it in another unit."""


def outlying(values: pl.DataFrame, *, by: Sequence[str]) -> pl.DataFrame:
    """Judge each value against those of its group.

    Parameters
    ----------
    values : DataFrame
        Reads ``value_ns`` and ``duration_ns`` (null: not known), ``n_figures`` (by how many figures the group is
        judged), and the columns of ``by``.
    by : sequence of str
        What makes a group.

    Returns
    -------
    DataFrame
        The rows in their order, with ``n_peers`` (values of the group that are known), ``median_ns``, ``mad_ns``,
        ``times_median`` (null: the median is 0), ``mads`` (null: the MAD is 0), ``excess_ns`` (beyond the median;
        negative: below it), ``score`` (in robust standard deviations, on the scale where it is less), ``bound``,
        ``needed_ns`` (what a value above the median would have to be, by spread and bound; null: none could), ``is_outlier`` (null:
        not known), ``n_together`` (outliers of the group), ``is_group`` (they are so many that they are a group of
        their own), ``n_beyond`` (values beyond the bound, be they apart from the others or not).
    """
    group = list(by)
    seen = _scored(values, group)
    far, worth = pl.col("excess_ns").abs(), pl.max_horizontal("_least", LEAST_CHANGE * _MEDIAN)
    is_far = pl.col("score").abs() > pl.col("bound")
    seen = seen.with_columns(
        _is_beyond=(is_far & (far >= worth * _ROUNDING)).fill_null(value=False)
    )
    enough = _VALUE.is_not_null() & (pl.col("n_peers") >= LEAST_PEERS)
    seen = _cut(seen, group).with_columns(
        is_outlier=pl.when(enough).then(
            pl.col("_is_beyond") & (pl.col("score").abs() >= pl.col("_cut")).fill_null(value=False)
        ),
        needed_ns=_needed(worth),
    )
    together = pl.col("is_outlier").sum().cast(pl.Int64)
    many = (together * GROUP_SHARE >= pl.col("n_peers")) | (together > GROUP_SIZE)
    return seen.with_columns(
        n_together=together.over(group),
        n_beyond=pl.col("_is_beyond").sum().cast(pl.Int64).over(group),
        is_group=(many & (together > 1)).over(group),
    ).drop("_least", "_spread", "_log_spread", "_is_beyond", "_cut")


_VALUE: Final = pl.col("value_ns")
_MEDIAN: Final = pl.col("median_ns")


def _scored(values: pl.DataFrame, group: list[str]) -> pl.DataFrame:
    """Measure how far each value is from the median, in robust standard deviations of its group."""
    typical = pl.col("duration_ns").cast(pl.Float64).median().over(group)
    seen = values.with_columns(
        n_peers=_VALUE.count().cast(pl.Int64).over(group),
        median_ns=_VALUE.cast(pl.Float64).median().over(group),
        _least=(LEAST_SHARE * typical).fill_null(LEAST_NS).clip(1),
    ).with_columns(
        excess_ns=_VALUE - _MEDIAN,
        _log=((_VALUE + pl.col("_least")) / (_MEDIAN + pl.col("_least"))).log(),
    )
    seen = seen.with_columns(
        mad_ns=pl.col("excess_ns").abs().median().over(group),
        _log_mad=pl.col("_log").abs().median().over(group),
    )
    floor = pl.max_horizontal(LEAST_SHARE * _MEDIAN, pl.col("_least") / 10)
    seen = seen.with_columns(
        _spread=pl.max_horizontal(TO_SIGMA * pl.col("mad_ns"), floor),
        _log_spread=pl.max_horizontal(
            TO_SIGMA * pl.col("_log_mad"), floor / (_MEDIAN + pl.col("_least"))
        ),
    )
    linear, logarithmic = (
        pl.col("excess_ns") / pl.col("_spread"),
        pl.col("_log") / pl.col("_log_spread"),
    )
    less = pl.when(linear.abs() <= logarithmic.abs()).then(linear).otherwise(logarithmic)
    sizes = zip(seen["n_peers"], seen["n_figures"], strict=True)
    return seen.with_columns(
        times_median=_over(_VALUE, _MEDIAN),
        mads=_over(pl.col("excess_ns"), pl.col("mad_ns")),
        score=pl.when(pl.col("n_peers") > LEAST_PEERS).then(less).otherwise(linear),
        bound=pl.Series([bound(n, figures) for n, figures in sizes], dtype=pl.Float64),
    ).drop("_log", "_log_mad")


def _cut(seen: pl.DataFrame, group: list[str]) -> pl.DataFrame:
    """Find of each group the least score from which on values are apart from the others; null where there is none."""
    score = pl.col("score").abs()
    order = (
        seen.with_row_index("_row").with_columns(_far=score).sort("_far", "_row", nulls_last=True)
    )
    order = order.with_columns(_next=pl.col("_far").shift(1).over(group))
    # Half of them or more never are: their median and MAD would be others.
    is_cut = pl.col("_is_beyond") & (pl.col("_far") >= APART * pl.col("_next") * _ROUNDING)
    cut = pl.when(is_cut).then(pl.col("_far")).min().over(group)
    return order.with_columns(_cut=cut).sort("_row").drop("_row", "_far", "_next")


def _needed(worth: pl.Expr) -> pl.Expr:
    """Say what a value above the median has to be, for the bound and to be worth a word."""
    least = pl.col("_least")
    linear = _MEDIAN + pl.col("bound") * pl.col("_spread")
    logarithmic = (_MEDIAN + least) * (pl.col("bound") * pl.col("_log_spread")).exp() - least
    both = pl.max_horizontal(linear, logarithmic, _MEDIAN + worth)
    alone = pl.max_horizontal(linear, _MEDIAN + worth)
    found = pl.when(pl.col("n_peers") > LEAST_PEERS).then(both).otherwise(alone)
    return pl.when(found < _NEVER).then(found)


def _over(part: pl.Expr, whole: pl.Expr) -> pl.Expr:
    return pl.when(whole > 0).then(part / whole)
