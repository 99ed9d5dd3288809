"""Styles of a notebook's own cells, so that they reach no further than what these cells show.

A style may hide or cover a whole page. What stays here is little, and known: plain rules of properties that
change how something looks in its place, each for the inside of an output. The style of the page
(``.nsan-output``) holds what is left within its box.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

INSIDE: Final = ".nsan-output"
"""What shows the outputs of foreign cells."""

_COMMENT: Final = re.compile(r"/\*.*?(?:\*/|$)", re.DOTALL)
_SELECTOR: Final = re.compile(r"[\w#.*](?:[\w\s#.*:>+~-]|\([\w\s+-]*\))*")
_PROPERTY: Final = re.compile(
    r"(?:background(?:-color|-image)?|border(?:-[a-z]+)*|caption-side|color|direction|display"
    r"|fill(?:-opacity|-rule)?|font(?:-[a-z]+)*|height|letter-spacing|line-height|list-style(?:-type)?"
    r"|margin(?:-[a-z]+)?|max-height|max-width|min-height|min-width|opacity|overflow(?:-[xy]|-wrap)?"
    r"|padding(?:-[a-z]+)?|stroke(?:-[a-z]+)*|text-(?!indent)[a-z-]+|vertical-align|visibility"
    r"|white-space|width|word-(?:break|spacing|wrap))"
)
_PLAIN: Final = r"[\w\s#%.,+*/!-]"
_VALUE: Final = re.compile(
    rf"(?:{_PLAIN}|\((?:{_PLAIN}|\({_PLAIN}*\))*\)|'[\w\s.,-]*'|\"[\w\s.,-]*\")+"
)
_ELSEWHERE: Final = re.compile(r"url\(|/\*|margin[a-z-]*:.*-", re.IGNORECASE | re.DOTALL)
"""What asks for something, hides what follows it, or pulls a box over others."""


def declarations(text: str) -> str:
    """Keep of the declarations of a style what changes a look in its place.

    Parameters
    ----------
    text : str
        As in a ``style`` attribute.

    Returns
    -------
    str
        The declarations that stay, in their order; "" for none.

    Examples
    --------
    >>> declarations("color: red; position: fixed; background: url(a.png)")
    'color: red'
    """
    kept = []
    for each in text.split(";"):
        name, _, value = each.partition(":")
        name, value = name.strip().lower(), value.strip()
        said = f"{name}: {value}"
        known = _PROPERTY.fullmatch(name) and _VALUE.fullmatch(value)
        if known and not _ELSEWHERE.search(said):
            kept.append(said)
    return "; ".join(kept)


def rules(text: str) -> str:
    """Keep of a style sheet its plain rules, each for the inside of an output only.

    Parameters
    ----------
    text : str
        As in a ``style`` element.

    Returns
    -------
    str
        Rules; none for a medium, a font, an animation, or with a selector out of the ordinary.

    Examples
    --------
    >>> rules("main, td.a { display: none } @media print { b { color: red } }")
    '.nsan-output main, .nsan-output td.a { display: none }'
    """
    kept = []
    for heads, body in _plain_rules(_COMMENT.sub("", text)):
        selectors = [each.strip() for each in heads.split(",")]
        said = declarations(body)
        if said and all(_SELECTOR.fullmatch(each) for each in selectors):
            inside = ", ".join(f"{INSIDE} {each}" for each in selectors)
            kept.append(f"{inside} {{ {said} }}")
    return "\n".join(kept)


def _plain_rules(text: str) -> Iterator[tuple[str, str]]:
    """Find rules that stand in no other one and have none in them: selectors and declarations."""
    depth = deepest = start = opened = 0
    for brace in re.finditer(r"[{}]", text):
        at = brace.start()
        if brace[0] == "{":
            depth += 1
            deepest = max(deepest, depth)
            opened = at if depth == 1 else opened
            continue
        if depth == deepest == 1:
            # A statement, as an import, may stand before the selectors.
            yield text[start:opened].rpartition(";")[2], text[opened + 1 : at]
        depth = max(depth - 1, 0)
        if depth == 0:
            deepest, start = 0, at + 1
