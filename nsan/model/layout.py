"""Where allocations lie: 2 MiB blocks, small ones packed into shared blocks, freed space used again.

As in the captures: allocations of 2 MiB and more start on a block of their own; smaller ones follow
each other at 512 B inside a block while they fit (three arrays of 16 KiB share one page of 64 KiB).
The driver's range is taken to be whole blocks: in the hotspot trace of 128 x 128 floats 128 KiB come with
an array of 64 KiB that is the last of its block. For large arrays that is an assumption: no capture has
one that ends inside a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nsan.errors import ProgramError
from nsan.model.program import Allocate, DeviceAllocate, Free, Operation
from nsan.units import GIB
from nsan.uvm.constants import VA_BLOCK_BYTES

_ALIGNMENT = 512
MAX_BYTES = 256 * GIB
"""Most managed memory of a program: beyond it the model's own arrays would not fit a workstation."""


@dataclass(frozen=True)
class Place:
    """One allocation's place.

    Attributes
    ----------
    name : str
        The allocation.
    start : int
        First byte in the model's memory.
    n_bytes : int
        Size asked for.
    """

    name: str
    start: int
    n_bytes: int


@dataclass
class _Space:
    """Free runs of blocks below a frontier that grows up or down."""

    descending: bool
    low: int = 0
    high: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)

    def take(self, n_blocks: int) -> int:
        """Take the first run that fits, or move the frontier; give its first block."""
        for i, (first, n) in enumerate(self.free):
            if n >= n_blocks:
                self.free[i : i + 1] = [(first + n_blocks, n - n_blocks)] if n > n_blocks else []
                return first
        if self.descending:
            self.low -= n_blocks
            return self.low
        self.high += n_blocks
        return self.high - n_blocks

    def give(self, first: int, n_blocks: int) -> None:
        """Give a run back, joined with its neighbours."""
        runs = sorted([*self.free, (first, n_blocks)])
        joined: list[tuple[int, int]] = []
        for start, n in runs:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + n)
            else:
                joined.append((start, n))
        self.free = joined


class Layout:
    """The places of all allocations of a program, in the order of its operations.

    Attributes
    ----------
    places : list of Place
        One per ``Allocate``, in order.
    freed : list of (int, int)
        One per ``Free`` of a managed allocation, in order: byte range of the blocks that go with it,
        empty while another allocation still uses them.
    n_bytes : int
        Size of the memory that holds all places.
    """

    def __init__(self, operations: Sequence[Operation] = (), *, descending: bool = False) -> None:
        self._space = _Space(descending)
        self._users: dict[int, set[str]] = {}
        self._runs: dict[str, tuple[int, int]] = {}
        self._device: set[str] = set()
        self._open: tuple[int, int] | None = None
        self.places: list[Place] = []
        self.freed: list[tuple[int, int]] = []
        for operation in operations:
            self.add(operation)
        self._normalise()

    def add(self, operation: Operation) -> None:
        """Take one more operation into account; what is neither allocation nor free changes nothing.

        A layout that grows upwards gives final places at once; one that grows downwards only when it
        is made of all its operations.
        """
        if isinstance(operation, Allocate):
            self._allocate(operation)
        elif isinstance(operation, DeviceAllocate):
            self._device.add(operation.name)
        elif isinstance(operation, Free) and operation.name in self._device:
            self._device.discard(operation.name)
        elif isinstance(operation, Free):
            self._free(operation.name)

    def _allocate(self, operation: Allocate) -> None:
        if operation.n_bytes <= 0:
            raise ProgramError(
                f"Allocation {operation.name!r} has {operation.n_bytes} byte", "Give it one or more"
            )
        if operation.name in self._runs or operation.name in self._device:
            raise ProgramError(
                f"Allocation {operation.name!r} is made twice", "Free the first, or rename one"
            )
        size = -(-operation.n_bytes // _ALIGNMENT) * _ALIGNMENT
        if size < VA_BLOCK_BYTES:
            start = self._pack(size)
            run = (start // VA_BLOCK_BYTES, 1)
        else:
            n_blocks = -(-size // VA_BLOCK_BYTES)
            run = (self._space.take(n_blocks), n_blocks)
            start = run[0] * VA_BLOCK_BYTES
        self._runs[operation.name] = run
        self._users.setdefault(run[0], set()).add(operation.name)
        self.places.append(Place(operation.name, start, operation.n_bytes))
        if self._size() > MAX_BYTES:
            raise ProgramError(
                f"The program holds more than {MAX_BYTES // GIB} GiB", "Make its arrays smaller"
            )

    def _size(self) -> int:
        return (self._space.high - self._space.low) * VA_BLOCK_BYTES

    def _pack(self, size: int) -> int:
        """Put a small allocation behind the last one, or into a new block."""
        if self._open is None or self._open[1] + size > VA_BLOCK_BYTES:
            self._open = (self._space.take(1), 0)
        block, used = self._open
        self._open = (block, used + size)
        return block * VA_BLOCK_BYTES + used

    def _free(self, name: str) -> None:
        if name not in self._runs:
            raise ProgramError(
                f"Free of {name!r}, which is not allocated", "Allocate it before, free it once"
            )
        first, n_blocks = self._runs.pop(name)
        users = self._users[first]
        users.discard(name)
        if users:
            self.freed.append((0, 0))
            return
        if self._open is not None and self._open[0] == first:
            self._open = None
        self._space.give(first, n_blocks)
        self.freed.append((first * VA_BLOCK_BYTES, (first + n_blocks) * VA_BLOCK_BYTES))

    def _normalise(self) -> None:
        """Count from the lowest block."""
        shift = -self._space.low * VA_BLOCK_BYTES
        self.n_bytes = max(self._size(), VA_BLOCK_BYTES)
        self.places = [Place(p.name, p.start + shift, p.n_bytes) for p in self.places]
        self.freed = [(a + shift, b + shift) if b > a else (0, 0) for a, b in self.freed]
