"""Refaults: pages that were evicted for want of room and came back (capacity thrash).

Not ping-pong (:mod:`nsan.analysis.memory.ping_pong`), where processors fight over pages. The driver reports
neither evictions nor refaults as such: evictions are copies to the CPU with cause 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.driver.pushes import with_push_id
from nsan.analysis.keeping import once
from nsan.analysis.memory.page_histories import gpus_of, in_time_order, pieces_of, with_life
from nsan.analysis.memory.ping_pong import BY_FAULT
from nsan.analysis.result import DEVICE, PID, Result, derived, recorded
from nsan.uvm.constants import CAUSE_EVICTION

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_READS: Final = {
    "migrations": (
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
    ),
    "allocations": ("alloc_ns", "free_ns", "pid", "va", "bytes", "kind"),
}

REFAULTS: Final = Result(
    "refaults",
    "one run of pages that one eviction took from a GPU and one push brought back to a GPU",
    (
        PID,
        recorded("device_id", pl.Int64, "id", "GPU that the pages were evicted from."),
        derived("to_device_id", pl.Int64, "id", "GPU that they came back to."),
        derived("va", pl.UInt64, "byte address", "Lowest byte of the run."),
        derived("bytes", pl.Int64, "byte", "Its size."),
        derived("evicted_ns", pl.Int64, "ns", "End of the eviction's push."),
        derived("time_ns", pl.Int64, "ns", "End of the push that brought them back."),
        derived("distance_ns", pl.Int64, "ns", "Between the two."),
        derived(
            "distance_bytes",
            pl.Int64,
            "byte",
            "Came to the GPU that evicted in between: after the eviction, before the push began.",
        ),
        derived(
            "is_by_fault",
            pl.Boolean,
            "flag",
            "Page faults brought them back; null: no cause recorded.",
        ),
        derived("is_same_device", pl.Boolean, "flag", "Back on the GPU that evicted: a refault."),
        derived("is_premature", pl.Boolean, "flag", "A refault within `premature_ns`."),
    ),
    nothing="Nothing that was evicted came back.",
)

_AMOUNTS: Final = (
    derived("evicted_bytes", pl.Int64, "byte", "Evicted."),
    derived("refaulted_bytes", pl.Int64, "byte", "Of these, came back to this GPU."),
    derived("premature_bytes", pl.Int64, "byte", "Of the refaulted, within `premature_ns`."),
    derived("elsewhere_bytes", pl.Int64, "byte", "Of the evicted, came to another GPU instead."),
    derived(
        "unreturned_bytes",
        pl.Int64,
        "byte",
        "The rest: not back before the capture ends, released, or evicted again unseen.",
    ),
)

EVICTIONS: Final = Result(
    "evictions",
    "one eviction: a push of one VA block to the CPU to make room",
    (
        PID,
        DEVICE,
        derived("eviction_id", pl.Int64, "id", "Number of the eviction by start, from 0."),
        derived("va_block", pl.UInt64, "id", "VA block: address // 2 MiB."),
        derived("start_ns", pl.Int64, "ns", "Start of its first copy."),
        derived("end_ns", pl.Int64, "ns", "End of its last copy."),
        *_AMOUNTS,
        derived("back_ns", pl.Int64, "ns", "First refault of a page of it; null: none."),
    ),
    nothing="Nothing was evicted: GPU memory was never full.",
)

_SHARE: Final = derived("refaulted_fraction", pl.Float64, "fraction", "Refaulted of evicted bytes.")

REFAULTS_BY_VA_BLOCK: Final = Result(
    "refaults_by_va_block",
    "one VA block on one GPU that was evicted",
    (
        PID,
        DEVICE,
        derived("va_block", pl.UInt64, "id", "VA block: address // 2 MiB."),
        derived("n_evictions", pl.Int64, "evictions", "Its evictions."),
        *_AMOUNTS,
        _SHARE,
        derived("first_evicted_ns", pl.Int64, "ns", "Start of the first eviction."),
        derived("last_evicted_ns", pl.Int64, "ns", "End of the last eviction."),
    ),
)

REFAULT_TOTALS: Final = Result(
    "refault_totals",
    "one GPU of one process that evicted",
    (
        PID,
        DEVICE,
        derived("n_evictions", pl.Int64, "evictions", "Evictions."),
        derived("n_va_blocks", pl.Int64, "VA blocks", "Different VA blocks evicted."),
        *_AMOUNTS,
        _SHARE,
    ),
)


@analysis(
    question="Which pages were evicted and came back, how soon?",
    result=REFAULTS,
    reads=_READS,
    source="domain.md E-12",
    whole=True,
)
def refaults(
    migrations: pl.LazyFrame, allocations: pl.LazyFrame, *, premature_ns: int = 1_000_000_000
) -> pl.LazyFrame:
    """Follow every evicted page to its first later arrival at any GPU.

    An eviction counts once: a page that comes to another GPU first is no refault, and what happens
    to it later is not about that eviction.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order; evictions are those of cause 4 to the CPU.
    allocations : LazyFrame, ``ALLOCATIONS``
        What is released does not come back, even if its address does.
    premature_ns : int, default 1_000_000_000
        Shorter distances, ns, are premature.

    Returns
    -------
    LazyFrame, ``REFAULTS``
        One row per run of pages with the same eviction and the same push back, ordered by process,
        GPU, time of return, eviction and address. Pages that did not come back have no row.

    Examples
    --------
    >>> from nsan.schema import ALLOCATIONS, MIGRATIONS
    >>> refaults(MIGRATIONS.empty(), ALLOCATIONS.empty()).collect().height
    0
    """

    def build() -> pl.DataFrame:
        found = _kept_returns(migrations, allocations, premature_ns)
        return found.sort("pid", "device_id", "time_ns", "evicted_ns", "va", "to_device_id")

    return REFAULTS.from_rows(build)


@analysis(
    question="What was evicted, and did it come back?",
    result=EVICTIONS,
    reads=_READS,
    source="domain.md E-12",
    whole=True,
)
def evictions(
    migrations: pl.LazyFrame, allocations: pl.LazyFrame, *, premature_ns: int = 1_000_000_000
) -> pl.LazyFrame:
    """List the evictions with what became of their pages.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        As in :func:`refaults`.
    allocations : LazyFrame, ``ALLOCATIONS``
        As in :func:`refaults`.
    premature_ns : int, default 1_000_000_000
        As in :func:`refaults`.

    Returns
    -------
    LazyFrame, ``EVICTIONS``
        One row per eviction, ordered by process, GPU and start. Refaulted, elsewhere and unreturned
        bytes add up to the evicted ones. Pages that are valid elsewhere are dropped without a row.
    """
    given = (migrations, allocations)

    def build() -> pl.DataFrame:
        rows = migrations.select(_READS["migrations"]).collect()
        return _evictions(rows, _kept_returns(*given, premature_ns))

    return EVICTIONS.from_rows(lambda: once(f"evictions, {premature_ns} ns", build, *given))


@analysis(
    question="Which VA blocks does the GPU evict and fetch again?",
    result=REFAULTS_BY_VA_BLOCK,
    reads=_READS,
    source="domain.md E-12",
    whole=True,
)
def refaults_by_va_block(
    migrations: pl.LazyFrame, allocations: pl.LazyFrame, *, premature_ns: int = 1_000_000_000
) -> pl.LazyFrame:
    """Add up evictions and refaults by VA block.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        As in :func:`refaults`.
    allocations : LazyFrame, ``ALLOCATIONS``
        As in :func:`refaults`.
    premature_ns : int, default 1_000_000_000
        As in :func:`refaults`.

    Returns
    -------
    LazyFrame, ``REFAULTS_BY_VA_BLOCK``
        One row per process, GPU and VA block that was evicted, most refaulted bytes first.
    """
    return (
        evictions(migrations, allocations, premature_ns=premature_ns)
        .group_by("pid", "device_id", "va_block")
        .agg(
            *_sums(),
            first_evicted_ns=pl.col("start_ns").min(),
            last_evicted_ns=pl.col("end_ns").max(),
        )
        .sort(
            *("refaulted_bytes", "evicted_bytes", "pid", "device_id", "va_block"),
            descending=[True, True, False, False, False],
        )
        .select(REFAULTS_BY_VA_BLOCK.cast())
    )


@analysis(
    question="How much of what each GPU evicted came back?",
    result=REFAULT_TOTALS,
    reads=_READS,
    source="domain.md E-12",
    whole=True,
)
def refault_totals(
    migrations: pl.LazyFrame, allocations: pl.LazyFrame, *, premature_ns: int = 1_000_000_000
) -> pl.LazyFrame:
    """Add up evictions and refaults by GPU.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        As in :func:`refaults`.
    allocations : LazyFrame, ``ALLOCATIONS``
        As in :func:`refaults`.
    premature_ns : int, default 1_000_000_000
        As in :func:`refaults`.

    Returns
    -------
    LazyFrame, ``REFAULT_TOTALS``
        One row per process and GPU that evicted, ordered by both.
    """
    return (
        evictions(migrations, allocations, premature_ns=premature_ns)
        .group_by("pid", "device_id")
        .agg(*_sums(), n_va_blocks=pl.col("va_block").n_unique())
        .sort("pid", "device_id")
        .select(REFAULT_TOTALS.cast())
    )


def _kept_returns(
    migrations: pl.LazyFrame, allocations: pl.LazyFrame, premature_ns: int
) -> pl.DataFrame:
    def build() -> pl.DataFrame:
        read = [migrations.select(_READS["migrations"]), allocations.select(_READS["allocations"])]
        rows, allocated = pl.collect_all(read)
        return _returns(rows, allocated, premature_ns)

    return once(f"refaults, {premature_ns} ns", build, migrations, allocations)


def _sums() -> Sequence[pl.Expr]:
    amounts = [figure.name for figure in _AMOUNTS]
    share = pl.col("refaulted_bytes").sum() / pl.col("evicted_bytes").sum()
    return [
        pl.len().alias("n_evictions"),
        pl.col(amounts).sum(),
        share.alias("refaulted_fraction"),
    ]


_IS_EVICTION: Final = (pl.col("direction") == "dtoh") & (pl.col("cause_id") == CAUSE_EVICTION)


def _with_pushes(migrations: pl.DataFrame) -> pl.DataFrame:
    """Keep evictions and arrivals at GPUs, with the start and end of their pushes."""
    placed = in_time_order(migrations)
    arrives = pl.col("direction").is_in(["htod", "dtod"])
    pushed = with_push_id(placed.filter(_IS_EVICTION | arrives).lazy()).with_columns(
        push_start_ns=pl.col("start_ns").min().over("push_id"),
        push_end_ns=pl.col("end_ns").max().over("push_id"),
        evicts=_IS_EVICTION,
    )
    return in_time_order(pushed.collect())


def _returns(
    migrations: pl.DataFrame, allocations: pl.DataFrame, premature_ns: int
) -> pl.DataFrame:
    """Pair evictions of pages with their first later arrival at a GPU."""
    import numpy as np

    rows = with_life(_with_pushes(migrations), allocations)
    # Only VA blocks that were evicted can hold a refault.
    rows = rows.join(
        rows.filter("evicts").select("pid", "va_block").unique(),
        on=["pid", "va_block"],
        how="semi",
        nulls_equal=True,
        maintain_order="left",
    )
    pieces, n = pieces_of(rows), max(rows.height, 1)
    segment, row = np.divmod(np.sort(pieces.segment * n + pieces.row), n)
    evicts, life = rows["evicts"].to_numpy(), rows["life"].to_numpy()
    before, after = row[:-1], row[1:]
    is_return = (segment[:-1] == segment[1:]) & (life[before] == life[after])
    is_return &= evicts[before] & ~evicts[after]
    place, evicted, back = segment[:-1][is_return], before[is_return], after[is_return]
    pushes = rows["push_id"].to_numpy()
    # The order of pushes by number is that of the rows, so both fit one number.
    key = pushes[evicted] * (int(pushes.max(initial=0)) + 1) + pushes[back]
    first, size, va = pieces.stretches(key, place)
    out, into = (rows[pl.Series(index[first])] for index in (evicted, back))
    found = _described(out, into).with_columns(va=pl.Series(va), bytes=pl.Series(size))
    soon = pl.col("is_same_device") & (pl.col("distance_ns") < premature_ns)
    return found.with_columns(is_premature=soon, distance_bytes=_came(migrations, found))


def _described(out: pl.DataFrame, into: pl.DataFrame) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "pid": out["pid"],
            "device_id": out["device_id"],
            "to_device_id": into["device_id"],
            "evicted_ns": out["push_end_ns"],
            "time_ns": into["push_end_ns"],
            "distance_ns": into["push_end_ns"] - out["push_end_ns"],
            "begins_ns": into["push_start_ns"],
            "is_by_fault": into["cause_id"].is_in(BY_FAULT),
            "is_same_device": out["device_id"].eq_missing(into["device_id"]),
            "va_block": out["va_block"],
            "eviction": out["push_id"],
        }
    )


def _came(migrations: pl.DataFrame, found: pl.DataFrame) -> pl.Series:
    """Add up what came to the GPU that evicted, after the eviction and before the way back began."""
    import numpy as np

    rows = in_time_order(migrations)
    total = np.zeros(found.height, np.int64)
    gpus, comes_to, _ = gpus_of(rows)
    for i, (pid, device) in enumerate(gpus.iter_rows()):
        mine = rows.filter(pl.Series(comes_to == i)).sort("end_ns")
        sums = np.concatenate([[0], np.cumsum(mine["bytes"].to_numpy())])
        ends = mine["end_ns"].to_numpy()
        here = (found["pid"].eq_missing(pid) & found["device_id"].eq_missing(device)).to_numpy()
        asked = found.filter(pl.Series(here))
        upto, since = (
            sums[np.searchsorted(ends, asked[name].to_numpy(), side="right")]
            for name in ("begins_ns", "evicted_ns")
        )
        total[here] = np.maximum(upto - since, 0)
    return pl.Series(total)


def _evictions(migrations: pl.DataFrame, returns: pl.DataFrame) -> pl.DataFrame:
    size = pl.col("bytes")
    same = pl.col("is_same_device")
    back = returns.group_by("eviction").agg(
        refaulted_bytes=size.filter(same).sum(),
        premature_bytes=size.filter("is_premature").sum(),
        elsewhere_bytes=size.filter(~same).sum(),
        back_ns=pl.col("time_ns").filter(same).min(),
    )
    amounts = ["refaulted_bytes", "premature_bytes", "elsewhere_bytes"]
    rest = pl.col("evicted_bytes") - pl.col("refaulted_bytes") - pl.col("elsewhere_bytes")
    return (
        _with_pushes(migrations)
        .filter("evicts")
        .group_by("push_id")
        .agg(
            pl.col("pid", "device_id", "va_block").first(),
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
            evicted_bytes=size.sum(),
        )
        .join(back, left_on="push_id", right_on="eviction", how="left")
        .with_columns(pl.col(name).fill_null(0) for name in amounts)
        .sort("push_id")
        .with_columns(unreturned_bytes=rest, eviction_id=pl.int_range(pl.len(), dtype=pl.Int64))
    )
