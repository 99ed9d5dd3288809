"""Variants of the allocator and what-if reruns: peaks worked out by hand, and independent references."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import nsan
from nsan.analysis.allocator.stitching import stitching
from nsan.analysis.allocator.what_if import allocator_what_if
from nsan.errors import AllocatorFullError, UsageError
from nsan.torch_alloc import what_if
from nsan.torch_alloc.chunks import CHUNK_BYTES
from nsan.torch_alloc.conf import parse_conf
from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.plain import AddressSupply, PlainAllocator
from nsan.torch_alloc.replay import replay
from nsan.torch_alloc.settings import DEFAULT_SETTINGS, TIE_BREAKS, AllocatorSettings
from nsan.torch_alloc.stitching import StitchedBlock, StitchingAllocator
from nsan.torch_alloc.tables import SNAPSHOT_TABLES
from nsan.torch_alloc.what_if import recorded_places, requests_of, rerun, would_fit
from nsan.units import MIB

N = 2000 if os.environ.get("NSAN_SOAK") == "1" else 30
FOLDER = Path(nsan.__file__).parent.parent / "sample_data" / "snapshots"
NAMES = ("segments", "blocks", "allocator_events", "allocator_settings")
EMPTY = "empty"


def run(allocator, *steps):
    """Run steps: ("x", MiB) asks for memory, "-x" frees it, "empty" empties the cache."""
    held = {}
    for step in steps:
        if step == EMPTY:
            allocator.empty_cache()
        elif isinstance(step, str):
            allocator.free(held.pop(step[1:]))
        else:
            name, size, *stream = step
            held[name] = allocator.allocate(int(size * MIB), stream=sum(stream))
    return held


def snapshot(*steps, limit_mib=None, **settings):
    """Record steps on one GPU: the four tables of a snapshot; a request that fails ends them."""
    entries = []

    def listen(action, va, n_bytes, stream, pool):
        is_oom = action == "oom"
        free = limit_mib * MIB - allocator.reserved_bytes if is_oom else None
        entries.append(
            {
                "device_id": 0,
                "sequence": len(entries),
                "action": action,
                "va": None if is_oom else va,
                "bytes": n_bytes,
                "stream": stream,
                "pool": None if is_oom else pool,
                "device_free_bytes": free,
            }
        )

    limit = None if limit_mib is None else limit_mib * MIB
    allocator = CachingAllocator(AllocatorSettings(device_bytes=limit, **settings), listen=listen)
    try:
        run(allocator, *steps)
    except AllocatorFullError:
        assert entries[-1]["action"] == "oom"
    return frames(allocator, entries)


def frames(allocator, entries):
    states = {"allocated": "active_allocated", "pending": "active_pending_free", "free": "inactive"}
    segments, blocks = [], []
    for number, segment in enumerate(allocator.segments()):
        common = {
            "segment_id": number,
            "device_id": 0,
            "stream": segment.stream,
            "pool": segment.pool,
        }
        segments.append(
            {
                **common,
                "va": segment.va,
                "bytes": segment.n_bytes,
                "size_class": "small" if segment.is_small else "large",
                "is_expandable": segment.is_expandable,
            }
        )
        blocks += [
            {
                **common,
                "va": block.va,
                "bytes": block.n_bytes,
                "requested_bytes": block.requested_bytes,
                "state": states[block.state],
            }
            for block in allocator.blocks(segment)
        ]
    rows = {"segments": segments, "blocks": blocks, "allocator_events": entries}
    return {
        name: pl.DataFrame(rows.get(name, []), schema=SNAPSHOT_TABLES[name].schema)
        for name in NAMES
    }


def replayed(tables):
    return replay(*(tables[name] for name in NAMES[:3]), DEFAULT_SETTINGS)


def analysed(analysis, tables, **options):
    """Give the rows of an analysis as dicts."""
    return analysis(*(tables[name].lazy() for name in NAMES), **options).collect().to_dicts()


def opened(name):
    found = nsan.open_snapshot(FOLDER / f"{name}.pickle.gz")
    return {table: getattr(found, table).collect() for table in NAMES}


@pytest.fixture(scope="module")
def decomfl():
    return opened("decomfl_opt125m_full_history")


def random_steps(seed, sizes, *, n=120, streams=(0,)):
    """Draw a program of requests, frees and now and then empty_cache."""
    draw = random.Random(seed)
    steps, held = [], []
    for number in range(n):
        choice = draw.random()
        if choice < 0.55 or not held:
            held.append(f"t{number}")
            steps.append((held[-1], draw.choice(sizes), draw.choice(streams)))
        elif choice < 0.97:
            steps.append("-" + held.pop(draw.randrange(len(held))))
        else:
            steps.append(EMPTY)
    return steps


# The plain allocator.


def test_plain_allocator_reserves_exactly_what_tensors_asked_for():
    allocator = PlainAllocator()
    held = run(allocator, ("x", 3), ("y", 0.5), "-x", ("z", 1))
    allocator.allocate(77)
    assert allocator.reserved_bytes == allocator.active_bytes == int(1.5 * MIB) + 77
    assert allocator.peak_reserved_bytes == int(3.5 * MIB)
    assert [segment.n_bytes for segment in allocator.segments()] == [MIB // 2, MIB, 77]
    assert held["y"].va % (2 * MIB) == 0
    assert allocator.n_segments_made == 4


def test_plain_allocator_keeps_memory_until_a_pending_free_completes():
    allocator = PlainAllocator()
    block = allocator.allocate(100)
    allocator.free(block, pending=True)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 100)
    allocator.complete(block)
    assert allocator.reserved_bytes == 0
    with pytest.raises(UsageError, match="no free of it is pending"):
        allocator.complete(block)
    with pytest.raises(UsageError, match="free it once"):
        allocator.free(block)


def test_plain_allocator_says_what_the_driver_gives_and_takes():
    said = []
    allocator = PlainAllocator(listen=lambda *entry: said.append(entry), place=lambda _: 4096)
    allocator.free(allocator.allocate(10, stream=7, pool="0,1"))
    actions = ["segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"]
    assert said == [(action, 4096, 10, 7, "0,1") for action in actions]


def test_plain_allocator_refuses_what_is_beyond_its_limit():
    allocator = PlainAllocator(AllocatorSettings(device_bytes=100))
    allocator.allocate(60)
    allocator.allocate(40)
    with pytest.raises(AllocatorFullError):
        allocator.allocate(1)
    assert allocator.reserved_bytes == 100


def test_addresses_are_aligned_and_used_again_lowest_first():
    supply = AddressSupply(1, alignment=512)
    assert [supply.take(n) for n in (1, 513, 512)] == [512, 1024, 2048]
    supply.give_back(2048, 512)
    supply.give_back(512, 1)
    assert [supply.take(n) for n in (300, 400, 1024)] == [512, 2048, 2560]
    with pytest.raises(UsageError, match="power of two"):
        AddressSupply(alignment=700)


# The stitching allocator.


def test_stitching_joins_free_blocks_that_are_not_neighbours():
    allocator = StitchingAllocator()
    held = run(allocator, ("x", 20), ("y", 20), ("z", 20), "-x", "-z", ("w", 40))
    assert isinstance(held["w"], StitchedBlock)
    assert sorted(part.va for part in held["w"].parts) == [
        segment.va for segment in allocator.segments() if segment.va != held["y"].va
    ]
    assert allocator.reserved_bytes == 60 * MIB == allocator.n_chunks * CHUNK_BYTES
    assert (allocator.n_stitches, allocator.stitched_bytes) == (1, 40 * MIB)
    # PyTorch takes a new segment: 60 + 40.
    cached = CachingAllocator()
    run(cached, ("x", 20), ("y", 20), ("z", 20), "-x", "-z", ("w", 40))
    assert cached.reserved_bytes == 100 * MIB


def test_stitching_takes_only_the_chunks_that_are_missing():
    allocator = StitchingAllocator()
    held = run(allocator, ("x", 20), ("y", 6), "-x", ("w", 25))
    # 25 MiB are 13 chunks: ten are free, three are new.
    assert allocator.reserved_bytes == (26 + 6) * MIB
    assert [part.n_bytes // MIB for part in held["w"].parts] == [20, 6]
    assert sum(part.requested_bytes for part in held["w"].parts) == 25 * MIB


def test_stitched_parts_are_separate_again_after_the_free():
    allocator = StitchingAllocator()
    held = run(allocator, ("x", 20), ("y", 2), ("z", 10), "-x", "-z", ("w", 30))
    first = held["w"].va
    allocator.free(held["w"], pending=True)
    assert [block.state for block in allocator.blocks()] == ["pending", "allocated", "pending"]
    allocator.complete(held["w"])
    allocator.allocate(10 * MIB)
    assert [block.n_bytes // MIB for block in allocator.blocks()] == [20, 2, 10]
    assert [block.state for block in allocator.blocks()] == ["free", "allocated", "allocated"]
    assert allocator.n_stitches == 1
    # The addresses of a stitched block are used again.
    again = allocator.allocate(30 * MIB)
    assert (again.va, len(again.parts)) == (first, 2)


def test_stitching_takes_the_largest_blocks_first_and_the_last_by_best_fit():
    allocator = StitchingAllocator()
    steps = [(name, size) for name, size in zip("abcde", (4, 30, 8, 20, 6), strict=True)]
    apart = [(name.upper(), 2) for name in "abcde"]
    mixed = [step for pair in zip(steps, apart, strict=True) for step in pair]
    last = run(allocator, *mixed)["e"]
    for block in allocator.blocks():
        if block.n_bytes > 2 * MIB:
            allocator.free(block)
    held = run(allocator, ("w", 55))
    # 56 MiB: 30 + 20, and of 4, 8, 6 the smallest that holds the last 6.
    assert [part.n_bytes // MIB for part in held["w"].parts] == [30, 20, 6]
    assert held["w"].parts[2] is last
    assert allocator.reserved_bytes == (68 + 10) * MIB


def test_a_larger_free_block_is_split_at_whole_chunks_and_merged_again():
    allocator = StitchingAllocator()
    held = run(allocator, ("x", 20), "-x", ("y", 3), ("z", 5))
    assert [block.n_bytes // MIB for block in allocator.blocks()] == [4, 6, 10]
    assert allocator.n_stitches == 0
    allocator.free(held["y"])
    allocator.free(held["z"])
    assert [block.n_bytes // MIB for block in allocator.blocks()] == [20]


def test_streams_and_pools_share_no_chunks():
    allocator = StitchingAllocator()
    run(allocator, ("x", 10, 1), "-x", ("y", 10, 2), "-y")
    allocator.allocate(10 * MIB, stream=1, pool="0,1")
    assert allocator.reserved_bytes == 30 * MIB


def test_requests_below_the_limit_are_not_stitched():
    steps = [("x", 20), ("y", 20), ("z", 20), "-x", "-z", ("w", 40)]
    for least, reserved in ((40, 60), (42, 100)):
        allocator = StitchingAllocator(least_block_bytes=least * MIB)
        run(allocator, *steps)
        assert allocator.reserved_bytes == reserved * MIB
    with pytest.raises(UsageError, match="at least"):
        StitchingAllocator(least_block_bytes=MIB)


def test_empty_cache_returns_single_chunks_and_leaves_the_others_in_place():
    allocator = StitchingAllocator()
    held = run(allocator, ("x", 12), "-x", ("a", 4), ("b", 4), ("c", 4), "-b")
    # A small segment of which nothing is in use goes too.
    allocator.free(allocator.allocate(100))
    assert [segment.n_bytes for segment in allocator.empty_cache()] == [2 * MIB]
    assert [(s.va, s.n_bytes // MIB) for s in allocator.segments()] == [
        (held["a"].va, 4),
        (held["c"].va, 4),
    ]
    assert allocator.blocks(held["c"].segment) == [held["c"]]
    assert allocator.reserved_bytes == 8 * MIB
    allocator.free(held["a"])
    allocator.free(held["c"])
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.segments() == []


def test_private_pools_keep_their_chunks_until_they_are_closed():
    allocator = StitchingAllocator()
    block = allocator.allocate(10 * MIB, pool="0,1")
    allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 10 * MIB
    allocator.close_pool("0,1")
    assert allocator.reserved_bytes == 0


def test_a_pending_free_stays_active_and_is_not_stitched():
    allocator = StitchingAllocator()
    block = allocator.allocate(10 * MIB)
    allocator.free(block, pending=True)
    assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 10 * MIB)
    allocator.allocate(10 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.complete(block)
    assert allocator.active_bytes == allocator.requested_bytes == 10 * MIB
    with pytest.raises(UsageError, match="no free of it is pending"):
        allocator.complete(block)
    with pytest.raises(UsageError, match="free it once"):
        allocator.free(block)


def test_under_a_limit_free_memory_elsewhere_is_released_first():
    limit = AllocatorSettings(device_bytes=40 * MIB)
    said = []
    allocator = StitchingAllocator(limit, listen=lambda action, *_: said.append(action))
    run(allocator, ("x", 20, 1), "-x", ("y", 20, 2), "-y", ("z", 30, 2))
    assert (allocator.reserved_bytes, allocator.n_retries) == (30 * MIB, 1)
    with pytest.raises(AllocatorFullError):
        allocator.allocate(12 * MIB)
    assert said[-4:] == ["segment_unmap", "segment_map", "alloc", "oom"]
    assert allocator.peak_reserved_bytes == 40 * MIB


def test_under_a_limit_a_free_small_segment_is_released_for_chunks():
    allocator = StitchingAllocator(AllocatorSettings(device_bytes=10 * MIB))
    allocator.free(allocator.allocate(100))
    run(allocator, ("x", 10))
    assert (allocator.reserved_bytes, allocator.n_chunks) == (10 * MIB, 5)


def test_under_a_limit_a_small_segment_takes_the_place_of_free_chunks():
    said = []
    allocator = StitchingAllocator(
        AllocatorSettings(device_bytes=10 * MIB), listen=lambda action, *_: said.append(action)
    )
    run(allocator, ("x", 10), "-x")
    small = allocator.allocate(100)
    assert allocator.reserved_bytes == 2 * MIB
    assert said[-3:] == ["segment_unmap", "segment_alloc", "alloc"]
    allocator.allocate(8 * MIB)
    more = [allocator.allocate(MIB)]
    with pytest.raises(AllocatorFullError):
        allocator.allocate(MIB)
    assert said[-2:] == ["alloc", "oom"]
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (10 * MIB, 10 * MIB)
    assert allocator.n_segments_made == 3
    for block in (small, *more):
        allocator.free(block)


@pytest.mark.parametrize("seed", range(N))
def test_stitching_reserves_the_most_active_chunks_since_the_last_release(seed):
    sizes = (0.0003, 0.6, 1.2, 2, 3.3, 8, 11, 30, 57)
    steps = random_steps(seed, sizes, streams=(0, 0, 5))
    allocator, small = StitchingAllocator(), CachingAllocator()
    # The reference: per stream a sum of chunks, and the largest that it was since a release.
    active, most, taken, held, held_small = {}, {}, {}, {}, {}
    for step in steps:
        if step == EMPTY:
            allocator.empty_cache()
            small.empty_cache()
            most = dict(active)
        elif isinstance(step, str):
            name = step[1:]
            allocator.free(held.pop(name))
            if name in held_small:
                small.free(held_small.pop(name))
            else:
                stream, chunks = taken[name]
                active[stream] -= chunks
        else:
            name, size, stream = step
            held[name] = allocator.allocate(int(size * MIB), stream=stream)
            if size <= 1:
                held_small[name] = small.allocate(int(size * MIB), stream=stream)
            else:
                taken[name] = stream, -(-int(size * MIB) // (2 * MIB))
                active[stream] = active.get(stream, 0) + taken[name][1]
                most[stream] = max(most.get(stream, 0), active[stream])
        expected = sum(most.values()) * 2 * MIB + small.reserved_bytes
        assert allocator.reserved_bytes == expected
        assert sum(segment.n_bytes for segment in allocator.segments()) == expected
    blocks = allocator.blocks()
    assert sum(block.n_bytes for block in blocks) == allocator.reserved_bytes
    assert sum(b.n_bytes for b in blocks if b.state != "free") == allocator.active_bytes
    assert sum(b.requested_bytes for b in blocks if b.state != "free") == allocator.requested_bytes


@pytest.mark.parametrize("seed", range(N))
def test_stitching_never_reserves_more_where_sizes_are_whole_chunks(seed):
    # Below 10 MiB PyTorch takes 20 MiB; with whole chunks it never needs less than stitching.
    steps = random_steps(seed, (0.3, 2, 4, 8, 10, 22, 64), streams=(0, 3))
    cached, stitched = CachingAllocator(), StitchingAllocator()
    held = {}
    for step in steps:
        if step == EMPTY:
            cached.empty_cache()
            stitched.empty_cache()
        elif isinstance(step, str):
            for allocator, block in held.pop(step[1:]):
                allocator.free(block)
        else:
            name, size, stream = step
            held[name] = [
                (each, each.allocate(int(size * MIB), stream=stream)) for each in (cached, stitched)
            ]
        assert stitched.reserved_bytes <= cached.reserved_bytes


def test_stitching_can_reserve_more_than_pytorch_because_it_rounds_to_chunks():
    steps = [(f"t{i}", 1.25) for i in range(32)]
    cached, stitched = CachingAllocator(), StitchingAllocator()
    run(cached, *steps)
    run(stitched, *steps)
    # Sixteen fit in a segment of 20 MiB; alone each takes a chunk of 2 MiB.
    assert (cached.reserved_bytes, stitched.reserved_bytes) == (40 * MIB, 64 * MIB)


# Settings as text.


def test_settings_are_read_as_pytorch_reads_them():
    text = " max_split_size_mb:64, garbage_collection_threshold : 0.8,expandable_segments:True,"
    found = parse_conf(text + "roundup_power2_divisions:4,pinned_use_cuda_host_register:True")
    assert found == AllocatorSettings(
        max_split_bytes=64 * MIB,
        garbage_collection_threshold=0.8,
        expandable_segments=True,
        roundup_power2_divisions=(4,) * 16,
    )
    assert parse_conf("") == DEFAULT_SETTINGS
    base = AllocatorSettings(expandable_segments=True, tie_break="segment")
    assert parse_conf("large_segment_size_mb:32", base) == replace(
        base, large_segment_bytes=32 * MIB
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The first size also sets all smaller ones; ">" begins at the size named last.
        ("[256:1,512:2,>:4]", [1] * 9 + [4] * 7),
        ("[4:2,16:8]", [2, 2, 2, 0, 8] + [0] * 11),
        ("[1:8,2:0,4:16,>:1]", [8, 0] + [1] * 14),
        ("[>:8]", [8] * 16),
        ("[65536:2]", [2] * 16),
    ],
)
def test_divisions_in_a_list_fill_the_buckets_as_in_pytorch(text, expected):
    found = parse_conf(f"roundup_power2_divisions:{text},max_split_size_mb:21")
    assert list(found.roundup_power2_divisions) == expected
    assert found.max_split_bytes == 21 * MIB


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_split_size_mb", "is no setting"),
        ("max_split_size_mb:", "is no setting"),
        ("max_splitsize_mb:64", "max_split_size_mb"),
        ("max_split_size_mb:lots", "whole number"),
        ("max_split_size_mb:8", "20 or more"),
        ("max_split_size_mb:-1", "whole number"),
        ("garbage_collection_threshold:1.5", "share"),
        ("garbage_collection_threshold:1", "below 1"),
        ("expandable_segments:yes", "True or False"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[256:3]", "power of two"),
        ("roundup_power2_divisions:[100:4]", "a size in MiB"),
        ("roundup_power2_divisions:[256]", "SIZE:DIVISIONS"),
        ("roundup_power2_divisions:[256:1", "bracket"),
        ("roundup_power2_divisions:]256:1[", "bracket"),
        ("backend:cudaMallocAsync", "another allocator"),
        ("stitching,plain", "is no setting"),
    ],
)
def test_a_setting_that_pytorch_would_refuse_is_refused_with_the_reason(text, says):
    with pytest.raises(UsageError, match=says):
        parse_conf(text)


# Reruns.


def test_requests_are_what_the_program_did():
    tables = snapshot(("x", 20), ("y", 0.1, 7), "-x", EMPTY, ("z", 3), "-y")
    found = requests_of(replayed(tables))
    assert found.n_bytes.tolist() == [20 * MIB, int(0.1 * MIB), 3 * MIB]
    assert found.streams.tolist() == [0, 7, 0]
    assert [int(c) for c in found.operations if c > -100] == [0, 1, -1, 2, -2]
    assert found.releases == [("0,0",)]
    assert (found.n_before, found.n_unclear_releases) == (0, 1)
    ran = rerun(found, CachingAllocator)
    # One figure per operation; 2 MiB of the small pool stay when the cache is emptied.
    assert (ran.reserved_bytes // MIB).tolist() == [20, 22, 22, 2, 22, 22]


def test_releases_right_before_a_failure_belong_to_the_failed_request():
    tables = snapshot(("x", 30), "-x", ("y", 30), ("z", 40), limit_mib=60)
    assert tables["allocator_events"]["action"].to_list()[-1] == "oom"
    tables = snapshot(("x", 30), ("y", 20), "-x", ("z", 50), limit_mib=60)
    assert tables["allocator_events"]["action"].to_list()[-2:] == ["segment_free", "oom"]
    assert requests_of(replayed(tables)).releases == []


def test_tensors_from_before_the_history_come_first_by_address():
    tables = snapshot(("x", 20), ("y", 10), ("z", 4), "-x", ("w", 3))
    events = tables["allocator_events"]
    # The two entries of each of the three requests are lost.
    tables["allocator_events"] = events.filter(pl.col("sequence") >= 6)
    found = requests_of(replayed(tables))
    assert found.n_before == 3
    assert found.n_bytes.tolist() == [20 * MIB, 10 * MIB, 4 * MIB, 3 * MIB]
    assert found.operations.tolist() == [0, 1, 2, -1, 3]
    assert found.sequences.tolist()[:3] == [-1, -1, -1]
    turned = replayed(tables)
    turned = requests_of(replace(turned, tensors=turned.tensors.reverse()))
    assert turned.n_bytes.tolist() == found.n_bytes.tolist()
    assert turned.operations.tolist() == found.operations.tolist()


def test_a_private_pool_that_was_closed_is_closed_in_a_rerun():
    entries = []

    def listen(action, va, n_bytes, stream, pool):
        entry = {"device_id": 0, "action": action, "va": va, "bytes": n_bytes}
        entries.append({**entry, "sequence": len(entries), "stream": stream, "pool": pool})

    allocator = CachingAllocator(listen=listen)
    allocator.free(allocator.allocate(10 * MIB))
    allocator.free(allocator.allocate(20 * MIB, pool="0,1"))
    allocator.close_pool("0,1")
    allocator.allocate(3 * MIB)
    found = requests_of(replayed(frames(allocator, entries)))
    assert found.releases == [("0,1",)]
    for make, reserved in (
        (CachingAllocator, [10, 10, 30, 30, 10, 10]),
        (StitchingAllocator, [10, 10, 30, 30, 10, 10]),
        (PlainAllocator, [10, 0, 20, 0, 0, 3]),
    ):
        assert (rerun(found, make).reserved_bytes // MIB).tolist() == reserved


def test_a_rerun_stops_where_memory_runs_out(monkeypatch):
    tables = snapshot(("x", 30), ("y", 30), "-x", ("z", 50), ("w", 1))
    found = requests_of(replayed(tables))
    small = AllocatorSettings(device_bytes=60 * MIB)
    ran = rerun(found, lambda: CachingAllocator(small))
    assert (ran.out_of_memory, ran.peak_reserved_bytes) == (2, 60 * MIB)
    assert ran.reserved_bytes.tolist() == [30 * MIB, 60 * MIB, 60 * MIB]
    assert rerun(found, CachingAllocator).out_of_memory is None
    # It runs in parts; the parts after the failure are not run.
    monkeypatch.setattr(what_if, "_STEP", 2)
    seen = []
    again = rerun(
        found, lambda: CachingAllocator(small), progress=lambda done, _: seen.append(done)
    )
    assert (again.out_of_memory, again.peak_reserved_bytes, seen) == (2, 60 * MIB, [2])


def test_a_rerun_tells_how_far_it_is():
    tables = snapshot(*random_steps(1, (1, 3)))
    found = requests_of(replayed(tables))
    seen = []
    ran = rerun(found, PlainAllocator, progress=lambda *done: seen.append(done))
    assert seen[-1] == (found.operations.size, found.operations.size)
    assert ran.reserved_bytes.size == found.operations.size
    part = rerun(found, PlainAllocator, before=10)
    assert part.reserved_bytes.tolist() == ran.reserved_bytes[: part.reserved_bytes.size].tolist()
    assert part.reserved_bytes.size == (found.sequences < 10).sum()


def test_segments_go_to_their_recorded_places_and_new_ones_above():
    tables = snapshot(("x", 20), ("y", 30), ("z", 20))
    place = recorded_places(replayed(tables).segments)
    first = tables["segments"]["va"].to_list()
    assert [place(20 * MIB), place(30 * MIB), place(20 * MIB)] == [first[0], first[1], first[2]]
    assert place(20 * MIB) == first[2] + 20 * MIB


@pytest.mark.parametrize("seed", range(N))
def test_a_rerun_under_the_same_rules_repeats_the_history(seed):
    sizes = (0.0003, 0.6, 1.2, 3.3, 8, 11, 30)
    tables = snapshot(*random_steps(seed, sizes, streams=(0, 0, 5)))
    found = replayed(tables)
    ran = rerun(requests_of(found), lambda: CachingAllocator(place=recorded_places(found.segments)))
    assert ran.peak_reserved_bytes == found.series["reserved_bytes"].max()
    assert ran.peak_active_bytes == found.series["active_bytes"].max()
    assert ran.reserved_bytes[-1] == tables["segments"]["bytes"].sum()


@pytest.mark.parametrize("seed", range(N))
def test_the_plain_peak_is_the_peak_of_what_was_asked_for(seed):
    tables = snapshot(*random_steps(seed, (0.0003, 0.6, 1.2, 3.3, 8, 11, 30)))
    held, now, most = {}, 0, 0
    for action, va, size in tables["allocator_events"].select("action", "va", "bytes").iter_rows():
        if action == "alloc":
            held[va] = size
        elif action == "free_completed":
            held.pop(va)
        now = sum(held.values())
        most = max(most, now)
    assert rerun(requests_of(replayed(tables)), PlainAllocator).peak_reserved_bytes == most


# The analyses on histories whose peaks are worked out by hand.


def peak(rows, setting):
    return next(row["peak_reserved_bytes"] / MIB for row in rows if row["setting"] == setting)


def test_a_splitting_limit_keeps_a_large_block_whole():
    tables = snapshot(("x", 100), "-x", ("y", 10), ("z", 100))
    rows = analysed(allocator_what_if, tables)
    # y is cut from the block of 100 MiB, so z needs a new one; with the limit y has its own segment.
    assert peak(rows, "as recorded") == peak(rows, "rerun, same settings") == 200
    assert peak(rows, "max_split_size_mb:64") == 110
    assert "max_split_size_mb:128" not in [row["setting"] for row in rows]
    row = next(row for row in rows if row["setting"] == "max_split_size_mb:64")
    assert row["difference_bytes"] == -90 * MIB
    assert row["difference_fraction"] == -90 / 200
    assert row["utilization_fraction"] == 1.0


def test_coarser_rounding_lets_a_larger_request_use_a_freed_block():
    tables = snapshot(("x", 18), "-x", ("y", 20))
    rows = analysed(allocator_what_if, tables)
    assert peak(rows, "rerun, same settings") == 38
    # Two steps between 16 and 32 MiB: both are 24. Eight: 18 and 20.
    assert peak(rows, "roundup_power2_divisions:2") == 24
    assert peak(rows, "roundup_power2_divisions:8") == 38


def test_garbage_collection_releases_old_segments_before_a_new_one():
    tables = snapshot(("x", 60), "-x", ("y", 70))
    rows = analysed(allocator_what_if, tables, setting="garbage_collection_threshold:0.25")
    # Allowed is the recorded peak, 130 MiB; 60 are more than a quarter of it.
    assert [row["peak_reserved_bytes"] // MIB for row in rows] == [130, 130, 70]
    assert "130.00 MiB, the recorded peak" in rows[-1]["note"]
    rows = analysed(allocator_what_if, tables, setting="garbage_collection_threshold:0.5")
    assert peak(rows, "garbage_collection_threshold:0.5") == 130


def test_garbage_is_collected_under_the_rules_of_newer_versions_too():
    # From 2.12 on it acts only under a fraction below 1.
    tables = snapshot(("x", 60), "-x", ("y", 70))
    schema = SNAPSHOT_TABLES["allocator_settings"].schema
    version = [("torch_version", "2.12", False)]
    tables["allocator_settings"] = pl.DataFrame(version, schema=schema, orient="row")
    rows = analysed(allocator_what_if, tables, setting="garbage_collection_threshold:0.25")
    assert [row["peak_reserved_bytes"] // MIB for row in rows] == [130, 130, 70]


def test_a_fraction_in_the_file_limits_only_where_the_memory_is_given():
    tables = snapshot(("x", 60), "-x", ("y", 70))
    schema = SNAPSHOT_TABLES["allocator_settings"].schema
    conf = [("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.5", True)]
    tables["allocator_settings"] = pl.DataFrame(conf, schema=schema, orient="row")
    setting = "garbage_collection_threshold:0.25"
    rows = analysed(allocator_what_if, tables, setting=setting)
    assert [row["peak_reserved_bytes"] // MIB for row in rows] == [130, 130, 70]
    assert "is no limit here" in rows[1]["note"]
    rows = analysed(allocator_what_if, tables, setting=setting, limit_bytes=144 * MIB)
    assert [row["peak_reserved_bytes"] // MIB for row in rows] == [130, 70, 70]
    assert "is no limit here" not in rows[1]["note"]


def test_a_rerun_that_ran_out_of_memory_is_compared_with_nothing():
    differences = ("difference_bytes", "difference_fraction")
    # Of 75 MiB: x and the segment of 20 MiB that y needs do not fit, x and y alone do.
    tables = snapshot(("x", 60), ("y", 6), "-x", ("z", 64))
    rows = analysed(allocator_what_if, tables, setting="plain", limit_bytes=75 * MIB)
    record, same, plain = rows
    assert [row["out_of_memory"] for row in rows] == [False, True, False]
    assert [record[name] for name in differences] == [None, None]
    assert [same[name] for name in differences] == [None, None]
    assert "so the peak is not compared" in same["note"]
    # The other one ended, but there is nothing whole to compare it with.
    assert plain["peak_reserved_bytes"] == 70 * MIB
    assert [plain[name] for name in differences] == [None, None]
    assert "Not compared" in plain["note"]
    # The other way round: rounded to 24 MiB, x and y do not fit.
    halves = [("x", 20), ("y", 21), "-x", "-y", ("z", 18)]
    limit = 45 * MIB
    rows = analysed(
        allocator_what_if,
        snapshot(*halves),
        setting="roundup_power2_divisions:2",
        limit_bytes=limit,
    )
    assert [row["out_of_memory"] for row in rows] == [False, False, True]
    assert [rows[2][name] for name in differences] == [None, None]
    assert rows[1]["difference_bytes"] == 0


def test_an_expandable_segment_joins_what_segments_keep_apart():
    tables = snapshot(("x", 20), ("y", 20), "-x", "-y", ("z", 40))
    rows = analysed(allocator_what_if, tables)
    assert peak(rows, "rerun, same settings") == 80
    assert peak(rows, "expandable_segments:True") == 40
    tables = snapshot(("x", 20), ("y", 20), ("z", 20), "-x", "-z", ("w", 40))
    rows = analysed(allocator_what_if, tables)
    # Only the end can grow: z's 20 MiB and 20 more. Stitching joins x and z.
    assert peak(rows, "rerun, same settings") == 100
    assert peak(rows, "expandable_segments:True") == 80
    assert peak(rows, "stitching") == 60
    assert peak(rows, "plain") == 60


def test_with_a_limit_a_rerun_retries_and_may_run_out_of_memory():
    tables = snapshot(("x", 60), "-x", ("y", 70))
    rows = analysed(allocator_what_if, tables, setting="plain", limit_bytes=100 * MIB)
    assert (rows[1]["peak_reserved_bytes"], rows[1]["n_retries"]) == (70 * MIB, 1)
    assert not rows[1]["out_of_memory"]
    rows = analysed(allocator_what_if, tables, setting="plain", limit_bytes=64 * MIB)
    assert [row["out_of_memory"] for row in rows] == [False, True, True]
    assert "request 1, counted from 0" in rows[2]["note"]


def test_what_if_tells_what_of_it_is_recorded_and_what_modelled():
    rows = analysed(allocator_what_if, snapshot(("x", 60)), setting="plain")
    assert [row["kind"] for row in rows] == ["derived", "modelled", "modelled"]
    assert rows[0]["n_retries"] is None
    with pytest.raises(UsageError, match="limit_bytes"):
        analysed(allocator_what_if, snapshot(), setting="per_process_memory_fraction:0.5")
    with pytest.raises(UsageError, match="is no setting"):
        analysed(allocator_what_if, snapshot(), setting="faster")


def test_half_of_the_memory_may_be_allowed():
    tables = snapshot(("x", 60), "-x", ("y", 70))
    setting = "per_process_memory_fraction:0.5"
    rows = analysed(allocator_what_if, tables, setting=setting, limit_bytes=144 * MIB)
    assert [row["peak_reserved_bytes"] // MIB for row in rows] == [130, 130, 72 - 2]


HALVES = [("x", 40), ("y", 40), "-x", "-y", ("a", 20), ("b", 20), ("c", 20), ("d", 20), "-b", "-d"]
"""Two segments of 40 MiB, half of each in use: 40 MiB free in two blocks of 20."""


def test_stitching_avoids_an_out_of_memory_error():
    tables = snapshot(*HALVES, ("w", 40), limit_mib=100)
    (row,) = analysed(stitching, tables)
    assert row["oom_request_bytes"] == 40 * MIB
    assert row["oom_reserved_bytes"] == 80 * MIB
    assert row["oom_free_chunk_bytes"] == 40 * MIB
    assert row["oom_device_free_bytes"] == 20 * MIB
    assert row["oom_avoided"] == "yes"
    assert row["free_chunk_bytes"] == row["largest_stitched_bytes"] == 40 * MIB
    assert row["largest_free_block_bytes"] == 20 * MIB
    # The two free blocks and the 20 MiB of the GPU: 60 MiB fit, 62 do not.
    for size, avoided in ((60, "yes"), (61, "no")):
        (row,) = analysed(stitching, snapshot(*HALVES, ("w", size), limit_mib=100))
        assert row["oom_avoided"] == avoided
        assert f"Avoided: {avoided}, by a rerun" in row["note"]


def test_free_chunks_of_other_streams_do_not_count_for_a_failed_request():
    other = [("p", 40, 5), "-p", ("q", 20, 5)]
    (row,) = analysed(stitching, snapshot(*HALVES, *other, ("w", 60), limit_mib=130))
    assert row["oom_free_chunk_bytes"] == row["largest_stitched_bytes"] == 40 * MIB
    assert row["free_chunk_bytes"] == 60 * MIB


def test_an_out_of_memory_error_of_unknown_room_is_only_avoided_by_free_chunks():
    for size, avoided in ((40, "yes"), (42, "unknown")):
        tables = snapshot(*HALVES, ("w", size), limit_mib=100)
        events = tables["allocator_events"]
        tables["allocator_events"] = events.with_columns(device_free_bytes=pl.lit(None, pl.Int64))
        (row,) = analysed(stitching, tables)
        assert row["oom_avoided"] == avoided
        # The GPU had more than enough: a limit of the program refused, and is not recorded.
        tables["allocator_events"] = events.with_columns(
            device_free_bytes=pl.when(pl.col("action") == "oom").then(1 << 40)
        )
        (row,) = analysed(stitching, tables)
        assert row["oom_avoided"] == avoided


def test_without_a_history_before_it_the_state_decides_on_an_out_of_memory_error():
    for size, avoided in ((60, "yes"), (61, "no")):
        tables = snapshot(*HALVES, ("w", size), limit_mib=100)
        tables["allocator_events"] = tables["allocator_events"].tail(1)
        (row,) = analysed(stitching, tables)
        assert (row["oom_avoided"], row["oom_free_chunk_bytes"]) == (avoided, 40 * MIB)
        assert row["peak_reserved_bytes"] is None
        assert row["saved_bytes"] is None
        assert "No history of allocations" in row["note"]
        assert "by the chunks that were free then" in row["note"]


def test_stitching_compares_the_record_a_rerun_and_arithmetic():
    tables = snapshot(("x", 20), ("y", 20), ("z", 20), "-x", "-z", ("w", 40), ("s", 0.25))
    (row,) = analysed(stitching, tables)
    assert row["peak_reserved_bytes"] == row["baseline_reserved_bytes"] == 102 * MIB
    assert row["stitched_reserved_bytes"] == row["least_reserved_bytes"] == 62 * MIB
    assert row["saved_bytes"] == row["saved_of_record_bytes"] == row["most_saved_bytes"] == 40 * MIB
    assert (row["n_stitches"], row["stitched_bytes"]) == (1, 40 * MIB)
    assert row["utilization_fraction"] == 60.25 / 102
    assert row["stitched_utilization_fraction"] == 60.25 / 62
    assert row["oom_avoided"] is None
    (row,) = analysed(stitching, tables, least_block_bytes=64 * MIB)
    assert (row["saved_bytes"], row["n_stitches"]) == (0, 0)
    with pytest.raises(UsageError, match="at least"):
        analysed(stitching, tables, least_block_bytes=4096)


def test_stitching_that_costs_more_than_it_saves_is_told():
    tables = snapshot(*[(f"t{i}", 1.25) for i in range(32)])
    (row,) = analysed(stitching, tables)
    assert row["saved_bytes"] == row["most_saved_bytes"] == -24 * MIB
    assert "Rounding to chunks takes more" in row["note"]


@pytest.mark.parametrize("seed", range(N))
def test_stitching_never_saves_more_than_arithmetic_allows(seed):
    tables = snapshot(*random_steps(seed, (0.3, 0.9, 1.2, 3, 8, 11, 30), streams=(0, 0, 4)))
    (row,) = analysed(stitching, tables)
    assert row["saved_of_record_bytes"] <= row["most_saved_bytes"]
    assert row["peak_reserved_bytes"] == row["baseline_reserved_bytes"]


def test_only_whole_aligned_chunks_of_free_blocks_count():
    # 20 MiB: 3, 4 and 13 MiB. Free is the middle: one aligned chunk (4 to 6 MiB) of its four MiB.
    tables = snapshot(("x", 3), ("y", 4), ("z", 13), "-y")
    (row,) = analysed(stitching, tables)
    assert row["largest_free_block_bytes"] == 4 * MIB
    assert row["free_chunk_bytes"] == 2 * MIB
    tables = snapshot(("x", 3), ("y", 0.5), "-y")
    (row,) = analysed(stitching, tables)
    # Free: 17 MiB from 3 MiB on, so eight chunks from 4 MiB on; the small pool does not count.
    assert row["free_chunk_bytes"] == 16 * MIB


# Real histories and states.


def test_decomfl_runs_again_exactly(decomfl):
    found = replayed(decomfl)
    requests = requests_of(found)
    ran = rerun(requests, lambda: CachingAllocator(place=recorded_places(found.segments)))
    # Golden values of the file.
    assert ran.peak_reserved_bytes == 1897922560
    assert ran.peak_active_bytes == 1790894592
    assert ran.n_segments_made == 61
    assert ran.reserved_bytes[-1] == 1897922560
    for tie_break in TIE_BREAKS:
        settings = AllocatorSettings(tie_break=tie_break)
        assert rerun(requests, lambda: CachingAllocator(settings)).n_segments_made == 61  # noqa: B023


def test_decomfl_takes_more_memory_with_stitching_as_most_of_it_is_in_odd_chunks(decomfl):
    (row,) = analysed(stitching, decomfl)
    # Counted from the entries: large tensors in whole chunks, and 17 small segments of 2 MiB.
    events = decomfl["allocator_events"].filter(
        pl.col("action").is_in(["alloc", "free_completed"]) & (pl.col("bytes") > MIB)
    )
    chunks = -(-pl.col("bytes") // (2 * MIB)) * (2 * MIB)
    change = pl.when(pl.col("action") == "alloc").then(chunks).otherwise(-chunks)
    most = events.select(change.cum_sum().max()).item() + 17 * 2 * MIB
    assert row["stitched_reserved_bytes"] == row["least_reserved_bytes"] == most
    assert row["saved_bytes"] == 1897922560 - most < 0
    assert row["utilization_fraction"] == 1790894592 / 1897922560


def test_every_setting_is_tried_on_decomfl(decomfl):
    rows = analysed(allocator_what_if, decomfl)
    settings = [row["setting"] for row in rows]
    assert settings[:2] == ["as recorded", "rerun, same settings"]
    # The largest segment is 148 MiB.
    assert settings[2:5] == [f"max_split_size_mb:{size}" for size in (32, 64, 128)]
    assert settings[-3:] == ["expandable_segments:True", "stitching", "plain"]
    assert {row["peak_reserved_bytes"] for row in rows[:2]} == {1897922560}
    held, most = {}, 0
    now = 0
    events = decomfl["allocator_events"].select("action", "va", "bytes")
    for action, va, size in events.iter_rows():
        if action == "alloc":
            held[va], now = size, now + size
        elif action == "free_completed":
            now -= held.pop(va)
        most = max(most, now)
    assert rows[-1]["peak_reserved_bytes"] == most
    for row in rows:
        assert row["peak_active_bytes"] <= row["peak_reserved_bytes"]


@pytest.mark.parametrize(
    ("name", "inactive"),
    [("kivi_llama_state_only", 736153600), ("flexgen_oom_old_format", 4554752)],
)
def test_a_state_without_history_has_no_peaks(name, inactive):
    tables = opened(name)
    (row,) = analysed(stitching, tables)
    assert row["peak_reserved_bytes"] is None
    assert row["stitched_reserved_bytes"] is None
    assert row["oom_avoided"] is None
    # Chunk by chunk: 2 MiB pieces of free blocks of the large pool, by plain arithmetic.
    large = tables["segments"].filter(pl.col("size_class") == "large")["segment_id"].to_list()
    free = tables["blocks"].filter(
        (pl.col("state") == "inactive") & pl.col("segment_id").is_in(large)
    )
    expected = 0
    for va, size in free.select("va", "bytes").iter_rows():
        first = va + -va % (2 * MIB)
        expected += sum(1 for at in range(first, va + size, 2 * MIB) if at + 2 * MIB <= va + size)
    assert row["free_chunk_bytes"] == expected * 2 * MIB <= inactive
    assert analysed(allocator_what_if, tables) == []


def test_requests_of_impossible_size_are_left_out_and_told():
    tables = snapshot(("x", 20), ("y", 10), ("z", 4))
    size = pl.when(pl.col("sequence") == 3).then(0).otherwise("bytes")
    tables["allocator_events"] = tables["allocator_events"].with_columns(bytes=size)
    tables["blocks"] = tables["blocks"].with_columns(
        requested_bytes=pl.when(pl.col("requested_bytes") == 10 * MIB)
        .then(0)
        .otherwise("requested_bytes")
    )
    found = requests_of(replayed(tables))
    assert (found.n_bytes.tolist(), found.n_left_out) == ([20 * MIB, 4 * MIB], 1)
    assert found.operations.tolist() == [0, 1]
    (row,) = analysed(stitching, tables)
    assert "1 request of an impossible size left out" in row["note"]


def test_a_snapshot_of_nothing_gives_nothing():
    tables = snapshot()
    assert analysed(stitching, tables) == []
    assert analysed(allocator_what_if, tables) == []


def test_inputs_are_not_changed(decomfl):
    before = {name: frame.clone() for name, frame in decomfl.items()}
    analysed(stitching, decomfl)
    assert all(before[name].equals(frame) for name, frame in decomfl.items())


def test_a_request_at_a_moment_of_a_history_may_fit():
    found = requests_of(replayed(snapshot(*HALVES)))
    limit = AllocatorSettings(device_bytes=80 * MIB)
    at = int(found.sequences[-1]) + 1
    fits = [
        would_fit(found, lambda make=make: make(limit), 40 * MIB, before=at)
        for make in (CachingAllocator, StitchingAllocator, PlainAllocator)
    ]
    assert fits == [False, True, True]
    tiny = AllocatorSettings(device_bytes=30 * MIB)
    assert not would_fit(found, lambda: PlainAllocator(tiny), 1, before=at)
    assert np.diff(found.sequences).min() >= 0
