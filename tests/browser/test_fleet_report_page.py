"""The page of a fleet in a real browser: charts are drawn live, hostile names stay text, and it fits a narrow window."""

from __future__ import annotations

import pytest
from browser.conftest import here

pytest.importorskip("nbconvert", reason="pip install 'nsan[report]'")

import report_pages as made
from fleet_members import failure, member, moving, run_of

from nsan.fleet.document import fleet_document
from nsan.report.fleet import FleetReport
from nsan.report.page import page_of

pytestmark = pytest.mark.browser

EVIL = "</script><img src=x onerror=alert(1)>{{7*7}}`\u202egpj\x1b[31m" + "k" * 300
SECTIONS = ("head", "standing_out", "um_time", "runs", "causes", "ranks", "failed", "provenance")


def notebook(theme):
    members = [
        *run_of([10, 11, 12, 13, 14, 300], run=EVIL, program=EVIL, gpu=EVIL),
        *run_of([10, 11], run="constructor"),
        member("if", None, source=EVIL, groups=moving(9), program=EVIL),
    ]
    document = fleet_document(members, [failure(EVIL, EVIL, run=EVIL)], name=EVIL)
    report = FleetReport(document, theme=theme)
    cells = [
        each for name in SECTIONS for each in (f"## {name}", made.shows(*getattr(report, name)()))
    ]
    return made.executed("# Many reports", *cells)


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 380)])
def test_the_page_is_drawn_and_harmless_and_as_wide_as_the_window(
    watched_page, tmp_path, theme, width
):
    file = tmp_path / "fleet.html"
    file.write_text(page_of(notebook(theme), title=EVIL, theme=theme), encoding="utf-8")
    page = watched_page(viewport={"width": width, "height": 800})
    page.goto(here(file))
    page.wait_for_selector("html[data-charts=drawn]", state="attached")
    figures = page.locator("figure")
    assert [each.get_attribute("data-drawn") for each in figures.all()] == ["live"] * 3
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("img[src=x]").count() == 0
    seen = page.watched
    assert (seen.dialogs, seen.errors, seen.outside) == ([], [], [])


def test_what_is_under_the_pointer_names_the_rank(watched_page, tmp_path):
    file = tmp_path / "fleet.html"
    file.write_text(page_of(notebook("light"), title="x"), encoding="utf-8")
    page = watched_page()
    page.goto(here(file))
    page.wait_for_selector("html[data-charts=drawn]", state="attached")
    page.locator("figure").first.locator(".mark-rect path").nth(5).hover()
    tip = page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    assert "300.000 ms" in tip.inner_text()
    assert "stands out: more" in tip.inner_text()
