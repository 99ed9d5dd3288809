"""Kernels and NVTX ranges as lanes over time: single ones where they are wide, else put together.

A program has millions of kernels and a chart some hundred columns. What is narrower than a column is put
together with the others that start in the same column of its lane; what is wider stays as it is.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.intervals import union
from nsan.analysis.result import PID, Result, derived
from nsan.analysis.views.spread import columns_for

LANE_KIND: Final = pl.Enum(["nvtx", "kernels"])
_LANE: Final = ("pid", "kind", "device_id", "stream_id", "tid", "domain", "depth")
_MOST_DEPTH: Final = 3
_WORK: Final = ("start_ns", "end_ns", "pid", "device_id", "stream_id", "name")
_RANGES: Final = ("start_ns", "end_ns", "pid", "tid", "domain", "depth", "name")

WORK_LANES: Final = Result(
    "work_lanes",
    "one kernel or NVTX range of a lane, or several narrow ones that begin near each other",
    (
        PID,
        derived("kind", LANE_KIND, "label", "What the lane holds."),
        derived("device_id", pl.Int64, "id", "GPU; null: NVTX ranges."),
        derived("stream_id", pl.Int64, "id", "CUDA stream; null: several of them, or NVTX ranges."),
        derived("tid", pl.Int64, "id", "Thread; null: kernels."),
        derived("domain", pl.String, "text", "NVTX domain; null: the default one, or kernels."),
        derived("depth", pl.Int64, "ranges", "Ranges around it; 3: three or more."),
        derived("start_ns", pl.Int64, "ns", "Start of the first."),
        derived("end_ns", pl.Int64, "ns", "End of the one that ends last."),
        derived("n", pl.Int64, "items", "Kernels or ranges put together."),
        derived("busy_ns", pl.Int64, "ns", "Time in which at least one of them ran."),
        derived("name", pl.String, "text", "The name that ran longest in it."),
        derived("n_names", pl.Int64, "names", "Different names."),
        derived("lane_busy_ns", pl.Int64, "ns", "Time in which anything of the lane ran."),
    ),
    nothing="The capture has neither kernels nor NVTX ranges.",
)


@analysis(
    question="What ran when: kernels by GPU and stream, and NVTX ranges by depth?",
    result=WORK_LANES,
    reads={"kernels": _WORK, "nvtx_ranges": _RANGES},
    source="domain.md E-9; design.md 6",
)
def work_lanes(
    kernels: pl.LazyFrame,
    nvtx_ranges: pl.LazyFrame,
    *,
    n_columns: int = 240,
    most_streams: int = 3,
) -> pl.LazyFrame:
    """Lay kernels and NVTX ranges into lanes of few rows.

    Parameters
    ----------
    kernels, nvtx_ranges : LazyFrame
        In any order; rows without a start or an end are left out.
    n_columns : int, default 240
        Columns of the time from first start to last end. At most so many of a lane, the widest ones,
        stay single; the others are put together by the column of their start. Where there are more
        than nine lanes there are fewer columns.
    most_streams : int, default 3
        Streams of a GPU with a lane of their own, those that are busy longest; the other streams of the
        GPU have one lane together. Ranges of a depth of 3 or more have one lane for each thread.

    Returns
    -------
    LazyFrame, ``WORK_LANES``
        By process, NVTX before kernels, lane and start; at most twice ``n_columns`` rows for a lane.
        ``n`` adds up to the kernels and ranges that have a start and an end.
    """

    def build() -> pl.DataFrame:
        whole = pl.all_horizontal(pl.col("start_ns", "end_ns").is_not_null())
        work = kernels.select(_WORK).filter(whole).with_columns(kind=pl.lit("kernels", LANE_KIND))
        ranges = nvtx_ranges.select(_RANGES).filter(whole)
        placed = ranges.with_columns(
            pl.col("tid").cast(pl.Int64),
            kind=pl.lit("nvtx", LANE_KIND),
            depth=pl.col("depth").fill_null(0).clip(0, _MOST_DEPTH),
        )
        items = pl.concat(
            [_few_streams(work.collect(), most_streams), placed.collect()], how="diagonal"
        )
        numbered = _numbered(_complete(items))
        # A lane has two rows for a column at most: a wide item and the narrow ones together.
        return _laid(numbered, columns_for(2 * numbered["lane"].n_unique(), n_columns))

    return WORK_LANES.from_rows(build)


def _few_streams(work: pl.DataFrame, most: int) -> pl.DataFrame:
    """Leave a lane of their own to the busiest streams of each GPU."""
    stream = ["pid", "device_id", "stream_id"]
    busy = (
        work.group_by(stream)
        .agg(time=(pl.col("end_ns") - pl.col("start_ns")).sum())
        .sort(*stream[:2], "time", "stream_id", descending=[False, False, True, False])
        .with_columns(place=pl.int_range(pl.len()).over(stream[:2]))
    )
    # A lane of the others that would hold one stream only may as well be that stream's.
    many = pl.len().over(stream[:2]) > most + 1
    few = busy.with_columns(_own=~many | (pl.col("place") < most)).select(*stream, "_own")
    return work.join(
        few, on=stream, how="left", nulls_equal=True, maintain_order="left"
    ).with_columns(stream_id=pl.when("_own").then("stream_id"))


def _complete(items: pl.DataFrame) -> pl.DataFrame:
    types: pl.Schema = WORK_LANES.schema
    columns = (*_LANE, "start_ns", "end_ns", "name")
    absent = [
        pl.lit(None, types[name]).alias(name) for name in columns if name not in items.columns
    ]
    return items.with_columns(absent).select(pl.col(name).cast(types[name]) for name in columns)


def _numbered(items: pl.DataFrame) -> pl.DataFrame:
    """Give each lane a number, so that no key is null."""
    lanes = items.select(_LANE).unique().sort(_LANE)
    lanes = lanes.with_columns(lane=pl.int_range(pl.len(), dtype=pl.Int64))
    return items.join(lanes, on=_LANE, how="left", nulls_equal=True, maintain_order="left")


def _laid(items: pl.DataFrame, n_columns: int) -> pl.DataFrame:
    """Keep wide items, put narrow ones together by column."""
    start, length = pl.col("start_ns"), pl.col("end_ns") - pl.col("start_ns")
    first = start.min().over("pid")
    width = pl.max_horizontal(
        (pl.col("end_ns").max().over("pid") - first) // n_columns + 1, pl.lit(1)
    )
    # Of equal lengths the earlier one is the wider: a total order, whatever the order of rows is.
    ordered = items.sort(
        "lane", length, "start_ns", "end_ns", "name", descending=[False, True, False, False, False]
    )
    few = pl.len().over("lane") <= n_columns
    rank = pl.int_range(pl.len()).over("lane")
    is_single = few | ((length >= width) & (rank < n_columns))
    group = pl.when(is_single).then(rank).otherwise(-1 - (start - first) // width)
    placed = ordered.with_columns(group=group.cast(pl.Int64))
    parts = placed.group_by("lane", "group").agg(
        pl.col(_LANE).first(), start.min(), pl.col("end_ns").max(), n=pl.len().cast(pl.Int64)
    )
    by = ["lane", "group"]
    # Reading "group" of what was merged: the merged lanes and groups have no null in their keys.
    busy = _busy(placed, by, "busy_ns")
    names = (
        placed.group_by(*by, "name")
        .agg(_time=length.sum())
        .sort(*by, "_time", "name", descending=[False, False, True, False])
        .group_by(by, maintain_order=True)
        .agg(pl.col("name").first(), n_names=pl.len().cast(pl.Int64))
    )
    return (
        parts.join(busy, on=by, how="left")
        .join(names, on=by, how="left")
        .join(_busy(placed, ["lane"], "lane_busy_ns"), on="lane", how="left")
        .with_columns(pl.col("busy_ns", "lane_busy_ns").fill_null(0))
        .sort("lane", "start_ns", "end_ns", "group")
    )


def _busy(placed: pl.DataFrame, by: list[str], name: str) -> pl.DataFrame:
    merged = union(placed.lazy().select(*by, "start_ns", "end_ns"), by=by)
    length = (pl.col("end_ns") - pl.col("start_ns")).sum()
    return merged.group_by(by).agg(length.alias(name)).collect()
