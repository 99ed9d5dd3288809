"""What the reports of a fleet add up to, over all and run by run: null as soon as one of them is not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from nsan.analysis.result import Result, derived, recorded

SUMS: Final = Result(
    "sums",
    "a figure of all reports, or of those of a run",
    (
        recorded("run", pl.String, "label", "The run; null: all of them."),
        derived("figure", pl.String, "label", "Name of the figure of a report."),
        derived("n_reports", pl.Int64, "reports", "How many there are."),
        derived("n_known", pl.Int64, "reports", "How many have the figure."),
        derived("sum", pl.Int128, "as the figure", "Over all; null where one lacks it."),
        derived("known_sum", pl.Int128, "as the figure", "Over those that have it."),
        derived("min", pl.Int64, "as the figure", "The least of those known."),
        derived("median", pl.Float64, "as the figure", "Median of those known."),
        derived("max", pl.Int64, "as the figure", "The largest of those known."),
    ),
)


def sums(reports: pl.DataFrame, figures: Sequence[str], *, by_run: bool = False) -> pl.DataFrame:
    """Add figures up over reports.

    Parameters
    ----------
    reports : DataFrame
        One row per report: ``run`` and the figures, integers.
    figures : sequence of str
        Names of columns.
    by_run : bool, default False
        One row per run and figure, instead of one per figure.

    Returns
    -------
    DataFrame, ``SUMS``
        Runs in the order of the reports, figures in the order given.
    """
    rows = reports if by_run else reports.with_columns(run=pl.lit(None, pl.String))
    order = rows.select("run").unique(maintain_order=True).with_row_index("_run")
    parts = [
        rows.group_by("run", maintain_order=True)
        .agg(_of(figure))
        .with_columns(figure=pl.lit(figure), _figure=pl.lit(place))
        for place, figure in enumerate(figures)
    ]
    if not parts:
        return SUMS.empty().collect()
    found = pl.concat(parts).join(order, on="run", how="left", nulls_equal=True)
    return found.sort("_run", "_figure").select(SUMS.cast())


def _of(figure: str) -> list[pl.Expr]:
    value = pl.col(figure).cast(pl.Int64)
    whole = value.cast(pl.Int128).sum()  # a sum of Int64 would wrap without a word
    return [
        pl.len().alias("n_reports"),
        value.count().alias("n_known"),
        pl.when(value.null_count() == 0).then(whole).alias("sum"),
        pl.when(value.count() > 0).then(whole).alias("known_sum"),
        value.min().alias("min"),
        value.median().alias("median"),
        value.max().alias("max"),
    ]


def typical(reports: pl.DataFrame, figures: Sequence[str]) -> pl.DataFrame:
    """Give the median of each figure over the reports of a run that run the same program.

    Parameters
    ----------
    reports : DataFrame
        One row per report: ``run``, ``program`` and the figures.
    figures : sequence of str
        Names of columns.

    Returns
    -------
    DataFrame
        ``run``, ``program`` and the medians of what is known.
    """
    return reports.group_by("run", "program", maintain_order=True).agg(
        pl.col(figures).cast(pl.Float64).median()
    )


def traffic(migrations: pl.DataFrame) -> pl.DataFrame:
    """Add migrations up over reports, by direction and cause.

    Parameters
    ----------
    migrations : DataFrame
        One row per report, process, GPU, direction and cause: ``run``, ``rank``, ``source``, ``direction``, ``cause``,
        ``n``, ``bytes``, ``busy_ns``.

    Returns
    -------
    DataFrame
        ``direction``, ``cause``, ``n_reports`` that have such migrations, ``n``, ``bytes``, ``busy_ns`` (added up
        over GPUs, processes and reports): most bytes first. A sum is null where a part is not known.
    """
    totals = [
        pl.when(pl.col(name).null_count() == 0).then(pl.col(name).cast(pl.Int128).sum()).alias(name)
        for name in ("n", "bytes", "busy_ns")
    ]
    return (
        migrations.group_by("direction", "cause", maintain_order=True)
        .agg(
            pl.struct("run", "rank", "source").n_unique().cast(pl.Int64).alias("n_reports"), *totals
        )
        .sort(
            "bytes",
            "direction",
            "cause",
            descending=[True, False, False],
            nulls_last=True,
            maintain_order=True,
        )
    )
