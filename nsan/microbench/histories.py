"""What the caching allocator of a run did, as a memory snapshot that PyTorch's viewers and nsan open.

The programs of the microbenchmark write ``history.csv``, one entry a line as PyTorch has them, and
``blocks.csv``, the blocks that are left (``cuda/nsan/memory.hpp``). Their allocator follows PyTorch's rules to
2.11, so the snapshot has the keys that such a version writes; what a call stack says there, the name of the tensor
says here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import polars as pl

from nsan.errors import NsanError
from nsan.io.torch_snapshot import write_snapshot
from nsan.torch_alloc import tables as tab
from nsan.torch_alloc.constants import DEFAULT_POOL, N_DIVISIONS
from nsan.units import NS_PER_US

HISTORY: Final = "history.csv"
BLOCKS: Final = "blocks.csv"
RUN: Final = "run.json"

_HISTORY_COLUMNS: Final[dict[str, Any]] = {
    "sequence": pl.Int64,
    "time_ns": pl.Int64,
    "action": tab.ACTION,
    "va": pl.UInt64,
    "bytes": pl.Int64,
    "stream": pl.UInt64,
    "pool": pl.String,
    "tensor": pl.String,
}
_BLOCK_COLUMNS: Final[dict[str, Any]] = {
    "segment_va": pl.UInt64,
    "segment_bytes": pl.Int64,
    "size_class": tab.POOL_SIZE,
    "va": pl.UInt64,
    "bytes": pl.Int64,
    "requested_bytes": pl.Int64,
    "state": tab.BLOCK_STATE,
    "tensor": pl.String,
}
_MAY_BE_EMPTY: Final = ("tensor", "va")

_SETTINGS: Final = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": "-1",
    "garbage_collection_threshold": "0.0",
    "expandable_segments": "False",
    "graph_capture_record_stream_reuse": "False",
    **{f"roundup_power2_divisions.{1 << i}": "0" for i in range(N_DIVISIONS)},
}
"""PyTorch's defaults, which the programs follow, under the keys of 2.9."""


class HistoryError(NsanError):
    """What a run wrote of its allocator cannot be read; ``detail`` says why."""

    def __init__(self, path: Path, detail: str) -> None:
        self.path, self.detail = path, detail
        super().__init__(
            f"{path.name} of {path.parent.name} cannot be used: {detail}.\n"
            "Run again with `--allocator caching --out FOLDER`: a run without a cache has no history."
        )


def snapshot_of(truth: str | Path, path: str | Path, *, overwrite: bool = False) -> None:
    """Write the history of a run as a memory snapshot.

    Parameters
    ----------
    truth : str or Path
        Folder with the tables of the run: ``history.csv``, ``blocks.csv`` and ``run.json``.
    path : str or Path
        The pickle; it gets its name when all is written.
    overwrite : bool, default False
        Replace a file.

    Raises
    ------
    HistoryError
        If a table is missing or damaged.
    OutputExistsError, OutputWriteError
        If the file is there already, or cannot be written.
    """
    write_snapshot(path, snapshot_frames(Path(truth)), overwrite=overwrite)


def snapshot_frames(truth: Path) -> dict[str, pl.DataFrame]:
    """Give the tables of a snapshot of a run.

    Parameters
    ----------
    truth : Path
        As in :func:`snapshot_of`.

    Returns
    -------
    dict of str to DataFrame
        segments, blocks, allocator_events, stacks and allocator_settings, columns as in
        :mod:`nsan.torch_alloc.tables`. Times are of the wall clock of the machine. A stack has one frame: the
        tensor, without the step it is of (what follows ``#``), in the program.
    """
    about = _about(truth / RUN)
    history = _read(truth / HISTORY, _HISTORY_COLUMNS)
    blocks = _read(truth / BLOCKS, _BLOCK_COLUMNS)
    if not history.filter(pl.col("va").is_null() & (pl.col("action") != "oom")).is_empty():
        raise HistoryError(truth / HISTORY, "an entry lacks its address")
    if blocks["va"].null_count():
        raise HistoryError(truth / BLOCKS, "a block lacks its address")
    named = pl.concat([history["tensor"], blocks["tensor"]])
    stacks = _stacks(named, about["source"])
    return {
        "segments": _segments(blocks, about["device_id"]),
        "blocks": _blocks(blocks, about["device_id"], stacks),
        "allocator_events": _events(history, about, stacks),
        "stacks": stacks,
        "allocator_settings": pl.DataFrame(
            [(name, value, True) for name, value in _SETTINGS.items()],
            schema=tab.ALLOCATOR_SETTINGS.schema,
            orient="row",
        ),
    }


def _about(path: Path) -> dict[str, Any]:
    """Read when the run began, on which GPU, and what it was."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HistoryError(path, error.strerror or str(error)) from error
    except ValueError as error:
        raise HistoryError(path, f"it is no JSON ({error})") from error
    start = run.get("start_utc_ns") if isinstance(run, dict) else None
    if type(start) is not int:
        raise HistoryError(path, "it does not say when the run began (start_utc_ns)")
    device = run.get("device")
    ordinal = device.get("ordinal", 0) if isinstance(device, dict) else 0
    network = run.get("network")
    program = str(run.get("program", "microbench"))
    return {
        "start_utc_ns": start,
        "device_id": ordinal if type(ordinal) is int and 0 <= ordinal < 128 else 0,
        "source": f"<{program} {network}>" if isinstance(network, str) else f"<{program}>",
    }


def _read(path: Path, columns: dict[str, Any]) -> pl.DataFrame:
    """Read a table, and refuse one that is not whole."""
    try:
        frame = pl.read_csv(path.read_bytes(), schema_overrides=columns)
    except OSError as error:
        raise HistoryError(path, error.strerror or str(error)) from error
    except pl.exceptions.PolarsError as error:
        raise HistoryError(path, f"it is damaged ({str(error).splitlines()[0]})") from error
    if frame.columns != list(columns):
        raise HistoryError(path, f"its columns are not {', '.join(columns)}")
    cells = frame.drop(_MAY_BE_EMPTY)
    gaps = [name for name, n in zip(cells.columns, cells.null_count().row(0), strict=True) if n]
    if gaps:
        raise HistoryError(path, f"it is cut short, or has no value everywhere in {gaps[0]}")
    return frame


def _stacks(named: pl.Series, source: str) -> pl.DataFrame:
    names = _tensor(named).drop_nulls().unique(maintain_order=True)
    ids = range(len(names))
    return pl.DataFrame(
        [(i, 0, name, source, 0) for i, name in zip(ids, names, strict=True)],
        schema=tab.STACKS.schema,
        orient="row",
    )


def _tensor(named: pl.Series) -> pl.Series:
    """Cut the step off the names of tensors."""
    return named.str.splitn("#", 2).struct.field("field_0").alias("function")


def _with_stacks(frame: pl.DataFrame, stacks: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(_tensor(frame["tensor"])).join(
        stacks.select("function", "stack_id"),
        on="function",
        how="left",
        maintain_order="left",
    )


def _events(history: pl.DataFrame, about: dict[str, Any], stacks: pl.DataFrame) -> pl.DataFrame:
    rows = _with_stacks(history, stacks).with_columns(
        device_id=pl.lit(about["device_id"], pl.Int64),
        time_us=(about["start_utc_ns"] + pl.col("time_ns")) // NS_PER_US,
        # Versions with these rules (to 2.11) do not name the pool of an entry.
        pool=pl.lit(None, pl.String),
    )
    return _fitted(rows, tab.ALLOCATOR_EVENTS)


def _segments(blocks: pl.DataFrame, device_id: int) -> pl.DataFrame:
    held = pl.col("state") == "active_allocated"
    in_use = pl.col("bytes").filter(held).sum()
    rows = (
        blocks.group_by("segment_va", "segment_bytes", "size_class")
        .agg(
            allocated_bytes=in_use,
            active_bytes=in_use,
            requested_bytes=pl.col("requested_bytes").filter(held).sum(),
        )
        .sort("segment_va")
        .with_row_index("segment_id")
        .rename({"segment_va": "va", "segment_bytes": "bytes"})
    )
    return _fitted(_placed(rows, device_id).with_columns(is_expandable=False), tab.SEGMENTS)


def _blocks(blocks: pl.DataFrame, device_id: int, stacks: pl.DataFrame) -> pl.DataFrame:
    rows = _with_stacks(blocks, stacks).with_columns(
        segment_id=pl.col("segment_va").rank("dense").cast(pl.Int64) - 1
    )
    return _fitted(_placed(rows, device_id), tab.BLOCKS).sort("segment_id", "va")


def _placed(rows: pl.DataFrame, device_id: int) -> pl.DataFrame:
    return rows.with_columns(
        device_id=pl.lit(device_id, pl.Int64),
        stream=pl.lit(0, pl.UInt64),
        pool=pl.lit(DEFAULT_POOL),
    )


def _fitted(rows: pl.DataFrame, table: Any) -> pl.DataFrame:
    """Give a frame the columns of its table; those that it lacks are null."""
    return rows.select(
        (pl.col(name) if name in rows.columns else pl.lit(None)).cast(kind).alias(name)
        for name, kind in table.schema.items()
    )
