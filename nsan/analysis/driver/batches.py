"""Driver batches: what the driver fetched, serviced and replayed as one.

With fault rows a batch is a row, and its copies are those that start in (previous end, end]
(measured on 4708 real rows, ``fault_rows.md``). Without them, or where the rows are not batches,
batches are put together from pushes: :mod:`nsan.analysis.driver.from_copies`. What the rows of a
capture are is judged per process and GPU first: :mod:`nsan.analysis.driver.fault_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.driver.fault_rows import USABLE_STYLES, fault_row_checks
from nsan.analysis.driver.from_copies import with_group
from nsan.analysis.driver.outcomes import OUTCOME, with_outcome
from nsan.analysis.driver.pushes import with_push_id
from nsan.analysis.driver.rows_and_copies import (
    COPY_READS,
    KEYS,
    ROW_READS,
    fault_copies,
    in_rows,
    row_groups,
)
from nsan.analysis.driver.staging import first_legs
from nsan.analysis.keeping import once
from nsan.analysis.nearest import nearest
from nsan.analysis.result import DEVICE, KIND, PID, Result, derived, reconstructed, recorded
from nsan.schema import ACCESS
from nsan.uvm.constants import (
    BIG_PAGE_BYTES,
    CAUSE_COHERENCE,
    CAUSE_EVICTION,
    CAUSE_PREFETCH,
    FAULT_BATCH_SIZE,
    PAGE_BYTES,
    VA_BLOCK_BYTES,
)

BATCHES: Final = Result(
    "batches",
    "one driver batch",
    (
        PID,
        DEVICE,
        derived("batch_id", pl.Int64, "id", "Number of the batch by process, GPU and end, from 0."),
        recorded("start_ns", pl.Int64, "ns", "Fault raised; null without fault rows."),
        derived("latency_ns", pl.Int64, "ns", "Raised to replayed; includes waiting for a batch."),
        derived("service_ns", pl.Int64, "ns", "End minus the later of start and the end before."),
        derived(
            "outcome", OUTCOME, "label", "What became of it; :mod:`nsan.analysis.driver.outcomes`."
        ),
        derived("n_va_blocks", pl.Int64, "VA blocks", "Blocks that it copied into."),
        derived(
            "n_faulted_pages", pl.Int64, "pages", "Pages copied since they faulted; lower bound."
        ),
        derived("bytes", pl.Int64, "byte", "Copied into the GPU."),
        derived("coherence_bytes", pl.Int64, "byte", "Of these because their page faulted."),
        derived("prefetch_bytes", pl.Int64, "byte", "Of these by the driver's prefetcher."),
        derived("evicted_bytes", pl.Int64, "byte", "Copied out of the GPU to make room."),
        recorded("n_page_faults", pl.Int64, "faults", "Recorded count: entries on that page only."),
        recorded("access", ACCESS, "label", "Access type of that page."),
        derived("va", pl.UInt64, "byte address", "Lowest faulted page."),
        recorded("kind", KIND, "label", "Derived from fault rows, or reconstructed from copies."),
        derived(
            "end_ns", pl.Int64, "ns", "Replay finished; without fault rows the last copy's end."
        ),
        derived("first_copy_ns", pl.Int64, "ns", "Start of its first copy into the GPU."),
        derived("last_copy_ns", pl.Int64, "ns", "End of its last copy into the GPU."),
        derived("n_pushes", pl.Int64, "pushes", "Block services that copied into the GPU."),
        derived(
            "n_faults_lower_bound", pl.Int64, "faults", "Recorded count and other faulted pages."
        ),
        derived(
            "is_full", pl.Boolean, "flag", "Holds 0.9 x 256 fault entries or more, for certain."
        ),
        reconstructed("page_bytes", pl.Int64, "byte", "Page size of the host: 4 KiB, or 64 KiB."),
    ),
)

BATCH_READS: Final = {
    "gpu_faults": ROW_READS,
    "migrations": (*COPY_READS, "src_device_id", "sequence"),
}


@dataclass(frozen=True)
class _Parts:
    """Copies with their batch, and the batches of fault rows, before they are added up."""

    copies: pl.DataFrame
    rows: pl.DataFrame
    migrations: pl.DataFrame


@analysis(
    question="Which batches did the driver service, and what was in each?",
    result=BATCHES,
    reads=BATCH_READS,
    source="domain.md E-4, D.5; fault_rows.md 3; calibration.md 1",
)
def batches(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.LazyFrame:
    """List the driver's batches with their faults, copies, time and outcome.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order; may be empty.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``BATCHES``
        One row per batch, by process, GPU and end. ``kind`` is derived where the rows of the process
        and GPU are batches (or share the end of their batch) and the copies fit the row;
        reconstructed from copies alone otherwise. Figures of rows are null there.
    """
    given = (gpu_faults, migrations)
    return BATCHES.from_rows(lambda: once("batches", lambda: _batches(_kept_parts(*given)), *given))


def with_batch_id(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Say for each migration which batch brought it, or evicted it.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order; may be empty.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame
        Copies that have a start and an address, with the columns of ``MIGRATIONS`` that
        :func:`batches` reads, ``va_block``, ``push_id`` and ``batch_id`` (Int64; null: no batch, as
        for copies that the program or a CPU fault asked for).
    """

    def build() -> pl.DataFrame:
        parts = _kept_parts(gpu_faults, migrations)
        same = [*KEYS, "end_ns", "from_row"]
        ids = _numbered(parts).select(*same, "batch_id")
        known = parts.copies.rename({"batch_end": "end_ns"}).join(ids, on=same, nulls_equal=True)
        return parts.migrations.join(
            known.select("_row", "batch_id"), on="_row", how="left", maintain_order="left"
        ).drop("_row")

    columns = {name: migrations.collect_schema()[name] for name in BATCH_READS["migrations"]}
    ids = {"va_block": pl.UInt64, "push_id": pl.Int64, "batch_id": pl.Int64}
    return pl.defer(build, schema={**columns, **ids})


def _kept_parts(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> _Parts:
    given = (gpu_faults, migrations)
    return once("parts of batches", lambda: _parts(*given), *given)


def _parts(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> _Parts:
    """Give each copy the end of its batch: of a row where it fits, else of a group of pushes."""
    # The checks are asked for by others, too: of the tables as they were handed.
    checks, ordered = pl.collect_all(
        [
            fault_row_checks(gpu_faults, migrations).select(*KEYS, "style"),
            with_push_id(migrations.select(BATCH_READS["migrations"])),
        ]
    )
    ordered = ordered.with_row_index("_row")
    usable = checks.filter(pl.col("style").is_in(USABLE_STYLES)).lazy()
    of_batches = gpu_faults.select(ROW_READS).join(usable, on=KEYS, how="semi", nulls_equal=True)
    rows = row_groups(of_batches).collect()
    legs = first_legs(ordered)
    own = _of_batches(ordered.lazy())
    placed = in_rows(own, rows.lazy()).collect()
    fits = placed.filter("inside").select(
        "_row", *KEYS, batch_end="row_end", from_row=pl.lit(value=True)
    )
    loose = placed.filter(~pl.col("inside")).select(ordered.columns)
    # The first leg takes time of the batch on the GPU that waits for the second one.
    waits = (
        legs.join(ordered.select("_row", "start_ns", "end_ns"), on="_row")
        .join(ordered.select(*KEYS, _onward="_row"), on="_onward")
        .select(*KEYS, "start_ns", "end_ns")
    )
    found = pl.concat([fits, _grouped(loose, waits)])
    onward = legs.join(found.rename({"_row": "_onward"}), on="_onward").select(found.columns)
    return _Parts(pl.concat([found, onward]), rows, ordered)


def _of_batches(ordered: pl.LazyFrame) -> pl.LazyFrame:
    """Keep the copies that batches make: into the GPU by faults, out of it by evictions."""
    evicted = (pl.col("direction") == "dtoh") & (pl.col("cause_id") == CAUSE_EVICTION)
    return pl.concat([fault_copies(ordered), ordered.filter(evicted)])


def _grouped(loose: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Put copies without a row into batches by their order and gaps."""
    evicted = loose.filter(pl.col("direction") == "dtoh")
    brought = loose.filter(pl.col("direction") != "dtoh")
    groups = with_group(brought.lazy(), pl.concat([evicted.select(waits.columns), waits]).lazy())
    batch_end = pl.col("end_ns").max().over(*KEYS, "group")
    mine = brought.join(groups, on=[*KEYS, "push_id"], how="left", nulls_equal=True).with_columns(
        batch_end=batch_end
    )
    ends = mine.select(*KEYS, "batch_end", first_ns="start_ns")
    # An eviction makes room for what comes next.
    room = (
        nearest(evicted.lazy(), ends.lazy(), on=("start_ns", "first_ns"), by=KEYS, forward=True)
        .filter(pl.col("batch_end").is_not_null())
        .collect()
    )
    columns = ["_row", *KEYS, "batch_end"]
    return pl.concat([mine.select(columns), room.select(columns)]).with_columns(
        from_row=pl.lit(value=False)
    )


def _batches(parts: _Parts) -> pl.DataFrame:
    return with_outcome(_numbered(parts), parts.migrations)


def _numbered(parts: _Parts) -> pl.DataFrame:
    """List the batches of rows and those of copies alone, in order, with their figures."""
    copied = _added_up(parts)
    rows = parts.rows.with_columns(from_row=pl.lit(value=True)).select(
        *KEYS,
        "start_ns",
        "end_ns",
        "before_ns",
        "n_page_faults",
        "access",
        "from_row",
        "is_coarse",
        row_va="va",
    )
    keys = [*KEYS, "end_ns", "from_row"]
    found = rows.join(copied, on=keys, how="full", coalesce=True, nulls_equal=True)
    sums = [c for c in copied.columns if c.endswith("_bytes") or c.startswith("n_")]
    exact = pl.col("from_row") & ~pl.col("is_coarse")
    derived_kind = pl.when(exact).then(pl.lit("derived")).otherwise(pl.lit("reconstructed"))
    start, end = pl.col("start_ns"), pl.col("end_ns")
    return (
        found.with_columns(pl.col(*sums, "bytes").fill_null(0))
        .sort(*KEYS, "end_ns", "from_row")
        .with_columns(
            batch_id=pl.int_range(pl.len(), dtype=pl.Int64),
            va=pl.coalesce("row_va", "low_va"),
            latency_ns=end - start,
            service_ns=end
            - pl.max_horizontal(start, pl.when(start.is_not_null()).then("before_ns")),
            kind=derived_kind,
            is_coarse=pl.col("is_coarse").fill_null(value=False),
        )
        .join(_page_bytes(parts.migrations), on="pid", how="left", nulls_equal=True)
        .with_columns(page_bytes=pl.col("page_bytes").fill_null(PAGE_BYTES))
        .with_columns(n_faulted_pages=pl.col("coherence_bytes") // pl.col("page_bytes"))
        .with_columns(n_faults_lower_bound=_lower_bound())
        .with_columns(is_full=pl.col("n_faults_lower_bound") >= 0.9 * FAULT_BATCH_SIZE)
        .sort("batch_id")
    )


def _lower_bound() -> pl.Expr:
    """Each faulted page has an entry; the row's own page has as many as it says."""
    others = pl.col("n_faulted_pages") - pl.col("has_row_page").fill_null(value=False)
    return pl.col("n_page_faults").fill_null(0) + others


def _page_bytes(migrations: pl.DataFrame) -> pl.DataFrame:
    """Tell 64 KiB pages (some ARM and POWER hosts) from 4 KiB ones: nothing smaller ever moves."""
    faulted = migrations.filter(pl.col("cause_id") == CAUSE_COHERENCE)
    whole = (pl.col("bytes") % BIG_PAGE_BYTES == 0) & (pl.col("va") % BIG_PAGE_BYTES == 0)
    size = pl.when(whole.all()).then(BIG_PAGE_BYTES).otherwise(PAGE_BYTES)
    return faulted.group_by("pid").agg(page_bytes=size.cast(pl.Int64))


def _added_up(parts: _Parts) -> pl.DataFrame:
    """Add up the copies of each batch."""
    size, into = pl.col("bytes"), pl.col("direction") != "dtoh"
    faulted = into & (pl.col("cause_id") == CAUSE_COHERENCE)
    rows = parts.rows.select(*KEYS, batch_end="end_ns", row_va="va")
    last = pl.col("va") + pl.col("bytes").cast(pl.UInt64)
    holds = faulted & pl.col("row_va").is_between(pl.col("va"), last, closed="left")
    return (
        parts.copies.lazy()
        .join(parts.migrations.lazy().drop(KEYS), on="_row")
        .join(rows.lazy(), on=[*KEYS, "batch_end"], how="left", nulls_equal=True)
        .group_by(*KEYS, "from_row", end_ns="batch_end")
        .agg(
            first_copy_ns=pl.col("start_ns").filter(into).min(),
            last_copy_ns=pl.col("end_ns").filter(into).max(),
            low_va=pl.coalesce(pl.col("va").filter(faulted).min(), pl.col("va").filter(into).min()),
            n_pushes=pl.col("push_id").filter(into).n_unique().cast(pl.Int64),
            n_va_blocks=(pl.col("va").filter(into) // VA_BLOCK_BYTES).n_unique().cast(pl.Int64),
            has_row_page=holds.any().cast(pl.Int64),
            bytes=size.filter(into).sum(),
            coherence_bytes=size.filter(faulted).sum(),
            prefetch_bytes=size.filter(into, pl.col("cause_id") == CAUSE_PREFETCH).sum(),
            evicted_bytes=size.filter(~into, pl.col("cause_id") == CAUSE_EVICTION).sum(),
        )
        .collect()
    )
