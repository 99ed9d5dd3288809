"""Traffic of managed memory by what lay there: state of the memory, tensor, line, annotation.

Every table closes: what is of no tensor has a row of its own, and bytes and fault rows add up to those
of the join, and so to those of the trace (domain.md E-19).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from nsan.analysis.allocator.call_sites import SITE_COLUMNS
from nsan.analysis.catalog import analysis
from nsan.analysis.pca.tables import STATE, TENSOR_LIVES
from nsan.analysis.result import DEVICE, PID, Figure, Result, derived, recorded
from nsan.schema import CAUSE, DIRECTION

_SITE: Final = tuple(column.name for column in SITE_COLUMNS)
_KEYS: Final = ("pid", "device_id")

_FIGURES: Final = (
    derived("n_fault_rows", pl.Int64, "fault rows", "GPU fault rows whose page lay there."),
    derived("n_cpu_faults", pl.Int64, "faults", "CPU faults."),
    derived("in_bytes", pl.Int64, "byte", "Migrated into the GPU."),
    derived("in_coherence_bytes", pl.Int64, "byte", "Of these because their page faulted."),
    derived("in_prefetch_bytes", pl.Int64, "byte", "Of these by the driver's prefetcher."),
    derived("in_user_bytes", pl.Int64, "byte", "Of these because the program asked."),
    derived("in_other_bytes", pl.Int64, "byte", "Of these for other or unknown causes."),
    derived("out_bytes", pl.Int64, "byte", "Migrated out of the GPU."),
    derived("evicted_bytes", pl.Int64, "byte", "Of these to make room."),
    derived("dead_in_bytes", pl.Int64, "byte", "Of `in_bytes` dead: cached, unused or stale."),
    derived("dead_out_bytes", pl.Int64, "byte", "Of `out_bytes` dead: cached or unused."),
)
_COUNTED: Final = tuple(column.name for column in _FIGURES)

_REFETCH: Final = derived(
    "refetch_ratio", pl.Float64, "number", "`in_bytes` over `block_bytes`: 1 is once all of it."
)


def _life(name: str) -> Figure:
    return next(column for column in TENSOR_LIVES.columns if column.name == name)


STATE_TRAFFIC: Final = Result(
    "state_traffic",
    "migrated bytes of one direction, cause and state of memory, on one GPU of a process",
    (
        PID,
        DEVICE,
        recorded("direction", DIRECTION, "label", "Which way."),
        recorded("cause", CAUSE, "label", "Why; `coherence` is a page fault."),
        derived("state", STATE, "label", "What the memory was to the allocator then."),
        derived("is_dead", pl.Boolean, "flag", "Nobody needs them; of `live` memory: stale."),
        derived("n_parts", pl.Int64, "parts", "Parts of migrations."),
        derived("bytes", pl.Int64, "byte", "Their bytes."),
        derived("bytes_fraction", pl.Float64, "fraction", "Share of all bytes migrated."),
        derived("copy_ns", pl.Int64, "ns", "Their copy time, by bytes of each migration."),
    ),
    nothing="Nothing was migrated.",
)

TENSOR_TRAFFIC: Final = Result(
    "tensor_traffic",
    "a tensor that migrated or faulted, or (without `tensor_id`) memory of no tensor",
    (
        PID,
        DEVICE,
        derived(
            "tensor_id", pl.Int64, "id", "Number in `tensor_lives`; null: memory of no tensor."
        ),
        *(_life(name) for name in ("va", "block_bytes", "requested_bytes")),
        *SITE_COLUMNS,
        *(_life(name) for name in ("annotation", "alloc_ns", "free_ns")),
        *_FIGURES,
        _REFETCH,
    ),
    nothing="Nothing was migrated, and no fault row was recorded.",
)

LINE_TRAFFIC: Final = Result(
    "line_traffic",
    "the tensors that one line of the program allocated, or memory of no tensor (`part` null)",
    (
        PID,
        DEVICE,
        *SITE_COLUMNS,
        derived("n_tensors", pl.Int64, "tensors", "Tensors that migrated or faulted."),
        derived("block_bytes", pl.Int64, "byte", "Their blocks."),
        *_FIGURES,
        _REFETCH,
    ),
    nothing=TENSOR_TRAFFIC.nothing,
)

ANNOTATION_TRAFFIC: Final = Result(
    "annotation_traffic",
    "the tensors allocated in one range of the program, in none, or memory of no tensor",
    (
        PID,
        DEVICE,
        derived("annotation", pl.String, "text", "Innermost range when allocated; null: in none."),
        derived("is_tensor", pl.Boolean, "flag", "False: memory of no tensor."),
        derived("n_tensors", pl.Int64, "tensors", "Tensors that migrated or faulted."),
        derived("block_bytes", pl.Int64, "byte", "Their blocks."),
        *_FIGURES,
        _REFETCH,
    ),
    nothing=TENSOR_TRAFFIC.nothing,
)

_MOVE_READS: Final = (*_KEYS, "tensor_id", "bytes", "direction", "cause", "is_dead")
_FAULT_READS: Final = (*_KEYS, "tensor_id", "processor")
_LIFE_READS: Final = (
    *_KEYS,
    "tensor_id",
    "va",
    "block_bytes",
    "requested_bytes",
    *_SITE,
    "annotation",
    "alloc_ns",
    "free_ns",
)
_READS: Final = {
    "tensor_moves": _MOVE_READS,
    "tensor_faults": _FAULT_READS,
    "tensor_lives": _LIFE_READS,
}


@analysis(
    question="How much of the traffic is of memory that nobody needs?",
    result=STATE_TRAFFIC,
    reads={
        "tensor_moves": (
            *_KEYS,
            "migration",
            "start_ns",
            "end_ns",
            "va",
            "bytes",
            "direction",
            "cause",
            "state",
            "is_dead",
        )
    },
    source="domain.md A.2, E-19",
)
def state_traffic(tensor_moves: pl.LazyFrame) -> pl.LazyFrame:
    """Add up migrations by direction, cause and what the memory was to the allocator.

    Parameters
    ----------
    tensor_moves : LazyFrame, ``TENSOR_MOVES``
        In any order.

    Returns
    -------
    LazyFrame, ``STATE_TRAFFIC``
        One row per process, GPU, direction, cause, state and ``is_dead``, in that order. Bytes add up to
        all migrations, copy time to the sum of their durations (:func:`with_copy_ns`).

    Examples
    --------
    >>> from nsan.analysis.pca.tables import TENSOR_MOVES
    >>> state_traffic(TENSOR_MOVES.empty()).collect().height
    0
    """

    def build() -> pl.DataFrame:
        keys = [*_KEYS, "direction", "cause", "state", "is_dead"]
        sums = (
            with_copy_ns(tensor_moves.collect())
            .group_by(keys)
            .agg(pl.col("bytes", "copy_ns").sum(), n_parts=pl.len())
        )
        whole = pl.col("bytes").sum()
        share = pl.when(whole > 0).then(pl.col("bytes") / whole)
        return sums.with_columns(bytes_fraction=share).sort(keys)

    return STATE_TRAFFIC.from_rows(build)


@analysis(
    question="Which tensors fault and migrate most?",
    result=TENSOR_TRAFFIC,
    reads=_READS,
    source="domain.md E-17, E-19",
)
def tensor_traffic(
    tensor_moves: pl.LazyFrame, tensor_faults: pl.LazyFrame, tensor_lives: pl.LazyFrame
) -> pl.LazyFrame:
    """List the tensors that migrated or faulted, with their traffic.

    Parameters
    ----------
    tensor_moves, tensor_faults, tensor_lives : LazyFrame
        Tables of a join, in any order.

    Returns
    -------
    LazyFrame, ``TENSOR_TRAFFIC``
        Most bytes first, then fault rows, then by tensor: one row per tensor, whichever GPU its bytes went
        to, and one per process and GPU for what is of no tensor. Cached bytes and faults count for the
        tensor that held the memory last, as dead. Bytes add up to ``tensor_moves``, fault rows to
        ``tensor_faults``.

    Examples
    --------
    >>> from nsan.analysis.pca.tables import JOINED_TABLES as tables
    >>> tensor_traffic(*(tables[name].empty() for name in _READS)).collect().height
    0
    """

    def build() -> pl.DataFrame:
        found = _by_tensor(tensor_moves, tensor_faults, tensor_lives)
        return _most_first(_with_ratio(found), ["tensor_id"])

    return TENSOR_TRAFFIC.from_rows(build)


@analysis(
    question="Which lines of the program allocate what faults and migrates most?",
    result=LINE_TRAFFIC,
    reads=_READS,
    source="domain.md E-17, E-19",
)
def line_traffic(
    tensor_moves: pl.LazyFrame, tensor_faults: pl.LazyFrame, tensor_lives: pl.LazyFrame
) -> pl.LazyFrame:
    """Add up the traffic of tensors by the line that allocated them.

    Parameters
    ----------
    tensor_moves, tensor_faults, tensor_lives : LazyFrame
        Tables of a join, in any order.

    Returns
    -------
    LazyFrame, ``LINE_TRAFFIC``
        Most bytes first: one row per process, GPU and line. ``part`` "unattributed": tensors without a
        call stack; null: memory of no tensor. Sums as of :func:`tensor_traffic`.

    Examples
    --------
    >>> from nsan.analysis.pca.tables import JOINED_TABLES as tables
    >>> line_traffic(*(tables[name].empty() for name in _READS)).collect().height
    0
    """

    def build() -> pl.DataFrame:
        found = _by_tensor(tensor_moves, tensor_faults, tensor_lives)
        return _added_up(found, [*_KEYS, *_SITE])

    return LINE_TRAFFIC.from_rows(build)


@analysis(
    question="In which range of the program was allocated what faults and migrates most?",
    result=ANNOTATION_TRAFFIC,
    reads=_READS,
    source="domain.md E-19; allocator.md 7",
)
def annotation_traffic(
    tensor_moves: pl.LazyFrame, tensor_faults: pl.LazyFrame, tensor_lives: pl.LazyFrame
) -> pl.LazyFrame:
    """Add up the traffic of tensors by the annotated range in which they were allocated.

    Parameters
    ----------
    tensor_moves, tensor_faults, tensor_lives : LazyFrame
        Tables of a join, in any order.

    Returns
    -------
    LazyFrame, ``ANNOTATION_TRAFFIC``
        Most bytes first: one row per process, GPU and range. Sums as of :func:`tensor_traffic`.

    Examples
    --------
    >>> from nsan.analysis.pca.tables import JOINED_TABLES as tables
    >>> annotation_traffic(*(tables[name].empty() for name in _READS)).collect().height
    0
    """

    def build() -> pl.DataFrame:
        found = _by_tensor(tensor_moves, tensor_faults, tensor_lives)
        return _added_up(
            found.with_columns(is_tensor=pl.col("tensor_id").is_not_null()),
            [*_KEYS, "annotation", "is_tensor"],
        )

    return ANNOTATION_TRAFFIC.from_rows(build)


def with_copy_ns(moves: pl.DataFrame) -> pl.DataFrame:
    """Share the time of each copy among its parts by their bytes, in whole ns.

    Parameters
    ----------
    moves : DataFrame, ``TENSOR_MOVES``
        In any order; reads ``migration``, ``start_ns``, ``end_ns``, ``va``, ``bytes``.

    Returns
    -------
    DataFrame
        The rows in their order with ``copy_ns`` (Int64, ns): duration x bytes of the part / bytes of the
        migration, rounded by largest remainder (of equal ones the lowest address first), so that the parts
        of a migration add up to its duration. Null where the copy has no end.
    """
    whole = pl.col("bytes").sum().over("migration").cast(pl.Int128)
    # A long copy of many bytes would not fit in 64 bit.
    exact = (pl.col("end_ns") - pl.col("start_ns")).cast(pl.Int128) * pl.col("bytes")
    short = (pl.col("end_ns") - pl.col("start_ns")) - pl.col("_floor").sum().over("migration")
    rank = pl.int_range(pl.len()).over(
        "migration", order_by=[pl.col("_rest"), pl.col("va"), pl.col("_at")]
    )
    return (
        moves.with_row_index("_at")
        .with_columns(_floor=(exact // whole).cast(pl.Int64), _rest=-(exact % whole).cast(pl.Int64))
        .with_columns(copy_ns=pl.col("_floor") + (rank < short).cast(pl.Int64))
        .drop("_at", "_floor", "_rest")
    )


def _by_tensor(
    tensor_moves: pl.LazyFrame, tensor_faults: pl.LazyFrame, tensor_lives: pl.LazyFrame
) -> pl.DataFrame:
    """Add up moves and faults by tensor; what is of no tensor by process and GPU."""
    lives = tensor_lives.select(_LIFE_READS)
    own = lives.select("tensor_id", _pid="pid", _device="device_id", _known=pl.lit(value=True))
    moves, faults = (
        # A tensor has one row, also where several GPUs use it.
        table.join(own, on="tensor_id", how="left").with_columns(
            pid=pl.when("_known").then("_pid").otherwise("pid"),
            device_id=pl.when("_known").then("_device").otherwise("device_id"),
        )
        for table in (tensor_moves, tensor_faults)
    )
    keys = [*_KEYS, "tensor_id"]
    size, into, cause = pl.col("bytes"), pl.col("direction") != "dtoh", pl.col("cause")
    named = ("coherence", "prefetch", "user")
    moved = moves.group_by(keys).agg(
        *(size.filter(into, cause == each).sum().alias(f"in_{each}_bytes") for each in named),
        in_bytes=size.filter(into).sum(),
        in_other_bytes=size.filter(into, ~cause.is_in(named).fill_null(value=False)).sum(),
        out_bytes=size.filter(~into).sum(),
        evicted_bytes=size.filter(~into, cause == "eviction").sum(),
        dead_in_bytes=size.filter(into, "is_dead").sum(),
        dead_out_bytes=size.filter(~into, "is_dead").sum(),
    )
    gpu = pl.col("processor") == "gpu"
    faulted = faults.group_by(keys).agg(
        n_fault_rows=gpu.sum().cast(pl.Int64), n_cpu_faults=(~gpu).sum().cast(pl.Int64)
    )
    known = lives.drop(_KEYS)
    return (
        moved.join(faulted, on=keys, how="full", coalesce=True, nulls_equal=True)
        .with_columns(pl.col(_COUNTED).fill_null(0))
        .join(known, on="tensor_id", how="left")
        .with_columns(_named())
        .collect()
    )


def _named() -> pl.Expr:
    """Keep tensors that were left out of the lives apart from memory of no tensor."""
    lost = pl.col("tensor_id").is_not_null() & pl.col("part").is_null()
    return pl.when(lost).then(pl.lit("unattributed")).otherwise("part").alias("part")


def _added_up(found: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    sums = found.group_by(keys).agg(
        pl.col(*_COUNTED, "block_bytes").sum(),
        n_tensors=pl.col("tensor_id").count(),
        _n_sized=pl.col("block_bytes").count(),
    )
    of_tensors = pl.when(pl.col("_n_sized") > 0).then("block_bytes")
    return _most_first(_with_ratio(sums.with_columns(block_bytes=of_tensors)), keys)


def _with_ratio(found: pl.DataFrame) -> pl.DataFrame:
    size = pl.col("block_bytes")
    return found.with_columns(refetch_ratio=pl.when(size > 0).then(pl.col("in_bytes") / size))


def _most_first(found: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    moved = pl.col("in_bytes") + pl.col("out_bytes")
    faults = pl.col("n_fault_rows") + pl.col("n_cpu_faults")
    return found.sort(-moved, -faults, *dict.fromkeys((*keys, *_KEYS)))
