"""Record a program with nsys, everything switched on that nsan can use, and summarise the trace.

The program first runs once without nsys, for its unperturbed time: page-fault tracing can slow it by
up to 70 %, so times are comparable only between traces made with the same switches. The report, and
what is known about the run and the driver (NAME.nsan.json), are left beside each other. What the
program and nsys say goes to stderr. Where standard input is a pipe there is no run without nsys, for
it can be read once only.
"""

from __future__ import annotations

import argparse
import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING

from nsan.cli.arguments import add_verbosity, show_progress, um_status
from nsan.cli.summary import summary_text
from nsan.cli.terminal import coloured, complain, emit
from nsan.errors import UsageError
from nsan.tabular.text import json_text
from nsan.units import NS_PER_S, format_time

if TYPE_CHECKING:
    from nsan.io.recording import Recording


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.usage = "nsan record [options] [--] PROGRAM [ARGUMENT ...]"
    parser.add_argument("-o", "--output", type=Path, metavar="NAME", help="name of the report")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the program without nsys before"
    )
    parser.add_argument(
        "--nsys",
        action="append",
        default=[],
        metavar="OPTION",
        help="a further option of `nsys profile`, as --nsys=--capture-range=cudaProfilerApi",
    )
    parser.add_argument("--force-overwrite", action="store_true", help="replace an existing report")
    parser.add_argument("--json", action="store_true", help="write the summary as JSON")
    add_verbosity(parser)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from nsan.contract import document
    from nsan.io.recording import record
    from nsan.opening import store_of

    command = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not command:
        msg = "Say what to record: nsan record [options] [--] PROGRAM [ARGUMENT ...]"
        raise UsageError(msg)
    recording = record(
        command,
        args.output or _default_name(command[0]),
        baseline=not args.no_baseline,
        overwrite=args.force_overwrite,
        options=args.nsys,
    )
    if not args.quiet:
        complain(_account(recording))
    _, manifest = store_of(recording.report, progress=show_progress(args))
    summary = document(manifest["info"], manifest["totals"])
    if args.json:
        emit(json_text({**summary, "recording": recording.to_dict()}))
    else:
        emit(summary_text(summary, verbose=args.verbose, paint=coloured))
    args.trace = recording.report
    status = um_status(args, manifest)
    return 1 if recording.status_recorded else status


def _default_name(program: str) -> Path:
    # Local time, as people remember it.
    now = dt.datetime.now().astimezone()
    return Path(f"{Path(program).stem}-{now:%Y%m%d-%H%M%S}.nsys-rep")


def _account(recording: Recording) -> str:
    """Say where the report is, how long the program takes alone, and whether it ended well."""
    whole = format_time(recording.seconds_nsys * NS_PER_S)
    parts = [f"recorded {recording.report} (nsys took {whole} in all)"]
    if recording.seconds_alone is None:
        parts.append("the program's time without nsys was not measured")
    else:
        alone = format_time(recording.seconds_alone * NS_PER_S)
        parts.append(f"without nsys the program takes {alone}")
    if recording.status_alone:
        parts.append(f"it ended with status {recording.status_alone} there")
    if recording.status_recorded:
        parts.append(f"the program ended with status {recording.status_recorded}")
    return "; ".join(parts)
