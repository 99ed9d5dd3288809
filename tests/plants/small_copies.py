"""Memory that moves in tiny pieces: by calls in a loop, and by a gather that touches little of each block."""

from planting import Plant

from nsan.model.access import Stream, Strided
from nsan.model.making import Recipe
from nsan.model.program import (
    Allocate,
    HostTouch,
    Kernel,
    Launch,
    Prefetch,
    Program,
    Synchronize,
)
from nsan.units import KIB, MIB

_SIZE = 32 * MIB
_PIECE = 64 * KIB
_READ = Kernel("scale", 1024, 256, (Stream(allocation="x"),))


def _filled(*prefetches):
    return Program(
        "in_pieces",
        (
            Allocate("w", 2 * MIB),
            Allocate("x", _SIZE),
            HostTouch("x", write=True),
            *prefetches,
            Launch(_READ),
            Synchronize(),
        ),
    )


_IN_A_LOOP = [Prefetch("x", 0, at, _PIECE) for at in range(0, _SIZE, _PIECE)]
_LARGER = 4 * _PIECE
_IN_LARGER_PIECES = [Prefetch("x", 0, at, _LARGER) for at in range(0, _SIZE, _LARGER)]

_BLOCK = 2 * MIB
_N = 160
_FEW = 4 * KIB


_EVERY = range(0, _N * _BLOCK, _BLOCK)


def _gathered(kernel, *packing):
    return Program(
        "gather",
        (
            Allocate("table", _N * _BLOCK),
            *(HostTouch("table", True, at, _FEW) for at in _EVERY),
            *packing,
            Launch(kernel),
            Synchronize(),
        ),
    )


_SPARSE = Kernel("gather", 1, _N, (Strided(allocation="table", stride_bytes=_BLOCK),))
_PACKED = Kernel("gather", 1, _N, (Strided(allocation="packed", stride_bytes=_FEW),))
_PACKING = [Allocate("packed", _N * _FEW), HostTouch("packed", write=True)]

PLANTS = (
    Plant(
        "prefetch-in-pieces",
        "tiny_migrations",
        Recipe(_filled(*_IN_A_LOOP)),
        "x",
        Recipe(_filled(Prefetch("x"))),
    ),
    Plant(
        "prefetch-in-larger-pieces",
        "tiny_migrations",
        Recipe(_filled(*_IN_LARGER_PIECES)),
        "x",
        Recipe(_filled(Prefetch("x"))),
    ),
    Plant(
        "sparse-gather",
        "tiny_migrations",
        Recipe(_gathered(_SPARSE)),
        "table",
        Recipe(_gathered(_PACKED, *_PACKING)),
    ),
)
CLEAN = ()
