"""Protobuf messages by the million: one shape, many rows, put together column by column.

A message of Google's wire format is a run of fields, each a key and a value. Rows of a table give messages of
the same fields, so the bytes are made for all rows at once: each byte of a field is a column, and a row takes
of it what its own numbers need.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Mask: TypeAlias = NDArray[np.bool_]

_VARINT, _FIXED64, _SIZED = 0, 1, 2
_MOST_VARINT: Final = 10


def varint(value: int) -> bytes:
    """Write one number; negative ones as 64 bits, as protobuf does.

    Examples
    --------
    >>> varint(300).hex()
    'ac02'
    """
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def uint(field: int, value: int) -> bytes:
    """Write one field that holds a number."""
    return varint(field << 3 | _VARINT) + varint(value)


def sized(field: int, content: bytes | str) -> bytes:
    """Write one field that holds text, bytes or a message."""
    raw = content.encode("utf-8", "replace") if isinstance(content, str) else content
    return varint(field << 3 | _SIZED) + varint(len(raw)) + raw


class Messages:
    """Messages of one shape, one for each row.

    Parameters
    ----------
    n : int
        Rows.

    Examples
    --------
    >>> import numpy as np
    >>> both = Messages(2)
    >>> both.uint(1, np.array([1, 300]))
    >>> both.joined().hex()
    '080108ac02'
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.sizes = np.zeros(n, dtype=np.uint64)
        self._columns: list[tuple[Bytes | int, Mask | None]] = []

    def constant(self, content: bytes, where: Mask | None = None) -> None:
        """Add the same bytes to each row, or to those of a mask."""
        self._columns += [(byte, where) for byte in content]
        self.sizes += _counted(len(content), where)

    def uint(self, field: int, values: NDArray[np.generic], where: Mask | None = None) -> None:
        """Add a field that holds a number; negative ones as 64 bits."""
        self.constant(varint(field << 3 | _VARINT), where)
        self._varint(values.astype(np.int64, copy=False).view(np.uint64), where)

    def unsigned(self, field: int, values: NDArray[np.uint64], where: Mask | None = None) -> None:
        """Add a field that holds a number of 64 bits without a sign."""
        self.constant(varint(field << 3 | _VARINT), where)
        self._varint(values, where)

    def fixed64(self, field: int, values: NDArray[np.uint64], where: Mask | None = None) -> None:
        """Add a field that holds eight bytes."""
        self.constant(varint(field << 3 | _FIXED64), where)
        parts = np.ascontiguousarray(values, dtype="<u8").view(np.uint8).reshape(self.n, 8)
        self._columns += [(parts[:, at], where) for at in range(8)]
        self.sizes += _counted(8, where)

    def messages(self, field: int, inner: Messages, where: Mask | None = None) -> None:
        """Add a field that holds a message of its own."""
        self.constant(varint(field << 3 | _SIZED), where)
        self._varint(inner.sizes, where)
        self._columns += [(column, _both(where, mask)) for column, mask in inner._columns]
        self.sizes += inner.sizes if where is None else inner.sizes * where

    def joined(self) -> bytes:
        """Put the messages one after another."""
        shape = (self.n, len(self._columns))
        found, kept = np.empty(shape, np.uint8), np.empty(shape, np.bool_)
        for at, (column, mask) in enumerate(self._columns):
            found[:, at] = column
            kept[:, at] = True if mask is None else mask
        return found[kept].tobytes()

    def _varint(self, values: NDArray[np.uint64], where: Mask | None) -> None:
        most = int(values.max()) if self.n else 0
        n_bytes = max(1, -(-most.bit_length() // 7))
        there = None
        for at in range(n_bytes):
            column = ((values >> np.uint64(7 * at)) & np.uint64(127)).astype(np.uint8)
            more = None
            if at + 1 < n_bytes:
                more = values >= np.uint64(1 << (7 * at + 7))
                column |= more.astype(np.uint8) << 7
            mask = _both(where, there)
            self._columns.append((column, mask))
            self.sizes += _counted(1, mask)
            there = more


def _both(one: Mask | None, other: Mask | None) -> Mask | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _counted(size: int, where: Mask | None) -> NDArray[np.uint64] | np.uint64:
    return np.uint64(size) if where is None else where.astype(np.uint64) * np.uint64(size)
