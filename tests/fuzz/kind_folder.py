"""Folders of a Parquet or Arrow export: columns of other types, damaged files, tables that are missing."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq

from fuzz import damage, export_bases, export_oracle, export_rows, values
from fuzz.asking import WrongError
from fuzz.export_compare import differences
from fuzz.export_rows import quoted
from fuzz.made import Made, look_closer_at_trace, shown, summarised

look_closer = look_closer_at_trace
_OTHER_TYPES = (pa.int32(), pa.uint64(), pa.int8(), pa.float64(), pa.string(), pa.large_string(), pa.binary(), pa.bool_(), pa.null(),
                pa.list_(pa.int64()), pa.timestamp("ns"), pa.duration("ns"), pa.dictionary(pa.int32(), pa.string()), pa.float16(),
                pa.decimal128(20, 2), pa.string_view(), pa.struct([("a", pa.int64())]))  # fmt: skip


def make(random, folder):
    """Write an export as a folder of tables; change cells before, types as it is written, and bytes afterwards."""
    scratch = folder.parent / "scratch.sqlite"
    scratch.unlink(missing_ok=True)
    export_bases.write(random, scratch)
    pick, done = random.random(), []
    if pick < 0.5:
        done += export_rows.change(random, scratch)
    kind = random.choice(("parquet", "arrow"))
    place = folder / ("a_pqtdir" if kind == "parquet" else "a_arwdir")
    place.mkdir()
    with closing(sqlite3.connect(scratch)) as connection:
        connection.text_factory = bytes
        for name, table in _tables(random, connection, done, other=pick > 0.4):
            _write(random, table, place / f"{name}.{kind}")
    scratch.unlink()
    if pick > 0.6:
        files = sorted(place.iterdir())
        for _ in range(random.choice((1, 1, 3))):
            file = random.choice(files)
            name, raw = damage.damaged(random, file.read_bytes())
            file.write_bytes(raw)
            done.append(f"{file.stem[-12:]} {name}")
    return Made(place, f"{kind}: " + ", ".join(done))


def _tables(random, connection, done, *, other):
    """Read the tables of a database; some columns get another type, and some tables stay out."""
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    for (raw,) in names:
        name = raw.decode("utf-8", "replace")
        if random.random() < 0.02 or "/" in name or "\0" in name or len(name) > 100:
            continue
        columns = {}
        declared = connection.execute(f"PRAGMA table_info({quoted(name)})").fetchall()
        for _, column, kind, *_ in declared:
            label = column.decode("utf-8", "replace")
            try:
                found = [
                    cell
                    for (cell,) in connection.execute(
                        f"SELECT t.{quoted(label)} FROM {quoted(name)} t"
                    )
                ]
            except sqlite3.Error:
                continue
            dtype = (
                pa.string()
                if kind == b"TEXT"
                else pa.uint64()
                if label.startswith("global")
                else pa.int64()
            )
            if other and random.random() < 0.04:
                dtype = random.choice(_OTHER_TYPES)
                done.append(f"{label[:20]} as {dtype}")
            columns[label] = _array(found, dtype)
        if columns:
            yield name, pa.table(columns)


def _array(cells, dtype):
    """Make a column; cells that do not fit its type are empty in it."""
    return pa.array([_fitting(cell, dtype) for cell in cells], dtype)


def _text(cell):
    return cell.decode("utf-8", "replace") if isinstance(cell, bytes) else str(cell)


_FROM_ANY = {
    pa.null(): lambda _: None,
    pa.string(): _text,
    pa.large_string(): _text,
    pa.string_view(): _text,
    pa.dictionary(pa.int32(), pa.string()): _text,
    pa.binary(): lambda cell: cell if isinstance(cell, bytes) else str(cell).encode(),
}
_FROM_INTEGER = {
    pa.uint64(): lambda n: n % (1 << 64),
    pa.int32(): lambda n: n % 100,
    pa.int8(): lambda n: n % 100,
    pa.list_(pa.int64()): lambda n: [n],
    pa.struct([("a", pa.int64())]): lambda n: {"a": n},
    pa.bool_(): lambda n: n % 2 == 1,
    pa.decimal128(20, 2): lambda n: n % 1000,
    pa.float64(): lambda n: float(n % 1000),
    pa.float16(): lambda n: float(n % 1000),
}


def _fitting(cell, dtype):
    """Give a cell as a column of a type can hold it; None where it cannot."""
    if cell is None:
        return None
    if dtype in _FROM_ANY:
        return _FROM_ANY[dtype](cell)
    return _FROM_INTEGER.get(dtype, int)(cell) if isinstance(cell, int) else None


def _write(random, table, path):
    if path.suffix == ".parquet":
        try:
            pq.write_table(
                table,
                path,
                compression=random.choice(("none", "none", "snappy", "zstd")),
                row_group_size=random.choice((4, 1000)),
                data_page_version=random.choice(("1.0", "2.0")),
                use_dictionary=random.random() < 0.5,
                write_statistics=random.random() < 0.5,
                store_schema=random.random() < 0.5,
            )
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            plain = [
                c
                for c in table.column_names
                if table.schema.field(c).type in {pa.int64(), pa.uint64(), pa.string()}
            ]
            pq.write_table(table.select(plain), path)
        return
    codec = random.choice((None, None, None, "lz4", "zstd"))
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, table.schema, options=options) as writer,
    ):
        writer.write_table(table, max_chunksize=random.choice((None, 3)))


def _read_elsewhere(place):
    """Read a folder with pyarrow into a database of sqlite3."""
    connection = sqlite3.connect(":memory:")
    connection.text_factory = bytes
    wanted = {
        name.lower()
        for name in (*export_oracle.TABLES, export_oracle.STRINGS, *export_oracle.OTHERS)
    }
    for file in sorted(place.iterdir()):
        if file.stem.lower() not in wanted:
            continue
        table = (
            pq.ParquetFile(file).read()
            if file.suffix == ".parquet"
            else pa.ipc.open_stream(file).read_all()
        )
        table.validate(full=True)
        cells = [
            [_cell(value, name) for value in _values(table.column(at))]
            for at, name in enumerate(table.column_names)
        ]
        if not cells:
            continue
        connection.execute(
            f"CREATE TABLE {quoted(file.stem)} ({', '.join(map(quoted, table.column_names))})"
        )
        marks = ", ".join("?" * len(cells))
        connection.executemany(
            f"INSERT INTO {quoted(file.stem)} VALUES ({marks})", zip(*cells, strict=True)
        )
    return connection


def _values(column):
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_temporal(column.type):
        return [
            None if valid is None else b"a time" for valid in column.cast(pa.int64()).to_pylist()
        ]
    if (
        pa.types.is_string(column.type)
        or pa.types.is_large_string(column.type)
        or column.type == pa.string_view()
    ):
        column = column.cast(
            pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
        )
        return [
            None if cell is None else cell.decode("utf-8", "replace") for cell in column.to_pylist()
        ]
    return column.to_pylist()


_TEXTS = frozenset({"value", "text", "name"})


def _cell(value, name):
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value - (1 << 64) if value > values.MAX else value
    if isinstance(value, float):
        return b"nan" if math.isnan(value) else value
    if value is None or isinstance(value, str | bytes):
        return value
    return None if name in _TEXTS else b"something else"


def check(made, stores, note_time):
    """Summarise it, and compare every total with plain SQL over what pyarrow reads."""
    found = summarised(made, stores)
    note_time()
    if found is None:
        return "refused*" if _is_plain(made) else "refused"
    try:
        connection = _read_elsewhere(made.path)
    except (pa.ArrowException, OSError, ValueError, OverflowError, sqlite3.Error):
        shown(made)
        return "read*"
    with closing(connection):
        wrong = differences(export_oracle.Export(connection), *found)
    if wrong:
        raise WrongError("; ".join(wrong[:6]))
    shown(made)
    return "right"


def _is_plain(made):
    """Say whether no byte of it was damaged."""
    return not any(f" {how.__name__}" in made.what for how in damage.DAMAGES)
