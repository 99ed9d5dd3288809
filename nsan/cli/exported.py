"""What `nsan export --to` writes: a trace for Perfetto, or a folder of tables."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from nsan.cli.arguments import located, output_path, refuse_inputs, show_progress, write_file
from nsan.cli.terminal import complain
from nsan.errors import (
    BrokenStoreError,
    OutputIsInputError,
    OutputWriteError,
    PlaceTakenError,
    UsageError,
)

if TYPE_CHECKING:
    from nsan.asking import Asked

T = TypeVar("T")

FORMATS: Final = ("perfetto", "parquet", "csv")


def add_tables(parser: argparse.ArgumentParser) -> None:
    """Add what to write with ``--to parquet`` and ``--to csv``."""
    group = parser.add_argument_group("tables (--to parquet, --to csv)")
    group.add_argument(
        "--tables",
        metavar="A,B",
        help="only these tables of the trace; by default all that have rows",
    )
    group.add_argument(
        "--analyses", metavar="X,Y", help="these analyses, too; `nsan analyse --list` lists them"
    )


def refuse_tables(args: argparse.Namespace) -> None:
    """Refuse to choose tables where none is written, instead of ignoring it."""
    if args.tables is not None or args.analyses is not None:
        msg = "--tables and --analyses go with --to parquet or --to csv."
        raise UsageError(msg)


def write_exported(args: argparse.Namespace) -> int:
    """Write the trace that was named in the format that was named.

    Parameters
    ----------
    args : Namespace
        Trace, snapshot, filters, format, what to write, output.

    Returns
    -------
    int
        Exit status.
    """
    if args.chart is not None or args.options:
        msg = "--chart and --set go with a chart; --to writes all there is. Leave one of them out."
        raise UsageError(msg)
    if args.trace is None or args.output is None:
        msg = f"Give the trace and -o OUT: nsan export TRACE --to {args.to} -o OUT."
        raise UsageError(msg)
    inputs = [args.trace, *([args.snapshot] if args.snapshot else [])]
    refuse_inputs(args, inputs, args.output)
    if args.to == "perfetto":
        refuse_tables(args)
        write_file(args, lambda place: _write_perfetto(args, place))
        return 0
    _write_folder(args)
    return 0


def _write_perfetto(args: argparse.Namespace, place: Path) -> None:
    from nsan.exports.perfetto import write_perfetto

    asked = _asked(args)
    with place.open("wb") as opened:
        missing = _guarded(asked, lambda: write_perfetto(asked, opened))
    if not args.quiet:
        for each in missing:
            complain(f"Not in the file: {each}")


def _write_folder(args: argparse.Namespace) -> None:
    from nsan.exports.tables import Choice, check_choice, write_tables
    from nsan.io.tidy import put_in_place

    choice = Choice(args.to, _names(args, "tables"), _names(args, "analyses") or ())
    check_choice(choice)
    place = _folder_place(args)
    _refuse_snapshot(args, choice.analyses)
    asked = _asked(args)
    try:
        with put_in_place(place, "exporting") as folder:
            n_rows = _guarded(asked, lambda: write_tables(asked, folder, choice))
            # What came there meanwhile is nobody's to lose.
            _folder_place(args)
    except OSError as error:
        raise OutputWriteError(place, error.strerror or str(error)) from error
    if not n_rows and not args.quiet:
        complain(f"The tables are empty: {'filters left' if asked.filters else 'there is'} no row.")


def _refuse_snapshot(args: argparse.Namespace, analyses: Sequence[str]) -> None:
    """Refuse a snapshot that nothing is asked about, instead of ignoring it."""
    from nsan.analysis.catalog import find

    if args.snapshot and all(find(name).subject == "trace" for name in analyses):
        msg = "No analysis of a snapshot is asked for: name some with --analyses, or leave --snapshot out."
        raise UsageError(msg)


def _folder_place(args: argparse.Namespace) -> Path:
    """Return the folder that was named, if it may be written: only an export of before is ever replaced."""
    from nsan.exports.tables import foreign_files

    path = output_path(args)
    inputs = [each.resolve() for each in (args.trace, args.snapshot) if each is not None]
    if any(path.resolve() in each.parents for each in inputs):
        raise OutputIsInputError(path)
    if not os.path.lexists(path):
        return path
    if path.is_symlink() or not path.is_dir():
        raise PlaceTakenError(path, "is a file, and tables go into a folder")
    if foreign := foreign_files(path):
        raise PlaceTakenError(path, f"holds {foreign[0]!r}, which is of no export of tables")
    return path


def _names(args: argparse.Namespace, option: str) -> list[str] | None:
    """Read names with commas between them; dashes count as underscores, each counts once."""
    given = getattr(args, option)
    if given is None:
        return None
    names = [name.strip().replace("-", "_") for name in given.split(",")]
    found = list(dict.fromkeys(name for name in names if name))
    if not found:
        msg = f"--{option} names none. Give names with commas between them, or leave it out."
        raise UsageError(msg)
    return found


def _asked(args: argparse.Namespace) -> Asked:
    """Open what was named, with its filters and without folders."""
    from nsan.asking import Asked
    from nsan.exports.private import without_folders
    from nsan.opening import store_of

    path = located(args)
    # Imported here, where a bar can be shown; the asking finds the store.
    store_of(path, progress=show_progress(args))
    filters = {
        "time": args.filter_time,
        "nvtx": args.filter_nvtx,
        "device": args.gpu,
        "pid": args.pid,
    }
    asked = Asked(path, args.snapshot, filters=filters)
    asked.whole, asked.trace = without_folders(asked.whole), without_folders(asked.trace)
    return asked


def _guarded(asked: Asked, write: Callable[[], T]) -> T:
    """Say of a store that changed or went meanwhile that it did."""
    from polars.exceptions import PolarsError

    try:
        return write()
    except FileNotFoundError as error:
        raise BrokenStoreError(asked.path, f"a part of it cannot be read ({error})") from error
    except PolarsError as error:
        if not isinstance(error, OSError):
            raise
        raise BrokenStoreError(asked.path, f"a part of it cannot be read ({error})") from error
