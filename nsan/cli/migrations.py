"""Unified Memory migrations by direction, cause, GPU and process, or by what `--by` names.

Count and bytes are sums of recorded rows. Busy is the time in which at least one such migration was
in flight (derived: a union, clipped to the window of a filter). Rate is bytes over busy time: how
fast copies ran while they ran, not what the link could carry.
"""

from __future__ import annotations

import argparse
from typing import Final

from nsan.cli.arguments import documented, none_here, um_status
from nsan.cli.output import write_table
from nsan.cli.results import add_analysis, add_by, refuse_analysis_options, run_named
from nsan.tabular.totals import MIGRATION_COLUMNS, MIGRATION_FIELDS, migration_rows, unanswered

BY: Final = {
    "cause": "migrations_by_cause",
    "time": "traffic_over_time",
    "size": "transfer_efficiency",
    "cost": "copy_cost",
    "push": "pushes",
    "amplification": "amplification",
    "prefetch": "prefetch_share",
    "user-prefetch": "user_prefetches",
    "eviction": "evictions",
    "refault": "refaults",
    "refault-block": "refaults_by_va_block",
    "refault-total": "refault_totals",
    "ping-pong": "ping_pong",
    "ping-pong-block": "ping_pong_by_va_block",
    "residency": "residency_runs",
    "resident": "resident_bytes_over_time",
    "memory": "memory_ledger",
    "oversubscription": "oversubscription_factor",
    "working-set": "working_set",
    "working-set-nvtx": "working_set_by_nvtx",
    "replay": "prefetch_replay",
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
