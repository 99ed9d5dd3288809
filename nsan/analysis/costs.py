"""What each analysis of a trace takes of memory, so that one that would not fit is not begun.

Measured by ``python -m benchmarks.huge --costs``: the peak of the process, less what it had before, per event row
of the tables that the analysis reads, rounded up. Those with 0 go through any number of rows in bounded memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import polars as pl

from nsan.analysis.apart import KEYS
from nsan.analysis.keeping import keeps
from nsan.memory_budget import check

if TYPE_CHECKING:
    from nsan.analysis.catalog import Analysis


@dataclass(frozen=True)
class Cost:
    """What an analysis takes.

    Attributes
    ----------
    bytes_per_row : int
        Bytes for each event row that it reads.
    of : {"capture", "place"}
        All rows are held at once, or those of one process and GPU at a time.
    """

    bytes_per_row: int
    of: Literal["capture", "place"] = "capture"


_UNMEASURED: Final = Cost(0)
"""Of an analysis of the user's own nothing is known: it is run."""

COSTS: Final[Mapping[str, Cost]] = {
    "fault_row_checks": Cost(0),
    "pushes": Cost(290),
    "batches": Cost(430),
    "faults_by_va_block": Cost(10),
    "faults_by_page": Cost(15),
    "faults_by_access": Cost(540),
    "batch_latency": Cost(430),
    "latency_histogram": Cost(510),
    "batch_gaps": Cost(560),
    "service_fit": Cost(530),
    "fault_episodes": Cost(180),
    "episode_gaps": Cost(180),
    "cluster_cells": Cost(150),
    "fault_clusters": Cost(115, "place"),
    "access_patterns": Cost(400),
    "traffic_matrix": Cost(0),
    "migrations_by_cause": Cost(0),
    "traffic_over_time": Cost(0),
    "transfer_efficiency": Cost(250),
    "copy_cost": Cost(10),
    "amplification": Cost(35),
    "prefetch_share": Cost(1400),
    "user_prefetches": Cost(80),
    "residency_runs": Cost(480),
    "resident_bytes_over_time": Cost(650),
    "residency_checks": Cost(500),
    "refaults": Cost(670),
    "evictions": Cost(780),
    "refaults_by_va_block": Cost(820),
    "refault_totals": Cost(860),
    "ping_pong": Cost(360),
    "ping_pong_by_va_block": Cost(370),
    "memory_ledger": Cost(630),
    "oversubscription_factor": Cost(730),
    "working_set": Cost(260),
    "working_set_by_nvtx": Cost(260),
    "faults_by_kernel": Cost(630),
    "faults_by_kernel_instance": Cost(590),
    "faults_by_nvtx": Cost(610),
    "faults_by_allocation": Cost(480),
    "faults_by_function": Cost(10),
    "clock_offset": Cost(110),
    "iterations": Cost(150),
    "block_successors": Cost(110),
    "prefetch_replay": Cost(410),
    "lost_rows": Cost(450),
    "pca_effect": Cost(700),
    "state_traffic": Cost(700),
    "tensor_traffic": Cost(700),
    "line_traffic": Cost(700),
    "annotation_traffic": Cost(700),
    "va_block_sharing": Cost(700),
    "step_ledger": Cost(700),
    "clock_alignment": Cost(700),
    "migrated_parts": Cost(700),
    "placed_faults": Cost(700),
    "tensors_in_time": Cost(700),
    "causes_over_time": Cost(180),
    "batches_over_time": Cost(460),
    "service_over_time": Cost(530),
    "batch_time_classes": Cost(440),
    "address_runs": Cost(20),
    "address_time_cells": Cost(220),
    "transfer_cells": Cost(180),
    "transfer_curves": Cost(10),
    "memory_over_time": Cost(710),
    "refault_distances": Cost(650),
    "top_kernels": Cost(640),
    "top_allocations": Cost(510),
    "work_lanes": Cost(600),
    "step_traffic": Cost(160),
    "moves_map": Cost(700),
}
"""By analysis of a trace."""

_OF_PLACES: Final = ("gpu_faults", "migrations")
_EVENTS: Final = (
    *_OF_PLACES,
    "cpu_faults",
    "copies",
    "memsets",
    "kernels",
    "api_calls",
    "driver_events",
)


def takes_places_apart(analysis: Analysis) -> bool:
    """Say whether an analysis takes one process and GPU after another."""
    return COSTS.get(analysis.name, _UNMEASURED).of == "place"


def rows_held(analysis: Analysis, tables: Mapping[str, pl.LazyFrame]) -> int:
    """Count the rows that an analysis holds at a time.

    Parameters
    ----------
    analysis : Analysis
        Of a trace.
    tables : mapping of str to LazyFrame
        At least the tables of the trace that it reads.

    Returns
    -------
    int
        Event rows of all tables that it reads; where it takes processes and GPUs one after another, those
        of the one that has most.
    """
    apart = takes_places_apart(analysis)
    read = [tables[name] for name in _counted(analysis)]
    if not read:
        return 0
    n = pl.len().cast(pl.Int64).alias("n")
    counted = [table.group_by(KEYS).agg(n) if apart else table.select(n) for table in read]
    found = pl.concat(pl.collect_all(counted))
    held = found.group_by(KEYS).agg(pl.col("n").sum()) if apart else found.select(pl.col("n").sum())
    most = held["n"].max()
    return most if isinstance(most, int) else 0


def rows_read(analysis: Analysis, counts: Mapping[str, int]) -> int:
    """Say how many rows an analysis holds at most, from the rows that each table has.

    Parameters
    ----------
    analysis : Analysis
        Of a trace.
    counts : mapping of str to int
        Rows by table.

    Returns
    -------
    int
        Rows of the tables that :func:`rows_held` counts: as many, or more where processes and GPUs are
        taken one after another.
    """
    return sum(counts.get(name, 0) for name in _counted(analysis))


def _counted(analysis: Analysis) -> list[str]:
    """Name the tables that an analysis reads of which the rows count."""
    of = _OF_PLACES if takes_places_apart(analysis) else _EVENTS
    return [name for name in analysis.reads if name in of]


def check_cost(analysis: Analysis, rows: int) -> None:
    """Refuse an analysis that would need more memory than may be used.

    Parameters
    ----------
    analysis : Analysis
        Of a trace.
    rows : int
        Rows that it would hold at a time.

    Raises
    ------
    OverBudgetError
        If they would not fit.
    """
    cost = COSTS.get(analysis.name, _UNMEASURED)
    if cost.bytes_per_row:
        check(
            analysis.name, rows, cost.bytes_per_row, of_many=keeps(), has_parts=not analysis.whole
        )
