"""Ranges of addresses that do not overlap."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(slots=True)
class Span:
    """A segment, or a mapped part of one.

    Attributes
    ----------
    va, n_bytes : int
        First byte and size.
    stream : int
        Handle of the stream.
    pool : str
        Pool.
    is_small : bool
        Of the small pool.
    """

    va: int
    n_bytes: int
    stream: int
    pool: str
    is_small: bool

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.va + self.n_bytes


class SpanSet:
    """Spans by address, none of which overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._spans: dict[int, Span] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Span]:
        return iter([self._spans[va] for va in self._starts])

    def at(self, va: int) -> Span | None:
        """Give the span that holds an address."""
        place = bisect_right(self._starts, va) - 1
        if place < 0:
            return None
        span = self._spans[self._starts[place]]
        return span if va < span.end else None

    def overlapping(self, va: int, end: int) -> list[Span]:
        """Give the spans that share a byte with ``[va, end)``, by address."""
        first = bisect_right(self._starts, va) - 1
        if first < 0 or self._spans[self._starts[first]].end <= va:
            first += 1
        last = bisect_left(self._starts, end)
        return [self._spans[start] for start in self._starts[first:last]]

    def put(self, span: Span) -> bool:
        """Add a span unless it overlaps another; tell whether it was added."""
        if self.overlapping(span.va, span.end):
            return False
        self._insert(span)
        return True

    def pop(self, va: int) -> Span | None:
        """Take out the span that begins at an address."""
        span = self._spans.pop(va, None)
        if span is not None:
            del self._starts[bisect_left(self._starts, va)]
        return span

    def cut(self, va: int, n_bytes: int) -> None:
        """Take the bytes of ``[va, va + n_bytes)`` out of every span."""
        end = va + n_bytes
        for span in self.overlapping(va, end):
            self.pop(span.va)
            if span.va < va:
                self._insert(replace(span, n_bytes=va - span.va))
            if end < span.end:
                self._insert(replace(span, va=end, n_bytes=span.end - end))

    def add(self, span: Span) -> None:
        """Add a span and join it with those of its stream that it overlaps or touches.

        Of another stream it takes the shared bytes away. The first byte's span gives the pool.
        """
        whole = replace(span)
        for other in self.overlapping(span.va - 1, span.end + 1):
            if other.stream != span.stream:
                continue
            self.pop(other.va)
            end = max(whole.end, other.end)
            whole.va = min(whole.va, other.va)
            whole.n_bytes = end - whole.va
            whole.pool, whole.is_small = other.pool, other.is_small or whole.is_small
        self.cut(whole.va, whole.n_bytes)
        if whole.n_bytes > 0:
            self._insert(whole)

    def _insert(self, span: Span) -> None:
        self._starts.insert(bisect_left(self._starts, span.va), span.va)
        self._spans[span.va] = span
