"""Whether two conditions differ by more than their values differ anyway: test, interval, family.

**Test.** Welch's t on the means, which does not ask for equal spread; with two sides of unequal size made more
careful: no more degrees of freedom than the smaller side would have against one like it, and no smaller an
error than with the spread of both sides pooled. So the small side cannot look sure by looking alike by
chance. Simulated (uniform, normal, exponential, log-normal, t and Poisson values, 2 to 20 a side) this keeps its
level down to one in 5 000, within a factor of 2; plain Welch of 3 against 8 values exceeds it by 3 to 7. Ranks
would need no shape at all, but 5 against 5 cannot give less than 2 / 252, which no family of ten figures
survives.

**Two modes.** Programs may have two ways to run (where memory lies, say), so that a figure has one of two
values. Then no test on means helps: all runs of one side may fall into one mode, and all of the other into the
other. :func:`coin_p` is how often that happens at most: 0.125 with two runs a side, 0.03 with three, 0.002 with
five. No figure is taken for surer than that; two runs a side are never enough.

**Little spread.** A figure that counts what the driver happens to do cannot be known better than to one
event, so its standard deviation is taken as at least half of one (``grain``): that of a figure for which one
run in two has one event more. Without this, 3, 3, 3 against 4, 4, 5 would be certain.

**No spread at all** on both sides is beyond any t (0 / 0); there :func:`coin_p` is all that can be said.

**Family.** Holm's step-down procedure over the figures that vary: whatever their dependence, all of them
together move by noise alone at most as often as one figure alone would. Figures that never vary are left out:
those that are equal everywhere cannot move, and those that are not would have to be coins that fell the
same way, which runs do with all their figures at once: one event, not many.

**Interval.** Percentile bootstrap of the ratio of means (``scipy.stats.bootstrap``), both sides drawn by
themselves, widened to the level of Student's t (Hesterberg, The American Statistician 2015, "expanded
percentile"): of five values a side the plain one holds the truth in 84 to 88 of 100 cases instead of 95, widened
in 92 to 95. Of two or three values it ends at the most extreme means there are, and is too narrow whatever
one does.

**Steps** of one run depend on each other, so that twenty may say no more than five would that do not.
:func:`settled` finds how many they are worth (from how much each keeps of the one before, that corrected for
how much too small few steps make it look, and of both sides the larger), and puts neighbours together until
that many values are left. Their spread is widened to what is left of it: lasting over longer stretches too
makes it wider. Steps worth fewer than five values, and fewer than twelve steps, tell no noise. Simulated (each
step keeps 0 to 0.95 of the one before; 3 to 200 steps a side, also unequal) noise alone is beyond noise in at
most one comparison in twenty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

RESAMPLES: Final = 4_999
LEAST_STEPS: Final = 12
"""Fewer steps of one run do not tell how much they depend on each other."""

_LEAST_WORTH: Final = 5
_MOST_WORTH: Final = 500
"""More tell no more, and drawing from them takes time and memory."""

_LEAST_BATCHES: Final = 8
_MOST_KEPT: Final = 0.99
_STEP_STAYS: Final = 0.9

_AT_ONCE: Final = 64
"""Rows whose means are drawn together: bounds the memory."""


@dataclass(frozen=True)
class Tested:
    """What Welch's test gives.

    Attributes
    ----------
    p : float
        Two-sided.
    error : float
        Standard error of the difference of the means.
    freedom : float
        Degrees of freedom.
    """

    p: float
    error: float
    freedom: float

    def reach(self, confidence: float) -> float:
        """Give half the width of the interval of the difference."""
        return _student(self.freedom, confidence) * self.error


def _student(freedom: float, confidence: float) -> float:
    """Give how many standard errors an interval reaches to each side."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return -float(stdtrit(freedom, (1 - confidence) / 2))


def means_differ(base: Numbers, other: Numbers, grain: float = 0.0) -> Tested:
    """Test whether two means differ; with sides of equal size this is Welch's test.

    Parameters
    ----------
    base, other : array of float
        At least two values each.
    grain : float, default 0
        What one event more or less changes a value by; see :class:`nsan.analysis.compare.tables.Measure`.

    Returns
    -------
    Tested
        Where no value varies and there is no grain, ``p`` is 1 of equal means and else 0: see
        :func:`coin_p` for what that is worth.
    """
    from scipy.special import stdtr

    sizes = np.array([base.size, other.size])
    spread = np.array([max(float(side.var(ddof=1)), grain**2 / 4) for side in (base, other)])
    parts = spread / sizes
    total = float(parts.sum())
    difference = float(other.mean() - base.mean())
    most = 2.0 * (sizes.min() - 1)
    if total == 0:
        return Tested(float(difference == 0), 0.0, most)
    # As shares: squares of small numbers would be lost.
    freedom = min(float(1 / ((parts / total) ** 2 / (sizes - 1)).sum()), most)
    pooled = float((spread * (sizes - 1)).sum() / (sizes.sum() - 2) * (1 / sizes).sum())
    error = max(total, pooled) ** 0.5
    return Tested(float(2 * stdtr(freedom, -abs(difference) / error)), error, freedom)


def coin_p(n_base: int, n_other: int) -> float:
    """Say how often noise gives one value to all of one side, and another one to all of the other.

    Parameters
    ----------
    n_base, n_other : int
        Values of each side, at least two.

    Returns
    -------
    float
        The largest probability that any distribution gives to this, both sides having the same.
    """
    n, m = n_base, n_other
    share = np.linspace(0, 1, 2_001)
    return float((share**n * (1 - share) ** m + share**m * (1 - share) ** n).max())


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values of a family by Holm's step-down procedure.

    Parameters
    ----------
    p : sequence of float
        In any order.

    Returns
    -------
    list of float
        In the same order, at most 1.
    """
    found = np.asarray(p, dtype=np.float64)
    order = np.argsort(found, kind="stable")
    factors = np.arange(found.size, 0, -1)
    stepped = np.maximum.accumulate(found[order] * factors)
    adjusted = np.empty_like(found)
    adjusted[order] = np.minimum(stepped, 1.0)
    return [float(value) for value in adjusted]


def steps_coin_p(n_base: int, n_other: int) -> float:
    """Say how often each side keeps to one value for all of its steps, and the other side to another one.

    Parameters
    ----------
    n_base, n_other : int
        Steps of each side.

    Returns
    -------
    float
        For steps of which nine in ten do what the one before did, and two values.
    """
    return 0.5 * _STEP_STAYS ** (n_base + n_other - 2)


def settled(base: Numbers, other: Numbers) -> tuple[Numbers, Numbers] | None:
    """Make of the steps of two runs as many values as they are worth.

    Parameters
    ----------
    base, other : array of float
        One per step, in order.

    Returns
    -------
    (array, array) or None
        Values with the mean of the steps, as many and as far apart as values that do not depend on each other
        would be, from which the mean is known as well. As they are where no step varies. None where the steps
        are too few, or depend on each other too much, to tell.
    """
    if min(base.size, other.size) < LEAST_STEPS:
        return None
    varying = [side for side in (base, other) if bool((side != side[0]).any())]
    if not varying:
        return base, other
    kept = max(_kept(side) for side in varying)
    sides = [_worth(side, kept) for side in (base, other)]
    first, second = sides
    return None if first is None or second is None else (first, second)


def _kept(steps: Numbers) -> float:
    """Estimate how much each step keeps of the one before, from 0; of few steps it looks too small by 4 in n."""
    off = steps - steps.mean()
    found = float((off[1:] * off[:-1]).sum() / (off**2).sum())
    return min(max((steps.size * found + 1) / (steps.size - 3), 0.0), _MOST_KEPT)


def _worth(steps: Numbers, kept: float) -> Numbers | None:
    """Put neighbours together until as many values are left as the steps are worth."""
    n, mean = steps.size, float(steps.mean())
    # The variance of a mean of n steps, against that of n values that do not depend on each other.
    wider = (1 + kept) / (1 - kept) - 2 * kept * (1 - kept**n) / (n * (1 - kept) ** 2)
    count = min(int(n / wider), _MOST_WORTH)
    if count < _LEAST_WORTH:
        return None
    size = n // count
    off = steps[n - count * size :].reshape(count, size).mean(axis=1) - mean
    off -= off.mean()
    have = float((off**2).sum() / (count - 1) / count)
    # Steps that go together lie closer to their own mean than to the true one.
    need = float(steps.var() / (1 - wider / n) * wider / n)
    if have == 0:
        return np.full(count, mean) if need == 0 else None
    spread: Numbers = off * (max(need, _batch_error(steps), have) / have) ** 0.5
    return mean + spread


def _batch_error(steps: Numbers) -> float:
    """Find the variance of the mean from batches of 2, 4, ... steps, of the size that makes it largest."""
    found, size = 0.0, 2
    while steps.size // size >= _LEAST_BATCHES:
        count = steps.size // size
        means = steps[steps.size - count * size :].reshape(count, size).mean(axis=1)
        found = max(found, float(means.var(ddof=1)) / count)
        size *= 2
    return found


def change_intervals(
    pairs: Sequence[tuple[Numbers, Numbers]], *, confidence: float = 0.95, seed: int = 1
) -> list[tuple[float, float]]:
    """Find intervals for the changes of means: other / base - 1.

    Parameters
    ----------
    pairs : sequence of (array, array)
        Values of the base and of the other, none below 0, at least two each.
    confidence : float, default 0.95
        Of each interval by itself.
    seed : int, default 1
        The same seed gives the same intervals.

    Returns
    -------
    list of (float, float)
        In the order of the pairs. Without bound above (``inf``) where the base may be 0.
    """
    found: list[tuple[float, float]] = [(0.0, 0.0)] * len(pairs)
    shapes: dict[tuple[int, int], list[int]] = {}
    for at, (base, other) in enumerate(pairs):
        shapes.setdefault((base.size, other.size), []).append(at)
    for each in shapes.values():
        for first in range(0, len(each), _AT_ONCE):
            chosen = each[first : first + _AT_ONCE]
            drawn = _drawn_shares([pairs[at] for at in chosen], seed)
            for at, shares in zip(chosen, drawn, strict=True):
                tail = _tail(*pairs[at], confidence)
                low, high = np.quantile(shares, (tail, 1 - tail))
                found[at] = (_change(float(low)), _change(float(high)))
    return found


def _drawn_shares(pairs: Sequence[tuple[Numbers, Numbers]], seed: int) -> Numbers:
    """Draw means again: for each pair the share of the other's mean in both, which has no pole."""
    from scipy.stats import bootstrap  # type: ignore[import-untyped]

    base = np.stack([pair[0] for pair in pairs])
    other = np.stack([pair[1] for pair in pairs])

    def shares(i: Any, j: Any, axis: int = -1) -> Numbers:
        del axis  # runs are drawn, with all their figures
        # Steps whose spread was widened may have a mean below 0.
        first, second = (
            np.maximum(side[:, drawn].mean(axis=-1), 0.0) for side, drawn in ((base, i), (other, j))
        )
        both = first + second
        half = np.full_like(both, 0.5)
        result: Numbers = np.divide(second, both, out=half, where=both > 0)
        return result

    samples = tuple(np.arange(side.shape[1]) for side in (base, other))
    drawn = bootstrap(
        samples,
        shares,
        n_resamples=RESAMPLES,
        batch=500,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    found: Numbers = drawn.bootstrap_distribution
    return found


def _tail(base: Numbers, other: Numbers, confidence: float) -> float:
    """Find the tail of the drawn means that is as far out as Student's t asks for."""
    from scipy.special import ndtr

    means, sizes = np.array([base.mean(), other.mean()]), np.array([base.size, other.size])
    spread = np.array([base.var(ddof=1), other.var(ddof=1)])
    relative = np.divide(spread, means**2, out=np.zeros(2), where=means > 0) / sizes
    total = float(relative.sum())
    if total == 0:
        return (1 - confidence) / 2
    freedom = float(1 / ((relative / total) ** 2 / (sizes - 1)).sum())
    narrow = float((relative * (sizes - 1) / sizes).sum())  # a drawn mean varies by less
    wide = _student(freedom, confidence) * (total / narrow) ** 0.5
    return float(ndtr(-wide))


def _change(share: float) -> float:
    return float("inf") if share >= 1 else share / (1 - share) - 1
