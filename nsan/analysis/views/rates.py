"""What moved and what the driver did, in stretches of time: little enough to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.driver.batches import BATCH_READS, batches
from nsan.analysis.result import KIND, Figure, Result, derived, recorded
from nsan.schema import ACCESS, CAUSE, DIRECTION

_GPU: Final = ["pid", "device_id"]
_STRETCH: Final = ["start_ns", "end_ns"]
_ABOUT: Final = ["n_gpus", "n_far"]
_SHARES: Final = (10, 50, 90)

_EDGES: Final = (
    derived("start_ns", pl.Int64, "ns", "Where the stretch starts."),
    derived("end_ns", pl.Int64, "ns", "Where it ends."),
)
_N_GPUS: Final = derived(
    "n_gpus", pl.Int64, "GPUs", "GPUs of all processes that are added up; the same in every row."
)
N_FAR: Final = derived(
    "n_far", pl.Int64, "rows", "Left out, far in time from all others; the same in every row."
)

_FEW: Final = 0.01
"""Share of the rows that may be left out for being far from the others."""

CAUSES_OVER_TIME: Final = Result(
    "causes_over_time",
    "migrations of one direction and cause in one stretch of time, of all processes and GPUs",
    (
        *_EDGES,
        recorded("direction", DIRECTION, "label", "Which way."),
        recorded("cause", CAUSE, "label", "Why; `coherence` is a page fault."),
        recorded("n_migrations", pl.Int64, "rows", "Copies that start in it."),
        recorded("bytes", pl.Int64, "byte", "Bytes of the copies that start in it."),
        recorded("before_bytes", pl.Int64, "byte", "Bytes of the causes before, in a stack."),
        _N_GPUS,
        N_FAR,
    ),
    nothing="There are no migrations: nothing moved, or it was not recorded.",
)

BATCHES_OVER_TIME: Final = Result(
    "batches_over_time",
    "batches of one access in one stretch of time, of all processes and GPUs",
    (
        *_EDGES,
        recorded("access", ACCESS, "label", "Access of the lowest page; null: not known."),
        derived("n_batches", pl.Int64, "batches", "Batches that begin in it."),
        derived("before_batches", pl.Int64, "batches", "Those of accesses before, in a stack."),
        derived("bytes", pl.Int64, "byte", "Copied into the GPU by them."),
        derived("evicted_bytes", pl.Int64, "byte", "Copied out of the GPU to make room."),
        derived("kind", KIND, "label", "Of rows, or the less certain: some put together."),
        _N_GPUS,
        N_FAR,
    ),
    nothing=(
        "There are no batches: the GPU did not fault, or neither its faults nor the copies they "
        "cause were recorded."
    ),
)


def _spread(name: str, what: str) -> tuple[Figure, ...]:
    return (
        *(
            derived(f"{name}_p{share}_ns", pl.Float64, "ns", f"{what}, {share}th percentile.")
            for share in _SHARES
        ),
        derived(f"{name}_max_ns", pl.Int64, "ns", f"{what}, longest."),
    )


SERVICE_OVER_TIME: Final = Result(
    "service_over_time",
    "batches of fault rows in one stretch of time, of all processes and GPUs",
    (
        *_EDGES,
        derived("n_batches", pl.Int64, "batches", "Batches of fault rows that begin in it."),
        *_spread("latency", "Raised to replayed; overlaps other batches"),
        *_spread("service", "Replayed, less the later of raised and the replay before"),
        _N_GPUS,
        N_FAR,
    ),
    nothing=(
        "Only GPU fault rows tell how long a batch takes, and there are none: the GPU did not fault, or "
        "its faults were not recorded."
    ),
)

FIGURES: Final = ("service", "latency")

BATCH_TIME_CLASSES: Final = Result(
    "batch_time_classes",
    "batches of fault rows whose time is in one class, of all processes and GPUs",
    (
        derived("figure", pl.Enum(FIGURES), "label", "Whether service or latency is classed."),
        derived("min_ns", pl.Float64, "ns", "Shortest time of the class."),
        derived("max_ns", pl.Float64, "ns", "Where the next class begins, 2^(1/4) as long."),
        derived("n_batches", pl.Int64, "batches", "Batches in the class."),
    ),
    nothing=SERVICE_OVER_TIME.nothing,
)

_CLASSES_PER_OCTAVE: Final = 4


def round_width(span_ns: int, n: int) -> int:
    """Choose the length of a stretch: 1, 2 or 5 times a power of ten, so that n cover a span.

    Parameters
    ----------
    span_ns : int
        Length of the whole, ns.
    n : int
        Stretches at most, but for the one that an edge cuts.

    Returns
    -------
    int
        Length of a stretch, ns, at least 1.

    Examples
    --------
    >>> round_width(1_000_000, 120), round_width(0, 10)
    (10000, 1)
    """
    least, power = max(-(-span_ns // n), 1), 1
    while power * 5 < least:
        power *= 10
    return next(power * step for step in (1, 2, 5) if power * step >= least)


def stretch_columns(column: str, width_ns: int) -> list[pl.Expr]:
    """Say in which stretch a time is: expressions ``start_ns`` and ``end_ns``, from time 0 on."""
    start = pl.col(column).floordiv(width_ns) * width_ns
    return [start.alias("start_ns"), (start + width_ns).alias("end_ns")]


def main_part(times: pl.Series) -> tuple[int, int] | None:
    """Find the stretch that a picture should show: without a few rows far from all others.

    One copy a minute after the program's work would squeeze that work into one column.

    Parameters
    ----------
    times : Series of Int64
        Starts of events, ns, in any order.

    Returns
    -------
    (first, last), or None
        The least and the greatest time that is kept; None without any. A side of a pause that is longer
        than half of the whole is cut off while at most 1 % of the rows go.
    """
    if times.is_empty():
        return None
    sorted_times = times.sort()
    may_go = int(len(times) * _FEW)
    first, last = int(sorted_times[0]), int(sorted_times[-1])
    while may_go:
        pauses = sorted_times.diff().fill_null(0)
        at = int(pauses.arg_max() or 0)
        before, after = at, len(sorted_times) - at
        if 2 * int(pauses[at]) <= last - first or min(before, after) > may_go:
            break
        may_go -= min(before, after)
        sorted_times = sorted_times[at:] if before < after else sorted_times[:at]
        first, last = int(sorted_times[0]), int(sorted_times[-1])
    return first, last


def near_rows(rows: pl.DataFrame, column: str, *, keep_far: bool) -> pl.DataFrame:
    """Leave out the few rows far in time from all others, and say how many these are.

    Parameters
    ----------
    rows : DataFrame
        Any rows.
    column : str
        Their time, Int64 ns, never null.
    keep_far : bool
        Leave none out.

    Returns
    -------
    DataFrame
        The rows within :func:`main_part`, with ``n_far`` (Int64).
    """
    part = None if keep_far else main_part(rows[column])
    near = rows if part is None else rows.filter(pl.col(column).is_between(*part))
    return near.with_columns(n_far=pl.lit(rows.height - near.height, pl.Int64))


def _in_stretches(
    rows: pl.DataFrame, column: str, n_bins: int, *, keep_far: bool, width_ns: int = 0
) -> pl.DataFrame:
    """Replace times by the stretch they are in; say how many GPUs there are."""
    rows = near_rows(rows, column, keep_far=keep_far)
    first, last = rows.select(pl.min(column), last=pl.max(column)).row(0)
    width = width_ns or (1 if first is None else round_width(last - first + 1, n_bins))
    n_gpus = rows.select(_GPU).n_unique() if rows.height else 0
    return rows.with_columns(*stretch_columns(column, width), n_gpus=pl.lit(n_gpus, pl.Int64))


def _stacked(value: str, by: Sequence[str]) -> pl.Expr:
    """Add up what is before a row in its stack."""
    return (pl.col(value).cum_sum() - pl.col(value)).over(by)


@analysis(
    question="When did memory move, which way and why, on all GPUs together?",
    result=CAUSES_OVER_TIME,
    reads={"migrations": ("start_ns", "pid", "device_id", "bytes", "direction", "cause")},
    source="domain.md E-2",
)
def causes_over_time(
    migrations: pl.LazyFrame, *, n_bins: int = 120, stretch_ns: int = 0, keep_far: bool = False
) -> pl.LazyFrame:
    """Add up migrations by cause and direction in stretches of a round length, ready to be stacked.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    n_bins : int, default 120
        Stretches at most, but for the one that an edge cuts.
    stretch_ns : int, default 0
        Length of a stretch, ns, whatever ``n_bins`` says: so that two traces have the same. 0: chosen.
    keep_far : bool, default False
        Keep the few rows that are far in time from all others (:func:`main_part`).

    Returns
    -------
    LazyFrame, ``CAUSES_OVER_TIME``
        One row per stretch, direction and cause with a copy in it, in that order; stretches begin at
        multiples of their length. A copy counts where it starts, so bytes and copies add up to
        all but those left out: rows without a start, and ``n_far``.
    """

    def build() -> pl.DataFrame:
        known = migrations.filter(pl.col("start_ns").is_not_null()).collect()
        by = [*_STRETCH, "direction", "cause"]
        return (
            _in_stretches(known, "start_ns", n_bins, keep_far=keep_far, width_ns=stretch_ns)
            .group_by(*by, *_ABOUT)
            .agg(n_migrations=pl.len(), bytes=pl.col("bytes").sum())
            .sort(by)
            .with_columns(before_bytes=_stacked("bytes", [*_STRETCH, "direction"]))
        )

    return CAUSES_OVER_TIME.from_rows(build)


def _timed(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.DataFrame:
    """List batches with the time at which they begin: of the fault, else of the first copy."""
    begin = pl.coalesce("start_ns", "first_copy_ns", "end_ns")
    return (
        batches(gpu_faults, migrations)
        .with_columns(begin_ns=begin)
        .filter(pl.col("begin_ns").is_not_null())
        .collect()
    )


@analysis(
    question="How often did the driver service a batch, and for which accesses?",
    result=BATCHES_OVER_TIME,
    reads=BATCH_READS,
    source="domain.md E-4",
)
def batches_over_time(
    gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame, *, n_bins: int = 120, keep_far: bool = False
) -> pl.LazyFrame:
    """Count batches by access in stretches of a round length, ready to be stacked.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order; may be empty.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    n_bins : int, default 120
        Stretches at most, but for the one that an edge cuts.
    keep_far : bool, default False
        Keep the few rows that are far in time from all others (:func:`main_part`).

    Returns
    -------
    LazyFrame, ``BATCHES_OVER_TIME``
        One row per stretch and access with a batch in it, in that order. A batch counts where its fault
        was raised, or, without fault rows, where its first copy starts; counts and ``n_far`` add up to
        :func:`nsan.analysis.driver.batches.batches`.
    """

    def build() -> pl.DataFrame:
        by = [*_STRETCH, "access"]
        return (
            _in_stretches(_timed(gpu_faults, migrations), "begin_ns", n_bins, keep_far=keep_far)
            .group_by(*by, *_ABOUT)
            .agg(
                pl.len().alias("n_batches"),
                pl.col("bytes", "evicted_bytes").sum(),
                pl.col("kind").max(),
            )
            .sort(by)
            .with_columns(before_batches=_stacked("n_batches", _STRETCH))
        )

    return BATCHES_OVER_TIME.from_rows(build)


@analysis(
    question="How long did batches take, and did that change over time?",
    result=SERVICE_OVER_TIME,
    reads=BATCH_READS,
    source="domain.md E-5; fault_rows.md 2.2",
)
def service_over_time(
    gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame, *, n_bins: int = 120, keep_far: bool = False
) -> pl.LazyFrame:
    """Give percentiles of latency and service of batches in stretches of a round length.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    n_bins : int, default 120
        Stretches at most, but for the one that an edge cuts.
    keep_far : bool, default False
        Keep the few rows that are far in time from all others (:func:`main_part`).

    Returns
    -------
    LazyFrame, ``SERVICE_OVER_TIME``
        One row per stretch with a batch of fault rows in it, by time; none where only copies were
        recorded. Percentiles are linear between ranks.
    """

    def build() -> pl.DataFrame:
        rows = _timed(gpu_faults, migrations).filter(pl.col("latency_ns").is_not_null())
        figures = [
            figure
            for name in ("latency", "service")
            for figure in (
                *(
                    pl.col(f"{name}_ns")
                    .quantile(share / 100, interpolation="linear")
                    .alias(f"{name}_p{share}_ns")
                    for share in _SHARES
                ),
                pl.col(f"{name}_ns").max().alias(f"{name}_max_ns"),
            )
        ]
        return (
            _in_stretches(rows, "begin_ns", n_bins, keep_far=keep_far)
            .group_by(*_STRETCH, *_ABOUT)
            .agg(pl.len().alias("n_batches"), *figures)
            .sort(_STRETCH)
        )

    return SERVICE_OVER_TIME.from_rows(build)


@analysis(
    question="How many batches took how long?",
    result=BATCH_TIME_CLASSES,
    reads=BATCH_READS,
    source="domain.md E-5; fault_rows.md 2.2",
)
def batch_time_classes(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Count batches in classes of service and of latency, four to a doubling.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``BATCH_TIME_CLASSES``
        One row per figure and class with a batch in it, in that order. Times below 1 ns count as 1 ns.
        Counts of either figure add up to the batches of fault rows.
    """

    def build() -> pl.DataFrame:
        rows = _timed(gpu_faults, migrations).filter(pl.col("latency_ns").is_not_null())
        step = pl.col("step") / _CLASSES_PER_OCTAVE
        return (
            rows.select(service="service_ns", latency="latency_ns")
            .unpivot(variable_name="figure", value_name="ns")
            .with_columns(
                pl.col("figure").cast(pl.Enum(FIGURES)),
                step=(pl.col("ns").clip(1, None).log(2) * _CLASSES_PER_OCTAVE).floor(),
            )
            .group_by("figure", "step")
            .agg(pl.len().alias("n_batches"))
            .sort("figure", "step")
            .with_columns(
                min_ns=pl.lit(2.0).pow(step), max_ns=pl.lit(2.0).pow(step + 1 / _CLASSES_PER_OCTAVE)
            )
        )

    return BATCH_TIME_CLASSES.from_rows(build)
