"""Compare runs: what differs, whether it is more than noise, and whether a limit is exceeded.

A is the base, and B, C, ... are compared with it. Each is a trace, or a folder of traces of one condition: then
each of them is a repetition, and how much repetitions differ is the noise that a change has to be beyond. With
one trace each, noise is known from steps, if there are some. Runs that are not comparable are refused with the
reason: recorded with other switches, on another GPU, empty, of another program, with lost rows.

A limit is FIGURE, an operator and a value: `migrations.bytes>+10%` (change), `duration_ns>+5ms` (difference),
`step.time_ns>120ms` (value), `range.fault_rows@forward>+10%` (of one NVTX range or kernel).

Examples
--------
  nsan compare before.sqlite after.sqlite
  nsan compare runs_before runs_after --by run,step,kernel   folders of repetitions
  nsan compare before after --fail-on 'migrations.bytes>+10%' --fail-on 'duration_ns>+3%'
  nsan compare before.sqlite after.sqlite --report compare.html
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.cli.arguments import (
    add_filters,
    add_memory,
    add_output,
    add_verbosity,
    from_zero,
    is_filtered,
    output_path,
    refuse_inputs,
    told_runs,
)
from nsan.cli.output import write_document, write_table
from nsan.cli.terminal import complain
from nsan.errors import UsageError

if TYPE_CHECKING:
    from nsan.comparing.document import Comparison

_SCOPES: Final = ("run", "step", "range", "kernel")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "runs", metavar="A", nargs="*", type=Path, help="trace or folder of traces, the base first"
    )
    add_verbosity(parser)
    add_memory(parser)
    group = parser.add_argument_group("runs that are not in folders")
    for side, what in (("base", "the base"), ("other", "what is compared with it")):
        group.add_argument(
            f"--{side}",
            action="append",
            default=[],
            type=Path,
            metavar="TRACE",
            help=f"a run of {what}; more of them are repetitions",
        )
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--by",
        type=_scopes,
        default=("run", "step"),
        metavar="WHAT",
        help=f"what is compared, default run,step: {', '.join(_SCOPES)}",
    )
    group.add_argument(
        "--nvtx", default="", metavar="NAME", help="NVTX range of a step, by default found"
    )
    group.add_argument(
        "--warmup",
        type=from_zero,
        default=1,
        metavar="N",
        help="steps to leave out at the start, default 1",
    )
    group.add_argument(
        "--min-effect",
        type=_share,
        default=0.02,
        metavar="SHARE",
        help="least change that is worth a word, default 2%%",
    )
    group.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="LIMIT",
        help="exit with 4 if a figure exceeds this; repeatable",
    )
    group.add_argument(
        "--anyway",
        action="store_true",
        help="compare what is not comparable, without the verdicts that this forbids",
    )
    add_filters(parser)
    add_output(parser)
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="also write a web page with charts, FILE.html"
    )


def _scopes(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found or not set(found) <= set(_SCOPES):
        msg = f"{text!r}: name some of {', '.join(_SCOPES)}, with commas between"
        raise argparse.ArgumentTypeError(msg)
    return found


def _share(text: str) -> float:
    number = text.strip().removesuffix("%").strip()
    try:
        value = float(number) / (100 if "%" in text else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        msg = f"{text!r} is no share from 0 to below 1, as 2% or 0.02"
        raise argparse.ArgumentTypeError(msg)
    return value


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    conditions = _conditions(args)
    _check_outputs(args)
    found = _compared_or_refused(args, conditions)
    _write(args, found)
    if args.report is not None:
        from nsan.cli.compare_report import write_report

        write_report(args, conditions, _filters(args))
    return _status(args, found)


def _conditions(args: argparse.Namespace) -> list[list[Path]]:
    """Put together which runs are of which condition."""
    sides = [side for side in (args.base, args.other) if side]
    if sides and (args.runs or len(sides) < 2):
        msg = "Name conditions as A B ..., or runs of two with --base and --other, both."
        raise UsageError(msg)
    if not sides and len(args.runs) < 2:
        msg = "Name two traces, or folders of traces, to compare: nsan compare A B."
        raise UsageError(msg)
    return sides or [[path] for path in args.runs]


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse what could not be written before anything is opened."""
    named = [*args.runs, *args.base, *args.other]
    inputs = [*named, *_captures(named)] if args.output or args.report else named
    refuse_inputs(args, inputs, args.output)
    if args.output is not None:
        output_path(args)
    if args.report is not None:
        from nsan.cli.compare_report import check_report

        refuse_inputs(args, inputs, args.report)
        check_report(args)


def _captures(named: list[Path]) -> list[Path]:
    """List what will be read: a folder may be one of links."""
    from nsan.comparing.conditions import captures_in

    return [capture for path in named for capture in captures_in(path)]


def _filters(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the filters that were given, as :meth:`nsan.Trace.filter` takes them."""
    if not is_filtered(args):
        return {}
    given = {
        "time": args.filter_time,
        "nvtx": args.filter_nvtx,
        "device": args.gpu,
        "pid": args.pid,
    }
    return {key: value for key, value in given.items() if value is not None}


def _compared_or_refused(args: argparse.Namespace, conditions: list[list[Path]]) -> Comparison:
    """Compare what was named; where that is refused, JSON holds the reasons."""
    from nsan.comparing.comparability import NotComparableError

    try:
        return _compared(args, conditions)
    except NotComparableError as error:
        if args.format == "json" and error.comparison is not None:
            write_document(args, error.comparison.to_dict(), str)
        raise


def _compared(args: argparse.Namespace, conditions: list[list[Path]]) -> Comparison:
    """Compare what was named."""
    from nsan.analysis.compare.movers import Judging
    from nsan.comparing.document import compare
    from nsan.comparing.measuring import Asking

    asking = Asking(args.by, args.nvtx, args.warmup, filters=_filters(args))
    with told_runs(args, "measured") as tell:
        return compare(
            *conditions,
            asking=asking,
            judging=Judging(min_effect=args.min_effect),
            fail_on=args.fail_on,
            anyway=args.anyway,
            tell=tell,
        )


def _write(args: argparse.Namespace, found: Comparison) -> None:
    """Write the comparison in the format that was asked for; what text would say beside it goes to stderr."""
    from nsan.analysis.compare.tables import MOVERS
    from nsan.comparing.text import gates_in_words, text_of, warnings_of

    document = found.to_dict()
    if args.format in {"csv", "parquet"}:
        write_table(
            args,
            document["movers"],
            fields=(),
            columns=list(MOVERS.schema),
            document=document,
            notes=(),
        )
    else:
        markdown = args.format == "markdown"
        write_document(args, document, lambda: text_of(document, markdown=markdown, rows=args.rows))
    is_read = args.format in {"table", "markdown"} and args.output is None
    if not args.quiet and not is_read:
        for said in (*warnings_of(document), *gates_in_words(document)):
            complain(said)


def _status(args: argparse.Namespace, found: Comparison) -> int:
    """Say how it ended: 4 a gate failed, 1 one could not be decided, 3 no run has data, 0 all is well."""
    if found.has_failed:
        return 4
    if any(each.outcome == "undecided" for each in found.gates):
        return 1
    has_data = any(run.has_um_data for side in found.sides for run in side.runs)
    if not has_data and not args.quiet:
        complain(
            "no run holds Unified Memory data: no migration, no page fault, no managed allocation."
        )
    return 0 if has_data else 3
