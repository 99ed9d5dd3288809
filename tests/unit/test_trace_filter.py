from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsan.analysis.migrations import busy_by_group
from nsan.errors import BadTimeError, NoFilterTableError, UnknownFilterValueError
from nsan.info import TraceInfo
from nsan.schema import TABLES
from nsan.totals import totals
from nsan.trace import Trace


def table(name, *rows):
    """A frame of a table from some of its columns; the others are null."""
    schema = TABLES[name].schema
    frame = pl.DataFrame([{**dict.fromkeys(schema), **row} for row in rows], schema=schema)
    return frame.sort("start_ns").lazy() if "start_ns" in schema else frame.lazy()


def trace(**tables):
    frames = {name: TABLES[name].empty() for name in TABLES}
    frames |= {name: table(name, *rows) for name, rows in tables.items()}
    return Trace(**frames, info=TraceInfo(source="built", kind="test"))


def event(start, end, *, pid=1, device=0, **more):
    return {"start_ns": start, "end_ns": end, "pid": pid, "device_id": device, **more}


def move(start, end, size=4096, **more):
    labels = {"bytes": size, "direction": "htod", "cause": "coherence", "cause_id": 2}
    return event(start, end, **labels, **more)


def span(start, end, name, *, domain=None, pid=1):
    return {"start_ns": start, "end_ns": end, "name": name, "domain": domain, "pid": pid}


def held(alloc, free, va=0, *, pid=1, device=0):
    return {"alloc_ns": alloc, "free_ns": free, "va": va, "pid": pid, "device_id": device}


def starts(frame, column="start_ns"):
    return frame.collect()[column].to_list()


PIDS = ({"pid": 1}, {"pid": 2})
GPUS = ({"device_id": 0}, {"device_id": 1})
EVENTS = ("gpu_faults", "cpu_faults", "migrations", "copies", "memsets", "kernels", "api_calls")


@pytest.mark.parametrize("name", [*EVENTS, "nvtx_marks"])
def test_a_row_belongs_to_the_window_that_holds_its_start(name):
    has_end = "end_ns" in TABLES[name].schema
    whole = trace(
        **{
            name: [
                {"start_ns": start, **({"end_ns": start + 15} if has_end else {})}
                for start in (0, 9, 10, 19, 20)
            ]
        }
    )
    assert starts(getattr(whole.filter(time=(10, 20)), name)) == [10, 19]
    assert starts(getattr(whole.filter(time=(None, 10)), name)) == [0, 9]
    assert starts(getattr(whole.filter(time=(20, None)), name)) == [20]
    assert starts(getattr(whole.filter(time=(None, None)), name)) == [0, 9, 10, 19, 20]


def test_a_window_may_be_text_as_in_nsys():
    whole = trace(kernels=[event(0, 1), event(1_000, 1_001), event(2_000, 2_001)])
    assert starts(whole.filter(time="1us/2us").kernels) == [1_000]
    assert starts(whole.filter(time="1us/").kernels) == [1_000, 2_000]
    with pytest.raises(BadTimeError):
        whole.filter(time="soon")


@pytest.mark.parametrize("window", [(5, 5), (20, 10), (100, 200), (-20, -10)])
def test_a_window_without_rows_leaves_typed_empty_frames(window):
    whole = trace(
        migrations=[move(0, 10)], nvtx_ranges=[span(0, 10, "a")], allocations=[held(0, 9)]
    )
    got = whole.filter(time=window)
    for name in ("migrations", "nvtx_ranges", "allocations"):
        frame = getattr(got, name)
        assert TABLES[name].validate(frame).collect().height == 0


def test_rows_before_the_session_start_can_be_asked_for():
    whole = trace(kernels=[event(-50, -40), event(0, 1)])
    assert starts(whole.filter(time="-100/0").kernels) == [-50]


def test_a_row_without_a_start_is_in_no_window():
    whole = trace(
        migrations=[move(None, 10), move(5, 9)],
        nvtx_ranges=[span(0, 6, "a"), span(8, 9, "a"), span(20, 30, "b")],
    )
    assert starts(whole.filter(time=(None, None)).migrations) == [5]
    assert starts(whole.filter(nvtx="a").migrations) == [5]


@pytest.mark.parametrize(
    ("start", "end", "kept"),
    [
        (0, 10, False),  # ends where the window begins
        (0, 11, True),
        (5, 25, True),  # around the window
        (12, 15, True),
        (19, 30, True),
        (20, 30, False),  # begins where the window ends
        (10, 10, True),  # no length
        (15, 15, True),
        (20, 20, False),
        (9, 9, False),
    ],
)
def test_ranges_and_allocations_are_kept_when_they_intersect(start, end, kept):
    whole = trace(nvtx_ranges=[span(start, end, "a")], allocations=[held(start, end)])
    got = whole.filter(time=(10, 20))
    assert starts(got.nvtx_ranges) == [start] * kept
    assert starts(got.allocations, "alloc_ns") == [start] * kept


@pytest.mark.parametrize(
    ("alloc", "free", "kept"),
    [
        (None, 5, False),
        (None, 10, False),
        (None, 11, True),
        (None, None, True),
        (19, None, True),
        (20, None, False),
        (5, None, True),
        (None, 30, True),
    ],
)
def test_an_allocation_without_one_end_lives_on_that_side(alloc, free, kept):
    got = trace(allocations=[held(alloc, free)]).filter(time=(10, 20)).allocations.collect()
    assert got.select("alloc_ns", "free_ns").rows() == [(alloc, free)] * kept


def two_processes():
    return trace(
        gpu_faults=[event(0, 5, pid=1), event(1, 6, pid=2, device=1)],
        migrations=[move(2, 9, pid=1), move(3, 9, pid=2), move(4, 9, pid=2, device=1)],
        cpu_faults=[{"start_ns": 7, "pid": 2}],
        api_calls=[{"start_ns": 8, "end_ns": 9, "pid": 1}],
        allocations=[held(0, 9, pid=1), held(0, 9, pid=2, device=1)],
        nvtx_ranges=[span(0, 5, "step", pid=1), span(3, 9, "step", pid=2)],
        devices=[{"device_id": 0, "pid": None, "name": "A"}, {"device_id": 1, "pid": None}],
        processes=PIDS,
    )


def test_a_process_keeps_its_own_rows_only():
    got = two_processes().filter(pid=2)
    assert starts(got.gpu_faults) == [1]
    assert starts(got.migrations) == [3, 4]
    assert starts(got.cpu_faults) == [7]
    assert starts(got.api_calls) == []
    assert starts(got.nvtx_ranges) == [3]
    assert starts(got.processes, "pid") == [2]
    assert starts(got.devices, "device_id") == [0, 1]  # devices of any process stay


def test_a_gpu_keeps_its_rows_and_rows_that_have_no_gpu():
    got = two_processes().filter(device=1)
    assert starts(got.gpu_faults) == [1]
    assert starts(got.migrations) == [4]
    assert starts(got.cpu_faults) == [7]
    assert starts(got.api_calls) == [8]
    assert starts(got.nvtx_ranges) == [0, 3]
    assert got.allocations.collect().height == 1
    assert starts(got.devices, "device_id") == [1]


def test_several_values_are_any_of_them():
    whole = two_processes()
    assert starts(whole.filter(pid=[1, 2]).migrations) == [2, 3, 4]
    assert starts(whole.filter(device=(0, 1)).migrations) == [2, 3, 4]
    assert starts(whole.filter(pid=iter([2])).migrations) == [3, 4]


def test_an_absent_value_names_those_that_are_present():
    whole = two_processes()
    with pytest.raises(UnknownFilterValueError, match=r"no process 3\. It has: 1, 2") as pid:
        whole.filter(pid=[1, 3])
    assert pid.value.present == [1, 2]
    with pytest.raises(UnknownFilterValueError, match=r"no GPU 7\. It has: 0, 1"):
        whole.filter(device=7)
    with pytest.raises(UnknownFilterValueError, match=r"'stop'.*step"):
        whole.filter(nvtx="stop")


def test_a_trace_without_ranges_says_how_to_record_them():
    with pytest.raises(NoFilterTableError, match="--trace=cuda,nvtx"):
        trace(kernels=[event(0, 1)]).filter(nvtx="step")


def test_ranges_of_another_process_only_are_not_a_trace_without_ranges():
    whole = trace(processes=PIDS, nvtx_ranges=[span(0, 10, "step", pid=2)], devices=GPUS)
    with pytest.raises(UnknownFilterValueError):
        whole.filter(pid=1, nvtx="step")


def test_filters_combine_in_any_order():
    whole = two_processes()
    at_once = whole.filter(pid=2, device=1, time=(0, 4), nvtx="step")
    one_by_one = whole.filter(time=(0, 4)).filter(device=1).filter(pid=2).filter(nvtx="step")
    for got in (at_once, one_by_one):
        assert got.windows == ((3, 4),)
        assert starts(got.migrations) == []  # the row at 4 is on GPU 1, the one at 3 is not
        assert starts(got.nvtx_ranges) == [3]
    assert starts(whole.filter(pid=2, time=(0, 4)).migrations) == [3]
    assert starts(whole.filter(time=(0, 4)).filter(time=(2, 9)).migrations) == [2, 3]
    assert whole.filter(time=(0, 2)).filter(time=(3, 9)).windows == ()


def test_a_filter_leaves_the_trace_itself_alone():
    whole = two_processes()
    whole.filter(pid=1, time=(0, 1))
    assert whole.windows is None
    assert starts(whole.migrations) == [2, 3, 4]


def named():
    return trace(
        nvtx_ranges=[
            span(0, 10, "fwd"),
            span(20, 30, "fwd", domain="lib"),
            span(40, 50, "fwd"),
            span(60, 70, "fwd/1"),
            span(80, 90, "io/read"),
            span(100, 110, "io/read"),
            span(120, 130, "me@home"),
            span(140, 150, "me@home", domain="lib"),
            span(160, 170, "fwd@lib"),
            span(180, 180, "instant"),
        ],
        kernels=[event(start, start + 1) for start in range(5, 200, 10)],
    )


@pytest.mark.parametrize(
    ("wanted", "windows"),
    [
        ("fwd", ((0, 10), (20, 30), (40, 50))),
        ("fwd/0", ((0, 10),)),
        ("fwd/2", ((40, 50),)),
        ("fwd/1", ((60, 70),)),  # the whole text as a name comes first
        ("io/read", ((80, 90), (100, 110))),
        ("io/read/1", ((100, 110),)),
        ("me@home", ((120, 130), (140, 150))),
        ("me@home/0", ((120, 130),)),
        ("me@home@lib", ((140, 150),)),
        ("me@home@lib/0", ((140, 150),)),
        ("fwd@lib", ((160, 170),)),
        ("instant", ()),  # no length, no time
    ],
)
def test_a_range_is_named_with_its_domain_and_index(wanted, windows):
    got = named().filter(nvtx=wanted)
    assert got.windows == windows
    assert starts(got.kernels) == [start + 5 for start, _ in windows]


def test_a_domain_picks_among_ranges_of_one_name():
    ranges = [span(0, 10, "fwd"), span(20, 30, "fwd", domain="lib")]
    assert trace(nvtx_ranges=ranges).filter(nvtx="fwd@lib").windows == ((20, 30),)


@pytest.mark.parametrize(
    "wanted", ["fwd/9", "fwd@none", "FWD", "io", "read", "fwd/x", "", "/0", "@"]
)
def test_a_range_that_is_not_there_is_refused(wanted):
    with pytest.raises(UnknownFilterValueError, match="fwd"):
        named().filter(nvtx=wanted)


def test_overlapping_instances_are_one_window():
    ranges = [span(0, 10, "a"), span(5, 20, "a"), span(20, 25, "a"), span(26, 30, "a")]
    assert trace(nvtx_ranges=ranges).filter(nvtx="a").windows == ((0, 25), (26, 30))


def test_busy_time_is_clipped_at_the_edges():
    whole = trace(
        migrations=[move(0, 100), move(50, 150)],
        gpu_faults=[event(90, 120)],
        kernels=[event(10, 30, is_graph_launch=False), event(140, 200, is_graph_launch=False)],
        devices=GPUS,
    )
    got = totals(whole.filter(time=(100, 160)))
    # no migration starts in the window, but one runs through 50 ns of it
    assert got["counts"]["migrations"] == 0
    assert got["migrations"]["busy_ns"] == 50
    assert got["gpu_faults"]["busy_ns"] == 20
    assert got["kernels"]["busy_ns"] == 20
    assert got["kernels"]["n"] == 1


def test_busy_time_of_a_process_is_that_process_whatever_the_order_of_filters():
    whole = trace(
        migrations=[move(0, 100, pid=1), move(150, 180, pid=2)], processes=PIDS, devices=GPUS
    )
    for got in (
        whole.filter(time=(50, 170)).filter(pid=1),
        whole.filter(pid=1).filter(time=(50, 170)),
        whole.filter(pid=1, time=(50, 170)),
    ):
        assert totals(got)["migrations"]["busy_ns"] == 50


def test_the_parts_of_a_split_add_up_to_the_whole():
    whole = trace(
        migrations=[move(0, 30, 4096), move(10, 20, 8192), move(20, 60, 4096), move(59, 61, 65536)],
        devices=GPUS,
    )
    parts = [totals(whole.filter(time=w)) for w in ((None, 10), (10, 20), (20, 59), (59, None))]
    want = totals(whole)
    assert [part["counts"]["migrations"] for part in parts] == [1, 1, 1, 1]
    moved = [group["bytes"] for part in parts for group in part["migrations"]["groups"]]
    assert sum(moved) == want["migrations"]["groups"][0]["bytes"] == 81_920
    busy = [part["migrations"]["busy_ns"] for part in parts]
    assert busy == [10, 10, 39, 2]
    assert sum(busy) == want["migrations"]["busy_ns"] == 61


SMALL = st.integers(0, 40)
INTERVALS = st.lists(st.tuples(SMALL, st.integers(0, 12)), max_size=12)


@given(rows=INTERVALS, instances=INTERVALS)
def test_a_union_of_windows_keeps_what_a_loop_would_keep(rows, instances):
    spans = [span(start, start + length, "w") for start, length in instances]
    spans.append(span(60, 61, "w"))
    inside = {ns for s in spans for ns in range(s["start_ns"], s["end_ns"])}
    whole = trace(
        migrations=[move(start, start + length) for start, length in rows],
        allocations=[held(start, start + length, va) for va, (start, length) in enumerate(rows)],
        nvtx_ranges=spans,
    )
    got = whole.filter(nvtx="w")
    assert starts(got.migrations) == sorted(start for start, _ in rows if start in inside)
    touching = {
        va
        for va, (start, length) in enumerate(rows)
        if inside & set(range(start, start + max(length, 1)))
    }
    assert set(starts(got.allocations, "va")) == touching
    busy = {ns for start, length in rows for ns in range(start, start + length)} & inside
    found = busy_by_group(got.unwindowed.migrations, got.windows, by=())
    assert found["covered_ns"].item() == len(busy)


@given(rows=INTERVALS, cut=SMALL)
def test_no_row_is_in_two_parts_or_in_none(rows, cut):
    whole = trace(migrations=[move(start, start + length) for start, length in rows])
    left, right = whole.filter(time=(None, cut)), whole.filter(time=(cut, None))
    assert starts(left.migrations) + starts(right.migrations) == starts(whole.migrations)
