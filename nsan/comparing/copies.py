"""Runs of a condition that are copies of each other, which are no repetitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import TYPE_CHECKING

from nsan.comparing.findings import Finding
from nsan.tabular.notes import few
from nsan.text import shortened

if TYPE_CHECKING:
    from nsan.comparing.conditions import Condition, Run


def copies(conditions: Iterable[Condition]) -> Iterator[Finding]:
    """Look for runs of one condition that hold the same bytes.

    Two recordings never do: each holds when it was made.

    Parameters
    ----------
    conditions : iterable of Condition
        What is compared.

    Yields
    ------
    Finding
        For each condition with copies.
    """
    for condition in conditions:
        for alike in _alike(condition.runs):
            text = (
                f"{condition.label}: {few([shortened(run.name, 60) for run in alike], 6)} are copies of one "
                "capture. A copy is no repetition: noise looks smaller than it is, and verdicts are too sure."
            )
            yield Finding("copies", "warn", (condition.label,), text)


def _alike(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Put runs with the same content together; only of those of one size it is read."""
    for same_size in _grouped(runs, _sizes):
        yield from _grouped(same_size, _digest)


def _grouped(runs: Sequence[Run], key: Callable[[Path], object]) -> list[list[Run]]:
    found: dict[object, list[Run]] = {}
    for run in runs:
        found.setdefault(key(run.trace), []).append(run)
    return [each for each in found.values() if len(each) > 1]


def _files(capture: Path) -> list[Path]:
    """List the files of a capture, which may be a folder."""
    if not capture.is_dir():
        return [capture]
    return sorted(file for file in capture.rglob("*") if file.is_file())


def _sizes(capture: Path) -> tuple[int, ...]:
    return tuple(file.stat().st_size for file in _files(capture))


def _digest(capture: Path) -> tuple[bytes, ...]:
    found = []
    for file in _files(capture):
        with file.open("rb") as opened:
            found.append(file_digest(opened, blake2b).digest())
    return tuple(found)
