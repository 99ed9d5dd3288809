"""The detector of lost rows: silent on whole traces, loud where rows were cut out."""

from __future__ import annotations

import os
from functools import cache

import hypothesis
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plants.placement import polled
from polars.testing import assert_frame_equal
from programs import EndlessError, programs, run_to_end

from nsan import open_trace
from nsan.analysis.loss.lost_rows import LOST_ROWS, PREFETCH_REPLAY, lost_rows, prefetch_replay
from nsan.analysis.loss.masks import (
    before_each,
    leaf_counts,
    n_pages,
    runs_of_pages,
    whole_leaves,
)
from nsan.model.machine import run
from nsan.model.making import oversubscribed, peak_bytes
from nsan.model.recording import QUEUE_ROWS, Style, record
from nsan.model.samples import SAMPLES
from nsan.model.settings import Settings
from nsan.model.size import Size
from nsan.model.workloads import WORKLOADS
from nsan.schema import TABLES
from nsan.units import KIB, MIB

SOAK = os.environ.get("NSAN_SOAK") == "1"
N_PROGRAMS = 200 if SOAK else 6
N_HOLES = 50 if SOAK else 3

READS = ("migrations", "gpu_faults", "cpu_faults", "kernels", "allocations", "api_calls")
DRIVER = ("migrations", "gpu_faults", "cpu_faults")
WITHOUT = {
    "all tables": (),
    "no CPU faults": ("cpu_faults",),
    "no GPU faults": ("gpu_faults",),
    "no faults": ("cpu_faults", "gpu_faults"),
    "no calls": ("api_calls",),
    "no places": ("allocations",),
    "migrations and kernels": ("cpu_faults", "gpu_faults", "allocations", "api_calls"),
}
if not SOAK:
    WITHOUT = {name: WITHOUT[name] for name in list(WITHOUT)[::3]}
PAGE = 4 * KIB
BASE = 1 << 40


def typed(name, rows):
    """A table of the trace from a few columns; the others are null."""
    table = TABLES[name]
    frame = pl.DataFrame(rows, schema=list(rows[0]) if rows else None) if rows else pl.DataFrame()
    columns = [
        (pl.col(c) if c in frame.columns else pl.lit(None)).cast(t).alias(c)
        for c, t in table.schema.items()
    ]
    return frame.select(columns) if rows else table.empty().collect()


def holes(tables, without=()):
    lazy = [
        tables[n].lazy() if n in tables and n not in without else TABLES[n].empty() for n in READS
    ]
    return LOST_ROWS.validate(lost_rows(*lazy)).collect()


def replayed(migrations):
    return PREFETCH_REPLAY.validate(prefetch_replay(migrations.lazy())).collect()


def cut(tables, begin, length):
    """Leave out every row of the driver that starts in a stretch of time."""
    lost = pl.col("start_ns").is_between(begin, begin + length, closed="left")
    return tables | {name: tables[name].filter(~lost) for name in DRIVER}


# Traces by hand -----------------------------------------------------------------------------------


def move(start, first, n, *, block=0, cause=2, direction="htod", pid=1, device=0, ns=10):
    return {
        "start_ns": start,
        "end_ns": start + ns,
        "pid": pid,
        "device_id": device,
        "va": BASE + block * 2 * MIB + first * PAGE,
        "bytes": n * PAGE,
        "direction": direction,
        "cause_id": cause,
    }


def push(start, first, n, *, block=0, **more):
    """A push as one faulted page brings it: the page, and the rest by the prefetcher."""
    return [
        move(start, first, 1, block=block, **more),
        move(start + 11, first + 1, n - 1, block=block, cause=3, **more),
    ]


STEPS = [(0, 16), (16, 16), (32, 32), (64, 64), (128, 128), (256, 256)]
"""How one thread brings in a block (GTX 1080, public trace): first page and pages of each push."""


def stream(*, block=0, start=1000, every=1000, **more):
    """The six pushes of a block."""
    return [push(start + i * every, *step, block=block, **more) for i, step in enumerate(STEPS)]


def cpu_faults(*, block=0, start=0):
    """The CPU fills a block before: a fault for each of the same six steps."""
    return [
        {"start_ns": start + i, "pid": 1, "va": BASE + block * 2 * MIB + first * PAGE}
        for i, (first, _) in enumerate(STEPS)
    ]


CALLS = [{"start_ns": 0, "end_ns": 1, "pid": 1, "name": "cudaLaunchKernel_v7000"}]
KERNEL = [{"start_ns": 500, "end_ns": 900_000, "pid": 1, "device_id": 0}]


def hand_made(*pushes, cpu=(), gpu=(), calls=CALLS, places=()):
    rows = [row for one in pushes for row in one]
    return {
        "migrations": typed("migrations", rows),
        "cpu_faults": typed("cpu_faults", list(cpu)),
        "gpu_faults": typed("gpu_faults", list(gpu)),
        "kernels": typed("kernels", KERNEL),
        "api_calls": typed("api_calls", list(calls)),
        "allocations": typed("allocations", list(places)),
    }


LATE = {"start": 10_000_000}
"""Long after the CPU's faults, so that these are certain."""


def test_six_pushes_of_a_block_are_exact():
    found = replayed(hand_made(*stream())["migrations"])
    assert found.select("pid", "device_id", "n_pushes", "n_exact_pushes").rows() == [(1, 0, 6, 6)]
    assert holes(hand_made(*stream(), cpu=cpu_faults())).is_empty()


def test_a_push_left_out_is_noticed_where_the_cpu_had_filled_the_block():
    pushes = stream(**LATE) + stream(**LATE | {"start": 20_000_000}, block=1)
    cpu = cpu_faults() + cpu_faults(block=1, start=100)
    assert holes(hand_made(*pushes, cpu=cpu)).is_empty()
    # Without the third push, 32 pages from page 32 on, the fourth one is too large.
    found = holes(hand_made(*pushes[:2], *pushes[3:], cpu=cpu))
    assert found["level"].to_list() == ["certain"]
    # Two copies of 10 ns, chained: 10_001_000 to 10_001_021; the next push starts at 10_003_000.
    assert found.select("start_ns", "end_ns", "is_silent").rows() == [
        (10_001_021, 10_003_000, True)
    ]
    assert found["duration_ns"].to_list() == [1979]


def test_without_cpu_faults_the_same_may_be_first_touch():
    pushes = stream(**LATE)
    assert holes(hand_made(*pushes[:2], *pushes[3:])).is_empty()
    assert replayed(hand_made(*pushes[:2], *pushes[3:])["migrations"])["n_mismatched_pushes"][0] > 0


def evicted(start, block=0):
    return [move(start, 0, 512, block=block, cause=4, direction="dtoh")]


def test_pages_that_come_twice_must_have_left():
    twice = [*stream(), *stream(start=50_000)]
    whole = [*stream(), evicted(40_000), *stream(start=50_000), evicted(80_000)]
    assert holes(hand_made(*whole)).is_empty()
    found = holes(hand_made(*twice, evicted(80_000)))
    assert found["level"].to_list() == ["certain"]
    assert found["least_bytes"].to_list() == [2 * MIB]
    # The pause of 44 us is not far longer than the other of 24 us: the hole is somewhere in between.
    assert found.select("start_ns", "end_ns", "is_silent").rows() == [(6000, 50_000, False)]


def test_pages_that_leave_twice_must_have_come():
    found = holes(hand_made(*stream(), evicted(40_000), evicted(80_000)))
    assert found.select("evidence", "least_bytes", "start_ns", "end_ns", "level").rows() == [
        ("left_twice", 2 * MIB, 40_010, 80_000, "certain")
    ]


def test_data_that_come_again_and_never_leave_may_be_read_mostly():
    twice = [*stream(), *stream(start=50_000)]
    advice = [*CALLS, {"start_ns": 5, "end_ns": 6, "pid": 1, "name": "cudaMemAdvise_v8000"}]
    assert holes(hand_made(*twice, calls=())).is_empty()
    assert holes(hand_made(*twice, calls=advice)).is_empty()
    assert not holes(hand_made(*twice)).is_empty()


def test_memory_released_in_between_begins_anew():
    twice = [*stream(), *stream(start=50_000)]
    free = [*CALLS, {"start_ns": 45_000, "end_ns": 45_010, "pid": 1, "name": "cudaFree_v3020"}]
    assert holes(hand_made(*twice, calls=free)).is_empty()
    far = {"pid": 1, "va": BASE + 64 * MIB, "bytes": MIB, "alloc_ns": 0, "free_ns": 45_000}
    here = far | {"va": BASE}
    assert holes(hand_made(*twice, calls=free, places=[here])).is_empty()
    assert not holes(hand_made(*twice, calls=free, places=[far])).is_empty()


def test_a_push_without_a_faulted_page_may_belong_to_a_first_touch():
    # 17 of 32 leaves resident, one page faults that was nowhere: the rest comes, nothing else.
    others = [push(1000 + 100 * i, 32 * i, 16) for i in range(4)]
    alone = [move(90_000, 80, 16, cause=3)]
    assert holes(hand_made(*others, alone)).is_empty()
    assert replayed(hand_made(*others, alone)["migrations"])["n_headless_pushes"].to_list() == [1]


def test_a_push_without_a_faulted_page_is_noticed_in_a_block_whose_pages_are_all_known():
    more = stream(block=1, start=200_000)
    pushes = stream()
    headless = [*pushes[:3], pushes[3][1:], *pushes[4:], evicted(90_000)]
    # The page whose row is lost leaves: it was there, so it may have been touched first.
    assert holes(hand_made(*headless, *more)).is_empty()
    again = [evicted(90_000), *stream(start=100_000)]
    known = [*pushes, *again[:4], again[4][1:], *again[5:], *more]
    found = holes(hand_made(*known))
    # What comes without a fault is too much; and page 64 itself is missing ever after.
    assert found["evidence"].to_list() == ["brought_too_much, not_brought"]
    assert found["level"].to_list() == ["certain"]


def fault(start, end, page, block=0):
    va = BASE + block * 2 * MIB + page * PAGE
    return {"start_ns": start, "end_ns": end, "pid": 1, "device_id": 0, "va": va}


BATCHES = [fault(900 + i * 1000, 1100 + i * 1000, first) for i, (first, _) in enumerate(STEPS)]


def test_a_fault_row_whose_page_comes_only_later_has_lost_its_copy():
    assert holes(hand_made(*stream(), gpu=BATCHES)).is_empty()
    # The page faults at 500 and comes at 1000: a batch ended in between without it.
    early = fault(500, 600, 0)
    found = holes(hand_made(*stream(), gpu=[early, *BATCHES]))
    assert found["evidence"].to_list() == ["fault_row_without_copy"]


def test_a_copy_that_no_fault_row_can_be_the_batch_of_has_lost_it():
    found = holes(hand_made(*stream(), gpu=BATCHES[:2] + BATCHES[3:]))
    assert found["evidence"].to_list() == ["copy_without_fault_row"]
    assert found["level"].to_list() == ["certain"]
    # The row lost started after that of the batch before, 1900, and before its copy at 3000.
    assert found["earliest_ns"][0] >= 1900
    assert found["latest_ns"][0] <= 3000


def test_nothing_in_nothing_out_and_rows_without_time_or_place_are_left_out():
    assert holes({}).is_empty()
    assert replayed(TABLES["migrations"].empty().collect()).is_empty()
    tables = hand_made(*stream(), evicted(40_000), evicted(80_000))
    nulls = tables["migrations"][:4].with_columns(
        start_ns=pl.Series([None, 5, None, 7], dtype=pl.Int64),
        va=pl.Series([BASE, None, None, BASE], dtype=pl.UInt64),
        bytes=pl.Series([PAGE, PAGE, None, None], dtype=pl.Int64),
    )
    with_nulls = tables | {"migrations": pl.concat([tables["migrations"], nulls])}
    assert_frame_equal(holes(with_nulls), holes(tables))


def test_order_of_rows_does_not_matter():
    tables = hand_made(*stream(), evicted(40_000), evicted(80_000), gpu=BATCHES)
    mixed = {name: frame.sample(fraction=1, shuffle=True, seed=3) for name, frame in tables.items()}
    assert_frame_equal(holes(mixed), holes(tables))
    assert_frame_equal(replayed(mixed["migrations"]), replayed(tables["migrations"]))


@pytest.mark.parametrize("other", [{"pid": 2}, {"pid": None}, {"device": 1}, {"device": None}])
def test_processes_and_gpus_are_kept_apart(other):
    # Interleaved in time with the first; each is whole, together pages would come twice.
    tables = hand_made(*stream(), *stream(start=1500, block=0 if "pid" in other else 1, **other))
    calls = [CALLS[0] | {"pid": other.get("pid", 1)}, *CALLS]
    assert holes(tables | {"api_calls": typed("api_calls", calls)}).is_empty()
    assert replayed(tables["migrations"])["n_exact_pushes"].to_list() == [6, 6]


def test_where_causes_are_not_recorded_nothing_is_said_of_the_prefetcher():
    tables = hand_made(*stream())
    unknown = tables["migrations"].with_columns(cause_id=pl.lit(None, pl.Int64))
    assert replayed(unknown).is_empty()
    assert holes(tables | {"migrations": unknown}).is_empty()


# Sets of pages ------------------------------------------------------------------------------------


def as_sets(words):
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


runs = st.tuples(st.integers(0, 512), st.integers(0, 512)).map(sorted)


def left_by_those_before(group, add, drop):
    """One event after the other, with Python's own sets."""
    holds, last = set(), None
    for g, (a, b), (c, d) in zip(group, add, drop, strict=True):
        holds = holds if g == last else set()
        last = g
        yield holds
        holds = (holds - set(range(c, d))) | set(range(a, b))


def check_before_each(group, add, drop):
    expected = list(left_by_those_before(group, add, drop))
    numbers = np.array(group, dtype=np.int64)
    added, dropped = (
        runs_of_pages(*np.array(side, dtype=np.int64).reshape(-1, 2).T) for side in (add, drop)
    )
    found = before_each(numbers, added, ~dropped)
    assert as_sets(found) == expected
    assert n_pages(found).tolist() == [len(pages) for pages in expected]
    kept = list(left_by_those_before(group, add, [(0, 0)] * len(drop)))
    assert as_sets(before_each(numbers, added, None)) == kept


@given(st.lists(st.tuples(st.integers(0, 3), runs, runs), max_size=30))
def test_what_holds_before_each_event_is_what_the_events_before_leave(rows):
    rows = sorted(rows, key=lambda row: row[0])
    check_before_each(*([row[i] for row in rows] for i in range(3)))


@pytest.mark.parametrize("lengths", [(2500,), (1, 31, 32, 33, 64, 65, 1), (1024, 1025, 1)])
def test_so_it_is_where_a_group_has_many_events(lengths):
    random = np.random.default_rng(len(lengths))
    group = [g for g, n in enumerate(lengths) for _ in range(n)]
    add, drop = (np.sort(random.integers(0, 513, (len(group), 2))) for _ in range(2))
    # Mostly nothing is dropped, else no event of long ago would show.
    drop[random.random(len(group)) < 0.95] = 0
    add[:, 1] = np.minimum(add[:, 0] + random.integers(0, 3, len(group)), 512)
    check_before_each(group, add.tolist(), drop.tolist())


@given(st.lists(runs, min_size=1, max_size=10))
def test_pages_are_counted_by_leaf(sides):
    low, high = np.array(sides, dtype=np.int64).T
    sets = runs_of_pages(low, high)
    pages = [set(range(a, b)) for a, b in sides]
    expected = [[len(p & set(range(i, i + 16))) for i in range(0, 512, 16)] for p in pages]
    assert leaf_counts(sets).tolist() == expected
    leaves = whole_leaves(leaf_counts(sets) > 0)
    assert as_sets(leaves) == [
        {q for p in own for q in range(p // 16 * 16, p // 16 * 16 + 16)} for own in pages
    ]


# A real capture and the model ---------------------------------------------------------------------


def test_every_push_of_a_real_capture_is_exact(sample_data):
    trace = open_trace(sample_data / "um_vector_add_rtx4060l.sqlite")
    # calibration.md: 12 batches of two pushes, all exact.
    found = prefetch_replay(trace.migrations).collect()
    assert found.select("n_pushes", "n_exact_pushes", "rule_holds").rows() == [(24, 24, True)]
    assert lost_rows(*(getattr(trace, name) for name in READS)).collect().is_empty()


@pytest.fixture(scope="session")
def sample_data(request):
    return request.config.rootpath / "sample_data"


@cache
def modelled(name, n_bytes, steps=1, factor=None, style=None):
    program = WORKLOADS[name].build(Size(n_bytes, iterations=steps, n_gpus=WORKLOADS[name].gpus))
    settings = Settings(n_gpus=WORKLOADS[name].gpus)
    if factor:
        settings = oversubscribed(settings, peak_bytes(program), factor)
    return record(run(program, settings), settings, name, *([style] if style else []))


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_samples_are_whole(name):
    recipe = SAMPLES[name].recipe()
    tables = record(run(recipe.program, recipe.settings), recipe.settings, name)
    for what, without in WITHOUT.items():
        assert holes(tables, without).is_empty(), what


@pytest.mark.parametrize("factor", [None, 1.4, 2.0] if SOAK else [1.6])
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_whole_traces_of_workloads_raise_no_alarm(name, factor):
    steps = 2 if WORKLOADS[name].has_steps else 1
    tables = modelled(name, (11 if SOAK else 5) * MIB + 300 * KIB, steps, factor)
    for what, without in WITHOUT.items():
        assert holes(tables, without).is_empty(), what


def test_pages_that_bounce_for_a_while_and_are_left_alone_raise_no_alarm():
    """The host polls a flag beside the data of a kernel: the driver brings nothing along to such pages."""
    program = polled(n_bytes=32 * MIB, n_polls=20)
    settings = Settings(gpu="a100-pcie", host="v100-x86", seed=706)
    assert holes(record(run(program, settings), settings, "polled")).is_empty()


@given(programs())
@hypothesis.settings(max_examples=N_PROGRAMS, deadline=None)
def test_random_programs_raise_no_alarm(program_and_settings):
    program, settings = program_and_settings
    try:
        ran = run_to_end(program, settings)
    except EndlessError:
        hypothesis.reject()
    tables = record(ran.happened, settings, "random")
    for what, without in WITHOUT.items():
        assert holes(tables, without).is_empty(), what


STREAMS = [
    ("stream", 32, 1, None),
    ("sweep", 16, 3, 1.5),
    ("stride", 16, 2, None),
    ("chase", 16, 2, None),
    ("matmul", 12, 2, 1.3),
    ("random", 8, 2, 1.25),
]


@pytest.mark.parametrize(("name", "size", "steps", "factor"), STREAMS)
def test_a_hole_that_cuts_the_pushes_of_a_block_is_found(name, size, steps, factor):
    tables = modelled(name, size * MIB, steps, factor)
    moves = tables["migrations"].filter(pl.col("direction") == "htod")
    starts = moves["start_ns"].sort()
    ahead = int(tables["kernels"]["start_ns"].min())
    places = np.random.default_rng(5).choice(
        np.arange(len(starts) // 8, 7 * len(starts) // 8), N_HOLES
    )
    for place in places.tolist():
        begin, length = int(starts[place]), 200_000
        assert begin > ahead
        lossy = cut(tables, begin, length)
        if not _cuts_a_block(moves, begin, begin + length):
            continue
        found = holes(lossy)
        assert not found.is_empty(), (begin, length)
        near = (found["earliest_ns"] <= begin + length) & (found["latest_ns"] >= begin)
        assert near.all(), (begin, length, found.rows())


def _cuts_a_block(moves, begin, end):
    """Say whether a block has some pushes in the hole, and others before and after it."""
    at = pl.col("start_ns")
    by_block = moves.group_by(pl.col("va") // (2 * MIB)).agg(
        before=(at < begin).any(),
        inside=at.is_between(begin, end - 1).any(),
        after=(at >= end).any(),
    )
    return by_block.select((pl.col("before") & pl.col("inside") & pl.col("after")).any()).item()


@pytest.mark.parametrize("without", ["all tables", "no faults", "migrations and kernels"])
def test_a_full_queue_is_found_with_its_place_and_size(without):
    whole = modelled("stream", 256 * MIB)
    style = Style(lost_ns=5_000_000)
    lossy = modelled("stream", 256 * MIB, style=style)
    starts = pl.concat([whole[name]["start_ns"] for name in DRIVER]).sort()
    begin = starts[QUEUE_ROWS]
    lost = whole["migrations"]["bytes"].sum() - lossy["migrations"]["bytes"].sum()
    assert lost > 16 * MIB
    assert holes(whole, WITHOUT[without]).is_empty()
    found = holes(lossy, WITHOUT[without])
    assert found["level"].to_list() == ["certain" if without == "all tables" else "likely"]
    assert found["start_ns"][0] <= begin
    assert found["end_ns"][0] >= begin + style.lost_ns
    assert found["duration_ns"][0] < 1.1 * style.lost_ns
    assert abs(found["lost_bytes"][0] - lost) < 0.25 * lost
    assert found["least_bytes"][0] <= lost


@pytest.mark.parametrize("factor", [None, 1.5])
def test_nothing_is_said_of_data_under_advice_with_or_without_a_hole(factor):
    tables = modelled("advice", 16 * MIB, 2, factor)
    starts = tables["migrations"]["start_ns"].sort()
    for part in (4, 3, 2):
        lossy = cut(tables, int(starts[len(starts) // part]), 300_000)
        assert holes(lossy).is_empty()
        assert holes(lossy, WITHOUT["migrations and kernels"]).is_empty()
