"""What each fault row, batch and migration is laid to: a piece of GPU work, the CPU, a call, or nothing.

Overlap in time within one process and GPU, and called that: unified-memory rows have no correlation id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import polars as pl

from nsan.analysis.attribution.work import (
    KEYS,
    REMAINDERS,
    WORK_READS,
    gpu_work,
    group_numbers,
    offsets,
    ran_during,
    running,
    shifted,
    with_group,
)
from nsan.analysis.driver.batches import BATCH_READS, batches
from nsan.analysis.driver.pushes import with_push_id
from nsan.analysis.driver.staging import MAX_TURN_NS
from nsan.analysis.intervals import union
from nsan.uvm.constants import CAUSE_COHERENCE, CAUSE_EVICTION, CAUSE_PREFETCH, CAUSE_USER

FAULT_READS: Final = BATCH_READS["gpu_faults"]
MIGRATION_READS: Final = BATCH_READS["migrations"]
READS: Final = {**BATCH_READS, **WORK_READS}

MAKES_ROOM_WITHIN_NS: Final = 1_000_000
"""A copy to the GPU that begins this soon after an eviction is what it made room for."""

_OUTCOMES: Final = ("data", "first_touch", "stale", "throttled")


@dataclass(frozen=True)
class Causes:
    """Faults and copies, each with what it is laid to.

    Attributes
    ----------
    groups : DataFrame
        ``pid``, ``device_id``, ``group``, ``offset_ns``, and ``recorded``: it has fault rows.
    work : DataFrame
        GPU work with ``group``, on the clock of faults.
    rows, batches, moved : DataFrame
        Fault rows, driver batches and migrations with ``group`` and ``running_id``.
    waits : DataFrame
        ``group``, ``start_ns``, ``end_ns``: when faults waited, as a union.
    """

    groups: pl.DataFrame
    work: pl.DataFrame
    rows: pl.DataFrame
    batches: pl.DataFrame
    moved: pl.DataFrame
    waits: pl.DataFrame


def causes(
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    kernels: pl.LazyFrame,
    copies: pl.LazyFrame,
    memsets: pl.LazyFrame,
) -> Causes:
    """Lay every fault row, batch and migration to what caused it.

    Parameters
    ----------
    gpu_faults, migrations : LazyFrame
        What happened. Rows without a start are left out.
    kernels, copies, memsets : LazyFrame
        What ran.

    Returns
    -------
    Causes
        With work on the clock of faults. Fault rows and batches belong to what ran during them
        (:func:`ran_during`). So do copies to a GPU, but prefetch calls' (cause user) to ``user_prefetch``. Evictions
        belong to what ran, or to the prefetch call if that brings the next copy within 1 ms; none where
        no fault of that GPU was waiting. Other copies to the CPU belong to ``cpu``.
    """
    work = gpu_work(kernels, copies, memsets)
    known = pl.col("start_ns").is_not_null()
    rows = gpu_faults.select(FAULT_READS).filter(known).collect()
    moved = migrations.select(MIGRATION_READS).filter(known).collect()
    groups = group_numbers(rows, moved, work)
    work, rows, moved = (with_group(frame, groups) for frame in (work, rows, moved))
    by_group = offsets(rows, moved, work, groups)
    groups = by_group.select(*KEYS, "group", "offset_ns").join(
        rows.select("group", recorded=pl.lit(value=True)).unique(),
        on="group",
        how="left",
        maintain_order="left",
    )
    groups = groups.with_columns(pl.col("recorded").fill_null(value=False))
    work = shifted(work, by_group)
    steps = running(work)
    served = _batches(gpu_faults, migrations, groups)
    waits = _waits(rows, served)
    return Causes(
        groups,
        work,
        ran_during(rows, steps),
        ran_during(served.rename({"raised_ns": "start_ns"}), steps),
        _laid(moved, steps, waits, groups),
        waits,
    )


def _batches(
    gpu_faults: pl.LazyFrame, migrations: pl.LazyFrame, groups: pl.DataFrame
) -> pl.DataFrame:
    """Give the driver batches that have a time, with one column per outcome."""
    outcome = pl.col("outcome").cast(pl.String)
    found = (
        batches(gpu_faults, migrations)
        .select(
            *KEYS,
            "end_ns",
            raised_ns=pl.coalesce("start_ns", "first_copy_ns"),
            **{f"n_{name}_batches": (outcome == name).fill_null(value=False) for name in _OUTCOMES},
        )
        .filter(pl.col("raised_ns").is_not_null())
        .collect()
    )
    return with_group(found, groups).with_columns(
        n_batches=pl.lit(value=True),
        n_other_batches=pl.any_horizontal(f"n_{name}_batches" for name in _OUTCOMES).not_(),
    )


def _waits(rows: pl.DataFrame, served: pl.DataFrame) -> pl.DataFrame:
    """Say when faults waited: the union of fault rows, or of batches where there are none."""
    columns = ("group", "start_ns", "end_ns")
    without = served.join(rows, on="group", how="anti").rename({"raised_ns": "start_ns"})
    spans = pl.concat([rows.select(columns), without.select(columns)])
    return union(spans.lazy(), by=["group"]).collect()


def _laid(
    moved: pl.DataFrame, steps: pl.DataFrame, waits: pl.DataFrame, groups: pl.DataFrame
) -> pl.DataFrame:
    """Lay each migration to its cause."""
    to_cpu, cause = pl.col("direction") == "dtoh", pl.col("cause_id")
    staged = _staged(moved, groups)
    timed = ran_during(_followed(staged.with_columns(group="of_group")), steps)
    timed = _waited(timed, waits).join(
        groups.select("group", "recorded"), on="group", how="left", maintain_order="left"
    )
    by_call = (cause == CAUSE_USER) | (
        (cause == CAUSE_EVICTION) & (pl.col("next_in") == CAUSE_USER)
    )
    by_cpu = to_cpu & cause.is_in([CAUSE_COHERENCE, CAUSE_PREFETCH]) & pl.col("staged").not_()
    unasked = (cause == CAUSE_EVICTION) & pl.col("recorded") & pl.col("waits").not_()
    laid = (
        pl.when(by_call)
        .then(REMAINDERS["user_prefetch"])
        .when(by_cpu)
        .then(REMAINDERS["cpu"])
        .when(unasked)
        .then(REMAINDERS["unattributed"])
        .otherwise("running_id")
    )
    return timed.with_columns(running_id=laid.cast(pl.Int64))


def _followed(moved: pl.DataFrame) -> pl.DataFrame:
    """Add the cause of the next copy to the same GPU, ``next_in``: what an eviction makes room for."""
    comes_in = pl.col("direction") != "dtoh"
    order = ["group", "start_ns", "end_ns", "va", "bytes"]
    following = pl.col("next_in", "next_ns").fill_null(strategy="backward").over("group")
    soon = pl.col("next_ns") - pl.col("end_ns") <= MAKES_ROOM_WITHIN_NS
    return (
        moved.sort(order)
        .with_columns(
            next_in=pl.when(comes_in).then(pl.col("cause_id").fill_null(-1)),
            next_ns=pl.when(comes_in).then("start_ns"),
        )
        .with_columns(following)
        .with_columns(next_in=pl.when(soon).then("next_in"))
        .drop("next_ns")
    )


def _waited(points: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Add ``waits``: a fault of the GPU waited at the start of the row. Rows are ordered by start."""
    return (
        points.join_asof(
            waits.select("group", _from="start_ns", _until="end_ns").sort("_from"),
            left_on="start_ns",
            right_on="_from",
            by="group",
            coalesce=False,
            check_sortedness=False,
        )
        .with_columns(waits=(pl.col("_until") > pl.col("start_ns")).fill_null(value=False))
        .drop("_from", "_until")
    )


def _staged(moved: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Find copies to the CPU that only pass through it on their way to another GPU.

    Adds ``staged``, and ``of_group``: the group of the GPU that the bytes go to at last.
    """
    plain = moved.with_columns(staged=pl.lit(value=False), of_group=pl.col("group"))
    if groups.select(pl.col("device_id").n_unique().over("pid").max()).item() in (None, 1):
        return plain
    caused = pl.col("cause_id").is_in([CAUSE_COHERENCE, CAUSE_PREFETCH])
    numbered = with_push_id(moved.lazy()).collect()
    passed = pl.col("start_ns") - pl.col("start_ns").min().over("push_id")
    back = numbered.with_columns(
        copy=pl.int_range(pl.len()), passed=passed, done_ns=pl.col("end_ns").max().over("push_id")
    ).filter((pl.col("direction") == "dtoh") & caused)
    onward = numbered.filter((pl.col("direction") == "htod") & caused)
    same = ["pid", "va", "bytes", "cause_id"]
    met = back.sort("done_ns").join_asof(
        onward.select(*same, to="group", onward_ns="start_ns").sort("onward_ns"),
        left_on="done_ns",
        right_on="onward_ns",
        by=same,
        strategy="forward",
        coalesce=False,
        check_sortedness=False,
    )
    # Its copy goes on at about the same place of the second push as it had in the first.
    soon = pl.col("onward_ns") - pl.col("done_ns") <= MAX_TURN_NS + 2 * pl.col("passed")
    met = met.filter(soon & (pl.col("to") != pl.col("group"))).select("copy", "to")
    found = (
        numbered.with_columns(copy=pl.int_range(pl.len()))
        .join(met, on="copy", how="left", maintain_order="left")
        .select(
            *moved.columns, staged=pl.col("to").is_not_null(), of_group=pl.coalesce("to", "group")
        )
    )
    return pl.concat([found, plain.filter(pl.col("va").is_null())])
