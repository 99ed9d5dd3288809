"""Random programs: what always holds in the caching allocator, and in replays of what it writes."""

from __future__ import annotations

import os
import random

import polars as pl
import pytest
from allocator_programs import RandomProgram, events_frame, state_frames
from polars.testing import assert_frame_equal

from nsan.torch_alloc.follower import Follower
from nsan.torch_alloc.invariants import check
from nsan.torch_alloc.replay import replay, state_at

N = 2000 if os.environ.get("NSAN_SOAK") == "1" else 30
STEPS = 120
CHANGES = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
)
SUMS = ("reserved_bytes", "allocated_bytes", "active_bytes", "requested_bytes")


def run(seed):
    program = RandomProgram(seed)
    for _ in range(STEPS):
        program.step()
    return program


@pytest.mark.parametrize("seed", range(N))
def test_the_invariants_hold_after_every_step(seed):
    program = RandomProgram(seed)
    for step in range(STEPS):
        program.step()
        assert (step, check(program.machine)) == (step, [])


@pytest.mark.parametrize("seed", range(N))
def test_a_history_that_the_machine_writes_replays_to_itself(seed):
    program = run(seed)
    got = replay(*program.recorded.frames(), program.settings)
    agreement = got.agreement
    assert agreement.n_addresses_exact == agreement.n_allocs
    assert agreement.n_segments_exact == agreement.n_segments_made
    assert agreement.n_final_blocks_exact == agreement.n_final_blocks
    assert (agreement.n_skipped, agreement.n_forced_frees, agreement.n_contradictions) == (0, 0, 0)
    last = got.series.row(-1, named=True)
    assert [last[name] for name in SUMS] == [getattr(program.machine, name) for name in SUMS]
    peaks = [got.series[name].max() for name in ("reserved_bytes", "active_bytes")]
    assert peaks == [program.machine.peak_reserved_bytes, program.machine.peak_active_bytes]


def unsplit_rest(program, tensors, k):
    """What was too small to split off the blocks in use before entry k that are freed later.

    If the free block behind such a block has grown until then, its size is not to be told from the history.
    """
    before = tensors.filter(
        (pl.col("alloc_sequence") < k) & (pl.col("free_completed_sequence") >= k)
    ).select("block_bytes", "requested_bytes")
    return sum(size - program.machine.rounded(asked) for size, asked in before.rows())


@pytest.mark.parametrize("seed", range(N))
def test_a_replay_from_the_middle_is_the_whole_one(seed):
    program = run(seed)
    segments, blocks, events = program.recorded.frames()
    whole = replay(segments, blocks, events, program.settings)
    k = program.rng.randrange(events.height)
    part = replay(segments, blocks, events[k:], program.settings)
    agreement = part.agreement
    assert (agreement.n_skipped, agreement.n_forced_frees, agreement.n_contradictions) == (0, 0, 0)
    assert agreement.n_final_blocks_exact == agreement.n_final_blocks
    for name in ("reserved_bytes", "requested_bytes"):
        assert part.series[name].equals(whole.series[name][k:])
    rest = unsplit_rest(program, whole.tensors, k)
    for name in ("allocated_bytes", "active_bytes"):
        assert (whole.series[name][k:] - part.series[name]).is_between(0, rest).all()
    if rest:
        return
    assert_frame_equal(part.series, whole.series[k:])
    sequence = program.rng.randrange(k, events.height)
    one = state_at(segments, blocks, events, program.settings, sequence=sequence)
    other = state_at(segments, blocks, events[k:], program.settings, sequence=sequence)
    assert_frame_equal(one, other)
    if program.settings.tie_break == "address" and not program.settings.expandable_segments:
        # Of the other rules the order of what is older than the history is not known. One segment may have
        # been made for a request whose entry alone is left.
        assert agreement.n_addresses_exact >= agreement.n_allocs - 1


@pytest.mark.parametrize("seed", range(N))
def test_the_sums_of_a_replay_are_those_of_the_machine_at_every_entry(seed):
    program = RandomProgram(seed)
    sums = []
    for _ in range(STEPS):
        program.step()
        sums.append((len(program.recorded.entries), *(getattr(program.machine, n) for n in SUMS)))
    series = replay(*program.recorded.frames(), program.settings).series
    for n_entries, *expected in sums:
        if n_entries:
            row = series.row(n_entries - 1, named=True)
            assert [row[name] for name in SUMS] == expected


def _without_a_kind(rng, rows):
    kind = rng.choice(CHANGES)
    return [row for row in rows if row["action"] != kind]


def _with_gaps(rng, rows):
    return [row for row in rows if rng.random() > 0.2]


def _with_repeats(rng, rows):
    return [row for row in rows for _ in range(rng.choice([1, 1, 1, 2, 3]))]


def _shuffled(rng, rows):
    return rng.sample(rows, len(rows))


def _with_strange_cells(rng, rows):
    for row in rows:
        va = row["va"] or 0
        if rng.random() < 0.1:
            row["va"] = rng.choice([None, 0, 7, 2**64 - 1, va + 1, va + 512, va + (2 << 20)])
        if rng.random() < 0.1:
            row["bytes"] = rng.choice([0, -5, None, 1 << 62, 2 * row["bytes"]])
        if rng.random() < 0.05:
            row["stream"], row["pool"] = rng.choice([(None, None), (5, "9,9")])
    return rows


def _with_strange_actions(rng, rows):
    for row in rows:
        if rng.random() < 0.1:
            row["action"] = rng.choice([*CHANGES, "snapshot", "other", None])
    return rows


BREAKS = (
    _without_a_kind,
    _with_gaps,
    _with_repeats,
    _shuffled,
    _with_strange_cells,
    _with_strange_actions,
)


@pytest.mark.parametrize("seed", range(N))
def test_a_broken_history_is_repaired_and_nothing_falls_below_zero(seed, monkeypatch):
    program = run(seed)
    followers = []
    monkeypatch.setattr(Follower, "run", _watched(Follower.run, followers))
    rng = random.Random(seed)
    rows = events_frame(program.recorded.entries, with_pools=seed % 2 == 0).rows(named=True)
    rows = BREAKS[seed % len(BREAKS)](rng, rows)
    events = events_frame([]).vstack(pl.DataFrame(rows, schema=events_frame([]).schema))
    segments, blocks = state_frames(program.machine)
    if rng.random() < 0.2:
        segments, blocks = segments.clear(), blocks.clear()
    got = replay(segments, blocks, events, program.settings)
    assert got.series.height == events.height
    for row in got.series.select(SUMS).rows(named=True):
        assert 0 <= row["requested_bytes"] <= row["active_bytes"] <= row["reserved_bytes"]
        assert 0 <= row["allocated_bytes"] <= row["active_bytes"]
    assert got.agreement.n_allocs == got.tensors["alloc_sequence"].drop_nulls().len()
    machine = followers[0].machine
    # Sizes are no longer those of PyTorch, but the books still close.
    closing = ("add up", "touch", "neighbours", "the blocks say", "free lists", "out of order")
    assert [p for p in check(machine) if any(words in p for words in closing)] == []


def _watched(method, followers):
    def watched(follower, stop):
        followers.append(follower)
        method(follower, stop)

    return watched
