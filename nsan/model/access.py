"""Access streams: what a kernel touches of one allocation, and in which order.

Each class says which bytes thread block ``tb`` of ``grid`` touches in step ``step``. A stream with
``write`` needs the only valid copy of its pages. Streams of phase 0 are issued at once; those of
phase 1 wait for them, as a store waits for its loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from nsan.errors import ProgramError
from nsan.model.engine import patterns


class Shape(NamedTuple):
    """What a stream needs to know of its launch: thread blocks, threads in each, page size (byte)."""

    grid: int
    threads: int
    page_bytes: int


@dataclass(frozen=True, kw_only=True)
class Access:
    """A stream of accesses to one allocation.

    Attributes
    ----------
    allocation : str
        Name of the managed allocation.
    write : bool, default False
        Stores; read and write by one thread counts as a load here and needs no second fault.
    phase : int, default 0
        0 for loads and independent stores, 1 for stores that wait for the loads.
    offset_bytes, n_bytes : int
        The part of the allocation; by default all of it.
    """

    allocation: str
    write: bool = False
    phase: int = 0
    offset_bytes: int = 0
    n_bytes: int | None = None

    pattern: ClassVar[int]
    _at_least_one: ClassVar[tuple[str, ...]] = ("element_bytes",)

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        for name in self._at_least_one:
            if getattr(self, name, 1) < 1:
                raise ProgramError(
                    f"{type(self).__name__} of {self.allocation!r} has {name} "
                    f"{getattr(self, name)}",
                    "Take 1 or more",
                )
        if self.phase not in (0, 1):
            raise ProgramError(f"Phase {self.phase} of {self.allocation!r}", "Take 0 or 1")

    @property
    def unit_bytes(self) -> int:
        """What must fit into the stream's part at least."""
        return 1

    def own_numbers(self, _shape: Shape) -> list[int]:
        """Give the numbers of the pattern (:mod:`nsan.model.engine.patterns`)."""
        raise ProgramError(f"{type(self).__name__} is no pattern", "Use one of its subclasses")

    def steps(self, _shape: Shape, _n_bytes: int) -> int:
        """Count the steps in which ``grid`` thread blocks cover the stream once."""
        return 1

    @property
    def exponent_or_zero(self) -> float:
        """The pattern's real-valued parameter."""
        return 0.0


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, kw_only=True)
class Stream(Access):
    """Each element once, neighbouring threads on neighbouring elements (a grid-stride loop).

    Attributes
    ----------
    element_bytes : int, default 4
        Bytes per thread and step.
    backward : bool, default False
        From the end to the start.
    """

    element_bytes: int = 4
    backward: bool = False
    pattern: ClassVar[int] = patterns.STREAM

    def _chunk(self, shape: Shape) -> int:
        size = shape.threads * self.element_bytes
        # One thread block alone walks through memory: a page is one step of it.
        return max(size, shape.page_bytes) if shape.grid == 1 else size

    def own_numbers(self, shape: Shape) -> list[int]:
        """Chunk, warps, direction."""
        warps = max(shape.threads // 32, 1)
        return [self._chunk(shape), warps, int(self.backward)]

    def steps(self, shape: Shape, n_bytes: int) -> int:
        """As many as the grid needs to cover all chunks."""
        return max(_ceil(_ceil(n_bytes, self._chunk(shape)), shape.grid), 1)


@dataclass(frozen=True, kw_only=True)
class Strided(Access):
    """Each thread on an element ``stride_bytes`` after its neighbour's.

    Attributes
    ----------
    stride_bytes : int
        Distance of two neighbours.
    element_bytes : int, default 4
        Bytes that one thread touches.
    """

    stride_bytes: int
    element_bytes: int = 4
    pattern: ClassVar[int] = patterns.STRIDE
    _at_least_one: ClassVar[tuple[str, ...]] = ("stride_bytes", "element_bytes")

    def own_numbers(self, shape: Shape) -> list[int]:
        """Stride, threads, element."""
        return [self.stride_bytes, shape.threads, self.element_bytes]

    def steps(self, shape: Shape, n_bytes: int) -> int:
        """As many as the grid needs to reach the end."""
        return max(_ceil(_ceil(n_bytes, self.stride_bytes), shape.threads * shape.grid), 1)


@dataclass(frozen=True, kw_only=True)
class Random(Access):
    """Elements drawn at random, all equally likely.

    Attributes
    ----------
    element_bytes : int, default 4
        Bytes that one draw touches.
    draws : int, optional
        Draws of a thread block per step; by default one per thread.
    seed : int, default 1
        Which draws.
    """

    element_bytes: int = 4
    draws: int | None = None
    seed: int = 1
    pattern: ClassVar[int] = patterns.RANDOM

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        super().__post_init__()
        if self.draws is not None and self.draws < 1:
            raise ProgramError(f"{self.draws} draws", "Take 1 or more")

    @property
    def unit_bytes(self) -> int:
        """One element."""
        return self.element_bytes

    def own_numbers(self, shape: Shape) -> list[int]:
        """Element, draws, seed."""
        return [self.element_bytes, self.draws or shape.threads, self.seed]


@dataclass(frozen=True, kw_only=True)
class Zipf(Random):
    """A gather of rows, few of them asked for often: rank k with weight k to the minus exponent.

    Attributes
    ----------
    exponent : float, default 1.1
        How uneven.
    """

    element_bytes: int = 256
    exponent: float = 1.1
    pattern: ClassVar[int] = patterns.ZIPF

    def __post_init__(self) -> None:
        """Refuse an exponent that is none."""
        super().__post_init__()
        if not 0 < self.exponent <= 10:
            raise ProgramError(f"A Zipf exponent of {self.exponent}", "Take one above 0, up to 10")

    @property
    def exponent_or_zero(self) -> float:
        """The exponent."""
        return self.exponent


@dataclass(frozen=True, kw_only=True)
class Stencil(Access):
    """A tile of a two-dimensional grid with a halo around it, one tile per thread block.

    Attributes
    ----------
    width, height : int
        Elements of the grid, row by row in memory.
    tile : int
        Elements on each side of the tile that a thread block owns.
    halo : int
        Elements around it.
    element_bytes : int, default 4
        Bytes per element.
    """

    width: int
    height: int
    tile: int
    halo: int = 0
    element_bytes: int = 4
    pattern: ClassVar[int] = patterns.STENCIL

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        super().__post_init__()
        if self.halo < 0:
            raise ProgramError(f"A halo of {self.halo}", "Take 0 or more")

    _at_least_one: ClassVar[tuple[str, ...]] = ("width", "height", "tile", "element_bytes")

    def own_numbers(self, _shape: Shape) -> list[int]:
        """Width, height, tile, halo, element."""
        return [self.width, self.height, self.tile, self.halo, self.element_bytes]


_ROLES: Final = {"A": patterns.MATMUL_A, "B": patterns.MATMUL_B, "C": patterns.MATMUL_C}


@dataclass(frozen=True, kw_only=True)
class Matrix(Access):
    """One matrix of a tiled product C = A B; thread block (x, y) makes tile (x, y) of C.

    Attributes
    ----------
    role : str
        "A", "B" or "C".
    n : int
        Rows and columns of the square matrices.
    tile : int, default 32
        Elements on each side of a tile.
    element_bytes : int, default 4
        Bytes per element.
    """

    role: str
    n: int
    tile: int = 32
    element_bytes: int = 4
    _at_least_one: ClassVar[tuple[str, ...]] = ("n", "tile", "element_bytes")

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense, and a matrix that is none of the three."""
        super().__post_init__()
        if self.role not in _ROLES:
            raise ProgramError(
                f"There is no matrix {self.role!r}", f"There are {', '.join(_ROLES)}"
            )

    def own_numbers(self, _shape: Shape) -> list[int]:
        """Columns, tile, element, tiles per row, last step."""
        across = _ceil(self.n, self.tile)
        return [self.n, self.tile, self.element_bytes, across, across - 1]

    def steps(self, _shape: Shape, _n_bytes: int) -> int:
        """One per tile along the inner dimension."""
        return _ceil(self.n, self.tile)

    @property
    def pattern(self) -> int:  # type: ignore[override]
        """The pattern of its role."""
        return _ROLES[self.role]


@dataclass(frozen=True, kw_only=True)
class Chase(Access):
    """A pointer chase: each thread block follows its own chain, one element after the other.

    Attributes
    ----------
    hops : int
        Elements of each chain.
    element_bytes : int, default 64
        Bytes of an element.
    seed : int, default 1
        Which chains.
    """

    hops: int
    element_bytes: int = 64
    seed: int = 1
    pattern: ClassVar[int] = patterns.CHASE
    _at_least_one: ClassVar[tuple[str, ...]] = ("hops", "element_bytes")

    @property
    def unit_bytes(self) -> int:
        """One element."""
        return self.element_bytes

    def own_numbers(self, _shape: Shape) -> list[int]:
        """Element, seed."""
        return [self.element_bytes, self.seed]

    def steps(self, _shape: Shape, _n_bytes: int) -> int:
        """One per hop."""
        return self.hops


@dataclass(frozen=True, kw_only=True)
class Broadcast(Access):
    """All thread blocks read the same bytes at the same time.

    Attributes
    ----------
    chunk_bytes : int, default 4096
        Bytes of one step.
    """

    chunk_bytes: int = 4096
    pattern: ClassVar[int] = patterns.BROADCAST
    _at_least_one: ClassVar[tuple[str, ...]] = ("chunk_bytes",)

    def own_numbers(self, _shape: Shape) -> list[int]:
        """Chunk, items."""
        return [self.chunk_bytes, 1]

    def steps(self, _shape: Shape, n_bytes: int) -> int:
        """As many as the part has chunks."""
        return max(_ceil(n_bytes, self.chunk_bytes), 1)
