"""How long kernels ran while a page fault waited: of a part of a capture only what lies in the part.

Names of kernels are added up by the analysis; here all of them are one union, as kernels run side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import polars as pl

from nsan.analysis.attribution.work import gpu_work
from nsan.analysis.intervals import intersection, overlap, union
from nsan.totals import on_gpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nsan.asking import Asked

_GROUP: Final = ("pid", "device_id")
_NAMED: Final = (*_GROUP, "work", "name")
_TIMES: Final = ("time_ns", "exposed_ns")
_OF_ROWS: Final = ("exposed_fraction", "driver_ns", "migration_ns")
_SPAN: Final = {"start_ns": pl.Int64, "end_ns": pl.Int64}
_LENGTH: Final = pl.col("end_ns") - pl.col("start_ns")
_IS_KERNEL: Final = pl.col("work").is_in(["kernel", "graph"])


class Waited(NamedTuple):
    """Time in which at least one kernel ran, summed over GPUs, and in how much of it a fault waited.

    ``kind``: derived where all waits are fault rows, else reconstructed.
    """

    time_ns: int
    exposed_ns: int
    kind: str


def by_kernel(asked: Asked) -> pl.DataFrame | None:
    """Ask for faults and times by kernel; where windows of time were chosen, times are cut to them.

    Parameters
    ----------
    asked : Asked
        The trace.

    Returns
    -------
    DataFrame or None
        Of ``faults_by_kernel``; None without a row. In windows remainders have no time, and how much
        of it copies took is null.
    """
    found = asked.rows_of("faults_by_kernel")
    if found is None or asked.trace.windows is None:
        return found
    spans, waits = _spans(asked), _waits(asked, found)
    measured = _measured(asked, union(spans, by=_NAMED), union(waits, by=_GROUP), _GROUP)
    sums = measured.group_by(_NAMED).agg(pl.col(_TIMES).sum())
    share = pl.when(pl.col("time_ns") > 0).then(pl.col("exposed_ns") / pl.col("time_ns"))
    return (
        found.drop(_TIMES)
        .join(sums, on=_NAMED, how="left", nulls_equal=True, maintain_order="left")
        .with_columns(exposed_fraction=share, driver_ns=None, migration_ns=None)
        .cast({name: found.schema[name] for name in _OF_ROWS})
        .select(found.columns)
    )


def in_all(asked: Asked, kernels: pl.DataFrame) -> Waited:
    """Measure for all kernels together what :func:`by_kernel` gives for each name.

    Parameters
    ----------
    asked : Asked
        The trace.
    kernels : DataFrame
        Of :func:`by_kernel`.

    Returns
    -------
    Waited
        Each instant counts once on a GPU, however many kernels ran and faults waited.
    """
    devices, by = asked.trace.devices.collect(), ("device_id",)
    spans = union(on_gpus(_spans(asked).filter(_IS_KERNEL), devices), by=by)
    waits = union(on_gpus(_waits(asked, kernels), devices), by=by)
    found = _measured(asked, spans, waits, by)
    waited = kernels.filter(_IS_KERNEL, pl.col("exposed_ns") > 0)["exposed_kind"]
    kind = "reconstructed" if (waited == "reconstructed").any() else "derived"
    return Waited(int(found["time_ns"].sum()), int(found["exposed_ns"].sum()), kind)


def _spans(asked: Asked) -> pl.LazyFrame:
    """List the work of GPUs, all that reaches into the windows."""
    tables = (asked.trace.reaching_in(name) for name in ("kernels", "copies", "memsets"))
    return gpu_work(*tables).lazy()


def _waits(asked: Asked, kernels: pl.DataFrame) -> pl.LazyFrame:
    """Say when faults waited, on the clock of kernels: rows, or batches of GPUs that have no row."""
    columns = (*_GROUP, "start_ns", "end_ns")
    # A fault that was raised before a window may wait in it.
    rows = asked.trace.reaching_in("gpu_faults").select(columns)
    groups = kernels.select(*_GROUP, "exposed_kind", "clock_offset_ns").unique()
    parts = [rows]
    if (groups["exposed_kind"] == "reconstructed").any():
        batches = asked.lazy("batches").with_columns(
            start_ns=pl.coalesce("start_ns", "first_copy_ns")
        )
        without = batches.join(rows, on=_GROUP, how="anti", nulls_equal=True)
        parts.append(without.select(columns))
    offset = groups.lazy().select(*_GROUP, _offset="clock_offset_ns")
    return (
        pl.concat(parts)
        .join(offset, on=_GROUP, how="left", nulls_equal=True)
        .select(*_GROUP, pl.col("start_ns", "end_ns") - pl.col("_offset").fill_null(0))
    )


def _measured(
    asked: Asked, spans: pl.LazyFrame, waits: pl.LazyFrame, by: Sequence[str]
) -> pl.DataFrame:
    """Measure merged spans of work, and what of them waits cover, inside the windows."""
    windows = asked.trace.windows
    if windows is None:
        return (
            overlap(spans, waits, by=by)
            .select(pl.exclude("overlap_ns"), time_ns=_LENGTH, exposed_ns="overlap_ns")
            .collect()
        )
    kept = spans.collect()
    # The edges of open windows are too far apart to be subtracted.
    first, last = kept.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
    inside = pl.LazyFrame(windows, schema=_SPAN, orient="row").select(pl.all().clip(first, last))
    everywhere = waits.select(by).unique().join(inside, how="cross")
    cut = intersection(waits, everywhere, by=by)
    timed = overlap(kept.lazy(), union(inside)).rename({"overlap_ns": "time_ns"})
    return overlap(timed, cut, by=by).rename({"overlap_ns": "exposed_ns"}).collect()
