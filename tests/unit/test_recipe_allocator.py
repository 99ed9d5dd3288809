"""The recipe `uvm_allocator`: what the traces alone say, and what memory snapshots add."""

from __future__ import annotations

import shutil

import exports as x
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from recipe_framework import run

import nsan

ON = x.REPOSITORY / "sample_data" / "model" / "pca_on"
MIB = x.MIB


def table(out, name):
    return pl.read_parquet(out / f"{name}.parquet")


def write(path):
    """A program that holds 3 MiB of managed memory in two allocations; one is freed before the other comes."""
    export = x.Export().add(x.MEMCPY, x.migration(10, 20, MIB))
    return export.add(
        x.MEMORY,
        x.memory_event(0, x.VA, 2 * MIB),
        x.memory_event(30, x.VA, 2 * MIB, free=True),
        x.memory_event(40, x.VA, 3 * MIB),
    ).write(path)


def test_without_a_snapshot_the_trace_alone_is_reported_and_the_missing_file_named(
    tmp_path, caplog
):
    out = run("uvm_allocator", [write(tmp_path / "rank0.sqlite")], tmp_path / "out")
    row = table(out, "rank_stats").row(0, named=True)
    assert (row["n_managed_allocations"], row["managed_peak_bytes"]) == (2, 3 * MIB)
    assert row["snapshot"] is None
    assert "rank0.pickle beside it" in caplog.text
    assert table(out, "rank_pca_effect").is_empty()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two reports, one of them with a snapshot in another folder."""
    folder = tmp_path_factory.mktemp("two")
    reports, snapshots = folder / "reports", folder / "snapshots"
    reports.mkdir()
    snapshots.mkdir()
    shutil.copy(ON / "pca_on.sqlite", reports / "rank0.sqlite")
    write(reports / "rank1.sqlite")
    shutil.copy(ON / "snapshot.pickle", snapshots / "rank0.pickle")
    paths = sorted(reports.glob("*.sqlite"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSAN_CACHE_DIR", str(folder / "cache"))
        return run("uvm_allocator", paths, folder / "out", "--snapshot-dir", str(snapshots))


def test_the_effect_of_the_cache_is_that_of_the_report_joined_with_its_snapshot(two):
    want = nsan.analyse(nsan.join(ON / "pca_on.sqlite", ON / "snapshot.pickle"), "pca_effect")
    got = table(two, "rank_pca_effect")
    assert got["rank"].to_list() == [0]
    assert_frame_equal(got.drop("run", "rank", "source"), want.collect())


def test_utilization_is_that_of_the_snapshot(two):
    want = nsan.analyse(
        nsan.open_snapshot(ON / "snapshot.pickle"), "allocator_utilization"
    ).collect()
    got = table(two, "rank_utilization")
    assert got["utilization_fraction"].to_list() == want["utilization_fraction"].to_list()
    assert got["peak_reserved_bytes"].to_list() == want["peak_reserved_bytes"].to_list()


def test_every_report_has_its_factor_and_the_name_of_its_snapshot(two):
    found = table(two, "rank_stats")
    assert found.select("rank", "snapshot").unique().sort("rank").rows() == [
        (0, "rank0.pickle"),
        (1, None),
    ]
    want = nsan.analyse(nsan.open_trace(ON / "pca_on.sqlite"), "oversubscription_factor").collect()
    mine = found.filter(pl.col("rank") == 0)
    assert mine["oversubscription_factor"].to_list() == want["oversubscription_factor"].to_list()


def test_a_figure_over_reports_counts_those_that_do_not_know_it(two):
    rows = {(r["table"], r["figure"]): r for r in table(two, "all_stats").to_dicts()}
    peak = rows["rank_stats", "managed_peak_bytes"]
    own = table(two, "rank_stats")["managed_peak_bytes"].to_list()
    assert (peak["min"], peak["max"]) == (min(own), max(own))
    assert rows["rank_pca_effect", "n_tensors"]["n"] == 1


def test_a_snapshot_that_is_none_costs_only_itself(tmp_path, caplog):
    path = write(tmp_path / "rank0.sqlite")
    (tmp_path / "rank0.pickle").write_bytes(b"no pickle at all")
    out = run("uvm_allocator", [path], tmp_path / "out")
    assert table(out, "rank_stats").height == 1
    assert "rank0.pickle, the memory snapshot of" in caplog.text
    assert "could not be used" in caplog.text


def test_with_several_reports_a_snapshot_without_a_name_is_nobody_s(tmp_path):
    paths = [write(tmp_path / f"rank{n}.sqlite") for n in range(2)]
    (tmp_path / "snapshot.pickle").write_bytes(b"of one of both")
    out = run("uvm_allocator", paths, tmp_path / "out")
    assert table(out, "rank_stats")["snapshot"].to_list() == [None, None]


def test_a_folder_of_snapshots_that_is_not_there_is_refused(tmp_path, caplog):
    path = write(tmp_path / "rank0.sqlite")
    with pytest.raises(SystemExit) as stop:
        run("uvm_allocator", [path], tmp_path / "out", "--snapshot-dir", str(tmp_path / "none"))
    assert stop.value.code == 1
    assert "no such folder" in caplog.text
