"""One SQLite database, opened so that it can neither change nor be harmed, and read by ranges.

SQLAlchemy reflects the tables and builds the queries, ADBC moves the rows. Three habits of SQLite
shape this module (all measured on ADBC 1.13):

* A column's cells may be of any type, and ADBC takes a column's type from its first rows. So each
  query begins with a typed row, and a range whose columns still come out with another type is read
  again with every misfit cell as null.
* Text need not be UTF-8, so text travels as bytes.
* Opening a database beside a `-wal` file writes to the folder, unless it is opened as immutable,
  which ignores the `-wal`. So a database with a filled `-wal` is copied first, with it.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self
from urllib.parse import quote

import adbc_driver_manager
import adbc_driver_sqlite
import polars as pl
import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import dialect as sqlite_dialect

from nsan.errors import DamagedExportError, NoPermissionError, StoreWriteError

CellType = Literal["integer", "real", "text"]

_BATCH_ROWS: Final = 1 << 16
_MOST_RANGES: Final = 1024
_ROW_MARK: Final = "_row"
_SEED: Final[dict[CellType, str]] = {"integer": "0", "real": "0.0", "text": "X''"}
_DTYPES: Final[dict[CellType, type[pl.DataType]]] = {
    "integer": pl.Int64,
    "real": pl.Float64,
    "text": pl.Binary,
}
_CELL_TYPES: Final[dict[CellType, tuple[str, ...]]] = {
    "integer": ("integer",),
    "real": ("real", "integer"),
    "text": ("text", "blob", "integer", "real"),
}


class SqliteFile:
    """A database open for reading; a context manager.

    Parameters
    ----------
    path : Path
        A file that :func:`nsan.io.probe.identify` calls a database.

    Attributes
    ----------
    path : Path
        The database as the user named it.
    warning : str
        What a reader of it should be told; empty for most.
    tables : dict of str to dict of str to str
        By table name in lower case: its columns, by name in lower case, as spelt.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warning = ""
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._uri = f"file:{quote(os.fsencode(self._unchanging(path)))}?mode=ro&immutable=1"
        self._quote = sqlite_dialect().identifier_preparer.quote_identifier
        # One connection for all: it only reflects and counts, and opening costs more than asking.
        self._engine = sa.create_engine(
            "sqlite://",
            creator=lambda: sqlite3.connect(self._uri, uri=True, check_same_thread=False),
            poolclass=sa.StaticPool,
            pool_reset_on_return=None,
        )
        self._names: dict[str, str] = {}
        self._whole: dict[str, tuple[int, int]] = {}
        self._n_rows: dict[str, int] = {}
        self._dense: set[str] = set()
        self._in_order: set[str] = set()
        self.tables: dict[str, dict[str, str]] = {}
        try:
            self._inspector = sa.inspect(self._engine)
            self._names = {name.lower(): name for name in self._inspector.get_table_names()}
            self._views = {name.lower() for name in self._inspector.get_view_names()}
        except (sa.exc.DatabaseError, UnicodeDecodeError) as error:
            self.close()
            raise DamagedExportError(path, _first_line(error)) from error

    def _unchanging(self, path: Path) -> Path:
        """Return a database that no reader needs to touch: the file, or a copy made whole."""
        real = path.resolve()
        logs = [
            log
            for log in map(real.with_name, (f"{real.name}-wal", f"{real.name}-journal"))
            if _filled(log)
        ]
        if not logs:
            return real
        self._scratch = tempfile.TemporaryDirectory(prefix="nsan-")
        copy = Path(self._scratch.name) / real.name
        try:
            for source in (real, *logs):
                shutil.copyfile(source, copy.with_name(source.name))
            with closing(sqlite3.connect(copy)) as connection:
                connection.execute("PRAGMA journal_mode=DELETE").fetchall()
        except OSError as error:
            folder = Path(self._scratch.name).parent
            self._scratch.cleanup()
            raise StoreWriteError(folder, error.strerror or str(error)) from error
        except sqlite3.DatabaseError as error:
            self._scratch.cleanup()
            raise DamagedExportError(
                path, f"it has a log beside it that cannot be applied ({_first_line(error)})"
            ) from error
        return copy

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the database and any scratch copy."""
        self._engine.dispose()
        if self._scratch is not None:
            self._scratch.cleanup()

    @property
    def table_names(self) -> list[str]:
        """Names of all tables, as spelt."""
        return sorted(self._names.values())

    def has_table(self, table: str) -> bool:
        """Say whether a table exists, in any spelling of case."""
        if table.lower() in self._views:
            raise DamagedExportError(self.path, f"{table} is a view, and nsys makes tables")
        return table.lower() in self._names

    def columns(self, table: str) -> dict[str, str]:
        """Return the columns of a table, by name in lower case, as spelt; empty if it is absent."""
        key = table.lower()
        if key not in self.tables:
            name = self._names.get(key)
            try:
                found = self._inspector.get_columns(name) if name else []
            except (sa.exc.DatabaseError, UnicodeDecodeError) as error:
                raise DamagedExportError(self.path, _first_line(error)) from error
            self.tables[key] = {column["name"].lower(): column["name"] for column in found}
        return self.tables[key]

    def row_ranges(self, table: str, *, rows: int) -> list[tuple[int, int]]:
        """Cut a table into ranges of row ids, first and last inclusive, of about ``rows`` rows."""
        source = sa.table(self._names[table.lower()])
        rowid = self._rowid(table)
        # SQLite finds one end at once, but scans the table when asked for both in one query.
        ends = [sa.select(end(rowid)).select_from(source) for end in (sa.func.min, sa.func.max)]
        first, last = (self._ask(query)[0][0] for query in ends)
        if first is None:
            return []
        if last - first < rows:
            # The whole table needs no search, which is misled where a damaged page has its rows out of order.
            self._whole[table.lower()] = first, last
            return [(first, last)]
        is_dense = self._count(table) == last - first + 1
        if last - first < _MOST_RANGES * rows:
            ranges = [(at, min(at + rows - 1, last)) for at in range(first, last + 1, rows)]
        else:
            # A huge table, or row ids with huge gaps: cut by rows instead of by ids.
            number = sa.func.row_number().over(order_by=rowid)
            numbered = (
                sa.select(rowid.label("id"), number.label("n")).select_from(source).subquery()
            )
            cuts = [
                row[0]
                for row in self._ask(sa.select(numbered.c.id).where(numbered.c.n % rows == 1))
            ]
            ranges = [(at, after - 1) for at, after in pairwise([*cuts, last + 1])]
        self._check_order(table, ranges, is_dense=is_dense)
        return ranges

    def _count(self, table: str) -> int:
        """Count the rows of a table, whatever their ids."""
        source = sa.table(self._names[table.lower()])
        key = table.lower()
        if key not in self._n_rows:
            self._n_rows[key] = self._ask(sa.select(sa.func.count()).select_from(source))[0][0]
        return self._n_rows[key]

    def _check_order(self, table: str, ranges: list[tuple[int, int]], *, is_dense: bool) -> None:
        """Make sure that the ranges hold every row: a search does not find what is out of order."""
        key = table.lower()
        if is_dense:
            self._dense.add(key)  # each range must turn out full
            return
        if key in self._in_order:
            return
        source, rowid = sa.table(self._names[key]), self._rowid(table)
        count = sa.select(sa.func.count()).select_from(source)
        n = sum(self._ask(count.where(rowid.between(*between)))[0][0] for between in ranges)
        if n != self._count(table):
            raise self._out_of_order(table)
        self._in_order.add(key)

    def _out_of_order(self, table: str) -> DamagedExportError:
        return DamagedExportError(self.path, f"the rows of table {table} are out of order")

    def _rowid(self, table: str) -> sa.ColumnElement[int]:
        """Name the row id; a column may have taken one of its names."""
        taken = self.columns(table)
        return sa.literal_column(next(n for n in ("rowid", "_rowid_", "oid") if n not in taken))

    def _ask(self, query: sa.Executable) -> list[tuple[Any, ...]]:
        try:
            with self._engine.connect() as connection:
                return [tuple(row) for row in connection.execute(query)]
        except sa.exc.DatabaseError as error:
            raise DamagedExportError(self.path, _first_line(error)) from error

    def read(
        self, table: str, columns: dict[str, CellType], between: tuple[int, int]
    ) -> tuple[pl.DataFrame, dict[str, int]]:
        """Read a range of rows with fixed column types.

        Parameters
        ----------
        table : str
            An existing table.
        columns : dict of str to {"integer", "real", "text"}
            Columns to read; those that the table lacks come back as nulls.
        between : (int, int)
            First and last row id.

        Returns
        -------
        DataFrame
            One row per row of the table, in its order: Int64, Float64 or String columns.
        dict of str to int
            By column: cells of another type, read as null.

        Raises
        ------
        DamagedExportError
            If the database is corrupt.
        """
        spelt = self.columns(table)
        present = {name: kind for name, kind in columns.items() if name.lower() in spelt}
        lost: dict[str, int] = {}
        # A table without any known column still has rows: read a constant for each.
        wanted: dict[str, CellType] = present or {_ROW_MARK: "integer"}
        found = self._fetch(self._query(table, present, between, tame=False), wanted)
        if found is None:
            found = self._fetch(self._query(table, present, between, tame=True), wanted)
            lost = self._misfits(table, present, between)
        if found is None:
            raise DamagedExportError(self.path, f"table {table} cannot be read")
        if table.lower() in self._dense and found.height != between[1] - between[0] + 1:
            raise self._out_of_order(table)
        frame = found.with_columns(
            pl.lit(None, _DTYPES[kind]).alias(name)
            for name, kind in columns.items()
            if name not in present
        )
        return pl.DataFrame([decoded(frame[name]) for name in columns]), lost

    def _query(
        self, table: str, columns: dict[str, CellType], between: tuple[int, int], *, tame: bool
    ) -> str:
        spelt = self.columns(table)
        seed: list[sa.ColumnElement[Any]] = [
            sa.literal_column(_SEED[kind]).label(name) for name, kind in columns.items()
        ]
        cells = [
            _cell(spelt[name.lower()], kind, tame=tame).label(name)
            for name, kind in columns.items()
        ]
        if not columns:
            seed, cells = (
                [sa.literal_column("0").label(_ROW_MARK)],
                [sa.literal_column("0").label(_ROW_MARK)],
            )
        rows = self._within(sa.select(*cells), table, between)
        return _sql(sa.union_all(sa.select(*seed), rows))

    def _within(self, query: Any, table: str, between: tuple[int, int]) -> Any:
        """Let a query read a range of a table's rows, in their order."""
        name = self._quote(self._names[table.lower()])
        # An index would have another order, and may be damaged where the table is not.
        query = query.select_from(sa.text(f"{name} NOT INDEXED"))
        if self._whole.get(table.lower()) == between:
            return query
        return query.where(self._rowid(table).between(*between))

    def _fetch(self, query: str, columns: dict[str, CellType]) -> pl.DataFrame | None:
        """Run a query; None if a column did not come out with its type."""
        try:
            frame = _run(self._uri, query)
        except (adbc_driver_manager.Error, OSError, pl.exceptions.PolarsError) as error:
            if "type mismatch" in str(error).lower():
                return None
            raise DamagedExportError(self.path, _first_line(error)) from error
        if any(frame.schema[name] != _DTYPES[kind] for name, kind in columns.items()):
            return None
        return frame.slice(1)

    def _misfits(
        self, table: str, columns: dict[str, CellType], between: tuple[int, int]
    ) -> dict[str, int]:
        spelt = self.columns(table)
        counts = []
        for name, kind in columns.items():
            cell: sa.ColumnElement[Any] = sa.column(spelt[name.lower()])
            fits = sa.func.typeof(cell).in_(["null", *_CELL_TYPES[kind]])
            # Typed, or the sum of booleans would come back as a boolean.
            n_misfits = sa.func.sum(sa.not_(fits), type_=sa.Integer)
            counts.append(sa.func.coalesce(n_misfits, 0).label(name))
        found = self._ask(self._within(sa.select(*counts), table, between))[0]
        return {name: int(count) for name, count in zip(columns, found, strict=True) if count}


def _run(uri: str, query: str) -> pl.DataFrame:
    # Not through ADBC's dbapi module: that imports pyarrow, and with it pandas, where they are
    # installed, and nothing here needs them.
    with (
        adbc_driver_sqlite.connect(uri) as database,
        adbc_driver_manager.AdbcConnection(database) as connection,
        adbc_driver_manager.AdbcStatement(connection) as statement,
    ):
        statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
        statement.set_sql_query(query)
        stream, _ = statement.execute_query()
        return pl.DataFrame(stream)


def _filled(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size > 0
    except PermissionError as error:
        raise NoPermissionError(path) from error


def _cell(name: str, kind: CellType, *, tame: bool) -> sa.ColumnElement[Any]:
    cell: sa.ColumnElement[Any] = sa.column(name)
    if kind == "text":
        return sa.cast(cell, sa.LargeBinary)
    if not tame:
        return cell
    fits = sa.func.typeof(cell).in_(_CELL_TYPES[kind])
    # A whole number in a REAL column is stored as an integer: make it a float again.
    value = sa.cast(cell, sa.REAL) if kind == "real" else cell
    return sa.case((fits, value))


def _sql(statement: sa.CompoundSelect[Any]) -> str:
    return str(statement.compile(dialect=sqlite_dialect(), compile_kwargs={"literal_binds": True}))


def decoded(column: pl.Series) -> pl.Series:
    """Bytes to text. A cast is all or nothing, so bytes that are not UTF-8 take the slow way."""
    if column.dtype != pl.Binary:
        return column
    try:
        return column.cast(pl.String)
    except pl.exceptions.ComputeError:
        return column.map_elements(_replace_invalid, return_dtype=pl.String)


def _replace_invalid(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def _first_line(error: BaseException) -> str:
    text = str(getattr(error, "orig", None) or error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
