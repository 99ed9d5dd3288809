"""Which files and folders below a folder are captures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from nsan.corpus_errors import GivenBesideError
from nsan.errors import InputMissingError, NoPermissionError, NsanError
from nsan.io.corpus_place import is_corpus
from nsan.io.manifest import STORE_BESIDE, is_store
from nsan.io.probe import CAPTURE_SUFFIXES, identify, is_folder

_EXPORTED: Final = ("_pqtdir", "_arwdir")
"""What nsys appends to a report's name for the folder of its Parquet or Arrow export."""


def captures_of(given: Path) -> tuple[list[Path], list[Path]]:
    """List the captures of a path, each report once, and the folders that may not be read.

    Parameters
    ----------
    given : Path
        A capture, a store or a folder.

    Returns
    -------
    list of Path
        Captures, stores and folders of exports.
    list of Path
        Folders below the given one that cannot be looked into.

    Raises
    ------
    NsanError
        If the path that was given does not exist, may not be read, or is a corpus.
    """
    if not is_folder(given) or is_report_folder(given):
        return [given], []
    if is_corpus(given):
        raise GivenBesideError(str(given))
    found: list[Path] = []
    closed: list[Path] = []
    refused: list[OSError] = []
    for folder, names, files in os.walk(given, onerror=refused.append):
        here = Path(folder)
        try:
            captures = _newest([here / name for name in files if _is_capture(here / name)])
            captures, names[:] = _with_folders(captures, here, names, closed)
        except OSError as error:
            # It could be listed, and nothing in it be looked at.
            names[:] = []
            refused.append(OSError(error.errno, error.strerror, folder))
        else:
            found += captures
    for refusal in refused:
        if Path(refusal.filename) == given:
            why = NoPermissionError if isinstance(refusal, PermissionError) else InputMissingError
            raise why(given) from refusal
        closed.append(Path(refusal.filename))
    return found, closed


def _with_folders(
    captures: list[Path], here: Path, names: list[str], closed: list[Path]
) -> tuple[list[Path], list[str]]:
    """Add the folders that are reports; return those to look into as well."""
    taken = {stem_of(path) for path in captures}
    found, deeper = list(captures), []
    for name in sorted(names):
        inner = here / name
        if name.startswith(".") or inner.is_symlink():
            continue
        if not os.access(inner, os.R_OK | os.X_OK, effective_ids=True):
            closed.append(inner)
        elif is_corpus(inner):
            continue
        elif not is_report_folder(inner):
            deeper.append(name)
        elif not (captures and name == STORE_BESIDE) and stem_of(inner) not in taken:
            found.append(inner)
    return found, deeper


def stem_of(path: Path) -> str:
    """Return the name of a report without what tells its files apart.

    Parameters
    ----------
    path : Path
        A capture, a store or the folder of an export.

    Returns
    -------
    str
        As "run" of run.nsys-rep, run.sqlite and run_pqtdir.
    """
    if path.suffix in CAPTURE_SUFFIXES:
        return path.stem
    for end in _EXPORTED:
        if path.name.endswith(end):
            return path.name.removesuffix(end)
    name = path.name.removesuffix(".gz")
    return Path(name).stem if path.is_file() else name


def _is_capture(path: Path) -> bool:
    return path.suffix in CAPTURE_SUFFIXES and not path.name.startswith(".") and path.is_file()


def is_report_folder(folder: Path) -> bool:
    """Say whether a folder is one report: a store, or the tables that nsys exported.

    Parameters
    ----------
    folder : Path
        A folder that may be read.

    Returns
    -------
    bool
        False for any other folder.
    """
    if is_store(folder):
        return True
    try:
        return identify(folder) == "tables"
    except NsanError:
        return False


def _newest(paths: list[Path]) -> list[Path]:
    """Keep one file of those that differ in their suffix only."""
    newest: dict[str, Path] = {}
    for path in sorted(paths):
        other = newest.get(path.stem)
        if other is None or path.stat().st_mtime_ns > other.stat().st_mtime_ns:
            newest[path.stem] = path
    return [newest[stem] for stem in sorted(newest)]
