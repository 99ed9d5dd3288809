"""What became of a batch that copied nothing: first touch, page already there, or throttled."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.driver.rows_and_copies import KEYS
from nsan.analysis.nearest import nearest
from nsan.analysis.segments import cut, edges_of
from nsan.uvm.constants import PAGE_BYTES, VA_BLOCK_BYTES

OUTCOMES: Final = ("data", "first_touch", "stale", "throttled", "unknown")
OUTCOME: Final = pl.Enum(OUTCOMES)

_SPIN_GAP_NS: Final = 100
"""A throttled access faults again this soon after the replay (fault_rows.md 2.4)."""

_COARSE_SPIN_GAP_NS: Final = 12_000
"""The same where times are printed with few digits."""


def with_outcome(batches: pl.DataFrame, migrations: pl.DataFrame) -> pl.DataFrame:
    """Class the batches: those with copies moved data, the others tell by their page.

    Parameters
    ----------
    batches : DataFrame
        One row per batch of fault rows, by process, GPU and end: ``pid``, ``device_id``,
        ``start_ns``, ``end_ns``, ``va``, ``n_page_faults``, ``bytes``, ``is_coarse``.
    migrations : DataFrame, ``MIGRATIONS``
        All copies with a start and an address, any cause.

    Returns
    -------
    DataFrame
        The batches with ``outcome``. ``throttled``: the same page and count as the batch before or
        after, raised within 0.1 us of the replay, nothing copied. ``stale``: the page had come
        and had not left (a stale fault entry, a remote mapping, or a write to duplicated data).
        ``first_touch``: the page had not come to this GPU by a copy. ``unknown``: it had come and
        left, and nothing brought it back.
    """
    empty = pl.col("bytes") == 0
    batches = batches.with_columns(_spins=_spins() & empty)
    silent = batches.filter(empty & ~pl.col("_spins")).select(*KEYS, "end_ns", "va")
    places = _last_moves(silent, migrations)
    moved = pl.col("_there")
    outcome = (
        pl.when(~empty)
        .then(pl.lit("data"))
        .when("_spins")
        .then(pl.lit("throttled"))
        .when(moved.is_null())
        .then(pl.lit("first_touch"))
        .when(moved)
        .then(pl.lit("stale"))
        .otherwise(pl.lit("unknown"))
    )
    return (
        batches.join(
            places, on=[*KEYS, "end_ns"], how="left", nulls_equal=True, maintain_order="left"
        )
        .with_columns(outcome=outcome.cast(OUTCOME))
        .drop("_spins", "_there")
    )


def _spins() -> pl.Expr:
    """Say whether a batch repeats the one before it, or is repeated by the one after it."""
    allowed = pl.when("is_coarse").then(_COARSE_SPIN_GAP_NS).otherwise(_SPIN_GAP_NS)
    same = pl.all_horizontal(
        pl.col(key).eq_missing(pl.col(key).shift(1)) for key in (*KEYS, "va", "n_page_faults")
    )
    gap = pl.col("start_ns") - pl.col("end_ns").shift(1)
    repeats = (same & (gap.abs() <= allowed)).fill_null(value=False)
    idle = (pl.col("bytes") == 0) & (pl.col("bytes").shift(-1) == 0)
    return repeats | (repeats.shift(-1) & idle).fill_null(value=False)


def _last_moves(silent: pl.DataFrame, migrations: pl.DataFrame) -> pl.DataFrame:
    """Find whether the page of each silent batch was at its GPU: true, false, or null: never came."""
    keys = {key: silent.schema[key] for key in KEYS}
    schema = pl.Schema({**keys, "end_ns": pl.Int64(), "_there": pl.Boolean()})
    if silent.is_empty():
        return pl.DataFrame(schema=schema)
    pages = silent.with_columns(bytes=pl.lit(PAGE_BYTES, pl.Int64)).rename({"end_ns": "at_ns"})
    edges = edges_of(pages)
    asked = cut(pages, edges).select(*KEYS, "segment", "at_ns")
    blocks = pages.select("pid", _block=pl.col("va") // VA_BLOCK_BYTES).unique()
    near = migrations.with_columns(_block=pl.col("va") // VA_BLOCK_BYTES).join(
        blocks, on=["pid", "_block"], how="semi", nulls_equal=True
    )
    # Only what lies on a page that was asked for: the other pieces belong to no question.
    moves = cut(_moves(near), edges).join(
        asked.select("pid", "segment").unique(), on=["pid", "segment"], how="semi", nulls_equal=True
    )
    return (
        nearest(
            asked.lazy(),
            moves.lazy().sort("_there").select(*KEYS, "segment", "moved_ns", "_there"),
            on=("at_ns", "moved_ns"),
            by=[*KEYS, "segment"],
        )
        .select(*KEYS, end_ns="at_ns", _there="_there")
        .cast(schema)
        .collect()
    )


def _moves(migrations: pl.DataFrame) -> pl.DataFrame:
    """List when ranges came to a GPU and when they left one."""
    columns = [*KEYS, "va", "bytes"]
    came = migrations.filter(pl.col("direction") != "dtoh").select(
        *columns, moved_ns="start_ns", _there=pl.lit(value=True)
    )
    left = migrations.filter(pl.col("direction") == "dtoh").select(
        *columns, moved_ns="start_ns", _there=pl.lit(value=False)
    )
    passed = migrations.filter(pl.col("direction") == "dtod").select(
        "pid",
        "va",
        "bytes",
        device_id="src_device_id",
        moved_ns="start_ns",
        _there=pl.lit(value=False),
    )
    return pl.concat([came, left, passed.select(came.columns)])
