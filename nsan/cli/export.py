"""Give a trace to other programs: a chart for a paper, a trace for Perfetto, tables as Parquet or CSV.

`--chart NAME` draws a chart (`--list` lists them; with `--chart NAME` it explains one). The suffix of the
file is the format: .svg and .pdf for papers, .png, .html (one page that needs no network), .json (Vega-Lite).
`--to perfetto` writes a native trace for Perfetto's page and its SQL: kernels, NVTX, batches, migrations,
counters. `--to parquet` and `--to csv` write a folder with one file per table, and what each column means.

Examples
--------
  nsan export --list
  nsan export sample_data/um_vector_add_rtx4060l.sqlite --chart migrations_over_time -o moved.svg
  nsan export trace.sqlite --chart address_time_map --filter-time 1s/2s --theme dark -o map.png
  nsan export trace.sqlite --to perfetto -o trace.pftrace
  nsan export trace.sqlite --to parquet --analyses batches,faults_by_kernel -o tables
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsan.cli.arguments import (
    add_filters,
    add_memory,
    add_verbosity,
    filtered,
    located,
    show_progress,
    um_status,
    write_file,
    write_result,
)
from nsan.cli.exported import FORMATS, add_tables, refuse_tables, write_exported
from nsan.cli.results import add_snapshot, joined_sources, refuse_filters
from nsan.cli.terminal import complain
from nsan.errors import BrokenStoreError, UsageError
from nsan.tabular.text import Field, dash, json_text, table

if TYPE_CHECKING:
    from nsan.analysing import Source
    from nsan.charts.catalog import Chart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "trace", metavar="TRACE", nargs="?", type=Path, help="nsys report or export, or nsan store"
    )
    parser.add_argument(
        "--list", action="store_true", help="list the charts, or explain the one that is named"
    )
    parser.add_argument("--json", action="store_true", help="with --list: for machines")
    parser.add_argument("--to", choices=FORMATS, help="write this instead of a chart")
    add_snapshot(parser)
    add_verbosity(parser)
    add_memory(parser)
    _add_chart(parser)
    add_tables(parser)
    add_filters(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "-o", "--output", type=Path, metavar="OUT", help="the file or folder to write"
    )
    group.add_argument("--force-overwrite", action="store_true", help="replace an existing OUT")


def _add_chart(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("chart")
    group.add_argument("--chart", metavar="NAME", help="what to draw")
    group.add_argument("--theme", choices=("light", "dark"), default="light", help="default: light")
    group.add_argument("--width", type=int, metavar="PIXELS", help="width of the drawn area")
    group.add_argument(
        "--scale", type=float, default=2.0, metavar="N", help="size of a .png; default: 2"
    )
    group.add_argument(
        "--set",
        dest="options",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set an option of an analysis that is drawn; repeatable",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    # What is shared with other commands asks for a format; here the suffix of the file is it.
    args.format = "json" if args.json else "table"
    if args.list:
        return _list(args)
    if args.json:
        msg = "--json goes with --list; a chart as JSON is a file: -o FILE.json."
        raise UsageError(msg)
    if args.to is not None:
        return write_exported(args)
    refuse_tables(args)
    return _draw(args)


def _draw(args: argparse.Namespace) -> int:
    """Draw the chart that was named into the file that was named."""
    from nsan.charting import find, parse_options

    if args.chart is None or args.output is None:
        msg = "Give a trace, --chart NAME and -o FILE, or --to FORMAT and -o OUT, or --list."
        raise UsageError(msg)
    chosen = find(args.chart)
    from nsan.charts.saving import check_format, rendered

    check_format(args.output.suffix, args.scale)
    if args.trace is None:
        msg = "Give the trace to draw, or --list."
        raise UsageError(msg)
    options = parse_options(chosen, args.options)
    status, reason = 0, ""

    def draw(place: Path) -> None:
        nonlocal status, reason
        (drawn, reason), status = _drawn(args, chosen, options)
        place.write_bytes(rendered(drawn, args.output.suffix, scale=args.scale))

    write_file(args, draw)
    if reason and not args.quiet:
        complain(f"The chart is empty. {reason}")
    return status


def _drawn(
    args: argparse.Namespace, chosen: Chart, options: dict[str, Any]
) -> tuple[tuple[Any, str], int]:
    """Open what a chart is about, and draw it; also why it is empty, and the exit status of the trace."""
    from polars.exceptions import PolarsError

    from nsan.charting import chart_or_reason
    from nsan.io.store import open_store
    from nsan.opening import open_snapshot, store_of

    def draw(source: Source) -> tuple[Any, str]:
        return chart_or_reason(source, chosen, theme=args.theme, width=args.width, options=options)

    if chosen.subject == "snapshot":
        refuse_filters(args)
        return draw(open_snapshot(args.snapshot or args.trace)), 0
    if chosen.subject == "joined":
        return draw(joined_sources(args)), 0
    folder, manifest = store_of(located(args), progress=show_progress(args))
    try:
        return draw(filtered(open_store(folder, manifest), args)), um_status(args, manifest)
    except (PolarsError, OSError) as error:
        if isinstance(error, PolarsError) and not isinstance(error, OSError):
            raise
        raise BrokenStoreError(folder, f"a part of it cannot be read ({error})") from error


def _list(args: argparse.Namespace) -> int:
    from nsan.charting import all_charts, find

    args.trace = args.trace or Path()
    if args.chart:
        chosen = find(args.chart)
        text = json_text(_entry(chosen)) if args.json else _explained(chosen)
        write_result(args, text)
        return 0
    known = list(all_charts().values())
    if args.json:
        write_result(args, json_text([_entry(each) for each in known]))
        return 0
    rows = [{"name": c.name, "about": c.subject, "question": c.question} for c in known]
    fields = [
        Field("name", "Chart", dash, right=False),
        Field("about", "Of a", dash, right=False),
        Field("question", "Question", dash, right=False),
    ]
    write_result(args, table(rows, fields) + "\n")
    return 0


def _entry(chosen: Chart) -> dict[str, object]:
    from nsan.charting import options_of

    return {
        "name": chosen.name,
        "question": chosen.question,
        "subject": chosen.subject,
        "draws": list(chosen.draws),
        "options": options_of(chosen),
    }


def _explained(chosen: Chart) -> str:
    """Write a chart for people: question, what it draws, options."""
    from nsan.charting import options_of

    parts = [
        f"{chosen.name}: {chosen.question}",
        f"Draws {', '.join(chosen.draws)} (`nsan analyse --list NAME` explains each), of a {chosen.subject}.",
    ]
    if options := options_of(chosen):
        written = [f"  {name} = {value}" for name, value in options.items()]
        parts.append("\n".join(["Options (--set NAME=VALUE), with defaults:", *written]))
    return "\n\n".join(parts) + "\n"
