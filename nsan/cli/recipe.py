"""nsan within nsys: reports for `nsys stats -r nsan_um_...`, recipes for `nsys recipe uvm_...`.

nsys finds both by two variables. `path` prints what sets them, for `eval "$(nsan recipe path)"`;
`install` writes it into the start file of your shell, or copies the recipes into a recipe folder of
yours, and takes either out again; `list` says what there is.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from nsan.cli.terminal import complain, emit
from nsan.errors import UsageError

_EPILOG: Final = """\
examples:
  eval "$(nsan recipe path)"                    set both variables in this shell (bash, zsh and the like)
  nsan recipe path --shell fish | source        the same in fish
  nsan recipe install                           set them in every shell that is started from now on
  nsan recipe install --remove                  take that out of the start file again
  nsan recipe install --into ~/recipes          copy the recipes, if NSYS_RECIPE_PATH is a folder of yours
then:
  nsys stats -r nsan_um_sum run.nsys-rep
  nsys recipe uvm_sum --input night/
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    path = actions.add_parser(
        "path", help="print what sets the variables", description=_path.__doc__
    )
    _add_shell(path)
    path.add_argument(
        "--replace", action="store_true", help="also where NSYS_RECIPE_PATH is a folder of yours"
    )
    path.add_argument("--json", action="store_true", help="write JSON")
    install = actions.add_parser(
        "install", help="set the variables in every new shell", description=_install.__doc__
    )
    place = install.add_mutually_exclusive_group()
    place.add_argument(
        "--file", type=Path, metavar="FILE", help="the start file; by default that of your shell"
    )
    place.add_argument(
        "--into", type=Path, metavar="FOLDER", help="copy the recipes into this folder instead"
    )
    _add_shell(install)
    install.add_argument("--remove", action="store_true", help="take out what was put in")
    install.add_argument(
        "--dry-run", action="store_true", help="show what would be done, and do nothing"
    )
    names = actions.add_parser("list", help="list reports and recipes", description=_list.__doc__)
    names.add_argument("--json", action="store_true", help="write JSON")


def _add_shell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shell", choices=("sh", "fish"), help="language of the shell; by default that of yours"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    return {"path": _path, "install": _install, "list": _list}[args.action](args)


def _path(args: argparse.Namespace) -> int:
    """Print what sets NSYS_STATS_REPORT_PATH and NSYS_RECIPE_PATH. What the first holds stays in it."""
    from nsan.cli.recipe_shells import (
        RECIPES,
        REPORTS,
        OtherRecipesError,
        exports,
        language_of,
        settings,
    )

    wanted = settings(os.environ, replace=args.replace)
    if args.json:
        found = {REPORTS: wanted.reports, RECIPES: None if wanted.other else wanted.recipes}
        emit(json.dumps({"schema": 1, "variables": found}, indent=2) + "\n")
    else:
        emit(exports(wanted, args.shell or language_of(os.environ.get("SHELL"))))
    if wanted.other:
        raise OtherRecipesError(wanted.other)
    return 0


def _install(args: argparse.Namespace) -> int:
    """Write what sets both variables into the start file of your shell, as a marked block; nothing else changes."""
    if args.into is not None:
        return _install_into(args)
    from nsan.cli import recipe_block as block
    from nsan.cli.recipe_shells import OtherRecipesError, settings, start_lines

    path, shell = _start_file(args)
    before = block.read(path)
    if args.remove:
        after = block.without_block(before)
    else:
        wanted = settings(os.environ)
        if wanted.other:
            raise OtherRecipesError(wanted.other)
        after = block.with_block(before, start_lines(shell))
    if after == before:
        said = "has no block of nsan" if args.remove else "has it already"
        emit(f"{path} {said}: nothing to do.\n")
        return 0
    block.check_writable(path)
    if args.remove:
        emit(f"The block of nsan goes out of {path}.\n")
    else:
        emit(f"Into {path} goes, as a marked block:\n\n")
        emit("".join(f"    {line}\n" for line in start_lines(shell).splitlines()) + "\n")
    if args.dry_run:
        emit("Nothing was changed: --dry-run.\n")
        return 0
    sys.stdout.flush()
    block.write(path, after)
    emit("Done: it holds for shells that are started from now on.\n")
    return 0


def _start_file(args: argparse.Namespace) -> tuple[Path, Any]:
    from nsan.cli.recipe_shells import language_of, start_file

    if args.file is None:
        path, shell = start_file(os.environ)
        if args.shell not in {None, shell}:
            msg = f"--shell {args.shell}: your shell is another. Name the start file: --file FILE."
            raise UsageError(msg)
        return path, shell
    by_name = "fish" if args.file.suffix == ".fish" else None
    return args.file.expanduser(), args.shell or by_name or language_of(os.environ.get("SHELL"))


def _install_into(args: argparse.Namespace) -> int:
    """Copy the recipes into a folder, or take them out of it."""
    from nsan.cli.recipe_folder import check, put_into, take_from

    folder = args.into.expanduser()
    if args.shell is not None:
        msg = "--into copies recipes and sets no variable: leave --shell out."
        raise UsageError(msg)
    if args.dry_run:
        verb = "removed from" if args.remove else "copied into"
        emit(
            "".join(
                f"would be {verb} {folder}: {name}\n" for name in check(folder, present=args.remove)
            )
        )
        return 0
    places = take_from(folder) if args.remove else put_into(folder)
    if not places:
        emit(f"{folder} has no recipe of nsan: nothing to do.\n")
    for place in places:
        emit(f"{'removed' if args.remove else 'copied'}: {place}\n")
    if args.remove:
        for place in places:
            if place.exists():
                complain(f"{place} has other files, and stays.")
    return 0


def _list(args: argparse.Namespace) -> int:
    """List nsan's reports for `nsys stats` and recipes for `nsys recipe`."""
    reports, recipes = list(_reports()), list(_recipes())
    if args.json:
        found = {"schema": 1, "reports": dict(reports), "recipes": dict(recipes)}
        emit(json.dumps(found, indent=2) + "\n")
        return 0
    for head, named in (("nsys stats -r NAME", reports), ("nsys recipe NAME", recipes)):
        emit(f"{head}\n")
        emit("".join(f"  {name:<22}{about}\n" for name, about in named))
    return 0


def _reports() -> Iterator[tuple[str, str]]:
    """Name each report with the first line of its module, which is not run."""
    from nsan.cli.recipe_shells import REPORT_FOLDER

    for path in sorted(REPORT_FOLDER.glob("nsan_*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        yield path.stem, doc.split("\n")[0].split(", for `")[0].rstrip(".")


def _recipes() -> Iterator[tuple[str, str]]:
    from nsan.cli.recipe_shells import RECIPE_FOLDER, recipe_names

    for name in recipe_names():
        about = json.loads((RECIPE_FOLDER / name / "metadata.json").read_text("utf-8"))
        yield name, about["display_name"]
