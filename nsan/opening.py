"""The way in: a path becomes a trace. Here files, analyses and the store are wired together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsan.errors import NotAStoreError
from nsan.io.manifest import (
    Fingerprint,
    current_manifest,
    default_store,
    fingerprint,
    is_store,
    read_manifest,
)
from nsan.io.probe import display_name, is_folder

if TYPE_CHECKING:
    from nsan.trace import Trace


def open_trace(path: str | Path, *, progress: bool = False) -> Trace:
    """Open a capture.

    Parameters
    ----------
    path : str or Path
        An nsys SQLite export, or an nsan store. An export is imported into a store in the user's
        cache folder (or in NSAN_CACHE_DIR) the first time, and again when it has changed; the
        export itself is never written to.
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


def store_of(path: Path, *, progress: bool = False) -> tuple[Path, dict[str, Any]]:
    """Find or make the store of a path; return its folder and its manifest.

    Nothing but the standard library is imported when the store is there already.
    """
    if is_folder(path):
        if not is_store(path):
            raise NotAStoreError(path)
        return path, read_manifest(path)
    source = fingerprint(path)
    place = default_store(path)
    manifest = current_manifest(place, source)
    if manifest is None:
        manifest = _build(path, place, source, progress=progress)
    return place, manifest


def import_trace(
    path: str | Path,
    store: str | Path | None = None,
    *,
    overwrite: bool = False,
    keep_paths: bool = False,
    progress: bool = False,
) -> Path:
    """Import an nsys SQLite export into a Parquet store.

    Parameters
    ----------
    path : str or Path
        The export.
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
        If the export cannot be read or the store not be written.
    """
    from nsan.io.store import check_place

    path = Path(path)
    source = fingerprint(path, keep_paths=keep_paths)
    place = default_store(path) if store is None else Path(store)
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
        return bool(read_manifest(place)["source"]["name"] == source.name)
    except BrokenStoreError:
        return False


def _build(path: Path, place: Path, source: Fingerprint, *, progress: bool) -> dict[str, Any]:
    from nsan.io.nsys_sqlite import NsysExport
    from nsan.io.progress import progress_bar
    from nsan.io.store import building
    from nsan.totals import totals

    with (
        NsysExport(path, keep_paths=source.keep_paths) as export,
        building(place) as writer,
        progress_bar(export.n_source_rows(), display_name(path), show=progress) as advance,
    ):
        export.copy_tables(writer.add, advance)
        info = export.info()
        tables = writer.finish_tables()
        writer.write_manifest(source, info, tables, totals(writer.trace(info, tables)))
    return read_manifest(place)
