"""Which functions of the program's CPU side fault, and what that moves back from GPUs.

A CPU fault is on the CPU's clock and the copy that it asks for on a GPU's, which may be behind, so the
copy may seem to start first. A CPU fault is a push of its own: one faulted page, and what the
driver's prefetcher takes with it.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.driver.pushes import with_push_id
from nsan.analysis.health import MAX_CLOCK_SKEW_NS
from nsan.analysis.result import PID, Result, derived, recorded
from nsan.uvm.constants import CAUSE_COHERENCE, CAUSE_PREFETCH, PAGE_BYTES

PART: Final = pl.Enum(["function", "unattributed"])

MOST_WAIT_NS: Final = 10_000_000
"""A copy that comes later than this after a CPU fault was not asked for by it (14 to 29 us measured; a
throttled access writes another row when it is served)."""

FUNCTION: Final = ("function", "module", "source_file", "source_line")

FAULTS_BY_FUNCTION: Final = Result(
    "faults_by_function",
    "one place in the program whose CPU accesses fault, or the copies of none",
    (
        PID,
        derived("part", PART, "label", "A function, or copies whose CPU fault was not found."),
        recorded("function", pl.String, "text", "Function of the instruction."),
        recorded("module", pl.String, "text", "Binary that holds it."),
        recorded("source_file", pl.String, "text", "Source file."),
        recorded("source_line", pl.Int64, "line", "Source line."),
        derived("n_cpu_faults", pl.Int64, "faults", "CPU page faults."),
        derived("n_pages", pl.Int64, "pages", "Different pages of them."),
        derived("n_answered", pl.Int64, "faults", "Of these faults, with a copy from a GPU."),
        derived("n_migrations", pl.Int64, "copies", "Copies from GPUs that they asked for."),
        derived("coherence_bytes", pl.Int64, "byte", "Faulted pages that came from a GPU."),
        derived("prefetch_bytes", pl.Int64, "byte", "What the prefetcher brought with them."),
        derived("out_bytes", pl.Int64, "byte", "Both."),
        derived("first_ns", pl.Int64, "ns", "First of its faults."),
        derived("last_ns", pl.Int64, "ns", "Last of its faults."),
    ),
)

_MOVED: Final = ("n_answered", "n_migrations", "coherence_bytes", "prefetch_bytes", "out_bytes")


@analysis(
    question="Which functions of the CPU side fault, and what does it move?",
    result=FAULTS_BY_FUNCTION,
    reads={
        "cpu_faults": ("start_ns", "pid", "va", *FUNCTION),
        "migrations": (
            *("start_ns", "end_ns", "pid", "device_id", "va", "bytes"),
            *("direction", "cause_id", "sequence"),
        ),
    },
    source="peers.md 5.3; fault_rows.md 2.3",
)
def faults_by_function(cpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.LazyFrame:
    """Add up CPU page faults, and the copies that answered them, for each place in the program.

    Parameters
    ----------
    cpu_faults : LazyFrame, ``CPU_FAULTS``
        One row per CPU page fault, in any order.
    migrations : LazyFrame, ``MIGRATIONS``
        Copies; those from a GPU by page faults and the prefetcher are read.

    Returns
    -------
    LazyFrame, ``FAULTS_BY_FUNCTION``
        One row per process, function, module, file and line, most bytes and then most faults first
        within the process, then one `unattributed` row per process. Bytes add up to all copies from
        GPUs by page faults and the prefetcher that have a start and an address.

    Examples
    --------
    >>> from nsan.schema import CPU_FAULTS, MIGRATIONS
    >>> faults_by_function(CPU_FAULTS.empty(), MIGRATIONS.empty()).collect().height
    0
    """
    return FAULTS_BY_FUNCTION.from_rows(lambda: _table(cpu_faults, migrations))


def _table(cpu_faults: pl.LazyFrame, migrations: pl.LazyFrame) -> pl.DataFrame:
    known = pl.all_horizontal(pl.col("start_ns", "va").is_not_null())
    faults = (
        cpu_faults.filter(known)
        .select("start_ns", "pid", "va", *FUNCTION, page=pl.col("va") // PAGE_BYTES)
        .sort("pid", "start_ns", "va", *FUNCTION)
        .with_columns(item=pl.struct("pid", *FUNCTION).rank("dense").cast(pl.Int64))
        .with_columns(fault=pl.int_range(pl.len(), dtype=pl.Int64))
        .collect()
    )
    caused = pl.col("cause_id").is_in([CAUSE_COHERENCE, CAUSE_PREFETCH])
    copies = migrations.filter(known & caused & (pl.col("direction") == "dtoh"))
    pushes = _pushes(copies)
    answered = _answered(pushes, faults).join(
        faults.select("fault", "item"), on="fault", how="left"
    )
    moved = answered.group_by("pid", pl.col("item").fill_null(-1)).agg(
        pl.col("fault").drop_nulls().n_unique().cast(pl.Int64).alias("n_answered"),
        pl.col(_MOVED[1:]).sum(),
    )
    counts = faults.group_by("pid", "item", *FUNCTION).agg(
        n_cpu_faults=pl.len().cast(pl.Int64),
        n_pages=pl.col("page").n_unique().cast(pl.Int64),
        first_ns=pl.col("start_ns").min(),
        last_ns=pl.col("start_ns").max(),
        part=pl.lit("function", PART),
    )
    pids = pl.concat([counts.select("pid"), pushes.select("pid")]).unique()
    rest = pids.with_columns(item=pl.lit(-1, pl.Int64), part=pl.lit("unattributed", PART))
    rows = pl.concat([counts, rest], how="diagonal")
    whole = (*_MOVED, "n_cpu_faults", "n_pages")
    return (
        rows.join(moved, on=("pid", "item"), how="left", nulls_equal=True)
        .with_columns(pl.col(whole).fill_null(0))
        .sort(
            *("pid", "part", "out_bytes", "n_cpu_faults", *FUNCTION),
            descending=[False, False, True, True, False, False, False, False],
        )
    )


def _pushes(copies: pl.LazyFrame) -> pl.DataFrame:
    """Put copies from GPUs together into pushes, each with its faulted page, null where it has none."""
    by_fault, size = pl.col("cause_id") == CAUSE_COHERENCE, pl.col("bytes")
    # A push of several faulted pages was not asked for by one CPU access.
    one_page = (by_fault.sum() == 1) & (size.filter(by_fault).sum() <= PAGE_BYTES)
    return (
        with_push_id(copies)
        .group_by("push_id")
        .agg(
            pl.col("pid", "start_ns").first(),
            page=pl.when(one_page).then((pl.col("va") // PAGE_BYTES).filter(by_fault).first()),
            n_migrations=pl.len().cast(pl.Int64),
            coherence_bytes=size.filter(by_fault).sum(),
            prefetch_bytes=size.filter(by_fault.not_()).sum(),
            out_bytes=size.sum(),
        )
        .sort("pid", "start_ns", "push_id")
        .collect()
    )


def _answered(pushes: pl.DataFrame, faults: pl.DataFrame) -> pl.DataFrame:
    """Find for each push the CPU fault that asked for it: the last on its page before it."""
    near = _with_fault(pushes, faults, "nearest", 0)
    delay = pl.col("start_ns") - pl.col("fault_ns")
    ahead = near.filter(delay.is_between(-MAX_CLOCK_SKEW_NS, -1)).select(delay.min()).item()
    # The clocks' difference is seen where a copy starts before its fault.
    return _with_fault(pushes, faults, "backward", -(ahead or 0))


def _with_fault(
    pushes: pl.DataFrame, faults: pl.DataFrame, strategy: str, later_ns: int
) -> pl.DataFrame:
    """Add ``fault`` and ``fault_ns`` to each push, looking up to ``later_ns`` after its start."""
    pids = pl.concat([pushes.select("pid"), faults.select("pid")]).unique().sort("pid")
    pids = pids.with_columns(process=pl.int_range(pl.len(), dtype=pl.Int64))
    left, right = (
        frame.join(pids, on="pid", how="left", nulls_equal=True, maintain_order="left")
        for frame in (pushes, faults)
    )
    return (
        left.with_columns(at=pl.col("start_ns") + later_ns)
        .sort("at")
        .join_asof(
            right.select("process", "page", "fault", fault_ns="start_ns").sort("fault_ns", "fault"),
            left_on="at",
            right_on="fault_ns",
            by=["process", "page"],
            strategy="nearest" if strategy == "nearest" else "backward",
            tolerance=MOST_WAIT_NS,
            coalesce=False,
            check_sortedness=False,
        )
    )
