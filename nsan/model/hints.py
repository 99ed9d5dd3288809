"""Hints of a user to the driver: prefetches and advice for tensors, chosen by role or by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
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
    """One hint for the tensors of some roles, or for tensors by name.

    Attributes
    ----------
    kind : str
        One of ``HINTS``.
    roles : tuple of str
        Of ``nsan.model.networks.tensors.ROLES``.
    names : tuple of str
        Only these tensors, whatever their role and size; without the step, as a snapshot names them.
        Empty: the roles decide.
    """

    kind: str
    roles: tuple[str, ...] = ROLES
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.names:
            return f"{self.kind}@{'+'.join(self.names)}"
        return self.kind if self.roles == ROLES else f"{self.kind}:{'+'.join(self.roles)}"


def parse_hint(text: str) -> Hint | None:
    """Read a hint as people write it.

    Parameters
    ----------
    text : str
        "none", a kind, a kind with roles, as "prefetch:parameter+optimizer", or a kind with tensors,
        as "prefetch@wte.weight+h.0.attn.bias".

    Returns
    -------
    Hint or None
        None for "none". Whether a network has such tensors is seen when the hint is applied.

    Raises
    ------
    UsageError
        If there is no such kind or role; the message lists them.
    """
    kind, *rest = re.split("([:@])", text, maxsplit=1)
    if kind == "none":
        if rest:
            msg = f"{text!r}: no hint has no roles and no tensors. Write none."
            raise UsageError(msg)
        return None
    if kind not in HINTS:
        raise UnknownNameError("hint", kind, ["none", *HINTS])
    if not rest:
        return Hint(kind)
    mark, written = rest
    chosen = tuple(dict.fromkeys(word.strip() for word in written.split("+")))
    if mark == "@":
        if not all(chosen):
            msg = f"{text!r} names no tensor: write {kind}@NAME+NAME, or {kind} for all."
            raise UsageError(msg)
        return Hint(kind, names=chosen)
    for role in chosen:
        if role not in ROLES:
            raise UnknownNameError("role of a tensor", role, ROLES)
    return Hint(kind, chosen)


def without_step(name: str) -> str:
    """Name a tensor as a snapshot does: without the step that it is of.

    Examples
    --------
    >>> without_step("fc.weight.grad#3")
    'fc.weight.grad'
    """
    return name.partition("#")[0]


def meant(hint: Hint, name: str, role: str, n_bytes: int) -> bool:
    """Say whether a hint is for a tensor.

    Parameters
    ----------
    hint : Hint
        By names or by roles.
    name : str
        Of the tensor, with or without its step.
    role : str
        Of the tensor.
    n_bytes : int
        Its size: by role, a tensor below ``LEAST_BYTES`` is never meant.

    Returns
    -------
    bool
        Whether the call is made.

    Examples
    --------
    >>> meant(Hint("prefetch", names=("fc.bias",)), "fc.bias#2", "parameter", 4096)
    True
    >>> meant(Hint("prefetch", ("parameter",)), "fc.bias#2", "parameter", 4096)
    False
    """
    if hint.names:
        return without_step(name) in hint.names
    return role in hint.roles and n_bytes >= LEAST_BYTES


def check_names(hints: Iterable[Hint], tensors: Iterable[str]) -> None:
    """Refuse hints for tensors that are not there.

    Parameters
    ----------
    hints : iterable of Hint
        What is to be applied.
    tensors : iterable of str
        Names of all tensors of the program, with or without their step.

    Raises
    ------
    UnknownNameError
        If a hint names another; the message begins with names that are like it.
    """
    wanted = dict.fromkeys(name for hint in hints for name in hint.names)
    if not wanted:
        return
    known = dict.fromkeys(map(without_step, tensors))
    for name in wanted:
        if name not in known:
            near = get_close_matches(name, known, n=10)
            raise UnknownNameError("tensor", name, dict.fromkeys([*near, *known]))
