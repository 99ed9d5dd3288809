"""A user's own analyses: found in a Python file, or under the entry point ``nsan.analyses``."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from nsan.errors import PluginError

if TYPE_CHECKING:
    from nsan.analysis.catalog import Analysis

GROUP: Final = "nsan.analyses"
"""Entry points name a module that defines analyses."""


def own_analyses(paths: Iterable[str | Path] = ()) -> list[Analysis]:
    """Load the analyses of files and of installed packages.

    Parameters
    ----------
    paths : iterable of str or Path
        Python files that define functions with :func:`nsan.analysis.catalog.analysis`. They are run:
        name only files that you trust.

    Returns
    -------
    list of Analysis
        In the order of the files, those of installed packages last.

    Raises
    ------
    PluginError
        If a file cannot be run, defines no analysis, or one takes a name of another.
    """
    from nsan.analysis.catalog import analyses_in, catalog

    found: list[Analysis] = []
    taken = set(catalog())
    for origin, module in _modules(paths):
        mine = list(analyses_in(module))
        if not mine:
            raise PluginError(origin, "it defines no function with the decorator `analysis`")
        for analysis in mine:
            if analysis.name in taken:
                raise PluginError(origin, f"there is an analysis {analysis.name!r} already")
            taken.add(analysis.name)
        found += mine
    return found


def _modules(paths: Iterable[str | Path]) -> Iterator[tuple[str, ModuleType]]:
    for path in map(Path, paths):
        yield path.name, _run_file(path)
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            yield point.name, point.load()
        except Exception as error:
            raise PluginError(point.name, f"{type(error).__name__}: {error}") from error


def _run_file(path: Path) -> ModuleType:
    """Run a file as a module of a name that no other has."""
    if not path.is_file():
        raise PluginError(path.name, "there is no such file")
    name = f"nsan_plugin_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(path.name, "it is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look it up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PluginError(path.name, f"{type(error).__name__}: {error}") from error
    return module
