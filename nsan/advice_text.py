"""Advice in words, for terminals, reports and Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nsan.units import counted, format_bytes, format_time

if TYPE_CHECKING:
    from nsan.analysis.advisor.advice import Gain, Number


def gain_words(gain: Gain, span_ns: int) -> str:
    """Say what an advice may save.

    Parameters
    ----------
    gain : Gain
        A bound, or what the driver model found.
    span_ns : int
        Time of the run; 0 if it is not known.

    Returns
    -------
    str
        As "at most 4.123 ms of 14.700 ms (28%)"; of a modelled one as "about 4.123 ms +- 0.200 ms" of it,
        or that it costs time, or that it is no more than the error.
    """
    of = f" of {format_time(span_ns)} ({gain.ns / span_ns:.0%})" if span_ns > 0 else ""
    if gain.kind != "modelled" or gain.error_ns is None:
        return f"at most {format_time(gain.ns)}{of}"
    said = f"{format_time(abs(gain.ns))} +- {format_time(gain.error_ns)}"
    if abs(gain.ns) <= gain.error_ns:
        return f"nothing that chance could not make ({'-' * (gain.ns < 0)}{said})"
    return f"costs {said}{of.replace('-', '')}" if gain.ns < 0 else f"about {said}{of}"


_WRITTEN: Final = {"ns": format_time, "byte": format_bytes}


def number_words(number: Number) -> str:
    """Write a figure with its name, as "evicted: 160.00 MiB".

    Parameters
    ----------
    number : Number
        The figure.

    Returns
    -------
    str
        Name and value.
    """
    write = _WRITTEN.get(number.unit)
    if write is not None:
        value = write(int(number.value))
    elif number.unit == "fraction":
        value = f"{number.value:.1%}"
    elif number.unit == "number":
        value = f"{number.value:.3g}"
    else:
        value = counted(int(number.value), number.unit.removesuffix("s"), number.unit)
    return f"{number.label}: {value}"
