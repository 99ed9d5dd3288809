"""What is done with one report of a fleet, in whatever process: plain data in, plain data out.

Tasks and their results travel between processes and machines, so both are containers of JSON.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from nsan.corpus_errors import UnseenCorpusError
from nsan.errors import NotAnExportError, NsanError, OutputExistsError
from nsan.fleet.finding import Found
from nsan.fleet.naming import Named
from nsan.io.corpus import Record, put_tables, read_record, write_record
from nsan.io.corpus_place import CorpusPlace, place_at
from nsan.io.manifest import Fingerprint, cache_folder, fingerprint, is_store, read_manifest
from nsan.io.probe import CORPUS_FILE

_ONE_AT_A_TIME: Final = threading.Lock()
"""A worker of dask may have several threads; memory is meant for one report."""

_BEGINS_PATH: Final = r"(?<![\w.~%-])"
_ENDS_PATH: Final = r"(?=$|[\s'\"`,.;:)])"
_FOLDERS: Final = re.compile(r"(?<![\w:/.])(?:~|\.{1,2})?/(?:[^/\s'\"`]+/)+(?=[^/\s])")


def gather_task(found: Found) -> dict[str, Any]:
    """Describe the task of reading what is known about a report."""
    return _task(found, "gather")


def import_task(found: Found, corpus: str, *, keep_paths: bool, overwrite: bool) -> dict[str, Any]:
    """Describe the task of importing a report into a corpus."""
    about = {"corpus": corpus, "keep_paths": keep_paths, "overwrite": overwrite}
    return _task(found, "import") | about


def _task(found: Found, do: str) -> dict[str, Any]:
    return {
        "do": do,
        "path": str(Path(os.path.abspath(found.path))),  # noqa: PTH100 - a link keeps its name
        "source": found.source,
        "report": found.report,
        "within": found.within,
        "base": found.base,
        "named": asdict(found.named),
    }


def perform(task: Mapping[str, Any]) -> dict[str, Any]:
    """Do one task.

    Parameters
    ----------
    task : mapping
        Of :func:`gather_task` or :func:`import_task`.

    Returns
    -------
    dict
        ``run``, ``rank``, ``source`` and ``report``; with ``reason`` where it failed, else what was asked for.
    """
    doing = {"gather": _gather, "import": _import}[task["do"]]
    try:
        with _ONE_AT_A_TIME:
            return _who(task) | doing(task)
    except UnseenCorpusError as error:
        return failed(task, str(error)) | {"unseen": True}
    except NsanError as error:
        return failed(task, str(error))
    except Exception as error:  # noqa: BLE001 - one report must not stop the others
        return failed(task, f"{type(error).__name__}: {without_folders(str(error), task)[:300]}")


def failed(task: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """Return the result of a task that failed.

    Parameters
    ----------
    task : mapping
        The task.
    reason : str
        Why, and what helps; it may name folders, which are cut off.

    Returns
    -------
    dict
        As :func:`perform` gives it.
    """
    return _who(task) | {"reason": without_folders(reason, task)}


def _who(task: Mapping[str, Any]) -> dict[str, Any]:
    named = task["named"]
    about = {"report": task["report"], "source": task["source"]}
    return {"run": named["run"], "rank": named["rank"]} | about


def without_folders(text: str, task: Mapping[str, Any]) -> str:
    """Write a reason on one line and without folders: it is kept in the corpus.

    Parameters
    ----------
    text : str
        What an error says.
    task : mapping
        Whose folders are known, so that they are found whatever they are called.

    Returns
    -------
    str
        Names of files stay.
    """
    path = Path(task["path"])
    known = [path, path.resolve(), Path(task.get("corpus", ".")).absolute() / "file"]
    known += [folder / "file" for folder in (cache_folder(), Path(tempfile.gettempdir()))]
    known.append(Path("~/file").expanduser())
    folders = {str(folder) for each in known for folder in each.parents if folder.name}
    for folder in sorted(folders, key=len, reverse=True):
        text = re.sub(f"{_BEGINS_PATH}{re.escape(folder)}/", "", text)
        text = re.sub(f"{_BEGINS_PATH}{re.escape(folder)}{_ENDS_PATH}", "its folder", text)
    text = _FOLDERS.sub("", " ".join(text.split()))
    # A name may be any bytes, and JSON and tables hold text.
    return os.fsencode(text).decode("utf-8", errors="backslashreplace")


def _gather(task: Mapping[str, Any]) -> dict[str, Any]:
    from nsan.opening import store_of

    _, manifest = store_of(Path(task["path"]))
    settled = Named(**task["named"]).settled(manifest["info"].get("rank"))
    known = {"info": manifest["info"], "totals": manifest["totals"]}
    same = same_file(Fingerprint(**manifest["source"]))
    return {"run": settled.run, "rank": settled.rank, "same": same, **known}


def same_file(source: Fingerprint) -> str:
    """Return what two reports share that are one file twice.

    Parameters
    ----------
    source : Fingerprint
        Of a report.

    Returns
    -------
    str
        Size and digest, which takes in the name.
    """
    return f"{source.size}-{source.digest}"


def _import(task: Mapping[str, Any]) -> dict[str, Any]:
    from nsan.opening import current_store, import_trace

    place = place_at(task["corpus"])
    if CORPUS_FILE not in place.read([CORPUS_FILE]):
        raise UnseenCorpusError(place.address)
    path, keep_paths = Path(task["path"]), task["keep_paths"]
    source = identity(path, keep_paths=keep_paths)
    stored = (path, read_manifest(path)) if is_store(path) else current_store(path, source)
    if stored is not None:
        record = _put(place, task, source, stored, move=False)
    else:
        with place.scratch() as scratch:
            store = import_trace(path, scratch / "store", keep_paths=keep_paths)
            manifest = read_manifest(store)
            source = Fingerprint(**manifest["source"])
            record = _put(place, task, source, (store, manifest), move=True)
    size = sum(record.files.values())
    about = {"n_rows": record.n_rows, "bytes": size, "same": same_file(record.fingerprint)}
    return {"run": record.run, "rank": record.rank, **about}


def identity(path: Path, *, keep_paths: bool) -> Fingerprint:
    """Take the fingerprint of a report of a fleet; that of a store is of what it was made from.

    Parameters
    ----------
    path : Path
        A capture, or a store.
    keep_paths : bool
        Whether whole paths are wanted.

    Returns
    -------
    Fingerprint
        As of :func:`nsan.io.manifest.fingerprint`.

    Raises
    ------
    NsanError
        If it cannot be read, or holds whole paths that are not wanted.
    """
    if not is_store(path):
        return fingerprint(path, keep_paths=keep_paths)
    source = Fingerprint(**read_manifest(path)["source"])
    if source.keep_paths and not keep_paths:
        raise NotAnExportError(
            path, "a store with whole paths", "Import its source instead, or add --keep-paths."
        )
    return source


def _put(
    place: CorpusPlace,
    task: Mapping[str, Any],
    source: Fingerprint,
    stored: tuple[Path, dict[str, Any]],
    *,
    move: bool,
) -> Record:
    store, manifest = stored
    before = read_record(place, task["report"])
    if before is not None and not task["overwrite"]:
        refuse_another(before, source)
    settled = Named(**task["named"]).settled(manifest["info"].get("rank"))
    record = Record(
        report=task["report"],
        run=settled.run,
        rank=settled.rank,
        source=task["source"],
        within=task["within"],
        base=task["base"],
        fingerprint=source,
        info=manifest["info"],
        totals=manifest["totals"],
        tables=manifest["tables"],
    )
    tables = put_tables(place, record, store, move=move)
    record = replace(record, tables=tables)
    gone = [] if before is None else [n for n in before.files if n not in record.files]
    record = replace(record, leftover=gone)
    write_record(place, record)
    return record


def refuse_another(record: Record, source: Fingerprint) -> None:
    """Refuse to put a report over another one that only has the same name.

    Parameters
    ----------
    record : Record
        What is there.
    source : Fingerprint
        What is to come.

    Raises
    ------
    OutputExistsError
        If it lay in another place, and is another file.
    """
    had = record.fingerprint
    if had.place != source.place and (had.digest, had.size) != (source.digest, source.size):
        what = "is in the corpus already, from another folder of that name"
        raise OutputExistsError(Path(record.source), what)
