"""Compare runs without and with PyTorch's caching allocator (PCA), and say why they differ.

A RUN is a folder of `nsan model run` or `nsan bench run`, a folder of a sweep of theirs (all runs in
it), or a trace with the memory snapshot that torch.cuda.memory._dump_snapshot(FILE) wrote in the same
run: snapshot.pickle or TRACE's name with .pickle beside it is taken by itself. Runs of `nsan model` and
`nsan bench` say themselves how they allocate; of other traces --off and --on name it. The difference is
split by what the allocator does to the driver: reuse of memory that is mapped already, dead traffic of
memory that no tensor holds, and packing of tensors into one VA block. A part is an account of the rows,
bytes and time that carry the mark of a mechanism; what it causes elsewhere is in the remainder, and only
runs of the model with a mechanism switched off (`nsan model sweep --allocators`) tell that.

Examples
--------
  nsan pca sweep                                         every pair of a modelled sweep
  nsan pca --off raw.sqlite --on caching.sqlite --snapshot snapshot.pickle
  nsan pca --off a.sqlite --off b.sqlite --on c.sqlite --on d.sqlite --json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nsan.cli.arguments import (
    add_memory,
    add_output,
    add_verbosity,
    from_zero,
    refuse_inputs,
    show_progress,
    told_runs,
)
from nsan.cli.output import write_document, write_table
from nsan.cli.terminal import complain
from nsan.pca_document import COLUMNS, all_notes, find_pairs, pca_document, table_rows
from nsan.pca_text import text_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("runs", metavar="RUN", nargs="*", type=Path, help="see above")
    add_verbosity(parser)
    add_memory(parser)
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
        type=from_zero,
        default=1,
        metavar="N",
        help="steps to leave out at the start, default 1",
    )
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    pairs, alone = find_pairs(args.runs, off=args.off, on=args.on, snapshot=args.snapshot)
    inputs = [*args.runs, *args.off, *args.on, *filter(None, [args.snapshot])]
    refuse_inputs(args, inputs, args.output)
    n_runs = len({run.trace for pair in pairs for run in (*pair.off, *pair.on)})
    with told_runs(args, "ledgers", n_runs) as tell:
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
