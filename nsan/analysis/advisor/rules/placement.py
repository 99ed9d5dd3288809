"""Where memory should be: several processors read it again and again, or a GPU uses little of what moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.advisor.advice import Advice, Change, Gain, Number, Rows, Said, Silent, Target
from nsan.analysis.advisor.calls import ADVISE_NOTE, advise_calls
from nsan.analysis.advisor.facts import Facts, gate_of, number, target_of
from nsan.analysis.advisor.shuttles import (
    NO_CAUSES,
    Shuttle,
    cpu_side,
    has_causes,
    shuttles,
    thinly_evicted,
)
from nsan.analysis.advisor.waits import (
    Part,
    Waited,
    cpu_waits,
    gpu_waits,
    refault_waits,
    waited,
)
from nsan.text import shortened
from nsan.units import counted, format_bytes, format_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

READ_MOSTLY: Final = "read_mostly"
PLACE: Final = "place_and_map"

_TOLD: Final = (
    "allocation_id",
    "name",
    "bytes",
    "in_bytes",
    "out_bytes",
    "evicted_bytes",
    "unique_in_bytes",
    "amplification",
    "density_fraction",
)
_LEAST_SHARE: Final = 0.1
"""An allocation with less of all evictions is not what makes memory scarce."""


def read_mostly(facts: Facts) -> Iterator[Said]:
    """Advise read-only copies of memory that several processors read in turn."""
    if not facts.is_recorded("migrations"):
        yield Silent(READ_MOSTLY, "Migrations were not recorded.", is_known=False)
        return
    found = [each for each in shuttles(facts) if each.has_causes and not each.is_for_a_split]
    read = [each for each in found if each.is_read_only]
    yield from (_read_mostly(facts, each) for each in read)
    if read:
        return
    if found and not facts.is_recorded("gpu_faults"):
        what = target_of(found[0].row).label
        reason = f"Page faults move {what} to and fro; whether GPUs only read it is not known without fault rows."
        yield Silent(READ_MOSTLY, reason, is_known=False)
    elif not has_causes(facts):
        reason = "The capture does not say why memory moved, and so not what page faults took."
        yield Silent(READ_MOSTLY, reason, is_known=False)
    elif found:
        yield Silent(READ_MOSTLY, "GPUs write all memory that page faults move to and fro.")
    else:
        yield Silent(READ_MOSTLY, "No page faults move the same memory to and fro, step by step.")


def _read_mostly(facts: Facts, found: Shuttle) -> Advice:
    wait = waited(facts, gpu_waits(facts, found.part), cpu_waits(facts, found.part))
    target = target_of(found.row, wait.kernel)
    cpu = f"The CPU{cpu_side(facts, found.part)}"
    finding = (
        f"{found.processors(cpu)} take {target.label} from each other again and again: {format_bytes(found.taken_bytes)} "
        f"left GPUs by page faults, and {format_bytes(found.back_bytes)} came back. All "
        f"{counted(found.accesses['read'], 'GPU fault row')} in it are reads, and that took at most {format_time(wait.ns)}."
        f"{' Whether the CPU reads or writes is not recorded.' if found.by_cpu else ''}"
    )
    return Advice(
        rule=READ_MOSTLY,
        title=f"Mark {target.label} as read-mostly{_for(wait)}, if {_writers(found)} writes it any more",
        finding=finding,
        numbers=(
            number(facts, "taken from GPUs by page faults", found.taken_bytes, "byte"),
            number(facts, "came back", found.back_bytes, "byte"),
            number(facts, "GPU fault rows that read", found.accesses["read"], "rows", "recorded"),
            *_waits(facts, wait),
        ),
        rows=(_told(found.row),),
        remedy=(
            "Call it once the memory is filled: each processor then keeps a copy of its own, and reads fault once. It helps only "
            "where nothing writes any more, which a trace does not prove: a page that a read brought is written "
            "without a fault, and what the CPU did is not recorded. Each write throws the copies away, which costs more than it "
            "saves: what is written in every step, prefetch instead."
        ),
        calls=(*advise_calls(target, [(READ_MOSTLY, 0)]), ADVISE_NOTE),
        targets=(target,),
        check=f"{target.label} comes to each GPU once, and no page fault takes it away.",
        gate=_moved_gate(facts, found),
        gain=_gain(
            wait,
            f"if {_writers(found)} writes it any more, time in which its page faults on GPUs and the CPU waited",
        ),
        is_conditional=found.by_cpu,
        changes=(Change("advise", target, advice=READ_MOSTLY),),
    )


def place_and_map(facts: Facts) -> Iterator[Said]:
    """Advise to keep at the CPU what GPUs use little of, and to map it for them."""
    if not facts.is_recorded("migrations"):
        yield Silent(PLACE, "Migrations were not recorded.", is_known=False)
        return
    thin = [] if facts.is_part else thinly_evicted(facts)
    said: list[Said] = [
        _kept_at_cpu(facts, row) for row in thin if row["evictions_fraction"] >= _LEAST_SHARE
    ]
    said += [_seldom(facts, each) for each in shuttles(facts) if _is_seldom(each)]
    if said:
        yield from said
    elif facts.is_part:
        yield Silent(
            PLACE, "A part of a capture does not tell what was evicted before it.", is_known=False
        )
    elif not has_causes(facts):
        yield Silent(PLACE, NO_CAUSES, is_known=False)
    else:
        reason = (
            "No allocation is evicted in small parts, or moves to and fro for a small part of it."
        )
        yield Silent(PLACE, reason)


def _kept_at_cpu(facts: Facts, row: Mapping[str, Any]) -> Advice:
    """Advise for memory of which little is used before it is evicted."""
    part = Part.of(row)
    # With it out of the way, the rest may fit: then what came back for want of room no longer does.
    gpu = pl.concat([gpu_waits(facts, part), refault_waits(facts)])
    wait = waited(facts, gpu, cpu_waits(facts, part))
    target = target_of(row, waited(facts, gpu_waits(facts, part)).kernel)
    finding = (
        f"{counted(row['n_evictions'], 'eviction')} ({row['evictions_fraction']:.0%} of all) took {target.label}, each "
        f"{format_bytes(row['mean_bytes'])} of a VA block of 2 MiB on average: kernels use it here and there, but in GPU "
        f"memory each VA block takes the place of a whole one. Page faults for want of room took at most {format_time(wait.ns)}."
    )
    numbers = (
        number(facts, "evictions of it", row["n_evictions"], "evictions"),
        number(facts, "of all evictions", row["evictions_fraction"], "fraction"),
        number(facts, "on average of a VA block", row["mean_bytes"], "byte"),
        *_waits(facts, wait),
    )
    how = "time in which page faults waited on it, or on what was evicted"
    said = (target, finding, numbers)
    totals = facts.rows_of("refault_totals")
    every = None if totals is None else int(totals["refaulted_bytes"].sum())
    gate = gate_of("refaults.bytes", row["refaulted_bytes"], every)
    return _placed(row, said, row["gpus"], _gain(wait, how), gate)


def _is_seldom(found: Shuttle) -> bool:
    """Whether a small part of memory moves to and fro, and a GPU writes it, so that no copies can be kept."""
    return (
        found.has_causes
        and bool(found.accesses)
        and not (found.is_dense or found.is_read_only or found.is_for_a_split)
    )


def _seldom(facts: Facts, found: Shuttle) -> Advice:
    wait = waited(facts, gpu_waits(facts, found.part), cpu_waits(facts, found.part))
    target = target_of(found.row, wait.kernel)
    used = found.row["unique_in_bytes"]
    finding = (
        f"{found.processors('The CPU')} take pages of {target.label} from each other: {format_bytes(found.taken_bytes)} left GPUs by "
        f"page faults and {format_bytes(found.back_bytes)} came back, but only {format_bytes(used)} of it ever moved. GPUs write there."
    )
    numbers = (
        number(facts, "taken from GPUs by page faults", found.taken_bytes, "byte"),
        number(facts, "came back", found.back_bytes, "byte"),
        number(facts, "different bytes that moved", used, "byte"),
        *_waits(facts, wait),
    )
    how = "time in which its page faults on GPUs and the CPU waited"
    said, gate = (target, finding, numbers), _moved_gate(facts, found)
    return _placed(found.row, said, found.gpus, _gain(wait, how), gate)


def _placed(
    row: Mapping[str, Any],
    found: tuple[Target, str, tuple[Number, ...]],
    gpus: Sequence[int],
    gain: Gain,
    gate: str,
) -> Advice:
    """Put together what both kinds share: the remedy and its price."""
    target, finding, numbers = found
    kernel = f" for `{shortened(target.kernel, 60)}`" if target.kernel else ""
    where = [("preferred_location", -1), *(("accessed_by", gpu) for gpu in gpus)]
    return Advice(
        rule=PLACE,
        title=f"Keep {target.label} at the CPU and map it{kernel}",
        finding=finding,
        numbers=numbers,
        rows=(_told(row),),
        remedy=(
            "Set its preferred location to the CPU and map it for the GPU: kernels then reach it over the link, and "
            "nothing moves. The price: each access crosses the link in sectors of 32 byte, each time anew, as a GPU keeps "
            "nothing of the CPU's memory. It pays where a kernel uses little of each page; what it uses all of, leave as it is."
        ),
        calls=(*advise_calls(target, where), ADVISE_NOTE),
        targets=(target,),
        check=f"No migration of {target.label} is left, and the kernel takes less time.",
        gate=gate,
        gain=gain,
        changes=tuple(Change("advise", target, advice, device) for advice, device in where),
    )


def _writers(found: Shuttle) -> str:
    return "neither the CPU nor a GPU" if found.by_cpu else "no GPU"


def _moved_gate(facts: Facts, found: Shuttle) -> str:
    return gate_of("migrations.bytes", found.spared_bytes, facts.summary["migrations"]["bytes"])


def _for(wait: Waited) -> str:
    return f" for `{shortened(wait.kernel, 60)}`" if wait.kernel else ""


def _waits(facts: Facts, wait: Waited) -> tuple[Number, ...]:
    return (
        number(facts, "GPU page faults waited", wait.gpu_ns, "ns", wait.kind),
        number(facts, "CPU page faults waited", wait.cpu_ns, "ns", wait.kind),
    )


def _gain(wait: Waited, how: str) -> Gain:
    return Gain(wait.ns, wait.kind, how)


def _told(row: Mapping[str, Any]) -> Rows:
    return Rows("faults_by_allocation", pl.DataFrame([{name: row[name] for name in _TOLD}]))
