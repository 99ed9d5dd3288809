"""The recorded history as plain lists, and the state before it: the trace undone backwards.

Source: ``allocator.md`` 8. From the state at the time of the snapshot every entry is undone, last first:
an alloc removes a block, a completed free adds one, a segment that was made goes, one that was freed
comes back. What lies between blocks in use is one free block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import polars as pl

from nsan.torch_alloc.constants import DEFAULT_POOL, SMALL_SEGMENT_BYTES
from nsan.torch_alloc.expandable import UNBOUNDED_RESERVATION_BYTES
from nsan.torch_alloc.spans import Span, SpanSet
from nsan.torch_alloc.tables import ACTION

(
    ALLOC,
    FREE_REQUESTED,
    FREE_COMPLETED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    OOM,
) = range(8)
"""Numbers of the actions in :data:`nsan.torch_alloc.tables.ACTION`; from 8 on they change nothing."""

IN_USE: Final = ("active_allocated", "active_pending_free")
"""States of blocks that cannot serve a request."""

_ADDRESS_END: Final = 1 << 62
"""No address is as high: GPUs have 49-bit addresses, Python's arrays 63-bit numbers."""

NO_ACTION: Final = len(ACTION.categories)
"""Number of an entry that cannot be used, for want of an address or a size."""


@dataclass(frozen=True)
class Entries:
    """A history as lists, one item per entry.

    Attributes
    ----------
    actions : list of int
        Numbers of the actions; ``NO_ACTION`` for what cannot be used.
    va, n_bytes, streams : list of int
        Address, size as PyTorch writes it, and stream.
    pools : list of str or None
        Pool; None where it was not recorded.
    """

    actions: list[int]
    va: list[int]
    n_bytes: list[int]
    streams: list[int]
    pools: list[str | None]

    def __len__(self) -> int:
        return len(self.actions)


def read_entries(events: pl.DataFrame) -> Entries:
    """Take the columns of a history that a replay needs.

    Parameters
    ----------
    events : DataFrame, ``ALLOCATOR_EVENTS``
        The entries of one device in their order; reads ``action``, ``va``, ``bytes``, ``stream``, ``pool``.

    Returns
    -------
    Entries
        As many items as rows.
    """
    action = pl.col("action").cast(ACTION).to_physical().cast(pl.Int64)
    needs_va = action < OOM
    end = pl.col("va").cast(pl.Float64) + pl.col("bytes")
    is_usable = (pl.col("bytes") >= 0) & (~needs_va | (end <= _ADDRESS_END))
    columns = events.select(
        pl.when(is_usable.fill_null(value=False))
        .then(action)
        .otherwise(NO_ACTION)
        .fill_null(NO_ACTION)
        .alias("action"),
        pl.col("va").fill_null(0),
        pl.col("bytes").fill_null(0),
        pl.col("stream").fill_null(0),
        "pool",
    )
    return Entries(
        columns["action"].to_list(),
        columns["va"].to_list(),
        columns["bytes"].to_list(),
        columns["stream"].to_list(),
        columns["pool"].to_list(),
    )


@dataclass(slots=True)
class Held:
    """A block in use.

    ``n_bytes`` is None where the size must be worked out from the request; ``row`` is the place in the
    snapshot's blocks, -1 for a block that was freed before it.
    """

    requested_bytes: int
    n_bytes: int | None = None
    is_pending: bool = False
    row: int = -1


@dataclass
class State:
    """What was there at one time.

    Attributes
    ----------
    segments : SpanSet
        Ordinary segments.
    mapped : SpanSet
        Mapped ranges of expandable segments, by address only.
    held : dict of int to Held
        Blocks in use by address.
    silent : set of int
        Places of requested frees whose completion is not in the history: they complete at once.
    n_contradictions : int
        Entries that do not fit what the other entries say.
    """

    segments: SpanSet = field(default_factory=SpanSet)
    mapped: SpanSet = field(default_factory=SpanSet)
    held: dict[int, Held] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    n_contradictions: int = 0

    @property
    def is_empty(self) -> bool:
        """Nothing is reserved and nothing is held."""
        return not (self.segments or self.mapped or self.held)


def final_state(segments: pl.DataFrame, blocks: pl.DataFrame) -> State:
    """Read the state when the snapshot was taken.

    Parameters
    ----------
    segments : DataFrame, ``SEGMENTS``
        Segments of one device.
    blocks : DataFrame, ``BLOCKS``
        Their blocks.

    Returns
    -------
    State
        Segments that overlap another are left out and counted.
    """
    state = State()
    columns = ("va", "bytes", "stream", "pool", "size_class", "is_expandable")
    for va, n_bytes, stream, pool, size_class, is_expandable in segments.select(columns).rows():
        span = Span(va, n_bytes, stream or 0, pool or DEFAULT_POOL, size_class == "small")
        if not _is_range(va, n_bytes):
            state.n_contradictions += 1
        elif is_expandable:
            state.mapped.add(span)
        elif not state.segments.put(span):
            state.n_contradictions += 1
    is_pending = (pl.col("state") == "active_pending_free").alias("is_pending")
    held = blocks.with_row_index("row").filter(pl.col("state").is_in(IN_USE))
    in_use = held.select("row", "va", "bytes", "requested_bytes", is_pending)
    for row, va, n_bytes, requested, pending in in_use.rows():
        if not _is_range(va, n_bytes):
            state.n_contradictions += 1
            continue
        asked = n_bytes if requested is None else min(requested, n_bytes)
        state.held[va] = Held(asked, n_bytes, pending, row)
    return state


def _is_range(va: int | None, n_bytes: int | None) -> bool:
    return va is not None and n_bytes is not None and 0 < n_bytes <= _ADDRESS_END - va


def undo(state: State, entries: Entries) -> State:
    """Undo a history, last entry first, on the state after it.

    Parameters
    ----------
    state : State
        After the history; it is changed and returned.
    entries : Entries
        The history.

    Returns
    -------
    State
        Before the history. Entries that contradict the others are counted and skipped.
    """
    undoing = _Undoing(state, entries)
    steps = (
        undoing.alloc,
        undoing.free_requested,
        undoing.free_completed,
        undoing.segment_alloc,
        undoing.segment_free,
        undoing.segment_map,
        undoing.segment_unmap,
    )
    actions = entries.actions
    for at in range(len(actions) - 1, -1, -1):
        if actions[at] < OOM:
            steps[actions[at]](at)
    if undoing.requests_are_missing:
        # skip_actions left them out, so a completion is all that there is of a free.
        for held in state.held.values():
            held.is_pending = False
    return state


class _Undoing:
    """The steps of :func:`undo`, one per action; each takes the place of its entry."""

    def __init__(self, state: State, entries: Entries) -> None:
        self._state = state
        self._entries = entries
        self._held, self._va, self._n_bytes = state.held, entries.va, entries.n_bytes
        self._has_requests = FREE_REQUESTED in entries.actions
        self.requests_are_missing = False

    def alloc(self, at: int) -> None:
        held = self._held.pop(self._va[at], None)
        if held is None:
            self._state.n_contradictions += 1
        elif held.is_pending and not self._has_requests:
            self.requests_are_missing = True

    def free_completed(self, at: int) -> None:
        va = self._va[at]
        if va in self._held:
            self._state.n_contradictions += 1
        else:
            self._held[va] = Held(self._n_bytes[at], None, True)  # noqa: FBT003 - often, and names cost

    def free_requested(self, at: int) -> None:
        va = self._va[at]
        held = self._held.get(va)
        if held is None:
            # The completion was not recorded: the block was in use until here all the same.
            self._held[va] = Held(self._n_bytes[at])
            self._state.silent.add(at)
        elif held.is_pending:
            held.is_pending = False
        else:
            self._state.n_contradictions += 1

    def segment_alloc(self, at: int) -> None:
        if self._state.segments.pop(self._entries.va[at]) is None:
            self._state.n_contradictions += 1

    def segment_free(self, at: int) -> None:
        if self._entries.n_bytes[at] == 0 or not self._state.segments.put(
            vanished_span(self._entries, at)
        ):
            self._state.n_contradictions += 1

    def segment_map(self, at: int) -> None:
        self._state.mapped.cut(self._entries.va[at], self._entries.n_bytes[at])

    def segment_unmap(self, at: int) -> None:
        self._state.mapped.add(vanished_span(self._entries, at))


def vanished_span(entries: Entries, at: int) -> Span:
    """Describe the segment of an entry: without a recorded pool the default one, small if of 2 MiB."""
    n_bytes = entries.n_bytes[at]
    return Span(
        entries.va[at],
        n_bytes,
        entries.streams[at],
        entries.pools[at] or DEFAULT_POOL,
        n_bytes == SMALL_SEGMENT_BYTES,
    )


def reservations(segments: pl.DataFrame, entries: Entries, large_segment_bytes: int) -> SpanSet:
    """Find the reservations of expandable segments: the addresses that were ever mapped.

    Ranges of one stream that touch belong together. A reservation is of the small pool if the snapshot
    says so or a part of it was mapped in steps of 2 MiB. How far it reaches beyond what was mapped is
    not recorded: it gets all addresses up to the next segment, 1 TiB at most.

    Parameters
    ----------
    segments : DataFrame, ``SEGMENTS``
        Segments of one device.
    entries : Entries
        The history.
    large_segment_bytes : int
        Granule of the large pool.

    Returns
    -------
    SpanSet
        One span per reservation.
    """
    ranges = SpanSet()
    known = [*_final_ranges(segments), *_mapped_ranges(entries, large_segment_bytes)]
    # What names its pool comes first: it gives the pool to what touches it.
    for span in sorted(known, key=lambda span: span.pool == DEFAULT_POOL):
        ranges.add(span)
    if not known:
        return ranges
    starts = sorted({*_ordinary_starts(segments, entries), *(span.va for span in ranges)})
    reserved = SpanSet()
    for span in ranges:
        granule = SMALL_SEGMENT_BYTES if span.is_small else large_segment_bytes
        following = bisect_right(starts, span.va)
        end = span.end + UNBOUNDED_RESERVATION_BYTES
        end = min([end, *starts[following : following + 1]])
        n_bytes = max(span.n_bytes, (end - span.va) // granule * granule)
        reserved.put(replace(span, n_bytes=n_bytes))
    return reserved


def _final_ranges(segments: pl.DataFrame) -> Iterator[Span]:
    columns = ("va", "bytes", "stream", "pool", "size_class")
    for va, n_bytes, stream, pool, size in segments.filter("is_expandable").select(columns).rows():
        yield Span(va, n_bytes, stream or 0, pool or DEFAULT_POOL, size == "small")


def _mapped_ranges(entries: Entries, large_segment_bytes: int) -> Iterator[Span]:
    for at in _places(entries, SEGMENT_MAP, SEGMENT_UNMAP):
        is_small = entries.n_bytes[at] % large_segment_bytes != 0
        yield replace(vanished_span(entries, at), is_small=is_small)


def _ordinary_starts(segments: pl.DataFrame, entries: Entries) -> Iterator[int]:
    yield from segments.filter(~pl.col("is_expandable"))["va"]
    for at in _places(entries, SEGMENT_ALLOC, SEGMENT_FREE):
        yield entries.va[at]


def _places(entries: Entries, *actions: int) -> list[int]:
    if not any(action in entries.actions for action in actions):
        return []
    return [at for at, action in enumerate(entries.actions) if action in actions]
