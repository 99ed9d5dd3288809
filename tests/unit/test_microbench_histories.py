"""The history of a C++ run as a memory snapshot that nsan opens and replays."""

from __future__ import annotations

import json
import pickle
import random

import cpp
import pytest

import nsan
from nsan.cli import main
from nsan.errors import OutputExistsError
from nsan.microbench.histories import HistoryError, snapshot_of
from nsan.torch_alloc.file_settings import settings_of
from nsan.torch_alloc.replay import replay
from nsan.units import KIB, MIB

START_NS = 1_790_000_000_123_456_789
RUN = {
    "nsan_microbench": 1,
    "program": "dl_bench",
    "network": "resnet-8",
    "start_utc_ns": START_NS,
    "device": {"ordinal": 0},
}
SIZES = (1, 600, 40 * KIB, 900 * KIB, MIB, 1500 * KIB, 3 * MIB, 11 * MIB, 12 * MIB + 1)


def random_operations(seed, n=500):
    """Tensors of six steps that come and go; at times the cache is emptied."""
    rng = random.Random(seed)
    n_made, live, operations = 0, [], []
    for i in range(n):
        if live and rng.random() < 0.47:
            operations.append(f"f {live.pop(rng.randrange(len(live)))}")
        elif rng.random() < 0.02:
            operations.append("e")
        else:
            operations.append(f"a layer{rng.randrange(9)}.out#{i // 80} {rng.choice(SIZES)}")
            live.append(n_made)
            n_made += 1
    return [*operations, "h"]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Let the C++ program do something with a caching memory; the folder of its tables."""
    program = cpp.built("test_memory", ["test_memory.cpp"])

    def run(operations):
        folder = tmp_path_factory.mktemp("run") / "run.truth"
        folder.mkdir()
        ended = cpp.run(program, "caching", folder, stdin="\n".join(operations))
        assert ended.returncode == 0, ended.stderr
        assert "error" not in ended.stdout
        (folder / "run.json").write_text(json.dumps(RUN), encoding="utf-8")
        return folder

    return run


@pytest.mark.parametrize("seed", range(4))
def test_the_replay_predicts_every_entry_of_a_run_and_what_it_left(run_of, tmp_path, seed):
    operations = random_operations(seed)
    snapshot_of(run_of(operations), tmp_path / "run.pickle")
    snapshot = nsan.open_snapshot(tmp_path / "run.pickle")
    assert snapshot.info.warnings == []
    assert [device.history for device in snapshot.info.devices] == ["complete"]
    assert snapshot.info.torch_versions == "2.9"
    names = dict(snapshot.allocator_settings.select("name", "value").collect().iter_rows())
    settings, odd = settings_of(names)
    assert odd == []
    found = replay(
        snapshot.segments.collect(),
        snapshot.blocks.collect(),
        snapshot.allocator_events.collect(),
        settings,
    ).agreement
    assert found.first_difference is None
    assert found.n_addresses_exact == found.n_allocs == sum(o[0] == "a" for o in operations)
    assert found.n_segments_exact == found.n_segments_made > 5
    assert found.n_final_blocks_exact == found.n_final_blocks > 20
    assert (found.n_skipped, found.n_forced_frees, found.n_contradictions) == (0, 0, 0)


SMALL = ["a conv.weight#0 600", f"a conv.out#1 {3 * MIB}", "f 1", f"a conv.out#2 {3 * MIB}", "h"]


def test_the_snapshot_has_tensors_as_stacks_and_the_times_of_the_wall_clock(run_of, tmp_path):
    folder = run_of(SMALL)
    lines = (folder / "history.csv").read_text(encoding="utf-8").splitlines()[1:]
    snapshot_of(folder, tmp_path / "run.pickle")
    raw = pickle.loads((tmp_path / "run.pickle").read_bytes())
    (trace,) = raw["device_traces"]
    assert [entry["frames"][0]["name"] for entry in trace] == [
        *["conv.weight"] * 2,
        *["conv.out"] * 5,
    ]
    assert trace[0]["frames"][0]["filename"] == "<dl_bench resnet-8>"
    assert [entry["time_us"] for entry in trace] == [
        (START_NS + int(line.split(",")[1])) // 1000 for line in lines
    ]
    large, small = sorted(raw["segments"], key=lambda s: -s["total_size"])
    assert (large["segment_type"], large["total_size"]) == ("large", 20 * MIB)
    assert (large["active_size"], large["requested_size"]) == (3 * MIB, 3 * MIB)
    assert (small["allocated_size"], small["requested_size"]) == (1024, 600)
    assert [block["state"] for block in large["blocks"]] == ["active_allocated", "inactive"]
    assert [block["frames"][:1] != [] for block in large["blocks"]] == [True, False]
    assert "nsan_model" not in raw


def test_the_command_line_opens_it(run_of, tmp_path, capsys):
    snapshot_of(run_of(random_operations(9)), tmp_path / "run.pickle")
    assert main(["allocator", str(tmp_path / "run.pickle")]) == 0
    out = capsys.readouterr().out
    n_allocs = sum(o[0] == "a" for o in random_operations(9))
    assert f"{n_allocs} of {n_allocs} addresses" in out
    assert "layer" in out


def test_an_entry_of_no_address_is_an_oom(run_of, tmp_path):
    folder = run_of(SMALL)
    history = (folder / "history.csv").read_text(encoding="utf-8")
    history += '8,99,oom,,1048576000,0,"0,0","conv.out#3"\n'
    (folder / "history.csv").write_text(history, encoding="utf-8")
    snapshot_of(folder, tmp_path / "run.pickle")
    raw = pickle.loads((tmp_path / "run.pickle").read_bytes())
    last = raw["device_traces"][0][-1]
    assert (last["action"], last["size"], "addr" in last) == ("oom", 1048576000, False)


def test_the_gpu_is_that_of_the_run(run_of, tmp_path):
    folder = run_of(SMALL)
    (folder / "run.json").write_text(json.dumps({**RUN, "device": {"ordinal": 2}}))
    snapshot_of(folder, tmp_path / "run.pickle")
    info = nsan.open_snapshot(tmp_path / "run.pickle").info
    assert [device.device_id for device in info.devices] == [2]


def test_a_name_of_a_tensor_is_data(run_of, tmp_path):
    name = 'a"b,\u00e9{}%#1'
    snapshot_of(run_of([f"a {name} 600", "h"]), tmp_path / "run.pickle")
    functions = nsan.open_snapshot(tmp_path / "run.pickle").stacks.collect()["function"]
    assert functions.to_list() == ['a"b,\u00e9{}%']


def strip_address(text):
    """Take the address (the fourth cell) out of the second line."""
    header, first, rest = text.split("\n", 2)
    cells = first.split(",")
    return "\n".join([header, ",".join([*cells[:3], "", *cells[4:]]), rest])


DAMAGES = {
    "no history": ("history.csv", lambda _: None, "No such file or directory"),
    "no blocks": ("blocks.csv", lambda _: None, "No such file or directory"),
    "no run.json": ("run.json", lambda _: None, "No such file or directory"),
    "cut short": ("history.csv", lambda text: text[:-30], "cut short"),
    "empty": ("history.csv", lambda _: "", "damaged"),
    "another table": ("blocks.csv", lambda text: text.replace("size_class", "kind"), "columns"),
    "not a number": ("blocks.csv", lambda text: text.replace("600", "six"), "damaged"),
    "an unknown action": ("history.csv", lambda text: text.replace("alloc", "take"), "damaged"),
    "no address": ("history.csv", strip_address, "lacks its address"),
    "no block's address": ("blocks.csv", strip_address, "lacks its address"),
    "no JSON": ("run.json", lambda text: text[:-1], "no JSON"),
    "no object": ("run.json", lambda _: "[]", "start_utc_ns"),
    "no start": ("run.json", lambda _: '{"start_utc_ns": "now"}', "start_utc_ns"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_said_in_one_message_and_nothing_is_written(run_of, tmp_path, damage):
    folder = run_of(SMALL)
    name, change, said = DAMAGES[damage]
    text = change((folder / name).read_text(encoding="utf-8"))
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(HistoryError) as error:
        snapshot_of(folder, tmp_path / "run.pickle")
    assert str(error.value).startswith(f"{name} of run.truth cannot be used: ")
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_is_replaced_only_if_that_is_asked_for(run_of, tmp_path):
    folder = run_of(SMALL)
    (tmp_path / "run.pickle").write_text("mine")
    with pytest.raises(OutputExistsError):
        snapshot_of(folder, tmp_path / "run.pickle")
    assert (tmp_path / "run.pickle").read_text() == "mine"
    snapshot_of(folder, tmp_path / "run.pickle", overwrite=True)
    assert nsan.open_snapshot(tmp_path / "run.pickle").segments.collect().height == 2
