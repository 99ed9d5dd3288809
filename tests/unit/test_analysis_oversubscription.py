"""Oversubscription and working sets: by hand, by plain sets, and on the samples."""

from __future__ import annotations

import json
import os
from pathlib import Path

import hypothesis
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

import nsan
from nsan.analysis.catalog import analyses_in
from nsan.analysis.memory import oversubscription, refaults, residency
from nsan.analysis.memory import ping_pong as page_ping_pong
from nsan.analysis.memory import working_set as working_sets
from nsan.analysis.memory.oversubscription import memory_ledger, oversubscription_factor
from nsan.analysis.memory.working_set import working_set, working_set_by_nvtx
from nsan.schema import ALLOCATIONS, DEVICES, GPU_FAULTS, MIGRATIONS, NVTX_RANGES
from nsan.units import MIB
from nsan.uvm.constants import PAGE_BYTES, VA_BLOCK_BYTES

N = 500 if os.environ.get("NSAN_SOAK") == "1" else 40
SAMPLES = Path(__file__).parents[2] / "sample_data" / "model"
NAMES = sorted(path.name for path in SAMPLES.iterdir() if (path / "truth").is_dir())
FREE = {"reserve_bytes": 0}


def page(n):
    return n * PAGE_BYTES


def copy(start_ns, way="htod", va=0, size=PAGE_BYTES, *, device=0, pid=1, cause=2):
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
    }


def allocation(alloc_ns, free_ns, va, size, *, pid=1, device=0, kind="managed"):
    return {
        "alloc_ns": alloc_ns,
        "free_ns": free_ns,
        "pid": pid,
        "device_id": device,
        "va": va,
        "bytes": size,
        "kind": kind,
    }


def gpu(device, size, *, pid=None):
    return {"device_id": device, "pid": pid, "total_memory_bytes": size}


def fault(start_ns, va, *, pid=1, device=0):
    return {"start_ns": start_ns, "pid": pid, "device_id": device, "va": va, "n_page_faults": 3}


def nvtx(range_id, start_ns, end_ns, *, pid=1, name="step"):
    return {
        "range_id": range_id,
        "start_ns": start_ns,
        "end_ns": end_ns,
        "pid": pid,
        "name": name,
    }


def table(of, rows):
    columns = {name: [row.get(name) for row in rows] for name in of.schema}
    return pl.LazyFrame(columns, schema=of.schema)


def memory(function, allocations, migrations=(), devices=(), **options):
    frames = (
        table(ALLOCATIONS, allocations),
        table(MIGRATIONS, list(migrations)),
        table(DEVICES, list(devices)),
    )
    return function(*frames, **options).collect()


def factors(*args, **options):
    return memory(oversubscription_factor, *args, **options).to_dicts()


def opened(name):
    return nsan.open_trace(SAMPLES / name / f"{name}.sqlite")


# The ledger --------------------------------------------------------------------------------------


def test_the_ledger_steps_with_allocations_releases_and_copies():
    rows = [
        allocation(100, 900, VA_BLOCK_BYTES, 600),
        allocation(200, None, 7 * VA_BLOCK_BYTES, 250, kind="device"),
    ]
    got = memory(memory_ledger, rows, [copy(290, va=VA_BLOCK_BYTES)], [gpu(0, 1250)], **FREE)
    columns = ["start_ns", "end_ns", "managed_bytes", "other_bytes", "resident_bytes"]
    assert got.select(*columns, "oversubscription_factor").rows() == [
        (100, 200, 600, 0, 0, 600 / 1250),
        (200, 300, 600, 250, 0, 0.6),
        (300, 900, 600, 250, 4096, 0.6),
        (900, None, 0, 250, 0, 0.0),
    ]


def test_memory_from_before_the_capture_is_there_from_the_first_event_on():
    rows = [allocation(None, 500, 0, 600), allocation(300, None, VA_BLOCK_BYTES, 100)]
    got = memory(memory_ledger, rows)
    assert got.select("start_ns", "end_ns", "managed_bytes").rows() == [
        (300, 500, 700),
        (500, None, 100),
    ]


def test_host_memory_takes_no_room_on_a_gpu():
    rows = [allocation(0, None, 0, 100), allocation(0, None, 4096, 70, kind="pinned")]
    assert memory(memory_ledger, rows)["other_bytes"].to_list() == [0]


def test_an_address_that_is_allocated_again_counts_once():
    rows = [allocation(100, None, 0, 600), allocation(300, None, 0, 600)]
    assert factors(rows, (), [gpu(0, 600)], **FREE)[0]["managed_peak_bytes"] == 600


# The factor --------------------------------------------------------------------------------------


def test_the_four_definitions_of_the_factor():
    """900 managed; 1000 in all, 100 of it taken, 300 in reserve: room for 600."""
    rows = [allocation(0, None, 0, 900), allocation(0, 50, 8192, 100, kind="device")]
    got = factors(rows, (), [gpu(0, 1000)], reserve_bytes=300)[0]
    assert got["available_bytes"] == 600
    assert got["oversubscription_factor"] == 1.5
    assert got["f2"] == 0.9
    assert got["f3"] == pytest.approx(1 / 3)
    assert got["f4"] == pytest.approx(2 / 3)


def test_the_peak_is_what_is_alive_at_one_time():
    rows = [
        allocation(0, 100, 0, 500),
        allocation(100, 200, VA_BLOCK_BYTES, 300),
        allocation(150, 300, 2 * VA_BLOCK_BYTES, 400),
    ]
    assert factors(rows)[0]["managed_peak_bytes"] == 700


def test_every_gpu_of_a_process_counts_all_its_managed_memory_and_all_together_their_room():
    rows = [
        allocation(0, None, 0, 600, device=0),
        allocation(0, None, 8192, 100, device=1, kind="device"),
    ]
    got = factors(rows, (), [gpu(0, 400), gpu(1, 300)], **FREE)
    assert [row["oversubscription_factor"] for row in got] == [1.5, 3.0]
    assert [row["joint_oversubscription_factor"] for row in got] == [1.0, 1.0]


def test_processes_do_not_share_an_account():
    rows = [allocation(0, None, 0, 600, pid=1), allocation(0, None, 0, 200, pid=2)]
    got = factors(rows, (), [gpu(0, 400)], **FREE)
    assert [(row["pid"], row["oversubscription_factor"]) for row in got] == [(1, 1.5), (2, 0.5)]


def test_the_size_that_a_process_sees_goes_before_the_size_that_any_sees():
    rows = [allocation(0, None, 0, 600, pid=1), allocation(0, None, 0, 600, pid=2)]
    got = factors(rows, (), [gpu(0, 400), gpu(0, 300, pid=2)], **FREE)
    assert [row["capacity_bytes"] for row in got] == [400, 300]


def test_where_memory_is_unknown_so_are_the_factors():
    got = factors([allocation(0, None, 0, 600)])[0]
    names = ["capacity_bytes", "available_bytes", "oversubscription_factor", "f2", "f3", "f4"]
    assert [got[name] for name in names] == [None] * 6
    assert got["managed_peak_bytes"] == 600


def test_without_any_recorded_allocation_the_peak_is_unknown_and_not_0():
    got = factors([], [copy(0)], [gpu(0, 1000)], **FREE)[0]
    assert (got["managed_peak_bytes"], got["oversubscription_factor"], got["f2"]) == (None,) * 3
    assert got["resident_peak_bytes"] == 4096


def test_no_room_at_all_gives_no_factor():
    got = factors([allocation(0, None, 0, 600)], (), [gpu(0, 300)], reserve_bytes=300)[0]
    assert (got["available_bytes"], got["oversubscription_factor"], got["f4"]) == (0, None, None)


def test_what_fits_has_no_part_without_room():
    got = factors([allocation(0, None, 0, 600)], (), [gpu(0, 1200)], **FREE)[0]
    assert (got["oversubscription_factor"], got["f3"], got["f4"]) == (0.5, 0.0, 2.0)


def test_evictions_prove_oversubscription_and_bound_the_room():
    rows = [copy(0, size=page(2)), copy(50, "dtoh", cause=4), copy(80, va=page(9))]
    got = factors([allocation(0, None, 0, page(3))], rows, [gpu(0, page(1000))], **FREE)[0]
    assert got["evicted_bytes"] == page(1)
    assert got["resident_peak_bytes"] == page(2)
    assert got["observed_factor"] == 1.5


@pytest.mark.parametrize("name", ["oversubscribed_sweep", "random"])
def test_the_factor_of_a_sample_comes_out_with_the_room_that_the_model_gave_it(name):
    """The model leaves the card's size in the export, and lets the program have less of it."""
    about = json.loads((SAMPLES / name / "model.json").read_text())
    room = about["capacity_bytes"]
    trace = opened(name)
    frames = trace.allocations, trace.migrations, trace.devices
    managed = trace.allocations.collect()["bytes"].sum()
    as_exported = oversubscription_factor(*frames).collect().to_dicts()[0]
    assert as_exported["oversubscription_factor"] < 0.01
    assert as_exported["observed_factor"] == pytest.approx(managed / room)
    known = oversubscription_factor(*frames, capacity_bytes=room, **FREE).collect().to_dicts()[0]
    assert known["oversubscription_factor"] == pytest.approx(managed / room)
    assert known["f4"] == pytest.approx(room / managed)


@pytest.mark.parametrize("name", NAMES)
def test_managed_memory_of_a_sample_is_what_its_program_allocated(name):
    trace = opened(name)
    truth = pl.read_parquet(SAMPLES / name / "truth" / "allocation_counts.parquet").to_dicts()
    times = {row["alloc_ns"] for row in truth}
    alive = [
        sum(r["bytes"] for r in truth if r["alloc_ns"] <= t and not (r["free_ns"] or t + 1) <= t)
        for t in times
    ]
    got = oversubscription_factor(trace.allocations, trace.migrations, trace.devices).collect()
    assert set(got["managed_peak_bytes"].to_list()) == {max(alive)}


# Working sets ------------------------------------------------------------------------------------


def sets(migrations, faults=(), window_ns=100):
    frames = table(MIGRATIONS, migrations), table(GPU_FAULTS, list(faults))
    return working_set(*frames, window_ns=window_ns).collect()


COLUMNS = ("unique_bytes", "faulted_bytes", "moved_bytes")


def test_a_window_counts_each_page_once_however_often_it_came():
    rows = [copy(0), copy(50), copy(99, size=page(3), cause=3), copy(100)]
    assert sets(rows).select("start_ns", "end_ns", *COLUMNS).rows() == [
        (0, 100, page(3), page(1), page(5)),
        (100, 200, page(1), page(1), page(1)),
    ]


def test_what_leaves_a_gpu_is_not_in_its_working_set():
    assert sets([copy(0, "dtoh")]).is_empty()


def test_a_fault_row_adds_its_page_where_nothing_was_copied():
    got = sets([copy(0, cause=3)], [fault(10, 100), fault(20, page(5))])
    assert got.select(COLUMNS).rows() == [(page(2), page(2), page(1))]


def test_windows_begin_at_multiples_also_before_the_session():
    assert sets([copy(-1)])["start_ns"].to_list() == [-100]


def test_gpus_and_processes_have_working_sets_of_their_own():
    rows = [copy(0, pid=pid, device=device) for pid, device in [(1, 0), (1, 1), (2, 0), (None, 0)]]
    assert sets(rows).select("pid", "device_id", "unique_bytes").rows() == [
        (None, 0, page(1)),
        (1, 0, page(1)),
        (1, 1, page(1)),
        (2, 0, page(1)),
    ]


def in_ranges(ranges, migrations, faults=()):
    frames = [table(MIGRATIONS, migrations), table(NVTX_RANGES, ranges)]
    return working_set_by_nvtx(*frames, table(GPU_FAULTS, list(faults))).collect()


def test_a_row_counts_in_every_range_of_its_process_that_holds_its_start():
    ranges = [nvtx(0, 0, 100), nvtx(1, 50, 60, name="inner"), nvtx(2, 0, 100, pid=2)]
    got = in_ranges(ranges, [copy(0), copy(50, va=page(1)), copy(60), copy(100, va=page(7))])
    assert got.select("pid", "range_id", "name", *COLUMNS).rows() == [
        (1, 0, "step", page(2), page(2), page(3)),
        (1, 1, "inner", page(1), page(1), page(1)),
    ]


def test_ranges_without_rows_are_left_out():
    assert in_ranges([nvtx(0, 0, 0), nvtx(1, 5, 9)], [copy(0)]).is_empty()


spans = st.lists(
    st.tuples(
        *(st.integers(0, 300), st.integers(0, 20), st.integers(1, 8)),
        *(st.sampled_from(["htod", "dtoh"]), st.sampled_from([2, 3]), st.integers(0, 1)),
    ),
    max_size=30,
)
instances = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), max_size=6)


def expected(rows, start, end):
    """Unique, faulted and moved bytes by GPU, by plain sets of pages."""
    pages, faulted, moved = {}, {}, {}
    for at, first, n, way, cause, device in rows:
        if start <= at < end and way == "htod":
            own = set(range(first, first + n))
            pages.setdefault(device, set()).update(own)
            faulted.setdefault(device, set()).update(own if cause == 2 else ())
            moved[device] = moved.get(device, 0) + n
    return {
        device: (page(len(pages[device])), page(len(faulted[device])), page(moved[device]))
        for device in pages
    }


@hypothesis.settings(max_examples=N)
@given(spans, instances)
def test_working_sets_are_those_of_plain_sets(rows, ranges):
    copies = [
        copy(at, way, page(first), page(n), cause=cause, device=device)
        for at, first, n, way, cause, device in rows
    ]
    got = sets(copies)
    for start in range(0, 400, 100):
        mine = got.filter(pl.col("start_ns") == start)
        found = {row[0]: row[1:] for row in mine.select("device_id", *COLUMNS).rows()}
        assert found == expected(rows, start, start + 100)
    inside = in_ranges([nvtx(i, a, a + n) for i, (a, n) in enumerate(ranges)], copies)
    for i, (start, length) in enumerate(ranges):
        mine = inside.filter(pl.col("range_id") == i)
        found = {row[0]: row[1:] for row in mine.select("device_id", *COLUMNS).rows()}
        assert found == expected(rows, start, start + length)


def test_each_step_of_the_sweep_works_on_the_whole_array():
    trace = opened("oversubscribed_sweep")
    got = working_set_by_nvtx(trace.migrations, trace.nvtx_ranges, trace.gpu_faults).collect()
    assert got["name"].to_list() == ["step"] * 4
    assert got["unique_bytes"].to_list() == [48 * MIB] * 4


# Of all ------------------------------------------------------------------------------------------


def test_rows_in_any_order_give_the_same_answer():
    trace = opened("two_gpus")
    tables = ["allocations", "migrations", "devices", "gpu_faults", "nvtx_ranges"]
    frames = {name: getattr(trace, name).collect() for name in tables}
    mixed = {
        name: frame.sample(fraction=1.0, shuffle=True, seed=5) for name, frame in frames.items()
    }
    for function, names in (
        (memory_ledger, tables[:3]),
        (oversubscription_factor, tables[:3]),
        (working_set, ["migrations", "gpu_faults"]),
        (working_set_by_nvtx, ["migrations", "nvtx_ranges", "gpu_faults"]),
    ):
        first, again = (
            function(*(of[name].lazy() for name in names)).collect() for of in (frames, mixed)
        )
        assert first.height
        assert_frame_equal(first, again)


def test_an_empty_trace_gives_empty_tables():
    three = ALLOCATIONS.empty(), MIGRATIONS.empty(), DEVICES.empty()
    assert memory_ledger(*three).collect().is_empty()
    assert oversubscription_factor(*three).collect().is_empty()
    assert sets([]).is_empty()
    assert in_ranges([], []).is_empty()


MODULES = [oversubscription, page_ping_pong, refaults, residency, working_sets]
ANALYSES = [found for module in MODULES for found in analyses_in(module)]


@pytest.mark.parametrize("found", ANALYSES, ids=lambda found: found.name)
def test_an_analysis_reads_no_column_but_those_that_it_declares(found):
    trace = opened("ping_pong" if "ping_pong" in found.name else "oversubscribed_sweep")
    few = {name: getattr(trace, name).select(columns) for name, columns in found.reads.items()}
    whole = {name: getattr(trace, name) for name in found.reads}
    first, again = (found.run(frames).collect() for frames in (few, whole))
    assert first.height
    assert_frame_equal(first, again)
