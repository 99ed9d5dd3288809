"""GMLake's stitching of free physical chunks, as a variant of the caching allocator.

Large requests are served from physical chunks of 2 MiB that are mapped with CUDA's virtual memory calls,
so free chunks that are not neighbours can be given one contiguous range of addresses ("stitched"). The
memory is never managed memory: it does not fault and is not evicted.

Source: GMLake, ASPLOS'24 (arXiv 2401.08156), and its allocator on top of PyTorch's: requests above 1 MiB
are rounded up to 2 MiB; the best fit among free blocks is searched first, and split if 2 MiB or more
remain; else free blocks, largest first, the last one by best fit, are stitched; else new chunks are
mapped. Left out is what costs time and not memory: how often a stitched range may be used again
(``reuseLimit``), the release of the ranges used least recently (``autoGC``), and the driver's time for
mapping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NoReturn

from nsan.errors import AllocatorFullError, UsageError
from nsan.torch_alloc.blocks import Block, FreeList, Segment, not_allocated, not_pending
from nsan.torch_alloc.chunks import CHUNK_BYTES, ChunkHeap, round_to_chunks
from nsan.torch_alloc.constants import DEFAULT_POOL
from nsan.torch_alloc.heap import Listen, ascending_places
from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.plain import AddressSupply
from nsan.torch_alloc.rounding import is_small
from nsan.torch_alloc.settings import DEFAULT_SETTINGS, AllocatorSettings

FIRST_STITCHED_VA: Final = 0x6F00_0000_0000
"""Where the addresses of stitched blocks begin, away from those of the chunks."""

_Entry = tuple[str, int, int, int, str]


class StitchedBlock(Block):
    """A tensor on several blocks of chunks, at addresses of its own.

    Attributes
    ----------
    parts : list of Block
        The blocks whose chunks are behind its addresses, in order.
    """

    __slots__ = ("parts",)

    def __init__(self, va: int, parts: list[Block], serial: int) -> None:
        n_bytes = sum(part.n_bytes for part in parts)
        segment = Segment(va, n_bytes, parts[0].segment.home, serial=serial)
        super().__init__(va, n_bytes, segment, serial)
        segment.first = self
        self.parts = parts


class StitchingAllocator:
    """The caching allocator of one GPU with GMLake's stitching in the large half of its pools.

    Small requests are PyTorch's own business. A large block never has less than whole chunks, so many
    tensors of little more than 1 MiB can take more memory than in PyTorch, which packs them into segments
    of 20 MiB; apart from that, stitching reserves no more than the most that was in use at once.

    Parameters
    ----------
    settings : AllocatorSettings
        Rounding, tie-break (of the small pools) and limits count; splitting limits, garbage collection and
        expandable segments do not.
    least_block_bytes : int, default 2 MiB
        GMLake's ``fragLimit``: a request of less is not stitched. GMLake's own default is 512 MiB; 2 MiB
        is the most that stitching can do.
    place : callable, optional
        Gives the address of a new segment or range of chunks; stitched ranges have addresses elsewhere.
    listen : callable, optional
        As for :class:`~nsan.torch_alloc.machine.CachingAllocator`; chunks that are taken and returned are
        segment_map and segment_unmap entries.

    Attributes
    ----------
    reserved_bytes, allocated_bytes, active_bytes, requested_bytes : int
        Running sums as in the caching allocator; large blocks count with all their chunks.
    peak_reserved_bytes, peak_allocated_bytes, peak_active_bytes : int
        The largest that these were.
    n_segments_made : int
        Segments of the small pools and ranges of new chunks so far.
    n_retries : int
        How often all free memory was released to serve a request.
    n_stitches, stitched_bytes : int
        Blocks that were stitched from more than one, and their bytes.
    n_chunks : int
        Chunks that are mapped now.

    Raises
    ------
    UsageError
        If ``least_block_bytes`` is less than a chunk.
    """

    def __init__(
        self,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        *,
        least_block_bytes: int = CHUNK_BYTES,
        place: Callable[[int], int] | None = None,
        listen: Listen | None = None,
    ) -> None:
        if least_block_bytes < CHUNK_BYTES:
            msg = f"least_block_bytes={least_block_bytes}: a block has at least {CHUNK_BYTES} byte."
            raise UsageError(msg)
        self.settings = settings
        self.least_block_bytes = least_block_bytes
        self.limit_bytes = settings.limit_bytes
        self._place = place or ascending_places()
        self._ranges = AddressSupply(FIRST_STITCHED_VA)
        self._listen = listen
        self._held: list[_Entry] | None = None
        plain = replace(
            settings,
            max_split_bytes=None,
            garbage_collection_threshold=0.0,
            expandable_segments=False,
            memory_fraction=None,
            device_bytes=None,
            is_caching=True,
        )
        say = None if listen is None else self._say
        self._small = CachingAllocator(plain, place=self._place, listen=say)
        self._large = ChunkHeap(place=self._place, listen=say)
        self._pending: dict[Block, None] = {}
        self.n_retries = self.n_stitches = self.stitched_bytes = 0
        self.peak_reserved_bytes = self.peak_allocated_bytes = self.peak_active_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """In segments of the small pools and in chunks."""
        return self._small.reserved_bytes + self._large.reserved_bytes

    @property
    def allocated_bytes(self) -> int:
        """In blocks that tensors hold."""
        return self._small.allocated_bytes + self._large.allocated_bytes

    @property
    def active_bytes(self) -> int:
        """In these, and in blocks whose free is pending."""
        return self._small.active_bytes + self._large.active_bytes

    @property
    def requested_bytes(self) -> int:
        """Asked for in active blocks."""
        return self._small.requested_bytes + self._large.requested_bytes

    @property
    def n_chunks(self) -> int:
        """Physical chunks that are mapped."""
        return self._large.reserved_bytes // CHUNK_BYTES

    @property
    def n_segments_made(self) -> int:
        """Segments of the small pools and ranges of new chunks so far."""
        return self._small.n_segments_made + self._large.n_segments_made

    # What a program does.

    def allocate(self, n_bytes: int, *, stream: int = 0, pool: str = DEFAULT_POOL) -> Block:
        """Serve a request.

        Parameters
        ----------
        n_bytes : int
            Bytes asked for, at least 1.
        stream : int, default 0
            Handle of the stream.
        pool : str, default "0,0"
            Pool that the request is routed to.

        Returns
        -------
        Block
            In state "allocated"; a :class:`StitchedBlock` if it is made of several.

        Raises
        ------
        AllocatorFullError
            If the GPU's memory or its allowed share does not suffice.
        UsageError
            If nothing is asked for.
        """
        rounded = self._small.rounded(n_bytes)
        if is_small(rounded):
            block = self._allocate_small(n_bytes, stream, pool)
        else:
            home = self._large.home(stream, pool, is_small=False)
            block = self._allocate_large(n_bytes, round_to_chunks(rounded), home)
        self._note_peaks()
        return block

    def free(self, block: Block, *, pending: bool = False) -> None:
        """Take a block back.

        Parameters
        ----------
        block : Block
            What :meth:`allocate` gave; do not use it afterwards.
        pending : bool, default False
            Another stream still uses it: it stays active until :meth:`complete`.

        Raises
        ------
        UsageError
            If the block is not allocated.
        """
        if block.segment.is_small:
            self._small.free(block, pending=pending)
            return
        if block.state != "allocated":
            raise not_allocated(block)
        block.state = "pending"
        for part in _parts(block):
            part.state = "pending"
        self._large.allocated_bytes -= block.n_bytes
        self._say_of("free_requested", block)
        self._pending[block] = None
        if not pending:
            self.complete(block)

    def complete(self, block: Block) -> None:
        """End a pending free: the other streams are done with the block.

        Parameters
        ----------
        block : Block
            In state "pending".

        Raises
        ------
        UsageError
            If no free of the block is pending.
        """
        if block.segment.is_small:
            self._small.complete(block)
            return
        if block not in self._pending:
            raise not_pending(block)
        del self._pending[block]
        self._large.active_bytes -= block.n_bytes
        self._large.requested_bytes -= block.requested_bytes
        self._say_of("free_completed", block)
        if isinstance(block, StitchedBlock):
            block.state = "gone"
            self._ranges.give_back(block.va, block.n_bytes)
        for part in _parts(block):
            self._large.put_back(part)

    def empty_cache(self) -> list[Segment]:
        """Give every free segment of the small pools and every free chunk back to the driver.

        Returns
        -------
        list of Segment
            Segments of the small pools that are gone. Chunks are unmapped and not in it. Private pools
            keep what they have (:meth:`close_pool`).
        """
        self.complete_all()
        self._large.unmap_free(self._returnable())
        return self._small.empty_cache()

    def close_pool(self, pool: str) -> list[Segment]:
        """End the use of a private pool and release what is free in it.

        Parameters
        ----------
        pool : str
            The pool, as ``0,1``.

        Returns
        -------
        list of Segment
            Segments of its small half that are gone.
        """
        self._large.closed_pools[pool] = None
        self._large.unmap_free({pool: None})
        return self._small.close_pool(pool)

    def complete_all(self) -> None:
        """Wait for all streams: every pending free is completed, oldest first."""
        for block in list(self._pending):
            self.complete(block)
        self._small.complete_all()

    # What it holds.

    def segments(self) -> list[Segment]:
        """Give the segments of the small pools and the ranges of chunks, by address.

        Addresses of stitched blocks are not among them: the same chunks are already counted.
        """
        every = [*self._small.segments(), *self._large.segments()]
        return sorted(every, key=lambda segment: segment.va)

    def blocks(self, segment: Segment | None = None) -> list[Block]:
        """Give the blocks by address, of one segment or of all; of stitched ones the parts."""
        chosen = self.segments() if segment is None else [segment]
        return [block for part in chosen for block in part.blocks()]

    def _note_peaks(self) -> None:
        small, large = self._small, self._large
        reserved = small.reserved_bytes + large.reserved_bytes
        allocated = small.allocated_bytes + large.allocated_bytes
        active = small.active_bytes + large.active_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, allocated)
        self.peak_active_bytes = max(self.peak_active_bytes, active)

    # Small requests.

    def _allocate_small(self, n_bytes: int, stream: int, pool: str) -> Block:
        if self.limit_bytes is None:
            return self._small.allocate(n_bytes, stream=stream, pool=pool)
        # Whether a new segment was needed, and is too much, shows only afterwards; what had to be
        # released for it comes first in the history.
        held: list[_Entry] = []
        self._held = held
        block = self._small.allocate(n_bytes, stream=stream, pool=pool)
        self._held = None
        if self.reserved_bytes > self.limit_bytes:
            self._retry(keep=None)
            if self.reserved_bytes > self.limit_bytes:
                self._undo(block)
                home = self._small.home(stream, pool, is_small=True)
                self._refuse(self._small.rounded(n_bytes), home)
        for entry in held:
            self._say(*entry)
        return block

    def _undo(self, block: Block) -> None:
        """Take back an allocation that made a segment for which there is no room."""
        self._held = []
        self._small.free(block)
        self._small.empty_cache()
        self._small.n_segments_made -= 1
        self._held = None

    # Large requests.

    def _allocate_large(self, n_bytes: int, size: int, home: FreeList) -> Block:
        large = self._large
        fit = large.best_fit(home, size)
        if fit is not None:
            parts = [large.take(fit, size)]
        elif size < self.least_block_bytes:
            if not self._has_room(size):
                self._retry(keep=None)
            parts = self._map(size, size, home)
        else:
            parts = self._gather(size, home)
        block = parts[0] if len(parts) == 1 else self._stitch(parts, n_bytes)
        block.requested_bytes = n_bytes
        large.allocated_bytes += size
        large.active_bytes += size
        large.requested_bytes += n_bytes
        self._say_of("alloc", block)
        return block

    def _gather(self, size: int, home: FreeList) -> list[Block]:
        """Collect free blocks, largest first, and map what they lack; the last is the best fit."""
        large = self._large
        missing = size - sum(block.n_bytes for block in home.blocks)
        if missing > 0 and not self._has_room(missing):
            # The wait for all streams may free more here too.
            self._retry(keep=home)
            missing = size - sum(block.n_bytes for block in home.blocks)
        new = self._map(missing, size, home) if missing > 0 else []
        parts: list[Block] = []
        need = size - max(missing, 0)
        while need:
            fit = large.best_fit(home, need)
            parts.append(large.take(fit or home.blocks[-1], need))
            need -= parts[-1].n_bytes
        return parts + new

    def _stitch(self, parts: list[Block], n_bytes: int) -> StitchedBlock:
        size = sum(part.n_bytes for part in parts)
        self.n_stitches += 1
        self.stitched_bytes += size
        rest = n_bytes
        for part in parts:
            part.requested_bytes = min(rest, part.n_bytes)
            rest -= part.requested_bytes
        block = StitchedBlock(self._ranges.take(size), parts, self.n_stitches)
        block.state = "allocated"
        return block

    def _map(self, n_bytes: int, size: int, home: FreeList) -> list[Block]:
        """Take new chunks for a request of ``size`` byte."""
        if not self._has_room(n_bytes):
            self._refuse(size, home)
        return [self._large.map_new(n_bytes, home)]

    def _has_room(self, n_bytes: int) -> bool:
        return self.limit_bytes is None or self.reserved_bytes + n_bytes <= self.limit_bytes

    def _retry(self, *, keep: FreeList | None) -> None:
        """Release what is free, as PyTorch does when the driver refuses, but what is needed here."""
        self.n_retries += 1
        self.complete_all()
        self._large.unmap_free(self._returnable(), keep=keep)
        self._small.empty_cache()

    def _returnable(self) -> dict[str, None]:
        """Name the pools that are not in use: the default pool and private ones that were closed."""
        return {DEFAULT_POOL: None, **self._large.closed_pools}

    def _refuse(self, rounded: int, home: FreeList) -> NoReturn:
        self._say("oom", 0, rounded, home.stream, home.pool.name)
        raise AllocatorFullError(rounded, self.reserved_bytes, self.limit_bytes)

    # History.

    def _say_of(self, action: str, block: Block) -> None:
        segment = block.segment
        self._say(action, block.va, block.requested_bytes, segment.stream, segment.pool)

    def _say(self, action: str, va: int, n_bytes: int, stream: int, pool: str) -> None:
        if self._held is not None:
            self._held.append((action, va, n_bytes, stream, pool))
        elif self._listen is not None:
            self._listen(action, va, n_bytes, stream, pool)


def _parts(block: Block) -> list[Block]:
    return block.parts if isinstance(block, StitchedBlock) else [block]
