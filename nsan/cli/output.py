"""One table in whatever format was asked for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nsan.cli.arguments import write_file, write_result
from nsan.cli.terminal import complain
from nsan.errors import UsageError
from nsan.tabular.text import Field, Row, csv_text, flat, json_text, table

if TYPE_CHECKING:
    import polars as pl


def write_table(
    args: argparse.Namespace,
    rows: Sequence[Row],
    *,
    fields: Sequence[Field],
    columns: Sequence[str] | Mapping[str, pl.DataType],
    document: Mapping[str, Any],
    notes: Sequence[str],
) -> None:
    """Write a table for people or machines.

    Parameters
    ----------
    args : Namespace
        Format, number of rows and output.
    rows : sequence of mapping
        All rows of the table.
    fields : sequence of Field
        Columns for people.
    columns : sequence of str, or mapping of str to DataType
        Columns for CSV and Parquet; with types where a column may hold no value from which its type would show.
    document : mapping
        What JSON holds.
    notes : sequence of str
        What the table cannot say; printed with it for people, on stderr beside other formats.
    """
    shown = rows[: args.rows]
    if args.format in {"table", "markdown"}:
        parts = [table(shown, fields, markdown=args.format == "markdown")] if shown else []
        if len(shown) < len(rows):
            parts.append(f"({len(rows) - len(shown)} more rows)")
        write_result(args, "\n\n".join([*parts, *notes]) + "\n")
        return
    if args.format == "json":
        write_result(args, json_text(document))
    elif args.format == "csv":
        write_result(args, csv_text(shown, list(columns)))
    else:
        _write_parquet(args, shown, columns)
    if not args.quiet:
        for note in notes:
            complain(note)


def write_document(
    args: argparse.Namespace, document: Mapping[str, Any], text: Callable[[], str]
) -> None:
    """Write a document: JSON as it is, CSV as ``key``, ``value`` rows, or as text for people.

    Parameters
    ----------
    args : Namespace
        Format and output.
    document : mapping
        What JSON holds.
    text : callable
        Writes the document for people, as a table or as Markdown.
    """
    if args.format == "parquet":
        msg = (
            "This result is a document, not a table: use --json, or a table with --format parquet."
        )
        raise UsageError(msg)
    if args.format == "json":
        write_result(args, json_text(document))
    elif args.format == "csv":
        write_result(args, csv_text(flat(document), ("key", "value")))
    else:
        write_result(args, text())


def _write_parquet(
    args: argparse.Namespace,
    rows: Sequence[Row],
    columns: Sequence[str] | Mapping[str, pl.DataType],
) -> None:
    import polars as pl

    chosen = [{key: row[key] for key in columns} for row in rows]
    if isinstance(columns, Mapping):
        frame = pl.DataFrame(chosen, schema=dict(columns))
    elif rows:
        frame = pl.DataFrame(chosen, infer_schema_length=None)
    else:
        frame = pl.DataFrame(schema=dict.fromkeys(columns, pl.Null))
    write_file(args, frame.write_parquet)
