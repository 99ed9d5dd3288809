"""Transfer size against throughput, under the ceiling of the link."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import altair as alt
import polars as pl

from nsan.charts.catalog import chart
from nsan.charts.theme import (
    Drawing,
    Part,
    Theme,
    accent,
    bytes_axis,
    look,
    rate_unit,
    themed,
    titled,
)
from nsan.text import direction_word
from nsan.units import counted, format_bytes, format_rate, format_time

_HEIGHT = 170


@dataclass(frozen=True)
class _Frame:
    """What the rows share: the range of sizes, and the look."""

    sizes: tuple[float, float]
    width: int
    theme: Theme


@chart(
    question="Did memory move in large pieces, and how near to the link's ceiling?",
    draws=("transfer_cells", "transfer_curves"),
    figures=("n_migrations", "ceiling_bytes_per_s"),
    title="Transfer size and throughput",
)
def transfer_sizes(
    cells: pl.DataFrame, curves: pl.DataFrame, *, width: int = 640, theme: Theme = "light"
) -> Drawing:
    """Draw how large and how fast copies are, with the fitted line of their cost and the link's ceiling.

    Parameters
    ----------
    cells : DataFrame, ``TRANSFER_CELLS``
        Copies in cells of size and throughput.
    curves : DataFrame, ``TRANSFER_CURVES``
        The fitted line, and the ceiling.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        A row per direction. A cell is the stronger, the more copies it has.
    """
    shared = _Frame(_sizes(cells), width, theme)
    ways = cells["direction"].unique().sort().cast(pl.String).to_list()
    rows = [_row(cells, curves, way, shared, last=way == ways[-1]) for way in ways]
    body: Drawing = rows[0] if len(rows) == 1 else alt.vconcat(*rows, spacing=10)
    notes = [
        f"{counted(int(cells['n_migrations'].sum()), 'copy', 'copies')} in cells: the stronger, the more.",
        _ceilings(curves),
    ]
    title = titled("Transfer size and throughput", width, notes)
    return themed(body.properties(title=title), theme)


def _sizes(cells: pl.DataFrame) -> tuple[float, float]:
    """Give the range of sizes, with room at both edges: a cell at an edge would look cut."""
    low, high = cells.select(pl.min("min_bytes"), pl.max("max_bytes")).row(0)
    room = (high / low) ** 0.02
    return low / room, high * room


def _largest(frame: pl.DataFrame, column: str) -> float:
    return float(frame.select(pl.max(column).fill_null(0.0)).item())


def _ceilings(curves: pl.DataFrame) -> str:
    """Say how the ceiling was found, or that it cannot be told."""
    if curves.is_empty():
        return "No ceiling: it takes copies of two sizes or more."
    return "Line: latency and bandwidth, fitted to the copies. Dashed: the bandwidth alone, the ceiling."


def _row(
    cells: pl.DataFrame, curves: pl.DataFrame, way: str, shared: _Frame, *, last: bool
) -> Part:
    """Draw the copies of one direction, their line and their ceiling."""
    mine = pl.col("direction").cast(pl.String) == way
    cells, curves = cells.filter(mine), curves.filter(mine)
    fastest = max(_largest(cells, "max_bytes_per_s"), _largest(curves, "ceiling_bytes_per_s"))
    unit, per_unit = rate_unit(fastest)
    # Room for the label above the ceiling.
    scale = alt.Scale(domain=[0, fastest / per_unit * 1.18], nice=False)
    y = alt.Y("low:Q", title=f"{direction_word(way)}, {unit}", scale=scale)
    x = bytes_axis("small", shared.sizes, title="Size of a copy", labels=last)
    drawn = _cells(cells, unit, per_unit, shared).encode(x=x, y=y)
    if curves.is_empty():
        return drawn
    return alt.layer(drawn, *_lines(curves, per_unit, shared))


def _lines(curves: pl.DataFrame, per_unit: float, shared: _Frame) -> Iterator[alt.Chart]:
    """Draw the fitted line and the ceiling of each link, and name the first ceilings."""
    colour = accent(shared.theme, 1)
    several = curves.select("pid", "device_id").n_unique() > 1
    lines = curves.select(
        "bytes",
        rate=pl.col("bytes_per_s") / per_unit,
        ceiling=pl.col("ceiling_bytes_per_s") / per_unit,
        link=pl.format("{} {}", pl.col("pid").fill_null(0), pl.col("device_id").fill_null(-1)),
    )
    line = alt.Chart(lines).mark_line(color=colour, strokeWidth=1.5)
    yield line.encode(x="bytes:Q", y="rate:Q", detail="link:N")
    dashed = line.mark_line(color=colour, strokeDash=[5, 3], strokeWidth=1.5)
    yield dashed.encode(x="bytes:Q", y="ceiling:Q", detail="link:N")
    named = curves.sort("ceiling_bytes_per_s").tail(1)
    rate, latency, device = named.select("ceiling_bytes_per_s", "latency_ns", "device_id").row(0)
    of = f" (GPU {device}, of several)" * several
    label = f"{format_rate(rate)} after {format_time(round(latency))}{of}"
    # It stands at the left, but at the right where the line is only there: not over nothing.
    low, high = shared.sizes
    is_right = float(curves.select(pl.min("bytes")).item()) ** 2 > low * high
    place = high if is_right else low
    at = pl.DataFrame({"bytes": [place], "y": [rate / per_unit], "label": [label]})
    base = alt.Chart(at)
    text = (
        base.mark_text(align="right", dx=-6, dy=-8, fontSize=11, color=colour)
        if is_right
        else base.mark_text(align="left", dx=6, dy=-8, fontSize=11, color=colour)
    )
    yield text.encode(x="bytes:Q", y="y:Q", text="label:N")


def _cells(cells: pl.DataFrame, unit: str, per_unit: float, shared: _Frame) -> alt.Chart:
    frame = cells.select(
        small="min_bytes",
        large="max_bytes",
        low=pl.col("min_bytes_per_s") / per_unit,
        high=pl.col("max_bytes_per_s") / per_unit,
        copies="n_migrations",
        moved=pl.col("bytes").map_elements(format_bytes, return_dtype=pl.String),
        size=pl.col("min_bytes").map_elements(format_bytes, return_dtype=pl.String),
    )
    shades = alt.Scale(type="log", range=[weakest_cell(shared.theme), accent(shared.theme)])
    return (
        alt.Chart(frame, width=shared.width, height=_HEIGHT)
        .mark_rect(strokeWidth=0)
        .encode(
            x2="large:Q",
            y2="high:Q",
            color=alt.Color("copies:Q", scale=shades, legend=None),
            tooltip=[
                alt.Tooltip("size:N", title="Size from"),
                alt.Tooltip("low:Q", title=f"{unit} from", format=",.3~f"),
                alt.Tooltip("copies:Q", title="Copies", format=","),
                alt.Tooltip("moved:N", title="Moved"),
            ],
        )
    )


def weakest_cell(theme: Theme) -> str:
    """Mix ground and accent: the weakest shade, which stands out from the ground by 3 to 1."""
    pairs = zip(*(bytes.fromhex(c[1:]) for c in (look(theme).ground, accent(theme))), strict=True)
    return "#" + "".join(f"{round(low + (high - low) * 0.66):02x}" for low, high in pairs)
