"""What a run cost, in a few numbers: time, faults and bytes, for tables of many runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from nsan.uvm import constants as uvm


def figures(tables: Mapping[str, pl.DataFrame], end_ns: int) -> dict[str, Any]:
    """Sum up the rows of a run as the machine made them, before any was lost or changed.

    Parameters
    ----------
    tables : mapping of str to DataFrame
        Tables of the trace by name, columns as in :mod:`nsan.schema`.
    end_ns : int
        When all was done.

    Returns
    -------
    dict
        duration_ns; kernel_ns (kernels one after the other); last_step_ns (the last range named
        "step", None without one); n_batches; bytes into GPUs by page faults, the density prefetcher
        and the user, bytes out by page faults and user, and evicted.
    """
    moved = tables["migrations"]
    steps = tables["nvtx_ranges"].filter(pl.col("name") == "step").sort("start_ns")
    kernels = tables["kernels"]
    into = pl.col("direction") != "dtoh"
    sums = moved.select(
        in_coherence_bytes=_sum(into, uvm.CAUSE_COHERENCE),
        in_prefetch_bytes=_sum(into, uvm.CAUSE_PREFETCH),
        in_user_bytes=_sum(into, uvm.CAUSE_USER),
        out_bytes=pl.col("bytes").filter(~into).sum(),
        evicted_bytes=_sum(~into, uvm.CAUSE_EVICTION),
    )
    return {
        "duration_ns": end_ns,
        "kernel_ns": int((kernels["end_ns"] - kernels["start_ns"]).sum()),
        "last_step_ns": (
            int(steps["end_ns"][-1] - steps["start_ns"][-1]) if steps.height else None
        ),
        "n_batches": tables["gpu_faults"].height,
        **sums.row(0, named=True),
    }


def _sum(direction: pl.Expr, cause: int) -> pl.Expr:
    return pl.col("bytes").filter(direction & (pl.col("cause_id") == cause)).sum()
