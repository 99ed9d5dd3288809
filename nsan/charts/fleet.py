"""Many reports: UM time by rank, runs one after the other, and causes of the ranks that move most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import altair as alt
import polars as pl

from nsan.charts.memory import largest
from nsan.charts.theme import (
    Drawing,
    Theme,
    accent,
    byte_unit,
    cause_color,
    cause_label,
    legend,
    name_text,
    themed,
    time_unit,
    titled,
)
from nsan.units import format_time

MOST_BARS: Final = 300
"""Bars of a run: more would be thinner than a pixel."""

MOST_PANELS: Final = 6
MOST_RUNS: Final = 1200
MOST_CAUSED: Final = 24
_NAMED_RUNS: Final = 24
_PANEL_PX: Final = 110
_AMONG: Final = "like the others"
_WORDS: Final = {"more": "stands out: more", "less": "stands out: less", None: _AMONG}


def um_by_rank(
    panels: Sequence[tuple[str, pl.DataFrame]],
    *,
    notes: Sequence[str] = (),
    width: int = 640,
    theme: Theme = "light",
) -> Drawing:
    """Draw UM time by rank, a panel for each run.

    Parameters
    ----------
    panels : sequence of (str, DataFrame)
        Name of a run, and its :data:`nsan.analysis.fleet.views.BARS`, at least one with a row.
    notes : sequence of str, optional
        Sentences under the title.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        Bars on one scale; those that stand out have a colour of their own.
    """
    most = max(int(largest(rows["value_ns"]) or 0) for _, rows in panels) or 1
    unit, ns = time_unit(most)
    sides = [s for s in _WORDS if any(s in rows["side"].to_list() for _, rows in panels)]
    color = alt.Color(
        "side:N",
        scale=_sides(sides, theme),
        legend=legend([_WORDS[side] for side in sides], None, width),
    )
    y = alt.Y("value:Q", title=f"UM time, {unit}", scale=alt.Scale(domain=[0, 1.05 * most / ns]))
    drawn = [
        _bars(name, rows, (y, color, ns), last=place == len(panels) - 1, width=width)
        for place, (name, rows) in enumerate(panels)
    ]
    title = titled("UM time by rank", width, notes)
    return themed(alt.vconcat(*drawn, spacing=10).properties(title=title), theme)


def _sides(sides: Sequence[str | None], theme: Theme) -> alt.Scale:
    shades = {None: accent(theme), "more": accent(theme, 1), "less": "#7a8a5e"}
    return alt.Scale(
        domain=[_WORDS[side] for side in sides], range=[shades[side] for side in sides]
    )


def _bars(
    name: str, rows: pl.DataFrame, how: tuple[alt.Y, alt.Color, int], *, last: bool, width: int
) -> alt.Chart:
    y, color, ns = how
    shown = rows.select(
        low=pl.col("first") - 0.45,
        high=pl.col("last") + 0.45,
        value=pl.col("value_ns") / ns,
        side=pl.col("side").replace_strict(
            {k: v for k, v in _WORDS.items() if k}, default=_AMONG, return_dtype=pl.String
        ),
        ranks=_ranks(),
        time=pl.Series([format_time(value) for value in rows["value_ns"]], dtype=pl.String),
    )
    more: dict[str, Any] = {"title": _panel_title(name)} if name else {}
    whole = alt.Axis(labelExpr="datum.value == floor(datum.value) ? format(datum.value, ',d') : ''")
    return (
        alt.Chart(shown, width=width, height=_PANEL_PX, **more)
        .mark_rect()
        .encode(
            x=alt.X(
                "low:Q",
                title="Rank" if last else None,
                scale=alt.Scale(zero=False, nice=False),
                axis=whole,
            ),
            x2="high:Q",
            y=y,
            y2=alt.datum(0),
            color=color,
            tooltip=[
                alt.Tooltip("ranks:N", title="Rank"),
                alt.Tooltip("time:N", title="UM time"),
                alt.Tooltip("side:N", title="Compared"),
            ],
        )
    )


def _ranks() -> pl.Expr:
    first, last = pl.col("first").cast(pl.String), pl.col("last").cast(pl.String)
    return pl.when(pl.col("n") == 1).then(first).otherwise(first + " to " + last)


def _panel_title(name: str) -> alt.TitleParams:
    return alt.TitleParams(name_text(name), fontSize=11, fontWeight="normal", offset=4)


def runs_over_time(
    runs: pl.DataFrame,
    *,
    notes: Sequence[str] = (),
    width: int = 640,
    theme: Theme = "light",
) -> Drawing:
    """Draw of each run the median rank's UM time, and from the least to the largest.

    Parameters
    ----------
    runs : DataFrame
        In order: ``run``, ``started``, ``min_ns``, ``median_ns``, ``max_ns``, ``side`` (of the run; null: like the
        others). At least one row.
    notes : sequence of str, optional
        Sentences under the title.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        A line from least to largest and a point at the median for each run.
    """
    unit, ns = time_unit(largest(runs["max_ns"]) or 1)
    names = _distinct(runs["run"].to_list(), 28)
    told = [_WORDS[side] for side in runs["side"]]
    shown = runs.with_row_index("place").select(
        "place",
        "started",
        *(pl.col(f"{each}_ns").truediv(ns).alias(each) for each in ("min", "median", "max")),
        run=pl.Series(names, dtype=pl.String),
        side=pl.Series(told, dtype=pl.String),
        spread=pl.Series(
            [
                f"{format_time(row['min_ns'])} to {format_time(row['max_ns'])}"
                for row in runs.to_dicts()
            ],
            dtype=pl.String,
        ),
        middle=pl.Series([format_time(value) for value in runs["median_ns"]], dtype=pl.String),
    )
    sides = [side for side in _WORDS if side in runs["side"].to_list()]
    tooltip = [
        alt.Tooltip("run:N", title="Run"),
        alt.Tooltip("started:N", title="Started (UTC)"),
        alt.Tooltip("middle:N", title="Median"),
        alt.Tooltip("spread:N", title="Ranks"),
    ]
    base = alt.Chart(shown, width=width, height=200).encode(
        x=_place(names),
        color=alt.Color(
            "side:N",
            scale=_sides(sides, theme),
            legend=legend([_WORDS[side] for side in sides], None, width),
        ),
        tooltip=tooltip,
    )
    y = alt.Y("min:Q", title=f"UM time of a rank, {unit}", scale=alt.Scale(zero=True))
    lines = base.mark_rule(strokeWidth=2).encode(y=y, y2="max:Q")
    points = base.mark_circle(size=42, opacity=1).encode(y="median:Q")
    title = titled("UM time of a rank in each run: median, least and largest", width, notes)
    return themed(alt.layer(lines, points).properties(title=title), theme)


def _place(names: Sequence[str]) -> alt.X:
    """Make the axis of runs: their names where there is room, else numbers."""
    if len(names) > _NAMED_RUNS:
        scale = alt.Scale(domain=[-0.5, len(names) - 0.5], nice=False)
        return alt.X("place:Q", title="Run, in order", scale=scale)
    return alt.X("run:N", sort=list(names), title=None, axis=alt.Axis(labelAngle=-40))


def _distinct(names: Sequence[str], most: int) -> list[str]:
    """Make names short and harmless; those that are alike then get a number."""
    short = [name_text(name or "(no name)", most) for name in names]
    return [
        f"{name} ({place + 1})" if short.count(name) > 1 else name
        for place, name in enumerate(short)
    ]


def causes_by_rank(
    causes: pl.DataFrame,
    *,
    notes: Sequence[str] = (),
    width: int = 640,
    theme: Theme = "light",
) -> Drawing:
    """Draw by cause what the reports moved that moved most.

    Parameters
    ----------
    causes : DataFrame, :data:`nsan.analysis.fleet.views.CAUSES_OF`
        At least one row.
    notes : sequence of str, optional
        Sentences under the title.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        A stacked bar for each report.
    """
    unit, size = byte_unit(largest(causes["bytes"]))
    reports = causes.unique("place", maintain_order=True)
    order = _distinct(reports["label"].to_list(), 32)
    shown = causes.select(
        label=pl.col("place").replace_strict(reports["place"], order, return_dtype=pl.String),
        cause=cause_label(),
        size=pl.col("bytes") / size,
    )
    drawn = (
        alt.Chart(shown, width=width, height=alt.Step(18))
        .mark_bar()
        .encode(
            x=alt.X("size:Q", title=f"Moved, {unit}", stack="zero", axis=alt.Axis(tickCount=6)),
            y=alt.Y("label:N", sort=order, title=None),
            color=cause_color(shown, theme, width),
            tooltip=[
                alt.Tooltip("label:N", title="Report"),
                alt.Tooltip("cause:N", title="Cause"),
                alt.Tooltip("size:Q", title=unit, format=",.3f"),
            ],
        )
    )
    title = titled("Why memory moved, by rank", width, notes)
    return themed(drawn.properties(title=title), theme)
