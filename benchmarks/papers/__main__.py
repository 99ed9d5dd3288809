"""The tables of three papers, as Markdown: what they claim, and what comes out here.

    python -m benchmarks.papers                 all three, from the driver model and the real snapshots
    python -m benchmarks.papers 1 -o papers     table 1; runs and text are kept, and a stopped one goes on
    python -m benchmarks.papers --quick         one network, small sizes, a factor or two
    python -m benchmarks.papers 1 --runs bert   table 1 from recorded runs: bert/off and bert/on

Every figure says whether it is recorded, derived or modelled. What follows from a table is computed from
it: nothing is tuned until it agrees with a paper. One run takes some seconds, a table some minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from nsan.errors import NsanError

TABLES = {"1": "caching", "2": "hinting", "3": "stitching"}


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", nargs="?", choices=sorted(TABLES), help="default: all three")
    parser.add_argument("--quick", action="store_true", help="a small version of each table")
    parser.add_argument(
        "--runs", type=Path, nargs="+", default=[], metavar="FOLDER",
        help="recorded runs for table 1: each folder holds a folder off and one on",
    )  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="keep runs and tables")
    args = parser.parse_args(argv)
    if args.runs and args.table != "1":
        parser.error(
            "--runs is for table 1: write `python -m benchmarks.papers 1 --runs FOLDER...`"
        )
    try:
        if args.output is not None:
            made(args, args.output)
            return 0
        with tempfile.TemporaryDirectory() as scratch:
            made(args, Path(scratch))
    except NsanError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def made(args, folder):
    """Make the tables that are asked for; print each as soon as it is there."""
    from importlib import import_module

    from benchmarks.papers.runs import Job

    # Traces of runs that go away do not belong into the user's cache.
    os.environ.setdefault("NSAN_CACHE_DIR", str(folder / "stores"))
    job = Job(folder, args.quick, tuple(args.runs), args.output is None, _tell)
    for number in [args.table] if args.table else TABLES:
        start = time.perf_counter()
        text = import_module(f"benchmarks.papers.{TABLES[number]}").make(job)
        print(text, flush=True)
        _tell(f"table {number}: {time.perf_counter() - start:.0f} s")
        if args.output is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"table{number}.md").write_text(text, encoding="utf-8")


def _tell(line):
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
