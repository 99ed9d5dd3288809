"""What a section of a report is made of: values that know nothing of HTML, Markdown or a notebook.

Every text here is plain: whoever writes it out escapes it. Between backticks it is code; a name from a
trace goes through :func:`quoted` or :func:`nsan.text.shortened` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias

from nsan.text import shortened

Tone = Literal["plain", "note", "missing", "warning", "empty"]
"""How a text is meant: the story, small print, what to record, what to beware of, that a section says nothing."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str


@dataclass(frozen=True)
class Code:
    """Lines to be typed or put into a program, as they are."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """A line of a list.

    Attributes
    ----------
    label : str
        What it is about, in a word or two.
    text : str
        What is said.
    kind : str
        Kind of its figures; "recorded" is not shown.
    """

    label: str
    text: str
    kind: str = "recorded"


@dataclass(frozen=True)
class Points:
    """A list, one line each."""

    points: tuple[Point, ...]


@dataclass(frozen=True)
class Table:
    """A table: headings and cells as people see them.

    Attributes
    ----------
    heads : tuple of str
        Headings.
    rows : tuple of tuple of str
        Cells, as many in each row as there are headings.
    right : tuple of bool
        By column: set to the right, as figures are.
    title : str
        What one row is, or the question that the table answers.
    notes : tuple of str
        Small print under the table: what was left out, of which kind the figures are.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[bool, ...]
    title: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A chart.

    Attributes
    ----------
    name : str
        Name of the chart.
    title : str
        What it shows: for those who cannot see it.
    spec : mapping
        Its Vega-Lite specification, with its data.
    svg : str
        The same as a picture.
    """

    name: str
    title: str
    spec: Mapping[str, Any] = field(repr=False)
    svg: str = field(repr=False)


Block: TypeAlias = Text | Heading | Code | Points | Table | Picture

_TYPES: Final = {each.__name__: each for each in (Text, Heading, Code, Points, Table, Picture)}


def to_plain(blocks: Iterable[Block]) -> list[dict[str, Any]]:
    """Write blocks as plain containers, ready for JSON.

    Parameters
    ----------
    blocks : iterable of Block
        The blocks.

    Returns
    -------
    list of dict
        Each with its ``type``; :func:`from_plain` reads them.
    """
    return [{"type": type(each).__name__, **asdict(each)} for each in blocks]


def from_plain(found: Iterable[Mapping[str, Any]]) -> list[Block]:
    """Read back what :func:`to_plain` wrote.

    Parameters
    ----------
    found : iterable of mapping
        Plain containers.

    Returns
    -------
    list of Block
        The same blocks.
    """
    return [_read(dict(each)) for each in found]


def _read(each: dict[str, Any]) -> Block:
    kind = _TYPES[each.pop("type")]
    if kind is Points:
        return Points(tuple(Point(**point) for point in each["points"]))
    if kind is Code:
        return Code(tuple(each["lines"]))
    if kind is Table:
        each["rows"] = tuple(map(tuple, each["rows"]))
        each |= {key: tuple(each[key]) for key in ("heads", "right", "notes")}
    block: Block = kind(**each)
    return block


def quoted(name: object, most: int = 80) -> str:
    """Write a name from a trace as code within a text: harmless, short, and its backticks end nothing.

    Examples
    --------
    >>> quoted("add(int*)")
    '`add(int*)`'
    """
    return f"`{shortened(name, most).replace('`', chr(39))}`"
