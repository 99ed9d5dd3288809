"""Options that the actions of `nsan model` share, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nsan.cli.terminal import complain

if TYPE_CHECKING:
    from nsan.model.settings import Settings
    from nsan.model.workloads.training import TrainingRun


def count(text: str) -> int:
    """Read a number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("take 1 or more")
    return number


def add_training(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add how a network is trained; give the group of these options."""
    group = parser.add_argument_group("training of a network")
    group.add_argument("--batch", type=count, metavar="N", help="samples in a step")
    group.add_argument("--sequence", type=count, metavar="N", help="tokens in a sample")
    group.add_argument("--image", type=count, metavar="N", help="pixels a side of an image")
    group.add_argument(
        "--varying", action="store_true", help="batch or sequence changes from step to step"
    )
    return group


def add_driver(parser: argparse.ArgumentParser) -> None:
    """Add the machine and its driver."""
    group = parser.add_argument_group("machine and driver")
    group.add_argument("--gpu", default="a100-sxm4-40gb", metavar="NAME", help="GPU profile")
    group.add_argument("--host", default="epyc-7763", metavar="NAME", help="host profile")
    group.add_argument("--seed", type=int, default=1, help="all that is random follows from it")
    group.add_argument("--no-prefetcher", action="store_true", help="density prefetcher off")
    group.add_argument("--prefetch-threshold", type=int, default=51, metavar="PERCENT")
    group.add_argument("--batch-size", type=count, default=256, metavar="N", help="default 256")
    group.add_argument(
        "--no-thrashing-mitigation", action="store_true", help="let pages go to and fro"
    )
    group.add_argument("--no-peer", action="store_true", help="GPUs copy through the CPU")


def training(
    args: argparse.Namespace, allocator: str, hints: Iterable[str], steps: int | None
) -> TrainingRun:
    """Say how a network is trained.

    Parameters
    ----------
    args : Namespace
        Batch, sequence, whether they vary, seed.
    allocator : str
        For its tensors.
    hints : iterable of str
        As people write them.
    steps : int, optional
        Training steps.

    Returns
    -------
    TrainingRun
        What the command line asks for.
    """
    from nsan.model.hints import parse_hint
    from nsan.model.workloads.training import TrainingRun

    found = [parse_hint(text) for text in hints]
    return TrainingRun(
        steps=steps or TrainingRun.steps,
        batch=args.batch,
        sequence=args.sequence,
        image=args.image,
        varying=args.varying,
        allocator=allocator,
        hints=tuple(hint for hint in found if hint),
        seed=args.seed,
    )


def driver_settings(args: argparse.Namespace, n_gpus: int = 1) -> Settings:
    """Say on which machine, with which driver, a program runs."""
    from nsan.model.settings import Settings

    return Settings(
        gpu=args.gpu,
        host=args.host,
        n_gpus=n_gpus,
        capacity_bytes=getattr(args, "capacity", None),
        prefetch=not args.no_prefetcher,
        prefetch_threshold=args.prefetch_threshold,
        batch_size=args.batch_size,
        thrashing=not args.no_thrashing_mitigation,
        peer=not args.no_peer,
        seed=args.seed,
    )


def tell_of_compiling(args: argparse.Namespace) -> None:
    """Say why the first run takes its time."""
    from nsan.model.engine.jit import is_compiled

    if not args.quiet and not is_compiled():
        complain("compiling the model, once: about half a minute")
