"""What PyTorch's caching allocator (PCA) did, from a memory snapshot, and what would help.

SNAPSHOT is what torch.cuda.memory._dump_snapshot(FILE) wrote; for more than its last state, record
before: torch.cuda.memory._record_memory_history(). Without `--by` the first answer: what is held, how
well it is used, what could be returned, what stitching free memory would save, and who holds most.

Examples
--------
  nsan allocator snapshot.pickle
  nsan allocator snapshot.pickle --by settings         predicted peak under other settings
  nsan allocator snapshot.pickle --by tensor --rows 50
  nsan allocator snapshot.pickle --by timeline --format parquet -o timeline.parquet
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.cli.arguments import add_output, add_verbosity
from nsan.cli.output import write_document
from nsan.cli.render import Field, Row, dash, name, table
from nsan.cli.results import (
    add_analysis_options,
    add_by,
    plain_rows,
    refuse_analysis_options,
    run_named,
)
from nsan.cli.tables import share
from nsan.info import MODEL_KIND, MODELLED
from nsan.units import format_bytes, format_count, format_time

if TYPE_CHECKING:
    from nsan.snapshot import Snapshot

BY: Final = {
    "pool": "allocator_state",
    "utilization": "allocator_utilization",
    "timeline": "allocator_timeline",
    "segment": "allocator_segments",
    "held": "held_segments",
    "va-block": "shared_va_blocks",
    "tensor": "allocator_tensors",
    "frame": "allocator_frames",
    "oom": "allocator_ooms",
    "stitching": "stitching",
    "settings": "allocator_what_if",
    "replay": "replay_check",
}
"""Analysis by choice of ``--by``; without a choice a summary of several."""

_PARTS: Final = ("state", "utilization", "replay", "stitching", "frames", "ooms")
_ANALYSES: Final = dict(
    zip(
        _PARTS,
        (
            "allocator_state",
            "allocator_utilization",
            "replay_check",
            "stitching",
            "allocator_frames",
            "allocator_ooms",
        ),
        strict=True,
    )
)
_MOST_FRAMES: Final = 8
ALL_POOLS: Final = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "trace", metavar="SNAPSHOT", type=Path, help="memory snapshot of PyTorch (.pickle)"
    )
    add_verbosity(parser)
    add_by(parser, {"summary": "", **BY}, "summary")
    add_analysis_options(parser)
    add_output(parser)
    parser.set_defaults(filter_time=None, filter_nvtx=None, gpu=None, pid=None)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.by != "summary":
        return run_named(args, BY[args.by])
    refuse_analysis_options(args)
    from nsan.opening import open_snapshot

    snapshot = open_snapshot(args.trace)
    found = _document(snapshot)
    write_document(args, found, lambda: _text(found, markdown=args.format == "markdown"))
    return 0


def _document(snapshot: Snapshot) -> dict[str, Any]:
    from nsan.analysing import kinds_of, run_analysis
    from nsan.analysis.catalog import find
    from nsan.contract import SCHEMA

    document: dict[str, Any] = {"schema": SCHEMA, **snapshot.info.to_dict(), "kinds": {}}
    for part, analysis_name in _ANALYSES.items():
        analysis = find(analysis_name)
        rows = run_analysis(snapshot, analysis).collect()
        document[part] = plain_rows(analysis, rows)
        document["kinds"][part] = kinds_of(snapshot, analysis, rows)
    return document


_LEVEL_FIELDS: Final = (
    Field("when", "", str, right=False),
    Field("reserved_bytes", "Reserved", format_bytes),
    Field("active_bytes", "Active", format_bytes),
    Field("allocated_bytes", "Allocated", format_bytes),
    Field("waste_bytes", "Not asked for", format_bytes),
    Field("cached_bytes", "Cached", format_bytes),
    Field("largest_cached_bytes", "Largest free", format_bytes),
    Field("external_fraction", "Scattered", share),
    Field("utilization_fraction", "Used", share),
)
_POOL_FIELDS: Final = (
    Field("pool", "Pool", dash, right=False),
    Field("n_segments", "Segments", format_count),
    Field("reserved_bytes", "Reserved", format_bytes),
    Field("active_bytes", "Active", format_bytes),
    Field("pending_bytes", "Free pending", format_bytes),
    Field("cached_bytes", "Cached", format_bytes),
    Field("largest_cached_bytes", "Largest free", format_bytes),
    Field("utilization_fraction", "Used", share),
)
_OOM_FIELDS: Final = (
    Field("time_ns", "Out of memory at", format_time),
    Field("request_bytes", "Request", format_bytes),
    Field("verdict", "Reason", dash, right=False),
    Field("reserved_bytes", "Reserved", format_bytes),
    Field("cached_bytes", "Cached", format_bytes),
    Field("fitting_bytes", "Cached for it", format_bytes),
    Field("largest_fitting_bytes", "Largest of it", format_bytes),
    Field("device_free_bytes", "Free on the GPU", format_bytes),
)
_FRAME_FIELDS: Final = (
    Field("function", "Function", dash, right=False),
    Field("source", "Source", dash, right=False),
    Field("n_tensors", "Tensors", format_count),
    Field("block_bytes", "Bytes", format_bytes),
    Field("peak_bytes", "At the peak", format_bytes),
    Field("end_bytes", "Held at the end", format_bytes),
)


def _text(document: Mapping[str, Any], *, markdown: bool) -> str:
    """Write the summary for people."""
    parts = list(_head(document, markdown=markdown))
    for state in document["state"]:
        if state["pool"] == ALL_POOLS:
            parts += _device(document, state, markdown=markdown)
    if not document["state"]:
        parts.append("It holds no segment: nothing was allocated, or not by this allocator.")
    return "\n\n".join(parts) + "\n"


def _head(document: Mapping[str, Any], *, markdown: bool) -> Iterator[str]:
    """Say what the file is."""
    made = f", {MODELLED}" if document["kind"] == MODEL_KIND else ""
    source = name(document["source"], markdown=markdown)
    version = document["torch_versions"]
    yield f"{'# ' * markdown}{source}: memory snapshot of PyTorch {version}{made}"


def _device(document: Mapping[str, Any], now: Row, *, markdown: bool) -> Iterator[str]:
    """Write what is known of one GPU, a paragraph each."""
    use, replay, stitched = (
        _of(document, part, now)[0] for part in ("utilization", "replay", "stitching")
    )
    yield f"{'## ' * markdown}GPU {now['device_id']}: {_history(replay, use)}"
    yield table(_levels(now, use), _LEVEL_FIELDS, markdown=markdown)
    pools = _of(document, "state", now)[1:]
    if len(pools) > 1:
        yield table(pools, _POOL_FIELDS, markdown=markdown)
    bullet = "- " * markdown
    yield "\n".join(f"{bullet}{line}" for line in _findings(now, use, stitched))
    if ooms := _of(document, "ooms", now):
        yield table(ooms, _OOM_FIELDS, markdown=markdown)
    if frames := _of(document, "frames", now):
        yield f"{'### ' * markdown}Who held most memory for the longest time"
        yield table(
            [_framed(row) for row in frames[:_MOST_FRAMES]], _FRAME_FIELDS, markdown=markdown
        )


def _of(document: Mapping[str, Any], part: str, state: Row) -> list[Row]:
    return [row for row in document[part] if row["device_id"] == state["device_id"]]


def _history(replay: Row, use: Row) -> str:
    """Say what of the history is there, and how well its replay agrees."""
    if use["utilization_fraction"] is None:
        return "no history, only the last state"
    whole = "whole history" if replay["is_complete"] else "part of a history"
    entries = format_count(replay["n_entries"])
    agreement = (
        f"{format_count(replay['n_addresses_exact'])} of {format_count(replay['n_allocs'])} addresses "
        f"and {replay['n_segments_exact']} of {replay['n_segments_made']} new segments as replayed"
    )
    return f"{whole}, {entries} entries; {agreement}"


def _levels(now: Row, use: Row) -> list[Row]:
    levels: list[Row] = [{"when": "now", **now}]
    if use["utilization_fraction"] is not None:
        levels.append(
            {
                "when": "peaks",
                "reserved_bytes": use["peak_reserved_bytes"],
                "active_bytes": use["peak_active_bytes"],
                "allocated_bytes": use["peak_allocated_bytes"],
                "waste_bytes": use["waste_at_peak_bytes"],
                "cached_bytes": None,
                "largest_cached_bytes": use["largest_cached_at_peak_bytes"],
                "external_fraction": use["external_at_peak_fraction"],
                "utilization_fraction": use["utilization_at_peak_fraction"],
            }
        )
    return levels


def _findings(now: Row, use: Row, stitched: Row) -> Iterator[str]:
    """Say in sentences what the figures mean."""
    if use["utilization_fraction"] is not None:
        yield (
            f"Utilization {share(use['utilization_fraction'])} (peak active over peak reserved), "
            f"fragmentation {share(use['fragmentation_fraction'])}."
        )
    yield _stitching(stitched)
    if now["n_free_segments"]:
        yield (
            f"{format_count(now['n_free_segments'])} segments of "
            f"{format_bytes(now['free_segment_bytes'])} hold no tensor: torch.cuda.empty_cache() returns "
            "them, but for those of private pools in use."
        )
    yield (
        f"{format_count(now['n_va_blocks'])} VA blocks of 2 MiB hold tensors, "
        f"{format_count(now['n_shared_va_blocks'])} of them two or more: under Unified Memory these "
        "move together."
    )


def _stitching(stitched: Row) -> str:
    """Say what stitching would have saved; of a state alone, what it could join now."""
    saved = stitched["saved_bytes"]
    if saved is None:
        return (
            f"Stitching (GMLake) could join {format_bytes(stitched['largest_stitched_bytes'])} of free "
            f"2 MiB chunks for one request; the largest free block has "
            f"{format_bytes(stitched['largest_free_block_bytes'] or 0)}."
        )
    if saved <= 0:
        more = f": rounding to 2 MiB chunks would cost {format_bytes(-saved)}" * (saved < 0)
        return f"Stitching free memory (GMLake) would save nothing at the peak{more} (modelled)."
    return (
        f"Stitching free memory (GMLake) would save {format_bytes(saved)} at the peak: "
        f"{format_bytes(stitched['baseline_reserved_bytes'])} to "
        f"{format_bytes(stitched['stitched_reserved_bytes'])}, utilization "
        f"{share(stitched['stitched_utilization_fraction'])} (modelled)."
    )


def _framed(row: Row) -> dict[str, Any]:
    """Put file and line together; memory without a stack has neither."""
    line = row["source_line"]
    file = row["source_file"]
    source = None if file is None else f"{file}:{line}" if line else file
    return {**row, "function": row["function"] or f"({row['part']})", "source": source}
