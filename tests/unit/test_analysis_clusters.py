"""Fault episodes and space-time clusters, against plain Python and figures worked out by hand."""

from __future__ import annotations

import itertools
import os
import random
from collections import defaultdict

import polars as pl
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from nsan.analysis.clustering.cells import labels_of
from nsan.analysis.clustering.clusters import (
    CLUSTER_CELLS,
    FAULT_CLUSTERS,
    cluster_cells,
    fault_clusters,
)
from nsan.analysis.clustering.episodes import (
    EPISODE_GAPS,
    FAULT_EPISODES,
    episode_gaps,
    fault_episodes,
)
from nsan.analysis.clustering.stretches import with_kernel_count, with_running_kernel
from nsan.errors import UsageError
from nsan.schema import GPU_FAULTS, KERNELS, MIGRATIONS

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 15
BLOCK = 2 << 20
PAGE = 4096
MS = 1_000_000


def _frame(table, rows):
    columns = table.schema
    filled = [dict.fromkeys(columns) | row for row in rows]
    return pl.LazyFrame(filled, schema=columns)


def _faults(*rows):
    plain = {
        "pid": 1,
        "device_id": 0,
        "va": 0,
        "n_page_faults": 1,
        "access": "read",
        "access_id": 1,
    }
    return _frame(GPU_FAULTS, [plain | row for row in rows])


def _copies(*rows):
    plain = {"pid": 1, "device_id": 0, "bytes": PAGE, "direction": "htod", "cause_id": 2}
    filled = [plain | row for row in rows]
    return _frame(
        MIGRATIONS, [row | {"end_ns": row.get("end_ns", row["start_ns"] + 10)} for row in filled]
    )


def _kernels(*spans, **more):
    rows = [{"pid": 1, "device_id": 0, "name": n, "start_ns": a, "end_ns": b} for n, a, b in spans]
    return _frame(KERNELS, [row | more for row in rows])


NO_FAULTS, NO_COPIES, NO_KERNELS = GPU_FAULTS.empty(), MIGRATIONS.empty(), KERNELS.empty()


def _rows_at(*starts, **more):
    return [{"start_ns": t, "end_ns": t + 10, **more} for t in starts]


def _episodes(faults, copies=NO_COPIES, kernels=NO_KERNELS, **options):
    return fault_episodes(faults, copies, kernels, **options).collect()


# Episodes -----------------------------------------------------------------------------------------


def test_the_largest_jump_between_pauses_separates_episodes():
    # Pauses 90, 100, 110 inside, 9 990 between: 9 990 / 110 is the largest ratio.
    starts = [0, 100, 210, 330, 10_330, 10_430]
    found = _episodes(_faults(*_rows_at(*starts)))
    assert found.select("start_ns", "end_ns", "n_fault_rows").rows() == [
        (0, 340, 4),
        (10_330, 10_440, 2),
    ]
    assert 110 <= found["gap_ns"][0] < 9_990


def test_without_a_knee_there_is_one_episode():
    # Each pause is at most 3 times the one before it.
    found = _episodes(_faults(*_rows_at(0, 110, 300, 700)))
    assert found["n_fault_rows"].to_list() == [4]


def test_a_given_gap_is_inclusive():
    # Pauses of exactly 90 and 91.
    rows = _faults(*_rows_at(0, 100, 201))
    assert _episodes(rows, gap_ns=90)["n_fault_rows"].to_list() == [2, 1]
    assert _episodes(rows, gap_ns=91)["n_fault_rows"].to_list() == [3]


def test_a_long_row_covers_the_pause_of_a_short_one_inside_it():
    rows = _faults(
        {"start_ns": 0, "end_ns": 1_000}, {"start_ns": 10, "end_ns": 20}, *_rows_at(1_050)
    )
    assert _episodes(rows, gap_ns=60)["n_fault_rows"].to_list() == [3]


def test_an_episode_says_what_moved_in_it_and_what_moved_in_none_is_told_apart():
    rows = _faults(
        {"start_ns": 0, "end_ns": 100, "access": "read"},
        {"start_ns": 100, "end_ns": 200, "access": "write"},
        {"start_ns": 5_000, "end_ns": 5_100, "access": None},
    )
    copies = _copies(
        {"start_ns": 50, "va": 0, "bytes": 2 * PAGE},
        {"start_ns": 150, "va": PAGE, "bytes": 2 * PAGE},
        {"start_ns": 160, "va": BLOCK, "bytes": 3 * PAGE, "cause_id": 3},
        {"start_ns": 5_050, "va": BLOCK, "bytes": PAGE},
        {"start_ns": 2_000, "va": 0, "bytes": 5 * PAGE},
        {"start_ns": 60, "va": 0, "bytes": 7 * PAGE, "cause_id": 1},
        {"start_ns": 60, "va": 0, "bytes": 7 * PAGE, "direction": "dtoh"},
    )
    kernels = _kernels(("a", 0, 140), ("b", 140, 5_200), ("c", 5_200, 6_000))
    found = _episodes(rows, copies, kernels, gap_ns=1_000).select(
        "episode_id", "n_fault_rows", "n_read_rows", "n_write_rows", "n_other_rows", "n_faulted_pages",
        "n_va_blocks", "bytes", "n_kernels", "kernel",
    )  # fmt: skip
    # Pages 0, 1, 1, 2 are three; the second episode meets only kernel b.
    assert found.rows() == [
        (0, 2, 1, 1, 0, 3, 2, 7 * PAGE, 2, "b"),
        (1, 1, 0, 0, 1, 1, 1, PAGE, 1, "b"),
        (None, 0, 0, 0, 0, 5, 1, 5 * PAGE, None, "b"),
    ]


def test_without_fault_rows_the_copies_say_when_faults_were_serviced():
    # Two batches: blocks 0 and 1, then block 0 again much later.
    copies = _copies(
        {"start_ns": 0, "va": 0},
        {"start_ns": 5_000, "va": BLOCK},
        {"start_ns": 50 * MS, "va": PAGE * 16},
    )
    found = _episodes(NO_FAULTS, copies, gap_ns=MS)
    assert found.select("start_ns", "end_ns", "n_fault_rows", "bytes").rows() == [
        (0, 5_010, 0, 2 * PAGE),
        (50 * MS, 50 * MS + 10, 0, PAGE),
    ]


def test_processes_and_gpus_have_episodes_of_their_own():
    rows = _faults(
        *_rows_at(0, 100), *_rows_at(50, device_id=1), *_rows_at(60, pid=None, device_id=None)
    )
    found = _episodes(rows, gap_ns=1_000)
    assert found.select("pid", "device_id", "n_fault_rows").rows() == [
        (None, None, 1),
        (1, 0, 2),
        (1, 1, 1),
    ]


def test_the_table_of_gaps_counts_pauses_longer_than_each_gap():
    # Pauses 2 000, 2 000 and 100 000.
    rows = _faults(*_rows_at(0, 2_010, 4_020, 104_030))
    found = episode_gaps(rows, NO_COPIES).collect()
    plain = {
        g: n
        for g, n, chosen in found.select("gap_ns", "n_episodes", "is_chosen").rows()
        if not chosen
    }
    assert plain == {
        1 << k: 1 + sum(p > 1 << k for p in (2_000, 2_000, 100_000)) for k in range(10, 18)
    }
    [chosen] = found.filter("is_chosen").select("gap_ns", "n_episodes").rows()
    assert 2_000 <= chosen[0] < 100_000
    assert chosen[1] == 2


def test_nothing_gives_nothing_and_impossible_options_are_refused():
    assert _episodes(NO_FAULTS).schema == FAULT_EPISODES.schema
    assert episode_gaps(NO_FAULTS, NO_COPIES).collect().schema == EPISODE_GAPS.schema
    found = fault_clusters(NO_FAULTS, NO_COPIES, NO_KERNELS).collect()
    assert found.schema == FAULT_CLUSTERS.schema
    assert found.height == 0
    assert cluster_cells(NO_COPIES).collect().schema == CLUSTER_CELLS.schema
    with pytest.raises(UsageError):
        _episodes(NO_FAULTS, gap_ns=-1)
    for wrong in ({"time_bin_ns": -1}, {"min_pages": 0}, {"reach": 0}):
        with pytest.raises(UsageError):
            cluster_cells(NO_COPIES, **wrong)


# Kernels ------------------------------------------------------------------------------------------


def test_the_running_kernel_is_named_only_where_it_runs_alone():
    kernels = _kernels(("a", 0, 100), ("b", 50, 150))
    rows = pl.LazyFrame(
        {"pid": [1] * 5, "device_id": [0, 0, 0, 0, 1], "t": [0, 50, 100, 150, 60]},
        schema={"pid": pl.UInt32, "device_id": pl.Int64, "t": pl.Int64},
    )
    found = with_running_kernel(rows, kernels, at="t").sort("device_id", "t").collect()
    assert found["kernel"].to_list() == ["a", None, "b", None, None]


def test_kernels_are_counted_where_half_open_intervals_overlap():
    kernels = _kernels(("a", 0, 100), ("b", 50, 150), ("c", 150, 160))
    spans = [(0, 50, 1), (0, 51, 2), (100, 150, 1), (100, 151, 2), (160, 170, 0), (0, 200, 3)]
    rows = pl.LazyFrame(
        [{"pid": 1, "device_id": 0, "start_ns": a, "end_ns": b, "wanted": n} for a, b, n in spans],
        schema_overrides={"pid": pl.UInt32},
    )
    found = with_kernel_count(rows, kernels).collect()
    assert found["n_kernels"].to_list() == found["wanted"].to_list()


# Clusters -----------------------------------------------------------------------------------------


def _by_brute_force(cells, min_pages, reach):
    """Grow clusters of dense cells one by one, as the textbook says; keys are (place, bin, block)."""

    def near(cell):
        place, time, block = cell
        steps = itertools.product(range(-reach, reach + 1), repeat=2)
        return [(place, time + dt, block + db) for dt, db in steps]

    found, n = {}, 0
    for cell in sorted(cells):
        if cells[cell] < min_pages or cell in found:
            continue
        todo = [cell]
        found[cell] = n
        while todo:
            for other in near(todo.pop()):
                if cells.get(other, 0) >= min_pages and other not in found:
                    found[other] = n
                    todo.append(other)
        n += 1
    dense = dict(found)
    for cell in cells:
        if cell not in dense:
            found[cell] = min((dense[o] for o in near(cell) if o in dense), default=-1)
    return found


@hypothesis_settings(max_examples=N, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.integers(2, 60))
def test_clusters_are_those_of_a_search_cell_by_cell(seed, min_pages, reach, n):
    draw = random.Random(seed)
    side = draw.choice([6, 12, 1 << 40])
    cells = {
        (draw.choice([0, 0, 1]), draw.randrange(min(side, 14)) - 3, draw.choice([0, side]) + draw.randrange(9)):
        draw.randint(1, 5)
        for _ in range(n)
    }  # fmt: skip
    keys = sorted(cells)
    frame = pl.DataFrame(
        {
            "pid": [1 for _ in keys],
            "device_id": [place for place, _, _ in keys],
            "time_bin": [time for _, time, _ in keys],
            "va_block": [block for _, _, block in keys],
            "n_fault_pages": [cells[key] for key in keys],
        }
    )
    found = labels_of(frame, min_pages=min_pages, reach=reach).tolist()
    wanted = _by_brute_force(cells, min_pages, reach)
    assert found == [wanted[key] for key in keys]


def _square(t, block, *, pages=4, **more):
    return {"start_ns": t, "va": block * BLOCK, "bytes": pages * PAGE, **more}


def test_a_cluster_ends_where_time_or_address_leaves_a_cell_empty():
    copies = _copies(
        _square(0, 0),
        _square(100, 1),  # the next cell on both axes
        _square(150, 2, pages=1),  # not dense, beside a dense one
        _square(110, 4),  # two blocks on
        _square(400, 1),  # two bins on
        _square(900, 9, pages=1),  # alone
    )
    found = fault_clusters(NO_FAULTS, copies, NO_KERNELS, time_bin_ns=100).collect()
    rows = found.select(
        "cluster_id", "start_ns", "n_cells", "n_va_blocks", "n_pages", "bytes"
    ).rows()
    assert rows == [
        (0, 0, 3, 3, 9, 9 * PAGE),
        (1, 110, 1, 1, 4, 4 * PAGE),
        (2, 400, 1, 1, 4, 4 * PAGE),
        (-1, 900, 1, 1, 1, PAGE),
    ]
    assert found["traffic_fraction"].to_list() == [n / 18 for n in (9, 4, 4, 1)]
    assert found["time_bin_ns"].unique().to_list() == [100]


def test_what_the_prefetcher_adds_in_the_next_bin_belongs_to_the_fault():
    copies = _copies(
        _square(90, 0), _square(101, 0, pages=12, cause_id=3), _square(900, 0, pages=7, cause_id=3)
    )
    found = fault_clusters(NO_FAULTS, copies, NO_KERNELS, time_bin_ns=100).collect()
    assert found.select("cluster_id", "n_pages", "bytes").rows() == [
        (0, 4, 16 * PAGE),
        (-1, 0, 7 * PAGE),
    ]


def test_a_fault_row_counts_where_the_first_faulted_copy_of_its_batch_is():
    copies = _copies(_square(50, 0), _square(60, 7), _square(250, 7), _square(990, 30, pages=1))
    rows = _faults(
        {"start_ns": 0, "end_ns": 100, "access": "write"},
        {"start_ns": 100, "end_ns": 300},
        {"start_ns": 300, "end_ns": 400},  # without a copy
        {"start_ns": 900, "end_ns": None},
    )
    found = fault_clusters(rows, copies, _kernels(("k", 0, 100)), time_bin_ns=100).collect()
    assert found.select(
        "cluster_id", "n_fault_rows", "n_read_rows", "n_write_rows", "kernel"
    ).rows() == [
        (0, 1, 0, 1, "k"),
        (1, 0, 0, 0, "k"),
        (2, 1, 1, 0, None),
        (-1, 2, 2, 0, None),
    ]


def test_the_bin_is_eight_times_the_time_between_faults_in_another_block():
    # Blocks change every 1 000 ns; 8 000 rounds up to 8 192.
    copies = _copies(*(_square(1_000 * i + j, i) for i in range(6) for j in (0, 500)))
    found = fault_clusters(NO_FAULTS, copies, NO_KERNELS).collect()
    assert found["time_bin_ns"].to_list() == [8_192]


def test_every_page_is_in_one_cell_under_its_cause():
    copies = _copies(
        _square(0, 0),
        _square(1, 0, cause_id=3, pages=2),
        _square(2, 0, cause_id=1, pages=3),
        _square(3, 0, cause_id=4, direction="dtoh", pages=5),
        _square(4, 0, cause_id=2, direction="dtoh", pages=6),
        _square(5, 0, cause_id=3, direction="dtoh", pages=7),
        _square(6, 0, cause_id=5, pages=8),
        _square(7, 0, cause_id=None, pages=9),
        _square(250, 1, cause_id=1, pages=10),
        {"start_ns": 5, "va": None},
        {"start_ns": 5, "va": 0, "bytes": None},
    )
    found = cluster_cells(copies, time_bin_ns=100).collect().drop("pid", "device_id", "time_bin_ns")
    assert found.rows() == [
        (0, 0, 4 + 9, 2, 3, 5, 6 + 7, 8, 0),
        (200, 1, 0, 0, 10, 0, 0, 0, None),
    ]


_ROW = st.tuples(
    st.integers(0, 40),
    st.integers(0, 8),
    st.integers(1, 6),
    st.sampled_from([0, 1, None]),
    st.sampled_from([1, 2, 2, 2, 3, 4, None]),
    st.sampled_from(["htod", "htod", "dtoh", "dtod"]),
)


@hypothesis_settings(max_examples=N, deadline=None)
@given(st.lists(_ROW, max_size=30), st.randoms(use_true_random=False))
def test_clusters_do_not_depend_on_the_order_of_rows_and_totals_close(drawn, mixer):
    rows = [
        _square(t * 37, block, pages=n, device_id=gpu, cause_id=cause, direction=way)
        for t, block, n, gpu, cause, way in drawn
    ]
    faults = _faults(*_rows_at(*(37 * t + 5 for t, *_ in drawn[::2])))
    kernels = _kernels(("k", 0, 500), ("l", 300, 900))
    one = fault_clusters(faults, _copies(*rows), kernels, time_bin_ns=64, min_pages=3).collect()
    mixed = mixer.sample(rows, len(rows))
    assert_frame_equal(
        one, fault_clusters(faults, _copies(*mixed), kernels, time_bin_ns=64, min_pages=3).collect()
    )
    wanted = defaultdict(int)
    for _, _, n, gpu, cause, way in drawn:
        if way != "dtoh" and cause in (2, 3, None):
            wanted[gpu] += n * PAGE
    sums = one.group_by("device_id").agg(pl.col("bytes", "n_fault_rows").sum())
    assert {gpu: size for gpu, size, _ in sums.rows() if size} == dict(wanted)
    assert sums["n_fault_rows"].sum() == faults.collect().height
    # The bytes of a GPU do not depend on the other's.
    alone = [row for row in rows if row["device_id"] == 1]
    assert_frame_equal(
        one.filter(pl.col("device_id") == 1).drop("cluster_id", "n_fault_rows", "n_read_rows"),
        fault_clusters(NO_FAULTS, _copies(*alone), kernels, time_bin_ns=64, min_pages=3)
        .collect()
        .drop("cluster_id", "n_fault_rows", "n_read_rows"),
    )


@hypothesis_settings(max_examples=N, deadline=None)
@given(st.lists(_ROW, max_size=30), st.randoms(use_true_random=False))
def test_episodes_do_not_depend_on_the_order_of_rows_and_bytes_close(drawn, mixer):
    rows = [
        _square(t * 37, block, pages=n, device_id=gpu, cause_id=cause, direction=way)
        for t, block, n, gpu, cause, way in drawn
    ]
    faults = _rows_at(*(37 * t + 5 for t, *_ in drawn[::2]))
    one = _episodes(_faults(*faults), _copies(*rows))
    mixed = mixer.sample(rows, len(rows)), mixer.sample(faults, len(faults))
    assert_frame_equal(one, _episodes(_faults(*mixed[1]), _copies(*mixed[0])))
    wanted = sum(
        n * PAGE for _, _, n, _, cause, way in drawn if way != "dtoh" and cause in (2, 3, None)
    )
    assert one["bytes"].sum() == wanted
    # Rows that fit no copies are refused as a whole: episodes then stand on copies.
    assert one["n_fault_rows"].sum() in {0, len(faults)}
