"""The recipe `uvm_time_map`: in which share of each stretch of time Unified Memory worked, report by report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import polars as pl

from nsan.contract import has_um_data
from nsan.errors import UsageError, listed
from nsan.fleet.member import Member
from nsan.recipe.jobs import Job, Mapper, by_name, member
from nsan.recipe.plan import Plan, Reduced, is_modelled, no_um_data, notes_on, warnings_on
from nsan.recipe.time_bins import Placed, binned, grid_of
from nsan.recipe.time_tables import ALL_STATS, ANALYSIS, BY_GPU, RANK_STATS
from nsan.units import format_time

_MOST_BINS: Final = 100_000
_FAR: Final = 10
"""Sessions that began so many times their length apart are hardly of one run."""


def reduced(mapper: Mapper, jobs: Sequence[Job], args: argparse.Namespace) -> Reduced:
    """Lay one grid of bins over all reports, and fill it."""
    bins = getattr(args, "bins", 30)
    if not 1 <= bins <= _MOST_BINS:
        msg = f"--bins {bins}: give a number from 1 to {_MOST_BINS:,}."
        raise UsageError(msg)
    known = sorted(mapper(member, jobs), key=lambda each: by_name(each[1]))
    members = [each for _, each in known]
    if members and not any(has_um_data(each.info, each.totals) for each in members):
        return Reduced({}, len(members), warnings_on(members), nothing=no_um_data(members))
    align = not getattr(args, "disable_alignment", False)
    offsets, notes = offsets_of(members, align=align)
    notes += ["Not aligned, as asked: time is since the start of each session."] * (not align)
    placed = [_placed(each, offset) for each, offset in zip(members, offsets, strict=True)]
    notes += _far_apart(placed)
    grid = grid_of(placed, bins)
    if grid is None:
        return Reduced({}, len(members), nothing="No report says when its events were.")
    work = [replace(job, place=at) for (job, _), at in zip(known, placed, strict=True)]
    found = [each for _, each in mapper(partial(binned, grid=grid), work)]
    if not found:
        return Reduced({}, 0)
    whole = pl.concat([each.whole for each in found])
    tables = {
        "analysis": whole,
        "analysis_by_gpu": pl.concat([each.by_gpu for each in found]),
        "rank_stats": pl.concat([each.totals for each in found]),
        "all_stats": all_stats(whole),
    }
    return Reduced(tables, len(found), [*notes, *notes_on(members)], is_modelled(members))


def offsets_of(members: Sequence[Member], *, align: bool) -> tuple[list[int], list[str]]:
    """Say by how much each session began after the first one of its run.

    Parameters
    ----------
    members : sequence of Member
        The reports.
    align : bool
        False: all sessions begin at 0.

    Returns
    -------
    list of int, list of str
        ns for each member, and notes. A run of which a report does not say when it began is not aligned.
        Runs are not aligned with each other: each begins at 0.
    """
    starts: dict[str, list[int | None]] = {}
    for each in members:
        starts.setdefault(each.run, []).append(each.info["session_start_utc_ns"])
    unknown = sorted(run for run, times in starts.items() if len(times) > 1 and None in times)
    notes = [
        f"Not aligned, as a report does not say when its session began: {listed(unknown)}."
    ] * bool(align and unknown)
    first = {
        run: min(t for t in times if t is not None)
        for run, times in starts.items()
        if align and None not in times
    }
    return [
        each.info["session_start_utc_ns"] - first[each.run] if each.run in first else 0
        for each in members
    ], notes


def _far_apart(placed: Sequence[Placed]) -> list[str]:
    """Say that sessions began far from each other, as those of one run would not."""
    lengths = [
        p.last_ns - p.first_ns for p in placed if p.last_ns is not None and p.first_ns is not None
    ]
    apart = max((p.offset_ns for p in placed), default=0)
    if not lengths or apart <= _FAR * max(lengths):
        return []
    return [
        f"Sessions of one run began up to {format_time(apart)} apart, far more than any of them lasted. If they are "
        "not of one run, `--disable-alignment` lets each begin at 0."
    ]


def _placed(one: Member, offset: int) -> Placed:
    span = one.totals["span"]
    first, last = span["first_ns"], span["last_ns"]
    if first is None or last is None:
        return Placed(offset, None, None)
    return Placed(offset, first + offset, last + offset)


def all_stats(whole: pl.DataFrame) -> pl.DataFrame:
    """Summarise each bin over reports.

    Parameters
    ----------
    whole : DataFrame, ``ANALYSIS``
        Each bin of each report.

    Returns
    -------
    DataFrame, ``ALL_STATS``
        One row per bin; of the reports whose share is known.
    """
    share = pl.col("shown_fraction")
    return (
        whole.group_by("bin", "start_ns", "end_ns")
        .agg(
            n_reports=share.count().cast(pl.Int64),
            mean_fraction=share.mean(),
            min_fraction=share.min(),
            max_fraction=share.max(),
            max_source=pl.col("source").filter(share == share.max()).first(),
        )
        .sort("bin")
        .select(pl.col(name).cast(dtype) for name, dtype in ALL_STATS.schema.items())
    )


PLAN: Final = Plan(
    "uvm_time_map",
    reduced,
    {
        "rank_stats": RANK_STATS,
        "analysis": ANALYSIS,
        "analysis_by_gpu": BY_GPU,
        "all_stats": ALL_STATS,
    },
    ("START", "END", "NVTX", "BINS"),
    (
        (
            "--disable-alignment",
            {
                "action": "store_true",
                "help": "Let every session begin at 0, instead of when it began in its run",
            },
        ),
    ),
)
