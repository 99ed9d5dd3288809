"""Tables of a trace as a folder of Parquet or CSV files, for other programs: one file per table, and what it means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import polars as pl

import nsan
from nsan.analysis.catalog import find as find_analysis
from nsan.errors import UnknownNameError
from nsan.info import MODEL_KIND, MODELLED
from nsan.schema import TABLES, Column, Table
from nsan.text import shortened

if TYPE_CHECKING:
    from nsan.asking import Asked

INDEX: Final = "tables.json"
"""What every such folder has: it names the other files."""

_README: Final = "README.md"

FOLDER_SCHEMA: Final = 1
"""Raise it when the keys of :data:`INDEX` change."""

_COUNTED: Final = frozenset({"depth", "parent", "range_id"})
"""Columns of tables that nsan worked out when it imported the trace."""

_CONTEXT: Final = ("devices", "processes", "diagnostics")
"""Tables that no filter of time empties."""

_FORMULA: Final = r"^([=+@\t\r]|-([^-]|$))"
"""Text that a spreadsheet would run; as :func:`nsan.tabular.text.csv_text` has it."""

Format = Literal["parquet", "csv"]


@dataclass(frozen=True)
class _File:
    """One file: its table, its rows, and the kind of each column."""

    table: Table
    rows: pl.LazyFrame
    n_rows: int
    kinds: dict[str, str]
    question: str = ""


@dataclass(frozen=True)
class Choice:
    """What a folder is to hold.

    Attributes
    ----------
    format : {"parquet", "csv"}
        Format of the files.
    tables : sequence of str or None
        Names of tables of the trace; None: those that have rows.
    analyses : sequence of str
        Names of analyses.
    """

    format: Format
    tables: Sequence[str] | None = None
    analyses: Sequence[str] = ()


def check_choice(choice: Choice) -> None:
    """Refuse a table or an analysis that does not exist.

    Parameters
    ----------
    choice : Choice
        What a folder is to hold.

    Raises
    ------
    UsageError
        If there is no such name; the message lists those there are.
    """
    for name in choice.tables or ():
        if name not in TABLES:
            raise UnknownNameError("table", name, TABLES)
    for name in choice.analyses:
        find_analysis(name)


def foreign_files(folder: Path) -> list[str]:
    """Name what is in a folder that no export of tables put there.

    Parameters
    ----------
    folder : Path
        It exists.

    Returns
    -------
    list of str
        Sorted; empty of an export of tables, and of an empty folder.
    """
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        is_ours = str(index["written_by"]).startswith("nsan ") and "schema" in index
        own = {INDEX, _README, *(each["file"] for each in index["tables"])} if is_ours else set()
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        own = set()
    return sorted(
        each.name
        for each in folder.iterdir()
        if each.name not in own or each.is_symlink() or not each.is_file()
    )


def write_tables(asked: Asked, folder: Path, choice: Choice) -> int:
    """Write tables of a trace into a folder.

    Parameters
    ----------
    asked : Asked
        The trace, as filtered, and perhaps a memory snapshot.
    folder : Path
        Where to; it exists and is empty.
    choice : Choice
        What to write.

    Returns
    -------
    int
        Rows of all of them; without those of context that nobody asked for by name.
    """
    names = TABLES if choice.tables is None else choice.tables
    files = [_of_table(asked, name) for name in names]
    if choice.tables is None:
        files = [each for each in files if each.n_rows]
    files += [_of_analysis(asked, name) for name in choice.analyses]
    for each in files:
        _write(each, folder / f"{each.table.name}.{choice.format}", choice.format)
    index = _index(asked, choice, files)
    text = json.dumps(index, indent=1, allow_nan=False, ensure_ascii=False)
    (folder / INDEX).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    (folder / _README).write_text(_readme(index, choice.format), encoding="utf-8")
    context = _CONTEXT if choice.tables is None else ()
    return sum(each.n_rows for each in files if each.table.name not in context)


def _of_table(asked: Asked, name: str) -> _File:
    rows = asked.events(name)
    n_rows = rows.select(pl.len()).collect().item()
    is_modelled = asked.trace.info.kind == MODEL_KIND
    kinds = {
        column: "modelled" if is_modelled else "derived" if column in _COUNTED else "recorded"
        for column in TABLES[name].schema
    }
    return _File(TABLES[name], rows, n_rows, kinds)


def _of_analysis(asked: Asked, name: str) -> _File:
    analysis = find_analysis(name)
    found = asked.frame(analysis.name)
    kinds = asked.kinds(analysis.name, found)
    return _File(analysis.result, found.lazy(), found.height, kinds, analysis.question)


def _write(file: _File, path: Path, kind: Format) -> None:
    if kind == "csv":
        plain = file.rows.select(_plain(column) for column in file.table.columns)
        plain.sink_csv(path, quote_style="necessary")
        return
    facts = {f"nsan.kind.{name}": kind for name, kind in file.kinds.items()}
    file.rows.sink_parquet(path, metadata=facts)


def _plain(column: Column) -> pl.Expr:
    """Write a column as CSV has it: addresses as hexadecimal text, sizes of three as ``x y z``."""
    value, dtype = pl.col(column.name), column.dtype
    if column.unit == "byte address":
        return value.map_batches(_hexadecimal, return_dtype=pl.String, is_elementwise=True)
    if isinstance(dtype, pl.Array | pl.List):
        return value.cast(pl.List(pl.String)).list.join(" ")
    if isinstance(dtype, pl.Enum):
        return value.cast(pl.String)
    if dtype == pl.Float64:
        return value.fill_nan(None)
    if dtype == pl.String:
        marked = pl.when(value.str.contains(_FORMULA)).then("'" + value).otherwise(value)
        return marked.alias(column.name)
    return value


def _hexadecimal(values: pl.Series) -> pl.Series:
    """Write addresses as :func:`nsan.units.format_address` does, all at once."""
    raw = values.fill_null(0).to_numpy().astype(">u8").tobytes().hex().encode()
    texts = pl.Series(values.name, np.frombuffer(raw, "S16").astype("U16"), dtype=pl.String)
    return ("0x" + texts).set(values.is_null(), None)


def _index(asked: Asked, choice: Choice, files: Sequence[_File]) -> dict[str, Any]:
    """Say what is in the folder; of the capture only what names no person and no machine."""
    info = asked.trace.info
    return {
        "schema": FOLDER_SCHEMA,
        "written_by": f"nsan {nsan.__version__}",
        "source": shortened(info.source, 200),
        "source_kind": info.kind,
        "note": f"Everything here was {MODELLED}." if info.kind == MODEL_KIND else None,
        "times": "ns from the session start; intervals are half-open",
        "filters": dict(asked.filters),
        "windows_ns": asked.trace.windows,
        "capture": {
            kind: {"answer": found.answer, "reason": found.reason}
            for kind, found in info.capture.items()
        },
        "tables": [
            {
                "name": each.table.name,
                "file": f"{each.table.name}.{choice.format}",
                "n_rows": each.n_rows,
                "row": each.table.row,
                **({"question": each.question} if each.question else {}),
                "columns": [_column(column, each.kinds) for column in each.table.columns],
            }
            for each in files
        ],
    }


def _column(column: Column, kinds: dict[str, str]) -> dict[str, str]:
    kind = kinds[column.name]
    return {"name": column.name, "unit": column.unit, "kind": kind, "doc": column.doc}


def _readme(index: dict[str, Any], kind: Format) -> str:
    """Write what a person reads who was sent the folder."""
    lines = [
        f"# Tables of {index['source'].replace('`', chr(39))}",
        "",
        f"Written by {index['written_by']} for other programs. Times are {index['times']}.",
        *([index["note"]] if index["note"] else []),
        "Filters chose a part of the capture." if index["filters"] else "The whole capture.",
        "",
        "| file | rows | one row is |",
        "|---|---:|---|",
        *(f"| {each['file']} | {each['n_rows']} | {each['row']} |" for each in index["tables"]),
        "",
        f"`{INDEX}` says of each column its unit, its meaning and its kind: recorded (as in the capture),",
        "derived (exact arithmetic on it), reconstructed (an inference) or modelled. It also says which events the",
        "capture recorded: a table that is not here has no row, and why stands there.",
        "",
        _HOW[kind],
    ]
    return "\n".join(lines) + "\n"


_HOW: Final = {
    "parquet": "Read a file with `polars.read_parquet`, `pandas.read_parquet`, DuckDB or Arrow.",
    "csv": "Null is empty and an empty text is quoted, addresses are hexadecimal text; a `'` stands before text that begins "
    "like a formula.",
}
