"""Which part of the program, as its NVTX ranges name it, faults and moves memory.

Two bases. `time`: what happens between a range's start and end in its process. `launch`: the faults and
copies of the GPU work that an API call in the range started, on the thread of the range, whenever that
work ran; work whose call is not known is unattributed. Each figure is given exclusive (innermost range
only, so parts add up) and inclusive (with ranges inside, so they do not).
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.attribution.causes import READS, Causes, causes
from nsan.analysis.attribution.kernels import sums_by
from nsan.analysis.attribution.ranges import innermost, within
from nsan.analysis.attribution.work import ran_at, running
from nsan.analysis.catalog import analysis
from nsan.analysis.intervals import overlap, subtraction, union
from nsan.analysis.result import PID, Figure, Result, derived, recorded
from nsan.errors import UnknownNameError
from nsan.uvm.constants import CAUSE_EVICTION

BASES: Final = ("time", "launch")
BASIS: Final = pl.Enum(BASES)
PART: Final = pl.Enum(["range", "ambiguous", "unattributed"])

_REST: Final = {"ambiguous": -2, "unattributed": -1}

_EXCLUSIVE: Final[tuple[Figure, ...]] = (
    derived("n_fault_rows", pl.Int64, "rows", "GPU fault rows."),
    derived("n_page_faults", pl.Int64, "faults", "Their recorded counts: on lowest pages only."),
    derived("n_cpu_faults", pl.Int64, "faults", "CPU page faults; 0 with the basis `launch`."),
    derived("n_migrations", pl.Int64, "copies", "Copies, both ways."),
    derived("in_bytes", pl.Int64, "byte", "Moved to a GPU."),
    derived("out_bytes", pl.Int64, "byte", "Moved to the CPU."),
    derived("evicted_bytes", pl.Int64, "byte", "Of these to make room."),
)

_SUMS: Final = tuple(figure.name for figure in _EXCLUSIVE)


def _inclusive(figure: Figure) -> Figure:
    name = figure.name
    name = f"n_inclusive_{name[2:]}" if name.startswith("n_") else f"inclusive_{name}"
    return derived(name, figure.dtype, figure.unit, f"With ranges inside. {figure.doc}")


_INCLUSIVE: Final = tuple(_inclusive(figure) for figure in _EXCLUSIVE)

FAULTS_BY_NVTX: Final = Result(
    "faults_by_nvtx",
    "the NVTX ranges of one name and domain in a process, or a remainder",
    (
        PID,
        derived("part", PART, "label", "A range, or one of the remainders."),
        recorded("domain", pl.String, "text", "Domain; null is the default one."),
        recorded("name", pl.String, "text", "Text of the range; null for remainders."),
        derived("basis", BASIS, "label", "By time, or by the launch of the GPU work."),
        derived("n_ranges", pl.Int64, "ranges", "Instances."),
        derived("time_ns", pl.Int64, "ns", "Time in which at least one was open."),
        *_EXCLUSIVE,
        *_INCLUSIVE,
        derived("exposed_ns", pl.Int64, "ns", "Of its time, a GPU fault waited; by time only."),
    ),
)


@analysis(
    question="Which NVTX ranges fault and move memory?",
    result=FAULTS_BY_NVTX,
    reads={
        **READS,
        "cpu_faults": ("start_ns", "pid"),
        "api_calls": ("start_ns", "pid", "tid", "correlation_id"),
        "nvtx_ranges": ("start_ns", "end_ns", "pid", "tid", "domain", "name"),
    },
    source="domain.md E-9; peers.md 5.4",
)
def faults_by_nvtx(  # noqa: PLR0913, PLR0917 - one parameter for each table that it reads
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    kernels: pl.LazyFrame,
    copies: pl.LazyFrame,
    memsets: pl.LazyFrame,
    cpu_faults: pl.LazyFrame,
    api_calls: pl.LazyFrame,
    nvtx_ranges: pl.LazyFrame,
    *,
    basis: str = "time",
) -> pl.LazyFrame:
    """Add up faults and migrations for each name of NVTX range.

    Parameters
    ----------
    gpu_faults, migrations, cpu_faults : LazyFrame
        What happened, in any order; rows without a start are left out.
    kernels, copies, memsets : LazyFrame
        GPU work, for the basis `launch`.
    api_calls, nvtx_ranges : LazyFrame
        The calls that launched it; the ranges of all threads.
    basis : str, default "time"
        "time" or "launch".

    Returns
    -------
    LazyFrame, ``FAULTS_BY_NVTX``
        Per process: ranges by domain and name, then `ambiguous` and `unattributed`. The innermost
        range of a thread is the one that began last. By time, what happens while several threads have
        a range open is `ambiguous`: time alone cannot say whose it is. Exclusive figures add up.
        Inclusive ones hold each event once per name, on any thread.

    Raises
    ------
    UsageError
        If there is no such basis.
    """
    if basis not in BASES:
        raise UnknownNameError("basis", basis, BASES)

    def build() -> pl.DataFrame:
        found = causes(gpu_faults, migrations, kernels, copies, memsets)
        ranges, items = _ranges(nvtx_ranges)
        if basis == "time":
            known = pl.col("start_ns").is_not_null()
            touched = cpu_faults.filter(known).select("pid", at="start_ns").collect()
            events, inside = _by_time(found, touched, ranges)
            by: tuple[str, ...] = ("pid",)
        else:
            calls = api_calls.select("start_ns", "pid", "tid", "correlation_id").collect()
            events, inside = _by_launch(found, calls, ranges)
            by = ("pid", "tid")
        sums = events.join(inside, on="event", how="left", maintain_order="left")
        exclusive = sums.group_by("pid", "item").agg(pl.col(_SUMS).sum())
        inclusive = within(events.filter(pl.col("at").is_not_null()), ranges, _SUMS, by=by)
        exposed = _exposed(found, ranges) if basis == "time" else None
        return _table(items, exclusive, inclusive, exposed).with_columns(basis=pl.lit(basis))

    return FAULTS_BY_NVTX.from_rows(build)


def _ranges(nvtx_ranges: pl.LazyFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Give each name of ranges a number; return the ranges, and one row per name."""
    names = ("pid", "domain", "name")
    ranges = (
        nvtx_ranges.select("start_ns", "end_ns", "pid", "tid", "domain", "name")
        .filter(pl.all_horizontal(pl.col("start_ns", "end_ns").is_not_null()))
        .sort("pid", "domain", "name", "start_ns", "end_ns")
        .with_columns(item=pl.struct(names).rle_id().cast(pl.Int64))
        .collect()
    )
    length = pl.col("end_ns") - pl.col("start_ns")
    open_ns = union(ranges.lazy(), by=["item"]).group_by("item").agg(time_ns=length.sum())
    counts = ranges.group_by("item", *names).agg(n_ranges=pl.len().cast(pl.Int64))
    items = counts.join(open_ns.collect(), on="item", how="left")
    return ranges, items.with_columns(part=pl.lit("range", PART))


def _by_time(
    found: Causes, touched: pl.DataFrame, ranges: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """List what happened with its time, and the item in which it happened."""
    size, out = pl.col("bytes"), pl.col("direction") == "dtoh"
    evicted = out & (pl.col("cause_id") == CAUSE_EVICTION)
    parts = [
        found.rows.select("pid", "n_page_faults", at="start_ns", n_fault_rows=pl.lit(1, pl.Int64)),
        touched.with_columns(n_cpu_faults=pl.lit(1, pl.Int64)),
        found.moved.select(
            "pid",
            at="start_ns",
            n_migrations=pl.lit(1, pl.Int64),
            in_bytes=pl.when(out.not_()).then(size),
            out_bytes=pl.when(out).then(size),
            evicted_bytes=pl.when(evicted).then(size),
        ),
    ]
    events = pl.concat(parts, how="diagonal").with_columns(
        pl.col(_SUMS).fill_null(0), event=pl.int_range(pl.len(), dtype=pl.Int64)
    )
    open_ones = innermost(ranges)
    # As for GPU work: the one range that is open, or none, or several of different threads.
    work = open_ones.with_columns(
        work_id=pl.int_range(pl.len(), dtype=pl.Int64), work=pl.lit("kernel")
    )
    pids = pl.concat([events.select("pid"), work.select("pid")]).unique().sort("pid")
    pids = pids.with_columns(group=pl.int_range(pl.len(), dtype=pl.Int64))
    grouped = work.join(pids, on="pid", how="left", nulls_equal=True)
    placed = events.select("event", "pid", "at").join(pids, on="pid", how="left", nulls_equal=True)
    inside = _with_items(ran_at(placed, running(grouped), at="at"), work)
    return events, inside.select("event", "item")


def _with_items(placed: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Turn ids of stretches into items; remainders keep their own number."""
    return placed.join(
        work.select("work_id", "item"), left_on="running_id", right_on="work_id", how="left"
    ).with_columns(item=pl.coalesce("item", "running_id"))


def _by_launch(
    found: Causes, calls: pl.DataFrame, ranges: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """List GPU work with the call that launched it, and the item in which it did."""
    sums = sums_by(found, "pid", "running_id").with_columns(n_cpu_faults=pl.lit(0, pl.Int64))
    has_id = pl.col("correlation_id") != 0
    first = (
        calls.filter(has_id & pl.col("start_ns").is_not_null())
        .sort("start_ns", "tid")
        .unique(("pid", "correlation_id"), keep="first", maintain_order=True)
        .select("pid", "correlation_id", "tid", at="start_ns")
    )
    launched = (
        found.work.filter(has_id)
        .select("pid", "correlation_id", "work_id")
        .join(first, on=("pid", "correlation_id"), how="left", nulls_equal=True)
        .select("work_id", "tid", "at")
    )
    events = sums.join(launched, left_on="running_id", right_on="work_id", how="left").with_columns(
        event=pl.int_range(pl.len(), dtype=pl.Int64)
    )
    several = pl.col("running_id") == _REST["ambiguous"]
    rest = pl.when(several).then(_REST["ambiguous"]).otherwise(_REST["unattributed"])
    open_ones = innermost(ranges)
    threads = pl.concat([events.select("pid", "tid"), open_ones.select("pid", "tid")]).unique()
    threads = threads.sort("pid", "tid").with_columns(thread=pl.int_range(pl.len()))
    keyed = [
        frame.join(threads, on=("pid", "tid"), how="left", nulls_equal=True)
        for frame in (events, open_ones)
    ]
    inside = (
        keyed[0]
        .filter(pl.col("at").is_not_null())
        .sort("at")
        .join_asof(
            keyed[1].select("thread", "item", "end_ns", _from="start_ns").sort("_from"),
            left_on="at",
            right_on="_from",
            by="thread",
            coalesce=False,
            check_sortedness=False,
        )
        .filter(pl.col("end_ns") > pl.col("at"))
        .select("event", "item")
    )
    every = events.select("event", rest=rest.cast(pl.Int64)).join(inside, on="event", how="left")
    return events, every.select("event", item=pl.coalesce("item", "rest"))


def _exposed(found: Causes, ranges: pl.DataFrame) -> pl.DataFrame:
    """Measure in how much of the time of each item a fault of its process waited."""
    pids = pl.concat([found.groups.select("pid"), ranges.select("pid")]).unique().sort("pid")
    pids = pids.with_columns(process=pl.int_range(pl.len(), dtype=pl.Int64))
    of_group = found.groups.select("group", "pid").join(pids, on="pid", nulls_equal=True)
    ranges = ranges.join(pids, on="pid", nulls_equal=True)
    by = ["process"]
    waits = union(found.waits.join(of_group, on="group", how="left").lazy(), by=by)
    spans = union(ranges.lazy(), by=["process", "item"])
    outside = subtraction(waits, union(ranges.lazy(), by=by), by=by)
    outside = outside.with_columns(item=pl.lit(_REST["unattributed"], pl.Int64))
    columns = ("process", "item", "start_ns", "end_ns")
    both = pl.concat([spans.select(columns), outside.select(columns)])
    measured = overlap(both, waits, by=by).group_by("process", "item")
    exposed = measured.agg(exposed_ns=pl.col("overlap_ns").sum()).collect()
    return exposed.join(pids, on="process").select("pid", "item", "exposed_ns")


def _table(
    items: pl.DataFrame,
    exclusive: pl.DataFrame,
    inclusive: pl.DataFrame,
    exposed: pl.DataFrame | None,
) -> pl.DataFrame:
    """Put the figures to each name of range, and add the remainders of each process."""
    pids = pl.concat([items.select("pid"), exclusive.select("pid")]).unique()
    remainders = pl.DataFrame(
        {"part": _REST.keys(), "item": _REST.values()}, schema={"part": PART, "item": pl.Int64}
    )
    rows = pl.concat([items, pids.join(remainders, how="cross")], how="diagonal")
    renamed = {name: figure.name for name, figure in zip(_SUMS, _INCLUSIVE, strict=True)}
    table = rows.join(exclusive, on=("pid", "item"), how="left", nulls_equal=True).join(
        inclusive.rename(renamed), on="item", how="left"
    )
    if exposed is None:
        table = table.with_columns(exposed_ns=pl.lit(None, pl.Int64))
    else:
        table = table.join(exposed, on=("pid", "item"), how="left", nulls_equal=True)
    is_range = pl.col("part") == "range"
    same = [
        pl.when(is_range).then(pl.col(new).fill_null(0)).otherwise(old)
        for old, new in renamed.items()
    ]
    return (
        table.with_columns(pl.col(_SUMS).fill_null(0), pl.col("n_ranges").fill_null(0))
        .with_columns(each.alias(new) for each, new in zip(same, renamed.values(), strict=True))
        .sort("pid", "part", "domain", "name", "item")
    )
