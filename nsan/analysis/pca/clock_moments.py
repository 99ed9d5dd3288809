"""What a snapshot and a trace say of the same moments, as sides that can be compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from nsan.analysis.pca.clock_lines import Ints
from nsan.analysis.pca.clock_pairs import Side
from nsan.units import NS_PER_US

Places = npt.NDArray[np.uint64]

MARK: Final = r"^nsan clock (\d{1,18})$"
"""Text of an NVTX mark that carries the wall time: ``nsan clock MICROSECONDS`` since 1970 (UTC)."""

_EMITTED: Final = r", (seq|op_id|sizes|input_op_ids) = .*$"
"""What ``emit_nvtx`` adds to the name of a range."""

_NEVER: Final = pl.lit(1 << 61, pl.Int64)
_MOMENT: Final = {"what": pl.Int64, "ns": pl.Int64, "is_first": pl.Boolean}


@dataclass(frozen=True)
class Moments:
    """What the clocks of a trace and of a snapshot are compared by.

    Attributes
    ----------
    allocations : DataFrame
        Of the trace: reads ``alloc_ns``, ``free_ns``, ``pid``, ``va``, ``bytes``.
    nvtx_ranges : DataFrame
        Of the trace: reads ``start_ns``, ``end_ns``, ``pid``, ``name``.
    nvtx_marks : DataFrame
        Of the trace: reads ``start_ns``, ``pid``, ``name``. A mark ``nsan clock MICROSECONDS`` says
        the wall time (us since 1970) at which it was made.
    allocator_events : DataFrame
        Of the snapshot: reads ``time_us``, ``action``, ``va``, ``bytes``.
    annotations : DataFrame
        Of the snapshot: reads ``time_us``, ``name``, ``stage``.
    session_start_utc_ns : int or None
        Wall time of the trace's time 0, ns since 1970.
    api_calls : DataFrame, optional
        Of the trace: reads ``start_ns``, ``end_ns``, ``pid``, ``tid``. Where given, it is checked
        that the host allocates nothing while it waits in a call, and the drift is made better.
    """

    allocations: pl.DataFrame
    nvtx_ranges: pl.DataFrame
    nvtx_marks: pl.DataFrame
    allocator_events: pl.DataFrame
    annotations: pl.DataFrame
    session_start_utc_ns: int | None
    api_calls: pl.DataFrame | None = None


@dataclass(frozen=True)
class Lives:
    """Memory from its allocation to its release: where, and when (ns on the clock of its side)."""

    va: Places
    end_va: Places
    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class Sides:
    """One kind of moment on both sides, the trace's per process."""

    snapshot: Side
    traces: dict[int | None, Side]
    lives: Lives | None = None
    traced_lives: dict[int | None, Lives] | None = None

    def lives_with(self, pid: int | None) -> tuple[Lives, Lives] | None:
        """Give the memory of the snapshot and that of a process; None: it is not about memory."""
        if self.lives is None or self.traced_lives is None or pid not in self.traced_lives:
            return None
        return self.lives, self.traced_lives[pid]

    @property
    def can_be_compared(self) -> bool:
        """Both sides have moments."""
        return bool(len(self.snapshot)) and any(map(len, self.traces.values()))


def reference_us(moments: Moments) -> int | None:
    """Give the wall time (us) that a comparison counts from; None: the snapshot has no times.

    Parameters
    ----------
    moments : Moments
        Reads the times of the snapshot.

    Returns
    -------
    int or None
        Middle of its times.
    """
    times = pl.concat([moments.allocator_events["time_us"], moments.annotations["time_us"]])
    known = times.drop_nulls().to_numpy()
    return None if not known.size else (int(known.min()) + int(known.max())) // 2


def segment_sides(moments: Moments, reference: int) -> Sides:
    """Give where segments were made and released, on both sides.

    Parameters
    ----------
    moments : Moments
        Reads ``allocations`` and ``allocator_events``.
    reference : int
        Wall time (us) that the snapshot's times count from.

    Returns
    -------
    Sides
        Same number, same address, size and action.
    """
    rows = moments.allocations.filter(pl.col("va").is_not_null() & pl.col("bytes").is_not_null())
    key = ["va", "bytes", "is_first"]
    trace = pl.concat(
        rows.select("pid", "va", pl.col("bytes").cast(pl.Int64), ns=time, is_first=pl.lit(first))
        for time, first in (("alloc_ns", True), ("free_ns", False))
    ).filter(pl.col("ns").is_not_null())
    action = pl.col("action").cast(pl.String)
    snapshot = (
        moments.allocator_events.filter(action.is_in(["segment_alloc", "segment_free"]))
        .filter(pl.col("time_us").is_not_null(), pl.col("va").is_not_null())
        .select("va", "bytes", ns=_wall(reference), is_first=action == "segment_alloc")
    )
    sides = _sides(snapshot, trace, key)
    return replace(sides, lives=_snapshot_lives(snapshot), traced_lives=_trace_lives(rows))


def _snapshot_lives(moments: pl.DataFrame) -> Lives:
    """Pair each making of a segment with its release; one that was kept lives on."""
    place, after = ["va"], pl.col("is_first").shift(-1).over("va").not_()
    return _lives(
        moments.sort("va", "ns", maintain_order=True)
        .with_columns(stop=pl.when(after).then(pl.col("ns").shift(-1).over(place)))
        .filter("is_first")
        .select("va", "bytes", start="ns", stop=pl.col("stop").fill_null(_NEVER))
    )


def _trace_lives(rows: pl.DataFrame) -> dict[int | None, Lives]:
    """Take the lives of each process; a release that is not known was before the next allocation."""
    after = pl.col("alloc_ns").shift(-1).over("pid", "va")
    lives = (
        rows.filter(pl.col("alloc_ns").is_not_null())
        .sort("alloc_ns", maintain_order=True)
        .select("pid", "va", "bytes", start="alloc_ns", stop=pl.coalesce("free_ns", after, _NEVER))
    )
    return {pid: _lives(each) for (pid,), each in lives.partition_by("pid", as_dict=True).items()}


def _lives(rows: pl.DataFrame) -> Lives:
    va = rows["va"].to_numpy()
    end_va = va + rows["bytes"].cast(pl.UInt64).to_numpy()
    return Lives(va, end_va, rows["start"].to_numpy(), rows["stop"].to_numpy())


def annotation_sides(moments: Moments, reference: int) -> Sides:
    """Give where ranges of the same names began and ended, on both sides.

    Parameters
    ----------
    moments : Moments
        Reads ``annotations`` and ``nvtx_ranges``.
    reference : int
        Wall time (us) that the snapshot's times count from.

    Returns
    -------
    Sides
        Only names that both sides have: a program need not write all its ranges to both.
    """
    ranges = moments.nvtx_ranges.with_columns(pl.col("name").str.replace(_EMITTED, ""))
    trace = pl.concat(
        ranges.select("pid", "name", ns=time, is_first=pl.lit(first))
        for time, first in (("start_ns", True), ("end_ns", False))
    ).filter(pl.col("ns").is_not_null() & pl.col("name").is_not_null())
    stage = pl.col("stage").cast(pl.String)
    snapshot = (
        moments.annotations.filter(stage.is_in(["START", "END"]))
        .filter(pl.col("time_us").is_not_null(), pl.col("name").is_not_null())
        .select("name", ns=_wall(reference), is_first=stage == "START")
        .unique()  # one range is written for each GPU
        .join(trace.select("name").unique(), on="name", how="semi")
    )
    return _sides(snapshot, trace.join(snapshot, on="name", how="semi"), ["name", "is_first"])


def mark_pairs(moments: Moments, reference: int) -> tuple[Ints, Ints, int | None]:
    """Give the marks that say the wall time.

    Parameters
    ----------
    moments : Moments
        Reads ``nvtx_marks``.
    reference : int
        Wall time (us) that the wall times count from.

    Returns
    -------
    wall_ns, trace_ns : arrays of int
        What they say, and when they were made; by time.
    pid : int or None
        Process that made them, if it is one.
    """
    marks = (
        moments.nvtx_marks.with_columns(
            time_us=pl.col("name").str.extract(MARK).cast(pl.Int64, strict=False)
        )
        .filter(pl.col("time_us").is_not_null(), pl.col("start_ns").is_not_null())
        .sort("start_ns")
        .select("pid", "start_ns", wall_ns=_wall(reference))
    )
    pids = marks["pid"].unique()
    pid = pids[0] if pids.len() == 1 else None
    return marks["wall_ns"].to_numpy(), marks["start_ns"].to_numpy(), pid


def trace_span(moments: Moments) -> tuple[int, int]:
    """Give the first and the last time (ns) that the trace is known to have recorded.

    Parameters
    ----------
    moments : Moments
        Reads every time of the trace.

    Returns
    -------
    (int, int)
        ``(0, 0)`` for a trace without rows.
    """
    frames = [moments.allocations, moments.nvtx_ranges, moments.nvtx_marks]
    frames += [] if moments.api_calls is None else [moments.api_calls]
    names = ("alloc_ns", "free_ns", "start_ns", "end_ns")
    columns = [frame[name].drop_nulls() for frame in frames for name in names if name in frame]
    known = [column for column in columns if not column.is_empty()]
    if not known:
        return 0, 0
    return min(column.min() for column in known), max(column.max() for column in known)  # type: ignore[type-var,return-value]


def _wall(reference: int) -> pl.Expr:
    return (pl.col("time_us") - reference) * NS_PER_US


def _sides(snapshot: pl.DataFrame, trace: pl.DataFrame, key: list[str]) -> Sides:
    """Give the same number to what happened alike, and part the trace by process."""
    kinds = (
        pl.concat([snapshot.select(key), trace.select(key)])
        .unique()
        .sort(key)
        .with_row_index("what")
    )
    kinds = kinds.with_columns(pl.col("what").cast(pl.Int64))
    numbered = [
        side.join(kinds, on=key, how="left", maintain_order="left") for side in (snapshot, trace)
    ]
    by_pid = numbered[1].sort("pid").partition_by("pid", as_dict=True, maintain_order=True)
    return Sides(_side(numbered[0]), {pid: _side(rows) for (pid,), rows in by_pid.items()})


def _side(rows: pl.DataFrame) -> Side:
    rows = rows.select(pl.col(name).cast(dtype) for name, dtype in _MOMENT.items())
    return Side(*(rows[name].to_numpy() for name in _MOMENT))
