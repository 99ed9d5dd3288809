"""Figures of fault rows and their copies, stretch by stretch of the ends of rows: a table of any length.

A batch is what lies in (end of the row before, end of the row], so a stretch of ends holds whole batches. What a
later stretch needs of the earlier ones is handed on: the last end, copies whose row is still to come, and
pages that came while a later row was already raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import polars as pl

from nsan.analysis.driver.rows_and_copies import (
    COPY_READS,
    KEYS,
    ROW_READS,
    fault_copies,
    in_rows,
    row_groups,
)
from nsan.analysis.slices import Stretch, inside, stretches
from nsan.uvm.constants import CAUSE_COHERENCE, FAULT_BATCH_SIZE, PAGE_BYTES, VA_BLOCK_BYTES

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
    parts = stretches((rows, "end_ns"), (copies, "start_ns"))
    handed: _HandedOn | None = None
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        groups = _groups(rows.filter(inside("end_ns", part)).collect())
        mine = copies.filter(inside("start_ns", part)).collect()
        if handed is not None:
            groups = _after(groups, handed.ends)
            mine = pl.concat([handed.loose, mine])
        placed = in_rows(mine.lazy(), groups.lazy()).collect()
        matched = placed if is_last else placed.filter(pl.col("row_end").is_not_null())
        pages = _pages(matched)
        if handed is not None:
            pages = pl.concat([handed.pages, pages])
        floor = _earliest_to_come(rows, part)
        starts = groups.select(*KEYS, "start_ns")
        if handed is not None:
            starts = pl.concat([handed.starts, starts])
        starts = starts.unique()
        done = starts if is_last else starts.filter(_is_over(floor))
        yield _Figures(
            _end_figures(groups, done),
            _copy_figures(matched),
            _lags(matched),
            _pending_figures(groups, matched, pages),
        )
        if not is_last:
            ends = groups.group_by(KEYS).agg(_ended=pl.col("end_ns").max())
            loose = placed.filter(pl.col("row_end").is_null()).select(mine.columns)
            handed = _HandedOn(
                ends if handed is None else _latest(handed.ends, ends),
                loose,
                pages.filter(pl.col("came_ns") >= floor) if floor is not None else pages.clear(),
                starts.filter(_is_over(floor).not_()),
            )


def _is_over(floor: int | None) -> pl.Expr:
    """Say of a start that no later batch has it; one that is missing never is."""
    known = pl.col("start_ns").is_not_null()
    return known if floor is None else known & (pl.col("start_ns") < floor)


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


def _earliest_to_come(rows: pl.LazyFrame, part: Stretch) -> int | None:
    """Find when the earliest row was raised that ends behind a stretch; None: behind it is none."""
    high = part[1]
    if high is None:
        return None
    found = rows.filter(pl.col("end_ns") >= high).select(pl.col("start_ns").min()).collect().item()
    return found if isinstance(found, int) else None


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


def _pages(placed: pl.DataFrame) -> pl.DataFrame:
    """List the pages that came because they faulted, with the row that each is of."""
    page = pl.col("va") // PAGE_BYTES
    return (
        placed.lazy()
        .filter(
            (pl.col("cause_id") == CAUSE_COHERENCE) & pl.col("bytes").is_between(1, VA_BLOCK_BYTES)
        )
        .with_columns(_last=(pl.col("va") + pl.col("bytes").cast(pl.UInt64) - 1) // PAGE_BYTES)
        .select(*KEYS, "start_ns", _page=pl.int_ranges(page, pl.col("_last") + 1))
        .explode("_page")
        .select(*KEYS, pl.col("_page").cast(pl.Int64), came_ns="start_ns")
        .collect()
    )


def _pending_figures(
    groups: pl.DataFrame, placed: pl.DataFrame, pages: pl.DataFrame
) -> pl.DataFrame:
    """Count rows whose page came between their start and the end before theirs."""
    with_copies = placed.lazy().select(*KEYS, end_ns="row_end", has_copies=True).unique()
    page = (pl.col("va") // PAGE_BYTES).cast(pl.Int64)
    ends = pl.col("end_ns")
    return (
        groups.lazy()
        .join(with_copies, on=[*KEYS, "end_ns"], how="left", nulls_equal=True)
        .with_columns(_page=page)
        .join(pages.lazy(), on=[*KEYS, "_page"], nulls_equal=True)
        .filter(pl.col("came_ns").is_between("start_ns", "before_ns"))
        .group_by(KEYS)
        .agg(
            n_pending=ends.n_unique().cast(pl.Int64),
            n_pending_empty=ends.filter(pl.col("has_copies").is_null()).n_unique().cast(pl.Int64),
        )
        .collect()
    )
