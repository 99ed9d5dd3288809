"""Cells of an executed notebook as parts of a page: markup, and charts that are still to be fitted."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from nsan.report.as_html import html_of
from nsan.report.blocks import Block, Picture, from_plain
from nsan.report.cleaning import Anchors, cleaned
from nsan.report.shown import MIME
from nsan.text import safe

if TYPE_CHECKING:
    from nbformat import NotebookNode

IMAGES: Final = {
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
}
"""Pictures that a cell may show, by what is best: their types and suffixes."""

NO_SCRIPT: Final = (
    "What stands here in a notebook is drawn by a script of its own, and a report runs none: "
    "show it as a picture too."
)


_STYLED: Final = re.compile(r"<[^>]* style=|<(?:style|svg)\b")
"""What may be drawn beyond its place, unless an output is around it."""


_NAMELESS: Final = re.compile(r"<IPython\.[\w.]+ object>")


@dataclass(frozen=True)
class Markup:
    """A part of a page that is written.

    Attributes
    ----------
    text : str
        HTML.
    is_own : bool
        Whether nsan wrote it; the limit of a page's size is for that.
    """

    text: str
    is_own: bool = True


Part: TypeAlias = Markup | Picture

Code = Literal["left out", "folded", "open"]
"""How cells of code are shown."""


def parts_of(notebook: NotebookNode, anchors: Anchors, *, code: Code) -> list[Part]:
    """Turn the cells of a notebook into parts of a page.

    Parameters
    ----------
    notebook : NotebookNode
        An executed notebook.
    anchors : Anchors
        Takes the headings.
    code : {"left out", "folded", "open"}
        How the cells of code are shown.

    Returns
    -------
    list of Markup or Picture
        The parts, in order; nothing for what is empty.
    """
    found: list[Part] = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            if code != "left out" and cell.source.strip():
                found.append(_code(cell.source, is_open=code == "open"))
            for output in merged(cell.outputs):
                found.extend(_output(output))
        elif cell.source.strip():
            found.append(_written(cell, anchors))
    return found


def merged(outputs: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Join what a cell printed piece by piece.

    Parameters
    ----------
    outputs : iterable of mapping
        Outputs of a cell.

    Returns
    -------
    iterator of mapping
        The same, with neighbouring pieces of one stream as one.
    """
    for stream, group in groupby(outputs, lambda each: each.get("name")):
        if stream is None:
            yield from group
        else:
            text = "".join(map(joined, (each["text"] for each in group)))
            yield {"output_type": "stream", "name": stream, "text": text}


def joined(text: Any) -> str:
    """Give the text of an output, which a notebook may hold in lines."""
    return text if isinstance(text, str) else "".join(map(str, text))


def blocks_in(data: Mapping[str, Any]) -> list[Block] | None:
    """Read the blocks of an output of nsan's; None if it is of something else."""
    held = data.get(MIME)
    return None if held is None else from_plain(held["blocks"])


def plain_text(data: Mapping[str, Any]) -> str:
    """Read the plain form of an output; nothing if it only names an object of IPython's."""
    text = joined(data.get("text/latex") or data.get("text/plain", ""))
    return "" if _NAMELESS.fullmatch(text.strip()) else text


def last_lines(text: str) -> str:
    """Leave of a line that was written again and again, as of a progress bar, what it said last."""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return "\n".join(lines).strip("\n")


def _written(cell: Any, anchors: Anchors) -> Markup:
    if cell.cell_type != "markdown":
        return Markup(_pre(cell.source))
    held = cell.get("attachments")
    text = _rendered(cell.source, held, anchors)
    if _STYLED.search(text):
        text = f'<div class="nsan-output">{text}</div>'
    return Markup(text, is_own=not held)


def _rendered(source: str, attachments: Any = None, anchors: Anchors | None = None) -> str:
    """Render Markdown; formulas stay text, for there is nothing that sets them."""
    from nbconvert.filters.markdown_mistune import (
        InvalidNotebook,
        IPythonRenderer,
        MarkdownWithMath,
    )

    renderer = IPythonRenderer(
        escape=False,
        allow_harmful_protocols=False,
        exclude_anchor_links=True,
        attachments=attachments,
    )
    try:
        return cleaned(str(MarkdownWithMath(renderer=renderer).render(source)), anchors)
    except InvalidNotebook:  # a picture that it names is not in it
        return _pre(source)


def _code(source: str, *, is_open: bool) -> Markup:
    from nbconvert.filters.highlight import Highlight2HTML

    shown = Highlight2HTML(pygments_lexer="python")(_visible(source))  # type: ignore[no-untyped-call]
    opened = " open" * is_open
    return Markup(f'<details class="nsan-code"{opened}><summary>Code</summary>{shown}</details>')


def _output(output: Mapping[str, Any]) -> Iterator[Part]:
    if output["output_type"] == "stream":
        text = last_lines(output["text"])
        if text.strip():
            yield Markup(_terminal(text, f"nsan-{output['name']}"), is_own=False)
    elif output["output_type"] == "error":
        yield Markup(_terminal("\n".join(output["traceback"]), "nsan-traceback"), is_own=False)
    elif (blocks := blocks_in(output["data"])) is not None:
        for drawn, group in groupby(blocks, lambda each: isinstance(each, Picture)):
            if drawn:
                yield from group  # type: ignore[misc]
            else:
                yield Markup(html_of(group))
    elif shown := _shown(output["data"]):
        yield Markup(f'<div class="nsan-output">{shown}</div>', is_own=False)


def _shown(data: Mapping[str, Any]) -> str:
    """Show what is not of nsan's in the best form that needs no script."""
    markup = joined(data.get("text/html", ""))
    if shows(kept := cleaned(markup)):
        return kept
    for kind in IMAGES:
        if kind in data:
            return _image(kind, joined(data[kind]))
    if "text/markdown" in data:
        return _rendered(joined(data["text/markdown"]))
    text = plain_text(data)
    note = f"<p class='nsan-note'>{NO_SCRIPT}</p>" if asks_for_script(data) else ""
    if not text and not note:
        text = "\n".join(json.dumps(each) for kind, each in data.items() if kind.endswith("/json"))
    return (_pre(text) if text else "") + note


def shows(markup: str) -> bool:
    """Say whether markup shows anything at all."""
    bare = re.sub(r"<style\b.*?</style>", "", markup, flags=re.DOTALL)
    return bool(re.search(r"<(?:img|svg|hr)\b", bare) or re.sub(r"<[^>]*>", "", bare).strip())


def asks_for_script(data: Mapping[str, Any]) -> bool:
    """Say whether an output is drawn by a script of its own, as widgets are."""
    return "<script" in joined(data.get("text/html", "")) or any(
        kind.startswith("application/vnd.") or kind == "application/javascript" for kind in data
    )


def _image(kind: str, content: str) -> str:
    """Show a picture; of SVG, too, nothing can run in it there."""
    from base64 import b64encode

    if kind == "image/svg+xml":
        content = b64encode(content.encode()).decode()
    content = re.sub(r"[^A-Za-z0-9+/=]", "", content)
    return f'<img alt="A picture that the notebook shows" src="data:{kind};base64,{content}">'


def _pre(text: str) -> str:
    return f"<pre>{html.escape(_visible(text), quote=False)}</pre>"


def _terminal(text: str, kind: str) -> str:
    """Show what was printed, in the colours of a terminal."""
    from nbconvert.filters.ansi import ansi2html

    shown = str(ansi2html(text))  # type: ignore[no-untyped-call]
    return f'<pre class="{kind}">{_visible(shown)}</pre>'


def _visible(text: str) -> str:
    """Make control and direction characters visible; lines stay lines."""
    return "\n".join(safe(line.expandtabs()) for line in text.split("\n"))
