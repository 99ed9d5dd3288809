"""Run and rank out of names."""

from __future__ import annotations

import os
import re

import exports as x
import pytest

from nsan.errors import UsageError
from nsan.fleet.finding import is_fleet, reports_in
from nsan.fleet.naming import checked_pattern, named, plausible
from nsan.io.corpus import hive_folder
from nsan.io.corpus_place import url_of
from nsan.io.launched import rank_in


@pytest.mark.parametrize(
    ("below", "run", "rank"),
    [
        ("rank12", "given", 12),
        ("train_rank3", "given/train", 3),
        ("monday/train_rank3", "given/monday/train", 3),
        ("monday/rank4/report1", "given/monday", 4),
        ("node7/rank4/report1", "given", 4),
        ("monday/node7/task-2", "given/monday", 2),
        ("monday/nid001234.proc5", "given/monday", 5),
        ("mpi_rank_2_of_8", "given", 2),
        # Ranks that count within a machine: the machine stays.
        ("monday/node7/local_rank1", "given/monday/node7", 1),
        ("node7/gpu1", "given/node7", 1),
        # One of the whole program is above it, wherever it is.
        ("rank10_local_rank2", "given", 10),
        ("local_rank2/train_rank10", "given/train", 10),
        ("worker3/report", "given", 3),
        ("train_process3", "given/train", 3),
        # A number at the end.
        ("train_r3", "given/train", 3),
        ("report_0", "given", 0),
        ("report2", "given", 2),
        ("run.3", "given", 3),
        ("7", "given", 7),
        ("x_7", "given/x", 7),
        ("train-2026-11-30_3", "given/train-2026-11-30", 3),
        # No rank: a date, a job, a product, a word that only ends like one.
        ("2026-11-30", "given/2026-11-30", None),
        ("train_20261130_0830", "given/train_20261130_0830", None),
        ("train_123456", "given/train_123456", None),
        ("stream_v100", "given/stream_v100", None),
        ("um_rtx4060l", "given/um_rtx4060l", None),
        ("franknfurt2x", "given/franknfurt2x", None),
        ("plain", "given/plain", None),
        ("scaled_gpu8", "given/scaled_gpu8", None),
        ("train_process31999", "given/train_process31999", None),
    ],
)
def test_a_name_says_its_run_and_its_rank(below, run, rank):
    found = named("given", below)
    assert (found.run, found.rank) == (run, rank)


def test_a_recorded_rank_is_above_a_number_and_below_a_word():
    assert named("g", "train_4711").settled(3).rank == 3
    assert named("g", "train_4711").settled(3).run == "g/train"
    assert named("g", "train_4711000").settled(3).run == "g/train"  # a process number
    assert named("g", "train_rank7").settled(3).rank == 7
    assert named("g", "train").settled(0).rank == 0
    # A rank of one machine is none of the program.
    local = named("g", "night/node1/local_rank2")
    assert (local.settled(10).run, local.settled(10).rank) == ("g/night", 10)
    assert (local.settled(None).run, local.settled(None).rank) == ("g/night/node1", 2)
    assert named("g", "train_4711").settled(None).rank == 4711


def test_a_pattern_decides_alone():
    pattern = checked_pattern(r"(?P<run>[^/]+)/gpu(?P<rank>\d+)")
    found = named("given", "night1/gpu3_rank9", pattern)
    assert (found.run, found.rank, found.by) == ("night1", 3, "--rank-pattern")
    assert found.settled(5) == found
    only_run = named("given", "night1/x_rank2", checked_pattern("(?P<run>night.)"))
    assert (only_run.run, only_run.rank, only_run.by) == ("night1", 2, "word in the name")


@pytest.mark.parametrize(
    ("below", "run"),
    [("mon/t_17_x", "g/mon/t_x"), ("mon/17/t", "g/mon/t"), ("17_17/t", "g/17/t")],
)
def test_a_pattern_with_a_rank_alone_leaves_no_rank_in_the_run(below, run):
    pattern = checked_pattern(r"[/_](?P<rank>17)(?=/|_x)")
    found = named("g", below, pattern)
    assert (found.run, found.rank) == (run, 17)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("(", "not a regular expression"), (r"\d+", "no group named run or rank")],
)
def test_a_pattern_that_cannot_be_used_is_refused(pattern, says):
    with pytest.raises(UsageError, match=says):
        checked_pattern(pattern)


def test_a_pattern_must_find_numbers_and_something_at_all(tmp_path):
    x.Export().write(tmp_path / "a.sqlite")
    with pytest.raises(UsageError, match="'a', which is not a whole number"):
        reports_in([tmp_path], r"/(?P<rank>\w)")
    with pytest.raises(UsageError, match="is found in no name"):
        reports_in([tmp_path], r"gpu(?P<rank>\d)")


def test_a_run_of_any_length_fits_into_a_path():
    long = [named("g", "ä" * 200 + end).run for end in ("x", "y")]
    assert long[0] != long[1]
    assert all(len(hive_folder(run, 1).split("/")[0].encode()) < 255 for run in long)


def test_a_run_that_is_called_like_nothing_is_something():
    assert hive_folder("__HIVE_DEFAULT_PARTITION__", None) == (
        "run=%5F_HIVE_DEFAULT_PARTITION__/rank=__HIVE_DEFAULT_PARTITION__"
    )


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("runs/monday", None),
        ("/abs/olute", None),
        ("s3://bucket/fleet", "s3://bucket/fleet"),
        ("s3:/bucket/fleet", "s3://bucket/fleet"),  # what a Path makes of it
        ("file:/tmp/x", "file:///tmp/x"),
        ("file:///tmp/x", "file:///tmp/x"),
    ],
)
def test_a_url_is_known_by_its_scheme(text, url):
    assert url_of(text) == url


# Which files are reports


@pytest.fixture
def capture(tmp_path):
    def make(name):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return x.Export().write(path)

    return make


def sources(*paths):
    return [found.source for found in reports_in(paths)]


def test_folders_are_looked_through_and_a_report_is_one_with_its_export(capture, tmp_path):
    capture("d/b/rank1.sqlite")
    capture("d/b/rank0.sqlite")
    capture("d/a.sqlite")
    (tmp_path / "d" / "a.nsys-rep").write_bytes(b"older")
    (tmp_path / "d" / ".hidden.sqlite").write_bytes(b"")
    (tmp_path / "d" / "notes.txt").write_text("")
    (tmp_path / "d" / "link").symlink_to(tmp_path / "d" / "b")
    assert sources(tmp_path / "d") == ["d/a.nsys-rep", "d/b/rank0.sqlite", "d/b/rank1.sqlite"]
    # A report is the same whichever of its files is the newest, and however often it is named.
    before = {found.report for found in reports_in([tmp_path / "d"])}
    now = (tmp_path / "d" / "a.nsys-rep").stat().st_mtime
    os.utime(tmp_path / "d" / "a.sqlite", (now + 9, now + 9))
    again = reports_in([tmp_path / "d", tmp_path / "d" / "b"])
    assert {found.source for found in again} >= {"d/a.sqlite"}
    assert len(again) == 3
    assert {found.report for found in reports_in([tmp_path / "d"])} == before


def test_names_of_folders_tell_runs_apart(capture, tmp_path):
    for night in ("one", "two"):
        capture(f"{night}/deep/rank0.sqlite")
    for given in ([tmp_path / "one"], [tmp_path / "one", tmp_path / "two"]):
        assert reports_in(given)[0].run == "one/deep"
    single = reports_in([tmp_path / "one" / "deep" / "rank0.sqlite"])
    assert [each.source for each in single] == ["deep/rank0.sqlite"]


def test_no_folder_above_the_given_one_is_named(capture, tmp_path):
    for who in ("alice", "bob"):
        capture(f"{who}/runs/rank0.sqlite")
        capture(f"{who}/node3/rank3/report.sqlite")
        capture(f"{who}/node4/rank4/report.sqlite")
    found = reports_in([tmp_path / who / "runs" for who in ("alice", "bob")])
    assert len({each.run for each in found}) == 2
    assert all(re.fullmatch(r"runs-[0-9a-f]{8}", each.run) for each in found)
    # A rank is no name for a folder, and a machine is none for a run.
    ranks = [tmp_path / "alice" / "node3" / "rank3", tmp_path / "alice" / "node4" / "rank4"]
    found = reports_in([*ranks, tmp_path / "bob" / "node3" / "rank3"])
    assert sorted(each.rank for each in found) == [3, 3, 4]
    assert len({each.run for each in found}) == 2
    assert all(re.fullmatch("folder-[0-9a-f]{8}", each.run) for each in found)
    assert reports_in(ranks[:1])[0].run == reports_in(ranks)[0].run
    assert not any(who in each.source for each in found for who in ("alice", "bob"))


def test_a_folder_that_is_called_like_a_person_is_not_named(capture, tmp_path, monkeypatch):
    capture("alice/rank0.sqlite")
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    assert sources(tmp_path / "alice") == ["home/rank0.sqlite"]


# Numbers at the end, and machines


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["x_0", "x_1", "x_2"], [("g/x", 0), ("g/x", 1), ("g/x", 2)]),
        (["x_15"], [("g/x", 15)]),
        # Process and job numbers; every one is a run of its own.
        (["train.99999", "train.99998"], [("g/train.99999", None), ("g/train.99998", None)]),
        (["slurm-48211"], [("g/slurm-48211", None)]),
        (["x_16"], [("g/x_16", None)]),
        # Another run's numbers say nothing of this one's.
        (["x_0", "y.4711"], [("g/x", 0), ("g/y.4711", None)]),
        # Ranks that are numbered across machines, and those that each machine numbers for itself.
        (["node0/r_0", "node1/r_1"], [("g/r", 0), ("g/r", 1)]),
        (["node0/r_0", "node1/r_0"], [("g/node0/r", 0), ("g/node1/r", 0)]),
        (["node0/a", "node1/a"], [("g/node0/a", None), ("g/node1/a", None)]),
        (["node0/gpu0", "node1/gpu0"], [("g/node0", 0), ("g/node1", 0)]),
    ],
)
def test_names_are_looked_at_together(names, expected):
    found = plausible([named("g", name) for name in names])
    assert [(each.run, each.rank) for each in found] == expected


def test_many_reports_have_high_numbers():
    found = plausible([named("g", f"x_{n}") for n in range(0, 400, 2)])
    assert [each.rank for each in found] == [*range(0, 400, 2)]


def test_many_reports_are_a_fleet_and_one_is_not(capture, tmp_path):
    one = capture("d/a.sqlite")
    assert not is_fleet([one])
    assert not is_fleet([tmp_path / "d"])
    assert is_fleet([one, one])
    capture("d/deep/b.sqlite")
    assert is_fleet([tmp_path / "d"])
    # One, but no command finds it in the folder itself.
    capture("e/deep/b.sqlite")
    assert is_fleet([tmp_path / "e"])


# The rank that an export holds


def export(capture=(), mpi=(), everything=None):
    made = x.Export("2025.5.1")
    rows = [
        {"name": f"PROCESS_{n}:ENVIRONMENT_VARIABLE", "value": value}
        for n, value in enumerate(capture)
    ]
    made.add("META_DATA_CAPTURE", *rows)
    if everything is not None:
        value = {"devStateName": "S", "nameEnum": 0, "name": "DeviceEnvironment"}
        made.add("TARGET_INFO_SYSTEM_ENV", value | {"value": everything})
    if mpi:
        made.tables = made.tables | {"MPI_RANKS": "globalTid INTEGER!, rank INTEGER!"}
        made.add("MPI_RANKS", *({"globalTid": 1, "rank": rank} for rank in mpi))
    return made


@pytest.mark.parametrize(
    ("made", "rank"),
    [
        (export(), None),
        (export(['RANK="3"']), 3),
        (export(everything="HOME=/x;OMPI_COMM_WORLD_RANK=4;A=1"), 4),
        # The finest numbering wins; what MPI itself says is above all.
        (export(['SLURM_PROCID="0"', 'RANK="5"']), 5),
        (export(['RANK="5"'], mpi=[2]), 2),
        # Several ranks in one export are none.
        (export(['RANK="5"'], mpi=[2, 3]), None),
        (export(['RANK="5"', 'RANK="6"']), None),
        # Not a number, not the whole name, not a variable, absurd.
        (export(['RANK="five"', 'LOCAL_RANK="1"', 'NODE_RANK="1"']), None),
        (export(everything="MY_RANK=4;X=a RANK=7"), None),
        (export(['RANK="99999999999999999999"']), None),
    ],
)
def test_an_export_says_its_rank_by_mpi_or_by_its_launcher(made, rank, tmp_path):
    assert rank_in(made.write(tmp_path / "e.sqlite")) == rank
