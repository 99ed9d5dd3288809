"""What no machine can have: sizes beyond any address space, GPUs beyond any number. Standard library only.

An item that cannot be is left out, a value that cannot be is taken away, and both are counted. What
is left can be summed in 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from nsan.io.torch_snapshot.columns import (
    MOST_ASKED,
    MOST_BYTES,
    Column,
    Notes,
    Row,
    address,
    cells,
    size,
)
from nsan.io.torch_snapshot.refusal import RefusedError

MOST_GPUS: Final = 128
"""PyTorch is compiled for at most 120 (C10_COMPILE_TIME_MAX_GPUS)."""

TOP: Final = 1 << 64
_NUMBERS: Final = frozenset({int, float})


def impossible_items(rows: Sequence[Row], place: str, size_key: str, notes: Notes) -> set[int]:
    """Find segments or blocks that are larger than any memory, or reach past the last address.

    Parameters
    ----------
    rows : sequence of dict
        With ``address``, which may be missing.
    place, size_key : str
        Under which names they are counted.
    notes : Notes
        Counts them.

    Returns
    -------
    set of int
        Identities of the rows: one that stands at many places is the same at each.
    """
    if _all_small(rows, size_key):
        return set()
    found = set()
    for row in rows:
        key = _impossible_key(row, size_key)
        if key is not None:
            notes.odd(place, key)
            found.add(id(row))
    return found


def _all_small(rows: Sequence[Row], size_key: str) -> bool:
    """Say whether all is as it nearly always is, without a look at each row."""
    sizes, addresses = cells(rows, size_key), cells(rows, "address")
    if not (set(map(type, sizes)) <= {int} and max(sizes, default=0) <= MOST_BYTES):
        return False
    kinds = set(map(type, addresses))
    if kinds <= {int}:
        return min(addresses, default=0) >= 0 and max(addresses, default=0) <= TOP - MOST_BYTES
    return kinds == {type(None)}


def _impossible_key(row: Row, size_key: str) -> str | None:
    n_bytes, va = row.get(size_key), address(row.get("address"))
    if type(n_bytes) in _NUMBERS and n_bytes > MOST_BYTES:  # type: ignore[operator]
        return size_key
    past = va is not None and va + (size(n_bytes) or 0) > TOP
    return "address" if past else None


def of_possible_gpus(rows: list[Row], notes: Notes) -> list[Row]:
    """Leave out segments whose GPU has a number that PyTorch does not give, and count them.

    Raises
    ------
    RefusedError
        If the segments are of more GPUs than PyTorch knows.
    """
    devices: list[Any] = cells(rows, "device")
    numbers = {device for device in devices if type(device) in _NUMBERS}
    check_gpus(len(numbers), "segments")
    if all(0 <= number < MOST_GPUS for number in numbers):
        return rows
    kept = [
        row
        for row, device in zip(rows, devices, strict=True)
        if type(device) not in _NUMBERS or 0 <= device < MOST_GPUS
    ]
    notes.odd("segments", "device", len(rows) - len(kept))
    return kept


def check_gpus(n: int, what: str) -> None:
    """Refuse more GPUs than PyTorch knows."""
    if n > MOST_GPUS:
        text = f"it has {what} of {n} GPUs, and PyTorch knows at most {MOST_GPUS}"
        raise RefusedError("unsafe", text)


def check_sum(sizes: Iterable[int], what: str) -> None:
    """Refuse sizes whose sum would not fit in 64 bits."""
    if sum(sizes) > MOST_ASKED:
        text = f"the sizes of its {what} add up to more than any program could ask for (2^62 byte)"
        raise RefusedError("unsafe", text)


def impossible_sizes(va: Column, n_bytes: Column, done: Sequence[bool]) -> list[int]:
    """Find entries of a history that name a size beyond any memory.

    Parameters
    ----------
    va, n_bytes : Column
        Of each entry.
    done : sequence of bool
        False: the entry is of a request that failed, which may have asked for any amount.
    """
    large = []
    if max(n_bytes.values, default=0) > MOST_BYTES:
        pairs = zip(n_bytes.values, done, strict=True)
        large = [at for at, (n, is_done) in enumerate(pairs) if n > MOST_BYTES and is_done]
    if max(va.values, default=0) > TOP - MOST_ASKED:
        ends = map(int.__add__, va.values, n_bytes.values)
        large += [at for at, end in enumerate(ends) if end > TOP]
    return sorted(set(large))
