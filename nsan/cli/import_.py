"""Turn a capture into a Parquet store that opens at once.

Every command does this by itself, into a cache; import places the store where you want it. The
export is never changed. A store is used again while its source is unchanged.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nsan.cli.arguments import add_verbosity, located, show_progress
from nsan.cli.terminal import complain, emit
from nsan.units import format_bytes, format_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("trace", metavar="TRACE", type=Path, help="report, export or nvprof file")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="place of the store; a cache by default"
    )
    parser.add_argument(
        "--force-overwrite",
        action="store_true",
        help="replace a store of another source, or make it again",
    )
    parser.add_argument(
        "--keep-paths",
        action="store_true",
        help="keep whole paths of programs and source files; they may name people and machines",
    )
    add_verbosity(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from nsan.io.manifest import read_manifest
    from nsan.opening import import_trace

    folder = import_trace(
        located(args),
        args.output,
        overwrite=args.force_overwrite,
        keep_paths=args.keep_paths,
        progress=show_progress(args),
    )
    if not args.quiet:
        tables = read_manifest(folder)["tables"]
        n_rows = sum(table["n_rows"] for table in tables.values())
        size = sum(part["bytes"] for table in tables.values() for part in table["parts"])
        complain(f"{format_count(n_rows)} rows, {format_bytes(size)}")
    emit(f"{folder}\n")
    return 0
