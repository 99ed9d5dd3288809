"""Driver batches: against the truth of modelled runs, by hand, without fault rows, and on real logs."""

from __future__ import annotations

import gzip
import itertools
import os
import re
import sqlite3
from collections import Counter
from contextlib import closing
from functools import cache

import exports
import polars as pl
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from polars.testing import assert_frame_equal
from programs import programs, run_to_end

import nsan
from nsan.analysis.driver.batches import BATCHES, batches, with_batch_id
from nsan.analysis.driver.fault_rows import fault_row_checks
from nsan.analysis.driver.pushes import with_push_id
from nsan.model.machine import run
from nsan.model.making import oversubscribed, peak_bytes
from nsan.model.profiles import HOSTS
from nsan.model.recording import record
from nsan.model.samples import SAMPLES
from nsan.model.settings import Settings
from nsan.model.size import Size
from nsan.model.truth import TRUTH_TABLES
from nsan.model.workloads import workload
from nsan.schema import GPU_FAULTS, MIGRATIONS
from nsan.units import KIB, MIB

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 15
FOLDER = exports.REPOSITORY / "sample_data"
A = 1 << 40
PAGE, BLOCK = 4 * KIB, 2 * MIB
CAUSES = {1: "user", 2: "coherence", 3: "prefetch", 4: "eviction"}


# Frames by hand. ----------------------------------------------------------------------------------


def fault(start, end, va=A, count=1, *, pid=1, device=0):
    return {
        "start_ns": start,
        "end_ns": end,
        "pid": pid,
        "device_id": device,
        "va": va,
        "n_page_faults": count,
        "access": "read",
        "access_id": 1,
    }


def copy(start, end, va=A, size=PAGE, *, way="htod", cause=2, pid=1, device=0, source=None):
    return {
        "start_ns": start,
        "end_ns": end,
        "pid": pid,
        "device_id": device,
        "va": va,
        "bytes": size,
        "direction": way,
        "cause": CAUSES[cause],
        "cause_id": cause,
        "src_device_id": source,
    }


def frame(table, rows):
    return pl.LazyFrame(list(rows), schema=table.schema)


def found(faults, copies):
    return batches(frame(GPU_FAULTS, faults), frame(MIGRATIONS, copies)).collect()


def places(faults, copies):
    """The batch of each copy, by its start."""
    got = with_batch_id(frame(GPU_FAULTS, faults), frame(MIGRATIONS, copies)).collect()
    return dict(got.select("start_ns", "batch_id").rows())


def ordinary(n, *, pid=1, device=0, after=0):
    """Batches with one copy each: raised, 2 us later a copy of 1 us, 2.4 us later the replay."""
    times = [after + 10_000 * i for i in range(n)]
    pages = [A + i * PAGE for i in range(n)]
    faults = [
        fault(t, t + 5_400, va, pid=pid, device=device) for t, va in zip(times, pages, strict=True)
    ]
    copies = [
        copy(t + 2_000, t + 3_000, va, pid=pid, device=device)
        for t, va in zip(times, pages, strict=True)
    ]
    return faults, copies


def test_latency_counts_from_the_fault_and_service_from_the_end_before():
    # The second fault is raised during the first batch, the third one after the second batch.
    faults = [fault(100, 1_100), fault(900, 2_000, A + PAGE), fault(5_000, 5_700, A + 2 * PAGE)]
    copies = [
        copy(500, 600),
        copy(1_500, 1_600, A + PAGE),
        copy(5_100, 5_200, A + 2 * PAGE),
    ]
    got = found(faults, copies)
    assert got.schema == BATCHES.schema
    assert got["latency_ns"].to_list() == [1_000, 1_100, 700]
    assert got["service_ns"].to_list() == [1_000, 2_000 - 1_100, 700]
    assert got["first_copy_ns"].to_list() == [500, 1_500, 5_100]
    assert got["last_copy_ns"].to_list() == [600, 1_600, 5_200]
    assert got["kind"].to_list() == ["derived"] * 3
    assert got["batch_id"].to_list() == [0, 1, 2]


def test_a_copy_before_the_next_fault_is_raised_is_of_the_batch_that_ends_next():
    # The second fault is raised at 900, before the copy of the first batch at 950.
    faults = [fault(100, 1_100), fault(900, 2_000, A + BLOCK)]
    copies = [copy(500, 600), copy(950, 1_000, A + PAGE), copy(1_200, 1_300, A + BLOCK)]
    assert places(faults, copies) == {500: 0, 950: 0, 1_200: 1}


def test_a_batch_adds_up_its_copies_by_cause():
    faults = [fault(0, 90_000, A + 3 * PAGE, 7)]
    copies = [
        copy(1_000, 2_000, A + 3 * PAGE, PAGE),
        copy(2_001, 3_000, A + 4 * PAGE, 12 * PAGE, cause=3),
        copy(3_001, 4_000, A + 16 * PAGE, 2 * PAGE),
        copy(5_000, 9_000, A + 8 * BLOCK, BLOCK, way="dtoh", cause=4),
        copy(10_000, 11_000, A + BLOCK, 5 * PAGE),
    ]
    row = found(faults, copies).row(0, named=True)
    assert row["bytes"] == (1 + 12 + 2 + 5) * PAGE
    assert row["coherence_bytes"] == (1 + 2 + 5) * PAGE
    assert row["prefetch_bytes"] == 12 * PAGE
    assert row["evicted_bytes"] == BLOCK
    assert row["n_pushes"] == 2
    assert row["n_va_blocks"] == 2
    assert row["n_faulted_pages"] == 8
    assert row["n_faults_lower_bound"] == 7 + 7  # seven on its own page, one or more on the others
    assert row["va"] == A + 3 * PAGE
    assert row["access"] == "read"
    assert row["page_bytes"] == PAGE


@pytest.mark.parametrize(
    ("count", "n_pages", "holds_own", "bound", "full"),
    [
        (230, 1, True, 230, False),  # 0.9 x 256 = 230.4
        (231, 1, True, 231, True),
        (200, 31, True, 230, False),  # the page of the row, and 30 others
        (199, 33, True, 231, True),
        (200, 31, False, 231, True),  # its page was there already: all 31 are others
        (256, 0, True, 256, True),
        (1, 0, True, 1, False),
    ],
)
def test_a_batch_is_full_if_it_holds_nine_tenths_of_256_for_certain(
    count, n_pages, holds_own, bound, full
):
    first = A if holds_own else A + PAGE
    copies = [copy(1_000, 2_000, first, n_pages * PAGE)] if n_pages else []
    row = found([fault(0, 9_000, A, count)], copies).row(0, named=True)
    assert row["n_faults_lower_bound"] == bound
    assert row["is_full"] is full


def test_a_page_that_never_came_is_touched_first():
    got = found([fault(0, 500, A + 7 * BLOCK)], [])
    assert got["outcome"].to_list() == ["first_touch"]
    assert got["bytes"].to_list() == [0]
    assert got["kind"].to_list() == ["derived"]


@pytest.mark.parametrize("cause", [1, 2, 3])
def test_a_page_that_came_and_is_still_there_is_stale(cause):
    faults = [fault(0, 10_000, A + BLOCK), fault(20_000, 21_000, A + PAGE)]
    copies = [
        copy(1_000, 2_000, A, 4 * PAGE, cause=cause),
        copy(5_000, 6_000, A + BLOCK),
    ]
    assert found(faults, copies)["outcome"].to_list() == ["data", "stale"]


def test_a_page_beside_what_came_is_touched_first():
    faults = [fault(0, 10_000, A), fault(20_000, 21_000, A + 4 * PAGE)]
    assert found(faults, [copy(1_000, 2_000, A, 4 * PAGE)])["outcome"].to_list() == [
        "data",
        "first_touch",
    ]


@pytest.mark.parametrize("cause", [1, 2, 4])
def test_a_page_that_came_and_left_is_unknown(cause):
    faults = [fault(0, 10_000), fault(40_000, 41_000)]
    copies = [copy(1_000, 2_000), copy(30_000, 31_000, way="dtoh", cause=cause)]
    assert found(faults, copies)["outcome"].to_list() == ["data", "unknown"]


def test_a_page_that_another_gpu_took_has_left():
    faults = [fault(0, 10_000), fault(20_000, 30_000, device=1), fault(40_000, 41_000)]
    copies = [copy(1_000, 2_000), copy(21_000, 22_000, way="dtod", device=1, source=0)]
    got = found(faults, copies)
    assert got.select("device_id", "outcome").rows() == [(0, "data"), (0, "unknown"), (1, "data")]


def test_a_page_that_came_to_another_gpu_only_is_touched_first():
    faults = [fault(0, 10_000), fault(40_000, 41_000, device=1)]
    assert found(faults, [copy(1_000, 2_000)])["outcome"].to_list() == ["data", "first_touch"]


@pytest.mark.parametrize(
    ("second", "outcome"),
    [
        (fault(1_100, 2_000, A, 5), "throttled"),  # 100 ns after the replay
        (fault(1_101, 2_000, A, 5), "first_touch"),
        (fault(1_050, 2_000, A, 4), "first_touch"),  # another count
        (fault(1_050, 2_000, A + PAGE, 5), "first_touch"),
        (fault(1_050, 2_000, A, 5, pid=2), "first_touch"),
        (fault(1_050, 2_000, A, 5, device=1), "first_touch"),
    ],
)
def test_the_same_fault_at_once_after_the_replay_is_throttled(second, outcome):
    assert found([fault(0, 1_000, A, 5), second], [])["outcome"].to_list() == [outcome] * 2


def test_the_batch_that_moves_the_page_after_the_spins_moved_data():
    faults = [fault(0, 1_000, A, 5), fault(1_050, 2_000, A, 5), fault(2_050, 9_000, A, 5)]
    assert found(faults, [copy(3_000, 4_000)])["outcome"].to_list() == [
        "throttled",
        "throttled",
        "data",
    ]


def test_a_copy_outside_of_all_rows_makes_a_batch_of_its_own():
    faults, copies = ordinary(30)
    lost = [copy(400_000, 401_000, A + BLOCK), copy(401_001, 402_000, A + BLOCK + PAGE, cause=3)]
    got = found(faults, copies + lost)
    assert got["kind"].to_list() == ["derived"] * 30 + ["reconstructed"]
    row = got.row(30, named=True)
    assert (row["end_ns"], row["bytes"], row["n_pushes"]) == (402_000, 2 * PAGE, 1)
    assert row["va"] == A + BLOCK
    assert [
        row[c] for c in ("start_ns", "latency_ns", "service_ns", "n_page_faults", "access")
    ] == [None] * 5
    assert places(faults, copies + lost)[400_000] == 30


def test_a_lost_row_in_the_middle_takes_nothing_from_its_neighbours():
    faults, copies = ordinary(40)
    got = found(faults[:20] + faults[21:], copies)
    assert got.group_by("kind").len().sort("kind").rows() == [("derived", 39), ("reconstructed", 1)]
    assert got["bytes"].to_list() == [PAGE] * 40
    assert got.row(20, named=True)["end_ns"] == copies[20]["end_ns"]


def test_a_copy_that_is_not_over_at_the_replay_is_of_another_batch():
    faults, copies = ordinary(30)
    across = copy(4_000, 5_401, A + BLOCK)
    got = found(faults, [*copies, across])
    assert got.filter(pl.col("kind") == "reconstructed")["end_ns"].to_list() == [5_401]
    assert places(faults, [*copies, copy(4_000, 5_400, A + BLOCK)])[4_000] == 0


def test_an_eviction_is_of_the_batch_that_needed_room():
    faults = [fault(100, 10_000), fault(9_000, 30_000, A + BLOCK)]
    copies = [
        copy(1_000, 2_000),
        copy(12_000, 15_000, A + 9 * BLOCK, BLOCK, way="dtoh", cause=4),
        copy(20_000, 21_000, A + BLOCK),
    ]
    assert found(faults, copies)["evicted_bytes"].to_list() == [0, BLOCK]
    assert places(faults, copies) == {1_000: 0, 12_000: 1, 20_000: 1}


def test_without_rows_an_eviction_is_of_the_batch_that_comes_next():
    copies = [
        copy(1_000, 2_000, A + BLOCK),
        copy(60_000, 90_000, A + 9 * BLOCK, BLOCK, way="dtoh", cause=4),
        copy(120_000, 121_000, A),  # descends: a new batch
        copy(500_000, 510_000, A + 8 * BLOCK, PAGE, way="dtoh", cause=4),  # room for nothing
    ]
    got = found([], copies)
    assert got["evicted_bytes"].to_list() == [0, BLOCK]
    assert places([], copies) == {1_000: 0, 60_000: 1, 120_000: 1, 500_000: None}


def test_copies_for_the_cpu_and_for_the_program_are_of_no_batch():
    faults, copies = ordinary(3)
    others = [
        copy(2_500, 2_600, A + BLOCK, BLOCK, cause=1),
        copy(12_500, 12_600, A, PAGE, way="dtoh", cause=2),
        copy(22_500, 22_600, A + BLOCK, BLOCK, way="dtoh", cause=1),
    ]
    got = found(faults, copies + others)
    assert got["bytes"].to_list() == [PAGE] * 3
    assert got["evicted_bytes"].to_list() == [0] * 3
    where = places(faults, copies + others)
    assert [where[row["start_ns"]] for row in others] == [None] * 3


# Without peer access a page goes from GPU 1 to the CPU, and at once on to GPU 0. --------------------

STAGED = [
    copy(1_000, 2_000, A, 4 * PAGE, way="dtoh", device=1),
    copy(4_600, 5_600, A, 4 * PAGE),
]
BEFORE = [copy(100, 200, A, 4 * PAGE, device=1)]
"""How the page came to GPU 1."""
ROWS = [fault(0, 400, device=1), fault(500, 8_000)]


def test_the_first_leg_of_a_staged_copy_is_of_the_batch_that_asked_for_it():
    got = found(ROWS, BEFORE + STAGED)
    assert got.select("device_id", "bytes").rows() == [(0, 4 * PAGE), (1, 4 * PAGE)]
    assert places(ROWS, BEFORE + STAGED) == {100: 1, 1_000: 0, 4_600: 0}


def test_the_first_leg_of_a_staged_copy_made_no_room():
    assert found(ROWS, BEFORE + STAGED)["evicted_bytes"].to_list() == [0, 0]


@pytest.mark.parametrize(
    "onward",
    [
        copy(30_000, 31_000, A, 4 * PAGE),  # long after
        copy(4_600, 5_600, A + PAGE, 4 * PAGE),  # another page
        copy(4_600, 5_600, A, 4 * PAGE, device=1),  # back to where it was
        copy(4_600, 5_600, A, 4 * PAGE, pid=2),
        copy(4_600, 5_600, A, 4 * PAGE, cause=1),
    ],
)
def test_what_goes_to_the_cpu_and_not_on_is_of_no_batch(onward):
    # GPU 0 has another copy, so that there are two GPUs.
    faults = [*ROWS, fault(200_000, 210_000, A + BLOCK)]
    copies = [*BEFORE, STAGED[0], onward, copy(201_000, 202_000, A + BLOCK)]
    assert places(faults, copies)[1_000] is None


# Laws of any input. -------------------------------------------------------------------------------


def test_two_processes_on_one_gpu_do_not_mix():
    mine, theirs = ordinary(12), ordinary(12, pid=2, after=700)
    both = found(mine[0] + theirs[0], mine[1] + theirs[1])
    for pid, (faults, copies) in ((1, mine), (2, theirs)):
        alone = found(faults, copies).drop("batch_id")
        assert_frame_equal(both.filter(pl.col("pid") == pid).drop("batch_id"), alone)
    assert both["batch_id"].to_list() == list(range(24))
    got = with_batch_id(
        frame(GPU_FAULTS, mine[0] + theirs[0]), frame(MIGRATIONS, mine[1] + theirs[1])
    ).collect()
    assert (got.filter(pl.col("pid") == 1)["batch_id"] < 12).all()
    assert (got.filter(pl.col("pid") == 2)["batch_id"] >= 12).all()


def test_a_process_without_fault_rows_is_reconstructed_beside_one_that_has_them():
    mine, theirs = ordinary(12), ordinary(12, pid=2, after=700)
    both = found(mine[0], mine[1] + theirs[1])
    assert set(both.filter(pl.col("pid") == 1)["kind"]) == {"derived"}
    assert set(both.filter(pl.col("pid") == 2)["kind"]) == {"reconstructed"}


@pytest.mark.parametrize(("pid", "device"), [(None, 0), (1, None), (None, None)])
def test_a_null_process_or_gpu_is_a_value_of_its_own(pid, device):
    faults, copies = ordinary(5, pid=pid, device=device)
    got = found(faults, copies)
    assert got["kind"].to_list() == ["derived"] * 5
    assert got["bytes"].to_list() == [PAGE] * 5


def test_rows_without_an_end_or_an_address_are_left_out():
    faults, copies = ordinary(3)
    useless = [fault(0, None), fault(0, 5_000, None)]
    useless_copies = [copy(None, 5, A), copy(2_500, 2_600, None)]
    assert_frame_equal(found(faults + useless, copies + useless_copies), found(faults, copies))


def test_no_input_no_batch():
    assert found([], []).is_empty()
    assert found([], []).schema == BATCHES.schema
    got = with_batch_id(GPU_FAULTS.empty(), MIGRATIONS.empty())
    assert got.collect().schema == got.collect_schema()
    assert got.collect().is_empty()
    assert {"batch_id", "push_id", "va_block"} <= set(got.collect_schema())


@pytest.mark.parametrize("name", ["stream", "ping_pong", "two_gpus"])
@pytest.mark.parametrize("with_rows", [True, False])
def test_the_order_of_the_rows_changes_nothing(name, with_rows):
    trace = sample(name)
    faults = trace.gpu_faults.collect() if with_rows else GPU_FAULTS.empty().collect()
    copies = trace.migrations.collect()
    mixed = [each.sample(fraction=1, shuffle=True, seed=3).lazy() for each in (faults, copies)]
    assert_frame_equal(batches(*mixed).collect(), batches(faults.lazy(), copies.lazy()).collect())
    keys = ["pid", "device_id", "start_ns", "va", "direction"]
    got = [
        with_batch_id(*each).collect().sort(keys)
        for each in (mixed, (faults.lazy(), copies.lazy()))
    ]
    assert_frame_equal(*got)


# Against the truth of the modelled samples. -------------------------------------------------------


@cache
def sample(name):
    return nsan.open_trace(FOLDER / "model" / name / f"{name}.sqlite")


def truth(name, table):
    return pl.read_parquet(FOLDER / "model" / name / "truth" / f"{table}.parquet")


@cache
def judged(name):
    """Each copy of a sample with its batch and its true batch, both by GPU and end."""
    trace = sample(name)
    ends = batches(trace.gpu_faults, trace.migrations).collect().select("batch_id", "end_ns")
    got = with_batch_id(trace.gpu_faults, trace.migrations).collect()
    assert got.height == trace.migrations.collect().height
    true_ends = truth(name, "batches").select(
        pl.col("batch").cast(pl.Int64), true_end="end_ns", true_device="device_id"
    )
    true = truth(name, "copy_batches").with_columns(pl.col("batch").cast(pl.Int64))
    keys = ["start_ns", "va", "bytes"]
    assert not true.select(keys).is_duplicated().any()
    joined = (
        got.drop("end_ns")
        .join(ends, on="batch_id", how="left")
        .join(true, on=keys, how="inner", validate="1:1")
        .join(true_ends, on="batch", how="left")
    )
    assert joined.height == got.height == true.height
    return joined


ALLOWED = {
    "data": {"data"},
    "first_touch": {"first_touch"},
    "stale": {"stale"},
    "throttled": {"throttled"},
    "remote_map": {"first_touch", "unknown"},
    "invalidation": {"stale"},
}
"""What the rows can tell of each true outcome: a remote map moves nothing and leaves no row."""


@pytest.mark.parametrize("name", SAMPLES)
def test_each_copy_of_a_sample_is_in_its_true_batch(name):
    copies = judged(name)
    wrong = copies.filter(pl.col("end_ns").ne_missing(pl.col("true_end")))
    assert wrong.is_empty()


@pytest.mark.parametrize("name", SAMPLES)
def test_the_batches_of_a_sample_are_the_true_ones(name):
    trace = sample(name)
    got = batches(trace.gpu_faults, trace.migrations).collect()
    true = truth(name, "batches")
    assert got.height == true.height
    both = got.join(true, on=["device_id", "end_ns"], validate="1:1", suffix="_true")
    assert both.height == true.height
    assert set(got["kind"]) <= {"derived"}
    # (1) what the row says, (2) what its copies say, (3) bounds
    assert (both["start_ns"] == both["raised_ns"]).all()
    assert (both["va"] == both["va_true"]).all()
    assert (both["n_page_faults"] == both["n_page_faults_true"]).all()
    assert (both["n_faults_lower_bound"] <= both["n_entries"]).all()
    assert (both["n_faulted_pages"] <= both["n_pages"]).all()
    assert (both["n_va_blocks"] <= both["n_blocks"]).all()
    assert (both.filter("is_full")["n_entries"] >= 231).all()
    outcomes = set(both.select("outcome_true", "outcome").unique().rows())
    assert all(seen in ALLOWED[real] for real, seen in outcomes)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_bytes_of_a_sample_are_those_of_its_true_batches(name):
    into, size = pl.col("direction") != "dtoh", pl.col("bytes")
    true = (
        judged(name)
        .filter(pl.col("batch").is_not_null())
        .group_by(device_id=pl.col("true_device").cast(pl.Int64), end_ns="true_end")
        .agg(
            bytes=size.filter(into).sum(),
            coherence_bytes=size.filter(into, pl.col("cause_id") == 2).sum(),
            prefetch_bytes=size.filter(into, pl.col("cause_id") == 3).sum(),
            evicted_bytes=size.filter(pl.col("cause_id") == 4).sum(),
        )
        .sort("device_id", "end_ns")
    )
    trace = sample(name)
    got = batches(trace.gpu_faults, trace.migrations).collect().sort("device_id", "end_ns")
    moved = got.filter((pl.col("bytes") > 0) | (pl.col("evicted_bytes") > 0))
    assert_frame_equal(moved.select(true.columns), true)


SUMS = """
SELECT COALESCE(SUM(CASE WHEN copyKind IN (11, 13) AND migrationCause IN (2, 3) THEN bytes END), 0),
       COALESCE(SUM(CASE WHEN copyKind IN (11, 13) AND migrationCause = 2 THEN bytes END), 0),
       COALESCE(SUM(CASE WHEN migrationCause = 4 THEN bytes END), 0)
FROM CUPTI_ACTIVITY_KIND_MEMCPY
"""


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("with_rows", [True, False])
def test_all_bytes_that_faults_moved_are_in_some_batch(name, with_rows):
    file = FOLDER / "model" / name / f"{name}.sqlite"
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as database:
        ((into, faulted, evicted),) = database.execute(SUMS)
    trace = sample(name)
    faults = trace.gpu_faults if with_rows else GPU_FAULTS.empty()
    got = batches(faults, trace.migrations).collect()
    assert got["bytes"].sum() == into
    assert got["coherence_bytes"].sum() == faulted
    assert got["evicted_bytes"].sum() == evicted


# Without fault rows. ------------------------------------------------------------------------------


def score(happened, machine, tables):
    """Compare batches from copies alone with the truth.

    Counts of pairs of pushes put together rightly, put together, and in one true batch; of
    boundaries between two pushes that are false, missed, and of transitions from push to push.
    """
    true = TRUTH_TABLES["copy_batches"].build(happened, machine, tables)
    copies = tables["migrations"].with_columns(true=true["batch"].cast(pl.Int64))
    assert (copies["va"] == true["va"]).all()
    copies = with_push_id(copies.lazy()).select(
        "pid", "device_id", "start_ns", "va", "direction", "true"
    )
    got = with_batch_id(GPU_FAULTS.empty(), tables["migrations"].lazy())
    pushes = (
        got.join(copies, on=["pid", "device_id", "start_ns", "va", "direction"], how="left")
        .filter(pl.col("direction") != "dtoh", pl.col("batch_id").is_not_null())
        .group_by("device_id", "push_id")
        .agg(pl.col("start_ns").min(), pl.col("batch_id").first(), pl.col("true").first())
        .sort("device_id", "start_ns")
        .collect()
    )
    lanes = list(pushes.select("device_id", "batch_id", "true").iter_rows())

    def pairs(of):
        return sum(n * (n - 1) // 2 for n in Counter(map(of, lanes)).values())

    tally = Counter(
        right=pairs(lambda row: row), put=pairs(lambda r: r[:2]), wanted=pairs(lambda r: r[::2])
    )
    for (gpu, mine, real), (gpu_2, mine_2, real_2) in itertools.pairwise(lanes):
        if gpu == gpu_2:
            tally["transitions"] += 1
            tally["false"] += mine != mine_2 and real == real_2
            tally["missed"] += mine == mine_2 and real != real_2
    return tally


def f1(tally):
    return 2 * tally["right"] / max(tally["put"] + tally["wanted"], 1)


def of_sample(name):
    recipe = SAMPLES[name].recipe()
    happened = run(recipe.program, recipe.settings)
    return score(happened, recipe.settings, record(happened, recipe.settings, name))


@cache
def random_scores():
    """Tallies of random programs by the kind of machine; those that look the same count once."""
    found = {"one GPU": [], "one chunk": [], "several GPUs": []}

    @seed(1)
    @settings(
        max_examples=N,
        derandomize=False,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def collect(drawn):
        program, machine = drawn
        happened = run_to_end(program, machine).happened
        tables = record(happened, machine, "random")
        if tables["gpu_faults"].is_empty():
            return
        kind = "several GPUs" if machine.n_gpus > 1 else "one GPU"
        if machine.capacity_chunks == 1 and kind == "one GPU":
            kind = "one chunk"
        tally = score(happened, machine, tables)
        if tally not in found[kind]:
            found[kind].append(tally)

    collect()
    return found


def test_without_fault_rows_pushes_are_put_together_as_they_were():
    others = {"two_gpus", "pca_off", "pca_on"}
    samples = [of_sample(name) for name in SAMPLES if name not in others]
    total = sum([*samples, *random_scores()["one GPU"]], Counter())
    assert total["wanted"] >= 40
    assert f1(total) >= 0.95
    assert total["false"] <= 0.01 * total["transitions"]
    # In training steps small tensors come with pauses of their own.
    steps = sum([of_sample(name) for name in ("pca_off", "pca_on")], Counter())
    assert steps["wanted"] >= 1000
    assert f1(steps) >= 0.95
    assert steps["false"] <= 0.05 * steps["transitions"]


def test_without_fault_rows_a_gpu_of_one_chunk_and_several_gpus_are_less_certain():
    # One chunk: two blocks that evict each other. Several GPUs: one waits for what the other holds.
    # What is put together belongs together; some of it is cut apart.
    apart = random_scores()
    total = sum([of_sample("two_gpus"), *apart["one chunk"], *apart["several GPUs"]], Counter())
    assert total["transitions"] > 0
    assert total["put"] - total["right"] <= 0.1 * max(total["put"], 10)
    assert total["false"] <= 0.1 * total["transitions"]


OTHER_HOSTS = [
    (name, host, factor)
    for i, host in enumerate(sorted(HOSTS))
    for j, name in enumerate(("stride", "chase"))
    for factor in [(None, 1.25, 2.0)[(i + j) % 3]]
]


def test_without_fault_rows_other_hosts_and_little_memory_are_told_nearly_as_well():
    # Measured on 11 workloads, 5 hosts and 3 sizes of memory: F1 0.965, false boundaries 2.3 %; worst
    # of the hosts epyc-7713 with 0.902 and 6.7 %. What is put together belongs together.
    total = Counter()
    for name, host, factor in OTHER_HOSTS:
        program = workload(name).build(Size(16 * MIB, iterations=2))
        machine = Settings(host=host, seed=7)
        if factor:
            machine = oversubscribed(machine, peak_bytes(program), factor)
        happened = run(program, machine)
        total += score(happened, machine, record(happened, machine, name))
    assert total["wanted"] >= 500
    assert f1(total) >= 0.93
    assert total["put"] - total["right"] <= 0.01 * total["put"]
    assert total["false"] <= 0.05 * total["transitions"]


def test_a_real_export_has_12_batches_of_two_pushes():
    # 24 pushes to the GPU, by hand from the file: the n-th of each array belong together.
    file = FOLDER / "um_vector_add_rtx4060l.sqlite"
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as database:
        copies = database.execute(
            "SELECT start, end, virtualAddress, bytes FROM CUPTI_ACTIVITY_KIND_MEMCPY"
            " WHERE copyKind = 11 ORDER BY start"
        ).fetchall()
    assert len(copies) == 12 * 4  # each push: the page that faulted, and the rest
    trace = nsan.open_trace(file)
    got = batches(trace.gpu_faults, trace.migrations).collect()
    assert got["n_pushes"].to_list() == [2] * 12
    assert got["n_va_blocks"].to_list() == [2] * 12
    assert got["n_faulted_pages"].to_list() == [2] * 12
    assert set(got["kind"]) == {"reconstructed"}
    of_four = [copies[i : i + 4] for i in range(0, 48, 4)]
    shift = copies[0][0] - got["first_copy_ns"][0]
    assert got.select(
        pl.col("first_copy_ns", "last_copy_ns") + shift, pl.col("va").cast(pl.Int64), "bytes"
    ).rows() == [
        (four[0][0], four[-1][1], min(va for _, _, va, _ in four), sum(size for *_, size in four))
        for four in of_four
    ]


# The structural laws on real fault rows (nvprof, V100), read again by expressions of this test. ----

LINE = re.compile(
    r"^(?P<start>[\d.]+)(?P<unit>s|ms)\s+(?:(?P<length>[\d.]+)(?P<length_unit>s|ms|us|ns)|-)\s.*?"
    r"\s(?P<value>\S+)\s+(?P<va>0x[0-9a-f]+)\s+\[Unified Memory (?P<what>[^\]]+)\]\s*$",
    re.MULTILINE,
)
TO_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
SIZES = {"KB": KIB, "MB": MIB}
LOGS = [("1024", 20), ("8192", 867)]


@cache
def log_events(n):
    """Fault rows and copies of a log, in its order: what, va, count or bytes."""
    text = gzip.decompress((FOLDER / f"nvprof_hotspot_v100_{n}.log.gz").read_bytes()).decode()
    events = []
    for line in LINE.finditer(text):
        what, value = line["what"], line["value"]
        if what.startswith("Memcpy"):
            value = round(float(value[:-2]) * SIZES[value[-2:]] / PAGE) * PAGE
            events.append((what[-4:].lower(), int(line["va"], 16), value))
        elif what.startswith("GPU"):
            events.append(("fault", int(line["va"], 16), int(value)))
    return text, events


@cache
def log_batches(n):
    trace = nsan.open_trace(FOLDER / f"nvprof_hotspot_v100_{n}.log.gz")
    got = batches(trace.gpu_faults, trace.migrations).collect()
    return trace, got, with_batch_id(trace.gpu_faults, trace.migrations).collect()


@pytest.mark.parametrize(("n", "n_rows"), LOGS)
def test_a_real_row_is_a_batch(n, n_rows):
    text, events = log_events(n)
    assert text.count("[Unified Memory GPU page faults]") == n_rows
    faults = [(va, count) for what, va, count in events if what == "fault"]
    assert len(faults) == n_rows
    trace, got, _ = log_batches(n)
    assert trace.gpu_faults.collect().height == got.height == n_rows
    assert sorted(got.select("va", "n_page_faults").rows()) == sorted(faults)
    assert got["end_ns"].is_unique().all()
    assert got["n_page_faults"].is_between(1, 256).all()
    assert (got["service_ns"] > 0).all()
    assert (got["service_ns"] <= got["latency_ns"]).all()
    # Times of a log have few digits: what copy is of what batch is an inference.
    assert set(got["kind"]) == {"reconstructed"}
    checks = fault_row_checks(trace.gpu_faults, trace.migrations).collect()
    assert checks.select("style", "n_rows", "n_ends").rows() == [("coarse", n_rows, n_rows)]


@pytest.mark.parametrize(("n", "n_rows"), LOGS)
def test_all_bytes_of_a_real_log_are_in_its_batches(n, n_rows):
    _, events = log_events(n)
    _, got, copies = log_batches(n)
    assert got["bytes"].sum() == sum(size for what, _, size in events if what == "htod")
    to_gpu = copies.filter(pl.col("direction") == "htod")
    assert to_gpu.height == sum(what == "htod" for what, *_ in events)
    assert to_gpu["batch_id"].is_between(0, n_rows - 1).all()
    # No cause is printed: what goes to the CPU is no eviction.
    assert copies.filter(pl.col("direction") == "dtoh")["batch_id"].null_count() == sum(
        what == "dtoh" for what, *_ in events
    )
    assert set(got["evicted_bytes"]) == {0}


@pytest.mark.parametrize(("n", "n_rows"), LOGS)
def test_the_copies_of_a_real_batch_ascend(n, n_rows):
    _, _, copies = log_batches(n)
    steps = (
        copies.filter(pl.col("direction") == "htod")
        .sort("sequence")
        .select(up=(pl.col("va") > pl.col("va").shift(1)).over("batch_id"))["up"]
        .drop_nulls()
    )
    assert len(steps) > 3 * n_rows
    assert (~steps).sum() <= 0.005 * len(steps)  # starts of 0.1 ms put some into the next batch


@pytest.mark.parametrize("n", [n for n, _ in LOGS])
def test_a_real_row_without_copies_says_whether_its_page_was_there(n):
    _, events = log_events(n)
    at = [i for i, (what, *_) in enumerate(events) if what == "fault"]
    until = [*at[1:], len(events)]
    trace, got, _ = log_batches(n)
    # The rows of the log in its own order, each with what became of it.
    rows = (
        trace.gpu_faults.sort("sequence")
        .select("end_ns")
        .collect()
        .join(got, on="end_ns", how="left", maintain_order="left")
    )
    assert rows["va"].to_list() == [events[i][1] for i in at]
    names = {None: "first_touch", "htod": "stale", "dtoh": "unknown"}
    n_silent = 0
    for row, first, last in zip(rows.iter_rows(named=True), at, until, strict=True):
        if row["bytes"]:
            assert row["outcome"] == "data"
            continue
        n_silent += 1
        # While the batch is under way, the one before it may still bring the page.
        allowed = {names[last_move(events[:end], row["va"])] for end in (first, last)}
        assert row["outcome"] in allowed
    assert n_silent > 0


def last_move(events, va):
    """Which way the page at an address went last; None: it never moved."""
    return next(
        (
            what
            for what, start, size in reversed(events)
            if what != "fault" and start <= va < start + size
        ),
        None,
    )
