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
        # Where kernels stand for the run, others may have waited longer than these took.
        return f"at most {format_time(gain.ns)}{of if gain.ns <= span_ns else ''}"
    said = f"{format_time(abs(gain.ns))} +- {format_time(gain.error_ns)}"
    if abs(gain.ns) <= gain.error_ns:
        return f"no gain beyond chance ({'-' * (gain.ns < 0)}{said})"
    return f"costs {said}{of.replace('-', '')}" if gain.ns < 0 else f"about {said}{of}"


def kind_words(gain: Gain, *, is_modelled: bool) -> str:
    """Say how a gain is known: a bound, too, rests on rows that a model may have written.

    Parameters
    ----------
    gain : Gain
        A bound, or what the driver model found.
    is_modelled : bool
        The model wrote the trace.

    Returns
    -------
    str
        As "derived from modelled rows".
    """
    rests = is_modelled and gain.kind != "modelled"
    return f"{gain.kind} from modelled rows" if rests else gain.kind


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
