"""Where page faults crowd: clusters in time and address, episodes in time, access patterns.

A cluster is a set of neighbouring cells (time x VA block) in which many pages faulted. An episode is
a stretch of time without a long pause. A pattern is how a kernel walks through an array, as the
pages that faulted show it.
"""

from __future__ import annotations

import argparse
from typing import Final

from nsan.cli.results import add_analysis, add_by, run_named

BY: Final = {
    "space-time": "fault_clusters",
    "episode": "fault_episodes",
    "gap": "episode_gaps",
    "cell": "cluster_cells",
    "pattern": "access_patterns",
}
"""Analysis by choice of ``--by``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    add_by(parser, BY, "space-time")
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    return run_named(args, BY[args.by])
