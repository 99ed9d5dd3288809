"""The manifest of a store, and the fingerprint of its source.

Standard library only: the warm path of the command line reads a manifest and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import nsan
from nsan.errors import BrokenStoreError, NoPermissionError
from nsan.info import TraceInfo
from nsan.io.bench_truth import truth_files
from nsan.io.probe import display_name, identify

STORE_FORMAT: Final = 4
"""Raise it when what a store holds changes: older stores are then made again."""

MANIFEST: Final = "manifest.json"
STORE_BESIDE: Final = "store"
"""Name of a store that lies beside its capture: `nsan bench` makes it."""

TABLE_NAMES: Final = (
    "gpu_faults",
    "cpu_faults",
    "migrations",
    "copies",
    "memsets",
    "kernels",
    "driver_events",
    "api_calls",
    "nvtx_ranges",
    "nvtx_marks",
    "allocations",
    "devices",
    "processes",
    "diagnostics",
)
"""The tables of :mod:`nsan.schema`, by name only: that module needs a frame library."""

TOTALS_KEYS: Final = (
    "counts",
    "span",
    "gpu_faults",
    "cpu_faults",
    "migrations",
    "kernels",
    "driver_events",
    "managed",
    "devices",
    "processes",
    "diagnostics",
    "figures",
    "fault_rows",
    "lost_rows",
)
"""What :func:`nsan.totals.totals` gives."""

_KEEP_SECONDS: Final = 24 * 3600
_SAMPLE_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Fingerprint:
    """What tells that a source is still the file that was imported.

    Attributes
    ----------
    name : str
        File name without its folder.
    size : int
        Bytes.
    mtime_ns : int
        Time of the last change.
    digest : str
        SHA-256 of the first and last 64 KiB; the first hold SQLite's change counter. Of the program's
        own tables beside it, if there are any, all bytes. Of a report, also name, size, time and the
        same bytes of the export beside it, which an import would read instead.
    logs : str
        Sizes and times of `-wal` and `-journal` files beside it; empty without.
    keep_paths : bool
        Whether whole paths were kept.
    place : str
        Digest of where it lay: tells another file of the same name from this one in a later state.
    """

    name: str
    size: int
    mtime_ns: int
    digest: str
    logs: str
    keep_paths: bool
    place: str


def fingerprint(path: Path, *, keep_paths: bool = False) -> Fingerprint:
    """Take the fingerprint of a source, a file or the folder of an export.

    Raises
    ------
    NsanError
        If it is no capture, or cannot be read.
    """
    kind = identify(path)
    files = [path]
    if kind == "tables":
        files = sorted(file for file in path.iterdir() if file.is_file())
    digest = hashlib.sha256()
    for file in files:
        digest.update(os.fsencode(file.name))
        _sample(file, digest)
    if kind == "report":
        _sample_export(export_beside(path), digest)
    for file in truth_files(path):
        # What is wrong with one, the import says.
        with contextlib.suppress(OSError), file.open("rb") as content:
            # All of it: one name that is corrected need not change its size.
            whole = hashlib.file_digest(content, "sha256").hexdigest()
            digest.update(f"{file.name}:{whole}".encode())
    statuses = [file.stat() for file in files]
    real = path.resolve()
    logs = [_size_and_time(real.with_name(real.name + suffix)) for suffix in ("-wal", "-journal")]
    return Fingerprint(
        name=display_name(path),
        size=sum(status.st_size for status in statuses),
        mtime_ns=max(status.st_mtime_ns for status in statuses),
        digest=digest.hexdigest(),
        logs=" ".join(log for log in logs if log),
        keep_paths=keep_paths,
        place=place_of(path),
    )


def _sample(file: Path, digest: hashlib._Hash) -> None:
    try:
        with file.open("rb") as content:
            digest.update(content.read(_SAMPLE_BYTES))
            content.seek(max(0, file.stat().st_size - _SAMPLE_BYTES))
            digest.update(content.read(_SAMPLE_BYTES))
    except PermissionError as error:
        raise NoPermissionError(file) from error


def export_beside(report: Path) -> Path:
    """Name the export that stands for a report if it is there, whole and of the same session."""
    return report.with_suffix(".sqlite")


def _sample_export(export: Path, digest: hashlib._Hash) -> None:
    """Note the state of the export beside a report: laid there, replaced or removed, it changes what is read."""
    if not export.is_file():
        return
    logs = (
        export.resolve().with_name(f"{export.resolve().name}{end}") for end in ("-wal", "-journal")
    )
    # The import takes the report where the export cannot be read, and says so.
    with contextlib.suppress(OSError, NoPermissionError):
        status = export.stat()
        about = f"{status.st_size}:{status.st_mtime_ns}:{':'.join(map(_size_and_time, logs))}"
        digest.update(os.fsencode(export.name) + about.encode())
        _sample(export, digest)


def _size_and_time(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return ""
    return (
        f"{path.name[path.name.rfind('-') :]}:{status.st_size}:{status.st_mtime_ns}"
        if status.st_size
        else ""
    )


def cache_folder() -> Path:
    """Where stores go that the user did not place: NSAN_CACHE_DIR, or the user's cache folder."""
    chosen = os.environ.get("NSAN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("nsan"))


def default_store(path: Path, source: Fingerprint) -> Path:
    """Name the store of a source in the cache folder: one for each place and content of a source.

    So a trace that is open goes on reading its own rows when its source is recorded again.
    """
    return cache_folder() / "stores" / f"{_plain(path)}-{place_of(path)}-{source.digest[:8]}"


def drop_outdated(place: Path) -> None:
    """Remove stores of earlier states of a source from the cache, once nobody reads them any more.

    A trace that is open reads its store's files whenever it is asked; a day is given to it.
    """
    prefix = place.name.rpartition("-")[0]
    now = time.time()
    for folder in place.parent.glob(f"{prefix}-????????"):
        manifest = folder / MANIFEST
        with contextlib.suppress(OSError):
            if folder != place and now - manifest.stat().st_mtime > _KEEP_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def place_of(path: Path) -> str:
    """Digest where a source lies: it tells one file from another of its name, and names nobody."""
    return hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:12]


def _plain(path: Path) -> str:
    stem = display_name(path).rpartition(".")[0] or display_name(path)
    return re.sub(r"[^\w.-]+", "_", stem)[:60]


def is_store(folder: Path) -> bool:
    """Say whether a folder holds a manifest."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest of a store.

    Returns
    -------
    dict
        ``store_format``, ``nsan_version``, ``source`` (a :class:`Fingerprint`), ``info``,
        ``tables`` (by name: ``n_rows``, ``parts`` with name and bytes) and ``totals``.

    Raises
    ------
    BrokenStoreError
        If it cannot be read, is of another format, or a part of the store is missing.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except PermissionError as error:
        raise NoPermissionError(folder / MANIFEST) from error
    except (OSError, ValueError) as error:
        raise BrokenStoreError(folder, f"its manifest cannot be read ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("store_format") != STORE_FORMAT:
        raise BrokenStoreError(folder, "it was written by another version of nsan")
    try:
        _check_parts(folder, manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise BrokenStoreError(folder, f"its manifest is not whole ({error})") from error
    return manifest


def _check_parts(folder: Path, manifest: dict[str, Any]) -> None:
    Fingerprint(**manifest["source"])
    manifest["nsan_version"]
    TraceInfo.from_dict(manifest["info"])
    for key in TOTALS_KEYS:
        manifest["totals"][key]
    for name in TABLE_NAMES:
        table = manifest["tables"][name]
        for part in table["parts"]:
            file = folder / name / part["name"]
            if not file.is_file() or file.stat().st_size != part["bytes"]:
                raise BrokenStoreError(folder, f"{name}/{part['name']} is missing or cut short")


def current_manifest(folder: Path, source: Fingerprint) -> dict[str, Any] | None:
    """Return the manifest of a store if it was made from this very source, else None."""
    if not is_store(folder):
        return None
    try:
        manifest = read_manifest(folder)
    except BrokenStoreError:
        return None
    # Figures of an earlier nsan may hold its mistakes. A source may have been moved.
    current = {**asdict(source), "place": manifest["source"].get("place")}
    same = manifest["source"] == current and manifest["nsan_version"] == nsan.__version__
    return manifest if same else None
