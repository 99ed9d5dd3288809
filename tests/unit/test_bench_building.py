"""Finding nvcc, building once, and what is said when that fails. The compilers here are scripts; the real one is in
``tests/integration/test_bench_build.py``."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsan.cli import main
from nsan.errors import OutputExistsError, StoreWriteError, UnknownNameError
from nsan.microbench import building
from nsan.microbench.errors import BuildFailedError, NvccNotFoundError

VERSION = "Cuda compilation tools, release 12.4, V12.4.131"


def compiler(path, *, does=':> "$output"', version=VERSION, log=None):
    """Write a script that answers for its version, logs its arguments, and then does something."""
    path.parent.mkdir(parents=True, exist_ok=True)
    counted = f'printf "%s\\n" "$*" >> {shlex.quote(str(log))}\n' if log else ""
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; exit 0; fi\n{counted}'
        f'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then output=$2; fi; shift; done\n{does}\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def no_nvcc(monkeypatch, tmp_path):
    """A machine without a CUDA toolkit."""
    for name in ("NVCC", "CUDA_HOME", "CUDA_PATH", *building._ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    found = shutil.which
    usual = "/usr/local/cuda/bin"
    monkeypatch.setattr(
        shutil, "which", lambda n, path=None: None if path == usual else found(n, path=path)
    )


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """GPUs as the driver lists them."""
    folder = tmp_path / "gpus"
    monkeypatch.setattr(building, "_GPUS", folder)

    def plug_in(*models):
        shutil.rmtree(folder, ignore_errors=True)
        for number, model in enumerate(models):
            place = folder / f"0000:0{number}:00.0"
            place.mkdir(parents=True)
            (place / "information").write_text(f"Model: \t\t {model}\nIRQ: 1\nGPU UUID: GPU-1234\n")

    return plug_in


@pytest.fixture
def cache():
    return Path(os.environ["NSAN_CACHE_DIR"])


def left(folder):
    return (
        sorted(each.name for each in folder.rglob("*") if each.is_file()) if folder.exists() else []
    )


# Finding nvcc


@pytest.mark.usefixtures("no_nvcc")
def test_nvcc_is_what_is_named_then_nvcc_then_on_path_then_in_cuda_home(tmp_path, monkeypatch):
    with pytest.raises(NvccNotFoundError, match="Install the CUDA toolkit"):
        building.find_nvcc()
    places = [
        tmp_path / name / "bin" / "nvcc"
        for name in ("path", "home", "toolkit", "variable", "named")
    ]
    for place in places:
        compiler(place)
    path, home, toolkit, variable, named = places
    monkeypatch.setenv("CUDA_PATH", str(toolkit.parents[1]))
    assert building.find_nvcc().path == toolkit
    monkeypatch.setenv("CUDA_HOME", str(home.parents[1]))
    assert building.find_nvcc().path == home
    monkeypatch.setenv("PATH", str(path.parent))
    assert building.find_nvcc().path == path
    monkeypatch.setenv("NVCC", str(variable))
    assert building.find_nvcc().path == variable
    found = building.find_nvcc(str(named))
    assert (found.path, found.version) == (named, "12.4.131")


@pytest.mark.usefixtures("no_nvcc")
def test_what_is_named_and_is_no_program_is_not_silently_replaced(tmp_path, monkeypatch):
    compiler(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("NVCC", "/no/such/nvcc")
    with pytest.raises(NvccNotFoundError, match="'/no/such/nvcc' is no program that can be run"):
        building.find_nvcc()


@pytest.mark.usefixtures("no_nvcc", "cache")
@pytest.mark.parametrize("how", ["option", "variable", "path"])
def test_an_nvcc_may_be_named_from_the_folder_one_stands_in(tmp_path, monkeypatch, how):
    """It is called in the folder of the sources, where ./nvcc is none."""
    compiler(tmp_path / "bin" / "nvcc")
    monkeypatch.chdir(tmp_path)
    named = None
    if how == "option":
        named = "./bin/nvcc"
    else:
        name, value = ("NVCC", "bin/nvcc") if how == "variable" else ("PATH", "bin:/usr/bin:/bin")
        monkeypatch.setenv(name, value)
    made = building.built(["uvm_bench"], arch="sm_90", nvcc=named)
    assert made["uvm_bench"].is_file()


def test_a_compiler_that_is_gone_when_it_is_called_is_no_matter_of_space(tmp_path, cache):
    nvcc = compiler(tmp_path / "nvcc")
    plan = building.planned(arch="sm_90", nvcc=str(nvcc))
    nvcc.unlink()
    with pytest.raises(NvccNotFoundError, match="is no program that can be run"):
        building._compile("uvm_bench", plan, None)
    assert left(cache) == []


def test_a_program_that_is_no_nvcc_is_refused(tmp_path):
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(NvccNotFoundError):
        building.find_nvcc(str(broken))
    broken.write_bytes(b"\x7fELF broken")
    with pytest.raises(NvccNotFoundError):
        building.find_nvcc(str(broken))


# For whom


def test_without_a_gpu_it_is_compiled_for_all_and_with_one_for_that(gpus):
    assert building.default_arch() == "all-major"
    gpus("NVIDIA H100 PCIe")
    assert building.default_arch() == "native"


def test_another_gpu_means_another_build_only_if_it_is_built_for_the_gpu_here(gpus, tmp_path):
    nvcc = str(compiler(tmp_path / "nvcc"))

    def digests():
        return {arch: building.planned(arch=arch, nvcc=nvcc).digest for arch in ("native", "sm_80")}

    gpus("NVIDIA H100 PCIe")
    one = digests()
    gpus("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB")
    other = digests()
    assert one["native"] != other["native"]
    assert one["sm_80"] == other["sm_80"]
    gpus("NVIDIA A100-SXM4-80GB")
    assert digests() == other  # how many of them there are changes nothing


@pytest.mark.parametrize(
    ("name", "value"),
    [("NVCC_APPEND_FLAGS", "-G"), ("NVCC_PREPEND_FLAGS", "-G"), ("NVCC_CCBIN", "g++-12")],
)
def test_what_changes_the_compilers_work_means_another_build(tmp_path, monkeypatch, name, value):
    nvcc = str(compiler(tmp_path / "nvcc"))
    before = building.planned(nvcc=nvcc)
    monkeypatch.setenv(name, value)
    assert building.planned(nvcc=nvcc).digest != before.digest


def test_sources_and_compiler_are_in_the_digest_and_other_files_are_not(tmp_path, monkeypatch):
    copy = tmp_path / "cuda"
    shutil.copytree(building.SOURCES, copy)
    monkeypatch.setattr(building, "SOURCES", copy)
    nvcc = compiler(tmp_path / "nvcc")

    def digest():
        return building.planned(nvcc=str(nvcc)).digest

    first = digest()
    (copy / "notes.txt").write_text("mine")
    assert digest() == first
    header = copy / "nsan" / "axes.hpp"
    header.write_text(header.read_text() + "\n")
    second = digest()
    assert second != first
    header.rename(header.with_name("axis.hpp"))
    assert digest() != second
    header.with_name("axis.hpp").rename(header)
    assert digest() == second
    compiler(nvcc, version="release 12.4, V12.4.99")
    assert digest() != second


# Building


def test_a_second_build_compiles_nothing(tmp_path, cache):
    log, said = tmp_path / "log", []
    nvcc = str(compiler(tmp_path / "nvcc", log=log))
    first = building.built(
        ["uvm_bench", "managed_alloc"], nvcc=nvcc, arch="sm_90", tell=said.append
    )
    assert {path.name for path in first.values()} == {"uvm_bench", "libmanaged_alloc.so"}
    assert len(log.read_text().splitlines()) == len(said) == 2
    assert "compiling uvm_bench with nvcc 12.4.131 for sm_90" in said[0]
    assert (
        building.built(["uvm_bench", "managed_alloc"], nvcc=nvcc, arch="sm_90", tell=said.append)
        == first
    )
    assert len(log.read_text().splitlines()) == len(said) == 2
    building.built(["dl_bench"], nvcc=nvcc, arch="sm_90")
    assert len(log.read_text().splitlines()) == 3
    assert left(cache) == ["dl_bench", "libmanaged_alloc.so", "uvm_bench"]


def test_the_library_alone_is_a_shared_one(tmp_path):
    build = building.planned(nvcc=str(compiler(tmp_path / "nvcc")), arch="sm_90")
    program = building.command_line("uvm_bench", tmp_path / "out", build)
    library = building.command_line("managed_alloc", tmp_path / "out", build)
    assert program[-1] == "uvm_bench.cu"
    assert {"-std=c++17", "-O3", "-lineinfo", "-arch=sm_90"} <= set(program)
    assert "-shared" not in program
    # A program has its own C++ library; a library has that of the process.
    assert "-Xcompiler=-static-libstdc++" in program
    assert not [flag for flag in library if "static" in flag]
    assert {"-shared", "-Xcompiler=-fPIC"} <= set(library)


def test_a_system_without_a_static_cpp_library_builds_with_the_shared_one(tmp_path, cache):
    log = tmp_path / "log"
    does = (
        f'case "$(tail -n 1 {shlex.quote(str(log))})" in *-static-libstdc++*) '
        'echo "ld: cannot find -lstdc++: No such file" >&2; exit 1 ;; esac; :> "$output"'
    )
    nvcc = str(compiler(tmp_path / "nvcc", log=log, does=does))
    building.built(["uvm_bench"], nvcc=nvcc, arch="sm_90")
    assert len(log.read_text().splitlines()) == 2
    assert left(cache) == ["uvm_bench"]


def test_the_compiler_is_told_no_folder_that_names_the_user(tmp_path):
    nvcc = str(compiler(tmp_path / "nvcc", does='echo "$PWD" > "$output"'))
    made = building.built(["uvm_bench"], nvcc=nvcc, arch="sm_90")["uvm_bench"]
    # It still is the folder of the sources, and a compiler that looks finds it so.
    assert made.read_text() == "/proc/self/cwd\n"


def test_a_program_that_there_is_not_is_refused_before_nvcc_is_looked_for(monkeypatch):
    monkeypatch.setenv("NVCC", "/no/such/nvcc")
    with pytest.raises(UnknownNameError, match="There is no program 'uvm'"):
        building.built(["uvm"])


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        (
            "#error -- unsupported GNU version! gcc versions later than 13 are not supported!",
            "NVCC_CCBIN=g\\+\\+-12",
        ),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_120'", "--arch all-major"),
        (
            "nvcc fatal   : Value 'native' is not defined for option 'gpu-architecture'",
            "--arch all-major",
        ),
        (
            "nvcc fatal   : Failed to preprocess host compiler properties. gcc: No such file or directory",
            "install g\\+\\+",
        ),
        ("a.cpp: fatal error: error writing to /tmp/x.o: No space left on device", "TMPDIR"),
        ('uvm_bench.cu(7): error: identifier \\"foo\\" is undefined', "CUDA 11.8 or later"),
    ],
)
def test_a_failed_build_says_why_and_what_helps_and_leaves_nothing(tmp_path, cache, said, advice):
    noise = "; ".join(f"echo noise {i}" for i in range(20))
    does = f':> "$output"; {noise}; echo "{said}" >&2; echo more >&2; exit 2'
    nvcc = str(compiler(tmp_path / "nvcc", does=does))
    with pytest.raises(BuildFailedError, match=advice) as raised:
        building.built(["uvm_bench"], nvcc=nvcc, arch="sm_90")
    text = str(raised.value)
    assert said.replace("\\", "") in text
    assert "noise" not in text
    assert "ended with status 2" in text
    assert left(cache) == []


def test_a_compiler_that_is_killed_or_makes_nothing_has_failed(tmp_path, cache):
    nvcc = compiler(tmp_path / "nvcc", does=':> "$output"; kill -9 $$')
    with pytest.raises(BuildFailedError, match="was killed by signal 9"):
        building.built(["uvm_bench"], nvcc=str(nvcc), arch="sm_90")
    compiler(nvcc, does="exit 0")
    with pytest.raises(BuildFailedError, match=r"\(nothing\)"):
        building.built(["uvm_bench"], nvcc=str(nvcc), arch="sm_90")
    assert left(cache) == []


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("NSAN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(StoreWriteError, match="set NSAN_CACHE_DIR"):
        building.built(["uvm_bench"], nvcc=str(compiler(tmp_path / "nvcc")), arch="sm_90")


def test_an_interrupted_build_leaves_nothing_and_ends_the_compiler(tmp_path, cache):
    mark = tmp_path / "started"
    does = f':> "$output"; sleep 600 & echo $! > {shlex.quote(str(mark))}; wait'
    nvcc = compiler(tmp_path / "nvcc", does=does)
    process = subprocess.Popen(
        [sys.executable, "-m", "nsan", "bench", "build", "uvm_bench", "--nvcc", nvcc],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # A runner in the background may have Ctrl-C switched off for its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    for _ in range(3000):
        if (mark.exists() and mark.read_text()) or process.poll() is not None:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert left(cache) == []
    child = Path("/proc") / mark.read_text().strip() / "stat"
    assert not child.exists() or child.read_text().split()[2] == "Z"


# `nsan bench build`


def test_build_prints_where_the_programs_are(tmp_path, capfd, cache):
    nvcc = str(compiler(tmp_path / "nvcc"))
    assert main(["bench", "build", "--nvcc", nvcc, "-q"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    places = [Path(line) for line in out.splitlines()]
    assert [place.name for place in places] == ["uvm_bench", "dl_bench", "libmanaged_alloc.so"]
    assert all(place.is_file() and cache in place.parents for place in places)


def test_build_into_a_folder_never_replaces_something_else_unasked(tmp_path, capfd):
    nvcc, place = str(compiler(tmp_path / "nvcc")), tmp_path / "bin"
    command = ["bench", "build", "uvm_bench", "--nvcc", nvcc, "-q", "-o", str(place)]
    assert main(command) == 0
    assert capfd.readouterr().out == f"{place / 'uvm_bench'}\n"
    assert main(command) == 0  # the same file again
    (place / "uvm_bench").write_text("mine")
    assert main(command) == OutputExistsError.exit_code
    assert (place / "uvm_bench").read_text() == "mine"
    assert main([*command, "--force-overwrite"]) == 0
    assert (place / "uvm_bench").read_bytes() == b""
    assert left(place) == ["uvm_bench"]


@pytest.mark.usefixtures("no_nvcc")
def test_without_nvcc_build_says_what_to_install(capfd):
    assert main(["bench", "build"]) == 1
    err = capfd.readouterr().err
    assert "nvcc, which compiles the benchmark, is not found" in err
    assert "Install the CUDA toolkit (11.8 or later" in err
