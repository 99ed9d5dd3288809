"""The rows of a join themselves: how the clocks were aligned, and what lay where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsan.analysis.catalog import analysis
from nsan.analysis.pca.tables import CLOCK_FITS, TENSOR_FAULTS, TENSOR_LIVES, TENSOR_MOVES

if TYPE_CHECKING:
    import polars as pl


@analysis(
    question="How far does the snapshot's clock agree with the trace's?",
    result=CLOCK_FITS,
    reads={"clock_fits": tuple(CLOCK_FITS.schema)},
    complexity="O(n log n) for n moments",
    source="domain.md B.3; allocator.md 6.4, 7",
)
def clock_alignment(clock_fits: pl.LazyFrame) -> pl.LazyFrame:
    """List the ways to align the two clocks, with what each leaves over.

    Parameters
    ----------
    clock_fits : LazyFrame, ``CLOCK_FITS``
        As the join found them.

    Returns
    -------
    LazyFrame, ``CLOCK_FITS``
        Best method first; the join stands on the one that ``is_used``.
    """
    return clock_fits.sort("method", "pid")


@analysis(
    question="Which tensor, or which dead memory, was each migrated byte of?",
    result=TENSOR_MOVES,
    reads={"tensor_moves": tuple(TENSOR_MOVES.schema)},
    source="domain.md E-19",
)
def migrated_parts(tensor_moves: pl.LazyFrame) -> pl.LazyFrame:
    """List the migrations, cut at the blocks of the allocator.

    Parameters
    ----------
    tensor_moves : LazyFrame, ``TENSOR_MOVES``
        As the join found them.

    Returns
    -------
    LazyFrame, ``TENSOR_MOVES``
        By migration and address; the bytes add up to those of all migrations.
    """
    return tensor_moves.sort("migration", "va")


@analysis(
    question="Which tensor, or which dead memory, did each fault row hit?",
    result=TENSOR_FAULTS,
    reads={"tensor_faults": tuple(TENSOR_FAULTS.schema)},
    source="domain.md E-19",
)
def placed_faults(tensor_faults: pl.LazyFrame) -> pl.LazyFrame:
    """List the fault rows with what lay at their page.

    Parameters
    ----------
    tensor_faults : LazyFrame, ``TENSOR_FAULTS``
        As the join found them.

    Returns
    -------
    LazyFrame, ``TENSOR_FAULTS``
        Every fault row of the trace, by start.
    """
    return tensor_faults.sort("start_ns", "end_ns", "processor", "pid", "device_id", "va")


@analysis(
    question="When did each tensor live, on the clock of the trace?",
    result=TENSOR_LIVES,
    reads={"tensor_lives": tuple(TENSOR_LIVES.schema)},
    source="allocator.md 4, 8",
)
def tensors_in_time(tensor_lives: pl.LazyFrame) -> pl.LazyFrame:
    """List the tensors with the part of the program that asked for them.

    Parameters
    ----------
    tensor_lives : LazyFrame, ``TENSOR_LIVES``
        As the join found them.

    Returns
    -------
    LazyFrame, ``TENSOR_LIVES``
        By GPU and allocation.
    """
    return tensor_lives.sort("pid", "device_id", "tensor_id")
