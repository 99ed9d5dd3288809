"""HTML of a notebook's own cells keeps its place in the page, and leads nowhere by itself."""

from __future__ import annotations

import re

import pytest

cleaning = pytest.importorskip("nsan.report.cleaning", reason="pip install 'nsan[report]'")
cleaned = cleaning.cleaned
styles = pytest.importorskip("nsan.report.foreign_style")


@pytest.mark.parametrize(
    "markup",
    [
        "<script>alert(1)</script>",
        "<SCRIPT src=//x></SCRIPT >",
        "<script>never closed",
        "<iframe srcdoc='<b>a</b>'>a</iframe>",
        "<template><b>a</b></template>",
        "<object data=x><embed src=x></object>",
        "<meta http-equiv=refresh content='0;url=http://x'>",
        "<link rel=dns-prefetch href=//x><base href=//x>",
        "<!-- <b>a</b> --><?php a ?>",
        "<img src=x onerror=alert(1)>",
        "<img src='https://example.com/a.png'>",
    ],
)
def test_what_runs_or_leads_away_by_itself_goes(markup):
    assert cleaned(f"a{markup}").strip() == "a"


@pytest.mark.parametrize(
    ("markup", "kept"),
    [
        ("<b onclick=f() id=a class=c>x</b>", '<b id="a" class="c">x</b>'),
        ("<a href='javascript:alert(1)'>x</a>", "<a>x</a>"),
        ("<a href=' java\nscript:alert(1)'>x</a>", "<a>x</a>"),
        ("<a href='#there'>x</a>", '<a href="#there" rel="noopener noreferrer">x</a>'),
        (
            "<a href='https://a/?b=1&c=\"2'>x</a>",
            '<a href="https://a/?b=1&amp;c=&quot;2" rel="noopener noreferrer">x</a>',
        ),
        ("<button>x</button>", "x"),
        (
            "<p style='color:red;background:URL( \"https://x/a.png\" )'>x</p>",
            '<p style="color: red">x</p>',
        ),
        (
            "<style>@import 'https://x/a.css'; p{color:red;background:url(//x/a.png)}</style>",
            "<style>.nsan-output p { color: red }</style>",
        ),
        ("<b style='position:fixed;inset:0'>x</b>", "<b>x</b>"),
        ("<b class='nsan-beside a NSAN-note b'>x</b>", '<b class="a b">x</b>'),
        ("a < b & <c>", "a &lt; b &amp; "),
        ("&lt;script&gt;", "&lt;script&gt;"),
        ("<img src='https://x/a.png' alt='a <plot>'>", "<em>[a &lt;plot&gt;]</em>"),
        ("<img src='data:image/png;base64,AA=='>", '<img src="data:image/png;base64,AA==">'),
        ("<img src='data:text/html,<b>x'>", ""),
        ("<svg viewBox='0 0 1 1'><path d='M0,0'/></svg>", None),
    ],
)
def test_what_shows_stays_without_what_acts(markup, kept):
    wanted = '<svg viewbox="0 0 1 1"><path d="M0,0"></path></svg>' if kept is None else kept
    assert cleaned(markup) == wanted


def test_what_is_open_is_closed_and_what_closes_nothing_goes():
    assert cleaned("</main></div><div><b>a") == "<div><b>a</b></div>"
    assert cleaned("<b><i>a</b>b</i>") == "<b><i>a</i></b>b"


def test_a_style_cannot_end_in_markup():
    text = "<svg><style>a{color:red}<img src=x onerror=alert(1)>b{}</style></svg>"
    kept = "<svg><style>.nsan-output a { color: red }</style></svg>"
    assert cleaned(text) == kept


@pytest.mark.parametrize(
    "declaration",
    [
        *("position:fixed", "position:absolute", "z-index:9", "top:0", "inset:0", "float:left"),
        *("transform:scale(99)", "margin:-9px", "margin-top:calc(0px - 9px)", "text-indent:-9px"),
        *("background:url(a.png)", "background:URL('a.png')", "background:image-set('a' 1x)"),
        *("po\\73ition:fixed", "position/**/:fixed", "content:'x'", "color:red/*", "color:(red"),
        *("color:'red", "color:red}b{color:red", "filter:blur(9px)", "--a:1", "color", "color:"),
        *("box-shadow:0 0 0 9999px red", "outline:9999px solid red", "animation:a 1s"),
    ],
)
def test_a_style_that_reaches_beyond_its_place_goes_and_the_others_stay(declaration):
    assert styles.declarations(f"color: blue; {declaration}; width: 9px") == (
        "color: blue; width: 9px"
    )


def test_what_tables_of_dataframes_say_of_their_look_stays():
    text = """
    .dataframe tbody tr th:only-of-type { vertical-align: middle; }
    .dataframe > thead > tr, .dataframe > tbody > tr { text-align: right; }
    /* a cell */ #T_1_row0_col1 { background: linear-gradient(90deg, rgb(1, 2, 3) 50%, transparent 50%); }
    """
    assert styles.rules(text).splitlines() == [
        ".nsan-output .dataframe tbody tr th:only-of-type { vertical-align: middle }",
        ".nsan-output .dataframe > thead > tr, .nsan-output .dataframe > tbody > tr { text-align: right }",
        ".nsan-output #T_1_row0_col1 { background: linear-gradient(90deg, rgb(1, 2, 3) 50%, transparent 50%) }",
    ]


@pytest.mark.parametrize(
    "text",
    [
        *("main { display: none }", "main{display:none", "}main{display:none}", "*{display:none}"),
        *("a:is(main){display:none}", "a, main{display:none}", "x}main{display:none}y{"),
        *("@media all{main{display:none}}", "@media all{a{} main{display:none}}"),
        *("@scope (main){:scope{display:none}}", "main{&{display:none}}", "~*{display:none}"),
        *(":root{display:none}", "m\\61in{display:none}", "[id]{display:none}"),
        *("a{width:calc(}main{display:none}", "a{content:'}main{display:none}'}"),
        *("/* } */main{display:none}", "main/*{*/{display:none}", "+main{display:none}"),
    ],
)
def test_every_rule_is_for_the_inside_of_an_output(text):
    heads = [line.partition(" {")[0] for line in styles.rules(text).splitlines()]
    selectors = [each for head in heads for each in head.split(", ")]
    assert all(re.fullmatch(r"\.nsan-output [\w.*#][\w.*#: ()]*", each) for each in selectors)
    assert all(line.count("{") == line.count("}") == 1 for line in styles.rules(text).splitlines())


def test_what_goes_ends_where_it_ends_even_if_it_is_nested():
    assert cleaned("a<object>b<object>c</object>d<br></object>e") == "ae"


def test_headings_get_a_name_each():
    anchors = cleaning.Anchors()
    made = cleaned(
        "<h2 onclick=f()>The <code>x</code> &amp; y</h2><h2>!</h2><h3>The x y</h3>", anchors
    )
    assert made.startswith('<h2 id="the-x-y">The <code>x</code> &amp; y</h2><h2 id="section">')
    assert [(each.level, each.text, each.id) for each in anchors.found] == [
        (2, "The x & y", "the-x-y"),
        (2, "!", "section"),
        (3, "The x y", "the-x-y-2"),
    ]
