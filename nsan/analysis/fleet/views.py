"""Frames of a fleet's charts: ranks in as many bars as there is room for, causes of the ranks that move most."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.result import Result, derived, recorded

BARS: Final = Result(
    "bars",
    "neighbouring ranks of a run",
    (
        recorded(
            "first", pl.Int64, "id", "Rank, or place where ranks are not known, of the first."
        ),
        recorded("last", pl.Int64, "id", "Of the last."),
        derived("n", pl.Int64, "reports", "Reports."),
        derived("value_ns", pl.Int64, "ns", "The largest value of one of them."),
        derived("side", pl.String, "label", "Whether one stands out: `more`, `less`; null: none."),
    ),
    "No report of the run has UM time.",
)

CAUSES_OF: Final = Result(
    "causes_of",
    "a report and a cause",
    (
        recorded("label", pl.String, "label", "The report."),
        recorded("place", pl.Int64, "id", "Its place: most bytes first."),
        recorded("cause", pl.String, "label", "Cause."),
        recorded("bytes", pl.Int64, "byte", "Bytes that moved for it."),
    ),
)

_SIDES: Final = {"more": 2, "less": 1}


def bars(ranks: pl.DataFrame, *, most: int) -> pl.DataFrame:
    """Put the ranks of a run into at most so many bars; of several the largest value and who stands out are kept.

    Parameters
    ----------
    ranks : DataFrame
        One row per report, in order: ``rank``, ``value_ns``, ``side``.
    most : int
        Bars at most.

    Returns
    -------
    DataFrame, ``BARS``
        In order. Where ranks are unknown or come twice, places take their place. Reports without a value are left
        out, and leave a gap.
    """
    rank = ranks["rank"]
    if rank.null_count() or rank.n_unique() < ranks.height:
        ranks = ranks.with_columns(rank=pl.int_range(pl.len(), dtype=pl.Int64))
    ranks = ranks.sort("rank")
    size = -(-ranks.height // most) or 1
    order = pl.col("side").replace_strict(_SIDES, default=0, return_dtype=pl.Int64)
    grouped = (
        ranks.with_columns(_bar=pl.int_range(pl.len()) // size, _side=order)
        .filter(pl.col("value_ns").is_not_null())
        .group_by("_bar", maintain_order=True)
        .agg(
            first=pl.col("rank").min(),
            last=pl.col("rank").max(),
            n=pl.len(),
            value_ns=pl.col("value_ns").max(),
            side=pl.col("side").get(pl.col("_side").arg_max()),
        )
    )
    return grouped.select(BARS.cast())


def causes_of(reports: pl.DataFrame, causes: list[str], *, most: int) -> pl.DataFrame:
    """Take the reports that moved most apart by cause.

    Parameters
    ----------
    reports : DataFrame
        One row per report: ``label``, ``bytes``, and a column of bytes for each cause, by its name.
    causes : list of str
        Names of the causes.
    most : int
        Reports at most.

    Returns
    -------
    DataFrame, ``CAUSES_OF``
        Causes without bytes are left out, and reports whose bytes are not known.
    """
    top = (
        reports.drop_nulls(["bytes", *causes])
        .filter(pl.col("bytes") > 0)
        .sort("bytes", descending=True, maintain_order=True)
        .head(most)
        .drop("bytes")
        .with_row_index("place")
    )
    rows = top.unpivot(causes, index=["label", "place"], variable_name="cause", value_name="bytes")
    return (
        rows.filter(pl.col("bytes") > 0).sort("place", maintain_order=True).select(CAUSES_OF.cast())
    )
