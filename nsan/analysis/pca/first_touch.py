"""Figures of the effect that stand on fault rows being driver batches: first touches, batches of dead bytes.

A first touch is a batch that copied nothing, because the memory had no bytes yet (domain.md E-20). The cache
saves them: a new tensor lies on pages that exist (domain.md A.2, reuse).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import polars as pl

from nsan.analysis.driver.batches import batches
from nsan.analysis.nearest import nearest
from nsan.analysis.pca.sharing import IS_IN, VA_BLOCK, with_tensors_there
from nsan.analysis.segments import cut, edges_of
from nsan.uvm.constants import MANAGED_KINDS, PAGE_BYTES

KEYS: Final = ["pid", "device_id"]

OF_FAULTS: Final = ("n_first_touch", "first_touch_ns", "n_shared_first_touch", "n_dead_rows")
"""Figures that stand on fault rows being batches."""


@dataclass(frozen=True)
class LedgerInput:
    """The tables that figures of the effect stand on; of ``allocations`` the managed ones, and `batches`."""

    moves: pl.DataFrame
    faults: pl.DataFrame
    lives: pl.DataFrame
    allocations: pl.DataFrame
    gpu_faults: pl.DataFrame
    migrations: pl.DataFrame
    batches: pl.DataFrame


def ledger_input(
    tensor_moves: pl.LazyFrame,
    tensor_faults: pl.LazyFrame,
    tensor_lives: pl.LazyFrame,
    allocations: pl.LazyFrame,
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
) -> LedgerInput:
    """Collect the tables that figures of the effect stand on."""
    managed = pl.col("kind").is_in(MANAGED_KINDS)
    serviced = batches(gpu_faults, migrations)
    tables = [tensor_moves, tensor_faults, tensor_lives, allocations.filter(managed)]
    return LedgerInput(*pl.collect_all([*tables, gpu_faults, migrations, serviced]))


def gpus_of(found: LedgerInput) -> pl.DataFrame:
    """List the processes and GPUs that hold, fault on or move managed memory: ``pid``, ``device_id``."""
    frames = [found.moves, found.lives, found.allocations, found.gpu_faults]
    return pl.concat([frame.select(KEYS) for frame in frames]).unique().sort(KEYS)


def nulled(table: pl.DataFrame, found: LedgerInput) -> pl.DataFrame:
    """Make figures of fault rows null where the trace cannot tell them.

    Parameters
    ----------
    table : DataFrame
        Reads ``pid``, ``device_id``; nulled are those of :data:`OF_FAULTS` that it has.
    found : LedgerInput
        The tables.

    Returns
    -------
    DataFrame
        The rows in their order. Null are the figures of a process and GPU where batches copied and no
        fault row is a batch, and where a migration that may be of this process and GPU says no process,
        no GPU or no address: batches that it was copied for look as if they had copied nothing.
    """
    judged = found.batches.group_by(KEYS).agg(_known=pl.col("start_ns").is_not_null().any())
    # A GPU without any batch has none: 0 is right.
    names = [name for name in OF_FAULTS if name in table.columns]
    is_known = pl.col("_known").fill_null(value=True) & pl.col("_lost").is_null()
    return (
        table.join(judged, on=KEYS, how="left", nulls_equal=True, maintain_order="left")
        .join(_with_lost(table, found), on=KEYS, how="left", nulls_equal=True)
        .with_columns(pl.when(is_known).then(pl.col(names)))
        .drop("_known", "_lost")
    )


def _with_lost(table: pl.DataFrame, found: LedgerInput) -> pl.DataFrame:
    """List the processes and GPUs of which a migration may be that does not say so, or not where."""
    lost = found.migrations.filter(pl.any_horizontal(pl.col(*KEYS, "va").is_null()))
    others = lost.select(_pid="pid", _device="device_id", _placed=pl.col("va").is_not_null())
    its_pid, its_device = pl.col("_pid"), pl.col("_device")
    of_pid = pl.col("pid").eq_missing(its_pid)
    of_device = pl.col("device_id").eq_missing(its_device)
    same = of_pid & of_device
    may_be = (its_pid.is_null() | of_pid) & (its_device.is_null() | of_device)
    pairs = table.select(KEYS).unique().join(others.unique(), how="cross")
    # Where no row says its process, the rows belong together all the same.
    return (
        pairs.filter(may_be & ~(same & pl.col("_placed")))
        .select(*KEYS, _lost=pl.lit(value=True))
        .unique()
    )


def first_touches(found: LedgerInput) -> pl.DataFrame:
    """List the batches that copied nothing because their memory was touched for the first time.

    :func:`nsan.analysis.driver.batches.batches` calls a silent batch a first touch if its page had never
    come to the GPU by a copy. Of memory that is given again the pages begin anew: a silent batch is a first
    touch too if its page has not moved, either way, since the oldest allocation that is alive on it was made,
    or since the tensor that holds it was allocated. Memory advice
    makes more silent batches that look the same: remote mappings of pages that never came, and writes to
    pages that are duplicated on the CPU since a former tensor.

    Parameters
    ----------
    found : LedgerInput
        The tables.

    Returns
    -------
    DataFrame
        One row per batch, by process, GPU and end: ``pid``, ``device_id``, ``batch_id``, ``start_ns``,
        ``end_ns``, ``va``, ``service_ns``.
    """
    return silent_batches(found).filter("is_first").drop("is_first")


def silent_batches(found: LedgerInput) -> pl.DataFrame:
    """List the batches that copied nothing and were not throttled, and say which are first touches.

    Parameters
    ----------
    found : LedgerInput
        The tables.

    Returns
    -------
    DataFrame
        One row per batch, by process, GPU and end: the columns of :func:`first_touches`, and ``is_first``
        (Boolean). Null, not known: the page had moved before, and neither the history (place of unknown
        state, or of an unknown move) nor an allocation of the trace says whether its memory is new since.
    """
    columns = [*KEYS, "batch_id", "start_ns", "end_ns", "va", "service_ns"]
    known = found.batches.filter(pl.col("start_ns").is_not_null())
    first = known.filter(pl.col("outcome") == "first_touch").select(
        columns, is_first=pl.lit(value=True)
    )
    again = known.filter(pl.col("outcome").is_in(["stale", "unknown"]))
    held = _held_anew(again, found)
    new = pl.concat([_made_again(again, found), held.filter("is_first").select("batch_id")])
    untold = pl.concat(
        [held.filter(pl.col("is_first").is_null()).select("batch_id"), _untold(again, found)]
    )
    number = pl.col("batch_id")
    is_first = (
        pl.when(number.is_in(new["batch_id"].implode()))
        .then(pl.lit(value=True))
        .when(~number.is_in(untold["batch_id"].implode()))
        .then(pl.lit(value=False))
    )
    judged = again.select(columns, is_first=is_first)
    return pl.concat([first, judged]).sort(*KEYS, "end_ns", "batch_id")


def fault_places(found: LedgerInput) -> pl.DataFrame:
    """List the fault rows of GPUs by batch and page, one for each, as of ``TENSOR_FAULTS``."""
    rows = found.faults.filter(pl.col("processor") == "gpu", pl.col("batch_id").is_not_null())
    return rows.unique([*KEYS, "batch_id", "va"], keep="first", maintain_order=True)


def _made_again(again: pl.DataFrame, found: LedgerInput) -> pl.DataFrame:
    """Keep the batches whose page last moved before any allocation that is alive on it was made."""
    pages = again.select(*KEYS, "batch_id", "va", at_ns="start_ns", bytes=_PAGE)
    edges = edges_of(pages)
    asked = cut(pages, edges).select("pid", "batch_id", "segment", "at_ns")
    here = ["pid", "segment"]
    spans = (
        cut(found.allocations.select("pid", "va", "bytes", "alloc_ns", "free_ns"), edges)
        .join(asked.select(here).unique(), on=here, how="semi", nulls_equal=True)
        .select(*here, "alloc_ns", "free_ns")
    )
    alive = pl.col("alloc_ns") <= pl.col("at_ns")
    alive &= (pl.col("at_ns") < pl.col("free_ns")).fill_null(value=True)
    made = (
        asked.join(spans, on=here, nulls_equal=True)
        .filter(alive)
        .group_by("batch_id")
        .agg(pl.col("alloc_ns").min())
    )
    moved = _last_moves(pages, found.migrations.select("pid", "va", "bytes", moved_ns="start_ns"))
    return (
        made.join(moved, on="batch_id")
        .filter((pl.col("moved_ns") < pl.col("alloc_ns")).fill_null(value=True))
        .select("batch_id")
    )


def _held_anew(again: pl.DataFrame, found: LedgerInput) -> pl.DataFrame:
    """Say of batches on a tensor whether their page has not moved since it was allocated: ``is_first``."""
    holders = (
        fault_places(found)
        .filter(pl.col("state") == "live")
        .join(found.lives.select("tensor_id", "alloc_sequence", "alloc_ns"), on="tensor_id")
    )
    held = again.join(
        holders.select(*KEYS, "batch_id", "va", "alloc_sequence", "alloc_ns"),
        on=[*KEYS, "batch_id", "va"],
        nulls_equal=True,
    )
    pages = held.select(*KEYS, "batch_id", "va", at_ns="start_ns", bytes=_PAGE)
    parts = found.moves.select("pid", "va", "bytes", "position", moved_ns="start_ns")
    position, moved = pl.col("position"), pl.col("moved_ns")
    # What was held before the history began is older than any entry.
    born = pl.col("alloc_sequence").fill_null(-1)
    is_first = (
        pl.when(position.is_not_null())
        .then(position <= born)
        # The GPU runs behind the host: what moved before the allocation was launched before it.
        .when(moved < pl.col("alloc_ns"))
        .then(pl.lit(value=True))
    )
    return (
        held.join(_last_moves(pages, parts), on="batch_id")
        .filter(moved.is_not_null())
        .select("batch_id", is_first=is_first)
    )


def _untold(again: pl.DataFrame, found: LedgerInput) -> pl.DataFrame:
    """List the batches of whose page neither the history nor any allocation says since when it is new."""
    unmade = found.allocations.select("pid").unique()
    places = fault_places(found).select(*KEYS, "batch_id", "va", "state")
    placed = again.join(places, on=[*KEYS, "batch_id", "va"], how="left", nulls_equal=True)
    silent = pl.col("state").is_null() | (pl.col("state") == "outside")
    nowhere = placed.filter(silent).join(unmade, on="pid", how="anti", nulls_equal=True)
    unknown = placed.filter(pl.col("state") == "unknown")
    return pl.concat([nowhere.select("batch_id"), unknown.select("batch_id")])


_PAGE: Final = pl.lit(PAGE_BYTES, pl.Int64)


def _last_moves(pages: pl.DataFrame, moved: pl.DataFrame) -> pl.DataFrame:
    """Give each batch the last move of its page before it, either way: ``batch_id``, ``moved_ns`` and the rest."""
    edges = edges_of(pages)
    asked = cut(pages, edges).select("pid", "segment", "batch_id", "at_ns")
    blocks = pages.select("pid", _block=VA_BLOCK).unique()
    near = moved.with_columns(_block=VA_BLOCK).join(
        blocks, on=["pid", "_block"], how="semi", nulls_equal=True
    )
    moves = cut(near, edges).drop("va", "bytes", "_block")
    last = nearest(asked.lazy(), moves.lazy(), on=("at_ns", "moved_ns"), by=["pid", "segment"])
    return last.drop("pid", "segment", "at_ns").collect()


def with_sharers(touches: pl.DataFrame, found: LedgerInput) -> pl.DataFrame:
    """Say for first touches whether tensors of their segment share the VA block.

    Parameters
    ----------
    touches : DataFrame
        As of :func:`first_touches` or :func:`silent_batches`.
    found : LedgerInput
        The tables.

    Returns
    -------
    DataFrame
        The rows with ``is_shared`` (Boolean): two or more tensors of the segment held, or had held last,
        bytes of the VA block at the position of the row; false outside any segment; null where that
        is not known.
    """
    rows = fault_places(found).select(
        *KEYS, "batch_id", "va", "position", "segment_va", "state", va_block=VA_BLOCK
    )
    placed = touches.join(
        rows, on=[*KEYS, "batch_id", "va"], how="left", nulls_equal=True, maintain_order="left"
    )
    shared = (pl.col("n_there") > 1).fill_null(value=False)
    is_known = pl.col("state").ne_missing("unknown")
    return with_tensors_there(placed, found.lives).with_columns(
        is_shared=pl.when(is_known).then(shared)
    )


def dead_batches(moves: pl.DataFrame) -> pl.DataFrame:
    """List the batches that brought bytes into a GPU, all of them dead: ``pid``, ``device_id``, ``batch_id``."""
    return judged_batches(moves).filter("is_dead").drop("is_dead")


def judged_batches(moves: pl.DataFrame) -> pl.DataFrame:
    """Say of the batches that brought bytes into a GPU whether all of them are dead.

    Parameters
    ----------
    moves : DataFrame, ``TENSOR_MOVES``
        In any order.

    Returns
    -------
    DataFrame
        ``pid``, ``device_id``, ``batch_id`` and ``is_dead`` (Boolean; null, not known: the bytes that are
        not dead are of unknown state).
    """
    unknown = pl.col("state") == "unknown"
    # Of bytes that never left in the trace nothing says that they are stale.
    is_dead = pl.when(~unknown).then(pl.col("is_dead").fill_null(value=False))
    return (
        moves.filter(IS_IN, pl.col("batch_id").is_not_null(), pl.col("bytes") > 0)
        .group_by(*KEYS, "batch_id")
        .agg(is_dead=is_dead.all(ignore_nulls=False))
    )
