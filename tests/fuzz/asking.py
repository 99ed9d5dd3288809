"""nsan asked as from a terminal, in this process, and what it answers held to the house rules."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path

_MOST_CHARACTERS = 3000
_MOST_LINES = 6
_STATUSES = (0, 3)


class WrongError(Exception):
    """An answer is not right."""


class BrokenError(Exception):
    """nsan ended with an exception that it did not foresee."""


@dataclass(frozen=True)
class Answer:
    """What a command printed."""

    status: int
    out: str
    err: str

    @property
    def is_refusal(self):
        return self.status not in _STATUSES


def ask(*arguments):
    """Run a command.

    Raises
    ------
    BrokenError
        If it ends with a traceback.
    WrongError
        If a refusal is not one clear message, or the output could do harm in a terminal.
    """
    from nsan.cli import main

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([str(a) for a in arguments])
    except MemoryError:
        raise
    except BaseException as error:  # polars panics beside Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        raise BrokenError("".join(traceback.format_exception(error)[-6:])) from error
    said = []
    for stream in (out, err):
        stream.flush()
        said.append(stream.buffer.getvalue().decode("utf-8", "replace"))
    answer = Answer(status, *said)
    _check(answer, arguments)
    return answer


def _check(answer, arguments):
    if answer.is_refusal:
        _check_refusal(answer)
    harmful = {c for c in answer.out + answer.err if not (c.isprintable() or c in "\n")}
    if harmful and "--json" not in arguments:
        raise WrongError(f"{arguments[0]} prints {sorted(map(ascii, harmful))[:5]}")


def _check_refusal(answer):
    text = answer.err
    if answer.status not in {1, 2}:
        raise WrongError(f"status {answer.status}: {text[:200]}")
    if not text.startswith("nsan: ") or "Traceback" in text:
        raise WrongError(f"a refusal that is no message: {text[:300]!r}")
    if len(text) > _MOST_CHARACTERS or len(text.splitlines()) > _MOST_LINES:
        raise WrongError(f"a refusal of {len(text)} characters: {text[:300]!r}")
    if answer.out:
        raise WrongError(f"a refusal with a result: {answer.out[:200]!r}")


def fingerprint(folder):
    """Hash all files below a folder, with their names."""
    found = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*")):
        found.update(os.fsencode(path.relative_to(folder)))
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()


@contextlib.contextmanager
def cache(folder):
    """Give nsan a cache of its own, which is gone afterwards."""
    place = Path(folder) / "cache"
    os.environ["NSAN_CACHE_DIR"] = str(place)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def check_cache(place, *, refused):
    """Say that a refused import left nothing, and any other a whole store and nothing else."""
    left = list(place.glob("stores/*"))
    if refused and left:
        raise WrongError(f"a refused import left {[path.name for path in left]}")
    if any(not (path / "manifest.json").is_file() for path in left):
        raise WrongError(f"half a store is left: {[path.name for path in left]}")
