"""`nsan record`: a program under nsys, its unperturbed time, the trace and its summary."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vendor import need

import nsan
from nsan.cli import main
from nsan.io import recording

NSYS = "2023.4.4"
PROGRAM = [sys.executable, "-c", "print('from the program')"]


@pytest.fixture
def nsys(monkeypatch):
    """Make the real nsys the one that is found."""
    program = need(NSYS) / "nsys"
    monkeypatch.setenv("NSYS", str(program))
    return program


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Make a script the nsys that is found; it may say what it likes."""

    def install(body):
        script = tmp_path / "nsys"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv("NSYS", str(script))

    return install


def names(folder):
    return sorted(entry.name for entry in Path(folder).iterdir())


@pytest.mark.nsys
@pytest.mark.usefixtures("nsys")
def test_a_program_is_timed_alone_recorded_and_summarised(tmp_path, capfd):
    place = tmp_path / "runs"
    status = main(["record", "-o", str(place / "run"), "--", *PROGRAM])
    out, err = capfd.readouterr()
    assert status == 3, err  # a Unified Memory question, and a program without any
    assert names(place) == ["run.nsan.json", "run.nsys-rep"]
    assert out.startswith("run.nsys-rep\n")
    assert "No GPU activity was recorded" in out
    assert err.count("from the program") == 2  # alone, and under nsys
    assert "without nsys the program takes" in err
    facts = json.loads((place / "run.nsan.json").read_text())
    assert 0 < facts["seconds_alone"] < facts["seconds_nsys"]
    assert "--cuda-um-gpu-page-faults=true" in facts["options"]
    assert facts["nsys_version"] == NSYS
    assert facts["report"] == "run.nsys-rep"
    assert str(tmp_path) not in (place / "run.nsan.json").read_text()


@pytest.mark.nsys
@pytest.mark.usefixtures("nsys")
def test_the_trace_answers_what_the_switches_recorded(tmp_path, capfd):
    report = tmp_path / "run.nsys-rep"
    command = ["record", "--no-baseline", "--json", "-o", str(report), *PROGRAM]
    assert main(command) == 3
    out, err = capfd.readouterr()
    summary = json.loads(out)
    assert set(summary["capture"].values()) == {"recorded"}
    assert summary["recording"]["seconds_alone"] is None
    assert err.count("from the program") == 1
    assert nsan.open_trace(report).info.capture["gpu_faults"].answer == "recorded"


@pytest.mark.nsys
@pytest.mark.usefixtures("nsys")
def test_a_program_that_fails_is_recorded_and_makes_record_fail(tmp_path, capfd):
    failing = [sys.executable, "-c", "raise SystemExit(5)"]
    assert main(["record", "--no-baseline", "-o", str(tmp_path / "run"), *failing]) == 1
    assert "the program ended with status 5" in capfd.readouterr().err
    assert (tmp_path / "run.nsys-rep").is_file()


@pytest.mark.nsys
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("nsys")
def test_an_interrupted_recording_leaves_nothing(tmp_path, number):
    place = tmp_path / "runs"
    place.mkdir()
    mark = tmp_path / "started"
    body = f"import pathlib, time; pathlib.Path({str(mark)!r}).touch(); time.sleep(600)"
    process = subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "nsan",
                "record",
                "--no-baseline",
                "-o",
                str(place / "run"),
                "--",
            ),
            *(sys.executable, "-c", body),
        ],
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
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert b"Traceback" not in err
    assert names(place) == []


@pytest.mark.nsys
@pytest.mark.usefixtures("nsys")
@pytest.mark.parametrize("name", ["50%", "%p", "%q{HOME}", "%%h"])
def test_a_percent_in_a_name_or_a_folder_is_one(tmp_path, capfd, name):
    """nsys replaces %p by a process and %q{HOME} by a variable."""
    command = ["record", "--no-baseline", "-o", str(tmp_path / "%p" / name), *PROGRAM]
    assert main(command) == 3, capfd.readouterr().err
    assert names(tmp_path) == ["%p", "cache"]
    assert names(tmp_path / "%p") == [f"{name}.nsan.json", f"{name}.nsys-rep"]


STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.nsys
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("nsys")
def test_a_program_that_does_not_hear_ends_with_the_recording(tmp_path, number):
    """nsys starts it in a session of its own and is gone before it."""
    mark = tmp_path / "pid"
    # Less patience than that for a program that ends by itself.
    patience = "from nsan.io import recording; recording._GRACE_SECONDS = 1; "
    own = f"{patience}from nsan.cli import main; raise SystemExit(main())"
    command = ["record", "--no-baseline", "-o", str(tmp_path / "run"), "--"]
    process = subprocess.Popen(
        [sys.executable, "-c", own, *command, sys.executable, "-c", STUBBORN, str(mark)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # A runner in the background may have Ctrl-C switched off for its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    for _ in range(3000):
        if (mark.exists() and mark.read_text()) or process.poll() is not None:
            break
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 143), err
    running = Path(f"/proc/{mark.read_text()}/cmdline")
    # One that is killed needs a moment to be gone.
    for _ in range(300):
        if not running.exists() or not running.read_bytes():
            break
        time.sleep(0.01)
    assert not running.exists() or not running.read_bytes()


def test_what_an_nsys_that_was_killed_leaves_running_ends(fake, tmp_path, capfd):
    mark = tmp_path / "pid"
    fake(f"setsid sleep 60 & echo $! > {mark}; kill -9 $$")
    assert main(["record", "--no-baseline", "-o", str(tmp_path / "run"), "true"]) == 1
    assert "ended with status -9" in capfd.readouterr().err
    running = Path(f"/proc/{mark.read_text().strip()}/cmdline")
    assert not running.exists() or not running.read_bytes()


def test_what_nsys_said_is_passed_on_when_it_makes_no_report(fake, tmp_path, capfd):
    fake('echo "the daemon is on strike"; exit 9')
    assert main(["record", "--no-baseline", "-o", str(tmp_path / "run"), "true"]) == 1
    err = capfd.readouterr().err
    assert "made no report run.nsys-rep, and ended with status 9" in err
    assert "  the daemon is on strike" in err
    assert names(tmp_path) == ["nsys"]


def test_a_report_of_no_bytes_is_no_report(fake, tmp_path, capfd):
    fake('while [ "$1" != --output ]; do shift; done; : > "$2"')
    assert main(["record", "--no-baseline", "-o", str(tmp_path / "run"), "true"]) == 1
    assert "made no report" in capfd.readouterr().err
    assert names(tmp_path) == ["nsys"]


def test_an_existing_report_is_kept_unless_told_otherwise(fake, tmp_path, capfd):
    fake("exit 0")
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"precious")
    assert main(["record", "-o", str(report), "--", "true"]) == 1
    assert "--force-overwrite" in capfd.readouterr().err
    assert report.read_bytes() == b"precious"


def test_a_program_that_is_not_there_is_named_before_anything_runs(fake, tmp_path, capfd):
    fake("touch ran")
    assert main(["record", "-o", str(tmp_path / "run"), "no-such-program"]) == 2
    assert "'no-such-program' cannot be run" in capfd.readouterr().err


def test_without_a_program_the_usage_is_shown(capfd):
    assert main(["record"]) == 2
    assert "Say what to record" in capfd.readouterr().err


def test_without_nsys_it_is_said_where_to_get_it(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr("nsan.io.nsys_cli.find_nsys", lambda: None)
    assert main(["record", "-o", str(tmp_path / "run"), "true"]) == 1
    assert "Install NVIDIA Nsight Systems" in capfd.readouterr().err


def test_parameters_of_the_driver_are_read_where_it_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "uvm_perf_fault_batch_count").write_text("256\n")
    (tmp_path / "uvm_perf_prefetch_threshold").write_text("51\n")
    monkeypatch.setattr(recording, "_UVM_PARAMETERS", tmp_path)
    assert recording.uvm_parameters() == {
        "uvm_perf_fault_batch_count": "256",
        "uvm_perf_prefetch_threshold": "51",
    }
    monkeypatch.setattr(recording, "_UVM_PARAMETERS", tmp_path / "absent")
    assert recording.uvm_parameters() == {}


def test_a_program_on_a_pipe_is_run_once_and_gets_all_of_it(fake, tmp_path):
    # A fake nsys that runs the program and leaves a report that is none.
    fake(
        'shift; while [ "$1" != --output ]; do shift; done; echo broken > "$2"; shift 2; exec "$@"'
    )
    done = subprocess.run(
        [sys.executable, "-m", "nsan", "record", "-o", str(tmp_path / "run"), "--", "wc", "-l"],
        input=b"one\ntwo\n",
        capture_output=True,
        check=False,
    )
    assert done.stderr.split()[0] == b"2"
    assert b"was not measured" in done.stderr


def test_what_a_program_leaves_running_is_not_waited_for(fake, tmp_path, capfd):
    fake("exit 9")
    leaving = ["sh", "-c", "sleep 15 & exit 0"]
    assert main(["record", "-o", str(tmp_path / "run"), "--", *leaving]) == 1
    assert "made no report" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["run", "run.nsys-rep", "run.qdrep"])
def test_a_report_has_the_suffix_that_nsys_writes(fake, tmp_path, capfd, name):
    fake("exit 9")
    assert main(["record", "--no-baseline", "-o", str(tmp_path / name), "true"]) == 1
    assert "made no report run.nsys-rep" in capfd.readouterr().err


def test_a_place_that_cannot_be_written_is_known_before_anything_runs(fake, tmp_path, capfd):
    fake("exit 9")
    (tmp_path / "dir.nsys-rep").mkdir()
    mark = tmp_path / "ran"
    for place in ("/proc/nsan/run", str(tmp_path / "dir")):
        command = ["record", "--force-overwrite", "-o", place, "--", "touch", str(mark)]
        assert main(command) == 1
        assert "Cannot write the result" in capfd.readouterr().err
    assert not mark.exists()


def test_an_agent_of_nsys_that_was_not_up_in_time_is_tried_again(fake, tmp_path, capfd):
    mark = tmp_path / "tried"
    fake(
        f'if [ ! -e {mark} ]; then touch {mark}; echo "Local Endpoint is not available"; exit 1; fi; '
        'echo "second words"; exit 9'
    )
    assert main(["record", "--no-baseline", "-o", str(tmp_path / "run"), "true"]) == 1
    assert "ended with status 9" in capfd.readouterr().err
