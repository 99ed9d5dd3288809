"""nsan inside IPython and Jupyter: ``%load_ext nsan``.

``%nsan FILE`` shows the summary of a capture and its explorer. ``%%nsan_record`` records the program
in the cell. Charts of altair show without a network, in JupyterLab and in a notebook that is run
without one. ``%unload_ext nsan`` puts everything back.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import inspect
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary

from nsan.cli.terminal import complain
from nsan.errors import NsanError, UsageError
from nsan.nsys_errors import RecorderNotFoundError

_CHART: Final = ("altair.vegalite.v6.api", "TopLevelMixin")
"""What every chart of altair is. By name, so that loading this does not load altair."""
_PREVIOUS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""How each shell showed charts before."""


class ToolsMissingError(NsanError):
    """What is needed to record a cell is not installed."""

    def __init__(self, *, nsys: bool, nvcc: bool) -> None:
        self.nsys, self.nvcc = nsys, nvcc
        lines = []
        if nsys:
            lines += [
                str(RecorderNotFoundError()),
                "In a notebook: %env NSYS=/path/to/nsys, then run this cell again.",
            ]
        if nvcc:
            lines.append(
                "nvcc, which compiles CUDA, is not found: not on PATH, not in CUDA_HOME, not in "
                "/usr/local/cuda. Install the CUDA toolkit."
            )
        super().__init__("\n".join(lines))


class CellNotCompiledError(NsanError):
    """nvcc refuses the cell."""

    def __init__(self, status: int, said: str) -> None:
        self.status, self.said = status, said
        super().__init__(f"nvcc cannot compile the cell (status {status}):\n{said.strip()}")


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong with a line, instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        msg = f"{self.prog}: {message}.\n{self.format_usage().strip()}"
        raise UsageError(msg)


def load_ipython_extension(ip: Any) -> None:
    """Add the commands, and the way charts are shown, to an IPython shell.

    Parameters
    ----------
    ip : IPython.core.interactiveshell.InteractiveShell
        What ``%load_ext nsan`` passes.
    """
    ip.register_magic_function(_command(ip, show), "line", "nsan")
    ip.register_magic_function(_command(ip, record_cell), "cell", "nsan_record")
    formatter = ip.display_formatter.mimebundle_formatter
    _PREVIOUS[ip] = formatter.for_type_by_name(*_CHART, lambda chart: _bundle(ip, chart))


def unload_ipython_extension(ip: Any) -> None:
    """Take away what :func:`load_ipython_extension` added.

    Parameters
    ----------
    ip : IPython.core.interactiveshell.InteractiveShell
        What ``%unload_ext nsan`` passes.
    """
    ip.magics_manager.magics["line"].pop("nsan", None)
    ip.magics_manager.magics["cell"].pop("nsan_record", None)
    formatter = ip.display_formatter.mimebundle_formatter
    formatter.pop(".".join(_CHART), None)
    previous = _PREVIOUS.pop(ip, None)
    if previous is not None:
        formatter.for_type_by_name(*_CHART, previous)


def _command(ip: Any, run: Callable[..., None]) -> Callable[..., None]:
    """Make a magic of a function; what nsan foresees becomes a message, not a traceback."""

    def magic(line: str, *cell: str) -> None:
        try:
            run(ip, _words(line), *cell)
        except NsanError as error:
            complain(error)
        except SystemExit:
            return  # --help has been shown

    magic.__doc__ = run.__doc__
    return magic


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError as error:
        msg = f"the line {line!r} cannot be read: {error}."
        raise UsageError(msg) from error
    return [str(Path(word).expanduser()) if word.startswith("~/") else word for word in words]


def show(ip: Any, words: list[str]) -> None:
    """Show the summary of a capture and its explorer: %nsan FILE [--filter-time A/B ...].

    Of a folder of several reports it shows the summary of all. The filters are those of `nsan summary`. `trace`, with them applied, and `explorer` are then
    variables of the notebook.
    """
    import nsan
    from nsan.cli import summary
    from nsan.cli.arguments import filtered, located
    from nsan.fleet.finding import is_fleet

    parser = _Parser(
        prog="%nsan",
        description=inspect.getdoc(show),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    summary.add_arguments(parser)
    args = parser.parse_args(words)
    if is_fleet(args.traces):
        summary.run(args)  # many reports have one summary, and no explorer
        return
    args.trace = args.traces[0]
    args.traces = [located(args)]
    if summary.run(args) != 0:
        return  # it has said why
    trace = filtered(nsan.open_trace(args.trace), args)
    explorer = nsan.explore(trace)
    ip.push({"trace": trace, "explorer": explorer})
    _display(explorer)


def record_cell(ip: Any, words: list[str], cell: str) -> None:
    """Record the program in this cell: %%nsan_record [options] [-- ARGUMENT ...].

    The cell is Python, run by this Python in a process of its own; with --cuda it is compiled by nvcc
    first, with --shell it is run by bash. What it says is shown, then the summary. The trace is then a
    variable of the notebook. The other options are those of `nsan record`.
    """
    import nsan
    from nsan.cli import record

    at = words.index("--") if "--" in words else len(words)
    args = _record_parser().parse_args(words[:at])
    if args.program:
        msg = (
            f"%%nsan_record: {args.program[0]!r} is no option. The program is the cell; what follows "
            "`--` are its arguments."
        )
        raise UsageError(msg)
    if not args.name.isidentifier():
        msg = f"%%nsan_record: {args.name!r} cannot be the name of a variable."
        raise UsageError(msg)
    _check_tools(args)
    # Local time, as people remember it.
    args.output = args.output or Path(f"cell-{dt.datetime.now().astimezone():%Y%m%d-%H%M%S}")
    with TemporaryDirectory(prefix="nsan-cell-") as folder, _importable(args), _streams(ip):
        args.program = [*_program(args, cell, Path(folder)), *words[at + 1 :]]
        record.run(args)
        ip.push({args.name: nsan.open_trace(args.trace)})
        if not args.quiet:
            complain(f"{args.name} is now this trace; nsan.explore({args.name}) shows it.")


def _record_parser() -> argparse.ArgumentParser:
    from nsan.cli import record

    parser = _Parser(
        prog="%%nsan_record",
        description=inspect.getdoc(record_cell),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    record.add_arguments(parser)
    parser.usage = "%(prog)s [options] [-- ARGUMENT ...]"
    parser.add_argument(
        "--name", default="trace", metavar="VARIABLE", help="name of the trace here; default: trace"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--cuda", action="store_true", help="the cell is CUDA C++: compile it")
    kind.add_argument("--shell", action="store_true", help="the cell is a bash script")
    parser.add_argument(
        "--nvcc",
        action="append",
        default=[],
        metavar="OPTION",
        help="a further option of nvcc, as --nvcc=-arch=sm_80",
    )
    return parser


def _check_tools(args: argparse.Namespace) -> None:
    """Say at once all that is missing, and where to get it."""
    from nsan.io.nsys_cli import find_nsys

    no_nsys, no_nvcc = find_nsys() is None, args.cuda and _nvcc() is None
    if no_nsys or no_nvcc:
        raise ToolsMissingError(nsys=no_nsys, nvcc=no_nvcc)


def _nvcc() -> str | None:
    """Find the compiler of CUDA: on PATH, else where the toolkit is installed by itself."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    places = (shutil.which("nvcc", path=f"{home}/bin") for home in homes if home)
    return shutil.which("nvcc") or next(filter(None, places), None)


def _compiled(source: Path, options: list[str]) -> Path:
    program = source.with_suffix("")
    command = [str(_nvcc()), "-O2", "-lineinfo", *options, "-o", str(program), str(source)]
    done = subprocess.run(  # noqa: S603 - found by name, without a shell
        command, capture_output=True, text=True, errors="replace", check=False
    )
    said = (done.stdout + done.stderr).replace(f"{source.parent}{os.sep}", "")
    if done.returncode or not program.is_file():
        raise CellNotCompiledError(done.returncode, said)
    if said.strip():
        complain(said.strip())
    return program


def _program(args: argparse.Namespace, cell: str, folder: Path) -> list[str]:
    """Write the cell to a file, and say how that is run."""
    source = folder / ("cell.cu" if args.cuda else "cell.sh" if args.shell else "cell.py")
    source.write_text(cell, encoding="utf-8")
    if args.cuda:
        return [str(_compiled(source, args.nvcc))]
    return ["bash" if args.shell else sys.executable, str(source)]


@contextlib.contextmanager
def _importable(args: argparse.Namespace) -> Iterator[None]:
    """Let a Python cell import what lies beside the notebook, as every other cell can."""
    before = os.environ.get("PYTHONPATH")
    if not (args.cuda or args.shell):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), before]))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before


@contextlib.contextmanager
def _streams(ip: Any) -> Iterator[None]:
    """Give what runs in a notebook no input, and one output for all that is said.

    A kernel's own input is a pipe that nobody writes to, which looks as if it could be read once only.
    What goes to stderr is shown as an error there, and this is none.
    """
    if getattr(ip, "kernel", None) is None:
        yield
        return
    kept = [(number, os.dup(number)) for number in (0, 2)]
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(1, 2)
    try:
        with contextlib.redirect_stderr(sys.stdout):
            yield
    finally:
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


def _display(thing: object) -> None:
    from IPython.display import display

    display(thing)  # type: ignore[no-untyped-call]


def _bundle(ip: Any, chart: Any) -> Any:
    """Show a chart as the place allows; in a terminal as any other object."""
    kernel = getattr(ip, "kernel", None)
    if kernel is None:
        return None
    from nsan.charts.showing import shown

    # Somebody to ask is somebody to look: papermill and nbconvert run cells without.
    return shown(chart, is_live=bool(getattr(kernel, "_allow_stdin", False)))
