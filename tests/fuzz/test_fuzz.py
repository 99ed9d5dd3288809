"""Damaged and hostile inputs of every kind: totals as plain SQL has them, or a clear refusal; and a fuzzer that sees what is wrong."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing

import exports as x
import polars as pl
import pytest
from conftest import SOAK

from fuzz import export_oracle, pool, worker
from fuzz.__main__ import main, make, run
from fuzz.asking import fingerprint
from fuzz.kinds import KINDS, WEIGHTS
from fuzz.outcomes import Statistics, Tried
from fuzz.sql_cells import opened

_INPUTS = 10_000 if SOAK else 75
_SEED = int(os.environ.get("NSAN_FUZZ_SEED", time.time_ns() % 1_000_000 if SOAK else 1))


@pytest.mark.slow
def test_every_total_is_that_of_plain_sql_or_there_is_a_clear_refusal(record_property):
    statistics = run(WEIGHTS, _INPUTS, _SEED)
    table = (
        f"{statistics.table()}\nseed {_SEED}; PYTHONPATH=tests python -m fuzz --replay KIND:SEED"
    )
    record_property("statistics", table)
    assert not statistics.bad, "\n".join(tried.line() for tried in statistics.bad) + f"\n{table}"
    assert sum(counts.total() for counts in statistics.counts.values()) == _INPUTS
    for kind, counts in statistics.counts.items():
        assert counts["right"], f"no {kind} could be read: {counts}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_makes_the_same_input_again_whatever_was_made_before(kind, tmp_path):
    seeds = range(8)
    for name, order in (("once", seeds), ("again", reversed(seeds))):
        for seed in order:
            make(kind, seed, tmp_path / f"{name} {seed}" / "in")
    for seed in seeds:
        assert fingerprint(tmp_path / f"once {seed}") == fingerprint(tmp_path / f"again {seed}")
    assert fingerprint(tmp_path / "once 0") != fingerprint(tmp_path / "once 1")


# The other side of the comparison


def oracle(path):
    with opened(path) as connection:
        return export_oracle.Export(connection)


def test_the_oracle_adds_up_what_is_worked_out_by_hand(tmp_path):
    (tmp_path / "in").mkdir()
    export = x.Export().add(
        x.MEMCPY,
        x.migration(0, 10, 4096),
        x.migration(5, 20, 8192, x.VA + 4096),
        x.migration(30, 25, 65536, kind=x.DTOH, cause=x.EVICTION),
        x.copy(100, 140, 1 << 20),
    )
    export.add(x.GPU_FAULTS, x.gpu_fault(1, 9, n=7), x.gpu_fault(2, 9, x.VA + x.MIB, n=3, access=9))
    export.add(x.RUNTIME, x.api_call(-8, 0), x.api_call(2, 3, name=99))
    path = export.write(tmp_path / "in" / "a.sqlite")
    found = export_oracle.figures(oracle(path))
    assert found["migrations.n"] == 3
    assert found["migrations.bytes"] == 4096 + 8192 + 65536
    assert found["migrations.busy_ns"] == 20
    assert found["gpu_faults.n_page_faults"] == 10
    assert found["gpu_faults.n_va_blocks"] == 1
    assert found["gpu_faults.by_access"] == {"read": 1, "other": 1}
    assert (found["first_ns"], found["last_ns"]) == (-8, 140)
    assert found["managed.n_calls"] == 1
    assert oracle(path).losses() == {x.MEMCPY: {"end before start": 1}}


def test_the_oracle_takes_no_cell_of_another_type(tmp_path):
    (tmp_path / "in").mkdir()
    path = (
        x.Export()
        .add(x.MEMCPY, x.migration(0, 10, 4096), x.migration(0, 10, 4096))
        .write(tmp_path / "in" / "a.sqlite")
    )
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE {x.MEMCPY} SET bytes = x'31' WHERE rowid = 1")
        connection.execute(f"UPDATE {x.MEMCPY} SET start = 1.5 WHERE rowid = 2")
        connection.commit()
    assert oracle(path).losses() == {x.MEMCPY: {"bytes": 1, "start": 1}}
    found = export_oracle.figures(oracle(path))
    assert (found["migrations.n"], found["migrations.bytes"], found["first_ns"]) == (2, None, None)


# A fuzzer that finds nothing may be blind: defects are planted here


def outcomes(kind, tmp_path, seeds=range(1, 4)):
    return {worker.tried(kind, seed, tmp_path)["outcome"] for seed in seeds}


@pytest.mark.parametrize("kind", ["export", "truth"])
def test_a_row_that_is_lost_is_seen(kind, tmp_path, monkeypatch):
    from nsan.io.store import StoreWriter

    add = StoreWriter.add
    monkeypatch.setattr(
        StoreWriter, "add", lambda self, table, n, frame: add(self, table, n, frame.slice(1))
    )
    assert "wrong" in outcomes(kind, tmp_path)


def test_a_size_that_is_misread_is_seen(tmp_path, monkeypatch):
    from nsan.io import nsys_sqlite

    read = nsys_sqlite.SqliteFile.read

    def misread(self, table, columns, between):
        rows, lost = read(self, table, columns, between)
        return (rows.with_columns(pl.col("bytes") + 1) if "bytes" in columns else rows), lost

    monkeypatch.setattr(nsys_sqlite.SqliteFile, "read", misread)
    assert "wrong" in outcomes("export", tmp_path, range(3))


def test_a_loss_that_is_not_counted_is_seen(tmp_path, monkeypatch):
    from nsan.io.nsys_sqlite import Losses

    monkeypatch.setattr(Losses, "add", lambda *_: None)
    assert "wrong" in outcomes("export", tmp_path, range(1, 9))


def test_an_exception_that_nobody_foresaw_is_seen(tmp_path, monkeypatch):
    from nsan.io import nsys_context

    monkeypatch.setattr(nsys_context, "nvtx_ranges", lambda *_: 1 / 0)
    assert "traceback" in outcomes("export", tmp_path, range(2))


def test_an_input_that_is_written_to_is_seen(tmp_path, monkeypatch):
    from nsan.io import nsys_sqlite

    opened_as_it_is = nsys_sqlite.SqliteFile.__init__

    def meddling(self, path):
        opened_as_it_is(self, path)
        path.with_name("more").touch()

    monkeypatch.setattr(nsys_sqlite.SqliteFile, "__init__", meddling)
    found = worker.tried("export", 1, tmp_path)
    assert (found["outcome"], found["detail"]) == ("wrong", "the input was changed")


_PROGRAMS = {
    "hang": "import time; time.sleep(60)",
    "memory": "import time; a = b'x' * (300 << 20); time.sleep(60)",
    "crash": "import os, sys; sys.stdin.readline(); os.abort()",
}


@pytest.mark.parametrize("outcome", _PROGRAMS)
def test_a_worker_that_hangs_grows_or_dies_is_ended_and_another_goes_on(outcome):
    found = []
    pool.run(
        [("export", 1), ("export", 2)],
        workers=1,
        note=found.append,
        begin=lambda: pool.Worker(["-c", _PROGRAMS[outcome]], wall_seconds=2, most_mib=200),
    )
    assert [(tried.seed, tried.outcome) for tried in found] == [(1, outcome), (2, outcome)]


def test_statistics_name_the_worst_by_their_seed():
    statistics = Statistics()
    for seed, seconds, peak in ((5, 0.5, 100), (6, 2.5, 90), (7, 0.25, 300)):
        statistics.add(
            Tried("export", seed, "wrong" if seed == 6 else "right", seconds=seconds, peak_mib=peak)
        )
    heads, line, *_ = statistics.table().splitlines()
    assert dict(zip(heads.split()[:6], line.split()[:6], strict=True))["inputs"] == "3"
    assert "2.5 (:6)" in line
    assert "300 (:7)" in line
    assert [tried.seed for tried in statistics.bad] == [6]


def test_inputs_are_shared_out_by_weight_and_the_nth_is_always_the_same():
    first = list(pool.shared_out({"a": 2, "b": 1}, 6, 3))
    assert [kind for kind, _ in first] == ["a", "a", "b"] * 2
    assert first == list(pool.shared_out({"a": 2, "b": 1}, 9, 3))[:6]


def test_one_input_is_tried_again_by_its_seed(tmp_path, capsys):
    assert main(["--replay", "truth:1000001", "--keep", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert '"outcome": "right"' in out
    assert (tmp_path / "truth-1000001" / "a.sqlite").is_file()


def test_a_kind_that_is_none_is_named_with_those_that_are(capsys):
    assert main(["--kind", "pickles"]) == 2
    assert "There is no kind pickles. There are: export, folder," in capsys.readouterr().err
