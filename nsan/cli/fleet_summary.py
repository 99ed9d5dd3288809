"""Many reports at once: what `nsan summary` and `nsan report` do with folders of several, paths and corpora."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nsan.cli.arguments import is_filtered, output_path, refuse_inputs, told_runs
from nsan.cli.output import write_document, write_table
from nsan.cli.terminal import complain
from nsan.errors import UsageError
from nsan.text import safe

_MOST_NAMES: Final = 10


def run_fleet(args: argparse.Namespace, paths: Sequence[Path]) -> int:
    """Summarise many reports.

    Parameters
    ----------
    args : Namespace
        Filters, which have to be none, format and output, and how to gather.
    paths : sequence of Path
        Folders, reports, stores or a corpus.

    Returns
    -------
    int
        0; 1 if a report could not be read; 3 if none has Unified Memory data.
    """
    refuse_fleet_filters(args)
    if args.output is not None:
        refuse_inputs(args, fleet_inputs(paths), args.output)
        output_path(args)
    elif args.format == "parquet":
        output_path(args)
    document = fleet_of(args, paths)
    _write(args, document)
    return fleet_status(args, document)


def fleet_inputs(paths: Sequence[Path]) -> list[Path]:
    """List what is read of a fleet, over which nothing may be written.

    Parameters
    ----------
    paths : sequence of Path
        What was named.

    Returns
    -------
    list of Path
        The reports themselves: beside them there is room. A corpus is one as a whole.
    """
    from nsan.fleet.finding import reports_in
    from nsan.io.corpus_place import is_corpus

    whole = [path for path in paths if is_corpus(path)]
    single = [path for path in paths if path not in whole]
    found = [each.path for each in reports_in(single)] if single else []
    return whole + found or list(paths)


def refuse_fleet_filters(args: argparse.Namespace) -> None:
    """Refuse filters where several reports are read: each has a clock and GPUs of its own."""
    if is_filtered(args):
        msg = (
            "A filter is for one report: times count from its own start, GPUs and processes are its own. Name the "
            "report: nsan summary FILE --filter-time ..."
        )
        raise UsageError(msg)


def refuse_fleet_options(args: argparse.Namespace) -> None:
    """Refuse options about many reports where one is read, instead of ignoring them."""
    given = {"--workers": args.workers, "--dask": args.dask, "--rank-pattern": args.rank_pattern}
    for option, value in given.items():
        if value is not None:
            msg = f"{option} is for several reports: name more, or a folder that holds several."
            raise UsageError(msg)


def fleet_of(args: argparse.Namespace, paths: Sequence[Path]) -> dict[str, Any]:
    """Gather reports and summarise them.

    Parameters
    ----------
    args : Namespace
        How to gather, and how much to say.
    paths : sequence of Path
        What was named.

    Returns
    -------
    dict
        Of :func:`nsan.fleet.document.fleet_document`.
    """
    from nsan.cli.fleet_arguments import how
    from nsan.fleet.document import fleet_document, fleet_name
    from nsan.fleet.gathering import gather

    with told_runs(args, "read") as tell:
        found = gather(paths, how=how(args), tell=tell)
    if found.twice and not args.quiet:
        complain(
            f"the same file is there more than once: {safe('; '.join(found.twice[:_MOST_NAMES]))}"
        )
    return fleet_document(found.members, found.failures, name=fleet_name(paths))


def fleet_status(args: argparse.Namespace, document: Mapping[str, Any]) -> int:
    """Say how it ended: 1 a report failed, 3 no report has Unified Memory data, 0 all is well."""
    if document["n_failed"]:
        # Whoever reads the text has them there.
        is_read = args.format in {"table", "markdown"} and args.output is None
        if not args.quiet and not is_read:
            _name_failures(document["failures"])
        return 1
    if document["n_without_um_data"] < document["n_reports"]:
        return 0
    if not args.quiet:
        complain(
            "no report holds Unified Memory data: no migration, no page fault, no managed allocation."
        )
    return 3


def _name_failures(failures: Sequence[Mapping[str, Any]]) -> None:
    """Name what failed on stderr; a result in a file or for machines hides it from people."""
    n = len(failures)
    complain(f"{n} report{'s' * (n != 1)} could not be read:")
    for each in failures:
        complain(f"  {safe(each['source'])}: {safe(each['reason'])}")


def _write(args: argparse.Namespace, document: Mapping[str, Any]) -> None:
    from nsan.fleet.figures import REPORT_FIGURES
    from nsan.fleet.text import fleet_text

    if args.format in {"csv", "parquet"}:
        write_table(
            args,
            document["reports"],
            fields=(),
            columns=dict(REPORT_FIGURES.schema),
            document=document,
            notes=(),
        )
        return
    markdown = args.format == "markdown"
    write_document(args, document, lambda: fleet_text(document, markdown=markdown, rows=args.rows))
