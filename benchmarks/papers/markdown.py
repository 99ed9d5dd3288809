"""Tables of Markdown in which every figure says of which kind it is (design.md 5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nsan.units import MIB


@dataclass(frozen=True)
class Column:
    """One column of a printed table.

    ``kind`` is recorded, derived, reconstructed or modelled; None for what names the row.
    """

    key: str
    title: str
    show: Callable[[Any], str] = str
    kind: str | None = None


def table(rows, columns):
    """Write rows of dictionaries; the line under the titles says the kind of each column."""
    lines = [
        _line(column.title for column in columns),
        _line("---" if column.kind is None else "---:" for column in columns),
    ]
    if any(column.kind for column in columns):
        lines.append(_line(f"*{column.kind}*" if column.kind else "" for column in columns))
    lines += [_line(_cell(row, column) for column in columns) for row in rows]
    return "\n".join(lines)


def _line(cells):
    return "| " + " | ".join(cells) + " |"


def _cell(row, column):
    value = row.get(column.key)
    shown = "-" if value is None else column.show(value)
    return shown.replace("|", "\\|").replace("\n", " ")


def mib(n_bytes):
    """Write bytes in MiB: the same unit all over a table, so that columns compare."""
    return f"{n_bytes / MIB:,.0f}".replace(",", " ")


def ms(ns):
    """Write nanoseconds in milliseconds."""
    return f"{ns / 1e6:,.1f}".replace(",", " ")


def percent(fraction):
    """Write a share."""
    return f"{100 * fraction:.1f} %"


def points(fraction):
    """Write a difference of two shares."""
    return f"{100 * fraction:+.1f}"


def ratio(number):
    """Write how many times."""
    return f"{number:.2f}"


def number(value):
    """Write a count or a factor."""
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}".replace(",", " ")


def spread(values, show):
    """Write the least and the most of some values; once if they look alike."""
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"


def listed(words):
    """Join words as a sentence does."""
    words = [str(word) for word in words]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
