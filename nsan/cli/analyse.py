"""Run any analysis by name, nsan's or your own.

`nsan analyse --list` is the table of contents; with a name it explains that analysis: its columns
with unit and kind, its options, what it reads and costs.

Examples
--------
  nsan analyse --list
  nsan analyse --list batches
  nsan analyse batches trace.sqlite --format csv
  nsan analyse my_analysis trace.sqlite --plugin my_analyses.py --set window_ns=1000000
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nsan.cli.arguments import add_filters, add_memory, add_output, add_verbosity, write_result
from nsan.cli.results import add_analysis_options, add_snapshot, run_named
from nsan.errors import UsageError
from nsan.tabular.text import Field, dash, json_text, table

if TYPE_CHECKING:
    from nsan.analysis.catalog import Analysis


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="name of an analysis")
    parser.add_argument(
        "trace", metavar="TRACE", nargs="?", type=Path, help="nsys report or export, or nsan store"
    )
    parser.add_argument(
        "--list", action="store_true", help="list the analyses, or explain the one that is named"
    )
    add_snapshot(parser)
    add_verbosity(parser)
    add_memory(parser)
    add_analysis_options(parser)
    add_filters(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.list:
        return _list(args)
    if args.name is None or args.trace is None:
        msg = "Give the name of an analysis and a trace, or --list."
        raise UsageError(msg)
    return run_named(args, args.name)


def _list(args: argparse.Namespace) -> int:
    from nsan.analysis.catalog import catalog, find
    from nsan.plugins import own_analyses

    own = own_analyses(args.plugins)
    args.trace = args.trace or Path()
    if args.format in {"csv", "parquet"}:
        msg = "The table of contents comes as text, Markdown or JSON."
        raise UsageError(msg)
    if args.name:
        chosen = find(args.name, own)
        text = json_text(_entry(chosen)) if args.format == "json" else _explained(chosen)
        write_result(args, text)
        return 0
    known = [*catalog().values(), *own]
    if args.format == "json":
        write_result(args, json_text([_entry(each) for each in known]))
        return 0
    rows = [{"name": each.name, "question": each.question} for each in known]
    fields = [
        Field("name", "Analysis", dash, right=False),
        Field("question", "Question", dash, right=False),
    ]
    write_result(args, table(rows, fields, markdown=args.format == "markdown") + "\n")
    return 0


def _entry(analysis: Analysis) -> dict[str, object]:
    return {
        "name": analysis.name,
        "question": analysis.question,
        "row": analysis.result.row,
        "reads": {table: list(columns) for table, columns in analysis.reads.items()},
        "options": analysis.options,
        "complexity": analysis.complexity,
        "source": analysis.source,
        "columns": [
            {"name": c.name, "unit": c.unit, "kind": c.kind, "doc": c.doc}
            for c in analysis.result.columns
        ],
    }


def _explained(analysis: Analysis) -> str:
    """Write an analysis for people: question, row, columns, options, cost."""
    fields = [
        Field("name", "Column", dash, right=False),
        Field("unit", "Unit", dash, right=False),
        Field("kind", "Kind", dash, right=False),
        Field("doc", "Meaning", dash, right=False),
    ]
    columns = [
        {"name": c.name, "unit": c.unit, "kind": c.kind, "doc": c.doc}
        for c in analysis.result.columns
    ]
    options = [f"  {name} = {value}" for name, value in analysis.options.items()]
    facts = [
        f"One row is {analysis.result.row}.",
        f"Reads {'; '.join(f'{t}: ' + ', '.join(c) for t, c in analysis.reads.items())}.",
        f"Cost {analysis.complexity}."
        + (f" Source: {analysis.source}." if analysis.source else ""),
    ]
    parts = [f"{analysis.name}: {analysis.question}", "\n".join(facts), table(columns, fields)]
    if options:
        parts.append("\n".join(["Options (--set NAME=VALUE), with defaults:", *options]))
    return "\n\n".join(parts) + "\n"
