"""Classes of walks through memory, from the pages of fault-caused copies, batch by batch."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.result import derived, reconstructed
from nsan.uvm.constants import BIG_PAGE_BYTES, PAGE_BYTES, VA_BLOCK_BYTES

PATTERN: Final = pl.Enum(
    ["stream_forward", "stream_backward", "strided", "clustered", "random", "too_few"]
)
LEAST_R2: Final = 0.8
"""Share of the variance of the batch medians that a line explains, from which it is a stream."""

LEAST_BATCHES: Final = 6
"""A line through fewer points is no evidence: of 4 random ones, one in ten has this R2."""

_LEAST_SHARE: Final = 0.5
_WIDE: Final = 0.75
"""Batches that cover so much of the span leave too little for a line."""

_FULL_PAGES: Final = 6
"""Pages of a batch whose distances say something."""

_MANY_PAGES: Final = 64
"""With so many faulted pages, scattered over all in each batch, few batches are enough."""

CLASS_COLUMNS: Final = (
    reconstructed("pattern", PATTERN, "label", "Class of the walk; `too_few`: no evidence."),
    derived("r2", pl.Float64, "fraction", "Variance of batch medians explained by the line."),
    derived("slope_bytes", pl.Float64, "byte", "Advance of the median per batch."),
    reconstructed("n_passes", pl.Int64, "passes", "Times that the walk began anew."),
    derived("stride_bytes", pl.Int64, "byte", "Most frequent distance of faulted pages."),
    derived("stride_fraction", pl.Float64, "fraction", "Distances that are the stride."),
    derived("scatter_fraction", pl.Float64, "fraction", "Spread inside batches over all spread."),
    derived("n_batches", pl.Int64, "batches", "Batches with a fault here."),
    derived("n_faulted_pages", pl.Int64, "pages", "Distinct faulted pages; a lower bound."),
    derived("span_bytes", pl.Int64, "byte", "From the lowest to behind the highest."),
    derived("density_fraction", pl.Float64, "fraction", "Faulted pages over pages of the span."),
)
"""What :func:`classes_of` says of a group of copies."""


def lines_of(points: pl.DataFrame, part: str) -> pl.DataFrame:
    """Fit a line with one slope and an offset for each part; ``x`` is the rank of the batch."""
    place = pl.int_range(pl.len())
    x = (place - place.min().over("group")).cast(pl.Float64)
    y = pl.col("median_page").cast(pl.Float64) - pl.col("median_page").min().over("group")
    n, sx, sy = pl.len(), pl.col("_x").sum(), pl.col("_y").sum()
    return (
        points.select("group", part, _x=x, _y=y)
        .group_by("group", part)
        .agg(
            sxx=(pl.col("_x") ** 2).sum() - sx * sx / n,
            sxy=(pl.col("_x") * pl.col("_y")).sum() - sx * sy / n,
            syy=(pl.col("_y") ** 2).sum() - sy * sy / n,
        )
        .group_by("group")
        .agg(pl.col("sxx", "sxy", "syy").sum(), n_passes=pl.len().cast(pl.Int64))
        .with_columns(
            slope=pl.when(pl.col("sxx") > 0).then(pl.col("sxy") / pl.col("sxx")),
            r2=pl.when((pl.col("sxx") > 0) & (pl.col("syy") > 0)).then(
                pl.col("sxy") ** 2 / (pl.col("sxx") * pl.col("syy"))
            ),
        )
        .select("group", "slope", "r2", "n_passes")
    )


def _since_before(value: pl.Expr, *groups: str) -> pl.Expr:
    """Take the difference to the row before; null where a group begins. Groups are together."""
    same = pl.all_horizontal(pl.col(key) == pl.col(key).shift(1) for key in groups)
    return pl.when(same).then(value - value.shift(1))


def _lines(points: pl.DataFrame) -> pl.DataFrame:
    """Fit a forward and a backward walk, each begun anew by a jump back over half the span."""
    step = _since_before(pl.col("median_page"), "group")
    half = (pl.col("median_page").max() - pl.col("median_page").min()).over("group") / 2
    # A pass only needs a number of its own, so the sums may run through all groups.
    marked = points.with_columns(
        forward=((step < 0) & (step <= -half)).fill_null(value=False).cum_sum(),
        backward=((step > 0) & (step >= half)).fill_null(value=False).cum_sum(),
    )
    ahead = lines_of(marked, "forward").filter(pl.col("slope") >= 0)
    back = lines_of(marked, "backward").filter(pl.col("slope") < 0)
    return (
        pl.concat([ahead, back])
        .sort("group", "r2", "slope", descending=[False, True, True], nulls_last=True)
        .unique("group", keep="first", maintain_order=True)
    )


def _strides(runs: pl.DataFrame, points: pl.DataFrame) -> pl.DataFrame:
    """Find the most frequent distance between neighbouring faulted pages.

    Distances inside a batch count where it holds many pages. Few may be one page of each of some
    arrays, at a distance that says nothing: then the distance of the medians of two batches counts.
    """
    last = pl.col("page") + pl.col("n") - 1
    same = pl.col("step") == pl.col("step").shift(1)
    apart = pl.when(same).then((pl.col("page") - last.shift(1)).abs())
    full = runs.with_columns(distance=apart).filter(pl.col("n_pages") >= _FULL_PAGES)
    step = _since_before(pl.col("median_page"), "group").abs()
    count = pl.lit(1, pl.Int64)
    return (
        pl.concat(
            [
                full.select("group", "distance", n=count),
                full.select("group", distance=pl.lit(1, pl.Int64), n=pl.col("n") - 1),
                points.with_columns(distance=step)
                .filter(pl.col("n_pages") < _FULL_PAGES)
                .select("group", "distance", n=count),
            ]
        )
        .filter((pl.col("n") > 0) & (pl.col("distance") > 0))
        .group_by("group", "distance")
        .agg(pl.col("n").sum())
        .sort("group", "n", "distance", descending=[False, True, False])
        .group_by("group", maintain_order=True)
        .agg(
            stride=pl.col("distance").first(),
            stride_fraction=pl.col("n").first() / pl.col("n").sum(),
            n_distances=pl.col("n").sum(),
            contiguous=pl.col("n").filter(pl.col("distance") == 1).sum() / pl.col("n").sum(),
        )
    )


def _by_batch(runs: pl.DataFrame) -> pl.DataFrame:
    """Give the batches of all groups numbers, and say how many pages each has, in all and before a run.

    Runs come in order of group, batch and page, so running sums do it, without a table of groups.
    """
    first = pl.int_range(pl.len()) == 0
    opens = pl.any_horizontal(
        first, *(pl.col(k) != pl.col(k).shift(1) for k in ("group", "batch_id"))
    )
    counted = runs.with_columns(_opens=opens, _passed=pl.col("n").cum_sum() - pl.col("n"))
    starts = counted.filter("_opens")["_passed"]
    totals = starts.shift(-1, fill_value=runs["n"].sum()) - starts
    step = counted["_opens"].cum_sum().cast(pl.Int64) - 1
    return counted.drop("_opens", "_passed").with_columns(
        step=step, n_pages=totals.gather(step), before=counted["_passed"] - starts.gather(step)
    )


def _points(runs: pl.DataFrame) -> pl.DataFrame:
    """Find the median faulted page of each batch, in order; runs as of :func:`_by_batch`."""
    before, middle = pl.col("before"), (pl.col("n_pages") + 1) // 2
    return runs.filter((before < middle) & (before + pl.col("n") >= middle)).select(
        "group", "n_pages", median_page=pl.col("page") + middle - before - 1
    )


def _spreads(runs: pl.DataFrame, points: pl.DataFrame) -> pl.DataFrame:
    """Compare the spread of pages inside batches, and from batch to batch, with that of all."""
    at = pl.col("page") + pl.col("n") // 2
    own = (at - pl.col("_median")).abs() * pl.col("n")
    all_ = (at - at.mean().over("group")).abs() * pl.col("n")
    scatter = (
        runs.with_columns(_median=points["median_page"].gather(runs["step"]))
        .with_columns(_own=own, _all=all_)
        # One page of each of some arrays is no scatter.
        .filter(pl.col("n_pages") >= _FULL_PAGES)
        .group_by("group")
        .agg(pl.col("_own", "_all").sum())
        .select(
            "group",
            scatter_fraction=pl.when(pl.col("_all") > 0).then(pl.col("_own") / pl.col("_all")),
        )
    )
    y, n = pl.col("median_page"), pl.len().over("group").cast(pl.Float64)
    rank = y.rank("ordinal").over("group").cast(pl.Float64)
    # Mean distance of two medians taken at random: what following ones would have without order.
    pairs = (2 * rank - n - 1) * y.cast(pl.Float64)
    steps = (
        points.with_columns(_step=_since_before(y, "group").abs(), _pairs=pairs, _n=n)
        .group_by("group")
        .agg(pl.col("_step").mean(), pl.col("_pairs").sum(), pl.col("_n").first())
        .with_columns(_apart=2 * pl.col("_pairs") / (pl.col("_n") * (pl.col("_n") - 1)))
        .select(
            "group", step=pl.when(pl.col("_apart") > 0).then(pl.col("_step") / pl.col("_apart"))
        )
    )
    return scatter.join(steps, on="group", how="left")


def _extents(runs: pl.DataFrame) -> pl.DataFrame:
    """Measure distinct pages, span, and how many VA blocks hold a fault against chance."""
    end = pl.col("page") + pl.col("n")
    before = end.cum_max().shift(1).over("group")
    block = pl.col("page") * pl.col("unit") // VA_BLOCK_BYTES
    n, blocks = pl.col("n_pages"), pl.col("_blocks").cast(pl.Float64)
    by_chance = blocks * (1 - (1 - 1 / blocks) ** n)
    return (
        runs.sort("group", "page", "n")
        .with_columns(_new=(end - pl.max_horizontal("page", before)).clip(0), _block=block)
        .group_by("group")
        .agg(
            n_pages=pl.col("_new").sum(),
            span=end.max() - pl.col("page").min(),
            occupied=pl.col("_block").n_unique(),
            _blocks=pl.col("_block").max() - pl.col("_block").min() + 1,
            unit=pl.col("unit").first(),
        )
        .with_columns(coverage=pl.col("occupied") / by_chance)
        .drop("_blocks", "occupied")
    )


def _pattern(least_batches: int) -> pl.Expr:
    """Choose the class from the figures of a group."""
    enough = pl.col("n_batches") >= least_batches
    strided = (
        (pl.col("stride") > 1)
        & (pl.col("stride_fraction") >= _LEAST_SHARE)
        & (pl.col("n_distances") >= least_batches - 1)
        & pl.col("has_causes")
    )
    # Where each batch lies scattered over all, medians may drift only because eviction takes the
    # blocks that the driver serviced first, the low ones (zipf and random in the driver model).
    scatter = pl.col("scatter_fraction").fill_null(0.0)
    many = pl.col("n_batches") >= 2 * least_batches
    sure = (scatter < _LEAST_SHARE) | ((scatter < _WIDE) & many)
    line = enough & sure & (pl.col("r2") >= LEAST_R2)
    scattered = (
        (pl.col("n_pages") >= _MANY_PAGES)
        & (pl.col("scatter_fraction") >= _LEAST_SHARE)
        & (pl.col("contiguous") < _LEAST_SHARE)
    )
    near = (pl.col("step") < _LEAST_SHARE) & (scatter < _LEAST_SHARE)
    clustered = (pl.col("coverage") < _LEAST_SHARE) | near
    return (
        pl.when(strided)
        .then(pl.lit("strided"))
        .when(line & (pl.col("slope") >= 0))
        .then(pl.lit("stream_forward"))
        .when(line)
        .then(pl.lit("stream_backward"))
        .when(~enough & ~scattered.fill_null(value=False))
        .then(pl.lit("too_few"))
        .when(clustered)
        .then(pl.lit("clustered"))
        .otherwise(pl.lit("random"))
        .cast(PATTERN)
    )


def classes_of(copies: pl.DataFrame, *, least_batches: int = LEAST_BATCHES) -> pl.DataFrame:
    """Say for each group of fault-caused copies what walk through memory they show.

    Parameters
    ----------
    copies : DataFrame
        Reads ``group`` (Int64), ``batch_id`` (Int64, ascending with time), ``va``, ``bytes``,
        ``has_causes`` (Boolean); rows in any order.
    least_batches : int, default 6
        With fewer batches there is no line.

    Returns
    -------
    DataFrame
        One row per group: ``group`` and :data:`CLASS_COLUMNS`.
    """
    whole = (pl.col("va") % BIG_PAGE_BYTES == 0) & (pl.col("bytes") % BIG_PAGE_BYTES == 0)
    unit = pl.when(whole.all().over("group")).then(BIG_PAGE_BYTES).otherwise(PAGE_BYTES)
    size = pl.col("unit")
    runs = (
        copies.select("group", "batch_id", "va", "bytes", "has_causes", unit=unit.cast(pl.Int64))
        .select(
            "group",
            "batch_id",
            "unit",
            "has_causes",
            page=(pl.col("va") // size.cast(pl.UInt64)).cast(pl.Int64),
            n=pl.max_horizontal((pl.col("bytes") + size - 1) // size, 1),
        )
        .sort("group", "batch_id", "page", "n")
        .pipe(_by_batch)
    )
    points = _points(runs)
    counts = runs.group_by("group").agg(
        pl.col("has_causes").all(), n_batches=pl.col("step").n_unique().cast(pl.Int64)
    )
    figures = counts
    for part in (_lines(points), _strides(runs, points), _spreads(runs, points), _extents(runs)):
        figures = figures.join(part, on="group", how="left")
    return figures.sort("group").select(
        "group",
        pattern=_pattern(least_batches),
        r2="r2",
        slope_bytes=pl.col("slope") * size,
        n_passes=pl.col("n_passes").fill_null(0) + (pl.col("n_passes").is_null()).cast(pl.Int64),
        stride_bytes=pl.when("has_causes").then(pl.col("stride") * size),
        stride_fraction=pl.when("has_causes").then("stride_fraction"),
        scatter_fraction="scatter_fraction",
        n_batches="n_batches",
        n_faulted_pages=pl.col("n_pages") * (size // PAGE_BYTES),
        span_bytes=pl.col("span") * size,
        density_fraction=pl.col("n_pages") / pl.col("span"),
    )
