"""Batches where there are no fault rows: from the order and the gaps of the pushes alone.

The driver services the blocks of a batch in ascending order of address, so a block that does not
ascend opens a batch: certain, and on 19 real captures 97 to 100 % of all boundaries
(``calibration.md`` 1). Where the address does ascend, the time between two pushes decides, against
what it would be inside a batch and between two: both follow from the driver's cost of a block,
which the certain boundaries of the same capture show. A fixed gap is wrong in up to 54 % of cases.
An inference: every figure that stands on it is *reconstructed*. Against the model's truth nearly all
pushes that it puts together belong together; where the copy before was short and the host is slow,
a pause inside a batch looks like one between two, and it cuts there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.driver.rows_and_copies import KEYS
from nsan.analysis.nearest import nearest
from nsan.uvm.constants import CAUSE_COHERENCE, PAGE_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TURNAROUND_NS: Final = 2_600.0
"""Least time between two pushes (calibration.md 3)."""

_TYPICAL: Final = (28_000.0, 200.0, 45_000.0, 10_000.0, 700.0)
"""Gap before a batch on an A100 host: base, ns per page moved, first service of a block, an
eviction, ns per faulted page (calibration.md 5: a + R, b, f, e; evictions are not measured)."""

_OF_A_BLOCK: Final = 4
"""The first four of these are costs of a block, the last one of a batch."""

_BLOCK_SHARE: Final = 0.3
"""Part of the base that each block costs inside a batch (a of a + R)."""

_TOWARDS_BETWEEN: Final = 0.5
"""How far from a gap inside a batch to one between two the line is drawn."""

_MOST_NS: Final = 1e12
_MOST_PAGES: Final = 512

_ROUNDS: Final = 8


def with_group(fault_copies: pl.LazyFrame, evictions: pl.LazyFrame) -> pl.DataFrame:
    """Put the pushes of page faults together into batches.

    Parameters
    ----------
    fault_copies : LazyFrame
        Copies to a GPU by page faults, with ``push_id`` and ``va_block`` of
        :func:`nsan.analysis.driver.pushes.with_push_id`.
    evictions : LazyFrame
        What a push may have waited for: evictions, and copies that another GPU gave first. Reads
        ``pid``, ``device_id``, ``start_ns``, ``end_ns``. Their time is no gap between batches.

    Returns
    -------
    DataFrame
        One row per push, by process, GPU and start: ``pid``, ``device_id``, ``push_id``, and
        ``group`` (Int64), ascending with time within a process and GPU.
    """
    pushes = _timed(fault_copies, evictions).collect()
    parts = [
        mine.with_columns(opens=_opens(mine))
        for mine in pushes.partition_by(KEYS, maintain_order=True)
    ]
    marked = pl.concat(parts) if parts else pushes.with_columns(opens=pl.lit(value=True))
    return marked.select(
        *KEYS, "push_id", group=pl.col("opens").cum_sum().over(KEYS).cast(pl.Int64)
    )


def _timed(fault_copies: pl.LazyFrame, evictions: pl.LazyFrame) -> pl.LazyFrame:
    """One row per push, by process, GPU and start, with the idle time before it."""
    pages = pl.col("bytes").sum() / PAGE_BYTES
    faulted = pl.col("bytes").filter(pl.col("cause_id") == CAUSE_COHERENCE).sum() / PAGE_BYTES
    pushes = (
        fault_copies.group_by(*KEYS, "push_id", "va_block")
        .agg(
            first_ns=pl.col("start_ns").min(),
            last_ns=pl.col("end_ns").max(),
            n_pages=pages,
            n_faulted=faulted,
        )
        .sort(*KEYS, "push_id")
        .with_columns(
            before_ns=pl.col("last_ns").shift(1).over(KEYS),
            copied_ns=(pl.col("last_ns") - pl.col("first_ns")).shift(1).over(KEYS),
            is_first=pl.col("push_id") == pl.col("push_id").min().over(*KEYS, "va_block"),
            ascends=(pl.col("va_block") > pl.col("va_block").shift(1)).over(KEYS),
        )
    )
    room = (
        evictions.select(
            *KEYS, at="start_ns", ns=(pl.col("end_ns") - pl.col("start_ns")).fill_null(0)
        )
        .drop_nulls("at")
        .sort("at")
        .with_columns(evicted_ns=pl.col("ns").cum_sum().over(KEYS))
        .drop("ns")
    )
    for name, moment in (("_until", "first_ns"), ("_from", "before_ns")):
        pushes = (
            nearest(pushes, room, on=(moment, "at"), by=KEYS)
            .rename({"evicted_ns": name})
            .drop("at")
        )
    made_room = pl.col("_until").fill_null(0) - pl.col("_from").fill_null(0)
    return pushes.with_columns(
        gap_ns=pl.col("first_ns") - pl.col("before_ns") - made_room, evicts=made_room > 0
    ).sort(*KEYS, "push_id")


def _opens(pushes: pl.DataFrame) -> pl.Series:
    """Say which pushes of one process and GPU open a batch."""
    import numpy as np

    features = np.column_stack(
        [
            np.ones(pushes.height),
            pushes["n_pages"].clip(0, _MOST_PAGES).to_numpy(),
            pushes["is_first"].cast(pl.Float64).to_numpy(),
            pushes["evicts"].cast(pl.Float64).to_numpy(),
            pushes["n_faulted"].clip(0, _MOST_PAGES).to_numpy(),
        ]
    )
    # Broken cells must not make the fit singular.
    gap = pushes["gap_ns"].cast(pl.Float64).clip(-_MOST_NS, _MOST_NS).to_numpy(allow_copy=True)
    ascends = pushes["ascends"].fill_null(value=False).to_numpy()
    certain = ~ascends & ~np.isnan(gap)
    cost = _least_deviation(features[certain], gap[certain])
    between = features @ cost
    # The driver works on a block while the copies of the one before are under way.
    share = np.array([_BLOCK_SHARE, *[1.0] * (_OF_A_BLOCK - 1)])
    block = features[:, :_OF_A_BLOCK] @ (cost[:_OF_A_BLOCK] * share)
    inside = np.maximum(block - pushes["copied_ns"].fill_null(0).to_numpy(), _TURNAROUND_NS)
    limit = inside + _TOWARDS_BETWEEN * np.maximum(between - inside, 0)
    return pl.Series("opens", ~ascends | (gap > limit))


def _least_deviation(
    features: NDArray[np.float64], gap: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Fit gap = features x cost with the least sum of absolute errors, none of them negative.

    A program computes on what it got, so gaps have a long tail: squares would follow it.
    """
    import numpy as np

    typical = np.array(_TYPICAL)
    # Costs that the capture does not show stay near those of a known host.
    ridge = np.diag(0.5 / typical)
    weight, cost = np.ones(len(gap)), typical
    for _ in range(_ROUNDS):
        scaled = features * weight[:, None]
        normal = features.T @ scaled + ridge * len(typical)
        cost = np.maximum(
            np.linalg.solve(normal, scaled.T @ gap + ridge @ typical * len(typical)), 0
        )
        weight = 1 / np.maximum(np.abs(gap - features @ cost), 1_000.0)
    return cost
