"""Moments that two records of one run share, found by what happened and not by when.

The same thing happens many times (a segment is released and allocated again at its address), so each
moment of one side has many of the other that may be it. Votes for the offset between the clocks
find the few offsets worth a look; from there a line is followed outwards, as far as its drift is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from nsan.analysis.pca.clock_lines import (
    MOST_DRIFT,
    Flags,
    Floats,
    Ints,
    Line,
    exactly_fitted,
    fitted,
    spread_of,
)

TOLERANCE_NS: Final = 100_000
"""Farthest that two stamps of one moment are apart: real ones differ by up to some tens of us, and runs
of the same program by milliseconds."""

LEAST_TOLERANCE_NS: Final = 3_000
_TIGHT_SIGMAS: Final = 6
_WINDOW: Final = 192
_PLACES: Final = (0.0, 0.5, 0.25, 0.75, 1.0)
_VOTES: Final = 200_000
_CANDIDATES: Final = 4
_SAMPLE: Final = 3_000
_ENOUGH: Final = 0.9
_BIASED_NS: Final = 2_000


@dataclass(frozen=True)
class Keys:
    """How kind and time become one number: times outside of the span count as just outside."""

    first: int
    span: int
    step: int
    unit: int

    def of(self, what: Ints, ns: Ints) -> Ints:
        """Give the numbers."""
        inside = np.clip(ns - self.first, 0, self.span - 1)
        keys: Ints = what * self.step + (inside if self.unit == 1 else inside // self.unit)
        return keys


@dataclass(frozen=True)
class Side:
    """Moments of one record, by what happened and then by time.

    Attributes
    ----------
    what : array of int
        Number of what happened; the same number on both sides.
    ns : array of int
        When, ns on the clock of this side; of the snapshot from a moment in its history, because
        a float64 holds ns since 1970 only to some hundreds.
    is_first : array of bool
        It is the beginning of something (an allocation, a start), not the end.
    """

    what: Ints
    ns: Ints
    is_first: Flags

    def __post_init__(self) -> None:
        """Put the moments in order."""
        order = np.lexsort((self.ns, self.what))
        for name in ("what", "ns", "is_first"):
            object.__setattr__(self, name, getattr(self, name)[order])

    def __len__(self) -> int:
        """Count the moments."""
        return int(self.what.size)

    @cached_property
    def keys(self) -> tuple[Ints, Keys]:
        """What and when in one number each, in whose order a search finds the nearest; and how."""
        first = int(self.ns.min()) - 1
        span = int(self.ns.max()) - first + 2
        # Coarser where one number cannot hold both.
        unit = 1 + span * (int(self.what[-1]) + 1) // (1 << 62)
        keys = Keys(first, span, span // unit + 1, unit)
        return keys.of(self.what, self.ns), keys

    def only(self, kept: Flags | Ints) -> Side:
        """Give some of the moments."""
        return Side(self.what[kept], self.ns[kept], self.is_first[kept])


@dataclass(frozen=True)
class Pairs:
    """Which moments are one: places in the snapshot's side and in the trace's."""

    snapshot: Ints
    trace: Ints

    def __len__(self) -> int:
        """Count the pairs."""
        return int(self.snapshot.size)

    def only(self, kept: Flags) -> Pairs:
        """Give some of the pairs."""
        return Pairs(self.snapshot[kept], self.trace[kept])


def pairs_of(snapshot: Side, trace: Side, line: Line, tolerance: Floats | float) -> Pairs:
    """Pair each moment with the nearest of the same kind; of two that want the same, the nearer has it.

    Parameters
    ----------
    snapshot, trace : Side
        The moments.
    line : Line
        Turns the snapshot's times into the trace's.
    tolerance : float, or array of float per moment of the snapshot
        Farthest distance, ns.

    Returns
    -------
    Pairs
        In order of the snapshot's side; no moment is in two.
    """
    if not len(snapshot) or not len(trace):
        return Pairs(np.empty(0, np.int64), np.empty(0, np.int64))
    there = np.rint(line.ns(snapshot.ns)).astype(np.int64)
    nearest, distance = _nearest(snapshot.what, there, trace)
    mine = np.flatnonzero(distance <= tolerance)
    mine = mine[_are_nearest(nearest[mine], distance[mine])]
    return Pairs(mine, nearest[mine])


def _are_nearest(wanted: Ints, distance: Floats) -> Ints:
    """Give the first nearest of all that want the same; these are beside each other.

    Both sides are in the order of kind and time, and a line keeps that order.
    """
    starts = np.flatnonzero(np.append(True, wanted[1:] != wanted[:-1])[: wanted.size])
    if starts.size == wanted.size:
        return starts
    counts = np.diff(np.append(starts, wanted.size))
    least = np.repeat(np.minimum.reduceat(distance, starts), counts)
    nearest = np.flatnonzero(distance == least)
    is_first = np.append(True, wanted[nearest][1:] != wanted[nearest][:-1])
    kept: Ints = nearest[is_first]
    return kept


def _nearest(what: Ints, ns: Ints, trace: Side) -> tuple[Ints, Floats]:
    """Find the nearest moment of the same kind in the trace, and how far it is; infinite: none."""
    known, keys = trace.keys
    after = np.searchsorted(known, keys.of(what, ns))
    left, right = np.maximum(after - 1, 0), np.minimum(after, known.size - 1)
    to_left, to_right = (
        np.where(trace.what[at] == what, np.abs(ns - trace.ns[at]), np.inf) for at in (left, right)
    )
    is_left = to_left <= to_right
    return np.where(is_left, left, right), np.where(is_left, to_left, to_right)


def best_line(snapshot: Side, trace: Side, expected: Line | None) -> Line | None:
    """Find the line under which most moments of the two sides meet.

    Parameters
    ----------
    snapshot, trace : Side
        The moments.
    expected : Line, optional
        What the clocks themselves say; decides between lines that fit equally well.

    Returns
    -------
    Line or None
        A line good enough to be fitted to all moments; None: nothing happened on both sides.
    """
    known = snapshot.only(np.isin(snapshot.what, trace.what))
    if not len(known):
        return None
    step = max(len(known) // _SAMPLE, 1)
    sample = known.only(np.argsort(known.ns, kind="stable")[::step])
    found: list[tuple[int, float, float, Line]] = []
    for seeds in _seeds(known, trace):
        for seed in seeds:
            line = _followed(sample, trace, seed)
            met = under(sample, trace, line)
            off = 0.0 if expected is None else abs(line.at_ns - expected.at(line.wall_at_ns))
            found.append((len(met.pairs), spread_of(met.residuals), off, line))
        if max(count for count, *_ in found) >= _ENOUGH * len(sample):
            break
    most = max(count for count, *_ in found)
    good = [each for each in found if each[0] >= 0.98 * most]
    least = min(each[1] for each in good)
    near = [each for each in good if each[1] <= 1.2 * least + 200]
    return min(near, key=lambda each: each[2])[3]


def _seeds(snapshot: Side, trace: Side) -> Iterator[list[Line]]:
    """Find offsets that many moments of some stretch of the snapshot vote for, place by place."""
    order = np.argsort(snapshot.ns, kind="stable")
    low = np.searchsorted(trace.what, snapshot.what)
    n_each = np.searchsorted(trace.what, snapshot.what, side="right") - low
    seen: set[int] = set()
    for place in _PLACES:
        start = int(place * max(order.size - _WINDOW, 0))
        if start in seen:
            continue
        seen.add(start)
        mine = order[start : start + _WINDOW]
        mine = mine[np.argsort(n_each[mine], kind="stable")]
        within = np.cumsum(n_each[mine]) <= _VOTES
        within[0] = True
        yield _voted(snapshot.ns, trace.ns, low, n_each, mine[within])


def _voted(ns: Ints, trace_ns: Ints, low: Ints, n_each: Ints, mine: Ints) -> list[Line]:
    """Count the offsets of all pairs that may be one, and give the densest."""
    count = n_each[mine]
    first = np.repeat(low[mine] - (np.cumsum(count) - count), count)
    votes = trace_ns[first + np.arange(first.size)] - np.repeat(ns[mine], count)
    votes.sort()
    middle = int((ns[mine].max() + ns[mine].min()) // 2)
    drifted = MOST_DRIFT * float(ns[mine].max() - ns[mine].min())
    width = int(TOLERANCE_NS + drifted)
    lines = []
    for _ in range(_CANDIDATES):
        if not votes.size:
            break
        near = _densest(votes, width)
        lines.append(Line(middle, middle + float(_core(near, drifted))))
        votes = votes[(votes < near[0] - width) | (votes > near[-1] + width)]
    return lines


def _densest(votes: Ints, width: int) -> Ints:
    """Give the votes in the window of this width that holds most; votes are in order."""
    until = np.searchsorted(votes, votes + width, side="right")
    first = int(np.argmax(until - np.arange(votes.size)))
    return votes[first : until[first]]


def _core(votes: Ints, drifted: float) -> float:
    """Give the middle of a cluster, narrowed while half of the votes stay."""
    width = int(votes[-1] - votes[0])
    while width > 2 * LEAST_TOLERANCE_NS + drifted:
        width //= 2
        core = _densest(votes, width)
        if 2 * core.size < votes.size:
            break
        votes = core
    return float(np.median(votes))


def _followed(snapshot: Side, trace: Side, line: Line) -> Line:
    """Follow a line outwards from its point: as far as the drift is known, then fit, then farther."""
    away = np.abs(line.away(snapshot.ns))
    reach, farthest = TOLERANCE_NS / MOST_DRIFT, float(away.max())
    while True:
        inside = away <= reach
        near = snapshot.only(inside)
        if len(near):
            line = _refitted(near, trace, line)
        if reach >= farthest:
            return line
        away = np.abs(line.away(snapshot.ns))
        reach *= 2


def _refitted(snapshot: Side, trace: Side, line: Line) -> Line:
    """Pair within what the drift's error leaves open, and fit."""
    doubt = np.minimum(4 * line.drift_error, MOST_DRIFT)
    open_ns = TOLERANCE_NS + np.abs(line.away(snapshot.ns)) * doubt
    pairs = pairs_of(snapshot, trace, line, open_ns)
    if not len(pairs):
        return line
    return fitted(snapshot.ns[pairs.snapshot], trace.ns[pairs.trace], line)


@dataclass(frozen=True)
class Meeting:
    """How two sides meet: the line, the pairs within its tolerance, and what is left over (ns)."""

    line: Line
    pairs: Pairs
    residuals: Floats
    tolerance_ns: float


def meeting(snapshot: Side, trace: Side, line: Line) -> Meeting:
    """Fit a line to all moments, with a tolerance that follows from how well they fit.

    Parameters
    ----------
    snapshot, trace : Side
        The moments.
    line : Line
        Near the result.

    Returns
    -------
    Meeting
        The pairs are those within the tolerance: six standard deviations, at least 3 us, at most
        100 us. Ends that are late as a whole (a release that waits for the GPU) do not count
        in the fit where there are enough beginnings.
    """
    tolerance: float = TOLERANCE_NS
    for _ in range(3):
        pairs = pairs_of(snapshot, trace, line, tolerance)
        if not len(pairs):
            break
        counted = pairs.only(_unbiased(snapshot, trace, line, pairs))
        wall_ns, trace_ns = snapshot.ns[counted.snapshot], trace.ns[counted.trace]
        line = fitted(wall_ns, trace_ns, line)
        scatter = spread_of(trace_ns - line.ns(wall_ns))
        tolerance = min(max(_TIGHT_SIGMAS * scatter, LEAST_TOLERANCE_NS), TOLERANCE_NS)
    pairs = pairs_of(snapshot, trace, line, tolerance)
    if len(pairs):
        counted = pairs.only(_unbiased(snapshot, trace, line, pairs))
        line = exactly_fitted(snapshot.ns[counted.snapshot], trace.ns[counted.trace], line)
    return under(snapshot, trace, line, tolerance)


def under(snapshot: Side, trace: Side, line: Line, tolerance_ns: float = TOLERANCE_NS) -> Meeting:
    """Pair the moments under a line that stays as it is.

    Parameters
    ----------
    snapshot, trace : Side
        The moments.
    line : Line
        The mapping.
    tolerance_ns : float, default TOLERANCE_NS
        Farthest distance, ns.

    Returns
    -------
    Meeting
        The pairs, and what the line leaves over of each.
    """
    pairs = pairs_of(snapshot, trace, line, tolerance_ns)
    rest = trace.ns[pairs.trace] - line.ns(snapshot.ns[pairs.snapshot])
    return Meeting(line, pairs, rest, tolerance_ns)


def _unbiased(snapshot: Side, trace: Side, line: Line, pairs: Pairs) -> Flags:
    """Leave the ends out where they are late, or early, as a whole."""
    first = snapshot.is_first[pairs.snapshot]
    if first.sum() < 3 or first.all():
        return np.ones(len(pairs), np.bool_)
    rest = trace.ns[pairs.trace] - line.ns(snapshot.ns[pairs.snapshot])
    late = abs(float(np.median(rest[~first]) - np.median(rest[first])))
    return first if late > _BIASED_NS else np.ones(len(pairs), np.bool_)
