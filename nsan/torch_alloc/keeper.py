"""Hold the allocator at what was recorded, whatever its rules say.

A block that stands in the way of a recorded one was freed without an entry: it is freed, and counted. A block
outside every known segment gets a segment of its own, which goes when the block goes.
"""

from __future__ import annotations

from nsan.torch_alloc.blocks import Block, FreeList, Segment
from nsan.torch_alloc.books import NEVER, Books
from nsan.torch_alloc.constants import DEFAULT_POOL
from nsan.torch_alloc.machine import CachingAllocator


class Keeper:
    """A machine, the blocks that tensors hold in it, and the books about both.

    Parameters
    ----------
    machine : CachingAllocator
        It is changed.
    books : Books
        What is written down.

    Attributes
    ----------
    held : dict of int to Block
        Blocks in use by address.
    n_forced_frees : int
        Blocks whose free must be missing.
    """

    def __init__(self, machine: CachingAllocator, books: Books) -> None:
        self.machine = machine
        self.books = books
        self.held: dict[int, Block] = {}
        self.n_forced_frees = 0
        self._requested, self._ended = books.requested, books.completed
        self._implied: set[Segment] = set()

    def adopt(self, segment: Segment) -> None:
        """Note a segment of the start state and the blocks in use in it."""
        mapped = sum(b.n_bytes for b in segment.blocks() if b.state != "unmapped")
        self.books.segment(segment, NEVER, mapped)
        for block in segment.blocks():
            if block.state in {"allocated", "pending"}:
                self._adopt_block(block)

    def adopt_orphan(self, va: int, requested: int, *, is_pending: bool) -> None:
        """Hold a block of the start state that lies in no segment, unless another one is in the way."""
        rounded = self.machine.rounded(requested)
        if self.machine.segments_in(va, va + rounded):
            return
        home = self.machine.home(0, DEFAULT_POOL, is_small=rounded <= self.machine.small_bytes)
        block = self._claim(va, rounded, requested, home, NEVER)
        if is_pending:
            self.machine.allocated_bytes -= block.n_bytes
            block.state = "pending"
        self._adopt_block(block)

    def _adopt_block(self, block: Block) -> None:
        self.held[block.va] = block
        self.books.start_tensor(block)
        if block.state == "pending":
            self.books.pending_at_start.append(block.tag)

    def _complete(self, block: Block, at: int) -> None:
        """Complete a free that was requested. The machine is not asked: this is done very often."""
        del self.held[block.va]
        self._ended[block.tag] = at
        segment = block.segment
        self.machine.put_back(block)
        if self._implied and segment in self._implied:
            self._release(segment, at)

    def _claim(self, va: int, rounded: int, n_bytes: int, home: FreeList, at: int) -> Block:
        """Hand out the recorded address, whatever the rules say."""
        end = va + rounded
        for block in home.blocks:
            if block.va <= va and end <= block.va + block.n_bytes:
                return self._carve(block, va, rounded, n_bytes)
        found = self.machine.segments_in(va, end)
        is_inside = len(found) == 1 and found[0].va <= va and end <= _end(found[0])
        if not is_inside or found[0] in self._implied:
            for segment in found:
                self._drop(segment, at)
            segment = self.machine.add_segment(va, rounded, home)
            self.books.segment(segment, at, rounded)
            self._implied.add(segment)
            return self.machine.take(segment.first, rounded, n_bytes)
        block = self._clear(found[0], va, end, at)
        return self._carve(block, va, rounded, n_bytes)

    def _clear(self, segment: Segment, va: int, end: int, at: int) -> Block:
        """Free, or map, all of a range; give the free block that it is a part of."""
        for block in _blocks_in(segment, va, end):
            if block.state in {"allocated", "pending"}:
                self._force_free(block, at)
        for block in _blocks_in(segment, va, end):
            if block.state == "unmapped":
                first, last = max(va, block.va), min(end, block.va + block.n_bytes)
                self.machine.expandable.map_at(block, first, last - first)
                self._note_mapped(segment, last - first)
        return _blocks_in(segment, va, end)[0]

    def _carve(self, block: Block, va: int, rounded: int, n_bytes: int) -> Block:
        """Hand out a part of a free block that need not be its front."""
        machine = self.machine
        if va > block.va:
            block.segment.home.remove(block)
            machine.insert(machine.split(block, va - block.va))
        return machine.take(block, rounded, n_bytes)

    def _force_free(self, block: Block, at: int) -> None:
        """Free a block that stands in the way: its own entry is missing."""
        self.n_forced_frees += 1
        if block.state == "allocated":
            self._requested[block.tag] = at
            self.machine.allocated_bytes -= block.n_bytes
        self._complete(block, at)

    def _drop(self, segment: Segment, at: int) -> None:
        """Take away a segment with all that is in it."""
        for block in list(segment.blocks()):
            if block.state in {"allocated", "pending"}:
                self._force_free(block, at)
        if segment.first.state == "gone":
            return
        if segment.is_expandable:
            for block in list(segment.blocks()):
                if block.state == "free":
                    self._unmap(block, block.va, block.n_bytes, at)
            if segment.first.state == "unmapped":
                self.machine.expandable.forget(segment)
                self.books.segments[segment.tag].freed = at
        else:
            self._release(segment, at)

    def _release(self, segment: Segment, at: int) -> None:
        self.machine.release(segment)
        self.books.segments[segment.tag].freed = at
        self._implied.discard(segment)

    def _free_in(self, segment: Segment, va: int, end: int, at: int) -> list[Block]:
        """Give the free blocks of a range; what is still in use there is freed first."""
        for block in segment.home.blocks:
            if block.va <= va and end <= block.va + block.n_bytes:
                return [block]
        for block in _blocks_in(segment, va, end):
            if block.state in {"allocated", "pending"}:
                self._force_free(block, at)
        return [block for block in _blocks_in(segment, va, end) if block.state == "free"]

    def _unmap(self, block: Block, va: int, n_bytes: int, at: int) -> None:
        segment = block.segment
        self.machine.expandable.unmap_exactly(block, va, n_bytes)
        self._note_mapped(segment, -n_bytes)
        if segment.first.state == "gone":
            self.books.segments[segment.tag].freed = at

    def _note_mapped(self, segment: Segment, n_bytes: int) -> None:
        """Count what is mapped of an expandable segment, for its largest extent."""
        row = self.books.segments[segment.tag]
        row.mapped += n_bytes
        row.n_bytes = max(row.n_bytes, row.mapped)


def _end(segment: Segment) -> int:
    return segment.va + segment.n_bytes


def _blocks_in(segment: Segment, va: int, end: int) -> list[Block]:
    """Give the blocks that share a byte with ``[va, end)``."""
    return [b for b in segment.blocks() if b.va < end and va < b.va + b.n_bytes]
