"""Options of commands that read many reports: by which workers, and how names are understood."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsan.fleet.how import How


def add_fleet(parser: argparse.ArgumentParser) -> None:
    """Add the options of a fleet.

    Parameters
    ----------
    parser : ArgumentParser
        Of a command that takes several reports, folders of reports, or a corpus.
    """
    group = parser.add_argument_group("many reports")
    group.add_argument(
        "--workers", type=_workers, metavar="N", help="read in N processes of this machine"
    )
    group.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="read on a dask cluster that runs already: tcp://HOST:8786",
    )
    group.add_argument(
        "--rank-pattern",
        metavar="REGEX",
        help=r"how run and rank stand in a report's path, e.g. '(?P<run>[^/]+)/gpu(?P<rank>\d+)'; "
        "`nsan import --list` shows what they are taken for",
    )


def how(args: argparse.Namespace) -> How:
    """Return what the options of :func:`add_fleet` ask for.

    Parameters
    ----------
    args : Namespace
        What was parsed.

    Returns
    -------
    How
        For :func:`nsan.fleet.gathering.gather`.

    Raises
    ------
    UsageError
        If two of them do not go together, or the pattern cannot be used.
    """
    from nsan.fleet.how import How
    from nsan.fleet.naming import checked_pattern

    checked_pattern(args.rank_pattern)
    return How(args.workers, args.dask, args.rank_pattern).checked()


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        msg = f"{text!r} is not a number of processes above 0"
        raise argparse.ArgumentTypeError(msg)
    return int(text)
