"""What analyses share is computed once while somebody keeps it, and found by the very tables it was computed from."""

from __future__ import annotations

import gc
from itertools import count
from threading import Thread
from weakref import WeakValueDictionary, ref

import made_traces as m
import polars as pl
import pytest
import reports

from nsan.analysing import analyse
from nsan.analysis import keeping
from nsan.analysis.catalog import find
from nsan.analysis.keeping import Keeping, handed, once
from nsan.opening import open_trace


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No other report of this process keeps anything."""
    monkeypatch.setattr(keeping, "_SHARED", WeakValueDictionary())


def made(*values):
    return pl.LazyFrame({"a": values, "b": values})


def asked(*frames):
    """Ask twice; say how often it was computed."""
    numbers = count(1)
    return [once("thing", lambda: next(numbers), *frames) for _ in range(2)][-1]


def results():
    kept = keeping._kept()
    return {} if kept is None else kept.results


# What is kept ---------------------------------------------------------------------------------------


def test_nothing_is_kept_where_nobody_keeps():
    assert asked(handed(made(1), ["a"])) == 2


def test_of_the_same_table_it_is_computed_once_however_often_it_is_handed_out():
    kept, table = Keeping(), made(1)
    once("thing", lambda: "first", handed(table, ["a"]))
    assert once("thing", lambda: "second", handed(table, ["a", "b"])) == "first"
    assert kept is not None


def test_of_other_tables_or_by_another_name_it_is_computed_anew():
    kept, table = Keeping(), made(1)
    tables = (table, table.select("a"), table.filter(pl.col("a") > 1), table.clone())
    found = [once("thing", lambda i=i: i, handed(each, ["a"])) for i, each in enumerate(tables)]
    assert found == [0, 1, 2, 3]
    assert once("another", lambda: "new", handed(table, ["a"])) == "new"
    both = [handed(each, ["a"]) for each in tables[:2]]
    assert [once("pair", lambda i=i: i, *way) for i, way in enumerate((both, both[::-1]))] == [0, 1]
    assert kept is not None


def test_what_nobody_handed_out_is_not_kept():
    kept, table = Keeping(), made(1)
    given = handed(table, ["a"])
    for frame in (table, given.select("a"), given.filter(pl.col("a") > 0), given.clone()):
        assert asked(frame) == 2
        assert asked(given, frame) == 2
    assert not results()
    assert kept is not None


def test_what_was_handed_out_before_anybody_kept_is_not_kept():
    given = handed(made(1), ["a"])
    kept = Keeping()
    assert asked(given) == 2
    assert kept is not None


def test_tables_that_come_and_go_are_never_taken_for_one_another():
    """The id of what is gone is given again."""
    kept = Keeping()
    for number in range(200):
        given = handed(made(number), ["a"])
        assert once("thing", lambda n=number: n, given) == number
    assert kept is not None


def test_a_table_lives_as_long_as_a_result_of_it_is_kept():
    """So its id is not given again."""
    kept, table = Keeping(), made(1)
    once("thing", lambda: 1, handed(table, ["a"]))
    held = ref(table)
    del table
    gc.collect()
    assert held() is not None
    for number in range(6):
        once(f"another {number}", lambda: 1, handed(made(1), ["a"]))
    assert held() is None
    assert kept is not None


def test_a_table_that_is_gone_is_forgotten_with_what_was_handed_out_of_it():
    kept, table = Keeping(), made(1)
    given, gone = handed(table, ["a"]), ref(table)
    assert len(kept._kept.tables) == 1
    del table, given
    gc.collect()
    assert gone() is None
    assert not kept._kept.tables


def test_only_the_results_used_last_are_kept():
    kept, given = Keeping(), handed(made(1), ["a"])
    for number in range(20):
        once(f"thing {number}", lambda: 0, given)
        once("thing 0", lambda: 1, given)
    assert once("thing 0", lambda: 2, given) == 0
    assert len(results()) == 6
    assert kept is not None


# How long -------------------------------------------------------------------------------------------


def test_what_was_kept_goes_with_the_last_who_keeps():
    first, second = Keeping(), Keeping()
    given = handed(made(1), ["a"])
    once("thing", lambda: 1, given)
    del first
    gc.collect()
    assert len(results()) == 1
    del second
    gc.collect()
    third = Keeping()
    assert not results()
    assert third is not None


def test_the_last_who_keeps_may_end_while_something_is_computed():
    keepers, given = [Keeping()], handed(made(1), ["a"])
    found = type("Found", (), {})

    def build():
        keepers.clear()
        gc.collect()
        return found()

    gone = ref(once("thing", build, given))
    gc.collect()
    assert gone() is None
    keepers.append(Keeping())
    assert not results()


def test_many_may_ask_at_once():
    kept, given, wrong = Keeping(), handed(made(1), ["a"]), []

    def work(first):
        for n in range(first, first + 500):
            found = once(f"thing {n % 13}", lambda n=n: n % 13, given)
            if found != n % 13:
                wrong.append(n)

    threads = [Thread(target=work, args=(7 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(results()) <= 6 + len(threads)
    assert kept is not None


# Through analyses -----------------------------------------------------------------------------------


def first(n):
    return lambda rows: rows.map_batches(lambda found: found.head(n))


def below(address):
    below_it = pl.col("va").map_batches(lambda va: va < address, return_dtype=pl.Boolean)
    return lambda rows: rows.filter(below_it)


def below_series(address):
    return lambda rows: rows.filter(pl.col("va") < pl.lit(pl.Series([address])).first())


LOW, HIGH = 0x7F00_0040_0000, 0x7F00_0080_0000


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (first(100), first(4000)),
        (below(LOW), below(HIGH)),
        (below_series(LOW), below_series(HIGH)),
    ],
    ids=["function of rows", "function of a column", "series"],
)
def test_plans_that_read_alike_are_not_taken_for_one_another(one, other):
    trace, batches = open_trace(reports.path_of("oversubscribed_sweep")), find("batches")

    def moved(change):
        tables = {"gpu_faults": trace.gpu_faults, "migrations": change(trace.migrations)}
        return batches.run(tables).collect()["bytes"].sum()

    plain = [moved(one), moved(other)]
    assert plain[0] < plain[1]
    kept = Keeping()
    assert [moved(one), moved(other)] == plain
    assert kept is not None


def test_a_file_that_was_written_anew_is_read_anew(tmp_path):
    trace, batches = open_trace(reports.path_of("oversubscribed_sweep")), find("batches")
    kept, place = Keeping(), tmp_path / "rows.parquet"

    def moved(rows):
        rows.write_parquet(place)
        tables = {"gpu_faults": trace.gpu_faults, "migrations": pl.scan_parquet(place)}
        return batches.run(tables).collect()["bytes"].sum()

    rows = trace.migrations.collect()
    assert moved(rows.head(500)) < moved(rows.head(4000))
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
    again = [analyse(trace, name).collect() for _ in range(2)]
    assert all(found.equals(plain) for found in again)
    assert results()
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


@pytest.mark.parametrize(
    ("before", "after", "builder"),
    [
        ("batches", "batches_over_time", "driver.batches._batches"),
        ("batches", "faults_by_kernel", "driver.batches._batches"),
        ("batches", "access_patterns", "driver.batches._parts"),
        ("fault_clusters", "batches", "driver.fault_rows._checks"),
        ("refaults", "refault_totals", "memory.refaults._returns"),
        ("evictions", "refaults_by_va_block", "memory.refaults._evictions"),
        ("memory_ledger", "oversubscription_factor", "memory.oversubscription._levels"),
    ],
)
def test_an_analysis_builds_on_what_another_left(before, after, builder, monkeypatch):
    trace = open_trace(reports.path_of("oversubscribed_sweep"))
    kept = Keeping()
    analyse(trace, before).collect()
    monkeypatch.setattr(f"nsan.analysis.{builder}", lambda *_: pytest.fail("computed again"))
    assert analyse(trace, after).collect().height
    assert kept is not None


def test_each_table_of_a_trace_is_one_object_and_that_of_a_part_another():
    trace = open_trace(reports.path_of("oversubscribed_sweep"))
    assert trace.gpu_faults is trace.gpu_faults
    assert trace.filter(time="20ms/40ms").gpu_faults is not trace.gpu_faults
