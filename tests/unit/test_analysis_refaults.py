"""Refaults and ping-pong: by hand, against the model's truth and against real thrashing rows."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import polars as pl
import pytest
from hypothesis import given
from polars.testing import assert_frame_equal
from programs import modelled, programs, run_to_end

import nsan
from nsan.analysis.memory.ping_pong import ping_pong, ping_pong_by_va_block
from nsan.analysis.memory.refaults import evictions, refault_totals, refaults, refaults_by_va_block
from nsan.model.access import Stream
from nsan.model.program import Allocate, Free, HostTouch, Kernel, Launch, Synchronize
from nsan.model.recording import record
from nsan.model.truth import TRUTH_TABLES
from nsan.schema import ALLOCATIONS, MIGRATIONS
from nsan.units import MIB
from nsan.uvm.constants import PAGE_BYTES, VA_BLOCK_BYTES

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 15
ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_data" / "model"
NAMES = sorted(path.name for path in SAMPLES.iterdir() if (path / "truth").is_dir())
LOGS = ROOT / "tests" / "data" / "nvprof"


def page(n):
    return n * PAGE_BYTES


def copy(start_ns, way, va=0, size=PAGE_BYTES, *, device=0, pid=1, cause=2, source=None):
    """A migration of 10 ns."""
    return {
        "start_ns": start_ns,
        "end_ns": None if start_ns is None else start_ns + 10,
        "pid": pid,
        "device_id": device,
        "va": va,
        "bytes": size,
        "direction": way,
        "cause_id": cause,
        "src_device_id": source,
    }


def evict(start_ns, *args, **kwargs):
    return copy(start_ns, "dtoh", *args, cause=4, **kwargs)


def allocation(alloc_ns, free_ns, va=0, size=VA_BLOCK_BYTES):
    rows = {"alloc_ns": alloc_ns, "free_ns": free_ns, "pid": 1, "va": va, "bytes": size}
    return rows | {"kind": "managed", "device_id": 0}


def table(of, rows):
    columns = {name: [row.get(name) for row in rows] for name in of.schema}
    return pl.LazyFrame(columns, schema=of.schema)


def of(function, rows, allocations=None, **options):
    """Run an analysis on rows; with allocations where it reads them."""
    frames = [table(MIGRATIONS, rows)]
    if allocations is not None:
        frames.append(table(ALLOCATIONS, allocations))
    return function(*frames, **options).collect()


def page_by_page(frame, columns, page_bytes=PAGE_BYTES):
    """Expand runs to pages: the set of (address, values), each once."""
    found = []
    for row in frame.iter_rows(named=True):
        pages = range(row["va"], row["va"] + row.get("bytes", page_bytes), page_bytes)
        found += [(va, *(row[name] for name in columns)) for va in pages]
    assert len(found) == len(set(found))
    return set(found)


def truth(name, what):
    return pl.read_parquet(SAMPLES / name / "truth" / f"{what}.parquet")


def opened(name):
    return nsan.open_trace(SAMPLES / name / f"{name}.sqlite")


# Refaults by hand --------------------------------------------------------------------------------


def test_a_page_that_comes_back_after_an_eviction_is_a_refault():
    got = of(refaults, [copy(0, "htod"), evict(100), copy(500, "htod", cause=3)], [])
    assert got.select("va", "bytes", "evicted_ns", "time_ns", "distance_ns").rows() == [
        (0, 4096, 110, 510, 400)
    ]
    assert got.select("is_same_device", "is_premature", "is_by_fault").rows() == [(True,) * 3]


def test_a_page_that_a_fault_of_the_cpu_took_is_no_refault():
    assert of(refaults, [copy(0, "htod"), copy(100, "dtoh"), copy(500, "htod")], []).is_empty()


def test_the_distance_counts_what_came_to_the_gpu_in_between_and_not_the_page_itself():
    rows = [
        *(copy(100, "htod", page(500), page(90)), evict(100), copy(105, "htod", page(600))),
        *(copy(200, "htod", page(700), page(5)), copy(300, "htod", page(800), device=1)),
        *(copy(490, "htod", page(900), page(2)), copy(495, "htod", page(950), page(7))),
        copy(500, "htod"),
    ]
    # Ends after 110 and not after 500: 1, 5 and 2 pages; what came to another GPU does not count.
    assert of(refaults, rows, [])["distance_bytes"].to_list() == [page(8)]


def test_premature_is_a_shorter_distance_than_the_option():
    rows = [evict(100), copy(500, "htod")]
    got = [of(refaults, rows, [], premature_ns=n)["is_premature"].item() for n in (400, 401)]
    assert got == [False, True]


def test_a_push_ends_with_its_last_copy_on_both_sides():
    rows = [
        *(evict(100, 0, page(2)), evict(111, page(2))),
        *(copy(500, "htod"), copy(511, "htod", page(1), page(2), cause=3)),
    ]
    got = of(refaults, rows, [])
    assert got.select("va", "bytes", "evicted_ns", "time_ns").rows() == [(0, page(3), 121, 521)]


def test_pages_that_come_to_another_gpu_are_told_apart_and_end_the_story():
    rows = [evict(100, 0, page(2)), copy(300, "htod", device=1), copy(500, "htod", 0, page(2))]
    got = of(refaults, rows, [])
    columns = ["device_id", "to_device_id", "va", "bytes", "is_same_device", "is_premature"]
    assert got.select(columns).rows() == [
        (0, 1, 0, page(1), False, False),
        (0, 0, page(1), page(1), True, True),
    ]
    totals = of(refault_totals, rows, [])
    amounts = ["evicted_bytes", "refaulted_bytes", "elsewhere_bytes", "unreturned_bytes"]
    assert totals.select("pid", "device_id", *amounts).rows() == [
        (1, 0, page(2), page(1), page(1), 0)
    ]


def test_what_comes_to_a_reused_address_is_no_refault():
    rows = [evict(100), copy(500, "htod")]
    assert of(refaults, rows, [allocation(0, 200), allocation(300, None)]).is_empty()
    assert of(refaults, rows, [allocation(0, 800)]).height == 1


def test_an_eviction_after_an_unseen_arrival_takes_the_story_over():
    got = of(refaults, [evict(100), evict(300), copy(500, "htod")], [])
    assert got["evicted_ns"].to_list() == [310]
    blocks = of(refaults_by_va_block, [evict(100), evict(300), copy(500, "htod")], [])
    assert blocks.select("n_evictions", "refaulted_bytes", "unreturned_bytes").rows() == [
        (2, page(1), page(1))
    ]


def test_evictions_close_and_name_their_first_refault():
    rows = [
        *(evict(100, 0, page(4)), evict(100, VA_BLOCK_BYTES, page(3))),
        *(copy(500, "htod", page(1)), copy(700, "htod", page(3))),
    ]
    got = of(evictions, rows, [], premature_ns=500)
    amounts = ["evicted_bytes", "refaulted_bytes", "premature_bytes", "unreturned_bytes"]
    assert got.select("eviction_id", "va_block", *amounts, "back_ns").rows() == [
        (0, 0, page(4), page(2), page(1), page(2), 510),
        (1, 1, page(3), 0, 0, page(3), None),
    ]


def test_blocks_with_most_refaulted_bytes_come_first():
    rows = [
        *(evict(100, 0, page(9)), evict(200, VA_BLOCK_BYTES, page(3))),
        *(copy(500, "htod", 0), copy(700, "htod", VA_BLOCK_BYTES, page(3))),
    ]
    got = of(refaults_by_va_block, rows, [])
    assert got.select("va_block", "refaulted_bytes", "refaulted_fraction").rows() == [
        (1, page(3), 1.0),
        (0, page(1), 1 / 9),
    ]


def test_processes_never_mix():
    rows = [evict(100, pid=1), copy(500, "htod", pid=2), evict(100, pid=None)]
    assert of(refaults, rows, []).is_empty()
    both = [*rows, copy(900, "htod", pid=None), copy(900, "htod", pid=1)]
    assert of(refaults, both, [])["pid"].to_list() == [None, 1]


# Refaults against the truth ----------------------------------------------------------------------

RETURN = ["time_ns", "evicted_ns", "to_device_id"]
TRUE_RETURN = ["time_ns", "evicted_ns", "device_id"]


@pytest.mark.parametrize("name", NAMES)
def test_refaults_of_every_sample_are_the_truth_page_for_page(name):
    trace = opened(name)
    got = refaults(trace.migrations, trace.allocations).collect()
    known = truth(name, "refaults")
    assert page_by_page(got, RETURN) == page_by_page(known, TRUE_RETURN)


@pytest.mark.parametrize("name", ["oversubscribed_sweep", "random"])
def test_evictions_of_a_sample_are_the_truth(name):
    trace = opened(name)
    got = evictions(trace.migrations, trace.allocations).collect()
    known = truth(name, "evictions").select(
        "device_id", pl.col("va") // VA_BLOCK_BYTES, "end_ns", "copied_bytes"
    )
    mine = got.select("device_id", "va_block", "end_ns", "evicted_bytes")
    assert sorted(mine.rows()) == sorted(known.rows())
    total = refault_totals(trace.migrations, trace.allocations).collect()
    assert total["refaulted_bytes"].sum() == truth(name, "refaults")["bytes"].sum()


@hypothesis.settings(max_examples=N)
@given(programs())
def test_refaults_of_random_programs_are_the_truth_page_for_page(drawn):
    ran = run_to_end(*drawn)
    tables = record(ran.happened, ran.settings, "test")
    migrations, allocations = tables["migrations"].lazy(), tables["allocations"].lazy()
    got = refaults(migrations, allocations).collect()
    known = TRUTH_TABLES["refaults"].build(ran.happened, ran.settings, {})
    page_bytes = ran.page_bytes
    assert page_by_page(got, RETURN, page_bytes) == page_by_page(known, TRUE_RETURN, page_bytes)
    lists = evictions(migrations, allocations).collect()
    evicted = tables["migrations"].filter(pl.col("cause_id") == 4)["bytes"].sum()
    assert lists["evicted_bytes"].sum() == evicted
    assert lists["refaulted_bytes"].sum() + lists["elsewhere_bytes"].sum() == known["bytes"].sum()
    parts = pl.sum_horizontal("refaulted_bytes", "elsewhere_bytes", "unreturned_bytes")
    assert lists.select(parts == pl.col("evicted_bytes")).to_series().all()
    assert (lists["unreturned_bytes"] >= 0).all()


def _reads(name):
    return Launch(Kernel("reads", 1, 256, (Stream(allocation=name),)), 0)


def test_a_release_between_eviction_and_return_parts_them():
    """Of a, only half fits: b evicts it; then a's address is used again."""
    ran = modelled(
        *(Allocate("a", 2 * MIB), Allocate("b", 2 * MIB)),
        *(HostTouch("a", write=True), HostTouch("b", write=True)),
        *(_reads("a"), _reads("b"), Synchronize(), Free("a"), Allocate("c", 2 * MIB)),
        *(HostTouch("c", write=True), _reads("c"), Synchronize()),
        capacity_bytes=2 * MIB,
    )
    tables = record(ran.happened, ran.settings, "test")
    migrations = tables["migrations"].lazy()
    assert refaults(migrations, tables["allocations"].lazy()).collect().is_empty()
    blind = refaults(migrations, ALLOCATIONS.empty()).collect()
    assert blind["bytes"].sum() == 2 * MIB


# Ping-pong by hand -------------------------------------------------------------------------------


def test_moves_to_another_processor_within_the_window_are_a_chain():
    rows = [copy(0, "htod"), copy(400, "dtoh"), copy(900, "htod"), copy(1401, "dtoh")]
    got = of(ping_pong, rows, window_ns=500)
    assert got.select("n_moves", "n_chains", "first_ns", "last_ns", "moved_bytes").rows() == [
        (3, 1, 0, 910, page(3))
    ]
    assert got["processors"].to_list() == ["CPU, GPU 0"]


def test_a_move_to_the_same_place_ends_a_chain():
    rows = [copy(0, "htod"), copy(100, "dtoh"), copy(200, "dtoh"), copy(300, "htod")]
    got = of(ping_pong, rows)
    assert got.select("n_moves", "n_chains", "n_moves_total").rows() == [(2, 2, 4)]


def test_one_move_is_no_ping_pong():
    assert of(ping_pong, [copy(0, "htod"), copy(600_000, "dtoh")]).is_empty()


@pytest.mark.parametrize("cause", [1, 4, 5])
def test_moves_that_no_fault_made_do_not_count(cause):
    assert of(ping_pong, [copy(0, "htod"), copy(100, "dtoh", cause=cause)]).is_empty()


def test_moves_of_unknown_cause_count_and_say_so():
    got = of(ping_pong, [copy(0, "htod", cause=None), copy(100, "dtoh")])
    assert got.select("n_moves", "kind").rows() == [(2, "reconstructed")]


def test_neighbours_with_equal_histories_are_one_row_and_others_are_not():
    rows = [copy(0, "htod", 0, page(8)), copy(100, "dtoh", page(2), page(3))]
    got = of(ping_pong, rows)
    assert got.select("va", "bytes", "moved_bytes").rows() == [(page(2), page(3), page(6))]


def test_a_chain_over_two_gpus_names_them():
    rows = [copy(0, "htod"), copy(100, "dtod", device=1, source=0), copy(200, "dtoh", device=1)]
    got = of(ping_pong, rows)
    assert got.select("n_moves", "processors").rows() == [(3, "CPU, GPU 0, GPU 1")]


def test_the_driver_counts_from_the_third_move_in_a_block_that_was_quiet():
    """Two services in which two processors meet come first: the fifth move is the third counted."""
    moves = [copy(100 * i, "dtoh" if i % 2 else "htod") for i in range(5)]
    four, five = (of(ping_pong, moves[:n], window_ns=100) for n in (4, 5))
    assert four.select("n_moves", "n_counted_moves", "is_thrashing").rows() == [(4, 2, False)]
    assert five.select("n_moves", "n_counted_moves", "is_thrashing").rows() == [(5, 3, True)]


def test_processors_that_met_on_another_page_of_the_block_are_enough():
    before = [copy(-300, "htod", page(5)), copy(-200, "dtoh", page(5))]
    moves = [copy(100 * i, "dtoh" if i % 2 else "htod") for i in range(3)]
    got = of(ping_pong, [*before, *moves]).filter(pl.col("va") == 0)
    assert got.select("n_moves", "n_counted_moves", "is_thrashing").rows() == [(3, 3, True)]


def test_blocks_add_their_pages_up():
    rows = [
        *(copy(0, "htod", 0, page(4)), copy(100, "dtoh", 0, page(1))),
        *(copy(100, "dtoh", page(2), page(2)), copy(200, "htod", page(2), page(2))),
    ]
    got = of(ping_pong_by_va_block, rows)
    columns = ["va_block", "bytes", "thrashing_bytes", "moved_bytes", "n_moves", "last_ns"]
    assert got.select(columns).rows() == [(0, page(3), 0, page(8), 3, 210)]


def test_ping_pong_of_one_process_is_not_that_of_another():
    assert of(ping_pong, [copy(0, "htod", pid=1), copy(100, "dtoh", pid=2)]).is_empty()


# Ping-pong against the truth ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_ping_pong_of_every_sample_is_the_truth_page_for_page(name):
    got = ping_pong(opened(name).migrations).collect()
    assert page_by_page(got, ["n_moves"]) == page_by_page(truth(name, "ping_pong"), ["n_moves"])


def test_thrashing_of_the_ping_pong_sample_is_where_the_driver_acted():
    got = ping_pong(opened("ping_pong").migrations).collect().filter("is_thrashing")
    acted = truth("ping_pong", "driver_events").filter(pl.col("kind") == "thrashing")
    assert page_by_page(got, []) == {(va,) for va in acted["va"].to_list()}
    assert len(page_by_page(got, [])) == 16


@hypothesis.settings(max_examples=N)
@given(programs())
def test_ping_pong_of_random_programs_is_the_truth_page_for_page(drawn):
    ran = run_to_end(*drawn)
    tables = record(ran.happened, ran.settings, "test")
    got = ping_pong(tables["migrations"].lazy(), window_ns=ran.settings.lapse_ns).collect()
    known = TRUTH_TABLES["ping_pong"].build(ran.happened, ran.settings, {})
    columns = ["n_moves"]
    assert page_by_page(got, columns, ran.page_bytes) == page_by_page(
        known, columns, ran.page_bytes
    )


def thrashing(path):
    """Pages found thrashing from the copies of a log, and those that its driver marked."""
    trace = nsan.open_trace(path)
    found = ping_pong(trace.migrations).collect().filter("is_thrashing")
    marked = trace.driver_events.filter(pl.col("kind") == "thrashing").collect()
    return page_by_page(found, []), {(va,) for va in marked["va"].to_list()}


def test_the_thrashing_of_a_real_log_is_found_from_its_copies_alone():
    """1024 x 1024 floats on a V100: the driver marks 16 pages, one region of 64 KiB."""
    found, marked = thrashing(ROOT / "sample_data" / "nvprof_hotspot_v100_1024.log.gz")
    assert len(marked) == 16
    assert found == marked


def test_a_real_log_without_thrashing_has_none():
    found, marked = thrashing(ROOT / "sample_data" / "nvprof_hotspot_v100_8192.log.gz")
    assert found == marked == set()


@pytest.mark.parametrize("side", [64, 128, 256, 512, 1024, 2048, 4096])
def test_thrashing_of_every_real_log_is_where_the_driver_marked_it(side):
    found, marked = thrashing(LOGS / f"v100_x86_hotspot_11_{side}.log.gz")
    assert len(marked) == (16 if side in {64, 512, 1024} else 0)
    assert found == marked


# Of all ------------------------------------------------------------------------------------------

WITH_ALLOCATIONS = [refaults, evictions, refaults_by_va_block, refault_totals]
ALONE = [ping_pong, ping_pong_by_va_block]


@pytest.mark.parametrize("function", [*WITH_ALLOCATIONS, *ALONE])
def test_rows_in_any_order_give_the_same_answer(function):
    name = "ping_pong" if function in ALONE else "oversubscribed_sweep"
    rows = opened(name).migrations.collect()
    shuffled = rows.sample(fraction=1.0, shuffle=True, seed=4)
    more = [] if function in ALONE else [ALLOCATIONS.empty()]
    first, again = (function(frame.lazy(), *more).collect() for frame in (rows, shuffled))
    assert first.height
    assert_frame_equal(first, again)


@pytest.mark.parametrize("function", [*WITH_ALLOCATIONS, *ALONE])
def test_an_empty_trace_gives_an_empty_table_of_the_same_columns(function):
    more = [] if function in ALONE else [ALLOCATIONS.empty()]
    full = [copy(None, "htod"), copy(0, "htod", va=None), evict(100), copy(500, "htod")]
    empty = function(MIGRATIONS.empty(), *more).collect()
    assert empty.is_empty()
    assert empty.schema == function(table(MIGRATIONS, full), *more).collect().schema
