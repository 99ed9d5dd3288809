"""Fault episodes: when page faults were serviced without a long pause, as the trace itself shows.

How long a pause separates two episodes is not a constant: it follows from the gaps of the trace (a
fixed 500 us is wrong for parallel kernels, ``calibration.md`` 7.3). A table of how many episodes each
gap gives shows how much the answer depends on it.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.clustering.stretches import (
    ACCESS_COLUMNS,
    ACCESS_MIX,
    COPY_READS,
    FAULT_READS,
    KERNEL_COLUMNS,
    KERNEL_READS,
    KEYS,
    access_counts,
    distinct_pages,
    main_kernel,
    share_of,
    with_kernel_count,
    with_running_kernel,
)
from nsan.analysis.driver.batches import batches
from nsan.analysis.driver.fault_rows import usable_rows
from nsan.analysis.driver.rows_and_copies import fault_copies
from nsan.analysis.nearest import nearest
from nsan.analysis.result import DEVICE, PID, Result, derived, reconstructed
from nsan.errors import UsageError
from nsan.schema import GPU_FAULTS
from nsan.uvm.constants import CAUSE_PREFETCH, VA_BLOCK_BYTES

_LEAST_JUMP: Final = 4.0
"""Ratio between two neighbouring gaps that counts as a knee (7 of 8 captures show 4 to 10)."""

_POWERS: Final = range(10, 63)
"""Gaps of the sensitivity table: 1 us and up, in powers of two."""

FAULT_EPISODES: Final = Result(
    "fault_episodes",
    "one fault episode: fault service without a pause longer than the gap",
    (
        PID,
        DEVICE,
        reconstructed("episode_id", pl.Int64, "id", "From 0 by process, GPU, start; null: rest."),
        reconstructed("start_ns", pl.Int64, "ns", "Start of its first batch."),
        reconstructed("end_ns", pl.Int64, "ns", "End of its last batch."),
        reconstructed("duration_ns", pl.Int64, "ns", "End minus start."),
        reconstructed("n_batches", pl.Int64, "batches", "Fault rows, or batches seen in copies."),
        *ACCESS_COLUMNS,
        derived("n_faulted_pages", pl.Int64, "pages", "Distinct faulted pages; a lower bound."),
        derived("n_va_blocks", pl.Int64, "VA blocks", "Distinct blocks of its copies."),
        derived("bytes", pl.Int64, "byte", "Moved to the GPU by faults and driver prefetch."),
        derived("traffic_fraction", pl.Float64, "fraction", "Of such bytes of process and GPU."),
        *KERNEL_COLUMNS,
        reconstructed("gap_ns", pl.Int64, "ns", "A longer pause opens a new episode."),
    ),
)

EPISODE_GAPS: Final = Result(
    "episode_gaps",
    "one gap, and into how many episodes it cuts the faults of a process and GPU",
    (
        PID,
        DEVICE,
        derived("gap_ns", pl.Int64, "ns", "A longer pause opens a new episode."),
        derived("n_episodes", pl.Int64, "episodes", "Episodes with this gap."),
        reconstructed("is_chosen", pl.Boolean, "flag", "The gap that `fault_episodes` takes."),
    ),
)


def _activity(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.DataFrame:
    """List the times of fault service: rows, or batches where process and GPU have no rows."""
    start, end = pl.col("start_ns"), pl.col("end_ns")
    rows = (
        usable_rows(gpu_faults, migrations)
        .filter(start.is_not_null())
        .select(
            *KEYS, "start_ns", end_ns=pl.max_horizontal(start, end), access="access", is_row=True
        )
        .collect()
    )
    known = rows.lazy().select(KEYS).unique()
    silent = migrations.join(known, on=KEYS, how="anti", nulls_equal=True)
    parts = [rows]
    if fault_copies(silent).select(pl.len()).collect().item():
        # Without a row nobody knows when the fault was raised: the first copy is the earliest sign.
        first = pl.coalesce("start_ns", "first_copy_ns")
        seen = batches(GPU_FAULTS.empty(), silent).select(
            *KEYS,
            start_ns=first,
            end_ns=pl.max_horizontal(first, end),
            access=pl.lit(None, GPU_FAULTS.schema["access"]),
            is_row=False,
        )
        parts.append(seen.collect())
    reach = end.cum_max().shift(1).over(KEYS)
    return (
        pl.concat(parts)
        .sort(*KEYS, "start_ns", "end_ns")
        .with_columns(pause_ns=(start - reach).clip(0))
    )


def _knees(activity: pl.LazyFrame, gap_ns: int) -> pl.LazyFrame:
    """Choose the gap of each process and GPU: the largest jump between its longer pauses.

    Pauses are put in order. Of those not shorter than their median (half of all pauses at least are
    inside an episode), the pair of neighbours with the largest ratio is the knee, if the ratio is 4
    or more; the gap is their geometric mean. Without a knee all is one episode.
    """
    pause = pl.col("pause_ns")
    after = pause.shift(-1).over(KEYS)
    jump = after / pause
    places = activity.select(KEYS).unique()
    if gap_ns:
        return places.with_columns(gap_ns=pl.lit(gap_ns, pl.Int64))
    ordered = (
        activity.filter(pause > 0)
        .sort(*KEYS, "pause_ns")
        .with_columns(_after=after, _jump=jump, _median=pause.median().over(KEYS))
    )
    knee = (
        ordered.filter((pl.col("_jump") >= _LEAST_JUMP) & (pl.col("_after") > pl.col("_median")))
        .sort(*KEYS, "_jump", "pause_ns", descending=[False, False, True, True])
        .unique(KEYS, keep="first", maintain_order=True)
        .select(
            *KEYS, _knee=(pause.cast(pl.Float64) * pl.col("_after")).sqrt().floor().cast(pl.Int64)
        )
    )
    longest = ordered.group_by(KEYS).agg(_longest=pause.max())
    return (
        places.join(knee, on=KEYS, how="left", nulls_equal=True)
        .join(longest, on=KEYS, how="left", nulls_equal=True)
        .select(*KEYS, gap_ns=pl.coalesce("_knee", "_longest", pl.lit(0)).cast(pl.Int64))
    )


def with_episode_id(activity: pl.LazyFrame, gap_ns: int) -> pl.LazyFrame:
    """Give each fault service the number of its episode, from 0 by process, GPU and start.

    Parameters
    ----------
    activity : LazyFrame
        Fault service with ``pid``, ``device_id``, ``start_ns`` and ``pause_ns``.
    gap_ns : int
        A longer pause opens a new episode; 0 takes the knee of the trace.

    Returns
    -------
    LazyFrame
        The rows in order, with ``episode_id`` and ``gap_ns``.
    """
    opens = (pl.col("pause_ns") > pl.col("gap_ns")).fill_null(value=True)
    return (
        activity.join(_knees(activity, gap_ns), on=KEYS, how="left", nulls_equal=True)
        .sort(*KEYS, "start_ns", "end_ns")
        .with_columns(episode_id=opens.cum_sum().cast(pl.Int64) - 1)
    )


@analysis(
    question="In which stretches of time was the GPU faulting?",
    result=FAULT_EPISODES,
    reads={"gpu_faults": FAULT_READS, "migrations": COPY_READS, "kernels": KERNEL_READS},
    source="domain.md E-6; calibration.md 7.3",
)
def fault_episodes(
    gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame, kernels: pl.LazyFrame, *, gap_ns: int = 0
) -> pl.LazyFrame:
    """Put fault service together into episodes that long pauses separate.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Fault rows; a process and GPU without any is judged by the batches in its copies.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration.
    kernels : LazyFrame, ``KERNELS``
        One row per kernel.
    gap_ns : int, default 0
        A longer pause (end so far to next start) opens an episode; 0 takes the knee of each process
        and GPU: the largest jump, fourfold or more, between the pauses from their median up, and
        one episode where there is no knee. :func:`episode_gaps` shows what other gaps would give.

    Returns
    -------
    LazyFrame, ``FAULT_EPISODES``
        One row per episode, by process, GPU and start; after those of a process and GPU, with null
        ``episode_id``, what its fault-caused copies moved outside all episodes, if anything. Bytes
        add up to those of fault-caused copies with a start and an address.

    Raises
    ------
    UsageError
        If the gap is negative.

    Examples
    --------
    >>> from nsan.schema import GPU_FAULTS, KERNELS, MIGRATIONS
    >>> fault_episodes(GPU_FAULTS.empty(), MIGRATIONS.empty(), KERNELS.empty()).collect().height
    0
    """
    if gap_ns < 0:
        raise UsageError(f"A gap of {gap_ns} ns. Take 0 (from the trace) or more.")

    def build() -> pl.DataFrame:
        activity = _activity(gpu_faults, migrations)
        return _episodes(with_episode_id(activity.lazy(), gap_ns), migrations, kernels)

    return FAULT_EPISODES.from_rows(build)


def _episodes(
    numbered: pl.LazyFrame, migrations: pl.LazyFrame, kernels: pl.LazyFrame
) -> pl.DataFrame:
    """Add up what belongs to each episode."""
    numbered = numbered.collect().lazy()
    spans = numbered.group_by(*KEYS, "episode_id").agg(
        pl.col("start_ns").min(),
        pl.col("end_ns").max(),
        pl.col("gap_ns").first(),
        # Rows per page share the end of their batch.
        n_batches=pl.col("end_ns").n_unique().cast(pl.Int64),
    )
    rows = numbered.filter("is_row").group_by("episode_id").agg(access_counts())
    copies = _in_episodes(fault_copies(migrations), spans, kernels).collect().lazy()
    by = [*KEYS, "episode_id"]
    moved = (
        _moved(copies, by)
        .join(main_kernel(copies, by), on=by, how="left", nulls_equal=True)
        .join(spans, on=by, how="full", nulls_equal=True, coalesce=True)
    )
    counts = ("n_faulted_pages", "n_va_blocks", "bytes", *ACCESS_MIX, "n_fault_rows")
    return (
        with_kernel_count(moved, kernels)
        .join(rows, on="episode_id", how="left")
        .with_columns(pl.col(counts).fill_null(0))
        .with_columns(
            duration_ns=pl.col("end_ns") - pl.col("start_ns"),
            traffic_fraction=share_of(pl.col("bytes")),
            n_kernels=pl.when(pl.col("episode_id").is_not_null()).then("n_kernels"),
        )
        .sort(by, nulls_last=[False, False, True])
        .collect()
    )


def _in_episodes(copies: pl.LazyFrame, spans: pl.LazyFrame, kernels: pl.LazyFrame) -> pl.LazyFrame:
    """Say for each copy in which episode it began, and which kernel ran."""
    wanted = spans.select(*KEYS, "episode_id", _from="start_ns", _until="end_ns")
    inside = pl.col("start_ns") <= pl.col("_until")
    placed = nearest(
        copies.select(*KEYS, "start_ns", "va", "bytes", "cause_id"),
        wanted,
        on=("start_ns", "_from"),
        by=KEYS,
    ).with_columns(episode_id=pl.when(inside).then("episode_id"))
    return with_running_kernel(placed, kernels, at="start_ns")


def _moved(copies: pl.LazyFrame, by: list[str]) -> pl.LazyFrame:
    """Add up the copies of each episode."""
    faulted = copies.filter(pl.col("cause_id").ne_missing(CAUSE_PREFETCH))
    sums = copies.group_by(by).agg(
        pl.col("bytes").sum(),
        n_va_blocks=(pl.col("va") // VA_BLOCK_BYTES).n_unique().cast(pl.Int64),
    )
    return sums.join(distinct_pages(faulted, by), on=by, how="left", nulls_equal=True)


@analysis(
    question="How much does the number of fault episodes depend on the pause that separates them?",
    result=EPISODE_GAPS,
    reads={"gpu_faults": FAULT_READS, "migrations": COPY_READS},
    source="domain.md E-6",
)
def episode_gaps(
    gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame, *, gap_ns: int = 0
) -> pl.LazyFrame:
    """Count the episodes that each of many gaps would give, so that a plateau can be seen.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        As for :func:`fault_episodes`.
    migrations : LazyFrame, ``MIGRATIONS``
        As for :func:`fault_episodes`.
    gap_ns : int, default 0
        The gap to mark as chosen; 0 is the knee of the trace.

    Returns
    -------
    LazyFrame, ``EPISODE_GAPS``
        One row per power of two from 1.024 us to the first that gives one episode, and one for the
        chosen gap, by process, GPU and gap. The number of episodes never rises with the gap.

    Examples
    --------
    >>> from nsan.schema import GPU_FAULTS, MIGRATIONS
    >>> episode_gaps(GPU_FAULTS.empty(), MIGRATIONS.empty()).collect().height
    0
    """
    if gap_ns < 0:
        raise UsageError(f"A gap of {gap_ns} ns. Take 0 (from the trace) or more.")

    def build() -> pl.DataFrame:
        return _counted(_activity(gpu_faults, migrations).lazy(), gap_ns)

    return EPISODE_GAPS.from_rows(build)


def _counted(activity: pl.LazyFrame, gap_ns: int) -> pl.DataFrame:
    """Count the pauses that are longer than each gap."""
    knees = _knees(activity, gap_ns)
    pauses = (
        activity.join(knees, on=KEYS, how="left", nulls_equal=True)
        .group_by(KEYS)
        .agg(
            *((pl.col("pause_ns") > 1 << k).sum().alias(f"{1 << k}") for k in _POWERS),
            (pl.col("pause_ns") > pl.col("gap_ns")).sum().alias("0"),
        )
        .unpivot(index=list(KEYS), variable_name="gap_ns", value_name="n_pauses")
        .with_columns(pl.col("gap_ns").cast(pl.Int64), n_episodes=pl.col("n_pauses") + 1)
    )
    first = pl.col("gap_ns").filter(pl.col("n_pauses") == 0, pl.col("gap_ns") > 0).min().over(KEYS)
    chosen = pl.col("gap_ns") == 0
    return (
        pauses.filter(pl.col("gap_ns") <= first)
        .join(knees.rename({"gap_ns": "_knee"}), on=KEYS, how="left", nulls_equal=True)
        .with_columns(is_chosen=chosen, gap_ns=pl.when(chosen).then("_knee").otherwise("gap_ns"))
        .sort(*KEYS, "gap_ns", "is_chosen")
        .collect()
    )
