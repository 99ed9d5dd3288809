"""One look for all charts: ground, type, axes with units, a colour per cause and per access.

What stands on an axis is relative: milliseconds from an origin, MiB from a base. Addresses are hexadecimal
text. So no number in a chart needs more than the 53 bits that a browser has for it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import altair as alt
import polars as pl

from nsan.charts.axes import (
    TimeAxis,
    byte_unit,
    bytes_axis,
    duration_axis,
    duration_scale,
    exact_time,
    rate_unit,
    time_axis,
    time_unit,
    whole_numbers,
)
from nsan.charts.palette import ACCESSES, CAUSES, Shade, Theme
from nsan.text import CAUSE_WORDS, DIRECTION_WORDS, shortened
from nsan.units import counted

__all__ = [
    "THEMES",
    "Drawing",
    "Part",
    "Theme",
    "TimeAxis",
    "byte_unit",
    "bytes_axis",
    "duration_axis",
    "duration_scale",
    "exact_time",
    "rate_unit",
    "time_axis",
    "time_unit",
    "whole_numbers",
]

Drawing: TypeAlias = alt.TopLevelMixin
"""Any Altair chart: one view, layers of it, or several beside each other."""

Part: TypeAlias = alt.Chart | alt.LayerChart | alt.FacetChart
"""What can stand beside others."""

THEMES: Final[tuple[Theme, ...]] = ("light", "dark")

FONT: Final = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
LETTER_PX: Final = 6.1
"""Width of a letter of the size of labels, about: what decides how long a line may be."""

NAME_LETTERS: Final = 48
"""Letters of a name from a trace on an axis or in a legend, at most."""

_TAKEN: Final = frozenset(
    (
        *("if", "constructor", "hasOwnProperty", "isPrototypeOf", "propertyIsEnumerable"),
        *("toLocaleString", "toString", "valueOf", "__proto__", "__defineGetter__"),
        *("__defineSetter__", "__lookupGetter__", "__lookupSetter__"),
    )
)
"""Texts that Vega cannot have alone: ``if``, and what every JavaScript object inherits.

Its parser of expressions asks for each token, texts among them, whether ``{if: 1}[token]`` is there, and if
so reads the text as a name of a signal. Titles, sort orders and colours become such expressions. Its stacks,
too, are kept in a plain object by the value of the axis.
"""


@dataclass(frozen=True)
class Look:
    """Colours of what is not data: ground, text, weaker text, lines of the grid."""

    ground: str
    text: str
    muted: str
    grid: str


LOOKS: Final[Mapping[Theme, Look]] = {
    "light": Look("#ffffff", "#1f2328", "#59626d", "#e4e7eb"),
    "dark": Look("#16181d", "#e8eaed", "#a3abb5", "#30353d"),
}
"""The look of each theme."""


_LOCALE: Final = alt.Locale(
    number=alt.NumberLocale(decimal=".", thousands=" ", grouping=[3], currency=["", ""])
)
"""Numbers of axes and tooltips are grouped as those of texts (:func:`nsan.units.format_count`)."""

ACCENTS: Final = (Shade("#2f5d9b", "#8ab4f0"), Shade("#b45f06", "#f0a050"))
"""Colours of figures that have no cause or access: a first one, and a second beside it."""


def accent(theme: Theme, number: int = 0) -> str:
    """Return the colour of a figure that has no cause or access."""
    return ACCENTS[number].on(theme)


def look(theme: Theme) -> Look:
    """Return the colours of a theme that are not data."""
    return LOOKS[theme]


def wrapped(text: str, width: int, *, letter_px: float = LETTER_PX) -> list[str]:
    """Break a text into lines that fit a width of so many pixels.

    Examples
    --------
    >>> wrapped("one two three", 48)
    ['one two', 'three']
    """
    lines = textwrap.wrap(text, max(int(width / letter_px), 12), break_on_hyphens=False) or [""]
    # A space at the end of a line is not seen, and makes another text of it.
    return [f"{line} " if line in _TAKEN else line for line in lines]


def name_text(text: object, most: int = NAME_LETTERS) -> str:
    """Make a name from a trace harmless and short, for any place of a chart.

    Parameters
    ----------
    text : object
        The name.
    most : int, default 48
        Letters at most, without the quotes.

    Returns
    -------
    str
        The name as of :func:`nsan.text.shortened`; one that Vega would take for something of its own stands
        in quotes.

    Examples
    --------
    >>> name_text("add"), name_text("constructor")
    ('add', '"constructor"')
    """
    short = shortened(text, most)
    return f'"{short}"' if short in _TAKEN else short


def titled(text: str, width: int, notes: Iterable[str] = ()) -> alt.TitleParams:
    """Make a title with notes under it, broken into lines that fit.

    Parameters
    ----------
    text : str
        The title: what is drawn.
    width : int
        Pixels that a line may have.
    notes : iterable of str
        Sentences under it: how many rows were binned, what the figures are.

    Returns
    -------
    TitleParams
        For ``chart.properties(title=...)``.
    """
    lines = [line for note in notes for line in wrapped(note, width)]
    return alt.TitleParams(wrapped(text, width, letter_px=7.6), subtitle=lines)


def with_notes(chart: alt.TopLevelMixin, notes: Iterable[str], width: int) -> alt.TopLevelMixin:
    """Add sentences below those that are under the title of a chart.

    Parameters
    ----------
    chart : altair chart
        A chart whose title was made by :func:`titled`; it stays as it is.
    notes : iterable of str
        Sentences to add.
    width : int
        Pixels that a line may have.

    Returns
    -------
    altair chart
        A copy with the notes.
    """
    title: Any = getattr(chart, "title", alt.Undefined)
    if not isinstance(title, alt.TitleParams):
        title = alt.TitleParams([] if title is alt.Undefined else title, subtitle=[])
    lines = [line for note in notes for line in wrapped(note, width)]
    known = {**title.to_dict(), "subtitle": [*(title.to_dict().get("subtitle") or []), *lines]}
    copied: alt.TopLevelMixin = chart.copy(deep=False)  # type: ignore[attr-defined]
    return copied.properties(title=alt.TitleParams(**known))


def themed(chart: alt.TopLevelMixin, theme: Theme) -> alt.TopLevelMixin:
    """Give a finished chart the look of all charts.

    Parameters
    ----------
    chart : altair chart
        The outermost chart: parts of a concatenation cannot be configured.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        A copy that is configured.
    """
    colours = look(theme)
    labels = {"labelColor": colours.muted, "titleColor": colours.text, "labelFontSize": 11}
    return (
        chart.configure(background=colours.ground, font=FONT, padding=12, locale=_LOCALE)
        .configure_view(stroke=colours.grid, strokeWidth=1)
        .configure_axis(
            **labels,
            gridColor=colours.grid,
            domainColor=colours.grid,
            tickColor=colours.grid,
            titleFontSize=11,
            titleFontWeight="normal",
            titlePadding=8,
            labelLimit=300,
            labelOverlap="greedy",
            labelSeparation=6,
        )
        .configure_legend(
            **labels,
            titleFontSize=11,
            titleFontWeight="normal",
            orient="top",
            direction="horizontal",
            symbolType="square",
            labelLimit=300,
            columnPadding=14,
            titleAnchor="start",
            offset=8,
        )
        .configure_header(**labels, titleFontSize=11, titleFontWeight="normal")
        .configure_title(
            color=colours.text,
            subtitleColor=colours.muted,
            fontSize=14,
            fontWeight=600,
            subtitleFontSize=11,
            subtitleLineHeight=14,
            anchor="start",
            frame="group",
            offset=12,
        )
        .configure_text(color=colours.text)
        .configure_rule(color=colours.muted)
    )


def nothing(text: str, *, title: str, width: int, theme: Theme) -> alt.TopLevelMixin:
    """Make the chart of a frame without rows: it says so, and why.

    Parameters
    ----------
    text : str
        What is not there.
    title : str
        The title that the chart would have.
    width : int
        Pixels.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        A text in an empty frame.
    """
    lines = wrapped(text, width - 24)
    mark = (
        alt.Chart(pl.DataFrame({"text": ["\n".join(lines)]}), width=width, height=90)
        .mark_text(fontSize=12, baseline="middle", lineBreak="\n", lineHeight=18)
        .encode(text="text:N", color=alt.value(look(theme).muted))
    )
    return themed(mark.properties(title=titled(title, width)), theme)


def far_note(rows: pl.DataFrame, one: str = "row") -> str:
    """Say how many rows are left out because they are far in time from all others (``n_far``)."""
    n_far = int(rows["n_far"][0])
    if not n_far:
        return ""
    return f" Without {counted(n_far, one)} far in time from all others (option keep_far)."


def cause_label(column: str = "cause") -> pl.Expr:
    """Write causes as people know them, as text."""
    return pl.col(column).cast(pl.String).replace(CAUSE_WORDS)


def direction_label(column: str = "direction") -> pl.Expr:
    """Write directions as people know them, as text."""
    return pl.col(column).cast(pl.String).replace(DIRECTION_WORDS)


def name_label(column: str, most: int = NAME_LETTERS) -> pl.Expr:
    """Make a column of names from a trace harmless and short, as text; null stays null."""
    return pl.col(column).map_elements(
        lambda text: name_text(text, most), return_dtype=pl.String, skip_nulls=True
    )


def hex_label(column: str) -> pl.Expr:
    """Write a column of addresses as hexadecimal text, never through a float; null stays null."""
    return pl.col(column).map_elements(
        lambda va: f"{va:#x}", return_dtype=pl.String, skip_nulls=True
    )


def gpu_label(pid: str = "pid", device: str = "device_id", *, many: bool = True) -> pl.Expr:
    """Name the GPU of a row as text; the process, too, where there are several."""
    gpu = pl.format("GPU {}", pl.col(device).cast(pl.String).fill_null("unknown"))
    return pl.format("{} of process {}", gpu, pl.col(pid).fill_null(0)) if many else gpu


def present(frame: pl.DataFrame, column: str, order: Iterable[str]) -> list[str]:
    """List the values of a column that occur, in a given order; others after them."""
    known = list(order)
    found = frame[column].drop_nulls().unique().cast(pl.String).to_list()
    return [v for v in known if v in found] + sorted(v for v in found if v not in known)


def cause_scale(theme: Theme, values: Sequence[str] | None = None) -> alt.Scale:
    """Make the colour scale of causes.

    Parameters
    ----------
    theme : {"light", "dark"}
        The ground.
    values : sequence of str, optional
        The labels that occur (:func:`cause_label`), in the order of the legend; all by default.

    Returns
    -------
    Scale
        From labels to colours.
    """
    return _scale(
        {CAUSE_WORDS.get(id_, id_): shade for id_, shade in CAUSES.items()}, theme, values
    )


def access_scale(theme: Theme, values: Sequence[str] | None = None) -> alt.Scale:
    """Make the colour scale of accesses of page faults; parameters as of :func:`cause_scale`."""
    return _scale(ACCESSES, theme, values)


def _scale(shades: Mapping[str, Shade], theme: Theme, values: Sequence[str] | None) -> alt.Scale:
    names = list(shades) if values is None else list(values)
    plain = shades["other"]
    return alt.Scale(domain=names, range=[shades.get(n, plain).on(theme) for n in names])


CAUSE_ORDER: Final = tuple(CAUSE_WORDS.get(id_, id_) for id_ in CAUSES)
"""Labels of causes in the order of legends and stacks."""

ACCESS_ORDER: Final = tuple(ACCESSES)
"""Accesses in the order of legends and stacks."""


def legend(values: Sequence[str], title: str | None, width: int) -> alt.Legend | None:
    """Make a legend that fits a width; none where there is but one entry.

    Parameters
    ----------
    values : sequence of str
        Its entries.
    title : str or None
        What they are.
    width : int
        Pixels.

    Returns
    -------
    Legend or None
        Above the chart, in as many columns as fit.
    """
    if len(values) < 2:
        return None
    each = [len(v) * LETTER_PX + 34 for v in values]
    fits = len(values) if sum(each) <= width else max(1, int(width / max(each)))
    return alt.Legend(title=title, columns=fits, values=list(values))


def cause_color(
    frame: pl.DataFrame, theme: Theme, width: int, *, field: str = "cause"
) -> alt.Color:
    """Make the colour channel of a column of cause labels, with a legend of those that occur."""
    values = present(frame, field, CAUSE_ORDER)
    return alt.Color(
        f"{field}:N", scale=cause_scale(theme, values), legend=legend(values, "Cause", width)
    )


def access_color(
    frame: pl.DataFrame, theme: Theme, width: int, *, field: str = "access"
) -> alt.Color:
    """Make the colour channel of a column of accesses, with a legend of those that occur."""
    values = present(frame, field, ACCESS_ORDER)
    return alt.Color(
        f"{field}:N", scale=access_scale(theme, values), legend=legend(values, "Access", width)
    )
