"""The address-time map: what faulted and moved, when and where."""

from __future__ import annotations

import json
from typing import Final

import altair as alt
import polars as pl

from nsan.charts.catalog import chart
from nsan.charts.theme import (
    ACCESS_ORDER,
    CAUSE_ORDER,
    Drawing,
    Theme,
    TimeAxis,
    access_scale,
    cause_label,
    cause_scale,
    exact_time,
    far_note,
    hex_label,
    legend,
    look,
    name_label,
    present,
    themed,
    time_axis,
    titled,
    wrapped,
)
from nsan.units import counted, format_bytes
from nsan.uvm.constants import VA_BLOCK_BYTES

_HEIGHT: Final = 190
_APART_PX: Final = 15
_FILL_PX: Final = 46
_HEADS: Final = {
    "faults": "Faulted pages and fault rows, by access",
    "in": "Into GPUs, by cause",
    "out": "Out of GPUs, by cause",
}


@chart(
    question="What faulted and moved, when and where?",
    draws=("address_time_cells", "address_runs"),
    figures=("bytes", "n_pages"),
)
def address_time_map(
    cells: pl.DataFrame, runs: pl.DataFrame, *, width: int = 640, theme: Theme = "light"
) -> Drawing:
    """Draw faults and copies on a map of time and addresses, unused gaps folded and marked.

    Parameters
    ----------
    cells : DataFrame, ``ADDRESS_TIME_CELLS``
        What each layer holds in each cell.
    runs : DataFrame, ``ADDRESS_RUNS``
        Runs of used memory between gaps.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        A panel per layer that has something. The colour is the cause or access that has most of a cell;
        it is the stronger, the more there is. A dashed line is a fold.
    """
    time = time_axis(*cells.select(pl.min("start_ns"), pl.max("end_ns")).row(0))
    x_range = cells.select(time.of("start_ns").min(), b=time.of("end_ns").max()).row(0)
    height = max(_end(runs), _end(cells)) / VA_BLOCK_BYTES
    frame = _prepared(cells, time)
    layers = [name for name in _HEADS if (frame["layer"] == name).any()]
    causes = present(frame.filter(pl.col("layer") != "faults"), "category", CAUSE_ORDER)
    x_scale = alt.Scale(domain=list(x_range), nice=False)
    panels = []
    for name in layers:
        last = name == layers[-1]
        axis = alt.Axis() if last else alt.Axis(labels=False, ticks=False)
        x = time.axis("start", scale=x_scale, axis=axis)
        mine = frame.filter(pl.col("layer") == name)
        # The legend of causes stands once, above the first panel that has them.
        color = _color(mine, name, causes, width, theme, first=name == "in" or "in" not in layers)
        cells_of = _rects(mine, time, color).encode(
            x=x if last else x.title(None), y=_y(runs, height)
        )
        panel = alt.layer(cells_of, *_folds(runs, theme)).properties(
            width=width, height=_HEIGHT, title=_head(name, mine, width)
        )
        panels.append(panel)
    body: Drawing = alt.vconcat(*panels, spacing=12).resolve_scale(color="independent")
    title = titled("Address-time map", width, [_note(cells, runs)])
    return themed(body.properties(title=title), theme)


def _end(frame: pl.DataFrame) -> int:
    """Find where the last row or run ends, in the folded space."""
    return int(frame.select(pl.max("place_end")).item())


def _head(name: str, mine: pl.DataFrame, width: int) -> alt.TitleParams:
    """Head a panel; where one category has most of each cell, and so no legend, it names it."""
    found = mine["category"].unique().to_list()
    text = _HEADS[name] + _one(found[0], mine) * (len(found) == 1)
    return alt.TitleParams(wrapped(text, width), fontSize=12, fontWeight="normal", offset=6)


def _one(category: str, mine: pl.DataFrame) -> str:
    """Name the one category that is seen: the only one, or the first in each cell."""
    if mine["fraction"].min() != 1.0:
        return f": {category} has most in each cell"
    return ": not known" if category == "unknown" else f": {category} only"


def _note(cells: pl.DataFrame, runs: pl.DataFrame) -> str:
    step = exact_time(cells["end_ns"][0] - cells["start_ns"][0])
    row = format_bytes(cells["place_end"][0] - cells["place_start"][0])
    used = format_bytes(int(runs["n_blocks"].sum()) * VA_BLOCK_BYTES)
    gaps = int(runs.select(pl.col("pid", "n_runs")).unique()["n_runs"].sum()) - 1
    folded = f", {counted(gaps, 'gap')} folded (dashed)" * (gaps > 0)
    return (
        f"Cells of {step} and {row}, in the colour of what has most, the stronger, the more. {used} of "
        f"memory used{folded}.{far_note(cells)}"
    )


def _prepared(cells: pl.DataFrame, time: TimeAxis) -> pl.DataFrame:
    """Put times and places into the units of the axes."""
    pages = pl.col("n_pages") + pl.col("n_rows")
    faults = pl.col("layer") == "faults"
    amount = pl.when(faults).then(pages).otherwise("bytes").clip(1, None)
    label = pl.when(faults).then("category").otherwise(cause_label("category"))
    moved = pl.col("bytes").map_elements(format_bytes, return_dtype=pl.String)
    return cells.select(
        layer=pl.col("layer").cast(pl.String),
        start=time.of("start_ns"),
        end=time.of("end_ns"),
        low=pl.col("place_start") / VA_BLOCK_BYTES,
        high=pl.col("place_end") / VA_BLOCK_BYTES,
        address=hex_label("va"),
        category=label,
        fraction="category_fraction",
        # A logarithm here, so that each layer needs no scale of its own.
        amount=(amount.log() / amount.log().max().over("layer")).fill_nan(1.0).fill_null(1.0),
        held=pl.when(faults)
        .then(pl.format("pages: {}, fault rows: {}", "n_pages", "n_rows"))
        .otherwise(moved),
        rows="n_rows",
    )


def _color(
    mine: pl.DataFrame, name: str, causes: list[str], width: int, theme: Theme, *, first: bool
) -> alt.Color:
    if name == "faults":
        values = present(mine, "category", ACCESS_ORDER)
        shown = legend(values, "Access", width)
        return alt.Color("category:N", scale=access_scale(theme, values), legend=shown)
    shown = legend(causes, "Cause", width) if first else None
    return alt.Color("category:N", scale=cause_scale(theme, causes), legend=shown)


def _rects(mine: pl.DataFrame, time: TimeAxis, color: alt.Color) -> alt.Chart:
    return (
        alt.Chart(mine.drop("layer", "fraction"))
        .mark_rect(strokeWidth=0)
        .encode(
            x2="end:Q",
            y2="high:Q",
            color=color,
            opacity=alt.Opacity(
                "amount:Q", scale=alt.Scale(domain=[0, 1], range=[0.3, 1]), legend=None
            ),
            tooltip=[
                alt.Tooltip("start:Q", title=f"Start, {time.unit}", format=",.6~f"),
                alt.Tooltip("address:N", title="Address from"),
                alt.Tooltip("category:N", title="Most of"),
                alt.Tooltip("held:N", title="Held"),
                alt.Tooltip("rows:Q", title="Rows", format=","),
            ],
        )
    )


def _y(runs: pl.DataFrame, height: float) -> alt.Y:
    """Make the axis of places: labelled with addresses, which are text."""
    labels = _labels(runs, height)
    # Keys and labels are whole numbers and hexadecimal digits: nothing of a trace gets into the expression.
    table = json.dumps({str(block): text for block, text in sorted(labels.items())})
    axis = alt.Axis(
        values=sorted(labels), labelExpr=f"({table})[datum.value]", labelOverlap=False, grid=False
    )
    scale = alt.Scale(domain=[0, height], nice=False)
    return alt.Y("low:Q", title="Address, hexadecimal byte", scale=scale, axis=axis)


def _labels(runs: pl.DataFrame, height: float) -> dict[int, str]:
    """Choose which places are labelled: starts of runs, longest first, then steps inside long runs."""
    px = _HEIGHT / height
    several = runs["pid"].n_unique() > 1
    found: dict[int, str] = {}

    def add(block: int, address: int, pid: int | None) -> None:
        if all(abs(block - other) * px >= _APART_PX for other in found):
            found[block] = f"{address:#x}" + f" ({pid})" * several

    rows = runs.sort("n_blocks", descending=True, maintain_order=True).select(
        pl.col("place_start") // VA_BLOCK_BYTES, "va_start", "pid", "n_blocks"
    )
    for start, va, pid, _ in rows.iter_rows():
        add(start, va, pid)
    step = max(int(_FILL_PX / px), 1)
    for start, va, pid, n_blocks in rows.iter_rows():
        for block in range(step, n_blocks, step):
            add(start + block, va + block * VA_BLOCK_BYTES, pid)
    return found


def _folds(runs: pl.DataFrame, theme: Theme) -> list[alt.Chart]:
    """Mark where gaps are folded, and name the runs that have a name."""
    at = runs.select(
        y=pl.col("place_start") / VA_BLOCK_BYTES,
        name=name_label("name", 32),
    )
    folds, names = at.filter(pl.col("y") > 0).select("y"), at.filter(pl.col("name").is_not_null())
    marks = []
    if folds.height:
        rule = alt.Chart(folds).mark_rule(strokeDash=[3, 3], color=look(theme).muted, opacity=0.8)
        marks.append(rule.encode(y="y:Q"))
    if 0 < names.height <= 12:
        text = alt.Chart(names).mark_text(align="left", dx=4, dy=-6, fontSize=10)
        marks.append(text.encode(x=alt.value(0), y="y:Q", text="name:N"))
    return marks
