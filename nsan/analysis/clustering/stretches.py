"""What episodes, clusters and patterns share: kernels, access types and pages of stretches of faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from nsan.analysis.nearest import nearest
from nsan.analysis.result import derived
from nsan.uvm.constants import PAGE_BYTES

KEYS: Final = ("pid", "device_id")

FAULT_READS: Final = (
    "start_ns",
    "end_ns",
    "pid",
    "device_id",
    "va",
    "n_page_faults",
    "access",
    "access_id",
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
    "src_device_id",
    "sequence",
)
KERNEL_READS: Final = ("start_ns", "end_ns", "pid", "device_id", "name")

ACCESS_MIX: Final = {
    "n_read_rows": ("read",),
    "n_write_rows": ("write",),
    "n_atomic_rows": ("atomic",),
    "n_other_rows": ("prefetch", "unknown", "other"),
}
"""Counts of fault rows by access type; together they are all rows."""

ACCESS_COLUMNS: Final = (
    derived("n_fault_rows", pl.Int64, "rows", "Fault rows."),
    derived("n_read_rows", pl.Int64, "rows", "Of these: reads."),
    derived("n_write_rows", pl.Int64, "rows", "Of these: writes."),
    derived("n_atomic_rows", pl.Int64, "rows", "Of these: atomics."),
    derived("n_other_rows", pl.Int64, "rows", "Of these: of another or unknown access type."),
)
KERNEL_COLUMNS: Final = (
    derived("n_kernels", pl.Int64, "kernels", "Kernel instances that ran at some time of it."),
    derived(
        "kernel", pl.String, "text", "Name of the kernels that ran alone for most of its copies."
    ),
)


def with_running_kernel(rows: pl.LazyFrame, kernels: pl.LazyFrame, *, at: str) -> pl.LazyFrame:
    """Say which kernel was running on the GPU of a row at a time of it.

    Parameters
    ----------
    rows : LazyFrame
        With ``pid``, ``device_id`` and ``at``.
    kernels : LazyFrame, ``KERNELS``
        One row per kernel.
    at : str
        Column of the time (Int64, ns).

    Returns
    -------
    LazyFrame
        The rows, with ``kernel_id`` (Int64: rank of the kernel by process, GPU, start and name) and
        ``kernel`` (its name); both null where no kernel ran, or several at once.
    """
    known = (
        kernels.filter(pl.col("start_ns") < pl.col("end_ns"))
        .select(*KEYS, "start_ns", "end_ns", "name")
        .sort(*KEYS, "start_ns", "end_ns", "name")
        .with_columns(_id=pl.int_range(pl.len(), dtype=pl.Int64))
    )
    # The sum of the open kernels' numbers is the number of the one that is open alone.
    sides = [
        known.select(*KEYS, _t=edge, _n=pl.lit(sign, pl.Int64), _sum=pl.col("_id") * sign)
        for edge, sign in (("start_ns", 1), ("end_ns", -1))
    ]
    steps = (
        pl.concat(sides)
        .group_by(*KEYS, "_t")
        .agg(pl.col("_n", "_sum").sum())
        .sort(*KEYS, "_t")
        .with_columns(pl.col("_n", "_sum").cum_sum().over(KEYS))
        .select(*KEYS, "_t", kernel_id=pl.when(pl.col("_n") == 1).then("_sum"))
    )
    names = known.select(kernel_id="_id", kernel="name")
    return (
        nearest(rows, steps, on=(at, "_t"), by=KEYS)
        .drop("_t")
        .join(names, on="kernel_id", how="left")
    )


def with_kernel_count(spans: pl.LazyFrame, kernels: pl.LazyFrame) -> pl.LazyFrame:
    """Count the kernels of the same process and GPU that overlap each span.

    Parameters
    ----------
    spans : LazyFrame
        With ``pid``, ``device_id``, ``start_ns``, ``end_ns``; they may overlap.
    kernels : LazyFrame, ``KERNELS``
        One row per kernel.

    Returns
    -------
    LazyFrame
        The spans with ``n_kernels`` (Int64).
    """
    known = kernels.filter(pl.col("start_ns") < pl.col("end_ns"))
    found = spans
    # Those that began before the end, less those that were over at the start.
    for name, edge, moment in (("_began", "start_ns", "end_ns"), ("_over", "end_ns", "start_ns")):
        passed = (
            known.select(*KEYS, _t=pl.col(edge) + (1 if edge == "start_ns" else 0))
            .sort(*KEYS, "_t")
            .with_columns((pl.int_range(pl.len(), dtype=pl.Int64).over(KEYS) + 1).alias(name))
            .unique([*KEYS, "_t"], keep="last", maintain_order=True)
        )
        found = nearest(found, passed, on=(moment, "_t"), by=KEYS).drop("_t")
    count = pl.col("_began").fill_null(0) - pl.col("_over").fill_null(0)
    return found.with_columns(n_kernels=count).drop("_began", "_over")


def main_kernel(copies: pl.LazyFrame, by: Sequence[str]) -> pl.LazyFrame:
    """Find the kernel name that ran alone for most bytes of each group.

    Parameters
    ----------
    copies : LazyFrame
        With the columns of ``by``, ``kernel`` and ``bytes``.
    by : sequence of str
        Groups.

    Returns
    -------
    LazyFrame
        The columns of ``by`` and ``kernel``, one row per group that has one; of equals the first by
        name.
    """
    return (
        copies.filter(pl.col("kernel").is_not_null())
        .group_by(*by, "kernel")
        .agg(pl.col("bytes").sum())
        .sort([*by, "bytes", "kernel"], descending=[*(False for _ in by), True, False])
        .unique(by, keep="first", maintain_order=True)
        .drop("bytes")
    )


def access_counts() -> list[pl.Expr]:
    """Give the expressions that count fault rows, in all and by access type."""
    access = pl.col("access").cast(pl.String).fill_null("unknown")
    return [
        pl.len().cast(pl.Int64).alias("n_fault_rows"),
        *(access.is_in(kinds).sum().cast(pl.Int64).alias(n) for n, kinds in ACCESS_MIX.items()),
    ]


def distinct_pages(copies: pl.LazyFrame, by: Sequence[str]) -> pl.LazyFrame:
    """Count the distinct 4 KiB pages of the copies of each group.

    Parameters
    ----------
    copies : LazyFrame
        With the columns of ``by``, ``va`` and ``bytes``.
    by : sequence of str
        Groups.

    Returns
    -------
    LazyFrame
        The columns of ``by`` and ``n_faulted_pages`` (Int64).
    """
    first = (pl.col("va") // PAGE_BYTES).cast(pl.Int64)
    last = first + pl.max_horizontal((pl.col("bytes") + PAGE_BYTES - 1) // PAGE_BYTES, 1)
    before = pl.col("_last").cum_max().shift(1).over(by)
    new = pl.col("_last") - pl.max_horizontal(pl.col("_first"), before)
    return (
        copies.select(*by, _first=first, _last=last)
        .sort(*by, "_first", "_last")
        .with_columns(_new=new.clip(0))
        .group_by(by)
        .agg(n_faulted_pages=pl.col("_new").sum())
    )


def share_of(size: pl.Expr) -> pl.Expr:
    """Divide bytes by those of all rows of the process and GPU; null where there are none."""
    total = size.sum().over(KEYS)
    return pl.when(total > 0).then(size / total)
