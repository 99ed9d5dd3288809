"""The program's own prefetches that do harm: what they bring is evicted unused, pushes out what is needed, or comes late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.advisor.advice import Advice, Change, Gain, Rows, Said, Silent, Target
from nsan.analysis.advisor.calls import PREFETCH_NOTE, address_of, prefetch_calls
from nsan.analysis.advisor.facts import Facts, gate_of, number, span_ns, target_of
from nsan.analysis.advisor.kernel_memory import IS_KERNEL, kernel_memory
from nsan.analysis.advisor.links import bytes_per_s
from nsan.analysis.advisor.prefetched import (
    NOTHING,
    Prefetched,
    PushedOut,
    idle_spans,
    length_ns,
    prefetched,
    pushed_out,
)
from nsan.analysis.advisor.waits import KEYS, refault_waits
from nsan.units import counted, format_bytes, format_time

if TYPE_CHECKING:
    from nsan.analysis.result import Kind

HARM: Final = "prefetch_harm"

_AGAIN: Final = 0.9
"""Share of what prefetches brought that faults brought again, from which on they were of no use."""

_OTHERS: Final = 0.4
"""Memory of others that they pushed out and faults brought back, as a share of what they brought: they do harm."""

_ONCE: Final = 1.1
"""A kernel brings each page by faults this often at most: it goes over its memory once, and what came was of no use before."""

_WASTED: Final = 0.1
"""Share that was evicted before any work began from which on a prefetch is too large."""

_LATE: Final = 0.1
"""Of what prefetches and faults brought together: faults were there first."""

_MOST: Final = 4
_SHOWN: Final = (
    "device_id",
    "bytes",
    "late_bytes",
    "early_bytes",
    "evicted_bytes",
    "outcome",
    "va",
)
_CHUNKS: Final = (2 << 20, 32 << 20)
"""A chunk is a VA block at least; more than the upper bound gains nothing more per call."""

_PARTS: Final = 4
"""Chunks of an allocation at least: one is used while the next one comes, and the rest waits."""

_MATTERS: Final = 0.01
"""Share of the run from which on calls that moved nothing are worth a word."""


@dataclass(frozen=True)
class _Harm:
    """Allocations whose prefetches do harm, and how; ``gate``: what should fall."""

    of: tuple[Prefetched, ...]
    out: PushedOut
    title: str
    finding: str
    remedy: str
    calls: tuple[str, ...]
    gain_ns: int
    kind: Kind
    how: str
    changes: tuple[Change, ...]
    gate: str

    @property
    def targets(self) -> tuple[Target, ...]:
        """The allocations."""
        return tuple(target_of(each.allocation) for each in self.of)


def prefetch_harm(facts: Facts) -> Iterator[Said]:
    """Advise on prefetches of the program that are useless, harmful or late.

    Parameters
    ----------
    facts : Facts
        A trace.

    Yields
    ------
    Advice or Silent
        One advice per allocation; one for all that push out each other.
    """
    if not facts.is_recorded("migrations"):
        yield Silent(HARM, "Migrations were not recorded.", is_known=False)
        return
    calls = facts.rows_of("user_prefetches")
    if calls is None:
        yield _without_calls(facts)
        return
    harms = _harms(facts)
    for harm in sorted(harms, key=lambda each: (-each.gain_ns, each.targets[0].va or 0)):
        yield _advice(facts, harm)
    idle = _moved_nothing(facts, calls)
    if idle is not None:
        yield idle
    if not harms and idle is None:
        late = counted(calls.height, "prefetch", "prefetches")
        yield Silent(
            HARM, f"Nothing speaks against {late} of the program: in time, and kept until work ran."
        )


def _without_calls(facts: Facts) -> Silent:
    moved = facts.summary["migrations"]
    if moved["n"] and set(moved["by_cause"]) <= {"unknown", "other"}:
        reason = (
            "The capture does not say why memory moved, and so not what prefetch calls brought."
        )
        return Silent(HARM, reason, is_known=False)
    return Silent(HARM, "The program prefetches nothing to a GPU.")


def _harms(facts: Facts) -> list[_Harm]:
    """Say what is wrong with the prefetches of allocations."""
    alone: list[_Harm] = []
    full: dict[tuple[Any, Any], list[tuple[Prefetched, PushedOut]]] = {}
    for found in prefetched(facts)[:_MOST]:
        row = found.row
        out = NOTHING if facts.is_part else pushed_out(facts, found)
        is_useless = out.own_bytes >= _AGAIN * row["bytes"]
        is_harmful = sum(out.others.values()) >= _OTHERS * row["bytes"]
        if (is_useless or is_harmful) and _sweeps(facts, found) <= _ONCE:
            full.setdefault((row["pid"], row["device_id"]), []).append((found, out))
        elif (row["early_bytes"] or 0) >= _WASTED * row["bytes"]:
            alone.append(_too_large(facts, found, out))
        elif row["late_bytes"] >= _LATE * (row["bytes"] + row["late_bytes"]):
            alone.append(_late(facts, found, out))
    together = [
        _at_once(facts, these) if len(these) > 1 else _useless(facts, *these[0])
        for these in full.values()
    ]
    return alone + together


def _sweeps(facts: Facts, found: Prefetched) -> float:
    """Say how often a launch brings each page that it brings by faults, on average over the kernels of the GPU."""
    kernels, used = facts.rows_of("faults_by_kernel"), kernel_memory(facts)
    if kernels is None or used.is_empty():
        return 1.0
    same = _of_gpu(found.row)
    launches = kernels.filter(IS_KERNEL, same).group_by("name").agg(pl.col("n_instances").sum())
    sums = used.filter(same).join(launches, on="name", nulls_equal=True)
    most = int((sums["unique_bytes"] * sums["n_instances"]).sum())
    return float(sums["in_bytes"].sum()) / most if most else 1.0


def _of_gpu(row: Mapping[str, Any]) -> pl.Expr:
    """Choose rows of the process and GPU of another row."""
    return pl.all_horizontal(
        pl.col("pid").eq_missing(pl.lit(row["pid"], pl.UInt32)),
        pl.col("device_id").eq_missing(pl.lit(row["device_id"], pl.Int64)),
    )


def _useless(facts: Facts, found: Prefetched, out: PushedOut) -> _Harm:
    target, row = target_of(found.allocation), found.row
    others = sum(out.others.values())
    finding = f"{_brought(row)} of {target.label}"
    why = "it is evicted, and page faults bring it again"
    if others:
        why = "it pushes out what is needed"
        finding += f", and pushed {format_bytes(others)} of other allocations out of GPU {row['device_id']} that page faults then had to bring back"
    else:
        finding += (
            f"; {format_bytes(out.own_bytes)} were evicted, and page faults had to bring them again"
        )
    finding += f". The GPU did nothing else for {format_time(found.idle_ns)} meanwhile"
    how = "time in which the GPU did nothing but these prefetches"
    rate = bytes_per_s(facts, row["pid"], row["device_id"], "dtoh")
    gone = int(found.calls["evicted_bytes"].sum() or 0)
    # Kernels had to evict what was prefetched before they got room for what they use.
    evicting_ns = int(gone / rate * 1e9) if rate else 0
    if out.others_ns > evicting_ns:
        finding += f", and faults on what had been pushed out of other allocations took {format_time(out.others_ns)}"
        how += ", and of the faults that brought back what they pushed out of other allocations"
    else:
        how += ", and of the copies that evicted what they had brought"
    return _Harm(
        (found,),
        out,
        f"Leave out the prefetch of {target.label}: {why}",
        f"{finding}.",
        "GPU memory is too small for all that is prefetched. Leave the call out, and let the kernel's faults bring what it uses; or prefetch "
        "in chunks that fit, each just ahead of the kernel that works on it. Whether a page was used between its arrival and its "
        "eviction, no capture shows.",
        (
            f"// Leave out: cudaMemPrefetchAsync({address_of(target)}, {found.allocation['bytes']}, {row['device_id']}, stream);",
            *_in_chunks(found, target),
        ),
        found.idle_ns + max(out.others_ns, evicting_ns),
        "reconstructed",
        how,
        (Change("no_prefetch", target, device=row["device_id"] or 0),),
        _evictions_gate(facts, out.bytes),
    )


def _at_once(facts: Facts, these: list[tuple[Prefetched, PushedOut]]) -> _Harm:
    """Advise on several allocations that are prefetched together, and do not fit together."""
    found = tuple(each for each, _ in these)
    row = found[0].row
    targets = [target_of(each.allocation) for each in found]
    calls = pl.concat(each.calls for each in found)
    own, pushed = (
        sum(sizes) for sizes in zip(*((out.own_bytes, out.bytes) for _, out in these), strict=True)
    )
    idle = idle_spans(facts, calls)
    again = refault_waits(facts).filter(_of_gpu(row)).select(*KEYS, "start_ns", "end_ns")
    brought = {"n": calls.height, "bytes": int(calls["bytes"].sum())}
    named = _listed([target.label for target in targets])
    return _Harm(
        found,
        PushedOut(pushed, own, {}, 0, "reconstructed"),
        f"Prefetch {named} each just ahead of the kernel that uses it, not all at once",
        f"{_brought(brought)} of {named} to GPU {row['device_id']}, more than it holds: page faults had to bring {format_bytes(own)} "
        f"of it again. The GPU did nothing but these prefetches for {format_time(length_ns(idle))}.",
        "GPU memory is too small for all of it. Move each call to right before the launch that uses the memory, so that it pushes out "
        "what is done with, not what comes next; or leave the calls out.",
        (
            "// Each right before the launch that uses it, not one after the other.",
            *prefetch_calls(
                [
                    (target, 0, each.allocation["bytes"])
                    for target, each in zip(targets, found, strict=True)
                ],
                row["device_id"],
            ),
            f"// {PREFETCH_NOTE}",
        ),
        length_ns(pl.concat([idle.select(again.collect_schema().names()), again])),
        "reconstructed",
        "time in which the GPU did nothing but these prefetches, and of page faults that evicted or brought back what was evicted",
        (
            *(Change("no_prefetch", target, device=row["device_id"] or 0) for target in targets),
            *(Change("prefetch", target, device=row["device_id"] or 0) for target in targets),
        ),
        _evictions_gate(facts, own),
    )


def _listed(labels: list[str]) -> str:
    shown = labels[:2]
    if len(labels) > len(shown):
        shown.append(counted(len(labels) - len(shown), "more allocation"))
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _brought(row: Mapping[str, Any]) -> str:
    return f"{counted(row['n'], 'prefetch', 'prefetches')} brought {format_bytes(row['bytes'])}"


def _evictions_gate(facts: Facts, n_bytes: int | None) -> str:
    causes = facts.summary["migrations"]["by_cause"]
    return gate_of("migrations.eviction_bytes", n_bytes, causes.get("eviction", {}).get("bytes"))


def _in_chunks(found: Prefetched, target: Target, most: int | None = None) -> tuple[str, ...]:
    """Write a prefetch in chunks, of ``most`` bytes at most; nothing where the allocation is too small for that."""
    size, device = found.allocation["bytes"], found.row["device_id"]
    least, largest = _CHUNKS
    bound = min(size // _PARTS, largest, most or largest)
    if bound < least:
        return ()
    chunk = 1 << (bound.bit_length() - 1)
    return (
        "// Or in chunks, each before the launch that works on it.",
        f"for (size_t at = 0; at < {size}; at += {chunk}) {{",
        f"    size_t n = {size} - at < {chunk} ? {size} - at : {chunk};",
        f"    cudaMemPrefetchAsync((char *){target.pointer} + at, n, {device}, stream);  // then the kernel on this chunk",
        "}",
        f"// {PREFETCH_NOTE}",
    )


def _too_large(facts: Facts, found: Prefetched, out: PushedOut) -> _Harm:
    target, row = target_of(found.allocation), found.row
    early, share = row["early_bytes"], row["early_bytes"] / row["bytes"]
    stays = found.calls["bytes"] - found.calls["early_bytes"].fill_null(0)
    kept = max(stays.to_list())
    first = prefetch_calls([(target, 0, kept)], row["device_id"]) if kept else ()
    return _Harm(
        (found,),
        out,
        f"Prefetch less of {target.label}: only what fits",
        (
            f"Of {format_bytes(row['bytes'])} of {target.label} that {counted(row['n'], 'prefetch', 'prefetches')} brought, "
            f"{format_bytes(early)} ({share:.0%}) were evicted again before any work began."
        ),
        f"Let a call bring at most what stays, about {format_bytes(kept)} here, and prefetch the rest in chunks just ahead of its use.",
        (*first, *_in_chunks(found, target, kept))
        or (f"// Leave out the prefetch of {target.pointer}.",),
        # To bring what is wasted and to take it out again are two copies of it; the others cost one each.
        int(found.idle_ns * min(2 * share, 1.0)),
        "reconstructed",
        "share of the time in which the GPU did nothing but these prefetches",
        (Change("no_prefetch", target, device=row["device_id"] or 0),),
        _evictions_gate(facts, early),
    )


def _late(facts: Facts, found: Prefetched, out: PushedOut) -> _Harm:
    target, row = target_of(found.allocation), found.row
    kernels = facts.rows_of("faults_by_kernel")
    waits, every, came = 0, 0, 0
    if kernels is not None:
        mine = kernels.filter(IS_KERNEL, _of_gpu(row))
        waits, came = (int(mine[name].sum() or 0) for name in ("exposed_ns", "in_bytes"))
        every = int(kernels["exposed_ns"].sum() or 0)
    share = min(row["late_bytes"] / came, 1.0) if came else 0.0
    size, device = found.allocation["bytes"], row["device_id"]
    return _Harm(
        (found,),
        out,
        f"Prefetch {target.label} earlier, before the launch that uses it",
        (
            f"While {counted(row['n'], 'prefetch', 'prefetches')} of {target.label} brought {format_bytes(row['bytes'])}, page faults "
            f"moved {format_bytes(row['late_bytes'])} of the same memory: a kernel was using it already."
        ),
        "Call it before the launch, in the stream of the kernel; in another stream, let the kernel wait for an event after it.",
        (
            "// Before the launch:",
            *prefetch_calls([(target, 0, size)], device),
            f"// {PREFETCH_NOTE}",
        ),
        waits,
        "derived",
        "time in which page faults waited in kernels",
        (Change("prefetch", target, device=device or 0),),
        gate_of("kernels.waiting_ns", share * waits, every),
    )


def _moved_nothing(facts: Facts, calls: pl.DataFrame) -> Advice | None:
    """Advise on calls that had nothing to move, if they take time.

    The first call for an allocation may make its pages, and then nothing moves either: only what comes beyond
    one call each is worth a look.
    """
    idle = calls.filter(pl.col("outcome").cast(pl.String) == "moved_nothing")
    spent = int((idle["call_end_ns"] - idle["call_start_ns"]).sum() or 0)
    allocations = facts.rows_of("faults_by_allocation")
    n_new = 0 if allocations is None else allocations["va"].drop_nulls().len()
    if idle.height <= n_new or spent < max(_MATTERS * span_ns(facts), 1):
        return None
    n = counted(idle.height, "prefetch call")
    return Advice(
        rule=HARM,
        title=f"Look at {n} that moved nothing",
        finding=(
            f"{n} of {counted(calls.height, 'prefetch', 'prefetches')} have no copy, as far as is recorded: the memory was there "
            f"already, or nobody had touched it. They took the host {format_time(spent)}."
        ),
        numbers=(
            number(facts, "prefetch calls without a copy", idle.height, "number", "reconstructed"),
            number(facts, "they took", spent, "ns", "reconstructed"),
        ),
        rows=(
            Rows("user_prefetches", idle.select("call_start_ns", "call_end_ns", "outcome").head(5)),
        ),
        remedy="Prefetch memory only when it may be elsewhere. A call that makes pages of memory nobody has touched is no waste: keep it.",
        calls=(
            "// No cudaMemPrefetchAsync where the memory is already: keep what the GPU has not touched yet.",
        ),
        targets=(),
        check="Each prefetch call moves something.",
        gain=Gain(spent, "reconstructed", "time of the calls on the host"),
        level="info",
    )


def _advice(facts: Facts, harm: _Harm) -> Advice:
    calls = pl.concat(each.calls for each in harm.of)
    early = int(calls["early_bytes"].sum() or 0)
    idle_ns = length_ns(idle_spans(facts, calls))
    numbers = [
        number(facts, "brought by prefetches", int(calls["bytes"].sum()), "byte"),
        number(facts, "the GPU did nothing but these", idle_ns, "ns", "reconstructed"),
    ]
    for label, n_bytes in (
        ("pushed out by them, and brought back by faults", harm.out.bytes),
        ("of them, brought again by faults", harm.out.own_bytes),
        ("evicted before any work began", early),
    ):
        if n_bytes:
            numbers.append(number(facts, label, n_bytes, "byte", "reconstructed"))
    return Advice(
        rule=HARM,
        title=harm.title,
        finding=harm.finding,
        numbers=tuple(numbers),
        rows=(Rows("user_prefetches", calls.select(_SHOWN).head(5)),),
        remedy=harm.remedy,
        calls=harm.calls,
        targets=harm.targets,
        check="Less is evicted and brought back by faults, and steps take less time.",
        gate=harm.gate,
        gain=Gain(harm.gain_ns, harm.kind, harm.how),
        changes=harm.changes,
    )
