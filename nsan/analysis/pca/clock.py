"""The snapshot's wall clock and the trace's clock, aligned: by what both saw, and refused where that differs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import polars as pl

from nsan.analysis.pca.clock_host import Host, between_calls, host_of
from nsan.analysis.pca.clock_judge import (
    SESSION_ERROR_NS,
    Compared,
    host_allows,
    may_drift,
    overlaps,
    reason,
)
from nsan.analysis.pca.clock_lines import Ints, Line, fitted, spread_of
from nsan.analysis.pca.clock_moments import (
    Moments,
    Sides,
    annotation_sides,
    mark_pairs,
    reference_us,
    segment_sides,
    trace_span,
)
from nsan.analysis.pca.clock_pairs import TOLERANCE_NS, best_line, meeting, under
from nsan.analysis.pca.tables import CLOCK_FITS
from nsan.errors import NotAlignedError
from nsan.units import NS_PER_US

__all__ = ["Clock", "Moments", "clock_fits", "clock_of"]

_OF_BOTH: Final = ("segments", "annotations")
_HALF_US: Final = NS_PER_US / 2
"""A time that was cut to whole microseconds is half of one too early on average."""


@dataclass(frozen=True)
class Clock:
    """The mapping that a join stands on.

    Attributes
    ----------
    method : str
        What was compared, of ``METHOD``.
    offset_ns : int
        Trace time at ``reference_us``.
    reference_us : int
        Wall time, us since 1970.
    drift : float
        Trace time per wall time, minus 1.
    pid : int or None
        Process of the trace; None: any.
    residual_max_ns : float or None
        Most that is left over of a moment that both know; None: none was compared.
    """

    method: str
    offset_ns: int
    reference_us: int
    drift: float
    pid: int | None
    residual_max_ns: float | None

    def ns(self, column: str = "time_us") -> pl.Expr:
        """Turn wall times into trace times.

        Parameters
        ----------
        column : str, default "time_us"
            Wall times, us since 1970 (Int64).

        Returns
        -------
        Expr
            Int64, ns from the session start; null where the wall time is.
        """
        away = pl.col(column) - self.reference_us
        drifted = (away.cast(pl.Float64) * (NS_PER_US * self.drift)).round().cast(pl.Int64)
        return self.offset_ns + away * NS_PER_US + drifted


def clock_fits(moments: Moments) -> pl.DataFrame:
    """Compare the clocks in every way that has data.

    Parameters
    ----------
    moments : Moments
        What both sides saw.

    Returns
    -------
    DataFrame, ``CLOCK_FITS``
        One row per method that has data: those that hold, best first, then those that do not; the one
        to use is marked. None is marked where the snapshot is of another run: where the segments, or
        else the annotations, of both do not meet. A snapshot without times gives no row.
    """
    reference = reference_us(moments)
    if reference is None:
        return CLOCK_FITS.empty().collect()
    case = _Case(moments, reference)
    segments = _by_sides("segments", segment_sides(moments, reference), case)
    annotations = _by_sides("annotations", annotation_sides(moments, reference), case)
    met = next((each for each in (segments, annotations) if each and each.holds), None)
    others = [_by_marks(case), _by_session_start(case, met)]
    found = [each for each in (segments, annotations, *others) if each is not None]
    used = _to_use(found)
    if used is not None:
        found.sort(key=lambda each: not each.holds)
    rows = [each.row(reference, is_used=each is used) for each in found]
    return pl.DataFrame(rows, schema=CLOCK_FITS.schema, orient="row")


def clock_of(
    fits: pl.DataFrame, snapshot: str = "the snapshot", trace: str = "this trace"
) -> Clock:
    """Give the mapping to use.

    Parameters
    ----------
    fits : DataFrame, ``CLOCK_FITS``
        As of :func:`clock_fits`.
    snapshot, trace : str
        What to call the two in a message.

    Returns
    -------
    Clock
        Of the row that is marked.

    Raises
    ------
    NotAlignedError
        If none is: the snapshot is of another run, or has no times.
    """
    used = fits.filter("is_used")
    if used.is_empty():
        raise NotAlignedError(reason(fits), snapshot, trace)
    row = used.row(0, named=True)
    names = ("method", "offset_ns", "reference_us", "drift", "pid", "residual_max_ns")
    return Clock(**{name: row[name] for name in names})


@dataclass(frozen=True)
class _Case:
    """The moments, and what is asked of them again and again; wall times count from ``reference``."""

    moments: Moments
    reference: int

    @cached_property
    def span(self) -> tuple[int, int]:
        """First and last time of the trace, ns."""
        return trace_span(self.moments)

    @cached_property
    def expected(self) -> Line | None:
        """What the session start says."""
        start = self.moments.session_start_utc_ns
        return None if start is None else Line(0, self.reference * NS_PER_US - start + _HALF_US)

    @cached_property
    def entries(self) -> Ints:
        """When the history's entries were made, ns."""
        return self._times(self.moments.allocator_events)

    def _times(self, events: pl.DataFrame) -> Ints:
        return ((events["time_us"].drop_nulls() - self.reference) * NS_PER_US).to_numpy()

    @cached_property
    def _hosts(self) -> dict[int | None, Host]:
        return {}

    def host(self, pid: int | None) -> Host:
        """Give what a process did on the host."""
        if pid not in self._hosts:
            events = self.moments.allocator_events
            # A history may be recorded without its allocations; what is left says little of the host.
            has_all = (events["action"].cast(pl.String) == "alloc").any()
            entries = self.entries if has_all else self.entries[:0]
            self._hosts[pid] = host_of(entries, self.moments.api_calls, pid)
        return self._hosts[pid]


@dataclass(frozen=True)
class _Found:
    """One way to compare, and what it gave; ``line`` is None where nothing is of both sides."""

    method: str
    line: Line | None
    pid: int | None
    holds: bool
    wall_ns: Ints
    trace_ns: Ints
    n_unmatched: int | None

    def row(self, reference: int, *, is_used: bool) -> dict[str, Any]:
        """Give the row of the table."""
        line = self.line
        rest = np.empty(0) if line is None else np.abs(self.trace_ns - line.ns(self.wall_ns))
        return {
            "method": self.method,
            "is_used": is_used,
            "n_pairs": rest.size,
            "n_unmatched": self.n_unmatched,
            "residual_rms_ns": float(np.sqrt((rest**2).mean())) if rest.size else None,
            "residual_max_ns": float(rest.max()) if rest.size else None,
            "drift": None if line is None else line.drift,
            "offset_ns": None if line is None else round(line.at_ns),
            "reference_us": None if line is None else reference + line.wall_at_ns // NS_PER_US,
            "pid": self.pid,
        }


def _to_use(found: list[_Found]) -> _Found | None:
    """Choose the first that holds, unless moments that could be compared say that it is another run.

    Where no segment at all is of both sides, the trace may know them under other addresses (a pool of
    another library below the allocator): then ranges can still show that it is the same run.
    """
    sides = [each for each in found if each.method in _OF_BOTH]
    against = [each for each in sides if not each.holds and each.line is not None]
    if against:
        return None
    return next((each for each in sides or found if each.holds), None)


def _by_sides(method: str, sides: Sides, case: _Case) -> _Found | None:
    """Compare moments of both sides, with each process, and give the one that fits best."""
    if not sides.can_be_compared:
        return None
    compared = []
    for pid, side in sides.traces.items():
        line = best_line(sides.snapshot, side, case.expected)
        if line is not None:
            met = meeting(sides.snapshot, side, line)
            line = between_calls(case.host(pid), met.line, spread_of(met.residuals))
            met = under(sides.snapshot, side, line, met.tolerance_ns)
            compared.append(
                Compared(
                    pid,
                    sides.snapshot,
                    side,
                    met,
                    case.host(pid),
                    case.span,
                    case.expected,
                    sides.lives_with(pid),
                )
            )
    if not compared:
        return _without_pairs(method, sides, case)
    best = max(compared, key=lambda each: each.rank)
    wall_ns = best.snapshot.ns[best.met.pairs.snapshot]
    trace_ns = best.trace.ns[best.met.pairs.trace]
    return _Found(method, best.met.line, best.pid, best.holds, wall_ns, trace_ns, best.n_unmatched)


def _without_pairs(method: str, sides: Sides, case: _Case) -> _Found | None:
    """Judge sides on which nothing happened alike: another run, unless the trace began later."""
    n_due = len(sides.snapshot)
    if case.expected is not None:
        ns, (low, high) = case.expected.ns(sides.snapshot.ns), case.span
        n_due = int(((ns >= low - SESSION_ERROR_NS) & (ns <= high + SESSION_ERROR_NS)).sum())
    nothing = np.empty(0, np.int64)
    return _Found(method, None, None, False, nothing, nothing, n_due) if n_due else None  # noqa: FBT003


def _by_marks(case: _Case) -> _Found | None:
    """Compare by the marks of the trace that say the wall time."""
    wall_ns, trace_ns, pid = mark_pairs(case.moments, case.reference)
    if not wall_ns.size:
        return None
    line = fitted(wall_ns, trace_ns, Line(int(wall_ns[0]), float(trace_ns[0])))
    holds = bool((np.abs(trace_ns - line.ns(wall_ns)) <= TOLERANCE_NS).all())
    holds = holds and overlaps(case.entries, line, case.span, TOLERANCE_NS)
    holds = holds and host_allows(case.host(pid), line) and may_drift(line)
    return _Found("mark", line, pid, holds, wall_ns, trace_ns, None)


def _by_session_start(case: _Case, met: _Found | None) -> _Found | None:
    """Map by the session start alone; moments that are known to meet say how wrong that is."""
    line = case.expected
    if line is None:
        return None
    holds = overlaps(case.entries, line, case.span, SESSION_ERROR_NS)
    if met is None:
        nothing = np.empty(0, np.int64)
        return _Found("session_start", line, None, holds, nothing, nothing, None)
    return _Found("session_start", line, met.pid, holds, met.wall_ns, met.trace_ns, met.n_unmatched)
