"""What each push to a GPU had to bring by the density prefetcher's rule, and what it brought.

A page that nothing was seen of, and that does not come next, may have been touched first by the GPU
at any time: no row would say so. Every prediction is made with and without these pages; only what
both exclude is a contradiction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.loss.events import ARRIVES, Events
from nsan.analysis.loss.masks import (
    LEAF_PAGES,
    leaf_counts,
    n_pages,
    positions,
    whole_leaves,
)
from nsan.analysis.loss.parts import (
    BROUGHT_TOO_MUCH,
    FINDINGS,
    NOT_BROUGHT,
    UNSEEN,
    Part,
    fought,
    has_several,
    last_touch,
    times_of,
)
from nsan.uvm.prefetch import choose_leaves_of_many

if TYPE_CHECKING:
    from nsan.analysis.loss.masks import Bools, Ints, Words

THRESHOLD: Final = 51
OTHER_THRESHOLDS: Final = (1, 15, 25, 35, 45, 49, 54, 57, 60, 64, 68, 72, 75, 80, 85, 90, 95, 100)
"""Other settings of the prefetcher, each with pushes of its own kind."""
_SAMPLE: Final = 4096

REPLAYED: Final = pl.Schema(
    {
        "view": pl.Int64,
        "n_pushes": pl.Int64,
        "n_exact_pushes": pl.Int64,
        "n_headless_pushes": pl.Int64,
        "n_contradicted_pushes": pl.Int64,
        "n_prefetched_pushes": pl.Int64,
    }
)


def predictions(events: Events, part: Part) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Compare pushes that faults caused with what the prefetcher had to bring.

    Parameters
    ----------
    events : Events
        All events.
    part : Part
        Some of them, with what is known before each.

    Returns
    -------
    tuple of DataFrame
        Findings; counts of the schema ``REPLAYED``; ``view``, ``threshold``, ``missed`` of a sample.
    """
    testable = (part.kind == ARRIVES) & events.by_fault[part.at] & ~has_several(events, part)
    at = testable.nonzero()[0]
    moved, here, maybe = part.moved[at], part.here[at], part.maybe[at]
    hit = leaf_counts(part.faulted[at]) > 0
    comes = whole_leaves(_brought(here, hit, THRESHOLD)) & ~here
    exact = (comes == moved).all(axis=1)
    extra = moved.copy()
    extra[exact] = 0
    wrong = (~exact).nonzero()[0]
    extra[wrong] &= ~_most(here[wrong], hit[wrong], maybe[wrong])
    missing = comes & ~maybe & ~moved
    # The driver brings nothing along to pages that bounce.
    bounces = fought(events, part)[at]
    missing[bounces] = 0
    told = ~exact & ~(bounces & ~extra.any(axis=1))
    findings = _mismatches(events, part, at, exact, told, (extra, missing))
    counted = (
        pl.DataFrame(
            {
                "view": part.view[at],
                "n_exact_pushes": exact,
                "n_headless_pushes": ~hit.any(axis=1),
                "n_contradicted_pushes": extra.any(axis=1) | missing.any(axis=1),
                "n_prefetched_pushes": (moved & ~part.faulted[at]).any(axis=1),
            }
        )
        .group_by("view", maintain_order=True)
        .agg(pl.len().alias("n_pushes"), pl.exclude("view").sum())
        .select(pl.col(name).cast(dtype) for name, dtype in REPLAYED.items())
    )
    return findings, counted, _misses(part.view[at], hit, here, moved)


def _most(here: Words, hit: Bools, maybe: Words) -> Words:
    """Give the most that can come if doubtful pages are there, or fault without a row."""
    doubt = leaf_counts(maybe) > 0
    return whole_leaves(_brought(here, hit | doubt, THRESHOLD))


def _brought(here: Words, hit: Bools, threshold: int) -> Bools:
    """Give the leaves that are complete after a service: those that faulted, and the chosen ones."""
    import numpy as np

    pages = np.where(hit, np.uint8(LEAF_PAGES), leaf_counts(here))
    comes: Bools = hit | choose_leaves_of_many(pages, hit, LEAF_PAGES, threshold)
    return comes


def _misses(view: Ints, hit: Bools, here: Words, moved: Words) -> pl.DataFrame:
    """Count on a sample how many pushes each setting of the prefetcher fails to predict."""
    import numpy as np

    some = np.arange(0, len(view), max(len(view) // _SAMPLE, 1))
    view, hit, here, moved = view[some], hit[some], here[some], moved[some]
    parts = []
    for threshold in (THRESHOLD, *OTHER_THRESHOLDS):
        comes = whole_leaves(_brought(here, hit, threshold)) & ~here
        missed = (comes != moved).any(axis=1).astype(np.int64)
        parts.append(
            pl.DataFrame({"view": view, "threshold": threshold, "missed": missed}).cast(pl.Int64)
        )
    return pl.concat(parts)


def _mismatches(
    events: Events, part: Part, at: Ints, exact: Bools, told: Bools, sets: tuple[Words, Words]
) -> pl.DataFrame:
    """Write down pushes that are not exact, with the last exact one of their block before."""
    import numpy as np

    order = np.arange(len(at), dtype=np.int64)
    first = order - positions(part.view[at])
    last = np.maximum.accumulate(np.where(exact, order, -1)) if len(at) else order
    wrong = np.flatnonzero(told)
    before = np.where(last >= first, at[np.maximum(last, 0)], -1)[wrong]
    push, (extra, missing) = at[wrong], (pages[wrong] for pages in sets)
    too_much, too_little = extra.any(axis=1), missing.any(axis=1)
    why = np.where(too_much, BROUGHT_TOO_MUCH, np.where(too_little, NOT_BROUGHT, UNSEEN))
    start = push - positions(part.view)[push]
    seen, here = part.seen[push], part.here[push]
    # Without what only later rows say.
    hit = leaf_counts(part.faulted[push]) > 0
    firm = (part.moved[push] & ~_most(here, hit, ~seen)).any(axis=1)
    known = (missing & seen).any(axis=1)
    since = np.where(too_much, start, last_touch(part, push, missing))
    n = len(wrong)
    return pl.DataFrame(
        {
            "view": part.view[push],
            "why": why.astype(str).tolist(),
            "after_ns": times_of(events, part, before),
            # The end of a push may be among what is lost: then what is missing follows it.
            "before_ns": events.until_ns[part.at[push]],
            "since_ns": times_of(events, part, since),
            "n_pages": n_pages(missing),
            "departs": np.ones(n, bool),
            "is_open": np.ones(n, bool),
            "is_solid": np.where(too_much, firm, known),
            "block_ns": events.time_ns[part.at[start]],
        },
        schema=FINDINGS,
    )
