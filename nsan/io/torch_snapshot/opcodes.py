"""What a pickle is made of, checked before any of it is loaded. Standard library only.

A snapshot is plain containers, texts and numbers: a pickler of protocol 2 to 5 needs some 35 of the
68 opcodes for them. Any other opcode, a length beyond the end of the file, and a memo index beyond
the size of the file are refused here: so the unpickler neither runs anything nor takes memory out of
proportion to the file. Runs of opcodes and short texts are matched by one regular expression, about
100 MB a second.
"""

from __future__ import annotations

import mmap
import re
from typing import Final

from nsan.io.torch_snapshot.refusal import RefusedError, shown

Data = bytes | mmap.mmap

PROTOCOLS: Final = (2, 3, 4, 5)
"""Protocols of a pickle that are read; PyTorch writes 2 (from C++) and 4."""

_STOP: Final = ord(".")
_FRAME: Final = 0x95
_LENGTH_BYTES: Final = {
    0x8C: 1,  # SHORT_BINUNICODE
    0x58: 4,  # BINUNICODE
    0x8D: 8,  # BINUNICODE8
    0x43: 1,  # SHORT_BINBYTES
    0x42: 4,  # BINBYTES
    0x8E: 8,  # BINBYTES8
}
"""Opcodes with a text or bytes, and the bytes of the length before it."""

_NUMBER_BYTES: Final = 9
"""Longest integer: 64 bit without a sign take nine bytes."""

_TEXT_BYTES: Final = 1 << 24
"""Longest text: names in C++ can be long, but not so long."""

_OPERAND_BYTES: Final = {
    **dict.fromkeys(b"Khq", 1),
    ord("M"): 2,
    **dict.fromkeys(b"Jjr", 4),
    ord("G"): 8,
    0x8A: 1,
}
_RUNS: Final = {
    b"R": "calls a function (REDUCE)",
    b"b": "sets the state of an object (BUILD)",
    b"o": "makes an object (OBJ)",
    b"\x81": "makes an object (NEWOBJ)",
    b"\x92": "makes an object (NEWOBJ_EX)",
    b"\x82": "names a registered class (EXT1)",
    b"\x83": "names a registered class (EXT2)",
    b"\x84": "names a registered class (EXT4)",
    b"P": "names an object outside the file (PERSID)",
    b"Q": "names an object outside the file (BINPERSID)",
    b"\x97": "names a buffer outside the file (NEXT_BUFFER)",
    b"\x98": "names a buffer outside the file (READONLY_BUFFER)",
}
_FOREIGN: Final = {
    **dict.fromkeys((b"\x8f", b"\x90", b"\x91"), "holds a set"),
    b"\x96": "holds a bytearray",
    b"\x8b": "holds an integer of more than 255 bytes (LONG4)",
    **dict.fromkeys((b"T", b"U"), "holds a text of Python 2"),
    **dict.fromkeys(
        (b"I", b"L", b"F", b"S", b"V", b"g", b"p", b"d", b"l"), "holds an item of pickle protocol 0"
    ),
    **dict.fromkeys((b"0", b"1", b"2"), "drops or doubles items"),
    b"\x80": "begins a second pickle",
}
_LONGEST_NAME: Final = 200
_SHORT: Final = 63
"""Length of the texts that the expression takes; longer ones stop it."""


def _run(n_bytes: int) -> re.Pattern[bytes]:
    """Build the expression of a run of opcodes that carry no long text, in a file of a size.

    A memo index is at most the size of the file rounded up to its highest two bytes: a pickler counts
    from 0, one for each item that it stores.
    """
    high = re.escape(bytes([min(n_bytes >> 24, 255)]))
    low = re.escape(bytes([n_bytes >> 16])) if n_bytes < 1 << 24 else b"\xff"
    # The most frequent come first: names by memo index, addresses and times, sizes.
    return re.compile(
        rb"(?:h.|\x8a%b|[Jj]....|[(aesu}\])tN\x85-\x89\x94]++|[Kq].|M..|r..[\x00-%b][\x00-%b]|G.{8}"
        rb"|\x8c%b|X%b)*+"
        % (_counted(_NUMBER_BYTES), low, high, _counted(_SHORT), _counted(_SHORT, b"\0\0\0")),
        re.DOTALL,
    )


def _counted(most: int, rest: bytes = b"") -> bytes:
    """Build the expression of a number up to some, the rest of that number, and so many bytes."""
    each = (b"%b%b.{%d}" % (re.escape(bytes([n])), rest, n) for n in range(most + 1))
    return b"(?:%b)" % b"|".join(each)


_TWO_TEXTS: Final = re.compile(
    rb"\x8c.([\w.]{1,%d})(?:\x94|q.)?\x8c.([\w.]{1,%d})(?:\x94|q.)?$" % (_SHORT, _SHORT), re.DOTALL
)


def check(data: Data) -> int:
    """Refuse a pickle that is more than plain containers, texts and numbers, or not whole.

    Parameters
    ----------
    data : bytes or mmap
        The whole file.

    Returns
    -------
    int
        Its protocol.

    Raises
    ------
    RefusedError
        At the first opcode that a snapshot does not need, with its place in the file.
    """
    size = len(data)
    if size < 3 or data[0] != 0x80 or data[1] not in PROTOCOLS:
        raise RefusedError("other", "it does not begin as a pickle of protocol 2 to 5")
    run = _run(size)
    position = 2
    while True:
        found = run.match(data, position)
        position = found.end() if found else position
        if position >= size:
            raise RefusedError("damaged", "it is cut short: it has no end")
        opcode = data[position]
        if opcode in _LENGTH_BYTES:
            position = _end(data, position, _LENGTH_BYTES[opcode])
        elif opcode == _FRAME:
            _end(data, position, 8)
            position += 9
        elif opcode == _STOP:
            if position != size - 1:
                behind = f"it ends at byte {position + 1} of {size}: something else is behind it"
                raise RefusedError("damaged", behind)
            return data[1]
        else:
            raise _refused(data, position)


def _end(data: Data, position: int, length_bytes: int) -> int:
    """Return where a text, or a frame, ends."""
    start = position + 1 + length_bytes
    length = int.from_bytes(data[position + 1 : start], "little")
    if data[position] != _FRAME and length > _TEXT_BYTES:
        raise RefusedError("unsafe", f"byte {position} holds a text of {length} bytes")
    if start + length > len(data):
        claim = (
            f"byte {position} claims {length} more bytes, and {max(len(data) - start, 0)} follow"
        )
        raise RefusedError("damaged", claim)
    return start + length


def _refused(data: Data, position: int) -> RefusedError:
    opcode = data[position : position + 1]
    if opcode in {b"c", b"i"}:
        lines = data[position + 1 : position + 2 * _LONGEST_NAME].split(b"\n")[:2]
        return _asks_for(b".".join(lines), position)
    if opcode == b"\x93":
        return _asks_for(_names_before(data, position), position)
    if opcode in _RUNS:
        return RefusedError("unsafe", f"byte {position} {_RUNS[opcode]}")
    if opcode in _FOREIGN:
        return RefusedError("unsafe", f"byte {position} {_FOREIGN[opcode]}")
    if opcode[0] in _OPERAND_BYTES:
        return _operand_refused(data, position)
    return RefusedError("damaged", f"byte {position} ({opcode[0]:#04x}) is no opcode of a pickle")


def _names_before(data: Data, position: int) -> bytes:
    """Find the two texts that end at a place, as module and name, where they stand there."""
    before = data[max(position - 2 * _LONGEST_NAME, 0) : position]
    for start in range(len(before)):
        found = _TWO_TEXTS.match(before, start)
        if found:
            return b".".join(found.groups())
    return b"(of texts elsewhere in the file)"


def _asks_for(name: bytes, position: int) -> RefusedError:
    text = shown(name.decode("utf-8", errors="replace"))
    return RefusedError("unsafe", f"byte {position} asks for the global {text!r}")


def _operand_refused(data: Data, position: int) -> RefusedError:
    """Say what is wrong with an opcode that the expression knows but did not take."""
    opcode = data[position]
    if position + 1 + _OPERAND_BYTES[opcode] > len(data):
        return RefusedError("damaged", "it is cut short: it has no end")
    if opcode == ord("r"):
        index = int.from_bytes(data[position + 1 : position + 5], "little")
        return RefusedError(
            "unsafe",
            f"byte {position} stores item number {index} of a file that has {len(data)} bytes",
        )
    length = data[position + 1]
    if length > _NUMBER_BYTES:
        return RefusedError("unsafe", f"byte {position} holds an integer of {length} bytes")
    return RefusedError("damaged", "it is cut short: it has no end")
