"""Section "allocator" of a report: PyTorch's caching allocator, and what it did to the driver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.catalog import find
from nsan.errors import NsanError, OverBudgetError
from nsan.report.blocks import Block, Heading, Point, Points, Text
from nsan.report.sections.saying import Said, gpu_word, paragraph, shown, table_of, worst
from nsan.report.shown import Blocks
from nsan.report.tables import more_rows
from nsan.tabular.joined import (
    LINE_FIELDS,
    STATE_FIELDS,
    clock_in_words,
    effect_in_words,
    line_row,
    state_rows,
)
from nsan.tabular.totals import share
from nsan.units import counted, format_bytes, format_count

if TYPE_CHECKING:
    from nsan.report.report import Report

_HOW: Final = (
    "No memory snapshot of PyTorch was given, so nothing is known of its caching allocator (PCA). If the program "
    "uses PyTorch, call `torch.cuda.memory._record_memory_history()` before the first allocation and "
    "`torch.cuda.memory._dump_snapshot('snapshot.pickle')` at the end, and write the report with "
    "`nsan report TRACE --snapshot snapshot.pickle`."
)
_SETTINGS: Final = (
    "setting",
    "peak_reserved_bytes",
    "difference_bytes",
    "difference_fraction",
    "utilization_fraction",
    "n_segments_made",
    "out_of_memory",
)
_HELD: Final = (
    "va",
    "bytes",
    "live_bytes",
    "cached_bytes",
    "n_tensors",
    "function",
    "source_file",
    "source_line",
)
_TENSORS: Final = (
    "function",
    "annotation",
    "block_bytes",
    "n_fault_rows",
    "in_bytes",
    "evicted_bytes",
    "dead_in_bytes",
    "dead_out_bytes",
    "refetch_ratio",
)
_FEW: Final = 5


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    try:
        snapshot = report.snapshot
    except NsanError as error:
        return Blocks(
            [
                Text(
                    f"The memory snapshot cannot be read: {_without_folder(report, error)}",
                    "warning",
                )
            ]
        )
    if snapshot is None:
        return Blocks([Text(_HOW, "missing")])
    return _allocated(report) + report.part(lambda: _moved(report))


def _without_folder(report: Report, error: NsanError) -> str:
    """Write an error on one line, with the name of the file and not its place."""
    text, place = " ".join(str(error).split()), report.snapshot_path
    return text if place is None else text.replace(str(place), place.name)


# What the allocator held ----------------------------------------------------------------------------


def _allocated(report: Report) -> Blocks:
    """Write what the allocator held, how well it used that, and what would help."""
    use = report.frame("allocator_utilization")
    if use.is_empty():
        return Blocks([Text("The snapshot has neither a segment nor a history.", "note")])
    history = use["utilization_fraction"].null_count() < use.height
    return (
        Blocks([paragraph([*_used(report, use), *_stitched(report), *_without_cache(report)])])
        + (report.chart("allocator_over_time") if history else ())
        + report.chart("segments_at_peak")
        + _settings(report)
        + _held(report)
    )


def _used(report: Report, use: pl.DataFrame) -> Iterator[Said]:
    """Say of each GPU how much was reserved at the peak, and how well it was used."""
    kinds = report.kinds("allocator_utilization", use)
    for row in (
        use.sort("peak_reserved_bytes", "device_id", descending=[True, False]).head(2).to_dicts()
    ):
        gpu = f"On GPU {row['device_id']}" if use.height > 1 else "On the GPU"
        if row["utilization_fraction"] is None:
            yield (
                f"{gpu} the allocator held {format_bytes(row['final_reserved_bytes'])} when the snapshot was "
                f"taken, {format_bytes(row['final_active_bytes'])} of it in use; the snapshot has no history.",
                worst(kinds, ["final_reserved_bytes", "final_active_bytes"]),
            )
            continue
        yield (
            f"{gpu} the allocator reserved {format_bytes(row['peak_reserved_bytes'])} at its peak, and at most "
            f"{format_bytes(row['peak_active_bytes'])} were in use: utilization "
            f"{share(row['utilization_fraction'])}, fragmentation {share(row['fragmentation_fraction'])}.",
            worst(kinds, ["peak_reserved_bytes", "peak_active_bytes", "utilization_fraction"]),
        )


def _stitched(report: Report) -> Iterator[Said]:
    """Say what stitching free memory would have saved."""
    found = report.frame("stitching").drop_nulls("saved_bytes")
    if found.is_empty():
        return
    kind = worst(report.kinds("stitching", found), ["saved_bytes"])
    saved = int(found.filter(pl.col("saved_bytes") > 0)["saved_bytes"].sum())
    if saved:
        yield (
            f"Stitching free 2 MiB chunks (GMLake) would save {format_bytes(saved)} of that.",
            kind,
        )
    else:
        yield "Stitching free 2 MiB chunks (GMLake) would save nothing of that.", kind


def _without_cache(report: Report) -> Iterator[Said]:
    snapshot = report.snapshot
    if snapshot is not None and snapshot.info.model.get("allocator") == "raw":
        yield "The program ran without a cache: each tensor was an allocation of the driver.", ""


def _settings(report: Report) -> Blocks:
    """Show which settings of the allocator would have reserved less; a sentence where none would."""
    found = report.frame("allocator_what_if")
    tried = found.drop_nulls("difference_bytes")
    if tried.is_empty():
        return Blocks()
    better = tried.filter(pl.col("difference_bytes") < 0)
    kind = worst(report.kinds("allocator_what_if", found), ["difference_bytes"])
    n = tried["setting"].n_unique() - 1  # one is the same settings again
    if better.is_empty():
        said = f"None of {counted(n, 'other setting')} of the allocator would have reserved less at the peak."
        return Blocks([paragraph([(said, kind)])])
    first = found.filter(pl.col("difference_bytes").is_null())
    rows = pl.concat([first, better.sort("difference_bytes", "setting")])
    return report.table(
        "allocator_what_if",
        frame=rows,
        columns=shown("allocator_what_if", rows, _SETTINGS),
        title=f"Settings that would have reserved less at the peak, of {n} that were tried in a model of the allocator",
    )


def _held(report: Report) -> Blocks:
    """Show segments that few bytes keep from being returned."""
    found = report.frame("held_segments")
    if found.is_empty():
        return Blocks()
    return report.table(
        "held_segments",
        columns=shown("held_segments", found, _HELD),
        rows=_FEW,
        title="Segments that cannot be returned because of a few bytes, and whose these are",
    )


# What the driver moved of it ------------------------------------------------------------------------


def _moved(report: Report) -> Blocks:
    """Write what the driver moved of which memory, and what the cache saved and cost."""
    heading = Heading("What the driver moved of it")
    try:
        clocks = report.frame("clock_alignment")
        states = report.frame("state_traffic")
    except OverBudgetError:
        raise  # one line of the report says so
    except NsanError as error:  # not of this run, or without times
        return Blocks([heading, Text(str(error), "warning")])
    kinds = report.kinds("state_traffic", states)
    traffic = list(state_rows(states.to_dicts()))
    kind = "Figures are " + worst(kinds, ["bytes", "state"]) + "."
    blocks: list[Block] = [
        heading,
        *report.part(lambda: [*_effect(report)]),
        Text(clock_in_words(clocks.to_dicts()), "note"),
    ]
    if not traffic:
        return Blocks([*blocks, Text("Nothing was migrated.", "note")])
    return (
        Blocks(blocks)
        + report.chart("moves_by_state")
        + [table_of(traffic, STATE_FIELDS, "Of what memory the bytes were that moved", kind)]
        + _lines(report)
        + _tensors(report)
    )


def _effect(report: Report) -> Iterator[Block]:
    """Say what the cache saved the driver, and what it cost."""
    try:
        found = report.frame("pca_effect")
    except OverBudgetError:
        raise  # a part would not help, and is not why
    except NsanError:
        yield Text("What the cache saved and cost in all, only the whole capture tells.", "note")
        return
    if found.is_empty():
        return
    snapshot = report.snapshot
    allocator = str(snapshot.info.model.get("allocator")) if snapshot else ""
    kinds = report.kinds("pca_effect", found)
    kind, avoided = (
        worst(kinds, ["dead_in_bytes", "reused_bytes", "in_bytes"]),
        kinds["n_first_touch_avoided"],
    )
    moved = found.sort(
        pl.col("in_bytes") + pl.col("out_bytes"), descending=True, maintain_order=True
    )
    points = [
        Point(*_labelled(sentence, row, found), kind)
        for row in moved.head(2).to_dicts()
        for sentence in effect_in_words(row, allocator, avoided=avoided if avoided != kind else "")
    ]
    if said := [*_both_sides(found, kinds)]:
        yield paragraph(said)
    yield Points(tuple(points))


def _labelled(sentence: str, row: Mapping[str, Any], found: pl.DataFrame) -> tuple[str, str]:
    """Part a sentence from the word that it begins with, and name its GPU."""
    gpu = gpu_word(row, found)
    label, colon, text = sentence.partition(": ")
    where = f" ({gpu})" if gpu else ""
    if colon and label.replace(" ", "").isalpha():
        return f"{label}{where}:", text[0].upper() + text[1:]
    return (f"{gpu}:" if gpu else "", sentence)


def _both_sides(found: pl.DataFrame, kinds: Mapping[str, str]) -> Iterator[Said]:
    """Say what the cache saved and what it cost."""
    saved = int(found["n_first_touch_avoided"].drop_nulls().sum())
    cost = _dead(found)
    if saved:
        yield _saved(found, saved), worst(kinds, ["n_first_touch_avoided"])
    if cost:
        what = "It cost dead traffic" if saved else "Dead traffic"
        yield f"{what}: {cost}.", worst(kinds, ["dead_in_bytes", "in_bytes"])


def _saved(found: pl.DataFrame, saved: int) -> str:
    """Say how many first touches reuse saved, unless the error of that is as large."""
    error = found.select(pl.col("n_first_touch_avoided_error").pow(2).sum().sqrt()).item()
    about = f" (+- {format_count(round(error))})" if error else ""
    if error >= saved:
        return (
            f"How many first touches the cache saved cannot be told: {format_count(saved)}{about}."
        )
    return f"The cache saved about {counted(saved, 'first touch', 'first touches')}{about}."


def _dead(found: pl.DataFrame) -> str:
    """Say how much of what moved was of no use, and why: in no tensor, or older than the one there."""
    sums = found.select(pl.col(pl.Int64).sum()).row(0, named=True)
    whole = sums["in_bytes"] + sums["out_bytes"] - sums["unknown_bytes"]
    dead, stale = sums["dead_in_bytes"] + sums["dead_out_bytes"], sums["stale_in_bytes"]
    if not dead or not whole:
        return ""
    parts = {
        "lay in no tensor": dead - stale,
        "was older than the tensor that held its place": stale,
    }
    why = " and ".join(f"{share(size / whole)} {word}" for word, size in parts.items() if size)
    return f"{share(dead / whole)} of what moved was data that no tensor needed ({why})"


def _lines(report: Report) -> list[Block]:
    """Show which lines of the program the traffic is of."""
    found = report.frame("line_traffic")
    if found.is_empty():
        return []
    kind = worst(report.kinds("line_traffic", found), ["in_bytes", "out_bytes", "dead_in_bytes"])
    notes = [f"Figures are {kind}."]
    if found.height > report.rows:
        notes.insert(0, more_rows(find("line_traffic"), found.height - report.rows))
    rows = [line_row(row) for row in found.head(report.rows).to_dicts()]
    return [table_of(rows, LINE_FIELDS, "Which lines of the program it is of", *notes)]


def _tensors(report: Report) -> Blocks:
    """Show the tensors that moved most, where they are not just the lines again."""
    found = report.frame("tensor_traffic").filter(pl.col("tensor_id").is_not_null())
    if found.is_empty() or found["function"].drop_nulls().n_unique() == found.height:
        return Blocks()
    return report.table(
        "tensor_traffic",
        frame=found,
        columns=shown("tensor_traffic", found, _TENSORS),
        rows=_FEW,
        title="The tensors that fault and move most",
    )
