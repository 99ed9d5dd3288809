"""A database whose file is damaged where SQLite itself does not see it: no row is lost in silence."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from nsan.errors import DamagedExportError
from nsan.io.sqlite_file import SqliteFile

_LEAF = 13
"""Kind of a page that holds rows of a table (SQLite's file format, 1.6)."""


def table(path, ids):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (a INTEGER)")
        connection.executemany(
            "INSERT INTO t (rowid, a) VALUES (?, ?)", [(i, 10 * (i % 100)) for i in ids]
        )
        connection.commit()
    return path


def with_other_id(path, row, number):
    """Give the n-th row of the table another id in its cell, where no order is checked by a reader."""
    with closing(sqlite3.connect(path)) as connection:
        (root,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 't'"
        ).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    raw = bytearray(path.read_bytes())
    page = (root - 1) * size
    assert raw[page] == _LEAF
    pointer = page + 8 + 2 * row
    cell = page + int.from_bytes(raw[pointer : pointer + 2], "big")
    raw[cell + 1] = number
    path.write_bytes(raw)


def plain(path):
    with closing(sqlite3.connect(path)) as connection:
        return [a for (a,) in connection.execute("SELECT a FROM t")]


def read(path, *, rows):
    with SqliteFile(path) as database:
        found = []
        for between in database.row_ranges("t", rows=rows):
            frame, lost = database.read("t", {"a": "integer"}, between)
            assert lost == {}
            found += frame["a"].to_list()
        return found


@pytest.mark.parametrize(("row", "number"), [(0, 127), (1, 1), (1, 127), (2, 0), (2, 1)])
def test_rows_out_of_order_in_a_page_are_all_read(tmp_path, row, number):
    path = table(tmp_path / "a.sqlite", range(1, 4))
    with_other_id(path, row, number)
    assert plain(path) == [10, 20, 30]
    if row == 0:  # now the first id is above the last, and SQLite finds no row between them
        with closing(sqlite3.connect(path)) as connection:
            assert (
                connection.execute("SELECT a FROM t WHERE rowid BETWEEN 1 AND 3").fetchall() == []
            )
    assert read(path, rows=1000) == [10, 20, 30]


@pytest.mark.parametrize("ids", [range(1, 10), [1, 2, 3, 5, 8, 13, 21, 34, 55]])
def test_rows_out_of_order_in_a_large_table_are_refused(tmp_path, ids):
    path = table(tmp_path / "a.sqlite", ids)
    assert read(path, rows=2) == [10 * i for i in ids]
    with_other_id(path, 4, 100)
    assert len(plain(path)) == 9
    with pytest.raises(DamagedExportError, match="the rows of table t are out of order"):
        read(path, rows=2)


def test_a_huge_gap_between_ids_loses_no_row(tmp_path):
    ids = [-5, 1, 2, 1 << 40, (1 << 62) + 1]
    assert read(table(tmp_path / "a.sqlite", ids), rows=2) == [950, 10, 20, 760, 50]


def test_an_index_that_holds_all_columns_does_not_change_the_order_of_the_rows(tmp_path):
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (a INTEGER)")
        connection.executemany("INSERT INTO t VALUES (?)", [(3,), (1,), (2,)])
        connection.execute("CREATE INDEX i ON t (a)")
        connection.commit()
    assert read(path, rows=1000) == [3, 1, 2]


def test_a_table_of_any_name_is_read(tmp_path):
    path = tmp_path / "a.sqlite"
    name = 'a "b" [c] `d`; --'
    with closing(sqlite3.connect(path)) as connection:
        connection.execute('CREATE TABLE "a ""b"" [c] `d`; --" (a INTEGER)')
        connection.execute('INSERT INTO "a ""b"" [c] `d`; --" VALUES (7)')
        connection.commit()
    with SqliteFile(path) as database:
        (between,) = database.row_ranges(name, rows=9)
        assert database.read(name, {"a": "integer"}, between)[0]["a"].to_list() == [7]
