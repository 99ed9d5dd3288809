"""The table of fault clusters: the largest first, each with its place on the map.

Clusters in time and address space where the copies have addresses, episodes in time where they have
none. At ten million rows either takes many seconds, so the explorer finds them while it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysing import run_analysis
from nsan.analysis.catalog import find
from nsan.text import safe, shortened
from nsan.units import format_address, format_bytes, format_count, format_time
from nsan.widgets.facts import kind_of, unanswered
from nsan.widgets.members import members

if TYPE_CHECKING:
    from nsan.trace import Trace

MOST_ROWS: Final = 200
"""Rows of the table."""

_NOISE: Final = -1

Place = Callable[[int | None, int, int], tuple[int, int] | None]
"""Turns process, address and size into a stretch of the map, or None."""


@dataclass(frozen=True)
class Clusters:
    """The clusters of a trace.

    Attributes
    ----------
    name : str
        The analysis: ``fault_clusters`` or ``fault_episodes``.
    rows : list of dict
        Rows of the analysis, the most pages first, at most ``MOST_ROWS``.
    total : int
        Clusters that there are.
    rest_pages : int
        Faulted pages in no cluster: the noise, or outside of all episodes.
    empty : str
        What the analysis says where it finds none.
    batches : DataFrame or None
        Ends of the fault rows of each cluster, as :func:`nsan.widgets.members.members` finds them;
        None where time says which rows belong.
    """

    name: str
    rows: list[dict[str, Any]]
    total: int
    rest_pages: int
    empty: str
    batches: pl.DataFrame | None = None

    def batches_of(self, row: Mapping[str, Any]) -> pl.DataFrame | None:
        """Return the batches of a cluster; None where time says which rows belong."""
        if self.batches is None:
            return None
        return self.batches.filter(pl.col("cluster_id") == row["cluster_id"])


def find_clusters(trace: Trace) -> Clusters:
    """Find the clusters of a trace.

    Parameters
    ----------
    trace : Trace
        The trace.

    Returns
    -------
    Clusters
        Deterministic: by pages, then process, GPU and number.
    """
    has_address = trace.migrations.select(pl.col("va").is_not_null().any()).collect().item()
    name = "fault_clusters" if has_address else "fault_episodes"
    number, pages = ("cluster_id", "n_pages") if has_address else ("episode_id", "n_faulted_pages")
    analysis = find(name)
    found = run_analysis(trace, analysis).collect()
    real = (pl.col(number) != _NOISE).fill_null(value=False)
    ordered = found.filter(real).sort(
        [pages, "pid", "device_id", number], descending=[True, False, False, False], nulls_last=True
    )
    rest = found.filter(~real)[pages].cast(pl.Int64)
    shown, batches = ordered.head(MOST_ROWS), None
    if has_address and unanswered(trace, "gpu_faults") is None:
        batches = members(trace).filter(pl.col(number).is_in(shown[number].to_list()))
        began = batches.group_by(number).agg(pl.col("first_ns").min())
        shown = shown.join(began, on=number, how="left", maintain_order="left")
    rows, nothing = shown.to_dicts(), analysis.result.nothing
    return Clusters(name, rows, ordered.height, int(rest.sum()), nothing, batches)


@dataclass(frozen=True)
class _Field:
    """A column of the table: how a value reads, and what it sorts by."""

    id: str
    label: str
    text: Callable[[Any], str | None]
    align: str = "right"


def _kernel(name: Any) -> str:
    return shortened(name, 60) if name else ""


def _word(value: Any) -> str:
    return safe(value).replace("_", " ") if value else ""


def _fields(trace: Trace, clusters: Clusters) -> list[_Field]:
    rows, name = clusters.rows, clusters.name
    by_place = name == "fault_clusters"
    many = {key: len({row[key] for row in rows}) > 1 for key in ("pid", "device_id")}
    found = [
        _Field("start_ns", "starts at", format_time),
        _Field("duration_ns", "lasts", format_time),
    ]
    found += [_Field("pid", "process", str)] * many["pid"]
    found += [_Field("device_id", "GPU", str)] * many["device_id"]
    if by_place:
        found += [
            _Field("va", "lowest address", format_address, "left"),
            _Field("span_bytes", "span", format_bytes),
        ]
    pages = "n_pages" if by_place else "n_faulted_pages"
    found += [
        _Field(pages, "faulted pages", format_count),
        _Field("bytes", "moved in", format_bytes),
    ]
    # Where none were recorded there is no count: an empty column tells nothing.
    if unanswered(trace, "gpu_faults") is None:
        found.append(_Field("n_fault_rows", "fault rows", format_count))
    if by_place:
        found.append(_Field("pattern", "pattern", _word, "left"))
    return [*found, _Field("kernel", "main kernel", _kernel, "left")]


def _sort_key(value: Any) -> Any:
    """Give the browser what it can sort by: an address as a fixed number of hex digits."""
    return shortened(value) if isinstance(value, str) else value


def table(trace: Trace, clusters: Clusters, origin_ns: int, place: Place) -> dict[str, Any]:
    """Write the table for the browser.

    Parameters
    ----------
    trace : Trace
        The trace.
    clusters : Clusters
        Its clusters.
    origin_ns : int
        Times are sent from here.
    place : callable
        Finds the stretch of the map of a process, address and size.

    Returns
    -------
    dict
        ``note``, ``kind``, ``columns``, ``rows``, ``total``, ``empty``, ``state``.
    """
    fields = _fields(trace, clusters)
    rows = []
    for number, row in enumerate(clusters.rows):
        values = [row[field.id] for field in fields]
        pairs = list(zip(fields, values, strict=True))
        rows.append(
            {
                "id": number,
                "number": row.get("cluster_id", row.get("episode_id", number)),
                "cells": [str("-" if v is None else field.text(v)) for field, v in pairs],
                "sort": [field.text(v) if field.id == "va" else _sort_key(v) for field, v in pairs],
                "window": [side - origin_ns for side in shown_of(row)],
                "place": place_of(row, place),
            }
        )
    return {
        "note": _note(clusters),
        "kind": kind_of(trace, "reconstructed"),
        "columns": [{"id": f.id, "label": f.label, "align": f.align} for f in fields],
        "rows": rows,
        "total": clusters.total,
        "empty": clusters.empty,
        "state": "ready",
    }


def window_of(row: Mapping[str, Any]) -> tuple[int, int]:
    """Return the half-open window of the copies of a cluster, ns from the session start."""
    return row["start_ns"], max(row["end_ns"], row["start_ns"] + 1)


def shown_of(row: Mapping[str, Any]) -> tuple[int, int]:
    """Return the window that shows a cluster: from its first fault row, which starts before it copies."""
    start, end = window_of(row)
    first = row.get("first_ns")
    return start if first is None else min(start, first), end


def place_of(row: Mapping[str, Any], place: Place) -> list[int] | None:
    """Return the stretch of the map of a cluster, None where it has no address."""
    if row.get("va") is None or not row.get("span_bytes"):
        return None
    found = place(row["pid"], row["va"], row["span_bytes"])
    return None if found is None else list(found)


def _note(clusters: Clusters) -> str:
    called = "clusters" if clusters.name == "fault_clusters" else "episodes"
    parts = []
    if clusters.total > len(clusters.rows):
        shown, total = format_count(len(clusters.rows)), format_count(clusters.total)
        parts.append(f"the {shown} of {total} {called} with the most pages")
    if clusters.rest_pages:
        parts.append(f"{format_count(clusters.rest_pages)} faulted pages are in none")
    parts.append("of the whole trace, whatever the filters show")
    return "; ".join(parts)
