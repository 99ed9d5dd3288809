"""Steps of the program side by side: what moved when in each, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import altair as alt
import polars as pl

from nsan.charts.catalog import chart
from nsan.charts.memory import largest
from nsan.charts.palette import Theme
from nsan.charts.theme import (
    CAUSE_ORDER,
    byte_unit,
    cause_color,
    cause_label,
    name_text,
    themed,
    time_unit,
    titled,
)
from nsan.units import counted, format_bytes, format_count, format_time

_GAP_PX: Final = 34
_PANEL_PX: Final = 160
"""Width of a panel at least: its title has to fit."""


@dataclass(frozen=True)
class Place:
    """Where a panel is: its width in pixels, whether it is the first of its line and the last of its column."""

    width: int
    is_first: bool
    is_last: bool


@chart(
    question="What moves when in each step, and does each step do the same?",
    draws=("step_traffic",),
    title="Steps side by side",
    figures=("bytes", "n_fault_rows", "step_id", "basis"),
)
def step_by_step(
    steps: pl.DataFrame, *, width: int = 640, theme: Theme = "light"
) -> alt.TopLevelMixin:
    """Draw what moved in each step over its own time, steps side by side on the same scales.

    Parameters
    ----------
    steps : DataFrame, ``STEP_TRAFFIC``
        Bytes by stretch, direction and cause, of at most twelve steps.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        A panel for each step: bytes to the GPU up, bytes to the CPU down. Of a program with several
        processes or GPUs that have steps of their own, the first.
    """
    parts = steps.partition_by("pid", "device_id", maintain_order=True)
    mine = parts[0]
    columns = max(1, min(3, width // (_PANEL_PX + _GAP_PX), mine["step_id"].n_unique()))
    panel = (width - _GAP_PX * (columns - 1)) // columns
    rows, scales = _rows(mine)
    color = cause_color(rows, theme, width)
    by_step = {key[0]: part for key, part in rows.partition_by("step_id", as_dict=True).items()}
    heads = mine.unique("step_id", maintain_order=True).to_dicts()
    places = [Place(panel, i % columns == 0, i + columns >= len(heads)) for i in range(len(heads))]
    drawn = [
        _panel(by_step.get(head["step_id"], rows.clear()), head, place, (scales, color))
        for head, place in zip(heads, places, strict=True)
    ]
    lines = [
        alt.hconcat(*drawn[i : i + columns], spacing=_GAP_PX) for i in range(0, len(drawn), columns)
    ]
    title = titled("What each step moves, over its own time", width, _notes(mine, len(parts)))
    return themed(alt.vconcat(*lines, spacing=12).properties(title=title), theme)


def _rows(mine: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Stack the causes of each stretch, what goes to the CPU below zero, in units that fit."""
    out = pl.col("direction") == "dtoh"
    moved = mine.filter(pl.col("bytes") > 0).with_columns(
        cause=cause_label(), size=pl.when(out).then(-pl.col("bytes")).otherwise("bytes"), out=out
    )
    place = pl.col("cause").replace_strict(
        CAUSE_ORDER, range(len(CAUSE_ORDER)), default=len(CAUSE_ORDER), return_dtype=pl.Int64
    )
    by = ["step_id", "offset_ns", "out"]
    high = pl.col("size").cum_sum().over(by)
    stacked = moved.sort(*by, place).with_columns(high=high, low=high - pl.col("size"))
    least, most = (
        int(edge or 0)
        for edge in stacked.select(pl.col("high").min(), most=pl.col("high").max()).row(0)
    )
    unit, size = byte_unit(max(most, -least))
    longest = largest(mine["time_ns"]) or 1
    time, ns = time_unit(longest)
    rows = stacked.select(
        "step_id",
        "cause",
        start=pl.col("offset_ns") / ns,
        # A stretch may reach beyond the end of its step: the next step begins there.
        end=pl.min_horizontal(pl.col("offset_ns") + pl.col("length_ns"), "time_ns") / ns,
        low=pl.col("low") / size,
        high=pl.col("high") / size,
        moved=pl.col("bytes") / size,
    )
    scales = {
        "x": alt.Scale(domain=[0, longest / ns], nice=False),
        "y": alt.Scale(domain=[min(least, 0) / size, max(most, 0) / size or 1.0], nice=True),
        "x_title": f"Time in the step, {time}",
        "unit": time,
        "y_title": f"{unit} out | in" if least < 0 else f"{unit} in",
    }
    return rows, scales


def _panel(
    rows: pl.DataFrame, head: dict[str, Any], place: Place, drawn: tuple[dict[str, Any], alt.Color]
) -> alt.Chart:
    scales, color = drawn
    axis = alt.Axis(labelExpr="format(abs(datum.value), '~r')", tickCount=4)
    x_title = scales["x_title"] if place.is_last else None
    y_title = scales["y_title"] if place.is_first else None
    return (
        alt.Chart(rows, width=place.width, height=96, title=_title(head, place.width))
        .mark_rect()
        .encode(
            x=alt.X("start:Q", title=x_title, scale=scales["x"], axis=alt.Axis(tickCount=4)),
            x2="end:Q",
            y=alt.Y("low:Q", title=y_title, scale=scales["y"], axis=axis),
            y2="high:Q",
            color=color,
            tooltip=[
                alt.Tooltip("cause:N", title="Cause"),
                alt.Tooltip("moved:Q", title=scales["y_title"].partition(" ")[0], format=".3f"),
                alt.Tooltip("start:Q", title=f"From, {scales['unit']}", format=",.6~f"),
                alt.Tooltip("end:Q", title=f"To, {scales['unit']}", format=",.6~f"),
            ],
        )
    )


def _title(head: dict[str, Any], width: int) -> alt.TitleParams:
    faults = head["n_fault_rows"]
    rows = f"{format_count(faults)} fault rows" if faults is not None else "fault rows not recorded"
    moved = f"in {format_bytes(head['step_in_bytes'])}, out {format_bytes(head['step_out_bytes'])}"
    return alt.TitleParams(
        f"Step {head['step_id']}: {format_time(head['time_ns'])}",
        subtitle=[moved, rows] if width < 300 else [f"{moved}, {rows}"],
        fontSize=11,
        subtitleFontSize=10,
        offset=4,
    )


def _notes(mine: pl.DataFrame, n_parts: int) -> list[str]:
    first = mine.row(0, named=True)
    found = mine["step_id"].unique().sort().to_list()
    name = name_text(first["name"] or "(no name)", 60)
    told = (
        f"NVTX range {name}"
        if first["basis"] == "nvtx"
        else f"repeats of the kernels from {name} on"
    )
    notes = [f"Steps are the {told}; the same scales for all."]
    absent = sorted({*range(first["n_steps"])} - {*found})
    if absent:
        notes.append(
            f"{len(found)} of {counted(first['n_steps'], 'step')}: the first, the last and those that move most. "
            f"Left out: {_ranges(absent)}."
        )
    if n_parts > 1:
        notes.append(
            f"{counted(n_parts - 1, 'process or GPU', 'processes or GPUs')} more with steps of their own: ask for one."
        )
    return notes


def _ranges(numbers: Iterable[int], most: int = 12) -> str:
    """Write numbers as ranges, so that a long list stays short."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a} to {b}" for a, b in runs]
    return ", ".join(texts[:most]) + (
        f" and {len(texts) - most} ranges more" if len(texts) > most else ""
    )
