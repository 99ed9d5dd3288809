"""Size against throughput of copies, little enough to be drawn, and the line that the link sets."""

from __future__ import annotations

import math
from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.result import DEVICE, PID, Result, derived, reconstructed, recorded
from nsan.analysis.traffic import copy_cost
from nsan.schema import DIRECTION
from nsan.units import NS_PER_S

_SIZES: Final = 40
_RATES: Final = 40
"""Three directions of so many cells each stay below what a chart may have."""

_STEPS: Final = 33
_LN_2: Final = math.log(2)
_WAY: Final = ["pid", "device_id", "direction"]
_CELL: Final = ("direction", "size", "rate")

_DIRECTION: Final = recorded("direction", DIRECTION, "label", "Which way.")

TRANSFER_CELLS: Final = Result(
    "transfer_cells",
    "copies of one direction, about one size and about one throughput, of all processes and GPUs",
    (
        _DIRECTION,
        derived("min_bytes", pl.Float64, "byte", "Smallest size of the cell."),
        derived("max_bytes", pl.Float64, "byte", "Largest size of the cell."),
        derived("min_bytes_per_s", pl.Float64, "byte/s", "Smallest throughput of the cell."),
        derived("max_bytes_per_s", pl.Float64, "byte/s", "Largest throughput of the cell."),
        derived("n_migrations", pl.Int64, "rows", "Copies in the cell."),
        derived("bytes", pl.Int64, "byte", "Their bytes."),
    ),
    nothing="There is no migration with a size and a duration: nothing moved, or it was not recorded.",
)

TRANSFER_CURVES: Final = Result(
    "transfer_curves",
    "sizes on the fitted line of one direction on one GPU of one process",
    (
        PID,
        DEVICE,
        _DIRECTION,
        derived("bytes", pl.Float64, "byte", "A size, from the smallest copy to the largest."),
        reconstructed("bytes_per_s", pl.Float64, "byte/s", "Throughput by the fit, with latency."),
        reconstructed("ceiling_bytes_per_s", pl.Float64, "byte/s", "Of the link, by the fit."),
        reconstructed("latency_ns", pl.Float64, "ns", "Fitted time of a copy of no bytes."),
    ),
    nothing=(
        "The link's ceiling cannot be told: it takes copies of two sizes or more, with a duration."
    ),
)


def _measured(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Keep copies with a size and a duration, with their throughput."""
    duration = pl.col("end_ns") - pl.col("start_ns")
    return migrations.filter((pl.col("bytes") > 0) & (duration > 0)).with_columns(
        rate=pl.col("bytes") * float(NS_PER_S) / duration
    )


@analysis(
    question="How large are copies, and how fast?",
    result=TRANSFER_CELLS,
    reads={"migrations": ("start_ns", "end_ns", "bytes", "direction")},
    complexity="O(n)",
    source="domain.md E-15",
)
def transfer_cells(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Count copies in cells of size and throughput.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``TRANSFER_CELLS``
        One row per direction and cell with a copy in it, by size and throughput. Cells are equal in the
        logarithm of the size, and in the throughput up to the most of the direction: 40 by 40, so that
        there are at most 4 800. Copies without a size, a duration or a direction are left out.
    """
    return TRANSFER_CELLS.from_rows(lambda: _cells(migrations))


def _cells(migrations: pl.LazyFrame) -> pl.DataFrame:
    known = (
        _measured(migrations)
        .filter(pl.col("direction").is_not_null())
        .select("direction", "bytes", "rate", log=pl.col("bytes").log(2))
        .collect()
    )
    if known.is_empty():
        return TRANSFER_CELLS.empty().collect()
    low, high = known.select(pl.min("log"), high=pl.max("log")).row(0)
    wide = max((high - low) / _SIZES, 1 / _SIZES)
    # Links of GPUs are many times as fast as those to the host: each direction has its own steps.
    known = known.with_columns(tall=pl.col("rate").max().over("direction") / _RATES)
    size = ((pl.col("log") - low) / wide).floor().clip(0, _SIZES - 1)
    rate = (pl.col("rate") / pl.col("tall")).floor().clip(0, _RATES - 1)
    return (
        known.group_by("direction", "tall", size=size, rate=rate)
        .agg(pl.len().alias("n_migrations"), pl.col("bytes").sum())
        .sort(_CELL)
        .with_columns(
            min_bytes=(pl.col("size") * wide + low).mul(_LN_2).exp(),
            max_bytes=((pl.col("size") + 1) * wide + low).mul(_LN_2).exp(),
            min_bytes_per_s=pl.col("rate") * pl.col("tall"),
            max_bytes_per_s=(pl.col("rate") + 1) * pl.col("tall"),
        )
    )


@analysis(
    question="How fast can a copy of a size be on this link?",
    result=TRANSFER_CURVES,
    reads={"migrations": ("start_ns", "end_ns", "pid", "device_id", "bytes", "direction")},
    source="calibration.md 3",
)
def transfer_curves(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Turn the fitted cost of copies into a line of throughput by size, and the link's ceiling.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``TRANSFER_CURVES``
        33 rows per process, GPU and direction whose copies could be fitted
        (:func:`nsan.analysis.traffic.copy_cost`), by size: a copy of b bytes takes the latency and b
        over the ceiling. No row where all copies have one size.
    """
    return TRANSFER_CURVES.from_rows(lambda: _curves(migrations))


def _curves(migrations: pl.LazyFrame) -> pl.DataFrame:
    log = pl.col("bytes").log(2)
    ranges = _measured(migrations).group_by(_WAY).agg(low=log.min(), high=log.max())
    step = pl.col("step") / (_STEPS - 1)
    size = (pl.col("low") + step * (pl.col("high") - pl.col("low"))).mul(_LN_2).exp()
    return (
        copy_cost(migrations)
        .filter(pl.col("bytes_per_s").is_not_null())
        .select(*_WAY, "latency_ns", ceiling_bytes_per_s="bytes_per_s")
        .join(ranges, on=_WAY, how="left", nulls_equal=True, maintain_order="left")
        .with_columns(step=pl.int_ranges(0, _STEPS))
        .explode("step")
        .with_columns(bytes=size)
        .with_columns(
            bytes_per_s=pl.col("bytes")
            / (
                pl.col("latency_ns").clip(0, None) / NS_PER_S
                + pl.col("bytes") / pl.col("ceiling_bytes_per_s")
            )
        )
        .collect()
    )
