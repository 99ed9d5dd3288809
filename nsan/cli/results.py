"""Any result of an analysis for people and machines: columns by their unit, kinds in words."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from nsan.cli.arguments import (
    add_filters,
    add_input,
    add_output,
    filtered,
    is_filtered,
    located,
    show_progress,
    um_status,
    write_file,
    write_pieces,
    write_result,
)
from nsan.cli.terminal import complain, too_wide
from nsan.errors import AnalysisError, BrokenStoreError, NsanError, UsageError
from nsan.tabular.columns import fields_of, header_of, plain, telling, zero_columns
from nsan.tabular.notes import few, kinds_in_words, notes_on
from nsan.tabular.text import csv_pieces, json_pieces, table

if TYPE_CHECKING:
    import polars as pl

    from nsan.analysing import Source
    from nsan.analysis.catalog import Analysis
    from nsan.joined import Joined
    from nsan.trace import Trace

_MOST_ROWS: Final = 20
"""Rows that people are shown unless they ask for more."""
_ROWS_AT_ONCE: Final = 10_000
"""Rows that are plain values at a time."""


def add_analysis(parser: argparse.ArgumentParser) -> None:
    """Add what every command that runs an analysis has."""
    add_input(parser)
    add_analysis_options(parser)
    add_filters(parser)
    add_output(parser)


def add_analysis_options(parser: argparse.ArgumentParser) -> None:
    """Add options of the analysis, and where to find more analyses."""
    group = parser.add_argument_group("analysis")
    group.add_argument(
        "--set",
        dest="options",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set an option of the analysis; repeatable",
    )
    group.add_argument(
        "--plugin",
        dest="plugins",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="also offer the analyses of this Python file (it is run); repeatable",
    )


class _Once(argparse.Action):
    """An option that can be given once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Keep the value; refuse a second one instead of forgetting the first."""
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is given twice: a trace is joined with one.")
        setattr(namespace, self.dest, values)


def add_snapshot(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the memory snapshot that a trace is joined with."""
    parser.add_argument(
        "--snapshot",
        action=_Once,
        type=Path,
        metavar="FILE",
        help="memory snapshot of PyTorch that the traced program wrote: joins both",
    )


def add_by(parser: argparse.ArgumentParser, choices: Mapping[str, str], default: str) -> None:
    """Add ``--by``, which chooses the analysis."""
    parser.add_argument(
        "--by",
        choices=list(choices),
        default=default,
        # As a metavar they would make one line too long for a terminal.
        metavar="WHAT",
        help=f"what one row is, default {default}: {', '.join(choices)}",
    )


def refuse_analysis_options(args: argparse.Namespace) -> None:
    """Refuse options of an analysis where none is run, instead of ignoring them."""
    if args.options or args.plugins:
        msg = "--set and --plugin go with an analysis: choose one with --by."
        raise UsageError(msg)


def refuse_filters(args: argparse.Namespace) -> None:
    """Refuse filters where a snapshot alone is read."""
    if is_filtered(args):
        msg = "A snapshot has no window to choose: leave the filters out; its rows name their GPU."
        raise UsageError(msg)


def run_named(args: argparse.Namespace, name: str) -> int:
    """Run the analysis of a name on the trace that was named, and write what it gives.

    Parameters
    ----------
    args : Namespace
        Trace, filters, options, plug-ins, format and output.
    name : str
        Name of the analysis.

    Returns
    -------
    int
        Exit status.
    """
    from polars.exceptions import PolarsError

    from nsan.analysing import parse_options
    from nsan.analysis.catalog import find
    from nsan.io.store import open_store
    from nsan.opening import store_of
    from nsan.plugins import own_analyses

    analysis = find(name, own_analyses(args.plugins))
    options = parse_options(analysis, args.options)
    if analysis.subject == "snapshot":
        return run_on_snapshot(args, analysis, options)
    if analysis.subject == "joined":
        return run_on_join(args, analysis, options)
    folder, manifest = store_of(located(args), progress=show_progress(args))
    try:
        trace = filtered(open_store(folder, manifest), args)
        found = _computed(trace, analysis, options)
    except (PolarsError, OSError) as error:
        if isinstance(error, PolarsError) and not isinstance(error, OSError):
            raise
        raise BrokenStoreError(folder, f"a part of it cannot be read ({error})") from error
    write_found(args, analysis, found, trace, {**analysis.options, **options})
    return um_status(args, manifest)


def run_on_snapshot(
    args: argparse.Namespace, analysis: Analysis, options: Mapping[str, Any]
) -> int:
    """Run an analysis of a memory snapshot, and write what it gives.

    Parameters
    ----------
    args : Namespace
        Snapshot (as ``trace``), format and output.
    analysis : Analysis
        What to run.
    options : mapping
        Values for its options.

    Returns
    -------
    int
        Exit status.
    """
    from nsan.opening import open_snapshot

    refuse_filters(args)
    # Beside a trace the snapshot has an option of its own.
    snapshot = open_snapshot(getattr(args, "snapshot", None) or args.trace)
    found = _computed(snapshot, analysis, options)
    write_found(args, analysis, found, snapshot, {**analysis.options, **options})
    return 0


def joined_sources(args: argparse.Namespace) -> Joined:
    """Join the trace and the snapshot that were named, and apply the filters.

    Parameters
    ----------
    args : Namespace
        Trace, snapshot and filters.

    Returns
    -------
    Joined
        What the filters left.

    Raises
    ------
    NsanError
        If no snapshot was named, or one of both cannot be opened.
    """
    from nsan.joined import join
    from nsan.opening import open_trace

    if getattr(args, "snapshot", None) is None:
        msg = "This needs the memory snapshot of the traced program, too: --snapshot FILE."
        raise UsageError(msg)
    joined = join(open_trace(located(args), progress=show_progress(args)), args.snapshot)
    if not is_filtered(args):
        return joined
    return joined.filter(
        time=args.filter_time, pid=args.pid, device=args.gpu, nvtx=args.filter_nvtx
    )


def run_on_join(args: argparse.Namespace, analysis: Analysis, options: Mapping[str, Any]) -> int:
    """Run an analysis of a trace joined with a memory snapshot, and write what it gives.

    Parameters
    ----------
    args : Namespace
        Trace, snapshot, filters, format and output.
    analysis : Analysis
        What to run.
    options : mapping
        Values for its options.

    Returns
    -------
    int
        Exit status.
    """
    joined = joined_sources(args)
    found = _computed(joined, analysis, options)
    write_found(args, analysis, found, joined, {**analysis.options, **options})
    return 0


def _computed(source: Source, analysis: Analysis, options: Mapping[str, Any]) -> pl.DataFrame:
    """Compute a result; what goes wrong in a user's own analysis is said without a traceback."""
    from nsan.analysing import run_analysis
    from nsan.analysis.catalog import catalog

    if analysis.name in catalog():
        return run_analysis(source, analysis, options).collect()
    try:
        return run_analysis(source, analysis, options).collect()
    except NsanError:
        raise
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else ""
        raise AnalysisError(analysis.name, f"{type(error).__name__}: {said}") from error


def write_found(
    args: argparse.Namespace,
    analysis: Analysis,
    found: pl.DataFrame,
    source: Source,
    options: Mapping[str, Any],
) -> None:
    """Write the result of an analysis in the format that was asked for.

    Parameters
    ----------
    args : Namespace
        Format and output.
    analysis : Analysis
        What was run.
    found : DataFrame
        What it gave.
    source : Trace, Snapshot or Joined
        On what.
    options : mapping
        With which options.
    """
    from nsan.analysing import kinds_of

    kinds = kinds_of(source, analysis, found)
    notes = notes_on(source, analysis, found)
    if args.format == "json":
        about = _document(analysis, source, options, kinds)
        try:
            write_pieces(args, json_pieces(about, _slices(analysis, found)))
        except (ValueError, TypeError) as error:
            raise AnalysisError(analysis.name, f"JSON cannot hold its result: {error}") from error
    elif args.format == "parquet":
        facts = {f"nsan.kind.{name}": kind for name, kind in kinds.items()}
        facts |= {"nsan.source": source.info.source, "nsan.source_kind": source.info.kind}
        shown = found.head(args.rows) if args.rows else found
        write_file(args, lambda file: shown.write_parquet(file, metadata=facts))
    elif args.format == "csv":
        import polars as pl
        from polars import selectors as cs

        shown = found.head(args.rows) if args.rows else found
        texts = shown.select(cs.string() | cs.categorical() | cs.enum()).iter_columns()
        returns = any(
            text.unique().cast(pl.String).str.contains("\r", literal=True).any() for text in texts
        )
        write_pieces(args, csv_pieces(_slices(analysis, shown), found.columns, returns=returns))
    else:
        write_result(args, _text(args, analysis, found, notes, kinds))
        return
    if not args.quiet:
        for note in notes:
            complain(note)


def _slices(analysis: Analysis, found: pl.DataFrame) -> Iterator[list[dict[str, Any]]]:
    """Give plain rows some at a time: as dicts they take a hundred times as much as in a table."""
    for some in found.iter_slices(_ROWS_AT_ONCE):
        yield plain_rows(analysis, some)


def _document(
    analysis: Analysis,
    source: Source,
    options: Mapping[str, Any],
    kinds: Mapping[str, str],
) -> dict[str, Any]:
    from nsan.contract import SCHEMA

    info = source.info.to_dict()
    about: dict[str, Any] = {"source": info["source"], "source_kind": info["kind"]}
    if analysis.subject == "trace":
        about["capture"] = {kind: each["answer"] for kind, each in info["capture"].items()}
        about["windows_ns"] = cast("Trace", source).windows
    if analysis.subject == "joined":
        about |= _of_join(cast("Joined", source))
    return {
        "schema": SCHEMA,
        **about,
        "analysis": analysis.name,
        "question": analysis.question,
        "row": analysis.result.row,
        "options": dict(options),
        "columns": [
            {"name": c.name, "unit": c.unit, "kind": kinds[c.name], "doc": c.doc}
            for c in analysis.result.columns
        ],
    }


def _of_join(joined: Joined) -> dict[str, Any]:
    return {
        "snapshot": None if joined.snapshot is None else joined.snapshot.info.source,
        "windows_ns": joined.trace.windows,
    }


def plain_rows(analysis: Analysis, found: pl.DataFrame) -> list[dict[str, Any]]:
    """Give rows as plain values; addresses as hexadecimal text, which no reader rounds."""
    return plain(found, [c.name for c in analysis.result.columns if c.unit == "byte address"])


def _text(
    args: argparse.Namespace,
    analysis: Analysis,
    found: pl.DataFrame,
    notes: Sequence[str],
    kinds: Mapping[str, str],
) -> str:
    markdown = args.format == "markdown"
    rows = found.head(args.rows or _MOST_ROWS).to_dicts()
    columns = list(analysis.result.columns)
    zero = [] if args.verbose else zero_columns(columns, found)
    if not args.verbose:
        columns = [column for column in telling(columns, found) if column not in zero]
    fields = fields_of(columns)
    hidden = [] if markdown or args.verbose else too_wide(rows, fields, args.output)
    shown = [field for field in fields if field not in hidden]
    head = f"{'## ' * markdown}{analysis.question}"
    parts = [head]
    if rows:
        parts.append(table(rows, shown, markdown=markdown))
    more = []
    if found.height > len(rows):
        more.append(f"{found.height - len(rows)} more rows (--rows N)")
    if hidden:
        more.append(f"{len(hidden)} more columns (-v): {few(f.header for f in hidden)}")
    if zero:
        more.append(f"0 in every row: {few(map(header_of, zero))}")
    if more:
        parts.append(f"({'; '.join(more)})")
    if rows:
        kept = {field.key for field in shown}
        parts.append(kinds_in_words((column for column in columns if column.name in kept), kinds))
    return "\n\n".join([*parts, *notes]) + "\n"
