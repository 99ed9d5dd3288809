"""Unified Memory migrations by direction, cause, GPU and process.

Count and bytes are sums of recorded rows. Busy is the time in which at least one such migration was
in flight (derived: a union, clipped to the window of a filter). Rate is bytes over busy time: how
fast copies ran while they ran, not what the link could carry.
"""

from __future__ import annotations

import argparse

from nsan.cli.arguments import add_filters, add_input, add_output, documented, none_here, um_status
from nsan.cli.output import write_table
from nsan.cli.tables import MIGRATION_COLUMNS, MIGRATION_FIELDS, migration_rows, unanswered


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    add_input(parser)
    add_filters(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    document, manifest = documented(args)
    notes = []
    if document["migrations"]["n"] is None:
        notes.append(f"Migrations: {unanswered(document, 'migrations')}")
    elif not document["migrations"]["n"]:
        notes.append(f"Migrations: {none_here(args)}")
    write_table(
        args,
        migration_rows(document["migrations"]["groups"] or []),
        fields=MIGRATION_FIELDS,
        columns=MIGRATION_COLUMNS,
        document={
            key: document[key]
            for key in (
                "schema",
                "source",
                "capture",
                "switches",
                "reasons",
                "windows_ns",
                "kinds",
                "migrations",
            )
        },
        notes=notes,
    )
    return um_status(args, manifest)
