"""What PyTorch's caching allocator (PCA) did, from a memory snapshot, and what would help.

SNAPSHOT is what torch.cuda.memory._dump_snapshot(FILE) wrote; for more than its last state, record
before: torch.cuda.memory._record_memory_history(). Without `--by` the first answer: what is held, how
well it is used, what could be returned, what stitching free memory would save, and who holds most.

With `--snapshot FILE` the first file is a trace of the same run, and both are joined: faults and
migrations by tensor, Python line and annotation, and how much of the traffic is of memory that no
tensor holds.

Examples
--------
  nsan allocator trace.sqlite --snapshot snapshot.pickle
  nsan allocator trace.sqlite --snapshot snapshot.pickle --by line
  nsan allocator snapshot.pickle
  nsan allocator snapshot.pickle --by settings         predicted peak under other settings
  nsan allocator snapshot.pickle --by tensor --rows 50
  nsan allocator snapshot.pickle --by timeline --format parquet -o timeline.parquet
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.cli.arguments import add_filters, add_memory, add_output, add_verbosity
from nsan.cli.output import write_document
from nsan.cli.results import (
    add_analysis_options,
    add_by,
    add_snapshot,
    plain_rows,
    refuse_analysis_options,
    refuse_filters,
    run_named,
)
from nsan.errors import UsageError
from nsan.info import MODEL_KIND, MODELLED
from nsan.tabular.text import Field, Row, dash, name, table
from nsan.tabular.totals import share
from nsan.text import safe
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

BY_JOINED: Final = {
    "tensor": "tensor_traffic",
    "line": "line_traffic",
    "annotation": "annotation_traffic",
    "state": "state_traffic",
    "va-block": "va_block_sharing",
    "step": "step_ledger",
    "effect": "pca_effect",
    "migration": "migrated_parts",
    "fault": "placed_faults",
    "life": "tensors_in_time",
    "clock": "clock_alignment",
}
"""The same of a trace joined with a snapshot."""

_PARTS: Final = {
    "state": "allocator_state",
    "utilization": "allocator_utilization",
    "replay": "replay_check",
    "stitching": "stitching",
    "frames": "allocator_frames",
    "ooms": "allocator_ooms",
}
"""What the summary is made of: analysis by key of its document."""

_MOST_ROWS: Final = 8
_MOST_GPUS: Final = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "trace",
        metavar="SNAPSHOT|TRACE",
        type=Path,
        help="memory snapshot of PyTorch (.pickle); with --snapshot a trace",
    )
    add_snapshot(parser)
    add_verbosity(parser)
    add_memory(parser)
    add_by(parser, {"summary": "", **BY, **BY_JOINED}, "summary")
    add_analysis_options(parser)
    add_filters(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    choices = BY if args.snapshot is None else BY_JOINED
    if args.by != "summary":
        return run_named(args, _chosen(args, choices))
    refuse_analysis_options(args)
    if args.snapshot is not None:
        from nsan.cli.joined import summarise

        return summarise(args)
    from nsan.opening import open_snapshot

    refuse_filters(args)

    snapshot = open_snapshot(args.trace)
    found = _document(snapshot)
    write_document(args, found, lambda: _text(found, markdown=args.format == "markdown"))
    return 0


def _chosen(args: argparse.Namespace, choices: Mapping[str, str]) -> str:
    """Give the analysis of a choice, or say with which input it goes."""
    if args.by not in choices:
        other = "with --snapshot, of a trace" if args.snapshot is None else "without --snapshot"
        msg = f"--by {args.by} goes {other}. Here there are: {', '.join(choices)}."
        raise UsageError(msg)
    return choices[args.by]


def _document(snapshot: Snapshot) -> dict[str, Any]:
    from nsan.analysing import kinds_of, run_analysis
    from nsan.analysis.catalog import find
    from nsan.contract import SCHEMA
    from nsan.torch_alloc.file_settings import odd_settings

    values = snapshot.allocator_settings.select("name", "value").collect()
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "source_kind": snapshot.info.kind,
        **{key: value for key, value in snapshot.info.to_dict().items() if key != "kind"},
        "odd_settings": odd_settings(dict(values.iter_rows())),
        "kinds": {},
    }
    for part, analysis_name in _PARTS.items():
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
_UNKNOWN: Final = dict.fromkeys(field.key for field in _LEVEL_FIELDS)
_NOTHING: Final[dict[str, Any]] = {
    **dict.fromkeys((field.key for field in _LEVEL_FIELDS), 0),
    "largest_cached_bytes": None,
    "external_fraction": None,
    "utilization_fraction": None,
    "n_free_segments": 0,
    "n_va_blocks": 0,
}
"""The state of a GPU that has given everything back."""

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
    gpus = _gpus(document)
    for gpu in gpus[:_MOST_GPUS]:
        parts += _gpu(document, gpu, markdown=markdown)
    if len(gpus) > _MOST_GPUS:
        parts.append(f"({len(gpus) - _MOST_GPUS} more GPUs: --json)")
    if not gpus:
        parts.append("It holds no segment: nothing was allocated, or not by this allocator.")
    return "\n\n".join(parts) + "\n"


def _gpus(document: Mapping[str, Any]) -> list[Any]:
    """List the GPUs that have a segment or a history."""
    return sorted({row["device_id"] for part in ("state", "utilization") for row in document[part]})


def _head(document: Mapping[str, Any], *, markdown: bool) -> Iterator[str]:
    """Say what the file is, and what of it does not fit together."""
    source = name(document["source"], markdown=markdown)
    if document["source_kind"] == MODEL_KIND:
        made = document["model"]
        about = (
            f"{made.get('network') or 'a program'}, {made.get('allocator') or 'caching'} allocator"
        )
        what = f"history of an allocator ({about}), {MODELLED}"
    else:
        what = f"memory snapshot of PyTorch {document['torch_versions']}"
    yield f"{'# ' * markdown}{source}: {what}"
    if remarks := list(_remarks(document)):
        yield "\n".join(f"{'- ' * markdown}{line}" for line in remarks)


def _remarks(document: Mapping[str, Any]) -> Iterator[str]:
    """Say what was odd in the file."""
    for warning in document["warnings"]:
        yield f"Note: {safe(warning)}"
    odd = sum(document["odd_cells"].values())
    if odd:
        cells = _few(document["odd_cells"])
        yield f"Note: {format_count(odd)} values could not be used ({cells}); they count as unknown."
    if document["odd_settings"]:
        yield (
            f"Note: settings of odd values count as PyTorch's default ({_few(document['odd_settings'])})."
        )
    for what in ("keys", "actions"):
        if found := document[f"unknown_{what}"]:
            yield f"Note: {what} that nsan does not know were left out ({_few(found)})."


def _few(names: Iterable[str], most: int = 4) -> str:
    known = [safe(each) for each in names]
    rest = f" and {len(known) - most} others" if len(known) > most else ""
    return ", ".join(known[:most]) + rest


def _gpu(document: Mapping[str, Any], gpu: int, *, markdown: bool) -> Iterator[str]:
    """Write what is known of one GPU, a paragraph each."""
    state = _of(document, "state", gpu)
    (use,), (replay,) = _of(document, "utilization", gpu), _of(document, "replay", gpu)
    stitched = next(iter(_of(document, "stitching", gpu)), None)
    now = state[0] if state else {**_NOTHING, "device_id": gpu}
    yield f"{'## ' * markdown}GPU {gpu}: {_history(document, replay, use)}"
    yield table(_levels(now, use), _LEVEL_FIELDS, markdown=markdown)
    if len(state) > 2:  # one pool alone is the row of all
        yield table(state[1:], _POOL_FIELDS, markdown=markdown)
    bullet = "- " * markdown
    yield "\n".join(f"{bullet}{line}" for line in _findings(now, use, replay, stitched))
    ooms = _of(document, "ooms", gpu)
    if ooms:
        yield table(ooms[:_MOST_ROWS], _OOM_FIELDS, markdown=markdown)
    if len(ooms) > _MOST_ROWS:
        yield f"({len(ooms) - _MOST_ROWS} more: --by oom)"
    if frames := _of(document, "frames", gpu):
        over_time = " for the longest time" if use["utilization_fraction"] is not None else ""
        yield f"{'### ' * markdown}Who held most memory{over_time}"
        of_history = {"peak_bytes", "end_bytes"}
        fields = [field for field in _FRAME_FIELDS if over_time or field.key not in of_history]
        yield table([_framed(row) for row in frames[:_MOST_ROWS]], fields, markdown=markdown)


def _of(document: Mapping[str, Any], part: str, gpu: int) -> list[Row]:
    return [row for row in document[part] if row["device_id"] == gpu]


def _history(document: Mapping[str, Any], replay: Row, use: Row) -> str:
    """Say what of the history is there, and how well its replay agrees."""
    if use["utilization_fraction"] is None:
        return "no history, only the last state"
    about = next(d for d in document["devices"] if d["device_id"] == use["device_id"])
    whole = "whole history" if about["history"] == "complete" else "part of a history"
    said = [f"{whole}, {format_count(replay['n_entries'])} entries"]
    if about["missing_actions"]:
        said.append(f"no {' or '.join(map(safe, about['missing_actions']))} entries")
    if about["suspect_overflow"]:
        said.append("a round number: older ones may have been dropped")
    said.append(
        f"{format_count(replay['n_addresses_exact'])} of {format_count(replay['n_allocs'])} addresses "
        f"and {format_count(replay['n_segments_exact'])} of "
        f"{format_count(replay['n_segments_made'])} new segments as replayed"
    )
    return "; ".join(said)


def _levels(now: Row, use: Row) -> list[Row]:
    """List the levels now, and at the peaks of reserved and of active memory."""
    levels: list[Row] = [{**now, "when": "now"}]
    used, reserved = use["utilization_at_peak_fraction"], use["peak_reserved_bytes"]
    if used is not None:
        active = round(used * reserved)
        levels.append(
            {
                **_UNKNOWN,
                "when": "at peak reserved",
                "reserved_bytes": reserved,
                "active_bytes": active,
                "cached_bytes": reserved - active,
                "largest_cached_bytes": use["largest_cached_at_peak_bytes"],
                "external_fraction": use["external_at_peak_fraction"],
                "utilization_fraction": used,
            }
        )
    if use["peak_active_bytes"] is not None:
        levels.append(
            {
                **_UNKNOWN,
                "when": "at peak active",
                "active_bytes": use["peak_active_bytes"],
                "waste_bytes": use["waste_at_peak_bytes"],
            }
        )
    return levels


def _findings(now: Row, use: Row, replay: Row, stitched: Row | None) -> Iterator[str]:
    """Say in sentences what the figures mean."""
    if use["utilization_fraction"] is not None:
        yield (
            f"Utilization {share(use['utilization_fraction'])} (peak active over peak reserved), "
            f"fragmentation {share(use['fragmentation_fraction'])}; peak allocated "
            f"{format_bytes(use['peak_allocated_bytes'])}."
        )
        if replay["replay_kind"] == "reconstructed":
            yield (
                "The replay disagrees with the history "
                f"({_few(f'{format_count(n)} {what}' for n, what in _faults(replay))}): all that stands "
                "on it is reconstructed, and may be wrong."
            )
    if stitched is not None:
        yield _stitching(stitched)
    if now["n_free_segments"]:
        yield (
            f"{_counted(now['n_free_segments'], 'segment')} of {format_bytes(now['free_segment_bytes'])} "
            f"{'hold' if now['n_free_segments'] > 1 else 'holds'} no tensor: torch.cuda.empty_cache() "
            "returns what is not of a private pool in use."
        )
    if now["n_va_blocks"]:
        yield (
            f"{_counted(now['n_va_blocks'], 'VA block')} of 2 MiB "
            f"{'hold' if now['n_va_blocks'] > 1 else 'holds'} tensors, "
            f"{format_count(now['n_shared_va_blocks'])} of them two or more: under Unified Memory these "
            "move together."
        )


def _faults(replay: Row) -> list[tuple[int, str]]:
    counts = (
        (replay["n_allocs"] - replay["n_addresses_exact"], "other addresses"),
        (replay["n_segments_made"] - replay["n_segments_exact"], "other segments"),
        (replay["n_final_blocks"] - replay["n_final_blocks_exact"], "other final blocks"),
        (replay["n_skipped"], "entries skipped"),
        (replay["n_forced_frees"], "frees missing"),
        (replay["n_contradictions"], "contradictions"),
    )
    return [(n, what) for n, what in counts if n]


def _counted(n: int, thing: str) -> str:
    return f"{format_count(n)} {thing}{'s' * (n != 1)}"


def _stitching(stitched: Row) -> str:
    """Say what stitching would have saved; of a state alone, what it could join now."""
    saved = stitched["saved_bytes"]
    if saved is None:
        if not stitched["largest_stitched_bytes"]:
            return "Stitching (GMLake) finds no free 2 MiB chunk to join."
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
