"""Which of many things holds an address, where later ones take the place of earlier ones."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

NOBODY = None


class Piece(NamedTuple):
    """Addresses ``[low, high)`` and who holds them; None is nobody."""

    low: int
    high: int
    owner: Any | None


class AddressMap:
    """Owners of addresses.

    It keeps the borders between owners, so it stays as small as what is held, however often that changed.
    """

    def __init__(self) -> None:
        self._starts: list[int] = [-1]
        self._owners: list[Any | None] = [NOBODY]

    def owner(self, va: int) -> Any | None:
        """Say who holds an address."""
        return self._owners[bisect_right(self._starts, va) - 1]

    def pieces(self, low: int, high: int) -> list[Piece]:
        """List who holds the addresses of a range, in order; together the pieces are the range."""
        first = bisect_right(self._starts, low) - 1
        last = bisect_left(self._starts, high)
        edges = [low, *self._starts[first + 1 : last], high]
        owners = self._owners[first:last]
        return [Piece(edges[i], edges[i + 1], owner) for i, owner in enumerate(owners)]

    def give(self, low: int, high: int, owner: Any | None) -> list[Piece]:
        """Give a range to an owner, and list who held it before."""
        before = self.pieces(low, high)
        first = bisect_left(self._starts, low)
        last = bisect_left(self._starts, high)
        after = self._owners[last - 1] if last else NOBODY
        starts, owners = [low], [owner]
        if last == len(self._starts) or self._starts[last] != high:
            starts.append(high)
            owners.append(after)
        self._starts[first:last] = starts
        self._owners[first:last] = owners
        return before
