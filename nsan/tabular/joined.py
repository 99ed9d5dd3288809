"""A trace joined with a memory snapshot, for people: whose bytes moved, and what the allocator did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from nsan.tabular.text import Field, Row, dash
from nsan.tabular.totals import share
from nsan.units import counted, format_bytes, format_count, format_time

_STATES: Final = {
    ("live", False): "live tensors",
    ("pending", False): "freed, other streams not done",
    ("live", None): "live, their age unknown",
    ("live", True): "stale: older than the tensor",
    ("cached", True): "cached: of no tensor any more",
    ("unused", True): "unused: never of a tensor",
    ("outside", False): "not the allocator's",
    ("unknown", None): "unknown: see below",
}
"""What bytes were, by state and whether they were dead; in the order of the table."""

STATE_FIELDS: Final = (
    Field("what", "Bytes of", str, right=False),
    Field("in_coherence", "In by faults", format_bytes),
    Field("in_prefetch", "In by prefetcher", format_bytes),
    Field("in_other", "In otherwise", format_bytes),
    Field("out_eviction", "Evicted", format_bytes),
    Field("out_other", "Out otherwise", format_bytes),
    Field("fraction", "Of all", share),
)
"""Columns of traffic by state."""

LINE_FIELDS: Final = (
    Field("function", "Function", dash, right=False),
    Field("source", "Source", dash, right=False),
    Field("n_tensors", "Tensors", format_count),
    Field("block_bytes", "Bytes", format_bytes),
    Field("n_fault_rows", "Fault rows", format_count),
    Field("in_bytes", "In", format_bytes),
    Field("out_bytes", "Out", format_bytes),
    Field("dead_bytes", "Dead", format_bytes),
)
"""Columns of traffic by line of the program."""


def clock_in_words(clocks: Iterable[Row]) -> str:
    """Say what the alignment of two clocks stands on, and what it leaves over.

    Parameters
    ----------
    clocks : iterable of mapping
        Rows of ``clock_alignment``.

    Returns
    -------
    str
        A sentence.
    """
    used = next((row for row in clocks if row["is_used"]), None)
    if used is None:
        return "No clock of the snapshot was needed."
    by = {
        "segments": "segments that both know",
        "annotations": "annotated ranges",
        "mark": "NVTX marks",
        "session_start": "moments",
    }[used["method"]]
    if used["residual_max_ns"] is None:
        return (
            "Clocks aligned by the start of the session alone: nothing tells how far they disagree."
        )
    return (
        f"Clocks aligned by {format_count(used['n_pairs'])} {by}: at most "
        f"{format_time(round(used['residual_max_ns']))} left over (rms "
        f"{format_time(round(used['residual_rms_ns']))}), drift {1e6 * used['drift']:.1f} ppm."
    )


def state_rows(states: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Put directions and causes beside each other, by what the bytes were of.

    Parameters
    ----------
    states : iterable of mapping
        Rows of ``state_traffic``.

    Yields
    ------
    dict
        With the keys of :data:`STATE_FIELDS`; the last row is the sum.
    """
    sums = {what: dict.fromkeys(_COLUMNS, 0) for what in (*_STATES.values(), "all")}
    for row in states:
        way = "out" if row["direction"] == "dtoh" else "in"
        column = f"{way}_{row['cause']}"
        column = column if column in _COLUMNS else f"{way}_other"
        for what in (_STATES[row["state"], row["is_dead"]], "all"):
            sums[what][column] += row["bytes"]
    whole = sum(sums["all"].values())
    for what, columns in sums.items():
        if moved := sum(columns.values()):
            yield {"what": what, **columns, "fraction": moved / whole}


_COLUMNS: Final = ("in_coherence", "in_prefetch", "in_other", "out_eviction", "out_other")


def line_row(row: Row) -> dict[str, Any]:
    """Put together what names a line of the program, and what was dead of its memory.

    Parameters
    ----------
    row : mapping
        Of ``line_traffic``.

    Returns
    -------
    dict
        With the keys of :data:`LINE_FIELDS`.
    """
    line = row["source_line"]
    source = row["source_file"] if not line else f"{row['source_file']}:{line}"
    function = row["function"]
    if function is None:
        function = "(of no tensor)" if row["part"] is None else "(no Python line)"
    dead = row["dead_in_bytes"] + row["dead_out_bytes"]
    return {**row, "source": source, "function": function, "dead_bytes": dead}


def effect_in_words(
    effect: Row, allocator: str, *, avoided: str = "reconstructed"
) -> Iterator[str]:
    """Say in sentences what the allocator did to the driver.

    Parameters
    ----------
    effect : mapping
        A row of ``pca_effect``.
    allocator : str
        Which allocator the model ran with, if it wrote the snapshot.
    avoided : str, default "reconstructed"
        Of which kind the count of first touches is that reuse saved; "" where that is said elsewhere.

    Yields
    ------
    str
        Sentences: dead traffic, what is not known, reuse, neighbours in VA blocks.
    """
    dead = effect["dead_in_bytes"] + effect["dead_out_bytes"]
    copied = format_time(effect["dead_in_ns"] + effect["dead_out_ns"])
    if dead:
        yield (
            f"Dead traffic: {format_bytes(effect['dead_out_bytes'])} out and "
            f"{format_bytes(effect['dead_in_bytes'])} in moved that no tensor needed "
            f"({share(effect['dead_fraction'])} of all, {copied} of copying)."
        )
    elif effect["in_bytes"] + effect["out_bytes"]:
        yield "Dead traffic: none."
    yield from _doubts(effect)
    if effect["n_tensors"]:
        yield _reuse(effect, allocator, avoided)
    else:
        yield "The history has no tensor of this GPU and process."
    if effect["most_tensors_per_va_block"] is not None:
        yield (
            f"Packing: {effect['mean_tensors_per_va_block']:.2f} tensors of a segment in a VA block of "
            f"2 MiB where it moved, at most {format_count(effect['most_tensors_per_va_block'])}; "
            f"{format_bytes(effect['neighbour_in_bytes'])} in and "
            f"{format_bytes(effect['neighbour_out_bytes'])} out moved beside others."
        )


def _doubts(effect: Row) -> Iterator[str]:
    """Say of how much of the traffic the history does not tell, or not for certain, what it was of."""
    if unknown := effect["unknown_bytes"]:
        yield (
            f"Of {format_bytes(unknown)} the state is unknown: they moved when the history had not begun or "
            "was over, or their rows lack a place; all else here is without them."
        )
    if overlapping := effect["overlap_bytes"]:
        yield (
            f"{format_bytes(overlapping)} moved while several kernels ran, and count for the one that began "
            "last."
        )
    if late := effect["host_order_bytes"]:
        yield (
            f"{format_bytes(late)} are placed by their time, as no kernel with its API call is known for "
            "them: of work that waits in a stream this can be wrong."
        )


def _reuse(effect: Row, allocator: str, kind: str) -> str:
    """Say how much memory served again, and what that saved."""
    reused, whole = effect["reused_bytes"], effect["tensor_bytes"]
    said = (
        f"Reuse: {format_bytes(reused)} of {format_bytes(whole)} for "
        f"{format_count(effect['n_tensors'])} tensors was memory that another had held"
    )
    if effect["n_managed_allocs"] is not None:
        said += f"; the driver made {format_count(effect['n_managed_allocs'])} allocations"
    if effect["n_fault_rows"] is None:
        return f"{said}. Fault rows were not recorded."
    said += f"; {format_count(effect['n_fault_rows'])} fault rows"
    if effect["n_first_touch"] is None:
        return f"{said}."
    said += f", {format_count(effect['n_first_touch'])} of which copied nothing (first touch, or mapped remotely)"
    avoided = effect["n_first_touch_avoided"]
    if "release" in allocator:
        return f"{said}. The model discards what is freed, so none of it saved a first touch."
    if not avoided:
        return f"{said}."
    error = effect["n_first_touch_avoided_error"]
    about = "" if error is None else f" (+- {format_count(round(error))})"
    of_kind = f", {kind}" if kind else ""
    return f"{said}; reuse saved about {counted(avoided, 'first touch', 'first touches')}{about}{of_kind}."
