"""The folded address space: used 2 MiB blocks side by side, with what nobody uses left out.

Managed memory lies in a few runs of an address space of 128 TiB. A *place* is a byte in the runs
put together, by process and address: Int64, so that it can be drawn and computed with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import polars as pl

from nsan.analysis.views.compact import filled
from nsan.analysis.views.tables import RUNS
from nsan.uvm.constants import VA_BLOCK_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_SHIFT: Final = VA_BLOCK_BYTES.bit_length() - 1

NO_PLACE: Final = -1
"""Place of what has no address, or one that no run holds."""

MOST_RANGE_BYTES: Final = 1 << 44
"""A range longer than 16 TiB is damaged: only so much of it gets a place."""

_MOST_TABLE: Final = 1 << 22
"""Blocks between the first and the last run of a process up to which a look-up table is made."""

AT_ONCE: Final = 1 << 17
"""Rows at once, so that what is computed of them stays in the cache."""


@dataclass(frozen=True, eq=False)
class Addresses:
    """The runs of used blocks of all processes, put together.

    Attributes
    ----------
    runs : DataFrame, ``RUNS``
        One row per run between gaps, by process and address; their places follow each other.
    """

    runs: pl.DataFrame
    _finders: dict[int | None, _Finder] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Length of the folded space, byte."""
        return int(self.runs["place_end"][-1]) if self.runs.height else 0

    @classmethod
    def build(cls, ranges: Iterable[pl.DataFrame], names: pl.DataFrame | None = None) -> Addresses:
        """Fold the gaps between ranges.

        Parameters
        ----------
        ranges : iterable of DataFrame
            Each reads ``pid``, ``va`` (UInt64, byte address) and, if there, ``bytes`` (Int64, byte;
            else a row is one byte). Rows without an address use nothing; of unknown size, one byte.
        names : DataFrame, optional
            Allocations: ``pid``, ``va``, ``bytes``, ``name``.

        Returns
        -------
        Addresses
            Runs of the 2 MiB blocks that any of the ranges touches.
        """
        blocks = [_blocks(frame) for frame in ranges]
        empty = pl.DataFrame(schema={"pid": pl.UInt32, "first": pl.Int64, "last": pl.Int64})
        runs = _runs(pl.concat([empty, *blocks]))
        found = cls(runs)
        return found if names is None else cls(_named(found, names))

    def place(self, frame: pl.DataFrame, va: str = "va", pid: str = "pid") -> pl.DataFrame:
        """Say where addresses lie in the folded space.

        Parameters
        ----------
        frame : DataFrame
            Any rows.
        va, pid : str
            Names of the columns of the address (UInt64) and of its process.

        Returns
        -------
        DataFrame
            The rows with ``place`` (Int64, byte): null where no run of the process holds the address.
        """
        addressed = frame[va].fill_null(0).to_numpy()
        places = np.full(frame.height, NO_PLACE, np.int64)
        for rows, each in by_process(frame[pid].cast(pl.UInt32)):
            places[rows] = self.places(each, addressed[rows])
        column = pl.Series("place", places)
        return frame.with_columns(column.set((column == NO_PLACE) | frame[va].is_null(), None))

    def places(self, pid: int | None, va: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Say where the addresses of one process lie; :data:`NO_PLACE` where no run holds one.

        Parameters
        ----------
        pid : int or None
            The process.
        va : array of UInt64
            Addresses, byte.

        Returns
        -------
        array of Int64
            Places, byte.
        """
        found = np.full(len(va), NO_PLACE, np.int64)
        if pid not in self._finders:
            self._finders[pid] = _Finder.of(
                self.runs.filter(pl.col("pid").eq_missing(pl.lit(pid, pl.UInt32)))
            )
        finder = self._finders[pid]
        for low in range(0, len(va) if finder.n_runs else 0, AT_ONCE):
            rows = slice(low, low + AT_ONCE)
            base = finder.bases((va[rows] >> np.uint64(BLOCK_SHIFT)).view(np.int64))
            inside = (va[rows] & np.uint64(VA_BLOCK_BYTES - 1)).view(np.int64)
            # The sign of a base that is not there outlasts the offset in a block.
            found[rows] = np.where(base < 0, NO_PLACE, base + inside)
        return found

    def va_at(self, place: int) -> tuple[int | None, int] | None:
        """Say which address lies at a place.

        Parameters
        ----------
        place : int
            Byte of the folded space.

        Returns
        -------
        (pid, va), or None
            None outside the folded space; the process is None where the capture has none.
        """
        if not 0 <= place < self.total_bytes:
            return None
        run = self.runs.row(
            int(self.runs["place_end"].search_sorted(place, side="right")), named=True
        )
        return run["pid"], run["va_start"] + place - run["place_start"]


@dataclass(frozen=True, eq=False)
class _Finder:
    """The runs of one process, made ready for looking blocks up."""

    first: NDArray[np.int64]
    count: NDArray[np.int64]
    start: NDArray[np.int64]
    table: NDArray[np.int64] | None
    """Place of each block from the first one on, where these are not too many."""

    @property
    def n_runs(self) -> int:
        return len(self.first)

    @classmethod
    def of(cls, runs: pl.DataFrame) -> _Finder:
        first = (runs["va_start"].to_numpy() >> np.uint64(BLOCK_SHIFT)).view(np.int64)
        count, start = runs["n_blocks"].to_numpy(), runs["place_start"].to_numpy()
        if not len(first) or (span := int(first[-1] + count[-1] - first[0])) > _MOST_TABLE:
            return cls(first, count, start, None)
        # The last entry is for all that lies outside the table.
        table = np.full(span + 1, -1, np.int64)
        block = np.arange(int(count.sum()))
        run = np.repeat(np.arange(len(first)), count)
        table[block - (np.cumsum(count) - count)[run] + (first - first[0])[run]] = (
            block + int(start[0] >> BLOCK_SHIFT)
        ) << BLOCK_SHIFT
        return cls(first, count, start, table)

    def bases(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find the place at which each block begins, below zero outside the runs."""
        if self.table is None:
            run = np.maximum(np.searchsorted(self.first, blocks, side="right") - 1, 0)
            offset = blocks - self.first[run]
            held = (offset >= 0) & (offset < self.count[run])
            return np.where(held, self.start[run] + (offset << BLOCK_SHIFT), -1)
        at = np.minimum((blocks - self.first[0]).view(np.uint64), np.uint64(len(self.table) - 1))
        return np.asarray(self.table.take(at.view(np.int64)))


def by_process(pid: pl.Series) -> Iterable[tuple[Any, int | None]]:
    """List the processes with their rows: all rows as a slice where there is one.

    Parameters
    ----------
    pid : Series of UInt32
        Process of each row.

    Returns
    -------
    iterable of (slice or mask, int or None)
        Each row is in one.
    """
    if is_one_value(pid):
        return [(slice(None), pid[0])] if pid.len() else []
    return [
        (pid.eq_missing(pl.Series([each], dtype=pid.dtype)).to_numpy(), each)
        for each in pid.unique().to_list()
    ]


def is_one_value(column: pl.Series) -> bool:
    """Say whether all values of a column are the same, null being a value; true without a row."""
    if column.null_count():
        return column.null_count() == column.len()
    return bool(column.min() == column.max())


def _blocks(frame: pl.DataFrame) -> pl.DataFrame:
    """List spans of blocks that ranges touch."""
    if frame["va"].null_count():
        frame = frame.filter(pl.col("va").is_not_null())
    nothing = pl.DataFrame(schema={"pid": pl.UInt32, "first": pl.Int64, "last": pl.Int64})
    parts = [nothing]
    for rows, pid in by_process(frame["pid"].cast(pl.UInt32)):
        first, last = _distinct(frame if isinstance(rows, slice) else frame.filter(rows))
        spans = pl.DataFrame({"first": first, "last": last})
        parts.append(spans.select(pl.lit(pid, pl.UInt32).alias("pid"), "first", "last"))
    return pl.concat(parts)


def _distinct(frame: pl.DataFrame) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """List the blocks in which ranges of one process begin, and spans that reach over several."""
    low, high = (int(side) >> BLOCK_SHIFT for side in _extremes(frame["va"]))
    if high - low > _MOST_TABLE:
        first, last = _spans(frame)
        found = pl.DataFrame({"first": first, "last": last}).unique()
        return found["first"].to_numpy(), found["last"].to_numpy()
    used = np.zeros(high - low + 1, bool)
    long = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for piece in frame.iter_slices(AT_ONCE):
        first, last = _spans(piece)
        used[first - low] = True
        if last is not first:
            over = np.flatnonzero(last != first)
            long.append((first[over], last[over]))
    alone = np.flatnonzero(used) + low
    first, last = (np.concatenate(side) for side in zip(*long, strict=True))
    return np.concatenate([alone, first]), np.concatenate([alone, last])


def _extremes(column: pl.Series) -> tuple[Any, Any]:
    return column.min(), column.max()


def _spans(frame: pl.DataFrame) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give the first and the last block of each range."""
    va = frame["va"].to_numpy()
    first = (va >> np.uint64(BLOCK_SHIFT)).view(np.int64)
    if "bytes" not in frame.columns:
        return first, first
    # A method of a series costs more than the rows of a slice: numpy does it.
    size = np.clip(filled(frame["bytes"], np.int64, 1), 1, MOST_RANGE_BYTES)
    # An address near the end of the address space has no room behind it.
    room = np.minimum((size - 1).view(np.uint64), ~va)
    return first, ((va + room) >> np.uint64(BLOCK_SHIFT)).view(np.int64)


def _runs(spans: pl.DataFrame) -> pl.DataFrame:
    """Put spans of blocks that touch together, and the runs one behind the other."""
    reach = pl.col("last").cum_max().shift(1).over("pid")
    length = pl.col("n_blocks") * VA_BLOCK_BYTES
    return (
        spans.sort("pid", "first", "last", nulls_last=True)
        .with_columns(
            run=(pl.col("first") > reach + 1).fill_null(value=False).cum_sum().over("pid")
        )
        .group_by("pid", "run", maintain_order=True)
        .agg(pl.col("first").min(), n_blocks=pl.col("last").max() - pl.col("first").min() + 1)
        .with_columns(place_end=length.cum_sum())
        .select(
            place_start=pl.col("place_end") - length,
            place_end="place_end",
            pid="pid",
            va_start=pl.col("first").cast(pl.UInt64) * VA_BLOCK_BYTES,
            n_blocks="n_blocks",
            name=pl.lit(None, pl.String),
        )
        .select(pl.col(name).cast(dtype) for name, dtype in RUNS.schema.items())
    )


def _named(addresses: Addresses, names: pl.DataFrame) -> pl.DataFrame:
    """Give a run the name of the one named allocation that begins in it."""
    runs = addresses.runs
    known = addresses.place(names.filter(pl.col("name").is_not_null()))
    known = known.filter(pl.col("place").is_not_null())
    at = runs["place_end"].search_sorted(known["place"], side="right")
    only = (
        pl.DataFrame({"run": at.cast(pl.UInt32), "name": known["name"]})
        .group_by("run")
        .agg(n=pl.col("name").n_unique(), name=pl.col("name").first())
        .filter(pl.col("n") == 1)
        .select("run", "name")
    )
    return (
        runs.drop("name")
        .with_row_index("run")
        .join(only, on="run", how="left", maintain_order="left")
        .select(RUNS.schema.names())
    )
