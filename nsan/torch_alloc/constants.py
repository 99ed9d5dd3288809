"""Sizes of the caching allocator (c10/cuda/CUDACachingAllocator.cpp, c10/core/AllocatorConfig.h from 2.10)."""

from __future__ import annotations

from typing import Final

from nsan.units import MIB

MIN_BLOCK_BYTES: Final = 512
"""Rounding unit and smallest block (kMinBlockSize)."""

SMALL_BYTES: Final = 1 * MIB
"""Largest rounded request of the small pool (kSmallSize); above it the large pool."""

SMALL_SEGMENT_BYTES: Final = 2 * MIB
"""A segment of the small pool (kSmallBuffer)."""

LARGE_SEGMENT_BYTES: Final = 20 * MIB
"""A segment for large requests below ``MIN_LARGE_BYTES`` (kLargeBuffer; settable from 2.11 on)."""

MIN_LARGE_BYTES: Final = 10 * MIB
"""From here on a segment is the request, rounded up to ``ROUND_LARGE_BYTES`` (kMinLargeAlloc)."""

ROUND_LARGE_BYTES: Final = 2 * MIB
"""Granule of large segments (kRoundLarge); their base was 2 MiB aligned in all real cases."""

N_DIVISIONS: Final = 16
"""Buckets of ``roundup_power2_divisions``: one per power of two from 1 MiB to 32 GiB."""

DEFAULT_POOL: Final = "0,0"
"""The pool of all that asks for none; others are graph captures (``n,0``) and MemPools (``0,n``)."""
