"""The process that tries inputs: a kind and a seed a line in, what became of it a line out."""

from __future__ import annotations

import contextlib
import json
import os
import random as randoms
import resource
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from fuzz.asking import BrokenError, WrongError, cache, fingerprint
from fuzz.kinds import KINDS

_LIMIT_BYTES = 6 << 30
"""Of address space beyond what the process has at its start: polars maps far more than it uses."""


def tried(kind, seed, folder):
    """Make an input, and see what becomes of it: an outcome, and why."""
    random = randoms.Random(f"{kind}:{seed}")
    place = Path(folder) / "input"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    module = KINDS[kind]
    try:
        made = module.make(random, place)
    except Exception:  # noqa: BLE001 - the fuzzer's own fault must be seen as such
        return {
            "outcome": "crash",
            "detail": "the input could not be made: " + traceback.format_exc()[-600:],
            "what": "",
        }
    before = fingerprint(place)
    started = time.perf_counter()
    with cache(folder) as stores:
        outcome, detail, seconds = _judged(module, made, stores, seed, started)
    if fingerprint(place) != before:
        outcome, detail = "wrong", "the input was changed"
    return {"outcome": outcome, "detail": detail[-1500:], "what": made.what, "seconds": seconds}


def _judged(module, made, stores, seed, started):
    timed = []

    def note_time():
        timed.append(time.perf_counter() - started)

    try:
        outcome = module.check(made, stores, note_time)
        if outcome == "right" and seed % _DEEP == 0:
            module.look_closer(made, stores, seed // _DEEP)
        detail = ""
    except WrongError as error:
        outcome, detail = "wrong", str(error)
    except BrokenError as error:
        outcome, detail = "traceback", str(error)
    except MemoryError:
        outcome, detail = "memory", "MemoryError"
    except Exception:  # noqa: BLE001
        outcome, detail = "crash", "the check itself failed: " + traceback.format_exc()[-900:]
    return outcome, detail, timed[0] if timed else time.perf_counter() - started


_DEEP = 10
"""Of so many inputs one is also analysed, or a report is made of it."""


def _reset_peak():
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib():
    """Return the most memory that this process had since it was asked to count anew."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) // 1024
    return 0


def _limit_memory():
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main():
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever is printed here is no answer
    import polars as pl

    # What polars takes at its start is no input's.
    pl.DataFrame({"a": [1]}).lazy().collect()
    _limit_memory()
    with tempfile.TemporaryDirectory(prefix="nsan-fuzz-") as folder:
        for line in sys.stdin:
            asked = json.loads(line)
            _reset_peak()
            found = tried(asked["kind"], asked["seed"], folder)
            answers.write(json.dumps({**asked, **found, "peak_mib": peak_mib()}) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
