"""The explorer with its browser played by the test: messages in, messages out, selection against plain polars."""

from __future__ import annotations

import base64
import json
import math
import os
import random
import re
import struct
import subprocess
import sys
import threading
import zlib
from collections import Counter, defaultdict
from html.parser import HTMLParser
from types import SimpleNamespace

import exports as x
import numpy as np
import polars as pl
import pytest
from made_traces import Browser
from polars.testing import assert_frame_equal

import nsan
from nsan.errors import ExtraMissingError, NsanError, OutputExistsError, UsageError

pytest.importorskip("anywidget", reason="the explorer needs the extra lab")

from nsan.widgets import clusters as clusters_module
from nsan.widgets import messages, selecting, static
from nsan.widgets.compare import compare_view
from nsan.widgets.explorer import Explorer, explore
from nsan.widgets.lanes import Spans

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 10
MODEL = x.REPOSITORY / "sample_data" / "model"
SWEEP = MODEL / "oversubscribed_sweep" / "oversubscribed_sweep.sqlite"
TWO_GPUS = MODEL / "two_gpus" / "two_gpus.sqlite"
PCA_ON = MODEL / "pca_on" / "pca_on.sqlite"
PCA_OFF = MODEL / "pca_off" / "pca_off.sqlite"
NO_FAULT_ROWS = x.REPOSITORY / "sample_data" / "um_vector_add_rtx4060l.sqlite"

EVIL = "</script><img src=x onerror=alert(1)>{{7*7}}\u202e\x1b[31m\x00" + "A" * 20_000


def opened(source, **options):
    explorer = explore(source, **options)
    assert explorer.ready(60)
    return explorer, Browser(explorer)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSAN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def traces(cache):  # noqa: ARG001
    paths = {"sweep": SWEEP, "two": TWO_GPUS, "on": PCA_ON, "none": NO_FAULT_ROWS}
    return {name: nsan.open_trace(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def explorers(traces):
    """One explorer per trace: finding clusters again for every test would take its time."""
    return {name: opened(trace)[0] for name, trace in traces.items()}


def as_new(explorer):
    """Bring an explorer back to where it began, with a browser of its own."""
    explorer.filters, explorer.picked = {}, None
    explorer.window, explorer.place, explorer.by, explorer.error = None, None, "cause", ""
    return explorer, Browser(explorer)


@pytest.fixture
def sweep(explorers):
    return as_new(explorers["sweep"])


@pytest.fixture
def two(explorers):
    return as_new(explorers["two"])


def plain(trace):
    """Every event of a trace as plain rows, from the tables alone."""
    columns = (
        "start_ns",
        "end_ns",
        "pid",
        "device_id",
        "va",
        "bytes",
        "n_page_faults",
        "direction",
        "cause",
    )
    frames = []
    for table in ("migrations", "gpu_faults", "cpu_faults"):
        rows = getattr(trace, table).collect()
        rows = rows.select(
            pl.lit(table).alias("table"),
            *(
                (pl.col(c).cast(pl.String) if c in {"direction", "cause"} else pl.col(c))
                if c in rows.columns
                else pl.lit(None, pl.String if c in {"direction", "cause"} else pl.Int64).alias(c)
                for c in columns
            ),
        )
        frames.append(rows)
    return pl.concat(frames, how="vertical_relaxed")


def same_rows(got, wanted):
    """Compare selected rows with plain ones, whatever their order."""
    got = got.with_columns(pl.col("table", "direction", "cause").cast(pl.String))
    got = got.select(wanted.columns)
    assert_frame_equal(
        got, wanted.cast(dict(got.schema)), check_row_order=False, check_column_order=False
    )


def test_the_first_view_adds_up_to_the_whole_trace(sweep, traces):
    explorer, browser = sweep
    view, _ = browser.look()
    rows = plain(traces["sweep"])
    moved = (
        rows.filter(pl.col("table") == "migrations").group_by("cause").agg(pl.col("bytes").sum())
    )
    bars = {lane["id"]: sum(lane["values"]) for lane in view["lanes"] if "values" in lane}
    assert {f"cause-{cause}": size for cause, size in moved.iter_rows()} == {
        name: total for name, total in bars.items() if name.startswith("cause-")
    }
    assert (bars["gpu_faults"], bars["cpu_faults"]) == (288, 240)
    overview = explorer.config["overview"]
    assert sum(sum(stack["values"]) for stack in overview["stacks"]) == moved["bytes"].sum()
    assert (sum(overview["faults"]), sum(overview["cpu_faults"])) == (288, 240)


def test_any_window_shows_and_selects_exactly_what_starts_in_it(traces, explorers):
    chance = random.Random(1)
    for name in ("sweep", "two", "none"):
        explorer, browser = as_new(explorers[name])
        rows, origin = plain(traces[name]), int(explorer.config["origin_ns"])
        length = explorer.config["extent"][1]
        for _ in range(N):
            start = chance.randrange(length)
            end = chance.randrange(start + 1, length + 1)
            view, buffers = browser.look([start, end])
            mine = rows.filter(
                pl.col("start_ns") >= origin + start, pl.col("start_ns") < origin + end
            )
            assert view["window"] == [start, end]
            assert explorer.window == (origin + start, origin + end)
            same_rows(explorer.selection, mine)
            for lane in view["lanes"]:
                if "values" not in lane:
                    continue
                key = lane["id"].removeprefix("cause-")
                wanted = mine.filter((pl.col("cause") == key) | (pl.col("table") == key))
                total = wanted["bytes"].sum() if lane["unit"] == "byte" else wanted.height
                assert sum(lane["values"]) == total
            assert messages.size_of(view, buffers) < 300_000


def unpacked(view, buffers):
    """Read a raster as the protocol says: cell by place, (category, value)."""
    head = view["map"]
    size = head["columns"] * head["rows"]
    if head["encoding"] == "dense":
        category, level = buffers
        assert len(category) == len(level) == size
        cells = [(i, category[i], level[i]) for i in range(size) if level[i]]
    else:
        index, category, level = buffers
        places = struct.unpack(f"<{len(level)}I", index)
        cells = list(zip(places, category, level, strict=True))
        assert len(cells) * 6 < 2 * size
    assert len(cells) == head["n"]
    low, high = head["min"], head["max"]
    return {
        (i % head["columns"], i // head["columns"]): (kind, low * (high / low) ** ((lv - 1) / 254))
        for i, kind, lv in cells
    }


@pytest.mark.parametrize(("columns", "rows"), [(480, 220), (40, 12)])
def test_a_cell_counts_the_rows_that_start_in_it(sweep, traces, columns, rows):
    explorer, browser = sweep
    view, buffers = browser.look(by="density", columns=columns, rows=rows)
    (start, end), height = explorer.window, explorer.config["places"]
    wanted = Counter(
        ((s - start) * columns // (end - start), (va - x.VA) * rows // height)
        for s, va in plain(traces["sweep"]).select("start_ns", "va").iter_rows()
        if va is not None
    )
    got = unpacked(view, buffers)
    assert got.keys() == wanted.keys()
    assert view["map"]["max"] == max(wanted.values())
    step = math.log(view["map"]["max"] / view["map"]["min"]) / 254
    for cell, (category, value) in got.items():
        assert category == 1
        assert abs(math.log(value / wanted[cell])) <= step / 2 + 1e-9


def test_a_raster_of_very_many_rows_says_which_part_it_covers(traces, monkeypatch):
    monkeypatch.setattr("nsan.analysis.views.pyramid._FEW", 100)
    monkeypatch.setattr("nsan.widgets.scene._MANY_ROWS", 100)
    explorer, browser = opened(traces["sweep"])
    length, height = explorer.config["extent"][1], explorer.config["places"]
    origin, rows = explorer.scene.origin_ns, plain(traces["sweep"])
    chance, wider = random.Random(5), 0
    for _ in range(N):
        start = chance.randrange(length // 4)
        end = start + chance.randrange(length // 2, length * 3 // 4)
        view, buffers = browser.look([start, end], by="density", columns=60, rows=12)
        assert view["window"] == [start, end]
        head = view["map"]
        (a, b), (low, high) = head.get("window", [start, end]), head.get("place", [0, height])
        assert a <= start < end <= b
        assert low <= 0 < height <= high
        wider += "window" in head
        wanted = Counter(
            (
                (s - origin - a) * head["columns"] // (b - a),
                (va - x.VA - low) * head["rows"] // (high - low),
            )
            for s, va in rows.select("start_ns", "va").iter_rows()
            if va is not None and a <= s - origin < b
        )
        assert unpacked(view, buffers).keys() == wanted.keys()
        assert head["max"] == max(wanted.values())
    assert wider > 0


def test_a_cell_has_the_colour_of_the_cause_that_moved_most_in_it(sweep, traces):
    explorer, browser = sweep
    columns, rows = 100, 12  # a row of 4 MiB: copies count where they begin
    view, buffers = browser.look(by="cause", columns=columns, rows=rows)
    (start, end), height = explorer.window, explorer.config["places"]
    sums = defaultdict(Counter)
    for s, va, size, cause in (
        plain(traces["sweep"])
        .filter(pl.col("table") == "migrations")
        .select("start_ns", "va", "bytes", "cause")
        .iter_rows()
    ):
        cell = ((s - start) * columns // (end - start), (va - x.VA) * rows // height)
        sums[cell][cause] += size
    names = [category["id"] for category in explorer.config["categories"]["cause"]]
    got = unpacked(view, buffers)
    assert got.keys() == sums.keys()
    assert view["map"]["max"] == max(sum(each.values()) for each in sums.values())
    for cell, (category, _) in got.items():
        most = max(sums[cell].values())
        assert sums[cell][names[category - 1]] == most


def test_few_rows_are_sent_one_by_one(sweep, traces):
    explorer, browser = sweep
    middle = explorer.config["extent"][1] // 2
    view, buffers = browser.look([middle, middle + 500_000], by="cause")
    assert view["map"]["mode"] == "marks"
    assert buffers == []
    origin = explorer.scene.origin_ns
    wanted = plain(traces["sweep"]).filter(
        pl.col("table") == "migrations",
        pl.col("start_ns").is_between(origin + middle, origin + middle + 500_000, closed="left"),
    )
    names = [category["id"] for category in explorer.config["categories"]["cause"]]
    assert wanted.height > 20
    columns = ("start_ns", "end_ns", "va", "bytes", "cause")
    assert Counter(
        (t0 + origin, t1 + origin, y0 + x.VA, y1 - y0, names[kind], value)
        for t0, t1, y0, y1, kind, value, _ in view["map"]["marks"]
    ) == Counter((a, b, va, n, cause, n) for a, b, va, n, cause in wanted.select(columns).rows())


def test_a_stretch_of_addresses_selects_the_rows_that_begin_in_it(sweep, traces):
    explorer, browser = sweep
    low, high = 10 << 20, 12 << 20
    view, _ = browser.look(place=[low, high])
    assert view["place"] == [low, high] == list(explorer.place)
    rows = plain(traces["sweep"])
    inside = (pl.col("va") >= x.VA + low) & (pl.col("va") < x.VA + high)
    same_rows(explorer.selection, rows.filter(inside))


def test_a_kernel_that_is_picked_selects_what_starts_while_it_runs(two, traces):
    explorer, browser = two
    kernels = traces["two"].kernels.collect()
    for number, kernel in enumerate(kernels.iter_rows(named=True)):
        sent = browser.tell(kind="pick", what="kernel", id=number)
        rows = plain(traces["two"]).filter(
            pl.col("start_ns") >= kernel["start_ns"],
            pl.col("start_ns") < kernel["end_ns"],
            (pl.col("device_id") == kernel["device_id"]) | (pl.col("table") == "cpu_faults"),
        )
        same_rows(explorer.selection, rows)
        assert explorer.panel["title"] == kernel["name"]
        facts = {label: text for label, text, _ in explorer.panel["facts"]}
        assert facts["GPU"] == str(kernel["device_id"])
        faults = rows.filter(pl.col("table") == "gpu_faults")
        assert facts["GPU fault rows"] == str(faults.height)
        go = [content for content, _ in sent if content["kind"] == "go"][-1]
        origin = explorer.scene.origin_ns
        assert go["window"][0] + origin <= kernel["start_ns"] < kernel["end_ns"]
        assert kernel["end_ns"] <= go["window"][1] + origin
        # The browser follows, and does not say so: Python knows where it sent it.
        assert explorer.window == tuple(side + origin for side in go["window"])
    browser.tell(kind="pick", what=None)
    assert explorer.panel == {}
    # The view stays where the last pick took it, and so do window and selection.
    assert explorer.window == (go["window"][0] + origin, go["window"][1] + origin)
    explorer.window = explorer.scene.extent
    same_rows(explorer.selection, plain(traces["two"]))


def test_the_selection_is_that_of_the_window_while_the_browser_is_still_answered(traces, explorers):
    """JupyterLab answers in a thread of its own: a cell may ask between two steps of an answer."""
    explorer, _ = as_new(explorers["on"])
    same_rows(explorer.selection, plain(traces["on"]))
    start, end = explorer.scene.extent
    middle = (start + end) // 2
    with explorer.hold_trait_notifications():
        explorer.window = (start, middle)
        same_rows(explorer.selection, plain(traces["on"]).filter(pl.col("start_ns") < middle))
    assert explorer.window == (start, middle)


def test_a_range_a_batch_and_a_cluster_can_be_picked(traces, explorers):
    trace = traces["on"]
    explorer, browser = as_new(explorers["on"])
    rows = plain(trace)
    browser.tell(kind="pick", what="nvtx", id=1)
    found = trace.nvtx_ranges.collect().row(1, named=True)
    same_rows(
        explorer.selection,
        rows.filter(pl.col("start_ns") >= found["start_ns"], pl.col("start_ns") < found["end_ns"]),
    )
    lane = next(each for each in browser.look()[0]["lanes"] if each["id"] == "batches")
    single = next(item for item in lane["items"] if item[3] == 1)
    browser.tell(kind="pick", what="batch", id=single[4])
    start, end = (side + explorer.scene.origin_ns for side in single[:2])
    got = explorer.selection.filter(pl.col("table") == "gpu_faults")
    assert got.select("start_ns", "end_ns").rows() == [(start, end)]
    first = clusters_of(trace)[0]
    browser.tell(kind="pick", what="cluster", id=0)
    is_fault = pl.col("table") == "gpu_faults"
    same_rows(
        explorer.selection.filter(~is_fault),
        rows.filter(
            ~is_fault,
            pl.col("start_ns") >= first["start_ns"],
            pl.col("start_ns") < first["end_ns"],
            pl.col("va") >= first["va"],
            pl.col("va") < first["va"] + first["span_bytes"],
        ),
    )
    assert explorer.selection["start_ns"].is_sorted()
    assert explorer.error == ""


@pytest.mark.parametrize("name", ["sweep", "two", "on"])
def test_a_cluster_has_as_many_fault_rows_as_its_line_of_the_table_says(explorers, name):
    explorer, browser = as_new(explorers[name])
    place = [column["id"] for column in explorer.clusters["columns"]].index("n_fault_rows")
    counts = [row["sort"][place] for row in explorer.clusters["rows"]]
    assert sum(counts) > 20
    for number, count in enumerate(counts):
        browser.tell(kind="pick", what="cluster", id=number)
        faults = explorer.selection.filter(pl.col("table") == "gpu_faults")
        facts = {label: text for label, text, _ in explorer.panel["facts"]}
        assert (faults.height, facts["GPU fault rows"]) == (count, str(count))
        # The driver notes a batch before it copies: the window that shows it begins there.
        origin, window = explorer.scene.origin_ns, explorer.clusters["rows"][number]["window"]
        gone = browser.sent("go")[-1]["window"]
        if count:
            for start in (window[0], gone[0]):
                assert start + origin <= faults["start_ns"].min()
            assert faults["start_ns"].max() < window[1] + origin
    explorer.filters = {"access": []}
    assert explorer.selection.height == 0


def test_the_fault_rows_of_a_cluster_are_those_of_its_batches_whatever_else_is_there():
    explorer, browser = opened(MODEL / "ping_pong" / "ping_pong.sqlite")
    trace = explorer.scene.trace
    browser.tell(kind="pick", what="cluster", id=0)
    first = clusters_of(trace)[0]
    bin_ns = first["time_bin_ns"]
    cells = nsan.analyse(trace, "cluster_cells").collect().filter(pl.col("cluster_id") == 0)
    mine = {(t // bin_ns, block) for t, block in cells.select("start_ns", "va_block").iter_rows()}
    rows = plain(trace)
    copies = rows.filter(pl.col("direction") == "htod", pl.col("cause") == "coherence")
    faults = rows.filter(pl.col("table") == "gpu_faults")
    wanted, before = [], -1
    for end in sorted(set(faults["end_ns"])):
        batch = copies.filter(pl.col("start_ns") > before, pl.col("start_ns") <= end)
        before = end
        if batch.height:
            start, va = batch.sort("start_ns", "va").select("start_ns", "va").row(0)
            if (start // bin_ns, va // (2 << 20)) in mine:
                wanted.append(end)
    same_rows(
        explorer.selection.filter(pl.col("table") == "gpu_faults"),
        faults.filter(pl.col("end_ns").is_in(wanted)),
    )
    inside = pl.col("start_ns").is_between(first["start_ns"], first["end_ns"])
    assert faults.filter(inside).height != len(wanted)  # time alone would not tell


def clusters_of(trace):
    rows = nsan.analyse(trace, "fault_clusters").collect().to_dicts()
    real = [row for row in rows if row["cluster_id"] >= 0]
    return sorted(real, key=lambda row: (-row["n_pages"], row["device_id"], row["cluster_id"]))


def test_the_table_lists_the_clusters_with_the_most_pages_first(traces, monkeypatch):
    monkeypatch.setattr(clusters_module, "MOST_ROWS", 7)
    explorer, _ = opened(traces["on"])
    wanted = clusters_of(traces["on"])
    shown = explorer.clusters
    assert (shown["total"], len(shown["rows"]), shown["state"]) == (len(wanted), 7, "ready")
    place = [column["id"] for column in shown["columns"]].index("n_pages")
    assert [row["sort"][place] for row in shown["rows"]] == [r["n_pages"] for r in wanted[:7]]
    origin = explorer.scene.origin_ns
    assert [row["window"][1] + origin for row in shown["rows"]] == [r["end_ns"] for r in wanted[:7]]
    assert explorer.busy == ""


def test_a_box_selects_what_begins_in_it(sweep, traces):
    explorer, browser = sweep
    window, place = [20_000_000, 40_000_000], [4 << 20, 9 << 20]
    browser.tell(kind="pick", what="box", window=window, place=place)
    origin = explorer.scene.origin_ns
    wanted = plain(traces["sweep"]).filter(
        pl.col("start_ns") >= window[0] + origin,
        pl.col("start_ns") < window[1] + origin,
        pl.col("va") >= x.VA + place[0],
        pl.col("va") < x.VA + place[1],
    )
    assert wanted.height > 100
    same_rows(explorer.selection, wanted)
    facts = [(label, text) for label, text, _ in explorer.panel["facts"]]
    low, last = x.VA + place[0], x.VA + place[1] - 1
    assert ("addresses", f"0x{low:016x} to 0x{last:016x} (last byte)") in facts
    assert ("allocation", "48.00 MiB, 0x00007f0000000000") in facts
    back = [
        (max(row["va"], x.VA + place[0]), min(row["va"] + row["bytes"], x.VA + place[1]))
        for row in nsan.analyse(traces["sweep"], "refaults").collect().to_dicts()
        if window[0] + origin <= row["time_ns"] < window[1] + origin
    ]
    size = sum(end - start for start, end in back if end > start)
    assert ("came back after an eviction", f"{size / (1 << 20):.2f} MiB") in facts
    evicted = wanted.filter(pl.col("cause") == "eviction")
    text = f"{evicted['bytes'].sum() / (1 << 20):.2f} MiB in {evicted.height} copies"
    assert ("DtoH, eviction", text) in facts


@pytest.mark.parametrize(
    ("filters", "keeps"),
    [
        ({"cause": ["coherence"]}, pl.col("cause") == "coherence"),
        ({"cause": ["coherence", "prefetch"]}, pl.col("cause").is_in(["coherence", "prefetch"])),
        ({"device": [1]}, (pl.col("device_id") == 1) | (pl.col("table") == "cpu_faults")),
        ({"pid": [4242]}, pl.lit(value=True)),
        ({"cause": []}, pl.lit(value=False)),
        (
            {"cause": ["prefetch"], "device": [0]},
            (pl.col("cause") == "prefetch") & (pl.col("device_id") == 0),
        ),
    ],
)
def test_a_filter_keeps_what_it_names(two, traces, filters, keeps):
    explorer, browser = two
    sent = browser.tell(kind="filter", filters=filters)
    assert [content["kind"] for content, _ in sent] == ["stale"]
    wanted = plain(traces["two"]).filter(keeps)
    same_rows(explorer.selection, wanted)
    view, _ = browser.look()
    moved = sum(sum(lane["values"]) for lane in view["lanes"] if lane.get("unit") == "byte")
    assert moved == wanted["bytes"].sum()
    browser.tell(kind="filter", filters={})
    same_rows(explorer.selection, plain(traces["two"]))
    assert explorer.error == ""


def test_the_map_and_the_lanes_show_what_the_filter_keeps(sweep, traces):
    explorer, browser = sweep
    browser.tell(kind="filter", filters={"cause": ["prefetch"]})
    rows = plain(traces["sweep"]).filter(pl.col("cause") == "prefetch")
    (start, end), height = explorer.window, explorer.config["places"]
    wanted = {
        ((s - start) * 30 // (end - start), (va - x.VA) * 20 // height)
        for s, va in rows.select("start_ns", "va").iter_rows()
    }
    view, buffers = browser.look(by="density", columns=30, rows=20)
    assert unpacked(view, buffers).keys() == wanted
    assert sum(sum(stack["values"]) for stack in explorer.config["overview"]["stacks"]) == (
        rows["bytes"].sum()
    )
    assert explorer.config["notes"] == ["Shown is only: cause: speculative prefetch."]


def test_a_kernel_is_picked_with_the_cpu_faults_of_its_process(trace_of):
    export = x.Export().add(x.KERNEL, x.kernel(100, 200), x.kernel(300, 400, device=1))
    export.add(x.CPU_FAULTS, *(x.cpu_fault(t) for t in (99, 100, 199, 200)))
    export.add(x.CPU_FAULTS, x.cpu_fault(150, pid=7))
    export.add(x.MEMCPY, x.migration(150, 160, 4096, device=1), x.migration(160, 170, 8192))
    explorer, browser = opened(trace_of(export))
    browser.tell(kind="pick", what="kernel", id=0)
    got = explorer.selection.select(pl.col("table").cast(pl.String), "start_ns", "pid")
    assert got.rows() == [
        ("cpu_faults", 100, x.PID),
        ("migrations", 160, x.PID),
        ("cpu_faults", 199, x.PID),
    ]


def test_kernels_ranges_and_allocations_are_filtered_by_their_number(two, traces):
    trace = traces["two"]
    explorer, browser = two
    kernels = trace.kernels.collect()
    names = [entry["label"] for entry in explorer.config["filters"]["kernel"]]
    browser.tell(kind="filter", filters={"kernel": [names.index("stage_1")]})
    runs = kernels.filter(pl.col("name") == "stage_1").select("start_ns", "end_ns").rows()
    while_running = pl.any_horizontal(
        (pl.col("start_ns") >= a) & (pl.col("start_ns") < b) for a, b in runs
    )
    on_its_gpu = (pl.col("device_id") == 1) | (pl.col("table") == "cpu_faults")
    rows = plain(trace)
    same_rows(explorer.selection, rows.filter(while_running & on_its_gpu))
    lanes = {lane["id"]: lane for lane in browser.look()[0]["lanes"]}
    assert lanes["kernel-4242-0"]["items"] == []
    assert len(lanes["kernel-4242-1"]["items"]) == len(runs)
    explorer.filters = {"allocation": [1]}
    held = (
        trace.allocations.collect()
        .sort(["bytes", "va"], descending=[True, False])
        .row(1, named=True)
    )
    inside = (pl.col("va") >= held["va"]) & (pl.col("va") < held["va"] + held["bytes"])
    same_rows(explorer.selection, rows.filter(inside))
    explorer.filters = {"nvtx": ["step"], "cause": ["prefetch"]}
    steps = trace.nvtx_ranges.collect().select("start_ns", "end_ns").rows()
    in_steps = pl.any_horizontal(
        (pl.col("start_ns") >= a) & (pl.col("start_ns") < b) for a, b in steps
    )
    same_rows(explorer.selection, rows.filter(in_steps & (pl.col("cause") == "prefetch")))


@pytest.mark.parametrize(
    ("filters", "says"),
    [
        ({"gpu": [0]}, "pid, device, cause"),
        ({"cause": ["evictions"]}, "eviction"),
        ({"kernel": [99]}, "stage_0"),
        ({"kernel": ["nothing"]}, "stage_0"),
        ({"device": [7]}, "GPU 0, GPU 1"),
        ({"cause": 2.5}, "give a list"),
        ({"cause": {"eviction": True}}, "give a list"),
        ([1], "give a dict"),
    ],
)
def test_a_filter_that_is_not_there_is_refused_with_those_that_are(two, traces, filters, says):
    explorer, browser = two
    with pytest.raises(NsanError, match=says):
        explorer.filters = filters
    browser.tell(kind="filter", filters=filters)
    assert says in explorer.error
    same_rows(explorer.selection, plain(traces["two"]))


def test_no_filter_is_none_and_what_is_no_list_is_one_message(two, traces):
    explorer, _ = two
    explorer.filters = {"cause": ["prefetch"]}
    explorer.filters = None
    assert set(explorer.filters.values()) == {None}
    same_rows(explorer.selection, plain(traces["two"]))
    with pytest.raises(UsageError, match="give a list"):
        explorer.filters = {"cause": object()}
    with pytest.raises(UsageError, match="give a dict"):
        explorer.filters = 7


@pytest.mark.parametrize("name", ["windw", "selections", "filter"])
def test_a_name_that_the_view_does_not_have_cannot_be_set(sweep, name):
    explorer, _ = sweep
    with pytest.raises(UsageError, match=r"window, place, by, filters, picked"):
        setattr(explorer, name, (1, 2))
    assert not hasattr(explorer, name)


def test_a_typo_is_answered_with_what_was_meant(sweep, pair):
    with pytest.raises(UsageError, match="Did you mean 'window'"):
        sweep[0].windw = (1, 2)
    with pytest.raises(UsageError, match=r"a\.window"):
        pair[0].window = (1, 2)


def test_another_view_that_only_draws_again_moves_nothing(sweep, traces):
    explorer, browser = sweep
    changes = []
    explorer.observe(changes.append, ["window", "place", "by", "selection"])
    origin = explorer.scene.origin_ns
    browser.tell(kind="look", view="a", id=1, window=[0, 9_000_000], moved=True)
    assert explorer.window == (origin, origin + 9_000_000)
    changes.clear()
    for id_, moved in ((1, False), (2, None), (3, 0)):
        asked = {"window": [0, 50_000_000], "place": [0, 1 << 22], "by": "density"}
        sent = browser.tell(kind="look", view="b", id=id_, moved=moved, **asked)
        answer = sent[-1][0]
        assert (answer["view"], answer["id"], answer["by"]) == ("b", id_, "density")
        assert (answer["window"], answer["place"]) == ([0, 50_000_000], [0, 1 << 22])
    assert changes == []
    assert (explorer.window, explorer.by) == ((origin, origin + 9_000_000), "cause")
    mine = pl.col("start_ns") < origin + 9_000_000
    same_rows(explorer.selection, plain(traces["sweep"]).filter(mine))
    browser.tell(kind="look", view="b", id=4, window=[0, 50_000_000])  # says nothing: it moved
    assert explorer.window == (origin, origin + 50_000_000)
    assert explorer.error == ""


def test_the_browser_hears_of_a_move_that_python_makes_and_only_of_that(sweep):
    explorer, browser = sweep
    browser.look([1000, 2_000_000])
    assert browser.sent("go") == []
    explorer.window = "10ms/20ms"
    explorer.place = (0, 4096)
    explorer.by = "access"
    origin = explorer.scene.origin_ns
    assert browser.sent("go") == [
        {"kind": "go", "window": [10_000_000 - origin, 20_000_000 - origin]},
        {"kind": "go", "place": [0, 4096]},
        {"kind": "go", "by": "access"},
    ]
    view, _ = browser.look(by=None)
    assert view["window"] == [10_000_000 - origin, 20_000_000 - origin]
    assert (view["place"], view["by"]) == ([0, 4096], "access")
    explorer.window = None
    assert explorer.window == explorer.scene.extent


@pytest.mark.parametrize("window", [(5, 4), "x", ("a", 1), [1, 2, 3], 7, (float("nan"), 1)])
def test_a_window_that_is_none_is_refused(sweep, window):
    explorer, _ = sweep
    with pytest.raises(UsageError):
        explorer.window = window
    assert explorer.window == explorer.scene.extent


@pytest.mark.parametrize(
    "window", ["1s/1s", "30ms/30ms", "5s/", (10**9, 2 * 10**9), (-5, -1), (20_000_000, 20_000_000)]
)
def test_a_window_in_which_nothing_can_be_is_refused_with_what_there_is(sweep, window):
    explorer, _ = sweep
    start, end = explorer.scene.extent
    for set_ in (
        lambda: setattr(explorer, "window", window),
        lambda: setattr(explorer, "picked", {"what": "box", "window": window}),
    ):
        with pytest.raises(UsageError, match=f"{start} to {end} ns"):
            set_()
    assert (explorer.window, explorer.picked) == (explorer.scene.extent, None)
    with pytest.raises(UsageError, match="The map has the bytes 0 to"):
        explorer.place = (1 << 40, 1 << 41)


def test_a_window_that_reaches_beyond_shows_the_part_that_is_there(sweep):
    explorer, browser = sweep
    start, end = explorer.scene.extent
    explorer.window = (end - 1000, end + 10**12)
    assert explorer.window == (end - 1000, end)
    explorer.window = "/1h"
    assert explorer.window == (start, end)
    browser.tell(kind="pick", what="box", window=[end - start, end - start + 5], place=[0, 0])
    assert explorer.error == ""
    assert explorer.picked["window"] == (end - 1, end)


def test_a_part_of_a_trace_is_shown_as_that_part(traces):
    trace = traces["sweep"].filter(time="20ms/30ms")
    explorer, browser = opened(trace)
    assert explorer.window == explorer.scene.extent == (20_000_000, 30_000_000)
    figures = {label: text for label, text, _ in explorer.config["figures"]}
    assert figures["window"] == "10.000 ms"
    note = "This is a part of the capture: 20.000 ms to 30.000 ms (trace.filter)."
    assert explorer.config["notes"][0] == note
    assert note in str(explorer)
    inside = pl.col("start_ns").is_between(20_000_000, 30_000_000, closed="left")
    rows = plain(traces["sweep"]).filter(inside)
    same_rows(explorer.selection, rows)
    assert browser.look()[0]["window"] == [0, 10_000_000]
    whole = explore(traces["sweep"]).scene.extent
    assert explore(traces["sweep"].filter(time="/1h")).scene.extent == whole
    assert explore(traces["sweep"].filter(time="20ms/")).scene.extent == (20_000_000, whole[1])
    outside = explore(traces["sweep"].filter(time="1h/2h"))
    assert outside.selection.height == 0
    one = explore(traces["two"].filter(device=1))
    assert "by process or GPU" in one.config["notes"][0]


def test_observers_hear_of_each_change_of_the_selection_and_compute_only_if_they_look(traces):
    explorer, browser = opened(traces["two"])
    heights, changes = [], []
    explorer.observe(changes.append, "selection")
    browser.look([0, 4_000_000])
    browser.look([0, 4_000_000])
    assert len(changes) == 1
    assert explorer._cached is None
    explorer.observe(lambda change: heights.append(change["new"].height), "selection")
    explorer.observe(lambda change: heights.append(change.new.height), "selection")
    browser.look([0, 8_000_000])
    assert heights == [explorer.selection.height] * 2
    with pytest.raises(UsageError, match="set window"):
        explorer.selection = pl.DataFrame()


def test_an_observer_that_fails_shows_under_the_view_and_the_view_lives_on(traces):
    explorer, browser = opened(traces["two"])

    def fails(_):
        raise ZeroDivisionError("mine <b>")

    explorer.observe(fails, "window")
    view, _ = browser.look([0, 4_000_000])
    assert view["window"] == [0, 4_000_000]
    lines = explorer.error.splitlines()
    assert lines[0] == "ZeroDivisionError: mine <b>"
    assert "fails" in lines[1]
    assert len(lines) == 3  # the one frame of the user, with its line of code
    assert 'raise ZeroDivisionError("mine <b>")' in lines[2]
    assert explorer.selection["start_ns"].max() < explorer.window[1]
    browser.tell(kind="clear_error")
    assert explorer.error == ""
    explorer.unobserve(fails, "window")
    browser.look([0, 3_000_000])
    assert explorer.error == ""
    explorer.observe(fails, "window")
    with pytest.raises(ZeroDivisionError):  # what Python code causes goes to that code
        explorer.window = (0, 1_000_000)


@pytest.mark.parametrize(
    "content",
    [
        {"kind": "nothing"},
        {},
        {"kind": "look", "view": "v", "id": 1, "window": ["a", {}], "place": None},
        {"kind": "look", "view": "v", "id": 1, "window": [1e300, 2e300], "place": None},
        {"kind": "look", "view": "v", "id": 1, "window": None, "place": None, "by": "<b>"},
        {"kind": "pick", "what": "kernel", "id": 10**9},
        {"kind": "pick", "what": "kernel", "id": -1},
        {"kind": "pick", "what": "cluster", "id": "0"},
        {"kind": "pick", "what": "box", "window": [3]},
        {"kind": "pick", "what": "moon"},
        {"kind": "filter", "filters": [1]},
        {"kind": "hover", "t": None},
    ],
)
def test_a_message_that_makes_no_sense_is_an_error_under_the_view(sweep, content):
    explorer, browser = sweep
    sent = browser.tell(**content)
    assert explorer.error
    if content.get("kind") == "look":
        assert [(c["kind"], c["id"]) for c, _ in sent] == [("failed", 1)]
    browser.tell(kind="clear_error")
    browser.look()
    assert explorer.error == ""


def test_what_has_too_many_rows_to_look_at_each_shows_sums(sweep, traces, monkeypatch):
    monkeypatch.setattr(selecting, "MOST_ROWS", 10)
    explorer, browser = sweep
    browser.tell(kind="pick", what="nvtx", id=0)
    start, end = traces["sweep"].nvtx_ranges.collect().select("start_ns", "end_ns").row(0)
    inside = pl.col("start_ns").is_between(start, end, closed="left")
    rows = plain(traces["sweep"]).filter(inside)
    facts = {label: text for label, text, _ in explorer.panel["facts"]}
    brought = rows.filter(pl.col("direction") == "htod", pl.col("cause") == "coherence")
    text = f"{brought['bytes'].sum() / (1 << 20):.2f} MiB in {brought.height:,} copies"
    assert facts["HtoD, page fault"] == text.replace(",", " ")
    assert facts["rows"] == "all in this time, of every process and GPU"
    same_rows(explorer.selection, rows)


def test_the_smallest_view_is_one_nanosecond_of_one_byte(sweep):
    explorer, browser = sweep
    view, _ = browser.look([6_000_000.4, 6_000_000.4], [7, 7])
    assert view["window"] == [6_000_000, 6_000_001]
    assert view["place"] == [7, 8]
    view, _ = browser.look([-5, 1e15], [-5, 1e15])
    assert view["window"] == [0, explorer.config["extent"][1]]
    assert view["place"] == [0, explorer.config["places"]]
    assert explorer.error == ""


def test_what_lies_under_the_pointer_is_told_in_lines(sweep, traces):
    explorer, browser = sweep
    copy = plain(traces["sweep"]).filter(pl.col("cause") == "eviction").row(3, named=True)
    t = copy["start_ns"] - explorer.scene.origin_ns
    sent = browser.tell(kind="hover", view="v", id=5, t=t, y=copy["va"] - x.VA, dt=10.0, dy=10.0)
    lines = sent[0][0]["lines"]
    assert (sent[0][0]["view"], sent[0][0]["id"]) == ("v", 5)
    assert any(line.startswith(f"0x{copy['va']:016x}") for line in lines)
    assert "DtoH, eviction: 2.00 MiB in 1 copy" in lines
    assert "GPU 0 kernels: scale" in lines


def test_what_was_not_recorded_says_so(explorers):
    explorer, browser = as_new(explorers["none"])
    view, _ = browser.look(by="access")
    assert "not recorded (--cuda-um-gpu-page-faults=true)" in view["map"]["empty"]
    assert explorer.config["overview"]["faults"] is None or not any(
        explorer.config["overview"]["faults"]
    )
    assert "n_fault_rows" not in [column["id"] for column in explorer.clusters["columns"]]
    browser.tell(kind="pick", what="kernel", id=0)
    facts = {label: text for label, text, _ in explorer.panel["facts"]}
    assert facts["GPU fault rows"].startswith("not recorded")


def test_figures_of_the_model_say_that_they_are_modelled(sweep, explorers):
    explorer, _ = sweep
    kinds = {kind for _, _, kind in explorer.config["figures"]}
    assert (explorer.config["kind"], kinds, explorer.clusters["kind"]) == (
        "modelled",
        {"modelled"},
        "modelled",
    )
    real, _ = as_new(explorers["none"])
    assert real.config["kind"] == "recorded"
    assert real.clusters["kind"] == "reconstructed"


@pytest.fixture
def evil(trace_of):
    export = x.Export("2025.5.1")
    export.strings[1] = EVIL
    export.add(x.KERNEL, x.kernel(0, 1000)).add(x.NVTX, x.nvtx(0, 2000, EVIL))
    export.add("PROCESSES", {"globalPid": x.global_pid(x.PID), "pid": x.PID, "name": EVIL})
    export.add(x.GPU, {"id": 0, "cuDevice": 0, "name": EVIL})
    export.add(x.MEMORY, x.memory_event(0, x.VA, 1 << 21, name=EVIL))
    export.add(
        x.MEMCPY, *(x.migration(i * 10, i * 10 + 5, 4096, x.VA + 4096 * i) for i in range(50))
    )
    return trace_of(export)


def texts_in(thing):
    """Every text of a message."""
    if isinstance(thing, str):
        yield thing
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from texts_in(key)
            yield from texts_in(value)
    elif isinstance(thing, list):
        for each in thing:
            yield from texts_in(each)


def test_hostile_names_reach_the_browser_short_and_harmless(evil):
    explorer, browser = opened(evil)
    view, _ = browser.look()
    browser.tell(kind="pick", what="kernel", id=0)
    panels = [explorer.panel]
    browser.tell(kind="pick", what="nvtx", id=0)
    hover = browser.tell(kind="hover", view="v", id=1, t=100, y=0, dt=500, dy=9000)[0][0]
    everything = [explorer.config, explorer.clusters, view, explorer.panel, *panels, hover]
    texts = list(texts_in(everything))
    assert any("</script>" in text for text in texts)  # text like any other
    assert max(map(len, texts)) <= 250
    assert not [text for text in texts if re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e]", text)]
    assert explorer.error == ""


def test_the_name_of_a_trace_is_harmless_where_it_is_printed(tmp_path):
    path = tmp_path / "a\x1b[31m\u202eb.sqlite"
    path.write_bytes(SWEEP.read_bytes())
    snapshot = next(PCA_ON.parent.glob("*.pickle"))
    evil_snapshot = tmp_path / "c\x1b[32m\n.pickle"
    evil_snapshot.write_bytes(snapshot.read_bytes())
    trace = nsan.open_trace(path)
    memory = nsan.open_snapshot(evil_snapshot)
    joined = nsan.Joined(nsan.open_trace(PCA_ON), memory)
    for text in map(repr, (trace, memory, joined, nsan.Joined(trace, memory))):
        assert text.isprintable()
        assert "\\x1b[3" in text


class Tags(HTMLParser):
    """Collects tags, attributes, and what scripts hold."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.inside = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs) if tag == "script" else None

    def handle_endtag(self, _):
        self.inside = None

    def handle_data(self, data):
        if self.inside is not None:
            self.scripts.append((self.inside, data))


def test_an_offline_copy_is_one_file_that_asks_nobody(evil, tmp_path):
    explorer, _ = opened(evil)
    place = explorer.to_html(tmp_path / "copy.html")
    text = place.read_text(encoding="utf-8")
    found = Tags(text)
    assert "img" not in [tag for tag, _ in found.tags]
    assert not [a for _, a in found.tags if {"src", "href"} & a.keys()]
    assert not [a for _, a in found.tags if any(name.startswith("on") for name in a)]
    policy = next(a["content"] for tag, a in found.tags if tag == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    outside = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}/?\S*", text)
    assert [each for each in outside if "www.w3.org" not in each] == []
    data = [
        json.loads(content)
        for attrs, content in found.scripts
        if attrs.get("type") == "application/json"
    ]
    assert [each["config"]["title"] for each in data] == [explorer.config["title"]]
    assert data[0]["config"]["offline"] is True


def test_an_offline_copy_holds_the_views_that_the_notebook_shows(sweep, tmp_path):
    explorer, browser = sweep
    text = explorer.to_html(tmp_path / "copy.html").read_text(encoding="utf-8")
    data = next(
        json.loads(content)
        for attrs, content in Tags(text).scripts
        if attrs.get("type") == "application/json"
    )
    for by in ("cause", "access", "density", "latency"):
        view, buffers = browser.look(by=by)
        stored = data["views"][by]
        assert [zlib.decompress(base64.b64decode(each)) for each in stored["buffers"]] == buffers
        assert stored["message"]["map"] == view["map"]
        assert stored["message"]["lanes"] == view["lanes"]
    assert data["clusters"] == explorer.clusters
    assert data["panels"]["0"]["title"] == "Fault cluster 0"


def test_an_offline_copy_never_takes_the_place_of_anything_else(sweep, tmp_path):
    explorer, _ = sweep
    place = tmp_path / "copy.html"
    place.write_text("mine")
    with pytest.raises(OutputExistsError, match="force_overwrite"):
        explorer.to_html(place)
    assert place.read_text() == "mine"
    explorer.to_html(place, force_overwrite=True)
    assert place.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(UsageError, match=r"\.html"):
        explorer.to_html(tmp_path / "trace.sqlite", force_overwrite=True)
    with pytest.raises(NsanError, match="Cannot write") as failed:
        explorer.to_html(tmp_path / "absent" / "copy.html")
    with pytest.raises(OutputExistsError) as refused:
        explorer.to_html(place)
    # Options of commands mean nothing here.
    assert not re.search(r"(^|\s)--?\w", str(failed.value) + str(refused.value))
    assert sorted(each.name for each in tmp_path.glob("*.html")) == ["copy.html"]


def test_without_a_front_end_the_view_is_figures_pictures_and_a_table(evil):
    explorer, _ = opened(evil)
    bundle = explorer._repr_mimebundle_()
    assert bundle.keys() == {"text/plain", "text/html"}
    found = Tags(bundle["text/html"])
    tags = [tag for tag, _ in found.tags]
    assert "script" not in tags
    pictures = [a["src"] for tag, a in found.tags if tag == "img"]
    assert len(pictures) == 2
    for source in pictures:
        kind, _, data = source.partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert base64.b64decode(data).lstrip().startswith(b"<svg")
    assert "50 copies" in bundle["text/plain"]
    assert bundle["text/plain"] == str(explorer)


def test_with_a_front_end_the_live_view_comes_with_small_text(sweep, monkeypatch):
    explorer, _ = sweep
    kernel = SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=True))
    monkeypatch.setattr("IPython.get_ipython", lambda: kernel)
    monkeypatch.setattr(static, "_show_saved", lambda _: None)
    data, _ = explorer._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert "<img" not in data["text/html"]
    # What to do when it does not show: the packages that have to match.
    assert "ipywidgets and anywidget" in data["text/html"]
    assert "160.00 MiB in 80 copies" in data["text/plain"]
    both = nsan.compare_view(SWEEP, SWEEP)  # ipywidgets gives a dict, anywidget a pair
    data, metadata = both._repr_mimebundle_()
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == both.model_id
    assert metadata == {}
    kernel.kernel._allow_stdin = False  # papermill, nbconvert
    monkeypatch.setattr(static, "CHARTS", ())
    assert "application/vnd.jupyter.widget-view+json" not in explorer._repr_mimebundle_()


def test_a_live_view_leaves_a_copy_for_whoever_has_no_kernel(sweep, evil, monkeypatch):
    kernel = SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=True))
    monkeypatch.setattr("IPython.get_ipython", lambda: kernel)
    hostile, _ = opened(evil)
    hostile.config = {**hostile.config, "title": "<img src=x>{0}"}
    for explorer in (sweep[0], hostile):
        shown, done = [], threading.Event()

        def update(bundle, *, raw, shown=shown, done=done):
            assert raw
            shown.append(bundle)
            done.set()

        def display(bundle, *, raw, display_id, shown=shown, update=update):
            assert raw and display_id  # noqa: PT018
            shown.append(bundle)
            return SimpleNamespace(update=update)

        monkeypatch.setattr("IPython.display.display", display)
        explorer._repr_mimebundle_()
        assert done.wait(60)
        first, last = (Tags(bundle["text/html"]).tags for bundle in shown)
        assert [tag for tag, _ in first][:3] == ["style", "details", "summary"]
        # Closed, gone where the live view is, and with pictures once there are any.
        assert dict(first)["details"] == {"class": "nsan-saved"}
        assert "jp-OutputArea:has(.nsan-explorer)" in shown[0]["text/html"]
        pictures = [attributes["src"] for tag, attributes in last if tag == "img"]
        assert [source[:18] for source in pictures] == ["data:image/svg+xml"] * 2
        assert "script" not in dict(last)
        assert "img" not in dict(first)
        assert shown[0]["text/plain"].startswith("Saved copy of the view of ")
    assert "&lt;img src=x&gt;{0}" in shown[1]["text/html"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"heigth": 3}, "height, theme"),
        ({"theme": "pink"}, "auto, light, dark"),
        ({"height": 5}, "120 to 4000"),
        ({"height": True}, "120 to 4000"),
    ],
)
def test_an_option_that_is_not_there_is_refused_with_those_that_are(traces, options, says):
    with pytest.raises(UsageError, match=says):
        Explorer(traces["two"], **options)


def test_a_keyword_that_a_function_does_not_have_is_refused_with_those_it_has(traces):
    with pytest.raises(UsageError, match="height, theme"):
        explore(traces["two"], heigth=300)
    with pytest.raises(UsageError, match="align, height, theme"):
        compare_view(traces["two"], traces["two"], alig="step")


def test_only_a_trace_can_be_explored(tmp_path):
    with pytest.raises(UsageError, match="open_trace"):
        explore(pl.DataFrame())
    with pytest.raises(NsanError, match="no such file"):
        explore(tmp_path / "absent.sqlite")


@pytest.mark.parametrize("package", ["anywidget", "ipywidgets"])
def test_without_the_widget_packages_one_message_says_what_to_install(package):
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from nsan.errors import ExtraMissingError\n"
        "try:\n    from nsan.widgets.explorer import explore\n"
        "except ExtraMissingError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "pip install 'nsan[lab]'" in done.stdout
    assert ExtraMissingError.exit_code == 1


def test_a_trace_without_any_event_has_an_empty_view(trace_of):
    explorer, browser = opened(trace_of(x.Export()))
    view, _ = browser.look()
    assert explorer.selection.height == 0
    assert view["map"]["n"] == 0
    assert explorer.clusters["rows"] == []
    assert explorer.clusters["empty"]
    assert explorer.error == ""
    browser.tell(kind="pick", what="box", window=[0, 1], place=[0, 1])
    assert explorer.error == ""


def test_a_message_stays_below_its_limit_whatever_names_there_are(trace_of):
    export = x.Export("2025.5.1")
    wide = "\u6c49" * 100
    for depth in range(4):
        export.add(
            x.NVTX,
            *(
                x.nvtx(i * 1000 + depth, i * 1000 + 900 - depth, f"{depth}{i}{wide}", tid=x.PID)
                for i in range(300)
            ),
        )
    export.add(
        x.MEMCPY,
        *(
            x.migration(i * 100, i * 100 + 90, 4096, x.VA + (i * 7919 % 40_000) * 4096)
            for i in range(20_000)
        ),
    )
    _, browser = opened(trace_of(export))
    view, buffers = browser.look(by="density")
    assert view["map"]["mode"] == "raster"
    assert messages.size_of(view, buffers) < 300_000
    lanes = [lane for lane in view["lanes"] if lane["id"].startswith("nvtx")]
    assert [sum(item[3] for item in lane["items"]) for lane in lanes] == [300] * len(lanes)


def test_very_many_intervals_are_put_together_and_none_is_lost():
    chance = random.Random(3)
    for _ in range(N):
        starts = sorted(chance.randrange(1000) for _ in range(chance.randrange(1, 300)))
        ends = [s + chance.randrange(1, 400) for s in starts]
        spans = Spans(np.array(starts), np.array(ends), np.arange(len(starts)))
        low = chance.randrange(1200)
        window = (low, low + chance.randrange(1, 500))
        touching = [
            (s, e) for s, e in zip(starts, ends, strict=True) if e > window[0] and s < window[1]
        ]
        found = spans.within(window, n_columns=20, most=15)
        assert found.height <= 15
        assert found["n"].sum() == len(touching)
        if touching:
            assert found["start_ns"].min() == min(s for s, _ in touching)
            assert found["end_ns"].max() == max(e for _, e in touching)
        for start, end, _, number, n in found.iter_rows():
            if n == 1:
                assert (starts[number], ends[number]) == (start, end)


@pytest.fixture(scope="module")
def compared(cache):  # noqa: ARG001
    view = compare_view(PCA_ON, PCA_OFF)
    assert view.ready(60)
    return view


@pytest.fixture
def pair(compared):
    return compared, as_new(compared.a)[1], as_new(compared.b)[1]


def test_two_traces_move_together_each_on_its_own_clock(pair):
    view, a, b = pair
    assert view.a.config["extent"] == view.b.config["extent"]
    a.look([100_000_000, 200_000_000])
    assert b.sent("go") == [{"kind": "go", "window": [100_000_000, 200_000_000]}]
    assert view.b.window[0] - view.b.scene.origin_ns == 100_000_000
    b.look([100_000_000, 200_000_000])
    assert a.sent("go") == []
    a.look(by="latency")
    assert view.b.by == "latency"
    assert (view.a.error, view.b.error) == ("", "")


def test_a_late_answer_of_the_other_view_moves_nothing_back(pair):
    view, a, b = pair
    a.look([0, 100_000_000])
    a.look([0, 50_000_000])
    b.look([0, 100_000_000])
    assert a.sent("go") == []
    b.look([0, 50_000_000])
    assert a.sent("go") == []
    b.look([0, 100_000_000])  # now by its reader
    assert a.sent("go") == [{"kind": "go", "window": [0, 100_000_000]}]
    assert view.a.window == (view.a.scene.origin_ns, view.a.scene.origin_ns + 100_000_000)


def test_two_traces_share_the_top_of_their_colour_scale(pair):
    view, a, b = pair
    alone = [
        each.scene.top(each.window, each.place, "density", (480, 220)) for each in (view.a, view.b)
    ]
    tops = [each.look(by="density")[0]["map"]["max"] for each in (a, b)]
    assert tops == [max(alone)] * 2


def test_two_traces_can_be_aligned_at_a_range(cache, tmp_path, monkeypatch):  # noqa: ARG001
    monkeypatch.setattr(static, "CHARTS", ())
    view = compare_view(PCA_ON, PCA_OFF, align="forward")
    for each in (view.a, view.b):
        ranges = each.scene.trace.nvtx_ranges.filter(pl.col("name") == "forward").collect()
        assert each.window[0] == ranges["start_ns"].min()
    assert view.a.window[1] - view.a.window[0] == view.b.window[1] - view.b.window[0]
    with pytest.raises(NsanError, match="'forward'"):
        compare_view(PCA_ON, PCA_OFF, align="nothing")
    text = view.to_html(tmp_path / "both.html").read_text(encoding="utf-8")
    data = [a for a, _ in Tags(text).scripts if a.get("type") == "application/json"]
    assert len(data) == 2
    assert "pca_on" in str(view)
    assert "pca_off" in view._repr_mimebundle_()["text/html"]


def test_the_view_answers_while_clusters_are_computed(traces, monkeypatch):
    go_on = threading.Event()
    real = clusters_module.run_analysis

    def slow(*given):
        assert go_on.wait(60)
        return real(*given)

    monkeypatch.setattr(clusters_module, "run_analysis", slow)
    explorer = explore(traces["two"])
    browser = Browser(explorer)
    assert explorer.clusters == {"state": "computing"}
    assert explorer.busy
    browser.look()
    browser.tell(kind="pick", what="cluster", id=0)
    assert "no cluster with the number 0" in explorer.error
    go_on.set()
    assert explorer.ready(60)
    assert explorer.clusters["state"] == "ready"
    browser.tell(kind="clear_error")
    browser.tell(kind="pick", what="cluster", id=0)
    assert explorer.error == ""
