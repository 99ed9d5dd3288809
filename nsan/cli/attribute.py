"""Whose they are: page faults, migrations and the time exposed to them, by what asked for them.

Parts add up to the whole: what belongs to nothing, or to several at once, has rows of its own. CPU
page faults and what they move belong to the CPU side, never to the kernel that happens to run.
"""

from __future__ import annotations

import argparse
from typing import Final

from nsan.cli.results import add_analysis, add_by, run_named

BY: Final = {
    "kernel": "faults_by_kernel",
    "kernel-instance": "faults_by_kernel_instance",
    "nvtx": "faults_by_nvtx",
    "allocation": "faults_by_allocation",
    "function": "faults_by_function",
    "step": "iterations",
}
"""Analysis by choice of ``--by``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    add_by(parser, BY, "kernel")
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    return run_named(args, BY[args.by])
