"""PyTorch's caching allocator of one GPU as a machine: requests and frees in, segments and blocks out.

Source: ``DeviceCachingAllocator`` of ``c10/cuda/CUDACachingAllocator.cpp`` (2.6.0, and the logic of 2.12),
checked against real histories (see the replay). What only the real program can know, the caller says: when
other streams are done with a block (:meth:`CachingAllocator.complete`), when the cache is emptied, where
the driver puts a segment.

Two options of a MemPool are not modelled, because no key of a snapshot tells which pool has them: ``use_on_oom``
(from 2.8; when memory runs out other requests are served from the pool too) and ``no_split`` (from 2.10; its blocks
are never split). In a replay the requests that they change show as addresses that were not predicted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter

from nsan.errors import AllocatorFullError, UsageError
from nsan.torch_alloc import releasing
from nsan.torch_alloc.blocks import Block, FreeList, Segment, State, not_allocated, not_pending
from nsan.torch_alloc.constants import (
    DEFAULT_POOL,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
)
from nsan.torch_alloc.expandable import ExpandableMemory
from nsan.torch_alloc.heap import FIRST_VA, Heap, Listen, ascending_places
from nsan.torch_alloc.rounding import round_size, segment_size
from nsan.torch_alloc.settings import DEFAULT_SETTINGS, AllocatorSettings

__all__ = ["FIRST_VA", "CachingAllocator", "Listen", "ascending_places"]


class CachingAllocator(Heap):
    """The caching allocator of one GPU.

    Parameters
    ----------
    settings : AllocatorSettings
        Its options and the tie-break of its version.
    place : callable, optional
        Gives the address of a new segment of so many byte; :func:`~nsan.torch_alloc.heap.ascending_places` by default.
    listen : callable, optional
        Called as ``listen(action, va, n_bytes, stream, pool)`` for every entry that PyTorch writes to its
        history, in its order: requested sizes for alloc and free entries, real sizes for segment
        entries, the rounded request for oom (with address 0).

    Attributes
    ----------
    reserved_bytes, allocated_bytes, active_bytes, requested_bytes : int
        Running sums: in segments (if expandable, mapped); in blocks that tensors hold (falls at the
        free); in these and blocks whose free is pending; asked for in the latter.
    peak_reserved_bytes, peak_allocated_bytes, peak_active_bytes : int
        The largest that these were.
    n_segments_made : int
        Segments taken from the driver so far; expandable ones are not counted, as in PyTorch.
    n_retries : int
        How often all free segments were released to serve a request (num_alloc_retries).
    small_bytes : int
        Rounded requests up to this size are served by the small pool; -1 without a cache.
    """

    def __init__(
        self,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        *,
        place: Callable[[int], int] | None = None,
        listen: Listen | None = None,
    ) -> None:
        if not settings.is_caching:
            settings = _without_cache(settings)
        super().__init__(settings, place=place, listen=listen)
        self._limits_splits = settings.max_split_bytes is not None
        self._divisions = settings.roundup_power2_divisions
        self._rounds_otherwise = any(self._divisions) or not settings.is_caching
        self.small_bytes = SMALL_BYTES if settings.is_caching else -1
        self.collects_garbage = releasing.collects_garbage(settings)
        self._pending: dict[Block, None] = {}
        self.expandable = ExpandableMemory(self)
        self.n_retries = 0

    # What a program does.

    def allocate(self, n_bytes: int, *, stream: int = 0, pool: str = DEFAULT_POOL) -> Block:
        """Serve a request.

        Parameters
        ----------
        n_bytes : int
            Bytes asked for, at least 1 (PyTorch never passes an empty request on).
        stream : int, default 0
            Handle of the stream.
        pool : str, default "0,0"
            Pool that the request is routed to.

        Returns
        -------
        Block
            In state "allocated".

        Raises
        ------
        AllocatorFullError
            If the GPU's memory or its allowed share does not suffice.
        UsageError
            If nothing is asked for.
        """
        if n_bytes < 1:
            msg = f"A request for {n_bytes} byte never reaches the allocator: ask for at least 1."
            raise UsageError(msg)
        rounded = self.rounded(n_bytes)
        home = self.home(stream, pool, is_small=rounded <= self.small_bytes)
        block = self.find(home, rounded)
        if block is None:
            block = self._make_room(home, rounded, n_bytes)
        block = self.take(block, rounded, n_bytes)
        if self._listen is not None:
            self._listen("alloc", block.va, n_bytes, stream, pool)
        return block

    def free(self, block: Block, *, pending: bool = False) -> None:
        """Take a block back.

        Parameters
        ----------
        block : Block
            What :meth:`allocate` gave; do not use it afterwards.
        pending : bool, default False
            Another stream still uses it (``record_stream``): it stays active until
            :meth:`complete`, or until the allocator waits for all streams.

        Raises
        ------
        UsageError
            If the block is not allocated.
        """
        if block.state != "allocated":
            raise not_allocated(block)
        self.allocated_bytes -= block.n_bytes
        block.state = "pending"
        if self._listen is not None:
            segment = block.segment
            self._listen(
                "free_requested", block.va, block.requested_bytes, segment.stream, segment.pool
            )
        if pending:
            self._pending[block] = None
        else:
            self._put_back_whole(block)

    def complete(self, block: Block) -> None:
        """End a pending free: the other streams are done with the block.

        Parameters
        ----------
        block : Block
            In state "pending". The allocator completes pending frees itself when it waits for all
            streams (before a retry, and in :meth:`empty_cache`), so ask for the state first.

        Raises
        ------
        UsageError
            If no free of the block is pending.
        """
        if self._pending.pop(block, self) is not None:
            raise not_pending(block)
        self._put_back_whole(block)

    def _put_back_whole(self, block: Block) -> None:
        """Complete a free; without a cache the segment goes too."""
        self.put_back(block)
        if not self.settings.is_caching:
            self.release(block.segment)

    def empty_cache(self) -> list[Segment]:
        """Give every segment without an active block back to the driver (``torch.cuda.empty_cache``).

        Returns
        -------
        list of Segment
            Those released, in PyTorch's order. Expandable segments are unmapped instead and not in it,
            and the segments of a pool that is in use stay (:meth:`close_pool`).
        """
        return releasing.release_cached(self)

    def close_pool(self, pool: str) -> list[Segment]:
        """End the use of a private pool (its MemPool object or graph is gone).

        Parameters
        ----------
        pool : str
            The pool, as ``0,1``. A later request for it opens it again.

        Returns
        -------
        list of Segment
            Those released now; segments still in use go with a later :meth:`empty_cache`.
        """
        for block in self.pending_blocks():
            if block.segment.pool == pool:
                self.complete(block)
        self.closed_pools[pool] = None
        return releasing.release_pools(self, [pool])

    def complete_all(self) -> None:
        """Wait for all streams: every pending free is completed, oldest first."""
        for block in self.pending_blocks():
            self.complete(block)

    # What it holds.

    def segments(self) -> list[Segment]:
        """Give the segments by address; an expandable one as one segment per mapped range."""
        parts = chain.from_iterable(self.expandable.ranges(s) for s in self._segments.values())
        return sorted(parts, key=attrgetter("va"))

    def whole_segments(self) -> list[Segment]:
        """Give the segments by address; an expandable one with all addresses that it reserves."""
        return sorted(self._segments.values(), key=attrgetter("va"))

    def blocks(self, segment: Segment | None = None) -> list[Block]:
        """Give the blocks by address, of one segment (as :meth:`segments` gives it) or of all."""
        chosen = self.segments() if segment is None else [segment]
        return [
            block
            for part in chosen
            for block in part.blocks()
            if block.state != "unmapped" and part.va <= block.va < part.va + part.n_bytes
        ]

    def pending_blocks(self) -> list[Block]:
        """Give the blocks whose free is pending, oldest first."""
        return list(self._pending)

    def has_room(self, n_bytes: int) -> bool:
        """Tell whether so much more may be reserved."""
        limit = self.limit_bytes
        return limit is None or self.reserved_bytes + n_bytes <= limit

    @property
    def limit_bytes(self) -> int | None:
        """What may be reserved; None: no limit."""
        return self.settings.limit_bytes

    # Its rules, one by one; the replay of a history drives these itself.

    def rounded(self, n_bytes: int) -> int:
        """Round a request to the size of a block (:func:`~nsan.torch_alloc.rounding.round_size`)."""
        if self._rounds_otherwise:
            return round_size(n_bytes, self._divisions) if self.settings.is_caching else n_bytes
        return (n_bytes + (MIN_BLOCK_BYTES - 1)) & -MIN_BLOCK_BYTES or MIN_BLOCK_BYTES

    def segment_size(self, rounded: int) -> int:
        """Give the size of the segment that would be made for a request that nothing free fits."""
        settings = self.settings
        return (
            segment_size(rounded, settings.large_segment_bytes) if settings.is_caching else rounded
        )

    def find(self, home: FreeList, rounded: int) -> Block | None:
        """Search the best fit for a rounded request (``get_free_block``); the block stays listed."""
        if self.collects_garbage:
            home.pool.n_searches += 1
        at = bisect_left(home.keys, rounded << self._key_shift)
        if at == len(home.keys):
            return None
        fit = home.blocks[at]
        block = self.expandable.best_fit(home, at) if fit.segment.is_expandable else fit
        if block is not None and self._limits_splits and self._is_oversize_misfit(block, rounded):
            return None
        return block

    def _is_oversize_misfit(self, block: Block, rounded: int) -> bool:
        limit = self.settings.max_split_bytes or 0
        if rounded < limit:
            return block.n_bytes >= limit
        return block.n_bytes >= rounded + self.settings.max_non_split_rounding_bytes

    def take(self, block: Block, rounded: int, n_bytes: int) -> Block:
        """Hand out the front of a free block, or all of it if too little would remain to split it.

        Parameters
        ----------
        block : Block
            A listed free block.
        rounded, n_bytes : int
            The request after and before rounding.

        Returns
        -------
        Block
            What is handed out, in state "allocated". After a split it is a new block, and the block
            that was given is the rest.
        """
        home = block.segment.home
        home.remove(block)
        size = block.n_bytes
        if size - rounded >= home.min_rest_bytes and rounded < home.max_split_bytes:
            block = self.split(block, rounded)
            size = rounded
        block.state = "allocated"
        block.requested_bytes = n_bytes
        self.requested_bytes += n_bytes
        allocated = self.allocated_bytes = self.allocated_bytes + size
        active = self.active_bytes = self.active_bytes + size
        if active > self.peak_active_bytes:  # noqa: PLR1730 - a third of the time of max()
            self.peak_active_bytes = active
        if allocated > self.peak_allocated_bytes:  # noqa: PLR1730
            self.peak_allocated_bytes = allocated
        return block

    def put_back(self, block: Block) -> None:
        """Complete a free: merge with the free neighbours and list what results."""
        segment = block.segment
        if self._listen is not None:
            self._listen(
                "free_completed", block.va, block.requested_bytes, segment.stream, segment.pool
            )
        self.active_bytes -= block.n_bytes
        self.requested_bytes -= block.requested_bytes
        before = block.prev
        if before is not None and before.state == "free":
            segment.home.remove(before)
            self.absorb(block, before)
        after = block.next
        if after is not None and after.state == "free":
            segment.home.remove(after)
            self.absorb(block, after)
        self.insert(block)

    def restore(
        self,
        va: int,
        home: FreeList,
        pieces: Sequence[tuple[int, State, int]],
        *,
        is_expandable: bool = False,
    ) -> Segment:
        """Set up a segment as it was at some time; it does not count as newly made.

        Parameters
        ----------
        va : int
            First byte.
        home : FreeList
            Stream, pool and half of the pool.
        pieces : sequence of (int, str, int)
            Size, state and requested bytes of its blocks, lowest first.
        is_expandable : bool, default False
            Pieces may be "unmapped".

        Returns
        -------
        Segment
            With these blocks.
        """
        n_bytes = sum(size for size, _, _ in pieces)
        segment = self.new_segment(va, n_bytes, home, is_expandable=is_expandable)
        last: Block | None = None
        for size, state, requested in pieces:
            block = self.new_block(va, size, segment)
            va += size
            block.prev = last
            if last is None:
                segment.first = block
            else:
                last.next = block
            last = block
            self._restore_block(block, state, requested)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_active_bytes = max(self.peak_active_bytes, self.active_bytes)
        return segment

    def _restore_block(self, block: Block, state: State, requested: int) -> None:
        if state == "unmapped":
            self.expandable.list_unmapped(block)
            return
        self.reserved_bytes += block.n_bytes
        if state == "free":
            self.insert(block)
            return
        block.state, block.requested_bytes = state, requested
        self.active_bytes += block.n_bytes
        self.requested_bytes += requested
        if state == "allocated":
            self.allocated_bytes += block.n_bytes
        else:
            self._pending[block] = None

    # New segments, and what is given back.

    def _make_room(self, home: FreeList, rounded: int, n_bytes: int) -> Block:
        """Do what PyTorch does, in its order, when no free block fits."""
        if self.collects_garbage:
            releasing.collect_garbage(self)
        block = self._grow(home, rounded)
        if block is None and releasing.release_oversize(self, home, rounded):
            block = self._grow(home, rounded)
        if block is None and self.settings.is_caching:
            releasing.release_cached(self)
            self.n_retries += 1
            block = self._grow(home, rounded)
        if block is None:
            self.tell("oom", 0, rounded, home)
            raise AllocatorFullError(n_bytes, self.reserved_bytes, self.limit_bytes)
        return block

    def _grow(self, home: FreeList, rounded: int) -> Block | None:
        """Make a listed free block that fits, with new memory of the driver; None if there is none."""
        size = self.segment_size(rounded)
        if self.settings.memory_fraction is not None and not self.has_room(size):
            return None
        if self.settings.expandable_segments:
            return self.expandable.grow(home, rounded)
        if not self.has_memory(size):
            return None
        return self.add_segment(self.place(size), size, home).first


def _without_cache(settings: AllocatorSettings) -> AllocatorSettings:
    """Keep what counts without a cache: the limits."""
    return AllocatorSettings(
        memory_fraction=settings.memory_fraction,
        device_bytes=settings.device_bytes,
        tie_break=settings.tie_break,
        is_caching=False,
    )
