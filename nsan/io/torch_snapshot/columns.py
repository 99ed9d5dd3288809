"""Columns out of lists of dicts, one call of C per column. Standard library only.

Cells that hold something else than they should are read in the sensible way where there is one, else
as null, and counted. All work is taken from one allowance, the size of the file: what a file holds
once cannot be asked for a million times by naming it a million times.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, Final

from nsan.io.torch_snapshot.refusal import RefusedError, kind_of, shown

Row = dict[Any, Any]

NO_TEXT: Final = -1
MOST_BYTES: Final = 1 << 47
"""No size of memory is larger: so much address space has a process."""

MOST_ASKED: Final = 1 << 62
"""A request that failed may be larger than any memory; two of these still fit in 64 bits."""

_NONE: Final = type(None)
_LONGEST_TEXT: Final = 10_000
_MOST_NAMES: Final = 40
_OTHERS: Final = "(others)"


class Allowance:
    """How many items may still be looked at; one for each byte of the file."""

    def __init__(self, n_bytes: int) -> None:
        self._left = n_bytes

    def has(self, n: int) -> bool:
        """Say whether so many items may still be looked at."""
        return n <= self._left

    def take(self, n: int, where: str) -> None:
        """Spend some.

        Raises
        ------
        RefusedError
            If the file does not have the bytes for so many items: it names the same ones again and again.
        """
        self._left -= n
        if self._left < 0:
            raise RefusedError(
                "unsafe", f"{where} repeats the same items more often than the file has bytes"
            )


class Notes:
    """What was met and not expected, counted by place and name."""

    def __init__(self) -> None:
        self.unknown_keys: Counter[str] = Counter()
        self.unknown_actions: Counter[str] = Counter()
        self.odd_cells: Counter[str] = Counter()
        self.keys_seen: dict[str, set[str]] = {}

    def odd(self, place: str, key: str, n: int = 1) -> None:
        """Count cells that do not hold what they should."""
        if n:
            self.odd_cells[f"{place}.{key}"] += n

    @staticmethod
    def add(counter: Counter[str], name: object, n: int) -> None:
        """Count a name that the file chose; beyond 40 different ones under one name."""
        text = shown(name) if isinstance(name, str) else f"({type(name).__name__})"
        counter[text if text in counter or len(counter) < _MOST_NAMES else _OTHERS] += n


class Texts:
    """Distinct texts, in order of appearance; the end of very long ones is cut."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._index)

    def index(self, text: str) -> int:
        """Return the number of a text."""
        return self._index.setdefault(text, len(self._index))

    def all(self) -> list[str]:
        """Return them in order, as texts that UTF-8 can hold."""
        return [text[:_LONGEST_TEXT].encode("utf-8", "replace").decode() for text in self._index]

    def n_cut(self) -> int:
        """Count those that are not whole."""
        return sum(len(text) > _LONGEST_TEXT for text in self._index)


class Column:
    """Numbers, and the places where there is none."""

    def __init__(self, code: str) -> None:
        self.values = array(code)
        self.nulls = array("q")

    def extend(self, values: list[int], nulls: Iterable[int] = ()) -> None:
        """Append cells; those at ``nulls`` have no value.

        Raises
        ------
        OverflowError
            If one does not fit; then none is appended.
        """
        more, offset = array(self.values.typecode, values), len(self.values)
        self.values.extend(more)
        self.nulls.extend(offset + at for at in nulls)

    def clear(self, places: Iterable[int]) -> None:
        """Take the values at some places away."""
        cleared = {*self.nulls, *places}
        for at in cleared:
            self.values[at] = 0
        self.nulls = array("q", sorted(cleared))


def rows_of(value: object, where: str) -> list[Row]:
    """Return a list of dicts.

    Raises
    ------
    RefusedError
        If it is none; the text names the first element that is no dict.
    """
    if type(value) is not list:
        raise RefusedError("other", f"{where} is {kind_of(value)} where a list must be")
    if not set(map(type, value)) <= {dict}:
        at = next(i for i, row in enumerate(value) if type(row) is not dict)
        raise RefusedError("other", f"{where}[{at}] is {kind_of(value[at])} where a dict must be")
    return value


def note_keys(
    rows: Sequence[Row], place: str, known: frozenset[str], notes: Notes, allowance: Allowance
) -> None:
    """Note which known keys the rows have, and count those that are not known."""
    allowance.take(sum(map(len, rows)), place)
    seen = notes.keys_seen.setdefault(place, set())
    for keys, n in Counter(map(tuple, rows)).items():
        for key in keys:
            if type(key) is str and key in known:
                seen.add(key)
            else:
                name = f"{place}.{key}" if type(key) is str else f"{place}.({type(key).__name__})"
                Notes.add(notes.unknown_keys, name, n)


def cells(rows: Sequence[Row], key: str) -> list[Any]:
    """Return the values of a key; None where a row lacks it."""
    return list(map(dict.get, rows, repeat(key)))


def has(rows: Sequence[Row], key: str) -> bool:
    """Say whether any row has a key."""
    return any(key in row for row in rows)


def address(value: object) -> int | None:
    """Read an address or a handle; one that was written as signed has its bits."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return value & ((1 << 64) - 1)
    return None


def size(value: object) -> int | None:
    """Read a number of bytes of memory: whole, not negative, at most 2^47."""
    return _bytes(value, MOST_BYTES)


def asked(value: object) -> int | None:
    """Read a number of bytes that may have been asked for in vain: at most 2^62."""
    return _bytes(value, MOST_ASKED)


def _bytes(value: object, most: int) -> int | None:
    number = signed(value)
    return number if number is not None and 0 <= number <= most else None


def signed(value: object) -> int | None:
    """Read a whole number of 64 bits."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value
    return None


_MOST: Final[dict[Callable[[object], int | None], int]] = {size: MOST_BYTES, asked: MOST_ASKED}


def _all_within(values: list[int], most: int) -> bool:
    return min(values, default=0) >= 0 and max(values, default=0) <= most


def numbers(
    column: Column,
    rows: Sequence[Row],
    key: str,
    read: Callable[[object], int | None],
    odd: Callable[[int], None],
) -> None:
    """Append the cells of one key to a column of whole numbers.

    Parameters
    ----------
    column : Column
        Of code "Q" for addresses, else "q".
    rows : sequence of dict
        One for each cell.
    key : str
        What is read; a row that lacks it has a null.
    read : callable
        Reads one cell; None if it has no sensible reading.
    odd : callable
        Takes how many cells did not hold what they should.
    """
    values = cells(rows, key)
    kinds = set(map(type, values))
    empty = [at for at, value in enumerate(values) if value is None] if _NONE in kinds else []
    for at in empty:
        values[at] = 0
    n_odd = sum(key in rows[at] for at in empty)
    most = _MOST.get(read)
    if kinds <= {int, _NONE} and (most is None or _all_within(values, most)):
        try:
            column.extend(values, empty)
        except OverflowError:
            pass
        else:
            odd(n_odd)
            return
    found = [read(value) for value in values]
    unread = [at for at, got in enumerate(found) if got is None]
    column.extend([got or 0 for got in found], sorted({*empty, *unread}))
    odd(n_odd + sum(type(v) is not int or v != got for v, got in zip(values, found, strict=True)))


def texts(rows: Sequence[Row], key: str, table: Texts) -> tuple[array[int], int]:
    """Give the number of each cell's text, -1 for none, and how many cells hold no text."""
    values = cells(rows, key)
    n_odd = 0
    if not set(map(type, values)) <= {str, _NONE}:
        n_odd = sum(type(value) not in {str, _NONE} for value in values)
        values = [value if type(value) is str else None for value in values]
    index = {text: NO_TEXT if text is None else table.index(text) for text in dict.fromkeys(values)}
    return array("q", map(index.__getitem__, values)), n_odd


def labels(
    rows: Sequence[Row], key: str, codes: dict[str, int], other: int
) -> tuple[array[int], Counter[object]]:
    """Give the code of each cell's label, and count the labels that have none; None: no text."""
    values = cells(rows, key)
    if not set(map(type, values)) <= {str}:
        values = [value if type(value) is str else None for value in values]
    found = array("B", [codes.get(value, other) for value in values])
    unknown: Counter[object] = Counter()
    if other in found:
        unknown.update(value for value in values if value not in codes)
    return found, unknown
