"""What stitching of free 2 MiB chunks, as GMLake does it, would save at the peak and at an out of memory.

Three kinds of figures stand side by side: what the record says, what arithmetic on it allows at most, and
what the stitching allocator reserves when the requests are run again
(:mod:`nsan.torch_alloc.stitching`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import polars as pl

from nsan.analysis.allocator.blocks import FREE, GPU
from nsan.analysis.allocator.replayed import REPLAY_READS, Replays, replays_of
from nsan.analysis.allocator.what_if import has_history, history_note, peaks_of
from nsan.analysis.catalog import analysis
from nsan.analysis.result import Figure, Result, derived, recorded
from nsan.torch_alloc.chunks import CHUNK_BYTES, round_to_chunks
from nsan.torch_alloc.constants import DEFAULT_POOL, SMALL_SEGMENT_BYTES
from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.replay import Replay
from nsan.torch_alloc.rounding import is_small, round_size, segment_size
from nsan.torch_alloc.settings import AllocatorSettings
from nsan.torch_alloc.stitching import StitchingAllocator
from nsan.torch_alloc.what_if import Requests, requests_of, rerun, would_fit
from nsan.units import format_bytes

AVOIDED: Final = pl.Enum(["yes", "no", "unknown"])
"""Whether a request that failed would have been served; unknown: the allowed memory is not recorded."""

STITCHING: Final = Result(
    "stitching",
    "one GPU of the snapshot",
    (
        GPU,
        derived("peak_reserved_bytes", pl.Int64, "byte", "Most held from the driver, as recorded."),
        derived("peak_active_bytes", pl.Int64, "byte", "Most in blocks in use, as recorded."),
        Figure(
            "baseline_reserved_bytes",
            pl.Int64,
            "byte",
            "Peak reserved when PyTorch's rules are run again: what stitching is compared with.",
            "modelled",
        ),
        Figure(
            "stitched_reserved_bytes", pl.Int64, "byte", "Peak reserved with stitching.", "modelled"
        ),
        Figure(
            "saved_bytes",
            pl.Int64,
            "byte",
            "Baseline less that; negative: rounding to chunks costs more than stitching saves.",
            "modelled",
        ),
        Figure(
            "saved_of_record_bytes",
            pl.Int64,
            "byte",
            "Recorded peak reserved less that with stitching.",
            "modelled",
        ),
        derived(
            "least_reserved_bytes",
            pl.Int64,
            "byte",
            "Most at one time of active large tensors in whole chunks and the small pool's segments.",
        ),
        derived(
            "most_saved_bytes",
            pl.Int64,
            "byte",
            "Recorded peak less that: a bound of what stitching can save.",
        ),
        derived("utilization_fraction", pl.Float64, "fraction", "Peak active / peak reserved."),
        Figure(
            "stitched_utilization_fraction",
            pl.Float64,
            "fraction",
            "The same recorded peak active / peak reserved with stitching.",
            "modelled",
        ),
        Figure("n_stitches", pl.Int64, "blocks", "Blocks stitched from several.", "modelled"),
        Figure("stitched_bytes", pl.Int64, "byte", "In these, over the whole run.", "modelled"),
        derived(
            "free_chunk_bytes",
            pl.Int64,
            "byte",
            "In the final state: whole chunks in free blocks of the large pools.",
        ),
        derived(
            "largest_free_block_bytes",
            pl.Int64,
            "byte",
            "Largest of these blocks: what one request can have of them now; null: none.",
        ),
        derived(
            "largest_stitched_bytes",
            pl.Int64,
            "byte",
            "Most free chunks of one stream and pool: what one request could have, stitched.",
        ),
        recorded("oom_sequence", pl.Int64, "id", "First failed request; null: none recorded."),
        recorded("oom_request_bytes", pl.Int64, "byte", "What it asked for, rounded."),
        derived("oom_reserved_bytes", pl.Int64, "byte", "Reserved then."),
        derived(
            "oom_free_chunk_bytes",
            pl.Int64,
            "byte",
            "Whole chunks free then in its large pool and stream.",
        ),
        recorded("oom_device_free_bytes", pl.Int64, "byte", "Free on the GPU then."),
        Figure("oom_avoided", AVOIDED, "label", "Stitching would have served it.", "modelled"),
        derived("note", pl.String, "text", "What the row stands on, and why."),
    ),
    nothing="The snapshot has neither a segment nor a history.",
)

_STATE: Final = ("free_chunk_bytes", "largest_free_block_bytes", "largest_stitched_bytes")


@analysis(
    question="How much would stitching of free 2 MiB chunks (GMLake) save, and would it avoid an OOM?",
    result=STITCHING,
    reads=REPLAY_READS,
    complexity="O(n log n) for n entries: loops, some 300 000 entries a second",
    source="GMLake, ASPLOS 2024 (domain.md B.2); allocator.md 8",
)
def stitching(
    segments: pl.LazyFrame,
    blocks: pl.LazyFrame,
    allocator_events: pl.LazyFrame,
    allocator_settings: pl.LazyFrame,
    *,
    least_block_bytes: int = CHUNK_BYTES,
) -> pl.LazyFrame:
    """Compare the recorded peaks with what stitching needs for the same requests.

    Memory that CUDA's virtual memory calls map is never managed memory: stitching and Unified Memory
    exclude each other.

    Parameters
    ----------
    segments, blocks : LazyFrame
        Tables of a snapshot: the state at the end.
    allocator_events : LazyFrame, ``ALLOCATOR_EVENTS``
        The history, in any order.
    allocator_settings : LazyFrame, ``ALLOCATOR_SETTINGS``
        Settings, among them the version.
    least_block_bytes : int, default 2 MiB
        GMLake's ``fragLimit``: requests below are not stitched. Its own default is 512 MiB; 2 MiB is the
        most that stitching can do.

    Returns
    -------
    LazyFrame, ``STITCHING``
        By GPU. Without a history of allocations the peaks are null, and only the final state is told.

    Raises
    ------
    UsageError
        If ``least_block_bytes`` is less than a chunk.

    Examples
    --------
    >>> from nsan.torch_alloc.tables import SNAPSHOT_TABLES as tables
    >>> stitching(*(tables[name].empty() for name in REPLAY_READS)).collect().height
    0
    """
    StitchingAllocator(least_block_bytes=least_block_bytes)

    def build() -> pl.DataFrame:
        found = replays_of(segments, blocks, allocator_events, allocator_settings)
        rows = [_row(found, gpu, least_block_bytes) for gpu in found.checks["device_id"]]
        told = pl.DataFrame(
            rows, {name: dtype for name, dtype in STITCHING.schema.items() if name not in _STATE}
        )
        state = _final_state(segments, blocks)
        return (
            told.join(state, on="device_id", how="left")
            .with_columns(pl.col("free_chunk_bytes", "largest_stitched_bytes").fill_null(0))
            .sort("device_id")
        )

    return STITCHING.from_rows(build)


def chunks_inside(va: str = "va", size: str = "bytes") -> pl.Expr:
    """Count the bytes of the whole, aligned chunks of 2 MiB inside a range of addresses."""
    chunk = pl.lit(CHUNK_BYTES, pl.UInt64)
    # Offsets are small, so nothing overflows, wherever the range ends.
    offset = (pl.col(va) % chunk).cast(pl.Int64)
    skipped = pl.when(offset > 0).then(CHUNK_BYTES - offset).otherwise(0)
    return ((pl.col(size) - skipped) // CHUNK_BYTES * CHUNK_BYTES).clip(lower_bound=0)


def _final_state(segments: pl.LazyFrame, blocks: pl.LazyFrame) -> pl.DataFrame:
    """Add up the free chunks of the large pools in the state at the end."""
    keys = ["device_id", "segment_id"]
    large = segments.filter(pl.col("size_class") == "large").select(*keys, "pool", "stream")
    free = (
        blocks.filter(FREE)
        .select(*keys, "va", "bytes")
        .join(large, on=keys, how="inner")
        .with_columns(_chunks=chunks_inside())
    )
    by_home = free.group_by("device_id", "pool", "stream").agg(
        pl.col("_chunks").sum(), pl.col("bytes").max()
    )
    return (
        by_home.group_by("device_id")
        .agg(
            free_chunk_bytes=pl.col("_chunks").sum(),
            largest_free_block_bytes=pl.col("bytes").max(),
            largest_stitched_bytes=pl.col("_chunks").max(),
        )
        .collect()
    )


def _row(found: Replays, gpu: int, least_block_bytes: int) -> dict[str, Any]:
    replayed = found.by_gpu[gpu]
    requests = requests_of(replayed)
    row: dict[str, Any] = {"device_id": gpu}
    if has_history(replayed):
        row |= _peaks(found, gpu, requests, least_block_bytes)
        note = _note(row) + history_note(replayed, requests)
    else:
        note = "No history of allocations: only the final state is known, and no peak."
    row |= _oom(found, gpu, requests, least_block_bytes)
    reason = row.pop("reason", "")
    return row | {"note": f"{note}{reason}"}


def _peaks(found: Replays, gpu: int, requests: Requests, least_block_bytes: int) -> dict[str, Any]:
    settings = found.settings
    reserved, active = peaks_of(found, gpu)
    baseline = rerun(requests, lambda: CachingAllocator(settings)).peak_reserved_bytes
    ran = rerun(requests, lambda: StitchingAllocator(settings, least_block_bytes=least_block_bytes))
    least = least_reserved(found.by_gpu[gpu], settings)
    stitched = ran.peak_reserved_bytes
    return {
        "peak_reserved_bytes": reserved,
        "peak_active_bytes": active,
        "baseline_reserved_bytes": baseline,
        "stitched_reserved_bytes": stitched,
        "saved_bytes": baseline - stitched,
        "saved_of_record_bytes": reserved - stitched,
        "least_reserved_bytes": least,
        "most_saved_bytes": reserved - least,
        "utilization_fraction": active / reserved if reserved else None,
        "stitched_utilization_fraction": active / stitched if stitched else None,
        "n_stitches": ran.n_stitches,
        "stitched_bytes": ran.stitched_bytes,
    }


def least_reserved(replayed: Replay, settings: AllocatorSettings) -> int:
    """Find the most that must be reserved at one time when large tensors take whole chunks.

    Parameters
    ----------
    replayed : Replay
        Of one GPU.
    settings : AllocatorSettings
        How requests are rounded.

    Returns
    -------
    int
        Bytes: the largest sum of the active large tensors, each in whole chunks, and of the segments of
        the small pools. Where segments are expandable the small tensors count instead.
    """
    asked = replayed.tensors.select(
        asked=pl.coalesce("requested_bytes", "block_bytes"),
        start=pl.col("alloc_sequence").fill_null(-1),
        end="free_completed_sequence",
    )
    sizes = asked["asked"].unique().to_list()
    rounded = [round_size(size, settings.roundup_power2_divisions) for size in sizes]
    counts_small = settings.expandable_segments
    needs = [
        (size if counts_small else 0) if is_small(size) else round_to_chunks(size)
        for size in rounded
    ]
    takes = asked.join(
        pl.DataFrame({"asked": sizes, "n": needs}, schema={"asked": pl.Int64, "n": pl.Int64}),
        on="asked",
    ).select("start", "end", "n")
    if not counts_small:
        small = replayed.segments.filter(pl.col("size_class").cast(pl.String) == "small").select(
            start=pl.col("alloc_sequence").fill_null(-1), end="free_sequence", n="bytes"
        )
        takes = pl.concat([takes, small], how="vertical_relaxed")
    changes = pl.concat(
        [
            takes.select("n", at="start"),
            takes.drop_nulls("end").select(-pl.col("n"), at="end"),
        ],
        how="vertical_relaxed",
    )
    levels = changes.group_by("at").agg(pl.col("n").sum()).sort("at")["n"].cum_sum()
    return max(0, int(levels.max() or 0))  # type: ignore[arg-type]


def _note(row: dict[str, Any]) -> str:
    note = "Stitched: the requests run again, large ones in whole chunks of 2 MiB."
    error = row["baseline_reserved_bytes"] - row["peak_reserved_bytes"]
    if error:
        way = "more" if error > 0 else "less"
        note += (
            f" The baseline reserves {format_bytes(abs(error))} {way} than the record: the error of a "
            "rerun."
        )
    if row["saved_bytes"] < 0:
        note += " Rounding to chunks takes more than stitching saves."
    return note


@dataclass(frozen=True)
class _Failure:
    """The first request that failed, and what there was: ``more`` could be reserved, None: unknown."""

    at: int
    size: int
    stream: int
    pool: str
    reserved: int
    free: int
    device_free: int | None
    more: int | None


def _oom(found: Replays, gpu: int, requests: Requests, least_block_bytes: int) -> dict[str, Any]:
    """Tell of the first failed request whether stitching would have served it."""
    failure = _first_failure(found, gpu)
    if failure is None:
        return {}
    if ((requests.sequences >= 0) & (requests.sequences < failure.at)).any():
        fits = _fits_in_rerun(found, failure, requests, least_block_bytes)
        basis = "by a rerun with stitching up to there"
    else:
        fits = failure.free + round_down(failure.more or 0) >= _need(failure.size)
        basis = "by the chunks that were free then, for lack of a history before it"
    avoided = "yes" if fits else "unknown" if failure.more is None else "no"
    room = "an unknown amount" if failure.more is None else format_bytes(failure.more)
    return {
        "oom_sequence": failure.at,
        "oom_request_bytes": failure.size,
        "oom_reserved_bytes": failure.reserved,
        "oom_free_chunk_bytes": failure.free,
        "oom_device_free_bytes": failure.device_free,
        "oom_avoided": avoided,
        "reason": (
            f" Out of memory: {format_bytes(_need(failure.size))} were needed in chunks; "
            f"{format_bytes(failure.reserved)} were reserved, {format_bytes(failure.free)} of it free "
            f"in whole chunks of the same pool and stream, and {room} more could be had. "
            f"Avoided: {avoided}, {basis}."
        ),
    }


def round_down(n_bytes: int) -> int:
    """Round down to whole chunks of 2 MiB."""
    return n_bytes // CHUNK_BYTES * CHUNK_BYTES


def _need(size: int) -> int:
    return SMALL_SEGMENT_BYTES if is_small(size) else round_to_chunks(size)


def _first_failure(found: Replays, gpu: int) -> _Failure | None:
    failed = found.events.filter((pl.col("device_id") == gpu) & (pl.col("action") == "oom"))
    if failed.is_empty():
        return None
    event = failed.row(0, named=True)
    at, size = event["sequence"], event["bytes"] or 0
    stream, pool = event["stream"] or 0, event["pool"] or DEFAULT_POOL
    levels = found.series.filter((pl.col("device_id") == gpu) & (pl.col("sequence") == at))
    device_free = event["device_free_bytes"]
    return _Failure(
        at,
        size,
        stream,
        pool,
        reserved=int(levels["reserved_bytes"][0]),
        free=_free_chunks(found, gpu, at, (stream, pool)),
        device_free=device_free,
        more=_allowed_more(device_free, size, found.settings),
    )


def _fits_in_rerun(
    found: Replays, failure: _Failure, requests: Requests, least_block_bytes: int
) -> bool:
    limit = failure.reserved + (failure.more or 0)
    settings = replace(found.settings, device_bytes=limit, memory_fraction=None)
    return would_fit(
        requests,
        lambda: StitchingAllocator(settings, least_block_bytes=least_block_bytes),
        failure.size,
        before=failure.at,
        stream=failure.stream,
        pool=failure.pool,
    )


def _allowed_more(device_free: int | None, size: int, settings: AllocatorSettings) -> int | None:
    """Give what could be reserved beyond what was; None: the record does not say."""
    if device_free is None:
        return None
    # The GPU had enough, so a limit of the program's own refused: that limit is not recorded.
    return None if device_free >= segment_size(size, settings.large_segment_bytes) else device_free


def _free_chunks(found: Replays, gpu: int, at: int, home: tuple[int, str]) -> int:
    free = found.free_at(gpu, at).filter(
        (pl.col("size_class").cast(pl.String) == "large")
        & (pl.col("stream") == home[0])
        & (pl.col("pool") == home[1])
    )
    return int(free.select(chunks_inside().sum()).item())
