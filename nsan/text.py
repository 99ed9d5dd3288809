"""Words that people see: labels of what the driver does, and names from a trace made harmless.

Kernel, NVTX and allocation names are hostile text. Whoever shows one takes it through :func:`safe`
or :func:`shortened` first; escaping for HTML or Markdown comes after that, where the markup is written.
"""

from __future__ import annotations

import re
from typing import Final

DIRECTION_WORDS: Final = {"htod": "HtoD", "dtoh": "DtoH", "dtod": "DtoD"}
"""Directions as analysts know them."""

CAUSE_WORDS: Final = {
    "user": "user prefetch",
    "coherence": "page fault",
    "prefetch": "speculative prefetch",
    "eviction": "eviction",
    "access_counters": "access counters",
}
"""Causes of migrations as the nsys UI names them, spelt right."""

_UNSAFE: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def safe(text: object) -> str:
    r"""Make text harmless: control and direction characters become visible.

    Parameters
    ----------
    text : object
        Anything; a text from a trace as a rule.

    Returns
    -------
    str
        The text, on one line.

    Examples
    --------
    >>> print(safe("add\x1b[31m"))
    add\x1b[31m
    """
    return _UNSAFE.sub(lambda found: f"\\x{ord(found[0]):02x}", str(text))


def shortened(text: object, most: int = 80) -> str:
    """Make text harmless and short: the middle of a long name gives way to an ellipsis.

    Parameters
    ----------
    text : object
        Anything; a kernel's name may be 20 kB long.
    most : int, default 80
        Characters at most.

    Returns
    -------
    str
        At most so many characters; both ends of a long name stay, for they tell names apart.

    Examples
    --------
    >>> shortened("a" * 10 + "b" * 10, 9)
    'aaaa…bbbb'
    """
    # What is cut is not looked at: the end of a name of megabytes costs nothing.
    raw = str(text)
    whole = safe(raw if len(raw) <= 2 * most else raw[:most] + "…" + raw[-most:])
    if len(whole) <= most:
        return whole
    head = most // 2
    return f"{whole[:head]}…{whole[len(whole) - (most - head - 1) :]}"


def direction_word(value: str) -> str:
    """Write a direction as analysts know it."""
    return DIRECTION_WORDS.get(value, value)


def cause_word(value: str) -> str:
    """Write a cause as the nsys UI does, spelt right."""
    return CAUSE_WORDS.get(value, value)
