"""What another allocator, or another setting, would have taken for the same requests.

A history says in which order memory was asked for and freed. That order is given to an allocator again:
to the same one, to check the method, or to another one. What a program would have done otherwise (a
request that fails, a retry of its own) cannot be told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import polars as pl

from nsan.errors import AllocatorFullError
from nsan.torch_alloc.blocks import Block, Segment
from nsan.torch_alloc.constants import DEFAULT_POOL
from nsan.torch_alloc.heap import ascending_places

if TYPE_CHECKING:
    import numpy.typing as npt

    from nsan.torch_alloc.replay import Replay

_RELEASE: Final = -(1 << 62)
"""Operations from here down release memory: the number of the release counts upwards from here."""

_RELEASES: Final = ("segment_free", "segment_unmap")
_GROWTHS: Final = ("segment_alloc", "segment_map")
_MOST_BYTES: Final = 1 << 50
_STEP: Final = 1 << 15
"""Operations between two calls of a progress function."""


class Allocator(Protocol):
    """What a rerun needs of an allocator."""

    @property
    def reserved_bytes(self) -> int:
        """Taken from the driver now."""

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that was taken."""

    @property
    def peak_active_bytes(self) -> int:
        """The most that was in blocks in use."""

    @property
    def n_segments_made(self) -> int:
        """Segments taken from the driver so far."""

    @property
    def n_retries(self) -> int:
        """How often all free memory was released to serve a request."""

    def allocate(self, n_bytes: int, *, stream: int = ..., pool: str = ...) -> Block:
        """Serve a request."""

    def free(self, block: Block, *, pending: bool = ...) -> None:
        """Take a block back."""

    def empty_cache(self) -> list[Segment]:
        """Give free segments back to the driver."""

    def close_pool(self, pool: str) -> list[Segment]:
        """End the use of a private pool."""


@dataclass(frozen=True)
class Requests:
    """What a program asked of its allocator, in order.

    Attributes
    ----------
    n_bytes : ndarray of int64, shape (n_requests,)
        Bytes asked for, by request in the order in which they are made here.
    streams : ndarray of uint64, shape (n_requests,)
        Handle of the stream of each.
    pools : list of str, length n_requests
        Pool of each.
    operations : ndarray of int64, shape (n_operations,)
        What happens: request ``i`` is made (``i``), its memory is free again (``-1 - i``), or memory is
        released (far below).
    sequences : ndarray of int64, shape (n_operations,)
        Entry of the history; -1: before it.
    releases : list of tuple of str
        By release: the pools of which memory was released.
    n_before : int
        Requests from before the history. They come first, in the order of their addresses, because their
        own order is not known.
    n_unclear_releases : int
        Releases right before a new segment: taken as calls of empty_cache, but a retry after a refusal
        of the driver or a garbage collection looks the same.
    n_left_out : int
        Requests that no allocator can be asked for: for nothing, or for more than a PiB.
    """

    n_bytes: npt.NDArray[np.int64]
    streams: npt.NDArray[np.uint64]
    pools: list[str]
    operations: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64]
    releases: list[tuple[str, ...]]
    n_before: int
    n_unclear_releases: int
    n_left_out: int


@dataclass(frozen=True)
class Rerun:
    """What an allocator did with requests.

    Attributes
    ----------
    peak_reserved_bytes, peak_active_bytes : int
        The most that was taken from the driver, and that was in blocks in use.
    reserved_bytes : ndarray of int64, shape (n_operations,)
        Taken from the driver after each operation; shorter if memory ran out.
    n_segments_made : int
        Segments (or ranges of chunks) taken from the driver.
    n_retries : int
        How often all free memory was released to serve a request.
    n_stitches, stitched_bytes : int
        Blocks made of several, and their bytes; 0 where there is no stitching.
    out_of_memory : int, optional
        The request that could not be served, as its place among the requests: the rerun ends there.
    """

    peak_reserved_bytes: int
    peak_active_bytes: int
    reserved_bytes: npt.NDArray[np.int64]
    n_segments_made: int
    n_retries: int
    n_stitches: int
    stitched_bytes: int
    out_of_memory: int | None


def requests_of(replay: Replay) -> Requests:
    """Take the requests out of a replayed history.

    Parameters
    ----------
    replay : Replay
        Of one GPU. Reads ``tensors``, ``segments`` and ``series``.

    Returns
    -------
    Requests
        Memory is free again when its free completes. Entries of releases in a row are one call of
        empty_cache; one right before an oom entry belongs to the failed request and is left out, as is
        that request. Without a cache the end of a segment is that of its tensor: there are no releases.
    """
    asked = pl.coalesce("requested_bytes", "block_bytes").alias("asked")
    every = replay.tensors.with_columns(asked)
    # What the history lacks comes before it: a null sequence sorts first.
    tensors = every.filter(pl.col("asked").is_between(1, _MOST_BYTES)).sort(
        "alloc_sequence", "va", nulls_last=False
    )
    made = tensors["alloc_sequence"].fill_null(-1).to_numpy().astype(np.int64)
    freed = tensors["free_completed_sequence"]
    own = np.arange(tensors.height, dtype=np.int64)
    is_freed = freed.is_not_null().to_numpy()
    ends = freed.drop_nulls().to_numpy().astype(np.int64)
    starts, releases, n_unclear = _releases(replay) if replay.is_caching else ([], [], 0)
    sequences = np.concatenate([made, ends, np.array(starts, np.int64)])
    codes = np.concatenate(
        [own, -1 - own[is_freed], _RELEASE + np.arange(len(starts), dtype=np.int64)]
    )
    order = np.argsort(sequences, kind="stable")
    return Requests(
        n_bytes=tensors["asked"].to_numpy().astype(np.int64),
        streams=tensors["stream"].fill_null(0).to_numpy().astype(np.uint64),
        pools=tensors["pool"].fill_null(DEFAULT_POOL).to_list(),
        operations=codes[order],
        sequences=sequences[order],
        releases=releases,
        n_before=int((made < 0).sum()),
        n_unclear_releases=n_unclear,
        n_left_out=every.height - tensors.height,
    )


def _releases(replay: Replay) -> tuple[list[int], list[tuple[str, ...]], int]:
    """Find the releases: entries in a row. Give where each begins, its pools, how many are unclear."""
    entries = replay.series.select("sequence", action=pl.col("action").cast(pl.String))
    action = pl.col("action")
    runs = (
        entries.with_columns(
            _is_release=action.is_in(_RELEASES), _run=action.is_in(_RELEASES).rle_id()
        )
        .group_by("_run", maintain_order=True)
        .agg(
            pl.col("_is_release").first(),
            pl.col("sequence").first().alias("start"),
            pl.col("sequence").last().alias("stop"),
            action.first(),
        )
        .with_columns(_next=action.shift(-1))
        .filter(pl.col("_is_release") & pl.col("_next").ne_missing("oom"))
    )
    released = replay.segments.drop_nulls("free_sequence").sort("free_sequence")
    at = released["free_sequence"].to_numpy()
    pools = released["pool"].fill_null(DEFAULT_POOL).to_list()
    found = []
    for start, stop in runs.select("start", "stop").iter_rows():
        first, last = np.searchsorted(at, [start, stop + 1])
        # Of unmapped parts of expandable segments the pool is not told.
        found.append(tuple(sorted(set(pools[first:last]))) or (DEFAULT_POOL,))
    n_unclear = int(runs["_next"].is_in(_GROWTHS).sum())
    return runs["start"].to_list(), found, n_unclear


def recorded_places(segments: pl.DataFrame) -> Callable[[int], int]:
    """Make a function that places segments where a history had them.

    Parameters
    ----------
    segments : DataFrame
        ``Replay.segments``; reads ``va``, ``bytes`` and ``alloc_sequence``.

    Returns
    -------
    callable
        Size in byte to address: that of the next recorded segment of this size, in the order in which they
        were made; when there is none, addresses above all recorded ones.
    """
    known: dict[int, deque[int]] = {}
    beyond = 0
    ordered = segments.sort("alloc_sequence", "va", nulls_last=False)
    for va, n_bytes in ordered.select("va", "bytes").iter_rows():
        known.setdefault(n_bytes, deque()).append(va)
        beyond = max(beyond, va + n_bytes)
    others = ascending_places(-(-beyond // (1 << 21)) << 21)

    def place(n_bytes: int) -> int:
        recorded = known.get(n_bytes)
        return recorded.popleft() if recorded else others(n_bytes)

    return place


def rerun(
    requests: Requests,
    make_allocator: Callable[[], Allocator],
    *,
    before: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Rerun:
    """Give the requests of a history to an allocator.

    Parameters
    ----------
    requests : Requests
        From :func:`requests_of`.
    make_allocator : callable
        Makes the allocator; it must hold nothing yet.
    before : int, optional
        Stop before this entry of the history.
    progress : callable, optional
        Called now and then with the operations done, and with all there are.

    Returns
    -------
    Rerun
        It ends early if memory runs out.
    """
    return _rerun(requests, make_allocator(), before, progress)


def would_fit(
    requests: Requests,
    make_allocator: Callable[[], Allocator],
    n_bytes: int,
    *,
    before: int,
    stream: int = 0,
    pool: str = DEFAULT_POOL,
) -> bool:
    """Tell whether an allocator could have served one more request at some moment of a history.

    Parameters
    ----------
    requests : Requests
        From :func:`requests_of`.
    make_allocator : callable
        Makes the allocator, with the limit that counts.
    n_bytes : int
        The request, byte.
    before : int
        Entry of the history before which it is made.
    stream : int, default 0
        Handle of its stream.
    pool : str, default "0,0"
        Its pool.

    Returns
    -------
    bool
        False also if memory runs out on the way there.
    """
    allocator = make_allocator()
    if _rerun(requests, allocator, before, None).out_of_memory is not None:
        return False
    try:
        allocator.allocate(n_bytes, stream=stream, pool=pool)
    except AllocatorFullError:
        return False
    return True


def _rerun(
    requests: Requests,
    allocator: Allocator,
    before: int | None,
    progress: Callable[[int, int], None] | None,
) -> Rerun:
    n_operations = requests.operations.size
    if before is not None:
        n_operations = int(np.searchsorted(requests.sequences, before))
    reserved: list[int] = []
    held: list[Block | None] = [None] * requests.n_bytes.size
    failed = None
    edges = [*range(0, n_operations, _STEP), n_operations]
    for start, stop in pairwise(edges):
        failed = _run_part(requests, allocator, held, reserved, (start, stop))
        if failed is not None:
            break
        if progress is not None:
            progress(stop, n_operations)
    return Rerun(
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_active_bytes=allocator.peak_active_bytes,
        reserved_bytes=np.array(reserved, np.int64),
        n_segments_made=allocator.n_segments_made,
        n_retries=allocator.n_retries,
        n_stitches=getattr(allocator, "n_stitches", 0),
        stitched_bytes=getattr(allocator, "stitched_bytes", 0),
        out_of_memory=failed,
    )


def _run_part(
    requests: Requests,
    allocator: Allocator,
    held: list[Block | None],
    reserved: list[int],
    part: tuple[int, int],
) -> int | None:
    """Run some operations; give the request that memory did not suffice for, if one did not."""
    allocate, free = allocator.allocate, allocator.free
    operations = requests.operations[slice(*part)]
    made = operations[operations >= 0]
    sizes = iter(requests.n_bytes[made].tolist())
    streams = iter(requests.streams[made].tolist())
    pools = requests.pools
    for code in operations.tolist():
        if code >= 0:
            try:
                held[code] = allocate(next(sizes), stream=next(streams), pool=pools[code])
            except AllocatorFullError:
                return int(code)
        elif code > _RELEASE >> 1:
            block = held[-1 - code]
            if block is not None:
                free(block)
                held[-1 - code] = None
        else:
            _release(allocator, requests.releases[code - _RELEASE])
        reserved.append(allocator.reserved_bytes)
    return None


def _release(allocator: Allocator, pools: tuple[str, ...]) -> None:
    """Release what a history released: all of the default pool, or private pools that were closed."""
    for pool in pools:
        if pool != DEFAULT_POOL:
            allocator.close_pool(pool)
    if DEFAULT_POOL in pools:
        allocator.empty_cache()
