"""The CUDA programs, as nvcc compiles them: no warning for any architecture, and one clear end without a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import SOAK

from nsan.microbench.tapes import tape_text
from nsan.model.networks import SMALL

SOURCES = Path(__file__).parents[2] / "nsan" / "microbench" / "cuda"
PROGRAMS = ("uvm_bench", "dl_bench")
STRICT = ("-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror")
NO_DRIVER = 5
SECONDS = 900

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc here (the CUDA toolkit)")
needs_no_gpu = pytest.mark.skipif(
    Path("/dev/nvidiactl").exists(), reason="there is an NVIDIA driver here"
)
pytestmark = needs_nvcc


def nvcc(*arguments):
    return subprocess.run(
        [NVCC, *map(str, arguments)],
        cwd=SOURCES,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def architectures():
    """List what nvcc compiles for, as numbers: all, or the oldest, Hopper and the newest."""
    known = sorted(
        int(name) for name in re.findall(r"compute_(\d+)$", nvcc("--list-gpu-arch").stdout, re.M)
    )
    return known if SOAK else sorted({known[0], 90, known[-1]})


def test_every_source_has_a_test_here():
    assert {path.stem for path in SOURCES.glob("*.cu")} == {*PROGRAMS, "managed_alloc"}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Compile a program for several architectures, once; return it."""
    folder = tmp_path_factory.mktemp("cuda")

    def compiled(name, *flags):
        program = folder / name
        if not program.exists():
            # -O is that of the host's compiler; lower, it warns of as much in half the time.
            targets = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in architectures()]
            level = "-O3" if SOAK else "-O1"
            done = nvcc(
                "-std=c++17",
                level,
                "-lineinfo",
                *STRICT,
                *targets,
                *flags,
                "-o",
                program,
                f"{name}.cu",
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        return program

    return compiled


def run(program, *flags):
    return subprocess.run(
        [str(program), *map(str, flags)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("name", PROGRAMS)
@needs_no_gpu
def test_a_program_compiles_without_a_warning_and_says_that_there_is_no_driver(
    build, name, tmp_path
):
    program = build(name)
    tape = tmp_path / "tape"
    tape.write_text(tape_text(SMALL[0].build(steps=1)))
    flags = ("--tape", tape) if name == "dl_bench" else ()
    done = run(program, *flags, "--out", tmp_path / "out")
    assert (done.returncode, done.stdout) == (NO_DRIVER, "")
    assert done.stderr == (
        f"{name}: no NVIDIA driver is installed here: run it on a Linux machine with an NVIDIA GPU and its driver\n"
    )
    told = json.loads((tmp_path / "out" / "run.json").read_text())
    assert told["status"] == "no_driver"
    assert told["verified"] is False


def test_the_library_for_pytorch_compiles_without_a_warning(build):
    library = build("managed_alloc", "-shared", "-Xcompiler=-fPIC")
    symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
    assert {"nsan_managed_alloc", "nsan_managed_free"} <= set(
        re.findall(r" T (\w+)", symbols.stdout)
    )


def test_a_profiler_sees_kernels_by_their_names(build):
    symbols = subprocess.run(
        ["nm", "-C", build("uvm_bench")], capture_output=True, text=True, check=True
    )
    kernels = set(re.findall(r" T (\w+)\(nsan::\w+\)$", symbols.stdout, re.M))
    assert {
        "vector_add",
        "stream_triad",
        "calculate_temp",
        "signature_read",
        "ping_pong",
    } <= kernels


@pytest.mark.skipif(not SOAK, reason="a second compilation; make soak does it")
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake here")
@needs_no_gpu
def test_cmake_builds_what_the_command_line_builds(tmp_path):
    environment = {**os.environ, "CUDACXX": NVCC}
    for command in (
        ["cmake", "-S", SOURCES, "-B", tmp_path, "-DCMAKE_CUDA_ARCHITECTURES=90"],
        ["cmake", "--build", tmp_path],
    ):
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=SECONDS)
    assert run(tmp_path / "uvm_bench").returncode == NO_DRIVER
    assert (tmp_path / "dl_bench").is_file()
    assert (tmp_path / "libmanaged_alloc.so").is_file()
