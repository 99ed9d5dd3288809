"""The ledger of steps: what each step of the program faulted, allocated and moved, and what of it the cache did.

What the effect of the caching allocator is told apart by (domain.md A.2, E-19): first touches (reuse),
dead bytes (dead traffic), neighbours' bytes (packing).
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.driver.batches import BATCH_READS
from nsan.analysis.intervals import union
from nsan.analysis.nearest import nearest
from nsan.analysis.pca.first_touch import (
    KEYS,
    LedgerInput,
    gpus_of,
    judged_batches,
    ledger_input,
    nulled,
    silent_batches,
    with_sharers,
)
from nsan.analysis.pca.sharing import (
    FAULT_READS,
    IS_IN,
    LIFE_READS,
    MOVE_READS,
    with_neighbours,
)
from nsan.analysis.pca.tables import STEP_LEDGER
from nsan.analysis.pca.traffic import with_copy_ns

_STEP: Final = [*KEYS, "step"]

MEMORY_CALL: Final = (
    r"^(cudaMallocManaged|cuMemAllocManaged|cudaFree|cuMemFree)(_v\d+|_ptsz|_ptds)*$"
)
"""Calls that make or give back managed memory; names carry version suffixes."""

LEDGER_READS: Final = {
    "tensor_moves": (*MOVE_READS, "end_ns", "is_dead"),
    "tensor_faults": (*FAULT_READS, "start_ns", "state"),
    "tensor_lives": (*LIFE_READS, "alloc_ns", "free_ns"),
    "nvtx_ranges": ("start_ns", "end_ns", "pid", "name"),
    "api_calls": ("start_ns", "end_ns", "pid", "name"),
    "allocations": ("alloc_ns", "free_ns", "pid", "device_id", "va", "bytes", "kind"),
    **BATCH_READS,
    "clock_fits": ("is_used",),
}

IS_CALLED: Final = pl.col("kind") == "managed"
"""Allocated by a call; the other kind is static memory of the program."""

OF_MOVES: Final = (
    "in_bytes",
    "out_bytes",
    "dead_in_bytes",
    "dead_out_bytes",
    "dead_in_ns",
    "dead_out_ns",
    "neighbour_in_bytes",
    "neighbour_out_bytes",
    "neighbour_in_ns",
    "neighbour_out_ns",
)
"""Figures of :func:`move_sums`."""

_OF_LIVES: Final = ("n_tensors", "tensor_bytes", "reused_bytes")

OF_HISTORY: Final = (*_OF_LIVES, "n_shared_first_touch", "n_dead_rows", *OF_MOVES[2:])
"""Figures of a step that stand on the history of the allocator."""


@analysis(
    question="What does each step fault, allocate and move, and how much of it is the cache's doing?",
    result=STEP_LEDGER,
    reads=LEDGER_READS,
    source="domain.md A.2, E-19, E-20",
    whole=True,
)
def step_ledger(  # noqa: PLR0913, PLR0917 - the tables that it reads count too
    tensor_moves: pl.LazyFrame,
    tensor_faults: pl.LazyFrame,
    tensor_lives: pl.LazyFrame,
    nvtx_ranges: pl.LazyFrame,
    api_calls: pl.LazyFrame,
    allocations: pl.LazyFrame,
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    clock_fits: pl.LazyFrame,
    *,
    step: str = "step",
) -> pl.LazyFrame:
    """Give one row per step and GPU: faults, allocations, traffic, and what of these is of the cache.

    Parameters
    ----------
    tensor_moves, tensor_faults, tensor_lives : LazyFrame
        Tables of a join, in any order.
    nvtx_ranges, api_calls, allocations, gpu_faults, migrations : LazyFrame
        Tables of the trace that was joined, whole, in any order.
    clock_fits : LazyFrame
        Table of the join; empty: joined with no snapshot, the allocations of the trace are the history.
    step : str, default "step"
        Name of the NVTX range that is one step. Of ranges of a process that overlap, the earlier counts.

    Returns
    -------
    LazyFrame, ``STEP_LEDGER``
        By process, GPU and step. A row belongs to the step of its process that holds its start (of a fault
        row, a copy, a call or an allocation); what is outside all steps is in no row. The time in calls is
        that of the process, the same for all its GPUs. ``n_first_touch`` as of
        :func:`nsan.analysis.pca.first_touch.first_touches`;
        shared: in its VA block lay, at the position of the row, two or more tensors of the segment, held
        or held before (:func:`nsan.analysis.pca.sharing.with_tensors_there`). Copy time is shared by bytes
        (:func:`nsan.analysis.pca.traffic.with_copy_ns`). Figures of fault rows are null where the trace
        has no GPU fault row at all, or the rows of a process and GPU are no batches. Bytes that had never
        left the GPU in the trace are not counted as dead, though nothing says that they are not stale.

    Notes
    -----
    A part of a figure is no figure: where the history does not tell all, it is null. What stands on the
    history (:data:`OF_HISTORY`) is null in a step with a move or fault row of unknown state;
    ``n_first_touch`` and its time in one with a batch of which nothing says whether it was one
    (:func:`nsan.analysis.pca.first_touch.silent_batches`). What moved or faulted in a step without saying
    its process is of no row, and so the bytes moved, or the fault rows, are null too. Where a snapshot was
    joined, the tensors are null in steps before the first and after the last time that it knows of any
    tensor of that GPU, and of a process of which it knows none. That a history begins or ends inside
    a step in which nothing moves and nothing faults from there on cannot be seen: its tensors are those that
    the history has.

    Examples
    --------
    >>> from nsan.analysis.pca.tables import JOINED_TABLES
    >>> from nsan.schema import TABLES
    >>> tables = {**JOINED_TABLES, **TABLES}
    >>> step_ledger(*(tables[name].empty() for name in LEDGER_READS)).collect().height
    0
    """

    def build() -> pl.DataFrame:
        found = ledger_input(
            tensor_moves, tensor_faults, tensor_lives, allocations, gpu_faults, migrations
        )
        steps = _steps(nvtx_ranges, step)
        ledger = gpus_of(found).join(steps, on="pid", nulls_equal=True)
        for part in (*_parts(found, steps), *_gaps(found, steps)):
            ledger = ledger.join(part, on=_STEP, how="left", nulls_equal=True)
        calls = _time_in_calls(api_calls, steps)
        ledger = ledger.join(calls, on=["pid", "step"], how="left", nulls_equal=True)
        counts = [name for name in STEP_LEDGER.schema if name not in (*_STEP, "start_ns", "end_ns")]
        ledger = ledger.with_columns(wall_ns=pl.col("end_ns") - pl.col("start_ns"))
        whole = nulled(ledger.with_columns(pl.col(counts).fill_null(0)).sort(_STEP), found)
        if not clock_fits.collect().is_empty():
            whole = _in_reach(whole, found.lives)
        return _without_parts(whole)

    return STEP_LEDGER.from_rows(build)


def move_sums() -> list[pl.Expr]:
    """Expressions that add up parts of migrations with ``neighbour_in``, ``neighbour_out``, ``copy_ns``."""
    size, time = pl.col("bytes"), pl.col("copy_ns")
    ways = {"in": IS_IN, "out": ~IS_IN}
    sums = {f"{way}_bytes": size.filter(which) for way, which in ways.items()}
    for way, which in ways.items():
        sums[f"dead_{way}_bytes"] = size.filter(which, "is_dead")
        sums[f"dead_{way}_ns"] = time.filter(which, "is_dead")
        sums[f"neighbour_{way}_bytes"] = size.filter(f"neighbour_{way}")
        sums[f"neighbour_{way}_ns"] = time.filter(f"neighbour_{way}")
    return [sums[name].sum().alias(name) for name in OF_MOVES]


def marked_moves(found: LedgerInput) -> pl.DataFrame:
    """Add to the parts of migrations the neighbours' marks and their copy time."""
    return with_copy_ns(with_neighbours(found.moves, found.faults))


def _parts(found: LedgerInput, steps: pl.DataFrame) -> list[pl.DataFrame]:
    """Count by step and GPU, table by table; ``_n_untold`` silent batches may be first touches or not."""
    touches = with_sharers(silent_batches(found), found)
    first = pl.col("is_first")
    brought = judged_batches(found.moves).join(
        found.batches.select("batch_id", "start_ns"), on="batch_id"
    )
    size = pl.col("block_bytes")
    counted: list[tuple[pl.DataFrame, str, list[pl.Expr]]] = [
        (
            found.gpu_faults.select(*KEYS, "start_ns"),
            "start_ns",
            [pl.len().alias("n_fault_rows")],
        ),
        (
            touches,
            "start_ns",
            [
                first.sum().alias("n_first_touch"),
                pl.col("service_ns").filter(first).sum().alias("first_touch_ns"),
                pl.col("is_shared").filter(first).sum().alias("n_shared_first_touch"),
                first.is_null().sum().alias("_n_untold"),
            ],
        ),
        (brought, "start_ns", [pl.col("is_dead").sum().alias("n_dead_rows")]),
        (found.allocations, "alloc_ns", [IS_CALLED.sum().alias("n_managed_allocs")]),
        (
            found.lives,
            "alloc_ns",
            [
                pl.len().alias("n_tensors"),
                size.sum().alias("tensor_bytes"),
                pl.col("reused_bytes").sum(),
            ],
        ),
        (marked_moves(found), "start_ns", move_sums()),
    ]
    return [
        _in_step(frame, steps, at)
        .group_by(_STEP)
        .agg(sums)
        .with_columns(pl.exclude(_STEP).cast(pl.Int64))
        for frame, at, sums in counted
    ]


def _gaps(found: LedgerInput, steps: pl.DataFrame) -> list[pl.DataFrame]:
    """Say in which steps the history does not tell what something is, or the trace not whose."""
    columns = (*KEYS, "start_ns", "state")
    moves, faults = found.moves.select(columns), found.faults.select(columns)
    unknown = pl.col("state") == "unknown"
    lost, is_lost = found.gpu_faults.select(*KEYS, "start_ns"), pl.col("pid").is_null()
    asked = {
        "_is_unknown": pl.concat([moves, faults]).filter(unknown),
        "_is_moved": moves.filter(is_lost),
        "_is_faulted": lost.filter(is_lost),
    }
    marks = [_may_be_in(rows, found, steps, name) for name, rows in asked.items()]
    # Steps without a process have rows of their own for what has none.
    named = pl.col("pid").is_not_null()
    return [marks[0], *(each.filter(named) for each in marks[1:])]


def _may_be_in(
    rows: pl.DataFrame, found: LedgerInput, steps: pl.DataFrame, name: str
) -> pl.DataFrame:
    """Mark the steps in which rows begin that are, or may be, of their process and GPU."""
    pids = steps.select("pid").unique()
    anywhere = rows.filter(pl.col("pid").is_null()).drop("pid").join(pids, how="cross")
    placed = pl.concat([rows.select(*KEYS, "start_ns"), anywhere.select(*KEYS, "start_ns")])
    gpus = gpus_of(found).rename({"device_id": "_gpu"})
    device, gpu = pl.col("device_id"), pl.col("_gpu")
    return (
        _in_step(placed, steps, "start_ns")
        .select(_STEP)
        .unique()
        .join(gpus, on="pid", nulls_equal=True)
        .filter(device.is_null() | device.eq_missing(gpu))
        .select("pid", "step", device_id="_gpu")
        .unique()
        .with_columns(pl.lit(value=True).alias(name))
    )


def _without_parts(ledger: pl.DataFrame) -> pl.DataFrame:
    """Make null what would be a part only."""
    names = {
        "_is_unknown": OF_HISTORY,
        "_is_moved": OF_MOVES[:2],
        "_is_faulted": ("n_fault_rows",),
    }
    whole = [
        pl.when(pl.col(flag).is_null()).then(pl.col(columns)) for flag, columns in names.items()
    ]
    told = pl.col("_n_untold").fill_null(0) == 0
    touches = ("n_first_touch", "first_touch_ns", "n_shared_first_touch")
    return ledger.with_columns(whole).with_columns(pl.when(told).then(pl.col(touches)))


def _in_reach(ledger: pl.DataFrame, lives: pl.DataFrame) -> pl.DataFrame:
    """Make null what was allocated in steps that lie outside of all that the history tells of tensors."""
    times = pl.concat([lives.select(*KEYS, at=name) for name in ("alloc_ns", "free_ns")])
    spans = times.group_by(KEYS).agg(_first=pl.col("at").min(), _last=pl.col("at").max())
    known = spans.select("pid", _is_known=pl.lit(value=True)).unique()
    outside = (pl.col("end_ns") <= pl.col("_first")) | (pl.col("start_ns") > pl.col("_last"))
    reached = pl.col("_is_known").is_not_null() & ~outside.fill_null(value=False)
    return (
        ledger.join(spans, on=KEYS, how="left", nulls_equal=True, maintain_order="left")
        .join(known, on="pid", how="left", nulls_equal=True, maintain_order="left")
        .with_columns(pl.when(reached).then(pl.col(_OF_LIVES)))
    )


def _steps(nvtx_ranges: pl.LazyFrame, step: str) -> pl.DataFrame:
    """Give numbers to the ranges of a name by process and start; of those that overlap, the earlier counts."""
    known = pl.all_horizontal(pl.col("start_ns", "end_ns").is_not_null())
    before = pl.col("end_ns").cum_max().shift(1).over("pid")
    return (
        nvtx_ranges.filter(known, pl.col("name") == step)
        .select("pid", "start_ns", "end_ns")
        .sort("pid", "start_ns", "end_ns")
        .filter((pl.col("start_ns") >= before).fill_null(value=True))
        .with_columns(step=pl.int_range(pl.len(), dtype=pl.Int64).over("pid"))
        .collect()
    )


def _in_step(rows: pl.DataFrame, steps: pl.DataFrame, at: str) -> pl.DataFrame:
    """Keep the rows that start in a step of their process, with its number."""
    limits = steps.select("pid", "step", _from="start_ns", _until="end_ns")
    return (
        nearest(
            rows.filter(pl.col(at).is_not_null()).lazy(),
            limits.lazy(),
            on=(at, "_from"),
            by=["pid"],
        )
        .filter(pl.col(at) < pl.col("_until"))
        .drop("_from")
        .collect()
    )


def _time_in_calls(api_calls: pl.LazyFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Add up the time of the process in calls that make or free managed memory; no time counts twice."""
    calls = api_calls.filter(pl.col("name").str.contains(MEMORY_CALL)).select(
        "pid", "start_ns", "end_ns"
    )
    inside = _in_step(calls.collect(), steps, "start_ns").with_columns(
        end_ns=pl.min_horizontal("end_ns", "_until")
    )
    by = ["pid", "step"]
    length = (pl.col("end_ns") - pl.col("start_ns")).sum()
    return union(inside.lazy(), by=by).group_by(by).agg(memory_api_ns=length).collect()
