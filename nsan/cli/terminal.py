"""What goes to the terminal: messages to stderr, results to stdout, colour where somebody sees it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from nsan.errors import OutputWriteError
from nsan.tabular.text import Field, Row, hidden_fields
from nsan.text import safe

_COLOURS: Final = {
    "fail": "31",
    "warn": "33",
    "unknown": "36",
    "ok": "32",
    "high": "31",
    "medium": "33",
    "low": "36",
}
_PIPE_WIDTH: Final = 160


def coloured(status: str) -> str:
    """Write a status or a level, in colour where a person is likely to see it."""
    unwanted = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    plain = unwanted or not sys.stdout.isatty()
    return status if plain or status not in _COLOURS else f"\x1b[{_COLOURS[status]}m{status}\x1b[0m"


def painter(output: Path | None) -> Callable[[str], str]:
    """Choose how a status is written: with :func:`coloured`, but plain into a file that was named."""
    return coloured if output is None else str


def complain(message: object) -> None:
    """Write a message to stderr, line by line, harmless whatever names it holds."""
    lines = "\n".join(safe(line) for line in str(message).split("\n"))
    if sys.stderr is not None:  # it may be closed
        sys.stderr.write(f"nsan: {lines}\n")


def emit(text: str) -> None:
    """Write to stdout; a character that it cannot show becomes an escape, not an error."""
    if sys.stdout is None:
        raise OutputWriteError("standard output", "it is closed")
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def too_wide(rows: Sequence[Row], fields: Sequence[Field], output: Path | None) -> list[Field]:
    """Find the columns, from the right, that do not fit the terminal; a file is as wide as a pipe."""
    terminal = output is None and sys.stdout is not None and sys.stdout.isatty()
    room = shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns if terminal else _PIPE_WIDTH
    return hidden_fields(rows, fields, room)
