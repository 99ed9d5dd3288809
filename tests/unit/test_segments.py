"""Ranges cut at edges, against sets of single bytes."""

from __future__ import annotations

import os
from collections import Counter
from itertools import combinations, pairwise

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from nsan.analysis.segments import cut, edges_of

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 30

HIGH = 0x7F00_0000_0000
"""Real addresses need 47 bits."""

SCHEMA = {"pid": pl.UInt32, "va": pl.UInt64, "bytes": pl.Int64, "row": pl.Int64}
PLACES = st.one_of(st.none(), *[st.integers(HIGH, HIGH + 30)] * 4)
SIZES = st.one_of(st.none(), st.integers(-2, 0), *[st.integers(1, 12)] * 4)
RANGES = st.lists(st.tuples(st.sampled_from([1, 2, None]), PLACES, SIZES), max_size=10)


def frame(rows):
    return pl.DataFrame([(*row, i) for i, row in enumerate(rows)], schema=SCHEMA, orient="row")


def edges(*pairs):
    return pl.DataFrame(pairs, schema={"pid": pl.UInt32, "va": pl.UInt64}, orient="row").sort(
        "pid", "va"
    )


def kept(rows):
    """Rows that cover a byte, with their number."""
    return [
        (i, pid, va, size)
        for i, (pid, va, size) in enumerate(rows)
        if va is not None and size is not None and size > 0
    ]


def ends_of(rows):
    """The pairs of process and address where a row begins or ends."""
    return {(pid, at) for _, pid, va, size in kept(rows) for at in (va, va + size)}


def in_order(pairs):
    return sorted(pairs, key=lambda pair: (pair[0] is not None, pair))


@settings(max_examples=N)
@given(RANGES, RANGES)
def test_the_edges_are_where_a_range_begins_or_ends(some, others):
    got = edges_of(frame(some), frame(others).drop("row"))
    assert got.schema == {"pid": pl.UInt32, "va": pl.UInt64}
    assert got.rows() == in_order(ends_of(some) | ends_of(others))


@settings(max_examples=2 * N)
@given(RANGES, RANGES)
def test_each_byte_of_a_range_is_in_one_piece_of_it_and_no_edge_is_inside_a_piece(rows, others):
    # Edges of other ranges: some lie outside of all rows, and some processes have none.
    places = edges_of(frame(others))
    got = cut(frame(rows), places)
    assert got.schema == SCHEMA | {"segment": pl.Int64}
    covered = Counter(
        (row, pid, byte) for pid, va, size, row, _ in got.rows() for byte in range(va, va + size)
    )
    assert covered == {
        (i, pid, byte): 1 for i, pid, va, size in kept(rows) for byte in range(va, va + size)
    }
    assert got["bytes"].sum() == sum(size for *_, size in kept(rows))
    assert (got["bytes"] > 0).all()
    cuts = ends_of(others)
    assert not any(
        (pid, byte) in cuts for pid, va, size, *_ in got.rows() for byte in range(va + 1, va + size)
    )


@settings(max_examples=2 * N)
@given(RANGES, RANGES)
def test_two_pieces_share_their_segment_if_and_only_if_no_edge_is_between_them(rows, others):
    got = cut(frame(rows), edges_of(frame(others))).rows()
    cuts = ends_of(others)
    for (pid, va, _, _, segment), (pid_2, va_2, _, _, segment_2) in combinations(got, 2):
        low, high = sorted((va, va_2))
        apart = pid != pid_2 or any((pid, at) in cuts for at in range(low + 1, high + 1))
        assert (segment != segment_2) == apart


@settings(max_examples=N)
@given(RANGES)
def test_cut_at_their_own_edges_a_segment_has_one_place(rows):
    got = cut(frame(rows), edges_of(frame(rows)))
    places = got.group_by("segment").agg(pl.col("pid", "va", "bytes").n_unique())
    assert (places.select("pid", "va", "bytes") == 1).to_numpy().all()


@settings(max_examples=N)
@given(RANGES, RANGES)
def test_cutting_again_and_the_order_of_the_rows_change_nothing(rows, others):
    places = edges_of(frame(others))
    once = cut(frame(rows), places)
    assert_frame_equal(cut(once, places), once, check_row_order=False)
    mixed = cut(frame(rows).reverse(), places)
    assert_frame_equal(mixed, once, check_row_order=False)
    assert_frame_equal(edges_of(frame(others).reverse()), places)


def test_two_ranges_that_overlap_by_hand():
    rows = frame([(1, 100, 10), (1, 105, 20)])
    at = edges_of(rows)
    assert at.rows() == [(1, 100), (1, 105), (1, 110), (1, 125)]
    got = cut(rows, at).sort("row", "va")
    assert got.select("row", "va", "bytes").rows() == [
        (0, 100, 5),
        (0, 105, 5),
        (1, 105, 5),
        (1, 110, 15),
    ]
    first, shared, shared_too, last = got["segment"].to_list()
    assert shared == shared_too
    assert len({first, shared, last}) == 3
    assert first < shared < last


def test_the_pieces_before_the_first_edge_and_after_the_last_have_segments_of_their_own():
    got = cut(frame([(1, 90, 40), (1, 0, 5)]), edges((1, 100), (1, 120)))
    low, before, inside, after = got["segment"].to_list()
    assert got["bytes"].to_list() == [5, 10, 20, 10]
    assert low == before
    assert before < inside < after


def test_a_process_is_cut_at_its_own_edges_only():
    rows = frame([(1, 100, 10), (2, 100, 10), (None, 100, 10)])
    got = cut(rows, edges((1, 105), (None, 102)))
    assert got.select("pid", "va", "bytes").rows() == [
        (None, 100, 2),
        (None, 102, 8),
        (1, 100, 5),
        (1, 105, 5),
        (2, 100, 10),
    ]
    assert got["segment"].n_unique() == 5


def test_a_copy_of_two_mib_is_one_piece_unless_something_cuts_it():
    block = frame([(1, HIGH, 2 << 20)])
    assert cut(block, edges_of(block)).height == 1
    page = frame([(1, HIGH + 4096, 4096)])
    got = cut(block, edges_of(block, page))
    assert got["bytes"].to_list() == [4096, 4096, (2 << 20) - 8192]
    assert got["va"].to_list() == [HIGH, HIGH + 4096, HIGH + 8192]


@pytest.mark.parametrize("unusable", [[], [(1, None, 4)], [(1, HIGH, None)], [(1, HIGH, 0)]])
def test_ranges_without_a_byte_leave_the_columns(unusable):
    assert edges_of(frame(unusable)).is_empty()
    got = cut(frame(unusable), edges((1, HIGH)))
    assert got.is_empty()
    assert got.schema == SCHEMA | {"segment": pl.Int64}


def test_without_edges_a_range_stays_whole():
    got = cut(frame([(1, HIGH, 8), (1, HIGH + 20, 4), (2, HIGH, 8)]), edges())
    assert got["bytes"].to_list() == [8, 4, 8]
    assert got.group_by("pid").agg(pl.col("segment").n_unique())["segment"].to_list() == [1, 1]
    assert got["segment"].n_unique() == 2


@settings(max_examples=N)
@given(RANGES, RANGES, RANGES)
def test_ranges_cut_at_the_same_edges_have_the_same_segments(rows, more, others):
    # Each process has an edge: without one, its number depends on what else is cut.
    always = [(pid, HIGH + 3, 1) for pid in (1, 2, None)]
    places = edges_of(frame(others + always))
    together = cut(frame(rows + more), places).filter(pl.col("row") < len(rows))
    assert_frame_equal(cut(frame(rows), places), together, check_row_order=False)


def test_the_pieces_come_by_process_and_address():
    rows = frame([(1, 0, 10), (1, 2, 1)])
    got = cut(rows, edges_of(rows))
    assert all(a <= b for a, b in pairwise(got["va"].to_list()))


def test_other_columns_stay_whatever_their_name():
    rows = frame([(1, 0, 10)]).with_columns(low=pl.lit(7), high=pl.lit(8))
    got = cut(rows, edges((1, 5)))
    assert got.select("va", "bytes", "low", "high").rows() == [(0, 5, 7, 8), (5, 5, 7, 8)]
