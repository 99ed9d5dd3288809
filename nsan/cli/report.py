"""Write a report of a trace: one file to send to a colleague, complete without a network.

papermill runs a notebook on the trace, nsan's own or one of yours, and what it shows becomes a web page, a
notebook, Markdown with its pictures beside it, or PDF (where Chromium is found). A memory snapshot of
PyTorch that lies beside the trace (snapshot.pickle, or TRACE's name with .pickle) is joined with it.

Several traces, a folder of several, or a corpus of `nsan import` become one report for all of them: ranks that stand
out and why, runs over time, causes, failures. The newest of a folder alone: name its file.

Examples
--------
  nsan report sample_data/um_vector_add_rtx4060l.sqlite -o report.html
  nsan report trace.nsys-rep --filter-nvtx step/3 --theme dark
  nsan report trace.nsys-rep --format pdf
  nsan report trace.nsys-rep --notebook my.ipynb -p threshold=0.5
  nsan report nights -o fleet.html
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from nsan.cli.arguments import (
    add_filters,
    add_memory,
    add_verbosity,
    filtered,
    is_filtered,
    located,
    output_path,
    positive,
    show_progress,
    um_status,
    write_file,
)
from nsan.cli.fleet_arguments import add_fleet
from nsan.cli.results import add_snapshot
from nsan.cli.terminal import complain, emit
from nsan.errors import (
    InputMissingError,
    NsanError,
    OutputExistsError,
    OutputIsInputError,
    OutputWriteError,
    UsageError,
)
from nsan.text import safe

_SUFFIXES: Final = {"html": ".html", "ipynb": ".ipynb", "markdown": ".md", "pdf": ".pdf"}
_FORMATS: Final = {
    ".html": "html",
    ".htm": "html",
    ".ipynb": "ipynb",
    ".md": "markdown",
    ".markdown": "markdown",
    ".pdf": "pdf",
}
_TRACE_SUFFIX: Final = re.compile(
    r"(\.(gz|log|csv|sqlite|db|nsys-rep|qdrep|qdstrm|nvvp|nvprof|nsan|ipynb))+$", re.IGNORECASE
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "traces",
        metavar="TRACE",
        nargs="*",
        type=Path,
        help="nsys report or export, nsan store, folder of them, or corpus; none for a notebook that needs none",
    )
    add_verbosity(parser)
    add_memory(parser)
    add_fleet(parser)
    group = parser.add_argument_group("report")
    add_snapshot(group)
    group.add_argument(
        "--rows", type=positive, metavar="N", help="at most N rows per table, default 10"
    )
    group.add_argument("--theme", choices=("light", "dark"), help="default: light")
    group.add_argument("--code", action="store_true", help="also the code of the notebook, folded")
    group.add_argument(
        "--notebook",
        type=Path,
        metavar="FILE",
        help="run this notebook, or one that comes with nsan by its name, as compare",
    )
    group.add_argument(
        "-p",
        "--parameter",
        dest="parameters",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a parameter of the notebook; repeatable",
    )
    add_filters(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="its suffix is the format: .html, .ipynb, .md or .pdf; default: report-TRACE.html here",
    )
    group.add_argument("--format", choices=list(_SUFFIXES), help="default: as the suffix says")
    group.add_argument("--force-overwrite", action="store_true", help="replace an existing FILE")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from nsan.cli.fleet_report import is_fleet_report, run_fleet_report
    from nsan.cli.fleet_summary import refuse_fleet_options
    from nsan.io.store import open_store
    from nsan.opening import store_of
    from nsan.report.running import check_installed

    check_installed()
    _choose_notebook(args)
    if is_fleet_report(args):
        return run_fleet_report(args)
    refuse_fleet_options(args)
    _choose_input(args)
    choose_output(args, args.trace or args.notebook)
    notebook, name, values = _prepared(args)
    title = _title(args, name)
    if args.trace is None:
        write_report(args, _executed(args, notebook, name, values), title)
        return 0
    # What is wrong with the trace or the filters is said here, and the kernel opens a store that is there.
    folder, manifest = store_of(args.trace, progress=show_progress(args))
    if is_filtered(args):
        filtered(open_store(folder, manifest), args)
    write_report(args, _executed(args, notebook, name, values), title)
    return um_status(args, manifest)


def _choose_notebook(args: argparse.Namespace) -> None:
    """Find the notebook that was named."""
    from nsan.notebooks import notebook, notebook_names

    if args.notebook is not None and not args.notebook.exists():
        if str(args.notebook) in notebook_names():
            args.notebook = notebook(str(args.notebook))
    elif args.notebook is None and not args.traces:
        msg = "Give a trace, or a notebook that needs none: --notebook FILE."
        raise UsageError(msg)


def _choose_input(args: argparse.Namespace) -> None:
    """Find the trace that was named."""
    args.trace = args.traces[0] if args.traces else None
    if args.trace is not None:
        args.trace = located(args)
    if args.snapshot is not None and not args.snapshot.exists():
        raise InputMissingError(args.snapshot)


def choose_output(args: argparse.Namespace, named: Path) -> None:
    """Settle format and file, and refuse what could not be written before anything runs.

    Parameters
    ----------
    args : Namespace
        Output, format, and what is read.
    named : Path
        After what the file is named where no name was given.

    Raises
    ------
    NsanError
        If it could not be written.
    """
    suffix = "" if args.output is None else args.output.suffix.lower()
    if args.format is None:
        if args.output is not None and suffix not in _FORMATS and not args.output.is_dir():
            known = ", ".join(_SUFFIXES.values())
            what = f"{suffix} is no format" if suffix else f"{args.output.name!r} names no format"
            msg = f"{what} of a report. There are: {known}; or give --format."
            raise UsageError(msg)
        args.format = _FORMATS.get(suffix, "html")
    elif suffix in _FORMATS and _FORMATS[suffix] != args.format:
        msg = f"--format {args.format} and the name {args.output.name} contradict each other."
        raise UsageError(msg)
    if args.output is None or args.output.is_dir():
        folder = args.output or Path()
        args.output = folder / f"report-{_stem(named)}{_SUFFIXES[args.format]}"
    place = output_path(args)
    for given in (args.notebook, args.snapshot):
        if given is not None and place.resolve() == given.resolve():
            raise OutputIsInputError(place)
    if not place.parent.is_dir():
        raise OutputWriteError(place, "its folder does not exist")
    if args.format == "markdown" and not args.force_overwrite and _pictures_of(place).exists():
        raise OutputExistsError(_pictures_of(place))
    if args.format == "pdf":
        from nsan.report.pdf import find_chromium

        find_chromium()


def _stem(trace: Path) -> str:
    """Make a name for a file from the name of a trace."""
    name = _TRACE_SUFFIX.sub("", trace.resolve().name)
    return re.sub(r"[^\w.-]+", "_", name)[:80].strip("._-") or "trace"


def _pictures_of(place: Path) -> Path:
    return place.with_name(f"{place.stem}_files")


def _prepared(args: argparse.Namespace) -> tuple[Any, str, dict[str, Any]]:
    """Read the notebook, and settle its parameters."""
    from nsan.notebooks import notebook
    from nsan.report.notebook_file import read_notebook
    from nsan.report.parameters import checked, parameters_of, parse_parameters

    path = args.notebook or notebook("report")
    found = read_notebook(path)
    known = parameters_of(found, path.name)
    values = parse_parameters(known, args.parameters, path.name)
    if args.notebook is None:
        _check_values(values)
    given = {
        "TRACE": None if args.trace is None else for_kernel(args.trace),
        "SNAPSHOT": None if args.snapshot is None else for_kernel(args.snapshot),
        "TIME": args.filter_time,
        "NVTX": args.filter_nvtx,
        "GPU": args.gpu,
        "PID": args.pid,
        "ROWS": args.rows,
        "THEME": args.theme,
    }
    given = {name: value for name, value in given.items() if value is not None}
    for name in values.keys() & given.keys():
        msg = f"-p {name}=...: the parameter {name} is set by {_OPTION[name]} already."
        raise UsageError(msg)
    if args.notebook is not None and "THEME" not in known:
        given.pop("THEME", None)  # the page has a theme of its own
    return found, path.name, checked(known, given, path.name) | values


def _check_values(values: Mapping[str, Any]) -> None:
    """Refuse what the options --rows and --theme would."""
    if values.get("ROWS", 1) < 1:
        msg = f"-p ROWS={values['ROWS']}: a table has at least 1 row."
        raise UsageError(msg)
    if values.get("THEME", "light") not in {"light", "dark"}:
        msg = f"-p THEME={values['THEME']}: there are light and dark."
        raise UsageError(msg)


_OPTION: Final = {
    "TRACE": "the argument TRACE",
    "SNAPSHOT": "--snapshot",
    "TIME": "--filter-time",
    "NVTX": "--filter-nvtx",
    "GPU": "--gpu",
    "PID": "--pid",
    "ROWS": "--rows",
    "THEME": "--theme",
}


def for_kernel(path: Path) -> str:
    """Name a file as the kernel finds it, which runs in the current folder."""
    whole, here = path.resolve(), Path.cwd().resolve()
    return str(whole.relative_to(here) if whole.is_relative_to(here) else whole)


def _executed(args: argparse.Namespace, notebook: Any, name: str, values: dict[str, Any]) -> Any:
    """Run the notebook; folders of this machine are not named in it."""
    paths = {key: Path(value) for key, value in values.items() if isinstance(value, str)}
    shown = {key: path.name for key, path in paths.items() if path.is_absolute()}
    return executed(args, notebook, (name, values), shown)


def executed(
    args: argparse.Namespace,
    notebook: Any,
    job: tuple[str, dict[str, Any]],
    shown: Mapping[str, Any],
) -> Any:
    """Run a notebook; of one that fails what ran is kept beside the output.

    Parameters
    ----------
    args : Namespace
        How much to say, and where the output goes.
    notebook : NotebookNode
        The notebook.
    job : tuple of str and dict
        Its name, and values for its parameters.
    shown : mapping
        What stands in it instead of values that are private.

    Returns
    -------
    NotebookNode
        The notebook with its outputs, without sections that say nothing.

    Raises
    ------
    NsanError
        If a cell fails.
    """
    from nsan.report.notebook_file import keep_beside, without_empty_sections
    from nsan.report.parameters import hide_paths
    from nsan.report.running import NotebookFailedError, execute

    name, values = job
    try:
        ran = execute(notebook, values, name=name, progress=show_progress(args))
    except NotebookFailedError as error:
        if error.notebook is None:
            raise
        hide_paths(error.notebook, shown)
        kept = keep_beside(args.output, error.notebook)
        where = f"What ran until there is in {safe(kept)}; it may name folders of this machine."
        raise NsanError(f"{error}\n{where}") from error
    hide_paths(ran, shown)
    return without_empty_sections(ran)


def _title(args: argparse.Namespace, name: str) -> str:
    own = Path(name).stem if args.notebook else "Unified Memory report"
    return own if args.trace is None else f"{safe(args.trace.name)}: {own}"


def write_report(args: argparse.Namespace, notebook: Any, title: str) -> None:
    """Write the report in the format that was asked for.

    Parameters
    ----------
    args : Namespace
        Format, output and theme.
    notebook : NotebookNode
        A notebook that ran.
    title : str
        Title of the window.
    """
    from nsan.report.notebook_file import notebook_text
    from nsan.report.page import MOST_BYTES, page_of
    from nsan.report.pdf import pdf_of

    theme = args.theme or "light"

    def page(*, live: bool) -> str:
        return page_of(notebook, title=title, theme=theme, code=args.code, live=live)

    if args.format == "markdown":
        _write_markdown(args, notebook)
    else:
        writers: dict[str, Callable[[], bytes]] = {
            "html": lambda: page(live=True).encode(),
            "pdf": lambda: pdf_of(page(live=False)),
            "ipynb": lambda: notebook_text(notebook).encode(),
        }
        data = writers[args.format]()
        write_file(args, lambda place: place.write_bytes(data))
        if not args.quiet and len(data) > MOST_BYTES and args.format == "html":
            size = f"{len(data) / 1e6:.1f} MB"
            complain(f"{args.output.name} has {size}: outputs of the notebook are large.")
    emit(f"{safe(args.output)}\n")


def _write_markdown(args: argparse.Namespace, notebook: Any) -> None:
    """Write the text with its pictures beside it: all of it, or nothing."""
    from nsan.report.markdown_file import markdown_of_notebook, pictures_of_notebook

    folder = _pictures_of(args.output)
    pictures = pictures_of_notebook(notebook)
    text = markdown_of_notebook(notebook, folder=folder.name).encode()
    is_new = not folder.exists()
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        if pictures:
            beside.mkdir()
        for picture, data in pictures.items():
            (beside / picture).write_bytes(data)
        write_file(args, lambda place: _both(place, text, beside if pictures else None, folder))
    except BaseException as error:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise OutputWriteError(args.output, error.strerror or str(error)) from error
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _both(place: Path, text: bytes, beside: Path | None, folder: Path) -> None:
    """Write the text; once that is there, the pictures go to their place."""
    place.write_bytes(text)
    if beside is None:
        return
    folder.mkdir(exist_ok=True)
    for picture in beside.iterdir():
        picture.replace(folder / picture.name)
