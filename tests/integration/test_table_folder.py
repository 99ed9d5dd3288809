"""Folders of a Parquet or Arrow export, made by hand: the same as the database they are made of.

Those that the real nsys makes are in ``test_nsys_reports.py``.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import exports as x
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

import nsan
from nsan.cli import main
from nsan.errors import DamagedExportError, NoPermissionError, NotAStoreError
from nsan.io.arrow_stream import ArrowStream
from nsan.io.parquet_text import with_binary_text
from nsan.io.sqlite_file import SqliteFile
from nsan.io.table_folder import TableFolder
from nsan.schema import TABLES

KINDS = ("parquet", "arrow")


def put(frame, folder, table, kind):
    """Write a table as nsys does: Arrow as a stream, without newer types of text."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{table}.{kind}"
    if kind == "parquet":
        frame.write_parquet(path, compression="uncompressed", row_group_size=2048)
    else:
        frame.write_ipc_stream(path, compat_level=pl.CompatLevel.oldest())
    return path


def table_of(connection, table):
    """Read a table with the types that nsys gives its columns in folders: ids are unsigned."""
    cursor = connection.execute(f'SELECT * FROM "{table}"')
    names = [column[0] for column in cursor.description]
    declared = {row[1]: row[2] for row in connection.execute(f'PRAGMA table_info("{table}")')}
    kinds = {"INTEGER": pl.Int64, "TEXT": pl.String, "REAL": pl.Float64}
    dtypes = {
        name: pl.UInt64 if name.startswith("global") else kinds.get(declared[name], pl.Int64)
        for name in names
    }
    return pl.DataFrame(cursor.fetchall(), schema=dtypes, orient="row")


def folder_of(database, folder, kind, *, without=()):
    """Turn an export into a folder of the same tables."""
    with closing(sqlite3.connect(database)) as connection:
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        for (table,) in connection.execute(query).fetchall():
            if table not in without:
                put(table_of(connection, table), folder, table, kind)
    return folder


def rich_export(path):
    """An export with every kind of event, nulls and an address above 2^63."""
    export = x.Export("2023.4.4", lazy=False)
    export.add(x.GPU_FAULTS, *(x.gpu_fault(i, i + 5, x.VA + i * 4096, n=i) for i in range(9)))
    export.add(x.CPU_FAULTS, x.cpu_fault(3, function=3, module=4, pc=-(1 << 47)))
    export.add(x.MEMCPY, *(x.migration(i * 10, i * 10 + 5, 4096) for i in range(5000)))
    export.add(x.MEMCPY, x.copy(7, 9, 100), x.migration(1, 2, 3, -(1 << 40), cause=x.EVICTION))
    export.add(x.KERNEL, x.kernel(0, 100)).add(x.RUNTIME, x.api_call(0, 5))
    export.add(
        x.NVTX, x.nvtx(0, 90, "a"), x.nvtx(5, None, None, text_id=1), x.nvtx(1, 1, "b", kind=34)
    )
    export.add(x.MEMORY, x.memory_event(1, x.VA, 4096), x.memory_event(9, x.VA, 4096, free=True))
    return export.write(path)


def frames(path):
    trace = nsan.open_trace(path)
    return {name: getattr(trace, name).collect() for name in TABLES}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_tables_and_the_summary_of_its_database(kind, tmp_path):
    database = rich_export(tmp_path / "a.sqlite")
    folder = folder_of(database, tmp_path / "folder", kind)
    expected, found = frames(database), frames(folder)
    assert expected["migrations"].height == 5001
    for name in TABLES:
        assert_frame_equal(found[name], expected[name])
    own = {"source": "folder", "source_kind": f"nsys-{kind}"}
    assert nsan.summary(folder) == {**nsan.summary(database), **own}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_without_capture_options_answers_unknown(kind, tmp_path, capsys):
    export = x.Export().add(x.MEMCPY, x.migration(0, 5, 4096)).write(tmp_path / "a.sqlite")
    folder = folder_of(export, tmp_path / "folder", kind, without=["META_DATA_CAPTURE"])
    info = nsan.open_trace(folder).info
    assert info.capture["gpu_faults"].answer == "unknown"
    assert info.capture["migrations"].answer == "recorded"
    assert info.nsys_version.startswith("2023.4.4")
    assert main([str(folder)]) == 0
    assert "folder" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_chosen_tables_is_known_by_their_names(kind, tmp_path):
    rows = pl.DataFrame([x.migration(0, 5, 4096)])
    put(rows, tmp_path / "folder", x.MEMCPY, kind)
    trace = nsan.open_trace(tmp_path / "folder")
    assert trace.migrations.collect()["bytes"].to_list() == [4096]
    assert trace.info.nsys_version is None


def test_where_both_formats_are_there_parquet_is_read(tmp_path):
    folder = tmp_path / "folder"
    put(pl.DataFrame([x.migration(0, 5, 4096)]), folder, x.MEMCPY, "parquet")
    put(pl.DataFrame([x.migration(0, 5, 1)] * 2), folder, x.MEMCPY, "arrow")
    opened = TableFolder(folder)
    assert (opened.kind, opened.table_names) == ("nsys-parquet", [x.MEMCPY])
    assert opened.row_ranges(x.MEMCPY, rows=9) == [(0, 0)]


def test_a_folder_without_tables_is_no_export(tmp_path):
    with pytest.raises(NotAStoreError):
        TableFolder(tmp_path)


# One table


@pytest.fixture
def opened(tmp_path):
    """Write a table and open its folder."""
    folders = []

    def make(frame, kind, table="T"):
        put(frame, tmp_path / "folder", table, kind)
        folders.append(TableFolder(tmp_path / "folder"))
        return folders[-1]

    yield make
    for folder in folders:
        folder.close()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_cut_into_ranges_that_meet(kind, opened):
    folder = opened(pl.DataFrame({"a": range(10)}), kind)
    ranges = folder.row_ranges("t", rows=4)
    assert ranges == [(0, 3), (4, 7), (8, 9)]
    parts = [folder.read("T", {"A": "integer"}, between)[0] for between in ranges]
    assert pl.concat(parts)["A"].to_list() == list(range(10))


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_without_rows_has_no_ranges(kind, opened):
    folder = opened(pl.DataFrame(schema={"a": pl.Int64}), kind)
    assert folder.has_table("t")
    assert not folder.has_table("u")
    assert folder.columns("u") == {}
    assert folder.columns("t") == {"a": "a"}
    assert folder.row_ranges("T", rows=4) == []


@pytest.mark.parametrize("kind", KINDS)
def test_absent_columns_are_null_for_each_row(kind, opened):
    folder = opened(pl.DataFrame({"a": [1, 2, 3]}), kind)
    rows, lost = folder.read("T", {"b": "text", "c": "integer"}, (1, 2))
    assert rows.schema == {"b": pl.String, "c": pl.Int64}
    assert rows.rows() == [(None, None)] * 2
    assert lost == {}


COLUMNS = {
    "whole": pl.Series([1, None, -3], dtype=pl.Int32),
    "small": pl.Series([1, None, 255], dtype=pl.UInt8),
    "unsigned": pl.Series([1, None, 0xFFFF_8000_0000_0001], dtype=pl.UInt64),
    "real": pl.Series([1.5, None, 2.0], dtype=pl.Float32),
    "text": pl.Series(["a", None, "é"]),
    "bytes": pl.Series([b"a", None, b"\xff"]),
    "truth": pl.Series([True, None, False]),
    "category": pl.Series(["a", None, "b"], dtype=pl.Categorical),
    "choice": pl.Series(["a", None, "b"], dtype=pl.Enum(["a", "b"])),
    "nothing": pl.Series([None, None, None], dtype=pl.Null),
    "list": pl.Series([[1], None, [2, 3]]),
}
UNSIGNED = 0xFFFF_8000_0000_0001 - (1 << 64)
READ = {  # column, asked for as: values, cells lost
    ("whole", "integer"): ([1, None, -3], 0),
    ("whole", "real"): ([1.0, None, -3.0], 0),
    ("whole", "text"): (["1", None, "-3"], 0),
    ("small", "integer"): ([1, None, 255], 0),
    ("unsigned", "integer"): ([1, None, UNSIGNED], 0),
    ("real", "integer"): ([None] * 3, 2),
    ("real", "real"): ([1.5, None, 2.0], 0),
    ("real", "text"): (["1.5", None, "2.0"], 0),
    ("text", "text"): (["a", None, "é"], 0),
    ("text", "integer"): ([None] * 3, 2),
    ("text", "real"): ([None] * 3, 2),
    ("bytes", "text"): (["a", None, "�"], 0),
    ("bytes", "integer"): ([None] * 3, 2),
    ("truth", "integer"): ([1, None, 0], 0),
    ("category", "text"): (["a", None, "b"], 0),
    ("category", "integer"): ([None] * 3, 2),
    ("choice", "text"): (["a", None, "b"], 0),
    ("nothing", "text"): ([None] * 3, 0),
    ("nothing", "integer"): ([None] * 3, 0),
    ("list", "text"): ([None] * 3, 2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("column", "asked"), READ)
def test_each_type_of_column_is_fitted_or_counted_as_lost(column, asked, kind, opened):
    values, n_lost = READ[column, asked]
    folder = opened(pl.DataFrame({"c": COLUMNS[column], "d": [7, 8, 9]}), kind)
    rows, lost = folder.read("T", {"c": asked, "d": "integer"}, (0, 2))
    assert rows["c"].to_list() == values
    assert rows["d"].to_list() == [7, 8, 9]
    assert lost == ({"c": n_lost} if n_lost else {})


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_lost_is_what_a_database_loses(kind, opened, tmp_path):
    columns = {"whole": "integer", "real": "integer", "text": "real", "other": "integer"}
    cells = {"whole": [1, None, 3], "real": [1.5, None, 2.5], "text": ["a", None, "c"]}
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as connection:
        connection.execute("CREATE TABLE T (whole, real, text)")
        rows = zip(*cells.values(), strict=True)
        connection.executemany("INSERT INTO T VALUES (?, ?, ?)", rows)
        connection.commit()
    with SqliteFile(tmp_path / "a.sqlite") as database:
        expected, lost = database.read("T", columns, (1, 3))
    found, also_lost = opened(pl.DataFrame(cells), kind).read("T", columns, (0, 2))
    assert_frame_equal(found, expected)
    assert also_lost == lost == {"real": 2, "text": 2}


# Arrow streams


NUMBERS = st.none() | st.integers(-(1 << 63), (1 << 63) - 1)


@given(
    rows=st.lists(st.tuples(NUMBERS, st.none() | st.text(), st.none() | st.floats())),
    sizes=st.lists(st.integers(1, 9), max_size=3),
    data=st.data(),
)
def test_any_stretch_of_a_stream_is_what_polars_reads(rows, sizes, data):
    schema = {"a": pl.Int64, "b": pl.String, "c": pl.Float64}
    whole = pl.DataFrame(rows, schema=schema, orient="row")
    first = data.draw(st.integers(0, max(0, len(rows) - 1)))
    n = data.draw(st.integers(0, len(rows) - first))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "T.arrow"
        with file.open("wb") as out:
            in_batches(whole, sizes).write_ipc_stream(out, compat_level=pl.CompatLevel.oldest())
        stream = ArrowStream(file)
        assert stream.n_rows == len(rows)
        if n:
            found = stream.rows(["c", "a", "b"], first, n)
            text = pl.col("b").cast(pl.String)
            expected = whole.slice(first, n).select("c", "a", "b")
            assert_frame_equal(found.with_columns(text), expected)
        stream.close()


def in_batches(frame, sizes):
    """Cut a frame into chunks, each of which becomes a batch of a stream."""
    parts, at = [], 0
    for size in sizes:
        parts.append(frame.slice(at, size))
        at += size
    return pl.concat([*parts, frame.slice(at)], rechunk=False)


def test_text_with_wide_and_narrow_offsets_is_read(tmp_path):
    # polars writes wide offsets only; nsys writes narrow ones.
    wide = pl.DataFrame({"b": ["ab", "", "cde"]})
    stream = ArrowStream(put(wide, tmp_path, "T", "arrow"))
    assert stream.rows(["b"], 1, 2)["b"].to_list() == [b"", b"cde"]
    stream.close()


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.9])
def test_a_stream_that_is_cut_short_is_damaged(keep, tmp_path):
    file = put(pl.DataFrame({"a": range(1000)}), tmp_path, "StringIds", "arrow")
    raw = file.read_bytes()
    file.write_bytes(raw[: keep if isinstance(keep, int) else int(len(raw) * keep)])
    with pytest.raises(DamagedExportError, match=r"StringIds\.arrow is damaged"):
        TableFolder(tmp_path).row_ranges("StringIds", rows=9)


@given(data=st.data())
def test_a_stream_with_spoilt_bytes_is_read_or_refused(data):
    with tempfile.TemporaryDirectory() as folder:
        frame = pl.DataFrame({"a": [1, None, 3], "b": ["x", None, "yy"]})
        file = put(frame, Path(folder), "T", "arrow")
        raw = bytearray(file.read_bytes())
        for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=3)):
            raw[at] = data.draw(st.integers(0, 255))
        file.write_bytes(raw)
        tables = TableFolder(Path(folder))
        with contextlib.suppress(DamagedExportError):
            for between in tables.row_ranges("T", rows=9):
                assert tables.read("T", {"a": "integer", "b": "text"}, between)[0].width == 2
        tables.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raw", [b"", b"garbage" * 99, b"\xff\xff\xff\xff\x00\x10\x00\x00" * 9])
def test_a_file_that_is_none_is_an_error_of_the_command_line(kind, raw, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / f"StringIds.{kind}").write_bytes(raw)
    assert main([str(tmp_path / "folder")]) == 1
    err = capsys.readouterr().err
    assert f"StringIds.{kind} is damaged" in err
    assert "Traceback" not in err


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    put(pl.DataFrame({"a": [1]}), tmp_path, "T", "arrow")

    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(NoPermissionError, match=r"T\.arrow"):
        TableFolder(tmp_path).row_ranges("T", rows=9)


# Text that is not UTF-8


def with_bad_text(path):
    """Spoil the text of a Parquet file: polars itself writes none that is not UTF-8."""
    raw = path.read_bytes()
    assert raw.count(b"spoil me") >= 1
    path.write_bytes(raw.replace(b"spoil me", b"spoil \xff\xfe"))
    return path


def test_one_text_that_is_not_utf8_costs_no_other(tmp_path):
    names = [f"name {i}" for i in range(5000)]
    names[4000] = "spoil me"
    path = put(pl.DataFrame({"id": range(5000), "value": names}), tmp_path, "StringIds", "parquet")
    with_bad_text(path)
    before = path.read_bytes()
    folder = TableFolder(tmp_path)
    parts = [
        folder.read("StringIds", {"id": "integer", "value": "text"}, between)
        for between in folder.row_ranges("StringIds", rows=2048)
    ]
    folder.close()
    names[4000] = "spoil ��"
    assert pl.concat([rows for rows, _ in parts])["value"].to_list() == names
    assert [lost for _, lost in parts] == [{}] * 3
    assert path.read_bytes() == before


def test_a_name_that_is_not_utf8_is_kept_in_a_trace(tmp_path):
    export = x.Export()
    export.add(x.NVTX, x.nvtx(0, 9, "spoil me"), x.nvtx(1, 2, "fine"))
    folder = folder_of(export.write(tmp_path / "a.sqlite"), tmp_path / "folder", "parquet")
    with_bad_text(folder / f"{x.NVTX}.parquet")
    assert frames(folder)["nvtx_ranges"]["name"].to_list() == ["spoil ��", "fine"]


def test_a_footer_that_cannot_be_walked_is_an_error(tmp_path):
    path = put(pl.DataFrame({"a": ["x"]}), tmp_path, "T", "parquet")
    raw = path.read_bytes()
    size = int.from_bytes(raw[-8:-4], "little")
    path.write_bytes(raw[: -8 - size] + b"\x1b" * size + raw[-8:])
    with pytest.raises(ValueError, match="footer"):
        with_binary_text(path)
    path.write_bytes(raw[:-4] + b"NONE")
    with pytest.raises(ValueError, match="footer"):
        with_binary_text(path)


@pytest.mark.parametrize(
    "raw",
    [b"\x00\x00\x00\x00PAR1", b"\x99\x00\x00\x00PAR1", b"\xff" * 40 + b"\x28\x00\x00\x00PAR1"],
)
def test_a_footer_that_ends_too_early_is_an_error(raw, tmp_path):
    path = tmp_path / "T.parquet"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="footer"):
        with_binary_text(path)


# Stores


def test_a_folder_within_the_folder_is_passed_over(tmp_path):
    folder = folder_of(rich_export(tmp_path / "a.sqlite"), tmp_path / "folder", "parquet")
    (folder / "mine").mkdir()
    assert nsan.summary(folder)["gpu_faults"]["n_rows"] == 9


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_is_made_again_when_a_table_of_the_folder_changes(kind, tmp_path):
    database = rich_export(tmp_path / "a.sqlite")
    folder = folder_of(database, tmp_path / "folder", kind)
    assert nsan.summary(folder)["gpu_faults"]["n_rows"] == 9
    put(pl.DataFrame([x.gpu_fault(1, 2)]), folder, x.GPU_FAULTS, kind)
    assert nsan.summary(folder)["gpu_faults"]["n_rows"] == 1
    shutil.rmtree(tmp_path / "cache")
    assert nsan.summary(folder)["gpu_faults"]["n_rows"] == 1


def test_a_table_at_which_polars_panics_is_damaged(tmp_path, monkeypatch):
    """Some damaged Parquet files end polars with a panic, which is none of Python's exceptions."""

    def panic(*_, **__):
        raise pl.exceptions.PanicException("assertion failed: offset + length <= self.length")

    export = x.Export().add(x.MEMCPY, x.migration(0, 5, 4096)).write(tmp_path / "a.sqlite")
    folder = folder_of(export, tmp_path / "folder", "parquet")
    tables = TableFolder(folder)
    (between,) = tables.row_ranges(x.MEMCPY, rows=9)
    monkeypatch.setattr(pl.LazyFrame, "collect", panic)
    with pytest.raises(DamagedExportError, match=r"MEMCPY\.parquet is damaged: assert"):
        tables.read(x.MEMCPY, {"bytes": "integer"}, between)
