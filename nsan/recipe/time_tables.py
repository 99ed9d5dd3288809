"""The tables of the recipe `uvm_time_map`: bins of time, with how much of each was covered."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.result import Result, derived, recorded
from nsan.recipe.plan import NAMED

_SHARES: Final = (
    derived("um_covered_ns", pl.Int64, "ns", "On any GPU a migration was in flight or a batch of GPU faults in service."),
    derived("migrations_covered_ns", pl.Int64, "ns", "On any GPU a migration was in flight."),
    derived("gpu_faults_covered_ns", pl.Int64, "ns", "On any GPU a batch of GPU faults was in service."),
    derived("um_fraction", pl.Float64, "fraction", "`um_covered_ns` over the length."),
    derived("shown_fraction", pl.Float64, "fraction", "`um_fraction`; where only one of both kinds was recorded, the share of that one."),
)  # fmt: skip
_BIN: Final = (
    derived("bin", pl.Int64, "id", "Number of the bin, from 0."),
    derived("start_ns", pl.Int64, "ns", "Its start, from the start of the run's first session."),
    derived("end_ns", pl.Int64, "ns", "Its end."),
)

ANALYSIS: Final = Result("analysis", "a bin of a report", (*NAMED, *_BIN, *_SHARES))
"""Of every report each bin; null: the report recorded nothing then, or not this."""

BY_GPU: Final = Result(
    "analysis_by_gpu",
    "a bin of a GPU and process of a report",
    (
        *NAMED,
        recorded("pid", pl.UInt32, "id", "Process."),
        recorded("device_id", pl.Int64, "id", "CUDA ordinal of the GPU in its process."),
        *_BIN,
        *_SHARES,
    ),
)
"""The same by process and GPU, for those that have such events."""

RANK_STATS: Final = Result(
    "rank_stats",
    "a report",
    (
        *NAMED,
        derived(
            "offset_ns", pl.Int64, "ns", "Start of its session after the first one of its run."
        ),
        derived("first_ns", pl.Int64, "ns", "First start of an event, on the common clock."),
        derived("last_ns", pl.Int64, "ns", "Last end of an event."),
        *_SHARES,
        derived(
            "shown", pl.String, "text", "What `shown_fraction` is of; empty: nothing is known."
        ),
    ),
)
"""Times and shares of the time from first to last."""

ALL_STATS: Final = Result(
    "all_stats",
    "a bin over all reports",
    (
        *_BIN,
        derived("n_reports", pl.Int64, "reports", "Reports whose share in it is known."),
        derived("mean_fraction", pl.Float64, "fraction", "Mean share of these."),
        derived("min_fraction", pl.Float64, "fraction", "Least share."),
        derived("max_fraction", pl.Float64, "fraction", "Largest share."),
        derived("max_source", pl.String, "text", "The report that has it; the first of several."),
    ),
)
