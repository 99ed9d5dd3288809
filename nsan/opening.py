"""The way in: a path becomes a trace. Here files, analyses and the store are wired together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsan.errors import NotAnExportError, NotAStoreError
from nsan.io.manifest import (
    STORE_BESIDE,
    Fingerprint,
    current_manifest,
    default_store,
    drop_outdated,
    fingerprint,
    is_store,
    read_manifest,
)
from nsan.io.probe import display_name, identify, is_folder, newest_capture

if TYPE_CHECKING:
    from nsan.snapshot import Snapshot
    from nsan.trace import Trace


def open_trace(path: str | Path, *, progress: bool = False) -> Trace:
    """Open a capture.

    Parameters
    ----------
    path : str or Path
        An nsys report, stream or export (SQLite, or the folder of a Parquet or Arrow export), what
        nvprof wrote, a folder of reports (the newest is opened), or an nsan store. A capture is
        imported into a store in the user's cache folder (or in NSAN_CACHE_DIR) the first time, and
        again when it has changed; the capture itself is never written to. Reports and streams need
        an installed nsys that time.
    progress : bool, default False
        Show a progress bar on stderr while importing.

    Returns
    -------
    Trace
        Typed lazy frames and what is known about the capture.

    Raises
    ------
    NsanError
        If the path cannot be opened; the message says why and what helps.

    Examples
    --------
    >>> import nsan
    >>> trace = nsan.open_trace("sample_data/um_vector_add_rtx4060l.sqlite")  # doctest: +SKIP
    >>> trace.migrations.select("bytes").sum().collect().item()  # doctest: +SKIP
    12582912
    """
    from nsan.io.store import open_store

    folder, manifest = store_of(Path(path), progress=progress)
    return open_store(folder, manifest)


def open_snapshot(path: str | Path, *, keep_paths: bool = False) -> Snapshot:
    """Open a memory snapshot of PyTorch's caching allocator.

    Parameters
    ----------
    path : str or Path
        What ``torch.cuda.memory._dump_snapshot`` wrote, or a pickle of
        ``torch.cuda.memory_snapshot()``; plain or gzipped, of torch 2.0 to 2.14. It is read by a
        process of its own that may do nothing else, and is never written to.
    keep_paths : bool, default False
        Keep the paths of source files whole; else folders are cut off that are not those of a library.

    Returns
    -------
    Snapshot
        Typed lazy frames and what is known about the file.

    Raises
    ------
    NsanError
        If it is no snapshot, is damaged, or is more than plain data; the message says which.

    Examples
    --------
    >>> import nsan
    >>> path = "sample_data/snapshots/decomfl_opt125m_full_history.pickle.gz"
    >>> snapshot = nsan.open_snapshot(path)  # doctest: +SKIP
    >>> snapshot.segments.select("bytes").sum().collect().item()  # doctest: +SKIP
    1897922560
    """
    from nsan.io.torch_snapshot.frames import read_snapshot

    return read_snapshot(Path(path), keep_paths=keep_paths)


def capture_at(path: Path) -> Path:
    """Return the capture that a path stands for.

    Parameters
    ----------
    path : Path
        A capture, a store, or a folder of reports.

    Returns
    -------
    Path
        The report, stream or SQLite file of a folder of reports that was changed last; any other
        path as it is.

    Raises
    ------
    NsanError
        If a folder is none of these, or may not be read.
    """
    if not is_folder(path) or is_store(path):
        return path
    try:
        identify(path)
    except NotAStoreError:
        newest = newest_capture(path)
        if newest is None:
            raise
        return newest
    return path


def store_of(path: Path, *, progress: bool = False) -> tuple[Path, dict[str, Any]]:
    """Find or make the store of a path; return its folder and its manifest.

    Nothing but the standard library is imported when the store is there already.
    """
    path = capture_at(path)
    if is_store(path):
        return path, read_manifest(path)
    source = fingerprint(path)
    stored = current_store(path, source)
    if stored is not None:
        return stored
    place = default_store(path, source)
    manifest = _build(path, place, source, progress=progress)
    drop_outdated(place)
    return place, manifest


def current_store(path: Path, source: Fingerprint) -> tuple[Path, dict[str, Any]] | None:
    """Find a store that was made from this very state of a capture, beside it or in the cache.

    Parameters
    ----------
    path : Path
        The capture.
    source : Fingerprint
        Its state.

    Returns
    -------
    (Path, dict) or None
        The folder of the store and its manifest; None where there is none.
    """
    for folder in (path.parent / STORE_BESIDE, default_store(path, source)):
        if (manifest := current_manifest(folder, source)) is not None:
            return folder, manifest
    return None


def import_trace(
    path: str | Path,
    store: str | Path | None = None,
    *,
    overwrite: bool = False,
    keep_paths: bool = False,
    progress: bool = False,
) -> Path:
    """Import a capture into a Parquet store.

    Parameters
    ----------
    path : str or Path
        The capture, as for :func:`open_trace`.
    store : str or Path, optional
        Folder of the store; the user's cache folder without it.
    overwrite : bool, default False
        Replace a store of another source at that place, or import again although it is current.
    keep_paths : bool, default False
        Keep whole paths of programs, binaries and source files, which may name people and
        machines; their last part is kept without it.
    progress : bool, default False
        Show a progress bar on stderr.

    Returns
    -------
    Path
        The folder of the store, made now or found current.

    Raises
    ------
    NsanError
        If the capture cannot be read or the store not be written.
    """
    from nsan.io.store import check_place

    path = capture_at(Path(path))
    if is_store(path):
        raise NotAnExportError(path, "an nsan store already", f"Open it as it is: `nsan {path}`.")
    source = fingerprint(path, keep_paths=keep_paths)
    place = default_store(path, source) if store is None else Path(store)
    if not overwrite and current_manifest(place, source) is not None:
        return place
    check_place(place, overwrite=overwrite or store is None or _same_source(place, source))
    _build(path, place, source, progress=progress)
    return place


def _same_source(place: Path, source: Fingerprint) -> bool:
    """Say whether a store was made from an earlier state of this source."""
    if not is_store(place):
        return False
    from nsan.errors import BrokenStoreError

    try:
        return bool(read_manifest(place)["source"].get("place") == source.place)
    except BrokenStoreError:
        return False


def _build(path: Path, place: Path, source: Fingerprint, *, progress: bool) -> dict[str, Any]:
    from nsan.io.formats import open_source
    from nsan.io.progress import progress_bar
    from nsan.io.store import building
    from nsan.totals import totals

    with (
        open_source(path, keep_paths=source.keep_paths) as capture,
        building(place) as writer,
        progress_bar(capture.n_source_rows(), display_name(path), show=progress) as advance,
    ):
        capture.copy_tables(writer.add, advance)
        info = capture.info()
        tables = writer.finish_tables()
        writer.write_manifest(source, info, tables, totals(writer.trace(info, tables)))
    return read_manifest(place)
