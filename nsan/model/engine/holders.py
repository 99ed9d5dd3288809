"""Who holds memory while a program runs: an array of owners that follows the allocator's history.

Memory is cut into pieces at every address where a block, a segment or a copy begins or ends, so that
each piece is of one holder at a time. All is decided by the order of operations, never by time.
"""

from __future__ import annotations

from typing import Final

from nsan.model.engine.jit import entry
from nsan.model.engine.state import Bits, Ints, Small, number

# What an entry of the history does to its pieces.
MAKE: Final = number(0)
GIVE: Final = number(1)
ASK_BACK: Final = number(2)
TAKE_BACK: Final = number(3)
UNMAKE: Final = number(4)

# What memory is to the allocator.
OUTSIDE: Final = number(0)
UNUSED: Final = number(1)
LIVE: Final = number(2)
PENDING: Final = number(3)
CACHED: Final = number(4)

# Whether what came in is older than its tensor.
NOT_STALE: Final = number(0)
IS_STALE: Final = number(1)
UNKNOWN: Final = number(2)
"""It never left the GPU since its segment was made."""

# Ways of a copy.
IN: Final = number(1)
OUT: Final = number(-1)


@entry
def follow(
    entries: Ints,
    seen: Ints,
    order: Ints,
    now: tuple[Bits, Small, Small],
    out: tuple[Bits, Small, Small],
) -> None:
    """Write down what pieces were when something happened to them.

    ``entries`` has kind, first piece, end and tensor of each entry of the history; ``seen`` has
    first piece, end, position and place in ``out`` of each happening; ``order`` sorts these by position.
    ``now`` and ``out`` are state, tensor and entry that made the segment, by piece.
    """
    done = 0
    for k in order:
        while done < seen[k, 2]:
            kind, first, last, tensor = entries[done]
            if kind == MAKE:
                now[0][first:last] = UNUSED
                now[1][first:last] = -1
                now[2][first:last] = done
            elif kind == GIVE:
                now[0][first:last] = LIVE
                now[1][first:last] = tensor
            elif kind == ASK_BACK:
                now[0][first:last] = PENDING
            elif kind == TAKE_BACK:
                now[0][first:last] = CACHED
            else:
                now[0][first:last] = OUTSIDE
                now[1][first:last] = -1
            done += 1
        at = seen[k, 3]
        for piece in range(seen[k, 0], seen[k, 1]):
            out[0][at] = now[0][piece]
            out[1][at] = now[1][piece]
            out[2][at] = now[2][piece]
            at += 1


@entry
def find_stale(
    seen: Ints,
    ways: Ints,
    order: Ints,
    alloc_sequence: Ints,
    of: tuple[Bits, Small, Small],
    left: Ints,
    stale: Bits,
) -> None:
    """Say of what came in whether it had left the GPU before its tensor was allocated.

    ``order`` sorts ``seen`` as the copies were made; ``left`` is, by piece, the position at which it
    last left, -1 at first; ``of`` is what :func:`follow` wrote.
    """
    for k in order:
        at = seen[k, 3]
        for piece in range(seen[k, 0], seen[k, 1]):
            if ways[k] == OUT:
                left[piece] = seen[k, 2]
            elif ways[k] == IN and of[0][at] == LIVE:
                if left[piece] <= of[2][at]:
                    stale[at] = UNKNOWN
                elif alloc_sequence[of[1][at]] >= left[piece]:
                    stale[at] = IS_STALE
            at += 1
