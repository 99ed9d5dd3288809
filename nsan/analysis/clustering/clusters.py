"""Fault clusters in time and address space: cells of a map where faults are dense, put together.

The map has one cell per time bin and VA block. A cell with enough faulted pages is dense;
neighbouring dense cells are one cluster, cells beside a dense one are its border, the rest is noise
(DBSCAN on cells instead of points, so that ten million copies take seconds).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.apart import lots
from nsan.analysis.catalog import analysis
from nsan.analysis.clustering.cells import NOISE, labelled, mapped
from nsan.analysis.clustering.stretches import (
    ACCESS_COLUMNS,
    ACCESS_MIX,
    COPY_READS,
    FAULT_READS,
    KERNEL_COLUMNS,
    KERNEL_READS,
    KEYS,
    access_counts,
    main_kernel,
    share_of,
    with_kernel_count,
    with_running_kernel,
)
from nsan.analysis.clustering.walks import CLASS_COLUMNS, classes_of
from nsan.analysis.driver.fault_rows import usable_places
from nsan.analysis.result import DEVICE, PID, Result, derived, reconstructed
from nsan.errors import UsageError
from nsan.uvm.constants import PUSH_GAPS_NS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_WALK: Final = ("pattern", "stride_bytes", "r2")

_BIN: Final = reconstructed("time_bin_ns", pl.Int64, "ns", "Length of a time bin of its map.")
_CLUSTER: Final = reconstructed(
    "cluster_id", pl.Int64, "id", "From 0 by process, GPU and first dense cell; -1: noise."
)

FAULT_CLUSTERS: Final = Result(
    "fault_clusters",
    "one cluster of faults in time and address space, or the noise of a process and GPU",
    (
        PID,
        DEVICE,
        _CLUSTER,
        reconstructed("start_ns", pl.Int64, "ns", "Start of its first copy."),
        reconstructed("end_ns", pl.Int64, "ns", "End of its last copy."),
        reconstructed("duration_ns", pl.Int64, "ns", "End minus start."),
        reconstructed("va", pl.UInt64, "byte address", "Lowest byte moved."),
        reconstructed("span_bytes", pl.Int64, "byte", "From there to behind the highest byte."),
        reconstructed("n_cells", pl.Int64, "cells", "Cells of the map."),
        reconstructed("n_va_blocks", pl.Int64, "VA blocks", "Distinct blocks."),
        reconstructed("n_pages", pl.Int64, "pages", "Faulted pages, each time they came."),
        reconstructed("bytes", pl.Int64, "byte", "Moved to the GPU by faults and driver prefetch."),
        derived("traffic_fraction", pl.Float64, "fraction", "Of such bytes of process and GPU."),
        *ACCESS_COLUMNS,
        *KERNEL_COLUMNS,
        *(column for column in CLASS_COLUMNS if column.name in _WALK),
        _BIN,
    ),
)

CLUSTER_CELLS: Final = Result(
    "cluster_cells",
    "one cell of the map: what moved in a time bin and VA block",
    (
        PID,
        DEVICE,
        derived("start_ns", pl.Int64, "ns", "Start of the time bin."),
        derived("va_block", pl.UInt64, "id", "VA block: address // 2 MiB."),
        derived("n_fault_pages", pl.Int64, "pages", "To the GPU: faulted, or of unknown cause."),
        derived("n_prefetch_pages", pl.Int64, "pages", "To the GPU by the driver's prefetcher."),
        derived("n_user_pages", pl.Int64, "pages", "By a call of the program."),
        derived("n_evicted_pages", pl.Int64, "pages", "By eviction."),
        derived(
            "n_cpu_fault_pages", pl.Int64, "pages", "To the CPU, faulted or prefetched with it."
        ),
        derived("n_other_pages", pl.Int64, "pages", "By any other cause."),
        reconstructed("cluster_id", pl.Int64, "id", "Cluster; -1: noise; null: no fault moved it."),
        _BIN,
    ),
)


def _check(time_bin_ns: int, min_pages: int, reach: int) -> None:
    if time_bin_ns < 0:
        raise UsageError(f"A time bin of {time_bin_ns} ns. Take 0 (from the trace) or more.")
    if min_pages < 1 or not 1 <= reach <= 8:
        raise UsageError(
            f"{min_pages} pages and a reach of {reach}. Take 1 page or more, and a reach of 1 to 8."
        )


@analysis(
    question="What moved when and where, as the cells of an address-time map?",
    result=CLUSTER_CELLS,
    reads={"migrations": COPY_READS},
    source="domain.md E-7",
)
def cluster_cells(
    migrations: pl.LazyFrame, *, time_bin_ns: int = 0, min_pages: int = 4, reach: int = 1
) -> pl.LazyFrame:
    """Count pages by cause in each time bin and VA block, with the cluster of each cell.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    time_bin_ns : int, default 0
        As for :func:`fault_clusters`.
    min_pages : int, default 4
        As for :func:`fault_clusters`.
    reach : int, default 1
        As for :func:`fault_clusters`.

    Returns
    -------
    LazyFrame, ``CLUSTER_CELLS``
        One row per cell in which something moved, by process, GPU, time and block. A copy counts
        where it starts. Pages add up to those of the rows with a start, an address and a size.

    Examples
    --------
    >>> from nsan.schema import MIGRATIONS
    >>> cluster_cells(MIGRATIONS.empty()).collect().height
    0
    """
    _check(time_bin_ns, min_pages, reach)

    def build() -> pl.DataFrame:
        cells = labelled(mapped(migrations, time_bin_ns, faults_only=False), min_pages, reach)
        return cells.with_columns(start_ns=pl.col("time_bin") * pl.col("time_bin_ns"))

    return CLUSTER_CELLS.from_rows(build)


@analysis(
    question="Which dense clusters do the GPU page faults form in time and address space?",
    result=FAULT_CLUSTERS,
    reads={"gpu_faults": FAULT_READS, "migrations": COPY_READS, "kernels": KERNEL_READS},
    source="domain.md E-6",
)
def fault_clusters(
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    kernels: pl.LazyFrame,
    *,
    time_bin_ns: int = 0,
    min_pages: int = 4,
    reach: int = 1,
) -> pl.LazyFrame:
    """Find where and when the faults of each GPU are dense.

    Parameters
    ----------
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        Fault rows: counted with the first faulted copy of their batch.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration; fault-caused copies to a GPU (without causes: all to a GPU) are the
        events, each weighing as many as its pages.
    kernels : LazyFrame, ``KERNELS``
        One row per kernel.
    time_bin_ns : int, default 0
        Length of a time bin; 0: 8 times the median time until faults open another VA block, rounded
        up to a power of two, for each process and GPU.
    min_pages : int, default 4
        Faulted pages that make a cell dense.
    reach : int, default 1
        Neighbouring cells are up to this many bins and blocks apart.

    Returns
    -------
    LazyFrame, ``FAULT_CLUSTERS``
        One row per cluster, by process, GPU and cluster, and last the noise of a process and GPU.
        Bytes add up to those of fault-caused copies, rows to the fault rows.

    Examples
    --------
    >>> from nsan.schema import GPU_FAULTS, KERNELS, MIGRATIONS
    >>> fault_clusters(GPU_FAULTS.empty(), MIGRATIONS.empty(), KERNELS.empty()).collect().height
    0
    """
    _check(time_bin_ns, min_pages, reach)

    def build() -> pl.DataFrame:
        usable = usable_places(gpu_faults, migrations)
        parts, n_clusters = [], 0
        for rows, copies, ran in lots(gpu_faults, migrations, kernels):
            binned = mapped(copies, time_bin_ns, faults_only=True)
            found = _clusters(labelled(binned, min_pages, reach), binned, rows, usable, ran)
            is_cluster = pl.col("cluster_id") >= 0
            number = pl.when(is_cluster).then(pl.col("cluster_id") + n_clusters)
            parts.append(found.with_columns(cluster_id=number.otherwise("cluster_id")))
            n_clusters += found.filter(is_cluster).height
        return pl.concat(parts).sort(*KEYS, pl.col("cluster_id") == NOISE, "cluster_id")

    return FAULT_CLUSTERS.from_rows(build)


def _clusters(
    cells: pl.DataFrame,
    copies: pl.DataFrame,
    gpu_faults: pl.LazyFrame,
    usable: pl.DataFrame,
    kernels: pl.LazyFrame,
) -> pl.DataFrame:
    """Add up clusters from 0, of processes and GPUs that are looked at together."""
    rows = gpu_faults.join(usable.lazy(), on=KEYS, how="semi", nulls_equal=True)
    events = _in_batches(copies, rows)
    del copies
    placed = events.filter(pl.col("kind") == 0).join(
        cells.select("cell", "cluster_id"), on="cell", how="left", maintain_order="left"
    )
    del events
    counted = _rows(gpu_faults, placed)
    walks = classes_of(
        placed.filter(pl.col("cluster_id") != NOISE).rename({"cluster_id": "group"})
    ).rename({"group": "cluster_id"})
    counts = [
        *ACCESS_MIX,
        "n_fault_rows",
        "n_cells",
        "n_va_blocks",
        "n_pages",
        "bytes",
        "n_kernels",
    ]
    return (
        _summed(cells, kernels)
        .collect()
        .join(counted, on=[*KEYS, "cluster_id"], how="full", nulls_equal=True, coalesce=True)
        .join(walks.select("cluster_id", *_WALK), on="cluster_id", how="left")
        .with_columns(pl.col(counts).fill_null(0))
        .with_columns(traffic_fraction=share_of(pl.col("bytes")))
    )


def _in_batches(copies: pl.DataFrame, gpu_faults: pl.LazyFrame) -> pl.DataFrame:
    """Give the copies numbers of batches: by the end of fault rows, else by the order of pushes.

    A fault row is a batch. Where there are no rows, a push whose block does not ascend opens one:
    97 to 100 % of all boundaries, and enough to tell a walk (calibration.md 1).
    """
    import numpy as np

    starts, place = copies["start_ns"].to_numpy(), copies["place"].to_numpy()
    row = np.full(copies.height, -1, dtype=np.int64)
    row_end = np.zeros(copies.height, dtype=np.int64)
    passed = 0
    for one in copies.unique("place").sort("place").select(*KEYS, "place").iter_rows(named=True):
        low, high = np.searchsorted(place, [one["place"], one["place"] + 1])
        ends = _ends(gpu_faults, {key: one[key] for key in KEYS})
        at = np.searchsorted(ends, starts[low:high])
        has_row = at < len(ends)
        row[low:high] = np.where(has_row, at + passed, -1)
        row_end[low:high][has_row] = ends[at[has_row]]
        passed += len(ends)
    same = pl.col("va_block") == pl.col("va_block").shift(1)
    chained = same & (pl.col("start_ns") - pl.col("end_ns").shift(1)).is_in(PUSH_GAPS_NS)
    ascends = pl.col("va_block") > pl.col("va_block").shift(1)
    other = (pl.col("row") != pl.col("row").shift(1)) | (
        pl.col("place") != pl.col("place").shift(1)
    )
    opens = other | ((pl.col("row") < 0) & ~(chained | ascends))
    return (
        copies.with_columns(row=pl.Series(row))
        .with_columns(
            batch_id=opens.fill_null(value=True).cum_sum().cast(pl.Int64),
            row_end=pl.Series(row_end),
        )
        .with_columns(row_end=pl.when(pl.col("row") >= 0).then("row_end"))
    )


def _ends(gpu_faults: pl.LazyFrame, place: dict[str, int | None]) -> NDArray[np.int64]:
    """List the ends of the rows of a process and GPU, in order, each once."""
    import numpy as np

    schema = gpu_faults.collect_schema()
    mine = [pl.col(k).eq_missing(pl.lit(value, schema[k])) for k, value in place.items()]
    found = gpu_faults.filter(mine).select(pl.col("end_ns").drop_nulls()).collect()
    return np.unique(found["end_ns"].to_numpy())


def _rows(gpu_faults: pl.LazyFrame, placed: pl.DataFrame) -> pl.DataFrame:
    """Count fault rows in the cluster of the first faulted copy of their batch; else in the noise."""
    first = (
        placed.lazy()
        .filter(pl.col("row") >= 0)
        .group_by("row")
        .agg(pl.col(*KEYS, "row_end", "cluster_id").first())
        .drop("row")
    )
    return (
        gpu_faults.select(*KEYS, "access", row_end="end_ns")
        .join(first, on=[*KEYS, "row_end"], how="left", nulls_equal=True)
        .with_columns(pl.col("cluster_id").fill_null(NOISE))
        .group_by(*KEYS, "cluster_id")
        .agg(access_counts())
        .collect()
    )


def _summed(cells: pl.DataFrame, kernels: pl.LazyFrame) -> pl.LazyFrame:
    """Add up the cells of each cluster."""
    by = [*KEYS, "cluster_id"]
    sums = (
        cells.lazy()
        .group_by(by)
        .agg(
            pl.col("start_ns", "va").min(),
            pl.col("end_ns", "va_end").max(),
            pl.col("bytes").sum(),
            pl.col("time_bin_ns").first(),
            n_cells=pl.len().cast(pl.Int64),
            n_va_blocks=pl.col("va_block").n_unique().cast(pl.Int64),
            n_pages=pl.col("n_fault_pages").sum(),
        )
        .with_columns(
            duration_ns=pl.col("end_ns") - pl.col("start_ns"),
            span_bytes=(pl.col("va_end") - pl.col("va")).cast(pl.Int64),
        )
    )
    ran = with_running_kernel(cells.lazy(), kernels, at="start_ns")
    return with_kernel_count(sums, kernels).join(
        main_kernel(ran, by), on=by, how="left", nulls_equal=True
    )
