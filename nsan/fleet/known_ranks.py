"""The rank that a report itself holds, as far as that is known without importing it."""

from __future__ import annotations

from pathlib import Path

from nsan.errors import NsanError
from nsan.io.manifest import fingerprint, is_store, read_manifest
from nsan.io.probe import identify


def known_rank(path: Path) -> tuple[int | None, bool]:
    """Look up the rank of a report in its store, or in it where it is a database.

    Parameters
    ----------
    path : Path
        A capture or a store.

    Returns
    -------
    (int or None, bool)
        The rank, and whether one would be known by now: a report has to be exported for it.
    """
    from nsan.io.launched import rank_in
    from nsan.opening import current_store

    try:
        if is_store(path):
            return read_manifest(path)["info"].get("rank"), True
        stored = current_store(path, fingerprint(path))
        if stored is not None:
            return stored[1]["info"].get("rank"), True
        kind = identify(path)
    except (NsanError, OSError):
        return None, True
    return rank_in(path), kind not in {"report", "qdstrm"}
