"""The modelled traces: the same on every machine, agreeing with their truth, small, and named modelled."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing

import exports as x
import polars as pl
import pytest

import nsan
from nsan.model.samples import (
    HASHES,
    KEPT_TRUTH,
    SAMPLES,
    SWEEPS,
    make_samples,
    make_sweep,
    table_hashes,
)

FOLDER = x.REPOSITORY / "sample_data" / "model"
NAMES = sorted(SAMPLES)
RUNS = [f"{name}/{case.folder}" for name, sweep in SWEEPS.items() for case in sweep.cases()]
SOAK = os.environ.get("NSAN_SOAK") == "1"


def _export(name):
    return FOLDER / name / f"{name}.sqlite"


def _truth(name, table):
    return pl.read_parquet(FOLDER / name / "truth" / f"{table}.parquet")


def _ask(name, sql):
    with closing(sqlite3.connect(f"file:{_export(name)}?mode=ro&immutable=1", uri=True)) as export:
        return export.execute(sql).fetchall()


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Open every sample once, into stores of this test."""
    folder = tmp_path_factory.mktemp("stores")
    return {
        name: nsan.open_trace(nsan.import_trace(_export(name), folder / name)) for name in NAMES
    }


def test_the_samples_are_made_again_row_for_row(tmp_path, monkeypatch):
    noted = json.loads((FOLDER / HASHES).read_text())
    assert set(noted) == {*NAMES, *RUNS}
    if not SOAK:  # all runs of the sweep are left to `make soak` and `make samples`
        monkeypatch.setattr("nsan.model.samples.SWEEPS", {})
        noted = {name: noted[name] for name in NAMES}
    assert make_samples(tmp_path / "model") == noted


@pytest.mark.parametrize("name", SWEEPS)
def test_runs_of_a_sweep_are_made_again_row_for_row_over_those_that_are_there(name, tmp_path):
    """The two that move most."""
    shutil.copytree(FOLDER / name, tmp_path / name)
    wanted = SWEEPS[name].cases()[-2:]
    made = make_sweep(SWEEPS[name], wanted, tmp_path / name, overwrite=True)
    noted = json.loads((FOLDER / HASHES).read_text())
    assert made == {run: noted[run] for run in RUNS[-2:]}
    for run in (tmp_path / name).iterdir():
        there = {path.name for path in (FOLDER / name / run.name).rglob("*")}
        assert {path.name for path in run.rglob("*")} == there
        about = json.loads((run / "model.json").read_text())
        assert {path.stem for path in (run / "truth").iterdir()} == {*about["truth"], *KEPT_TRUTH}
        assert (run / "snapshot.pickle").exists() is (about["allocator"]["kind"] != "raw")


@pytest.mark.parametrize("name", [*NAMES, *RUNS])
def test_the_noted_hashes_are_those_of_the_files(name):
    assert table_hashes(FOLDER / name) == json.loads((FOLDER / HASHES).read_text())[name]


def test_a_changed_cell_changes_the_hash_of_its_table_only(tmp_path):
    copy = tmp_path / "stream"
    shutil.copytree(FOLDER / "stream", copy)
    before = table_hashes(copy)
    with closing(sqlite3.connect(copy / "stream.sqlite")) as export:
        export.execute(f"UPDATE {x.MEMCPY} SET bytes = bytes + 4096 WHERE rowid = 7")
        export.commit()
    after = table_hashes(copy)
    assert {table for table in before if before[table] != after[table]} == {x.MEMCPY}


def test_the_samples_are_small():
    sizes = {path: path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()}
    assert all(size < 1_000_000 for size in sizes.values())
    assert sum(sizes.values()) < 8_000_000


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_says_that_a_model_wrote_it(name):
    product = _ask(name, "SELECT value FROM META_DATA_EXPORT WHERE name = 'EXPORT_PRODUCT_NAME'")
    assert product == [("nsan UVM driver model",)]
    assert json.loads((FOLDER / name / "model.json").read_text())["kind"] == "modelled"
    assert nsan.summary(_export(name))["source_kind"] == "nsan-model"


@pytest.mark.parametrize("name", NAMES)
def test_the_loader_counts_what_plain_sql_counts(name, traces):
    trace = traces[name]
    for table, ours in ((x.GPU_FAULTS, "gpu_faults"), (x.CPU_FAULTS, "cpu_faults")):
        there = _ask(name, f"SELECT count(*) FROM sqlite_master WHERE name = '{table}'")[0][0]
        n_rows = _ask(name, f"SELECT count(*) FROM {table}")[0][0] if there else 0
        assert getattr(trace, ours).collect().height == n_rows
    sums = _ask(
        name,
        f"SELECT copyKind, migrationCause, count(*), sum(bytes) FROM {x.MEMCPY} "
        "WHERE copyKind IN (11, 12, 13) GROUP BY 1, 2 ORDER BY 1, 2",
    )
    directions = {"htod": 11, "dtoh": 12, "dtod": 13}
    got = (
        trace.migrations.collect()
        .group_by("direction", "cause_id")
        .agg(pl.len(), pl.col("bytes").sum())
        .rows()
    )
    assert sorted((directions[d], cause, n, size) for d, cause, n, size in got) == sums


@pytest.mark.parametrize("name", NAMES)
def test_every_fault_row_is_a_batch_of_the_truth(name):
    batches = _truth(name, "batches").sort("end_ns", "device_id")
    recorded = (
        _ask(
            name,
            "SELECT start, end, deviceId, address, numberOfPageFaults, faultAccessType "
            f"FROM {x.GPU_FAULTS} ORDER BY end, deviceId",
        )
        if batches.height
        else []
    )
    access = {"read": 1, "write": 2}
    true = [
        (
            row["raised_ns"],
            row["end_ns"],
            row["device_id"],
            row["va"],
            row["n_page_faults"],
            access[row["access"]],
        )
        for row in batches.iter_rows(named=True)
    ]
    assert recorded == true


@pytest.mark.parametrize("name", NAMES)
def test_every_batch_names_its_lowest_page_and_counts_the_entries_there(name):
    pages = _truth(name, "batch_pages")
    batches = _truth(name, "batches").sort("batch")
    lowest = pages.sort("batch", "va").group_by("batch", maintain_order=True).first()
    assert lowest["va"].to_list() == batches["va"].to_list()
    assert lowest["n_entries"].to_list() == batches["n_page_faults"].to_list()
    sums = pages.group_by("batch").agg(pl.col("n_entries").sum(), pl.len()).sort("batch")
    assert sums["n_entries"].to_list() == batches["n_entries"].to_list()
    assert sums["len"].to_list() == batches["n_pages"].to_list()


@pytest.mark.parametrize("name", NAMES)
def test_every_copy_of_a_batch_lies_between_the_batch_before_and_its_own_end(name):
    copies = _ask(
        name,
        "SELECT start, end, virtualAddress FROM CUPTI_ACTIVITY_KIND_MEMCPY "
        "WHERE copyKind IN (11, 12, 13) ORDER BY start, virtualAddress",
    )
    of_batch = _truth(name, "copy_batches")["batch"].to_list()
    ends = {row["batch"]: row["end_ns"] for row in _truth(name, "batches").iter_rows(named=True)}
    fetched = dict(_truth(name, "batches").select("batch", "fetched_ns").iter_rows())
    assert len(copies) == len(of_batch)
    for (start, end, _), batch in zip(copies, of_batch, strict=True):
        if batch is not None:
            assert fetched[batch] <= start < end <= ends[batch]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_by_allocation_add_up_to_the_migrations_of_whole_blocks(name):
    # Arrays of these programs fill their blocks, so nothing moves outside an allocation.
    counts = _truth(name, "allocation_counts")
    sums = dict(
        _ask(name, f"SELECT copyKind, sum(bytes) FROM {x.MEMCPY} WHERE copyKind > 10 GROUP BY 1")
    )
    if name in {"ping_pong", "pca_off"}:  # small allocations lie in blocks that are not all theirs
        return
    assert counts["bytes_in"].sum() == sums.get(11, 0)
    assert counts["bytes_out"].sum() == sums.get(12, 0)
    assert counts["bytes_between"].sum() == sums.get(13, 0)


@pytest.mark.parametrize("name", NAMES)
def test_evicted_bytes_are_the_rows_of_cause_4(name):
    rows = _ask(
        name, f"SELECT count(*), coalesce(sum(bytes), 0) FROM {x.MEMCPY} WHERE migrationCause = 4"
    )
    assert _truth(name, "evictions")["copied_bytes"].sum() == rows[0][1]
    of_allocations = _truth(name, "allocation_counts")["evicted_bytes"].sum()
    if name == "pca_off":  # small allocations lie in blocks that are not all theirs
        assert 0.98 * rows[0][1] < of_allocations < rows[0][1]
    else:
        assert of_allocations == rows[0][1]


def _outcomes(name):
    return set(_truth(name, "batches")["outcome"])


def test_each_sample_shows_what_it_is_for():
    assert _outcomes("stream") == {"data"}
    assert "first_touch" in _outcomes("first_touch")
    assert {"throttled", "data"} <= _outcomes("ping_pong")
    assert {"thrashing", "throttling", "remote_map"} == set(
        _truth("ping_pong", "driver_events")["kind"]
    )
    assert _truth("ping_pong", "ping_pong")["n_moves"].max() >= 3
    assert _truth("oversubscribed_sweep", "refaults")["bytes"].sum() > 48 * x.MIB
    assert _truth("random", "evictions").height > 0
    assert _truth("user_prefetch", "batches").height == 0
    user = _ask(
        "user_prefetch",
        f"SELECT DISTINCT bytes, migrationCause FROM {x.MEMCPY} WHERE copyKind = 11",
    )
    assert user == [(2 * x.MIB, 1)]
    assert "remote_map" in _outcomes("advice")
    assert {"invalidated", "copied", "first_touch"} >= set(
        _truth("advice", "residency_changes")["reason"]
    )
    assert _ask("two_gpus", f"SELECT count(*) > 0 FROM {x.MEMCPY} WHERE copyKind = 13") == [(1,)]
    second = "SELECT start FROM NVTX_EVENTS WHERE text = 'step' ORDER BY start LIMIT 1 OFFSET 1"
    for name, has_cache in (("pca_off", False), ("pca_on", True)):
        late = _truth(name, "batches").filter(pl.col("raised_ns") > _ask(name, second)[0][0])
        assert ("first_touch" in late["outcome"]) is not has_cache
        assert _truth(name, "tensor_moves")["is_dead"].any() is has_cache


@pytest.mark.parametrize("run", RUNS)
def test_fault_rows_of_a_run_of_a_sweep_are_the_batches_of_its_truth(run):
    place = FOLDER / run
    sql = f"SELECT address, numberOfPageFaults FROM {x.GPU_FAULTS} ORDER BY end"
    with closing(sqlite3.connect(f"file:{place / place.name}.sqlite?mode=ro", uri=True)) as export:
        recorded = export.execute(sql).fetchall()
    batches = pl.read_parquet(place / "truth" / "batches.parquet").sort("end_ns")
    assert recorded == batches.select("va", "n_page_faults").rows()
    assert json.loads((place / "model.json").read_text())["kind"] == "modelled"


def test_the_read_me_names_every_sample_and_the_command_that_makes_it():
    text = (x.REPOSITORY / "sample_data" / "README.md").read_text()
    for name, sample in {**SAMPLES, **SWEEPS}.items():
        assert f"`{name}`" in text
        assert f"`{sample.command(name)}`" in text
        assert sample.shows in text
