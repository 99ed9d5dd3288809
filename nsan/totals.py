"""Everything that a summary needs, computed once from a trace and kept in its store's manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import polars as pl

from nsan.analysis import faults, health, migrations
from nsan.analysis.catalog import find
from nsan.analysis.costs import check_cost, rows_held
from nsan.analysis.loss.lost_rows import holes_and_replay
from nsan.analysis.slices import inside, stretches
from nsan.errors import OverBudgetError
from nsan.trace import Trace
from nsan.uvm.constants import MANAGED_KINDS

_SPANS: Final = {
    "gpu_faults": ("start_ns", "end_ns"),
    "cpu_faults": ("start_ns", "start_ns"),
    "migrations": ("start_ns", "end_ns"),
    "copies": ("start_ns", "end_ns"),
    "memsets": ("start_ns", "end_ns"),
    "kernels": ("start_ns", "end_ns"),
    "driver_events": ("start_ns", "end_ns"),
    "api_calls": ("start_ns", "end_ns"),
    "nvtx_ranges": ("start_ns", "end_ns"),
    "nvtx_marks": ("start_ns", "start_ns"),
}
"""The event tables that a capture's duration spans."""

_MOST_MESSAGES: Final = 200
_MANAGED_CALL: Final = r"^(cudaMallocManaged|cuMemAllocManaged)"


def totals(trace: Trace) -> dict[str, Any]:
    """Compute the figures of a trace, or of a part of one.

    Parameters
    ----------
    trace : Trace
        A whole trace, or what :meth:`Trace.filter` left of it.

    Returns
    -------
    dict
        Plain containers: ``counts`` by table, ``span``, ``gpu_faults``, ``cpu_faults``,
        ``migrations``, ``kernels``, ``managed``, ``devices``, ``processes``, ``diagnostics``,
        ``figures`` (of :mod:`nsan.analysis.health`), ``fault_rows``, ``lost_rows``. Times in ns, sizes in bytes, addresses as
        integers; null where a value that the figure needs is missing.
    """
    lazy = _figures(trace)
    known = trace.capture_totals
    if known is None:
        lazy["migration figures"] = health.migration_figures(trace.migrations)
    rows = dict(zip(lazy, pl.collect_all(list(lazy.values())), strict=True))
    one = {name: frame.row(0, named=True) for name, frame in rows.items() if frame.height == 1}
    counts = {name: one[f"n {name}"]["n"] for name in _SPANS}
    return {
        "counts": counts,
        "span": _span(trace, one),
        "gpu_faults": {
            "groups": rows["gpu groups"].to_dicts(),
            **one["gpu places"],
            "busy_ns": _busy(trace, "gpu_faults", one),
        },
        "cpu_faults": {"groups": rows["cpu groups"].to_dicts(), **one["cpu places"]},
        "migrations": {
            "groups": _with_busy(trace, rows["migrations"]),
            "busy_ns": _busy(trace, "migrations", one),
        },
        "kernels": {**one["kernels"], "busy_ns": _busy(trace, "kernels", one)},
        "driver_events": {row["kind"]: row["n"] for row in rows["driver events"].to_dicts()},
        "managed": _managed(trace, one),
        "devices": trace.devices.collect().to_dicts(),
        "processes": trace.processes.collect().to_dicts(),
        "diagnostics": rows["diagnostics"].to_dicts(),
        # Those of the capture: a window would cut batches from their copies.
        "figures": known["figures"] if known else _health_figures(trace, one),
        "fault_rows": known["fault_rows"] if known else _asked(trace, "fault_row_checks"),
        "lost_rows": known["lost_rows"] if known else _lost_rows(trace),
    }


def _lost_rows(trace: Trace) -> dict[str, Any]:
    """Find holes in a whole capture, and how far the prefetcher's rule could be checked."""
    if trace.is_filtered:
        return {"holes": [], "replay": []}  # what a filter leaves out would look lost
    tables = {table: getattr(trace, table) for table in find("lost_rows").reads}
    n_rows = rows_held(find("lost_rows"), tables)
    try:
        check_cost(find("lost_rows"), n_rows)
    except OverBudgetError:
        return {"holes": [], "replay": [], "not_run": {"n_rows": n_rows}}
    holes, replay = holes_and_replay(tables)
    return {"holes": holes.to_dicts(), "replay": replay.to_dicts()}


def _asked(trace: Trace, name: str) -> list[dict[str, Any]]:
    """Run an analysis of the catalogue; its own work is bounded, so it is never refused."""
    analysis = find(name)
    found = analysis.run({table: getattr(trace, table) for table in analysis.reads})
    return found.collect().to_dicts()


def _figures(trace: Trace) -> dict[str, pl.LazyFrame]:
    managed = pl.col("kind").is_in(MANAGED_KINDS)
    sizes = pl.col("bytes").filter(managed)
    calls = trace.api_calls.filter(pl.col("name").str.contains(_MANAGED_CALL))
    return {
        **{f"n {name}": _extent(getattr(trace, name), *span) for name, span in _SPANS.items()},
        "gpu groups": faults.gpu_faults_by_group(trace.gpu_faults),
        "gpu places": faults.places(trace.gpu_faults),
        "cpu groups": faults.cpu_faults_by_group(trace.cpu_faults),
        "cpu places": faults.places(trace.cpu_faults),
        "migrations": migrations.migrations_by_group(trace.migrations),
        "kernels": trace.kernels.select(
            n=pl.col("is_graph_launch").not_().sum(),
            n_graph_launches=pl.col("is_graph_launch").sum(),
        ),
        "driver events": trace.driver_events.group_by("kind").agg(n=pl.len()).sort("kind"),
        "allocations": trace.allocations.select(
            n_allocations=pl.len(),
            n_managed_allocations=managed.sum(),
            managed_bytes=pl.when(sizes.null_count() == 0).then(sizes.cast(pl.Int128).sum()),
        ),
        "managed calls": calls.select(n_managed_calls=pl.len()),
        "diagnostics": trace.diagnostics.group_by("severity", maintain_order=True).agg(
            n=pl.len(), texts=pl.col("text").unique(maintain_order=True).head(_MOST_MESSAGES)
        ),
    }


def _health_figures(trace: Trace, one: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    devices = trace.devices.collect()
    mixed = devices.height > 1 or trace.processes.collect().height > 1
    rows, kernels = (on_gpus(frame, devices) for frame in (trace.gpu_faults, trace.kernels))
    # Each fault row is compared with kernels alone: rows may come stretch by stretch.
    parts = [
        health.clock_figures(rows.filter(inside("start_ns", part)), kernels, mixed=mixed)
        for part in stretches((trace.gpu_faults, "start_ns"))
    ]
    found = pl.concat(part.collect() for part in parts)
    clocks = found.select(pl.col("n_outside_kernels").sum(), pl.col("kernel_lag_ns").max())
    return {
        "migration figures": one["migration figures"],
        "clock figures": clocks.row(0, named=True),
    }


def _extent(frame: pl.LazyFrame, start: str, end: str) -> pl.LazyFrame:
    has_device = "device_id" in frame.collect_schema()
    lacking = [
        pl.col(name).null_count() for name in {start, end, *(["device_id"] if has_device else [])}
    ]
    times = [pl.col(name).null_count() for name in {start, end}]
    return frame.select(
        n=pl.len(),
        first=pl.col(start).min(),
        last=pl.max_horizontal(pl.col(start).max(), pl.col(end).max()),
        times_lacking=pl.sum_horizontal(times),
        busy_lacking=pl.sum_horizontal(lacking),
    )


def _managed(trace: Trace, one: Mapping[str, dict[str, Any]]) -> dict[str, int | None]:
    figures = {"managed_allocations": one["allocations"], "managed_calls": one["managed calls"]}
    return {
        name: None if figure in trace.info.doubtful else value
        for figure, values in figures.items()
        for name, value in values.items()
    }


def _span(trace: Trace, one: Mapping[str, dict[str, Any]]) -> dict[str, int | None]:
    """First start, last end and their distance; null where any event lacks a time."""
    extents = [one[f"n {name}"] for name in _SPANS]
    filled = [extent for extent in extents if extent["n"]]
    lacking = any(extent["times_lacking"] for extent in filled) or "span" in trace.info.doubtful
    if not filled or lacking:
        return {"first_ns": None, "last_ns": None, "duration_ns": None}
    first = min(extent["first"] for extent in filled)
    last = max(extent["last"] for extent in filled)
    if trace.windows:
        first, last = max(first, trace.windows[0][0]), min(last, trace.windows[-1][1])
    return {"first_ns": first, "last_ns": last, "duration_ns": last - first}


def _busy(trace: Trace, table: str, one: Mapping[str, dict[str, Any]]) -> int | None:
    """Union per GPU, summed over GPUs; null where a row lacks its time or its GPU."""
    if one[f"n {table}"]["busy_lacking"] or {"gpus", "busy"} & set(trace.info.doubtful):
        return None
    whole = trace.unwindowed or trace
    rows = on_gpus(getattr(whole, table), whole.devices.collect())
    found = migrations.busy_by_group(rows, trace.windows, by=("device_id",))
    return int(found["covered_ns"].sum())


def on_gpus(rows: pl.LazyFrame, devices: pl.DataFrame) -> pl.LazyFrame:
    """Put the GPU of the machine for ``device_id``: two processes may each call another one 0.

    Parameters
    ----------
    rows : LazyFrame
        Reads ``pid``, ``device_id``; other columns stay.
    devices : DataFrame
        Of the capture.

    Returns
    -------
    LazyFrame
        The rows in their order; ordinals that the capture does not map become negative.
    """
    mapped = devices.drop_nulls(["pid", "gpu_id"]).select("pid", "device_id", _gpu="gpu_id")
    if mapped.is_empty():
        return rows
    # A row without a process is on the GPU that every process calls so, if they agree.
    agreed = (
        mapped.group_by("device_id")
        .agg(pl.col("_gpu").n_unique().alias("_n"), pl.col("_gpu").first())
        .filter(pl.col("_n") == 1)
        .select("device_id", "_gpu", pid=pl.lit(None, pl.UInt32))
    )
    known = pl.concat([mapped, agreed.select(mapped.columns)]).lazy()
    # In order: what follows compares neighbours.
    joined = rows.join(
        known, on=["pid", "device_id"], how="left", nulls_equal=True, maintain_order="left"
    )
    # Ordinals that the export does not map stay apart from the numbers of mapped GPUs.
    unmapped = -1 - pl.col("device_id")
    return joined.with_columns(device_id=pl.coalesce("_gpu", unmapped)).drop("_gpu")


def _with_busy(trace: Trace, groups: pl.DataFrame) -> list[dict[str, Any]]:
    """Add to each group of migrations the time in which one was running, and whether a window cuts one."""
    whole = trace.unwindowed or trace
    keys = list(migrations.GROUPS)
    found = migrations.busy_by_group(whole.migrations, trace.windows, by=keys)
    lacking = (
        trace.migrations.group_by(keys)
        .agg(lacks=pl.any_horizontal(pl.col("start_ns", "end_ns").is_null()).any())
        .collect()
    )
    rows = groups.join(found, on=keys, how="left", nulls_equal=True, maintain_order="left")
    rows = rows.join(lacking, on=keys, how="left", nulls_equal=True, maintain_order="left")
    cut = migrations.cut_groups(whole.migrations, trace.windows)
    rows = rows.join(cut, on=keys, how="left", nulls_equal=True, maintain_order="left")
    rows = rows.with_columns(pl.col("is_cut").fill_null(value=False))
    known = pl.lit("busy" not in trace.info.doubtful)
    busy = pl.when(known & pl.col("lacks").not_()).then(pl.col("covered_ns").fill_null(0))
    return rows.with_columns(busy_ns=busy).drop("covered_ns", "lacks").to_dicts()
