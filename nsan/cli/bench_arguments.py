"""Options that the actions of `nsan bench` share, and how flags for a program are told from nsan's own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nsan.cli.model_arguments import add_training, count
from nsan.cli.terminal import complain
from nsan.errors import UsageError

if TYPE_CHECKING:
    from nsan.microbench.work import Work

RUNNABLE = ("uvm_bench", "dl_bench", "torch_uvm")
_TORCH_OWN = ("network", "batch", "sequence", "image")


class ActionParser(argparse.ArgumentParser):
    """Leaves what stands behind ``--`` to the program: it becomes ``flags``."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse what stands before ``--``."""
        own = list(args or ())
        at = own.index("--") if "--" in own else len(own)
        namespace, extra = super().parse_known_args(own[:at], namespace)
        if extra and hasattr(namespace, "program"):
            self.error(f"unrecognized: {' '.join(extra)}. Flags of the program stand behind --")
        if own[at + 1 :] and not hasattr(namespace, "program"):
            self.error("only run and sweep pass flags on to a program")
        namespace.flags = own[at + 1 :]
        return namespace, extra


def add_compiler(parser: argparse.ArgumentParser) -> None:
    """Add how programs are compiled."""
    parser.add_argument(
        "--nvcc", metavar="PATH", help="the CUDA compiler; default: NVCC, PATH, CUDA_HOME"
    )
    parser.add_argument(
        "--arch",
        metavar="ARCH",
        help="as nvcc's -arch: native, all-major, sm_90; default: native where a GPU is, else all-major",
    )


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the program, where it comes from, and what it plays."""
    shown = f"{', '.join(RUNNABLE[:-1])} or {RUNNABLE[-1]}"
    parser.add_argument("program", choices=RUNNABLE, metavar="PROGRAM", help=shown)
    parser.add_argument(
        "--program",
        dest="path",
        metavar="PATH",
        help="a program that is built already, in place of building it here",
    )
    parser.add_argument(
        "--python", metavar="PYTHON", help="for torch_uvm: one that has PyTorch; default: this one"
    )
    add_compiler(parser)
    group = add_training(parser)
    group.add_argument("--network", metavar="NAME", help="what dl_bench trains: `nsan bench list`")
    group.add_argument("--steps", type=count, metavar="N", help="training steps, default 2")


def teller(args: argparse.Namespace) -> Callable[[str], None] | None:
    """Return what says what is going on, on stderr; None if nothing is to be said."""
    return None if args.quiet else complain


def work_of(args: argparse.Namespace) -> Work:
    """Find, or build, what is to run.

    Parameters
    ----------
    args : Namespace
        With what :func:`add_program` adds, and ``flags``.

    Returns
    -------
    Work
        The program with its flags and its tape.

    Raises
    ------
    NsanError
        If something is missing or does not fit.
    """
    from nsan.microbench.work import (
        PLAYS_TAPES,
        USES_TORCH,
        Work,
        check_flags,
        is_question,
        located,
    )

    if args.program == USES_TORCH:
        return _torch_work(args)
    if args.python is not None:
        raise UsageError(f"--python means nothing to {args.program}: leave it out.")
    check_flags(args.flags)
    tape = ""
    if args.program == PLAYS_TAPES:
        # A question needs no tape, unless it is about one.
        if args.network is not None or not is_question(args.flags):
            tape = _tape(args)
    else:
        _refuse_training(args)
    path, version = located(
        args.program, path=args.path, arch=args.arch, nvcc=args.nvcc, tell=teller(args)
    )
    return Work(args.program, path, tuple(args.flags), tape, version)


def _torch_work(args: argparse.Namespace) -> Work:
    from nsan.microbench.harness import torch_work

    for name in _TORCH_OWN:
        if getattr(args, name):
            raise UsageError(f"--{name} is a flag of torch_uvm itself: write it behind --.")
    _refuse_training(args)
    if args.path is not None:
        msg = "--program means nothing to torch_uvm: name its --python, and a --library behind --."
        raise UsageError(msg)
    return torch_work(
        args.flags, python=args.python, arch=args.arch, nvcc=args.nvcc, tell=teller(args)
    )


def _tape(args: argparse.Namespace) -> str:
    from nsan.microbench.work import TapeRequest

    if args.network is None:
        msg = "dl_bench trains a network: say which with --network NAME. `nsan bench list` shows them."
        raise UsageError(msg)
    request = TapeRequest(
        args.network,
        steps=args.steps or TapeRequest.steps,
        batch=args.batch,
        sequence=args.sequence,
        image=args.image,
        varying=args.varying,
    )
    return request.text()


def _refuse_training(args: argparse.Namespace) -> None:
    for name in ("network", "steps", "batch", "sequence", "image", "varying"):
        if getattr(args, name):
            raise UsageError(f"--{name} means nothing to {args.program}: leave it out.")
