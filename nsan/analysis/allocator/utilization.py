"""Utilization and fragmentation as GMLake defines them, and what a single number hides.

GMLake (Guo et al., ASPLOS 2024) divides the peak of active by the peak of reserved memory: 1 - that is
fragmentation. The two peaks need not be at one time, so the values at one instant stand beside it.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.allocator.blocks import GPU, ratio
from nsan.analysis.allocator.replayed import (
    FEWEST_ENTRIES,
    REPLAY_KIND,
    REPLAY_READS,
    Replays,
    replays_of,
)
from nsan.analysis.allocator.state import ALL_POOLS, allocator_state
from nsan.analysis.catalog import analysis
from nsan.analysis.result import Result, derived, recorded

ALLOCATOR_UTILIZATION: Final = Result(
    "allocator_utilization",
    "one GPU of the snapshot",
    (
        GPU,
        derived(
            "utilization_fraction",
            pl.Float64,
            "fraction",
            "Peak active over peak reserved (GMLake).",
        ),
        derived("fragmentation_fraction", pl.Float64, "fraction", "1 - that."),
        derived("peak_active_bytes", pl.Int64, "byte", "Most in use, pending frees among them."),
        derived("peak_reserved_bytes", pl.Int64, "byte", "Most held from the driver."),
        derived("peak_allocated_bytes", pl.Int64, "byte", "Most held by tensors."),
        derived("waste_at_peak_bytes", pl.Int64, "byte", "Active, not asked for: at peak active."),
        derived(
            "utilization_at_peak_fraction",
            pl.Float64,
            "fraction",
            "Active over reserved when reserved had reached its peak and the request was served.",
        ),
        derived(
            "external_at_peak_fraction", pl.Float64, "fraction", "1 - largest free / all free."
        ),
        derived(
            "largest_cached_at_peak_bytes", pl.Int64, "byte", "Largest free block; null: none."
        ),
        derived(
            "mean_utilization_fraction",
            pl.Float64,
            "fraction",
            "Active over reserved, mean over time while anything is reserved; null: no times.",
        ),
        derived(
            "least_utilization_fraction",
            pl.Float64,
            "fraction",
            "Least active over reserved from then on.",
        ),
        derived("final_utilization_fraction", pl.Float64, "fraction", "In the snapshot's state."),
        recorded("final_active_bytes", pl.Int64, "byte", "In the snapshot's state."),
        recorded("final_reserved_bytes", pl.Int64, "byte", "In the snapshot's state."),
        derived(
            "is_complete",
            pl.Boolean,
            "flag",
            "The history begins with an empty allocator; else a peak may lie before it.",
        ),
        recorded("n_entries", pl.Int64, "entries", "Entries of the history."),
        derived("peak_active_sequence", pl.Int64, "id", "Entry of the peak; -1: before the first."),
        derived("peak_active_ns", pl.Int64, "ns", "When, since the first entry."),
        derived("peak_reserved_sequence", pl.Int64, "id", "Entry that reached the peak; or -1."),
        derived("peak_reserved_ns", pl.Int64, "ns", "When, since the first entry."),
        REPLAY_KIND,
    ),
    nothing="The snapshot has neither a segment nor a history.",
)

_HISTORY: Final = [
    column.name
    for column in ALLOCATOR_UTILIZATION.columns
    if column.name != "device_id" and not column.name.startswith(("final_", "n_"))
]


@analysis(
    question="How well is the reserved memory used, and how fragmented is it?",
    result=ALLOCATOR_UTILIZATION,
    reads=REPLAY_READS,
    complexity="O(n log n) for n entries; the replay is a loop",
    source="GMLake, ASPLOS 2024, utilization and fragmentation ratio; allocator.md 8",
)
def allocator_utilization(
    segments: pl.LazyFrame,
    blocks: pl.LazyFrame,
    allocator_events: pl.LazyFrame,
    allocator_settings: pl.LazyFrame,
) -> pl.LazyFrame:
    """Compare what was in use with what was reserved, at the peaks and over time.

    Parameters
    ----------
    segments, blocks : LazyFrame
        Tables of a snapshot: the state at the end.
    allocator_events : LazyFrame, ``ALLOCATOR_EVENTS``
        The history, in any order.
    allocator_settings : LazyFrame, ``ALLOCATOR_SETTINGS``
        Settings, among them the version.

    Returns
    -------
    LazyFrame, ``ALLOCATOR_UTILIZATION``
        By GPU. Without a history (no entry, or one) only the state is known: all other figures are null.

    Examples
    --------
    >>> from nsan.torch_alloc.tables import SNAPSHOT_TABLES as tables
    >>> allocator_utilization(*(tables[name].empty() for name in REPLAY_READS)).collect().height
    0
    """

    def build() -> pl.DataFrame:
        found = replays_of(segments, blocks, allocator_events, allocator_settings)
        state = allocator_state(segments, blocks).filter(pl.col("pool") == ALL_POOLS).collect()
        peaks = _peaks(found.series)
        rows = (
            found.checks.join(peaks, on="device_id", how="left")
            .join(_free_at_peak(found, peaks), on="device_id", how="left")
            .join(_final(state), on="device_id", how="left")
            .sort("device_id")
        )
        enough = pl.col("n_entries") >= FEWEST_ENTRIES
        return rows.with_columns(pl.when(enough).then(name).alias(name) for name in _HISTORY)

    return ALLOCATOR_UTILIZATION.from_rows(build)


def _final(state: pl.DataFrame) -> pl.DataFrame:
    names = ("utilization_fraction", "active_bytes", "reserved_bytes")
    return state.select("device_id", *(pl.col(name).alias(f"final_{name}") for name in names))


def _peaks(series: pl.DataFrame) -> pl.DataFrame:
    """Find the peaks of each GPU, and what the other levels were at them."""
    reserved, active = pl.col("reserved_bytes"), pl.col("active_bytes")
    now = ratio(active, reserved)
    grows = pl.col("action").cast(pl.String).is_in(["segment_alloc", "segment_map"])
    top = reserved == reserved.max()
    # A new segment is empty for one entry: the request that asked for it is served in the next.
    served = (top & ~grows.fill_null(value=False)).arg_max()
    settled = pl.max_horizontal(served, top.arg_max())
    until = (pl.col("time_ns").shift(-1) - pl.col("time_ns")).clip(lower_bound=0).fill_null(0)
    weight = pl.when(reserved > 0).then(until).otherwise(0)
    at, rises = active.arg_max(), reserved.arg_max()
    lasted = weight.sum()
    return series.group_by("device_id").agg(
        peak_active_bytes=active.max(),
        peak_reserved_bytes=reserved.max(),
        peak_allocated_bytes=pl.col("allocated_bytes").max(),
        waste_at_peak_bytes=(active - pl.col("requested_bytes")).get(at),
        peak_active_sequence=pl.col("sequence").get(at),
        peak_active_ns=pl.col("time_ns").get(at),
        peak_reserved_sequence=pl.col("sequence").get(rises),
        peak_reserved_ns=pl.col("time_ns").get(rises),
        settled_sequence=pl.col("sequence").get(settled),
        utilization_at_peak_fraction=now.get(settled),
        least_utilization_fraction=now.slice(settled).min(),
        mean_utilization_fraction=ratio((now.fill_null(0) * weight).sum(), lasted),
        utilization_fraction=ratio(active.max(), reserved.max()),
        fragmentation_fraction=1 - ratio(active.max(), reserved.max()),
    )


def _free_at_peak(found: Replays, peaks: pl.DataFrame) -> pl.DataFrame:
    """Measure the free blocks of each GPU when reserved had reached its peak."""
    rows = []
    for gpu, sequence in peaks.select("device_id", "settled_sequence").iter_rows():
        free = found.free_at(gpu, sequence)["bytes"]
        rows.append({"device_id": gpu, "largest": free.max(), "cached": free.sum()})
    schema = {"device_id": pl.Int64, "largest": pl.Int64, "cached": pl.Int64}
    return pl.DataFrame(rows, schema=schema).select(
        "device_id",
        largest_cached_at_peak_bytes="largest",
        external_at_peak_fraction=1 - ratio(pl.col("largest"), pl.col("cached")),
    )
