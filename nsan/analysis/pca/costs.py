"""Where the time of a step goes, in parts that add up: what each mechanism of the cache may cost.

A step is the time in which its GPU has nothing to do, the service of its fault batches, and the rest. The
service of a batch stops the kernel that faulted; what other thread blocks compute meanwhile is hidden
under it, so that the rest is less than all computing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import polars as pl

from nsan.analysis.intervals import subtraction
from nsan.analysis.nearest import nearest
from nsan.analysis.pca.first_touch import KEYS, LedgerInput, dead_batches, first_touches
from nsan.analysis.pca.ledger import MEMORY_CALL, marked_moves
from nsan.analysis.pca.tables import STEP_LEDGER
from nsan.analysis.result import DEVICE, PID, Result, derived
from nsan.uvm.constants import PAGE_BYTES, VA_BLOCK_BYTES

_STEP: Final = [*KEYS, "step"]
STEP_COSTS: Final = Result(
    "step_costs",
    "one step of the program on one GPU",
    (
        PID,
        DEVICE,
        derived("step", pl.Int64, "id", "Number of the step, from 0."),
        derived("idle_ns", pl.Int64, "ns", "Nothing ran on the GPU, and nothing was copied."),
        derived(
            "other_idle_ns",
            pl.Int64,
            "ns",
            "Of this outside the calls that make or give back managed memory.",
        ),
        derived(
            "new_only_ns",
            pl.Int64,
            "ns",
            "Service of batches that only make memory usable for a tensor that is new to it (first touches, "
            "and those that bring only dead bytes), without copies of dead and of neighbours' bytes.",
        ),
        derived("least_first_touch_ns", pl.Int64, "ns", "Of the quickest first touch; null: none."),
        derived("data_only_ns", pl.Int64, "ns", "Service of all other batches, without the same."),
        derived("rest_ns", pl.Int64, "ns", "The rest of the step: computing outside all service."),
        derived(
            "n_packed_tensors",
            pl.Int64,
            "tensors",
            "Tensors allocated in a VA block in which another one lay, of any segment or allocation.",
        ),
        derived(
            "n_packed_new",
            pl.Int64,
            "tensors",
            "Of these in such a VA block in which a first touch of the same step fell.",
        ),
        derived(
            "mixed_dead_in_bytes",
            pl.Int64,
            "byte",
            "Dead bytes in that share their page with others, and would have come with these.",
        ),
        derived("mixed_dead_out_bytes", pl.Int64, "byte", "The same of dead bytes out."),
    ),
    nothing="The trace has no NVTX range of that name.",
)
"""``idle_ns``, the times named ``only``, the copy times of dead and of neighbours' bytes (``STEP_LEDGER``) and
``rest_ns`` add up to the time of the step; null where fault rows are no batches, or the history does
not tell what they were for. Copies that overlap with
others or with computing make ``rest_ns`` smaller, even less than 0.
"""

COPIED: Final = ("dead_in_ns", "dead_out_ns", "neighbour_in_ns", "neighbour_out_ns")
"""Copy times of ``STEP_LEDGER`` that no time named ``only`` holds."""


@dataclass(frozen=True)
class CostInput:
    """The tables that the costs stand on.

    Attributes
    ----------
    found : LedgerInput
        Of the join.
    work : LazyFrame
        Kernels, copies and fills of the trace: ``pid``, ``device_id``, ``start_ns``, ``end_ns``.
    api_calls : LazyFrame
        Of the trace.
    """

    found: LedgerInput
    work: pl.LazyFrame
    api_calls: pl.LazyFrame


def step_costs(ledger: pl.DataFrame, tables: CostInput) -> pl.DataFrame:
    """Split the time of each step.

    Parameters
    ----------
    ledger : DataFrame, ``STEP_LEDGER``
        One row per step and GPU.
    tables : CostInput
        Of the same trace and join.

    Returns
    -------
    DataFrame, ``STEP_COSTS``
        One row per row of the ledger, in its order. A batch belongs to the step in which it was raised.
    """
    keys = {"on": _STEP, "how": "left", "nulls_equal": True, "maintain_order": "left"}
    costs = ledger.select([*STEP_LEDGER.schema])
    new = _new_rows(tables.found)
    for part in (
        _idle(ledger, tables),
        _served(ledger, tables.found, new),
        _packed(ledger, tables.found.lives, new),
        _mixed(ledger, tables.found),
    ):
        costs = costs.join(part, **keys)  # type: ignore[arg-type]
    absent = ("rest_ns", "least_first_touch_ns")
    counts = [name for name in STEP_COSTS.schema if name not in (*_STEP, *absent)]
    taken = pl.sum_horizontal("idle_ns", *_SERVED, *COPIED, ignore_nulls=False)
    return (
        costs.with_columns(pl.col(counts).fill_null(0))
        .with_columns(
            pl.when(pl.all_horizontal(pl.col(needs).is_not_null())).then(pl.col(names))
            for names, needs in _NEEDED.items()
        )
        .with_columns(rest_ns=pl.col("wall_ns") - taken)
        .select(STEP_COSTS.cast())
    )


_SERVED: Final = ("new_only_ns", "data_only_ns")
_NEEDED: Final = {
    (*_SERVED, "n_packed_new", "least_first_touch_ns"): ("n_first_touch", "n_dead_rows"),
    ("n_packed_tensors",): ("n_tensors",),
    ("mixed_dead_in_bytes",): ("dead_in_bytes",),
    ("mixed_dead_out_bytes",): ("dead_out_bytes",),
}
"""Columns that are unknown where one of the ledger is."""


def _in_step(rows: pl.DataFrame, ledger: pl.DataFrame, at: str = "start_ns") -> pl.DataFrame:
    """Keep the rows that begin in a step of their process and GPU, with its number."""
    limits = ledger.select(*KEYS, "step", _from="start_ns", _until="end_ns")
    known = rows.filter(pl.col(at).is_not_null()).lazy()
    found = nearest(known, limits.lazy(), on=(at, "_from"), by=KEYS)
    return found.filter(pl.col(at) < pl.col("_until")).collect()


def _idle(ledger: pl.DataFrame, tables: CostInput) -> pl.DataFrame:
    """Measure the time of each step in which its GPU did nothing, and what of it is in no memory call."""
    busy = pl.concat([tables.work.select(_TIMES), tables.found.migrations.lazy().select(_TIMES)])
    calls = tables.api_calls.filter(pl.col("name").str.contains(MEMORY_CALL))
    gpus = ledger.select(KEYS).unique().lazy()
    of_gpu = calls.select("pid", "start_ns", "end_ns").join(gpus, on="pid", nulls_equal=True)
    found = []
    for turn in (0, 1):  # steps that touch would become one
        steps = ledger.filter(pl.col("step") % 2 == turn)
        idle = subtraction(steps.lazy().select(_TIMES), busy, by=KEYS)
        outside = subtraction(idle, of_gpu, by=KEYS)
        for part, name in ((idle, "idle_ns"), (outside, "other_idle_ns")):
            inside = _in_step(part.collect(), steps)
            found.append(inside.select(*_STEP, (_END - _START).alias(name)))
    return pl.concat(found, how="diagonal").group_by(_STEP).agg(pl.all().sum())


_START, _END = pl.col("start_ns"), pl.col("end_ns")
_TIMES: Final = (*KEYS, "start_ns", "end_ns")


def _new_rows(found: LedgerInput) -> pl.DataFrame:
    """List the batches that only make memory usable for a tensor that is new to it, with ``is_first``."""
    first = first_touches(found).select("batch_id", is_first=pl.lit(value=True))
    dead = dead_batches(found.moves).select("batch_id", is_first=pl.lit(value=False))
    return found.batches.join(pl.concat([first, dead]), on="batch_id").select(
        *KEYS, "batch_id", "start_ns", "va", "is_first"
    )


def _served(ledger: pl.DataFrame, found: LedgerInput, new: pl.DataFrame) -> pl.DataFrame:
    """Split the service of the batches of each step by what they were for."""
    own = pl.col("is_dead") | pl.col("neighbour_in") | pl.col("neighbour_out")
    copied = marked_moves(found).group_by("batch_id").agg(_own=pl.col("copy_ns").filter(own).sum())
    # Copies in both directions may run at once: their sum can be more than the service.
    rest = pl.max_horizontal(pl.col("service_ns") - pl.col("_own").fill_null(0), 0)
    served = (
        found.batches.select(*KEYS, "batch_id", "start_ns", "service_ns")
        .join(copied, on="batch_id", how="left")
        .join(new.select("batch_id", "is_first"), on="batch_id", how="left")
        .with_columns(_rest=rest.fill_null(0))
    )
    is_first, time = pl.col("is_first"), pl.col("_rest")
    return (
        _in_step(served, ledger)
        .group_by(_STEP)
        .agg(
            new_only_ns=time.filter(is_first.is_not_null()).sum(),
            data_only_ns=time.filter(is_first.is_null()).sum(),
            least_first_touch_ns=time.filter(is_first).min(),
        )
    )


def _packed(ledger: pl.DataFrame, lives: pl.DataFrame, new: pl.DataFrame) -> pl.DataFrame:
    """Count the tensors of each step that were allocated in a VA block in which another one lay."""
    counted = _in_step(_packed_parts(lives), ledger, "alloc_ns")
    # Dead bytes come back in as many rows whoever lies there, as they left: by VA block.
    first = _in_step(new.filter(pl.col("is_first")), ledger)
    here = first.select(*_STEP, va_block=_VA_BLOCK)
    touched = counted.join(here.unique(), on=[*_STEP, "va_block"], how="semi", nulls_equal=True)
    number = pl.col("tensor_id").n_unique().cast(pl.Int64)
    return (
        counted.group_by(_STEP)
        .agg(n_packed_tensors=number)
        .join(
            touched.group_by(_STEP).agg(n_packed_new=number), on=_STEP, how="left", nulls_equal=True
        )
    )


_VA_BLOCK: Final = pl.col("va") // pl.lit(VA_BLOCK_BYTES, pl.UInt64)


def _packed_parts(lives: pl.DataFrame) -> pl.DataFrame:
    """List the VA blocks of tensors in which another tensor lay when they were allocated."""
    block = pl.lit(VA_BLOCK_BYTES, pl.UInt64)
    last = pl.col("va") + pl.max_horizontal("block_bytes", 1).cast(pl.UInt64) - 1
    # Only the first and the last VA block of a tensor can hold another one.
    edges = lives.select(
        *KEYS,
        "tensor_id",
        "alloc_ns",
        pl.col("alloc_sequence").fill_null(-1),
        "free_sequence",
        va_block=pl.concat_list(_VA_BLOCK, last // block).list.unique(),
    ).explode("va_block")
    place = ["pid", "va_block"]
    came = edges.select(
        *KEYS, "va_block", "tensor_id", "alloc_ns", at="alloc_sequence", change=pl.lit(1)
    )
    went = edges.filter(pl.col("free_sequence").is_not_null()).select(
        *KEYS, "va_block", at="free_sequence", change=pl.lit(-1)
    )
    there = pl.col("change").cum_sum().over(place)
    return (
        pl.concat([came, went], how="diagonal")
        .sort(*place, "at", "change")
        .with_columns(_there=there)
        .filter(pl.col("change") > 0, pl.col("_there") > 1)
    )


def _mixed(ledger: pl.DataFrame, found: LedgerInput) -> pl.DataFrame:
    """Add up the dead bytes of each step that lie in a page with bytes that are not dead."""
    sizes = found.batches["page_bytes"].drop_nulls()
    page = pl.lit(PAGE_BYTES if sizes.is_empty() else sizes.max(), pl.Int64)
    begin = pl.col("va").cast(pl.Int64)
    end = begin + pl.col("bytes")
    follows = (begin == end.shift(1)) & (pl.col("migration") == pl.col("migration").shift(1))
    runs = (
        found.moves.filter(pl.col("is_dead"), pl.col("bytes") > 0)
        .sort("migration", "va")
        .with_columns(_run=(~follows.fill_null(value=False)).cum_sum())
        .group_by("_run")
        .agg(
            pl.col(*KEYS, "start_ns", "direction").first(),
            _from=begin.min(),
            _to=end.max(),
        )
    )
    low, high = pl.col("_from"), pl.col("_to")
    whole = pl.max_horizontal(high // page * page - (low + page - 1) // page * page, 0)
    into = pl.col("direction") != "dtoh"
    mixed = high - low - whole
    placed = _in_step(runs, ledger)
    return placed.group_by(_STEP).agg(
        mixed_dead_in_bytes=mixed.filter(into).sum(), mixed_dead_out_bytes=mixed.filter(~into).sum()
    )
