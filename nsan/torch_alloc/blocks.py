"""What the caching allocator keeps: segments, the blocks in them, and the ordered free lists.

A free list is ordered by (size, tie-break) as PyTorch's ``BlockPool::blocks``; PyTorch keeps one set for
all streams of a pool and puts the stream first in the key, here each stream has a list of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final, Literal

from nsan.errors import UsageError
from nsan.torch_alloc.settings import TieBreak

State = Literal["allocated", "pending", "free", "unmapped", "gone"]

_ADDRESS_BITS: Final = 64


class Segment:
    """What the allocator took from the driver in one piece.

    Attributes
    ----------
    va : int
        First byte.
    n_bytes : int
        Size; of an expandable segment the reserved addresses, of which only parts are mapped.
    stream : int
        Handle of the stream that it belongs to; its blocks serve no other.
    pool : str
        Pool, as ``0,0``.
    is_small : bool
        Of the small pool.
    serial : int
        Its place in the order of creation.
    is_expandable : bool
        A reservation of addresses that is mapped bit by bit.
    first : Block
        The block at its base.
    home : FreeList
        Where its free blocks are listed.
    tag : int
        A note of the caller's; -1 at first. The allocator never reads it.
    """

    __slots__ = (
        "first",
        "home",
        "is_expandable",
        "is_small",
        "n_bytes",
        "pool",
        "serial",
        "stream",
        "tag",
        "va",
    )

    first: Block

    def __init__(
        self, va: int, n_bytes: int, home: FreeList, *, serial: int, is_expandable: bool = False
    ) -> None:
        self.va = va
        self.n_bytes = n_bytes
        self.home = home
        self.stream = home.stream
        self.pool = home.pool.name
        self.is_small = home.pool.is_small
        self.serial = serial
        self.is_expandable = is_expandable
        self.tag = -1

    def __repr__(self) -> str:
        return f"<Segment {self.va:#x} {self.n_bytes} byte, stream {self.stream}, pool {self.pool}>"

    def blocks(self) -> Iterator[Block]:
        """Give every block, lowest address first, with those that are not mapped."""
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.next


class Block:
    """A part of a segment: a tensor's, or free.

    Attributes
    ----------
    va : int
        First byte.
    n_bytes : int
        Size.
    requested_bytes : int
        What was asked for; stale when the block is free.
    segment : Segment
        The segment that it is a part of.
    state : str
        "allocated", "pending" (freed, but another stream still uses it), "free", "unmapped"
        (addresses of an expandable segment without memory behind them), or "gone" (merged into a
        neighbour, or its segment was released).
    serial : int
        Its place in the order of creation of all blocks.
    prev, next : Block, optional
        Neighbours in the segment.
    key : int
        Its place in the free list that it is in.
    inserted_at : int
        Searches in the pool when it became free: the age that garbage collection goes by.
    tag : int
        A note of the caller's; -1 at first. The allocator never reads it.
    """

    __slots__ = (
        "inserted_at",
        "key",
        "n_bytes",
        "next",
        "prev",
        "requested_bytes",
        "segment",
        "serial",
        "state",
        "tag",
        "va",
    )

    def __init__(self, va: int, n_bytes: int, segment: Segment, serial: int) -> None:
        self.va = va
        self.n_bytes = n_bytes
        self.segment = segment
        self.serial = serial
        self.requested_bytes = 0
        self.state: State = "free"
        self.prev: Block | None = None
        self.next: Block | None = None
        self.key = 0
        self.inserted_at = 0
        self.tag = -1

    def __repr__(self) -> str:
        return f"<Block {self.va:#x} {self.n_bytes} byte, {self.state}>"

    @property
    def is_split(self) -> bool:
        """Whether it is less than its whole segment."""
        return self.prev is not None or self.next is not None


class BlockPool:
    """The small or the large half of a pool, over all streams.

    Attributes
    ----------
    name : str
        The pool.
    is_small : bool
        Which half.
    n_searches : int
        Searches so far; counted only while garbage collection may act.
    lists : dict of int to FreeList
        By stream.
    """

    __slots__ = ("is_small", "lists", "n_searches", "name")

    def __init__(self, name: str, *, is_small: bool) -> None:
        self.name = name
        self.is_small = is_small
        self.n_searches = 0
        self.lists: dict[int, FreeList] = {}

    def blocks(self) -> list[Block]:
        """Give every free block in the order of PyTorch's set: by stream, size and tie-break."""
        return [block for _, free in sorted(self.lists.items()) for block in free.blocks]


class FreeList:
    """The free blocks of one stream in one half of a pool, smallest first.

    Attributes
    ----------
    pool : BlockPool
        What it is a part of.
    stream : int
        Handle of the stream.
    keys : list of int
        Keys in rising order: size, then tie-break.
    blocks : list of Block
        The blocks, in the same order.
    min_rest_bytes : int
        A block is split when at least this much remains.
    max_split_bytes : float
        Requests from this size on never split a block.
    """

    __slots__ = ("blocks", "keys", "max_split_bytes", "min_rest_bytes", "pool", "stream")

    def __init__(
        self, pool: BlockPool, stream: int, *, min_rest_bytes: int, max_split_bytes: float
    ) -> None:
        self.pool = pool
        self.stream = stream
        self.min_rest_bytes = min_rest_bytes
        self.max_split_bytes = max_split_bytes
        self.keys: list[int] = []
        self.blocks: list[Block] = []

    def remove(self, block: Block) -> None:
        """Take a block out."""
        at = bisect_left(self.keys, block.key)
        del self.keys[at]
        del self.blocks[at]


def _key_by_address(block: Block) -> int:
    return block.n_bytes << _ADDRESS_BITS | block.va


def _key_by_block(block: Block) -> int:
    return block.n_bytes << _ADDRESS_BITS | block.serial


def _key_by_segment(block: Block) -> int:
    by_size = block.n_bytes << _ADDRESS_BITS | block.segment.serial
    return by_size << _ADDRESS_BITS | block.va


KEYS: Final[dict[TieBreak, tuple[Callable[[Block], int], int]]] = {
    "address": (_key_by_address, _ADDRESS_BITS),
    "block": (_key_by_block, _ADDRESS_BITS),
    "segment": (_key_by_segment, 2 * _ADDRESS_BITS),
}
"""Key of a block by tie-break, and the number of bits below its size."""


def not_allocated(block: Block) -> UsageError:
    """Say that a block cannot be freed."""
    return UsageError(f"The block at {block.va:#x} is {block.state}, not allocated: free it once.")


def not_pending(block: Block) -> UsageError:
    """Say that no free of a block can be completed."""
    return UsageError(f"The block at {block.va:#x} is {block.state}: no free of it is pending.")
