"""A trace joined with the memory snapshot of the same run, judged by the model's truth."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace

import polars as pl
import pytest

import nsan
from nsan.analysis.pca.tables import PROCESSOR
from nsan.cli import main
from nsan.errors import NotAlignedError, UsageError
from nsan.io.torch_snapshot import write_snapshot
from nsan.joined import Joined, Part
from nsan.model.machine import run
from nsan.model.making import make
from nsan.model.nsys_export import ExportOptions
from nsan.model.settings import Settings
from nsan.model.sweep import Case, recipe
from nsan.model.workloads import network
from nsan.model.workloads.training import TrainingRun

CASES = {
    "caching": Case(1.5, "caching", "none"),
    "hinted": Case(2, "caching", "prefetch"),
    "raw": Case(1.5, "raw", "none"),
    "other": Case(1.25, "caching", "none"),
}
"""Training steps on the model: another allocator, memory or hint each."""

KEYS = ["start_ns", "va"]
PLACED = ["bytes", "position", "state", "tensor_id", "is_stale", "is_dead"]


def recipe_of(name):
    return recipe(network("alexnet"), TrainingRun(batch=2, image=64), Settings(), CASES[name])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joined")
    for name in CASES:
        make(recipe_of(name), folder / name)
        nsan.import_trace(folder / name / f"{name}.sqlite", folder / "stores" / name)
    return folder


def files(runs, name):
    """Give the trace, as a store that was made once for all tests, and the snapshot."""
    return runs / "stores" / name, runs / name / "snapshot.pickle"


def truth(runs, name, table):
    return pl.read_parquet(runs / name / "truth" / f"{table}.parquet")


def plain(rows):
    """Make labels plain text: the truth has no types of ours."""
    return rows.with_columns(pl.col(pl.Enum, pl.Categorical).cast(pl.String))


def same_as_truth(joined, runs, name):
    moves = plain(joined.tensor_moves.collect()).sort(KEYS)
    expected = truth(runs, name, "tensor_moves").sort(KEYS)
    assert moves.height == expected.height > 1000
    for column in (*KEYS, *PLACED):
        assert moves[column].to_list() == expected[column].to_list(), column
    return moves


def entry_times(name):
    """Give when each entry of the history was made, ns on the trace's clock, before it was cut to us."""
    made = recipe_of(name)
    done = [0, *run(made.program, made.settings).operation_ns]
    return [done[entry.after] for entry in made.placed.history.entries]


def planted(runs, name, path, offset_us, drift):
    """Write the snapshot anew, as if its clock began elsewhere and went faster."""
    wall = [int(ns * (1 + drift) // 1000) + offset_us for ns in entry_times(name)]
    snapshot = nsan.open_snapshot(files(runs, name)[1])
    tables = ("segments", "blocks", "stacks", "allocator_events")
    frames = {table: getattr(snapshot, table).collect() for table in tables}
    events = frames["allocator_events"].with_columns(time_us=pl.Series(wall))
    write_snapshot(path, {**frames, "allocator_events": events}, model=snapshot.info.model)
    return path


@pytest.mark.parametrize("name", ["caching", "hinted", "raw"])
def test_every_migrated_byte_and_fault_row_lands_where_the_truth_says(runs, name):
    joined = nsan.join(*files(runs, name))
    moves = same_as_truth(joined, runs, name)
    about = json.loads((runs / name / "model.json").read_text())["figures"]
    for direction, key in (("htod", "dead_in_bytes"), ("dtoh", "dead_out_bytes")):
        dead = moves.filter(pl.col("is_dead"), direction=direction)["bytes"].sum()
        assert dead == about[key]
    faults = plain(joined.tensor_faults.collect()).filter(processor="gpu").sort("end_ns")
    expected = truth(runs, name, "tensor_faults").sort("batch")
    assert faults.height == expected.height > 500
    for column in ("va", "position", "state", "tensor_id"):
        assert faults[column].to_list() == expected[column].to_list(), column


@pytest.mark.parametrize("drift", [-4e-5, 7e-5])
def test_a_snapshot_whose_clock_began_elsewhere_and_drifts_joins_the_same(runs, tmp_path, drift):
    offset_us = 1_764_500_000_123_456
    path = planted(runs, "caching", tmp_path / "snapshot.pickle", offset_us, drift)
    joined = nsan.join(files(runs, "caching")[0], path)
    same_as_truth(joined, runs, "caching")
    (used,) = joined.clock_fits.filter("is_used").collect().iter_rows(named=True)
    assert used["method"] == "segments"
    assert used["residual_max_ns"] < 1000
    # The mapping itself: each entry is less than 1 us from where it was, though it was cut to 1 us.
    wall = joined.snapshot.allocator_events.collect()["time_us"].to_list()
    for wall_us, trace_ns in zip(wall, entry_times("caching"), strict=True):
        found = (wall_us - used["reference_us"]) * 1000 * (1 + used["drift"]) + used["offset_ns"]
        assert abs(found - trace_ns) < 1000


@pytest.mark.parametrize("other", ["other", "raw", "hinted"])
def test_the_snapshot_of_another_run_is_refused(runs, other):
    joined = nsan.join(files(runs, "caching")[0], files(runs, other)[1])
    with pytest.raises(
        NotAlignedError, match=r"Not aligned: snapshot.pickle is not of the run of cac"
    ):
        joined.tensor_moves.collect()


def test_without_a_snapshot_each_managed_allocation_is_a_tensor_and_nothing_is_dead(runs):
    joined = nsan.join(files(runs, "raw")[0], None)
    moves = joined.tensor_moves.collect()
    assert moves["bytes"].sum() == joined.trace.migrations.collect()["bytes"].sum()
    assert not moves["is_dead"].any()
    assert joined.tensor_lives.collect().height == joined.trace.allocations.collect().height
    with pytest.raises(UsageError, match="was joined with none"):
        nsan.analyse(joined, "allocator_tensors")


def test_fault_figures_of_a_capture_without_fault_rows_are_unknown_and_not_zero(runs, tmp_path):
    folder = tmp_path / "blind"
    make(replace(recipe_of("caching"), options=ExportOptions(gpu_faults=False)), folder)
    blind = nsan.join(folder / "blind.sqlite", folder / "snapshot.pickle")
    (row,) = nsan.analyse(blind, "pca_effect").collect().iter_rows(named=True)
    unknown = [name for name in row if "fault_rows" in name or "first_touch" in name]
    assert len(unknown) == 7
    assert {row[name] for name in unknown} == {None}
    seen = nsan.analyse(nsan.join(*files(runs, "caching")), "pca_effect").collect()
    assert row["dead_in_bytes"] == seen["dead_in_bytes"].item() > 0


def test_without_memory_usage_the_number_of_allocations_is_unknown(tmp_path, capsys):
    folder = tmp_path / "blind"
    make(replace(recipe_of("caching"), options=ExportOptions(memory_usage=False)), folder)
    trace, snapshot = folder / "blind.sqlite", folder / "snapshot.pickle"
    (row,) = nsan.analyse(nsan.join(trace, snapshot), "pca_effect").collect().iter_rows(named=True)
    assert row["n_managed_allocs"] is row["n_managed_frees"] is row["fault_rows_per_alloc"] is None
    assert "the driver made" not in answer(capsys, "allocator", trace, "--snapshot", snapshot)


def test_a_gpu_that_moves_what_is_of_another_ones_tensors_keeps_them_under_a_filter(runs):
    joined = nsan.join(*files(runs, "caching"))
    moves = joined.tensor_moves.collect()
    # As if a second GPU had made every other migration.
    other = pl.when(pl.col("migration") % 2 == 1).then(3).otherwise("device_id").alias("device_id")
    joined.tables["tensor_moves"] = moves.with_columns(other)
    third = Joined(joined.trace, joined.snapshot, part=Part(joined, devices=(3,)))
    held = set(third.tensor_moves.collect()["tensor_id"].drop_nulls())
    assert held
    assert held == set(third.tensor_lives.collect()["tensor_id"])
    lines = nsan.analyse(third, "line_traffic").collect()
    assert lines.filter(pl.col("part").is_null())["n_tensors"].sum() == 0
    assert (
        lines["in_bytes"].sum()
        == third.tensor_moves.filter(direction="htod").collect()["bytes"].sum()
    )
    first = joined.filter(device=0)
    assert first.tensor_lives.collect().height == joined.tensor_lives.collect().height
    nobody = Joined(joined.trace, joined.snapshot, part=Part(joined, pids=(1,)))
    assert nobody.tensor_lives.collect().is_empty()


def test_faults_of_the_cpu_have_no_gpu_and_stay_under_a_filter_by_gpu(runs):
    joined = nsan.join(*files(runs, "caching"))
    faults = joined.tensor_faults.collect()
    of_cpu = {"device_id": pl.lit(None, pl.Int64), "processor": pl.lit("cpu", PROCESSOR)}
    joined.tables["tensor_faults"] = pl.concat([faults, faults.head(3).with_columns(**of_cpu)])
    assert joined.filter(device=0).tensor_faults.collect().height == faults.height + 3


def test_rows_without_a_place_are_unknown_and_stop_nothing(runs, tmp_path, capsys):
    path = tmp_path / "caching.sqlite"
    shutil.copy(runs / "caching" / "caching.sqlite", path)
    with closing(sqlite3.connect(path)) as export:
        table = "CUPTI_ACTIVITY_KIND_MEMCPY"
        for i, change in enumerate(("virtualAddress = NULL", "bytes = 0", f"bytes = {1 << 62}")):
            export.execute(f"UPDATE {table} SET {change} WHERE copyKind > 10 AND rowid % 400 = {i}")
        export.commit()
    snapshot = files(runs, "caching")[1]
    out = answer(capsys, "allocator", path, "--snapshot", snapshot)
    assert "unknown: see below" in out
    assert "their rows lack a place" in out
    joined = nsan.join(path, snapshot)
    unknown = joined.tensor_moves.filter(pl.col("va").is_null()).collect()
    assert unknown.height
    assert set(unknown["state"]) == {"unknown"}
    assert unknown["is_dead"].null_count() == unknown.height


def test_filters_choose_rows_of_the_join_and_parts_add_up(runs):
    joined = nsan.join(*files(runs, "caching"))
    moves = joined.tensor_moves.collect()
    middle = int(moves["start_ns"].median())
    halves = [joined.filter(time=(None, middle)), joined.filter(time=(middle, None))]
    parts = [half.tensor_moves.collect() for half in halves]
    assert pl.concat(parts).sort(KEYS).equals(moves.sort(KEYS))
    assert parts[0]["start_ns"].max() < middle <= parts[1]["start_ns"].min()
    # A filter does not change what a tensor is: the join is that of the whole.
    assert halves[0].tensor_lives.collect().equals(joined.tensor_lives.collect())
    states = [nsan.analyse(half, "state_traffic").collect()["bytes"].sum() for half in halves]
    assert sum(states) == moves["bytes"].sum()
    step = joined.filter(nvtx="step/1").filter(device=0)
    assert 0 < step.tensor_moves.collect().height < moves.height
    with pytest.raises(UsageError, match="whole capture"):
        nsan.analyse(step, "pca_effect")
    with pytest.raises(UsageError, match="Join the whole trace"):
        nsan.join(joined.trace.filter(device=0), joined.snapshot)


def test_a_join_answers_the_questions_of_both_halves(runs):
    joined = nsan.join(*files(runs, "caching"))
    own = nsan.analyse(joined, "batches").collect()
    assert own.equals(nsan.analyse(joined.trace, "batches").collect())
    assert nsan.analyse(joined, "allocator_state").collect().height > 0
    assert joined.kernels.collect().height > 0
    with pytest.raises(AttributeError, match="no table 'nothing'"):
        _ = joined.nothing
    with pytest.raises(UsageError, match=r"nsan\.join"):
        nsan.analyse(joined.trace, "pca_effect")


def answer(capsys, *arguments):
    assert main([str(each) for each in arguments]) == 0
    return capsys.readouterr().out


def test_the_first_answer_says_how_much_moved_for_no_tensor(runs, capsys):
    trace, snapshot = files(runs, "caching")
    out = answer(capsys, "allocator", trace, "--snapshot", snapshot)
    figures = json.loads((runs / "caching" / "model.json").read_text())["figures"]
    dead = {key: f"{figures[key] / 2**20:.2f} MiB" for key in ("dead_in_bytes", "dead_out_bytes")}
    assert f"Dead traffic: {dead['dead_out_bytes']} out and {dead['dead_in_bytes']} in" in out
    assert "written by nsan's UVM driver model, not recorded" in out
    assert "Clocks aligned by " in out
    assert "classifier.1.weight" in out
    assert str(runs) not in out


def test_what_is_outside_all_segments_is_not_said_to_be_of_a_tensor(runs, capsys):
    trace, snapshot = files(runs, "raw")
    out = answer(capsys, "allocator", trace, "--snapshot", snapshot)
    assert "not the allocator's" in out
    assert "live, their age unknown" in out
    assert "Dead traffic: none.\n" in out


def test_a_part_says_that_it_is_one_and_leaves_out_what_only_the_whole_tells(runs, capsys):
    trace, snapshot = files(runs, "caching")
    command = ("allocator", trace, "--snapshot", snapshot, "--filter-nvtx", "step/1")
    out = answer(capsys, *command)
    assert "Filtered: migrations that start in the part" in out
    assert "Dead traffic" not in out
    document = json.loads(answer(capsys, *command, "--json"))
    assert document["effect"] is None
    assert document["windows_ns"]


def test_an_analysis_of_a_snapshot_takes_it_from_beside_a_trace(runs, capsys):
    trace, snapshot = files(runs, "caching")
    beside = answer(capsys, "analyse", "allocator_state", trace, "--snapshot", snapshot, "--json")
    assert beside == answer(capsys, "analyse", "allocator_state", snapshot, "--json")


def test_times_and_counts_of_one_name_have_headings_of_their_own(runs, capsys):
    trace, snapshot = files(runs, "caching")
    command = (
        "allocator",
        trace,
        "--snapshot",
        snapshot,
        "--by",
        "step",
        "--format",
        "markdown",
        "-v",
    )
    (header,) = (
        line
        for line in answer(capsys, *command).splitlines()
        if "First touch" in line and line.startswith("|")
    )
    names = [each.strip() for each in header.strip("|").split("|")]
    assert {"First touch", "First touch time", "Dead in", "Dead in time"} <= set(names)
    assert len(names) == len(set(names))


def test_json_closes_and_says_the_kind_of_each_figure(runs, capsys):
    trace, snapshot = files(runs, "caching")
    document = json.loads(answer(capsys, "allocator", trace, "--snapshot", snapshot, "--json"))
    figures = json.loads((runs / "caching" / "model.json").read_text())["figures"]
    moved = figures["in_coherence_bytes"] + figures["in_prefetch_bytes"] + figures["out_bytes"]
    assert sum(row["bytes"] for row in document["states"]) == moved
    assert document["snapshot"] == "snapshot.pickle"
    assert set(document["kinds"]["effect"].values()) == {"modelled"}


@pytest.mark.parametrize(
    "by",
    [
        "tensor",
        "line",
        "annotation",
        "state",
        "va-block",
        "step",
        "effect",
        "migration",
        "fault",
        "life",
        "clock",
    ],
)
def test_each_choice_gives_rows(runs, capsys, by):
    trace, snapshot = files(runs, "caching")
    out = answer(capsys, "allocator", trace, "--snapshot", snapshot, "--by", by, "--format", "csv")
    assert len(list(csv.reader(io.StringIO(out)))) > 1


def test_choices_that_need_the_other_input_say_so(runs, capsys):
    trace, snapshot = files(runs, "caching")
    assert main(["allocator", str(snapshot), "--by", "line"]) == 2
    assert "--by line goes with --snapshot" in capsys.readouterr().err
    assert main(["allocator", str(trace), "--snapshot", str(snapshot), "--by", "oom"]) == 2
    assert "--by oom goes without --snapshot" in capsys.readouterr().err
    assert main(["allocator", str(snapshot), "--gpu", "0"]) == 2
    assert "no window" in capsys.readouterr().err
    assert main(["analyse", "pca_effect", str(trace)]) == 2
    assert "--snapshot FILE" in capsys.readouterr().err
    other = files(runs, "other")[1]
    swapped = "`nsan allocator TRACE --snapshot FILE`"
    assert main(["allocator", str(snapshot), "--snapshot", str(other)]) == 1
    assert swapped in capsys.readouterr().err
    plain = runs / "caching" / "caching.sqlite"
    assert main(["allocator", str(plain)]) == 1
    assert swapped in capsys.readouterr().err
    twice = ["--snapshot", str(snapshot), "--snapshot", str(other)]
    assert main(["allocator", str(trace), *twice]) == 2
    assert "--snapshot is given twice" in capsys.readouterr().err
    assert main(["allocator", str(trace), "--snapshot", str(other)]) == 1
    assert (
        "Not aligned: snapshot.pickle is not of the run of caching.sqlite"
        in capsys.readouterr().err
    )
