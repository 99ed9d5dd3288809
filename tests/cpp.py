"""Compile a C++ program of the tests, once per content, and run it.

The programs are the host logic of ``nsan/microbench/cuda`` over a device layer on the CPU
(``tests/microbench/host_device.hpp``): they need g++, and neither CUDA nor a GPU. Built programs
stay in pytest's own cache, or in ``NSAN_CPP_CACHE``; the name of each holds a digest of whatever
went into it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parents[1]
HEADERS = ROOT / "nsan" / "microbench" / "cuda"
PROGRAMS = ROOT / "tests" / "microbench"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SANITIZER_STATUS = 99
"""What a program ends with where a sanitizer found something: no status of ours."""
COMPILE_SECONDS = 300
KEPT_SECONDS = 24 * 3600


def built(
    name: str,
    sources: Sequence[Path | str],
    *,
    defines: Sequence[str] = (),
    sanitize: bool = True,
    optimize: bool = False,
) -> Path:
    """Compile sources (paths, or names in tests/microbench) to a program; skip without g++.

    With sanitizers an optimized program takes four times as long to compile: worth it only where it
    then runs for long.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no g++ here to compile the host logic (apt install g++)")
    paths = tuple(str(PROGRAMS / source) for source in sources)
    flags = ["-O1" if optimize else "-O0", *(SANITIZERS if sanitize else ())]
    return _built(compiler, name, paths, (*flags, *(f"-D{define}" for define in defines)))


@functools.cache
def _built(compiler, name, sources, own_flags):
    flags = ["-std=c++17", "-g", *WARNINGS, *own_flags]
    flags += [f"-I{HEADERS}", f"-I{PROGRAMS}"]
    folder = _cache_folder()
    program = folder / f"{name}-{_digest(compiler, flags, sources)}"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _forget_old(folder, name)
            part = program.with_suffix(".part")
            _compile([compiler, *flags, *sources, "-o", str(part)])
            part.replace(program)
    return program


def _cache_folder():
    named = os.environ.get("NSAN_CPP_CACHE")
    folder = Path(named) if named else ROOT / ".pytest_cache" / "nsan-cpp"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _digest(compiler, flags, sources):
    """Digest of the compiler, its flags, and each file that the sources include."""
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True)
    digest.update(version.stdout + "\0".join([*flags, *sources]).encode())
    made = _compile([compiler, *flags, "-MM", *sources])
    rules = made.replace("\\\n", " ").splitlines()
    for path in sorted({word for rule in rules for word in rule.split()[1:]}):
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:20]


def _compile(command):
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=COMPILE_SECONDS
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)}\n{done.stderr}", pytrace=False)
    return done.stdout


def _forget_old(folder, name):
    """Remove programs of this name that are a day old: none of them runs any more."""
    for program in folder.glob(f"{name}-*"):
        if time.time() - program.stat().st_mtime > KEPT_SECONDS:
            program.unlink(missing_ok=True)


def run(
    program: Path,
    *arguments: object,
    environment: dict[str, str] | None = None,
    stdin: str = "",
    stdout: IO[str] | int = subprocess.PIPE,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a built program to its end; fail if a sanitizer found something."""
    done = subprocess.run(
        [str(program), *map(str, arguments)],
        check=False,
        input=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=cwd,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=COMPILE_SECONDS,
        env={**os.environ, **sanitizer_options(), **(environment or {})},
    )
    if done.returncode == SANITIZER_STATUS:
        pytest.fail(f"{program.name} {arguments}\n{done.stderr}", pytrace=False)
    return done


def sanitizer_options() -> dict[str, str]:
    """Environment in which a sanitizer's find has an exit status of its own."""
    status = f"exitcode={SANITIZER_STATUS}"
    return {
        "ASAN_OPTIONS": f"{status}:detect_stack_use_after_return=1",
        "LSAN_OPTIONS": status,
        "UBSAN_OPTIONS": f"{status}:print_stacktrace=1:halt_on_error=1",
    }
