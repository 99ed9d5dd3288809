"""Page faults by access type, GPU and process.

A GPU row is one driver batch, named by its lowest faulted page. Its recorded count is the fault
entries on that page only, so neither the rows nor the counts added up are "the number of faults":
both stand under their own names. A CPU row is one fault. Addresses and VA blocks are distinct
places of the rows (derived), and do not add up over groups.
"""

from __future__ import annotations

import argparse

from nsan.cli.arguments import add_filters, add_input, add_output, documented, none_here, um_status
from nsan.cli.output import write_table
from nsan.cli.tables import FAULT_COLUMNS, FAULT_FIELDS, fault_rows, unanswered


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    add_input(parser)
    add_filters(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
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
