"""Lines of code that an advice gives: exact calls, with the sizes and offsets that the trace shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from nsan.units import counted

if TYPE_CHECKING:
    from nsan.analysis.advisor.advice import Target

PREFETCH_NOTE: Final = "From CUDA 13 on, the third argument is a cudaMemLocation."
"""What differs in a newer CUDA, for a comment beside the calls."""

ADVISE_NOTE: Final = "// From CUDA 13 on, the last argument of cudaMemAdvise is a cudaMemLocation."
"""The same for advice."""

_MOST: Final = 8

_ADVICE: Final = {
    "read_mostly": "cudaMemAdviseSetReadMostly",
    "preferred_location": "cudaMemAdviseSetPreferredLocation",
    "accessed_by": "cudaMemAdviseSetAccessedBy",
}


def address_of(target: Target, offset_bytes: int = 0) -> str:
    """Write where a part of an allocation begins, as an expression of C++.

    Parameters
    ----------
    target : Target
        The allocation.
    offset_bytes : int
        Where in it.

    Returns
    -------
    str
        As "p2", or "(char *)p2 + 65536"; a number where bounds were guessed, for no pointer is known.
    """
    if target.is_guessed and target.va is not None:
        return f"(void *)0x{target.va + offset_bytes:x}"
    return f"(char *){target.pointer} + {offset_bytes}" if offset_bytes else target.pointer


def prefetch_calls(
    parts: Sequence[tuple[Target, int, int]], device: int | None, stream: str = "stream"
) -> tuple[str, ...]:
    """Write a prefetch of parts of memory.

    Parameters
    ----------
    parts : sequence of (Target, int, int)
        Allocation, offset and size in bytes.
    device : int, optional
        GPU; -1 is the CPU; None: not known.
    stream : str, default "stream"
        In which stream.

    Returns
    -------
    tuple of str
        A line each, at most 8 and how many more there are.
    """
    where = "cudaCpuDeviceId" if device == -1 else "device" if device is None else str(device)
    lines = [
        f"cudaMemPrefetchAsync({address_of(target, offset)}, {n_bytes}, {where}, {stream});"
        for target, offset, n_bytes in parts[:_MOST]
    ]
    more = len(parts) - len(lines)
    return (
        (*lines, f"// and {counted(more, 'more allocation')} in the same way")
        if more
        else tuple(lines)
    )


def advise_calls(
    target: Target,
    advice: Sequence[tuple[str, int]],
    offset_bytes: int = 0,
    n_bytes: int | None = None,
) -> tuple[str, ...]:
    """Write advice for a part of an allocation.

    Parameters
    ----------
    target : Target
        The allocation.
    advice : sequence of (str, int)
        As of :class:`nsan.analysis.advisor.advice.Change`: what, and for which GPU; -1 is the CPU.
    offset_bytes, n_bytes : int
        The part; by default all of it.

    Returns
    -------
    tuple of str
        A line each.
    """
    place = address_of(target, offset_bytes)
    size = target.bytes if n_bytes is None else n_bytes
    return tuple(
        f"cudaMemAdvise({place}, {size}, {_ADVICE[what]}, {'cudaCpuDeviceId' if device == -1 else device});"
        for what, device in advice
    )
