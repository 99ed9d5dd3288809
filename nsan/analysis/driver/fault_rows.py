"""What the rows of a GPU fault table are, decided on every capture before anything builds on them.

Measured on nvprof, which gets the same records as nsys: one row is one driver batch. No nsys file
with fault rows has been published, so the rule is checked, not assumed: per process and GPU the
rows are named batches, pages, VA blocks, or refused by name.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.driver.row_figures import figures_of
from nsan.analysis.driver.rows_and_copies import COPY_READS, KEYS, ROW_READS
from nsan.analysis.keeping import once
from nsan.analysis.result import DEVICE, PID, Result, derived, reconstructed

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
    usable = usable_places(gpu_faults, migrations).lazy()
    return gpu_faults.join(usable, on=KEYS, how="semi", nulls_equal=True)


def usable_places(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.DataFrame:
    """List the processes and GPUs where rows tell the batches.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration: what the rows are judged by.

    Returns
    -------
    DataFrame
        ``pid``, ``device_id``: those whose style is one of ``USABLE_STYLES``.
    """
    styles = fault_row_checks(gpu_faults, migrations)
    usable = pl.col("style").cast(pl.String).is_in(USABLE_STYLES)
    return styles.filter(usable).select(KEYS).collect()


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
    figures = figures_of(gpu_faults, migrations)
    if figures.is_empty():
        return pl.DataFrame(schema=FAULT_ROW_CHECKS.schema)
    counts = [c.name for c in FAULT_ROW_CHECKS.columns if c.name.startswith("n_")]
    return figures.with_columns(pl.col(counts).fill_null(0)).with_columns(style=_style())


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
