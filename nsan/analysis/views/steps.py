"""A few steps of the program side by side: when in each step memory moved, and why."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.attribution.causes import MIGRATION_READS
from nsan.analysis.attribution.iterations import BASIS, iterations
from nsan.analysis.attribution.work import WORK_READS
from nsan.analysis.catalog import analysis
from nsan.analysis.result import PID, Result, derived, reconstructed, recorded
from nsan.analysis.views.spread import columns_for
from nsan.schema import CAUSE, DIRECTION

_RANGE_READS: Final = ("start_ns", "end_ns", "pid", "tid", "domain", "name", "depth")
_MOVED: Final = (*MIGRATION_READS, "cause")
_STEP: Final = ("pid", "device_id", "step_id")

STEP_TRAFFIC: Final = Result(
    "step_traffic",
    "migrations of one direction and cause in one stretch of a step, or a step without any",
    (
        PID,
        derived("device_id", pl.Int64, "id", "GPU whose kernels repeat; null: all of the process."),
        derived("step_id", pl.Int64, "id", "Number of the step, from 0."),
        derived("n_steps", pl.Int64, "steps", "Steps that there are, shown here or not."),
        reconstructed("basis", BASIS, "label", "What the steps are taken from."),
        derived("name", pl.String, "text", "The NVTX range, or the first kernel of the step."),
        derived("start_ns", pl.Int64, "ns", "Start of the step."),
        derived("time_ns", pl.Int64, "ns", "Its length."),
        derived("step_in_bytes", pl.Int64, "byte", "Moved to GPUs in all of it."),
        derived("step_out_bytes", pl.Int64, "byte", "Moved to the CPU in all of it."),
        derived("n_fault_rows", pl.Int64, "rows", "GPU fault rows in all of it."),
        derived("offset_ns", pl.Int64, "ns", "Start of the stretch, from that of the step."),
        derived("length_ns", pl.Int64, "ns", "Length of the stretch: the same for all steps."),
        recorded("direction", DIRECTION, "label", "Direction; null: nothing moved in the step."),
        recorded("cause", CAUSE, "label", "Cause."),
        derived("bytes", pl.Int64, "byte", "Bytes of the copies that start in the stretch."),
        derived("n_migrations", pl.Int64, "copies", "These copies."),
    ),
    nothing="No loop was recognised, neither by NVTX ranges nor by a sequence of kernels that repeats.",
)


@analysis(
    question="When in a step does memory move, and is it the same in each step?",
    result=STEP_TRAFFIC,
    reads={
        "gpu_faults": ("start_ns", "end_ns", "pid", "device_id"),
        "migrations": _MOVED,
        "kernels": WORK_READS["kernels"],
        "nvtx_ranges": _RANGE_READS,
    },
    source="domain.md E-21",
)
def step_traffic(  # noqa: PLR0913 - the tables that it reads count too
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    kernels: pl.LazyFrame,
    nvtx_ranges: pl.LazyFrame,
    *,
    most: int = 12,
    n_bins: int = 40,
    basis: str = "auto",
    nvtx: str = "",
) -> pl.LazyFrame:
    """Cut a few steps into stretches of one length and add up what moved in each.

    Parameters
    ----------
    gpu_faults, migrations, kernels, nvtx_ranges : LazyFrame
        As in :func:`nsan.analysis.attribution.iterations.iterations`.
    most : int, default 12
        Steps to show of a process (of a GPU of it, where kernels tell): the first, the last, and those
        that move most. Of equal ones the earlier.
    n_bins : int, default 40
        Stretches of the longest step that is shown; fewer where there are too many causes and steps.
    basis : str, default "auto"
        As in ``iterations``.
    nvtx : str, default ""
        As in ``iterations``.

    Returns
    -------
    LazyFrame, ``STEP_TRAFFIC``
        By process, GPU, step, stretch, direction and cause. A copy counts where it starts; the bytes of
        a step add up to ``step_in_bytes`` and ``step_out_bytes``. What is in no step is left out.
    """

    def build() -> pl.DataFrame:
        found = iterations(
            gpu_faults,
            migrations.select(MIGRATION_READS),
            kernels,
            nvtx_ranges,
            basis=basis,
            nvtx=nvtx,
        )
        moved = migrations.select(_MOVED).collect()
        steps = _chosen(found.filter(pl.col("part") == "step").collect(), most)
        steps = _with_stretches(steps, moved, n_bins)
        parts = _moved_in(steps, moved)
        return (
            steps.join(parts, on=_STEP, how="left", nulls_equal=True, maintain_order="left")
            .with_columns(pl.col("bytes", "n_migrations", "offset_ns").fill_null(0))
            .sort(*_STEP, "offset_ns", "direction", "cause")
        )

    return STEP_TRAFFIC.from_rows(build)


def _chosen(steps: pl.DataFrame, most: int) -> pl.DataFrame:
    """Keep the first step, the last one, and those that move most."""
    by = ["pid", "device_id"]
    edge = (pl.col("step_id") == 0) | (pl.col("step_id") == pl.col("n_steps") - 1)
    moved = pl.col("in_bytes") + pl.col("out_bytes")
    return (
        steps.with_columns(n_steps=pl.len().cast(pl.Int64).over(by))
        .with_columns(_edge=edge, _moved=moved)
        .sort(*by, "_edge", "_moved", "step_id", descending=[False, False, True, True, False])
        .filter(pl.int_range(pl.len()).over(by) < most)
        .sort(_STEP)
    )


def _with_stretches(steps: pl.DataFrame, moved: pl.DataFrame, n_bins: int) -> pl.DataFrame:
    """Choose how long a stretch is: the same for all steps, and few enough for one chart."""
    n_causes = moved.select("direction", "cause").unique().height
    few_bins = columns_for(steps.height * n_causes, n_bins)
    longest = pl.col("time_ns").max().over("pid", "device_id")
    return steps.with_columns(
        length_ns=pl.max_horizontal(-(-longest // few_bins), pl.lit(1)),
        step_in_bytes="in_bytes",
        step_out_bytes="out_bytes",
    )


def _moved_in(steps: pl.DataFrame, moved: pl.DataFrame) -> pl.DataFrame:
    """Add up copies by step, stretch, direction and cause."""
    parts = [
        _one(mine, moved) for mine in steps.partition_by("pid", "device_id", maintain_order=True)
    ]
    empty = _one(steps.clear(), moved.clear())
    return pl.concat([empty, *parts])


def _one(steps: pl.DataFrame, moved: pl.DataFrame) -> pl.DataFrame:
    """Do so for the steps of one process, or of one GPU of it."""
    pid = steps["pid"].first() if steps.height else None
    device = steps["device_id"].first() if steps.height else None
    mine = moved.filter(pl.col("start_ns").is_not_null() & pl.col("pid").eq_missing(pl.lit(pid)))
    # Where kernels tell, the steps are those of one GPU; an NVTX range is of the whole process.
    if steps.height and steps["basis"].first() == "kernels":
        mine = mine.filter(pl.col("device_id").eq_missing(pl.lit(device)))
    placed = (
        mine.sort("start_ns")
        .join_asof(
            steps.select(
                "step_id",
                "length_ns",
                _from="start_ns",
                _until=pl.col("start_ns") + pl.col("time_ns"),
            ).sort("_from"),
            left_on="start_ns",
            right_on="_from",
        )
        .filter(pl.col("start_ns") < pl.col("_until"))
    )
    offset = (pl.col("start_ns") - pl.col("_from")) // pl.col("length_ns") * pl.col("length_ns")
    return (
        placed.group_by("step_id", "direction", "cause", offset_ns=offset)
        .agg(pl.col("bytes").sum(), n_migrations=pl.len().cast(pl.Int64))
        .select(
            pl.lit(pid, pl.UInt32).alias("pid"),
            pl.lit(device, pl.Int64).alias("device_id"),
            "step_id",
            *("offset_ns", "direction", "cause", "bytes", "n_migrations"),
        )
    )
