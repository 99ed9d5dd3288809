"""Prefetch before use: kernels that wait for page faults on memory whose use is known before the launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import polars as pl

from nsan.analysis.advisor.advice import Advice, Change, Gain, Rows, Said, Silent
from nsan.analysis.advisor.facts import Facts, number, target_of

BEFORE_USE: Final = "prefetch_before_use"


def before_use(facts: Facts) -> Iterator[Said]:
    """Advise a prefetch of allocations whose page faults a kernel waits for."""
    kernels, allocations = (
        facts.rows_of("faults_by_kernel"),
        facts.rows_of("faults_by_allocation"),
    )
    if kernels is None or allocations is None:
        yield Silent(BEFORE_USE, "No page fault brought memory to a kernel.")
        return
    kernel = kernels.sort("exposed_ns", descending=True, nulls_last=True).row(0, named=True)
    for row in (
        allocations.filter(pl.col("part") != "unattributed")
        .sort("in_bytes", descending=True)
        .to_dicts()
    ):
        target = target_of(row, kernel["name"])
        call = f"cudaMemPrefetchAsync({target.pointer}, {row['bytes']}, device, stream);"
        yield Advice(
            rule=BEFORE_USE,
            title=f"Prefetch {target.label} before `{target.kernel}`",
            finding="",
            numbers=(number(facts, "waited for page faults", kernel["exposed_ns"], "ns"),),
            rows=(Rows("faults_by_kernel", kernels.head(1)),),
            remedy="",
            calls=(call,),
            targets=(target,),
            check="No page fault is left in the kernel.",
            gate="kernels.waiting_ns>-50%",
            gain=Gain(kernel["exposed_ns"], "derived", "time in which page faults waited"),
            changes=(Change("prefetch", target),),
        )
