"""What is kept of the path of a source file: no folder of the user's. Standard library only."""

from __future__ import annotations

import re
from typing import Final

KEEP_PATHS: Final = "keep-paths"
"""Argument that tells the reading process to cut none."""

_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_PYTHON: Final = re.compile(r"python\d[\d.]*t?", re.IGNORECASE)
_LIBRARY: Final = re.compile(r"lib\d*", re.IGNORECASE)
_LONGEST: Final = 4096
"""As long as a path can be; of longer texts the end is read."""


def without_folders(path: str) -> str:
    r"""Cut the path of a source file to its last part, or from the folder of a library on.

    Parameters
    ----------
    path : str
        As recorded on Linux or Windows.

    Returns
    -------
    str
        ``site-packages/torch/nn/functional.py`` of an installed library, ``lib/python3.12/copy.py`` of
        Python's own, ``pytorch/torch/...`` of torch built in place; of all others the last part. What
        is no path stays, as ``<stdin>`` and ``??``.

    Examples
    --------
    >>> without_folders("/opt/venv/lib/python3.12/site-packages/torch/_tensor.py")
    'site-packages/torch/_tensor.py'
    >>> without_folders("/opt/work/train.py"), without_folders("D:\\work\\train.py")
    ('train.py', 'train.py')
    """
    if path.startswith("<") and path.endswith(">"):
        return path
    parts = path[-_LONGEST:].replace("\\", "/").rstrip("/").split("/")
    kept = parts[_start(parts) :]
    return ("\\" if "\\" in path and "/" not in path else "/").join(kept)


def _start(parts: list[str]) -> int:
    """Find the last folder that is the same on every machine, else the last part."""
    last = len(parts) - 1
    for at in range(last - 1, -1, -1):
        is_library = at + 2 <= last and _is_library(parts[at], parts[at + 1])
        if parts[at] in _INSTALLED or is_library:
            return at
    return last


def _is_library(outer: str, inner: str) -> bool:
    """Say whether a folder in another is where Python or torch has its own files."""
    of_python = _LIBRARY.fullmatch(outer) and _PYTHON.fullmatch(inner)
    on_windows = _PYTHON.fullmatch(outer) and inner == "Lib"
    return bool(of_python or on_windows) or (outer, inner) == ("pytorch", "torch")
