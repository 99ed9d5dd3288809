"""How soon evicted pages come back: the refault distance."""

from __future__ import annotations

from typing import Any, Final

import altair as alt
import polars as pl

from nsan.charts.catalog import chart
from nsan.charts.memory import largest, left_out, panels, part_title
from nsan.charts.palette import CAUSES, Theme
from nsan.charts.theme import byte_unit, legend, themed, titled
from nsan.units import counted, format_bytes

_BY_FAULT: Final = "by page faults"
_ELSE: Final = "by prefetch calls and others"
_UNKNOWN: Final = "cause not recorded"
_SHADES: Final = {
    _BY_FAULT: CAUSES["coherence"],
    _ELSE: CAUSES["user"],
    _UNKNOWN: CAUSES["unknown"],
}
_MEASURES: Final = {
    "time": "Time between eviction and return, from",
    "bytes": "Bytes that came to the GPU in between, from",
}


@chart(
    question="How soon does what was evicted come back, in time and in bytes moved in between?",
    draws=("refault_distances", "refault_totals"),
    title="Refault distance",
)
def refault_distance(
    distances: pl.DataFrame, totals: pl.DataFrame, *, width: int = 640, theme: Theme = "light"
) -> alt.TopLevelMixin:
    """Draw how much came back how soon, as histograms in time and in bytes.

    Parameters
    ----------
    distances : DataFrame, ``REFAULT_DISTANCES``
        Bytes by class of distance.
    totals : DataFrame, ``REFAULT_TOTALS``
        What was evicted and what came back of it, for each GPU.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        Two histograms for each GPU, at most three.
    """
    parts = panels(distances)
    drawn = [
        _histogram(
            part.filter(pl.col("measure") == measure),
            measure,
            width,
            theme,
            is_only=len(parts) == 1,
        )
        for part in parts
        for measure in _MEASURES
    ]
    notes = [*_totals(totals), *left_out(distances, "GPU")]
    title = titled("How soon evicted memory came back", width, notes)
    if not drawn:
        return themed(_nothing_back(width, title), theme)
    whole = alt.vconcat(*drawn, spacing=16).properties(title=title)
    return themed(whole, theme)


def _nothing_back(width: int, title: alt.TitleParams) -> alt.Chart:
    text = pl.DataFrame({"text": ["Nothing that was evicted came back."]})
    mark = alt.Chart(text, width=width, height=80, title=title).mark_text(fontSize=12)
    return mark.encode(text="text:N")


def _totals(totals: pl.DataFrame) -> list[str]:
    notes = []
    for row in totals.head(3).to_dicts():
        gpu = f"GPU {row['device_id']}: " if totals.height > 1 else ""
        share = (
            f" ({row['refaulted_fraction']:.0%})" if row["refaulted_fraction"] is not None else ""
        )
        notes.append(
            f"{gpu}{format_bytes(row['evicted_bytes'])} in {counted(row['n_evictions'], 'eviction')} of "
            f"{counted(row['n_va_blocks'], 'VA block')}: {format_bytes(row['refaulted_bytes'])}{share} came back to the "
            f"GPU, {format_bytes(row['elsewhere_bytes'])} to another, {format_bytes(row['unreturned_bytes'])} not."
        )
    return notes


def _histogram(
    part: pl.DataFrame, measure: str, width: int, theme: Theme, *, is_only: bool
) -> alt.Chart:
    unit, size = byte_unit(largest(part["bytes"]))
    rows = _by_way(part.with_columns(label=_labels(part, measure)), size)
    ways = [way for way in _SHADES if way in rows["way"].to_list()]
    scale = alt.Scale(domain=ways, range=[_SHADES[way].on(theme) for way in ways])
    order = _labels(part, measure).to_list()
    more: dict[str, Any] = (
        {} if is_only or measure != "time" else {"title": part_title(part, is_only=False)}
    )
    return (
        alt.Chart(rows, width=width, height=130, **more)
        .mark_bar()
        .encode(
            x=alt.X(
                "label:O",
                sort=order,
                scale=alt.Scale(domain=order, paddingInner=0.08),
                axis=alt.Axis(title=_MEASURES[measure], labelAngle=0),
            ),
            y=alt.Y("bytes:Q", title=f"Came back, {unit}", stack="zero"),
            color=alt.Color("way:N", scale=scale, legend=legend(ways, "Came back", width)),
            tooltip=[
                alt.Tooltip("label:O", title=_MEASURES[measure]),
                alt.Tooltip("way:N", title="Came back"),
                alt.Tooltip("bytes:Q", title=unit, format=".2f"),
                alt.Tooltip("n_runs:Q", title="Runs of pages", format=","),
            ],
        )
    )


def _by_way(part: pl.DataFrame, size: int) -> pl.DataFrame:
    """Split the bytes of each class by what brought them back; ways that brought nothing are left out."""
    faulted, whole = pl.col("by_fault_bytes"), pl.col("bytes")
    sizes = {
        _BY_FAULT: faulted.fill_null(0),
        _ELSE: pl.when(faulted.is_null()).then(0).otherwise(whole - faulted),
        _UNKNOWN: pl.when(faulted.is_null()).then(whole).otherwise(0),
    }
    rows = [
        part.select("label", "n_runs", pl.lit(way).alias("way"), bytes=value / size)
        for way, value in sizes.items()
    ]
    return pl.concat(rows).filter(pl.col("bytes") > 0)


_TIMES: Final = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"), (1, "ns"))


def _time_text(ns: int) -> str:
    """Write a round time shortly: classes begin at 1, 2 and 5 of each power of ten."""
    return next((f"{ns // size} {unit}" for size, unit in _TIMES if ns >= size), "0")


def _labels(part: pl.DataFrame, measure: str) -> pl.Series:
    if measure == "time":
        texts = [_time_text(ns) for ns in part["min_ns"]]
    else:
        texts = [format_bytes(size).replace(".00", "") for size in part["min_bytes"]]
    return pl.Series("label", texts, dtype=pl.String)
