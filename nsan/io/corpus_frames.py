"""The tables of a corpus as lazy frames: nothing is read before it is asked for.

In a local folder polars scans the parts itself, and leaves out those of other runs and ranks by their
paths. Elsewhere the parts come through fsspec, one at a time, and are left out by what the filter says
about run, rank and source.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Final

import polars as pl
from polars.io.plugins import register_io_source

from nsan.corpus_errors import BrokenCorpusError
from nsan.errors import SchemaMismatchError
from nsan.io.corpus import Record
from nsan.io.corpus_place import CorpusPlace, LocalPlace, place_at
from nsan.schema import TABLES

WHO: Final = pl.Schema({"run": pl.String, "rank": pl.Int64, "source": pl.String})
"""The columns that come before those of each table."""

_PARTITION: Final = {"run": pl.String, "rank": pl.Int64}
_PATH: Final = "_nsan_path"
_BY_START: Final = frozenset(
    name for name, table in TABLES.items() if {"start_ns", "pid"} <= table.schema.keys()
) - {"nvtx_ranges", "nvtx_marks"}


def corpus_table(place: CorpusPlace, records: Sequence[Record], table: str) -> pl.LazyFrame:
    """Return the rows of a table of all reports.

    Parameters
    ----------
    place : CorpusPlace
        Where the parts are.
    records : sequence of Record
        Whose rows.
    table : str
        Name of a table of :mod:`nsan.schema`.

    Returns
    -------
    LazyFrame
        ``run``, ``rank``, ``source``, then the columns of the table; by report in the given order.
    """
    parts = [(part["name"], record) for record in records for part in record.tables[table]["parts"]]
    schema = pl.Schema({**WHO, **TABLES[table].schema})
    if not parts:
        return pl.LazyFrame(schema=schema)
    # A folder above the corpus that looks like a partition would be taken for one.
    if isinstance(place, LocalPlace) and "=" not in place.location:
        return _scanned(place, parts, table)
    return _fetched(place.location, parts, table, schema)


def report_table(place: CorpusPlace, record: Record, table: str) -> pl.LazyFrame:
    """Return the rows of a table of one report, as its store would.

    Parameters
    ----------
    place : CorpusPlace
        Where the parts are.
    record : Record
        The report.
    table : str
        Name of a table of :mod:`nsan.schema`.

    Returns
    -------
    LazyFrame
        The columns of the table.
    """
    schema = TABLES[table].schema
    parts = [(part["name"], record) for part in record.tables[table]["parts"]]
    if not parts:
        return TABLES[table].empty()
    if isinstance(place, LocalPlace):
        files = [place.path(name) for name, _ in parts]
        rows = pl.scan_parquet(files, glob=False, hive_partitioning=False)
    else:
        rows = _fetched(place.location, parts, table, schema)
    if table in _BY_START:
        rows = rows.set_sorted("start_ns", nulls_last=True)
    return TABLES[table].validate(rows)


def _scanned(place: LocalPlace, parts: list[tuple[str, Record]], table: str) -> pl.LazyFrame:
    sources = {str(place.path(name)): record.source for name, record in parts}
    rows = pl.scan_parquet(
        list(sources),
        glob=False,
        schema=TABLES[table].schema,
        hive_partitioning=True,
        hive_schema=_PARTITION,
        include_file_paths=_PATH,
    )
    source = pl.col(_PATH).replace_strict(
        list(sources), list(sources.values()), return_dtype=pl.String
    )
    return rows.select("run", "rank", source.alias("source"), *TABLES[table].schema)


def _fetched(
    address: str, parts: list[tuple[str, Record]], table: str, schema: pl.Schema
) -> pl.LazyFrame:
    """Scan parts that only fsspec reaches."""

    def read(
        columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, _size: int | None
    ) -> Iterator[pl.DataFrame]:
        place, left = place_at(address), n_rows
        wanted = list(schema) if columns is None else columns
        alone = _about_who(predicate)
        for name, record in parts:
            if left is not None and left <= 0:
                return
            who = pl.DataFrame([(record.run, record.rank, record.source)], schema=WHO, orient="row")
            if alone is not None and who.filter(alone).is_empty():
                continue
            rows = _read_part(place, name, table)
            if "run" in schema:
                rows = rows.with_columns(
                    pl.lit(value, WHO[key]).alias(key)
                    for key, value in who.row(0, named=True).items()
                )
            if predicate is not None:
                rows = rows.filter(predicate)
            if left is not None:
                rows = rows.head(left)
                left -= rows.height
            yield rows.select(wanted)

    return register_io_source(read, schema=schema, explain_name="corpus", explain_detail=table)


def _read_part(place: CorpusPlace, name: str, table: str) -> pl.DataFrame:
    found = place.read([name])
    if name not in found:
        gone = f"{name} is gone; if it was imported again meanwhile, open it again"
        raise BrokenCorpusError(place.address, gone)
    try:
        rows = pl.read_parquet(io.BytesIO(found[name]), hive_partitioning=False)
        return TABLES[table].validate(rows.lazy()).collect()
    except (pl.exceptions.PolarsError, SchemaMismatchError) as error:
        raise BrokenCorpusError(
            place.address, f"{name} is damaged ({_first_line(error)})"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _about_who(predicate: pl.Expr | None) -> pl.Expr | None:
    """Return the part of a filter that speaks of run, rank and source alone; None without one."""
    parts = [] if predicate is None else _conjuncts(predicate)
    names = {index: set(part.meta.root_names()) for index, part in enumerate(parts)}
    about = [
        part for index, part in enumerate(parts) if names[index] and names[index] <= WHO.keys()
    ]
    return pl.all_horizontal(about) if about else None


def _conjuncts(predicate: pl.Expr) -> list[pl.Expr]:
    """Take a filter apart where it says "and"."""
    inputs = predicate.meta.pop()
    if len(inputs) == 2:
        for left, right in (inputs, inputs[::-1]):
            if (left & right).meta.eq(predicate):
                return [*_conjuncts(left), *_conjuncts(right)]
    return [predicate]
