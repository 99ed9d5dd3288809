"""What goes through a table stretch by stretch gives what it gives of the whole table."""

from __future__ import annotations

import random

import polars as pl
import pytest
from conftest import SOAK
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from nsan.analysis import slices
from nsan.analysis.clustering.clusters import fault_clusters
from nsan.analysis.driver import row_figures
from nsan.analysis.driver.fault_rows import fault_row_checks
from nsan.analysis.intervals import union_in_parts
from nsan.analysis.migrations import busy_by_group
from nsan.schema import GPU_FAULTS, KERNELS, MIGRATIONS

SIZES = (1, 3, 7, 50)
SEEDS = range(200 if SOAK else 12)


@pytest.fixture
def rows_at_once(monkeypatch):
    return lambda n: monkeypatch.setattr(slices, "ROWS_AT_ONCE", n)


# Stretches ------------------------------------------------------------------------------------------


@given(
    st.lists(st.none() | st.integers(-(1 << 61), 1 << 61) | st.integers(0, 20), max_size=60),
    st.integers(1, 12),
)
def test_each_value_lies_in_one_stretch_and_a_stretch_holds_few_unless_they_are_equal(values, most):
    frame = pl.LazyFrame({"at": values}, schema={"at": pl.Int64})
    parts = slices.stretches((frame, "at"), rows=most)
    held = [frame.filter(slices.inside("at", part)).collect()["at"].to_list() for part in parts]
    assert sorted(value for part in held for value in part) == sorted(
        value for value in values if value is not None
    )
    assert all(len(part) <= most or len(set(part)) == 1 for part in held)


def test_a_time_far_away_does_not_put_all_others_into_one_stretch():
    frame = pl.LazyFrame({"at": [*range(100), 1 << 61]})
    parts = slices.stretches((frame, "at"), rows=10)
    most = max(
        frame.filter(slices.inside("at", part)).select(pl.len()).collect().item() for part in parts
    )
    assert most <= 10


def test_times_that_lie_farther_apart_than_a_number_of_64_bits_can_say_are_cut_all_the_same():
    far = (1 << 63) - 1
    frame = pl.LazyFrame({"at": [-far - 1, -far, *range(40), far - 1, far]})
    parts = slices.stretches((frame, "at"), rows=10)
    held = [frame.filter(slices.inside("at", part)).collect()["at"].to_list() for part in parts]
    assert [value for part in held for value in part] == frame.collect()["at"].to_list()
    assert max(map(len, held)) <= 10


def test_two_tables_are_cut_at_the_same_places_by_the_rows_of_both():
    many, few = pl.LazyFrame({"at": range(90)}), pl.LazyFrame({"on": [0, 200]})
    parts = slices.stretches((many, "at"), (few, "on"), rows=30)
    assert len(parts) >= 4
    assert parts[0][0] is None
    assert parts[-1][1] is None


# Busy time ------------------------------------------------------------------------------------------

INTERVALS = st.lists(
    st.tuples(st.none() | st.integers(0, 1), st.none() | st.integers(0, 60), st.integers(-3, 25)),
    max_size=40,
)


def plain_busy(rows, windows):
    """By group: the nanoseconds in which a row runs, counted one by one."""
    busy = {}
    for key, start, length in rows:
        if start is not None:
            seen = (t for t in range(start, start + length))
            inside = {t for t in seen if windows is None or any(a <= t < b for a, b in windows)}
            busy[key] = busy.get(key, set()) | inside
    return {key: len(found) for key, found in busy.items() if found}


@given(INTERVALS, st.sampled_from([None, ((5, 20),), ((0, 3), (10, 11), (30, 100))]))
def test_busy_time_is_every_nanosecond_once_however_many_rows_are_looked_at_together(rows, windows):
    frame = pl.LazyFrame(
        [(key, start, None if start is None else start + length) for key, start, length in rows],
        schema={"device_id": pl.Int64, "start_ns": pl.Int64, "end_ns": pl.Int64},
        orient="row",
    )
    before = slices.ROWS_AT_ONCE
    try:
        for size in SIZES:
            slices.ROWS_AT_ONCE = size
            found = busy_by_group(frame, windows, by=("device_id",))
            known = {key: ns for key, ns in found.rows() if ns}
            assert known == plain_busy(rows, windows)
            whole = busy_by_group(frame, windows, by=())
            apart = plain_busy([(0, *rest) for _, *rest in rows], windows)
            assert whole["covered_ns"].sum() == apart.get(0, 0)
    finally:
        slices.ROWS_AT_ONCE = before


def test_parts_of_a_union_touch_where_one_goes_on_what_another_began(rows_at_once):
    rows_at_once(1)
    frame = pl.LazyFrame({"start_ns": [0, 10, 20], "end_ns": [15, 30, 25]})
    parts = pl.concat(union_in_parts(frame)).rows()
    assert parts == [(0, 15), (15, 30)]


# Fault rows and clusters ----------------------------------------------------------------------------


def _maybe(draw, value, share=0.05):
    return None if draw.random() < share else value


def anything(seed):
    """Rows and copies that obey nothing: ends out of order, times and places missing, ends shared."""
    draw = random.Random(seed)
    n, span = draw.choice([0, 1, 5, 30, 80]), draw.choice([40, 400, 4_000])
    rows, copies = [], []
    for _ in range(n):
        start, copy = draw.randrange(span), draw.randrange(span)
        place = {"pid": _maybe(draw, draw.choice([1, 2])), "device_id": _maybe(draw, 0)}
        rows.append(
            place
            | {
                "start_ns": _maybe(draw, start),
                "end_ns": _maybe(draw, start + draw.randrange(draw.choice([5, 60]))),
                "va": _maybe(draw, 4096 * draw.randrange(6)),
                "n_page_faults": _maybe(draw, draw.randrange(300)),
                "access": draw.choice(["read", "write", "other"]),
            }
        )
        copies.append(
            place
            | {
                "pid": draw.choice([1, 2, 3]),
                "start_ns": _maybe(draw, copy),
                "end_ns": _maybe(draw, copy + draw.randrange(20)),
                "va": _maybe(draw, 4096 * draw.randrange(6)),
                "bytes": _maybe(draw, 4096 * draw.choice([0, 1, 2, 600])),
                "direction": draw.choice(["htod", "dtoh", "dtod"]),
                "cause_id": draw.choice([None, 0, 1, 2, 2, 2, 3, 4]),
            }
        )
    kernels = pl.DataFrame(
        {
            "start_ns": [0, span // 2],
            "end_ns": [span // 3, span],
            "pid": [1, 2],
            "device_id": [0, 0],
        }
    )
    return (
        pl.DataFrame(rows, schema=GPU_FAULTS.schema).lazy(),
        pl.DataFrame(copies, schema=MIGRATIONS.schema).lazy(),
        _filled(kernels, KERNELS),
    )


def _filled(frame, table):
    rest = [
        pl.lit(None, dtype).alias(name)
        for name, dtype in table.schema.items()
        if name not in frame.columns
    ]
    return (
        frame.with_columns(rest).select(pl.col(n).cast(t) for n, t in table.schema.items()).lazy()
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_fault_rows_are_judged_alike_in_stretches_of_any_length(seed, rows_at_once):
    rows, copies, _ = anything(seed)
    whole = fault_row_checks(rows, copies).collect()
    for size in SIZES:
        rows_at_once(size)
        assert fault_row_checks(rows, copies).collect().equals(whole), size


def test_a_copy_whose_row_ends_in_a_later_stretch_belongs_to_that_row(rows_at_once):
    # Each row holds one copy; the first row is raised before, and ends after, all that follows.
    rows = pl.DataFrame(
        {
            "start_ns": [0, 100, 200],
            "end_ns": [90, 190, 290],
            "va": [0, 4096, 8192],
            "n_page_faults": [1, 1, 1],
            "access": ["read"] * 3,
            "pid": [1] * 3,
            "device_id": [0] * 3,
        }
    )
    copies = pl.DataFrame(
        {
            "start_ns": [10, 110, 210],
            "end_ns": [80, 180, 280],
            "va": [0, 4096, 8192],
            "bytes": [4096] * 3,
            "direction": ["htod"] * 3,
            "cause_id": [2] * 3,
            "pid": [1] * 3,
            "device_id": [0] * 3,
        }
    )
    rows_at_once(1)
    found = fault_row_checks(_filled(rows, GPU_FAULTS), _filled(copies, MIGRATIONS)).collect()
    assert found["style"].to_list() == ["batch"]
    assert found.select("n_rows", "n_ends", "n_copies", "n_copies_outside").row(0) == (3, 3, 3, 0)
    assert found.select("lag_p25_ns", "lag_p75_ns").row(0) == (10, 10)


# What is carried from stretch to stretch ------------------------------------------------------------


@pytest.fixture
def carried(monkeypatch):
    """The most rows that a stretch left to the next one, and the most pages that were looked at together."""
    most = {"loose": 0, "pages": 0, "starts": 0, "at_once": 0}
    hand_on, search = row_figures._HandedOn, row_figures.pending_ends

    def handed(ends, loose, pages, starts):
        for name, part in (("loose", loose), ("pages", pages), ("starts", starts)):
            most[name] = max(most[name], part.height)
        return hand_on(ends, loose, pages, starts)

    def searched(asked, pages):
        most["at_once"] = max(most["at_once"], pages.height)
        return search(asked, pages)

    monkeypatch.setattr(row_figures, "_HandedOn", handed)
    monkeypatch.setattr(row_figures, "pending_ends", searched)
    return most


def batches(n, pages=1):
    """Rows of 100 ns, one after another, each with one copy of so many pages, at addresses of its own."""
    place = {"pid": 1, "device_id": 0}
    rows = [
        place
        | {"start_ns": 100 * i, "end_ns": 100 * i + 90, "va": 4096 * pages * i}
        | {"n_page_faults": 1, "access": "read"}
        for i in range(n)
    ]
    copies = [
        place
        | {"start_ns": 100 * i + 10, "end_ns": 100 * i + 80, "va": 4096 * pages * i}
        | {"bytes": 4096 * pages, "direction": "htod", "cause_id": 2}
        for i in range(n)
    ]
    return rows, copies


def figures(rows, copies):
    found = row_figures.figures_of(
        _filled(pl.DataFrame(rows), GPU_FAULTS), _filled(pl.DataFrame(copies), MIGRATIONS)
    )
    # A count that found nothing.
    return found.with_columns(pl.col("^n_.*$").fill_null(0))


def test_copies_that_no_row_follows_are_counted_and_not_carried(rows_at_once, carried):
    rows, copies = batches(100)
    # A process without rows, and one whose only row is over at the start.
    alone = [copy | {"pid": 2} for copy in copies]
    late = [copy | {"pid": 3} for copy in copies]
    rows = [*rows, rows[0] | {"pid": 3}]
    rows_at_once(20)
    found = figures(rows, [*copies, *alone, *late])
    assert found.select("pid", "n_copies", "n_copies_outside").rows() == [
        (1, 100, 0),
        (2, 100, 100),
        (3, 100, 99),
    ]
    assert carried["loose"] <= 1


def test_a_row_that_is_open_all_the_time_keeps_its_page_and_not_those_of_all_others(
    rows_at_once, carried
):
    rows, copies = batches(100)
    for pid in (1, 2):
        # Of the page that came with the fourth row, at 310.
        rows = [*rows, rows[3] | {"pid": pid, "start_ns": 1, "end_ns": 20_000}]
    copies += [copy | {"pid": 2} for copy in copies]
    rows_at_once(20)
    found = figures(rows, copies)
    assert found.select("pid", "n_ends", "n_starts", "n_pending", "n_pending_empty").rows() == [
        (1, 101, 101, 1, 1),
        (2, 1, 1, 0, 0),
    ]
    assert carried["pages"] == 1
    assert carried["starts"] <= 1


def test_large_copies_are_looked_at_only_where_a_row_asks_for_a_page(rows_at_once, carried):
    rows, copies = batches(100, pages=512)
    rows_at_once(40)
    assert figures(rows, copies)["n_pending"].to_list() == [0]
    assert carried["at_once"] == 0
    # Each row is raised while the one before it is copied, which brings its page as well: it is pending.
    early = [
        row | {"start_ns": row["start_ns"] - 95, "va": row["va"] - 4096} if row["va"] else row
        for row in rows
    ]
    assert figures(early, copies)["n_pending"].to_list() == [99]
    assert 1 <= carried["at_once"] <= 40


def test_many_large_copies_of_the_same_pages_are_looked_at_a_few_at_a_time(rows_at_once, carried):
    rows, copies = batches(60, pages=512)
    # All of one block; all raised at the start, so that every page but the first is there before its turn.
    rows = [row | {"start_ns": 0, "va": 4096 * i} for i, row in enumerate(rows)]
    copies = [copy | {"va": 0} for copy in copies]
    rows_at_once(100)
    assert figures(rows, copies)["n_pending"].to_list() == [59]
    assert carried["at_once"] <= 100
    assert carried["pages"] <= 60


@pytest.mark.parametrize("seed", SEEDS)
def test_clusters_are_numbered_alike_when_processes_and_gpus_are_taken_one_by_one(
    seed, rows_at_once
):
    tables = anything(seed)
    whole = fault_clusters(*tables, min_pages=1).collect()
    rows_at_once(1)
    # Floats are added in any order by polars' threads.
    apart = fault_clusters(*tables, min_pages=1).collect()
    assert_frame_equal(apart, whole, rel_tol=1e-9, abs_tol=1e-9)
