"""The page of a report: an executed notebook as one HTML file that is complete without a network."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.charts.saving import EMBED_OPTIONS, bundle
from nsan.offline import packed, script_hash
from nsan.report.as_html import inline
from nsan.report.blocks import Picture
from nsan.report.cells import Code, Markup, Part, parts_of
from nsan.report.cleaning import Anchor, Anchors
from nsan.report.fitting import Form, fitted, size_of
from nsan.text import safe, shortened

if TYPE_CHECKING:
    from nbformat import NotebookNode

MOST_BYTES: Final = 3_000_000
"""A page stays below this, but for what cells of a notebook show that are not nsan's."""

_PAGE: Final = """\
<!doctype html>
<html lang="en" data-theme="{theme}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="{theme}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{contents}<main>
{body}
<footer><p>Made with nsan. This page is complete: it loads nothing from anywhere.</p></footer>
</main>
{scripts}</body>
</html>
"""

_POLICY: Final = (
    "default-src 'none'; {scripts}style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)

_LONGEST_ENTRY: Final = 80
"""Letters of a heading in the contents."""

_STILL_NOTE: Final = (
    "A picture only: with its data, this page would have more than 3 MB. "
    "`nsan export {name} TRACE -o {name}.html` writes the chart with its data."
)


def page_of(
    notebook: NotebookNode,
    *,
    title: str,
    theme: str = "light",
    code: bool = False,
    live: bool = True,
) -> str:
    """Write an executed notebook as a page.

    Parameters
    ----------
    notebook : NotebookNode
        The notebook, with its outputs. Those of nsan are written from their blocks, and their charts
        are drawn by a script; others are shown in a form that needs no script: pictures, tables, text.
        Scripts of theirs do not run, for the policy of the page allows none but its own; widgets, and
        charts of libraries that draw with scripts, show what still form they have. Formulas stay text.
    title : str
        Title of the window, and of the page if the notebook has none.
    theme : {"light", "dark"}, default "light"
        The ground: that of the charts.
    code : bool, default False
        Also show the cells of code, folded.
    live : bool, default True
        Whether charts are drawn by a script; if not, they are pictures, and the page has no script.

    Returns
    -------
    str
        HTML that asks nobody for anything; the same for the same notebook. What nsan wrote in it has
        less than :data:`MOST_BYTES`: where charts are too many or too large, the largest become pixels,
        then the largest are pictures only, with a note. What other cells show is never dropped.
    """
    anchors = Anchors()
    folded: Code = "folded" if live else "open"
    parts = parts_of(notebook, anchors, code=folded if code else "left out")
    if not any(each.level == 1 for each in anchors.found):
        parts = [Markup(f"<h1>{inline(shortened(title, 200))}</h1>"), *parts]
    pictures = [each for each in parts if isinstance(each, Picture)]
    frame = _Frame(title, theme, _contents(anchors.found), is_live=live, has_charts=bool(pictures))
    own = (each.text for each in parts if isinstance(each, Markup) and each.is_own)
    written = sum(len(each.encode()) + 1 for each in own)
    room = MOST_BYTES - len(frame.around("", []).encode()) - written
    forms = fitted(pictures, room, live=live)
    return frame.around("\n".join(_body(parts, forms, is_live=live)), forms)


@dataclass(frozen=True)
class _Frame:
    """What stands around the parts of a page."""

    title: str
    theme: str
    contents: str
    is_live: bool
    has_charts: bool

    def around(self, body: str, forms: Sequence[Form]) -> str:
        style, script = _sources()
        draws = self.is_live and self.has_charts
        hashes = [script_hash(script), *([script_hash(bundle())] if draws else [])]
        data = {"bundle": _packed_bundle(), "specs": _specs(forms)} if draws else None
        return _PAGE.format(
            theme="dark" if self.theme == "dark" else "light",
            policy=_POLICY.format(
                scripts=f"script-src {' '.join(hashes)}; " if self.is_live else ""
            ),
            title=html.escape(shortened(self.title, 200)),
            style=style,
            contents=self.contents,
            body=body,
            scripts=_scripts(data, script) if self.is_live else "",
        )


def _scripts(data: dict[str, Any] | None, script: str) -> str:
    # Base64 and digits: nothing in it could end its element.
    held = f'<script type="application/json">{json.dumps(data)}</script>\n' if data else ""
    return f'{held}<script type="module">{script}</script>\n'


def _specs(forms: Sequence[Form]) -> dict[int, str]:
    return {number: form.spec for number, form in enumerate(forms) if form.is_live}


def _body(parts: Iterable[Part], forms: Sequence[Form], *, is_live: bool) -> Iterator[str]:
    """Write the parts in their order, each chart in its form."""
    numbered = enumerate(forms)
    for part in parts:
        yield part.text if isinstance(part, Markup) else _figure(*next(numbered), is_live=is_live)


def _figure(number: int, form: Form, *, is_live: bool) -> str:
    """Write a chart: the picture, in whose place the script puts what it draws."""
    picture = form.picture
    width, height = size_of(picture.svg)
    size = f' width="{width}" height="{height}"' * bool(width)
    note = ""
    if is_live and not form.is_live:
        text = inline(_STILL_NOTE.format(name=picture.name))
        note = f'\n<figcaption class="nsan-note">{text}</figcaption>'
    alt = html.escape(safe(picture.title), quote=True)
    return (
        f'<figure class="nsan-chart" data-chart="{number}">'
        f'<img alt="{alt}"{size} src="{form.image}">{note}</figure>'
    )


def _contents(anchors: Iterable[Anchor]) -> str:
    """Write the contents twice: beside the text where there is room, folded above it where not."""
    lines = [
        f'<li><a href="#{each.id}">{inline(shortened(each.text, _LONGEST_ENTRY))}</a></li>'
        for each in anchors
        if each.level == 2
    ]
    if not lines:
        return ""
    entries = f"<ol>{''.join(lines)}</ol>"
    return (
        f'<nav class="nsan-beside" aria-label="Contents"><p>Contents</p>{entries}</nav>\n'
        f'<nav class="nsan-above" aria-label="Contents"><details><summary>Contents</summary>{entries}'
        "</details></nav>\n"
    )


@cache
def _sources() -> tuple[str, str]:
    """Read the style and the script of a page."""
    style, script = (
        (Path(__file__).with_name(f"page.{kind}")).read_text(encoding="utf-8")
        for kind in ("css", "js")
    )
    return style, script.replace("OPTIONS", EMBED_OPTIONS)


@cache
def _packed_bundle() -> str:
    return packed(bundle().encode())
