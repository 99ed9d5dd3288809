"""What happened to each VA block, seen from each GPU, in order of time: input of the replay.

An event is a push (to the GPU, from it, or between other processors), a release of memory, a
population by the CPU, or a GPU fault row that asks whether its page came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.driver.pushes import with_push_id
from nsan.analysis.loss.masks import PAGES
from nsan.uvm.constants import (
    CAUSE_COHERENCE,
    CAUSE_EVICTION,
    CAUSE_PREFETCH,
    CAUSE_USER,
    PAGE_BYTES,
    VA_BLOCK_BYTES,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from nsan.analysis.loss.masks import Ints

ARRIVES: Final = 0
LEAVES_GPU: Final = 1
ELSEWHERE: Final = 2
POPULATED: Final = 3
RELEASED: Final = 4
FAULT_ROW: Final = 5
"""Kinds of events; see :class:`Events`."""

_VIEW: Final = ("pid", "va_block", "device_id")
SETTLED_NS: Final = 5_000_000
"""The copies of a CPU fault have begun by then (throttled ones waited 0.7 ms)."""


@dataclass(frozen=True)
class Events:
    """Events in order of process, block, GPU and time.

    Attributes
    ----------
    views : DataFrame
        ``pid``, ``va_block``, ``device_id``: the blocks as seen from a GPU, by ``view``.
    view : ndarray of int64
        Which of them each event belongs to.
    time_ns, until_ns : ndarray of int64
        When it starts, and when its last copy ends (of a fault row: where its window
        begins; of a population: when the CPU faulted, since it is certain only later).
    kind : ndarray of uint8
        Pages arrive at the GPU; leave it; move between other processors; are populated by the CPU;
        are released; or a fault row names one.
    by_fault : ndarray of bool
        All copies of a push have a cause of faults: coherence or prefetch.
    between_gpus : ndarray of bool
        A copy between GPUs.
    first_row, last_row : ndarray of int64
        Half-open range in the arrays below: its copies.
    first_page, last_page, cause : ndarray of int64
        Of each copy: pages of the block, half-open, and why.
    """

    views: pl.DataFrame
    view: Ints
    time_ns: Ints
    until_ns: Ints
    kind: npt.NDArray[np.uint8]
    by_fault: npt.NDArray[np.bool_]
    between_gpus: npt.NDArray[np.bool_]
    first_row: Ints
    last_row: Ints
    first_page: Ints
    last_page: Ints
    cause: Ints

    def __len__(self) -> int:
        return len(self.view)


def events_of(copies: pl.DataFrame, others: pl.DataFrame) -> Events:
    """Put pushes and what else happened to their blocks in order.

    Parameters
    ----------
    copies : DataFrame
        As of :func:`copies_of`.
    others : DataFrame
        ``pid``, ``va_block``, ``device_id`` (null: every GPU that has the block), ``time_ns``,
        ``until_ns``, ``kind``, ``first_page``, ``last_page``.

    Returns
    -------
    Events
        Only of blocks that a copy touches.
    """
    pushes = _pushes(copies)
    sides = pl.concat([pushes.select(_VIEW), pushes.select("pid", "va_block", device_id="src")])
    views = sides.filter(pl.col("device_id").is_not_null()).unique()
    lone = pushes.filter(pl.col("device_id").is_null()).select(_VIEW).unique()
    views = pl.concat([views, lone]).sort(_VIEW).with_row_index("view")
    rest = others.with_row_index("row").with_columns(
        pl.col("row").cast(pl.Int64) + len(copies), by_fault=False, between_gpus=False
    )
    rest = rest.with_columns(first_row="row", last_row=pl.col("row") + 1)
    ordered = (
        pl.concat([_seen_from(pushes, views), _everywhere(rest, views)])
        .sort("view", "time_ns", pl.col("kind").replace_strict(_ORDER), "first_row")
        .drop("order", strict=False)
    )
    pages = pl.concat(
        [
            copies.select("first_page", "last_page", "cause_id"),
            others.select("first_page", "last_page", cause_id=pl.lit(0, pl.Int64)),
        ]
    )
    numbers = {name: ordered[name].cast(pl.Int64).to_numpy() for name in _NUMBERS}
    return Events(
        views=views.select(_VIEW),
        kind=ordered["kind"].to_numpy(),
        by_fault=ordered["by_fault"].to_numpy(),
        between_gpus=ordered["between_gpus"].to_numpy(),
        first_page=pages["first_page"].to_numpy(),
        last_page=pages["last_page"].to_numpy(),
        cause=pages["cause_id"].fill_null(0).to_numpy(),
        **numbers,
    )


_NUMBERS: Final = ("view", "time_ns", "until_ns", "first_row", "last_row")
_ORDER: Final = {RELEASED: 0, LEAVES_GPU: 1, ELSEWHERE: 2, POPULATED: 3, ARRIVES: 4, FAULT_ROW: 5}
"""What comes first at equal times."""


def copies_of(migrations: pl.LazyFrame) -> pl.DataFrame:
    """List the copies by process, block and push, with the pages they cover.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration.

    Returns
    -------
    DataFrame
        One row per copy that has a start, an address and a size: the columns read without ``va``,
        ``va_block``, ``push_id``, ``first_page`` and ``last_page`` (half-open, in the block).
    """
    page = pl.col("va") % VA_BLOCK_BYTES // PAGE_BYTES
    size = (pl.col("va") % PAGE_BYTES).cast(pl.Int64) + pl.col("bytes")
    found = (
        with_push_id(migrations.filter(pl.col("bytes") > 0))
        .with_columns(first_page=page.cast(pl.Int64), n=-(-size // PAGE_BYTES))
        .with_columns(last_page=(pl.col("first_page") + pl.col("n")).clip(None, PAGES))
        .drop("n", "va", "sequence", strict=False)
        .collect()
    )
    # They come by process, GPU and push; a sort by one key is much faster.
    keys = ["va_block"] if found["pid"].n_unique() <= 1 else ["pid", "va_block"]
    return found.sort(keys, maintain_order=True)


def _pushes(copies: pl.DataFrame) -> pl.DataFrame:
    """Put the copies of a push together; they are neighbours."""
    cause = pl.col("cause_id")
    return (
        copies.with_row_index("row")
        .group_by("push_id", maintain_order=True)
        .agg(
            pl.col("pid", "va_block", "device_id", "direction").first(),
            src=pl.when(pl.col("direction") == "dtod").then("src_device_id").first(),
            time_ns=pl.col("start_ns").first(),
            until_ns=pl.col("end_ns").max(),
            first_row=pl.col("row").first().cast(pl.Int64),
            n=pl.len().cast(pl.Int64),
            by_fault=cause.is_in([CAUSE_COHERENCE, CAUSE_PREFETCH]).fill_null(value=False).all(),
            by_other=cause.is_in([CAUSE_EVICTION, CAUSE_USER]).fill_null(value=False).all(),
        )
        .with_columns(
            last_row=pl.col("first_row") + pl.col("n"),
            until_ns=pl.max_horizontal("until_ns", "time_ns"),
        )
    )


def _seen_from(pushes: pl.DataFrame, views: pl.DataFrame) -> pl.DataFrame:
    """Say what each push is to each GPU that has its block."""
    here = pl.col("device_id").eq_missing(pl.col("viewer"))
    between = pl.col("direction") == "dtod"
    from_here = pl.col("src").is_null() | (pl.col("src") == pl.col("viewer"))
    kind = (
        pl.when(here & (pl.col("direction") == "dtoh"))
        .then(LEAVES_GPU)
        .when(here)
        .then(ARRIVES)
        .when(between & from_here)
        .then(LEAVES_GPU)
        .otherwise(ELSEWHERE)
    )
    return (
        pushes.join(views.rename({"device_id": "viewer"}), on=["pid", "va_block"], nulls_equal=True)
        .with_columns(kind=kind.cast(pl.UInt8), between_gpus=between.fill_null(value=False))
        .select("view", *_COLUMNS, fought=pl.col("by_other").not_())
        .with_columns(
            # Only moves that faults cause count as thrashing; anything unknown may be one.
            by_fault=pl.when(pl.col("kind") == ARRIVES).then("by_fault").otherwise("fought")
        )
        .drop("fought")
    )


_COLUMNS: Final = (
    "time_ns",
    "until_ns",
    "kind",
    "by_fault",
    "between_gpus",
    "first_row",
    "last_row",
)


def _everywhere(others: pl.DataFrame, views: pl.DataFrame) -> pl.DataFrame:
    """Give each other event to the GPUs that it concerns."""
    own = others.filter(pl.col("kind") == FAULT_ROW)
    shared = others.filter(pl.col("kind") != FAULT_ROW)
    return pl.concat(
        [
            own.join(views, on=list(_VIEW), nulls_equal=True).select("view", *_COLUMNS),
            shared.join(
                views.select("view", "pid", "va_block"), on=["pid", "va_block"], nulls_equal=True
            ).select("view", *_COLUMNS),
        ]
    )
