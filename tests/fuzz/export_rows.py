"""Changes to an export through sqlite3: what a cell, a row, a table can be without being corrupt."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import exports as x

from fuzz import values

EVENTS = (
    x.GPU_FAULTS,
    x.CPU_FAULTS,
    x.MEMCPY,
    x.MEMSET,
    x.KERNEL,
    x.GRAPH,
    x.RUNTIME,
    x.NVTX,
    x.MEMORY,
)


class Database:
    """An export that is being changed."""

    def __init__(self, random, connection):
        self.random = random
        self.connection = connection

    def ask(self, query, *parameters):
        return self.connection.execute(query, parameters).fetchall()

    def tables(self):
        found = self.ask(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        )
        return sorted(name for (name,) in found)

    def table(self, *, events=0.85):
        """Draw a table: mostly one of events."""
        there = self.tables()
        chosen = [name for name in there if name in EVENTS]
        return self.random.choice(chosen if chosen and self.random.random() < events else there)

    def columns(self, table):
        return [row[1] for row in self.ask(f'PRAGMA table_xinfo("{table}")') if row[6] == 0]

    def column(self, table):
        """Draw a column: mostly one that matters."""
        names = self.columns(table)
        telling = [name for name in names if name in _TELLING]
        return self.random.choice(telling if telling and self.random.random() < 0.8 else names)

    def rows(self, table, most=5):
        """Draw some rows."""
        ids = [row for (row,) in self.ask(f'SELECT rowid FROM "{table}"')]
        n = len(ids) if self.random.random() < 0.15 else self.random.randrange(1, most + 1)
        return self.random.sample(ids, min(len(ids), n))

    def put(self, table, column, row, value):
        self.connection.execute(
            f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = ?', (value, row)
        )

    def again(self, table, declare):
        """Make a table again with other declarations of its columns; rows keep their order."""
        names = ", ".join(f'"{name}"' for name in self.columns(table))
        self.connection.execute(f'ALTER TABLE "{table}" RENAME TO "old of {table}"')
        self.connection.execute(declare(self.columns(f"old of {table}")))
        self.connection.execute(
            f'INSERT INTO "{table}" ({names}) SELECT {names} FROM "old of {table}"'
        )
        self.connection.execute(f'DROP TABLE "old of {table}"')


_TELLING = frozenset(
    [
        "start",
        "end",
        "globalPid",
        "globalTid",
        "deviceId",
        "address",
        "virtualAddress",
        "bytes",
        "copyKind",
        "migrationCause",
        "numberOfPageFaults",
        "faultAccessType",
        "eventType",
        "text",
        "textId",
        "domainId",
        "memKind",
        "memoryOperationType",
        "nameId",
        "id",
        "value",
        "shortName",
        "correlationId",
        "copyCount",
        "timestamp",
        "utcEpochNs",
        "cuDevice",
        "gpuId",
        "cudaId",
        "pid",
        "name",
    ]
)


def other_cells(db):
    """Cells of any type, past the affinity of their column."""
    table = db.table()
    column = db.column(table)
    if db.random.random() < 0.4:
        db.again(table, lambda names: f'CREATE TABLE "{table}" ({", ".join(map(quoted, names))})')
    for row in db.rows(table):
        value = values.cell(db.random)
        db.put(table, column, row, value)


def quoted(name):
    return '"' + name.replace('"', '""') + '"'


def other_numbers(db):
    """Numbers at and beyond every limit."""
    table = db.table()
    column = db.column(table)
    for row in db.rows(table):
        db.put(table, column, row, values.integer(db.random))


def bad_text(db):
    """Text that is not UTF-8, hostile or long, stored as text."""
    table = db.random.choice([t for t in db.tables() if t in _TEXTS] or ["StringIds"])
    column = db.random.choice(
        [c for c in db.columns(table) if c in {"text", "value", "name", "chipName"}] or ["value"]
    )
    for row in db.rows(table, 2):
        raw = (
            db.random.choice(values.RAW)
            if db.random.random() < 0.3
            else values.encoded(values.text(db.random))
        )
        db.connection.execute(
            f'UPDATE "{table}" SET "{column}" = CAST(? AS TEXT) WHERE rowid = ?', (raw, row)
        )


_TEXTS = frozenset(
    {
        "StringIds",
        x.NVTX,
        "PROCESSES",
        "DIAGNOSTIC_EVENT",
        x.GPU,
        "META_DATA_CAPTURE",
        "META_DATA_EXPORT",
    }
)


def nothing(db):
    """Empty cells."""
    table = db.table()
    column = db.column(table)
    for row in db.rows(table, 20):
        db.put(table, column, row, None)


def times(db):
    """Times that are negative, reversed, equal, far apart."""
    table = db.random.choice([t for t in db.tables() if t in EVENTS])
    if not {"start", "end"} <= set(db.columns(table)):
        return
    change = db.random.choice(
        ("start = end, end = start", "start = -start, end = -end", "end = start", "start = 0, end = 0",
         "end = end + 1000000000000000000", "start = start - 2305843009213693952", "end = 0", "start = start * 1000003 % 9999991")
    )  # fmt: skip
    for row in db.rows(table, 20):
        db.connection.execute(f'UPDATE "{table}" SET {change} WHERE rowid = ?', (row,))


def enumerators(db):
    """Numbers of kinds that are not known yet."""
    for column in (
        "copyKind",
        "migrationCause",
        "faultAccessType",
        "memKind",
        "eventType",
        "memoryOperationType",
    ):
        for table in db.tables():
            if column in db.columns(table) and db.random.random() < 0.4:
                for row in db.rows(table):
                    db.put(
                        table,
                        column,
                        row,
                        db.random.choice((0, 5, 6, 9, 11, 12, 13, 14, 33, 75, 99, -1, 1 << 40)),
                    )


def ids(db):
    """Ids without a text, texts with one id, an id given to other texts."""
    pick = db.random.randrange(3)
    if pick == 0:
        db.connection.execute(
            "DELETE FROM StringIds WHERE rowid % 2 = ?", (db.random.randrange(2),)
        )
    elif pick == 1:
        db.again("StringIds", lambda _: "CREATE TABLE StringIds (id INTEGER, value TEXT)")
        db.connection.execute("INSERT INTO StringIds SELECT id, value || ' again' FROM StringIds")
    else:
        db.connection.execute("UPDATE StringIds SET value = (SELECT value FROM StringIds LIMIT 1)")


def doubled(db):
    """Rows twice, or in another order, with gaps between their ids."""
    table = db.random.choice([t for t in db.tables() if t in EVENTS])
    names = ", ".join(quoted(c) for c in db.columns(table))
    pick = db.random.randrange(3)
    if pick == 0:
        db.connection.execute(f'INSERT INTO "{table}" ({names}) SELECT {names} FROM "{table}"')
    elif pick == 1:
        db.connection.execute(f'UPDATE "{table}" SET rowid = -rowid')
    else:
        db.connection.execute(
            f'UPDATE "{table}" SET rowid = rowid * ?', (db.random.choice((1 << 40, 1 << 55)),)
        )


def nesting(db):
    """NVTX ranges that cross, hold one another, never close, end before they start; domains nobody made."""
    kinds = (59, 60, 70, 71, 34, 75, 61)
    pushed = []
    for _ in range(db.random.choice((3, 12, 200))):
        start = db.random.randrange(100)
        end = db.random.choice(
            (start, start - 5, start + 1, db.random.randrange(100), None, values.MAX)
        )
        kind = 59 if db.random.random() < 0.7 else db.random.choice(kinds)
        pushed.append(
            x.nvtx(
                start,
                end,
                db.random.choice((None, "a", "")),
                kind=kind,
                domain=db.random.choice((0, 0, 3, None)),
            )
        )
    if x.NVTX not in db.tables():
        return
    names = db.columns(x.NVTX)
    known = [name for name in pushed[0] if name in names]
    marks = ", ".join("?" * len(known))
    listed = ", ".join(quoted(name) for name in known)
    required = {r[1] for r in db.ask(f'PRAGMA table_info("{x.NVTX}")') if r[3]}
    for row in pushed:
        cells = [0 if row[name] is None and name in required else row[name] for name in known]
        db.connection.execute(f'INSERT INTO "{x.NVTX}" ({listed}) VALUES ({marks})', cells)
    parents = [name for name in names if "arent" in name or name == "rangeId"]
    for name in parents:  # a parent that is its own child
        db.connection.execute(f'UPDATE "{x.NVTX}" SET {quoted(name)} = rowid')


def columns(db):
    """Columns that are missing, have another name or case, or more of them."""
    table = db.table()
    column = db.column(table)
    pick = db.random.randrange(5)
    if pick == 0 and len(db.columns(table)) > 1:
        db.connection.execute(f'ALTER TABLE "{table}" DROP COLUMN {quoted(column)}')
    elif pick == 1:
        other = db.random.choice(
            (column.upper(), column + "2", "rowid", 'a"b', "", " ", "\u202e", "x" * 3000, "select")
        )
        if (
            other.lower() not in {c.lower() for c in db.columns(table)}
            or other.lower() == column.lower()
        ):
            db.connection.execute(
                f'ALTER TABLE "{table}" RENAME COLUMN {quoted(column)} TO {quoted(other)}'
            )
    elif pick == 2:
        more = (f"more{i} INTEGER DEFAULT 7" for i in range(db.random.choice((1, 300))))
        for each in more:
            db.connection.execute(f'ALTER TABLE "{table}" ADD COLUMN {each}')
    elif pick == 3:
        other = db.random.choice((table.upper(), table.lower(), table + "S", "sqlit e", "x\ny"))
        db.connection.execute(f'ALTER TABLE "{table}" RENAME TO {quoted(other + "~")}')
        db.connection.execute(f"ALTER TABLE {quoted(other + '~')} RENAME TO {quoted(other)}")
    else:
        db.connection.execute(f'DROP TABLE "{table}"')


def kinds_of_table(db):
    """Views, tables without row ids, generated columns, strict ones, triggers, indices."""
    table = db.table()
    names = db.columns(table)
    listed = ", ".join(map(quoted, names))
    pick = db.random.randrange(6)
    if pick == 0:
        db.connection.execute(f'ALTER TABLE "{table}" RENAME TO "real {table}"')
        db.connection.execute(f'CREATE VIEW "{table}" AS SELECT * FROM "real {table}"')
    elif pick == 1:
        db.connection.execute(f'ALTER TABLE "{table}" ADD COLUMN "_key" INTEGER')
        db.connection.execute(f'UPDATE "{table}" SET "_key" = rowid')
        db.again(
            table,
            lambda all_: (
                f'CREATE TABLE "{table}" ({", ".join(map(quoted, all_[:-1]))}, "_key" INTEGER PRIMARY KEY) WITHOUT ROWID'
            ),
        )
    elif pick == 2:
        column = quoted(db.column(table))
        rest = ", ".join(quoted(n) for n in names if quoted(n) != column)
        if rest:
            stored = db.random.choice(("STORED", "VIRTUAL"))
            value = db.random.choice(
                ("4096", "'text'", "1 / 0", "1.5", "rowid_of", "abs(-9223372036854775807)")
            )
            value = value.replace("rowid_of", "NULL")
            db.connection.execute(f'ALTER TABLE "{table}" RENAME TO "old {table}"')
            db.connection.execute(
                f'CREATE TABLE "{table}" ({rest}, {column} AS ({value}) {stored})'
            )
            db.connection.execute(
                f'INSERT INTO "{table}" ({rest}) SELECT {rest} FROM "old {table}"'
            )
            db.connection.execute(f'DROP TABLE "old {table}"')
    elif pick == 3:
        db.connection.execute(
            f'CREATE TRIGGER "t {table}" AFTER INSERT ON "{table}" BEGIN DELETE FROM "{table}"; END'
        )
    elif pick == 4:
        db.connection.execute(f'CREATE INDEX "i {table}" ON "{table}" ({listed})')
    else:
        db.again(
            table,
            lambda all_: (
                f'CREATE TABLE "{table}" ({", ".join(quoted(n) + " ANY" for n in all_)}) STRICT'
            ),
        )


def metadata(db):
    """What an export says of itself."""
    tables = [t for t in db.tables() if t.startswith(("META_DATA", "EXPORT_META", "TARGET_INFO"))]
    if not tables:
        return
    table = db.random.choice(tables)
    if {"name", "value"} <= set(db.columns(table)):
        known = ("EXPORT_CONFIG_TIME_SHIFT", "EXPORT_PARAM_LAZY", "EXPORT_SCHEMA_VERSION", "EXPORT_PRODUCT_NAME",
                 "COLLECT_CUDA_TRACE", "EXPORT_PARAM_TABLES_TO_EXPORT", "NvDriverVersion", "EXPORT_PRODUCT_VERSION")  # fmt: skip
        value = db.random.choice(
            (
                "",
                "true",
                "0",
                "-5",
                "123456789",
                "9" * 30,
                "3.99.1",
                "nsan UVM driver model",
                values.text(db.random),
            )
        )
        value = value.encode("utf-8", "replace").decode()
        db.connection.execute(
            f'INSERT INTO "{table}" (name, value) VALUES (?, ?)', (db.random.choice(known), value)
        )
    else:
        for row in db.rows(table):
            db.put(table, db.column(table), row, values.cell(db.random))


CHANGES = (
    other_cells, other_cells, other_numbers, other_numbers, bad_text, nothing, times, enumerators, ids, doubled, nesting,
    columns, kinds_of_table, metadata,
)  # fmt: skip


def change(random, path):
    """Change an export in some ways; return their names."""
    done = []
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = MEMORY")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA legacy_alter_table = ON")
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        db = Database(random, connection)
        connection.execute("BEGIN")
        for _ in range(random.choice((1, 1, 2, 3))):
            how = random.choice(CHANGES)
            connection.execute("SAVEPOINT one")
            try:
                how(db)
            except (sqlite3.DatabaseError, IndexError, ValueError) as error:
                # A rule of the database forbids this one, as NOT NULL does: the export stays as it was.
                connection.execute("ROLLBACK TO one")
                done.append(f"({how.__name__}: {error})")
            else:
                done.append(how.__name__)
        connection.execute("COMMIT")
    return done
