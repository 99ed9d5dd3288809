"""The events of a trace that have a place in memory, in compact columns: about 22 byte a row.

Each table keeps its own columns, sorted by start, so that nothing has to be merged before the first
picture, and what a colouring does not speak of is not read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import polars as pl

from nsan.analysis.views.addresses import Addresses
from nsan.analysis.views.columns import (
    kind_codes,
    number_layers,
    number_owners,
    placed,
    with_access,
)
from nsan.analysis.views.compact import Compact, filled
from nsan.analysis.views.copy_access import copy_access
from nsan.analysis.views.keeping import in_places, in_windows, int64, with_numbers
from nsan.analysis.views.tables import EVENT_TABLES, RECORDED
from nsan.schema import TABLES
from nsan.uvm.constants import PAGE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_READS: Final = {
    "migrations": ("start_ns", "end_ns", "pid", "device_id", "va", "bytes", "direction", "cause"),
    "gpu_faults": ("start_ns", "end_ns", "pid", "device_id", "va", "n_page_faults", "access"),
    "cpu_faults": ("start_ns", "pid", "va"),
}
_ALLOCATION_READS: Final = ("pid", "va", "bytes", "kind", "name")
_MANAGED: Final = ("managed", "managed_static")


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of one table, sorted by start.

    Attributes
    ----------
    table : str
        Table of the trace.
    start : array of Int64
        Start, ns.
    duration : Compact
        End minus start, ns.
    place : array of UInt32 or Int64
        First byte in the folded space, in steps of ``1 << shift`` byte; ``no_place`` where there is
        none.
    amount : Compact
        Byte of a migration, recorded count of a GPU fault row.
    layer, owner : array of UInt8 or UInt16
        Numbers of ``LAYERS`` and ``OWNERS``.
    shift : int
        Places are in steps of ``1 << shift`` byte: pages where every address begins one.
    """

    table: str
    start: NDArray[np.int64]
    duration: Compact
    place: NDArray[Any]
    amount: Compact
    layer: NDArray[np.uint8]
    owner: NDArray[Any]
    shift: int

    @property
    def n_rows(self) -> int:
        """Rows."""
        return len(self.start)

    @property
    def no_place(self) -> int:
        """The value of ``place`` of a row that has none: above every place."""
        return int(np.iinfo(self.place.dtype).max)

    @property
    def n_bytes(self) -> int:
        """Memory of the columns, byte."""
        columns = (self.start, self.place, self.layer, self.owner)
        held = sum(column.nbytes for column in columns if column.strides[0])
        return held + self.duration.n_bytes + self.amount.n_bytes

    @cached_property
    def longest(self) -> int:
        """Bytes of its longest row in the folded space: a fault reaches to the end of its page."""
        return max(1, self.amount.highest) if self.table == "migrations" else PAGE_BYTES

    def ends(self, rows: NDArray[Any] | slice) -> NDArray[np.int64]:
        """Give the byte of the folded space behind each of some rows that have a place."""
        start = self.place[rows].astype(np.int64) << self.shift
        if self.table == "migrations":
            return np.asarray(start + np.maximum(self.amount.counted(rows), 1))
        return np.asarray((start // PAGE_BYTES + 1) * PAGE_BYTES)

    def between(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Find the rows that start in a half-open window: first and end of their numbers."""
        low, high = np.searchsorted(self.start, [int64(start_ns), int64(end_ns)])
        return int(low), max(int(low), int(high))

    def taken(self, rows: NDArray[Any] | slice) -> Part:
        """Keep rows, by number or mask."""
        return replace(
            self,
            start=self.start[rows],
            duration=self.duration.taken(rows),
            place=self.place[rows],
            amount=self.amount.taken(rows),
            layer=self.layer[rows],
            owner=self.owner[rows],
        )


@dataclass(frozen=True, eq=False)
class Events:
    """What the explorer draws.

    Attributes
    ----------
    parts : mapping of str to Part
        Rows by table; a table without rows is not in it.
    layers : DataFrame, ``LAYERS``
        Kinds of event in the capture. A filtered copy keeps the numbers.
    owners : DataFrame, ``OWNERS``
        Processes and GPUs.
    addresses : Addresses
        The folded address space.
    extent : (int, int)
        From the first start to the last end, ns; ``(0, 1)`` without rows.
    n_without_start : int
        Rows that no view can show, because they have no start.
    """

    parts: Mapping[str, Part]
    layers: pl.DataFrame
    owners: pl.DataFrame
    addresses: Addresses
    extent: tuple[int, int]
    n_without_start: int = 0

    @property
    def n_rows(self) -> int:
        """Rows of all tables."""
        return sum(part.n_rows for part in self.parts.values())

    @property
    def n_bytes(self) -> int:
        """Memory of the columns, byte."""
        return sum(part.n_bytes for part in self.parts.values())

    @property
    def frame(self) -> pl.DataFrame:
        """Every row by start, ``RECORDED``: it takes several times the memory of the columns."""
        return self.recorded({name: slice(None) for name in self.parts})

    def recorded(self, chosen: Mapping[str, NDArray[Any] | slice]) -> pl.DataFrame:
        """Give rows back as they were recorded.

        Parameters
        ----------
        chosen : mapping of str to array or slice
            By table, the numbers of the rows.

        Returns
        -------
        DataFrame, ``RECORDED``
            Ordered by start; of equal starts migrations come first.
        """
        frames = [_recorded(self, self.parts[name].taken(rows)) for name, rows in chosen.items()]
        nothing = pl.DataFrame(schema=RECORDED.schema)
        return pl.concat([nothing, *frames]).sort("start_ns", "table", maintain_order=True)

    def kept(
        self,
        *,
        owners: Collection[int] | None = None,
        layers: Collection[int] | None = None,
        windows: pl.DataFrame | None = None,
        places: pl.DataFrame | None = None,
    ) -> Events:
        """Keep a part of the events; the axes, layers and owners stay as they are.

        Parameters
        ----------
        owners, layers : collection of int, optional
            Numbers of ``OWNERS`` and ``LAYERS`` to keep.
        windows : DataFrame, optional
            ``start_ns``, ``end_ns``: half-open windows, in any order; a row that starts in any stays.
        places : DataFrame, optional
            ``place_start``, ``place_end`` (byte of the folded space) and, if there, ``alloc_ns``,
            ``free_ns`` (null: open): a row that starts there and then stays.

        Returns
        -------
        Events
            New events; with nothing given, these.
        """
        kept = {}
        for name, part in self.parts.items():
            mask = np.ones(part.n_rows, bool)
            if owners is not None:
                mask &= with_numbers(part.owner, owners)
            if layers is not None:
                mask &= with_numbers(part.layer, layers)
            if windows is not None:
                mask &= in_windows(part, windows)
            if places is not None:
                mask &= in_places(part, places)
            kept[name] = part if mask.all() else part.taken(mask)
        return replace(self, parts={name: part for name, part in kept.items() if part.n_rows})


def view_events(trace_tables: Mapping[str, pl.LazyFrame]) -> Events:
    """Read what the explorer draws.

    Parameters
    ----------
    trace_tables : mapping of str to LazyFrame
        ``migrations``, ``gpu_faults``, ``cpu_faults`` and, if there, ``allocations``, as in
        :mod:`nsan.schema`.

    Returns
    -------
    Events
        Rows with a start. The access of a copy by page faults is that of the fault row of its batch:
        the first of its process and GPU that ends no earlier than the copy starts, where the copy fits
        in that row; null in a capture without fault rows.
    """
    frames = _collected(trace_tables)
    without = sum(frames[name]["start_ns"].null_count() for name in EVENT_TABLES)
    # A table that is put in order is not held twice.
    found = {name: _by_start(frames.pop(name)) for name in EVENT_TABLES}
    ordered = {name: frame for name, frame in found.items() if frame.height}
    held = frames["allocations"].filter(pl.col("kind").is_in(_MANAGED))
    owners, owner = number_owners(ordered)
    # numpy lets go of the interpreter: the tables are worked on side by side.
    with ThreadPoolExecutor(2) as pool:
        coding = pool.submit(_coded, ordered, owner)
        addresses = Addresses.build([*ordered.values(), held], held)
        placing = {name: pool.submit(placed, frame, addresses) for name, frame in ordered.items()}
        columns = {name: _columns(name, frame) for name, frame in ordered.items()}
        layers, layer = number_layers(coding.result())
        parts = {
            name: _part(name, columns[name], placing[name].result(), (layer[name], owner[name]))
            for name in ordered
        }
    return Events(parts, layers, owners, addresses, _extent(ordered), without)


def _collected(trace_tables: Mapping[str, pl.LazyFrame]) -> dict[str, pl.DataFrame]:
    """Read the columns that are needed, all tables at once."""
    reads = {**_READS, "allocations": _ALLOCATION_READS}
    lazy = [
        trace_tables.get(name, TABLES[name].empty()).select(columns)
        for name, columns in reads.items()
    ]
    return dict(zip(reads, pl.collect_all(lazy), strict=True))


def _by_start(frame: pl.DataFrame) -> pl.DataFrame:
    """Keep the rows that have a start, in its order; a check is cheaper than a sort."""
    if frame["start_ns"].null_count():
        frame = frame.drop_nulls("start_ns")
    return frame if frame["start_ns"].is_sorted() else frame.sort("start_ns", maintain_order=True)


def _extent(frames: Mapping[str, pl.DataFrame]) -> tuple[int, int]:
    """Give the first start and what lies behind the last end."""
    times = [
        frame.select(
            low=pl.col("start_ns").min(),
            high=pl.max_horizontal(pl.col("^(start|end)_ns$").max()),
        ).row(0)
        for frame in frames.values()
    ]
    if not times:
        return 0, 1
    return min(low for low, _ in times), max(high for _, high in times) + 1


def _coded(
    frames: Mapping[str, pl.DataFrame], owner: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[np.uint8]]:
    """Give the kind of each row, a copy by page faults with the access of its batch."""
    codes = {name: kind_codes(frame) for name, frame in frames.items()}
    if frames.keys() >= {"migrations", "gpu_faults"}:
        both = (owner["migrations"], owner["gpu_faults"])
        known = copy_access(frames["migrations"], frames["gpu_faults"], both)
        codes["migrations"] = with_access(codes["migrations"], *known)
    return codes


def _columns(name: str, frame: pl.DataFrame) -> tuple[NDArray[np.int64], Compact, Compact]:
    """Make the columns of start, duration and amount."""
    start = frame["start_ns"]
    amount = {"migrations": "bytes", "gpu_faults": "n_page_faults"}.get(name)
    nothing = Compact.unknown(frame.height)
    return (
        filled(start, np.int64, 0),
        Compact.of(frame["end_ns"] - start) if "end_ns" in frame.columns else nothing,
        Compact.of(frame[amount]) if amount else nothing,
    )


def _part(
    name: str,
    columns: tuple[NDArray[np.int64], Compact, Compact],
    place: tuple[NDArray[Any], int],
    numbers: tuple[NDArray[np.uint8], NDArray[Any]],
) -> Part:
    """Put the compact columns of a table together."""
    start, duration, amount = columns
    return Part(name, start, duration, place[0], amount, *numbers, place[1])


def _recorded(events: Events, part: Part) -> pl.DataFrame:
    """Unpack rows of one table."""
    place = pl.Series("place", part.place.astype(np.int64) << part.shift)
    none = part.place == part.no_place
    place = place.set(pl.Series(none), None) if none.any() else place
    rows = pl.DataFrame(
        {
            "start_ns": part.start,
            "_duration": part.duration.series("_duration"),
            "layer": np.ascontiguousarray(part.layer),
            "owner": part.owner.astype(np.uint16),
            "place": place,
            "bytes" if part.table == "migrations" else "n_page_faults": part.amount.series("_"),
        }
    )
    full = (
        rows.join(events.layers, on="layer", how="left", maintain_order="left")
        .join(events.owners, on="owner", how="left", maintain_order="left")
        .with_columns(end_ns=pl.col("start_ns") + pl.col("_duration"), va=_addresses(rows, events))
    )
    return full.select(
        (pl.col(name) if name in full.columns else pl.lit(None).alias(name)).cast(dtype)
        for name, dtype in RECORDED.schema.items()
    )


def _addresses(rows: pl.DataFrame, events: Events) -> pl.Series:
    """Give the address of each place."""
    runs = events.addresses.runs
    if runs.is_empty():
        return pl.Series("va", [None] * rows.height, dtype=pl.UInt64)
    place = rows["place"]
    run = runs["place_end"].search_sorted(place.fill_null(0), side="right")
    offset = place - runs["place_start"].gather(run)
    return (runs["va_start"].gather(run) + offset.cast(pl.UInt64)).alias("va")
