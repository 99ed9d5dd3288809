"""What a thread block touches: one span of bytes per item, item by item as its warps issue them."""

from __future__ import annotations

from typing import Final

from nsan.model.engine.jit import compiled
from nsan.model.engine.queue import mixed
from nsan.model.engine.state import BASE, BYTES, OWN, PATTERN, Ints, number

STREAM: Final = number(0)
"""Own numbers: chunk bytes, items, backward."""
STRIDE: Final = number(1)
"""Own numbers: stride bytes, items, element bytes."""
RANDOM: Final = number(2)
"""Own numbers: element bytes, items, seed."""
ZIPF: Final = number(3)
"""Own numbers: row bytes, items, seed; its shape is the exponent."""
STENCIL: Final = number(4)
"""Own numbers: width, height, tile, halo, element bytes."""
MATMUL_A: Final = number(5)
MATMUL_B: Final = number(6)
MATMUL_C: Final = number(7)
"""Own numbers of the three matrices: columns, tile, element bytes, tiles per row of C, last step."""
CHASE: Final = number(8)
"""Own numbers: element bytes, seed."""
BROADCAST: Final = number(9)
"""Own numbers: chunk bytes, items."""


_SCATTER: Final = number(77)


@compiled
def n_items(stream: Ints, step: int) -> int:
    """Count the items that one thread block touches in one step of a stream."""
    pattern = stream[PATTERN]
    if pattern == STENCIL:
        return stream[OWN + 2] + 2 * stream[OWN + 3]
    if pattern == MATMUL_C:
        return stream[OWN + 1] if step == stream[OWN + 4] else 0
    if pattern in (MATMUL_A, MATMUL_B):
        return stream[OWN + 1]
    if pattern == CHASE:
        return 1
    return stream[OWN + 1]


@compiled
def span(
    stream: Ints, shape: float, place: tuple[int, int, int, int], item: int
) -> tuple[int, int]:
    """Give first byte and length of one item; a length of 0 means nothing.

    ``place`` is thread block, grid, step of the sweep over the stream, and step of all sweeps:
    random draws differ from sweep to sweep.
    """
    tb, grid, step, any_step = place
    pattern = stream[PATTERN]
    if pattern == STREAM:
        first, length = _stream(stream, step * grid + tb, item)
    elif pattern == STRIDE:
        first = ((step * grid + tb) * stream[OWN + 1] + item) * stream[OWN]
        length = stream[OWN + 2]
    elif pattern in (RANDOM, ZIPF):
        draw = mixed(stream[OWN + 2], any_step * grid + tb, item)
        rows = stream[BYTES] // stream[OWN]
        first = (draw % rows if pattern == RANDOM else _zipf(draw, rows, shape)) * stream[OWN]
        length = stream[OWN]
    elif pattern == STENCIL:
        first, length = _stencil(stream, tb, item)
    elif pattern == CHASE:
        first = mixed(stream[OWN + 1], tb, any_step) % (stream[BYTES] // stream[OWN]) * stream[OWN]
        length = stream[OWN]
    elif pattern == BROADCAST:
        first = step * stream[OWN] % stream[BYTES]
        length = stream[OWN]
    else:
        first, length = _matmul(stream, tb, step, item)
    if length <= 0 or first < 0 or first >= stream[BYTES]:
        return 0, 0
    return stream[BASE] + first, min(length, stream[BYTES] - first)


@compiled
def _stream(stream: Ints, chunk: int, item: int) -> tuple[int, int]:
    size = stream[OWN]
    n_chunks = (stream[BYTES] + size - 1) // size
    if chunk >= n_chunks:
        return 0, 0
    if stream[OWN + 2]:
        chunk = n_chunks - 1 - chunk
    piece = max(size // stream[OWN + 1], 1)
    return chunk * size + item * piece, piece


@compiled
def _stencil(stream: Ints, tb: int, item: int) -> tuple[int, int]:
    width, height, tile = stream[OWN], stream[OWN + 1], stream[OWN + 2]
    halo, element = stream[OWN + 3], stream[OWN + 4]
    across = (width + tile - 1) // tile
    row = tb // across * tile - halo + item
    left = max(tb % across * tile - halo, 0)
    right = min(tb % across * tile + tile + halo, width)
    if row < 0 or row >= height:
        return 0, 0
    return (row * width + left) * element, (right - left) * element


@compiled
def _matmul(stream: Ints, tb: int, step: int, item: int) -> tuple[int, int]:
    columns, tile, element = stream[OWN], stream[OWN + 1], stream[OWN + 2]
    across = stream[OWN + 3]
    row, column = tb // across * tile, tb % across * tile
    if stream[PATTERN] == MATMUL_A:
        column = step * tile
    elif stream[PATTERN] == MATMUL_B:
        row = step * tile
    if column >= columns:
        return 0, 0
    return ((row + item) * columns + column) * element, min(tile, columns - column) * element


@compiled
def _zipf(draw: int, rows: int, exponent: float) -> int:
    """Draw a rank by the inverse of the continuous Zipf law, and scatter the ranks over the rows."""
    u = (draw + 1) / 4611686018427387904.0
    if abs(exponent - 1.0) < 1e-9:
        rank = rows**u
    else:
        power = 1.0 - exponent
        rank = ((rows**power - 1.0) * u + 1.0) ** (1.0 / power)
    return mixed(_SCATTER, int(rank), _SCATTER) % rows
