"""What an executed notebook becomes: a page, or Markdown with pictures beside it."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("nbconvert", reason="pip install 'nsan[report]'")

import report_pages as made
from nbformat.v4 import new_code_cell, new_output, new_raw_cell

from nsan.charts.theme import look
from nsan.report import page as page_module
from nsan.report.blocks import Heading, Point, Points, Table, Text
from nsan.report.markdown_file import markdown_of_notebook, pictures_of_notebook
from nsan.report.page import page_of

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
EVIL = "</script><img src=x onerror=alert(1)><!--]]>{{7*7}}`x`\u202egpj"


class Words(HTMLParser):
    """Reads what a page shows, and its elements."""

    def __init__(self, page):
        super().__init__()
        self.words, self.tags, self._hidden = [], [], 0
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag):
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data):
        if not self._hidden:
            self.words.append(data)


def shown(page):
    return " ".join("".join(Words(page).words).split())


def body(page):
    return page.partition("<main>")[2].partition("<footer>")[0]


def printing(text, name="stdout"):
    return new_code_cell("x", outputs=[new_output("stream", name=name, text=text)])


@pytest.fixture(scope="module")
def chart():
    return made.picture()


@pytest.fixture(scope="module")
def notebook(chart):
    return made.executed(
        "# Report",
        new_code_cell("import nsan"),
        "## First & best\n\nA *word*.",
        made.shows(
            Text("It is `so`."),
            Text("Record it with `nsys profile`.", "missing"),
            Points((Point("Moved", "4 GiB", "derived"),)),
            chart,
            Heading("A part"),
            Table(("Kernel", "Rows"), (("add", "1 234"),), (False, True), "By kernel", ("Few.",)),
            source="report.section('first')",
        ),
        "## Second",
        made.shows(chart),
    )


def test_a_page_shows_the_notebook_in_its_order(notebook):
    words = shown(body(page_of(notebook, title="x")))
    wanted = ["Report", "First & best", "A word.", "It is so.", "nsys profile", "Moved 4 GiB"]
    wanted += ["derived", "A part", "By kernel", "Kernel", "add", "1 234", "Few.", "Second"]
    places = [words.index(each) for each in wanted]
    assert places == sorted(places)


def test_each_chart_stands_once_as_a_picture_with_its_size_and_what_it_shows(notebook, chart):
    pictures = [attrs for tag, attrs in Words(page_of(notebook, title="x")).tags if tag == "img"]
    assert [each["alt"] for each in pictures] == [chart.title] * 2
    drawn = base64.b64decode(pictures[0]["src"].removeprefix("data:image/svg+xml;base64,")).decode()
    assert f'width="{pictures[0]["width"]}" height="{pictures[0]["height"]}"' in drawn


def test_the_contents_lead_to_the_headings_of_sections(notebook):
    tags = Words(page_of(notebook, title="x")).tags
    links = [attrs["href"] for tag, attrs in tags if tag == "a"]
    heads = [attrs["id"] for tag, attrs in tags if tag == "h2"]
    assert heads == ["first-best", "second"]
    assert links == [f"#{each}" for each in heads] * 2


def test_a_heading_of_any_length_is_short_in_the_contents_and_whole_in_its_place():
    page = page_of(made.executed(f"## {'word ' * 2400}"), title="x")
    entries = re.findall(r"<li><a[^>]*>([^<]*)</a>", page)
    assert len(entries) == 2
    assert all(len(each) <= 80 and each.startswith("word word") for each in entries)
    assert body(page).count("word ") >= 2399


def test_a_notebook_without_sections_has_no_contents_and_one_without_a_title_gets_one():
    page = page_of(made.executed("Only text."), title="t.sqlite: <mine>")
    assert "<nav" not in page
    assert "<h1>t.sqlite: &lt;mine&gt;</h1>" in page
    assert "<title>t.sqlite: &lt;mine&gt;</title>" in page


def test_code_is_left_out_unless_it_is_asked_for(notebook):
    assert "import" not in body(page_of(notebook, title="x"))
    with_code = body(page_of(notebook, title="x", code=True))
    assert with_code.count('<details class="nsan-code"><summary>Code') == 3
    assert "import nsan" in shown(with_code)
    assert page_of(notebook, title="x", code=True, live=False).count('nsan-code" open>') == 3


def test_a_cell_that_shows_nothing_leaves_nothing():
    cells = ["# A", new_code_cell("x = 1"), printing("\n \n"), made.shows(), "B"]
    assert len(body(page_of(made.executed(*cells), title="x"))) == len(
        body(page_of(made.executed("# A", "B"), title="x"))
    )


def test_the_same_notebook_gives_the_same_page(notebook):
    assert page_of(notebook, title="x") == page_of(notebook, title="x")


def test_the_policy_allows_the_two_scripts_and_nothing_from_elsewhere(notebook):
    page = page_of(notebook, title="x")
    policy = re.search(r'Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.count("sha256-") == 2
    assert re.sub(r"'sha256-[^']*' ?", "", policy).split("; ")[1:] == [
        "script-src ",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert not re.findall(r"\son[a-z]+\s*=", body(page))


def test_a_page_for_paper_has_no_script(notebook):
    page = page_of(notebook, title="x", live=False)
    assert "<script" not in page
    assert "script-src" not in page
    assert body(page).count("data:image/svg+xml") == 2


def test_a_page_without_charts_has_no_bundle():
    assert len(page_of(made.executed("# A"), title="x")) < 30_000


def test_hostile_names_are_text_wherever_they_stand():
    hostile = made.picture(title=EVIL, rows=[{"name": EVIL, "value": 1}])
    cell = made.shows(
        Text(f"a {EVIL}"),
        Heading(EVIL),
        Points((Point(EVIL, EVIL, EVIL),)),
        Table((EVIL,), ((EVIL * 400,),), (False,), EVIL, (EVIL,)),
        hostile,
        source=EVIL,
    )
    page = page_of(made.executed(cell), title=EVIL, code=True)
    tags = Words(page).tags
    assert sum(tag == "script" for tag, _ in tags) == 2
    assert [attrs["alt"][:9] for tag, attrs in tags if tag == "img"] == ["</script>"]
    assert not any(key.startswith("on") for _, attrs in tags for key in attrs)
    assert shown(page).count("<img src=x onerror=alert(1)>") > 400
    assert "\u202e" not in page.replace("\\u202e", "")
    assert "{{7*7}}" in shown(page)


@pytest.mark.parametrize(
    ("data", "has", "lacks"),
    [
        ({"text/html": "<table><tr><td>1</table>", "text/plain": "p"}, "<td>1</td>", "<pre>"),
        (
            {"text/html": "<div id=g></div><script>f()</script>", "text/plain": "p"},
            "<pre>p</pre>",
            "f()",
        ),
        ({"text/html": "<script>f()</script>"}, "drawn by a script of its own", "f()"),
        (
            {
                "text/html": "<script>f()</script>",
                "text/plain": "<IPython.core.display.HTML object>",
            },
            "drawn by a script of its own",
            "IPython",
        ),
        (
            {
                "application/javascript": "f()",
                "text/plain": "<IPython.core.display.Javascript object>",
            },
            "drawn by a script of its own",
            "IPython",
        ),
        (
            {"text/html": "<style>b{}</style>", "image/png": PNG},
            f"data:image/png;base64,{PNG}",
            "<style>",
        ),
        ({"image/png": f"{PNG[:9]}\n{PNG[9:]}", "text/plain": "p"}, f"base64,{PNG}", "<pre>"),
        ({"image/png": '"><script>'}, 'base64,script"', "<script"),
        ({"image/svg+xml": "<svg onload='f()'/>"}, "data:image/svg+xml;base64,", "onload"),
        ({"text/markdown": "a *b*<script>f()</script>", "text/plain": "p"}, "<em>b</em>", "f()"),
        ({"text/latex": "$x<y$"}, "<pre>$x&lt;y$</pre>", "$x<y$"),
        ({"text/plain": "a<b>\x1b[31m\u202ec"}, "<pre>a&lt;b&gt;\\x1b[31m\\x202ec</pre>", "\u202e"),
        ({"application/json": {"a": 1}}, "{&quot;a&quot;: 1}", "script of"),
        (
            {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "Box()"},
            "<pre>Box()</pre><p class='nsan-note'>What stands here",
            "model_id",
        ),
    ],
)
def test_what_is_not_of_nsan_shows_in_the_best_form_that_needs_no_script(data, has, lacks):
    page = body(page_of(made.executed(made.gives(data)), title="x"))
    assert has in page.replace('{"a": 1}', "{&quot;a&quot;: 1}")
    assert lacks not in page


def test_what_was_printed_keeps_its_colours_and_the_last_state_of_a_progress_bar():
    cell = new_code_cell(
        "x",
        outputs=[
            new_output("stream", name="stdout", text="a <b>\n\x1b[31mred\x1b[0m\n 1%\r 5"),
            new_output("stream", name="stdout", text="0%\r100%\n"),
            new_output("stream", name="stderr", text="beware"),
            new_output("error", ename="E", evalue="v", traceback=["\x1b[1mE\x1b[0m: v <x>"]),
        ],
    )
    page = body(page_of(made.executed(cell), title="x"))
    assert 'a &lt;b&gt;\n<span class="ansi-red-fg">red</span>\n100%</pre>' in page
    assert '<pre class="nsan-stderr">beware</pre>' in page
    assert '<pre class="nsan-traceback"><span class="ansi-bold">E</span>: v &lt;x&gt;</pre>' in page


def test_markdown_cells_may_hold_pictures_and_formulas_but_no_scripts():
    cell = made.executed(
        "![a](attachment:p.png) $x<y$ <script>f()</script>[l](javascript:f())"
    ).cells[0]
    cell.attachments = {"p.png": {"image/png": PNG}}
    page = body(page_of(made.executed(cell, "![b](attachment:gone.png)"), title="x"))
    assert f'<img src="data:image/png;base64,{PNG}" alt="a">' in page
    assert "$x&lt;y$" in page
    assert "f()" not in page
    assert "gone.png" in page


def test_a_cell_of_markdown_with_a_style_of_its_own_is_held_like_an_output():
    cells = [
        "<b style='height:9px'>a</b>",
        "| a |\n|--|\n| b |",
        "<style>main{display:none}</style>c",
    ]
    page = body(page_of(made.executed(*cells), title="x"))
    assert page.count('<div class="nsan-output">') == 2
    assert "<style>.nsan-output main { display: none }</style>" in page


def test_raw_cells_are_text():
    assert "<pre>&lt;b&gt;</pre>" in page_of(made.executed(new_raw_cell("<b>")), title="x")


def test_what_other_cells_show_is_not_counted_and_never_dropped(chart, monkeypatch):
    monkeypatch.setattr(page_module, "MOST_BYTES", 600_000)
    cells = [made.shows(chart), made.gives({"image/png": PNG * 10_000})]
    page = page_of(made.executed(*cells), title="x")
    assert len(page) > 900_000
    assert PNG * 10_000 in page
    assert "A picture only" not in page


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_and_charts_have_one_ground_and_one_ink(theme):
    style = page_module._sources()[0]
    start = 'html[data-theme="dark"]' if theme == "dark" else "html {"
    colours = dict(re.findall(r"--(\w+): (#\w+);", style.partition(start)[2].partition("}")[0]))
    wanted = look(theme)
    assert colours["ground"] == wanted.ground
    assert colours["text"] == wanted.text
    assert colours["muted"] == wanted.muted
    assert colours["line"] == wanted.grid
    assert f'<html lang="en" data-theme="{theme}">' in page_of(
        made.executed("a"), title="x", theme=theme
    )


# Markdown --------------------------------------------------------------------------------------


def test_markdown_names_each_picture_once_and_they_are_what_the_charts_are(notebook):
    text = markdown_of_notebook(notebook, folder="report_files")
    named = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text)
    assert named == ["report_files/bars.svg", "report_files/bars-2.svg"]
    pictures = pictures_of_notebook(notebook)
    assert [f"report_files/{each}" for each in pictures] == named
    assert pictures["bars.svg"].startswith(b"<svg")
    assert b">n3</text>" in pictures["bars.svg"]


def test_markdown_has_texts_tables_and_no_code(notebook):
    text = markdown_of_notebook(notebook, folder="f")
    assert text.startswith("# Report\n\n## First & best\n\nA *word*.\n\nIt is `so`.")
    assert re.search(r"\| add +\| +1 234 \|", text)
    assert "import" not in text


def test_a_folder_with_spaces_and_brackets_is_an_address_in_markdown(notebook):
    text = markdown_of_notebook(notebook, folder="my (new) files")
    assert "](my%20%28new%29%20files/bars.svg)" in text


def test_markdown_has_what_other_cells_show_as_markdown_picture_or_text():
    cells = [
        made.gives({"text/markdown": "a *b*", "text/plain": "p"}),
        made.gives({"image/png": PNG, "text/plain": "p"}),
        made.gives({"text/html": "<b>x</b>", "text/plain": "```\n<b>\x1b[1m"}),
        printing("a\r\x1b[1mb\x1b[0m\n"),
        made.gives({"text/html": "<script>f()</script>"}),
        new_raw_cell("raw"),
    ]
    notebook = made.executed(*cells)
    text = markdown_of_notebook(notebook, folder="f")
    assert text.startswith(
        "a *b*\n\n![A picture that the notebook shows](f/output.png)\n\n````text\n```\n<b>\n````\n\n"
        "```text\nb\n```\n\n*What stands here"
    )
    assert text.endswith("```text\nraw\n```\n")
    assert pictures_of_notebook(notebook) == {"output.png": base64.b64decode(PNG)}


def test_markdown_has_the_text_of_what_is_html_only():
    said = "<style>b{}</style><h2>A <b>word</b></h2><script>f()</script><p>x &lt;y&gt;<br>z</p>"
    table = (
        "<table><tr><th></th><th>rows</th></tr><tr><td>add\n kernel</td><td>12</td></tr></table>"
    )
    nameless = "<IPython.core.display.HTML object>"
    cell = made.gives({"text/html": f"{said}{table}", "text/plain": nameless})
    text = markdown_of_notebook(made.executed(cell), folder="")
    assert text == "```text\nA word\nx <y>\nz\n            rows\nadd kernel  12\n```\n"
    only_script = made.gives({"text/html": "<script>f()</script>", "text/plain": nameless})
    assert markdown_of_notebook(made.executed(only_script), folder="").startswith("*What stands")


def test_a_hostile_name_or_title_of_a_chart_stays_in_its_place():
    hostile = made.picture("../../" + EVIL, title=f"]({EVIL}")
    notebook = made.executed(made.shows(hostile))
    (name,) = pictures_of_notebook(notebook)
    assert re.fullmatch(r"[a-z0-9_-]+\.svg", name)
    text = markdown_of_notebook(notebook, folder="")
    assert text.count("](") == 1 + text.count("\\](")
    assert "<img" not in text
