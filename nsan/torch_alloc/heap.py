"""The bookkeeping below the allocator's rules: pools, segments, cutting and merging blocks, sums.

Source: ``BlockPool``, ``try_merge_blocks``, ``release_block`` and the statistics of
``c10/cuda/CUDACachingAllocator.cpp`` (2.6.0).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from math import inf
from typing import Final

from nsan.torch_alloc.blocks import KEYS, Block, BlockPool, FreeList, Segment
from nsan.torch_alloc.constants import MIN_BLOCK_BYTES, ROUND_LARGE_BYTES, SMALL_BYTES
from nsan.torch_alloc.settings import AllocatorSettings

Listen = Callable[[str, int, int, int, str], None]
"""Called with action, va, n_bytes, stream and pool for every entry of the history."""

FIRST_VA: Final = 0x7F00_0000_0000
"""Where the first segment lies unless the caller places segments itself."""


def ascending_places(first: int = FIRST_VA) -> Callable[[int], int]:
    """Make a function that places segments one after the other, at multiples of 2 MiB.

    Parameters
    ----------
    first : int, default 0x7f0000000000
        Address of the first segment.

    Returns
    -------
    callable
        Size in byte to address. Addresses are never used again.

    Examples
    --------
    >>> place = ascending_places(0)
    >>> place(1), place(3 << 20), place(1) >> 20
    (0, 2097152, 6)
    """
    following = first

    def place(n_bytes: int) -> int:
        nonlocal following
        va = following
        following += -(-n_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        return va

    return place


class Heap:
    """Segments, their blocks and the free lists of one GPU.

    Parameters
    ----------
    settings : AllocatorSettings
        What decides the order of the free lists and where blocks are split.
    place : callable, optional
        Gives the address of a new segment of so many byte; :func:`ascending_places` by default.
    listen : callable, optional
        Called for every entry of the history.

    Attributes
    ----------
    collects_garbage : bool
        Ages of free blocks are kept.
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        *,
        place: Callable[[int], int] | None = None,
        listen: Listen | None = None,
    ) -> None:
        self.settings = settings
        self.place = place or ascending_places()
        self._listen = listen
        self._key, self._key_shift = KEYS[settings.tie_break]
        self._is_by_address = settings.tie_break == "address"
        self.collects_garbage = False
        self.pools: dict[tuple[str, bool], BlockPool] = {}
        self.closed_pools: dict[str, None] = {}
        self._homes: dict[tuple[str, int], tuple[FreeList, FreeList]] = {}
        self._segments: dict[int, Segment] = {}
        self._bases: list[int] = []
        self._n_blocks_made = 0
        self._n_serials = 0
        self.n_segments_made = 0
        self.reserved_bytes = self.allocated_bytes = self.active_bytes = self.requested_bytes = 0
        self.peak_reserved_bytes = self.peak_allocated_bytes = self.peak_active_bytes = 0

    def home(self, stream: int, pool: str, *, is_small: bool) -> FreeList:
        """Give the free list that serves a stream in one half of a pool."""
        homes = self._homes.get((pool, stream))
        if homes is None:
            homes = (
                self._open_home(stream, pool, is_small=False),
                self._open_home(stream, pool, is_small=True),
            )
            self._homes[pool, stream] = homes
        if self.closed_pools:
            self.closed_pools.pop(pool, None)
        return homes[is_small]

    def _open_home(self, stream: int, pool: str, *, is_small: bool) -> FreeList:
        half = self.pools.setdefault((pool, is_small), BlockPool(pool, is_small=is_small))
        splits_at_512 = is_small or self.settings.expandable_segments
        limit = self.settings.max_split_bytes if self.settings.is_caching else 0
        home = FreeList(
            half,
            stream,
            min_rest_bytes=MIN_BLOCK_BYTES if splits_at_512 else SMALL_BYTES + 1,
            max_split_bytes=inf if splits_at_512 or limit is None else limit,
        )
        half.lists[stream] = home
        return home

    def split(self, block: Block, n_bytes: int) -> Block:
        """Cut a new block off the front of an unlisted free one; the rest is listed.

        Returns
        -------
        Block
            The front, with a new serial number; the rest keeps its own.
        """
        self._n_blocks_made += 1
        front = Block(block.va, n_bytes, block.segment, self._n_blocks_made)
        before = front.prev = block.prev
        if before is None:
            block.segment.first = front
        else:
            before.next = front
        front.next = block
        block.prev = front
        block.va += n_bytes
        block.n_bytes -= n_bytes
        self.insert(block)
        return front

    def new_block(self, va: int, n_bytes: int, segment: Segment) -> Block:
        """Make a block with the next serial number, not yet linked or listed."""
        self._n_blocks_made += 1
        return Block(va, n_bytes, segment, self._n_blocks_made)

    def insert(self, block: Block) -> None:
        """List a free block."""
        home = block.segment.home
        block.state = "free"
        if self.collects_garbage:
            block.inserted_at = home.pool.n_searches
        key = block.n_bytes << 64 | block.va if self._is_by_address else self._key(block)
        block.key = key
        keys = home.keys
        at = bisect_left(keys, key)
        keys.insert(at, key)
        home.blocks.insert(at, block)

    @staticmethod
    def absorb(block: Block, other: Block) -> None:
        """Merge an unlisted neighbour into a block; the block survives with its serial number."""
        block.n_bytes += other.n_bytes
        other.state = "gone"
        if other is block.prev:
            block.va = other.va
            block.prev = other.prev
            if other.prev is None:
                block.segment.first = block
            else:
                other.prev.next = block
            return
        block.next = other.next
        if other.next is not None:
            other.next.prev = block

    def add_segment(self, va: int, n_bytes: int, home: FreeList) -> Segment:
        """Take a segment from the driver; its only block is free and listed."""
        segment = self.new_segment(va, n_bytes, home)
        self.n_segments_made += 1
        self.change_reserved(n_bytes)
        self.tell("segment_alloc", va, n_bytes, home)
        self.insert(segment.first)
        return segment

    def new_segment(
        self, va: int, n_bytes: int, home: FreeList, *, is_expandable: bool = False
    ) -> Segment:
        """Register a segment with one block that is not listed yet."""
        self._n_serials += 1
        segment = Segment(va, n_bytes, home, serial=self._n_serials, is_expandable=is_expandable)
        segment.first = self.new_block(va, n_bytes, segment)
        self._segments[va] = segment
        self._bases.insert(bisect_left(self._bases, va), va)
        return segment

    def forget_segment(self, segment: Segment) -> None:
        """Drop a segment that holds nothing any more."""
        del self._segments[segment.va]
        del self._bases[bisect_left(self._bases, segment.va)]

    def segments_in(self, va: int, end: int) -> list[Segment]:
        """Give the segments that share a byte with ``[va, end)``, by address, reservations as a whole."""
        first = bisect_right(self._bases, va) - 1
        if first < 0 or self._bases[first] + self._segments[self._bases[first]].n_bytes <= va:
            first += 1
        last = bisect_left(self._bases, end)
        return [self._segments[base] for base in self._bases[first:last]]

    def release(self, segment: Segment) -> None:
        """Give a segment that is one free block back to the driver."""
        segment.home.remove(segment.first)
        segment.first.state = "gone"
        self.forget_segment(segment)
        self.change_reserved(-segment.n_bytes)
        self.tell("segment_free", segment.va, segment.n_bytes, segment.home)

    def change_reserved(self, n_bytes: int) -> None:
        """Count bytes that the driver gave (or, negative, took back)."""
        self.reserved_bytes += n_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def tell(self, action: str, va: int, n_bytes: int, home: FreeList) -> None:
        """Write an entry of the history."""
        if self._listen is not None:
            self._listen(action, va, n_bytes, home.stream, home.pool.name)

    def has_memory(self, n_bytes: int) -> bool:
        """Tell whether the GPU has memory for so much more, whatever share of it is allowed."""
        device = self.settings.device_bytes
        return device is None or self.reserved_bytes + n_bytes <= device
