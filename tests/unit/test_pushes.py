"""Copies put together into pushes: by hand, from a known truth, and on a real export by plain SQL."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing

import exports
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

import nsan
from nsan.analysis.driver.pushes import PUSHES, pushes, with_push_id
from nsan.schema import MIGRATIONS
from nsan.units import KIB, MIB

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 30
REAL = exports.REPOSITORY / "sample_data" / "um_vector_add_rtx4060l.sqlite"
BLOCK = 2 * MIB
CAUSES = {1: "user", 2: "coherence", 3: "prefetch", 4: "eviction"}


def copy(
    start, end, va, size=4 * KIB, *, direction="htod", cause=2, pid=1, device=0, sequence=None
):
    return {
        "start_ns": start,
        "end_ns": end,
        "pid": pid,
        "device_id": device,
        "va": va,
        "bytes": size,
        "direction": direction,
        "cause": CAUSES.get(cause),
        "cause_id": cause,
        "src_device_id": None,
        "dst_device_id": None,
        "sequence": sequence,
    }


def migrations(*rows):
    return pl.LazyFrame(list(rows), schema=MIGRATIONS.schema)


def starts_of(found):
    """The pushes as lists of the starts of their copies."""
    groups = found.group_by("push_id", maintain_order=True).agg("start_ns")
    return groups.sort("push_id")["start_ns"].to_list()


def chained(*rows):
    return starts_of(with_push_id(migrations(*rows)).collect())


# Worked examples. ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gap", "pushed"), [(0, [[0, 100]]), (1, [[0, 101]]), (2, [[0], [102]]), (1200, [[0], [1300]])]
)
def test_a_copy_goes_on_with_a_push_if_it_starts_at_its_end_or_one_ns_later(gap, pushed):
    start = 100 + gap
    assert chained(copy(0, 100, 0), copy(start, start + 50, 4 * KIB)) == pushed


def test_copies_that_overlap_in_time_are_not_chained():
    assert chained(copy(0, 100, 0), copy(99, 150, 4 * KIB)) == [[0], [99]]


@pytest.mark.parametrize(
    "other",
    [
        {"va": BLOCK},
        {"direction": "dtoh"},
        {"device": 1},
        {"device": None},
        {"pid": 2},
        {"pid": None},
    ],
)
def test_another_block_direction_gpu_or_process_is_another_push(other):
    second = {"start": 101, "end": 150, "va": 4 * KIB} | other
    assert sorted(chained(copy(0, 100, 0), copy(**second))) == [[0], [101]]


def test_a_null_process_and_gpu_are_values_of_their_own():
    rows = [
        copy(start, start + 100, va, pid=pid, device=device)
        for start, va in ((0, 0), (101, 4 * KIB))
        for pid in (None, 1)
        for device in (None, 0)
    ]
    found = with_push_id(migrations(*rows)).collect()
    groups = found.group_by("push_id").agg(
        pl.col("pid").n_unique(), pl.col("device_id").n_unique(), pl.len()
    )
    assert groups.sort("push_id").rows() == [(i, 1, 1, 2) for i in range(4)]


def test_the_last_byte_of_a_block_and_the_first_of_the_next_are_in_two_pushes():
    assert chained(copy(0, 100, BLOCK - 4 * KIB), copy(101, 200, BLOCK)) == [[0], [101]]


def test_addresses_within_a_push_may_go_down():
    assert chained(copy(0, 100, 64 * KIB), copy(101, 200, 0)) == [[0, 101]]


def test_an_eviction_beside_the_copies_that_it_makes_room_for_breaks_no_chain():
    into = [copy(0, 100, 0), copy(101, 200, 4 * KIB), copy(201, 300, 8 * KIB)]
    out = [
        copy(start, end, 9 * BLOCK + start, direction="dtoh", cause=4)
        for start, end in ((50, 120), (121, 250))
    ]
    assert chained(*into, *out) == [[0, 101, 201], [50, 121]]


def test_a_push_counts_its_bytes_by_cause():
    rows = [
        copy(0, 10, 8 * KIB, 4 * KIB, cause=2),
        copy(10, 20, 12 * KIB, 52 * KIB, cause=3),
        copy(21, 30, 0, 8 * KIB, cause=2),
        copy(500, 600, 5 * BLOCK, 2 * MIB, cause=1),
        copy(601, 700, 7 * BLOCK, 1 * MIB, direction="dtoh", cause=4),
        copy(701, 800, 7 * BLOCK + MIB, 64 * KIB, direction="dtoh", cause=None),
    ]
    got = pushes(migrations(*rows)).collect()
    assert got.schema == PUSHES.schema
    assert got.rows() == [
        (1, 0, 0, "htod", 0, 0, 30, 3, 0, 64 * KIB, 12 * KIB, 52 * KIB, 0, 0),
        (1, 0, 1, "htod", 5, 500, 600, 1, 5 * BLOCK, 2 * MIB, 0, 0, 0, 2 * MIB),
        (1, 0, 2, "dtoh", 7, 601, 800, 2, 7 * BLOCK, MIB + 64 * KIB, 0, 0, MIB, 0),
    ]


def test_pushes_are_numbered_by_process_gpu_and_start():
    rows = [
        copy(start, start + 5, 0, pid=pid, device=device)
        for pid, device, start in ((2, 0, 10), (1, 1, 20), (1, 0, 40), (1, 0, 30), (None, 0, 90))
    ]
    got = pushes(migrations(*rows)).collect()
    assert got.select("push_id", "pid", "device_id", "start_ns").rows() == [
        (0, None, 0, 90),
        (1, 1, 0, 30),
        (2, 1, 0, 40),
        (3, 1, 1, 20),
        (4, 2, 0, 10),
    ]


def test_a_row_without_a_start_or_an_address_is_left_out():
    rows = [copy(0, 100, 0), copy(None, 100, 0), copy(0, 100, None), copy(101, 150, 4 * KIB)]
    assert chained(*rows) == [[0, 101]]
    assert pushes(migrations(*rows)).collect()["bytes"].to_list() == [8 * KIB]


def test_a_copy_without_an_end_ends_its_push():
    assert chained(copy(0, None, 0), copy(101, 150, 4 * KIB)) == [[0], [101]]


def test_where_starts_are_rounded_the_rank_and_the_address_chain():
    # nvprof prints 1.13442s: 10 us steps; neighbours in rank and address belong together.
    rows = [
        copy(10_000, 17_744, 0, 56 * KIB, sequence=5),
        copy(10_000, 13_264, 56 * KIB, 8 * KIB, sequence=6),
        copy(20_000, 23_000, 64 * KIB, 64 * KIB, sequence=7),
        copy(20_000, 23_000, 256 * KIB, 64 * KIB, sequence=8),  # another address
        copy(20_000, 23_000, 320 * KIB, 64 * KIB, sequence=10),  # another event between
    ]
    found = with_push_id(migrations(*rows)).collect()
    groups = found.group_by("push_id").agg("sequence").sort("push_id")["sequence"].to_list()
    assert [sorted(group) for group in groups] == [[5, 6, 7], [8], [10]]


def test_no_copy_no_push():
    assert pushes(MIGRATIONS.empty()).collect().schema == PUSHES.schema
    assert pushes(MIGRATIONS.empty()).collect().is_empty()
    assert with_push_id(MIGRATIONS.empty()).collect().is_empty()


# Pushes that are known because they were made. ----------------------------------------------------

LANES = [(1, 0), (1, 1), (2, 0), (None, 0), (1, None)]


@st.composite
def made(draw):
    """Copies of several lanes, each with the number of its push."""
    rows, truth = [], 0
    for pid, device in LANES:
        for direction in ("htod", "dtoh", "dtod"):
            at = draw(st.integers(0, 6))
            for _ in range(draw(st.integers(0, 3))):
                block = draw(st.integers(0, 2))
                truth += 1
                for _ in range(draw(st.integers(1, 3))):
                    end = at + draw(st.integers(1, 4))
                    va = block * BLOCK + 4 * KIB * draw(st.integers(0, 511))
                    cause = draw(st.sampled_from([1, 2, 3, 4, None]))
                    row = copy(
                        at, end, va, direction=direction, cause=cause, pid=pid, device=device
                    )
                    rows.append((row, truth))
                    at = end + draw(st.sampled_from([0, 1]))
                at += draw(st.integers(2, 5))
    return draw(st.permutations(rows))


@settings(max_examples=N)
@given(made())
def test_made_pushes_are_found_again_in_any_order_of_the_rows(rows):
    truth = pl.Series("truth", [number for _, number in rows], dtype=pl.Int64)
    given_rows = migrations(*(row for row, _ in rows)).collect().with_columns(truth)
    found = with_push_id(given_rows.lazy()).collect()
    assert found.height == len(rows)
    pairs = found.select("truth", "push_id").unique()
    assert pairs["truth"].n_unique() == pairs["push_id"].n_unique() == pairs.height
    table = pushes(given_rows.drop("truth").lazy()).collect()
    assert_frame_equal(pushes(given_rows.drop("truth").reverse().lazy()).collect(), table)
    assert table["push_id"].to_list() == list(range(table.height))
    assert table["bytes"].sum() == given_rows["bytes"].sum()
    for name, cause in (
        ("coherence_bytes", 2),
        ("prefetch_bytes", 3),
        ("eviction_bytes", 4),
        ("user_bytes", 1),
    ):
        mine = given_rows.filter(pl.col("cause_id") == cause)["bytes"].sum()
        assert table[name].sum() == mine
    ordered = table.select("pid", "device_id", "start_ns")
    assert_frame_equal(ordered, ordered.sort("pid", "device_id", "start_ns"))


# The real export. ---------------------------------------------------------------------------------

RUNS = """
WITH copies AS (
  SELECT *, virtualAddress / 2097152 AS block,
         LAG(end) OVER (PARTITION BY copyKind ORDER BY start) AS before,
         LAG(virtualAddress / 2097152) OVER (PARTITION BY copyKind ORDER BY start) AS last_block
  FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind IN (11, 12)
), numbered AS (
  SELECT *, SUM(CASE WHEN start - before BETWEEN 0 AND 1 AND block = last_block THEN 0 ELSE 1 END)
            OVER (PARTITION BY copyKind ORDER BY start) AS push
  FROM copies
)
SELECT copyKind, block, MIN(start), MAX(end), COUNT(*), MIN(virtualAddress), SUM(bytes),
       SUM(CASE WHEN migrationCause = 2 THEN bytes ELSE 0 END),
       SUM(CASE WHEN migrationCause = 3 THEN bytes ELSE 0 END)
FROM numbered GROUP BY copyKind, push ORDER BY MIN(start)
"""
"""Pushes by window functions of SQLite, from the file itself."""


@pytest.fixture(scope="module")
def real_pushes():
    return pushes(nsan.open_trace(REAL).migrations).collect()


@pytest.fixture(scope="module")
def sql_pushes():
    with closing(sqlite3.connect(f"{REAL.as_uri()}?mode=ro", uri=True)) as database:
        return database.execute(RUNS).fetchall()


def test_a_real_export_has_the_pushes_that_plain_sql_finds(real_pushes, sql_pushes):
    # The loader moves times to the session start: compare them from the first copy on.
    first, first_sql = real_pushes["start_ns"].min(), sql_pushes[0][2]
    got = real_pushes.sort("start_ns").select(
        pl.col("direction").cast(pl.String).replace_strict({"htod": 11, "dtoh": 12}),
        pl.col("va_block").cast(pl.Int64),
        pl.col("start_ns", "end_ns") - first,
        "n_migrations",
        pl.col("va").cast(pl.Int64),
        "bytes",
        "coherence_bytes",
        "prefetch_bytes",
    )
    assert got.rows() == [
        (kind, block, start - first_sql, end - first_sql, *rest)
        for kind, block, start, end, *rest in sql_pushes
    ]


def test_a_real_export_has_24_pushes_to_the_gpu_and_12_back(real_pushes, sql_pushes):
    assert real_pushes.group_by("direction").len().sort("direction").rows() == [
        ("htod", 24),
        ("dtoh", 12),
    ]
    assert [kind for kind, *_ in sql_pushes].count(11) == 24
    assert [kind for kind, *_ in sql_pushes].count(12) == 12


def test_each_block_of_a_real_export_comes_in_six_pushes_that_grow(real_pushes, sql_pushes):
    signature = [64 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB]
    by_block = real_pushes.sort("start_ns").group_by("direction", "va_block").agg("bytes")
    assert by_block["bytes"].to_list() == [signature] * 6  # four blocks in, two of them out
    by_sql = {}
    for kind, block, _, _, _, _, size, _, _ in sql_pushes:
        by_sql.setdefault((kind, block), []).append(size)
    assert list(by_sql.values()) == [signature] * 6
    # Each push: one page that faulted, the rest by the prefetcher.
    assert set(real_pushes["coherence_bytes"]) == {4 * KIB}
    assert real_pushes["n_migrations"].to_list() == [2] * 36
