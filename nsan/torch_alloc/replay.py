"""Replay a recorded history of the caching allocator: its state at every entry, checked as it goes.

The rules of :mod:`nsan.torch_alloc.machine` predict the address of every allocation and every new segment;
what was recorded is compared with it and wins where they differ. Addresses of segments, the moments when
pending frees complete and what is released are taken from the history (``allocator.md`` 8).

Two things cannot be told of what is older than the history. The order of age among its blocks and segments, which
the tie-breaks from 2.12 on go by, is taken to be that of the addresses. A large block that was handed out whole
because too little (at most 1 MiB) would have remained counts without this rest if the free block behind it has
grown since and the block is freed in the history.

MemPools with ``use_on_oom`` or ``no_split`` are replayed as pools without: no key of a snapshot tells of these options
(:mod:`nsan.torch_alloc.machine`). What they change is counted as not predicted, and repaired.

A history without a cache (:attr:`~nsan.torch_alloc.settings.AllocatorSettings.is_caching`) has a segment per
allocation; the segments go at their own entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from nsan.torch_alloc.follower import Follower
from nsan.torch_alloc.history import final_state, read_entries, reservations, undo
from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.settings import AllocatorSettings
from nsan.torch_alloc.start import set_up
from nsan.torch_alloc.tables import BLOCK_STATE


@dataclass(frozen=True)
class Agreement:
    """How far the rules predict what was recorded.

    Attributes
    ----------
    n_allocs, n_addresses_exact : int
        Allocations, and those at the predicted address.
    n_segments_made, n_segments_exact : int
        New segments (and mappings of expandable ones), and those of the predicted size when the next
        request of the stream needed one.
    n_final_blocks, n_final_blocks_exact : int
        Blocks of the snapshot, and those that the replay ends with: same address, size, state, request.
        Both 0 if the replay stops before the end.
    first_difference : int, optional
        ``sequence`` of the first entry that was not predicted.
    n_skipped : int
        Entries that make no sense where they stand, as the free of an unknown block.
    n_forced_frees : int
        Blocks whose free is missing: another was recorded in their place.
    n_contradictions : int
        Entries that do not fit the final state, met when the history was undone.
    """

    n_allocs: int
    n_addresses_exact: int
    n_segments_made: int
    n_segments_exact: int
    n_final_blocks: int
    n_final_blocks_exact: int
    first_difference: int | None
    n_skipped: int
    n_forced_frees: int
    n_contradictions: int


@dataclass(frozen=True)
class Replay:
    """What a replay found; sizes are bytes, and everything but the recorded columns is reconstructed.

    Attributes
    ----------
    series : DataFrame
        One row per entry, in its order: ``sequence``, ``time_us``, ``action``, ``va`` as recorded;
        ``block_bytes``, the size of the block that was given or freed (null for other entries);
        ``reserved_bytes``, ``allocated_bytes``, ``active_bytes``, ``requested_bytes`` after the entry.
    tensors : DataFrame
        One row per allocation, those from before the history first, then in its order: ``device_id``,
        ``va``, ``block_bytes``, ``requested_bytes``, ``stream``, ``pool``, ``segment_va``,
        ``segment_bytes``, ``alloc_sequence`` (null: before the history), ``free_requested_sequence``,
        ``free_completed_sequence`` (null: still held), ``alloc_us``, ``free_us``, ``stack_id``. A free
        that was pending before the history has only a completion. The segment of an expandable one is
        its whole reservation, as in ``segments``.
    segments : DataFrame
        One row per segment that ever was: ``va``, ``bytes`` (if expandable, the most that was mapped),
        ``stream``, ``pool``, ``size_class``, ``alloc_sequence``, ``free_sequence``.
    starts_empty : bool
        The history begins with an empty allocator.
    agreement : Agreement
        How far the rules predict what was recorded.
    is_caching : bool
        The allocator has a cache; without one the end of a segment is no release of cached memory.
    """

    series: pl.DataFrame
    tensors: pl.DataFrame
    segments: pl.DataFrame
    starts_empty: bool
    agreement: Agreement
    is_caching: bool = True


@dataclass(frozen=True)
class _Run:
    """A replay that has come to its end."""

    follower: Follower
    events: pl.DataFrame
    blocks: pl.DataFrame
    starts_empty: bool
    n_contradictions: int


def replay(
    segments: pl.DataFrame,
    blocks: pl.DataFrame,
    events: pl.DataFrame,
    settings: AllocatorSettings,
    *,
    stop_at: int | None = None,
) -> Replay:
    """Replay the history of one device.

    Parameters
    ----------
    segments : DataFrame, ``SEGMENTS``
        The state when the snapshot was taken; other devices' rows are left out.
    blocks : DataFrame, ``BLOCKS``
        Its blocks.
    events : DataFrame, ``ALLOCATOR_EVENTS``
        The history of one device in its order; it may be empty or begin anywhere.
    settings : AllocatorSettings
        Options, and the tie-break of the version that recorded it.
    stop_at : int, optional
        ``sequence`` of the last entry to replay.

    Returns
    -------
    Replay
        The inputs are not changed; a history that is broken is repaired and counted, never refused.
    """
    run = _run(segments, blocks, events, settings, stop_at=stop_at)
    follower = run.follower
    is_whole = run.events.height == events.height
    n_final, n_exact = _compare(follower, run.blocks) if is_whole else (0, 0)
    first = follower.first_difference
    device = _device_of(events, segments)
    tensors = follower.books.tensors_frame(run.events, run.blocks)
    return Replay(
        series=follower.books.series_frame(run.events),
        tensors=tensors.select(pl.lit(device, dtype=pl.Int64).alias("device_id"), *_TENSOR_COLUMNS),
        segments=follower.books.segments_frame(run.events),
        starts_empty=run.starts_empty,
        agreement=Agreement(
            n_allocs=follower.n_allocs,
            n_addresses_exact=follower.n_addresses_exact,
            n_segments_made=follower.n_segments_made,
            n_segments_exact=follower.n_segments_exact,
            n_final_blocks=n_final,
            n_final_blocks_exact=n_exact,
            first_difference=None if first is None else events["sequence"][first],
            n_skipped=follower.n_skipped,
            n_forced_frees=follower.n_forced_frees,
            n_contradictions=run.n_contradictions,
        ),
        is_caching=settings.is_caching,
    )


_TENSOR_COLUMNS = (
    "va",
    "block_bytes",
    "requested_bytes",
    "stream",
    "pool",
    "segment_va",
    "segment_bytes",
    "alloc_sequence",
    "free_requested_sequence",
    "free_completed_sequence",
    "alloc_us",
    "free_us",
    "stack_id",
)


def state_at(
    segments: pl.DataFrame,
    blocks: pl.DataFrame,
    events: pl.DataFrame,
    settings: AllocatorSettings,
    *,
    sequence: int | None,
) -> pl.DataFrame:
    """Give every block as it was after an entry of the history.

    Parameters
    ----------
    segments, blocks, events, settings
        As for :func:`replay`.
    sequence : int or None
        The entry; None: before the first.

    Returns
    -------
    DataFrame
        One row per block, by address: ``va``, ``bytes``, ``requested_bytes`` (0 where inactive), ``state``,
        ``segment_va``, ``segment_bytes``, ``pool``, ``stream``. The blocks of a segment fill it; of an
        expandable one each mapped range is a segment, as in a snapshot.
    """
    run = _run(segments, blocks, events, settings, stop_at=-1 if sequence is None else sequence)
    machine = run.follower.machine
    rows = [
        (
            block.va,
            block.n_bytes,
            0 if block.state == "free" else block.requested_bytes,
            _RECORDED_STATES[block.state],
            segment.va,
            segment.n_bytes,
            segment.pool,
            segment.stream,
        )
        for segment in machine.segments()
        for block in machine.blocks(segment)
    ]
    return pl.DataFrame(rows, schema=_STATE_SCHEMA, orient="row")


_RECORDED_STATES = {
    "allocated": "active_allocated",
    "pending": "active_pending_free",
    "free": "inactive",
}
_STATE_SCHEMA = pl.Schema(
    {
        "va": pl.UInt64(),
        "bytes": pl.Int64(),
        "requested_bytes": pl.Int64(),
        "state": BLOCK_STATE,
        "segment_va": pl.UInt64(),
        "segment_bytes": pl.Int64(),
        "pool": pl.String(),
        "stream": pl.UInt64(),
    }
)


def _device_of(*frames: pl.DataFrame) -> int | None:
    return next((frame["device_id"][0] for frame in frames if frame.height), None)


def _run(
    segments: pl.DataFrame,
    blocks: pl.DataFrame,
    events: pl.DataFrame,
    settings: AllocatorSettings,
    *,
    stop_at: int | None,
) -> _Run:
    if events.height:
        of_device = pl.col("device_id") == events["device_id"][0]
        segments, blocks = segments.filter(of_device), blocks.filter(of_device)
    entries = read_entries(events)
    spans = reservations(segments, entries, settings.large_segment_bytes)
    state = undo(final_state(segments, blocks), entries)
    if not settings.is_caching:
        for span in state.segments:
            span.is_small = False  # as there is one kind of segment only
    machine = CachingAllocator(settings)
    names = segments.select("va", "bytes", "pool").rows()
    follower = Follower(
        machine,
        entries,
        reservations=spans,
        pools={(va, n_bytes): pool for va, n_bytes, pool in names if pool is not None},
        silent=state.silent,
        n_held=len(state.held),
    )
    starts_empty = state.is_empty
    set_up(follower, state, spans)
    done = events if stop_at is None else events.head(int((events["sequence"] <= stop_at).sum()))
    follower.run(done.height)
    return _Run(follower, done, blocks, starts_empty, state.n_contradictions)


def _compare(follower: Follower, blocks: pl.DataFrame) -> tuple[int, int]:
    """Count the blocks of the snapshot, and those that the replay ends with."""
    machine = follower.machine
    found = {
        block.va: (block.n_bytes, _RECORDED_STATES[block.state], block.requested_bytes)
        for block in machine.blocks()
    }
    exact = 0
    for va, n_bytes, state, requested in blocks.select(
        "va", "bytes", "state", "requested_bytes"
    ).rows():
        size, ends_as, asked = found.get(va, (0, "", 0))
        is_same_request = state == "inactive" or requested is None or requested == asked
        exact += (size, ends_as) == (n_bytes, state) and is_same_request
    return blocks.height, exact
