"""Attribution to kernels, ranges, allocations and functions, against the truth and plain Python."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path

import hypothesis
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from programs import programs, run_to_end

import nsan
from nsan.analysis.attribution import places as attribution_places
from nsan.analysis.attribution.allocations import faults_by_allocation
from nsan.analysis.attribution.functions import faults_by_function
from nsan.analysis.attribution.kernels import FIGURES, faults_by_kernel, faults_by_kernel_instance
from nsan.analysis.attribution.nvtx import faults_by_nvtx
from nsan.analysis.attribution.ranges import innermost, within
from nsan.analysis.attribution.work import clock_offset
from nsan.errors import UsageError
from nsan.model.recording import Style, record
from nsan.model.truth import TRUTH_TABLES
from nsan.schema import TABLES

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 15
SAMPLES = Path(__file__).parents[2] / "sample_data" / "model"
NAMES = sorted(folder.name for folder in SAMPLES.iterdir() if (folder / "truth").is_dir())

MIB = 1 << 20
PAGE = 4096
BLOCK = 2 * MIB
A = 0x7F00_0000_0000

WORK = ("kernels", "copies", "memsets")
BY_KERNEL = ("gpu_faults", "migrations", *WORK)
BY_NVTX = (*BY_KERNEL, "cpu_faults", "api_calls", "nvtx_ranges")
BY_ALLOCATION = ("gpu_faults", "cpu_faults", "migrations", "allocations")
READS = {
    faults_by_kernel: BY_KERNEL,
    faults_by_kernel_instance: BY_KERNEL,
    clock_offset: BY_KERNEL,
    faults_by_nvtx: BY_NVTX,
    faults_by_allocation: BY_ALLOCATION,
    faults_by_function: ("cpu_faults", "migrations"),
}
SUMS = [figure.name for figure in FIGURES]

modelled_programs = hypothesis.settings(
    max_examples=N,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate],
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def fault(start, end, *, va=A, pid=1, device=0, count=1):
    keys = {"pid": pid, "device_id": device, "va": va, "n_page_faults": count, "access": "read"}
    return {"start_ns": start, "end_ns": end} | keys


def copy(start, *, end=None, va=A, size=PAGE, cause=2, way="htod", pid=1, device=0):
    end = start + 10 if end is None else end
    keys = {"pid": pid, "device_id": device, "va": va, "bytes": size}
    return {"start_ns": start, "end_ns": end, "direction": way, "cause_id": cause} | keys


def kernel(start, end, name="k", *, pid=1, device=0, correlation=0, **more):
    keys = {"pid": pid, "device_id": device, "correlation_id": correlation, "name": name}
    return {"start_ns": start, "end_ns": end} | keys | more


def nvtx(start, end, name, *, pid=1, tid=1):
    return {"start_ns": start, "end_ns": end, "pid": pid, "tid": tid, "name": name}


def call(start, correlation, *, pid=1, tid=1):
    return {"start_ns": start, "end_ns": start + 1, "pid": pid, "tid": tid} | {
        "correlation_id": correlation
    }


def held(va, size, alloc=None, free=None, *, pid=1, kind="managed", name=None):
    keys = {"pid": pid, "va": va, "bytes": size, "kind": kind, "name": name}
    return {"alloc_ns": alloc, "free_ns": free} | keys


def run(analysis, options=None, **rows):
    """Run an analysis on tables of these rows; other tables are empty."""
    frames = [
        pl.LazyFrame(rows.get(name, []), schema=TABLES[name].schema) for name in READS[analysis]
    ]
    return analysis(*frames, **(options or {})).collect()


def by_work(table, column):
    """The values of a column by kind of work and name, where they are not zero."""
    rows = table.select("work", "name", column).rows()
    return {(work, name) if name else work: n for work, name, n in rows if n}


@cache
def sample(name):
    """The tables of a modelled sample, and its truth."""
    trace = nsan.open_trace(SAMPLES / name / f"{name}.sqlite")
    tables = {table: getattr(trace, table).collect() for table in TABLES}
    truth = {path.stem: pl.read_parquet(path) for path in (SAMPLES / name / "truth").iterdir()}
    return tables, truth


def on(analysis, tables, **options):
    return analysis(*(tables[name].lazy() for name in READS[analysis]), **options).collect()


def modelled(program, machine, style=None):
    """The trace of a random program, and the truth on its work by device and start."""
    ran = run_to_end(program, machine)
    tables = record(ran.happened, machine, "random", style or Style())
    counts = TRUTH_TABLES["kernel_counts"].build(ran.happened, machine, {})
    starts = pl.Series("start_ns", [work.start_ns for _, work in ran.happened.work], pl.Int64)
    page = machine.host_profile.page_bytes
    counts = counts.with_columns(starts, coherence_bytes=pl.col("faulted_pages") * page)
    return ran, tables, counts.filter(pl.col("kind") != "prefetch")


def check_kernels(tables, truth):
    """Each kernel, copy and memset has the figures of the truth, and all of it adds up."""
    table = on(faults_by_kernel_instance, tables)
    names = {"bytes_in": "in_bytes", "n_batches": "n_batches", "evicted_bytes": "evicted_bytes"}
    names |= {"n_migrations": "n_migrations", "coherence_bytes": "coherence_bytes"}
    work = table.filter(pl.col("start_ns").is_not_null()).sort("start_ns", "device_id")
    wanted = truth.sort("start_ns", "device_id").select("device_id", *names)
    got = work.select("device_id", **names)
    assert_frame_equal(got, wanted)
    assert_closes(table, tables)


def assert_closes(table, tables):
    moved = tables["migrations"]
    assert table["n_migrations"].sum() == moved.height
    assert table["in_bytes"].sum() + table["out_bytes"].sum() == moved["bytes"].sum()
    assert table["n_fault_rows"].sum() == tables["gpu_faults"].height
    assert table["n_page_faults"].sum() == tables["gpu_faults"]["n_page_faults"].sum()


def check_allocations(tables, truth):
    table = on(faults_by_allocation, tables)
    names = {"bytes_in": "in_bytes", "bytes_out": "out_bytes", "bytes_between": "between_bytes"}
    names |= {"evicted_bytes": "evicted_bytes", "n_migrations": "n_migrations"}
    place = ["pid", "alloc_ns", "free_ns", "va", "bytes"]
    ours = table.filter(part="allocation").sort("alloc_ns", "va")
    assert_frame_equal(
        ours.select(*place, **names), truth.sort("alloc_ns", "va").select(*place, *names)
    )
    moved = table.select(pl.sum_horizontal("in_bytes", "out_bytes", "between_bytes").sum()).item()
    assert moved == tables["migrations"]["bytes"].sum()
    assert table["n_lowest_page_rows"].sum() == tables["gpu_faults"].height
    assert table["n_cpu_faults"].sum() == tables["cpu_faults"].height


# Against the truth of the model -------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_of_a_sample_has_the_figures_of_the_truth(name):
    tables, truth = sample(name)
    # The truth lists kernels, copies and fills as they began.
    work = pl.concat([tables[table].select("start_ns", "device_id") for table in WORK])
    starts = work.sort("start_ns", "device_id")["start_ns"]
    counts = truth["kernel_counts"].with_columns(
        starts, coherence_bytes=pl.col("faulted_pages") * PAGE
    )
    check_kernels(tables, counts)


@pytest.mark.parametrize("name", NAMES)
def test_every_allocation_of_a_sample_has_the_figures_of_the_truth(name):
    tables, truth = sample(name)
    check_allocations(tables, truth["allocation_counts"])


@pytest.mark.parametrize("name", NAMES)
def test_names_add_up_to_the_same_as_single_kernels(name):
    tables, _ = sample(name)
    named, single = (
        on(analysis, tables) for analysis in (faults_by_kernel, faults_by_kernel_instance)
    )
    sums = pl.col([*SUMS, "exposed_ns", "driver_ns"]).sum()
    by = ["device_id", "work", "name"]
    assert_frame_equal(
        named.group_by(by).agg(sums).sort(by), single.group_by(by).agg(sums).sort(by)
    )


@pytest.mark.parametrize("name", ["first_touch", "stream"])
def test_first_touch_and_data_are_told_apart_as_in_the_truth(name):
    tables, truth = sample(name)
    table = on(faults_by_kernel, tables)
    outcomes = truth["batches"]["outcome"].to_list()
    assert table["n_first_touch_batches"].sum() == outcomes.count("first_touch")
    assert table["n_data_batches"].sum() == outcomes.count("data")


@modelled_programs
@given(programs())
def test_a_random_program_has_the_figures_of_the_truth(made):
    ran, tables, counts = modelled(*made)
    check_kernels(tables, counts)
    check_allocations(
        tables, TRUTH_TABLES["allocation_counts"].build(ran.happened, ran.settings, tables)
    )


# Kernels of a training step are short, and tell less of their clock.
@pytest.mark.parametrize("skew", [60_000, 5_000, -40_000])
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("pca")])
def test_kernels_on_a_clock_ahead_or_behind_still_get_their_faults(name, skew):
    tables, _ = sample(name)
    ahead = {
        table: tables[table].with_columns(pl.col("start_ns", "end_ns") + skew) for table in WORK
    }
    plain, shifted = (on(faults_by_kernel_instance, each) for each in (tables, tables | ahead))
    figures = ["device_id", "work", "name", *SUMS]
    assert_frame_equal(shifted.select(figures), plain.select(figures))


@hypothesis.settings(modelled_programs, max_examples=N // 5)
@given(programs(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(made, mixer):
    _, tables, _ = modelled(*made)
    mixed = {
        name: frame[mixer.sample(range(frame.height), frame.height)]
        for name, frame in tables.items()
    }
    for analysis in READS:
        assert_frame_equal(on(analysis, tables), on(analysis, mixed))


@pytest.mark.parametrize("name", NAMES)
def test_functions_get_the_bytes_that_came_back_for_cpu_faults(name):
    tables, _ = sample(name)
    table = on(faults_by_function, tables)
    back = tables["migrations"].filter(
        pl.col("direction") == "dtoh", pl.col("cause_id").is_in([2, 3])
    )
    assert table["out_bytes"].sum() == back["bytes"].sum()
    assert table["n_cpu_faults"].sum() == tables["cpu_faults"].height
    assert table.filter(part="unattributed")["n_migrations"].sum() == 0


@pytest.mark.parametrize("skew", [60_000, -60_000])
def test_functions_get_the_same_bytes_whatever_clock_is_ahead(skew):
    tables, _ = sample("ping_pong")
    late = tables["cpu_faults"].with_columns(pl.col("start_ns") + skew)
    moved = ["function", "n_migrations", "coherence_bytes", "prefetch_bytes"]
    plain = on(faults_by_function, tables).select(moved)
    assert_frame_equal(on(faults_by_function, tables | {"cpu_faults": late}).select(moved), plain)


# Kernels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("analysis", READS)
def test_no_rows_give_no_rows_of_the_same_columns(analysis):
    table = run(analysis)
    assert table.height == 0
    assert table.schema == analysis.__nsan_analysis__.result.schema


def test_a_kernel_has_what_begins_in_it_and_not_what_begins_at_its_end():
    rows = [fault(t, t + 1) for t in (100, 199, 200, 299, 900_000)]
    kernels = [kernel(100, 200, "a"), kernel(200, 300, "b"), kernel(2_000_000, 3_000_000, "c")]
    table = run(faults_by_kernel, gpu_faults=rows, kernels=kernels)
    assert by_work(table, "n_fault_rows") == {
        ("kernel", "a"): 2,
        ("kernel", "b"): 2,
        "unattributed": 1,
    }


def test_what_begins_while_two_kernels_run_is_ambiguous():
    kernels = [kernel(0, 100, "a"), kernel(50, 150, "b"), kernel(140, 160, "b")]
    moved = [copy(t, end=t + 1) for t in (10, 60, 99, 100, 145, 150)]
    table = run(faults_by_kernel, migrations=moved, kernels=kernels)
    assert by_work(table, "n_migrations") == {
        ("kernel", "a"): 1,
        ("kernel", "b"): 2,
        "ambiguous": 3,
    }
    assert table.filter(work="ambiguous")["in_bytes"].item() == 3 * PAGE
    assert table.filter(name="b")["n_instances"].item() == 2
    assert table.filter(name="b")["time_ns"].item() == 110


def test_copies_and_memsets_of_managed_memory_are_causes_while_no_kernel_runs():
    plain = {"pid": 1, "device_id": 0}
    copies = [plain | {"start_ns": 0, "end_ns": 100, "kind": "htod"}]
    memsets = [
        plain | {"start_ns": 200, "end_ns": 300, "kind": "managed"},
        plain | {"start_ns": 1_000_000, "end_ns": 1_000_500, "kind": "device"},
    ]
    rows = [fault(t, t + 1) for t in (10, 60, 210, 1_000_010)]
    table = run(
        faults_by_kernel,
        gpu_faults=rows,
        kernels=[kernel(50, 90)],
        copies=copies,
        memsets=memsets,
    )
    assert by_work(table, "n_fault_rows") == {
        ("kernel", "k"): 1,
        ("copy", "copy htod"): 1,
        ("memset", "memset managed"): 1,
        "unattributed": 1,
    }


def test_a_graph_launch_counts_where_its_kernels_are_not_recorded():
    graph = kernel(0, 100, "graph", is_graph_launch=True)
    nodes = [kernel(0, 40, "node", graph_node_id=5), kernel(40, 90, "node", graph_node_id=6)]
    moved = [copy(10), copy(50)]
    alone = run(faults_by_kernel, migrations=moved, kernels=[graph])
    assert by_work(alone, "n_migrations") == {("graph", "graph"): 2}
    both = run(faults_by_kernel, migrations=moved, kernels=[graph, *nodes])
    assert by_work(both, "n_migrations") == {("kernel", "node"): 2}


@pytest.mark.parametrize("other", [{"pid": 2}, {"device": 1}, {"pid": None}, {"device": None}])
def test_a_kernel_of_another_process_or_gpu_is_no_cause(other):
    kernels = [kernel(0, 100, "mine"), kernel(0, 100, "other", **other)]
    table = run(
        faults_by_kernel,
        gpu_faults=[fault(10, 20), fault(30, 40, **other)],
        migrations=[copy(11), copy(12), copy(31, **other)],
        kernels=kernels,
    )
    assert by_work(table, "n_fault_rows") == {("kernel", "mine"): 1, ("kernel", "other"): 1}
    assert by_work(table, "n_migrations") == {("kernel", "mine"): 2, ("kernel", "other"): 1}
    assert by_work(table, "exposed_ns") == {("kernel", "mine"): 10, ("kernel", "other"): 10}


def test_copies_for_the_cpu_and_for_prefetch_calls_are_no_kernels():
    moved = [
        copy(10, way="dtoh", size=1),
        copy(20, way="dtoh", cause=3, size=2),
        copy(30, cause=1, size=4),
        copy(40, way="dtoh", cause=1, size=8),
        copy(50, way="dtoh", cause=4, size=16),
        copy(60, cause=5, size=32),
        copy(70, cause=None, size=64),
    ]
    table = run(faults_by_kernel, migrations=moved, kernels=[kernel(0, 2_000_000)])
    every = pl.col("in_bytes") + pl.col("out_bytes")
    assert by_work(table.with_columns(all=every), "all") == {
        "cpu": 3,
        "user_prefetch": 12,
        ("kernel", "k"): 112,
    }


def test_an_eviction_before_a_prefetched_copy_is_the_prefetch_calls():
    room = {"way": "dtoh", "cause": 4}
    moved = [copy(0, **room), copy(20, cause=1), copy(1_500_000, **room), copy(9_000_000, cause=1)]
    table = run(faults_by_kernel, migrations=moved, kernels=[kernel(0, 3_000_000)])
    assert by_work(table, "evicted_bytes") == {"user_prefetch": PAGE, ("kernel", "k"): PAGE}


def test_an_eviction_while_no_fault_waits_is_not_the_running_kernels():
    moved = [copy(t, way="dtoh", cause=4) for t in (150, 250)]
    rows = [fault(100, 200)]
    table = run(faults_by_kernel, gpu_faults=rows, migrations=moved, kernels=[kernel(0, 900)])
    assert by_work(table, "evicted_bytes") == {("kernel", "k"): PAGE, "unattributed": PAGE}


def test_a_copy_that_passes_through_the_cpu_belongs_to_the_kernel_of_the_other_gpu():
    moved = [
        copy(1_000, end=1_400, way="dtoh", device=1),
        copy(3_000, end=3_400, device=0),
        copy(50_000, end=50_400, way="dtoh", device=1, va=A + PAGE),
        copy(90_000, end=90_400, device=0, va=A + PAGE),
    ]
    kernels = [kernel(0, 200_000, "wants"), kernel(0, 200_000, "has", device=1)]
    table = run(faults_by_kernel, migrations=moved, kernels=kernels)
    assert by_work(table, "n_migrations") == {("kernel", "wants"): 3, "cpu": 1}
    assert by_work(table, "out_bytes") == {("kernel", "wants"): PAGE, "cpu": PAGE}


def test_exposed_time_is_a_union_and_what_no_copy_covers_is_the_drivers():
    rows = [fault(1_010, 1_030), fault(1_020, 1_050), fault(1_090, 1_130)]
    table = run(
        faults_by_kernel,
        gpu_faults=rows,
        migrations=[copy(1_040, end=1_060), copy(1_095, end=1_120)],
        kernels=[kernel(1_000, 1_100), kernel(1_140, 201_150, "later")],
    )
    first = table.filter(name="k").row(0, named=True)
    assert (first["exposed_ns"], first["migration_ns"], first["driver_ns"]) == (50, 25, 35)
    assert first["exposed_fraction"] == 0.5
    assert first["exposed_kind"] == "derived"
    rest = table.filter(work="unattributed").row(0, named=True)
    assert (rest["exposed_ns"], rest["driver_ns"]) == (30, 10)


def test_without_fault_rows_batches_wait_from_their_first_copy_on():
    moved = [copy(1_000, end=1_400), copy(1_401, end=1_900, va=A + PAGE, cause=3)]
    table = run(faults_by_kernel, migrations=moved, kernels=[kernel(0, 3_000)])
    only = table.filter(work="kernel").row(0, named=True)
    assert only["n_fault_rows"] == 0
    assert (only["n_batches"], only["n_data_batches"], only["exposed_ns"]) == (1, 1, 900)
    assert only["exposed_kind"] == "reconstructed"


def test_rows_without_a_start_are_left_out():
    table = run(
        faults_by_kernel,
        gpu_faults=[fault(None, 5), fault(3, 6)],
        migrations=[copy(4), copy(0) | {"start_ns": None}],
        kernels=[kernel(0, 10), kernel(None, 10)],
    )
    assert by_work(table, "n_fault_rows") == {("kernel", "k"): 1}
    assert by_work(table, "n_migrations") == {("kernel", "k"): 1}


def test_a_fault_that_outlasts_a_kernel_is_the_next_ones():
    kernels = [kernel(0, 100, "a"), kernel(105, 200, "b"), kernel(90, 104, "c")]
    moved = [copy(98, end=120), copy(95, end=103), copy(20, end=95), copy(150, end=200)]
    table = run(faults_by_kernel, migrations=moved, kernels=kernels)
    assert by_work(table, "n_migrations") == {
        ("kernel", "a"): 1,
        ("kernel", "b"): 2,
        ("kernel", "c"): 1,
    }


# The clocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "offset"),
    [
        ([(1_000_010, 1_000_020)], 0),
        ([(940_000, 990_000), (970_000, 995_000)], -60_000),
        ([(850_000, 860_000)], 0),
        ([(1_900_000, 2_030_000)], 30_000),
        ([(2_010_000, 2_050_000)], 50_000),
    ],
)
def test_work_moves_to_faults_that_begin_before_it_or_end_after_it(rows, offset):
    table = run(
        clock_offset,
        gpu_faults=[fault(*row) for row in rows],
        kernels=[kernel(1_000_000, 2_000_000)],
    )
    assert table.select("offset_ns", "evidence").row(0) == (offset, "fault_rows")


def test_without_fault_rows_copies_to_the_gpu_tell_the_clocks():
    moved = [copy(980_000), copy(900_000, way="dtoh"), copy(890_000, cause=1)]
    table = run(clock_offset, migrations=moved, kernels=[kernel(1_000_000, 2_000_000)])
    assert table.select("offset_ns", "evidence").row(0) == (-20_000, "migrations")


# NVTX ---------------------------------------------------------------------------------------------


def test_a_range_has_its_own_events_and_with_those_inside_all_of_them():
    ranges = [nvtx(0, 100, "outer"), nvtx(20, 50, "inner"), nvtx(30, 40, "outer")]
    moved = [copy(t, size=t) for t in (10, 25, 35, 45, 60, 100)]
    table = run(faults_by_nvtx, migrations=moved, nvtx_ranges=ranges)
    own = dict(table.select("name", "in_bytes").rows())
    assert own == {"outer": 10 + 35 + 60, "inner": 25 + 45, None: 100}
    inclusive = dict(table.select("name", "inclusive_in_bytes").rows())
    assert inclusive["outer"] == 10 + 25 + 35 + 45 + 60
    assert inclusive["inner"] == 25 + 35 + 45
    assert table.filter(name="outer").select("n_ranges", "time_ns").row(0) == (2, 100)


def test_by_time_what_happens_in_ranges_of_two_threads_is_ambiguous():
    ranges = [nvtx(0, 100, "a"), nvtx(50, 150, "b", tid=2), nvtx(0, 500, "c", pid=2)]
    table = run(
        faults_by_nvtx,
        migrations=[copy(10), copy(60), copy(120), copy(300)],
        cpu_faults=[{"start_ns": t, "pid": 1} for t in (20, 70)],
        nvtx_ranges=ranges,
    )
    ours = table.filter(pid=1)
    label = pl.coalesce("name", pl.col("part").cast(pl.String))
    counts = dict(ours.select(label, "n_migrations").rows())
    assert counts == {"a": 1, "b": 1, "ambiguous": 1, "unattributed": 1}
    assert dict(ours.select(label, "n_cpu_faults").rows())["ambiguous"] == 1
    assert table.filter(pid=2)["n_inclusive_migrations"].to_list() == [0, 0, 0]


def test_by_launch_a_range_has_the_faults_of_the_kernels_that_it_started():
    ranges = [nvtx(0, 100, "outer"), nvtx(10, 20, "inner"), nvtx(0, 500, "busy", tid=2)]
    calls = [call(15, 1), call(50, 2), call(15, 3, pid=2), call(200, 4)]
    kernels = [
        kernel(1_000, 2_000, "first", correlation=1),
        kernel(2_000, 3_000, "second", correlation=2),
        kernel(3_000, 4_000, "of another process", correlation=3),
        kernel(4_000, 5_000, "outside", correlation=4),
        kernel(5_000, 6_000, "no call", correlation=0),
    ]
    moved = [copy(1_500 + 1_000 * i, size=10**i) for i in range(5)]
    rows = [fault(1_400, 1_600)]
    table = run(
        faults_by_nvtx,
        {"basis": "launch"},
        gpu_faults=rows,
        migrations=moved,
        kernels=kernels,
        api_calls=calls,
        nvtx_ranges=ranges,
    )
    label = pl.coalesce("name", pl.col("part").cast(pl.String))
    own = dict(table.select(label, "in_bytes").rows())
    assert own == {"outer": 10, "inner": 1, "busy": 0, "ambiguous": 0, "unattributed": 11_100}
    inclusive = dict(table.select(label, "inclusive_in_bytes").rows())
    assert (inclusive["outer"], inclusive["inner"], inclusive["busy"]) == (11, 1, 0)
    assert dict(table.select(label, "n_inclusive_fault_rows").rows())["outer"] == 1


def test_an_unknown_basis_is_refused_with_those_that_there_are():
    with pytest.raises(UsageError, match="basis"):
        run(faults_by_nvtx, {"basis": "space"})


@pytest.mark.parametrize("basis", ["time", "launch"])
@pytest.mark.parametrize("name", NAMES)
def test_figures_by_range_add_up_to_the_trace(name, basis):
    tables, _ = sample(name)
    assert_closes(on(faults_by_nvtx, tables, basis=basis), tables)


def test_the_time_that_faults_wait_in_a_range_is_a_union():
    table = run(
        faults_by_nvtx,
        gpu_faults=[fault(10, 30), fault(20, 60), fault(90, 120, pid=None)],
        nvtx_ranges=[nvtx(0, 50, "a"), nvtx(40, 50, "b"), nvtx(100, 200, "n", pid=None)],
    )
    label = pl.coalesce("name", pl.col("part").cast(pl.String))
    exposed = table.select("pid", label, "exposed_ns").rows()
    assert (1, "a", 40) in exposed
    assert (1, "b", 10) in exposed
    assert (1, "unattributed", 10) in exposed
    assert (None, "n", 20) in exposed


intervals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(1, 2)), max_size=12
)


@hypothesis.settings(max_examples=10 * N, deadline=None, database=None)
@given(intervals)
def test_the_innermost_range_is_the_open_one_that_began_last(drawn):
    rows = [
        {"pid": 1, "tid": tid, "start_ns": start, "end_ns": start + length, "item": item}
        for item, (start, length, tid) in enumerate(drawn)
    ]
    schema = {"pid": pl.UInt32, "tid": pl.UInt32, "start_ns": pl.Int64, "end_ns": pl.Int64}
    found = innermost(pl.DataFrame(rows, schema=schema | {"item": pl.Int64}))
    for tid in (1, 2):
        for now in range(45):
            ranges = [row for row in rows if row["tid"] == tid]
            ranges = [row for row in ranges if row["start_ns"] <= now < row["end_ns"]]
            last = max(ranges, key=lambda r: (r["start_ns"], -r["end_ns"], r["item"]), default=None)
            here = found.filter(
                pl.col("tid") == tid, pl.col("start_ns") <= now, pl.col("end_ns") > now
            )
            assert here["item"].to_list() == ([] if last is None else [last["item"]])


@hypothesis.settings(max_examples=5 * N, deadline=None, database=None)
@given(
    intervals, st.lists(st.tuples(st.integers(0, 45), st.sampled_from([1, 2, None])), max_size=8)
)
def test_events_within_the_ranges_of_an_item_count_once(drawn, happened):
    ranges = [
        {"item": start % 3, "start_ns": start, "end_ns": start + length, "pid": [None, 1][pid - 1]}
        for start, length, pid in drawn
    ]
    events = [{"at": at, "pid": pid, "n": 2**i} for i, (at, pid) in enumerate(happened)]
    frames = (
        pl.DataFrame(events, schema={"at": pl.Int64, "pid": pl.UInt32, "n": pl.Int64}),
        pl.DataFrame(
            ranges,
            schema={"item": pl.Int64, "start_ns": pl.Int64, "end_ns": pl.Int64, "pid": pl.UInt32},
        ),
    )
    found = dict(within(*frames, ("n",), by=("pid",)).select("item", "n").rows())
    for item in range(3):
        mine = [r for r in ranges if r["item"] == item]
        wanted = sum(
            event["n"]
            for event in events
            if any(
                r["pid"] == event["pid"] and r["start_ns"] <= event["at"] < r["end_ns"]
                for r in mine
            )
        )
        assert found.get(item, 0) == wanted


# Allocations --------------------------------------------------------------------------------------


def test_a_copy_over_two_allocations_is_cut_at_their_edge():
    allocations = [held(A, 3 * PAGE, name="x"), held(A + 3 * PAGE, PAGE, name="y")]
    moved = [copy(5, va=A + 2 * PAGE, size=4 * PAGE), copy(6, va=A, size=PAGE)]
    table = run(faults_by_allocation, migrations=moved, allocations=allocations)
    assert table.select("name", "in_bytes", "n_migrations").rows() == [
        ("x", 2 * PAGE, 2),
        ("y", PAGE, 1),
        (None, 2 * PAGE, 1),
    ]


def test_an_address_belongs_to_who_holds_it_at_that_time():
    allocations = [
        held(A, PAGE, None, 100, name="first"),
        held(A, PAGE, 200, 300, name="second"),
        held(A, PAGE, 300, None, name="third"),
    ]
    moved = [copy(t, size=1, va=A + t) for t in (50, 99, 100, 199, 200, 299, 300, 900)]
    table = run(faults_by_allocation, migrations=moved, allocations=allocations)
    assert table.select("name", "in_bytes", "first_ns", "last_ns").rows() == [
        ("first", 2, 50, 99),
        ("second", 2, 200, 299),
        ("third", 2, 300, 900),
        (None, 2, 100, 199),
    ]


def test_unique_bytes_tell_amplification_and_density():
    moved = [copy(t, size=2 * PAGE) for t in (1, 2)]
    moved += [copy(3, va=A + PAGE, size=2 * PAGE), copy(4, va=A + 3 * PAGE, way="dtoh")]
    table = run(faults_by_allocation, migrations=moved, allocations=[held(A, 16 * PAGE)])
    only = table.row(0, named=True)
    assert (only["unique_bytes"], only["unique_in_bytes"]) == (4 * PAGE, 3 * PAGE)
    assert (only["amplification"], only["density_fraction"]) == (2.0, 0.25)


def test_memory_that_is_not_managed_is_no_allocation_here_and_processes_are_apart():
    allocations = [held(A, PAGE, kind="device"), held(A, PAGE, pid=2, name="theirs")]
    moved = [copy(5), copy(6, pid=2)]
    table = run(faults_by_allocation, migrations=moved, allocations=allocations)
    assert table.select("pid", "part", "va", "in_bytes", "range_kind").rows() == [
        (1, "guessed", A, PAGE, "reconstructed"),
        (1, "unattributed", None, 0, "recorded"),
        (2, "allocation", A, PAGE, "recorded"),
        (2, "unattributed", None, 0, "recorded"),
    ]


def test_without_allocations_runs_of_touched_va_blocks_stand_for_them():
    moved = [copy(t, va=A + t * BLOCK, size=BLOCK) for t in (0, 1, 3)]
    cpu = [{"start_ns": 9, "pid": 1, "va": A + 4 * BLOCK + 5}]
    table = run(faults_by_allocation, migrations=moved, cpu_faults=cpu)
    assert table.select("part", "va", "bytes", "in_bytes", "n_cpu_faults").rows() == [
        ("guessed", A, 2 * BLOCK, 2 * BLOCK, 0),
        ("guessed", A + 3 * BLOCK, 2 * BLOCK, BLOCK, 1),
        ("unattributed", None, None, 0, 0),
    ]
    assert table["name"][0] == f"0x7f0000000000, {2 * BLOCK} byte"


@pytest.mark.parametrize("most_pieces", [4_000_000, 40])
@pytest.mark.parametrize("seed", range(4))
def test_each_page_is_counted_where_a_table_of_pages_has_it(monkeypatch, seed, most_pieces):
    monkeypatch.setattr(attribution_places, "MOST_PIECES", most_pieces)
    draw = random.Random(seed)
    lives, at = [], {}
    for now in range(0, 4_000, 40):  # allocate and free, page by page in a small address space
        first, size = draw.randrange(60), draw.randrange(1, 20)
        if all(page not in at for page in range(first, first + size)):
            lives.append([first, size, now, None])
            at |= dict.fromkeys(range(first, first + size), lives[-1])
        if lives and draw.random() < 0.7:
            life = draw.choice(lives)
            if life[3] is None:
                life[3] = now + draw.randrange(1, 40)
                for page in range(life[0], life[0] + life[1]):
                    del at[page]
    moves = [(draw.randrange(4_100), draw.randrange(60), draw.randrange(1, 30)) for _ in range(300)]
    table = run(
        faults_by_allocation,
        migrations=[copy(t, va=A + PAGE * page, size=PAGE * n) for t, page, n in moves],
        allocations=[held(A + PAGE * p, PAGE * n, begin, end) for p, n, begin, end in lives],
    )
    wanted = dict.fromkeys(range(-1, len(lives)), 0)
    for t, page, n in moves:
        for each in range(page, page + n):
            holds = [
                i
                for i, (first, size, begin, end) in enumerate(lives)
                if first <= each < first + size and begin <= t and (end is None or t < end)
            ]
            wanted[holds[0] if holds else -1] += PAGE
    found = {(va, alloc): n for va, alloc, n in table.select("va", "alloc_ns", "in_bytes").rows()}
    assert found.pop((None, None)) == wanted.pop(-1)
    assert found == {(A + PAGE * lives[i][0], lives[i][2]): n for i, n in wanted.items()}


# Functions ----------------------------------------------------------------------------------------


def access(start, va, function="f", *, pid=1):
    return {"start_ns": start, "pid": pid, "va": va, "function": function}


def test_a_copy_belongs_to_the_last_cpu_fault_on_its_page_before_it():
    faults = [
        access(0, A),
        access(500, A + 8, "g"),
        access(600, A + PAGE, "h"),
        access(550, A, pid=2),
    ]
    moved = [
        copy(520, end=530, way="dtoh"),
        copy(531, end=540, way="dtoh", va=A + PAGE, cause=3, size=3 * PAGE),
        copy(900, end=950, way="dtoh", va=A + 9 * PAGE),
    ]
    table = run(faults_by_function, cpu_faults=faults, migrations=moved).filter(pid=1)
    columns = ["function", "n_cpu_faults", "n_answered", "coherence_bytes", "prefetch_bytes"]
    assert table.select(columns).rows() == [
        ("g", 1, 1, PAGE, 3 * PAGE),
        ("f", 1, 0, 0, 0),
        ("h", 1, 0, 0, 0),
        (None, 0, 0, PAGE, 0),
    ]


def test_a_copy_that_starts_before_its_cpu_fault_row_is_found():
    faults = [access(1_000_000, A), access(5_000_000, A + PAGE)]
    moved = [copy(990_000, way="dtoh"), copy(5_020_000, way="dtoh", va=A + PAGE)]
    table = run(faults_by_function, cpu_faults=faults, migrations=moved)
    assert table["n_answered"].to_list() == [2, 0]


def test_a_cpu_fault_long_before_a_copy_did_not_ask_for_it():
    table = run(
        faults_by_function, cpu_faults=[access(0, A)], migrations=[copy(20_000_000, way="dtoh")]
    )
    assert table["n_migrations"].to_list() == [0, 1]


def test_a_push_of_several_faulted_pages_was_not_asked_for_by_a_cpu_access():
    faults = [access(0, A)]
    moved = [copy(50, end=60, way="dtoh"), copy(61, end=70, way="dtoh", va=A + 4 * PAGE)]
    table = run(faults_by_function, cpu_faults=faults, migrations=moved)
    assert table["n_migrations"].to_list() == [0, 2]


def test_million_times_do_not_lose_precision():
    late = 1 << 60
    table = run(
        faults_by_kernel,
        gpu_faults=[fault(late + 1, late + 2)],
        kernels=[kernel(late, late + 2), kernel(late + 2, late + 4, "next")],
    )
    assert by_work(table, "n_fault_rows") == {("kernel", "k"): 1}
    assert np.int64(table.filter(name="k")["exposed_ns"].item()) == 1


def test_copies_and_faults_without_an_address_are_in_no_allocation_and_add_up():
    tables, _ = sample("stream")
    nowhere = pl.when(pl.int_range(pl.len()) % 100 == 3).then(None).otherwise("va").alias("va")
    lossy = tables | {
        name: tables[name].with_columns(nowhere) for name in ("migrations", "cpu_faults")
    }
    table = on(faults_by_allocation, lossy)
    moved = pl.sum_horizontal("in_bytes", "out_bytes", "between_bytes")
    assert table.select(moved.sum()).item() == lossy["migrations"]["bytes"].sum()
    assert table["n_cpu_faults"].sum() == lossy["cpu_faults"].height
    (rest,) = table.filter(pl.col("part") == "unattributed").select(moved).to_series().to_list()
    assert rest == lossy["migrations"].filter(pl.col("va").is_null())["bytes"].sum()
