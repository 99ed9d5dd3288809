"""`nsan report` of many reports: the notebook of fleets, run by papermill on what was gathered."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nsan.cli.arguments import refuse_inputs
from nsan.cli.fleet_summary import fleet_inputs, fleet_of, fleet_status, refuse_fleet_filters
from nsan.cli.report import choose_output, executed, for_kernel, write_report
from nsan.errors import UsageError
from nsan.tabular.text import json_text
from nsan.text import safe

_TRACES: Final = "TRACES"
"""Parameter of a notebook that takes several reports."""

_OPTION: Final = {
    _TRACES: "the arguments TRACE",
    "PATTERN": "--rank-pattern",
    "ROWS": "--rows",
    "THEME": "--theme",
    "SUMMARY": "nsan itself",
}


def is_fleet_report(args: argparse.Namespace) -> bool:
    """Say whether the report is one of many reports.

    Parameters
    ----------
    args : Namespace
        Traces, and the notebook if one was named.

    Returns
    -------
    bool
        False for one trace, and for a notebook that takes one.

    Raises
    ------
    UsageError
        If several traces were named for a notebook that takes one.
    """
    from nsan.fleet.finding import is_fleet

    if not args.traces:
        return False
    if args.notebook is None:
        return is_fleet(args.traces)
    from nsan.report.notebook_file import read_notebook
    from nsan.report.parameters import parameters_of

    takes = parameters_of(read_notebook(args.notebook), args.notebook.name)
    if _TRACES not in takes and len(args.traces) > 1:
        msg = f"{safe(args.notebook.name)} takes one trace: it has no parameter {_TRACES}."
        raise UsageError(msg)
    return _TRACES in takes


def run_fleet_report(args: argparse.Namespace) -> int:
    """Write one report of many.

    Parameters
    ----------
    args : Namespace
        As of `nsan report`.

    Returns
    -------
    int
        0; 1 if a report could not be read; 3 if none has Unified Memory data.
    """
    refuse_fleet_filters(args)
    if args.snapshot is not None:
        msg = "--snapshot is for the report of one trace."
        raise UsageError(msg)
    inputs = fleet_inputs(args.traces)
    args.trace = inputs[0]
    choose_output(args, args.traces[0])
    refuse_inputs(args, inputs, args.output)
    notebook, name, values = _prepared(args)
    document = fleet_of(args, args.traces)
    with tempfile.TemporaryDirectory(prefix="nsan-fleet-") as folder:
        # What was gathered is handed over: the kernel does not gather again.
        place = Path(folder) / "fleet.json"
        place.write_text(json_text(document), encoding="utf-8")
        values |= {"SUMMARY": str(place)}
        shown = {_TRACES: [path.resolve().name for path in args.traces], "SUMMARY": ""}
        ran = executed(args, notebook, (name, values), shown)
    write_report(args, ran, f"{safe(document['name'])}: Unified Memory report")
    return fleet_status(args, document)


def _prepared(args: argparse.Namespace) -> tuple[Any, str, dict[str, Any]]:
    """Read the notebook, and settle its parameters."""
    from nsan.notebooks import notebook
    from nsan.report.notebook_file import read_notebook
    from nsan.report.parameters import checked, parameters_of, parse_parameters

    path = args.notebook or notebook("fleet")
    found = read_notebook(path)
    known = parameters_of(found, path.name)
    values = parse_parameters(known, args.parameters, path.name)
    given = _given(args)
    for name in values.keys() & (given.keys() | {"SUMMARY"}):
        msg = f"-p {name}=...: the parameter {name} is set by {_OPTION[name]} already."
        raise UsageError(msg)
    return found, path.name, checked(known, given, path.name) | values


def _given(args: argparse.Namespace) -> Mapping[str, Any]:
    """Give the values of parameters that options set."""
    values = {
        _TRACES: [for_kernel(path) for path in args.traces],
        "PATTERN": args.rank_pattern,
        "ROWS": args.rows,
        "THEME": args.theme,
    }
    return {name: value for name, value in values.items() if value is not None}
