"""The folder of an nsys Parquet or Arrow export, read like a database.

One file per table. Three habits of nsys shape this module (measured on 2023.4):

* An Arrow file is an IPC *stream* with all rows of a table in one batch, which polars can only read
  whole. :mod:`nsan.io.arrow_stream` reads stretches of it.
* A name that is not UTF-8 stands in a text column all the same, and polars then refuses the whole
  column. Such a Parquet file is read through a copy whose text columns are called binary.
* Ids and addresses are unsigned in some tables and signed in others, where SQLite has one kind.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol, TypeVar

import polars as pl

from nsan.errors import DamagedExportError, NoPermissionError, NotAStoreError
from nsan.io.arrow_stream import ArrowStream
from nsan.io.parquet_text import with_binary_text
from nsan.io.sqlite_file import CellType, decoded

_T = TypeVar("_T")
_SUFFIXES: Final[dict[str, Literal["nsys-parquet", "nsys-arrow"]]] = {
    ".parquet": "nsys-parquet",
    ".arrow": "nsys-arrow",
}
_DTYPES: Final[dict[CellType, type[pl.DataType]]] = {
    "integer": pl.Int64,
    "real": pl.Float64,
    "text": pl.String,
}


_DAMAGE: Final = (
    OSError,
    ValueError,
    struct.error,
    pl.exceptions.PolarsError,
    pl.exceptions.PanicException,
)
"""What readers raise on a damaged file; polars panics at some, beside Python's own exceptions."""


class _Table(Protocol):
    """One table on disk: its columns in order, its rows by position."""

    columns: Sequence[str]
    n_rows: int

    def rows(self, columns: Sequence[str], first: int, n_rows: int) -> pl.DataFrame: ...

    def close(self) -> None: ...


class _ParquetTable:
    """A Parquet file, of which only the row groups and columns asked for are read."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()
        self.columns: Sequence[str] = list(pl.read_parquet_schema(file))
        self.n_rows: int = pl.scan_parquet(file, glob=False).select(pl.len()).collect().item()

    def rows(self, columns: Sequence[str], first: int, n_rows: int) -> pl.DataFrame:
        try:
            return self._scan(columns, first, n_rows)
        except pl.exceptions.ComputeError as error:
            if "utf-8" not in str(error).lower():
                raise
        with self._lock:
            if self._scratch is None:
                self._scratch = tempfile.TemporaryDirectory(prefix="nsan-")
                copy = Path(self._scratch.name) / "table.parquet"
                shutil.copyfile(self._file, copy)
                with_binary_text(copy)
                self._file = copy
        return self._scan(columns, first, n_rows)

    def _scan(self, columns: Sequence[str], first: int, n_rows: int) -> pl.DataFrame:
        scan = pl.scan_parquet(self._file, glob=False)
        return scan.select(columns).slice(first, n_rows).collect()

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()


_OPENERS: Final[dict[str, Callable[[Path], _Table]]] = {
    ".parquet": _ParquetTable,
    ".arrow": ArrowStream,
}


class TableFolder:
    """An export folder, open for reading, with the interface of :class:`SqliteFile`.

    Parameters
    ----------
    path : Path
        A folder that :func:`nsan.io.probe.identify` calls tables.

    Attributes
    ----------
    path : Path
        The folder as the user named it.
    kind : {"nsys-parquet", "nsys-arrow"}
        What its files are; where both are there, the Parquet files are read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        by_suffix = {
            suffix: {file.stem.lower(): file for file in sorted(path.glob(f"*{suffix}"))}
            for suffix in _SUFFIXES
        }
        self._suffix = next((suffix for suffix, files in by_suffix.items() if files), "")
        if not self._suffix:
            raise NotAStoreError(path)
        self.kind = _SUFFIXES[self._suffix]
        self._files = by_suffix[self._suffix]
        self._tables: dict[str, _Table] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Release the files and any scratch copies."""
        for table in self._tables.values():
            table.close()

    @property
    def table_names(self) -> list[str]:
        """Names of all tables, as spelt."""
        return sorted(file.stem for file in self._files.values())

    def has_table(self, table: str) -> bool:
        """Say whether a table exists, in any spelling of case."""
        return table.lower() in self._files

    def columns(self, table: str) -> dict[str, str]:
        """Return the columns of a table, by name in lower case, as spelt; empty if it is absent."""
        if not self.has_table(table):
            return {}
        return {name.lower(): name for name in self._open(table).columns}

    def row_ranges(self, table: str, *, rows: int) -> list[tuple[int, int]]:
        """Cut a table into ranges of rows, first and last inclusive, of at most ``rows`` rows."""
        n_rows = self._open(table).n_rows
        return [(at, min(at + rows, n_rows) - 1) for at in range(0, n_rows, rows)]

    def read(
        self, table: str, columns: Mapping[str, CellType], between: tuple[int, int]
    ) -> tuple[pl.DataFrame, dict[str, int]]:
        """Read a range of rows with fixed column types.

        Parameters
        ----------
        table : str
            An existing table.
        columns : dict of str to {"integer", "real", "text"}
            Columns to read; those that the table lacks come back as nulls.
        between : (int, int)
            First and last row.

        Returns
        -------
        DataFrame
            One row per row of the table, in its order: Int64, Float64 or String columns.
        dict of str to int
            By column: cells of another type, read as null.

        Raises
        ------
        DamagedExportError
            If the file is corrupt.
        """
        spelt = self.columns(table)
        present = [spelt[name.lower()] for name in columns if name.lower() in spelt]
        first, last = between
        n_rows = last - first + 1
        opened = self._open(table)
        found = self._guarded(table, lambda: opened.rows(present, first, n_rows))
        fitted: list[pl.Series] = []
        lost: dict[str, int] = {}
        for name, kind in columns.items():
            if name.lower() in spelt:
                column, misfits = _fitted(found[spelt[name.lower()]], kind)
            else:
                column, misfits = pl.repeat(None, n_rows, dtype=_DTYPES[kind], eager=True), 0
            fitted.append(column.alias(name))
            lost |= {name: misfits} if misfits else {}
        return pl.DataFrame(fitted), lost

    def _open(self, table: str) -> _Table:
        key = table.lower()
        with self._lock:
            if key not in self._tables:
                file = self._files[key]
                self._tables[key] = self._guarded(table, lambda: _OPENERS[self._suffix](file))
            return self._tables[key]

    def _guarded(self, table: str, do: Callable[[], _T]) -> _T:
        file = self._files[table.lower()]
        try:
            return do()
        except PermissionError as error:
            raise NoPermissionError(file) from error
        except _DAMAGE as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise DamagedExportError(file, reason) from error


def _fitted(column: pl.Series, kind: CellType) -> tuple[pl.Series, int]:
    """Give a column the type that was asked for; cells that do not fit are null, and counted."""
    dtype = column.dtype
    if dtype == pl.Null or _fits(dtype, kind):
        if kind == "integer" and dtype == pl.UInt64:
            # SQLite keeps the bits of an unsigned integer, and so do the readers of it.
            return column.reinterpret(signed=True), 0
        return decoded(column).cast(_DTYPES[kind]), 0
    lost = len(column) - column.null_count()
    return pl.repeat(None, len(column), dtype=_DTYPES[kind], eager=True), lost


def _fits(dtype: pl.DataType, kind: CellType) -> bool:
    whole = dtype.is_integer() or dtype == pl.Boolean
    if kind == "integer":
        return whole
    if kind == "real":
        return whole or dtype.is_float()
    # Compared one by one: a category's type holds its categories, and has a hash of its own.
    texts = (pl.String, pl.Binary, pl.Categorical, pl.Enum)
    return whole or dtype.is_float() or any(dtype == text for text in texts)
