"""HTML of a notebook's own cells, so that it stays within its place in a page.

What a cell of somebody's notebook shows may be anything. Scripts do not run in a report, by the policy of
the page; here goes what a policy does not hold back: what leads away by itself, what asks a network, what
hides or covers the rest, what is not closed. Only known elements and attributes stay, with their text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Final

from nsan.report.foreign_style import declarations, rules

_VOID: Final = frozenset(("br", "hr", "img", "wbr", "col"))
_SHAPES: Final = frozenset(
    (
        *("svg", "g", "defs", "clippath", "lineargradient", "radialgradient", "stop", "path"),
        *("rect", "circle", "ellipse", "line", "polyline", "polygon", "text", "tspan"),
    )
)
_TEXTS: Final = frozenset(
    (
        *("a", "abbr", "b", "blockquote", "caption", "cite", "code", "colgroup", "dd", "del"),
        *("details", "div", "dl", "dt", "em", "figcaption", "figure", "h1", "h2", "h3", "h4"),
        *("h5", "h6", "i", "ins", "kbd", "li", "mark", "ol", "p", "pre", "q", "s", "samp"),
        *("section", "small", "span", "strong", "style", "sub", "summary", "sup", "table"),
        *("tbody", "td", "tfoot", "th", "thead", "tr", "u", "ul", "var"),
    )
)
_TAGS: Final = _VOID | _SHAPES | _TEXTS
_WITH_TEXT: Final = frozenset(
    (
        *("script", "template", "iframe", "object", "embed", "applet", "noembed", "noframes"),
        *("title", "textarea", "select", "xmp", "math"),
    )
)
"""Elements that go with all that stands in them; of other unknown ones the text stays."""

_ATTRIBUTES: Final = frozenset(
    (
        *("align", "alt", "class", "colspan", "dir", "height", "id", "lang", "open", "role"),
        *("rowspan", "scope", "start", "style", "title", "valign", "width", "cx", "cy", "d"),
        *("dx", "dy", "fill", "fill-opacity", "fill-rule", "font-family", "font-size"),
        *("font-style", "font-weight", "gradienttransform", "gradientunits", "offset"),
        *("opacity", "points", "preserveaspectratio", "r", "rx", "ry", "stop-color"),
        *("stop-opacity", "stroke", "stroke-dasharray", "stroke-linecap", "stroke-linejoin"),
        *("stroke-opacity", "stroke-width", "text-anchor", "transform", "viewbox", "x", "x1"),
        *("x2", "y", "y1", "y2"),
    )
)
_LINK: Final = re.compile(r"(?:https?://|mailto:|#)", re.IGNORECASE)
_PICTURE: Final = re.compile(r"data:image/(?:png|jpeg|gif|webp|svg\+xml)[;,]", re.IGNORECASE)
_LOOKS: Final = frozenset(("class", "style"))
_HEADING: Final = re.compile(r"h[1-6]")


@dataclass(frozen=True)
class Anchor:
    """A heading that one can go to."""

    level: int
    text: str
    id: str


class Anchors:
    """Names for the headings of a page, each once."""

    def __init__(self) -> None:
        self.found: list[Anchor] = []
        self._taken: set[str] = set()

    def add(self, level: int, text: str) -> str:
        """Name a heading.

        Parameters
        ----------
        level : int
            1 for the title.
        text : str
            Its text.

        Returns
        -------
        str
            A name that no other has: letters, digits and hyphens.
        """
        stem = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-") or "section"
        name, number = stem, 2
        while name in self._taken:
            name, number = f"{stem}-{number}", number + 1
        self._taken.add(name)
        self.found.append(Anchor(level, text, name))
        return name


def cleaned(markup: str, anchors: Anchors | None = None) -> str:
    """Keep of HTML what shows something, and close what is open.

    Parameters
    ----------
    markup : str
        HTML of a cell.
    anchors : Anchors, optional
        Where headings are named; else they keep what they have.

    Returns
    -------
    str
        HTML without scripts, forms, frames and addresses that a page would ask.

    Examples
    --------
    >>> cleaned("<b onclick='f()'>a<script>f()</script> & b")
    '<b>a &amp; b</b>'
    """
    reader = _Cleaner(anchors)
    reader.feed(markup)
    reader.close()
    return reader.text()


class _Cleaner(HTMLParser):
    def __init__(self, anchors: Anchors | None) -> None:
        super().__init__(convert_charrefs=True)
        self._anchors = anchors
        self._out: list[str] = []
        self._open: list[str] = []
        self._gone: list[str] = []
        self._heading: tuple[int, int] | None = None

    def text(self) -> str:
        """Return what stays."""
        while self._open:
            self._close(self._open[-1])
        return "".join(self._out)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        if self._gone or tag in _WITH_TEXT:
            if tag not in _VOID and (not self._gone or tag == self._gone[-1]):
                self._gone.append(tag)
            return
        if tag not in _TAGS:
            return
        if tag == "img":
            self._picture(dict(attrs))
            return
        self._out.append(f"<{tag}{self._kept(tag, attrs)}>")
        if tag in _VOID:
            return
        self._open.append(tag)
        if self._anchors is not None and self._heading is None and _HEADING.fullmatch(tag):
            self._heading = (len(self._out), int(tag[1]))

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        # In HTML the slash means nothing; in SVG it closes.
        self.handle_starttag(tag, attrs)
        if tag in _SHAPES or tag in _WITH_TEXT:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._gone:
            if tag == self._gone[-1]:
                self._gone.pop()
            return
        if tag in self._open:
            while self._open[-1] != tag:
                self._close(self._open[-1])
            self._close(tag)

    def handle_data(self, data: str) -> None:
        if self._gone:
            return
        if self._open and self._open[-1] == "style":
            self._out.append(rules(data))
        else:
            self._out.append(html.escape(data, quote=False))

    def _close(self, tag: str) -> None:
        self._open.pop()
        if self._heading and _HEADING.fullmatch(tag) and self._anchors is not None:
            at, level = self._heading
            said = html.unescape(re.sub(r"<[^>]*>", "", "".join(self._out[at:]))).strip()
            self._out[at - 1] = f'<h{level} id="{self._anchors.add(level, said)}">'
            self._heading = None
        self._out.append(f"</{tag}>")

    def _kept(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> str:
        said = [(key, _within(key, value or "")) for key, value in attrs if key in _ATTRIBUTES]
        kept = [
            f' {key}="{html.escape(value, quote=True)}"'
            for key, value in said
            if value or key not in _LOOKS
        ]
        address = dict(attrs).get("href") if tag == "a" else None
        if address and _LINK.match(address):
            kept.append(f' href="{html.escape(address, quote=True)}" rel="noopener noreferrer"')
        return "".join(kept)

    def _picture(self, given: dict[str, str | None]) -> None:
        """Keep a picture that is here; of one that lies elsewhere its name."""
        address = given.get("src") or ""
        if _PICTURE.match(address):
            kept = self._kept("img", [*given.items()])
            self._out.append(f'<img src="{html.escape(address, quote=True)}"{kept}>')
        elif given.get("alt"):
            self._out.append(f"<em>[{html.escape(str(given['alt']), quote=False)}]</em>")


def _within(key: str, value: str) -> str:
    """Keep of how something looks what does not reach beyond it; the names of nsan's own parts are nsan's."""
    if key == "style":
        return declarations(value)
    if key == "class":
        return " ".join(each for each in value.split() if not each.lower().startswith("nsan-"))
    return value
