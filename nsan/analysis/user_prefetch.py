"""Prefetches that the program asked for: which call, what it moved, and whether it came in time.

nsys links a copy of a user prefetch to no call, so both are put together by address and time. The
driver walks through a range in ascending order, one call after the other (measured, 8 captures).
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.catalog import analysis
from nsan.analysis.intervals import overlap, union
from nsan.analysis.memory.amplification import at_own_addresses, with_block_life
from nsan.analysis.result import PID, Result, derived, reconstructed
from nsan.analysis.segments import cut, edges_of
from nsan.uvm.constants import (
    CAUSE_COHERENCE,
    CAUSE_EVICTION,
    CAUSE_PREFETCH,
    CAUSE_USER,
    PAGE_BYTES,
    VA_BLOCK_BYTES,
)

OUTCOME: Final = pl.Enum(["in_time", "late", "early", "moved_nothing"])

_HOST: Final = -1
"""The CPU, beside the ordinals of GPUs."""

_NONE: Final = -2
"""A process or GPU that is not known: a null equals no null in an as-of join."""

_PORTION: Final = 2_000_000
"""Pieces of copies that are looked at together."""

_PLACE: Final = ["pid", "_to"]
_FAULTS: Final = [CAUSE_COHERENCE, CAUSE_PREFETCH]
_PREFETCH_CALL: Final = r"Mem\w*Prefetch"
_ADVICE_CALL: Final = "MemAdvise"

_WORK_READS: Final = ("start_ns", "end_ns", "pid", "device_id")
_CALL_READS: Final = ("start_ns", "end_ns", "pid", "tid")

USER_PREFETCHES: Final = Result(
    "user_prefetches",
    "one prefetch of the program: a call and the copies tied to it",
    (
        PID,
        derived("prefetch_id", pl.Int64, "id", "Number of the prefetch in this table."),
        reconstructed("device_id", pl.Int64, "id", "GPU it goes to; null: the CPU, or nowhere."),
        reconstructed("to_host", pl.Boolean, "flag", "It goes to the CPU; null: nothing moved."),
        reconstructed("call_name", pl.String, "text", "API call; null: none is known."),
        reconstructed("call_start_ns", pl.Int64, "ns", "Start of the call."),
        reconstructed("call_end_ns", pl.Int64, "ns", "End of the call."),
        reconstructed("correlation_id", pl.Int64, "id", "Identifies the call in its process."),
        reconstructed("start_ns", pl.Int64, "ns", "Start of the first copy."),
        reconstructed("end_ns", pl.Int64, "ns", "End of the last copy."),
        reconstructed("n_migrations", pl.Int64, "rows", "Copies."),
        reconstructed("n_runs", pl.Int64, "ranges", "Ranges without a hole that they make up."),
        reconstructed("va", pl.UInt64, "byte address", "Lowest byte moved."),
        reconstructed("span_bytes", pl.Int64, "byte", "From the lowest byte to the highest."),
        reconstructed("bytes", pl.Int64, "byte", "Bytes moved."),
        reconstructed("late_bytes", pl.Int64, "byte", "Of its VA blocks, but moved by faults."),
        reconstructed("early_bytes", pl.Int64, "byte", "Evicted before work started; or null."),
        reconstructed("evicted_bytes", pl.Int64, "byte", "Left by an eviction; null: to the CPU."),
        reconstructed("wasted_bytes", pl.Int64, "byte", "Left before any work ran; or null."),
        reconstructed("outcome", OUTCOME, "label", "What speaks against it, if anything."),
    ),
)


@analysis(
    question="Did the program's prefetches come in time, and were they of use?",
    result=USER_PREFETCHES,
    reads={
        "migrations": (*_WORK_READS, "va", "bytes", "direction", "cause_id", "src_device_id"),
        "api_calls": (*_CALL_READS, "name", "correlation_id", "return_value"),
        "kernels": _WORK_READS,
        "copies": _WORK_READS,
        "memsets": _WORK_READS,
    },
    source="calibration.md 4",
)
def user_prefetches(
    migrations: pl.LazyFrame,
    api_calls: pl.LazyFrame,
    kernels: pl.LazyFrame,
    copies: pl.LazyFrame,
    memsets: pl.LazyFrame,
) -> pl.LazyFrame:
    """Tie the copies of user prefetches to calls, and say whether they were late or early.

    Parameters
    ----------
    migrations : LazyFrame, ``MIGRATIONS``
        One row per migration, in any order.
    api_calls : LazyFrame, ``API_CALLS``
        One row per API call. Prefetches are those with ``Mem...Prefetch`` in their name that did
        not fail; where a process has none before a copy, ``MemAdvise`` counts.
    kernels, copies, memsets : LazyFrame, ``KERNELS``, ``COPIES``, ``MEMSETS``
        Work of GPUs that may use what was prefetched.

    Returns
    -------
    LazyFrame, ``USER_PREFETCHES``
        One row per prefetch, ordered by process, and by the start of its call, or of its copies
        where no call is known. The bytes add up to those of the migrations of cause user that have
        a start and an address.

    Notes
    -----
    The copies to one destination are one prefetch while they ascend in address and no other call
    starts before one that leaves a hole, or before one that lies in that very call. A prefetch
    belongs to the latest call before its first copy; calls are queued, so of several prefetches
    with the same latest call the earlier ones get the calls before it that have none.

    ``late``: faults moved pages of its VA blocks to the same place between the start of the call
    (of work that already ran on the GPU at the first copy, if that is earlier) and its last copy.
    ``early``: pages were evicted before any work started on the GPU; an eviction after that may be
    early too, but the use of resident memory leaves no trace. Where both hold, the larger counts.
    ``moved_nothing``: a prefetch call that no copy is left for. Without any work recorded in the
    process, early and waste are null. GPU work is on a clock that may be 65 us off.
    """
    return USER_PREFETCHES.from_rows(
        lambda: _prefetches(migrations, api_calls, [kernels, copies, memsets])
    )


def _prefetches(
    migrations: pl.LazyFrame, api_calls: pl.LazyFrame, works: list[pl.LazyFrame]
) -> pl.DataFrame:
    moves = _moves(migrations)
    calls, advice = _calls(api_calls, _PREFETCH_CALL), _calls(api_calls, _ADVICE_CALL)
    if calls.is_empty() and (moves["cause_id"] == CAUSE_USER).sum() == 0:
        return USER_PREFETCHES.empty().collect()
    work = (
        pl.concat([each.select(_WORK_READS) for each in works])
        .filter(pl.col("start_ns") < pl.col("end_ns"))
        .select("start_ns", "end_ns", _known("pid"), _known("device_id").alias("_to"))
        .collect()
    )
    pieces = _grouped(moves.filter(pl.col("cause_id") == CAUSE_USER), calls)
    groups = _with_calls(_summed(pieces), calls, advice)
    groups = groups.join(_late(groups, moves, work), on="group", how="left")
    groups = groups.join(_fate(pieces, moves, work), on="group", how="left")
    unused = calls.join(groups, on=["pid", "call"], how="anti")
    return _finished(pl.concat([groups, unused], how="diagonal"), work)


def _known(key: str) -> pl.Expr:
    return pl.col(key).cast(pl.Int64).fill_null(_NONE)


def _moves(migrations: pl.LazyFrame) -> pl.DataFrame:
    known = pl.all_horizontal(pl.col("start_ns", "end_ns", "va").is_not_null())
    to_host = pl.col("direction") == "dtoh"
    end = pl.col("va") + pl.col("bytes").cast(pl.UInt64)
    host, device = pl.lit(_HOST, pl.Int64), _known("device_id")
    leaves = pl.when(pl.col("direction") == "dtod").then(_known("src_device_id"))
    return (
        migrations.filter(known & (pl.col("bytes") > 0))
        .select(
            *("start_ns", "end_ns", "va", "bytes", "cause_id"),
            _known("pid"),
            _until=end,
            _to=pl.when(to_host).then(host).otherwise(device),
            _from=leaves.when(to_host).then(device).otherwise(host),
        )
        .collect()
    )


def _calls(api_calls: pl.LazyFrame, pattern: str) -> pl.DataFrame:
    """Give the calls of a name numbers per process; a driver call inside a runtime call is the same."""
    end = pl.col("end_ns").fill_null(pl.col("start_ns"))
    before = end.cum_max().shift(1).over("pid", "tid")
    return (
        api_calls.filter(
            pl.col("start_ns").is_not_null()
            & pl.col("name").str.contains(pattern)
            & (pl.col("return_value").fill_null(0) == 0)
        )
        .sort(
            "pid", "tid", "start_ns", end, "correlation_id", descending=[False] * 3 + [True, False]
        )
        .filter((end > before).fill_null(value=True) | (end == pl.col("start_ns")))
        .sort("pid", "start_ns", "tid", "correlation_id")
        .select(
            _known("pid"),
            "correlation_id",
            call=pl.int_range(pl.len()).over("pid"),
            call_name="name",
            call_start_ns="start_ns",
            call_end_ns=end,
        )
        .collect()
    )


def _latest(rows: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Add the latest call of the process that started by the start of each row."""
    return rows.sort("start_ns").join_asof(
        calls.sort("call_start_ns", "call"),
        left_on="start_ns",
        right_on="call_start_ns",
        by="pid",
        check_sortedness=False,
        coalesce=False,
    )


def _grouped(moves: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Find the prefetches that copies belong to, and the ranges without holes."""
    at_once = ["pid", "call", "call_start_ns", "call_end_ns"]
    rows = _latest(moves, calls.select(at_once)).sort(*_PLACE, "start_ns", "va", "bytes")
    same = pl.all_horizontal(pl.col(key) == pl.col(key).shift(1) for key in _PLACE)
    reached, ended = pl.col("_until").shift(1), pl.col("end_ns").shift(1)
    rows = rows.with_columns(
        _first=same.not_().fill_null(value=True),
        _run=(same.not_() | (pl.col("va") != reached)).fill_null(value=True),
        _falls=(pl.col("va") < reached).fill_null(value=True),
        # It lies in the call, and no copy was under way when that call started.
        _inside=(pl.col("call_start_ns") >= ended) & (pl.col("start_ns") < pl.col("call_end_ns")),
    )
    opens = _opens(rows)
    # Arrays that lie side by side make one range: a call that would be left without a copy, and in
    # which a copy runs, begins its own prefetch there.
    has_own = pl.col("_opens").any().over("pid", "call")
    first_of_call = pl.col("call").ne_missing(pl.col("call").shift(1))
    own = rows.with_columns(_opens=opens).select(pl.col("_inside") & first_of_call & ~has_own)
    rows = rows.with_columns(_run=pl.col("_run") | own.to_series().fill_null(value=False))
    return rows.with_columns(group=_opens(rows).cum_sum().cast(pl.Int64))


def _opens(rows: pl.DataFrame) -> pl.Series:
    """Say which copies begin a prefetch: of those that begin a range, all with another call."""
    last = pl.when("_run").then(pl.col("call").fill_null(_NONE)).forward_fill()
    other = pl.col("_run") & (last != last.shift(1))
    opens = pl.col("_first") | (pl.col("_run") & pl.col("_falls")) | other
    return rows.select(opens.fill_null(value=True)).to_series()


def _summed(pieces: pl.DataFrame) -> pl.DataFrame:
    return pieces.group_by("group", maintain_order=True).agg(
        pl.col("pid", "_to", "call").first(),
        pl.col("start_ns").min(),
        pl.col("end_ns").max(),
        pl.col("va").min(),
        pl.col("_until").max(),
        pl.col("bytes").sum(),
        n_migrations=pl.len(),
        n_runs=pl.col("_run").sum(),
    )


def _with_calls(groups: pl.DataFrame, calls: pl.DataFrame, advice: pl.DataFrame) -> pl.DataFrame:
    """Give each prefetch its call: calls are queued, so earlier ones come first."""
    same = ["pid", "call"]
    ordered = groups.sort("pid", "start_ns", "group")
    used = ordered.select(same).drop_nulls("call").unique().sort(same)
    used = used.with_columns(_before=pl.col("call").shift(1).over("pid").fill_null(-1))
    # Not over places: what goes from GPU to GPU by way of the host goes to both in one call.
    cluster = [*same, "_to"]
    behind = pl.len().over(cluster) - 1 - pl.int_range(pl.len()).over(cluster)
    queued = pl.max_horizontal(pl.col("_before") + 1, pl.col("call") - behind.cast(pl.Int64))
    tied = (
        ordered.join(used, on=same, how="left", maintain_order="left")
        .with_columns(call=pl.when(pl.col("call").is_not_null()).then(queued))
        .drop("_before")
        .join(calls, on=same, how="left")
    )
    alone = pl.col("call").is_null()
    of_call = [name for name in calls.columns if name not in same]
    # Advice has no number: only a prefetch can be left without a copy.
    unnumbered = advice.with_columns(call=pl.lit(None, pl.Int64))
    advised = _latest(tied.filter(alone).drop(of_call, "call"), unnumbered)
    return pl.concat([tied.filter(~alone), advised.select(tied.columns)])


_MOST_BLOCKS: Final = 1 << 20


def _late(groups: pl.DataFrame, moves: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Add up what faults moved to the same place and VA blocks while the prefetch was under way."""
    key = [*_PLACE, "_block"]
    faults = (
        moves.filter(pl.col("cause_id").is_in(_FAULTS))
        .with_columns(_block=pl.col("va") // VA_BLOCK_BYTES)
        .sort(*key, "start_ns")
        .select(*key, at="start_ns", moved=pl.col("bytes").cum_sum().over(key))
        .sort("at")
    )
    opens = pl.min_horizontal("call_start_ns", "start_ns", _running_since(groups, work))
    first, last = pl.col("va") // VA_BLOCK_BYTES, (pl.col("_until") - 1) // VA_BLOCK_BYTES
    # More blocks than memory has are a broken cell.
    last = pl.min_horizontal(last, first + _MOST_BLOCKS)
    parts = (
        groups.with_columns(opens=opens)
        .select("group", *_PLACE, "opens", "end_ns", _block=pl.int_ranges(first, last + 1))
        .explode("_block")
        .cast({"_block": pl.UInt64})
        .join(faults.select(key).unique(), on=key, how="semi")
    )
    for name, edge in (("_low", "opens"), ("_high", "end_ns")):
        parts = (
            parts.with_columns(_edge=pl.col(edge) - 1)
            .sort("_edge")
            .join_asof(faults, left_on="_edge", right_on="at", by=key, check_sortedness=False)
            .with_columns(pl.col("moved").fill_null(0).alias(name))
            .drop("moved", "at", "_edge", strict=False)
        )
    return parts.group_by("group").agg(late_bytes=(pl.col("_high") - pl.col("_low")).sum())


def _running_since(groups: pl.DataFrame, work: pl.DataFrame) -> pl.Series:
    """Find since when work runs on the GPU at the first copy of each prefetch; else null."""
    ordered = work.sort(*_PLACE, "start_ns", "end_ns").with_columns(
        reach=pl.col("end_ns").cum_max().over(_PLACE)
    )
    # The first row, by start, that reaches past a time is the earliest that is not over then.
    firsts = ordered.unique([*_PLACE, "reach"], keep="first", maintain_order=True)
    return (
        groups.select("group", *_PLACE, at=pl.col("start_ns") + 1)
        .with_row_index("_row")
        .sort("at")
        .join_asof(
            firsts.select(*_PLACE, "reach", since="start_ns").sort("reach"),
            left_on="at",
            right_on="reach",
            by=_PLACE,
            strategy="forward",
            check_sortedness=False,
        )
        .sort("_row")
        .select(pl.when(pl.col("since") < pl.col("at")).then("since"))
        .to_series()
    )


def _fate(pieces: pl.DataFrame, moves: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Follow each prefetched page to the next time that it leaves its GPU, and back."""
    prefetched = pieces.filter(pl.col("_to") != _HOST)
    block = pl.col("va") // VA_BLOCK_BYTES
    touched = prefetched.select("pid", _block=block).unique()
    # The copies of prefetches come with their number, the others without.
    others = moves.filter(pl.col("cause_id").ne_missing(CAUSE_USER) | (pl.col("_to") == _HOST))
    others = others.with_columns(_block=block).join(touched, on=["pid", "_block"], how="semi")
    columns = ["pid", "_to", "_from", "start_ns", "end_ns", "va", "bytes", "cause_id"]
    both = pl.concat([prefetched.select(*columns, "group"), others.select(columns)], how="diagonal")
    comes = both.filter(pl.col("_to") != _HOST).with_columns(device_id="_to", comes=True)
    goes = both.filter(pl.col("_from") != _HOST).with_columns(device_id="_from", comes=False)
    ran = union(work.lazy(), by=_PLACE)
    began = union(work.lazy().with_columns(end_ns=pl.col("start_ns") + 1), by=_PLACE)
    evicted, size = pl.col("leaves_cause") == CAUSE_EVICTION, pl.col("bytes")
    parts = []
    for part in _portions(at_own_addresses(with_block_life(pl.concat([comes, goes])))):
        spans = _until_gone(cut(part, edges_of(part))).lazy()
        spans = overlap(spans, ran, by=_PLACE).rename({"overlap_ns": "ran_ns"})
        found = (
            overlap(spans, began, by=_PLACE)
            .group_by("group")
            .agg(
                early_bytes=size.filter(evicted & (pl.col("overlap_ns") == 0)).sum(),
                evicted_bytes=size.filter(evicted).sum(),
                wasted_bytes=size.filter(pl.col("ran_ns") == 0).sum(),
            )
        )
        parts.append(found.collect())
    sums = pl.concat(parts).group_by("group").agg(pl.all().sum())
    return prefetched.select("group").unique().join(sums, on="group", how="left").fill_null(0)


def _portions(events: pl.DataFrame) -> list[pl.DataFrame]:
    """Divide events by their lives, so that the pieces of each part fit into memory."""
    n = pl.len().over("life").cast(pl.Int64)
    # A copy is cut at most at both ends of each copy of its life, and once per page.
    pieces = pl.min_horizontal(2 * n, VA_BLOCK_BYTES // PAGE_BYTES).cum_sum() // _PORTION
    parts = events.sort("life").with_columns(portion=pieces)
    parts = parts.with_columns(pl.col("portion").first().over("life"))
    return parts.partition_by("portion") or [parts]


def _until_gone(pieces: pl.DataFrame) -> pl.DataFrame:
    """Find for each prefetched piece when and why it leaves its GPU; without those that stay."""
    at = pl.when("comes").then("end_ns").otherwise("start_ns")
    # Of events at one time, arrivals come first: what arrives can leave at once.
    events = pieces.with_columns(at=at).sort(
        "segment", "at", "comes", "cause_id", "group", descending=[False] * 2 + [True] + [False] * 2
    )
    leaves = pl.when(~pl.col("comes")).then(pl.int_range(pl.len())).backward_fill()
    same = pl.col("segment").gather(leaves) == pl.col("segment")
    return (
        events.with_columns(
            same=same,
            leaves_ns=pl.col("at").gather(leaves),
            leaves_cause=pl.col("cause_id").gather(leaves),
        )
        .filter(pl.col("comes") & pl.col("group").is_not_null() & pl.col("same"))
        .select(
            "group",
            "bytes",
            "leaves_cause",
            pid="owner",
            _to="device_id",
            start_ns="at",
            end_ns="leaves_ns",
        )
    )


def _finished(rows: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Order the prefetches, and say what speaks against each."""
    counts = ["n_migrations", "n_runs", "bytes"]
    seen = work.select("pid").unique().with_columns(_seen=True)
    late, early = pl.col("late_bytes").fill_null(0), pl.col("early_bytes").fill_null(0)
    outcome = (
        pl.when(pl.col("n_migrations") == 0)
        .then(pl.lit("moved_nothing"))
        .when((late > 0) & (late >= early))
        .then(pl.lit("late"))
        .when(early > 0)
        .then(pl.lit("early"))
        .otherwise(pl.lit("in_time"))
    )
    moved = pl.col("n_migrations") > 0
    unknown = ["early_bytes", "wasted_bytes"]
    return (
        rows.with_columns(pl.col(counts).fill_null(0))
        .join(seen, on="pid", how="left")
        .with_columns(
            pl.when(moved).then(pl.col("late_bytes").fill_null(0)),
            pl.when("_seen").then(pl.col(unknown)),
            to_host=pl.when(moved).then(pl.col("_to") == _HOST),
            span_bytes=(pl.col("_until") - pl.col("va")).cast(pl.Int64),
        )
        .with_columns(
            pid=pl.when(pl.col("pid") != _NONE).then("pid"),
            device_id=pl.when(pl.col("_to") >= 0).then("_to"),
            outcome=outcome,
        )
        .sort("pid", pl.coalesce("call_start_ns", "start_ns"), "start_ns", "va", "call")
        .with_row_index("prefetch_id")
    )
