"""Blocks as HTML that needs no script: for a notebook, and what a page shows before its script has run."""

from __future__ import annotations

import html
import re
from base64 import b64encode
from collections.abc import Callable, Iterable
from typing import Final

from nsan.report.blocks import Block, Code, Heading, Picture, Points, Table, Text
from nsan.text import safe

_CODE: Final = re.compile(r"`([^`]*)`")
_ONE_LINE: Final = {"right": ";white-space:nowrap", "left": ""}
"""A number and its unit stay together."""


def html_of(blocks: Iterable[Block], *, picture: Callable[[Picture], str] | None = None) -> str:
    """Write blocks as HTML.

    Parameters
    ----------
    blocks : iterable of Block
        The blocks.
    picture : callable, optional
        Writes a chart; by default its picture, as a data URI.

    Returns
    -------
    str
        HTML in which every text of a trace is escaped.
    """
    draw = picture or drawn
    return "\n".join(
        ["<div class='nsan-report'>", *(_block(each, draw) for each in blocks), "</div>"]
    )


def _block(block: Block, draw: Callable[[Picture], str]) -> str:
    match block:
        case Text():
            return f"<p class='nsan-{block.tone}'>{inline(block.text)}</p>"
        case Heading():
            return f"<h3>{inline(block.text)}</h3>"
        case Code():
            return f"<pre class='nsan-code'><code>{_lines(block)}</code></pre>"
        case Points():
            return _points(block)
        case Table():
            return _table(block)
        case Picture():
            return draw(block)


def inline(text: str) -> str:
    """Escape a text; what stands between backticks becomes code.

    Examples
    --------
    >>> inline("a <b> of `x<y>`")
    'a &lt;b&gt; of <code>x&lt;y&gt;</code>'
    """
    return _CODE.sub(r"<code>\1</code>", html.escape(safe(text), quote=True))


def _lines(block: Code) -> str:
    return html.escape("\n".join(map(safe, block.lines)), quote=True)


def _points(block: Points) -> str:
    lines = []
    for point in block.points:
        label = f"<strong>{inline(point.label)}</strong> " if point.label else ""
        lines.append(f"<li>{label}{inline(point.text)}{_kind(point.kind)}</li>")
    return f"<ul class='nsan-points'>{''.join(lines)}</ul>"


def _kind(kind: str) -> str:
    return (
        "" if kind == "recorded" else f" <span class='nsan-kind'>{html.escape(safe(kind))}</span>"
    )


def _table(block: Table) -> str:
    sides = ["right" if right else "left" for right in block.right]
    heads = "".join(
        f"<th style='text-align:{side}'>{inline(head)}</th>"
        for head, side in zip(block.heads, sides, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td style='text-align:{side}{_ONE_LINE[side]}'>{html.escape(safe(cell), quote=True)}</td>"
            for cell, side in zip(row, sides, strict=True)
        )
        + "</tr>"
        for row in block.rows
    )
    title = f"<p class='nsan-title'>{inline(block.title)}</p>" if block.title else ""
    notes = "".join(f"<p class='nsan-note'>{inline(note)}</p>" for note in block.notes)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    return f"{title}<div class='nsan-table'>{table}</div>{notes}"


def drawn(picture: Picture) -> str:
    """Write a chart as its picture, a data URI: nothing in it can run."""
    data = b64encode(picture.svg.encode()).decode()
    alt = html.escape(safe(picture.title), quote=True)
    return f"<p class='nsan-picture'><img alt='{alt}' src='data:image/svg+xml;base64,{data}'></p>"
