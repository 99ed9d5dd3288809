"""Write one SQLite database: in one transaction, beside its place, and into place when it is whole."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.errors import OutputExistsError, OutputWriteError
from nsan.io.tidy import scratch_beside, undisturbed

if TYPE_CHECKING:
    import polars as pl

_ROWS_PER_PIECE: Final = 250_000
"""Rows that are Python objects at one time."""

_ROWS_PER_STATEMENT: Final = 50
_MOST_PARAMETERS: Final = 999
"""What any SQLite takes in one statement."""

_SPEED: Final = ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE")
"""Nothing needs to be rolled back: a database that is not whole never gets its name."""

_LOGS: Final = ("-wal", "-shm", "-journal")


class SqliteWriter:
    """A database under construction; see :func:`writing_database`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def create(self, statement: str) -> None:
        """Run one ``CREATE TABLE``."""
        self._connection.execute(statement)

    def insert(self, table: str, rows: pl.DataFrame) -> None:
        """Append rows to a table.

        Parameters
        ----------
        table : str
            An existing table.
        rows : DataFrame
            Signed integers, floats and texts, named as columns of the table. The table's other
            columns stay null.
        """
        for piece in rows.iter_slices(_ROWS_PER_PIECE):
            self._insert(table, piece)

    def _insert(self, table: str, rows: pl.DataFrame) -> None:
        columns = [column for column in rows.get_columns() if column.null_count() < rows.height]
        columns = columns or rows.get_columns()[:1]
        # Binding is most of the work of an insert: what never changes stands in the statement.
        fixed = {column.name: column[0] for column in columns[1:] if _is_fixed(column)}
        bound = [column for column in columns if column.name not in fixed]
        names = ", ".join(_quoted(column.name) for column in columns)
        row = ", ".join(str(fixed.get(column.name, "?")) for column in columns)
        head = " ".join(["INSERT INTO", _quoted(table), f"({names})", "VALUES "])

        cells = _row_by_row(bound, rows.height)
        width = len(bound)
        at_once = max(1, min(_ROWS_PER_STATEMENT, _MOST_PARAMETERS // width))
        step = at_once * width
        rest = len(cells) % step
        chunks = (cells[at : at + step] for at in range(0, len(cells) - rest, step))
        self._connection.executemany(head + ", ".join([f"({row})"] * at_once), chunks)
        if rest:
            last = head + ", ".join([f"({row})"] * (rest // width))
            self._connection.execute(last, cells[len(cells) - rest :])


def _is_fixed(column: pl.Series) -> bool:
    return column.dtype.is_integer() and not column.null_count() and column.min() == column.max()


def _row_by_row(columns: list[pl.Series], n_rows: int) -> list[Any]:
    """Lay out the cells of columns one row after the other."""
    cells: list[Any] = [None] * (n_rows * len(columns))
    for at, column in enumerate(columns):
        cells[at :: len(columns)] = column.to_list()
    return cells


def _quoted(name: str) -> str:
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


@contextlib.contextmanager
def writing_database(place: Path, *, overwrite: bool = False) -> Iterator[SqliteWriter]:
    """Write a database beside its place, and put it there when the block ends without an error.

    Parameters
    ----------
    place : Path
        Where the database is to be; what is there now stays until the new one is whole.
    overwrite : bool, default False
        Replace a file that is there.

    Yields
    ------
    SqliteWriter
        Takes the tables and their rows.

    Raises
    ------
    OutputExistsError
        If something is there and may not be replaced.
    OutputWriteError
        If it cannot be written: no such folder, no permission, no space. Nothing is left behind.
    """
    folder: Path | None = None
    try:
        _check_free(place, overwrite=overwrite)
        folder = scratch_beside(place, "writing")
        beside = folder / "new.sqlite"
        with contextlib.closing(sqlite3.connect(beside, isolation_level=None)) as connection:
            for setting in _SPEED:
                connection.execute(f"PRAGMA {setting}").fetchall()
            connection.execute("BEGIN")
            yield SqliteWriter(connection)
            connection.execute("COMMIT")
        _check_free(place, overwrite=overwrite)
        with undisturbed():
            _put(beside, place)
    except (OSError, sqlite3.Error) as error:
        raise OutputWriteError(place, getattr(error, "strerror", None) or str(error)) from error
    finally:
        if folder is not None:
            with undisturbed():
                shutil.rmtree(folder, ignore_errors=True)


def _check_free(place: Path, *, overwrite: bool) -> None:
    if not overwrite and (place.exists() or place.is_symlink()):
        raise OutputExistsError(place)


def _put(beside: Path, place: Path) -> None:
    # The log of a database that was here would be taken for one of the new database.
    for suffix in _LOGS:
        place.with_name(place.name + suffix).unlink(missing_ok=True)
    beside.replace(place)
