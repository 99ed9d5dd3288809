"""Compile functions with numba, and keep the machine code of the entry points.

numba's own cache does not notice a change in a module that a cached function calls. The cache
therefore lives in a folder named by all sources of the engine; folders not used for a month go.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import numba
import platformdirs

from nsan.uvm import prefetch

_KEEP_SECONDS: Final = 30 * 24 * 3600

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Compile a function that other compiled functions call."""
    return numba.njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[no-any-return]


def entry(function: _F) -> _F:
    """Compile a function that Python calls; its machine code is kept for the next process."""
    folder = _cache_folder()
    if folder is None:
        return numba.njit(function)  # type: ignore[no-any-return]
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        return numba.njit(function, cache=True)  # type: ignore[no-any-return]
    finally:
        numba.config.CACHE_DIR = before


def is_compiled() -> bool:
    """Say whether the machine code of this engine is kept from an earlier process."""
    folder = _cache_folder()
    return folder is not None and any(folder.rglob("*.nbi"))


@cache
def _cache_folder() -> Path | None:
    """Make the folder of this engine's machine code; None where nothing can be written."""
    home = Path(__file__).parent
    sources = [*sorted(home.glob("*.py")), Path(prefetch.__file__)]
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sources:
        digest.update(source.read_bytes())
    chosen = os.environ.get("NSAN_CACHE_DIR")
    root = (Path(chosen) if chosen else platformdirs.user_cache_path("nsan")) / "nsan-engine"
    folder = root / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()  # also marks the folder as used, which keeps it
        probe.unlink(missing_ok=True)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        for other in root.iterdir():
            old = time.time() - other.stat().st_mtime > _KEEP_SECONDS
            if old and re.fullmatch(r"[0-9a-f]{16}", other.name):
                shutil.rmtree(other, ignore_errors=True)
    return folder


prefetch_leaves = compiled(prefetch.choose_leaves)
"""The prefetcher of :mod:`nsan.uvm.prefetch`, compiled."""
