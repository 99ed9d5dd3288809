"""`nsan bench sweep`: the real program on a GPU that the CPU plays, under many conditions; and what reads its runs."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import bench_programs
import exports as x
import pytest
from bench_programs import SMALL, wrapped

from nsan.cli import main
from nsan.errors import UsageError
from nsan.microbench.sweeping import Case, cases
from nsan.pca_found import find_runs
from nsan.pca_pairs import pairs_of

MODELLED = x.REPOSITORY / "sample_data" / "model"


@pytest.fixture(scope="module")
def uvm_bench():
    return bench_programs.uvm_bench()


@pytest.fixture
def sweep(uvm_bench, tmp_path, capfd):
    """Run `nsan bench sweep uvm_bench --no-nsys` into a folder; return its exit status and what it says."""

    def call(*arguments, program=uvm_bench, flags=SMALL, name="uvm_bench"):
        command = ["bench", "sweep", name, "--no-nsys", "--program", str(program)]
        command += ["-o", str(tmp_path / "sweep"), *map(str, arguments)]
        status = main([*command, "--", *flags])
        return status, *capfd.readouterr()

    return call


def names(folder):
    return sorted(each.name for each in Path(folder).iterdir())


def manifest(folder):
    return json.loads((folder / "sweep.json").read_text())


def statuses(folder):
    return {run["folder"]: run["status"] for run in manifest(folder)["runs"]}


def table(folder):
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# What is run


def test_every_combination_is_run_once_in_a_folder_that_says_which(sweep, tmp_path):
    status, out, err = sweep(
        "--allocators", "raw,caching", "--prefetches", "none,whole", "--advices", "none"
    )
    assert status == 0, err
    folder = tmp_path / "sweep"
    runs = [
        "raw-free-none",
        "raw-free-prefetch-whole",
        "caching-free-none",
        "caching-free-prefetch-whole",
    ]
    assert names(folder) == sorted([*runs, "sweep.csv", "sweep.json"])
    assert statuses(folder) == dict.fromkeys(runs, "ok")
    assert [(row["allocator"], row["hint"]) for row in table(folder)] == [
        ("raw", "none"),
        ("raw", "prefetch:whole"),
        ("caching", "none"),
        ("caching", "prefetch:whole"),
    ]
    for run, row in zip(runs, table(folder), strict=True):
        about = json.loads((folder / run / f"{run}.alone" / "run.json").read_text())
        assert about["axes"]["allocator"] == row["allocator"]
        assert about["axes"]["prefetch"] == row["hint"].removeprefix("prefetch:")
        assert row["verified"] == "true"
        assert int(row["managed_bytes"]) == about["footprint"]["managed_bytes"]
        (check,) = (phase["ns"] for phase in about["phases"] if phase["name"] == "check")
        assert float(row["check_ns"]) == check
    assert "prefetch:whole" in out
    assert "Batches" not in out  # nothing was recorded
    assert err.splitlines() == [f"nsan: {run}" for run in runs]


def test_patterns_factors_and_repetitions_multiply():
    found = cases(
        factors=[None, 0.5],
        allocators=["raw"],
        hints=[("none", "read-mostly"), ("ahead", "none")],
        patterns=["stream", "random"],
        repeats=3,
    )
    assert len(found) == 2 * 1 * 2 * 2 * 3
    assert len({case.folder for case in found}) == len(found)
    assert found[0].folder == "stream-raw-free-advice-read-mostly-r1"
    # All conditions once, then all of them again.
    assert [case.repeat for case in found] == [1] * 8 + [2] * 8 + [3] * 8


def test_one_run_of_each_has_no_number_and_none_is_run_twice():
    (case,) = cases(factors=[0.5, 0.5], allocators=["raw", "raw"], hints=[("none", "none")] * 2)
    assert case == Case("raw", 0.5, "none", "none")
    assert case.folder == "raw-0.5-none"


def test_factors_that_would_have_one_folder_are_refused():
    with pytest.raises(UsageError, match=r"Two conditions would be called raw-0\.5-none"):
        cases(factors=[0.5, 0.50000001], allocators=["raw"], hints=[("none", "none")])
    with pytest.raises(UsageError, match="has no run"):
        cases(factors=[], allocators=["raw"], hints=[("none", "none")])


@pytest.mark.parametrize(
    ("options", "flags", "says"),
    [
        (("--allocators", "jemalloc"), (), "There is no allocator 'jemalloc'"),
        (("--patterns", "../x"), (), "There is no pattern '../x'"),
        (("--prefetches", "whole,late"), (), "There is no prefetch 'late'"),
        (("--advices", "always"), (), "There is no advice 'always'"),
        (("--factors", "0"), (), "'0' is no factor: write 0.5,0.9 or free"),
        (("--factors", "nan"), (), "'nan' is no factor"),
        (("--factors", "much"), (), "'much' is no factor"),
        ((), ("--allocator", "raw"), "--allocator is what the sweep varies: use --allocators instead"),
        ((), ("--advice=none",), "use --advices instead"),
        (("--patterns", "stream"), ("--pattern", "random"), "use --patterns instead"),
        ((), ("--out", "x"), "--out is given by nsan itself"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_runs(sweep, tmp_path, options, flags, says):
    status, _, err = sweep(*options, flags=flags)
    assert status == 2
    assert says in err
    assert not (tmp_path / "sweep").exists()


def test_the_pattern_may_be_a_flag_where_the_sweep_does_not_vary_it(sweep, tmp_path):
    assert sweep(flags=SMALL)[0] == 0
    run = json.loads((tmp_path / "sweep" / "raw-free-none" / "bench.json").read_text())
    assert run["condition"]["pattern"] == "vector-add"


# Going on


def n_runs(log):
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_second_sweep_runs_nothing_and_one_that_lacks_a_run_makes_that(
    sweep, uvm_bench, tmp_path
):
    log, folder = tmp_path / "log", tmp_path / "sweep"
    program = wrapped(uvm_bench, tmp_path, log=log)
    options = ("--prefetches", "none,whole,ahead")
    assert sweep(*options, program=program)[0] == 0
    assert n_runs(log) == 3
    first = table(folder)
    status, _, err = sweep(*options, program=program)
    assert (status, n_runs(log)) == (0, 3)
    assert err.count("there already") == 3
    assert table(folder) == first
    shutil.rmtree(folder / "raw-free-prefetch-whole")
    assert sweep(*options, program=program)[0] == 0
    assert n_runs(log) == 4
    assert statuses(folder) == dict.fromkeys(statuses(folder), "ok")


def test_an_interrupted_sweep_keeps_what_it_has_and_goes_on(sweep, uvm_bench, tmp_path):
    """The second run waits; a signal ends the sweep there."""
    log, folder, mark = tmp_path / "log", tmp_path / "sweep", tmp_path / "wait"
    mark.touch()
    waits = f"if [ -e '{mark}' ] && [ $(wc -l < '{log}') = 2 ]; then exec sleep 600; fi"
    program = wrapped(uvm_bench, tmp_path, before=waits, log=log)
    options = ["--program", str(program), "--prefetches", "none,whole,ahead"]
    process = subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "nsan",
                "bench",
                "sweep",
                "uvm_bench",
                "--no-nsys",
                "-o",
                folder,
            ),
            *(*options, "--", *SMALL),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # A runner in the background may have Ctrl-C switched off for its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    for _ in range(3000):
        if n_runs(log) == 2 or process.poll() is not None:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert names(folder) == ["raw-free-none", "sweep.csv", "sweep.json"]
    assert list(statuses(folder).values()) == ["ok", "not_run", "not_run"]
    mark.unlink()
    status, _, err = sweep("--prefetches", "none,whole,ahead", program=program)
    assert (status, n_runs(log)) == (0, 4), err
    assert list(statuses(folder).values()) == ["ok", "ok", "ok"]


def test_a_failed_run_is_marked_and_the_sweep_goes_on(sweep, tmp_path, monkeypatch):
    monkeypatch.setenv("NSAN_HOST_FAIL", "prefetch:1")
    status, out, _ = sweep("--prefetches", "none,whole,none")
    folder = tmp_path / "sweep"
    assert status == 1
    assert statuses(folder) == {"raw-free-none": "ok", "raw-free-prefetch-whole": "failed"}
    assert "raw-free-prefetch-whole: " in out
    (failed,) = (row for row in table(folder) if row["status"] == "failed")
    assert "prefetch" in failed["reason"]


def test_what_failed_is_tried_again_unless_it_is_to_be_kept(
    sweep, uvm_bench, tmp_path, monkeypatch
):
    log = tmp_path / "log"
    program = wrapped(uvm_bench, tmp_path, log=log)
    monkeypatch.setenv("NSAN_HOST_FAIL", "launch:1")
    assert sweep(program=program)[0] == 1
    assert sweep("--keep-failed", program=program)[0] == 1
    assert n_runs(log) == 1
    monkeypatch.delenv("NSAN_HOST_FAIL")
    assert sweep(program=program)[0] == 0
    assert n_runs(log) == 2
    assert statuses(tmp_path / "sweep") == {"raw-free-none": "ok"}


def test_refused_runs_are_marked_and_other_flags_make_them_good(sweep, tmp_path, monkeypatch):
    """48 MiB on a GPU of 32 MiB is refused unless it is allowed."""
    monkeypatch.setenv("NSAN_HOST_GPU_BYTES", str(32 << 20))
    flags = ("--pattern", "first-touch", "--bytes", "48MiB", "--iterations", "1")
    assert sweep("--factors", "free", flags=flags)[0] == 1
    assert statuses(tmp_path / "sweep") == {"raw-free-none": "refused"}
    assert sweep("--factors", "free", flags=[*flags, "--allow-oversubscription"])[0] == 0
    assert statuses(tmp_path / "sweep") == {"raw-free-none": "ok"}


@pytest.mark.parametrize(
    "case",
    [
        ({"NSAN_HOST_WITHOUT": "driver"}, (), 5, "no NVIDIA driver was found"),
        ({}, ("--bites", "1MiB"), 2, "unknown flag '--bites'"),
    ],
)
def test_what_would_stop_every_run_stops_the_sweep_at_once(
    sweep, uvm_bench, tmp_path, monkeypatch, case
):
    machine, flags, status, says = case
    for key, value in machine.items():
        monkeypatch.setenv(key, value)
    log = tmp_path / "log"
    program = wrapped(uvm_bench, tmp_path, log=log)
    found, out, err = sweep(
        "--prefetches", "none,whole,ahead", program=program, flags=[*SMALL, *flags]
    )
    assert (found, out) == (status, "")
    assert err.count(says) == 1
    assert n_runs(log) == 1
    assert not (tmp_path / "sweep").exists()


# Nothing is lost


def test_a_run_that_was_made_in_another_way_is_kept_and_said(sweep, tmp_path):
    assert sweep()[0] == 0
    before = (tmp_path / "sweep" / "raw-free-none" / "bench.json").read_bytes()
    status, _, err = sweep("--prefetches", "whole,none", flags=[*SMALL, "--seed", "2"])
    assert status == 1
    assert "raw-free-none is there, and was made in another way" in err
    assert (tmp_path / "sweep" / "raw-free-none" / "bench.json").read_bytes() == before
    assert names(tmp_path / "sweep") == ["raw-free-none", "sweep.csv", "sweep.json"]


@pytest.mark.parametrize(
    "place", ["raw-free-none/mine.txt", "sweep.json", "sweep.csv", "manifest.json"]
)
def test_what_is_no_part_of_a_sweep_is_never_replaced(sweep, tmp_path, place):
    mine = tmp_path / "sweep" / place
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    status, _, err = sweep()
    assert status == 1
    assert "Choose another place" in err
    assert mine.read_text() == "mine"


def test_a_sweep_that_cannot_be_written_is_said(uvm_bench, tmp_path, capfd):
    (tmp_path / "file").write_text("mine")
    command = ["bench", "sweep", "uvm_bench", "--program", str(uvm_bench), "--no-nsys"]
    assert main([*command, "-o", str(tmp_path / "file" / "sweep")]) == 1
    assert "Cannot write the result to" in capfd.readouterr().err


# Networks


def test_both_allocators_of_a_network_get_the_same_gpu_memory(sweep, tmp_path):
    """The factor is that of the tensors: what blocks and segments take beyond them is not given to them."""
    status, _, err = sweep(
        *("--network", "resnet-8", "--batch", "8", "--steps", "1"),
        *("--allocators", "raw,caching", "--factors", "0.25"),
        program=bench_programs.dl_bench(),
        name="dl_bench",
        flags=("--flops-scale", "0", "--allow-oversubscription"),
    )
    assert status == 0, err
    raw, caching = table(tmp_path / "sweep")
    assert (raw["factor"], caching["factor"]) == ("0.25", "0.25")
    assert int(caching["managed_bytes"]) != int(raw["managed_bytes"])
    assert raw["peak_tensor_bytes"] == caching["peak_tensor_bytes"]
    memory = [int(row["available_bytes"]) for row in (raw, caching)]
    assert abs(memory[0] - memory[1]) <= 2 << 20  # cudaMalloc gives whole 2 MiB
    assert memory[0] == pytest.approx(4 * int(raw["peak_tensor_bytes"]), abs=2 << 20)
    for run in ("raw-0.25-none", "caching-0.25-none"):
        made = json.loads((tmp_path / "sweep" / run / "bench.json").read_text())
        assert made["condition"]["factor"] == 0.25


# What reads the runs: traces of the driver model stand for those of a GPU


def bench_run(folder, name, trace, *, snapshot=None, status="ok", memory=40 << 30, **condition):
    """A run of the benchmark whose trace, and snapshot, are others."""
    place = folder / name
    place.mkdir(parents=True)
    if status == "ok":
        shutil.copy(trace, place / f"{name}.sqlite")
    if snapshot:
        shutil.copy(snapshot, place / f"{name}.pickle")
    axes = {"steps": "2", "seed": 1, "allocator": condition.get("allocator")}
    made = {"pattern": None, "network": "resnet-8", "factor": 1.5, "hint": "none", "axes": axes}
    document = {
        "nsan_bench": 1,
        "nsan_version": "0",
        "program": "dl_bench",
        "digest": "d",
        "status": status,
        "reason": None if status == "ok" else "the driver hung",
        "profiled": True,
        "versions": {"gpu": "NVIDIA A100", "driver": "550.54"},
        "footprint": {"managed_bytes": 1, "available_bytes": memory},
        "condition": made | condition,
    }
    (place / "bench.json").write_text(json.dumps(document))
    return place


@pytest.fixture
def pair(tmp_path):
    """A sweep with one run without the cache, and one with it."""
    folder = tmp_path / "runs"
    off, on = MODELLED / "pca_off" / "pca_off.sqlite", MODELLED / "pca_on" / "pca_on.sqlite"
    bench_run(folder, "raw-1.5-none", off, allocator="raw")
    bench_run(
        folder,
        "caching-1.5-none",
        on,
        snapshot=MODELLED / "pca_on" / "snapshot.pickle",
        allocator="caching",
    )
    return folder


def test_runs_of_a_sweep_are_paired_by_what_they_say(pair):
    runs = find_runs(pair)
    assert [(run.name, run.condition.side, run.snapshot is not None) for run in runs] == [
        ("caching-1.5-none", "on", True),
        ("raw-1.5-none", "off", False),
    ]
    (found,) = pairs_of(runs, (), ())
    assert found.notes == ()
    assert (found.condition.network, found.condition.factor) == ("resnet-8", 1.5)
    assert not found.condition.is_modelled


def test_pca_reads_a_sweep_of_the_benchmark(pair, capfd):
    assert main(["pca", str(pair), "--warmup", "0"]) == 0
    out = capfd.readouterr().out
    assert "resnet-8" in out
    assert "1.5" in out


def test_what_else_differs_in_a_pair_is_said(pair):
    """A hundred MiB more or less of 40 GiB are no difference, half of it is one."""
    trace = MODELLED / "pca_off" / "pca_off.sqlite"
    for memory, says in (
        ((40 << 30) - (100 << 20), ()),
        (20 << 30, ("GPU memory (20 GiB and 40 GiB)",)),
    ):
        shutil.rmtree(pair / "raw-1.5-none")
        bench_run(pair, "raw-1.5-none", trace, allocator="raw", memory=memory)
        (found,) = pairs_of(find_runs(pair), (), ())
        assert len(found.notes) == len(says)
        assert all(each in found.notes[0] for each in says)


def test_repetitions_are_one_pair(pair):
    trace = MODELLED / "pca_off" / "pca_off.sqlite"
    bench_run(pair, "raw-1.5-none-r2", trace, allocator="raw")
    (found,) = pairs_of(find_runs(pair), (), ())
    assert [run.name for run in found.off] == ["raw-1.5-none", "raw-1.5-none-r2"]
    assert len(found.on) == 1


@pytest.mark.parametrize(
    "other", [{"hint": "prefetch:whole"}, {"factor": 2.0}, {"network": "alexnet"}]
)
def test_runs_of_other_conditions_are_no_pair(pair, other):
    trace = MODELLED / "pca_off" / "pca_off.sqlite"
    shutil.rmtree(pair / "raw-1.5-none")
    bench_run(pair, "raw", trace, allocator="raw", **other)
    bench_run(pair, "raw-again", trace, allocator="raw", **other)
    with pytest.raises(UsageError, match="No pair"):
        pairs_of(find_runs(pair), (), ())


def test_runs_that_left_no_trace_are_left_out_and_said_if_there_is_no_other(pair):
    bench_run(pair, "broken", None, status="failed", allocator="raw", factor=2.0)
    assert len(find_runs(pair)) == 2
    with pytest.raises(UsageError, match="broken left no trace to look at: the driver hung"):
        find_runs(pair / "broken")
    for name in ("raw-1.5-none", "caching-1.5-none"):
        shutil.rmtree(pair / name)
    with pytest.raises(UsageError, match="No run of runs left a trace: broken: the driver hung"):
        find_runs(pair)


def test_a_trace_in_the_folder_of_a_run_stands_for_it(pair):
    (run,) = find_runs(pair / "raw-1.5-none" / "raw-1.5-none.sqlite")
    assert (run.condition.said, run.condition.factor) == ("off", 1.5)


def test_a_folder_whose_document_is_damaged_is_said(pair):
    (pair / "raw-1.5-none" / "bench.json").write_text("{")
    with pytest.raises(UsageError, match=r"bench\.json of raw-1\.5-none cannot be read"):
        find_runs(pair)
    (pair / "raw-1.5-none" / "bench.json").write_text(
        '{"nsan_bench": 1, "status": "ok", "profiled": true}'
    )
    with pytest.raises(UsageError, match="does not say how the run was made: make it again"):
        find_runs(pair)


def test_compare_takes_runs_with_their_stores_for_what_they_are(pair, capfd):
    """The store in a run's folder is made of the report beside it: no second run."""
    for name in ("raw-1.5-none", "caching-1.5-none"):
        trace = pair / name / f"{name}.sqlite"
        assert main(["import", str(trace), "-o", str(pair / name / "store")]) == 0
    capfd.readouterr()
    sides = [str(pair / "raw-1.5-none"), str(pair / "caching-1.5-none")]
    assert main(["compare", *sides]) == 0, capfd.readouterr().err
    assert "raw-1.5-none" in capfd.readouterr().out
    # What they are made of is not imported again.
    assert not (Path(os.environ["NSAN_CACHE_DIR"]) / "stores").exists()
