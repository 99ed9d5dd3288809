"""`nsan bench device-check`: the archive, its script on a machine without a GPU, and what comes home."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
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
from nsan.microbench.device_errors import NotPackableError
from nsan.microbench.errors import NvccNotFoundError
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
    # What a debugger needs of it names folders, which no archive may.
    program = tmp_path / "uvm_bench"
    subprocess.run(["objcopy", "--strip-debug", bench_programs.uvm_bench(), program], check=True)
    pack(tmp_path / "check.tar", programs={"uvm_bench": program})
    folder = unpacked(tmp_path / "check.tar", tmp_path)
    # An xz that does not work: it is gzip then, which takes a tenth of the time.
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "xz").symlink_to("/bin/false")
    (folder / "tools" / "xz").unlink()
    path = f"{tmp_path / 'tools'}:{BARE['PATH']}"
    assert run_script(folder, "--only", "vector-add", PATH=path).returncode == 0
    assert (folder / "results.tar.gz").is_file()
    assert home(folder, tmp_path / "home", "--json") == 1
    case = json.loads(capsys.readouterr().out)["cases"][0]
    assert (case["status"], case["exit_recorded"]) == ("not_recorded", 0)
    assert "the driver may be too new" in case["problem"]
    place = tmp_path / "home" / "vector-add"
    for run in ("truth", "alone"):
        allocations = (place / f"vector-add.{run}" / "allocations.csv").read_text().splitlines()
        # Three arrays in 12 MiB; c is made anew in each of two iterations.
        managed = [line.split(",") for line in allocations[1:] if ",managed," in line]
        names = sorted(cells[1] for cells in managed)
        assert names == ["a", "b", "c", "c"], allocations
    how = json.loads((place / "bench.json").read_text())
    assert (how["program"], how["status"]) == ("uvm_bench", "not_recorded")
    assert (how["condition"]["pattern"], how["condition"]["allocator"]) == ("vector-add", "raw")
    assert how["digest"] == building.sources_digest()
    assert home(folder, tmp_path / "home") == 1
    assert "--force-overwrite" in capsys.readouterr().err

    # With a caching allocator there is a snapshot, too.
    (place / "vector-add.pickle").write_bytes(b"a snapshot")
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
    assert (samples / "real_vector_add.pickle").read_bytes() == b"a snapshot"
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
@pytest.mark.usefixtures("nsys")
def test_an_archive_has_the_sources_alone_whatever_lies_beside_them(tmp_path, monkeypatch):
    sources = tmp_path / "cuda"
    (sources / "nsan").mkdir(parents=True)
    for name in ("uvm_bench.cu", "nsan/a.hpp", "nsan/b.cuh", "CMakeLists.txt"):
        (sources / name).write_text("// source\n")
    for name in ("build/CMakeCache.txt", "build/uvm_bench", "build/x.cu", "nsan/a.o", "notes.txt"):
        (sources / name).parent.mkdir(exist_ok=True)
        (sources / name).write_text(f"of {Path.home()}/project\n")
    monkeypatch.setattr(building, "SOURCES", sources)
    packed = pack(tmp_path / "a.tar", programs={})
    inside = {name.partition("/cuda/")[2] for name in names_in(tmp_path / "a.tar")} - {""}
    assert inside == {"uvm_bench.cu", "nsan/a.hpp", "nsan/b.cuh", "CMakeLists.txt"}
    assert packed.brings_xz == ("nsan-device-check/tools/xz" in names_in(tmp_path / "a.tar"))
    # One that names its user is not packed.
    (sources / "nsan" / "a.hpp").write_text("// see /home/alice/notes\n")
    monkeypatch.setenv("HOME", "/home/alice")
    with pytest.raises(NotPackableError, match=r"a\.hpp .*your home folder"):
        pack(tmp_path / "b.tar", programs={})
    assert not (tmp_path / "b.tar").exists()


@pytest.mark.nsys
@pytest.mark.usefixtures("nsys")
def test_a_folder_of_temporary_files_that_nsys_does_not_take_is_named(tmp_path, monkeypatch):
    blank = tmp_path / "my files"
    blank.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(blank))
    with pytest.raises(
        NotPackableError, match=r"blank or colon in its path, as .*/my files"
    ) as told:
        pack(tmp_path / "a.tar", programs={})
    assert "TMPDIR" in str(told.value)


@pytest.mark.nsys
@pytest.mark.usefixtures("nsys")
def test_an_xz_that_does_not_work_is_not_packed(tmp_path, monkeypatch):
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    (tmp_path / "good" / "xz").symlink_to(shutil.which("xz"))
    (tmp_path / "bad" / "xz").symlink_to("/bin/false")
    for name, is_packed in (("good", True), ("bad", False)):
        monkeypatch.setenv("PATH", f"{tmp_path / name}:{os.environ['PATH']}")
        packed = pack(tmp_path / f"{name}.tar", programs={})
        inside = [each for each in names_in(tmp_path / f"{name}.tar") if "/tools/" in each]
        assert packed.brings_xz is is_packed
        assert ("nsan-device-check/tools/xz" in inside) is is_packed
    subprocess.run(["tar", "xf", tmp_path / "good.tar", "-C", tmp_path], check=True)
    tools = tmp_path / "nsan-device-check" / "tools"
    said = subprocess.run(
        [tools / "xz", "--version"],
        env={"LD_LIBRARY_PATH": str(tools / "lib")},
        capture_output=True,
        check=True,
    )
    assert said.stdout.startswith(b"xz")


KERNEL = """#pragma once
#include <iostream>
#include <string>
__global__ void work(int* p) { p[threadIdx.x] = 3; }
inline void say(const std::string& text) { std::cout << text << __FILE__ << std::endl; }
"""
PROGRAM = """#include "nsan/work.hpp"
int main() { int* p; cudaMallocManaged(&p, 4096); work<<<1, 4>>>(p); say("done"); }
"""


@pytest.mark.nsys
@pytest.mark.slow
@pytest.mark.usefixtures("nsys")
def test_nobody_is_named_in_the_programs_of_an_archive_whatever_lines_they_know(
    tmp_path, monkeypatch
):
    """Small programs by the real nvcc, uncompressed: what -lineinfo writes can be read."""
    try:
        building.find_nvcc()
    except NvccNotFoundError:
        pytest.skip("no nvcc here to compile them (apt install cuda-nvcc)")
    sources = tmp_path / "home" / "alice-secret" / "cuda"
    (sources / "nsan").mkdir(parents=True)
    (sources / "nsan" / "work.hpp").write_text(KERNEL)
    for name in ("uvm_bench", "dl_bench"):
        (sources / f"{name}.cu").write_text(PROGRAM)
    monkeypatch.setattr(building, "SOURCES", sources)
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-no-compress")
    pack(tmp_path / "check.tar", arch="sm_90")
    with tarfile.open(tmp_path / "check.tar") as archive:
        for name in ("uvm_bench", "dl_bench"):
            program = archive.extractfile(f"nsan-device-check/bin/{name}").read()
            assert b"work.hpp" in program
            assert b"alice-secret" not in program
            assert str(tmp_path).encode() not in program


@pytest.mark.nsys
@pytest.mark.slow
@pytest.mark.usefixtures("nsys")
def test_programs_that_name_the_folder_of_their_sources_are_not_packed(
    tmp_path, monkeypatch, capsys
):
    # A compiler that does not believe PWD.
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "release 12.4, V12.4.131"; exit 0; fi\n'
        'while [ "$1" != -o ]; do shift; done\npwd -P > "$2"\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("NVCC", str(nvcc))
    assert main(["bench", "device-check", "--pack", str(tmp_path / "a.tar")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "this nvcc wrote the folder of its sources into dl_bench" in said
    assert "--sources-only" in said
    assert not list(tmp_path.glob("*.tar"))


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


RECORDS = 'shift 6; printf stream > "$2.qdstrm"; shift 2; "$@"'
TOO_NEW = (
    "echo 'uvm_bench: the NVIDIA driver is made for CUDA 11.4, this program for CUDA 12.4: update' >&2; "
    "exit 5"
)


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
        self.nsys(RECORDS)

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
        environment = {"PATH": f"{self.tools}:{BARE['PATH']}"}
        return run_script(self.folder, *arguments, **environment | kwargs)

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


def test_progress_and_odd_bytes_in_the_last_words_of_a_program_cost_no_case(machine, tmp_path):
    says = r"printf 'Processing [10%%]\rProcessing\t[99%%]\r\033[1mstopped\007 at\001half\r\n\n'"
    machine.nsys(f'case "$*" in *signature*) {says}; exit 1 ;; esac\n{RECORDS}')
    machine.run("--only", "signature,vector-add")
    reason = statuses(machine.folder)["signature"]["reason"]
    assert reason == "nsys made no stream:  [1mstopped  at half"
    assert home(machine.folder, tmp_path / "home") == 1
    check = json.loads((tmp_path / "home" / "check.json").read_text())
    assert [case["name"] for case in check["cases"]] == ["signature", "vector-add"]


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


DEAF = """
case "$*" in *{when}*)
  trap '' TERM INT HUP
  echo $$ > {place}/pid
  while :; do sleep 1; done ;;
*vector-add*)
  ! grep -q '^State:.[^Z]' "/proc/$(cat {place}/pid)/status" 2>/dev/null || touch {place}/beside ;;
esac
exit 0
"""


def is_there(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_program_that_does_not_end_under_nsys_is_gone_before_the_next_case(machine, tmp_path):
    # As nsys does, it gives the program a session of its own, and ends without it.
    machine.nsys('shift 6; printf stream > "$2.qdstrm"; shift 2; setsid "$@" & wait')
    machine.program("uvm_bench", DEAF.format(when="signature.truth", place=tmp_path))
    # Whatever is left would hold the pipes that this test reads, and it would not end.
    done = machine.run("--run-seconds", "1", "--only", "signature,vector-add", timeout=60)
    assert not is_there((tmp_path / "pid").read_text().strip())
    assert not (tmp_path / "beside").exists()
    told = statuses(machine.folder)
    assert told["signature"]["status"] == "timed_out"
    assert "not in time under nsys" in told["signature"]["reason"]
    assert told["vector-add"]["status"] == "ok"
    assert done.returncode == 1


BESIDE = """
case "$*" in *signature.alone*)
  other=${NSAN_DEVICE_CHECK}4
  NSAN_DEVICE_CHECK=$other setsid sleep 60 & echo $! > PLACE/longer
  env -u NSAN_DEVICE_CHECK "OF_NSAN_DEVICE_CHECK=$NSAN_DEVICE_CHECK" setsid sleep 60 & echo $! > PLACE/inside
  setsid sleep 60 & echo $! > PLACE/ours ;;
esac
exit 0
"""


def test_what_another_check_has_started_is_left_alone(machine, tmp_path):
    # PID 1234 begins as PID 123 does; and a word may be in another.
    machine.program("uvm_bench", BESIDE.replace("PLACE", str(tmp_path)))
    assert machine.run("--only", "signature,vector-add").returncode == 0
    pids = {name: int((tmp_path / name).read_text()) for name in ("longer", "inside", "ours")}
    there = {name for name, pid in pids.items() if is_there(pid)}
    for name in there:
        os.kill(pids[name], signal.SIGKILL)
    assert there == {"longer", "inside"}


def test_a_number_that_has_become_that_of_another_program_is_not_killed(machine, tmp_path):
    with subprocess.Popen(["sleep", "60"], env=BARE) as another:
        # As if it had been one of ours when they were looked for.
        machine.script(
            machine.tools / "grep",
            f'case "$*" in -l*environ*) [ -e {tmp_path}/told ] || echo /proc/{another.pid}/environ\n'
            f'touch {tmp_path}/told ;; esac\nexec /usr/bin/grep "$@"',
        )
        assert machine.run("--only", "signature").returncode == 0
        assert (tmp_path / "told").exists()
        assert another.poll() is None
        another.kill()


SHORT = """
case "$1 $2 $3" in
  "-k 5 10") shift 3; set -- -k 1 1 "$@" ;;
  "-k 20 "*) shift 2; set -- -k 1 "$@" ;;
esac
exec /usr/bin/timeout "$@"
"""
"""A `timeout` that waits 1 s where the script would 10 for a search, or 20 for the end of a program."""


def test_a_search_that_does_not_end_is_a_driver_that_hangs(machine, tmp_path):
    # To read the environment of a program that waits in the driver may take for ever.
    machine.script(machine.tools / "timeout", SHORT)
    os.mkfifo(tmp_path / "hangs")
    machine.script(
        machine.tools / "grep",
        f'case "$*" in -l*environ*) set -- "$@" {tmp_path}/hangs ;; esac\nexec /usr/bin/grep "$@"',
    )
    machine.program("uvm_bench", f"setsid sleep 600 & echo $! > {tmp_path}/pid; exit 0")
    done = machine.run("--only", "signature,vector-add", timeout=60)
    assert done.returncode == 1
    told = statuses(machine.folder)
    assert told["signature"]["status"] == "ok"
    assert told["vector-add"]["status"] == "not_run"
    assert "of signature cannot be ended, or not even looked at" in told["vector-add"]["reason"]
    # What was found before it hung is ended.
    assert not is_there((tmp_path / "pid").read_text().strip())


@pytest.mark.parametrize(
    ("signal_name", "number"), [("KILL", 9), ("TERM", 15), ("SEGV", 11)], ids=str
)
@pytest.mark.parametrize("when", ["alone", "truth"])
def test_a_program_that_somebody_else_kills_did_not_run_out_of_time(
    machine, signal_name, number, when
):
    # As the kernel does where memory is short.
    dies = f"echo 'uvm_bench: half of it' >&2; kill -{signal_name} $$"
    machine.program("uvm_bench", f'case "$*" in *signature.{when}*) {dies} ;; esac; exit 0')
    assert machine.run("--only", "signature").returncode == 1
    row = statuses(machine.folder)["signature"]
    assert row["status"] == "failed"
    if when == "alone":
        assert row["alone"] == str(128 + number)
        assert row["reason"] == f"it was killed (signal {number}): uvm_bench: half of it"
    else:
        assert (row["alone"], row["recorded"]) == ("0", str(128 + number))
        assert f"and was killed (signal {number}) under nsys" in row["reason"]


def test_a_program_that_has_to_be_killed_at_its_limit_ran_out_of_time(machine):
    machine.script(machine.tools / "timeout", SHORT)
    machine.program("uvm_bench", "trap '' TERM; while :; do sleep 0.1; done")
    assert machine.run("--run-seconds", "1", "--only", "signature").returncode == 1
    row = statuses(machine.folder)["signature"]
    assert (row["status"], row["alone"]) == ("timed_out", "137")


def test_no_program_has_the_streams_of_the_script(machine):
    machine.gpu(free_mib=8000)
    smi = machine.tools / "nvidia-smi"
    looks = f'for n in 3 4 5; do [ ! -e /proc/$$/fd/$n ] || echo "open $n" >> {machine.log}; done\n'
    smi.write_text(smi.read_text().replace("case ", looks + "case ", 1))
    machine.program("uvm_bench", looks + "exit 0")
    machine.nsys(looks + RECORDS)
    assert machine.run("--only", "signature").returncode == 0
    assert not [line for line in machine.calls() if line.startswith("open")]


def test_the_libraries_that_came_along_are_for_nsys_alone(machine):
    # They may ask for a newer system than this; here nsys does not begin without them.
    version = "echo 'NVIDIA Nsight Systems version 2023.4.4.54-1v0'"
    machine.script(
        machine.folder / "nsys-target" / "target-linux-x64" / "nsys",
        'case "${LD_LIBRARY_PATH:-}" in */nsys-target/lib) ;; *) exit 127 ;; esac\n'
        f'if [ "$1" = --version ]; then {version}; exit 0; fi\nshift\n{RECORDS}',
    )
    has = f'[ -z "${{LD_LIBRARY_PATH:-}}" ] || echo "has $LD_LIBRARY_PATH" >> {machine.log}'
    machine.script(machine.tools / "timeout", f'{has}\nexec /usr/bin/timeout "$@"')
    assert machine.run("--only", "signature").returncode == 0
    facts = (machine.folder / "results" / "machine.txt").read_text()
    assert "nsys\t2023.4.4.54\n" in facts
    assert not [line for line in machine.calls() if line.startswith("has ")]


def test_what_awk_prints_is_in_parentheses_where_it_compares():
    # Without them `<` is a file for some, and not the grammar of any standard one.
    bare = re.findall(r"\{ printf? [^('}\n][^}\n]*", SCRIPT.read_text())
    assert bare
    assert not [each for each in bare if re.search(r"[<>?]|==", re.sub(r'"[^"]*"', "", each))]


@pytest.mark.parametrize(
    ("said", "status", "known"),
    [
        ("No devices were found", 6, False),
        ("No devices were found", 0, False),
        ("NVIDIA-SMI has failed: is the driver there?", 9, False),
        ("Some GPU", 0, True),
        ("Some GPU", 14, True),  # a damaged infoROM
    ],
)
def test_what_is_no_answer_of_a_gpu_is_no_fact_of_it(machine, said, status, known):
    machine.script(machine.tools / "nvidia-smi", f"echo '{said}'; exit {status}")
    assert machine.run("--only", "signature").returncode == 0
    facts = (machine.folder / "results" / "machine.txt").read_text()
    assert ("gpu.name\tSome GPU" in facts) is known
    assert (said in facts) is known


def test_a_percent_sign_in_the_path_is_none_that_nsys_replaces(tmp_path):
    machine = Machine(tmp_path / "50%h")
    # nsys puts the name of the host for %h, and a percent sign for two.
    put = "sed 's/%%/\\n/g; s/%[a-z]/host/g; s/\\n/%/g'"
    machine.nsys(f'shift 6; printf stream > "$(printf %s "$2" | {put}).qdstrm"; shift 2; exec "$@"')
    assert machine.run("--only", "signature").returncode == 0
    assert (machine.folder / "results" / "signature.qdstrm").read_text() == "stream"


def test_programs_that_the_driver_refuses_are_built_there(machine):
    machine.gpu(free_mib=8000)
    (machine.folder / "cuda").mkdir()
    machine.program("uvm_bench", TOO_NEW)
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


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo 'uvm_bench: the NVIDIA driver shows no GPU: see `nvidia-smi`' >&2; exit 5", ""),
        (None, "only the sources of the programs came along"),
    ],
)
def test_what_keeps_the_programs_from_running_is_told_as_it_is(machine, program, said):
    machine.gpu(free_mib=8000)
    if program is None:
        (machine.folder / "bin" / "uvm_bench").unlink()
    else:
        machine.program("uvm_bench", program)
    done = machine.run("--only", "signature")
    row = statuses(machine.folder)["signature"]
    assert row["status"] == ("cannot_run" if program is None else "no_driver")
    assert said in done.stderr
    assert "older" not in done.stderr
    assert "do not run" not in done.stderr


def test_a_driver_that_does_not_answer_does_not_stop_the_check(machine):
    # Every question to it has a limit; here each is asked of a `timeout` that gives none.
    machine.gpu(free_mib=8000)
    machine.script(machine.tools / "timeout", "exit 124")
    machine.run("--only", "signature")
    asked = [line for line in machine.calls() if line.startswith("nvidia-smi")]
    assert not asked
    assert [line for line in machine.calls() if "timeout -k 5 20 nvidia-smi" in line]
    assert not [line for line in machine.calls() if re.search(r"timeout( -k \d+)? 0 ", line)]


@pytest.mark.parametrize(
    ("visible", "device", "asked"),
    [("3,1", "0", "3"), ("3,1", "1", "1"), ("GPU-8a2f, GPU-77", "1", "GPU-77"), ("", "2", "2")],
)
def test_the_gpu_that_is_asked_is_the_one_that_programs_get(machine, visible, device, asked):
    machine.gpu(free_mib=8000)
    environment = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    assert machine.run("--only", "signature", "--device", device, **environment).returncode == 0
    questions = [line for line in machine.calls() if "--query-gpu=memory.free" in line]
    assert {line.split()[2] for line in questions} == {asked}
    runs = [line for line in machine.calls() if line.startswith("uvm_bench --pattern signature")]
    assert runs
    assert all(f"--device {device}" in line for line in runs)


def test_a_gpu_that_programs_do_not_see_is_refused(machine):
    done = machine.run("--device", "2", CUDA_VISIBLE_DEVICES="3,1")
    assert done.returncode == 2
    assert "--device 2: CUDA_VISIBLE_DEVICES=3,1 shows no such GPU" in done.stderr
    assert not (machine.folder / "results").exists()


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


SIZES = {"signature": 1000, "vector-add": 1500, "stream": 400}
"""Of streams that nothing compresses, KiB."""


@pytest.fixture
def noisy(machine, tmp_path):
    for name, kib in SIZES.items():
        (tmp_path / name).write_bytes(os.urandom(kib << 10))
    machine.nsys(f'shift 6; cat {tmp_path}/"${{2##*/}}" > "$2.qdstrm"')
    return machine


@pytest.mark.parametrize(
    ("limits", "only", "left_out"),
    [
        (("--max-size", "3"), SIZES, []),
        (("--max-size", "1"), SIZES, ["signature", "vector-add"]),
        # Two parts of 1 MiB are 2, whatever the rest may be.
        (("--max-files", "2", "--part-size", "1"), SIZES, ["vector-add"]),
        (("--max-size", "1"), ["vector-add"], ["vector-add"]),
    ],
)
def test_the_largest_streams_stay_where_not_all_may_leave_and_their_cases_say_so(
    noisy, tmp_path, limits, only, left_out
):
    done = noisy.run("--only", ",".join(only), "--to", "out", *limits)
    assert done.returncode == (1 if left_out else 0)
    out = noisy.folder / "out"
    whole = noisy.folder / "whole.tar.xz"
    whole.write_bytes(b"".join(part.read_bytes() for part in sorted(out.iterdir())))
    names = {Path(name).name for name in names_in(whole)}
    assert {name for name in only if f"{name}.qdstrm" not in names} == set(left_out)
    assert {"machine.txt", *(f"{name}.log" for name in only)} <= names
    told = statuses(noisy.folder)
    assert list(told) == [*only]
    assert {name for name, row in told.items() if row["status"] == "left_out"} == set(left_out)
    for name in left_out:
        assert f"--only {name}" in told[name]["reason"]
        assert told[name]["stream_bytes"] == str(SIZES[name] << 10)
        assert f"{name:<22} left_out" in done.stdout
    if left_out == [*only]:
        assert home(whole, tmp_path / "home") == 1
        made = json.loads((tmp_path / "home" / "vector-add" / "bench.json").read_text())
        assert (made["status"], made["reason"]) == ("left_out", told["vector-add"]["reason"])
    # What is read at home is what is said here.
    with tarfile.open(whole) as archive:
        inside = archive.extractfile("results/status.tsv").read()
    assert inside == (noisy.folder / "results" / "status.tsv").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-size", "0"], "--max-size is 1 or more"),
        (["--max-files", "0"], "--max-files is 1 or more"),
        (["--secnods", "5"], "there is no option '--secnods'"),
        (["--seconds"], "--seconds needs a value"),
        (["--seconds", "ten"], "--seconds takes a whole number, not 'ten'"),
        (["--only", "signature,ping"], "there is no case 'ping'"),
        (["--part-size", "0"], "--part-size is 1 or more"),
        (["--part-size", "00"], "--part-size is 1 or more"),
        (["--seconds", "1000000"], "below a million"),
        (["--only", ""], "--only names no case"),
        (["--only", ","], "--only names no case"),
        (["--only", "*"], "there is no case '*'"),
        (["--only", "stream-oversubscribed"], "--with-oversubscription"),
    ],
)
def test_a_wrong_command_line_runs_nothing(machine, arguments, said):
    done = machine.run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (machine.folder / "results").exists()


def test_a_number_with_zeros_before_it_is_that_number(machine):
    done = machine.run("--only", "signature", "--seconds", "0090", "--part-size", "08")
    assert done.returncode == 0, done.stderr
    assert "are kept for packing" not in done.stderr


def test_the_script_is_found_by_a_link_to_it(machine, tmp_path):
    (tmp_path / "link").symlink_to(machine.folder / "run.sh")
    done = subprocess.run(
        [tmp_path / "link", "--only", "signature"], cwd=tmp_path, env=BARE, timeout=60, check=False
    )
    assert done.returncode == 0
    assert (machine.folder / "results.tar.xz").is_file()


def test_a_folder_that_cannot_be_written_to_needs_another_for_what_comes_of_it(machine, tmp_path):
    someone = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    for folder in (tmp_path, *tmp_path.parents):  # however deep pytest and its workers put it
        if folder.stat().st_uid == os.geteuid() and folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(folder.stat().st_mode | 0o055)
    machine.log.touch()
    machine.log.chmod(0o666)
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(0o777)
    machine.folder.chmod(0o555)

    def run(*arguments):
        command = ["./run.sh", "--only", "signature", *arguments]
        return subprocess.run(
            command,
            cwd=machine.folder,
            env=BARE,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **someone,
        )

    refused = run()
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "cannot be written to: name another folder with --to FOLDER" in refused.stderr
    done = run("--to", str(out))
    machine.folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert {entry.name for entry in out.iterdir()} == {"results", "results.tar.xz"}
    assert "results/signature.qdstrm" in names_in(out / "results.tar.xz")


def test_a_machine_with_little_memory_may_keep_less_of_it(machine):
    machine.gpu(free_mib=100)
    assert machine.run("--only", "signature").returncode == 1
    assert "--reserve" in statuses(machine.folder)["signature"]["reason"]
    (machine.folder / "results").rename(machine.folder / "before")
    done = machine.run("--only", "signature", "--reserve", "64", "--to", "other")
    assert done.returncode == 0
    assert "are kept for packing" not in done.stderr


@pytest.mark.parametrize(
    ("slow", "tried", "made"),
    [
        ("xz -9", ["-9", "-1"], "results.tar.xz"),
        ("xz -", ["-9", "-1"], "results.tar.gz"),
        ("never", ["-9"], "results.tar.xz"),
    ],
)
def test_where_xz_takes_too_long_a_faster_one_is_tried_before_streams_stay(
    noisy, slow, tried, made
):
    noisy.script(
        noisy.tools / "timeout",
        f'case "$*" in *"{slow}"*) exit 124 ;; esac\nexec /usr/bin/timeout "$@"',
    )
    done = noisy.run("--only", "signature", "--seconds", "300", "--max-size", "1")
    assert done.returncode == 0
    assert statuses(noisy.folder)["signature"]["status"] == "ok"
    assert "results/signature.qdstrm" in names_in(noisy.folder / made)
    calls = [line.split() for line in noisy.calls() if line.endswith("results.tar")]
    assert [call[-2] for call in calls] == tried
    # Together they have what is left of the 300 s.
    assert 0 < sum(int(call[3]) for call in calls) <= 300


def test_sizes_and_times_are_written_for_people(noisy):
    done = noisy.run("--only", "signature")
    # 1000 KiB that nothing compresses.
    assert re.search(r"signature +ok +0\.\d s +0\.\d s +1\.0 MiB", done.stdout)
    assert re.search(r"bring home: \S+/results\.tar\.xz \(100\d\.\d KiB\)", done.stderr)


def test_without_an_xz_there_the_one_that_came_along_is_taken(machine):
    (machine.tools / "xz").symlink_to("/bin/false")
    (machine.folder / "tools").mkdir()
    machine.script(machine.folder / "tools" / "xz", 'exec /usr/bin/xz "$@"')
    assert machine.run("--only", "signature").returncode == 0
    assert (machine.folder / "results.tar.xz").is_file()
    assert [line for line in machine.calls() if line == "xz -9 results.tar"]


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
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    shown, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in said
    assert re.search(r"^signature +ok .*\nstream +interrupted ", shown, re.MULTILINE)
    assert "results/signature.qdstrm" in names_in(machine.folder / "results.tar.xz")
    told = statuses(machine.folder)
    assert {name: row["status"] for name, row in told.items()} == {
        "signature": "ok",
        "stream": "interrupted",
    }
    assert "stopped" in told["stream"]["reason"]


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
