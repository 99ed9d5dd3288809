"""How much of a trace a history covers: outside of it nothing is known of the allocator's memory.

A ring buffer, and a recording that began after the program did, lack what was before. No row says when a
snapshot was taken, and a program may launch any amount of work without an allocation; what it launches
after the last entry shows whether it went on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import polars as pl

from nsan.analysis.pca.history import History
from nsan.analysis.pca.stream_order import Launches
from nsan.units import NS_PER_US
from nsan.uvm.constants import MANAGED_KINDS

FEWEST_WORKS: Final = 16
"""So many pieces of work without an entry are usual: the modelled training steps have such a run of 16
(AlexNet) to 200 (BERT) each, while their optimizer changes the parameters."""


def bounded(
    histories: Sequence[History],
    launches: Launches,
    allocations: pl.DataFrame,
    error_ns: float | None,
) -> list[History]:
    """Find until when each history covers the trace.

    Parameters
    ----------
    histories : sequence of History
        Of a snapshot.
    launches : Launches
        The work of the GPUs.
    allocations : DataFrame, ``ALLOCATIONS``
        Of the trace.
    error_ns : float, optional
        Most that is left over of a moment that trace and snapshot both know.

    Returns
    -------
    list of History
        The same, with ``until_ns``.

    Notes
    -----
    Two things show that the snapshot was taken before the program ended. One: the trace has a managed
    allocation of that process and GPU after the last entry, or a release of a segment that the history
    ends with; the history ends there. Two: more work of that GPU was launched after the last entry than
    ever between two entries, and more than :data:`FEWEST_WORKS`. Then some entry is missing, and as nothing
    says where, the history ends before the first work that was launched after its last entry. Less work than
    that is taken to follow the last entry as it did others; a program that went on for so short has, at
    most, the last few pieces of work placed by too old a state.
    """
    slack_ns = NS_PER_US + round(error_ns or 0)
    return [
        replace(
            each, until_ns=_earlier(_goes_on(each, launches), _changes(each, allocations, slack_ns))
        )
        for each in histories
    ]


def _earlier(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _goes_on(history: History, launches: Launches) -> int | None:
    """Find the first launch that shows that entries are missing; None: nothing shows it."""
    entries = history.entries["time_ns"]
    its = launches.groups.filter(*_is_of(history))
    launched = (
        launches.work.join(its.select("group"), on="group", how="semi")["launch_ns"]
        .drop_nulls()
        .sort()
    )
    run = entries.search_sorted(launched, side="right").rename("run")
    counts = dict(run.value_counts().iter_rows())
    n_after = counts.pop(entries.len(), 0)
    counts.pop(0, None)
    if n_after <= max(FEWEST_WORKS, *counts.values(), 0):
        return None
    return int(launched.filter(run == entries.len())[0])


def _changes(history: History, allocations: pl.DataFrame, slack_ns: int) -> int | None:
    """Find the first managed allocation or release after the history that is not in it."""
    last = history.entries["time_ns"].max()
    if last is None:
        return None
    after = int(last) + slack_ns  # type: ignore[arg-type]
    held = history.segments.filter(pl.col("free_sequence").is_null())["va"].unique().implode()
    managed = allocations.filter(
        pl.col("kind").cast(pl.String).is_in(MANAGED_KINDS), *_is_of(history)
    )
    made = managed.filter(pl.col("alloc_ns") > after)["alloc_ns"]
    gone = managed.filter(
        pl.col("free_ns") > after,
        pl.col("va").is_in(held),
        pl.col("alloc_ns").fill_null(0) <= after,
    )["free_ns"]
    return _earlier(made.min(), gone.min())  # type: ignore[arg-type]


def _is_of(history: History) -> tuple[pl.Expr, pl.Expr]:
    return (
        pl.col("pid").eq_missing(pl.lit(history.pid, pl.UInt32)),
        pl.col("device_id").eq_missing(pl.lit(history.device_id, pl.Int64)),
    )
