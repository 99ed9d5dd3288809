"""Compile the programs of the benchmark with the user's nvcc, each once, into the cache folder.

Standard library only. A build is known by a digest of the sources, the flags, the compiler and what
changes its work in the environment, so that a second call compiles nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from nsan.errors import StoreWriteError, UnknownNameError
from nsan.io.manifest import cache_folder
from nsan.io.tidy import postponed, scratch_beside, undisturbed
from nsan.microbench.errors import BuildFailedError, NvccNotFoundError

SOURCES: Final = Path(__file__).parent / "cuda"
"""The CUDA sources, as they are installed."""

PROGRAMS: Final = {
    "uvm_bench": "one access pattern over managed arrays",
    "dl_bench": "training steps of a network, without a framework",
    "managed_alloc": "managed memory for PyTorch: the library that torch_uvm loads",
}
"""What can be built, and what each is."""

NVCC_VARIABLE: Final = "NVCC"
ANY_GPU: Final = "all-major"
THIS_GPU: Final = "native"
_LIBRARIES: Final = frozenset({"managed_alloc"})
_FLAGS: Final = ("-std=c++17", "-O3", "-lineinfo")
_PORTABLE: Final = ("-Xcompiler=-static-libstdc++", "-Xlinker=--gc-sections")
"""Run where there is no libstdc++, or an older one. Without unused sections, as the static one asks for a newer glibc
than the shared one by functions that nobody calls; libgcc stays shared, as its static one does so, too."""

_NEUTRAL: Final = {"PWD": "/proc/self/cwd"}
"""Compilers believe PWD if it is the folder they are in. -lineinfo writes it into the program, where the real one would
name the user who built it."""

_NO_STATIC: Final = re.compile(r"cannot find -lstdc\+\+|-static-libstdc\+\+")
_ENVIRONMENT: Final = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")
_GPUS: Final = Path("/proc/driver/nvidia/gpus")
_SUFFIXES: Final = frozenset({".cu", ".cuh", ".hpp"})
_SECONDS: Final = 3600.0
_FIRST_LINES: Final = 8
_LONGEST_LINE: Final = 200
_TELLING: Final = re.compile(r"(?i)\b(?:error|fatal|unsupported|not found|No such file)\b")

Tell = Callable[[str], None]
"""Takes a line about what is going on."""


@dataclass(frozen=True)
class Compiler:
    """An nvcc.

    Attributes
    ----------
    path : Path
        The program.
    version : str
        As "13.0.88"; "unknown" if it does not tell.
    """

    path: Path
    version: str


@dataclass(frozen=True)
class Build:
    """How programs are built, and where they are when they are.

    Attributes
    ----------
    compiler : Compiler
        The compiler.
    arch : str
        What nvcc's ``-arch`` gets.
    digest : str
        SHA-256 of all that decides the programs.
    folder : Path
        In the cache folder; need not be there yet.
    """

    compiler: Compiler
    arch: str
    digest: str
    folder: Path

    def path_of(self, program: str) -> Path:
        """Return where a program is when it is built."""
        return self.folder / file_name(program)


def file_name(program: str) -> str:
    """Name the file of a program, or of a library."""
    return f"lib{program}.so" if program in _LIBRARIES else program


def built(
    programs: Sequence[str],
    *,
    arch: str | None = None,
    nvcc: str | None = None,
    tell: Tell | None = None,
) -> dict[str, Path]:
    """Build programs that are not built yet.

    Parameters
    ----------
    programs : sequence of str
        Names out of :data:`PROGRAMS`.
    arch : str, optional
        As nvcc's ``-arch``: "sm_90", "native", "all-major"; the GPU of this machine if it has one, else
        every major one.
    nvcc : str, optional
        The compiler; by default the one that :func:`find_nvcc` finds.
    tell : callable, optional
        Called with a line before each program is compiled: that can take minutes.

    Returns
    -------
    dict of str to Path
        The files by name.

    Raises
    ------
    NsanError
        If there is no compiler, or it fails; nothing half-built is left.
    """
    check_names(programs)
    plan = planned(arch=arch, nvcc=nvcc)
    for program in programs:
        if not plan.path_of(program).is_file():
            _compile(program, plan, tell)
    return {program: plan.path_of(program) for program in programs}


def check_names(programs: Sequence[str]) -> None:
    """Refuse a program that there is not."""
    for program in programs:
        if program not in PROGRAMS:
            raise UnknownNameError("program", program, PROGRAMS)


def planned(*, arch: str | None = None, nvcc: str | None = None) -> Build:
    """Say how and where programs are built, building none.

    Parameters
    ----------
    arch, nvcc : str, optional
        As for :func:`built`.

    Returns
    -------
    Build
        How.

    Raises
    ------
    NvccNotFoundError
        If there is no compiler.
    """
    compiler = find_nvcc(nvcc)
    chosen = arch or default_arch()
    digest = hashlib.sha256()
    own = {name: os.environ.get(name) for name in _ENVIRONMENT}
    gpus = _gpus() if chosen == THIS_GPU else ()
    for part in (compiler.version, chosen, _FLAGS, _PORTABLE, own, gpus, sources_digest()):
        digest.update(json.dumps(part, sort_keys=True).encode())
    name = digest.hexdigest()
    return Build(compiler, chosen, name, cache_folder() / "bench" / name[:16])


def sources_digest() -> str:
    """Return the SHA-256 of all sources, their names among them."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.rglob("*")):
        if file.is_file() and file.suffix in _SUFFIXES:
            text = file.read_bytes()
            digest.update(f"{file.relative_to(SOURCES)}\0{len(text)}\0".encode())
            digest.update(text)
    return digest.hexdigest()


def default_arch() -> str:
    """Choose for whom to compile: the GPU of this machine, or every major one."""
    return THIS_GPU if _gpus() else ANY_GPU


def _gpus() -> tuple[str, ...]:
    """List the models of the GPUs here, as the driver names them."""
    found = set()
    for file in _GPUS.glob("*/information"):
        with contextlib.suppress(OSError):
            found |= set(re.findall(r"^Model:\s*(.+)$", file.read_text(errors="replace"), re.M))
    return tuple(sorted(found))


def find_nvcc(named: str | None = None) -> Compiler:
    """Find the CUDA compiler: what is named, NVCC, PATH, CUDA_HOME, CUDA_PATH, then the usual folder.

    Parameters
    ----------
    named : str, optional
        A path, or a name on PATH.

    Returns
    -------
    Compiler
        With its version.

    Raises
    ------
    NvccNotFoundError
        If there is none, or what is named is none.
    """
    named = named or os.environ.get(NVCC_VARIABLE) or None
    if named is not None:
        path = shutil.which(named)
        if path is None:
            raise NvccNotFoundError(named)
        return _compiler(_absolute(path), named)
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [None, *(f"{home}/bin" for home in homes if home), "/usr/local/cuda/bin"]
    for place in places:
        path = shutil.which("nvcc", path=place)
        if path is not None:
            return _compiler(_absolute(path), path)
    raise NvccNotFoundError


def _absolute(path: str) -> Path:
    """Make a path one that holds in the folder of the sources, too; links stay, as nvcc finds its own by its path."""
    return Path(path).absolute()


def _compiler(path: Path, named: str) -> Compiler:
    try:
        status, said = _run([str(path), "--version"], Path.cwd())
    except OSError as error:
        raise NvccNotFoundError(named) from error
    release = re.search(r"\bV(\d+(?:\.\d+)+)", said)
    if status and release is None:
        raise NvccNotFoundError(named)
    return Compiler(path, release[1] if release else "unknown")


def command_line(program: str, output: Path, build: Build, *, portable: bool = True) -> list[str]:
    """Write the command that compiles a program; it runs in the folder of the sources."""
    # A library has the C++ library of the process that loads it.
    library = program in _LIBRARIES
    kind = ["-shared", "-Xcompiler=-fPIC"] if library else list(_PORTABLE) * portable
    threads = f"--threads={min(8, os.cpu_count() or 1)}"
    own = [str(build.compiler.path), *_FLAGS, f"-arch={build.arch}", threads, *kind]
    return [*own, "-o", str(output), f"{program}.cu"]


def _compile(program: str, build: Build, tell: Tell | None) -> None:
    """Compile one program beside its place, and put it there."""
    if tell is not None:
        how_long = "some minutes" if build.arch == ANY_GPU else "about a minute"
        tell(
            f"compiling {program} with nvcc {build.compiler.version} for {build.arch}: {how_long}, once"
        )
    place, folder = build.path_of(program), None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        folder = scratch_beside(place, "building")
        made = folder.absolute() / place.name
        status, said = _called(command_line(program, made, build))
        if status > 0 and _NO_STATIC.search(said):
            # Some systems have no static C++ library: then the program is for systems like this one.
            command = command_line(program, made, build, portable=False)
            status, said = _called(command)
        if status or not made.is_file():
            raise BuildFailedError(program, status, _first_lines(said), _advice(said))
        with undisturbed():
            made.replace(place)
    except OSError as error:
        raise StoreWriteError(place.parent, error.strerror or str(error)) from error
    finally:
        if folder is not None:
            with undisturbed():
                shutil.rmtree(folder, ignore_errors=True)


def _called(command: Sequence[str]) -> tuple[int, str]:
    """Run the compiler in the folder of the sources; one that is gone by now is no matter of space."""
    try:
        return _run(command, SOURCES, _NEUTRAL)
    except OSError as error:
        raise NvccNotFoundError(command[0]) from error


def _first_lines(said: str) -> list[str]:
    """Choose the lines that say why: errors come first, and the first of them is the cause."""
    lines = [line.strip()[:_LONGEST_LINE] for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if _TELLING.search(line)]
    return (telling or lines[-_FIRST_LINES:])[:_FIRST_LINES]


def _advice(said: str) -> str:
    """Say what helps against what nvcc says."""
    if "unsupported GNU version" in said or "unsupported clang version" in said:
        return "Its CUDA is older than this host compiler: name an older one, as NVCC_CCBIN=g++-12."
    if re.search(
        r"gpu.architecture|Unsupported gpu|compute capabilit|cannot find.*GPU", said, re.I
    ):
        return "Choose another --arch, as --arch all-major or --arch sm_80: `nvcc --list-gpu-arch` lists them."
    if re.search(r"(?i)cannot find compiler|g\+\+: not found|gcc.*No such file", said):
        return (
            "nvcc needs a host compiler: install g++ 9 or later, or name one with NVCC_CCBIN=PATH."
        )
    if "No space left" in said:
        return "Free some space: nvcc also writes to TMPDIR."
    return "CUDA 11.8 or later and g++ 9 or later compile it; name another nvcc with --nvcc PATH."


def _run(
    command: Sequence[str], folder: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, str]:
    """Run a program to its end in a folder, with its children in a group that can be stopped."""
    process = None
    try:
        with postponed():
            process = subprocess.Popen(  # noqa: S603 - the user's own compiler, without a shell
                command,
                cwd=folder,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # With a limit it waits in a way that Ctrl-C ends, whatever libraries are loaded.
        raw, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        _stop(process)
        return -signal.SIGKILL, f"fatal: it did not end within {_SECONDS:g} s"
    except BaseException:
        _stop(process)
        raise
    return process.returncode, raw.decode(errors="replace")


def _stop(process: subprocess.Popen[bytes] | None) -> None:
    if process is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with process:
        pass
