"""Lost rows: where the recording must have dropped rows, silently.

CUPTI hands Unified Memory rows on through a queue; when it is full, rows of all kinds are missing for
a time and nothing says so (one of 46 real captures lost 14.8 ms, 13.6 % of its bytes). The driver is
deterministic enough to notice. A page cannot come where it is, nor leave from where it is not; and
what the density prefetcher brings along with a fault follows from what was there.

Not everything that looks wrong is lost: a page that the GPU touches first, a copy that read-mostly
data drop, advice and released memory leave no row. So a finding counts as ``certain`` only where none
of these can explain it, as ``likely`` where they could but an unusual silence explains all of it, and
is left out otherwise: silent rather than wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.intervals import union
from nsan.analysis.loss.events import copies_of, events_of
from nsan.analysis.loss.figures import figures_of
from nsan.analysis.loss.holes import HOLES, Rows, holes_of
from nsan.analysis.loss.others import OTHERS, others_of, windows_of
from nsan.analysis.loss.parts import (
    BROUGHT_TOO_MUCH,
    CAME_TWICE,
    FINDINGS,
    NOT_BROUGHT,
    UNSEEN,
)
from nsan.analysis.loss.predictions import THRESHOLD
from nsan.analysis.loss.replay import replay
from nsan.analysis.nearest import nearest
from nsan.analysis.result import DEVICE, PID, Result, derived, reconstructed
from nsan.uvm.constants import CAUSE_COHERENCE, CAUSE_PREFETCH

if TYPE_CHECKING:
    from collections.abc import Mapping

    Frames = Mapping[str, pl.DataFrame]

LEVEL: Final = pl.Enum(["certain", "likely"])
COPY_WITHOUT_ROW: Final = "copy_without_fault_row"

_KEYS: Final = ("pid", "device_id")
_SAMPLE_ROWS: Final = 50_000
"""Copies of a process that decide whether the prefetcher's rule holds before CPU faults are read."""
_MIGRATIONS: Final = (
    "start_ns",
    "end_ns",
    "pid",
    "device_id",
    "va",
    "bytes",
    "direction",
    "cause_id",
    "src_device_id",
    "sequence",
)
_READS: Final = {
    "migrations": _MIGRATIONS,
    "gpu_faults": ("start_ns", "end_ns", "pid", "device_id", "va"),
    "cpu_faults": ("start_ns", "pid", "va"),
    "kernels": ("start_ns", "end_ns", "pid", "device_id"),
    "allocations": ("alloc_ns", "free_ns", "pid", "va", "bytes"),
    "api_calls": ("start_ns", "pid", "name"),
}

LOST_ROWS: Final = Result(
    "lost_rows",
    "one stretch of time in which rows of a process and GPU must be missing",
    (
        PID,
        DEVICE,
        reconstructed(
            "start_ns",
            pl.Int64,
            "ns",
            "Rows are missing from here: end of the last row before the silence, where there is one.",
        ),
        reconstructed("end_ns", pl.Int64, "ns", "Until here: start of the first row after it."),
        reconstructed(
            "duration_ns", pl.Int64, "ns", "Its length: rows are missing in it, or in part."
        ),
        reconstructed("earliest_ns", pl.Int64, "ns", "In any case rows are missing after this."),
        reconstructed("latest_ns", pl.Int64, "ns", "And before this."),
        reconstructed(
            "is_silent",
            pl.Boolean,
            "flag",
            "It holds no row. Else no silence stands out: rows are missing somewhere in it.",
        ),
        derived("evidence", pl.String, "text", "What does not fit, by kind."),
        derived("n_pushes", pl.Int64, "pushes", "Pushes and fault rows that do not fit."),
        reconstructed("least_bytes", pl.Int64, "byte", "At least this much must have moved in it."),
        reconstructed(
            "lost_bytes", pl.Int64, "byte", "Estimate: at the rate before it, or the least."
        ),
        reconstructed("level", LEVEL, "label", "`certain`: nothing else explains it; `likely`."),
    ),
    nothing="No hole was found; `nsan migrations --by replay` says how many pushes could be checked.",
)

PREFETCH_REPLAY: Final = Result(
    "prefetch_replay",
    "one GPU in one process: how well the density prefetcher predicts its pushes",
    (
        PID,
        DEVICE,
        derived(
            "n_pushes", pl.Int64, "pushes", "Pushes to the GPU by faults that can be replayed."
        ),
        derived("n_exact_pushes", pl.Int64, "pushes", "As predicted to the page."),
        derived("n_mismatched_pushes", pl.Int64, "pushes", "The others."),
        derived("n_headless_pushes", pl.Int64, "pushes", "Without a page that faulted."),
        reconstructed(
            "n_unexplained_pushes",
            pl.Int64,
            "pushes",
            "Mismatched, and first touch cannot be why. Of no meaning where the rule does not hold.",
        ),
        reconstructed(
            "rule_holds",
            pl.Boolean,
            "flag",
            "The prefetcher's default setting fits most pushes, and no other fits more; else nothing can be told.",
        ),
    ),
)


@analysis(
    question="Does what the driver's prefetcher brought fit its rule?",
    result=PREFETCH_REPLAY,
    reads={"migrations": _MIGRATIONS},
    source="calibration.md 2",
    whole=True,
)
def prefetch_replay(migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Replay the density prefetcher over all pushes to a GPU.

    A push is predicted from the pages that faulted and those that earlier copies left at the GPU.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.

    Returns
    -------
    LazyFrame, ``PREFETCH_REPLAY``
        One row per process and GPU that has pushes, ordered by both. Exact and mismatched ones add up
        to all. Blocks that several GPUs have, and pushes of other causes, are not replayed.

    Examples
    --------
    >>> from nsan.schema import MIGRATIONS
    >>> prefetch_replay(MIGRATIONS.empty()).collect().height
    0
    """

    def build() -> pl.DataFrame:
        copies = copies_of(migrations.select(_MIGRATIONS))
        events = events_of(copies, pl.DataFrame(schema=OTHERS))
        return figures_of(replay(events), events.views)

    return PREFETCH_REPLAY.from_rows(build)


@analysis(
    question="Where did the recording lose rows of Unified Memory?",
    result=LOST_ROWS,
    reads=_READS,
    source="calibration.md 2, 7.1; domain.md C.3",
    whole=True,
)
def lost_rows(
    migrations: pl.LazyFrame,
    gpu_faults: pl.LazyFrame,
    cpu_faults: pl.LazyFrame,
    kernels: pl.LazyFrame,
    allocations: pl.LazyFrame,
    api_calls: pl.LazyFrame,
) -> pl.LazyFrame:
    """Find where rows of Unified Memory must be missing.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order. The whole capture: a part of it has lost rows by intent.
    gpu_faults : LazyFrame, ``GPU_FAULTS``
        One row per batch; may be empty.
    cpu_faults : LazyFrame, ``CPU_FAULTS``
        One row per fault; may be empty. They show that the CPU populated a page.
    kernels : LazyFrame, ``KERNELS``
        One row per kernel; needed for the level `likely`.
    allocations : LazyFrame, ``ALLOCATIONS``
        One row per allocation; may be empty. Pages begin anew where memory is released.
    api_calls : LazyFrame, ``API_CALLS``
        One row per call. Where a process has some, none of them is advice, and memory is not
        released unseen, findings are `certain`. After advice nothing is told.

    Returns
    -------
    LazyFrame, ``LOST_ROWS``
        One row per hole, ordered by process, GPU and start. No row does not mean that nothing is
        lost: what the GPU alone touched, and rows between which nothing moved, cannot be missed.

    Examples
    --------
    >>> from nsan.schema import TABLES
    >>> empty = (TABLES[name].empty() for name in _READS)
    >>> lost_rows(*empty).collect().height
    0
    """
    frames = dict(
        zip(
            _READS,
            (migrations, gpu_faults, cpu_faults, kernels, allocations, api_calls),
            strict=True,
        )
    )
    return LOST_ROWS.from_rows(lambda: holes_and_replay(frames)[0])


def holes_and_replay(frames: Mapping[str, pl.LazyFrame]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Find holes and judge the prefetcher's rule in one pass, as every import does.

    Parameters
    ----------
    frames : mapping of str to LazyFrame
        The tables that :func:`lost_rows` reads, by name.

    Returns
    -------
    (DataFrame, DataFrame)
        ``LOST_ROWS``, and ``PREFETCH_REPLAY`` with releases of memory taken into account.
    """
    copies = copies_of(frames["migrations"].select(_MIGRATIONS))
    names = [name for name in _READS if name != "migrations"]
    wanted = [frames[name].select(_READS[name]) for name in names[:-1]]
    calls = frames["api_calls"].select(_READS["api_calls"])
    tables = dict(zip(names, pl.collect_all([*wanted, _telling(calls)]), strict=True))
    windows, cpu_faults = windows_of(tables["gpu_faults"]), tables["cpu_faults"]
    widening = _widening(copies, cpu_faults)
    orphans = _copies_without_row(copies, windows)
    others = others_of(copies, windows, cpu_faults, tables["allocations"], widening)
    del windows
    events = events_of(copies, others)
    found = replay(events)
    figures = figures_of(found, events.views)
    fits = figures.select(*_KEYS, "rule_holds")
    findings = pl.concat(
        [
            found.findings.join(
                events.views.with_row_index("view").cast({"view": pl.Int64}), on="view"
            ),
            orphans,
        ],
        how="diagonal",
    ).join(fits, on=list(_KEYS), how="left", nulls_equal=True)
    kept = _explained(findings, tables)
    parts = [pl.DataFrame(schema=HOLES)]
    for key, mine in kept.partition_by(_KEYS, as_dict=True).items():
        pid, device = key
        rows = _rows_of(pid, device, copies, tables)
        holes = holes_of(mine, rows, known=bool(mine["known"].all()))
        parts.append(
            holes.with_columns(
                pid=pl.lit(pid, pl.UInt32), device_id=pl.lit(device, pl.Int64)
            ).select(HOLES.names())
        )
    ordered = pl.concat(parts).sort("pid", "device_id", "start_ns")
    holes = ordered.with_columns(duration_ns=pl.col("end_ns") - pl.col("start_ns"))
    return holes.select(LOST_ROWS.cast()), figures.select(PREFETCH_REPLAY.cast())


def _widening(copies: pl.DataFrame, cpu_faults: pl.DataFrame) -> pl.DataFrame:
    """Say by process what is certain of the prefetcher, from a part of the blocks."""
    schema = {"pid": pl.UInt32, "threshold": pl.Int64}
    if cpu_faults.is_empty():
        return pl.DataFrame(schema=schema)
    rows = pl.int_range(pl.len()).over("pid")
    blocks = copies.filter(rows < _SAMPLE_ROWS).select("pid", "va_block").unique()
    some = copies.join(blocks, on=["pid", "va_block"], nulls_equal=True, maintain_order="left")
    events = events_of(some, pl.DataFrame(schema=OTHERS))
    fits = figures_of(replay(events), events.views).group_by("pid").agg(pl.col("rule_holds").all())
    return (
        copies.filter(pl.col("cause_id") == CAUSE_PREFETCH)
        .select("pid")
        .unique()
        .join(fits, on="pid", how="left", nulls_equal=True)
        .select("pid", threshold=pl.when("rule_holds").then(THRESHOLD).otherwise(100))
        .cast(schema)  # type: ignore[arg-type]
    )


def _telling(calls: pl.LazyFrame) -> pl.LazyFrame:
    """Reduce calls to what matters: releases, advice, and that there are calls at all."""
    name = pl.col("name")
    said = calls.select(
        "pid",
        "start_ns",
        advice=name.str.contains("MemAdvise").fill_null(value=False),
        release=(
            name.str.contains("Free") & ~name.str.contains("FreeHost|FreeArray|FreeMipmapped")
        ).fill_null(value=False),
    )
    first = pl.int_range(pl.len()).over("pid") == 0
    return said.filter(first | pl.col("advice") | pl.col("release"))


def _explained(findings: pl.DataFrame, tables: Frames) -> pl.DataFrame:
    """Leave out what something other than lost rows may explain; say what is known of the rest."""
    calls = tables["api_calls"]
    per_pid = calls.group_by("pid").agg(
        advised_ns=pl.col("start_ns").filter("advice").min(), has_calls=pl.lit(value=True)
    )
    placed = tables["allocations"].select("pid").unique().with_columns(has_places=True)
    by_rule = pl.col("why").is_in([NOT_BROUGHT, BROUGHT_TOO_MUCH, UNSEEN])
    joined = (
        findings.join(per_pid, on="pid", how="left", nulls_equal=True)
        .join(placed, on="pid", how="left", nulls_equal=True)
        .with_columns(pl.col("has_calls", "has_places", "rule_holds").fill_null(value=False))
        .filter(~by_rule | pl.col("rule_holds"))
        .filter((pl.col("advised_ns") > pl.col("before_ns")).fill_null(value=True))
    )
    joined = _unreleased(joined, calls)
    # Without the calls, read-mostly data shows only by this: it comes again and never leaves.
    copied = (pl.col("why") == CAME_TWICE) & ~pl.col("departs") & ~pl.col("has_calls")
    kept = joined.filter(~copied.any().over("view")) if len(joined) else joined
    return kept.with_columns(known="has_calls", hard=pl.col("why") != UNSEEN)


def _unreleased(findings: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Leave out findings that span a release whose place is not known."""
    import numpy as np

    keep = findings["has_places"].to_numpy().copy()
    for pid in findings["pid"].unique():
        mine = findings["pid"].eq_missing(pl.Series([pid], dtype=pl.UInt32)).to_numpy()
        same = calls["pid"].eq_missing(pl.Series([pid], dtype=pl.UInt32))
        times = calls.filter(same & pl.col("release"))["start_ns"].drop_nulls().sort().to_numpy()
        first = np.searchsorted(times, findings["block_ns"].to_numpy()[mine])
        last = np.searchsorted(times, findings["before_ns"].to_numpy()[mine])
        keep[mine] |= first == last
    return findings.filter(pl.Series(keep, dtype=pl.Boolean))


def _copies_without_row(copies: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    """Find fault-caused copies that no fault row can be the batch of.

    The batch of a copy is the first row that ends after its start; it was raised before.
    """
    columns = [*_KEYS, *(name for name in FINDINGS if name != "view")]
    rows = windows.with_columns(row_ns=pl.col("start_ns").cum_min(reverse=True).over(_KEYS))
    rows = rows.with_columns(last_ns=pl.col("start_ns").cum_max().shift(1).over(_KEYS))
    spans = rows.group_by(_KEYS).agg(begin_ns=pl.col("start_ns").min())
    orphans = (
        copies.filter((pl.col("cause_id") == CAUSE_COHERENCE) & (pl.col("direction") != "dtoh"))
        .join(spans, on=list(_KEYS), nulls_equal=True)
        .filter(pl.col("start_ns") >= pl.col("begin_ns"))
    )
    orphans = (
        nearest(
            orphans.lazy(),
            rows.lazy().select(*_KEYS, "row_ns", "last_ns", row_end_ns="end_ns"),
            on=("start_ns", "row_end_ns"),
            by=_KEYS,
            forward=True,
        )
        .filter(pl.col("row_ns") > pl.col("start_ns"))
        .collect()
    )
    return orphans.select(
        *_KEYS,
        why=pl.lit(COPY_WITHOUT_ROW),
        after_ns="last_ns",
        before_ns="start_ns",
        since_ns="last_ns",
        n_pages=pl.lit(0, pl.Int64),
        departs=pl.lit(value=True),
        is_open=pl.lit(value=False),
        is_solid=pl.lit(value=True),
        block_ns="start_ns",
    ).select(columns)


def _rows_of(pid: object, device: object, copies: pl.DataFrame, tables: Frames) -> Rows:
    """Collect the rows of a process that lie around its findings."""
    import numpy as np

    def mine(frame: pl.DataFrame, *, own: bool = False) -> pl.DataFrame:
        same = pl.col("pid").eq_missing(pl.lit(pid, pl.UInt32))
        if own:
            same &= pl.col("device_id").eq_missing(pl.lit(device, pl.Int64))
        return frame.filter(same)

    all_rows = pl.concat(
        [
            mine(copies).select("start_ns", "end_ns"),
            mine(tables["gpu_faults"]).select("start_ns", end_ns="start_ns"),
            mine(tables["cpu_faults"]).select("start_ns", end_ns="start_ns"),
        ]
    )
    ran = mine(tables["kernels"], own=True).drop_nulls(["start_ns", "end_ns"])
    # Rows may be missing up to the end: the last kernel's end stands for the next row.
    last = ran.select(start_ns=pl.col("end_ns").max(), end_ns=pl.col("end_ns").max())
    last = last.filter(pl.col("start_ns") > all_rows["start_ns"].max())
    ordered = pl.concat([all_rows, last]).drop_nulls("start_ns").sort("start_ns")
    reach = ordered.select(pl.max_horizontal("start_ns", "end_ns").cum_max()).to_series()
    here = mine(copies, own=True).sort("start_ns")
    spans = union(ran.lazy().select("start_ns", "end_ns")).collect().sort("start_ns")
    return Rows(
        starts=ordered["start_ns"].to_numpy(),
        reach=reach.to_numpy(),
        copy_starts=here["start_ns"].to_numpy(),
        copied=np.concatenate([[0], here["bytes"].cum_sum().to_numpy()]),
        kernels=spans.select("start_ns", "end_ns").to_numpy().reshape(-1, 2),
    )
