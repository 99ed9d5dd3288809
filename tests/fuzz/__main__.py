"""Try many inputs, or one again, and say what became of them.

Whatever is wrong is made once more into a folder of its own, whose path is printed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random as randoms
import sys
import tempfile
import time
from pathlib import Path

from fuzz import pool
from fuzz.outcomes import Statistics

_MOST_KEPT = 50


def parser():
    """Describe the command line."""
    found = argparse.ArgumentParser(
        prog="python -m fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument(
        "--inputs", type=int, default=1000, metavar="N", help="how many, default 1000"
    )
    found.add_argument(
        "--seed", type=int, default=1, metavar="N", help="another seed, other inputs; default 1"
    )
    found.add_argument("--kind", action="append", metavar="KIND", help="only this kind; repeatable")
    found.add_argument(
        "--workers", type=int, default=2, metavar="N", help="processes at a time, default 2"
    )
    found.add_argument(
        "--replay", metavar="KIND:SEED", help="try one input again, in this process, and keep it"
    )
    found.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="where inputs are kept; a new folder by default"
    )
    found.add_argument("--log", type=Path, metavar="FILE", help="write a line of JSON per input")
    return found


def make(kind, seed, place):
    """Make an input in a folder; return what is given to nsan."""
    from fuzz.kinds import KINDS

    place.mkdir(parents=True, exist_ok=True)
    return KINDS[kind].make(randoms.Random(f"{kind}:{seed}"), place).path


def replay(kind, seed, keep):
    """Try one input in this process, keep it, and print what becomes of it."""
    from fuzz import worker

    with tempfile.TemporaryDirectory(prefix="nsan-fuzz-") as scratch:
        found = worker.tried(kind, seed, scratch)
    print(found.pop("detail"))
    print(json.dumps(found, indent=1))
    print(f"The input: {make(kind, seed, _place(keep) / f'{kind}-{seed}')}")
    return 0


def _place(keep):
    return Path(keep or tempfile.mkdtemp(prefix="nsan-fuzz-kept-"))


def run(kinds, n, seed, *, workers=2, log=None, tell=lambda _: None):
    """Try inputs of some kinds.

    Parameters
    ----------
    kinds : dict of str to int
        By kind: so many of so many turns.
    n, seed : int
        How many inputs, and which.
    workers : int
        Processes at a time.
    log : file, optional
        Takes a line of JSON per input.
    tell : callable
        Takes a line about each that is wrong.

    Returns
    -------
    Statistics
        Of all.
    """
    statistics = Statistics()

    def note(tried):
        statistics.add(tried)
        if log is not None:
            log.write(json.dumps(vars(tried)) + "\n")
            log.flush()
        if tried.is_bad:
            tell(tried.line())

    pool.run(pool.shared_out(kinds, n, seed), workers=workers, note=note)
    return statistics


def main(argv=None):
    """Run the command line."""
    from fuzz.kinds import WEIGHTS

    args = parser().parse_args(argv)
    asked = [
        text.partition(":")[0]
        for text in [*(args.kind or []), *([args.replay] if args.replay else [])]
    ]
    if unknown := set(asked) - WEIGHTS.keys():
        print(
            f"There is no kind {', '.join(sorted(unknown))}. There are: {', '.join(WEIGHTS)}.",
            file=sys.stderr,
        )
        return 2
    if args.replay:
        kind, _, seed = args.replay.partition(":")
        return replay(kind, int(seed), args.keep)
    weights = {kind: WEIGHTS[kind] for kind in args.kind or WEIGHTS}
    started = time.monotonic()
    with args.log.open("w", encoding="utf-8") if args.log else contextlib.nullcontext() as log:
        statistics = run(
            weights,
            args.inputs,
            args.seed,
            workers=args.workers,
            log=log,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
    print(statistics.table())
    print(f"{time.monotonic() - started:.0f} s with {args.workers} workers, seed {args.seed}")
    if not statistics.bad:
        return 0
    keep = _place(args.keep)
    for tried in statistics.bad[:_MOST_KEPT]:
        make(tried.kind, tried.seed, keep / f"{tried.kind}-{tried.seed}")
    print(
        f"What is wrong was made again in {keep}; python -m fuzz --replay KIND:SEED tries one again."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
