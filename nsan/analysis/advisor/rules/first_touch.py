"""First touch on the wrong side: memory that the CPU fills, and the GPU then writes anew before it reads any of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from nsan.analysis.advisor.advice import Advice, Change, Gain, Rows, Said, Silent, Target
from nsan.analysis.advisor.calls import PREFETCH_NOTE, address_of, prefetch_calls
from nsan.analysis.advisor.facts import Facts, gate_of, moved_bytes, number, target_of
from nsan.analysis.advisor.kernel_memory import kernel_memory
from nsan.analysis.advisor.waits import Part, Waited, copies_of, gpu_waits, waited
from nsan.analysis.intervals import union
from nsan.text import shortened
from nsan.units import counted, format_bytes, format_time

SIDE: Final = "first_touch_side"

_LEAST_ROWS: Final = 4
"""Fault rows from which on it is no accident that all of them write."""

_TOLD: Final = 0.5
"""Share of the batches that brought an allocation that must be named by a page of it: only these tell its access."""

_FILLED: Final = 0.5
"""Share of an allocation that must have come: the GPU writes most of it."""

_ONCE: Final = 1.5
"""What came more often than this goes to and fro."""

_MOST: Final = 4


@dataclass(frozen=True)
class _Refilled:
    """An allocation that the CPU filled, and of which the GPU's faults only write."""

    allocation: dict[str, Any]
    target: Target
    n_write: int
    gpu: Waited
    cpu_ns: int | None

    @property
    def gain_ns(self) -> int:
        """Time that kernels waited for it, and that the CPU filled it."""
        return self.gpu.ns + (self.cpu_ns or 0)


def first_touch_side(facts: Facts) -> Iterator[Said]:
    """Advise to fill memory where it is written first in earnest.

    Parameters
    ----------
    facts : Facts
        A trace.

    Yields
    ------
    Advice or Silent
        One advice per allocation.
    """
    if not facts.is_recorded("gpu_faults"):
        reason = (
            "GPU faults were not recorded: whether kernels read or write memory first is not known."
        )
        yield Silent(SIDE, reason, is_known=False)
        return
    if not facts.is_recorded("kernels", "migrations"):
        reason = "Kernels or migrations were not recorded: what a kernel wrote first is not known."
        yield Silent(SIDE, reason, is_known=False)
        return
    access = facts.rows_of("faults_by_access")
    if access is not None and (access["access"].cast(pl.String) == "unknown").all():
        reason = "The capture does not say whether a page fault reads or writes."
        yield Silent(SIDE, reason, is_known=False)
        return
    found = [each for row in _candidates(facts) if (each := _refilled(facts, row)) is not None]
    for each in sorted(found, key=lambda each: (-each.gain_ns, each.target.va or 0)):
        yield _advice(facts, each)
    if not found:
        yield Silent(SIDE, "No memory came from the CPU only for a kernel to write it.")


def _candidates(facts: Facts) -> list[dict[str, Any]]:
    """List allocations that came from the CPU, and of which all fault rows write."""
    allocations = facts.rows_of("faults_by_allocation")
    used = kernel_memory(facts)
    if allocations is None or used.is_empty():
        return []
    sums = (
        used.drop_nulls("allocation_id")
        .group_by("allocation_id")
        .agg(
            pl.col("n_read", "n_write", "n_atomic", "n_batches").sum(),
            kernel=pl.col("name").sort_by("n_write", descending=True).first(),
        )
    )
    return (
        allocations.join(sums, on="allocation_id")
        .filter(
            pl.col("n_write") >= _LEAST_ROWS,
            pl.col("n_read") + pl.col("n_atomic") == 0,
            pl.col("n_data_batches") >= _LEAST_ROWS,
            pl.col("unique_in_bytes") >= _FILLED * pl.col("bytes"),
            pl.col("amplification") <= _ONCE,
            # What a GPU touched first, or had evicted, is not the CPU's: no byte of it may be lost.
            pl.col("n_first_touch_batches") == 0,
            pl.col("evicted_bytes").fill_null(0) == 0,
        )
        .sort("in_bytes", "allocation_id", descending=[True, False])
        .head(_MOST)
        .to_dicts()
    )


def _refilled(facts: Facts, row: dict[str, Any]) -> _Refilled | None:
    part = Part.of(row)
    waits = waited(facts, gpu_waits(facts, part))
    if row["n_write"] < _TOLD * waits.n_batches:
        return None
    if not _is_from_cpu(facts, row, part):
        return None
    target = target_of(row, row["kernel"] or "")
    return _Refilled(row, target, row["n_write"], waits, _cpu_ns(facts, part))


def _is_from_cpu(facts: Facts, row: dict[str, Any], part: Part) -> bool:
    """Say whether the CPU filled it: most came to a GPU before anything of its VA block had left one."""
    if facts.is_recorded("cpu_faults"):
        if not row["n_cpu_faults"]:
            return False
    elif facts.is_part:
        return False  # what a GPU did with it before is not known
    left = pl.col("start_ns").filter(pl.col("direction") == "dtoh").min().over("va_block")
    new = (pl.col("direction") == "htod") & (left.is_null() | (pl.col("start_ns") < left))
    came = copies_of(facts, part).select(pl.col("bytes").filter(new).sum()).collect().item()
    return bool(came >= _FILLED * row["bytes"])


def _cpu_ns(facts: Facts, part: Part) -> int | None:
    """Measure how long the CPU may have filled a part: from each of its faults to what the host did next."""
    if not facts.is_recorded("cpu_faults"):
        return None
    came = facts.events("migrations").filter(part.holds(pl.col("bytes")))
    first_ns = came.select(pl.col("start_ns").min()).collect().item()
    before = pl.col("start_ns") < first_ns
    mine = part.holds(1)
    faults = facts.events("cpu_faults").filter(before).select("start_ns", mine=mine)
    calls = facts.events("api_calls").filter(before).select("start_ns", mine=pl.lit(value=False))
    steps = (
        pl.concat([faults, calls])
        .sort("start_ns")
        .select("start_ns", "mine", end_ns=pl.col("start_ns").shift(-1))
        .filter("mine")
        .collect()
    )
    if steps.height < 2:
        return None
    # After its last fault the CPU fills what that fault made, not longer than after any other.
    longest = (steps["end_ns"] - steps["start_ns"])[:-1].max()
    last = pl.min_horizontal("end_ns", pl.col("start_ns") + longest)
    spans = union(steps.lazy().select("start_ns", end_ns=last))
    length = (pl.col("end_ns") - pl.col("start_ns")).sum()
    return int(spans.select(length).collect().item())


def _finding(found: _Refilled) -> str:
    row, label = found.allocation, found.target.label
    text = (
        f"The CPU filled {label}, page faults brought {format_bytes(row['in_bytes'])} of it to the GPU, and all "
        f"{counted(found.n_write, 'fault row')} in it write: none reads what the CPU put there. "
        f"Kernels waited {format_time(found.gpu.ns)} for it"
    )
    if found.cpu_ns is None:
        return f"{text}."
    return f"{text}, and the CPU filled it in at most {format_time(found.cpu_ns)}."


def _advice(facts: Facts, found: _Refilled) -> Advice:
    row, target = found.allocation, found.target
    kernel = f"`{shortened(target.kernel, 60)}`" if target.kernel else "the kernel"
    size, where = row["bytes"], address_of(target)
    used = kernel_memory(facts).filter(pl.col("allocation_id") == row["allocation_id"])
    device = used["device_id"][0]
    numbers = [
        number(facts, "brought to the GPU", row["in_bytes"], "byte"),
        number(facts, "fault rows that write", found.n_write, "rows"),
        number(facts, "kernels waited for it", found.gpu.ns, "ns", found.gpu.kind),
    ]
    how = "time that kernels waited for this memory"
    if found.cpu_ns is None:
        how += "; what the CPU saves was not recorded, and is not in it"
    else:
        how += ", and that the CPU filled it"
        numbers.append(number(facts, "the CPU filled it, at most", found.cpu_ns, "ns"))
    kept = ("name", "bytes", "in_bytes", "n_data_batches", "n_cpu_faults", "va")
    return Advice(
        rule=SIDE,
        title=f"Fill {target.label} on the GPU, not on the CPU",
        finding=_finding(found),
        numbers=tuple(numbers),
        rows=(
            Rows("faults_by_allocation", pl.DataFrame([row]).select(kept)),
            Rows("", used.select("name", "in_bytes", "n_batches", "n_read", "n_write").head(5)),
        ),
        remedy=(
            f"If {kernel} writes all of it, leave the CPU's filling out; else fill it on the GPU. A prefetch first makes its pages "
            "there, for nobody has touched them: no byte is copied, and no kernel faults. That all of a page is written, "
            "the capture does not show."
        ),
        calls=(
            f"// In place of the loop, memset or constructor that fills it on the CPU. {PREFETCH_NOTE}",
            *prefetch_calls([(target, 0, size)], device),
            f"cudaMemsetAsync({where}, 0, {size}, stream);  // or a kernel that writes the first values",
        ),
        targets=(target,),
        check=f"No byte of it moves to the GPU before {kernel} writes it.",
        gate=gate_of("migrations.htod_bytes", row["in_bytes"], moved_bytes(facts, "htod")),
        gain=Gain(found.gain_ns, found.gpu.kind, how),
        changes=(Change("first_touch", target, device=device or 0),),
    )
