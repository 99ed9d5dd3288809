"""Whose bytes moved: the truth of tensor programs, against plain loops over bytes."""

from __future__ import annotations

import itertools
import json
import os

import polars as pl
import pytest
from programs import modelled
from tensor_programs import lifetimes, positions_of_batches, random_program, train

from nsan.model import machine
from nsan.model.access import Stream
from nsan.model.hints import Hint
from nsan.model.making import Recipe, is_whole, make
from nsan.model.networks import tensors as t
from nsan.model.placing import placed
from nsan.model.profiles import gpu_profile
from nsan.model.program import Allocate, HostTouch, Kernel, Launch, Program, Synchronize
from nsan.model.recording import BASE_VA, record
from nsan.model.settings import Settings
from nsan.model.tensor_truth import TENSOR_TABLES, _operations, dead_bytes, tensor_truth
from nsan.model.truth import TRUTH_TABLES, truth
from nsan.units import KIB, MIB

N_PROGRAMS = 40 if os.environ.get("NSAN_SOAK") == "1" else 2
GPU = gpu_profile("a100-sxm4-40gb")
UNIT = 512
FEW = (512, 3 * KIB, 10 * KIB, 100 * KIB, 700 * KIB, 1300 * KIB, 3 * MIB)
ALLOCATORS = ["raw", "caching", "caching:release", "caching:drop", "caching:apart"]


def truth_of(ran):
    return tensor_truth(ran.happened, ran.settings, ran.placed.history)


@pytest.fixture(scope="module")
def runs():
    return [
        train(random_program(seed, n_operations=70, sizes=FEW), name, capacity_bytes=4 * MIB)
        for seed in range(N_PROGRAMS)
        for name in ALLOCATORS
    ]


# An oracle: every 512 byte by itself, entry by entry --------------------------------------------


OUTSIDE = ("outside", None, -1)


class Bytes:
    """State, tensor and maker of each unit of 512 byte; every tensor of the tests is whole units."""

    def __init__(self, ran):
        self.history, self.lives = ran.placed.history, lifetimes(ran.placed.history)
        self.numbers = {life.born: number for number, life in enumerate(self.lives)}
        self.done, self.at = 0, {}
        self.now = [OUTSIDE] * (
            -(-max(life.start + life.n_bytes for life in ran.happened.lives) // UNIT)
            + 8 * MIB // UNIT
        )

    def until(self, position):
        while self.done < position:
            entry = self.history.entries[self.done]
            first = (entry.va - BASE_VA) // UNIT
            n = -(-entry.n_bytes // UNIT)
            if entry.action == "segment_alloc":
                self.now[first : first + n] = [("unused", None, self.done)] * n
            elif entry.action == "segment_free":
                self.now[first : first + n] = [OUTSIDE] * n
            elif entry.action in ("alloc", "free_completed"):
                if entry.action == "alloc":
                    self.at[entry.va] = self.numbers[self.done]
                number = self.at[entry.va]
                n = (self.lives[number].last - self.lives[number].first) // UNIT
                state = "live" if entry.action == "alloc" else "cached"
                self.now[first : first + n] = [(state, number, self.now[first][2])] * n
            self.done += 1


def expected_moves(ran):
    """State, tensor and staleness of each unit of each copy, in the order in which copies were made."""
    positions, size = positions_of_batches(ran), ran.page_bytes
    memory, found = Bytes(ran), {}
    left = [-1] * len(memory.now)
    for row in ran.happened.log["copies"].iter_rows(named=True):
        position = positions[row["batch"]]
        memory.until(position)
        first = row["page"] * size // UNIT
        last = first + row["n_pages"] * size // UNIT
        if row["dst"] == 0:
            left[first:last] = [position] * (last - first)
        told = []
        for (state, tensor, made), went in zip(
            memory.now[first:last], left[first:last], strict=True
        ):
            stale = False
            if row["dst"] and state == "live":
                stale = memory.lives[tensor].born >= went if went > made else None
            told.append((position, state, tensor, stale))
        found[row["start_ns"], row["page"]] = told
    return found


def told_moves(ran, moves):
    """The same of the truth: its parts, unit by unit."""
    found = {}
    migrations = record(ran.happened, ran.settings, "p")["migrations"]
    for row in moves.sort("migration", "va").iter_rows(named=True):
        assert row["bytes"] % UNIT == row["va"] % UNIT == 0
        whole = migrations.row(row["migration"], named=True)
        key = whole["start_ns"], (whole["va"] - BASE_VA) // ran.page_bytes
        assert row["start_ns"] == whole["start_ns"]
        assert (row["direction"], row["cause"]) == (whole["direction"], whole["cause"])
        part = (row["position"], row["state"], row["tensor_id"], row["is_stale"])
        found.setdefault(key, []).extend([part] * (row["bytes"] // UNIT))
    return found


def test_every_byte_that_moved_is_of_the_tensor_that_plain_loops_find(runs):
    n = 0
    for ran in runs:
        expected = expected_moves(ran)
        assert told_moves(ran, truth_of(ran)["tensor_moves"]) == expected
        n += len(expected)
    assert n > 1000


def test_every_batch_is_of_the_tensor_that_plain_loops_find(runs):
    for ran in runs:
        faults, positions = truth_of(ran)["tensor_faults"], positions_of_batches(ran)
        memory, expected = Bytes(ran), []
        for row in ran.happened.log["batches"].iter_rows(named=True):
            memory.until(positions[row["batch"]])
            state, tensor, _ = memory.now[row["page"] * ran.page_bytes // UNIT]
            expected.append((row["batch"], positions[row["batch"]], state, tensor))
        assert faults.select("batch", "position", "state", "tensor_id").rows() == expected


def test_the_parts_of_a_migration_are_all_of_it_and_no_two_neighbours_are_alike(runs):
    for ran in runs:
        moves = truth_of(ran)["tensor_moves"]
        migrations = record(ran.happened, ran.settings, "p")["migrations"]
        sums = moves.group_by("migration", maintain_order=True).agg(
            pl.col("va").first(), pl.col("bytes").sum()
        )
        assert sums["migration"].to_list() == list(range(migrations.height))
        assert sums["va"].equals(migrations["va"])
        assert sums["bytes"].equals(migrations["bytes"])
        for name in ("migration", "state", "tensor_id", "is_stale"):
            assert name in moves.columns
        kinds = moves.select("migration", "state", "tensor_id", "is_stale").rows()
        assert all(a != b for a, b in itertools.pairwise(kinds))


def test_dead_is_what_is_cached_unused_or_stale(runs):
    kinds = set()
    for ran in runs:
        for row in truth_of(ran)["tensor_moves"].iter_rows(named=True):
            dead = True if row["state"] in ("cached", "unused") else row["is_stale"]
            assert row["is_dead"] == dead
            assert (row["tensor_id"] is None) == (row["state"] in ("unused", "outside"))
            kinds.add((row["state"], row["direction"], row["is_dead"]))
    assert {("cached", "dtoh", True), ("live", "htod", True), ("live", "htod", False)} <= kinds


def test_without_a_cache_nothing_that_moves_is_dead(runs):
    raw = [ran for ran in runs if ran.placed.history.allocator == "raw"]
    for ran in raw:
        moves = truth_of(ran)["tensor_moves"]
        assert moves.height > 10
        assert dead_bytes(moves) == {"dead_in_bytes": 0, "dead_out_bytes": 0}


# Programs worked out by hand ---------------------------------------------------------------------


def tensors(*operations):
    return t.TensorProgram("p", operations)


def make_tensor(name, n_bytes):
    tensor = t.Tensor(name, n_bytes, "activation")
    return t.Create(tensor), t.Compute(f"make {name}", (), (name,), 0.0)


def test_a_fault_of_a_kernel_is_of_the_tensor_that_it_was_launched_for():
    """The host has freed a and given its place to b before the GPU comes to the kernel of a."""
    big = 11 * MIB
    program = tensors(
        *make_tensor("w#1", big), *make_tensor("a#1", big), t.Drop("a#1"), *make_tensor("b#1", big)
    )
    ran = train(program, "caching", capacity_bytes=64 * MIB, prefetch=False)
    launches = [work for _, work in ran.happened.work if work.name.startswith("make a")]
    given = [i for i, entry in enumerate(ran.entries) if entry.stack == "b#1"]
    assert ran.happened.operation_ns[ran.entries[given[0]].after - 1] < launches[0].start_ns
    faults = truth_of(ran)["tensor_faults"]
    seen = faults.group_by("tensor", maintain_order=True).agg(pl.len(), pl.col("va").min())
    # b lies where a lay, and finds its pages there: no fault is its own.
    assert seen["tensor"].to_list() == ["w#1", "a#1"]
    assert set(faults["state"]) == {"live"}


def test_bytes_that_left_before_their_tensor_was_allocated_come_back_stale():
    """Two chunks of memory: a goes out live, is freed, b takes its place and brings a's bytes back."""
    size = 2 * MIB
    program = tensors(
        *make_tensor("a", size),
        *make_tensor("c", size),
        *make_tensor("d", size),  # evicts a: live
        t.Drop("a"),
        *make_tensor("b", size),  # lies where a lay; evicts c: live
        t.Compute("read", ("c",), (), 0.0),  # brings c back, not stale; evicts d, live
    )
    ran = train(program, "caching", capacity_bytes=2 * size, prefetch=False)
    moves = truth_of(ran)["tensor_moves"]
    sums = {
        row[:4]: row[4]
        for row in moves.group_by("direction", "tensor", "state", "is_stale", maintain_order=True)
        .agg(pl.col("bytes").sum())
        .rows()
    }
    assert sums == {
        ("dtoh", "a", "live", False): size,
        ("htod", "b", "live", True): size,
        ("dtoh", "c", "live", False): size,
        ("htod", "c", "live", False): size,
        ("dtoh", "d", "live", False): size,
    }
    assert dead_bytes(moves) == {"dead_in_bytes": size, "dead_out_bytes": 0}


def test_a_freed_tensor_goes_out_cached_and_the_rest_of_its_segment_unused():
    """A segment of 20 MiB: a, which is free, then k, and behind it what the prefetcher brought with k."""
    program = tensors(
        *make_tensor("a", 4 * MIB),
        *make_tensor("k", 1536 * KIB),
        t.Drop("a"),
        *make_tensor("b", 16 * MIB),  # needs all of the memory, and a segment of its own
    )
    ran = train(program, "caching", capacity_bytes=16 * MIB)
    moves = truth_of(ran)["tensor_moves"]
    parts = moves.group_by("direction", "state", "tensor").agg(pl.col("bytes").sum())
    sums = {row[:3]: row[3] for row in parts.rows()}
    unused = sums.pop(("dtoh", "unused", None))
    assert 0 < unused <= 512 * KIB
    assert sums == {("dtoh", "cached", "a"): 4 * MIB, ("dtoh", "live", "k"): 1536 * KIB}
    assert dead_bytes(moves) == {"dead_in_bytes": 0, "dead_out_bytes": 4 * MIB + unused}


def test_a_part_ends_where_only_the_age_of_the_bytes_changes():
    """Of b, which lies where a lay, one half came and left again; then all of it comes: half is stale."""
    size = 2 * MIB
    program = t.TensorProgram(
        "p",
        (
            *make_tensor("a", size),
            *make_tensor("c", size),
            *make_tensor("d", size),  # evicts a
            t.Drop("a"),
            t.Create(t.Tensor("b", size, "activation")),
            t.Compute("half", ("b",), (), 0.0),  # evicts c
            t.Compute("read", ("c",), (), 0.0),  # evicts d
            t.Compute("read", ("d",), (), 0.0),  # evicts the half of b
            t.Compute("whole", ("b",), (), 0.0),
        ),
        {"sparse_reads": {"half": size // 2}},
    )
    ran = train(program, "caching", capacity_bytes=2 * size, prefetch=False, burst=64)
    moves = truth_of(ran)["tensor_moves"]
    b = moves.filter(pl.col("tensor") == "b", pl.col("direction") == "htod")
    sums = dict(b.group_by("is_stale").agg(pl.col("bytes").sum()).rows())
    assert sums == {True: size, False: size // 2}
    # One copy at least has both.
    assert b.group_by("migration").agg(pl.col("is_stale").n_unique())["is_stale"].max() == 2


def test_copies_of_a_prefetch_are_of_the_tensor_that_it_was_asked_for():
    """The kernel before it faults for long: the host has freed a and b when a's prefetch begins."""
    size = 4 * MIB
    program = tensors(
        t.Create(t.Tensor("a", size, "parameter")),
        t.Compute("make a", (), ("a",), 0.0),
        *make_tensor("b", size),  # faults, and evicts a
        t.Compute("read", ("a",), ("a",), 0.0),  # its prefetch brings a back, and evicts b
        t.Drop("a"),
        t.Create(t.Tensor("c", size, "activation")),
        t.Drop("b"),
    )
    settings = Settings(capacity_bytes=size)
    made = placed(program, "caching", GPU, hints=(Hint("prefetch", ("parameter",)),))
    happened = machine.run(made.program, settings)
    moves = tensor_truth(happened, settings, made.history)["tensor_moves"]
    (reader,) = (work for _, work in happened.work if work.name == "read")
    assert happened.operation_ns[-1] < reader.start_ns
    sums = moves.group_by("direction", "cause", "tensor", "state").agg(pl.col("bytes").sum())
    assert sorted(sums.rows()) == [
        ("dtoh", "eviction", "a", "live", size),
        ("dtoh", "eviction", "b", "live", size),
        ("htod", "user", "a", "live", size),
    ]


def test_what_the_host_moves_is_of_the_operation_that_it_is_at():
    """Copies of the host's own faults have no batch; the place in the program says whose they are."""
    reader = Launch(Kernel("k", 1, 256, (Stream(allocation="a", write=True),)))
    ran = modelled(
        *(Allocate("a", 64 * KIB), HostTouch("a", write=True), reader, Synchronize()),
        *(HostTouch("a"), reader, Synchronize()),
    )
    copies = ran.happened.log["copies"].with_row_index("row")
    operations, _ = _operations(ran.happened, copies)
    by_host = (copies["batch"] < 0).to_numpy()
    assert set(operations[by_host]) == {4}
    assert set(operations[~by_host]) == {2, 5}


# Files -----------------------------------------------------------------------------------------


def test_only_a_tensor_program_has_these_tables(tmp_path):
    made = placed(random_program(1), "caching", GPU)
    about = make(Recipe(made.program, Settings(), placed=made), tmp_path / "with")
    assert set(TENSOR_TABLES) | set(TRUTH_TABLES) == set(about["truth"])
    for name in TENSOR_TABLES:
        rows = pl.read_parquet(tmp_path / "with" / "truth" / f"{name}.parquet")
        assert rows.height == about["truth"][name]["rows"]
        assert about["truth"][name]["row"] == TENSOR_TABLES[name]
    moves = pl.read_parquet(tmp_path / "with" / "truth" / "tensor_moves.parquet")
    figures = {name: about["figures"][name] for name in ("dead_in_bytes", "dead_out_bytes")}
    assert figures == dead_bytes(moves)
    plain = make(Recipe(Program("p", (Allocate("a", MIB),)), Settings()), tmp_path / "without")
    assert set(plain["truth"]) == set(TRUTH_TABLES)
    assert "dead_in_bytes" not in plain["figures"]


def test_a_run_without_a_table_of_its_tensors_is_not_whole_but_still_ours(tmp_path):
    made = placed(random_program(1), "caching", GPU)
    recipe = Recipe(made.program, Settings(), placed=made)
    make(recipe, tmp_path / "run")
    assert is_whole(tmp_path / "run")
    (tmp_path / "run" / "truth" / "tensor_moves.parquet").unlink()
    assert not is_whole(tmp_path / "run")
    make(recipe, tmp_path / "run", overwrite=True)
    assert is_whole(tmp_path / "run")
    about = json.loads((tmp_path / "run" / "model.json").read_text())
    assert "tensor_moves" in about["truth"]


def test_the_truth_without_a_history_has_no_tensors():
    ran = train(random_program(1), "caching")
    tables = record(ran.happened, ran.settings, "p")
    names = [name for name, _ in truth(ran.happened, ran.settings, tables)]
    assert names == list(TRUTH_TABLES)
