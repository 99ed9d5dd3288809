"""What the programs of two conditions do differently: what they ask the driver for, launch and allocate.

A difference is told where no run of one condition has a value that a run of the other has, or one between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nsan.comparing.programs import plain_launches
from nsan.text import shortened
from nsan.units import counted, format_bytes, format_count

if TYPE_CHECKING:
    from nsan.comparing.findings import Side
    from nsan.comparing.profile import Profile

Values = tuple[float | None, ...]

_NEAR: Final = {"byte": 0.01, "number": 0.05}
"""By unit: values that are nearer to each other are the same."""

_MOST_NAMES: Final = 20
"""Kernels, and NVTX ranges, of one condition only that are told, the most frequent first."""


@dataclass(frozen=True)
class Difference:
    """Something that the programs of two conditions do differently.

    Attributes
    ----------
    condition : str
        Label of the condition that is compared with the base.
    what : str
        "call", "kernel", "launches", "range", "managed_allocations", "managed_bytes", "steps", "gpu_memory",
        "room", "oversubscription_factor", "observed_factor" or "full" (values are bytes evicted).
    name : str
        Name of the call, kernel or NVTX range, else "".
    unit : str
        Of the values.
    base, other : tuple of float or None
        By run; None: not known.
    text : str
        The same for people.
    """

    condition: str
    what: str
    name: str
    unit: str
    base: Values
    other: Values
    text: str


def differences(
    base: Side, other: Side, steps: Mapping[str, Sequence[int]] | None = None
) -> list[Difference]:
    """Say what the programs of two conditions do differently.

    Parameters
    ----------
    base, other : Side
        The conditions.
    steps : mapping of str to sequence of int, optional
        By label: how many steps each run has, where steps were found.

    Returns
    -------
    list of Difference
        What the driver is told first, then launches, ranges, memory and steps.
    """
    labels = (base.label, other.label)
    found = [*_calls(base, other), *_kernels(base, other), *_ranges(base, other)]
    for what, unit, value_of in _FIGURES:
        if what == "oversubscription_factor" and _is_full(base, other):
            continue  # what a full GPU held says more than what was to be left of it
        values = tuple(tuple(map(value_of, side.runs)) for side in (base, other))
        found += _told(labels, (what, "", unit), values)
    found += _fullness(base, other)
    counts = steps or {}
    if all(counts.get(label) for label in labels):
        values = tuple(tuple(counts[label]) for label in labels)
        found += _told(labels, ("steps", "", "steps"), values)
    return found


def _calls(base: Side, other: Side) -> Iterator[Difference]:
    """Compare how often calls are made that manage memory."""
    sides = (base, other)
    if any(run.calls is None for side in sides for run in side.runs):
        return
    names = dict.fromkeys(name for side in sides for run in side.runs for name in run.calls or ())
    for name in sorted(names, key=_rank):
        values = tuple(tuple((run.calls or {}).get(name, 0) for run in side.runs) for side in sides)
        yield from _told((base.label, other.label), ("call", name, "calls"), values)


def _rank(name: str) -> tuple[int, str]:
    """Put first what is said about managed memory, and copies last."""
    lowered = name.lower()
    for place, words in enumerate((("prefetch", "advise", "discard", "attach"), ("managed",))):
        if any(word in lowered for word in words):
            return place, name
    return (3 if "memcpy" in lowered or "memset" in lowered else 2), name


def _kernels(base: Side, other: Side) -> Iterator[Difference]:
    """Find kernels that only one of the programs launches."""
    launches = [[plain_launches(run.kernels) for run in side.runs] for side in (base, other)]
    if not all(run for side in launches for run in side):
        return
    labels = (base.label, other.label)
    yield from _of_one_only(labels, ("kernel", "launches"), launches)
    values = tuple(tuple(sum(run.values()) for run in side) for side in launches)
    yield from _told(labels, ("launches", "", "launches"), values)


def _ranges(base: Side, other: Side) -> Iterator[Difference]:
    """Find NVTX ranges that only one of the programs has."""
    ranges = [[run.ranges for run in side.runs] for side in (base, other)]
    known = [[run for run in side if run is not None] for side in ranges]
    if known == ranges:
        yield from _of_one_only((base.label, other.label), ("range", "ranges"), known)


def _of_one_only(
    labels: tuple[str, str],
    about: tuple[str, str],
    counts: Sequence[Sequence[Mapping[str, int]]],
) -> Iterator[Difference]:
    """Tell names that only one side has, of what all runs of both have by name."""
    what, unit = about
    often = [
        {name: max(run.get(name, 0) for run in side) for run in side for name in run}
        for side in counts
    ]
    only = {**often[0], **often[1]}
    for name in often[0].keys() & often[1].keys():
        del only[name]
    for name in sorted(only, key=lambda name: (-only[name], name))[:_MOST_NAMES]:
        values = tuple(tuple(run.get(name, 0) for run in side) for side in counts)
        yield from _told(labels, (what, name, unit), values)


def _is_full(*sides: Side) -> bool:
    """Say whether a GPU was full in a run."""
    return any("observed_factor" in run.memory for side in sides for run in side.runs)


def _fullness(base: Side, other: Side) -> Iterator[Difference]:
    """Say that the GPU is full in one condition only: pages are evicted in all of its runs and in none of the other."""
    evicted = [[run.memory.get("evicted_bytes") for run in side.runs] for side in (base, other)]
    full = [all(side) and None not in side for side in evicted]
    never = [all(value == 0 for value in side) for side in evicted]
    for mine, label in enumerate((base.label, other.label)):
        if not (full[mine] and never[1 - mine]):
            continue
        side = (base, other)[mine]
        factors = [
            run.memory["observed_factor"] for run in side.runs if "observed_factor" in run.memory
        ]
        how = f", managed peak at most {max(factors):.3g} times what it held" if factors else ""
        text = f"GPU memory for managed data: full in {label}, which evicts{how}; never in {(other, base)[mine].label}"
        yield Difference(
            other.label, "full", "", "byte", tuple(evicted[0]), tuple(evicted[1]), text
        )


def _told(
    labels: tuple[str, str], about: tuple[str, str, str], values: tuple[Values, ...]
) -> Iterator[Difference]:
    """Tell a difference, if there is one."""
    base, other = values
    known = [[value for value in side if value is not None] for side in values]
    if not all(known) or not _differ(*known, near=_NEAR.get(about[2], 0.0)):
        return
    what, name, unit = about
    write = _WRITERS.get(unit, lambda value: format_count(round(value)))
    said = [_range(side, write) for side in known]
    label = _LABELS[what].format(name=shortened(name, 60))
    text = f"{label}: {said[0]} in {labels[0]}, {said[1]} in {labels[1]}"
    yield Difference(labels[1], what, name, unit, base, other, text)


def _differ(first: Sequence[float], second: Sequence[float], *, near: float) -> bool:
    """Say whether no value of one is among those of the other, nor nearly."""
    gap = max(min(first) - max(second), min(second) - max(first))
    return gap > near * max(map(abs, (*first, *second)))


def _range(values: Sequence[float], write: Callable[[float], str]) -> str:
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low} to {high}"


_WRITERS: Final[Mapping[str, Callable[[float], str]]] = {
    "byte": format_bytes,
    "number": lambda value: f"{value:.3g}",
    "calls": lambda value: counted(round(value), "call") if value else "none",
    "launches": lambda value: counted(round(value), "launch", "launches") if value else "none",
    "ranges": lambda value: format_count(round(value)) if value else "none",
}
_LABELS: Final = {
    "call": "{name}",
    "kernel": "Kernel {name}",
    "launches": "Kernels",
    "range": "NVTX range {name}",
    "managed_allocations": "Managed allocations",
    "managed_bytes": "Managed bytes allocated",
    "gpu_memory": "GPU memory",
    "room": "GPU memory that is left for managed data",
    "oversubscription_factor": "Oversubscription factor (managed peak / room)",
    "observed_factor": "Managed peak over what a full GPU held of it, at most",
    "steps": "Steps",
}


def _of_summary(part: str, key: str) -> Callable[[Profile], float | None]:
    return lambda run: run.summary[part][key]


def _of_memory(key: str) -> Callable[[Profile], float | None]:
    return lambda run: run.memory.get(key)


_FIGURES: Final[tuple[tuple[str, str, Callable[[Profile], float | None]], ...]] = (
    ("managed_allocations", "allocations", _of_summary("managed", "n_allocations")),
    ("managed_bytes", "byte", _of_summary("managed", "bytes")),
    ("gpu_memory", "byte", _of_memory("capacity_bytes")),
    ("room", "byte", _of_memory("available_bytes")),
    ("oversubscription_factor", "number", _of_memory("oversubscription_factor")),
    ("observed_factor", "number", _of_memory("observed_factor")),
)
