"""What would help: advice with its evidence, for a named allocation and kernel.

Rules look at what was recorded. Each says what it found, what to do about it (the exact call), what that may
save, and what would show that it worked; a rule that has nothing to advise says why. Gains are bounds from
the rows of the trace: at most that much. With --what-if the driver model runs the program again, without and with
what is advised: of traces that `nsan model` made, since of others the program is not known.

Examples
--------
  nsan advise sample_data/model/oversubscribed_sweep/oversubscribed_sweep.sqlite --what-if
  nsan advise trace.nsys-rep --snapshot snapshot.pickle
  nsan advise trace.nsys-rep --filter-nvtx step/3 -v
  nsan advise trace.nsys-rep --json
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nsan.cli.arguments import (
    add_filters,
    add_input,
    add_output,
    located,
    output_path,
    show_progress,
    um_status,
)
from nsan.cli.output import write_document, write_table
from nsan.cli.results import add_snapshot
from nsan.cli.terminal import coloured, complain
from nsan.errors import InputMissingError, OutputIsInputError, UsageError

if TYPE_CHECKING:
    from nsan.advice_document import Answer
    from nsan.advice_pages import Look

_PIPE_WIDTH: Final = 100
_WIDEST: Final = 110
"""Longer lines are hard to read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    add_input(parser)
    group = parser.add_argument_group("advice")
    add_snapshot(group)
    group.add_argument(
        "--what-if",
        action="store_true",
        help="also try each remedy in the driver model, where it knows the program",
    )
    group.add_argument(
        "--runs",
        type=_runs,
        metavar="N",
        help="runs of the model of each program, default 3; more make the error smaller",
    )
    add_filters(parser)
    add_output(parser)


def _runs(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        msg = f"{text!r} is no number of runs, 2 or more"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from nsan.advice_document import COLUMNS, advice_document, table_rows
    from nsan.advice_pages import text_of
    from nsan.opening import store_of

    if args.runs is not None and not args.what_if:
        msg = "--runs are runs of the driver model: add --what-if."
        raise UsageError(msg)
    if args.snapshot is not None and not args.snapshot.exists():
        raise InputMissingError(args.snapshot)
    args.trace = located(args)
    if args.output is not None or args.format == "parquet":
        output_path(args)  # what cannot be written is refused before anything is computed
    _, manifest = store_of(args.trace, progress=show_progress(args))
    answer = _answer(args)
    if args.format in {"csv", "parquet"}:
        document = advice_document(answer)
        rows = table_rows(document)
        write_table(args, rows, fields=(), columns=COLUMNS, document=document, notes=())
    else:
        document = advice_document(answer) if args.format == "json" else {}
        write_document(args, document, lambda: text_of(answer, _look(args)))
    if answer.what_if is not None and answer.what_if.reason and args.format not in _TEXTS:
        _say(args, f"not tried in the driver model: {answer.what_if.reason}")
    return um_status(args, manifest)


_TEXTS: Final = ("table", "markdown")


def _say(args: argparse.Namespace, message: str) -> None:
    if not args.quiet:
        complain(message)


def _protect(args: argparse.Namespace, snapshot: Path | None) -> None:
    """Refuse to write over a snapshot that was read, be it named or found."""
    if args.output and snapshot and args.output.resolve() == snapshot.resolve():
        raise OutputIsInputError(args.output)


def _answer(args: argparse.Namespace) -> Answer:
    from nsan.advice_document import Answer
    from nsan.advising import advised
    from nsan.asking import Asked
    from nsan.what_if import RUNS, what_if

    filters = {
        "time": args.filter_time,
        "nvtx": args.filter_nvtx,
        "device": args.gpu,
        "pid": args.pid,
    }
    asked = Asked(args.trace, args.snapshot, filters=filters)
    _protect(args, asked.snapshot_path)
    found = advised(asked)
    if not args.what_if:
        return Answer(asked, found)
    with _progress_bar(show=show_progress(args)) as tell:
        tried = what_if(asked, found.advice, n_runs=args.runs or RUNS, progress=tell)
        return Answer(asked, found, tried)


@contextmanager
def _progress_bar(*, show: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Count runs of the driver model on a bar on stderr."""
    if not show:
        yield None
        return
    from tqdm.auto import tqdm

    with tqdm(unit=" runs", desc="driver model", leave=False) as bar:

        def tell(done: int, all_runs: int) -> None:
            bar.total, bar.n = all_runs, done
            bar.refresh()

        yield tell


def _look(args: argparse.Namespace) -> Look:
    """Say how wide the text is, and whether it has colours."""
    from nsan.advice_pages import Look

    shown = args.output is None and sys.stdout is not None and sys.stdout.isatty()
    columns = shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns
    return Look(
        width=min(columns, _WIDEST) if shown else _PIPE_WIDTH,
        markdown=args.format == "markdown",
        verbose=args.verbose,
        rows=args.rows,
        paint=coloured if shown else str,
    )
