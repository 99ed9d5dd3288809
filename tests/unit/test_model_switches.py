"""The three mechanisms of the caching allocator, each with its switch, and the words that they need."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from programs import modelled, programs, residency_changes, run_to_end
from tensor_programs import (
    WHOLE_PAGES,
    lifetimes,
    positions_of_batches,
    random_program,
    train,
)

import nsan
from nsan.errors import ProgramError, UsageError
from nsan.model import machine
from nsan.model.access import Stream
from nsan.model.allocator_history import snapshot_frames
from nsan.model.engine import state as st
from nsan.model.making import Recipe, make
from nsan.model.networks import tensors as t
from nsan.model.placing import SWITCHES, Allocation, parse_allocator, placed
from nsan.model.profiles import gpu_profile
from nsan.model.program import (
    ALLOCATION_NS,
    Advise,
    Allocate,
    Discard,
    Fill,
    Free,
    HostWait,
    Kernel,
    Launch,
    MarkDead,
    Prefetch,
    Synchronize,
)
from nsan.model.settings import Settings
from nsan.model.tensor_truth import dead_bytes, tensor_truth
from nsan.torch_alloc.replay import replay
from nsan.torch_alloc.settings import DEFAULT_SETTINGS
from nsan.units import KIB, MIB
from nsan.uvm.constants import VA_BLOCK_BYTES

N_PROGRAMS = 100 if os.environ.get("NSAN_SOAK") == "1" else 6
GPU = gpu_profile("a100-sxm4-40gb")
ALL = ["caching"] + [
    f"caching:{'+'.join(chosen)}"
    for n in (1, 2, 3)
    for chosen in itertools.combinations(SWITCHES, n)
]
HTOD, DTOH = "htod", "dtoh"


def of(made, kind):
    return [each for each in made.program.operations if isinstance(each, kind)]


# Names -----------------------------------------------------------------------------------------


def test_an_allocator_reads_as_it_is_written_and_its_switches_have_one_order():
    assert parse_allocator("raw") == Allocation("raw")
    for name in ALL:
        assert str(parse_allocator(name)) == name
    assert str(parse_allocator("caching:apart+drop+release")) == "caching:release+drop+apart"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cachng", "There are: raw, caching"),
        ("caching:drp", "There are: release, drop, apart"),
        ("caching:drop+", "There are: release, drop, apart"),
        ("caching:", "names no switch"),
        ("caching:drop+drop", "names drop twice"),
        ("raw:drop", "only caching has switches"),
    ],
)
def test_a_name_that_means_nothing_is_refused_with_what_there_is(text, said):
    with pytest.raises(UsageError, match=said):
        placed(random_program(1), text, GPU)


def test_model_json_and_snapshot_say_the_whole_name(tmp_path):
    made = placed(random_program(1), "caching:apart+release", GPU)
    make(Recipe(made.program, Settings(), placed=made), tmp_path / "run")
    about = json.loads((tmp_path / "run" / "model.json").read_text())
    assert about["allocator"]["kind"] == "caching:release+apart"
    snapshot = nsan.open_snapshot(tmp_path / "run" / "snapshot.pickle")
    assert snapshot.info.model["allocator"] == "caching:release+apart"


# What a switch adds ------------------------------------------------------------------------------


def test_drop_only_adds_marks_to_the_program():
    tensors = random_program(3)
    plain, drop = (placed(tensors, name, GPU) for name in ("caching", "caching:drop"))
    rest = [each for each in drop.program.operations if not isinstance(each, MarkDead)]
    assert rest == list(plain.program.operations)
    assert [entry[:5] for entry in drop.history.entries] == [
        entry[:5] for entry in plain.history.entries
    ]


def test_without_a_switch_no_word_of_a_switch_is_used():
    for name in ("raw", "caching"):
        made = placed(random_program(3), name, GPU)
        assert not of(made, MarkDead) + of(made, Discard) + of(made, HostWait)


@pytest.mark.parametrize("name", ALL)
def test_the_history_of_every_allocator_replays_to_itself(name):
    for seed in range(N_PROGRAMS):
        made = placed(random_program(seed, n_operations=150), name, GPU)
        frames = snapshot_frames(made.history, range(len(made.program.operations)))
        found = replay(
            *(frames[table] for table in ("segments", "blocks", "allocator_events")),
            DEFAULT_SETTINGS,
        ).agreement
        n_tensors = len(made.history.block_bytes)
        assert found.n_allocs == found.n_addresses_exact == n_tensors > 30
        assert found.n_segments_made == found.n_segments_exact > 0
        assert found.n_final_blocks == found.n_final_blocks_exact > 0
        assert found.n_contradictions == found.n_skipped == 0


@pytest.mark.parametrize("name", ALL)
def test_tensors_keep_their_own_size_under_every_allocator(name):
    tensors = random_program(4)
    plain, made = placed(tensors, "raw", GPU), placed(tensors, name, GPU)
    assert made.peak_tensor_bytes == plain.peak_tensor_bytes
    sizes = [
        [[stream.n_bytes for stream in launch.kernel.streams] for launch in of(each, Launch)]
        for each in (plain, made)
    ]
    assert sizes[0] == sizes[1]


# release ---------------------------------------------------------------------------------------


def test_with_release_each_tensor_costs_the_calls_of_one_without_a_cache():
    tensors = random_program(5, n_operations=150)
    raw, made = placed(tensors, "raw", GPU), placed(tensors, "caching:release", GPU)
    assert len(of(made, HostWait)) > 10
    assert {wait.ns for wait in of(made, HostWait)} == {ALLOCATION_NS}
    assert len(of(made, Allocate)) + len(of(made, HostWait)) == len(of(raw, Allocate))
    assert len(of(made, Discard)) > 5
    assert len(of(made, Discard)) + len(of(made, Free)) == len(of(raw, Free))


@pytest.mark.parametrize("name", ["caching:release", "caching:release+drop"])
def test_with_release_no_segment_stays_that_no_tensor_uses(name):
    held = Counter()
    made = placed(random_program(6, n_operations=200), name, GPU)
    sizes = iter(made.history.block_bytes)
    segments, blocks = {}, {}
    for entry, after in itertools.zip_longest(made.history.entries, made.history.entries[1:]):
        if entry.action == "segment_alloc":
            segments[entry.va] = entry.n_bytes
        elif entry.action == "segment_free":
            assert not held[entry.va]
            del segments[entry.va]
        elif entry.action == "alloc":
            base = max(va for va in segments if va <= entry.va)
            blocks[entry.va] = base
            held[base] += next(sizes)
        elif entry.action == "free_completed":
            base = blocks.pop(entry.va)
            held[base] = sum(1 for other in blocks.values() if other == base)
            is_released = after is not None and after.action == "segment_free"
            assert is_released == (held[base] == 0)


class _Watched(machine._Host):
    """A machine that looks at the pages of each discard right after it."""

    left = 0
    seen = 0

    def _discard(self, operation):
        super()._discard(operation)
        place, _ = self._live[operation.allocation]
        first, size = place.start + operation.offset_bytes, self._page_bytes
        pages = range(-(-first // size), (first + operation.n_bytes) // size)
        where = self._streams.state.memory.where
        type(self).left += sum(where[page] != 0 for page in pages)
        type(self).seen += len(pages)


@pytest.mark.parametrize("host", ["epyc-7763", "power9"])
def test_release_leaves_no_whole_page_of_a_free_block_resident(host):
    _Watched.left = _Watched.seen = 0
    settings = Settings(host=host, capacity_bytes=12 * MIB)
    for seed in range(N_PROGRAMS):
        made = placed(random_program(seed, n_operations=120), "caching:release", GPU)
        _Watched(made.program, settings, None).run()
    assert _Watched.seen > 100
    assert _Watched.left == 0


def kernel(name, *, write=True, **part):
    stream = Stream(allocation=name, write=write, **part)
    return Launch(Kernel("k", 32, 256, (stream,), compute_ns_per_mib=1_000.0))


def copied(ran, *, to_gpu):
    rows = ran.rows("copies")
    return ran.page_bytes * sum(row["n_pages"] for row in rows if (row["dst"] > 0) == to_gpu)


A, B = Allocate("a", VA_BLOCK_BYTES), Allocate("b", VA_BLOCK_BYTES)
ONE_CHUNK = {"capacity_bytes": VA_BLOCK_BYTES, "prefetch": False}


def test_after_a_discard_the_next_touch_is_a_first_touch_and_what_was_beside_it_stays():
    # Half a page at each end of the second 64 KiB is not wholly inside: 15 of 16 pages go.
    part = {"offset_bytes": 64 * KIB + 2 * KIB, "n_bytes": 64 * KIB - 4 * KIB}
    ran = modelled(A, kernel("a"), Discard("a", **part), kernel("a"), Synchronize(), prefetch=False)
    touched = [row for row in ran.rows("changes") if row["reason"] == st.FIRST_TOUCH]
    assert sum(row["n_pages"] for row in touched) == 512 + 14
    gone = [row for row in ran.rows("changes") if row["reason"] == st.DISCARDED]
    assert [(row["page"], row["n_pages"]) for row in gone] == [(17, 14)]
    assert copied(ran, to_gpu=True) == copied(ran, to_gpu=False) == 0


def test_a_discard_takes_as_long_as_a_free_and_waits_for_the_device():
    def spans(*end):
        ran = modelled(A, B, kernel("a"), *end)
        return [
            (call.end_ns - call.start_ns, call.start_ns)
            for call in ran.happened.calls
            if "Discard" in call.name or "Free" in call.name
        ]

    assert spans(Discard("a")) == spans(Free("a"))
    assert spans(Synchronize(), Discard("a"))[0][0] == ALLOCATION_NS < spans(Free("a"))[0][0]


def test_a_discarded_block_that_was_evicted_does_not_come_back():
    ran = modelled(A, B, kernel("a"), kernel("b"), Discard("a"), kernel("a"), **ONE_CHUNK)
    assert copied(ran, to_gpu=False) == 2 * VA_BLOCK_BYTES  # a, and then b
    assert copied(ran, to_gpu=True) == 0
    assert ran.rows("refaults") == []


def test_a_block_that_was_discarded_whole_is_as_new_to_the_driver_as_one_allocated_again():
    def dearer(*between):
        work = (kernel("a"), Synchronize())
        ran = modelled(A, *work, *between, *work, prefetch=False)
        times = [row["end_ns"] - row["fetched_ns"] for row in ran.rows("batches")]
        assert len(times) in {64 + 64, 64 + 32}  # 8 of 512 pages each, then of those that are new
        return [(i, time - min(times)) for i, time in enumerate(times) if time != min(times)]

    first = int(Settings().host_profile.first_block_ns)
    assert dearer(Discard("a")) == dearer(Free("a"), A) == [(0, first), (64, first)]
    assert dearer(Discard("a", MIB, MIB)) == [(0, first)]


def test_advice_outlives_a_discard():
    ran = modelled(
        *(A, Advise("a", "preferred_location", -1), kernel("a"), Discard("a"), kernel("a")),
        Synchronize(),
    )
    assert {row["outcome"] for row in ran.rows("batches")} == {st.REMOTE}
    assert ran.resident(0) == set()


# drop ------------------------------------------------------------------------------------------


def test_a_dead_page_is_dropped_where_it_would_be_evicted():
    alive = modelled(A, B, kernel("a"), kernel("b"), kernel("a", write=False), **ONE_CHUNK)
    assert copied(alive, to_gpu=True) == VA_BLOCK_BYTES
    dead = modelled(
        *(A, B, kernel("a"), MarkDead("a"), kernel("b"), MarkDead("a", dead=False)),
        *(kernel("a", write=False), Synchronize()),
        **ONE_CHUNK,
    )
    assert copied(dead, to_gpu=True) == 0
    assert copied(dead, to_gpu=False) == VA_BLOCK_BYTES  # b alone
    dropped = [row for row in dead.rows("changes") if row["reason"] == st.DROPPED]
    assert sum(row["n_pages"] for row in dropped) == 512
    assert [row["n_dropped"] for row in dead.rows("evictions")] == [512, 0]
    assert dead.rows("refaults") == []


def test_pages_at_the_cpu_are_dropped_when_the_stream_comes_to_the_mark():
    ran = modelled(
        *(A, B, kernel("a"), kernel("b"), MarkDead("a"), MarkDead("a", dead=False)),
        *(kernel("a", write=False), Synchronize()),
        **ONE_CHUNK,
    )
    assert copied(ran, to_gpu=True) == 0
    assert ran.resident(-1) == set(range(*ran.place("b")))


def test_a_mark_is_of_the_time_at_which_the_stream_comes_to_it():
    """Launched long before: the second kernel runs until then."""
    ran = modelled(A, B, kernel("a"), kernel("b"), MarkDead("a"), Synchronize(), **ONE_CHUNK)
    (dropped,) = (row for row in ran.rows("changes") if row["reason"] == st.DROPPED)
    (_, first), (_, second) = ran.happened.work
    assert first.end_ns < second.end_ns == dropped["time_ns"]


def test_a_mark_does_not_overtake_the_kernels_before_it():
    """All is launched at once: the mark stands in the stream behind the kernel that reads."""
    ran = modelled(
        *(A, B, kernel("a"), kernel("b"), kernel("a", write=False), MarkDead("a"), kernel("b")),
        Synchronize(),
        **ONE_CHUNK,
    )
    assert copied(ran, to_gpu=True) == 2 * VA_BLOCK_BYTES  # a for its reader, then b
    assert copied(ran, to_gpu=False) == 2 * VA_BLOCK_BYTES  # a and b once each: then a is dropped


def test_what_is_alive_again_is_copied_again():
    ran = modelled(
        *(A, B, kernel("a"), MarkDead("a"), MarkDead("a", dead=False), kernel("b"), Synchronize()),
        **ONE_CHUNK,
    )
    assert copied(ran, to_gpu=False) == VA_BLOCK_BYTES


def test_a_page_that_is_partly_needed_is_neither_dead_nor_left_dead():
    def out(*marks):
        return copied(
            modelled(A, B, kernel("a"), *marks, kernel("b"), Synchronize(), **ONE_CHUNK),
            to_gpu=False,
        )

    # From 100 byte on for two pages: one is whole.
    assert out(MarkDead("a", 100, 8 * KIB)) == VA_BLOCK_BYTES - 4 * KIB
    assert out(MarkDead("a", 100, 4 * KIB)) == VA_BLOCK_BYTES
    # One byte of a page makes it alive.
    assert out(MarkDead("a"), MarkDead("a", 4 * KIB, 1, dead=False)) == 4 * KIB


@pytest.mark.parametrize("advice", ["read_mostly", "unset_read_mostly"])
def test_advice_leaves_a_mark_as_it_is(advice):
    ran = modelled(
        *(A, B, kernel("a"), Synchronize(), MarkDead("a"), Advise("a", advice), kernel("b")),
        Synchronize(),
        **ONE_CHUNK,
    )
    assert copied(ran, to_gpu=False) == 0


def test_a_mark_ends_with_its_allocation():
    again = Allocate("c", VA_BLOCK_BYTES)
    ran = modelled(
        *(A, kernel("a"), MarkDead("a"), Free("a"), again, B, kernel("c"), kernel("b")),
        Synchronize(),
        **ONE_CHUNK,
    )
    assert ran.place("a") == ran.place("c")
    assert copied(ran, to_gpu=False) == VA_BLOCK_BYTES


def test_marks_take_no_time_and_leave_no_row():
    """Nothing is evicted here, so they change nothing at all."""
    work = (A, kernel("a", n_bytes=MIB), Prefetch("a"), kernel("a"), Fill("a"))
    plain = modelled(*work, Synchronize()).happened
    marks = itertools.cycle([MarkDead("a", 0, 4 * KIB), MarkDead("a", dead=False)])
    marked = [A, *itertools.chain(*zip(marks, marks, work[1:], strict=False)), Synchronize()]
    ran = modelled(*marked).happened
    assert ran.calls == plain.calls
    assert [(w.start_ns, w.end_ns) for _, w in ran.work] == [
        (w.start_ns, w.end_ns) for _, w in plain.work
    ]
    assert {name: rows.height for name, rows in ran.log.items()} == {
        name: rows.height for name, rows in plain.log.items()
    }


def test_a_dead_page_is_not_copied_between_gpus_or_to_the_cpu_either():
    for device in (1, -1):
        ran = modelled(
            A, kernel("a"), MarkDead("a"), Prefetch("a", device), Synchronize(), n_gpus=2
        )
        if device == -1:
            assert copied(ran, to_gpu=False) == 0
    two = modelled(
        *(A, kernel("a"), MarkDead("a"), Synchronize()),
        *(Launch(kernel("a").kernel, 1), Synchronize()),
        n_gpus=2,
    )
    assert two.rows("copies") == []
    assert two.resident(1) == set(range(*two.place("a")))


@pytest.mark.parametrize("word", [Discard, MarkDead])
def test_a_part_that_goes_past_its_allocation_is_refused(word):
    for part in ((0, VA_BLOCK_BYTES + 1), (-1, 5), (VA_BLOCK_BYTES, 1), (0, 0)):
        with pytest.raises(ProgramError, match="go past"):
            modelled(A, word("a", *part))
    with pytest.raises(ProgramError, match="not allocated"):
        modelled(A, word("z"))


def dead_bytes_of_a_page(ran):
    """Most bytes that nobody needed of one page of one migration."""
    found = Counter()
    moves = tensor_truth(ran.happened, ran.settings, ran.placed.history)["tensor_moves"]
    for row in moves.filter(pl.col("is_dead")).iter_rows(named=True):
        at, end = row["va"], row["va"] + row["bytes"]
        while at < end:
            stop = min(end, (at // ran.page_bytes + 1) * ran.page_bytes)
            found[row["migration"], at // ran.page_bytes] += stop - at
            at = stop
    return max(found.values(), default=0)


@pytest.mark.parametrize("name", ["caching:drop", "caching:release+drop", "caching:drop+apart"])
def test_with_drop_no_whole_page_that_nobody_needs_is_copied(name):
    with_it = []
    for seed in range(N_PROGRAMS // 2):
        tensors = random_program(seed, n_operations=120)
        with_it.append(dead_bytes_of_a_page(train(tensors, name)))
    assert max(with_it) < 4 * KIB
    # The last program without the switch, to see that there is something to drop.
    plain = "caching:apart" if "apart" in name else "caching"
    assert dead_bytes_of_a_page(train(tensors, plain)) == 4 * KIB


@pytest.mark.parametrize("name", ["caching:drop", "caching:drop+apart"])
def test_with_drop_and_tensors_of_whole_pages_nothing_dead_is_copied(name):
    tensors = random_program(11, n_operations=120, sizes=WHOLE_PAGES)
    plain = "caching:apart" if "apart" in name else "caching"
    found = [
        dead_bytes(tensor_truth(ran.happened, ran.settings, ran.placed.history)["tensor_moves"])
        for ran in (train(tensors, name), train(tensors, plain))
    ]
    assert found[0] == {"dead_in_bytes": 0, "dead_out_bytes": 0}
    assert min(found[1].values()) > MIB


def test_drop_never_drops_what_a_later_kernel_needs():
    """A page that holds bytes of a living tensor is touched for the first time once in its life, at most."""
    n_touched = n_dropped = 0
    for seed in range(N_PROGRAMS):
        ran = train(random_program(seed, n_operations=120), "caching:drop", prefetch=seed % 2 == 0)
        positions, size = positions_of_batches(ran), ran.page_bytes
        touched = [
            (positions[row["batch"]], row["page"], row["page"] + row["n_pages"])
            for row in ran.happened.log["changes"].iter_rows(named=True)
            if row["reason"] == st.FIRST_TOUCH
        ]
        for life in lifetimes(ran.placed.history):
            first, last = life.first // size, -(-life.last // size)
            times = np.zeros(last - first, int)
            for position, start, end in touched:
                if life.born < position <= life.freed and start < last and end > first:
                    times[max(start - first, 0) : end - first] += 1
            assert times.max() <= 1, (seed, life)
            n_touched += int(times.sum())
        reasons = ran.happened.log["changes"]["reason"]
        n_dropped += int((reasons == st.DROPPED).sum())
    assert n_touched > 1000
    assert n_dropped > 20


def test_new_segments_are_dead_until_a_tensor_comes():
    made = placed(
        t.TensorProgram("p", (t.Create(t.Tensor("w", 3 * MIB, "parameter")),)), "caching:drop", GPU
    )
    assert of(made, MarkDead) == [
        MarkDead("segment 0", 0, 20 * MIB),
        MarkDead("segment 0", 0, 3 * MIB, dead=False),
    ]


@settings(max_examples=2 * N_PROGRAMS)
@given(programs(marked=True))
def test_marks_and_discards_leave_the_engine_consistent_with_its_log(drawn):
    """Replayed page by page: nothing leaves from where it is not, and the end is the engine's."""
    ran = run_to_end(*drawn)
    holds = np.zeros((ran.settings.n_gpus + 1, len(ran.where)), bool)
    for row in residency_changes(ran):
        pages = slice(row["page"], row["page"] + row["n_pages"])
        assert (holds[row["place"], pages] != row["arrives"]).all(), row
        holds[row["place"], pages] = row["arrives"]
    for place, pages in enumerate(holds):
        assert set(np.flatnonzero(pages)) == ran.resident(place - 1)


# apart -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ALL if "apart" in name])
def test_apart_gives_each_va_block_to_one_tensor_at_a_time(name):
    shared = 0
    for seed in range(N_PROGRAMS):
        tensors = random_program(seed, n_operations=200)
        assert most_tensors_in_a_block(placed(tensors, name, GPU).history) == 1
        shared = max(shared, most_tensors_in_a_block(placed(tensors, "caching", GPU).history))
    assert shared > 3


def most_tensors_in_a_block(history):
    """Count the tensors that live in one 2 MiB block at the same time, at most."""
    lives, most = lifetimes(history), 0
    for sequence in range(len(history.entries) + 1):
        users = Counter()
        for life in lives:
            if life.born < sequence <= life.freed:
                blocks = range(life.first // VA_BLOCK_BYTES, -(-life.last // VA_BLOCK_BYTES))
                users.update(blocks)
        most = max([most, *users.values()])
    return most


def test_apart_asks_for_whole_va_blocks():
    made = placed(random_program(7), "caching:apart", GPU)
    asked = [entry for entry in made.history.entries if entry.action == "alloc"]
    assert asked
    assert all(entry.n_bytes % VA_BLOCK_BYTES == entry.va % VA_BLOCK_BYTES == 0 for entry in asked)
    assert made.history.block_bytes == [entry.n_bytes for entry in asked]
