"""Programs that `nsan bench` runs in tests: uvm_bench itself over the device layer on the CPU, and what wraps it.

That is the real program but for the GPU (``tests/microbench/host_uvm_bench.cpp``): its flags, tables and exit
statuses are the real ones. ``NSAN_HOST_WITHOUT`` and ``NSAN_HOST_FAIL`` take away what a machine may lack.
"""

from __future__ import annotations

import fcntl
import os
import shlex
from pathlib import Path
from unittest import mock

import cpp
import pytest

from nsan.microbench import building
from nsan.microbench.errors import NvccNotFoundError

ARCH = "sm_90"

SMALL = ("--pattern", "vector-add", "--bytes", "48KiB", "--iterations", "2")
"""Flags for a run of milliseconds: three arrays of 16 KiB."""


def uvm_bench():
    """Build uvm_bench for the CPU. Without sanitizers, which nsys's own preloading would break."""
    return cpp.built("host_uvm_bench", ["host_uvm_bench.cpp"], sanitize=False)


def dl_bench():
    """Build dl_bench for the CPU."""
    return cpp.built("dl_bench", ["dl_bench_host.cpp"])


def cuda_cache():
    """Where programs for the GPU are built once for all tests, and found again by the next run of them."""
    named = os.environ.get("NSAN_CPP_CACHE")
    folder = Path(named) if named else cpp.ROOT / ".pytest_cache"
    return folder / "nsan-cuda"


def cuda_program(name):
    """Build a program with the real nvcc, for one architecture; skip without nvcc."""
    try:
        building.find_nvcc()
    except NvccNotFoundError:
        pytest.skip("no nvcc here to compile the benchmark (apt install cuda-nvcc)")
    folder = cuda_cache()
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / f"{name}.lock").open("w") as lock,
        mock.patch.dict(os.environ, NSAN_CACHE_DIR=str(folder)),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        return building.built([name], arch=ARCH)[name]


def wrapped(program, folder, *, before="", log=None):
    """Write a script that runs a program after some shell, and counts its calls in a log."""
    script = Path(folder) / f"wrapped-{Path(program).name}"
    counted = f'printf "%s\\n" "$*" >> {shlex.quote(str(log))}\n' if log else ""
    script.write_text(f'#!/bin/sh\n{counted}{before}\nexec {shlex.quote(str(program))} "$@"\n')
    script.chmod(0o755)
    return script
