"""Names of allocators, and the switches that take one mechanism of the caching allocator away."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from nsan.errors import UnknownNameError, UsageError

ALLOCATORS: Final[dict[str, str]] = {
    "raw": "one cudaMallocManaged per tensor, cudaFree when it dies",
    "caching": "PyTorch's caching allocator over managed segments (PCA)",
}
"""Ways to allocate tensors."""

SWITCHES: Final[dict[str, str]] = {
    "release": "reuse off: the pages of a tensor end with it, as without the cache",
    "drop": "dead traffic off: pages of cached memory are dropped where they would be copied",
    "apart": "packing off: every tensor has 2 MiB blocks of its own",
}
"""What may be taken from "caching", as ``caching:release+drop``; the model's, no option of PyTorch."""


@dataclass(frozen=True)
class Allocation:
    """A way to allocate tensors.

    Attributes
    ----------
    kind : str
        One of ``ALLOCATORS``.
    switches : frozenset of str
        Of ``SWITCHES``; only "caching" has any.

    Examples
    --------
    >>> str(Allocation("caching", frozenset(["drop", "release"])))
    'caching:release+drop'
    """

    kind: str
    switches: frozenset[str] = field(default_factory=frozenset)

    def __str__(self) -> str:
        own = "+".join(switch for switch in SWITCHES if switch in self.switches)
        return f"{self.kind}:{own}" if own else self.kind


def parse_allocator(text: str) -> Allocation:
    """Read an allocator as people write it.

    Parameters
    ----------
    text : str
        One of ``ALLOCATORS``; after "caching:" switches in any order, as "caching:drop+apart".

    Returns
    -------
    Allocation
        As text it is the same name, with its switches in the order of ``SWITCHES``.

    Raises
    ------
    UsageError
        If there is no such allocator or switch, or one is named twice; the message says what there is.
    """
    kind, colon, written = text.partition(":")
    if kind not in ALLOCATORS:
        raise UnknownNameError("allocator", kind, ALLOCATORS)
    if not colon:
        return Allocation(kind)
    if kind != "caching":
        msg = f"{text!r}: only caching has switches. Write {kind}."
        raise UsageError(msg)
    named = written.split("+") if written else []
    for switch in named:
        if switch not in SWITCHES:
            raise UnknownNameError("switch of the caching allocator", switch, SWITCHES)
        if named.count(switch) > 1:
            msg = f"{text!r} names {switch} twice: name it once."
            raise UsageError(msg)
    if not named:
        msg = f"{text!r} names no switch: write caching:{'+'.join(SWITCHES)}, or caching for none."
        raise UsageError(msg)
    return Allocation(kind, frozenset(named))
