"""What charts of memory draw: levels over time in few stretches, and how soon evicted pages come back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.memory.oversubscription import RESERVE_BYTES, memory_ledger
from nsan.analysis.memory.refaults import refaults
from nsan.analysis.result import DEVICE, PID, Result, derived, reconstructed
from nsan.units import KIB

_KEYS: Final = ("pid", "device_id")
_LEDGER_LEVELS: Final = (
    *("managed_bytes", "other_bytes", "resident_bytes", "backfilled_bytes", "capacity_bytes"),
)
_LEDGER_READS: Final = {
    "allocations": ("alloc_ns", "free_ns", "pid", "device_id", "va", "bytes", "kind"),
    "migrations": (
        *("start_ns", "end_ns", "pid", "device_id", "va", "bytes", "direction", "cause_id"),
        *("src_device_id", "sequence"),
    ),
    "devices": ("device_id", "pid", "total_memory_bytes"),
}
_REFAULT_READS: Final = {
    "migrations": _LEDGER_READS["migrations"],
    "allocations": ("alloc_ns", "free_ns", "pid", "va", "bytes", "kind"),
}

MEMORY_OVER_TIME: Final = Result(
    "memory_over_time",
    "one stretch of time of one GPU, with the most that each level came to in it",
    (
        PID,
        DEVICE,
        derived("start_ns", pl.Int64, "ns", "Start of the stretch."),
        derived("end_ns", pl.Int64, "ns", "End; null: it lasts until the capture ends."),
        derived("managed_bytes", pl.Int64, "byte", "Managed memory alive; null: not recorded."),
        derived("other_bytes", pl.Int64, "byte", "Other memory alive on this GPU."),
        derived("resident_bytes", pl.Int64, "byte", "Managed data known to be on this GPU."),
        reconstructed("backfilled_bytes", pl.Int64, "byte", "At most, more: first touched."),
        derived("capacity_bytes", pl.Int64, "byte", "Memory of the GPU, or as given."),
        derived("least_resident_bytes", pl.Int64, "byte", "Least of `resident_bytes` in it."),
        derived("n_steps", pl.Int64, "steps", "Steps of `memory_ledger` that reach into it."),
    ),
    nothing="The capture names no memory: neither an allocation nor a migration.",
)

MEASURE: Final = pl.Enum(["time", "bytes"])

REFAULT_DISTANCES: Final = Result(
    "refault_distances",
    "refaults of one GPU whose distance is in one class, by time or by bytes moved in between",
    (
        PID,
        DEVICE,
        derived("measure", MEASURE, "label", "What the class is of: each refault counts in both."),
        derived("min_ns", pl.Int64, "ns", "Shortest distance of the class; null: by bytes."),
        derived("min_bytes", pl.Int64, "byte", "Least bytes of the class; null: by time."),
        derived("bytes", pl.Int64, "byte", "Evicted bytes that came back in this class."),
        derived("by_fault_bytes", pl.Int64, "byte", "Of these by faults; null: no causes known."),
        derived("n_runs", pl.Int64, "runs", "Runs of pages, as of `refaults`."),
    ),
    nothing="Nothing that was evicted came back.",
)


@analysis(
    question="How near was each GPU's memory to being full over time, in steps that a chart can show?",
    result=MEMORY_OVER_TIME,
    reads=_LEDGER_READS,
    source="domain.md E-18, E-11",
    whole=True,
)
def memory_over_time(
    allocations: pl.LazyFrame,
    migrations: pl.LazyFrame,
    devices: pl.LazyFrame,
    *,
    n_columns: int = 300,
    reserve_bytes: int = RESERVE_BYTES,
    capacity_bytes: int = 0,
) -> pl.LazyFrame:
    """Put the steps of the memory ledger into few stretches of time, keeping every peak.

    Parameters
    ----------
    allocations, migrations, devices : LazyFrame
        As in :func:`nsan.analysis.memory.oversubscription.memory_ledger`.
    n_columns : int, default 300
        Most stretches for a GPU, fewer where there are more than 15 GPUs. A GPU with fewer steps keeps
        them as they are.
    reserve_bytes : int, default 240_000_000
        As in the ledger, byte.
    capacity_bytes : int, default 0
        As in the ledger, byte.

    Returns
    -------
    LazyFrame, ``MEMORY_OVER_TIME``
        Ordered by process, GPU and time; the stretches of a GPU leave no gap. The most of a level over
        all stretches is the most of it over all steps.
    """
    sizes = {"reserve_bytes": reserve_bytes, "capacity_bytes": capacity_bytes}

    def build() -> pl.DataFrame:
        steps = memory_ledger(allocations, migrations, devices, **sizes).collect()
        most = columns_for(steps.select(_KEYS).unique().height, n_columns)
        return thinned_levels(steps, _KEYS, _LEDGER_LEVELS, least=["resident_bytes"], most=most)

    return MEMORY_OVER_TIME.from_rows(build)


def columns_for(n_parts: int, wanted: int, *, rows: int = 4500) -> int:
    """Choose how many columns each of several parts may have, so that a chart can hold all rows.

    Parameters
    ----------
    n_parts : int
        Parts, each of as many columns.
    wanted : int
        Columns that one part would have.
    rows : int, default 4500
        Rows that all parts may have together.

    Returns
    -------
    int
        At least 1, at most ``wanted``.
    """
    return max(min(wanted, rows // max(n_parts, 1)), 1)


def thinned_levels(
    steps: pl.DataFrame,
    keys: Sequence[str],
    levels: Sequence[str],
    *,
    least: Iterable[str] = (),
    most: int = 300,
) -> pl.DataFrame:
    """Show step functions in few stretches of equal length, each with the most of every level in it.

    Parameters
    ----------
    steps : DataFrame
        One row per step: ``keys``, ``start_ns`` (Int64, never null), ``levels``; a step lasts until the
        next one of the same keys. Steps with the same start count in their order.
    keys : sequence of str
        Columns that keep functions apart.
    levels : sequence of str
        Columns of levels (Int64).
    least : iterable of str
        Levels of which the least is wanted too, as ``least_<name>``.
    most : int, default 300
        Stretches at most; a function of fewer steps is kept as it is.

    Returns
    -------
    DataFrame
        ``keys``, ``start_ns``, ``end_ns`` (null: the last), ``levels``, the least ones and ``n_steps``
        (Int64), ordered by ``keys`` and start.
    """
    least = list(least)
    lows = [pl.col(name).alias(f"least_{name}") for name in least]
    ordered = steps.sort(*keys, "start_ns", maintain_order=True)
    # Several changes at one instant leave one level, the last.
    ordered = ordered.unique([*keys, "start_ns"], keep="last", maintain_order=True)
    small = pl.len().over(keys) <= most
    next_start = pl.col("start_ns").shift(-1).over(keys)
    names = [*keys, "start_ns", "end_ns", *levels, *(f"least_{name}" for name in least), "n_steps"]
    exact = ordered.filter(small).with_columns(
        *lows, end_ns=next_start, n_steps=pl.lit(1, pl.Int64)
    )
    rest = ordered.filter(~small)
    return pl.concat(
        [exact.select(names), _columns(rest, keys, levels, least, most).select(names)]
    ).sort(*keys, "start_ns")


def _columns(
    steps: pl.DataFrame, keys: Sequence[str], levels: Sequence[str], least: list[str], most: int
) -> pl.DataFrame:
    """Cut the time of each function into columns and take the most of what reaches into each."""
    start = pl.col("start_ns")
    span = start.max().over(keys) - start.min().over(keys)
    width = pl.max_horizontal((span // most) + 1, pl.lit(1))
    placed = steps.with_columns(
        _first=start.min().over(keys),
        _width=width,
        column=(start - start.min().over(keys)) // width,
    )
    changes = placed.group_by(*keys, "column", maintain_order=True).agg(
        *(pl.col(name).max() for name in levels),
        *(pl.col(name).min().alias(f"least_{name}") for name in least),
        *(pl.col(name).last().alias(f"_last_{name}") for name in levels),
        n_steps=pl.len().cast(pl.Int64),
        _begin=start.min(),
    )
    grid = (
        placed.unique(list(keys), keep="first", maintain_order=True)
        .select(*keys, "_first", "_width")
        .join(pl.DataFrame({"column": range(most)}, schema={"column": pl.Int64}), how="cross")
    )
    on = [*keys, "column"]
    joined = grid.join(changes, on=on, how="left", nulls_equal=True, maintain_order="left")
    return _with_carried(joined, keys, levels, least).with_columns(
        end_ns=pl.when(pl.col("column") < most - 1).then(pl.col("start_ns") + pl.col("_width"))
    )


def _with_carried(
    columns: pl.DataFrame, keys: Sequence[str], levels: Sequence[str], least: list[str]
) -> pl.DataFrame:
    """Put in what a column begins with: the last level of the columns before it."""
    edge = pl.col("_first") + pl.col("column") * pl.col("_width")
    # A step that begins at the very edge leaves none of the one before it in the column.
    reaches = pl.col("_begin").is_null() | (pl.col("_begin") > edge)
    carried = {
        name: pl.when(reaches).then(pl.col(f"_last_{name}").forward_fill().shift(1).over(keys))
        for name in levels
    }
    lows = [pl.min_horizontal(f"least_{name}", carried[name]) for name in least]
    return columns.with_columns(
        *(pl.max_horizontal(name, value).alias(name) for name, value in carried.items()),
        *(low.alias(f"least_{name}") for name, low in zip(least, lows, strict=True)),
        start_ns=edge,
        n_steps=pl.col("n_steps").fill_null(0) + reaches.cast(pl.Int64),
    )


_TIME_EDGES: Final = (0, *(step * 10**power for power in range(13) for step in (1, 2, 5)))
_BYTE_EDGES: Final = (0, *(4 * KIB << power for power in range(40)))


@analysis(
    question="How soon do evicted pages come back, in time and in bytes moved in between?",
    result=REFAULT_DISTANCES,
    reads=_REFAULT_READS,
    source="domain.md E-12",
    whole=True,
)
def refault_distances(migrations: pl.LazyFrame, allocations: pl.LazyFrame) -> pl.LazyFrame:
    """Sort refaults into classes of distance.

    Parameters
    ----------
    migrations, allocations : LazyFrame
        As in :func:`nsan.analysis.memory.refaults.refaults`.

    Returns
    -------
    LazyFrame, ``REFAULT_DISTANCES``
        By process, GPU, measure and class. Classes of time begin at 0, 1, 2, 5, 10, 20, ... ns, those of
        bytes at 0, 4 KiB, 8 KiB and so on. Classes between two others, and three on either side, are there
        with 0 bytes. Bytes of each measure add up to those of :func:`nsan.analysis.memory.refaults.refault_totals`.
    """

    def build() -> pl.DataFrame:
        back = refaults(migrations, allocations).filter("is_same_device").collect()
        parts = [
            _classes(back, "distance_ns", "min_ns", "time", _TIME_EDGES),
            _classes(back, "distance_bytes", "min_bytes", "bytes", _BYTE_EDGES),
        ]
        order = (*_KEYS, "measure", "min_ns", "min_bytes")
        return pl.concat(parts, how="diagonal").sort(order)

    return REFAULT_DISTANCES.from_rows(build)


def _classes(
    back: pl.DataFrame, distance: str, low: str, measure: str, edges: tuple[int, ...]
) -> pl.DataFrame:
    """Add up the bytes of each class, and fill the classes between the outermost ones."""
    bounds = pl.Series(edges, dtype=pl.Int64)
    place = bounds.search_sorted(back[distance].clip(0, None), side="right").cast(pl.Int64) - 1
    size, faulted = pl.col("bytes"), pl.col("is_by_fault")
    sums = (
        back.with_columns(place=place)
        .group_by(*_KEYS, "place")
        .agg(
            pl.col("bytes").sum(),
            by_fault_bytes=pl.when(faulted.null_count() == 0).then(size.filter(faulted).sum()),
            n_runs=pl.len().cast(pl.Int64),
        )
    )
    # A few empty classes around a lone one show that it is one of many.
    first = pl.max_horizontal(pl.col("place").min() - 3, pl.lit(0, pl.Int64))
    last = pl.min_horizontal(pl.col("place").max() + 3, pl.lit(len(edges) - 1, pl.Int64))
    grid = sums.group_by(_KEYS).agg(
        place=pl.int_ranges(first, last + 1, dtype=pl.Int64).explode(),
        _known=pl.col("by_fault_bytes").null_count() == 0,
    )
    filled = grid.explode("place").join(
        sums, on=[*_KEYS, "place"], how="left", nulls_equal=True, maintain_order="left"
    )
    return filled.select(
        *_KEYS,
        pl.lit(measure, MEASURE).alias("measure"),
        bounds.gather(filled["place"]).alias(low),
        pl.col("bytes", "n_runs").fill_null(0),
        by_fault_bytes=pl.when("_known")
        .then(pl.col("by_fault_bytes").fill_null(0))
        .otherwise("by_fault_bytes"),
    )
