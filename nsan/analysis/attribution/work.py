"""What ran on a GPU at an instant: kernels, and the copies and memsets that fault like them.

Only one piece of work at a time can be named as a cause. Where several kernels overlap, the answer is
`ambiguous`: a whole row goes there, it is not split, so counts stay counts of rows and totals close.
A copy or memset counts only while no kernel runs, because nearly all of them are of memory that
cannot fault; memsets of memory that is known not to be managed never count.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.health import MAX_CLOCK_SKEW_NS
from nsan.analysis.intervals import union
from nsan.analysis.result import DEVICE, PID, Result, derived, reconstructed
from nsan.uvm.constants import CAUSE_COHERENCE, CAUSE_PREFETCH, MANAGED_KINDS

WORKS: Final = (
    "kernel",
    "graph",
    "copy",
    "memset",
    "cpu",
    "user_prefetch",
    "ambiguous",
    "unattributed",
)
WORK: Final = pl.Enum(WORKS)
"""What a row is laid to: GPU work, CPU page faults, prefetch calls, or one of the remainders."""

REMAINDERS: Final = {"unattributed": -1, "ambiguous": -2, "cpu": -3, "user_prefetch": -4}
"""`work_id` of what is no piece of GPU work."""

KEYS: Final = ("pid", "device_id")

EVIDENCE: Final = pl.Enum(["fault_rows", "migrations", "none"])

WORK_READS: Final = {
    "kernels": (
        *("start_ns", "end_ns", "pid", "device_id", "stream_id", "correlation_id", "name"),
        *("graph_node_id", "is_graph_launch"),
    ),
    "copies": ("start_ns", "end_ns", "pid", "device_id", "stream_id", "correlation_id", "kind"),
    "memsets": ("start_ns", "end_ns", "pid", "device_id", "stream_id", "correlation_id", "kind"),
}

_NEIGHBOUR_NS: Final = 10_000
"""Leads that may as well be delays of the kernel before count up to this much above the certain ones."""

CLOCK_OFFSETS: Final = Result(
    "clock_offset",
    "the clock of GPU work against that of faults and migrations, for one process and GPU",
    (
        PID,
        DEVICE,
        reconstructed("offset_ns", pl.Int64, "ns", "Add it to the times of GPU work."),
        derived("evidence", EVIDENCE, "label", "What it is taken from."),
        derived("n_events", pl.Int64, "rows", "Fault rows, or else fault-caused copies."),
        derived("n_early", pl.Int64, "rows", "Of these up to 100 us before work, none running."),
        derived("n_late", pl.Int64, "rows", "Of these ended up to 100 us after work."),
    ),
)


def group_numbers(*frames: pl.DataFrame) -> pl.DataFrame:
    """Give processes and GPUs numbers, so that joins by time never have a null as key.

    Parameters
    ----------
    *frames : DataFrame
        Each reads ``pid``, ``device_id``.

    Returns
    -------
    DataFrame
        ``pid``, ``device_id``, ``group`` (Int64, from 0), ordered by the first two.
    """
    pairs = [frame.select(pl.col("pid").cast(pl.UInt32), "device_id") for frame in frames]
    return (
        pl.concat(pairs)
        .unique()
        .sort(KEYS)
        .with_columns(group=pl.int_range(pl.len(), dtype=pl.Int64))
    )


def with_group(frame: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Add the number of the process and GPU to each row.

    Parameters
    ----------
    frame : DataFrame
        Reads ``pid``, ``device_id``.
    groups : DataFrame
        As of :func:`group_numbers`.

    Returns
    -------
    DataFrame
        The rows, in their order, with ``group``.
    """
    return frame.join(groups, on=KEYS, how="left", nulls_equal=True, maintain_order="left")


def gpu_work(kernels: pl.LazyFrame, copies: pl.LazyFrame, memsets: pl.LazyFrame) -> pl.DataFrame:
    """List the work of GPUs that can raise page faults.

    Parameters
    ----------
    kernels : LazyFrame, ``KERNELS``
        Kernels and graph launches. Where a process and GPU has kernels of graphs one by one, its
        graph launches are left out: they are the same time.
    copies, memsets : LazyFrame, ``COPIES`` and ``MEMSETS``
        Explicit copies; memsets of managed memory, or of memory whose kind is not known.

    Returns
    -------
    DataFrame
        One row per piece of work with a start and an end, ordered by process, GPU and start:
        ``work_id`` (Int64, from 0), ``pid``, ``device_id``, ``start_ns``, ``end_ns``, ``work``,
        ``name``, ``stream_id``, ``correlation_id``.
    """
    launch = pl.col("is_graph_launch").fill_null(value=False)
    by_node = pl.col("graph_node_id").is_not_null().any().over(*KEYS)
    kind = pl.col("kind").cast(pl.String)
    may_fault = kind.is_in([*MANAGED_KINDS, "unknown", "other"]) | kind.is_null()
    parts = [
        _work_of(
            kernels.filter((launch & by_node).not_()),
            pl.when(launch).then(pl.lit("graph")).otherwise(pl.lit("kernel")),
            pl.col("name"),
        ),
        _work_of(copies, pl.lit("copy"), pl.concat_str(pl.lit("copy "), kind.fill_null("unknown"))),
        _work_of(
            memsets.filter(may_fault),
            pl.lit("memset"),
            pl.concat_str(pl.lit("memset "), kind.fill_null("unknown")),
        ),
    ]
    order = [*KEYS, "start_ns", "end_ns", "work", "name", "stream_id", "correlation_id"]
    return (
        pl.concat(parts)
        .filter(pl.all_horizontal(pl.col("start_ns", "end_ns").is_not_null()))
        .sort(order)
        .select(pl.int_range(pl.len(), dtype=pl.Int64).alias("work_id"), *order)
        .collect()
    )


def _work_of(rows: pl.LazyFrame, work: pl.Expr, name: pl.Expr) -> pl.LazyFrame:
    return rows.select(
        *("start_ns", "end_ns", "pid", "device_id", "stream_id", "correlation_id"),
        work=work.cast(WORK),
        name=name.cast(pl.String),
    )


def running(work: pl.DataFrame) -> pl.DataFrame:
    """Say for each stretch of time what ran.

    Parameters
    ----------
    work : DataFrame
        Reads ``work_id``, ``group``, ``start_ns``, ``end_ns``, ``work``.

    Returns
    -------
    DataFrame
        One row per stretch, from its ``start_ns`` to the next of its ``group``, ordered by both:
        ``running_id`` is the ``work_id``, or a value of ``REMAINDERS`` for none or several.
    """
    first = pl.col("work").is_in(["kernel", "graph"])
    sides = [
        work.filter(pl.col("start_ns") < pl.col("end_ns")).select(
            "group",
            start_ns=edge,
            n=first * sign,
            ids=first * sign * pl.col("work_id"),
            n_second=first.not_() * sign,
            ids_second=first.not_() * sign * pl.col("work_id"),
        )
        for edge, sign in (("start_ns", pl.lit(1, pl.Int64)), ("end_ns", pl.lit(-1, pl.Int64)))
    ]
    # Every group opens as often as it closes, so sums over all rows are sums within the group; where
    # one is open, the sum of the ids is its id.
    sums = ("n", "ids", "n_second", "ids_second")
    n, n_second = pl.col("n"), pl.col("n_second")
    found = (
        pl.when(n == 1)
        .then("ids")
        .when(n > 1)
        .then(REMAINDERS["ambiguous"])
        .when(n_second == 1)
        .then("ids_second")
        .when(n_second > 1)
        .then(REMAINDERS["ambiguous"])
        .otherwise(REMAINDERS["unattributed"])
    )
    return (
        pl.concat(sides)
        .group_by("group", "start_ns")
        .agg(pl.col(name).sum() for name in sums)
        .sort("group", "start_ns")
        .with_columns(pl.col(name).cum_sum() for name in sums)
        .select("group", "start_ns", running_id=found.cast(pl.Int64))
    )


def ran_at(points: pl.DataFrame, steps: pl.DataFrame, *, at: str = "start_ns") -> pl.DataFrame:
    """Look up what ran at the time of each row.

    Parameters
    ----------
    points : DataFrame
        Reads ``group`` and the column ``at`` (no nulls); other columns stay.
    steps : DataFrame
        As of :func:`running`.
    at : str, default "start_ns"
        Column of the time, ns.

    Returns
    -------
    DataFrame
        The rows, ordered by ``at``, with ``running_id``.
    """
    return (
        points.sort(at, maintain_order=True)
        .join_asof(
            steps.select("group", "running_id", _since="start_ns").sort("_since"),
            left_on=at,
            right_on="_since",
            by="group",
            coalesce=False,
            check_sortedness=False,
        )
        .drop("_since")
        .with_columns(pl.col("running_id").fill_null(REMAINDERS["unattributed"]))
    )


def ran_during(events: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Look up what ran from the start to the end of each fault or copy.

    Parameters
    ----------
    events : DataFrame
        Reads ``group``, ``start_ns`` (no nulls), ``end_ns``; other columns stay.
    steps : DataFrame
        As of :func:`running`.

    Returns
    -------
    DataFrame
        The rows with ``running_id``: what ran at the start. But work cannot end before the replay of
        its fault: where the one piece of work that runs at the last instant is another, it is that one.
        So a fault in the first moments of a kernel is not lost to the kernel before, whose times may be
        some microseconds late.
    """
    last = pl.max_horizontal(pl.col("end_ns").fill_null(pl.col("start_ns")) - 1, "start_ns")
    ended = ran_at(events.with_columns(_last=last), steps, at="_last")
    began = ran_at(ended.rename({"running_id": "_last_id"}), steps)
    known = pl.when(pl.col("_last_id") >= 0).then("_last_id").otherwise("running_id")
    return began.with_columns(running_id=known).drop("_last", "_last_id")


@analysis(
    question="How far is the clock of kernels from that of page faults?",
    result=CLOCK_OFFSETS,
    reads={
        "gpu_faults": ("start_ns", "end_ns", "pid", "device_id"),
        "migrations": ("start_ns", "end_ns", "pid", "device_id", "direction", "cause_id"),
        **WORK_READS,
    },
    source="fault_rows.md 2.3",
)
def clock_offset(
    gpu_faults: pl.LazyFrame,
    migrations: pl.LazyFrame,
    kernels: pl.LazyFrame,
    copies: pl.LazyFrame,
    memsets: pl.LazyFrame,
) -> pl.LazyFrame:
    """Estimate by how much the times of GPU work must be moved to fit the faults raised in it.

    A fault is raised while work runs, and the work cannot end before its replay. Kernels were seen up
    to 65 us behind. Where rows lie before work and none runs, the work moves back to the earliest of
    them; where more lie after it, it moves on to the last of them; at most 100 us, else it stays.
    An offset below the delay from the start of a kernel to its first fault cannot be seen.

    Parameters
    ----------
    gpu_faults, migrations : LazyFrame
        Fault rows; copies to a GPU that faults caused, used where a GPU has no fault rows.
    kernels, copies, memsets : LazyFrame
        The work of GPUs.

    Returns
    -------
    LazyFrame, ``CLOCK_OFFSETS``
        One row per process and GPU with faults, migrations or work, in that order.
    """

    def build() -> pl.DataFrame:
        work = gpu_work(kernels, copies, memsets)
        rows = gpu_faults.select("start_ns", "end_ns", *KEYS).collect()
        moved = migrations.select("start_ns", "end_ns", *KEYS, "direction", "cause_id").collect()
        groups = group_numbers(rows, moved, work)
        frames = {"rows": rows, "moved": moved, "work": work}
        placed = {name: with_group(frame, groups) for name, frame in frames.items()}
        return offsets(placed["rows"], placed["moved"], placed["work"], groups)

    return CLOCK_OFFSETS.from_rows(build)


def offsets(
    rows: pl.DataFrame, moved: pl.DataFrame, work: pl.DataFrame, groups: pl.DataFrame
) -> pl.DataFrame:
    """Estimate the clock offset of each group; :func:`clock_offset` says how.

    Parameters
    ----------
    rows, moved, work : DataFrame
        Fault rows, migrations and GPU work, each with ``group``.
    groups : DataFrame
        As of :func:`group_numbers`.

    Returns
    -------
    DataFrame
        ``groups`` with the columns of ``CLOCK_OFFSETS``.
    """
    columns = ("group", "start_ns", "end_ns")
    known = pl.col("start_ns").is_not_null()
    of_rows = rows.filter(known).select(*columns, evidence=pl.lit("fault_rows", EVIDENCE))
    caused = pl.col("cause_id").is_in([CAUSE_COHERENCE, CAUSE_PREFETCH])
    of_copies = (
        moved.filter(known & caused & (pl.col("direction") != "dtoh"))
        .join(of_rows, on="group", how="anti")
        .select(*columns, evidence=pl.lit("migrations", EVIDENCE))
    )
    events = pl.concat([of_rows, of_copies]).sort("start_ns")
    spans = union(work.lazy(), by=["group"]).collect().sort("start_ns")
    near = _distances(events, spans)
    early = pl.col("lead") <= MAX_CLOCK_SKEW_NS
    late = pl.col("lag") <= MAX_CLOCK_SKEW_NS
    votes = near.with_columns(
        early=early.fill_null(value=False), late=late.fill_null(value=False)
    ).with_columns(both=pl.col("early") & pl.col("late"))
    figures = votes.group_by("group").agg(
        _offset().cast(pl.Int64).alias("offset_ns"),
        pl.col("evidence").first(),
        n_events=pl.len().cast(pl.Int64),
        n_early=(pl.col("early") & pl.col("both").not_()).sum().cast(pl.Int64),
        n_late=(pl.col("late") & pl.col("both").not_()).sum().cast(pl.Int64),
    )
    return groups.join(figures, on="group", how="left", maintain_order="left").with_columns(
        pl.col("offset_ns", "n_events", "n_early", "n_late").fill_null(0),
        pl.col("evidence").fill_null("none"),
    )


def _distances(events: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Measure by how much each event begins before work, or ends after it."""
    before = spans.select("group", _from="start_ns", _until="end_ns")
    after = spans.select("group", _next="start_ns")
    joined = events.join_asof(
        before,
        left_on="start_ns",
        right_on="_from",
        by="group",
        coalesce=False,
        check_sortedness=False,
    ).join_asof(
        after,
        left_on="start_ns",
        right_on="_next",
        by="group",
        strategy="forward",
        coalesce=False,
        check_sortedness=False,
    )
    outside = (pl.col("_until") > pl.col("start_ns")).fill_null(value=False).not_()
    # Work cannot end before the replay of its fault. If other work follows soon, the row may be its.
    alone = (pl.col("_next") - pl.col("_until") > MAX_CLOCK_SKEW_NS).fill_null(value=True)
    outlasts = (pl.col("end_ns") > pl.col("_until")) & alone
    lead = pl.col("_next") - pl.col("start_ns")
    lag = pl.max_horizontal("end_ns", "start_ns") - pl.col("_until")
    return joined.with_columns(
        lead=pl.when(outside).then(lead), lag=pl.when(outside | outlasts).then(lag)
    ).drop("_from", "_until", "_next")


def _offset() -> pl.Expr:
    """Offset of one group from its rows outside of work: those before it, or those after it."""
    sure_early = pl.col("early") & pl.col("both").not_()
    sure_late = pl.col("late") & pl.col("both").not_()
    certain = pl.col("lead").filter(sure_early).max()
    limit = certain.fill_null(MAX_CLOCK_SKEW_NS) + _NEIGHBOUR_NS
    back = pl.col("lead").filter(pl.col("early") & (pl.col("lead") <= limit)).max()
    on = pl.col("lag").filter(sure_late).max()
    return pl.when(sure_late.sum() > sure_early.sum()).then(on).otherwise(-back)


def shifted(work: pl.DataFrame, by_group: pl.DataFrame) -> pl.DataFrame:
    """Move the times of GPU work onto the clock of faults.

    Parameters
    ----------
    work : DataFrame
        Reads ``group``, ``start_ns``, ``end_ns``; other columns stay.
    by_group : DataFrame
        Reads ``group``, ``offset_ns``.

    Returns
    -------
    DataFrame
        The rows, in their order, with ``offset_ns``; ``start_ns`` and ``end_ns`` are moved by it.
    """
    offset = pl.col("offset_ns")
    return work.join(
        by_group.select("group", "offset_ns"), on="group", how="left", maintain_order="left"
    ).with_columns(pl.col("start_ns") + offset, pl.col("end_ns") + offset)
