"""From rows that do not fit to holes: the silences in which rows must be missing, and their size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.uvm.constants import PAGE_BYTES

if TYPE_CHECKING:
    from nsan.analysis.loss.masks import Bools, Ints

MAX_HOLES: Final = 64
"""A process with more places that do not fit is not understood, rather than full of holes."""
STANDS_OUT: Final = 2
"""A silence stands out where it is this many times as long as the next one between the same rows."""
UNUSUAL: Final = 4
"""A silence is unusual where it is this many times the longest other one of its kernels."""
LEAST_GAPS: Final = 20
"""Fewer silences do not show what is usual."""
NEARLY_ALL: Final = 0.9
"""Share of the doubtful findings that one silence must explain to be likely."""
CLOCK_SLACK_NS: Final = 100_000
"""Kernels may seem later than their first fault (65 us were measured)."""

HOLES: Final = pl.Schema(
    {
        "pid": pl.UInt32,
        "device_id": pl.Int64,
        "start_ns": pl.Int64,
        "end_ns": pl.Int64,
        "earliest_ns": pl.Int64,
        "latest_ns": pl.Int64,
        "is_silent": pl.Boolean,
        "evidence": pl.String,
        "n_pushes": pl.Int64,
        "least_bytes": pl.Int64,
        "lost_bytes": pl.Int64,
        "level": pl.String,
    }
)


@dataclass(frozen=True)
class Rows:
    """The rows of one process, in order: starts of all, and the copies of one GPU with their bytes."""

    starts: Ints
    reach: Ints
    """End of the last copy up to each of the starts."""
    copy_starts: Ints
    copied: Ints
    """Bytes of all copies up to each, with a 0 in front."""
    kernels: Ints
    """(n, 2): when kernels of the GPU ran, merged, ascending."""


def holes_of(findings: pl.DataFrame, rows: Rows, *, known: bool) -> pl.DataFrame:
    """Find the fewest silences of one process and GPU that explain all that does not fit.

    Parameters
    ----------
    findings : DataFrame
        ``why``, ``after_ns`` (null: unknown), ``before_ns``, ``n_pages``, ``hard``: nothing but lost
        rows explains it.
    rows : Rows
        Rows of the process.
    known : bool
        The program's calls are known: it gave no advice and released nothing unseen.

    Returns
    -------
    DataFrame
        As ``HOLES``, without ``pid`` and ``device_id``, in order of time.
    """
    hard, soft = findings.filter("hard"), findings.filter(~pl.col("hard"))
    if hard.is_empty():
        return _doubtful(soft, rows)
    import numpy as np

    first = int(rows.starts[0])
    since, high = hard["since_ns"].fill_null(first).to_numpy(), _until(hard, rows)
    low = hard["after_ns"].fill_null(first).to_numpy()
    solid = hard["is_solid"].to_numpy()
    # What rests on later rows too may be explained by what is lost before those.
    upto = np.where(solid, high, int(rows.starts[-1]))
    left = np.ones(len(hard), dtype=bool)
    found: list[pl.DataFrame] = []
    while left.any():
        if len(found) == MAX_HOLES:
            return _empty()
        now = left & solid if (left & solid).any() else left
        mine, hole = _next_hole(low, high, now, rows)
        mine |= left & (since <= hole.start_ns) & (upto >= hole.end_ns)
        bounds = int(since[mine].max()), int(upto[mine].min())
        if known and hole.is_silent and _is_ordinary(rows, hole):
            # Rows are missing for certain, but a pause as long as others is no sign of where.
            hole = Hole(bounds[0], max(bounds), is_silent=False)
        one = _judged(hard.filter(pl.Series(mine)), soft, rows, hole, known=known)
        found.append(_bounded(one, bounds, hole))
        left &= ~mine
    order = _empty().columns
    return pl.concat([each.select(order) for each in found])


def _bounded(holes: pl.DataFrame, bounds: tuple[int, int], hole: Hole) -> pl.DataFrame:
    """Say between which times rows are missing, whatever silence was chosen."""
    low, high = min(bounds[0], hole.start_ns), max(bounds[1], hole.end_ns)
    return holes.with_columns(earliest_ns=pl.lit(low, pl.Int64), latest_ns=pl.lit(high, pl.Int64))


def _next_hole(low: Ints, high: Ints, left: Bools, rows: Rows) -> tuple[Bools, Hole]:
    """Find the hole that the finding with the earliest end needs, and those that share it."""
    point = high[left].min()
    mine = left & ((low < point) | (high <= point))
    return mine, _silence(rows, int(low[mine].max()), int(point))


def _until(findings: pl.DataFrame, rows: Rows) -> Ints:
    """Give the times before which rows are missing.

    Of a push that brought too little it may be the end: then they are missing behind it, before the
    next row.
    """
    import numpy as np

    before = findings["before_ns"].to_numpy()
    following = np.searchsorted(rows.starts, before, side="right")
    later = rows.starts[np.minimum(following, len(rows.starts) - 1)]
    return np.where(findings["is_open"].to_numpy() & (later > before), later, before)


def _empty() -> pl.DataFrame:
    return pl.DataFrame(schema={k: v for k, v in HOLES.items() if k not in {"pid", "device_id"}})


@dataclass(frozen=True)
class Hole:
    """A stretch of time in which rows are missing; ``is_silent``: no row is in it."""

    start_ns: int
    end_ns: int
    is_silent: bool


def _silence(rows: Rows, low: int, high: int) -> Hole:
    """Find the silence between two times that stands out, or else give these times."""
    import numpy as np

    first = max(int(np.searchsorted(rows.starts, low, side="right")) - 1, 0)
    last = int(np.searchsorted(rows.starts, high, side="left"))
    last = min(max(last, first + 1), len(rows.starts) - 1)
    gaps = rows.starts[first + 1 : last + 1] - rows.starts[first:last]
    if not len(gaps):
        return Hole(low, max(low, high), is_silent=False)
    at = first + int(gaps.argmax())
    if len(gaps) > 1 and np.partition(gaps, -2)[-2] * STANDS_OUT > gaps.max():
        return Hole(low, max(low, high), is_silent=False)
    end = int(rows.starts[at + 1])
    return Hole(min(int(rows.reach[at]), end), end, is_silent=True)


def _in_kernel(rows: Rows, hole: Hole) -> bool:
    """Say whether a kernel runs all through a silence."""
    begin, end = rows.kernels[:, 0] - CLOCK_SLACK_NS, rows.kernels[:, 1] + CLOCK_SLACK_NS
    return bool(((begin <= hole.start_ns) & (end >= hole.end_ns)).any())


def _judged(
    hard: pl.DataFrame, soft: pl.DataFrame, rows: Rows, hole: Hole, *, known: bool
) -> pl.DataFrame:
    """Describe a hole, with the doubtful findings that it explains too; nothing if it is unsure."""
    sure = known or (hole.is_silent and _in_kernel(rows, hole) and _is_unusual(rows, hole))
    if not sure:
        return _empty().drop("earliest_ns", "latest_ns")
    beside = (pl.col("after_ns").fill_null(0) <= hole.start_ns) & (
        pl.col("before_ns") >= hole.end_ns
    )
    members = pl.concat([hard, soft.filter(beside)])
    return _described(members, rows, hole, "certain" if known else "likely")


def _doubtful(soft: pl.DataFrame, rows: Rows) -> pl.DataFrame:
    """Find a silence that explains what first touch would explain too, if it is the likelier one.

    It must be the only place that nearly all of it needs, lie in a kernel, and be far longer than
    any other silence there.
    """
    import numpy as np

    if soft.is_empty():
        return _empty()
    low = soft["after_ns"].fill_null(int(rows.starts[0])).to_numpy()
    high = _until(soft, rows)
    begun, ended = (np.searchsorted(np.sort(side), high) for side in (low, high))
    point = int(high[(begun - ended).argmax()])
    mine = (low < point) & (high >= point)
    if mine.mean() < NEARLY_ALL:
        return _empty()
    hole = _silence(rows, int(low[mine].max()), int(high[mine].min()))
    if not (hole.is_silent and _in_kernel(rows, hole) and _is_unusual(rows, hole)):
        return _empty()
    found = _described(soft.filter(pl.Series(mine)), rows, hole, "likely")
    return _bounded(found, (hole.start_ns, hole.end_ns), hole).select(_empty().columns)


def _is_unusual(rows: Rows, hole: Hole) -> bool:
    """Say whether a silence is far longer than the others while the same kernels ran."""
    others = _other_gaps(rows, hole)
    return len(others) >= LEAST_GAPS and _length(hole) >= UNUSUAL * others[-1]


def _is_ordinary(rows: Rows, hole: Hole) -> bool:
    """Say whether a silence is for certain like the others while the same kernels ran."""
    others = _other_gaps(rows, hole)
    return len(others) >= LEAST_GAPS and _length(hole) < UNUSUAL * others[-1]


def _length(hole: Hole) -> int:
    return hole.end_ns - hole.start_ns


def _other_gaps(rows: Rows, hole: Hole) -> Ints:
    """Sort the pauses between copies while the kernels of a silence ran, but for the longest."""
    import numpy as np

    begin, end = rows.kernels[:, 0] - CLOCK_SLACK_NS, rows.kernels[:, 1] + CLOCK_SLACK_NS
    over = rows.kernels[(begin <= hole.end_ns) & (end >= hole.start_ns)]
    if not len(over):
        return np.zeros(0, np.int64)
    low, high = over[:, 0].min(), over[:, 1].max()
    # Between copies: the first fault of a kernel comes long before the first of them.
    starts = rows.copy_starts[(rows.copy_starts >= low) & (rows.copy_starts <= high)]
    return np.sort(starts[1:] - starts[:-1])[:-1]


def _described(members: pl.DataFrame, rows: Rows, hole: Hole, level: str) -> pl.DataFrame:
    least = int(members["n_pages"].sum()) * PAGE_BYTES
    return pl.DataFrame(
        {
            "start_ns": hole.start_ns,
            "end_ns": hole.end_ns,
            "is_silent": hole.is_silent,
            "evidence": ", ".join(sorted(set(members["why"]))),
            "n_pushes": len(members),
            "least_bytes": least,
            "lost_bytes": max(least, _rate_bytes(rows, hole)),
            "level": level,
        },
    ).cast({"start_ns": pl.Int64, "end_ns": pl.Int64})


def _rate_bytes(rows: Rows, hole: Hole) -> int:
    """Say what would have moved in a silence at the rate before it.

    Taken over as long a time before it, and no longer than the kernel ran.
    """
    import numpy as np

    begin, end = hole.start_ns, hole.end_ns
    running = rows.kernels[(rows.kernels[:, 0] < begin) & (rows.kernels[:, 1] >= begin), 0]
    since = max(2 * begin - end, int(running.max()) if len(running) else int(rows.starts[0]))
    if not hole.is_silent or since >= begin:
        return 0
    first, last = np.searchsorted(rows.copy_starts, [since, begin])
    moved = int(rows.copied[last] - rows.copied[first])
    return moved * (end - begin) // (begin - since)
