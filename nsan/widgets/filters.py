"""What of a trace is shown: by process, GPU, cause, access, kernel, NVTX range and allocation.

A row is kept if each filter that is on keeps it. A cause or access filter leaves out rows that have no
cause or access (a fault row has no cause). A GPU filter keeps CPU faults, which belong to no GPU, as
:meth:`nsan.Trace.filter` does. A kernel filter keeps what starts while one of them runs on the row's own
process and GPU (a CPU fault: in its process). An NVTX filter keeps what starts while a range of that name
is open, by time alone, as ``Trace.filter(nvtx=)`` does, in the processes that have such a range. An
allocation filter keeps what lies in one while it lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.intervals import union
from nsan.errors import UnknownNameError, UsageError, listed
from nsan.text import cause_word, shortened
from nsan.units import format_address, format_bytes
from nsan.uvm.constants import MANAGED_KINDS
from nsan.widgets.names import distinct, fitting, labels_of, n_sent, shares

if TYPE_CHECKING:
    from nsan.trace import Trace

KEYS: Final = ("pid", "device", "cause", "access", "kernel", "nvtx", "allocation")
"""Filters by name, in the order of the toolbar."""

MOST_LISTED: Final = 500
"""Entries of a filter that the browser lists."""

LISTED_BYTES: Final = 100_000
"""Bytes of all entries that the browser lists, as sent."""

_ENTRY: Final = 40
"""Bytes of an entry beside its label."""

_MOST_LABEL: Final = 100

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

    @cached_property
    def listed(self) -> dict[str, int]:
        """How many entries of each filter the browser lists: ``MOST_LISTED``, and what ``LISTED_BYTES`` hold."""
        first = {key: labels[:MOST_LISTED] for key, labels in self.labels.items()}
        sizes = {
            key: sum(n_sent(each) + _ENTRY for each in labels) for key, labels in first.items()
        }
        room = shares(sizes, LISTED_BYTES)
        return {key: fitting(labels, room[key], _ENTRY)[0] for key, labels in first.items()}

    def entries(self, key: str) -> list[dict[str, Any]]:
        """Return the entries of a filter for the browser: the first of them, as many as it lists."""
        ids = range(len(self.labels[key])) if key in _NAMED else self.values[key]
        pairs = zip(ids[: self.listed[key]], self.labels[key], strict=False)
        return [{"id": each, "label": label} for each, label in pairs]

    def cut(self) -> dict[str, int]:
        """Count the entries that the browser does not list, by filter."""
        more = {key: len(labels) - self.listed[key] for key, labels in self.labels.items()}
        return {key: count for key, count in more.items() if count > 0}

    def chosen(self, key: str, ids: Iterable[Any]) -> list[Any]:
        """Return the values of some entries."""
        return [self.values[key][each] if key in _NAMED else each for each in ids]


def options_of(
    trace: Trace, layers: pl.DataFrame, owners: pl.DataFrame, named: Mapping[str, pl.Series]
) -> Options:
    """List what a trace can be filtered by.

    Parameters
    ----------
    trace : Trace
        The trace.
    layers : DataFrame
        The kinds of rows that it has: ``cause`` and ``access``.
    owners : DataFrame
        ``pid`` and ``device_id`` of its rows.
    named : mapping of str to Series
        Distinct names of "kernel" and "nvtx" by number, as :func:`nsan.widgets.names.numbered` gives them.

    Returns
    -------
    Options
        Kernels and NVTX ranges by name, the longest in total first; allocations the largest first.
    """
    processes, allocations = pl.collect_all(
        [trace.processes.select("pid", "name"), _managed(trace.allocations)]
    )
    called = dict(processes.rows())
    pids = sorted(owners["pid"].drop_nulls().unique().to_list())
    devices = sorted(owners["device_id"].drop_nulls().unique().to_list())
    causes, accesses = _present(layers["cause"]), _present(layers["access"])
    rows = allocations.to_dicts()
    values: dict[str, list[Any]] = {
        "pid": pids,
        "device": devices,
        "cause": causes,
        "access": accesses,
        "kernel": named["kernel"].to_list(),
        "nvtx": named["nvtx"].to_list(),
        "allocation": rows,
    }
    labels = {
        "pid": [shortened(f"{pid} {called.get(pid) or ''}".strip(), 60) for pid in pids],
        "device": [f"GPU {device}" for device in devices],
        "cause": [cause_word(cause) for cause in causes],
        "access": accesses,
        "kernel": labels_of(named["kernel"]),
        "nvtx": labels_of(named["nvtx"]),
        "allocation": distinct([allocation_label(row) for row in rows], _MOST_LABEL),
    }
    return Options(labels, values)


def allocation_label(row: Mapping[str, Any]) -> str:
    """Name an allocation for people: its variable, size and address."""
    parts = [row["name"], format_bytes(row["bytes"]), format_address(row["va"])]
    return shortened(", ".join(str(part) for part in parts if part), _MOST_LABEL)


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


def checked(given: Any, options: Options) -> Filters:
    """Check filters, and write them in the one way in which they are kept.

    Parameters
    ----------
    given : mapping or None
        By filter: a list, or None for all. Kernels and NVTX ranges by name or by number in
        their list; allocations by label or number; the rest by value. A filter that is left out is
        off; None: all are.
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
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        msg = f"filters={given!r:.80}: give a dict as {{'cause': ['eviction']}}, or None for no filter."
        raise UsageError(msg)
    for key in given:
        if key not in KEYS:
            raise UnknownNameError("filter", shortened(key), KEYS)
    return {key: _ids(key, given.get(key), options) for key in KEYS}


def _ids(key: str, wanted: Any, options: Options) -> list[Any] | None:
    if wanted is None:
        return None
    single = isinstance(wanted, str | int)
    if not single and (isinstance(wanted, Mapping) or not isinstance(wanted, Iterable)):
        msg = f"filters[{key!r}]={wanted!r:.80}: give a list of what is kept, or None for all."
        raise UsageError(msg)
    entries = [wanted] if single else list(wanted)
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
    owners: pl.DataFrame, filters: Filters, with_ranges: pl.Series | None = None
) -> list[int] | None:
    """Choose the processes and GPUs that the filters keep.

    Parameters
    ----------
    owners : DataFrame
        ``owner``, ``pid``, ``device_id`` (null: a row that belongs to no GPU).
    filters : dict
        As :func:`checked` gives them.
    with_ranges : Series, optional
        Processes that have a range of the NVTX filter.

    Returns
    -------
    list of int, or None
        Owners; None keeps all.
    """
    if filters["pid"] is None and filters["device"] is None and with_ranges is None:
        return None
    kept = owners
    if filters["pid"] is not None:
        kept = kept.filter(pl.col("pid").is_in(filters["pid"]))
    if filters["device"] is not None:
        kept = kept.filter(
            pl.col("device_id").is_in(filters["device"]) | pl.col("device_id").is_null()
        )
    if with_ranges is not None:
        kept = kept.filter(pl.col("pid").is_in(with_ranges.implode(), nulls_equal=True))
    return sorted(kept["owner"].to_list())


def windows_of(ranges: pl.DataFrame) -> pl.DataFrame:
    """Find when any of some NVTX ranges is open.

    Parameters
    ----------
    ranges : DataFrame
        ``start_ns``, ``end_ns``.

    Returns
    -------
    DataFrame
        ``start_ns``, ``end_ns``: disjoint, ascending; of every process, as ``Trace.filter(nvtx=)`` has it.
    """
    return union(ranges.lazy().select("start_ns", "end_ns")).collect()


def said(filters: Filters, options: Options) -> Sequence[str]:
    """Say which filters are on, one sentence each."""
    words = []
    for key in KEYS:
        ids = filters[key]
        if ids is None:
            continue
        known = options.values[key]
        places = ids if key in _NAMED else [known.index(each) for each in ids]
        words.append(f"{key}: {listed([options.labels[key][each] for each in places], limit=3)}")
    return words
