from __future__ import annotations

from random import Random

import exports as x
import pytest
from conftest import SOAK


@pytest.fixture
def ranges_of(trace_of):
    """Ranges of NVTX rows: name to (start, end, depth, name of the parent, closed)."""

    def read(*rows, kernel_end=1000):
        export = x.Export().add(x.NVTX, *rows).add(x.KERNEL, x.kernel(0, kernel_end))
        return trace_of(export).nvtx_ranges.collect()

    return read


def nesting(ranges):
    names = dict(ranges.select("range_id", "name").rows())
    rows = ranges.select("name", "depth", "parent").rows()
    return {name: (depth, names.get(parent)) for name, depth, parent in rows}


def test_nested_ranges_know_their_depth_and_parent(ranges_of):
    got = ranges_of(
        x.nvtx(0, 100, "a"), x.nvtx(10, 50, "b"), x.nvtx(20, 30, "c"), x.nvtx(60, 90, "d")
    )
    assert nesting(got) == {"a": (0, None), "b": (1, "a"), "c": (2, "b"), "d": (1, "a")}
    assert got["kind"].unique().to_list() == ["push_pop"]
    assert got["closed"].all()


def test_siblings_that_touch_are_not_nested(ranges_of):
    got = ranges_of(x.nvtx(0, 10, "a"), x.nvtx(10, 20, "b"), x.nvtx(20, 30, "c"))
    assert nesting(got) == {"a": (0, None), "b": (0, None), "c": (0, None)}


def test_rows_in_the_order_of_their_ends_nest_all_the_same(ranges_of):
    got = ranges_of(x.nvtx(20, 30, "c"), x.nvtx(10, 50, "b"), x.nvtx(0, 100, "a"))
    assert nesting(got) == {"a": (0, None), "b": (1, "a"), "c": (2, "b")}
    assert got["name"].to_list() == ["a", "b", "c"]
    assert got["range_id"].to_list() == [0, 1, 2]


def test_an_inner_range_may_begin_or_end_with_the_outer_one(ranges_of):
    got = ranges_of(
        x.nvtx(0, 10, "first"),
        x.nvtx(0, 100, "outer"),
        x.nvtx(90, 100, "last"),
        x.nvtx(100, 101, "next"),
    )
    assert nesting(got) == {
        "outer": (0, None),
        "first": (1, "outer"),
        "last": (1, "outer"),
        "next": (0, None),
    }


def test_a_range_of_no_length_is_inside_and_holds_nothing(ranges_of):
    got = ranges_of(x.nvtx(0, 100, "a"), x.nvtx(50, 50, "zero"), x.nvtx(51, 60, "b"))
    assert nesting(got) == {"a": (0, None), "zero": (1, "a"), "b": (1, "a")}
    assert got.filter(name="zero").select("start_ns", "end_ns").row(0) == (50, 50)


def test_a_range_of_no_length_at_the_end_of_another_is_not_inside(ranges_of):
    got = ranges_of(x.nvtx(0, 100, "a"), x.nvtx(100, 100, "zero"))
    assert nesting(got) == {"a": (0, None), "zero": (0, None)}


def test_threads_nest_by_themselves(ranges_of):
    got = ranges_of(
        x.nvtx(0, 100, "a", tid=1),
        x.nvtx(10, 90, "b", tid=2),
        x.nvtx(20, 30, "a1", tid=1),
        x.nvtx(20, 30, "b1", tid=2),
    )
    assert nesting(got) == {"a": (0, None), "b": (0, None), "a1": (1, "a"), "b1": (1, "b")}
    assert sorted(got["tid"].unique().to_list()) == [1, 2]


def test_threads_of_two_processes_with_one_number_nest_by_themselves(ranges_of):
    got = ranges_of(x.nvtx(0, 100, "a", pid=1, tid=5), x.nvtx(10, 90, "b", pid=2, tid=5))
    assert nesting(got) == {"a": (0, None), "b": (0, None)}


def test_domains_nest_by_themselves(ranges_of):
    got = ranges_of(
        x.nvtx(0, 0, "lib", kind=75, domain=1),
        x.nvtx(0, 100, "a"),
        x.nvtx(10, 90, "b", domain=1),
        x.nvtx(20, 30, "a1"),
        x.nvtx(20, 30, "b1", domain=1),
    )
    assert nesting(got) == {"a": (0, None), "b": (0, None), "a1": (1, "a"), "b1": (1, "b")}
    domains = dict(got.select("name", "domain").rows())
    assert domains == {"a": None, "a1": None, "b": "lib", "b1": "lib"}


def test_started_and_ended_ranges_take_no_part_in_nesting(ranges_of):
    got = ranges_of(
        x.nvtx(0, 100, "a"),
        x.nvtx(5, 200, "s", kind=60),
        x.nvtx(10, 20, "b"),
        x.nvtx(30, 40, "t", kind=71),
    )
    assert nesting(got) == {"a": (0, None), "s": (0, None), "b": (1, "a"), "t": (0, None)}
    kinds = dict(got.select("name", "kind").rows())
    assert kinds == {"a": "push_pop", "s": "start_end", "b": "push_pop", "t": "start_end"}


def test_a_range_that_was_never_closed_ends_with_the_trace(ranges_of):
    got = ranges_of(x.nvtx(0, None, "open"), x.nvtx(10, 20, "inner"), kernel_end=777)
    assert got.select("name", "start_ns", "end_ns", "closed").rows() == [
        ("open", 0, 777, False),
        ("inner", 10, 20, True),
    ]
    assert nesting(got) == {"open": (0, None), "inner": (1, "open")}


def test_a_range_opened_after_every_event_has_no_length(ranges_of):
    got = ranges_of(x.nvtx(2000, None, "late"), kernel_end=777)
    assert got.select("start_ns", "end_ns", "closed").row(0) == (2000, 2000, False)


def test_an_unclosed_range_ends_no_earlier_than_other_ranges(ranges_of):
    got = ranges_of(x.nvtx(0, None, "open"), x.nvtx(10, 5000, "long"), kernel_end=777)
    assert got.filter(name="open")["end_ns"].item() == 5000


@pytest.mark.parametrize("kind", [33, 75, 99])
def test_an_unclosed_range_ends_no_later_than_the_last_event(ranges_of, kind):
    """Rows of other kinds are no events, whatever times they have; and a mark has no end."""
    other = x.nvtx(5000, 9000, "no event", kind=kind)
    got = ranges_of(x.nvtx(10, None, "open"), other, x.nvtx(20, 8000, "mark", kind=34))
    assert got["end_ns"].to_list() == [1000]


def test_a_name_is_the_text_then_the_registered_text_then_a_placeholder(trace_of):
    export = x.Export()
    export.strings |= {7: "registered"}
    export.add(
        x.NVTX,
        x.nvtx(0, 1, "text"),
        x.nvtx(10, 11, text_id=7),
        x.nvtx(20, 21, "both", text_id=7),
        x.nvtx(30, 31),
        x.nvtx(40, 41, text_id=99),
    )
    got = trace_of(export).nvtx_ranges.collect()
    assert got["name"].to_list() == ["text", "registered", "both", "(unnamed)", "(unnamed)"]


def test_a_domain_is_named_by_its_own_process(trace_of):
    export = x.Export()
    export.strings |= {7: "beta"}
    export.add(
        x.NVTX,
        x.nvtx(0, None, "alpha", kind=75, domain=1, pid=1),
        x.nvtx(0, None, kind=75, domain=1, pid=2, text_id=7),
        x.nvtx(10, 20, "a", domain=1, pid=1),
        x.nvtx(10, 20, "b", domain=1, pid=2),
        x.nvtx(10, 20, "c", domain=2, pid=1),
        x.nvtx(10, 20, "d", domain=0, pid=1),
        x.nvtx(30, None, "m", kind=34, domain=1, pid=2),
    )
    got = trace_of(export)
    domains = dict(got.nvtx_ranges.select("name", "domain").collect().rows())
    assert domains == {"a": "alpha", "b": "beta", "c": None, "d": None}
    assert got.nvtx_marks.select("name", "domain").collect().rows() == [("m", "beta")]


def test_marks_are_instants_and_other_rows_are_neither(trace_of):
    export = x.Export().add(
        x.NVTX,
        x.nvtx(5, None, "mark", kind=34),
        x.nvtx(1, None, "category", kind=33),
        x.nvtx(2, None, "thread name", kind=39),
        x.nvtx(3, None, "domain", kind=75, domain=4),
        x.nvtx(6, 7, "range"),
        x.nvtx(8, 9, "made up", kind=123),
    )
    got = trace_of(export)
    assert got.nvtx_marks.select("start_ns", "name", "pid", "tid").collect().rows() == [
        (5, "mark", x.PID, x.PID)
    ]
    assert got.nvtx_ranges.collect()["name"].to_list() == ["range"]


def test_rows_that_are_not_events_do_not_make_nvtx_recorded_or_long(trace_of):
    export = x.Export(options={"COLLECT_NVTX_TRACE": None})
    export.add(x.NVTX, x.nvtx(1, None, "thread name", kind=39))
    got = trace_of(export)
    assert got.nvtx_ranges.collect().height == 0
    assert got.info.capture["nvtx"].answer == "unknown"


def swept(rows):
    """Depth and parent by a walk over starts and ends: a parent is the last range one level up."""
    places = sorted(range(len(rows)), key=lambda i: (rows[i][0], -rows[i][1]))
    moments = [(max(rows[i][1], rows[i][0] + 1), -1, n) for n, i in enumerate(places)]
    moments += [(rows[i][0], 1, n) for n, i in enumerate(places)]
    depth, last, found = 0, {}, {}
    for _, step, n in sorted(moments):
        if step < 0:
            depth -= 1
            continue
        found[n] = (depth, last.get(depth - 1))
        last[depth] = n
        depth += 1
    return [found[n] for n in range(len(rows))]


@pytest.mark.parametrize("seed", range(200 if SOAK else 12))
def test_ranges_that_cross_and_repeat_nest_as_a_walk_over_them_says(ranges_of, seed):
    random = Random(seed)
    rows = []
    for _ in range(random.choice((1, 5, 40))):
        start = random.randrange(30)
        rows.append((start, start + random.choice((0, 1, 5, 25))))
    got = ranges_of(*(x.nvtx(start, end, "a") for start, end in rows))
    assert got.select("depth", "parent").rows() == swept(rows)


def test_ranges_whose_thread_cannot_be_read_nest_among_themselves(ranges_of):
    rows = [x.nvtx(0, 100, "a"), x.nvtx(10, 50, "b"), x.nvtx(20, 30, "c")]
    lost = [row | {"globalTid": None, "text": f"lost {row['text']}"} for row in rows]
    assert nesting(ranges_of(*rows, *lost)) == {
        "a": (0, None),
        "b": (1, "a"),
        "c": (2, "b"),
        "lost a": (0, None),
        "lost b": (1, "lost a"),
        "lost c": (2, "lost b"),
    }


@pytest.mark.parametrize("n", [3000, *([100_000] if SOAK else [])])
def test_a_program_that_never_closes_its_ranges_nests_as_deep_as_it_has_ranges(ranges_of, n):
    got = ranges_of(*(x.nvtx(i, None, "step") for i in range(n)), kernel_end=n)
    assert got["depth"].to_list() == list(range(n))
    assert got["parent"].to_list() == [None, *range(n - 1)]
