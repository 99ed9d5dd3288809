"""Open JupyterLab on a copy of the explore notebook, set to a trace.

The copy, explore-NAME.ipynb, is made in the current folder; a file that exists is never replaced.
Without TRACE the notebook shows a modelled sample. What follows TRACE goes to `jupyter lab`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Final

from nsan.cli.terminal import complain
from nsan.errors import InputMissingError, NsanError, OutputWriteError

_PARAMETER: Final = re.compile(r"^TRACE: str = .*?(?=  #|$)", re.MULTILINE)
_SUFFIX: Final = re.compile(
    r"(\.(gz|log|csv|sqlite|db|nsys-rep|qdrep|nvvp|nvprof|parquet))+$", re.I
)


class JupyterLabMissingError(NsanError):
    """There is no JupyterLab to open."""

    def __init__(self) -> None:
        super().__init__("JupyterLab is not installed. Install it with: pip install 'nsan[lab]'")


class NotebookWriteError(OutputWriteError):
    """The copy of the notebook could not be written."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        NsanError.__init__(
            self,
            f"Cannot write the notebook {path}: {reason}. It is made in the current folder: change to "
            "one where you may write, and give TRACE from there.",
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.usage = "nsan lab [--no-browser] [TRACE [JUPYTER OPTION ...]]"
    parser.add_argument("--no-browser", action="store_true", help="start it, open no browser")
    parser.add_argument(
        "trace",
        metavar="TRACE",
        type=Path,
        nargs="?",
        help="nsys report or export, or nsan store; default: a sample",
    )
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise JupyterLabMissingError
    if args.trace is not None and not args.trace.exists():
        raise InputMissingError(args.trace)
    copy = copy_notebook(args.trace, Path())
    what = "a sample" if args.trace is None else args.trace.name
    complain(f"{copy} is the explore notebook, set to {what}; JupyterLab opens it. Ctrl-C ends it.")
    browser = ["--no-browser"] if args.no_browser else []
    command = [sys.executable, "-m", "jupyterlab", str(copy), *browser, *args.options]
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606 - this Python, without a shell


def copy_notebook(trace: Path | None, folder: Path) -> Path:
    """Copy the explore notebook into a folder, set to a trace.

    Parameters
    ----------
    trace : Path or None
        What the notebook's TRACE names: from the folder where it lies there, else in full. None
        leaves the sample that the notebook names itself.
    folder : Path
        Where the copy goes.

    Returns
    -------
    Path
        The copy: a name that no file had.

    Raises
    ------
    OutputWriteError
        The folder cannot be written.
    """
    from nsan.notebooks import notebook

    document = json.loads(notebook("explore").read_text(encoding="utf-8"))
    stem = "explore"
    if trace is not None:
        _set_trace(document, _from(folder, trace))
        stem = f"explore-{_plain(trace)}"
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    number = 1
    while True:
        place = folder / f"{stem}{f'-{number}' if number > 1 else ''}.ipynb"
        try:
            with place.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise NotebookWriteError(place, error.strerror or str(error)) from error
        else:
            return place


def _from(folder: Path, trace: Path) -> Path:
    whole = trace.resolve()
    here = folder.resolve()
    return whole.relative_to(here) if whole.is_relative_to(here) else whole


def _plain(trace: Path) -> str:
    """Make a name for a file from the name of a trace."""
    name = _SUFFIX.sub("", trace.resolve().name)
    return re.sub(r"[^\w.-]+", "_", name)[:80].strip("._-") or "trace"


def _set_trace(document: dict[str, Any], trace: Path) -> None:
    """Set TRACE in the cell of parameters."""
    cell = next(c for c in document["cells"] if "parameters" in c["metadata"].get("tags", ()))
    source = "".join(cell["source"])
    # A function, so that a backslash in the name stays one.
    changed = _PARAMETER.sub(lambda _: f"TRACE: str = {str(trace)!r}", source, count=1)
    cell["source"] = changed.splitlines(keepends=True)
