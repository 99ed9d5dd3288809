"""Without a cache every request is a segment of its own: the machine, the replay and the what-if."""

from __future__ import annotations

import random

import polars as pl
import pytest
from allocator_programs import Recorded, events_frame, state_frames
from polars.testing import assert_frame_equal

from nsan.analysis.allocator.what_if import allocator_what_if
from nsan.errors import AllocatorFullError
from nsan.model.allocator_history import snapshot_frames
from nsan.model.networks import tensors as t
from nsan.model.placing import placed
from nsan.model.profiles import gpu_profile
from nsan.torch_alloc.heap import ascending_places
from nsan.torch_alloc.invariants import check
from nsan.torch_alloc.plain import PlainAllocator
from nsan.torch_alloc.replay import replay, state_at
from nsan.torch_alloc.settings import AllocatorSettings
from nsan.torch_alloc.stitching import StitchingAllocator
from nsan.torch_alloc.tables import SNAPSHOT_TABLES
from nsan.torch_alloc.what_if import requests_of
from nsan.units import KIB, MIB

UNCACHED = AllocatorSettings(is_caching=False)
SIZES = (1, 256, 513, 92_928, MIB, 2 * MIB, 3 * MIB + 5, 20 * MIB)
SEEDS = range(10)


def drive(seed, allocator, n=80):
    """Allocate and free at random; some frees complete later."""
    draw = random.Random(seed)
    held, pending = [], []
    for _ in range(n):
        kind = draw.random()
        if kind < 0.5 or not held:
            where = {"stream": draw.choice((0, 0, 7)), "pool": draw.choice(("0,0", "0,1"))}
            held.append(allocator.allocate(draw.choice(SIZES), **where))
        elif kind < 0.9:
            block = held.pop(draw.randrange(len(held)))
            late = draw.random() < 0.3
            allocator.free(block, pending=late)
            pending += [block] * late
        elif pending:
            allocator.complete(pending.pop())


def recorded(seed, make=PlainAllocator):
    """The history of an allocator, and the tables of a snapshot of it."""
    entries = []
    allocator = make(place=ascending_places(), listen=lambda *entry: entries.append(entry))
    drive(seed, allocator)
    return (*state_frames(allocator), events_frame(entries)), entries


def is_exact(agreement):
    return (
        agreement.n_addresses_exact == agreement.n_allocs > 0
        and agreement.n_segments_exact == agreement.n_segments_made == agreement.n_allocs
        and agreement.n_final_blocks_exact == agreement.n_final_blocks
        and (agreement.n_skipped, agreement.n_forced_frees, agreement.n_contradictions) == (0, 0, 0)
        and agreement.first_difference is None
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_machine_without_a_cache_does_what_the_plain_allocator_does(seed):
    _, expected = recorded(seed)
    ours = Recorded(UNCACHED, place=ascending_places())
    drive(seed, ours.machine)
    assert ours.entries == expected
    assert check(ours.machine) == []


def test_without_a_cache_a_request_takes_its_size_and_gives_it_back():
    ours = Recorded(UNCACHED)
    block = ours.machine.allocate(700)
    assert (block.n_bytes, block.segment.n_bytes, ours.machine.reserved_bytes) == (700, 700, 700)
    ours.machine.free(block)
    assert ours.machine.reserved_bytes == 0
    assert ours.machine.segments() == []
    assert [entry[0] for entry in ours.entries] == [
        "segment_alloc",
        "alloc",
        "free_requested",
        "free_completed",
        "segment_free",
    ]


def test_without_a_cache_only_the_limits_of_the_settings_count():
    settings = AllocatorSettings(
        is_caching=False,
        expandable_segments=True,
        max_split_bytes=32 * MIB,
        roundup_power2_divisions=(4,) * 16,
        garbage_collection_threshold=0.5,
        memory_fraction=0.5,
        device_bytes=100 * MIB,
    )
    ours = Recorded(settings)
    first = ours.machine.allocate(40 * MIB + 1)
    assert first.segment.n_bytes == 40 * MIB + 1
    with pytest.raises(AllocatorFullError):
        ours.machine.allocate(10 * MIB)
    assert ours.machine.n_retries == 0  # there is nothing that could be released
    ours.machine.free(first)
    assert ours.machine.allocate(50 * MIB).n_bytes == 50 * MIB


@pytest.mark.parametrize("seed", SEEDS)
def test_a_history_without_a_cache_replays_exactly(seed):
    frames, _ = recorded(seed)
    whole = replay(*frames, UNCACHED)
    assert is_exact(whole.agreement)
    assert whole.starts_empty
    assert not whole.is_caching
    # Each byte that is reserved was asked for, except between the end of a free and that of its segment.
    settled = whole.series.filter(~pl.col("action").is_in(["segment_alloc", "free_completed"]))
    assert settled["reserved_bytes"].to_list() == settled["requested_bytes"].to_list()
    assert not is_exact(replay(*frames, AllocatorSettings()).agreement)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_history_without_a_cache_replays_from_the_middle(seed):
    frames, entries = recorded(seed)
    whole = replay(*frames, UNCACHED)
    for k in range(1, len(entries), 7):
        part = replay(*frames[:2], frames[2][k:], UNCACHED)
        assert (part.agreement.n_skipped, part.agreement.n_contradictions) == (0, 0)
        assert_frame_equal(part.series, whole.series[k:])
        assert set(part.segments["size_class"]) == {"large"}  # those of 2 MiB too
        state = state_at(*frames[:2], frames[2][k:], UNCACHED, sequence=None)
        assert state["bytes"].sum() == whole.series["reserved_bytes"][k - 1]


def test_without_a_cache_a_larger_segment_is_not_split():
    entries = [("segment_alloc", 4 * MIB, 4 * MIB, 0), ("alloc", 4 * MIB, 100, 0)]
    frames = [SNAPSHOT_TABLES[name].empty().collect() for name in ("segments", "blocks")]
    got = replay(*frames, events_frame(entries), UNCACHED)
    assert got.tensors["block_bytes"].to_list() == [4 * MIB]


def test_a_snapshot_of_the_model_without_a_cache_replays_exactly():
    weights, input_, loss = (
        t.Tensor("w", 3 * MIB, "parameter"),
        t.Tensor("a#1", 2 * MIB, "activation"),
        t.Tensor("b#1", 100 * KIB + 3, "activation"),
    )
    step = [t.Create(input_), t.Create(loss), t.Drop("a#1"), t.Drop("b#1")]
    program = t.TensorProgram("little", (t.Create(weights), *step, *step))
    made = placed(program, "raw", gpu_profile("a100-sxm4-40gb"))
    found = snapshot_frames(made.history, [1000] * len(made.program.operations))
    frames = [found[name] for name in ("segments", "blocks", "allocator_events")]
    got = replay(*frames, UNCACHED)
    assert is_exact(got.agreement)
    assert got.agreement.n_allocs == 5
    assert got.series["reserved_bytes"].max() == 5 * MIB + 100 * KIB + 3


def test_the_end_of_a_segment_is_no_release_of_a_cache_that_is_not_there():
    frames, _ = recorded(3)
    requests = requests_of(replay(*frames, UNCACHED))
    assert requests.releases == []
    assert requests.n_unclear_releases == 0
    assert requests_of(replay(*frames, AllocatorSettings())).releases != []


def what_if(steps, **options):
    """Rows by setting, of a program that runs without a cache: (MiB) asks, -i frees request i."""
    entries, blocks = [], []
    allocator = PlainAllocator(listen=lambda *entry: entries.append(entry))
    for step in steps:
        if step > 0:
            blocks.append(allocator.allocate(int(step * MIB)))
        else:
            allocator.free(blocks[-step])
    tables = [frame.lazy() for frame in (*state_frames(allocator), events_frame(entries))]
    schema = SNAPSHOT_TABLES["allocator_settings"].schema
    values = pl.DataFrame([("allocator", "plain", False)], schema=schema, orient="row")
    rows = allocator_what_if(*tables, values.lazy(), **options).collect()
    return {row["setting"]: row for row in rows.to_dicts()}


def test_what_if_starts_from_the_rules_without_a_cache_and_compares_with_a_cache():
    rows = what_if([12, 5, -0, 11])
    peaks = {name: row["peak_reserved_bytes"] / MIB for name, row in rows.items()}
    # 12 goes before 11 comes. With a cache 12 (serving 11 again) and 20 for 5 MiB.
    assert peaks["as recorded"] == peaks["rerun, same settings"] == 17
    assert peaks["caching"] == 12 + 20
    assert rows["rerun, same settings"]["difference_bytes"] == 0
    assert rows["caching"]["difference_bytes"] == 15 * MIB
    assert "plain" not in rows
    # The share of what is allowed would be that of a peak in which no cache finds room.
    assert not any(row["out_of_memory"] for row in rows.values())
    assert not any(name.startswith("garbage") for name in rows)
    limited = what_if([12, 5, -0, 11], limit_bytes=100 * MIB)
    assert sum(name.startswith("garbage") for name in limited) == 2
    # Two steps between 8 and 16 MiB.
    assert peaks["roundup_power2_divisions:2"] == 12 + 20
    assert peaks["stitching"] == 12 + 6
    one = what_if([12, 5, -0, 11], setting="caching")
    assert list(one) == ["as recorded", "rerun, same settings", "caching"]


def test_a_stitching_allocator_always_has_a_cache():
    ours = StitchingAllocator(UNCACHED)
    ours.free(ours.allocate(700))
    assert ours.reserved_bytes == 2 * MIB
