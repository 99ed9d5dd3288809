from __future__ import annotations

import os
import random

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from nsan.analysis.views import lanes as module
from nsan.analysis.views.lanes import LANE, Lane

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 10


def lane(*rows):
    schema = {"start_ns": pl.Int64, "end_ns": pl.Int64, "name": pl.String, "id": pl.Int64}
    return Lane.build(pl.DataFrame(rows, schema=schema, orient="row"))


def test_few_intervals_are_shown_one_by_one_and_whole():
    found = lane((10, 20, "b", 1), (0, 5, "a", 0)).within((3, 15), n_columns=10)
    assert found.schema == LANE.schema
    assert found.rows() == [(0, 5, "a", 0, 1), (10, 20, "b", 1, 1)]


def test_intervals_that_only_touch_the_window_are_outside():
    found = lane((0, 5, "a", 0), (10, 20, "b", 1), (5, 5, "instant", 2))
    assert found.within((5, 10), n_columns=10)["id"].to_list() == [2]


def test_a_long_interval_that_began_long_before_the_window_is_found():
    short = [(i * 10, i * 10 + 2, "short", i) for i in range(1, 1000)]
    found = lane((0, 100_000, "long", 0), *short).within((9_000, 9_008), n_columns=10)
    assert found["name"].to_list() == ["long", "short"]


def test_narrow_intervals_of_a_column_are_one_and_named_by_the_one_busy_longest():
    rows = [(0, 10, "a", 0), (12, 16, "b", 1), (20, 29, "b", 2), (150, 151, "c", 3)]
    found = lane(*rows).within((0, 200), n_columns=2, most=3)
    assert found.rows() == [(0, 29, "b", None, 3), (150, 151, "c", 3, 1)]


def test_a_wide_interval_stays_single_among_many_narrow_ones():
    narrow = [(i * 10, i * 10 + 1, "n", i) for i in range(100)]
    found = lane(*narrow, (0, 900, "wide", 500)).within((0, 1000), n_columns=10, most=20)
    assert (0, 900, "wide", 500, 1) in found.rows()
    assert found.height == 11


def test_no_more_rows_than_asked_for_and_every_interval_counted():
    draw = random.Random(5)
    for _ in range(N):
        rows = []
        for number in range(draw.randrange(400)):
            start = draw.randrange(5000)
            rows.append((start, start + draw.choice([0, 3, 40, 2000]), draw.choice("abc"), number))
        low, high = sorted(draw.sample(range(6000), 2))
        most = draw.randrange(1, 50)
        found = lane(*rows).within((low, high), n_columns=draw.randrange(1, 300), most=most)
        inside = [r for r in rows if r[0] < high and (r[1] > low or r[0] >= low)]
        assert found["n"].sum() == len(inside)
        assert found.height <= most
        assert found["start_ns"].is_sorted()


def test_names_too_many_for_one_array_give_the_same_answer(monkeypatch):
    draw = random.Random(6)
    for _ in range(N):
        rows = [(t, t + draw.randrange(9), draw.choice(["a", "b", None]), t) for t in range(300)]
        found = lane(*rows)
        few = found.within((0, 300), n_columns=20, most=20)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_MOST_PAIRS", 0)
            assert_frame_equal(found.within((0, 300), n_columns=20, most=20), few)
        for start, _, name, _, n in few.filter(pl.col("n") > 1).rows():
            busy = {}
            for row in rows:
                if row[1] - row[0] < 15 and start // 15 == row[0] // 15:
                    busy[row[2]] = busy.get(row[2], 0) + row[1] - row[0]
            assert n == 15
            assert busy[name] == max(busy.values())


def test_what_has_no_start_or_end_is_left_out():
    assert lane((None, 5, "a", 0), (1, None, "b", 1)).within((0, 9), n_columns=3).is_empty()


def test_an_empty_lane_shows_nothing():
    assert lane().within((0, 10), n_columns=5).rows() == []


@pytest.mark.parametrize("window", [(0, 10**18), (-(1 << 70), 1 << 70), (-(10**18), 10**18)])
def test_a_window_of_thirty_years_or_of_all_time_is_answered(window):
    starts = [at * 10**15 for at in range(1000)]
    frame = pl.DataFrame(
        {
            "start_ns": starts,
            "end_ns": [start + 10**14 for start in starts],
            "name": ["k"] * 1000,
            "id": range(1000),
        }
    )
    found = Lane.build(frame).within(window, n_columns=480, most=300)
    assert found["n"].sum() == 1000
    assert found.height <= 300
    assert found["start_ns"].min() == 0
    assert found["end_ns"].max() == 999 * 10**15 + 10**14


def test_columns_stay_in_order_where_a_window_spans_more_than_int64_holds():
    times = [at << 54 for at in range(-400, 400)]
    frame = pl.DataFrame(
        {"start_ns": times, "end_ns": times, "name": ["k"] * 800, "id": range(800)},
        schema_overrides={"start_ns": pl.Int64, "end_ns": pl.Int64},
    )
    found = Lane.build(frame).within((-(1 << 63), (1 << 63) - 1), n_columns=8, most=8)
    # Eight columns of 2^61 ns: the first and the last one hold what reaches into them.
    assert found["n"].to_list() == [16, 128, 128, 128, 128, 128, 128, 16]
