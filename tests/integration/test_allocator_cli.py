"""`nsan allocator` as its user meets it, on the real snapshots of sample_data."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import polars as pl
import pytest

import nsan
from nsan.cli import main
from nsan.cli.allocator import BY

ROOT = Path(nsan.__file__).parent.parent
FOLDER = ROOT / "sample_data" / "snapshots"
DECOMFL = str(FOLDER / "decomfl_opt125m_full_history.pickle.gz")
VERL = str(FOLDER / "verl_vllm_two_mempools.pickle.gz")
KIVI = str(FOLDER / "kivi_llama_state_only.pickle.gz")
TRACE = str(ROOT / "sample_data" / "um_vector_add_rtx4060l.sqlite")


def answer(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_first_answer_has_the_figures_of_the_documents(capsys):
    """Golden values of sample_data/snapshots/README.md."""
    out = answer(capsys, "allocator", DECOMFL)
    assert "7 946 of 7 946 addresses and 61 of 61 new segments" in out
    assert "Utilization 94.4%" in out
    assert "fragmentation 5.6%" in out
    assert "18 segments of 620.00 MiB hold no tensor" in out
    assert "493 VA blocks of 2 MiB hold tensors, 107 of them two or more" in out
    assert "modelled)" in out
    assert str(FOLDER) not in out


def test_a_snapshot_without_history_says_so_and_shows_no_peak(capsys):
    out = answer(capsys, "allocator", KIVI)
    assert "no history, only the last state" in out
    assert "at peak" not in out
    assert "Utilization" not in out


def test_several_pools_stand_apart(capsys):
    lines = answer(capsys, "allocator", VERL).splitlines()
    pools = {line.split()[0]: line.split() for line in lines if line.startswith("0,")}
    assert {pool: cells[1] for pool, cells in pools.items()} == {
        "0,0": "59",
        "0,1": "44",
        "0,2": "24",
    }


def test_json_holds_each_part_and_the_kind_of_each_column(capsys):
    document = json.loads(answer(capsys, "allocator", DECOMFL, "--json"))
    assert document["schema"] == 1
    assert document["source"] == "decomfl_opt125m_full_history.pickle.gz"
    assert document["source_kind"] == "torch-snapshot"
    state = next(row for row in document["state"] if row["pool"] == "all")
    assert state["reserved_bytes"] == 1897922560
    assert state["cached_bytes"] == 883492352
    (use,) = document["utilization"]
    assert use["peak_allocated_bytes"] == 1790894592
    assert use["peak_allocated_bytes"] / use["peak_reserved_bytes"] == pytest.approx(
        0.9436, abs=5e-5
    )
    assert document["kinds"]["stitching"]["saved_bytes"] == "modelled"
    assert document["kinds"]["state"]["cached_bytes"] == "derived"
    assert set(document["kinds"]) <= set(document)


def test_markdown_has_headings_and_tables(capsys):
    out = answer(capsys, "allocator", KIVI, "--format", "markdown")
    assert out.startswith("# kivi")
    assert "\n## GPU 0" in out
    assert "|" in out


@pytest.mark.parametrize("by", BY)
def test_each_choice_answers_its_question_in_every_format(by, capsys, tmp_path):
    from nsan.analysis.catalog import find

    found = find(BY[by])
    document = json.loads(answer(capsys, "allocator", KIVI, "--by", by, "--json"))
    assert document["question"] == found.question
    assert answer(capsys, "allocator", KIVI, "--by", by).startswith(found.question)
    csv = answer(capsys, "allocator", KIVI, "--by", by, "--format", "csv", "-q")
    assert csv.splitlines()[0].split(",") == list(found.result.schema)
    file = tmp_path / "out.parquet"
    answer(capsys, "allocator", KIVI, "--by", by, "--format", "parquet", "-o", str(file), "-q")
    assert pl.read_parquet(file).height == len(document["rows"])


def test_analyse_takes_a_snapshot_where_the_analysis_is_of_one(capsys):
    document = json.loads(answer(capsys, "analyse", "allocator_state", KIVI, "--json"))
    assert document["rows"][0]["reserved_bytes"] == 17133731840


def test_a_setting_of_ones_own_is_tried(capsys):
    arguments = ("--by", "settings", "--set", "setting=max_split_size_mb:64", "--json")
    document = json.loads(answer(capsys, "allocator", DECOMFL, *arguments))
    settings = [row["setting"] for row in document["rows"]]
    assert "max_split_size_mb:64" in settings
    assert "as recorded" in settings
    assert len(settings) <= 3


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["allocator", TRACE], 1, "nsan summary FILE"),
        (["summary", KIVI], 1, "nsan allocator FILE"),
        (["analyse", "batches", KIVI], 1, "nsan allocator FILE"),
        (["analyse", "allocator_state", TRACE], 1, "nsan summary FILE"),
        (["analyse", "allocator_state", KIVI, "--gpu", "0"], 2, "leave the filters out"),
        (["allocator", KIVI, "--set", "x=1"], 2, "choose one with --by"),
        (["allocator", DECOMFL, "--by", "settings", "--set", "setting=split:3"], 2, "split"),
        (["allocator", KIVI, "--format", "parquet"], 2, "not a table"),
        (["allocator", str(FOLDER)], 1, "folder"),
        (["allocator", "no-such.pickle"], 1, "no such file"),
    ],
)
def test_a_wrong_question_is_one_message_with_the_way_out(arguments, status, said, capsys):
    assert main(arguments) == status
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") <= 3


def test_an_analysis_of_the_other_kind_of_source_is_refused_by_name():
    with pytest.raises(nsan.errors.UsageError, match="batches reads a trace of nsys"):
        nsan.analyse(nsan.open_snapshot(KIVI), "batches")
    with pytest.raises(nsan.errors.UsageError, match="allocator_state reads a memory snapshot"):
        nsan.analyse(nsan.open_trace(TRACE), "allocator_state")


def test_a_snapshot_is_never_written_over(capsys, tmp_path):
    copy = tmp_path / "snapshot.pickle"
    copy.write_bytes(Path(KIVI).read_bytes())
    assert main(["allocator", str(copy), "-o", str(copy), "--force-overwrite"]) == 2
    assert copy.read_bytes() == Path(KIVI).read_bytes()
    assert capsys.readouterr().err


def freed(device):
    """A GPU that took 20 MiB for a tensor of 4 MiB, and gave all back."""
    actions = ("segment_alloc", "alloc", "free_requested", "free_completed", "segment_free")
    return [
        {
            "action": action,
            "addr": (device + 1) << 40,
            "size": (20 if action.startswith("segment") else 4) << 20,
            "stream": 0,
            "time_us": 1_700_000_000_000_000 + i,
            "frames": [],
        }
        for i, action in enumerate(actions)
    ]


def written(tmp_path, **parts):
    path = tmp_path / "own.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [], **parts}))
    return str(path)


def test_a_gpu_that_gave_all_back_is_not_forgotten(tmp_path, capsys):
    out = answer(capsys, "allocator", written(tmp_path, device_traces=[freed(0), freed(1)]))
    for gpu in (0, 1):
        assert f"GPU {gpu}: whole history, 5 entries" in out
    assert out.count("Utilization 20.0%") == 2
    assert out.count("\nnow                     0 B") == 2


def test_what_is_odd_in_a_file_is_said_to_people(tmp_path, capsys):
    entries = [entry for entry in freed(0) if not entry["action"].startswith("free")]
    entries[0]["colour"] = "red"
    entries.append({**entries[0], "action": "teleport"})
    out = answer(capsys, "allocator", written(tmp_path, device_traces=[entries]))
    assert "part of a history" in out
    assert "no free_requested or free_completed entries" in out or "no free_completed or" in out
    assert "keys that nsan does not know were left out (trace.colour)" in out
    assert "actions that nsan does not know were left out (teleport)" in out
    assert "is reconstructed, and may be wrong" in out


def test_many_failures_are_cut_for_people_and_whole_for_machines(tmp_path, capsys):
    oom = {
        "action": "oom",
        "size": 30 << 20,
        "stream": 0,
        "device_free": 0,
        "time_us": 1,
        "frames": [],
    }
    path = written(tmp_path, device_traces=[[*freed(0)[:2], *[oom] * 30]])
    out = answer(capsys, "allocator", path)
    assert "(22 more: --by oom)" in out
    document = json.loads(answer(capsys, "allocator", path, "--json"))
    assert len(document["ooms"]) == 30
    assert {row["verdict"] for row in document["ooms"]} == {"capacity"}


def test_not_all_is_not_written_as_100_percent(capsys):
    """99.96 % of the reserved memory is in use there."""
    out = answer(capsys, "allocator", str(FOLDER / "flexgen_oom_old_format.pickle.gz"))
    assert "99.9%" in out
    assert "100.0%" not in out


def test_one_pool_has_no_table_of_pools(capsys):
    assert "Pool" not in answer(capsys, "allocator", KIVI)
    assert "Pool" in answer(capsys, "allocator", VERL)


def test_odd_values_of_settings_and_cells_are_named(tmp_path, capsys):
    entries = freed(0)
    entries[1]["time_us"] = "soon"
    settings = {"max_split_size": float("inf"), "expandable_segments": False}
    path = written(tmp_path, device_traces=[entries], allocator_settings=settings)
    out = answer(capsys, "allocator", path)
    assert "settings of odd values count as PyTorch's default (max_split_size)" in out
    assert "1 values could not be used (trace.time_us)" in out


def test_a_round_number_of_entries_is_suspicious(tmp_path, capsys):
    rounds = (freed(0) * 201)[1:1001]  # begins with the tensor in a segment from before
    for i, entry in enumerate(rounds):
        rounds[i] = {**entry, "time_us": entry["time_us"] + 10 * i}
    out = answer(capsys, "allocator", written(tmp_path, device_traces=[rounds]))
    assert "1 000 entries; a round number: older ones may have been dropped" in out


def test_stitching_that_saves_nothing_says_so(tmp_path, capsys):
    entries = freed(0)
    for entry in entries:
        entry["size"] = 20 << 20
    out = answer(capsys, "allocator", written(tmp_path, device_traces=[entries]))
    assert "Stitching free memory (GMLake) would save nothing at the peak (modelled)." in out


def test_what_stands_in_the_file_stays_recorded_when_the_replay_disagrees(tmp_path, capsys):
    entries = [entry for entry in freed(0) if not entry["action"].startswith("free")]
    path = written(tmp_path, device_traces=[entries])
    kinds = json.loads(answer(capsys, "allocator", path, "--json"))["kinds"]["utilization"]
    assert kinds["n_entries"] == kinds["final_active_bytes"] == "recorded"
    assert kinds["final_utilization_fraction"] == "derived"
    assert kinds["peak_active_bytes"] == kinds["peak_active_sequence"] == "reconstructed"
