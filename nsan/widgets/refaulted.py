"""How much of what came to a GPU had been evicted before: a fact about whatever is picked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import polars as pl

from nsan.analysing import run_analysis
from nsan.analysis.catalog import find
from nsan.units import format_bytes
from nsan.widgets.facts import Fact, kind_of, unanswered

if TYPE_CHECKING:
    from nsan.trace import Trace
    from nsan.widgets.filters import Filters
    from nsan.widgets.scene import Span

_COLUMNS = ("time_ns", "pid", "to_device_id", "va", "bytes")


def find_refaults(trace: Trace) -> pl.DataFrame | None:
    """Find what was evicted and came back.

    Parameters
    ----------
    trace : Trace
        The trace.

    Returns
    -------
    DataFrame or None
        One row per run of pages that came back: ``time_ns`` (end of the push), ``pid``,
        ``to_device_id``, ``va``, ``bytes``, by time. None where a filter has taken away what came
        before, or where no migrations or no causes were recorded: nobody can tell.
    """
    if trace.is_filtered or unanswered(trace, "migrations") is not None:
        return None
    causes = trace.migrations.select(pl.col("cause").cast(pl.String).unique()).collect()
    if not set(causes["cause"]) - {"unknown", None} and causes.height:
        return None
    found = run_analysis(trace, find("refaults")).select(_COLUMNS).collect()
    return found.sort("time_ns", "pid", "va")


def kept_refaults(refaults: pl.DataFrame | None, filters: Filters) -> pl.DataFrame | None:
    """Keep what came back to the processes and GPUs that the filters keep.

    Parameters
    ----------
    refaults : DataFrame or None
        As :func:`find_refaults` gives them.
    filters : dict
        As :func:`nsan.widgets.filters.checked` gives them.

    Returns
    -------
    DataFrame or None
        None under any other filter: pages that came back have no cause and no access, and may be a part
        of a copy, so nobody can say what of them such a filter keeps.
    """
    by_owner = {"pid": "pid", "device": "to_device_id"}
    others = [key for key, ids in filters.items() if ids is not None and key not in by_owner]
    if refaults is None or others:
        return None
    for key, column in by_owner.items():
        ids = filters[key]
        if ids is not None:
            refaults = refaults.filter(pl.col(column).is_in(ids))
    return refaults


def refault_fact(
    trace: Trace,
    refaults: pl.DataFrame,
    window: Span,
    keys: Mapping[str, int | None],
    places: Sequence[tuple[int, int]] | None,
) -> Fact:
    """Say how many bytes came back after an eviction.

    Parameters
    ----------
    trace : Trace
        The trace.
    refaults : DataFrame
        As :func:`find_refaults` gives them.
    window : (int, int)
        They were back in this half-open time, ns.
    keys : mapping
        ``pid`` and ``device_id`` to which they came, where these matter.
    places : sequence of (int, int), or None
        First address and first behind of each run; None: all.

    Returns
    -------
    [label, text, kind]
        Only the bytes that lie in the runs count.
    """
    time, pid, device = pl.col("time_ns"), keys.get("pid"), keys.get("device_id")
    rows = refaults.filter(time >= window[0], time < window[1])
    if pid is not None:
        rows = rows.filter(pl.col("pid") == pid)
    if device is not None:
        rows = rows.filter(pl.col("to_device_id") == device)
    size = int(rows["bytes"].sum())
    if places is not None:
        last = pl.col("va") + (pl.col("bytes") - 1).cast(pl.UInt64)
        size = 0
        for low, high in places:
            low_end, high_end = pl.lit(low, pl.UInt64), pl.lit(high - 1, pl.UInt64)
            first = pl.max_horizontal("va", low_end)
            inside = rows.filter((pl.col("va") <= high_end) & (last >= low_end))
            part = (pl.min_horizontal(last, high_end) - first).cast(pl.Int64) + 1
            size += int(inside.select(part.sum()).item())
    return ["came back after an eviction", format_bytes(size), kind_of(trace, "derived")]
