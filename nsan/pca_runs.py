"""Runs opened as ledgers: what each step cost, and what of it the caching allocator did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.analysing import analyse
from nsan.analysis.pca.costs import CostInput, step_costs
from nsan.analysis.pca.first_touch import ledger_input
from nsan.errors import UsageError
from nsan.info import MODEL_KIND
from nsan.joined import Joined, join
from nsan.opening import open_trace

if TYPE_CHECKING:
    from nsan.pca_found import Found
    from nsan.pca_pairs import Pair
    from nsan.trace import Trace

UNKNOWN_WITHOUT_SNAPSHOT: Final = (
    "n_shared_first_touch",
    "n_dead_rows",
    "n_tensors",
    "tensor_bytes",
    "reused_bytes",
    "dead_in_bytes",
    "dead_out_bytes",
    "dead_in_ns",
    "dead_out_ns",
    "neighbour_in_bytes",
    "neighbour_out_bytes",
    "neighbour_in_ns",
    "neighbour_out_ns",
    "new_only_ns",
    "n_packed_tensors",
    "n_packed_new",
    "mixed_dead_in_bytes",
    "mixed_dead_out_bytes",
    "data_only_ns",
    "rest_ns",
)
"""Columns of a ledger that need the allocator's history: a run with a cache does not have them without."""


@dataclass(frozen=True)
class Run:
    """A run that was opened; only its ledger is kept in memory.

    Attributes
    ----------
    found : Found
        What it is.
    trace : Trace
        Lazy.
    ledger : DataFrame, ``STEP_LEDGER`` with the columns of ``STEP_COSTS``
        One row per step and GPU.
    """

    found: Found
    trace: Trace
    ledger: pl.DataFrame

    @property
    def n_steps(self) -> int:
        """Steps that it has."""
        return int(self.ledger["step"].n_unique())


def open_run(found: Found, *, step: str = "step", progress: bool = False) -> Run:
    """Open a run and make its ledger.

    Parameters
    ----------
    found : Found
        What :func:`nsan.pca_found.find_runs` gave.
    step : str, default "step"
        NVTX range of a step.
    progress : bool, default False
        Show a bar on stderr while a trace is imported.

    Returns
    -------
    Run
        What needs a snapshot is null where a run with a cache has none.

    Raises
    ------
    NotAlignedError
        If the snapshot is of another run.
    UsageError
        If the trace has no such range; the message lists those that it has.
    """
    trace = open_trace(found.trace, progress=progress)
    joined = join(trace, found.snapshot)
    ledger = analyse(joined, "step_ledger", options={"step": step}).collect()
    if not ledger.height:
        raise _no_step(found, trace, step)
    costs = step_costs(ledger, _cost_input(joined)).drop("pid", "device_id", "step")
    ledger = pl.concat([ledger, costs], how="horizontal")
    if found.condition.side == "on" and found.condition.allocator != "raw" and not found.snapshot:
        ledger = ledger.with_columns(
            pl.lit(None, pl.Int64).alias(name) for name in UNKNOWN_WITHOUT_SNAPSHOT
        )
    return Run(found, trace, ledger)


def _cost_input(joined: Joined) -> CostInput:
    """Collect what the costs of steps stand on."""
    tables = (
        *("tensor_moves", "tensor_faults", "tensor_lives"),
        *("allocations", "gpu_faults", "migrations"),
    )
    times = ("pid", "device_id", "start_ns", "end_ns")
    work = [getattr(joined, name).select(times) for name in ("kernels", "copies", "memsets")]
    found = ledger_input(*(getattr(joined, name) for name in tables))
    return CostInput(found, pl.concat(work), joined.api_calls)


def is_modelled(run: Run) -> bool:
    """Say whether the driver model wrote a run's trace."""
    return run.trace.info.kind == MODEL_KIND


def gives_advice(run: Run) -> bool:
    """Say whether a run tells the driver where memory belongs."""
    calls = run.trace.api_calls.select(pl.col("name").str.contains("MemAdvise").any())
    return bool(calls.collect().item())


def _no_step(found: Found, trace: Trace, step: str) -> UsageError:
    counts = trace.nvtx_ranges.drop_nulls("name").group_by("name").len()
    names = counts.sort(["len", "name"], descending=[True, False]).head(8).collect()["name"]
    way = (
        f"It has {', '.join(map(repr, names))}: choose with --step NAME."
        if len(names)
        else "It has no range at all: mark the steps with torch.cuda.nvtx.range('step'), and record "
        "with `nsys profile -t cuda,nvtx ...`."
    )
    return UsageError(f"{found.name} has no NVTX range {step!r}. {way}")


def open_pairs(
    pairs: Sequence[Pair],
    *,
    step: str = "step",
    tell: Callable[[str], None] | None = None,
    progress: bool = False,
) -> Iterator[tuple[Pair, tuple[Run, ...], tuple[Run, ...]]]:
    """Open the runs of pairs, each once.

    Parameters
    ----------
    pairs : sequence of Pair
        What :func:`nsan.pca_pairs.pairs_of` gave.
    step : str, default "step"
        NVTX range of a step.
    tell : callable, optional
        Called with the name of each run before it is opened.
    progress : bool, default False
        Show a bar while a trace is imported.

    Yields
    ------
    (Pair, tuple of Run, tuple of Run)
        In the order of the pairs: runs without and with the caching allocator.
    """
    opened: dict[Path, Run] = {}

    def each(found: Found) -> Run:
        if found.trace not in opened:
            if tell is not None:
                tell(found.name)
            opened[found.trace] = open_run(found, step=step, progress=progress)
        return opened[found.trace]

    for pair in pairs:
        yield pair, tuple(map(each, pair.off)), tuple(map(each, pair.on))
