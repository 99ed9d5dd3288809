"""Traffic of managed memory over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import altair as alt
import polars as pl

from nsan.charts.catalog import chart
from nsan.charts.theme import (
    Drawing,
    Part,
    Theme,
    TimeAxis,
    byte_unit,
    cause_color,
    cause_label,
    direction_label,
    exact_time,
    far_note,
    look,
    name_text,
    nothing,
    themed,
    time_axis,
    titled,
)
from nsan.text import direction_word
from nsan.units import counted, format_bytes

_ACROSS_PX: Final = 260
_BETWEEN_PX: Final = 120
_LEAST_PX: Final = 2
"""A bar that is lower would not be seen beside a high one."""


@dataclass(frozen=True)
class _Frame:
    """What rows of bars share: time, its range, and size; of two traces also time's title and the colours."""

    time: TimeAxis
    domain: list[float]
    unit: str
    width: int
    theme: Theme
    time_title: str = ""
    color: alt.Color | None = None


@chart(
    question="When did memory move, which way and why?",
    draws=("causes_over_time",),
    figures=("n_migrations", "bytes"),
)
def migrations_over_time(
    moved: pl.DataFrame, *, width: int = 640, theme: Theme = "light"
) -> Drawing:
    """Draw bytes moved over time by cause: what came into GPUs upwards, what left them downwards.

    Parameters
    ----------
    moved : DataFrame, ``CAUSES_OVER_TIME``
        One row per stretch of time, direction and cause.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        Stacked bars; copies between GPUs, where there are any, in a row of their own.
    """
    first, last, most = moved.select(
        pl.min("start_ns"),
        pl.max("end_ns"),
        most=(pl.col("before_bytes") + pl.col("bytes")).max(),
    ).row(0)
    time = time_axis(first, last)
    unit, size = byte_unit(most)
    least = _least(moved)
    frame = _prepared(moved, time, size, least)
    domain = [frame["start"].min(), frame["end"].max()]
    shared = _Frame(time, domain, unit, width, theme)  # type: ignore[arg-type]
    between = frame["direction"] == direction_word("dtod")
    body: Drawing
    if not between.any():
        body = _across(frame, shared, labels=True)
    elif between.all():
        body = _between(frame, shared)
    else:
        # One scale of time for both rows, and its labels once.
        rows = (_across(frame.filter(~between), shared, labels=False), frame.filter(between))
        body = alt.vconcat(rows[0], _between(rows[1], shared), spacing=10)
    notes = [_note(moved) + _least_note(moved, least)]
    return themed(body.properties(title=titled("Migrations over time", width, notes)), theme)


def migrations_of_two(
    a: pl.DataFrame,
    b: pl.DataFrame,
    *,
    names: tuple[str, str],
    width: int = 640,
    theme: Theme = "light",
) -> Drawing:
    """Draw bytes moved over time of two traces below each other, on one scale of time and one of bytes.

    It draws two sources, so it is in no table of contents; :func:`nsan.report.side_by_side.traffic_of_two` draws it
    for two traces.

    Parameters
    ----------
    a, b : DataFrame, ``CAUSES_OVER_TIME``
        Of each trace, in stretches of the same length.
    names : (str, str)
        What each is called.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        Each from its own first copy on. Copies between GPUs are left out, and a note says so.
    """
    title = "Migrations over time, on one scale"
    drawn = [each.filter(pl.col("direction").cast(pl.String) != "dtod") for each in (a, b)]
    if all(each.is_empty() for each in drawn):
        return nothing("Nothing moved in either.", title=title, width=width, theme=theme)
    spans = [_span(each) for each in drawn]
    longest = max(last - first for first, last in spans)
    unit, size = byte_unit(max(_most(each) for each in drawn))
    time = time_axis(0, longest)
    least = _least(pl.concat(drawn))
    rows = [
        _prepared(each, TimeAxis(time.unit, time.ns, first), size, least)
        for each, (first, _) in zip(drawn, spans, strict=True)
    ]
    shared = _Frame(
        time,
        [0, longest / time.ns],
        unit,
        width,
        theme,
        f"Time since the first copy of each, {time.unit}",
        cause_color(pl.concat(rows), theme, width),
    )
    parts = [
        _across(each, shared, labels=bool(place)).properties(title=_of(name, moved))
        for place, (each, name, moved) in enumerate(zip(rows, names, drawn, strict=True))
    ]
    notes = [_stretch_note(drawn) + _least_note(pl.concat(drawn), least)]
    if any(each.height < whole.height for each, whole in zip(drawn, (a, b), strict=True)):
        notes.append("Copies between GPUs are left out.")
    body = alt.vconcat(*parts, spacing=10).resolve_scale(y="shared", color="shared")
    return themed(body.properties(title=titled(title, width, notes)), theme)


def _span(moved: pl.DataFrame) -> tuple[int, int]:
    first, last = moved.select(pl.min("start_ns"), pl.max("end_ns")).row(0)
    return first or 0, last or 0


def _most(moved: pl.DataFrame) -> int:
    return moved.select((pl.col("before_bytes") + pl.col("bytes")).max()).item() or 0


def _of(name: str, moved: pl.DataFrame) -> alt.TitleParams:
    copies = counted(int(moved["n_migrations"].sum()), "copy", "copies")
    said = f"{name_text(name)}: {format_bytes(int(moved['bytes'].sum()))} in {copies}"
    return alt.TitleParams(said, fontSize=11, offset=4)


def _stretch_note(drawn: list[pl.DataFrame]) -> str:
    lengths = {each["end_ns"][0] - each["start_ns"][0] for each in drawn if each.height}
    step = " and ".join(map(exact_time, sorted(lengths)))
    far = "".join(far_note(each) for each in drawn if each.height)
    return f"Bytes added up where copies start, in stretches of {step}.{far}"


def _note(moved: pl.DataFrame) -> str:
    copies = counted(int(moved["n_migrations"].sum()), "copy", "copies")
    together = f", of {moved['n_gpus'][0]} GPUs together" * (moved["n_gpus"][0] > 1)
    step = exact_time(moved["end_ns"][0] - moved["start_ns"][0])
    return f"Bytes of {copies}, added up where they start, in stretches of {step}{together}.{_only(moved)}{far_note(moved)}"


def _only(moved: pl.DataFrame) -> str:
    """Name the cause where there is but one: then there is no legend."""
    found = moved.select(cause_label().fill_null("unknown")).to_series().unique().to_list()
    if len(found) > 1:
        return ""
    return " The cause is not known." if found == ["unknown"] else f" All by {found[0]}."


def _least(moved: pl.DataFrame) -> pl.Expr:
    """Find by direction how many bytes the lowest bar that is seen stands for, byte."""
    way = pl.col("direction").cast(pl.String)
    end = pl.col("before_bytes") + pl.col("bytes")
    ways = ("htod", "dtoh", "dtod")
    into, out, between = moved.select(
        end.filter(way == each).max().fill_null(0).alias(each) for each in ways
    ).row(0)
    across = (into + out) / _ACROSS_PX
    pixel = dict(zip(ways, (across, across, between / _BETWEEN_PX), strict=True))
    return _LEAST_PX * way.replace_strict(pixel, default=0.0, return_dtype=pl.Float64)


def _least_note(moved: pl.DataFrame, least: pl.Expr) -> str:
    low = moved.select(((pl.col("bytes") > 0) & (pl.col("bytes") < least)).any()).item()
    return f" A bar is at least {_LEAST_PX} pixels high." * bool(low)


def _prepared(moved: pl.DataFrame, time: TimeAxis, size: int, least: pl.Expr) -> pl.DataFrame:
    """Put times and sizes into the units of the axes; what leaves a GPU gets a minus."""
    sign = pl.when(pl.col("direction").cast(pl.String) == "dtoh").then(-1).otherwise(1)
    seen = pl.when(pl.col("bytes") > 0).then(pl.max_horizontal("bytes", least)).otherwise("bytes")
    return moved.select(
        start=time.of("start_ns"),
        end=time.of("end_ns"),
        low=sign * pl.col("before_bytes") / size,
        high=sign * (pl.col("before_bytes") + seen) / size,
        cause=cause_label().fill_null("unknown"),
        direction=direction_label().fill_null("unknown"),
        moved=pl.col("bytes").map_elements(format_bytes, return_dtype=pl.String),
        copies="n_migrations",
    )


def _across(frame: pl.DataFrame, shared: _Frame, *, labels: bool) -> Part:
    """Draw what crossed between host and GPUs."""
    title = f"\N{LEFTWARDS ARROW} out of GPU, {shared.unit}, into GPU \N{RIGHTWARDS ARROW}"
    return _bars(frame, shared, title=title, height=_ACROSS_PX, labels=labels)


def _between(frame: pl.DataFrame, shared: _Frame) -> Part:
    """Draw what moved from GPU to GPU."""
    return _bars(
        frame, shared, title=f"Between GPUs, {shared.unit}", height=_BETWEEN_PX, labels=True
    )


def _bars(
    frame: pl.DataFrame, shared: _Frame, *, title: str, height: int, labels: bool
) -> alt.LayerChart:
    time = shared.time
    scale = alt.Scale(domain=shared.domain, nice=False)
    axis = alt.Axis() if labels else alt.Axis(labels=False, ticks=False)
    x = time.axis("start", scale=scale, axis=axis)
    x = x.title(shared.time_title) if shared.time_title else x
    bars = (
        alt.Chart(frame, width=shared.width, height=height)
        .mark_bar(binSpacing=0)
        .encode(
            x=x if labels else x.title(None),
            x2="end:Q",
            y=alt.Y(
                "low:Q", title=title, axis=alt.Axis(labelExpr="format(abs(datum.value), ',~g')")
            ),
            y2="high:Q",
            color=shared.color or cause_color(frame, shared.theme, shared.width),
            tooltip=[
                alt.Tooltip("start:Q", title=f"Start, {time.unit}", format=",.6~f"),
                alt.Tooltip("direction:N", title="Direction"),
                alt.Tooltip("cause:N", title="Cause"),
                alt.Tooltip("moved:N", title="Moved"),
                alt.Tooltip("copies:Q", title="Copies", format=","),
            ],
        )
    )
    zero = (
        alt.Chart(pl.DataFrame({"zero": [0]}))
        .mark_rule(color=look(shared.theme).muted, strokeWidth=1)
        .encode(y="zero:Q")
    )
    return bars + zero
