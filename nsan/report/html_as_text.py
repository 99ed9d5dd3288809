"""HTML of a notebook's own cells as plain text, for where no markup is wanted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Final

import tabulate

_BREAKS: Final = frozenset(
    (
        *("address", "blockquote", "br", "caption", "dd", "details", "div", "dl", "dt", "figure"),
        *("h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "section", "summary"),
        *("table", "tr", "ul"),
    )
)
_SPACE: Final = re.compile(r"\s+")


def text_of_html(markup: str) -> str:
    """Give the text of HTML.

    Parameters
    ----------
    markup : str
        HTML as :func:`nsan.report.cleaning.cleaned` leaves it.

    Returns
    -------
    str
        A line for each block; tables with aligned columns. Nothing of markup is left.

    Examples
    --------
    >>> print(text_of_html("<p>a <b>b</b></p><table><tr><td>1</td><td>x y</td></tr></table>"))
    a b
    1  x y
    """
    reader = _Reader()
    reader.feed(markup)
    reader.close()
    return reader.text()


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._lines: list[str] = []
        self._words: list[str] = []
        self._tables: list[list[list[str]]] = []
        self._hidden = self._kept = 0

    def text(self) -> str:
        """Return what was read."""
        self._break()
        while self._tables:
            self._end_table()
        return "\n".join(self._lines)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self._hidden += tag == "style"
        if tag in _BREAKS:
            self._break()
        self._kept += tag == "pre"
        if tag == "table":
            self._tables.append([])
        elif tag == "tr" and self._tables:
            self._tables[-1].append([])
        elif tag == "img" and (name := dict(attrs).get("alt")):
            self._words.append(name)

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag == "style"
        if tag in ("td", "th") and self._tables and self._tables[-1]:
            self._tables[-1][-1].append(self._said())
        elif tag in _BREAKS:
            self._break()
        self._kept -= tag == "pre"
        if tag == "table" and self._tables:
            self._end_table()

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._words.append(data if self._kept else _SPACE.sub(" ", data))

    def _said(self) -> str:
        """Take what was read since."""
        said = "".join(self._words)
        self._words.clear()
        return said.strip("\n") if self._kept else _SPACE.sub(" ", said).strip()

    def _break(self) -> None:
        """End a line; within a cell it is a space, for a cell has one line."""
        if self._tables and self._tables[-1]:
            self._words.append(" ")
        elif (said := self._said()).strip():
            self._lines.append(said)

    def _end_table(self) -> None:
        rows = [row for row in self._tables.pop() if row]
        self._words.clear()
        if rows:
            drawn = tabulate.tabulate(rows, tablefmt="plain", disable_numparse=True)
            self._lines.extend(line.rstrip() for line in drawn.split("\n"))
