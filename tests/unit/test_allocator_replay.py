"""Replays of recorded histories: a real one against its golden values, and small ones worked out by hand."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import polars as pl
import pytest
from allocator_programs import START_US, Recorded, events_frame, state_frames
from polars.testing import assert_frame_equal

import nsan
from nsan.torch_alloc import replay as replaying
from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.replay import replay, state_at
from nsan.torch_alloc.settings import AllocatorSettings
from nsan.units import KIB, MIB

SNAPSHOTS = Path(__file__).parents[2] / "sample_data" / "snapshots"
DECOMFL = "decomfl_opt125m_full_history.pickle.gz"
DEFAULT = AllocatorSettings()


@cache
def frames_of(name):
    snapshot = nsan.open_snapshot(SNAPSHOTS / name)
    return tuple(
        frame.collect() for frame in (snapshot.segments, snapshot.blocks, snapshot.allocator_events)
    )


@cache
def decomfl():
    return replay(*frames_of(DECOMFL), DEFAULT)


def counts(agreement):
    """Addresses, segments and final blocks: all and exact."""
    return (
        (agreement.n_allocs, agreement.n_addresses_exact),
        (agreement.n_segments_made, agreement.n_segments_exact),
        (agreement.n_final_blocks, agreement.n_final_blocks_exact),
    )


def repairs(agreement):
    return agreement.n_skipped, agreement.n_forced_frees, agreement.n_contradictions


def is_exact(agreement):
    return all(n == exact for n, exact in counts(agreement)) and repairs(agreement) == (0, 0, 0)


# The golden history.


def test_the_rules_predict_every_address_segment_and_final_block_of_a_real_history():
    agreement = decomfl().agreement
    assert counts(agreement) == ((7946, 7946), (61, 61), (468, 468))
    assert repairs(agreement) == (0, 0, 0)
    assert agreement.first_difference is None
    assert decomfl().starts_empty


def test_the_peaks_of_a_real_history_are_the_golden_ones():
    series = decomfl().series
    assert series.height == 23_105
    assert series["allocated_bytes"].max() == 1_790_894_592
    assert series["allocated_bytes"].arg_max() == 11_205
    assert series["reserved_bytes"].max() == 1_897_922_560
    assert series["reserved_bytes"].arg_max() == 11_204
    assert series["reserved_bytes"][11_204:].unique().to_list() == [1_897_922_560]
    utilization = series["active_bytes"].max() / series["reserved_bytes"].max()
    assert round(utilization, 4) == 0.9436


def test_a_real_history_ends_with_the_golden_sums():
    last = decomfl().series.row(-1, named=True)
    assert last["reserved_bytes"] == 1_897_922_560
    assert last["allocated_bytes"] == last["active_bytes"] == 1_014_430_208
    assert last["requested_bytes"] == 1_011_485_828
    held = decomfl().tensors.filter(pl.col("free_completed_sequence").is_null())
    assert held.height == 397
    assert held["block_bytes"].sum() - held["requested_bytes"].sum() == 2_944_380


def test_the_sums_after_each_entry_are_those_of_the_entries_up_to_it():
    # Reserved and requested bytes follow from the entries alone, in plain Python.
    _, _, events = frames_of(DECOMFL)
    reserved = requested = 0
    for entry, row in zip(events.rows(named=True), decomfl().series.rows(named=True), strict=True):
        sign = {"segment_alloc": 1, "segment_free": -1}.get(entry["action"], 0)
        reserved += sign * entry["bytes"]
        sign = {"alloc": 1, "free_completed": -1}.get(entry["action"], 0)
        requested += sign * entry["bytes"]
        assert (row["reserved_bytes"], row["requested_bytes"]) == (reserved, requested)


def test_tensors_and_segments_of_a_real_history_carry_their_entries():
    _, _, events = frames_of(DECOMFL)
    tensors, segments = decomfl().tensors, decomfl().segments
    allocs = events.filter(pl.col("action") == "alloc")
    assert tensors["alloc_sequence"].to_list() == allocs["sequence"].to_list()
    assert tensors["va"].to_list() == allocs["va"].to_list()
    assert tensors["requested_bytes"].to_list() == allocs["bytes"].to_list()
    assert tensors["alloc_us"].to_list() == allocs["time_us"].to_list()
    assert tensors["stack_id"].to_list() == allocs["stack_id"].to_list()
    freed = tensors.drop_nulls("free_completed_sequence")
    assert freed.height == 7549
    # A free is that of the last allocation at its address.
    assert freed.filter(pl.col("free_requested_sequence") <= pl.col("alloc_sequence")).is_empty()
    assert freed["free_us"].to_list() == (
        events["time_us"].gather(freed["free_requested_sequence"]).to_list()
    )
    inside = tensors.filter(
        (pl.col("va") >= pl.col("segment_va"))
        & (
            pl.col("va") + pl.col("block_bytes").cast(pl.UInt64)
            <= pl.col("segment_va") + pl.col("segment_bytes").cast(pl.UInt64)
        )
    )
    assert inside.height == tensors.height
    made = events.filter(pl.col("action") == "segment_alloc")
    assert segments["alloc_sequence"].to_list() == made["sequence"].to_list()
    assert segments["free_sequence"].null_count() == 61
    assert segments["size_class"].value_counts(sort=True).rows() == [("large", 44), ("small", 17)]


# Wrong rules must show.


class FirstFit(CachingAllocator):
    """Takes the lowest address that fits instead of the best fit."""

    def find(self, home, rounded):
        fits = [block for block in home.blocks if block.n_bytes >= rounded]
        return min(fits, key=lambda block: block.va, default=None)


class SplitsAt512(CachingAllocator):
    """Splits large blocks down to 512 byte."""

    def home(self, stream, pool, *, is_small):
        home = super().home(stream, pool, is_small=is_small)
        home.min_rest_bytes = 512
        return home


class WideBuffer(CachingAllocator):
    """Makes segments of 20 MiB for requests up to 20 MiB."""

    def segment_size(self, rounded):
        return 20 * MIB if MIB < rounded < 20 * MIB else super().segment_size(rounded)


class SmallToHalf(CachingAllocator):
    """Never gives the segment sizes of the small pool."""

    def segment_size(self, rounded):
        return max(super().segment_size(rounded), 4 * MIB)


@pytest.mark.parametrize("tie_break", ["block", "segment"])
def test_the_tie_break_of_another_version_gives_wrong_addresses(tie_break):
    agreement = replay(*frames_of(DECOMFL), AllocatorSettings(tie_break=tie_break)).agreement
    assert agreement.n_addresses_exact < 7900
    assert agreement.first_difference is not None
    assert agreement.n_final_blocks_exact == 468  # what was recorded wins


@pytest.mark.parametrize(("wrong", "at_most"), [(FirstFit, 5000), (SplitsAt512, 7945)])
def test_a_wrong_rule_gives_wrong_addresses(monkeypatch, wrong, at_most):
    monkeypatch.setattr(replaying, "CachingAllocator", wrong)
    got = replay(*frames_of(DECOMFL), DEFAULT)
    assert got.agreement.n_addresses_exact <= at_most
    assert got.agreement.n_forced_frees == 0
    assert got.series["reserved_bytes"].equals(decomfl().series["reserved_bytes"])


def test_a_large_pool_that_splits_at_512_byte_ends_with_other_blocks(monkeypatch):
    monkeypatch.setattr(replaying, "CachingAllocator", SplitsAt512)
    agreement = replay(*frames_of(DECOMFL), DEFAULT).agreement
    assert agreement.n_final_blocks_exact < agreement.n_final_blocks == 468


def test_a_wrong_segment_size_shows_in_the_segments(monkeypatch):
    # The golden history has no request between 10 and 20 MiB, so this one is made up.
    recorded = Recorded(DEFAULT)
    recorded.machine.allocate(15 * MIB)
    recorded.machine.allocate(25 * MIB)
    assert counts(replay(*recorded.frames(), DEFAULT).agreement)[1] == (2, 2)
    monkeypatch.setattr(replaying, "CachingAllocator", WideBuffer)
    agreement = replay(*recorded.frames(), DEFAULT).agreement
    assert counts(agreement)[1] == (2, 1)
    assert agreement.first_difference == 0
    assert counts(agreement)[0] == (2, 2)


def test_a_wrong_segment_size_of_the_small_pool_shows(monkeypatch):
    monkeypatch.setattr(replaying, "CachingAllocator", SmallToHalf)
    agreement = replay(*frames_of(DECOMFL), DEFAULT).agreement
    assert counts(agreement)[1] == (61, 44)  # 17 segments of 2 MiB


# From the middle.


@pytest.mark.parametrize("k", [1, 2, 1001, 5000, 11_205, 11_206, 17_333, 23_000, 23_104])
def test_a_replay_from_the_middle_is_the_whole_one_from_there_on(k):
    segments, blocks, events = frames_of(DECOMFL)
    part = replay(segments, blocks, events[k:], DEFAULT)
    assert not part.starts_empty
    assert is_exact(part.agreement)
    assert_frame_equal(part.series, decomfl().series[k:])
    made_since = decomfl().tensors.filter(pl.col("alloc_sequence") >= k)
    assert_frame_equal(part.tensors.drop_nulls("alloc_sequence"), made_since)
    before = part.tensors.filter(pl.col("alloc_sequence").is_null())
    held = decomfl().tensors.filter(
        (pl.col("alloc_sequence") < k)
        & (pl.col("free_completed_sequence").is_null() | (pl.col("free_completed_sequence") >= k))
    )
    columns = ["va", "block_bytes", "segment_va", "free_completed_sequence"]
    assert_frame_equal(before.select(columns).sort("va"), held.select(columns).sort("va"))


@pytest.mark.parametrize(("k", "sequence"), [(3000, 3000), (3000, 11_205), (20_000, 22_222)])
def test_the_state_from_the_middle_is_that_of_the_whole_replay(k, sequence):
    segments, blocks, events = frames_of(DECOMFL)
    whole = state_at(segments, blocks, events, DEFAULT, sequence=sequence)
    assert_frame_equal(state_at(segments, blocks, events[k:], DEFAULT, sequence=sequence), whole)
    row = decomfl().series.row(sequence, named=True)
    used = whole.filter(pl.col("state") != "inactive")
    assert whole["bytes"].sum() == row["reserved_bytes"]
    assert used["bytes"].sum() == row["active_bytes"]
    assert used["requested_bytes"].sum() == row["requested_bytes"]


def test_the_state_before_the_first_entry_is_empty_and_after_the_last_as_recorded():
    segments, blocks, events = frames_of(DECOMFL)
    assert state_at(segments, blocks, events, DEFAULT, sequence=None).is_empty()
    last = state_at(segments, blocks, events, DEFAULT, sequence=23_104)
    columns = ["va", "bytes", "state", "pool", "stream"]
    assert_frame_equal(last.select(columns), blocks.sort("va").select(columns))


@pytest.mark.parametrize(
    ("name", "n_blocks", "n_used"),
    [
        ("verl_vllm_two_mempools.pickle.gz", 638, 534 + 9),
        ("kivi_llama_state_only.pickle.gz", 868, 839),
        ("flexgen_opt1.3b_old_format.pickle.gz", 948, 785),
        ("flexgen_oom_old_format.pickle.gz", 463, 460),
    ],
)
def test_a_state_without_a_history_comes_back_as_it_is(name, n_blocks, n_used):
    segments, blocks, events = frames_of(name)
    got = replay(segments, blocks, events, DEFAULT)
    assert got.agreement.n_final_blocks == got.agreement.n_final_blocks_exact == n_blocks
    assert got.series.height == events.height
    assert not got.starts_empty
    held = got.tensors.filter(pl.col("free_completed_sequence").is_null())
    assert held.height == n_used
    used = blocks.filter(pl.col("state") != "inactive").sort("va")
    assert held.sort("va")["stack_id"].to_list() == used["stack_id"].to_list()
    assert got.segments.height == segments.height


# Small histories.


def test_streams_are_kept_apart():
    recorded = Recorded(DEFAULT)
    machine = recorded.machine
    blocks = [machine.allocate(3000, stream=stream) for stream in (0, 5, 9, 5)]
    machine.free(blocks[1])
    machine.free(blocks[0])
    machine.allocate(3000, stream=5)
    got = replay(*recorded.frames(), DEFAULT)
    assert is_exact(got.agreement)
    assert got.tensors["stream"].to_list() == [0, 5, 9, 5, 5]
    assert got.segments["stream"].to_list() == [0, 5, 9]


@pytest.mark.parametrize("with_pools", [True, False])
def test_pools_are_known_from_the_entries_or_from_the_segments(with_pools):
    recorded = Recorded(DEFAULT)
    machine = recorded.machine
    blocks = [machine.allocate(3000, pool=pool) for pool in ("0,0", "0,1", "0,0", "0,1")]
    machine.free(blocks[0])  # lower than all of the other pool: it must not serve it
    machine.free(blocks[1])
    machine.allocate(2000, pool="0,1")
    machine.allocate(2000, pool="0,0")
    frames = recorded.frames(with_pools=with_pools)
    got = replay(*frames, DEFAULT)
    assert is_exact(got.agreement)
    pools = ["0,0", "0,1", "0,0", "0,1", "0,1", "0,0"]
    assert got.tensors["pool"].to_list() == pools
    middle = replay(*frames[:2], frames[2][5:], DEFAULT)
    assert is_exact(middle.agreement)


def test_a_burst_of_segment_frees_ends_the_segments_that_were_free():
    recorded = Recorded(DEFAULT)
    machine = recorded.machine
    kept = machine.allocate(30 * MIB)
    for block in [machine.allocate(n * MIB) for n in (12, 14, 1, 16)]:
        machine.free(block)
    machine.empty_cache()
    machine.allocate(14 * MIB)
    frames = recorded.frames()
    got = replay(*frames, DEFAULT)
    assert is_exact(got.agreement)
    events = frames[2]
    burst = events.filter(pl.col("action") == "segment_free")
    assert burst.height == 4
    ended = got.segments.drop_nulls("free_sequence").sort("free_sequence")
    assert ended["va"].to_list() == burst["va"].to_list()
    assert ended["free_sequence"].to_list() == burst["sequence"].to_list()
    assert got.series["reserved_bytes"].to_list()[-3:] == [30 * MIB, 44 * MIB, 44 * MIB]
    # The vanished segments come back when the history is undone, with their pools by size.
    middle = replay(*frames[:2], events[12:], DEFAULT)
    assert is_exact(middle.agreement)
    assert middle.series["reserved_bytes"][0] == got.series["reserved_bytes"][12]
    assert kept.va in middle.tensors["va"].to_list()


def test_a_pending_free_leaves_allocated_at_once_and_active_when_it_completes():
    recorded = Recorded(DEFAULT)
    machine = recorded.machine
    one, two = machine.allocate(1000), machine.allocate(5000)
    machine.free(one, pending=True)
    machine.free(two)
    machine.allocate(100)
    machine.complete(one)
    late = machine.allocate(900)
    machine.free(late, pending=True)
    got = replay(*recorded.frames(), DEFAULT)
    assert is_exact(got.agreement)
    series = got.series.select("action", "block_bytes", "allocated_bytes", "active_bytes").rows()
    assert series == [
        ("segment_alloc", None, 0, 0),
        ("alloc", 1024, 1024, 1024),
        ("alloc", 5120, 6144, 6144),
        ("free_requested", 1024, 5120, 6144),
        ("free_requested", 5120, 0, 6144),
        ("free_completed", 5120, 0, 1024),
        ("alloc", 512, 512, 1536),
        ("free_completed", 1024, 512, 512),
        ("alloc", 1024, 1536, 1536),
        ("free_requested", 1024, 512, 1536),
    ]
    tensors = got.tensors.rows(named=True)
    assert [t["free_requested_sequence"] for t in tensors] == [3, 4, None, 9]
    assert [t["free_completed_sequence"] for t in tensors] == [7, 5, None, None]
    assert tensors[0]["free_us"] == START_US + 30


def test_a_free_that_was_pending_before_the_history_completes_in_it():
    recorded = Recorded(DEFAULT)
    machine = recorded.machine
    early, other = machine.allocate(1000), machine.allocate(1000)
    machine.free(early, pending=True)
    n_before = len(recorded.entries)
    machine.complete(early)
    machine.free(other)
    segments, blocks, events = recorded.frames()
    got = replay(segments, blocks, events[n_before:], DEFAULT)
    assert is_exact(got.agreement)
    sums = got.series.select("allocated_bytes", "active_bytes").rows()
    assert sums == [(1024, 1024), (0, 1024), (0, 0)]
    before = got.tensors.sort("va")
    assert before["free_requested_sequence"].to_list() == [None, 5]
    assert before["free_completed_sequence"].to_list() == [4, 6]


def test_a_segment_made_after_all_streams_were_waited_for_is_due():
    # 60 of 64 MiB are reserved. The request for 24 MiB waits for the pending block of 25 MiB, which then lies
    # free in a segment that is still in use; it is not looked for again, and a segment is made.
    settings = AllocatorSettings(device_bytes=64 * MIB)
    recorded = Recorded(settings)
    machine = recorded.machine
    machine.free(machine.allocate(40 * MIB))
    machine.allocate(9 * MIB)
    pending = machine.allocate(25 * MIB)
    machine.free(pending, pending=True)
    machine.free(machine.allocate(20 * MIB))
    assert machine.allocate(24 * MIB).segment.n_bytes == 24 * MIB
    got = replay(*recorded.frames(), settings)
    assert is_exact(got.agreement)
    assert got.agreement.n_segments_made == 3


def test_an_unmapping_of_nothing_leaves_the_free_blocks_whole():
    program = Recorded(AllocatorSettings(expandable_segments=True))
    block = program.machine.allocate(3 * MIB)
    program.machine.free(block)
    segments, blocks, events = program.frames()
    nothing = events.tail(1).with_columns(
        action=pl.lit("segment_unmap").cast(events.schema["action"]),
        sequence=pl.col("sequence") + 1,
        va=pl.col("va") + 512,
        bytes=pl.lit(0, pl.Int64),
    )
    got = replay(segments, blocks, pl.concat([events, nothing]), program.machine.settings)
    assert got.agreement.n_skipped == 1
    assert got.agreement.n_final_blocks_exact == got.agreement.n_final_blocks == 1


def test_expandable_segments_grow_and_shrink_in_a_replay():
    settings = AllocatorSettings(expandable_segments=True)
    recorded = Recorded(settings)
    machine = recorded.machine
    blocks = [machine.allocate(n * MIB) for n in (10, 45, 25)]
    machine.free(blocks[1])
    machine.empty_cache()
    machine.allocate(30 * MIB)
    machine.free(blocks[2])
    machine.empty_cache()
    frames = recorded.frames()
    got = replay(*frames, settings)
    assert is_exact(got.agreement)
    # Mapped: 20, 60, 80 MiB; [20, 40) goes and comes back; [40, 80) goes at the end.
    reserved = (got.series["reserved_bytes"] // MIB).to_list()
    assert [n for n, _ in itertools.groupby(reserved)] == [20, 60, 80, 60, 80, 40]
    assert got.segments.select("bytes", "size_class", "free_sequence").rows() == [
        (80 * MIB, "large", None)
    ]
    for k in range(1, len(recorded.entries)):
        middle = replay(*frames[:2], frames[2][k:], settings)
        assert_frame_equal(middle.series, got.series[k:])


def test_a_segment_of_a_request_that_failed_is_a_segment_like_others():
    recorded = Recorded(DEFAULT)
    machine = recorded.machine
    first, second = machine.allocate(4 * MIB), machine.allocate(4 * MIB)
    machine.free(first)
    # While a graph is captured nothing is released before a request fails.
    machine.add_segment(second.segment.va + 64 * MIB, 20 * MIB, second.segment.home)
    recorded.entries.append(("oom", 0, 30 * MIB, 0))
    assert machine.allocate(3 * MIB).va == first.va  # the best fit: 4 of 12, 20 and 4 MiB
    agreement = replay(*recorded.frames(), DEFAULT).agreement
    assert counts(agreement)[0] == (3, 3)
    assert repairs(agreement) == (0, 0, 0)


def test_a_segment_is_due_also_if_another_thread_writes_entries_before_its_request():
    recorded = Recorded(DEFAULT)
    machine = recorded.machine
    others = [machine.allocate(1000, stream=5) for _ in range(4)]
    machine.allocate(30 * MIB)
    request = recorded.entries.pop()
    for block in others:
        machine.free(block)
    recorded.entries.append(request)
    assert [entry[0] for entry in recorded.entries[5:8]] == [
        "segment_alloc",
        "free_requested",
        "free_completed",
    ]
    assert is_exact(replay(*recorded.frames(), DEFAULT).agreement)


def test_a_block_above_the_splitting_limit_had_the_whole_segment_before_the_history_too():
    settings = AllocatorSettings(max_split_bytes=40 * MIB)
    recorded = Recorded(settings)
    machine = recorded.machine
    machine.free(machine.allocate(60 * MIB))
    whole = machine.allocate(50 * MIB)
    n_before = len(recorded.entries)
    machine.free(whole)
    segments, blocks, events = recorded.frames()
    got = replay(segments, blocks, events[n_before:], settings)
    assert is_exact(got.agreement)
    assert got.tensors["block_bytes"].to_list() == [60 * MIB]
    assert got.series["active_bytes"].to_list() == [60 * MIB, 0]


def test_a_range_without_a_pool_is_of_the_pool_of_the_range_that_it_touches():
    settings = AllocatorSettings(expandable_segments=True)
    recorded = Recorded(settings)
    machine = recorded.machine
    blocks = [machine.allocate(n * MIB, pool="0,1") for n in (15, 30)]
    for block in blocks:
        machine.free(block)
    machine.close_pool("0,1")
    assert recorded.entries[0][0] == "segment_map"
    recorded.entries[0] = recorded.entries[0][:4]
    segments, none, events = recorded.frames()
    assert segments.is_empty()
    got = replay(segments, none, events, settings)
    assert is_exact(got.agreement)
    assert got.segments["pool"].to_list() == ["0,1"]


def test_entries_that_change_nothing_change_nothing():
    recorded = Recorded(DEFAULT)
    recorded.machine.allocate(1000)
    plain = replay(*recorded.frames(), DEFAULT)
    extra = [("snapshot", 0, 1024, 0), ("oom", 0, 512, 0), ("annotate", 5, 5, 0)]
    entries = [*recorded.entries, *extra]
    segments, blocks = state_frames(recorded.machine)
    got = replay(segments, blocks, events_frame(entries), DEFAULT)
    assert is_exact(got.agreement)
    assert_frame_equal(got.tensors, plain.tensors)
    assert got.series["active_bytes"].to_list() == [0, 1024, 1024, 1024, 1024]


def test_a_replay_can_stop_before_the_end():
    segments, blocks, events = frames_of(DECOMFL)
    part = replay(segments, blocks, events, DEFAULT, stop_at=999)
    assert_frame_equal(part.series, decomfl().series[:1000])
    assert part.agreement.n_final_blocks == 0
    open_then = part.tensors.filter(pl.col("free_completed_sequence").is_null())
    assert open_then["block_bytes"].sum() == part.series["active_bytes"][-1]


def test_the_rows_of_other_devices_are_left_out_and_the_input_stays_as_it_is():
    recorded = Recorded(DEFAULT)
    recorded.machine.allocate(1000)
    frames = recorded.frames()
    both = tuple(
        pl.concat([frame, frame.with_columns(device_id=pl.lit(1, pl.Int64))])
        for frame in frames[:2]
    )
    copies = [frame.clone() for frame in (*both, frames[2])]
    got = replay(*both, frames[2], DEFAULT)
    assert got.agreement.n_final_blocks == 2
    assert got.tensors["device_id"].to_list() == [0]
    for frame, copy in zip((*both, frames[2]), copies, strict=True):
        assert_frame_equal(frame, copy)


def test_nothing_at_all_is_an_empty_replay():
    got = replay(*Recorded(DEFAULT).frames(), DEFAULT)
    assert got.starts_empty
    assert got.series.is_empty()
    assert got.tensors.is_empty()
    assert got.segments.is_empty()
    assert got.tensors.schema["va"] == pl.UInt64
    assert got.tensors.schema["device_id"] == got.tensors.schema["stack_id"] == pl.Int64


# Histories that are broken.


def a_history():
    recorded = Recorded(DEFAULT)
    machine = recorded.machine
    blocks = [machine.allocate(n * KIB) for n in (1, 2, 3000, 4, 15_000)]
    machine.free(blocks[1])
    machine.free(blocks[2])
    machine.free(blocks[4])
    machine.empty_cache()
    machine.allocate(2 * KIB)
    machine.free(blocks[0])
    machine.allocate(600)
    return recorded


def replayed(recorded, entries):
    return replay(*state_frames(recorded.machine), events_frame(entries), DEFAULT)


def never_below_zero(series):
    return series.select(
        pl.all_horizontal(
            pl.col("requested_bytes") >= 0,
            pl.col("allocated_bytes") >= 0,
            pl.col("requested_bytes") <= pl.col("active_bytes"),
            pl.col("allocated_bytes") <= pl.col("active_bytes"),
            pl.col("active_bytes") <= pl.col("reserved_bytes"),
        ).all()
    ).item()


def test_the_free_of_an_unknown_block_is_counted_and_skipped():
    recorded = a_history()
    assert is_exact(replayed(recorded, recorded.entries).agreement)
    strange = [("free_requested", 7 * MIB, 512, 0), ("free_completed", 7 * MIB, 512, 0)]
    got = replayed(recorded, [*recorded.entries[:4], *strange, *recorded.entries[4:]])
    # When it is undone it is a block from before the history, in no segment; then it is freed.
    assert got.agreement.n_contradictions == 1
    assert counts(got.agreement)[0] == (7, 7)
    assert never_below_zero(got.series)


def test_entries_that_are_there_twice_count_once():
    recorded = a_history()
    twice = [entry for entry in recorded.entries for _ in range(2)]
    got = replayed(recorded, twice)
    assert got.agreement.n_final_blocks_exact == got.agreement.n_final_blocks
    assert got.agreement.n_skipped > 0
    assert never_below_zero(got.series)
    whole = replayed(recorded, recorded.entries)
    sums = ["reserved_bytes", "allocated_bytes", "active_bytes", "requested_bytes"]
    assert_frame_equal(got.series.select(sums)[1::2][-1], whole.series.select(sums)[-1])


def test_a_block_whose_free_is_missing_is_freed_where_another_takes_its_place():
    recorded = Recorded(DEFAULT)
    one = recorded.machine.allocate(1000)
    recorded.machine.free(one)
    recorded.machine.allocate(300)
    entries = [entry for entry in recorded.entries if not entry[0].startswith("free")]
    got = replayed(recorded, entries)
    assert got.agreement.n_forced_frees == 1
    assert got.agreement.n_final_blocks_exact == got.agreement.n_final_blocks == 2
    assert got.tensors["free_completed_sequence"].to_list() == [2, None]
    assert got.series["active_bytes"].to_list() == [0, 1024, 512]
    assert got.series["block_bytes"].to_list() == [None, 1024, 512]


@pytest.mark.parametrize(
    "missing", ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"]
)
def test_a_history_without_a_kind_of_entry_is_replayed_as_far_as_it_goes(missing):
    recorded = a_history()
    got = replayed(recorded, [e for e in recorded.entries if e[0] != missing])
    assert never_below_zero(got.series)
    if missing == "alloc":
        assert got.agreement.n_contradictions > 0
    else:
        assert got.agreement.n_final_blocks_exact == got.agreement.n_final_blocks
    if missing.startswith("free"):
        # Each free is still known from its other entry.
        assert got.agreement.n_addresses_exact == 7
        assert got.series["active_bytes"][-1] == got.series["allocated_bytes"][-1]


def test_without_requested_frees_a_block_from_before_the_history_is_held_until_its_completion():
    recorded = Recorded(DEFAULT)
    machine = recorded.machine
    early = machine.allocate(1000)
    n_before = len(recorded.entries)
    machine.free(machine.allocate(2000))
    machine.free(early)
    entries = [e for e in recorded.entries[n_before:] if e[0] != "free_requested"]
    got = replayed(recorded, entries)
    assert repairs(got.agreement) == (0, 0, 0)
    sums = got.series.select("action", "allocated_bytes", "active_bytes").rows()
    assert sums == [
        ("alloc", 3072, 3072),
        ("free_completed", 1024, 1024),
        ("free_completed", 0, 0),
    ]


def test_one_missing_request_of_a_free_leaves_the_pending_frees_as_they_are():
    recorded = Recorded(DEFAULT)
    machine = recorded.machine
    early = machine.allocate(1000)
    machine.free(early, pending=True)
    n_before = len(recorded.entries)
    machine.free(machine.allocate(2000))
    machine.free(machine.allocate(500))
    machine.complete(early)
    entries = recorded.entries[n_before:]
    missing = [place for place, entry in enumerate(entries) if entry[0] == "free_requested"][1]
    got = replayed(recorded, entries[:missing] + entries[missing + 1 :])
    sums = got.series.select("action", "allocated_bytes", "active_bytes").rows()
    assert sums == [
        ("alloc", 2048, 3072),
        ("free_requested", 0, 3072),
        ("free_completed", 0, 1024),
        ("alloc", 512, 1536),
        ("free_completed", 0, 1024),
        ("free_completed", 0, 0),
    ]


def test_entries_with_impossible_cells_are_not_used():
    recorded = a_history()
    events = events_frame(recorded.entries)
    bad = [
        {"action": "alloc", "va": None, "bytes": 5},
        {"action": "segment_alloc", "va": 1 << 63, "bytes": 1 << 40},
        {"action": "free_completed", "va": 5, "bytes": -1},
        {"action": None, "va": 0, "bytes": 0},
    ]
    more = pl.DataFrame(
        [{"device_id": 0, "sequence": 900 + n, **cells} for n, cells in enumerate(bad)],
        schema=events.schema,
    )
    got = replay(*state_frames(recorded.machine), pl.concat([events, more]), DEFAULT)
    assert is_exact(got.agreement)
    assert got.series.height == events.height + 4


def test_a_state_that_contradicts_itself_is_counted():
    recorded = a_history()
    segments, blocks, events = recorded.frames()
    twice = pl.concat([segments, segments.with_columns(pl.col("va") + 512)])
    got = replay(twice, blocks, events, DEFAULT)
    assert got.agreement.n_contradictions >= segments.height
    assert never_below_zero(got.series)
