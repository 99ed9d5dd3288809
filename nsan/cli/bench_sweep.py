"""Run a program of the microbenchmark under every oversubscription factor, allocator and hint.

Each run leaves a folder of its own, as `nsan bench run` makes it; sweep.json says what became of each,
sweep.csv what it cost. Runs that are there already are kept, so that an interrupted sweep goes on where
it was. A run that fails, or whose flags do not fit, is marked, and the sweep goes on; a missing driver or
a flag that the program does not have ends it at once. Exit status 0 says that every run ended well.

A factor is managed memory over GPU memory; of a network it is the peak of its live tensors, so that both
allocators get the same memory. Near 1 and above the programs want --allow-oversubscription behind --, and say why.

Examples
--------
  nsan bench sweep uvm_bench -o sweep --patterns stream,random --factors 0.5,0.8 -- --bytes 1GiB
  nsan bench sweep dl_bench --network resnet-50 --batch 64 -o resnet --allocators raw,caching --factors 0.75
  nsan pca resnet
  nsan bench sweep torch_uvm -o torch --allocators raw,caching --prefetches none,ahead
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.cli.arguments import add_verbosity, show_progress
from nsan.cli.bench_arguments import add_program, work_of
from nsan.cli.bench_run import wall_time
from nsan.cli.model_arguments import count
from nsan.cli.terminal import complain, emit
from nsan.errors import UnknownNameError, UsageError
from nsan.tabular.notes import few
from nsan.tabular.text import Field, dash, json_text, table
from nsan.text import safe
from nsan.units import format_bytes, format_count

if TYPE_CHECKING:
    from nsan.microbench.sweeping import Case, Tell

_FREE: Final = "free"
_ALWAYS: Final = frozenset({"allocator", "factor", "hint", "status"})


def _figure(write: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else write(value)


_FIELDS: Final = (
    Field("pattern", "Pattern", dash, right=False),
    Field("allocator", "Allocator", dash, right=False),
    Field("factor", "Factor", lambda value: _FREE if value is None else f"{value:g}"),
    Field("hint", "Hint", dash, right=False),
    Field("repeat", "Run", dash),
    Field("status", "Status", safe, right=False),
    Field("seconds_alone", "Alone", _figure(wall_time)),
    Field("n_batches", "Batches", _figure(format_count)),
    Field("in_coherence_bytes", "In by faults", _figure(format_bytes)),
    Field("in_prefetch_bytes", "Prefetched", _figure(format_bytes)),
    Field("in_user_bytes", "By user", _figure(format_bytes)),
    Field("evicted_bytes", "Evicted", _figure(format_bytes)),
    Field("certain", "Certain", dash),
    Field("managed_bytes", "Managed", _figure(format_bytes)),
    Field("available_bytes", "GPU memory", _figure(format_bytes)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this action."""
    parser.usage = "nsan bench sweep [options] PROGRAM -o FOLDER [-- FLAG ...]"
    add_program(parser)
    group = parser.add_argument_group("conditions, separated by commas")
    group.add_argument(
        "--factors",
        type=_factors,
        default=_FREE,
        metavar="F,F,...",
        help="oversubscription factors; free (the default): no ballast, as much as the GPU has free",
    )
    group.add_argument(
        "--allocators", type=_words, default="raw", metavar="A,A", help="default raw"
    )
    group.add_argument(
        "--prefetches", type=_words, default="none", metavar="P,P,...", help="default none"
    )
    group.add_argument(
        "--advices", type=_words, default="none", metavar="A,A,...", help="default none"
    )
    group.add_argument(
        "--patterns", type=_words, default="", metavar="P,P,...", help="of uvm_bench"
    )
    group.add_argument(
        "--repeat", type=count, default=1, metavar="N", help="run the whole sweep N times"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", required=True, help="where the runs go"
    )
    parser.add_argument("--no-nsys", action="store_true", help="only alone: times, no traces")
    parser.add_argument(
        "--keep-failed", action="store_true", help="do not try again what did not end well"
    )
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    add_verbosity(parser)


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _factors(text: str) -> list[float | None]:
    found: list[float | None] = []
    for word in _words(text):
        try:
            factor = None if word == _FREE else float(word)
        except ValueError:
            factor = 0
        if factor is not None and not 0 < factor < float("inf"):
            msg = f"{word!r} is no factor: write 0.5,0.9 or {_FREE}"
            raise argparse.ArgumentTypeError(msg)
        found.append(factor)
    return found


def run(args: argparse.Namespace) -> int:
    """Run the sweep."""
    from nsan.microbench.sweeping import How, all_well, check_flags, sweep

    wanted = _cases(args)
    check_flags(args.flags, patterns=bool(args.patterns))
    work = work_of(args)
    with _told(args, wanted) as tell:
        rows = sweep(
            work, wanted, args.output, how=How(not args.no_nsys, args.keep_failed), tell=tell
        )
    document = {"schema": 1, "program": args.program, "network": args.network, "rows": rows}
    emit(json_text(document) if args.json else _text(rows))
    return 0 if all_well(rows) else 1


def _cases(args: argparse.Namespace) -> list[Case]:
    from nsan.microbench.catalog import ADVICES, ALLOCATORS, PATTERNS, PREFETCHES
    from nsan.microbench.sweeping import cases
    from nsan.microbench.work import USES_TORCH

    if args.patterns and args.program != "uvm_bench":
        raise UsageError(f"--patterns means nothing to {args.program}: leave it out.")
    if args.program == USES_TORCH and "whole" in args.prefetches:
        msg = "torch_uvm has no --prefetch whole: --prefetches none,ahead."
        raise UsageError(msg)
    for what, known, asked in (
        ("pattern", PATTERNS, args.patterns),
        ("allocator", ALLOCATORS, args.allocators),
        ("prefetch", PREFETCHES, args.prefetches),
        ("advice", ADVICES, args.advices),
    ):
        for name in asked:
            if name not in known:
                raise UnknownNameError(what, name, known)
    return cases(
        factors=args.factors,
        allocators=args.allocators,
        hints=list(product(args.prefetches, args.advices)),
        patterns=args.patterns or [None],
        repeats=args.repeat,
    )


def _text(rows: list[dict[str, Any]]) -> str:
    shown = [{**row, "certain": _certain(row)} for row in rows]
    fields = [field for field in _FIELDS if _is_told(field.key, shown)]
    parts = [table(shown, fields)]
    wrong: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            wrong.setdefault(safe(row["reason"] or row["status"]), []).append(row["folder"])
    if wrong:
        parts.append("\n".join(f"{few(names)}: {reason}" for reason, names in wrong.items()))
    return "\n\n".join(parts) + "\n"


def _is_told(key: str, rows: list[dict[str, Any]]) -> bool:
    """Say whether a column says anything: most runs have no pattern, and those without nsys no traffic."""
    return key in _ALWAYS or any(row.get(key) is not None for row in rows)


def _certain(row: Mapping[str, Any]) -> str | None:
    """Say of how many certain bytes the trace shows what the program says."""
    if not row.get("n_expected"):
        return None
    return f"{row['n_expected_right']} of {row['n_expected']}"


@contextmanager
def _told(args: argparse.Namespace, wanted: list[Case]) -> Iterator[Tell]:
    """Show runs on a bar on stderr; without a terminal a line for each."""
    if not show_progress(args):

        def line(name: str, what: str) -> None:
            if not args.quiet:
                complain(f"{name}{': there already' * (what == 'kept')}")

        yield line
        return
    from tqdm.auto import tqdm

    with tqdm(total=len(wanted), unit=" runs", desc=f"sweep {args.program}", leave=False) as bar:
        begun: list[str] = []

        def tell(name: str, what: str) -> None:
            bar.update(bool(begun))
            begun.append(name)
            bar.set_postfix_str(name + " (there already)" * (what == "kept"))

        yield tell
