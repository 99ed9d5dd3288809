from __future__ import annotations

import itertools
import os
from collections import defaultdict
from functools import cache

import hypothesis
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from programs import programs, run_to_end

import nsan
from nsan.analysis.catalog import analyses_in
from nsan.analysis.memory.amplification import amplification, prefetch_share
from nsan.analysis.traffic import (
    copy_cost,
    migrations_by_cause,
    traffic_matrix,
    traffic_over_time,
    transfer_efficiency,
)
from nsan.errors import UsageError
from nsan.model.recording import record
from nsan.schema import ALLOCATIONS, GPU_FAULTS, MIGRATIONS
from nsan.units import KIB, MIB
from nsan.uvm.constants import PAGE_BYTES

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 15

A = 0x7F00_0000_0000
CAUSES = {1: "user", 2: "coherence", 3: "prefetch", 4: "eviction", None: "unknown"}
USER, FAULT, DENSITY, EVICTION = 1, 2, 3, 4


def copy(start, end, size=4 * KIB, *, va=A, way="htod", cause=FAULT, device=0, pid=1, **more):
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
    } | more


def table(*rows):
    return pl.LazyFrame(rows, schema=MIGRATIONS.schema)


def faults(*keys):
    rows = [{"pid": pid, "device_id": device} for pid, device in keys]
    return pl.LazyFrame(rows, schema=GPU_FAULTS.schema)


def managed(va, size, alloc=0, free=None, *, pid=1, kind="managed"):
    times = {"alloc_ns": alloc, "free_ns": free}
    return {"pid": pid, "va": va, "bytes": size, "kind": kind} | times


def allocations(*rows):
    return pl.LazyFrame(rows, schema=ALLOCATIONS.schema)


@cache
def easycuda():
    """The only real capture at hand: two arrays of 4 MiB added on an RTX 4060 Laptop."""
    return nsan.open_trace("sample_data/um_vector_add_rtx4060l.sqlite").migrations.collect()


# Totals ----------------------------------------------------------------------------------------


def test_traffic_is_split_by_way_cause_gpu_and_process():
    rows = [
        copy(0, 10, 4096),
        copy(20, 30, 8192),
        copy(20, 40, 4096, cause=DENSITY),
        copy(0, 10, 4096, device=1),
        copy(0, 10, 4096, pid=None, device=None),
    ]
    got = traffic_matrix(table(*rows)).collect()
    keys = got.select("pid", "device_id", "cause", "n_migrations", "bytes", "busy_ns").rows()
    assert sorted(keys, key=str) == [
        (1, 0, "coherence", 2, 12288, 20),
        (1, 0, "prefetch", 1, 4096, 20),
        (1, 1, "coherence", 1, 4096, 10),
        (None, None, "coherence", 1, 4096, 10),
    ]
    assert got["bytes"].to_list()[0] == 12288  # most bytes first
    assert got["bytes_fraction"].to_list()[0] == 0.5
    assert got["bytes_per_s"].to_list()[0] == pytest.approx(12288 / 20e-9)


def test_time_of_copies_that_overlap_counts_once():
    got = traffic_matrix(table(copy(0, 100), copy(50, 150))).collect()
    assert got["busy_ns"].to_list() == [150]


def test_rows_without_a_time_or_an_address_count_and_take_no_time():
    rows = [copy(None, None, 4096), copy(0, 10, 4096, va=None), copy(0, 0, 4096)]
    [row] = traffic_matrix(table(*rows)).collect().to_dicts()
    assert (row["n_migrations"], row["bytes"], row["busy_ns"]) == (3, 12288, 10)


def test_a_copy_without_a_duration_has_no_bandwidth():
    [row] = traffic_matrix(table(copy(5, 5))).collect().to_dicts()
    assert (row["busy_ns"], row["bytes_per_s"]) == (0, None)


def test_where_starts_are_coarse_the_lengths_of_copies_add_up():
    # a text trace prints starts in steps: three copies seem to run at once
    rows = [copy(0, 30, sequence=1), copy(0, 20, sequence=2), copy(0, 50, sequence=3)]
    assert traffic_matrix(table(*rows)).collect()["busy_ns"].to_list() == [100]
    assert traffic_over_time(table(*rows)).collect()["busy_ns"].sum() == 100


def test_causes_add_up_over_processes_and_gpus():
    rows = [
        copy(0, 100, 4096),
        copy(50, 150, 4096, pid=2, device=1),
        copy(0, 10, 8192, way="dtoh", cause=EVICTION),
    ]
    got = migrations_by_cause(table(*rows)).collect()
    assert got.select("cause", "direction", "n_migrations", "bytes", "busy_ns").rows() == [
        ("coherence", "htod", 2, 8192, 150),
        ("eviction", "dtoh", 1, 8192, 10),
    ]
    assert got["bytes_fraction"].to_list() == [0.5, 0.5]


def test_a_group_that_lacks_a_size_has_no_bytes():
    assert migrations_by_cause(table(copy(0, 1, None), copy(0, 1))).collect()["bytes"][0] is None
    assert traffic_matrix(table(copy(0, 1, None), copy(0, 1))).collect()["bytes"][0] is None


# Over time -------------------------------------------------------------------------------------


def test_a_copy_counts_where_it_starts_and_its_time_where_it_passes():
    got = traffic_over_time(table(copy(5, 25), copy(30, 31)), window_ns=10).collect()
    columns = ("bin_id", "start_ns", "end_ns", "n_migrations", "bytes", "busy_ns")
    assert got.select(columns).rows() == [
        (0, 0, 10, 1, 4096, 5),
        (1, 10, 20, 0, 0, 10),
        (2, 20, 30, 0, 0, 5),
        (3, 30, 40, 1, 4096, 1),
    ]


def test_bins_of_a_number_cover_the_copies_from_first_to_last():
    got = traffic_over_time(table(copy(100, 110), copy(190, 200)), n_bins=4).collect()
    assert got.select("bin_id", "start_ns", "end_ns", "busy_ns").rows() == [
        (0, 100, 125, 10),
        (3, 175, 200, 10),
    ]


def test_a_last_copy_of_no_length_is_in_the_last_bin():
    got = traffic_over_time(table(copy(0, 10), copy(100, 100)), n_bins=10).collect()
    assert got["bin_id"].to_list() == [0, 9]


def test_bins_before_the_session_start_are_negative():
    got = traffic_over_time(table(copy(-5, 5)), window_ns=10).collect()
    assert got.select("bin_id", "start_ns", "bytes", "busy_ns").rows() == [
        (-1, -10, 4096, 5),
        (0, 0, 0, 5),
    ]


@pytest.mark.parametrize("options", [{"n_bins": 0}, {"n_bins": -1}, {"window_ns": -5}])
def test_less_than_one_bin_is_refused(options):
    with pytest.raises(UsageError):
        traffic_over_time(table(copy(0, 1)), **options)


def test_more_than_a_million_bins_are_refused():
    with pytest.raises(UsageError, match="longer"):
        traffic_over_time(table(copy(0, 1), copy(10**9, 10**9 + 1)), window_ns=10).collect()


copies = st.builds(
    copy,
    start=st.integers(0, 200),
    end=st.integers(0, 260),
    size=st.integers(1, 5).map(lambda n: n * PAGE_BYTES),
    va=st.integers(0, 6).map(lambda n: A + n * PAGE_BYTES),
    way=st.sampled_from(["htod", "dtoh", "dtod"]),
    cause=st.sampled_from([*CAUSES]),
    device=st.sampled_from([0, 1, None]),
    pid=st.sampled_from([1, 2, None]),
    src_device_id=st.sampled_from([0, 1, None]),
)


@given(st.lists(copies, max_size=30), st.sampled_from([1, 7, 50, 1000]))
@hypothesis.settings(max_examples=4 * N, deadline=None)
def test_bins_add_up_to_the_matrix(rows, width):
    rows = [row | {"end_ns": max(row["end_ns"], row["start_ns"])} for row in rows]
    by = ["pid", "device_id", "direction", "cause"]
    figures = ["n_migrations", "bytes", "busy_ns"]
    whole = traffic_matrix(table(*rows)).collect().select(*by, *figures).sort(by)
    for options in ({"window_ns": width}, {"n_bins": width}):
        got = traffic_over_time(table(*rows), **options).collect()
        sums = got.group_by(by).agg(pl.col(figures).sum()).sort(by)
        assert_frame_equal(sums, whole)
        assert (got["busy_ns"] <= got["end_ns"] - got["start_ns"]).all()


@given(st.lists(copies, max_size=30), st.integers(0, 200))
@hypothesis.settings(max_examples=2 * N, deadline=None)
def test_parts_of_a_trace_add_up(rows, at):
    first = [row for row in rows if row["start_ns"] < at]
    last = [row for row in rows if row["start_ns"] >= at]
    keys = ["pid", "device_id", "direction", "cause"]
    whole = traffic_matrix(table(*rows)).collect()
    parts = pl.concat([traffic_matrix(table(*part)).collect() for part in (first, last)])
    figures = ["n_migrations", "bytes"]
    assert_frame_equal(
        parts.group_by(keys).agg(pl.col(figures).sum()).sort(keys),
        whole.select(*keys, *figures).sort(keys),
    )


# Efficiency ------------------------------------------------------------------------------------


def chained(*sizes, start=0, va=A, **more):
    """One push: copies that follow each other by 1 ns, 1 ns per KiB."""
    rows = []
    for size in sizes:
        rows.append(copy(start, start + size // KIB, size, va=va, **more))
        start, va = start + size // KIB + 1, va + size
    return rows


def test_copies_of_a_push_are_one_transfer():
    rows = chained(4 * KIB, 60 * KIB) + chained(4 * KIB, start=1000, va=A + MIB)
    got = transfer_efficiency(table(*rows)).collect()
    columns = ("min_bytes", "n_pushes", "n_migrations", "bytes", "copy_ns", "busy_ns")
    assert got.select(columns).rows() == [
        (4 * KIB, 1, 1, 4 * KIB, 4, 4),
        (64 * KIB, 1, 2, 64 * KIB, 64, 64),
    ]
    assert got["small_fraction"].to_list() == pytest.approx([4 / 68] * 2)
    assert got["bytes_fraction"].to_list() == pytest.approx([4 / 68, 64 / 68])
    assert got["bytes_per_s"].to_list() == pytest.approx([1024e9, 1024e9])


@pytest.mark.parametrize(
    ("size", "least"),
    [(4096, 4096), (8191, 4096), (8192, 8192), (2 * MIB, 2 * MIB), (1, 1), (2**40 - 1, 2**39)],
)
def test_classes_are_powers_of_two(size, least):
    assert transfer_efficiency(table(copy(0, 1, size))).collect()["min_bytes"].to_list() == [least]


def test_the_real_capture_has_the_pushes_of_the_prefetcher():
    """Two arrays of two blocks come in, one goes back: 64, 64, 128, 256, 512, 1024 KiB each."""
    got = transfer_efficiency(easycuda().lazy()).collect()
    sizes = got.select("direction", "min_bytes", "n_pushes", "n_migrations", "bytes").rows()
    expected = []
    for way, blocks in (("htod", 4), ("dtoh", 2)):
        for size, n in ((64, 2), (128, 1), (256, 1), (512, 1), (1024, 1)):
            pushes = n * blocks
            expected.append((way, size * KIB, pushes, 2 * pushes, pushes * size * KIB))
    assert sizes == expected
    assert got["small_fraction"].to_list() == [0.0] * 10


# Cost of a copy --------------------------------------------------------------------------------


def test_the_cost_of_a_copy_on_the_real_capture_is_that_of_the_calibration():
    got = copy_cost(easycuda().lazy()).collect()
    by_way = {row["direction"]: row for row in got.to_dicts()}
    # calibration.md 3: 1.38 us and 12.8 GB/s in, 0.73 us and 13.5 GB/s out
    for way, latency, rate in (("htod", 1.38, 12.8), ("dtoh", 0.73, 13.5)):
        assert by_way[way]["latency_ns"] / 1e3 == pytest.approx(latency, abs=0.02)
        assert by_way[way]["bytes_per_s"] / 1e9 == pytest.approx(rate, abs=0.1)
        assert by_way[way]["r2"] > 0.9999
    assert by_way["htod"]["residual_p50_ns"] == pytest.approx(70, abs=5)
    assert by_way["htod"]["residual_p95_ns"] == pytest.approx(310, abs=15)


def test_a_few_slow_copies_do_not_bend_the_line():
    rows = [
        copy(i * 10**6, i * 10**6 + 1000 + size // 10, size)
        for i, size in enumerate([4096, 65536, 2**20] * 9)
    ]
    rows += [copy(10**8, 10**8 + 400_000, 4096), copy(10**8, 10**8 + 900_000, 65536)]
    [row] = copy_cost(table(*rows)).collect().to_dicts()
    assert row["latency_ns"] == pytest.approx(1000, abs=1)
    assert row["bytes_per_s"] == pytest.approx(10e9, rel=1e-4)
    assert (row["n_migrations"], row["n_sizes"]) == (29, 3)
    assert row["residual_p50_ns"] < 1
    assert row["r2"] < 0.5


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 50), st.integers(1, 3)), min_size=3, max_size=12
    )
)
@hypothesis.settings(max_examples=2 * N, deadline=None)
def test_no_line_through_two_points_is_nearer(points):
    """An optimal line of least absolute deviation goes through two of the points."""
    rows = [copy(0, t * 100, n * 4096) for n, t, times in points for _ in range(times)]
    [row] = copy_cost(table(*rows)).collect().to_dicts()
    hypothesis.assume(row["latency_ns"] is not None and row["bytes_per_s"] is not None)
    x, y = np.array([(r["bytes"], r["end_ns"]) for r in rows], dtype=float).T
    mine = np.abs(y - row["latency_ns"] - x / row["bytes_per_s"] * 1e9).sum()
    for i in range(len(x)):
        for j in range(i):
            if x[i] != x[j]:
                slope = (y[i] - y[j]) / (x[i] - x[j])
                if slope >= 0:
                    assert mine <= np.abs(y - y[i] - slope * (x - x[i])).sum() * (1 + 1e-6) + 1e-6


def test_copies_of_one_size_do_not_tell_latency_from_bandwidth():
    [row] = (
        copy_cost(table(copy(0, 10), copy(20, 31), copy(40, 55, 0), copy(50, 50)))
        .collect()
        .to_dicts()
    )
    assert (row["n_migrations"], row["n_sizes"]) == (2, 1)
    assert (row["latency_ns"], row["bytes_per_s"], row["r2"]) == (None, None, None)


# Amplification ---------------------------------------------------------------------------------


def test_every_byte_of_the_real_capture_moved_once():
    none = (GPU_FAULTS.empty(), ALLOCATIONS.empty())
    [row] = amplification(easycuda().lazy(), *none).collect().to_dicts()
    assert (row["htod_bytes"], row["unique_htod_bytes"]) == (8 * MIB, 8 * MIB)
    assert (row["htod_amplification"], row["dtoh_amplification"]) == (1.0, 1.0)
    assert (row["moved_per_managed"], row["fault_row_bytes"]) == (None, None)


def test_bytes_that_come_again_are_amplification():
    rows = [
        copy(0, 1, 8192),
        copy(2, 3, 4096, va=A + 4096),
        copy(4, 5, 4096, way="dtoh"),
        copy(6, 7, 4096, va=A + 2**40, pid=2),
    ]
    got = amplification(table(*rows), GPU_FAULTS.empty(), ALLOCATIONS.empty()).collect()
    columns = ("pid", "htod_bytes", "unique_htod_bytes", "htod_amplification", "moved_bytes")
    assert got.select(columns).rows() == [(1, 12288, 8192, 1.5, 16384), (2, 4096, 4096, 1.0, 4096)]
    assert got["dtoh_amplification"].to_list() == [1.0, None]


def test_addresses_above_the_middle_are_unsigned():
    rows = [copy(0, 1, va=2**64 - 8192), copy(2, 3, va=2**63 - 4096, size=8192)]
    [row] = (
        amplification(table(*rows), GPU_FAULTS.empty(), ALLOCATIONS.empty()).collect().to_dicts()
    )
    assert row["unique_htod_bytes"] == 12288


def test_moved_memory_is_compared_with_the_most_managed_memory_alive():
    lives = allocations(
        managed(A, 100, 0, 10),
        managed(A, 300, 10, 20),  # follows the first: they never live together
        managed(A, 50, None, None),  # from before the capture, to the end
        managed(A, 1000, 0, None, kind="device"),
        managed(A, 7, 0, None, pid=2),
    )
    rows = table(copy(0, 1, 700), copy(0, 1, 700, device=1), copy(0, 1, 700, pid=3))
    got = amplification(rows, GPU_FAULTS.empty(), lives).collect()
    assert got.select("pid", "device_id", "peak_managed_bytes", "moved_per_managed").rows() == [
        (1, 0, 350, 2.0),
        (1, 1, 350, 2.0),
        (3, 0, None, None),
    ]


def test_bytes_per_fault_row_count_what_faults_brought():
    rows = table(
        copy(0, 1, 4096),
        copy(0, 1, 61440, cause=DENSITY),
        copy(0, 1, 4096, cause=None),
        copy(0, 1, 2**20, cause=USER),
        copy(0, 1, 2**20, way="dtoh"),
    )
    got = amplification(rows, faults((1, 0), (1, 0), (1, 1)), ALLOCATIONS.empty()).collect()
    assert got.select("device_id", "n_fault_rows", "fault_row_bytes").rows() == [
        (0, 2, 69632 / 2),
        (1, 1, 0.0),
    ]


@given(st.lists(copies, max_size=25))
@hypothesis.settings(max_examples=2 * N, deadline=None)
def test_unique_bytes_agree_with_sets_of_pages(rows):
    got = amplification(table(*rows), GPU_FAULTS.empty(), ALLOCATIONS.empty()).collect()
    pages = defaultdict(set)
    for row in rows:
        first = row["va"] // PAGE_BYTES
        key = (row["pid"], row["device_id"], row["direction"])
        pages[key].update(range(first, first + row["bytes"] // PAGE_BYTES))
    for row in got.to_dicts():
        for way in ("htod", "dtoh", "dtod"):
            expected = len(pages[row["pid"], row["device_id"], way]) * PAGE_BYTES
            assert row[f"unique_{way}_bytes"] == expected


# The driver's prefetcher -----------------------------------------------------------------------


def test_prefetched_pages_that_are_evicted_next_leave_no_evidence_of_use():
    rows = table(
        copy(0, 1, 4096),
        copy(2, 3, 61440, va=A + 4096, cause=DENSITY),
        copy(10, 11, 32768, way="dtoh", cause=EVICTION),
        copy(12, 13, 16384, va=A + 32768, way="dtoh"),  # the CPU fetched these
        copy(14, 15, 16384, va=A + 49152, way="dtoh", cause=EVICTION),
    )
    [row] = prefetch_share(rows).collect().to_dicts()
    assert (row["fault_bytes"], row["coherence_bytes"], row["prefetch_bytes"]) == (
        65536,
        4096,
        61440,
    )
    assert row["prefetch_fraction"] == 61440 / 65536
    assert row["n_pages_prefetched"] == 15
    assert row["no_evidence_of_use_bytes"] == 32768 - 4096 + 16384
    assert row["no_evidence_of_use_fraction"] == pytest.approx(45056 / 61440)


def test_pages_that_an_eviction_leaves_behind_are_followed_to_the_next_one():
    rows = table(
        copy(0, 1, 8192, cause=DENSITY),
        copy(10, 11, 4096, way="dtoh", cause=EVICTION),
        copy(20, 21, 4096),
        copy(30, 31, 8192, way="dtoh", cause=EVICTION),
    )
    assert prefetch_share(rows).collect()["no_evidence_of_use_bytes"].to_list() == [8192]


def test_an_eviction_of_another_gpu_or_process_says_nothing():
    rows = table(
        copy(2, 3, 4096, cause=DENSITY),
        copy(10, 11, 4096, way="dtoh", cause=EVICTION, device=1),
        copy(10, 11, 4096, way="dtoh", cause=EVICTION, pid=2),
    )
    assert prefetch_share(rows).collect()["no_evidence_of_use_bytes"].to_list() == [0]


def evicted_next(rows):
    """Page by page, in plain Python."""
    events = defaultdict(list)
    for row in rows:
        order = (row["start_ns"], row["end_ns"])
        cause = -1 if row["cause_id"] is None else row["cause_id"]
        for page in range(row["va"] // PAGE_BYTES, (row["va"] + row["bytes"]) // PAGE_BYTES):
            if row["direction"] != "htod":
                dtod = row["direction"] == "dtod"
                source = row["src_device_id"] if dtod else row["device_id"]
                events[row["pid"], source, page].append((*order, False, cause))
            if row["direction"] != "dtoh":
                events[row["pid"], row["device_id"], page].append((*order, True, cause))
    n = defaultdict(int)
    for (pid, device, _), moves in events.items():
        moves.sort()
        for one, two in itertools.pairwise(moves):
            if one[2:] == (True, DENSITY) and two[2:] == (False, EVICTION):
                n[pid, device] += PAGE_BYTES
    return n


@given(st.lists(copies, max_size=25))
@hypothesis.settings(max_examples=4 * N, deadline=None)
def test_what_is_evicted_next_agrees_with_pages_followed_one_by_one(rows):
    expected = evicted_next(rows)
    for row in prefetch_share(table(*rows)).collect().to_dicts():
        assert row["no_evidence_of_use_bytes"] == expected[row["pid"], row["device_id"]]


@given(programs())
@hypothesis.settings(max_examples=N, deadline=None)
def test_it_agrees_on_random_programs_too(made):
    ran = run_to_end(*made)
    rows = record(ran.happened, ran.settings, "test")["migrations"]
    expected = evicted_next(rows.to_dicts())
    for row in prefetch_share(rows.lazy()).collect().to_dicts():
        assert row["no_evidence_of_use_bytes"] == expected[row["pid"], row["device_id"]]


# Laws of all -----------------------------------------------------------------------------------

ALL = {
    "traffic_matrix": traffic_matrix,
    "migrations_by_cause": migrations_by_cause,
    "traffic_over_time": traffic_over_time,
    "transfer_efficiency": transfer_efficiency,
    "copy_cost": copy_cost,
    "prefetch_share": prefetch_share,
    "amplification": lambda m: amplification(m, faults((1, 0), (None, 1)), ALLOCATIONS.empty()),
}


def test_the_laws_are_checked_for_all():
    from nsan.analysis import traffic as first
    from nsan.analysis.memory import amplification as second

    names = {found.name for module in (first, second) for found in analyses_in(module)}
    assert names == set(ALL)


@pytest.mark.parametrize("name", [*ALL])
@given(rows=st.lists(copies, max_size=20), turn=st.randoms())
@hypothesis.settings(max_examples=N, deadline=None)
def test_the_order_of_rows_does_not_matter(name, rows, turn):
    mixed = [*rows]
    turn.shuffle(mixed)
    assert_frame_equal(ALL[name](table(*mixed)).collect(), ALL[name](table(*rows)).collect())


@pytest.mark.parametrize("name", [*ALL])
def test_lost_values_are_no_error(name):
    lost = [copy(0, 1, **{key: None}) for key in ("va", "way", "cause", "device", "pid")]
    lost += [copy(None, 1), copy(0, None), copy(0, 1, None)]
    found = ALL[name](table(*lost)).collect()
    assert found.schema == ALL[name](MIGRATIONS.empty()).collect_schema()


@pytest.mark.parametrize("name", [*ALL])
def test_no_rows_give_an_empty_table(name):
    empty = ALL[name](MIGRATIONS.empty())
    got = empty.collect()
    assert got.schema == empty.collect_schema()
    assert got.height == (2 if name == "amplification" else 0)
