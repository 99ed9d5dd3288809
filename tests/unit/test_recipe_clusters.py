"""The recipe `uvm_clusters`: the clusters of every report, and what they are together."""

from __future__ import annotations

import exports as x
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from recipe_framework import NoDataError, run

import nsan
from nsan.recipe.um_clusters import largest

SAMPLES = x.REPOSITORY / "sample_data" / "model"
REPORTS = [SAMPLES / name / f"{name}.sqlite" for name in ("two_gpus", "random")]


def table(out, name):
    return pl.read_parquet(out / f"{name}.parquet")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clusters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSAN_CACHE_DIR", str(folder / "cache"))
        return run("uvm_clusters", REPORTS, folder / "out")


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_the_clusters_of_a_report_are_those_of_its_own_analysis(out, path):
    want = nsan.analyse(nsan.open_trace(path), "fault_clusters").collect()
    mine = table(out, "rank_clusters").filter(pl.col("source").str.ends_with(path.name))
    keys = ["pid", "device_id", "cluster_id"]
    got = mine.drop("run", "rank", "source").sort(keys)
    assert_frame_equal(got, want.with_columns(pl.col("pattern").cast(pl.String)).sort(keys))


def test_each_report_s_pages_are_those_of_its_clusters_and_noise(out):
    clusters, stats = table(out, "rank_clusters"), table(out, "rank_stats")
    for row in stats.to_dicts():
        mine = clusters.filter(pl.col("source") == row["source"])
        own = mine.filter(pl.col("cluster_id") >= 0)
        assert row["n_clusters"] == own.height
        assert row["n_pages"] == sum(mine["n_pages"])
        assert row["largest_pages"] == max(own["n_pages"])
        assert row["clustered_fraction"] == sum(own["n_pages"]) / sum(mine["n_pages"])


def test_classes_of_walks_add_up_over_reports(out):
    clusters = table(out, "rank_clusters").filter(pl.col("cluster_id") >= 0)
    patterns = table(out, "all_patterns")
    assert sum(patterns["n_clusters"]) == clusters.height
    assert sum(patterns["n_pages"]) == sum(clusters["n_pages"])
    assert sum(patterns["pages_fraction"]) == pytest.approx(1)


def test_the_largest_of_all_reports_come_first_and_noise_is_none_of_them(out):
    found = table(out, "all_clusters")
    pages = found["n_pages"].to_list()
    assert pages == sorted(pages, reverse=True)
    assert -1 not in found["cluster_id"].to_list()
    assert found["source"].n_unique() == 2


def test_noise_is_no_cluster_however_large_it_is():
    every = pl.DataFrame({"cluster_id": [-1, 0, 1], "n_pages": [900, 5, 7]}).select(
        *(pl.lit("a").alias(name) for name in ("run", "source")),
        *(pl.lit(0).alias(name) for name in ("rank", "pid", "device_id")),
        pl.all(),
    )
    assert largest(every)["cluster_id"].to_list() == [1, 0]


def test_rows_limit_what_each_report_brings_and_not_what_is_counted(out, tmp_path):
    few = run("uvm_clusters", REPORTS, tmp_path / "few", "--rows", "1")
    assert table(few, "rank_clusters").group_by("source").len()["len"].to_list() == [1, 1]
    assert_frame_equal(table(few, "rank_stats"), table(out, "rank_stats"))
    assert_frame_equal(table(few, "all_patterns"), table(out, "all_patterns"))


def test_reports_without_a_cluster_are_no_data_and_it_is_said_why(tmp_path, caplog):
    path = x.Export().add(x.MEMCPY, x.migration(0, 5, 4096)).write(tmp_path / "a.sqlite")
    with pytest.raises(NoDataError):
        run("uvm_clusters", [path], tmp_path / "out")
    assert "no cluster of page faults" in caplog.text
