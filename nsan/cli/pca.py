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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.cli.arguments import add_output, add_verbosity, show_progress
from nsan.cli.output import write_document, write_table
from nsan.cli.pca_text import text_of
from nsan.cli.terminal import complain
from nsan.errors import OutputIsInputError, UsageError

if TYPE_CHECKING:
    import polars as pl

    from nsan.analysis.result import Result
    from nsan.pca_found import Found
    from nsan.pca_pairs import Pair
    from nsan.pca_runs import Run

_CONDITION: Final = ("network", "factor", "hint", "allocator")
_TREND: Final = 0.1
"""By more than this share a first warm step differs from the later ones."""

_RATIO: Final = ("off", "on", "ratio", "ratio_low", "ratio_high")
_PARTS: Final = ("difference", "reuse", "dead", "packing", "remainder")
COLUMNS: Final = (
    *_CONDITION,
    "figure",
    "unit",
    *_RATIO,
    *(f"{part}{end}" for part in _PARTS for end in ("", "_error")),
)
"""Columns of CSV and Parquet: one row per pair and figure."""


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
    from nsan.pca_pairs import left_out, pairs_of

    runs, off, on = _found(args)
    pairs = pairs_of(runs, off, on)
    _protect_inputs(args)
    with _told(args, pairs) as tell:
        document = _document(args, pairs, tell)
    if alone := left_out(runs, pairs):
        names = ", ".join(each.name for each in alone[:8]) + ", ..." * (len(alone) > 8)
        document["notes"].append(f"In no pair, and left out: {names}.")
    if args.format in {"csv", "parquet"}:
        notes = _all_notes(document)
        write_table(
            args, table_rows(document), fields=(), columns=COLUMNS, document=document, notes=notes
        )
    else:
        markdown = args.format == "markdown"
        write_document(
            args, document, lambda: text_of(document, markdown=markdown, verbose=args.verbose)
        )
    if args.format == "json" and not args.quiet:
        for note in _all_notes(document):
            complain(note)
    return 0


def _found(args: argparse.Namespace) -> tuple[list[Found], list[Found], list[Found]]:
    """Find the runs that were named."""
    from nsan.pca_found import find_runs, named_run

    if not (args.runs or args.off or args.on):
        msg = "Name runs to compare: a folder of `nsan model sweep`, or traces with --off and --on."
        raise UsageError(msg)
    of_on = args.snapshot if len(args.on) == 1 else None
    of_run = args.snapshot if not args.on and len(args.runs) == 1 else None
    if args.snapshot is not None and of_on is None and of_run is None:
        msg = "--snapshot FILE is of one run: give one --on TRACE, or put snapshots beside the traces."
        raise UsageError(msg)
    runs = [found for path in args.runs for found in find_runs(path, of_run)]
    off = [named_run(path, "off") for path in args.off]
    return runs, off, [named_run(path, "on", of_on) for path in args.on]


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


def _document(
    args: argparse.Namespace, pairs: Sequence[Pair], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Open the runs and compare them."""
    from nsan.analysis.pca.decomposition import DECOMPOSITION
    from nsan.analysis.pca.ratios import RATIOS
    from nsan.contract import SCHEMA
    from nsan.pca_runs import open_pairs

    document: dict[str, Any] = {
        "schema": SCHEMA,
        "question": "What does the caching allocator change, and by which mechanism?",
        "step": args.step,
        "warmup": args.warmup,
        "kinds": {},
        "columns": {"ratios": _described(RATIOS), "decomposition": _described(DECOMPOSITION)},
        "runs": [],
        "pairs": [],
        "switches": [],
        "notes": [],
    }
    sides: list[tuple[Pair, pl.DataFrame, pl.DataFrame]] = []
    shown: dict[str, Run] = {}
    opening = open_pairs(pairs, step=args.step, tell=tell, progress=show_progress(args))
    for pair, off, on in opening:
        shown |= {str(each.found.trace): each for each in (*off, *on)}
        steps = (_warm(off, args.warmup), _warm(on, args.warmup))
        sides.append((pair, *steps))
        document["pairs"].append(_compared(pair, (off, on), steps, args.warmup))
    document["runs"] = [_of_run(each, args.warmup) for each in shown.values()]
    document["switches"] = _switched(sides)
    kinds = {each["kind"] for each in document["pairs"]}
    document["kinds"] = {"pairs": "modelled" if kinds == {"modelled"} else "derived"}
    return document


def _compared(
    pair: Pair,
    runs: tuple[Sequence[Run], Sequence[Run]],
    steps: tuple[pl.DataFrame, pl.DataFrame],
    warmup: int,
) -> dict[str, Any]:
    """Compare the warm steps of a pair."""
    from nsan.analysis.pca.decomposition import decomposition
    from nsan.analysis.pca.ratios import ratio_of, ratios
    from nsan.pca_pairs import told_apart

    off, on = runs
    names = told_apart(*pair.off, *pair.on)
    trends = [note for each in (*off, *on) if (note := _trend(each, warmup))]
    return {
        **_condition(pair),
        "off": names[: len(off)],
        "on": names[len(off) :],
        "kind": _kind((*off, *on)),
        "ratios": ratios(*steps).to_dicts(),
        "traffic": ratio_of(*steps, ("in_bytes", "out_bytes")),
        "decomposition": decomposition(*steps).to_dicts(),
        "notes": [*pair.notes, *_doubts(off, on), *trends],
    }


def _trend(run: Run, warmup: int) -> str:
    """Say that a run has not settled: its first warm step differs from the later ones."""
    from nsan.analysis.pca.ratios import FIGURES, warm_steps
    from nsan.units import format_count, format_time

    steps = warm_steps(run.ledger, warmup=warmup)
    said = []
    for figure, write in (("step_ns", format_time), ("fault_rows", format_count)):
        first, *later = steps[FIGURES[figure].column].to_list()
        if not later or None in (first, *later):
            continue
        mean = sum(later) / len(later)
        if abs(first - mean) > _TREND * mean:
            what = {"step_ns": "takes", "fault_rows": "makes"}[figure]
            unit = " fault rows" * (figure == "fault_rows")
            said.append(f"{what} {write(first)} and the later ones {write(round(mean))}{unit}")
    if not said:
        return ""
    least = warmup + 1
    more = "" if run.n_steps > least + 1 else ", of a run of more steps"
    return (
        f"{run.found.name} has not settled: its first warm step {', and it '.join(said)} (mean). Leave it out "
        f"with --warmup {least}{more}."
    )


def _described(result: Result) -> list[dict[str, Any]]:
    return [{"name": c.name, "unit": c.unit, "kind": c.kind, "doc": c.doc} for c in result.columns]


def _condition(pair: Pair) -> dict[str, Any]:
    condition = pair.condition
    return {key: getattr(condition, key) for key in _CONDITION}


def _kind(runs: Sequence[Run]) -> str:
    """Say of which kind figures of these runs are."""
    from nsan.pca_runs import is_modelled

    return "modelled" if all(map(is_modelled, runs)) else "derived"


def _warm(runs: Sequence[Run], warmup: int) -> pl.DataFrame:
    """Put the warm steps of repetitions under each other."""
    import polars as pl

    from nsan.analysis.pca.ratios import warm_steps

    for each in runs:
        if each.n_steps <= warmup:
            msg = (
                f"{each.found.name} has {each.n_steps} step{'s' * (each.n_steps != 1)}, and --warmup "
                f"{warmup} leaves none: give a smaller one, or record more steps."
            )
            raise UsageError(msg)
    return pl.concat([warm_steps(each.ledger, warmup=warmup) for each in runs])


def _of_run(run: Run, warmup: int) -> dict[str, Any]:
    found = run.found
    return {
        "name": found.name,
        "source": run.trace.info.source,
        "source_kind": run.trace.info.kind,
        "snapshot": None if found.snapshot is None else found.snapshot.name,
        **{key: getattr(found.condition, key) for key in (*_CONDITION, "side")},
        "n_steps": run.n_steps,
        "n_warm_steps": max(run.n_steps - warmup, 0),
    }


def _doubts(off: Sequence[Run], on: Sequence[Run]) -> Iterator[str]:
    """Say what of a pair cannot be told, and what makes it doubtful."""
    from nsan.pca_runs import gives_advice, is_modelled

    for each in on:
        if each.found.snapshot is None and each.found.condition.allocator != "raw":
            yield (
                f"{each.found.name} has no memory snapshot: what is reuse, dead traffic or packing is "
                "unknown, and in the remainder."
            )
    if any(map(gives_advice, (*off, *on))):
        yield (
            "The runs give memory advice (cudaMemAdvise): rows that only map memory where it lies look like "
            "first touches, and count as such."
        )
    if len({is_modelled(each) for each in (*off, *on)}) > 1:
        yield "Some of the runs are modelled and others are recorded."
    counts = {each.n_steps for each in (*off, *on)}
    if len(counts) > 1:
        yield f"The runs have different numbers of steps: {', '.join(map(str, sorted(counts)))}."
    for what in ("driver_version", "cpu", "export_schema"):
        found = {getattr(each.trace.info, what) for each in (*off, *on)} - {None}
        if len(found) > 1:
            yield f"The runs differ in {what.replace('_', ' ')}: {' and '.join(sorted(found))}."
    gpus = {tuple(each.trace.devices.collect()["name"].to_list()) for each in (*off, *on)}
    if len(gpus) > 1:
        yield f"The runs differ in their GPUs: {' and '.join(str(list(g)) for g in sorted(gpus, key=str))}."


def _switched(
    sides: Sequence[tuple[Pair, pl.DataFrame, pl.DataFrame]],
) -> list[dict[str, Any]]:
    """Split the differences by the switches of the model, condition by condition."""
    from nsan.analysis.pca.switches import SWITCHES, at_work, causal_parts

    groups: dict[str, list[tuple[Pair, pl.DataFrame, pl.DataFrame]]] = {}
    for side in sides:
        condition = side[0].condition
        known = condition.allocator != "raw" and condition.switches <= SWITCHES.keys()
        if condition.is_modelled and known:
            groups.setdefault(condition.key, []).append(side)
    found = []
    for group in groups.values():
        runs = {at_work(pair.condition.switches): on for pair, _, on in group}
        rows = causal_parts(runs, group[0][1]).to_dicts()
        if rows:
            common = _condition(group[0][0])
            common.pop("allocator")
            managed = {pair.condition.allocator: pair.condition.managed_bytes for pair, *_ in group}
            found.append({**common, "n_runs": len(runs), "managed_bytes": managed, "parts": rows})
    return found


def _all_notes(document: Mapping[str, Any]) -> list[str]:
    """List every note once."""
    notes = [note for pair in document["pairs"] for note in pair["notes"]]
    return list(dict.fromkeys([*notes, *document["notes"]]))


def table_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make one row per pair and figure of all that is known of it: what CSV and Parquet hold.

    Parameters
    ----------
    document : mapping
        What JSON holds.

    Returns
    -------
    list of dict
        Rows with ``COLUMNS``.
    """
    rows = []
    for pair in document["pairs"]:
        parts = {(row["figure"], row["part"]): row for row in pair["decomposition"]}
        for ratio in pair["ratios"]:
            row = {key: pair[key] for key in _CONDITION}
            row |= {key: ratio[key] for key in ("figure", "unit", *_RATIO)}
            for part in _PARTS:
                known = parts.get((ratio["figure"], part), {})
                row |= {part: known.get("value"), f"{part}_error": known.get("error")}
            rows.append(row)
    return rows


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
