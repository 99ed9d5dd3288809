"""The program's own prefetches that do harm: what they bring is evicted unused, pushes out what is needed, or comes late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.advisor.advice import Advice, Change, Gain, Rows, Said, Silent, Target
from nsan.analysis.advisor.calls import PREFETCH_NOTE, address_of
from nsan.analysis.advisor.facts import Facts, number, target_of
from nsan.analysis.advisor.kernel_memory import IS_KERNEL, kernel_memory
from nsan.analysis.advisor.links import bytes_per_s
from nsan.analysis.advisor.prefetched import (
    NOTHING,
    Prefetched,
    PushedOut,
    prefetched,
    pushed_out,
)
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
_CHUNK: Final = 32 << 20


@dataclass(frozen=True)
class _Harm:
    """One allocation whose prefetches do harm, and how."""

    of: Prefetched
    out: PushedOut
    target: Target
    title: str
    finding: str
    remedy: str
    calls: tuple[str, ...]
    gain_ns: int
    kind: Kind
    how: str
    change: Change


def prefetch_harm(facts: Facts) -> Iterator[Said]:
    """Advise on prefetches of the program that are useless, harmful or late.

    Parameters
    ----------
    facts : Facts
        A trace.

    Yields
    ------
    Advice or Silent
        One advice per allocation.
    """
    if not facts.is_recorded("migrations"):
        yield Silent(HARM, "Migrations were not recorded.", is_known=False)
        return
    calls = facts.rows_of("user_prefetches")
    if calls is None:
        yield _without_calls(facts)
        return
    harms = [
        harm for found in prefetched(facts)[:_MOST] if (harm := _harm(facts, found)) is not None
    ]
    for harm in sorted(harms, key=lambda each: (-each.gain_ns, each.target.va or 0)):
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


def _harm(facts: Facts, found: Prefetched) -> _Harm | None:
    """Say what is wrong with the prefetches of an allocation; None if nothing is."""
    row = found.row
    out = NOTHING if facts.is_part else pushed_out(facts, found)
    is_useless = out.own_bytes >= _AGAIN * row["bytes"]
    is_harmful = sum(out.others.values()) >= _OTHERS * row["bytes"]
    if (is_useless or is_harmful) and _sweeps(facts, found) <= _ONCE:
        return _useless(facts, found, out)
    if (row["early_bytes"] or 0) >= _WASTED * row["bytes"]:
        return _too_large(found, out)
    if row["late_bytes"] >= _LATE * (row["bytes"] + row["late_bytes"]):
        return _late(facts, found, out)
    return None


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
    finding = (
        f"{counted(row['n'], 'prefetch', 'prefetches')} brought {format_bytes(row['bytes'])} of {target.label}, and pushed "
        f"{format_bytes(out.bytes)} out of GPU {row['device_id']} that page faults then had to bring back. "
        f"The GPU did nothing else for {format_time(found.idle_ns)} meanwhile"
    )
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
        found,
        out,
        target,
        f"Leave out the prefetch of {target.label}: it pushes out what is needed",
        f"{finding}.",
        "GPU memory is too small for all that is prefetched. Leave the call out, and let the kernel's faults bring what it uses; or prefetch "
        "in chunks that fit, each just ahead of the kernel that works on it. Whether a page was used between its arrival and its "
        "eviction, no capture shows.",
        _in_chunks(found, target),
        found.idle_ns + max(out.others_ns, evicting_ns),
        "reconstructed",
        how,
        Change("no_prefetch", target, device=row["device_id"] or 0),
    )


def _in_chunks(found: Prefetched, target: Target) -> tuple[str, ...]:
    size, device = found.allocation["bytes"], found.row["device_id"]
    return (
        f"// Leave out: cudaMemPrefetchAsync({address_of(target)}, {size}, {device}, stream);",
        f"// Or in chunks, each before the launch that works on it. {PREFETCH_NOTE}",
        f"for (size_t at = 0; at < {size}; at += {_CHUNK})",
        f"    cudaMemPrefetchAsync((char *){address_of(target)} + at, min({_CHUNK}, {size} - at), {device}, stream);  "
        "// then the kernel on this chunk",
    )


def _too_large(found: Prefetched, out: PushedOut) -> _Harm:
    target, row = target_of(found.allocation), found.row
    early, share = row["early_bytes"], row["early_bytes"] / row["bytes"]
    stays = found.calls["bytes"] - found.calls["early_bytes"].fill_null(0)
    kept = max(stays.to_list())
    return _Harm(
        found,
        out,
        target,
        f"Prefetch less of {target.label}: only what fits",
        (
            f"Of {format_bytes(row['bytes'])} of {target.label} that {counted(row['n'], 'prefetch', 'prefetches')} brought, "
            f"{format_bytes(early)} ({share:.0%}) were evicted again before any work began."
        ),
        f"Let a call bring at most what stays, about {format_bytes(kept)} here, and prefetch the rest in chunks just ahead of its use.",
        _in_chunks(found, target)[1:],
        # To bring what is wasted and to take it out again are two copies of it; the others cost one each.
        int(found.idle_ns * min(2 * share, 1.0)),
        "reconstructed",
        "share of the time in which the GPU did nothing but these prefetches",
        Change("no_prefetch", target, device=row["device_id"] or 0),
    )


def _late(facts: Facts, found: Prefetched, out: PushedOut) -> _Harm | None:
    target, row = target_of(found.allocation), found.row
    kernels = facts.rows_of("faults_by_kernel")
    waits = 0
    if kernels is not None:
        mine = kernels.filter(IS_KERNEL, _of_gpu(row))
        waits = int(mine["exposed_ns"].sum() or 0)
    size, device = found.allocation["bytes"], row["device_id"]
    return _Harm(
        found,
        out,
        target,
        f"Prefetch {target.label} earlier, before the launch that uses it",
        (
            f"While {counted(row['n'], 'prefetch', 'prefetches')} of {target.label} brought {format_bytes(row['bytes'])}, page faults "
            f"moved {format_bytes(row['late_bytes'])} of the same memory: a kernel was using it already."
        ),
        "Call it before the launch, in the stream of the kernel; in another stream, let the kernel wait for an event after it.",
        (
            f"// Before the launch. {PREFETCH_NOTE}",
            f"cudaMemPrefetchAsync({address_of(target)}, {size}, {device}, stream);",
        ),
        waits,
        "derived",
        "time in which page faults waited in kernels",
        Change("prefetch", target, device=device or 0),
    )


def _moved_nothing(facts: Facts, calls: pl.DataFrame) -> Advice | None:
    """Advise on calls that had nothing to move, if they take time."""
    idle = calls.filter(pl.col("outcome").cast(pl.String) == "moved_nothing")
    spent = int((idle["call_end_ns"] - idle["call_start_ns"]).sum() or 0)
    if idle.is_empty() or not spent:
        return None
    n = counted(idle.height, "prefetch call")
    return Advice(
        rule=HARM,
        title=f"Look at {n} that moved nothing",
        finding=(
            f"{n} of {counted(calls.height, 'prefetch', 'prefetches')} moved no byte, as far as is recorded: the memory was there "
            f"already, or empty. They took the host {format_time(spent)}."
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
    row = harm.of.row
    numbers = [
        number(facts, "brought by prefetches", row["bytes"], "byte"),
        number(facts, "the GPU did nothing but these", harm.of.idle_ns, "ns", "reconstructed"),
    ]
    if harm.out.bytes:
        label = "pushed out by them, and brought back by faults"
        numbers.append(number(facts, label, harm.out.bytes, "byte", "reconstructed"))
    if row["early_bytes"]:
        label = "evicted before any work began"
        numbers.append(number(facts, label, row["early_bytes"], "byte", "reconstructed"))
    return Advice(
        rule=HARM,
        title=harm.title,
        finding=harm.finding,
        numbers=tuple(numbers),
        rows=(Rows("user_prefetches", harm.of.calls.select(_SHOWN).head(5)),),
        remedy=harm.remedy,
        calls=harm.calls,
        targets=(harm.target,),
        check="Less is evicted and brought back by faults, and steps take less time.",
        gate="migrations.eviction_bytes>-25%"
        if harm.out.bytes or row["early_bytes"]
        else "kernels.waiting_ns>-25%",
        gain=Gain(harm.gain_ns, harm.kind, harm.how),
        changes=(harm.change,),
    )
