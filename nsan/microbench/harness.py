"""The PyTorch harness as what `nsan bench` runs: its files for any Python, the library, the flags.

The Python that has PyTorch need not be the one that has nsan, so the files go where nothing else lies: beside nsan's
other modules, these would stand before those that PyTorch imports.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nsan.errors import ProgramNotFoundError, StoreWriteError
from nsan.io.manifest import cache_folder
from nsan.microbench import building
from nsan.microbench.errors import BenchEndedError
from nsan.microbench.torch_machine import SKIPPED
from nsan.microbench.work import USES_TORCH, Work, check_flags, is_question

_FOLDER: Final = Path(__file__).parent
_LIBRARY: Final = "managed_alloc"
_LIBRARY_FLAG: Final = "--library"
_HAS_TORCH: Final = (
    "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
)
_SECONDS: Final = 60.0


def torch_work(
    arguments: Sequence[str],
    *,
    python: str | None = None,
    arch: str | None = None,
    nvcc: str | None = None,
    tell: building.Tell | None = None,
) -> Work:
    """Find what a run of the harness needs, compiling the library if it must be.

    Parameters
    ----------
    arguments : sequence of str
        Flags for it.
    python : str, optional
        The Python that has PyTorch: a path, or a name on PATH; this one by default.
    arch, nvcc, tell
        As for :func:`nsan.microbench.building.built`.

    Returns
    -------
    Work
        What runs.

    Raises
    ------
    BenchEndedError
        If that Python has no PyTorch; then nothing is compiled.
    NsanError
        If there is no such Python, a flag is nsan's own, or the library cannot be built.
    """
    check_flags(arguments)
    named = python or sys.executable
    found = shutil.which(named)
    if found is None:
        raise ProgramNotFoundError(named)
    # Not resolved: a virtual environment is known by the path of its Python.
    launcher = (os.path.abspath(found),)  # noqa: PTH100 - it keeps links
    texts = {file.name: file.read_bytes() for file in sorted(_FOLDER.glob("torch_*.py"))}
    parts = [launcher[0], *(f"{name}\0{text.decode()}" for name, text in texts.items())]
    given: tuple[str, ...] = ()
    if not is_question(arguments):
        _check_torch(launcher[0], named if python else "this Python")
        if not any(each.partition("=")[0] == _LIBRARY_FLAG for each in arguments):
            plan = building.planned(arch=arch, nvcc=nvcc)
            made = building.built([_LIBRARY], arch=plan.arch, nvcc=nvcc, tell=tell)
            given = (_LIBRARY_FLAG, str(made[_LIBRARY]))
            parts.append(plan.digest)
    script = _copied(texts) / f"{USES_TORCH}.py"
    version = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return Work(
        USES_TORCH, script, tuple(arguments), version=version, launcher=launcher, given=given
    )


def _check_torch(python: str, shown: str) -> None:
    """Look for PyTorch before a minute is spent on its library."""
    try:
        done = subprocess.run(  # noqa: S603 - the user's own Python, without a shell
            [python, "-c", _HAS_TORCH],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProgramNotFoundError(shown, getattr(error, "strerror", None)) from error
    if done.returncode == 0:
        return
    if done.returncode == 1 and not done.stderr:
        reason = (
            f"{shown} has no PyTorch: install it, as with pip install torch, or name a Python that has it with "
            "--python PYTHON"
        )
        raise BenchEndedError(USES_TORCH, SKIPPED, reason)
    said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
    raise ProgramNotFoundError(shown, f"it is no Python that works, and says: {said[0][:200]}")


def _copied(texts: dict[str, bytes]) -> Path:
    """Put the files alone into the cache folder, each whole."""
    digest = hashlib.sha256(b"\0".join(texts.values())).hexdigest()
    folder = cache_folder() / "bench" / f"torch-{digest[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            place = folder / name
            if place.is_file() and place.read_bytes() == text:
                continue
            beside = place.with_name(f".{name}.{os.getpid()}.part")
            try:
                beside.write_bytes(text)
                beside.replace(place)
            finally:
                beside.unlink(missing_ok=True)
    except OSError as error:
        raise StoreWriteError(folder, error.strerror or str(error)) from error
    return folder
