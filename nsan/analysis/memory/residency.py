"""Residency: which pages a GPU held, from when until when, as far as migrations tell.

A copy counts from its end on: at the destination the data are complete then, and the source keeps
its memory until then. What leaves no row is not here: pages that the GPU touched first and that have
not left since, copies that read duplication keeps or drops, clean evictions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.memory.page_histories import gpus_of, in_time_order, pieces_of, with_life
from nsan.analysis.result import DEVICE, KIND, PID, Result, derived, reconstructed
from nsan.uvm.constants import CAUSE_EVICTION

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

ARRIVAL: Final = pl.Enum(["copied", "first_touch", "kept"])
DEPARTURE: Final = pl.Enum(["moved", "evicted", "freed", "unseen", "capture_end"])

_MIGRATIONS: Final = (
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
_ALLOCATIONS: Final = ("alloc_ns", "free_ns", "pid", "va", "bytes", "kind")
_READS: Final = {"migrations": _MIGRATIONS, "allocations": _ALLOCATIONS}

RESIDENCY_RUNS: Final = Result(
    "residency_runs",
    "one stretch of pages that stayed on one GPU for one stretch of time",
    (
        PID,
        DEVICE,
        derived("va", pl.UInt64, "byte address", "Lowest byte of the stretch."),
        derived("bytes", pl.Int64, "byte", "Its size."),
        derived(
            "arrive_ns",
            pl.Int64,
            "ns",
            "Resident from here on: end of the copy that brought it. Null: unknown (first touch).",
        ),
        derived(
            "leave_ns",
            pl.Int64,
            "ns",
            "Until here: end of the copy that took it, or release of the memory; for `unseen` the "
            "latest possible time. Null: not before the capture ends.",
        ),
        derived(
            "arrival",
            ARRIVAL,
            "label",
            "Copied; first_touch: it left without having come; kept: it left twice, so the first copy "
            "left a duplicate here.",
        ),
        derived(
            "departure",
            DEPARTURE,
            "label",
            "Moved by a copy, evicted, freed, unseen (it came again without having left) or "
            "capture_end.",
        ),
        derived(
            "begin_ns",
            pl.Int64,
            "ns",
            "Allocation of the memory; null: before the capture, or unknown.",
        ),
        derived(
            "kind",
            KIND,
            "label",
            "derived: both ends are rows; reconstructed: an end is an inference.",
        ),
    ),
)

RESIDENT_BYTES: Final = Result(
    "resident_bytes_over_time",
    "one step: a stretch of time in which the known residency of a GPU does not change",
    (
        PID,
        DEVICE,
        derived("start_ns", pl.Int64, "ns", "Start of the step."),
        derived("end_ns", pl.Int64, "ns", "End; null: the step lasts until the capture ends."),
        derived("resident_bytes", pl.Int64, "byte", "Resident for sure, but for read duplication."),
        reconstructed(
            "backfilled_bytes",
            pl.Int64,
            "byte",
            "Bytes that leave later without having come: first touched by this GPU at an unknown "
            "time, counted from the allocation of their memory on, so at most this many.",
        ),
    ),
)

RESIDENCY_CHECKS: Final = Result(
    "residency_checks",
    "one GPU of one process: how far its rows fit together",
    (
        PID,
        DEVICE,
        derived("copied_bytes", pl.Int64, "byte", "Came by a copy."),
        derived("first_touch_bytes", pl.Int64, "byte", "Left without having come: back-filled."),
        derived(
            "kept_bytes", pl.Int64, "byte", "Left again without having come: a kept duplicate."
        ),
        derived("moved_bytes", pl.Int64, "byte", "Left by a copy that is no eviction."),
        derived("evicted_bytes", pl.Int64, "byte", "Left by an eviction."),
        derived("freed_bytes", pl.Int64, "byte", "Ended with their memory."),
        derived("unseen_bytes", pl.Int64, "byte", "Came again without having left."),
        derived("capture_end_bytes", pl.Int64, "byte", "Still there when the capture ends."),
        derived(
            "inconsistent_bytes",
            pl.Int64,
            "byte",
            "`kept_bytes` and `unseen_bytes`: read duplication, lost rows, or an unknown release.",
        ),
        derived("total_bytes", pl.Int64, "byte", "All stretches: the sum of all ways in, and out."),
    ),
)


@analysis(
    question="Which pages did each GPU hold, from when until when?",
    result=RESIDENCY_RUNS,
    reads=_READS,
    source="domain.md E-11",
    whole=True,
)
def residency_runs(migrations: pl.LazyFrame, allocations: pl.LazyFrame) -> pl.LazyFrame:
    """Follow every page onto each GPU and off it again.

    Without read-mostly advice and lost rows, the runs that have an ``arrive_ns`` are what was
    resident less the pages that the GPU touched first and that a copy did not bring since. With
    read-mostly advice a run may be too long (the driver drops duplicates without a row) or too short
    (the source of a copy keeps a duplicate, which shows only when it is copied again).

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    allocations : LazyFrame, ``ALLOCATIONS``
        Ends the residency of memory that is released: a VA block, when the last allocation in it is.
        Without them reused addresses seem resident until they are copied again.

    Returns
    -------
    LazyFrame, ``RESIDENCY_RUNS``
        One row per run of pages that one copy brought and one copy took, ordered by process, GPU,
        these copies (unknown ones first) and address. Stays of a page on a GPU do not overlap.

    Examples
    --------
    >>> from nsan.schema import ALLOCATIONS, MIGRATIONS
    >>> residency_runs(MIGRATIONS.empty(), ALLOCATIONS.empty()).collect().height
    0
    """
    frames = [migrations.select(_MIGRATIONS), allocations.select(_ALLOCATIONS)]

    def build() -> pl.DataFrame:
        rows, allocated = pl.collect_all(frames)
        return _runs(rows, allocated)

    return RESIDENCY_RUNS.from_rows(build)


@analysis(
    question="How much of each GPU's memory was known to hold managed data?",
    result=RESIDENT_BYTES,
    reads=_READS,
    source="domain.md E-11",
    whole=True,
)
def resident_bytes_over_time(migrations: pl.LazyFrame, allocations: pl.LazyFrame) -> pl.LazyFrame:
    """Add up the known residency of each GPU over time.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    allocations : LazyFrame, ``ALLOCATIONS``
        As in :func:`residency_runs`.

    Returns
    -------
    LazyFrame, ``RESIDENT_BYTES``
        One row per step, ordered by process, GPU and time; the steps of a GPU leave no gap.
        ``resident_bytes`` is a lower bound where there is no read-mostly advice.
    """
    return RESIDENT_BYTES.from_rows(lambda: _steps(residency_runs(migrations, allocations)))


@analysis(
    question="How far can the residency be trusted?",
    result=RESIDENCY_CHECKS,
    reads=_READS,
    source="domain.md E-11",
    whole=True,
)
def residency_checks(migrations: pl.LazyFrame, allocations: pl.LazyFrame) -> pl.LazyFrame:
    """Count how pages came to each GPU and left it, and what does not fit together.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    allocations : LazyFrame, ``ALLOCATIONS``
        As in :func:`residency_runs`.

    Returns
    -------
    LazyFrame, ``RESIDENCY_CHECKS``
        One row per process and GPU, ordered by both. A page counts once per stay.
    """
    size, ways = pl.col("bytes"), {"arrival": ARRIVAL, "departure": DEPARTURE}
    return (
        residency_runs(migrations, allocations)
        .group_by("pid", "device_id")
        .agg(
            *(
                size.filter(pl.col(side) == way).sum().alias(f"{way}_bytes")
                for side, labels in ways.items()
                for way in labels.categories
            ),
            total_bytes=size.sum(),
        )
        .with_columns(inconsistent_bytes=pl.col("kept_bytes") + pl.col("unseen_bytes"))
        .sort("pid", "device_id")
        .select(RESIDENCY_CHECKS.cast())
    )


def _runs(migrations: pl.DataFrame, allocations: pl.DataFrame) -> pl.DataFrame:
    import numpy as np

    rows = with_life(in_time_order(migrations), allocations)
    gpus, comes_to, goes_from = gpus_of(rows)
    pieces, n = pieces_of(rows), max(rows.height, 1)
    # One number per event sorts the history of each page on each GPU.
    events = []
    for gpu, comes in ((goes_from, 0), (comes_to, 1)):
        of = gpu[pieces.row]
        one = of >= 0
        place = pieces.segment[one] * gpus.height + of[one]
        events.append(place * 2 * n + pieces.row[one] * 2 + comes)
    place, event = np.divmod(np.sort(np.concatenate(events)), 2 * n)
    life = rows["life"].to_numpy()[event // 2]
    with_next = np.zeros(len(event), bool)
    with_next[:-1] = (place[1:] == place[:-1]) & (life[1:] == life[:-1])
    brought, took, kept = _both_ends(event, with_next)
    place = place[kept]
    gpu, segment = place % max(gpus.height, 1), place // max(gpus.height, 1)
    key = (gpu * (n + 1) + brought + 1) * (n + 1) + took + 1
    first, size, va = pieces.stretches(key, segment)
    found = {"gpu": gpu[first], "brought": brought[first], "took": took[first]}
    return _described(pl.DataFrame({**found, "va": va, "bytes": size}), rows, gpus, comes_to)


def _both_ends(event: Ints, with_next: NDArray[np.bool_]) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Pair events of a page into stays: the row that brought it and the one that took it, or -1.

    An event is twice its row, and one more for an arrival; ``with_next`` says that the next one is of
    the same page. A stay is told by its arrival, or by a departure without one.
    """
    import numpy as np

    row, comes = event // 2, event % 2 == 1
    with_before = np.roll(with_next, 1)
    brought = np.where(comes, row, np.where(with_before, np.roll(row, 1), -1))
    took = np.where(comes & ~with_next, -1, np.where(comes, np.roll(row, -1), row))
    kept = comes | ~(with_before & np.roll(comes, 1))
    return brought[kept], took[kept], kept


def _described(
    stays: pl.DataFrame, rows: pl.DataFrame, gpus: pl.DataFrame, comes_to: Ints
) -> pl.DataFrame:
    """Say of each stay when and how it began and ended."""
    brought, took = (
        stays.select(pl.when(pl.col(side) >= 0).then(side))[side] for side in ("brought", "took")
    )
    either, to = brought.fill_null(took), pl.Series(comes_to, dtype=pl.Int64)
    evicts = rows["cause_id"] == CAUSE_EVICTION
    known = stays.select(
        "va",
        "bytes",
        *(gpus[name].gather(stays["gpu"]) for name in ("pid", "device_id")),
        *(rows[name].gather(either) for name in ("begin_ns", "free_ns")),
        arrive_ns=rows["end_ns"].gather(brought),
        taken_ns=rows["end_ns"].gather(took),
        copied=(to.gather(brought) == stays["gpu"]),
        again=(to.gather(took) == stays["gpu"]).fill_null(value=False),
        evicted=evicts.gather(took).fill_null(value=False),
    )
    leave = pl.coalesce("taken_ns", "free_ns")
    certain = (pl.col("arrival") == "copied") & (pl.col("departure") != "unseen")
    return known.with_columns(
        # Where starts are coarse, or clocks differ, an end may come before its beginning.
        leave_ns=pl.when(leave.is_not_null()).then(pl.max_horizontal(leave, "arrive_ns")),
        arrival=pl.when("copied")
        .then(pl.lit("copied"))
        .when(pl.col("copied").is_null())
        .then(pl.lit("first_touch"))
        .otherwise(pl.lit("kept"))
        .cast(ARRIVAL),
        departure=pl.when("again")
        .then(pl.lit("unseen"))
        .when("evicted")
        .then(pl.lit("evicted"))
        .when(pl.col("taken_ns").is_not_null())
        .then(pl.lit("moved"))
        .when(pl.col("free_ns").is_not_null())
        .then(pl.lit("freed"))
        .otherwise(pl.lit("capture_end"))
        .cast(DEPARTURE),
    ).with_columns(kind=pl.when(certain).then(pl.lit("derived")).otherwise(pl.lit("reconstructed")))


def _steps(runs: pl.LazyFrame) -> pl.DataFrame:
    """Add up changes at each time; a run without an end does not leave."""
    rows = runs.collect()
    keys, names = ["pid", "device_id"], ["resident_bytes", "backfilled_bytes"]
    known = pl.col("arrival") != "first_touch"
    earliest = pl.min_horizontal("arrive_ns", "leave_ns").min().over("pid")
    begins = pl.when(known).then("arrive_ns").otherwise(pl.coalesce("begin_ns", earliest))
    sizes = [
        pl.when(one).then("bytes").otherwise(0).alias(name)
        for one, name in zip((known, ~known), names, strict=True)
    ]
    comes = rows.select(*keys, *sizes, start_ns=begins)
    goes = rows.filter(pl.col("leave_ns").is_not_null()).select(
        *keys, *(-size for size in sizes), start_ns="leave_ns"
    )
    return (
        pl.concat([comes, goes])
        .group_by(*keys, "start_ns")
        .agg(pl.col(name).sum() for name in names)
        .filter(pl.any_horizontal(pl.col(name) != 0 for name in names))
        .sort(*keys, "start_ns")
        .with_columns(
            *(pl.col(name).cum_sum().over(keys) for name in names),
            end_ns=pl.col("start_ns").shift(-1).over(keys),
        )
    )
