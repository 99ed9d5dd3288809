"""The recipe `uvm_clusters`: where page faults crowd in time and address, over reports."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import polars as pl

from nsan.analysing import analyse
from nsan.analysis.catalog import find
from nsan.analysis.result import Result, reconstructed
from nsan.contract import has_um_data
from nsan.fleet.member import Member
from nsan.recipe.jobs import Job, Mapper, by_name, member_of, opened
from nsan.recipe.plan import NAMED, Plan, Reduced, is_modelled, no_um_data, notes_on, warnings_on

_MOST: Final = 100
"""Rows of the largest clusters of all reports."""

_OF_TRACE: Final = find("fault_clusters").result

RANK_CLUSTERS: Final = Result(
    "rank_clusters", "a cluster of a report", (*NAMED, *_OF_TRACE.columns)
)
"""The clusters of `nsan clusters` by report, most pages first, then what is noise (-1)."""

ALL_CLUSTERS: Final = Result("all_clusters", "a cluster", (*NAMED, *_OF_TRACE.columns))
"""The largest of all reports."""

RANK_STATS: Final = Result(
    "rank_stats",
    "a report",
    (
        *NAMED,
        reconstructed("n_clusters", pl.Int64, "clusters", "Clusters; null: no migration was recorded."),
        reconstructed("n_pages", pl.Int64, "pages", "Faulted pages, in clusters and noise."),
        reconstructed("clustered_fraction", pl.Float64, "fraction", "Of these in clusters."),
        reconstructed("bytes", pl.Int64, "byte", "Moved to GPUs by faults and driver prefetch."),
        reconstructed("largest_pages", pl.Int64, "pages", "Faulted pages of the largest cluster."),
        reconstructed("largest_fraction", pl.Float64, "fraction", "Of all faulted pages there."),
        reconstructed("largest_pattern", pl.String, "label", "How it walks through memory."),
        reconstructed("median_duration_ns", pl.Float64, "ns", "Of clusters."),
    ),
)  # fmt: skip

ALL_PATTERNS: Final = Result(
    "all_patterns",
    "a class of walk over all reports",
    (
        reconstructed("pattern", pl.String, "label", "Class of the walk."),
        reconstructed("n_reports", pl.Int64, "reports", "Reports with such clusters."),
        reconstructed("n_clusters", pl.Int64, "clusters", "Clusters."),
        reconstructed("n_pages", pl.Int64, "pages", "Their faulted pages."),
        reconstructed("pages_fraction", pl.Float64, "fraction", "Of the pages of all clusters."),
        reconstructed("bytes", pl.Int64, "byte", "Their bytes."),
    ),
)


@dataclass(frozen=True)
class Found:
    """Clusters of one report: what is known about it, figures over all clusters, and the first of them."""

    member: Member
    figures: pl.DataFrame
    patterns: pl.DataFrame
    clusters: pl.DataFrame


def clusters(job: Job, *, rows: int) -> Found:
    """Find the clusters of one report.

    Parameters
    ----------
    job : Job
        The report.
    rows : int
        Clusters to bring back at most, the largest; below 0 all.

    Returns
    -------
    Found
        Figures and patterns are over all clusters.
    """
    job, trace = opened(job)
    found = analyse(trace, "fault_clusters").collect()
    noise = pl.col("cluster_id") == -1
    found = found.sort(
        [noise, "n_pages", "pid", "device_id", "cluster_id"],
        descending=[False, True, False, False, False],
    ).with_columns(pl.col("pattern").cast(pl.String))
    kept = found if rows < 0 else found.filter(~noise).head(rows)
    return Found(
        member_of(job, trace),
        job.named(_figures(found, is_known=_has_migrations(trace.info.capture))),
        job.named(_patterns(found)),
        job.named(kept),
    )


def _has_migrations(capture: dict) -> bool:  # type: ignore[type-arg]
    about = capture.get("migrations")
    return about is not None and about.answer == "recorded"


def _figures(found: pl.DataFrame, *, is_known: bool) -> pl.DataFrame:
    own = found.filter(pl.col("cluster_id") >= 0)
    pages = int(found["n_pages"].sum())
    largest = own.row(0, named=True) if own.height else None
    row = {
        "n_clusters": own.height if is_known else None,
        "n_pages": pages if is_known else None,
        "clustered_fraction": int(own["n_pages"].sum()) / pages if pages else None,
        "bytes": int(found["bytes"].sum()) if is_known else None,
        "largest_pages": largest and largest["n_pages"],
        "largest_fraction": largest["n_pages"] / pages if largest and pages else None,
        "largest_pattern": largest and largest["pattern"],
        "median_duration_ns": own["duration_ns"].median(),
    }
    schema = {name: dtype for name, dtype in RANK_STATS.schema.items() if name in row}
    return pl.DataFrame([row], schema=schema, orient="row")


def _patterns(found: pl.DataFrame) -> pl.DataFrame:
    own = found.filter(pl.col("cluster_id") >= 0)
    return own.group_by("pattern").agg(
        n_clusters=pl.len().cast(pl.Int64),
        n_pages=pl.col("n_pages").sum(),
        bytes=pl.col("bytes").sum(),
    )


def reduced(mapper: Mapper, jobs: Sequence[Job], args: argparse.Namespace) -> Reduced:
    """Put the clusters of the reports together."""
    rows = getattr(args, "rows", -1)
    answers = mapper(partial(clusters, rows=-1 if rows is None else rows), jobs)
    found = sorted((each for _, each in answers), key=lambda each: by_name(each.member))
    members = [each.member for each in found]
    if not found:
        return Reduced({}, 0)
    if not any(has_um_data(each.info, each.totals) for each in members):
        return Reduced({}, len(members), warnings_on(members), nothing=no_um_data(members))
    stats = pl.concat([each.figures for each in found])
    if not stats["n_clusters"].sum():
        return Reduced({}, len(members), warnings_on(members), nothing=_no_clusters(members))
    every = pl.concat([each.clusters for each in found])
    tables = {
        "rank_stats": stats,
        "rank_clusters": every,
        "all_clusters": largest(every),
        "all_patterns": all_patterns(pl.concat([each.patterns for each in found])),
    }
    return Reduced(tables, len(members), notes_on(members), is_modelled(members))


def _no_clusters(members: Sequence[Member]) -> str:
    n = len(members)
    where = "The report has" if n == 1 else f"None of the {n} reports has"
    no = " no" if n == 1 else " a"
    return f"{where}{no} cluster of page faults: too few pages that faults brought to a GPU lie near each other."


def largest(every: pl.DataFrame) -> pl.DataFrame:
    """Choose the largest clusters of all reports, noise left out.

    Parameters
    ----------
    every : DataFrame, ``RANK_CLUSTERS``
        Clusters of all reports.

    Returns
    -------
    DataFrame, ``ALL_CLUSTERS``
        Most pages first, 100 at most.
    """
    keys = ["run", "rank", "source", "pid", "device_id", "cluster_id"]
    return (
        every.filter(pl.col("cluster_id") >= 0)
        .sort(["n_pages", *keys], descending=[True, *[False] * len(keys)], nulls_last=True)
        .head(_MOST)
    )


def all_patterns(patterns: pl.DataFrame) -> pl.DataFrame:
    """Add up clusters by the class of their walk.

    Parameters
    ----------
    patterns : DataFrame
        One row per report and class: ``run``, ``rank``, ``source``, ``pattern``, ``n_clusters``,
        ``n_pages``, ``bytes``.

    Returns
    -------
    DataFrame, ``ALL_PATTERNS``
        Most pages first.
    """
    added = patterns.group_by("pattern").agg(
        n_reports=pl.struct("run", "rank", "source").n_unique().cast(pl.Int64),
        n_clusters=pl.col("n_clusters").sum(),
        n_pages=pl.col("n_pages").sum(),
        bytes=pl.col("bytes").sum(),
    )
    share = pl.col("n_pages") / pl.col("n_pages").sum()
    return (
        added.with_columns(pages_fraction=share)
        .sort(["n_pages", "pattern"], descending=[True, False], nulls_last=True)
        .select(pl.col(name).cast(dtype) for name, dtype in ALL_PATTERNS.schema.items())
    )


PLAN: Final = Plan(
    "uvm_clusters",
    reduced,
    {
        "rank_stats": RANK_STATS,
        "rank_clusters": RANK_CLUSTERS,
        "all_clusters": ALL_CLUSTERS,
        "all_patterns": ALL_PATTERNS,
    },
    ("START", "END", "NVTX", "ROWS"),
)
