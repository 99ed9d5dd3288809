"""Run one command, and say what it took: wall time, CPU time, highest memory of its whole process tree.

    python -I launcher.py '{"command": [...], "output": FILE, "messages": FILE, "limit_s": 60}'

A program on its own, and a small one: the peak that the kernel tells of a child is never below what its
parent held. Prints one line of JSON. A command that takes longer than its limit is ended, with all that
it started.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time

_STEP_S = 0.01
_PAGE = resource.getpagesize()


def _children(pid):
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:  # noqa: PTH123
                found += file.read().split()
    return found


def _resident(pid):
    """Memory of a process and of all below it, bytes."""
    try:
        with open(f"/proc/{pid}/statm") as file:  # noqa: PTH123
            own = int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0
    return own + sum(_resident(child) for child in _children(pid))


class _Watch(threading.Thread):
    """Looks at the tree again and again, and ends it when its time is up."""

    def __init__(self, pid, limit_s):
        super().__init__(daemon=True)
        self.pid, self.limit_s = pid, limit_s
        self.most, self.over, self.done = 0, False, threading.Event()

    def run(self):
        start = time.monotonic()
        while not self.done.wait(_STEP_S):
            self.most = max(self.most, _resident(self.pid))
            if time.monotonic() - start > self.limit_s and not self.over:
                self.over = True
                _end(self.pid)


def _end(group):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _give_up(pid):
    """End what was started, wait until it is gone, and go."""
    _end(pid)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    os._exit(130)


def launch(command, output, messages, limit_s):
    """Run a command; return what it took."""
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, output, write, 0o600),
        (os.POSIX_SPAWN_OPEN, 2, messages, write, 0o600),
    ]
    start = time.perf_counter()
    pid = os.posix_spawnp(command[0], command, os.environ, file_actions=actions, setpgroup=0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _give_up(pid))
    watch = _Watch(pid, limit_s)
    watch.start()
    _, status, used = os.wait4(pid, 0)
    wall = time.perf_counter() - start
    watch.done.set()
    watch.join()
    _end(pid)  # what it left running
    return {
        "wall_s": wall,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_bytes": max(watch.most, used.ru_maxrss * 1024),
        "status": None if watch.over else os.waitstatus_to_exitcode(status),
    }


if __name__ == "__main__":
    print(json.dumps(launch(**json.loads(sys.argv[1]))))
