"""What the rows of a GPU fault table are, decided on every capture before anything builds on them.

Measured on nvprof, which gets the same records as nsys: one row is one driver batch. No nsys file
with fault rows has been published, so the rule is checked, not assumed: per process and GPU the
rows are named batches, pages, VA blocks, or refused by name.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.keeping import once
from nsan.analysis.nearest import nearest
from nsan.analysis.result import DEVICE, PID, Result, derived, reconstructed
from nsan.uvm.constants import (
    CAUSE_COHERENCE,
    CAUSE_PREFETCH,
    FAULT_BATCH_SIZE,
    PAGE_BYTES,
    VA_BLOCK_BYTES,
)

KEYS: Final = ["pid", "device_id"]

STYLES: Final = (
    "no_rows",
    "batch",
    "page",
    "va_block",
    "jittered",
    "jittered_page",
    "other",
    "coarse",
    "no_copies",
)
STYLE: Final = pl.Enum(STYLES)

USABLE_STYLES: Final = ("batch", "page", "va_block", "coarse", "no_copies")
"""Styles whose rows give the batches: alone, or put together by their shared end."""

_MAX_OUTSIDE: Final = 0.05
"""Share of copies that may fit no row before the rows are taken for something else."""

_ODD_ONES: Final = 1
"""A single misfit says nothing of the others."""

_MAX_DESCENDING: Final = 0.2
"""The same for copies out of order."""

_MAX_LAG_SPREAD_NS: Final = 10_000
"""The replay follows the last copy by 2.4 to 7 us at one GPU (measured): a wider interquartile
range means that the ends are not those of replays."""

_FEW: Final = 8
"""Batches with copies below which a spread says nothing."""

FAULT_ROW_CHECKS: Final = Result(
    "fault_row_checks",
    "the GPU fault rows of one process and GPU",
    (
        PID,
        DEVICE,
        reconstructed("style", STYLE, "label", "What one row is; `other` and jittered: unusable."),
        derived("n_rows", pl.Int64, "rows", "Fault rows."),
        derived("n_ends", pl.Int64, "batches", "Distinct ends of replays."),
        derived("n_out_of_order", pl.Int64, "rows", "End before the row that started before."),
        derived("n_counts_outside", pl.Int64, "rows", "Count not in 1 to 256."),
        derived("n_full", pl.Int64, "rows", "Count of 0.9 x 256 or more: full for certain."),
        derived("n_other_access", pl.Int64, "rows", "Access type that nsan does not know."),
        derived("n_copies", pl.Int64, "copies", "Copies to the GPU that page faults caused."),
        derived(
            "n_copies_outside", pl.Int64, "copies", "Of these in no row's (previous end, end]."
        ),
        derived("n_descending", pl.Int64, "copies", "Of these below the one before in their row."),
        derived("n_rows_above", pl.Int64, "batches", "Rows above their lowest faulted page."),
        derived(
            "n_pending", pl.Int64, "batches", "Rows whose page came before the end before theirs."
        ),
        derived("n_pending_empty", pl.Int64, "batches", "Of these without any copy of their own."),
        derived("lag_p25_ns", pl.Int64, "ns", "Last copy to end of the row, quartile."),
        derived("lag_p75_ns", pl.Int64, "ns", "Last copy to end of the row, quartile."),
    ),
)

ROW_READS: Final = (
    "start_ns",
    "end_ns",
    "pid",
    "device_id",
    "va",
    "n_page_faults",
    "access",
    "sequence",
)
COPY_READS: Final = (
    "start_ns",
    "end_ns",
    "pid",
    "device_id",
    "va",
    "bytes",
    "direction",
    "cause_id",
)


def row_groups(gpu_faults: pl.LazyFrame) -> pl.LazyFrame:
    """Put rows that share their end together: the end of the replay identifies the batch.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order.

    Returns
    -------
    LazyFrame
        One row per process, GPU and end, in that order: ``pid``, ``device_id``, ``start_ns`` (the
        earliest), ``end_ns``, ``before_ns`` (the end before, null for the first), ``va``,
        ``n_page_faults``, ``access`` (all of the lowest page), ``n_rows``, ``n_row_blocks``,
        ``is_coarse`` (times printed with few digits). Rows without an end or an address are left out.
    """
    lowest = pl.col("va").arg_min()
    return (
        gpu_faults.filter(pl.col("end_ns").is_not_null() & pl.col("va").is_not_null())
        .sort(*KEYS, "end_ns", "va", "start_ns", "n_page_faults", "access")
        .group_by(*KEYS, "end_ns", maintain_order=True)
        .agg(
            pl.col("start_ns").min(),
            pl.col("n_page_faults", "access").get(lowest),
            pl.col("va").min(),
            n_rows=pl.len().cast(pl.Int64),
            n_row_blocks=(pl.col("va") // VA_BLOCK_BYTES).n_unique().cast(pl.Int64),
            is_coarse=pl.col("sequence").is_not_null().any(),
        )
        .with_columns(before_ns=pl.col("end_ns").shift(1).over(KEYS))
    )


def usable_rows(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Keep the fault rows of processes and GPUs where rows tell the batches.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration: what the rows are judged by.

    Returns
    -------
    LazyFrame
        The rows whose style is one of ``USABLE_STYLES``.
    """
    styles = fault_row_checks(gpu_faults, migrations).filter(
        pl.col("style").cast(pl.String).is_in(USABLE_STYLES)
    )
    return gpu_faults.join(styles.select(KEYS), on=KEYS, how="semi", nulls_equal=True)


def fault_copies(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Keep the copies to a GPU that page faults caused, or may have where no cause is known.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration.

    Returns
    -------
    LazyFrame
        Copies to a GPU by a page fault or the driver's prefetcher that have a start and an address.
    """
    known = pl.col("start_ns").is_not_null() & pl.col("va").is_not_null()
    caused = pl.col("cause_id").is_in([CAUSE_COHERENCE, CAUSE_PREFETCH])
    unsaid = pl.col("cause_id").is_null() | (pl.col("cause_id") == 0)
    return migrations.filter(known & (pl.col("direction") != "dtoh") & (caused | unsaid))


def in_rows(copies: pl.LazyFrame, groups: pl.LazyFrame) -> pl.LazyFrame:
    """Find for each copy the row in whose (previous end, end] it starts.

    Parameters
    ----------
    copies : LazyFrame
        Migrations of any cause with a start; other columns stay.
    groups : LazyFrame
        As of :func:`row_groups`.

    Returns
    -------
    LazyFrame
        The copies, by start, with ``row_start``, ``row_end``, ``row_va`` and ``inside``: false where
        the copy began before its fault was raised or is not over at the replay. Then the row of its
        batch is missing. Coarse times cannot tell, and every copy counts as inside.
    """
    rows = groups.select(*KEYS, "is_coarse", row_start="start_ns", row_end="end_ns", row_va="va")
    late = pl.col("end_ns") > pl.col("row_end")
    early = pl.col("start_ns") < pl.col("row_start")
    return (
        nearest(copies, rows, on=("start_ns", "row_end"), by=KEYS, forward=True)
        .with_columns(inside=(pl.col("is_coarse") | ~(late | early)).fill_null(value=False))
        .drop("is_coarse")
    )


@analysis(
    question="Is a GPU fault row a driver batch here, and if not, what is it?",
    result=FAULT_ROW_CHECKS,
    reads={"gpu_faults": ROW_READS, "migrations": COPY_READS},
    source="fault_rows.md 3.7; domain.md D.5",
)
def fault_row_checks(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Check the laws of fault rows and name the style of the rows.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``FAULT_ROW_CHECKS``
        One row per process and GPU with fault rows (or copies by faults, where there are rows of
        others), in that order. Styles: ``batch``, one row per
        batch; ``page`` and ``va_block``, several rows share the end of their batch; ``jittered``,
        ends that scatter around the replays, and ``jittered_page``, such rows of pages; ``other``,
        too many copies fit no row; ``coarse``, printed with few digits, so that only
        the count can be checked; ``no_copies``, nothing to judge by; ``no_rows``, a GPU with copies by page faults
        and no row in a capture that has rows of others.
    """
    read = gpu_faults.select(ROW_READS), migrations.select(COPY_READS)
    return FAULT_ROW_CHECKS.from_rows(
        lambda: once("fault row checks", lambda: _checks(*read), gpu_faults, migrations)
    )


def _checks(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.DataFrame:
    rows = gpu_faults.filter(pl.col("end_ns").is_not_null() & pl.col("va").is_not_null())
    groups = row_groups(rows)
    placed = in_rows(fault_copies(migrations), groups)
    parts = [
        _row_figures(rows, groups),
        _copy_figures(placed),
        _lag_figures(placed),
        _pending_figures(groups, placed),
    ]
    figures, *others = pl.collect_all(parts)
    if figures.is_empty():
        return pl.DataFrame(schema=FAULT_ROW_CHECKS.schema)
    for part in others:
        figures = figures.join(part, on=KEYS, how="full", nulls_equal=True, coalesce=True)
    figures = figures.sort(KEYS)
    counts = [c.name for c in FAULT_ROW_CHECKS.columns if c.name.startswith("n_")]
    return figures.with_columns(pl.col(counts).fill_null(0)).with_columns(style=_style())


def _row_figures(rows: pl.LazyFrame, groups: pl.LazyFrame) -> pl.LazyFrame:
    end = pl.col("end_ns")
    ordered = rows.sort(*KEYS, "start_ns", "end_ns").with_columns(_before=end.shift(1).over(KEYS))
    by_row = ordered.group_by(KEYS, maintain_order=True).agg(
        n_rows=pl.len().cast(pl.Int64),
        n_out_of_order=(end < pl.col("_before")).sum(),
        n_counts_outside=pl.col("n_page_faults").is_between(1, FAULT_BATCH_SIZE).not_().sum(),
        n_full=(pl.col("n_page_faults") >= 0.9 * FAULT_BATCH_SIZE).sum(),
        n_other_access=(pl.col("access") == "other").sum(),
        coarse=pl.col("sequence").is_not_null().any(),
    )
    by_end = groups.group_by(KEYS).agg(
        n_ends=pl.len().cast(pl.Int64),
        n_starts=pl.col("start_ns").n_unique(),
        one_each=(pl.col("n_rows") == pl.col("n_row_blocks")).all(),
    )
    return by_row.join(by_end, on=KEYS, how="left", nulls_equal=True, maintain_order="left")


def _copy_figures(placed: pl.LazyFrame) -> pl.LazyFrame:
    faulted = placed.filter(pl.col("cause_id") == CAUSE_COHERENCE).sort(
        *KEYS, "start_ns", "va", "end_ns", "bytes", "inside"
    )
    batch = [*KEYS, "row_end"]
    same = pl.all_horizontal(pl.col(key).eq_missing(pl.col(key).shift(1)) for key in batch)
    falls = (pl.col("va") < pl.col("va").shift(1)) & pl.col("inside") & pl.col("inside").shift(1)
    return (
        faulted.with_columns(
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
    )


def _lag_figures(placed: pl.LazyFrame) -> pl.LazyFrame:
    lag = pl.col("row_end") - pl.col("end_ns")
    return (
        placed.filter("inside")
        .group_by(*KEYS, "row_end")
        .agg(lag=lag.min(), between=(pl.col("direction") == "dtod").any())
        # What comes from another GPU has work after its copies; the law was measured without.
        .filter(~pl.col("between"))
        .group_by(KEYS)
        .agg(
            n_data=pl.len(),
            lag_p25_ns=pl.col("lag").quantile(0.25, interpolation="lower"),
            lag_p75_ns=pl.col("lag").quantile(0.75, interpolation="higher"),
        )
    )


def _pending_figures(groups: pl.LazyFrame, placed: pl.LazyFrame) -> pl.LazyFrame:
    """Count rows whose page came between their start and the end before theirs."""
    page = pl.col("va") // PAGE_BYTES
    pages = (
        placed.filter(
            (pl.col("cause_id") == CAUSE_COHERENCE) & pl.col("bytes").is_between(1, VA_BLOCK_BYTES)
        )
        .with_columns(_last=(pl.col("va") + pl.col("bytes").cast(pl.UInt64) - 1) // PAGE_BYTES)
        .select(*KEYS, "start_ns", "row_end", _page=pl.int_ranges(page, pl.col("_last") + 1))
        .explode("_page")
        .select(*KEYS, "_page", came_ns="start_ns", came_row="row_end")
    )
    with_copies = placed.select(*KEYS, end_ns="row_end", has_copies=True).unique()
    return (
        groups.join(with_copies, on=[*KEYS, "end_ns"], how="left", nulls_equal=True)
        .with_columns(_page=page.cast(pl.Int64))
        .join(pages.cast({"_page": pl.Int64}), on=[*KEYS, "_page"], nulls_equal=True)
        .filter(pl.col("came_ns").is_between("start_ns", "before_ns"))
        .group_by(KEYS)
        .agg(
            n_pending=pl.col("end_ns").n_unique().cast(pl.Int64),
            n_pending_empty=pl.col("end_ns")
            .filter(pl.col("has_copies").is_null())
            .n_unique()
            .cast(pl.Int64),
        )
    )


def _style() -> pl.Expr:
    outside = pl.col("n_copies_outside") > pl.max_horizontal(
        _MAX_OUTSIDE * pl.col("n_copies"), _ODD_ONES
    )
    descends = pl.col("n_descending") > _MAX_DESCENDING * pl.col("n_copies")
    # Where all else fits, two GPUs that want the same block take turns within a batch.
    misfits = outside | (descends & (pl.col("n_copies_outside") + pl.col("n_rows_above") > 0))
    spread = pl.col("lag_p75_ns") - pl.col("lag_p25_ns") > _MAX_LAG_SPREAD_NS
    # First touches behind the copies of a batch widen the lag too: only with misfits is it proof.
    odd = pl.sum_horizontal("n_copies_outside", "n_descending", "n_rows_above", "n_pending")
    wandering = spread & (odd > 0) & (pl.col("n_data") >= _FEW)
    # Rows of one batch share their start: where more ends than starts are there, ends scatter.
    scattered = pl.col("n_starts") * 10 < pl.col("n_ends") * 9
    pending = pl.col("n_pending_empty") * 10 > pl.col("n_data").fill_null(0)
    shared = pl.col("n_ends") < pl.col("n_rows")
    return (
        pl.when(pl.col("n_rows") == 0)
        .then(pl.lit("no_rows"))
        .when("coarse")
        .then(pl.lit("coarse"))
        .when(scattered)
        .then(pl.lit("jittered_page"))
        .when(pl.col("n_copies") == 0)
        .then(pl.lit("no_copies"))
        .when(pending & ~shared)
        .then(pl.lit("jittered_page"))
        .when(wandering.fill_null(value=False))
        .then(pl.lit("jittered"))
        .when(misfits)
        .then(pl.lit("other"))
        .when(shared & pl.col("one_each"))
        .then(pl.lit("va_block"))
        .when(shared)
        .then(pl.lit("page"))
        .otherwise(pl.lit("batch"))
        .cast(STYLE)
    )
