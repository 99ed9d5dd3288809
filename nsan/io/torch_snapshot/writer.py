"""Frames to a memory snapshot as PyTorch 2.9 writes it, with the pool of each entry as 2.12 does."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import polars as pl

from nsan.errors import OutputExistsError, OutputWriteError
from nsan.torch_alloc.tables import SNAPSHOT_TABLES

Rows = list[dict[str, Any]]
Frames = dict[int | None, list[dict[str, Any]]]

_PROTOCOL: Final = 4
_VERSION: Final = "2.9"
_NO_CONTEXT: Final = "N/A"
_FLAGS: Final = {"True": True, "False": False}


def write_snapshot(
    path: str | Path,
    tables: Mapping[str, pl.DataFrame | pl.LazyFrame],
    *,
    model: Mapping[str, str | int | float | bool] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a memory snapshot that PyTorch's own viewers open and :func:`nsan.open_snapshot` reads.

    Parameters
    ----------
    path : str or Path
        The pickle; it gets its name when all is written.
    tables : mapping of str to DataFrame or LazyFrame
        Tables of :mod:`nsan.torch_alloc.tables` by name; ``segments`` is needed, what else is missing
        has no rows. Blocks stand in the order of their addresses; inferred settings are left out.
    model : mapping, optional
        How nsan's model made this, for the key ``nsan_model`` of the file, which PyTorch does not look
        at; its ``torch_version`` is that of the settings, or 2.9. None: the data was recorded.
    overwrite : bool, default False
        Replace a file.

    Raises
    ------
    OutputExistsError, OutputWriteError
        If it is there already, or cannot be written.
    SchemaMismatchError
        If a table has other columns than it must have.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise OutputExistsError(path)
    frames = {
        name: table.validate(tables[name].lazy() if name in tables else table.empty()).collect()
        for name, table in SNAPSHOT_TABLES.items()
    }
    _write(path, snapshot_dict(frames, model=model))


def snapshot_dict(
    frames: Mapping[str, pl.DataFrame], *, model: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what PyTorch would have returned, as plain containers.

    Parameters
    ----------
    frames : mapping of str to DataFrame
        Every table of :mod:`nsan.torch_alloc.tables` by name.
    model : mapping, optional
        As in :func:`write_snapshot`.
    """
    stacks = _stacks(frames["stacks"])
    settings = frames["allocator_settings"]
    snapshot: dict[str, Any] = {
        "segments": _segments(frames["segments"], frames["blocks"], stacks),
        "device_traces": _traces(frames["allocator_events"], frames["segments"], stacks),
    }
    if not settings.is_empty():
        snapshot["allocator_settings"] = _settings(settings.filter(pl.col("is_recorded")))
    snapshot["external_annotations"] = [
        _without_nulls({"name": name, "stage": stage, "device": device, "time_us": time})
        for device, time, name, stage in frames["annotations"].iter_rows()
    ]
    if model is not None:
        version = settings.filter(pl.col("name") == "torch_version")["value"].to_list()
        snapshot["nsan_model"] = {"torch_version": (version or [_VERSION])[0], **model}
    return snapshot


def _without_nulls(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if value is not None}


def _stacks(stacks: pl.DataFrame) -> Frames:
    """Return the frames of each stack; equal frames are one object, which a pickle stores once."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    found: Frames = {None: []}
    for stack_id, _, *frame in stacks.sort("stack_id", "depth").iter_rows():
        key = tuple(frame)
        if key not in known:
            named = dict(zip(("name", "filename", "line"), frame, strict=True))
            known[key] = _without_nulls(named)
        found.setdefault(stack_id, []).append(known[key])
    return found


def _pool(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else tuple(map(int, text.split(",")))


def _segments(segments: pl.DataFrame, blocks: pl.DataFrame, stacks: Frames) -> Rows:
    by_segment: dict[int, Rows] = {}
    columns = ("segment_id", "va", "bytes", "requested_bytes", "state", "stack_id")
    for segment_id, va, n_bytes, requested, state, stack_id in blocks.select(columns).iter_rows():
        block = {
            "address": va,
            "size": n_bytes,
            "requested_size": requested,
            "state": state,
            "frames": stacks.get(stack_id, []),
        }
        by_segment.setdefault(segment_id, []).append(_without_nulls(block))
    return [
        _without_nulls(
            {
                "device": row["device_id"],
                "address": row["va"],
                "total_size": row["bytes"],
                "allocated_size": row["allocated_bytes"],
                "active_size": row["active_bytes"],
                "requested_size": row["requested_bytes"],
                "stream": row["stream"],
                "segment_type": row["size_class"],
                "segment_pool_id": _pool(row["pool"]),
                "is_expandable": row["is_expandable"],
                "frames": stacks.get(row["stack_id"], []),
                "blocks": by_segment.get(row["segment_id"], []),
            }
        )
        for row in segments.iter_rows(named=True)
    ]


def _traces(events: pl.DataFrame, segments: pl.DataFrame, stacks: Frames) -> list[Rows]:
    ids = [*events["device_id"].unique(), *segments["device_id"].unique()]
    traces: list[Rows] = [[] for _ in range(max(ids, default=0) + 1)]
    pools = {text: _pool(text) for text in events["pool"].unique()}
    for row in events.sort("device_id", "sequence").iter_rows(named=True):
        is_oom = row["action"] == "oom"
        entry = {
            "action": row["action"],
            ("device_free" if is_oom else "addr"): row["device_free_bytes" if is_oom else "va"],
            "size": row["bytes"],
            "stream": row["stream"],
            "time_us": row["time_us"],
            "compile_context": row["compile_context"] or _NO_CONTEXT,
            "frames": stacks.get(row["stack_id"], []),
            "pool_id": pools[row["pool"]],
        }
        traces[row["device_id"]].append(_without_nulls(entry))
    return traces


def _settings(settings: pl.DataFrame) -> dict[str, Any]:
    """Return settings as nested dicts, flags and numbers as such."""
    found: dict[str, Any] = {}
    for name, text in settings.select("name", "value").iter_rows():
        *outer, last = name.split(".")
        inner = found
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = _value(text)
    return found


def _value(text: str | None) -> str | int | float | bool | None:
    """Return the flag or number that is written so, else the text."""
    if text is None or text in _FLAGS:
        return None if text is None else _FLAGS[text]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            if str(kind(text)) == text:
                return kind(text)
    return text


def _write(path: Path, snapshot: dict[str, Any]) -> None:
    """Write beside, and rename into place."""
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            try:
                pickle.dump(snapshot, file, protocol=_PROTOCOL)
                file.close()
                Path(file.name).chmod(0o666 & ~_umask())
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise OutputWriteError(path, error.strerror or str(error)) from error


def _umask() -> int:
    """Return the user's mask for new files, which a temporary file does not follow."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
