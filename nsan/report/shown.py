"""Blocks as a value that a notebook shows: as HTML with pictures, as Markdown, as text, and as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from nsan.report.as_html import html_of
from nsan.report.as_text import markdown_of, text_of
from nsan.report.blocks import Block, Text, to_plain
from nsan.widgets.static import has_front_end

MIME: Final = "application/vnd.nsan.report+json"
"""Type of the blocks themselves in a notebook: what a page is made from."""


class Blocks(tuple[Block, ...]):
    """Blocks in their order; a notebook shows them, and ``+`` puts several after one another."""

    __slots__ = ()

    def __str__(self) -> str:
        return text_of(self)

    def __add__(self, others: Iterable[Block]) -> Blocks:  # type: ignore[override]
        return Blocks((*self, *others))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:  # noqa: ARG002
        return {
            "text/plain": text_of(self),
            "text/markdown": markdown_of(self),
            "text/html": html_of(self),
            MIME: {"blocks": to_plain(self)},
        }


def if_live(text: str) -> Blocks:
    """Say how a view is used, where one can.

    Parameters
    ----------
    text : str
        What the mouse and the keys do.

    Returns
    -------
    Blocks
        The text; nothing where no browser answers and the view shows its pictures, as in a report.
    """
    return Blocks([Text(text)] if has_front_end() else [])
