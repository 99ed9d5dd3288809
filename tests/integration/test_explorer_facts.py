"""What the explorer says: busy time, sizes that are not known, addresses, fault strips, what has no lane."""

from __future__ import annotations

import json
import re
import threading

import exports as x
import numpy as np
import polars as pl
import pytest

pytest.importorskip("anywidget", reason="the explorer needs the extra lab")

from made_traces import BLOCK, copy, cpu_fault, fault, kernel, made, not_recorded, nvtx, opened

from nsan.widgets import clusters as clusters_module
from nsan.widgets import messages
from nsan.widgets.compare import compare_view
from nsan.widgets.lanes import Spans
from nsan.widgets.names import distinct


def facts_of(explorer, **picked):
    explorer.picked = picked
    return {label: text for label, text, _ in explorer.panel["facts"]}


def test_copies_that_overlap_are_in_flight_for_the_wall_time_they_take_together():
    explorer, _ = opened(
        made(
            migrations=[
                copy(0, end_ns=1000),
                copy(0, BLOCK, end_ns=1000, direction="dtoh", cause="eviction"),
                copy(0, end_ns=1000, device_id=1, pid=2),
            ]
        )
    )
    facts = facts_of(explorer, what="box", window=(0, 1000))
    assert facts["copies in flight for"] == "1.000 us"
    assert facts["rate while in flight"] == "12.29 GB/s"  # 3 x 4096 byte in 1000 ns
    cut = facts_of(explorer, what="box", window=(0, 500))
    assert (cut["lasts"], cut["copies in flight for"]) == ("500 ns", "500 ns")
    assert cut["rate while in flight"] == "12.29 GB/s"


def test_a_gap_between_copies_is_not_busy():
    explorer, _ = opened(made(migrations=[copy(0), copy(5, device_id=1), copy(100, pid=2)]))
    facts = facts_of(explorer, what="box", window=(0, 105))
    assert facts["copies in flight for"] == "20 ns"  # 0 to 15, and 100 to 105


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ([None] * 3, "size unknown in 3 copies"),
        ([4096, None, 4096], "at least 8.00 KiB in 3 copies, 1 of unknown size"),
        ([4096, 0, 4096], "8.00 KiB in 3 copies"),
    ],
)
def test_a_size_that_is_not_known_is_never_0_byte(sizes, says):
    trace = made(migrations=[copy(i * 10, size=size) for i, size in enumerate(sizes)])
    explorer, browser = opened(trace)
    figures = {label: text for label, text, _ in explorer.config["figures"]}
    assert figures["HtoD, page fault"] == says
    assert facts_of(explorer, what="box", window=(0, 100))["HtoD, page fault"] == says
    view, _ = browser.look()
    assert ["HtoD, page fault", says, "recorded"] in view["facts"]
    notes = [note for note in explorer.config["notes"] if "without a readable size" in note]
    n = sizes.count(None)
    assert bool(notes) == bool(n)
    if n:
        assert notes[0].startswith(f"{n} migration{'s' * (n > 1)} without")


def test_the_sums_count_only_the_unknown_sizes_of_the_window():
    rows = [copy(0, size=None), copy(50, size=4096), copy(90, size=None, cause="prefetch")]
    explorer, browser = opened(made(migrations=rows))
    facts = {label: text for label, text, _ in browser.look([40, 60])[0]["facts"]}
    assert facts["HtoD, page fault"] == "4.00 KiB in 1 copy"
    explorer.filters = {"cause": ["prefetch"]}
    facts = {label: text for label, text, _ in browser.look([0, 100])[0]["facts"]}
    assert facts["HtoD, speculative prefetch"] == "size unknown in 1 copy"


def test_copies_of_unknown_size_are_drawn_and_the_legend_says_why():
    rows = [copy(i * 100, i * BLOCK, None if i % 2 else 4096) for i in range(3000)]
    _, browser = opened(made(migrations=rows))
    view, buffers = browser.look()
    assert (view["map"]["mode"], view["map"]["other"]) == ("raster", "size unknown")
    index, category, level = (
        np.frombuffer(each, kind) for each, kind in zip(buffers, ["<u4", "u1", "u1"], strict=True)
    )
    assert len(index) == view["map"]["n"] > 400
    assert level.min() >= 1
    assert set(level[category == 0]) == {1}
    assert (category == 0).sum() > 30
    known, _ = browser.look(by="density")
    assert "other" not in known["map"]


def test_a_cell_without_rows_and_value_stays_empty():
    cells = pl.DataFrame(
        {"column": [0, 1, 2, 3], "row": [0] * 4, "category": ["a"] * 4},
        schema_overrides={"column": pl.UInt16, "row": pl.UInt16},
    ).with_columns(value=pl.Series([0.0, None, 0.0, 8.0]), n=pl.Series([1, 1, 0, 0]))
    head, buffers = messages.raster(cells, (40, 40), ["a"])
    assert np.frombuffer(buffers[0], "<u4").tolist() == [0, 1, 3]
    assert list(buffers[1]) == [1, 0, 1]
    assert list(buffers[2]) == [1, 1, 255]
    assert head["n"] == 3


def test_fault_rows_and_cpu_faults_are_strips_of_their_own():
    cpu = [cpu_fault(t) for t in (5, 6, 7)]
    both = opened(made(gpu_faults=[fault(0, 15), fault(2, 15)], cpu_faults=cpu))[0]
    overview = both.config["overview"]
    assert (sum(overview["faults"]), sum(overview["cpu_faults"])) == (2, 3)
    assert overview["fault_label"] == "GPU fault rows"
    assert (overview["max_faults"], overview["max_cpu_faults"]) == (1, 1)
    capture = {"gpu_faults": not_recorded("--cuda-um-gpu-page-faults=true")}
    only = opened(made(capture, cpu_faults=cpu))[0].config["overview"]
    assert (sum(only["faults"]), only["fault_label"]) == (3, "CPU page faults")
    capture["cpu_faults"] = not_recorded("--cuda-um-cpu-page-faults=true")
    none = opened(made(capture, migrations=[copy(0)]))[0].config["overview"]
    assert (none["faults"], none["cpu_faults"], none["max_faults"]) == (None, None, 0)


def test_cpu_faults_that_were_not_recorded_are_named_in_facts_and_notes():
    switch = "--cuda-um-cpu-page-faults=true"
    explorer, browser = opened(made({"cpu_faults": not_recorded(switch)}, migrations=[copy(0)]))
    word = ["CPU page faults", f"not recorded ({switch})", ""]
    assert word in browser.look()[0]["facts"]
    assert (
        f"CPU page faults were not recorded. Record them with {switch}."
        in (explorer.config["notes"])
    )


def test_gpus_come_in_order_and_what_has_no_lane_is_named():
    ranges = [nvtx(i, 100 - i, depth=i) for i in range(7)]
    explorer, _ = opened(
        made(kernels=[kernel(0, 10, device_id=d) for d in range(12)], nvtx_ranges=ranges)
    )
    labels = [lane["label"] for lane in explorer.config["lanes"]]
    assert labels[:8] == [f"GPU {device} kernels" for device in range(8)]
    assert labels[8:12] == [f"NVTX {depth}" for depth in range(4)]
    assert explorer.config["notes"] == [
        "Kernels of 4 more GPUs have no lane: GPU 8, GPU 9, GPU 10, GPU 11.",
        "3 NVTX ranges at depth 4 and deeper have no lane.",
    ]


def test_latency_says_whether_it_is_of_fault_rows_or_of_copies():
    for rows, word in (({"gpu_faults": [fault(0, 5)]}, "fault rows"), ({}, "copies")):
        explorer, _ = opened(made(migrations=[copy(0)], **rows))
        labels = {by["id"]: by["label"] for by in explorer.config["bys"]}
        assert labels["latency"] == f"latency ({word})"


def test_a_box_at_the_top_of_the_address_space_has_a_last_byte():
    top = (1 << 64) - BLOCK
    explorer, _ = opened(made(migrations=[copy(0, top, 4096), copy(1, (1 << 64) - 4096, 1 << 30)]))
    facts = facts_of(explorer, what="box", window=(0, 10), place=(0, BLOCK))
    assert facts["addresses"] == f"0x{top:016x} to 0x{'f' * 16} (last byte)"
    assert facts["highest address"] == "0x" + "f" * 16


def test_the_highest_address_is_the_last_byte_that_moved():
    explorer, _ = opened(made(migrations=[copy(0, 0x10000, 4096), copy(1, 0x8000, 0x10000)]))
    facts = facts_of(explorer, what="box", window=(0, 10))
    assert facts["lowest address"] == f"0x{0x8000:016x}"
    assert facts["highest address"] == f"0x{0x17FFF:016x}"


def test_a_kernel_of_no_length_at_the_very_end_is_drawn():
    explorer, browser = opened(made(kernels=[kernel(0, 10), kernel(10, 10, "last")]))
    view, _ = browser.look()
    assert explorer.window == (0, 11)
    lane = view["lanes"][0]["items"]
    assert [(item[0], view["names"][item[2]]) for item in lane] == [(0, "k"), (10, "last")]


def test_intervals_over_very_long_times_are_put_together_without_overflow():
    start = np.array([0, 10**17, 9 * 10**17, 17 * 10**17], np.int64)
    spans = Spans(np.repeat(start, 200), np.repeat(start + 10, 200))
    found = spans.within((0, 1_700_000_000_000_000_001), n_columns=480, most=300)
    assert found.select("start_ns", "n").rows() == [(int(each), 200) for each in start]
    low = spans.within((-(1 << 62), 5), n_columns=480, most=300)
    assert low["n"].to_list() == [1] * 200


def test_what_ends_where_a_window_begins_does_not_touch_it():
    spans = Spans(np.array([0, 5]), np.array([10, 20]))
    assert spans.within((10, 30), n_columns=9, most=9)["start_ns"].to_list() == [5]


def test_what_lies_under_the_pointer_is_at_its_address_too():
    rows = [copy(5, 0, 4096), copy(5, 20 * BLOCK, 8192, cause="prefetch")]
    explorer, browser = opened(made(migrations=rows))
    place = explorer.scene.place_of(1, 20 * BLOCK, 1)[0]
    lines = browser.tell(
        kind="hover", view="v", id=1, t=5 - explorer.scene.origin_ns, y=place, dt=9, dy=9
    )
    assert "HtoD, speculative prefetch: 8.00 KiB in 1 copy" in lines[0][0]["lines"]
    assert not [line for line in lines[0][0]["lines"] if "page fault" in line]


def hostile(n):
    return ["\u6838" * 30 + f"{i:05d}" + "\u03bb" * 60 for i in range(n)]


def test_what_the_browser_is_told_stays_small_whatever_names_there_are():
    n, names = 600, hostile(600)
    held = {"free_ns": None, "pid": 1, "device_id": 0, "bytes": 4096, "kind": "managed"}
    explorer, _ = opened(
        made(
            migrations=[copy(i * 10, (i * 4) << 21) for i in range(n)],
            kernels=[kernel(i * 10, i * 10 + 5, name) for i, name in enumerate(names)],
            nvtx_ranges=[nvtx(i * 10, i * 10 + 5, "nv" + name) for i, name in enumerate(names)],
            allocations=[
                {"alloc_ns": 0, "va": (i * 4) << 21, "name": name, **held}
                for i, name in enumerate(names)
            ],
            processes=[{"pid": 1, "name": names[0]}],
        )
    )
    config = explorer.config
    assert len(json.dumps(config).replace("<", "\\u003c")) < 200_000
    for key in ("kernel", "nvtx", "allocation"):
        listed = len(config["filters"][key])
        assert 50 < listed < 500
        assert config["filters_cut"][key] == n - listed
    assert config["runs"][-1]["name"] == f"{n - len(config['runs']) + 1} more runs of addresses"
    assert config["runs"][-1]["end"] == explorer.scene.places[1]
    assert explorer.config["filters"]["pid"][0]["label"].startswith("1 \u6838")


def test_short_names_are_listed_up_to_five_hundred():
    rows = [kernel(i, i + 1, f"k{i}") for i in range(600)]
    config = opened(made(kernels=rows))[0].config
    assert len(config["filters"]["kernel"]) == 500
    assert config["filters_cut"] == {"kernel": 100}


def test_names_that_look_alike_have_labels_that_tell_them_apart():
    names = ["\x01\x02" * 60 + str(i) + "\x1b" * 50 for i in range(600)]
    rows = [kernel(i * 10, i * 10 + 9 - i // 100, name) for i, name in enumerate(names)]
    explorer, browser = opened(made(kernels=rows, migrations=[copy(5)]))
    labels = [entry["label"] for entry in explorer.config["filters"]["kernel"]]
    assert len(set(labels)) == len(labels) > 300
    assert max(map(len, labels)) <= 80
    assert not [label for label in labels if re.search(r"[\x00-\x1f]", label)]
    view, _ = browser.look([0, 95])
    assert len(set(view["names"])) == 10
    assert set(view["names"]) <= set(explorer.scene.options.labels["kernel"])
    explorer.filters = {"kernel": [labels[7]]}
    name = explorer.scene.options.values["kernel"][7]
    assert explorer.filters["kernel"] == [7]
    assert len(browser.look([0, 6000])[0]["lanes"][0]["items"]) == names.count(name) == 1


def test_a_number_that_makes_labels_distinct_is_no_label_that_is_there():
    assert distinct(["a", "a (2)", "a", "a", "b"]) == ["a", "a (2)", "a (3)", "a (4)", "b"]
    long = distinct(["x" * 80] * 3)
    assert [len(each) for each in long] == [80] * 3
    assert len(set(long)) == 3


def test_very_long_names_are_cut_once_and_leave_every_figure_as_it_is():
    long = ["x" * 5000 + str(i) + "y" * 5000 for i in range(3)]
    rows = [kernel(i * 100, i * 100 + 90, long[i % 3]) for i in range(30)]
    moved = [copy(i * 100 + 5, i * BLOCK // 8) for i in range(30)]
    faults = [fault(i * 100, i * 100 + 20, i * BLOCK // 8, 3) for i in range(30)]
    trace = made(kernels=rows, migrations=moved, gpu_faults=faults)
    explorer, browser = opened(trace)
    short = explorer.scene.short_trace
    names = short.kernels.collect()["name"]
    assert names.str.len_chars().max() <= 80
    assert names.n_unique() == 3
    assert short.kernels.drop("name").collect().equals(trace.kernels.drop("name").collect())
    explorer.filters = {"kernel": [long[1]]}
    assert explorer.selection["start_ns"].to_list() == [
        t for i in range(1, 30, 3) for t in (i * 100, i * 100 + 5)
    ]
    items = browser.look()[0]["lanes"][0]["items"]
    assert [item[0] for item in items] == [i * 100 for i in range(1, 30, 3)]
    plain = opened(made(kernels=[kernel(0, 5)]))[0].scene
    assert plain.short_trace is plain.trace


def test_the_table_of_clusters_counts_what_is_in_none(monkeypatch):
    found = pl.DataFrame(
        {
            "cluster_id": [0, -1, None],
            "n_pages": [8, 5, 4],
            "pid": [1, 1, 1],
            "device_id": [0, 0, 0],
        }
    )
    wanted = clusters_module.run_analysis

    def given(trace, analysis):
        return found.lazy() if analysis.name == "fault_clusters" else wanted(trace, analysis)

    monkeypatch.setattr(clusters_module, "run_analysis", given)
    trace = made(migrations=[copy(0)], gpu_faults=[fault(0, 5)])
    assert clusters_module.find_clusters(trace).rest_pages == 9


def test_two_traces_are_shown_before_their_clusters_are_found(monkeypatch):
    go_on, real = threading.Event(), clusters_module.run_analysis

    def slow(*given):
        assert go_on.wait(60)
        return real(*given)

    monkeypatch.setattr(clusters_module, "run_analysis", slow)
    model = x.REPOSITORY / "sample_data" / "model"
    view = compare_view(*(model / name / f"{name}.sqlite" for name in ("two_gpus", "ping_pong")))
    try:
        assert view.a.clusters == {"state": "computing"}
        assert view.a.config["extent"] == view.b.config["extent"]
    finally:
        go_on.set()
    assert view.ready(60)
    for each in (view.a, view.b):
        start = each.scene.origin_ns
        rows = each._found.rows
        assert rows
        shown = [row["window"] for row in each.clusters["rows"]]
        assert [window[1] + start for window in shown] == [
            clusters_module.shown_of(row)[1] for row in rows
        ]
