"""A process that reads reports one after another: tasks come as lines of JSON, results go as such."""

from __future__ import annotations

import json
import os
import signal
import sys

from nsan.fleet.task import perform

_STDIN, _STDOUT, _STDERR = 0, 1, 2


def serve() -> None:
    """Do tasks from standard input until it is closed."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints must not get between the results.
    answers = os.fdopen(os.dup(_STDOUT), "wb")
    os.dup2(_STDERR, _STDOUT)
    with answers:
        for line in sys.stdin.buffer:
            answers.write(json.dumps(perform(json.loads(line))).encode() + b"\n")
            answers.flush()
    # Nothing is half done any more, and what ends Python would not want to be interrupted.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, _frame: object) -> None:
    """Unwind, so that what is half done is removed."""
    sys.exit(128 + number)
