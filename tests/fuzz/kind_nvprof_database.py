"""Databases of nvprof, and sessions of the Visual Profiler around them."""

from __future__ import annotations

import base64
import gzip
import re
import sqlite3
import tempfile
import zlib
from contextlib import closing
from pathlib import Path

from fuzz import damage, export_oracle, export_pages, nvprof_files, values
from fuzz.asking import WrongError
from fuzz.export_rows import quoted
from fuzz.made import Made, look_closer_at_trace, shown, summarised
from fuzz.sql_cells import SIZES, Cells, opened

look_closer = look_closer_at_trace
_COLUMNS = ("counterKind", "value", "start", "end", "address", "srcId", "processId", "flags")
_START, _END = (1, 1 << 61), (0, 1 << 61)
_DIRECTIONS = {1: "htod", 2: "dtoh", 8: "dtod"}
_INSTANTS = (3, 5, 7)


def make(random, folder):
    """Make a database; change its cells or its file, and wrap some up as a session."""
    path = nvprof_files.database(random, folder / "a.prof")
    done, pick = [], random.random()
    if pick < 0.65:
        done += _changed(random, path)
    else:
        done += export_pages.change(random, path)
    if random.random() < 0.3:
        raw = nvprof_files.session(path.read_bytes())
        for each in folder.iterdir():
            each.unlink()
        if random.random() < 0.5:
            name, raw = damage.damaged(random, raw)
            done.append(f"session {name}")
        path = folder / "a.nvvp"
        path.write_bytes(raw)
    return Made(path, ", ".join(done))


def _changed(random, path):
    done = []
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        if random.random() < 0.6:
            _without_types(connection, nvprof_files.UM)
        for _ in range(random.choice((1, 2, 4))):
            there = [
                name
                for (name,) in connection.execute(
                    "SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE TABLE%'"
                )
            ]
            there = [name for name in there if name in nvprof_files.SCHEMA]
            table = (
                nvprof_files.UM
                if random.random() < 0.7 and nvprof_files.UM in there
                else random.choice(there)
            )
            names = [
                row[1]
                for row in connection.execute(f"PRAGMA table_info({table})")
                if row[1] != "_id_"
            ]
            if not names:
                continue
            column = random.choice(names)
            ids = [row for (row,) in connection.execute(f"SELECT rowid FROM {table}")]
            try:
                _change(random, connection, table, column, ids)
            except sqlite3.DatabaseError as error:
                done.append(f"({error})")
            else:
                done.append(f"{table[-12:]}.{column}")
    return done


def _without_types(connection, table):
    """Make a table anew that takes cells of any type."""
    names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    connection.execute(f"ALTER TABLE {table} RENAME TO old")
    connection.execute(f"CREATE TABLE {table} ({', '.join(map(quoted, names))})")
    connection.execute(f"INSERT INTO {table} SELECT * FROM old")
    connection.execute("DROP TABLE old")


def _change(random, connection, table, column, ids):
    pick = random.random()
    if pick < 0.06:
        connection.execute(f"ALTER TABLE {table} DROP COLUMN {quoted(column)}")
    elif pick < 0.1:
        connection.execute(f"DROP TABLE {table}")
    elif pick < 0.15:
        connection.execute(f"DELETE FROM {table}")
    else:
        draw = values.integer if random.random() < 0.6 else values.cell
        n = len(ids) if random.random() < 0.15 else min(len(ids), random.randrange(1, 5))
        for row in random.sample(ids, n):
            connection.execute(
                f"UPDATE {table} SET {quoted(column)} = ? WHERE rowid = ?", (draw(random), row)
            )


def _read_by_sql(path):
    try:
        with opened(path) as connection:
            cells = Cells(connection)
            limits = {"start": _START, "end": _END, "counterKind": (1, 8)}
            rows, notes = cells.rows(nvprof_files.UM, _COLUMNS, limits)
            return rows, notes
    except (sqlite3.Error, UnicodeError, OverflowError):
        return None


def _settle(row):
    """Give a row what its kind means by its end and its value."""
    kind, value = row["counterKind"], row["value"]
    if kind in _INSTANTS:
        row["end"] = row["start"]
    if kind != 3 and value is not None and not SIZES[0] <= value <= SIZES[1]:
        row["value"] = None


def expected(rows):
    """By table: how many rows of Unified Memory there are, and what they add up to."""
    for row in rows:
        _settle(row)
    moves = [row for row in rows if row["counterKind"] in _DIRECTIONS]
    faults = [row for row in rows if row["counterKind"] == 4]
    cpu = [row for row in rows if row["counterKind"] == 3]
    moved = {"n": len(moves), "bytes": export_oracle.total(row["value"] for row in moves)}
    for kind, way in _DIRECTIONS.items():
        moved[f"{way}_bytes"] = export_oracle.total(
            r["value"] for r in moves if r["counterKind"] == kind
        )
    counts = export_oracle.total(row["value"] for row in faults)
    return {
        "migrations": (len(moves), moved),
        "gpu_faults": (
            len(faults),
            {"n_rows": len(faults), "n_page_faults": counts, "n_addresses": _places(faults)},
        ),
        "cpu_faults": (len(cpu), {"n": len(cpu), "n_addresses": _places(cpu)}),
    }


def _places(rows):
    found = [row["address"] for row in rows]
    return None if None in found else len(set(found))


def check(made, stores, note_time):
    """Summarise it, and compare the totals of Unified Memory with plain SQL."""
    found = summarised(made, stores)
    note_time()
    with tempfile.TemporaryDirectory(dir=stores.parent) as folder:
        path = (
            made.path
            if made.path.suffix == ".prof"
            else _unpacked(made.path, Path(folder) / "db" / "a.prof")
        )
        read = None if path is None else _read_by_sql(path)
    if found is None:
        return "refused" if read is None else "refused*"
    if read is None and made.path.suffix == ".prof":
        raise WrongError("it was read, and sqlite3 says that it cannot be")
    wrong = [] if read is None else _differences(found[0], *read)
    if wrong:
        raise WrongError("; ".join(wrong[:5]))
    shown(made)
    return "right"


def _differences(document, rows, notes):
    if notes and notes["counterKind"]["lacking"]:
        # Nobody knows what the rows are whose kind is lost.
        return [
            f"{kind}: answered, and kinds are lost"
            for kind in _UM
            if document["capture"][kind] != "unknown"
        ]
    return [
        f"{kind}.{name}: {document[kind][name]}, and plain SQL says {right}"
        for kind, (n, figures) in expected(rows).items()
        for name, right in figures.items()
        if document[kind][name] != right and not (n == 0 and document[kind][name] is None)
    ]


_UM = ("migrations", "gpu_faults", "cpu_faults")


def _unpacked(path, target):
    """Take the database out of a session with plain patterns; None where that fails."""
    text = path.read_bytes().partition(b"<analysispdm")[0]
    try:
        pieces = [
            gzip.decompress(base64.b64decode(piece, validate=True))
            for piece in re.findall(rb"<split>([^<]*)</split>", text)
        ]
    except (ValueError, OSError, EOFError, zlib.error):
        return None
    target.parent.mkdir()
    target.write_bytes(b"".join(pieces))
    return target
