"""Ping-pong: pages that faults move to and fro between processors, and the histories of pages.

The driver calls it thrashing. Evictions are no part of it: pages that leave for want of room and come
back are refaults (:mod:`nsan.analysis.memory.refaults`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.driver.pushes import with_push_id
from nsan.analysis.memory.page_histories import Pieces, gpus_of, in_time_order, pieces_of
from nsan.analysis.result import KIND, PID, Result, derived, reconstructed
from nsan.uvm.constants import CAUSE_COHERENCE, CAUSE_PREFETCH, VA_BLOCK_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

BY_FAULT: Final = (CAUSE_COHERENCE, CAUSE_PREFETCH)
"""Causes of a move that a page fault made; where no cause is recorded it may have."""

_READS: Final = (
    "start_ns",
    "end_ns",
    "pid",
    "device_id",
    "va",
    "bytes",
    "direction",
    "cause_id",
    "src_device_id",
    "sequence",
)
_FIGURES: Final = (
    derived(
        "n_moves",
        pl.Int64,
        "moves",
        "Longest chain of moves, each to another processor and within the window of the one before.",
    ),
    derived("n_chains", pl.Int64, "chains", "Chains of two moves or more."),
    derived("n_moves_total", pl.Int64, "moves", "Moves of a page in all of them."),
    derived("first_ns", pl.Int64, "ns", "Start of the first move of the first chain."),
    derived("last_ns", pl.Int64, "ns", "End of the last move of the last chain."),
)
_KIND: Final = derived(
    "kind",
    KIND,
    "label",
    "derived; reconstructed where a move has no recorded cause, and may be no fault's.",
)

PING_PONG: Final = Result(
    "ping_pong",
    "one run of pages with an equal history that went to and fro",
    (
        PID,
        derived("va", pl.UInt64, "byte address", "Lowest byte."),
        derived("bytes", pl.Int64, "byte", "Size of the run."),
        *_FIGURES,
        derived("moved_bytes", pl.Int64, "byte", "Moved in these chains."),
        derived("processors", pl.String, "text", "Where the pages came to in these chains."),
        reconstructed(
            "n_counted_moves",
            pl.Int64,
            "moves",
            "Longest part of a chain that the driver counts: it begins after two processors have "
            "moved pages of the VA block within the window.",
        ),
        reconstructed(
            "is_thrashing",
            pl.Boolean,
            "flag",
            "`n_counted_moves` reaches the threshold: the driver would act.",
        ),
        _KIND,
    ),
    nothing="No page was moved to and fro by faults within the window.",
)

PING_PONG_BY_VA_BLOCK: Final = Result(
    "ping_pong_by_va_block",
    "one VA block with pages that went to and fro",
    (
        PID,
        derived("va_block", pl.UInt64, "id", "VA block: address // 2 MiB."),
        derived("bytes", pl.Int64, "byte", "Pages of the block that went to and fro."),
        derived("thrashing_bytes", pl.Int64, "byte", "Those that reach the threshold."),
        derived("moved_bytes", pl.Int64, "byte", "Moved in their chains."),
        derived("n_moves", pl.Int64, "moves", "Longest chain of a page."),
        derived("first_ns", pl.Int64, "ns", "Start of the first move."),
        derived("last_ns", pl.Int64, "ns", "End of the last move."),
        _KIND,
    ),
)


@analysis(
    question="Which pages bounce between processors?",
    result=PING_PONG,
    reads={"migrations": _READS},
    source="domain.md E-14, C.5; fault_rows.md 2.6",
)
def ping_pong(
    migrations: pl.LazyFrame, *, window_ns: int = 500_000, threshold: int = 3
) -> pl.LazyFrame:
    """Find pages that faults move to another processor again and again, each time soon.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order. Causes 2 and 3 count, and rows without a cause.
    window_ns : int, default 500_000
        Longest time between the starts of two moves of a chain, ns; the driver's lapse, which newer
        drivers adapt.
    threshold : int, default 3
        Counted moves from which on a page is thrashing, as for the driver.

    Returns
    -------
    LazyFrame, ``PING_PONG``
        One row per run of neighbouring pages that the same copies moved, ordered by process and
        address; each page is in one row at most.

    Examples
    --------
    >>> from nsan.schema import MIGRATIONS
    >>> ping_pong(MIGRATIONS.empty()).collect().height
    0
    """
    rows = migrations.select(_READS)
    return PING_PONG.from_rows(lambda: _bouncing(rows.collect(), window_ns, threshold))


@analysis(
    question="Which VA blocks hold pages that bounce between processors?",
    result=PING_PONG_BY_VA_BLOCK,
    reads={"migrations": _READS},
    source="domain.md E-14",
)
def ping_pong_by_va_block(
    migrations: pl.LazyFrame, *, window_ns: int = 500_000, threshold: int = 3
) -> pl.LazyFrame:
    """Add up ping-pong by VA block.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    window_ns : int, default 500_000
        As in :func:`ping_pong`, ns.
    threshold : int, default 3
        As in :func:`ping_pong`.

    Returns
    -------
    LazyFrame, ``PING_PONG_BY_VA_BLOCK``
        One row per process and VA block, ordered by both. Bytes add up to those of the runs.
    """
    certain = (pl.col("kind") == "derived").all()
    return (
        # No copy, and so no run, crosses the border of a VA block.
        ping_pong(migrations, window_ns=window_ns, threshold=threshold)
        .group_by("pid", va_block=pl.col("va") // VA_BLOCK_BYTES)
        .agg(
            pl.col("bytes", "moved_bytes").sum(),
            pl.col("n_moves", "last_ns").max(),
            pl.col("first_ns").min(),
            thrashing_bytes=pl.col("bytes").filter("is_thrashing").sum(),
            kind=pl.when(certain).then(pl.lit("derived")).otherwise(pl.lit("reconstructed")),
        )
        .sort("pid", "va_block")
        .select(PING_PONG_BY_VA_BLOCK.cast())
    )


def _bouncing(migrations: pl.DataFrame, window_ns: int, threshold: int) -> pl.DataFrame:
    cause = pl.col("cause_id")
    by_fault = migrations.filter(cause.is_null() | cause.is_in([0, *BY_FAULT]))
    rows = in_time_order(by_fault.filter(pl.col("direction").is_not_null()))
    gpus, comes_to, _ = gpus_of(rows)
    pieces = pieces_of(rows)
    moves = _counted(_chained(rows, comes_to, pieces, window_ns), rows, comes_to, window_ns)
    pages = _by_segment(moves)
    places = pages["segment"].to_numpy()
    pages = pages.with_columns(
        va=pl.Series(pieces.va[places]), bytes=pl.Series(pieces.size[places])
    )
    same = ["n_moves", "n_counted_moves", "n_chains", "n_moves_total", "first_row", "last_row"]
    goes_on = pl.all_horizontal(pl.col(name) == pl.col(name).shift(1) for name in same)
    follows = pl.col("segment") == pl.col("segment").shift(1) + 1
    runs = (
        pages.with_columns(run=(goes_on & follows).fill_null(value=False).not_().cum_sum())
        .group_by("run", maintain_order=True)
        .agg(
            pl.exclude("bytes", "run").first(),
            pl.col("bytes").sum(),
        )
        .join(_places(moves, gpus), on="segment", how="left", maintain_order="left")
    )
    return runs.with_columns(
        pid=rows["pid"].gather(runs["first_row"]),
        moved_bytes=pl.col("bytes") * pl.col("n_moves_total"),
        is_thrashing=pl.col("n_counted_moves") >= threshold,
        kind=pl.when("unsure").then(pl.lit("reconstructed")).otherwise(pl.lit("derived")),
    ).sort("pid", "va")


def _chained(rows: pl.DataFrame, comes_to: Ints, pieces: Pieces, window_ns: int) -> pl.DataFrame:
    """Find the moves in chains of two or more, by segment and time."""
    import numpy as np

    n = max(rows.height, 1)
    segment, row = np.divmod(np.sort(pieces.segment * n + pieces.row), n)
    start, to = rows["start_ns"].to_numpy()[row], comes_to[row]
    goes_on = np.zeros(len(row), bool)
    goes_on[1:] = (
        (segment[1:] == segment[:-1]) & (start[1:] - start[:-1] <= window_ns) & (to[1:] != to[:-1])
    )
    # A move belongs to a chain of two or more if it goes on from one, or the next goes on from it.
    kept = goes_on.copy()
    kept[:-1] |= goes_on[1:]
    chain = np.cumsum(~goes_on)
    moves = {"segment": segment[kept], "chain": chain[kept], "row": row[kept], "to": to[kept]}
    found = pl.DataFrame(moves, schema=dict.fromkeys(moves, pl.Int64))
    return found.with_columns(
        start_ns=rows["start_ns"].gather(found["row"]),
        end_ns=rows["end_ns"].gather(found["row"]),
        unsure=rows["cause_id"].gather(found["row"]).fill_null(0) == 0,
    )


def _counted(
    moves: pl.DataFrame, rows: pl.DataFrame, comes_to: Ints, window_ns: int
) -> pl.DataFrame:
    """Say for each move whether the driver counts it.

    It begins to count in a VA block once two processors have moved pages of it within the window, and
    not with that service itself: three real traces show pages found thrashing at their fifth move in
    blocks that were quiet before.
    """
    numbered = rows.with_columns(
        row=pl.int_range(pl.len(), dtype=pl.Int64), to=pl.Series(comes_to, dtype=pl.Int64)
    )
    place = ["pid", "va_block"]
    block = pl.col("va") // VA_BLOCK_BYTES
    busy = numbered.filter(pl.col("row").is_in(moves["row"].implode())).select(
        "pid", va_block=block
    )
    near = numbered.with_columns(va_block=block).join(
        busy.unique(), on=place, how="semi", nulls_equal=True
    )
    pushed = with_push_id(near.drop("va_block").lazy()).collect()
    services = (
        pushed.group_by("push_id", *place, "to")
        .agg(pl.col("start_ns", "row").min())
        .sort(*place, "row")
        .with_columns(
            met=(pl.col("to") != pl.col("to").shift(1).over(place))
            & (pl.col("start_ns") - pl.col("start_ns").shift(1).over(place) <= window_ns)
        )
        .with_columns(
            counted=pl.col("met").fill_null(value=False).cum_sum().shift(1).over(place) > 0
        )
        .select("push_id", pl.col("counted").fill_null(value=False))
    )
    known = pushed.select("row", "push_id").join(services, on="push_id").select("row", "counted")
    return moves.join(known, on="row", how="left", maintain_order="left")


def _by_segment(moves: pl.DataFrame) -> pl.DataFrame:
    chains = moves.group_by("segment", "chain").agg(
        pl.len().cast(pl.Int64).alias("n"),
        pl.col("counted").sum().cast(pl.Int64),
        pl.col("start_ns", "row").first().name.prefix("first_"),
        pl.col("row").last().name.prefix("last_"),
        pl.col("end_ns").max(),
        pl.col("unsure").any(),
    )
    return (
        chains.group_by("segment")
        .agg(
            n_moves=pl.col("n").max(),
            n_counted_moves=pl.col("counted").max(),
            n_chains=pl.len().cast(pl.Int64),
            n_moves_total=pl.col("n").sum(),
            first_row=pl.col("first_row").min(),
            last_row=pl.col("last_row").max(),
            first_ns=pl.col("first_start_ns").min(),
            last_ns=pl.col("end_ns").max(),
            unsure=pl.col("unsure").any(),
        )
        .sort("segment")
    )


def _places(moves: pl.DataFrame, gpus: pl.DataFrame) -> pl.DataFrame:
    """Name the processors that the moves of a segment come to."""
    number = pl.col("device_id").cast(pl.String).fill_null("?")
    names = pl.concat(
        [
            pl.DataFrame({"to": [-1], "name": ["CPU"]}),
            gpus.select(
                to=pl.int_range(pl.len(), dtype=pl.Int64), name=pl.format("GPU {}", number)
            ),
        ]
    )
    return (
        moves.select("segment", "to")
        .unique()
        .join(names, on="to", how="left")
        .sort("segment", "to")
        .group_by("segment", maintain_order=True)
        .agg(processors=pl.col("name").str.join(", "))
    )
