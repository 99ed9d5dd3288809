"""PyTorch's caching allocator: what it held over time, where in its segments, and what of it moved."""

from __future__ import annotations

from typing import Final, cast

import altair as alt
import polars as pl

from nsan.charts.catalog import chart
from nsan.charts.memory import MOST_PANELS, largest, left_out, smallest
from nsan.charts.palette import Shade, Theme
from nsan.charts.theme import (
    byte_unit,
    hex_label,
    legend,
    present,
    themed,
    time_axis,
    time_unit,
    titled,
)
from nsan.units import counted, format_bytes, format_time

_RESERVED: Final = "reserved"
_ACTIVE: Final = "active, free pending"
_ALLOCATED: Final = "allocated"
_REQUESTED: Final = "requested"

LEVELS: Final = {
    _RESERVED: Shade("#c9ced4", "#4a525c"),
    _ACTIVE: Shade("#ee7733", "#f0995f"),
    _ALLOCATED: Shade("#4477aa", "#5b8fc4"),
    _REQUESTED: Shade("#1f2328", "#ffffff"),
}
"""Colour of each level of the allocator."""

BLOCKS: Final = {
    "allocated": LEVELS[_ALLOCATED],
    "pending": LEVELS[_ACTIVE],
    "cached": LEVELS[_RESERVED],
}
"""Colour of blocks by state; the same as of the levels that they add up to."""

STATES: Final = {
    "live": Shade("#4477aa", "#6f9fd0"),
    "pending": Shade("#ee7733", "#f0995f"),
    "cached": Shade("#cc3311", "#ff7a5c"),
    "unused": Shade("#ddaa33", "#ddbb55"),
    "outside": Shade("#8a9097", "#8a9097"),
    "unknown": Shade("#c9ced4", "#4a525c"),
}
"""Colour of what memory was to the allocator when it moved; dead memory is warm."""

_SEGMENT_PX: Final = 13


@chart(
    question="How did the allocator's reserved, allocated, active and cached memory change over time?",
    draws=("allocator_levels",),
    title="Allocator over time",
    subject="snapshot",
    figures=("reserved_bytes", "allocated_bytes", "active_bytes"),
)
def allocator_over_time(
    levels: pl.DataFrame, *, width: int = 640, theme: Theme = "light"
) -> alt.TopLevelMixin:
    """Draw what the caching allocator held over time.

    Parameters
    ----------
    levels : DataFrame, ``ALLOCATOR_LEVELS``
        Stretches of the history of each GPU.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        One panel for each GPU, at most three: from zero up allocated, active and reserved; what is
        between active and reserved is cached.
    """
    parts = levels.partition_by("device_id", maintain_order=True)
    drawn = [_levels_panel(part, width, theme, len(parts)) for part in parts[:MOST_PANELS]]
    notes = [
        *(_peak_note(part, len(parts)) for part in parts[:MOST_PANELS]),
        *_stretch_note(levels),
        *left_out(levels, "GPU", ["device_id"]),
    ]
    title = titled("Memory of the caching allocator over time", width, notes)
    return themed(alt.vconcat(*drawn, spacing=14).properties(title=title), theme)


def _levels_panel(part: pl.DataFrame, width: int, theme: Theme, n: int) -> alt.LayerChart:
    timed = part["start_ns"].null_count() == 0
    unit, size = byte_unit(largest(part["reserved_bytes"]))
    if timed:
        time, ns = time_unit(largest(part["start_ns"]))
        at, x_title = pl.col("start_ns") / ns, f"Time since the first entry of the history, {time}"
    else:
        at, x_title = (
            pl.col("start_sequence").cast(pl.Float64),
            "Entry of the history (no times recorded)",
        )
    edges = {
        _RESERVED: "reserved_bytes",
        _ACTIVE: "active_bytes",
        _ALLOCATED: "allocated_bytes",
        _REQUESTED: "requested_bytes",
    }
    pending = (part["active_bytes"] != part["allocated_bytes"]).any()
    shown = [_RESERVED, *([_ACTIVE] if pending else []), _ALLOCATED]
    x = alt.X("time:Q", title=x_title, scale=alt.Scale(zero=False, nice=False))
    lines = [_REQUESTED] if _wastes(part) else []
    scale = alt.Scale(
        domain=[*shown, *lines], range=[LEVELS[name].on(theme) for name in (*shown, *lines)]
    )
    color = alt.Color("level:N", scale=scale, legend=legend([*shown, *lines], None, width))
    y = alt.Y("value:Q", title=f"Memory, {unit}", stack=None)
    # The largest first, so that the smaller ones lie on it: the areas are not stacked.
    layers = []
    for name in (*shown, *lines):
        rows = part.select(
            at.alias("time"), pl.lit(name).alias("level"), value=pl.col(edges[name]) / size
        )
        base = alt.Chart(rows, width=width, height=230 if n == 1 else 150)
        area = base.mark_area(interpolate="step-after")
        mark = base.mark_line(interpolate="step-after", strokeWidth=1) if name in lines else area
        layers.append(mark.encode(x=x, y=y, color=color))
    drawn = alt.layer(*layers, title="" if n == 1 else f"GPU {part['device_id'][0]}")
    return cast("alt.LayerChart", drawn)


def _wastes(part: pl.DataFrame) -> bool:
    """Say whether what was asked for differs from active memory so that it can be seen."""
    waste = part.select((pl.col("active_bytes") - pl.col("requested_bytes")).max()).item()
    return bool(waste is not None and waste > 0.02 * largest(part["reserved_bytes"]))


def _peak_note(part: pl.DataFrame, n: int) -> str:
    gpu = f"GPU {part['device_id'][0]}: peak" if n > 1 else "Peak"
    return (
        f"{gpu} of {format_bytes(largest(part['reserved_bytes']))} reserved and "
        f"{format_bytes(largest(part['active_bytes']))} active; what is reserved and not active is cached."
    )


def _stretch_note(levels: pl.DataFrame) -> list[str]:
    busy = levels.filter(pl.col("n_steps") > 1)
    if busy.is_empty():
        return []
    length = busy.select((pl.col("end_ns") - pl.col("start_ns")).max()).item()
    long = f" of {format_time(length)}" if length is not None else ""
    return [f"Each of {counted(levels.height, 'stretch', 'stretches')}{long} shows the most in it."]


@chart(
    question="Where in its segments does the allocator hold memory at the peak, and what is cached there?",
    draws=("segment_map",),
    title="Segment map",
    subject="snapshot",
    figures=("bytes",),
)
def segments_at_peak(
    blocks: pl.DataFrame, *, width: int = 640, theme: Theme = "light"
) -> alt.TopLevelMixin:
    """Draw the blocks of each segment by address, size and state.

    Parameters
    ----------
    blocks : DataFrame, ``SEGMENT_MAP``
        Blocks by segment; narrow ones put together by state.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        A bar for each segment of the first GPU, by address.
    """
    parts = blocks.partition_by("device_id", maintain_order=True)
    own = parts[0].filter(pl.col("segment_va").is_not_null())
    bars = _segments(own.with_columns(segment=hex_label("segment_va")), width, theme)
    notes = _map_notes(parts[0], len(parts))
    title = titled("Blocks of the caching allocator, by segment", width, notes)
    return themed(bars.properties(title=title), theme)


def _segments(part: pl.DataFrame, width: int, theme: Theme) -> alt.Chart:
    end = pl.col("offset_bytes") + pl.col("bytes")
    unit, size = byte_unit(part.select(end.max()).item())
    order = part["segment"].unique(maintain_order=True).to_list()
    states = present(part, "state", BLOCKS)
    rows = part.select(
        "segment",
        pl.col("state").cast(pl.String),
        "n_blocks",
        start=pl.col("offset_bytes") / size,
        end=end / size,
        held=pl.col("bytes") / size,
    )
    scale = alt.Scale(domain=states, range=[BLOCKS[s].on(theme) for s in states])
    axis = alt.Axis(labelFont="monospace", labelFontSize=10, labelOverlap=False, grid=False)
    held = alt.Tooltip("held:Q", title=unit, format=".3f")
    return (
        alt.Chart(rows, width=width, height=max(_SEGMENT_PX * len(order), 60))
        .mark_bar(height=_SEGMENT_PX - 3)
        .encode(
            x=alt.X("start:Q", title=f"Place in the segment, {unit}", scale=alt.Scale(nice=False)),
            x2="end:Q",
            y=alt.Y("segment:N", sort=order, title="Segment, by address", axis=axis),
            color=alt.Color("state:N", scale=scale, legend=legend(states, "Block", width)),
            tooltip=[
                alt.Tooltip("segment:N", title="Segment"),
                alt.Tooltip("state:N", title="Block"),
                held,
                alt.Tooltip("n_blocks:Q", title="Blocks", format=","),
            ],
        )
    )


def _map_notes(part: pl.DataFrame, n_gpus: int) -> list[str]:
    sequence = part["sequence"][0]
    when = (
        "When the snapshot was taken"
        if sequence is None
        else f"At the peak of active memory, after entry {sequence}"
    )
    by_state = {
        s: int(part.filter(pl.col("state") == s)["bytes"].sum())
        for s in present(part, "state", BLOCKS)
    }
    sums = ", ".join(f"{format_bytes(size)} {state}" for state, size in by_state.items())
    notes = [f"{when}: {sums}."]
    others = part.filter(pl.col("segment_va").is_null())
    if others.height:
        n = counted(others["n_segments"][0], "smaller segment")
        texts = [
            f"{format_bytes(size)} {state}"
            for size, state in others.select("bytes", "state").iter_rows()
        ]
        notes.append(f"{n} not shown: {', '.join(texts)}.")
    merged = part.filter(~pl.col("is_exact") & pl.col("segment_va").is_not_null())
    if merged.height:
        n = counted(int(merged["n_blocks"].sum()), "narrow block")
        notes.append(
            f"{n} put together by state in {counted(merged.height, 'bar')} near their place."
        )
    if n_gpus > 1:
        notes.append(
            f"GPU {part['device_id'][0]}; {counted(n_gpus - 1, 'GPU')} more in the snapshot."
        )
    return notes


@chart(
    question="Was the memory that moved still needed: live, cached or never used, by time and address?",
    draws=("moves_map",),
    title="What moved, by the allocator's state",
    subject="joined",
    figures=("bytes", "state_bytes"),
)
def moves_by_state(
    cells: pl.DataFrame, *, width: int = 640, theme: Theme = "light"
) -> alt.TopLevelMixin:
    """Draw what the memory that moved was to the allocator, by time and address.

    Parameters
    ----------
    cells : DataFrame, ``MOVES_MAP``
        Cells of time and address, with the state that most bytes were of.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        The map of the first process.
    """
    pids = cells["pid"].unique(maintain_order=True)
    mine = cells.filter(pl.col("pid").eq_missing(pl.lit(pids[0], pl.UInt32)))
    notes = _move_notes(mine, len(pids))
    title = titled("What the memory that moved was to the allocator", width, notes)
    return themed(_tiles(mine, width, theme).properties(title=title), theme)


def _tiles(mine: pl.DataFrame, width: int, theme: Theme) -> alt.Chart:
    axis = time_axis(smallest(mine["start_ns"]), largest(mine["end_ns"]))
    states = present(mine, "state", STATES)
    unit, size = byte_unit(largest(mine["bytes"]))
    rows = mine.select(
        pl.col("state").cast(pl.String),
        "n_parts",
        place=hex_label("va"),
        start=axis.of("start_ns"),
        end=axis.of("end_ns"),
        moved=pl.col("bytes") / size,
        dead=pl.col("dead_bytes") / size,
    )
    order = mine.sort("row").select(hex_label("va"))["va"].unique(maintain_order=True).to_list()
    scale = alt.Scale(domain=states, range=[STATES[s].on(theme) for s in states])
    labels = alt.Axis(labelFont="monospace", labelFontSize=10, labelSeparation=8)
    # The lowest address is at the bottom.
    places = alt.Scale(domain=order[::-1])
    sizes = [
        alt.Tooltip(f"{name}:Q", title=f"{name.capitalize()}, {unit}", format=".3f")
        for name in ("moved", "dead")
    ]
    return (
        alt.Chart(rows, width=width, height=300)
        .mark_rect()
        .encode(
            x=axis.axis("start"),
            x2="end:Q",
            y=alt.Y("place:O", scale=places, title="First address (unused left out)", axis=labels),
            color=alt.Color("state:N", scale=scale, legend=legend(states, "Memory was", width)),
            tooltip=[
                alt.Tooltip("place:N", title="First address"),
                alt.Tooltip("state:N", title="Memory was"),
                *sizes,
                alt.Tooltip("n_parts:Q", title="Parts of copies", format=","),
            ],
        )
    )


def _move_notes(mine: pl.DataFrame, n_processes: int) -> list[str]:
    moved, dead = int(mine["bytes"].sum()), int(mine["dead_bytes"].sum())
    share = f" ({dead / moved:.0%})" if moved else ""
    blocks = largest(mine["n_va_blocks"])
    width = format_time(mine.select((pl.col("end_ns") - pl.col("start_ns")).max()).item())
    notes = [
        f"{format_bytes(dead)}{share} of {format_bytes(moved)} moved was cached or never used by a tensor. Each cell of "
        f"{width} and {counted(blocks, 'VA block')} has the colour of the state of most of its bytes."
    ]
    if n_processes > 1:
        notes.append(f"{counted(n_processes - 1, 'process', 'processes')} more: ask for one.")
    return notes
