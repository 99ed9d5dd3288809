"""Why a file is refused, in the child process that reads it. Standard library only."""

from __future__ import annotations

from typing import Final, Literal

Kind = Literal["unsafe", "damaged", "other", "memory"]
"""It would run something or grow without bound; it is not whole; it is no snapshot; no memory left."""

_LONGEST: Final = 80


class RefusedError(Exception):
    """The file is not read; the text says why and where."""

    def __init__(self, kind: Kind, text: str) -> None:
        self.kind: Kind = kind
        super().__init__(text)


def shown(text: str, limit: int = _LONGEST) -> str:
    """Return a text of the file as a message can hold it: short, without control characters."""
    cut = text[:limit] + ("..." if len(text) > limit else "")
    return "".join(c if c.isprintable() else "?" for c in cut)


def kind_of(value: object) -> str:
    """Return what a value is, in words."""
    if value is None:
        return "nothing"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
