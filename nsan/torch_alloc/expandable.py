"""Expandable segments: reserved addresses that are mapped granule by granule as they are needed.

Source: ``get_free_block``, ``find_expandable_block``, ``map_block``, ``unmap_block`` and
``try_allocate_expandable_block`` of ``CUDACachingAllocator.cpp`` (2.6.0, and the logic of 2.12).
No real history with expandable segments was at hand to check this against.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from nsan.torch_alloc.blocks import Block, FreeList, Segment
from nsan.torch_alloc.constants import SMALL_SEGMENT_BYTES
from nsan.units import GIB

if TYPE_CHECKING:
    from nsan.torch_alloc.machine import CachingAllocator

UNBOUNDED_RESERVATION_BYTES: Final = 1024 * GIB
"""Addresses of one reservation when the size of the GPU's memory is not given."""

_by_va = attrgetter("va")


class ExpandableMemory:
    """The mapped and unmapped parts of an allocator's expandable segments.

    Parameters
    ----------
    allocator : CachingAllocator
        Lists the mapped free blocks itself; here are the unmapped ones.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._unmapped: dict[FreeList, list[Block]] = {}

    def granule(self, home: FreeList) -> int:
        """Give the unit of mapping: 2 MiB in the small pool, a large segment in the large one."""
        if home.pool.is_small:
            return SMALL_SEGMENT_BYTES
        return self._allocator.settings.large_segment_bytes

    def best_fit(self, home: FreeList, at: int) -> Block | None:
        """Walk on from an expandable best fit to a block that can grow less.

        A block counts with the unmapped addresses behind it; the walk ends at the first block that does
        not count less. Where the setting is off again, expandable blocks serve nothing.
        """
        blocks = home.blocks
        if not self._allocator.settings.expandable_segments:
            ordinary = (b for b in blocks[at + 1 :] if not b.segment.is_expandable)
            return next(ordinary, None)
        last = len(blocks) - 1
        while (
            at < last
            and blocks[at].segment.is_expandable
            and _room(blocks[at + 1]) < _room(blocks[at])
        ):
            at += 1
        return blocks[at]

    def grow(self, home: FreeList, rounded: int) -> Block | None:
        """Map what is missing for a request at the lowest address that has room for it.

        Parameters
        ----------
        home : FreeList
            The list that the request is served from.
        rounded : int
            The request.

        Returns
        -------
        Block or None
            A listed free block that fits; None if the GPU's memory does not suffice. What was mapped
            until then stays, free.
        """
        block = self.candidate(home, rounded) or self._reserve(home, rounded)
        while block.state == "unmapped" or block.n_bytes < rounded:
            target, n_bytes = self.missing(block, rounded)
            if not self._allocator.has_memory(n_bytes):
                return None
            block = self.map(target, n_bytes)
        return block

    def candidate(self, home: FreeList, rounded: int) -> Block | None:
        """Find the lowest block from which free and unmapped ones in a row have room for a request."""
        for block in self._unmapped.get(home, ()):
            before = block.prev
            start = before if before is not None and before.state == "free" else block
            if _has_row(start, rounded):
                return start
        return None

    def ready(self, home: FreeList, rounded: int) -> Block | None:
        """Give the free block that :meth:`grow` would hand out without mapping anything.

        The search does not give it where it is too large for the request by ``max_split_size``.
        """
        if not self._allocator.settings.expandable_segments:
            return None
        block = self.candidate(home, rounded)
        is_enough = block is not None and block.state == "free" and block.n_bytes >= rounded
        return block if is_enough else None

    def missing(self, block: Block, rounded: int) -> tuple[Block, int]:
        """Tell what is mapped next to serve a request from a block that :meth:`candidate` gave.

        Returns
        -------
        tuple of (Block, int)
            The unmapped block, and how many bytes at its front.
        """
        if block.state == "unmapped":
            target, n_bytes = block, min(block.n_bytes, rounded)
        else:
            following = block.next
            assert following is not None  # noqa: S101 - candidate() saw it
            target, n_bytes = following, min(following.n_bytes, rounded - block.n_bytes)
        base, granule = target.segment.va, self.granule(target.segment.home)
        end = base + -(-(target.va + n_bytes - base) // granule) * granule
        return target, min(end - target.va, target.n_bytes)

    def _reserve(self, home: FreeList, rounded: int) -> Block:
        """Reserve addresses: 9/8 of the GPU's memory, so that pages can move to the end."""
        device = self._allocator.settings.device_bytes
        n_bytes = UNBOUNDED_RESERVATION_BYTES if device is None else device + device // 8
        granule = self.granule(home)
        n_bytes = -(-max(n_bytes, rounded) // granule) * granule
        return self.add_reservation(self._allocator.place(n_bytes), n_bytes, home).first

    def add_reservation(self, va: int, n_bytes: int, home: FreeList) -> Segment:
        """Register reserved addresses, of which nothing is mapped."""
        segment = self._allocator.new_segment(va, n_bytes, home, is_expandable=True)
        self.list_unmapped(segment.first)
        return segment

    def map(self, block: Block, n_bytes: int) -> Block:
        """Put memory behind the front of an unmapped block.

        Parameters
        ----------
        block : Block
            In state "unmapped".
        n_bytes : int
            Bytes, at most those of the block.

        Returns
        -------
        Block
            The listed free block that the new memory is a part of.
        """
        allocator, home, va = self._allocator, block.segment.home, block.va
        self._unlist(block)
        if n_bytes < block.n_bytes:
            rest = allocator.new_block(va + n_bytes, block.n_bytes - n_bytes, block.segment)
            _link_after(block, rest)
            block.n_bytes = n_bytes
            self.list_unmapped(rest)
        for other in (block.prev, block.next):
            if other is not None and other.state == "free":
                home.remove(other)
                allocator.absorb(block, other)
        allocator.insert(block)
        allocator.change_reserved(n_bytes)
        allocator.tell("segment_map", va, n_bytes, home)
        return block

    def map_at(self, block: Block, va: int, n_bytes: int) -> Block:
        """Put memory behind a part of an unmapped block that need not be its front."""
        if va > block.va:
            self._unlist(block)
            front = self._allocator.new_block(block.va, va - block.va, block.segment)
            _link_before(block, front)
            block.n_bytes -= va - block.va
            block.va = va
            self.list_unmapped(front)
            self.list_unmapped(block)
        return self.map(block, n_bytes)

    def unmap(self, block: Block) -> None:
        """Take the memory away from the granules that lie wholly in a listed free block."""
        segment, granule = block.segment, self.granule(block.segment.home)
        first = -(-(block.va - segment.va) // granule)
        end = (block.va + block.n_bytes - segment.va) // granule
        if first < end:
            va = segment.va + first * granule
            self.unmap_exactly(block, va, (end - first) * granule)

    def unmap_exactly(self, block: Block, va: int, n_bytes: int) -> None:
        """Take the memory away from a part of a listed free block; its ends stay free."""
        allocator, segment = self._allocator, block.segment
        segment.home.remove(block)
        before, after = va - block.va, block.va + block.n_bytes - va - n_bytes
        if before > 0:
            front = allocator.new_block(block.va, before, segment)
            _link_before(block, front)
            allocator.insert(front)
        if after > 0:
            rest = allocator.new_block(va + n_bytes, after, segment)
            _link_after(block, rest)
            allocator.insert(rest)
        block.va, block.n_bytes, block.state = va, n_bytes, "unmapped"
        for other in (block.prev, block.next):
            if other is not None and other.state == "unmapped":
                self._unlist(other)
                allocator.absorb(block, other)
        self.list_unmapped(block)
        allocator.change_reserved(-n_bytes)
        allocator.tell("segment_unmap", va, n_bytes, segment.home)
        if not block.is_split:
            self.forget(segment)

    def forget(self, segment: Segment) -> None:
        """Give back the addresses of a segment of which nothing is mapped."""
        self._unlist(segment.first)
        segment.first.state = "gone"
        self._allocator.forget_segment(segment)

    def ranges(self, segment: Segment) -> list[Segment]:
        """Give the mapped ranges of a segment as segments; a segment that is not expandable as it is."""
        if not segment.is_expandable:
            return [segment]
        found: list[Segment] = []
        for block in segment.blocks():
            if block.state == "unmapped":
                continue
            if found and found[-1].va + found[-1].n_bytes == block.va:
                found[-1].n_bytes += block.n_bytes
                continue
            part = Segment(
                block.va, block.n_bytes, segment.home, serial=segment.serial, is_expandable=True
            )
            part.first = block
            found.append(part)
        return found

    def unmapped_of(self, home: FreeList) -> list[Block]:
        """Give the unmapped blocks of one stream in one half of a pool, by address."""
        return list(self._unmapped.get(home, ()))

    def unmapped_blocks(self) -> list[Block]:
        """Give every unmapped block."""
        return [block for blocks in self._unmapped.values() for block in blocks]

    def list_unmapped(self, block: Block) -> None:
        """List a block without memory behind it."""
        block.state = "unmapped"
        blocks = self._unmapped.setdefault(block.segment.home, [])
        blocks.insert(bisect_left(blocks, block.va, key=_by_va), block)

    def _unlist(self, block: Block) -> None:
        blocks = self._unmapped[block.segment.home]
        del blocks[bisect_left(blocks, block.va, key=_by_va)]


def _room(block: Block) -> int:
    """Give the size that a free block can grow to."""
    after = block.next
    return block.n_bytes + (after.n_bytes if after is not None and after.state == "unmapped" else 0)


def _has_row(block: Block | None, n_bytes: int) -> bool:
    found = 0
    while found < n_bytes and block is not None and block.state in {"free", "unmapped"}:
        found += block.n_bytes
        block = block.next
    return found >= n_bytes


def _link_before(block: Block, new: Block) -> None:
    new.prev, new.next = block.prev, block
    if block.prev is None:
        block.segment.first = new
    else:
        block.prev.next = new
    block.prev = new


def _link_after(block: Block, new: Block) -> None:
    new.prev, new.next = block, block.next
    if block.next is not None:
        block.next.prev = new
    block.next = new
