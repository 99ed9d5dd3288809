"""What the host's calls say about a mapping between clocks: while it waits in one, it allocates nothing.

The entries of a history lie between the calls of the CUDA API, all along the run, while
segments are made in its first seconds only. Where these alone leave the drift open, the entries
bound it; and where a history of another run would have the host allocate during a long wait, it is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import erf, exp, pi, sqrt
from typing import Final

import numpy as np
import polars as pl

from nsan.analysis.pca.clock_lines import FARTHEST_DRIFT, MOST_DRIFT, Flags, Floats, Ints, Line
from nsan.analysis.pca.clock_pairs import TOLERANCE_NS

_ROUGHNESS_NS: Final = 510.0
"""Half a microsecond of truncation, and rounding."""

_FEWEST: Final = 16
_ENTRIES: Final = 2_000
_SPANS: Final = 1_000_000
_SIGMAS: Final = 4.0
_MOSTLY: Final = 0.9
_QUARTER: Final = 0.25
_WAIT_NS: Final = 10 * TOLERANCE_NS


@dataclass(frozen=True)
class Host:
    """What one process did on the host.

    Attributes
    ----------
    entries : array of int
        Times of the history's entries, ns on the snapshot's clock, in order; none where it has no
        allocations but only segments.
    busy_starts, busy_ends : arrays of int
        Times in which some thread is in a call of the API, in order; they may touch, trace ns.
    wait_starts, wait_ends : arrays of int
        Calls of 1 ms and more during which no other thread of the process begins or ends one.
    """

    entries: Ints
    busy_starts: Ints
    busy_ends: Ints
    wait_starts: Ints
    wait_ends: Ints

    @property
    def can_tell(self) -> bool:
        """There are enough entries and calls to judge by."""
        return min(self.entries.size, self.busy_starts.size) >= _FEWEST


def host_of(entries: Ints, api_calls: pl.DataFrame | None, pid: int | None) -> Host:
    """Collect what a process did on the host.

    Parameters
    ----------
    entries : array of int
        Times of the history's entries, ns on the snapshot's clock.
    api_calls : DataFrame or None
        Reads ``start_ns``, ``end_ns``, ``pid``, ``tid``.
    pid : int or None
        The process; None: one that is not known.

    Returns
    -------
    Host
        Without calls where none were recorded.
    """
    none = np.empty(0, np.int64)
    if api_calls is None:
        return Host(np.sort(entries), none, none, none, none)
    calls = (
        api_calls.filter(pl.col("pid").eq_missing(pl.lit(pid, pl.UInt32)))
        .select("start_ns", "end_ns", "tid")
        .drop_nulls(["start_ns", "end_ns"])
        .sort("start_ns", "end_ns")
    )
    starts, ends = calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy()
    if not starts.size:
        return Host(np.sort(entries), none, none, none, none)
    reached = np.maximum.accumulate(ends)
    is_new = np.append(True, starts[1:] >= reached[:-1])
    last = np.append(np.flatnonzero(is_new)[1:] - 1, starts.size - 1)
    waits = calls.filter(pl.Series(_waits(calls)))
    return Host(
        np.sort(entries),
        starts[is_new],
        reached[last],
        waits["start_ns"].to_numpy(),
        waits["end_ns"].to_numpy(),
    )


def _waits(calls: pl.DataFrame) -> Flags:
    """Mark long calls during which no other thread begins or ends a call."""
    starts, ends = calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy()
    tids = calls["tid"].fill_null(0).to_numpy()
    long: Flags = ends - starts >= _WAIT_NS
    if np.unique(tids).size == 1:
        return long
    alone: Flags = long.copy()
    for tid in np.unique(tids[long]):
        edges = np.sort(np.concatenate([starts[tids != tid], ends[tids != tid]]))
        mine = long & (tids == tid)
        first = np.searchsorted(edges, starts[mine])
        alone[mine] = first == np.searchsorted(edges, ends[mine], side="right")
    return alone


def entries_in_waits(host: Host, line: Line) -> tuple[int, int]:
    """Count the entries that a mapping puts inside a wait of the host, where none can be.

    Parameters
    ----------
    host : Host
        What the process did.
    line : Line
        The mapping.

    Returns
    -------
    (int, int)
        Entries inside a wait by more than 100 us, and entries while calls were recorded.
    """
    if not host.can_tell:
        return 0, 0
    ns = line.ns(host.entries)
    ns = ns[(ns >= host.busy_starts[0]) & (ns <= host.busy_ends[-1])]
    if not host.wait_starts.size:
        return 0, int(ns.size)
    # A wait inside a wait (a call of the driver's API in one of the runtime) adds nothing.
    last = np.searchsorted(host.wait_starts, ns - TOLERANCE_NS, side="right") - 1
    reached = np.maximum.accumulate(host.wait_ends)
    inside = (last >= 0) & (ns + TOLERANCE_NS < reached[np.maximum(last, 0)])
    return int(inside.sum()), int(ns.size)


def goes_on_elsewhere(host: Host, line: Line) -> bool:
    """Say whether a mapping has the host busy without entries, and many entries after the trace.

    A program may make calls without allocating, and a trace may end before its program does. Both, each
    for a quarter and more, mean that the history is that of a run with other times.

    Parameters
    ----------
    host : Host
        What the process did.
    line : Line
        The mapping.

    Returns
    -------
    bool
        False too where the calls of the host cannot tell.
    """
    if not host.can_tell:
        return False
    ns = line.ns(host.entries)
    n_after = int((ns > host.busy_ends[-1] + _WAIT_NS).sum())
    short = host.busy_ends - host.busy_starts < _WAIT_NS
    within = short & (host.busy_starts > ns[0]) & (host.busy_ends < ns[-1])
    starts, ends = host.busy_starts[within] - _WAIT_NS, host.busy_ends[within] + _WAIT_NS
    n_silent = int((np.searchsorted(ns, starts) == np.searchsorted(ns, ends)).sum())
    return min(n_after, n_silent) >= _FEWEST and (
        n_after >= _QUARTER * ns.size and n_silent >= _QUARTER * starts.size
    )


def between_calls(host: Host, line: Line, scatter_ns: float) -> Line:
    """Make offset and drift better by putting the entries between the host's calls.

    Parameters
    ----------
    host : Host
        What the process did.
    line : Line
        As the pairs give it, with the middle of these as its point.
    scatter_ns : float
        Scatter of the pairs, ns.

    Returns
    -------
    Line
        The mapping, moved within its error to where most entries lie between calls; as it
        was where there are too few of them, or where entries lie inside calls all the same (several
        threads).
    """
    if not host.can_tell:
        return line
    ns = line.ns(host.entries)
    inside = (ns >= host.busy_starts[0]) & (ns <= host.busy_ends[-1])
    entries = host.entries[inside]
    if entries.size < _FEWEST:
        return line
    entries = entries[:: max(entries.size // _ENTRIES, 1)]
    doubt = max(scatter_ns, _ROUGHNESS_NS / 2)
    for _ in range(2):
        line, _unused = _turned(host, entries, line, _ROUGHNESS_NS + 2 * doubt)
        line, doubt = _shifted(host, entries, line, doubt)
    return _turned(host, entries, line, _ROUGHNESS_NS)[0]


def _turned(host: Host, entries: Ints, line: Line, slack: float) -> tuple[Line, float]:
    """Correct the drift, the point of the line staying where it is."""
    away = line.away(entries)
    error = min(line.drift_error, MOST_DRIFT / 2)
    far = np.abs(away) * error > _ROUGHNESS_NS / _SIGMAS
    found = _voted(host, line.ns(entries)[far], away[far], error, slack)
    if found is None:
        return line, error
    drift = min(max(line.drift + found[0], -FARTHEST_DRIFT), FARTHEST_DRIFT)
    return replace(line, drift=drift, drift_error=found[1]), found[1]


def _shifted(host: Host, entries: Ints, line: Line, doubt: float) -> tuple[Line, float]:
    """Correct the offset, the drift staying as it is."""
    found = _voted(host, line.ns(entries), np.ones(entries.size), doubt, _ROUGHNESS_NS)
    if found is None:
        return line, doubt
    return replace(line, at_ns=line.at_ns + found[0]), max(found[1], 1.0)


def _voted(
    host: Host, ns: Floats, lever: Floats, error: float, slack: float
) -> tuple[float, float] | None:
    """Find the change, in units of the levers, under which most entries lie between calls.

    Parameters
    ----------
    host : Host
        What the process did.
    ns, lever : arrays of float
        Where each entry is, trace ns, and how far a change of 1 moves it.
    error : float
        Standard error of the change, which is 0 before.
    slack : float
        How far, ns, an entry may be inside a call.

    Returns
    -------
    (float, float) or None
        Mean and standard deviation of the change, given its error and where the votes are best; None:
        they cannot tell.
    """
    if ns.size < _FEWEST:
        return None
    reach = np.abs(lever) * error * _SIGMAS + slack
    # Gap i is before busy time i; the last one is after all.
    first = np.searchsorted(host.busy_ends, ns - reach, side="left")
    last = np.searchsorted(host.busy_starts, ns + reach, side="right")
    count = np.maximum(last - first + 1, 0)
    if count.sum() > _SPANS:
        step = int(np.ceil(count.sum() / _SPANS))
        if ns.size // step < _FEWEST:
            return None
        ns, lever, first, count = ns[::step], lever[::step], first[::step], count[::step]
    entry = np.repeat(np.arange(ns.size), count)
    gap = np.arange(entry.size) - np.repeat(np.cumsum(count) - count, count) + first[entry]
    far = np.float64(1 << 62)
    lows = np.append(-far, host.busy_ends)[gap] - slack - ns[entry]
    highs = np.append(host.busy_starts, far)[gap] + slack - ns[entry]
    return _best(_merged(entry, lows / lever[entry], highs / lever[entry]), ns.size, error)


def _merged(entry: Ints, one: Floats, other: Floats) -> tuple[Floats, Floats]:
    """Join spans of one entry that overlap: it has one vote for each change."""
    low, high = np.minimum(one, other), np.maximum(one, other)
    order = np.lexsort((low, entry))
    low, high, entry = low[order], high[order], entry[order]
    # Gaps do not overlap, and slack reaches only into the next: cut it where the next begins.
    same = entry[1:] == entry[:-1]
    high[:-1] = np.where(same, np.minimum(high[:-1], low[1:]), high[:-1])
    return low, high


def _best(spans: tuple[Floats, Floats], n_entries: int, error: float) -> tuple[float, float] | None:
    """Give mean and deviation of the change where the spans overlap most."""
    low, high = spans
    edges = np.concatenate([low, high])
    order = np.argsort(edges, kind="stable")
    steps = np.concatenate([np.ones(low.size, np.int64), -np.ones(high.size, np.int64)])
    edges, votes = edges[order], np.cumsum(steps[order])
    limit = _SIGMAS * error
    until = np.append(edges[1:], edges[-1])
    reachable = (until > -limit) & (edges < limit) & (until > edges)
    if not reachable.any():
        return None
    most = int(votes[reachable].max())
    if most < _MOSTLY * n_entries:
        return None
    enough = reachable & (votes >= most - 2 * sqrt(n_entries - most + 0.25))
    return _cut_normal(float(edges[enough].min()), float(until[enough].max()), error)


def _cut_normal(low: float, high: float, error: float) -> tuple[float, float]:
    """Give mean and deviation of a normal distribution around 0 of which only a part is possible."""
    low, high = max(low, -_SIGMAS * error) / error, min(high, _SIGMAS * error) / error
    mass = (erf(high / sqrt(2)) - erf(low / sqrt(2))) / 2
    width: Callable[[], tuple[float, float]] = lambda: (  # noqa: E731
        (low + high) / 2 * error,
        (high - low) / 12**0.5 * error,
    )
    if mass < 1e-6:
        return width()
    at_low, at_high = exp(-low * low / 2) / sqrt(2 * pi), exp(-high * high / 2) / sqrt(2 * pi)
    mean = (at_low - at_high) / mass
    variance = 1 + (low * at_low - high * at_high) / mass - mean * mean
    return mean * error, sqrt(max(variance, ((high - low) ** 2) * 1e-4, 1e-12)) * error
