"""Workers on this machine: one process each, one report at a time.

Not a pool of :mod:`concurrent.futures`, of which all work is lost when one process is killed, and not a
cluster of dask, which takes seconds to start, has to be installed, and blames a killed worker on all
that waited for it. Here it is known which report a process was at when it ended: that one is tried
again, and everything else goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import nsan
from nsan.fleet.task import failed
from nsan.memory_budget import VARIABLE, budget, is_said

ATTEMPTS: Final = 3
"""How often a report may end the worker that reads it: once, and two tries more."""

_LEAST_BYTES: Final = 1 << 30
"""A worker is allowed so much where the user said nothing, or it could do little."""

_GRACE_SECONDS: Final = 10
_POLL_SECONDS: Final = 0.2
_PROGRAM: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); from nsan.fleet.worker import serve; serve()"
)
_HOME: Final = Path(nsan.__file__).resolve().parents[1]

Task = Mapping[str, Any]
Result = dict[str, Any]


def on_processes(tasks: Sequence[Task], n_workers: int) -> Iterator[Result]:
    """Do tasks in processes of this machine.

    Parameters
    ----------
    tasks : sequence of mapping
        As :func:`nsan.fleet.task.perform` takes them.
    n_workers : int
        Processes.

    Yields
    ------
    dict
        The result of each task, as they come; a task that ended its worker each time has a reason.
    """
    pool = _Pool(tasks, min(n_workers, len(tasks)))
    try:
        yield from pool.results()
    finally:
        pool.stop()


class _Pool:
    """Threads that each keep one process busy; what they find goes through a queue."""

    def __init__(self, tasks: Sequence[Task], n_workers: int) -> None:
        self._n_left = len(tasks)
        self._waiting = deque(tasks)
        self._done: queue.Queue[Result | BaseException] = queue.Queue()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._environment = _environment(n_workers)
        self._threads = [
            threading.Thread(target=self._keep_busy, daemon=True) for _ in range(n_workers)
        ]

    def results(self) -> Iterator[Result]:
        for thread in self._threads:
            thread.start()
        while self._n_left:
            try:
                # With a limit, or Ctrl-C would not be heard.
                found = self._done.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(found, BaseException):
                raise found
            self._n_left -= 1
            yield found

    def stop(self) -> None:
        """End the processes; one in the middle of a report removes what is half done.

        Where all is done, each ends by itself once its thread has nothing more to ask.
        """
        self._stopping.set()
        if not self._n_left:
            for thread in self._threads:
                thread.join()
            return
        with self._lock:
            children = [*self._children]
        for child in children:
            child.terminate()
        for child in children:
            try:
                child.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _keep_busy(self) -> None:
        child: subprocess.Popen[bytes] | None = None
        try:
            while (task := self._next()) is not None:
                for _ in range(ATTEMPTS):
                    child = child or self._started()
                    answer = _asked(child, task)
                    if answer is not None:
                        result = answer
                        break
                    status, child = self._ended(child), None
                    if self._stopping.is_set():
                        return
                    result = failed(task, _why(status))
                self._done.put(result)
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            self._done.put(error)
        finally:
            if child is not None:
                self._ended(child)

    def _next(self) -> Task | None:
        with self._lock:
            return (
                self._waiting.popleft() if self._waiting and not self._stopping.is_set() else None
            )

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _PROGRAM, str(_HOME)]
        # Ctrl-C is for whoever asked, who then ends the workers in order.
        child = subprocess.Popen(  # noqa: S603 - our own program, by a list
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )
        with self._lock:
            self._children.add(child)
        if self._stopping.is_set():
            child.terminate()
        return child

    def _ended(self, child: subprocess.Popen[bytes]) -> int:
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        status = child.wait()
        with self._lock:
            self._children.discard(child)
        return status


def _environment(n_workers: int) -> dict[str, str]:
    """Share the cores and the memory of the machine among the workers; what the user set holds.

    How much memory may be used is said of all of them: each has its part of it.
    """
    cores = max(1, len(os.sched_getaffinity(0)) // n_workers)
    memory = budget() // n_workers
    if not is_said():
        memory = max(_LEAST_BYTES, memory)
    return {"POLARS_MAX_THREADS": str(cores)} | dict(os.environ) | {VARIABLE: str(memory)}


def _asked(child: subprocess.Popen[bytes], task: Task) -> Result | None:
    """Give a task to a process and wait; None if the process ends instead."""
    assert child.stdin is not None  # noqa: S101 - both are pipes
    assert child.stdout is not None  # noqa: S101
    try:
        child.stdin.write(json.dumps(task).encode() + b"\n")
        child.stdin.flush()
        answer = child.stdout.readline()
    except OSError:
        return None
    result: Result | None = json.loads(answer) if answer.endswith(b"\n") else None
    return result


def _why(status: int) -> str:
    if status >= 0:
        how = f"ended with status {status}"
    else:
        how = f"was ended by {signal.Signals(-status).name}"
        if status == -signal.SIGKILL:
            how += ", as a system does that is out of memory"
    return f"The worker that read it {how}, {ATTEMPTS} times. Read it alone: `nsan summary FILE`."
