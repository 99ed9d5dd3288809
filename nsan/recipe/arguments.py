"""The options of the recipes: the framework's own where its release has them, else the same by us."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, Final

from nsan.errors import UsageError

_OURS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "INPUT": (
        "--input",
        {"nargs": "+", "metavar": "path", "help": "Reports (.nsys-rep)"},
    ),
    "CSV": ("--csv", {"action": "store_true", "help": "Additionally output data as CSV"}),
    "START": (
        "--start",
        {"metavar": "time", "type": int, "help": "Start time used for filtering in nanoseconds"},
    ),
    "END": (
        "--end",
        {"metavar": "time", "type": int, "help": "End time used for filtering in nanoseconds"},
    ),
    "NVTX": (
        "--nvtx",
        {"metavar": "range[@domain]", "help": "NVTX range and domain used for filtering"},
    ),
    "ROWS": (
        "--rows",
        {"metavar": "limit", "type": int, "default": -1, "help": "Maximum number of rows per input file"},
    ),
    "BINS": ("--bins", {"type": int, "default": 30, "help": "Number of bins"}),
}  # fmt: skip
"""What an option is where the framework does not have it; what is not here belongs to the framework alone."""

ALWAYS: Final = ("INPUT", "OUTPUT", "FORCE_OVERWRITE", "CSV")
"""Options of every recipe."""


def add_options(parser: Any, options: Any, names: Iterable[str]) -> None:
    """Declare options of the framework on its parser.

    Parameters
    ----------
    parser : object
        The framework's parser of a recipe.
    options : enum
        The framework's options. Releases differ in what they have: one that adds, say, ``--output`` to
        every recipe by itself has no option of that name.
    names : iterable of str
        Names of options to declare.
    """
    # Whichever release declares an option once more later on: that one holds, and nothing breaks.
    for each in (parser, *getattr(parser, "_action_groups", ())):
        each.conflict_handler = "resolve"
    for name in names:
        option = getattr(options, name, None)
        required = {"required": True} if name == "INPUT" else {}
        if option is not None:
            parser.add_recipe_argument(option, **required)
        elif name in _OURS:
            flag, settings = _OURS[name]
            parser.add_recipe_argument(flag, **settings, **required)


def inputs_of(args: argparse.Namespace) -> list[str]:
    """List the reports that were given; a folder is a list of them in some releases."""
    flat: list[str] = []
    for each in args.input or ():
        flat.extend(each if isinstance(each, list | tuple) else [each])
    return flat


def filters_of(args: argparse.Namespace) -> dict[str, Any]:
    """Read the filters that were given.

    Parameters
    ----------
    args : Namespace
        ``start`` and ``end`` in ns from the session start, and ``nvtx``; absent and None are no filter.

    Returns
    -------
    dict
        Of :meth:`nsan.Trace.filter`; empty for whole reports.

    Raises
    ------
    UsageError
        If the window is empty.
    """
    start, end = getattr(args, "start", None), getattr(args, "end", None)
    nvtx = getattr(args, "nvtx", None)
    if start is not None and end is not None and start >= end:
        msg = f"--start {start} --end {end}: no time is between them. Both are ns from the session start."
        raise UsageError(msg)
    found: dict[str, Any] = {}
    if start is not None or end is not None:
        found["time"] = (start, end)
    if nvtx:
        found["nvtx"] = nvtx
    return found


def filters_in_words(filters: dict[str, Any]) -> str:
    """Say which part of each report was asked for; empty for whole reports."""
    said = []
    if "time" in filters:
        start, end = filters["time"]
        edges = [
            "the start" if start is None else f"{start} ns",
            "the end" if end is None else f"{end} ns",
        ]
        said.append(f"what starts from {edges[0]} to {edges[1]} of the session")
    if "nvtx" in filters:
        said.append(f"what starts within the NVTX range {filters['nvtx']!r}")
    return " and ".join(said)
