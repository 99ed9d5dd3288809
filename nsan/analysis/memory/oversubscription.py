"""Oversubscription: how much managed memory a program has against the room that its GPU has for it.

Managed memory belongs to a process, not to a GPU: every GPU of the process may have to hold all of
it, so each GPU's row counts all. What only the whole machine's GPUs must hold together has a figure
of its own.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.keeping import once
from nsan.analysis.memory.page_histories import closed
from nsan.analysis.memory.residency import resident_bytes_over_time
from nsan.analysis.result import DEVICE, PID, Result, derived, reconstructed
from nsan.uvm.constants import CAUSE_EVICTION, MANAGED_KINDS

RESERVE_BYTES: Final = 240_000_000
"""What a CUDA context takes of a GPU's memory, byte: a choice of ours (domain.md G)."""

DEVICE_KINDS: Final = ("device", "array", "device_static")
"""Kinds of memory that take room on a GPU and cannot be migrated."""

_READS: Final = {
    "allocations": ("alloc_ns", "free_ns", "pid", "device_id", "va", "bytes", "kind"),
    "migrations": (
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
    ),
    "devices": ("device_id", "pid", "total_memory_bytes"),
}
_CAPACITY: Final = derived(
    "capacity_bytes", pl.Int64, "byte", "Memory of the GPU, or as given; null: unknown."
)
_KEYS: Final = ("pid", "device_id")
_LEVELS: Final = ("managed_bytes", "other_bytes", "resident_bytes", "backfilled_bytes")

MEMORY_LEDGER: Final = Result(
    "memory_ledger",
    "one step: a stretch of time in which nothing of a GPU's memory is known to change",
    (
        PID,
        DEVICE,
        derived("start_ns", pl.Int64, "ns", "Start of the step."),
        derived("end_ns", pl.Int64, "ns", "End; null: the step lasts until the capture ends."),
        derived(
            "managed_bytes",
            pl.Int64,
            "byte",
            "Managed memory alive in the process; null: not recorded.",
        ),
        derived("other_bytes", pl.Int64, "byte", "Other memory alive on this GPU."),
        derived("resident_bytes", pl.Int64, "byte", "Managed data known to be on this GPU."),
        reconstructed(
            "backfilled_bytes",
            pl.Int64,
            "byte",
            "At most, more of them: first touched, seen to leave.",
        ),
        _CAPACITY,
        derived(
            "oversubscription_factor",
            pl.Float64,
            "number",
            "F1 now: managed / (capacity - other - reserve); null: unknown, or no room at all.",
        ),
    ),
)

OVERSUBSCRIPTION: Final = Result(
    "oversubscription_factor",
    "one GPU of one process",
    (
        PID,
        DEVICE,
        derived(
            "managed_peak_bytes",
            pl.Int64,
            "byte",
            "Most managed memory alive at a time; null: not recorded.",
        ),
        derived("other_peak_bytes", pl.Int64, "byte", "Most other memory alive on this GPU."),
        derived("resident_peak_bytes", pl.Int64, "byte", "Most managed data known to be here."),
        _CAPACITY,
        derived("available_bytes", pl.Int64, "byte", "Capacity less other peak and reserve."),
        derived(
            "oversubscription_factor",
            pl.Float64,
            "number",
            "F1: managed peak / available; 1 is exactly full.",
        ),
        derived("f2", pl.Float64, "number", "F2: managed peak / capacity."),
        derived(
            "f3",
            pl.Float64,
            "number",
            "F3: 1 - 1 / F1, the part of the footprint without room; 0 where all fits.",
        ),
        derived("f4", pl.Float64, "number", "F4: 1 / F1, room as a share of the footprint."),
        derived(
            "joint_oversubscription_factor",
            pl.Float64,
            "number",
            "Managed peak / what is available on all GPUs of the process together.",
        ),
        derived(
            "evicted_bytes", pl.Int64, "byte", "Evicted: more than 0 is proof of too little room."
        ),
        reconstructed(
            "observed_factor",
            pl.Float64,
            "number",
            "Managed peak / resident peak where pages were evicted, else null: F1 of the room that there "
            "really was is at most this.",
        ),
    ),
)


@analysis(
    question="What held the memory of each GPU over time?",
    result=MEMORY_LEDGER,
    reads=_READS,
    source="domain.md E-18, A.4",
    whole=True,
)
def memory_ledger(
    allocations: pl.LazyFrame,
    migrations: pl.LazyFrame,
    devices: pl.LazyFrame,
    *,
    reserve_bytes: int = RESERVE_BYTES,
    capacity_bytes: int = 0,
) -> pl.LazyFrame:
    """Put allocations, known residency and capacity of each GPU side by side over time.

    Parameters
    ----------
    allocations : LazyFrame, ``ALLOCATIONS``
        One row per allocation, in any order; memory from before the capture counts from its start.
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    devices : LazyFrame, ``DEVICES``
        Memory of each GPU.
    reserve_bytes : int, default 240_000_000
        What the program cannot use besides its own allocations, byte.
    capacity_bytes : int, default 0
        Memory of each GPU where it is not what ``devices`` says, as under a limit that no table
        shows, byte; 0 takes what ``devices`` says.

    Returns
    -------
    LazyFrame, ``MEMORY_LEDGER``
        One row per step, ordered by process, GPU and time; the steps of a GPU leave no gap. GPUs that
        neither a row nor an allocation names have none. Memory of other processes is not subtracted.

    Examples
    --------
    >>> from nsan.schema import ALLOCATIONS, DEVICES, MIGRATIONS
    >>> empty = ALLOCATIONS.empty(), MIGRATIONS.empty(), DEVICES.empty()
    >>> memory_ledger(*empty).collect().height
    0
    """
    room = pl.col("capacity_bytes") - pl.col("other_bytes") - reserve_bytes
    factor = pl.when(room > 0).then(pl.col("managed_bytes") / room)

    def build() -> pl.DataFrame:
        steps = _kept_levels(allocations, migrations)
        sized = _with_capacity(steps, devices.select(_READS["devices"]).collect(), capacity_bytes)
        return sized.with_columns(oversubscription_factor=factor).sort(*_KEYS, "start_ns")

    return MEMORY_LEDGER.from_rows(build)


@analysis(
    question="By how much does the program oversubscribe each GPU?",
    result=OVERSUBSCRIPTION,
    reads=_READS,
    source="domain.md E-18, A.4",
    whole=True,
)
def oversubscription_factor(
    allocations: pl.LazyFrame,
    migrations: pl.LazyFrame,
    devices: pl.LazyFrame,
    *,
    reserve_bytes: int = RESERVE_BYTES,
    capacity_bytes: int = 0,
) -> pl.LazyFrame:
    """Compare the peak of managed memory with the room for it, in the four ways that are in use.

    Parameters
    ----------
    allocations : LazyFrame, ``ALLOCATIONS``
        As in :func:`memory_ledger`.
    migrations : LazyFrame, ``MIGRATIONS``
        As in :func:`memory_ledger`.
    devices : LazyFrame, ``DEVICES``
        As in :func:`memory_ledger`.
    reserve_bytes : int, default 240_000_000
        As in :func:`memory_ledger`, byte.
    capacity_bytes : int, default 0
        As in :func:`memory_ledger`, byte.

    Returns
    -------
    LazyFrame, ``OVERSUBSCRIPTION``
        One row per process and GPU, ordered by both. Factors are null where memory is unknown or
        there is no room at all, F3 and F4 also where there is no managed memory.
    """

    def build() -> pl.DataFrame:
        peaks = (
            _kept_levels(allocations, migrations)
            .group_by(_KEYS)
            .agg(
                managed_peak_bytes=pl.col("managed_bytes").max(),
                other_peak_bytes=pl.col("other_bytes").max(),
                resident_peak_bytes=pl.col("resident_bytes").max(),
            )
        )
        evicts = (pl.col("direction") == "dtoh") & (pl.col("cause_id") == CAUSE_EVICTION)
        evicted = migrations.filter(evicts).group_by(_KEYS).agg(evicted_bytes=pl.col("bytes").sum())
        known = peaks.join(evicted.collect(), on=_KEYS, how="left", nulls_equal=True)
        sized = _with_capacity(known, devices.select(_READS["devices"]).collect(), capacity_bytes)
        return _factors(sized, reserve_bytes).sort(_KEYS)

    return OVERSUBSCRIPTION.from_rows(build)


def _factors(sized: pl.DataFrame, reserve_bytes: int) -> pl.DataFrame:
    managed, room = pl.col("managed_peak_bytes"), pl.col("available_bytes")
    f1 = pl.when(room > 0).then(managed / room)
    some = pl.when((room > 0) & (managed > 0))
    whole = pl.when(room.is_null().any().not_()).then(room.clip(0, None).sum()).over("pid")
    evicted = pl.col("evicted_bytes").fill_null(0)
    resident = pl.col("resident_peak_bytes")
    return sized.with_columns(
        available_bytes=pl.col("capacity_bytes") - pl.col("other_peak_bytes") - reserve_bytes,
        evicted_bytes=evicted,
    ).with_columns(
        oversubscription_factor=f1,
        f2=pl.when(pl.col("capacity_bytes") > 0).then(managed / pl.col("capacity_bytes")),
        f3=some.then((1 - room / managed).clip(0.0, None)),
        f4=some.then(room / managed),
        joint_oversubscription_factor=pl.when(whole > 0).then(managed / whole),
        observed_factor=pl.when((evicted > 0) & (resident > 0)).then(managed / resident),
    )


def _kept_levels(allocations: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.DataFrame:
    def build() -> pl.DataFrame:
        rows = allocations.select(_READS["allocations"]).collect()
        return _levels(rows, migrations.select(_READS["migrations"]))

    return once("memory levels", build, allocations, migrations)


def _levels(allocations: pl.DataFrame, migrations: pl.LazyFrame) -> pl.DataFrame:
    """Add up what is alive and resident, in steps per process and GPU."""
    resident = resident_bytes_over_time(migrations, allocations.lazy()).collect()
    other = _alive(allocations, DEVICE_KINDS, _KEYS, "other_bytes")
    managed = _alive(allocations, MANAGED_KINDS, ["pid"], "managed_bytes")
    named = [frame.select(_KEYS) for frame in (allocations, resident)]
    gpus = pl.concat(named).unique()
    changes = [
        managed.join(gpus, on="pid", how="inner", nulls_equal=True),
        other,
        resident.select(
            *_KEYS,
            "start_ns",
            *(
                (pl.col(name) - pl.col(name).shift(1).over(_KEYS).fill_null(0)).alias(name)
                for name in _LEVELS[2:]
            ),
        ),
    ]
    return (
        pl.concat([_of_levels(frame) for frame in changes])
        .with_columns(start_ns=pl.coalesce("start_ns", pl.col("start_ns").min().over("pid")))
        .group_by(*_KEYS, "start_ns")
        .agg(pl.col(_LEVELS).sum())
        .filter(pl.any_horizontal(pl.col(name) != 0 for name in _LEVELS))
        .sort(*_KEYS, "start_ns")
        .with_columns(
            *(pl.col(name).cum_sum().over(_KEYS) for name in _LEVELS),
            end_ns=pl.col("start_ns").shift(-1).over(_KEYS),
        )
        # A process without any managed allocation in the tables, but with migrations, has lost them.
        .join(
            managed.select("pid", _known=pl.lit(value=True)).unique(),
            on="pid",
            how="left",
            nulls_equal=True,
        )
        .with_columns(managed_bytes=pl.when("_known").then("managed_bytes"))
        .drop("_known")
    )


def _alive(
    allocations: pl.DataFrame, kinds: tuple[str, ...], by: list[str] | tuple[str, ...], name: str
) -> pl.DataFrame:
    """List by how much the bytes of some kinds of memory change, and when; null: from the start on."""
    mine = closed(allocations.filter(pl.col("kind").cast(pl.String).is_in(kinds)))
    # A release with nothing known before it still says that the memory was there until then.
    come = mine.select(*by, pl.col("bytes").alias(name), start_ns="alloc_ns")
    go = mine.drop_nulls("free_ns").select(*by, (-pl.col("bytes")).alias(name), start_ns="free_ns")
    return pl.concat([come, go])


def _of_levels(changes: pl.DataFrame) -> pl.DataFrame:
    absent = [pl.lit(0, pl.Int64).alias(name) for name in _LEVELS if name not in changes.columns]
    return changes.with_columns(absent).select(*_KEYS, "start_ns", *_LEVELS)


def _with_capacity(frame: pl.DataFrame, devices: pl.DataFrame, capacity_bytes: int) -> pl.DataFrame:
    """Add each GPU's memory: as given, as the process sees it, or as any process does."""
    if capacity_bytes > 0:
        return frame.with_columns(capacity_bytes=pl.lit(capacity_bytes, pl.Int64))
    sizes = devices.select(*_KEYS, size="total_memory_bytes").sort("device_id", "pid", "size")
    own = sizes.drop_nulls("pid").unique(_KEYS, keep="first", maintain_order=True)
    any_one = sizes.filter(pl.col("pid").is_null()).unique(
        "device_id", keep="first", maintain_order=True
    )
    return (
        frame.join(own, on=_KEYS, how="left")
        .join(any_one.select("device_id", anywhere="size"), on="device_id", how="left")
        .with_columns(capacity_bytes=pl.coalesce("size", "anywhere"))
        .drop("size", "anywhere")
    )
