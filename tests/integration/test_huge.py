"""Huge exports: written in bounded memory, read through every path that large ones take, equal to plain SQL."""

from __future__ import annotations

import itertools

import exports as x
import pytest
from conftest import SOAK
from polars.testing import assert_frame_equal

import nsan
from benchmarks import huge
from benchmarks.generate import write_huge
from benchmarks.huge_rows import Shape
from nsan.analysis import slices
from nsan.cli import main
from nsan.io import nsys_sqlite, store

ROWS = 200_000 if SOAK else 8_000


@pytest.fixture
def tiny_parts(monkeypatch):
    """Every path of a huge export at a small one: ranges, buckets, stretches, places one by one."""
    monkeypatch.setattr(slices, "ROWS_AT_ONCE", ROWS // 20)
    monkeypatch.setattr(nsys_sqlite, "ROWS_PER_RANGE", ROWS // 30)
    monkeypatch.setattr(store.StoreWriter, "rows_per_part", ROWS // 25, raising=False)


def rows_of(path, table):
    return sorted(x.ask(path, f"SELECT start, end, globalPid, deviceId FROM {table}"))


def test_any_order_holds_the_same_rows_and_no_order(tmp_path):
    ordered = write_huge(tmp_path / "a.sqlite", ROWS)
    shuffled = write_huge(tmp_path / "b.sqlite", ROWS, any_order=True)
    for table in (x.GPU_FAULTS, x.MEMCPY):
        assert rows_of(ordered, table) == rows_of(shuffled, table)
        starts = [start for (start,) in x.ask(shuffled, f"SELECT start FROM {table}")]
        falls = sum(b < a for a, b in itertools.pairwise(starts))
        assert falls > len(starts) // 4
        starts = [start for (start,) in x.ask(ordered, f"SELECT start FROM {table}")]
        assert starts == sorted(starts)


def test_as_many_rows_as_were_asked_for(tmp_path):
    path = write_huge(tmp_path / "a.sqlite", ROWS)
    faults, copies = (
        x.ask(path, f"SELECT count(*) FROM {t}")[0][0] for t in (x.GPU_FAULTS, x.MEMCPY)
    )
    assert abs(faults + copies - ROWS) < ROWS / 10
    assert faults == Shape.of_rows(ROWS).n_faults
    assert 0.65 < faults / (faults + copies) < 0.75


@pytest.mark.usefixtures("tiny_parts")
def test_the_order_of_an_export_never_shows(tmp_path):
    paths = [
        write_huge(tmp_path / f"{any_order}.sqlite", ROWS, any_order=any_order)
        for any_order in (False, True)
    ]
    first, second = (nsan.open_trace(path) for path in paths)
    assert nsan.summary(first) == {**nsan.summary(second), "source": paths[0].name}
    for table in ("gpu_faults", "migrations"):
        assert getattr(first, table).collect().equals(getattr(second, table).collect())


@pytest.mark.usefixtures("tiny_parts")
def test_totals_and_clusters_are_those_of_sql_whatever_is_looked_at_together(tmp_path, monkeypatch):
    path = write_huge(tmp_path / "a.sqlite", ROWS)
    trace = nsan.open_trace(path)
    in_parts = nsan.analyse(trace, "fault_clusters").collect()
    monkeypatch.setattr(slices, "ROWS_AT_ONCE", 1 << 30)
    # Floats are added in any order by polars' threads.
    assert_frame_equal(nsan.analyse(trace, "fault_clusters").collect(), in_parts, rel_tol=1e-9)
    assert not [*huge._differs(path, nsan.summary(trace), {"rows": in_parts.to_dicts()})]


def test_a_difference_from_sql_is_named(tmp_path):
    path = write_huge(tmp_path / "a.sqlite", ROWS)
    trace = nsan.open_trace(path)
    found = nsan.analyse(trace, "fault_clusters").collect()
    summary = nsan.summary(trace)
    summary["gpu_faults"]["n_rows"] += 1
    (said,) = huge._differs(path, summary, {"rows": found.to_dicts()})
    assert said.startswith("fault rows: ")


def test_one_command_measures_all_steps_and_compares_them_with_sql(tmp_path, monkeypatch, capsys):
    words = ["huge", "--rows", str(ROWS), "--folder", str(tmp_path), "--skip-report"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as stop:
        huge.main()
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert [line.split(" | ")[2] for line in said.splitlines()[2:5]] == [
        "import",
        "summary",
        "clusters",
    ]
    assert "Totals and clusters equal plain SQL." in said


def test_the_generator_is_a_command(tmp_path):
    from benchmarks import generate

    path = tmp_path / "a.sqlite"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["generate", str(path), "--rows", "2e3"])
        generate.main()
    assert main(["summary", "-q", str(path)]) == 0
