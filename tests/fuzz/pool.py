"""Several workers that are watched from outside: time, memory, and that they live."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from fuzz.outcomes import Tried

WALL_SECONDS = 120
MOST_MIB = 2500
_STEP_SECONDS = 0.25
_HERE = Path(__file__).resolve()


class Worker:
    """One process, which lives for many inputs.

    Parameters
    ----------
    command : sequence of str, optional
        What is run; :mod:`fuzz.worker` without it.
    wall_seconds, most_mib : int
        An input that takes longer is a hang, a process that becomes larger is ended.
    """

    def __init__(self, command=(), *, wall_seconds=WALL_SECONDS, most_mib=MOST_MIB):
        self._wall_seconds, self._most_mib = wall_seconds, most_mib
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        path = os.pathsep.join(
            [str(_HERE.parents[1]), str(_HERE.parents[2]), os.environ.get("PYTHONPATH", "")]
        )
        self._process = subprocess.Popen(
            [sys.executable, *(command or ("-m", "fuzz.worker"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | {"PYTHONPATH": path.rstrip(os.pathsep), "POLARS_MAX_THREADS": "2"},
            start_new_session=True,
        )
        self._lines = selectors.DefaultSelector()
        self._lines.register(self._process.stdout, selectors.EVENT_READ)
        self._rest = b""

    @property
    def is_running(self):
        return self._process.poll() is None

    def __call__(self, kind, seed):
        """Try one input."""
        asked = json.dumps({"kind": kind, "seed": seed}).encode() + b"\n"
        started = time.monotonic()
        try:
            self._process.stdin.write(asked)
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._ended(kind, seed, "crash", started)
        while b"\n" not in self._rest:
            if self._lines.select(_STEP_SECONDS):
                more = os.read(self._process.stdout.fileno(), 1 << 16)
                if not more:
                    return self._ended(kind, seed, "crash", started)
                self._rest += more
            elif time.monotonic() - started > self._wall_seconds:
                return self._ended(kind, seed, "hang", started)
            elif self._resident_mib() > self._most_mib:
                return self._ended(kind, seed, "memory", started)
        line, _, self._rest = self._rest.partition(b"\n")
        return Tried(**json.loads(line))

    def _resident_mib(self):
        try:
            text = Path(f"/proc/{self._process.pid}/statm").read_text()
        except OSError:
            return 0
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    def _ended(self, kind, seed, outcome, started):
        resident = self._resident_mib()
        self._end()
        self._said.seek(0)
        words = self._said.read()[-800:].decode("utf-8", "replace")
        status = self._process.returncode
        return Tried(
            kind,
            seed,
            outcome,
            f"status {status}: {words}",
            "",
            time.monotonic() - started,
            resident,
        )

    def _end(self):
        """End the process and all that it began."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self):
        """End the process, and release what it was spoken to through."""
        self._end()
        self._process.stdin.close()
        self._process.stdout.close()
        self._lines.close()
        self._said.close()


def run(inputs, *, workers, note=lambda _: None, begin=Worker):
    """Try inputs.

    Parameters
    ----------
    inputs : iterable of (str, int)
        Kinds and seeds.
    workers : int
        Processes at a time.
    note : callable
        Takes each :class:`fuzz.outcomes.Tried` as it comes, one at a time.
    begin : callable
        Starts a :class:`Worker`.
    """
    team = _Team(inputs, note, begin)
    threads = [threading.Thread(target=team.work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:
        team.failures.append(error)
        for thread in threads:
            thread.join()
        raise
    if team.failures:
        raise team.failures[0]


class _Team:
    """What the threads share, each of which speaks with one worker at a time."""

    def __init__(self, inputs, note, begin):
        self.failures = []
        self._waiting, self._note, self._begin = iter(inputs), note, begin
        self._lock = threading.Lock()

    def work(self):
        """Try inputs until there are none, or another thread failed."""
        worker = self._begin()
        try:
            while (asked := self._next()) is not None:
                found = worker(*asked)
                with self._lock:
                    self._note(found)
                if not worker.is_running:
                    worker.close()
                    worker = self._begin()
        except BaseException as error:  # noqa: BLE001 - told by the thread that waits
            self.failures.append(error)
        finally:
            worker.close()

    def _next(self):
        with self._lock:
            return None if self.failures else next(self._waiting, None)


def shared_out(kinds, n, seed):
    """Give seeds to kinds in turn, in proportion to their weights; the n-th is always the same."""
    turns = [kind for kind, weight in kinds.items() for _ in range(weight)]
    for at, kind in zip(range(n), itertools.cycle(turns), strict=False):
        yield kind, seed * 1_000_000 + at
