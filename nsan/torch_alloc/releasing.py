"""When the caching allocator gives memory back to the driver, and what.

Source: ``garbage_collect_cached_blocks``, ``release_available_cached_blocks`` and
``release_cached_blocks`` of ``CUDACachingAllocator.cpp`` (2.6.0, and the logic of 2.12). A segment of which
a part is in use is never released.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nsan.torch_alloc.blocks import Block, BlockPool, FreeList, Segment
from nsan.torch_alloc.constants import DEFAULT_POOL
from nsan.torch_alloc.settings import AllocatorSettings

if TYPE_CHECKING:
    from nsan.torch_alloc.machine import CachingAllocator


def collects_garbage(settings: AllocatorSettings) -> bool:
    """Tell whether garbage collection can act under these settings.

    It needs a threshold and a memory fraction of a known memory; from 2.12 on the fraction must be below 1.
    """
    fraction = settings.memory_fraction
    if settings.garbage_collection_threshold == 0 or fraction is None:
        return False
    if settings.device_bytes is None:
        return False
    return settings.tie_break == "address" or fraction < 1


def _whole_segments(pool: BlockPool | None) -> list[Block]:
    """Give the free blocks that are whole segments, in the order of the set."""
    blocks = pool.blocks() if pool is not None else []
    return [b for b in blocks if not b.is_split and not b.segment.is_expandable]


def collect_garbage(allocator: CachingAllocator) -> list[Segment]:
    """Release the segments of the default large pool that have been free for long.

    The age of a block is the number of searches in its pool since it became free. Blocks of at least the
    mean age go, again and again until what exceeds the threshold is released or nothing moves.

    Parameters
    ----------
    allocator : CachingAllocator
        With a memory fraction and a threshold.

    Returns
    -------
    list of Segment
        Those released, in order.
    """
    settings = allocator.settings
    allowed = int((settings.memory_fraction or 0.0) * (settings.device_bytes or 0))
    excess = allocator.reserved_bytes - int(settings.garbage_collection_threshold * allowed)
    pool = allocator.pools.get((DEFAULT_POOL, False))
    blocks = _whole_segments(pool)
    released: list[Segment] = []
    n_bytes, is_moving = 0, True
    now = pool.n_searches if pool is not None else 0
    while blocks and is_moving and n_bytes < excess:
        mean = sum(now - block.inserted_at for block in blocks) / len(blocks)
        old = [block.segment for block in blocks if now - block.inserted_at >= mean]
        for segment in old:
            allocator.release(segment)
            n_bytes += segment.n_bytes
        released += old
        blocks = [block for block in blocks if now - block.inserted_at < mean]
        is_moving = bool(old)
    return released


def release_oversize(allocator: CachingAllocator, home: FreeList, rounded: int) -> list[Segment]:
    """Release oversize segments of one stream to make room for a request.

    Parameters
    ----------
    allocator : CachingAllocator
        Nothing is released unless it has a ``max_split_size``.
    home : FreeList
        The list that the request is served from.
    rounded : int
        The request.

    Returns
    -------
    list of Segment
        The smallest that is as large as the request and as ``max_split_size``, else the largest ones until
        their sum is; empty if even all of them are too little (those are released all the same,
        and the request is not tried again).
    """
    limit = allocator.settings.max_split_bytes
    if limit is None:
        return []
    wanted = max(rounded, limit)
    at = bisect_left([block.n_bytes for block in home.blocks], wanted)
    if at < len(home.blocks) and _is_releasable(home.blocks[at]):
        segment = home.blocks[at].segment
        allocator.release(segment)
        return [segment]
    oversize = [b for b in reversed(home.blocks[:at]) if b.n_bytes >= limit and _is_releasable(b)]
    released: list[Segment] = []
    for block in oversize:
        if sum(segment.n_bytes for segment in released) >= wanted:
            break
        allocator.release(block.segment)
        released.append(block.segment)
    return released if sum(segment.n_bytes for segment in released) >= wanted else []


def _is_releasable(block: Block) -> bool:
    return not block.is_split and not block.segment.is_expandable


def release_cached(allocator: CachingAllocator) -> list[Segment]:
    """Wait for all streams, then release every segment without an active block.

    Parameters
    ----------
    allocator : CachingAllocator
        Its default pool goes first (large, then small), then the private pools that are no longer
        in use.

    Returns
    -------
    list of Segment
        Those released, in order.
    """
    allocator.complete_all()
    released: list[Segment] = []
    for small in (False, True):
        released += _release_all(allocator, allocator.pools.get((DEFAULT_POOL, small)))
    return released + release_pools(allocator, list(allocator.closed_pools))


def release_pools(allocator: CachingAllocator, pools: Iterable[str]) -> list[Segment]:
    """Release every segment without an active block of some pools, small before large."""
    return [
        segment
        for pool in pools
        for small in (True, False)
        for segment in _release_all(allocator, allocator.pools.get((pool, small)))
    ]


def _release_all(allocator: CachingAllocator, pool: BlockPool | None) -> list[Segment]:
    released = [block.segment for block in _whole_segments(pool)]
    expandable = [b for b in (pool.blocks() if pool else []) if b.segment.is_expandable]
    for segment in released:
        allocator.release(segment)
    for block in expandable:
        allocator.expandable.unmap(block)
    return released
