"""Ranks against the others of their run, and runs against each other, by UM time; who takes longest.

Only like is judged against like: ranks of one run that run the same program, and runs of the same program with as
many ranks. Clocks of different machines are not aligned, so durations are compared, and times of day are not.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.fleet.outlying import outlying
from nsan.analysis.result import Figure, Result, derived, recorded

JUDGED: Final = ("um_ns", "migrations_busy_ns", "gpu_faults_busy_ns")
"""Figures of UM time by which a rank or a run may stand out: each among those that have it."""

_FOUND: Final = (
    derived("figure", pl.String, "label", f"By which it stands out: {', '.join(JUDGED)}."),
    derived("value_ns", pl.Float64, "ns", "Its value."),
    derived("median_ns", pl.Float64, "ns", "Median of those that it is judged against."),
    derived("mad_ns", pl.Float64, "ns", "Their median absolute deviation from that."),
    derived("excess_ns", pl.Float64, "ns", "Beyond the median; negative: below it."),
    derived("times_median", pl.Float64, "number", "Value over median; null: that is 0."),
    derived("mads", pl.Float64, "number", "Excess over MAD; null: that is 0."),
    derived(
        "score",
        pl.Float64,
        "number",
        "Distance in robust standard deviations; of those on a linear and a logarithmic scale the lesser.",
    ),
    derived("bound", pl.Float64, "number", "What normal values keep below in 99 of 100 groups."),
    derived("n_peers", pl.Int64, "reports", "How many there are, itself among them."),
    derived("n_together", pl.Int64, "reports", "Of those, how many stand out by the figure."),
    derived("is_group", pl.Boolean, "flag", "So many that they are a group of their own."),
)


def _who(*more: Figure) -> tuple[Figure, ...]:
    return (recorded("run", pl.String, "label", "The run."), *more, *_FOUND)


RANK_OUTLIERS: Final = Result(
    "rank_outliers",
    "a report that stands out from its run",
    _who(
        recorded("rank", pl.Int64, "id", "Its rank."),
        recorded("source", pl.String, "text", "Its name."),
    ),
    "No rank stands out.",
)
RUN_OUTLIERS: Final = Result(
    "run_outliers", "a run that stands out from the others", _who(), "No run stands out."
)

JUDGED_GROUPS: Final = Result(
    "judged_groups",
    "a figure of ranks of a run and program, or of runs of a program and size, that were judged together",
    (
        derived("scope", pl.String, "label", "`rank` or `run`."),
        recorded("run", pl.String, "label", "The run of the ranks; null: runs were judged."),
        derived("figure", pl.String, "label", f"By which: one of {', '.join(JUDGED)}."),
        recorded("group", pl.String, "label", "Program, or programs, that they have in common."),
        derived("size", pl.Int64, "reports", "Of runs: reports of each; null: ranks were judged."),
        derived("n_peers", pl.Int64, "reports", "How many were judged."),
        derived("n_beyond", pl.Int64, "reports", "How many are beyond the bound."),
        derived("n_together", pl.Int64, "reports", "How many are apart from the others, too."),
        derived("min_ns", pl.Int64, "ns", "Least value."),
        derived("median_ns", pl.Float64, "ns", "Median."),
        derived("max_ns", pl.Int64, "ns", "Largest value."),
        derived(
            "needed_ns",
            pl.Float64,
            "ns",
            "From which value on one above the median could stand out; null: from none.",
        ),
    ),
)

STRAGGLERS: Final = Result(
    "stragglers",
    "the report of a run that takes longest",
    (
        recorded("run", pl.String, "label", "The run."),
        recorded("rank", pl.Int64, "id", "Its rank."),
        recorded("source", pl.String, "text", "Its name."),
        derived("n_peers", pl.Int64, "reports", "Reports of the run whose duration is known."),
        derived("duration_ns", pl.Int64, "ns", "Its duration."),
        derived("median_ns", pl.Float64, "ns", "Median duration of the run."),
        derived("excess_ns", pl.Float64, "ns", "What it takes longer than that."),
        derived("spread", pl.Float64, "fraction", "Longest less shortest, over the median."),
        derived("is_outlier", pl.Boolean, "flag", "Whether that is beyond chance."),
        derived(
            "um_figure",
            pl.String,
            "label",
            "The figure of UM time, of those that all reports of the run have, by which it is most beyond the median.",
        ),
        derived(
            "um_excess_ns",
            pl.Float64,
            "ns",
            "How much beyond; negative: below it. It may lie beside kernels.",
        ),
        derived(
            "um_max_ns", pl.Int64, "ns", "Most UM time in the run, by a figure that all of it have."
        ),
    ),
    "No run has two reports whose duration is known.",
)


def rank_outliers(reports: pl.DataFrame) -> pl.DataFrame:
    """Find the reports that stand out from their run.

    Parameters
    ----------
    reports : DataFrame
        One row per report: ``run``, ``rank``, ``source``, ``program``, ``duration_ns`` and the figures of ``JUDGED``.

    Returns
    -------
    DataFrame, ``RANK_OUTLIERS``
        The farthest first. A report that stands out by several figures has one row: that of the farthest.
    """
    found = _judged(reports.with_row_index("_at"), by=_OF_RANKS).filter("is_outlier")
    return _worst(found, "_at").select(RANK_OUTLIERS.cast())


def run_outliers(reports: pl.DataFrame) -> pl.DataFrame:
    """Find the runs whose typical rank stands out from that of the other runs of the same program and size.

    Parameters
    ----------
    reports : DataFrame
        As of :func:`rank_outliers`, and ``n_failed``: of the run, as part of its size.

    Returns
    -------
    DataFrame, ``RUN_OUTLIERS``
        The farthest first.
    """
    found = _judged(_typical_ranks(reports), by=_OF_RUNS).filter("is_outlier")
    return _worst(found, "run").select(RUN_OUTLIERS.cast())


def judged_groups(reports: pl.DataFrame) -> pl.DataFrame:
    """Give what was judged together, by each figure, and from where on one of them could stand out.

    Parameters
    ----------
    reports : DataFrame
        As of :func:`run_outliers`.

    Returns
    -------
    DataFrame, ``JUDGED_GROUPS``
        Groups of ranks in the order of the runs, then groups of runs. Where nobody could be judged there is none.
    """
    ranks = _judged(reports, by=_OF_RANKS).with_columns(scope=pl.lit("rank"), size=pl.lit(None))
    runs = _judged(_typical_ranks(reports), by=_OF_RUNS).with_columns(
        scope=pl.lit("run"), run=pl.lit(None)
    )
    parts = [
        rows.with_columns(group="program")
        .group_by(
            "scope", *dict.fromkeys(("run", *by, "group", "size", "figure")), maintain_order=True
        )
        .agg(_group())
        .select(JUDGED_GROUPS.cast())
        for rows, by in ((ranks, _OF_RANKS), (runs, _OF_RUNS))
    ]
    return pl.concat(parts).filter(pl.col("n_peers") > 0)


def _group() -> list[pl.Expr]:
    is_judged, value = pl.col("is_outlier").is_not_null(), pl.col("value_ns")
    same = ("n_beyond", "n_together", "median_ns", "needed_ns")
    return [
        is_judged.sum().alias("n_peers"),
        value.min().alias("min_ns"),
        value.max().alias("max_ns"),
        pl.col(same).first(),
    ]


_OF_RANKS: Final = ("run", "program")
_OF_RUNS: Final = ("program", "size")


def _typical_ranks(reports: pl.DataFrame) -> pl.DataFrame:
    """Give the median rank of each run."""
    figures = pl.col("duration_ns", *JUDGED)
    return reports.group_by("run", maintain_order=True).agg(
        # A figure that a rank lacks is not that of the run.
        pl.when(figures.null_count() == 0).then(figures.median()),
        size=pl.len() + pl.col("n_failed").first(),
        program=pl.col("program").fill_null("").unique().sort().str.join("\n"),
    )


def _judged(rows: pl.DataFrame, *, by: tuple[str, ...]) -> pl.DataFrame:
    """Judge by each figure; the chance of one in a hundred is shared by those that could name somebody."""
    values = rows.with_columns(_comparable(figure, by).alias(figure) for figure in JUDGED)
    varied = (pl.col(figure).max() > pl.col(figure).min() for figure in JUDGED)
    n_figures = pl.sum_horizontal(
        each.fill_null(value=False).cast(pl.Int64).over(by) for each in varied
    )
    values = values.with_columns(n_figures=n_figures)
    parts = [
        outlying(values.with_columns(value_ns=figure), by=by).with_columns(
            figure=pl.lit(figure), _order=pl.lit(order)
        )
        for order, figure in enumerate(JUDGED)
    ]
    return pl.concat(parts)


def _comparable(figure: str, by: tuple[str, ...]) -> pl.Expr:
    """Take the union of both times where all peers have it, else each of the two.

    Where the union is known depends on what happened: some know it because nothing migrated there.
    """
    of_all = pl.col("um_ns").is_not_null().all().over(by)
    return pl.when(of_all if figure == "um_ns" else ~of_all).then(pl.col(figure))


def _worst(found: pl.DataFrame, key: str) -> pl.DataFrame:
    """Keep of each its farthest figure; sort by how far beyond the bound it is, what is above the median first."""
    far = pl.col("score").abs() / pl.col("bound")
    return (
        found.with_columns(_far=far, _below=pl.col("excess_ns") < 0)
        .sort("_far", "_order", key, descending=[True, False, False])
        .unique(key, keep="first", maintain_order=True)
        .sort("_below", "_far", key, descending=[False, True, False])
    )


def stragglers(reports: pl.DataFrame) -> pl.DataFrame:
    """Find of each run the report that takes longest, and how much more UM time it has.

    Parameters
    ----------
    reports : DataFrame
        As of :func:`rank_outliers`.

    Returns
    -------
    DataFrame, ``STRAGGLERS``
        One row per run with at least two known durations, in the order of the runs. Of reports that take equally
        long, the one with the lowest rank.
    """
    rows = outlying(reports.with_columns(value_ns="duration_ns", n_figures=pl.lit(1)), by=("run",))
    rows = rows.with_columns(**{f"_{name}": _beyond(name) for name in JUDGED})
    most = pl.max_horizontal(*(f"_{name}" for name in JUDGED))
    of_run = pl.col("duration_ns").cast(pl.Float64)
    rows = rows.with_columns(
        um_excess_ns=most,
        um_max_ns=pl.max_horizontal(_most(name) for name in JUDGED),
        um_figure=pl.coalesce(pl.when(pl.col(f"_{n}") == most).then(pl.lit(n)) for n in JUDGED),
        spread=((of_run.max() - of_run.min()) / of_run.median()).over("run"),
    )
    longest = rows.filter(pl.col("n_peers") >= 2, pl.col("duration_ns").is_not_null())
    longest = longest.with_row_index("_at").sort(
        "duration_ns", "rank", "_at", descending=[True, False, False], nulls_last=True
    )
    first = longest.unique("run", keep="first", maintain_order=True)
    order = reports.select("run").unique(maintain_order=True)
    found = order.join(first, on="run", how="inner", maintain_order="left")
    return found.select(STRAGGLERS.cast())


def _beyond(figure: str) -> pl.Expr:
    """Compare with the median of the run, where all of its reports have the figure."""
    value = pl.col(figure).cast(pl.Float64)
    return pl.when(value.is_not_null().all().over("run")).then(value - value.median().over("run"))


def _most(figure: str) -> pl.Expr:
    """Take the largest value of a run, where all of its reports have the figure."""
    value = pl.col(figure).cast(pl.Float64)
    return pl.when(value.is_not_null().all().over("run")).then(value.max().over("run"))
