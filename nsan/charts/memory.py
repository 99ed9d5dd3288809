"""What held each GPU's memory over time, against what there is: the oversubscription ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import altair as alt
import polars as pl

from nsan.charts.catalog import chart
from nsan.charts.palette import Shade, Theme
from nsan.charts.theme import (
    TimeAxis,
    byte_unit,
    gpu_label,
    legend,
    look,
    themed,
    time_axis,
    titled,
)
from nsan.units import counted, format_bytes, format_time

MOST_PANELS: Final = 3
"""GPUs in one chart, each with a panel: more would be too small to read."""

_OTHER: Final = "other memory"
_RESIDENT: Final = "managed, known to be here"
_BACKFILLED: Final = "managed, first touched: at most"
_ALIVE: Final = "alive: managed + other"
_CAPACITY: Final = "GPU memory"

LEVELS: Final = {
    _OTHER: Shade("#a6a9ad", "#6f757d"),
    _RESIDENT: Shade("#44aa99", "#3fa896"),
    _BACKFILLED: Shade("#ddcc77", "#b8a64c"),
    _ALIVE: Shade("#332288", "#b7a8f0"),
    _CAPACITY: Shade("#cc3311", "#ff7a5c"),
}
"""Colour of each level."""

_FAR: Final = 3.0
"""A capacity so many times above all levels is said in words: drawn, it would press them flat."""


def panels(frame: pl.DataFrame, keys: Sequence[str] = ("pid", "device_id")) -> list[pl.DataFrame]:
    """Cut a frame into the parts that have a panel of their own, at most three.

    Parameters
    ----------
    frame : DataFrame
        What an analysis gave, with ``keys``.
    keys : sequence of str
        What a panel is of.

    Returns
    -------
    list of DataFrame
        The first parts, in the order of the frame.
    """
    return frame.partition_by(list(keys), maintain_order=True)[:MOST_PANELS]


def left_out(
    frame: pl.DataFrame, one: str, keys: Sequence[str] = ("pid", "device_id")
) -> list[str]:
    """Say how many parts have no panel; nothing where all have one."""
    more = frame.select(keys).unique().height - MOST_PANELS
    return [f"{counted(more, one)} more not shown."] if more > 0 else []


def part_title(part: pl.DataFrame, *, is_only: bool) -> str | alt.TitleParams:
    """Name the GPU of a panel; nothing where there is but one."""
    if is_only:
        return ""
    name = str(part.select(gpu_label()).item(0, 0))
    return alt.TitleParams(name, fontSize=11, fontWeight="normal", offset=4)


@chart(
    question="What held each GPU's memory over time, and how much more was there than room for it?",
    draws=("memory_over_time", "oversubscription_factor"),
    title="GPU memory over time",
    figures=("resident_bytes", "backfilled_bytes", "managed_bytes", "observed_factor"),
)
def memory_held(
    levels: pl.DataFrame, factors: pl.DataFrame, *, width: int = 640, theme: Theme = "light"
) -> alt.TopLevelMixin:
    """Draw what is known to be in each GPU's memory, against what is alive and what there is.

    Parameters
    ----------
    levels : DataFrame, ``MEMORY_OVER_TIME``
        Stretches of time of each GPU.
    factors : DataFrame, ``OVERSUBSCRIPTION``
        The oversubscription factor of each GPU.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        One panel for each GPU, at most three.
    """
    some = _that_hold(levels)
    parts = panels(some)
    axis = time_axis(smallest(some["start_ns"]), largest(some["start_ns"]))
    there = {name for part in parts for name in _levels_in(part)}
    known = [name for name in LEVELS if name in there]
    drawn = [
        _panel(part, axis, Place(width, theme, _until(some), len(parts) == 1, known))
        for part in parts
    ]
    gpus = some.select("device_id").unique()["device_id"].to_list()
    notes = [
        *_factors(
            factors.filter(pl.col("device_id").is_in(gpus, nulls_equal=True)).head(MOST_PANELS)
        ),
        *_assumptions(some),
        *_binned(some),
        *left_out(some, "GPU"),
    ]
    whole = alt.vconcat(*drawn, spacing=14)
    return themed(whole.properties(title=titled("GPU memory over time", width, notes)), theme)


def largest(column: pl.Series) -> int:
    """Return the largest value of a column of whole numbers; 0 where there is none."""
    return int(cast("int", column.max() or 0))


def smallest(column: pl.Series) -> int:
    """Return the smallest value of a column of whole numbers; 0 where there is none."""
    return int(cast("int", column.min() or 0))


def _that_hold(levels: pl.DataFrame) -> pl.DataFrame:
    """Leave out GPUs that never held anything, if another one did: allocations may name no GPU."""
    held = (
        pl.sum_horizontal("resident_bytes", "backfilled_bytes", "other_bytes")
        .max()
        .over("pid", "device_id")
    )
    some = levels.filter(held > 0)
    return levels if some.is_empty() else some


@dataclass(frozen=True)
class Place:
    """How a panel is drawn.

    Attributes
    ----------
    width : int
        Pixels.
    theme : {"light", "dark"}
        The ground.
    until : int
        Time at which the last level ends, ns.
    is_only : bool
        There is no other panel.
    levels : list of str
        Levels in the legend, the same for all panels.
    """

    width: int
    theme: Theme
    until: int
    is_only: bool
    levels: list[str]


def _is_near(part: pl.DataFrame) -> bool:
    """Say whether the GPU's memory is near enough to the levels to be drawn."""
    capacity = largest(part["capacity_bytes"])
    return 0 < capacity <= _FAR * _highest(part)


def _highest(part: pl.DataFrame) -> int:
    held = pl.sum_horizontal("other_bytes", "resident_bytes", "backfilled_bytes")
    return largest(part.select(pl.max_horizontal(held, _alive()))["other_bytes"])


def _levels_in(part: pl.DataFrame) -> list[str]:
    """List the levels that a panel shows: one that is always empty needs no entry in the legend."""
    there = {
        _OTHER: (part["other_bytes"] > 0).any(),
        _RESIDENT: True,
        _BACKFILLED: (part["backfilled_bytes"] > 0).any(),
        _ALIVE: part["managed_bytes"].null_count() < part.height,
        _CAPACITY: _is_near(part),
    }
    return [name for name in LEVELS if there[name]]


def _panel(part: pl.DataFrame, axis: TimeAxis, place: Place) -> alt.LayerChart:
    width, theme, shown = place.width, place.theme, _levels_in(part)
    ends = _with_end(part, place.until)
    unit, size = byte_unit(
        max(_highest(part), largest(part["capacity_bytes"]) if _is_near(part) else 0)
    )
    scale = alt.Scale(domain=place.levels, range=[LEVELS[name].on(theme) for name in place.levels])
    color = alt.Color("level:N", scale=scale, legend=legend(place.levels, None, width))
    x, y_title = axis.axis("time"), f"Memory, {unit}"
    at = axis.of("time_ns").alias("time")
    height = 220 if place.is_only else 150
    stacks = _stacked(ends, shown).select("level", at, pl.col("low") / size, pl.col("high") / size)
    areas = (
        alt.Chart(stacks, width=width, height=height)
        .mark_area(interpolate="step-after", opacity=0.9)
        .encode(x=x, y=alt.Y("low:Q", title=y_title), y2="high:Q", color=color)
    )
    lines = {_ALIVE: _alive(), _CAPACITY: pl.col("capacity_bytes")}
    edges = [_line(ends, value, name) for name, value in lines.items() if name in shown]
    layers: list[alt.Chart] = [areas]
    for edge in edges:
        rows = edge.drop_nulls("high").select("level", at, pl.col("high") / size)
        # What is given and not measured is dashed, so that it is told apart without its colour.
        dash = [5, 3] if edge["level"][0] == _CAPACITY else [1, 0]
        line = alt.Chart(rows, width=width, height=height).mark_line(
            interpolate="step-after", strokeWidth=1.6, strokeDash=dash
        )
        layers.append(line.encode(x=x, y=alt.Y("high:Q", title=y_title), color=color))
    drawn = alt.layer(*layers, title=part_title(part, is_only=place.is_only))
    return cast("alt.LayerChart", drawn)


def _alive() -> pl.Expr:
    return pl.col("managed_bytes") + pl.col("other_bytes")


def _stacked(ends: pl.DataFrame, shown: list[str]) -> pl.DataFrame:
    """Put the levels one on the other, each with its low and high edge."""
    other, resident, more = (pl.col(f"{n}_bytes") for n in ("other", "resident", "backfilled"))
    edges = {
        _OTHER: (pl.lit(0, pl.Int64), other),
        _RESIDENT: (other, other + resident),
        _BACKFILLED: (other + resident, other + resident + more),
    }
    rows = [
        ends.select(pl.lit(name).alias("level"), time_ns="start_ns", low=low, high=high)
        for name, (low, high) in edges.items()
        if name in shown
    ]
    return pl.concat(rows)


def _until(levels: pl.DataFrame) -> int:
    """Choose a time at which to end the last levels: the capture says not when it ended."""
    first, last = levels.select(pl.col("start_ns").min(), last=pl.col("start_ns").max()).row(0)
    return int(last + max((last - first) // 50, 1))


def _with_end(part: pl.DataFrame, until: int) -> pl.DataFrame:
    """Repeat the last stretch at its end, so that a stepped line reaches it."""
    return pl.concat([part, part.tail(1).with_columns(start_ns=pl.lit(until, pl.Int64))])


def _line(ends: pl.DataFrame, value: pl.Expr, name: str) -> pl.DataFrame:
    return ends.select(pl.lit(name).alias("level"), time_ns="start_ns", high=value)


def _factors(factors: pl.DataFrame) -> list[str]:
    """Say the oversubscription factor of each GPU; once where it is the same for all."""
    texts = [_factor(row) for row in factors.to_dicts()]
    if len(set(texts)) == 1:
        return texts[:1]
    return [f"GPU {gpu}: {text}" for gpu, text in zip(factors["device_id"], texts, strict=True)]


def _factor(row: dict[str, Any]) -> str:
    """Say the oversubscription factor of a GPU, and what it stands on."""
    managed, evicted = row["managed_peak_bytes"], row["evicted_bytes"]
    if managed is None:
        return "No oversubscription factor: the managed allocations were not recorded."
    known = row["oversubscription_factor"]
    if known is None:
        said = (
            "No oversubscription factor: the GPU's memory is not known; managed peak "
            + format_bytes(managed)
        )
    else:
        said = (
            f"Oversubscription factor {_short(known)}: {format_bytes(managed)} managed at the peak for "
            f"{format_bytes(row['available_bytes'])} of room (GPU memory less other memory and reserve)"
        )
    if not evicted:
        return f"{said}. Nothing was evicted."
    if row["observed_factor"] is None:
        return f"{said}. {format_bytes(evicted)} was evicted."
    seen = (
        f"{format_bytes(evicted)} was evicted, and never more than {format_bytes(row['resident_peak_bytes'])} of "
        f"{format_bytes(managed)} was known to be here"
    )
    if known is None or known >= 1:
        return f"{said}. {seen}."
    # Evictions prove that the room was smaller: the figure from the GPU's memory alone misleads.
    return (
        f"Oversubscription factor {_short(row['observed_factor'])} at most, as observed: {seen}. The GPU's memory alone "
        f"would give {_short(known)}, so something else took room."
    )


def _short(factor: float) -> str:
    return f"{factor:.3g}" if factor >= 0.01 else "below 0.01"


def _assumptions(levels: pl.DataFrame) -> list[str]:
    notes = [
        "Known to be here: copied here and not away since; a lower bound without read-mostly data."
    ]
    if (levels["backfilled_bytes"] > 0).any():
        notes.append(
            "First touched: left later without having come, counted from its allocation on, so at most this much."
        )
    capacity = largest(levels["capacity_bytes"])
    if capacity and not _is_near(levels):
        notes.append(f"GPU memory of {format_bytes(capacity)} is far above the picture.")
    return notes


def _binned(levels: pl.DataFrame) -> list[str]:
    """Say how much time each stretch puts together."""
    busy = levels.filter(pl.col("n_steps") > 1)
    length = busy.select((pl.col("end_ns") - pl.col("start_ns")).max()).item()
    if length is None:
        return []
    n = counted(levels.height, "stretch", "stretches")
    return [f"Each of {n} of {format_time(length)} at most shows the most in it."]


def muted(theme: Theme) -> str:
    """Return the colour of what is neither a cause nor an access: counts."""
    return look(theme).muted
