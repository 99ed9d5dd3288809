from __future__ import annotations

import os
from collections import defaultdict
from functools import cache

import hypothesis
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from programs import modelled, programs, run_to_end

from nsan.analysis.user_prefetch import USER_PREFETCHES, user_prefetches
from nsan.model.access import Stream
from nsan.model.program import (
    CPU,
    Allocate,
    HostTouch,
    Kernel,
    Launch,
    Prefetch,
    Synchronize,
)
from nsan.model.recording import record
from nsan.schema import API_CALLS, COPIES, KERNELS, MEMSETS, MIGRATIONS
from nsan.units import MIB
from nsan.uvm.constants import PAGE_BYTES, VA_BLOCK_BYTES

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 15

A = 0x7F00_0000_0000
B = A + 64 * MIB
US = 1000
CALL = "cudaMemPrefetchAsync_v8000"
USER, FAULT, DENSITY, EVICTION = 1, 2, 3, 4


def table(schema, rows):
    return pl.LazyFrame(rows, schema=schema.schema)


def copy(start, va, *, n=1, way="htod", cause=USER, device=0, pid=1, src=None):
    """A copy of n VA blocks at a time in us, as a row."""
    return {
        "start_ns": start * US,
        "end_ns": (start + 5) * US,
        "pid": pid,
        "device_id": device,
        "va": va,
        "bytes": n * VA_BLOCK_BYTES,
        "direction": way,
        "cause_id": cause,
        "src_device_id": src,
    }


def call(start, end, *, name=CALL, pid=1, tid=1, number=0, status=0):
    return {
        "start_ns": start * US,
        "end_ns": end * US,
        "pid": pid,
        "tid": tid,
        "correlation_id": number,
        "name": name,
        "return_value": status,
    }


def kernel(start, end, *, device=0, pid=1):
    return {"start_ns": start * US, "end_ns": end * US, "pid": pid, "device_id": device}


def found(copies, calls=(), kernels=(), *, memcpys=()):
    return user_prefetches(
        table(MIGRATIONS, list(copies)),
        table(API_CALLS, list(calls)),
        table(KERNELS, list(kernels)),
        table(COPIES, list(memcpys)),
        table(MEMSETS, []),
    ).collect()


def calls_of(result):
    """Correlation id, lowest block of array A and bytes of each prefetch."""
    rows = result.select("correlation_id", (pl.col("va") - A) // VA_BLOCK_BYTES, "bytes").rows()
    return [(n, va, size // VA_BLOCK_BYTES if size else 0) for n, va, size in rows]


def blocks(start, va, n, *, step=10, **more):
    """Copies of n blocks that follow each other."""
    return [copy(start + i * step, va + i * VA_BLOCK_BYTES, **more) for i in range(n)]


# Which call ------------------------------------------------------------------------------------


def test_copies_that_ascend_are_one_prefetch_of_the_call_before_them():
    got = found(blocks(20, A, 4), [call(10, 70, number=5)])
    [row] = got.to_dicts()
    assert (row["correlation_id"], row["bytes"], row["n_migrations"]) == (5, 4 * VA_BLOCK_BYTES, 4)
    assert (row["start_ns"], row["end_ns"], row["n_runs"]) == (20 * US, 55 * US, 1)
    assert (row["va"], row["span_bytes"]) == (A, 4 * VA_BLOCK_BYTES)
    assert (row["call_name"], row["call_start_ns"], row["call_end_ns"]) == (CALL, 10 * US, 70 * US)
    assert (row["to_host"], row["device_id"]) == (False, 0)


def test_pages_that_are_there_already_leave_a_hole_in_one_prefetch():
    copies = blocks(20, A, 2) + blocks(40, A + 3 * VA_BLOCK_BYTES, 2)
    [row] = found(copies, [call(10, 90)]).to_dicts()
    assert (row["n_runs"], row["bytes"], row["span_bytes"]) == (
        2,
        4 * VA_BLOCK_BYTES,
        5 * VA_BLOCK_BYTES,
    )


def test_arrays_side_by_side_are_two_prefetches_if_each_call_copies_its_own():
    copies = blocks(20, A, 4) + blocks(70, A + 4 * VA_BLOCK_BYTES, 2)
    calls = [call(10, 65, number=1), call(66, 90, number=2)]
    assert calls_of(found(copies, calls)) == [(1, 0, 4), (2, 4, 2)]


def test_a_call_during_the_copies_of_another_does_not_cut_them_if_it_has_copies_later():
    # call 2 returns at once and waits for its turn
    copies = blocks(20, A, 4) + blocks(60, B, 2)
    calls = [call(10, 22, number=1), call(35, 48, number=2)]
    assert calls_of(found(copies, calls)) == [(1, 0, 4), (2, 32, 2)]


def test_calls_that_were_queued_get_their_copies_in_order():
    third = A + 8 * VA_BLOCK_BYTES
    copies = blocks(20, B, 4) + blocks(60, third, 2) + blocks(80, A, 2)
    calls = [call(10, 11, number=1), call(12, 13, number=2), call(14, 15, number=3)]
    assert calls_of(found(copies, calls)) == [(1, 32, 4), (2, 8, 2), (3, 0, 2)]


def test_a_call_that_finds_everything_in_place_moved_nothing():
    calls = [call(10, 11, number=1), call(12, 60, number=2), call(70, 71, number=3)]
    got = found(blocks(20, A, 2), calls)
    assert got.select("correlation_id", "outcome", "bytes").rows() == [
        (1, "moved_nothing", 0),
        (2, "in_time", 2 * VA_BLOCK_BYTES),
        (3, "moved_nothing", 0),
    ]
    assert got["device_id"].to_list() == [None, 0, None]
    assert got["late_bytes"].to_list() == [None, 0, None]


def test_a_failed_call_and_calls_of_other_names_and_processes_are_not_tied():
    calls = [
        call(10, 60, number=1),
        call(11, 12, number=2, status=1),
        call(13, 14, number=3, name="cudaMemAdvise_v8000"),
        call(15, 16, number=4, name="cudaLaunchKernel_v7000"),
        call(17, 18, number=5, pid=2),
    ]
    got = found(blocks(20, A, 2), calls)
    assert got.select("pid", "correlation_id", "outcome").rows() == [
        (1, 1, "in_time"),
        (2, 5, "moved_nothing"),
    ]


def test_advice_counts_where_there_is_no_prefetch_call_before():
    calls = [call(10, 60, number=3, name="cudaMemAdvise_v8000"), call(90, 91, number=4)]
    got = found(blocks(20, A, 2), calls)
    assert got.select("correlation_id", "outcome").rows() == [(3, "in_time"), (4, "moved_nothing")]


def test_a_driver_call_inside_the_runtime_call_is_not_a_call_of_its_own():
    calls = [call(10, 60, number=1), call(11, 59, number=2, name="cuMemPrefetchAsync")]
    assert calls_of(found(blocks(20, A, 2), calls)) == [(1, 0, 2)]


def test_without_api_calls_the_copies_are_there_and_the_call_is_null():
    [row] = found(blocks(20, A, 2)).to_dicts()
    assert row["bytes"] == 2 * VA_BLOCK_BYTES
    assert [row[c] for c in ("call_name", "call_start_ns", "correlation_id")] == [None] * 3


def test_a_prefetch_to_a_gpu_from_the_host_and_from_another_gpu_is_one():
    copies = [copy(20, A, device=1), copy(30, A + VA_BLOCK_BYTES, device=1, way="dtod", src=0)]
    [row] = found(copies, [call(10, 60)]).to_dicts()
    assert (row["device_id"], row["bytes"]) == (1, 2 * VA_BLOCK_BYTES)


def test_a_prefetch_to_the_cpu_goes_to_the_host_from_any_gpu():
    copies = [copy(20, A, way="dtoh"), copy(30, A + VA_BLOCK_BYTES, device=1, way="dtoh")]
    [row] = found(copies, [call(10, 60)], [kernel(100, 110)]).to_dicts()
    assert (row["to_host"], row["device_id"], row["bytes"]) == (True, None, 2 * VA_BLOCK_BYTES)
    assert (row["early_bytes"], row["wasted_bytes"]) == (None, None)


# Late ------------------------------------------------------------------------------------------


def test_faults_in_its_blocks_since_the_call_make_a_prefetch_late():
    faults = [
        copy(15, A, cause=FAULT),
        copy(16, A, cause=DENSITY),
        copy(22, A + VA_BLOCK_BYTES, cause=FAULT),
    ]
    copies = faults + blocks(30, A + 2 * VA_BLOCK_BYTES, 2) + [copy(20, A, cause=USER)]
    [row] = found(copies, [call(10, 60)], [kernel(0, 100)]).to_dicts()
    assert (row["late_bytes"], row["outcome"]) == (3 * VA_BLOCK_BYTES, "late")


@pytest.mark.parametrize(
    "fault",
    [
        copy(5, A, cause=FAULT),  # before the call
        copy(40, A, cause=FAULT),  # after the last copy
        copy(21, B, cause=FAULT),  # elsewhere
        copy(21, A, cause=FAULT, device=1),  # on another GPU
        copy(21, A, cause=FAULT, pid=2),  # in another process
        copy(21, A, cause=FAULT, way="dtoh"),  # to the CPU
        copy(21, A, cause=EVICTION, way="dtoh"),
    ],
)
def test_other_copies_do_not_make_it_late(fault):
    [row] = found([fault, *blocks(20, A, 2)], [call(10, 60)], [kernel(70, 80)]).to_dicts()
    assert (row["late_bytes"], row["outcome"]) == (0, "in_time")


def test_a_call_while_a_kernel_already_faults_the_range_in_is_late():
    faults = [copy(3, A, cause=FAULT), copy(0, A, cause=FAULT)]
    calls = [call(10, 60)]
    kernels = [kernel(2, 100), kernel(5, 6), kernel(0, 1)]
    [row] = found(
        faults + blocks(20, A + VA_BLOCK_BYTES, 2) + [copy(19, A)], calls, kernels
    ).to_dicts()
    # the kernel that runs at the first copy began at 2: the copy at 0 was for the one before it
    assert row["late_bytes"] == VA_BLOCK_BYTES


def test_a_prefetch_to_the_cpu_is_late_if_the_cpu_faulted_first():
    copies = [copy(20, A, way="dtoh"), copy(15, A + VA_BLOCK_BYTES, way="dtoh", cause=FAULT)]
    copies += [copy(30, A + 2 * VA_BLOCK_BYTES, way="dtoh")]
    [row] = found(copies, [call(10, 60)]).to_dicts()
    assert (row["late_bytes"], row["outcome"]) == (VA_BLOCK_BYTES, "late")


# Early -----------------------------------------------------------------------------------------


def evicted(kernels, *more):
    out = copy(50, A, way="dtoh", cause=EVICTION)
    [row] = found([*blocks(20, A, 2), out, *more], [call(10, 45)], kernels).to_dicts()
    return [row[c] for c in ("evicted_bytes", "early_bytes", "wasted_bytes")] + [row["outcome"]]


ONE = VA_BLOCK_BYTES


def test_pages_that_are_evicted_before_any_work_starts_came_too_early():
    assert evicted([kernel(60, 70)]) == [ONE, ONE, ONE, "early"]


def test_pages_that_a_kernel_may_have_used_before_their_eviction_did_not():
    assert evicted([kernel(30, 40)]) == [ONE, 0, 0, "in_time"]


def test_a_kernel_that_ran_all_the_time_may_have_used_them_but_none_started():
    assert evicted([kernel(0, 100)]) == [ONE, ONE, 0, "early"]


@pytest.mark.parametrize("other", [{"device": 1}, {"pid": 2}])
def test_work_elsewhere_does_not_count(other):
    kernels = [kernel(30, 40, **other), kernel(60, 70)]
    assert evicted(kernels) == [ONE, ONE, ONE, "early"]


def test_an_explicit_copy_is_work_too():
    out = copy(50, A, way="dtoh", cause=EVICTION)
    copies = [*blocks(20, A, 2), out]
    [row] = found(copies, [call(10, 45)], memcpys=[kernel(30, 40)]).to_dicts()
    assert (row["early_bytes"], row["wasted_bytes"]) == (0, 0)


def test_pages_that_come_again_do_not_count_twice():
    more = [copy(65, A, cause=FAULT), copy(80, A, way="dtoh", cause=EVICTION)]
    assert evicted([kernel(60, 70)], *more) == [ONE, ONE, ONE, "early"]


def test_only_the_next_departure_counts():
    gone = copy(40, A, way="dtoh", cause=FAULT)
    assert evicted([kernel(60, 70)], gone) == [0, 0, ONE, "in_time"]


def test_pages_are_followed_one_by_one():
    half = {**copy(50, A, way="dtoh", cause=EVICTION), "bytes": MIB}
    [row] = found([*blocks(20, A, 2), half], [call(10, 45)], [kernel(60, 70)]).to_dicts()
    assert row["early_bytes"] == MIB


def test_without_any_recorded_work_nobody_can_say_what_was_too_early():
    assert evicted([]) == [ONE, None, None, "in_time"]


def test_pages_that_go_to_another_gpu_leave_this_one():
    gone = copy(40, A, way="dtod", cause=FAULT, device=1, src=0)
    [row] = found([*blocks(20, A, 2), gone], [call(10, 39)], [kernel(60, 70)]).to_dicts()
    assert (row["evicted_bytes"], row["wasted_bytes"]) == (0, ONE)


# Laws ------------------------------------------------------------------------------------------


def test_nothing_gives_an_empty_table():
    assert_frame_equal(found([]), USER_PREFETCHES.empty().collect())
    assert found([copy(20, A, cause=FAULT)], [call(1, 2, name="cudaFree_v3020")]).is_empty()


def test_processes_and_gpus_do_not_meet_and_a_null_is_one_of_its_own():
    copies, calls, kernels = [], [], []
    for pid in (1, 2, None):
        calls.append(call(10, 45, pid=pid, number=pid or 9))
        kernels.append(kernel(60, 70, pid=pid, device=None if pid is None else 0))
        copies += blocks(20, A, 2, pid=pid, device=None if pid is None else 0)
    copies.append(copy(50, A, way="dtoh", cause=EVICTION, pid=None, device=None))
    got = found(copies, calls, kernels).select("pid", "correlation_id", "early_bytes", "bytes")
    assert got.sort("pid").rows() == [
        (None, 9, ONE, 2 * ONE),
        (1, 1, 0, 2 * ONE),
        (2, 2, 0, 2 * ONE),
    ]


def test_rows_without_a_time_or_an_address_are_left_out():
    lost = [{**copy(20, B), "start_ns": None}, {**copy(21, A), "va": None}]
    got = found([*blocks(20, A, 2), *lost], [call(10, 45), {**call(1, 2), "start_ns": None}])
    assert got["bytes"].to_list() == [2 * VA_BLOCK_BYTES]


@cache
def sweep_ahead():
    """A program that prefetches more than the GPU holds, then works on it."""
    reads = Kernel("reads", 64, 256, (Stream(allocation="a"),))
    size = 8 * VA_BLOCK_BYTES
    return modelled(
        *(Allocate("a", size), HostTouch("a", write=True)),
        *(Prefetch("a"), Launch(reads), Synchronize(), Prefetch("a", CPU), Synchronize()),
        capacity_bytes=5 * VA_BLOCK_BYTES,
    )


def tables_of(ran):
    return record(ran.happened, ran.settings, "test")


def run(tables):
    names = ("migrations", "api_calls", "kernels", "copies", "memsets")
    return user_prefetches(*(tables[name].lazy() for name in names)).collect()


def test_a_prefetch_beyond_capacity_evicts_its_own_head():
    got = run(tables_of(sweep_ahead()))
    assert got["outcome"].to_list() == ["early", "in_time"]
    # eight blocks into room for five: the first three were gone before the kernel began
    assert got["early_bytes"].to_list() == [3 * VA_BLOCK_BYTES, None]
    assert got["wasted_bytes"].to_list() == [3 * VA_BLOCK_BYTES, None]


def test_the_order_of_rows_does_not_matter():
    tables = tables_of(sweep_ahead())
    mixed = {name: frame.sample(fraction=1, shuffle=True, seed=1) for name, frame in tables.items()}
    assert_frame_equal(run(mixed), run(tables))


def test_parts_that_are_looked_at_one_by_one_give_the_same(monkeypatch):
    tables = tables_of(sweep_ahead())
    whole = run(tables)
    monkeypatch.setattr("nsan.analysis.user_prefetch._PORTION", 1)
    assert_frame_equal(run(tables), whole)


def fates(tables):
    """What becomes of each prefetched page, page by page, in plain Python."""
    by_page = defaultdict(list)
    work = [
        (row["pid"], row["device_id"], row["start_ns"], row["end_ns"])
        for name in ("kernels", "copies", "memsets")
        for row in tables[name].iter_rows(named=True)
        if row["start_ns"] < row["end_ns"]
    ]
    for row in tables["migrations"].iter_rows(named=True):
        for page in range(row["va"] // PAGE_BYTES, -(-(row["va"] + row["bytes"]) // PAGE_BYTES)):
            here, there = row["direction"] == "dtoh", row["direction"] == "htod"
            source = row["device_id"] if here else None if there else row["src_device_id"]
            place = None if here else row["device_id"]
            by_page[page].append((row["start_ns"], row["end_ns"], source, place, row["cause_id"]))
    n = dict.fromkeys(("evicted", "early", "wasted"), 0)
    for moves in by_page.values():
        for _, end, _, place, cause in moves:
            if cause != USER or place is None:
                continue
            out = min((m for m in moves if m[2] == place and m[0] >= end), default=None)
            if out is None:
                continue
            begun = any(w[1] == place and end <= w[2] < out[0] for w in work)
            ran = any(w[1] == place and w[2] < out[0] and w[3] > end for w in work)
            n["wasted"] += not ran
            if out[4] == EVICTION:
                n["evicted"] += 1
                n["early"] += not begun
    return {name: pages * PAGE_BYTES for name, pages in n.items()}


@given(programs(), st.integers(0, 99))
@hypothesis.settings(
    max_examples=N, deadline=None, suppress_health_check=[hypothesis.HealthCheck.filter_too_much]
)
def test_random_programs_agree_with_pages_followed_one_by_one(made, seed):
    ran = run_to_end(*made)
    hypothesis.assume(ran.settings.host_profile.page_bytes == PAGE_BYTES)
    tables = tables_of(ran)
    migrations = tables["migrations"]
    hypothesis.assume((migrations["cause_id"] == USER).any())
    got = run({n: t.sample(fraction=1, shuffle=True, seed=seed) for n, t in tables.items()})
    assert got["bytes"].sum() == migrations.filter(pl.col("cause_id") == USER)["bytes"].sum()
    assert got["n_migrations"].sum() == (migrations["cause_id"] == USER).sum()
    sums = {name: got[f"{name}_bytes"].sum() for name in ("evicted", "early", "wasted")}
    expected = fates(tables)
    if not got["early_bytes"].is_not_null().any():
        expected |= {"early": 0, "wasted": 0}
    assert sums == expected


@given(programs())
@hypothesis.settings(
    max_examples=N, deadline=None, suppress_health_check=[hypothesis.HealthCheck.filter_too_much]
)
def test_modelled_copies_within_a_call_are_tied_to_it(made):
    tables = tables_of(run_to_end(*made))
    user = tables["migrations"].filter(pl.col("cause_id") == USER)
    calls = tables["api_calls"].filter(pl.col("name").str.contains("Prefetch"))
    own = dict.fromkeys(calls["correlation_id"], 0)
    for start, size in user.select("start_ns", "bytes").iter_rows():
        holds = (calls["start_ns"] <= start) & (start < calls["end_ns"])
        # a prefetch that was queued behind a kernel copies after its call
        hypothesis.assume(holds.any())
        [number] = calls.filter(holds)["correlation_id"]
        own[number] += size
    # what goes by way of the host is two rows of one call
    sums = run(tables).group_by("correlation_id").agg(pl.col("bytes").sum())
    assert dict(sums.iter_rows()) == own
