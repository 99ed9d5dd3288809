"""What a trace counts over time: memory held, bytes moved and batches served by the second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import polars as pl

from nsan.analysing import run_analysis
from nsan.analysis.catalog import find as find_analysis
from nsan.analysis.pca.clock import Clock
from nsan.errors import NsanError
from nsan.exports.layout import Place
from nsan.exports.slices import COUNTERS, Sheet
from nsan.trace import MAX_NS, MIN_NS

if TYPE_CHECKING:
    from numpy.typing import NDArray

_OF_GPU: Final = ["pid", "device_id"]
_STRETCHES: Final = 2000
"""Stretches of time of a rate, at most."""

_NARROWEST_NS: Final = 10_000
"""The shortest of them: shorter than a batch, a rate would be a comb."""

_NS_PER_S: Final = 1e9

_LEVELS: Final = {
    "reserved_bytes": "PyTorch reserved",
    "active_bytes": "PyTorch active",
    "allocated_bytes": "PyTorch allocated",
}


def write_resident(sheet: Sheet) -> None:
    """Write how much of the memory of each GPU was known to hold managed data.

    Parameters
    ----------
    sheet : Sheet
        What it is drawn on.
    """
    name = "Resident (reconstructed)"
    kind = "reconstructed"
    about = sheet.about("Managed bytes known to be on this GPU, from migrations.", kind)
    # What came before a part decides what is there in it.
    steps = run_analysis(sheet.asked.whole, find_analysis("resident_bytes_over_time"))
    value = (pl.col("resident_bytes") + pl.col("backfilled_bytes").fill_null(0)).alias("value")
    rows = steps.select(*_OF_GPU, "start_ns", value).drop_nulls(["start_ns", "value"])
    _count(sheet, _left(sheet, rows.collect()), (name, COUNTERS, about, ""))


def _left(sheet: Sheet, levels: pl.DataFrame) -> pl.DataFrame:
    """Keep of levels of the whole capture what filters left; a level holds until the next.

    Where filters left several windows, also what is between them.
    """
    asked = sheet.asked
    for column, name in (("pid", "pid"), ("device_id", "device")):
        if (wanted := asked.filters.get(name)) is not None:
            levels = levels.filter(
                pl.col(column).is_in([wanted] if isinstance(wanted, int) else list(wanted))
            )
    windows = asked.trace.windows
    if windows == ():
        return levels.clear()
    first, last = (MIN_NS, MAX_NS) if windows is None else (windows[0][0], windows[-1][1])
    first = max(first, sheet.begin_ns)
    start = pl.col("start_ns")
    before = levels.filter(start <= first).group_by(_OF_GPU, maintain_order=True).last()
    inside = levels.filter(start > first, start < last)
    return pl.concat(
        [before.with_columns(start_ns=pl.lit(first, pl.Int64)), inside], how="diagonal"
    )


def write_traffic(sheet: Sheet) -> None:
    """Write how many bytes came to each GPU and left it by the second.

    Parameters
    ----------
    sheet : Sheet
        What it is drawn on.
    """
    rows = sheet.rows("migrations").select(*_OF_GPU, "direction", "start_ns", "end_ns", "bytes")
    for at, (direction, words) in enumerate(_DIRECTIONS.items(), 1):
        moved = rows.filter(pl.col("direction") == direction, pl.col("bytes").is_not_null())
        about = sheet.about(f"Bytes moved {words} in a stretch of time, by its length.", "derived")
        _count(
            sheet,
            rates(moved.collect(), _OF_GPU),
            (f"Migrated {words}", COUNTERS + at, about, "B/s"),
        )


_DIRECTIONS: Final = {"htod": "in", "dtoh": "out", "dtod": "between GPUs"}


def write_fault_rates(sheet: Sheet, batches: pl.DataFrame | None) -> None:
    """Write how many batches of GPU page faults, and how many page faults of the CPU, began by the second.

    Parameters
    ----------
    sheet : Sheet
        What they are drawn on.
    batches : DataFrame or None
        What the analysis ``batches`` gives, if anything.
    """
    if batches is not None:
        is_inferred = (batches["kind"].cast(pl.String) == "reconstructed").any()
        kind = "reconstructed" if is_inferred else "derived"
        about = sheet.about("Driver batches of GPU page faults that begin in a stretch.", kind)
        name = "Batches" + " (reconstructed)" * is_inferred
        start = pl.coalesce("start_ns", "first_copy_ns", "end_ns")
        begun = batches.select(*_OF_GPU, start_ns=start).filter(pl.col("start_ns").is_not_null())
        _count(sheet, rates(_one_each(begun), _OF_GPU), (name, COUNTERS + 4, about, "batches/s"))
    faults = sheet.rows("cpu_faults").select("pid", "start_ns").collect()
    about = sheet.about("Page faults of the CPU that begin in a stretch.", "derived")
    for (pid,), part in rates(_one_each(faults), ["pid"]).group_by("pid", maintain_order=True):
        process = sheet.layout.process(pid)
        place = Place(process, "CPU page fault rate", -501, about)
        _counted(sheet, part, place, "faults/s")


def _one_each(moments: pl.DataFrame) -> pl.DataFrame:
    return moments.with_columns(end_ns=pl.col("start_ns") + 1, bytes=pl.lit(1, pl.Int64))


def rates(rows: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """Turn what happens in intervals into so much by the second, in equal stretches of time.

    An interval that reaches over several stretches counts in each by its part.

    Parameters
    ----------
    rows : DataFrame
        Keys, ``start_ns``, ``end_ns`` and ``bytes`` (Int64), no null but in keys.
    keys : sequence of str
        What has a rate of its own.

    Returns
    -------
    DataFrame
        Keys, ``start_ns`` and ``value`` (Float64): a level from there on, where it changes.
    """
    dtypes = {key: rows.schema[key] for key in keys}
    if rows.is_empty():
        return pl.DataFrame(schema={**dtypes, "start_ns": pl.Int64(), "value": pl.Float64()})
    first = int(rows["start_ns"].min())  # type: ignore[arg-type]
    last = int(rows.select(pl.max_horizontal("start_ns", "end_ns").max()).item())
    width = max(_NARROWEST_NS, -(-(last + 1 - first) // _STRETCHES))
    edges = np.arange(first, last + 2 * width, width)
    parts = []
    for key, part in rows.group_by(keys, maintain_order=True):
        moved = np.diff(_moved_until(part, edges), append=np.nan)
        moved[-1] = 0.0
        fresh = np.concatenate(([True], moved[1:] != moved[:-1]))
        levels = {"start_ns": edges[fresh], "value": moved[fresh] / width * _NS_PER_S}
        same = [
            pl.lit(value, dtypes[name]).alias(name) for name, value in zip(keys, key, strict=True)
        ]
        parts.append(pl.DataFrame(levels).select(*same, "start_ns", "value"))
    return pl.concat(parts)


def _moved_until(part: pl.DataFrame, edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """Add up what was moved before each edge."""
    first = edges[0]
    start = part["start_ns"].to_numpy() - first
    end = np.maximum(part["end_ns"].to_numpy() - first, start + 1)
    speed = part["bytes"].to_numpy() / (end - start)
    at = np.concatenate((start, end))
    order = np.argsort(at, kind="stable")
    at = at[order]
    running = np.cumsum(np.concatenate((speed, -speed))[order])
    moved = np.concatenate(([0.0], np.cumsum(running[:-1] * np.diff(at))))
    found: NDArray[np.float64] = np.interp(edges - first, at, moved, left=0.0)
    return found


def write_allocator(sheet: Sheet) -> None:
    """Write what PyTorch's caching allocator held of each GPU, on the trace's clock.

    Parameters
    ----------
    sheet : Sheet
        What it is drawn on.

    Raises
    ------
    NsanError
        If the snapshot is not of this run.
    """
    clock, timed = _clock(sheet), sheet.asked.snapshot
    if clock is None or timed is None:
        return
    times = timed.allocator_events.select("device_id", "sequence", "time_us").collect()
    levels = sheet.asked.frame("allocator_timeline")
    rows = levels.join(times, on=["device_id", "sequence"], maintain_order="left").with_columns(
        start_ns=clock.ns(), pid=pl.lit(_process(sheet, clock), pl.UInt32)
    )
    rows = _left(sheet, rows.filter(pl.col("start_ns").is_not_null()))
    for at, (column, name) in enumerate(_LEVELS.items(), 5):
        kinds = set(rows["replay_kind"].cast(pl.String).drop_nulls())
        kind = "reconstructed" if kinds - {"derived"} else "derived"
        about = sheet.about(f"{column} of the caching allocator, from the snapshot.", kind)
        held = rows.select(*_OF_GPU, "start_ns", value=column)
        _count(sheet, held, (name, COUNTERS + at, about, ""))


def _clock(sheet: Sheet) -> Clock | None:
    """Give the mapping of the snapshot's clock that the join stands on."""
    joined = sheet.asked.joined
    if joined is None:
        return None
    fits = joined.tables["clock_fits"].filter("is_used")
    if fits.is_empty():
        return None
    used = fits.row(0, named=True)
    names = ("method", "offset_ns", "reference_us", "drift", "pid", "residual_max_ns")
    return Clock(**{name: used[name] for name in names})


def _process(sheet: Sheet, clock: Clock) -> int | None:
    """Find the process whose allocator the snapshot is of."""
    if clock.pid is not None:
        return clock.pid
    known = sheet.asked.whole.processes.select("pid").collect()["pid"].to_list()
    return known[0] if len(known) == 1 else None


def _count(sheet: Sheet, rows: pl.DataFrame, what: tuple[str, int, str, str]) -> None:
    """Write the values of one counter for each GPU."""
    name, rank, about, unit = what
    for (pid, device), part in rows.group_by(_OF_GPU, maintain_order=True):
        place = Place(sheet.layout.gpu(pid, device), name, rank, about)
        _counted(sheet, part, place, unit)


def _counted(sheet: Sheet, rows: pl.DataFrame, place: Place, unit: str) -> None:
    track = sheet.layout.counter(place, unit)
    sheet.file.counts(rows.select("start_ns", "value", track=pl.lit(track, pl.Int64)))


def write_counters(sheet: Sheet, batches: pl.DataFrame | None) -> list[str]:
    """Write all counters.

    Parameters
    ----------
    sheet : Sheet
        What they are drawn on.
    batches : DataFrame or None
        What the analysis ``batches`` gives, if anything.

    Returns
    -------
    list of str
        What could not be counted, and why.

    Raises
    ------
    NsanError
        If a snapshot was named that is not of this run.
    """
    missing = []
    write_resident(sheet)
    try:
        write_allocator(sheet)
    except NsanError as error:
        # One that only lies beside the trace is no reason to write nothing.
        if sheet.asked.snapshot_name:
            raise
        missing.append(f"the allocator's memory: {error}")
    write_traffic(sheet)
    write_fault_rates(sheet, batches)
    return missing
