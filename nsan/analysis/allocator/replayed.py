"""The histories of a snapshot, replayed: one replay per GPU, shared by the analyses that ask for it.

The history holds requested sizes, not block sizes, and a partial one begins anywhere; both follow from a
replay (:mod:`nsan.torch_alloc.replay`). Where it agreed with all that the file can confirm, its figures
are derived; elsewhere reconstructed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import polars as pl

from nsan.analysis.result import KIND, derived
from nsan.torch_alloc.replay import Replay, replay, state_at
from nsan.torch_alloc.settings import AllocatorSettings
from nsan.units import NS_PER_US

BEFORE: Final = -1
"""``sequence`` of the row that holds the level before the first entry of a history."""

LEVELS: Final = ("reserved_bytes", "allocated_bytes", "active_bytes", "requested_bytes")

EVENT_READS: Final = (
    "device_id",
    "sequence",
    "time_us",
    "action",
    "va",
    "bytes",
    "stream",
    "pool",
    "device_free_bytes",
    "stack_id",
)
REPLAY_READS: Final = {
    "segments": (
        "segment_id",
        "device_id",
        "va",
        "bytes",
        "stream",
        "size_class",
        "pool",
        "is_expandable",
        "stack_id",
    ),
    "blocks": (
        "segment_id",
        "device_id",
        "va",
        "bytes",
        "requested_bytes",
        "state",
        "stream",
        "pool",
        "stack_id",
    ),
    "allocator_events": EVENT_READS,
    "allocator_settings": ("name", "value"),
}
"""What a replay needs. All analyses ask for the same, so that one replay serves them."""

REPLAY_KIND: Final = derived(
    "replay_kind",
    KIND,
    "label",
    "Derived if the replay of this GPU's history agreed in full, else reconstructed; null: none.",
    governs="(?!final_)",
)

FAULTS: Final = ("n_skipped", "n_forced_frees", "n_contradictions")
"""Counts of what is wrong with a history itself, as in ``Agreement``."""

COUNTS: Final = (
    "n_allocs",
    "n_addresses_exact",
    "n_segments_made",
    "n_segments_exact",
    "n_final_blocks",
    "n_final_blocks_exact",
)


Recorded = tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]
"""Segments, blocks and entries of one GPU."""


@dataclass(frozen=True)
class Replays:
    """The replays of every GPU of a snapshot, and the frames that they are made of.

    Attributes
    ----------
    series : DataFrame
        One row per entry, ordered by GPU and sequence: ``device_id``, ``sequence``, ``time_ns`` (from the
        first entry of the GPU), ``action`` and the levels after it, in byte. The first row of each GPU
        with a history is the level before: sequence -1, no action.
    tensors : DataFrame
        ``Replay.tensors`` with ``alloc_ns`` and ``free_ns``.
    segments : DataFrame
        ``Replay.segments`` with ``device_id``.
    checks : DataFrame
        One row per GPU: ``n_entries``, the counts of ``Agreement``, ``first_difference``,
        ``is_complete``, ``tie_break`` and ``replay_kind``.
    events : DataFrame
        The entries as recorded, ordered by GPU and sequence.
    by_gpu : dict of int to Replay
        As :func:`nsan.torch_alloc.replay.replay` gave them.
    recorded : dict of int to tuple of 3 DataFrame
        By GPU: its segments, blocks and entries.
    settings : AllocatorSettings
        Of the file.
    """

    series: pl.DataFrame
    tensors: pl.DataFrame
    segments: pl.DataFrame
    checks: pl.DataFrame
    events: pl.DataFrame
    by_gpu: dict[int, Replay]
    recorded: dict[int, Recorded]
    settings: AllocatorSettings

    def free_at(self, gpu: int, sequence: int) -> pl.DataFrame:
        """List the free blocks of a GPU after an entry.

        Parameters
        ----------
        gpu : int
            The GPU.
        sequence : int
            The entry; -1: before the first.

        Returns
        -------
        DataFrame
            One row per free block, by address: ``va`` (UInt64), ``bytes`` (Int64), ``segment_va``,
            ``pool``, ``stream``, ``size_class``.
        """
        found = self.by_gpu[gpu]
        segments = (
            _there(found.segments, sequence, "free_sequence")
            .select("pool", "stream", "size_class", "bytes", segment_va="va")
            .unique("segment_va", keep="last", maintain_order=True)
        )
        if has_expandable(*self.recorded[gpu]):
            # What was mapped at that time is not in the frames: replay up to it.
            at = None if sequence == BEFORE else sequence
            state = state_at(*self.recorded[gpu], self.settings, sequence=at)
            # There a range of what is mapped is a segment; here the whole reservation is.
            free = (
                state.filter(pl.col("state") == "inactive")
                .select("va", "bytes")
                .sort("va")
                .join_asof(segments.sort("segment_va"), left_on="va", right_on="segment_va")
            )
        else:
            free = _gaps(segments, _there(found.tensors, sequence, "free_completed_sequence"))
        return free.select("va", "bytes", "segment_va", "pool", "stream", "size_class").sort("va")


def has_expandable(segments: pl.DataFrame, blocks: pl.DataFrame, events: pl.DataFrame) -> bool:
    """Say whether any segment grows or shrinks.

    Parameters
    ----------
    segments, blocks, events : DataFrame
        Tables of one GPU.

    Returns
    -------
    bool
        One is marked as expandable, or the history maps or unmaps memory.
    """
    del blocks
    maps = events["action"].cast(pl.String).is_in(["segment_map", "segment_unmap"])
    return bool(segments["is_expandable"].any() or maps.any())


def _there(rows: pl.DataFrame, sequence: int, ends: str) -> pl.DataFrame:
    """Choose what was there after an entry."""
    begun = pl.col("alloc_sequence").fill_null(BEFORE) <= sequence
    return rows.filter(begun & (pl.col(ends) > sequence).fill_null(value=True))


def _gaps(segments: pl.DataFrame, tensors: pl.DataFrame) -> pl.DataFrame:
    """Find what lies between tensors: two free blocks are never neighbours in a segment."""
    start, end = pl.col("_start"), pl.col("_end")
    offset = (pl.col("va") - pl.col("segment_va")).cast(pl.Int64, wrap_numerical=True)
    size = pl.col("bytes").max().over("segment_va")
    edges = segments.select("segment_va", "bytes", _start=pl.lit(0), _end=pl.lit(0))
    held = tensors.select("segment_va", _start=offset, _end=offset + pl.col("block_bytes"))
    gap = start.shift(-1).over("segment_va").fill_null(size) - end
    return (
        pl.concat([edges, held], how="diagonal_relaxed")
        .sort("segment_va", "_start", "_end")
        .select("segment_va", va=pl.col("segment_va") + end.cast(pl.UInt64), bytes=gap)
        .filter(pl.col("bytes") > 0)
        .join(segments.drop("bytes"), on="segment_va")
    )


class _Frames:
    """Frames as the key of a cache: equal if every value is."""

    def __init__(self, frames: list[pl.DataFrame]) -> None:
        self.frames = frames

    def __hash__(self) -> int:
        return hash(tuple(frame.shape for frame in self.frames))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frames) and all(
            mine.equals(its) for mine, its in zip(self.frames, other.frames, strict=True)
        )


def replays_of(
    segments: pl.LazyFrame,
    blocks: pl.LazyFrame,
    allocator_events: pl.LazyFrame,
    allocator_settings: pl.LazyFrame,
) -> Replays:
    """Replay the history of every GPU.

    The replays of the last snapshot are kept, so that the next analysis of it does not replay again.

    Parameters
    ----------
    segments, blocks, allocator_events, allocator_settings : LazyFrame
        Tables of a snapshot, in any order; read are the columns of :data:`REPLAY_READS`.

    Returns
    -------
    Replays
        GPUs with a segment or an entry.
    """
    tables = {
        "segments": segments.sort("device_id", "va"),
        "blocks": blocks.sort("device_id", "va"),
        "allocator_events": allocator_events.sort("device_id", "sequence"),
        "allocator_settings": allocator_settings.sort("name", "value"),
    }
    frames = [each.select(REPLAY_READS[name]) for name, each in tables.items()]
    return _replayed(_Frames(pl.collect_all(frames)))


@lru_cache(maxsize=1)
def _replayed(key: _Frames) -> Replays:
    segments, blocks, written, values = key.frames
    events = told(written)
    settings = AllocatorSettings.from_rows(dict(values.iter_rows()))
    gpus = pl.concat([segments["device_id"], events["device_id"]]).drop_nulls().unique().sort()
    recorded = {
        gpu: (
            segments.filter(device_id=gpu),
            blocks.filter(device_id=gpu),
            events.filter(device_id=gpu),
        )
        for gpu in gpus
    }
    found = {gpu: replay(*frames, settings) for gpu, frames in recorded.items()}
    before = {gpu: _level_before(recorded[gpu], each, settings) for gpu, each in found.items()}
    starts = _starts(events)
    # Without any GPU: a replay of nothing, for the columns.
    each_gpu = found or {0: replay(segments, blocks, events, settings)}
    series = _stacked({gpu: each.series for gpu, each in each_gpu.items()})
    tensors = _stacked({gpu: each.tensors for gpu, each in each_gpu.items()})
    return Replays(
        series=_with_before(series, before, starts),
        tensors=_timed(tensors, events, starts),
        segments=_stacked({gpu: each.segments for gpu, each in each_gpu.items()}),
        checks=_checks(found, written, settings),
        events=events,
        by_gpu=found,
        recorded=recorded,
        settings=settings,
    )


FEWEST_ENTRIES: Final = 2
"""A shorter history is none: recording with ``enabled="state"`` keeps the last entry."""


def told(events: pl.DataFrame) -> pl.DataFrame:
    """Leave out histories of one entry, unless it says that memory ran out.

    Parameters
    ----------
    events : DataFrame
        Entries: reads ``device_id``, ``action``.

    Returns
    -------
    DataFrame
        Those of GPUs that have a history.
    """
    has_history = (pl.len().over("device_id") >= FEWEST_ENTRIES) | (pl.col("action") == "oom")
    return events.filter(has_history)


def _level_before(
    recorded: Recorded, found: Replay, settings: AllocatorSettings
) -> tuple[int, ...]:
    """Measure the levels before the first entry, in the order of :data:`LEVELS`."""
    if found.starts_empty:
        return (0,) * len(LEVELS)
    state = state_at(*recorded, settings, sequence=None)
    size, live = pl.col("bytes"), pl.col("state") != "inactive"
    return state.select(
        size.sum(),
        allocated=size.filter(pl.col("state") == "active_allocated").sum(),
        active=size.filter(live).sum(),
        requested=pl.col("requested_bytes").filter(live).sum(),
    ).row(0)


def _starts(events: pl.DataFrame) -> pl.DataFrame:
    """Find the time from which the times of a GPU count: that of its first entry."""
    first = pl.col("time_us").drop_nulls().first()
    return events.group_by("device_id", maintain_order=True).agg(_start_us=first)


def _ns(time: str) -> pl.Expr:
    return (pl.col(time) - pl.col("_start_us")) * NS_PER_US


def _timed(tensors: pl.DataFrame, events: pl.DataFrame, starts: pl.DataFrame) -> pl.DataFrame:
    """Add when a tensor was allocated, and when its free was completed."""
    done = events.select("device_id", "time_us", free_completed_sequence="sequence")
    return (
        tensors.join(starts, on="device_id", how="left", maintain_order="left")
        .join(done, on=["device_id", "free_completed_sequence"], how="left", maintain_order="left")
        .with_columns(alloc_ns=_ns("alloc_us"), free_ns=_ns("time_us"))
        .drop("_start_us", "time_us")
    )


def _stacked(frames: Mapping[int, pl.DataFrame]) -> pl.DataFrame:
    """Put the frames of all GPUs one below the other, with the GPU's number."""
    return pl.concat(
        frame.with_columns(device_id=pl.lit(gpu, pl.Int64)) for gpu, frame in frames.items()
    )


def _with_before(
    series: pl.DataFrame, before: dict[int, tuple[int, ...]], starts: pl.DataFrame
) -> pl.DataFrame:
    """Put before the levels of each GPU the one with which its history began."""
    rows = series.select("device_id", "sequence", "time_us", "action", *LEVELS)
    levels = pl.DataFrame(
        [(gpu, *level) for gpu, level in before.items()],
        schema=dict.fromkeys(["device_id", *LEVELS], pl.Int64),
        orient="row",
    )
    # Only where there is a history; its time is that of the first entry.
    first = levels.join(starts, on="device_id").select(
        "device_id",
        pl.lit(BEFORE, pl.Int64).alias("sequence"),
        pl.col("_start_us").alias("time_us"),
        pl.lit(None, rows.schema["action"]).alias("action"),
        *LEVELS,
    )
    return (
        pl.concat([first, rows])
        .join(starts, on="device_id", how="left")
        .with_columns(time_ns=_ns("time_us"))
        .select("device_id", "sequence", "time_ns", "action", *LEVELS)
        .sort("device_id", "sequence")
    )


def _checks(
    found: dict[int, Replay], events: pl.DataFrame, settings: AllocatorSettings
) -> pl.DataFrame:
    rows = [
        {
            "device_id": gpu,
            **{name: getattr(each.agreement, name) for name in (*COUNTS, *FAULTS)},
            "first_difference": each.agreement.first_difference,
            "is_complete": each.starts_empty,
            "tie_break": settings.tie_break,
        }
        for gpu, each in found.items()
    ]
    schema = {
        "device_id": pl.Int64,
        **dict.fromkeys([*COUNTS, *FAULTS, "first_difference"], pl.Int64),
        "is_complete": pl.Boolean,
        "tie_break": pl.String,
    }
    n_entries = events.group_by("device_id").agg(n_entries=pl.len().cast(pl.Int64))
    is_told = pl.col("n_entries") >= FEWEST_ENTRIES
    same = [
        pl.col(one) == pl.col(other) for one, other in zip(COUNTS[::2], COUNTS[1::2], strict=True)
    ]
    sound = [pl.col(name) == 0 for name in FAULTS]
    agreed = pl.all_horizontal(*same, *sound, pl.col("first_difference").is_null())
    kind = pl.when(agreed).then(pl.lit("derived")).otherwise(pl.lit("reconstructed"))
    return (
        pl.DataFrame(rows, schema=schema)
        .join(n_entries, on="device_id", how="left", maintain_order="left")
        .with_columns(pl.col("n_entries").fill_null(0))
        .with_columns(
            replay_kind=pl.when(is_told).then(kind).cast(KIND),
            is_complete=pl.when(is_told).then("is_complete"),
        )
    )
