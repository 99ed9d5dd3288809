"""The allocator: memory that goes back to the driver in every step, and cached memory that moves for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.advisor.advice import (
    Advice,
    Change,
    Gain,
    Level,
    Number,
    Rows,
    Said,
    Silent,
    Target,
)
from nsan.analysis.advisor.dead import Dead, dead_copies
from nsan.analysis.advisor.facts import (
    Facts,
    hints_at_torch,
    moved_bytes,
    number,
    span_ns,
    target_of,
)
from nsan.analysis.advisor.remade import Remade, remade
from nsan.tabular.totals import share
from nsan.units import counted, format_bytes, format_count, format_time

if TYPE_CHECKING:
    from nsan.analysis.result import Kind

RETURNS_MEMORY: Final = "allocator_returns_memory"
DEAD_TRAFFIC: Final = "dead_cache_traffic"

RECORD_SNAPSHOT: Final = (
    "Under PyTorch's caching allocator call `torch.cuda.memory._record_memory_history()` at the start and "
    '`torch.cuda.memory._dump_snapshot("snapshot.pickle")` at the end, and put the file beside the trace.'
)
"""How PyTorch writes a memory snapshot that nsan can lay over a trace."""

_FEWEST: Final = 2
"""Allocations that are made again once may be chance: a choice of ours."""

_MOST_TARGETS: Final = 16
_MOST_ROWS: Final = 5

_SHARES: Final[dict[Level, float]] = {"high": 0.1, "medium": 0.03, "low": 0.01}
"""Share of the run, from which on an advice without a bound is of a level."""

_LESS: Final[dict[Level, Level]] = {"high": "medium", "medium": "low", "low": "info"}


def returns_memory(facts: Facts) -> Iterator[Said]:
    """Advise to keep memory that is given back to the driver and allocated again."""
    if facts.summary["managed"]["n_calls"] == 0 and not facts.summary["managed"]["n_allocations"]:
        yield Silent(RETURNS_MEMORY, "The capture has no call that allocates managed memory.")
        return
    if not facts.is_recorded("allocations"):
        yield Silent(RETURNS_MEMORY, _unrecorded(facts), is_known=False)
        return
    rows = facts.rows_of("faults_by_allocation")
    held = None if rows is None else rows.filter(pl.col("part") == "allocation")
    if held is None or held.is_empty():
        yield Silent(RETURNS_MEMORY, "The capture has no managed allocation.")
        return
    found = remade(facts, held)
    n, n_all = found.again.height, found.allocations.height
    if n < _FEWEST:
        what = (
            "1 of them was made again" if n else "none was made again in memory given back before"
        )
        yield Silent(RETURNS_MEMORY, f"Of {counted(n_all, 'managed allocation')} {what}.")
        return
    yield _keep(facts, found)


def _unrecorded(facts: Facts) -> str:
    n, switch = facts.summary["managed"]["n_calls"], facts.summary["switches"]["allocations"]
    called = f"{counted(n, 'call')} allocated managed memory; " if n else ""
    return (
        f"{called}when it was given back and made again was not recorded "
        f"(`nsys profile {switch} ...`)."
    )


def _keep(facts: Facts, found: Remade) -> Advice:
    """Say what to do about memory that is made again."""
    is_full = _evicted(facts) > 0
    costs = [part for part in (found.first_touch_ns, found.idle_ns) if part is not None]
    has_bound = found.first_touch_ns is not None and found.idle_ns is not None and not is_full
    kind: Kind = "reconstructed" if found.first_touch_ns is not None else "derived"
    sizes = found.by_size
    targets = _targets(facts, sizes)
    return Advice(
        rule=RETURNS_MEMORY,
        title=_keep_title(found, targets[0]),
        finding=_keep_finding(found, is_full=is_full),
        numbers=tuple(_keep_numbers(facts, found)),
        rows=(Rows("", sizes.head(_MOST_ROWS).drop("part")),),
        remedy=_keep_remedy(found, is_full=is_full),
        calls=_keep_calls(targets[0], with_torch=hints_at_torch(facts)),
        targets=targets,
        check="Steps make and give back no managed memory, and first touches are left in the first one only.",
        gate="managed.allocations>-50%",
        gain=Gain(sum(costs), kind, _HOW) if has_bound else None,
        level=None if has_bound else _stated(sum(costs) / max(span_ns(facts), 1), is_full=is_full),
        changes=(Change("allocator", advice="caching"),),
    )


_HOW: Final = "service of batches that only made such memory usable again, and pauses of the GPU that the calls reach into"


def _stated(part: float, *, is_full: bool) -> Level:
    """State a level where no bound holds; with a full GPU one less, as copies may become more."""
    level: Level = next((level for level, least in _SHARES.items() if part >= least), "info")
    return _LESS.get(level, "info") if is_full else level


def _evicted(facts: Facts) -> int:
    return moved_bytes(facts, "dtoh", "eviction")


def _targets(facts: Facts, sizes: pl.DataFrame) -> tuple[Target, ...]:
    """Name the first allocation of each size, with the kernel that most first touches fell into."""
    rows = sizes.unique(("va", "name"), keep="first", maintain_order=True).head(_MOST_TARGETS)
    kernels = facts.rows_of("faults_by_kernel")
    if kernels is None:
        return tuple(target_of(row) for row in rows.to_dicts())
    touched = kernels.filter(
        pl.col("work").is_in(["kernel", "graph"]), pl.col("n_first_touch_batches") > 0
    ).sort("n_first_touch_batches", "name", descending=[True, False])
    kernel = "" if touched.is_empty() else touched["name"][0] or ""
    return tuple(target_of(row, kernel) for row in rows.to_dicts())


def _keep_title(found: Remade, target: Target) -> str:
    sizes = found.by_size
    n, times = found.again.height, int(sizes["n_allocations"][0])
    if sizes.height == 1:
        return f"Allocate {target.label} once and keep it: it is allocated {times} times"
    n_all = format_count(found.allocations.height)
    most = f", most of all {target.label}"
    return (
        f"Keep freed memory: {format_count(n)} of {n_all} managed allocations are made again{most}"
    )


def _keep_finding(found: Remade, *, is_full: bool) -> str:
    again, n_all = found.again, found.allocations.height
    n_bytes, all_bytes = int(again["bytes"].sum()), int(found.allocations["bytes"].sum())
    said = [
        f"Of {counted(n_all, 'managed allocation')} ({format_bytes(all_bytes)}) {format_count(again.height)} "
        f"({format_bytes(n_bytes)}) fit into memory that the program had given back to the driver before."
    ]
    if found.first_touch_ns is None:
        said.append(
            "What making it usable again cost does not show: page faults were not recorded."
        )
    else:
        n = int(again["n_first_touch"].sum())
        said.append(
            f"{counted(n, 'driver batch', 'driver batches')} only made such memory usable again, and took "
            f"{format_time(found.first_touch_ns)}."
        )
    if found.idle_ns:
        said.append(
            "GPUs had nothing to do because of calls of cudaMallocManaged and cudaFree for at most "
            f"{format_time(found.idle_ns)}."
        )
    if is_full:
        said.append("GPU memory was full at times, so what keeping it gains has no bound here.")
    return " ".join(said)


def _keep_numbers(facts: Facts, found: Remade) -> Iterator[Number]:
    again = found.again
    yield number(facts, "managed allocations", found.allocations.height, "allocations", "recorded")
    yield number(facts, "made again", again.height, "allocations")
    yield number(facts, "bytes made again", int(again["bytes"].sum()), "byte")
    if found.first_touch_ns is not None:
        n = int(again["n_first_touch"].sum())
        yield number(facts, "first touches of them", n, "batches", "reconstructed")
        yield number(facts, "service of these", found.first_touch_ns, "ns", "reconstructed")
    if found.idle_ns is not None:
        yield number(facts, "pauses of GPUs at the calls, at most", found.idle_ns, "ns")


def _keep_remedy(found: Remade, *, is_full: bool) -> str:
    said = [
        "Allocate once, outside the loop, or let an allocator keep what is freed: then the pages stay where they "
        "are, nothing is touched for the first time again, and no cudaFree waits for the GPU. The program then holds "
        "its peak for good."
    ]
    if is_full:
        said.append(
            "With GPU memory full, freed memory that is kept is evicted and brought back like any other: try it, "
            "and compare the evicted bytes."
        )
    if found.again["n_cpu_faults"].sum():
        said.append("What the CPU writes first in each step would have to come back from the GPU.")
    return " ".join(said)


def _keep_calls(target: Target, *, with_torch: bool) -> tuple[str, ...]:
    size = "bytes" if target.bytes is None else target.bytes
    once = f"cudaMallocManaged(&{target.pointer}, {size});  // before the loop; cudaFree after it"
    if not with_torch:
        return (once,)
    return (
        once,
        "pool = torch.cuda.MemPool(torch.cuda.memory.CUDAPluggableAllocator("
        '"managed.so", "managed_malloc", "managed_free").allocator())  # PyTorch 2.8 or later: its cache over yours',
        "with torch.cuda.use_mem_pool(pool): train()  # once around all steps; not change_current_allocator, "
        "which never caches",
        "rmm.mr.set_current_device_resource(rmm.mr.PoolMemoryResource(rmm.mr.ManagedMemoryResource()))  # RMM",
        "torch.cuda.memory.change_current_allocator(rmm.allocators.torch.rmm_torch_allocator)  # PyTorch on RMM's pool",
        "unset PYTORCH_NO_CUDA_MEMORY_CACHING  # where it is set, PyTorch's own cache is off",
    )


def dead_traffic(facts: Facts) -> Iterator[Said]:
    """Advise against the traffic of cached memory that no tensor holds."""
    traffic = facts.rows_of("state_traffic")
    if traffic is None:
        yield _not_laid(facts)
        return
    moved, dead = int(traffic["bytes"].sum()), traffic.filter("is_dead")
    unknown = int(traffic.filter(pl.col("state") == "unknown")["bytes"].sum())
    if dead["bytes"].sum():
        yield _drop(facts, traffic, dead_copies(facts))
    elif 2 * unknown > moved:
        reason = "For most of what moved the memory snapshot does not tell what it was then."
        yield Silent(DEAD_TRAFFIC, reason, is_known=False)
    else:
        reason = (
            f"None of the {format_bytes(moved)} that moved was cached memory that no tensor held."
        )
        yield Silent(DEAD_TRAFFIC, reason)


def _not_laid(facts: Facts) -> Silent:
    """Say why nothing is known of dead bytes, or that there can be none."""
    migrations = facts.summary["migrations"]
    if migrations["n"] == 0:
        return Silent(DEAD_TRAFFIC, "No managed memory moved.")
    if facts.has_snapshot:
        reason = "The memory snapshot could not be laid over what moved."
        return Silent(DEAD_TRAFFIC, reason, is_known=False)
    groups = migrations["groups"] or ()
    if migrations["n"] and all(row["cause"] not in ("eviction", "unknown") for row in groups):
        return Silent(DEAD_TRAFFIC, "Nothing was evicted, so no cached memory made room for other.")
    if not hints_at_torch(facts):
        reason = "Nothing hints at PyTorch, of whose caching allocator nsan would know what moved while no tensor held it."
        return Silent(DEAD_TRAFFIC, reason)
    reason = (
        "Whether cached memory was evicted and brought back shows only with a memory snapshot. "
        f"{RECORD_SNAPSHOT}"
    )
    return Silent(DEAD_TRAFFIC, reason, is_known=False)


def _drop(facts: Facts, traffic: pl.DataFrame, found: Dead) -> Advice:
    """Say what to do about dead bytes."""
    moved = int(traffic["bytes"].sum())
    segments = list(_segment_targets(facts, found.segments.head(_MOST_TARGETS)))
    most = next((target for target, _ in segments), Target())
    rows = traffic.filter("is_dead").sort("bytes", descending=True)
    columns = ("direction", "cause", "state", "bytes", "bytes_fraction", "copy_ns")
    dead, out = found.in_bytes + found.out_bytes, found.out_bytes
    what = f": {share(dead / moved)} of what moved is of cached memory that no tensor holds"
    where = f", most in {most.label}" if most.label else ""
    return Advice(
        rule=DEAD_TRAFFIC,
        title=f"Stop moving dead memory{what}{where}",
        finding=(
            f"{format_bytes(dead)} of {format_bytes(moved)} that moved were dead: {format_bytes(out)} of freed blocks "
            f"in the cache were evicted, and {format_bytes(found.in_bytes)} came back for nothing, as the tensors that "
            f"use the memory now overwrite it. Their copies, and what the driver did to evict them, took at most "
            f"{format_time(found.busy_ns)}."
        ),
        numbers=(
            number(facts, "moved", moved, "byte", "recorded"),
            number(facts, "dead bytes evicted", out, "byte"),
            number(facts, "dead bytes brought back", found.in_bytes, "byte"),
            number(facts, "time they took, at most", found.busy_ns, "ns"),
            number(facts, "of it kernels can have waited", found.waited_ns, "ns"),
        ),
        rows=(Rows("state_traffic", rows.head(_MOST_ROWS).select(columns)),),
        remedy=_drop_remedy(found),
        calls=tuple(_drop_calls(facts, found, most)),
        # Where most of what moved was live, other advice for the segment stands beside this one.
        targets=tuple(target for target, is_mostly_dead in segments if is_mostly_dead),
        check="In a new trace with its snapshot, `nsan analyse state_traffic` shows fewer dead bytes.",
        gate=_drop_gate(facts, out),
        gain=Gain(
            found.waited_ns,
            "derived",
            "copies of dead bytes and the driver's work to evict them, as far as a kernel can have waited for them",
        ),
        changes=(Change("allocator", advice="caching:drop"),),
    )


def _segment_targets(facts: Facts, segments: pl.DataFrame) -> Iterator[tuple[Target, bool]]:
    """Find the managed allocations that are the segments, and say of which most that moved was dead."""
    rows = facts.rows_of("faults_by_allocation")
    known: Mapping[int, Mapping[str, Any]] = {}
    if rows is not None:
        places = pl.col("va").is_in(segments["segment_va"].implode())
        mine = rows.filter(pl.col("part") == "allocation", places)
        known = {row["va"]: row for row in mine.to_dicts()}
    for va, all_bytes, dead_bytes in segments.select(
        "segment_va", "all_bytes", "bytes"
    ).iter_rows():
        target = target_of(known[va]) if va in known else Target(va=va)
        yield target, 2 * dead_bytes > all_bytes


def _drop_gate(facts: Facts, out_bytes: int) -> str:
    evicted = _evicted(facts)
    percent = round(50 * out_bytes / evicted) if evicted else 0
    return f"migrations.eviction_bytes>-{percent}%" if percent else ""


def _drop_remedy(found: Dead) -> str:
    pool = (
        "empty_cache() gives back nothing of a MemPool that is in use: let go of the pool first. "
        if found.is_private
        else "empty_cache() gives back segments that are wholly free. "
    )
    return (
        "Tell the driver that freed memory holds nothing, at the end of a phase that needs much of it: discard it "
        f"(CUDA 13), or give it back. {pool}What is given back is touched for the first time again, and cudaFree "
        "waits for the GPU: worth it between phases, seldom after each tensor. A smaller batch, with which live and "
        "cached memory fit, ends the traffic altogether."
    )


def _drop_calls(facts: Facts, found: Dead, target: Target) -> Iterator[str]:
    size = "bytes" if target.bytes is None else target.bytes
    name = target.pointer
    yield f"void *ptrs[] = {{{name}}}; size_t sizes[] = {{{size}}};  // whole free blocks of the segment only"
    yield "cudaMemDiscardBatchAsync(ptrs, sizes, 1, 0, stream);  // CUDA 13; write before you read it again"
    if found.is_private:
        yield "del pool; torch.cuda.empty_cache()  # PyTorch, between phases: pool is the torch.cuda.MemPool"
    else:
        yield "torch.cuda.empty_cache()  # PyTorch, between phases"
        yield from _settings(facts)


def _settings(facts: Facts) -> Iterator[str]:
    """Name the setting of PyTorch under which the same requests reserve least, if any helps."""
    best = best_setting(facts)
    if best is not None:
        saved = format_bytes(-best["difference_bytes"])
        yield f"PYTORCH_CUDA_ALLOC_CONF={best['setting']}  # reserves {saved} less for these requests (modelled)"


def best_setting(facts: Facts) -> Mapping[str, Any] | None:
    """Choose the setting of PyTorch's allocator under which the recorded requests reserve least.

    Expandable segments are left out: they are never managed memory.

    Parameters
    ----------
    facts : Facts
        Of which trace.

    Returns
    -------
    mapping or None
        Row of ``allocator_what_if``; None where no setting saves anything, or nothing is known.
    """
    rows = facts.rows_of("allocator_what_if")
    if rows is None:
        return None
    helps = rows.filter(
        pl.col("setting").str.contains(":"),
        ~pl.col("setting").str.starts_with("expandable_segments"),
        pl.col("difference_bytes") < 0,
        ~pl.col("out_of_memory"),
    )
    return (
        None if helps.is_empty() else helps.sort("difference_bytes", "setting").row(0, named=True)
    )
