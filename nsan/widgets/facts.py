"""Facts about what is picked: what it is, when, how long, what faulted and moved meanwhile, where.

A fact is ``[label, text, kind]``. The kind is the word of design 5; what was not recorded says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.intervals import covered, union
from nsan.info import MODEL_KIND
from nsan.text import cause_word, direction_word, safe, shortened
from nsan.units import (
    counted,
    format_address,
    format_bytes,
    format_count,
    format_rate,
    format_time,
)
from nsan.uvm.constants import VA_BLOCK_BYTES

if TYPE_CHECKING:
    from nsan.trace import Trace

Fact = list[str]
Panel = dict[str, Any]

FAULT_WORDS: Final = {"gpu_faults": "GPU fault rows", "cpu_faults": "CPU page faults"}
"""What rows of the fault tables are called; the two are never added up."""

_LAST: Final = (1 << 64) - 1
"""The last address that there is."""

_NAMED: Final = 200
"""Characters of a name in the panel."""

_BUSY_ROWS: Final = 2_000_000
"""More copies than this are not merged for a busy time while somebody waits."""


def kind_of(trace: Trace, kind: str = "recorded") -> str:
    """Say of which kind a figure is: everything that the model wrote is modelled."""
    return "modelled" if trace.info.kind == MODEL_KIND else kind


def when(trace: Trace, start_ns: int, end_ns: int | None, kind: str = "recorded") -> list[Fact]:
    """Say when something was, and how long.

    Parameters
    ----------
    trace : Trace
        The trace.
    start_ns, end_ns : int
        Its time, ns from the session start; no end: an instant, or not known.
    kind : str
        Kind of the two times.

    Returns
    -------
    list of [label, text, kind]
        Start, end and duration.
    """
    found = [["starts at", format_time(start_ns), kind_of(trace, kind)]]
    if end_ns is not None:
        found.append(["ends at", format_time(end_ns), kind_of(trace, kind)])
        longer = "derived" if kind == "recorded" else kind
        found.append(["lasts", format_time(end_ns - start_ns), kind_of(trace, longer)])
    return found


def size_words(n_bytes: int | None, n: int, n_unknown: int) -> str:
    """Say how much copies moved, where the size of some or all may not be known.

    Parameters
    ----------
    n_bytes : int or None
        Bytes of those of known size; None: too many to count.
    n, n_unknown : int
        Copies, and those of them whose size is not known.

    Returns
    -------
    str
        A size that is not known is never 0.
    """
    copies = counted(n, "copy", "copies")
    if n_unknown >= n or n_bytes is None:
        return f"size unknown in {copies}"
    if n_unknown:
        return f"at least {format_bytes(n_bytes)} in {copies}, {format_count(n_unknown)} of unknown size"
    return f"{format_bytes(n_bytes)} in {copies}"


def traffic(trace: Trace, rows: pl.DataFrame, window: tuple[int, int]) -> list[Fact]:
    """Say what faulted and moved in some rows.

    Parameters
    ----------
    trace : Trace
        The trace.
    rows : DataFrame
        Rows with the columns of ``explorer.selection``.
    window : (int, int)
        Where they start, ns; busy time is cut at its edges.

    Returns
    -------
    list of [label, text, kind]
        Fault rows by access, page faults, CPU faults, bytes by direction and cause, busy time and
        rate, addresses. What was not recorded says so, never 0.
    """
    copies = rows.filter(pl.col("table") == "migrations")
    return [
        *_gpu_faults(trace, rows.filter(pl.col("table") == "gpu_faults")),
        *_cpu_faults(trace, rows.filter(pl.col("table") == "cpu_faults")),
        *_moved(trace, copies, window),
        *_addresses(trace, rows),
    ]


def unanswered(trace: Trace, table: str) -> str | None:
    """Say that a table was not recorded, and with which switch it is; None where it was."""
    capture = trace.info.capture.get(table)
    if capture is None or capture.answer == "recorded":
        return None
    word = "not recorded" if capture.answer == "not_recorded" else "unknown"
    return f"{word} ({capture.switch})" if capture.switch else word


def _gpu_faults(trace: Trace, faults: pl.DataFrame) -> list[Fact]:
    word = unanswered(trace, "gpu_faults")
    kind = kind_of(trace)
    if word and faults.is_empty():
        return [["GPU fault rows", word, ""]]
    found = [["GPU fault rows", format_count(faults.height), kind]]
    if faults.height:
        found.append(["faults counted in them", _sum(faults["n_page_faults"]), kind])
        found += [
            [f"fault rows, {access or 'access unknown'}", format_count(n), kind]
            for access, n in _counts(faults["access"].cast(pl.String))
        ]
    return found


def _cpu_faults(trace: Trace, faults: pl.DataFrame) -> list[Fact]:
    word = unanswered(trace, "cpu_faults")
    if word and faults.is_empty():
        return [["CPU page faults", word, ""]]
    return [["CPU page faults", format_count(faults.height), kind_of(trace)]]


def _counts(values: pl.Series) -> list[tuple[str | None, int]]:
    counts = values.alias("value").value_counts()
    return counts.sort(["count", "value"], descending=[True, False]).rows()


def _sum(values: pl.Series) -> str:
    """Add values up; a value that could not be read makes the sum unknown."""
    return "-" if values.null_count() else format_count(int(values.cast(pl.Int128).sum()))


def _moved(trace: Trace, copies: pl.DataFrame, window: tuple[int, int]) -> list[Fact]:
    word = unanswered(trace, "migrations")
    if word and copies.is_empty():
        return [["migrations", word, ""]]
    kind = kind_of(trace)
    found = [["migrations", format_count(copies.height), kind]]
    if copies.is_empty():
        return found
    sums = (
        copies.group_by("direction", "cause")
        .agg(
            n_bytes=pl.col("bytes").cast(pl.Int128).sum().cast(pl.Int64, strict=False),
            n_unknown=pl.col("bytes").null_count(),
            n=pl.len(),
        )
        .sort(["direction", "n_bytes"], descending=[False, True])
    )
    for direction, cause, n_bytes, n_unknown, n in sums.iter_rows():
        label = (
            f"{direction_word(direction or 'direction unknown')}, {cause_word(cause or 'unknown')}"
        )
        found.append([label, size_words(n_bytes, n, n_unknown), kind])
    return [*found, *_busy(trace, copies, window)]


def _busy(trace: Trace, copies: pl.DataFrame, window: tuple[int, int]) -> list[Fact]:
    """Measure the time in which any of some copies was in flight, and how fast they went.

    Wall time: what overlaps counts once, whatever the GPU, process and direction. The time is cut at
    the window; the rate is that of the whole copies over their whole time.
    """
    if copies.height > _BUSY_ROWS or copies["end_ns"].null_count():
        return []
    merged = union(copies.lazy().select("start_ns", "end_ns")).collect()
    if merged.is_empty():
        return []
    kind = kind_of(trace, "derived")
    inside = covered(merged, [window]).item()
    found = [["copies in flight for", format_time(inside), kind]]
    if not copies["bytes"].null_count():
        whole = covered(merged, None).item()
        rate = int(copies["bytes"].cast(pl.Int128).sum()) / whole * 1e9
        found.append(["rate while in flight", format_rate(rate), kind])
    return found


def _addresses(trace: Trace, rows: pl.DataFrame) -> list[Fact]:
    placed = rows.filter(pl.col("va").is_not_null())
    if placed.is_empty():
        return []
    last = pl.col("bytes").fill_null(1).clip(1).cast(pl.UInt64) - 1
    # A size that is damaged must not lead round the end of the address space.
    room = pl.lit(_LAST, pl.UInt64) - pl.col("va")
    low, high, n_blocks = placed.select(
        low=pl.col("va").min(),
        high=(pl.col("va") + pl.min_horizontal(last, room)).max(),
        n_blocks=pl.struct("pid", block=pl.col("va") // VA_BLOCK_BYTES).n_unique(),
    ).row(0)
    kind = kind_of(trace, "derived")
    return [
        ["lowest address", str(format_address(low)), kind],
        ["highest address", str(format_address(high)), kind],
        ["VA blocks", format_count(n_blocks), kind],
    ]


def kernel_panel(trace: Trace, kernel: Mapping[str, Any], rows: pl.DataFrame) -> Panel:
    """Describe a kernel and what faulted and moved while it ran.

    Parameters
    ----------
    trace : Trace
        The trace.
    kernel : mapping
        Its row of the table of kernels.
    rows : DataFrame
        Rows of its process and GPU that start while it runs.

    Returns
    -------
    dict
        ``title``, ``what``, ``facts``.
    """
    kind = kind_of(trace)
    called = kernel["demangled"] or kernel["name"] or "(no name)"
    found = [["kernel", shortened(called, _NAMED), kind]]
    for label, shape in (("grid", kernel["grid"]), ("thread block", kernel["block"])):
        if shape is not None and None not in shape:
            found.append([label, " x ".join(map(str, shape)), kind])
    found += _owner(trace, kernel)
    if kernel["stream_id"] is not None:
        found.append(["stream", str(kernel["stream_id"]), kind])
    found += when(trace, kernel["start_ns"], kernel["end_ns"])
    moved = traffic(trace, rows, _time(kernel))
    return _panel("kernel", kernel["name"] or called, [*found, *moved])


def range_panel(trace: Trace, found_range: Mapping[str, Any], rows: pl.DataFrame) -> Panel:
    """Describe an NVTX range and what faulted and moved while it was open.

    Parameters
    ----------
    trace : Trace
        The trace.
    found_range : mapping
        Its row of the table of ranges.
    rows : DataFrame
        Rows of its process that start while it is open.

    Returns
    -------
    dict
        ``title``, ``what``, ``facts``.
    """
    kind = kind_of(trace)
    name = found_range["name"] or "(no name)"
    found = [
        ["NVTX range", shortened(name, _NAMED), kind],
        ["domain", shortened(found_range["domain"] or "default"), kind],
        ["process", str(found_range["pid"]), kind],
        ["thread", str(found_range["tid"]), kind],
        *when(trace, found_range["start_ns"], found_range["end_ns"]),
    ]
    if found_range["closed"] is False:
        found.append(["end", "the program never closed it: the end of the trace", kind])
    return _panel("nvtx", name, [*found, *traffic(trace, rows, _time(found_range))])


def batch_panel(trace: Trace, batch: Mapping[str, Any], rows: pl.DataFrame) -> Panel:
    """Describe a driver batch: its fault row, and what moved until its end.

    Parameters
    ----------
    trace : Trace
        The trace.
    batch : mapping
        ``start_ns``, ``end_ns``, ``pid``, ``device_id`` and, where known, ``va``, ``access``,
        ``n_page_faults``, ``kind`` and figures of the analysis `batches`.
    rows : DataFrame
        Rows of its process and GPU that start in its time.

    Returns
    -------
    dict
        ``title``, ``what``, ``facts``.
    """
    kind = str(batch.get("kind") or "recorded")
    found = [*_owner(trace, batch), *when(trace, batch["start_ns"], batch["end_ns"], kind)]
    if batch.get("va") is not None:
        found.append(["lowest faulted page", str(format_address(batch["va"])), kind_of(trace)])
    if batch.get("n_page_faults") is not None:
        text = counted(batch["n_page_faults"], "fault")
        found.append(["counted on that page", text, kind_of(trace)])
    if batch.get("access") is not None:
        found.append(["access", safe(batch["access"]), kind_of(trace)])
    return _panel("batch", "Driver batch", [*found, *traffic(trace, rows, _time(batch))])


def cluster_panel(trace: Trace, cluster: Mapping[str, Any], rows: pl.DataFrame) -> Panel:
    """Describe a cluster or episode of faults.

    Parameters
    ----------
    trace : Trace
        The trace.
    cluster : mapping
        Its row of `fault_clusters` or `fault_episodes`.
    rows : DataFrame
        Rows in its time and addresses.

    Returns
    -------
    dict
        ``title``, ``what``, ``facts``.
    """
    made = kind_of(trace, "reconstructed")
    found = [*_owner(trace, cluster)]
    found += when(trace, cluster["start_ns"], cluster["end_ns"], "reconstructed")
    size = cluster.get("bytes")
    found.append(["faults brought in", format_bytes(size), made])
    pages = cluster.get("n_pages", cluster.get("n_faulted_pages"))
    found.append(["faulted pages", format_count(pages), made])
    if cluster.get("pattern"):
        found.append(["pattern", safe(cluster["pattern"]).replace("_", " "), made])
    if cluster.get("stride_bytes") is not None:
        found.append(["stride", format_bytes(cluster["stride_bytes"]), made])
    if cluster.get("kernel"):
        found.append(["main kernel", shortened(cluster["kernel"], _NAMED), made])
    title = "Fault cluster" if "cluster_id" in cluster else "Fault episode"
    number = cluster.get("cluster_id", cluster.get("episode_id"))
    moved = traffic(trace, rows, _time(cluster))
    return _panel("cluster", f"{title} {number}", [*found, *moved])


def box_panel(
    trace: Trace,
    window: tuple[int, int],
    places: Sequence[tuple[int, int]],
    held: Iterable[str],
    rows: pl.DataFrame,
) -> Panel:
    """Describe a box of the map.

    Parameters
    ----------
    trace : Trace
        The trace.
    window : (int, int)
        Its time, ns from the session start.
    places : sequence of (int, int)
        First address and first behind, for each run of addresses in it; empty: all addresses.
    held : iterable of str
        Labels of the allocations in it.
    rows : DataFrame
        Rows in it.

    Returns
    -------
    dict
        ``title``, ``what``, ``facts``.
    """
    found = when(trace, *window)
    for start, end in places[:4]:
        # The end is exclusive, and at the top of the address space it is no address.
        text = f"{format_address(start)} to {format_address(end - 1)} (last byte)"
        found.append(["addresses", text, ""])
    if len(places) > 4:
        found.append(["addresses", f"and {len(places) - 4} more runs", ""])
    labels = list(held)
    found += [["allocation", label, kind_of(trace)] for label in labels[:4]]
    if len(labels) > 4:
        found.append(["allocations", f"and {len(labels) - 4} more", kind_of(trace)])
    return _panel("box", "Selected box", [*found, *traffic(trace, rows, window)])


def _time(thing: Mapping[str, Any]) -> tuple[int, int]:
    return thing["start_ns"], thing["end_ns"]


def _owner(trace: Trace, thing: Mapping[str, Any]) -> list[Fact]:
    found = []
    if thing.get("pid") is not None:
        found.append(["process", str(thing["pid"]), kind_of(trace)])
    if thing.get("device_id") is not None:
        found.append(["GPU", str(thing["device_id"]), kind_of(trace)])
    return found


def _panel(what: str, title: str, found: Sequence[Fact]) -> Panel:
    return {
        "title": shortened(title, _NAMED),
        "what": what,
        "facts": [list(each) for each in found],
    }
