"""Whether a mapping between two clocks holds: whether the moments that both should know are there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from nsan.analysis.pca.clock_host import Host, entries_in_waits, goes_on_elsewhere
from nsan.analysis.pca.clock_lines import MOST_DRIFT, Flags, Ints, Line, spread_of
from nsan.analysis.pca.clock_moments import Lives
from nsan.analysis.pca.clock_pairs import TOLERANCE_NS, Meeting, Side, under
from nsan.errors import NotAlignedError
from nsan.units import NS_PER_S, NS_PER_US

if TYPE_CHECKING:
    import polars as pl

SESSION_ERROR_NS: Final = NS_PER_S
"""Most by which the session start that a trace names is taken to be wrong."""

_MOMENTS: Final = {"segments": "moments of segments", "annotations": "starts and ends of ranges"}
_NAMES: Final = {**_MOMENTS, "mark": "clock marks"}
_PPM: Final = 1_000_000
_LEAST_MET: Final = 0.5
_MOST_AGAINST: Final = 0.1
_MOST_IN_WAITS: Final = 0.05
_FEWEST_ALONE: Final = 2
_FEW: Final = 10
_SMALL_PART: Final = 0.25
_NEARER: Final = 0.5
_SAMPLE: Final = 2_000
_SHIFTS: Final = (7, -7, 19, -19, 41, -41, 83)
_COMPARISONS: Final = 5_000_000
_FEWEST_SAMPLED: Final = 50


@dataclass(frozen=True)
class Compared:
    """Moments of a snapshot and of one process of a trace, compared.

    Attributes
    ----------
    pid : int or None
        The process.
    snapshot, trace : Side
        The moments.
    met : Meeting
        How they meet best.
    host : Host
        What the host did.
    span : (int, int)
        First and last time of the trace, ns.
    expected : Line, optional
        What the session start says.
    lives : pair of Lives, optional
        Of the snapshot and of this process: the memory that the moments are of.
    """

    pid: int | None
    snapshot: Side
    trace: Side
    met: Meeting
    host: Host
    span: tuple[int, int]
    expected: Line | None
    lives: tuple[Lives, Lives] | None = None

    @cached_property
    def is_met(self) -> Flags:
        """Which of the snapshot's moments are in the trace at their time."""
        met = np.zeros(len(self.snapshot), np.bool_)
        met[self.met.pairs.snapshot] = True
        return met

    @cached_property
    def is_due(self) -> Flags:
        """Which of the snapshot's moments the trace should know."""
        ns, (low, high) = self.met.line.ns(self.snapshot.ns), self.span
        return self.is_met | ((ns >= low - NS_PER_US) & (ns <= high + NS_PER_US))

    @cached_property
    def is_judged(self) -> Flags:
        """Of those due, the beginnings; where they are few, the ends too.

        A release may wait for the GPU, and is stamped before on one side and after it on the other.
        """
        first = self.is_due & self.snapshot.is_first
        return first if first.sum() > _FEWEST_ALONE else self.is_due

    @property
    def n_unmatched(self) -> int:
        """Count the moments that the trace should know, and does not."""
        return int((self.is_due & ~self.is_met).sum())

    @cached_property
    def n_twins(self) -> int:
        """Count moments that both know, but at different times."""
        missing = self.snapshot.what[self.is_judged & ~self.is_met]
        ns = self.met.line.ns(self.snapshot.ns)
        kept = (self.trace.ns >= ns.min()) & (self.trace.ns <= ns.max())
        kept[self.met.pairs.trace] = False
        spare = self.trace.what[kept]
        size = int(max(missing.max(initial=0), spare.max(initial=0))) + 1
        counts = (np.bincount(side, minlength=size) for side in (missing, spare))
        return int(np.minimum(*counts).sum())

    @cached_property
    def n_displaced(self) -> int:
        """Count memory of the history where, at that time, the trace has other memory."""
        if self.lives is None:
            return 0
        mine, theirs = self.lives
        start = self.met.line.ns(mine.start_ns)
        low, high = self.span
        due = np.flatnonzero((start >= low) & (start <= high))
        if not due.size or not theirs.va.size:
            return 0
        most = max(_COMPARISONS // theirs.va.size, _FEWEST_SAMPLED)
        some = due[:: max(due.size // most, 1)]
        n_wrong = sum(
            _is_displaced(mine, int(place), float(start[place]), theirs, self.met.line)
            for place in some
        )
        return n_wrong * due.size // some.size

    @cached_property
    def is_beyond_chance(self) -> bool:
        """More moments are met, or they are met nearer, than with the clocks put a little wrong.

        Where the same things follow each other so closely that any mapping meets most of them, how
        near they are met decides.
        """
        places = np.flatnonzero(self.is_judged)
        some = self.snapshot.only(places[:: max(places.size // _SAMPLE, 1)])
        shifts = [shift * self.met.tolerance_ns for shift in _SHIFTS]
        (share, scatter), *wrong = (self._met_at(some, shift) for shift in (0.0, *shifts))
        chance = float(np.median([each[0] for each in wrong]))
        if chance <= _LEAST_MET:
            return share - chance >= _LEAST_MET * (1 - chance)
        return scatter <= _NEARER * float(np.median([each[1] for each in wrong]))

    def _met_at(self, some: Side, shift: float) -> tuple[float, float]:
        """Give the share of moments that are met under a shifted line, and their scatter."""
        line = self.met.line
        shifted = Line(line.wall_at_ns, line.at_ns + shift, line.drift)
        met = under(some, self.trace, shifted, self.met.tolerance_ns)
        return len(met.pairs) / len(some), spread_of(met.residuals)

    @property
    def n_against(self) -> int:
        """Count what speaks against it being the same run."""
        return max(self.n_twins, self.n_displaced)

    @cached_property
    def holds(self) -> bool:
        """Most moments that the trace should know are there, more than by chance, and none speaks against."""
        n_due, n_met = int(self.is_judged.sum()), int((self.is_judged & self.is_met).sum())
        if not n_met or n_met < _LEAST_MET * n_due or self.n_against > _against_allowed(n_due):
            return False
        return self.is_beyond_chance and self._is_believable

    @property
    def _is_believable(self) -> bool:
        """The clocks may drift so, the host agrees, and the moments are enough or expected there."""
        if not may_drift(self.met.line):
            return False
        return host_allows(self.host, self.met.line) and (self._is_enough or self._is_expected)

    @property
    def _is_enough(self) -> bool:
        """The moments met are enough to believe in, whatever the session start says."""
        n_met = len(self.met.pairs)
        known = int(np.isin(self.snapshot.what, self.trace.what).sum())
        is_margin = n_met < _FEW and self.is_due.sum() < _SMALL_PART * known
        return n_met >= _FEWEST_ALONE and not is_margin

    @property
    def _is_expected(self) -> bool:
        """The session start says the same."""
        if self.expected is None:
            return False
        line = self.met.line
        return abs(line.at_ns - self.expected.at(line.wall_at_ns)) <= SESSION_ERROR_NS

    @property
    def rank(self) -> tuple[bool, int, float]:
        """Order among processes: the last fits best."""
        return self.holds, len(self.met.pairs), -spread_of(self.met.residuals)


def _is_displaced(mine: Lives, place: int, start: float, theirs: Lives, line: Line) -> bool:
    """Say whether memory of another address or size lies over this, for longer than clocks err."""
    va, end_va, stop = mine.va[place], mine.end_va[place], float(line.ns(mine.end_ns[[place]])[0])
    over = (theirs.va < end_va) & (theirs.end_va > va)
    over &= (theirs.va != va) | (theirs.end_va != end_va)
    shared = np.minimum(theirs.end_ns[over], stop) - np.maximum(theirs.start_ns[over], start)
    return bool((shared > 2 * TOLERANCE_NS).any())


def _against_allowed(n_due: int) -> float:
    return max(_MOST_AGAINST * n_due, 1 if n_due > 2 * _FEWEST_ALONE else 0)


def may_drift(line: Line) -> bool:
    """Say whether two clocks of one machine may drift as a mapping wants.

    Parameters
    ----------
    line : Line
        The mapping.

    Returns
    -------
    bool
        Its drift is at most ``MOST_DRIFT``.
    """
    return abs(line.drift) <= MOST_DRIFT


def host_allows(host: Host, line: Line) -> bool:
    """Say whether the history, by a mapping, agrees with what the host did.

    It does not where entries lie inside waits of the host, or where the host is busy without entries
    and the history goes on after the trace.

    Parameters
    ----------
    host : Host
        What the process did.
    line : Line
        The mapping.

    Returns
    -------
    bool
        True too where the calls of the host cannot tell.
    """
    n_inside, n_entries = entries_in_waits(host, line)
    return n_inside <= max(_MOST_IN_WAITS * n_entries, 2) and not goes_on_elsewhere(host, line)


def overlaps(wall_ns: Ints, line: Line, span: tuple[int, int], slack_ns: int) -> bool:
    """Say whether a history is, in part at least, of the time of the trace.

    Parameters
    ----------
    wall_ns : array of int
        Times of the history's entries, ns on the snapshot's clock.
    line : Line
        The mapping.
    span : (int, int)
        First and last time of the trace, ns.
    slack_ns : int
        Error of the mapping.

    Returns
    -------
    bool
        False for a history without times.
    """
    if not wall_ns.size:
        return False
    ns = line.ns(wall_ns)
    return bool(((ns >= span[0] - slack_ns) & (ns <= span[1] + slack_ns)).any())


def reason(fits: pl.DataFrame) -> str:
    """Say in plain words why no mapping holds.

    Parameters
    ----------
    fits : DataFrame, ``CLOCK_FITS``
        Rows of which none is marked.

    Returns
    -------
    str
        A phrase with numbers.
    """
    rows = {row["method"]: row for row in fits.to_dicts()}
    if not rows:
        return str(NotAlignedError.NO_TIMES)
    sides = [rows[method] for method in _MOMENTS if method in rows]
    if sides:
        worst = max(sides, key=_missing)
        return _reason(worst)
    too_fast = _too_fast(rows["mark"]) if "mark" in rows else None
    if too_fast is not None:
        return too_fast
    by = "a clock mark in the trace" if "mark" in rows else "the session start of the trace"
    return f"by {by}, its history is of another time than the trace"


def _missing(row: dict[str, Any]) -> float:
    """Give the share of the moments that are not in the trace."""
    return float(row["n_unmatched"] / max(row["n_pairs"] + row["n_unmatched"], 1))


def _too_fast(row: dict[str, Any]) -> str | None:
    """Say that a mapping wants more than clocks drift, where it does."""
    drift = row["drift"]
    if drift is None or abs(drift) <= MOST_DRIFT:
        return None
    return (
        f"its {_NAMES[row['method']]} fit the trace only if the two clocks drift apart by "
        f"{abs(drift) * _PPM:.0f} ppm, and those of one machine never do by more than "
        f"{MOST_DRIFT * _PPM:.0f} ppm"
    )


def _reason(row: dict[str, Any]) -> str:
    n_pairs, n_unmatched, what = row["n_pairs"], row["n_unmatched"], _MOMENTS[row["method"]]
    n_due = n_pairs + n_unmatched
    if n_unmatched > _MOST_AGAINST * n_due:
        return f"of its {n_due} {what} {n_pairs} are in the trace at their time"
    too_fast = _too_fast(row)
    if too_fast is not None:
        return too_fast
    if n_pairs < _FEWEST_ALONE:
        return (
            f"only {n_pairs} of its {what} are in the trace, too few to compare times by, and the "
            "session start of the trace is of another time"
        )
    return (
        f"{n_pairs} of its {what} are in the trace at their time, but then the rest of its history "
        "does not agree with the trace: it allocates while the host waits, or where the trace has ended"
    )
