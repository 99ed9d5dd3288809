"""`nsan bench device-check`: the archive, its script on a machine without a GPU, and what comes home."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tarfile
import time
from pathlib import Path

import bench_programs
import pytest
from conftest import SOAK
from readme import blocks
from vendor import need

from nsan.cli import main
from nsan.io.recording import SWITCHES
from nsan.microbench import building
from nsan.microbench.device_cases import cases
from nsan.microbench.packing import pack

NSYS = "2023.4.4"
BARE = {"PATH": "/usr/bin:/bin"}
"""What is left of the environment on a machine where nothing is installed."""

SCRIPT = Path(building.__file__).with_name("device_check.sh")
HEAD = ["case", "status", "alone", "recorded", "seconds_alone", "seconds_nsys", "stream_bytes"]
HEAD += ["reason"]


@pytest.fixture
def nsys(monkeypatch):
    """Make the real nsys the one that is found."""
    folder = need(NSYS)
    monkeypatch.setenv("NSYS", str(folder / "nsys"))
    return folder


def run_script(folder, *arguments, timeout=120, **environment):
    return subprocess.run(
        ["./run.sh", *arguments],
        cwd=folder,
        env=BARE | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def statuses(folder):
    """By case: the line of what became of it."""
    lines = (folder / "results" / "status.tsv").read_text().splitlines()
    assert lines[0].split("\t") == HEAD
    rows = [dict(zip(HEAD, line.split("\t"), strict=True)) for line in lines[1:]]
    return {row["case"]: row for row in rows}


def names_in(archive):
    with tarfile.open(archive) as opened:
        return opened.getnames()


def unpacked(archive, folder):
    subprocess.run(["tar", "xf", archive, "-C", folder], check=True, env=BARE)
    return folder / "nsan-device-check"


def like_the_guide(text):
    """What a check prints, whatever its times are and however wide they make a column."""
    text = re.sub(r"[\d.]+ (?:ms|s|us)\b", "TIME", text)
    return " ".join(re.sub(r"-{3,}", "---", text).split())


# The rehearsal: everything is real but the GPU


@pytest.mark.nsys
@pytest.mark.slow
@pytest.mark.usefixtures("nsys")
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a driver here")
def test_a_check_without_a_gpu_says_so_at_every_step(tmp_path, capfd):
    programs = {"uvm_bench": bench_programs.cuda_program("uvm_bench")}
    pack(tmp_path / "check.tar", programs=programs)
    there = tmp_path / "there"
    there.mkdir()
    folder = unpacked(tmp_path / "check.tar", there)

    done = run_script(folder, "--only", "signature")
    assert done.returncode == 1, done.stderr
    told = statuses(folder)
    assert list(told) == ["signature"]
    row = told["signature"]
    assert (row["status"], row["alone"], row["recorded"]) == ("no_driver", "5", "5")
    assert "no NVIDIA driver is installed here" in row["reason"]
    assert int(row["stream_bytes"]) > 0
    assert "signature              no_driver" in done.stdout

    assert home(folder / "results.tar.xz", tmp_path / "home") == 1
    out, err = capfd.readouterr()
    assert "No GPU activity was recorded" in out
    shown = blocks("docs/microbench.md", "text")[-1]
    assert like_the_guide(out.replace(str(tmp_path / "home"), "check")) == like_the_guide(shown)
    place = tmp_path / "home" / "signature"
    assert {entry.name for entry in place.iterdir()} >= {
        "signature.nsys-rep",
        "signature.log",
        "store",
    }
    facts = json.loads((place / "signature.nsan.json").read_text())
    assert (facts["status_alone"], facts["options"]) == (5, list(SWITCHES))
    assert facts["nsys_version"] == NSYS

    assert main(["summary", str(place / "signature.nsys-rep")]) == 3
    out, err = capfd.readouterr()
    assert "no GPU activity recorded" in out
    assert "no Unified Memory data" in err

    # A machine without a GPU gives no samples.
    assert main(["bench", "device-check", "--samples", str(place.parent), "-o", str(there / "s")])
    assert "none of its cases ended well" in capfd.readouterr().err
    assert not (there / "s").exists()


@pytest.mark.nsys
@pytest.mark.slow
@pytest.mark.usefixtures("nsys")
def test_what_a_program_knows_of_itself_comes_home_beside_its_trace(tmp_path, capsys):
    # A GPU that the CPU plays: the program ends well, and nsys has no GPU to look at.
    pack(tmp_path / "check.tar", programs={"uvm_bench": bench_programs.uvm_bench()})
    folder = unpacked(tmp_path / "check.tar", tmp_path)
    assert run_script(folder, "--only", "vector-add").returncode == 0
    assert home(folder, tmp_path / "home", "--json") == 1
    case = json.loads(capsys.readouterr().out)["cases"][0]
    assert (case["status"], case["exit_recorded"]) == ("not_recorded", 0)
    assert "the driver may be too new" in case["problem"]
    place = tmp_path / "home" / "vector-add"
    for run in ("truth", "alone"):
        allocations = (place / f"vector-add.{run}" / "allocations.csv").read_text().splitlines()
        # Three arrays in 12 MiB; c is made anew in each of two iterations.
        names = sorted(line.split(",")[1] for line in allocations[1:])
        assert names == ["a", "b", "c", "c"], allocations
    how = json.loads((place / "bench.json").read_text())
    assert (how["program"], how["status"]) == ("uvm_bench", "not_recorded")
    assert (how["condition"]["pattern"], how["condition"]["allocator"]) == ("vector-add", "raw")
    assert how["digest"] == building.sources_digest()
    assert home(folder, tmp_path / "home") == 1
    assert "--force-overwrite" in capsys.readouterr().err

    # Samples are made of what a GPU did; here it is said to have done something.
    about = place.parent / "check.json"
    about.write_text(about.read_text().replace('"not_recorded"', '"ok"'))
    made = [
        "bench",
        "device-check",
        "--samples",
        str(place.parent),
        "-o",
        str(tmp_path / "samples"),
    ]
    assert main(made) == 0
    samples = tmp_path / "samples"
    assert "vector-add: real_vector_add.sqlite" in capsys.readouterr().out
    assert main(["info", str(samples / "real_vector_add.sqlite")]) in {0, 3}
    assert "real_vector_add.truth" in capsys.readouterr().out
    text = (samples / "README.md").read_text()
    assert "`uvm_bench --pattern vector-add --bytes 12MiB --iterations 2`" in text
    assert " ".join(SWITCHES) in text
    raw = (samples / "real_vector_add.sqlite").read_bytes()
    assert str(folder).encode() not in raw
    assert b"systemd" not in raw
    assert main(made) == 1
    assert "--force-overwrite" in capsys.readouterr().err


def home(archive, folder, *more):
    return main(["bench", "device-check", "--import", str(archive), "-o", str(folder), *more])


@pytest.mark.nsys
def test_the_recorder_in_an_archive_is_tried_before_it_is_packed(tmp_path, capsys):
    folder = need(NSYS)
    copy = tmp_path / "nsys" / NSYS / "target-linux-x64"
    copy.mkdir(parents=True)
    for entry in folder.iterdir():
        (copy / entry.name).symlink_to(entry)
    # What --cuda-memory-usage preloads: a version that has no such file says so, and one that has a bad one, too.
    preloaded = copy / "libToolsInjectionMemoryAllocator.so"
    preloaded.unlink()
    command = ["bench", "device-check", "--sources-only", "--pack", str(tmp_path / "a.tar")]
    command += ["--nsys-folder", str(copy.parent)]
    assert main(command) == 1
    assert "it lacks libToolsInjectionMemoryAllocator.so" in capsys.readouterr().err
    preloaded.write_bytes(b"")
    assert main(command) == 1
    said = capsys.readouterr().err.replace("\n", " ")
    assert "tried out, its part for other machines recorded nothing" in said
    assert "--nsys-folder" in said
    assert not list(tmp_path.glob("*.tar"))


@pytest.mark.nsys
@pytest.mark.slow
@pytest.mark.usefixtures("nsys")
def test_an_archive_is_the_same_for_the_same_inputs_and_names_nobody(tmp_path, capsys):
    digests = []
    for name in ("a.tar", "b.tar"):
        path = tmp_path / name
        assert main(["bench", "device-check", "--sources-only", "--pack", str(path)]) == 0
        digests.append(hashlib.sha256(path.read_bytes()).hexdigest())
    assert digests[0] == digests[1]
    out = capsys.readouterr().out
    assert f"nsys {NSYS}" in out
    with tarfile.open(tmp_path / "a.tar") as archive:
        members = archive.getmembers()
    assert [each.name for each in members] == sorted(each.name for each in members)
    assert {(each.uid, each.gid, each.uname, each.gname) for each in members} == {(0, 0, "", "")}
    assert len({each.mtime for each in members}) == 1
    names = {each.name.removeprefix("nsan-device-check/") for each in members}
    assert {"run.sh", "cases.tsv", "switches", "tapes/resnet-8.tape", "cuda/uvm_bench.cu"} <= names
    assert {"nsys-target/target-linux-x64/nsys", "nsys-target/lib/libelf.so.1"} <= names
    assert not [name for name in names if name.startswith("bin/") or "__pycache__" in name]
    # An archive that is there is not lost.
    assert main(["bench", "device-check", "--sources-only", "--pack", str(tmp_path / "a.tar")]) == 1
    assert "--force-overwrite" in capsys.readouterr().err


@pytest.mark.nsys
@pytest.mark.slow
@pytest.mark.usefixtures("nsys")
@pytest.mark.skipif(not SOAK, reason="minutes of compiling and of xz")
def test_a_whole_archive_records_every_case_without_a_gpu(tmp_path, capfd):
    path = tmp_path / "check.tar.xz"
    assert main(["bench", "device-check", "--pack", str(path)]) == 0
    assert path.stat().st_size < 40 << 20  # it travels as one file
    folder = unpacked(path, tmp_path)
    done = run_script(folder, "--part-size", "4", timeout=600)
    assert done.returncode == 1
    told = statuses(folder)
    assert list(told) == [case.name for case in cases() if not case.oversubscribes]
    assert {row["status"] for row in told.values()} == {"no_driver"}
    parts = sorted(folder.glob("results.tar.xz.part-*"))
    assert len(parts) > 1
    assert home(folder, tmp_path / "home", "--json") == 1
    document = json.loads(capfd.readouterr().out.partition("{")[2].join(["{", ""]))
    assert [case["name"] for case in document["cases"]] == list(told)


# The script alone, with programs that stand in for those of the vendor

ENDS = {
    "ok": "exit 0",
    "no_driver": "echo 'uvm_bench: no driver' >&2; exit 5",
    "skipped": "echo 'uvm_bench: this GPU cannot' >&2; exit 6",
    "refused": "echo 'uvm_bench: too little memory' >&2; exit 7",
    "failed": "echo 'uvm_bench: cudaErrorIllegalAddress' >&2; exit 1",
}


class Machine:
    """A folder as the archive unpacks to, and a PATH with whatever the vendor has there."""

    def __init__(self, root):
        self.folder, self.tools = root / "check", root / "tools"
        self.log = root / "log"
        for each in ("bin", "tapes", "nsys-target/target-linux-x64"):
            (self.folder / each).mkdir(parents=True)
        self.tools.mkdir()
        (self.folder / "run.sh").write_text(SCRIPT.read_text())
        (self.folder / "run.sh").chmod(0o755)
        (self.folder / "cases.tsv").write_text("".join(case.line for case in cases()))
        (self.folder / "switches").write_text("\n".join(SWITCHES) + "\n")
        (self.folder / "pack.json").write_text("{}\n")
        self.program("uvm_bench", ENDS["ok"])
        self.program("dl_bench", ENDS["ok"])
        # Runs its program as nsys does, leaves a stream, and passes on the status.
        self.nsys('shift 6; printf stream > "$2.qdstrm"; shift 2; "$@"')

    def script(self, place, body):
        place.write_text(f'#!/bin/sh\necho "{place.name} $*" >> {self.log}\n{body}\n')
        place.chmod(0o755)

    def program(self, name, body):
        self.script(self.folder / "bin" / name, f'[ "$1" = --help ] && exit 0\n{body}')

    def nsys(self, body):
        place = self.folder / "nsys-target" / "target-linux-x64" / "nsys"
        version = "echo 'NVIDIA Nsight Systems version 2023.4.4.54-1v0'"
        self.script(place, f'if [ "$1" = --version ]; then {version}; exit 0; fi\nshift\n{body}')

    def gpu(self, *, free_mib):
        answers = {
            "memory.free": free_mib,
            "memory.total": 8192,
            "name": "Some GPU",
            "driver_version": "999.1",
        }
        lines = "\n".join(f"*={key}\\ *) echo {value} ;;" for key, value in answers.items())
        self.script(
            self.tools / "nvidia-smi",
            f'case "$* " in\n{lines}\n*) echo not supported; exit 0 ;; esac',
        )

    def run(self, *arguments, **kwargs):
        environment = BARE | {"PATH": f"{self.tools}:{BARE['PATH']}"}
        return run_script(self.folder, *arguments, **environment, **kwargs)

    def calls(self):
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize("status", ENDS)
def test_a_case_is_marked_with_how_it_ended_and_the_rest_goes_on(machine, status):
    machine.program("uvm_bench", f'case "$*" in *signature*) {ENDS[status]} ;; esac; exit 0')
    done = machine.run("--only", "signature,vector-add")
    told = statuses(machine.folder)
    assert {name: row["status"] for name, row in told.items()} == {
        "signature": status,
        "vector-add": "ok",
    }
    assert done.returncode == (0 if status == "ok" else 1)
    said = ENDS[status].partition("'")[2].partition("'")[0]
    assert told["signature"]["reason"] == said


def test_each_case_runs_alone_and_under_nsys_with_every_switch_that_nsan_uses(machine):
    assert machine.run("--only", "signature", "--device", "3").returncode == 0
    alone, recorded, inner = [line for line in machine.calls() if "--pattern signature" in line]
    flags = "--pattern signature --bytes 8MiB --iterations 1 --device 3"
    results = machine.folder / "results"
    assert alone == f"uvm_bench {flags} --out {results}/signature.alone"
    options = " ".join(SWITCHES)
    assert recorded.startswith(f"nsys profile {options} --output {results}/signature ")
    assert inner == f"uvm_bench {flags} --out {results}/signature.truth"


def test_a_case_that_fails_under_nsys_only_says_that(machine):
    machine.program("uvm_bench", 'case "$*" in *.truth*) exit 1 ;; esac; exit 0')
    assert machine.run("--only", "signature").returncode == 1
    row = statuses(machine.folder)["signature"]
    assert (row["status"], row["alone"], row["recorded"]) == ("failed", "0", "1")
    assert "it ended well alone" in row["reason"]


def test_nsys_without_a_stream_is_marked(machine):
    machine.nsys("echo 'the daemon is on strike'; exit 0")
    assert machine.run("--only", "signature").returncode == 1
    row = statuses(machine.folder)["signature"]
    assert row["status"] == "no_stream"
    assert row["reason"] == "nsys made no stream: the daemon is on strike"


def test_no_case_asks_for_more_than_the_gpu_has_free(machine):
    # 1024 MiB stay free; signature takes 8 and stream 48.
    machine.gpu(free_mib=1024 + 20)
    assert machine.run("--only", "signature,stream").returncode == 1
    told = statuses(machine.folder)
    assert told["signature"]["status"] == "ok"
    assert told["stream"]["status"] == "not_run"
    assert "1044 MiB free" in told["stream"]["reason"]
    assert not [line for line in machine.calls() if "--pattern stream" in line]


def test_oversubscription_is_for_those_who_ask_and_comes_last(machine):
    assert machine.run().returncode == 0
    assert "stream-oversubscribed" not in statuses(machine.folder)
    assert not [line for line in machine.calls() if "--allow-oversubscription" in line]
    (machine.folder / "results").rename(machine.folder / "before")
    assert machine.run("--with-oversubscription", "--to", "other").returncode == 0
    assert list(statuses(machine.folder))[-1] == "stream-oversubscribed"


def test_when_the_time_is_up_the_rest_is_marked(machine):
    # A minute is kept for packing: nothing is left of 62 s for a case.
    assert machine.run("--seconds", "62", "--only", "signature").returncode == 1
    row = statuses(machine.folder)["signature"]
    assert row["status"] == "not_run"
    assert "--seconds" in row["reason"]


def test_what_hangs_is_stopped_and_not_tried_under_nsys(machine):
    machine.program("uvm_bench", "exec sleep 600")
    assert machine.run("--run-seconds", "1", "--only", "signature").returncode == 1
    row = statuses(machine.folder)["signature"]
    assert (row["status"], row["alone"], row["recorded"]) == ("timed_out", "124", "")
    assert not [line for line in machine.calls() if line.startswith("nsys profile")]


def test_programs_that_the_driver_refuses_are_built_there(machine):
    machine.gpu(free_mib=8000)
    (machine.folder / "cuda").mkdir()
    machine.program("uvm_bench", ENDS["no_driver"])
    built = 'printf \'#!/bin/sh\\nexit 0\\n\' > "$6"; chmod 755 "$6"'
    machine.script(
        machine.tools / "nvcc",
        f'if [ "$1" = --version ]; then echo "release 12.4, V12.4.131"; exit 0; fi\n{built}',
    )
    done = machine.run("--only", "signature")
    assert statuses(machine.folder)["signature"]["status"] == "ok", done.stderr
    assert "older than the CUDA" in done.stderr
    facts = (machine.folder / "results" / "machine.txt").read_text()
    assert "programs\tbuilt here" in facts
    assert "nvcc\t12.4" in facts


def test_the_machine_is_described_without_its_name(machine):
    machine.gpu(free_mib=8000)
    assert machine.run("--only", "signature").returncode == 0
    text = (machine.folder / "results" / "machine.txt").read_text()
    facts = dict(line.split("\t") for line in text.splitlines())
    assert facts["gpu.name"] == "Some GPU"
    assert facts["gpu.memory.free"] == "8000"
    assert facts["nsys"] == "2023.4.4.54"
    assert "gpu.mig.mode.current" not in facts  # it is not supported
    assert os.uname().nodename not in text.split()
    assert not [key for key in facts if "serial" in key or "uuid" in key]


def test_results_that_are_there_are_not_lost(machine):
    assert machine.run("--only", "signature").returncode == 0
    before = (machine.folder / "results.tar.xz").read_bytes()
    again = machine.run("--only", "signature")
    assert again.returncode == 2
    assert "move it away" in again.stderr
    assert (machine.folder / "results.tar.xz").read_bytes() == before


def test_a_large_archive_is_split_and_only_archives_lie_where_they_are_asked_for(machine, tmp_path):
    noise = tmp_path / "noise"
    noise.write_bytes(os.urandom(3 << 20))
    machine.nsys(f'shift 6; cat {noise} > "$2.qdstrm"')
    assert machine.run("--only", "signature", "--to", "out", "--part-size", "1").returncode == 0
    names = sorted(entry.name for entry in (machine.folder / "out").iterdir())
    assert names == [f"results.tar.xz.part-a{end}" for end in "abcd"]
    assert max((machine.folder / "out" / name).stat().st_size for name in names) == 1 << 20


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--secnods", "5"], "there is no option '--secnods'"),
        (["--seconds"], "--seconds needs a value"),
        (["--seconds", "ten"], "--seconds takes a whole number, not 'ten'"),
        (["--only", "signature,ping"], "there is no case 'ping'"),
        (["--part-size", "0"], "--part-size is 1 or more"),
    ],
)
def test_a_wrong_command_line_runs_nothing(machine, arguments, said):
    done = machine.run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (machine.folder / "results").exists()


def test_a_folder_with_a_blank_in_its_name_is_refused(tmp_path):
    machine = Machine(tmp_path / "my check")
    done = machine.run("--only", "signature")
    assert done.returncode == 2
    assert "blanks or colons" in done.stderr


def test_what_was_recorded_is_packed_when_the_script_is_stopped(machine, tmp_path):
    started = tmp_path / "started"
    machine.program(
        "uvm_bench", f'case "$*" in *stream*) touch {started}; exec sleep 600 ;; esac; exit 0'
    )
    process = subprocess.Popen(
        ["./run.sh", "--only", "signature,stream"],
        cwd=machine.folder,
        env=BARE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in said
    assert "results/signature.qdstrm" in names_in(machine.folder / "results.tar.xz")


# The command line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--import", "results.tar.xz"], "name it with -o FOLDER"),
        (["--pack", "check.zip"], "end it in .tar.xz"),
        (["--pack", "check.tar", "-o", "x"], "leave -o out"),
        (["--import", "nowhere.tar.xz", "-o", "x"], "no such file"),
    ],
)
def test_a_wrong_request_says_what_is_right(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "device-check", *arguments]) in {1, 2}
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
