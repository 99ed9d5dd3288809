"""What PyTorch's caching allocator (PCA) changes from run to run: both sides of its effect, and the account of it.

These charts draw several runs, so they are no charts of one source and are not in the table of contents: they are
functions of the frames that :mod:`nsan.pca_effects` makes of what ``nsan pca`` computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import altair as alt
import polars as pl

from nsan.charts.palette import CAUSES, Shade
from nsan.charts.theme import (
    Drawing,
    Theme,
    accent,
    byte_unit,
    legend,
    look,
    name_text,
    nothing,
    themed,
    time_unit,
    titled,
)
from nsan.info import MODELLED

_GAP_PX: Final = 26
_LEAST_PX: Final = 118
"""Width of a panel at least."""

_MARGIN_PX: Final = 46
"""What the labels of a panel's axis take."""

_WORDS: Final = {
    "fault_rows": "Fault rows",
    "first_touches": "First touches",
    "traffic": "Traffic",
    "step_ns": "Step time",
}
_SIDES: Final = ("without the cache", "with it")

PARTS: Final = {
    "reuse": ("reuse", Shade("#0066a6", "#4ab3f1")),
    "dead": ("dead traffic", CAUSES["eviction"]),
    "packing": ("packing", Shade("#ac9400", "#f0e442")),
    "remainder": ("other", CAUSES["unknown"]),
}
"""Words and colour of each part of the account, in the order of legends and stacks."""

_NOTHING: Final = (
    "There is nothing to draw: no run without the caching allocator has one with it as its pair."
)


def pca_effect(effects: pl.DataFrame, *, width: int = 640, theme: Theme = "light") -> Drawing:
    """Draw what the caching allocator changes over oversubscription factors: what falls and what rises.

    Parameters
    ----------
    effects : DataFrame, ``EFFECTS``
        Of :func:`nsan.pca_effects.effects`: a figure of a pair of runs in each row.
    width : int, default 640
        Pixels of the whole, about.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        For each figure a panel of means of a warm step, without and with the cache, and below it the ratio of
        both with its 95 % interval. Of several networks, hints or allocators, the first; a note says so.
    """
    title = "What the caching allocator changes"
    if effects.is_empty():
        return nothing(_NOTHING, title=title, width=width, theme=theme)
    mine, notes = _first(effects)
    panels = [part for part in mine.partition_by("figure", maintain_order=True) if _is_known(part)]
    drawn = _in_lines(panels, width, lambda part, room: _panel(part, room, theme))
    if mine["ratio"].null_count():
        notes.append("No ratio where a figure is 0 without the cache, or unknown.")
    if mine.filter(pl.col("ratio").is_not_null())["ratio_low"].null_count():
        notes.append("One warm step has no interval.")
    return themed(drawn.properties(title=titled(title, width, notes)), theme)


def pca_account(account: pl.DataFrame, *, width: int = 640, theme: Theme = "light") -> Drawing:
    """Draw the difference that the caching allocator makes, split by what carries the mark of a mechanism.

    Parameters
    ----------
    account : DataFrame, ``ACCOUNT``
        Of :func:`nsan.pca_effects.account`: a part of the difference in a figure of a pair in each row.
    width : int, default 640
        Pixels of the whole, about.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        A panel for each figure: per pair the parts that add up above 0 and below it, and a mark at their sum,
        the difference. Of several networks, hints or allocators, the first; a note says so.
    """
    title = "Which mechanism the difference carries the mark of"
    if account.is_empty():
        return nothing(_NOTHING, title=title, width=width, theme=theme)
    mine, notes = _first(account)
    panels = mine.partition_by("figure", maintain_order=True)
    drawn = _in_lines(panels, width, lambda part, room: _stack(part, room, theme, width))
    notes.append("With the cache less without it, mean of a warm step; the line is the difference.")
    if mine["value"].null_count():
        notes.append("What is unknown is in other.")
    return themed(drawn.properties(title=titled(title, width, notes)), theme)


# What is drawn --------------------------------------------------------------------------------------


def _first(frame: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Take the rows of one network, hint and allocator, and say what they are."""
    parts = frame.partition_by("network", "hint", "allocator", maintain_order=True)
    mine = parts[0]
    network, hint, allocator = mine.select("network", "hint", "allocator").row(0)
    said = [name_text(each, 60) for each in (network, hint) if each not in {None, "none"}]
    if allocator not in {None, "caching"}:
        said.append(name_text(allocator, 60))
    kinds = mine["kind"].unique().to_list()
    kind = f"modelled: {MODELLED}" if kinds == ["modelled"] else "derived from recorded rows"
    notes = [f"{', '.join([*said, kind])}."]
    notes.append("A fault row is one batch of the driver.")
    if len(parts) > 1:
        notes.append(f"The first of {len(parts)} conditions: networks, hints or allocators.")
    return mine, notes


def _is_known(part: pl.DataFrame) -> bool:
    return part.select(pl.col("off", "on").is_not_null().any()).row(0) != (False, False)


def _in_lines(
    parts: list[pl.DataFrame],
    width: int,
    draw: Callable[[pl.DataFrame, int], alt.LayerChart | alt.VConcatChart],
) -> alt.VConcatChart:
    """Put panels beside each other, as many as fit."""
    each = _LEAST_PX + _MARGIN_PX + _GAP_PX
    fit = max(1, min(len(parts), (width + _GAP_PX) // each))
    n_lines = -(-len(parts) // fit)
    columns = -(
        -len(parts) // n_lines
    )  # lines of equal length: four are two and two, not three and one
    room = (width + _GAP_PX) // columns - _GAP_PX - _MARGIN_PX
    drawn = [draw(part, room) for part in parts]
    lines = [
        alt.hconcat(*drawn[i : i + columns], spacing=_GAP_PX) for i in range(0, len(drawn), columns)
    ]
    return alt.vconcat(*lines, spacing=14)


def _scaled(part: pl.DataFrame, columns: tuple[str, ...]) -> tuple[str, float]:
    """Choose the unit of a figure: its name for a title, and its size."""
    most = max((abs(value) for name in columns for value in part[name].drop_nulls()), default=0)
    unit = part["unit"][0]
    if unit == "byte":
        name, size = byte_unit(most)
        return f", {name}", size
    if unit == "ns":
        word, ns = time_unit(most)
        return f", {word}", ns
    return "", 1


def _place(part: pl.DataFrame) -> pl.Expr:
    """Name the pair of a row on the axis: by its factor, or by its run."""
    if part["factor"].null_count():
        return pl.col("run").map_elements(lambda text: name_text(text, 16), return_dtype=pl.String)
    return pl.col("factor").map_elements(lambda value: f"{value:g}", return_dtype=pl.String)


def _axis(part: pl.DataFrame, *, labels: bool = True) -> alt.X:
    """Make the axis of pairs: factors lie where their numbers are, runs beside each other."""
    title = "Run" if part["factor"].null_count() else "Factor"
    axis = alt.Axis(labelAngle=0) if labels else alt.Axis(labels=False, ticks=False)
    if part["factor"].null_count():
        return alt.X("place:O", title=title if labels else None, axis=axis, sort=None)
    values = sorted(set(part["factor"]))
    scale = alt.Scale(domain=[values[0], values[-1]], zero=False, nice=False, padding=10)
    axis = alt.Axis(values=values, format="~g", labelAngle=0, labels=labels, ticks=labels)
    return alt.X("factor:Q", title=title if labels else None, axis=axis, scale=scale)


def _panel(part: pl.DataFrame, room: int, theme: Theme) -> alt.VConcatChart:
    """Draw one figure: both sides, and below them their ratio."""
    figure = part["figure"][0]
    unit, size = _scaled(part, ("off", "on"))
    rows = part.with_columns(
        pl.col("off", "on") / size, pl.col("figure", "unit").cast(pl.String), place=_place(part)
    )
    title = alt.TitleParams(f"{_WORDS[figure]}{unit}", fontSize=11, offset=4)
    return alt.vconcat(
        _sides(rows, room, theme).properties(title=title), _ratio(rows, room, theme), spacing=6
    )


def _sides(rows: pl.DataFrame, room: int, theme: Theme) -> alt.LayerChart:
    both = pl.concat(
        rows.select("factor", "place", value=column, side=pl.lit(side))
        for column, side in zip(("off", "on"), _SIDES, strict=True)
    ).drop_nulls("value")
    scale = alt.Scale(domain=_SIDES, range=[accent(theme), accent(theme, 1)])
    most = max(both["value"], default=0)
    base = alt.Chart(both, width=room, height=110).encode(
        x=_axis(rows, labels=False),
        y=alt.Y("value:Q", title=None, scale=_room(0, most), axis=alt.Axis(tickCount=4)),
        color=alt.Color("side:N", scale=scale, legend=legend(_SIDES, None, 4 * room)),
        tooltip=[
            alt.Tooltip("place:N", title="Factor or run"),
            alt.Tooltip("side:N", title="Cache"),
            alt.Tooltip("value:Q", title="Mean of a warm step", format=",.4~g"),
        ],
    )
    return base.mark_line(strokeWidth=1.5) + base.mark_point(filled=True, size=40, opacity=1)


def _room(low: float, high: float) -> alt.Scale:
    """Make a scale with no tick at its top: its label would lift the title above those beside it."""
    above = 0.07 * (high - low) or 1.0
    return alt.Scale(domain=[low - above * (low < 0), high + above], nice=False)


def _ratio(rows: pl.DataFrame, room: int, theme: Theme) -> alt.LayerChart:
    """Draw on over off with its interval; the rule is at 1, no change."""
    known, x = rows.drop_nulls("ratio"), _axis(rows)  # with the same ends as the panel above
    scale = alt.Scale(zero=True, domainMin=0, nice=True)
    shown = accent(theme, 1)
    y = alt.Y("ratio:Q", title="With / without", scale=scale, axis=alt.Axis(tickCount=4))
    tooltip = [
        alt.Tooltip("place:N", title="Factor or run"),
        alt.Tooltip("ratio:Q", title="With / without", format=".3f"),
        alt.Tooltip("ratio_low:Q", title="95 % interval from", format=".3f"),
        alt.Tooltip("ratio_high:Q", title="to", format=".3f"),
    ]
    one = (
        alt.Chart(pl.DataFrame({"one": [1.0]}), width=room, height=90)
        .mark_rule(color=look(theme).muted, strokeDash=[4, 3])
        .encode(y=alt.Y("one:Q", title="With / without", scale=scale))
    )
    base = alt.Chart(known).encode(x=x, tooltip=tooltip)
    interval = base.mark_rule(color=shown, strokeWidth=2).encode(
        y=alt.Y("ratio_low:Q", title="With / without", scale=scale), y2="ratio_high:Q"
    )
    points = base.mark_point(filled=True, size=40, color=shown, opacity=1).encode(y=y)
    return one + base.mark_line(color=shown, strokeWidth=1.5).encode(y=y) + interval + points


def _stack(part: pl.DataFrame, room: int, theme: Theme, width: int) -> alt.LayerChart:
    """Draw the parts of one figure, above 0 what adds and below it what saves, and a mark at their sum."""
    unit, size = _scaled(part, ("low", "high"))
    words = {key: word for key, (word, _) in PARTS.items()}
    rows = part.drop_nulls("value").select(
        pl.col("value", "error", "low", "high", "difference") / size,
        place=_place(part),
        part=pl.col("part").cast(pl.String).replace_strict(words),
    )
    ends = _room(min(rows["low"], default=0.0), max(rows["high"], default=0.0))
    x = alt.X(
        "place:O",
        title="Run" if part["factor"].null_count() else "Factor",
        sort=rows["place"].unique(maintain_order=True).to_list(),
        axis=alt.Axis(labelAngle=0),
    )
    colors = alt.Scale(domain=[*words.values()], range=[s.on(theme) for _, s in PARTS.values()])
    title = alt.TitleParams(f"{_WORDS[part['figure'][0]]}{unit}", fontSize=11, offset=4)
    bars = (
        alt.Chart(rows, width=room, height=170, title=title)
        .mark_bar()
        .encode(
            x=x,
            y=alt.Y("low:Q", title=None, scale=ends),
            y2="high:Q",
            color=alt.Color(
                "part:N",
                scale=colors,
                legend=legend([*words.values()], "Carries the mark of", width),
            ),
            tooltip=[
                alt.Tooltip("place:N", title="Factor or run"),
                alt.Tooltip("part:N", title="Part"),
                alt.Tooltip("value:Q", title=f"With less without{unit}", format="+,.4~g"),
                alt.Tooltip("error:Q", title="Error", format=",.3~g"),
            ],
        )
    )
    sums = rows.select("place", "difference").unique(maintain_order=True)
    marks = (
        alt.Chart(sums)
        .mark_tick(color=look(theme).text, thickness=2)
        .encode(x=x, y=alt.Y("difference:Q", title=None, scale=ends))
    )
    zero = (
        alt.Chart(pl.DataFrame({"zero": [0]}))
        .mark_rule(color=look(theme).muted)
        .encode(y=alt.Y("zero:Q", title=None, scale=ends))
    )
    return bars + zero + marks
