"""The join of a trace with the allocator's history, against an oracle that never looks at a time."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import os
import random

import numpy as np
import polars as pl
import pytest

from nsan.analysis.driver.batches import batches
from nsan.analysis.pca.history import History
from nsan.analysis.pca.holders import holders
from nsan.analysis.pca.join import JoinInput, join
from nsan.analysis.pca.overlaps import side_by_side
from nsan.analysis.pca.stream_order import newest_open
from nsan.analysis.pca.tables import JOINED_TABLES
from nsan.errors import NotAlignedError
from nsan.model import program as words
from nsan.model.allocator_history import snapshot_frames
from nsan.model.hints import Hint
from nsan.model.machine import run
from nsan.model.making import oversubscribed
from nsan.model.placing import Entry, placed
from nsan.model.placing import History as ModelHistory
from nsan.model.profiles import gpu_profile
from nsan.model.recording import BASE_VA, Style, record
from nsan.model.settings import DEFAULT_SETTINGS
from nsan.model.workloads import network
from nsan.schema import TABLES
from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.plain import AddressSupply
from nsan.torch_alloc.tables import SNAPSHOT_TABLES
from nsan.units import KIB, MIB

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 10

# A run of the model, and what it was at each byte -------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A modelled run: what a trace and a snapshot say, and the program behind them."""

    made: object
    happened: object
    trace: dict
    snapshot: dict
    settings: object = None


def modelled(tensors, allocator, factor, hints=()):
    """Run a tensor program with memory for 1/factor of its tensors."""
    made = placed(tensors, allocator, gpu_profile(DEFAULT_SETTINGS.gpu), hints=hints)
    settings = oversubscribed(DEFAULT_SETTINGS, made.peak_tensor_bytes, factor)
    happened = run(made.program, settings)
    trace = {name: table.empty() for name, table in TABLES.items()}
    trace |= {name: frame.lazy() for name, frame in record(happened, settings, "test").items()}
    snapshot = {name: table.empty() for name, table in SNAPSHOT_TABLES.items()}
    frames = snapshot_frames(made.history, happened.operation_ns)
    snapshot |= {name: frame.lazy() for name, frame in frames.items()}
    named = {"name": "allocator", "value": "plain" if allocator == "raw" else "caching"}
    schema = SNAPSHOT_TABLES["allocator_settings"].schema
    snapshot["allocator_settings"] = pl.LazyFrame([{**named, "is_recorded": False}], schema=schema)
    return Run(made, happened, trace, snapshot, settings)


@functools.cache
def joined(it):
    return join(JoinInput(it.trace, it.snapshot, it.snapshot and 0))


class Oracle:
    """What every byte was, by operations of the program: no time of the host is looked at."""

    def __init__(self, it):
        self.entries = it.made.history.entries
        self.after = [entry.after for entry in self.entries]
        blocks = iter(it.made.history.block_bytes)
        # What an entry covers: the block of an allocation is larger than what was asked for.
        self.covers = [
            (e.va, e.va + (next(blocks) if e.action == "alloc" else e.n_bytes))
            for e in self.entries
        ]
        self.tensor_of, self.requested, self.completed, open_now = {}, {}, {}, {}
        for i, entry in enumerate(self.entries):
            if entry.action == "alloc":
                self.tensor_of[i] = len(self.tensor_of)
                open_now[entry.va] = i
            elif entry.action == "free_requested":
                self.requested[open_now[entry.va]] = i
            elif entry.action == "free_completed":
                self.completed[open_now[entry.va]] = i
        self.of_block = {}
        for i, (first, last) in enumerate(self.covers):
            if self.entries[i].action in ("alloc", "segment_alloc", "segment_free"):
                for block in range(first // (2 * MIB), -(-last // (2 * MIB))):
                    self.of_block.setdefault(block, []).append(i)
        kinds = (words.Launch, words.Copy, words.Fill)
        operations = list(enumerate(it.made.program.operations))
        self.of_work = [i for i, each in operations if isinstance(each, kinds)]
        self.of_prefetch = [i for i, each in operations if isinstance(each, words.Prefetch)]
        self.kernel_of = dict(it.happened.log["batches"].select("batch", "kernel").iter_rows())
        self.begins = [work.start_ns for _, work in it.happened.work]

    def position(self, operation):
        return bisect.bisect_right(self.after, operation)

    def operation_of(self, batch, start_ns):
        """Say which operation of the program asked for a copy."""
        if batch in self.kernel_of:
            return self.of_work[self.kernel_of[batch]]
        # A prefetch: its copies come after those of the work before it.
        before = bisect.bisect_right(self.begins, start_ns)
        last = self.of_work[before - 1] if before else -1
        return next(i for i in self.of_prefetch if i > last)

    def held(self, first, last, operation):
        """List what held each part of a range: [(bytes, state, tensor)]."""
        position = self.position(operation)
        block = self.of_block.get(first // (2 * MIB), [])  # no copy lies in two of them
        done = [
            i
            for i in block[: bisect.bisect_left(block, position)]
            if self.covers[i][0] < last and self.covers[i][1] > first
        ]
        edges = sorted(
            {first, last, *(x for i in done for x in self.covers[i] if first < x < last)}
        )
        parts = []
        for low, high in itertools.pairwise(edges):
            newest = [i for i in done if self.covers[i][0] <= low < self.covers[i][1]]
            what = self.state(newest[-1], position) if newest else ("outside", None)
            if parts and parts[-1][1:] == what:
                parts[-1] = (parts[-1][0] + high - low, *what)
            else:
                parts.append((high - low, *what))
        return parts

    def state(self, entry, position):
        if self.entries[entry].action != "alloc":
            return ("unused" if self.entries[entry].action == "segment_alloc" else "outside", None)
        tensor = self.tensor_of[entry]
        if self.requested.get(entry, position) >= position:
            return ("live", tensor)
        return ("pending" if self.completed.get(entry, position) >= position else "cached", tensor)


def parts_of_moves(tables):
    """Give the parts of each migration in the order of addresses; parts that differ in staleness only are one."""
    found = {}
    for number, n_bytes, state, tensor in (
        tables["tensor_moves"]
        .sort("migration", "va")
        .select("migration", "bytes", "state", "tensor_id")
        .iter_rows()
    ):
        parts = found.setdefault(number, [])
        if parts and parts[-1][1:] == (state, tensor):
            parts[-1] = (parts[-1][0] + n_bytes, state, tensor)
        else:
            parts.append((n_bytes, state, tensor))
    return found


def true_parts(it, oracle):
    """Ask the oracle for the parts of each migration, in the order of the trace."""
    page_bytes = DEFAULT_SETTINGS.host_profile.page_bytes
    copies = it.happened.log["copies"].sort("start_ns", "page", maintain_order=True)
    return {
        number: oracle.held(
            BASE_VA + page * page_bytes,
            BASE_VA + (page + n_pages) * page_bytes,
            oracle.operation_of(batch, start_ns),
        )
        for number, (start_ns, page, n_pages, batch) in enumerate(
            copies.select("start_ns", "page", "n_pages", "batch").iter_rows()
        )
    }


def true_faults(it, oracle):
    """Ask the oracle what each fault row was raised in."""
    page_bytes = DEFAULT_SETTINGS.host_profile.page_bytes
    return {
        (end_ns, BASE_VA + page * page_bytes): oracle.held(
            BASE_VA + page * page_bytes,
            BASE_VA + page * page_bytes + 1,
            oracle.of_work[kernel],
        )[0][1:]
        for end_ns, page, kernel in it.happened.log["batches"]
        .select("end_ns", "page", "kernel")
        .iter_rows()
    }


def assert_true(it):
    tables, oracle = joined(it), Oracle(it)
    assert parts_of_moves(tables) == true_parts(it, oracle)
    faults = tables["tensor_faults"].select("end_ns", "va", "state", "tensor_id").iter_rows()
    assert {(end, va): (state, tensor) for end, va, state, tensor in faults} == true_faults(
        it, oracle
    )
    return tables


@functools.cache
def training(allocator, factor, hint, steps=2):
    """Train AlexNet on two tiny images, twice or as often as is said."""
    tensors = network("alexnet").build(
        steps=steps, batch=2, sequence=None, image=64, varying=False, seed=1
    )
    return modelled(tensors, allocator, factor, () if hint == "none" else (Hint(hint),))


TRAININGS = [
    (allocator, factor, hint)
    for allocator in ("raw", "caching")
    for factor in (0.8, 1.25, 2.0)
    for hint in ("none", "prefetch")
    # Both hints at each factor and with each allocator; a soak takes all.
    if N > 10 or ((factor == 1.25) ^ (allocator == "raw")) == (hint == "none")
]


@pytest.mark.parametrize(("allocator", "factor", "hint"), TRAININGS)
def test_every_byte_and_fault_of_a_training_run_lands_on_its_tensor(allocator, factor, hint):
    tables = assert_true(training(allocator, factor, hint))
    assert (tables["tensor_moves"].height > 0) == (factor > 1)


def test_without_a_snapshot_the_managed_allocations_are_the_tensors():
    it = training("raw", 1.25, "none")
    plain = Run(it.made, it.happened, it.trace, None)
    tables = assert_true(plain)
    assert tables["clock_fits"].height == 0
    requested = [e.n_bytes for e in it.made.history.entries if e.action == "alloc"]
    lives = tables["tensor_lives"]
    assert lives["block_bytes"].to_list() == requested
    assert lives["reused_bytes"].sum() == 0
    assert lives["free_requested_sequence"].equals(lives["free_sequence"])
    assert lives["part"].unique().to_list() == ["unattributed"]


def test_a_clock_that_is_off_and_drifts_changes_nothing():
    it = training("caching", 2.0, "none")
    # Wall time of the session start, and a wall clock that is 20 ppm fast.
    off = (1_700_000_000_000_000 + pl.col("time_us") * (1 + 20e-6)).round().cast(pl.Int64)
    events = it.snapshot["allocator_events"].with_columns(time_us=off)
    moved = Run(it.made, it.happened, it.trace, {**it.snapshot, "allocator_events": events})
    tables = join(JoinInput(moved.trace, moved.snapshot, 1_700_000_000_000_000_000))
    same = joined(it)
    assert tables["tensor_moves"].equals(same["tensor_moves"])
    assert tables["tensor_faults"].equals(same["tensor_faults"])
    assert tables["clock_fits"].filter("is_used")["residual_max_ns"].item() < 1000


def test_kernels_that_are_stamped_late_change_nothing():
    it = training("caching", 2.0, "prefetch")
    late = record(it.happened, it.settings, "test", Style(skew_ns=65_000))
    trace = it.trace | {name: frame.lazy() for name, frame in late.items()}
    moves = join(JoinInput(trace, it.snapshot, 0))["tensor_moves"]
    assert (late["kernels"]["start_ns"] - it.trace["kernels"].collect()["start_ns"] == 65_000).all()
    assert moves.equals(joined(it)["tensor_moves"])


def test_the_parts_add_up_to_the_migrations_whatever_the_order_of_the_rows():
    it = training("caching", 2.0, "none")
    plain = joined(it)
    moves = plain["tensor_moves"]
    sums = moves.group_by("migration", maintain_order=True).agg(
        pl.col("va").first(), pl.col("bytes").sum()
    )
    rows = it.trace["migrations"].collect()
    assert sums["bytes"].to_list() == rows["bytes"].to_list()
    assert sums["va"].to_list() == rows["va"].to_list()
    shuffled = {
        name: frame.collect().sample(fraction=1, shuffle=True, seed=3).lazy()
        for name, frame in it.trace.items()
    }
    again = join(JoinInput(shuffled, it.snapshot, 0))["tensor_moves"].drop("migration")
    order = ["start_ns", "va", "direction"]
    assert again.sort(order).equals(moves.drop("migration").sort(order))


def test_a_fault_row_has_the_batch_that_the_table_of_batches_gives_it():
    it = training("caching", 2.0, "none")
    tables = joined(it)
    known = batches(it.trace["gpu_faults"], it.trace["migrations"]).collect()
    ids = dict(known.select("end_ns", "batch_id").iter_rows())
    faults = tables["tensor_faults"]
    assert faults["batch_id"].to_list() == [ids[end] for end in faults["end_ns"]]
    copied = (
        tables["tensor_moves"].filter(direction="htod").group_by("batch_id").agg(pl.sum("bytes"))
    )
    sums = dict(known.select("batch_id", "bytes").filter(pl.col("bytes") > 0).iter_rows())
    assert dict(copied.iter_rows()) == sums


def test_bytes_that_left_before_their_tensor_was_allocated_come_back_stale():
    """An oracle by pages of 512 byte: what position the last copy out of each had."""
    it = training("caching", 1.25, "none")
    oracle, tables = Oracle(it), joined(it)
    assert all(entry.action != "segment_free" for entry in oracle.entries)
    born = {tensor: entry for entry, tensor in oracle.tensor_of.items()}
    left = np.full(1 << 20, -1)
    stale = {}
    copies = it.happened.log["copies"].sort("start_ns", "page", maintain_order=True)
    columns = copies.select("start_ns", "page", "n_pages", "batch", "dst").iter_rows()
    for number, (start_ns, page, n_pages, batch, dst) in enumerate(columns):
        operation, at = oracle.operation_of(batch, start_ns), page * 8
        if dst == 0:
            left[at : at + n_pages * 8] = oracle.position(operation)
            continue
        first = BASE_VA + page * 4096
        for size, state, tensor in oracle.held(first, first + n_pages * 4096, operation):
            if state == "live":
                before = left[at : at + size // 512]
                late = (before >= 0) & (born[tensor] >= before)
                stale[number] = stale.get(number, 0) + int(late.sum()) * 512
            at += size // 512
    found = (
        tables["tensor_moves"].group_by("migration").agg(pl.col("bytes").filter("is_stale").sum())
    )
    assert sum(stale.values()) > 10 * MIB
    assert {k: v for k, v in found.iter_rows() if v} == {k: v for k, v in stale.items() if v}


def test_reused_bytes_are_those_that_a_tensor_held_before():
    it = training("caching", 1.25, "none")
    oracle = Oracle(it)
    seen, expected = set(), []
    for entry, (first, last) in zip(oracle.entries, oracle.covers, strict=True):
        if entry.action == "alloc":
            units = set(range(first // 512, last // 512))
            expected.append(len(units & seen) * 512)
            seen |= units
    assert joined(it)["tensor_lives"]["reused_bytes"].to_list() == expected
    assert sum(expected) > 0


def test_a_tensor_has_the_line_and_the_range_that_it_was_allocated_in():
    it = training("caching", 0.8, "none")
    lives = joined(it)["tensor_lives"]
    names = [e.stack for e in it.made.history.entries if e.action == "alloc"]
    assert lives["function"].to_list() == [name.partition("#")[0] for name in names]
    # The ranges of the program that are open at each allocation, by operations.
    opened, at, expected = [], 0, []
    operations = it.made.program.operations
    for entry in it.made.history.entries:
        for each in operations[at : entry.after]:
            if isinstance(each, words.PushRange):
                opened.append(each.text)
            elif isinstance(each, words.PopRange):
                opened.pop()
        at = entry.after
        if entry.action == "alloc":
            expected.append(opened[-1] if opened else None)
    assert lives["annotation"].to_list() == expected
    assert {"forward", None} <= set(expected)


# Programs by hand --------------------------------------------------------------------------------

PID = 7
BASE = 0x7F00_0000_0000
US = 1000


def table(name, *rows):
    return pl.LazyFrame(list(rows), schema=TABLES[name].schema)


def trace_of(**rows):
    return {name: table(name, *rows.get(name, ())) for name in TABLES}


def launched(number, call_us, start_us, end_us, device=0, stream=7):
    """Give a kernel and its API call of 6 us."""
    pair = {"pid": PID, "correlation_id": number}
    call = {"start_ns": call_us * US, "end_ns": (call_us + 6) * US, "name": "cudaLaunchKernel"}
    kernel = {"start_ns": start_us * US, "end_ns": end_us * US, "device_id": device, "name": "k"}
    return {**kernel, **pair, "stream_id": stream}, {**call, **pair, "return_value": 0}


def works(*pairs):
    return {"kernels": [kernel for kernel, _ in pairs], "api_calls": [call for _, call in pairs]}


def fault(us, va=BASE, device=0):
    return {
        "start_ns": us * US,
        "end_ns": us * US + 5 * US,
        "pid": PID,
        "device_id": device,
        "va": va,
        "n_page_faults": 1,
        "access": "write",
        "access_id": 2,
    }


_CAUSES = {"user": 1, "coherence": 2, "prefetch": 3, "eviction": 4}


def copy(us, direction="htod", cause="coherence", va=BASE, n_bytes=4 * KIB, **other):
    return {
        "start_ns": us * US,
        "end_ns": us * US + 5 * US,
        "pid": PID,
        "device_id": 0,
        "va": va,
        "bytes": n_bytes,
        "direction": direction,
        "cause": cause,
        "cause_id": _CAUSES[cause],
        **other,
    }


def prefetch(us):
    call = {"start_ns": us * US, "end_ns": (us + 4) * US, "pid": PID, "return_value": 0}
    return {**call, "name": "cudaMemPrefetchAsync_v8000", "correlation_id": us}


class Host:
    """A host thread that allocates; every entry has the time that was set last."""

    def __init__(self):
        self.times, self.entries, self.sizes = [], [], []
        # As a driver does, give addresses out again.
        self.supply = AddressSupply(BASE)
        self.allocator = CachingAllocator(place=self.supply.take, listen=self._listen)
        self.blocks, self.name = {}, ""

    def _listen(self, action, va, n_bytes, stream, pool):
        self.entries.append(Entry(action, va, n_bytes, stream, pool, len(self.times), self.name))
        if action == "segment_free":
            self.supply.give_back(va, n_bytes)

    def allocate(self, us, name, n_bytes):
        self.times.append(us * US)
        self.name = name
        self.blocks[name] = self.allocator.allocate(n_bytes)
        self.sizes.append(self.blocks[name].n_bytes)
        return self

    def free(self, us, name, *, pending=False):
        self.times.append(us * US)
        self.allocator.free(self.blocks[name], pending=pending)
        return self

    def complete(self, us, name):
        self.times.append(us * US)
        self.allocator.complete(self.blocks[name])
        return self

    def empty_cache(self, us):
        self.times.append(us * US)
        self.allocator.empty_cache()
        return self

    def snapshot(self):
        kept = (self.allocator.segments(), self.allocator.blocks(), {})
        history = ModelHistory("hand", "caching", self.entries, self.sizes, *kept)
        frames = {name: each.empty() for name, each in SNAPSHOT_TABLES.items()}
        made = snapshot_frames(history, self.times)
        return frames | {name: frame.lazy() for name, frame in made.items()}


def join_by_hand(host, **rows):
    return join(JoinInput(trace_of(**rows), host and host.snapshot(), 0))


def held(tables, name="tensor_faults"):
    return tables[name].select("state", "tensor_id", "order").rows()


# One tensor after the other at the same address; 0 is freed and 1 allocated before the GPU begins.
ONE_AFTER_THE_OTHER = works(launched(1, 20, 100, 200), launched(2, 40, 210, 300))


def one_after_the_other():
    return Host().allocate(10, "a", MIB).free(30, "a").allocate(31, "b", MIB)


def test_a_fault_is_of_the_tensor_that_its_kernel_was_launched_for():
    tables = join_by_hand(
        one_after_the_other(), **ONE_AFTER_THE_OTHER, gpu_faults=[fault(120), fault(220)]
    )
    assert held(tables) == [("live", 0, "stream"), ("live", 1, "stream")]
    # The entries: segment, a, its free asked for and done, b.
    assert tables["tensor_faults"]["position"].to_list() == [2, 5]


@pytest.mark.parametrize("missing", ["api_calls", "kernels"])
def test_without_kernels_or_their_calls_the_order_of_the_host_counts(missing):
    rows = {**ONE_AFTER_THE_OTHER, missing: []}
    tables = join_by_hand(one_after_the_other(), **rows, gpu_faults=[fault(15), fault(120)])
    assert held(tables) == [("live", 0, "host"), ("live", 1, "host")]


def test_of_several_kernels_that_run_the_one_that_began_last_counts():
    host = Host().allocate(10, "a", MIB).free(30, "a").allocate(31, "b", MIB)
    pairs = works(launched(1, 20, 100, 400), launched(2, 40, 200, 300, stream=8))
    tables = join_by_hand(host, **pairs, gpu_faults=[fault(150), fault(250), fault(350)])
    assert [tensor for _, tensor, _ in held(tables)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("us", "expected"),
    [(420, ("live", 1, "stream")), (350, ("cached", 0, "host"))],
    ids=["80 us before", "150 us before"],
)
def test_a_fault_in_a_gap_is_of_the_next_work_if_that_begins_soon(us, expected):
    host = Host().allocate(10, "a", MIB).free(30, "a").allocate(460, "b", MIB)
    pairs = works(launched(1, 20, 100, 200), launched(2, 470, 500, 600))
    # A fault within a kernel says that the clocks agree.
    tables = join_by_hand(host, **pairs, gpu_faults=[fault(150)], migrations=[copy(us)])
    assert held(tables, "tensor_moves") == [expected]


def test_copies_of_a_prefetch_call_are_in_its_place_in_the_stream():
    # The host: a, K1, a freed, b, prefetch, b freed, c, K2; the GPU gets to the prefetch after that.
    host = Host().allocate(10, "a", MIB).free(30, "a").allocate(31, "b", MIB)
    host.free(50, "b").allocate(51, "c", MIB)
    rows = works(launched(1, 20, 100, 200), launched(2, 60, 900, 950))
    # The later call is behind K2 in the stream.
    rows["api_calls"] += [prefetch(40), prefetch(80)]
    moves = [copy(300, cause="user"), copy(320, "dtoh", "eviction"), copy(920)]
    moves.insert(2, copy(897, cause="user"))  # K2 is stamped before it has ended
    tables = join_by_hand(host, **rows, migrations=moves)
    assert held(tables, "tensor_moves") == [
        ("live", 1, "stream"),
        ("live", 1, "stream"),
        ("live", 1, "stream"),
        ("live", 2, "stream"),
    ]


def test_without_a_prefetch_call_an_eviction_in_a_gap_is_of_the_next_work_if_soon():
    host = Host().allocate(10, "a", MIB).free(30, "a").allocate(31, "b", MIB)
    rows = works(launched(1, 20, 100, 200), launched(2, 40, 900, 950))
    moves = [
        copy(300, "dtoh", "eviction"),
        copy(301, cause="user"),
        copy(850, "dtoh", "eviction"),
        copy(851, cause="user"),
    ]
    tables = join_by_hand(host, **rows, migrations=moves)
    assert [order for *_, order in held(tables, "tensor_moves")] == [
        "host",
        "host",
        "stream",
        "host",
    ]


def test_a_failed_prefetch_call_moves_nothing():
    host = Host().allocate(10, "a", MIB).free(30, "a").allocate(31, "b", MIB)
    rows = works(launched(1, 20, 100, 200), launched(2, 60, 900, 950))
    rows["api_calls"].append({**prefetch(40), "return_value": 1})
    tables = join_by_hand(host, **rows, migrations=[copy(300, cause="user")])
    assert held(tables, "tensor_moves") == [("live", 1, "host")]


def test_prefetch_calls_before_the_first_and_after_the_last_work_count_too():
    host = Host().allocate(10, "a", MIB).free(60, "a").allocate(400, "b", MIB).free(450, "b")
    rows = works(launched(1, 50, 200, 300))
    rows["api_calls"] += [prefetch(20), prefetch(420)]
    moves = [copy(100, cause="user"), copy(500, cause="user")]
    tables = join_by_hand(host, **rows, migrations=moves)
    assert held(tables, "tensor_moves") == [("live", 0, "stream"), ("live", 1, "stream")]


def test_faults_of_the_cpu_and_their_copies_are_in_the_order_of_the_host():
    rows = {
        "cpu_faults": [{"start_ns": us * US, "pid": PID, "va": BASE} for us in (25, 120)],
        "migrations": [
            copy(26, "dtoh"),
            copy(121, "dtoh", "prefetch"),
            copy(150, "dtoh", "eviction"),
        ],
    }
    tables = join_by_hand(one_after_the_other(), **ONE_AFTER_THE_OTHER, **rows)
    assert held(tables) == [("live", 0, "host"), ("live", 1, "host")]
    assert held(tables, "tensor_moves") == [
        ("live", 0, "host"),
        ("live", 1, "host"),
        ("live", 0, "stream"),
    ]


def test_the_states_of_a_block_from_never_used_to_released():
    host = Host().allocate(10, "a", MIB).free(30, "a", pending=True).complete(50, "a")
    host.empty_cache(70).allocate(90, "b", 512 * KIB)
    rows = works(
        *(launched(i, us, us + 10, us + 18) for i, us in enumerate((0, 20, 40, 60, 80, 100), 1))
    )
    moves = [copy(us + 12, va=va) for us in (0, 20, 40, 60, 80, 100) for va in (BASE, BASE + MIB)]
    tables = join_by_hand(host, **rows, migrations=moves)
    assert [row[:2] for row in held(tables, "tensor_moves")] == [
        *[("outside", None)] * 2,
        *[("live", 0), ("unused", None)],
        *[("pending", 0), ("unused", None)],
        *[("cached", 0), ("unused", None)],
        *[("outside", None)] * 2,
        # The driver gave the address out again: what a held is forgotten.
        *[("live", 1), ("unused", None)],
    ]
    dead = tables["tensor_moves"]["is_dead"].to_list()
    assert dead == [False, False, None, True, False, True, True, True, False, False, None, True]
    lives = tables["tensor_lives"]
    assert lives["reused_bytes"].to_list() == [0, 0]
    assert lives["free_requested_sequence"].to_list() == [2, None]
    assert lives["free_sequence"].to_list() == [3, None]
    assert lives["segment_va"].to_list() == [BASE, BASE]


def test_a_migration_over_several_blocks_is_cut_and_the_rest_is_nobodys():
    host = Host().allocate(10, "a", 512 * KIB).allocate(11, "b", 256 * KIB)
    rows = works(launched(1, 20, 100, 200))
    tables = join_by_hand(host, **rows, migrations=[copy(120, va=BASE, n_bytes=4 * MIB)])
    moves = tables["tensor_moves"]
    assert moves.select("migration", "va", "bytes", "state", "tensor_id").rows() == [
        (0, BASE, 512 * KIB, "live", 0),
        (0, BASE + 512 * KIB, 256 * KIB, "live", 1),
        (0, BASE + 768 * KIB, 1280 * KIB, "unused", None),
        (0, BASE + 2 * MIB, 2 * MIB, "outside", None),
    ]
    assert moves["segment_va"].to_list() == [BASE, BASE, BASE, None]


def test_stale_bytes_are_told_from_fresh_ones_within_one_part():
    host = Host().allocate(10, "a", MIB).free(30, "a").allocate(31, "b", MIB)
    rows = works(launched(1, 20, 100, 200), launched(2, 40, 210, 300), launched(3, 50, 310, 400))
    half = 512 * KIB
    moves = [
        copy(120, "dtoh", "eviction", n_bytes=half),  # a is evicted, its first half
        copy(220, n_bytes=MIB),  # for b: half of it is older than b, the rest never left
        copy(250, "dtoh", "eviction", n_bytes=MIB),
        copy(320, n_bytes=MIB),  # b's own bytes
    ]
    found = join_by_hand(host, **rows, migrations=moves)["tensor_moves"]
    assert found.select("migration", "va", "bytes", "is_stale", "is_dead").rows() == [
        (0, BASE, half, False, False),
        (1, BASE, half, True, True),
        (1, BASE + half, half, None, None),
        (2, BASE, MIB, False, False),
        (3, BASE, MIB, False, False),
    ]


def test_bytes_that_left_in_two_copies_come_back_as_one_part():
    half = 512 * KIB
    moves = [
        copy(110, "dtoh", "eviction", n_bytes=half),
        copy(120, "dtoh", "eviction", va=BASE + half, n_bytes=half),
        copy(220, n_bytes=MIB),
    ]
    tables = join_by_hand(one_after_the_other(), **ONE_AFTER_THE_OTHER, migrations=moves)
    back = tables["tensor_moves"].filter(direction="htod")
    assert back.select("va", "bytes", "is_stale").rows() == [(BASE, MIB, True)]


def test_what_left_an_earlier_segment_at_the_address_says_nothing_of_a_new_one():
    host = Host().allocate(10, "a", MIB).free(30, "a").empty_cache(35).allocate(37, "b", MIB)
    moves = [copy(120, "dtoh", "eviction"), copy(220)]
    found = join_by_hand(host, **ONE_AFTER_THE_OTHER, migrations=moves)["tensor_moves"]
    assert found.select("tensor_id", "is_stale").rows() == [(0, False), (1, None)]


def test_how_old_bytes_from_another_gpu_are_is_not_known():
    moves = [copy(120, "dtoh", "eviction"), copy(220, "dtod", src_device_id=1, dst_device_id=0)]
    tables = join_by_hand(one_after_the_other(), **ONE_AFTER_THE_OTHER, migrations=moves)
    assert tables["tensor_moves"].select("tensor_id", "is_stale").rows() == [(0, False), (1, None)]


def managed(device, va, alloc_us, free_us=None, n_bytes=2 * MIB, pid=PID):
    return {
        "alloc_ns": alloc_us * US,
        "free_ns": free_us and free_us * US,
        "pid": pid,
        "device_id": device,
        "va": va,
        "bytes": n_bytes,
        "kind": "managed",
    }


def test_an_entry_at_the_moment_of_a_launch_is_done():
    rows = works(launched(1, 20, 100, 200))  # the middle of its call is at 23 us
    allocations = [managed(0, BASE, 23), managed(0, BASE + 2 * MIB, 24)]
    moves = [copy(120), copy(130, va=BASE + 2 * MIB)]
    tables = join_by_hand(None, **rows, allocations=allocations, migrations=moves)
    assert held(tables, "tensor_moves") == [("live", 0, "stream"), ("outside", None, "stream")]


def test_a_gpu_that_touches_memory_of_another_one_finds_its_tensor():
    other = BASE + 64 * MIB
    rows = works(launched(1, 20, 100, 200), launched(2, 20, 100, 200, device=1))
    allocations = [managed(0, BASE, 5), managed(1, other, 6), managed(1, other + 4 * MIB, 7)]
    moves = [
        copy(120, va=BASE, device_id=1),
        copy(130, va=other + 4 * MIB, device_id=0),
        copy(140, va=other + 2 * MIB, device_id=0),
        copy(150, va=other, device_id=1),
        copy(155, va=other + 2 * MIB, device_id=1),
    ]
    rows["gpu_faults"] = [fault(160, va=other)]
    tables = join_by_hand(None, **rows, allocations=allocations, migrations=moves)
    found = tables["tensor_moves"].select("device_id", "state", "tensor_id", "position").rows()
    # The history of GPU 0 has one entry, that of GPU 1 two.
    assert found == [
        (1, "live", 0, 1),
        (0, "live", 2, 2),
        (0, "outside", None, 1),
        (1, "live", 1, 2),
        (1, "outside", None, 2),
    ]
    assert held(tables) == [("live", 1, "stream")]


def test_a_copy_that_passes_through_the_cpu_to_another_gpu_is_of_the_work_there():
    rows = works(launched(1, 20, 100, 200, device=1))
    rows["gpu_faults"] = [{**fault(110, device=1), "end_ns": 140 * US}]
    allocations = [managed(0, BASE, 5, 90), managed(0, BASE, 95)]
    moves = [copy(120, "dtoh"), copy(126, device_id=1), copy(150, "dtoh")]
    tables = join_by_hand(None, **rows, allocations=allocations, migrations=moves)
    # The last one is for a CPU fault: the host has freed tensor 0 long since.
    assert held(tables, "tensor_moves") == [
        ("live", 0, "stream"),
        ("live", 0, "stream"),
        ("live", 1, "host"),
    ]


def test_other_processes_and_rows_without_an_address_stay():
    moves = [
        copy(120, n_bytes=8 * KIB, pid=8),
        copy(121, va=None),
        copy(122, start_ns=None),
        copy(123),
        copy(124, n_bytes=0),
        copy(125, n_bytes=1 << 62),
        copy(126, va=(1 << 64) - 4096),
        copy(127, pid=None),
    ]
    tables = join_by_hand(
        one_after_the_other(),
        **ONE_AFTER_THE_OTHER,
        migrations=moves,
        allocations=[managed(0, BASE, 10)],
    )
    found = tables["tensor_moves"].select("migration", "bytes", "state", "tensor_id", "is_dead")
    assert found.rows() == [
        (0, 8 * KIB, "outside", None, False),
        (1, 4 * KIB, "unknown", None, None),
        (2, 4 * KIB, "unknown", None, None),
        (3, 4 * KIB, "live", 0, None),
        (4, 0, "unknown", None, None),
        (5, 1 << 62, "unknown", None, None),
        (6, 4 * KIB, "unknown", None, None),
        (7, 4 * KIB, "unknown", None, None),
    ]
    assert tables["tensor_moves"]["position"].to_list() == [None, None, None, 2, *[None] * 4]


def test_with_two_processes_nothing_says_which_one_wrote_the_snapshot():
    moves = [copy(120), copy(130, pid=8)]
    with pytest.raises(NotAlignedError, match="2 processes"):
        join_by_hand(one_after_the_other(), migrations=moves)


def test_without_any_row_there_are_four_empty_tables():
    tables = join_by_hand(None)
    assert {name: frame.schema for name, frame in tables.items()} == {
        name: each.schema for name, each in JOINED_TABLES.items()
    }
    assert all(frame.is_empty() for frame in tables.values())


def test_ranges_of_the_snapshot_count_before_those_of_the_trace():
    host = Host().allocate(10, "a", MIB).allocate(20, "b", 2 * MIB).allocate(40, "c", 2 * MIB)
    marks = [
        ("step", "START", 5),
        ("inner", "START", 15),
        ("inner", "END", 30),
        ("step", "END", 60),
    ]
    schema = SNAPSHOT_TABLES["annotations"].schema
    rows = [(0, us, name, stage) for name, stage, us in marks]
    snapshot = host.snapshot()
    ranges = {"nvtx_ranges": [{"start_ns": 0, "end_ns": 90 * US, "pid": PID, "name": "outer"}]}
    trace = trace_of(**ranges, migrations=[copy(50)])
    names = []
    for own in (pl.LazyFrame(rows, schema=schema, orient="row"), schema.to_frame().lazy()):
        found = join(JoinInput(trace, snapshot | {"annotations": own}, 0))
        names.append(found["tensor_lives"]["annotation"].to_list())
    assert names == [["step", "inner", "step"], ["outer"] * 3]


# What a history covers --------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 4])
def test_nothing_of_a_whole_history_is_unknown(steps):
    tables = assert_true(training("caching", 1.5, "none", steps))
    for name in ("tensor_moves", "tensor_faults"):
        assert tables[name].height > 0
        assert "unknown" not in tables[name]["state"].cast(pl.String).to_list()
        assert set(tables[name]["order"].cast(pl.String)) == {"stream"}


def test_a_snapshot_taken_before_the_program_ended_says_nothing_of_what_came_after():
    whole, short = (training("caching", 1.5, "none", steps) for steps in (4, 2))
    n_entries = len(short.made.history.entries)
    tables = join(JoinInput(whole.trace, short.snapshot, 0))
    expected = joined(whole)
    for name, key in (
        ("tensor_moves", ["migration", "va"]),
        ("tensor_faults", ["end_ns", "va"]),
    ):
        known = expected[name].filter(pl.col("position") < n_entries)
        assert 0 < known.height < expected[name].height
        assert tables[name].filter(pl.col("state") != "unknown").sort(key).equals(known.sort(key))
        rest = tables[name].filter(state="unknown")
        empty = ["position", "tensor_id", "segment_va"]
        assert all(rest[column].null_count() == rest.height > 0 for column in empty)
        assert set(rest["order"].cast(pl.String)) == {"stream"}
    rest = tables["tensor_moves"].filter(state="unknown")
    assert rest["is_stale"].null_count() == rest["is_dead"].null_count() == rest.height
    assert tables["tensor_moves"]["bytes"].sum() == expected["tensor_moves"]["bytes"].sum()


def without_first(host, n):
    """Give a snapshot of a recording that began after some entries."""
    snapshot = host.snapshot()
    later = snapshot["allocator_events"].filter(pl.col("sequence") >= n)
    later = later.with_columns(sequence=pl.col("sequence") - n)
    return snapshot | {"allocator_events": later}


def test_before_a_recording_that_began_late_nothing_is_known():
    # The entries: segment, a, its free asked for and done, b, c.
    host = Host().allocate(10, "a", MIB).free(30, "a").allocate(31, "b", MIB)
    host.allocate(50, "c", 512 * KIB)
    rows = works(launched(1, 20, 100, 200), launched(2, 40, 210, 300), launched(3, 60, 310, 400))
    moves = [copy(120), copy(220), copy(320), copy(330, va=BASE + MIB)]
    trace = trace_of(**rows, migrations=moves)
    found = join(JoinInput(trace, without_first(host, 4), 0))
    assert held(found, "tensor_moves") == [
        ("unknown", None, "stream"),
        ("live", 0, "stream"),
        ("live", 0, "stream"),
        ("live", 1, "stream"),
    ]
    assert found["tensor_moves"]["position"].to_list() == [None, 1, 2, 2]


def test_bytes_that_left_when_nothing_is_known_have_no_age():
    host = Host().allocate(10, "a", MIB).allocate(31, "b", MIB).free(32, "b")
    host.allocate(50, "c", MIB)
    rows = works(launched(1, 20, 100, 200), launched(2, 40, 210, 300), launched(3, 60, 310, 400))
    moves = [
        copy(120, "dtoh", "eviction", va=BASE + MIB, n_bytes=MIB),
        copy(320, va=BASE + MIB, n_bytes=MIB),
    ]
    trace = trace_of(**rows, migrations=moves)
    ages = []
    for snapshot in (host.snapshot(), without_first(host, 3)):
        found = join(JoinInput(trace, snapshot, 0))["tensor_moves"]
        ages.append(found["is_stale"].to_list())
    assert ages == [[False, True], [None, None]]


def test_what_left_after_the_history_hides_what_left_before():
    host = Host().allocate(10, "a", MIB)
    moves = [
        copy(120, "dtoh", "eviction"),
        copy(150, "dtoh"),  # the CPU took the bytes when the history was over
        copy(160, "dtoh", n_bytes=1 << 46, va=BASE + 64 * MIB),
        copy(220),
        copy(230, "dtoh", "eviction"),
        copy(240, "dtoh", n_bytes=1 << 46, va=BASE - (1 << 45)),
        copy(260),
    ]
    tables = join_by_hand(
        host,
        **works(launched(1, 20, 100, 140), launched(2, 30, 210, 300)),
        allocations=[managed(0, BASE, 10), managed(0, BASE + 64 * MIB, 45)],
        migrations=moves,
    )
    found = tables["tensor_moves"].select("state", "is_stale").rows()
    hidden, left, gone = ("live", None), ("live", False), ("unknown", None)
    assert found == [left, gone, gone, hidden, left, gone, hidden]


def many(n):
    """Launch kernels one after the other; ids from 100 on."""
    return [launched(100 + i, 50 + 8 * i, 1000 + 10 * i, 1009 + 10 * i) for i in range(n)]


@pytest.mark.parametrize(("n", "n_known"), [(16, 16), (17, 0)])
def test_much_work_after_the_last_entry_shows_that_entries_are_missing(n, n_known):
    host = Host().allocate(10, "a", MIB)
    moves = [copy(1002 + 10 * i, end_ns=(1004 + 10 * i) * US) for i in range(n)]
    tables = join_by_hand(host, **works(*many(n)), migrations=moves)
    states = [state for state, *_ in held(tables, "tensor_moves")]
    assert states == ["live"] * n_known + ["unknown"] * (n - n_known)


def test_as_much_work_as_between_two_entries_shows_nothing():
    host = Host().allocate(10, "a", MIB).allocate(400, "b", MIB)
    pairs = [*many(40), launched(1, 402, 2000, 2100)]
    more = [launched(200 + i, 450 + 8 * i, 2200 + 10 * i, 2209 + 10 * i) for i in range(40)]
    # 40 calls of 6 us in 8 us each: the last one is launched at 365 us.
    for n, state in ((39, "live"), (40, "unknown")):
        rows = works(*pairs, *more[:n])
        tables = join_by_hand(host, **rows, migrations=[copy(2202 + 10 * (n - 1))])
        assert held(tables, "tensor_moves") == [(state, 0 if n == 39 else None, "stream")]


@pytest.mark.parametrize(
    ("rows", "state"),
    [
        ([managed(0, BASE, 10)], "live"),
        ([managed(0, BASE, 10), managed(0, BASE + 64 * MIB, 45)], "unknown"),
        ([managed(0, BASE, 10), managed(0, BASE + 64 * MIB, 45, pid=8)], "live"),
        ([managed(0, BASE, 10), managed(0, BASE + 64 * MIB, 60)], "live"),
        ([managed(0, BASE, 10, 45)], "unknown"),
        # Memory that the allocator never had.
        ([managed(0, BASE, 10), managed(0, BASE + 64 * MIB, 11, 45)], "live"),
    ],
    ids=["whole", "allocation", "of another process", "later", "release", "foreign release"],
)
def test_an_allocation_of_the_trace_that_the_history_lacks_ends_it(rows, state):
    host = Host().allocate(10, "a", MIB)
    tables = join_by_hand(
        host,
        **works(launched(1, 48, 100, 200)),
        allocations=rows,
        migrations=[copy(120)],
    )
    assert held(tables, "tensor_moves")[0][0] == state


def test_a_gpu_without_a_history_is_not_covered_but_its_memory_may_be_of_another():
    host = Host().allocate(10, "a", MIB)
    snapshot = host.snapshot()
    other = snapshot["segments"].with_columns(
        device_id=pl.lit(1, pl.Int64), va=pl.col("va") + 64 * MIB
    )
    snapshot["segments"] = pl.concat([snapshot["segments"], other])
    rows = works(launched(1, 20, 100, 200), launched(2, 20, 100, 200, device=1))
    places = [(1, BASE), (1, BASE + 64 * MIB), (0, BASE), (0, BASE + 64 * MIB)]
    moves = [copy(120 + i, va=va, device_id=gpu) for i, (gpu, va) in enumerate(places)]
    found = join(JoinInput(trace_of(**rows, migrations=moves), snapshot, 0))
    states = [state for state, *_ in held(found, "tensor_moves")]
    assert states == ["live", "unknown", "live", "unknown"]


@pytest.mark.parametrize("n_kept", [0, 1])
def test_a_snapshot_of_the_state_alone_is_refused_with_the_way_to_record(n_kept):
    snapshot = Host().allocate(10, "a", MIB).snapshot()
    events = snapshot["allocator_events"].tail(n_kept)
    trace = trace_of(migrations=[copy(120)], allocations=[managed(0, BASE, 10)])
    with pytest.raises(NotAlignedError, match="_record_memory_history") as caught:
        join(JoinInput(trace, snapshot | {"allocator_events": events}, 0))
    assert "Not aligned: " in str(caught.value)
    assert "not of the run" not in str(caught.value)


# Work side by side ------------------------------------------------------------------------------


def test_of_kernels_side_by_side_that_were_launched_for_other_tensors_the_order_says_so():
    host = one_after_the_other().allocate(41, "c", 512 * KIB)
    pairs = works(launched(1, 20, 100, 400), launched(2, 50, 200, 300, stream=8))
    moves = [
        copy(150),
        copy(250),  # a when the first was launched, b at the second
        copy(255, va=BASE + 4 * MIB),  # in no segment either way
        copy(350),
        copy(250, cause="user"),
    ]
    tables = join_by_hand(host, **pairs, migrations=moves, gpu_faults=[fault(250)])
    assert sorted(held(tables, "tensor_moves")) == sorted(
        [
            ("live", 0, "stream"),
            ("live", 1, "overlap"),
            ("outside", None, "stream"),
            ("live", 0, "stream"),
            ("live", 1, "overlap"),
        ]
    )
    assert held(tables) == [("live", 1, "overlap")]


def test_side_by_side_counts_for_memory_of_another_gpu_too():
    pairs = works(
        launched(1, 20, 100, 400), launched(2, 60, 200, 300, stream=8), launched(3, 20, 50, 60, 1)
    )
    allocations = [managed(0, BASE + 64 * MIB, 5), managed(1, BASE, 6, 40), managed(1, BASE, 41)]
    moves = [copy(250), copy(260, va=BASE + 64 * MIB)]
    tables = join_by_hand(None, **pairs, allocations=allocations, migrations=moves)
    assert held(tables, "tensor_moves") == [("live", 2, "overlap"), ("live", 0, "stream")]


def test_kernels_side_by_side_that_were_launched_at_one_position_leave_no_doubt():
    host = Host().allocate(10, "a", MIB).free(60, "a").allocate(61, "b", MIB)
    pairs = works(launched(1, 20, 100, 400), launched(2, 40, 200, 300, stream=8))
    tables = join_by_hand(host, **pairs, gpu_faults=[fault(250)])
    assert held(tables) == [("live", 0, "stream")]


def test_a_tensor_that_both_of_two_kernels_could_use_leaves_no_doubt():
    host = Host().allocate(10, "a", MIB).allocate(31, "b", MIB)
    pairs = works(launched(1, 20, 100, 400), launched(2, 40, 200, 300, stream=8))
    faults = [fault(250), fault(260, va=BASE + MIB)]
    tables = join_by_hand(host, **pairs, gpu_faults=faults)
    assert held(tables) == [("live", 0, "stream"), ("live", 1, "overlap")]


def test_bytes_that_left_while_either_of_two_kernels_ran_may_be_older_than_the_tensor_or_not():
    # b is allocated between the two launches; then the bytes come back for it.
    host = one_after_the_other()
    pairs = works(
        launched(1, 20, 100, 400),
        launched(2, 40, 200, 300, stream=8),
        launched(3, 50, 500, 600),
    )
    moves = [copy(250, "dtoh", "eviction"), copy(520)]
    tables = join_by_hand(host, **pairs, migrations=moves)
    found = tables["tensor_moves"].select("tensor_id", "order", "is_stale", "is_dead")
    assert found.rows() == [(1, "overlap", False, False), (1, "stream", None, None)]


def test_bytes_that_the_cpu_took_while_two_kernels_ran_left_in_the_order_of_the_host():
    pairs = works(
        launched(1, 20, 100, 400),
        launched(2, 40, 200, 300, stream=8),
        launched(3, 50, 500, 600),
    )
    moves = [copy(250, "dtoh"), copy(520)]
    tables = join_by_hand(one_after_the_other(), **pairs, migrations=moves)
    found = tables["tensor_moves"].select("tensor_id", "order", "is_stale")
    assert found.rows() == [(1, "host", False), (1, "stream", False)]


def test_a_prefetch_call_leaves_no_doubt_whatever_runs_beside_it():
    pairs = works(launched(1, 20, 100, 400), launched(2, 40, 200, 300, stream=8))
    pairs["api_calls"].append(prefetch(60))
    moves = [copy(250, cause="user")]
    tables = join_by_hand(one_after_the_other(), **pairs, migrations=moves)
    assert held(tables, "tensor_moves") == [("live", 1, "stream")]


def test_a_fault_that_ends_as_the_next_kernel_begins_is_of_the_one_before():
    rows = works(launched(1, 20, 100, 200), launched(2, 40, 200, 300))
    # It is from 195 to 200 us.
    tables = join_by_hand(one_after_the_other(), **rows, gpu_faults=[fault(195)])
    assert held(tables) == [("live", 0, "stream")]


@pytest.mark.parametrize("seed", range(N))
def test_launches_of_work_side_by_side_are_the_first_and_last_of_what_runs(seed):
    rng = random.Random(seed)
    spans = []
    for group in range(2):
        for _ in range(rng.randrange(15)):
            start = rng.randrange(40)
            launch = rng.choice([None, rng.randrange(9), rng.randrange(9)])
            spans.append((group, start, start + rng.randrange(25), launch))
    schema = dict.fromkeys(["group", "start_ns", "end_ns", "launch_ns"], pl.Int64)
    steps = side_by_side(pl.DataFrame(spans, schema=schema, orient="row")).rows()
    for group, at in itertools.product(range(2), range(70)):
        running = [
            launch
            for g, start, end, launch in spans
            if g == group and start <= at < end and launch is not None
        ]
        expected = (min(running), max(running)) if len(running) > 1 else (None, None)
        known = [ends for g, start, *ends in steps if g == group and start <= at]
        assert (tuple(known[-1]) if known else (None, None)) == expected


# Random ------------------------------------------------------------------------------------------


def history_of(segments, tensors):
    entry = dict.fromkeys(["alloc_sequence", "free_requested_sequence", "free_sequence"], pl.Int64)
    of_tensors = {"va": pl.UInt64, "block_bytes": pl.Int64, "segment_va": pl.UInt64, **entry}
    of_segments = {"va": pl.UInt64, "bytes": pl.Int64, **entry}
    return History(
        PID,
        0,
        pl.DataFrame(tensors, schema=of_tensors).with_columns(
            tensor_id=pl.int_range(pl.len(), dtype=pl.Int64), is_pending=pl.lit(value=False)
        ),
        pl.DataFrame(segments, schema=of_segments).drop("free_requested_sequence"),
        pl.DataFrame(schema={"sequence": pl.Int64, "time_ns": pl.Int64}),
        0,
    )


def _random_history(rng):
    """Segments that come and go, and tensors in them, as rows of a history."""
    segments, tensors, live, sequence = [], [], [], 0
    for _ in range(rng.randrange(1, 60)):
        sequence += rng.randrange(1, 3)
        kind = rng.random()
        if kind < 0.3 or not live:
            va = rng.randrange(4) * 64
            if all(each["va"] != va for each, _ in live):
                segments.append({"va": va, "bytes": 48, "alloc_sequence": sequence})
                live.append((segments[-1], []))
        elif kind < 0.4:
            segment, held_now = live.pop(rng.randrange(len(live)))
            for each in held_now:
                each["free_requested_sequence"], each["free_sequence"] = sequence, sequence + 1
            sequence += 2
            segment["free_sequence"] = sequence
        elif kind < 0.75:
            segment, held_now = rng.choice(live)
            start = rng.randrange(48)
            size = rng.randrange(1, 49 - start)
            low, high = segment["va"] + start, segment["va"] + start + size
            if all(t["va"] >= high or t["va"] + t["block_bytes"] <= low for t in held_now):
                tensors.append({"va": low, "block_bytes": size, "alloc_sequence": sequence})
                tensors[-1]["segment_va"] = segment["va"]
                held_now.append(tensors[-1])
        else:
            held_now = rng.choice(live)[1]
            if held_now:
                gone = held_now.pop(rng.randrange(len(held_now)))
                gone["free_requested_sequence"] = sequence
                sequence += rng.randrange(1, 4)
                gone["free_sequence"] = sequence
    return segments, tensors, sequence


def _state_of(byte, position, segments, tensors):
    """Look at one byte, in plain words."""
    there = [
        s
        for s in segments
        if s["va"] <= byte < s["va"] + s["bytes"]
        and s["alloc_sequence"] < position <= s.get("free_sequence", position)
    ]
    if not there:
        return ("outside", None)
    segment = there[-1]
    mine = [
        (t["alloc_sequence"], i)
        for i, t in enumerate(tensors)
        if t["va"] <= byte < t["va"] + t["block_bytes"]
        and segment["alloc_sequence"] < t["alloc_sequence"] < position
    ]
    if not mine:
        return ("unused", None)
    number = max(mine)[1]
    tensor = tensors[number]
    if position <= tensor.get("free_requested_sequence", position):
        return ("live", number)
    return ("pending" if position <= tensor.get("free_sequence", position) else "cached", number)


@pytest.mark.parametrize("seed", range(N))
def test_holders_agree_with_a_look_at_every_byte(seed):
    rng = random.Random(seed)
    segments, tensors, last = _random_history(rng)
    history = history_of(segments, tensors)
    asked = [
        (row, rng.randrange(250), rng.randrange(1, 80), rng.randrange(last + 2))
        for row in range(40)
    ]
    schema = {"_row": pl.Int64, "va": pl.UInt64, "bytes": pl.Int64, "position": pl.Int64}
    found = holders(history, pl.DataFrame(asked, schema=schema, orient="row")).pieces
    by_byte = {
        (row, byte): (state, tensor)
        for row, va, n_bytes, state, tensor in found.select(
            "_row", "va", "bytes", "state", "tensor_id"
        ).iter_rows()
        for byte in range(va, va + n_bytes)
    }
    assert by_byte == {
        (row, byte): _state_of(byte, position, segments, tensors)
        for row, va, n_bytes, position in asked
        for byte in range(va, va + n_bytes)
    }
    assert found["bytes"].sum() == sum(n_bytes for _, _, n_bytes, _ in asked)


def test_what_a_repair_ends_makes_and_gives_at_one_entry_is_done_in_that_order():
    segments = [
        {"va": 0, "bytes": 8, "alloc_sequence": None, "free_sequence": 5},
        {"va": 0, "bytes": 8, "alloc_sequence": 5},
    ]
    tensors = [{"va": 0, "block_bytes": 4, "segment_va": 0, "alloc_sequence": 5}]
    schema = {"_row": pl.Int64, "va": pl.UInt64, "bytes": pl.Int64, "position": pl.Int64}
    asked = pl.DataFrame([(0, 0, 8, 5), (1, 0, 8, 6)], schema=schema, orient="row")
    found = holders(history_of(segments, tensors), asked).pieces
    assert found.select("_row", "bytes", "state", "life").rows() == [
        (0, 8, "unused", 0),
        (1, 4, "live", 1),
        (1, 4, "unused", 1),
    ]


def test_a_free_that_was_pending_before_the_history_is_pending_and_not_live():
    host = Host().allocate(10, "a", MIB).allocate(11, "b", 512 * KIB).free(20, "a", pending=True)
    rows = works(launched(1, 100, 110, 200))
    moves = [copy(120, n_bytes=2 * MIB)]
    # Recording began after the free was asked for.
    host.allocate(30, "c", 256 * KIB).free(40, "c")
    snapshot = host.snapshot()
    later = snapshot["allocator_events"].filter(pl.col("sequence") > 3)
    later = later.with_columns(sequence=pl.col("sequence") - 4)
    trace = trace_of(**rows, migrations=moves)
    found = join(JoinInput(trace, snapshot | {"allocator_events": later}, 0))["tensor_moves"]
    assert [state for state, *_ in held({"tensor_moves": found}, "tensor_moves")] == [
        "pending",
        "live",
        "cached",
        "unused",
    ]


@pytest.mark.parametrize("seed", range(N))
def test_the_newest_open_span_is_the_last_that_began_of_those_that_have_not_ended(seed):
    rng = random.Random(seed)
    spans = []
    for group in range(2):
        starts = sorted(rng.randrange(40) for _ in range(rng.randrange(15)))
        spans += [
            (group, start, start + rng.randrange(25), len(spans) + i)
            for i, start in enumerate(starts)
        ]
    schema = dict.fromkeys(["group", "start_ns", "end_ns", "id"], pl.Int64)
    steps = newest_open(pl.DataFrame(spans, schema=schema, orient="row")).rows()
    for group, at in itertools.product(range(2), range(70)):
        running = [number for g, start, end, number in spans if g == group and start <= at < end]
        known = [number for g, start, number in steps if g == group and start <= at]
        assert (known[-1] if known else None) == (max(running) if running else None)
