"""The rules of PyTorch's caching allocator, each on a small case that is worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from allocator_programs import Recorded

from nsan.errors import AllocatorFullError, UsageError
from nsan.torch_alloc.invariants import check
from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.rounding import is_small, round_size, segment_size
from nsan.torch_alloc.settings import AllocatorSettings
from nsan.units import GIB, KIB, MIB

NO_DIVISIONS = [0] * 16


def at_mib(*starts):
    """Place segments at these multiples of 1 MiB, in this order."""
    places = iter(starts)
    return lambda n_bytes: next(places) * MIB  # noqa: ARG005


def allocator(*starts, **settings):
    recorded = Recorded(AllocatorSettings(**settings), place=at_mib(*starts) if starts else None)
    return recorded.machine, recorded.entries


def actions(entries):
    return [entry[0] for entry in entries]


# Sizes.


@pytest.mark.parametrize(
    ("asked", "rounded"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)]
)
def test_a_request_is_rounded_up_to_512_byte(asked, rounded):
    assert round_size(asked) == rounded
    assert CachingAllocator().rounded(asked) == rounded


@pytest.mark.parametrize(
    ("asked", "steps", "rounded"),
    [
        (1200 * MIB, 4, 1280 * MIB),  # 1024 MiB + one step of 256 MiB
        (1280 * MIB, 4, 1280 * MIB),
        (1280 * MIB + 1, 4, 1536 * MIB),
        (1024 * MIB, 4, 1024 * MIB),  # a power of two stays
        (2048, 4, 2048),  # not above 512 byte per step: the plain rule
        (2049, 4, 2560),
        (1025, 4, 1536),  # the plain rule once more
        (300 * MIB, 1, 300 * MIB),  # one step means none
    ],
)
def test_divisions_round_to_steps_between_powers_of_two(asked, steps, rounded):
    assert round_size(asked, [steps] * 16) == rounded


def test_each_bucket_of_the_divisions_holds_one_power_of_two():
    only = [0] * 16
    only[3] = 2  # [8, 16) MiB
    assert round_size(9 * MIB, only) == 12 * MIB
    assert round_size(16 * MIB + 1, only) == 16 * MIB + 512
    assert round_size(8 * MIB - 1, only) == 8 * MIB
    first, last = [2, *[0] * 15], [*[0] * 15, 2]
    assert round_size(5 * KIB, first) == 6 * KIB  # all below 1 MiB counts to the first
    assert round_size(40 * GIB, last) == 48 * GIB
    assert round_size(100 * GIB, last) == 128 * GIB  # 64 GiB and more count to the last
    assert round_size(100 * GIB, NO_DIVISIONS) == 100 * GIB


@pytest.mark.parametrize(
    ("rounded", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (19 * MIB, 20 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_the_size_of_a_new_segment_follows_from_the_request(rounded, segment):
    assert segment_size(rounded) == segment
    machine, entries = allocator()
    machine.allocate(rounded)
    assert entries[0][0] == "segment_alloc"
    assert entries[0][2] == segment
    assert is_small(rounded) is (segment == 2 * MIB)


def test_the_segment_for_large_requests_below_10_mib_can_be_set():
    machine, entries = allocator(large_segment_bytes=32 * MIB)
    machine.allocate(2 * MIB)
    assert entries[0][2] == 32 * MIB


def test_an_empty_request_is_refused():
    with pytest.raises(UsageError, match="at least 1"):
        CachingAllocator().allocate(0)


# Search, split and merge.


def test_small_and_large_requests_never_share_a_segment():
    machine, _ = allocator()
    small = machine.allocate(MIB)
    large = machine.allocate(MIB + 1)
    assert [s.n_bytes for s in machine.segments()] == [2 * MIB, 20 * MIB]
    machine.free(large)
    assert machine.allocate(512).segment is small.segment


def test_the_smallest_free_block_that_fits_serves_a_request():
    machine, _ = allocator(0, 100, 200)
    blocks = [machine.allocate(n * MIB) for n in (40, 30, 50)]
    for block in blocks:
        machine.free(block)
    assert machine.allocate(25 * MIB).va == 100 * MIB
    assert machine.allocate(31 * MIB).va == 0
    assert machine.allocate(45 * MIB).va == 200 * MIB


def test_the_front_is_handed_out_and_the_rest_stays_free():
    machine, _ = allocator(0)
    block = machine.allocate(600)
    assert (block.va, block.n_bytes, block.requested_bytes) == (0, 1024, 600)
    front, rest = machine.blocks()
    assert front is block
    assert (rest.va, rest.n_bytes, rest.state) == (1024, 2 * MIB - 1024, "free")


def test_a_small_block_is_split_to_the_last_512_byte():
    machine, _ = allocator(0)
    machine.allocate(MIB)
    machine.allocate(MIB - 512)
    assert [b.n_bytes for b in machine.blocks()] == [MIB, MIB - 512, 512]


@pytest.mark.parametrize(("rest", "is_split"), [(MIB, False), (MIB + 512, True)])
def test_a_large_block_is_split_only_if_more_than_1_mib_remains(rest, is_split):
    machine, _ = allocator(0)
    block = machine.allocate(20 * MIB)
    machine.free(block)
    again = machine.allocate(20 * MIB - rest)
    assert again.n_bytes == (20 * MIB - rest if is_split else 20 * MIB)
    assert len(machine.blocks()) == 1 + is_split
    assert machine.allocated_bytes == again.n_bytes
    assert machine.requested_bytes == 20 * MIB - rest


def test_a_freed_block_merges_with_both_free_neighbours():
    machine, _ = allocator(0)
    one, two, three = (machine.allocate(512) for _ in range(3))
    machine.free(one)
    machine.free(three)
    assert [b.state for b in machine.blocks()] == ["free", "allocated", "free"]
    machine.free(two)
    assert [(b.va, b.n_bytes) for b in machine.blocks()] == [(0, 2 * MIB)]


def test_neighbours_of_different_segments_do_not_merge():
    machine, _ = allocator(0, 2)
    blocks = [machine.allocate(MIB) for _ in range(4)]
    for block in blocks:
        machine.free(block)
    assert [(b.va, b.n_bytes) for b in machine.blocks()] == [(0, 2 * MIB), (2 * MIB, 2 * MIB)]


def test_a_block_serves_only_its_stream_and_its_pool():
    machine, _ = allocator()
    machine.free(machine.allocate(512, stream=1))
    machine.free(machine.allocate(512, stream=2))
    machine.free(machine.allocate(512, stream=1, pool="0,1"))
    assert len(machine.segments()) == 3
    assert machine.allocate(512, stream=1).segment.stream == 1
    assert machine.allocate(512, stream=1, pool="0,1").segment.pool == "0,1"
    assert len(machine.segments()) == 3


@pytest.mark.parametrize(("tie_break", "va"), [("address", 0), ("segment", 100), ("block", 50)])
def test_equal_blocks_are_told_apart_by_the_rule_of_the_version(tie_break, va):
    # Segments are made at 100, 50 and 0 MiB, in this order. The front of the first is cut last of all,
    # so of the three free blocks of 4 MiB the one at 50 MiB is the oldest.
    machine, _ = allocator(100, 50, 0, tie_break=tie_break)
    whole = machine.allocate(20 * MIB)
    fronts = []
    for _ in range(2):
        fronts.append(machine.allocate(4 * MIB))
        machine.allocate(16 * MIB)
    machine.free(whole)
    fronts.append(machine.allocate(4 * MIB))
    machine.allocate(16 * MIB)
    assert [block.va for block in fronts] == [50 * MIB, 0, 100 * MIB]
    for block in fronts:
        machine.free(block)
    assert machine.allocate(4 * MIB).va == va * MIB


def test_the_rest_of_a_split_keeps_its_number_and_the_front_gets_a_new_one():
    # Two free blocks of 7 MiB: what is left of the first segment, at 213 MiB, and the front of the second,
    # at 100 MiB. The first is as old as its segment.
    machine, _ = allocator(200, 100, tie_break="block")
    machine.allocate(4 * MIB)
    machine.allocate(9 * MIB)
    rest = machine.allocate(7 * MIB)
    front = machine.allocate(7 * MIB)
    machine.allocate(9 * MIB)
    assert (rest.va, front.va) == (213 * MIB, 100 * MIB)
    assert rest.serial < front.serial
    machine.free(front)
    machine.free(rest)
    assert machine.allocate(7 * MIB).va == 213 * MIB


def test_the_block_that_is_freed_keeps_its_number_when_it_merges():
    machine, _ = allocator(0, tie_break="block")
    one = machine.allocate(4 * MIB)
    two = machine.allocate(4 * MIB)
    number = two.serial
    machine.free(one)
    machine.free(two)
    assert [b.serial for b in machine.blocks()] == [number]


# Frees.


def test_a_pending_block_is_active_until_it_is_completed():
    machine, entries = allocator()
    block = machine.allocate(600)
    machine.free(block, pending=True)
    assert (machine.allocated_bytes, machine.active_bytes, machine.requested_bytes) == (
        0,
        1024,
        600,
    )
    assert machine.allocate(1024).va != block.va
    machine.complete(block)
    assert (machine.active_bytes, machine.requested_bytes) == (1024, 1024)
    assert actions(entries) == [
        "segment_alloc",
        "alloc",
        "free_requested",
        "alloc",
        "free_completed",
    ]
    assert entries[2][1:] == entries[4][1:] == (block.va, 600, 0, "0,0")


def test_a_pending_block_does_not_merge():
    machine, _ = allocator(0)
    one, two = machine.allocate(512), machine.allocate(512)
    machine.free(two, pending=True)
    machine.free(one)
    assert [b.state for b in machine.blocks()] == ["free", "pending", "free"]
    machine.complete(two)
    assert [b.n_bytes for b in machine.blocks()] == [2 * MIB]


def test_a_block_is_freed_and_completed_once():
    machine, _ = allocator()
    block = machine.allocate(512)
    with pytest.raises(UsageError, match="no free of it is pending"):
        machine.complete(block)
    machine.free(block)
    with pytest.raises(UsageError, match="free it once"):
        machine.free(block)
    assert machine.allocated_bytes == machine.active_bytes == 0


def test_peaks_stay_when_the_sums_fall():
    machine, _ = allocator()
    one, two = machine.allocate(12 * MIB), machine.allocate(14 * MIB)
    machine.free(one)
    machine.free(two)
    machine.empty_cache()
    assert (machine.reserved_bytes, machine.allocated_bytes, machine.active_bytes) == (0, 0, 0)
    assert machine.peak_reserved_bytes == 26 * MIB
    assert machine.peak_allocated_bytes == machine.peak_active_bytes == 26 * MIB


# Releases.


def test_empty_cache_gives_back_whole_segments_large_ones_first():
    machine, entries = allocator(0, 10, 40, 80)
    small, other = machine.allocate(512), machine.allocate(20 * MIB)
    large, used = machine.allocate(14 * MIB), machine.allocate(MIB, stream=1)
    machine.free(small)
    machine.free(other)
    machine.free(large, pending=True)
    del entries[:]
    released = machine.empty_cache()
    assert [entry[:3] for entry in entries] == [
        ("free_completed", 40 * MIB, 14 * MIB),
        ("segment_free", 40 * MIB, 14 * MIB),
        ("segment_free", 10 * MIB, 20 * MIB),
        ("segment_free", 0, 2 * MIB),
    ]
    assert [s.va for s in released] == [40 * MIB, 10 * MIB, 0]
    assert [s.va for s in machine.segments()] == [used.segment.va]


def test_a_private_pool_is_kept_until_it_is_closed():
    machine, _ = allocator()
    kept = machine.allocate(512, pool="0,1")
    machine.free(machine.allocate(20 * MIB, pool="0,1"))
    assert machine.empty_cache() == []
    assert [s.n_bytes for s in machine.close_pool("0,1")] == [20 * MIB]
    machine.free(kept)
    assert [s.n_bytes for s in machine.empty_cache()] == [2 * MIB]
    machine.free(machine.allocate(512, pool="0,1"))  # in use again
    assert machine.empty_cache() == []


def test_a_closed_pool_gives_back_its_small_segments_first():
    machine, entries = allocator(0, 50, 100)
    for size in (20 * MIB, 512):
        machine.free(machine.allocate(size, pool="0,1"))
    assert [s.n_bytes for s in machine.close_pool("0,1")] == [2 * MIB, 20 * MIB]
    assert [e[2] for e in entries if e[0] == "segment_free"] == [2 * MIB, 20 * MIB]


def test_a_full_gpu_is_emptied_once_before_a_request_fails():
    machine, entries = allocator(0, 50, 100, device_bytes=64 * MIB)
    machine.free(machine.allocate(20 * MIB))
    pending = machine.allocate(30 * MIB)
    machine.free(pending, pending=True)
    del entries[:]
    machine.allocate(40 * MIB)
    assert actions(entries) == [
        "free_completed",
        "segment_free",
        "segment_free",
        "segment_alloc",
        "alloc",
    ]
    assert machine.n_retries == 1
    assert machine.reserved_bytes == 40 * MIB


def test_a_request_that_cannot_be_served_says_what_was_there():
    machine, entries = allocator(device_bytes=64 * MIB)
    machine.allocate(30 * MIB)
    with pytest.raises(AllocatorFullError, match="out of memory") as caught:
        machine.allocate(40 * MIB + 1)
    error = caught.value
    assert (error.requested, error.reserved, error.limit) == (40 * MIB + 1, 30 * MIB, 64 * MIB)
    assert entries[-1] == ("oom", 0, 40 * MIB + 512, 0, "0,0")
    assert machine.allocated_bytes == 30 * MIB
    assert check(machine) == []


def test_a_memory_fraction_counts_the_whole_segment():
    machine, _ = allocator(device_bytes=100 * MIB, memory_fraction=0.25)
    machine.allocate(6 * MIB)  # in a segment of 20 MiB, of the 25 MiB that are allowed
    with pytest.raises(AllocatorFullError, match="26214400 byte that it may reserve"):
        machine.allocate(4 * MIB, stream=1)
    assert machine.allocate(12 * MIB).segment.n_bytes == 20 * MIB


def test_an_oversize_block_serves_no_smaller_request():
    machine, _ = allocator(max_split_bytes=64 * MIB)
    machine.free(machine.allocate(70 * MIB))
    assert machine.allocate(60 * MIB).segment.n_bytes == 60 * MIB
    again = machine.allocate(66 * MIB)
    assert (again.n_bytes, again.is_split) == (70 * MIB, False)


def test_a_block_of_just_the_split_limit_is_oversize():
    machine, _ = allocator(max_split_bytes=64 * MIB)
    machine.free(machine.allocate(64 * MIB))
    assert machine.allocate(63 * MIB).segment.n_bytes == 64 * MIB
    assert len(machine.segments()) == 2


def test_an_oversize_request_takes_no_block_that_is_much_larger():
    machine, _ = allocator(max_split_bytes=64 * MIB)
    machine.free(machine.allocate(90 * MIB))
    assert machine.allocate(70 * MIB).segment.n_bytes == 70 * MIB
    assert machine.allocate(70 * MIB + 512).segment.n_bytes == 90 * MIB


def test_the_smallest_oversize_block_that_suffices_is_released():
    machine, entries = allocator(
        0, 100, 200, 300, 400, max_split_bytes=32 * MIB, device_bytes=150 * MIB
    )
    blocks = [machine.allocate(n * MIB) for n in (40, 60, 48)]
    for block in blocks:
        machine.free(block)
    machine.allocate(20 * MIB)
    assert [e[1:3] for e in entries if e[0] == "segment_free"] == [(0, 40 * MIB)]
    assert machine.n_retries == 0


def test_several_oversize_blocks_are_released_from_the_largest_down():
    machine, entries = allocator(
        0, 100, 200, 300, 400, max_split_bytes=32 * MIB, device_bytes=150 * MIB
    )
    blocks = [machine.allocate(n * MIB) for n in (40, 60, 48)]
    for block in blocks:
        machine.free(block)
    machine.allocate(100 * MIB)
    assert [e[1:3] for e in entries if e[0] == "segment_free"] == [
        (100 * MIB, 60 * MIB),
        (200 * MIB, 48 * MIB),
    ]
    assert machine.n_retries == 0


def test_oversize_blocks_that_are_too_little_go_but_all_free_memory_has_to():
    # 98 of 150 MiB are reserved. Without the oversize 48 MiB the request would just fit, but their sum is
    # below it, so it is not tried again before all streams are waited for.
    machine, entries = allocator(0, 100, 200, 300, max_split_bytes=32 * MIB, device_bytes=150 * MIB)
    large, cached = machine.allocate(48 * MIB), machine.allocate(20 * MIB, stream=1)
    machine.allocate(30 * MIB)
    machine.free(large)
    machine.free(cached)
    machine.allocate(100 * MIB)
    assert released(entries) == [0, 100]
    assert (machine.n_retries, machine.reserved_bytes) == (1, 130 * MIB)


def three_ages(threshold):
    """Free segments of 40 MiB at 100, 200 and 300 MiB, to be of age 3, 2 and 1 at the next search.

    200 MiB are allowed and 140 reserved. The searches between are those of another stream, which finds
    what it wants in its own segment.
    """
    machine, entries = allocator(
        0,
        100,
        200,
        300,
        400,
        device_bytes=400 * MIB,
        memory_fraction=0.5,
        garbage_collection_threshold=threshold,
    )
    machine.allocate(2 * MIB, stream=9)
    for block in [machine.allocate(40 * MIB) for _ in range(3)]:
        machine.free(block)
        if block.va < 300 * MIB:
            machine.allocate(2 * MIB, stream=9)
    return machine, entries


def released(entries):
    return [entry[1] // MIB for entry in entries if entry[0] == "segment_free"]


def test_garbage_collection_releases_what_is_at_least_of_mean_age():
    # Collected from 100 MiB on: 40 MiB too many. The mean age is 2, so two segments go in one pass.
    machine, entries = three_ages(0.5)
    machine.allocate(50 * MIB)
    assert released(entries) == [100, 200]
    assert machine.reserved_bytes == (140 - 80 + 50) * MIB


def test_garbage_collection_goes_on_until_enough_is_released():
    # Collected from 20 MiB on: 120 MiB too many, so the third goes in a second pass.
    machine, entries = three_ages(0.1)
    machine.allocate(50 * MIB)
    assert released(entries) == [100, 200, 300]


def test_garbage_is_not_collected_below_the_threshold_nor_when_a_block_fits():
    machine, entries = three_ages(0.7)  # from 140 MiB on, and just these are reserved
    machine.allocate(41 * MIB)
    assert released(entries) == []
    machine, entries = three_ages(0.5)
    machine.allocate(40 * MIB)
    assert released(entries) == []


def test_garbage_collection_leaves_private_pools_and_the_small_pool_alone():
    machine, entries = allocator(
        device_bytes=400 * MIB, memory_fraction=0.5, garbage_collection_threshold=0.1
    )
    machine.free(machine.allocate(40 * MIB, pool="0,1"))
    machine.free(machine.allocate(512))
    machine.allocate(30 * MIB)
    assert released(entries) == []


@pytest.mark.parametrize(
    ("tie_break", "fraction", "collects"),
    [("address", None, False), ("address", 1.0, True), ("block", 1.0, False), ("block", 0.9, True)],
)
def test_garbage_is_collected_only_under_a_memory_fraction(tie_break, fraction, collects):
    machine = CachingAllocator(
        AllocatorSettings(
            tie_break=tie_break,
            memory_fraction=fraction,
            device_bytes=GIB,
            garbage_collection_threshold=0.5,
        )
    )
    assert machine.collects_garbage is collects


# Expandable segments.


def expandable(*starts, **settings):
    return allocator(*(starts or (0, 10_000, 20_000)), expandable_segments=True, **settings)


def test_an_expandable_segment_is_mapped_by_2_mib_small_and_20_mib_large():
    machine, entries = expandable()
    machine.allocate(512)
    machine.allocate(MIB)
    machine.allocate(2 * MIB)
    assert [entry[:3] for entry in entries] == [
        ("segment_map", 0, 2 * MIB),
        ("alloc", 0, 512),
        ("alloc", 512, MIB),
        ("segment_map", 10_000 * MIB, 20 * MIB),
        ("alloc", 10_000 * MIB, 2 * MIB),
    ]
    assert machine.n_segments_made == 0
    assert machine.reserved_bytes == 22 * MIB


def test_an_expandable_segment_maps_only_what_is_missing_behind_its_free_end():
    machine, entries = expandable()
    machine.allocate(15 * MIB)
    block = machine.allocate(30 * MIB)  # 5 MiB are free at the end: 25 are missing, in granules 40
    assert entries[-2][:3] == ("segment_map", 20 * MIB, 40 * MIB)
    assert (block.va, block.n_bytes) == (15 * MIB, 30 * MIB)
    assert [(s.va, s.n_bytes) for s in machine.segments()] == [(0, 60 * MIB)]


def test_a_large_block_of_an_expandable_segment_is_split_at_512_byte():
    machine, _ = expandable()
    machine.allocate(20 * MIB - 512)
    assert [b.n_bytes for b in machine.blocks()] == [20 * MIB - 512, 512]


def test_empty_cache_unmaps_the_granules_that_are_wholly_free():
    machine, entries = expandable()
    blocks = [machine.allocate(n * MIB) for n in (10, 45, 25)]  # mapped: 80 MiB
    machine.free(blocks[1])  # [10, 55) is free: the granule [20, 40) lies in it
    del entries[:]
    assert machine.empty_cache() == []
    assert [entry[:3] for entry in entries] == [("segment_unmap", 20 * MIB, 20 * MIB)]
    assert [(s.va // MIB, s.n_bytes // MIB) for s in machine.segments()] == [(0, 20), (40, 40)]
    assert [(b.va // MIB, b.n_bytes // MIB, b.state) for b in machine.blocks()] == [
        (0, 10, "allocated"),
        (10, 10, "free"),
        (40, 15, "free"),
        (55, 25, "allocated"),
    ]
    again = machine.allocate(30 * MIB)  # the hole is mapped again, at the lowest address
    assert again.va == 10 * MIB
    assert machine.reserved_bytes == 80 * MIB


def test_the_addresses_of_an_expandable_segment_go_when_nothing_is_mapped():
    machine, _ = expandable(0, 5000)
    machine.free(machine.allocate(3 * MIB))
    machine.empty_cache()
    assert machine.segments() == machine.whole_segments() == []
    assert machine.allocate(3 * MIB).va == 5000 * MIB


def test_the_best_fit_of_an_expandable_segment_is_the_one_that_can_grow_least():
    # Free blocks of 4 MiB at the end of what is mapped (it can grow) and of 5 MiB in the middle.
    machine, _ = expandable()
    middle = machine.allocate(5 * MIB)
    machine.allocate(11 * MIB)
    machine.free(middle)
    assert [b.n_bytes // MIB for b in machine.blocks() if b.state == "free"] == [5, 4]
    assert machine.allocate(4 * MIB).va == 0


def test_of_two_blocks_that_can_grow_to_the_same_size_the_smaller_serves():
    # Free: 4 MiB at 16, before a hole of 20 MiB; 24 MiB at 56, between blocks in use.
    machine, _ = expandable()
    blocks = [machine.allocate(n * MIB) for n in (16, 24, 16, 24, 20)]
    machine.free(blocks[1])
    machine.empty_cache()
    machine.free(blocks[3])
    free = [(b.va // MIB, b.n_bytes // MIB) for b in machine.blocks() if b.state == "free"]
    assert free == [(16, 4), (56, 24)]
    assert machine.allocate(3 * MIB).va == 16 * MIB


def test_the_reservation_is_nine_eighths_of_the_memory():
    machine, _ = expandable(device_bytes=80 * MIB)
    machine.allocate(2 * MIB)
    assert [s.n_bytes for s in machine.whole_segments()] == [100 * MIB]  # 90 MiB in granules


def test_a_mapping_that_fails_releases_and_tries_again():
    machine, entries = expandable(0, 10_000, device_bytes=60 * MIB)
    machine.free(machine.allocate(35 * MIB, stream=1))
    machine.allocate(50 * MIB)
    assert [entry[:3] for entry in entries[4:]] == [
        ("segment_unmap", 0, 40 * MIB),
        ("segment_map", 10_000 * MIB, 60 * MIB),
        ("alloc", 10_000 * MIB, 50 * MIB),
    ]
    with pytest.raises(AllocatorFullError):
        machine.allocate(20 * MIB)


# The check of the invariants finds what is wrong.


def a_busy_machine():
    machine, _ = allocator(0, 100, 200)
    machine.free(machine.allocate(512))
    keep = machine.allocate(600)
    machine.free(machine.allocate(512))
    machine.allocate(5 * MIB)
    machine.free(machine.allocate(2 * MIB), pending=True)
    assert check(machine) == []
    return SimpleNamespace(machine=machine, keep=keep)


def _make_neighbours_free(case):
    case.keep.state = "free"


def _shrink_block(case):
    case.keep.n_bytes = 512


def _shift_sum(case):
    case.machine.active_bytes += 512


def _lose_free_block(case):
    case.keep.next.segment.home.remove(case.keep.next)


def _ask_for_more(case):
    case.keep.requested_bytes += 512
    case.machine.requested_bytes += 512


def _ask_for_less(case):
    case.machine.requested_bytes -= case.keep.requested_bytes - 1
    case.keep.requested_bytes = 1


def _move_segment(case):
    for block in case.keep.segment.blocks():
        block.va += 512
    case.keep.segment.va += 512


def _lower_peak(case):
    case.machine.peak_reserved_bytes = 0


def _disorder(case):
    case.keep.segment.home.keys.reverse()
    case.keep.segment.home.keys.append(0)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_make_neighbours_free, "free neighbours"),
        (_shrink_block, "do not add up to its size"),
        (_shift_sum, "active_bytes is"),
        (_lose_free_block, "do not hold just the free blocks"),
        (_ask_for_more, "smaller than its request"),
        (_ask_for_less, "was not split"),
        (_move_segment, "multiple of 2 MiB"),
        (_lower_peak, "peak of the reserved bytes"),
        (_disorder, "out of order"),
    ],
)
def test_the_check_names_what_is_violated(damage, complaint):
    case = a_busy_machine()
    damage(case)
    assert any(complaint in problem for problem in check(case.machine))
