"""Follow a recorded history with the allocator's rules, and count where they differ from it.

After every entry the machine holds what the history says (:mod:`nsan.torch_alloc.keeper`). An entry that makes no
sense, as the free of an unknown block or a segment that is there already, is counted and skipped.
"""

from __future__ import annotations

from typing import Final

from nsan.torch_alloc.blocks import Block, FreeList, Segment
from nsan.torch_alloc.books import NEVER, Books
from nsan.torch_alloc.constants import DEFAULT_POOL, SMALL_SEGMENT_BYTES
from nsan.torch_alloc.history import ALLOC, OOM, Entries
from nsan.torch_alloc.keeper import Keeper
from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.spans import SpanSet

_LOOK_AHEAD: Final = 16
"""Entries after a new segment among which the request that it was made for is searched."""


class Follower(Keeper):
    """A machine that does what a history says, one entry at a time.

    Parameters
    ----------
    machine : CachingAllocator
        In the state before the history.
    entries : Entries
        The history.
    reservations : SpanSet
        Addresses of expandable segments.
    pools : dict of (int, int) to str
        Pool of a segment by address and size, as far as the snapshot knows it.
    silent : set of int
        Requested frees that complete at once.
    n_held : int
        Blocks in use before the history.

    Attributes
    ----------
    n_allocs, n_addresses_exact, n_segments_made, n_segments_exact : int
        Entries, and those that the rules predicted: address; size and moment.
    n_skipped : int
        Entries without sense.
    first_difference : int, optional
        First entry that was not predicted.
    """

    def __init__(
        self,
        machine: CachingAllocator,
        entries: Entries,
        *,
        reservations: SpanSet,
        pools: dict[tuple[int, int], str],
        silent: set[int],
        n_held: int,
    ) -> None:
        super().__init__(machine, Books(n_held + entries.actions.count(ALLOC)))
        self.n_allocs = self.n_addresses_exact = 0
        self.n_segments_made = self.n_segments_exact = 0
        self.n_skipped = 0
        self.first_difference: int | None = None
        self._entries = entries
        self._reservations = reservations
        self._pools = pools
        named = {*entries.pools, *pools.values()} - {None}
        self._has_one_pool = named <= {DEFAULT_POOL}
        self._homes: dict[int, tuple[FreeList, FreeList]] = {}
        self._va, self._n_bytes, self._streams = entries.va, entries.n_bytes, entries.streams
        self._silent = silent
        self._fresh: Block | None = None
        # First byte and end of the blocks whose free was completed late, since the last allocation.
        self._late: list[tuple[int, int]] = []
        self._last_requested = self._last_end = NEVER

    # The entries.

    def run(self, stop: int) -> None:
        """Follow the entries before a place."""
        steps = (
            self._alloc,
            self._free_requested,
            self._free_completed,
            self._segment_alloc,
            self._segment_free,
            self._segment_map,
            self._segment_unmap,
            self._oom,
        )
        actions, machine, changes = self._entries.actions, self.machine, self.books.reserved_changes
        reserved = machine.reserved_bytes
        changes.append((NEVER, reserved))
        for at in range(stop):
            action = actions[at]
            if action <= OOM:
                steps[action](at)
                if machine.reserved_bytes != reserved:
                    changes.append((at, machine.reserved_bytes - reserved))
                    reserved = machine.reserved_bytes
        self.books.finish(self._entries, stop)

    def _alloc(self, at: int) -> None:
        machine, va, n_bytes = self.machine, self._va[at], self._n_bytes[at]
        rounded = machine.rounded(n_bytes)
        homes = self._homes.get(self._streams[at]) if self._has_one_pool else None
        if homes is None:
            homes = self._homes_of(at)
        home = homes[rounded <= machine.small_bytes]
        fit = self._fresh_fit(home, rounded) if self._fresh is not None else None
        if fit is None:
            fit = machine.find(home, rounded)
            if fit is None:
                fit = machine.expandable.ready(home, rounded)
        self.n_allocs += 1
        self._last_requested = NEVER
        if self._late:
            self._late.clear()
        if fit is not None and fit.va == va:
            self.n_addresses_exact += 1
            block = machine.take(fit, rounded, n_bytes)
        else:
            self._differs(at)
            block = self._claim(va, rounded, n_bytes, home, at)
        self.held[va] = block
        self.books.tensor(block)

    def _homes_of(self, at: int) -> tuple[FreeList, FreeList]:
        """Give the large and the small free list that serve an entry."""
        stream = self._streams[at]
        pool = DEFAULT_POOL if self._has_one_pool else self._pool_of(at)
        large, small = (
            self.machine.home(stream, pool, is_small=is_small) for is_small in (False, True)
        )
        if self._has_one_pool:
            self._homes[stream] = large, small
        return large, small

    def _fresh_fit(self, home: FreeList, rounded: int) -> Block | None:
        """Give the block of a segment that was just made for this request."""
        fresh = self._fresh
        if fresh is None or fresh.segment.home is not home:
            return None
        self._fresh = None
        return fresh if fresh.state == "free" and fresh.n_bytes >= rounded else None

    def _pool_of(self, at: int) -> str:
        """Give the pool that a request was routed to: recorded, or that of the segment it was served from."""
        pool = self._entries.pools[at]
        if pool is not None:
            return pool
        va = self._entries.va[at]
        segments = self.machine.segments_in(va, va + 1)
        return segments[0].pool if segments else DEFAULT_POOL

    def _free_requested(self, at: int) -> None:
        va = self._va[at]
        block = self.held.get(va)
        self._last_requested = va
        if block is None or block.state != "allocated":
            self.n_skipped += 1
            return
        self._requested[block.tag] = at
        self.machine.allocated_bytes -= block.n_bytes
        block.state = "pending"
        if self._silent and at in self._silent:
            self._complete(block, at)

    def _free_completed(self, at: int) -> None:
        va = self._va[at]
        block = self.held.get(va)
        if block is None:
            self.n_skipped += 1
            return
        self._last_end = va + block.n_bytes
        if va != self._last_requested:
            self._late.append((va, self._last_end))
        if block.state == "allocated":
            # Its request was not recorded.
            self._requested[block.tag] = at
            self.machine.allocated_bytes -= block.n_bytes
        self._complete(block, at)

    def _segment_alloc(self, at: int) -> None:
        entries, machine = self._entries, self.machine
        va, n_bytes = entries.va[at], entries.n_bytes[at]
        others = machine.segments_in(va, va + n_bytes)
        is_there = any(s.va == va and s.n_bytes == n_bytes for s in others)
        if n_bytes == 0 or (is_there and others[0] not in self._implied):
            self.n_skipped += 1
            return
        for other in others:
            self._drop(other, at)
        pool = entries.pools[at] or self._pools.get((va, n_bytes), DEFAULT_POOL)
        is_small = n_bytes == SMALL_SEGMENT_BYTES and machine.settings.is_caching
        home = machine.home(entries.streams[at], pool, is_small=is_small)
        rounded = self._request_after(at)
        is_exact = (
            rounded is not None
            and machine.segment_size(rounded) == n_bytes
            and self._is_needed(home, rounded)
        )
        self._judge(at, is_exact=is_exact)
        segment = machine.add_segment(va, n_bytes, home)
        self.books.segment(segment, at, n_bytes)
        self._fresh = segment.first

    def _request_after(self, at: int) -> int | None:
        """Find the rounded request for which a segment was made: the next of its stream."""
        entries = self._entries
        for place in range(at + 1, min(at + _LOOK_AHEAD, len(entries))):
            action = entries.actions[place]
            if action in {ALLOC, OOM} and entries.streams[place] == entries.streams[at]:
                n_bytes = entries.n_bytes[place]
                return n_bytes if action == OOM else self.machine.rounded(n_bytes)
        return None

    def _is_needed(self, home: FreeList, rounded: int) -> bool:
        """Tell whether no free block fits, or only one that was freed while the request waited."""
        if home.pool.is_small != (rounded <= self.machine.small_bytes):
            return False
        fit = self.machine.find(home, rounded)
        if fit is None:
            return True
        last = fit.va + fit.n_bytes
        return any(fit.va < end and va < last for va, end in self._late)

    def _segment_free(self, at: int) -> None:
        va = self._entries.va[at]
        found = self.machine.segments_in(va, va + 1)
        if not found or found[0].va != va or found[0].is_expandable:
            self.n_skipped += 1
            return
        self._drop(found[0], at)
        if self._last_requested != NEVER:
            # Segments go while a request waits for all streams: what was completed just before may be late.
            self._late.append((self._last_requested, self._last_end))

    def _segment_map(self, at: int) -> None:
        entries = self._entries
        va, n_bytes = entries.va[at], entries.n_bytes[at]
        if n_bytes == 0:
            self.n_skipped += 1
            return
        rounded = self._request_after(at)
        is_exact = rounded is not None and self._is_map_due(at, rounded)
        segment = self._reservation(at)
        unmapped = self.machine.expandable.unmapped_of(segment.home)
        parts = [b for b in unmapped if b.va < va + n_bytes and va < b.va + b.n_bytes]
        if not parts:
            self.n_skipped += 1
            return
        self._judge(at, is_exact=is_exact)
        for part in parts:
            first, end = max(va, part.va), min(va + n_bytes, part.va + part.n_bytes)
            self._fresh = self.machine.expandable.map_at(part, first, end - first)
            self._note_mapped(segment, end - first)

    def _is_map_due(self, at: int, rounded: int) -> bool:
        """Tell whether a request makes the machine map just these bytes."""
        entries, expandable = self._entries, self.machine.expandable
        va, n_bytes = entries.va[at], entries.n_bytes[at]
        span = self._reservations.at(va)
        if span is None or not self.machine.settings.expandable_segments:
            return False
        home = self.machine.home(
            entries.streams[at], entries.pools[at] or span.pool, is_small=span.is_small
        )
        is_growing = self._fresh is not None and self._fresh.segment.home is home
        if not is_growing and not self._is_needed(home, rounded):
            return False
        start = expandable.candidate(home, rounded)
        if start is not None and start.state == "free" and start.n_bytes >= rounded:
            return False
        if start is None:
            granule = expandable.granule(home)
            is_new = not self.machine.segments_in(va, va + 1)
            return is_new and n_bytes == -(-rounded // granule) * granule
        target, missing = expandable.missing(start, rounded)
        return (target.va, missing) == (va, n_bytes)

    def _reservation(self, at: int) -> Segment:
        """Give the expandable segment that an entry maps a part of; a new one if there is none."""
        entries, machine = self._entries, self.machine
        va, end = entries.va[at], entries.va[at] + entries.n_bytes[at]
        others = machine.segments_in(va, end)
        if len(others) == 1 and others[0].is_expandable and end <= others[0].va + others[0].n_bytes:
            return others[0]
        for other in others:
            self._drop(other, at)
        span = self._reservations.at(va)
        is_small = span.is_small if span else entries.n_bytes[at] == SMALL_SEGMENT_BYTES
        pool = entries.pools[at] or (span.pool if span else DEFAULT_POOL)
        home = machine.home(entries.streams[at], pool, is_small=is_small)
        end = max(end, span.end if span else end)
        following = machine.segments_in(va, end)
        end = min([end, *(other.va for other in following)])
        segment = machine.expandable.add_reservation(va, end - va, home)
        self.books.segment(segment, at, 0)
        return segment

    def _segment_unmap(self, at: int) -> None:
        va = self._entries.va[at]
        end = va + self._entries.n_bytes[at]
        # An empty range would cut a free block in two.
        found = [s for s in self.machine.segments_in(va, end) if s.is_expandable and va < end]
        n_before = self.machine.reserved_bytes
        for segment in found:
            for block in self._free_in(segment, va, end, at):
                # What is left of it fits only since: it may have been too large for the request before.
                self._late.append((block.va, block.va + block.n_bytes))
                first, last = max(va, block.va), min(end, block.va + block.n_bytes)
                self._unmap(block, first, last - first, at)
        if self.machine.reserved_bytes == n_before:
            self.n_skipped += 1

    def _oom(self, at: int) -> None:
        del at
        self._fresh = None

    # Comparison.

    def _judge(self, at: int, *, is_exact: bool) -> None:
        self.n_segments_made += 1
        self.n_segments_exact += is_exact
        if not is_exact:
            self._differs(at)

    def _differs(self, at: int) -> None:
        if self.first_difference is None:
            self.first_difference = at
