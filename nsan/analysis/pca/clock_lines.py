"""The straight line between two clocks: offset and drift, from pairs of times that belong together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from nsan.units import NS_PER_US

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

MOST_DRIFT: Final = 500e-6
"""No two clocks of one machine drift more: time services slew a clock by at most this."""

FARTHEST_DRIFT: Final = 2 * MOST_DRIFT
"""A fit may want so much; what wants more than MOST_DRIFT is not believed."""

LIKELY_DRIFT: Final = 100e-6
"""Standard deviation of the drift before anything was compared."""

FEWEST_FOR_DRIFT: Final = 3
"""With one pair or two, a drift would fit whatever the times are."""

_TRUNCATION_RMS_NS: Final = NS_PER_US / 12**0.5
_ROUNDS: Final = 12
_KEPT_SIGMAS: Final = 3.5
_EXACT_MOST_PAIRS: Final = 4096
_ROUNDING_NS: Final = 1.0


@dataclass(frozen=True)
class Line:
    """``trace_ns = at_ns + (wall_ns - wall_at_ns) * (1 + drift)``.

    Attributes
    ----------
    wall_at_ns : int
        A wall time, ns, on the scale of the times that were fitted.
    at_ns : float
        Trace time there.
    drift : float, default 0
        Trace time per wall time, minus 1.
    drift_error : float, default MOST_DRIFT
        Standard error of the drift.
    """

    wall_at_ns: int
    at_ns: float
    drift: float = 0.0
    drift_error: float = MOST_DRIFT

    def away(self, wall_ns: Ints) -> Floats:
        """Give wall times as distances from ``wall_at_ns``."""
        return (wall_ns - self.wall_at_ns).astype(np.float64)

    def ns(self, wall_ns: Ints) -> Floats:
        """Give trace times (ns) of wall times (ns)."""
        away = self.away(wall_ns)
        return self.at_ns + away + away * self.drift

    def moved_to(self, wall_at_ns: int) -> Line:
        """Give the same line with another point named."""
        return replace(self, wall_at_ns=wall_at_ns, at_ns=self.at(wall_at_ns))

    def at(self, wall_ns: int) -> float:
        """Give the trace time (ns) of one wall time (ns)."""
        away = float(wall_ns - self.wall_at_ns)
        return self.at_ns + away + away * self.drift


def spread_of(residuals: Floats) -> float:
    """Give the scatter of residuals (ns) as a standard deviation, from their median distance."""
    if residuals.size == 0:
        return 0.0
    return float(1.4826 * np.median(np.abs(residuals - np.median(residuals))))


def fitted(wall_ns: Ints, trace_ns: Ints, start: Line) -> Line:
    """Fit a line through pairs, far ones left out, by least squares that lean to no drift.

    Parameters
    ----------
    wall_ns, trace_ns : arrays of int, same length, at least one
        Pairs of times, ns; the wall times may all be too early by up to 1 us.
    start : Line
        A line near the result: pairs are judged by their distance from it first.

    Returns
    -------
    Line
        With the median pair as its point; drift 0 where fewer than three pairs are.
    """
    line = start.moved_to(int(np.sort(wall_ns)[wall_ns.size // 2]))
    if wall_ns.size < FEWEST_FOR_DRIFT:
        rest = trace_ns - replace(line, drift=0.0).ns(wall_ns)
        return Line(line.wall_at_ns, line.at_ns + float(rest.mean()))
    away = line.away(wall_ns)
    kept = np.ones(wall_ns.size, np.bool_)
    for _ in range(_ROUNDS):
        rest = trace_ns - line.ns(wall_ns)
        line = _least_squares(line, away[kept], rest[kept])
        rest = np.abs(trace_ns - line.ns(wall_ns))
        scatter = max(1.4826 * float(np.median(rest)), _TRUNCATION_RMS_NS)
        # The limit comes down step by step: while the drift is not yet right, moments far from the
        # bulk are off most, and these tell the drift.
        before, kept = kept, rest <= max(_KEPT_SIGMAS * scatter, float(rest[kept].max()) / 2)
        if np.array_equal(before, kept):
            break
    return line


def _least_squares(line: Line, away: Floats, rest: Floats) -> Line:
    """Correct a line by what is left over."""
    middle, level = float(away.mean()), float(rest.mean())
    apart = away - middle
    square = float((apart**2).sum())
    product = float((apart * (rest - level)).sum())
    change = product / square if square else 0.0
    noise = max(float((rest - level - apart * change).std()), _TRUNCATION_RMS_NS)
    prior = (noise / LIKELY_DRIFT) ** 2
    drift = (product + square * line.drift) / (square + prior)
    drift = min(max(drift, -FARTHEST_DRIFT), FARTHEST_DRIFT)
    at_ns = line.at_ns + level - middle * (drift - line.drift)
    return Line(line.wall_at_ns, at_ns, drift, noise / (square + prior) ** 0.5)


def exactly_fitted(wall_ns: Ints, trace_ns: Ints, line: Line) -> Line:
    """Fit a line to wall times that were cut to whole microseconds, and are exact otherwise.

    Then each pair bounds the line from both sides, 1 us apart, and the middle of what all the bounds
    allow is nearer than least squares come.

    Parameters
    ----------
    wall_ns, trace_ns : arrays of int
        Pairs of times, ns.
    line : Line
        The result of least squares; returned as it is where the pairs are not that exact, or too
        many for it to matter.

    Returns
    -------
    Line
        Its drift is the middle of the drifts that all pairs allow, drawn towards 0 where these are wide.
    """
    if not FEWEST_FOR_DRIFT <= wall_ns.size <= _EXACT_MOST_PAIRS:
        return line
    away, rest = line.away(wall_ns), trace_ns - line.ns(wall_ns)
    room = NS_PER_US * (1 + FARTHEST_DRIFT) + _ROUNDING_NS

    def height(change: float) -> float:
        return float(np.ptp(rest - away * change))

    best = _lowest(away, rest)
    if height(best) > room:
        return line
    low, high = (_edge(height, best, side * FARTHEST_DRIFT, room) for side in (-1, 1))
    width = (high - low) / 12**0.5
    trust = LIKELY_DRIFT**2 / (LIKELY_DRIFT**2 + width**2)
    wanted = (line.drift + (low + high) / 2) * trust - line.drift
    change = min(max(wanted, low), high)
    left = rest - away * change
    return replace(
        line,
        at_ns=line.at_ns + float(left.max() + left.min()) / 2,
        drift=line.drift + change,
        drift_error=max(width, 1e-12),
    )


def _lowest(away: Floats, rest: Floats) -> float:
    """Find the change of drift that leaves the least between the highest and the lowest residual."""
    low, high = -FARTHEST_DRIFT, FARTHEST_DRIFT
    for _ in range(
        60
    ):  # the height is convex: each round keeps the two thirds with the lowest point
        third = (high - low) / 3
        left, right = low + third, high - third
        if np.ptp(rest - away * left) < np.ptp(rest - away * right):
            high = right
        else:
            low = left
    return (low + high) / 2


def _edge(height: Callable[[float], float], inside: float, outside: float, room: float) -> float:
    """Find where a height that grows from inside to outside passes the room there is."""
    if height(outside) <= room:
        return outside
    for _ in range(40):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if height(middle) <= room else (inside, middle)
    return inside
