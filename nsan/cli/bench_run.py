"""Run a program of the microbenchmark: alone for its times, then under nsys for its trace.

FOLDER gets all that belongs to the run: the report, the program's own tables of both runs, what its
caching allocator did as a memory snapshot, the imported trace, and bench.json, which says how it was
made. Flags for the program stand behind --; `nsan bench run PROGRAM -- --help` prints them. -v shows what
the program and nsys say. A run that did not end well is marked in bench.json, and replaced by the next.

The exit status is the program's own where it says why it did not run: 5 no driver or no GPU, 6 this
machine cannot do it, 7 it could leave the machine without memory. 3: it ran, and its trace has no
Unified Memory data.

Examples
--------
  nsan bench run uvm_bench -o stream -- --pattern stream --bytes 1GiB --prefetch ahead
  nsan bench run dl_bench --network gpt2-small --batch 4 -o gpt2 -- --allocator caching
  nsan bench run torch_uvm --python ~/torch/bin/python -o cnn -- --network cnn --allocator caching
  nsan bench run uvm_bench --no-nsys -o times -- --pattern random --iterations 20
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.cli.arguments import add_verbosity
from nsan.cli.bench_arguments import add_program, teller, work_of
from nsan.cli.summary import summary_text
from nsan.cli.terminal import coloured, complain, emit
from nsan.errors import ProgramNotFoundError, UsageError
from nsan.tabular.text import json_text
from nsan.text import safe
from nsan.units import format_count

if TYPE_CHECKING:
    from nsan.microbench.running import Outcome
    from nsan.microbench.work import Work


_MOST_WRONG: Final = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this action."""
    parser.usage = "nsan bench run [options] PROGRAM -o FOLDER [-- FLAG ...]"
    add_program(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="where the run goes")
    parser.add_argument(
        "--no-nsys", action="store_true", help="only alone: times and tables, no trace"
    )
    parser.add_argument(
        "--force-overwrite", action="store_true", help="replace an earlier run that ended well"
    )
    parser.add_argument("--json", action="store_true", help="bench.json and the summary as JSON")
    add_verbosity(parser)


def run(args: argparse.Namespace) -> int:
    """Run the action."""
    from nsan.microbench.places import check_place
    from nsan.microbench.running import exit_status
    from nsan.microbench.running import run as run_work
    from nsan.microbench.work import is_question

    if is_question(args.flags):
        return _asked(work_of(args))
    if args.output is None:
        msg = "Say where the run goes: -o FOLDER."
        raise UsageError(msg)
    # Compiling takes minutes: what would stop the run afterwards is looked at first.
    check_place(args.output, overwrite=args.force_overwrite)
    outcome = run_work(
        work_of(args),
        args.output,
        profiled=not args.no_nsys,
        overwrite=args.force_overwrite,
        shown=args.verbose,
        tell=teller(args),
    )
    _tell(outcome, args)
    return exit_status(outcome)


def _asked(work: Work) -> int:
    """Pass a question on to the program, and its answer to the user."""
    with tempfile.TemporaryDirectory(prefix="nsan-bench-") as scratch:
        tape = None
        if work.tape:
            place = Path(scratch) / "network.tape"
            place.write_text(work.tape, encoding="utf-8")
            tape = place
        try:
            done = subprocess.run(  # noqa: S603 - the user's own program, without a shell
                work.question(tape), stdout=subprocess.PIPE, check=False
            )
        except OSError as error:
            raise ProgramNotFoundError(str(work.path), error.strerror) from error
    emit(done.stdout.decode(errors="replace"))
    return done.returncode if 0 <= done.returncode < 128 else 1


def _tell(outcome: Outcome, args: argparse.Namespace) -> None:
    from nsan.contract import document

    summary = None
    if outcome.manifest is not None:
        summary = document(outcome.manifest["info"], outcome.manifest["totals"])
    if args.json:
        emit(json_text({**outcome.document, "summary": summary}))
    elif summary is not None:
        emit(summary_text(summary, verbose=args.verbose, paint=coloured))
    if not args.quiet or outcome.status != "ok":
        complain(_account(outcome, args.output))
    for line in _certain(outcome.document.get("expected"), verbose=args.verbose):
        if not args.quiet:
            complain(line)


def _certain(expected: Mapping[str, Any] | None, *, verbose: bool) -> list[str]:
    """Say whether the trace shows the bytes that the program is certain of."""
    if expected is None:
        return []
    if not expected["n_checked"]:
        return [f"Certain bytes were not compared: {safe(expected['reason'])}"]
    wrong = expected["wrong"]
    of = f"{format_count(expected['n_right'])} of {format_count(expected['n_checked'])}"
    lines = [f"Certain bytes: {of} as expected", *(f"  {safe(line)}" for line in wrong)]
    most = len(wrong) if verbose else _MOST_WRONG
    rest = [f"  and {format_count(len(wrong) - most)} more: see -v"] if len(wrong) > most else []
    return lines[: 1 + most] + rest


def wall_time(seconds: float) -> str:
    """Write a wall time with the digits that mean something: starting a program alone takes milliseconds.

    Parameters
    ----------
    seconds : float
        The time.

    Returns
    -------
    str
        Three digits, or all of whole seconds.

    Examples
    --------
    >>> wall_time(0.027), wall_time(0.0273456), wall_time(1.23456), wall_time(4321.5)
    ('27 ms', '27.3 ms', '1.23 s', '4322 s')
    """
    if seconds < 1:
        return f"{float(f'{1000 * seconds:.3g}'):g} ms"
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _account(outcome: Outcome, place: Path) -> str:
    """Say how the run ended, how long the program takes alone, and where all of it is."""
    found = outcome.document
    parts = [f"{found['program']} takes {wall_time(found['seconds_alone'])} without nsys"]
    if found["seconds_nsys"] is not None:
        parts.append(f"nsys took {wall_time(found['seconds_nsys'])} in all")
    if outcome.status != "ok":
        parts = [f"{found['program']}: {outcome.status.replace('_', ' ')}: {safe(found['reason'])}"]
    return "; ".join([*parts, f"the run is in {place}"])
