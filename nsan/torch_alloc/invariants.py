"""What always holds in the caching allocator, whatever the program does.

Source: ``allocator.md`` 3.3, 7 and 9, checked there on 17 332 real segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from nsan.torch_alloc.blocks import Block, FreeList, Segment
from nsan.torch_alloc.constants import (
    MIN_BLOCK_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_SEGMENT_BYTES,
)
from nsan.torch_alloc.machine import CachingAllocator


def check(allocator: CachingAllocator) -> list[str]:
    """Name every invariant that an allocator violates.

    Parameters
    ----------
    allocator : CachingAllocator
        At rest, between two calls.

    Returns
    -------
    list of str
        One sentence per violation; empty if all is well.
    """
    problems = [*_of_sums(allocator), *_of_lists(allocator)]
    for segment in allocator.segments():
        problems += _of_segment(segment, allocator)
    for one, other in pairwise(allocator.segments()):
        if one.va + one.n_bytes > other.va:
            problems.append(f"{one} and {other} overlap.")
    return problems


def _of_segment(segment: Segment, allocator: CachingAllocator) -> Iterator[str]:
    blocks = allocator.blocks(segment)
    if sum(block.n_bytes for block in blocks) != segment.n_bytes:
        yield f"The blocks of {segment} do not add up to its size."
    if segment.va % ROUND_LARGE_BYTES:
        yield f"{segment} does not begin at a multiple of 2 MiB."
    is_caching = allocator.settings.is_caching
    if is_caching and segment.n_bytes % ROUND_LARGE_BYTES:
        yield f"The size of {segment} is not a multiple of 2 MiB."
    if segment.is_small and not segment.is_expandable and segment.n_bytes != SMALL_SEGMENT_BYTES:
        yield f"{segment} of the small pool is not of 2 MiB."
    for one, other in pairwise(blocks):
        if one.va + one.n_bytes != other.va:
            yield f"{one} and {other} do not touch."
        if one.state == other.state == "free":
            yield f"{one} and {other} are free neighbours."
    rounds_to_512 = is_caching and not any(
        d > 1 for d in allocator.settings.roundup_power2_divisions
    )
    for block in blocks:
        yield from _of_block(block, segment, allocator, rounds_to_512=rounds_to_512)


def _of_block(
    block: Block, segment: Segment, allocator: CachingAllocator, *, rounds_to_512: bool
) -> Iterator[str]:
    if block.n_bytes <= 0 or (rounds_to_512 and block.n_bytes % MIN_BLOCK_BYTES):
        yield f"The size of {block} is not a multiple of 512."
    if block.state not in {"allocated", "pending"}:
        return
    rounded = allocator.rounded(block.requested_bytes)
    if block.requested_bytes > rounded or rounded > block.n_bytes:
        yield f"{block} is smaller than its request of {block.requested_bytes} byte."
    if segment.is_small != (rounded <= allocator.small_bytes):
        yield f"{block} is in the wrong half of its pool."
    home = segment.home
    rest = block.n_bytes - rounded
    if rest >= home.min_rest_bytes and rounded < home.max_split_bytes:
        yield f"{block} was not split, though {rest} byte remain."


def _of_sums(allocator: CachingAllocator) -> Iterator[str]:
    blocks = allocator.blocks()
    used = [block for block in blocks if block.state in {"allocated", "pending"}]
    requested = sum(block.requested_bytes for block in used)
    active = sum(block.n_bytes for block in used)
    inactive = sum(block.n_bytes for block in blocks if block.state == "free")
    sums = {
        "reserved_bytes": sum(segment.n_bytes for segment in allocator.segments()),
        "allocated_bytes": sum(b.n_bytes for b in used if b.state == "allocated"),
        "active_bytes": active,
        "requested_bytes": requested,
    }
    for name, value in sums.items():
        if getattr(allocator, name) != value:
            yield f"{name} is {getattr(allocator, name)}, but the blocks say {value}."
    waste = sum(block.n_bytes - block.requested_bytes for block in used)
    if requested + waste + inactive != allocator.reserved_bytes:
        yield "Requested, waste and inactive bytes do not add up to the reserved ones."
    for name in ("reserved", "allocated", "active"):
        if getattr(allocator, f"peak_{name}_bytes") < getattr(allocator, f"{name}_bytes"):
            yield f"The peak of the {name} bytes is below them."
    limit = allocator.limit_bytes
    is_bounded = limit is not None and not allocator.settings.expandable_segments
    if is_bounded and allocator.reserved_bytes > (limit or 0):
        yield f"{allocator.reserved_bytes} byte are reserved, of {limit} that may be."


def _of_lists(allocator: CachingAllocator) -> Iterator[str]:
    listed: list[Block] = []
    for pool in allocator.pools.values():
        for home in pool.lists.values():
            listed += home.blocks
            yield from _of_list(home)
    free = [block for block in allocator.blocks() if block.state == "free"]
    if {id(block) for block in free} != {id(block) for block in listed}:
        yield "The free lists do not hold just the free blocks."
    unmapped = [
        block
        for segment in allocator.whole_segments()
        for block in segment.blocks()
        if block.state == "unmapped"
    ]
    if {id(block) for block in unmapped} != {
        id(block) for block in allocator.expandable.unmapped_blocks()
    }:
        yield "The list of unmapped addresses does not hold just these."


def _of_list(home: FreeList) -> Iterator[str]:
    if home.keys != [block.key for block in home.blocks] or home.keys != sorted(set(home.keys)):
        yield f"The free list of stream {home.stream}, pool {home.pool.name} is out of order."
    if any(one.n_bytes > other.n_bytes for one, other in pairwise(home.blocks)):
        yield f"The free list of stream {home.stream}, pool {home.pool.name} is not by size."
    for block in home.blocks:
        if block.segment.home is not home:
            yield f"{block} is in the free list of another stream or pool."
