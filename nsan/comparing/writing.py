"""Figures of a comparison for people: values by their unit, changes in percent."""

from __future__ import annotations

from typing import Final

from nsan.units import format_bytes, format_count, format_time

_MOST_PERCENT: Final = 10.0
"""A larger change is written as a factor."""


def written(value: float | None, unit: str) -> str:
    """Write a value, which may be a mean.

    Parameters
    ----------
    value : float or None
        The value.
    unit : str
        Of the figure.

    Returns
    -------
    str
        "-" where it is not known.

    Examples
    --------
    >>> written(2_337_721.0, "ns"), written(1.5, "kernels"), written(None, "byte")
    ('2.338 ms', '1.5', '-')
    """
    if value is None:
        return "-"
    if unit == "ns":
        return format_time(value)
    if unit == "byte":
        return format_bytes(value)
    return (
        format_count(round(value)) if value == round(value) else f"{value:,.1f}".replace(",", " ")
    )


def change_text(change: float | None, difference: float | None) -> str:
    """Write a change in percent, or as a factor where it is large.

    Parameters
    ----------
    change : float or None
        ``other / base - 1``.
    difference : float or None
        ``other - base``; says what a change from 0 is.

    Returns
    -------
    str
        "-" where it is not known.

    Examples
    --------
    >>> change_text(0.1, 3.0), change_text(-0.004, -1.0), change_text(19.0, 1.0), change_text(None, 4.0)
    ('+10.0 %', '-0.4 %', '20 times', 'from 0')
    """
    if change is None:
        return "-" if difference is None else "from 0" if difference else "0 %"
    if change > _MOST_PERCENT:
        return f"{change + 1:.3g} times"
    text = f"{change:+.1%}".replace("%", " %")
    return text if change else "0 %"


def difference_text(difference: float | None, unit: str) -> str:
    """Write a difference with its sign.

    Parameters
    ----------
    difference : float or None
        ``other - base``.
    unit : str
        Of the figure.

    Returns
    -------
    str
        "-" where it is not known.

    Examples
    --------
    >>> difference_text(4096.0, "byte"), difference_text(-2.5, "kernels"), difference_text(None, "ns")
    ('+4.00 KiB', '-2.5', '-')
    """
    return "+" * (difference is not None and difference > 0) + written(difference, unit)


def interval_text(low: float | None, high: float | None) -> str:
    """Write the interval of a change.

    Parameters
    ----------
    low, high : float or None
        Its ends; ``high`` may have no bound.

    Returns
    -------
    str
        "-" where none is known.

    Examples
    --------
    >>> interval_text(0.08, 0.12), interval_text(-0.5, float("inf")), interval_text(None, None)
    ('+8.0 to +12.0 %', 'from -50.0 %', '-')
    >>> interval_text(2.0, 2.0), interval_text(108.4, 109.2)
    ('+200 %', '109 to 110 times')
    """
    if low is None or high is None:
        return "-"
    if high == float("inf"):
        return f"from {_percent(low)} %"
    if low > _MOST_PERCENT:
        first, last = f"{low + 1:.3g}", f"{high + 1:.3g}"
        return f"{first} to {last} times" if first != last else f"{first} times"
    first, last = _percent(low), _percent(high)
    return f"{first} to {last} %" if first != last else f"{first} %"


def _percent(change: float) -> str:
    return f"{100 * change:+.0f}" if abs(change) >= 1 else f"{100 * change:+.1f}"
