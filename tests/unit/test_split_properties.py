"""Filters are exact: the parts of any split add up to the whole."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import exports as x
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nsan

few = settings(max_examples=max(8, settings().max_examples // 5))
"""An example costs an import; the split in time gets them all."""

PIDS = (11, 22)
DEVICES = (0, 1)
LAST_NS = 200

times = st.integers(0, LAST_NS)
lengths = st.integers(0, 60)
identities = st.tuples(st.sampled_from(PIDS), st.sampled_from(DEVICES))
pages = st.integers(0, 1200).map(lambda page: x.VA + page * 4096)
migrations = st.builds(
    lambda start, length, who, va, size, kind, cause: x.migration(
        start, start + length, size * 4096, va, kind=kind, cause=cause, pid=who[0], device=who[1]
    ),
    times,
    lengths,
    identities,
    pages,
    st.integers(1, 4),
    st.sampled_from([x.HTOD, x.DTOH, x.DTOD]),
    st.integers(0, 6),
)
gpu_faults = st.builds(
    lambda start, length, who, va, n: x.gpu_fault(
        start, start + length, va, n=n, pid=who[0], device=who[1]
    ),
    times,
    lengths,
    identities,
    pages,
    st.integers(1, 256),
)
kernels = st.builds(
    lambda start, length, who: x.kernel(start, start + length, pid=who[0], device=who[1]),
    times,
    lengths,
    identities,
)
cpu_faults = st.builds(
    lambda start, va, who: x.cpu_fault(start, va, pid=who[0]), times, pages, identities
)
ranges = st.builds(
    lambda start, length, name: x.nvtx(start, start + length, name, pid=PIDS[0]),
    times,
    lengths,
    st.sampled_from("ab"),
)


@st.composite
def captures(draw):
    """An export of a few rows of each kind, at least one of each process and GPU."""
    export = x.Export("2026.1")
    export.add(x.MEMCPY, *(x.migration(5, 9, 4096, pid=p, device=d) for p in PIDS for d in DEVICES))
    rows = {
        x.MEMCPY: migrations,
        x.GPU_FAULTS: gpu_faults,
        x.KERNEL: kernels,
        x.CPU_FAULTS: cpu_faults,
    }
    for table, row in rows.items():
        export.add(table, *draw(st.lists(row, max_size=8)))
    return export.add(x.NVTX, x.nvtx(20, 20, "a"), *draw(st.lists(ranges, max_size=5)))


cuts = st.lists(st.integers(-5, LAST_NS + 70), max_size=4).map(sorted)
windows = st.tuples(st.integers(-5, LAST_NS + 70), st.integers(-5, LAST_NS + 70))


@contextmanager
def opened(export):
    # A fixture's folder would be shared by all examples of a test.
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("NSAN_CACHE_DIR", f"{folder}/cache")
        yield nsan.open_trace(export.write(Path(folder) / "built.sqlite"))


COUNTS = {
    "migrations": ("n", "bytes", "htod_bytes", "dtoh_bytes", "dtod_bytes", "busy_ns"),
    "gpu_faults": ("n_rows", "n_page_faults", "busy_ns"),
    "cpu_faults": ("n",),
    "kernels": ("n", "busy_ns"),
}
"""The figures that must add up over the parts of a split."""


def figures(trace):
    summary = nsan.summary(trace)
    labels = summary["migrations"]["by_cause"] | summary["gpu_faults"]["by_access"]
    return {
        (part, name): summary[part][name] for part, names in COUNTS.items() for name in names
    } | {(label, name): n for label, row in labels.items() for name, n in row.items()}


def without_busy(found):
    """Two processes may use one GPU at a time: their busy times overlap."""
    return {key: value for key, value in found.items() if key[1] != "busy_ns"}


def added(parts):
    """Add dicts of numbers; a label without rows is in no part."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def answers(trace):
    summary = nsan.summary(trace)
    return {name: summary[name] for name in ("migrations", "gpu_faults", "cpu_faults", "kernels")}


@settings(max_examples=max(12, settings().max_examples // 2))
@given(captures(), cuts)
def test_any_split_of_the_time_line_adds_up(export, cuts):
    with opened(export) as trace:
        parts = [trace.filter(time=window) for window in pairwise([None, *cuts, None])]
        assert added([figures(part) for part in parts]) == figures(trace)


def _covered(rows, window):
    """Nanoseconds of a window in which a row runs, per GPU: counted one by one."""
    return len(
        {
            (row["deviceId"], ns)
            for row in rows
            for ns in range(max(row["start"], window[0]), min(row["end"], window[1]))
        }
    )


@few
@given(captures(), windows)
def test_a_window_holds_what_counting_by_hand_finds(export, window):
    rows = {x.CPU_FAULTS: [], x.GPU_FAULTS: [], x.KERNEL: []} | export.rows
    inside = {
        table: [row for row in rows[table] if window[0] <= row["start"] < window[1]]
        for table in (x.MEMCPY, x.GPU_FAULTS, x.CPU_FAULTS, x.KERNEL)
    }
    with opened(export) as trace:
        got = figures(trace.filter(time=window))
    assert {key: got[key] for key in got if key[0] in COUNTS and not key[1].startswith("d")} == {
        ("migrations", "n"): len(inside[x.MEMCPY]),
        ("migrations", "bytes"): sum(row["bytes"] for row in inside[x.MEMCPY]),
        ("migrations", "htod_bytes"): sum(
            row["bytes"] for row in inside[x.MEMCPY] if row["copyKind"] == x.HTOD
        ),
        ("migrations", "busy_ns"): _covered(rows[x.MEMCPY], window),
        ("gpu_faults", "n_rows"): len(inside[x.GPU_FAULTS]),
        ("gpu_faults", "n_page_faults"): sum(
            row["numberOfPageFaults"] for row in inside[x.GPU_FAULTS]
        ),
        ("gpu_faults", "busy_ns"): _covered(rows[x.GPU_FAULTS], window),
        ("cpu_faults", "n"): len(inside[x.CPU_FAULTS]),
        ("kernels", "n"): len(inside[x.KERNEL]),
        ("kernels", "busy_ns"): _covered(rows[x.KERNEL], window),
    }


@few
@given(captures(), windows, windows)
def test_two_windows_in_turn_are_their_intersection(export, first, second):
    both = (max(first[0], second[0]), min(first[1], second[1]))
    with opened(export) as trace:
        in_turn = answers(trace.filter(time=first).filter(time=second))
        assert in_turn == answers(trace.filter(time=both))


def _union(instances):
    merged = []
    for start, end in sorted(instances):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        elif start < end:
            merged.append([start, end])
    return merged


@few
@given(captures(), windows)
def test_a_range_is_the_union_of_its_instances(export, window):
    instances = [(r["start"], r["end"]) for r in export.rows[x.NVTX] if r["text"] == "a"]
    with opened(export) as trace:
        inside = trace.filter(nvtx="a")
        parts = [figures(trace.filter(time=tuple(piece))) for piece in _union(instances)]
        assert figures(inside) == (added(parts) or dict.fromkeys(figures(inside), 0))
        cut = [
            figures(trace.filter(time=tuple(piece)).filter(time=window))
            for piece in _union(instances)
        ]
        inside = figures(inside.filter(time=window))
        assert inside == (added(cut) or dict.fromkeys(inside, 0))


@few
@given(captures())
def test_a_split_by_process_adds_up(export):
    with opened(export) as trace:
        whole = without_busy(figures(trace))
        parts = [without_busy(figures(trace.filter(pid=pid))) for pid in PIDS]
        assert added(parts) == whole
        assert figures(trace.filter(pid=PIDS)) == figures(trace)


@few
@given(captures(), windows)
def test_a_split_by_gpu_adds_up_in_any_window(export, window):
    with opened(export) as trace:
        whole = trace.filter(time=window)
        got = added([figures(whole.filter(device=device)) for device in DEVICES])
        # CPU faults have no GPU and stay in every part.
        got[("cpu_faults", "n")] //= 2
        assert got == figures(whole)
        first = trace.filter(device=0).filter(time=window)
        assert answers(first) == answers(whole.filter(device=0))
