"""Columns of a snapshot to the frames of :mod:`nsan.torch_alloc.tables`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from nsan.io.torch_snapshot.about import describe
from nsan.io.torch_snapshot.reader import RawSnapshot, read_raw
from nsan.io.torch_snapshot.versions import RAW, versions_of
from nsan.snapshot import Snapshot
from nsan.torch_alloc import tables
from nsan.torch_alloc.constants import DEFAULT_POOL

Ints = npt.NDArray[Any]

_VERSION: Final = "torch_version"
_ALLOCATOR: Final = "allocator"
_INFERRED: Final = (_VERSION, _ALLOCATOR)
"""No version of PyTorch writes these."""

_PLAIN: Final = "plain"


def read_snapshot(path: Path, *, keep_paths: bool = False) -> Snapshot:
    """Read a memory snapshot of PyTorch.

    Parameters
    ----------
    path : Path
        The pickle, plain or gzipped; opened for reading only.
    keep_paths : bool, default False
        Keep the paths of source files whole; else folders are cut off that are not those of a library.

    Returns
    -------
    Snapshot
        Typed lazy frames, in memory, and what is known about the file.

    Raises
    ------
    NsanError
        If it is no snapshot, is damaged, or is more than plain data.
    """
    return snapshot_of(read_raw(path, keep_paths=keep_paths), path)


def snapshot_of(raw: RawSnapshot, path: Path) -> Snapshot:
    """Turn what the child read into frames.

    Parameters
    ----------
    raw : RawSnapshot
        Its answer.
    path : Path
        The file; only its name is kept.
    """
    segments, place = _segments(raw)
    blocks = _blocks(raw, segments, place)
    events = _events(raw)
    versions = versions_of(raw.facts, n_segments=segments.height, n_entries=events.height)
    settings = _settings(raw, versions.lowest)
    return Snapshot(
        segments=tables.SEGMENTS.validate(segments.lazy()),
        blocks=tables.BLOCKS.validate(blocks.lazy()),
        allocator_events=tables.ALLOCATOR_EVENTS.validate(events.lazy()),
        stacks=tables.STACKS.validate(_stacks(raw).lazy()),
        allocator_settings=tables.ALLOCATOR_SETTINGS.validate(settings.lazy()),
        annotations=tables.ANNOTATIONS.validate(_annotations(raw).lazy()),
        info=describe(raw, path, versions, segments, blocks, events),
    )


def _numbers(raw: RawSnapshot, name: str) -> pl.Series:
    values = pl.Series(name.partition(".")[2], raw.values(name))
    empty = raw.empty_at(name)
    return values.scatter(np.flatnonzero(empty), None) if empty.any() else values


def _stack_ids(raw: RawSnapshot, name: str) -> pl.Series:
    ids = raw.values(name)
    return pl.Series("stack_id", ids).scatter(np.flatnonzero(ids < 0), None)


def _texts(raw: RawSnapshot, index: Ints) -> pl.Series:
    """Return texts by number; a number below 0 has none."""
    table = pl.Series([*raw.texts, None], dtype=pl.String)
    return table.gather(np.where(index < 0, len(raw.texts), index))


def _labels(dtype: pl.Enum, codes: Ints) -> pl.Series:
    """Return labels by number; the number behind the last label is a null."""
    return pl.Series([*dtype.categories, None], dtype=dtype).gather(codes)


def _segments(raw: RawSnapshot) -> tuple[pl.DataFrame, Ints]:
    """Return the segments by device and address, and the row of each in that order."""
    pool = _texts(raw, raw.values("segments.pool"))
    if "segment_pool_id" not in raw.facts["keys_seen"]["segments"]:
        pool = pool.fill_null(DEFAULT_POOL)
    frame = pl.DataFrame(
        {
            "device_id": _numbers(raw, "segments.device_id").fill_null(0),
            "va": _numbers(raw, "segments.va"),
            "bytes": _numbers(raw, "segments.bytes"),
            "allocated_bytes": _numbers(raw, "segments.allocated_bytes"),
            "active_bytes": _numbers(raw, "segments.active_bytes"),
            "requested_bytes": _numbers(raw, "segments.requested_bytes"),
            "stream": _numbers(raw, "segments.stream"),
            "size_class": _labels(tables.POOL_SIZE, raw.values("segments.size_class")),
            "pool": pool,
            "is_expandable": pl.Series(raw.values("segments.is_expandable")).cast(pl.Boolean),
            "stack_id": _stack_ids(raw, "segments.stack_id"),
        }
    ).with_row_index("_row")
    frame = frame.sort("device_id", "va", maintain_order=True)
    place = np.empty(frame.height, np.int64)
    place[frame["_row"].to_numpy()] = np.arange(frame.height)
    ids = pl.Series("segment_id", np.arange(frame.height))
    return frame.drop("_row").insert_column(0, ids).select(tables.SEGMENTS.schema.names()), place


def _blocks(raw: RawSnapshot, segments: pl.DataFrame, place: Ints) -> pl.DataFrame:
    """Return the blocks in the order of their segments, then as the file has them."""
    per_segment = raw.values("blocks.per_segment")
    segment = np.repeat(place, per_segment)
    of_segment = segments[segment]
    n_bytes = raw.values("blocks.bytes")
    va, empty = raw.values("blocks.va"), raw.empty_at("blocks.va")
    if empty.any():
        # Torch 2.0 names no address: the blocks of a segment follow one another.
        summed = _behind_one_another(of_segment["va"].to_numpy(), n_bytes, per_segment)
        va = np.where(empty, summed, va)
    frame = pl.DataFrame(
        {
            "segment_id": segment,
            "device_id": of_segment["device_id"],
            "va": va,
            "bytes": n_bytes,
            "requested_bytes": _numbers(raw, "blocks.requested_bytes"),
            "state": _labels(tables.BLOCK_STATE, raw.values("blocks.state")),
            "stream": of_segment["stream"],
            "pool": of_segment["pool"],
            "stack_id": _stack_ids(raw, "blocks.stack_id"),
        }
    )
    return frame.sort("segment_id", maintain_order=True)


def _behind_one_another(segment_va: Ints, n_bytes: Ints, per_segment: Ints) -> Ints:
    before = np.cumsum(n_bytes.astype(np.uint64)) - n_bytes.astype(np.uint64)
    starts = np.concatenate([[0], np.cumsum(per_segment)[:-1]])[per_segment > 0]
    first = np.repeat(before[starts], per_segment[per_segment > 0])
    found: Ints = segment_va + before - first
    return found


def _ranks(lengths: Ints) -> Ints:
    """Count from 0 within each of some runs."""
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    ranks: Ints = np.arange(lengths.sum()) - starts
    return ranks


def _events(raw: RawSnapshot) -> pl.DataFrame:
    per_device = raw.values("trace.per_device")
    context = raw.values("trace.compile_context")
    return pl.DataFrame(
        {
            "device_id": np.repeat(np.arange(len(per_device)), per_device),
            "sequence": _ranks(per_device),
            "time_us": _numbers(raw, "trace.time_us"),
            "action": _labels(tables.ACTION, raw.values("trace.action")),
            "va": _numbers(raw, "trace.va"),
            "bytes": _numbers(raw, "trace.bytes"),
            "stream": _numbers(raw, "trace.stream"),
            "pool": _texts(raw, raw.values("trace.pool")),
            "device_free_bytes": _numbers(raw, "trace.device_free_bytes"),
            "compile_context": _texts(
                raw, np.where(context == raw.facts["no_context"], -1, context)
            ),
            "stack_id": _stack_ids(raw, "trace.stack_id"),
        }
    )


def _stacks(raw: RawSnapshot) -> pl.DataFrame:
    depths = raw.values("stacks.depth")
    frames = pl.DataFrame(
        {
            "function": _texts(raw, raw.values("frames.function")),
            "source_file": _texts(raw, raw.values("frames.source_file")),
            "source_line": _numbers(raw, "frames.source_line"),
        }
    )
    return pl.DataFrame(
        {"stack_id": np.repeat(np.arange(len(depths)), depths), "depth": _ranks(depths)}
    ).hstack(frames[raw.values("stacks.frame")])


def _annotations(raw: RawSnapshot) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "device_id": _numbers(raw, "annotations.device_id"),
            "time_us": _numbers(raw, "annotations.time_us"),
            "name": _texts(raw, raw.values("annotations.name")),
            "stage": _labels(tables.STAGE, raw.values("annotations.stage")),
        }
    )


def _settings(raw: RawSnapshot, torch_version: str) -> pl.DataFrame:
    rows = [
        (name, value, True)
        for name, value in raw.facts["settings"].items()
        if name not in _INFERRED
    ]
    if raw.facts["model"].get(_ALLOCATOR) == RAW:
        rows.append((_ALLOCATOR, _PLAIN, False))
    rows.append((_VERSION, torch_version, False))
    return pl.DataFrame(rows, schema=tables.ALLOCATOR_SETTINGS.schema, orient="row")
