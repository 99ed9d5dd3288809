"""Rows as text: aligned tables, Markdown, CSV, JSON. Names from a trace are hostile text."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nsan.text import safe

Row = Mapping[str, Any]

_COLUMN_GAP: Final = 2

_FORMULA: Final = re.compile(r"[=+@\t\r]|-(?!-)")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_MARKDOWN: Final = re.compile(r"[\\`*_\[\]|!~#]")


@dataclass(frozen=True)
class Field:
    """A column of a table for people: the key of the row, its header, how a value is written."""

    key: str
    header: str
    write: Callable[[Any], str]
    right: bool = True


def name(text: object, *, markdown: bool) -> str:
    r"""Write a name from a trace for people: harmless, and without markup in Markdown.

    Examples
    --------
    >>> print(name("a|b <img>", markdown=True))
    a\|b &lt;img>
    """
    plain = safe(text)
    if not markdown:
        return plain
    # Markdown renders HTML, and loads what an image names.
    html = plain.replace("&", "&amp;").replace("<", "&lt;")
    return _MARKDOWN.sub(lambda found: "\\" + found[0], html)


def dash(value: object) -> str:
    """Write a label or an id; one that does not apply is a dash."""
    return "-" if value is None else safe(value)


def word(value: object) -> str:
    """Write a label or an id; a missing one is ``unknown``."""
    return "unknown" if value is None else safe(value)


def table(rows: Sequence[Row], fields: Sequence[Field], *, markdown: bool = False) -> str:
    """Write rows as an aligned table, or as Markdown."""
    import tabulate

    tabulate.MIN_PADDING = 0
    cells = [
        [name(field.write(row[field.key]), markdown=markdown) for field in fields] for row in rows
    ]
    return tabulate.tabulate(
        cells,
        headers=[field.header for field in fields],
        tablefmt="pipe" if markdown else "simple",
        colalign=["right" if field.right else "left" for field in fields] if cells else None,
        disable_numparse=True,
        preserve_whitespace=True,
    )


def hidden_fields(rows: Sequence[Row], fields: Sequence[Field], room: int) -> list[Field]:
    """Find the columns, from the right, that do not fit into lines of so many characters.

    Parameters
    ----------
    rows : sequence of mapping
        The rows that are shown.
    fields : sequence of Field
        All columns.
    room : int
        Characters of a line.

    Returns
    -------
    list of Field
        Those to leave out.
    """
    used, hidden = 0, []
    for field in fields:
        width = max([len(field.header), *(len(field.write(row[field.key])) for row in rows)])
        used += width + _COLUMN_GAP
        if used - _COLUMN_GAP > room:
            hidden.append(field)
    return hidden


def csv_text(rows: Iterable[Row], columns: Sequence[str]) -> str:
    """Write rows as CSV: values as they are, empty for null; of control characters only those that break lines."""
    rows = list(rows)
    returns = any(isinstance(row[key], str) and "\r" in row[key] for row in rows for key in columns)
    return "".join(csv_pieces([rows], columns, returns=returns))


def csv_pieces(
    slices: Iterable[Iterable[Row]], columns: Sequence[str], *, returns: bool
) -> Iterator[str]:
    """Write many rows as :func:`csv_text` does, some at a time.

    Parameters
    ----------
    slices : iterable of iterable of mapping
        The rows, in slices.
    columns : sequence of str
        Keys of the rows.
    returns : bool
        A cell holds a carriage return. It ends a row for most readers, and is not quoted by itself: then all
        cells are.

    Yields
    ------
    str
        The header, and whole lines of each slice.
    """
    quoted = csv.QUOTE_ALL if returns else csv.QUOTE_MINIMAL
    yield _csv_lines([columns], quoted)
    for rows in slices:
        yield _csv_lines(([_csv_cell(row[key]) for key in columns] for row in rows), quoted)


def _csv_lines(cells: Iterable[Sequence[Any]], quoted: int) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n", quoting=quoted).writerows(cells)  # type: ignore[arg-type]
    return out.getvalue()


def _csv_cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    # CSV goes to terminals, too, and a spreadsheet runs text that begins like a formula.
    text = _CONTROL.sub(lambda found: safe(found[0]), value)
    return f"'{text}" if _FORMULA.match(text) else text


def json_text(value: Any) -> str:
    """Write a document as JSON; null is null, never an empty text."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def json_pieces(document: Row, slices: Iterable[Sequence[Row]]) -> Iterator[str]:
    """Write a document and, as its last key ``rows``, many rows, some at a time.

    Parameters
    ----------
    document : mapping
        All but the rows.
    slices : iterable of sequence of mapping
        The rows, in slices.

    Yields
    ------
    str
        Joined they are what :func:`json_text` gives of the whole, which may take gigabytes.
    """
    yield json_text({**document, "rows": []}).removesuffix("]\n}\n")
    between = ""
    for rows in slices:
        if rows:
            text = json_text(list(rows)).removeprefix("[").removesuffix("\n]\n")
            yield between + text.replace("\n", "\n  ")
            between = ","
    yield "\n  ]\n}\n" if between else "]\n}\n"


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


def indented(text: str, by: str = "  ") -> str:
    """Indent every line."""
    return "\n".join(by + line if line else line for line in text.splitlines())
