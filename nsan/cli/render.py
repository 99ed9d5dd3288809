"""Rows as text: aligned tables, Markdown, CSV, JSON. Names from a trace are hostile text."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Row = Mapping[str, Any]

_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_COLOURS: Final = {"fail": "31", "warn": "33", "unknown": "36", "ok": "32"}


@dataclass(frozen=True)
class Field:
    """A column of a table for people: the key of the row, its header, how a value is written."""

    key: str
    header: str
    write: Callable[[Any], str]
    right: bool = True


def safe(text: object) -> str:
    r"""Make text harmless in a terminal: control and direction characters become visible.

    Examples
    --------
    >>> print(safe("add\x1b[31m"))
    add\x1b[31m
    """
    return _UNSAFE.sub(lambda found: f"\\x{ord(found[0]):02x}", str(text))


def word(value: object) -> str:
    """Write a label or an id; a missing one is ``unknown``."""
    return "unknown" if value is None else safe(value)


def table(rows: Sequence[Row], fields: Sequence[Field], *, markdown: bool = False) -> str:
    """Write rows as an aligned table, or as Markdown."""
    import tabulate

    tabulate.MIN_PADDING = 0
    cells = [
        [_cell(field.write(row[field.key]), markdown=markdown) for field in fields] for row in rows
    ]
    return tabulate.tabulate(
        cells,
        headers=[field.header for field in fields],
        tablefmt="pipe" if markdown else "simple",
        colalign=["right" if field.right else "left" for field in fields] if cells else None,
        disable_numparse=True,
        preserve_whitespace=True,
    )


def _cell(text: str, *, markdown: bool) -> str:
    # Markdown renders HTML and splits cells at bars.
    if not markdown:
        return text
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def csv_text(rows: Iterable[Row], columns: Sequence[str]) -> str:
    """Write rows as CSV: raw values, empty for null."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _formula_safe(row[key]) for key in columns} for row in rows)
    return out.getvalue()


def _formula_safe(value: Any) -> Any:
    # A spreadsheet runs text that begins like a formula.
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value


def json_text(value: Any) -> str:
    """Write a document as JSON; null is null, never an empty text."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def flat(value: Any, prefix: str = "") -> list[dict[str, Any]]:
    """Flatten a document to ``key``, ``value`` rows; lists of rows are left to their own tables.

    Examples
    --------
    >>> flat({"a": {"b": 1}, "c": None})
    [{'key': 'a.b', 'value': 1}, {'key': 'c', 'value': None}]
    """
    rows = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            rows += flat(item, f"{prefix}{key}.")
        elif not isinstance(item, list):
            rows.append({"key": f"{prefix}{key}", "value": item})
    return rows


def coloured(status: str) -> str:
    """Write a status, in colour where a person is likely to see it."""
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return status if plain or status not in _COLOURS else f"\x1b[{_COLOURS[status]}m{status}\x1b[0m"


def indented(text: str, by: str = "  ") -> str:
    """Indent every line."""
    return "\n".join(by + line if line else line for line in text.splitlines())
