"""Runs of a command: each by the launcher, the best of some, and how far they lie apart."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LAUNCHER = Path(__file__).with_name("launcher.py")
LIMIT_S = 300
SLOW_S = 4.0
"""A command that takes longer than this is run once only."""


@dataclass(frozen=True)
class Taken:
    """One run: what it took and what it printed; no status means that its time was up."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    status: int | None
    output: str
    messages: str


@dataclass(frozen=True)
class Timed:
    """All runs of a command."""

    runs: tuple[Taken, ...]

    @property
    def best(self) -> Taken:
        return min(self.runs, key=lambda run: run.wall_s)

    @property
    def spread(self) -> float | None:
        """How much longer the longest run took than the best, as a fraction; None for one run."""
        if len(self.runs) < 2:
            return None
        return max(run.wall_s for run in self.runs) / self.best.wall_s - 1

    @property
    def peak_bytes(self) -> int:
        return max(run.peak_bytes for run in self.runs)


def run(command: Sequence[str], env: Mapping[str, str], *, limit_s: float = LIMIT_S) -> Taken:
    """Run a command once, in a process of its own."""
    # In the scratch folder of the command: a signal may come when this one is made and not yet known.
    with tempfile.TemporaryDirectory(prefix="nsan-results-", dir=env.get("TMPDIR")) as made:
        output, messages = Path(made) / "out", Path(made) / "err"
        said = {"command": [str(word) for word in command], "limit_s": limit_s}
        said |= {"output": str(output), "messages": str(messages)}
        command_line = [sys.executable, "-I", str(LAUNCHER), json.dumps(said)]
        pipe, one = subprocess.PIPE, None
        try:
            one = subprocess.Popen(command_line, env=dict(env), stdout=pipe, stderr=pipe, text=True)
            told, problem = one.communicate()
        except BaseException:
            if one is not None:
                one.terminate()  # not killed: it ends what it started
                one.communicate()
            raise
        if one.returncode:
            # It did not even start: there is no such program, or it may not be run.
            return Taken(0, 0, 0, 127, "", problem)
        printed = (path.read_text(errors="replace") for path in (output, messages))
        return Taken(**json.loads(told), **dict(zip(("output", "messages"), printed, strict=True)))


def forget(*folders: Path) -> None:
    """Remove what contestants left, so that no disk fills up."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
