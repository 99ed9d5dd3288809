"""Residency against page sets: by hand, on modelled programs and on the samples' truth."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import hypothesis
import polars as pl
import pytest
from hypothesis import given
from polars.testing import assert_frame_equal
from programs import modelled, programs, residency_changes, run_to_end

import nsan
from nsan.analysis.memory.page_histories import lives
from nsan.analysis.memory.residency import (
    residency_checks,
    residency_runs,
    resident_bytes_over_time,
)
from nsan.model.access import Stream
from nsan.model.program import (
    Advise,
    Allocate,
    Free,
    HostTouch,
    Kernel,
    Launch,
    Prefetch,
    Synchronize,
)
from nsan.model.recording import BASE_VA, record
from nsan.schema import ALLOCATIONS, MIGRATIONS
from nsan.units import KIB, MIB
from nsan.uvm.constants import PAGE_BYTES, VA_BLOCK_BYTES

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 15
SAMPLES = Path(__file__).parents[2] / "sample_data" / "model"
NAMES = sorted(path.name for path in SAMPLES.iterdir() if (path / "truth").is_dir())
GIVEN_BACK = {"copied", "kept"}


def page(n):
    return n * PAGE_BYTES


def copy(end_ns, way, va=0, size=PAGE_BYTES, *, device=0, pid=1, cause=2, source=None):
    """A migration of 10 ns."""
    return {
        "start_ns": None if end_ns is None else end_ns - 10,
        "end_ns": end_ns,
        "pid": pid,
        "device_id": device,
        "va": va,
        "bytes": size,
        "direction": way,
        "cause_id": cause,
        "src_device_id": source,
    }


def allocation(alloc_ns, free_ns, va=0, size=VA_BLOCK_BYTES, *, pid=1, kind="managed"):
    return {
        "alloc_ns": alloc_ns,
        "free_ns": free_ns,
        "pid": pid,
        "device_id": 0,
        "va": va,
        "bytes": size,
        "kind": kind,
    }


def table(of, rows):
    schema = of.schema
    columns = {name: [row.get(name) for row in rows] for name in schema}
    return pl.LazyFrame(columns, schema=schema)


def runs(migrations, allocations=()):
    found = residency_runs(table(MIGRATIONS, migrations), table(ALLOCATIONS, allocations))
    return found.collect()


def stays(frame):
    """The rows without process, allocation and kind."""
    return frame.select(
        "device_id", "va", "bytes", "arrive_ns", "leave_ns", "arrival", "departure"
    ).rows()


# By hand -----------------------------------------------------------------------------------------


def test_a_page_is_resident_from_the_end_of_its_copy_in_to_the_end_of_its_copy_out():
    got = runs([copy(100, "htod"), copy(300, "dtoh")])
    assert stays(got) == [(0, 0, 4096, 100, 300, "copied", "moved")]
    assert got["kind"].to_list() == ["derived"]


def test_an_eviction_and_the_end_of_the_capture_are_told_apart():
    got = runs([copy(100, "htod"), copy(300, "dtoh", cause=4), copy(500, "htod")])
    assert [row[3:] for row in stays(got)] == [
        (100, 300, "copied", "evicted"),
        (500, None, "copied", "capture_end"),
    ]


def test_a_copy_that_takes_a_part_cuts_the_run_there_and_nowhere_else():
    got = runs([copy(100, "htod", 0, page(16)), copy(300, "dtoh", page(4), page(2))])
    assert sorted(row[1:5] for row in stays(got)) == [
        (0, page(4), 100, None),
        (page(4), page(2), 100, 300),
        (page(6), page(10), 100, None),
    ]
    assert got["bytes"].sum() == page(16)


def test_pages_of_several_copies_that_leave_together_stay_apart_by_their_arrival():
    got = runs([copy(100, "htod", 0), copy(200, "htod", page(1)), copy(300, "dtoh", 0, page(2))])
    assert [row[1:5] for row in stays(got)] == [(0, 4096, 100, 300), (4096, 4096, 200, 300)]


def test_pages_that_several_copies_take_stay_apart_and_those_of_one_copy_are_one_row():
    got = runs(
        [copy(100, "htod", 0, page(3)), copy(300, "dtoh"), copy(400, "dtoh", page(1), page(2))]
    )
    assert [row[1:5] for row in stays(got)] == [
        (0, page(1), 100, 300),
        (page(1), page(2), 100, 400),
    ]


def test_a_copy_between_gpus_leaves_the_one_and_reaches_the_other():
    got = runs([copy(100, "htod", device=0), copy(200, "dtod", device=1, source=0)])
    assert [(row[0], *row[3:]) for row in stays(got)] == [
        (0, 100, 200, "copied", "moved"),
        (1, 200, None, "copied", "capture_end"),
    ]


def test_a_copy_between_gpus_without_a_known_source_takes_from_nobody():
    got = runs([copy(100, "htod", device=0), copy(200, "dtod", device=1)])
    assert [(row[0], row[4]) for row in stays(got)] == [(0, None), (1, None)]


def test_what_leaves_without_having_come_was_first_touched_at_an_unknown_time():
    got = runs([copy(300, "dtoh")], [allocation(20, None)])
    assert stays(got) == [(0, 0, 4096, None, 300, "first_touch", "moved")]
    assert got.select("begin_ns", "kind").rows() == [(20, "reconstructed")]


def test_what_leaves_twice_was_kept_by_the_first_copy():
    got = runs([copy(100, "htod"), copy(300, "dtoh"), copy(500, "dtoh")])
    assert [row[3:] for row in stays(got)] == [
        (100, 300, "copied", "moved"),
        (300, 500, "kept", "moved"),
    ]


def test_what_comes_twice_left_unseen_and_no_later_than_it_came_again():
    got = runs([copy(100, "htod"), copy(300, "htod")])
    assert [row[3:] for row in stays(got)] == [
        (100, 300, "copied", "unseen"),
        (300, None, "copied", "capture_end"),
    ]
    assert got["kind"].to_list() == ["reconstructed", "derived"]


def test_a_release_ends_residency():
    got = runs([copy(100, "htod")], [allocation(50, 400)])
    assert [row[3:] for row in stays(got)] == [(100, 400, "copied", "freed")]


def test_a_release_of_memory_from_before_the_capture_ends_residency_too():
    got = runs([copy(100, "htod")], [allocation(None, 400)])
    assert [row[3:] for row in stays(got)] == [(100, 400, "copied", "freed")]


def test_a_reused_address_starts_anew():
    got = runs([copy(100, "htod"), copy(600, "dtoh")], [allocation(50, 400), allocation(500, None)])
    assert [row[3:] for row in stays(got)] == [
        (None, 600, "first_touch", "moved"),
        (100, 400, "copied", "freed"),
    ]


def test_a_reused_address_starts_anew_although_the_release_was_not_recorded():
    got = runs(
        [copy(100, "htod"), copy(600, "dtoh")], [allocation(50, None), allocation(500, None)]
    )
    assert [row[3:] for row in stays(got)] == [
        (None, 600, "first_touch", "moved"),
        (100, 500, "copied", "freed"),
    ]


def test_a_block_lives_until_the_last_allocation_in_it_goes():
    small = [allocation(50, 400, 0, 512), allocation(60, 700, 512, 512)]
    got = runs([copy(100, "htod", page(100))], small)
    assert [row[3:] for row in stays(got)] == [(100, 700, "copied", "freed")]


def test_device_memory_at_the_same_address_ends_nothing():
    got = runs([copy(100, "htod")], [allocation(50, 400, kind="device")])
    assert [row[4] for row in stays(got)] == [None]


def test_a_release_of_another_process_ends_nothing():
    got = runs([copy(100, "htod", pid=1)], [allocation(50, 400, pid=2)])
    assert [row[4] for row in stays(got)] == [None]


def test_processes_and_gpus_never_mix_and_null_is_one_of_its_own():
    keys = [(1, 0), (1, 1), (2, 0), (None, 0), (1, None), (None, None)]
    rows = [copy(100 + i, "htod", pid=pid, device=gpu) for i, (pid, gpu) in enumerate(keys)]
    rows += [copy(200 + i, "dtoh", pid=pid, device=gpu) for i, (pid, gpu) in enumerate(keys)]
    got = runs(rows).select("pid", "device_id", "arrive_ns", "leave_ns").rows()
    expected = [(*key, 100 + i, 200 + i) for i, key in enumerate(keys)]
    assert sorted(got, key=str) == sorted(expected, key=str)


def test_rows_without_time_address_or_size_are_left_out():
    rows = [copy(None, "htod"), copy(9, "htod", va=None), copy(9, "htod", size=None)]
    assert runs(rows).is_empty()
    assert runs(rows).schema == runs([]).schema


def test_where_starts_are_coarse_the_sequence_decides():
    rows = [
        copy(110, "htod") | {"start_ns": 100, "sequence": 1},
        copy(105, "dtoh") | {"start_ns": 100, "sequence": 2},
    ]
    assert [row[3:] for row in stays(runs(rows))] == [(110, 110, "copied", "moved")]


def test_addresses_at_the_top_of_the_range_do_not_wrap():
    top = (1 << 64) - 2 * VA_BLOCK_BYTES
    got = runs([copy(100, "htod", top)], [allocation(50, 400, top)])
    assert stays(got) == [(0, top, 4096, 100, 400, "copied", "freed")]


def test_lives_of_an_address_follow_each_other():
    rows = [allocation(500, None), allocation(50, 400), allocation(60, 60), allocation(None, 20)]
    got = lives(table(ALLOCATIONS, rows).collect()).sort("begin_ns")
    assert got.select("begin_ns", "free_ns").rows() == [(None, 20), (50, 400), (500, None)]


def test_steps_add_up_what_is_known_and_what_is_back_filled():
    got = resident_bytes_over_time(
        table(MIGRATIONS, [copy(100, "htod"), copy(300, "dtoh", 0, page(2))]),
        table(ALLOCATIONS, [allocation(20, None)]),
    ).collect()
    columns = ["start_ns", "end_ns", "resident_bytes", "backfilled_bytes"]
    assert got.select(columns).rows() == [
        (20, 100, 0, 4096),
        (100, 300, 4096, 4096),
        (300, None, 0, 0),
    ]


def test_checks_count_what_does_not_fit_and_close():
    rows = [
        *(copy(100, "htod"), copy(200, "htod"), copy(300, "dtoh"), copy(400, "dtoh")),
        *(copy(500, "dtoh", page(7), page(3), cause=4), copy(600, "htod", page(9), cause=1)),
    ]
    got = residency_checks(table(MIGRATIONS, rows), table(ALLOCATIONS, [])).collect()
    assert got.drop("pid", "device_id").to_dicts() == [
        {
            "copied_bytes": page(3),
            "first_touch_bytes": page(3),
            "kept_bytes": page(1),
            "moved_bytes": page(2),
            "evicted_bytes": page(3),
            "freed_bytes": 0,
            "unseen_bytes": page(1),
            "capture_end_bytes": page(1),
            "inconsistent_bytes": page(2),
            "total_bytes": page(7),
        }
    ]


# Against the truth -------------------------------------------------------------------------------


class Truth:
    """Plain sets of pages per GPU, replayed change by change."""

    def __init__(self, changes, page_bytes):
        self.page_bytes = page_bytes
        self.changes = changes.sort("time_ns", "arrives", maintain_order=True).to_dicts()
        self.times = sorted({row["time_ns"] for row in self.changes})

    def instants(self, n, seed=1):
        """Some times of change and some in between, in order."""
        if not self.times:
            return []
        rng = random.Random(seed)
        times = rng.sample(self.times, min(n // 2, len(self.times)))
        return sorted(times + [rng.randint(0, self.times[-1] + 9) for _ in range(n - len(times))])

    def at(self, instants):
        """For each instant: {gpu: {page: how it came}}."""
        rows, held = iter(self.changes), {}
        row = next(rows, None)
        for time in instants:
            while row is not None and row["time_ns"] <= time:
                first, n = row["va"] // self.page_bytes, row["bytes"] // self.page_bytes
                pages = held.setdefault(row["processor"], {})
                for one in range(first, first + n):
                    if row["arrives"]:
                        pages[one] = row["reason"]
                    else:
                        del pages[one]
                row = next(rows, None)
            yield time, held


def claimed(found, time, page_bytes):
    """Pages by GPU that the runs say were resident at a time."""
    leave = pl.col("leave_ns")
    here = found.filter(pl.col("arrive_ns") <= time, leave.is_null() | (time < leave))
    pages = {}
    for device, va, size in here.select("device_id", "va", "bytes").rows():
        first = va // page_bytes
        pages.setdefault(device, set()).update(range(first, first + size // page_bytes))
    return pages


def first_touched(held, gpu):
    return {one for one, reason in held.get(gpu, {}).items() if reason == "first_touch"}


def check_against(found, truth, n, duplicated=frozenset()):
    """Claims are the truth less first-touched pages, but for pages under read-mostly advice."""
    wrong = 0
    for time, held in truth.at(truth.instants(n)):
        claims = claimed(found, time, truth.page_bytes)
        for gpu in (set(held) | set(claims)) - {-1}:
            expected = set(held.get(gpu, {})) - first_touched(held, gpu)
            differ = claims.get(gpu, set()) ^ expected
            wrong += len(differ)
            assert differ <= duplicated, (time, gpu)
    return wrong


def sample(name):
    trace = nsan.open_trace(SAMPLES / name / f"{name}.sqlite")
    changes = pl.read_parquet(SAMPLES / name / "truth" / "residency_changes.parquet")
    return trace, Truth(changes, PAGE_BYTES)


@pytest.mark.parametrize("name", NAMES)
def test_residency_of_every_sample_is_the_truth_less_first_touch_at_100_instants(name):
    trace, truth = sample(name)
    found = residency_runs(trace.migrations, trace.allocations).collect()
    check_against(found, truth, 100)


def test_what_is_back_filled_is_what_the_gpu_first_touched_and_gave_away():
    """first_touch: the CPU takes 8 MiB of what the GPU touched; 24 MiB are released unseen."""
    trace, truth = sample("first_touch")
    touched = [row for row in truth.changes if row["processor"] == 0 and row["arrives"]]
    gone = [row for row in truth.changes if row["processor"] == 0 and row["reason"] == "copied"]
    found = residency_runs(trace.migrations, trace.allocations).collect()
    assert {row["reason"] for row in touched} == {"first_touch"}
    assert found["arrival"].unique().to_list() == ["first_touch"]
    assert found["bytes"].sum() == sum(row["bytes"] for row in gone) == 8 * MIB
    ends = {(row["va"], row["time_ns"]) for row in gone}
    assert set(found.select("va", "leave_ns").rows()) == ends


@pytest.mark.parametrize("name", NAMES)
def test_steps_of_every_sample_are_the_sums_of_the_truth(name):
    """In no sample the driver drops a duplicate of a GPU; resident is truth less first touch."""
    trace, truth = sample(name)
    steps = resident_bytes_over_time(trace.migrations, trace.allocations).collect()
    for time, held in truth.at(truth.instants(30)):
        for gpu in set(held) - {-1}:
            row = steps.filter(
                pl.col("device_id") == gpu,
                pl.col("start_ns") <= time,
                pl.col("end_ns").is_null() | (pl.col("end_ns") > time),
            )
            known = len(held[gpu]) - len(first_touched(held, gpu))
            assert row["resident_bytes"].sum() == known * PAGE_BYTES


def of_run(ran):
    """Runs and truth of a modelled program, its tables, and the pages under read-mostly advice."""
    tables = record(ran.happened, ran.settings, "test")
    found = residency_runs(tables["migrations"].lazy(), tables["allocations"].lazy()).collect()
    truth = Truth(pl.DataFrame(_changes(ran), infer_schema_length=None), ran.page_bytes)
    return found, truth, tables


def _changes(ran):
    return residency_changes(ran) or [
        {"time_ns": 0, "arrives": False, "va": 0, "bytes": 0, "processor": -1, "reason": ""}
    ]


def read_mostly_pages(ran):
    """Addresses // page size of whole allocations that the program ever advised read-mostly."""
    names = {
        operation.allocation
        for operation in ran.program.operations
        if isinstance(operation, Advise) and operation.advice == "read_mostly"
    }
    pages = set()
    for life in ran.happened.lives:
        if life.name in names:
            first, last = BASE_VA + life.start, BASE_VA + life.start + life.n_bytes
            pages.update(range(first // ran.page_bytes, -(-last // ran.page_bytes)))
    return pages


@hypothesis.settings(max_examples=N)
@given(programs())
def test_residency_of_random_programs_is_the_truth_but_for_first_touch_and_duplicates(drawn):
    ran = run_to_end(*drawn)
    found, truth, _ = of_run(ran)
    check_against(found, truth, 100, read_mostly_pages(ran))


@hypothesis.settings(max_examples=N)
@given(programs())
def test_stays_of_a_page_on_a_gpu_never_overlap_and_bytes_close(drawn):
    ran = run_to_end(*drawn)
    found, _, tables = of_run(ran)
    by_page = {}
    for row in found.iter_rows(named=True):
        first = row["va"] // ran.page_bytes
        for one in range(first, first + row["bytes"] // ran.page_bytes):
            key = row["device_id"], one
            by_page.setdefault(key, []).append((row["arrive_ns"], row["leave_ns"]))
    for spans in by_page.values():
        ends = sorted((-1 if a is None else a, 1 << 62 if b is None else b) for a, b in spans)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))
    moved = tables["migrations"].filter(pl.col("direction") != "dtoh")["bytes"].sum()
    checks = residency_checks(tables["migrations"].lazy(), tables["allocations"].lazy()).collect()
    assert checks["copied_bytes"].sum() == moved
    ways = [
        ("copied_bytes", "first_touch_bytes", "kept_bytes"),
        ("moved_bytes", "evicted_bytes", "freed_bytes", "unseen_bytes", "capture_end_bytes"),
    ]
    for columns in ways:
        assert checks.select(pl.sum_horizontal(columns) == pl.col("total_bytes")).to_series().all()


@hypothesis.settings(max_examples=N)
@given(programs())
def test_without_read_mostly_advice_nothing_is_inconsistent(drawn):
    program, settings = drawn
    ran = run_to_end(program, settings)
    hypothesis.assume(not read_mostly_pages(ran))
    tables = of_run(ran)[2]
    checks = residency_checks(tables["migrations"].lazy(), tables["allocations"].lazy()).collect()
    assert checks["inconsistent_bytes"].sum() == 0


def _reads(name, gpu=0, *, write=False):
    stream = Stream(allocation=name, write=write)
    return Launch(Kernel("reads", 1, 256, (stream,)), gpu)


def test_a_write_of_the_cpu_drops_a_duplicate_silently_and_the_next_copy_shows_it():
    """Read-mostly: until the page comes again it is claimed although it is gone."""
    ran = modelled(
        *(Allocate("a", 64 * KIB), HostTouch("a", write=True), Advise("a", "read_mostly")),
        *(_reads("a"), Synchronize(), HostTouch("a", write=True), _reads("a"), Synchronize()),
    )
    found, truth, tables = of_run(ran)
    assert {row["reason"] for row in truth.changes} >= {"invalidated"}
    assert check_against(found, truth, 100, read_mostly_pages(ran)) > 0
    checks = residency_checks(tables["migrations"].lazy(), tables["allocations"].lazy()).collect()
    assert checks["unseen_bytes"].to_list() == [64 * KIB]
    assert checks["kept_bytes"].to_list() == [0]


def test_the_source_of_a_duplicate_keeps_it_and_its_next_copy_shows_it():
    """Read-mostly: GPU 0 gives to GPU 1, keeps its copy, and gives it to GPU 2."""
    ran = modelled(
        *(Allocate("a", 2 * MIB), Prefetch("a", 0), Synchronize(), Advise("a", "read_mostly")),
        *(_reads("a", 1), Synchronize(), _reads("a", 2), Synchronize()),
        n_gpus=3,
    )
    found, truth, _ = of_run(ran)
    assert check_against(found, truth, 100, read_mostly_pages(ran)) > 0
    ways = found.filter(pl.col("device_id") == 0)["arrival"].unique().sort().to_list()
    assert ways == ["first_touch", "kept"]


def test_reused_addresses_leak_only_where_allocations_are_unknown():
    ran = modelled(
        *(Allocate("a", 2 * MIB), HostTouch("a", write=True), _reads("a"), Synchronize()),
        *(Free("a"), Allocate("b", 2 * MIB), HostTouch("b", write=True), Synchronize()),
    )
    found, truth, tables = of_run(ran)
    check_against(found, truth, 100)
    blind = residency_runs(tables["migrations"].lazy(), ALLOCATIONS.empty()).collect()
    last = truth.times[-1]
    assert sum(map(len, claimed(found, last, ran.page_bytes).values())) == 0
    assert sum(map(len, claimed(blind, last, ran.page_bytes).values())) == 2 * MIB // PAGE_BYTES


@pytest.mark.parametrize("function", [residency_runs, resident_bytes_over_time, residency_checks])
def test_rows_in_any_order_give_the_same_answer(function):
    trace, _ = sample("two_gpus")
    rows, allocations = trace.migrations.collect(), trace.allocations.collect()
    shuffled = rows.sample(fraction=1.0, shuffle=True, seed=3)
    again = function(shuffled.lazy(), allocations.reverse().lazy()).collect()
    assert_frame_equal(again, function(rows.lazy(), allocations.lazy()).collect())


@pytest.mark.parametrize("function", [residency_runs, resident_bytes_over_time, residency_checks])
def test_an_empty_trace_gives_an_empty_table_of_the_same_columns(function):
    empty = function(MIGRATIONS.empty(), ALLOCATIONS.empty())
    full = function(table(MIGRATIONS, [copy(100, "htod")]), ALLOCATIONS.empty())
    assert empty.collect().is_empty()
    assert empty.collect().schema == full.collect().schema
