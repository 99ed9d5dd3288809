"""The page of a report in a real browser: drawn live, complete without a network, harmless.

Every request is aborted and counted, but for the file itself. The pages are made of charts of a modelled
trace and of hostile names; their notebooks are made by hand, so that no kernel runs.
"""

from __future__ import annotations

import re

import exports as x
import pytest
from browser.conftest import CHROMIUM, here

pytest.importorskip("nbconvert", reason="pip install 'nsan[report]'")

import report_pages as made

from nsan.charts.catalog import charts
from nsan.report.blocks import Heading, Picture, Point, Points, Table, Text
from nsan.report.page import page_of
from nsan.report.pdf import pdf_of
from nsan.report.report import Report

pytestmark = pytest.mark.browser

MODEL = x.REPOSITORY / "sample_data" / "model"
CHARTS = ("migrations_over_time", "address_time_map", "work_over_time", "allocator_over_time")
ATTACK = "</script><img src=x onerror=alert(1)>"
EVIL = f"{ATTACK}<!--]]>{{{{7*7}}}}`\u202egpj.exe\x1b[31m\x00" + "k" * 20_000
TABLE = Table(
    ("Kernel", "Rows"),
    tuple((f"k{i}", str(i)) for i in range(9)),
    (False, True),
    "Which?",
    ("Few.",),
)


@pytest.fixture(scope="module")
def report():
    return Report(MODEL / "pca_on" / "pca_on.sqlite")


SECTIONS = [f"About {number}" for number in range(5)]


@pytest.fixture(scope="module")
def written():
    """Make a notebook of much text, a wide chart and a wide table."""
    wide = Table(tuple(f"Column {i}" for i in range(12)), (("1 234 567",) * 12,), (True,) * 12)
    text = made.shows(*[Text("It is so, and why it is so is said here. " * 12)] * 4)
    rest = made.shows(made.scattered(20), wide, TABLE, source="report.section('said')")
    cells = [cell for title in SECTIONS for cell in (f"## {title}", text.copy())]
    return made.executed("# Report", *cells, rest)


@pytest.fixture(scope="module")
def notebook(report):
    sections = [
        cell for name in CHARTS for cell in (f"## About {name}", made.shows(*report.chart(name)))
    ]
    said = made.shows(
        Text("It is so."),
        Text("Record it: `nsys profile --cuda-um-gpu-page-faults=true`.", "missing"),
        TABLE,
        source="report.section('said')",
    )
    return made.executed("# Report", *sections, "## Said", said)


@pytest.fixture
def opened(watched_page, tmp_path):
    """Open a page with nothing but its file to be had; nothing may go wrong in it."""
    pages = []

    def of(text, **options):
        file = tmp_path / f"report-{len(pages)}.html"
        file.write_text(text, encoding="utf-8")
        page = watched_page(**options)
        page.requests, page.warnings = [], []
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("console", lambda said: said.type == "warning" and page.warnings.append(said.text))
        page.goto(here(file))
        if options.get("java_script_enabled", True) and "<figure" in text:
            page.wait_for_selector("html[data-charts=drawn]", state="attached")
        pages.append(page)
        return page

    yield of
    for page in pages:
        seen = page.watched
        requests = [url for url in page.requests if not url.startswith(("data:", "file:"))]
        files = [url for url in page.requests if url.startswith("file:")]
        page.context.close()
        assert (seen.dialogs, seen.errors, seen.outside, requests) == ([], [], [], [])
        assert page.warnings == []
        assert len(files) == 1


def widths(page, selector):
    return page.locator(selector).evaluate_all("all => all.map(each => each.scrollWidth)")


def test_every_chart_is_drawn_live_in_the_place_of_its_picture(opened, report):
    cells = [made.shows(*report.chart(name)) for name in charts()]
    page = opened(page_of(made.executed(*cells), title="x"))
    figures = page.locator("figure")
    assert figures.count() == len(charts()) == 14
    for figure in figures.all():
        assert figure.get_attribute("data-drawn") == "live"
        assert figure.locator("svg.marks").count() == 1
        assert figure.locator("svg.marks path, svg.marks line").count() > 20
        assert figure.locator("img").count() == 0


def test_what_is_under_the_pointer_is_named(opened, report):
    page = opened(page_of(made.executed(made.shows(*report.chart(CHARTS[0]))), title="x"))
    bars = page.locator("figure .mark-rect path")
    bars.nth(bars.count() // 2).hover()
    tip = page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    assert "page fault" in tip.inner_text() or "prefetch" in tip.inner_text()


def test_without_a_script_pictures_text_and_contents_are_there(opened, notebook):
    page = opened(page_of(notebook, title="x"), java_script_enabled=False)
    images = page.locator("figure img")
    assert images.count() == len(CHARTS)
    for box in (image.bounding_box() for image in images.all()):
        assert box["width"] > 400
        assert box["height"] > 150
    assert page.get_by_text("It is so.").is_visible()
    assert page.get_by_role("cell", name="k8").is_visible()
    page.set_viewport_size({"width": 400, "height": 800})
    page.get_by_text("Contents").locator("visible=true").click()
    page.get_by_role("link", name="Said").click()
    assert 0 <= page.get_by_role("heading", name="Said").bounding_box()["y"] < 400


def test_a_chart_that_cannot_be_drawn_stays_a_picture_and_the_others_are_drawn(opened, report):
    (good,) = report.chart(CHARTS[0])
    broken = Picture("broken", "What?", {**good.spec, "mark": "no such mark", "layer": 3}, good.svg)
    page = opened(page_of(made.executed(made.shows(broken, good)), title="x"))
    assert page.locator("figure").evaluate_all("all => all.map(f => f.dataset.drawn)") == [
        "picture",
        "live",
    ]
    assert page.locator("figure img").bounding_box()["width"] > 400
    assert any("A chart stays a picture" in said for said in page.warnings)
    page.warnings.clear()


@pytest.mark.parametrize(("width", "is_beside"), [(1280, True), (400, False)])
def test_the_contents_lead_to_each_section_and_nothing_is_wider_than_the_page(
    width, is_beside, opened, written
):
    page = opened(page_of(written, title="x"), viewport={"width": width, "height": 700})
    assert page.locator("nav.nsan-beside").is_visible() == is_beside
    assert page.locator("nav.nsan-above").is_visible() != is_beside
    assert widths(page, "html") == [width]
    links = page.locator("nav a").locator("visible=true")
    assert links.all_inner_texts() == SECTIONS * is_beside
    if not is_beside:
        page.get_by_text("Contents").locator("visible=true").click()
    for number in (3, 1):
        links.nth(number).click()
        assert -1 <= page.locator("h2").nth(number).bounding_box()["y"] < 100


def test_what_is_wider_than_a_narrow_page_scrolls_and_says_so(opened, written):
    page = opened(page_of(written, title="x"), viewport={"width": 400, "height": 700})
    for part in (page.locator(".nsan-table").first, page.locator(".nsan-chart")):
        assert part.get_attribute("data-more") == "right"
        part.evaluate("each => each.scrollTo(9999, 0)")
        page.wait_for_timeout(100)
        assert part.get_attribute("data-more") == "left"


def test_the_contents_say_where_one_reads(opened, written):
    page = opened(page_of(written, title="x"))
    current = page.locator('nav.nsan-beside a[aria-current="true"]')
    assert current.all_inner_texts() == SECTIONS[:1]
    page.locator("h2").nth(2).evaluate("each => scrollTo(0, each.offsetTop - 40)")
    page.wait_for_selector(f'nav.nsan-beside a[aria-current="true"]:has-text("{SECTIONS[2]}")')
    assert current.count() == 1


def test_code_is_folded_where_it_is_asked_for_and_absent_where_not(opened, written):
    assert opened(page_of(written, title="x")).get_by_text("section", exact=True).count() == 0
    page = opened(page_of(written, title="x", code=True))
    code = page.get_by_text("section", exact=True).last
    assert not code.is_visible()
    page.locator("details.nsan-code summary").last.click()
    assert code.is_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_and_charts_have_one_ground(theme, opened):
    chart = made.picture(theme=theme)
    page = opened(page_of(made.executed(made.shows(chart)), title="x", theme=theme))
    ground = page.locator("body").evaluate("each => getComputedStyle(each).backgroundColor")
    charts = page.locator("svg.marks").evaluate("each => getComputedStyle(each).backgroundColor")
    assert ground == charts
    page.emulate_media(media="print")
    paper = page.locator("body").evaluate("each => getComputedStyle(each).backgroundColor")
    assert paper == "rgb(255, 255, 255)"


def hostile_export(path):
    """Write an export in which every name attacks."""
    export = x.Export()
    export.strings[1] = EVIL
    for number in range(6):
        at, va = number * 1_000_000, x.VA + number * 64 * x.KIB
        export.add(x.KERNEL, x.kernel(at, at + 900_000))
        export.add(x.GPU_FAULTS, x.gpu_fault(at, at + 40_000, va))
        export.add(x.MEMCPY, x.migration(at + 20_000, at + 30_000, 64 * x.KIB, va))
        export.add(x.NVTX, x.nvtx(at, at + 950_000, f"{number} {EVIL}"))
    export.add(x.MEMORY, x.memory_event(0, x.VA, 32 * x.MIB, name=EVIL))
    return export.write(path)


def test_hostile_names_fire_nothing_and_show_as_text(opened, tmp_path):
    hostile = Report(hostile_export(tmp_path / "hostile.sqlite"))
    names = ("faults_of_kernels", "faults_of_allocations", "work_over_time")
    charts = [block for name in names for block in hostile.chart(name)]
    tables = [block for name in ("top_kernels", "faults_by_nvtx") for block in hostile.table(name)]
    assert [type(each) for each in charts + tables] == [Picture] * 3 + [Table] * 2
    said = (Text(EVIL), Heading(EVIL), Points((Point(EVIL, EVIL, EVIL),)))
    titled = Picture(EVIL, EVIL, charts[0].spec, charts[0].svg)
    cell = made.shows(*said, *charts, titled, *tables, source=EVIL)
    page = opened(page_of(made.executed(cell), title=EVIL, code=True))
    assert page.locator('figure[data-drawn="live"]').count() == 4
    assert page.locator("main img, main script, main iframe").count() == 0
    assert page.get_by_text("{{7*7}}").first.is_visible()
    assert page.get_by_text("49", exact=True).count() == 0
    page.locator("figure").first.locator(".mark-rect path").first.hover(force=True)
    page.locator("#vg-tooltip-element.visible").wait_for()
    assert page.locator("#vg-tooltip-element img").count() == 0
    assert "</script>" in page.locator("#vg-tooltip-element").inner_text()
    assert widths(page, "html") == [1280]


def test_what_attacks_in_cells_of_an_own_notebook_runs_nothing_and_asks_nobody(opened):
    attacks = [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)><img src=https://example.com/a.png>",
        "<svg onload=alert(1)><script>alert(1)</script><style><img src=x onerror=alert(1)></style></svg>",
        "<iframe srcdoc='<script>alert(1)</script>'></iframe><object data=https://example.com></object>",
        "<meta http-equiv=refresh content='0;url=https://example.com/'>",
        "<link rel=stylesheet href=https://example.com/a.css><link rel=preconnect href=https://example.com>",
        "<style>@import url(https://example.com/b.css); p{background:url(https://example.com/c.png)}</style>x",
        "<base href=https://example.com/><form action=https://example.com><button>b</button></form>",
        "<a id=js href='javascript:alert(1)'>link</a></main></body></html>",
        "<math><mtext></p><style><a title='</style><img src=x onerror=alert(1)>'>",
    ]
    cells = [made.gives({"text/html": each, "text/plain": "p"}) for each in attacks]
    written = [
        f"a {each}\n\n[m](javascript:alert(1)) ![i](https://example.com/d.png)" for each in attacks
    ]
    page = opened(page_of(made.executed(*cells, *written, "## End"), title="x"))
    for link in (
        page.get_by_text("link", exact=True).all() + page.get_by_text("m", exact=True).all()
    ):
        link.click()
    page.wait_for_timeout(300)
    assert page.url.startswith("file:")
    assert page.locator("main > footer").count() == 1
    assert page.get_by_role("heading", name="End").is_visible()


COVER = "background:red;color:red;font-size:99px"
COVERS = [
    f"<div style='position:fixed;inset:0;{COVER};z-index:99'>cover</div>",
    f"<div style='po\\73ition:fixed;top:0;left:0;width:100vw;height:100vh;{COVER}'>cover</div>",
    f"<style>.c{{position:absolute;top:0;left:0;z-index:9;{COVER}}}</style><div class=c>cover</div>",
    f"<div style='margin-top:-3000px;height:3000px;{COVER}'>cover</div>",
    f"<div style='height:0;line-height:1;{COVER}'>{'cover<br>' * 60}</div>",
    f"<div class='nsan-beside' style='{COVER};height:90vh'>cover</div>",
    f"<svg style='{COVER};overflow:visible' width=9 height=9><rect width=9999 height=9999 /></svg>cover",
    "<style>main, body, .nsan-report, h1 { display: none !important } html { opacity: 0 }</style>cover",
    "<style>}main{display:none}@media all{main{display:none}} :root, *{--text:red}</style>cover",
]


@pytest.mark.parametrize("is_output", [True, False], ids=["output", "markdown"])
def test_no_cell_of_an_own_notebook_hides_or_covers_what_stands_around_it(is_output, opened):
    cells = ["# Report", made.shows(Heading("Before"), Text("It is so."))]
    for number, cover in enumerate(COVERS):
        own = made.gives({"text/html": cover, "text/plain": "p"}) if is_output else cover
        cells += [own, made.shows(Text(f"After {number}."))]
    page = opened(page_of(made.executed(*cells), title="x"))
    assert page.get_by_text("cover").count() == len(COVERS)
    for words in ("Report", "Before", "It is so.", *(f"After {n}." for n in range(len(COVERS)))):
        place = page.get_by_text(words, exact=True)
        place.scroll_into_view_if_needed()
        assert place.is_visible(), words
        assert place.evaluate(ON_TOP), words
        assert place.evaluate("each => getComputedStyle(each).color") == "rgb(31, 35, 40)", words


def test_an_output_holds_whatever_is_placed_in_it_within_its_box(opened):
    own = made.gives({"text/html": "<p>own</p>", "text/plain": "p"})
    page = opened(page_of(made.executed("# Report", own, made.shows(Text("After."))), title="x"))
    # As if a style had come through.
    page.locator(".nsan-output p").evaluate(
        "each => each.style.cssText = 'position:fixed;inset:0;max-width:none;z-index:9;background:red'"
    )
    for words in ("Report", "After."):
        assert page.get_by_text(words, exact=True).evaluate(ON_TOP), words


ON_TOP = """each => {
  const {left, top, height} = each.getBoundingClientRect();
  const at = document.elementFromPoint(left + 5, top + height / 2);
  return (at === each || each.contains(at)) && getComputedStyle(document.documentElement).opacity === "1";
}"""
"""Whether one who clicks on a text hits it, and sees it."""


def test_a_page_for_paper_becomes_a_pdf_of_several_pages(notebook, monkeypatch):
    monkeypatch.setenv("NSAN_CHROMIUM", CHROMIUM)
    printed = pdf_of(page_of(notebook, title="A report", live=False))
    assert printed.startswith(b"%PDF-")
    n_pages = len(re.findall(rb"/Type\s*/Page\b", printed))
    assert 3 <= n_pages <= 8
