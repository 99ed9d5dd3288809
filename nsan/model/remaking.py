"""The recipe of a made trace, read back from what lies beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nsan.errors import NsanError
from nsan.model.making import ABOUT, PROGRAM, Recipe
from nsan.model.nsys_export import ExportOptions
from nsan.model.origin import origin_of, program_of
from nsan.model.recording import Style
from nsan.model.settings import Settings
from nsan.text import shortened

_BROKEN: Final = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    NsanError,
)
"""What reading somebody's file may end with."""

_MOST_BYTES: Final = 64 << 20
"""A larger file is none that the model wrote: a million operations take some 10 MB."""


class RecipeUnknownError(NsanError):
    """How a trace was made is not known; ``reason`` says why, in a sentence."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def recipe_of(trace: Path) -> Recipe:
    """Find out how a trace was made.

    Parameters
    ----------
    trace : Path
        An export, or the folder that :func:`nsan.model.making.make` wrote.

    Returns
    -------
    Recipe
        The same that it was made from: what it gives is the same, row for row.

    Raises
    ------
    RecipeUnknownError
        If what lies beside the trace does not say, or makes another program today.
    """
    about = about_of(trace)
    if not about.get("origin"):
        raise RecipeUnknownError(
            f"{ABOUT} does not say which program ran: an earlier version of nsan wrote it, or the "
            "program is too long or has words of its own."
        )
    try:
        recipe = _read(about, _folder_of(trace))
        digest = recipe.digest()
    except _BROKEN as error:
        raise RecipeUnknownError(f"{ABOUT} cannot be read: {shortened(error, 100)}.") from error
    if digest != about.get("recipe_sha256"):
        version = shortened(about.get("nsan", "unknown"), 20)
        raise RecipeUnknownError(
            f"What {ABOUT} names is another program today: nsan {version} made this trace. Make it again."
        )
    return recipe


def about_of(trace: Path) -> Mapping[str, Any]:
    """Read what ``model.json`` says of a trace.

    Parameters
    ----------
    trace : Path
        As of :func:`recipe_of`.

    Returns
    -------
    mapping
        See :func:`nsan.model.making.make`.

    Raises
    ------
    RecipeUnknownError
        If there is none, or it is no such file.
    """
    try:
        about: Any = json.loads(_text_of(_folder_of(trace) / ABOUT))
    except FileNotFoundError as error:
        raise RecipeUnknownError(
            f"{ABOUT}, which says how the trace was made, does not lie beside it."
        ) from error
    except (OSError, ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise RecipeUnknownError(f"{ABOUT} cannot be read.")
    return dict(about)


def _folder_of(trace: Path) -> Path:
    place = trace.resolve()
    return place if (place / ABOUT).exists() else place.parent


def _text_of(file: Path) -> str:
    """Read a file of text; never wait for a pipe, nor fill the memory."""
    if file.exists() and not file.is_file():
        msg = f"{file.name} is no file"
        raise ValueError(msg)
    with file.open("rb") as opened:
        raw = opened.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        msg = f"{file.name} is too large"
        raise ValueError(msg)
    return raw.decode("utf-8")


def _read(about: Mapping[str, Any], folder: Path) -> Recipe:
    settings = Settings(**about["settings"])
    style, options = Style(**about["style"]), ExportOptions(**about["export"])
    if "file" in about["origin"]:
        program = program_of(_text_of(folder / PROGRAM))
        return Recipe(program, settings, style, options)
    origin = origin_of(about["origin"])
    program, placed = origin.made(settings)
    return Recipe(program, settings, style, options, placed, origin)
