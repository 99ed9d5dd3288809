"""uvm_bench by the real nvcc, and what it says where there is no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import bench_programs
import pytest

from nsan.cli import main
from nsan.microbench import building


@pytest.fixture
def program(monkeypatch):
    """uvm_bench in a cache that all tests share: compiling takes its time."""
    made = bench_programs.cuda_program("uvm_bench")
    monkeypatch.setenv("NSAN_CACHE_DIR", str(bench_programs.cuda_cache()))
    return made


def test_nvcc_builds_the_program_once(program, capfd):
    made = program.stat()
    assert os.access(program, os.X_OK)
    assert main(["bench", "build", "uvm_bench", "--arch", "sm_90"]) == 0
    out, err = capfd.readouterr()
    assert (Path(out.strip()), err) == (program, "")
    assert program.stat().st_mtime_ns == made.st_mtime_ns
    assert main(["bench", "list", "--arch", "sm_90"]) == 0
    assert "built           uvm_bench\n" in capfd.readouterr().out
    assert [each.name for each in program.parent.iterdir()] == ["uvm_bench"]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no binutils here")
def test_the_program_runs_where_no_cpp_library_is(program):
    """glibc 2.34 is what the CUDA runtime in it asks for, when it is linked on a system that has it."""
    linked = subprocess.run(
        ["readelf", "--wide", "--dynamic", "--dyn-syms", program],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "libc.so.6" in linked
    assert "libstdc++" not in linked
    versions = [int(minor) for minor in re.findall(r"@GLIBC_2\.(\d+)", linked)]
    assert max(versions) <= 34
    assert str(building.SOURCES).encode() not in program.read_bytes()


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a driver here")
@pytest.mark.usefixtures("program")
def test_without_a_driver_a_run_ends_with_the_programs_own_status(tmp_path, capfd):
    place = tmp_path / "run"
    status = main(["bench", "run", "uvm_bench", "--arch", "sm_90", "--no-nsys", "-o", str(place)])
    out, err = capfd.readouterr()
    assert status == 5
    assert out == ""
    assert "uvm_bench did not run: no NVIDIA driver is installed here" in err
    assert not place.exists()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_what_nvcc_says_of_a_mistake_is_shown_short(tmp_path, monkeypatch):
    broken = tmp_path / "cuda"
    broken.mkdir()
    (broken / "uvm_bench.cu").write_text("int main() { return no_such_name; }\n")
    monkeypatch.setattr(building, "SOURCES", broken)
    with pytest.raises(building.BuildFailedError) as raised:
        building.built(["uvm_bench"], arch="sm_90")
    text = str(raised.value)
    assert 'uvm_bench.cu(1): error: identifier "no_such_name" is undefined' in text
    assert len(text.splitlines()) <= 6
