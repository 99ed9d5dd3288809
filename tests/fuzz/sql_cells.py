"""What plain sqlite3 finds in a database: typed cells, without a line of nsan.

The rule for a cell: a whole number is a cell of the storage class INTEGER, within the limits of its
column; whatever else stands there is no value.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from contextlib import contextmanager
from pathlib import Path

TIMES = (-(1 << 61), 1 << 61)
SIZES = (0, 1 << 46)
COUNTS = (0, 1 << 40)
_LOGS = ("-wal", "-journal", "-shm")


@contextmanager
def opened(path):
    """Open a copy of a database, with the logs beside it, as any program would."""
    with tempfile.TemporaryDirectory(prefix="oracle-", dir=path.parent.parent) as folder:
        copy = Path(folder) / path.name
        shutil.copyfile(path, copy)
        for suffix in _LOGS:
            log = Path(f"{path}{suffix}")
            if log.is_file() and log.stat().st_size:
                shutil.copyfile(log, f"{copy}{suffix}")
        connection = sqlite3.connect(copy)
        connection.text_factory = bytes
        try:
            yield connection
        finally:
            connection.close()


class Cells:
    """A database as sqlite3 has it."""

    def __init__(self, connection):
        self._connection = connection
        found = connection.execute(
            "SELECT type, name FROM sqlite_master WHERE type IN ('table', 'view')"
        )
        self._names = {
            name.decode("utf-8", "replace").lower(): (kind, name) for kind, name in found
        }

    def has(self, table):
        return self._names.get(table.lower(), (b"",))[0] == b"table"

    def views(self, *tables):
        """Say which of some tables are views."""
        return [t for t in tables if self._names.get(t.lower(), (b"",))[0] == b"view"]

    def columns(self, table):
        """Names of the columns, by name in lower case."""
        name = self._names[table.lower()][1].decode("utf-8", "surrogateescape")
        found = self._connection.execute(f'PRAGMA table_xinfo("{name}")')
        return {
            row[1].decode("utf-8", "replace").lower(): row[1].decode("utf-8", "replace")
            for row in found
        }

    def rows(self, table, columns, limits=()):
        """Read a table in the order of its rows.

        Returns the rows, each a dict, a None where a cell is no value; and by column how many cells hold
        something that is no value, how many are no value, and whether the column is absent.
        """
        if not self.has(table):
            return [], {}
        spelt, limits = self.columns(table), dict(limits)
        parts = []
        for column in columns:
            if column.lower() not in spelt:
                parts += ["NULL", "NULL"]
                continue
            cell = f't."{spelt[column.lower()]}"'
            low, high = limits.get(column, (-(1 << 63), (1 << 63) - 1))
            within = f"CASE WHEN typeof({cell}) = 'integer' AND {cell} >= {low} AND {cell} <= {high} THEN {cell} END"
            parts += [within, f"typeof({cell})"]
        name = self._names[table.lower()][1].decode()
        found = self._connection.execute(f'SELECT {", ".join(parts)} FROM "{name}" t').fetchall()
        rows = [dict(zip(columns, row[::2], strict=True)) for row in found]
        notes = {}
        for at, column in enumerate(columns):
            notes[column] = {
                "absent": column.lower() not in spelt,
                "misfits": sum(
                    row[2 * at] is None and row[2 * at + 1] not in {b"null", None} for row in found
                ),
                "lacking": sum(row[2 * at] is None for row in found),
            }
        return rows, notes

    def texts(self, table, key, value):
        """Read a table of texts by number, the first of a number; and how many cells of either are no value."""
        if not self.has(table):
            return {}, 0
        spelt = self.columns(table)
        if key.lower() not in spelt or value.lower() not in spelt:
            return {}, 1
        name = self._names[table.lower()][1].decode()
        query = f'SELECT t."{spelt[key.lower()]}", CAST(t."{spelt[value.lower()]}" AS BLOB) FROM "{name}" t'
        found, lacking = {}, 0
        for number, text in self._connection.execute(query):
            lacking += type(number) is not int or text is None
            if type(number) is int and number not in found:
                found[number] = text
        return found, lacking

    def facts(self, *tables):
        """Read name/value tables."""
        found = []
        for table in tables:
            if self.has(table) and {"name", "value"} <= set(self.columns(table)):
                name = self._names[table.lower()][1].decode()
                query = f'SELECT CAST(t.name AS BLOB), CAST(t.value AS BLOB) FROM "{name}" t'
                found += [row for row in self._connection.execute(query) if None not in row]
        return found
