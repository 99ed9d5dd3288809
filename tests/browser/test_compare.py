"""Two traces one above the other in a real JupyterLab: the last line of a cell, as a reader has it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import exports as x
import pytest
from browser import jupyter, pages

pytestmark = pytest.mark.browser

MODEL = x.REPOSITORY / "sample_data" / "model"
TRACES = {name: MODEL / name / f"{name}.sqlite" for name in ("pca_on", "pca_off")}
STATE = """{side: {
    "window": list(each.window),
    "origin": each.scene.origin_ns,
    "rows": dict(each.selection.group_by("table").len().rows()),
    "bytes": each.selection["bytes"].sum(),
    "error": each.error,
} for side, each in (("a", view.a), ("b", view.b))}"""


@pytest.fixture(scope="module")
def notebook(browser, watched_page, tmp_path_factory):  # noqa: ARG001 - else nothing to serve
    """Run a cell whose last line is the view of two traces."""
    pytest.importorskip("jupyterlab", reason="pip install 'nsan[lab]'")
    with jupyter.server(tmp_path_factory.mktemp("jupyter")) as server:
        a, b = (str(path) for path in TRACES.values())
        cell = f"import nsan\nview = nsan.compare_view({a!r}, {b!r})\nview"
        (server.folder / "two.ipynb").write_text(json.dumps(jupyter.notebook_of(cell)))
        opened = jupyter.Notebook(watched_page(), server, "two.ipynb")
        opened.said = opened.run_all()
        assert jupyter.errors(opened.said) == []
        opened.output(0)
        for number in (0, 1):
            pages.wait_for(
                opened.page, lambda n=number: views(opened.page, n) > 0, "both views are drawn"
            )
        yield opened


def root(page, number):
    """Find one of the two views."""
    return page.locator(pages.ROOT).nth(number)


def views(page, number):
    """Count the answers that a view has drawn."""
    found = page.locator(pages.ROOT)
    return int(found.nth(number).get_attribute("data-views") or 0) if found.count() == 2 else 0


def window(page, number):
    """Return the window that a view shows, ns from its origin."""
    return tuple(int(side) for side in root(page, number).get_attribute("data-window").split(","))


def brush(page, number, start, end):
    """Drag over the overview of a view, from one share of its time to another."""
    canvas = root(page, number).locator('[data-nsan="overview"]')
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    gutter = float(canvas.get_attribute("data-gutter"))
    width = box["width"] - gutter - float(canvas.get_attribute("data-right"))
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + gutter + start * width, y)
    page.mouse.down()
    page.mouse.move(box["x"] + gutter + (start + end) / 2 * width, y)
    page.mouse.move(box["x"] + gutter + end * width, y)
    page.mouse.up()


def rows_of(path, start, end):
    """Count rows and bytes of an export with plain SQL; these two have no CPU page faults."""
    query = """
        SELECT t, count(*), sum(n) FROM (
          SELECT 'migrations' t, start, bytes n FROM CUPTI_ACTIVITY_KIND_MEMCPY
            WHERE copyKind IN (11, 12, 13)
          UNION ALL SELECT 'gpu_faults', start, 0 FROM CUDA_UM_GPU_PAGE_FAULT_EVENTS
        ) WHERE start >= ? AND start < ? GROUP BY t"""
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
        found = connection.execute(query, (start, end)).fetchall()
    return {table: n for table, n, _ in found}, sum(size for _, _, size in found)


def test_the_last_line_of_a_cell_shows_both(notebook):
    assert [cell["count"] for cell in notebook.said] == [1]
    titles = [root(notebook.page, n).inner_text() for n in (0, 1)]
    for name, title in zip(TRACES, titles, strict=True):
        assert f"{name}.sqlite" in title
    colours = [
        root(notebook.page, n)
        .locator('[data-nsan="map"]')
        .evaluate(
            """canvas => new Set(new Uint32Array(canvas.getContext('2d')
            .getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size"""
        )
        for n in (0, 1)
    ]
    assert min(colours) > 2
    watched = notebook.page.watched
    assert (watched.outside, watched.dialogs, watched.errors) == ([], [], [])


@pytest.mark.parametrize(("number", "start", "end"), [(0, 0.2, 0.55), (1, 0.4, 0.9)])
def test_a_brush_in_one_moves_the_other_and_selects_in_both(notebook, number, start, end):
    page = notebook.page
    whole = notebook.value("view.a.config['extent'][1]")
    assert whole == notebook.value("view.b.config['extent'][1]")
    wanted = pytest.approx((start * whole, end * whole), abs=0.01 * whole)

    def agree(shown):
        known = notebook.value(STATE)
        relative = {
            tuple(side - each["origin"] for side in each["window"]) for each in known.values()
        }
        windows = {window(page, 0), window(page, 1)}
        return relative == windows and len(windows) == 1 and windows.pop() == shown

    # A drag inside what is brushed would move it; a table of clusters that comes would move all.
    notebook.run("view.ready(); view.a.window = None")
    pages.wait_for(page, lambda: agree((0, whole)), "all is shown")
    brush(page, number, start, end)
    pages.wait_for(page, lambda: agree(wanted), "kernel and both views agree on the brush")
    known = notebook.value(STATE)
    for side, path in zip("ab", TRACES.values(), strict=True):
        rows, size = rows_of(path, *known[side]["window"])
        assert (known[side]["rows"], known[side]["bytes"]) == (rows, size)
        assert sum(rows.values()) > 50
        assert known[side]["error"] == ""
    assert page.watched.errors == []
