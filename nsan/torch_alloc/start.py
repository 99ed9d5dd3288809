"""Set up the allocator as it was before a history."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

from nsan.torch_alloc.blocks import FreeList, State
from nsan.torch_alloc.follower import Follower
from nsan.torch_alloc.history import Held
from nsan.torch_alloc.history import State as RecordedState
from nsan.torch_alloc.spans import Span, SpanSet

Piece = tuple[int, State, int]
"""Size, state and requested bytes of a block."""


def set_up(follower: Follower, state: RecordedState, reservations: SpanSet) -> None:
    """Bring the machine of a follower into a state.

    The size of a block in use is recorded, or follows from its request: what would be too small to split
    off belongs to it. What lies between blocks in use is one free block.

    Parameters
    ----------
    follower : Follower
        With an empty machine.
    state : State
        What was there; blocks in use outside every segment get a segment of their own, and are counted.
    reservations : SpanSet
        Addresses of expandable segments.
    """
    starting = _Starting(follower, state)
    starting.ordinary()
    starting.expandable(reservations)
    starting.orphans()
    for va, block in follower.held.items():
        held = state.held.get(va)
        if held is not None and held.row >= 0:
            follower.books.state_rows[block.tag] = held.row


class _Starting:
    def __init__(self, follower: Follower, state: RecordedState) -> None:
        self._follower = follower
        self._machine = follower.machine
        self._state = state
        self._addresses = sorted(state.held)
        self._placed: set[int] = set()

    def ordinary(self) -> None:
        """Set up the ordinary segments."""
        for span in self._state.segments:
            home = self._machine.home(span.stream, span.pool, is_small=span.is_small)
            pieces = self._pieces(span.va, span.end, home)
            self._follower.adopt(self._machine.restore(span.va, home, pieces))

    def expandable(self, reservations: SpanSet) -> None:
        """Set up the expandable segments of which something is mapped."""
        for span in reservations:
            mapped = self._state.mapped.overlapping(span.va, span.end)
            if not mapped:
                continue
            if self._machine.segments_in(span.va, span.end):
                self._state.n_contradictions += 1
                continue
            home = self._machine.home(span.stream, span.pool, is_small=span.is_small)
            pieces: list[Piece] = []
            at = span.va
            for first, end in _joined(mapped, span):
                if first > at:
                    pieces.append((first - at, "unmapped", 0))
                pieces += self._pieces(first, end, home)
                at = end
            if at < span.end:
                pieces.append((span.end - at, "unmapped", 0))
            self._follower.adopt(self._machine.restore(span.va, home, pieces, is_expandable=True))

    def orphans(self) -> None:
        """Hold what lies in no segment."""
        for va in self._addresses:
            if va not in self._placed:
                held = self._state.held[va]
                self._state.n_contradictions += 1
                self._follower.adopt_orphan(va, held.requested_bytes, is_pending=held.is_pending)

    def _pieces(self, start: int, end: int, home: FreeList) -> list[Piece]:
        """Fill a range with the blocks in use and the free ones between them."""
        first = bisect_left(self._addresses, start)
        last = bisect_left(self._addresses, end)
        inside = self._addresses[first:last]
        pieces: list[Piece] = []
        at = start
        for va, following in pairwise([*inside, end]):
            held = self._state.held[va]
            n_bytes = self._size(held, following - va, home)
            if va > at:
                pieces.append((va - at, "free", 0))
            use: State = "pending" if held.is_pending else "allocated"
            pieces.append((n_bytes, use, min(held.requested_bytes, n_bytes)))
            self._placed.add(va)
            at = va + n_bytes
        if at < end:
            pieces.append((end - at, "free", 0))
        return pieces

    def _size(self, held: Held, room: int, home: FreeList) -> int:
        """Give the size of a block in use that has so much room up to the next one."""
        if held.n_bytes is not None:
            return min(held.n_bytes, room)
        rounded = self._machine.rounded(held.requested_bytes)
        rest = room - rounded
        is_split = rest >= home.min_rest_bytes and rounded < home.max_split_bytes
        return rounded if is_split else room


def _joined(mapped: list[Span], within: Span) -> list[tuple[int, int]]:
    """Give the mapped ranges of a reservation, those that touch as one."""
    joined: list[tuple[int, int]] = []
    for part in mapped:
        first, end = max(part.va, within.va), min(part.end, within.end)
        if joined and joined[-1][1] == first:
            first, _ = joined.pop()
        joined.append((first, end))
    return joined
