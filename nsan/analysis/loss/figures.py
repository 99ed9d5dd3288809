"""How well the density prefetcher predicts the pushes of a process and GPU."""

from __future__ import annotations

from typing import Final

import polars as pl

from nsan.analysis.loss.predictions import THRESHOLD
from nsan.analysis.loss.replay import Replay

KEYS: Final = ("pid", "device_id")


def figures_of(found: Replay, views: pl.DataFrame) -> pl.DataFrame:
    """Add up the counts of the blocks and judge whether the rule holds.

    Parameters
    ----------
    found : Replay
        The replayed pushes.
    views : DataFrame
        Process and GPU of each view.

    Returns
    -------
    DataFrame
        The columns of ``PREFETCH_REPLAY``, by process and GPU.
    """
    place = views.with_row_index("view").cast({"view": pl.Int64})
    counts = found.counts.join(place, on="view").group_by(KEYS).agg(pl.col("^n_.*$").sum())
    sums = ("n_missed", "n_missed_blocks", "n_sampled", "n_blocks")
    mine = pl.col("threshold") == THRESHOLD
    misses = (
        found.misses.join(place, on="view")
        .group_by(*KEYS, "threshold")
        .agg(pl.col(sums).sum())
        .group_by(KEYS)
        .agg(
            pl.col(sums).filter(mine).sum(),
            best=pl.col("n_missed").filter(~mine).min(),
            best_blocks=pl.col("n_missed_blocks").filter(~mine).min(),
        )
    )
    # One lost row can spoil all that follows in its block, or a long hole something in every block.
    by_push = _fits("n_missed", "best", "n_sampled")
    by_block = _fits("n_missed_blocks", "best_blocks", "n_blocks")
    holds = (by_push | by_block) & (pl.col("n_prefetched_pushes") > 0)
    return (
        counts.join(misses, on=list(KEYS), nulls_equal=True)
        .with_columns(
            n_mismatched_pushes=pl.col("n_pushes") - pl.col("n_exact_pushes"),
            n_unexplained_pushes="n_contradicted_pushes",
            rule_holds=holds,
        )
        .sort(KEYS)
    )


def _fits(missed: str, best: str, all_of: str) -> pl.Expr:
    """Say whether the default setting misses few, and no more than the best other setting.

    Where two do equally well, what this one cannot predict the other cannot either.
    """
    return (pl.col(missed) <= pl.col(best)) & (2 * pl.col(missed) <= pl.col(all_of))
