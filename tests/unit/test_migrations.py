from __future__ import annotations

import exports as x
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nsan
from nsan.analysis.migrations import GROUPS, cut_groups, migrations_by_group
from nsan.schema import MIGRATIONS


def moved(*rows, **more):
    return x.Export(**more).add(x.MEMCPY, *rows)


def groups(document):
    rows = document["migrations"]["groups"]
    return {tuple(row[key] for key in GROUPS): (row["n"], row["bytes"]) for row in rows}


def test_migrations_are_split_by_direction_cause_gpu_and_process(summary_of):
    got = summary_of(
        moved(
            x.migration(0, 10, 4096),
            x.migration(20, 30, 8192),
            x.migration(40, 50, 4096, cause=x.PREFETCH),
            x.migration(60, 70, 4096, kind=x.DTOH),
            x.migration(80, 90, 4096, device=1),
            x.migration(100, 110, 4096, pid=7),
            x.migration(120, 130, 65536, kind=x.DTOD, cause=x.USER),
        )
    )
    assert groups(got) == {
        ("htod", "coherence", 0, x.PID): (2, 12288),
        ("htod", "prefetch", 0, x.PID): (1, 4096),
        ("dtoh", "coherence", 0, x.PID): (1, 4096),
        ("htod", "coherence", 1, x.PID): (1, 4096),
        ("htod", "coherence", 0, 7): (1, 4096),
        ("dtod", "user", 0, x.PID): (1, 65536),
    }
    migrations = got["migrations"]
    assert (migrations["n"], migrations["bytes"]) == (7, 94208)
    ways = [migrations[f"{way}_bytes"] for way in ("htod", "dtoh", "dtod")]
    assert ways == [24576, 4096, 65536]
    assert migrations["by_cause"] == {
        "user": {"n": 1, "bytes": 65536},
        "coherence": {"n": 5, "bytes": 24576},
        "prefetch": {"n": 1, "bytes": 4096},
    }
    assert migrations["groups"][0]["direction"] == "dtod"  # most bytes first


def test_smallest_and_largest_rows_and_addresses_are_of_the_group(summary_of):
    got = summary_of(
        moved(
            x.migration(0, 10, 4096, x.VA + x.MIB),
            x.migration(20, 30, 65536, x.VA),
            x.migration(40, 50, 4096, -(1 << 47), kind=x.DTOH),
        )
    )["migrations"]
    [htod] = [row for row in got["groups"] if row["direction"] == "htod"]
    assert (htod["min_bytes"], htod["max_bytes"]) == (4096, 65536)
    assert (htod["min_va"], htod["max_va"]) == ("0x00007f0000000000", "0x00007f0000100000")
    # addresses are compared unsigned
    assert (got["min_va"], got["max_va"]) == ("0x00007f0000000000", "0xffff800000000000")


@pytest.mark.parametrize(
    ("number", "label"),
    [
        (0, "unknown"),
        (1, "user"),
        (2, "coherence"),
        (3, "prefetch"),
        (4, "eviction"),
        (5, "access_counters"),
        (9, "other"),
        (-1, "other"),
        (None, "unknown"),
    ],
)
def test_a_cause_is_decided_by_its_number_and_keeps_it(trace_of, number, label):
    got = trace_of(moved(x.migration(0, 10, 4096, cause=number))).migrations.collect()
    assert got.select("cause", "cause_id").row(0) == (label, number)


def test_a_rate_is_bytes_over_busy_time_in_floats(summary_of):
    got = summary_of(
        moved(
            x.migration(0, 2_500_000_000, 100_000_000_000),
            x.migration(0, 405_544, 4096, kind=x.DTOH),
        )
    )["migrations"]["groups"]
    assert got[0]["bytes_per_s"] == 40e9
    assert got[1]["bytes_per_s"] == pytest.approx(10_100_013.81, abs=0.01)


def test_the_busy_time_of_a_rate_is_a_union(summary_of):
    [got] = summary_of(moved(x.migration(0, 100, 4096), x.migration(50, 200, 4096)))["migrations"][
        "groups"
    ]
    assert got["busy_ns"] == 200
    assert got["bytes_per_s"] == 8192 / 200 * 1e9


@pytest.mark.parametrize(
    ("window", "busy", "has_rate"),
    [((300, 600), 300, False), ((0, 600), 600, False), ((0, 1000), 1000, True), (None, 1000, True)],
)
def test_a_rate_is_null_where_a_window_cuts_a_copy(trace_of, window, busy, has_rate):
    # The first copy runs through: within 300 to 600 starts a page only, in 300 ns of its time.
    trace = trace_of(moved(x.migration(0, 1000, 1 << 30), x.migration(400, 500, 4096)))
    got = nsan.summary(trace.filter(time=window) if window else trace)["migrations"]["groups"][0]
    assert got["busy_ns"] == busy
    assert got["bytes_per_s"] == (((1 << 30) + 4096) / 1000 * 1e9 if has_rate else None)
    assert "is_cut" not in got


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=6),
    st.lists(st.integers(0, 40), max_size=6, unique=True).map(sorted),
)
def test_a_group_is_cut_where_a_row_holds_time_on_both_sides_of_an_edge(rows, edges):
    windows = list(zip(edges[::2], edges[1::2], strict=False))
    frame = MIGRATIONS.empty().collect().clear(len(rows))
    frame = frame.with_columns(
        pl.Series("start_ns", [start for start, _ in rows]),
        pl.Series("end_ns", [start + length for start, length in rows]),
        pl.Series("pid", range(len(rows)), pl.UInt32),
    )
    bounds = [edge for window in windows for edge in window]
    expected = {
        i
        for i, (start, length) in enumerate(rows)
        if any({edge - 1, edge} <= set(range(start, start + length)) for edge in bounds)
    }
    assert set(cut_groups(frame.lazy(), windows or None)["pid"]) == expected


def test_a_copy_of_no_length_has_no_rate_but_counts_in_bytes(summary_of):
    got = summary_of(moved(x.migration(10, 10, 4096)))["migrations"]
    assert (got["n"], got["bytes"], got["busy_ns"]) == (1, 4096, 0)
    assert got["groups"][0]["bytes_per_s"] is None


def test_a_row_that_ends_before_it_starts_counts_with_no_length(summary_of):
    got = summary_of(moved(x.migration(10, 9, 4096), x.migration(20, 25, 4096)))["migrations"]
    assert (got["n"], got["bytes"], got["busy_ns"]) == (2, 8192, 5)


def test_explicit_copies_are_not_migrations(summary_of, tmp_path):
    import nsan

    export = moved(
        x.migration(0, 10, 4096),
        x.copy(20, 30, 1_000_000, kind=1),
        x.copy(40, 50, 2_000_000, kind=2),
        x.copy(60, 70, 3_000_000, kind=8),
        x.copy(80, 90, 500, kind=99),
    )
    got = summary_of(export)
    assert (got["migrations"]["n"], got["migrations"]["bytes"]) == (1, 4096)
    copies = nsan.open_trace(tmp_path / "built-0.sqlite").copies.collect()
    assert copies.select("kind", "kind_id", "bytes").rows() == [
        ("htod", 1, 1_000_000),
        ("dtoh", 2, 2_000_000),
        ("dtod", 8, 3_000_000),
        ("other", 99, 500),
    ]


def test_a_row_of_several_copies_is_that_many_operations_and_once_its_bytes(trace_of):
    version = next(v for v in x.versions() if "copyCount" in x.Export(v).columns(x.MEMCPY))
    got = trace_of(
        moved(x.copy(0, 10, 4096, count=3), x.copy(20, 30, 100, count=1), version=version)
    ).copies.collect()
    assert got["n_operations"].to_list() == [3, 1]
    assert got["bytes"].to_list() == [4096, 100]


def test_an_export_without_a_count_of_copies_has_one_per_row(trace_of):
    got = trace_of(moved(x.copy(0, 10, 4096), version="2022.2.1")).copies.collect()
    assert got["n_operations"].to_list() == [1]


def test_a_size_that_cannot_be_read_makes_its_total_unknown_and_no_other(summary_of):
    got = summary_of(moved(x.migration(0, 10, "many"), x.migration(20, 30, 8192, kind=x.DTOH)))[
        "migrations"
    ]
    assert (got["n"], got["bytes"], got["htod_bytes"], got["dtoh_bytes"]) == (2, None, None, 8192)
    [htod] = [row for row in got["groups"] if row["direction"] == "htod"]
    assert (htod["n"], htod["bytes"], htod["bytes_per_s"]) == (1, None, None)


def test_a_missing_address_makes_the_extent_unknown(summary_of):
    got = summary_of(moved(x.migration(0, 10, 4096, None), x.migration(20, 30, 4096)))["migrations"]
    assert (got["min_va"], got["max_va"], got["bytes"]) == (None, None, 8192)


def test_migrations_without_a_process_are_counted(summary_of):
    row = x.migration(0, 10, 4096) | {"globalPid": None}
    got = summary_of(moved(row, x.migration(20, 30, 4096)))
    assert groups(got) == {
        ("htod", "coherence", 0, None): (1, 4096),
        ("htod", "coherence", 0, x.PID): (1, 4096),
    }
    assert [row["busy_ns"] for row in got["migrations"]["groups"]] == [10, 10]


def test_no_migrations_are_no_groups():
    assert migrations_by_group(MIGRATIONS.empty()).collect().height == 0


ROWS = st.lists(
    st.tuples(
        st.sampled_from(["htod", "dtoh", "dtod"]),
        st.sampled_from(["coherence", "prefetch", "other"]),
        st.sampled_from([0, 1, None]),
        st.integers(0, 1 << 40),
    ),
    max_size=20,
)


@given(rows=ROWS, seed=st.randoms(use_true_random=False))
def test_no_row_and_no_byte_is_lost_and_order_does_not_matter(rows, seed):
    def grouped(some):
        schema = MIGRATIONS.schema
        names = ("direction", "cause", "device_id", "bytes")
        frame = MIGRATIONS.empty().collect().clear(len(some))
        columns = [
            pl.Series(name, [row[i] for row in some], dtype=schema[name])
            for i, name in enumerate(names)
        ]
        return migrations_by_group(frame.with_columns(columns).lazy()).collect()

    got = grouped(rows)
    assert got["n"].sum() == len(rows)
    assert got["bytes"].sum() == sum(row[3] for row in rows)
    shuffled = list(rows)
    seed.shuffle(shuffled)
    assert got.equals(grouped(shuffled))
