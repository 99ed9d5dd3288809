"""Lines of code that an advice gives: exact calls, with the sizes and offsets that the trace shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from nsan.units import counted

if TYPE_CHECKING:
    from nsan.analysis.advisor.advice import Target

PREFETCH_NOTE: Final = (
    "CUDA 13: (p, bytes, {cudaMemLocationTypeDevice, 0}, 0, stream) for GPU 0, and "
    "(p, bytes, {cudaMemLocationTypeHost, 0}, 0, stream) for the CPU."
)
"""What differs in a newer CUDA, for a comment beside the calls: a place in braces, then flags."""

ADVISE_NOTE: Final = (
    "// CUDA 13: the last argument of cudaMemAdvise is {cudaMemLocationTypeDevice, 0} for GPU 0, and "
    "{cudaMemLocationTypeHost, 0} for the CPU."
)
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
        As "p2", or "(char *)p2 + 65536". Addresses are those of one run, so they are no expression.
    """
    return f"(char *){target.pointer} + {offset_bytes}" if offset_bytes else target.pointer


def guess_note(target: Target) -> str:
    """Say in a comment which memory a pointer stands for, where that was guessed from addresses.

    Parameters
    ----------
    target : Target
        The memory.

    Returns
    -------
    str
        To append to a line; "" where the allocation is known.
    """
    if not target.is_guessed or target.va is None:
        return ""
    return f"  // {target.pointer}: what lay at 0x{target.va:x} in this run, guessed from addresses; may be several arrays"


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
        f"cudaMemPrefetchAsync({address_of(target, offset)}, {n_bytes}, {where}, {stream});{guess_note(target)}"
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
        f"{guess_note(target)}"
        for what, device in advice
    )
