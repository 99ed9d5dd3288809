"""Page faults by access type, GPU and process, or by what `--by` names.

A GPU row is one driver batch, named by its lowest faulted page. Its recorded count is the fault
entries on that page only, so neither the rows nor the counts added up are "the number of faults":
both stand under their own names. A CPU row is one fault. Addresses and VA blocks are distinct
places of the rows (derived), and do not add up over groups.
"""

from __future__ import annotations

import argparse
from typing import Final

from nsan.cli.arguments import documented, none_here, um_status
from nsan.cli.output import write_table
from nsan.cli.results import add_analysis, add_by, refuse_analysis_options, run_named
from nsan.tabular.totals import FAULT_COLUMNS, FAULT_FIELDS, fault_rows, unanswered

BY: Final = {
    "access": "faults_by_access",
    "va-block": "faults_by_va_block",
    "page": "faults_by_page",
    "batch": "batches",
    "check": "fault_row_checks",
    "latency": "batch_latency",
    "latency-histogram": "latency_histogram",
    "service": "service_fit",
    "gap": "batch_gaps",
    "lost": "lost_rows",
}
"""Analysis by choice of ``--by``; without a choice the table comes from the store's totals."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    add_by(parser, {"group": "", **BY}, "group")
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.by != "group":
        return run_named(args, BY[args.by])
    refuse_analysis_options(args)
    document, manifest = documented(args)
    notes = []
    for kind, name, count in (("gpu_faults", "GPU", "n_rows"), ("cpu_faults", "CPU", "n")):
        if document[kind][count] is None:
            notes.append(f"{name} page faults: {unanswered(document, kind)}")
        elif not document[kind][count]:
            notes.append(f"{name} page faults: {none_here(args)}")
    keys = (
        "schema",
        "source",
        "capture",
        "switches",
        "reasons",
        "windows_ns",
        "kinds",
        "gpu_faults",
        "cpu_faults",
    )
    write_table(
        args,
        fault_rows(document),
        fields=FAULT_FIELDS,
        columns=FAULT_COLUMNS,
        document={key: document[key] for key in keys},
        notes=notes,
    )
    return um_status(args, manifest)
