"""No caching: one allocation of the driver per tensor, of exactly the size that was asked for.

This is what a program does with a pluggable allocator (``change_current_allocator``) over cudaMalloc or
cudaMallocManaged, or with ``PYTORCH_NO_CUDA_MEMORY_CACHING``: every tensor goes back to the driver when
its free completes, so what is reserved is what is in use.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Final

from nsan.errors import AllocatorFullError, UsageError
from nsan.torch_alloc.blocks import Block, BlockPool, FreeList, Segment, not_allocated, not_pending
from nsan.torch_alloc.constants import DEFAULT_POOL, MIN_BLOCK_BYTES, ROUND_LARGE_BYTES
from nsan.torch_alloc.heap import FIRST_VA, Listen
from nsan.torch_alloc.settings import DEFAULT_SETTINGS, AllocatorSettings


class AddressSupply:
    """Addresses for what is taken from the driver and given back to it.

    A range that was given back serves the next request of the same size, the lowest first; else the next
    higher address is used. Real drivers reuse addresses too, by rules of their own.

    Parameters
    ----------
    first : int, default 0x7f0000000000
        Lowest address, byte.
    alignment : int, default 2 MiB
        Every base is a multiple of it, byte; 512 is the least, PyTorch's own unit.

    Raises
    ------
    UsageError
        If the alignment is not a power of two from 512 up.

    Examples
    --------
    >>> supply = AddressSupply(0)
    >>> first, second = supply.take(1), supply.take(3 << 20)
    >>> supply.give_back(first, 1)
    >>> second >> 20, supply.take(2 << 20), supply.take(1) >> 20
    (2, 0, 6)
    """

    __slots__ = ("_alignment", "_following", "_free")

    def __init__(self, first: int = FIRST_VA, *, alignment: int = ROUND_LARGE_BYTES) -> None:
        if alignment < MIN_BLOCK_BYTES or alignment & (alignment - 1):
            msg = f"An alignment of {alignment} byte: take a power of two from 512 up."
            raise UsageError(msg)
        self._alignment = alignment
        self._following = -(-first // alignment) * alignment
        self._free: dict[int, list[int]] = {}

    def take(self, n_bytes: int) -> int:
        """Give the base of a free range of so many byte."""
        size = -(-n_bytes // self._alignment) * self._alignment
        freed = self._free.get(size)
        if freed:
            return heappop(freed)
        va = self._following
        self._following += size
        return va

    def give_back(self, va: int, n_bytes: int) -> None:
        """Take a range back that :meth:`take` gave for so many byte."""
        size = -(-n_bytes // self._alignment) * self._alignment
        heappush(self._free.setdefault(size, []), va)


class PlainAllocator:
    """An allocator that passes every request on to the driver.

    Parameters
    ----------
    settings : AllocatorSettings
        Only the limits count: ``device_bytes`` and ``memory_fraction``.
    alignment : int, default 2 MiB
        Alignment of the addresses, byte; not used with ``place``.
    place : callable, optional
        Gives the address of a new tensor of so many byte; an :class:`AddressSupply` by default.
    listen : callable, optional
        As for :class:`~nsan.torch_alloc.machine.CachingAllocator`: each tensor has a segment_alloc entry
        before its alloc entry, and a segment_free entry after its free_completed entry.

    Attributes
    ----------
    reserved_bytes, allocated_bytes, active_bytes, requested_bytes : int
        Running sums. Nothing is rounded or kept: reserved, active and requested are one number; allocated
        falls already at the free, the others when it completes.
    peak_reserved_bytes, peak_allocated_bytes, peak_active_bytes : int
        The largest that these were.
    n_segments_made : int
        Calls of cudaMalloc: one per tensor.
    n_retries : int
        Always 0: there is no cache that could be released.
    """

    n_retries: Final = 0

    def __init__(
        self,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        *,
        alignment: int = ROUND_LARGE_BYTES,
        place: Callable[[int], int] | None = None,
        listen: Listen | None = None,
    ) -> None:
        supply = AddressSupply(alignment=alignment)
        self.settings = settings
        self.limit_bytes = settings.limit_bytes
        self._place = place or supply.take
        self._give_back = supply.give_back if place is None else None
        self._listen = listen
        self._homes: dict[tuple[str, int], FreeList] = {}
        self._segments: dict[Segment, None] = {}
        self.n_segments_made = 0
        self.active_bytes = self.allocated_bytes = 0
        self.peak_active_bytes = self.peak_allocated_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """What the driver has given: the same as the active bytes."""
        return self.active_bytes

    @property
    def requested_bytes(self) -> int:
        """What was asked for in active tensors: the same as the active bytes."""
        return self.active_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that the driver had given."""
        return self.peak_active_bytes

    def allocate(self, n_bytes: int, *, stream: int = 0, pool: str = DEFAULT_POOL) -> Block:
        """Serve a request with memory of its own.

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
            In state "allocated"; it is all of its segment.

        Raises
        ------
        AllocatorFullError
            If the GPU's memory or its allowed share does not suffice.
        UsageError
            If nothing is asked for.
        """
        if n_bytes < 1:
            msg = f"A request for {n_bytes} byte never reaches the driver: ask for at least 1."
            raise UsageError(msg)
        if self.limit_bytes is not None and self.active_bytes + n_bytes > self.limit_bytes:
            self._say("oom", 0, n_bytes, stream, pool)
            raise AllocatorFullError(n_bytes, self.active_bytes, self.limit_bytes)
        segment = Segment(
            self._place(n_bytes), n_bytes, self._home(stream, pool), serial=self.n_segments_made
        )
        block = Block(segment.va, n_bytes, segment, self.n_segments_made)
        block.state, block.requested_bytes = "allocated", n_bytes
        segment.first = block
        self._segments[segment] = None
        self.n_segments_made += 1
        self.active_bytes += n_bytes
        self.allocated_bytes += n_bytes
        self.peak_active_bytes = max(self.peak_active_bytes, self.active_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self._say("segment_alloc", segment.va, n_bytes, stream, pool)
        self._say("alloc", segment.va, n_bytes, stream, pool)
        return block

    def free(self, block: Block, *, pending: bool = False) -> None:
        """Take a tensor back and return its memory to the driver.

        Parameters
        ----------
        block : Block
            What :meth:`allocate` gave.
        pending : bool, default False
            Another stream still uses it: its memory is returned by :meth:`complete`.

        Raises
        ------
        UsageError
            If the block is not allocated.
        """
        if block.state != "allocated":
            raise not_allocated(block)
        block.state = "pending"
        self.allocated_bytes -= block.n_bytes
        self._say_of("free_requested", block)
        if not pending:
            self.complete(block)

    def complete(self, block: Block) -> None:
        """End a pending free: the memory goes back to the driver.

        Parameters
        ----------
        block : Block
            In state "pending".

        Raises
        ------
        UsageError
            If no free of the block is pending.
        """
        if block.state != "pending":
            raise not_pending(block)
        block.state = "free"
        del self._segments[block.segment]
        self.active_bytes -= block.n_bytes
        self._say_of("free_completed", block)
        self._say_of("segment_free", block)
        if self._give_back is not None:
            self._give_back(block.va, block.n_bytes)

    def empty_cache(self) -> list[Segment]:
        """Do nothing, as there is no cache.

        Returns
        -------
        list of Segment
            Empty.
        """
        return []

    def close_pool(self, pool: str) -> list[Segment]:  # noqa: ARG002 (the same call on every allocator)
        """Do nothing, as pools share everything and keep nothing.

        Returns
        -------
        list of Segment
            Empty.
        """
        return []

    def segments(self) -> list[Segment]:
        """Give what the driver has given, by address: one segment per tensor."""
        return sorted(self._segments, key=lambda segment: segment.va)

    def blocks(self, segment: Segment | None = None) -> list[Block]:
        """Give the tensors by address, of one segment or of all."""
        chosen = self.segments() if segment is None else [segment]
        return [part.first for part in chosen]

    def _home(self, stream: int, pool: str) -> FreeList:
        """Give the list that names stream and pool of a segment; nothing is ever in it."""
        home = self._homes.get((pool, stream))
        if home is None:
            half = BlockPool(pool, is_small=False)
            home = FreeList(half, stream, min_rest_bytes=0, max_split_bytes=inf)
            self._homes[pool, stream] = home
        return home

    def _say_of(self, action: str, block: Block) -> None:
        segment = block.segment
        self._say(action, block.va, block.n_bytes, segment.stream, segment.pool)

    def _say(self, action: str, va: int, n_bytes: int, stream: int, pool: str) -> None:
        if self._listen is not None:
            self._listen(action, va, n_bytes, stream, pool)
