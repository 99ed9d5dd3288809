"""Turn a capture into a Parquet store that opens at once, or many reports into one corpus.

Every command makes stores by itself, in a cache; import places one where you want it. The export is never
changed. A store is used again while its source is unchanged.

Folders with several reports (ranks, nodes, nights), or several paths, become a corpus at -o: Parquet by
run and rank, on a local path or any URL that fsspec knows. Run and rank are taken from names and from what
the reports hold; --list shows them, and imports nothing. Give the same command again to go on where an
import was cut short, and to add what is new. A report that fails is named, and the others are imported.

Examples
--------
  nsan import run.nsys-rep -o run.nsan              a store of one capture
  nsan import nights --list                         what would be taken for which run and rank
  nsan import nights -o fleet --workers 8           a corpus, read by eight processes
  nsan import nights -o s3://bucket/fleet --dask tcp://head:8786
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nsan.cli.arguments import add_memory, add_verbosity, located, show_progress
from nsan.cli.fleet_arguments import add_fleet, how
from nsan.cli.terminal import complain, emit
from nsan.errors import UsageError
from nsan.units import counted, format_bytes, format_count

if TYPE_CHECKING:
    from nsan.fleet.finding import Found
    from nsan.fleet.importing import Imported

_MOST_NAMES = 20
"""Lines of one kind on stderr; `-v` has all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "traces",
        metavar="TRACE",
        nargs="+",
        type=Path,
        help="report, export or nvprof file; or folders of reports",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="PLACE",
        help="folder of the store, a cache by default; folder or URL of the corpus",
    )
    parser.add_argument(
        "--force-overwrite",
        action="store_true",
        help="replace a store of another source, or make it again",
    )
    parser.add_argument(
        "--keep-paths",
        action="store_true",
        help="keep whole paths of programs and source files; they may name people and machines",
    )
    add_verbosity(parser)
    add_memory(parser)
    add_fleet(parser)
    group = parser.add_argument_group("corpus")
    group.add_argument(
        "--list",
        action="store_true",
        help="show the run and the rank of each report, and where they are from; import nothing",
    )
    group.add_argument(
        "--prune",
        action="store_true",
        help="remove reports from the corpus that the folders do not have any more, and files that "
        "belong to none; not while another import runs",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.list:
        return _list(args)
    if _is_fleet(args):
        return _import_fleet(args)
    if args.prune:
        msg = "--prune is for a corpus of many reports."
        raise UsageError(msg)
    return _import_one(args)


def _is_fleet(args: argparse.Namespace) -> bool:
    """Say whether a corpus is meant: by what is given, by its place, or by an option."""
    from nsan.fleet.finding import is_fleet
    from nsan.io.corpus_place import is_corpus, url_of

    asked = (args.workers, args.dask, args.rank_pattern)
    if any(value is not None for value in asked) or is_fleet(args.traces):
        return True
    return args.output is not None and (url_of(args.output) is not None or is_corpus(args.output))


def _import_one(args: argparse.Namespace) -> int:
    from nsan.io.manifest import read_manifest
    from nsan.opening import import_trace

    args.trace = args.traces[0]
    folder = import_trace(
        located(args),
        args.output,
        overwrite=args.force_overwrite,
        keep_paths=args.keep_paths,
        progress=show_progress(args),
    )
    if not args.quiet:
        tables = read_manifest(folder)["tables"]
        n_rows = sum(table["n_rows"] for table in tables.values())
        size = sum(part["bytes"] for table in tables.values() for part in table["parts"])
        complain(f"{format_count(n_rows)} rows, {format_bytes(size)}")
    emit(f"{folder}\n")
    return 0


def _import_fleet(args: argparse.Namespace) -> int:
    from nsan.fleet.finding import reports_in
    from nsan.fleet.importing import Options, import_fleet

    asked = how(args)
    _refuse_memory(args)
    if args.output is None:
        n = len(reports_in(args.traces, args.rank_pattern))
        msg = (
            f"{counted(n, 'report was', 'reports were')} found. Give the corpus a place with -o FOLDER, or name "
            "one report to make its store. --list shows what was found."
        )
        raise UsageError(msg)
    with _told(args) as tell:
        done = import_fleet(
            args.traces,
            args.output,
            how=asked,
            options=Options(args.force_overwrite, args.keep_paths, args.prune),
            tell=tell,
        )
    _say(args, done)
    emit(f"{done.place}\n")
    return 1 if done.failures else 0


def _refuse_memory(args: argparse.Namespace) -> None:
    """Refuse a place that ends with this process."""
    from nsan.io.corpus_place import url_of

    url = url_of(args.output) if args.output is not None else None
    if url is not None and url.split(":", maxsplit=1)[0] == "memory":
        msg = (
            f"{url} is in the memory of this process, and gone when the command ends. Give a folder, or a URL "
            "of a store that stays. In Python: nsan.import_fleet."
        )
        raise UsageError(msg)


@contextlib.contextmanager
def _told(args: argparse.Namespace) -> Iterator[Callable[[str, str | None, int], None] | None]:
    """Show reports on a bar where stderr is a terminal, and name those that fail at once."""
    if not show_progress(args):
        yield None
        return
    from tqdm.auto import tqdm

    from nsan.text import shortened

    with tqdm(unit=" reports", desc="import", leave=False) as bar:

        def tell(name: str, reason: str | None, total: int) -> None:
            bar.total = total
            if reason is not None:
                bar.write(f"nsan: failed: {shortened(name)}", file=bar.fp)
            bar.set_postfix_str(shortened(name, 40), refresh=False)
            bar.update()

        yield tell


def _say(args: argparse.Namespace, done: Imported) -> None:
    for failure in done.failures:
        complain(f"{failure.source} is not in the corpus: {failure.reason}")
    if args.quiet:
        return
    _names(args, "the pattern is not found in", done.unmatched)
    _names(args, "several reports of", done.alike)
    _names(args, "the same file:", done.twice)
    _names(args, "kept, though no longer in the folders (--prune removes them):", done.gone)
    _names(args, "removed:", done.removed)
    made = f"{counted(done.n_made, 'report')} imported"
    size = (
        f" ({format_count(done.n_rows)} rows, {format_bytes(done.n_bytes)})" if done.n_made else ""
    )
    kept = f", {format_count(done.n_kept)} kept as they are" if done.n_kept else ""
    failed = f", {format_count(len(done.failures))} failed" if done.failures else ""
    complain(f"{made}{size}{kept}{failed}")


def _names(args: argparse.Namespace, what: str, names: list[str]) -> None:
    shown = names if args.verbose else names[:_MOST_NAMES]
    for name in shown:
        complain(f"{what} {name}")
    if len(names) > len(shown):
        complain(f"{what} {format_count(len(names) - len(shown))} more; -v names all")


def _list(args: argparse.Namespace) -> int:
    from nsan.fleet.finding import search
    from nsan.fleet.gathering import no_reports
    from nsan.fleet.known_ranks import known_rank
    from nsan.tabular.text import Field, dash, table, word

    how(args)
    there = search(args.traces, args.rank_pattern)
    found = there.found
    if not found and not there.unreadable:
        raise no_reports(args.traces)
    rows = []
    for each in found:
        rank, is_known = known_rank(each.path)
        rows.append(_row(each, rank, is_known=is_known))
    fields = [
        Field("run", "Run", word, right=False),
        Field("rank", "Rank", dash),
        Field("by", "Rank from", word, right=False),
        Field("source", "Report", word, right=False),
    ]
    emit(table(rows, fields) + "\n")
    for failure in (each.failure for each in there.unreadable):
        complain(f"{failure.source} is not looked through: {failure.reason}")
    if not args.quiet and any(not row["is_known"] for row in rows):
        complain("whether a report itself holds its rank is known once nsys has exported it.")
    return 1 if there.unreadable else 0


def _row(found: Found, recorded: int | None, *, is_known: bool) -> dict[str, object]:
    """Say what a report is taken for, and what contradicts that."""
    named = found.named.settled(recorded)
    by = named.by
    if recorded is not None and found.named.rank not in {None, recorded}:
        other = recorded if named.rank != recorded else found.named.rank
        by += f" ({'recorded' if named.rank != recorded else 'its name says'}: {other})"
    return {
        "run": named.run,
        "rank": named.rank,
        "by": by,
        "source": found.source,
        "is_known": is_known,
    }
