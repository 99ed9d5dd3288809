"""What analyses share is computed once while somebody keeps it, and found by what it is read from."""

from __future__ import annotations

import gc
from itertools import count

import made_traces as m
import polars as pl
import pytest
import reports

from nsan.analysing import analyse
from nsan.analysis import keeping
from nsan.analysis.keeping import Keeping, once
from nsan.opening import open_trace


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No other report of this process keeps anything."""
    monkeypatch.setattr(keeping, "_ALIVE", set())
    monkeypatch.setattr(keeping, "_KEPT", type(keeping._KEPT)())


@pytest.fixture
def file(tmp_path):
    """Write a table to a file."""
    place = tmp_path / "rows.parquet"
    pl.DataFrame({"a": [1, 2, 3], "b": [4, 5, 6]}).write_parquet(place)
    return place


def asked(*frames):
    """Ask twice; say how often it was computed."""
    numbers = count(1)
    return [once("thing", lambda: next(numbers), *frames) for _ in range(2)][-1]


def test_nothing_is_kept_where_nobody_keeps(file):
    assert asked(pl.scan_parquet(file)) == 2


def test_the_same_rows_and_columns_are_computed_once_however_they_were_chosen(file):
    kept = Keeping()
    rows = pl.scan_parquet(file)
    once("thing", lambda: "first", rows.select("a", "b").select("a"))
    assert once("thing", lambda: "second", rows.select("a")) == "first"
    assert kept is not None


def test_other_rows_columns_or_names_are_computed_anew(file):
    kept = Keeping()
    rows = pl.scan_parquet(file)
    frames = (rows, rows.select("a"), rows.filter(pl.col("a") > 1), rows.filter(pl.col("a") > 2))
    found = [once("thing", lambda i=i: i, frame) for i, frame in enumerate(frames)]
    assert found == [0, 1, 2, 3]
    assert once("another", lambda: "new", rows) == "new"
    assert kept is not None


def test_a_table_in_memory_has_no_name_and_is_not_kept():
    kept = Keeping()
    assert asked(pl.LazyFrame({"a": [1]})) == 2
    assert kept is not None


def test_a_plan_that_is_told_shortened_names_nothing(file):
    kept = Keeping()
    assert asked(pl.scan_parquet(file).filter(pl.col("a").is_in(list(range(100))))) == 2
    assert kept is not None


def test_what_was_kept_goes_with_the_last_who_keeps(file):
    first, second = Keeping(), Keeping()
    once("thing", lambda: 1, pl.scan_parquet(file))
    del first
    gc.collect()
    assert len(keeping._KEPT) == 1
    del second
    gc.collect()
    assert not keeping._KEPT


def test_only_the_results_used_last_are_kept(file):
    kept = Keeping()
    rows = pl.scan_parquet(file)
    for number in range(20):
        once(f"thing {number}", lambda: 0, rows)
        once("thing 0", lambda: 1, rows)
    assert ("thing 0", rows.explain()) in keeping._KEPT
    assert len(keeping._KEPT) <= 6
    assert kept is not None


@pytest.mark.parametrize(
    "name",
    ["batches", "batch_latency", "service_fit", "refault_totals", "refaults", "memory_ledger"],
)
def test_an_analysis_gives_the_same_with_what_was_kept(name):
    trace = open_trace(reports.path_of("oversubscribed_sweep"))
    plain = analyse(trace, name).collect()
    kept = Keeping()
    analyse(trace, "fault_clusters").collect()
    first, second = (analyse(trace, name).collect() for _ in range(2))
    assert first.equals(plain)
    assert second.equals(plain)
    assert keeping._KEPT
    assert kept is not None


def test_a_part_is_not_answered_with_what_was_kept_of_the_whole():
    trace = open_trace(reports.path_of("oversubscribed_sweep"))
    kept = Keeping()
    whole = analyse(trace, "batches").collect()
    part = analyse(trace.filter(time="20ms/40ms"), "batches").collect()
    assert part.height < whole.height
    assert kept is not None


def test_rows_of_a_trace_in_memory_are_analysed_as_before():
    kept = Keeping()
    trace = m.made(gpu_faults=[m.fault(0, 100)], migrations=[m.copy(10)])
    assert analyse(trace, "batches").collect().height == 1
    assert kept is not None
