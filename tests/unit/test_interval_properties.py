"""The algebra of intervals against sets of single nanoseconds, group by group."""

from __future__ import annotations

import os
from itertools import pairwise

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from nsan.analysis.intervals import covered, depth, intersection, overlap, subtraction, union

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 15

BY = ["pid", "name"]
SCHEMA = {"pid": pl.UInt32, "name": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64}
GROUPS = [(1, "a"), (1, None), (None, "a"), (None, None), (2, "b")]
TIMES = st.one_of(st.integers(-3, 12), st.none())
ROWS = st.lists(
    st.tuples(st.sampled_from(GROUPS), TIMES, TIMES).map(lambda row: (*row[0], *row[1:])),
    max_size=14,
)
EDGES = st.lists(st.integers(-3, 12), max_size=8, unique=True).map(sorted)


def frame(rows):
    return pl.LazyFrame(list(rows), schema=SCHEMA, orient="row")


# The reference: the nanoseconds of each group, one by one. -----------------------------------------


def nanoseconds(start, end):
    """What a row covers; nothing where a time is missing or the row is empty or reversed."""
    return set() if start is None or end is None else set(range(start, end))


def sets_of(rows):
    found = {group: set() for group in GROUPS}
    for pid, name, start, end in rows:
        found[pid, name] |= nanoseconds(start, end)
    return found


def open_at(rows, group, ns):
    """How many rows of a group are open during a nanosecond."""
    return sum(ns in nanoseconds(start, end) for *of, start, end in rows if tuple(of) == group)


def runs(sets):
    """Turn sets into rows: maximal runs, by group (a null first) and start."""
    rows = []
    for group in sorted(sets, key=lambda g: ((g[0] is not None, g[0]), (g[1] is not None, g[1]))):
        covers = sets[group]
        starts = sorted(ns for ns in covers if ns - 1 not in covers)
        ends = sorted(ns + 1 for ns in covers if ns + 1 not in covers)
        rows += [(*group, start, end) for start, end in zip(starts, ends, strict=True)]
    return rows


def both(sets, others, how):
    return {group: how(sets[group], others[group]) for group in GROUPS}


def assert_same(left, right):
    assert_frame_equal(left.collect(), right.collect())


# Each operation against the reference. ------------------------------------------------------------


@settings(max_examples=2 * N)
@given(ROWS)
def test_union_is_the_runs_of_covered_nanoseconds(rows):
    got = union(frame(rows), by=BY).collect()
    assert got.schema == SCHEMA
    assert got.rows() == runs(sets_of(rows))


@settings(max_examples=2 * N)
@given(ROWS, ROWS)
def test_intersection_is_the_nanoseconds_in_both(left, right):
    got = intersection(frame(left), frame(right), by=BY).collect()
    assert got.schema == SCHEMA
    assert got.rows() == runs(both(sets_of(left), sets_of(right), set.intersection))


@settings(max_examples=2 * N)
@given(ROWS, ROWS)
def test_subtraction_is_the_nanoseconds_in_the_first_alone(left, right):
    got = subtraction(frame(left), frame(right), by=BY).collect()
    assert got.schema == SCHEMA
    assert got.rows() == runs(both(sets_of(left), sets_of(right), set.difference))


@settings(max_examples=2 * N)
@given(ROWS)
def test_depth_counts_the_open_rows_of_every_nanosecond(rows):
    got = depth(frame(rows), by=BY).collect()
    assert got.schema == SCHEMA | {"n": pl.Int64}
    counted = {
        (pid, name, ns): n for pid, name, start, end, n in got.rows() for ns in range(start, end)
    }
    assert len(counted) == sum(end - start for *_, start, end, _ in got.rows())  # disjoint
    expected = {
        (*group, ns): open_at(rows, group, ns)
        for group, covers in sets_of(rows).items()
        for ns in covers
    }
    assert counted == expected
    assert got.rows() == got.sort(*BY, "start_ns").rows()


@settings(max_examples=2 * N)
@given(ROWS, ROWS)
def test_overlap_with_a_union_is_the_covered_part_of_each_row(rows, others):
    numbered = frame(rows).with_columns(row=pl.int_range(pl.len()))
    got = overlap(numbered, union(frame(others), by=BY), by=BY).collect()
    assert got.schema == SCHEMA | {"row": pl.Int64, "overlap_ns": pl.Int64}
    covers = sets_of(others)
    expected = [
        None if start is None or end is None else len(nanoseconds(start, end) & covers[pid, name])
        for pid, name, start, end in rows
    ]
    assert got.sort("row")["overlap_ns"].to_list() == expected
    assert_frame_equal(got.sort("row").drop("overlap_ns"), numbered.collect())


@settings(max_examples=2 * N)
@given(ROWS, ROWS)
def test_overlap_with_a_depth_weighs_each_nanosecond_by_what_is_open(rows, others):
    numbered = frame(rows).with_columns(row=pl.int_range(pl.len()))
    got = overlap(numbered, depth(frame(others), by=BY), by=BY).collect().sort("row")
    expected = [
        None
        if start is None or end is None
        else sum(open_at(others, (pid, name), ns) for ns in nanoseconds(start, end))
        for pid, name, start, end in rows
    ]
    assert got["overlap_ns"].to_list() == expected


@settings(max_examples=2 * N)
@given(ROWS, EDGES)
def test_coverage_counts_the_nanoseconds_of_each_group_inside_the_windows(rows, edges):
    windows = list(zip(edges[::2], edges[1::2], strict=False))
    inside = {ns for window in windows for ns in range(*window)}
    merged = union(frame(rows), by=BY).collect()
    clipped, whole = (covered(merged, chosen, by=BY) for chosen in (windows, None))
    expected = sets_of(rows)
    assert {(p, n): ns for p, n, ns in whole.rows()} == {
        group: len(covers) for group, covers in expected.items() if covers
    }
    met = {group: len(covers & inside) for group, covers in expected.items() if covers & inside}
    got = {(p, n): ns for p, n, ns in clipped.rows()}
    assert {group: ns for group, ns in got.items() if ns} == met


@settings(max_examples=N)
@given(ROWS, ROWS)
def test_without_groups_all_rows_are_one_group(left, right):
    mine, theirs = (set().union(*sets_of(rows).values()) for rows in (left, right))

    def one(covers):
        return [row[2:] for row in runs({(None, None): covers})]

    a, b = (frame(rows).select("start_ns", "end_ns") for rows in (left, right))
    assert union(a).collect().rows() == one(mine)
    assert intersection(a, b).collect().rows() == one(mine & theirs)
    assert subtraction(a, b).collect().rows() == one(mine - theirs)
    assert covered(union(a).collect(), None)["covered_ns"].item() == len(mine)
    parts = overlap(union(a), union(b)).collect()
    assert parts["overlap_ns"].sum() == len(mine & theirs)
    steps = depth(a).collect()
    assert sum((end - start) * n for start, end, n in steps.rows()) == sum(
        len(nanoseconds(start, end)) for *_, start, end in left
    )


@pytest.mark.parametrize("group", [(1, None), (None, "a"), (None, None)])
def test_overlap_takes_a_null_key_for_a_value_of_its_own(group):
    rows = frame([(*group, 0, 10), (2, "b", 0, 10)])
    got = overlap(rows, frame([(*group, 4, 20)]), by=BY).collect()
    assert {row[:2]: row[-1] for row in got.rows()} == {group: 6, (2, "b"): 0}


# Laws. --------------------------------------------------------------------------------------------


@settings(max_examples=N)
@given(ROWS, ROWS, ROWS)
def test_the_laws_of_sets_hold(a, b, c):
    x, y, z = frame(a), frame(b), frame(c)

    def joined(*parts):
        return union(pl.concat(parts), by=BY)

    def met(p, q):
        return intersection(p, q, by=BY)

    def less(p, q):
        return subtraction(p, q, by=BY)

    merged = union(x, by=BY)
    assert_same(union(merged, by=BY), merged)
    assert_same(met(x, x), merged)
    assert less(x, x).collect().is_empty()
    assert_same(met(x, y), met(y, x))
    assert_same(met(met(x, y), z), met(x, met(y, z)))
    assert_same(met(x, joined(y, z)), joined(met(x, y), met(x, z)))
    assert_same(less(x, joined(y, z)), met(less(x, y), less(x, z)))
    assert_same(less(x, less(x, y)), met(x, y))
    assert_same(joined(less(x, y), met(x, y)), merged)
    assert_same(joined(x, y), joined(merged, y))
    assert met(less(x, y), y).collect().is_empty()


@settings(max_examples=N)
@given(ROWS, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_changes_nothing(rows, random):
    other = random.sample(rows, len(rows))
    half = rows[::2]
    assert_same(union(frame(rows), by=BY), union(frame(other), by=BY))
    assert_same(depth(frame(rows), by=BY), depth(frame(other), by=BY))
    for how in (intersection, subtraction):
        assert_same(how(frame(rows), frame(half), by=BY), how(frame(other), frame(half), by=BY))
        assert_same(how(frame(half), frame(rows), by=BY), how(frame(half), frame(other), by=BY))
    steps = depth(frame(half), by=BY)
    a, b = (
        overlap(frame(each), steps, by=BY).sort(*BY, "start_ns", "end_ns") for each in (rows, other)
    )
    assert_same(a, b)


@settings(max_examples=N)
@given(ROWS, ROWS, st.sampled_from([10**18, -(10**18), 1 << 61]))
def test_moving_all_times_moves_the_answer(left, right, by_ns):
    def moved(rows):
        return rows.with_columns(pl.col("start_ns", "end_ns") + by_ns)

    a, b = frame(left), frame(right)
    for how in (intersection, subtraction):
        assert_same(how(moved(a), moved(b), by=BY), moved(how(a, b, by=BY)))
    assert_same(depth(moved(a), by=BY), moved(depth(a, by=BY)))
    measured = [
        overlap(rows, depth(steps, by=BY), by=BY).select(*BY, "overlap_ns").sort(*BY, "overlap_ns")
        for rows, steps in ((moved(a), moved(b)), (a, b))
    ]
    assert_same(*measured)


@settings(max_examples=N)
@given(ROWS, EDGES)
def test_parts_over_neighbouring_windows_add_up(rows, edges):
    merged = union(frame(rows), by=BY).collect()
    parts = [covered(merged, [window], by=BY) for window in pairwise([-3, *edges, 12])]
    added = pl.concat(parts).group_by(BY).agg(pl.col("covered_ns").sum()).sort(BY)
    whole = covered(merged, None, by=BY).sort(BY)
    assert_frame_equal(added.filter(pl.col("covered_ns") > 0), whole)


@settings(max_examples=N)
@given(ROWS, ROWS)
def test_a_group_has_the_answer_that_it_has_alone(left, right):
    def alone(rows, group):
        return frame(row for row in rows if row[:2] == group)

    def of(answer, group):
        mine = pl.all_horizontal(
            pl.col(key).eq_missing(pl.lit(value, SCHEMA[key]))
            for key, value in zip(BY, group, strict=True)
        )
        return answer.filter(mine)

    for group in GROUPS:
        for how in (intersection, subtraction):
            got = how(frame(left), frame(right), by=BY)
            assert_same(of(got, group), how(alone(left, group), alone(right, group), by=BY))
        assert_same(of(depth(frame(left), by=BY), group), depth(alone(left, group), by=BY))


# Edges of the domain. -----------------------------------------------------------------------------


@pytest.mark.parametrize("by", [[], BY])
def test_nothing_gives_nothing_with_the_same_columns(by):
    none = frame([]).select(*by, "start_ns", "end_ns")
    some = frame([(1, "a", 0, 5)]).select(*by, "start_ns", "end_ns")
    for got in (
        union(none, by=by),
        intersection(none, some, by=by),
        intersection(some, none, by=by),
        subtraction(none, some, by=by),
    ):
        assert got.collect().is_empty()
        assert got.collect_schema() == none.collect_schema()
    assert_same(subtraction(some, none, by=by), some)
    assert depth(none, by=by).collect().is_empty()
    assert overlap(none, some, by=by).collect().is_empty()
    assert overlap(some, none, by=by).collect()["overlap_ns"].to_list() == [0]


def test_the_keys_keep_their_type_and_any_type_is_a_key():
    kinds = pl.Enum(["x", "y"])
    rows = frame([(7, "y", 0, 9), (7, "x", 5, 6), (None, None, 2, 3)]).cast({"name": kinds})
    for got in (
        union(rows, by=BY),
        intersection(rows, rows, by=BY),
        depth(rows, by=BY).drop("n"),
        overlap(rows, depth(rows, by=BY), by=BY).drop("overlap_ns").sort(*BY),
    ):
        assert got.collect().schema == SCHEMA | {"name": kinds}
        assert got.collect().rows() == [(None, None, 2, 3), (7, "x", 5, 6), (7, "y", 0, 9)]


def test_touching_rows_meet_in_no_nanosecond():
    a, b = frame([(1, "a", 0, 10)]), frame([(1, "a", 10, 20)])
    assert intersection(a, b, by=BY).collect().is_empty()
    assert_same(subtraction(a, b, by=BY), a)
    assert overlap(a, b, by=BY).collect()["overlap_ns"].to_list() == [0]
    assert union(pl.concat([a, b]), by=BY).collect().rows() == [(1, "a", 0, 20)]


def test_a_reversed_row_has_an_overlap_of_zero():
    rows, steps = frame([(1, "a", 30, 10)]), frame([(1, "a", 0, 100)])
    assert overlap(rows, steps, by=BY).collect()["overlap_ns"].to_list() == [0]


def test_three_levels_by_hand():
    # 0-100, 50-150 twice, 60-70: one open, then three, then four, three, then two.
    rows = frame([(1, "a", 50, 150), (1, "a", 0, 100), (1, "a", 60, 70), (1, "a", 50, 150)])
    got = depth(rows, by=BY).collect().select("start_ns", "end_ns", "n").rows()
    assert got == [(0, 50, 1), (50, 60, 3), (60, 70, 4), (70, 100, 3), (100, 150, 2)]
    asked = frame([(1, "a", 40, 65), (1, "a", 140, 400), (2, "b", 40, 65)])
    sums = overlap(asked, depth(rows, by=BY), by=BY).collect().sort("pid", "start_ns")
    assert sums["overlap_ns"].to_list() == [10 * 1 + 10 * 3 + 5 * 4, 10 * 2, 0]
