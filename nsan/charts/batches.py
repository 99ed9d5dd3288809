"""What the driver's batches did over time: how many, and how long they took."""

from __future__ import annotations

import altair as alt
import polars as pl

from nsan.charts.catalog import chart
from nsan.charts.theme import (
    Drawing,
    Part,
    Theme,
    TimeAxis,
    accent,
    access_color,
    duration_axis,
    duration_scale,
    exact_time,
    far_note,
    legend,
    themed,
    time_axis,
    titled,
    whole_numbers,
)
from nsan.units import counted, format_bytes, format_time

_HEIGHT = 200


def _step(rows: pl.DataFrame) -> str:
    return exact_time(rows["end_ns"][0] - rows["start_ns"][0])


def _together(rows: pl.DataFrame) -> str:
    return f", of {rows['n_gpus'][0]} GPUs together" * (rows["n_gpus"][0] > 1)


def _axis_of(rows: pl.DataFrame) -> TimeAxis:
    return time_axis(*rows.select(pl.min("start_ns"), pl.max("end_ns")).row(0))


@chart(
    question="How often did the driver service a batch, and for which accesses?",
    draws=("batches_over_time",),
    figures=("n_batches",),
)
def batch_rate(
    counted_batches: pl.DataFrame, *, width: int = 640, theme: Theme = "light"
) -> Drawing:
    """Draw how many batches began over time, by the access of their page.

    Parameters
    ----------
    counted_batches : DataFrame, ``BATCHES_OVER_TIME``
        One row per stretch of time and access.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        Stacked bars.
    """
    time = _axis_of(counted_batches)
    n = pl.col("n_batches")
    frame = counted_batches.select(
        start=time.of("start_ns"),
        end=time.of("end_ns"),
        low="before_batches",
        high=pl.col("before_batches") + n,
        batches=n,
        access=pl.col("access").cast(pl.String).fill_null("unknown"),
        moved=pl.col("bytes").map_elements(format_bytes, return_dtype=pl.String),
    )
    bars = (
        alt.Chart(frame, width=width, height=_HEIGHT)
        .mark_bar(binSpacing=0)
        .encode(
            x=time.axis("start"),
            x2="end:Q",
            y=alt.Y("low:Q", title=f"Batches per {_step(counted_batches)}", axis=whole_numbers()),
            y2="high:Q",
            color=access_color(frame, theme, width),
            tooltip=[
                alt.Tooltip("start:Q", title=f"Start, {time.unit}", format=",.6~f"),
                alt.Tooltip("access:N", title="Access"),
                alt.Tooltip("batches:Q", title="Batches", format=","),
                alt.Tooltip("moved:N", title="Into the GPU"),
            ],
        )
    )
    total = counted(int(counted_batches["n_batches"].sum()), "batch", "batches")
    only = frame["access"].unique().to_list()
    of = ""
    if len(only) == 1:
        of = " The access is not known." if only == ["unknown"] else f" All of access {only[0]}."
    notes = [
        f"{total}, counted where they begin{_together(counted_batches)}.{of}{far_note(counted_batches)}"
    ]
    return themed(bars.properties(title=titled("Batch rate", width, notes)), theme)


@chart(
    question="How long did batches take, over time and in all?",
    draws=("service_over_time", "batch_time_classes"),
    figures=("n_batches", "service_p50_ns", "latency_p50_ns"),
    title="Batch latency and service",
)
def batch_service(
    over_time: pl.DataFrame, classes: pl.DataFrame, *, width: int = 640, theme: Theme = "light"
) -> Drawing:
    """Draw latency and service of batches over time, and how they are spread.

    Parameters
    ----------
    over_time : DataFrame, ``SERVICE_OVER_TIME``
        Percentiles in stretches of time.
    classes : DataFrame, ``BATCH_TIME_CLASSES``
        Batches in classes of time.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        Above, per stretch, a bar from the 10th to the 90th percentile of service with its median, and
        the median of latency; below, how many batches took so long.
    """
    notes = [
        f"{counted(int(over_time['n_batches'].sum()), 'batch', 'batches')} of fault rows, in stretches of "
        f"{_step(over_time)}{_together(over_time)}.{far_note(over_time)}",
        "Latency: from a fault to its replay, with waiting for batches before. Service: without. Bars: "
        "10th to 90th percentile of service. Ticks: medians.",
    ]
    body = alt.vconcat(
        _over_time(over_time, width, theme), _distribution(classes, width, theme), spacing=14
    )
    title = titled("Batch latency and service", width, notes)
    return themed(body.properties(title=title), theme)


_KINDS = ["service", "latency"]


def _over_time(rows: pl.DataFrame, width: int, theme: Theme) -> Part:
    time = _axis_of(rows)
    # A logarithm has no place for a time of nothing.
    at_least_one = {
        name: pl.col(f"{kind}_p{share}_ns").clip(1, None)
        for name, kind, share in (
            ("low", "service", 10),
            ("service", "service", 50),
            ("high", "service", 90),
            ("latency", "latency", 50),
        )
    }
    texts = {
        f"{kind}_text": pl.col(f"{kind}_p50_ns").map_elements(_time_text, return_dtype=pl.String)
        for kind in _KINDS
    }
    frame = rows.select(
        start=time.of("start_ns"),
        end=time.of("end_ns"),
        batches="n_batches",
        **at_least_one,
        **texts,
    )
    ends = frame.select(
        pl.min_horizontal("low", "latency").min() * 0.9,
        pl.max_horizontal("high", "latency").max() * 1.1,
    ).row(0)
    # An anchored x of its own for each layer: the middle marks are rules from start to end.
    base = alt.Chart(frame, width=width, height=_HEIGHT)
    bars = base.mark_rect(color=accent(theme), opacity=0.35).encode(
        x=time.axis("start"),
        x2="end:Q",
        y=duration_scale("low", ends, title="Time of a batch"),
        y2="high:Q",
        tooltip=[
            alt.Tooltip("start:Q", title=f"Start, {time.unit}", format=",.6~f"),
            alt.Tooltip("batches:Q", title="Batches", format=","),
            alt.Tooltip("service_text:N", title="Service, median"),
            alt.Tooltip("latency_text:N", title="Latency, median"),
        ],
    )
    layers = [bars]
    for kind, number in (("latency", 1), ("service", 0)):
        rule = base.mark_rule(strokeWidth=2, color=accent(theme, number))
        layers.append(rule.encode(x="start:Q", x2="end:Q", y=f"{kind}:Q"))
    return alt.layer(*layers)


def _time_text(ns: float) -> str:
    return format_time(round(ns))


def _distribution(classes: pl.DataFrame, width: int, theme: Theme) -> alt.Chart:
    frame = classes.select(
        kind=pl.col("figure").cast(pl.String),
        low=pl.col("min_ns").clip(1, None),
        high=pl.col("max_ns").clip(1, None),
        zero=pl.lit(0),
        # One is filled and one is an outline, so that neither hides the other.
        filled=(pl.col("figure").cast(pl.String) == "service").cast(pl.Float64) * 0.35,
        batches="n_batches",
        least=pl.col("min_ns").map_elements(_time_text, return_dtype=pl.String),
    )
    ends = frame.select(pl.min("low"), pl.max("high")).row(0)
    colours = alt.Scale(domain=_KINDS, range=[accent(theme), accent(theme, 1)])
    shown = legend(_KINDS, None, width)
    return (
        alt.Chart(frame, width=width, height=120)
        .mark_bar(strokeWidth=1.3, binSpacing=0)
        .encode(
            x=duration_axis("low", ends, title="Time of a batch"),
            x2="high:Q",
            y=alt.Y("zero:Q", title="Batches", axis=whole_numbers()),
            y2="batches:Q",
            # One legend for both; if one had none, there would be none at all.
            fill=alt.Fill("kind:N", scale=colours, legend=shown),
            stroke=alt.Stroke("kind:N", scale=colours, legend=shown),
            fillOpacity=alt.FillOpacity("filled:Q", scale=None, legend=None),
            tooltip=[
                alt.Tooltip("kind:N", title="Time"),
                alt.Tooltip("least:N", title="From"),
                alt.Tooltip("batches:Q", title="Batches", format=","),
            ],
        )
    )
