"""One colour per cause, access, direction and state, in light and dark; imports no chart library.

Causes take the eight colours of Okabe and Ito, which people who see no red or no green can tell apart;
accesses take those of Paul Tol's bright scheme. What stands beside each other in one view differs in
lightness too.
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
    "coherence": Shade("#d55e00", "#f0803c"),
    "prefetch": Shade("#56b4e9", "#56b4e9"),
    "user": Shade("#0072b2", "#4c9be8"),
    "eviction": Shade("#b0528a", "#e08fc0"),
    "access_counters": Shade("#009e73", "#2fc79a"),
    "unknown": Shade("#8a8a8a", "#9a9a9a"),
    "other": Shade("#b8a000", "#f0e442"),
}
"""Colour of each migration cause (:data:`nsan.schema.CAUSE`)."""

ACCESSES: Final = {
    "read": Shade("#4477aa", "#6f9fd0"),
    "write": Shade("#ee6677", "#ff8896"),
    "atomic": Shade("#aa3377", "#d766a8"),
    "prefetch": Shade("#228833", "#55bb66"),
    "unknown": Shade("#8a8a8a", "#9a9a9a"),
    "other": Shade("#b09c1e", "#ccbb44"),
}
"""Colour of each access of a page fault (:data:`nsan.schema.ACCESS`)."""
