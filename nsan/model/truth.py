"""What really happened in a run: the tables that a trace does not have, to judge analyses by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl

from nsan.model.engine import state as st
from nsan.model.happened import Happened
from nsan.model.placing import History
from nsan.model.recording import BASE_VA, PID, address
from nsan.model.settings import Settings
from nsan.model.tensor_truth import TENSOR_TABLES, tensor_truth
from nsan.uvm import constants as uvm

_OUTCOMES: Final = {
    int(st.DATA): "data",
    int(st.FIRST_TOUCHED): "first_touch",
    int(st.STALE): "stale",
    int(st.THROTTLED): "throttled",
    int(st.REMOTE): "remote_map",
    int(st.UPGRADED): "invalidation",
}
_REASONS: Final = {
    int(st.FIRST_TOUCH): "first_touch",
    int(st.FREED): "freed",
    int(st.INVALIDATED): "invalidated",
    int(st.CLEAN_EVICTION): "clean_eviction",
    int(st.DROPPED): "dropped",
    int(st.DISCARDED): "discarded",
}


def _bytes(settings: Settings, column: str = "n_pages") -> pl.Expr:
    return pl.col(column).cast(pl.Int64) * settings.host_profile.page_bytes


def _named(column: str, labels: dict[int, str]) -> pl.Expr:
    return pl.col(column).cast(pl.Int64).replace_strict(labels, return_dtype=pl.String)


def _batches(happened: Happened, settings: Settings) -> pl.DataFrame:
    batches = happened.log["batches"]
    return batches.select(
        "batch",
        "kernel",
        "raised_ns",
        "fetched_ns",
        "end_ns",
        "n_page_faults",
        "n_entries",
        "n_pages",
        "n_blocks",
        device_id="gpu",
        va=address(settings),
        access=_named("access", dict(uvm.ACCESSES)),
        outcome=_named("outcome", _OUTCOMES),
    )


def _residency_changes(happened: Happened, settings: Settings) -> pl.DataFrame:
    """Every change of residency, those with a copy and those without."""
    copies, changes = happened.log["copies"], happened.log["changes"]
    columns = ["time_ns", "processor", "page", "n_pages", "arrives", "reason", "batch"]
    arrivals = copies.select(
        pl.col("end_ns").alias("time_ns"),
        pl.col("dst").alias("processor"),
        "page",
        "n_pages",
        pl.lit(value=True).alias("arrives"),
        pl.lit("copied").alias("reason"),
        "batch",
    )
    departures = copies.filter(pl.col("kept") == 0).select(
        pl.col("end_ns").alias("time_ns"),
        pl.col("src").alias("processor"),
        "page",
        "n_pages",
        pl.lit(value=False).alias("arrives"),
        pl.lit("copied").alias("reason"),
        "batch",
    )
    others = changes.select(
        "time_ns",
        "processor",
        "page",
        "n_pages",
        (pl.col("reason") == st.FIRST_TOUCH).alias("arrives"),
        _named("reason", _REASONS).alias("reason"),
        "batch",
    )
    return (
        pl.concat([part.select(columns) for part in (arrivals, departures, others)])
        .sort("time_ns", "page", "arrives", maintain_order=True)
        .select(
            "time_ns",
            "arrives",
            "reason",
            "batch",
            processor=pl.col("processor") - 1,
            va=address(settings),
            bytes=_bytes(settings),
        )
    )


def _evictions(happened: Happened, settings: Settings) -> pl.DataFrame:
    chunks = pl.col("block").cast(pl.UInt64) * uvm.VA_BLOCK_BYTES + BASE_VA
    return happened.log["evictions"].select(
        "start_ns",
        "end_ns",
        "batch",
        device_id="gpu",
        va=chunks,
        copied_bytes=_bytes(settings, "n_copied"),
        dropped_bytes=_bytes(settings, "n_dropped"),
    )


def ping_pong(copies: pl.DataFrame, settings: Settings) -> pl.DataFrame:
    """Find pages that faults move to and fro: each move within the lapse of the one before.

    Parameters
    ----------
    copies : DataFrame
        The engine's copies: ``start_ns``, ``page``, ``n_pages``, ``src``, ``dst``, ``cause``.
    settings : Settings
        The lapse, and the page size.

    Returns
    -------
    DataFrame
        One row per page with at least one quick move back, by address: ``va``, ``n_moves``, the
        longest chain of moves (a chain of three marks a page as thrashing).
    """
    by_fault = copies.filter(pl.col("cause").is_in([uvm.CAUSE_COHERENCE, uvm.CAUSE_PREFETCH]))
    block = pl.col("page") // (uvm.VA_BLOCK_BYTES // settings.host_profile.page_bytes)
    # Only blocks that something comes to and leaves again can hold such a page.
    places = by_fault.group_by(block=block).agg(pl.col("dst").n_unique())
    busy = places.filter(pl.col("dst") > 1)["block"].implode()
    pages = (
        by_fault.filter(block.is_in(busy))
        .select("start_ns", "dst", page=pl.int_ranges("page", pl.col("page") + pl.col("n_pages")))
        .explode("page")
        .sort("page", "start_ns", maintain_order=True)
    )
    same = pl.col("page") == pl.col("page").shift(1)
    quick = pl.col("start_ns").diff() <= settings.lapse_ns
    back = pl.col("dst") != pl.col("dst").shift(1)
    goes_on = (same & quick & back).fill_null(value=False)
    return (
        pages.with_columns(chain=(~goes_on).cum_sum())
        .group_by("page", "chain")
        .agg(n_moves=pl.len())
        .group_by("page")
        .agg(pl.col("n_moves").max())
        .filter(pl.col("n_moves") > 1)
        .sort("page")
        .select(va=address(settings), n_moves=pl.col("n_moves").cast(pl.Int64))
    )


def _kernel_counts(happened: Happened, settings: Settings) -> pl.DataFrame:
    """Count what the batches of each kernel did."""
    log = happened.log
    kernels = pl.DataFrame(
        [
            {"kernel": i, "device_id": gpu, "name": work.name, "kind": work.kind}
            for i, (gpu, work) in enumerate(happened.work)
        ],
        schema={"kernel": pl.Int64, "device_id": pl.Int64, "name": pl.String, "kind": pl.String},
    )
    of_batch = log["batches"].select("batch", "kernel")
    size = _bytes(settings)
    copies = log["copies"].join(of_batch, on="batch").group_by("kernel")
    to_gpu, evicted = pl.col("dst") > 0, pl.col("cause") == uvm.CAUSE_EVICTION
    moved = copies.agg(
        bytes_in=size.filter(to_gpu).sum(),
        evicted_bytes=size.filter(evicted).sum(),
        n_migrations=pl.len(),
        faulted_pages=pl.col("n_pages").filter(to_gpu, pl.col("cause") == st.COHERENCE).sum(),
    )
    touched = (
        log["changes"]
        .filter(pl.col("reason") == st.FIRST_TOUCH, pl.col("processor") > 0)
        .join(of_batch, on="batch")
        .group_by("kernel")
        .agg(first_touch_bytes=size.sum())
    )
    batches = (
        log["batches"]
        .group_by("kernel")
        .agg(n_batches=pl.len(), n_entries=pl.col("n_entries").sum())
    )
    counts = kernels
    for part in (batches, moved, touched):
        counts = counts.join(part, on="kernel", how="left", maintain_order="left")
    return counts.with_columns(
        pl.exclude("kernel", "device_id", "name", "kind").fill_null(0).cast(pl.Int64)
    )


def _allocation_counts(happened: Happened, migrations: pl.DataFrame) -> pl.DataFrame:
    """Count migrated bytes per managed allocation, time-aware; what lies outside all is in none."""
    lives = pl.DataFrame(
        [
            {
                "allocation": i,
                "name": life.name,
                "va": BASE_VA + life.start,
                "bytes": life.n_bytes,
                "alloc_ns": life.alloc_ns,
                "free_ns": life.free_ns,
                "pid": PID,
            }
            for i, life in enumerate(happened.lives)
            if life.device is None
        ],
        schema={
            "allocation": pl.Int64,
            "name": pl.String,
            "va": pl.UInt64,
            "bytes": pl.Int64,
            "alloc_ns": pl.Int64,
            "free_ns": pl.Int64,
            "pid": pl.UInt32,
        },
    )
    moved = _Moved(migrations)
    counts = pl.DataFrame(
        [moved.within(life) for life in lives.iter_rows(named=True)],
        schema=dict.fromkeys(_COUNTS, pl.Int64),
        orient="row",
    )
    return pl.concat([lives, counts], how="horizontal")


_COUNTS: Final = ("bytes_in", "bytes_out", "bytes_between", "evicted_bytes", "n_migrations")


class _Moved:
    """Migrations as arrays by address: a program without caching has thousands of allocations."""

    def __init__(self, migrations: pl.DataFrame) -> None:
        ordered = migrations.sort("va")
        self._first = ordered["va"].to_numpy().astype(np.int64)
        self._last = self._first + ordered["bytes"].to_numpy()
        self._start_ns = ordered["start_ns"].to_numpy()
        direction = ordered["direction"].cast(pl.String)
        self._which = [(direction == each).to_numpy() for each in ("htod", "dtoh", "dtod")]
        self._which.append((ordered["cause"].cast(pl.String) == "eviction").to_numpy())

    def within(self, life: dict[str, Any]) -> tuple[int, ...]:
        """Count what moved of one allocation while it lived; a run is no longer than a VA block."""
        first, last = life["va"], life["va"] + life["bytes"]
        low, high = np.searchsorted(self._first, (first - uvm.VA_BLOCK_BYTES, last))
        part = slice(low, high)
        freed = np.iinfo(np.int64).max if life["free_ns"] is None else life["free_ns"]
        time = self._start_ns[part]
        met = (self._last[part] > first) & (time >= life["alloc_ns"]) & (time < freed)
        n = np.minimum(self._last[part], last) - np.maximum(self._first[part], first)
        return (*(int(n[met & which[part]].sum()) for which in self._which), int(met.sum()))


def _refaults(happened: Happened, settings: Settings) -> pl.DataFrame:
    return happened.log["refaults"].select(
        "time_ns",
        "evicted_ns",
        "batch",
        device_id="gpu",
        va=address(settings),
        bytes=_bytes(settings),
    )


def _batch_pages(happened: Happened, settings: Settings) -> pl.DataFrame:
    return happened.log["faulted"].select("batch", "n_entries", va=address(settings))


def _copy_batches(happened: Happened, settings: Settings) -> pl.DataFrame:
    ordered = happened.log["copies"].sort("start_ns", "page", maintain_order=True)
    return ordered.select(
        "start_ns",
        va=address(settings),
        bytes=_bytes(settings),
        batch=pl.when(pl.col("batch") >= 0).then("batch"),
    )


@dataclass(frozen=True)
class TruthTable:
    """A table of the truth: what one row is, and how it is made of a run and its plain trace."""

    row: str
    build: Callable[[Happened, Settings, Mapping[str, pl.DataFrame]], pl.DataFrame]


TRUTH_TABLES: Final[dict[str, TruthTable]] = {
    "batches": TruthTable(
        "one driver batch: raised, fetched and ended (ns), its lowest page, entries, distinct pages, "
        "blocks, outcome, and the kernel that ran (row of kernel_counts; -1 none)",
        lambda happened, settings, _: _batches(happened, settings),
    ),
    "batch_pages": TruthTable(
        "one page of a batch, with its entries",
        lambda happened, settings, _: _batch_pages(happened, settings),
    ),
    "residency_changes": TruthTable(
        "one run of pages that became resident at a processor (-1 is the CPU) or left it, at the end "
        "of its copy where there is one",
        lambda happened, settings, _: _residency_changes(happened, settings),
    ),
    "evictions": TruthTable(
        "one root chunk given up: bytes copied back, and bytes dropped that are valid elsewhere or dead",
        lambda happened, settings, _: _evictions(happened, settings),
    ),
    "refaults": TruthTable(
        "one run of pages that came back to a GPU after an eviction that copied them to the CPU",
        lambda happened, settings, _: _refaults(happened, settings),
    ),
    "ping_pong": TruthTable(
        "one page that faults moved to and fro, each time within the lapse of the move before: moves "
        "in the longest such chain",
        lambda happened, settings, _: ping_pong(happened.log["copies"], settings),
    ),
    "kernel_counts": TruthTable(
        "one kernel, copy or fill: batches, faulted pages, bytes in, evicted and first touched",
        lambda happened, settings, _: _kernel_counts(happened, settings),
    ),
    "allocation_counts": TruthTable(
        "one managed allocation with its name: bytes moved by direction, and evicted; what moves with "
        "it from the rest of its 2 MiB blocks is nobody's",
        lambda happened, _settings, tables: _allocation_counts(happened, tables["migrations"]),
    ),
    "copy_batches": TruthTable(
        "one migration, in order of start, also those that the recording lost: its batch (null: none)",
        lambda happened, settings, _: _copy_batches(happened, settings),
    ),
    "driver_events": TruthTable(
        "one measure of the driver against ping-pong",
        lambda _happened, _settings, tables: tables["driver_events"],
    ),
}
"""The tables of every run's truth by name; times ns, addresses UInt64, sizes byte."""

TRUTH_ROWS: Final[dict[str, str]] = {
    name: table.row for name, table in TRUTH_TABLES.items()
} | TENSOR_TABLES
"""What one row is, of these and of the tables that only a tensor program has."""


def truth(
    happened: Happened,
    settings: Settings,
    tables: Mapping[str, pl.DataFrame],
    history: History | None = None,
) -> Iterator[tuple[str, pl.DataFrame]]:
    """Make the truth of a run, table by table, so that not all need room at once.

    Parameters
    ----------
    happened : Happened
        What a machine left.
    settings : Settings
        The machine.
    tables : mapping of str to DataFrame
        The trace in the plain style.
    history : History, optional
        Of the allocator, where the program is a tensor program.

    Yields
    ------
    (str, DataFrame)
        Name and rows of each of ``TRUTH_TABLES``; with a history also of each of ``TENSOR_TABLES``.
    """
    for name, table in TRUTH_TABLES.items():
        yield name, table.build(happened, settings, tables)
    if history is not None:
        yield from tensor_truth(happened, settings, history).items()
