"""How shells set variables: what is typed, and what stands in a start file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import nsan
from nsan.errors import NsanError, UsageError

Shell = Literal["sh", "fish"]
"""A language: bash, zsh and the like speak that of sh."""
SHELLS: Final[tuple[Shell, ...]] = ("sh", "fish")

_OTHERS: Final = ("csh", "tcsh", "elvish", "nu", "pwsh", "xonsh")
"""Shells that speak neither."""

REPORTS: Final = "NSYS_STATS_REPORT_PATH"
RECIPES: Final = "NSYS_RECIPE_PATH"

_PACKAGE: Final = Path(nsan.__file__).resolve().parent
REPORT_FOLDER: Final = _PACKAGE / "stats_reports"
"""Folder of the reports for `nsys stats`."""
RECIPE_FOLDER: Final = _PACKAGE / "recipe" / "recipes"
"""Folder of the recipes for `nsys recipe`."""


class FolderNotListableError(NsanError):
    """nsan lies where no list of folders can name it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(
            f"nsan is in {folder}, and a list of folders for nsys cannot name that: it has a colon or a line end. "
            "Install nsan elsewhere."
        )


class OtherRecipesError(NsanError):
    """The variable names a recipe folder of somebody's own already."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        super().__init__(
            f"{RECIPES} is {folder} already, and nsys looks into one folder only. Put nsan's recipes into it: "
            f"`nsan recipe install --into {shlex.quote(folder)}`. Or set the variable to nsan's own: --replace."
        )


@dataclass(frozen=True)
class Settings:
    """What the variables should be.

    Attributes
    ----------
    reports : str
        Value of ``NSYS_STATS_REPORT_PATH``: nsan's folder, and what stood there before.
    recipes : str
        Value of ``NSYS_RECIPE_PATH``.
    other : str
        A folder of recipes in use that has not nsan's; empty if there is none.
    """

    reports: str
    recipes: str
    other: str = ""


def settings(environment: Mapping[str, str], *, replace: bool = False) -> Settings:
    """Say what the variables should be, keeping what they are.

    Parameters
    ----------
    environment : mapping
        Where they may be set.
    replace : bool, default False
        Replace the recipe folder that is set.

    Returns
    -------
    Settings
        With :attr:`Settings.other` where a recipe folder is set that has not nsan's recipes.

    Raises
    ------
    FolderNotListableError
        If no list of folders can name nsan's.
    """
    for folder in (REPORT_FOLDER, RECIPE_FOLDER):
        if set(str(folder)) & set(":\n"):
            raise FolderNotListableError(folder)
    listed = [each for each in environment.get(REPORTS, "").split(":") if each]
    if not any(_same(each, REPORT_FOLDER) for each in listed):
        listed.insert(0, str(REPORT_FOLDER))
    mine, now = str(RECIPE_FOLDER), environment.get(RECIPES, "")
    if not now or replace or _same(now, RECIPE_FOLDER):
        return Settings(":".join(listed), mine)
    return Settings(":".join(listed), now, "" if has_recipes(Path(now)) else now)


def findings(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Check both variables.

    Parameters
    ----------
    environment : mapping
        Where they may be set.

    Returns
    -------
    dict of str to (str, str)
        By variable its value, "-" if it is not set, and what is to be done; empty if it is in order.
    """
    reports, recipes = environment.get(REPORTS, ""), environment.get(RECIPES, "")
    set_both = 'eval "$(nsan recipe path)", or `nsan recipe install`'
    listed = [each for each in reports.split(":") if each]
    gone = [each for each in listed if not Path(each).is_dir()]
    has_reports = any(_same(each, REPORT_FOLDER) for each in listed)
    trouble = "" if has_reports else set_both
    if gone:
        trouble = f"{', '.join(gone)}: no such folder; take it out of {REPORTS}"
    has = bool(recipes) and has_recipes(Path(recipes))
    advice = set_both if not recipes else f"nsan recipe install --into {shlex.quote(recipes)}"
    if recipes and not Path(recipes).is_dir():
        advice = f"{recipes}: no such folder; unset {RECIPES}, then {set_both}"
    return {REPORTS: (reports or "-", trouble), RECIPES: (recipes or "-", "" if has else advice)}


def recipe_names() -> list[str]:
    """List nsan's recipes."""
    return sorted(path.parent.name for path in RECIPE_FOLDER.glob("*/metadata.json"))


def has_recipes(folder: Path) -> bool:
    """Say whether a folder has all of nsan's recipes, whoever put them there."""
    return all((folder / name / f"{name}.py").is_file() for name in recipe_names())


def _same(text: str, folder: Path) -> bool:
    try:
        return Path(text).resolve() == folder
    except (OSError, ValueError):
        return False


def exports(wanted: Settings, shell: Shell) -> str:
    """Write what sets the variables in a shell that runs, for ``eval``.

    Parameters
    ----------
    wanted : Settings
        Values.
    shell : {"sh", "fish"}
        Language.

    Returns
    -------
    str
        Lines; none for the recipe folder if that is somebody's own.
    """
    values = {REPORTS: wanted.reports} | ({} if wanted.other else {RECIPES: wanted.recipes})
    if shell == "sh":
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
    # A variable whose name ends in PATH is a list in fish, of what stands between colons.
    return "".join(
        f"set -gx {name} {' '.join(map(fish_quoted, value.split(':')))}\n"
        for name, value in values.items()
    )


def start_lines(shell: Shell) -> str:
    """Write what sets the variables when a shell starts, keeping what they are then.

    Parameters
    ----------
    shell : {"sh", "fish"}
        Language.

    Returns
    -------
    str
        Lines that may run any number of times.
    """
    if shell == "fish":
        reports, recipes = fish_quoted(str(REPORT_FOLDER)), fish_quoted(str(RECIPE_FOLDER))
        return (
            f"contains -- {reports} ${REPORTS}; or set -gx {REPORTS} {reports} ${REPORTS}\n"
            f"set -q {RECIPES}; or set -gx {RECIPES} {recipes}\n"
        )
    reports, recipes = shlex.quote(str(REPORT_FOLDER)), shlex.quote(str(RECIPE_FOLDER))
    return (
        f'case ":${{{REPORTS}-}}:" in\n'
        f"  *:{reports}:*) ;;\n"
        f'  *) export {REPORTS}={reports}"${{{REPORTS}:+:${REPORTS}}}" ;;\n'
        f"esac\n"
        f'if [ -z "${{{RECIPES}-}}" ]; then export {RECIPES}={recipes}; fi\n'
    )


def fish_quoted(text: str) -> str:
    """Quote a text for fish."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def language_of(program: str | None) -> Shell:
    """Say which language a shell speaks, by its path.

    Parameters
    ----------
    program : str or None
        As ``SHELL`` names it; sh if there is none.

    Returns
    -------
    {"sh", "fish"}
        Of a shell that is not known that of sh.

    Raises
    ------
    UsageError
        If it is known to speak neither.
    """
    name = Path(program or "sh").name
    if name in _OTHERS:
        msg = (
            f"SHELL is {name!r}, and nsan writes the languages of sh (bash, zsh) and fish only. Set the variables "
            "by hand: `nsan recipe path --json` has their values. Or name the shell that shall read it: --shell sh."
        )
        raise UsageError(msg)
    return "fish" if name == "fish" else "sh"


def start_file(environment: Mapping[str, str]) -> tuple[Path, Shell]:
    """Find the start file of the user's shell.

    Parameters
    ----------
    environment : mapping
        ``SHELL``, ``HOME``, ``ZDOTDIR`` and ``XDG_CONFIG_HOME``.

    Returns
    -------
    Path, {"sh", "fish"}
        The file that every interactive shell reads, and its language; it may not exist.

    Raises
    ------
    UsageError
        If the shell is not one whose file is known, or it lies in a home folder that is none.
    """
    shell = Path(environment.get("SHELL") or "").name
    if shell == "bash":
        return _home(environment) / ".bashrc", "sh"
    if shell == "zsh":
        return Path(environment.get("ZDOTDIR") or _home(environment)) / ".zshrc", "sh"
    if shell == "fish":
        config = Path(environment.get("XDG_CONFIG_HOME") or _home(environment) / ".config")
        return config / "fish" / "config.fish", "fish"
    named = f"SHELL is {shell!r}" if shell else "SHELL is not set"
    msg = f"{named}, and nsan knows the start files of bash, zsh and fish. Name yours: --file FILE."
    raise UsageError(msg)


def _home(environment: Mapping[str, str]) -> Path:
    """Find the home folder as a shell does: HOME, even where it says nothing; else what the system knows."""
    named = environment.get("HOME")
    if named is None:
        named = os.path.expanduser("~")  # noqa: PTH111 - it does not fail where nobody knows
    if not Path(named).is_absolute() or not Path(named).is_dir():
        what = f"HOME is {named!r}, which is no folder" if named else "HOME is empty"
        msg = f"{what}, so your start file cannot be found. Name it: --file FILE."
        raise UsageError(msg)
    return Path(named)
