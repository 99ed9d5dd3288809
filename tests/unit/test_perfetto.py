"""A Perfetto trace byte by byte: against Google's protobuf, and where its slices lie."""

from __future__ import annotations

import heapq
import io
import zlib

import numpy as np
import polars as pl
import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from nsan.exports.counters import rates
from nsan.exports.lanes import lanes, nesting
from nsan.exports.trace_file import LONGEST_NAME, ROWS_PER_STRETCH, Counter, TraceFile, Track
from nsan.exports.wire import Messages, varint

NUMBERS = st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1)


def parsed(raw):
    """Read a whole file, what is compressed in it too; every field must be one that Perfetto knows."""
    outer, packets = Trace.FromString(raw), []
    for packet in outer.packet:
        packed = packet.compressed_packets
        packets += Trace.FromString(zlib.decompress(packed)).packet if packed else [packet]
    for packet in packets:
        assert unknown(packet) == []
    return packets


def unknown(message):
    """Numbers of fields that are not in Perfetto's definition, at any depth."""
    found = [each.field_number for each in UnknownFieldSet(message)]
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else [value]:
                found += unknown(each)
    return found


def written(write, **options):
    file = io.BytesIO()
    trace = TraceFile(file, **options)
    write(trace)
    trace.close()
    return parsed(file.getvalue())


def events(packets, kind):
    return [p for p in packets if p.HasField("track_event") and p.track_event.type == kind]


def slices(n, **columns):
    rows = {"track": [7] * n, "start_ns": range(n), "end_ns": range(1, n + 1), "name": ["a"] * n}
    return pl.DataFrame(rows | columns)


def test_one_number_is_written_as_protobuf_writes_it():
    assert varint(0) == b"\x00"
    assert varint(127) == b"\x7f"
    assert varint(128) == b"\x80\x01"
    assert varint(-1) == b"\xff" * 9 + b"\x01"


@given(st.lists(st.tuples(NUMBERS, st.booleans()), min_size=1, max_size=20))
def test_many_messages_are_what_protobuf_reads_back(rows):
    numbers = np.array([number for number, _ in rows])
    there = np.array([is_there for _, is_there in rows])
    inner, event = Messages(len(rows)), Messages(len(rows))
    inner.uint(30, numbers, there)  # counter_value
    inner.fixed64(47, numbers.view(np.uint64), ~there)  # flow_ids
    event.messages(11, inner)  # track_event
    trace = Messages(len(rows))
    trace.messages(1, event)
    found = [packet.track_event for packet in Trace.FromString(trace.joined()).packet]
    assert [each.HasField("counter_value") for each in found] == there.tolist()
    assert [each.counter_value for each in found] == np.where(there, numbers, 0).tolist()
    flows = [list(each.flow_ids) for each in found]
    assert flows == [[] if is_there else [number % (1 << 64)] for number, is_there in rows]


def test_a_slice_is_a_beginning_with_its_arguments_and_an_end():
    rows = slices(
        2,
        name=["add", "mul"],
        bytes=[4096, None],
        va=pl.Series([(1 << 64) - 4096, 0], dtype=pl.UInt64),
        share=[0.5, None],
        is_full=[True, False],
        label=pl.Series(["read", None], dtype=pl.Enum(["read"])),
        flow=pl.Series([5, None], dtype=pl.UInt64),
    )
    packets = written(lambda trace: trace.slices(rows, "kernel"))
    texts, first, end, second, _ = packets
    names = {each.iid: each.name for each in texts.interned_data.debug_annotation_names}
    labels = {each.iid: each.str for each in texts.interned_data.debug_annotation_string_values}
    assert [each.name for each in texts.interned_data.event_names] == ["add", "mul"]
    assert [each.name for each in texts.interned_data.event_categories] == ["kernel"]
    found = {names[each.name_iid]: each for each in first.track_event.debug_annotations}
    assert found["bytes"].int_value == 4096
    assert found["va"].pointer_value == (1 << 64) - 4096
    assert found["share"].double_value == 0.5
    assert found["is_full"].bool_value is True
    assert labels[found["label"].string_value_iid] == b"read"
    assert list(first.track_event.flow_ids) == [5]
    assert {names[each.name_iid] for each in second.track_event.debug_annotations} == {
        "va",
        "is_full",
    }
    assert not second.track_event.flow_ids
    assert (end.timestamp, end.track_event.type) == (1, TrackEvent.TYPE_SLICE_END)
    assert {each.track_event.track_uuid for each in (first, end, second)} == {7}


def test_names_are_text_of_bounded_length_whatever_they_hold():
    evil = ["</script>\x1b[31m", "x" * 100_000, "", "a\x00b\u202e"]
    packets = written(lambda trace: trace.slices(slices(4, name=evil), "nvtx"))
    names = [each.name for each in packets[0].interned_data.event_names]
    assert names[0] == "</script>\\x1b[31m"
    assert len(names[1]) == LONGEST_NAME
    assert names[2:] == ["", "a\\x00b\\x202e"]


def test_names_are_given_anew_for_each_stretch_so_that_no_stretch_needs_another():
    n = ROWS_PER_STRETCH + 1
    rows = slices(n, name=[f"step {i % 10}" for i in range(n)])
    packets = written(lambda trace: trace.slices(rows, "nvtx"))
    heads = [packet for packet in packets if packet.HasField("interned_data")]
    assert [len(head.interned_data.event_names) for head in heads] == [10, 1]
    assert all(head.sequence_flags == 1 for head in heads)
    assert len(events(packets, TrackEvent.TYPE_SLICE_BEGIN)) == n
    assert {packet.trusted_packet_sequence_id for packet in packets} == {1}


def test_times_before_the_session_start_are_moved_all_alike():
    rows = pl.DataFrame({"track": [1, 1], "start_ns": [-500, 20], "value": [3, 4]})
    packets = written(lambda trace: trace.counts(rows), shift_ns=500)
    found = events(packets, TrackEvent.TYPE_COUNTER)
    assert [each.timestamp for each in found] == [0, 520]
    assert [each.track_event.counter_value for each in found] == [3, 4]


def test_tracks_say_where_they_stand_and_what_they_count():
    tracks = (
        Track(1, 0, "app", pid=42),
        Track(2, 1, "CUDA API", pid=42, tid=43),
        Track(3, 1, "Resident", about="In bytes.", rank=9, counter=Counter()),
        Track(4, 1, "Migrated in", counter=Counter("B/s")),
    )
    found = [p.track_descriptor for p in written(lambda trace: trace.tracks(tracks))]
    assert (found[0].process.pid, found[0].process.process_name) == (42, "app")
    assert not found[0].process.cmdline
    assert (found[1].thread.pid, found[1].thread.tid) == (42, 43)
    assert (found[2].parent_uuid, found[2].description) == (1, "In bytes.")
    assert found[2].sibling_order_rank == 9
    assert found[2].counter.unit == found[2].counter.UNIT_SIZE_BYTES
    assert found[3].counter.unit_name == "B/s"


def test_nothing_at_all_is_an_empty_file():
    assert written(lambda trace: trace.slices(slices(0), "kernel")) == []


INTERVALS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 8)), min_size=1, max_size=40
)


def columns_of(found):
    group, start, length = np.array(found, dtype=np.int64).T
    return group, start, start + length


@given(INTERVALS)
def test_no_two_slices_of_a_lane_overlap_and_there_are_no_more_lanes_than_slices_at_a_time(found):
    group, start, end = columns_of(found)
    lane = lanes(group, start, end)
    ends = np.maximum(end, start + 1)
    for each in set(group.tolist()):
        mine = sorted(
            zip(start[group == each], ends[group == each], lane[group == each], strict=True)
        )
        free_at, running, most = {}, [], 0
        for begin, stop, place in mine:
            assert free_at.get(place, 0) <= begin
            free_at[place] = stop
            while running and running[0] <= begin:
                heapq.heappop(running)
            heapq.heappush(running, stop)
            most = max(most, len(running))
        assert max(free_at) + 1 == most


def test_slices_that_do_not_overlap_stay_on_the_first_lane_after_some_that_did():
    start = np.array([0, 5, 30, 40, 50])
    end = np.array([10, 15, 40, 50, 60])
    assert lanes(np.zeros(5, np.int64), start, end).tolist() == [0, 1, 0, 0, 0]


def crosses(one, other):
    (a, b), (c, d) = sorted([one, other])
    return a < c < b < d


@given(INTERVALS)
def test_slices_that_are_nested_never_cut_through_one_another(found):
    group, start, end = columns_of(found)
    fits = nesting(group, start, end)
    kept = [(g, (s, e)) for g, s, e, fit in zip(group, start, end, fits, strict=True) if fit]
    pairs = [(a, b) for i, (g, a) in enumerate(kept) for h, b in kept[i + 1 :] if g == h]
    assert not any(crosses(a, b) for a, b in pairs)


@given(st.recursive(st.integers(1, 5), lambda inner: st.lists(inner, max_size=4), max_leaves=30))
def test_calls_within_calls_all_find_their_place(tree):
    found = []

    def walk(node, at):
        if isinstance(node, int):
            found.append((at, at + node))
            return at + node
        end = at
        for each in node:
            end = walk(each, end)
        found.append((at, end))
        return end

    walk(tree, 0)
    start, end = np.array(found[::-1]).T
    assert nesting(np.zeros(len(start), np.int64), start, end).all()


def test_one_that_cuts_through_is_told_from_those_around_it():
    start, end = np.array([0, 2, 8, 20]), np.array([10, 4, 12, 30])
    assert nesting(np.zeros(4, np.int64), start, end).tolist() == [True, True, False, True]


def test_a_rate_counts_each_interval_in_each_stretch_by_its_part():
    # 100 bytes over 20 us reach over two stretches of 10 us and lie half in each: 50 B in 10 us is 5 MB/s.
    rows = pl.DataFrame(
        {"pid": [1, 1, 2], "start_ns": [0, 40_000, 0], "end_ns": [20_000, 50_000, 10_000]}
    ).with_columns(bytes=pl.Series([100, 30, 7]))
    found = rates(rows, ["pid"])
    assert found.filter(pid=1).select("start_ns", "value").rows() == [
        (0, pytest.approx(5e6)),
        (20_000, 0.0),
        (40_000, pytest.approx(3e6)),
        (50_000, 0.0),
    ]
    assert found.filter(pid=2).select("start_ns", "value").rows() == [
        (0, pytest.approx(7e5)),
        (10_000, 0.0),
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 10**8), st.integers(1, 1 << 21)),
        min_size=1,
        max_size=50,
    )
)
def test_a_rate_adds_up_to_what_moved(found):
    start, length, size = np.array(found, dtype=np.int64).T
    rows = pl.DataFrame({"pid": 1, "start_ns": start, "end_ns": start + length, "bytes": size})
    levels = rates(rows, ["pid"])
    widths = np.diff(levels["start_ns"].to_numpy())
    assert levels["value"][-1] == 0
    moved = (levels["value"].to_numpy()[:-1] * widths).sum() / 1e9
    assert moved == pytest.approx(size.sum(), rel=1e-6)
