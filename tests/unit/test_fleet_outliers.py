"""Which rank or run stands out, by medians and MADs that are worked out by hand."""

from __future__ import annotations

import itertools

import numpy as np
import polars as pl
import pytest
from conftest import SOAK
from fleet_members import MS, frame
from hypothesis import given
from hypothesis import strategies as st

from nsan.analysis.fleet.bounds import BOUNDS, bound
from nsan.analysis.fleet.outlying import outlying
from nsan.analysis.fleet.peers import judged_groups, rank_outliers, run_outliers, stragglers
from nsan.analysis.fleet.views import bars, causes_of


def named(found):
    return found["rank"].to_list()


def test_the_rank_with_most_um_time_stands_out_with_its_distance():
    # Median of 100, 101, 102, 103, 104, 105, 106, 350: 103.5. Distances: 3.5, 2.5, 1.5, 0.5, 0.5, 1.5, 2.5,
    # 246.5; their median: 2.
    found = rank_outliers(frame([100, 101, 102, 350, 103, 104, 105, 106]))
    (row,) = found.to_dicts()
    assert (row["rank"], row["figure"], row["n_peers"]) == (3, "migrations_busy_ns", 8)
    assert row["value_ns"] == 350 * MS
    assert row["median_ns"] == 103.5 * MS
    assert row["mad_ns"] == 2 * MS
    assert row["excess_ns"] == 246.5 * MS
    assert row["times_median"] == pytest.approx(350 / 103.5)
    assert row["mads"] == pytest.approx(246.5 / 2)
    # A hundredth of the duration of 1 s, 10 ms, is added on the logarithmic scale, where it is nearer. There the
    # distances of 102 and 106 ms are the two in the middle.
    near = (np.log(113.5 / 112) + np.log(116 / 113.5)) / 2
    assert row["score"] == pytest.approx(np.log(360 / 113.5) / (1.4826 * near))
    assert row["score"] < 246.5 / (1.4826 * 2)
    assert row["bound"] == 8.0


def test_a_rank_with_much_less_than_the_others_stands_out_too():
    found = rank_outliers(frame([100, 101, 102, 10, 103, 104, 105, 106]))
    assert named(found) == [3]
    assert found["excess_ns"][0] == (102.5 - 10) * -MS


def test_ranks_that_are_alike_give_none():
    assert rank_outliers(frame([100] * 64)).is_empty()
    assert rank_outliers(frame([0] * 5)).is_empty()


def test_a_run_in_which_all_are_bad_gives_none():
    assert rank_outliers(frame([990, 991, 992, 993, 994, 995])).is_empty()


@pytest.mark.parametrize("values", [[100], [1, 100], [100, 101, 140], [100, 101, 102, 118]])
def test_a_small_fleet_does_not_cry_wolf(values):
    assert rank_outliers(frame(values)).is_empty()


def test_of_two_ranks_none_is_judged_however_far_they_are_apart():
    found = outlying(
        frame([1, 900]).with_columns(value_ns="migrations_busy_ns", n_figures=pl.lit(1)),
        by=("run", "program"),
    )
    assert found["is_outlier"].to_list() == [None, None]


def test_of_three_ranks_one_that_is_far_beyond_doubt_is_named():
    # 1.4826 MADs of 1 ms are below 1 % of the median: 289 ms over 1.4826 ms is 195, the bound 112.6.
    assert named(rank_outliers(frame([10, 11, 300]))) == [2]


def test_a_small_difference_is_not_worth_a_word_however_many_mads_it_is():
    # 19 % above a median of which all others are within 0.01 %.
    values = [100 + i / 1000 for i in range(20)]
    assert rank_outliers(frame([*values, 119])).is_empty()
    assert named(rank_outliers(frame([*values, 121]))) == [20]


def test_ranks_that_are_alike_to_the_ns_are_as_if_they_varied_by_a_hundredth():
    # 100 ms over 1 ms is 100, below the bound of 112.6 for three.
    assert rank_outliers(frame([100, 100, 200], durations=[200] * 3)).is_empty()
    assert named(rank_outliers(frame([100, 100, 213], durations=[213] * 3))) == [2]


def test_the_union_of_both_times_is_judged_only_where_all_have_it():
    """Some ranks know it because nothing migrated there: they are not like each other for that."""
    values = [100, 101, 102, 103, 104, 900]
    assert named(rank_outliers(frame(values, figure="um_ns"))) == [5]
    assert rank_outliers(frame([*values, None], figure="um_ns")).is_empty()


def test_a_difference_below_a_hundredth_of_the_duration_is_not_worth_a_word():
    values = [1.0, 1.1, 1.2, 1.0, 1.1, 1.2, 1.1] * 5
    assert rank_outliers(frame([*values, 10.9], durations=[1000] * 36)).is_empty()
    assert named(rank_outliers(frame([*values, 11.2], durations=[1000] * 36))) == [35]


def test_where_durations_are_not_known_a_millisecond_is_the_least():
    unknown = [None] * 32
    assert rank_outliers(frame([0] * 31 + [0.9], durations=unknown)).is_empty()
    assert named(rank_outliers(frame([0] * 31 + [1.1], durations=unknown))) == [31]


def test_beside_ranks_without_um_time_one_with_some_stands_out_without_a_ratio():
    (row,) = rank_outliers(frame([0, 0, 0, 0, 0, 500])).to_dicts()
    assert (row["median_ns"], row["mad_ns"]) == (0, 0)
    assert (row["times_median"], row["mads"]) == (None, None)
    # A hundredth of the duration of 1 s is added, and a tenth of that is the least spread: 1 ms beside 10 ms.
    assert row["score"] == pytest.approx(np.log(510 / 10) / 0.1)


def test_a_value_that_is_not_known_is_neither_judged_nor_counted():
    (row,) = rank_outliers(frame([100, None, 101, 350, 102, None, 103, 104])).to_dicts()
    assert (row["rank"], row["n_peers"], row["median_ns"]) == (3, 6, 102.5 * MS)


def test_ranks_of_another_program_are_not_peers():
    server = frame([5000], program="server").with_columns(rank=pl.lit(9, pl.Int64))
    assert rank_outliers(pl.concat([frame([100, 101, 102, 103, 104, 105]), server])).is_empty()


def test_each_run_is_judged_for_itself():
    two = [frame([100, 101, 102, 103, 104, 105], run="a"), frame([900] * 6, run="b")]
    assert rank_outliers(pl.concat(two)).is_empty()


def test_a_rank_that_stands_out_twice_has_one_row_with_the_farther_figure():
    both = frame([100, 101, 102, 103, 104, 300]).with_columns(
        gpu_faults_busy_ns=pl.Series([100 * MS] * 5 + [900 * MS])
    )
    found = rank_outliers(both)
    assert found["figure"].to_list() == ["gpu_faults_busy_ns"]
    assert found["value_ns"].to_list() == [900 * MS]


def test_the_farthest_is_first_and_what_is_below_the_median_last():
    found = rank_outliers(frame([1, 100, 101, 102, 103, 104, 105, 106, 107, 400, 900]))
    assert named(found) == [10, 9, 0]


def test_ranks_that_are_equally_far_are_in_their_order():
    found = rank_outliers(frame([100, 100, 100, 100, 100, 100, 300, 300]))
    assert named(found) == [6, 7]


def test_no_report_gives_no_outlier():
    for find in (rank_outliers, run_outliers, stragglers):
        assert find(frame([])).is_empty()


@given(st.lists(st.integers(0, 10**6), min_size=3, max_size=40), st.integers(1, 1000))
def test_what_stands_out_does_not_hang_on_the_order_or_on_the_unit(values, factor):
    def out(values, durations):
        found = rank_outliers(frame(values, durations=durations))
        return sorted(zip(found["value_ns"], found["figure"], strict=True))

    durations = [10**6] * len(values)
    first = out(values, durations)
    assert out(values[::-1], durations) == first
    larger = out([v * factor for v in values], [d * factor for d in durations])
    assert [value for value, _ in larger] == [value * factor for value, _ in first]


def test_among_ranks_that_vary_by_chance_one_group_in_a_hundred_has_an_outlier():
    """The bounds are those of a simulation; here it runs again, with other numbers."""
    rng, n_groups = np.random.default_rng(7), 20_000 if SOAK else 2000
    for size, n_figures in itertools.product((3, 4, 5, 6, 7, 8, 9, 16, 64), (1, 2)):
        values = rng.standard_normal((n_groups, size))
        far = np.abs(values - np.median(values, axis=1, keepdims=True))
        score = far.max(axis=1) / (1.4826 * np.median(far, axis=1))
        share, meant = (score > bound(size, n_figures)).mean(), 0.01 / n_figures
        # By four standard deviations of so many groups; below it where a bound is rounded up.
        assert share <= meant + 4 * (meant / n_groups) ** 0.5, (size, n_figures)


def named_of_runs(values):
    """Say in what part of runs somebody is named; a run per row, durations of 1 s."""
    runs, size = values.shape
    rows = pl.DataFrame(
        {
            "run": np.repeat(np.arange(runs), size),
            "value_ns": np.maximum(values, 0).ravel().astype(np.int64),
        }
    ).with_columns(duration_ns=pl.lit(1000 * MS), n_figures=pl.lit(1))
    return outlying(rows, by=["run"]).filter("is_outlier")["run"].n_unique() / runs


SKEWED = {
    "lognormal": lambda rng, size: 200 * MS * np.exp(rng.normal(0, 0.6, size)),
    "exponential": lambda rng, size: rng.exponential(200 * MS, size),
    "gamma": lambda rng, size: rng.gamma(2, 100 * MS, size),
    "uniform": lambda rng, size: rng.uniform(100 * MS, 900 * MS, size),
}


@pytest.mark.parametrize("times", SKEWED.values(), ids=SKEWED)
@pytest.mark.parametrize("size", [3, 4, 8, 16, 64, 1000])
def test_skewed_times_do_not_cry_wolf_either(times, size):
    n_runs = (20_000 if SOAK else 1000) * 8 // max(8, size) + 50
    rng = np.random.default_rng(11)
    meant = 0.01
    assert named_of_runs(times(rng, (n_runs, size))) <= meant + 4 * (meant / n_runs) ** 0.5


def test_of_a_heavy_tail_with_many_ranks_few_runs_have_somebody_named():
    """Student's t with three degrees of freedom: one of a thousand is far out in every run."""
    rng = np.random.default_rng(12)
    times = 500 * MS + 50 * MS * rng.standard_t(3, (60, 1000))
    assert named_of_runs(times) <= 0.1


def test_a_rank_twice_as_slow_is_found_among_eight_and_among_a_thousand():
    rng = np.random.default_rng(13)
    for n_runs, size in ((200, 8), (20, 1000)):
        times = rng.normal(300 * MS, 15 * MS, (n_runs, size))
        times[:, 0] *= 2
        assert named_of_runs(times) > 0.85, size


def test_what_stands_out_is_twice_as_far_from_the_median_as_all_others():
    """Half of 101 are 99 and 101: the median is 100, the MAD 1, the logarithmic scale nearly the same."""
    usual = [99.0, 101.0] * 50 + [100.0]
    # Of 102 the median stays; 130 is 30 away from it, 116 more than half of that.
    assert rank_outliers(frame([*usual, 116.0, 130.0])).is_empty()
    assert named(rank_outliers(frame([*usual, 110.0, 130.0]))) == [102]


def test_half_of_the_ranks_are_not_outliers_of_the_other_half():
    assert rank_outliers(frame([100] * 4 + [300] * 4)).is_empty()
    assert named(rank_outliers(frame([100] * 5 + [300] * 3))) == [5, 6, 7]


def test_by_two_figures_a_rank_has_to_be_farther_for_each_may_name_somebody_by_chance():
    (row,) = rank_outliers(frame([100, 101, 102, 350, 103, 104, 105, 106])).to_dicts()
    both = frame([100, 101, 102, 350, 103, 104, 105, 106]).with_columns(
        gpu_faults_busy_ns=pl.Series([100, 101, 102, 103, 103, 104, 105, 106]) * MS
    )
    (two,) = rank_outliers(both).to_dicts()
    assert (row["bound"], two["bound"]) == (8.0, 9.8)
    # A figure that is the same everywhere can name nobody.
    same = frame([100, 101, 102, 350, 103, 104, 105, 106]).with_columns(
        gpu_faults_busy_ns=pl.lit(0, pl.Int64)
    )
    assert rank_outliers(same)["bound"].to_list() == [8.0]


def test_what_was_judged_counts_ranks_and_runs_and_leaves_out_what_was_not():
    rows = [
        frame([100, 101, 102, None], run="a"),
        frame([5, 9], run="b"),
        frame([7], run="c", program="q"),
    ]
    (group,) = judged_groups(pl.concat(rows)).to_dicts()
    assert (group["scope"], group["run"], group["figure"]) == ("rank", "a", "migrations_busy_ns")
    assert (group["n_peers"], group["n_beyond"], group["n_together"]) == (3, 0, 0)
    assert (group["min_ns"], group["median_ns"], group["max_ns"]) == (100 * MS, 101 * MS, 102 * MS)
    # 112.6 times 1.4826 MADs of 1 ms.
    assert group["needed_ns"] == pytest.approx((101 + 112.6 * 1.4826) * MS)
    wide = judged_groups(frame([1, 10**4, 10**8, 10**12], durations=[None] * 4))
    assert wide["needed_ns"].to_list() == [None]
    runs = judged_groups(nights([100, 101, 102, 103])).filter(scope="run").to_dicts()
    assert [(row["n_peers"], row["size"]) for row in runs] == [(4, 3)]


def test_a_bound_between_two_sizes_is_the_larger_one():
    one, two = ({row[0]: row[column] for row in BOUNDS} for column in (1, 2))
    assert bound(14) == max(one[13], one[15])
    assert bound(300) == 4.4
    assert bound(700) == one[1024] > one[512]
    assert bound(10**6) == BOUNDS[-1][1]
    assert bound(700, 2) == two[1024]


# Runs ----------------------------------------------------------------------------------------------


def nights(medians, **more):
    return pl.concat([frame([m, m, m], run=f"n{i}", **more) for i, m in enumerate(medians)])


def test_a_night_whose_typical_rank_is_far_from_the_others_stands_out():
    found = run_outliers(nights([100, 101, 102, 103, 104, 105, 106, 250]))
    (row,) = found.to_dicts()
    assert (row["run"], row["value_ns"], row["median_ns"]) == ("n7", 250 * MS, 103.5 * MS)


def test_one_bad_rank_does_not_make_a_bad_night():
    rows = nights([100] * 7)
    assert run_outliers(pl.concat([rows, frame([100, 100, 900], run="n7")])).is_empty()


def test_nights_of_another_size_or_program_are_not_compared():
    rows = nights([100] * 7)
    assert run_outliers(pl.concat([rows, frame([900] * 4, run="x")])).is_empty()
    assert run_outliers(pl.concat([rows, frame([900] * 3, run="x", program="q")])).is_empty()
    # A rank that could not be read is one of its run all the same.
    short = frame([900] * 2, run="x").with_columns(n_failed=pl.lit(1, pl.Int64))
    assert run_outliers(pl.concat([rows, short]))["run"].to_list() == ["x"]


def test_a_night_in_which_a_rank_lacks_the_figure_is_not_judged():
    rows = nights([100] * 7)
    assert run_outliers(pl.concat([rows, frame([900, 900, None], run="x")])).is_empty()


# Who takes longest ---------------------------------------------------------------------------------


def test_the_rank_that_takes_longest_is_named_with_its_um_time():
    durations = [1000, 1010, 1020, 1500, 1030]
    (row,) = stragglers(frame([100, 101, 102, 400, 103], durations=durations)).to_dicts()
    assert (row["rank"], row["n_peers"], row["duration_ns"]) == (3, 5, 1500 * MS)
    assert row["excess_ns"] == (1500 - 1020) * MS
    assert row["spread"] == pytest.approx(500 / 1020)
    assert (row["um_figure"], row["um_excess_ns"]) == ("migrations_busy_ns", (400 - 102) * MS)
    assert row["is_outlier"] is True


def test_um_time_that_some_rank_lacks_explains_nothing():
    (row,) = stragglers(frame([100, None, 400], durations=[1, 2, 9])).to_dicts()
    assert (row["rank"], row["um_figure"], row["um_excess_ns"]) == (2, None, None)


def test_of_ranks_that_take_equally_long_the_lowest_is_named():
    (row,) = stragglers(frame([1, 1, 1], durations=[5, 7, 7])).to_dicts()
    assert row["rank"] == 1


def test_a_run_with_one_known_duration_has_no_straggler():
    assert stragglers(frame([1, 1], durations=[5, None])).is_empty()
    assert stragglers(frame([1])).is_empty()


# Frames of charts ----------------------------------------------------------------------------------


def ranks(values, sides=None, numbers=None):
    return pl.DataFrame(
        {
            "rank": pl.Series(numbers or range(len(values)), dtype=pl.Int64),
            "value_ns": pl.Series(values, dtype=pl.Int64),
            "side": pl.Series(sides or [None] * len(values), dtype=pl.String),
        }
    )


def test_ranks_share_bars_where_there_are_too_many_and_the_largest_value_stays():
    sides = [None, "less", "more", None, None]
    found = bars(ranks([5, 9, 7, 1, 2], sides), most=2).to_dicts()
    assert found == [
        {"first": 0, "last": 2, "n": 3, "value_ns": 9, "side": "more"},
        {"first": 3, "last": 4, "n": 2, "value_ns": 2, "side": None},
    ]


def test_a_report_without_a_value_leaves_a_gap():
    found = bars(ranks([5, None, 7]), most=10)
    assert found["first"].to_list() == [0, 2]


def test_where_ranks_are_unknown_or_come_twice_places_take_their_place():
    assert bars(ranks([1, 2], numbers=[4, 4]), most=9)["first"].to_list() == [0, 1]
    assert bars(ranks([1, 2], numbers=[None, 4]), most=9)["first"].to_list() == [0, 1]
    assert bars(ranks([1, 2], numbers=[8, 4]), most=9).rows()[0][:4] == (4, 4, 1, 2)


def test_nothing_makes_no_bar():
    assert bars(ranks([]), most=5).is_empty()
    assert bars(ranks([None]), most=5).is_empty()


def test_the_reports_that_moved_most_are_taken_apart_by_cause():
    reports = pl.DataFrame(
        {"label": ["a", "b", "c"], "bytes": [3, 9, None], "x": [3, 4, None], "y": [0, 5, None]},
        schema={"label": pl.String, "bytes": pl.Int64, "x": pl.Int64, "y": pl.Int64},
    )
    found = causes_of(reports, ["x", "y"], most=5)
    assert found.rows() == [("b", 0, "x", 4), ("b", 0, "y", 5), ("a", 1, "x", 3)]
    assert causes_of(reports, ["x", "y"], most=1)["label"].unique().to_list() == ["b"]
