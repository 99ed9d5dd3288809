"""Blocks as Markdown and as plain text, where a chart is named instead of drawn."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

import tabulate

from nsan.report.blocks import Block, Code, Heading, Picture, Point, Points, Table, Text
from nsan.tabular.text import name
from nsan.text import safe

_TONES: Final = {"plain": "", "note": "", "missing": "Not recorded. ", "warning": "Beware: "}


def markdown_of(blocks: Iterable[Block], *, picture: Callable[[Picture], str] | None = None) -> str:
    """Write blocks as Markdown.

    Parameters
    ----------
    blocks : iterable of Block
        The blocks.
    picture : callable, optional
        Writes a chart; by default its name and title.

    Returns
    -------
    str
        Markdown in which every text of a trace is escaped.
    """
    draw = picture or (lambda each: f"*Chart `{each.name}`: {_escaped(each.title)}*")
    return "\n\n".join(_markdown(each, draw) for each in blocks)


def text_of(blocks: Iterable[Block]) -> str:
    """Write blocks as plain text.

    Parameters
    ----------
    blocks : iterable of Block
        The blocks.

    Returns
    -------
    str
        Paragraphs and aligned tables; control characters are visible.
    """
    return "\n\n".join(_plain(each) for each in blocks)


def _escaped(text: str) -> str:
    """Escape for Markdown, but leave what stands between backticks to be code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one without its other half
        return name(text, markdown=True)
    return "".join(
        f"`{safe(part)}`" if place % 2 else name(part, markdown=True)
        for place, part in enumerate(parts)
    )


def _markdown(block: Block, draw: Callable[[Picture], str]) -> str:
    match block:
        case Text():
            return _escaped(block.text)
        case Heading():
            return f"### {_escaped(block.text)}"
        case Code():
            return _fenced(block)
        case Points():
            return "\n".join(
                f"- {_point(point, bold='**', write=_escaped)}" for point in block.points
            )
        case Table():
            return _table(block, markdown=True)
        case Picture():
            return draw(block)


def _fenced(block: Code) -> str:
    """Fence lines of code with more backticks than any of them has in a row."""
    lines = [safe(line) for line in block.lines]
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(longest + 1, 3)
    return "\n".join([fence, *lines, fence])


def _plain(block: Block) -> str:
    match block:
        case Text():
            return safe(block.text)
        case Heading():
            return safe(block.text)
        case Code():
            return "\n".join(f"    {safe(line)}" for line in block.lines)
        case Points():
            return "\n".join(f"- {_point(point, bold='', write=safe)}" for point in block.points)
        case Table():
            return _table(block, markdown=False)
        case Picture():
            return f"[chart {block.name}: {safe(block.title)}]"


def _point(point: Point, *, bold: str, write: Callable[[str], str]) -> str:
    label = f"{bold}{write(point.label)}{bold} " if point.label else ""
    kind = "" if point.kind == "recorded" else f" ({point.kind})"
    return f"{label}{write(point.text)}{kind}"


def _table(block: Table, *, markdown: bool) -> str:
    write = _escaped if markdown else safe
    tabulate.MIN_PADDING = 0
    text = tabulate.tabulate(
        [[name(cell, markdown=markdown) for cell in row] for row in block.rows],
        headers=[name(head, markdown=markdown) for head in block.heads],
        tablefmt="pipe" if markdown else "simple",
        colalign=["right" if right else "left" for right in block.right] if block.rows else None,
        disable_numparse=True,
        preserve_whitespace=True,
    )
    parts = [write(block.title)] if block.title else []
    return "\n\n".join([*parts, text, *map(write, block.notes)])
