"""Kernels of two programs put beside each other: what both launch, and what was only renamed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Final

_ALIKE: Final = 0.6
"""Likeness of two names, from 0 to 1, above which one is the other renamed."""

_MOST_NAMES: Final = 40
"""Kernels of a side that are looked through for renamed ones, the most frequent first."""

_LONGEST: Final = 200
_PARAMETERS: Final = re.compile(r"[<(].*", re.DOTALL)


def plain_launches(kernels: Mapping[str, int]) -> dict[str, int]:
    """Count launches by name without parameters, of templates and calls.

    Parameters
    ----------
    kernels : mapping of str to int
        Launches by whole name.

    Returns
    -------
    dict of str to int
        Names that are nothing else stay as they are.

    Examples
    --------
    >>> plain_launches({"void gemm<float, 64>(float *)": 2, "gemm<float, 128>(float *)": 3})
    {'gemm': 5}
    """
    counts: dict[str, int] = {}
    for name, n in kernels.items():
        plain = _PARAMETERS.sub("", name.removeprefix("void ")).strip() or name
        counts[plain] = counts.get(plain, 0) + n
    return counts


def launch_shares(runs: Iterable[Mapping[str, int]]) -> dict[str, float]:
    """Say which share of its launches each kernel has in a program.

    Parameters
    ----------
    runs : iterable of mapping
        Launches by whole name, run by run.

    Returns
    -------
    dict of str to float
        By plain name, the most frequent first; they add up to 1.
    """
    counts: dict[str, int] = {}
    for run in runs:
        for name, n in plain_launches(run).items():
            counts[name] = counts.get(name, 0) + n
    whole = sum(counts.values())
    return {name: n / whole for name, n in sorted(counts.items(), key=lambda item: -item[1])}


def in_common(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Say which share of their launches two programs have in common.

    Parameters
    ----------
    first, second : mapping of str to float
        Of :func:`launch_shares`.

    Returns
    -------
    float
        0 to 1.

    Examples
    --------
    >>> in_common({"a": 0.5, "b": 0.5}, {"a": 0.25, "c": 0.75})
    0.25
    """
    return sum(min(share, second.get(name, 0.0)) for name, share in first.items())


def with_old_names(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Give kernels that look like renamed ones the name that they had.

    Parameters
    ----------
    first, second : mapping of str to float
        Of :func:`launch_shares`.

    Returns
    -------
    dict of str to float
        The second, with names of the first where two are alike; each old name is given once.

    Examples
    --------
    >>> with_old_names({"add_kernel": 1.0}, {"add_kernel_v2": 1.0})
    {'add_kernel': 1.0}
    """
    left = [name for name in first if name not in second][:_MOST_NAMES]
    new = [name for name in second if name not in first][:_MOST_NAMES]
    pairs = sorted(((_likeness(a, b), a, b) for a in left for b in new), reverse=True)
    names: dict[str, str] = {}
    for alike, old, name in pairs:
        if alike >= _ALIKE and name not in names and old not in names.values():
            names[name] = old
    return {names.get(name, name): share for name, share in second.items()}


def _likeness(first: str, second: str) -> float:
    return SequenceMatcher(None, first[:_LONGEST], second[:_LONGEST], autojunk=False).ratio()
