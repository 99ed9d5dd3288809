"""Charts of the recipes: a bar, or a row of cells, for each report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import altair as alt
import polars as pl

from nsan.charts.axes import TimeAxis, exact_time
from nsan.charts.lanes import NAMES
from nsan.charts.palette import Shade
from nsan.charts.theme import (
    Drawing,
    Theme,
    accent,
    byte_unit,
    legend,
    look,
    nothing,
    themed,
    time_axis,
    time_unit,
    titled,
)

_ROW_PX: Final = 18
_BAND_PX: Final = 160
_HEAT: Final = {"light": ["#f3f6fa", "#08519c"], "dark": ["#1d2630", "#9ecbff"]}
"""From nothing to all of the time; apart from the ground, which is where nothing was recorded."""


@dataclass(frozen=True)
class Bars:
    """How bars of reports look.

    Attributes
    ----------
    title : str
        What is drawn.
    what : str
        Title of the axis, without unit.
    unit : str
        "byte", "ns" or "", of the values.
    is_stacked : bool
        Whether the series of a report add up; else they stand under one another.
    shades : mapping of str to Shade
        Colour of each series, in the order of legend and stack; others have colours of their own.
    notes : sequence of str
        Sentences under the title.
    mark_at : float or None
        Where a line is drawn across all bars, in the unit of the values.
    """

    title: str
    what: str
    unit: str = ""
    is_stacked: bool = True
    shades: Mapping[str, Shade] = field(default_factory=dict)
    notes: Sequence[str] = ()
    mark_at: float | None = None


def bars_of_reports(
    rows: pl.DataFrame, about: Bars, *, width: int = 640, theme: Theme = "light"
) -> Drawing:
    """Draw a bar for each report, or a few.

    Parameters
    ----------
    rows : DataFrame
        ``report`` (String, a label), ``series`` (String), ``value`` (a number; null is not drawn); the
        reports in the order of the axis.
    about : Bars
        What is drawn, and how.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        Horizontal bars.
    """
    known = rows.filter(pl.col("value").is_not_null())
    if known.is_empty():
        return nothing("There is nothing to draw.", title=about.title, width=width, theme=theme)
    unit, size = _unit(known, about.unit, is_stacked=about.is_stacked)
    series = _series(known, about)
    numbered = known.with_columns(
        shown=pl.col("value") / size,
        place=pl.col("series").replace_strict(series, range(len(series)), return_dtype=pl.Int64),
    )
    reports = rows["report"].unique(maintain_order=True).to_list()
    per_report = 1 if about.is_stacked else len(series)
    axis = alt.Axis(labelLimit=220, labelOverlap=False)
    encoding = {
        "x": alt.X(
            "shown:Q",
            title=f"{about.what}{f', {unit}' if unit else ''}",
            stack="zero" if about.is_stacked else None,
        ),
        "y": alt.Y("report:N", sort=reports, title=None, axis=axis),
        "color": alt.Color(
            "series:N",
            scale=alt.Scale(domain=series, range=_colours(series, about, theme)),
            legend=legend(series, None, width),
        ),
        "order": alt.Order("place:Q"),
        "tooltip": [
            alt.Tooltip("report:N", title="Report"),
            alt.Tooltip("series:N", title="What"),
            alt.Tooltip("shown:Q", title=about.what, format=",.4~g"),
        ],
    }
    if not about.is_stacked:
        encoding["yOffset"] = alt.YOffset("series:N", sort=series)
    height = max(60, len(reports) * (6 + _ROW_PX * per_report * (1 if about.is_stacked else 0.7)))
    bars = alt.Chart(numbered, width=width, height=height).mark_bar().encode(**encoding)
    chart: Drawing = bars
    if about.mark_at is not None:
        line = alt.Chart(pl.DataFrame({"at": [about.mark_at / size]})).mark_rule(strokeDash=[4, 3])
        chart = alt.layer(bars, line.encode(x="at:Q"))
    return themed(chart.properties(title=titled(about.title, width, about.notes)), theme)


def _unit(known: pl.DataFrame, unit: str, *, is_stacked: bool) -> tuple[str, float]:
    values = known.select("report", pl.col("value").cast(pl.Float64).abs())
    most = float(values["value"].max() or 0)  # type: ignore[arg-type]
    if is_stacked:
        most *= max(1, known["series"].n_unique() // 2)
    if unit == "byte":
        return byte_unit(most)
    return time_unit(most) if unit == "ns" else ("", 1.0)


def _series(known: pl.DataFrame, about: Bars) -> list[str]:
    present = known["series"].unique(maintain_order=True).to_list()
    first = [name for name in about.shades if name in present]
    return [*first, *(name for name in present if name not in about.shades)]


def _colours(series: Sequence[str], about: Bars, theme: Theme) -> list[str]:
    own = iter(range(len(series)))
    return [
        about.shades[name].on(theme)
        if name in about.shades
        else accent(theme)
        if len(series) == 1
        else NAMES[next(own) % len(NAMES)].on(theme)
        for name in series
    ]


def shares_over_time(
    cells: pl.DataFrame, *, notes: Sequence[str] = (), width: int = 640, theme: Theme = "light"
) -> Drawing:
    """Draw reports as rows of cells over time, each coloured by a share.

    Parameters
    ----------
    cells : DataFrame
        ``report`` (String), ``start_ns``, ``end_ns`` (Int64, ns), ``share`` (Float64, 0 to 1; null is not
        drawn); the reports in the order of the axis.
    notes : sequence of str
        Sentences under the title.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        A heat map.
    """
    title = "Share of time in which Unified Memory worked"
    known = cells.filter(pl.col("share").is_not_null())
    if known.is_empty():
        return nothing("No report knows it.", title=title, width=width, theme=theme)
    axis = time_axis(_number(cells["start_ns"].min()), _number(cells["end_ns"].max()))
    reports = cells["report"].unique(maintain_order=True).to_list()
    drawn = known.with_columns(
        start=axis.of("start_ns"), end=axis.of("end_ns"), percent=pl.col("share") * 100
    ).select("report", "start", "end", "percent")
    ends = drawn.select(pl.col("start").min(), pl.col("end").max()).row(0)
    chart = (
        alt.Chart(drawn, width=width, height=max(60, _ROW_PX * len(reports)))
        .mark_rect()
        .encode(
            x=_time_of_run(axis, ends),
            x2="end:Q",
            y=alt.Y(
                "report:N",
                sort=reports,
                title=None,
                scale=alt.Scale(domain=reports),
                axis=alt.Axis(labelLimit=220, labelOverlap=False),
            ),
            color=alt.Color(
                "percent:Q",
                title="Share of the time, %",
                scale=alt.Scale(domain=[0, 100], range=_HEAT[theme]),
                legend=alt.Legend(gradientLength=160),
            ),
            tooltip=[
                alt.Tooltip("report:N", title="Report"),
                alt.Tooltip("start:Q", title=f"From, {axis.unit}", format=",.6~f"),
                alt.Tooltip("end:Q", title=f"To, {axis.unit}", format=",.6~f"),
                alt.Tooltip("percent:Q", title="Share, %", format=".3~g"),
            ],
        )
    )
    return themed(chart.properties(title=titled(title, width, notes)), theme)


def spread_over_time(
    bins: pl.DataFrame, *, notes: Sequence[str] = (), width: int = 640, theme: Theme = "light"
) -> Drawing:
    """Draw the mean share of all reports over time, and the range from least to most.

    Parameters
    ----------
    bins : DataFrame
        ``start_ns``, ``end_ns`` (Int64, ns), ``mean_fraction``, ``min_fraction``, ``max_fraction``
        (Float64; null is not drawn), by time.
    notes : sequence of str
        Sentences under the title.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        Bars from least to most, and steps at the mean.
    """
    title = "Mean over reports, and from the least to the most"
    known = bins.filter(pl.col("mean_fraction").is_not_null())
    if known.is_empty():
        return nothing("No report knows it.", title=title, width=width, theme=theme)
    axis = time_axis(_number(bins["start_ns"].min()), _number(bins["end_ns"].max()))
    drawn = known.select(
        axis.of("start_ns").alias("start"),
        axis.of("end_ns").alias("end"),
        *((pl.col(f"{name}_fraction") * 100).alias(name) for name in ("mean", "min", "max")),
    )
    ends = drawn.select(pl.col("start").min(), pl.col("end").max()).row(0)
    x = _time_of_run(axis, ends)
    base = alt.Chart(drawn, width=width, height=_BAND_PX)
    y = alt.Scale(domain=[0, 100])
    tooltip = [
        alt.Tooltip("start:Q", title=f"From, {axis.unit}", format=",.6~f"),
        *(alt.Tooltip(f"{n}:Q", title=f"{n}, %", format=".3~g") for n in ("mean", "min", "max")),
    ]
    ranges = base.mark_rect(opacity=0.35, color=accent(theme)).encode(
        x=x,
        x2="end:Q",
        y=alt.Y("min:Q", title="Share of the time, %", scale=y),
        y2="max:Q",
        tooltip=tooltip,
    )
    means = base.mark_rule(strokeWidth=2, color=look(theme).text).encode(
        x=x, x2="end:Q", y="mean:Q"
    )
    return themed(alt.layer(ranges, means).properties(title=titled(title, width, notes)), theme)


def _time_of_run(axis: TimeAxis, ends: tuple[float, ...]) -> alt.X:
    """Make the x channel of the clock of a run, on which its sessions lie."""
    after = f"{exact_time(axis.origin_ns)} after " if axis.origin_ns else ""
    title = f"Time since {after}the first session of the run began, {axis.unit}"
    scale = alt.Scale(domain=list(ends), zero=False, nice=False)
    return alt.X("start:Q", title=title, scale=scale, axis=alt.Axis())


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None
