"""What of a trace is shown: by process, GPU, cause, access, kernel, NVTX range and allocation.

A row is kept if each filter that is on keeps it. A cause or access filter leaves out rows that have no
cause or access (a fault row has no cause). A GPU filter keeps CPU faults, which belong to no GPU, as
:meth:`nsan.Trace.filter` does. A kernel or NVTX filter keeps what starts while one of them runs, an
allocation filter what lies in one while it lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.intervals import intersection, union
from nsan.errors import UnknownNameError, UsageError, listed
from nsan.text import cause_word, shortened
from nsan.units import format_address, format_bytes
from nsan.uvm.constants import MANAGED_KINDS

if TYPE_CHECKING:
    from nsan.trace import Trace

KEYS: Final = ("pid", "device", "cause", "access", "kernel", "nvtx", "allocation")
"""Filters by name, in the order of the toolbar."""

MOST_LISTED: Final = 500
"""Entries of a filter that the browser lists."""

_NAMED: Final = ("kernel", "nvtx", "allocation")
"""Filters whose entries are known by their number in the list, since names are long and hostile."""

Filters = dict[str, list[Any] | None]


@dataclass(frozen=True)
class Options:
    """What each filter can choose from.

    Attributes
    ----------
    labels : dict of str to list of str
        By filter: what people read, harmless and short.
    values : dict of str to list
        By filter: the value of each entry; a name as recorded, an allocation as a row of its table.
    """

    labels: dict[str, list[str]]
    values: dict[str, list[Any]]

    def entries(self, key: str) -> list[dict[str, Any]]:
        """Return the entries of a filter for the browser: at most ``MOST_LISTED``."""
        ids = range(len(self.labels[key])) if key in _NAMED else self.values[key]
        pairs = zip(ids, self.labels[key], strict=True)
        return [{"id": each, "label": label} for each, label in pairs][:MOST_LISTED]

    def cut(self) -> dict[str, int]:
        """Count the entries that the browser does not list, by filter."""
        more = {key: len(labels) - MOST_LISTED for key, labels in self.labels.items()}
        return {key: count for key, count in more.items() if count > 0}

    def chosen(self, key: str, ids: Iterable[Any]) -> list[Any]:
        """Return the values of some entries."""
        return [self.values[key][each] if key in _NAMED else each for each in ids]


def options_of(trace: Trace, layers: pl.DataFrame, owners: pl.DataFrame) -> Options:
    """List what a trace can be filtered by.

    Parameters
    ----------
    trace : Trace
        The trace.
    layers : DataFrame
        The kinds of rows that it has: ``cause`` and ``access``.
    owners : DataFrame
        ``pid`` and ``device_id`` of its rows.

    Returns
    -------
    Options
        Kernels and NVTX ranges by name, the longest in total first; allocations the largest first.
    """
    kernels, ranges, processes, allocations = pl.collect_all(
        [
            _by_total(trace.kernels),
            _by_total(trace.nvtx_ranges),
            trace.processes.select("pid", "name"),
            _managed(trace.allocations),
        ]
    )
    named = dict(processes.rows())
    pids = sorted(owners["pid"].drop_nulls().unique().to_list())
    devices = sorted(owners["device_id"].drop_nulls().unique().to_list())
    causes, accesses = _present(layers["cause"]), _present(layers["access"])
    rows = allocations.to_dicts()
    values: dict[str, list[Any]] = {
        "pid": pids,
        "device": devices,
        "cause": causes,
        "access": accesses,
        "kernel": kernels["name"].to_list(),
        "nvtx": ranges["name"].to_list(),
        "allocation": rows,
    }
    labels = {
        "pid": [shortened(f"{pid} {named.get(pid) or ''}".strip(), 60) for pid in pids],
        "device": [f"GPU {device}" for device in devices],
        "cause": [cause_word(cause) for cause in causes],
        "access": accesses,
        "kernel": [shortened(name) for name in values["kernel"]],
        "nvtx": [shortened(name) for name in values["nvtx"]],
        "allocation": [allocation_label(row) for row in rows],
    }
    return Options(labels, values)


def allocation_label(row: Mapping[str, Any]) -> str:
    """Name an allocation for people: its variable, size and address."""
    parts = [row["name"], format_bytes(row["bytes"]), format_address(row["va"])]
    return shortened(", ".join(str(part) for part in parts if part), 100)


def _by_total(rows: pl.LazyFrame) -> pl.LazyFrame:
    return (
        rows.filter(pl.col("name").is_not_null())
        .group_by("name")
        .agg(total=(pl.col("end_ns") - pl.col("start_ns")).sum())
        .sort(["total", "name"], descending=[True, False])
    )


def _managed(allocations: pl.LazyFrame) -> pl.LazyFrame:
    columns = ("pid", "va", "bytes", "alloc_ns", "free_ns", "name")
    return (
        allocations.filter(
            pl.col("kind").cast(pl.String).is_in(MANAGED_KINDS),
            pl.col("va").is_not_null(),
            pl.col("bytes") > 0,
        )
        .select(columns)
        .sort(["bytes", "pid", "va", "alloc_ns"], descending=[True, False, False, False])
    )


def _present(labels: pl.Series) -> list[str]:
    return labels.drop_nulls().unique().sort().cast(pl.String).to_list()


def checked(given: Mapping[str, Any], options: Options) -> Filters:
    """Check filters, and write them in the one way in which they are kept.

    Parameters
    ----------
    given : mapping
        By filter: a list, or None for all. Kernels and NVTX ranges by name or by number in
        their list; allocations by label or number; the rest by value. A filter that is left out is
        off.
    options : Options
        What there is.

    Returns
    -------
    dict
        Every filter: a list of ids, ascending in the list of options, or None.

    Raises
    ------
    UsageError
        If there is no such filter or entry; the message lists those that exist.
    """
    for key in given:
        if key not in KEYS:
            raise UnknownNameError("filter", str(key), KEYS)
    return {key: _ids(key, given.get(key), options) for key in KEYS}


def _ids(key: str, wanted: Any, options: Options) -> list[Any] | None:
    if wanted is None:
        return None
    entries = [wanted] if isinstance(wanted, str | int) else list(wanted)
    found = {_number(key, each, options) for each in entries}
    return sorted(found) if key in _NAMED else [options.values[key][n] for n in sorted(found)]


def _number(key: str, wanted: Any, options: Options) -> int:
    """Find an entry by its number, its value or its label."""
    values, labels = options.values[key], options.labels[key]
    if key in _NAMED and isinstance(wanted, int) and not isinstance(wanted, bool):
        if 0 <= wanted < len(values):
            return wanted
    elif wanted in values:
        return values.index(wanted)
    elif wanted in labels:
        return labels.index(wanted)
    msg = f"The trace has no {key} {wanted!r:.90} to filter by. It has: {listed(labels)}."
    raise UsageError(msg)


def layers_of(layers: pl.DataFrame, filters: Filters) -> list[int] | None:
    """Choose the kinds of rows that the cause and access filters keep.

    Parameters
    ----------
    layers : DataFrame
        ``layer``, ``cause``, ``access``.
    filters : dict
        As :func:`checked` gives them.

    Returns
    -------
    list of int, or None
        Layers; None keeps all.
    """
    if filters["cause"] is None and filters["access"] is None:
        return None
    kept = layers
    for key in ("cause", "access"):
        wanted = filters[key]
        if wanted is not None:
            kept = kept.filter(pl.col(key).cast(pl.String).is_in(wanted))
    return sorted(kept["layer"].to_list())


def owners_of(
    owners: pl.DataFrame, filters: Filters, ran: Sequence[pl.DataFrame] = ()
) -> list[int] | None:
    """Choose the processes and GPUs that the filters keep.

    Parameters
    ----------
    owners : DataFrame
        ``owner``, ``pid``, ``device_id`` (null: a row that belongs to no GPU).
    filters : dict
        As :func:`checked` gives them.
    ran : sequence of DataFrame
        ``pid`` and, if there, ``device_id`` of what the kernel and NVTX filters choose.

    Returns
    -------
    list of int, or None
        Owners; None keeps all.
    """
    if filters["pid"] is None and filters["device"] is None and not ran:
        return None
    kept = owners
    no_gpu = pl.col("device_id").is_null()
    if filters["pid"] is not None:
        kept = kept.filter(pl.col("pid").is_in(filters["pid"]))
    if filters["device"] is not None:
        kept = kept.filter(pl.col("device_id").is_in(filters["device"]) | no_gpu)
    for each in ran:
        known = kept.filter(~no_gpu).join(each, on=each.columns, how="semi", nulls_equal=True)
        loose = kept.filter(no_gpu).join(each, on="pid", how="semi", nulls_equal=True)
        kept = pl.concat([known, loose])
    return sorted(kept["owner"].to_list())


def windows_of(trace: Trace, options: Options, filters: Filters) -> pl.DataFrame | None:
    """Find when the chosen kernels or NVTX ranges ran.

    Parameters
    ----------
    trace : Trace
        The trace.
    options : Options
        What there is.
    filters : dict
        As :func:`checked` gives them.

    Returns
    -------
    DataFrame or None
        ``start_ns``, ``end_ns``: disjoint, ascending. Where both filters are on, when both ran.
        None keeps all time.
    """
    found: pl.LazyFrame | None = None
    for key, table in (("kernel", trace.kernels), ("nvtx", trace.nvtx_ranges)):
        ids = filters[key]
        if ids is None:
            continue
        names = options.chosen(key, ids)
        mine = union(table.filter(pl.col("name").is_in(names)).select("start_ns", "end_ns"))
        found = mine if found is None else intersection(found, mine)
    return None if found is None else found.collect()


def said(filters: Filters, options: Options) -> Sequence[str]:
    """Say which filters are on, one sentence each."""
    words = []
    for key in KEYS:
        ids = filters[key]
        if ids is None:
            continue
        number = [n for n, _ in enumerate(options.values[key])] if key in _NAMED else None
        known = number if number is not None else options.values[key]
        chosen = [options.labels[key][known.index(each)] for each in ids]
        words.append(f"{key}: {listed(chosen, limit=3)}")
    return words
