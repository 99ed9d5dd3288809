"""Columns of any result for people: which to show, their headings, and values by their unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from nsan.tabular.text import Field, dash
from nsan.tabular.totals import share
from nsan.text import cause_word, direction_word
from nsan.units import format_address, format_bytes, format_count, format_rate, format_time

if TYPE_CHECKING:
    import polars as pl

    from nsan.analysis.result import Figure


def telling(columns: Iterable[Figure], found: pl.DataFrame) -> list[Figure]:
    """Leave out columns that say nothing here: all null, or one process and GPU throughout."""
    return [
        column
        for column in columns
        if found.height
        and found[column.name].null_count() < found.height
        and not (column.name in {"pid", "device_id"} and found[column.name].n_unique() == 1)
    ]


def zero_columns(columns: Iterable[Figure], found: pl.DataFrame) -> list[Figure]:
    """List the counts and sums that are 0 throughout: a line says so in less room."""
    return [
        column
        for column in columns
        if found.height
        and column.unit not in {"id", "ns", "label", "text", "flag", "number", "byte address"}
        and found[column.name].null_count() == 0
        and (found[column.name] == 0).all()
    ]


def plain(found: pl.DataFrame, addresses: Iterable[str]) -> list[dict[str, Any]]:
    """Give rows as plain values for JSON: addresses as hexadecimal text, what is no number as null.

    Parameters
    ----------
    found : DataFrame
        Rows.
    addresses : iterable of str
        Columns that hold addresses.

    Returns
    -------
    list of dict
        A dict for each row.
    """
    hexed, rows = list(addresses), found.to_dicts()
    for row in rows:
        for name in hexed:
            row[name] = format_address(row[name])
        for name, value in row.items():
            if isinstance(value, float) and value != value:  # noqa: PLR0124 (not a number)
                row[name] = None
    return rows


_WRITERS: Final[dict[str, Callable[[Any], str]]] = {
    "ns": format_time,
    "byte": format_bytes,
    "byte/s": format_rate,
    "byte seconds": lambda value: "-" if value is None else f"{format_bytes(int(value))} s",
    "fraction": share,
    "byte address": lambda va: dash(format_address(va)),
    "id": dash,
    "text": dash,
    "flag": lambda value: "-" if value is None else "yes" if value else "no",
    "number": lambda value: (
        "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
    ),
}


def _label(value: Any) -> str:
    return cause_word(direction_word(dash(value))).replace("_", " ").replace("va block", "VA block")


def _count(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else format_count(value)


def fields_of(columns: Sequence[Figure]) -> list[Field]:
    """Say how people see columns: their headings, and values by their unit.

    Of columns that would have one heading those of times say that they are.
    """
    headers = Counter(map(header_of, columns))
    return [
        replace(field, header=f"{field.header} time")
        if column.unit == "ns" and headers[field.header] > 1
        else field
        for column, field in zip(columns, map(_field_of, columns), strict=True)
    ]


def _field_of(column: Figure) -> Field:
    if column.unit in {"label", "text"}:
        write = _label if column.unit == "label" else dash
        return Field(column.name, header_of(column), write, right=False)
    return Field(column.name, header_of(column), _WRITERS.get(column.unit, _count))


_WORDS: Final = {
    "va": "address",
    "oom": "OOM",
    "gpu": "GPU",
    "cpu": "CPU",
    "device": "GPU",
    "api": "API",
}
_SUFFIXES: Final = {
    "_ns": "",
    "_bytes_per_s": " rate",
    "_fraction": " share",
    "_id": "",
    "_bytes": "",
}


def header_of(column: Figure) -> str:
    """Make a heading of a column's name: units stand with the values."""
    if column.name == "bytes_per_s":
        return "Rate"
    name = column.name
    for suffix, word in _SUFFIXES.items():
        if name.endswith(suffix):
            name = name.removesuffix(suffix) + word
            break
    if name.startswith("n_"):
        name = name.removeprefix("n_")
    if name == "va_block":
        return "VA block"
    words = [_WORDS.get(word, word) for word in name.replace("va_block", "VA_block").split("_")]
    text = " ".join(words)
    return text[0].upper() + text[1:] if text else column.name
