"""Axes with units: which unit fits, from which origin, and what is written at a tick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import altair as alt
import polars as pl

from nsan.units import GIB, KIB, MIB, NS_PER_MS, NS_PER_S, NS_PER_US


@dataclass(frozen=True)
class TimeAxis:
    """A unit and an origin for times: what to take off and to divide by, and what to call it."""

    unit: Literal["ns", "us", "ms", "s"]
    ns: int
    origin_ns: int

    def of(self, column: str) -> pl.Expr:
        """Turn a column of nanoseconds into times on this axis, Float64."""
        # Subtract as integers: a float of session nanoseconds would round.
        return (pl.col(column).cast(pl.Int64) - self.origin_ns) / self.ns

    def length(self, column: str) -> pl.Expr:
        """Turn a column of durations, ns, into the unit of this axis, Float64."""
        return pl.col(column) / self.ns

    @property
    def title(self) -> str:
        """The title of the axis, with its unit."""
        since = (
            f"{exact_time(self.origin_ns)} of the session" if self.origin_ns else "session start"
        )
        return f"Time since {since}, {self.unit}"

    def axis(
        self, field: str, *, scale: alt.Scale | None = None, axis: alt.Axis | None = None
    ) -> alt.X:
        """Make the x channel of a time: without a zero, fitted closely, titled with the unit."""
        scale = alt.Scale(zero=False, nice=False) if scale is None else scale
        return alt.X(f"{field}:Q", title=self.title, scale=scale, axis=axis or alt.Axis())


_TIME_UNITS: Final = (("s", NS_PER_S), ("ms", NS_PER_MS), ("us", NS_PER_US), ("ns", 1))


def exact_time(ns: int) -> str:
    """Write a time so that nothing is lost: of an origin or of a stretch every digit counts.

    Examples
    --------
    >>> exact_time(50_000), exact_time(43_900_000_000), exact_time(1_000_001)
    ('50 us', '43.9 s', '1000.001 us')
    """
    for unit, factor in _TIME_UNITS[:-1]:
        thousandths, rest = divmod(abs(ns) * 1000, factor)
        if rest == 0 and abs(ns) >= factor:
            return f"{'-' * (ns < 0)}{thousandths / 1000:.12g} {unit}"
    return f"{ns} ns"


def time_axis(first_ns: int | None, last_ns: int | None) -> TimeAxis:
    """Choose unit and origin for times from first to last.

    Parameters
    ----------
    first_ns, last_ns : int or None
        The outermost times to be drawn, ns from session start; None counts as 0.

    Returns
    -------
    TimeAxis
        The unit in which the span has 2 to 2 000 steps; the session start as origin where the times are
        near it, else a round time just before the first.

    Examples
    --------
    >>> time_axis(0, 5_000_000).title
    'Time since session start, ms'
    >>> time_axis(7_000_000_250, 7_000_400_000).title
    'Time since 7 s of the session, us'
    """
    first, last = first_ns or 0, last_ns or 0
    unit, ns = time_unit(last - first)
    if abs(first) <= 4 * (last - first):
        return TimeAxis(unit, ns, 0)
    step = 1
    while step * 20 <= last - first:
        step *= 10
    return TimeAxis(unit, ns, first // step * step)


def time_unit(span_ns: float) -> tuple[Literal["ns", "us", "ms", "s"], int]:
    """Choose the unit for lengths of time up to so many nanoseconds: its name and its size in ns."""
    for unit, factor in _TIME_UNITS:
        if span_ns >= 2 * factor:
            return unit, factor  # type: ignore[return-value]
    return "ns", 1


def byte_unit(largest: float | None) -> tuple[str, int]:
    """Choose the unit for sizes up to so many bytes: its name and its size in bytes.

    Examples
    --------
    >>> byte_unit(3 << 20)
    ('MiB', 1048576)
    """
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if (largest or 0) >= factor:
            return unit, factor
    return "byte", 1


def rate_unit(largest: float | None) -> tuple[str, float]:
    """Choose the unit for rates up to so many bytes per second: decimal, as links are quoted."""
    for unit, factor in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if (largest or 0) >= factor:
            return unit, factor
    return "B/s", 1.0


def bytes_axis(field: str, domain: Sequence[float], *, title: str, labels: bool = True) -> alt.X:
    """Make the x channel of sizes on a logarithmic scale, labelled in powers of two.

    Parameters
    ----------
    field : str
        Column of sizes above 0, byte.
    domain : sequence of float
        The least and the largest size, byte.
    title : str
        What the sizes are of; the unit is written at each label.
    labels : bool, default True
        Write title and labels; a row above another one needs none.

    Returns
    -------
    X
        The channel.
    """
    low, high = (max(float(each), 1.0) for each in domain)
    values = [1 << power for power in range(64) if low <= 1 << power <= high * 1.01]
    step = -(-len(values) // _MOST_TICKS) or 1
    axis = (
        alt.Axis(values=values[::step], labelExpr=BYTES_EXPRESSION, labelOverlap=True)
        if labels
        else alt.Axis(values=values[::step], labels=False, ticks=False)
    )
    return alt.X(
        f"{field}:Q",
        title=f"{title}, byte" if labels else None,
        scale=alt.Scale(type="log", base=2, domain=[low, max(high, low * 1.001)], nice=False),
        axis=axis,
    )


_MOST_TICKS: Final = 12


BYTES_EXPRESSION: Final = " : ".join(
    [
        *(
            f"datum.value >= {size} ? format(datum.value / {size}, ',.3~f') + ' {unit}'"
            for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
        ),
        "format(datum.value, ',.3~f') + ' B'",
    ]
)
"""Vega expression that labels a number of bytes with a binary unit."""


def duration_axis(field: str, domain: Sequence[float], *, title: str) -> alt.X:
    """Make the x channel of durations on a logarithmic scale, labelled with their units.

    Parameters
    ----------
    field : str
        Column of durations above 0, ns.
    domain : sequence of float
        The least and the largest duration, ns.
    title : str
        What the durations are of.

    Returns
    -------
    X
        The channel.
    """
    return alt.X(
        f"{field}:Q",
        title=f"{title} (logarithmic)",
        scale=_log_scale(domain),
        axis=alt.Axis(values=_steps_of_ten(domain), labelExpr=TIME_EXPRESSION),
    )


def duration_scale(field: str, domain: Sequence[float], *, title: str) -> alt.Y:
    """Make the y channel of durations; parameters as of :func:`duration_axis`."""
    return alt.Y(
        f"{field}:Q",
        title=f"{title} (logarithmic)",
        scale=_log_scale(domain),
        axis=alt.Axis(values=_steps_of_ten(domain), labelExpr=TIME_EXPRESSION),
    )


def _log_scale(domain: Sequence[float]) -> alt.Scale:
    low = max(float(domain[0]), 1.0)
    return alt.Scale(type="log", domain=[low, max(float(domain[1]), low * 1.001)], nice=False)


def _steps_of_ten(domain: Sequence[float]) -> list[int]:
    """List 1, 2 and 5 times the powers of ten in a range; powers alone where they are many."""
    low, high = max(float(domain[0]), 1.0), max(float(domain[1]), 1.0)
    steps = (1, 2, 5) if high / low < 2e3 else (1,)
    return [s * 10**p for p in range(19) for s in steps if low <= s * 10**p <= high]


TIME_EXPRESSION: Final = " : ".join(
    [
        *(
            f"datum.value >= {size} ? format(datum.value / {size}, ',.3~f') + ' {unit}'"
            for unit, size in (("s", NS_PER_S), ("ms", NS_PER_MS), ("us", NS_PER_US))
        ),
        "format(datum.value, ',.3~f') + ' ns'",
    ]
)
"""Vega expression that labels a number of nanoseconds with the unit that fits."""


def whole_numbers() -> alt.Axis:
    """Make an axis of counts: labels at whole numbers only."""
    return alt.Axis(labelExpr="datum.value == floor(datum.value) ? format(datum.value, ',d') : ''")
