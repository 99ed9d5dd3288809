"""Charts of traffic, batches, transfers and the address-time map; and what holds of every chart."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import zlib
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

import altair as alt
import exports as x
import polars as pl
import pytest

import nsan
from nsan.analysis.views.map import MAX_CELLS
from nsan.analysis.views.rates import main_part, round_width
from nsan.charting import analyses_of, chart, drawn_frames
from nsan.charts.catalog import MAX_ROWS, NOTHING, charts, find_chart
from nsan.charts.saving import rendered, save
from nsan.charts.theme import LOOKS, exact_time, themed, time_axis
from nsan.errors import OutputExistsError, UsageError
from nsan.units import format_count

ROOT = Path(nsan.__file__).parent.parent
MODEL = ROOT / "sample_data" / "model"
SWEEP = MODEL / "oversubscribed_sweep" / "oversubscribed_sweep.sqlite"
N = 200 if os.environ.get("NSAN_SOAK") == "1" else 10
NAMES = list(charts())
MB = 1_000_000
BLOCK = 2 * x.MIB

HOSTILE = {
    "script": "</script><img src=x onerror=alert(1)>",
    "template": "{{7*7}} ${7*7} <!--",
    "right to left": "add\u202egnp.exe\u2066",
    "control": "add\x1b[31m\x00\nkernel",
    "long": "k" * 20_000,
}


@cache
def sample(subject, cache_dir):
    """Open what charts of a subject are drawn from, once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSAN_CACHE_DIR", cache_dir)
        if subject == "trace":
            return nsan.open_trace(SWEEP)
        snapshot = MODEL / "pca_on" / "snapshot.pickle"
        if subject == "snapshot":
            return nsan.open_snapshot(snapshot)
        return nsan.join(nsan.open_trace(MODEL / "pca_on" / "pca_on.sqlite"), snapshot)


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """Open the sample that a chart is drawn from."""
    folder = str(tmp_path_factory.mktemp("charts"))
    return lambda name: sample(find_chart(name).subject, folder)


@pytest.fixture(scope="module")
def frames_of(source_of):
    """Compute what a chart draws, once."""
    return cache(lambda name: drawn_frames(source_of(name), find_chart(name))[0])


@pytest.fixture(scope="module")
def drawn(source_of):
    """Draw a chart by name, once."""
    return cache(lambda name: chart(source_of(name), name).to_dict())


def paeth(left, above, corner):
    guess = left + above - corner
    far = (abs(guess - left), abs(guess - above), abs(guess - corner))
    return (left, above, corner)[far.index(min(far))]


def colours(png):
    """Decode an 8-bit PNG by the standard's filters; count its colours."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, width, samples = 8, b"", 0, 0
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, _, depth, form = struct.unpack(">IIBB", body[:10])
            assert depth == 8
            samples = {2: 3, 6: 4}[form]
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    raw, row = zlib.decompress(data), width * samples
    above, found = bytearray(row), Counter()
    for start in range(0, len(raw), row + 1):
        kind, line = raw[start], bytearray(raw[start + 1 : start + 1 + row])
        for i in range(row if kind else 0):
            left = line[i - samples] if i >= samples else 0
            corner = above[i - samples] if i >= samples else 0
            added = (0, left, above[i], (left + above[i]) // 2, paeth(left, above[i], corner))
            line[i] = (line[i] + added[kind]) % 256
        found.update(bytes(line[i : i + 3]) for i in range(0, row, samples))
        above = line
    return found


def specs(node):
    """Walk through a specification, data and configuration left out."""
    if isinstance(node, dict):
        yield node
        for key, value in node.items():
            if key not in {"datasets", "config"}:
                yield from specs(value)
    elif isinstance(node, list):
        for value in node:
            yield from specs(value)


def axes(spec):
    """Titles and types of the axes that are drawn, the title of a layer from whichever has one."""
    for view in specs(spec):
        layers = view.get("layer", [view] if "mark" in view else [])
        for channel in ("x", "y"):
            found = [each.get("encoding", {}).get(channel) for each in layers]
            found = [f for f in found if isinstance(f, dict) and "field" in f]
            if found and all(f.get("axis", {}) is not None for f in found):
                yield channel, found[0]["type"], [f["title"] for f in found if "title" in f]


UNIT = re.compile(
    r"\b(ns|us|ms|s|byte|KiB|MiB|GiB|GB/s|MB/s|kB/s|per \d+|[Rr]ows|[Bb]atches|[Cc]opies|pages|"
    r"hexadecimal|logarithmic|%)\b"
)


@pytest.mark.parametrize("name", NAMES)
def test_a_chart_says_what_its_axes_measure(name, drawn):
    spec = drawn(name)
    titles = []
    for _, kind, given in axes(spec):
        assert len(set(given)) <= 1
        if kind == "quantitative":
            titles += [title for title in given if title is not None]
    assert titles
    for title in titles:
        assert UNIT.search(title), title
    assert spec["title"]["text"]


@pytest.mark.parametrize("name", NAMES)
def test_what_shows_under_the_pointer_has_a_name_that_people_read(name, drawn):
    shown = [
        view["encoding"]["tooltip"]
        for view in specs(drawn(name))
        if "tooltip" in view.get("encoding", {})
    ]
    # An area has no row of its own under the pointer.
    assert shown or name in {"memory_held", "allocator_over_time"}
    for each in (line for lines in shown for line in lines):
        assert each.get("title", "")[:1].isupper(), each


@pytest.mark.parametrize("name", NAMES)
def test_a_chart_of_what_the_model_made_says_so(name, drawn):
    said = " ".join(drawn(name)["title"]["subtitle"])
    assert "modelled: written by nsan's UVM driver model, not recorded" in said


@pytest.mark.parametrize("name", NAMES)
def test_a_chart_has_no_more_rows_than_a_browser_may_get_and_no_number_that_it_would_round(
    name, drawn
):
    limits = dict(alt.data_transformers.options)
    spec = drawn(name)
    rows = [row for data in spec["datasets"].values() for row in data]
    assert 0 < len(rows) <= MAX_ROWS == 5000
    numbers = [v for row in rows for v in row.values() if isinstance(v, int | float)]
    assert all(abs(v) < 1 << 53 for v in numbers)
    # The limit of the user's session is what it was; 5000 is Altair's own.
    assert dict(alt.data_transformers.options) == limits == {}
    assert alt.data_transformers.active == "default"


@pytest.mark.parametrize("theme", LOOKS)
@pytest.mark.parametrize("name", NAMES)
def test_a_chart_renders_and_is_not_blank(name, theme, frames_of):
    picture = find_chart(name).draw(*frames_of(name), theme=theme)
    found = colours(rendered(picture, ".png", scale=0.12))
    ground = bytes.fromhex(LOOKS[theme].ground[1:])
    assert found[ground] >= 50
    # Text alone is grey on the ground: data have a hue.
    assert sum(n for c, n in found.items() if max(c) - min(c) > 30) >= 8


def test_a_blank_picture_is_found_to_be_blank():
    blank = alt.Chart(pl.DataFrame({"a": [1]})).mark_point(opacity=0).encode()
    assert len(colours(rendered(blank.properties(width=40, height=20), ".png", scale=1))) <= 3


def texts_of(spec):
    return " ".join(row["text"] for data in spec["datasets"].values() for row in data).split()


@pytest.mark.parametrize("name", NAMES)
def test_a_chart_of_nothing_says_that_there_is_nothing(name):
    found = find_chart(name)
    spec = found.draw(*(each.result.empty().collect() for each in analyses_of(found))).to_dict()
    assert texts_of(spec) == NOTHING.split()
    assert spec["title"]["text"] == [found.title]


def test_a_chart_of_a_trace_says_why_there_is_nothing(trace_of):
    trace = trace_of(x.Export().add(x.KERNEL, x.kernel(0, 1000)))
    for name in ("migrations_over_time", "address_time_map", "transfer_sizes", "batch_rate"):
        said = " ".join(texts_of(chart(trace, name).to_dict()))
        assert analyses_of(find_chart(name))[0].result.nothing in said


@pytest.mark.parametrize("name", NAMES)
def test_a_chart_fits_a_column_of_a_paper(name, frames_of):
    svg = rendered(find_chart(name).draw(*frames_of(name), width=420), ".svg").decode()
    whole = float(re.search(r'<svg[^>]* width="([\d.]+)"', svg)[1])
    assert 420 <= whole <= 420 + 200


def test_a_width_or_theme_that_cannot_be_drawn_is_refused(source_of):
    source = source_of("batch_rate")
    with pytest.raises(UsageError, match="ask for 200 to 4000"):
        chart(source, "batch_rate", width=10)
    with pytest.raises(UsageError, match="light, dark"):
        chart(source, "batch_rate", theme="blue")
    with pytest.raises(UsageError, match="migrations_over_time"):
        chart(source, "migration")
    with pytest.raises(UsageError, match="n_bins"):
        chart(source, "batch_rate", options={"bins": 3})


def test_more_rows_than_a_chart_may_have_are_refused_with_the_way_out():
    found = find_chart("batch_rate")
    row = {"start_ns": 0, "end_ns": 1, "access": "read", "n_batches": 1, "before_batches": 0}
    row |= {"bytes": 1, "evicted_bytes": 0, "kind": "derived", "n_gpus": 1, "n_far": 0}
    frame = pl.DataFrame([row] * (MAX_ROWS + 1), schema=analyses_of(found)[0].result.schema)
    assert found.draw(frame.head(MAX_ROWS)).to_dict()
    with pytest.raises(UsageError, match="5001 rows, and a chart has 5000 at most"):
        found.draw(frame)


# What moved over time


def moves(trace_of, *rows):
    return trace_of(x.Export().add(x.MEMCPY, *rows))


def analysed(trace, name, **options):
    return nsan.analyse(trace, name, options=options).collect()


def test_copies_count_where_they_start_and_stack_by_cause(trace_of):
    trace = moves(
        trace_of,
        x.migration(0, 5 * MB, 4096),
        x.migration(999_999, MB + 5, 8192, cause=x.PREFETCH),
        x.migration(MB, MB + 5, 100 * 4096, cause=x.PREFETCH),
        x.migration(MB, MB + 9, 4096, kind=x.DTOH, cause=x.EVICTION),
        x.migration(9 * MB, 10 * MB, 65536),
    )
    found = analysed(trace, "causes_over_time", n_bins=10)
    kept = ("start_ns", "end_ns", "direction", "cause", "n_migrations", "bytes", "before_bytes")
    assert found.select(kept).rows() == [
        (0, MB, "htod", "coherence", 1, 4096, 0),
        (0, MB, "htod", "prefetch", 1, 8192, 4096),
        (MB, 2 * MB, "htod", "prefetch", 1, 409_600, 0),
        (MB, 2 * MB, "dtoh", "eviction", 1, 4096, 0),
        (9 * MB, 10 * MB, "htod", "coherence", 1, 65536, 0),
    ]
    assert found["n_gpus"].unique().to_list() == [1]


def test_what_came_in_is_drawn_upwards_and_what_left_downwards(trace_of):
    trace = moves(
        trace_of,
        x.migration(0, 10, 3 * x.MIB),
        x.migration(10, 20, x.MIB, cause=x.PREFETCH),
        x.migration(20, 30, 2 * x.MIB, kind=x.DTOH, cause=x.EVICTION),
    )
    spec = chart(trace, "migrations_over_time", options={"n_bins": 1}).to_dict()
    bars = max(spec["datasets"].values(), key=len)
    drawn = {(b["cause"], b["direction"]): (b["low"], b["high"]) for b in bars}
    assert drawn == {
        ("page fault", "HtoD"): (0, 3),
        ("speculative prefetch", "HtoD"): (3, 4),
        ("eviction", "DtoH"): (0, -2),
    }
    title = spec["layer"][0]["encoding"]["y"]["title"]
    assert title.startswith("← out of GPU, MiB")
    assert "Bytes of 3 copies" in spec["title"]["subtitle"][0]


def test_a_bar_too_low_to_be_seen_is_two_pixels_high_and_a_note_says_so(trace_of):
    trace = moves(
        trace_of,
        x.migration(0, 10, 260 * x.MIB),
        x.migration(MB, MB + 10, 4096, kind=x.DTOH, cause=x.EVICTION),
    )
    spec = chart(trace, "migrations_over_time", options={"n_bins": 2}).to_dict()
    bars = max(spec["datasets"].values(), key=len)
    # 260 MiB in 260 pixels: two pixels are 2 MiB.
    assert sorted((b["low"], round(b["high"], 3), b["moved"]) for b in bars) == [
        (0, -2.0, "4.00 KiB"),
        (0, 260, "260.00 MiB"),
    ]
    assert "A bar is at least 2 pixels high." in " ".join(spec["title"]["subtitle"])
    high = moves(trace_of, x.migration(0, 10, x.MIB), x.migration(MB, MB + 10, x.MIB))
    assert "pixels" not in json.dumps(chart(high, "migrations_over_time").to_dict())


def test_copies_between_gpus_have_a_row_of_their_own_on_the_same_time(trace_of):
    row = x.migration(50, 60, x.MIB, kind=x.DTOD) | {"srcDeviceId": 0, "dstDeviceId": 1}
    spec = chart(moves(trace_of, x.migration(0, 10, 4096), row), "migrations_over_time").to_dict()
    across, between = spec["vconcat"]
    x_of = [part["layer"][0]["encoding"]["x"] for part in (across, between)]
    assert x_of[0]["scale"]["domain"] == x_of[1]["scale"]["domain"]
    assert between["layer"][0]["encoding"]["y"]["title"] == "Between GPUs, MiB"


@pytest.mark.parametrize("seed", range(N))
def test_no_byte_of_the_sample_is_lost_in_stretches(seed, source_of):
    trace = source_of("batch_rate")
    found = analysed(
        trace, "causes_over_time", n_bins=random.Random(seed).randint(1, 400), keep_far=True
    )
    # Plain SQL on the export itself.
    asked = x.ask(
        SWEEP,
        "SELECT copyKind, migrationCause, count(*), sum(bytes) FROM CUPTI_ACTIVITY_KIND_MEMCPY "
        "WHERE copyKind IN (11, 12, 13) GROUP BY 1, 2",
    )
    kinds = {"htod": 11, "dtoh": 12, "dtod": 13}
    causes = {"user": 1, "coherence": 2, "prefetch": 3, "eviction": 4}
    sums = defaultdict(lambda: [0, 0])
    for row in found.iter_rows(named=True):
        one = sums[kinds[row["direction"]], causes[row["cause"]]]
        one[0] += row["n_migrations"]
        one[1] += row["bytes"]
    assert {key: tuple(one) for key, one in sums.items()} == {
        (k, c): (n, b) for k, c, n, b in asked
    }


def test_a_few_rows_far_from_all_others_are_left_out_and_told(trace_of):
    near = [x.migration(i * 1000, i * 1000 + 5, 4096) for i in range(200)]
    far = x.migration(60_000 * MB, 60_000 * MB + 5, 8192, kind=x.DTOH)
    trace = moves(trace_of, *near, far)
    found = analysed(trace, "causes_over_time")
    assert found["n_far"].unique().to_list() == [1]
    assert found["bytes"].sum() == 200 * 4096
    assert found["end_ns"].max() <= 200 * 1000
    assert analysed(trace, "causes_over_time", keep_far=True)["bytes"].sum() == 200 * 4096 + 8192
    said = " ".join(chart(trace, "migrations_over_time").to_dict()["title"]["subtitle"])
    assert "Without 1 row far in time from all others" in said


def test_what_is_far_is_few_and_behind_a_long_pause():
    times = list(range(100))
    # Half of the whole is no long pause; two of a hundred and two are more than one in a hundred.
    assert main_part(pl.Series([*times, 198])) == (0, 198)
    assert main_part(pl.Series([*times, 199])) == (0, 99)
    assert main_part(pl.Series([*times, 900, 901])) == (0, 901)
    assert main_part(pl.Series([-5000, *times])) == (0, 99)
    assert main_part(pl.Series([0, 1 << 60])) == (0, 1 << 60)
    assert main_part(pl.Series([], dtype=pl.Int64)) is None


@pytest.mark.parametrize(
    ("span", "n", "width"),
    [(0, 5, 1), (10, 10, 1), (11, 10, 2), (21, 10, 5), (51, 10, 10), (10**9, 120, 10**7)],
)
def test_stretches_have_round_lengths(span, n, width):
    assert round_width(span, n) == width
    assert -(-span // width) <= n


# Batches


def test_batches_count_where_their_fault_was_raised_by_access(trace_of):
    export = x.Export().add(
        x.GPU_FAULTS,
        x.gpu_fault(0, 50_000, access=x.READ),
        x.gpu_fault(60_000, 90_000, x.VA + x.MIB, access=x.WRITE),
        x.gpu_fault(99_999, 200_000, x.VA + 2 * x.MIB, access=x.READ),
        x.gpu_fault(150_000, 350_000, x.VA + 3 * x.MIB, access=x.READ),
        x.gpu_fault(999_999, 1_200_000, x.VA + 5 * x.MIB, access=x.READ),
    )
    trace = trace_of(export)
    found = analysed(trace, "batches_over_time", n_bins=10)
    assert found.select("start_ns", "access", "n_batches", "before_batches").rows() == [
        (0, "read", 2, 0),
        (0, "write", 1, 2),
        (100_000, "read", 1, 0),
        (900_000, "read", 1, 0),
    ]
    times = analysed(trace, "service_over_time", n_bins=10)
    # Service is without the wait for the batch before: the third waits until 90 000, the fourth
    # until 200 000.
    first = times.row(0, named=True)
    assert first["n_batches"] == 3
    assert first["latency_p50_ns"] == 50_000
    assert first["latency_max_ns"] == 200_000 - 99_999
    assert first["service_p50_ns"] == 50_000
    assert times["service_p50_ns"].to_list()[1:] == [150_000, 200_001]
    classes = analysed(trace, "batch_time_classes")
    for figure in ("service", "latency"):
        assert classes.filter(figure=figure)["n_batches"].sum() == 5
    for row in classes.iter_rows(named=True):
        assert row["max_ns"] / row["min_ns"] == pytest.approx(2**0.25)


def test_batches_of_copies_alone_are_said_to_be_reconstructed():
    trace = nsan.open_trace(ROOT / "sample_data" / "um_vector_add_rtx4060l.sqlite")
    spec = chart(trace, "batch_rate").to_dict()
    said = " ".join(spec["title"]["subtitle"])
    assert "reconstructed: an inference with self-checks" in said
    assert "GPU faults: not recorded" in said
    assert "12 batches" in said
    assert "derived" not in said
    times = chart(trace, "batch_service").to_dict()
    (text,) = (row["text"] for data in times["datasets"].values() for row in data)
    assert text.replace("\n", " ").startswith("Only GPU fault rows tell how long a batch takes")


# Transfers


def test_the_ceiling_of_a_link_that_was_made_by_hand_is_found_and_drawn(trace_of):
    # 2 us and 8 byte/ns: copies of 16 000 byte take 4 us and reach 4 GB/s.
    sizes = [4096, 16_000, 65_536, 262_144, 1_048_576]
    rows = [
        x.migration(i * MB, i * MB + 2000 + size // 8, size) for i, size in enumerate(sizes * 3)
    ]
    trace = moves(trace_of, *rows)
    curves = analysed(trace, "transfer_curves")
    assert curves["ceiling_bytes_per_s"].unique().to_list() == [pytest.approx(8e9, rel=1e-6)]
    assert curves["latency_ns"].unique().to_list() == [pytest.approx(2000, rel=1e-6)]
    for size, rate in curves.select("bytes", "bytes_per_s").iter_rows():
        assert rate == pytest.approx(size / (2000 + size / 8) * 1e9, rel=1e-5)
    assert curves["bytes"].min() == pytest.approx(4096)
    assert curves["bytes"].max() == pytest.approx(1_048_576)
    spec = chart(trace, "transfer_sizes").to_dict()
    labels = [r["label"] for d in spec["datasets"].values() for r in d if "label" in r]
    assert labels == ["8.00 GB/s after 2.000 us"]
    assert spec["layer"][0]["encoding"]["x"]["scale"]["type"] == "log"
    assert "reconstructed" in " ".join(spec["title"]["subtitle"])


def test_copies_of_one_size_have_no_ceiling_and_the_chart_says_so(trace_of):
    trace = moves(trace_of, *(x.migration(i * MB, i * MB + 100, 2 * x.MIB) for i in range(5)))
    assert analysed(trace, "transfer_curves").is_empty()
    said = " ".join(chart(trace, "transfer_sizes").to_dict()["title"]["subtitle"])
    assert "No ceiling: it takes copies of two sizes or more." in said


@pytest.mark.parametrize("seed", range(N))
def test_each_copy_is_in_the_cell_of_its_size_and_throughput(seed, trace_of):
    pick = random.Random(seed)
    sizes = [pick.choice([4096, 8192, 65_536, 300_000, 1 << 21]) for _ in range(60)]
    rows = [
        x.migration(i * MB, i * MB + pick.randint(1, 9000), n, kind=pick.choice([x.HTOD, x.DTOH]))
        for i, n in enumerate(sizes)
    ]
    cells = analysed(moves(trace_of, *rows), "transfer_cells").to_dicts()
    assert sum(cell["n_migrations"] for cell in cells) == len(rows)
    assert sum(cell["bytes"] for cell in cells) == sum(sizes)
    near = 1 + 1e-9
    for row in rows:
        way = {x.HTOD: "htod", x.DTOH: "dtoh"}[row["copyKind"]]
        rate = row["bytes"] * 1e9 / (row["end"] - row["start"])
        assert any(
            cell["direction"] == way
            and cell["min_bytes"] / near <= row["bytes"] <= cell["max_bytes"] * near
            and cell["min_bytes_per_s"] / near <= rate <= cell["max_bytes_per_s"] * near
            for cell in cells
        )


# The address-time map


def test_a_map_folds_unused_addresses_and_labels_them_as_text(trace_of):
    high = -(1 << 47)  # 0xffff800000000000, as SQLite keeps it
    trace = moves(
        trace_of,
        x.migration(0, 10, 2 * x.MIB, x.VA),
        x.migration(100, 110, x.MIB, high + x.MIB // 2, kind=x.DTOH, cause=x.EVICTION),
    )
    runs = analysed(trace, "address_runs")
    assert runs.select("va_start", "place_start", "place_end", "n_blocks").rows() == [
        (x.VA, 0, BLOCK, 1),
        (0xFFFF_8000_0000_0000, BLOCK, 2 * BLOCK, 1),
    ]
    cells = analysed(trace, "address_time_cells", n_columns=2, n_rows=4)
    # 4 MiB in four rows of 1 MiB: the first copy fills two, and faulted; the second half of two.
    kept = ("layer", "row", "va", "category", "bytes", "n_rows")
    assert cells.select(kept).rows() == [
        ("faults", 0, x.VA, "unknown", x.MIB, 0),
        ("faults", 1, x.VA + x.MIB, "unknown", x.MIB, 0),
        ("in", 0, x.VA, "coherence", x.MIB, 1),
        ("in", 1, x.VA + x.MIB, "coherence", x.MIB, 0),
        ("out", 2, 0xFFFF_8000_0000_0000, "eviction", x.MIB // 2, 1),
        ("out", 3, 0xFFFF_8000_0010_0000, "eviction", x.MIB // 2, 0),
    ]
    spec = chart(trace, "address_time_map").to_dict()
    labels = {
        match
        for view in specs(spec)
        for match in re.findall(r'"(0x[0-9a-f]+)"', str(view.get("labelExpr", "")))
    }
    assert labels == {"0x7f0000000000", "0xffff800000000000"}
    assert "1 gap folded" in " ".join(spec["title"]["subtitle"])
    folds = [
        view for view in specs(spec) if view.get("mark", {}) and view["mark"]["type"] == "rule"
    ]
    assert len(folds) == len(spec["vconcat"]) == 3


@pytest.mark.parametrize(
    ("causes", "head"),
    [
        ([x.PREFETCH, x.PREFETCH], "Into GPUs, by cause: speculative prefetch only"),
        (
            [x.PREFETCH, x.COHERENCE],
            "Into GPUs, by cause: speculative prefetch has most in each cell",
        ),
        ([0, 0], "Into GPUs, by cause: not known"),
        ([0, x.COHERENCE], "Into GPUs, by cause: unknown has most in each cell"),
    ],
)
def test_a_map_says_only_where_there_is_no_other_cause(causes, head, trace_of):
    sizes = (65_536, 4096)
    rows = [
        x.migration(at, at + 1, size, x.VA, cause=cause)
        for at, (size, cause) in enumerate(zip(sizes, causes, strict=True))
    ]
    options = {"n_columns": 1, "n_rows": 1}
    spec = chart(moves(trace_of, *rows), "address_time_map", options=options).to_dict()
    heads = [" ".join(each["title"]["text"]) for each in spec["vconcat"]]
    assert head in heads


def test_a_map_of_the_real_sample_hides_no_page_fault():
    path = ROOT / "sample_data" / "um_vector_add_rtx4060l.sqlite"
    counts = "SELECT migrationCause, count(*) FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind = 11 GROUP BY 1"
    # In each cell the page is fewer bytes than what is prefetched around it.
    assert dict(x.ask(path, counts)) == {x.COHERENCE: 24, x.PREFETCH: 24}
    spec = chart(nsan.open_trace(path), "address_time_map").to_dict()
    heads = [" ".join(each["title"]["text"]) for each in spec["vconcat"]]
    assert "Into GPUs, by cause: speculative prefetch has most in each cell" in heads
    assert not any("only" in each for each in heads)


def test_faulted_pages_have_the_access_of_the_batch_that_brought_them(trace_of):
    export = (
        x.Export()
        .add(
            x.GPU_FAULTS,
            x.gpu_fault(0, 100, x.VA, access=x.READ),
            x.gpu_fault(100, 300, x.VA + BLOCK, access=x.WRITE),
            x.gpu_fault(300, 400, x.VA + 2 * BLOCK, access=x.ATOMIC),
        )
        .add(
            x.MEMCPY,
            x.migration(10, 20, 8192, x.VA),
            x.migration(110, 120, 4096, x.VA + BLOCK),
            x.migration(130, 140, 61_440, x.VA + BLOCK + 4096, cause=x.PREFETCH),
            x.migration(290, 310, 4096, x.VA + 3 * BLOCK),
        )
    )
    cells = analysed(trace_of(export), "address_time_cells", n_columns=1, n_rows=4)
    faults = cells.filter(pl.col("layer") == "faults")
    # What the prefetcher brought did not fault; the third batch copied nothing; the last copy
    # reaches out of the batch that ends next.
    assert faults.select("category", "n_pages", "n_rows").rows() == [
        ("read", 2, 1),
        ("write", 1, 1),
        ("atomic", 0, 1),
        ("unknown", 1, 0),
    ]
    moved = cells.filter(pl.col("layer") == "in").select("category", "bytes", "category_fraction")
    assert moved.row(1)[:2] == ("prefetch", 65_536)
    # As weight, each row of the trace counts a page more.
    assert moved.row(1)[2] == pytest.approx((61_440 + 4096) / (65_536 + 2 * 4096))


@pytest.mark.parametrize("seed", range(N))
def test_the_cells_of_the_sample_are_those_of_a_plain_loop(seed, source_of):
    pick = random.Random(seed)
    columns, rows = pick.randint(1, 60), pick.choice([3, 7, 12, 24, 50])
    trace = source_of("batch_rate")
    found = analysed(
        trace, "address_time_cells", n_columns=columns, n_rows=rows, keep_far=True
    ).filter(pl.col("layer") != "faults")
    grain = found["place_end"][0] - found["place_start"][0]
    width = found["end_ns"][0] - found["start_ns"][0]
    runs = analysed(trace, "address_runs").select("va_start", "place_start", "n_blocks").rows()
    loop = defaultdict(int)
    for start, va, size, kind in x.ask(
        SWEEP,
        "SELECT start, virtualAddress, bytes, copyKind FROM CUPTI_ACTIVITY_KIND_MEMCPY "
        "WHERE copyKind IN (11, 12)",
    ):
        (place,) = (p + va - v for v, p, n in runs if v <= va < v + n * BLOCK)
        layer = "in" if kind == 11 else "out"
        end = place + size
        while place < end:
            step = min(end - place, grain - place % grain)
            loop[layer, start // width * width, place // grain] += step
            place += step
    cells = found.select("layer", "start_ns", "row", "bytes").rows()
    assert {(layer, start, row): size for layer, start, row, size in cells} == dict(loop)
    assert found["row"].max() < rows


def test_a_map_of_scattered_memory_stays_within_what_a_chart_may_have(trace_of):
    pick = random.Random(5)
    rows = [
        x.migration(
            pick.randint(0, 10**9),
            10**9 + 1,
            65_536,
            x.VA + pick.randint(0, 4000) * BLOCK,
            kind=pick.choice([x.HTOD, x.DTOH]),
        )
        for _ in range(12_000)
    ]
    cells = analysed(moves(trace_of, *rows), "address_time_cells")
    assert MAX_CELLS / 4 < cells.height <= MAX_CELLS
    whole = cells.filter(pl.col("layer") != "faults")
    assert whole["bytes"].sum() == 12_000 * 65_536
    assert whole["n_rows"].sum() == 12_000


# Axes


def test_numbers_of_axes_and_tooltips_are_grouped_as_those_of_texts(drawn):
    for name in NAMES:
        locale = drawn(name)["config"]["locale"]["number"]
        assert f"12{locale['thousands']}345" == format_count(12_345)
    frame = pl.DataFrame({"x": [0, 50_000]})
    svg = rendered(themed(alt.Chart(frame).mark_point().encode(x="x:Q"), "light"), ".svg").decode()
    assert ">50 000<" in svg


def test_no_cell_of_transfers_touches_the_frame(source_of):
    cells = drawn_frames(source_of("transfer_sizes"), find_chart("transfer_sizes"))[0][0]
    spec = chart(source_of("transfer_sizes"), "transfer_sizes").to_dict()
    domains = [
        view["domain"]
        for view in specs(spec)
        if view.get("base") == 2 and view.get("type") == "log"
    ]
    assert domains
    for low, high in domains:
        assert low < 0.9 * cells["min_bytes"].min()
        assert high > 1.1 * cells["max_bytes"].max()


@pytest.mark.parametrize(
    ("first", "last", "title"),
    [
        (0, 5 * MB, "Time since session start, ms"),
        (-3 * MB, 5 * MB, "Time since session start, ms"),
        (0, 1500, "Time since session start, ns"),
        (265 * MB + 123, 271 * MB, "Time since 265 ms of the session, ms"),
        (1_755_488_485_007_621_229, 1_755_488_485_007_641_229, None),
    ],
)
def test_times_are_told_from_an_origin_so_that_no_digit_is_lost(first, last, title):
    time = time_axis(first, last)
    frame = pl.DataFrame({"t": [first, first + 1, last]})
    placed = frame.select(time.of("t")).to_series()
    assert placed.n_unique() == 3
    assert [round(v * time.ns) + time.origin_ns for v in placed] == [first, first + 1, last]
    assert title in {None, time.title}
    assert all(abs(v) < 1 << 40 for v in placed)


def test_a_length_of_time_is_written_exactly():
    for ns in (1, 999, 1500, 20_000, 1_000_001, 43_900 * MB, -5 * MB):
        number, unit = exact_time(ns).split()
        factor = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}[unit]
        assert round(float(number) * factor) == ns


# Saved charts


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_name_is_text_in_a_saved_chart(what, trace_of, tmp_path):
    export = x.Export().add(x.KERNEL, x.kernel(0, 1000, name=77))
    export.add(x.MEMCPY, x.migration(100, 200, 65_536)).strings[77] = HOSTILE[what]
    trace = trace_of(export)
    for name in ("faults_of_kernels", "work_over_time"):
        drawn = chart(trace, name)
        svg = save(drawn, tmp_path / f"{name}.svg").read_text("utf-8")
        tags = {element.tag.split("}")[1] for element in ET.fromstring(svg).iter()}
        assert tags <= {
            "svg",
            "g",
            "path",
            "text",
            "tspan",
            "rect",
            "line",
            "defs",
            "clipPath",
            "linearGradient",
            "stop",
            "title",
            "desc",
            "style",
        }
        page = save(drawn, tmp_path / f"{name}.html").read_text("utf-8")
        data = page.partition('<script type="application/json" id="spec">')[2].partition(
            "</script>"
        )[0]
        assert "<" not in data
        assert json.loads(data) == drawn.to_dict()
        # Three scripts open and three close: none is from the data.
        assert page.count("<script") == len(re.findall("</script", page, re.IGNORECASE)) == 3
        assert not re.search(
            r"<(img|iframe|object|link|a)\b", page.replace(data, "").split("<script>")[0]
        )
        assert "onerror=alert" not in page.replace(data, "")
        for text in (svg, data):
            assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", text)
        longest = max((len(t) for t in re.findall(r">([^<>]*)</text>", svg)), default=0)
        assert longest < 200


def test_a_saved_page_loads_nothing_and_says_so_to_the_browser(source_of, tmp_path):
    page = save(chart(source_of("batch_rate"), "batch_rate", theme="dark"), tmp_path / "a.html")
    text = page.read_text("utf-8")
    assert "default-src 'none'" in text
    assert "connect-src" not in text
    assert not re.search(r'(src|href)="?https?:', text.split("<script>")[0])
    assert LOOKS["dark"].ground in text.split("<script>")[0]
    assert page.stat().st_size < 3_000_000


@pytest.mark.parametrize(
    ("suffix", "start"),
    [
        (".png", b"\x89PNG"),
        (".svg", b"<svg"),
        (".pdf", b"%PDF"),
        (".json", b"{"),
        (".PNG", b"\x89PNG"),
    ],
)
def test_the_suffix_is_the_format(suffix, start, source_of, tmp_path):
    place = save(chart(source_of("batch_rate"), "batch_rate"), tmp_path / f"a{suffix}", scale=1)
    assert place.read_bytes().startswith(start)
    assert list(tmp_path.iterdir()) == [place]


def test_a_file_that_is_there_is_not_replaced_unless_told(source_of, tmp_path):
    drawn, place = chart(source_of("batch_rate"), "batch_rate"), tmp_path / "a.json"
    place.write_text("mine")
    with pytest.raises(OutputExistsError):
        save(drawn, place)
    assert place.read_text() == "mine"
    save(drawn, place, overwrite=True)
    assert json.loads(place.read_text()) == drawn.to_dict()
    with pytest.raises(UsageError, match=r"\.jpg is no format"):
        save(drawn, tmp_path / "a.jpg")
    with pytest.raises(UsageError, match="scale of 0"):
        save(drawn, tmp_path / "a.png", scale=0)
