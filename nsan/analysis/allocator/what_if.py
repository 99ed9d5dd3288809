"""What other settings, or another allocator, would have reserved for the same requests.

The requests of the history are run again (:mod:`nsan.torch_alloc.what_if`). Every rerun, the one under the
same settings too, places its segments itself: so settings are compared with that rerun, and how far it is
from the record is the error of the method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import polars as pl

from nsan.analysis.allocator.blocks import GPU
from nsan.analysis.allocator.replayed import REPLAY_READS, Replays, replays_of
from nsan.analysis.catalog import analysis
from nsan.analysis.result import KIND, Figure, Result, derived
from nsan.errors import UsageError
from nsan.torch_alloc.conf import parse_conf
from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.plain import PlainAllocator
from nsan.torch_alloc.replay import Replay
from nsan.torch_alloc.rounding import segment_size
from nsan.torch_alloc.settings import AllocatorSettings
from nsan.torch_alloc.stitching import StitchingAllocator
from nsan.torch_alloc.what_if import Allocator, Requests, Rerun, requests_of, rerun
from nsan.units import MIB, counted, format_bytes

AS_RECORDED: Final = "as recorded"
SAME_SETTINGS: Final = "rerun, same settings"

_SPLIT_SIZES: Final = (32, 64, 128, 256, 512)
_DIVISIONS: Final = (2, 4, 8, 16)
_THRESHOLDS: Final = (0.6, 0.8)
CACHING: Final = "caching"
"""PyTorch's allocator, for a history that was recorded without a cache."""

_OTHERS: Final[dict[str, tuple[Callable[[AllocatorSettings], Allocator], str]]] = {
    CACHING: (
        lambda base: CachingAllocator(replace(base, is_caching=True)),
        "PyTorch's caching allocator with the other settings of the file.",
    ),
    "stitching": (
        StitchingAllocator,
        "GMLake's allocator: large requests in chunks of 2 MiB, free chunks are stitched. Rounding to "
        "chunks is in the figure. The memory is not managed memory.",
    ),
    "plain": (
        PlainAllocator,
        "One allocation of the driver per tensor, of the size asked for; the driver's own rounding is "
        "not in it.",
    ),
}

ALLOCATOR_WHAT_IF: Final = Result(
    "allocator_what_if",
    "one setting, or another allocator, on one GPU's history",
    (
        GPU,
        derived("setting", pl.String, "text", "As in PYTORCH_CUDA_ALLOC_CONF, or the allocator."),
        Figure(
            "peak_reserved_bytes",
            pl.Int64,
            "byte",
            "Most held from the driver; to the point where memory ran out, if it did.",
            "modelled",
        ),
        Figure(
            "difference_bytes",
            pl.Int64,
            "byte",
            "More than the rerun under the same settings; of that rerun: more than recorded, which "
            "is the error of the method. Null if memory ran out in either.",
            "modelled",
        ),
        Figure(
            "difference_fraction",
            pl.Float64,
            "fraction",
            "The same as a share of what it is compared with.",
            "modelled",
        ),
        Figure(
            "peak_active_bytes",
            pl.Int64,
            "byte",
            "Most in blocks in use; other settings make blocks of other sizes.",
            "modelled",
        ),
        Figure(
            "utilization_fraction",
            pl.Float64,
            "fraction",
            "Peak active over peak reserved (GMLake).",
            "modelled",
        ),
        Figure(
            "n_segments_made",
            pl.Int64,
            "segments",
            "Taken from the driver; expandable ones are not counted.",
            "modelled",
        ),
        Figure(
            "n_retries",
            pl.Int64,
            "retries",
            "All free memory was released to serve a request; null: the record does not say.",
            "modelled",
        ),
        Figure(
            "out_of_memory",
            pl.Boolean,
            "flag",
            "A request could not be served: the rerun ended there. Of the record: it holds one.",
            "modelled",
        ),
        derived("kind", KIND, "label", "What the row is: from the record, or modelled."),
        derived("note", pl.String, "text", "What the row stands on."),
    ),
    nothing="The snapshot has no history of allocations, so there is nothing to run again.",
)


@dataclass(frozen=True)
class _Case:
    """One row: how its allocator is made, and on what it stands."""

    setting: str
    make: Callable[[], Allocator]
    note: str


@analysis(
    question="Which allocator settings would have reserved less memory?",
    result=ALLOCATOR_WHAT_IF,
    reads=REPLAY_READS,
    complexity="O(n log n) for n entries and each setting: some 400 000 entries a second on an idle core",
    source="allocator.md 2.1, 4.3, 5, 8; GMLake, ASPLOS 2024",
)
def allocator_what_if(
    segments: pl.LazyFrame,
    blocks: pl.LazyFrame,
    allocator_events: pl.LazyFrame,
    allocator_settings: pl.LazyFrame,
    *,
    setting: str = "",
    limit_bytes: int = 0,
) -> pl.LazyFrame:
    """Run the requests of a history again under other settings, and compare the peaks.

    Parameters
    ----------
    segments, blocks : LazyFrame
        Tables of a snapshot: the state at the end.
    allocator_events : LazyFrame, ``ALLOCATOR_EVENTS``
        The history, in any order.
    allocator_settings : LazyFrame, ``ALLOCATOR_SETTINGS``
        Settings, among them the version.
    setting : str, default ""
        One setting instead of the usual ones, as in ``PYTORCH_CUDA_ALLOC_CONF``
        (``max_split_size_mb:64,garbage_collection_threshold:0.8``), "caching", "stitching" or "plain".
        If the history was recorded without a cache, settings are those of PyTorch's allocator instead.
    limit_bytes : int, default 0
        GPU memory that may be reserved; 0: without end. Garbage collection needs a limit: without this one
        it is given the recorded peak.

    Returns
    -------
    LazyFrame, ``ALLOCATOR_WHAT_IF``
        By GPU: the record, the rerun under the same settings, then the others. Of a GPU without a history
        there is no row.

    Raises
    ------
    UsageError
        If the setting is none.

    Examples
    --------
    >>> from nsan.torch_alloc.tables import SNAPSHOT_TABLES as tables
    >>> allocator_what_if(*(tables[name].empty() for name in REPLAY_READS)).collect().height
    0
    """
    _check(setting, limit_bytes)

    def build() -> pl.DataFrame:
        found = replays_of(segments, blocks, allocator_events, allocator_settings)
        rows = [
            row
            for gpu, replayed in found.by_gpu.items()
            if has_history(replayed)
            for row in _rows(found, gpu, replayed, (setting, limit_bytes))
        ]
        return pl.DataFrame(rows, schema=ALLOCATOR_WHAT_IF.schema, infer_schema_length=None)

    return ALLOCATOR_WHAT_IF.from_rows(build)


def _check(setting: str, limit_bytes: int) -> None:
    """Refuse at once what cannot be run."""
    settings = parse_conf("" if setting in _OTHERS else setting)
    if settings.memory_fraction is not None and not limit_bytes:
        msg = "per_process_memory_fraction is a share of the GPU's memory: give limit_bytes too."
        raise UsageError(msg)


def has_history(replayed: Replay) -> bool:
    """Tell whether a replayed history holds an allocation: without one there are no requests."""
    return bool((replayed.series["action"].cast(pl.String) == "alloc").any())


def peaks_of(found: Replays, gpu: int) -> tuple[int, int]:
    """Give the recorded peaks of reserved and active memory of a GPU, byte."""
    levels = found.series.filter(pl.col("device_id") == gpu)
    peaks = levels.select(pl.col("reserved_bytes").max(), pl.col("active_bytes").max())
    reserved, active = peaks.row(0)
    return int(reserved), int(active)


def history_note(replayed: Replay, requests: Requests) -> str:
    """Say what a history leaves open for a rerun.

    Parameters
    ----------
    replayed : Replay
        Of one GPU.
    requests : Requests
        Of the same.

    Returns
    -------
    str
        Sentences, each with a space before it; empty if nothing is open.
    """
    note = ""
    if not replayed.starts_empty:
        note += (
            f" The history begins in the middle: {counted(requests.n_before, 'tensor')} from before "
            "come first, by address."
        )
    if requests.n_unclear_releases:
        note += (
            f" {counted(requests.n_unclear_releases, 'time')} memory was released right before a new "
            "segment: taken as empty_cache; it may have been a retry or garbage collection."
        )
    if requests.n_left_out:
        note += f" {counted(requests.n_left_out, 'request')} of an impossible size left out."
    return note


def _rows(
    found: Replays, gpu: int, replayed: Replay, asked: tuple[str, int]
) -> Iterator[dict[str, Any]]:
    requests = requests_of(replayed)
    setting, limit = asked
    reserved, active = peaks_of(found, gpu)
    yield _recorded(replayed, gpu, (reserved, active))
    base = replace(found.settings, device_bytes=limit) if limit else found.settings
    note = "The same rules and settings, segments at addresses of its own."
    if base.memory_fraction is not None and base.device_bytes is None:
        note += (
            " The memory fraction of the file is no limit here: the GPU's memory is not recorded."
        )
    same = _Case(
        SAME_SETTINGS, lambda: CachingAllocator(base), note + history_note(replayed, requests)
    )
    baseline = rerun(requests, same.make)
    yield _row(gpu, same, baseline, reserved)
    largest = _largest_segment(requests, base)
    cases = _chosen(setting, base, reserved) if setting else _usual(base, largest, reserved)
    # A rerun that ended early says nothing about the rest of the history.
    compared = baseline.peak_reserved_bytes if baseline.out_of_memory is None else None
    for case in cases:
        yield _row(gpu, case, rerun(requests, case.make), compared)


def _recorded(replayed: Replay, gpu: int, peaks: tuple[int, int]) -> dict[str, Any]:
    action = replayed.series["action"].cast(pl.String)
    made = replayed.segments["alloc_sequence"].is_not_null()
    return {
        "device_id": gpu,
        "setting": AS_RECORDED,
        "peak_reserved_bytes": peaks[0],
        "peak_active_bytes": peaks[1],
        "utilization_fraction": peaks[1] / peaks[0] if peaks[0] else None,
        "n_segments_made": int(made.sum()),
        "out_of_memory": bool((action == "oom").any()),
        "kind": "derived",
        "note": "From the entries of segments, and the sizes of blocks in the replay."
        + ("" if replayed.starts_empty else " What was before the history is not in it."),
    }


def _row(gpu: int, case: _Case, ran: Rerun, compared: int | None) -> dict[str, Any]:
    """Make the row of a rerun; what it is compared with is None where that ended early."""
    note = case.note
    if ran.out_of_memory is not None:
        note += (
            f" Memory ran out at request {ran.out_of_memory}, counted from 0, so the peak is not "
            "compared."
        )
        compared = None
    elif compared is None:
        note += " Not compared: in the rerun under the same settings memory ran out."
    difference = None if compared is None else ran.peak_reserved_bytes - compared
    return {
        "device_id": gpu,
        "setting": case.setting,
        "peak_reserved_bytes": ran.peak_reserved_bytes,
        "difference_bytes": difference,
        "difference_fraction": difference / compared
        if difference is not None and compared
        else None,
        "peak_active_bytes": ran.peak_active_bytes,
        "utilization_fraction": (
            ran.peak_active_bytes / ran.peak_reserved_bytes if ran.peak_reserved_bytes else None
        ),
        "n_segments_made": ran.n_segments_made,
        "n_retries": ran.n_retries,
        "out_of_memory": ran.out_of_memory is not None,
        "kind": "modelled",
        "note": note,
    }


def _largest_segment(requests: Requests, settings: AllocatorSettings) -> int:
    """Give the largest segment that the requests need: only above it a splitting limit has no effect."""
    largest = int(requests.n_bytes.max()) if requests.n_bytes.size else 0
    return segment_size(largest, settings.large_segment_bytes)


def _usual(base: AllocatorSettings, largest: int, reserved: int) -> Iterator[_Case]:
    """List the settings that people try, without those that cannot change anything here."""
    texts = [f"max_split_size_mb:{size}" for size in _SPLIT_SIZES if size * MIB < largest]
    texts += [f"roundup_power2_divisions:{steps}" for steps in _DIVISIONS]
    if base.is_caching or base.device_bytes is not None:
        # Below the peak of a history without a cache, no cache would find room.
        texts += [f"garbage_collection_threshold:{share}" for share in _THRESHOLDS]
    texts += ["expandable_segments:True", *_OTHERS]
    # What was recorded is not tried again.
    texts.remove(CACHING if base.is_caching else "plain")
    for text in texts:
        yield from _chosen(text, base, reserved)


def _chosen(setting: str, base: AllocatorSettings, reserved: int) -> Iterator[_Case]:
    if setting in _OTHERS:
        make, note = _OTHERS[setting]
        yield _Case(setting, lambda: make(base), note)
        return
    settings = parse_conf(setting, replace(base, is_caching=True))
    note = "The rules of the caching allocator under this setting."
    is_known = settings.memory_fraction is not None and settings.device_bytes is not None
    if settings.garbage_collection_threshold and not is_known:
        allowed = settings.device_bytes or reserved
        # A fraction below 1, without which newer versions do not collect.
        settings = replace(settings, memory_fraction=0.5, device_bytes=2 * allowed)
        origin = "as given" if base.device_bytes else "the recorded peak"
        note += f" Allowed memory, of which it is a share: {format_bytes(allowed)}, {origin}."
    yield _Case(setting, lambda: CachingAllocator(settings), note)
