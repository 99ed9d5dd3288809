"""The Parquet store: one folder per table, parts sorted by start, a manifest beside them.

A store is built in a folder beside its place and moved there by one rename, so that at any moment
the place holds the old store, the new one, or none; never half of one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import polars as pl

import nsan
from nsan.errors import (
    NotAStoreError,
    OutputExistsError,
    PlaceTakenError,
    StoreWriteError,
    UsageError,
)
from nsan.info import TraceInfo
from nsan.io.manifest import MANIFEST, STORE_FORMAT, Fingerprint, is_store, read_manifest
from nsan.io.tidy import put_in_place
from nsan.schema import TABLES
from nsan.trace import Trace

ROWS_PER_PART: Final = 1 << 19
_BUILDING: Final = "importing"
_BY_START: Final = frozenset(
    name for name, table in TABLES.items() if {"start_ns", "pid"} <= table.schema.keys()
) - {"nvtx_ranges", "nvtx_marks"}
"""Event tables, which are sorted by start. Context tables come in their order."""

_SAMPLES_PER_BUCKET: Final = 1_000
_PARTS_AT_ONCE: Final = 4
"""Parts that are put into buckets at a time: fewer and larger files."""

_TIE_BREAKS: Final = ("sequence", "end_ns", "device_id", "pid", "va", "bytes", "correlation_id")
"""What orders rows that start together: their own order where the source has one, else their values,
so that the order of an export's rows never shows."""


@dataclass
class _Part:
    file: Path
    n_rows: int
    first: int | None
    last: int | None


@dataclass
class StoreWriter:
    """Collects the rows of a trace into a new store; see :func:`building`.

    Attributes
    ----------
    folder : Path
        The folder under construction.
    rows_per_part : int
        Most rows of one part.
    token : str
        Part of every file name; drawn at random.
    """

    folder: Path
    rows_per_part: int = ROWS_PER_PART
    token: str = field(default_factory=lambda: secrets.token_hex(4))
    _parts: dict[str, dict[int, _Part]] = field(default_factory=dict)

    def add(self, table: str, number: int, frame: pl.DataFrame) -> None:
        """Write rows of a table as the part of a number, sorted; threads may call it side by side."""
        if frame.is_empty():
            return
        if table in _BY_START:
            frame = _sorted(frame)
        part = self._write(table, f"raw-{number:07}.parquet", frame)
        self._parts.setdefault(table, {})[number] = part

    def _write(self, table: str, name: str, frame: pl.DataFrame) -> _Part:
        target = self.folder / table / name
        target.parent.mkdir(exist_ok=True)
        frame.write_parquet(target, compression="lz4", statistics=True)
        if table not in _BY_START:
            return _Part(target, frame.height, None, None)
        starts = frame["start_ns"]
        # Rows without a start are last; their part must come last too.
        last = None if starts.null_count() else starts.max()
        return _Part(target, frame.height, starts.min(), last)  # type: ignore[arg-type]

    def finish_tables(self) -> dict[str, dict[str, Any]]:
        """Put the parts of each table in order; return their description for the manifest."""
        described = {}
        for table in TABLES:
            parts = [part for _, part in sorted(self._parts.get(table, {}).items())]
            if table in _BY_START and not _ascending(parts):
                parts = self._sort_again(table, parts)
            files = []
            for number, part in enumerate(parts):
                # A name of its own: a trace that is still open must not read a later store's rows.
                name = f"{number:05}-{self.token}.parquet"
                file = part.file.rename(part.file.with_name(name))
                files.append({"name": file.name, "bytes": file.stat().st_size})
            described[table] = {"n_rows": sum(part.n_rows for part in parts), "parts": files}
        return described

    def _sort_again(self, table: str, parts: list[_Part]) -> list[_Part]:
        """Sort a table whose rows came in any order: into buckets of starts, each read once, then each bucket."""
        edges = pl.Series(_cuts(parts, self.rows_per_part), dtype=pl.Int64)
        scratch = self.folder / table / "buckets"
        scratch.mkdir()
        in_bucket: dict[int, list[Path]] = {}
        for number, some in enumerate(_few(parts, _PARTS_AT_ONCE * self.rows_per_part)):
            rows = pl.concat(pl.read_parquet(part.file) for part in some)
            rows = rows.sort("start_ns", nulls_last=True, maintain_order=True)
            # In order, so that the share of a bucket is a slice; rows without a start are the last.
            places = rows["start_ns"].drop_nulls().search_sorted(edges, side="left").to_list()
            for bucket, (low, high) in enumerate(pairwise([0, *places, rows.height])):
                if low < high:
                    file = scratch / f"{bucket:05}-{number:05}.parquet"
                    rows.slice(low, high - low).write_parquet(file, compression="lz4")
                    in_bucket.setdefault(bucket, []).append(file)
            for part in some:
                part.file.unlink()
        done = []
        for bucket, files in sorted(in_bucket.items()):
            frame = _sorted(pl.concat(pl.read_parquet(file) for file in files))
            done.append(self._write(table, f"sorted-{bucket:05}.parquet", frame))
            for file in files:
                file.unlink()
        scratch.rmdir()
        return done

    def trace(self, info: TraceInfo, tables: dict[str, dict[str, Any]]) -> Trace:
        """Open what has been written so far."""
        return _trace(self.folder, info, tables)

    def write_manifest(
        self,
        source: Fingerprint,
        info: TraceInfo,
        tables: dict[str, dict[str, Any]],
        totals: dict[str, Any],
    ) -> None:
        """Write the manifest; the store is whole with it."""
        manifest = {
            "store_format": STORE_FORMAT,
            "nsan_version": nsan.__version__,
            "source": asdict(source),
            "info": info.to_dict(),
            "tables": tables,
            "totals": totals,
        }
        text = json.dumps(manifest, indent=1, allow_nan=False)
        (self.folder / MANIFEST).write_text(text, encoding="utf-8")


def _sorted(frame: pl.DataFrame) -> pl.DataFrame:
    # Most exports are in order already, and a check is cheaper than a sort.
    starts = frame["start_ns"]
    if not starts.null_count() and starts.is_sorted() and starts.n_unique() == frame.height:
        return frame
    keys = ["start_ns", *(key for key in _TIE_BREAKS if key in frame.columns)]
    return frame.sort(keys, nulls_last=True, maintain_order=True)


def _few(parts: list[_Part], rows: int) -> Iterator[list[_Part]]:
    """Take parts together that hold about so many rows."""
    some: list[_Part] = []
    for part in parts:
        if some and sum(each.n_rows for each in some) + part.n_rows > rows:
            yield some
            some = []
        some.append(part)
    if some:
        yield some


def _cuts(parts: list[_Part], rows_per_part: int) -> list[int]:
    """Choose starts that cut a table into buckets of about so many rows."""
    n_rows = sum(part.n_rows for part in parts)
    n_buckets = max(1, -(-n_rows // rows_per_part))
    step = max(1, n_rows // (_SAMPLES_PER_BUCKET * n_buckets))
    starts = (pl.read_parquet(part.file, columns=["start_ns"])["start_ns"] for part in parts)
    sample = pl.concat(each.drop_nulls().gather_every(step) for each in starts).sort()
    if sample.is_empty():
        return []
    at = range(len(sample) // n_buckets, len(sample), max(1, len(sample) // n_buckets))
    return sorted({sample[i] for i in at} - {sample[0]})


def _ascending(parts: list[_Part]) -> bool:
    if len(parts) <= 1:
        return True
    if any(part.first is None or part.last is None for part in parts):
        return False
    return all(a.last < b.first for a, b in pairwise(parts))  # type: ignore[operator]


@contextlib.contextmanager
def building(place: Path) -> Iterator[StoreWriter]:
    """Build a store beside its place, and put it there when the block ends without an error.

    Parameters
    ----------
    place : Path
        Where the store is to be; what is there now stays until the new one is whole.

    Yields
    ------
    StoreWriter
        Takes the rows.

    Raises
    ------
    StoreWriteError
        If the folder cannot be written: no permission, no space. Nothing is left behind.
    """
    _check_name(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with put_in_place(place, _BUILDING) as folder:
            yield StoreWriter(folder)
    except (OSError, pl.exceptions.ComputeError) as error:
        if isinstance(error, OSError) or _is_full(error):
            raise StoreWriteError(place.parent, _reason(error)) from error
        raise


def _check_name(place: Path) -> None:
    try:
        os.fspath(place).encode()
    except UnicodeEncodeError as error:
        msg = f"The place of a store must be named in UTF-8, and {place!r} is not."
        raise UsageError(msg) from error


def _is_full(error: Exception) -> bool:
    return os.strerror(errno.ENOSPC).lower() in str(error).lower()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return os.strerror(errno.ENOSPC) if _is_full(error) else str(error).splitlines()[0]


def check_place(place: Path, *, overwrite: bool) -> None:
    """Refuse to put a store over something else.

    Raises
    ------
    OutputExistsError
        If the place holds a store, and ``overwrite`` is not given.
    PlaceTakenError
        If the place is a file, or a folder that is not a store.
    """
    if is_store(place):
        if not overwrite:
            raise OutputExistsError(place, "holds a store of another source")
    elif place.is_dir():
        if any(place.iterdir()):
            raise PlaceTakenError(place, "is a folder with other files, not a store")
    elif place.exists():
        raise PlaceTakenError(place, "is a file, and a store is a folder")


def open_store(folder: Path, manifest: dict[str, Any] | None = None) -> Trace:
    """Open a store; its frames scan the files and hold nothing in memory.

    Raises
    ------
    NotAStoreError, BrokenStoreError
        If the folder is no store, or not a whole one of this version.
    """
    if not is_store(folder):
        raise NotAStoreError(folder)
    manifest = manifest or read_manifest(folder)
    info = TraceInfo.from_dict(manifest["info"])
    return _trace(folder, info, manifest["tables"], manifest["totals"])


def _trace(
    folder: Path,
    info: TraceInfo,
    tables: dict[str, dict[str, Any]],
    totals: dict[str, Any] | None = None,
) -> Trace:
    frames: dict[str, Any] = {}
    for name, table in TABLES.items():
        files = [folder / name / part["name"] for part in tables[name]["parts"]]
        frame = pl.scan_parquet(files, glob=False) if files else table.empty()
        if name in _BY_START and files:
            frame = frame.set_sorted("start_ns", nulls_last=True)
        frames[name] = table.validate(frame)
    return Trace(**frames, info=info, capture_totals=totals)
