"""Call the text columns of a Parquet file binary, so that text which is not UTF-8 can be read.

The schema of a Parquet file stands in its footer, in Thrift's compact protocol. A text column is
marked there by one byte or two, which are overwritten in place: ``UTF8`` becomes ``BSON``, ``STRING``
becomes ``BSON``. The bytes of the cells stay as they are. Format: Parquet's ``parquet.thrift``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MAGIC: Final = b"PAR1"
_UNREADABLE: Final = "its Parquet footer cannot be read"
_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(
    13
)
_OTHER_SCHEMA: Final = b"ARROW:schema"
_SCHEMA_FIELD: Final = 2
_CONVERTED_FIELD, _LOGICAL_FIELD = 6, 10
_UTF8, _BSON = 0, 40
"""Converted types, as the protocol writes numbers: 0, and 20 doubled."""
_STRING_CASE, _BSON_CASE = 0x1C, 0xCC
"""Heads of the only field of a logical type: a struct, in place 1 and in place 12."""


def with_binary_text(file: Path) -> None:
    """Change the footer of a Parquet file; give it a copy.

    Parameters
    ----------
    file : Path
        The file to change.

    Raises
    ------
    ValueError
        If it has no such footer.
    """
    with file.open("r+b") as opened:
        opened.seek(-8, 2)
        tail = opened.read(8)
        size = int.from_bytes(tail[:4], "little")
        if tail[4:] != _MAGIC or size + 8 > opened.tell():
            msg = "it has no Parquet footer"
            raise ValueError(msg)
        opened.seek(-8 - size, 2)
        footer = _Footer(bytearray(opened.read(size)))
        try:
            footer.patch()
        except IndexError as error:
            raise ValueError(_UNREADABLE) from error
        opened.seek(-8 - size, 2)
        opened.write(footer.raw)


@dataclass
class _Footer:
    """A walk through Thrift's compact protocol, from the beginning of a footer."""

    raw: bytearray
    at: int = 0

    def patch(self) -> None:
        """Overwrite the marks of text in every element of the schema."""
        # Some writers add the schema of their own library, which readers prefer.
        self.raw = self.raw.replace(_OTHER_SCHEMA, _OTHER_SCHEMA.lower())
        field = 0
        while head := self._byte():
            field = self._field(head, field)
            if field == _SCHEMA_FIELD:
                for _ in range(self._list_head()[1]):
                    self._patch_element()
                return
            self._skip(head & 15)

    def _patch_element(self) -> None:
        field = 0
        while head := self._byte():
            field = self._field(head, field)
            place = self.at
            self._skip(head & 15)
            if field == _CONVERTED_FIELD and self.raw[place] == _UTF8:
                self.raw[place] = _BSON
            elif field == _LOGICAL_FIELD and self.raw[place] == _STRING_CASE:
                self.raw[place] = _BSON_CASE

    def _byte(self) -> int:
        self.at += 1
        return self.raw[self.at - 1]

    def _number(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def _field(self, head: int, last: int) -> int:
        """Return the number of a field: a step from the last, or written out."""
        if head >> 4:
            return last + (head >> 4)
        written = self._number()
        return (written >> 1) ^ -(written & 1)

    def _list_head(self) -> tuple[int, int]:
        head = self._byte()
        return head & 15, self._number() if head >> 4 == 15 else head >> 4

    def _skip(self, kind: int) -> None:
        if kind in {_BYTE, _I16, _I32, _I64}:
            self._number()
        elif kind == _DOUBLE:
            self.at += 8
        elif kind == _BINARY:
            size = self._number()
            self.at += size
        elif kind in {_LIST, _SET}:
            item, n = self._list_head()
            for _ in range(n):
                self._skip(item)
        elif kind == _STRUCT:
            while head := self._byte():
                self._field(head, 0)
                self._skip(head & 15)
        elif kind not in {_TRUE, _FALSE}:
            raise ValueError(_UNREADABLE)
