"""`nsan summary` of many reports, typed: what is printed, in which formats, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import os

import exports as x
import polars as pl
import pytest

from nsan.cli import main
from nsan.fleet.figures import REPORT_FIGURES

MS = 1_000_000
BUSY = (20, 21, 22, 23, 24, 25)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two nights of six ranks; in the second one rank copies ten times as long, and one report is damaged."""
    folder = tmp_path_factory.mktemp("made") / "nights"
    for at, night in enumerate(("night1", "night2")):
        (folder / night).mkdir(parents=True)
        for rank, busy in enumerate(BUSY):
            long = 10 if (night, rank) == ("night2", 3) else 1
            # Files that are alike to the byte would be named as copies of one report.
            write(folder / night / f"rank{rank}.sqlite", busy * long, kernel_at=at)
    (folder / "night2" / "rank6.sqlite").write_bytes(b"SQLite format 3\0" + bytes(5000))
    return folder


def write(path, busy_ms, *, kernel_at=0, **more):
    """Write a report whose migrations are in flight for so long."""
    export = x.Export().add(x.MEMCPY, x.migration(0, busy_ms * MS, x.MIB * busy_ms, **more))
    export.add(x.KERNEL, x.kernel(kernel_at, 500 * MS)).write(path)


@pytest.fixture
def typed(tmp_path_factory, monkeypatch, capsys):
    """Run commands with one cache for this module: the reports are read once."""
    monkeypatch.setenv("NSAN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "fleet-cache"))

    def of(*arguments, status=0):
        assert main([str(each) for each in arguments]) == status
        return capsys.readouterr()

    return of


def test_a_folder_of_reports_is_one_answer_and_a_damaged_one_is_named(made, typed):
    said = typed("summary", made, status=1).out
    assert said.startswith("nights: 12 reports of 2 runs, 1 more report failed\n")
    # Of 20, 21, 22, 230, 24, 25 ms the median is 23 ms, and the MAD of 3, 2, 1, 207, 1, 2 is 2 ms.
    assert (
        "rank 3 of nights/night2: UM at work for 230.000 ms, 10 times the median of 6 ranks (23.000 ms), 104 MADs above"
        in said
    )
    assert "nights/night2/rank6.sqlite: " in said
    assert "newest" in said


def test_a_bare_folder_is_the_same(made, typed):
    assert typed(made, status=1) == typed("summary", made, status=1)


def test_several_paths_are_one_fleet(made, typed):
    said = typed("summary", made / "night1", made / "night2" / "rank0.sqlite").out
    assert said.startswith("night1, rank0.sqlite: 7 reports of 2 runs\n")


def test_a_folder_with_one_capture_is_that_capture(tmp_path, typed):
    write(tmp_path / "a.sqlite", 5)
    assert typed("summary", tmp_path).out == typed("summary", tmp_path / "a.sqlite").out


def test_the_totals_are_those_of_the_rows(made, typed):
    """Plain SQL on every export."""
    paths = sorted(made.rglob("rank[0-5].sqlite"))
    assert len(paths) == 12
    rows = [x.ask(path, f"select sum(bytes), sum([end] - start) from {x.MEMCPY}") for path in paths]
    document = json.loads(typed("summary", made, "--json", "-q", status=1).out)
    totals = {row["figure"]: row["sum"] for row in document["totals"]}
    assert totals["bytes"] == sum(size for ((size, _),) in rows)
    assert totals["migrations_busy_ns"] == sum(busy for ((_, busy),) in rows)


def test_csv_and_parquet_have_a_row_for_each_report(made, typed, tmp_path):
    said = typed("summary", made, "--format", "csv", "-q", status=1).out
    rows = list(csv.DictReader(io.StringIO(said)))
    assert [(row["run"], row["rank"]) for row in rows][:2] == [
        ("nights/night1", "0"),
        ("nights/night1", "1"),
    ]
    assert len(rows) == 12
    place = tmp_path / "fleet.parquet"
    typed("summary", made, "--format", "parquet", "-o", place, "-q", status=1)
    frame = pl.read_parquet(place)
    assert frame.schema == REPORT_FIGURES.schema
    assert frame["migrations_busy_ns"].to_list()[:6] == [busy * MS for busy in BUSY]


def test_what_failed_is_on_stderr_where_the_result_is_for_machines(made, typed):
    said = typed("summary", made, "--json", status=1)
    assert "1 report could not be read:\nnsan:   nights/night2/rank6.sqlite" in said.err
    assert typed("summary", made, "--json", "-q", status=1).err == ""
    assert typed("summary", made, status=1).err == ""


def test_markdown_has_headings_and_tables(made, typed):
    said = typed("summary", made, "--format", "markdown", status=1).out
    assert said.startswith("# nights: 12 reports")
    assert "\n## What stands out\n" in said
    assert "|" in said


def test_a_filter_is_refused_with_the_way_out(made, typed):
    for option in (["--filter-time", "1s/2s"], ["--gpu", 0], ["--pid", 1], ["--filter-nvtx", "x"]):
        said = typed("summary", made, *option, status=2)
        assert "A filter is for one report" in said.err
        assert said.out == ""


def test_options_of_many_reports_are_refused_for_one(made, typed):
    one = made / "night1" / "rank0.sqlite"
    for option in (["--workers", 2], ["--dask", "tcp://x:1"], ["--rank-pattern", "(?P<rank>.)"]):
        assert f"{option[0]} is for several reports" in typed("summary", one, *option, status=2).err


def test_without_unified_memory_data_in_any_report_the_status_is_3(tmp_path, typed):
    for rank in range(2):
        x.Export().add(x.KERNEL, x.kernel(0, 5)).write(tmp_path / f"rank{rank}.sqlite")
    assert "no report holds Unified Memory data" in typed("summary", tmp_path, status=3).err
    write(tmp_path / "rank2.sqlite", 5)
    typed("summary", tmp_path)


def test_where_no_report_can_be_read_each_is_named(tmp_path, typed):
    for name in ("a", "b"):
        (tmp_path / f"{name}.sqlite").write_bytes(b"SQLite format 3\0" + bytes(900))
    said = typed("summary", tmp_path, status=1).out
    assert "No report could be read." in said
    assert "a.sqlite: " in said
    assert "b.sqlite: " in said


def test_no_report_is_written_over_and_beside_them_there_is_room(made, typed):
    report = made / "night1" / "rank0.sqlite"
    before = report.read_bytes()
    said = typed("summary", made, "--json", "-o", report, "--force-overwrite", status=2)
    assert "is what is being read" in said.err
    assert report.read_bytes() == before
    beside = made / "night1" / "fleet.json"
    typed("summary", made, "--json", "-o", beside, "-q", status=1)
    assert json.loads(beside.read_text())["n_reports"] == 12
    beside.unlink()


def test_nothing_of_this_machine_is_in_the_document(made, typed):
    said = typed("summary", made, "--json", "-q", status=1).out
    assert str(made.parent) not in said
    assert os.uname().nodename not in said
