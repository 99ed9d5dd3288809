"""Compare runs without and with PyTorch's caching allocator (PCA), and say why they differ.

A RUN is a folder of `nsan model run`, a folder of `nsan model sweep` (all runs in it), or a trace with
the memory snapshot that torch.cuda.memory._dump_snapshot(FILE) wrote in the same run: snapshot.pickle or
TRACE's name with .pickle beside it is taken by itself. Modelled runs say themselves how they allocate;
of other traces --off and --on name it. The difference is split by what the allocator does to the driver:
reuse of memory that is mapped already, dead traffic of memory that no tensor holds, and packing of
tensors into one VA block. A part is an account of the rows, bytes and time that carry the mark of a
mechanism; what it causes elsewhere is in the remainder, and only runs of the model with a mechanism
switched off (`nsan model sweep --allocators`) tell that.

Examples
--------
  nsan pca sweep                                         every pair of a modelled sweep
  nsan pca --off raw.sqlite --on caching.sqlite --snapshot snapshot.pickle
  nsan pca --off a.sqlite --off b.sqlite --on c.sqlite --on d.sqlite --json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nsan.cli.arguments import add_output, add_verbosity, show_progress
from nsan.cli.output import write_document, write_table
from nsan.cli.terminal import complain
from nsan.errors import OutputIsInputError
from nsan.pca_document import COLUMNS, all_notes, find_pairs, pca_document, table_rows
from nsan.pca_text import text_of

if TYPE_CHECKING:
    from nsan.pca_pairs import Pair


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("runs", metavar="RUN", nargs="*", type=Path, help="see above")
    add_verbosity(parser)
    group = parser.add_argument_group("runs that do not say how they allocate")
    for side, what in (("off", "without"), ("on", "with")):
        group.add_argument(
            f"--{side}",
            action="append",
            default=[],
            type=Path,
            metavar="TRACE",
            help=f"a run {what} the caching allocator; more of them are repetitions",
        )
    group.add_argument(
        "--snapshot", type=Path, metavar="FILE", help="memory snapshot of the run with it"
    )
    steps = parser.add_argument_group("steps")
    steps.add_argument(
        "--step", default="step", metavar="NAME", help="NVTX range of a step, default step"
    )
    steps.add_argument(
        "--warmup",
        type=_from_zero,
        default=1,
        metavar="N",
        help="steps to leave out at the start, default 1",
    )
    add_output(parser)


def _from_zero(text: str) -> int:
    if not text.isdecimal():
        msg = f"{text!r} is no number of steps, 0 or more"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    pairs, alone = find_pairs(args.runs, off=args.off, on=args.on, snapshot=args.snapshot)
    _protect_inputs(args)
    with _told(args, pairs) as tell:
        document = pca_document(
            pairs,
            alone,
            step=args.step,
            warmup=args.warmup,
            tell=tell,
            progress=show_progress(args),
        )
    if args.format in {"csv", "parquet"}:
        notes = all_notes(document)
        write_table(
            args, table_rows(document), fields=(), columns=COLUMNS, document=document, notes=notes
        )
    else:
        markdown = args.format == "markdown"
        write_document(
            args, document, lambda: text_of(document, markdown=markdown, verbose=args.verbose)
        )
    if args.format == "json" and not args.quiet:
        for note in all_notes(document):
            complain(note)
    return 0


def _protect_inputs(args: argparse.Namespace) -> None:
    """Refuse to write over what is read."""
    inputs = [*args.runs, *args.off, *args.on, *filter(None, [args.snapshot])]
    args.trace = inputs[0]
    if args.output is None:
        return
    real = args.output.resolve()
    for each in map(Path.resolve, inputs):
        if real == each or each in real.parents:
            raise OutputIsInputError(args.output)


@contextmanager
def _told(args: argparse.Namespace, pairs: Sequence[Pair]) -> Iterator[Callable[[str], None]]:
    """Show the runs on a bar on stderr, where it is a terminal."""
    if not show_progress(args):
        yield lambda _: None
        return
    from tqdm.auto import tqdm

    runs = {run.trace for pair in pairs for run in (*pair.off, *pair.on)}
    with tqdm(total=len(runs), unit=" runs", desc="ledgers", leave=False) as bar:

        def tell(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        yield tell
