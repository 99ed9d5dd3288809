"""The join: which tensor every fault and every migrated byte belongs to, and what it was then.

Everything is joined in whole entries of the history, never in times: a time only decides how many entries
were done (:mod:`nsan.analysis.pca.stream_order`), and addresses decide the rest
(:mod:`nsan.analysis.pca.holders`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from nsan.analysis.allocator.replayed import told
from nsan.analysis.driver.batches import BATCH_READS, batches, with_batch_id
from nsan.analysis.keeping import handed
from nsan.analysis.pca.clock import Clock, Moments, clock_fits, clock_of
from nsan.analysis.pca.coverage import bounded
from nsan.analysis.pca.history import (
    History,
    histories_of_snapshot,
    histories_of_trace,
    with_program,
)
from nsan.analysis.pca.lookup import placed
from nsan.analysis.pca.staleness import with_use
from nsan.analysis.pca.stream_order import BETWEEN, RULE, launches_of, rule_of
from nsan.analysis.pca.tables import (
    CLOCK_FITS,
    PROCESSOR,
    TENSOR_FAULTS,
    TENSOR_LIVES,
    TENSOR_MOVES,
)
from nsan.errors import NotAlignedError
from nsan.uvm.constants import MANAGED_KINDS


@dataclass(frozen=True)
class JoinInput:
    """What is joined.

    Attributes
    ----------
    trace : mapping of str to LazyFrame
        Tables of a trace.
    snapshot : mapping of str to LazyFrame, optional
        Tables of a memory snapshot. None: there is no cache, and every managed allocation of the trace is
        a tensor of its own.
    session_start_utc_ns : int, optional
        Wall time at which the session of the trace began.
    """

    trace: Mapping[str, pl.LazyFrame]
    snapshot: Mapping[str, pl.LazyFrame] | None
    session_start_utc_ns: int | None


def join(found: JoinInput) -> dict[str, pl.DataFrame]:
    """Join a trace with the history of the allocator whose memory it is about.

    Parameters
    ----------
    found : JoinInput
        Trace and snapshot of one run.

    Returns
    -------
    dict of str to DataFrame
        ``JOINED_TABLES`` by name. ``tensor_moves`` is ordered by migration and address, and its parts add
        up to the migrations byte by byte; ``tensor_faults`` has one row per fault row, ordered by start;
        ``tensor_lives`` is ordered by ``tensor_id``. Nothing of the input is changed.

    Raises
    ------
    NotAlignedError
        If the snapshot is of another run, or nothing says which process wrote it.

    Notes
    -----
    O((n + m) log n) for n entries and m migrations and fault rows, and the parts they are cut into; the
    replay and the walk through the history are loops.
    """
    trace = {name: handed(table, ["*"]) for name, table in found.trace.items()}
    fits, clock, histories = _histories(found)
    launches = launches_of(trace)
    if clock is not None:
        rows = trace["allocations"].collect()
        histories = bounded(histories, launches, rows, clock.residual_max_ns)
    moves, reused = placed(histories, _as_of_batch(launches.with_moments(_moves(trace))))
    faults, _ = placed(histories, launches.with_moments(_faults(trace)))
    lives = _lives(found, histories, reused, clock)
    return {
        CLOCK_FITS.name: fits,
        TENSOR_LIVES.name: lives.select(TENSOR_LIVES.cast()),
        TENSOR_MOVES.name: with_use(moves).sort("migration", "va").select(TENSOR_MOVES.cast()),
        TENSOR_FAULTS.name: faults.sort("start_ns", "_row").select(TENSOR_FAULTS.cast()),
    }


# Histories --------------------------------------------------------------------------------------


def _histories(found: JoinInput) -> tuple[pl.DataFrame, Clock | None, list[History]]:
    """Read the histories, on the trace's clock."""
    allocations = found.trace["allocations"]
    if found.snapshot is None:
        nothing = CLOCK_FITS.empty().collect()
        return nothing, None, histories_of_trace(allocations.collect())
    tables = {
        **{name: found.trace[name] for name in _TRACE_MOMENTS},
        **{name: found.snapshot[name] for name in ("allocator_events", "annotations")},
    }
    frames = dict(zip(tables, pl.collect_all(tables.values()), strict=True))
    if told(frames["allocator_events"]).is_empty():
        raise NotAlignedError(NotAlignedError.NO_HISTORY)
    moments = Moments(**frames, session_start_utc_ns=found.session_start_utc_ns)
    fits = clock_fits(moments)
    clock = clock_of(fits)
    pid = _process(found.trace) if clock.pid is None else clock.pid
    return fits, clock, histories_of_snapshot(found.snapshot, clock, pid)


_TRACE_MOMENTS: Final = ("allocations", "nvtx_ranges", "nvtx_marks", "api_calls")


def _process(trace: Mapping[str, pl.LazyFrame]) -> int | None:
    """Choose the process of the snapshot: the only one with managed memory."""
    managed = pl.col("kind").cast(pl.String).is_in(MANAGED_KINDS)
    for rows in (trace["allocations"].filter(managed), trace["migrations"], trace["gpu_faults"]):
        found = rows.select(pl.col("pid").unique().sort()).collect()["pid"]
        pids: list[int | None] = found.to_list()
        if len(pids) > 1:
            msg = f"{len(pids)} processes have managed memory, and nothing says which of them wrote it"
            raise NotAlignedError(msg)
        if pids:
            return pids[0]
    return None


def _lives(
    found: JoinInput, histories: Sequence[History], reused: pl.DataFrame, clock: Clock | None
) -> pl.DataFrame:
    """List the tensors of all histories, with where they were allocated."""
    tensors = [history.tensors.select(_OF_HISTORY) for history in histories]
    schema = pl.Schema({name: TENSOR_LIVES.schema[name] for name in _OF_HISTORY})
    lives = pl.concat([pl.DataFrame(schema=schema), *(each.cast(schema) for each in tensors)])
    ranges = found.trace["nvtx_ranges"].collect()
    named = with_program(lives, found.snapshot, ranges, clock)
    return named.join(reused, on="tensor_id", how="left", maintain_order="left")


_OF_HISTORY: Final = (
    *("pid", "device_id", "tensor_id", "va", "block_bytes", "requested_bytes", "segment_va"),
    *("segment_bytes", "alloc_sequence", "free_requested_sequence", "free_sequence", "alloc_ns"),
    *("free_ns", "pool", "stream", "stack_id"),
)

# Events -----------------------------------------------------------------------------------------


def _moves(trace: Mapping[str, pl.LazyFrame]) -> pl.DataFrame:
    """List the migrations in the order of the trace, with their batch and how they find their moment."""
    keys = BATCH_READS["migrations"]
    # Rows that agree in all of these are of the same batch.
    ids = with_batch_id(trace["gpu_faults"], trace["migrations"]).select(*keys, "batch_id")
    return (
        trace["migrations"]
        .collect()
        .join(
            ids.collect().unique(keys, keep="first"),
            on=keys,
            how="left",
            nulls_equal=True,
            maintain_order="left",
        )
        .with_columns(rule=rule_of(), migration=pl.int_range(pl.len(), dtype=pl.Int64))
    )


def _as_of_batch(moves: pl.DataFrame) -> pl.DataFrame:
    """Give first legs of copies between two GPUs the moment of the second: a GPU asked for both."""
    columns = ["moment_ns", "order", *BETWEEN]
    by_batch = (
        moves.filter(pl.col("rule") == "fault", pl.col("batch_id").is_not_null())
        .group_by("batch_id")
        .agg(pl.col(columns).sort_by("start_ns").first().name.suffix("_on"))
    )
    is_leg = (pl.col("rule") == "host") & pl.col("batch_id").is_not_null()
    return (
        moves.join(by_batch, on="batch_id", how="left", maintain_order="left")
        .with_columns(
            pl.when(is_leg & pl.col("moment_ns_on").is_not_null())
            .then(f"{name}_on")
            .otherwise(name)
            .alias(name)
            for name in columns
        )
        .drop(f"{name}_on" for name in columns)
    )


def _faults(trace: Mapping[str, pl.LazyFrame]) -> pl.DataFrame:
    """List the fault rows of GPUs and CPUs, with the batch of each and how they find their moment."""
    keys = ["pid", "device_id", "end_ns"]
    found = batches(trace["gpu_faults"], trace["migrations"]).select(*keys, "start_ns", "batch_id")
    # Batches of rows have a start; those put together from copies have none.
    of_rows = found.filter(pl.col("start_ns").is_not_null()).drop("start_ns").collect()
    gpu = trace["gpu_faults"].select(*keys, "start_ns", "va", "access", "n_page_faults").collect()
    cpu = trace["cpu_faults"].select("pid", "start_ns", "va").collect()
    return pl.concat(
        [
            gpu.join(
                of_rows, on=keys, how="left", nulls_equal=True, maintain_order="left"
            ).with_columns(processor=pl.lit("gpu", PROCESSOR), rule=pl.lit("fault", RULE)),
            cpu.with_columns(processor=pl.lit("cpu", PROCESSOR), rule=pl.lit("host", RULE)),
        ],
        how="diagonal",
    ).with_columns(bytes=pl.lit(1, pl.Int64))
