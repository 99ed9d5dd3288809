"""Ping-pong: a small part of memory that processors take from each other again and again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import polars as pl

from nsan.analysis.advisor.advice import Advice, Change, Gain, Rows, Said, Silent, Target
from nsan.analysis.advisor.calls import ADVISE_NOTE, advise_calls
from nsan.analysis.advisor.facts import Facts, gate_of, number, target_of
from nsan.analysis.advisor.shuttles import Shuttle, cpu_side, shuttles
from nsan.analysis.advisor.waits import Part, Waited, copies_of, cpu_waits, gpu_waits, waited
from nsan.text import shortened
from nsan.units import counted, format_bytes, format_time
from nsan.uvm.constants import CAUSE_COHERENCE

PING_PONG: Final = "ping_pong"

_MOST_ROWS: Final = 5

_OWN: Final = (
    "// or, in an allocation of its own: cudaHostAlloc(&part, n_bytes, cudaHostAllocMapped);",
)


def ping_pong(facts: Facts) -> Iterator[Said]:
    """Advise to take what bounces out of its array, and to map it instead of moving it."""
    if not facts.is_recorded("migrations"):
        yield Silent(PING_PONG, "Migrations were not recorded.", is_known=False)
        return
    found = [each for each in shuttles(facts) if each.is_for_a_split]
    if not found:
        reason = "No page was moved to and fro by page faults three times or more, each time soon."
        yield Silent(PING_PONG, reason)
    for each in found:
        yield _split(facts, each)


def _split(facts: Facts, found: Shuttle) -> Advice:
    part = found.cores[0]
    wait = waited(facts, gpu_waits(facts, part), cpu_waits(facts, part))
    target = target_of(found.row, wait.kernel)
    is_whole = 2 * part.n_bytes >= found.row["bytes"]
    offset, where = part.va - found.row["va"], _homes(found)
    what = (
        "Keep it" if is_whole else "Give this part an allocation, and so pages, of its own; keep it"
    )
    return Advice(
        rule=PING_PONG,
        title=_title(target, part, offset, is_whole=is_whole),
        finding=_finding(facts, found, part, wait),
        numbers=(
            number(facts, "part that bounces", part.n_bytes, "byte"),
            number(facts, "moves of one page of it, at most", found.most_moves, "moves"),
            number(facts, "GPU page faults waited", wait.gpu_ns, "ns", wait.kind),
            number(facts, "CPU page faults waited", wait.cpu_ns, "ns", wait.kind),
        ),
        rows=(_telling(found),),
        remedy=(
            f"{what} in one place, and let the others map it: then no page moves, and none waits.{_peers(found)} The price: each access from "
            "the other side crosses the link. If nobody writes it, cudaMemAdviseSetReadMostly is better; if a look "
            "at the end is enough, do not poll."
        ),
        calls=(
            *advise_calls(target, where, offset, part.n_bytes),
            *(_OWN if _is_at_cpu(found) else _without_peers(found, target, offset, part)),
            ADVISE_NOTE,
        ),
        targets=(target,),
        check="ping_pong has no row for these addresses, and the kernel is not held back.",
        gate=_gate(facts, part),
        gain=Gain(
            wait.ns, wait.kind, "time in which page faults on the part waited, on GPUs and the CPU"
        ),
        changes=tuple(
            Change("advise", target, advice, device, offset, part.n_bytes)
            for advice, device in where
        ),
    )


def _title(target: Target, part: Part, offset: int, *, is_whole: bool) -> str:
    kernel = f" that `{shortened(target.kernel, 60)}` uses" if target.kernel else ""
    if is_whole:
        return f"Pin {target.label}{kernel} in one place, and map it"
    return f"Split {format_bytes(part.n_bytes)} at offset {offset} out of {target.label}{kernel}"


def _finding(facts: Facts, found: Shuttle, part: Part, wait: Waited) -> str:
    size = format_bytes(part.n_bytes)
    cpu = f"the CPU{cpu_side(facts, part)}"
    return (
        f"{size} at 0x{part.va:x} to 0x{part.va + part.n_bytes:x} of {target_of(found.row).label} bounce between "
        f"{found.processors(cpu)}: a page of it moved up to {counted(found.most_moves, 'time')}, mostly soon after it had moved before. "
        f"Page faults on it took at most {format_time(wait.ns)}."
    )


def _homes(found: Shuttle) -> list[tuple[str, int]]:
    """Choose where the part stays, and who maps it: at the CPU if it takes part, else at one of the GPUs."""
    if _is_at_cpu(found):
        return [("preferred_location", -1), *(("accessed_by", gpu) for gpu in found.gpus or (0,))]
    first, *others = found.gpus
    return [("preferred_location", first), *(("accessed_by", gpu) for gpu in others)]


def _is_at_cpu(found: Shuttle) -> bool:
    return found.by_cpu or len(found.gpus) < 2


def _peers(found: Shuttle) -> str:
    """Say what it takes that one GPU maps what another one keeps."""
    if _is_at_cpu(found):
        return ""
    return (
        " A GPU maps memory of another one only with peer access (cudaDeviceCanAccessPeer says whether there is any; "
        "cudaDeviceEnablePeerAccess): without it keep the part at the CPU, and map it for each GPU."
    )


def _without_peers(found: Shuttle, target: Target, offset: int, part: Part) -> tuple[str, ...]:
    where = [("preferred_location", -1), *(("accessed_by", gpu) for gpu in found.gpus)]
    lines = advise_calls(target, where, offset, part.n_bytes)
    return ("// or, without peer access:", *(f"// {line}" for line in lines))


def _gate(facts: Facts, part: Part) -> str:
    """Ask that of what page faults themselves brought, half of what is of the part stays away."""
    asked = copies_of(facts, part).filter(pl.col("cause_id") == CAUSE_COHERENCE)
    own = asked.select(pl.col("bytes").sum()).collect().item()
    every = facts.summary["migrations"]["by_cause"].get("coherence", {}).get("bytes")
    return gate_of("migrations.coherence_bytes", own, every)


def _telling(found: Shuttle) -> Rows:
    """Keep the pages that moved most."""
    columns = (
        "va",
        "bytes",
        "n_moves",
        "n_moves_total",
        "moved_bytes",
        "processors",
        "is_thrashing",
    )
    most = found.runs.sort("n_moves_total", "va", descending=[True, False]).head(_MOST_ROWS)
    return Rows("ping_pong", most.select(columns), found.options)
