from __future__ import annotations

import itertools

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsan.analysis.intervals import complete_sum, covered, union
from nsan.analysis.migrations import busy_by_group


def rows(*intervals):
    return pl.LazyFrame(
        list(intervals), schema={"start_ns": pl.Int64, "end_ns": pl.Int64}, orient="row"
    )


def keyed(*intervals):
    schema = {"key": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64}
    return pl.LazyFrame(list(intervals), schema=schema, orient="row")


@pytest.mark.parametrize(
    ("intervals", "merged"),
    [
        ([], []),
        ([(5, 9)], [(5, 9)]),
        ([(0, 100), (50, 150), (200, 250)], [(0, 150), (200, 250)]),
        ([(0, 10), (10, 20)], [(0, 20)]),  # touching
        ([(0, 10), (11, 20)], [(0, 10), (11, 20)]),  # one apart
        ([(0, 100), (20, 30), (40, 50), (99, 101)], [(0, 101)]),  # nested
        ([(0, 100), (10, 20), (50, 60)], [(0, 100)]),  # the last to end is not the last to start
        ([(20, 30), (0, 10)], [(0, 10), (20, 30)]),  # in any order
        ([(7, 7)], []),  # no length
        ([(0, 5), (5, 5), (6, 6), (7, 9)], [(0, 5), (7, 9)]),
        ([(9, 5)], []),  # reversed
        ([(None, 5), (5, None), (None, None), (1, 2)], [(1, 2)]),
        ([(-10, -5), (-5, 3)], [(-10, 3)]),
        ([(3, 8), (3, 8)], [(3, 8)]),
    ],
)
def test_union_merges_what_overlaps_or_touches(intervals, merged):
    assert union(rows(*intervals)).collect().rows() == merged


def test_a_group_is_merged_by_itself_and_null_is_a_group():
    got = union(
        keyed(("b", 0, 10), (None, 5, 15), ("b", 10, 20), (None, 0, 6), ("a", 3, 4), ("b", 30, 31)),
        by=["key"],
    ).collect()
    assert sorted(got.rows(), key=str) == sorted(
        [("a", 3, 4), ("b", 0, 20), ("b", 30, 31), (None, 0, 15)], key=str
    )


def test_a_long_interval_of_one_group_does_not_swallow_the_next_group():
    got = union(keyed(("a", 0, 1000), ("b", 10, 20), ("b", 30, 40)), by=["key"]).collect()
    assert got.rows() == [("a", 0, 1000), ("b", 10, 20), ("b", 30, 40)]


def test_union_of_nothing_has_the_columns_of_something():
    got = union(keyed(), by=["key"]).collect()
    assert got.schema == {"key": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64}
    assert got.height == 0


@pytest.mark.parametrize(
    ("windows", "ns"),
    [
        (None, 150),  # 0-100 and 200-250
        ([(0, 250)], 150),
        ([(50, 225)], 75),  # 50 of the first, 25 of the second
        ([(100, 200)], 0),  # the gap
        ([(10, 20), (30, 40), (90, 110)], 30),  # one interval in three pieces
        ([(10, 20), (190, 201)], 11),
        ([(250, 300)], 0),  # begins where the last one ends
        ([], 0),
    ],
)
def test_coverage_is_clipped_to_windows(windows, ns):
    merged = union(rows((0, 100), (200, 250))).collect()
    assert covered(merged, windows)["covered_ns"].to_list() == [ns]


def test_coverage_of_groups_leaves_out_those_without_time():
    merged = union(keyed(("a", 0, 10), ("b", 20, 30), (None, 5, 25)), by=["key"]).collect()
    got = covered(merged, [(0, 10), (15, 20)], by=["key"])
    assert set(got.rows()) == {("a", 10), (None, 10)}


def test_fault_service_is_a_union_and_not_a_sum():
    # cases.md 23: two faults 0-100 and 50-150 and a migration 20-120
    got = busy_by_group(rows((0, 100), (50, 150), (20, 120)), None, by=())
    assert got["covered_ns"].item() == 150


def test_a_partial_sum_is_not_a_total():
    frame = pl.LazyFrame({"whole": [1, 2], "part": [1, None], "big": [1 << 40, 1 << 40]})
    got = frame.select(complete_sum("whole"), complete_sum("part"), complete_sum("big"))
    assert got.collect().row(0) == (3, None, 1 << 41)


SMALL = st.integers(0, 30)
INTERVALS = st.lists(
    st.tuples(st.sampled_from(["a", "b", None]), st.one_of(SMALL, st.none()), SMALL), max_size=12
)
EDGES = st.lists(SMALL, max_size=8, unique=True).map(sorted)


def bitmap(intervals, key):
    """The nanoseconds that a group covers, one by one."""
    return {
        ns
        for k, start, end in intervals
        if k == key and start is not None
        for ns in range(start, end)
    }


@given(INTERVALS)
def test_union_covers_the_same_nanoseconds_as_the_rows(intervals):
    got = union(keyed(*intervals), by=["key"]).collect().rows()
    for key in ("a", "b", None):
        mine = [(start, end) for k, start, end in got if k == key]
        covers = [ns for start, end in mine for ns in range(start, end)]
        assert sorted(covers) == sorted(bitmap(intervals, key))
        assert all(a[1] < b[0] for a, b in itertools.pairwise(mine))


@given(INTERVALS, EDGES)
def test_coverage_counts_the_nanoseconds_inside_the_windows(intervals, edges):
    windows = list(zip(edges[::2], edges[1::2], strict=False))
    inside = {ns for start, end in windows for ns in range(start, end)}
    merged = union(keyed(*intervals), by=["key"]).collect()
    got = dict(covered(merged, windows, by=["key"]).rows())
    for key in ("a", "b", None):
        assert got.get(key, 0) == len(bitmap(intervals, key) & inside)


@given(INTERVALS, SMALL)
def test_splitting_a_window_and_adding_gives_the_whole(intervals, cut):
    plain = keyed(*intervals)
    parts = [busy_by_group(plain, [window], by=()) for window in ((0, cut), (cut, 30))]
    whole = busy_by_group(plain, [(0, 30)], by=())
    assert sum(part["covered_ns"].item() for part in parts) == whole["covered_ns"].item()
