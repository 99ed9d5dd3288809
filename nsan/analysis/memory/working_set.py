"""Working sets: how many different bytes a GPU fetched or faulted on in a stretch of time.

Lower bounds of what was used: resident pages that do not fault leave no row.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.result import DEVICE, PID, Result, derived, recorded
from nsan.uvm.constants import CAUSE_COHERENCE, PAGE_BYTES

_KEYS: Final = ("pid", "device_id")

_SETS: Final = (
    derived("unique_bytes", pl.Int64, "byte", "Different bytes that came to the GPU or faulted."),
    derived("faulted_bytes", pl.Int64, "byte", "Of these, on pages known to have faulted."),
    derived("moved_bytes", pl.Int64, "byte", "All that came, repeats too."),
)

WORKING_SET: Final = Result(
    "working_set",
    "one window of time of one GPU in which pages came to it or faulted",
    (
        PID,
        DEVICE,
        derived("start_ns", pl.Int64, "ns", "Start of the window."),
        derived("end_ns", pl.Int64, "ns", "End, exclusive."),
        *_SETS,
    ),
)

WORKING_SET_BY_NVTX: Final = Result(
    "working_set_by_nvtx",
    "one instance of an NVTX range on one GPU to which pages came in it",
    (
        PID,
        DEVICE,
        recorded("range_id", pl.Int64, "id", "Number of the range in this trace."),
        recorded("domain", pl.String, "text", "Domain; null is the default domain."),
        recorded("name", pl.String, "text", "Text of the range."),
        recorded("start_ns", pl.Int64, "ns", "Start of the range."),
        recorded("end_ns", pl.Int64, "ns", "End of the range."),
        *_SETS,
    ),
)


@analysis(
    question="How much memory does each GPU work on in a window of time?",
    result=WORKING_SET,
    reads={
        "migrations": ("start_ns", "pid", "device_id", "va", "bytes", "direction", "cause_id"),
        "gpu_faults": ("start_ns", "pid", "device_id", "va"),
    },
    source="domain.md E-18",
)
def working_set(
    migrations: pl.LazyFrame, gpu_faults: pl.LazyFrame, *, window_ns: int = 100_000_000
) -> pl.LazyFrame:
    """Count the different pages that came to each GPU or faulted there, by window of time.

    A lower bound of what was used: pages that are resident and do not fault leave no row. What the
    prefetcher brought counts in ``unique_bytes``, used or not; ``faulted_bytes`` was used for sure.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order; those to a GPU count, in the window of their start.
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        One row per batch, in any order; each adds its lowest page.
    window_ns : int, default 100_000_000
        Length of the windows, ns, from the session start.

    Returns
    -------
    LazyFrame, ``WORKING_SET``
        One row per process, GPU and window with such rows, ordered by these.
    """
    window = pl.col("start_ns") // window_ns * window_ns
    touched = _touched(migrations, gpu_faults).with_columns(_window=window)
    return (
        _sets(touched, [*_KEYS, "_window"])
        .with_columns(start_ns=pl.col("_window"), end_ns=pl.col("_window") + window_ns)
        .sort(*_KEYS, "start_ns")
        .select(WORKING_SET.cast())
    )


@analysis(
    question="How much memory does each GPU work on in an NVTX range?",
    result=WORKING_SET_BY_NVTX,
    reads={
        "migrations": ("start_ns", "pid", "device_id", "va", "bytes", "direction", "cause_id"),
        "nvtx_ranges": ("start_ns", "end_ns", "pid", "domain", "name", "range_id"),
        "gpu_faults": ("start_ns", "pid", "device_id", "va"),
    },
    complexity="O(n log n + rows in all ranges)",
    source="domain.md E-18",
)
def working_set_by_nvtx(
    migrations: pl.LazyFrame, nvtx_ranges: pl.LazyFrame, gpu_faults: pl.LazyFrame
) -> pl.LazyFrame:
    """Count the different pages that came to each GPU or faulted there while an NVTX range was open.

    By time only: work that a range launches and that runs after it counts in later ranges.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        As in :func:`working_set`; a row counts in every range of its process that holds its start.
    nvtx_ranges : LazyFrame, ``NVTX_RANGES``
        One row per range, in any order.
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        As in :func:`working_set`.

    Returns
    -------
    LazyFrame, ``WORKING_SET_BY_NVTX``
        One row per range and GPU with such rows, ordered by process, start, range and GPU.
    """

    def build() -> pl.DataFrame:
        ranges, touched = pl.collect_all(
            [
                nvtx_ranges.filter(pl.col("end_ns") > pl.col("start_ns")),
                _touched(migrations, gpu_faults),
            ]
        )
        found = _sets(_within(touched, ranges).lazy(), [*_KEYS, "range_id"]).collect()
        about = ranges.select("pid", "range_id", "domain", "name", "start_ns", "end_ns")
        return found.join(about, on=["pid", "range_id"], nulls_equal=True).sort(
            "pid", "start_ns", "range_id", "device_id"
        )

    return WORKING_SET_BY_NVTX.from_rows(build)


def _within(touched: pl.DataFrame, ranges: pl.DataFrame) -> pl.DataFrame:
    """Give each range the rows of its process whose start it holds."""
    parts = [touched.clear().with_columns(range_id=pl.lit(None, pl.Int64))]
    for (pid,), mine in ranges.partition_by("pid", as_dict=True).items():
        rows = touched.filter(pl.col("pid").eq_missing(pl.lit(pid, pl.UInt32))).sort("start_ns")
        starts = rows["start_ns"]
        spans = pl.DataFrame(
            {
                "range_id": mine["range_id"],
                "low": starts.search_sorted(mine["start_ns"], side="left").cast(pl.Int64),
                "high": starts.search_sorted(mine["end_ns"], side="left").cast(pl.Int64),
            }
        )
        places = (
            spans.filter(pl.col("low") < pl.col("high"))
            .with_columns(row=pl.int_ranges("low", "high"))
            .explode("row")
        )
        parts.append(rows[places["row"]].with_columns(places["range_id"]))
    return pl.concat(parts)


def _touched(migrations: pl.LazyFrame, gpu_faults: pl.LazyFrame) -> pl.LazyFrame:
    """List ranges of addresses that came to a GPU or faulted, with the time."""
    came = migrations.filter(pl.col("direction").is_in(["htod", "dtod"])).select(
        *_KEYS,
        "start_ns",
        "va",
        "bytes",
        moved="bytes",
        faulted=(pl.col("cause_id") == CAUSE_COHERENCE).fill_null(value=False),
    )
    raised = gpu_faults.select(
        *_KEYS,
        "start_ns",
        va=pl.col("va") // PAGE_BYTES * PAGE_BYTES,
        bytes=pl.lit(PAGE_BYTES, pl.Int64),
        moved=pl.lit(0, pl.Int64),
        faulted=pl.lit(value=True),
    )
    known = pl.col("start_ns").is_not_null() & pl.col("va").is_not_null() & (pl.col("bytes") > 0)
    return pl.concat([came, raised]).filter(known)


def _sets(touched: pl.LazyFrame, by: list[str]) -> pl.LazyFrame:
    """Count different bytes per group: what each range adds to those of lower address before it."""
    end = pl.col("va") + pl.col("bytes").cast(pl.UInt64)

    def added(rows: pl.LazyFrame, name: str) -> pl.LazyFrame:
        reach = pl.col("_end").cum_max().shift(1).over(by)
        since = pl.max_horizontal("va", reach)
        return (
            rows.with_columns(_end=end)
            .sort(*by, "va", "_end")
            .with_columns(_since=since)
            .group_by(by)
            .agg(
                # Unsigned: what adds nothing must not be subtracted.
                (pl.col("_end") - pl.col("_since"))
                .filter(pl.col("_end") > pl.col("_since"))
                .sum()
                .cast(pl.Int64)
                .alias(name),
                pl.col("moved").sum().alias("moved_bytes"),
            )
        )

    unique = added(touched, "unique_bytes")
    faulted = added(touched.filter("faulted"), "faulted_bytes").drop("moved_bytes")
    return unique.join(faulted, on=by, how="left", nulls_equal=True).with_columns(
        pl.col("faulted_bytes").fill_null(0)
    )
