"""The explorer in a real JupyterLab, in a real browser, without a network.

One JupyterLab serves all tests of this file; what they say is counted is counted here once more, with
plain SQL on the export, or with plain Python on the profiler's text.
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from collections import Counter
from contextlib import closing

import exports as x
import pytest
from browser import jupyter, pages
from browser.conftest import here

from nsan.cli.lab import copy_notebook

pytestmark = pytest.mark.browser

SAMPLES = x.REPOSITORY / "sample_data"
SWEEP = SAMPLES / "model" / "oversubscribed_sweep" / "oversubscribed_sweep.sqlite"
HOTSPOT = SAMPLES / "nvprof_hotspot_v100_8192.log.gz"
EXPLORER_CELL = 3
"""Number of the code cell of the explore notebook that shows the explorer."""

EVIL = "</script><img src=x onerror=alert(1)>{{7*7}}\u202egpj.exe\x1b[31m" + "k" * 20_000

COUNTED = """{
    "window": list(explorer.window),
    "rows": {f"{t} {c}": n for t, c, n in explorer.selection.group_by("table", "cause").len().rows()},
    "bytes": explorer.selection["bytes"].sum(),
}"""
RESET = """
explorer.picked, explorer.filters, explorer.error, explorer.by = None, {}, "", "cause"
explorer.window = explorer.place = (None, None)
"""


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):  # noqa: ARG001 - without a browser there is nothing to serve
    """Run JupyterLab."""
    pytest.importorskip("jupyterlab", reason="pip install 'nsan[lab]'")
    with jupyter.server(tmp_path_factory.mktemp("jupyter")) as running:
        yield running


@pytest.fixture(scope="module")
def opened(watched_page, server):
    """Open a notebook of the server's folder, once, and bring it to the front.

    A page behind another gets no frames to draw in.
    """
    known = {}

    def of(name, **options):
        if name not in known:
            known[name] = jupyter.Notebook(watched_page(), server, name, **options)
        known[name].page.bring_to_front()
        return known[name]

    return of


def explored(server, opened, trace):
    """Open the explore notebook as `nsan lab` copies it, and run it, once."""
    name = f"explore-{trace.name.partition('.')[0]}.ipynb"
    if not (server.folder / name).exists():
        assert copy_notebook(trace, server.folder).name == name
        notebook = opened(name)
        notebook.said = notebook.run_all()
        notebook.output(EXPLORER_CELL)
        pages.wait_for_view(notebook.page)
        notebook.ground = notebook.page.evaluate(GROUND)
    return opened(name)


@pytest.fixture
def sweep(server, opened):
    """Run the explore notebook on a modelled, oversubscribed program, and show the whole of it."""
    return whole(explored(server, opened, SWEEP))


@pytest.fixture
def hotspot(server, opened):
    """Run the explore notebook on the log of a real V100, and show the whole of it."""
    return whole(explored(server, opened, HOTSPOT))


def whole(notebook):
    """Bring a view back to the whole trace."""
    notebook.run(RESET)
    end = notebook.value("explorer.window[1] - explorer.window[0]")
    notebook.output(EXPLORER_CELL)
    pages.wait_for(
        notebook.page, lambda: pages.window(notebook.page) == (0, end), "the whole trace is shown"
    )
    settle(notebook)
    return notebook


def rows_of_sweep(start, end, where="1"):
    """Count the rows of the modelled export with plain SQL."""
    query = f"""
        SELECT t || ' ' || c, count(*), sum(n) FROM (
          SELECT 'migrations' t, start, bytes n, CASE migrationCause
            WHEN 2 THEN 'coherence' WHEN 3 THEN 'prefetch' WHEN 4 THEN 'eviction' END c
            FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind IN (11, 12, 13)
          UNION ALL SELECT 'gpu_faults', start, NULL, 'None' FROM CUDA_UM_GPU_PAGE_FAULT_EVENTS
          UNION ALL SELECT 'cpu_faults', start, NULL, 'None' FROM CUDA_UM_CPU_PAGE_FAULT_EVENTS
        ) WHERE start >= ? AND start < ? AND {where} GROUP BY 1"""
    with closing(sqlite3.connect(f"file:{SWEEP}?mode=ro&immutable=1", uri=True)) as connection:
        found = connection.execute(query, (start, end)).fetchall()
    return {key: n for key, n, _ in found}, sum(size or 0 for _, _, size in found)


_UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "KB": 1 << 10, "MB": 1 << 20}
_KINDS = {
    "[Unified Memory GPU page faults]": "gpu_faults None",
    "[Unified Memory CPU page faults]": "cpu_faults None",
    "[Unified Memory Memcpy HtoD]": "migrations unknown",
    "[Unified Memory Memcpy DtoH]": "migrations unknown",
}


def measured(text):
    """Read a time or a size as nvprof writes it, in ns or byte."""
    number, unit = re.fullmatch(r"([\d.]+)(s|ms|us|KB|MB)", text).groups()
    return round(float(number) * _UNITS[unit])


def rows_of_hotspot(start, end):
    """Count the rows of nvprof's text, line by line."""
    rows, size = Counter(), 0
    with gzip.open(HOTSPOT, "rt") as lines:
        for line in lines:
            kind = _KINDS.get(line[line.find("[Unified") :].strip())
            if kind is None or not start <= measured(line.split()[0]) < end:
                continue
            rows[kind] += 1
            moved = re.search(r"([\d.]+[KM]B)", line)
            size += measured(moved[1]) if moved else 0
    return dict(rows), size


def brush(notebook, start, end):
    """Drag over the overview, and wait until both sides know the new window."""
    page = notebook.page
    whole_ns = notebook.value("explorer.scene.extent[1] - explorer.scene.extent[0]")
    pages.drag(page, "overview", (start, 0.5), (end, 0.5))
    wanted = pytest.approx((start * whole_ns, end * whole_ns), abs=0.005 * whole_ns)
    pages.wait_for(page, lambda: pages.window(page) == wanted, "the brushed window is shown")
    settle(notebook)


def settle(notebook):
    """Wait until the kernel knows the window that the browser shows, and the browser draws it."""
    code = "[side - explorer.scene.origin_ns for side in explorer.window]"
    pages.wait_for(
        notebook.page,
        lambda: tuple(notebook.value(code)) == pages.window(notebook.page),
        "kernel and browser agree",
    )
    notebook.page.evaluate("() => new Promise(go => requestAnimationFrame(() => go()))")


def picture(notebook, name):
    """Return what a canvas shows, for comparing."""
    return pages.part(notebook.page, name).evaluate("canvas => canvas.toDataURL()")


MAP = f"""document.querySelector('{pages.ROOT} [data-nsan="map"]')"""
COLOURS_OF_CHART = """svg => new Set(
  [...svg.querySelectorAll("path, rect")].map(mark => getComputedStyle(mark).fill)
).size"""
GROUND = f"""() => {{
  const canvas = {MAP}, root = canvas.closest('{pages.ROOT}');
  const wanted = document.createElement("canvas").getContext("2d");
  wanted.fillStyle = getComputedStyle(root).getPropertyValue("--nsan-plot");
  wanted.fillRect(0, 0, 1, 1);
  // Before the first event there is nothing on the map: its ground.
  const x = (Number(canvas.dataset.gutter) + 3) * devicePixelRatio;
  const got = canvas.getContext("2d").getImageData(x, 3 * devicePixelRatio, 1, 1).data.join();
  return {{
    theme: root.dataset.theme,
    same: got === wanted.getImageData(0, 0, 1, 1).data.join(),
  }};
}}"""
"""Whether the map has the ground of its theme."""


def harmless(notebook):
    """Say what a page did that it should not."""
    watched = notebook.page.watched
    return {
        "outside": watched.outside,
        "dialogs": watched.dialogs,
        "errors": watched.errors,
        "images": notebook.page.locator("img[src=x]").count(),
    }


NOTHING = {"outside": [], "dialogs": [], "errors": [], "images": 0}


@pytest.mark.parametrize("name", ["sweep", "hotspot"])
def test_the_explore_notebook_runs_top_to_bottom(request, name):
    notebook = request.getfixturevalue(name)
    assert jupyter.errors(notebook.said) == []
    assert [cell["count"] for cell in notebook.said] == [*range(1, len(notebook.said) + 1)]
    said = [o for cell in notebook.said for o in cell["outputs"] if o.get("name") == "stderr"]
    assert said == []
    assert (notebook.server.folder / "explore-output" / "explorer.html").is_file()
    assert harmless(notebook) == NOTHING


def test_the_charts_of_the_notebook_show(sweep):
    charts = [i for i, c in enumerate(sweep.said) if c["source"].startswith("nsan.chart(")]
    assert len(charts) > 2
    for number in charts:
        chart = sweep.output(number).locator(".vega-embed .chart-wrapper svg")
        assert chart.evaluate(COLOURS_OF_CHART) > 2
        assert chart.bounding_box()["width"] > 400
    sweep.page.locator(".vega-embed summary").first.click()
    actions = sweep.page.locator(".vega-embed .vega-actions a").all_inner_texts()
    assert "Save as SVG" in actions
    assert "Open in Vega Editor" not in actions  # that would go outside


@pytest.mark.parametrize(
    ("name", "count"), [("sweep", rows_of_sweep), ("hotspot", rows_of_hotspot)]
)
def test_a_brush_changes_lanes_map_and_selection(request, name, count):
    notebook = request.getfixturevalue(name)
    lanes, map_ = picture(notebook, "lanes"), picture(notebook, "map")
    brush(notebook, 0.3, 0.62)
    got = notebook.value(COUNTED)
    rows, size = count(*got["window"])
    assert got["rows"] == rows
    assert got["bytes"] == size
    assert sum(rows.values()) > 500
    assert picture(notebook, "lanes") != lanes
    assert picture(notebook, "map") != map_
    assert harmless(notebook) == NOTHING


def test_the_selection_is_there_in_the_next_cell(sweep):
    brush(sweep, 0.1, 0.4)
    outputs = sweep.run_in_new_cell("explorer.selection.height, *explorer.window")
    height, *window = map(int, re.findall(r"\d+", outputs[0]["data"]["text/plain"]))
    assert height == sum(rows_of_sweep(*window)[0].values())


def test_a_filter_keeps_one_cause_in_view_and_selection(sweep):
    map_ = picture(sweep, "map")
    pages.part(sweep.page, "filter-cause").click()
    menu = pages.part(sweep.page, "filter-cause-list")
    entry = menu.locator("label", has_text="eviction")
    entry.hover()
    entry.get_by_text("only").click()
    sweep.until("explorer.filters['cause']", ["eviction"])
    pages.wait_for(sweep.page, lambda: picture(sweep, "map") != map_, "the map changes")
    got = sweep.value(COUNTED)
    assert got["rows"] == {"migrations eviction": 80}
    assert got["bytes"] == rows_of_sweep(*got["window"], "c = 'eviction'")[1]
    sweep.page.keyboard.press("Escape")


def test_a_click_on_a_cluster_goes_there(sweep):
    sweep.run("explorer.ready()")
    row = pages.part(sweep.page, "clusters").locator("tbody tr").first
    row.click()
    sweep.until("(explorer.picked or {}).get('what')", "cluster")
    settle(sweep)
    # The pages that the driver's faults brought in, 4 KiB each: of copies to the GPU for a fault.
    with closing(sqlite3.connect(f"file:{SWEEP}?mode=ro&immutable=1", uri=True)) as connection:
        faulted = connection.execute(
            "SELECT min(start), max(end), sum(bytes) / 4096 FROM CUPTI_ACTIVITY_KIND_MEMCPY "
            "WHERE copyKind = 11 AND migrationCause = 2"
        ).fetchone()
    assert f"{faulted[2]:,}".replace(",", " ") in row.inner_text().replace("\u202f", " ")
    start, end = sweep.value("list(explorer.window)")
    assert start <= faulted[0] < faulted[1] <= end
    assert end - start < 78_444_992  # ns, the whole
    panel = pages.part(sweep.page, "panel").inner_text()
    assert "cluster" in panel.lower()
    got = sweep.value(
        "explorer.selection.filter(direction='htod', cause='coherence')['bytes'].sum() // 4096"
    )
    assert got == faulted[2]


def test_the_wheel_zooms_at_the_pointer_and_does_not_scroll_the_notebook(sweep):
    at = pages.point(sweep.page, "map", 0.25, 0.5)
    top = pages.part(sweep.page, "map").bounding_box()["y"]
    start, end = pages.window(sweep.page)
    fixed = start + 0.25 * (end - start)
    sweep.page.mouse.move(*at)
    for _ in range(3):
        sweep.page.mouse.wheel(0, -240)
    pages.wait_for(
        sweep.page,
        lambda: end - start > 1.6 * (pages.window(sweep.page)[1] - pages.window(sweep.page)[0]),
        "the view is zoomed",
    )
    settle(sweep)
    left, right = pages.window(sweep.page)
    assert left + 0.25 * (right - left) == pytest.approx(fixed, abs=0.01 * (end - start))
    assert pages.part(sweep.page, "map").bounding_box()["y"] == top
    origin = sweep.value("explorer.scene.origin_ns")
    assert sweep.value(COUNTED)["rows"] == rows_of_sweep(left + origin, right + origin)[0]


def test_an_observer_that_raises_shows_its_error_and_the_view_lives_on(sweep):
    sweep.run("odd = lambda change: 1 / 0\nexplorer.observe(odd, 'window')")
    try:
        brush(sweep, 0.2, 0.5)
        error = pages.part(sweep.page, "error")
        error.wait_for(state="visible")
        assert "ZeroDivisionError: division by zero" in error.inner_text()
    finally:
        sweep.run("explorer.unobserve(odd, 'window')")
    brush(sweep, 0.6, 0.9)
    got = sweep.value(COUNTED)
    assert got["rows"] == rows_of_sweep(*got["window"])[0]
    assert sweep.page.watched.errors == []


def test_python_code_moves_the_view(sweep):
    sweep.run("explorer.window = (20_000_000, 30_000_000)")
    origin = sweep.value("explorer.scene.origin_ns")
    expected = (20_000_000 - origin, 30_000_000 - origin)
    pages.wait_for(sweep.page, lambda: pages.window(sweep.page) == expected, "the view moves")
    assert sweep.value(COUNTED)["rows"] == rows_of_sweep(20_000_000, 30_000_000)[0]


@pytest.mark.parametrize("name", ["sweep", "hotspot"])
def test_a_new_view_has_the_ground_of_jupyterlab(request, name):
    # The browser draws it before JupyterLab has put it into the document.
    assert request.getfixturevalue(name).ground == {"theme": "light", "same": True}


def test_the_view_follows_the_theme_of_jupyterlab(sweep):
    change = "theme => jupyterapp.commands.execute('apputils:change-theme', {theme})"
    for theme in ("Dark", "Light"):
        sweep.page.evaluate(change, f"JupyterLab {theme}")
        wanted = {"theme": theme.lower(), "same": True}
        pages.wait_for(
            sweep.page, lambda to=wanted: sweep.page.evaluate(GROUND) == to, f"the view is {theme}"
        )
        assert sweep.page.evaluate(GROUND) == wanted


PLAIN = ("dl", "dt", "dd", "table", "th", "th button", "td", "tbody tr", "header", "strong")
OURS = (
    ".nsan-buttons .nsan-button",
    ".nsan-segments button",
    ".nsan-note",
    ".nsan-section-title",
    ".nsan-help dt",
)
STYLES = f"""() => {{
  const sides = ["Top", "Right", "Bottom", "Left"];
  const names = ["float", "display", "fontWeight", "fontSize", "lineHeight", "textAlign", "overflow",
    "borderTopLeftRadius", "letterSpacing", "textTransform", "verticalAlign", "whiteSpace",
    ...sides.flatMap(side => [`margin${{side}}`, `padding${{side}}`, `border${{side}}Width`])];
  const root = document.querySelector("{pages.ROOT}");
  return Object.fromEntries({json.dumps([*PLAIN, *OURS])}.map(selector => {{
    const style = getComputedStyle(root.querySelector(selector));
    return [selector, Object.fromEntries(names.map(name => [name, style[name]]))];
  }}));
}}"""
"""What plain elements look like, for comparing."""
LINES_OF_HELP = """help => {
  const box = help.getBoundingClientRect();
  return {
    isInside: box.bottom <= help.parentElement.getBoundingClientRect().bottom,
    lines: [...help.querySelectorAll("dt")].map(one => {
      const range = document.createRange();
      range.selectNodeContents(one);
      return range.getClientRects().length;
    }),
  };
}"""


AS_ELSEWHERE = {"others": {}, "isInside": True, "lines": {1}}


def looks(notebook, watched_page, copied):
    """Find what the host's own styles change, against the copy in a file, and how the help looks."""
    page = notebook.page
    notebook.run("explorer.ready()")
    pages.part(page, "clusters").locator("td").first.wait_for()
    styles = page.evaluate(STYLES)
    other = watched_page()
    other.goto(here(copied))
    pages.wait_for_view(other)
    wanted = other.evaluate(STYLES)
    other.context.close()
    page.bring_to_front()
    pages.part(page, "help").click()
    help_text = pages.part(page, "help-text").evaluate(LINES_OF_HELP)
    page.keyboard.press("Escape")
    others = {name: style for name, style in styles.items() if style != wanted[name]}
    return {"others": others, "isInside": help_text["isInside"], "lines": {*help_text["lines"]}}


def test_the_styles_of_jupyterlab_change_nothing(sweep, watched_page):
    copied = sweep.server.folder / "explore-output" / "explorer.html"
    sweep.run(f"explorer.to_html({str(copied)!r}, force_overwrite=True)")
    assert looks(sweep, watched_page, copied) == AS_ELSEWHERE


TWICE = (f"import nsan\nexplorer = nsan.explore({str(SWEEP)!r})\nexplorer", "explorer")
RESTART = "() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
GONE = "The kernel does not answer any more: run the cell again."


def drag_in(output, name, start, end):
    """Drag on a canvas of one of several views."""
    mouse = output.page.mouse
    mouse.move(*pages.point(output, name, *start))
    mouse.down()
    for share in (0.5, 1):
        at = [a + share * (b - a) for a, b in zip(start, end, strict=True)]
        mouse.move(*pages.point(output, name, *at))
    mouse.up()


def test_only_a_move_of_the_user_moves_the_selection_of_two_views(server, opened):
    (server.folder / "twice.ipynb").write_text(json.dumps(jupyter.notebook_of(*TWICE)))
    notebook = opened("twice.ipynb")
    page = notebook.page
    assert jupyter.errors(notebook.run_all()) == []
    page.set_viewport_size({"width": 1280, "height": 2400})
    first, second = notebook.output(0), notebook.output(1)
    for view in (first, second):
        pages.wait_for(page, lambda v=view: pages.state(v, "mode") == "raster", "it is drawn")
    drag_in(first, "overview", (0.3, 0.5), (0.6, 0.5))
    code = "[side - explorer.scene.origin_ns for side in explorer.window]"
    pages.wait_for(
        page, lambda: tuple(notebook.value(code)) == pages.window(first), "the kernel knows it"
    )
    moved, whole_ = pages.window(first), pages.window(second)
    assert whole_[0] == 0 < moved[0] < moved[1] < whole_[1]
    # Both views ask again, for what each shows.
    before = [int(pages.state(view, "views")) for view in (first, second)]
    page.set_viewport_size({"width": 1000, "height": 2400})
    for view, n in zip((first, second), before, strict=True):
        pages.wait_for(page, lambda v=view, n=n: int(pages.state(v, "views")) > n, "it is drawn")
    assert tuple(notebook.value(code)) == moved == pages.window(first)
    assert pages.window(second) == whole_
    # Then the kernel is restarted: the view says so, in the words of its reader.
    page.evaluate(RESTART)
    drag_in(first, "overview", (0.7, 0.5), (0.9, 0.5))
    error = pages.part(first, "error")
    error.get_by_text(GONE).wait_for()
    assert error.inner_text().split("\n") == ["An error", "hide", GONE]


def hostile_export(path):
    """Write a capture whose every name is an attack."""
    export = x.Export()
    export.strings[1], export.strings[7] = EVIL, "plain"
    for number in range(12):
        at = number * 1_000_000
        export.add(x.KERNEL, x.kernel(at, at + 900_000, name=1 if number % 3 else 7))
        export.add(x.GPU_FAULTS, x.gpu_fault(at + 10_000, at + 40_000, x.VA + number * x.MIB, n=9))
        export.add(
            x.MEMCPY, x.migration(at + 20_000, at + 30_000, 64 * x.KIB, x.VA + number * x.MIB)
        )
        export.add(x.NVTX, x.nvtx(at, at + 950_000, EVIL))
    export.add(x.MEMORY, x.memory_event(0, x.VA, 32 * x.MIB, name=EVIL))
    return export.write(path)


HOSTILE_CELLS = (
    "%load_ext nsan\nimport nsan\n%nsan hostile.sqlite",
    "nsan.chart(trace, 'faults_of_kernels')",
    "nsan.chart(trace, 'faults_of_allocations')",
)


def test_names_that_attack_stay_text(server, opened):
    hostile_export(server.folder / "hostile.sqlite")
    (server.folder / "hostile.ipynb").write_text(json.dumps(jupyter.notebook_of(*HOSTILE_CELLS)))
    notebook = opened("hostile.ipynb")
    assert jupyter.errors(notebook.run_all()) == []
    page = notebook.page
    notebook.output(0)
    pages.wait_for_view(page)
    notebook.run("explorer.picked = {'what': 'kernel', 'id': 1}")
    panel = pages.part(page, "panel")
    panel.get_by_text("</script><img src=x", exact=False).first.wait_for()
    pages.part(page, "filter-kernel").click()
    pages.part(page, "filter-kernel-list").get_by_text("</script><img src=x").first.wait_for()
    page.mouse.move(*pages.point(page, "lanes", 0.5, 0.2))
    for number in (1, 2):
        chart = notebook.output(number).locator(".vega-embed .chart-wrapper svg")
        assert "</script><img s" in chart.text_content()  # the rest of it is shortened
    notebook.output(0)
    text = page.locator(pages.ROOT).inner_text()
    assert not set(text) & {"\u202e", "\x1b"}
    assert "49" not in re.findall(r"\{\{7\*7\}\}|\b49\b", text)
    assert harmless(notebook) == NOTHING


def test_the_same_view_works_in_notebook_7(server, opened, watched_page):
    pytest.importorskip("notebook", reason="pip install notebook")
    cells = (f"import nsan\nexplorer = nsan.explore({str(SWEEP)!r})\nexplorer",)
    (server.folder / "classic.ipynb").write_text(json.dumps(jupyter.notebook_of(*cells)))
    notebook = opened("classic.ipynb", classic=True)
    assert jupyter.errors(notebook.run_all()) == []
    pages.wait_for_view(notebook.page)
    brush(notebook, 0.5, 0.8)
    got = notebook.value(COUNTED)
    assert got["rows"] == rows_of_sweep(*got["window"])[0]
    copied = server.folder / "classic.html"
    notebook.run(f"explorer.to_html({str(copied)!r})")
    assert looks(notebook, watched_page, copied) == AS_ELSEWHERE
    # Notebook 7 misses commands of JupyterLab by itself, which its console says.
    assert harmless(notebook) | {"errors": []} == NOTHING


def test_a_request_outside_would_be_noticed(page):
    """The count of requests can fail: this one is aborted and counted."""
    page.set_content("<img src='http://example.invalid/x.png'>")
    pages.wait_until(page, "() => document.images[0].complete")
    assert page.watched.outside == ["http://example.invalid/x.png"]
    page.evaluate("() => alert(7)")
    assert page.watched.dialogs == ["7"]
