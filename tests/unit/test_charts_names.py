"""Names that JavaScript knows, charts that cannot be drawn, what is not known, and true causes."""

from __future__ import annotations

import base64
import hashlib
import re
import sqlite3
from collections import defaultdict
from html import unescape

import altair as alt
import exports as x
import polars as pl
import pytest

import nsan
from nsan.analysis.attribution.causes import causes
from nsan.analysis.catalog import catalog
from nsan.analysis.views import largest
from nsan.charting import chart
from nsan.charts.catalog import find_chart
from nsan.charts.saving import ChartError, page, rendered, specification
from nsan.charts.theme import name_text, titled, wrapped
from nsan.uvm.constants import CAUSES

ADD = x.REPOSITORY / "sample_data" / "um_vector_add_rtx4060l.sqlite"
MODEL = x.REPOSITORY / "sample_data" / "model"

# Object.getOwnPropertyNames(Object.prototype), what classes have, and the word that Vega's parser keeps.
INHERITED = [
    *("constructor", "toString", "valueOf", "hasOwnProperty", "isPrototypeOf", "__proto__"),
    *("propertyIsEnumerable", "toLocaleString", "__defineGetter__", "__defineSetter__"),
    *("__lookupGetter__", "__lookupSetter__", "prototype", "if", "null"),
]
CHARTS = ("faults_of_kernels", "faults_of_allocations", "work_over_time", "address_time_map")


def program(names):
    """A program whose kernels, NVTX ranges and allocations have these names; each moves 1 MiB, twice."""
    export = x.Export("2025.5.1")
    for i, name in enumerate(names):
        export.strings[100 + i] = name
        place = x.VA + i * 64 * x.MIB
        export.add(x.MEMORY, x.memory_event(10 + i, place, 2 * x.MIB, name=name))
        for step in range(2):
            start = 10_000 + (step * len(names) + i) * 100_000
            export.add(x.KERNEL, x.kernel(start, start + 80_000, name=100 + i))
            export.add(x.MEMCPY, x.migration(start + 10, start + 9_000, x.MIB, place))
            export.add(x.NVTX, x.nvtx(start - 10, start + 90_000, name))
    return export


@pytest.mark.parametrize("names", [INHERITED[:5], INHERITED[5:10], INHERITED[10:]])
def test_names_that_javascript_knows_are_drawn_like_any_other(names, trace_of, capfd):
    trace = trace_of(program(names))
    for which in (*CHARTS, "step_by_step"):
        svg = unescape(rendered(chart(trace, which), ".svg").decode())
        said = set(re.findall(r"<text[^>]*>([^<]*)</text>", svg))
        if which in {"faults_of_kernels", "faults_of_allocations"}:
            assert {f'"{n}"' if n not in {"prototype", "null"} else n for n in names} <= said
    # What goes wrong while a chart is drawn, the renderer writes there, and then draws less.
    assert "ERROR" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", INHERITED)
def test_a_name_in_a_title_an_order_or_a_colour_can_be_drawn(name, capfd):
    shown = name_text(name)
    rows = pl.DataFrame({"name": [shown, "b", shown], "v": [1, 2, 3], "g": ["y", "x", shown]})
    scale = alt.Scale(domain=[shown, "x", "y"], range=["red", "green", "blue"])
    bars = (
        alt.Chart(rows)
        .mark_bar()
        .encode(
            x=alt.X("v:Q", stack="zero"),
            y=alt.Y("name:N", sort=[shown, "b"]),
            color=alt.Color("g:N", scale=scale),
            tooltip="name:N",
        )
    )
    svg = rendered(bars.properties(title=titled(name, 640, [name])), ".svg").decode()
    assert svg.count('aria-roledescription="bar"') == 3
    assert "ERROR" not in "".join(capfd.readouterr())


def test_other_names_stay_as_they_are():
    assert name_text("constructor<int>") == "constructor<int>"
    assert name_text("k" * 90, 9) == "kkkk…kkkk"
    assert wrapped("see constructor", 1) == ["see", "constructor "]


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf", ".html"])
def test_a_chart_that_cannot_be_drawn_is_one_error_in_every_format(suffix):
    users = alt.Chart(pl.DataFrame({"a": [1]})).mark_text(text="constructor").encode(x="a:Q")
    with pytest.raises(
        ChartError, match=r"cannot be drawn \(Operator not defined.*\.json"
    ) as error:
        rendered(users, suffix)
    assert "\n" not in str(error.value)
    assert rendered(users, ".json").startswith(b"{")


def test_the_policy_of_a_page_allows_its_own_scripts_and_no_other_code():
    text = page(specification(chart(nsan.open_trace(ADD), "batch_rate")))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    allowed = re.search(r"script-src ([^;]*);", policy)[1].split()
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert allowed == [f"'sha256-{each}'" for each in hashes]
    assert len(allowed) == 2


# Causes of what leaves a GPU


def bars(spec):
    """Bytes of bars in MiB by label and cause, below 0 to the CPU; and counts by label."""
    moved, counts = defaultdict(float), {}
    for row in (row for rows in spec["datasets"].values() for row in rows):
        if "cause" in row:
            moved[row["label"], row["cause"], row["bytes"] < 0] += row["bytes"]
        else:
            counts[row["label"]] = row["faults"]
    return moved, counts


def test_what_cpu_faults_bring_back_has_the_cause_that_was_recorded():
    with sqlite3.connect(f"file:{ADD}?mode=ro&immutable=1", uri=True) as db:
        query = "select copyKind, migrationCause, sum(bytes) from CUPTI_ACTIVITY_KIND_MEMCPY group by 1, 2"
        recorded = {(kind, cause): size / x.MIB for kind, cause, size in db.execute(query)}
    words = {2: "page fault", 3: "speculative prefetch"}
    for name, leaver in (
        ("faults_of_kernels", "(CPU page faults)"),
        ("faults_of_allocations", None),
    ):
        moved, _ = bars(chart(nsan.open_trace(ADD), name).to_dict())
        found = defaultdict(float)
        for (label, cause, out), size in moved.items():
            found[cause, out] += size
            assert not out or leaver in {None, label}
        for cause, word in words.items():
            assert found[word, False] == pytest.approx(recorded[1 + 10, cause])
            assert -found[word, True] == pytest.approx(recorded[2 + 10, cause])
        assert len(found) == len(recorded) == 4


@pytest.mark.parametrize("sample", ["user_prefetch", "ping_pong", "two_gpus", "pca_on"])
def test_causes_of_kernels_add_up_to_the_migrations_both_ways(sample):
    trace = nsan.open_trace(MODEL / sample / f"{sample}.sqlite")
    expected = defaultdict(int)
    for way, cause, size in trace.migrations.select("direction", "cause", "bytes").collect().rows():
        expected["out" if way == "dtoh" else "in", cause] += size
    got = nsan.analyse(trace, "top_kernels").collect()
    columns = {"coherence": "{}_coherence_bytes", "prefetch": "{}_prefetch_bytes"}
    columns |= {"user": "{}_user_bytes", "eviction": "evicted_bytes"}
    for way in ("in", "out"):
        for cause in CAUSES.values():
            column = columns.get(cause, "").format(way)
            if way == "in":
                column = column.replace("in_coherence", "coherence").replace("in_pre", "pre")
            if column in got.columns and (way, cause) != ("in", "eviction"):
                assert got[column].sum() == expected[way, cause], column


@pytest.mark.parametrize("sample", ["user_prefetch", "ping_pong", "first_touch"])
def test_with_one_gpu_the_short_way_gives_what_each_copy_is_laid_to(sample):
    trace = nsan.open_trace(MODEL / sample / f"{sample}.sqlite")
    reads = catalog()["top_kernels"].reads
    tables = [getattr(trace, name).lazy() for name in reads]
    short, long = largest._by_cause(*tables), largest._by_work(causes(*tables))
    for frame, other in ((short, long), (long, short)):
        for row in frame.fill_null(0).to_dicts():
            key = {"work": row["work"], "device_id": row["device_id"]}
            same = other.filter(work=key["work"], device_id=key["device_id"])
            for name in largest._SPLIT:
                assert row[name] == (same[name].sum() if row["work"] != "kernel" else 0)


def test_a_copy_on_its_way_to_another_gpu_is_drawn_with_its_cause(trace_of):
    export = x.Export()
    export.add(x.KERNEL, x.kernel(0, 100_000, name=1), x.kernel(0, 100_000, device=1, name=1))
    export.add(
        x.MEMCPY,
        x.migration(1_000, 2_000, 65_536, kind=x.DTOH, device=0),
        x.migration(2_500, 3_500, 65_536, kind=x.HTOD, device=1),
        # A fault of the CPU: nothing goes on to a GPU.
        x.migration(150_000, 151_000, 4_096, kind=x.DTOH, device=1),
    )
    got = nsan.analyse(trace_of(export), "top_kernels").collect()
    left = got.filter(pl.col("out_bytes") > 0).select("part", "out_bytes", "out_coherence_bytes")
    assert sorted(left.rows()) == [("cpu", 4_096, 4_096), ("named", 65_536, 65_536)]


# What is not known


def kernels_counted(*counts):
    """Figures of kernels with such counts of fault rows; null: not known."""
    schema = catalog()["top_kernels"].result.schema
    rows = [
        {"pid": 1, "device_id": 0, "rank": i + 1, "part": "named", "name": f"k{i}", "n_names": 1}
        | {"in_bytes": x.MIB, "coherence_bytes": x.MIB, "n_fault_rows": n}
        for i, n in enumerate(counts)
    ]
    return pl.DataFrame(rows, schema=schema)


def test_a_count_that_is_not_known_has_no_bar_and_says_so():
    drawn = find_chart("faults_of_kernels").draw(kernels_counted(5, None, 0))
    assert bars(drawn.to_dict())[1] == {"k0": 5, "k1": None, "k2": 0}
    svg = rendered(drawn, ".svg").decode()
    assert svg.count(">not recorded</text>") == 1
    assert svg.count('aria-roledescription="bar"') == 3 + 2


def test_where_neither_rows_nor_batches_are_known_no_count_is_drawn():
    svg = rendered(
        find_chart("faults_of_kernels").draw(kernels_counted(None, None)), ".svg"
    ).decode()
    assert svg.count(">not recorded</text>") == 2
    assert svg.count('aria-roledescription="bar"') == 2


# Empty parts


def test_a_part_without_rows_says_that_the_part_is_empty():
    part = nsan.open_trace(ADD).filter(time="500s/600s")
    for name in ("migrations_over_time", "faults_of_kernels", "work_over_time"):
        spec = chart(part, name).to_dict()
        said = " ".join(row["text"] for rows in spec["datasets"].values() for row in rows)
        assert "Nothing is in the part that was asked for." in said
        assert "Nothing in this capture" not in said


def test_a_reason_why_nothing_is_there_is_not_said_twice():
    spec = chart(nsan.open_trace(ADD), "refault_distance").to_dict()
    said = " ".join(row["text"] for rows in spec["datasets"].values() for row in rows)
    assert said == "Nothing that was evicted came back."


# What would mislead


def test_the_legend_of_several_panels_has_no_level_that_none_of_them_has():
    spec = chart(nsan.open_trace(MODEL / "two_gpus" / "two_gpus.sqlite"), "memory_held").to_dict()
    drawn = {row["level"] for rows in spec["datasets"].values() for row in rows}
    domain = spec["vconcat"][0]["layer"][0]["encoding"]["color"]["scale"]["domain"]
    assert {*domain} == drawn
    assert len(domain) < 5


def test_one_other_is_no_others():
    one, two = (
        kernels_counted(3, 3).with_columns(
            n_names=pl.Series([1, n], dtype=pl.Int64),
            part=pl.Series(["named", "others"], dtype=largest.PART),
        )
        for n in (1, 2)
    )
    labels = [
        {*bars(find_chart("faults_of_kernels").draw(each).to_dict())[1]} for each in (one, two)
    ]
    assert labels == [{"k0", "(1 other)"}, {"k0", "(2 others)"}]


def test_an_axis_of_counts_that_are_all_zero_begins_with_zero():
    spec = find_chart("faults_of_kernels").draw(kernels_counted(0, 0)).to_dict()
    assert spec["vconcat"][0]["hconcat"][1]["encoding"]["x"]["scale"]["domain"] == [0, 1]


@pytest.mark.parametrize(("smallest", "side"), [(4_096, "left"), (1 << 20, "right")])
def test_a_ceiling_is_named_where_its_line_is(smallest, side, trace_of):
    rows = [
        x.migration(
            i * 10**6, i * 10**6 + 1_000 + size // 10, size, x.VA + i * 4 * x.MIB, kind=kind
        )
        for kind, first in ((x.HTOD, 4_096), (x.DTOH, smallest))
        for i, size in enumerate((first, 2 * x.MIB), start=10 * (kind == x.DTOH))
    ]
    spec = chart(trace_of(x.Export().add(x.MEMCPY, *rows)), "transfer_sizes").to_dict()
    out = spec["vconcat"][-1] if "DtoH" in str(spec["vconcat"][-1]) else spec["vconcat"][0]
    marks = [layer["mark"] for layer in out["layer"] if layer["mark"].get("type") == "text"]
    assert [mark["align"] for mark in marks] == [side]
