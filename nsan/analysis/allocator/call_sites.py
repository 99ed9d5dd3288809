"""Where in the program a block was asked for: one Python frame out of a recorded call stack.

The innermost frame is always torch's own. What a person looks for is the innermost Python frame of code
that is neither torch nor Python's standard library: theirs, or a library that calls torch.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.result import derived

SITE: Final = pl.Enum(["program", "library", "native", "unattributed"])

SITE_COLUMNS: Final = (
    derived("function", pl.String, "text", "Function that asked for it; see `part`."),
    derived("source_file", pl.String, "text", "Its source file as recorded."),
    derived("source_line", pl.Int64, "number", "Its line."),
    derived(
        "part",
        SITE,
        "label",
        "The frame is the innermost of the program, or, for lack of one, the outermost of torch or "
        "Python; no Python frame at all; no stack recorded.",
    ),
)
"""The frame of a block or of a group of blocks, and how sure it is the program's."""

SITE_READS: Final = ("stack_id", "depth", "function", "source_file", "source_line")
"""What is read of ``stacks``."""

_PYTHON: Final = r"\.py$|^<"
"""Python's frames, ``<stdin>`` and generated code among them; native frames have other endings, or ``??``."""

_TORCH: Final = r"(?:(?:site|dist)-packages|pytorch)[/\\]torch[/\\]"
_STANDARD: Final = r"(?i)lib(?:64)?[/\\]python[^/\\]*[/\\]|python[^/\\]*[/\\]lib[/\\]|^<frozen "
_INSTALLED: Final = r"(?:site|dist)-packages[/\\]"


def call_sites(stacks: pl.LazyFrame) -> pl.LazyFrame:
    """Choose one frame per call stack.

    Parameters
    ----------
    stacks : LazyFrame, ``STACKS``
        In any order.

    Returns
    -------
    LazyFrame
        One row per ``stack_id``, in no order: ``function``, ``source_file`` (String), ``source_line``
        (Int64), ``part`` (``SITE``). Of a stack without a Python frame they are null, and ``part`` is
        "native".
    """
    path, depth = pl.col("source_file"), pl.col("depth")
    standard = path.str.contains(_STANDARD) & ~path.str.contains(_INSTALLED)
    # 0: the program, 1: torch, 2: Python's library, 3: native.
    rank = (
        pl.when(~path.str.contains(_PYTHON).fill_null(value=False))
        .then(3)
        .when(path.str.contains(_TORCH))
        .then(1)
        .when(standard)
        .then(2)
        .otherwise(0)
    )
    is_python = pl.col("_rank") < 3
    return (
        stacks.select(SITE_READS)
        .with_columns(_rank=rank)
        .sort("stack_id", "_rank", pl.when(pl.col("_rank") == 0).then(depth).otherwise(-depth))
        .group_by("stack_id", maintain_order=True)
        .first()
        .select(
            "stack_id",
            *(
                pl.when(is_python).then(pl.col(name)).alias(name)
                for name in ("function", "source_file", "source_line")
            ),
            part=pl.when(pl.col("_rank") == 0)
            .then(pl.lit("program"))
            .when(is_python)
            .then(pl.lit("library"))
            .otherwise(pl.lit("native"))
            .cast(SITE),
        )
    )


def with_call_sites(rows: pl.LazyFrame, stacks: pl.LazyFrame) -> pl.LazyFrame:
    """Add to rows the frame of their call stack.

    Parameters
    ----------
    rows : LazyFrame
        Reads ``stack_id`` (Int64).
    stacks : LazyFrame, ``STACKS``
        In any order.

    Returns
    -------
    LazyFrame
        The same rows, in the same order, with the columns of :data:`SITE_COLUMNS`; rows without a stack are
        "unattributed".
    """
    return rows.join(
        call_sites(stacks), on="stack_id", how="left", maintain_order="left"
    ).with_columns(pl.col("part").fill_null(pl.lit("unattributed", SITE)))
