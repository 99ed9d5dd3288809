"""Physical memory in chunks of 2 MiB: blocks of chunks, mapped when needed and unmapped when free.

What CUDA's virtual memory calls allow (cuMemCreate, cuMemMap): any free chunk can be returned, and any
set of chunks can be mapped to one contiguous range of addresses. Used by
:mod:`nsan.torch_alloc.stitching`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from nsan.torch_alloc.blocks import Block, FreeList, Segment
from nsan.torch_alloc.constants import ROUND_LARGE_BYTES
from nsan.torch_alloc.heap import Heap, Listen
from nsan.torch_alloc.settings import DEFAULT_SETTINGS

CHUNK_BYTES: Final = ROUND_LARGE_BYTES
"""One physical chunk: the granule of CUDA's virtual memory calls on GPUs, 2 MiB."""


def round_to_chunks(n_bytes: int) -> int:
    """Round up to whole chunks of 2 MiB.

    Examples
    --------
    >>> round_to_chunks(1) >> 20, round_to_chunks(2 << 20) >> 20
    (2, 2)
    """
    return -(-n_bytes // CHUNK_BYTES) * CHUNK_BYTES


class ChunkHeap(Heap):
    """Blocks of whole chunks (GMLake's pBlocks), and the free ones of each stream and pool by size.

    Parameters
    ----------
    place : callable, optional
        Gives the address of a new range of chunks of so many byte.
    listen : callable, optional
        Called for every range that is mapped (segment_map) or unmapped (segment_unmap).
    """

    def __init__(
        self, *, place: Callable[[int], int] | None = None, listen: Listen | None = None
    ) -> None:
        by_address = replace(DEFAULT_SETTINGS, tie_break="address")
        super().__init__(by_address, place=place, listen=listen)

    def best_fit(self, home: FreeList, n_bytes: int) -> Block | None:
        """Give the smallest free block of at least so many byte, the lowest of equal ones."""
        at = bisect_left(home.keys, n_bytes << self._key_shift)
        return home.blocks[at] if at < len(home.keys) else None

    def take(self, block: Block, n_bytes: int) -> Block:
        """Hand out the front of a free block; the rest, whole chunks, is listed again."""
        block.segment.home.remove(block)
        if block.n_bytes > n_bytes:
            block = self.split(block, n_bytes)
        block.state = "allocated"
        return block

    def put_back(self, block: Block) -> None:
        """List a block again, merged with its free neighbours."""
        for other in (block.prev, block.next):
            if other is not None and other.state == "free":
                block.segment.home.remove(other)
                self.absorb(block, other)
        self.insert(block)

    def map_new(self, n_bytes: int, home: FreeList) -> Block:
        """Take new chunks from the driver, as one block that is in use."""
        segment = self.new_segment(self.place(n_bytes), n_bytes, home)
        self.n_segments_made += 1
        self.change_reserved(n_bytes)
        self.tell("segment_map", segment.va, n_bytes, home)
        segment.first.state = "allocated"
        return segment.first

    def unmap_free(self, pools: dict[str, None], *, keep: FreeList | None = None) -> None:
        """Give the free chunks of some pools back to the driver.

        Parameters
        ----------
        pools : dict of str to None
            Their names.
        keep : FreeList, optional
            A list that keeps its blocks.
        """
        for (name, is_small), pool in self.pools.items():
            if name not in pools or is_small:
                continue
            for home in pool.lists.values():
                if home is not keep:
                    self._unmap(home)

    def _unmap(self, home: FreeList) -> None:
        """Unmap all blocks of a list; what is left of a segment is a segment per piece."""
        for block in home.blocks:
            segment, before, after = block.segment, block.prev, block.next
            if before is None:
                self.forget_segment(segment)
            else:
                before.next = None
                segment.n_bytes = block.va - segment.va
            if after is not None:
                after.prev = None
                self._split_off(after)
            block.state = "gone"
            self.change_reserved(-block.n_bytes)
            self.tell("segment_unmap", block.va, block.n_bytes, home)
        home.keys.clear()
        home.blocks.clear()

    def _split_off(self, first: Block) -> None:
        """Make a segment of its own of what follows an unmapped block."""
        segment = self.new_segment(first.va, 0, first.segment.home)
        segment.first = first
        for block in segment.blocks():
            block.segment = segment
            segment.n_bytes += block.n_bytes

    def segments(self) -> list[Segment]:
        """Give the contiguous ranges of chunks, by address."""
        return sorted(self._segments.values(), key=lambda segment: segment.va)
