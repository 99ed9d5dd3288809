"""The result of an analysis as a table for people: of a report, or of any source in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from nsan.analysing import kinds_of, run_analysis
from nsan.analysis.catalog import find as find_analysis
from nsan.charting import NOT_COUNTED
from nsan.errors import NsanError
from nsan.report.blocks import Block, Table, Text
from nsan.report.shown import Blocks
from nsan.tabular.columns import fields_of, header_of, telling, zero_columns
from nsan.tabular.notes import few, is_part, kinds_in_words, missing_of
from nsan.text import shortened
from nsan.units import counted, format_address
from nsan.uvm.constants import VA_BLOCK_BYTES

if TYPE_CHECKING:
    import polars as pl

    from nsan.analysing import Source
    from nsan.analysis.catalog import Analysis
    from nsan.analysis.result import Figure
    from nsan.tabular.text import Field

_MOST_COLUMNS: Final = 8
_LONGEST_CELL: Final = 60


def table_of(
    source: Source,
    name: str,
    *,
    columns: Sequence[str] = (),
    rows: int = 10,
    options: Mapping[str, Any] | None = None,
) -> Blocks:
    """Run an analysis and show its first rows as a table.

    Parameters
    ----------
    source : Trace, Snapshot or Joined
        What to analyse.
    name : str
        Name of the analysis.
    columns : sequence of str, optional
        Columns to show, in this order; by default those that tell something, the first few.
    rows : int, default 10
        Rows at most.
    options : mapping, optional
        Values for its options.

    Returns
    -------
    Blocks
        A table with small print; a text where there is no row or the analysis cannot be run.
    """
    analysis = find_analysis(name)
    try:
        found = run_analysis(source, analysis, options).collect()
        kinds = kinds_of(source, analysis, found)
    except NsanError as error:
        return Blocks([Text(f"{analysis.question} {error}", "warning")])
    if not found.height:
        return no_row(source, analysis)
    return Blocks([as_table(analysis, found, kinds, columns=columns, rows=rows)])


def no_row(source: Source, analysis: Analysis) -> Blocks:
    """Say that a table has no row, and what to record if that is why."""
    part = " in the part that was asked for" * is_part(source)
    said: list[Block] = [
        Text(f"{analysis.question} No row{part}. {analysis.result.nothing}", "note")
    ]
    return Blocks([*said, *(Text(each, "missing") for each in missing_of(source, analysis))])


def as_table(
    analysis: Analysis,
    found: pl.DataFrame,
    kinds: Mapping[str, str],
    *,
    columns: Sequence[str] = (),
    rows: int = 10,
    title: str | None = None,
) -> Table:
    """Write rows of a result as a table.

    Parameters
    ----------
    analysis : Analysis
        What gave them.
    found : DataFrame
        The rows, at least one, with the columns of its result.
    kinds : mapping of str to str
        Kind of each column.
    columns : sequence of str, optional
        Columns to show, in this order; by default those that tell something, the first few.
    rows : int, default 10
        Rows at most.
    title : str, optional
        What stands above it; the question of the analysis by default, "" for nothing.

    Returns
    -------
    Table
        With notes on what was left out and of which kind the figures are.
    """
    chosen, left_out = _chosen(analysis, found, columns)
    notes = []
    if found.height > rows:
        notes.append(more_rows(analysis, found.height - rows))
    if left_out:
        notes.append(f"More columns: {few(map(header_of, left_out))}.")
    figures = [column for column in chosen if column.unit not in NOT_COUNTED]
    notes.append(kinds_in_words(figures or chosen, kinds))
    fields = fields_of(chosen)
    cells = [
        tuple(shortened(_written(field, row[field.key]), _LONGEST_CELL) for field in fields)
        for row in found.head(rows).to_dicts()
    ]
    return Table(
        tuple(field.header for field in fields),
        tuple(cells),
        tuple(field.right for field in fields),
        analysis.question if title is None else title,
        tuple(notes),
    )


def _written(field: Field, value: Any) -> str:
    """Write a value; of a VA block its first address, by which readers know it from other tables."""
    if value is not None and field.key.endswith("va_block"):
        return str(format_address(value * VA_BLOCK_BYTES))
    return field.write(value)


_SOURCES: Final = {
    "trace": "TRACE",
    "snapshot": "SNAPSHOT",
    "joined": "TRACE --snapshot SNAPSHOT",
}


def more_rows(analysis: Analysis, n: int) -> str:
    """Say how many rows of an analysis are not shown, and what shows them."""
    command = f"nsan analyse {analysis.name} {_SOURCES[analysis.subject]}"
    return f"{counted(n, 'more row', 'more rows')}: `{command}`."


def _chosen(
    analysis: Analysis, found: pl.DataFrame, columns: Sequence[str]
) -> tuple[list[Figure], list[Figure]]:
    """Choose the columns to show, and name those that were left out for want of room."""
    known = {column.name: column for column in analysis.result.columns}
    if columns:
        asked = [known[name] for name in columns]
        return [
            column for column in asked if found[column.name].null_count() < found.height
        ] or asked, []
    told = telling(analysis.result.columns, found)
    zero = zero_columns(told, found)
    told = [column for column in told if column not in zero]
    return told[:_MOST_COLUMNS], told[_MOST_COLUMNS:]
