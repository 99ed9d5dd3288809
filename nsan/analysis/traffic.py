"""Traffic of managed memory: how much moved, why, when, in what sizes, how fast, and what for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.busy import busy_of, islands_in_parts
from nsan.analysis.catalog import analysis
from nsan.analysis.driver.pushes import with_push_id
from nsan.analysis.migrations import GROUPS, migrations_by_group
from nsan.analysis.result import DEVICE, PID, Result, derived, reconstructed, recorded
from nsan.errors import UsageError
from nsan.schema import CAUSE, DIRECTION
from nsan.units import NS_PER_S
from nsan.uvm.constants import BIG_PAGE_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_KEYS: Final = ["pid", "device_id"]
_WAY: Final = [*_KEYS, "direction"]
_MAX_BINS: Final = 1_000_000
_SECTIONS: Final = 64
"""Each leaves 0.618 of the range: 64 leave 4e-14 of it."""

_DIRECTION: Final = recorded("direction", DIRECTION, "label", "Which way.")
_CAUSE: Final = recorded("cause", CAUSE, "label", "Why; `coherence` is a page fault.")
_N: Final = recorded("n_migrations", pl.Int64, "rows", "Copies.")
_BYTES: Final = recorded("bytes", pl.Int64, "byte", "Bytes moved.")
_BUSY: Final = derived("busy_ns", pl.Int64, "ns", "Time in which at least one of them ran.")
_RATE: Final = derived("bytes_per_s", pl.Float64, "byte/s", "Bytes over busy time.")
_SHARE: Final = derived("bytes_fraction", pl.Float64, "fraction", "Share of all bytes moved.")

_READS: Final = ("start_ns", "end_ns", "bytes", "direction", "cause", "sequence")
_GROUP_READS: Final = (*_READS, "pid", "device_id", "va")

TRAFFIC: Final = Result(
    "traffic",
    "migrations of one direction and cause, on one GPU, in one process",
    (PID, DEVICE, _DIRECTION, _CAUSE, _N, _BYTES, _SHARE, _BUSY, _RATE),
)

TRAFFIC_BY_CAUSE: Final = Result(
    "traffic_by_cause",
    "migrations of one cause and direction, of all processes and GPUs",
    (_CAUSE, _DIRECTION, _N, _BYTES, _SHARE, _BUSY, _RATE),
)

TRAFFIC_OVER_TIME: Final = Result(
    "traffic_over_time",
    "migrations of one direction and cause in one stretch of time",
    (
        derived("bin_id", pl.Int64, "id", "Number of the stretch."),
        derived("start_ns", pl.Int64, "ns", "Where the stretch starts."),
        derived("end_ns", pl.Int64, "ns", "Where it ends."),
        PID,
        DEVICE,
        _DIRECTION,
        _CAUSE,
        recorded("n_migrations", pl.Int64, "rows", "Copies that start in it."),
        recorded("bytes", pl.Int64, "byte", "Bytes of the copies that start in it."),
        derived("busy_ns", pl.Int64, "ns", "Time in it in which at least one of them ran."),
    ),
)

TRANSFER_EFFICIENCY: Final = Result(
    "transfer_efficiency",
    "pushes of one direction and size class on one GPU of one process",
    (
        PID,
        DEVICE,
        _DIRECTION,
        derived("min_bytes", pl.Int64, "byte", "Smallest size of the class, a power of two."),
        derived("n_pushes", pl.Int64, "pushes", "Pushes of min_bytes to below twice that."),
        derived("n_migrations", pl.Int64, "rows", "Their copies."),
        derived("bytes", pl.Int64, "byte", "Their bytes."),
        derived("copy_ns", pl.Int64, "ns", "Sum of the durations of their copies."),
        derived("busy_ns", pl.Int64, "ns", "Time in which one ran; copy_ns if starts are coarse."),
        _RATE,
        derived("bytes_fraction", pl.Float64, "fraction", "Share of the bytes of its direction."),
        derived(
            "small_fraction", pl.Float64, "fraction", "Share in pushes below 64 KiB, all classes."
        ),
    ),
)

COPY_COST: Final = Result(
    "copy_cost",
    "copies of one direction on one GPU of one process",
    (
        PID,
        DEVICE,
        _DIRECTION,
        derived("n_migrations", pl.Int64, "rows", "Copies with a duration and a size."),
        derived("n_sizes", pl.Int64, "sizes", "Distinct sizes among them."),
        reconstructed("latency_ns", pl.Float64, "ns", "Fitted time of a copy of no bytes."),
        reconstructed("bytes_per_s", pl.Float64, "byte/s", "Fitted bandwidth."),
        reconstructed("r2", pl.Float64, "fraction", "Share of the variance that the fit explains."),
        reconstructed("residual_p50_ns", pl.Float64, "ns", "Absolute residual, median."),
        reconstructed("residual_p95_ns", pl.Float64, "ns", "Absolute residual, 95th percentile."),
    ),
)


def _with_rates(groups: pl.LazyFrame) -> pl.LazyFrame:
    """Add shares and bandwidth; without any time there is no bandwidth."""
    busy = pl.col("busy_ns").fill_null(0)
    return groups.with_columns(
        bytes_fraction=_ratio(pl.col("bytes"), pl.col("bytes").sum()),
        busy_ns=busy,
        bytes_per_s=_ratio(pl.col("bytes") * float(NS_PER_S), busy),
    )


def _ratio(part: pl.Expr, whole: pl.Expr) -> pl.Expr:
    return pl.when(whole > 0).then(part / whole)


@analysis(
    question="How much moved, which way, why, on which GPU, and for how long?",
    result=TRAFFIC,
    reads={"migrations": _GROUP_READS},
    source="domain.md E-2",
)
def traffic_matrix(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Add up migrations by direction, cause, GPU and process.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``TRAFFIC``
        As of :func:`nsan.analysis.migrations.migrations_by_group`, with busy time, a union, so that
        rows of other groups may run in the same time. Every row counts, also one without a time;
        ``bytes`` is null where a row of the group lacks its size.

    Examples
    --------
    >>> from nsan.schema import MIGRATIONS
    >>> traffic_matrix(MIGRATIONS.empty()).collect().height
    0
    """
    rows = migrations.select(_GROUP_READS)
    groups = migrations_by_group(rows).rename({"n": "n_migrations"})
    busy = busy_of(rows, [*GROUPS])
    return _with_rates(
        groups.join(busy, on=GROUPS, how="left", nulls_equal=True, maintain_order="left")
    ).select(TRAFFIC.cast())


@analysis(
    question="Why did memory move?",
    result=TRAFFIC_BY_CAUSE,
    reads={"migrations": _READS},
    source="domain.md E-2",
)
def migrations_by_cause(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Add up migrations by cause and direction.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``TRAFFIC_BY_CAUSE``
        One row per cause and direction that occurs, most bytes first. Busy time is that in which at
        least one such copy ran on any GPU.
    """
    by = ["cause", "direction"]
    whole = pl.col("bytes").null_count() == 0
    groups = migrations.group_by(by).agg(
        n_migrations=pl.len(), bytes=pl.when(whole).then(pl.col("bytes").sum())
    )
    busy = busy_of(migrations, by)
    return (
        _with_rates(groups.join(busy, on=by, how="left", nulls_equal=True))
        .sort(["bytes", *by], descending=[True, False, False], nulls_last=True)
        .select(TRAFFIC_BY_CAUSE.cast())
    )


@analysis(
    question="When did memory move, which way and why?",
    result=TRAFFIC_OVER_TIME,
    reads={"migrations": (*_READS, "pid", "device_id")},
    complexity="O(n log n + bins)",
    source="domain.md E-2",
)
def traffic_over_time(
    migrations: pl.LazyFrame, *, n_bins: int = 100, window_ns: int = 0
) -> pl.LazyFrame:
    """Add up migrations in stretches of time of equal length.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    n_bins : int, default 100
        Stretches from the first start to the last end, where no length is given.
    window_ns : int, default 0
        Length of a stretch, ns, from time 0 on, so that parts of a trace have the same stretches;
        0 takes ``n_bins``.

    Returns
    -------
    LazyFrame, ``TRAFFIC_OVER_TIME``
        One row per stretch, process, GPU, direction and cause with a copy in it, in that order. A
        copy counts where it starts, so bytes and copies add up; busy time is cut at the edges, and
        adds up to that of :func:`traffic_matrix`. Rows without a start are left out.

    Raises
    ------
    UsageError
        If there is less than one stretch, or more than a million.
    """
    if n_bins < 1 or window_ns < 0:
        raise UsageError(f"{n_bins} bins of {window_ns} ns: ask for at least 1 bin, or a length.")
    return TRAFFIC_OVER_TIME.from_rows(lambda: _over_time(migrations, n_bins, window_ns))


def _over_time(migrations: pl.LazyFrame, n_bins: int, window_ns: int) -> pl.DataFrame:
    by = [*_KEYS, "direction", "cause"]
    rows = migrations.select(*by, "start_ns", "end_ns", "bytes", "sequence").filter(
        pl.col("start_ns").is_not_null()
    )
    first, last = (
        rows.select(
            pl.min("start_ns"), last=pl.max_horizontal(pl.max("start_ns"), pl.max("end_ns"))
        )
        .collect()
        .row(0)
    )
    if first is None:
        return TRAFFIC_OVER_TIME.empty().collect()
    width = window_ns or max(-(-(last - first) // n_bins), 1)
    origin = 0 if window_ns else first
    if (last - first) // width > _MAX_BINS:
        raise UsageError(f"More than {_MAX_BINS} bins of {width} ns: ask for longer ones.")
    place = (pl.col("start_ns") - origin) // width
    # A last start at the very end belongs to the last stretch, not to one more.
    place = place if window_ns else pl.min_horizontal(place, n_bins - 1)
    sums = {"n_migrations": pl.len(), "bytes": pl.col("bytes").sum()}
    moved = rows.group_by(*by, bin_id=place).agg(**sums).collect()
    added = pl.col("busy_ns").sum()
    pieces = [
        _clipped(part, origin, width).group_by(*by, "bin_id").agg(added)
        for part in islands_in_parts(rows, by)
    ]
    busy = pl.concat(pieces).group_by(*by, "bin_id").agg(added)
    edge = pl.col("bin_id") * width + origin
    return (
        moved.join(busy, on=[*by, "bin_id"], how="full", coalesce=True, nulls_equal=True)
        .with_columns(pl.col("n_migrations", "bytes", "busy_ns").fill_null(0))
        .with_columns(start_ns=edge, end_ns=edge + width)
        .sort("bin_id", *by)
    )


def _clipped(islands: pl.DataFrame, origin: int, width: int) -> pl.DataFrame:
    """Cut merged intervals at the edges of bins: ``bin_id`` and ``busy_ns`` of each piece."""
    low = (pl.col("start_ns") - origin) // width
    high = (pl.col("end_ns") - 1 - origin) // width
    edge = pl.col("bin_id") * width + origin
    return (
        islands.with_columns(bin_id=pl.int_ranges(low, high + 1))
        .explode("bin_id")
        .with_columns(
            busy_ns=pl.min_horizontal("end_ns", edge + width) - pl.max_horizontal("start_ns", edge)
        )
    )


@analysis(
    question="Did memory move in large pieces, and how near to the link's speed?",
    result=TRANSFER_EFFICIENCY,
    reads={
        "migrations": (
            *("start_ns", "end_ns", "pid", "device_id", "va", "bytes", "direction", "sequence"),
        )
    },
    source="domain.md E-15; calibration.md 1",
)
def transfer_efficiency(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Sort pushes into size classes and measure each class's bandwidth.

    Copies of one push are slices of one piece of work, so a push is measured, not a copy.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``TRANSFER_EFFICIENCY``
        One row per process, GPU, direction and class that occurs, in that order. Bytes add up to
        those of the rows that have a start and an address.
    """
    rows = with_push_id(migrations).with_columns(
        copy_ns=(pl.col("end_ns") - pl.col("start_ns")).clip(lower_bound=0)
    )
    size = pl.col("bytes").sum()
    pushes = rows.group_by(*_WAY, "push_id").agg(size.alias("push_bytes"))
    # A bit length is exact, a logarithm is not.
    bits = 63 - pl.col("push_bytes").clip(1, None).bitwise_leading_zeros().cast(pl.Int64)
    classes = pushes.with_columns(
        min_bytes=pl.when(pl.col("push_bytes") > 0).then(pl.lit(2, pl.Int64).pow(bits)).otherwise(0)
    )
    rows = rows.join(classes.select("push_id", "min_bytes"), on="push_id")
    by = [*_WAY, "min_bytes"]
    found = rows.group_by(by).agg(
        pl.col("push_id").n_unique().alias("n_pushes"),
        pl.len().alias("n_migrations"),
        size,
        pl.col("copy_ns").sum(),
    )
    held = rows.select(*by, "start_ns", "end_ns", "sequence")

    def busy() -> pl.DataFrame:
        # Once: else each look at the rows would sort them into pushes again.
        return busy_of(held.collect().lazy(), by).collect()

    busy_ns = pl.defer(busy, schema={**rows.select(by).collect_schema(), "busy_ns": pl.Int64})
    whole = pl.col("bytes").sum().over(_WAY)
    small = pl.col("bytes").filter(pl.col("min_bytes") < BIG_PAGE_BYTES).sum().over(_WAY)
    return (
        found.join(busy_ns, on=by, how="left", nulls_equal=True)
        .with_columns(pl.col("busy_ns").fill_null(0))
        .with_columns(
            bytes_per_s=_ratio(pl.col("bytes") * float(NS_PER_S), pl.col("busy_ns")),
            bytes_fraction=_ratio(pl.col("bytes"), whole),
            small_fraction=_ratio(small, whole),
        )
        .sort(by)
        .select(TRANSFER_EFFICIENCY.cast())
    )


@analysis(
    question="What does a copy cost: how long before the first byte, and how fast after that?",
    result=COPY_COST,
    reads={"migrations": ("start_ns", "end_ns", "pid", "device_id", "bytes", "direction")},
    source="calibration.md 3",
)
def copy_cost(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Fit duration = latency + bytes / bandwidth to single copies, by least absolute deviation.

    A few copies wait long for the first byte, and would bend a fit of least squares.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``COPY_COST``
        One row per process, GPU and direction that has copies with a positive duration and size, in
        that order. The fit is null where all copies have one size, as those of user prefetches do.
    """
    return COPY_COST.from_rows(lambda: _copy_cost(migrations))


def _copy_cost(migrations: pl.LazyFrame) -> pl.DataFrame:
    duration = pl.col("end_ns") - pl.col("start_ns")
    known = (
        migrations.select(*_WAY, "bytes", duration_ns=duration)
        .filter((pl.col("bytes") > 0) & (pl.col("duration_ns") > 0))
        # Equal rows are one point with a weight: durations step, and sizes are whole pages.
        .group_by(*_WAY, "bytes", "duration_ns")
        .agg(n=pl.len())
        .sort(*_WAY, "bytes", "duration_ns")
        .collect()
    )
    found = [COPY_COST.empty().collect()]
    for mine in known.partition_by(_WAY, maintain_order=True):
        figures = _line(mine)
        row = mine.head(1).select(
            *_WAY,
            n_migrations=pl.lit(int(mine["n"].sum()), pl.Int64),
            n_sizes=pl.lit(mine["bytes"].n_unique(), pl.Int64),
            **{name: pl.lit(value, pl.Float64) for name, value in figures.items()},
        )
        found.append(row.select(COPY_COST.cast()))
    return pl.concat(found)


def _line(points: pl.DataFrame) -> dict[str, float | None]:
    """Fit a line through weighted points; all null where it cannot be told."""
    import numpy as np

    names = ("latency_ns", "bytes_per_s", "r2", "residual_p50_ns", "residual_p95_ns")
    if points["bytes"].n_unique() < 2:
        return dict.fromkeys(names)
    x, y, weight = (points[c].to_numpy().astype(np.float64) for c in ("bytes", "duration_ns", "n"))
    slope, latency = _least_absolute(x, y, weight)
    residual = y - latency - slope * x
    spread = float(weight @ (y - np.average(y, weights=weight)) ** 2)
    r2 = 1 - float(weight @ residual**2) / spread if spread > 0 else None
    rate = NS_PER_S / slope if slope > 0 else None
    p50, p95 = (_quantile(np.abs(residual), weight, share) for share in (0.5, 0.95))
    return dict(zip(names, (latency, rate, r2, p50, p95), strict=True))


def _least_absolute(
    x: NDArray[np.float64], y: NDArray[np.float64], weight: NDArray[np.float64]
) -> tuple[float, float]:
    """Find the slope and offset of the smallest sum of absolute residuals.

    With the weighted median as offset the sum is convex in the slope: golden sections find its
    lowest point.
    """
    import numpy as np

    golden = (5**0.5 - 1) / 2
    # Copies take no less for being larger; nothing is steeper than all the spread in one step.
    step = float(np.diff(np.unique(x)).min())
    low, high = 0.0, float(y.max() - y.min()) / step
    for _ in range(_SECTIONS):
        left, right = high - golden * (high - low), low + golden * (high - low)
        sums = []
        for slope in (left, right):
            residual = y - slope * x
            sums.append(float(weight @ abs(residual - _quantile(residual, weight, 0.5))))
        low, high = (low, right) if sums[0] <= sums[1] else (left, high)
    slope = (low + high) / 2
    return slope, _quantile(y - slope * x, weight, 0.5)


def _quantile(values: NDArray[np.float64], weight: NDArray[np.float64], share: float) -> float:
    import numpy as np

    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weight[order])
    return float(values[order[np.searchsorted(reached, share * reached[-1])]])
