"""How the charts of a page fit into it, however many marks they have.

A chart costs a page twice: its picture, for those who have no script, and its specification, from which
the script draws it live. What is too much goes in steps, each with the largest charts first: the picture
becomes pixels, then fewer pixels, then the chart loses its live form. No chart goes.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from nsan.charts.saving import jpeg_of
from nsan.offline import packed
from nsan.report.blocks import Picture

_TAG: Final = re.compile(r'<\w[^<>"]*(?:"[^"]*"[^<>"]*)*>')
_SPOKEN: Final = re.compile(r' (?:aria-[a-z]+|role|pointer-events)="[^"]*"')
_DRAWN: Final = re.compile(r' (?:d|transform|x|y|[xy][12]|width|height|points)="[^"]*"')
_LONG: Final = re.compile(r"-?\d*\.\d{3,}(?![\de])")
_SIZE: Final = re.compile(r'<svg[^>]*? width="([\d.]+)" height="([\d.]+)"')
_AROUND: Final = 800
"""Bytes of markup around a chart."""


@dataclass(frozen=True)
class Form:
    """A chart as a page has it.

    Attributes
    ----------
    picture : Picture
        The chart.
    svg : str
        Address of its picture as lines and letters, which holds it whole.
    image : str
        Address of the picture that is shown: the same, or in pixels.
    spec : str
        Its specification, deflated; empty where the page shows the picture only.
    """

    picture: Picture
    svg: str
    image: str
    spec: str

    @property
    def is_live(self) -> bool:
        """Whether a script can draw it."""
        return bool(self.spec)

    @property
    def n_bytes(self) -> int:
        """What it costs the page."""
        return len(self.image) + len(self.spec) + _AROUND


def fitted(pictures: Iterable[Picture], room: int, *, live: bool = True) -> list[Form]:
    """Give charts the best form for which there is room.

    Parameters
    ----------
    pictures : iterable of Picture
        The charts of a page.
    room : int
        Bytes that they may have together.
    live : bool, default True
        Whether the page has a script.

    Returns
    -------
    list of Form
        One for each, in their order; the same for the same charts.
    """
    forms = [_best(each, live=live) for each in pictures]
    for step in (_to_pixels, _to_few_pixels, _to_picture, _to_least):
        # A page needs its picture least where it has the chart live.
        for at in sorted(range(len(forms)), key=lambda i: forms[i].n_bytes, reverse=True):
            if sum(each.n_bytes for each in forms) <= room:
                return forms
            smaller = step(forms[at])
            if smaller.n_bytes < forms[at].n_bytes:
                forms[at] = smaller
    return forms


def _best(picture: Picture, *, live: bool) -> Form:
    svg = _address("svg+xml", minified(picture.svg).encode())
    spec = json.dumps(picture.spec, separators=(",", ":"))
    return Form(picture, svg, svg, packed(spec.encode()) if live else "")


def _to_pixels(form: Form) -> Form:
    image = jpeg_of(form.picture.svg, quality=75)
    return replace(form, image=_address("jpeg", image))


def _to_few_pixels(form: Form) -> Form:
    image = jpeg_of(form.picture.svg, scale=0.6, quality=60)
    return replace(form, image=_address("jpeg", image))


def _to_picture(form: Form) -> Form:
    """Take the live form away; then the picture should be one to look at, if that is less."""
    drawn = replace(form, image=form.svg, spec="")
    good = min(drawn, _to_pixels(drawn), key=lambda each: each.n_bytes)
    return good if good.n_bytes < form.n_bytes else _to_least(form)


def _to_least(form: Form) -> Form:
    return replace(_to_few_pixels(form), spec="")


def _address(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{b64encode(data).decode()}"


def size_of(svg: str) -> tuple[int, int]:
    """Read the width and the height of a picture, in pixels; zeros if it does not say."""
    found = _SIZE.search(svg)
    return (round(float(found[1])), round(float(found[2]))) if found else (0, 0)


def minified(svg: str) -> str:
    r"""Leave out of a picture what nobody sees: names for screen readers per mark, hundredths of pixels.

    Parameters
    ----------
    svg : str
        A picture as the charts are rendered.

    Returns
    -------
    str
        It looks the same; texts are as they were.

    Examples
    --------
    >>> minified('<path aria-label="a > b" d="M1.23456,2h-0.98765"/><text x="1">1.23456</text>')
    '<path d="M1.23,2h-0.99"/><text x="1">1.23456</text>'
    """
    return _TAG.sub(_minified_tag, svg)


def _minified_tag(found: re.Match[str]) -> str:
    tag = _SPOKEN.sub("", found[0])
    return _DRAWN.sub(lambda attribute: _LONG.sub(_rounded, attribute[0]), tag)


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")
