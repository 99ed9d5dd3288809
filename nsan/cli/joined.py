"""The first answer of a trace joined with a memory snapshot: what of the traffic is of which tensor."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from nsan.cli.output import write_document
from nsan.cli.results import joined_sources, plain_rows
from nsan.info import MODEL_KIND, MODELLED
from nsan.tabular.text import Field, Row, dash, name, table
from nsan.tabular.totals import share
from nsan.text import safe
from nsan.units import format_bytes, format_count, format_time

if TYPE_CHECKING:
    from nsan.joined import Joined

_PARTS: Final = {
    "clocks": "clock_alignment",
    "effect": "pca_effect",
    "states": "state_traffic",
    "lines": "line_traffic",
}
"""What the summary is made of: analysis by key of its document."""

_WHOLE: Final = ("effect",)
"""Parts that only a whole capture has."""

_MOST_ROWS: Final = 8

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

_STATE_FIELDS: Final = (
    Field("what", "Bytes of", str, right=False),
    Field("in_coherence", "In by faults", format_bytes),
    Field("in_prefetch", "In by prefetcher", format_bytes),
    Field("in_other", "In otherwise", format_bytes),
    Field("out_eviction", "Evicted", format_bytes),
    Field("out_other", "Out otherwise", format_bytes),
    Field("fraction", "Of all", share),
)
_LINE_FIELDS: Final = (
    Field("function", "Function", dash, right=False),
    Field("source", "Source", dash, right=False),
    Field("n_tensors", "Tensors", format_count),
    Field("block_bytes", "Bytes", format_bytes),
    Field("n_fault_rows", "Fault rows", format_count),
    Field("in_bytes", "In", format_bytes),
    Field("out_bytes", "Out", format_bytes),
    Field("dead_bytes", "Dead", format_bytes),
)


def summarise(args: argparse.Namespace) -> int:
    """Write the summary of a trace joined with the snapshot that was named.

    Parameters
    ----------
    args : Namespace
        Trace, snapshot, filters, format and output.

    Returns
    -------
    int
        Exit status.
    """
    joined = joined_sources(args)
    found = _document(joined)
    write_document(args, found, lambda: _text(found, markdown=args.format == "markdown"))
    return 0


def _document(joined: Joined) -> dict[str, Any]:
    from nsan.analysing import kinds_of, run_analysis
    from nsan.analysis.catalog import find
    from nsan.contract import SCHEMA

    snapshot = joined.snapshot
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "source": joined.info.source,
        "source_kind": joined.info.kind,
        "snapshot": None if snapshot is None else snapshot.info.source,
        "model": {} if snapshot is None else snapshot.info.model,
        "windows_ns": joined.trace.windows,
        "kinds": {},
    }
    for part, analysis_name in _PARTS.items():
        if part in _WHOLE and joined.trace.is_filtered:
            document[part] = None  # not none: only a whole capture has it
            continue
        analysis = find(analysis_name)
        rows = run_analysis(joined, analysis).collect()
        document[part] = plain_rows(analysis, rows)
        document["kinds"][part] = kinds_of(joined, analysis, rows)
    return document


def _text(document: Mapping[str, Any], *, markdown: bool) -> str:
    heading = "# " * markdown
    parts = [f"{heading}{_title(document, markdown=markdown)}", _clock(document)]
    if document["effect"] is None:
        parts.append(
            "Filtered: migrations that start in the part that was asked for. What the allocator did in all "
            "only the whole capture tells."
        )
    rows = document["states"] + (document["effect"] or [])
    gpus = sorted({(row["pid"], row["device_id"]) for row in rows}, key=str)
    for gpu in gpus:
        parts += _gpu(document, gpu, markdown=markdown)
    if not gpus:
        parts.append("Nothing was migrated.")
    return "\n\n".join(parts) + "\n"


def _title(document: Mapping[str, Any], *, markdown: bool) -> str:
    trace, snapshot = (name(document[key], markdown=markdown) for key in ("source", "snapshot"))
    made = document["model"]
    about = f", {made.get('network')} with the {made.get('allocator')} allocator" if made else ""
    modelled = f", {MODELLED}" * (document["source_kind"] == MODEL_KIND)
    return f"{trace} joined with {snapshot}{safe(about)}{modelled}"


def _clock(document: Mapping[str, Any]) -> str:
    """Say what the alignment stands on, and what it leaves over."""
    used = next((row for row in document["clocks"] if row["is_used"]), None)
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


def _gpu(document: Mapping[str, Any], gpu: tuple[Any, Any], *, markdown: bool) -> Iterator[str]:
    """Write what is known of one GPU of a process, a paragraph each."""

    def of(part: str) -> list[Row]:
        rows = document[part] or []
        return [row for row in rows if (row["pid"], row["device_id"]) == gpu]

    many = len({row["pid"] for row in document["states"]}) > 1
    yield f"{'## ' * markdown}GPU {dash(gpu[1])}{f' of process {dash(gpu[0])}' * many}"
    if rows := list(_state_rows(of("states"))):
        fields = [f for f in _STATE_FIELDS if any(row[f.key] for row in rows)]
        yield table(rows, fields, markdown=markdown)
    for effect in of("effect"):
        said = _findings(effect, str(document["model"].get("allocator")))
        yield "\n".join(f"{'- ' * markdown}{line}" for line in said)
    if lines := of("lines"):
        yield f"{'### ' * markdown}Which lines of the program the traffic is of"
        rows = [_line(row) for row in lines[:_MOST_ROWS]]
        yield table(rows, _LINE_FIELDS, markdown=markdown)
        if len(lines) > _MOST_ROWS:
            yield f"({len(lines) - _MOST_ROWS} more: --by line)"


def _state_rows(states: list[Row]) -> Iterator[dict[str, Any]]:
    """Put directions and causes beside each other; the last row is the sum."""
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


def _line(row: Row) -> dict[str, Any]:
    line = row["source_line"]
    source = row["source_file"] if not line else f"{row['source_file']}:{line}"
    function = row["function"]
    if function is None:
        function = "(of no tensor)" if row["part"] is None else "(no Python line)"
    dead = row["dead_in_bytes"] + row["dead_out_bytes"]
    return {**row, "source": source, "function": function, "dead_bytes": dead}


def _findings(effect: Row, allocator: str) -> Iterator[str]:
    """Say in sentences what the allocator did to the driver."""
    dead = effect["dead_in_bytes"] + effect["dead_out_bytes"]
    copied = format_time(effect["dead_in_ns"] + effect["dead_out_ns"])
    if dead:
        yield (
            f"Dead traffic: {format_bytes(effect['dead_out_bytes'])} out and "
            f"{format_bytes(effect['dead_in_bytes'])} in moved for no tensor "
            f"({share(effect['dead_fraction'])} of all, {copied} of copying)."
        )
    elif effect["in_bytes"] + effect["out_bytes"]:
        yield "Dead traffic: none."
    yield from _doubts(effect)
    if effect["n_tensors"]:
        yield _reuse(effect, allocator)
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


def _reuse(effect: Row, allocator: str) -> str:
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
    said += f", {format_count(effect['n_first_touch'])} first touches"
    avoided = effect["n_first_touch_avoided"]
    if "release" in allocator:
        return f"{said}. The model discards what is freed, so none of it saved a first touch."
    if not avoided:
        return f"{said}."
    error = effect["n_first_touch_avoided_error"]
    about = "" if error is None else f" (+- {format_count(round(error))})"
    return f"{said}; reuse saved about {format_count(avoided)} more{about}, reconstructed."
