"""Stretches of rows out of an Arrow IPC stream.

nsys writes all rows of a table as one record batch, and polars reads a batch whole. Here the place of
each column's buffers is taken from the batch's header, and only the bytes of the rows asked for are
read and handed to polars. Formats: Arrow's ``Message.fbs`` and ``Schema.fbs``.
A stream with other than plain columns (dictionaries, nesting, compression) is read whole.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import polars as pl

_SCHEMA, _BATCH = 1, 3
"""Kinds of message; the others are dictionaries."""
_INT, _FLOAT, _BINARY, _UTF8, _LARGE_BINARY, _LARGE_UTF8 = 2, 3, 4, 5, 19, 20
"""Types of columns that are read in stretches."""
_OFFSETS: Final[dict[int, type[pl.DataType]]] = {
    _BINARY: pl.Int32,
    _UTF8: pl.Int32,
    _LARGE_BINARY: pl.Int64,
    _LARGE_UTF8: pl.Int64,
}
_INTEGERS: Final[dict[tuple[int, bool], type[pl.DataType]]] = {
    (8, True): pl.Int8,
    (16, True): pl.Int16,
    (32, True): pl.Int32,
    (64, True): pl.Int64,
    (8, False): pl.UInt8,
    (16, False): pl.UInt16,
    (32, False): pl.UInt32,
    (64, False): pl.UInt64,
}
_FLOATS: Final[dict[int, type[pl.DataType]]] = {1: pl.Float32, 2: pl.Float64}
_WIDTHS: Final[dict[type[pl.DataType], int]] = {
    **{dtype: bits // 8 for (bits, _), dtype in _INTEGERS.items()},
    pl.Float32: 4,
    pl.Float64: 8,
}


@dataclass(frozen=True)
class _Node:
    """A table of a flatbuffer: the values that stand at a position."""

    raw: mmap.mmap
    at: int

    def place(self, field: int) -> int:
        """Return where a field stands; 0 if it has its default."""
        table = self.at - self._read("<i", self.at)
        offset = 4 + 2 * field
        if offset >= self._read("<H", table):
            return 0
        found = self._read("<H", table + offset)
        return self.at + found if found else 0

    def number(self, field: int, code: str, default: int = 0) -> int:
        place = self.place(field)
        return self._read(code, place) if place else default

    def node(self, field: int) -> _Node:
        place = self.place(field)
        return _Node(self.raw, place + self._read("<I", place))

    def vector(self, field: int) -> tuple[int, int]:
        """Return where the items of a vector stand, and how many there are."""
        place = self.place(field)
        if not place:
            return 0, 0
        start = place + self._read("<I", place)
        return start + 4, self._read("<I", start)

    def nodes(self, field: int) -> Iterator[_Node]:
        start, n = self.vector(field)
        for at in range(start, start + 4 * n, 4):
            yield _Node(self.raw, at + self._read("<I", at))

    def text(self, field: int) -> str:
        start, n = self.vector(field)
        return self.raw[start : start + n].decode("utf-8", errors="replace")

    def _read(self, code: str, at: int) -> int:
        value: int = struct.unpack_from(code, self.raw, at)[0]
        return value


@dataclass(frozen=True)
class _Column:
    """A column of the schema: its type as polars has it, and the width of its text offsets."""

    name: str
    dtype: type[pl.DataType]
    offsets: type[pl.DataType] | None

    @property
    def n_buffers(self) -> int:
        return 2 if self.offsets is None else 3


@dataclass(frozen=True)
class _Batch:
    """A record batch: its rows, and for each column the places of its buffers."""

    n_rows: int
    buffers: dict[str, list[tuple[int, int]]]


class ArrowStream:
    """A table in an Arrow IPC stream, open for reading.

    Parameters
    ----------
    file : Path
        The file.

    Attributes
    ----------
    columns : list of str
        Names of its columns.
    n_rows : int
        Rows of all its batches.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._opened = file.open("rb")
        try:
            # Headers are read out of a map; rows are not, for its pages would count as memory.
            with mmap.mmap(self._opened.fileno(), 0, access=mmap.ACCESS_READ) as raw:
                self._read_headers(raw)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the file."""
        self._opened.close()

    def _read_headers(self, raw: mmap.mmap) -> None:
        messages = list(_messages(raw))
        if not messages or messages[0][0].number(1, "<B") != _SCHEMA:
            msg = "it is not an Arrow stream, or cut short"
            raise ValueError(msg)
        fields = list(messages[0][0].node(2).nodes(1))
        self.columns: Sequence[str] = [field.text(0) for field in fields]
        columns = [_column(field) for field in fields]
        batches = [(m.node(2), body) for m, body in messages[1:] if m.number(1, "<B") == _BATCH]
        n_rows = [batch.number(0, "<q") for batch, _ in batches]
        # The least that a row takes is a bit.
        if any(not 0 <= n <= 8 * len(raw) for n in n_rows):
            msg = "a batch is longer than its file"
            raise ValueError(msg)
        self.n_rows = sum(n_rows)
        # The fourth field of a batch is its compression.
        plain = all(columns) and not any(batch.place(3) for batch, _ in batches)
        self._plain = {c.name: c for c in columns if c is not None} if plain else None
        if self._plain is not None:
            self._batches = [_batch(batch, body, self._plain) for batch, body in batches]

    def rows(self, columns: Sequence[str], first: int, n_rows: int) -> pl.DataFrame:
        """Read some columns of a stretch of rows.

        Parameters
        ----------
        columns : sequence of str
            Names as spelt.
        first, n_rows : int
            Where the stretch begins, and its length.

        Returns
        -------
        DataFrame
            Text comes as bytes: it need not be UTF-8.
        """
        if self._plain is None:
            try:
                whole = pl.read_ipc_stream(self._file, columns=list(columns))
            except pl.exceptions.PanicException as error:
                # A type that polars does not know makes it panic, beside Python's own exceptions.
                msg = "polars cannot read it"
                raise ValueError(msg) from error
            return whole.slice(first, n_rows)
        parts = []
        start = 0
        for batch in self._batches:
            low, high = max(first, start), min(first + n_rows, start + batch.n_rows)
            if low < high:
                parts.append(
                    pl.DataFrame(
                        [self._slice(batch, name, low - start, high - low) for name in columns]
                    )
                )
            start += batch.n_rows
        return pl.concat(parts) if parts else pl.DataFrame()

    def _slice(self, batch: _Batch, name: str, first: int, n_rows: int) -> pl.Series:
        column = (self._plain or {})[name]
        validity, *data = batch.buffers[name]
        if column.offsets is None:
            values = self._numbers(data[0], column.dtype, first, n_rows)
        else:
            values = self._texts(data, column.offsets, first, n_rows)
        if validity[1]:
            values = values.zip_with(self._bits(validity, first, n_rows), _nulls(values))
        return values.alias(name)

    def _bytes(self, at: int, size: int) -> bytes:
        return os.pread(self._opened.fileno(), size, at)

    def _numbers(
        self, buffer: tuple[int, int], dtype: type[pl.DataType], first: int, n: int
    ) -> pl.Series:
        at, size = buffer
        width = _WIDTHS[dtype]
        raw = self._bytes(at + first * width, n * width)
        if (first + n) * width > size or len(raw) != n * width:
            msg = "a column is shorter than its table"
            raise ValueError(msg)
        cell = pl.Series([raw], dtype=pl.Binary)
        return cell.bin.reinterpret(dtype=pl.Array(dtype, n), endianness="little").explode()

    def _texts(
        self, data: list[tuple[int, int]], offsets: type[pl.DataType], first: int, n: int
    ) -> pl.Series:
        ends = self._numbers(data[0], offsets, first, n + 1).to_list()
        base, (at, size) = ends[0], data[1]
        if not 0 <= base <= ends[-1] <= size:
            msg = "a text lies outside its column"
            raise ValueError(msg)
        blob = self._bytes(at + base, ends[-1] - base)
        cells = [blob[a - base : b - base] for a, b in pairwise(ends)]
        return pl.Series(cells, dtype=pl.Binary)

    def _bits(self, buffer: tuple[int, int], first: int, n: int) -> pl.Series:
        low = first // 8
        packed = self._numbers(buffer, pl.UInt8, low, (first + n + 7) // 8 - low)
        at = pl.int_range(first - 8 * low, first - 8 * low + n, eager=True)
        masks = pl.Series([1 << bit for bit in range(8)], dtype=pl.UInt8)
        return (packed.gather(at // 8) & masks.gather(at % 8)) != 0


def _messages(raw: mmap.mmap) -> Iterator[tuple[_Node, int]]:
    """Yield each message of a stream, and where its body begins."""
    at = 0
    while at + 8 <= len(raw):
        mark, size = struct.unpack_from("<Ii", raw, at)
        if mark != 0xFFFF_FFFF or size < 0:
            msg = "it is not an Arrow stream"
            raise ValueError(msg)
        if size == 0:
            return
        message = _Node(raw, at + 8 + struct.unpack_from("<I", raw, at + 8)[0])
        body, length = at + 8 + size, message.number(3, "<q")
        at = body + length
        if length < 0 or at > len(raw):
            break
        yield message, body
    msg = "it is cut short"
    raise ValueError(msg)


def _column(field: _Node) -> _Column | None:
    """Describe a plain column; None for one of another type."""
    kind, name = field.number(2, "<B"), field.text(0)
    if field.place(4) or field.vector(5)[1]:  # a dictionary, children
        return None
    if kind in _OFFSETS:
        return _Column(name, pl.Binary, _OFFSETS[kind])
    dtype: type[pl.DataType] | None = None
    if kind == _INT:
        detail = field.node(3)
        dtype = _INTEGERS.get((detail.number(0, "<i"), bool(detail.number(1, "<B"))))
    elif kind == _FLOAT:
        dtype = _FLOATS.get(field.node(3).number(0, "<h"))
    return _Column(name, dtype, None) if dtype is not None else None


def _batch(batch: _Node, body: int, columns: dict[str, _Column]) -> _Batch:
    start, n = batch.vector(2)
    if n != sum(column.n_buffers for column in columns.values()):
        msg = "a batch does not fit its schema"
        raise ValueError(msg)
    places = [
        (body + at, size)
        for at, size in struct.iter_unpack("<qq", batch.raw[start : start + 16 * n])
    ]
    if any(at < body or size < 0 or at + size > len(batch.raw) for at, size in places):
        msg = "a column lies outside its file"
        raise ValueError(msg)
    buffers = {}
    for column in columns.values():
        buffers[column.name], places = places[: column.n_buffers], places[column.n_buffers :]
    return _Batch(batch.number(0, "<q"), buffers)


def _nulls(values: pl.Series) -> pl.Series:
    return pl.repeat(None, len(values), dtype=values.dtype, eager=True)
