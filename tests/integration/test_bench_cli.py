"""`nsan bench list` and `nsan bench run`: the real program on a GPU that the CPU plays, and the real nsys."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import bench_programs
import pytest
from bench_programs import SMALL, wrapped
from vendor import need

import nsan
from nsan.cli import main
from nsan.io import nsys_cli
from nsan.microbench.catalog import ADVICES, ALLOCATORS, EXIT_STATUSES, PATTERNS, PREFETCHES

NSYS = "2023.4.4"


@pytest.fixture(scope="module")
def uvm_bench():
    return bench_programs.uvm_bench()


@pytest.fixture
def run(uvm_bench, capfd):
    """Run `nsan bench run uvm_bench`; return its exit status and what it says."""

    def call(*arguments, program=uvm_bench, flags=SMALL, name="uvm_bench"):
        command = ["bench", "run", name, "--program", str(program), *map(str, arguments)]
        status = main([*command, "--", *flags])
        return status, *capfd.readouterr()

    return call


@pytest.fixture
def nsys(monkeypatch):
    monkeypatch.setenv("NSYS", str(need(NSYS) / "nsys"))


def names(folder):
    return sorted(each.name for each in Path(folder).iterdir())


def document(place):
    return json.loads((place / "bench.json").read_text())


# What there is


def test_list_says_what_can_be_run_and_what_is_missing_here(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr("nsan.cli.bench._DRIVER", tmp_path / "none")
    assert main(["bench", "list"]) == 0
    out, _ = capfd.readouterr()
    for name in (
        "uvm_bench",
        "dl_bench",
        "torch_uvm",
        "pointer-chase",
        "gpt2-small",
        "caching",
        "ahead",
    ):
        assert re.search(rf"^  {name} ", out, re.M), name
    assert "The NVIDIA driver is not loaded" in out


def test_list_is_ready_where_compiler_driver_and_nsys_are(capfd, monkeypatch, tmp_path):
    for name, says in (("nvcc", "release 12.4, V12.4.131"), ("nsys", "version 2024.1.1.5")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv(name.upper(), str(tmp_path / name))
    (tmp_path / "version").write_text("550.54.15\n")
    monkeypatch.setattr("nsan.cli.bench._DRIVER", tmp_path / "version")
    assert main(["bench", "list", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["ready"]
    assert found["missing"] == []
    assert found["tools"]["nvcc"] == "12.4.131"
    assert found["tools"]["driver"] == "550.54.15"
    assert found["tools"]["nsys"] == "2024.1.1"
    assert found["built"] == []


def test_patterns_and_axes_are_those_of_the_program(uvm_bench):
    said = subprocess.run([uvm_bench, "--help"], capture_output=True, text=True, check=True).stdout
    for flag, table in (
        ("--pattern", PATTERNS),
        ("--allocator", ALLOCATORS),
        ("--prefetch", PREFETCHES),
        ("--advice", ADVICES),
    ):
        (values,) = re.findall(rf"^  {flag} (\S+)$", said, re.M)
        assert sorted(values.split("|")) == sorted(table), flag


def test_the_exit_statuses_are_those_that_the_program_documents(uvm_bench):
    said = subprocess.run([uvm_bench, "--help"], capture_output=True, text=True, check=True).stdout
    for number in (1, 2, 5, 6, 7):
        assert number in EXIT_STATUSES
        assert re.search(rf"\b{number} \w", said), number


# A run without nsys


def test_a_run_alone_leaves_its_tables_and_how_it_was_made(run, tmp_path):
    place = tmp_path / "runs" / "add"
    status, out, err = run("--no-nsys", "-o", place, flags=[*SMALL, "--prefetch", "whole"])
    assert status == 0, err
    assert out == ""
    assert names(tmp_path / "runs") == ["add"]
    assert names(place) == ["add.alone", "bench.json"]
    made = document(place)
    assert (made["status"], made["reason"], made["exit_status"]) == ("ok", None, 0)
    assert made["condition"]["pattern"] == "vector-add"
    assert made["condition"]["hint"] == "prefetch:whole"
    assert made["condition"]["factor"] is None
    assert made["condition"]["axes"]["bytes"] == 48 * 1024
    assert made["arguments"] == [*SMALL, "--prefetch", "whole"]
    assert made["seconds_nsys"] is None
    about = json.loads((place / "add.alone" / "run.json").read_text())
    assert about["verified"] is True
    assert "takes" in err
    assert "the run is in" in err


def test_nothing_in_a_run_names_a_person_a_machine_or_a_folder(run, tmp_path):
    place = tmp_path / "add"
    assert run("--no-nsys", "-o", place)[0] == 0
    text = "".join(file.read_text() for file in place.rglob("*") if file.is_file())
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
    for word in (socket.gethostname(), getpass.getuser()):
        assert not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text)


def test_the_document_comes_as_json(run, tmp_path):
    status, out, _ = run("--no-nsys", "--json", "-q", "-o", tmp_path / "add")
    assert status == 0
    assert json.loads(out) == {**document(tmp_path / "add"), "summary": None}


@pytest.mark.parametrize("name", ["with blank", "näme", "quo'te", "-dash", "line\nend", "a.b"])
def test_a_folder_may_have_any_name(run, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    status, _, err = run("--no-nsys", f"-o./{name}")
    assert status == 0, err
    assert names(tmp_path / name) == sorted([f"{name}.alone", "bench.json"])


def test_a_run_into_the_folder_one_stands_in_has_its_name(run, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run("--no-nsys", "-o", ".")[0] == 0
    assert "here.alone" in names(tmp_path / "here")


def test_dl_bench_plays_the_tape_of_a_network(run, tmp_path):
    options = ("--no-nsys", "--network", "resnet-8", "--batch", "1", "--steps", "1")
    program = bench_programs.dl_bench()
    status, _, err = run(*options, "-o", tmp_path / "r", program=program, flags=(), name="dl_bench")
    assert status == 0, err
    assert names(tmp_path / "r") == ["bench.json", "r.alone", "r.tape"]
    assert document(tmp_path / "r")["condition"]["network"] == "resnet-8"
    assert (tmp_path / "r" / "r.tape").read_text().startswith("nsan-tape 1\nnetwork\tresnet-8\n")


# How it ends


@pytest.mark.parametrize(
    "case",
    [
        ({"NSAN_HOST_WITHOUT": "driver"}, (), 5, "did not run: no NVIDIA driver was found"),
        (
            {},
            ("--patern", "stream"),
            2,
            "did not run: unknown flag '--patern'; did you mean --pattern?",
        ),
        ({}, ("--pattern", "steam"), 2, "did you mean stream?"),
    ],
)
def test_what_would_stop_any_run_here_leaves_nothing(run, tmp_path, monkeypatch, case):
    machine, flags, status, says = case
    for key, value in machine.items():
        monkeypatch.setenv(key, value)
    found, out, err = run("--no-nsys", "-o", tmp_path / "add", flags=[*SMALL, *flags])
    assert found == status
    assert out == ""
    assert says in err
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "case",
    [
        ({"NSAN_HOST_WITHOUT": "managed_memory"}, (), 6, "skipped", "has no managed memory"),
        ({"NSAN_HOST_WITHOUT": "gpu_page_tables"}, (), 6, "skipped", "coherent platform"),
        ({}, ("--oversubscription-factor", "0.5"), 7, "refused", "the driver needs 16 MiB"),
        ({"NSAN_HOST_FAIL": "launch:2"}, (), 1, "failed", "launch"),
    ],
)
def test_a_run_that_does_not_end_well_is_marked_with_its_reason(run, tmp_path, monkeypatch, case):
    machine, flags, status, word, says = case
    for key, value in machine.items():
        monkeypatch.setenv(key, value)
    place = tmp_path / "add"
    found, _, err = run("-q", "--no-nsys", "-o", place, flags=[*SMALL, *flags])
    assert found == status
    assert f"uvm_bench: {word}: " in err
    assert says in err
    made = document(place)
    assert (made["status"], made["exit_status"]) == (word, status)
    assert says in made["reason"]


def test_a_program_that_is_killed_is_a_failed_run(run, uvm_bench, tmp_path):
    program = wrapped(uvm_bench, tmp_path, before="kill -9 $$")
    status, _, err = run("--no-nsys", "-o", tmp_path / "add", program=program)
    assert status == 1
    assert "killed by signal 9" in err
    assert document(tmp_path / "add")["exit_status"] == -9


def test_a_program_that_leaves_no_tables_is_a_failed_run(run, tmp_path):
    status, _, err = run("--no-nsys", "-o", tmp_path / "add", program="true")
    assert status == 1
    assert "failed: it wrote no tables: it is no uvm_bench" in err
    assert document(tmp_path / "add")["status"] == "failed"


def test_a_program_that_says_nothing_of_its_failure_is_told_by_its_status_and_last_words(
    run, uvm_bench, tmp_path
):
    program = wrapped(
        uvm_bench, tmp_path, before="echo lost /home/alice/secret/file.so >&2; exit 41"
    )
    status, _, err = run("--no-nsys", "-o", tmp_path / "add", program=program)
    assert status == 1
    assert "exit status 41: lost file.so" in err
    assert "secret" not in (tmp_path / "add" / "bench.json").read_text()


def test_a_run_that_failed_is_replaced_and_one_that_ended_well_is_not(run, tmp_path, monkeypatch):
    place = tmp_path / "add"
    monkeypatch.setenv("NSAN_HOST_FAIL", "launch:1")
    assert run("--no-nsys", "-o", place)[0] == 1
    monkeypatch.delenv("NSAN_HOST_FAIL")
    assert run("--no-nsys", "-o", place)[0] == 0
    before = (place / "bench.json").read_bytes()
    status, _, err = run("--no-nsys", "-o", place)
    assert status == 1
    assert "holds a run that ended well. Choose another name, or add --force-overwrite." in err
    assert (place / "bench.json").read_bytes() == before
    assert run("--no-nsys", "--force-overwrite", "-o", place)[0] == 0
    assert (place / "bench.json").read_bytes() != before
    assert names(tmp_path) == ["add"]


@pytest.mark.parametrize("there", ["a file", "a folder"])
def test_what_is_no_run_is_never_replaced(run, tmp_path, there):
    place = tmp_path / "add"
    mine = place if there == "a file" else place / "mine.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    status, _, err = run("--no-nsys", "--force-overwrite", "-o", place)
    assert status == 1
    assert "is no run of `nsan bench`" in err
    assert mine.read_text() == "mine"


def test_a_place_that_is_taken_is_said_before_anything_is_built(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("NVCC", str(tmp_path / "no-such-nvcc"))
    (tmp_path / "mine").write_text("mine")
    assert main(["bench", "run", "uvm_bench", "-o", str(tmp_path / "mine")]) == 1
    assert "is no run of `nsan bench`" in capfd.readouterr().err


# What is asked


@pytest.mark.parametrize(
    ("options", "flags", "says"),
    [
        (("-o", "x"), ("--out", "y"), "--out is given by nsan itself"),
        (("-o", "x"), ("--tape=y",), "--tape is given by nsan itself"),
        (("-o", "x", "--network", "resnet-8"), (), "--network means nothing to uvm_bench"),
        (("-o", "x", "--steps", "2"), (), "--steps means nothing to uvm_bench"),
        ((), (), "Say where the run goes: -o FOLDER."),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(
    run, tmp_path, monkeypatch, options, flags, says
):
    monkeypatch.chdir(tmp_path)
    status, _, err = run("--no-nsys", *options, flags=flags)
    assert status == 2
    assert says in err
    assert names(tmp_path) == []


def test_dl_bench_without_a_network_says_how_to_name_one(run, tmp_path):
    status, _, err = run("-o", tmp_path / "x", name="dl_bench", flags=())
    assert status == 2
    assert "say which with --network NAME" in err
    status, _, err = run("-o", tmp_path / "x", "--network", "vgg", name="dl_bench", flags=())
    assert status == 2
    assert "There is no network 'vgg'" in err


def test_flags_of_the_program_in_the_wrong_place_are_told_where_they_belong(capfd):
    assert main(["bench", "run", "uvm_bench", "-o", "x", "--pattern", "stream"]) == 2
    assert "Flags of the program stand behind --" in capfd.readouterr().err
    assert main(["bench", "list", "--", "--pattern"]) == 2
    assert "only run and sweep pass flags on" in capfd.readouterr().err


def test_a_question_to_the_program_is_passed_on_and_nothing_is_written(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(flags=["--help"])
    assert status == 0
    assert out.startswith("usage: uvm_bench [FLAGS]")
    assert names(tmp_path) == []


def test_a_dry_run_of_a_network_says_what_its_steps_do(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = bench_programs.dl_bench()
    asked = ("--network", "resnet-8", "--batch", "2")
    status, out, err = run(*asked, program=program, name="dl_bench", flags=["--dry-run"])
    assert status == 0, err
    assert json.loads(out)["network"] == "resnet-8"
    assert names(tmp_path) == []


def test_a_program_that_is_not_there_is_a_usage_error(run, tmp_path):
    status, _, err = run("--no-nsys", "-o", tmp_path / "x", program=tmp_path / "none")
    assert status == 2
    assert "cannot be run: no such program" in err


def test_without_nsys_nothing_runs_at_all(run, uvm_bench, tmp_path, monkeypatch):
    monkeypatch.delenv("NSYS", raising=False)
    monkeypatch.setattr(nsys_cli, "_FOLDERS", ())
    monkeypatch.setenv("PATH", "/bin" if not Path("/bin/nsys").exists() else "")
    log = tmp_path / "log"
    program = wrapped(uvm_bench, tmp_path, log=log)
    status, _, err = run("-o", tmp_path / "add", program=program)
    assert status == 1
    assert "nsys, which records programs, is not found" in err
    assert not log.exists()
    assert not (tmp_path / "add").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(uvm_bench, tmp_path, number):
    place, mark = tmp_path / "runs", tmp_path / "started"
    place.mkdir()
    program = wrapped(uvm_bench, tmp_path, before=f"touch '{mark}'; exec sleep 600")
    command = ["bench", "run", "uvm_bench", "--no-nsys", "--program", program, "-o", place / "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "nsan", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # A runner in the background may have Ctrl-C switched off for its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    for _ in range(3000):
        if mark.exists() or process.poll() is not None:
            break
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 143), err
    assert b"Traceback" not in err
    assert names(place) == []


# Under the real nsys


@pytest.mark.nsys
@pytest.mark.usefixtures("nsys")
def test_a_recorded_run_has_all_that_belongs_to_it(run, tmp_path, capfd):
    """The program calls no CUDA here, so its trace is empty, and says so: exit status 3."""
    place = tmp_path / "add"
    status, out, err = run("-o", place, flags=[*SMALL, "--allocator", "caching"])
    assert status == 3, err
    found = [
        "add.alone",
        "add.nsan.json",
        "add.nsys-rep",
        "add.pickle",
        "add.truth",
        "bench.json",
        "store",
    ]
    assert names(place) == found
    assert names(tmp_path) == ["add", "cache"]
    assert out.startswith("add.nsys-rep\n")
    assert "no GPU activity recorded" in out
    assert "nsan_microbench" not in err  # what the program prints is in its tables
    made = document(place)
    assert made["status"] == "not_recorded"
    assert made["versions"]["nsys"] == NSYS
    facts = json.loads((place / "add.nsan.json").read_text())
    assert facts["seconds_alone"] == made["seconds_alone"]
    assert facts["status_alone"] == facts["status_recorded"] == 0
    alone, recorded = (
        json.loads((place / f"add.{each}" / "run.json").read_text()) for each in ("alone", "truth")
    )
    assert (alone["profiled"], recorded["profiled"]) == (False, True)
    assert alone["pid"] != recorded["pid"]

    trace = nsan.open_trace(place)
    assert trace.info.source == "add.nsys-rep"
    assert re.search(
        r"add\.truth names \d allocations?, and the capture has none", trace.info.warnings[0]
    )
    # It reads the store that lies in the folder: nothing came into the cache.
    assert not (Path(os.environ["NSAN_CACHE_DIR"]) / "stores").exists()
    assert main(["allocator", str(place / "add.pickle")]) == 0
    assert "segment" in capfd.readouterr().out
    assert main(["info", str(place)]) == 0


@pytest.mark.nsys
@pytest.mark.usefixtures("nsys")
def test_a_program_that_fails_under_nsys_only_is_marked(run, uvm_bench, tmp_path):
    once = tmp_path / "once"
    before = f"if [ -e '{once}' ]; then export NSAN_HOST_FAIL=launch:1; fi; touch '{once}'"
    status, _, err = run(
        "-o", tmp_path / "add", program=wrapped(uvm_bench, tmp_path, before=before)
    )
    assert status == 1
    assert "it ended well alone, and not under nsys: " in err
    assert "launch" in err
    made = document(tmp_path / "add")
    assert (made["status"], made["exit_status"]) == ("failed", 1)
    assert "store" not in names(tmp_path / "add")


def test_an_nsys_that_makes_no_report_fails_the_run_and_keeps_its_times(run, tmp_path, monkeypatch):
    nsys = tmp_path / "nsys"
    nsys.write_text("#!/bin/sh\necho 'the daemon is on strike' >&2\nexit 9\n")
    nsys.chmod(0o755)
    monkeypatch.setenv("NSYS", str(nsys))
    status, _, err = run("-o", tmp_path / "add")
    assert status == 1
    assert "nsys made no report add.nsys-rep" in err
    assert "the daemon is on strike" in err
    made = document(tmp_path / "add")
    assert made["status"] == "failed"
    assert made["seconds_alone"] > 0
    assert names(tmp_path / "add") == ["add.alone", "bench.json"]
