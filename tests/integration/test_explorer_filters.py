"""What the filters of the explorer keep, against rows worked out by hand and plain loops."""

from __future__ import annotations

import os
import random

import polars as pl
import pytest

pytest.importorskip("anywidget", reason="the explorer needs the extra lab")

from made_traces import (
    BLOCK,
    MIB,
    copy,
    cpu_fault,
    fault,
    kernel,
    made,
    nvtx,
    opened,
)

from nsan.widgets.refaulted import refault_fact

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 10


def kept(explorer):
    rows = explorer.selection.select(
        pl.col("table").cast(pl.String), "start_ns", "pid", "device_id"
    )
    return sorted(rows.rows(), key=str)


def lane(browser, name):
    return {each["id"]: each for each in browser.look()[0]["lanes"]}[name]


def test_a_kernel_filter_keeps_what_starts_while_it_runs_on_the_same_gpu():
    rows = [copy(t, device_id=device) for device in (0, 1) for t in (5, 105)]
    kernels = [kernel(0, 50, device_id=0), kernel(100, 150, device_id=1), kernel(0, 9, "other")]
    explorer, _ = opened(made(migrations=rows, kernels=kernels))
    explorer.filters = {"kernel": ["k"]}
    assert kept(explorer) == [("migrations", 105, 1, 1), ("migrations", 5, 1, 0)]
    explorer.filters = {"kernel": []}
    assert kept(explorer) == []


def test_a_kernel_filter_keeps_the_cpu_faults_of_its_process_whatever_the_gpu():
    faults = [cpu_fault(t, pid=pid) for pid in (1, 2) for t in (5, 105, 205)]
    kernels = [kernel(0, 50), kernel(100, 150, device_id=1), kernel(200, 250, pid=2)]
    trace = made(cpu_faults=faults, kernels=kernels, migrations=[copy(5), copy(5, pid=2)])
    explorer, _ = opened(trace)
    explorer.filters = {"kernel": ["k"]}
    assert kept(explorer) == [
        ("cpu_faults", 105, 1, None),
        ("cpu_faults", 205, 2, None),
        ("cpu_faults", 5, 1, None),
        ("migrations", 5, 1, 0),
    ]


def test_an_nvtx_filter_keeps_cpu_faults_and_agrees_with_the_filter_of_the_trace():
    faults = [cpu_fault(t) for t in (5, 15, 25)]
    trace = made(
        cpu_faults=faults,
        migrations=[copy(t, device_id=t % 2) for t in (4, 14, 15, 24)],
        nvtx_ranges=[nvtx(10, 20), nvtx(0, 30, "whole")],
    )
    explorer, _ = opened(trace)
    explorer.filters = {"nvtx": ["r"]}
    assert kept(explorer) == [
        ("cpu_faults", 15, 1, None),
        ("migrations", 14, 1, 0),
        ("migrations", 15, 1, 1),
    ]
    part = trace.filter(nvtx="r")
    counts = [
        getattr(part, name).collect().height for name in ("cpu_faults", "gpu_faults", "migrations")
    ]
    assert sum(counts) == explorer.selection.height


def test_a_kernel_and_an_nvtx_filter_keep_what_both_keep():
    trace = made(
        migrations=[copy(t) for t in (5, 15, 25, 35)],
        kernels=[kernel(0, 20)],
        nvtx_ranges=[nvtx(10, 30)],
    )
    explorer, _ = opened(trace)
    explorer.filters = {"kernel": ["k"], "nvtx": ["r"]}
    assert kept(explorer) == [("migrations", 15, 1, 0)]


def test_a_kernel_filter_is_what_a_plain_loop_finds():
    chance = random.Random(5)
    for _ in range(N):
        kernels = [
            kernel(
                start := chance.randrange(500),
                start + chance.randrange(1, 60),
                chance.choice("ab"),
                pid=chance.choice([1, 2]),
                device_id=chance.choice([0, 1, None]),
            )
            for _ in range(chance.randrange(1, 30))
        ]
        copies = [
            copy(
                chance.randrange(600), pid=chance.choice([1, 2]), device_id=chance.choice([0, 1, 2])
            )
            for _ in range(80)
        ]
        faults = [cpu_fault(chance.randrange(600), pid=chance.choice([1, 2])) for _ in range(30)]
        trace = made(
            migrations=copies, cpu_faults=faults, kernels=[*kernels, kernel(700, 701, "a")]
        )
        explorer, _ = opened(trace)
        explorer.filters = {"kernel": ["a"]}

        def runs(row, device, kernels=kernels):
            return any(
                each["name"] == "a"
                and each["pid"] == row["pid"]
                and device in ("any", each["device_id"])
                and each["start_ns"] <= row["start_ns"] < each["end_ns"]
                for each in kernels
            )

        wanted = [
            ("migrations", row["start_ns"], row["pid"], row["device_id"])
            for row in copies
            if runs(row, row["device_id"])
        ]
        wanted += [
            ("cpu_faults", row["start_ns"], row["pid"], None) for row in faults if runs(row, "any")
        ]
        assert kept(explorer) == sorted(wanted, key=str)


def test_the_lane_of_batches_holds_the_batches_of_the_rows_that_are_kept():
    faults = [
        fault(i * 10, i * 10 + 5, i * 4096, 1, access="read" if i % 2 else "write")
        for i in range(40)
    ]
    kernels = [kernel(0, 100), kernel(0, 400, "whole"), kernel(100, 200, device_id=1)]
    explorer, browser = opened(made(gpu_faults=faults, kernels=kernels))
    assert len(lane(browser, "batches")["items"]) == 40
    explorer.filters = {"access": ["read"]}
    items = lane(browser, "batches")["items"]
    assert [item[0] for item in items] == [i * 10 for i in range(1, 40, 2)]
    assert sum(lane(browser, "gpu_faults")["values"]) == explorer.selection.height == 20
    browser.tell(kind="pick", what="batch", id=items[3][4])
    assert explorer.picked == {"what": "batch", "id": 7}
    assert explorer.selection["start_ns"].to_list() == [70]
    explorer.picked, explorer.window = None, explorer.scene.extent
    explorer.filters = {"kernel": ["k"]}
    assert [item[0] for item in lane(browser, "batches")["items"]] == [i * 10 for i in range(10)]
    explorer.filters = {"kernel": ["k"], "access": ["write"], "pid": [1]}
    items = lane(browser, "batches")["items"]
    assert [item[4] for item in items] == [0, 2, 4, 6, 8]
    explorer.filters = {"cause": []}
    assert lane(browser, "batches")["items"] == []


def test_a_gpu_filter_empties_the_lanes_of_other_gpus():
    kernels = [kernel(0, 10), kernel(5, 15, device_id=1)]
    rows = [copy(0), copy(5, device_id=1)]
    explorer, browser = opened(made(kernels=kernels, migrations=rows, nvtx_ranges=[nvtx(0, 20)]))
    explorer.filters = {"device": [1]}
    assert lane(browser, "kernel-1-0")["items"] == []
    assert len(lane(browser, "kernel-1-1")["items"]) == 1
    assert len(lane(browser, "nvtx-0")["items"]) == 1


def test_the_panel_follows_the_filters():
    rows = [copy(0), copy(5, cause="prefetch"), copy(9, pid=2)]
    explorer, _ = opened(made(migrations=rows))
    explorer.picked = {"what": "box", "window": (0, 10)}

    def counts():
        return {label: text for label, text, _ in explorer.panel["facts"]}["migrations"]

    assert counts() == "3"
    explorer.filters = {"cause": ["prefetch"]}
    assert counts() == "1"
    explorer.filters = {"pid": [2]}
    assert counts() == "1"
    explorer.filters = {}
    assert counts() == "3"


REFAULTS = pl.DataFrame(
    {
        "time_ns": [10, 20, 30, 30],
        "pid": [1, 1, 1, 2],
        "to_device_id": [0, 1, 0, 0],
        "va": [0, BLOCK, 2 * BLOCK, 0],
        "bytes": [MIB, 2 * MIB, 4 * MIB, 8 * MIB],
    },
    schema={
        "time_ns": pl.Int64,
        "pid": pl.UInt32,
        "to_device_id": pl.UInt32,
        "va": pl.UInt64,
        "bytes": pl.Int64,
    },
)


@pytest.mark.parametrize(
    ("window", "keys", "places", "mib"),
    [
        ((0, 31), {}, None, 15),
        ((0, 30), {}, None, 3),
        ((10, 20), {}, None, 1),
        ((11, 31), {"pid": 1}, None, 6),
        ((0, 31), {"pid": 1, "device_id": 0}, None, 5),
        ((0, 31), {"device_id": 1}, None, 2),
        ((0, 31), {"pid": 1}, [(MIB // 2, BLOCK + MIB)], 1.5),
        ((0, 31), {"pid": 1}, [(2 * BLOCK + MIB, 2 * BLOCK + 3 * MIB)], 2),
        ((0, 31), {"pid": 1}, [(MIB, BLOCK)], 0),
    ],
)
def test_what_came_back_counts_by_time_process_gpu_and_address(window, keys, places, mib):
    trace = made()
    label, text, _ = refault_fact(trace, REFAULTS, window, keys, places)
    assert label == "came back after an eviction"
    amounts = {0: "0 B"}
    assert text == amounts.get(mib, f"{mib:.2f} MiB")


@pytest.mark.parametrize(
    ("filters", "mib"),
    [
        ({}, "15.00 MiB"),
        ({"pid": [1]}, "7.00 MiB"),
        ({"pid": []}, "0 B"),
        ({"pid": [1], "device": [0]}, "5.00 MiB"),
        ({"cause": ["coherence"]}, None),
        ({"kernel": ["k"]}, None),
        ({"allocation": []}, None),
        ({"access": []}, None),
    ],
)
def test_what_came_back_is_filtered_or_not_shown(filters, mib):
    rows = [copy(10), copy(20, device_id=1), copy(30), copy(30, pid=2)]
    explorer, _ = opened(made(migrations=rows, kernels=[kernel(0, 40)]))
    explorer.scene.refaults = REFAULTS
    explorer.filters = filters
    explorer.picked = {"what": "box", "window": (0, 31)}
    facts = {label: text for label, text, _ in explorer.panel["facts"]}
    assert facts.get("came back after an eviction") == mib
