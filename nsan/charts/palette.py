"""One colour per cause, access, direction and state, in light and dark; imports no chart library.

Causes began as the colours of Okabe and Ito, accesses as Paul Tol's bright scheme; both are moved a little
so that any two of them differ by 18 or more in CIE Lab for people with each kind of colour blindness, on
either ground, and stand out from it by 3 to 1 (``tests/unit/test_palette.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Theme = Literal["light", "dark"]


@dataclass(frozen=True)
class Shade:
    """A colour on a light and on a dark ground, as ``#rrggbb``."""

    light: str
    dark: str

    def on(self, theme: Theme) -> str:
        """Choose the colour for a ground."""
        return self.dark if theme == "dark" else self.light


CAUSES: Final = {
    "coherence": Shade("#b14400", "#f0803c"),
    "prefetch": Shade("#7996c6", "#4ab3f1"),
    "user": Shade("#0066a6", "#0581cc"),
    "eviction": Shade("#983f77", "#e08fc0"),
    "access_counters": Shade("#0a955c", "#25e6b5"),
    "unknown": Shade("#8d8d8d", "#838383"),
    "other": Shade("#ac9400", "#f0e442"),
}
"""Colour of each migration cause (:data:`nsan.schema.CAUSE`)."""

ACCESSES: Final = {
    "read": Shade("#617baf", "#7da0d3"),
    "write": Shade("#d34269", "#ffa6a3"),
    "atomic": Shade("#a83377", "#b2509a"),
    "prefetch": Shade("#258730", "#4fb862"),
    "unknown": Shade("#949494", "#898989"),
    "other": Shade("#a99515", "#cdbb44"),
}
"""Colour of each access of a page fault (:data:`nsan.schema.ACCESS`)."""
