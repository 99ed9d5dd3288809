"""The web page of `nsan compare --report`: the notebook of comparisons, run by papermill on what was compared."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Final

from nsan.cli.arguments import output_path, write_file
from nsan.cli.report import executed, for_kernel
from nsan.cli.terminal import complain
from nsan.errors import OutputIsInputError, OutputWriteError, UsageError
from nsan.text import safe

_SUFFIXES: Final = (".html", ".htm")
_LIVE: Final = "notebook-only"
"""Tag of cells about samples and views: a page has neither."""

_MOST_NAMED: Final = 4
"""Conditions that the title of a page names, or counts."""


def check_report(args: argparse.Namespace) -> None:
    """Refuse a page that could not be written, before anything runs.

    Parameters
    ----------
    args : Namespace
        Report, output, and whether they may be replaced.

    Raises
    ------
    NsanError
        If a package is missing, the name is that of no page or taken, or its folder is not there.
    """
    from nsan.report.running import check_installed

    place: Path = args.report
    if place.suffix.lower() not in _SUFFIXES:
        msg = f"--report {safe(place.name)}: a web page is written, so its name ends with .html."
        raise UsageError(msg)
    if args.output is not None and args.output.resolve() == place.resolve():
        raise OutputIsInputError(place)
    check_installed()
    output_path(_of_report(args))
    if not place.parent.is_dir():
        raise OutputWriteError(place, "its folder does not exist")


def write_report(
    args: argparse.Namespace, conditions: Sequence[Sequence[Path]], filters: Mapping[str, Any]
) -> None:
    """Write the page of a comparison.

    Parameters
    ----------
    args : Namespace
        As of `nsan compare`.
    conditions : sequence of sequence of Path
        What was compared.
    filters : mapping
        Which part of it.

    Raises
    ------
    NsanError
        If the notebook fails, or the page cannot be written; what was there before is still there.
    """
    from nsan.notebooks import notebook
    from nsan.report.notebook_file import read_notebook
    from nsan.report.page import page_of

    own, path = _of_report(args), notebook("compare")
    whole, shown = (
        _values(args, [[name(place) for place in paths] for paths in conditions], filters)
        for name in (for_kernel, lambda place: place.resolve().name)
    )
    ran = executed(own, _for_page(read_notebook(path)), (path.name, whole), shown)
    page = page_of(ran, title=_title(conditions)).encode()
    write_file(own, lambda file: file.write_bytes(page))
    if not args.quiet:
        complain(f"the web page is {safe(args.report)}.")


def _title(conditions: Sequence[Sequence[Path]]) -> str:
    names = [safe(own[0].resolve().name) for own in conditions]
    if len(names) > _MOST_NAMED:
        names[_MOST_NAMED - 1 :] = [f"{len(names) - _MOST_NAMED + 1} more"]
    return f"{', '.join(names[:-1])} and {names[-1]} compared"


def _of_report(args: argparse.Namespace) -> argparse.Namespace:
    """Take the page for the output."""
    return argparse.Namespace(**{**vars(args), "output": args.report, "format": "html"})


def _for_page(notebook: Any) -> Any:
    """Leave out the cells that are for a live notebook."""
    notebook.cells = [
        cell for cell in notebook.cells if _LIVE not in cell["metadata"].get("tags", ())
    ]
    return notebook


def _values(
    args: argparse.Namespace, names: Sequence[Sequence[str]], filters: Mapping[str, Any]
) -> dict[str, Any]:
    """Write what was asked for as parameters of the notebook."""
    (base, *_), (other, *_) = names[:2]
    return {
        "TRACE": base,
        "OTHER": other,
        "MORE": [*_more(names)],
        "ONLY": [*_only(filters)],
        "BY": list(args.by),
        "STEP": args.nvtx,
        "WARMUP": args.warmup,
        "MIN_EFFECT": args.min_effect,
        "FAIL_ON": list(args.fail_on),
        "ANYWAY": args.anyway,
    }


def _more(names: Sequence[Sequence[str]]) -> Iterator[str]:
    for label, own in zip(ascii_uppercase, names, strict=False):
        first = 1 if label in {"A", "B"} else 0
        yield from (f"{label}={name}" for name in own[first:])


def _only(filters: Mapping[str, Any]) -> Iterator[str]:
    for key, value in filters.items():
        yield from (f"{key}={each}" for each in (value if isinstance(value, list) else [value]))
