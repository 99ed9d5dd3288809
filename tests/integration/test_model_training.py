"""`nsan model` on networks: a training step under an allocator, and sweeps over conditions."""

from __future__ import annotations

import csv
import json
import shutil

import polars as pl
import pytest

import nsan
from nsan.cli import main
from nsan.units import MIB

LITTLE = ("--batch", "2", "--image", "64")


def run(folder, *options):
    return main(["model", "run", "alexnet", *LITTLE, *options, "-o", str(folder), "-q"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One training run under each allocator, in two thirds of the memory that it needs."""
    folder = tmp_path_factory.mktemp("training")
    for allocator in ("raw", "caching"):
        options = ("--allocator", allocator, "--oversubscription-factor", "1.5")
        assert run(folder / allocator, *options) == 0
    return folder


def opened(runs, allocator):
    folder = runs / allocator
    return (
        nsan.open_trace(folder / f"{allocator}.sqlite"),
        nsan.open_snapshot(folder / "snapshot.pickle"),
        json.loads((folder / "model.json").read_text()),
    )


@pytest.mark.parametrize("allocator", ["raw", "caching"])
def test_the_segments_of_the_snapshot_are_the_managed_allocations_of_the_trace(runs, allocator):
    trace, snapshot, _ = opened(runs, allocator)
    made = snapshot.allocator_events.filter(pl.col("action") == "segment_alloc").collect()
    managed = trace.allocations.sort("alloc_ns").collect()
    assert made.select("va", "bytes").rows() == managed.select("va", "bytes").rows()
    assert made["time_us"].to_list() == (managed["alloc_ns"] // 1000).to_list()


def test_both_allocators_get_the_same_memory_for_the_same_tensors(runs):
    raw, caching = (opened(runs, kind)[2] for kind in ("raw", "caching"))
    tensors = raw["allocator"]["peak_tensor_bytes"]
    assert caching["allocator"]["peak_tensor_bytes"] == tensors
    chunks = int(tensors / 1.5) // (2 * MIB)
    assert raw["capacity_bytes"] == caching["capacity_bytes"] == chunks * 2 * MIB
    # Without caching what the driver has is what the tensors need; segments are larger.
    assert raw["peak_managed_bytes"] == tensors < caching["peak_managed_bytes"]


@pytest.mark.parametrize(("allocator", "n_segments"), [("caching", 10), ("raw", 100)])
def test_the_allocator_replays_its_own_history_exactly(runs, allocator, n_segments):
    _, snapshot, _ = opened(runs, allocator)
    check = nsan.analyse(snapshot, "replay_check").collect().row(0, named=True)
    assert check["is_complete"]
    assert check["n_allocs"] > 100
    assert check["n_addresses_exact"] == check["n_allocs"]
    assert check["n_segments_exact"] == check["n_segments_made"] > n_segments
    assert check["n_final_blocks_exact"] == check["n_final_blocks"]
    assert check["replay_kind"] == "derived"


def test_without_caching_nothing_is_reserved_that_no_tensor_asked_for(runs, capsys):
    _, snapshot, about = opened(runs, "raw")
    use = nsan.analyse(snapshot, "allocator_utilization").collect().row(0, named=True)
    assert use["utilization_fraction"] == 1
    assert use["peak_reserved_bytes"] == about["peak_managed_bytes"]
    assert use["waste_at_peak_bytes"] == 0
    assert main(["allocator", str(runs / "raw" / "snapshot.pickle")]) == 0
    assert "alexnet, raw allocator" in capsys.readouterr().out


def test_figures_of_a_modelled_snapshot_are_called_modelled(runs, capsys):
    snapshot = runs / "caching" / "snapshot.pickle"
    assert main(["allocator", str(snapshot), "--by", "pool", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {column["kind"] for column in document["columns"]} == {"modelled"}
    assert main(["allocator", str(snapshot)]) == 0
    assert "not recorded" in capsys.readouterr().out


def test_the_snapshot_names_the_tensors_of_the_network(runs):
    _, snapshot, _ = opened(runs, "caching")
    frames = nsan.analyse(snapshot, "allocator_frames").collect()
    weights = frames.filter(pl.col("function") == "classifier.4.weight").row(0, named=True)
    assert weights["block_bytes"] == 4096 * 4096 * 4
    assert weights["source_file"] == "<modelled alexnet>"


def test_the_figures_of_a_run_are_sums_of_its_trace(runs):
    trace, _, about = opened(runs, "raw")
    moved = trace.migrations.collect()
    into = moved.filter(pl.col("direction") == "htod")
    figures = about["figures"]
    assert figures["n_batches"] == trace.gpu_faults.collect().height > 0
    assert figures["in_coherence_bytes"] == into.filter(pl.col("cause_id") == 2)["bytes"].sum()
    assert figures["in_prefetch_bytes"] == into.filter(pl.col("cause_id") == 3)["bytes"].sum()
    assert figures["evicted_bytes"] == moved.filter(pl.col("cause_id") == 4)["bytes"].sum() > 0
    steps = trace.nvtx_ranges.filter(pl.col("name") == "step").sort("start_ns").collect()
    assert steps.height == 2
    assert figures["last_step_ns"] == steps["end_ns"][1] - steps["start_ns"][1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["alexnet", "--size", "64MiB"], "--size means nothing to the workload 'alexnet'"),
        (["alexnet", "--sequence", "16"], "alexnet takes images"),
        (["gpt2-small", "--image", "64"], "gpt2-small takes texts"),
        (["alexnet", "--hint", "warm"], "There is no hint 'warm'. There are: none, prefetch"),
        (["alexnet", "--hint", "prefetch:weights"], "There is no role of a tensor 'weights'"),
        (["sweep", "--allocator", "raw"], "--allocator means nothing to the workload 'sweep'"),
        (["sweep", "--batch", "3"], "--batch means nothing"),
        (["alexnet", "--batch", "9999999"], "batch"),
    ],
)
def test_a_wrong_option_is_one_message_and_leaves_nothing(tmp_path, capsys, options, said):
    assert main(["model", "run", *options, "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") <= 3
    assert not list(tmp_path.iterdir())


def test_a_sweep_into_a_file_is_one_message(tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    assert main(["model", "sweep", "alexnet", "-o", str(tmp_path / "out")]) == 1
    assert "out is a file. Choose another place." in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"


def test_a_table_of_something_else_is_never_written_over(tmp_path, capsys):
    (tmp_path / "sweep.csv").write_text("dose,response\n1,2\n")
    assert main(["model", "sweep", "alexnet", *LITTLE, "--factors", "2", "-o", str(tmp_path)]) == 1
    assert "no table of a sweep" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.csv"]
    assert (tmp_path / "sweep.csv").read_text() == "dose,response\n1,2\n"


SWEEP = ("alexnet", *LITTLE, "--steps", "1", "--factors", "0.8,2", "--hints", "none,prefetch")


def sweep(folder, *options):
    return main(["model", "sweep", *SWEEP, *options, "-o", str(folder)])


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep") / "alexnet"
    assert sweep(folder, "-q") == 0
    return folder


def test_a_sweep_leaves_a_run_for_each_condition_and_one_table(swept):
    names = {
        f"{allocator}-{factor}-{hint}"
        for allocator in ("raw", "caching")
        for factor in ("0.8", "2")
        for hint in ("none", "prefetch")
    }
    assert {path.name for path in swept.iterdir()} == {*names, "sweep.csv"}
    assert main(["allocator", str(swept / "raw-2-none" / "snapshot.pickle"), "--json"]) == 0
    rows = list(csv.DictReader((swept / "sweep.csv").read_text().splitlines()))
    assert len(rows) == len(names)
    for row in rows:
        folder = swept / f"{row['allocator']}-{float(row['factor']):g}-{row['hint']}"
        about = json.loads((folder / "model.json").read_text())
        assert int(row["n_batches"]) == about["figures"]["n_batches"]
        evicts = int(row["evicted_bytes"]) > 0
        assert evicts == (float(row["factor"]) > 1)
        assert (int(row["in_user_bytes"]) > 0) <= (row["hint"] == "prefetch")


def test_a_sweep_goes_on_where_it_was(swept, tmp_path, capsys):
    folder = tmp_path / "alexnet"
    shutil.copytree(swept, folder)
    shutil.rmtree(folder / "raw-2-none")
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*/model.json")}
    assert sweep(folder) == 0
    said = capsys.readouterr().err
    assert said.count("there already") == 7
    assert "raw-2-none\n" in said
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert (folder / "sweep.csv").read_text() == (swept / "sweep.csv").read_text()


@pytest.mark.parametrize("gone", ["raw-2-none.sqlite", "snapshot.pickle", "truth/batches.parquet"])
def test_a_run_that_is_not_whole_any_more_is_made_again(swept, tmp_path, capsys, gone):
    folder = tmp_path / "alexnet"
    shutil.copytree(swept, folder)
    (folder / "raw-2-none" / gone).unlink()
    assert sweep(folder) == 0
    assert capsys.readouterr().err.count("there already") == 7
    assert (folder / "raw-2-none" / gone).exists()


def test_a_sweep_refuses_runs_that_were_made_in_another_way(swept, capsys):
    before = (swept / "sweep.csv").read_text()
    assert main(["model", "sweep", *SWEEP, "--batch-size", "64", "-o", str(swept), "-q"]) == 1
    said = capsys.readouterr().err
    assert "raw-0.8-none is there, and was made in another way. Choose another place." in said
    assert (swept / "sweep.csv").read_text() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["sweep"], "'sweep' trains no network"),
        (["gpt3"], "There is no network 'gpt3'"),
        (["alexnet", "--allocators", "rmm"], "There is no allocator 'rmm'"),
        (["alexnet", "--factors", "0"], "Take one above 0"),
        (["alexnet", "--factors", ""], "no run"),
        (["alexnet", "--hints", "warm"], "There is no hint 'warm'"),
        (["alexnet", "--hints", "none:parameter"], "no hint has no roles"),
        (["alexnet", "--factors", "abc"], "'abc' is no list of numbers"),
        (["alexnet", "--factors", "0.001"], "with all its memory the GPU gives 0.02"),
        (["alexnet", "--factors", "1e30"], "with one chunk of 2 MiB the GPU gives"),
        (["alexnet", "--varying", "--batch", "1"], "Batches of one image cannot vary"),
    ],
)
def test_a_wrong_sweep_is_one_message_and_leaves_nothing(tmp_path, capsys, options, said):
    assert main(["model", "sweep", *options, "-o", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
