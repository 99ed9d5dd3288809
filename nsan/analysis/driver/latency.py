"""How long page faults wait: latency and service of batches, their spread, and what they are made of.

A fault row lasts from the fault to the end of its replay, which includes waiting for the batch
before; what the driver spends on the batch itself is its service (``fault_rows.md`` 2.2). Both are on
the clock of the GPU. Without fault rows only the gaps between the copies of batches can be seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.driver.batches import BATCH_READS, batches, with_batch_id
from nsan.analysis.driver.outcomes import OUTCOME
from nsan.analysis.result import DEVICE, KIND, PID, Figure, Result, derived, reconstructed
from nsan.uvm.constants import VA_BLOCK_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_KEYS: Final = ["pid", "device_id"]
_SHARES: Final = (10, 50, 90, 99)
_CONFIDENCE: Final = 0.95

TERMS: Final = (
    "batch",
    "va_block",
    "first_va_block",
    "page_moved",
    "page_faulted",
    "va_block_evicted",
)
"""What the service of a batch is made of: a constant, then so much for each of these."""

_STEP: Final = derived(
    "time_step_ns", pl.Int64, "ns", "Step of coarse starts: service is off by up to it; else null."
)


def _spread(name: str, what: str) -> tuple[Figure, ...]:
    """Declare percentiles, largest value and sum of a time."""
    return (
        *(
            derived(f"{name}_p{share}_ns", pl.Float64, "ns", f"{what}, {share}th percentile.")
            for share in _SHARES
        ),
        derived(f"{name}_max_ns", pl.Int64, "ns", f"{what}, longest."),
        derived(f"{name}_sum_ns", pl.Int64, "ns", f"{what}, sum over batches."),
    )


BATCH_LATENCY: Final = Result(
    "batch_latency",
    "batches of one outcome on one GPU of one process",
    (
        PID,
        DEVICE,
        derived("outcome", OUTCOME, "label", "What became of the batches."),
        derived("n_batches", pl.Int64, "batches", "Batches of fault rows."),
        *_spread("latency", "Raised to replayed; overlaps other batches"),
        *_spread("service", "Replayed, less the later of raised and the replay before"),
        _STEP,
    ),
)

LATENCY_HISTOGRAM: Final = Result(
    "latency_histogram",
    "batches of one class of time on one GPU of one process",
    (
        PID,
        DEVICE,
        derived("min_ns", pl.Int64, "ns", "Shortest of the class, a power of two; 0: no time."),
        derived("n_by_latency", pl.Int64, "batches", "Batches whose latency is in the class."),
        derived("latency_ns", pl.Int64, "ns", "Sum of these latencies."),
        derived("n_by_service", pl.Int64, "batches", "Batches whose service is in the class."),
        derived("service_ns", pl.Int64, "ns", "Sum of these services."),
    ),
)

SERVICE_FIT: Final = Result(
    "service_fit",
    "one term of the service time of data batches on one GPU of one process",
    (
        PID,
        DEVICE,
        derived("term", pl.Enum(TERMS), "label", "What the time is spent per; `batch` is fixed."),
        reconstructed("estimate_ns", pl.Float64, "ns", "Time for each; null: cannot be told."),
        reconstructed("low_ns", pl.Float64, "ns", "Lower end of the 95 % confidence interval."),
        reconstructed("high_ns", pl.Float64, "ns", "Upper end of the 95 % confidence interval."),
        reconstructed("n_batches", pl.Int64, "batches", "Batches of the fit."),
        reconstructed("r2", pl.Float64, "fraction", "Share of the variance that it explains."),
        reconstructed("residual_p50_ns", pl.Float64, "ns", "Absolute residual, median."),
        reconstructed("residual_p90_ns", pl.Float64, "ns", "Absolute residual, 90th percentile."),
        _STEP,
    ),
)

BATCH_GAPS: Final = Result(
    "batch_gaps",
    "gaps between the copies of batches on one GPU of one process",
    (
        PID,
        DEVICE,
        derived("kind", KIND, "label", "Batches of fault rows, or reconstructed from copies."),
        derived("n_gaps", pl.Int64, "gaps", "Pairs of batches with copies that follow each other."),
        *_spread("gap", "Last copy of a batch to first copy of the next"),
    ),
)


_FIGURES: Final = [name for name in SERVICE_FIT.schema if name not in {*_KEYS, "time_step_ns"}]


def _spread_of(name: str, value: pl.Expr) -> list[pl.Expr]:
    return [
        *(
            value.quantile(share / 100, interpolation="linear").alias(f"{name}_p{share}_ns")
            for share in _SHARES
        ),
        value.max().alias(f"{name}_max_ns"),
        value.sum().alias(f"{name}_sum_ns"),
    ]


def _rows(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.LazyFrame:
    """List the batches of fault rows: others have no time of raising, so no latency."""
    return batches(gpu_faults, migrations).filter(pl.col("latency_ns").is_not_null())


def _steps(gpu_faults: pl.LazyFrame) -> pl.DataFrame:
    """Find the step of coarse starts: the greatest common divisor of their differences."""
    import numpy as np

    rows = (
        gpu_faults.filter(pl.col("sequence").is_not_null() & pl.col("start_ns").is_not_null())
        .group_by(_KEYS)
        .agg(pl.col("start_ns").unique())
        .collect()
    )
    steps = [int(np.gcd.reduce(np.diff(s.to_numpy()), initial=0)) for s in rows["start_ns"]]
    return rows.select(_KEYS).with_columns(time_step_ns=pl.Series(steps, dtype=pl.Int64))


@analysis(
    question="How long does a page fault take, from being raised to being replayed?",
    result=BATCH_LATENCY,
    reads=BATCH_READS,
    source="domain.md E-5; fault_rows.md 2.2",
)
def batch_latency(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Measure latency and service of batches by their outcome.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``BATCH_LATENCY``
        One row per process, GPU and outcome with batches of fault rows, in that order; none where
        nothing was recorded but copies. Latencies overlap, so that their sum is not time that
        passed; services of one GPU do not, and add up to the time in which a batch was under way.
    """

    def build() -> pl.DataFrame:
        found = (
            _rows(gpu_faults, migrations)
            .group_by(*_KEYS, "outcome")
            .agg(
                pl.len().alias("n_batches"),
                *_spread_of("latency", pl.col("latency_ns")),
                *_spread_of("service", pl.col("service_ns")),
            )
            .sort(*_KEYS, "outcome")
            .collect()
        )
        steps = _steps(gpu_faults)
        return found.join(steps, on=_KEYS, how="left", nulls_equal=True, maintain_order="left")

    return BATCH_LATENCY.from_rows(build)


@analysis(
    question="How are latency and service of batches spread?",
    result=LATENCY_HISTOGRAM,
    reads=BATCH_READS,
    source="domain.md E-5",
)
def latency_histogram(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Count batches in classes of latency and of service, each twice as long as the one before.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``LATENCY_HISTOGRAM``
        One row per process, GPU and class with a batch in it, in that order. Counts of either kind
        add up to the batches of fault rows.
    """
    by = [*_KEYS, "min_ns"]
    names = {"latency_ns": "n_by_latency", "service_ns": "n_by_service"}
    value, what = pl.col("value"), pl.col("variable")
    # A bit length is exact, a logarithm is not.
    bits = 63 - value.clip(1, None).bitwise_leading_zeros().cast(pl.Int64)
    least = pl.when(value > 0).then(pl.lit(2, pl.Int64).pow(bits)).otherwise(0)
    return (
        _rows(gpu_faults, migrations)
        .unpivot(index=_KEYS, on=list(names))
        .group_by(*_KEYS, min_ns=least)
        .agg(
            *((what == name).sum().alias(n) for name, n in names.items()),
            *(value.filter(what == name).sum().alias(name) for name in names),
        )
        .sort(by)
        .select(LATENCY_HISTOGRAM.cast())
    )


@analysis(
    question="Without fault rows: how long does the driver need between two batches?",
    result=BATCH_GAPS,
    reads=BATCH_READS,
    source="calibration.md 1",
)
def batch_gaps(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Measure the time from the last copy of a batch to the first copy of the next.

    All that a trace without fault rows shows of the driver's work; where a program computes between
    its faults, or nothing runs, that is in the gap too.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order; may be empty.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``BATCH_GAPS``
        One row per process, GPU and kind of batch with a gap, in that order. Batches without copies
        are passed over.
    """
    value = pl.col("first_copy_ns") - pl.col("last_copy_ns").shift(1).over(_KEYS)
    return (
        batches(gpu_faults, migrations)
        .filter(pl.col("first_copy_ns").is_not_null())
        .sort(*_KEYS, "first_copy_ns", "batch_id")
        .with_columns(gap=value)
        .filter(pl.col("gap").is_not_null())
        .group_by(*_KEYS, "kind")
        .agg(pl.len().alias("n_gaps"), *_spread_of("gap", pl.col("gap")))
        .sort(*_KEYS, "kind")
        .select(BATCH_GAPS.cast())
    )


@analysis(
    question="What is the service time of a batch spent on?",
    result=SERVICE_FIT,
    reads=BATCH_READS,
    source="domain.md E-5; fault_rows.md 2.2; calibration.md 7.4",
)
def service_fit(
    gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame, *, min_batches: int = 20
) -> pl.LazyFrame:
    """Fit the service time of data batches by what is in them, by least squares.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Rows of the fault table, in any order.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    min_batches : int, default 20
        Fewer data batches give no fit.

    Returns
    -------
    LazyFrame, ``SERVICE_FIT``
        Per process and GPU with data batches of fault rows, one row per term in the order of
        :data:`TERMS`: a fixed time per batch, and the time for each VA block, for each that the GPU
        gets for the first time, each page moved, each page faulted, each VA block evicted. Estimates
        are null where a term does not vary, or cannot be told from the ones before it.

    Notes
    -----
    The driver prepares a block while it copies the one before, so the terms do not simply add up: a
    term says what one more costs at the margin, copies included. The first batch of a process and
    GPU is left out, it takes several times as long.
    """
    return SERVICE_FIT.from_rows(lambda: _service_fit(gpu_faults, migrations, min_batches))


def _service_fit(
    gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame, min_batches: int
) -> pl.DataFrame:
    rows, firsts = pl.collect_all(
        [_rows(gpu_faults, migrations), _first_blocks(gpu_faults, migrations)]
    )
    first = pl.col("end_ns") == pl.col("end_ns").min().over(_KEYS)
    data = (
        rows.filter(~first)
        .filter(pl.col("outcome") == "data")
        .join(firsts, on="batch_id", how="left")
        .select(
            *_KEYS,
            "service_ns",
            va_block="n_pushes",
            first_va_block=pl.col("first_va_block").fill_null(0),
            page_moved=pl.col("bytes") // pl.col("page_bytes"),
            page_faulted="n_faulted_pages",
            va_block_evicted=pl.col("evicted_bytes") / VA_BLOCK_BYTES,
        )
        .sort(pl.all())
    )
    found = [pl.DataFrame(schema=SERVICE_FIT.schema).drop("time_step_ns")]
    for mine in data.partition_by(_KEYS, maintain_order=True):
        keys = mine.head(1).select(_KEYS)
        found.append(keys.join(_terms(mine, min_batches), how="cross").cast(found[0].schema))
    steps = _steps(gpu_faults)
    return pl.concat(found).join(
        steps, on=_KEYS, how="left", nulls_equal=True, maintain_order="left"
    )


def _first_blocks(gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Count for each batch the VA blocks of which nothing had come to its GPU before."""
    copies = with_batch_id(gpu_faults, migrations).filter(pl.col("direction") != "dtoh")
    return (
        copies.sort("start_ns", "va")
        .group_by(*_KEYS, "va_block")
        .agg(pl.col("batch_id").first())
        .filter(pl.col("batch_id").is_not_null())
        .group_by("batch_id")
        .agg(first_va_block=pl.len().cast(pl.Int64))
    )


def _terms(data: pl.DataFrame, min_batches: int) -> pl.DataFrame:
    """Fit the batches of one GPU: a row per term."""
    import numpy as np

    service = data["service_ns"].to_numpy().astype(np.float64)
    columns = {"batch": np.ones(len(service))}
    columns |= {name: data[name].to_numpy().astype(np.float64) for name in TERMS[1:]}
    told = _independent(columns) if len(service) >= max(min_batches, len(TERMS) + 2) else []
    terms = pl.DataFrame({"term": TERMS}, schema={"term": pl.Enum(TERMS)})
    if not told:
        nothing = ("estimate_ns", "low_ns", "high_ns", "r2", "residual_p50_ns", "residual_p90_ns")
        figures = dict.fromkeys(nothing, pl.lit(None, pl.Float64))
        return terms.with_columns(n_batches=pl.lit(len(service), pl.Int64), **figures).select(
            _FIGURES
        )
    design = np.column_stack([columns[name] for name in told])
    estimate, half, residual = _least_squares(design, service)
    spread = float(((service - service.mean()) ** 2).sum())
    p50, p90 = np.quantile(np.abs(residual), [0.5, 0.9])
    fitted = pl.DataFrame(
        {
            "term": pl.Series(told, dtype=pl.Enum(TERMS)),
            "estimate_ns": estimate,
            "low_ns": estimate - half,
            "high_ns": estimate + half,
        }
    )
    return (
        terms.join(fitted, on="term", how="left", maintain_order="left")
        .with_columns(
            n_batches=pl.lit(len(service), pl.Int64),
            r2=pl.lit(1 - float(residual @ residual) / spread if spread else None, pl.Float64),
            residual_p50_ns=pl.lit(float(p50)),
            residual_p90_ns=pl.lit(float(p90)),
        )
        .select(_FIGURES)
    )


def _independent(columns: dict[str, NDArray[np.float64]]) -> list[str]:
    """Choose the terms, in order, that are no sum of multiples of the ones chosen before."""
    import numpy as np

    chosen: list[str] = []
    basis: list[NDArray[np.float64]] = []
    for name, values in columns.items():
        rest = values
        for _ in range(2):  # twice: once leaves rounding errors
            for direction in basis:
                rest = rest - (rest @ direction) * direction
        length = float(np.linalg.norm(rest))
        if length > 1e-8 * float(np.linalg.norm(values)):
            chosen.append(name)
            basis.append(rest / length)
    return chosen


def _least_squares(
    design: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Fit by ordinary least squares: estimates, half widths of their 95 % intervals, residuals."""
    import numpy as np
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    scale = np.linalg.norm(design, axis=0)
    estimate = np.linalg.lstsq(design / scale, values, rcond=None)[0]
    residual = values - design / scale @ estimate
    free = len(values) - design.shape[1]
    variance = float(residual @ residual) / free
    inverse = np.linalg.inv((design / scale).T @ (design / scale))
    half = stdtrit(free, (1 + _CONFIDENCE) / 2) * np.sqrt(variance * np.diag(inverse))
    return estimate / scale, half / scale, residual
