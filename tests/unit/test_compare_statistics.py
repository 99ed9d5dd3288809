"""Test, interval and family of a comparison: against scipy, against counting, and on noise alone."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from conftest import SOAK
from scipy import stats

from nsan.analysis.compare.statistics import (
    change_intervals,
    coin_p,
    holm,
    means_differ,
    settled,
    steps_coin_p,
)

DRAWS = {
    "normal": lambda random, n: random.normal(100, 10, n),
    "uniform": lambda random, n: random.uniform(50, 150, n),
    "exponential": lambda random, n: random.exponential(100, n),
    "log-normal": lambda random, n: random.lognormal(0, 2, n),
    "coins": lambda random, n: random.integers(0, 2, n) * 100.0,
    "counts": lambda random, n: random.poisson(0.7, n) * 1.0,
}
COUNTED = {"counts": 1.0}


def interval(base, other, **options):
    """Interval of one change."""
    sides = np.array(base, dtype=float), np.array(other, dtype=float)
    return change_intervals([sides], **options)[0]


def differ(base, other, grain=0.0):
    return means_differ(np.array(base, dtype=float), np.array(other, dtype=float), grain)


# The test -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5, 12])
@pytest.mark.parametrize("name", ["normal", "exponential"])
def test_sides_of_equal_size_get_welchs_test_as_scipy_has_it(name, n):
    random = np.random.default_rng(n)
    base, other = DRAWS[name](random, n), DRAWS[name](random, n) * 3
    by_scipy = stats.ttest_ind(base, other, equal_var=False)
    found = means_differ(base, other)
    assert found.p == pytest.approx(by_scipy.pvalue, rel=1e-9)
    assert found.freedom == pytest.approx(by_scipy.df, rel=1e-9)
    low, high = by_scipy.confidence_interval(0.95)
    assert found.reach(0.95) == pytest.approx((high - low) / 2, rel=1e-9)


def test_a_difference_worked_out_by_hand():
    # Means 2 and 6, variances 1 and 1: error sqrt(2 / 3), t = 4 / 0.8165 = 4.899, 4 degrees of freedom.
    found = differ([1, 2, 3], [5, 6, 7])
    assert (found.error, found.freedom) == (pytest.approx(math.sqrt(2 / 3)), pytest.approx(4))
    # Student's t of 4 degrees has a closed form for its tail.
    t = 4 / math.sqrt(2 / 3)
    x = t / math.sqrt(4 + t * t)
    assert found.p == pytest.approx(1 - x * (1.5 - x * x / 2), rel=1e-9)


def test_a_small_side_that_looks_alike_by_chance_is_not_taken_at_its_word():
    small, large = [99.9, 100, 100.1], [90, 110] * 10
    plain = stats.ttest_ind(small, [value + 30 for value in large], equal_var=False).pvalue
    found = differ(small, [value + 30 for value in large])
    assert found.freedom <= 4
    assert plain < 1e-9
    assert found.p > 1e-3


def test_without_spread_means_are_equal_or_not_and_nothing_divides_by_zero():
    assert differ([5, 5, 5], [5, 5, 5]).p == 1
    assert differ([5, 5, 5], [6, 6, 6]).p == 0
    assert differ([5, 5, 5], [6, 6, 6]).reach(0.95) == 0


def test_one_event_more_or_less_is_never_certain():
    # 3 rows against 4: half an event of spread, error 0.5 * sqrt(2 / 5), t = 3.162 with 8 degrees.
    found = differ([3] * 5, [4] * 5, grain=1)
    assert found.error == pytest.approx(0.5 * math.sqrt(2 / 5))
    assert found.p == pytest.approx(2 * stats.t.sf(1 / found.error, 8))
    assert found.p > 0.01
    assert differ([3] * 5, [30] * 5, grain=1).p < 1e-9
    assert differ([3, 9, 15], [4, 8, 30], grain=1).p == differ([3, 9, 15], [4, 8, 30]).p


@pytest.mark.parametrize("size", [1e-9, 1, 1e18])
def test_the_unit_of_a_figure_decides_nothing(size):
    base, other = np.array([1.0, 2, 3, 4, 4]) * size, np.array([5.0, 6, 7, 5, 5]) * size
    plain = differ([1, 2, 3, 4, 4], [5, 6, 7, 5, 5])
    assert means_differ(base, other).p == pytest.approx(plain.p, rel=1e-6)
    assert interval(base, other) == pytest.approx(interval([1, 2, 3, 4, 4], [5, 6, 7, 5, 5]))


@pytest.mark.parametrize("sizes", [(5, 5), (3, 8), (5, 20)])
@pytest.mark.parametrize("name", DRAWS)
def test_noise_alone_is_beyond_noise_no_more_often_than_said(name, sizes):
    random = np.random.default_rng(1)
    n_times = 20_000 if SOAK else 1_000
    draw, grain = DRAWS[name], COUNTED.get(name, 0.0)
    p = np.array(
        [
            max(
                means_differ(*sides, grain).p,
                coin_p(*sizes) if all(np.ptp(side) == 0 for side in sides) else 0,
            )
            for sides in ((draw(random, sizes[0]), draw(random, sizes[1])) for _ in range(n_times))
        ]
    )
    for level in (0.05, 0.01):
        allowed = stats.binom.ppf(0.9999, n_times, level * 1.1)
        assert (p < level).sum() <= allowed, (name, level)


# Two modes ------------------------------------------------------------------------------------------


def test_how_often_coins_fall_apart_is_counted_for_each_number_of_runs():
    for n in (2, 3, 4, 5):
        falls = itertools.product((0, 1), repeat=2 * n)
        apart = sum(
            len(set(fall[:n])) == len(set(fall[n:])) == 1 and fall[0] != fall[n] for fall in falls
        )
        assert coin_p(n, n) == pytest.approx(float(Fraction(apart, 4**n)))
    assert coin_p(2, 2) > 0.05 > coin_p(3, 3)


def test_no_other_distribution_falls_apart_more_often():
    random = np.random.default_rng(3)
    for n, m in ((2, 2), (3, 3), (2, 5), (5, 5)):
        for _ in range(300):
            share = random.dirichlet(np.full(random.integers(2, 6), 0.5))
            apart = sum(
                a**n * b**m for i, a in enumerate(share) for j, b in enumerate(share) if i != j
            )
            assert apart <= coin_p(n, m) + 1e-6


# Families -------------------------------------------------------------------------------------------


def test_holm_of_four_worked_out_by_hand():
    # In order 0.005 * 4, 0.01 * 3, 0.03 * 2, 0.04 * 1, and none below the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_rejects_what_stepping_down_rejects():
    random = np.random.default_rng(4)
    for _ in range(200):
        p = [float(value) for value in random.random(random.integers(1, 30)) ** 4]
        level = 0.05
        rejected = set()
        for at in sorted(range(len(p)), key=p.__getitem__):
            if p[at] > level / (len(p) - len(rejected)):
                break
            rejected.add(at)
        assert {at for at, value in enumerate(holm(p)) if value <= level} == rejected


def test_holm_of_nothing_and_of_ties():
    assert holm([]) == []
    assert holm([0.5, 0.5, 0.5]) == [1, 1, 1]


# Intervals ------------------------------------------------------------------------------------------


def test_drawn_means_are_those_of_all_draws_there_are():
    base, other = np.array([1.0, 2, 4]), np.array([3.0, 7, 8])
    means = [
        [sum(draw) / 3 for draw in itertools.product(side, repeat=3)] for side in (base, other)
    ]
    changes = [b / a - 1 for a in means[0] for b in means[1]]
    # By hand, in another order: the squared relative errors of both means, and their freedom.
    squares = [np.var(side, ddof=1) / 3 / side.mean() ** 2 for side in (base, other)]
    freedom = sum(squares) ** 2 / sum(square**2 / 2 for square in squares)
    tail = stats.norm.sf(stats.t.isf(0.1, freedom) * math.sqrt(3 / 2))
    expected = np.quantile(changes, (tail, 1 - tail))
    low, high = interval(base, other, confidence=0.8)
    assert low == pytest.approx(expected[0], abs=0.08)
    assert high == pytest.approx(expected[1], rel=0.12)
    assert min(changes) <= low <= high <= max(changes)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    random = np.random.default_rng(7)
    n_times = 3_000 if SOAK else 300
    for name in ("normal", "uniform", "exponential"):
        sides = [(DRAWS[name](random, 5), DRAWS[name](random, 5) * 1.5) for _ in range(n_times)]
        held = [low <= 0.5 <= high for low, high in change_intervals(sides)]
        assert 0.885 <= np.mean(held) <= 0.985, name


def test_plain_percentiles_of_five_values_are_too_narrow():
    base, other = [8, 9, 10, 11, 13], [9, 9, 12, 12, 14]

    def ratio(a, b, axis=-1):
        return b.mean(axis=axis) / a.mean(axis=axis) - 1

    plain = stats.bootstrap(
        (base, other), ratio, method="percentile", vectorized=True, rng=np.random.default_rng(1)
    ).confidence_interval
    low, high = interval(base, other)
    assert low < plain.low < plain.high < high


def test_from_nothing_there_is_no_bound_and_equal_values_have_no_width():
    assert interval([0, 0, 0], [1, 2, 3]) == (math.inf, math.inf)
    assert interval([0, 0, 0], [0, 0, 0]) == (0, 0)
    assert interval([7] * 5, [14] * 5) == pytest.approx((1, 1))
    assert interval([4, 5, 6], [0, 0, 0]) == (-1, -1)
    low, high = interval([0, 0, 0, 0, 5], [1, 1, 1, 1, 1])
    assert low < 0 < high == math.inf


def test_the_same_seed_gives_the_same_interval_and_each_pair_its_own():
    one = (np.array([1.0, 2, 3]), np.array([2.0, 3, 4]))
    two = (np.array([1.0, 2, 3, 9]), np.array([2.0, 3, 4]))
    assert change_intervals([one, two]) == [*change_intervals([one]), *change_intervals([two])]
    six = [3, 5, 8, 9, 11, 12], [2, 6, 7, 9, 13, 14]
    assert interval(*six, seed=1) == interval(*six, seed=1) != interval(*six, seed=2)
    many = [(one[0] * k, one[1] * k) for k in range(1, 200)]
    assert change_intervals(many) == [pytest.approx(interval(*one))] * 199


# Steps ----------------------------------------------------------------------------------------------


def _lasting(random, n, share):
    """Steps of which each keeps a share of the one before."""
    found = [random.normal()]
    for _ in range(n - 1):
        found.append(share * found[-1] + math.sqrt(1 - share**2) * random.normal())
    return np.array(found) * 5 + 100


def _beyond(pair):
    found = settled(*pair)
    return found is not None and means_differ(*found).p < 0.05


@pytest.mark.parametrize("sizes", [(3, 3), (5, 5), (12, 12), (40, 40), (200, 200), (12, 200)])
@pytest.mark.parametrize("share", [0, 0.3, 0.5, 0.7, 0.8, 0.95])
def test_noise_of_steps_that_depend_on_each_other_is_not_beyond_noise(share, sizes):
    random = np.random.default_rng(9)
    n_times = 2_000 if SOAK else 100
    pairs = [[_lasting(random, size, share) for size in sizes] for _ in range(n_times)]
    beyond = sum(map(_beyond, pairs))
    assert beyond <= stats.binom.ppf(0.9999, n_times, 0.05)


def test_taken_as_they_are_they_would_be():
    random = np.random.default_rng(9)
    for share, n in ((0.5, 12), (0.8, 40), (0.6, 200)):
        pairs = [[_lasting(random, n, share) for _ in "AB"] for _ in range(200)]
        assert np.mean([means_differ(*pair).p < 0.05 for pair in pairs]) > 0.15


def test_independent_steps_lose_little():
    random = np.random.default_rng(10)
    n_times = 2_000 if SOAK else 250
    pairs = [(random.normal(100, 5, 60), random.normal(106, 5, 60)) for _ in range(n_times)]
    assert np.mean([means_differ(*settled(*pair)).p < 0.01 for pair in pairs]) > 0.9


def test_few_steps_and_steps_that_last_tell_no_noise():
    random = np.random.default_rng(11)
    assert settled(random.normal(9, 1, 11), random.normal(9, 1, 99)) is None
    assert settled(np.arange(40.0), np.arange(40.0)) is None
    # One side that lasts is enough: the other may not have seen what lasts.
    assert settled(random.normal(9, 1, 40), np.arange(40.0)) is None


def test_steps_are_worth_as_many_values_as_theory_says_and_keep_their_mean():
    random = np.random.default_rng(12)
    steps = _lasting(random, 5_000, 0.8)
    found, other = settled(steps, steps)
    # Of 0.8 kept each time, nine steps are worth one: (1 + 0.8) / (1 - 0.8).
    assert 0.8 < found.size / min(5_000 / 9, 500) <= 1
    assert found.mean() == pytest.approx(steps.mean())
    error = found.std(ddof=1) / math.sqrt(found.size)
    assert error == pytest.approx(5 * math.sqrt(9 / 5_000), rel=0.2)
    assert other.tolist() == found.tolist()


def test_steps_that_never_vary_stay_as_they_are_and_beside_others_keep_their_value():
    still = np.full(20, 7.0)
    assert [side.tolist() for side in settled(still, still + 1)] == [[7] * 20, [8] * 20]
    found = settled(still, np.random.default_rng(13).normal(9, 1, 40))
    assert set(found[0]) == {7}


def test_steps_that_take_turns_are_no_surer_than_without():
    turns = np.tile([1.0, 2], 20)
    found, _ = settled(turns, turns + 1)
    assert found.mean() == 1.5
    assert found.std() >= 0.5


def test_of_very_many_steps_few_values_are_left_and_their_spread_is_right():
    steps = np.random.default_rng(13).normal(100, 5, 20_000)
    means, _ = settled(steps, steps)
    assert 8 <= means.size <= 500
    error = means.std(ddof=1) / math.sqrt(means.size)
    assert 0.9 < error / (5 / math.sqrt(20_000)) < 1.8


def test_how_often_steps_of_two_modes_keep_to_one_is_counted():
    for n, m in ((2, 3), (4, 4)):
        apart = sum(
            0.25 * 0.9 ** (fall.count(0)) * 0.1 ** (fall.count(1))
            for first in itertools.product((0, 1), repeat=2)
            for fall in itertools.product((0, 1), repeat=n + m - 2)
            if first[0] != first[1] and not any(fall)
        )
        assert steps_coin_p(n, m) == pytest.approx(apart)
    assert steps_coin_p(12, 12) < 0.05 < steps_coin_p(11, 12)


def test_an_interval_has_no_change_below_nothing():
    low, high = interval([5, 5, 5, 5, 5], [-3, 1, 1, 1, 6])
    assert -1 <= low < high
