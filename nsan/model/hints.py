"""Hints of a user to the driver: prefetches and advice for tensors, chosen by their role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nsan.errors import UnknownNameError, UsageError
from nsan.model.networks.tensors import ROLES

HINTS: Final[dict[str, str]] = {
    "prefetch": "cudaMemPrefetchAsync of each tensor before the kernel that uses it",
    "prefetch-object": "the same of the whole allocation that holds it: a segment, with the allocator",
    "read-mostly": "cudaMemAdvise: read by many, duplicates allowed",
    "preferred-gpu": "cudaMemAdvise: preferred location is the GPU",
    "preferred-cpu": "cudaMemAdvise: preferred location is the CPU",
    "accessed-by": "cudaMemAdvise: the GPU maps it where it lies",
}
"""Kinds of hint."""

LEAST_BYTES: Final = 1 << 20
"""Smaller tensors get no hint: a call would cost more than it can save (PASTA has the same limit)."""


@dataclass(frozen=True)
class Hint:
    """One hint for the tensors of some roles.

    Attributes
    ----------
    kind : str
        One of ``HINTS``.
    roles : tuple of str
        Of ``nsan.model.networks.tensors.ROLES``.
    """

    kind: str
    roles: tuple[str, ...] = ROLES

    def __str__(self) -> str:
        return self.kind if self.roles == ROLES else f"{self.kind}:{'+'.join(self.roles)}"


def parse_hint(text: str) -> Hint | None:
    """Read a hint as people write it.

    Parameters
    ----------
    text : str
        "none", a kind, or a kind with roles, as "prefetch:parameter+optimizer".

    Returns
    -------
    Hint or None
        None for "none".

    Raises
    ------
    UsageError
        If there is no such kind or role; the message lists them.
    """
    kind, colon, written = text.partition(":")
    if kind == "none":
        if colon:
            msg = f"{text!r}: no hint has no roles. Write none."
            raise UsageError(msg)
        return None
    if kind not in HINTS:
        raise UnknownNameError("hint", kind, ["none", *HINTS])
    if not colon:
        return Hint(kind)
    roles = tuple(dict.fromkeys(written.split("+")))
    for role in roles:
        if role not in ROLES:
            raise UnknownNameError("role of a tensor", role, ROLES)
    if not roles:
        msg = f"{text!r} names no role: write {kind}:parameter+optimizer, or {kind} for all."
        raise UsageError(msg)
    return Hint(kind, roles)
