"""Small programs on the driver model whose every page is worked out by hand."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from programs import modelled, residency_changes, run_to_end

from nsan.errors import ProgramError, UnknownNameError
from nsan.model.access import Broadcast, Chase, Matrix, Random, Stencil, Stream, Strided, Zipf
from nsan.model.engine import state as engine
from nsan.model.program import (
    CPU,
    Advise,
    Allocate,
    Copy,
    DeviceAllocate,
    Fill,
    Free,
    HostTouch,
    HostWait,
    Kernel,
    Launch,
    PopRange,
    Prefetch,
    Synchronize,
)
from nsan.model.settings import Settings
from nsan.model.size import Size
from nsan.model.workloads import workload
from nsan.units import KIB, MIB
from nsan.uvm.constants import (
    CAUSE_COHERENCE,
    CAUSE_EVICTION,
    CAUSE_PREFETCH,
    CAUSE_USER,
    VA_BLOCK_BYTES,
)

BLOCK = 512
"""Pages of 4 KiB in a VA block."""

LEAF = 16
"""Pages of 4 KiB in a big page of 64 KiB."""


def read(name, *, gpu=0, **part):
    """One thread block reads a part of an allocation."""
    return Launch(Kernel("read", 1, 256, (Stream(allocation=name, **part),)), gpu)


def write(name, *, gpu=0, **part):
    """One thread block writes a part of an allocation."""
    return read(name, gpu=gpu, write=True, **part)


def touch(name, **how):
    return HostTouch(name, write=True, **how)


def moves(ran, *, cause=None):
    """Pages copied between processors: (from, to, pages), copies of equal ends added up."""
    copies = [c for c in ran.rows("copies") if cause is None or c["cause"] == cause]
    ends = itertools.groupby(copies, key=lambda c: (c["src"] - 1, c["dst"] - 1))
    return [(src, dst, sum(c["n_pages"] for c in own)) for (src, dst), own in ends]


def changed(ran, reason):
    """Pages whose residency changed without a copy: (processor, page) for this reason."""
    rows = [row for row in ran.rows("changes") if row["reason"] == reason]
    return {(row["processor"] - 1, row["page"] + i) for row in rows for i in range(row["n_pages"])}


def outcomes(ran, gpu=0):
    return [batch["outcome"] for batch in ran.batches(gpu)]


def pages(first, last):
    return set(range(first, last))


# First touch --------------------------------------------------------------------------------------


def test_a_page_that_a_gpu_touches_first_is_populated_without_a_migration():
    # One fault, widened to its 64 KiB: 16 pages from nowhere.
    ran = modelled(Allocate("a", 64 * KIB), write("a"), Synchronize())
    assert ran.rows("copies") == []
    assert changed(ran, engine.FIRST_TOUCH) == {(0, page) for page in range(16)}
    assert outcomes(ran) == [engine.FIRST_TOUCHED]
    assert ran.resident(0) == pages(0, 16)


def test_a_page_that_the_cpu_touches_first_comes_with_its_64_kib():
    ran = modelled(Allocate("a", 64 * KIB), touch("a", n_bytes=1))
    assert [(row["page"], row["access"]) for row in ran.rows("cpu_faults")] == [(0, engine.WRITE)]
    assert ran.rows("copies") == []
    assert ran.resident(CPU) == pages(0, 16)


def test_without_the_prefetcher_a_fault_brings_one_page():
    ran = modelled(
        Allocate("a", 64 * KIB), touch("a"), write("a", n_bytes=1), Synchronize(), prefetch=False
    )
    assert len(ran.rows("cpu_faults")) == 16
    assert moves(ran) == [(CPU, 0, 1)]
    assert ran.resident(CPU) == pages(1, 16)


def test_on_a_host_with_64_kib_pages_a_fault_brings_64_kib():
    ran = modelled(
        Allocate("a", 192 * KIB), touch("a"), write("a", n_bytes=1), Synchronize(), host="power9"
    )
    assert ran.page_bytes == 64 * KIB
    assert [(c["page"], c["n_pages"], c["cause"]) for c in ran.rows("copies")] == [(0, 1, 2)]


def test_one_thread_block_through_two_mebibyte_gives_the_signature_of_six_groups():
    ran = modelled(Allocate("a", 2 * MIB), touch("a"), read("a"), Synchronize())
    rows = [(c["page"], c["n_pages"], c["cause"]) for c in ran.rows("copies")]
    groups = [(0, 16), (16, 16), (32, 32), (64, 64), (128, 128), (256, 256)]
    assert rows == [
        row
        for first, n in groups
        for row in ((first, 1, CAUSE_COHERENCE), (first + 1, n - 1, CAUSE_PREFETCH))
    ]
    assert len(ran.batches(0)) == 6


# Advice -------------------------------------------------------------------------------------------

READ_DUPLICATED = (
    Allocate("a", 64 * KIB),
    touch("a"),
    Advise("a", "read_mostly"),
    read("a"),
    Synchronize(),
)


def test_a_read_of_read_mostly_pages_leaves_both_copies_valid():
    ran = modelled(*READ_DUPLICATED)
    assert moves(ran) == [(CPU, 0, 16)]
    assert ran.resident(CPU) == ran.resident(0) == pages(0, 16)


def test_a_cpu_write_invalidates_the_copy_of_the_gpu_without_a_record():
    ran = modelled(*READ_DUPLICATED, touch("a", n_bytes=1))
    assert moves(ran) == [(CPU, 0, 16)]
    assert changed(ran, engine.INVALIDATED) == {(0, 0)}
    assert (ran.resident(CPU), ran.resident(0)) == (pages(0, 16), pages(1, 16))


def test_a_gpu_write_invalidates_the_copy_of_the_cpu_without_a_record():
    ran = modelled(*READ_DUPLICATED, write("a", n_bytes=1), Synchronize())
    assert moves(ran) == [(CPU, 0, 16)]
    assert changed(ran, engine.INVALIDATED) == {(CPU, 0)}
    assert outcomes(ran) == [engine.DATA, engine.UPGRADED]
    assert (ran.resident(CPU), ran.resident(0)) == (pages(1, 16), pages(0, 16))


def test_a_write_to_read_mostly_pages_moves_them():
    ran = modelled(
        Allocate("a", 4 * KIB),
        touch("a"),
        Advise("a", "read_mostly"),
        write("a"),
        Synchronize(),
        prefetch=False,
    )
    assert (ran.resident(CPU), ran.resident(0)) == (set(), {0})


def test_after_unset_read_mostly_a_read_moves():
    ran = modelled(*READ_DUPLICATED[:3], Advise("a", "unset_read_mostly"), read("a"), Synchronize())
    assert (ran.resident(CPU), ran.resident(0)) == (set(), pages(0, 16))


def test_read_duplicated_pages_are_evicted_silently():
    # One chunk: the block of b needs that of a, whose 512 pages are valid on the CPU too.
    ran = modelled(
        Allocate("a", 2 * MIB),
        Allocate("b", 2 * MIB),
        touch("a"),
        Advise("a", "read_mostly"),
        read("a"),
        write("b", n_bytes=1),
        Synchronize(),
        capacity_bytes=2 * MIB,
    )
    assert moves(ran, cause=CAUSE_EVICTION) == []
    assert changed(ran, engine.CLEAN_EVICTION) == {(0, page) for page in range(512)}
    [eviction] = ran.rows("evictions")
    assert (eviction["block"], eviction["n_copied"], eviction["n_dropped"]) == (0, 0, 512)
    assert ran.resident(0) == pages(512, 528)


def test_a_page_preferred_on_the_cpu_is_mapped_from_afar():
    # A fault row, no copy; the kernel's second sweep finds the mapping.
    ran = modelled(
        Allocate("a", 4 * KIB),
        touch("a"),
        Advise("a", "preferred_location", CPU),
        Launch(Kernel("k", 1, 256, (Stream(allocation="a", write=True),), repeat=2)),
        Synchronize(),
    )
    assert outcomes(ran) == [engine.REMOTE]
    assert ran.rows("copies") == []
    assert ran.resident(0) == set()


def test_a_page_preferred_on_the_cpu_is_populated_there_when_a_gpu_touches_it_first():
    ran = modelled(
        Allocate("a", 4 * KIB), Advise("a", "preferred_location", CPU), write("a"), Synchronize()
    )
    assert changed(ran, engine.FIRST_TOUCH) == {(CPU, 0)}
    assert outcomes(ran) == [engine.REMOTE]


def test_a_first_touch_at_the_preferred_location_takes_the_whole_block():
    # 1 MiB of the block has the advice: 256 pages, however thin the tree is.
    ran = modelled(
        Allocate("a", 1 * MIB), Advise("a", "preferred_location", 0), write("a", n_bytes=1)
    )
    assert ran.resident(0) == pages(0, 256)
    assert len(ran.batches(0)) == 1


def test_after_unset_preferred_location_a_fault_migrates():
    ran = modelled(
        Allocate("a", 64 * KIB),
        touch("a"),
        Advise("a", "preferred_location", CPU),
        Advise("a", "unset_preferred_location", CPU),
        read("a"),
        Synchronize(),
    )
    assert moves(ran) == [(CPU, 0, 16)]


def test_a_gpu_that_accesses_by_mapping_never_faults():
    ran = modelled(
        Allocate("a", 1 * MIB), touch("a"), Advise("a", "accessed_by", 0), write("a"), Synchronize()
    )
    assert ran.rows("batches") == []
    assert ran.resident(CPU) >= pages(0, 256)


def test_accessed_by_is_of_one_gpu_and_can_be_taken_back():
    allocated = (Allocate("a", 64 * KIB), touch("a"), Advise("a", "accessed_by", 0))
    ran = modelled(*allocated, read("a", gpu=1), Synchronize(), n_gpus=2)
    assert moves(ran) == [(CPU, 1, 16)]
    ran = modelled(*allocated, Advise("a", "unset_accessed_by", 0), read("a"), Synchronize())
    assert moves(ran) == [(CPU, 0, 16)]


def test_a_write_through_a_mapping_invalidates_the_other_copy():
    # GPU 1 holds a duplicate, GPU 0 writes to the CPU's page: the duplicate is no longer valid.
    ran = modelled(
        Allocate("a", 4 * KIB),
        touch("a"),
        Advise("a", "read_mostly"),
        read("a", gpu=1),
        Synchronize(),
        Advise("a", "accessed_by", 0),
        write("a", gpu=0),
        Synchronize(),
        n_gpus=2,
        prefetch=False,
    )
    assert (ran.resident(CPU), ran.resident(0), ran.resident(1)) == ({0}, set(), set())


# Memory that is used from afar ----------------------------------------------------------------------

READ_NS = 1 / 26.8
"""Per byte from the host to the default GPU; 26.3 back. A remote access takes 1000 ns more, an assumption."""

PAGE_STEP_NS = 781
"""One thread block computes for a page: 200 000 ns per MiB, so 781.25 ns for 4 KiB, whole ns."""

RETIRE_NS = 1_000
"""From the last thread block to the end of its kernel."""


def afar(n_bytes, *streams, threads=256, advice=(("accessed_by", 0),), **kernel):
    """A kernel of as many thread blocks as an array of the CPU has KiB works on it in place."""
    return modelled(
        *(operation for name in "ab" for operation in (Allocate(name, n_bytes), touch(name))),
        *(Advise(name, *one) for name in "ab" for one in advice),
        Launch(Kernel("k", n_bytes // KIB, threads, streams, **kernel)),
        Synchronize(),
    )


def duration(ran, nth=0):
    work = ran.happened.work[nth][1]
    return work.end_ns - work.start_ns


def near(ns, least):
    """Not below what the link needs, and at most a fifth above."""
    return least <= ns <= 1.2 * least


@pytest.mark.parametrize(("write", "rate"), [(False, 26.8), (True, 26.3)])
def test_thread_blocks_share_the_rate_of_the_link_for_memory_of_the_cpu(write, rate):
    ran = afar(16 * MIB, Stream(allocation="a", write=write))
    assert near(duration(ran), 16 * MIB / rate)
    assert (ran.rows("batches"), ran.rows("copies")) == ([], [])


def test_nothing_of_the_cpus_memory_stays_with_the_gpu():
    ran = afar(16 * MIB, Stream(allocation="a"), repeat=2)
    assert near(duration(ran), 2 * 16 * MIB * READ_NS)


def test_loads_and_stores_go_over_the_link_at_once():
    ran = afar(16 * MIB, Stream(allocation="a"), Stream(allocation="b", write=True, phase=1))
    assert near(duration(ran), 16 * MIB / 26.3)


def test_each_gpu_has_its_own_link():
    stream = Stream(allocation="a")
    kernel = Kernel("k", 16 * MIB // KIB, 256, (stream,))
    ran = modelled(
        Allocate("a", 16 * MIB),
        touch("a"),
        *(Advise("a", "accessed_by", gpu) for gpu in (0, 1)),
        *(Launch(kernel, gpu) for gpu in (0, 1)),
        Synchronize(),
        n_gpus=2,
    )
    assert near(duration(ran, 0), 16 * MIB * READ_NS)
    assert near(duration(ran, 1), 16 * MIB * READ_NS)


def test_an_element_that_is_drawn_at_random_moves_its_sector_of_32_byte():
    ran = afar(1 * MIB, Random(allocation="a", element_bytes=4, draws=512))
    assert near(duration(ran), 1024 * 512 * 32 * READ_NS)


def test_one_thread_block_waits_for_each_access_from_afar():
    # A step per page: 4096 byte in 153 ns, 1000 ns of latency, and what it computes.
    ran = modelled(
        Allocate("a", 1 * MIB), touch("a"), Advise("a", "accessed_by", 0), read("a"), Synchronize()
    )
    assert duration(ran) == 256 * (153 + 1_000 + PAGE_STEP_NS) + RETIRE_NS


def test_memory_of_the_gpu_costs_no_more_than_its_computing():
    ran = modelled(
        Allocate("a", 1 * MIB), touch("a"), Prefetch("a"), read("a", write=True), Synchronize()
    )
    assert duration(ran) == 256 * PAGE_STEP_NS + RETIRE_NS


def test_an_access_that_faults_and_is_mapped_from_afar_goes_over_the_link_after_the_replay():
    # 100 ns until the access is tried again, then as above.
    ran = modelled(
        Allocate("a", 4 * KIB),
        touch("a"),
        Advise("a", "preferred_location", CPU),
        read("a"),
        Synchronize(),
        jitter_ns=1,
    )
    [batch] = ran.batches(0)
    end = ran.happened.work[0][1].end_ns
    assert end - batch["end_ns"] == 100 + 153 + 1_000 + PAGE_STEP_NS + RETIRE_NS


def test_memory_preferred_at_the_cpu_costs_the_link_once_it_is_mapped():
    kernel = Kernel("k", 4 * MIB // KIB, 256, (Stream(allocation="a"),))
    ran = modelled(
        Allocate("a", 4 * MIB),
        touch("a"),
        Advise("a", "preferred_location", CPU),
        *(Launch(kernel), Synchronize()) * 2,
    )
    last = ran.happened.work[1][1].start_ns
    assert max(batch["end_ns"] for batch in ran.batches(0)) < last
    assert near(duration(ran, 1), 4 * MIB * READ_NS)
    assert ran.rows("copies") == []


def test_a_pinned_page_costs_the_link_at_each_store():
    # 4096 byte at 26.3 GB/s take 156 ns. What is left of 30 000 steps when the page is mapped ends in the pin.
    ran = fight()
    pin = measures(ran, engine.REMOTE_MAP)[0]["start_ns"]
    [mapped] = [batch["end_ns"] for batch in ran.batches(0) if batch["outcome"] == engine.REMOTE]
    work = ran.happened.work[0][1]
    assert work.end_ns < pin + 150_000_000
    left = 30_000 - (mapped - work.start_ns) // PAGE_STEP_NS
    assert left > 10_000
    assert work.end_ns - mapped >= left * (156 + 1_000 + PAGE_STEP_NS)


# Capacity -----------------------------------------------------------------------------------------

THREE_BLOCKS = tuple(
    operation for name in "abc" for operation in (Allocate(name, 2 * MIB), touch(name))
)


def test_the_victim_is_the_chunk_least_recently_migrated_in_not_the_least_recently_used():
    # a came before b and is used after it; room for c is made of a, all 512 pages of it.
    ran = modelled(
        *THREE_BLOCKS,
        Prefetch("a"),
        Prefetch("b"),
        read("a"),
        read("c"),
        Synchronize(),
        capacity_bytes=4 * MIB,
    )
    assert moves(ran, cause=CAUSE_EVICTION) == [(0, CPU, 512)]
    [eviction] = ran.rows("evictions")
    assert (eviction["block"], eviction["n_copied"], eviction["n_dropped"]) == (0, 512, 0)
    assert ran.resident(0) == pages(512, 1536)


def test_a_page_that_comes_in_again_makes_its_chunk_the_last_to_go():
    # As before, but the host takes one page of a back and the GPU fetches it again: now b is older.
    ran = modelled(
        *THREE_BLOCKS,
        Prefetch("a"),
        Prefetch("b"),
        touch("a", n_bytes=1),
        read("a"),
        read("c"),
        Synchronize(),
        capacity_bytes=4 * MIB,
    )
    assert [eviction["block"] for eviction in ran.rows("evictions")] == [1]
    assert ran.resident(0) == pages(0, 512) | pages(1024, 1536)


def test_one_resident_page_holds_a_chunk():
    # One page in each of three blocks, room for two chunks: the first page goes.
    ran = modelled(
        *(Allocate(name, 2 * MIB) for name in "abc"),
        *(write(name, n_bytes=1) for name in "abc"),
        Synchronize(),
        capacity_bytes=4 * MIB,
        prefetch=False,
    )
    assert moves(ran) == [(0, CPU, 1)]
    assert ran.resident(0) == {512, 1024}
    assert ran.resident(CPU) == {0}


def test_an_evicted_page_that_comes_back_is_a_refault():
    ran = modelled(
        *(Allocate(name, 2 * MIB) for name in "ab"),
        *(write(name, n_bytes=1) for name in "aba"),
        Synchronize(),
        capacity_bytes=2 * MIB,
        prefetch=False,
    )
    assert moves(ran) == [(0, CPU, 1), (0, CPU, 1), (CPU, 0, 1)] or moves(ran) == [
        (0, CPU, 2),
        (CPU, 0, 1),
    ]
    [refault] = ran.rows("refaults")
    assert (refault["gpu"], refault["page"], refault["n_pages"]) == (0, 0, 1)
    first_eviction = ran.rows("evictions")[0]
    assert refault["evicted_ns"] == first_eviction["end_ns"] < refault["time_ns"]


def test_cuda_malloc_takes_chunks_from_managed_memory_and_evicts():
    ran = modelled(
        *THREE_BLOCKS,
        Prefetch("a"),
        Prefetch("b"),
        DeviceAllocate("d", 1),  # one byte, one chunk
        capacity_bytes=4 * MIB,
    )
    assert moves(ran, cause=CAUSE_EVICTION) == [(0, CPU, 512)]
    assert ran.resident(0) == pages(512, 1024)
    device = ran.happened.lives[-1]
    assert (device.device, device.n_bytes) == (0, 1)
    assert device.alloc_ns >= ran.rows("evictions")[0]["end_ns"]


def test_each_eviction_keeps_its_own_times():
    # Four chunks, three of them a's: each cudaMalloc but the first evicts one, alone in its log.
    ran = modelled(
        Allocate("a", 6 * MIB),
        Prefetch("a"),
        *(DeviceAllocate(name, 2 * MIB) for name in "xyz"),
        capacity_bytes=8 * MIB,
    )
    first, second = ran.rows("evictions")
    assert (first["block"], second["block"]) == (0, 1)
    calls = [(c.start_ns, c.end_ns) for c in ran.happened.calls if c.name.startswith("cudaMalloc_")]
    for eviction, (start, end) in zip((first, second), calls[1:], strict=True):
        assert start <= eviction["start_ns"] < eviction["end_ns"] <= end
    assert moves(ran) == [(0, CPU, 1024)]


def test_cuda_free_gives_the_chunks_back():
    # a and b fit beside nothing; while d lives only one of them does.
    ran = modelled(
        *THREE_BLOCKS,
        DeviceAllocate("d", 2 * MIB),
        Prefetch("a"),
        Free("d"),
        Prefetch("b"),
        capacity_bytes=4 * MIB,
    )
    assert ran.rows("evictions") == []
    assert ran.resident(0) == pages(0, 1024)


def test_managed_memory_never_takes_the_chunks_of_cuda_malloc():
    # All memory of the GPU is taken: either cudaMalloc fails, or managed pages stay on the CPU.
    try:
        ran = modelled(
            Allocate("a", 4 * KIB),
            DeviceAllocate("d", 2 * MIB),
            write("a"),
            Synchronize(),
            capacity_bytes=2 * MIB,
        )
    except ProgramError:
        return
    assert ran.resident(0) == set()


# A user's prefetch --------------------------------------------------------------------------------


def test_a_prefetch_moves_whole_blocks_in_rows_of_two_mebibyte():
    ran = modelled(Allocate("a", 6 * MIB), touch("a"), Prefetch("a"), Prefetch("a", CPU))
    rows = [(c["page"], c["n_pages"], c["cause"], c["src"], c["dst"]) for c in ran.rows("copies")]
    to_gpu = [(first, 512, CAUSE_USER, 0, 1) for first in (0, 512, 1024)]
    assert rows == to_gpu + [(first, 512, CAUSE_USER, 1, 0) for first in (0, 512, 1024)]
    assert ran.rows("batches") == []


def test_a_prefetch_of_a_part_is_cut_at_the_block():
    ran = modelled(
        Allocate("a", 4 * MIB), touch("a"), Prefetch("a", 0, offset_bytes=1 * MIB, n_bytes=2 * MIB)
    )
    assert [(c["page"], c["n_pages"]) for c in ran.rows("copies")] == [(256, 256), (512, 256)]


def test_a_prefetch_of_untouched_memory_populates_it_without_a_record():
    ran = modelled(Allocate("a", 2 * MIB), Prefetch("a"))
    assert ran.rows("copies") == []
    assert ran.resident(0) == pages(0, 512)


def test_after_a_prefetch_a_kernel_does_not_fault():
    ran = modelled(Allocate("a", 2 * MIB), touch("a"), Prefetch("a"), read("a"), Synchronize())
    assert ran.rows("batches") == []


# Ping-pong ----------------------------------------------------------------------------------------


def ping_pong(n_moves, *, pause_ns=1):
    """The host fills one page; then GPU and host take it in turns, ``n_moves`` moves in all."""
    turns = []
    for move in range(n_moves):
        turns += [touch("a"), HostWait(pause_ns)] if move % 2 else [write("a"), Synchronize()]
    return Allocate("a", 4 * KIB), touch("a"), *turns


def measures(ran, kind):
    return [row for row in ran.rows("measures") if row["kind"] == kind]


@pytest.mark.parametrize(("n_moves", "detections"), [(4, 0), (5, 1), (7, 1)])
def test_a_quiet_page_is_found_thrashing_at_its_fifth_move(n_moves, detections):
    # The second move makes the driver watch the block; the third to fifth are the three it counts.
    ran = modelled(*ping_pong(n_moves), prefetch=False)
    assert sum(n for _, _, n in moves(ran)) == n_moves
    assert [row["page"] for row in measures(ran, engine.THRASHING)] == [0] * detections


def test_moves_slower_than_the_lapse_do_not_count():
    ran = modelled(*ping_pong(9, pause_ns=600_000), prefetch=False)
    assert sum(n for _, _, n in moves(ran)) == 9
    assert ran.rows("measures") == []


def test_without_the_measures_a_page_moves_for_ever():
    ran = modelled(*ping_pong(20), prefetch=False, thrashing=False)
    assert sum(n for _, _, n in moves(ran)) == 20
    assert ran.rows("measures") == []


def test_a_prefetch_by_the_user_resets_the_count():
    # Three moves, a prefetch to where the page is, two moves: none of them is the third in a row.
    operations = [*ping_pong(4), Prefetch("a", CPU), *ping_pong(2)[2:]]
    ran = modelled(*operations, prefetch=False)
    assert measures(ran, engine.THRASHING) == []


def fight(**settings):
    """GPU and host write the same page for as long as it takes."""
    kernel = Kernel("k", 1, 256, (Stream(allocation="a", write=True),), repeat=30_000)
    return modelled(
        Allocate("a", 4 * KIB),
        touch("a"),
        Launch(kernel),
        touch("a", ns_per_mib=5e9),
        Synchronize(),
        prefetch=False,
        **settings,
    )


@pytest.mark.parametrize("pin_after", [10, 3])
def test_a_page_is_pinned_after_so_many_throttles(pin_after):
    ran = fight(pin_after=pin_after)
    pins = measures(ran, engine.REMOTE_MAP)
    naps = {
        row["end_ns"]
        for row in measures(ran, engine.THROTTLING)
        if row["start_ns"] < pins[0]["start_ns"]
    }
    assert len(naps) == pin_after


def test_a_throttled_gpu_faults_again_and_again_until_the_nap_ends():
    ran = fight()
    naps = [row for row in measures(ran, engine.THROTTLING) if not row["by_cpu"]]
    assert naps
    for nap in naps:
        spins = [
            batch
            for batch in ran.batches(0)
            if nap["start_ns"] <= batch["fetched_ns"] < nap["end_ns"]
        ]
        assert len(spins) > 2
        assert {batch["outcome"] for batch in spins} == {engine.THROTTLED}
        assert len({(batch["page"], batch["n_page_faults"]) for batch in spins}) == 1
        assert nap["end_ns"] - nap["start_ns"] <= 500_000


def test_a_pinned_page_goes_to_the_cpu_once_and_the_gpu_maps_it_with_one_fault():
    ran = fight()
    pin = measures(ran, engine.REMOTE_MAP)[0]["start_ns"]
    during = range(pin, pin + 150_000_000)
    copies = [c for c in ran.rows("copies") if c["start_ns"] in during]
    assert [c["dst"] for c in copies] in ([], [0])
    batches = [b for b in ran.batches(0) if b["fetched_ns"] in during]
    assert [b["outcome"] for b in batches] == [engine.REMOTE]
    assert ran.resident(CPU) == {0}


def test_after_the_pin_the_page_faults_again():
    # Measured: the next fault comes 150.2 to 163.5 ms after the pin, as it ends.
    ran = fight(pin_ns=1_000_000)
    pin = measures(ran, engine.REMOTE_MAP)[0]["start_ns"]
    assert ran.happened.work[0][1].end_ns > pin + 2_000_000, "the kernel goes on"
    faults = [b["raised_ns"] - pin for b in ran.batches(0)]
    assert [ns for ns in faults if 1_000_000 <= ns < 2_000_000]


# Several GPUs -------------------------------------------------------------------------------------

TWO_GPUS = (Allocate("a", 64 * KIB), write("a", gpu=0), Synchronize(), write("a", gpu=1))


def test_peers_copy_from_each_other():
    ran = modelled(*TWO_GPUS, n_gpus=2)
    assert moves(ran) == [(0, 1, 16)]
    assert (ran.resident(0), ran.resident(1)) == (set(), pages(0, 16))


def test_without_peer_access_a_page_goes_through_the_cpu_in_two_records():
    ran = modelled(*TWO_GPUS, n_gpus=2, peer=False, prefetch=False)
    assert [n for _, _, n in moves(ran)] == [1] * 32
    assert moves(ran)[:2] == [(0, CPU, 1), (CPU, 1, 1)]
    first, second = ran.rows("copies")[:2]
    assert first["end_ns"] < second["start_ns"]
    assert (ran.resident(CPU), ran.resident(0), ran.resident(1)) == (set(), set(), pages(0, 16))


@pytest.mark.parametrize("peer", [True, False])
def test_a_read_mostly_page_is_on_both_gpus(peer):
    ran = modelled(
        Allocate("a", 4 * KIB),
        write("a", gpu=0),
        Synchronize(),
        Advise("a", "read_mostly"),
        read("a", gpu=1),
        n_gpus=2,
        peer=peer,
        prefetch=False,
    )
    assert ran.resident(0) == ran.resident(1) == {0}


def test_each_gpu_has_its_own_memory():
    # One chunk on each: two blocks fit, one on either GPU.
    ran = modelled(
        Allocate("a", 2 * MIB),
        Allocate("b", 2 * MIB),
        write("a", gpu=0),
        write("b", gpu=1),
        Synchronize(),
        n_gpus=2,
        capacity_bytes=2 * MIB,
    )
    assert ran.rows("evictions") == []
    assert (ran.resident(0), ran.resident(1)) == (pages(0, 512), pages(512, 1024))


# Faults outside kernels ---------------------------------------------------------------------------


def test_a_memcpy_to_managed_memory_faults_for_writing():
    ran = modelled(Allocate("a", 64 * KIB), Copy("a"), prefetch=False)
    [(_, work)] = ran.happened.work
    assert (work.kind, work.copy_kind, work.n_bytes) == ("copy", 1, 64 * KIB)
    batches = ran.batches(0)
    assert {b["access"] for b in batches} == {engine.WRITE}
    assert all(work.start_ns <= b["raised_ns"] < b["end_ns"] <= work.end_ns for b in batches)
    assert ran.resident(0) == pages(0, 16)


def test_a_memcpy_from_managed_memory_faults_for_reading_what_it_copies():
    ran = modelled(
        Allocate("a", 64 * KIB), touch("a"), Copy("a", False, n_bytes=8 * KIB), prefetch=False
    )
    [(_, work)] = ran.happened.work
    assert (work.kind, work.copy_kind, work.n_bytes) == ("copy", 2, 8 * KIB)
    assert {b["access"] for b in ran.batches(0)} == {engine.READ}
    assert sum(n for _, _, n in moves(ran)) == 2


def test_a_memset_faults_for_writing():
    ran = modelled(Allocate("a", 64 * KIB), Fill("a", n_bytes=4 * KIB), prefetch=False)
    [(_, work)] = ran.happened.work
    assert (work.kind, work.n_bytes) == ("fill", 4 * KIB)
    assert [b["access"] for b in ran.batches(0)] == [engine.WRITE]
    assert ran.resident(0) == {0}


# Addresses ----------------------------------------------------------------------------------------


def test_a_free_drops_the_pages_and_the_next_allocation_lies_there_again():
    ran = modelled(
        Allocate("a", 2 * MIB),
        write("a", n_bytes=64 * KIB),
        touch("a", offset_bytes=1 * MIB, n_bytes=1),
        Free("a"),
        Allocate("b", 2 * MIB),
        write("b", n_bytes=64 * KIB),
        Synchronize(),
    )
    a, b = ran.happened.lives
    assert a.start == b.start == 0
    assert a.free_ns < b.alloc_ns
    gone = {(0, page) for page in range(16)} | {(CPU, page) for page in range(256, 272)}
    assert changed(ran, engine.FREED) == gone
    assert ran.rows("copies") == []
    assert outcomes(ran) == [engine.FIRST_TOUCHED] * 2
    assert (ran.resident(CPU), ran.resident(0)) == (set(), pages(0, 16))


def test_advice_goes_with_the_allocation():
    ran = modelled(
        Allocate("a", 2 * MIB),
        Advise("a", "preferred_location", CPU),
        Free("a"),
        Allocate("b", 2 * MIB),
        write("b", n_bytes=1),
    )
    assert outcomes(ran) == [engine.FIRST_TOUCHED]


def test_small_allocations_share_a_block_and_a_leaf():
    # Three of 16 KiB: a fault on the first brings all 64 KiB, so the others never fault.
    ran = modelled(
        *(Allocate(name, 16 * KIB) for name in "abc"),
        *(touch(name) for name in "abc"),
        *(read(name) for name in "abc"),
        Synchronize(),
    )
    assert [life.start for life in ran.happened.lives] == [0, 16 * KIB, 32 * KIB]
    assert len(ran.rows("cpu_faults")) == len(ran.batches(0)) == 1
    assert moves(ran) == [(CPU, 0, 16)]


def test_pages_of_a_shared_block_stay_while_one_of_its_allocations_lives():
    operations = [Allocate("a", 4 * KIB), Allocate("b", 4 * KIB), touch("a"), Free("a")]
    ran = modelled(*operations)
    assert ran.resident(CPU) == pages(0, 16)
    ran = modelled(*operations, Free("b"))
    assert ran.resident(CPU) == set()


def test_allocations_of_a_block_and_more_start_on_one():
    ran = modelled(Allocate("a", 4 * KIB), Allocate("b", 3 * MIB), Allocate("c", 2 * MIB))
    assert [life.start for life in ran.happened.lives] == [0, 2 * MIB, 6 * MIB]


def test_a_name_can_be_used_again_for_another_kind_of_memory():
    ran = modelled(
        DeviceAllocate("x", 2 * MIB),
        Free("x"),
        Allocate("x", 2 * MIB),
        touch("x", n_bytes=1),
        Free("x"),
        DeviceAllocate("x", 2 * MIB),
        Free("x"),
    )
    assert [life.device for life in ran.happened.lives] == [0, None, 0]
    assert ran.resident(CPU) == set()


# Access patterns: which pages a kernel touches, counted without the engine ------------------------


def page_set(spans):
    """Pages of (first byte, length) spans."""
    return {
        page for first, n in spans for page in range(first // 4096, (first + n - 1) // 4096 + 1)
    }


def test_a_stencil_touches_its_tile_and_the_halo():
    # 256 x 64 floats: rows of 1 KiB. Tile 1 of 4 across starts at column 64, its halo of 2 reaches
    # row 65 and column 129.
    spans = [((row * 256 + 62) * 4, 68 * 4) for row in range(64)]
    stencil = Stencil(allocation="a", width=256, height=64, tile=64, halo=2)
    kernel = Kernel("k", 2, 256, (stencil,))
    ran = modelled(Allocate("a", 64 * KIB), Launch(kernel), Synchronize(), prefetch=False)
    assert ran.resident(0) == page_set(spans) == pages(0, 16)


@pytest.mark.parametrize(
    ("grid", "streams", "expected"),
    [
        (1, [Stream(allocation="a")], range(256)),
        (7, [Stream(allocation="a", backward=True)], range(256)),
        (3, [Stream(allocation="a", offset_bytes=5 * KIB, n_bytes=10 * KIB)], range(1, 4)),
        # Every third page: threads 12 KiB apart reach the end of 1 MiB at byte 1 044 480.
        (2, [Strided(allocation="a", stride_bytes=12 * KIB)], range(0, 256, 3)),
        (4, [Broadcast(allocation="a", n_bytes=40 * KIB)], range(10)),
        (1, [Broadcast(allocation="a", chunk_bytes=128 * KIB)], range(256)),
        (1, [Broadcast(allocation="a", chunk_bytes=1 * MIB)], range(256)),
        # 512 x 512 floats in rows of 2 KiB: thread block 0 of A reads 32 rows, 64 KiB.
        (1, [Matrix(allocation="a", role="A", n=512)], range(16)),
        # ... of B 128 byte of each row: every page.
        (1, [Matrix(allocation="a", role="B", n=512)], range(256)),
        # ... and of C, with the last of 16 thread blocks in the first row, 32 rows.
        (16, [Matrix(allocation="a", role="C", n=512)], range(16)),
        (2, [Stream(allocation="a", n_bytes=1), Stream(allocation="a", phase=1)], range(256)),
    ],
)
def test_a_kernel_touches_the_pages_of_its_pattern(grid, streams, expected):
    kernel = Kernel("k", grid, 256, tuple(streams))
    ran = modelled(Allocate("a", 1 * MIB), Launch(kernel), Synchronize(), prefetch=False)
    assert ran.resident(0) == set(expected)


@pytest.mark.parametrize(
    ("stream", "most"),
    [
        (Random(allocation="a", draws=20), 40),
        (Zipf(allocation="a", draws=20), 40),
        (Chase(allocation="a", hops=20), 40),
    ],
)
def test_a_kernel_with_drawn_accesses_touches_no_more_pages_than_draws(stream, most):
    kernel = Kernel("k", 2, 256, (stream,))
    ran = modelled(Allocate("a", 1 * MIB), Launch(kernel), Synchronize(), prefetch=False)
    assert 10 < len(ran.resident(0)) <= most
    assert ran.resident(0) <= pages(0, 256)


def test_a_gather_after_zipf_asks_for_few_rows_often():
    # Rows of one page: the uneven law leaves more of the 256 untouched than the even one.
    draws = {"draws": 256, "element_bytes": 4 * KIB}
    even, uneven = (
        len(
            modelled(
                Allocate("a", 1 * MIB),
                Launch(Kernel("k", 1, 256, (stream,))),
                Synchronize(),
                prefetch=False,
            ).resident(0)
        )
        for stream in (
            Random(allocation="a", **draws),
            Zipf(allocation="a", exponent=1.5, **draws),
        )
    )
    assert uneven < even


# What no program can do ---------------------------------------------------------------------------

A = Allocate("a", 64 * KIB)


@pytest.mark.parametrize(
    ("operations", "names"),
    [
        ([A, touch("b")], ["'b'", "a"]),
        ([A, read("b")], ["'b'", "a"]),
        ([A, DeviceAllocate("d", 1), Prefetch("d")], ["'d'", "a"]),
        ([A, Free("a"), Advise("a", "read_mostly")], ["'a'", "none"]),
        ([A, Free("b")], ["'b'"]),
        ([A, Free("a"), Free("a")], ["'a'"]),
        ([A, A], ["'a'"]),
        ([Allocate("a", 0)], ["'a'", "0"]),
        ([DeviceAllocate("a", 1), DeviceAllocate("a", 1)], ["'a'"]),
        ([A, DeviceAllocate("a", 1)], ["'a'"]),
        ([DeviceAllocate("a", 1), A], ["'a'"]),
        ([DeviceAllocate("d", 1 << 50)], ["'d'", "full"]),
        ([A, read("a", n_bytes=64 * KIB + 1), Synchronize()], ["'a'", "65536"]),
        ([A, read("a", offset_bytes=64 * KIB), Synchronize()], ["'a'", "65536"]),
        ([A, touch("a", offset_bytes=1, n_bytes=64 * KIB)], ["'a'", "65536"]),
        ([A, Prefetch("a", 0, 0, 65 * KIB)], ["'a'", "65536"]),
        ([A, Advise("a", "read_often")], ["'read_often'", "read_mostly", "accessed_by"]),
        ([A, Prefetch("a", 1)], ["GPU 1", "1"]),
        ([A, read("a", gpu=3)], ["GPU 3", "1"]),
        ([A, Advise("a", "accessed_by", -2)], ["GPU -2", "1"]),
        ([A, Launch(Kernel("k", 1, 32, (Stream(allocation="a"),) * 13))], ["13", "12"]),
        ([A, Launch(Kernel("k", 1, 32, ()))], ["'k'", "0 streams"]),
        ([A, Launch(Kernel("k", 0, 32, (Stream(allocation="a"),)))], ["'k'", "grid 0"]),
        ([PopRange()], ["PopRange"]),
    ],
)
def test_what_no_program_can_do_is_one_clear_error(operations, names):
    with pytest.raises(ProgramError) as caught:
        modelled(*operations)
    assert all(name in str(caught.value) for name in names), str(caught.value)


@pytest.mark.parametrize(
    ("access", "numbers"),
    [
        (Random, {"element_bytes": 128 * KIB}),
        (Zipf, {"element_bytes": 128 * KIB}),
        (Chase, {"hops": 3, "element_bytes": 128 * KIB}),
        (Strided, {"stride_bytes": 0}),
        (Broadcast, {"chunk_bytes": 0}),
        (Stream, {"element_bytes": 0}),
        (Stream, {"phase": 2}),
        (Matrix, {"role": "D", "n": 16}),
    ],
)
def test_a_stream_that_makes_no_sense_is_one_clear_error(access, numbers):
    with pytest.raises(ProgramError, match=r"'a'|'D'"):
        modelled(A, Launch(Kernel("k", 2, 32, (access(allocation="a", **numbers),))), Synchronize())


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"n_gpus": 8}, ["8", "7"]),
        ({"n_gpus": 0}, ["0", "1"]),
        ({"batch_size": 0}, ["0", "1"]),
        ({"prefetch_threshold": 101}, ["101", "100"]),
        ({"capacity_bytes": 2 * MIB - 1}, ["2097151", "2 MiB"]),
    ],
)
def test_settings_that_no_driver_takes_are_one_clear_error(settings, names):
    with pytest.raises(ProgramError) as caught:
        Settings(**settings)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize("which", ["gpu", "host"])
def test_an_unknown_profile_is_an_error_that_lists_those_there_are(which):
    with pytest.raises(UnknownNameError, match=r"'mainframe'.*(a100|power9)"):
        Settings(**{which: "mainframe"}).rules()


def test_a_capacity_is_counted_in_whole_chunks():
    assert Settings(capacity_bytes=3 * VA_BLOCK_BYTES - 1).capacity_chunks == 2


# What a review found -----------------------------------------------------------------------------


def test_advice_given_while_a_kernel_runs_does_not_reach_back():
    # The kernel is through with its 2 MiB long before the advice, 20 ms after its launch.
    kernel = Kernel("k", 8, 256, (Stream(allocation="a"),))
    before = (Allocate("a", 2 * MIB), touch("a"), Launch(kernel), HostWait(20_000_000))
    plain = modelled(*before, Synchronize())
    advised = modelled(*before, Advise("a", "preferred_location", CPU), Synchronize())
    assert advised.happened.log["copies"].equals(plain.happened.log["copies"])
    assert advised.resident(0) == pages(0, 512)


def test_a_prefetch_elsewhere_waits_for_its_time():
    kernel = Kernel("k", 8, 256, (Stream(allocation="a"),))
    ran = modelled(
        Allocate("a", 2 * MIB),
        touch("a"),
        Launch(kernel),
        HostWait(20_000_000),
        Prefetch("a", 1),
        Synchronize(),
        n_gpus=2,
    )
    directions = ran.happened.log["copies"].select("src", "dst").unique(maintain_order=True)
    assert directions.rows() == [(0, 1), (1, 2)]
    assert ran.resident(1) == pages(0, 512)


def test_elements_of_more_pages_than_faults_fit_come_piece_by_piece():
    # 64 thread blocks read 512 KiB each, in any order, with room for 4 MiB of 64 MiB.
    stream = Random(allocation="a", element_bytes=512 * KIB, draws=1)
    ran = modelled(
        Allocate("a", 64 * MIB),
        touch("a"),
        Launch(Kernel("k", 64, 32, (stream,))),
        Synchronize(),
        capacity_bytes=4 * MIB,
    )
    assert ran.happened.log["batches"].height < 3000


def test_a_chunk_is_free_when_its_last_page_has_arrived_elsewhere():
    program = workload("ping-pong").build(Size(2 * MIB, iterations=2))
    ran = run_to_end(program, Settings(capacity_bytes=2 * MIB, batch_size=1))
    held = defaultdict(set)
    for change in residency_changes(ran):
        if change["processor"] == 0:
            changed = set(range(change["page"], change["page"] + change["n_pages"]))
            held[0] = held[0] | changed if change["arrives"] else held[0] - changed
            assert len({page // 512 for page in held[0]}) <= 1, change


def test_pages_go_through_the_cpu_in_two_whole_pushes():
    kernel = Kernel("k", 8, 256, (Stream(allocation="a", write=True),))
    ran = modelled(
        Allocate("a", 2 * MIB),
        Launch(kernel, 0),
        Synchronize(),
        Launch(kernel, 1),
        n_gpus=2,
        peer=False,
    )
    for way in ((1, 0), (0, 2)):
        rows = [r for r in ran.rows("copies") if (r["src"], r["dst"]) == way]
        for batch in {row["batch"] for row in rows}:
            push = sorted((r for r in rows if r["batch"] == batch), key=lambda r: r["start_ns"])
            assert all(b["start_ns"] == a["end_ns"] + 1 for a, b in itertools.pairwise(push))
            assert {row["cause"] for row in push} >= {2}
