"""What ran when: kernels by GPU and stream, NVTX ranges by thread and depth, as lanes over time."""

from __future__ import annotations

from typing import Final

import altair as alt
import polars as pl

from nsan.charts.catalog import chart
from nsan.charts.memory import largest, smallest
from nsan.charts.palette import Shade, Theme
from nsan.charts.theme import legend, look, name_label, name_text, themed, time_axis, titled
from nsan.text import shortened
from nsan.units import counted, format_time

MOST_LANES: Final = 9
"""Lanes in one chart: at most twice 240 rows each, so the limit of rows holds."""

_NAMED: Final = 6
_OTHERS: Final = "other kernels"
_RANGES: Final = "NVTX ranges"
_LANE_PX: Final = 26
_LETTER_PX: Final = 6.0
_BUSY: Final = alt.Scale(domain=[0, 1], range=[0.25, 1])
"""Bars of several items are paler the longer none of them ran."""

_KEYS: Final = ("pid", "kind", "device_id", "stream_id", "tid", "domain", "depth")

NAMES: Final = (
    Shade("#77aadd", "#2f6299"),
    Shade("#ee8866", "#a8583a"),
    Shade("#44bb99", "#1f7a63"),
    Shade("#eedd88", "#857a2a"),
    Shade("#99ddff", "#3a7d99"),
    Shade("#ffaabb", "#a04a66"),
)
"""Colours of the kernels that run longest, in their order: Paul Tol's light scheme, which bears text."""

_OTHER_SHADE: Final = Shade("#a6a9ad", "#6f757d")
_RANGE_SHADE: Final = Shade("#d5dae0", "#3b424c")


@chart(
    question="Which kernels and NVTX ranges ran when?",
    draws=("work_lanes",),
    title="Kernels and NVTX ranges over time",
    figures=("start_ns", "end_ns", "n"),
)
def work_over_time(
    lanes: pl.DataFrame, *, width: int = 640, theme: Theme = "light"
) -> alt.TopLevelMixin:
    """Draw kernels and NVTX ranges as lanes.

    Parameters
    ----------
    lanes : DataFrame, ``WORK_LANES``
        Kernels and ranges; narrow ones that begin near each other are one row.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        At most nine lanes; the note says how many more there are, and what was put together.
    """
    chosen = _first_lanes(lanes)
    axis = time_axis(smallest(chosen["start_ns"]), largest(chosen["end_ns"]))
    shown = chosen.with_columns(_lane_label(chosen), short=name_label("name", 40)).with_columns(
        group=_group(chosen), start=axis.of("start_ns"), end=axis.of("end_ns")
    )
    title = titled("Kernels and NVTX ranges over time", width, _notes(lanes, chosen))
    order = shown["lane"].unique(maintain_order=True).to_list()
    y = alt.Y("lane:N", sort=order, title=None, axis=alt.Axis(labelLimit=210, labelOverlap=False))
    bars = (
        alt.Chart(_rows(shown), width=width, height=_LANE_PX * len(order))
        .mark_bar(height=_LANE_PX - 8, minBandSize=1)
        .encode(
            x=axis.axis("start"),
            x2="end:Q",
            y=y,
            color=_color(shown, theme, width),
            opacity=alt.Opacity("busy_share:Q", scale=_BUSY, legend=None),
            tooltip=[
                alt.Tooltip("short:N", title="Name"),
                alt.Tooltip("n:Q", title="Put together", format=","),
                alt.Tooltip("start:Q", title=f"Start, {axis.unit}", format=",.6~f"),
                alt.Tooltip("end:Q", title=f"End, {axis.unit}", format=",.6~f"),
                alt.Tooltip("busy:N", title="Busy"),
            ],
        )
    )
    labels = _labels(shown, width)
    if labels.is_empty():
        return themed(bars.properties(title=title), theme)
    texts = (
        alt.Chart(labels)
        .mark_text(align="left", dx=3, fontSize=10, color=look(theme).text)
        .encode(x="start:Q", y=y, text="text:N")
    )
    return themed(alt.layer(bars, texts, title=title), theme)


def _first_lanes(lanes: pl.DataFrame) -> pl.DataFrame:
    """Keep the lanes of kernels, then the outermost ranges, as many as there is room for."""
    numbered = lanes.with_columns(_lane=pl.struct(_KEYS).rle_id().cast(pl.Int64))
    inner = pl.when(pl.col("kind") == "nvtx").then(pl.col("depth") + 1).otherwise(0)
    place = (inner * numbered.height + pl.col("_lane")).rank("dense")
    return numbered.filter(place <= MOST_LANES).drop("_lane")


def _lane_label(lanes: pl.DataFrame) -> pl.Expr:
    """Name each lane; the process, too, where there are several."""
    stream = pl.col("stream_id").cast(pl.String).fill_null("others")
    gpu = pl.format("GPU {} stream {}", pl.col("device_id").cast(pl.String).fill_null("?"), stream)
    domain = name_label("domain", 12).fill_null("NVTX")
    nvtx = pl.format("{} depth {}", domain, pl.col("depth"))
    ranges = lanes.filter(pl.col("kind") == "nvtx")
    if ranges["tid"].n_unique() > ranges["pid"].n_unique():
        nvtx = pl.format("{} thread {}", nvtx, pl.col("tid"))
    label = pl.when(pl.col("kind") == "nvtx").then(nvtx).otherwise(gpu)
    if lanes["pid"].n_unique() > 1:
        label = pl.format("{} ({})", label, pl.col("pid"))
    return label.alias("lane")


def _longest(lanes: pl.DataFrame) -> list[str]:
    """List the kernels that are busy longest, as far as the rows name them."""
    work = lanes.filter(pl.col("kind") == "kernels").drop_nulls("name")
    total = pl.col("busy_ns").sum().over("name")
    ordered = work.with_columns(total=total).sort("total", "name", descending=[True, False])
    return ordered["name"].unique(maintain_order=True).head(_NAMED).to_list()


def _group(lanes: pl.DataFrame) -> pl.Expr:
    """Say what colour a row has: its kernel if that is one of the longest, else the others or ranges."""
    names = _longest(lanes)
    short = [_unique_short(name, i) for i, name in enumerate(names)]
    kernel = pl.col("name").replace_strict(names, short, default=_OTHERS, return_dtype=pl.String)
    return pl.when(pl.col("kind") == "nvtx").then(pl.lit(_RANGES)).otherwise(kernel)


def _unique_short(name: str, place: int) -> str:
    """Shorten a name; long ones that become equal still differ by their place."""
    short = name_text(name, 36)
    return short if len(name) <= 36 else f"{short} #{place + 1}"


def _color(shown: pl.DataFrame, theme: Theme, width: int) -> alt.Color:
    found = shown["group"].unique(maintain_order=True).to_list()
    names = [name for name in found if name not in (_OTHERS, _RANGES)]
    colours = [shade.on(theme) for shade in NAMES[: len(names)]]
    rest = {_OTHERS: _OTHER_SHADE.on(theme), _RANGES: _RANGE_SHADE.on(theme)}
    present = [name for name in rest if name in found]
    domain = [*names, *present]
    scale = alt.Scale(domain=domain, range=[*colours, *(rest[name] for name in present)])
    return alt.Color("group:N", scale=scale, legend=legend(domain, None, width))


def _rows(shown: pl.DataFrame) -> pl.DataFrame:
    busy = [format_time(ns) for ns in shown["busy_ns"]]
    share = pl.col("busy_ns") / (pl.col("end_ns") - pl.col("start_ns"))
    columns = ("lane", "group", "short", "n", "start", "end")
    return shown.select(*columns, busy_share=share.fill_nan(1.0).clip(0.0, 1.0)).with_columns(
        busy=pl.Series(busy, dtype=pl.String)
    )


def _labels(shown: pl.DataFrame, width: int) -> pl.DataFrame:
    """Choose what is written in the bars: the name where it fits, and how many they are."""
    span = max(largest(shown["end_ns"]) - smallest(shown["start_ns"]), 1)
    rows = []
    for row in shown.iter_rows(named=True):
        room = int((row["end_ns"] - row["start_ns"]) / span * width / _LETTER_PX) - 1
        text = row["short"] or ""
        if row["n"] > 1:
            text = f"{row['n']} x {text}" if row["n_names"] == 1 else f"{row['n']} items"
        if room >= min(len(text), 5) and text:
            rows.append((row["lane"], row["start"], shortened(text, max(room, 3))))
    schema = {"lane": pl.String, "start": pl.Float64, "text": pl.String}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _notes(lanes: pl.DataFrame, chosen: pl.DataFrame) -> list[str]:
    notes = []
    merged = chosen.filter(pl.col("n") > 1)
    if merged.height:
        n = counted(int(merged["n"].sum()), "narrow item")
        notes.append(
            f"{n} put together in {counted(merged.height, 'bar')}, each with the name that "
            "ran longest, paler where none of them ran in between."
        )
    more = lanes.select(_KEYS).unique().height - chosen.select(_KEYS).unique().height
    if more > 0:
        notes.append(f"{counted(more, 'lane')} more: ask for a GPU or a process.")
    return notes
