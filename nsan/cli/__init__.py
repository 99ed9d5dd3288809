"""The command line. Results go to stdout, progress and messages to stderr.

Exit status: 0 all that was asked was done, 1 error, 2 usage, 3 a Unified Memory question and no
such data in the trace, 4 a gate failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import nsan
from nsan.cli.terminal import complain
from nsan.errors import NsanError, UsageError
from nsan.memory_budget import memory_allowed

COMMANDS: Final = {
    "summary": "what moved, why, and what was recorded: the first answer",
    "info": "what a capture holds: versions, switches, tables, health",
    "migrations": "migrations: by cause, time, size, push; refaults, ping-pong, residency",
    "faults": "page faults: by access, place, batch, latency",
    "clusters": "where faults crowd in time and address: clusters, episodes, access patterns",
    "attribute": "whose they are: by kernel, NVTX range, allocation, CPU function, step",
    "allocator": "PyTorch's caching allocator, from a memory snapshot: use, fragmentation, what-ifs",
    "pca": "runs without and with PyTorch's caching allocator: what differs, and by which mechanism",
    "compare": "runs against a base: what differs beyond noise, and limits that fail a build",
    "analyse": "run any analysis by name, nsan's or your own; --list is the table of contents",
    "advise": "what would help: exact calls for named allocations, what they may gain, and the evidence",
    "report": "one file to send: every section with tables and charts, as web page, notebook or PDF",
    "export": "a chart for a paper (--list shows them), a trace for Perfetto, tables for others",
    "lab": "JupyterLab on a copy of the explore notebook",
    "record": "run a program under nsys and summarise its trace",
    "model": "make traces with known truth on a software model of the driver, no GPU needed",
    "bench": "build and run the CUDA microbenchmark: traces from a real GPU",
    "import": "turn an export into a Parquet store, or many reports into a corpus",
    "recipe": "nsan within nsys: reports for `nsys stats`, recipes for `nsys recipe`",
    "doctor": "what is installed here, and what each part is for",
}
_TOP_LEVEL: Final = ("-h", "--help", "--version")
_EPILOG: Final = """\
examples:
  nsan sample_data/um_vector_add_rtx4060l.sqlite       summary of a real capture
  nsan migrations trace.sqlite --filter-time 1s/2s     one second of it, by cause
  nsan summary trace.sqlite --json                     for machines

`nsan FILE` is `nsan summary FILE`. `nsan COMMAND --help` explains a command.
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the help of a command on the line of its name."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        # argparse forgets the indent of subcommands when it makes room for their names.
        self._action_max_length = max(self._action_max_length, max(map(len, COMMANDS)) + 4)


def parser() -> argparse.ArgumentParser:
    """Build the parser of all commands; imports nothing heavy."""
    top = argparse.ArgumentParser(
        prog="nsan",
        description="Why a CUDA Unified Memory program is slow, where, and what would help.",
        epilog=_EPILOG,
        formatter_class=_Help,
    )
    top.add_argument("--version", action="version", version=f"nsan {nsan.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_text in COMMANDS.items():
        command = _module(name)
        sub = commands.add_parser(
            name,
            help=help_text,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return top


def _module(command: str) -> Any:
    # `import` is a keyword: its module has another name.
    return import_module(f"nsan.cli.{'import_' if command == 'import' else command}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of this process by default.

    Returns
    -------
    int
        Exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        parser().print_help(sys.stderr)
        return UsageError.exit_code
    try:
        args = parser().parse_args(_with_command(arguments))
    except UsageError as error:
        complain(error)
        return error.exit_code
    except SystemExit as stop:
        return int(stop.code or 0)
    return _run(args)


def _with_command(arguments: list[str]) -> list[str]:
    """Put in the command that a bare `nsan FILE` leaves out."""
    first = arguments[0]
    if first in COMMANDS or first in _TOP_LEVEL:
        return arguments
    if first.startswith("-"):
        return arguments if set(arguments) & COMMANDS.keys() else ["summary", *arguments]
    if not os.path.lexists(first) and not {".", os.sep} & set(first):
        import difflib

        close = difflib.get_close_matches(first, COMMANDS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        msg = f"{first!r} is neither a command nor a file.{hint} Commands: {', '.join(COMMANDS)}."
        raise UsageError(msg)
    return ["summary", *arguments]


def _run(args: argparse.Namespace) -> int:
    with _ended_by_signals() as terminate, memory_allowed(getattr(args, "memory", None)):
        try:
            status: int = args.run(args)
            if sys.stdout is not None:
                sys.stdout.flush()
        except NsanError as error:
            complain(error)
            return error.exit_code
        except BrokenPipeError:
            _abandon_stdout()  # the reader of a pipe has gone: leave quietly
            return 1
        except OSError as error:
            _abandon_stdout()
            complain(f"the result cannot be written: {error.strerror or error}.")
            return 1
        except KeyboardInterrupt as stop:
            # Whoever presses Ctrl-C thrice is answered once.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _let_go(stop)
            complain("interrupted; nothing half-written is left.")
            return 130
        except Exception:
            if terminate.status is None:
                raise
            return terminate.status
        return status


@contextmanager
def _ended_by_signals() -> Iterator[_Terminate]:
    """Unwind on signals that end a process; afterwards all is as it was."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.getsignal(number) for number in numbers}
    terminate, hook = _Terminate(), sys.unraisablehook
    for number, handler in previous.items():
        if number != signal.SIGINT and handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, terminate)
    try:
        yield terminate
    finally:
        sys.unraisablehook = hook
        for number, handler in previous.items():
            signal.signal(number, handler)


def _abandon_stdout() -> None:
    # Keep Python from flushing once more, into what failed.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _let_go(stop: KeyboardInterrupt) -> None:
    """End what was interrupted now, and quietly: what a destructor has to say of that is noise."""
    import gc
    import traceback

    previous, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        traceback.clear_frames(stop.__traceback__)
        gc.collect()
    finally:
        sys.unraisablehook = previous


class _Terminate:
    """Unwinds on a signal, so that what is half-written is removed on the way out.

    Compiled code may swallow the exit, and fail for want of an answer: that is noise, and ends the command all the same.
    """

    def __init__(self) -> None:
        self.status: int | None = None

    def __call__(self, number: int, _frame: object) -> None:
        self.status = 128 + number
        sys.unraisablehook = lambda _: None
        sys.exit(self.status)
