"""The repeating part of a sequence of kernels: the smallest period that covers most of it.

A candidate period is compared with the whole sequence shifted by it, at once. Candidates are the usual
distances between equal short pieces of the sequence, so their number is bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Codes = NDArray[np.uint64]
    Places = NDArray[np.int64]

_PIECES: Final = (1, 2, 4, 16, 64)
"""Lengths of the pieces whose distances are looked at."""

_PER_PIECE: Final = 24
"""Most frequent distances taken for each length."""

_MIX: Final = 0x9E37_79B9_7F4A_7C15
_SCHEMA: Final = {
    "name": pl.String,
    "n_period_kernels": pl.Int64,
    "coverage_fraction": pl.Float64,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "step_id": pl.Int64,
}


def repeats(work: pl.DataFrame, *, coverage: float = 0.8) -> pl.DataFrame:
    """Cut the kernels of one GPU into repeats of their sequence.

    Parameters
    ----------
    work : DataFrame
        Kernels of one GPU: ``name``, ``start_ns``, ``end_ns``, in any order.
    coverage : float, default 0.8
        Share of the kernels that must lie in repeats.

    Returns
    -------
    DataFrame
        One row per repeat, by start: ``name`` (of its first kernel), ``n_period_kernels``,
        ``coverage_fraction`` (kernels in repeats over all), ``start_ns``, ``end_ns`` (the start of the
        next repeat if it follows at once, else the end of its kernels), ``step_id``. No row if no
        sequence repeats. A repeat begins where the GPU is usually idle longest.
    """
    import numpy as np

    ordered = work.sort("start_ns", "end_ns", "name")
    names = ordered["name"].fill_null("").rank("dense").cast(pl.UInt64).to_numpy()
    period = smallest_period(names, coverage=coverage)
    if period is None:
        return pl.DataFrame(schema=_SCHEMA)
    starts = ordered["start_ns"].to_numpy()
    reach = np.maximum.accumulate(ordered["end_ns"].to_numpy())
    first = _first_of_step(names, starts, reach, period)
    found = _occurrences(names, first, period)
    last = found + period - 1
    after = np.minimum(found + period, len(names) - 1)
    at_once = np.append(found[1:] == last[:-1] + 1, [False])
    ends = np.where(at_once, starts[after], np.maximum(reach[last], starts[found] + 1))
    return pl.DataFrame(
        {
            "name": ordered["name"].gather(found),
            "n_period_kernels": np.full(len(found), period),
            "coverage_fraction": np.full(len(found), len(found) * period / len(names)),
            "start_ns": starts[found],
            "end_ns": ends,
            "step_id": np.arange(len(found)),
        },
        schema=_SCHEMA,
    )


def smallest_period(codes: Codes, *, coverage: float = 0.8) -> int | None:
    """Find the smallest distance at which most of a sequence repeats.

    Parameters
    ----------
    codes : ndarray of uint64
        The sequence, equal numbers for equal names.
    coverage : float, default 0.8
        Share of the sequence that must lie in stretches of at least two repeats; and of the different
        names that come more than once. A layer that fills most of a step is not the step.

    Returns
    -------
    int or None
        The period; None if there is none.
    """
    import numpy as np

    names, counts = np.unique(codes, return_counts=True)
    again = names[counts > 1]
    for period in _candidates(codes):
        inside = _periodic(codes, period)
        if inside.sum() < coverage * len(codes):
            continue
        if np.isin(again, codes[inside]).sum() >= coverage * len(again):
            return int(period)
    return None


def _candidates(codes: Codes) -> Places:
    """List distances between equal pieces of the sequence, the frequent ones, in ascending order."""
    import numpy as np

    n = len(codes)
    found = [np.empty(0, np.int64)]
    for length in _PIECES:
        if n < 2 * length:
            break
        pieces = _windows(codes, length)
        order = np.argsort(pieces, kind="stable")
        same = pieces[order][1:] == pieces[order][:-1]
        gaps, counts = np.unique(np.diff(order)[same], return_counts=True)
        found.append(gaps[np.argsort(-counts, kind="stable")[:_PER_PIECE]])
    every = np.unique(np.concatenate(found))
    return every[every <= n // 2]


def _windows(codes: Codes, length: int) -> Codes:
    """Hash each piece of a length: equal pieces have equal numbers."""
    import numpy as np

    # By doubling: a piece is two shorter ones.
    with np.errstate(over="ignore"):
        hashed = codes.astype(np.uint64) * np.uint64(_MIX)
        size, left = 1, length
        whole: Codes | None = None
        offset = 0
        while left:
            if left & 1:
                part = hashed[offset:]
                whole = part if whole is None else _mixed(whole[: len(part)], part)
                offset += size
            left >>= 1
            if left:
                hashed = _mixed(hashed[:-size], hashed[size:])
                size *= 2
    n = len(codes) - length + 1
    return hashed[:n] if whole is None else whole[:n]


def _mixed(first: Codes, second: Codes) -> Codes:
    import numpy as np

    both = (first ^ (first >> np.uint64(29))) * np.uint64(_MIX) + second
    return both ^ (both >> np.uint64(32))


def _periodic(codes: Codes, period: int) -> NDArray[np.bool_]:
    """Mark what lies in a stretch of at least two repeats of the period."""
    import numpy as np

    n = len(codes)
    equal = np.concatenate([[False], codes[period:] == codes[:-period], [False]])
    edges = np.flatnonzero(equal[1:] != equal[:-1])
    begins, ends = edges[::2], edges[1::2]
    long = ends - begins >= period
    marks = np.zeros(n + 1, np.int64)
    np.add.at(marks, begins[long], 1)
    np.add.at(marks, ends[long] + period, -1)
    return marks.cumsum()[:n] > 0


def _first_of_step(codes: Codes, starts: Places, reach: Places, period: int) -> int:
    """Choose where a step begins: before the longest usual idle time in the first long stretch."""
    import numpy as np

    inside = _periodic(codes, period)
    begin = int(np.argmax(inside))
    end = int(begin + np.argmin(np.append(inside[begin:], [False])))
    idle = np.zeros(len(codes), np.int64)
    idle[1:] = np.maximum(starts[1:] - reach[:-1], 0)
    n_repeats = (end - begin) // period
    by_phase = idle[begin : begin + n_repeats * period].reshape(n_repeats, period)
    usual = np.median(by_phase[1:] if n_repeats > 1 else by_phase, axis=0)
    phase = int(np.argmax(usual))
    # The last whole step of the stretch must still fit in.
    return begin + (phase if begin + phase + period <= end else 0)


def _occurrences(codes: Codes, first: int, period: int) -> Places:
    """List where the sequence of one step occurs, in order, none over another."""
    import numpy as np

    pieces = _windows(codes, period)
    found = np.flatnonzero(pieces == pieces[first])
    if not (np.diff(found) < period).any():
        return found
    chosen, at = [], 0
    while at < len(found):
        chosen.append(found[at])
        at = int(np.searchsorted(found, found[at] + period))
    return np.array(chosen, np.int64)
