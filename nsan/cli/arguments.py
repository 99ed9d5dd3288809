"""Options that several commands share, typed once, and what they mean."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.cli.render import complain, emit, safe
from nsan.errors import OutputExistsError, StoreWriteError, UsageError

if TYPE_CHECKING:
    from nsan.trace import Trace

_NO_UM_DATA: Final = 3
FORMATS: Final = ("table", "csv", "json", "markdown", "parquet")


def add_input(parser: argparse.ArgumentParser) -> None:
    """Add the trace to read and how much to say."""
    parser.add_argument(
        "trace", metavar="TRACE", type=Path, help="nsys SQLite export or nsan store"
    )
    add_verbosity(parser)


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Add -q and -v."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-q", "--quiet", action="store_true", help="no progress, no messages")
    group.add_argument("-v", "--verbose", action="store_true", help="also what is in order")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add where the result goes and in which format."""
    group = parser.add_argument_group("output")
    group.add_argument("--format", choices=FORMATS, default="table", help="default: table")
    group.add_argument(
        "--json", dest="format", action="store_const", const="json", help="short for --format json"
    )
    group.add_argument("--rows", type=_positive, metavar="N", help="at most N rows per table")
    group.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write here instead of stdout"
    )
    group.add_argument("--force-overwrite", action="store_true", help="replace an existing FILE")


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add the filters of :meth:`nsan.trace.Trace.filter`."""
    group = parser.add_argument_group("filters")
    group.add_argument(
        "--filter-time", metavar="A/B", help="rows that start in this window, as 1s/1s250ms or 2s/"
    )
    group.add_argument(
        "--filter-nvtx", metavar="NAME", help="the same for an NVTX range: NAME[@DOMAIN][/INDEX]"
    )
    group.add_argument(
        "--gpu", type=int, action="append", metavar="N", help="only this GPU; repeatable"
    )
    group.add_argument(
        "--pid", type=int, action="append", metavar="N", help="only this process; repeatable"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        msg = "give a number above 0"
        raise argparse.ArgumentTypeError(msg)
    return value


def is_filtered(args: argparse.Namespace) -> bool:
    """Say whether any filter was given."""
    given = (args.filter_time, args.filter_nvtx, args.gpu, args.pid)
    return any(value is not None for value in given)


def none_here(args: argparse.Namespace) -> str:
    """Say that something was recorded and is not there."""
    return f"recorded, and there was none{' in the part that was asked for' * is_filtered(args)}."


def show_progress(args: argparse.Namespace) -> bool:
    """Say whether a progress bar has a place to be drawn."""
    return not args.quiet and sys.stderr.isatty()


def filtered(trace: Trace, args: argparse.Namespace) -> Trace:
    """Apply the filters that were given."""
    return trace.filter(time=args.filter_time, pid=args.pid, device=args.gpu, nvtx=args.filter_nvtx)


def documented(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the summary document of the trace as filtered, and the totals of the whole trace.

    Without filters this reads the manifest of the store, and imports no frame library.
    """
    from nsan.contract import document, summary
    from nsan.opening import store_of

    folder, manifest = store_of(args.trace, progress=show_progress(args))
    if not is_filtered(args):
        return document(manifest["info"], manifest["totals"]), manifest["totals"]
    from nsan.io.store import open_store

    return summary(filtered(open_store(folder, manifest), args)), manifest["totals"]


def um_status(args: argparse.Namespace, totals: dict[str, Any]) -> int:
    """Return 0, or 3 with a word on stderr if the whole trace has nothing of Unified Memory."""
    from nsan.contract import has_um_data

    if has_um_data(totals):
        return 0
    if not args.quiet:
        complain(
            f"{args.trace.name} holds no Unified Memory data: no migration, no page fault, no "
            "managed allocation."
        )
    return _NO_UM_DATA


def write_result(args: argparse.Namespace, text: str) -> None:
    """Write a finished text to stdout, or to the file that was named."""
    if args.output is None:
        shown = sys.stdout.isatty() and args.format == "csv"
        emit("\n".join(map(safe, text.split("\n"))) if shown else text)
        return
    path = output_path(args)
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise StoreWriteError(path, error.strerror or str(error)) from error


def output_path(args: argparse.Namespace) -> Path:
    """Return the file to write, if it may be written."""
    path: Path | None = args.output
    if path is None:
        msg = f"--format {args.format} needs a file: add -o FILE."
        raise UsageError(msg)
    if path.exists() and not args.force_overwrite:
        raise OutputExistsError(path)
    return path
