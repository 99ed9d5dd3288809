"""When the host asked for what happened on a GPU: the moment at which its work was launched.

The GPU runs behind the host. What a kernel touches is what the allocator had given out when the kernel was
launched, not when it ran: faults, copies and evictions belong to the launch of the work they happened in.
The moment of a launch is the middle of its API call, which no allocation of that thread shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import polars as pl

from nsan.analysis.attribution.work import (
    WORK_READS,
    gpu_work,
    group_numbers,
    offsets,
    shifted,
    with_group,
)
from nsan.analysis.health import MAX_CLOCK_SKEW_NS
from nsan.analysis.nearest import nearest
from nsan.analysis.pca.overlaps import side_by_side
from nsan.analysis.pca.tables import ORDER

RULE: Final = pl.Enum(["fault", "user", "eviction", "host"])
"""How an event finds its moment: raised by work; asked for by a prefetch call; made room for either;
in the order of the host."""

LAUNCH_READS: Final = {
    **WORK_READS,
    "api_calls": ("start_ns", "end_ns", "pid", "correlation_id", "name", "return_value"),
    "gpu_faults": ("start_ns", "end_ns", "pid", "device_id"),
    "migrations": ("start_ns", "end_ns", "pid", "device_id", "direction", "cause_id"),
}
"""What is read of a trace."""

BETWEEN: Final = ("earliest_ns", "latest_ns")
"""Columns of events: the launches between which an event's is."""

_PREFETCH_CALL: Final = r"Mem\w*Prefetch"


def rule_of() -> pl.Expr:
    """Say of a migration how it finds its moment.

    Returns
    -------
    Expr
        ``RULE``; reads ``direction`` and ``cause``.
    """
    out, cause = pl.col("direction") == "dtoh", pl.col("cause").cast(pl.String)
    return (
        pl.when(cause == "user")
        .then(pl.lit("user"))
        .when(out & cause.is_in(["coherence", "prefetch"]))
        .then(pl.lit("host"))
        .when(out)
        .then(pl.lit("eviction"))
        .otherwise(pl.lit("fault"))
        .cast(RULE)
    )


def newest_open(spans: pl.DataFrame) -> pl.DataFrame:
    """Say for each stretch of time which of the spans that are open began last.

    Parameters
    ----------
    spans : DataFrame
        ``group``, ``start_ns``, ``end_ns``, ``id`` (Int64, no nulls), ordered by group and start; of equal
        starts the later row counts as begun later.

    Returns
    -------
    DataFrame
        One row per stretch, from its ``start_ns`` to the next of its ``group``, ordered by both, with
        ``id``; null where none is open.
    """
    found: list[tuple[int, int, int | None]] = []
    still: list[tuple[int, int]] = []
    group = -1

    def close(until: int | None) -> None:
        while still and (until is None or still[-1][0] <= until):
            end = still.pop()[0]
            while still and still[-1][0] <= end:
                still.pop()
            found.append((group, end, still[-1][1] if still else None))

    for its, start, end, number in spans.filter(pl.col("start_ns") < pl.col("end_ns")).iter_rows():
        if its != group:
            close(None)
            group = its
        close(start)
        still.append((end, number))
        found.append((group, start, number))
    close(None)
    schema = dict.fromkeys(["group", "start_ns", "id"], pl.Int64)
    rows = pl.DataFrame(found, schema=schema, orient="row")
    # Where one ends as another begins, the last row says what is open then.
    return rows.unique(["group", "start_ns"], keep="last", maintain_order=True)


@dataclass(frozen=True)
class Launches:
    """The work of all GPUs, and when the host asked for it.

    Attributes
    ----------
    groups : DataFrame
        ``pid``, ``device_id``, ``group`` of each GPU.
    work : DataFrame
        One row per piece of work, by group and start: ``id`` (Int64, from 0), ``group``, ``start_ns`` and
        ``end_ns`` on the clock of faults, ``launch_ns`` on that of the host (null: no API call known).
    prefetches : DataFrame
        Prefetch calls: ``pid``, ``start_ns``, ``middle_ns``.
    """

    groups: pl.DataFrame
    work: pl.DataFrame
    prefetches: pl.DataFrame

    def with_moments(self, events: pl.DataFrame) -> pl.DataFrame:
        """Find the moment of the host that each event belongs to.

        Parameters
        ----------
        events : DataFrame
            Reads ``pid``, ``device_id``, ``start_ns``, ``end_ns``, ``rule`` (``RULE``); other columns stay.

        Returns
        -------
        DataFrame
            The rows, in their order, with ``moment_ns`` (Int64, on the host's clock; null: no start),
            ``order`` (``ORDER``; null: no start), and where the moment is that of one of several pieces
            of work that ran, ``earliest_ns`` and ``latest_ns``: the first and last launch of these.
        """
        numbered = events.with_row_index("_row")
        timed = with_group(numbered, self.groups).filter(pl.col("start_ns").is_not_null())
        order = pl.when(pl.col("_launch_ns").is_null()).then(pl.lit("host"))
        return (
            numbered.join(_moments(timed, self), on="_row", how="left", maintain_order="left")
            .with_columns(
                moment_ns=pl.coalesce("_launch_ns", "start_ns"),
                order=pl.when(pl.col("start_ns").is_not_null()).then(
                    order.otherwise(pl.lit("stream")).cast(ORDER)
                ),
            )
            .drop("_row", "_launch_ns")
        )


def launches_of(trace: Mapping[str, pl.LazyFrame]) -> Launches:
    """Find when the host launched the work of the GPUs.

    Parameters
    ----------
    trace : mapping of str to LazyFrame
        Reads :data:`LAUNCH_READS`.

    Returns
    -------
    Launches
        With work moved onto the clock of faults, as
        :func:`nsan.analysis.attribution.work.clock_offset` estimates.
    """
    frames = {name: trace[name].select(columns).collect() for name, columns in LAUNCH_READS.items()}
    work = gpu_work(*(frames[name].lazy() for name in WORK_READS))
    rows, moved = frames["gpu_faults"], frames["migrations"]
    groups = group_numbers(rows, moved, work)
    rows, moved, work = (with_group(each, groups) for each in (rows, moved, work))
    calls = _calls(frames["api_calls"])
    prefetches = calls.filter(pl.col("name").str.contains(_PREFETCH_CALL))
    return Launches(
        groups,
        _launched(shifted(work, offsets(rows, moved, work, groups)), calls),
        prefetches.select("pid", "start_ns", "middle_ns"),
    )


def _calls(api_calls: pl.DataFrame) -> pl.DataFrame:
    """List the calls that did not fail, with their middle."""
    start = pl.col("start_ns")
    return api_calls.filter(
        start.is_not_null(), pl.col("return_value").fill_null(0) == 0
    ).with_columns(middle_ns=start + (pl.col("end_ns").fill_null(start) - start) // 2)


def _launched(work: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Add to each piece of work, in the order of starts, the moment of its launch."""
    by_id = (
        calls.filter(pl.col("correlation_id") != 0)
        .sort("start_ns", "middle_ns")
        .group_by("pid", "correlation_id", maintain_order=True)
        .agg(launch_ns=pl.col("middle_ns").first())
    )
    known = work.join(by_id, on=["pid", "correlation_id"], how="left", nulls_equal=True)
    return known.sort("group", "start_ns", "work_id").with_columns(
        id=pl.int_range(pl.len(), dtype=pl.Int64)
    )


def _moments(events: pl.DataFrame, found: Launches) -> pl.DataFrame:
    """Give ``_row`` and ``_launch_ns``, null where the host's order counts; and between which launches it is."""
    placed = _with_neighbours(_with_running(events, found.work), found.work)
    called = _with_call(placed, found.prefetches)
    soon = pl.col("_next_ns") - pl.col("start_ns") <= MAX_CLOCK_SKEW_NS
    following = pl.when(soon).then("_after_ns")
    inside, rule, call = pl.col("_inside"), pl.col("rule"), pl.col("_call_ns")
    launch = (
        pl.when(rule == "host")
        .then(None)
        .when(rule == "user")
        .then(pl.coalesce(call, pl.when(inside).then("_before_ns")))
        .when(inside)
        .then("_before_ns")
        .when(rule == "eviction")
        .then(pl.coalesce(call, following))
        .otherwise(following)
    )
    is_of_work = inside & (rule != "host") & ((rule != "user") | call.is_null())
    between = [pl.when(is_of_work).then(f"_{name}").alias(name) for name in BETWEEN]
    return called.select("_row", *between, _launch_ns=launch)


def _with_running(events: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Add ``_id``: the work that ran; of several the one that began last.

    That of the last instant counts first: work cannot end before the replay of its fault, and a fault in
    the first moments of a kernel may be stamped before it.
    """
    steps = newest_open(work.select("group", "start_ns", "end_ns", "id"))
    last = pl.max_horizontal(pl.col("end_ns") - 1, "start_ns")
    found = events.with_columns(_last=last)
    for at, name in (("_last", "_ended"), ("start_ns", "_began")):
        found = _at_time(found, at, steps.rename({"id": name}))
    # A prefetch call waits for no replay.
    by_call = pl.col("rule") == "user"
    newest = pl.when(by_call).then("_began").otherwise(pl.coalesce("_ended", "_began"))
    at_end = pl.col("_ended").is_not_null() & ~by_call
    seen = found.with_columns(_id=newest, _seen=pl.when(at_end).then("_last").otherwise("start_ns"))
    spans = side_by_side(work).rename({name: f"_{name}" for name in BETWEEN})
    return _at_time(seen, "_seen", spans).drop("_ended", "_began", "_last", "_seen")


def _at_time(events: pl.DataFrame, at: str, steps: pl.DataFrame) -> pl.DataFrame:
    """Add to events what holds at a time, of steps that are in force until the next of their group."""
    return (
        events.sort(at, maintain_order=True)
        .join_asof(
            steps.rename({"start_ns": "_since"}).sort("_since", maintain_order=True),
            left_on=at,
            right_on="_since",
            by="group",
            coalesce=False,
            check_sortedness=False,
        )
        .drop("_since")
    )


def _with_neighbours(events: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Add launches around each event.

    ``_inside``, ``_before_ns`` (launch of the work that ran, or of the last that had begun), ``_next_ns`` and
    ``_after_ns`` (start and launch of the next one), ``_is_known`` (any work of that GPU has a launch).
    """
    own = work.select(_id="id", _own_ns="start_ns", _own_launch_ns="launch_ns")
    begun = work.select("group", "start_ns", _begun_launch_ns="launch_ns")
    later = work.select("group", _next_ns="start_ns", _after_ns="launch_ns")
    known = work.filter(pl.col("launch_ns").is_not_null())["group"].unique().implode()
    return (
        events.join(own, on="_id", how="left", maintain_order="left")
        .sort("start_ns", maintain_order=True)
        .join_asof(begun, on="start_ns", by="group", check_sortedness=False)
        .with_columns(_at=pl.max_horizontal("start_ns", "_own_ns"))
        .sort("_at", maintain_order=True)
        .join_asof(
            later,
            left_on="_at",
            right_on="_next_ns",
            by="group",
            strategy="forward",
            allow_exact_matches=False,
            coalesce=False,
            check_sortedness=False,
        )
        .with_columns(
            _inside=pl.col("_id").is_not_null(),
            _before_ns=pl.when(pl.col("_id").is_not_null())
            .then("_own_launch_ns")
            .otherwise("_begun_launch_ns"),
            _is_known=pl.col("group").is_in(known),
        )
    )


def _with_call(events: pl.DataFrame, prefetches: pl.DataFrame) -> pl.DataFrame:
    """Add ``_call_ns``: the last prefetch call between the launches around an event.

    A prefetch has no row of its own on the GPU, but runs in the order of its stream. Copies cannot begin
    before the call; but as the two clocks differ, one that follows at once is taken where there is no other.
    """
    calls = prefetches.select("pid", "middle_ns", _call_start_ns="start_ns")
    start = pl.col("start_ns")
    until = pl.min_horizontal(start, pl.col("_after_ns") - 1)
    asked = events.with_columns(_until=until)
    before = nearest(asked.lazy(), calls.lazy(), on=("_until", "_call_start_ns"), by=["pid"])
    both = nearest(
        before.rename({"middle_ns": "_last_ns"}).drop("_call_start_ns"),
        calls.lazy(),
        on=("_until", "_call_start_ns"),
        by=["pid"],
        forward=True,
    ).collect()
    is_between = [
        pl.when(
            pl.col("_is_known"), (pl.col(call) > pl.col("_before_ns")).fill_null(value=True)
        ).then(call)
        for call in ("_last_ns", "middle_ns")
    ]
    soon = (pl.col("_call_start_ns") - start <= MAX_CLOCK_SKEW_NS) & (
        pl.col("middle_ns") < pl.col("_after_ns")
    ).fill_null(value=True)
    return both.with_columns(_call_ns=pl.coalesce(is_between[0], pl.when(soon).then(is_between[1])))
