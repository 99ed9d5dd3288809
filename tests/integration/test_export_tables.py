"""Tables for other programs: a folder that says what is in it, put in place whole, over nothing of anybody's."""

from __future__ import annotations

import csv
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import exports as x
import polars as pl
import pytest

from nsan.cli import main
from nsan.schema import TABLES

SAMPLES = x.REPOSITORY / "sample_data"
ADD = SAMPLES / "um_vector_add_rtx4060l.sqlite"
STREAM = SAMPLES / "model" / "stream" / "stream.sqlite"


def export(*arguments):
    return main(["export", *map(str, arguments)])


def index_of(folder):
    return json.loads((folder / "tables.json").read_text())


def ask(trace, query):
    with closing(sqlite3.connect(trace)) as connection:
        return connection.execute(query).fetchall()


def test_every_table_that_has_rows_is_a_file_with_those_rows(tmp_path, capsys):
    place = tmp_path / "tables"
    assert export(ADD, "--to", "parquet", "-o", place) == 0
    assert capsys.readouterr().out == ""
    moved = pl.read_parquet(place / "migrations.parquet")
    query = f"select start, end, bytes, virtualAddress from {x.MEMCPY} where copyKind > 10 order by start"
    assert moved.select("start_ns", "end_ns", "bytes", "va").rows() == ask(ADD, query)
    index = index_of(place)
    names = {each["name"] for each in index["tables"]}
    assert names == {"migrations", "kernels", "api_calls", "devices", "processes"}
    assert {file.name for file in place.iterdir()} == {
        *(f"{name}.parquet" for name in names),
        "tables.json",
        "README.md",
    }
    for each in index["tables"]:
        frame = pl.read_parquet(place / each["file"])
        assert frame.height == each["n_rows"] > 0
        assert frame.schema == TABLES[each["name"]].schema
        assert [column["name"] for column in each["columns"]] == frame.columns
        assert all(column["doc"] and column["unit"] for column in each["columns"])


def test_the_index_says_what_was_not_recorded_and_how_sure_each_column_is(tmp_path):
    assert export(ADD, "--to", "parquet", "--analyses", "batches", "-o", tmp_path / "t") == 0
    index = index_of(tmp_path / "t")
    assert index["source"] == "um_vector_add_rtx4060l.sqlite"
    assert index["capture"]["gpu_faults"]["answer"] == "not_recorded"
    kinds = {
        each["name"]: {column["name"]: column["kind"] for column in each["columns"]}
        for each in index["tables"]
    }
    assert kinds["migrations"]["bytes"] == "recorded"
    assert kinds["batches"]["bytes"] == "reconstructed"
    assert export(STREAM, "--to", "csv", "--tables", "kernels", "-o", tmp_path / "m") == 0
    modelled = index_of(tmp_path / "m")
    assert modelled["note"].startswith("Everything here was written by nsan's UVM driver model")
    assert {column["kind"] for column in modelled["tables"][0]["columns"]} == {"modelled"}


def test_csv_has_hexadecimal_addresses_empty_nulls_and_no_formula(tmp_path):
    made = x.Export()
    made.strings |= {5: "=cmd|'/c calc'!A0", 6: 'a "b",\r\nc'}
    made.add(x.MEMCPY, x.migration(0, 10, 4096, -4096), x.migration(20, 30, 4096, None))
    made.add(x.KERNEL, x.kernel(0, 10, name=5), x.kernel(20, 30, name=6), x.kernel(40, 50))
    trace = made.write(tmp_path / "a.sqlite")
    assert export(trace, "--to", "csv", "-o", tmp_path / "t") == 0

    def rows(name):
        with (tmp_path / "t" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    assert [row["va"] for row in rows("migrations")] == ["0xfffffffffffff000", ""]
    kernels = rows("kernels")
    assert [row["name"] for row in kernels] == ["'=cmd|'/c calc'!A0", 'a "b",\r\nc', "add"]
    assert kernels[0]["grid"] == "1 1 1"
    assert kernels[0]["is_graph_launch"] == "false"


def test_filters_and_names_choose_what_is_written(tmp_path):
    words = ("--tables", "migrations,gpu-faults", "--filter-time", "/266ms")
    assert export(ADD, "--to", "parquet", *words, "-o", tmp_path / "t") == 0
    index = index_of(tmp_path / "t")
    # What was asked for by name is there, with no row too.
    assert [(each["name"], each["n_rows"]) for each in index["tables"]] == [
        ("migrations", ask(ADD, f"select count(*) from {x.MEMCPY} where start < 266000000")[0][0]),
        ("gpu_faults", 0),
    ]
    assert index["filters"] == {"time": "/266ms"}
    assert "part of the capture" in (tmp_path / "t" / "README.md").read_text()


def test_what_does_not_exist_is_refused_before_anything_is_written(tmp_path, capsys):
    assert export(ADD, "--to", "csv", "--tables", "migratoins", "-o", tmp_path / "t") == 2
    assert "migrations" in capsys.readouterr().err
    assert export(ADD, "--to", "csv", "--analyses", "batch", "-o", tmp_path / "t") == 2
    assert "batches" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []


@pytest.mark.parametrize(
    "words",
    [
        ("--to", "csv"),
        ("--to", "perfetto", "--tables", "kernels", "-o", "x"),
        ("--to", "parquet", "--chart", "batch_rate", "-o", "x"),
        ("--to", "csv", "--tables", "", "-o", "x"),
        ("--to", "csv", "--analyses", ",", "-o", "x"),
        ("--to", "csv", "--snapshot", ADD, "--analyses", "batches", "-o", "x"),
        ("--chart", "batch_rate", "--tables", "kernels", "-o", "x.svg"),
    ],
)
def test_options_that_do_not_go_together_are_refused_not_ignored(
    words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert export(ADD, *words) == 2
    assert capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []


def test_a_folder_is_replaced_only_when_asked_and_only_if_it_is_such_an_export(tmp_path, capsys):
    place, other = tmp_path / "t", tmp_path / "mine"
    assert export(ADD, "--to", "csv", "-o", place) == 0
    assert export(ADD, "--to", "parquet", "-o", place) == 1
    assert "--force-overwrite" in capsys.readouterr().err
    assert (place / "migrations.csv").exists()
    assert export(ADD, "--to", "parquet", "--force-overwrite", "-o", place) == 0
    assert not (place / "migrations.csv").exists()
    assert (place / "migrations.parquet").exists()
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    assert export(ADD, "--to", "parquet", "--force-overwrite", "-o", other) == 1
    assert (other / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["mine", "t"]


def everything_in(folder):
    return {
        path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")
    }


def an_index(text):
    return lambda folder: (folder / "tables.json").write_text(text)


def a_link(folder):
    (folder / "kernels.csv").unlink()
    (folder / "kernels.csv").symlink_to(ADD)


FOREIGN = {
    "no object": an_index("[1]"),
    "no index of ours": an_index('{"tables": [{"name": "kernels", "file": "kernels.csv"}]}'),
    "of another program": an_index(
        '{"schema": 1, "written_by": "dbt 1", "tables": [{"file": "kernels.csv"}]}'
    ),
    "odd": an_index('{"schema": 1, "written_by": "nsan 1", "tables": {"file": "kernels.csv"}}'),
    "no text": lambda folder: (folder / "tables.json").write_bytes(b"\xff\xfe"),
    "deep": an_index("[" * 100_000),
    "a file of theirs": lambda folder: (folder / "thesis.txt").write_text("years of work"),
    "a folder of theirs": lambda folder: (folder / "figures").mkdir(),
    "a link": a_link,
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_a_folder_with_anything_that_no_export_wrote_is_never_replaced(change, tmp_path, capsys):
    place = tmp_path / "t"
    words = ("--to", "csv", "--tables", "kernels", "--force-overwrite", "-o", place)
    assert export(ADD, *words) == 0
    assert export(ADD, *words) == 0
    change(place)
    before = everything_in(place)
    assert export(ADD, *words) == 1
    assert "which is of no export of tables" in capsys.readouterr().err
    assert everything_in(place) == before


def test_what_comes_to_the_place_while_the_tables_are_written_stays(tmp_path, monkeypatch):
    def slowly(*_):
        (tmp_path / "t").mkdir()
        (tmp_path / "t" / "thesis.txt").write_text("years of work")
        return ""

    monkeypatch.setattr("nsan.exports.tables._readme", slowly)
    assert export(ADD, "--to", "csv", "--tables", "kernels", "-o", tmp_path / "t") == 1
    assert (tmp_path / "t" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("form", ["perfetto", "csv"])
def test_a_folder_that_is_not_there_is_said_of_the_output_not_of_the_trace(form, tmp_path, capsys):
    assert export(ADD, "--to", form, "-o", tmp_path / "none" / "out") == 1
    said = capsys.readouterr().err
    assert f"{tmp_path / 'none' / 'out'}" in said
    assert "No such file" in said
    assert "store" not in said


@pytest.mark.parametrize("form", ["perfetto", "csv"])
def test_an_export_without_a_row_says_so(form, tmp_path, capsys):
    assert export(ADD, "--to", form, "--filter-time", "1s/2s", "-o", tmp_path / "out") == 0
    assert "filters left no" in capsys.readouterr().err
    none = x.Export().write(tmp_path / "none.sqlite")
    assert export(none, "--to", form, "-o", tmp_path / "none") == 0
    assert "there is no" in capsys.readouterr().err
    assert export(none, "--to", form, "-q", "--force-overwrite", "-o", tmp_path / "none") == 0
    assert capsys.readouterr().err == ""


def test_an_analysis_of_a_snapshot_without_one_says_what_to_add_to_this_command(tmp_path, capsys):
    words = ("--to", "csv", "--analyses", "allocator_segments", "-o", tmp_path / "t")
    assert export(ADD, *words) == 2
    said = capsys.readouterr().err
    assert "add --snapshot FILE" in said
    assert "report" not in said


def test_a_wrong_snapshot_that_was_named_is_an_error(tmp_path, capsys):
    other = SAMPLES / "snapshots" / "decomfl_opt125m_full_history.pickle.gz"
    for words in (("--to", "perfetto"), ("--to", "csv", "--analyses", "pca_effect")):
        assert export(ADD, *words, "-q", "--snapshot", other, "-o", tmp_path / "out") == 1
        assert "decomfl_opt125m" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["perfetto", "parquet"])
def test_what_is_read_is_never_written_over(form, tmp_path):
    trace = tmp_path / "run" / "a.sqlite"
    trace.parent.mkdir()
    trace.write_bytes(ADD.read_bytes())
    snapshot = trace.parent / "snapshot.pickle"
    snapshot.write_bytes(b"not looked at")
    words = ("--to", form, "--snapshot", snapshot, "--force-overwrite", "-o")
    assert export(trace, *words, trace) == 2
    assert export(trace, *words, snapshot) == 2
    if form == "parquet":
        (trace.parent / "tables.json").write_text("{}")
        assert export(trace, *words, trace.parent) == 2
    assert trace.read_bytes() == ADD.read_bytes()
    assert snapshot.read_bytes() == b"not looked at"


def test_what_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nsan.exports.tables._readme", fails)
    assert export(ADD, "--to", "parquet", "-o", tmp_path / "t") == 1
    monkeypatch.setattr("nsan.exports.perfetto.write_slices", fails)
    assert export(ADD, "--to", "perfetto", "-o", tmp_path / "t.pftrace") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []


def test_an_export_of_tables_is_not_taken_for_a_capture(tmp_path, capsys):
    assert export(ADD, "--to", "parquet", "-o", tmp_path / "t") == 0
    assert main([str(tmp_path / "t")]) == 1
    said = capsys.readouterr().err
    assert "tables" in said
    assert "nsan import" in said


def test_an_analysis_that_needs_a_snapshot_finds_it(tmp_path):
    pca = SAMPLES / "model" / "pca_on"
    words = (
        "--tables",
        "kernels",
        "--analyses",
        "allocator-segments,pca_effect",
        "-o",
        tmp_path / "t",
    )
    assert export(pca / "pca_on.sqlite", "--to", "parquet", *words) == 0
    names = [each["name"] for each in index_of(tmp_path / "t")["tables"]]
    assert names == ["kernels", "allocator_segments", "pca_effect"]
    assert Path(tmp_path / "t" / "pca_effect.parquet").exists()
