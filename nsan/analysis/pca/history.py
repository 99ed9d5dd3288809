"""The history of an allocator on the trace's clock: its tensors, segments and entries.

With a snapshot it is that of PyTorch's caching allocator, replayed. Without one there is no cache: every
managed allocation of the trace is a segment that holds one tensor, and the entries are its allocation and
its release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysis.allocator.call_sites import with_call_sites
from nsan.analysis.allocator.replayed import BEFORE, replays_of
from nsan.analysis.allocator.tensors import with_own_stacks
from nsan.analysis.pca.stream_order import newest_open
from nsan.torch_alloc.tables import STACKS
from nsan.units import NS_PER_US
from nsan.uvm.constants import MANAGED_KINDS

if TYPE_CHECKING:
    from nsan.analysis.pca.clock import Clock

NEVER_NS: Final = (1 << 62) - 1
"""Later than any time of a trace."""

__all__ = ["BEFORE", "History", "histories_of_snapshot", "histories_of_trace", "with_program"]


@dataclass(frozen=True)
class History:
    """What an allocator did with the memory of one GPU of a process.

    Attributes
    ----------
    pid : int, optional
        Process; None where the trace does not say.
    device_id : int, optional
        GPU; None where the trace does not say.
    tensors : DataFrame
        In order of ``tensor_id``: the columns of ``TENSOR_LIVES`` but ``reused_bytes``, the call site and
        the annotation; and ``is_pending``: its free was asked for before the history began.
    segments : DataFrame
        ``va``, ``bytes``, ``alloc_sequence`` (null: before), ``free_sequence`` (null: still there).
    entries : DataFrame
        ``sequence``, ``time_ns`` (Int64, never descending, on the trace's clock), in order.
    first_life : int
        Number of its first segment, over all histories.
    since_ns, until_ns : int, optional
        It covers the moments from the first to before the second, on the trace's clock; None: all.
        :func:`nsan.analysis.pca.coverage.bounded` finds the second.
    """

    pid: int | None
    device_id: int | None
    tensors: pl.DataFrame
    segments: pl.DataFrame
    entries: pl.DataFrame
    first_life: int
    since_ns: int | None = None
    until_ns: int | None = None

    def covers(self, moments: pl.Expr) -> pl.Expr:
        """Say whether it reaches moments.

        Parameters
        ----------
        moments : Expr of Int64
            ns on the trace's clock.

        Returns
        -------
        Expr of Boolean
            False: what it was like then is not known.
        """
        begun = pl.lit(value=True) if self.since_ns is None else moments >= self.since_ns
        return begun if self.until_ns is None else begun & (moments < self.until_ns)

    def positions(self, moments: pl.Series) -> pl.Series:
        """Count the entries that were done at moments.

        Parameters
        ----------
        moments : Series of Int64
            ns on the trace's clock, no nulls.

        Returns
        -------
        Series of Int64
            One more than the last entry whose time had come; 0 where none had.
        """
        done = self.entries["time_ns"].search_sorted(moments, side="right").cast(pl.Int64)
        after = pl.concat([pl.Series([0], dtype=pl.Int64), self.entries["sequence"] + 1])
        return after.gather(done).alias("position")


def histories_of_snapshot(
    snapshot: Mapping[str, pl.LazyFrame], clock: Clock, pid: int | None
) -> list[History]:
    """Read the histories of all GPUs of a snapshot.

    Parameters
    ----------
    snapshot : mapping of str to LazyFrame
        Tables of a snapshot.
    clock : Clock
        Turns its times into those of the trace.
    pid : int, optional
        Process of the trace that wrote it.

    Returns
    -------
    list of History
        By GPU. One that does not begin with an empty allocator covers nothing before its first entry.
    """
    found = replays_of(
        snapshot["segments"],
        snapshot["blocks"],
        snapshot["allocator_events"],
        snapshot["allocator_settings"],
    )
    times = found.events.select(
        "device_id", "sequence", time_ns=clock.ns().cum_max().forward_fill().over("device_id")
    )
    blocks = snapshot["blocks"].select("device_id", "va", _state="state").collect()
    lives = _lives(with_own_stacks(found), times, blocks).with_columns(pid=pl.lit(pid, pl.UInt32))
    segments = found.segments.sort("device_id", maintain_order=True)
    gpus = pl.concat([lives["device_id"], segments["device_id"], times["device_id"]])
    histories = _by_gpu(
        {(pid, gpu): {"device_id": gpu} for gpu in gpus.unique().sort()},
        lives,
        segments,
        times.drop_nulls("time_ns"),
    )
    timed = times.group_by("device_id").agg(pl.col("time_ns").first())
    from_start = {
        gpu
        for gpu, first_ns in timed.iter_rows()
        if first_ns is not None and found.by_gpu[gpu].starts_empty
    }
    return [
        each if each.device_id in from_start else replace(each, since_ns=_first_ns(each))
        for each in histories
    ]


def _first_ns(history: History) -> int:
    """Give the time of the first entry; a history without any begins never."""
    entries = history.entries["time_ns"]
    return NEVER_NS if entries.is_empty() else int(entries[0])


def _lives(tensors: pl.DataFrame, times: pl.DataFrame, blocks: pl.DataFrame) -> pl.DataFrame:
    """Put the tensors of a replay into the columns of ``TENSOR_LIVES``."""
    done = "free_completed_sequence"
    held = pl.col(done).is_null()
    known = tensors.drop("alloc_ns", "free_ns")
    for column, entry in (("alloc_ns", "alloc_sequence"), ("free_ns", done)):
        at = times.rename({"sequence": entry, "time_ns": column})
        known = known.join(at, on=["device_id", entry], how="left", maintain_order="left")
    # Of a block that is still held the snapshot says whether its free is pending.
    blocks = blocks.unique(["device_id", "va"], keep="first", maintain_order=True)
    waits = held & (pl.col("_state") == "active_pending_free").fill_null(value=False)
    return (
        known.join(blocks, on=["device_id", "va"], how="left", maintain_order="left")
        .sort("device_id", maintain_order=True)
        .with_columns(
            tensor_id=pl.int_range(pl.len(), dtype=pl.Int64),
            free_sequence=pl.col(done),
            # A free that was pending before the history has at most an end.
            is_pending=pl.col("free_requested_sequence").is_null() & (waits | ~held),
        )
        .drop("_state", done)
    )


def histories_of_trace(allocations: pl.DataFrame) -> list[History]:
    """Take every managed allocation of a trace for a tensor of its own.

    Parameters
    ----------
    allocations : DataFrame, ``ALLOCATIONS``
        In any order.

    Returns
    -------
    list of History
        By process and GPU.
    """
    managed = (
        allocations.filter(
            pl.col("kind").cast(pl.String).is_in(MANAGED_KINDS),
            pl.col("va").is_not_null() & (pl.col("bytes") > 0),
        )
        .sort("pid", "device_id", "alloc_ns", "va", "free_ns", maintain_order=True)
        .with_columns(tensor_id=pl.int_range(pl.len(), dtype=pl.Int64))
    )
    keys = ["pid", "device_id"]
    entries = (
        pl.concat(
            [
                managed.select(*keys, "tensor_id", time_ns="alloc_ns", is_free=pl.lit(value=False)),
                managed.select(*keys, "tensor_id", time_ns="free_ns", is_free=pl.lit(value=True)),
            ]
        )
        .drop_nulls("time_ns")
        .sort(*keys, "time_ns", pl.col("is_free").not_(), "tensor_id")
        .with_columns(sequence=pl.int_range(pl.len(), dtype=pl.Int64).over(keys))
    )
    lives = managed
    for name, is_free in (("alloc_sequence", False), ("free_sequence", True)):
        mine = entries.filter(is_free=is_free).select("tensor_id", pl.col("sequence").alias(name))
        lives = lives.join(mine, on="tensor_id", how="left", maintain_order="left")
    size = pl.col("bytes")
    lives = lives.with_columns(
        block_bytes=size,
        requested_bytes=size,
        segment_va="va",
        segment_bytes=size,
        free_requested_sequence="free_sequence",
        is_pending=pl.lit(value=False),
        pool=pl.lit(None, pl.String),
        stream=pl.lit(None, pl.UInt64),
        stack_id=pl.lit(None, pl.Int64),
    )
    pairs = lives.select(keys).unique().sort(keys).rows()
    named = {pair: dict(zip(keys, pair, strict=True)) for pair in pairs}
    return _by_gpu(named, lives, lives.select(*keys, *_SEGMENT), entries)


_SEGMENT: Final = ("va", "bytes", "alloc_sequence", "free_sequence")


def _by_gpu(
    gpus: Mapping[tuple[int | None, int | None], Mapping[str, int | None]],
    lives: pl.DataFrame,
    segments: pl.DataFrame,
    entries: pl.DataFrame,
) -> list[History]:
    """Take the rows of each GPU apart."""
    found: list[History] = []
    first = 0
    for (pid, gpu), keys in gpus.items():
        mine = pl.all_horizontal(pl.col(name).eq_missing(value) for name, value in keys.items())
        own = segments.filter(mine).select(_SEGMENT)
        times = entries.filter(mine).select("sequence", "time_ns")
        found.append(History(pid, gpu, lives.filter(mine), own, times, first))
        first += own.height
    return found


def with_program(
    lives: pl.DataFrame,
    snapshot: Mapping[str, pl.LazyFrame] | None,
    ranges: pl.DataFrame,
    clock: Clock | None,
) -> pl.DataFrame:
    """Say where in the program each tensor was allocated.

    Parameters
    ----------
    lives : DataFrame
        Tensors of all histories: reads ``pid``, ``device_id``, ``tensor_id``, ``alloc_ns``, ``stack_id``.
    snapshot : mapping of str to LazyFrame, optional
        Tables of the snapshot: ``stacks`` and ``annotations`` are read.
    ranges : DataFrame, ``NVTX_RANGES``
        Ranges of the trace, used for a GPU of which the snapshot has no annotation.
    clock : Clock, optional
        Of the snapshot.

    Returns
    -------
    DataFrame
        The rows, in their order, with the columns of ``SITE_COLUMNS`` and ``annotation``: the range that
        was open and had begun last.
    """
    # A time of a snapshot is a whole microsecond: the entry may be half of one away from it.
    slack_ns = 0 if snapshot is None else NS_PER_US // 2
    of_program = ranges.filter(pl.col("name").is_not_null()).select(
        "pid", "name", "start_ns", "end_ns", order="depth"
    )
    own = _annotated(snapshot["annotations"], clock) if snapshot and clock else None
    if own is None or own.is_empty():
        found = [_named(lives, of_program, "pid", slack_ns)]
    else:
        marked = pl.col("device_id").is_in(own["device_id"].unique().implode())
        found = [
            _named(lives.filter(marked), own, "device_id", slack_ns),
            _named(lives.filter(~marked), of_program, "pid", slack_ns),
        ]
    stacks = pl.LazyFrame(schema=STACKS.schema) if snapshot is None else snapshot["stacks"]
    named = pl.concat(found).sort("tensor_id")
    return with_call_sites(named.lazy(), stacks).collect()


def _annotated(annotations: pl.LazyFrame, clock: Clock) -> pl.DataFrame:
    """Put starts and ends of ranges together: an end is that of the last open one of its name."""
    rows = (
        annotations.filter(pl.col("time_us").is_not_null() & pl.col("name").is_not_null())
        .select("device_id", "name", "stage", time_ns=clock.ns())
        .collect()
    )
    opened: list[tuple[int, str, int]] = []
    ends: list[int] = []
    still: dict[tuple[int, str], list[int]] = {}
    for device, name, stage, time in rows.iter_rows():
        open_now = still.setdefault((device, name), [])
        if stage == "START":
            open_now.append(len(ends))
            opened.append((device, name, time))
            ends.append(NEVER_NS)
        elif stage == "END" and open_now:
            ends[open_now.pop()] = time
    schema = {"device_id": pl.Int64, "name": pl.String, "start_ns": pl.Int64}
    return pl.DataFrame(opened, schema=schema, orient="row").with_columns(
        end_ns=pl.Series(ends, dtype=pl.Int64), order=pl.int_range(pl.len(), dtype=pl.Int64)
    )


def _named(lives: pl.DataFrame, ranges: pl.DataFrame, key: str, slack_ns: int) -> pl.DataFrame:
    """Add the name of the range that was open when each tensor was allocated."""
    groups = pl.concat([lives.select(key), ranges.select(key)]).unique().sort(key)
    groups = groups.with_columns(group=pl.int_range(pl.len(), dtype=pl.Int64))
    spans = (
        ranges.sort(key, "start_ns", "order", maintain_order=True)
        .join(groups, on=key, how="left", nulls_equal=True, maintain_order="left")
        .with_columns(
            pl.col("start_ns") - slack_ns,
            pl.col("end_ns") + slack_ns,
            id=pl.int_range(pl.len(), dtype=pl.Int64),
        )
    )
    asked = lives.join(groups, on=key, how="left", nulls_equal=True, maintain_order="left")
    steps = newest_open(spans.select("group", "start_ns", "end_ns", "id"))
    return (
        asked.sort("alloc_ns", maintain_order=True)
        .join_asof(
            steps.rename({"start_ns": "_since"}),
            left_on="alloc_ns",
            right_on="_since",
            by="group",
            coalesce=False,
            check_sortedness=False,
        )
        .join(spans.select("id", annotation="name"), on="id", how="left", maintain_order="left")
        .drop("group", "id", "_since")
    )
