"""The process that reads a pickle: limited first, then it reads, then it ends. Standard library only.

The file is its standard input, the columns go to its standard output: the length of a description
in JSON (8 bytes, lowest first), the description, the columns one behind the other.
"""

from __future__ import annotations

import gc
import io
import json
import mmap
import os
import pickle
import sys
import zlib
from array import array
from collections.abc import Callable
from typing import Any, Final, NoReturn

from nsan.io.torch_snapshot.columns import Column
from nsan.io.torch_snapshot.flatten import Flattener
from nsan.io.torch_snapshot.limits import (
    allowed_seconds,
    allowed_unpacked_bytes,
    limit,
    limit_for,
    limit_seconds,
    loading_seconds,
)
from nsan.io.torch_snapshot.opcodes import Data, check
from nsan.io.torch_snapshot.paths import KEEP_PATHS
from nsan.io.torch_snapshot.refusal import RefusedError, shown
from nsan.io.torch_snapshot.sniff import GZIP_MAGIC

_STEP_BYTES: Final = 1 << 20
_BUFFER_BYTES: Final = 1 << 16
_DAMAGE: Final = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    TypeError,
    ValueError,
)
"""What the unpickler raises on a pickle that is not well formed."""


class PlainUnpickler(pickle.Unpickler):
    """Loads containers, texts and numbers; whatever else a file asks for is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse every global."""
        asked = shown(f"{module}.{name}")
        raise RefusedError("unsafe", f"it asks for the global {asked!r}")

    def persistent_load(self, _pid: object) -> NoReturn:
        """Refuse every object outside the file."""
        raise RefusedError("unsafe", "it names an object outside the file")


def _content() -> Data:
    """Map the file into memory, or unpack it."""
    size = os.fstat(0).st_size
    limit_for(size)
    data = mmap.mmap(0, 0, access=mmap.ACCESS_READ)
    if data[:2] != GZIP_MAGIC:
        return data
    most = allowed_unpacked_bytes(size)
    limit_for(most)
    unpacked = _unpacked(data, most)
    limit_for(len(unpacked))
    return unpacked


def _unpacked(data: mmap.mmap, most: int) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    parts, n = [], 0
    try:
        for at in range(0, len(data), _STEP_BYTES):
            parts.append(unpacker.decompress(data[at : at + _STEP_BYTES], most + 1 - n))
            n += len(parts[-1])
            if n > most:
                text = f"its gzip data unpacks to more than {most >> 20} MiB; unpack it first"
                raise RefusedError("unsafe", text)
    except zlib.error as error:
        raise RefusedError("damaged", "its gzip data is corrupt") from error
    if not unpacker.eof:
        raise RefusedError("damaged", "its gzip data is cut short")
    if unpacker.unused_data:
        raise RefusedError("damaged", "something else is behind its gzip data")
    return b"".join(parts)


def _loaded(data: Data) -> object:
    raw = io.BytesIO(data) if isinstance(data, bytes) else io.FileIO(0, closefd=False)
    raw.seek(0)
    try:
        return PlainUnpickler(io.BufferedReader(raw, _BUFFER_BYTES)).load()
    except _DAMAGE as error:
        raise RefusedError("damaged", f"it is no whole pickle ({shown(str(error))})") from error


def read(
    data: Data,
    *,
    keep_paths: bool = False,
    before_loading: Callable[[], None] = lambda: None,
    after_loading: Callable[[], None] = lambda: None,
) -> list[bytes | memoryview]:
    """Read a pickle; return the answer in parts.

    Parameters
    ----------
    data : bytes or mmap
        The whole pickle, which is also what the standard input has if it is mapped.
    keep_paths : bool, default False
        Keep the paths of source files whole.
    before_loading, after_loading : callable
        Called around the unpickling, to hold it to a time of its own.

    Raises
    ------
    RefusedError
        If it is no snapshot, is damaged, or is more than plain data.
    """
    protocol = check(data)
    flattener = Flattener(len(data), keep_paths=keep_paths)
    before_loading()
    content = _loaded(data)
    after_loading()
    flattener.run(content)
    about: list[tuple[str, str, int, list[int] | None]] = []
    parts: list[bytes | memoryview] = []
    for name, column in flattener.columns.items():
        values = column.values if isinstance(column, Column) else column
        nulls = column.nulls if isinstance(column, Column) else array("q")
        whole = len(nulls) == len(values) > 0
        about.append((name, values.typecode, len(values), None if whole else nulls.tolist()))
        parts.append(memoryview(values).cast("B"))
    facts = {
        **flattener.facts,
        "protocol": protocol,
        "n_bytes": len(data),
        "columns": about,
        "texts": flattener.texts.all(),
    }
    return [_head(facts), *parts]


def _head(facts: dict[str, Any]) -> bytes:
    text = json.dumps(facts, ensure_ascii=False).encode()
    return len(text).to_bytes(8, "little") + text


def main() -> NoReturn:
    """Read the standard input and answer on the standard output."""
    gc.disable()
    limit("RLIMIT_CORE", 0)
    try:
        data = _content()
        for what in ("RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC"):
            limit(what, 0)
        n_bytes = len(data)
        parts = read(
            data,
            keep_paths=KEEP_PATHS in sys.argv,
            before_loading=lambda: limit_seconds(loading_seconds(n_bytes)),
            after_loading=lambda: limit_seconds(allowed_seconds(n_bytes)),
        )
    except RefusedError as error:
        parts = [_head({"refused": error.kind, "text": str(error)})]
    except MemoryError:
        parts = [_head({"refused": "memory", "text": ""})]
    for part in parts:
        sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()
    # Taking apart what was loaded would take long, and could recurse as deep as it is nested.
    os._exit(0)
