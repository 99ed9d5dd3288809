"""The recipe `uvm_sum`: what moved and faulted in each report, and in all of them together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

import polars as pl

from nsan.analysis.result import Result, derived, recorded
from nsan.contract import has_um_data
from nsan.fleet.figures import (
    MIGRATION_FIGURES,
    REPORT_FIGURES,
    migration_figures,
    report_figures,
)
from nsan.fleet.member import Member
from nsan.recipe.jobs import Job, Mapper, by_name, member
from nsan.recipe.plan import Plan, Reduced, is_modelled, no_um_data, notes_on, warnings_on

_SUMMED: Final = tuple(
    column
    for column in REPORT_FIGURES.columns
    if column.unit not in {"id", "label", "text"}
    and column.name not in {"session_start_utc_ns", "last_ns", "gpu_memory_bytes", "n_gpus"}
)
"""Figures of a report that add up over reports."""

ALL_STATS: Final = Result(
    "all_stats",
    "a figure of all reports",
    (
        derived("figure", pl.String, "text", "Name of the figure, as in `rank_stats`."),
        derived("unit", pl.String, "text", "Its unit."),
        derived("n_reports", pl.Int64, "reports", "Reports in which it is known."),
        derived("n_unknown", pl.Int64, "reports", "Reports in which it is not: not recorded, or not read."),
        derived("total", pl.Int64, "number", "Sum over the reports that know it; null: none does."),
        derived("mean", pl.Float64, "number", "Mean of these."),
        derived("median", pl.Float64, "number", "Median of these."),
        derived("min", pl.Int64, "number", "Least of these."),
        derived("min_source", pl.String, "text", "The report that has it; the first of several."),
        derived("max", pl.Int64, "number", "Most of these."),
        derived("max_source", pl.String, "text", "The report that has it; the first of several."),
    ),
    "There is no report.",
)  # fmt: skip

ALL_MIGRATIONS: Final = Result(
    "all_migrations",
    "a direction and cause over all reports",
    (
        recorded("direction", pl.String, "label", "`htod`, `dtoh` or `dtod`."),
        recorded("cause", pl.String, "label", "Cause."),
        derived("n_reports", pl.Int64, "reports", "Reports that have such migrations."),
        recorded("n", pl.Int64, "migrations", "Migrations."),
        recorded("bytes", pl.Int64, "byte", "Their bytes; null where one report does not know them."),
        derived("bytes_fraction", pl.Float64, "fraction", "Of the bytes of all migrations."),
        derived("busy_ns", pl.Int64, "ns", "Time with one of them in flight, summed over GPUs and reports."),
        derived("bytes_per_s", pl.Float64, "byte/s", "Bytes over that time; null where a filter cuts a migration."),
    ),
    "No report has recorded migrations.",
)  # fmt: skip


def reduced(mapper: Mapper, jobs: Sequence[Job], _args: argparse.Namespace) -> Reduced:
    """Put the figures of the reports side by side, and add them up."""
    members = sorted((each for _, each in mapper(member, jobs)), key=by_name)
    if members and not any(has_um_data(each.info, each.totals) for each in members):
        return Reduced({}, len(members), warnings_on(members), nothing=no_um_data(members))
    reports, groups = report_figures(members), migration_figures(members)
    tables = {
        "rank_stats": reports,
        "rank_migrations": groups,
        "all_stats": all_stats(reports),
        "all_migrations": all_migrations(groups, cut_ways(members)),
    }
    return Reduced(tables, len(members), notes_on(members), is_modelled(members))


def all_stats(reports: pl.DataFrame) -> pl.DataFrame:
    """Summarise each figure over reports.

    Parameters
    ----------
    reports : DataFrame, ``REPORT_FIGURES``
        One row per report.

    Returns
    -------
    DataFrame, ``ALL_STATS``
        One row per figure, in the order of the columns. What is null in a report is in no figure.
    """
    rows = []
    for column in _SUMMED:
        known = reports.filter(pl.col(column.name).is_not_null())
        values = known[column.name].to_list()
        row = {
            "figure": column.name,
            "unit": column.unit,
            "n_reports": known.height,
            "n_unknown": reports.height - known.height,
        }
        if values:
            least, most = min(values), max(values)
            row |= {
                "total": _fitting(sum(values)),
                "mean": sum(values) / len(values),
                "median": float(known[column.name].median()),  # type: ignore[arg-type]
                "min": least,
                "min_source": known["source"][values.index(least)],
                "max": most,
                "max_source": known["source"][values.index(most)],
            }
        rows.append(row)
    return pl.DataFrame(rows, schema=ALL_STATS.schema, orient="row")


def _fitting(value: int) -> int | None:
    return value if abs(value) < 1 << 63 else None


def cut_ways(members: Sequence[Member]) -> pl.DataFrame:
    """List directions and causes of which a filter of time cuts a migration in any report.

    Parameters
    ----------
    members : sequence of Member
        The reports.

    Returns
    -------
    DataFrame
        ``direction``, ``cause``, each pair once.
    """
    groups = [group for m in members for group in m.totals["migrations"]["groups"]]
    rows = {(each["direction"], each["cause"]) for each in groups if each.get("is_cut")}
    return pl.DataFrame(
        list(rows), schema={"direction": pl.String, "cause": pl.String}, orient="row"
    )


def all_migrations(groups: pl.DataFrame, cut: pl.DataFrame) -> pl.DataFrame:
    """Add up migrations by direction and cause over reports.

    Parameters
    ----------
    groups : DataFrame, ``MIGRATION_FIGURES``
        One row per report, process, GPU, direction and cause.
    cut : DataFrame
        Of :func:`cut_ways`.

    Returns
    -------
    DataFrame, ``ALL_MIGRATIONS``
        Most bytes first. A sum is null where a part of it is: less than all would pass for all. So is the
        rate where a filter of time cuts a migration, for it cannot cut its bytes.
    """
    whole = {
        name: pl.when(pl.col(name).null_count() == 0).then(pl.col(name).cast(pl.Int128).sum())
        for name in ("n", "bytes", "busy_ns")
    }
    report = pl.struct("run", "rank", "source")
    added = groups.group_by("direction", "cause", maintain_order=True).agg(
        n_reports=report.n_unique(), **whole
    )
    largest = (1 << 63) - 1
    added = added.with_columns(
        pl.when(pl.col(name) <= largest).then(pl.col(name)).cast(pl.Int64).alias(name)
        for name in whole
    )
    ways = ["direction", "cause"]
    added = added.join(
        cut.with_columns(is_cut=pl.lit(value=True)),
        on=ways,
        how="left",
        nulls_equal=True,
        maintain_order="left",
    )
    has_rate = (pl.col("busy_ns") > 0) & pl.col("is_cut").is_null()
    total = pl.col("bytes").cast(pl.Float64).sum()
    known = (pl.col("bytes").null_count() == 0) & (total > 0)
    return (
        added.with_columns(
            bytes_fraction=pl.when(known).then(pl.col("bytes") / total),
            bytes_per_s=pl.when(has_rate).then(pl.col("bytes") * 1e9 / pl.col("busy_ns")),
        )
        .sort(["bytes", "direction", "cause"], descending=[True, False, False], nulls_last=True)
        .select(pl.col(name).cast(dtype) for name, dtype in ALL_MIGRATIONS.schema.items())
    )


PLAN: Final = Plan(
    "uvm_sum",
    reduced,
    {
        "rank_stats": REPORT_FIGURES,
        "rank_migrations": MIGRATION_FIGURES,
        "all_stats": ALL_STATS,
        "all_migrations": ALL_MIGRATIONS,
    },
    ("START", "END", "NVTX"),
)
