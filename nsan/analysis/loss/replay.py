"""The replay: where rows of the same pages contradict each other, or the prefetcher's rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from nsan.analysis.loss.events import (
    ARRIVES,
    FAULT_ROW,
    LEAVES_GPU,
    POPULATED,
    SETTLED_NS,
    Events,
)
from nsan.analysis.loss.masks import n_pages, positions
from nsan.analysis.loss.parts import (
    CAME_TWICE,
    FINDINGS,
    LEFT_TWICE,
    NO_COPY,
    Part,
    chunks_of,
    fought,
    has_several,
    last_touch,
    part_of,
    times_of,
)
from nsan.analysis.loss.predictions import REPLAYED, predictions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nsan.analysis.loss.masks import Bools, Ints, Words


@dataclass(frozen=True)
class Replay:
    """What the replay of all blocks gave: findings, counts by view, and misses by threshold."""

    findings: pl.DataFrame
    counts: pl.DataFrame
    misses: pl.DataFrame


def replay(events: Events) -> Replay:
    """Replay all blocks.

    Parameters
    ----------
    events : Events
        What happened to each block, as seen from each GPU.

    Returns
    -------
    Replay
        Findings of the schema ``FINDINGS``; counts of the schema ``REPLAYED``, one row per view that
        has pushes to check; misses: by ``view`` and ``threshold``, how many of the sampled pushes, and
        whether any of the block, are not as predicted.
    """
    findings, counts, misses = [FINDINGS.to_frame()], [REPLAYED.to_frame()], []
    for first, last in chunks_of(events):
        part = part_of(events, first, last)
        findings.extend(_moved_twice(events, part))
        findings.append(_fault_rows(events, part))
        found, counted, missed = predictions(events, part)
        findings.append(found)
        counts.append(counted)
        misses.append(missed)
    empty = pl.DataFrame(schema=dict.fromkeys(("view", "threshold", "missed"), pl.Int64))
    return Replay(
        pl.concat(findings),
        pl.concat(counts),
        pl.concat([empty, *misses])
        .group_by("view", "threshold")
        .agg(
            n_sampled=pl.len(),
            n_missed=pl.col("missed").sum(),
            n_blocks=pl.lit(1, pl.Int64),
            n_missed_blocks=pl.col("missed").max(),
        ),
    )


def _moved_twice(events: Events, part: Part) -> Iterator[pl.DataFrame]:
    """Find pages that came where they were, or left from where they were not."""
    import numpy as np

    comes = np.flatnonzero(part.kind == ARRIVES)
    wrong = part.moved[comes] & part.here[comes]
    comes, wrong = _nonempty(comes, wrong)
    yield _found(events, part, comes, wrong, CAME_TWICE)
    leaves = np.flatnonzero(part.kind == LEAVES_GPU)
    wrong = part.moved[leaves] & part.seen[leaves] & ~part.here[leaves]
    leaves, wrong = _nonempty(leaves, wrong)
    # Threads may fault side by side: the copy of a fault can follow another thread's next one.
    last = np.maximum(last_touch(part, leaves, wrong), 0)
    fresh = events.time_ns[part.at[leaves]] - events.time_ns[part.at[last]] < SETTLED_NS
    sure = ~(fresh & (part.kind[last] == POPULATED))
    yield _found(events, part, leaves[sure], wrong[sure], LEFT_TWICE)


def _nonempty(at: Ints, sets: Words) -> tuple[Ints, Words]:
    some = sets.any(axis=1)
    return at[some], sets[some]


def _found(events: Events, part: Part, at: Ints, pages: Words, why: str) -> pl.DataFrame:
    """Say of events where their pages moved last."""
    import numpy as np

    last = last_touch(part, at, pages)
    after = times_of(events, part, last)
    first = at - positions(part.view)[at]
    return pl.DataFrame(
        {
            "view": part.view[at],
            "why": [why] * len(at),
            "after_ns": after,
            "before_ns": events.time_ns[part.at[at]],
            "since_ns": after,
            "n_pages": n_pages(pages),
            "departs": _departs(part, at, pages) if why == CAME_TWICE else np.ones(len(at), bool),
            "is_open": np.zeros(len(at), bool),
            "is_solid": (pages & part.seen[at]).any(axis=1),
            "block_ns": events.time_ns[part.at[first]],
        },
        schema=FINDINGS,
    )


def _departs(part: Part, at: Ints, pages: Words) -> Bools:
    """Say whether any of the pages leaves the GPU by a copy at some time.

    Copies of read-mostly data do not: the GPU's are dropped without a row.
    """
    import numpy as np

    views = np.unique(part.view[at])
    leaves = np.flatnonzero((part.kind == LEAVES_GPU) & np.isin(part.view, views))
    left = np.zeros((len(views), part.moved.shape[1]), dtype=np.uint64)
    np.bitwise_or.at(left, np.searchsorted(views, part.view[leaves]), part.moved[leaves])
    theirs: Words = left[np.searchsorted(views, part.view[at])]
    return n_pages(theirs & pages) > 0


def _fault_rows(events: Events, part: Part) -> pl.DataFrame:
    """Find fault rows whose page is known to be elsewhere when the batch is done."""
    import numpy as np

    rows = np.flatnonzero(part.kind == FAULT_ROW)
    known = (part.seen | part.comes)[rows]
    wrong = part.moved[rows] & known & ~part.here[rows]
    rows, wrong = _nonempty(rows, wrong)
    calm = ~fought(events, part)[rows] & ~has_several(events, part)[rows]
    begin = events.until_ns[part.at[rows]]
    # The page may have come in the window and left again for another block of the batch.
    last = last_touch(part, rows, wrong)
    touched = (last >= 0) & (events.time_ns[part.at[np.maximum(last, 0)]] >= begin)
    sure = calm & ~touched
    rows, wrong, begin = rows[sure], wrong[sure], begin[sure]
    found = _found(events, part, rows, wrong, NO_COPY)
    window = pl.Series(begin, dtype=pl.Int64)
    return found.with_columns(after_ns=window, since_ns=window)
