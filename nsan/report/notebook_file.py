"""Notebooks as files: read, written, and kept where a run failed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final

import nbformat

from nsan.errors import InputMissingError, NsanError, OutputWriteError
from nsan.report.shown import MIME
from nsan.text import safe, shortened

_UNREADABLE: Final = (
    OSError,
    ValueError,
    nbformat.ValidationError,
    nbformat.reader.NotJSONError,
    # What nbformat makes of JSON that is something else.
    AttributeError,
    KeyError,
    TypeError,
)


class NotANotebookError(NsanError):
    """A file is no notebook."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(
            f"{safe(path)} is no Jupyter notebook that can be run: {shortened(reason, 200)}. "
            "Give a Python notebook (.ipynb) that JupyterLab opens."
        )


def read_notebook(path: Path) -> Any:
    """Read a notebook.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    NotebookNode
        The notebook in the newest format of version 4.

    Raises
    ------
    NsanError
        If there is none, it cannot be read, or it is not for Python.
    """
    if not path.exists():
        raise InputMissingError(path)
    try:
        found = nbformat.reads(  # type: ignore[no-untyped-call]
            path.read_text(encoding="utf-8"), as_version=4
        )
        # What is converted from an older format is not of the class that papermill knows.
        found = nbformat.from_dict(found)  # type: ignore[no-untyped-call]
        nbformat.validate(found)
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotANotebookError(path, reason) from error
    kernel = found.metadata.get("kernelspec", {})
    language = (
        kernel.get("language") or found.metadata.get("language_info", {}).get("name") or "python"
    )
    if language.lower() != "python":
        raise NotANotebookError(path, f"its language is {language}")
    return found


def notebook_text(notebook: Any) -> str:
    """Write a notebook with what any reader of notebooks shows, without nsan's own form of it.

    Parameters
    ----------
    notebook : NotebookNode
        A notebook that ran; it is not changed.

    Returns
    -------
    str
        What an ``.ipynb`` file holds.
    """
    kept = copy.deepcopy(notebook)
    for cell in kept.cells:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(MIME, None)
    text: str = nbformat.writes(kept)  # type: ignore[no-untyped-call]
    return text


def without_empty_sections(notebook: Any) -> Any:
    """Leave out the sections of a report that have nothing to say, with their headings.

    Parameters
    ----------
    notebook : NotebookNode
        A notebook that ran; it is not changed.

    Returns
    -------
    NotebookNode
        Without the code cells that show but a text of the tone "empty", and the heading right before.
    """
    kept = copy.deepcopy(notebook)
    cells: list[Any] = []
    for cell in kept.cells:
        if not _says_nothing(cell):
            cells.append(cell)
        elif cells and cells[-1].cell_type == "markdown" and cells[-1].source.startswith("## "):
            cells.pop()
    kept.cells = cells
    return kept


def _says_nothing(cell: Any) -> bool:
    shown = [
        output.get("data", {}).get(MIME, {}).get("blocks") for output in cell.get("outputs", ())
    ]
    return bool(shown) and all(
        blocks is not None and {block.get("tone") for block in blocks} == {"empty"}
        for blocks in shown
    )


def keep_beside(output: Path, notebook: Any) -> Path:
    """Write a notebook that failed beside the output that was asked for.

    Parameters
    ----------
    output : Path
        Where the report should have gone.
    notebook : NotebookNode
        What ran.

    Returns
    -------
    Path
        Where it is: a name that no file had.

    Raises
    ------
    OutputWriteError
        If it cannot be written.
    """
    number = 1
    while True:
        ending = f"-{number}" if number > 1 else ""
        place = output.with_name(f"{output.stem}-failed{ending}.ipynb")
        try:
            with place.open("x", encoding="utf-8") as file:
                file.write(nbformat.writes(notebook))  # type: ignore[no-untyped-call]
        except FileExistsError:
            number += 1
        except OSError as error:
            raise OutputWriteError(place, error.strerror or str(error)) from error
        else:
            return place
