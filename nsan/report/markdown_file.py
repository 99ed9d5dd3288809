"""A report as Markdown, with its pictures as files beside it."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from nsan.report.as_text import markdown_of
from nsan.report.blocks import Picture
from nsan.report.cells import (
    IMAGES,
    NO_SCRIPT,
    asks_for_script,
    blocks_in,
    joined,
    last_lines,
    merged,
    plain_text,
)
from nsan.report.cleaning import cleaned
from nsan.report.fitting import minified
from nsan.report.html_as_text import text_of_html
from nsan.tabular.text import name
from nsan.text import safe

if TYPE_CHECKING:
    from nbformat import NotebookNode

_FENCE: Final = re.compile(r"`+")
_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[@-~]")


def pictures_of_notebook(notebook: NotebookNode) -> dict[str, bytes]:
    """Give the pictures of a report, which its Markdown names.

    Parameters
    ----------
    notebook : NotebookNode
        An executed notebook.

    Returns
    -------
    dict of str to bytes
        From names of files to what they hold: charts as SVG, what other cells show as it is.
    """
    writer = _Writer("")
    writer.write(notebook)
    return writer.pictures


def markdown_of_notebook(notebook: NotebookNode, *, folder: str) -> str:
    """Write an executed notebook as Markdown.

    Parameters
    ----------
    notebook : NotebookNode
        An executed notebook; cells of code are left out.
    folder : str
        Where the pictures of :func:`pictures_of_notebook` are, as seen from the text; "" for beside it.

    Returns
    -------
    str
        Markdown. What cells show that is not nsan's stands as Markdown if they have that, as a picture,
        or as text in a fence. Markdown of the notebook's own, of its cells and of what they show, stays as
        its author wrote it, with its links and its HTML: what shows the file decides what they may do.
    """
    return _Writer(folder).write(notebook)


class _Writer:
    """Writes cells one after the other, and names each picture once."""

    def __init__(self, folder: str) -> None:
        # Spaces and brackets would end an address in Markdown.
        self._folder = re.sub(r"[^\w./-]", lambda found: _percent(found[0]), folder)
        self.pictures: dict[str, bytes] = {}

    def write(self, notebook: NotebookNode) -> str:
        parts: list[str] = []
        for cell in notebook.cells:
            if cell.cell_type == "code":
                for output in merged(cell.outputs):
                    parts.extend(self._output(output))
            elif cell.cell_type == "markdown":
                parts.append(cell.source.strip())
            else:
                parts.append(_fenced(cell.source))
        return "\n\n".join(part for part in parts if part) + "\n"

    def _output(self, output: Mapping[str, Any]) -> Iterator[str]:
        if output["output_type"] == "stream":
            yield _fenced(last_lines(output["text"]))
        elif output["output_type"] == "error":
            yield _fenced("\n".join(output["traceback"]))
        elif (blocks := blocks_in(output["data"])) is not None:
            yield markdown_of(blocks, picture=self._chart)
        else:
            yield self._other(output["data"])

    def _chart(self, picture: Picture) -> str:
        return self._named(picture.name, "svg", minified(picture.svg).encode(), picture.title)

    def _other(self, data: Mapping[str, Any]) -> str:
        if "text/markdown" in data:
            return joined(data["text/markdown"]).strip()
        for kind, suffix in IMAGES.items():
            if kind in data:
                content = joined(data[kind])
                held = content.encode() if suffix == "svg" else b64decode(content)
                return self._named("output", suffix, held, "A picture that the notebook shows")
        text = plain_text(data) or text_of_html(cleaned(joined(data.get("text/html", ""))))
        if not text and asks_for_script(data):
            return f"*{NO_SCRIPT}*"
        if not text:
            text = "\n".join(
                json.dumps(each) for kind, each in data.items() if kind.endswith("/json")
            )
        return _fenced(text)

    def _named(self, stem: str, suffix: str, held: bytes, title: str) -> str:
        stem = re.sub(r"[^a-z0-9_-]+", "_", stem.lower())[:60] or "chart"
        file, number = f"{stem}.{suffix}", 2
        while file in self.pictures:
            file, number = f"{stem}-{number}.{suffix}", number + 1
        self.pictures[file] = held
        place = f"{self._folder}/{file}" if self._folder else file
        return f"![{name(title, markdown=True)}]({place})"


def _percent(letter: str) -> str:
    return "".join(f"%{byte:02X}" for byte in letter.encode("utf-8", "surrogateescape"))


def _fenced(text: str) -> str:
    """Write text as it is, in a fence that nothing in it ends; nothing for no text."""
    lines = [safe(line.expandtabs()) for line in _ANSI.sub("", text).split("\n")]
    text = "\n".join(lines).strip("\n")
    if not text.strip():
        return ""
    fence = "`" * max(3, *(len(run) + 1 for run in _FENCE.findall(text)), 3)
    return f"{fence}text\n{text}\n{fence}"
