"""From the size that was asked for to the size of a block and of a segment.

Source: ``round_size``, ``get_allocation_size`` and ``get_pool`` of ``CUDACachingAllocator.cpp`` and
``roundup_power2_divisions`` of ``CUDAAllocatorConfig.cpp`` (2.6.0; the same in the wheels to 2.14).
"""

from __future__ import annotations

from collections.abc import Sequence

from nsan.torch_alloc.constants import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    MIN_LARGE_BYTES,
    N_DIVISIONS,
    ROUND_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
)

_FIRST_BUCKET = 20
"""Exponent of the first bucket of the divisions: it holds [1, 2) MiB and all that is smaller."""


def round_size(n_bytes: int, divisions: Sequence[int] = ()) -> int:
    """Round a request to the size of a block.

    Parameters
    ----------
    n_bytes : int
        Bytes that were asked for; below one block's least size they count as one.
    divisions : sequence of 16 int, optional
        ``roundup_power2_divisions``: steps between two powers of two, by size from 1 MiB up. 0 and 1
        mean no such rounding; without the sequence there is none at all.

    Returns
    -------
    int
        Bytes, a multiple of 512 if the divisions are off or the step is one.

    Examples
    --------
    >>> round_size(1), round_size(513), round_size(1200 << 20, [4] * 16) >> 20
    (512, 1024, 1280)
    """
    if n_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    if divisions:
        bucket = min(max(n_bytes.bit_length() - 1 - _FIRST_BUCKET, 0), N_DIVISIONS - 1)
        steps = divisions[bucket]
        if steps > 1 and n_bytes > MIN_BLOCK_BYTES * steps:
            # Up to the next of the equal steps above the power of two below; a power of two stays.
            step = (1 << (n_bytes.bit_length() - 1)) // steps
            return -(-n_bytes // step) * step
    return -(-n_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def is_small(rounded_bytes: int) -> bool:
    """Tell whether a rounded request is served by the small pool.

    Examples
    --------
    >>> is_small(1 << 20), is_small((1 << 20) + 512)
    (True, False)
    """
    return rounded_bytes <= SMALL_BYTES


def segment_size(rounded_bytes: int, large_segment_bytes: int = LARGE_SEGMENT_BYTES) -> int:
    """Give the size of the segment that is made for a request when nothing free fits.

    Parameters
    ----------
    rounded_bytes : int
        The request after :func:`round_size`.
    large_segment_bytes : int, default 20 MiB
        Segment for large requests below 10 MiB.

    Returns
    -------
    int
        Bytes: 2 MiB for the small pool, then ``large_segment_bytes``, from 10 MiB on the request
        itself, up to the next 2 MiB.

    Examples
    --------
    >>> [segment_size(n << 20) >> 20 for n in (1, 2, 9, 10, 11)]
    [2, 20, 20, 10, 12]
    """
    if rounded_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded_bytes < MIN_LARGE_BYTES:
        return large_segment_bytes
    return -(-rounded_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
