"""Train a network on the driver model under every oversubscription factor, allocator and hint.

The factor is the peak of the live tensors over GPU memory, so that both allocators get the same
memory. Each run leaves its trace, truth and memory snapshot in a folder of its own; runs that are there
already are kept, so that an interrupted sweep goes on where it was.

Examples
--------
  nsan model sweep gpt2-small --factors 0.9,1.25,1.5,2 --hints none,prefetch -o gpt2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.cli.arguments import add_verbosity, show_progress
from nsan.cli.model_arguments import add_driver, add_training, count, driver_settings, training
from nsan.cli.terminal import complain, emit
from nsan.tabular.text import Field, dash, json_text, table
from nsan.units import format_bytes, format_count, format_time

if TYPE_CHECKING:
    from nsan.model.sweep import Case

_FIELDS: Final = (
    Field("allocator", "Allocator", dash, right=False),
    Field("factor", "Factor", lambda value: f"{value:g}"),
    Field("hint", "Hint", dash, right=False),
    Field("last_step_ns", "Last step", format_time),
    Field("n_batches", "Batches", format_count),
    Field("in_coherence_bytes", "In by faults", format_bytes),
    Field("in_prefetch_bytes", "Prefetched", format_bytes),
    Field("in_user_bytes", "By user", format_bytes),
    Field("evicted_bytes", "Evicted", format_bytes),
    Field("n_refaults", "Refaults", format_count),
    Field("peak_managed_bytes", "Managed", format_bytes),
    Field("capacity_bytes", "GPU memory", format_bytes),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this action."""
    parser.add_argument("network", metavar="NETWORK", help="a name that `nsan model list` shows")
    group = parser.add_argument_group("conditions, separated by commas")
    group.add_argument(
        "--factors",
        type=_factors,
        default="0.9,1.1,1.25,1.5,2,3",
        metavar="F,F,...",
        help="oversubscription factors, default 0.9,1.1,1.25,1.5,2,3",
    )
    group.add_argument(
        "--allocators",
        type=_words,
        default="raw,caching",
        metavar="A,A",
        help="default raw,caching; caching:release+drop takes mechanisms away: `nsan model list`",
    )
    group.add_argument(
        "--hints",
        type=_words,
        default="none",
        metavar="H,H,...",
        help="default none; kinds and roles: `nsan model list`",
    )
    group.add_argument("--steps", type=count, metavar="N", help="training steps, default 2")
    add_training(parser)
    add_driver(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", required=True, help="where the runs go"
    )
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    add_verbosity(parser)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _factors(text: str) -> list[float]:
    try:
        return [float(word) for word in _words(text)]
    except ValueError:
        msg = f"{text!r} is no list of numbers: write 0.9,1.25,2"
        raise argparse.ArgumentTypeError(msg) from None


def run(args: argparse.Namespace) -> int:
    """Run the sweep."""
    from nsan.model.hints import parse_hint
    from nsan.model.sweep import cases, sweep
    from nsan.model.workloads import network

    chosen = network(args.network)
    for hint in args.hints:
        parse_hint(hint)
    wanted = cases(args.factors, args.allocators, args.hints)
    sizes = training(args, "caching", (), args.steps)
    with _told(args, wanted) as tell:
        rows = sweep(
            chosen, sizes, driver_settings(args), wanted, args.output, tell=tell
        ).to_dicts()
    emit(
        json_text({"schema": 1, "network": args.network, "kind": "modelled", "rows": rows})
        if args.json
        else _text(rows)
    )
    return 0


def _text(rows: list[dict[str, Any]]) -> str:
    note = "Every figure is the model's. Factor: peak of the live tensors over GPU memory."
    return f"{table(rows, _FIELDS)}\n\n{note}\n"


@contextmanager
def _told(args: argparse.Namespace, wanted: list[Case]) -> Iterator[Callable[[str, bool], None]]:
    """Show runs on a bar on stderr; without a terminal a line for each."""
    if not show_progress(args):

        def line(name: str, there: bool) -> None:  # noqa: FBT001 (as `Tell` says)
            if not args.quiet:
                complain(f"{name}{': there already' * there}")

        yield line
        return
    from tqdm.auto import tqdm

    with tqdm(total=len(wanted), unit=" runs", desc=f"sweep {args.network}", leave=False) as bar:
        begun: list[str] = []

        def tell(name: str, there: bool) -> None:  # noqa: FBT001 (as `Tell` says)
            bar.update(bool(begun))
            begun.append(name)
            bar.set_postfix_str(name + " (there already)" * there)

        yield tell
