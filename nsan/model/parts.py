"""What a change of a program is about: parts of managed allocations, found by what a trace calls them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from nsan.errors import NsanError
from nsan.model.access import Access
from nsan.model.layout import Layout
from nsan.model.program import Advise, Allocate, Free, HostTouch, Prefetch, Program
from nsan.model.recording import BASE_VA


class ChangeError(NsanError):
    """A change cannot be made to a program; ``reason`` says why, in a sentence."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True)
class Spot:
    """What a change is about, as a trace names it.

    Attributes
    ----------
    number : int, optional
        Managed allocation by the order in which they were made, from 0.
    va, n_bytes : int, optional
        Bytes by address: all allocations that ever lay there, or of the numbered one the part. Without any of the
        three it is about all managed memory.
    kernel : str
        Launches of the kernel of this name; "": every launch.
    """

    number: int | None = None
    va: int | None = None
    n_bytes: int | None = None
    kernel: str = ""


class Part(NamedTuple):
    """A part of an allocation, and the operations between which it is alive."""

    name: str
    offset_bytes: int
    n_bytes: int | None
    first: int
    last: int

    def is_alive(self, operation: int) -> bool:
        """Say whether an operation of the program, by its number, can use it."""
        return self.first < operation < self.last

    def meets(self, offset_bytes: int, n_bytes: int | None) -> bool:
        """Say whether another part of the allocation shares a byte with it."""
        return (n_bytes is None or self.offset_bytes < offset_bytes + n_bytes) and (
            self.n_bytes is None or offset_bytes < self.offset_bytes + self.n_bytes
        )


class Parts:
    """Parts that a change is about, found by what an operation uses."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._by_name: dict[str, list[Part]] = {}
        for part in parts:
            self._by_name.setdefault(part.name, []).append(part)

    def of(self, operation: int, *uses: Access | Advise | HostTouch | Prefetch) -> list[Part]:
        """Give the parts that are alive at an operation and that it uses, each once."""
        found = (
            part
            for use in uses
            for part in self._by_name.get(use.allocation, ())
            if part.is_alive(operation) and part.meets(use.offset_bytes, use.n_bytes)
        )
        return list(dict.fromkeys(found))

    def drop(self, part: Part) -> None:
        """Forget a part."""
        self._by_name[part.name].remove(part)


class _Life(NamedTuple):
    name: str
    va: int
    n_bytes: int
    first: int
    last: int


def parts_of(program: Program, spot: Spot) -> list[Part]:
    """Find what a change is about.

    Parameters
    ----------
    program : Program
        The program of the trace.
    spot : Spot
        What the trace calls it.

    Returns
    -------
    list of Part
        In the order of allocation, at least one; a part without a size is all that follows its offset.

    Raises
    ------
    ChangeError
        If no managed allocation of the program is meant.
    """
    lives = _lives(program)
    if spot.number is not None:
        # A number that does not fit the address is of another count: then the address tells.
        own = lives[spot.number : spot.number + 1]
        lives = [each for each in own if spot.va is None or _covers(each, spot.va)] or lives
    found = [part for each in lives if (part := _part(each, spot)) is not None]
    if not found:
        raise ChangeError("The program has no managed allocation at that address.")
    return found


def _covers(life: _Life, va: int) -> bool:
    return life.va <= va < life.va + life.n_bytes


def _part(life: _Life, spot: Spot) -> Part | None:
    """Cut what is meant out of an allocation; None if nothing of it is."""
    start, end = life.va, life.va + life.n_bytes
    if spot.va is not None:
        start = max(start, spot.va)
        end = min(end, end if spot.n_bytes is None else spot.va + spot.n_bytes)
        if start >= end or (spot.n_bytes is None and not _covers(life, spot.va)):
            return None
    size = None if end == life.va + life.n_bytes else end - start
    return Part(life.name, start - life.va, size, life.first, life.last)


def _lives(program: Program) -> list[_Life]:
    """List the managed allocations with their addresses and the operations that begin and end them."""
    operations = program.operations
    places = iter(Layout(operations, descending=program.descending).places)
    ends: dict[str, int] = {}
    last: list[tuple[int, Allocate, int]] = []
    for i in reversed(range(len(operations))):
        operation = operations[i]
        if isinstance(operation, Free):
            ends[operation.name] = i
        elif isinstance(operation, Allocate):
            last.append((i, operation, ends.pop(operation.name, len(operations))))
    return [
        _Life(made.name, BASE_VA + next(places).start, made.n_bytes, first, end)
        for first, made, end in reversed(last)
    ]
