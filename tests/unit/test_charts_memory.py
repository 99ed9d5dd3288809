"""Charts of memory, refaults, places, lanes, steps and the allocator, and the tables that they draw."""

from __future__ import annotations

import os
import random
import sqlite3
from bisect import bisect_right
from collections import defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest

import nsan
from nsan.analysis.catalog import catalog
from nsan.analysis.views.spread import columns_for, thinned_levels
from nsan.charting import chart
from nsan.charts.catalog import find_chart
from nsan.charts.palette import CAUSES
from nsan.charts.saving import rendered
from nsan.schema import KERNELS, MIGRATIONS, NVTX_RANGES, TABLES
from nsan.units import MIB

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 10
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "sample_data" / "model"
FILES = {
    name: MODEL / name / f"{name}.sqlite"
    for name in ("oversubscribed_sweep", "pca_on", "pca_off", "two_gpus")
}
HOTSPOT = ROOT / "sample_data" / "nvprof_hotspot_v100_8192.log.gz"
SNAPSHOTS = ROOT / "sample_data" / "snapshots"
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e{{7*7}}\x00" + "k" * 20_000


@cache
def table(sample, name, **options):
    """Run an analysis on a sample; asked for twice, computed once."""
    return run(opened(sample), name, **options)


@cache
def opened(sample):
    if sample == "hotspot":
        return nsan.open_trace(HOTSPOT)
    if sample == "joined":
        return nsan.join(opened("pca_on"), opened("pca_on snapshot"))
    if sample == "pca_on snapshot":
        return nsan.open_snapshot(MODEL / "pca_on" / "snapshot.pickle")
    if sample in FILES:
        return nsan.open_trace(FILES[sample])
    return nsan.open_snapshot(next(SNAPSHOTS.glob(f"{sample}*")))


def run(source, name, **options):
    return nsan.analyse(source, name, options=options).collect()


def spec_of(sample, name, **more):
    return chart(opened(sample), name, **more).to_dict()


def notes_of(spec):
    return " ".join(spec["title"]["subtitle"])


def marks_of(spec, around=None):
    """Every mark of a chart with its rows and channels, however it is nested."""
    whole = {**(around or {}), **{key: spec[key] for key in ("data", "datasets") if key in spec}}
    parts = [part for key in ("layer", "vconcat", "hconcat") for part in spec.get(key, [])]
    for part in parts:
        yield from marks_of(part, whole)
    if not parts:
        yield {**spec, **whole}


def rows_of(spec):
    found = []
    for mark in marks_of(spec):
        found += mark["datasets"][mark["data"]["name"]]
    return found


# --- levels over time


def level_at_most(steps, start, end):
    """The most of a step function in [start, end), by looking at every step."""
    most = None
    for (begin, level), after in zip(steps, [*(b for b, _ in steps[1:]), None], strict=True):
        reaches = begin < end and (after is None or after > start)
        if reaches and (most is None or level > most):
            most = level
    return most


@pytest.mark.parametrize("seed", range(N))
def test_a_stretch_shows_the_most_and_the_least_of_every_step_that_reaches_into_it(seed):
    rng = random.Random(seed)
    times = sorted(rng.sample(range(rng.choice([300, 10**6])), rng.randint(1, 120)))
    steps = [(t, rng.randint(0, 50)) for t in times]
    frame = pl.DataFrame({"k": 1, "start_ns": times, "level": [level for _, level in steps]})
    got = thinned_levels(frame, ["k"], ["level"], least=["level"], most=rng.choice([1, 7, 30]))
    turned = [(t, -level) for t, level in steps]
    for start, end, most, least in got.select(
        "start_ns", "end_ns", "level", "least_level"
    ).iter_rows():
        until = end if end is not None else times[-1] + 1
        assert most == level_at_most(steps, start, until)
        assert least == -level_at_most(turned, start, until)
    assert all(a[1] == b[0] for a, b in pairwise(got.select("start_ns", "end_ns").rows()))


def test_functions_of_other_keys_do_not_mix_and_short_ones_stay_as_they_are():
    frame = pl.DataFrame(
        {"k": [1, 1, 2, 2, 2], "start_ns": [0, 10, 0, 5, 90], "level": [3, 4, 9, 1, 2]}
    )
    got = thinned_levels(frame, ["k"], ["level"], most=2)
    assert got.filter(pl.col("k") == 1).rows() == [(1, 0, 10, 3, 1), (1, 10, None, 4, 1)]
    # 91 ns in 2 columns of 46 ns: 9, 1 and then 1, 2.
    assert got.filter(pl.col("k") == 2).rows() == [(2, 0, 46, 9, 2), (2, 46, None, 2, 2)]


def test_columns_get_fewer_where_there_are_many_parts():
    assert [columns_for(n, 300) for n in (0, 1, 15, 30, 10**6)] == [300, 300, 300, 150, 1]


@pytest.mark.parametrize("sample", ["oversubscribed_sweep", "pca_on", "two_gpus", "hotspot"])
def test_no_peak_of_the_ledger_is_lost(sample):
    names = ["managed_bytes", "other_bytes", "resident_bytes", "backfilled_bytes"]
    keys = ["pid", "device_id"]
    few, all_steps = (
        table(sample, name).group_by(keys).agg(pl.col(names).max()).sort(keys)
        for name in ("memory_over_time", "memory_ledger")
    )
    assert few.equals(all_steps)
    assert table(sample, "memory_over_time").height <= 600


def test_memory_says_the_factor_that_was_seen_and_what_the_figures_assume():
    spec = spec_of("oversubscribed_sweep", "memory_held")
    notes = notes_of(spec)
    # 48 MiB were allocated, and the model had 32 MiB of room.
    assert "factor 1.5 at most, as observed: 160.00 MiB was evicted" in notes
    assert "never more than 32.00 MiB of 48.00 MiB" in notes
    assert "a lower bound" in notes
    assert "40.00 GiB is far above the picture" in notes
    assert "modelled" in notes
    assert max(row["high"] for row in rows_of(spec)) == 48.0


def test_memory_shows_the_capacity_where_it_is_near():
    far = spec_of("oversubscribed_sweep", "memory_held")
    assert not [row for row in rows_of(far) if row["level"] == "GPU memory"]
    near = spec_of(
        "oversubscribed_sweep",
        "memory_held",
        options={"capacity_bytes": 64 * MIB, "reserve_bytes": 1},
    )
    assert {row["high"] for row in rows_of(near) if row["level"] == "GPU memory"} == {64.0}
    assert "far above" not in notes_of(near)
    # 48 MiB for 64 MiB is less than full, and yet there were evictions.
    assert "would give 0.75" in notes_of(near)


def test_each_gpu_has_a_panel_with_the_same_legend():
    spec = spec_of("two_gpus", "memory_held")
    assert [panel["title"]["text"] for panel in spec["vconcat"]] == [
        "GPU 0 of process 4242",
        "GPU 1 of process 4242",
    ]
    domains = [mark["encoding"]["color"]["scale"]["domain"] for mark in marks_of(spec)]
    assert all(domain == domains[0] for domain in domains)


# --- refaults


@pytest.mark.parametrize("sample", ["oversubscribed_sweep", "pca_on"])
def test_every_refault_is_in_one_class_of_time_and_in_one_of_bytes(sample):
    back = table(sample, "refaults").filter(pl.col("is_same_device")).to_dicts()
    times = [0, *sorted(m * 10**p for p in range(13) for m in (1, 2, 5))]
    sizes = [0, *(4096 << p for p in range(40))]
    expected = defaultdict(int)
    for row in back:
        expected["time", times[bisect_right(times, row["distance_ns"]) - 1]] += row["bytes"]
        expected["bytes", sizes[bisect_right(sizes, row["distance_bytes"]) - 1]] += row["bytes"]
    got = table(sample, "refault_distances").filter(pl.col("bytes") > 0)
    found = {
        (row["measure"], row["min_ns"] if row["measure"] == "time" else row["min_bytes"]): row[
            "bytes"
        ]
        for row in got.to_dicts()
    }
    assert found == expected
    whole = table(sample, "refault_totals")["refaulted_bytes"].sum()
    assert got.group_by("measure").agg(pl.col("bytes").sum())["bytes"].to_list() == [whole, whole]


def evict_and_return(distance_ns):
    """One page that an eviction takes from 10 to 20 ns, and that ends its way back so much later."""
    row = {"pid": 1, "device_id": 0, "va": 1 << 30, "bytes": 4096}
    back = 20 + distance_ns
    rows = [
        {**row, "start_ns": 0, "end_ns": 10, "direction": "htod", "cause_id": 2},
        {**row, "start_ns": 10, "end_ns": 20, "direction": "dtoh", "cause_id": 4},
        {**row, "start_ns": back - 1, "end_ns": back, "direction": "htod", "cause_id": 2},
    ]
    return pl.DataFrame(rows, schema_overrides={n: MIGRATIONS.schema[n] for n in rows[0]})


@pytest.mark.parametrize(("distance", "low"), [(499, 200), (500, 500), (999, 500), (1000, 1000)])
def test_a_class_begins_with_its_own_edge(distance, low):
    frame = evict_and_return(distance)
    absent = [
        pl.lit(None, t).alias(n) for n, t in MIGRATIONS.schema.items() if n not in frame.columns
    ]
    found = catalog()["refault_distances"].run(
        {
            "migrations": frame.lazy().with_columns(absent),
            "allocations": TABLES["allocations"].empty(),
        }
    )
    times = found.collect().filter((pl.col("measure") == "time") & (pl.col("bytes") > 0))
    assert times.select("min_ns", "bytes", "by_fault_bytes").rows() == [(low, 4096, 4096)]


def test_refaults_show_what_did_not_come_back_too():
    notes = notes_of(spec_of("oversubscribed_sweep", "refault_distance"))
    row = table("oversubscribed_sweep", "refault_totals").row(0, named=True)
    assert (row["evicted_bytes"], row["refaulted_bytes"]) == (160 * MIB, 144 * MIB)
    assert "160.00 MiB in 80 evictions" in notes
    assert "144.00 MiB (90%) came back" in notes
    assert "16.00 MiB not" in notes


def test_without_evictions_the_chart_says_so():
    spec = spec_of("two_gpus", "refault_distance")
    assert "Nothing that was evicted came back." in str(rows_of(spec))


# --- kernels and allocations


def moved_in_file(sample, direction):
    """Bytes of migrations by plain SQL: kind 11 goes to the GPU, 12 to the CPU."""
    with sqlite3.connect(f"file:{FILES[sample]}?mode=ro&immutable=1", uri=True) as db:
        query = "select sum(bytes) from CUPTI_ACTIVITY_KIND_MEMCPY where copyKind = ?"
        return db.execute(query, (direction,)).fetchone()[0]


@pytest.mark.parametrize("top", [1, 12])
@pytest.mark.parametrize(
    ("name", "whole", "counts"),
    [
        ("top_kernels", "faults_by_kernel", ("n_fault_rows", "n_batches", "n_instances")),
        (
            "top_allocations",
            "faults_by_allocation",
            ("n_lowest_page_rows", "n_cpu_faults", "bytes"),
        ),
    ],
)
def test_the_largest_and_the_others_add_up_to_all(name, whole, counts, top):
    got, all_rows = table("pca_on", name, top=top), table("pca_on", whole)
    for column in ("in_bytes", "out_bytes", "evicted_bytes", *counts):
        assert got[column].sum() == all_rows[column].sum(), column
    assert got["in_bytes"].sum() == moved_in_file("pca_on", 11)
    assert got["out_bytes"].sum() == moved_in_file("pca_on", 12)
    assert got["rank"].drop_nulls().to_list() == [*range(1, len(got["rank"].drop_nulls()) + 1)]
    assert len(got["rank"].drop_nulls()) <= top


def test_what_moves_most_or_faults_most_is_kept():
    names = table("pca_on", "top_kernels", top=2)["name"].to_list()
    all_rows = table("pca_on", "faults_by_kernel").filter(pl.col("name").is_not_null())
    moves = all_rows.sort(pl.col("in_bytes") + pl.col("out_bytes"), descending=True)["name"][0]
    faults = all_rows.sort("n_batches", descending=True)["name"][0]
    assert moves != faults
    assert {moves, faults} == {*names[:2]}


def test_bars_of_kernels_add_up_to_the_trace_by_direction():
    spec = spec_of("pca_on", "faults_of_kernels")
    rows = [row for row in rows_of(spec) if "cause" in row]
    came = sum(row["bytes"] for row in rows if row["bytes"] > 0)
    left = -sum(row["bytes"] for row in rows if row["bytes"] < 0)
    assert came == pytest.approx(moved_in_file("pca_on", 11) / MIB)
    assert left == pytest.approx(moved_in_file("pca_on", 12) / MIB)
    assert {row["cause"] for row in rows} == {"page fault", "speculative prefetch", "eviction"}


def test_bars_of_allocations_add_up_to_the_trace_by_direction():
    rows = [row for row in rows_of(spec_of("pca_off", "faults_of_allocations")) if "cause" in row]
    assert sum(r["bytes"] for r in rows if r["bytes"] > 0) * MIB == moved_in_file("pca_off", 11)
    assert -sum(r["bytes"] for r in rows if r["bytes"] < 0) * MIB == moved_in_file("pca_off", 12)


def test_where_no_cause_was_recorded_bars_are_grey_and_the_note_says_it():
    spec = spec_of("hotspot", "faults_of_allocations")
    rows = [row for row in rows_of(spec) if "cause" in row]
    assert {row["cause"] for row in rows} == {"unknown"}
    assert "No causes were recorded" in notes_of(spec)


def test_without_fault_rows_the_bars_are_batches():
    trace = nsan.open_trace(ROOT / "sample_data" / "um_vector_add_rtx4060l.sqlite")
    spec = chart(trace, "faults_of_kernels").to_dict()
    titles = [mark["encoding"]["x"]["title"] for mark in marks_of(spec)]
    assert titles == ["MiB: to the CPU | to the GPU", "Batches"]
    assert "Without fault rows" in notes_of(spec)


def kernels_with(names):
    """Figures of kernels of these names, each with 1 MiB of page faults."""
    return pl.DataFrame(
        [
            {"pid": 1, "device_id": 0, "rank": i + 1, "part": "named", "name": name, "n_names": 1}
            | {"in_bytes": MIB, "coherence_bytes": MIB, "n_fault_rows": 1}
            for i, name in enumerate(names)
        ]
    ).select(
        pl.col(n).cast(t)
        if n
        in {"pid", "device_id", "rank", "part", "name", "n_names"}
        | {"in_bytes", "coherence_bytes", "n_fault_rows"}
        else pl.lit(0).cast(t).alias(n)
        for n, t in catalog()["top_kernels"].result.schema.items()
    )


def test_hostile_names_are_short_text_and_stay_apart():
    names = [HOSTILE + "a", HOSTILE + "a" * 5, "k" * 400 + "x", "k" * 401 + "x"]
    spec = find_chart("faults_of_kernels").draw(kernels_with(names)).to_dict()
    labels = [row["label"] for row in rows_of(spec) if "cause" in row]
    assert len({*labels}) == len(names)
    assert all(
        len(label) < 40 and "\u202e" not in label and "\x00" not in label for label in labels
    )
    assert sum(row["bytes"] for row in rows_of(spec) if "cause" in row) == len(names)


# --- lanes


def kernels(*rows):
    """Kernels as start, end, name, stream."""
    frame = pl.DataFrame(
        [(*row[:3], row[3] if len(row) > 3 else 7) for row in rows],
        schema=["start_ns", "end_ns", "name", "stream_id"],
        orient="row",
    )
    return full(frame.with_columns(pid=pl.lit(1), device_id=pl.lit(0)), KERNELS)


def full(frame, schema_of):
    return frame.lazy().select(
        (pl.col(n) if n in frame.columns else pl.lit(None)).cast(t).alias(n)
        for n, t in schema_of.schema.items()
    )


def lanes(work, ranges=None, **options):
    tables = {"kernels": work, "nvtx_ranges": NVTX_RANGES.empty() if ranges is None else ranges}
    return catalog()["work_lanes"].run(tables, options).collect()


def test_narrow_kernels_of_a_column_are_one_row_and_wide_ones_stay():
    # 1001 ns in 10 columns of 101 ns; with 3 columns at most 3 single kernels.
    work = kernels((0, 4, "a"), (10, 20, "b"), (20, 30, "b"), (200, 700, "wide"), (995, 1001, "a"))
    got = lanes(work, n_columns=4)
    # Columns of 251 ns: the first three begin in column 0; the last one is alone in column 3.
    assert got.select("start_ns", "end_ns", "n", "busy_ns", "name", "n_names").rows() == [
        (0, 30, 3, 24, "b", 2),
        (200, 700, 1, 500, "wide", 1),
        (995, 1001, 1, 6, "a", 1),
    ]
    assert got["lane_busy_ns"].unique().to_list() == [530]


def test_few_kernels_are_never_put_together():
    work = kernels(*((i, i + 1, "k") for i in range(0, 1000, 10)))
    assert lanes(work, n_columns=100)["n"].to_list() == [1] * 100


def test_streams_beyond_the_busiest_share_a_lane():
    work = kernels(*((10 * i, 10 * i + i, "k", i) for i in range(1, 7)))
    got = lanes(work, most_streams=2)
    assert got.group_by("stream_id").len().sort("stream_id", nulls_last=True).rows() == [
        (5, 1),
        (6, 1),
        (None, 4),
    ]


@pytest.mark.parametrize("seed", range(N))
def test_every_kernel_is_counted_once_and_a_lane_has_few_rows(seed):
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randint(1, 400)):
        start = rng.randint(0, 10_000)
        rows.append(
            (start, start + rng.choice([0, 1, 5, 900]), rng.choice("abc"), rng.randint(0, 5))
        )
    got = lanes(kernels(*rows), n_columns=12, most_streams=2)
    assert got["n"].sum() == len(rows)
    assert got.group_by("stream_id").len()["len"].max() <= 24
    first, last = min(r[0] for r in rows), max(r[1] for r in rows)
    assert (got["start_ns"].min(), got["end_ns"].max()) == (first, last)
    covered = {t for start, end, *_ in rows for t in range(start, end)}
    by_stream = defaultdict(set)
    for start, end, _, stream in rows:
        by_stream[stream] |= {*range(start, end)}
    own = got.drop_nulls("stream_id").unique("stream_id").select("stream_id", "lane_busy_ns").rows()
    assert all(busy == len(by_stream[stream]) for stream, busy in own)
    assert got.filter(pl.col("n") == 1)["busy_ns"].sum() <= len(covered) * 6


def test_lanes_of_a_chart_are_named_and_narrow_ones_are_told():
    work = kernels(*((i, i + 1, HOSTILE if i % 20 else "b") for i in range(0, 100_000, 10)))
    spec = find_chart("work_over_time").draw(lanes(work)).to_dict()
    rows = rows_of(spec)
    assert {row["lane"] for row in rows} == {"GPU 0 stream 7"}
    assert "10 000 narrow items put together in 240 bars" in notes_of(spec)
    assert all("\u202e" not in str(row) and len(str(row)) < 300 for row in rows)


def test_a_chart_has_nine_lanes_at_most_and_says_how_many_more():
    ranges = full(
        pl.DataFrame(
            [
                {"start_ns": 0, "end_ns": 9, "pid": 1, "tid": t, "name": "r", "depth": 0}
                for t in range(12)
            ]
        ),
        NVTX_RANGES,
    )
    spec = find_chart("work_over_time").draw(lanes(kernels((0, 5, "k")), ranges)).to_dict()
    shown = {row["lane"] for row in rows_of(spec)}
    assert len(shown) == 9
    # The ranges have numbers before the kernels, and still leave them room.
    assert "GPU 0 stream 7" in shown
    assert "4 lanes more" in notes_of(spec)


# --- steps


def test_steps_hold_what_iterations_count():
    got = table("oversubscribed_sweep", "step_traffic")
    steps = table("oversubscribed_sweep", "iterations").filter(pl.col("part") == "step")
    out = pl.col("direction") == "dtoh"
    size = pl.col("bytes")
    sums = (
        got.group_by("step_id")
        .agg(size.filter(~out).sum(), out=size.filter(out).sum())
        .sort("step_id")
    )
    assert sums.rows() == steps.select("step_id", "in_bytes", "out_bytes").rows()
    last = got.select((pl.col("offset_ns") < pl.col("time_ns")).all()).item()
    assert last
    assert got.select(pl.col("offset_ns") % pl.col("length_ns")).sum().item() == 0


def steps_of(sizes):
    """A step of 100 ns for each size, in which so many bytes go to the GPU at its middle."""
    ranges = [
        {
            "start_ns": 100 * i,
            "end_ns": 100 * i + 100,
            "pid": 1,
            "tid": 1,
            "name": "step",
            "depth": 0,
        }
        for i in range(len(sizes))
    ]
    moved = [
        {"start_ns": 100 * i + 50, "end_ns": 100 * i + 51, "pid": 1, "device_id": 0, "va": 4096 * i}
        | {"bytes": size, "direction": "htod", "cause": "coherence", "cause_id": 2}
        for i, size in enumerate(sizes)
        if size
    ]
    tables = {name: TABLES[name].empty() for name in catalog()["step_traffic"].reads}
    tables["nvtx_ranges"] = full(pl.DataFrame(ranges), NVTX_RANGES)
    tables["migrations"] = full(pl.DataFrame(moved), MIGRATIONS)
    return catalog()["step_traffic"].run(tables).collect()


def test_of_many_steps_the_first_the_last_and_the_largest_are_shown_and_the_rest_named():
    sizes = [4096 * n for n in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 1)]
    got = steps_of(sizes)
    # 0 and 14 are the edges; of the others the ten that move most are 3 to 12.
    assert got["step_id"].to_list() == [0, *range(3, 13), 14]
    assert got.filter(pl.col("step_id") == 0).select("bytes", "direction").rows() == [(0, None)]
    # 100 ns in 40 stretches of 3 ns: the middle lies in the one that begins at 48.
    assert got.filter(pl.col("step_id") == 3).select("offset_ns", "length_ns").rows() == [(48, 3)]
    spec = find_chart("step_by_step").draw(got).to_dict()
    assert "12 of 15 steps" in notes_of(spec)
    assert "Left out: 1 to 2, 13." in notes_of(spec)
    panels = [panel for line in spec["vconcat"] for panel in line["hconcat"]]
    assert [panel["title"]["text"].split(":")[0] for panel in panels] == [
        f"Step {i}" for i in [0, *range(3, 13), 14]
    ]


def test_causes_of_a_stretch_lie_one_on_the_other_and_out_is_below_zero():
    rows = rows_of(spec_of("pca_on", "step_by_step"))
    tops, bottoms = defaultdict(list), defaultdict(list)
    for row in rows:
        side = tops if row["high"] > row["low"] else bottoms
        side[row["step_id"], row["start"]].append((row["low"], row["high"]))
    assert tops
    assert bottoms
    for edges in [*tops.values(), *bottoms.values()]:
        ordered = sorted(edges, key=lambda edge: abs(edge[1]))
        assert ordered[0][0] == pytest.approx(0, abs=1e-9)
        assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(ordered))
    assert all(high < 0 for edges in bottoms.values() for _, high in edges)


# --- the allocator


def test_the_peak_of_the_allocator_is_in_its_levels():
    few, whole = table("decomfl", "allocator_levels"), table("decomfl", "allocator_timeline")
    for name in ("reserved_bytes", "active_bytes", "allocated_bytes", "requested_bytes"):
        assert few[name].max() == whole[name].max()
    assert few.height == 400


GOLDEN = {
    "decomfl": 1_897_922_560,
    "verl": 26_189_234_176,
    "kivi": 17_133_731_840,
    "flexgen_opt1.3b": 7_608_467_456,
    "flexgen_oom": 11_844_714_496,
}
"""Reserved bytes, counted over the pickles by plain Python (sample_data/snapshots/README.md)."""


@pytest.mark.parametrize("most", [2, 40])
@pytest.mark.parametrize("sample", GOLDEN)
def test_the_segment_map_adds_up_to_what_is_reserved(sample, most):
    got = table(sample, "segment_map", most_segments=most, n_cells=100)
    assert got["bytes"].sum() == GOLDEN[sample]
    assert got.height < 600
    own = got.filter(pl.col("segment_va").is_not_null())
    sums = own.group_by("segment_va").agg(pl.col("bytes").sum(), pl.col("segment_bytes").first())
    assert (sums["bytes"] == sums["segment_bytes"]).all()
    assert own["segment_va"].n_unique() <= most + 1


def test_without_a_history_the_map_is_that_of_the_snapshot():
    got = table("verl", "segment_map", n_cells=10**9, most_segments=10**6)
    state = {
        "active_allocated": "allocated",
        "active_pending_free": "pending",
        "inactive": "cached",
    }
    expected = {
        (row["va"], row["bytes"], state[row["state"]])
        for row in opened("verl").blocks.collect().to_dicts()
    }
    rows = got.to_dicts()
    assert {(r["segment_va"] + r["offset_bytes"], r["bytes"], r["state"]) for r in rows} == expected
    assert len(rows) == 638
    assert got["is_exact"].all()
    assert got["sequence"].null_count() == 638


@pytest.mark.parametrize("sample", ["decomfl", "pca_on snapshot"])
def test_with_a_history_the_map_is_that_of_the_peak(sample):
    got = table(sample, "segment_map", n_cells=10**9, most_segments=10**6)
    levels = table(sample, "allocator_timeline")
    peak = levels.row(levels["active_bytes"].arg_max(), named=True)
    assert got["sequence"].unique().to_list() == [peak["sequence"]]
    assert got.filter(pl.col("state") == "allocated")["bytes"].sum() == peak["allocated_bytes"]
    assert got["bytes"].sum() == peak["reserved_bytes"]
    # Blocks fill their segment without a gap.
    for part in got.sort("offset_bytes").partition_by("segment_va"):
        edges = [(o, o + b) for o, b in part.select("offset_bytes", "bytes").iter_rows()]
        assert edges[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(edges))


def test_narrow_blocks_are_put_together_by_state_and_keep_their_bytes():
    exact = table("kivi", "segment_map", n_cells=10**9)
    few = table("kivi", "segment_map", n_cells=40)
    assert few.height < exact.height
    sums = [
        f.group_by("state").agg(pl.col("bytes", "n_blocks").sum()).sort("state")
        for f in (exact, few)
    ]
    assert sums[0].equals(sums[1])


def test_addresses_on_an_axis_are_text_that_no_float_rounds():
    spec = spec_of("verl", "segments_at_peak")
    segments = {row["segment"] for row in rows_of(spec)}
    known = opened("verl").segments.select("va").collect()["va"].to_list()
    assert segments <= {f"{va:#x}" for va in known}
    assert len(segments) == 40
    assert "87 smaller segments not shown" in notes_of(spec)


@cache
def cells_by_hand():
    """The cells of the map of what moved, by a plain loop over the parts of migrations."""
    parts = opened("joined").tensor_moves.collect().to_dicts()
    blocks = sorted({p["va"] >> 21 for p in parts})
    first = min(p["start_ns"] for p in parts)
    width = max((max(p["start_ns"] for p in parts) - first) // 96 + 1, 1)
    per_row = (len(blocks) - 1) // 48 + 1
    place = {block: i // per_row for i, block in enumerate(blocks)}
    cells = defaultdict(lambda: defaultdict(int))
    for p in parts:
        cells[place[p["va"] >> 21], (p["start_ns"] - first) // width][p["state"]] += p["bytes"]
    return cells


def test_a_cell_has_the_state_that_most_of_its_bytes_were_of():
    expected = cells_by_hand()
    got = table("joined", "moves_map").to_dicts()
    assert {(r["row"], r["column"]) for r in got} == {*expected}
    for row in got:
        states = expected[row["row"], row["column"]]
        assert row["bytes"] == sum(states.values())
        assert row["dead_bytes"] == states.get("cached", 0) + states.get("unused", 0)
        assert row["state_bytes"] == states[row["state"]] == max(states.values())


# --- every chart

CHARTS = {
    "memory_held": "oversubscribed_sweep",
    "refault_distance": "pca_on",
    "faults_of_kernels": "pca_on",
    "faults_of_allocations": "pca_off",
    "work_over_time": "pca_on",
    "step_by_step": "oversubscribed_sweep",
    "allocator_over_time": "decomfl",
    "segments_at_peak": "kivi",
    "moves_by_state": "joined",
}


@pytest.mark.parametrize(("name", "theme"), [*zip(CHARTS, ["light", "dark"] * 5, strict=False)])
def test_a_chart_fits_narrow_pages_and_has_few_rows_and_titled_axes(name, theme):
    drawn = chart(opened(CHARTS[name]), name, width=420, theme=theme)
    spec = drawn.to_dict()
    assert sum(len(rows) for rows in spec["datasets"].values()) <= 5000
    titles = {
        m["encoding"][c].get("title")
        for m in marks_of(spec)
        for c in ("x", "y")
        if c in m["encoding"]
    }
    assert any(titles)
    ground = {"light": "#ffffff", "dark": "#16181d"}[theme]
    assert spec["config"]["background"] == ground
    svg = rendered(drawn, ".svg").decode()
    colours = {part.split('"')[0] for part in svg.split('fill="')[1:]}
    assert len(colours - {"none", "transparent", ground}) > 1


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_of_nothing_is_a_sentence_and_no_blank_frame(name):
    found = find_chart(name)
    frames = [pl.DataFrame(schema=catalog()[each].result.schema) for each in found.draws]
    spec = found.draw(*frames).to_dict()
    assert " ".join(row["text"] for row in rows_of(spec)).endswith(".")
    assert spec["title"]["text"] == [found.title]


@pytest.mark.parametrize(
    ("sample", "name", "said"),
    [
        ("hotspot", "step_by_step", "No loop was recognised"),
        ("kivi", "allocator_over_time", "record one with torch.cuda.memory._record_memory_history"),
    ],
)
def test_where_a_capture_has_nothing_to_draw_the_chart_says_what_is_missing(sample, name, said):
    assert said in " ".join(row["text"] for row in rows_of(spec_of(sample, name)))


def test_causes_have_the_colours_that_they_have_everywhere():
    svg = rendered(chart(opened("pca_on"), "faults_of_kernels"), ".svg").decode()
    for cause in ("coherence", "prefetch", "eviction"):
        assert CAUSES[cause].light in svg
