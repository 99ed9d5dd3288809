"""nsan's recipes in a recipe folder of the user's: nsys looks into one folder only."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from nsan.cli.recipe_shells import RECIPE_FOLDER, recipe_names
from nsan.errors import InputMissingError, NsanError, OutputWriteError, UsageError

_MARK: Final = "from nsan.recipe."
"""What stands in the module of each recipe of nsan, of any version."""


class ForeignRecipeError(NsanError):
    """A recipe of another maker has the name of one of nsan's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(
            f"{folder} is there already, and not of nsan. Nothing was changed. Give it another name, or set "
            "NSYS_RECIPE_PATH to nsan's own folder: `nsan recipe path --replace`."
        )


def put_into(folder: Path) -> list[Path]:
    """Copy the recipes into a folder, over those of an earlier nsan.

    Parameters
    ----------
    folder : Path
        It exists.

    Returns
    -------
    list of Path
        The folders of the recipes there.

    Raises
    ------
    NsanError
        If one is of another maker, or the folder cannot be written; the first is found before anything is.
    """
    _checked(folder)
    places = [folder / name for name in recipe_names()]
    try:
        for place in places:
            place.mkdir(exist_ok=True)
            for file in _files(RECIPE_FOLDER / place.name):
                beside = place / f".{file.name}.part"
                shutil.copyfile(file, beside)
                beside.replace(place / file.name)
    except OSError as error:
        raise OutputWriteError(folder, error.strerror or str(error)) from error
    return places


def take_from(folder: Path) -> list[Path]:
    """Remove what :func:`put_into` copied; other files stay, and so does a folder that has any.

    Parameters
    ----------
    folder : Path
        It exists.

    Returns
    -------
    list of Path
        The folders of recipes that were removed, or emptied of what is nsan's.
    """
    _checked(folder)
    taken = []
    try:
        for name in recipe_names():
            place = folder / name
            if not place.is_dir():
                continue
            for file in _files(RECIPE_FOLDER / name):
                (place / file.name).unlink(missing_ok=True)
            shutil.rmtree(place / "__pycache__", ignore_errors=True)
            if not any(place.iterdir()):
                place.rmdir()
            taken.append(place)
    except OSError as error:
        raise OutputWriteError(folder, error.strerror or str(error)) from error
    return taken


def check(folder: Path, *, present: bool) -> list[str]:
    """Say which recipes would be copied, or of those that are there which would be removed.

    Parameters
    ----------
    folder : Path
        Of the user's.
    present : bool
        Only those that are there.

    Returns
    -------
    list of str
        Names.

    Raises
    ------
    NsanError
        If the folder does not exist, or one of them is of another maker.
    """
    _checked(folder)
    return [name for name in recipe_names() if not present or (folder / name).is_dir()]


def _checked(folder: Path) -> None:
    if not folder.is_dir():
        raise InputMissingError(folder)
    if folder.resolve() == RECIPE_FOLDER:
        msg = f"{folder} is nsan's own folder of recipes. Name one of yours."
        raise UsageError(msg)
    for name in recipe_names():
        place = folder / name
        if (place.exists() or place.is_symlink()) and not _is_ours(place):
            raise ForeignRecipeError(place)


def _is_ours(place: Path) -> bool:
    module = place / f"{place.name}.py"
    if place.is_symlink() or not place.is_dir():
        return False
    try:
        return not any(place.iterdir()) or _MARK in module.read_text("utf-8", errors="replace")
    except OSError:
        return False


def _files(recipe: Path) -> list[Path]:
    return sorted(
        path for path in recipe.iterdir() if path.is_file() and not path.name.startswith(".")
    )
