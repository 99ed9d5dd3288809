"""nsan beside its peers, on the same files in the same run: writes `benchmarks/RESULTS.md`.

    PYTHONPATH=tests python -m benchmarks.results                 10^5 and 10^6 fault rows, some minutes
    PYTHONPATH=tests python -m benchmarks.results --large         10^7, too
    PYTHONPATH=tests python -m benchmarks.results --only totals --sizes 4 -o -

Peers are the vendor's Unified Memory reports and a recipe of theirs (`NSAN_NSYS_PREFIX`, or where nsys
is installed by default), sqlite3 with NumPy, pandas, and PyTorch's memory_viz (`--torch PYTHON`). Who is
not installed is left out, and named. Exit status 1: nsan's answer differs from plain SQL somewhere.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.peers import contests, defects, files, fleet, machine, measuring, vendor
from benchmarks.peers.agreement import Answer, compare
from benchmarks.peers.contests import QUESTIONS, Contest, Contestant, Setting
from benchmarks.peers.document import Outcome, Standing, document
from benchmarks.peers.measuring import SLOW_S, Taken, Timed

DOCUMENT = Path(__file__).with_name("RESULTS.md")
_ROOT = Path(__file__).parents[1]
_MADE = (
    "a fault row per batch, its copies inside it and chained, kernels that cover nine tenths of the faults, "
    "and CPU page faults of seven functions"
)
_NOT_ASKED = {
    "um_vector_add_rtx4060l": {"functions", "kernels", "episodes", "parquet"},
    "two_gpus": {"functions", "episodes", "parquet"},
}
"""Of small files only what they show: two GPUs are nothing for ways that take a file as one."""


def _arguments(words: list[str] | None) -> argparse.Namespace:
    first, _, rest = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.results", description=first, epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--sizes", default="5,6", help="powers of ten of the made exports; empty: none"
    )
    parser.add_argument("--large", action="store_true", help="10^7, too; takes half an hour")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command (default: 3)")
    choices = (*QUESTIONS, "defects")
    parser.add_argument("--only", action="append", choices=choices, help="repeatable")
    parser.add_argument("--reports", type=int, default=8, help="reports of question 4 (default: 8)")
    parser.add_argument("--megabytes", type=int, default=20, help="of the large snapshot")
    parser.add_argument("--no-samples", action="store_true", help="only files that are made")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has PyTorch")
    parser.add_argument("-o", "--output", help="file, or - for stdout; with --only: stdout")
    args = parser.parse_args(words)
    if args.rounds < 1 or args.reports < 2 or args.megabytes < 0:
        parser.error("--rounds is at least 1, --reports at least 2, --megabytes at least 0.")
    try:
        args.sizes = [int(power) for power in args.sizes.split(",") if power]
    except ValueError:
        parser.error(f"--sizes are powers of ten, as in 5,6: '{args.sizes}' is not.")
    if any(not 1 <= power <= 8 for power in args.sizes):
        parser.error("--sizes are powers of ten from 1 to 8.")
    args.sizes += [7] if args.large and 7 not in args.sizes else []
    return args


# --- Running --------------------------------------------------------------------------------------


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def hold(contest: Contest, rounds: int) -> Outcome:
    """Let all contestants run in turn, round by round; judge the last answer of each."""
    taken: dict[int, list[Taken]] = {}
    for number, one in enumerate(contest.contestants):
        if one.first:
            measuring.run(one.command, one.env)
        taken[number] = []
    for turn in range(rounds):
        for number, one in enumerate(contest.contestants):
            if turn and _is_enough(taken[number][0]):
                continue
            one.before()
            taken[number].append(measuring.run(one.command, one.env))
    answers = {
        number: _answer(one, taken[number][-1]) for number, one in enumerate(contest.contestants)
    }
    for number, one in enumerate(contest.contestants):
        if answers[number] is None and one.read is not None and one.kind == "nsan":
            _say(f"{one.name}: {taken[number][-1].messages.strip()[-400:]}")
    truth = contest.truth() if contest.truth else _of_sql(contest, answers)
    standings = []
    for number, one in enumerate(contest.contestants):
        said = answers[number]
        agreement = None if said is None else compare(said, truth)
        standings.append(Standing(one, Timed(tuple(taken[number])), agreement))
    return Outcome(contest, standings)


def _is_enough(first: Taken) -> bool:
    return first.status is None or first.wall_s > SLOW_S


def _answer(one: Contestant, taken: Taken) -> Answer | None:
    if one.read is None or taken.status is None:
        return None
    try:
        return one.read(taken)
    except (ValueError, LookupError, TypeError):
        # No table, or one that is not as it was in the versions that are known.
        return None


def _of_sql(contest: Contest, answers: dict[int, Answer | None]) -> Answer:
    (truth,) = (answers[i] for i, one in enumerate(contest.contestants) if one.kind == "sql")
    if truth is None:
        raise SystemExit(f"plain SQL gave no answer to {contest.question} of {contest.label}")
    return truth


# --- What is asked --------------------------------------------------------------------------------


def _wanted(question: str, file: files.File) -> bool:
    return question not in _NOT_ASKED.get(file.path.stem, ())


def _all_contests(
    setting: Setting, args: argparse.Namespace, left_out: list[str]
) -> Iterator[Contest]:
    asked = args.only or list(QUESTIONS)
    per_file = [q for q in QUESTIONS if q in asked and q not in ("transfers", "snapshot")]
    for file in files.samples() if per_file and not args.no_samples else ():
        yield from _about(setting, file, per_file)
    for power in args.sizes if per_file else ():
        _say(f"making 10^{power} fault rows and migrations")
        file = files.made(setting.folder, 10**power)
        yield from _about(setting, file, per_file)
        file.path.unlink()
    if "transfers" in asked and args.sizes:
        n = 10 ** min(args.sizes) // 2
        _say(f"making {args.reports} exports of {n:,} fault rows and migrations")
        made = [files.made(setting.folder, n, seed) for seed in range(1, args.reports + 1)]
        contest, missing = fleet.fleet(setting, [one.path for one in made], made[0].label)
        left_out += missing
        yield contest
    if "snapshot" in asked:
        viz = _memory_viz(args.torch)
        if viz is None:
            left_out.append(
                "PyTorch's memory_viz: PyTorch is not installed here (`--torch PYTHON`)"
            )
        for file in files.snapshot(setting.folder, args.megabytes):
            files.warm(file.path)
            yield contests.snapshot(setting, file, viz)


def _about(setting: Setting, file: files.File, asked: list[str]) -> Iterator[Contest]:
    files.warm(file.path)
    there = contests.capture_of(file.path)
    for question in asked:
        if not _wanted(question, file) or not contests.answerable(question, there):
            continue
        if question == "parquet":
            yield contests.parquet(setting, file)
        else:
            yield contests.about(setting, question, file)
    measuring.forget(setting.folder / "cold", setting.folder / "warm")


def _memory_viz(python: str | None) -> tuple[str, str] | None:
    """Find PyTorch's own program for snapshots, without importing PyTorch."""
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"
    with suppress(OSError, subprocess.CalledProcessError):
        one = python or sys.executable
        done = subprocess.run([one, "-c", code], check=True, capture_output=True, text=True)
        program = Path(done.stdout.strip()).parent / "cuda" / "_memory_viz.py"
        if done.stdout.strip() and program.is_file():
            return one, str(program)
    return None


def _torch_version(python: str | None) -> str | None:
    code = "from importlib.metadata import version; print(version('torch'))"
    with suppress(OSError, subprocess.CalledProcessError):
        command = [python or sys.executable, "-c", code]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout.strip()
    return None


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NSAN_")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # as on a user's machine: modules are compiled once
    places = (str(_ROOT), str(_ROOT / "tests"), kept.get("PYTHONPATH", ""))
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "PYTHONPYCACHEPREFIX": kept.get("PYTHONPYCACHEPREFIX", str(folder / "pycache")),
        "NSAN_CACHE_DIR": str(folder / "cache"),
        "TMPDIR": str(folder),
    }


def results(args: argparse.Namespace, written: Path) -> tuple[str, list[Outcome]]:
    """Hold all contests; return the document and what took place."""
    left_out: list[str] = []
    found = vendor.installations()
    if not found:
        left_out.append("the vendor's reports and recipes: no nsys is installed")
    if not contests.has("pandas"):
        left_out.append("pandas: it is not installed here")
    elif not contests.has("pyarrow"):
        left_out.append("pandas to Parquet: pyarrow is not installed here")
    facts = machine.facts(written, found, _torch_version(args.torch))
    outcomes, shown = [], []
    with tempfile.TemporaryDirectory(prefix="nsan-results-") as place:
        folder = Path(place)
        setting = Setting(folder, _environment(folder), found)
        bare = [measuring.run([sys.executable, "-c", "pass"], setting.env) for _ in range(5)]
        for contest in _all_contests(setting, args, left_out):
            _say(f"{QUESTIONS[contest.question]}: {contest.label}")
            outcomes.append(hold(contest, args.rounds))
        if found and "defects" in (args.only or ("defects",)):
            _say("known defects")
            shown = defects.ask(folder, found, setting.env)
    start_s = min(taken.wall_s for taken in bare)
    method = {"rounds": args.rounds, "slow": SLOW_S, "bare": f"{start_s:.3f} s", "made": _MADE}
    return document(facts, method, outcomes, shown, left_out), outcomes


def main(words: list[str] | None = None) -> int:
    """Measure, write, and say where."""
    args = _arguments(words)
    name = args.output or ("-" if args.only else str(DOCUMENT))
    path = None if name == "-" else Path(name)
    if path and not path.resolve().parent.is_dir():
        _say(f"{path.parent} is not a folder")
        return 2
    # Ended from outside: what runs is ended, too, and the scratch folder goes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        text, outcomes = results(args, path or DOCUMENT)
    except KeyboardInterrupt:
        _say("interrupted: nothing was written")
        return 130
    if path:
        path.write_text(text)
        _say(f"wrote {path}")
    else:
        print(text)
    wrong = [
        f"{outcome.contest.question} of {outcome.contest.label}: {standing.contestant.name}"
        for outcome in outcomes
        for standing in outcome.standings
        if standing.contestant.kind == "nsan" and standing.verdict in ("differs", "nothing")
    ]
    for one in wrong:
        _say(f"nsan does not agree with plain SQL: {one}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
