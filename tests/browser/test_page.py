"""The explorer in a real browser without a notebook: the copy in a file, and the live view.

The copy is opened with every request beyond the file itself aborted and counted. What the live view
says it selects is counted once more with plain SQL on the export.
"""

from __future__ import annotations

import os
import random
import re
from itertools import pairwise

import exports as x
import pytest
from browser import pages
from browser.conftest import here

explorer_module = pytest.importorskip("nsan.widgets.explorer", reason="pip install 'nsan[lab]'")

pytestmark = pytest.mark.browser

MODEL = x.REPOSITORY / "sample_data" / "model"
SWEEP = MODEL / "oversubscribed_sweep" / "oversubscribed_sweep.sqlite"
TWO_GPUS = MODEL / "two_gpus" / "two_gpus.sqlite"
HOTSPOT = x.REPOSITORY / "sample_data" / "nvprof_hotspot_v100_8192.log.gz"

ATTACK = "</script><img src=x onerror=alert(1)>"
START = ATTACK[:8]
EVIL = f"{ATTACK}{{{{7*7}}}}\u202egpj.exe\x1b[31m\x00" + "k" * 20_000
N_VIEWS = 100 if os.environ.get("NSAN_SOAK") == "1" else 3


def hostile_export(path):
    """Write an export in which every name attacks."""
    export = x.Export()
    export.strings[1] = EVIL
    for number in range(6):
        at = number * 1_000_000
        va = x.VA + number * 64 * x.KIB
        export.add(x.KERNEL, x.kernel(at, at + 900_000))
        export.add(x.GPU_FAULTS, *(x.gpu_fault(at + i, at + 40_000 + i, va) for i in range(2)))
        export.add(x.MEMCPY, x.migration(at + 20_000, at + 30_000, 64 * x.KIB, va))
        export.add(x.NVTX, x.nvtx(at, at + 950_000, f"{number} {EVIL}"))
    export.add(x.MEMORY, x.memory_event(0, x.VA, 32 * x.MIB, name=EVIL))
    export.add(x.MEMORY, x.memory_event(0, x.VA + 64 * x.MIB, 32 * x.MIB, name="b" + EVIL))
    return export.write(path)


def scattered_export(path):
    """Write an export whose addresses lie in many stretches with gaps between, of two processes."""
    export, chance, at = x.Export(), random.Random(3), 0
    for number in range(70):
        va = x.VA + number * 3 * 1024 * x.MIB
        pid = x.PID + number % 2
        for step in range(chance.choice([1, 1, 2, 9, 30])):
            at += 50_000
            place = va + step * 2 * x.MIB
            export.add(x.MEMCPY, x.migration(at, at + 20_000, 2 * x.MIB, place, pid=pid))
            export.add(x.GPU_FAULTS, x.gpu_fault(at - 5_000, at + 25_000, place, pid=pid))
    return export.write(path)


@pytest.fixture(scope="module")
def scattered(tmp_path_factory):
    return scattered_export(tmp_path_factory.mktemp("scattered") / "scattered.sqlite")


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Write offline copies, each once."""
    folder, known = tmp_path_factory.mktemp("copies"), {}

    def of(trace):
        if trace not in known:
            path = folder / f"{trace.stem}-{len(known)}.html"
            known[trace] = explorer_module.Explorer(trace).to_html(path)
        return known[trace]

    return of


@pytest.fixture
def copy(watched_page, copies):
    """Open an offline copy with nothing but the file to be had."""
    opened = []

    def of(trace, **options):
        page = watched_page(**options)
        page.requests = []
        page.on("request", lambda request: page.requests.append(request.url))
        pages.watch_text(page)
        page.goto(here(copies(trace)))
        pages.wait_for_view(page)
        opened.append(page)
        return page

    yield of
    for page in opened:
        seen = page.watched
        page.context.close()
        assert (seen.dialogs, seen.errors, seen.outside) == ([], [], [])
        assert [url for url in page.requests if not url.endswith(".html")] == []


@pytest.fixture
def live(watched_page):
    """Show a live explorer."""
    opened = []

    def of(trace, **options):
        page = watched_page(**options)
        pages.watch_text(page)
        shown = explorer_module.Explorer(trace)
        shown.ready()
        opened.append(page)
        return pages.Live(page, shown)

    yield of
    for page in opened:
        seen = page.watched
        page.context.close()
        assert (seen.dialogs, seen.errors, seen.outside) == ([], [], [])


def span(range_):
    return range_[1] - range_[0]


def origin_of(trace):
    tables = (x.MEMCPY, x.GPU_FAULTS, x.CPU_FAULTS, x.KERNEL, x.NVTX)
    starts = " UNION ALL ".join(f"SELECT start FROM {table}" for table in tables)
    return x.ask(trace, f"SELECT min(start) FROM ({starts})")[0][0]


def picture(page, name="map"):
    return pages.part(page, name).evaluate("canvas => canvas.toDataURL()")


def words(page, name):
    return [one["text"] for one in pages.texts(page, name)]


def per_pixel(page):
    """Nanoseconds of a px of the plot."""
    canvas = pages.part(page, "map")
    gutter, right = (float(canvas.get_attribute(f"data-{side}")) for side in ("gutter", "right"))
    return span(pages.window(page)) / (canvas.bounding_box()["width"] - gutter - right)


# --- the copy in a file


def test_the_copy_draws_the_trace_and_asks_for_nothing(copy):
    page = copy(SWEEP)
    for name in ("overview", "lanes", "map"):
        # Ground, grid, text, and at least three causes.
        assert pages.colours(page, name) > 5, name
    assert pages.part(page, "map").bounding_box()["height"] >= 200
    assert "offline copy" in page.locator(pages.ROOT).inner_text()
    # What cannot work without Python is not offered.
    assert pages.part(page, "filter-cause").count() == 0
    low, high = x.ask(
        SWEEP,
        f"SELECT min(start), max(coalesce(end, start)) FROM (SELECT start, end FROM {x.MEMCPY} UNION "
        f"ALL SELECT start, end FROM {x.GPU_FAULTS} UNION ALL SELECT start, NULL FROM {x.CPU_FAULTS} "
        f"UNION ALL SELECT start, end FROM {x.KERNEL} UNION ALL SELECT start, end FROM {x.NVTX})",
    )[0]
    # Half-open: the last instant may be in it.
    assert pages.window(page) in {(0, high - low), (0, high - low + 1)}


def test_a_brush_on_the_overview_shows_that_window(copy):
    page = copy(SWEEP)
    whole, before, unit = pages.window(page), picture(page), per_pixel(page)
    pages.drag(page, "overview", (0.25, 0.5), (0.5, 0.5))
    start, end = pages.window(page)
    assert start == pytest.approx(whole[1] / 4, abs=2 * unit)
    assert end == pytest.approx(whole[1] / 2, abs=2 * unit)
    assert picture(page) != before
    # Dragging inside moves it, its length stays.
    pages.drag(page, "overview", (0.375, 0.5), (0.625, 0.5))
    moved = pages.window(page)
    assert moved[0] == pytest.approx(whole[1] / 2, abs=4 * unit)
    assert span(moved) == pytest.approx(end - start, abs=2)
    # An edge resizes.
    pages.drag(page, "overview", (0.5, 0.5), (0.25, 0.5))
    wider = pages.window(page)
    assert wider[1] == moved[1]
    assert span(wider) == pytest.approx(whole[1] / 2, abs=6 * unit)
    page.mouse.dblclick(*pages.point(page, "overview", 0.5, 0.5))
    assert pages.window(page) == whole


def test_the_wheel_zooms_where_the_pointer_is(copy):
    page = copy(SWEEP)
    whole, places = pages.window(page), pages.place(page)
    page.mouse.move(*pages.point(page, "map", 0.25, 0.5))
    page.mouse.wheel(0, -600)
    pages.wait_for(page, lambda: span(pages.window(page)) < span(whole), "the wheel zooms")
    start, end = pages.window(page)
    assert start + 0.25 * (end - start) == pytest.approx(0.25 * span(whole), rel=0.01)
    assert pages.place(page) == places
    page.keyboard.down("Control")
    page.mouse.wheel(0, -600)
    page.keyboard.up("Control")
    pages.wait_for(page, lambda: span(pages.place(page)) < span(places), "addresses zoom")
    assert pages.window(page) == (start, end)
    low, high = pages.place(page)
    assert low + 0.5 * (high - low) == pytest.approx(0.5 * span(places), rel=0.01)
    page.keyboard.down("Shift")
    page.mouse.wheel(0, 200)
    page.keyboard.up("Shift")
    pages.wait_for(page, lambda: pages.window(page)[0] > start, "Shift and the wheel move")
    assert span(pages.window(page)) == pytest.approx(end - start, abs=2)


def test_colours_and_legend_follow_what_is_chosen(copy):
    page = copy(SWEEP)
    by_cause = picture(page)
    legend = pages.part(page, "legend")
    causes = ["page fault", "speculative prefetch", "eviction"]
    assert legend.locator("button").all_inner_texts() == causes
    for by in ("access", "density", "latency", "cause"):
        pages.part(page, "colour-by").locator(f'[data-value="{by}"]').click()
        pages.wait_for(page, lambda by=by: pages.state(page, "by") == by, f"it is coloured by {by}")
        assert (picture(page) == by_cause) == (by == "cause")
        assert ("logarithmic" in legend.inner_text()) == (by in {"density", "latency"})


def test_a_click_on_a_cluster_goes_there(copy):
    page = copy(TWO_GPUS)
    rows = pages.part(page, "clusters").locator("tbody tr")
    assert rows.count() == 2
    whole = pages.window(page)
    rows.nth(1).click()
    pages.wait_for(page, lambda: pages.window(page) != whole, "the view moves")
    assert rows.nth(1).get_attribute("aria-selected") == "true"
    panel = pages.part(page, "panel").inner_text()
    assert "cluster" in panel.lower()
    # The second row is the cluster of GPU 0, with all of its fault rows, and it is in the window.
    cells = rows.nth(1).inner_text().split("\t")
    n = x.ask(TWO_GPUS, f"SELECT count(*) FROM {x.GPU_FAULTS} WHERE deviceId = 0")[0][0]
    assert str(n) in cells
    start, lasts = (float(cell.removesuffix(" ms")) * 1e6 for cell in cells[1:3])
    origin = origin_of(TWO_GPUS)
    low, high = pages.window(page)
    assert low <= start - origin + 1000
    assert start + lasts - origin - 1000 <= high < whole[1]
    # Sorting by a column and the keys of a table.
    pages.part(page, "clusters").locator("th button").first.click()
    assert (
        pages.part(page, "clusters").locator("th").first.get_attribute("aria-sort") == "descending"
    )
    rows.first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert rows.nth(1).get_attribute("aria-selected") == "true"


def test_keys_move_zoom_and_go_back(copy):
    page = copy(SWEEP)
    whole, places = pages.window(page), pages.place(page)
    page.locator(pages.ROOT).focus()

    def after(key):
        before = seen(page)
        page.keyboard.press(key)
        pages.wait_for(page, lambda: seen(page) != before, f"{key} does something")
        return pages.window(page)

    zoomed = after("+")
    assert span(zoomed) == pytest.approx(span(whole) / 1.5, rel=1e-6)
    moved = after("ArrowRight")
    assert moved[0] - zoomed[0] == pytest.approx(0.15 * span(zoomed), rel=1e-6)
    assert after("ArrowLeft") == pytest.approx(zoomed, abs=2)
    assert span(after("-")) == span(whole)
    after("+")
    after("*")
    assert span(pages.place(page)) == pytest.approx(span(places) / 1.5, rel=1e-6)
    after("Home")
    assert (pages.window(page), pages.place(page)) == (whole, places)
    after("Backspace")
    assert span(pages.window(page)) < span(whole)
    page.keyboard.press("?")
    assert pages.part(page, "help-text").is_visible()
    page.keyboard.press("Escape")
    assert not pages.part(page, "help-text").is_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_copy_follows_the_theme_of_the_reader(copy, theme):
    page = copy(SWEEP, color_scheme=theme)
    assert pages.state(page, "theme") == theme
    script = "root => getComputedStyle(root).backgroundColor.match(/\\d+/g).map(Number)"
    ground = page.locator(pages.ROOT).evaluate(script)
    assert (sum(ground[:3]) < 3 * 128) == (theme == "dark")


@pytest.mark.parametrize(
    ("trace", "width"),
    [(HOTSPOT, 1200), (SWEEP, 600), (None, 1000), (None, 600)],
    ids=["hotspot", "sweep", "scattered", "scattered-narrow"],
)
def test_labels_never_overlap(copy, scattered, trace, width):
    page = copy(trace or scattered, viewport={"width": width, "height": 900})
    chance = random.Random(width)
    for _ in range(N_VIEWS):
        for name in ("overview", "lanes", "map"):
            assert overlapping(pages.texts(page, name)) == [], (name, pages.window(page))
        page.mouse.move(*pages.point(page, "map", chance.random(), chance.random()))
        page.keyboard.down("Control") if chance.random() < 0.3 else None
        before = seen(page)
        page.mouse.wheel(0, -chance.choice([200, 700, 1500]))
        page.keyboard.up("Control")
        pages.wait_for(page, lambda before=before: seen(page) != before, "the wheel zooms")


def seen(page):
    return pages.window(page), pages.place(page)


def overlapping(found):
    """Find pairs of texts that stand on each other: lines of 11 px, at least 9 px apart."""
    assert found
    return [
        (one["text"], other["text"])
        for number, one in enumerate(found)
        for other in found[:number]
        if abs(one["y"] - other["y"]) < 9
        and one["left"] < other["right"] - 0.5
        and other["left"] < one["right"] - 0.5
    ]


def test_names_that_attack_are_text_in_the_copy(copy, tmp_path):
    page = copy(hostile_export(tmp_path / "hostile.sqlite"))
    assert any(START in text for text in words(page, "lanes"))
    # A kernel and a range lie below each other: a click picks each, its name goes to the panel.
    for row in range(2):
        page.keyboard.press("Home")
        x_, top = pages.point(page, "lanes", 0.55, 0)
        page.mouse.move(x_, top + 34 + 24 * row)
        tooltip = pages.part(page, "tooltip")
        pages.wait_for(page, lambda tip=tooltip: START in tip.inner_text(), "the name is shown")
        page.mouse.click(x_, top + 34 + 24 * row)
        pages.part(page, "panel").get_by_text(START).first.wait_for()
    assert no_attack(page)


def no_attack(page):
    """Check that what is shown steers nothing, was not computed and made no element."""
    text = page.locator(pages.ROOT).inner_text()
    drawn = [one for name in ("overview", "lanes", "map") for one in words(page, name)]
    for shown in (text, *drawn):
        assert not set(shown) & {"\u202e", "\x1b", "\x00"}
    assert len(text) < 20_000
    assert "49gpj" not in text
    return page.locator("img").count() == 0


# --- the live view


def test_a_click_on_the_legend_keeps_one_cause(live):
    shown = live(SWEEP)
    page, explorer = shown.page, shown.explorer
    pages.part(page, "legend").locator('[data-value="eviction"]').click()
    pages.wait_for(
        page, lambda: explorer.filters["cause"] == ["eviction"], "Python keeps evictions"
    )
    moved = explorer.selection.filter(explorer.selection["table"] == "migrations")
    query = f"SELECT count(*), sum(bytes) FROM {x.MEMCPY} WHERE migrationCause = {x.EVICTION}"
    assert (moved.height, moved["bytes"].sum()) == x.ask(SWEEP, query)[0]
    assert pages.part(page, "legend").locator('[aria-pressed="true"]').count() == 1
    pages.part(page, "filter-clear").click()
    pages.wait_for(page, lambda: explorer.filters["cause"] is None, "all is kept again")
    # The same by the list.
    pages.part(page, "filter-cause").click()
    listed = pages.part(page, "filter-cause-list")
    listed.locator('input[value="eviction"]').uncheck()
    pages.wait_for(
        page, lambda: explorer.filters["cause"] == ["coherence", "prefetch"], "the list filters"
    )
    # The list stays open for the next choice.
    assert listed.is_visible()


def test_a_box_selects_its_rows(live):
    shown = live(SWEEP)
    page, explorer = shown.page, shown.explorer
    pages.drag(page, "map", (0.3, 0.3), (0.6, 0.7))
    pages.wait_for(page, lambda: explorer.picked is not None, "the box is picked")
    t0, t1, y0, y1 = (int(side) for side in pages.state(page, "box").split(","))
    origin = explorer.scene.origin_ns
    whole = pages.place(page)[1]
    assert (y0, y1) == pytest.approx((0.3 * whole, 0.7 * whole), rel=0.03)
    # One allocation without gaps: a place is the distance from its first byte.
    base = x.ask(SWEEP, f"SELECT min(virtualAddress) FROM {x.MEMCPY}")[0][0]
    rows = x.ask(
        SWEEP,
        f"SELECT count(*), sum(bytes) FROM {x.MEMCPY} WHERE start >= ? AND start < ? "
        "AND virtualAddress >= ? AND virtualAddress < ?",
        *(origin + t0, origin + t1, base + y0, base + y1),
    )
    moved = explorer.selection.filter(explorer.selection["table"] == "migrations")
    assert [(moved.height, moved["bytes"].sum())] == rows
    assert rows[0][0] > 100
    page.mouse.dblclick(*pages.point(page, "map", 0.45, 0.5))
    shown.settle()
    assert (pages.window(page), pages.place(page)) == ((t0, t1), (y0, y1))
    page.keyboard.press("Escape")
    pages.wait_for(page, lambda: explorer.picked is None, "Esc clears")
    # The page says so with its next frame, which may come after Python has heard of it.
    pages.wait_for(page, lambda: pages.state(page, "box") is None, "the box is gone")


def test_the_view_stays_where_the_user_left_it(live):
    shown = live(SWEEP)
    page = shown.page
    page.mouse.move(*pages.point(page, "map", 0.4, 0.5))
    for _ in range(12):
        page.mouse.wheel(0, -150)
    pages.drag(page, "lanes", (0.6, 0.5), (0.4, 0.5))
    left = pages.window(page)
    shown.settle()
    assert pages.window(page) == left
    # One question at a time, and only the last window of a gesture matters.
    looks = [message["id"] for message in shown.sent if message["kind"] == "look"]
    assert looks == sorted(set(looks))
    assert shown.sent[-1]["kind"] != "look" or shown.sent[-1]["window"][0] == pytest.approx(
        left[0], abs=1
    )


def test_an_answer_to_an_old_question_is_not_drawn(live):
    shown = live(SWEEP)
    page, views = shown.page, pages.state(shown.page, "views")
    old = {"kind": "view", "view": shown.sent[0]["view"], "id": shown.sent[0]["id"]}
    other = {"kind": "view", "view": "another", "id": 99}
    for message in (old, other):
        event = {
            "message": {**message, "window": [0, 1], "place": [0, 1], "by": "cause"},
            "buffers": [],
        }
        page.evaluate("event => window.deliver([event])", event)
    page.evaluate("() => new Promise(requestAnimationFrame)")
    assert pages.state(page, "views") == views


def test_a_late_answer_of_a_busy_kernel_is_drawn(watched_page):
    explorer = explorer_module.Explorer(SWEEP)
    explorer.ready()
    page = watched_page()
    page.clock.install()
    shown = pages.Live(page, explorer)
    whole, views = pages.window(page), int(pages.state(page, "views"))
    shown.is_held = True
    page.locator(pages.ROOT).focus()
    page.keyboard.press("+")
    pages.wait_for(page, lambda: len(shown.sent) > 1, "the script looks")
    page.clock.fast_forward(60_000)
    pages.part(page, "busy").get_by_text("No answer yet").wait_for()
    shown.flush()
    pages.wait_for_view(page, views)
    assert span(pages.window(page)) < span(whole)
    assert not pages.part(page, "busy").is_visible()


def test_cells_are_drawn_where_the_answer_says_they_are(live):
    """Cells may cover more than the view: of these two, all of the view is the first."""
    shown = live(SWEEP)
    page, whole = shown.page, pages.window(shown.page)
    shown.is_held = True
    page.locator(pages.ROOT).focus()
    page.keyboard.press("+")
    pages.wait_for(page, lambda: len(shown.sent) > 1, "the script looks")
    page.keyboard.press("Home")
    cells = {"mode": "raster", "columns": 2, "rows": 1, "encoding": "dense", "n": 1, "min": 1}
    cells |= {"max": 2, "window": [0, 2 * whole[1]], "place": list(pages.place(page))}
    message = {
        **{key: shown.sent[-1][key] for key in ("view", "id")},
        "kind": "view",
        "window": list(whole),
        "place": list(pages.place(page)),
        "by": "cause",
        "unit": "byte",
        "map": cells,
        "lanes": [],
        "names": [],
        "facts": [],
    }
    views = int(pages.state(page, "views"))
    event = {"message": message, "buffers": ["AQA=", "/wA="]}  # category 1 and 0, level 255 and 0
    page.evaluate("event => window.deliver([event])", event)
    pages.wait_for_view(page, views)
    light = shown.explorer.config["categories"]["cause"][0]["light"]
    wanted = [int(light[place : place + 2], 16) for place in (1, 3, 5)]
    for share in (0.1, 0.52, 0.93):
        assert pixel(page, share, 0.43) == wanted


def pixel(page, x_, y):
    """Read the colour of the map at a share of its plot."""
    script = """(canvas, [x, y]) => {
      const [gutter, right] = [canvas.dataset.gutter, canvas.dataset.right].map(Number);
      const at = gutter + x * (canvas.width - gutter - right);
      const {data} = canvas.getContext("2d").getImageData(at, y * canvas.height, 1, 1);
      return [...data.slice(0, 3)];
    }"""
    return pages.part(page, "map").evaluate(script, [x_, y])


def test_python_code_moves_the_view_exactly_there(live):
    shown = live(SWEEP)
    explorer, origin = shown.explorer, shown.explorer.scene.origin_ns
    explorer.window = (origin + 10_000_001, origin + 20_000_003)
    explorer.by = "density"
    shown.flush()
    pages.wait_for(shown.page, lambda: pages.state(shown.page, "by") == "density", "it is drawn")
    assert pages.window(shown.page) == (10_000_001, 20_000_003)
    assert explorer.window == (origin + 10_000_001, origin + 20_000_003)


def test_what_python_set_before_is_shown_first(watched_page):
    explorer = explorer_module.Explorer(SWEEP)
    explorer.ready()
    origin = explorer.scene.origin_ns
    explorer.window, explorer.by = (origin + 5_000, origin + 9_000_000), "access"
    page = watched_page()
    pages.Live(page, explorer)
    assert (pages.window(page), pages.state(page, "by")) == ((5_000, 9_000_000), "access")


def test_an_error_of_an_observer_shows_under_the_view_and_can_be_hidden(live):
    shown = live(SWEEP)
    page, explorer = shown.page, shown.explorer

    def wrong(change):
        raise ValueError(f"<img src=x onerror=alert(2)> {change['name']}")

    explorer.observe(wrong, "window")
    pages.drag(page, "overview", (0.2, 0.5), (0.4, 0.5))
    error = pages.part(page, "error")
    error.get_by_text("ValueError: <img src=x onerror=alert(2)> window").wait_for()
    explorer.unobserve(wrong, "window")
    # The view lives on.
    views = int(pages.state(page, "views"))
    page.mouse.dblclick(*pages.point(page, "overview", 0.9, 0.5))
    pages.wait_for_view(page, views)
    error.get_by_text("hide").click()
    pages.wait_for(page, lambda: explorer.error == "", "Python hears of it")
    assert not error.is_visible()
    assert page.locator("img").count() == 0


def test_a_failure_of_the_script_shows_too(live):
    shown = live(SWEEP)
    bad = {"message": {"kind": "view", "view": shown.sent[0]["view"]}, "buffers": []}
    shown.is_held = True
    shown.page.locator(pages.ROOT).focus()
    shown.page.keyboard.press("+")
    pages.wait_for(shown.page, lambda: len(shown.sent) > 1, "the script looks")
    bad["message"]["id"] = shown.sent[-1]["id"]
    bad["message"] |= {"by": "cause", "window": None, "place": None, "lanes": 7}
    shown.page.evaluate("event => window.deliver([event])", bad)
    error = pages.part(shown.page, "error")
    error.get_by_text("The view failed").wait_for()
    assert error.is_visible()


def test_a_smaller_page_is_drawn_anew(live):
    shown = live(SWEEP, viewport={"width": 1200, "height": 900})
    page = shown.page
    columns = shown.sent[-1]["columns"]
    views = int(pages.state(page, "views"))
    page.set_viewport_size({"width": 640, "height": 900})
    pages.wait_for_view(page, views)
    assert shown.sent[-1]["columns"] < columns
    canvas = pages.part(page, "map")
    assert canvas.bounding_box()["width"] <= 640
    # As many px as the screen has: nothing is stretched.
    assert canvas.evaluate("c => c.width") == pytest.approx(canvas.bounding_box()["width"], abs=1)
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_a_page_that_scrolls_is_not_caught_by_the_view(live):
    shown = live(SWEEP, viewport={"width": 900, "height": 500})
    page, whole = shown.page, pages.window(shown.page)
    page.evaluate("""() => {
      const above = document.createElement("div");
      above.style.height = "400px";
      document.body.prepend(above);
    }""")
    page.evaluate("() => scrollTo(0, 0)")
    page.mouse.move(500, 250)
    page.mouse.wheel(0, 150)
    pages.wait_for(page, lambda: page.evaluate("scrollY") > 0, "the page scrolls")
    for _ in range(5):
        page.mouse.wheel(0, 100)
    page.mouse.wheel(0, -30)
    assert pages.window(page) == whole
    # Once the pointer moves, the wheel is the view's.
    page.mouse.move(*pages.point(page, "map", 0.5, 0.5))
    page.mouse.wheel(0, -300)
    pages.wait_for(page, lambda: span(pages.window(page)) < span(whole), "the wheel zooms")


def test_a_view_that_is_taken_away_leaves_nothing(live):
    shown = live(SWEEP)
    page = shown.page
    assert page.evaluate("() => window.nListeners()") > 0
    page.evaluate("() => window.cleanUp()")
    assert page.evaluate("() => window.nListeners()") == 0
    assert page.locator(pages.ROOT).count() == 0
    n = len(shown.sent)
    page.keyboard.press("+")
    page.mouse.wheel(0, -300)
    page.evaluate("() => new Promise(requestAnimationFrame)")
    assert len(shown.sent) == n


def test_a_trace_without_addresses_or_faults_says_so(live, tmp_path):
    export = x.Export()
    for number in range(8):
        at = number * 1_000_000
        export.add(x.MEMCPY, x.migration(at + 20_000, at + 30_000, 64 * x.KIB, None))
    shown = live(export.write(tmp_path / "bare.sqlite"))
    pages.wait_for(
        shown.page,
        lambda: "No event of this trace has an address" in words(shown.page, "map"),
        "the map says why it is empty",
    )
    assert pages.part(shown.page, "clusters").inner_text().strip()
    assert pages.part(shown.page, "panel").inner_text().strip()


def test_an_empty_window_says_so(live):
    shown = live(TWO_GPUS)
    page, explorer = shown.page, shown.explorer
    origin = explorer.scene.origin_ns
    # Between the last copy of the first stage and the next one there is a gap; SQL finds it.
    starts = [row[0] for row in x.ask(TWO_GPUS, f"SELECT start FROM {x.MEMCPY} ORDER BY start")]
    gap, start = max((b - a, a) for a, b in pairwise(starts))
    explorer.window = (start + gap // 4, start + gap // 2)
    shown.flush()
    pages.wait_for(page, lambda: "Nothing in this window" in words(page, "map"), "it says so")
    assert pages.window(page) == (start + gap // 4 - origin, start + gap // 2 - origin)


def test_names_that_attack_are_text_in_the_live_view(live, tmp_path):
    shown = live(hostile_export(tmp_path / "hostile.sqlite"))
    page, explorer = shown.page, shown.explorer
    for key in ("nvtx", "allocation"):
        pages.part(page, f"filter-{key}").click()
        pages.part(page, f"filter-{key}-list").get_by_text(START).first.wait_for()
    explorer.picked = {"what": "kernel", "id": 3}
    shown.flush()
    pages.part(page, "panel").get_by_text(START).first.wait_for()
    n = len(shown.sent)
    page.mouse.move(*pages.point(page, "map", 0.5, 0.5))
    pages.wait_for(page, lambda: any(m["kind"] == "hover" for m in shown.sent[n:]), "it hovers")
    pages.wait_for(
        page, lambda: START in pages.part(page, "tooltip").inner_text(), "Python answers"
    )
    assert no_attack(page)


def test_the_script_makes_text_harmless_itself(live):
    """What Python sends is clean already; the page does not rely on it."""
    shown = live(SWEEP)
    page, config = shown.page, shown.explorer.config
    facts = [[EVIL, EVIL, EVIL]]
    lanes = [{**lane, "label": EVIL} for lane in config["lanes"]]
    shades = {
        by: [{**entry, "label": EVIL} for entry in config["categories"][by]]
        for by in config["categories"]
    }
    sent = {
        "panel": {"title": EVIL, "what": "kernel", "facts": facts, "note": EVIL},
        "clusters": {
            "columns": [{"id": "k", "label": EVIL, "align": "left"}],
            "rows": [{"id": 0, "cells": [EVIL], "window": [0, 9], "place": None}],
            "total": 1,
            "note": EVIL,
            "state": "ready",
        },
        "busy": EVIL,
        "error": EVIL,
        "config": {
            **config,
            "title": EVIL,
            "subtitle": EVIL,
            "notes": [EVIL],
            "figures": facts,
            "lanes": lanes,
            "categories": shades,
            "runs": [{**run, "name": EVIL} for run in config["runs"]],
            "filters": {**config["filters"], "nvtx": [{"id": n, "label": EVIL} for n in (0, 1)]},
        },
    }
    for name, value in sent.items():
        page.evaluate("event => window.deliver([event])", {"trait": name, "value": value})
    pages.part(page, "filter-nvtx").click()
    page.mouse.move(*pages.point(page, "map", 0.5, 0.5))
    pages.wait_for(
        page, lambda: any(START in text for text in words(page, "lanes")), "the lanes are drawn"
    )
    for name in ("panel", "clusters", "busy", "error", "notes", "header", "legend"):
        assert START in pages.part(page, name).inner_text(), name
    assert no_attack(page)


# --- what a view says only when it knows, and what only a user moves


def looks(shown):
    """Return whether the looks so far say that the user has moved the view."""
    return [message["moved"] for message in shown.sent if message["kind"] == "look"]


def test_only_a_gesture_says_that_the_user_has_moved(live):
    shown = live(SWEEP, viewport={"width": 1200, "height": 900})
    page, explorer = shown.page, shown.explorer
    assert looks(shown) == [False]

    def quiet():
        """Wait until ten looks at it in a row find no new question."""
        counts = []

        def same():
            counts.append(len(looks(shown)))
            return len(counts) >= 10 and len(set(counts[-10:])) == 1

        pages.wait_for(page, same, "it asks no more")

    def after(act):
        # A late answer to an earlier question is not one to this act.
        quiet()
        n = len(looks(shown))
        act()
        pages.wait_for(page, lambda: len(looks(shown)) > n, "it asks")
        quiet()
        return set(looks(shown)[n:])

    def of_python():
        explorer.window = (explorer.scene.origin_ns + 5_000, explorer.scene.origin_ns + 9_000_000)
        shown.flush()

    page.locator(pages.ROOT).focus()
    assert after(lambda: page.keyboard.press("+")) == {True}
    assert after(lambda: page.set_viewport_size({"width": 900, "height": 900})) == {False}
    assert after(of_python) == {False}
    density = pages.part(page, "colour-by").locator('[data-value="density"]')
    assert after(density.click) == {True}
    assert after(of_filter(shown)) == {False}
    assert after(lambda: pages.drag(page, "overview", (0.2, 0.5), (0.6, 0.5))) >= {True}
    assert after(lambda: page.keyboard.press("Backspace")) == {True}
    assert after(pages.part(page, "all").click) == {True}
    # A cluster: Python moves the view.
    assert after(pages.part(page, "clusters").locator("tbody tr").first.click) == {False}


def of_filter(shown):
    """Make an act that keeps one cause by Python code."""

    def act():
        shown.explorer.filters = {"cause": ["eviction"]}
        shown.flush()

    return act


def claims(page):
    """Return what the view says about nothing being there."""
    said = [*words(page, "map"), *words(page, "lanes")]
    return [text for text in said if re.search(r"^No |Nothing|none here", text)]


def show_a_gap(shown):
    """Show a window in which nothing starts."""
    explorer, page = shown.explorer, shown.page
    starts = [row[0] for row in x.ask(TWO_GPUS, f"SELECT start FROM {x.MEMCPY} ORDER BY start")]
    faults = [row[0] for row in x.ask(TWO_GPUS, f"SELECT start FROM {x.GPU_FAULTS}")]
    inside = [(b - a, a) for a, b in pairwise(starts) if not any(a < fault < b for fault in faults)]
    gap, start = max(inside)
    explorer.window = (start + gap // 4, start + gap // 2)
    shown.flush()
    pages.wait_for(page, lambda: "Nothing in this window" in claims(page), "it says so")
    assert "none here" in claims(page)


def drawn_anew(page):
    page.evaluate("() => new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")


def test_nothing_is_claimed_of_a_window_without_an_answer(live):
    shown = live(TWO_GPUS)
    page = shown.page
    show_a_gap(shown)
    shown.is_held = True
    n = len(shown.sent)
    pages.part(page, "all").click()
    pages.wait_for(page, lambda: len(shown.sent) > n, "the script looks")
    drawn_anew(page)
    assert claims(page) == []
    shown.flush()
    pages.wait_for(page, lambda: pages.part(page, "status").inner_text() != "", "it is drawn")
    drawn_anew(page)
    assert claims(page) == []


def test_a_kernel_that_is_gone_is_named_once(live):
    shown = live(TWO_GPUS)
    page = shown.page
    show_a_gap(shown)
    page.evaluate("() => { window.kernelIsGone = true; }")
    error = pages.part(page, "error")
    pages.drag(page, "overview", (0.2, 0.5), (0.6, 0.5))
    error.get_by_text("The kernel does not answer any more: run the cell again.").wait_for()
    assert error.inner_text().split("\n") == [
        "An error",
        "hide",
        "The kernel does not answer any more: run the cell again.",
    ]
    assert claims(page) == []
    error.get_by_text("hide").click()
    page.mouse.move(*pages.point(page, "map", 0.4, 0.4))
    page.mouse.wheel(0, -200)
    pages.part(page, "all").click()
    drawn_anew(page)
    assert not error.is_visible()


def test_a_filter_with_one_kernel_keeps_what_ran_with_it(live, tmp_path):
    export = x.Export()
    export.add(x.KERNEL, x.kernel(1_000_000, 2_000_000))
    starts = [100, 200_000, 1_000_000, 1_500_000, 1_999_000, 2_000_000, 3_000_000]
    for number, at in enumerate(starts):
        va = x.VA + number * 64 * x.KIB
        export.add(x.MEMCPY, x.migration(at, at + 5_000, 64 * x.KIB, va))
    shown = live(export.write(tmp_path / "one.sqlite"))
    page, explorer = shown.page, shown.explorer
    # One process, one GPU, one cause: nothing to choose among.
    for key in ("pid", "device", "cause", "access"):
        assert pages.part(page, f"filter-{key}").count() == 0, key
    pages.part(page, "filter-kernel").click()
    box = pages.part(page, "filter-kernel-list").locator("input")
    assert not box.is_checked()
    box.check()
    pages.wait_for(page, lambda: explorer.filters["kernel"] == [0], "Python keeps the kernel's")
    kept = explorer.selection["start_ns"].sort().to_list()
    assert kept == [at for at in starts if 1_000_000 <= at < 2_000_000]
    box.uncheck()
    pages.wait_for(page, lambda: explorer.filters["kernel"] is None, "all is kept again")


def test_a_map_of_copies_says_where_the_fault_rows_are(live, tmp_path):
    export = x.Export()
    for number in range(4):
        va = x.VA + number * 64 * x.KIB
        export.add(x.GPU_FAULTS, x.gpu_fault(1_000 + number, 9_000, va))
        export.add(x.MEMCPY, x.migration(5_000_000 + number, 5_100_000, 64 * x.KIB, va))
    export.add(x.CPU_FAULTS, x.cpu_fault(5_200_000, x.VA))
    shown = live(export.write(tmp_path / "apart.sqlite"))
    page, explorer = shown.page, shown.explorer
    legend = pages.part(page, "legend")
    assert "CPU page faults: lane only" in legend.inner_text()
    explorer.window = (1_000, 1_003)  # three of them: half-open
    shown.flush()
    pages.wait_for(
        page,
        lambda: "No copies here; 3 fault rows: colour by access" in words(page, "map"),
        "it says where they are",
    )
    explorer.window, explorer.by = (4_000_000, 6_000_000), "access"
    shown.flush()
    pages.wait_for(
        page,
        lambda: "No GPU fault rows here; 256 KiB moved: colour by cause" in words(page, "map"),
        "it says where they are",
    )


# --- the table, the figures and the lanes at several widths


@pytest.mark.parametrize("width", [1400, 1200, 1000, 900])
def test_the_table_shows_pattern_and_main_kernel(copy, width):
    page = copy(TWO_GPUS, viewport={"width": width, "height": 1000})
    table = pages.part(page, "clusters")
    names = [name.replace("\n", " ") for name in table.locator("th").all_inner_texts()]
    assert names[0] == "#"
    right = table.bounding_box()["x"] + table.bounding_box()["width"]
    for name in ("pattern", "main kernel", "faulted pages", "moved in", "fault rows"):
        cell = table.locator("tbody tr").first.locator("td").nth(names.index(name))
        box = cell.bounding_box()
        assert box["x"] + box["width"] <= right, name
        assert cell.evaluate("c => c.scrollWidth <= c.clientWidth"), name  # nothing is cut
    assert "right" not in (table.get_attribute("data-more") or "")


def test_a_table_that_goes_on_says_so_at_its_edge(copy):
    page = copy(TWO_GPUS, viewport={"width": 420, "height": 1000})
    table = pages.part(page, "clusters")
    assert "right" in table.get_attribute("data-more").split()
    table.locator(".nsan-scroll").evaluate("body => body.scrollTo(10_000, 0)")
    pages.wait_for(page, lambda: table.get_attribute("data-more") == "left", "it was the last")


@pytest.mark.parametrize("width", [1200, 900, 700])
def test_the_figures_take_two_lines_at_most(copy, width):
    page = copy(TWO_GPUS, viewport={"width": width, "height": 900})
    figures = page.locator(".nsan-figures")
    assert 20 < figures.bounding_box()["height"] < 45
    shown = [one for one in page.locator(".nsan-figure").all() if one.is_visible()]
    rest = page.locator(".nsan-figure").count() - len(shown)
    more = pages.part(page, "more-figures")
    assert more.inner_text() == (f"and {rest} more" if rest else "")
    assert len((more.get_attribute("title") or "").split("\n")) == max(rest, 1)
    assert (rest > 0) == (width < 1200)


def test_a_number_in_a_lane_says_of_what(copy):
    page = copy(HOTSPOT, viewport={"width": 1200, "height": 900})
    whole = span(pages.window(page))
    found = []
    page.mouse.move(*pages.point(page, "map", 43_600_000_000 / whole, 0.5))
    while span(pages.window(page)) > 50_000_000:
        before = seen(page)
        page.mouse.wheel(0, -300)
        pages.wait_for(page, lambda before=before: seen(page) != before, "the wheel zooms")
        drawn_anew(page)
        found += words(page, "lanes")
    assert [text for text in found if re.fullmatch(r"[\d\u2009]+", text)] == []
    assert any(re.fullmatch(r"[\d\u2009]+ batches", text) for text in found)
