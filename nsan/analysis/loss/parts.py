"""Events of some blocks with what is known of the pages before each of them.

Three sets are known of a block before each event, page by page: what is at the GPU (the last row says
so), what was seen anywhere since the memory is in use, and what the next row of the page says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.loss.events import (
    ARRIVES,
    ELSEWHERE,
    LEAVES_GPU,
    POPULATED,
    RELEASED,
    Events,
)
from nsan.analysis.loss.masks import before_each, positions, runs_of_pages
from nsan.uvm.constants import CAUSE_COHERENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from nsan.analysis.loss.masks import Bools, Ints, Words

CHUNK_ROWS: Final = 100_000
"""Copies of a chunk: its sets stay near the processor."""
MOST_STEPS: Final = 10_000
"""How many events of a block are searched back."""

CAME_TWICE: Final = "came_twice"
LEFT_TWICE: Final = "left_twice"
NOT_BROUGHT: Final = "not_brought"
BROUGHT_TOO_MUCH: Final = "brought_too_much"
NO_COPY: Final = "fault_row_without_copy"
UNSEEN: Final = "unseen_pages"

FINDINGS: Final = pl.Schema(
    {
        "view": pl.Int64,
        "why": pl.String,
        "after_ns": pl.Int64,
        "before_ns": pl.Int64,
        "since_ns": pl.Int64,
        "n_pages": pl.Int64,
        "departs": pl.Boolean,
        "is_open": pl.Boolean,
        "is_solid": pl.Boolean,
        "block_ns": pl.Int64,
    }
)
"""One row per event that does not fit: where, why, the missing rows lie after and before these times
(null: unknown), probably, and for certain after ``since_ns``; pages that must have moved; whether these pages leave by copies at other times;
whether the missing rows may follow ``before_ns``, before the next row; first event of the block."""


@dataclass(frozen=True)
class Part:
    """Events of some blocks with their sets of pages, and what is known before each."""

    at: Ints
    """Positions in the events."""
    view: Ints
    kind: np.ndarray
    moved: Words
    faulted: Words
    here: Words
    """At the GPU by the last row."""
    seen: Words
    """Seen anywhere since the memory is in use."""
    comes: Words
    """The next row of the page says that it was not at the GPU."""

    @property
    def maybe(self) -> Words:
        """Pages that may be at the GPU, or be populated there, without a row."""
        return ~self.seen & ~self.comes


def chunks_of(events: Events) -> Iterator[tuple[int, int]]:
    """Cut the events between views so that the sets of each chunk fit into memory."""
    import numpy as np

    if not len(events):
        return
    weight = np.cumsum(events.last_row - events.first_row)
    starts = np.flatnonzero(np.concatenate([[True], events.view[1:] != events.view[:-1]]))
    begin = 0
    while begin < len(events):
        done = weight[begin - 1] if begin else 0
        most = np.searchsorted(weight, done + CHUNK_ROWS, side="right")
        at = np.searchsorted(starts, max(most, begin + 1), side="right") - 1
        end = int(starts[at]) if starts[at] > begin else -1
        if end < 0:
            after = np.searchsorted(starts, begin, side="right")
            end = int(starts[after]) if after < len(starts) else len(events)
        if most >= len(events):
            end = len(events)
        yield begin, end
        begin = end


def part_of(events: Events, first: int, last: int) -> Part:
    """Work out the sets of the events from ``first`` to ``last``."""
    import numpy as np

    span = slice(first, last)
    low, high = events.first_row[span], events.last_row[span]
    n = high - low
    ends = np.cumsum(n)
    rows = np.arange(ends[-1]) - np.repeat(ends - n, n) + np.repeat(low, n)
    sets = runs_of_pages(events.first_page[rows], events.last_page[rows])
    moved = np.bitwise_or.reduceat(sets, ends - n, axis=0)
    sets[events.cause[rows] != CAUSE_COHERENCE] = 0
    faulted = np.bitwise_or.reduceat(sets, ends - n, axis=0)
    kind, view = events.kind[span], events.view[span]
    nothing = np.uint64(0)

    def of(*kinds: int) -> Words:
        return np.where(np.isin(kind, kinds)[:, None], moved, nothing)

    released = of(RELEASED)
    keep = ~released if (kind == RELEASED).any() else None
    arrives, leaves = of(ARRIVES), of(LEAVES_GPU)
    stays = ~(released | leaves)
    here = before_each(view, arrives, stays)
    arrives |= of(ELSEWHERE, POPULATED)
    seen = before_each(view, arrives | leaves, keep)
    comes = before_each(view[::-1], arrives[::-1], stays[::-1])[::-1]
    return Part(np.arange(first, last), view, kind, moved, faulted, here, seen, comes)


def times_of(events: Events, part: Part, at: Ints) -> pl.Series:
    """Give the times of events; null for those numbered -1."""
    import numpy as np

    event = part.at[np.maximum(at, 0)]
    faulted = events.kind[event] == POPULATED
    times = pl.Series(np.where(faulted, events.until_ns[event], events.time_ns[event]))
    return times.set(pl.Series(at < 0, dtype=pl.Boolean), None)


def last_touch(part: Part, at: Ints, pages: Words) -> Ints:
    """Give the last event before each that has one of its pages; -1 for none."""
    import numpy as np

    found = np.full(len(at), -1, dtype=np.int64)
    moves = (part.kind == ARRIVES) | (part.kind == LEAVES_GPU) | (part.kind == POPULATED)
    # Only pages that were seen have an event to find.
    open_, step = np.flatnonzero((pages & part.seen[at]).any(axis=1)), 1
    place = positions(part.view)
    while len(open_) and step <= MOST_STEPS:
        open_ = open_[place[at[open_]] >= step]
        before = at[open_] - step
        touches = moves[before] & (part.moved[before] & pages[open_]).any(axis=1)
        found[open_[touches]] = before[touches]
        open_ = open_[~touches]
        step += 1
    return found


def fought(events: Events, part: Part) -> Bools:
    """Say whether faults took pages of the block from the GPU before: they may be thrashing."""
    return _any_before(part, (part.kind == LEAVES_GPU) & events.by_fault[part.at])


def has_several(events: Events, part: Part) -> Bools:
    """Say whether another GPU has the block at some time: a service is then several pushes."""
    import numpy as np

    other = (part.kind == ELSEWHERE) | events.between_gpus[part.at]
    views = np.unique(part.view[other])
    return np.isin(part.view, views)


def _any_before(part: Part, yes: Bools) -> Bools:
    import numpy as np

    total = np.cumsum(yes)
    first = np.arange(len(yes)) - positions(part.view)
    return (total - yes) > (total - yes)[first]
