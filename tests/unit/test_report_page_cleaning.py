"""HTML of a notebook's own cells keeps its place in the page, and leads nowhere by itself."""

from __future__ import annotations

import pytest

cleaning = pytest.importorskip("nsan.report.cleaning", reason="pip install 'nsan[report]'")
cleaned = cleaning.cleaned


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
            '<p style="color:red;background:">x</p>',
        ),
        (
            "<style>@import 'https://x/a.css'; p{background:url(data:image/png;base64,AA)}</style>",
            "<style> p{background:url(data:image/png;base64,AA)}</style>",
        ),
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
    text = "<svg><style>a{}<img src=x onerror=alert(1)></style></svg>"
    assert cleaned(text) == "<svg><style>a{}\\3c img src=x onerror=alert(1)></style></svg>"


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
