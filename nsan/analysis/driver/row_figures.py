"""Figures of fault rows and their copies, stretch by stretch of the ends of rows: a table of any length.

A batch is what lies in (end of the row before, end of the row], so a stretch of ends holds whole batches. What a
later stretch needs of the earlier ones is handed on: the last end, copies whose row is still to come, and of
rows that are open (raised, but not over) their starts and the pages that they ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import polars as pl

from nsan.analysis.driver.pending_rows import (
    arrivals,
    asked_later,
    asked_now,
    kept_for,
    open_rows,
    pending_ends,
)
from nsan.analysis.driver.rows_and_copies import (
    COPY_READS,
    KEYS,
    ROW_READS,
    fault_copies,
    in_rows,
    row_groups,
)
from nsan.analysis.slices import inside, stretches
from nsan.uvm.constants import CAUSE_COHERENCE, FAULT_BATCH_SIZE

_FULL: Final = 0.9 * FAULT_BATCH_SIZE


def figures_of(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.DataFrame:
    """Count by process and GPU what rows and copies do, and what rows should not do.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    DataFrame
        One row per process and GPU with fault rows (or fault copies, where others have rows), in that order:
        the counts of ``FAULT_ROW_CHECKS`` and what its styles are decided by. Empty without a fault row.
    """
    usable = pl.col("end_ns").is_not_null() & pl.col("va").is_not_null()
    rows = gpu_faults.select(ROW_READS).filter(usable)
    copies = fault_copies(migrations.select(COPY_READS))
    by_row = _added(_row_figures(rows), any_of=["coarse"])
    if by_row.is_empty():
        return by_row
    found = list(_by_stretch(rows, copies))
    by_end = _added((part.by_end for part in found), all_of=["one_each"])
    figures = by_row.join(by_end, on=KEYS, how="left", nulls_equal=True, maintain_order="left")
    parts = (
        _added(part.by_copy for part in found),
        _quartiles(pl.concat(part.lags for part in found)),
        _added(part.pending for part in found),
    )
    for part in parts:
        figures = figures.join(part, on=KEYS, how="full", nulls_equal=True, coalesce=True)
    return figures.sort(KEYS)


@dataclass(frozen=True)
class _Figures:
    """Figures of a stretch, each by process and GPU; of lags each value once, with their number."""

    by_end: pl.DataFrame
    by_copy: pl.DataFrame
    lags: pl.DataFrame
    pending: pl.DataFrame


@dataclass
class _HandedOn:
    """What a stretch leaves to the next one."""

    ends: pl.DataFrame
    loose: pl.DataFrame
    pages: pl.DataFrame
    starts: pl.DataFrame


def _added(
    parts: Iterable[pl.DataFrame], *, any_of: Iterable[str] = (), all_of: Iterable[str] = ()
) -> pl.DataFrame:
    """Add up counts by process and GPU."""
    whole = pl.concat(parts)
    flags = {*any_of, *all_of}
    return whole.group_by(KEYS, maintain_order=True).agg(
        pl.exclude(flags).sum(),
        *(pl.col(name).any() for name in any_of),
        *(pl.col(name).all() for name in all_of),
    )


# By start -------------------------------------------------------------------------------------------


def _row_figures(rows: pl.LazyFrame) -> Iterator[pl.DataFrame]:
    """Count rows by what they say of themselves, in order of start."""
    end = pl.col("end_ns")
    reached: pl.DataFrame | None = None
    parts = [inside("start_ns", each) for each in stretches((rows, "start_ns"))]
    for chosen in (pl.col("start_ns").is_null(), *parts):
        mine = rows.filter(chosen).drop("va").sort(*KEYS, "start_ns", "end_ns").collect()
        if mine.is_empty() and reached is not None:
            continue
        before = end.shift(1).over(KEYS)
        if reached is not None:
            mine = mine.join(reached, on=KEYS, how="left", nulls_equal=True, maintain_order="left")
            before = pl.coalesce(before, "_reached")
        yield (
            mine.with_columns(_before=before)
            .group_by(KEYS, maintain_order=True)
            .agg(
                n_rows=pl.len().cast(pl.Int64),
                n_out_of_order=(end < pl.col("_before")).sum(),
                n_counts_outside=pl.col("n_page_faults")
                .is_between(1, FAULT_BATCH_SIZE)
                .not_()
                .sum(),
                n_full=(pl.col("n_page_faults") >= _FULL).sum(),
                n_other_access=(pl.col("access") == "other").sum(),
                coarse=pl.col("sequence").is_not_null().any(),
            )
        )
        last = mine.group_by(KEYS).agg(_reached=end.last())
        reached = last if reached is None else _latest(reached, last)


def _latest(before: pl.DataFrame, after: pl.DataFrame) -> pl.DataFrame:
    """Take the later rows where there are some, else the earlier ones, by process and GPU."""
    return pl.concat([before, after]).unique(KEYS, keep="last", maintain_order=True)


# By end ---------------------------------------------------------------------------------------------


def _by_stretch(rows: pl.LazyFrame, copies: pl.LazyFrame) -> Iterator[_Figures]:
    """Go through the batches stretch by stretch."""
    last_ends = rows.group_by(KEYS).agg(_last_end=pl.col("end_ns").max()).collect()
    handed: _HandedOn | None = None
    for part in stretches((rows, "end_ns"), (copies, "start_ns")):
        groups = _groups(rows.filter(inside("end_ns", part)).collect())
        mine = copies.filter(inside("start_ns", part)).collect()
        starts = groups.select(*KEYS, "start_ns")
        if handed is not None:
            groups = _after(groups, handed.ends)
            mine = pl.concat([handed.loose, mine])
            starts = pl.concat([handed.starts, starts])
        placed = in_rows(mine.lazy(), groups.lazy()).collect()
        loose = _has_row_to_come(placed, last_ends)
        settled = placed.filter(~loose)
        opened = open_rows(rows, part[1])
        later = asked_later(rows, opened)
        starts = starts.unique()
        again = _starts_again(starts, opened, part[1])
        done = starts.join(again, on=[*KEYS, "start_ns"], how="anti", nulls_equal=True)
        pending, pages = _pending(groups, later, settled, None if handed is None else handed.pages)
        yield _Figures(
            _end_figures(groups, done),
            _copy_figures(settled),
            _lags(settled),
            _pending_figures(pending, settled),
        )
        ends = groups.group_by(KEYS).agg(_ended=pl.col("end_ns").max())
        handed = _HandedOn(
            ends if handed is None else _latest(handed.ends, ends),
            placed.filter(loose).select(mine.columns),
            pages,
            again,
        )


def _starts_again(starts: pl.DataFrame, opened: pl.DataFrame, until: int | None) -> pl.DataFrame:
    """Keep the starts that a later batch may have: those of open batches, and what is not known of."""
    if until is None:
        return starts.clear()
    at = pl.col("start_ns")
    known = starts.join(opened, on=[*KEYS, "start_ns"], how="semi", nulls_equal=True)
    return pl.concat([known, starts.filter(at.is_null() | (at >= until))]).unique()


def _has_row_to_come(placed: pl.DataFrame, last_ends: pl.DataFrame) -> pl.Series:
    """Say which copies have no row yet, but one that ends later; the others without a row have none."""
    known = placed.select(*KEYS, "start_ns", "row_end").join(
        last_ends, on=KEYS, how="left", nulls_equal=True, maintain_order="left"
    )
    later = pl.col("row_end").is_null() & (pl.col("start_ns") <= pl.col("_last_end"))
    return known.select(later.fill_null(value=False)).to_series()


def _groups(rows: pl.DataFrame) -> pl.DataFrame:
    """Put rows of one end together; where each has an end of its own, which is usual, they are groups."""
    ordered = rows.sort(*KEYS, "end_ns")
    again = pl.all_horizontal(
        pl.col(key).eq_missing(pl.col(key).shift(1)) for key in (*KEYS, "end_ns")
    )
    if ordered.select((again & (pl.int_range(pl.len()) > 0)).any()).item():
        return row_groups(rows.lazy()).collect()
    one = pl.lit(1, pl.Int64)
    return ordered.with_columns(
        n_rows=one,
        n_row_blocks=one,
        is_coarse=pl.col("sequence").is_not_null(),
        before_ns=pl.col("end_ns").shift(1).over(KEYS),
    ).drop("sequence")


def _after(groups: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame:
    """Give the first row of each process and GPU the end before it, of the stretches before."""
    return (
        groups.join(ends, on=KEYS, how="left", nulls_equal=True, maintain_order="left")
        .with_columns(before_ns=pl.coalesce("before_ns", "_ended"))
        .drop("_ended")
    )


def _end_figures(groups: pl.DataFrame, starts: pl.DataFrame) -> pl.DataFrame:
    """Count the batches, and the starts that no later batch can have."""
    by_end = groups.group_by(KEYS).agg(
        n_ends=pl.len().cast(pl.Int64),
        one_each=(pl.col("n_rows") == pl.col("n_row_blocks")).all(),
    )
    n_starts = starts.group_by(KEYS).agg(n_starts=pl.len().cast(pl.Int64))
    return (
        by_end.join(n_starts, on=KEYS, how="full", nulls_equal=True, coalesce=True)
        .with_columns(pl.col("n_ends", "n_starts").fill_null(0))
        .select(*KEYS, "n_ends", "n_starts", pl.col("one_each").fill_null(value=True))
    )


def _copy_figures(placed: pl.DataFrame) -> pl.DataFrame:
    faulted = placed.lazy().filter(pl.col("cause_id") == CAUSE_COHERENCE)
    batch = [*KEYS, "row_end"]
    same = pl.all_horizontal(pl.col(key).eq_missing(pl.col(key).shift(1)) for key in batch)
    falls = (pl.col("va") < pl.col("va").shift(1)) & pl.col("inside") & pl.col("inside").shift(1)
    return (
        faulted.sort(*KEYS, "start_ns", "va", "end_ns", "bytes", "inside")
        .with_columns(
            _falls=(same & falls).fill_null(value=False),
            _opens=same.not_().fill_null(value=True) & pl.col("inside"),
        )
        .group_by(KEYS)
        .agg(
            n_copies=pl.len().cast(pl.Int64),
            n_copies_outside=pl.col("inside").not_().sum(),
            n_descending=pl.col("_falls").sum(),
            # Ascending, so that the first copy of a row is its lowest.
            n_rows_above=(pl.col("_opens") & (pl.col("row_va") > pl.col("va"))).sum(),
        )
        .collect()
    )


def _lags(placed: pl.DataFrame) -> pl.DataFrame:
    """Count how often each time passed from the last copy of a batch to its end."""
    lag = pl.col("row_end") - pl.col("end_ns")
    return (
        placed.lazy()
        .filter("inside")
        .group_by(*KEYS, "row_end")
        .agg(lag=lag.min(), between=(pl.col("direction") == "dtod").any())
        # What comes from another GPU has work after its copies; the law was measured without.
        .filter(~pl.col("between"))
        .group_by(*KEYS, "lag")
        .agg(n=pl.len().cast(pl.Int64))
        .collect()
    )


def _quartiles(lags: pl.DataFrame) -> pl.DataFrame:
    """Find the quartiles of values of which each comes with its number."""
    counted = lags.group_by(*KEYS, "lag").agg(pl.col("n").sum()).sort(*KEYS, "lag")
    passed, known = pl.col("_passed"), pl.col("lag").is_not_null()
    last = pl.col("n").filter(known).sum() - 1
    marked = counted.with_columns(_passed=pl.when(known).then("n").cum_sum().over(KEYS))
    return marked.group_by(KEYS, maintain_order=True).agg(
        n_data=pl.col("n").sum(),
        lag_p25_ns=pl.col("lag").filter(passed > (last * 0.25).floor()).min(),
        lag_p75_ns=pl.col("lag").filter(passed > (last * 0.75).ceil()).min(),
    )


def _pending(
    groups: pl.DataFrame, later: pl.DataFrame, placed: pl.DataFrame, kept: pl.DataFrame | None
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Find batches whose page came before their turn, and what open batches need of the pages."""
    asked = asked_now(groups)
    if kept is None:
        kept = later.select(*KEYS, "_page", came_ns="_from").clear()
    found = pending_ends(asked, kept)
    pages = kept_for(later, kept)
    for each in arrivals(asked, later, placed):
        found = pl.concat([found, pending_ends(asked, each)]).unique()
        pages = kept_for(later, pl.concat([pages, each]))
    return found, pages


def _pending_figures(pending: pl.DataFrame, placed: pl.DataFrame) -> pl.DataFrame:
    """Count batches whose page came before their turn, and those of them without a copy."""
    with_copies = placed.lazy().select(*KEYS, end_ns="row_end", has_copies=True).unique()
    return (
        pending.lazy()
        .join(with_copies, on=[*KEYS, "end_ns"], how="left", nulls_equal=True)
        .group_by(KEYS)
        .agg(
            n_pending=pl.len().cast(pl.Int64),
            n_pending_empty=pl.col("has_copies").is_null().sum().cast(pl.Int64),
        )
        .collect()
    )
