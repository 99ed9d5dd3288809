"""One archive for a GPU machine where nothing can be installed: recorder, programs, sources, tapes and a script.

The recorder is the part of the user's own nsys that a machine needs to profile; nothing of it is kept in nsan. The
archive is the same for the same inputs: sorted, without times, owners and names of users.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

import nsan
from nsan.errors import OutputExistsError, OutputWriteError, UsageError
from nsan.io import nsys_cli
from nsan.io.recording import SWITCHES
from nsan.io.tidy import scratch_beside, undisturbed
from nsan.microbench import building
from nsan.microbench.device_cases import TAPE, cases, tape
from nsan.microbench.device_errors import NotPackableError
from nsan.nsys_errors import RecorderNotFoundError

FOLDER: Final = "nsan-device-check"
"""What the archive unpacks to."""

SUFFIXES: Final = (".tar.xz", ".tar.gz", ".tar")
PROGRAMS: Final = ("uvm_bench", "dl_bench")

_SCRIPT: Final = Path(__file__).parent / "device_check.sh"
_TARGET: Final = "nsys-target"
_TOOLS: Final = "tools"
_TRIAL_DATA: Final = b"results of a device check\n" * 64
_HEADERS: Final = "nsan"
_CMAKE: Final = "CMakeLists.txt"
_SOURCE_SUFFIXES: Final = frozenset({".cu", ".cuh", ".hpp"})
_NEEDED: Final = (
    "nsys",
    "nsys-launcher",
    "launcher",
    "libLauncher64.so",
    "libToolsInjection64.so",
    "libToolsInjectionProxy64.so",
    # Preloaded where --cuda-memory-usage is on: without it no program starts.
    "libToolsInjectionMemoryAllocator.so",
)
_USEFUL: Final = ("libnvlog.so", "nvlog.config.template", "CudaGpuInfoDumper", "nvtx")
_OLDEST_CUDA: Final = 11
_CUPTI: Final = re.compile(r"libcupti\.so\.(\d+)\.(\d+)")
_OF_THE_SYSTEM: Final = re.compile(
    r"(?:linux-vdso|ld-linux|lib(?:c|m|pthread|rt|dl|util|gcc_s))[-.]"
)
_LDD: Final = re.compile(r"(\S+) => (/\S+)")
_TIME: Final = 315_532_800  # 1980-01-01: archives cannot hold times before that everywhere
_TRIAL_SECONDS: Final = 60.0
_TRIALS: Final = 2
_ABOUT: Final = """\
A device check of nsan: records small CUDA programs on a GPU machine where nothing can be installed.

  ./run.sh --help     what it does, and its options
  ./run.sh            about {minutes} minutes; results.tar.xz beside it is what to bring home

It needs sh, tar, awk, sed, grep and the core utilities. Without xz it takes the one in tools, and else gzip.

At home: nsan bench device-check --import results.tar.xz -o FOLDER
The streams of nsys in the results hold names of processes and the host of this machine: keep them to yourself.
The folder nsys-target is NVIDIA's, under the licence of Nsight Systems: do not pass this archive on.
"""

Tell = Callable[[str], None]
"""Takes a line about what is going on."""


@dataclass(frozen=True)
class Packed:
    """What was packed.

    Attributes
    ----------
    path : Path
        The archive.
    n_bytes : int
        Its size.
    nsys_version : str
        Of the recorder in it.
    programs : tuple of str
        Those that are in it ready to run; the sources of all are.
    cases : tuple of str
        What the script records.
    brings_xz : bool
        Whether it has an xz for machines without one: results are a tenth with it.
    """

    path: Path
    n_bytes: int
    nsys_version: str
    programs: tuple[str, ...]
    cases: tuple[str, ...]
    brings_xz: bool


@dataclass(frozen=True)
class _Member:
    name: str
    data: bytes | Path
    executable: bool = False


def pack(
    output: Path,
    *,
    nsys_folder: Path | None = None,
    programs: Mapping[str, Path] | None = None,
    arch: str | None = None,
    overwrite: bool = False,
    tell: Tell | None = None,
) -> Packed:
    """Pack a device check.

    Parameters
    ----------
    output : Path
        The archive, ``.tar.xz``; ``.tar.gz`` and ``.tar`` for where there is no xz.
    nsys_folder : Path, optional
        The version of nsys to take, as ``.../nsight-systems/2023.4.4``; the one that nsan finds by default.
    programs : mapping of str to Path, optional
        Built programs by name; by default they are compiled now. Empty: sources only, to be built there.
    arch : str, optional
        For whom to compile, as nvcc's ``-arch``; every major GPU architecture by default.
    overwrite : bool, default False
        Replace an archive that is there.
    tell : callable, optional
        Called with a line before each part that takes its time.

    Returns
    -------
    Packed
        What was packed.

    Raises
    ------
    NsanError
        If there is no nsys or no compiler, or the archive cannot be written; nothing half-written is left.
    """
    suffix = _checked(output, overwrite=overwrite)
    target = _target_folder(nsys_folder)
    if programs is None:
        programs = building.built(PROGRAMS, arch=arch or building.ANY_GPU, tell=tell)
    version = nsys_cli.version_of(target / "nsys")
    try:
        with tempfile.TemporaryDirectory(prefix="nsan-pack-") as scratch:
            own = list(_own(programs, version))
            _check_names_nobody(own)
            recorder = _recorder(target)
            _try_out(recorder, Path(scratch), target)
            packer = _packer(Path(scratch))
            members = [*recorder, *packer, *own]
            if tell is not None:
                how_long = ": about a minute" if suffix == SUFFIXES[0] else ""
                tell(f"packing {len(members)} files{how_long}")
            _write(members, output, suffix)
        size = output.stat().st_size
    except OSError as error:
        raise OutputWriteError(output, error.strerror or str(error)) from error
    names = tuple(case.name for case in cases())
    return Packed(output, size, version, tuple(sorted(programs)), names, brings_xz=bool(packer))


def _checked(output: Path, *, overwrite: bool) -> str:
    suffix = next((each for each in SUFFIXES if output.name.endswith(each)), None)
    if suffix is None or output.name == suffix:
        msg = f"{output.name!r} is no name for an archive: end it in .tar.xz, or .tar.gz or .tar."
        raise UsageError(msg)
    if output.is_dir():
        raise OutputWriteError(output, "it is a folder")
    if output.exists() and not overwrite:
        raise OutputExistsError(output)
    return suffix


def _check_names_nobody(members: list[_Member]) -> None:
    """Refuse what holds the folder of the sources or the user's home, which may name them: it goes to others."""
    home = os.path.expanduser("~").rstrip("/")  # noqa: PTH111 - a home that cannot be found is none
    folders = [building.SOURCES, Path(nsan.__file__).parent]
    private = {os.fsencode(folder): "the folder of its sources" for folder in folders}
    if home.startswith("/"):
        private[os.fsencode(home) + b"/"] = "your home folder"
    for member in members:
        data = _data(member)
        for own, what in private.items():
            if own not in data:
                continue
            path = member.data if isinstance(member.data, Path) else Path(member.name)
            name = member.name.removeprefix("bin/")
            if name in PROGRAMS:
                problem = f"this nvcc wrote {what} into {name}"
                raise NotPackableError(path, problem, "Pack the sources alone: --sources-only.")
            raise NotPackableError(path, f"it holds {what}", "Take that out of it.")


def _target_folder(named: Path | None) -> Path:
    """Find the folder of nsys that runs on the machine to profile."""
    if named is not None:
        found = [named, *sorted(named.glob("target-linux-*"))]
        folder = next((each for each in found if (each / "nsys").is_file()), None)
        if folder is None:
            raise NotPackableError(named, "it has no target-linux-x64/nsys")
        return folder
    for program in nsys_cli.programs():
        beside = program.resolve().parent
        for folder in (beside, *sorted(beside.parent.glob("target-linux-*"))):
            if (folder / "libToolsInjection64.so").is_file():
                return folder
    raise RecorderNotFoundError


def _recorder(target: Path) -> list[_Member]:
    """List what a machine needs to profile: nsys, what it injects, and libraries that may not be there."""
    missing = [name for name in _NEEDED if not (target / name).is_file()]
    cupti = _newest_cupti(target)
    if missing or not cupti:
        raise NotPackableError(target, f"it lacks {', '.join(missing) or 'libcupti'}")
    named = [target / name for name in _NEEDED] + cupti
    for name in _USEFUL:
        place = target / name
        named += [each for each in sorted(place.rglob("*")) if each.is_file()]
        named += [place] * place.is_file()
    home = f"{_TARGET}/target-linux-x64"
    own = [
        _Member(f"{home}/{each.relative_to(target)}", each, bool(each.stat().st_mode & 0o111))
        for each in named
    ]
    libraries = _libraries(target / "nsys", target)
    return own + [_Member(f"{_TARGET}/lib/{name}", path) for name, path in libraries.items()]


def _newest_cupti(target: Path) -> list[Path]:
    """Choose the newest library of each CUDA version from 11 on: nsys takes the one that the driver knows."""
    newest: dict[int, tuple[int, Path]] = {}
    for path in target.glob("libcupti.so.*"):
        found = _CUPTI.fullmatch(path.name)
        if found and int(found[1]) >= _OLDEST_CUDA:
            major, minor = int(found[1]), int(found[2])
            newest[major] = max(newest.get(major, (minor, path)), (minor, path))
    return [path for _, (_, path) in sorted(newest.items())]


def _libraries(program: Path, target: Path) -> dict[str, Path]:
    """Ask the loader what nsys needs beside itself and the C library."""
    done = nsys_cli.run_tool(["ldd", program], about=program, seconds=_TRIAL_SECONDS)
    found = {match[1]: Path(match[2]) for match in map(_LDD.search, done.lines) if match}
    return {
        name: path
        for name, path in sorted(found.items())
        if not _OF_THE_SYSTEM.match(name) and target not in path.parents
    }


def _try_out(recorder: list[_Member], scratch: Path, target: Path) -> None:
    """Profile a program with nothing but what is packed, in a bare environment: a stream must come of it."""
    if re.search(r"[\s:]", str(scratch)):
        problem = f"nsys does not run in a folder with a blank or colon in its path, as {scratch.parent} has"
        raise NotPackableError(target, problem, "Try it out elsewhere: TMPDIR=/tmp nsan ...")
    _put(recorder, scratch)
    nsys = scratch / _TARGET / "target-linux-x64" / "nsys"
    stream = scratch / "trial.qdstrm"
    bare: list[Path | str] = [
        "env",
        "-i",
        "PATH=/usr/bin:/bin",
        f"LD_LIBRARY_PATH={scratch / _TARGET / 'lib'}",
    ]
    command = [*bare, nsys, "profile", *SWITCHES, "--output", stream.with_suffix(""), "true"]
    # Its agent is not up in time, now and then on a busy machine.
    for _ in range(_TRIALS):
        done = nsys_cli.run_tool(command, about=nsys, seconds=_TRIAL_SECONDS)
        if stream.is_file():
            break
    if done.status or not stream.is_file() or not stream.stat().st_size:
        said = "; ".join(done.lines[:2]) or "nothing"
        raise NotPackableError(
            target, f"tried out, its part for other machines recorded nothing and said: {said}"
        )


def _put(members: list[_Member], scratch: Path) -> None:
    """Lay members in a folder as the archive will."""
    for member in members:
        place = scratch / member.name
        place.parent.mkdir(parents=True, exist_ok=True)
        assert isinstance(member.data, Path)  # noqa: S101 - these are files
        shutil.copy(member.data, place)


def _packer(scratch: Path) -> list[_Member]:
    """List the xz of this machine with what it needs beside the C library, if it works in a bare environment."""
    found = shutil.which("xz")
    if found is None:
        return []
    program = Path(found).resolve()
    members = [_Member(f"{_TOOLS}/xz", program, executable=True)]
    members += [
        _Member(f"{_TOOLS}/lib/{name}", path) for name, path in _libraries(program, scratch).items()
    ]
    _put(members, scratch)
    tried = scratch / "trial"
    tried.write_bytes(_TRIAL_DATA)
    bare: list[Path | str] = ["env", "-i", f"LD_LIBRARY_PATH={scratch / _TOOLS / 'lib'}"]
    command = [*bare, scratch / _TOOLS / "xz", "-9", tried]
    done = nsys_cli.run_tool(command, about=program, seconds=_TRIAL_SECONDS)
    try:
        made = lzma.decompress(tried.with_name("trial.xz").read_bytes())
    except (OSError, lzma.LZMAError):
        return []
    return members if not done.status and made == _TRIAL_DATA else []


def _own(programs: Mapping[str, Path], nsys_version: str) -> Iterator[_Member]:
    """List what is nsan's: the script with its cases, the programs, their sources."""
    yield _Member("run.sh", _SCRIPT, executable=True)
    yield _Member("README.txt", _ABOUT.format(minutes="three").encode())
    yield _Member("cases.tsv", "".join(case.line for case in cases()).encode())
    yield _Member("switches", ("\n".join(SWITCHES) + "\n").encode())
    yield _Member(TAPE, tape().encode())
    facts = {
        "nsan_device_check": 1,
        "nsan_version": nsan.__version__,
        "nsys_version": nsys_version,
        "sources_sha256": building.sources_digest(),
        "programs": sorted(programs),
    }
    yield _Member("pack.json", (json.dumps(facts, indent=1) + "\n").encode())
    for name, path in sorted(programs.items()):
        yield _Member(f"bin/{name}", path, executable=True)
    for path in _sources():
        yield _Member(f"cuda/{path.relative_to(building.SOURCES)}", path)


def _sources() -> Iterator[Path]:
    """List what programs are built from, and nothing that a build has left among it."""
    for folder in (building.SOURCES, *building.SOURCES.glob(f"{_HEADERS}/")):
        for path in sorted(folder.iterdir()):
            if path.is_file() and (path.suffix in _SOURCE_SUFFIXES or path.name == _CMAKE):
                yield path


def _write(members: list[_Member], output: Path, suffix: str) -> None:
    """Write the archive beside its place, and put it there."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = scratch_beside(output, "packing")
    try:
        made = folder / "archive"
        with (
            _compressed(made, suffix) as stream,
            tarfile.open(fileobj=stream, mode="w|") as archive,
        ):
            for member in sorted(members, key=lambda each: each.name):
                _add(archive, member)
        made.chmod(0o644)
        with undisturbed():
            made.replace(output)
    finally:
        with undisturbed():
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _compressed(path: Path, suffix: str) -> Iterator[BinaryIO]:
    with path.open("wb") as file:
        if suffix == ".tar.xz":
            with lzma.open(file, "wb") as xz:
                yield cast("BinaryIO", xz)
        elif suffix == ".tar.gz":
            with gzip.GzipFile("", "wb", mtime=0, fileobj=file) as zipped:
                yield cast("BinaryIO", zipped)
        else:
            yield file


def _data(member: _Member) -> bytes:
    return member.data if isinstance(member.data, bytes) else member.data.read_bytes()


def _add(archive: tarfile.TarFile, member: _Member) -> None:
    data = _data(member)
    entry = tarfile.TarInfo(f"{FOLDER}/{member.name}")
    entry.size, entry.mtime = len(data), _TIME
    entry.mode = 0o755 if member.executable else 0o644
    archive.addfile(entry, io.BytesIO(data))
