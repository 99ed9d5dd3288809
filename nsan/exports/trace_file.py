"""A Perfetto trace as it is written: packets of tracks, slices, instants and counters.

Format: Perfetto's ``protos/perfetto/trace``; field numbers are theirs. Names stand once for each stretch of
packets (interned), and packets are compressed by the megabyte, as Perfetto's own recorder does, so however
many slices are written, only one stretch of them is in memory as packets.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import IO, Final

import numpy as np
import polars as pl

from nsan.exports.wire import Mask, Messages, sized, uint
from nsan.text import shortened

ROWS_PER_STRETCH: Final = 1 << 14
LONGEST_NAME: Final = 400
"""Characters of a name or text; a demangled kernel may have 20 000."""

_PACKET, _TIMESTAMP, _TRACK_EVENT, _TRACK_DESCRIPTOR = 1, 8, 11, 60
_SEQUENCE, _INTERNED, _SEQUENCE_FLAGS, _COMPRESSED = 10, 12, 13, 50
_CLEARED, _NEEDS_STATE = 1, 2
_CATEGORY, _ANNOTATION, _TYPE, _NAME, _TRACK, _COUNTER, _FLOW = 3, 4, 9, 10, 11, 30, 47
_DOUBLE_COUNTER: Final = 44
_BEGIN, _END, _INSTANT, _COUNT = 1, 2, 3, 4
_CATEGORIES, _EVENT_NAMES, _ANNOTATION_NAMES, _ANNOTATION_TEXTS = 1, 2, 3, 29
_COMPRESS_AT: Final = 1 << 20

_OWN: Final = frozenset({"track", "start_ns", "end_ns", "name", "flow"})
"""Columns of slices that are no arguments."""


@dataclass(frozen=True)
class Counter:
    """What a counter counts: in bytes (``unit`` empty) or in a unit of its own."""

    unit: str = ""


@dataclass(frozen=True)
class Track:
    """One track.

    Attributes
    ----------
    uuid, parent : int
        Numbers of the track and of the one that it stands under; 0: none.
    name : str
        What people see.
    about : str
        What is on it, of which kind, in a sentence.
    rank : int
        Its place among its siblings.
    pid, tid : int or None
        Of the track of a process or thread.
    counter : Counter or None
        Of a counter.
    """

    uuid: int
    parent: int
    name: str
    about: str = ""
    rank: int = 0
    pid: int | None = None
    tid: int | None = None
    counter: Counter | None = None


@dataclass
class _Interned:
    """Texts of one stretch, by the number that packets call them."""

    fields: dict[int, list[str]] = field(default_factory=dict)

    def one(self, kind: int, text: str) -> int:
        """Give the number of a text."""
        known = self.fields.setdefault(kind, [])
        if text not in known:
            known.append(text)
        return known.index(text) + 1

    def column(self, kind: int, texts: pl.Series) -> tuple[np.ndarray, Mask]:
        """Give the numbers of a column of texts, and where there is one."""
        known = self.fields.setdefault(kind, [])
        distinct = texts.drop_nulls().unique(maintain_order=True)
        numbers = pl.Series(range(len(known) + 1, len(known) + len(distinct) + 1), dtype=pl.Int64)
        known += map(_text, distinct)
        found = texts.replace_strict(distinct, numbers, default=None, return_dtype=pl.Int64)
        return found.fill_null(0).to_numpy(), texts.is_not_null().to_numpy()

    def packet(self) -> bytes:
        """Write the packet that stands before those that use the texts."""
        entries = b"".join(
            sized(kind, uint(1, number) + sized(2, text))
            for kind, texts in self.fields.items()
            for number, text in enumerate(texts, 1)
        )
        state = uint(_SEQUENCE, 1) + uint(_SEQUENCE_FLAGS, _CLEARED)
        return sized(_PACKET, state + sized(_INTERNED, entries))


class TraceFile:
    """A Perfetto trace that is being written.

    Parameters
    ----------
    file : binary file
        Where to.
    shift_ns : int, default 0
        Added to all times: Perfetto drops what is before 0.
    """

    def __init__(self, file: IO[bytes], *, shift_ns: int = 0) -> None:
        self._file, self._shift = file, shift_ns
        self._waiting: list[bytes] = []
        self._size = 0

    def tracks(self, tracks: Iterable[Track]) -> None:
        """Write tracks; before anything is on them."""
        for track in tracks:
            self._add(sized(_PACKET, sized(_TRACK_DESCRIPTOR, _descriptor(track))))

    def slices(self, rows: pl.DataFrame, category: str) -> None:
        """Write slices.

        Parameters
        ----------
        rows : DataFrame
            By track in the order in which they start, outer ones first: ``track`` (Int64, its uuid),
            ``start_ns``, ``end_ns`` (Int64), ``name`` (text), ``flow`` (UInt64, optional; ties slices of one
            number). Each other column is an argument: numbers, flags, labels or text; UInt64 is an address.
        category : str
            What they are of.
        """
        for part in rows.iter_slices(ROWS_PER_STRETCH):
            interned = _Interned()
            begin = _event(part, category, _BEGIN, interned)
            end = Messages(part.height)
            end.constant(uint(_TYPE, _END))
            end.uint(_TRACK, part["track"].to_numpy())
            both = Messages(part.height)
            both.messages(_PACKET, self._packets(part["start_ns"], begin))
            ends = part.select(pl.max_horizontal("start_ns", "end_ns")).to_series()
            both.messages(_PACKET, self._packets(ends, end))
            self._add(interned.packet() + both.joined())

    def instants(self, rows: pl.DataFrame, category: str) -> None:
        """Write moments; columns as of :meth:`slices`, without an end."""
        for part in rows.iter_slices(ROWS_PER_STRETCH):
            interned = _Interned()
            self._write(part, _event(part, category, _INSTANT, interned), interned)

    def counts(self, rows: pl.DataFrame) -> None:
        """Write values of counters: ``track``, ``start_ns``, ``value`` (Int64 or Float64)."""
        for part in rows.iter_slices(ROWS_PER_STRETCH):
            event = Messages(part.height)
            event.constant(uint(_TYPE, _COUNT))
            event.uint(_TRACK, part["track"].to_numpy())
            if part.schema["value"].is_float():
                event.fixed64(_DOUBLE_COUNTER, part["value"].to_numpy().view(np.uint64))
            else:
                event.uint(_COUNTER, part["value"].to_numpy())
            self._write(part, event, _Interned())

    def close(self) -> None:
        """Write what waits; the file stays open."""
        if self._waiting:
            packed = zlib.compress(b"".join(self._waiting), level=1)
            self._file.write(sized(_PACKET, sized(_COMPRESSED, packed)))
            self._waiting, self._size = [], 0

    def _write(self, part: pl.DataFrame, event: Messages, interned: _Interned) -> None:
        whole = Messages(part.height)
        whole.messages(_PACKET, self._packets(part["start_ns"], event))
        self._add(interned.packet() + whole.joined())

    def _packets(self, times: pl.Series, event: Messages) -> Messages:
        packet = Messages(event.n)
        packet.uint(_TIMESTAMP, (times + self._shift).to_numpy())
        packet.constant(uint(_SEQUENCE, 1) + uint(_SEQUENCE_FLAGS, _NEEDS_STATE))
        packet.messages(_TRACK_EVENT, event)
        return packet

    def _add(self, packets: bytes) -> None:
        self._waiting.append(packets)
        self._size += len(packets)
        if self._size >= _COMPRESS_AT:
            self.close()


def _event(part: pl.DataFrame, category: str, kind: int, interned: _Interned) -> Messages:
    """Write a slice's beginning or an instant, with its arguments."""
    event = Messages(part.height)
    event.constant(uint(_TYPE, kind) + uint(_CATEGORY, interned.one(_CATEGORIES, category)))
    event.uint(_TRACK, part["track"].to_numpy())
    event.uint(_NAME, *interned.column(_EVENT_NAMES, part["name"].cast(pl.String)))
    if "flow" in part.columns:
        flow = part["flow"]
        event.fixed64(_FLOW, flow.fill_null(0).to_numpy(), flow.is_not_null().to_numpy())
    for column in part.iter_columns():
        if column.name not in _OWN and column.null_count() < part.height:
            number = interned.one(_ANNOTATION_NAMES, column.name)
            _annotation(event, number, column, interned)
    return event


def _annotation(event: Messages, number: int, column: pl.Series, interned: _Interned) -> None:
    """Add one argument, where it has a value."""
    there = column.is_not_null().to_numpy() if column.null_count() else None
    value, dtype = Messages(event.n), column.dtype
    value.constant(uint(1, number))
    if dtype == pl.Boolean:
        value.uint(2, column.fill_null(value=False).to_numpy())
    elif dtype == pl.UInt64:
        value.unsigned(7, column.fill_null(0).to_numpy())
    elif dtype.is_integer():
        value.uint(4, column.cast(pl.Int64).fill_null(0).to_numpy())
    elif dtype.is_float():
        value.fixed64(5, column.fill_null(0.0).cast(pl.Float64).to_numpy().view(np.uint64))
    else:
        value.uint(17, interned.column(_ANNOTATION_TEXTS, column.cast(pl.String))[0])
    event.messages(_ANNOTATION, value, there)


def _text(text: str) -> str:
    return shortened(text, LONGEST_NAME)


def _descriptor(track: Track) -> bytes:
    name = shortened(track.name, LONGEST_NAME)
    found = [uint(1, track.uuid)]
    if track.parent:
        found.append(uint(5, track.parent))
    if track.tid is not None and track.pid is not None:
        found.append(sized(4, uint(1, track.pid) + uint(2, track.tid) + sized(5, name)))
    elif track.pid is not None:
        found.append(sized(3, uint(1, track.pid) + sized(6, name)))
    else:
        found.append(sized(2, name))
    if track.about:
        found.append(sized(14, track.about))
    if track.counter is not None:
        unit = sized(6, track.counter.unit) if track.counter.unit else uint(3, 3)
        found.append(sized(8, unit))
    return b"".join([*found, uint(11, 3), uint(12, track.rank)])
