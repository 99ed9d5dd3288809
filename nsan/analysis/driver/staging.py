"""Copies between two GPUs that cannot reach each other: first to the CPU, then on."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.nearest import nearest
from nsan.uvm.constants import CAUSE_COHERENCE, CAUSE_PREFETCH

MAX_TURN_NS: Final = 5_000
"""The second leg follows the first within this time: 2.6 us in the model, as between any two pushes; no
real capture shows it. A CPU fault and then one of another GPU are further apart (12 us seen)."""


def first_legs(ordered: pl.DataFrame) -> pl.DataFrame:
    """Find copies to the CPU that a page fault of another GPU asked for.

    They carry the cause of a page fault, as copies for a CPU fault do. What tells them apart: the
    same runs go on to another GPU at once.

    Parameters
    ----------
    ordered : DataFrame
        Migrations with ``_row`` and ``push_id`` of :func:`nsan.analysis.driver.pushes.with_push_id`.

    Returns
    -------
    DataFrame
        ``_row`` of the first leg and ``_onward``, the row of its second leg.
    """
    schema = pl.Schema({"_row": ordered.schema["_row"], "_onward": ordered.schema["_row"]})
    gpus = ordered.select("pid", "device_id").unique().group_by("pid").len()
    several = gpus.filter(pl.col("len") > 1).select("pid")
    if several.is_empty():
        return pl.DataFrame(schema=schema)
    faulted = ordered.filter(pl.col("cause_id").is_in([CAUSE_COHERENCE, CAUSE_PREFETCH])).join(
        several, on="pid", how="semi", nulls_equal=True
    )
    run = ["pid", "va", "bytes", "cause_id"]
    first = faulted.filter(pl.col("direction") == "dtoh").select(
        "_row",
        *run,
        _from="device_id",
        over_ns=pl.col("end_ns").max().over("push_id"),
    )
    second = faulted.filter(pl.col("direction") == "htod").select(
        *run,
        _onward="_row",
        _to="device_id",
        begun_ns=pl.col("start_ns").min().over("push_id"),
    )
    # The push that goes on begins after the one that came is over.
    pairs = nearest(
        first.lazy(),
        second.lazy(),
        on=("over_ns", "begun_ns"),
        by=run,
        forward=True,
        tolerance_ns=MAX_TURN_NS,
    )
    return (
        pairs.filter(pl.col("_to").is_not_null() & (pl.col("_to") != pl.col("_from")))
        .select("_row", "_onward")
        .cast(schema)
        .collect()
    )
