"""What holds of every run of the driver model, checked on random programs by plain page sets.

Nothing here asks the engine: residency is replayed page by page from the log and the truth.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from programs import modelled, programs, residency_changes, run_to_end, settings

from nsan.model.access import Chase, Random, Stream, Strided
from nsan.model.profiles import HOSTS
from nsan.model.program import (
    CPU,
    Advise,
    Allocate,
    DeviceAllocate,
    HostTouch,
    HostWait,
    Kernel,
    Launch,
    Prefetch,
    Program,
    Synchronize,
)
from nsan.model.settings import Settings
from nsan.units import KIB, MIB
from nsan.uvm.constants import VA_BLOCK_BYTES

N_PROGRAMS = 300 if os.environ.get("NSAN_SOAK") == "1" else 25


def _reads(name, *, gpu=0, repeat=1, **part):
    stream = Stream(allocation=name, **part)
    return Launch(Kernel("reads", 1, 256, (stream,), repeat=repeat), gpu)


def found(what, *operations, **machine):
    """A program that broke a law once, or would with a step left out; and its machine."""
    return Program(what, operations), Settings(**machine)


A, B = Allocate("a", VA_BLOCK_BYTES), Allocate("b", VA_BLOCK_BYTES)
FIRST_PAGE = {"n_bytes": 4 * KIB}
LEAF_1 = {"offset_bytes": 64 * KIB, "n_bytes": 64 * KIB}
DENSE = Strided(allocation="a", stride_bytes=64 * KIB)
HALF_A_PAGE = Stream(allocation="a", write=True, n_bytes=2 * KIB)
DENSELY = Launch(Kernel("dense", 1, 256, (DENSE,)))
THREE_BLOCKS = Allocate("a", 3 * VA_BLOCK_BYTES)
BESIDE = Stream(allocation="b", write=True, **LEAF_1)

FOUND = [
    found(
        "a chunk that the CPU empties is free when the copy is done",
        *(A, B, _reads("b", **FIRST_PAGE), _reads("a", **FIRST_PAGE), Synchronize()),
        *(_reads("b", **LEAF_1), HostTouch("a", **FIRST_PAGE), Synchronize()),
        host="epyc-7713",
        capacity_bytes=VA_BLOCK_BYTES,
        prefetch=False,
    ),
    found(
        "a clean eviction waits for the copy under way, and who needs the chunk waits for it",
        *(A, B, HostTouch("a", write=True), Advise("a", "read_mostly"), _reads("b", **FIRST_PAGE)),
        *(Launch(Kernel("k", 1, 256, (DENSE, BESIDE))), Synchronize()),
        capacity_bytes=VA_BLOCK_BYTES,
    ),
    found(
        "a prefetch waits for a first touch under way on another GPU",
        *(A, B, _reads("b", **FIRST_PAGE), Prefetch("a", CPU), _reads("a", gpu=1, write=True)),
        Synchronize(),
        host="desktop",
        n_gpus=2,
    ),
    found(
        "a copy through the CPU leaves nothing there",
        *(A, _reads("a", **FIRST_PAGE), Synchronize(), Advise("a", "read_mostly")),
        *(_reads("a", gpu=1, **FIRST_PAGE), Synchronize()),
        n_gpus=2,
        peer=False,
    ),
    found(
        "a write invalidates a duplicate only after it came",
        *(A, HostTouch("a", write=True), Advise("a", "read_mostly"), _reads("a", **FIRST_PAGE)),
        *(_reads("a", gpu=1, **FIRST_PAGE), Synchronize(), _reads("a", gpu=1, **LEAF_1)),
        *(HostWait(1), _reads("a", write=True, **LEAF_1), Synchronize()),
        host="epyc-7713",
        n_gpus=2,
    ),
    found(
        "copies of several blocks wait for their engine: it is slower than the driver here",
        *(THREE_BLOCKS, HostTouch("a", write=True), DENSELY, Synchronize()),
        gpu="v100-sxm2-16gb",
        host="epyc-7763",
    ),
    found(
        "an eviction waits for the copy under way: cudaMalloc comes 300 us after the launch",
        *(THREE_BLOCKS, B, HostTouch("a", write=True), DENSELY),
        HostTouch("b", ns_per_mib=300_000.0 * 256, **FIRST_PAGE),
        *(DeviceAllocate("d", 3 * VA_BLOCK_BYTES), Synchronize()),
        gpu="v100-sxm2-16gb",
        capacity_bytes=4 * VA_BLOCK_BYTES,
    ),
    found(
        "a write waits until a prefetch of a duplicate is done",
        *(A, Launch(Kernel("eight", 8, 1, (HALF_A_PAGE,), compute_ns_per_mib=0.0), 1)),
        *(_reads("a", gpu=2, write=True, n_bytes=1), Prefetch("a", 2, n_bytes=1)),
        *(Advise("a", "read_mostly"), Synchronize()),
        n_gpus=3,
    ),
    found(
        "a row taken out of the log alone keeps its times",
        *(Allocate("a", 3 * VA_BLOCK_BYTES), Prefetch("a")),
        *(DeviceAllocate(name, VA_BLOCK_BYTES) for name in "xyz"),
        capacity_bytes=4 * VA_BLOCK_BYTES,
    ),
]
"""Each test of every program runs these too."""


def every_program(test):
    """Run a test on the programs found and on random ones: 300 in `make soak`."""
    test = given(programs())(test)
    for program in FOUND:
        test = hypothesis.example(program)(test)
    return hypothesis.settings(max_examples=N_PROGRAMS)(test)


class Residency:
    """Who holds which page, event by event, and how many 2 MiB chunks that takes."""

    def __init__(self, ran):
        self.block_pages = ran.block_pages
        self.holds = np.zeros((ran.settings.n_gpus + 1, len(ran.where)), bool)
        self.in_block = np.zeros((len(self.holds), len(ran.where) // ran.block_pages), int)
        self.chunks = np.zeros(len(self.holds), int)

    def all_at(self, place, page, n_pages):
        return bool(self.holds[place, page : page + n_pages].all())

    def arrive(self, place, page, n_pages):
        assert not self.holds[place, page : page + n_pages].any(), "it was there already"
        self._change(place, page, n_pages, 1)

    def leave(self, place, page, n_pages):
        assert self.all_at(place, page, n_pages), "it was not there"
        self._change(place, page, n_pages, -1)

    def _change(self, place, page, n_pages, sign):
        self.holds[place, page : page + n_pages] = sign > 0
        while n_pages:  # a row of freed pages may span blocks
            block, n = page // self.block_pages, self.block_pages - page % self.block_pages
            n = min(n, n_pages)
            before = self.in_block[place, block] > 0
            self.in_block[place, block] += sign * n
            self.chunks[place] += (self.in_block[place, block] > 0) - int(before)
            page, n_pages = page + n, n_pages - n


def instants(ran):
    """Go through the residency changes; give the time and the residency after each instant."""
    residency = Residency(ran)
    by_time = itertools.groupby(residency_changes(ran), key=lambda row: row["time_ns"])
    for time, rows in ((time, list(together)) for time, together in by_time):
        for row in rows:
            act = residency.arrive if row["arrives"] else residency.leave
            act(row["place"], row["page"], row["n_pages"])
        yield time, rows, residency


def ever_read_mostly(ran):
    """Pages of all allocations that the program ever advised as read-mostly."""
    names = {
        operation.allocation
        for operation in ran.program.operations
        if isinstance(operation, Advise) and operation.advice == "read_mostly"
    }
    pages = np.zeros(len(ran.where), bool)
    for life in ran.happened.lives:
        if life.name in names:
            first, last = life.start, life.start + life.n_bytes
            pages[first // ran.page_bytes : -(-last // ran.page_bytes)] = True
    return pages


def capacity(ran, gpu, time):
    """Chunks that managed pages can have: cudaMalloc takes some while it holds them."""
    taken = sum(
        -(-life.n_bytes // VA_BLOCK_BYTES)
        for life in ran.happened.lives
        if life.device == gpu
        and life.alloc_ns <= time
        and (life.free_ns is None or time < life.free_ns)
    )
    return ran.settings.capacity_chunks - taken


def balance(ran):
    """Arrivals less departures of each page at each processor, summed in no order."""
    change = np.zeros((ran.settings.n_gpus + 1, len(ran.where) + 1), int)

    def add(place, row, n):
        change[place, row["page"]] += n
        change[place, row["page"] + row["n_pages"]] -= n

    for row in ran.rows("copies"):
        add(row["dst"], row, 1)
        add(row["src"], row, row["kept"] - 1)
    for row in ran.rows("changes"):
        add(row["processor"], row, 1 if row["reason"] == 0 else -1)
    return change.cumsum(axis=1)[:, :-1]


def disjoint(spans):
    """Say whether half-open spans, in any order, never overlap."""
    return all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))


def strictly_rising(values):
    return all(a < b for a, b in itertools.pairwise(values))


@every_program
def test_no_page_is_in_two_places_unless_it_is_read_duplicated(drawn):
    ran = run_to_end(*drawn)
    duplicated = ever_read_mostly(ran)
    for _, rows, residency in instants(ran):
        for row in rows:
            pages = slice(row["page"], row["page"] + row["n_pages"])
            n_holders = residency.holds[:, pages].sum(axis=0)
            assert (n_holders[~duplicated[pages]] <= 1).all(), row


@every_program
def test_resident_chunks_never_exceed_the_capacity(drawn):
    ran = run_to_end(*drawn)
    for time, rows, residency in instants(ran):
        for gpu in {row["processor"] for row in rows} - {-1}:
            assert residency.chunks[gpu + 1] <= capacity(ran, gpu, time), rows


@every_program
def test_pages_in_less_pages_out_and_dropped_are_the_pages_at_the_end(drawn):
    ran = run_to_end(*drawn)
    places = np.arange(ran.settings.n_gpus + 1)[:, None]
    assert (balance(ran) == ran.where[None, :] >> places & 1).all()


@every_program
def test_replaying_the_changes_in_time_ends_where_the_engine_ends(drawn):
    ran = run_to_end(*drawn)
    last = Residency(ran)
    for _, _, residency in instants(ran):
        last = residency
    for place, holds in enumerate(last.holds):
        assert set(np.flatnonzero(holds).tolist()) == ran.resident(place - 1)


@every_program
def test_a_migration_is_a_run_of_pages_of_one_block(drawn):
    ran = run_to_end(*drawn)
    for row in ran.rows("copies"):
        assert 1 <= row["n_pages"] <= ran.block_pages
        last = row["page"] + row["n_pages"] - 1
        assert row["page"] // ran.block_pages == last // ran.block_pages
        assert row["start_ns"] < row["end_ns"]
        assert row["src"] != row["dst"]


@every_program
def test_a_batch_holds_no_more_than_it_may(drawn):
    ran = run_to_end(*drawn)
    pages = defaultdict(list)
    for row in ran.rows("faulted"):
        pages[row["batch"]].append(row)
    for batch in ran.rows("batches"):
        own = pages[batch["batch"]]
        assert 1 <= batch["n_page_faults"] <= batch["n_entries"] <= ran.settings.batch_size
        assert sum(row["n_entries"] for row in own) == batch["n_entries"]
        assert len({row["page"] for row in own}) == len(own) == batch["n_pages"]
        assert len({row["page"] // ran.block_pages for row in own}) == batch["n_blocks"]
        lowest = min(own, key=lambda row: row["page"])
        assert (lowest["page"], lowest["n_entries"]) == (batch["page"], batch["n_page_faults"])


@every_program
def test_a_gpu_serves_one_batch_after_the_other(drawn):
    ran = run_to_end(*drawn)
    for gpu in range(ran.settings.n_gpus):
        batches = ran.batches(gpu)
        assert all(b["raised_ns"] < b["fetched_ns"] < b["end_ns"] for b in batches)
        assert disjoint((b["fetched_ns"], b["end_ns"]) for b in batches)
        assert strictly_rising([b["raised_ns"] for b in batches])
        assert strictly_rising([b["end_ns"] for b in batches])


@every_program
def test_a_kernel_lives_around_its_batches_and_alone_on_its_gpu(drawn):
    ran = run_to_end(*drawn)
    work = ran.happened.work
    for gpu in range(ran.settings.n_gpus):
        spans = [(w.start_ns, w.end_ns) for g, w in work if g == gpu]
        assert all(start < end for start, end in spans)
        assert disjoint(spans)
    for batch in ran.rows("batches"):
        gpu, kernel = work[batch["kernel"]]
        assert gpu == batch["gpu"]
        assert kernel.start_ns <= batch["raised_ns"]
        assert batch["end_ns"] < kernel.end_ns <= ran.happened.end_ns
    assert all(w.ready_ns <= w.start_ns for _, w in work)


@every_program
def test_copies_of_one_direction_of_a_gpu_never_overlap(drawn):
    ran = run_to_end(*drawn)
    spans = defaultdict(list)
    for row in ran.rows("copies"):
        engine = ("in", row["dst"]) if row["src"] == 0 else ("out", row["src"])
        spans[engine].append((row["start_ns"], row["end_ns"]))
    for engine, own in spans.items():
        assert disjoint(own), engine


@every_program
def test_the_copies_of_a_batch_lie_between_its_fetch_and_its_end(drawn):
    ran = run_to_end(*drawn)
    batches = {batch["batch"]: batch for batch in ran.rows("batches")}
    for row in ran.rows("copies"):
        if row["batch"] >= 0:
            batch = batches[row["batch"]]
            assert batch["fetched_ns"] <= row["start_ns"] < row["end_ns"] < batch["end_ns"]


@every_program
def test_a_page_is_copied_only_from_where_it_is(drawn):
    ran = run_to_end(*drawn)
    residency = Residency(ran)
    starts = [row | {"time_ns": row["start_ns"], "arrives": None} for row in ran.rows("copies")]
    rows = [*residency_changes(ran), *starts]
    order = {False: 0, True: 1, None: 2}
    for row in sorted(rows, key=lambda row: (row["time_ns"], order[row["arrives"]])):
        if row["arrives"] is None:
            assert residency.all_at(row["src"], row["page"], row["n_pages"]), row
        else:
            act = residency.arrive if row["arrives"] else residency.leave
            act(row["place"], row["page"], row["n_pages"])


@every_program
def test_the_same_program_and_seed_give_the_same_log(drawn):
    first, second = run_to_end(*drawn), run_to_end(*drawn)
    for table, frame in first.happened.log.items():
        assert_frame_equal(frame, second.happened.log[table])
    assert first.happened.work == second.happened.work
    assert first.happened.calls == second.happened.calls
    assert (first.where == second.where).all()


def everything_once(draw):
    """A program that fills whole arrays on the host and then reads each of them once on one GPU."""
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True))
    n_blocks = {name: draw(st.integers(1, 2)) for name in names}
    operations = [Allocate(name, n * VA_BLOCK_BYTES) for name, n in n_blocks.items()]
    operations += [HostTouch(name, write=True, ns_per_mib=0.0) for name in names]
    for name in names:
        stream = Stream(allocation=name, write=draw(st.booleans()), backward=draw(st.booleans()))
        kernel = Kernel(name, draw(st.integers(1, 64)), draw(st.sampled_from([32, 256])), (stream,))
        operations.append(Launch(kernel))
    operations.append(Synchronize())
    return Program("once", tuple(operations)), sum(n_blocks.values()) * VA_BLOCK_BYTES


@given(st.data(), st.integers(0, 1000))
def test_another_seed_changes_only_order_and_time_of_what_is_touched_once(data, seed):
    program, n_bytes = everything_once(data.draw)
    capacity = {"n_gpus": 1, "capacity_bytes": n_bytes}
    chosen = data.draw(settings(**capacity))
    for changed in (chosen, replace(chosen, seed=seed)):
        ran = run_to_end(program, changed)
        copied = sum(row["n_pages"] for row in ran.rows("copies")) * ran.page_bytes
        assert copied == n_bytes
        assert ran.resident(0) == set(range(n_bytes // ran.page_bytes))
        assert ran.resident(-1) == set()


# Every program ends -------------------------------------------------------------------------------


def writes(name, *, repeat=20, grid=1):
    """A kernel that writes an allocation over and over."""
    return Kernel("writes", grid, 256, (Stream(allocation=name, write=True),), repeat=repeat)


@pytest.mark.parametrize("peer", [True, False])
@pytest.mark.parametrize("thrashing", [True, False])
@pytest.mark.parametrize("n_gpus", [2, 3])
@pytest.mark.parametrize("gpu", ["a100-sxm4-40gb", "rtx-3060"])
@pytest.mark.parametrize("host", sorted(HOSTS))
def test_gpus_that_write_the_same_page_all_end(host, gpu, n_gpus, thrashing, peer):
    ran = modelled(
        Allocate("a", 4 * KIB),
        *(Launch(writes("a"), device) for device in range(n_gpus)),
        Synchronize(),
        host=host,
        gpu=gpu,
        n_gpus=n_gpus,
        thrashing=thrashing,
        peer=peer,
    )
    assert len(ran.happened.work) == n_gpus
    assert all(work.start_ns < work.end_ns for _, work in ran.happened.work)
    assert sum(0 in ran.resident(place) for place in range(-1, n_gpus)) == 1


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("thrashing", [True, False])
@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("host", sorted(HOSTS))
def test_host_and_gpu_that_use_the_same_page_both_end(host, write, thrashing, prefetch):
    ran = modelled(
        Allocate("a", 4 * KIB),
        HostTouch("a", write=True),
        Launch(writes("a", repeat=2000)),
        HostTouch("a", write=write, ns_per_mib=1e9),
        Synchronize(),
        host=host,
        thrashing=thrashing,
        prefetch=prefetch,
    )
    [(_, work)] = ran.happened.work
    assert work.start_ns < work.end_ns <= ran.happened.end_ns
    assert len(ran.rows("cpu_faults")) > 1, "they met"


@pytest.mark.parametrize("batch_size", [1, 7, 256])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize(
    "streams",
    [
        tuple(Stream(allocation=name, write=True) for name in "abcd"),
        (
            Random(allocation="a", draws=40, write=True),
            Random(allocation="b", draws=40, seed=2),
            Chase(allocation="c", hops=20),
        ),
    ],
    ids=["streams", "random"],
)
def test_kernels_over_many_blocks_end_with_room_for_one_chunk(streams, prefetch, batch_size):
    # Each thread block needs pages of several blocks at once, and each takes the others' chunk.
    n_bytes = 256 * KIB if batch_size == 1 else 4 * MIB
    ran = modelled(
        *(Allocate(name, n_bytes) for name in "abcd"),
        *(Allocate(f"gap {name}", 4 * MIB) for name in "ab"),
        Launch(Kernel("k", 8, 256, streams)),
        Synchronize(),
        capacity_bytes=VA_BLOCK_BYTES,
        prefetch=prefetch,
        batch_size=batch_size,
    )
    assert len({page // ran.block_pages for page in ran.resident(0)}) == 1
