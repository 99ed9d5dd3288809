"""Steps of a program and successors of blocks, against the truth and plain Python."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

import nsan
from nsan.analysis.attribution.iterations import (
    BLOCK_SUCCESSORS,
    ITERATIONS,
    block_successors,
    iterations,
)
from nsan.analysis.attribution.periods import repeats, smallest_period
from nsan.errors import UsageError
from nsan.schema import TABLES

SAMPLES = Path(__file__).parents[2] / "sample_data" / "model"
MIB = 1 << 20
BLOCK = 2 * MIB
PAGE = 4096
READS = ("gpu_faults", "migrations", "kernels", "nvtx_ranges")


def copy(start, *, block=0, size=PAGE, cause=2, way="htod", pid=1, device=0):
    keys = {"pid": pid, "device_id": device, "va": block * BLOCK, "bytes": size}
    return {"start_ns": start, "end_ns": start + 1, "direction": way, "cause_id": cause} | keys


def nvtx(start, end, name="step", *, pid=1, tid=1, depth=0):
    keys = {"pid": pid, "tid": tid, "name": name, "depth": depth}
    return {"start_ns": start, "end_ns": end} | keys


def kernels(names, *, every=1_000, pid=1, device=0):
    return [
        {"start_ns": i * every, "end_ns": i * every + 900, "pid": pid, "device_id": device}
        | {"name": name}
        for i, name in enumerate(names)
    ]


def run(options=None, **rows):
    frames = (pl.LazyFrame(rows.get(n, []), schema=TABLES[n].schema) for n in READS)
    return iterations(*frames, **(options or {})).collect()


@cache
def sample(name):
    trace = nsan.open_trace(SAMPLES / name / f"{name}.sqlite")
    truth = pl.read_parquet(SAMPLES / name / "truth" / "kernel_counts.parquet")
    return {table: getattr(trace, table).collect() for table in TABLES}, truth


def on(tables, **options):
    return iterations(*(tables[name].lazy() for name in READS), **options).collect()


# Steps --------------------------------------------------------------------------------------------


def test_no_rows_give_no_rows_of_the_same_columns():
    table = run()
    assert (table.height, table.schema) == (0, ITERATIONS.schema)


@pytest.mark.parametrize("basis", ["auto", "kernels"])
def test_each_step_of_the_sweep_moves_what_its_kernel_does_in_the_truth(basis):
    tables, truth = sample("oversubscribed_sweep")
    table = on(tables, basis=basis)
    steps = table.filter(part="step")
    assert set(table["basis"]) == {"nvtx" if basis == "auto" else "kernels"}
    for ours, theirs in {
        "in_bytes": "bytes_in",
        "evicted_bytes": "evicted_bytes",
        "n_fault_rows": "n_batches",
        "n_migrations": "n_migrations",
    }.items():
        assert steps[ours].to_list() == truth[theirs].to_list()
    assert steps["n_va_blocks"].to_list() == [24] * 4
    assert steps["unique_bytes"].to_list() == [48 * MIB] * 4
    assert steps["similarity_fraction"].to_list() == [None, 1, 1, 1]
    assert table["n_migrations"].sum() == tables["migrations"].height


def test_two_gpus_of_a_process_have_steps_of_their_own():
    tables, _ = sample("two_gpus")
    table = on(tables, basis="kernels")
    steps = table.filter(part="step")
    assert steps.select("device_id", "step_id", "name", "n_fault_rows").rows() == [
        (0, 0, "stage_0", 12),
        (0, 1, "stage_0", 12),
        (1, 0, "stage_1", 12),
        (1, 1, "stage_1", 12),
    ]
    assert table["n_fault_rows"].sum() == tables["gpu_faults"].height


def test_the_range_with_most_instances_at_the_top_is_the_step():
    ranges = [nvtx(0, 10, "init"), nvtx(10, 20), nvtx(20, 30), nvtx(30, 40)]
    ranges += [nvtx(t, t + 1, "inner", depth=1) for t in range(10, 20)]
    ranges += [nvtx(0, 50, "other"), nvtx(60, 70, "once", pid=2)]
    table = run(nvtx_ranges=ranges)
    assert table.select("pid", "name", "start_ns").rows() == [
        (1, "step", 10),
        (1, "step", 20),
        (1, "step", 30),
        (1, "step", None),
    ]


def test_a_range_can_be_named_and_its_instances_inside_one_are_one_step():
    ranges = [nvtx(0, 100, "f", depth=1), nvtx(10, 20, "f", depth=2), nvtx(100, 200, "f", depth=1)]
    table = run({"nvtx": "f"}, nvtx_ranges=[*ranges, nvtx(0, 300), nvtx(300, 400)])
    steps = table.filter(part="step")
    assert steps.select("start_ns", "end_ns", "time_ns").rows() == [(0, 100, 100), (100, 200, 100)]


def test_steps_count_what_begins_in_them_and_compare_their_blocks():
    ranges = [nvtx(0, 10), nvtx(10, 20), nvtx(30, 40)]
    moved = [copy(t, block=b) for t, b in ((0, 1), (9, 2), (10, 2), (11, 2), (19, 3), (20, 3))]
    moved += [copy(30, block=9, way="dtoh", cause=4), copy(35, block=9, way="dtoh", cause=1)]
    faults = [{"start_ns": t, "end_ns": t, "pid": 1, "device_id": 0} for t in (9, 10, 10, 25)]
    table = run(nvtx_ranges=ranges, migrations=moved, gpu_faults=faults)
    columns = ["n_fault_rows", "n_migrations", "in_bytes", "out_bytes", "evicted_bytes"]
    columns += ["n_va_blocks", "unique_bytes", "n_shared_va_blocks", "similarity_fraction"]
    assert table.select("step_id", *columns).rows() == [
        (0, 1, 2, 2 * PAGE, 0, 0, 2, 2 * PAGE, 0, None),
        (1, 2, 3, 3 * PAGE, 0, 0, 2, 2 * PAGE, 1, 1 / 3),
        (2, 0, 2, 0, 2 * PAGE, PAGE, 1, PAGE, 0, 0),
        (None, 1, 1, PAGE, 0, 0, 1, PAGE, 0, None),
    ]


def test_processes_are_kept_apart_and_one_may_lack_ranges():
    ranges = [nvtx(0, 1_000, pid=None), nvtx(1_000, 2_000, pid=None)]
    names = kernels("abab", pid=2) + kernels("xy", pid=3)
    moved = [copy(t, pid=pid) for pid in (None, 2, 3) for t in (500, 1_500)]
    table = run(nvtx_ranges=ranges, kernels=names, migrations=moved)
    assert table.select("pid", "step_id", "basis", "n_migrations").rows() == [
        (None, 0, "nvtx", 1),
        (None, 1, "nvtx", 1),
        (None, None, "nvtx", 0),
        (2, 0, "kernels", 2),
        (2, 1, "kernels", 0),
        (2, None, "kernels", 0),
    ]


def test_the_order_of_rows_does_not_matter():
    tables, _ = sample("oversubscribed_sweep")
    mixed = {n: f.sample(fraction=1, shuffle=True, seed=5) for n, f in tables.items()}
    for basis in ("nvtx", "kernels"):
        assert_frame_equal(on(tables, basis=basis), on(mixed, basis=basis))


def test_an_unknown_basis_is_refused():
    with pytest.raises(UsageError, match="basis"):
        run({"basis": "time"})


# Periods ------------------------------------------------------------------------------------------


def codes(text):
    return np.array([ord(letter) for letter in text], np.uint64)


@pytest.mark.parametrize(
    ("text", "period"),
    [
        ("", None),
        ("a", None),
        ("ab", None),
        ("aa", 1),
        ("abcdefgh", None),
        ("abcabcabc", 3),
        ("xyzabcabcabcabcabcabcw", 3),
        ("abcabcabcQabcabcabcabc", 3),
        (("a" * 20 + "b") * 30, 21),
        (("abcd" * 10 + "efg") * 5, 43),
        ("ab" * 3 + "cdefghij", None),
    ],
)
def test_the_smallest_period_that_covers_most_is_found(text, period):
    assert smallest_period(codes(text)) == period


@hypothesis_settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=300), st.integers(2, 6))
def test_a_repeated_sequence_has_the_period_of_its_smallest_root(step, times):
    whole = step * times
    smallest = next(
        p
        for p in range(1, len(step) + 1)
        if len(step) % p == 0 and whole == step[:p] * (len(whole) // p)
    )
    found = smallest_period(np.array(whole, np.uint64), coverage=1.0)
    # A sequence may also have a period that does not divide its length, if it covers it all.
    shorter = [p for p in range(1, smallest) if whole[p:] == whole[:-p] and 2 * p <= len(whole)]
    assert found in {smallest, *shorter}


def test_a_long_period_among_many_kernels_is_found():
    rng = np.random.default_rng(3)
    step = rng.integers(0, 40, 1_700).astype(np.uint64)
    before = rng.integers(0, 40, 900).astype(np.uint64)
    assert smallest_period(np.concatenate([before, np.tile(step, 12)])) == 1_700


def test_a_step_begins_after_the_usual_idle_time_and_ends_where_the_next_begins():
    rows = kernels("xbcabcabcabQbca")
    for i, row in enumerate(rows):  # 'b' always comes after a pause
        late = 500 * sum(r["name"] == "b" for r in rows[: i + 1])
        row["start_ns"] += late
        row["end_ns"] += late
    work = pl.DataFrame(rows)
    table = repeats(work, coverage=0.5)
    assert table["name"].to_list() == ["b"] * 4
    assert table["n_period_kernels"].to_list() == [3] * 4
    assert table["coverage_fraction"][0] == 12 / 15
    starts = [row["start_ns"] for row in rows]
    assert table["start_ns"].to_list() == [starts[1], starts[4], starts[7], starts[12]]
    ends = [starts[4], starts[7], rows[9]["end_ns"], rows[14]["end_ns"]]
    assert table["end_ns"].to_list() == ends


# Successors ---------------------------------------------------------------------------------------


def follow(moved, **options):
    frames = (
        pl.LazyFrame(schema=TABLES["gpu_faults"].schema),
        pl.LazyFrame(moved, schema=TABLES["migrations"].schema),
    )
    return block_successors(*frames, **options).collect()


def test_successors_of_a_block_are_counted_and_ranked():
    order = [1, 2, 1, 3, 1, 2, 2]
    moved = [copy(1_000 * i, block=b) for i, b in enumerate(order)]
    moved += [copy(500, block=9, device=1), copy(900, block=9, way="dtoh")]
    table = follow(moved)
    columns = ["va_block", "next_va_block", "rank", "n_times", "n_any"]
    assert table.filter(device_id=0).select(columns).rows() == [
        (1, 2, 1, 2, 3),
        (1, 3, 2, 1, 3),
        (2, 1, 1, 1, 2),
        (2, 2, 2, 1, 2),
        (3, 1, 1, 1, 1),
    ]
    assert table["next_fraction"][0] == 2 / 3
    assert table.filter(device_id=1).height == 0
    assert follow(moved, top=1)["rank"].to_list() == [1, 1, 1]


def test_no_copies_have_no_successors():
    table = follow([])
    assert (table.height, table.schema) == (0, BLOCK_SUCCESSORS.schema)


@pytest.mark.parametrize("name", ["stream", "oversubscribed_sweep", "two_gpus"])
def test_successors_of_batches_are_those_of_the_truth(name):
    tables, _ = sample(name)
    truth = pl.read_parquet(SAMPLES / name / "truth" / "batches.parquet")
    wanted = Counter()
    for gpu in (0, 1):
        mine = truth.filter(device_id=gpu).sort("end_ns")["va"] // BLOCK
        wanted.update((gpu, *pair) for pair in itertools.pairwise(mine))
    frames = (tables[n].lazy() for n in ("gpu_faults", "migrations"))
    table = block_successors(*frames, level="batch", top=1_000).collect()
    found = table.select("device_id", "va_block", "next_va_block", "n_times").rows()
    assert {tuple(row[:3]): row[3] for row in found} == wanted


def test_an_unknown_level_is_refused():
    with pytest.raises(UsageError, match="level"):
        follow([], level="page")
